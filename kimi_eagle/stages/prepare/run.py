"""Read, render, cut, split, count."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from kimi_eagle.artifacts.files import write_json
from kimi_eagle.identity import digest_document
from kimi_eagle.job import StageFailed
from kimi_eagle.rows.conversations import Conversation, Rejected, read_conversation
from kimi_eagle.rows.render import Renderer, Row, cut
from kimi_eagle.rows.sources import BadRecord, read_records
from kimi_eagle.rows.split import validating
from kimi_eagle.rows.table import TRAIN, VALIDATE, save_rows
from kimi_eagle.rows.tokenizer import load_tokenizer
from kimi_eagle.stages.context import Context

_EXAMPLES = 3


def run(context: Context) -> dict[str, Any]:
    params = context.params
    renderer = Renderer(load_tokenizer(context.path("tokenizer")), params.thinking)
    rejects = _Rejects()
    kept: list[tuple[int, int, str, Row]] = []
    seen: set[str] = set()
    conversations = repaired = 0
    for index, source in enumerate(params.sources):
        for number, conversation in _conversations(context, index, source, rejects):
            digest = digest_document("conversation/1", conversation.document())
            where = f"{Path(source.path).name}:{number}"
            if digest in seen:
                rejects.add("duplicate", where, "")
                continue
            seen.add(digest)
            try:
                rows = renderer.rows(conversation)
            except Rejected as error:
                rejects.add(error.reason, where, str(error))
                continue
            whole = len(kept)
            for row in rows:
                try:
                    kept.append((index, number, digest, cut(row, params.max_length)))
                except Rejected as error:
                    rejects.add(error.reason, where, str(error))
            conversations += len(kept) > whole
            repaired += conversation.repaired
    if not kept:
        raise StageFailed(
            f"no row is left, {rejects.total} records were left out: "
            f"{rejects.summary() or 'the sources are empty'}"
        )
    try:
        apart = validating([item[2] for item in kept], params.val_ratio, params.seed)
    except ValueError as error:
        raise StageFailed(str(error)) from None
    split = [VALIDATE if item[2] in apart else TRAIN for item in kept]
    out = context.out("rows")
    save_rows(
        out,
        [item[3].token_ids for item in kept],
        [item[3].loss_mask for item in kept],
        split,
        [item[0] for item in kept],
        [item[1] for item in kept],
    )
    metrics = {
        "conversations": conversations,
        "rows": len(kept),
        "rows_train": split.count(TRAIN),
        "rows_val": split.count(VALIDATE),
        "tokens": sum(len(item[3].token_ids) for item in kept),
        "supervised_tokens": sum(sum(item[3].loss_mask) for item in kept),
        "rejected": rejects.total,
        "repaired_surrogates": repaired,
    }
    write_json(out / "report.json", {**metrics, "rejects": dict(sorted(rejects.counts.items()))})
    for reason, examples in rejects.examples.items():
        context.events.note(f"{rejects.counts[reason]} left out, {reason}: {', '.join(examples)}")
    return {**metrics, "rejects": dict(sorted(rejects.counts.items()))}


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
