"""Read, render, cut, split, count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kimi_eagle.artifacts.files import write_json
from kimi_eagle.job import StageFailed
from kimi_eagle.rows.buckets import KEPT, Buckets, Place, Rejected
from kimi_eagle.rows.conversations import Conversation
from kimi_eagle.rows.intake import Intake, Refused
from kimi_eagle.rows.render import Renderer, Row, cut
from kimi_eagle.rows.split import validating
from kimi_eagle.rows.table import TRAIN, VALIDATE, save_rows
from kimi_eagle.rows.tokenizer import load_tokenizer
from kimi_eagle.rows.tool_support import ToolSupport
from kimi_eagle.stages.context import Context


def run(context: Context) -> dict[str, Any]:
    params = context.params
    tokenizer = load_tokenizer(context.path("tokenizer"))
    renderer, support = Renderer(tokenizer, params.thinking), ToolSupport(tokenizer)
    given = [context.job.inputs[f"sources.{index}"] for index in range(len(params.sources))]
    buckets = Buckets()
    intake = Intake(
        params.sources,
        [[Path(item.path) for item in items] for items in given],
        buckets,
        on_bad_record=params.on_bad_record,
        deduplicate=params.deduplicate,
        seed=params.seed,
    )
    kept: list[tuple[int, Place, str, Row]] = []
    repaired = dropped = 0
    try:
        for taken in intake:
            rows, lost = _rows(renderer, support, taken.conversation, params.max_length)
            if rows:
                buckets.add(KEPT, taken.place)
                repaired += taken.conversation.repaired
                dropped += len(lost)
                kept += [(taken.source, taken.place, taken.digest, row) for row in rows]
            else:
                buckets.add(lost[0].reason, taken.place, lost[0].detail)
    except Refused as error:
        raise StageFailed(str(error)) from None
    names = [str(path) for path in intake.paths]
    _refuse_surprises(buckets, params.limits, names)
    try:
        apart = validating([item[2] for item in kept], params.val_ratio, params.seed)
    except ValueError as error:
        raise StageFailed(str(error)) from None
    split = [VALIDATE if item[2] in apart else TRAIN for item in kept]
    supervised = sum(sum(row.loss_mask) for *_, row in kept)
    if not supervised:
        raise StageFailed("0 supervised tokens: nothing could be learnt from these rows")
    out = context.out("rows")
    save_rows(
        out,
        [row.token_ids for *_, row in kept],
        [row.loss_mask for *_, row in kept],
        split,
        [item[0] for item in kept],
        [item[1].record for item in kept],
        [item[1].file for item in kept],
        [item[1].line or 0 for item in kept],
    )
    metrics = {
        "records": buckets.records,
        "conversations": buckets.counts[KEPT],
        "rows": len(kept),
        "rows_train": split.count(TRAIN),
        "rows_val": split.count(VALIDATE),
        "rows_too_long": dropped,
        "tokens": sum(len(row.token_ids) for *_, row in kept),
        "supervised_tokens": supervised,
        "rejected": buckets.rejected,
        "repaired_surrogates": repaired,
        "tools_undeclared": intake.undeclared,
    }
    report = {**metrics, "buckets": buckets.document()}
    write_json(out / "report.json", report)
    for note in buckets.notes(names):
        context.events.note(note)
    if intake.undeclared:
        context.events.note(
            f"{intake.undeclared} conversations call tools and declare none: a server would have "
            "been sent their declarations"
        )
    return {**metrics, "buckets": buckets.metrics()}


def _rows(
    renderer: Renderer, support: ToolSupport, conversation: Conversation, max_length: int
) -> tuple[list[Row], list[Rejected]]:
    """A conversation's rows, and why what it has not given is missing."""
    rows: list[Row] = []
    lost: list[Rejected] = []
    try:
        support.refuse_unwritten(conversation)
        whole = renderer.rows(conversation)
    except Rejected as error:
        return [], [error]
    for row in whole:
        try:
            rows.append(cut(row, max_length))
        except Rejected as error:
            lost.append(error)
    return rows, lost


def _refuse_surprises(buckets: Buckets, limits: Any, names: list[str]) -> None:
    """Raises: StageFailed: no row is left, or the manifest does not allow what was left out."""
    if not buckets.counts[KEPT]:
        why = "; ".join(buckets.notes(names)) or "the sources are empty"
        raise StageFailed(
            f"no row is left, so 0 supervised tokens; {buckets.records} records were left out: "
            f"{why}"
        )
    beyond = buckets.exceeded(limits.max_rejected, limits.by_reason, names)
    if beyond:
        raise StageFailed(
            f"{'; '.join(beyond)}; mend the records, or allow more under `limits` of the stage"
        )
