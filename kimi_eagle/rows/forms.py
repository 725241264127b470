"""The forms that records have, and what each says: turns, tools, a system text. Pure.

| form         | a record has                                                                  |
|--------------|-------------------------------------------------------------------------------|
| `messages`   | `messages` of role/content (OpenAI), or `conversations`; `tools`, `system`    |
| `sharegpt`   | `conversations` of from/value, function_call and observation; `tools`, `system` |
| `alpaca`     | `instruction`, `input`, `output` or `response`; `history`, `system`           |
| `pairs`      | `prompt` or `question`, and `response`, `completion` or `answer`              |
| `preference` | one of the first three, and `chosen` in place of the last answer              |
| `tau_bench`  | `traj` of OpenAI messages                                                     |
| `glaive`     | `chat`, one text, and `system`, which declares functions                      |

`auto` goes by which of these a record has, in the order of the table but for `preference`, which it
looks for first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kimi_eagle.rows.buckets import Rejected
from kimi_eagle.rows.glaive import glaive_turns

Form = Literal[
    "auto", "messages", "sharegpt", "alpaca", "pairs", "preference", "tau_bench", "glaive"
]

_ASKED = ("prompt", "question", "query")
_ANSWERED = ("response", "completion", "answer", "output")


@dataclass(frozen=True)
class Spoken:
    """What a record says, its turns in whatever form they have."""

    turns: list[Any]
    tools: Any = None
    system: Any = None


def spoken(value: Mapping[str, Any], form: str) -> Spoken:
    """A record, read as a form.

    Raises:
        Rejected: the record has not what the form needs.
    """
    if form == "auto":
        form = _form_of(value)
    if form == "glaive":
        turns, tools, said = glaive_turns(value)
        return Spoken(turns, tools, said)
    read = {
        "messages": _listed,
        "sharegpt": _listed,
        "alpaca": _alpaca,
        "pairs": _pair,
        "preference": _preference,
        "tau_bench": _trace,
    }[form]
    return Spoken(read(value), value.get("tools"), value.get("system"))


def _form_of(value: Mapping[str, Any]) -> str:
    given = {name for name, item in value.items() if item is not None}
    if "chosen" in given and "rejected" in given:
        return "preference"
    if given & {"messages", "conversations"}:
        return "messages"
    if "instruction" in given:
        return "alpaca"
    if given.intersection(_ASKED) and given.intersection(_ANSWERED):
        return "pairs"
    if "traj" in given:
        return "tau_bench"
    if isinstance(value.get("chat"), str):
        return "glaive"
    if "messages_display" in given:
        raise Rejected("unknown_form", "messages_display shows a trace without its tool calls")
    raise Rejected("unknown_form", f"it has {', '.join(sorted(map(str, given))[:8]) or 'nothing'}")


def _listed(value: Mapping[str, Any]) -> list[Any]:
    turns = value.get("messages") or value.get("conversations")
    if not isinstance(turns, list) or not turns:
        raise Rejected("no_messages")
    return turns


def _trace(value: Mapping[str, Any]) -> list[Any]:
    turns = value.get("traj")
    if not isinstance(turns, list) or not turns:
        raise Rejected("no_messages", "no traj")
    return turns


def _one_of(value: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """What the one of several keys holds that a record has.

    Raises:
        Rejected: two of them, which differ.
    """
    given = [(name, value[name]) for name in names if value.get(name) is not None]
    for name, item in given[1:]:
        if item != given[0][1]:
            raise Rejected("bad_message", f"{given[0][0]} and {name} differ")
    return given[0][1] if given else None


def _asked(value: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The turns of an Alpaca record before its answer."""
    instruction, extra = value.get("instruction"), value.get("input")
    if not isinstance(instruction, str) or not isinstance(extra, str | None):
        raise Rejected("no_messages", "instruction and input must be text")
    turns: list[dict[str, Any]] = []
    history = value.get("history")
    if not isinstance(history, list | None):
        raise Rejected("bad_message", "history must be a list")
    for pair in history or []:
        if not isinstance(pair, list) or len(pair) != 2:
            raise Rejected("bad_message", "history holds pairs of question and answer")
        turns.append({"role": "user", "content": pair[0]})
        turns.append({"role": "assistant", "content": pair[1]})
    if extra and extra.strip():
        instruction = f"{instruction}\n\n{extra}"
    return [*turns, {"role": "user", "content": instruction}]


def _alpaca(value: Mapping[str, Any]) -> list[dict[str, Any]]:
    answer = _one_of(value, ("output", "response"))
    if not isinstance(answer, str):
        raise Rejected("no_messages", "output, or response, must be text")
    return [*_asked(value), {"role": "assistant", "content": answer}]


def _pair(value: Mapping[str, Any]) -> list[Any]:
    asked, answered = _one_of(value, _ASKED), _one_of(value, _ANSWERED)
    return [*_side(asked, "user"), *_side(answered, "assistant")]


def _side(said: Any, role: str) -> list[Any]:
    """One side of a pair: a text, a turn, or a list of turns."""
    if isinstance(said, str):
        return [{"role": role, "content": said}]
    if isinstance(said, Mapping):
        return [said]
    if isinstance(said, list) and said:
        return said
    raise Rejected("no_messages", f"nothing that the {role} says")


def _preference(value: Mapping[str, Any]) -> list[Any]:
    chosen = value.get("chosen")
    if isinstance(chosen, list) and value.get("rejected") and not value.get("prompt"):
        asked: list[Any] = []  # whole conversations, as TRL has them
        if value.get("messages") or value.get("conversations"):
            asked = _listed(value)
    elif value.get("messages") or value.get("conversations"):
        asked = _listed(value)
    elif value.get("instruction") is not None:
        asked = _asked(value)
    else:
        asked = _side(_one_of(value, _ASKED), "user")
    return [*asked, *_side(chosen, "assistant")]
