"""Conversation → rows of token ids with exact boundaries.

A row is right when its prompt is token for token what serving would send, and its completion what
the verifier would emit after it. So nothing is rendered as a whole and searched afterwards: for
every assistant turn the prompt is rendered by the verifier's own chat template with
`add_generation_prompt`, the completion is what the template puts after it, and both are tokenized
apart, as in serving. Templates that drop reasoning from history make a row a turn; where the next
turn's prompt begins with the row before it, token for token, the two are one row. A turn that opens
a conversation answers no prompt: it is context, and not learnt.

Every row is proven: the tokenizer's own call on the prompt as a whole gives the ids that the row
begins with, which were made piece by piece.

Control tokens in what people wrote are text, here and in evaluation, which sends ids: a server that
is sent messages may read them as control tokens instead, as vLLM's chat endpoint does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kimi_eagle.rows.control import Control, Marks, free_mark, map_texts, texts
from kimi_eagle.rows.conversations import Conversation, Rejected
from kimi_eagle.rows.encode import CONTROL_IN_TEXT, LONGEST_TEXT, Encoder, Tokenizer
from kimi_eagle.rows.template import END_THINK, THINK, Template, served

Message = Mapping[str, Any]


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
class _Marked:
    """Messages and tools in which what looks like a control token is marked."""

    messages: Sequence[Message]
    tools: Sequence[Any]
    mark: str
    """Empty where nothing looks like one."""


@dataclass(frozen=True)
class _Turn:
    """A turn, what it is asked with, and its row."""

    prompt: str
    prompt_ids: list[int]
    row: Row


class Renderer:
    """Renders conversations with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, thinking: str = "auto", limit: int | None = None):
        """Args: `limit`: tokens after which rows will be cut. What lies beyond them for certain is
        not encoded."""
        self._tokenizer = tokenizer
        self._thinking = thinking
        self._limit = limit
        self._template = Template(tokenizer)
        control = _control_tokens(tokenizer, self._template.source)
        self._control = Control(control)
        # What an assistant says may open with reasoning, whose tokens are the verifier's own.
        self._spoken = Control(control - {THINK, END_THINK})
        added = tokenizer.get_added_vocab()
        self._ends = {*tokenizer.all_special_ids, *map(added.__getitem__, self._spoken.tokens)}
        # No text of a row has 16 characters a token throughout.
        self._encoder = Encoder(tokenizer, self._control, max(LONGEST_TEXT, 16 * (limit or 0)))

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] = (),
        *,
        thinking: bool | None = None,
    ) -> str:
        """What serving renders these messages to. As text, which cannot tell a control token from
        what only looks like one: `prompt_ids` can."""
        return self._template.prompt([served(message) for message in messages], tools, thinking)

    def prompt_ids(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] = (),
        *,
        thinking: bool | None = None,
    ) -> list[int]:
        """What is sent to the verifier for these messages.

        Raises:
            Rejected: the template refuses them, or they cannot be encoded.
        """
        given = self._mark(list(messages), tools)
        text = self.prompt(given.messages, given.tools, thinking=thinking)
        return self._ids(text, given.mark)

    def encode(self, text: str) -> list[int]:
        """The ids of a text whose control tokens are meant as such."""
        return self._encoder.ids(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, control tokens as they are written."""
        return str(
            self._tokenizer.decode(
                token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def control_token(self, text: str) -> str | None:
        """The first control token that a text would be read as, reasoning's apart."""
        return self._spoken.find(text)

    def rows(self, conversation: Conversation) -> list[Row]:
        """A row for every assistant turn, joined where they continue one another. A turn whose
        prompt alone reaches the limit has a row of its prompt, or of nothing where the prompt is
        longer by far.

        Raises:
            Rejected: a template that does not render a turn as a continuation of its prompt or
                leaves its reasoning out, text that cannot be encoded, a row that cannot be proven,
                or nothing to learn.
        """
        messages = conversation.messages
        self._refuse_missing_ids(messages)
        if self._template.opens_thinking:
            messages = tuple(map(_reasoning_apart, messages))
        given = self._mark(messages, conversation.tools)
        rows: list[Row] = []
        joined: list[_Turn] = []
        thinks = False
        for index, message in enumerate(given.messages):
            if message["role"] == "user":
                thinks = False
            elif message["role"] == "assistant":
                thinks = thinks or bool(message.get("reasoning_content"))
                if index == 0:
                    continue
                turn = self._turn(given, index, thinks)
                if rows and continues(rows[-1], turn.row):
                    before = rows.pop()
                    mask = before.loss_mask + turn.row.loss_mask[len(before.loss_mask) :]
                    rows.append(Row(turn.row.token_ids, mask, before.turns + turn.row.turns))
                else:
                    self._prove(joined, given.mark)
                    joined = []
                    rows.append(turn.row)
                if any(turn.row.loss_mask):
                    joined.append(turn)
        self._prove(joined, given.mark)
        if not rows:
            raise Rejected("no_assistant_turn", "none that answers anything")
        return rows

    def _turn(self, given: _Marked, index: int, thinks: bool) -> _Turn:
        reasoning = given.messages[index].get("reasoning_content")
        thinking = self._wants_thinking(thinks)
        history = [served(message) for message in given.messages[:index]]
        prompt = self._template.prompt(history, given.tools, thinking)
        # Where the length alone says that it is too long, it is not even encoded.
        longer = self._limit is not None and self._encoder.at_least(prompt) >= self._limit
        prompt_ids = [] if longer else self._ids(prompt, given.mark)
        if longer or (self._limit is not None and len(prompt_ids) >= self._limit):
            return _Turn(prompt, [], Row(tuple(prompt_ids), (0,) * len(prompt_ids), (index,)))
        said = given.messages[index]
        said = said if self._template.writes_arguments else served(said)
        whole = self._template.history([*history, said], given.tools, thinking)
        if prompt.endswith(THINK):
            completion = self._thought(prompt, history, given.tools, thinking, whole, reasoning)
        elif whole.startswith(prompt):
            completion = whole[len(prompt) :]
        else:
            raise Rejected("template_mismatch", "the turn does not continue its prompt")
        if reasoning and self._thinking != "never" and reasoning.strip() not in completion:
            raise Rejected(
                "reasoning_not_rendered",
                "the template leaves reasoning out of the turn; `thinking: never` accepts that",
            )
        completion_ids = self._completion_ids(completion, given.mark, len(prompt_ids))
        if not completion_ids:
            raise Rejected("empty_assistant", f"turn {index} renders as nothing")
        row = Row(
            tuple(prompt_ids + completion_ids),
            (0,) * len(prompt_ids) + (1,) * len(completion_ids),
            (index,),
        )
        return _Turn(prompt, prompt_ids, row)

    def _wants_thinking(self, thinks: bool) -> bool | None:
        """The template's `thinking` option for a turn; None leaves it to the template.

        Args:
            thinks: the turn, or one before it that answers the same question, carries reasoning:
                a server that is asked to go on after a tool's return still has thinking on, and
                with it off the template would take the reasoning of the call out of the prompt.
        """
        if self._thinking == "never":
            return False
        if self._thinking == "always":
            return None
        return None if thinks else False

    def _thought(
        self,
        prompt: str,
        history: Sequence[Message],
        tools: Sequence[Any],
        thinking: bool | None,
        whole: str,
        reasoning: str | None,
    ) -> str:
        """What follows a prompt that ends in an open `<think>`: the reasoning, and what the
        template puts after it.

        Templates erase reasoning from turns that they take for history, and with the answer there
        the turn itself is history, and every tool call before it. So the reasoning is put back
        from the message, and the turn is found by how it opens rather than by what precedes it.
        """
        stem = prompt[: -len(THINK)]
        rest = ""
        if whole.startswith(stem):
            rest = whole[len(stem) :]
        else:
            before = self._template.history(history, tools, thinking)
            opening = stem[len(before) :] if prompt.startswith(before) else ""
            if self._control.find(opening) and whole.count(opening) == prompt.count(opening):
                # No text holds a control token, so the last opening in `whole` is this turn's.
                rest = whole.rpartition(opening)[2]
        if not rest.startswith(THINK) or END_THINK not in rest:
            raise Rejected("template_mismatch", "the turn does not continue its prompt")
        return f"{reasoning or ''}{END_THINK}{rest.partition(END_THINK)[2]}"

    def _ids(self, text: str, mark: str, limit: int | None = None) -> list[int]:
        if mark and f"\\u{ord(mark):04x}" in text.lower():
            raise Rejected(CONTROL_IN_TEXT, "which the template escapes")
        return self._encoder.ids(text, mark, limit)

    def _completion_ids(self, text: str, mark: str, before: int) -> list[int]:
        """Up to the token that ends the turn: the verifier stops there, and what a template writes
        between turns (a line break) is never emitted."""
        room = None
        if self._limit is not None and len(text) > LONGEST_TEXT:
            room = max(self._limit - before, 1)
        ids = self._ids(text, mark, room)
        if room is not None and len(ids) >= room:
            return ids  # the end is far beyond
        ends = [position for position, token in enumerate(ids) if token in self._ends]
        return ids[: ends[-1] + 1] if ends else ids

    def _prove(self, joined: Sequence[_Turn], mark: str) -> None:
        """Compare the prompts of a row's turns with what the tokenizer makes of each as a whole.
        A prompt that ends in a control token, and that the last one begins with, is in it."""
        for turn in joined:
            within = self._encoder.ends_apart(turn.prompt) and turn is not joined[-1]
            if within and joined[-1].prompt.startswith(turn.prompt):
                continue
            if not self._encoder.prove(turn.prompt, turn.prompt_ids, mark):
                raise Rejected("prompt_not_proven", "encoded whole it has other ids")

    def _mark(self, messages: Sequence[Message], tools: Sequence[Any]) -> _Marked:
        document = {"messages": list(messages), "tools": list(tools)}
        if not any(map(self._control.find, texts(document))):
            return _Marked(messages, tools, "")
        try:
            mark = free_mark(document)
        except Marks:
            raise Rejected(CONTROL_IN_TEXT, "beside every noncharacter of Unicode") from None
        return _Marked(
            [self._marked(message, mark) for message in messages],
            [map_texts(tool, partial(self._control.mark, mark=mark)) for tool in tools],
            mark,
        )

    def _marked(self, message: Message, mark: str) -> Message:
        marked = {}
        for name, value in message.items():
            own = message["role"] == "assistant" and name in ("content", "reasoning_content")
            control = self._spoken if own else self._control
            marked[name] = map_texts(value, partial(control.mark, mark=mark))
        return marked

    def _refuse_missing_ids(self, messages: Sequence[Message]) -> None:
        """A template that writes the ids of tool calls writes nothing for one that is missing."""
        for message in messages:
            calls = message.get("tool_calls") or ()
            answered = [message.get("tool_call_id")] if message["role"] == "tool" else []
            ids = [*(call.get("id") for call in calls), *answered]
            if (
                not all(isinstance(item, str) and item for item in ids)
                and self._template.writes_ids
            ):
                raise Rejected("bad_tools", "a tool call, or its return, without the call's id")


def _control_tokens(tokenizer: Tokenizer, template: str) -> set[str]:
    """The added tokens that act: special ones, those that the template writes, and those of their
    form. Others are vocabulary (runs of spaces, a language's tags), in whoever's text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    special = set(tokenizer.all_special_tokens)
    if backend is not None:
        decoder = backend.get_added_tokens_decoder()
        special |= {token.content for token in decoder.values() if token.special}
    return {
        token
        for token in tokenizer.get_added_vocab()
        if token.strip()
        and (token in special or token in template or (token[:2], token[-2:]) == ("<|", "|>"))
    }


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
        long = f"{len(row.token_ids)} tokens" if row.token_ids else f"more than {max_length} tokens"
        raise Rejected("too_long_no_supervision", long)
    return Row(row.token_ids[:max_length], mask, row.turns)
