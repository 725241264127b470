"""Read, check, split, count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kimi_eagle.artifacts.files import write_json
from kimi_eagle.identity import digest_bytes
from kimi_eagle.job import StageFailed
from kimi_eagle.rows.split import validating
from kimi_eagle.rows.table import TRAIN, VALIDATE, save_rows
from kimi_eagle.stages.context import Context
from kimi_eagle.states.samples import BadSample, read_sample, sample_files


def run(context: Context) -> dict[str, Any]:
    params = context.params
    vocab = context.verifier.facts.vocab_size
    rejects: Counter[str] = Counter()
    kept: list[tuple[int, str, Any, Any]] = []
    seen: set[str] = set()
    for number, where, ids, mask, error in _samples(context):
        reason, error = ("bad_record", error) if error else _wrong(ids, mask, vocab)
        if reason:
            if params.on_bad_record == "fail":
                raise StageFailed(
                    f"{where}: {error}; mend it, or set on_bad_record: skip to leave such samples "
                    "out, counted"
                )
            rejects[reason] += 1
            context.events.note(f"left out, {reason}: {where}: {error}")
            continue
        digest = digest_bytes(ids.astype("<i4").tobytes() + mask.astype(np.uint8).tobytes())
        if digest in seen:
            rejects["duplicate"] += 1
            continue
        seen.add(digest)
        kept.append((number, digest, ids, mask))
    if not kept:
        raise StageFailed(f"no row is left, {rejects.total()} samples were left out")
    try:
        apart = validating([item[1] for item in kept], params.val_ratio, params.seed)
    except ValueError as error:
        raise StageFailed(str(error)) from None
    split = [VALIDATE if item[1] in apart else TRAIN for item in kept]
    out = context.out("rows")
    save_rows(
        out,
        [item[2].tolist() for item in kept],
        [item[3].tolist() for item in kept],
        split,
        [0] * len(kept),
        [item[0] for item in kept],
    )
    metrics = {
        "rows": len(kept),
        "rows_train": split.count(TRAIN),
        "rows_val": split.count(VALIDATE),
        "tokens": sum(len(item[2]) for item in kept),
        "supervised_tokens": int(sum(item[3].sum() for item in kept)),
        "rejected": rejects.total(),
    }
    report = {**metrics, "rejects": dict(sorted(rejects.items()))}
    write_json(out / "report.json", report)
    return report


def _samples(context: Context) -> Iterator[tuple[int, str, Any, Any, str]]:
    """(number, where, ids int64 [tokens], mask int64 [tokens], what is wrong with them)."""
    paths = [Path(given.path) for given in context.job.inputs["samples"]]
    if context.params.format == "arrow":
        yield from _arrow(paths)
        return
    try:
        files, others = sample_files(paths, "v1")
    except BadSample as error:
        raise StageFailed(str(error)) from None
    for path in others:
        context.events.note(f"{path.name} is no sample's name (data_N.pt): ignored")
    for number, path in files:
        try:
            sample = read_sample(path, "v1")
        except BadSample as error:
            yield number, path.name, None, None, str(error)
            continue
        assert sample.loss_mask is not None, "a v1 sample has one"
        yield number, path.name, sample.token_ids.numpy(), sample.loss_mask.numpy(), ""


def _arrow(paths: list[Path]) -> Iterator[tuple[int, str, Any, Any, str]]:
    """The records of a data set that was saved to disk, file by file in the order of names."""
    import pyarrow

    number = 0
    for path in sorted(path for path in paths if path.suffix == ".arrow"):
        try:
            with pyarrow.memory_map(str(path)) as source, pyarrow.ipc.open_stream(source) as reader:
                for batch in reader:
                    for record in batch.to_pylist():
                        ids, mask = record.get("input_ids"), record.get("loss_mask")
                        where, error = f"{path.name}:{number}", ""
                        if ids is None or mask is None:
                            error = f"has {sorted(record)}, not input_ids and loss_mask"
                        yield number, where, np.asarray(ids), np.asarray(mask), error
                        number += 1
        except (OSError, pyarrow.ArrowInvalid) as error:
            raise StageFailed(f"{path} cannot be read: {error}") from None


def _wrong(ids: Any, mask: Any, vocab: int) -> tuple[str, str]:
    """Why a sample cannot be trained on: the reason to count it by, and in words."""
    if len(ids) != len(mask):
        return "lengths", f"{len(ids)} input_ids, and a loss_mask of {len(mask)}"
    if len(ids) < 2:
        return "too_short", f"{len(ids)} tokens"
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        found = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        return "other_vocabulary", f"token {found} is outside the verifier's 0..{vocab - 1}"
    if not np.isin(mask, (0, 1)).all():
        return "mask", "the loss_mask holds other numbers than 0 and 1"
    if not mask.any():
        return "nothing_supervised", "the loss_mask is all zero: there is nothing to learn"
    return "", ""
