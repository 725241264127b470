"""Conversation → rows of token ids with exact boundaries.

A row is right when its prompt is token for token what serving would send, and its completion what
the verifier would emit after it. So nothing is rendered as a whole and searched afterwards: for
every assistant turn the prompt is rendered by the verifier's own chat template with
`add_generation_prompt`, the completion is what the template puts after it, and both are tokenized
apart, as in serving. Templates that drop reasoning from history make a row a turn; where the next
turn's prompt begins with the row before it, token for token, the two are one row. A turn that opens
a conversation answers no prompt: it is context, and not learnt.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from kimi_eagle.rows.conversations import Conversation, Rejected
from kimi_eagle.rows.sources import loads

THINK, END_THINK = "<think>", "</think>"


class Tokenizer(Protocol):
    """What is needed of transformers' tokenizers."""

    all_special_tokens: list[str]
    all_special_ids: list[int]

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], **options: Any) -> str: ...

    def get_added_vocab(self) -> Mapping[str, int]: ...


@dataclass(frozen=True)
class Row:
    """Token ids, and for each whether the verifier emitted it (1) or was given it (0)."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    turns: tuple[int, ...]
    """Which messages of the conversation it supervises."""

    def __post_init__(self) -> None:
        assert len(self.token_ids) == len(self.loss_mask)


@dataclass(frozen=True)
class _Writes:
    """What a template writes of a tool call: its id; arguments that are text, as that text."""

    ids: bool
    arguments: bool


class Renderer:
    """Renders conversations with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, thinking: str = "auto"):
        self._tokenizer = tokenizer
        self._thinking = thinking
        # Every added token that its own text would be read as: in what people wrote they are text,
        # but rendered into a prompt they would act. Some vocabularies add runs of spaces.
        control = {
            token: number
            for token, number in tokenizer.get_added_vocab().items()
            if token.strip() and token not in (THINK, END_THINK)
        }
        longest = sorted(control, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest)) if longest else r"(?!)")
        self._ends = {*tokenizer.all_special_ids, *control.values()}

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] = (),
        *,
        thinking: bool | None = None,
    ) -> str:
        """What serving sends for these messages, as text."""
        return self._apply(messages, tools, thinking, add_generation_prompt=True)

    def prompt_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] = (),
        *,
        thinking: bool | None = None,
    ) -> list[int]:
        """What is sent to the verifier for these messages.

        Raises:
            Rejected: the template refuses them, or a text would be read as a control token.
        """
        self._refuse_control_tokens(Conversation(tuple(map(dict, messages)), tuple(tools)))
        return self.encode(self.prompt(list(map(_served, messages)), tools, thinking=thinking))

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, control tokens as they are written."""
        return str(
            self._tokenizer.decode(
                token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def control_token(self, text: str) -> str | None:
        """The first control token that a text would be read as."""
        found = self._control.search(text)
        return found[0] if found else None

    def rows(self, conversation: Conversation) -> list[Row]:
        """A row for every assistant turn, joined where they continue one another.

        Raises:
            Rejected: control tokens in the text, a template that does not render a turn as a
                continuation of its prompt or leaves its reasoning out, or nothing to learn.
        """
        self._refuse_control_tokens(conversation)
        messages = conversation.messages
        self._refuse_missing_ids(messages)
        if self._opens_thinking:
            messages = tuple(map(_reasoning_apart, messages))
        rows: list[Row] = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant" or index == 0:
                continue
            row = self._turn(messages, conversation.tools, index)
            if rows and continues(rows[-1], row):
                before = rows.pop()
                mask = before.loss_mask + row.loss_mask[len(before.loss_mask) :]
                row = Row(row.token_ids, mask, before.turns + row.turns)
            rows.append(row)
        if not rows:
            raise Rejected("no_assistant_turn", "none that answers anything")
        return rows

    @cached_property
    def _opens_thinking(self) -> bool:
        """Whether prompts end in an open `<think>` unless told otherwise."""
        try:
            return self.prompt([{"role": "user", "content": "?"}]).endswith(THINK)
        except Rejected:
            return False

    def _turn(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], index: int) -> Row:
        reasoning = messages[index].get("reasoning_content")
        thinking = self._wants_thinking(reasoning)
        history = [_served(message) for message in messages[:index]]
        said = messages[index] if self._writes.arguments else _served(messages[index])
        prompt = self.prompt(history, tools, thinking=thinking)
        whole = self._apply([*history, said], tools, thinking, add_generation_prompt=False)
        if prompt.endswith(THINK):
            before = self._apply(history, tools, thinking, add_generation_prompt=False)
            completion = self._thought(prompt, before, whole, reasoning)
        elif whole.startswith(prompt):
            completion = whole[len(prompt) :]
        else:
            raise Rejected("template_mismatch", "the turn does not continue its prompt")
        if reasoning and self._thinking != "never" and reasoning.strip() not in completion:
            raise Rejected(
                "reasoning_not_rendered",
                "the template leaves reasoning out of the turn; `thinking: never` accepts that",
            )
        prompt_ids, completion_ids = self.encode(prompt), self._until_end(self.encode(completion))
        if not completion_ids:
            raise Rejected("empty_assistant", f"turn {index} renders as nothing")
        return Row(
            tuple(prompt_ids + completion_ids),
            (0,) * len(prompt_ids) + (1,) * len(completion_ids),
            (index,),
        )

    def _wants_thinking(self, reasoning: str | None) -> bool | None:
        """The template's `thinking` option for a turn; None leaves it to the template."""
        if self._thinking == "never":
            return False
        if self._thinking == "always":
            return None
        return None if reasoning else False

    def _thought(self, prompt: str, before: str, whole: str, reasoning: str | None) -> str:
        """What follows a prompt that ends in an open `<think>`: the reasoning, and what the
        template puts after it.

        Templates erase reasoning from turns that they take for history, and with the answer there
        the turn itself is history, and every tool call before it. So the reasoning is put back
        from the message, and the turn is found by how it opens rather than by what precedes it.
        """
        opening = prompt[len(before) : -len(THINK)] if prompt.startswith(before) else ""
        stem = prompt[: -len(THINK)]
        if whole.startswith(stem):
            rest = whole[len(stem) :]
        elif self._control.search(opening) and whole.count(opening) == prompt.count(opening):
            # No text holds a control token, so the last opening in `whole` is this turn's.
            rest = whole.rpartition(opening)[2]
        else:
            rest = ""
        if not rest.startswith(THINK) or END_THINK not in rest:
            raise Rejected("template_mismatch", "the turn does not continue its prompt")
        return f"{reasoning or ''}{END_THINK}{rest.partition(END_THINK)[2]}"

    def _until_end(self, ids: list[int]) -> list[int]:
        """Up to the token that ends the turn: the verifier stops there, and what a template writes
        between turns (a line break) is never emitted."""
        ends = [position for position, token in enumerate(ids) if token in self._ends]
        return ids[: ends[-1] + 1] if ends else ids

    def _refuse_control_tokens(self, conversation: Conversation) -> None:
        """Raises: Rejected, when any text would be read as a control token."""
        for text in _texts(conversation.document()):
            found = self.control_token(text)
            if found is not None:
                raise Rejected("control_token_in_text", found)

    def _refuse_missing_ids(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """A template that writes the ids of tool calls writes nothing for one that is missing."""
        for message in messages:
            calls = message.get("tool_calls") or ()
            answered = [message.get("tool_call_id")] if message["role"] == "tool" else []
            ids = [*(call.get("id") for call in calls), *answered]
            if not all(isinstance(item, str) and item for item in ids) and self._writes.ids:
                raise Rejected("bad_tools", "a tool call, or its return, without the call's id")

    @cached_property
    def _writes(self) -> _Writes:
        function = {"name": "f", "arguments": '{"a":  "probe"}'}
        call = {"id": "an-id", "type": "function", "function": function}
        asked = {"role": "user", "content": "?"}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            text = self._apply([asked, answer], (), None, add_generation_prompt=False)
        except Rejected:
            text = ""
        return _Writes("an-id" in text, '{"a":  "probe"}' in text)

    def _apply(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any],
        thinking: bool | None,
        *,
        add_generation_prompt: bool,
    ) -> str:
        options: dict[str, Any] = {} if thinking is None else {"thinking": thinking}
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **options,
            )
        except Exception as error:  # noqa: BLE001 - a template may raise anything at what it is given
            raise Rejected("template_error", str(error)) from None
        return str(text)


def _served(message: Mapping[str, Any]) -> Mapping[str, Any]:
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


def _texts(value: Any) -> Iterator[str]:
    """Every text within a JSON value, names included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _reasoning_apart(message: dict[str, Any]) -> dict[str, Any]:
    """An assistant's message with the reasoning that its content opens with, `<think>…</think>`,
    in `reasoning_content`.

    Raises:
        Rejected: these tokens anywhere else, where they would open or end the reasoning.
    """
    if message["role"] != "assistant":
        return message
    content, reasoning = message["content"], message.get("reasoning_content")
    opened, closed = content.count(THINK), content.count(END_THINK)
    if (opened, closed) == (1, 1) and content.lstrip().startswith(THINK) and not reasoning:
        reasoning, _, content = content.lstrip()[len(THINK) :].partition(END_THINK)
        if not content.strip() and not message.get("tool_calls"):
            raise Rejected("empty_assistant", "reasoning alone")
        return {**message, "content": content, "reasoning_content": reasoning}
    inside = reasoning or ""
    if opened or closed or THINK in inside or END_THINK in inside:
        raise Rejected("think_token_in_text", "in what the assistant says")
    return message


def continues(before: Row, row: Row) -> bool:
    """Whether `row`'s prompt begins with the whole of `before`."""
    length = len(before.token_ids)
    return row.token_ids[:length] == before.token_ids and not any(row.loss_mask[:length])


def cut(row: Row, max_length: int) -> Row:
    """The row's first `max_length` tokens.

    Raises:
        Rejected: nothing that is learnt is left.
    """
    mask = row.loss_mask[:max_length]
    if not any(mask):
        raise Rejected("too_long_no_supervision", f"{len(row.token_ids)} tokens")
    return Row(row.token_ids[:max_length], mask, row.turns)
