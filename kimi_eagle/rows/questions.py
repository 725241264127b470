"""What is asked in a record: its turns without the answers that it may have. Pure.

Where a conversation is there, each of its user turns is asked, and what the record says was
answered is not read. An assistant's turn that opens a conversation is context, as in `prepare`.
What follows a tool's return is not asked: the return answers a call of another's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kimi_eagle.rows.conversations import (
    Conversation,
    Rejected,
    _alpaca,
    _message,
    _role,
    _Text,
    _tools,
)


@dataclass(frozen=True)
class Questions:
    """One conversation's questions, in order."""

    turns: tuple[tuple[dict[str, Any], ...], ...]
    """The messages that come before each answer and after the one before it."""
    tools: tuple[Any, ...] = ()
    repaired: int = 0
    """Lone surrogates that were replaced by U+FFFD."""
    unasked: int = 0
    """User turns that come after a tool's return."""

    def conversation(self) -> Conversation:
        """All that is asked, as one conversation without answers."""
        return Conversation(tuple(m for turn in self.turns for m in turn), self.tools)

    def document(self) -> dict[str, Any]:
        return {"turns": [list(turn) for turn in self.turns], "tools": list(self.tools)}

    @staticmethod
    def read(document: Mapping[str, Any]) -> Questions:
        """From what `document` gave."""
        return Questions(tuple(map(tuple, document["turns"])), tuple(document["tools"]))


def read_questions(value: Any, form: str) -> Questions:
    """What a record asks.

    Args:
        form: as of `read_conversation`; `messages` also takes `turns` (user turns alone, as
            MT-Bench has them) and `prompt` (one).

    Raises:
        Rejected: with the reason.
    """
    if not isinstance(value, Mapping):
        raise Rejected("not_a_record", f"a {type(value).__name__}")
    text = _Text()
    turns: list[list[dict[str, Any]]] = []
    given: list[dict[str, Any]] = []
    system = value.get("system")
    if isinstance(system, str) and system.strip():
        given.append({"role": "system", "content": text.clean(system)})
    raw = _raw_turns(value, form)
    unasked = 0
    for index, turn in enumerate(raw):
        role = _role(turn) if isinstance(turn, Mapping) else ""
        if role == "tool":
            unasked = sum(isinstance(t, Mapping) and _role(t) == "user" for t in raw[index:])
            break
        if role == "assistant":
            if _asks(given):
                turns.append(given)
                given = []
            elif not turns:
                given.append(_opening(turn, text))
            continue
        if role == "system" and given and given[0]["role"] == "system" and index == 0:
            raise Rejected("two_systems", "`system` beside the turns, and a system turn")
        given.append(_message(turn, text))
    if _asks(given):
        turns.append(given)
    if not turns:
        raise Rejected("no_user_turn")
    tools = _tools(value.get("tools"), text)
    return Questions(tuple(map(tuple, turns)), tools, text.repaired, unasked)


def _asks(given: list[dict[str, Any]]) -> bool:
    return any(message["role"] == "user" for message in given)


def _opening(turn: Any, text: _Text) -> dict[str, Any]:
    message = _message(turn, text)
    if message.get("tool_calls"):
        raise Rejected("bad_tools", "a tool call before anything was asked")
    return message


def _raw_turns(value: Mapping[str, Any], form: str) -> list[Any]:
    if form == "alpaca":
        return list(_alpaca({"output": "", **value}))
    turns = value.get("messages") or value.get("conversations")
    if not turns and form == "messages":
        asked = value.get("turns") or [value.get("prompt")]
        if isinstance(asked, list) and all(isinstance(item, str) and item for item in asked):
            # An answer comes after each.
            return [
                turn
                for item in asked
                for turn in ({"role": "user", "content": item}, {"role": "assistant"})
            ]
    if not isinstance(turns, list) or not turns:
        raise Rejected("no_messages")
    return turns
