"""Read evaluation prompts: messages without their answer. Pure but for the file it reads.

Sets are read as they are published: `messages`; `turns` (MT-Bench, Spec-Bench); `prompt` (a
HumanEval task, asked as it stands); `question` (GSM8K, whose `answer` is not looked at).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kimi_eagle.rows.conversations import Rejected, read_messages
from kimi_eagle.rows.sources import BadRecord, read_records
from kimi_eagle.rows.template import END_THINK, THINK

# In this order: a record of one set may carry a field of another beside its own.
FORMS = ("messages", "turns", "prompt", "question")


class BadPrompt(ValueError):
    """A prompt that cannot be asked; the message says which."""


@dataclass(frozen=True)
class Asked:
    """One conversation to be had: what is said first, and what is asked after each answer."""

    messages: tuple[dict[str, Any], ...]
    later: tuple[str, ...] = ()
    category: str | None = None


def read_prompts(
    path: Path, limit: int | None, turns: int | None = None, *, by_category: bool = False
) -> list[Asked]:
    """The conversations of a file, in order.

    Args: `limit`: at most this many, with `by_category` of each category; `turns`: at most this
        many questions of each.

    Raises:
        BadPrompt: a line that is none of the forms, or no prompt at all.
    """
    found: list[Asked] = []
    counts: Counter[str | None] = Counter()
    try:
        for record in read_records(path):
            if limit is not None and not by_category and len(found) >= limit:
                break
            where = f"{path}:{record.number}"
            if record.error is not None:
                raise BadPrompt(f"{where}: {record.error}")
            one = read_prompt(record.value, where)
            counts[one.category] += 1
            if limit is not None and by_category and counts[one.category] > limit:
                continue
            found.append(replace(one, later=one.later[: None if turns is None else turns - 1]))
    except BadRecord as error:
        raise BadPrompt(str(error)) from None
    if not found:
        raise BadPrompt(f"{path} holds no prompt")
    return found


def read_prompt(value: Any, where: str) -> Asked:
    """One record of a set.

    Raises:
        BadPrompt: with `where`.
    """
    form = next((name for name in FORMS if isinstance(value, Mapping) and value.get(name)), None)
    if form is None:
        raise BadPrompt(f"{where}: a prompt has `messages`, `turns`, `prompt` or `question`")
    given: Any = value[form]
    later: tuple[str, ...] = ()
    if form == "turns":
        if not isinstance(given, list) or not all(isinstance(t, str) and t.strip() for t in given):
            raise BadPrompt(f"{where}: `turns` must be a list of questions, each a text")
        later = tuple(_asked(turn, where)["content"] for turn in given[1:])
        given = given[0]
    messages = _messages(given, where) if form == "messages" else (_asked(given, where),)
    category = value.get("category")
    return Asked(messages, later, category if isinstance(category, str) else None)


def _asked(question: Any, where: str) -> dict[str, Any]:
    (message,) = _messages([{"role": "user", "content": question}], where)
    return message


def _messages(given: Any, where: str) -> tuple[dict[str, Any], ...]:
    try:
        messages = read_messages(given)
    except Rejected as error:
        raise BadPrompt(f"{where}: {error}") from None
    if messages[-1]["role"] == "assistant":
        raise BadPrompt(f"{where}: the last message is the assistant's; a prompt ends before it")
    return tuple(messages)


def went_on(
    messages: Sequence[Mapping[str, Any]], prompt: str, answer: str, question: str
) -> list[dict[str, Any]]:
    """A conversation after one more turn: what was said, the answer, and the next question.

    Args:
        prompt: what was sent, as text: whether it opened the reasoning is seen by its end.
        answer: what came, as text, without the token that ends the turn. Reasoning that was cut
            off before its end leaves an empty answer, as a server hands it back.
    """
    said: dict[str, Any] = {"role": "assistant", "content": answer}
    if prompt.endswith(THINK) or answer.lstrip().startswith(THINK):
        reasoning, _, content = answer.partition(END_THINK)
        said["content"] = content
        said["reasoning_content"] = reasoning.lstrip().removeprefix(THINK)
    return [*map(dict, messages), said, {"role": "user", "content": question}]
