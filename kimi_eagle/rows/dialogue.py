"""Ask a conversation's questions one after the other, each after the verifier's own answers.

The prompt of a turn is what serving would send: the verifier's chat template over the messages so
far, in which its answers are text, as a client has them. The row of a turn is that prompt and the
token ids that were emitted after it; these are never encoded again, since an answer that is decoded
and encoded comes out as other ids now and then. Where the next prompt begins with the row before
it, token for token, the two are one row, as in `rows.render`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

from kimi_eagle.job import StageFailed
from kimi_eagle.rows.answers import LENGTH, STOP, Answer, Answers, Prompt
from kimi_eagle.rows.conversations import Rejected
from kimi_eagle.rows.questions import Questions
from kimi_eagle.rows.render import Renderer, Row, continues
from kimi_eagle.rows.template import END_THINK, THINK


@dataclass(frozen=True)
class Asking:
    """How questions are asked."""

    renderer: Renderer
    thinking: bool | None
    """The template's `thinking` option; None leaves it to the template."""
    max_length: int
    """Tokens of a row: a prompt and its answer."""
    max_tokens: int
    """Tokens of an answer."""
    keep_cut: bool
    """Whether an answer that a limit cut off is a row's."""


@dataclass(frozen=True)
class Asked:
    """One question and what came of it."""

    turn: int
    prompt: Prompt
    answer: Answer
    kept: bool
    """Whether it is part of a row."""


class Dialogue:
    """One conversation as it is asked: `prompt`, `take`, `prompt`, …, until there is none."""

    def __init__(self, questions: Questions, asking: Asking, *, record: bool = True):
        """Args: `record`: whether what was asked, and the rows of it, are wanted at all."""
        self.questions = questions
        self._asking = asking
        self.messages: list[dict[str, Any]] = []
        """What was said so far, the question that is to be asked now included."""
        self._ready: Prompt | None = None
        self._record = record
        self._thinks = False
        """Whether the prompt ends in an open `<think>`."""
        self.turn = 0
        """The turn that is to be asked next."""
        self.ended: str | None = None
        """Why nothing more is asked; `asked` when everything was."""
        self.asked: list[Asked] = []
        self.rows: list[Row] = []

    @property
    def turns(self) -> int:
        return len(self.questions.turns)

    def prompt(self) -> Prompt | None:
        """What is to be asked now; None when the conversation is over."""
        if self._ready is None and self.ended is None:
            if self.turn == self.turns:
                self.ended = "asked"
            else:
                self.messages += self.questions.turns[self.turn]
                self._ready = self._rendered()
        return self._ready

    def _rendered(self) -> Prompt | None:
        asking = self._asking
        try:
            ids = tuple(
                asking.renderer.prompt_ids(
                    self.messages, self.questions.tools, thinking=asking.thinking
                )
            )
        except Rejected as error:
            self.ended = error.reason
            return None
        think = tuple(asking.renderer.encode(THINK))
        self._thinks = ids[-len(think) :] == think
        limit = min(asking.max_tokens, asking.max_length - len(ids))
        if limit < 1:
            self.ended = "prompt_too_long"
            return None
        return Prompt(ids, limit)

    def take(self, answer: Answer) -> None:
        """Go on with the answer to the prompt."""
        prompt = self._ready
        assert prompt is not None, "nothing was asked"
        self._ready = None
        if answer.finish == LENGTH:
            self._add(prompt, answer, self._asking.keep_cut)
            self.ended = "after_length"
            return
        renderer = self._asking.renderer
        text = renderer.decode([int(token) for token in answer.token_ids[:-1]])
        reasoning, content = self._parts(text)
        if not content.strip():
            self._add(prompt, answer, kept=False)
            self.ended = "after_empty"
            return
        self._add(prompt, answer, kept=True)
        if self.turn < self.turns and renderer.control_token(text):
            # A tool's call, or a turn within the turn: no client would send it back as text.
            self.ended = "after_control_token"
            return
        message = {"role": "assistant", "content": content}
        if reasoning.strip():
            message["reasoning_content"] = reasoning
        self.messages.append(message)

    def _parts(self, text: str) -> tuple[str, str]:
        """(reasoning, content) of an answer, as a server's parser tells them apart."""
        if self._thinks:
            reasoning, _, content = text.partition(END_THINK)
            return reasoning, content
        if text.lstrip().startswith(THINK) and END_THINK in text:
            reasoning, _, content = text.lstrip()[len(THINK) :].partition(END_THINK)
            return reasoning, content
        return "", text

    def _add(self, prompt: Prompt, answer: Answer, kept: bool) -> None:
        if self._record:
            self._recorded(prompt, answer, kept)
        self.turn += 1

    def _recorded(self, prompt: Prompt, answer: Answer, kept: bool) -> None:
        self.asked.append(Asked(self.turn, prompt, answer, kept))
        if kept:
            emitted = tuple(int(token) for token in answer.token_ids)
            row = Row(
                (*prompt.token_ids, *emitted),
                (0,) * len(prompt.token_ids) + (1,) * len(emitted),
                (self.turn,),
            )
            if self.rows and continues(self.rows[-1], row):
                before = self.rows.pop()
                mask = before.loss_mask + row.loss_mask[len(before.loss_mask) :]
                row = Row(row.token_ids, mask, before.turns + row.turns)
            self.rows.append(row)


class Keeping(Protocol):
    """What new answers are handed to."""

    def add(self, key: str, answer: Answer) -> None: ...


Ask = Callable[[Sequence[Prompt]], Iterator[tuple[int, Answer]]]
"""Asks prompts; yields (position, answer) as answers come."""


def known_only(dialogues: Sequence[Dialogue], answers: Answers) -> list[Dialogue]:
    """Take every conversation as far as known answers lead; returns those that are not over."""
    return [dialogue for dialogue in dialogues if _advance(dialogue, answers) is not None]


def ask_all(
    dialogues: Sequence[Dialogue],
    answers: Answers,
    ask: Ask,
    keeping: Keeping,
    chunk: int,
    progress: Callable[[int, int], None],
) -> int:
    """Bring every conversation to its end; returns how many answers were asked for.

    All first turns are asked, then all second ones, and so on, in the order of the conversations,
    each prompt once: what reaches an engine, and in which order, depends on nothing else.

    Args:
        chunk: prompts handed to `ask` at once.
        progress: called with turns done and turns in all, now and then.

    Raises:
        StageFailed: the engine did not answer, or not as far as it was asked to.
    """
    total = sum(dialogue.turns for dialogue in dialogues)
    new = 0
    while True:
        waiting: dict[tuple[int, ...], Prompt] = {}
        left = 0
        for dialogue in dialogues:
            prompt = _advance(dialogue, answers)
            if prompt is not None:
                left += dialogue.turns - dialogue.turn
                known = waiting.get(prompt.token_ids)
                if known is None or known.limit < prompt.limit:
                    waiting[prompt.token_ids] = prompt
        if not waiting:
            progress(total, total)
            return new
        before, prompts, done = new, iter(waiting.values()), total - left
        while batch := list(islice(prompts, chunk)):
            for position, answer in ask(batch):
                prompt = batch[position]
                if answer.finish == LENGTH and len(answer.token_ids) < prompt.limit:
                    raise StageFailed(
                        f"the engine ended an answer after {len(answer.token_ids)} tokens, before "
                        f"its limit of {prompt.limit}: its own limit of tokens is too low"
                    )
                answers.add(prompt.key, answer)
                keeping.add(prompt.key, answer)
                new += 1
                done += 1
                if new % max(total // 500, 1) == 0:
                    progress(min(done, total), total)
        if new - before < len(waiting):
            raise StageFailed(f"{len(waiting) - new + before} prompts came back without an answer")


def _advance(dialogue: Dialogue, answers: Answers) -> Prompt | None:
    """Go on for as long as answers are known; the prompt that has none."""
    while (prompt := dialogue.prompt()) is not None:
        answer = answers.get(prompt)
        if answer is None:
            return prompt
        dialogue.take(answer)
    return None


@dataclass
class Tally:
    """What came of all questions."""

    asked: int = 0
    """Questions that have an answer."""
    finish: Counter[str] = field(default_factory=lambda: Counter({STOP: 0, LENGTH: 0}))
    empty: int = 0
    """Answers that say nothing: the verifier ended its turn at once, or after its reasoning."""
    dropped: int = 0
    """Answers that a limit cut off, and that are left out for it."""
    unasked: Counter[str] = field(default_factory=Counter)
    """User turns that were not asked, by reason."""
    tokens: int = 0
    """Tokens of all answers."""

    def add(self, dialogue: Dialogue) -> None:
        """Count one conversation that is over."""
        for item in dialogue.asked:
            self.asked += 1
            self.finish[item.answer.finish] += 1
            self.tokens += len(item.answer.token_ids)
            self.empty += item.answer.finish == STOP and not item.kept
            self.dropped += item.answer.finish == LENGTH and not item.kept
        left = dialogue.turns - dialogue.turn
        if left:
            self.unasked[str(dialogue.ended)] += left
        if dialogue.questions.unasked:
            self.unasked["after_tool"] += dialogue.questions.unasked
