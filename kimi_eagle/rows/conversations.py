"""Records → conversations in one form, or a reason why not. Pure.

One form: messages with `role` system, user, assistant or tool, `content` as text, and where there
are any `reasoning_content` and `tool_calls`. Nothing is guessed: a role that is not known is
never trained on as if the verifier had said it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kimi_eagle.rows.buckets import Rejected
from kimi_eagle.rows.forms import Form, spoken
from kimi_eagle.rows.text import Cleaner
from kimi_eagle.rows.tool_calls import Pairing, kimi_ids, parse, read_calls, read_tools

__all__ = ["ROLES", "Conversation", "Form", "Rejected", "read_conversation", "read_messages"]

ROLES = ("system", "user", "assistant", "tool")
_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "function_call": "assistant",
    "observation": "tool",
}
_IN_TURNS = ("role", "content")
_REASONING_PARTS = ("reasoning", "thinking")


@dataclass(frozen=True)
class Conversation:
    messages: tuple[dict[str, Any], ...]
    tools: tuple[Any, ...] = ()
    repaired: int = 0
    """Lone surrogates that were replaced by U+FFFD."""

    def document(self) -> dict[str, Any]:
        return {"messages": list(self.messages), "tools": list(self.tools)}


def read_conversation(
    value: Any,
    form: str,
    columns: Mapping[str, str] | None = None,
    roles: Mapping[str, str] | None = None,
    *,
    tool_call_ids: str = "keep",
    in_table: bool = False,
) -> Conversation:
    """A record's conversation.

    Args:
        form: see `forms`. Each turn is read by whichever of role/content and from/value it
            carries, so that a file which mixes them, or a loader that filled the other pair with
            nulls, gives the same roles.
        columns: what a form calls it → what the records call it; `role` and `content` are within
            the turns.
        roles: what the turns call who speaks → one of `ROLES`, beside the names that are known.
        tool_call_ids: `keep`, or `kimi` to write them anew (see `tool_calls.kimi_ids`).
        in_table: nulls may stand for what a struct lacks (see `Record.in_table`).

    Raises:
        Rejected: with the reason.
    """
    if not isinstance(value, Mapping):
        raise Rejected("not_a_record", f"a {type(value).__name__}")
    within = {name: theirs for name, theirs in (columns or {}).items() if name in _IN_TURNS}
    beside = {name: theirs for name, theirs in (columns or {}).items() if name not in _IN_TURNS}
    if beside:
        value = {**value, **{name: value.get(theirs) for name, theirs in beside.items()}}
    text = Cleaner()
    said = spoken(value, form)
    turns = _named(said.turns, within, roles or {}) if within or roles else said.turns
    messages = _Turns(text, in_table).read(turns)
    if tool_call_ids == "kimi":
        messages = kimi_ids(messages)
    if isinstance(said.system, str) and said.system.strip():
        # Beside the turns, as ShareGPT's and Alpaca's records have it.
        if messages[0]["role"] == "system":
            raise Rejected("two_systems", "`system` beside the turns, and a system turn")
        messages.insert(0, {"role": "system", "content": text.text(said.system)})
    if not any(message["role"] == "assistant" for message in messages):
        raise Rejected("no_assistant_turn")
    tools = read_tools(said.tools, text, in_table=in_table)
    return Conversation(tuple(messages), tools, text.repaired)


def _named(turns: list[Any], within: Mapping[str, str], roles: Mapping[str, str]) -> list[Any]:
    """Turns with the names that forms know."""
    found = []
    for turn in turns:
        if isinstance(turn, Mapping):
            turn = {**turn, **{name: turn.get(theirs) for name, theirs in within.items()}}
            for key in ("role", "from"):
                if isinstance(turn.get(key), str) and turn[key] in roles:
                    turn = {**turn, key: roles[turn[key]]}
        found.append(turn)
    return found


def read_messages(turns: Any) -> list[dict[str, Any]]:
    """Turns alone, in the one form; for prompts, which have no answer.

    Raises:
        Rejected: with the reason.
    """
    if not isinstance(turns, list) or not turns:
        raise Rejected("no_messages")
    return _Turns(Cleaner()).read(turns)


class _Turns:
    """Reads the turns of one conversation."""

    def __init__(self, text: Cleaner, in_table: bool = False):
        self._text = text
        self._in_table = in_table
        self._pairing = Pairing()

    def read(self, turns: list[Any]) -> list[dict[str, Any]]:
        return [self._message(turn) for turn in turns]

    def _message(self, turn: Any) -> dict[str, Any]:
        if not isinstance(turn, Mapping):
            raise Rejected("bad_message", f"a {type(turn).__name__}")
        role = _role(turn)
        if role != "tool":
            self._pairing.settled()
        content = _either(turn, "content", "value")
        if turn.get("from") == "function_call":
            return self._called(None, content)
        if content is None and role != "assistant":
            raise Rejected("bad_message", f"a {role} turn without content")
        said, thought, parts = self._content(content, role)
        message: dict[str, Any] = {"role": role, "content": said}
        reasoning = turn.get("reasoning_content") or turn.get("reasoning")
        if reasoning is not None and role == "assistant":
            if not isinstance(reasoning, str):
                raise Rejected("bad_message", "reasoning_content must be text")
            thought = self._text.text(reasoning) + thought
        if thought:
            message["reasoning_content"] = thought
        calls = self._calls(turn, role, parts)
        if calls:
            message["tool_calls"] = calls
        self._name(turn, message)
        if role == "assistant" and not said.strip() and not calls:
            raise Rejected("empty_assistant")
        return message

    def _called(self, content: str | None, call: Any) -> dict[str, Any]:
        """A turn that is nothing but a call."""
        calls = self._pairing.called(call, self._text)
        return {"role": "assistant", "content": content or "", "tool_calls": calls}

    def _calls(self, turn: Mapping[str, Any], role: str, parts: list[Any]) -> list[Any]:
        """A turn's tool calls, in whichever of three ways it has them."""
        listed, older = turn.get("tool_calls"), turn.get("function_call")
        if not (listed or older or parts):
            return []
        if role != "assistant":
            raise Rejected("bad_tools", f"tool_calls of a {role} turn")
        if bool(listed) + bool(older) + bool(parts) > 1:
            raise Rejected("bad_tools", "tool_calls beside function_call, or beside parts")
        if listed:
            return read_calls(listed, self._text, in_table=self._in_table)
        return self._pairing.called(older or parts, self._text)

    def _name(self, turn: Mapping[str, Any], message: dict[str, Any]) -> None:
        name = turn.get("name")
        # The older form names the function of a result; templates would take that for who speaks.
        if isinstance(name, str) and turn.get("role") != "function":
            message["name"] = self._text.text(name)
        given = turn.get("tool_call_id")
        if message["role"] == "tool":
            given = self._pairing.answered(given)
            if given is None and (turn.get("from") or turn.get("role") == "function"):
                raise Rejected("bad_tools", "a result of no call")
        if isinstance(given, str):
            message["tool_call_id"] = self._text.text(given)

    def _content(self, content: Any, role: str) -> tuple[str, str, list[Any]]:
        """The text, the reasoning and the tool calls that a turn's content has."""
        if content is None:
            return "", "", []
        if isinstance(content, str):
            return self._text.text(content), "", []
        if not isinstance(content, list):
            raise Rejected("bad_message", f"content is a {type(content).__name__}")
        said: list[str] = []
        thought: list[str] = []
        calls: list[Any] = []
        for part in content:
            kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
            if isinstance(part, str):
                piece: Any = part
            elif isinstance(part, Mapping) and kind == "text":
                piece = _either(part, "text", "value")
            elif isinstance(part, Mapping) and role == "assistant" and kind in _REASONING_PARTS:
                piece = _either(part, str(kind), "value")
                piece = part.get("text") if piece is None else piece
            elif isinstance(part, Mapping) and role == "assistant" and kind == "tool_call":
                call = part.get("value")
                calls.append(
                    parse(self._text.text(call), "tool_call") if isinstance(call, str) else call
                )
                continue
            else:
                kind = kind if isinstance(part, Mapping) else type(part).__name__
                raise Rejected("unsupported_modality", str(kind))
            if not isinstance(piece, str):
                raise Rejected("bad_message", f"a {kind} part without text")
            if kind != "text" and (said or calls):
                raise Rejected("bad_message", "reasoning behind what was said")
            (said if kind == "text" else thought).append(self._text.text(piece))
        return "".join(said), "".join(thought), calls


def _role(turn: Mapping[str, Any]) -> str:
    role, origin = turn.get("role"), turn.get("from")
    if origin is not None:
        named = _SHAREGPT_ROLES.get(str(origin), str(origin))
        if role is not None and role != named:
            raise Rejected("unknown_role", f"role {role!r} beside from {origin!r}")
        role = named
    elif role == "function":
        role = "tool"
    if role not in ROLES:
        raise Rejected("unknown_role", repr(role))
    return str(role)


def _either(turn: Mapping[str, Any], name: str, other: str) -> Any:
    """The one of two keys that is given; loaders fill the other with null."""
    first, second = turn.get(name), turn.get(other)
    if first is not None and second is not None and first != second:
        raise Rejected("bad_message", f"{name} and {other} differ")
    return second if first is None else first
