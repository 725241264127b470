"""What is asked in a record: its turns without the answers that it may have. Pure.

Where a conversation is there, each of its user turns is asked, and what the record says was
answered is not read. An assistant's turn that opens a conversation is context, as in `prepare`.
What follows a tool's return is not asked: the return answers a call of another's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kimi_eagle.rows.conversations import Rejected, read_conversation

# Stands for an answer that is still to be given: what records hold there is not read.
_ANSWER = {"role": "assistant", "content": "-"}
_ASSISTANTS = ("assistant", "gpt", "chatgpt")
_LISTS = ("messages", "conversations")


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

    def document(self) -> dict[str, Any]:
        return {"turns": [list(turn) for turn in self.turns], "tools": list(self.tools)}

    @staticmethod
    def read(document: Mapping[str, Any]) -> Questions:
        """From what `document` gave."""
        return Questions(tuple(map(tuple, document["turns"])), tuple(document["tools"]))


def read_questions(value: Any, form: str, **options: Any) -> Questions:
    """What a record asks.

    Args:
        form: as of `read_conversation`; records may also hold `turns` (user turns alone, as
            MT-Bench has them) or `prompt` (one) in place of turns.
        options: passed to it.

    Raises:
        Rejected: with the reason.
    """
    if not isinstance(value, Mapping):
        raise Rejected("not_a_record", f"a {type(value).__name__}")
    value, unasked = _answered(value, form)
    conversation = read_conversation(value, form, **options)
    turns: list[tuple[dict[str, Any], ...]] = []
    given: list[dict[str, Any]] = []
    for number, message in enumerate(conversation.messages):
        role = message["role"]
        if role == "tool":
            left = conversation.messages[number:]
            unasked += sum(item["role"] == "user" for item in left)
            break
        if role != "assistant":
            given.append(message)
        elif any(item["role"] == "user" for item in given):
            turns.append(tuple(given))
            given = []
        elif not turns:
            given.append(message)  # it opens the conversation
    if not turns:
        raise Rejected("no_user_turn")
    return Questions(tuple(turns), conversation.tools, conversation.repaired, unasked)


def _answered(value: Mapping[str, Any], form: str) -> tuple[Mapping[str, Any], int]:
    """The record with a stand-in for every answer, so that it reads as a conversation; and how
    many user turns come after a tool's return, which are left out of it."""
    if form == "alpaca" and value.get("output") is None and value.get("response") is None:
        return {**value, "output": _ANSWER["content"]}, 0
    name = next((name for name in _LISTS if value.get(name)), None)
    if name is None:
        asked = value.get("turns") or [value.get("prompt")]
        if not (isinstance(asked, list) and asked and all(map(_is_text, asked))):
            return value, 0  # of a form that has its answers elsewhere, or of none
        turns = [turn for text in asked for turn in ({"role": "user", "content": text}, _ANSWER)]
        return {**value, "messages": turns}, 0
    raw = value[name]
    if not isinstance(raw, list):
        return value, 0
    end = next((at for at, turn in enumerate(raw) if _speaker(turn) == "tool"), len(raw))
    unasked = sum(_speaker(turn) in ("user", "human") for turn in raw[end:])
    turns = [
        _ANSWER if at and _speaker(turn) in _ASSISTANTS else turn
        for at, turn in enumerate(raw[:end])
    ]
    return {**value, name: [*turns, _ANSWER]}, unasked


def _speaker(turn: Any) -> Any:
    if not isinstance(turn, Mapping):
        return None
    return turn.get("role") if turn.get("from") is None else turn.get("from")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())
