"""Compare the prompts of rows with those that a running server makes of the same messages: a
program (see `engines.launch`).

A row says which tokens the verifier is given (loss mask 0) and which it emits (1): what precedes
each emitted part is a prompt. The messages of it are read from the row's source again; the server
renders and encodes them itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from kimi_eagle.engines.endpoint import Endpoint, RequestRefused
from kimi_eagle.engines.launch import main
from kimi_eagle.job import StageFailed
from kimi_eagle.rows.answers import STOP, Answer
from kimi_eagle.rows.conversations import Rejected, read_conversation
from kimi_eagle.rows.dialogue import Asking, Dialogue
from kimi_eagle.rows.questions import read_questions
from kimi_eagle.rows.render import Renderer, _reasoning_apart
from kimi_eagle.rows.sources import read_records
from kimi_eagle.rows.table import Rows, load_rows
from kimi_eagle.rows.tokenizer import load_tokenizer

# Mismatches that are listed one by one; all are counted.
_LISTED = 100
_AT_ONCE = 16
# What `thinking` of the stage may have passed to the template.
_THINKING = {"auto": (None, False), "always": (None,), "never": (False,)}


@dataclass(frozen=True)
class _Asked:
    """A prompt of a row, and what a client sends for it."""

    row: int
    where: str
    token_ids: tuple[int, ...]
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any]
    thinking: bool | None


def check(job: Mapping[str, Any]) -> dict[str, Any]:
    rows = load_rows(Path(job["rows"]))
    endpoint = Endpoint(job["url"], job["model"])
    tokenizer = load_tokenizer(Path(job["verifier"]))
    total = len(rows) if job["limit"] is None else min(job["limit"], len(rows))
    found = _Found(rows, Renderer(tokenizer), job, total)
    prompts = mismatched = 0
    listed: list[dict[str, Any]] = []
    for asked, served in _served(endpoint, found.prompts()):
        prompts += 1
        difference = _difference(asked, served, tokenizer)
        if difference is not None:
            mismatched += 1
            if len(listed) < _LISTED:
                listed.append(difference)
    return {
        "model": endpoint.model,
        "rows": total,
        "prompts": prompts,
        "mismatched": mismatched,
        "mismatches": listed,
        "not_found": found.missing()[:_LISTED],
        "not_found_count": len(found.missing()),
    }


class _Found:
    """Finds the messages of rows in their sources."""

    def __init__(self, rows: Rows, renderer: Renderer, job: Mapping[str, Any], total: int):
        self._rows, self._renderer, self._job = rows, renderer, job
        self._params = job["params"]
        self._of_record: dict[tuple[int, int], list[int]] = {}
        for row in range(total):
            place = (int(rows.source[row]), int(rows.record[row]))
            self._of_record.setdefault(place, []).append(row)
        self._missing = set(range(total))

    def missing(self) -> list[dict[str, int]]:
        """Rows that nothing in their sources renders as."""
        return [
            {
                "row": row,
                "source": int(self._rows.source[row]),
                "record": int(self._rows.record[row]),
            }
            for row in sorted(self._missing)
        ]

    def prompts(self) -> Iterator[_Asked]:
        """Every prompt of every row, in the order of the sources."""
        for index, paths in enumerate(self._job["sources"]):
            for path in map(Path, paths):
                for record in read_records(path):
                    # Where a source is several files, records of each have the number.
                    of_record = self._of_record.get((index, record.number), ())
                    rows = [row for row in of_record if row in self._missing]
                    if rows and record.error is None:
                        where = f"{path.name}:{record.number}"
                        yield from self._of(index, record.value, rows, where)

    def _of(self, source: int, value: Any, rows: Sequence[int], where: str) -> Iterator[_Asked]:
        form = self._params["sources"][source]["format"]
        try:
            if self._job["kind"] == "regenerate":
                found = self._regenerated(value, form, rows)
            else:
                found = self._prepared(value, form, rows)
        except Rejected:
            return
        for row, prompts in found.items():
            self._missing.discard(row)
            for ids, messages, tools, thinking in prompts:
                yield _Asked(row, where, ids, messages, tools, thinking)

    def _prepared(self, value: Any, form: str, rows: Sequence[int]) -> dict[int, list[Any]]:
        """Row → its prompts, of rows that this record's conversation renders as."""
        conversation = read_conversation(value, form)
        messages = conversation.messages
        with suppress(Rejected):  # of a verifier that does not think
            messages = tuple(map(_reasoning_apart, messages))
        options = _THINKING[self._params["thinking"]]
        known: dict[tuple[int, ...], Any] = {}
        for index, message in enumerate(messages):
            if message["role"] == "assistant" and index:
                for thinking in options:
                    ids = self._renderer.prompt_ids(
                        messages[:index], conversation.tools, thinking=thinking
                    )
                    known.setdefault(
                        tuple(ids), (tuple(ids), messages[:index], conversation.tools, thinking)
                    )
        found = {}
        for row in rows:
            prompts = [known.get(self._ids(row, start)) for start, _ in self._emitted(row)]
            if all(prompts):
                found[row] = prompts
        return found

    def _regenerated(self, value: Any, form: str, rows: Sequence[int]) -> dict[int, list[Any]]:
        """The same, of rows of the verifier's own answers: each is what is asked next after."""
        params = self._params
        thinking = False if params["thinking"] == "never" else None
        length = max(len(self._rows.ids(row)) for row in rows)
        asking = Asking(self._renderer, thinking, length + 1, length + 1, True)
        dialogue = Dialogue(read_questions(value, form), asking)
        found: dict[int, list[Any]] = {}
        for row in rows:
            prompts = []
            for start, end in self._emitted(row):
                prompt = dialogue.prompt()
                if prompt is None or prompt.token_ids != self._ids(row, start):
                    return found
                asked = (prompt.token_ids, list(dialogue.messages), dialogue.questions.tools)
                prompts.append((*asked, thinking))
                dialogue.take(Answer(self._rows.ids(row)[start:end], STOP))
            found[row] = prompts
        return found

    def _ids(self, row: int, end: int) -> tuple[int, ...]:
        return tuple(self._rows.ids(row)[:end].tolist())

    def _emitted(self, row: int) -> list[tuple[int, int]]:
        """(start, end) of each part of a row that the verifier emits."""
        mask = self._rows.mask(row).astype(np.int8)
        edges = np.diff(mask, prepend=0, append=0)
        starts, ends = np.nonzero(edges == 1)[0], np.nonzero(edges == -1)[0]
        return [(int(start), int(end)) for start, end in zip(starts, ends, strict=True)]


def _served(
    endpoint: Endpoint, asked: Iterator[_Asked]
) -> Iterator[tuple[_Asked, list[int] | str]]:
    """Each prompt with the ids that the server makes of it, or why it makes none; in order."""

    def one(item: _Asked) -> list[int] | str:
        options = {} if item.thinking is None else {"thinking": item.thinking}
        try:
            return endpoint.tokenize(item.messages, item.tools, options)
        except RequestRefused as error:
            return str(error)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        waiting: list[tuple[_Asked, Future[list[int] | str]]] = []
        while True:
            waiting += [(item, pool.submit(one, item)) for item in islice(asked, _AT_ONCE)]
            if not waiting:
                return
            item, future = waiting.pop(0)
            yield item, future.result()


def _difference(asked: _Asked, served: list[int] | str, tokenizer: Any) -> dict[str, Any] | None:
    """Where two prompts part; None where they do not."""
    place = {"row": asked.row, "record": asked.where, "tokens": len(asked.token_ids)}
    if isinstance(served, str):
        return {**place, "error": served}
    ours = list(asked.token_ids)
    if ours == served:
        return None
    both = zip(ours, served, strict=False)
    end = min(len(ours), len(served))
    at = next((at for at, (a, b) in enumerate(both) if a != b), end)
    return {
        **place,
        "server_tokens": len(served),
        "position": at,
        "ours": _token(ours, at, tokenizer),
        "server": _token(served, at, tokenizer),
        "before": tokenizer.decode(ours[max(at - 8, 0) : at]),
    }


def _token(ids: Sequence[int], at: int, tokenizer: Any) -> dict[str, Any] | None:
    """The token at a position; None past the end."""
    if at >= len(ids):
        return None
    text = tokenizer.convert_ids_to_tokens([ids[at]])[0]
    return {"id": ids[at], "token": text}


def program(job: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return check(job)
    except OSError as error:
        raise StageFailed(str(error)) from None


if __name__ == "__main__":
    sys.exit(main(program))
