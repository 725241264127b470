"""Conversation → rows of token ids with exact boundaries.

A row is right when its prompt is token for token what serving would send, and its completion what
the verifier would emit after it. So nothing is rendered as a whole and searched afterwards: for
every assistant turn the prompt is rendered by the verifier's own chat template with
`add_generation_prompt`, the completion is what the template puts after it, and both are tokenized
apart, as in serving. Templates that drop reasoning from history make a row a turn; where the next
turn's prompt begins with the row before it, token for token, the two are one row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kimi_eagle.rows.conversations import Conversation, Rejected

THINK, END_THINK = "<think>", "</think>"


class Tokenizer(Protocol):
    """What is needed of transformers' tokenizers."""

    all_special_tokens: list[str]
    all_special_ids: list[int]

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

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


class Renderer:
    """Renders conversations with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, thinking: str = "auto"):
        self._tokenizer = tokenizer
        self._thinking = thinking
        # Every added token that its own text would be read as: in what people wrote they are text,
        # but rendered into a prompt they would act.
        self._control = tuple(
            token for token in tokenizer.get_added_vocab() if token not in (THINK, END_THINK)
        )
        self._special = set(tokenizer.all_special_ids)

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] = (),
        *,
        thinking: bool | None = None,
    ) -> str:
        """What serving sends for these messages, as text."""
        return self._apply(messages, tools, thinking, add_generation_prompt=True)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def rows(self, conversation: Conversation) -> list[Row]:
        """A row for every assistant turn, joined where they continue one another.

        Raises:
            Rejected: control tokens in the text, or a template that does not render a turn as a
                continuation of its prompt.
        """
        self._refuse_control_tokens(conversation)
        rows: list[Row] = []
        for index, message in enumerate(conversation.messages):
            if message["role"] != "assistant":
                continue
            row = self._turn(conversation, index)
            if rows and _continues(rows[-1], row):
                before = rows.pop()
                mask = before.loss_mask + row.loss_mask[len(before.loss_mask) :]
                row = Row(row.token_ids, mask, before.turns + row.turns)
            rows.append(row)
        return rows

    def _turn(self, conversation: Conversation, index: int) -> Row:
        messages, tools = conversation.messages, conversation.tools
        reasoning = messages[index].get("reasoning_content")
        thinking = self._wants_thinking(reasoning)
        prompt = self.prompt(messages[:index], tools, thinking=thinking)
        whole = self._apply(messages[: index + 1], tools, thinking, add_generation_prompt=False)
        completion = self._completion(prompt, whole, reasoning)
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

    def _completion(self, prompt: str, whole: str, reasoning: str | None) -> str:
        """What the template puts after the prompt.

        A prompt that ends in an open `<think>` is continued by the reasoning, which templates
        erase from turns that they take for history: it is put back from the message itself.
        """
        if prompt.endswith(THINK):
            stem = prompt[: -len(THINK)]
            rest = whole[len(stem) :] if whole.startswith(stem) else ""
            if not rest.startswith(THINK) or END_THINK not in rest:
                raise Rejected("template_mismatch", "the turn does not continue its prompt")
            return f"{reasoning or ''}{END_THINK}{rest.split(END_THINK, 1)[1]}"
        if not whole.startswith(prompt):
            raise Rejected("template_mismatch", "the turn does not continue its prompt")
        return whole[len(prompt) :]

    def _until_end(self, ids: list[int]) -> list[int]:
        """Up to the token that ends the turn: the verifier stops there, and what a template writes
        between turns (a line break) is never emitted."""
        ends = [position for position, token in enumerate(ids) if token in self._special]
        return ids[: ends[-1] + 1] if ends else ids

    def _refuse_control_tokens(self, conversation: Conversation) -> None:
        for message in conversation.messages:
            for field in ("content", "reasoning_content", "name", "tool_call_id"):
                text = message.get(field) or ""
                for token in self._control:
                    if token in text:
                        raise Rejected("control_token_in_text", token)

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


def _continues(before: Row, row: Row) -> bool:
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
