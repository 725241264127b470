"""Count the supervised tokens of training rows, choose, report."""

from __future__ import annotations

from typing import Any

import numpy as np

from kimi_eagle.artifacts.files import write_json
from kimi_eagle.draft.vocab import REPORT, save_map
from kimi_eagle.job import StageFailed
from kimi_eagle.rows.table import TRAIN, VALIDATE, Rows, load_rows
from kimi_eagle.rows.tokenizer import token_count
from kimi_eagle.stages.context import Context
from kimi_eagle.stages.vocab.choose import choose


def run(context: Context) -> dict[str, Any]:
    facts = context.verifier.facts
    rows = load_rows(context.path("rows"))
    size = context.params.size
    out = context.out("vocab")
    counts = _counts(rows, TRAIN)
    whole = size is None or size == facts.vocab_size
    report: dict[str, Any] = {"verifier_vocab_size": facts.vocab_size}
    if whole:
        selected = list(range(facts.vocab_size))
        report.update(size=facts.vocab_size, filled=0, coverage=1.0)
    else:
        # Ids past the tokenizer's own are padding of the embedding, whatever config.json says.
        real = token_count(context.path("tokenizer"))
        try:
            choice = choose(counts, size, facts.vocab_size, real)
        except ValueError as error:
            raise StageFailed(str(error)) from None
        selected = list(choice.selected)
        save_map(out, selected, facts.vocab_size)
        report.update(size=size, filled=choice.filled, coverage=choice.covered / choice.total)
    apart = _counts(rows, VALIDATE)
    chosen = set(selected)
    total = sum(apart.values())
    report["coverage_val"] = (
        sum(count for token, count in apart.items() if token in chosen) / total if total else None
    )
    write_json(out / REPORT, report)
    return report


def _counts(rows: Rows, split: int) -> dict[int, int]:
    wanted = np.repeat(rows.split == split, np.diff(rows.offsets)) & (rows.loss_mask == 1)
    tokens, counts = np.unique(rows.token_ids[wanted], return_counts=True)
    return {int(token): int(count) for token, count in zip(tokens, counts, strict=True)}
