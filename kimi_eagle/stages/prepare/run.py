"""Read, render, cut, split, count."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

from kimi_eagle.artifacts.files import write_json
from kimi_eagle.job import StageFailed
from kimi_eagle.rows.buckets import KEPT, Buckets
from kimi_eagle.rows.intake import Intake, Refused
from kimi_eagle.rows.render import Renderer
from kimi_eagle.rows.split import validating
from kimi_eagle.rows.table import TRAIN, VALIDATE, RowsWriter
from kimi_eagle.rows.tokenizer import load_tokenizer
from kimi_eagle.rows.tool_support import ToolSupport
from kimi_eagle.stages.context import Context
from kimi_eagle.stages.prepare.parallel import cores
from kimi_eagle.stages.prepare.rendering import Left, rendered


def run(context: Context) -> dict[str, Any]:
    params = context.params
    tokenizer = load_tokenizer(context.path("tokenizer"))
    renderer = Renderer(tokenizer, params.thinking, params.max_length)
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
    names = [str(path) for path in intake.paths]
    digests: list[str] = []
    owner = array("Q")  # for each row its conversation, by position in `digests`
    supervised = turns = repaired = dropped = 0
    with RowsWriter(context.scratch("rows")) as writer:
        processes = params.workers or cores()
        try:
            for taken, found in rendered(
                intake, renderer, ToolSupport(tokenizer), params.max_length, processes
            ):
                lost = [made for made in found if isinstance(made, Left)]
                if len(lost) == len(found):
                    buckets.add(lost[0].reason, taken.place, lost[0].detail)
                    continue
                buckets.add(KEPT, taken.place)
                dropped += len(lost)
                repaired += taken.conversation.repaired
                place = (taken.place.file, taken.place.line or 0, taken.place.record)
                for made in found:
                    if not isinstance(made, Left):
                        writer.add(made.token_ids, made.loss_mask, *place, taken.source)
                        owner.append(len(digests))
                        supervised += int(made.loss_mask.sum())
                        turns += made.turns
                digests.append(taken.digest)
        except Refused as error:
            raise StageFailed(str(error)) from None
        _refuse_surprises(buckets, params.limits, names)
        if not supervised:
            raise StageFailed("0 supervised tokens: nothing could be learnt from these rows")
        try:
            apart = validating(digests, params.val_ratio, params.seed)
        except ValueError as error:
            raise StageFailed(str(error)) from None
        held = [digest in apart for digest in digests]
        split = [VALIDATE if held[conversation] else TRAIN for conversation in owner]
        out = context.out("rows")
        writer.finish(out, split)
        metrics: dict[str, Any] = {
            "records": buckets.records,
            "conversations": buckets.counts[KEPT],
            "rows": len(writer),
            "rows_train": split.count(TRAIN),
            "rows_val": split.count(VALIDATE),
            "rows_too_long": dropped,
            "tokens": writer.tokens,
            "supervised_tokens": supervised,
            "rejected": buckets.rejected,
            "repaired_surrogates": repaired,
            "tools_undeclared": intake.undeclared,
        }
    write_json(out / "report.json", {**metrics, "buckets": buckets.document()})
    for note in buckets.notes(names):
        context.events.note(note)
    if intake.undeclared:
        context.events.note(
            f"{intake.undeclared} conversations call tools and declare none: a server would have "
            "been sent their declarations"
        )
    # What is rendered is proven, prompt by prompt; what could not be is in a bucket of its own.
    return {
        **metrics,
        "buckets": buckets.metrics(),
        "turns": turns,
        "prompts_proven": turns,
    }


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
