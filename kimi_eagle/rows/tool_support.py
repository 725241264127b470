"""Whether a chat template writes tools at all: many write nothing for them, and say nothing.

A call that is not written is a turn that ends at once, and a row without its tools is another
conversation. So the template is asked once, with words that stand nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

from kimi_eagle.rows.buckets import Rejected
from kimi_eagle.rows.conversations import Conversation

_NAME, _VALUE, _RESULT = "probedfunction", "probedvalue", "probedresult"
# Nine letters: a template that is particular about ids (Mistral's) takes it as well.
_ID = "probecall"
_ASKED = {"role": "user", "content": "?"}
_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": _ID,
            "type": "function",
            "function": {"name": _NAME, "arguments": {"word": _VALUE}},
        }
    ],
}
_ANSWER = {"role": "tool", "tool_call_id": _ID, "content": _RESULT}
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "probe",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}


class HasTemplate(Protocol):
    """What is needed of transformers' tokenizers."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


class ToolSupport:
    """What one tokenizer's template writes of tools."""

    def __init__(self, tokenizer: HasTemplate):
        self._tokenizer = tokenizer

    def refuse_unwritten(self, conversation: Conversation) -> None:
        """Raises: Rejected: the conversation has tools, calls or results, and the template writes
        none."""
        messages = conversation.messages
        if conversation.tools and not self._declarations:
            raise Rejected(
                "tools_not_rendered", "the chat template writes no declarations of tools"
            )
        if any("tool_calls" in message for message in messages) and not self._calls:
            raise Rejected("tools_not_rendered", "the chat template writes no tool calls")
        if any(message["role"] == "tool" for message in messages) and not self._results:
            raise Rejected("tools_not_rendered", "the chat template writes no results of tools")

    @cached_property
    def _declarations(self) -> bool:
        return self._writes([_ASKED], _NAME)

    @cached_property
    def _calls(self) -> bool:
        # Not by the function's name: Kimi's templates write the id, which has it, in its place.
        return self._writes([_ASKED, _CALL, _ANSWER], _VALUE, tools=())

    @cached_property
    def _results(self) -> bool:
        return self._writes([_ASKED, _CALL, _ANSWER], _RESULT)

    def _writes(self, messages: Sequence[Any], word: str, tools: Sequence[Any] = (_TOOL,)) -> bool:
        """Whether a word is written. A template that refuses the question is taken to write it:
        what it refuses of a record is told there."""
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=True,
            )
        except Exception:  # noqa: BLE001 - a template may raise anything at what it is given
            return True
        return word in str(text)
