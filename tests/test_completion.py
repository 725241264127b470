"""Completion: what is offered, in the shells themselves, and how long it takes."""

from __future__ import annotations

import os
import pty
import select
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import Answer, Project
from test_import_safety import SLOW

from kimi_eagle.cli import COMMANDS, build_parser
from kimi_eagle.commands.completion import SHELLS
from kimi_eagle.completion.answer import _joined
from kimi_eagle.completion.lookup import _stage_lines
from kimi_eagle.registry.schema import FILE

SECONDS = 20


@pytest.fixture(scope="module")
def done(first_run: tuple[Project, Answer]) -> Project:
    return first_run[0]


def offered(project: Project, *words: str, shell: str = "zsh") -> tuple[str, list[str]]:
    """What else a shell is to offer, and the words."""
    asked = project.cli_bare("_complete", shell, "--root", str(project.root), *words)
    first, *lines = asked.splitlines()
    return first, [line.split("\t")[0] for line in lines]


@pytest.mark.parametrize("words", [[""], ["--json", ""], ["--color", "never", ""]])
def test_commands_come_first(done: Project, words: list[str]) -> None:
    assert offered(done, *words) == ("words", list(COMMANDS))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_offers_its_options(done: Project, command: str) -> None:
    (commands,) = (item for item in build_parser()._actions if isinstance(item.choices, dict))
    parser = commands.choices[command]
    options = {name for name in parser._option_string_actions if name.startswith("--")}
    flags, found = offered(done, command, "--")
    assert set(found) == options
    assert flags == "words"


def test_hashes_stages_names_and_choices(first_run: tuple[Project, Answer]) -> None:
    project, answer = first_run
    run = answer.json["run_id"]
    made = {stage: next(iter(found.values())) for stage, found in answer.outputs.items()}
    starts = [made[name][:12] for name in ("vocab", "rows", "head")]
    assert offered(project, "show", "") == ("words", [*starts, run[:12]])
    assert offered(project, "lineage", made["rows"][:4]) == ("words", [made["rows"][:12]])
    assert offered(project, "lineage", made["rows"][:40])[1] == [made["rows"][:40]]
    assert offered(project, "logs", "")[1] == ["latest", run[:12]]
    assert offered(project, "logs", run[:6], "")[1] == ["head", "rows", "vocab"]
    assert offered(project, "logs", "latest", "r")[1] == ["rows"]
    assert offered(project, "runs", "--stage", "v")[1] == ["vocab"]
    assert offered(project, "runs", "--name", "")[1] == ["light"]
    assert offered(project, "runs", "--status", "d")[1] == ["done"]
    assert offered(project, "runs", "--status=d")[1] == ["--status=done"]
    assert offered(project, "check-rows", "")[1] == [made["rows"][:12]]
    assert offered(project, "compare", "")[1] == []
    assert offered(project, "diff", made["head"][:8]) == ("files", [made["head"][:12]])
    assert offered(project, "why", str(project.manifest), "h")[1] == ["head"]
    assert offered(project, "plan", str(project.manifest), "--set", "stages.v") == (
        "nospace",
        ["stages.vocab."],
    )


def test_files_and_folders_are_left_to_the_shell(done: Project) -> None:
    assert offered(done, "submit", "") == ("files", [])
    assert offered(done, "init", "") == ("folders", [])
    assert offered(done, "registry", "backup", "") == ("files", [])
    assert offered(done, "registry", "")[1] == ["check", "rebuild", "backup", "restore"]
    assert offered(done, "reproduce", "abcd", "--sources", "") == ("folders", [])


@pytest.mark.parametrize(
    "words",
    [["nothing", ""], ["pin", "abcd", "more", ""], ["runs", "--limit", ""], ["--", "--"], ["show"]],
)
def test_nothing_more_is_offered_than_fits(done: Project, words: list[str]) -> None:
    expected = ["show"] if words == ["show"] else []
    assert offered(done, *words) == ("words", expected)


def test_an_option_is_offered_again_only_where_it_may_be_repeated(done: Project) -> None:
    found = offered(done, "plan", "--json", "--set", "a=1", "m.yaml", "--")[1]
    assert "--json" not in found
    assert "--set" in found


def test_hashes_that_begin_alike_are_offered_as_long_as_it_takes(made: Project) -> None:
    with sqlite3.connect(made.root / FILE) as connection:
        for last in "01":
            connection.execute(
                "insert into artifacts values (?, 'rows', 1, '{}', '', 'present', '', null)",
                ("f" * 30 + last + "f" * 33,),
            )
    connection.close()
    assert offered(made, "pin", "ffff")[1] == ["f" * 30 + "1", "f" * 30 + "0"]


@pytest.mark.parametrize("text", [None, b"garbage" * 999, b""])
def test_a_registry_that_cannot_be_read_offers_nothing(
    project: Project, text: bytes | None
) -> None:
    if text is not None:
        project.root.mkdir()
        (project.root / FILE).write_bytes(text)
    assert offered(project, "show", "") == ("words", [])
    assert not (project.root / (FILE + "-wal")).exists()
    assert text is None or (project.root / FILE).read_bytes() == text


def test_bash_parts_words_at_more_than_blanks() -> None:
    assert _joined(["runs", "--status", "=", "d"]) == (["runs", "--status=d"], True)
    assert _joined(["runs", "--status", "="]) == (["runs", "--status="], True)
    assert _joined(["x", "http", ":", "//h", ":", "80", "next"]) == (
        ["x", "http://h:80", "next"],
        False,
    )
    assert _joined([""]) == ([""], False)
    assert _joined([]) == ([], False)


def test_stages_are_read_off_a_manifests_lines() -> None:
    text = "stages:\n  # a note\n  rows: {kind: prepare}\n\n  draft:\n    kind: train\n"
    lines = f"name: x\n{text}logging:\n  a: 1\n".splitlines()
    assert list(_stage_lines(lines)) == ["rows", "draft"]


def test_it_is_light(done: Project) -> None:
    code = (
        "import sys\n"
        "from kimi_eagle.cli import main\n"
        "main(['_complete', 'zsh', '--root', sys.argv[1], 'show', ''])\n"
        f"slow = {{*{SLOW!r}, 'yaml', 'asyncio', 'blake3'}} & set(sys.modules)\n"
        "assert not slow, slow\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(done.root)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.splitlines()) == 5


# In the shells themselves


START = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}
SETUP = {
    "bash": 'bind "set bell-style none"; eval "$(kimi-eagle completion bash)"',
    "zsh": "autoload -Uz compinit; compinit -u -D; source <(kimi-eagle completion zsh)",
    "fish": "kimi-eagle completion fish | source",
}


class Shell:
    """An interactive shell on a terminal, with `kimi-eagle` in its path.

    What completion made of a line is seen by what the program is given when the line is entered.
    """

    def __init__(self, name: str, project: Project, folder: Path):
        self._given = folder / "given"
        program = folder / "bin" / "kimi-eagle"
        program.parent.mkdir()
        program.write_text(
            "#!/bin/sh\n"
            'case "$1" in\n'
            f'completion) exec "{sys.executable}" -m kimi_eagle "$@" ;;\n'
            f'_complete) "{sys.executable}" -m kimi_eagle "$@"; : > "{self._given}.asked" ;;\n'
            f'ready) printf "%s\\n" "$@" > "{self._given}.ready" ;;\n'
            f'*) printf "%s\\n" "$@" > "{self._given}.part"; mv "{self._given}.part" '
            f'"{self._given}" ;;\n'
            "esac\n"
        )
        program.chmod(0o755)
        self.seen = b""
        child, self._terminal = pty.fork()
        if child == 0:
            os.chdir(project.folder)
            environment = {
                **os.environ,
                "PATH": f"{program.parent}:{os.environ['PATH']}",
                "HOME": str(folder),
                "XDG_CONFIG_HOME": str(folder),
                "XDG_DATA_HOME": str(folder),
                "KIMI_EAGLE_ROOT": str(project.root),
                "TERM": "xterm",
            }
            os.execvpe(START[name][0], START[name], environment)
        self._child = child
        self._type(SETUP[name] + "\n")
        self._type("kimi-eagle ready\n")
        self._wait(Path(f"{self._given}.ready"))

    def enter(self, line: str) -> list[str]:
        """Type a line, tabs included, and enter it; the arguments that the program is given."""
        self._given.unlink(missing_ok=True)
        asked = Path(f"{self._given}.asked")
        for part in line.split("\t")[:-1]:
            asked.unlink(missing_ok=True)
            self._type(part + "\t")
            self._wait(asked)
            self._read(0.2)  # what it makes of the answer; then it reads keys again
        self._type(line.split("\t")[-1] + "\n")
        self._wait(self._given)
        return self._given.read_text().splitlines()

    def close(self) -> None:
        os.close(self._terminal)
        with suppress(ProcessLookupError):
            os.kill(self._child, 9)
        os.waitpid(self._child, 0)

    def _type(self, keys: str) -> None:
        os.write(self._terminal, keys.encode())

    def _read(self, seconds: float) -> None:
        """Read what the shell shows until it has been silent for so long."""
        while select.select([self._terminal], [], [], seconds)[0]:
            self.seen += os.read(self._terminal, 65536)

    def _wait(self, path: Path) -> None:
        deadline = time.monotonic() + SECONDS
        while not path.exists():
            assert time.monotonic() < deadline, self.seen.decode(errors="replace")
            self._read(0.05)


@pytest.fixture(scope="module", params=SHELLS)
def shell(
    request: pytest.FixtureRequest, done: Project, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shell]:
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    started = Shell(request.param, done, tmp_path_factory.mktemp(request.param))
    yield started
    started.close()


@pytest.mark.slow
def test_a_shell_completes_commands_files_and_values(shell: Shell) -> None:
    assert shell.enter("kimi-eagle valid\tmanif\t") == ["validate", "manifest.yaml"]
    assert shell.enter("kimi-eagle runs --stat\tfai\t") == ["runs", "--status", "failed"]
    assert shell.enter("kimi-eagle runs --status=fai\t") == ["runs", "--status=failed"]


@pytest.mark.slow
def test_a_shell_completes_hashes_and_stages(
    shell: Shell, first_run: tuple[Project, Answer]
) -> None:
    rows = first_run[1].outputs["rows"]["rows"]
    assert shell.enter(f"kimi-eagle show {rows[:5]}\t") == ["show", rows[:12]]
    assert shell.enter("kimi-eagle logs lat\tro\t") == ["logs", "latest", "rows"]
    line = "kimi-eagle plan manifest.yaml --set stages.voc\tsize=128"
    assert shell.enter(line)[2:] == ["--set", "stages.vocab.size=128"]
