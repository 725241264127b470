"""Records → conversations in one form, or a reason why not. Pure.

One form: messages with `role` system, user, assistant or tool, `content` as text, and where there
are any `reasoning_content` and `tool_calls`. Nothing is guessed: a role that is not known is
never trained on as if the verifier had said it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kimi_eagle.rows.sources import loads

ROLES = ("system", "user", "assistant", "tool")
_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
}


class Rejected(ValueError):
    """A record that is left out; `reason` is the name it is counted under."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


@dataclass(frozen=True)
class Conversation:
    messages: tuple[dict[str, Any], ...]
    tools: tuple[Any, ...] = ()
    repaired: int = 0
    """Lone surrogates that were replaced by U+FFFD."""

    def document(self) -> dict[str, Any]:
        return {"messages": list(self.messages), "tools": list(self.tools)}


@dataclass
class _Text:
    repaired: int = field(default=0)

    def clean(self, text: str) -> str:
        """Lone surrogates cannot be encoded: each becomes U+FFFD; pairs are joined by the JSON
        reader already."""
        lone = sum(0xD800 <= ord(char) <= 0xDFFF for char in text)
        if not lone:
            return text
        self.repaired += lone
        return "".join("\ufffd" if 0xD800 <= ord(char) <= 0xDFFF else char for char in text)

    def clean_all(self, value: Any) -> Any:
        """The same for every text within a JSON value."""
        if isinstance(value, str):
            return self.clean(value)
        if isinstance(value, list):
            return [self.clean_all(item) for item in value]
        if isinstance(value, Mapping):
            return {self.clean(key): self.clean_all(item) for key, item in value.items()}
        return value


def read_conversation(value: Any, form: str) -> Conversation:
    """A record's conversation.

    Args:
        form: `messages`, `sharegpt` or `alpaca`. The first two read each turn by whichever of
            role/content and from/value it carries, so that a file which mixes them, or a loader
            that filled the other pair with nulls, gives the same roles.

    Raises:
        Rejected: with the reason.
    """
    if not isinstance(value, Mapping):
        raise Rejected("not_a_record", f"a {type(value).__name__}")
    text = _Text()
    turns: Any
    system = value.get("system")
    if form == "alpaca":
        turns = _alpaca(value)
    else:
        turns = value.get("messages") or value.get("conversations")
        if not isinstance(turns, list) or not turns:
            raise Rejected("no_messages")
    messages = [_message(turn, text) for turn in turns]
    if isinstance(system, str) and system.strip():
        # Beside the turns, as ShareGPT's and Alpaca's records have it.
        if messages[0]["role"] == "system":
            raise Rejected("two_systems", "`system` beside the turns, and a system turn")
        messages.insert(0, {"role": "system", "content": text.clean(system)})
    if not any(message["role"] == "assistant" for message in messages):
        raise Rejected("no_assistant_turn")
    tools = _tools(value.get("tools"), text)
    return Conversation(tuple(messages), tools, text.repaired)


def read_messages(turns: Any) -> list[dict[str, Any]]:
    """Turns alone, in the one form; for prompts, which have no answer.

    Raises:
        Rejected: with the reason.
    """
    if not isinstance(turns, list) or not turns:
        raise Rejected("no_messages")
    text = _Text()
    return [_message(turn, text) for turn in turns]


def _alpaca(value: Mapping[str, Any]) -> list[dict[str, Any]]:
    instruction, output = value.get("instruction"), value.get("output")
    if not isinstance(instruction, str) or not isinstance(output, str):
        raise Rejected("no_messages", "instruction and output must be text")
    extra = value.get("input")
    asked = f"{instruction}\n\n{extra}" if isinstance(extra, str) and extra.strip() else instruction
    turns: list[dict[str, Any]] = []
    for pair in value.get("history") or []:
        if not isinstance(pair, list) or len(pair) != 2:
            raise Rejected("bad_message", "history holds pairs of question and answer")
        turns.append({"role": "user", "content": pair[0]})
        turns.append({"role": "assistant", "content": pair[1]})
    turns.append({"role": "user", "content": asked})
    turns.append({"role": "assistant", "content": output})
    return turns


def _message(turn: Any, text: _Text) -> dict[str, Any]:
    if not isinstance(turn, Mapping):
        raise Rejected("bad_message", f"a {type(turn).__name__}")
    role = _role(turn)
    content = _either(turn, "content", "value")
    if content is None and role != "assistant":
        raise Rejected("bad_message", f"a {role} turn without content")
    message: dict[str, Any] = {"role": role, "content": _content(content, text)}
    reasoning = turn.get("reasoning_content") or turn.get("reasoning")
    if reasoning is not None and role == "assistant":
        if not isinstance(reasoning, str):
            raise Rejected("bad_message", "reasoning_content must be text")
        message["reasoning_content"] = text.clean(reasoning)
    calls = turn.get("tool_calls")
    if turn.get("function_call"):
        raise Rejected("bad_tools", "function_call is the older form; tool_calls is read")
    if calls:
        if role != "assistant":
            raise Rejected("bad_tools", f"tool_calls of a {role} turn")
        message["tool_calls"] = _tool_calls(calls, text)
    for name in ("tool_call_id", "name"):
        if isinstance(turn.get(name), str):
            message[name] = text.clean(turn[name])
    if role == "assistant" and not message["content"].strip() and not calls:
        raise Rejected("empty_assistant")
    return message


def _role(turn: Mapping[str, Any]) -> str:
    role, origin = turn.get("role"), turn.get("from")
    if origin is not None:
        named = _SHAREGPT_ROLES.get(str(origin), str(origin))
        if role is not None and role != named:
            raise Rejected("unknown_role", f"role {role!r} beside from {origin!r}")
        role = named
    if role not in ROLES:
        raise Rejected("unknown_role", repr(role))
    return str(role)


def _either(turn: Mapping[str, Any], name: str, other: str) -> Any:
    """The one of two keys that is given; loaders fill the other with null."""
    first, second = turn.get(name), turn.get(other)
    if first is not None and second is not None and first != second:
        raise Rejected("bad_message", f"{name} and {other} differ")
    return second if first is None else first


def _content(content: Any, text: _Text) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return text.clean(content)
    if not isinstance(content, list):
        raise Rejected("bad_message", f"content is a {type(content).__name__}")
    parts = []
    for part in content:
        if isinstance(part, Mapping) and part.get("type", "text") == "text":
            piece = part.get("text")
        elif isinstance(part, str):
            piece = part
        else:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise Rejected("unsupported_modality", str(kind))
        if not isinstance(piece, str):
            raise Rejected("bad_message", "a text part without text")
        parts.append(text.clean(piece))
    return "".join(parts)


def _tools(value: Any, text: _Text) -> tuple[Any, ...]:
    if isinstance(value, str):
        value = _parsed(text.clean(value), "tools") if value.strip() else None
    if value is None or value == []:
        return ()
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise Rejected("bad_tools", "tools must be a list of objects")
    return tuple(text.clean_all(value))


def _parsed(text: str, what: str) -> Any:
    try:
        return loads(text.encode("utf-8"))
    except ValueError as error:
        raise Rejected("bad_tools", f"{what}: text that is {error}") from None


def _tool_calls(calls: Any, text: _Text) -> list[Any]:
    if not isinstance(calls, list):
        raise Rejected("bad_tools", "tool_calls must be a list")
    calls = text.clean_all(calls)
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise Rejected("bad_tools", "a tool call without a function name")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = _parsed(arguments, "arguments")
        if not isinstance(arguments, Mapping):
            raise Rejected("bad_tools", "arguments are no JSON object")
    return list(calls)
