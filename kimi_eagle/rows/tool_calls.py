"""Tools, the calls of them, and which result answers which call. Pure.

One form, the one that a server is asked in: `tools` as `{"type": "function", "function": …}`, calls
in `tool_calls` with their ids, results as turns of `tool` with the id of their call. Forms that
have no ids (ShareGPT's function_call, OpenAI's older function_call, Glaive's text) get the ids that
Kimi's models write, `functions.NAME:N` with N counted from 0 in the conversation, and their results
are those of the calls before them, in order; where the numbers do not agree nothing is guessed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from kimi_eagle.rows.buckets import Rejected
from kimi_eagle.rows.strict_json import BadRecord, loads
from kimi_eagle.rows.text import Cleaner


def read_tools(value: Any, text: Cleaner, *, in_table: bool = False) -> tuple[Any, ...]:
    """The tools that are declared.

    Raises:
        Rejected: they are no list of objects, or text that is none.
    """
    if isinstance(value, str):
        value = parse(text.text(value), "tools") if value.strip() else None
    elif in_table:
        _refuse_nulls(value, "tools")
    if value is None or value == []:
        return ()
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise Rejected("bad_tools", "tools must be a list of objects")
    return tuple(_declared(tool) for tool in text.value(value))


def _declared(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as a server takes it: a bare declaration is the function of one."""
    if isinstance(tool.get("name"), str) and "function" not in tool and "type" not in tool:
        return {"type": "function", "function": tool}
    return tool


def parse(text: str, what: str) -> Any:
    """JSON that stands in a text.

    Raises:
        Rejected: it is none.
    """
    try:
        return loads(text.encode("utf-8"))
    except BadRecord as error:
        raise Rejected("bad_tools_json", f"{what}: text that is {error}") from None


def read_calls(calls: Any, text: Cleaner, *, in_table: bool = False) -> list[Any]:
    """The entries of a turn's `tool_calls`, as they are but for keys that are null.

    Raises:
        Rejected: they are not OpenAI's, or arguments are no JSON object.
    """
    if not isinstance(calls, list):
        raise Rejected("bad_tools", "tool_calls must be a list")
    found = []
    for call in text.value(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise Rejected("bad_tools", "a tool call without a function name")
        arguments = function.get("arguments")
        if in_table:
            _refuse_nulls(arguments, "arguments")
        _object(arguments)
        found.append({**_given(call), "function": _given(function)})
    return found


def _given(value: Mapping[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in value.items() if item is not None}


def _object(arguments: Any) -> Mapping[str, Any]:
    if isinstance(arguments, str):
        arguments = parse(arguments, "arguments")
    if not isinstance(arguments, Mapping):
        raise Rejected("bad_tools", "arguments are no JSON object")
    return arguments


def _refuse_nulls(value: Any, what: str) -> None:
    """A table fills what a struct lacks with null: an argument that was never given would be."""
    inner: list[Any] = []
    if isinstance(value, Mapping):
        inner = list(value.values())
    elif isinstance(value, list):
        inner = value
    for item in inner:
        if item is None:
            raise Rejected(
                "null_filled",
                f"{what} in a column of structs, with nulls that may be missing keys; "
                "store them as JSON text",
            )
        _refuse_nulls(item, what)


class Pairing:
    """Gives ids to the calls of one conversation that have none, and to their results."""

    def __init__(self) -> None:
        self._made = 0
        self._waiting: deque[str] = deque()

    def called(self, value: Any, text: Cleaner) -> list[dict[str, Any]]:
        """OpenAI's form of a call, or of a list of them, that has no id: {name, arguments}.

        Raises:
            Rejected: it is none.
        """
        if isinstance(value, str):
            value = parse(text.text(value), "function_call")
        calls = value if isinstance(value, list) else [value]
        if not calls:
            raise Rejected("bad_tools", "a function_call without a call")
        made = []
        for call in calls:
            name = call.get("name") if isinstance(call, Mapping) else None
            if not isinstance(name, str) or not name:
                raise Rejected("bad_tools", "a function_call without a name")
            arguments = text.value(_object(call.get("arguments")))
            call_id = f"functions.{text.text(name)}:{self._made}"
            self._made += 1
            self._waiting.append(call_id)
            function = {"name": text.text(name), "arguments": arguments}
            made.append({"id": call_id, "type": "function", "function": function})
        return made

    def answered(self, given: Any) -> str | None:
        """The id of the call that a result answers; `given` is the one that it carries.

        Raises:
            Rejected: it carries none although no call waits for a result.
        """
        if isinstance(given, str):
            return given
        return self._waiting.popleft() if self._waiting else None

    def settled(self) -> None:
        """Before anybody speaks again, every call has its result.

        Raises:
            Rejected: it has not.
        """
        if self._waiting:
            raise Rejected("bad_tools", f"no result of {', '.join(self._waiting)}")


def kimi_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with every call's id, and those of its results, as Kimi's models write them.
    Their templates write the id alone: with another model's id in it, a call has no name.

    Raises:
        Rejected: a result of no call, or two calls of one id that wait for their results.
    """
    made = 0
    waiting: dict[str, str] = {}
    found = []
    for message in messages:
        if message["role"] == "tool":
            given = message.get("tool_call_id")
            if given not in waiting:
                raise Rejected("bad_tools", f"a result of no call: {given!r}")
            message = {**message, "tool_call_id": waiting.pop(given)}
        calls = []
        for call in message.get("tool_calls", ()):
            given, name = call.get("id"), call["function"]["name"]
            if not isinstance(given, str) or given in waiting:
                raise Rejected("bad_tools", f"calls without an id of their own: {given!r}")
            waiting[given] = f"functions.{name}:{made}"
            made += 1
            calls.append({**call, "id": waiting[given]})
        found.append({**message, "tool_calls": calls} if calls else message)
    return found
