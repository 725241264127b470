"""Read, render, cut, split, count."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_eagle.artifacts.files import write_json
from kimi_eagle.identity import digest_document
from kimi_eagle.job import StageFailed
from kimi_eagle.rows.conversations import Conversation, Rejected, read_conversation
from kimi_eagle.rows.render import Renderer
from kimi_eagle.rows.sources import BadRecord, read_records
from kimi_eagle.rows.split import validating
from kimi_eagle.rows.table import TRAIN, VALIDATE, RowsWriter
from kimi_eagle.rows.tokenizer import load_tokenizer
from kimi_eagle.stages.context import Context
from kimi_eagle.stages.prepare.parallel import cores
from kimi_eagle.stages.prepare.rendering import Left, rendered

_EXAMPLES = 3


@dataclass(frozen=True)
class _Item:
    """A conversation, where it came from, and its digest."""

    source: int
    record: int
    where: str
    digest: str
    conversation: Conversation


def run(context: Context) -> dict[str, Any]:
    params = context.params
    renderer = Renderer(
        load_tokenizer(context.path("tokenizer")), params.thinking, params.max_length
    )
    rejects = _Rejects()
    digests: list[str] = []
    owner = array("Q")  # for each row its conversation, by position in `digests`
    supervised = turns = repaired = 0
    with RowsWriter(context.scratch("rows")) as writer:
        items = _unseen(context, rejects)
        processes = params.workers or cores()
        for item, found in rendered(items, renderer, params.max_length, processes):
            whole = len(writer)
            for made in found:
                if isinstance(made, Left):
                    rejects.add(made.reason, item.where, made.detail)
                    continue
                writer.add(made.token_ids, made.loss_mask, item.source, item.record)
                owner.append(len(digests))
                supervised += int(made.loss_mask.sum())
                turns += made.turns
            if len(writer) > whole:
                digests.append(item.digest)
                repaired += item.conversation.repaired
        if not digests:
            raise StageFailed(
                f"no row is left, {rejects.total} records were left out: "
                f"{rejects.summary() or 'the sources are empty'}"
            )
        try:
            apart = validating(digests, params.val_ratio, params.seed)
        except ValueError as error:
            raise StageFailed(str(error)) from None
        held = [digest in apart for digest in digests]
        split = [VALIDATE if held[conversation] else TRAIN for conversation in owner]
        out = context.out("rows")
        writer.finish(out, split)
        metrics: dict[str, Any] = {
            "conversations": len(digests),
            "rows": len(writer),
            "rows_train": split.count(TRAIN),
            "rows_val": split.count(VALIDATE),
            "tokens": writer.tokens,
            "supervised_tokens": supervised,
            "rejected": rejects.total,
            "repaired_surrogates": repaired,
        }
    metrics["rejects"] = dict(sorted(rejects.counts.items()))
    write_json(out / "report.json", metrics)
    for reason, examples in rejects.examples.items():
        context.events.note(f"{rejects.counts[reason]} left out, {reason}: {', '.join(examples)}")
    # What rows() returns is proven, prompt by prompt; what could not be is among the rejects.
    return {**metrics, "turns": turns, "prompts_proven": turns}


def _unseen(context: Context, rejects: _Rejects) -> Iterator[_Item]:
    """The conversations of all sources, each once."""
    seen: set[str] = set()
    for index, source in enumerate(context.params.sources):
        for number, conversation in _conversations(context, index, source, rejects):
            digest = digest_document("conversation/1", conversation.document())
            where = f"{Path(source.path).name}:{number}"
            if digest in seen:
                rejects.add("duplicate", where, "")
                continue
            seen.add(digest)
            yield _Item(index, number, where, digest, conversation)


class _Rejects:
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, list[str]] = {}

    def add(self, reason: str, where: str, detail: str) -> None:
        self.counts[reason] += 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < _EXAMPLES:
            examples.append(f"{where} ({detail})" if detail else where)

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def summary(self) -> str:
        return ", ".join(f"{count} {reason}" for reason, count in sorted(self.counts.items()))


def _conversations(context: Context, index: int, source: Any, rejects: _Rejects) -> Any:
    """(record number, conversation) of one source; what cannot be read is counted, or fatal."""
    taken = 0
    for given in context.job.inputs[f"sources.{index}"]:
        path = Path(given.path)
        try:
            for record in read_records(path):
                if source.limit is not None and taken >= source.limit:
                    return
                where = f"{path.name}:{record.number}"
                if record.error is not None:
                    if context.params.on_bad_record == "fail":
                        raise StageFailed(
                            f"{path}:{record.number}: {record.error}; mend the record, or set "
                            "on_bad_record: skip to leave such records out, counted"
                        )
                    rejects.add("bad_record", where, record.error)
                    continue
                try:
                    conversation: Conversation = read_conversation(record.value, source.format)
                except Rejected as error:
                    rejects.add(error.reason, where, str(error))
                    continue
                taken += 1
                yield record.number, conversation
        except BadRecord as error:
            raise StageFailed(str(error)) from None
