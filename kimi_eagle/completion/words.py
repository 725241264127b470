"""What the last word of a command line could become, by the parser that would read the line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kimi_eagle.completion.lookup import Candidate, Lookup, stages_of

# Of which kinds the artifacts are that a command takes; nothing: runs too.
_ARTIFACTS: dict[str, tuple[str, ...]] = {
    "check-rows": ("rows",),
    "compare": ("checkpoint", "evaluation"),
    **dict.fromkeys(("lineage", "record", "reproduce", "pin", "unpin", "runs"), ()),
}


@dataclass
class Answer:
    """Words, and what else a shell should offer itself."""

    words: list[Candidate] = field(default_factory=list)
    files: bool = False
    folders: bool = False
    goes_on: bool = False
    """Whether a word is not at its end with what is offered, so that no blank belongs after it."""

    def lines(self, *, described: bool) -> list[str]:
        """As the scripts read it: what else to offer, then a word a line, with its meaning after
        a tab."""
        flags = [name for name in ("files", "folders") if getattr(self, name)]
        first = " ".join(flags + ["nospace"] * self.goes_on) or "words"
        rest = [f"{word}\t{what}" if described and what else word for word, what in self.words]
        return [first, *rest]


@dataclass
class _Line:
    """A command line as far as it was read."""

    parser: argparse.ArgumentParser
    command: str = ""
    given: dict[str, str] = field(default_factory=dict)
    """Values by what they are for: of arguments and options alike."""
    used: set[str] = field(default_factory=set)
    """Options that were given."""
    waiting: argparse.Action | None = None
    """The option whose value comes next."""
    place: int = 0
    """How many arguments there were."""
    only_arguments: bool = False

    def argument(self) -> argparse.Action | None:
        """Which argument comes next."""
        arguments = [
            action
            for action in self.parser._actions
            if not action.option_strings and action.help != argparse.SUPPRESS
        ]
        if self.place < len(arguments):
            return arguments[self.place]
        repeated = arguments and arguments[-1].nargs in ("*", "+")
        return arguments[-1] if repeated else None


def complete(
    parser_of: Callable[[Iterable[str]], argparse.ArgumentParser],
    commands: Sequence[str],
    words: Sequence[str],
) -> Answer:
    """Complete the last of `words`, which follow the program's name.

    Args:
        parser_of: makes the parser of some commands; fewer are made faster.
        commands: every one there is.
    """
    *before, current = words or [""]
    among = [word for word in before if word in commands]
    line = _read(parser_of(among[:2] or commands), before)
    if line is None:
        return Answer()
    if among and not line.command:
        line = _read(parser_of(commands), before) or line
    return _complete(line, current)


def _read(parser: argparse.ArgumentParser, words: Sequence[str]) -> _Line | None:
    """Read what stands before the last word; None where that is no command."""
    line = _Line(parser)
    for word in words:
        if line.waiting is not None:
            line.given[line.waiting.dest] = word
            line.waiting = None
        elif word == "--" and not line.only_arguments:
            line.only_arguments = True
        elif word.startswith("-") and not line.only_arguments:
            _take_option(line, word)
        elif not _take_argument(line, word):
            return None
    return line


def _take_option(line: _Line, word: str) -> None:
    name, equals, value = word.partition("=")
    action = line.parser._option_string_actions.get(name)
    if action is None:
        return
    line.used.update(action.option_strings)
    if equals:
        line.given[action.dest] = value
    elif action.nargs != 0:
        line.waiting = action


def _take_argument(line: _Line, word: str) -> bool:
    action = line.argument()
    if isinstance(action, argparse._SubParsersAction):
        parser = action.choices.get(word)
        if parser is None:
            return False
        line.parser, line.place = parser, 0
        line.command = line.command or word
        line.used.clear()
        return True
    if action is not None:
        line.given.setdefault(action.dest, word)
        line.place += 1
    return True


def _complete(line: _Line, current: str) -> Answer:
    if line.waiting is not None:
        return _values(line, line.waiting, current)
    if current.startswith("-") and not line.only_arguments:
        name, equals, value = current.partition("=")
        if equals:
            action = line.parser._option_string_actions.get(name)
            found = Answer() if action is None else _values(line, action, value)
            found.words = [(f"{name}={word}", what) for word, what in found.words]
            return found
        return Answer(_starting(_options(line), current))
    argument = line.argument()
    return Answer() if argument is None else _values(line, argument, current)


def _options(line: _Line) -> list[Candidate]:
    found = []
    for action in line.parser._actions:
        again = isinstance(action, argparse._AppendAction)
        if action.help == argparse.SUPPRESS or (not again and line.used & {*action.option_strings}):
            continue
        found += [
            (name, action.help or "") for name in action.option_strings if name.startswith("--")
        ]
    return found


def _values(line: _Line, action: argparse.Action, current: str) -> Answer:
    """What a value of an option, or an argument, could be."""
    if isinstance(action, argparse._SubParsersAction):
        return Answer(
            _starting([(item.dest, item.help or "") for item in action._choices_actions], current)
        )
    if action.choices is not None:
        return Answer(_starting([(str(item), "") for item in action.choices], current))
    root = Path(line.given.get("root") or os.environ.get("KIMI_EAGLE_ROOT") or "runs").expanduser()
    lookup = Lookup(root)
    match action.metavar:
        case "HASH":
            artifacts = lookup.artifacts(current, _ARTIFACTS.get(line.command, ()))
            runs = [] if line.command in _ARTIFACTS else lookup.runs(current)
            return Answer([*artifacts, *runs])
        case "RUN":
            latest = _starting([("latest", "the newest run")], current)
            return Answer([*latest, *lookup.runs(current)])
        case "A" | "B":
            return Answer([*lookup.artifacts(current), *lookup.runs(current)], files=True)
        case "STAGE":
            return Answer(_starting(_stages(line, lookup), current))
        case "PATH=VALUE":
            return _overrides(line, current)
        case "DIR" | "FOLDER":
            return Answer(folders=True)
    if action.dest == "name" and line.command == "runs":
        return Answer(_starting(lookup.names(), current))
    return Answer(files=action.metavar in ("MANIFEST", "FILE") or action.type is Path)


def _stages(line: _Line, lookup: Lookup) -> list[Candidate]:
    if "manifest" in line.given:
        return stages_of(Path(line.given["manifest"]).expanduser())
    return lookup.stages(line.given.get("run"))


def _overrides(line: _Line, current: str) -> Answer:
    if "manifest" not in line.given or current.count(".") > 1:
        return Answer()
    names = stages_of(Path(line.given["manifest"]).expanduser())
    return Answer(
        _starting([(f"stages.{name}.", "stage") for name, _ in names], current), goes_on=True
    )


def _starting(found: Iterable[Candidate], current: str) -> list[Candidate]:
    return [item for item in found if item[0].startswith(current)]
