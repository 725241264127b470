"""A verifier's chat template, given what a server gives it. Pure but for what the template does.

What reaches a template is not what a client sent: servers parse the arguments of earlier calls,
order the parts of tools, and Kimi's tokenizer adds the tools once more as TypeScript.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from kimi_eagle.rows.conversations import Rejected
from kimi_eagle.rows.encode import Tokenizer
from kimi_eagle.rows.sources import loads
from kimi_eagle.rows.typescript import NoTypeScript, sorted_keys, typescript

THINK, END_THINK = "<think>", "</think>"
_TYPESCRIPT = "tools_ts_str"
_ARGUMENTS = '{"a":  "probe"}'


class Template:
    """Renders messages with the chat template of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self.source = _source(tokenizer)

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], thinking: bool | None
    ) -> str:
        """The messages with the opening of the answer. Raises: Rejected, where it refuses them."""
        return self._apply(messages, tools, thinking, add_generation_prompt=True)

    def history(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], thinking: bool | None
    ) -> str:
        """The messages alone. Raises: Rejected, where it refuses them."""
        return self._apply(messages, tools, thinking, add_generation_prompt=False)

    @cached_property
    def opens_thinking(self) -> bool:
        """Whether prompts end in an open `<think>` unless told otherwise."""
        try:
            return self.prompt([{"role": "user", "content": "?"}], (), None).endswith(THINK)
        except Rejected:
            return False

    @property
    def writes_ids(self) -> bool:
        """Whether it writes the ids of tool calls."""
        return "an-id" in self._probe

    @property
    def writes_arguments(self) -> bool:
        """Whether it writes arguments that are text as that text."""
        return _ARGUMENTS in self._probe

    @cached_property
    def _probe(self) -> str:
        function = {"name": "f", "arguments": _ARGUMENTS}
        call = {"id": "an-id", "type": "function", "function": function}
        asked = {"role": "user", "content": "?"}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            return self.history([asked, answer], (), None)
        except Rejected:
            return ""

    def _apply(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any],
        thinking: bool | None,
        *,
        add_generation_prompt: bool,
    ) -> str:
        options: dict[str, Any] = {} if thinking is None else {"thinking": thinking}
        given = [_declared(tool) for tool in tools] or None
        if given and _TYPESCRIPT in self.source:
            given = sorted_keys(given)
            # What has no such form Kimi's tokenizer leaves to the template, which writes JSON.
            with suppress(NoTypeScript):
                options[_TYPESCRIPT] = typescript(given or [])
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=given,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **options,
            )
        except Exception as error:  # noqa: BLE001 - a template may raise anything at what it is given
            raise Rejected("template_error", str(error)) from None
        return str(text)


def served(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message of the history as servers hand it to the template: arguments of tool calls are
    values there, written anew, whatever spacing the verifier gave them."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [_with_values(call) for call in calls]}


def _with_values(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if isinstance(arguments, str):
        arguments = loads(arguments.encode("utf-8"))
    return {**call, "function": {**function, "arguments": arguments}}


def _declared(tool: Any) -> Any:
    """A tool as vLLM hands it over: known keys in its own order, a description and parameters that
    are not given as null. What is no function tool stays as it is."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping):
        return tool
    known = {name: function.get(name) for name in ("name", "description", "parameters")}
    if function.get("strict") is not None:
        known["strict"] = function["strict"]
    return {"type": tool.get("type", "function"), "function": known}


def _source(tokenizer: Tokenizer) -> str:
    """The text of the template, or of all that go by name."""
    found = getattr(tokenizer, "chat_template", None) or ""
    return "\n".join(found.values()) if isinstance(found, Mapping) else str(found)
