"""Show what `verify`, `check-rows`, `gc`, `pin` and `registry` found and did."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from kimi_eagle.collect import Collected
from kimi_eagle.records import ArtifactRecord
from kimi_eagle.registry.keeping import Pin
from kimi_eagle.registry.maintenance import Copied
from kimi_eagle.render import emit_json, size, when
from kimi_eagle.serving_check import ServingCheck
from kimi_eagle.terminal import Hash, human_seconds, human_size, table
from kimi_eagle.upkeep import Checked, Rebuilt
from kimi_eagle.verify import Verification


def verified(found: Verification, *, as_json: bool) -> None:
    if as_json:
        emit_json(found.document())
        return
    table(
        ("ARTIFACT", "KIND", "STATE", "BYTES", "FOUND"),
        [
            (
                Hash(verdict.digest),
                verdict.kind,
                verdict.state,
                size(verdict.bytes),
                "; ".join(map(str, verdict.damages))
                or ("not in the store" if verdict.state == "evicted" else "whole"),
            )
            for verdict in found.verdicts
        ],
    )
    for damage in found.stray:
        print(f"{damage} (no artifact needs it)")
    damaged = sum(bool(verdict.damages) for verdict in found.verdicts)
    print(
        f"{found.files} files, {human_size(found.bytes)} read; "
        f"{damaged} of {len(found.verdicts)} artifacts damaged"
        + ("; the next submit makes again what it needs of them" if damaged else ""),
        file=sys.stderr,
    )


def served(found: ServingCheck, *, as_json: bool) -> None:
    if as_json:
        emit_json(found.document())
        return
    result = found.found
    table(
        ("ROW", "RECORD", "POSITION", "OURS", "SERVER"),
        [
            (
                str(item["row"]),
                item["record"],
                str(item.get("position", "-")),
                _token(item.get("ours")) if "error" not in item else "-",
                _token(item.get("server")) if "error" not in item else item["error"],
            )
            for item in result["mismatches"]
        ],
    )
    for item in result["not_found"]:
        print(
            f"row {item['row']}: record {item['record']} of source {item['source']} does not "
            "render as it here",
            file=sys.stderr,
        )
    print(
        f"{result['rows']} rows, {result['prompts']} prompts: {result['mismatched']} come out as "
        f"other tokens at {found.endpoint} ({result['model']})"
        + (f"; {result['not_found_count']} rows not compared" if result["not_found"] else ""),
        file=sys.stderr,
    )


def _token(token: Mapping[str, Any] | None) -> str:
    return "the end" if token is None else f"{token['id']} {token['token']!r}"


def collected(found: Collected, *, as_json: bool) -> None:
    if as_json:
        emit_json(found.document())
        return
    rows: list[tuple[str, ...]] = [
        (
            item.kind,
            Hash(item.digest),
            size(item.bytes),
            when(item.last_used),
            f"{item.seconds:.1f}",
            "evicted" if found.done else "evict",
        )
        for item in found.evicted
    ]
    rows += [
        (
            "shard",
            Hash(item.digest),
            size(item.bytes),
            when(item.created_at),
            "-",
            "evicted" if found.done else "evict",
        )
        for item in found.shards
    ]
    rows += [
        ("leftover", str(item.path), size(item.bytes), "-", "-", item.why)
        for item in found.leftovers
    ]
    table(("KIND", "WHAT", "BYTES", "LAST USED", "SECONDS", "WHY"), rows)
    for path in found.unknown:
        print(
            f"{path} is whole and not in the registry; left (`kimi-eagle registry rebuild` takes "
            "it in)",
            file=sys.stderr,
        )
    print(_sum(found), file=sys.stderr)


def _sum(found: Collected) -> str:
    cost = f"{human_seconds(found.seconds)} of stages"
    cost += (
        f", {found.gpu_hours:g} GPU-hours"
        if found.gpu_hours is not None
        else f", {human_seconds(found.cpu_seconds)} of CPU"
    )
    freed = f"{human_size(found.bytes_freed)} of {human_size(found.store_bytes)}"
    kept = f" {found.pinned} pinned." if found.pinned else ""
    kept += f" {found.held} held by runs that are alive." if found.held else ""
    if found.done:
        return f"Freed {freed}; to make it again: {cost}.{kept}"
    return (
        f"Would free {freed}; to make it again: {cost}.{kept} Nothing was removed; give --yes to "
        "do it."
    )


def pinned(record: ArtifactRecord, pin: Pin, *, as_json: bool, now: bool) -> None:
    """Args: `now`: whether it is pinned, rather than unpinned."""
    if as_json:
        emit_json(
            {
                "status": "pinned" if now else "unpinned",
                "digest": record.digest,
                "kind": record.kind,
                "state": record.state,
                "note": pin.note,
                "created_at": pin.created_at,
            }
        )
        return
    note = f" ({pin.note})" if now and pin.note else ""
    print(f"{'pinned' if now else 'unpinned'} {record.kind} {record.digest}{note}")
    if now and record.state in ("evicted", "missing"):
        print(f"it is {record.state} at present: it stays once it is made again", file=sys.stderr)


def checked(found: Checked, *, as_json: bool) -> None:
    if as_json:
        emit_json(found.document())
        return
    for problem in found.problems:
        print(problem)
    for note in found.notes:
        print(f"note: {note}", file=sys.stderr)
    rows = ", ".join(
        f"{found.file.counts[name]} {name}"
        for name in ("runs", "executions", "artifacts", "state_shards", "state_rows")
        if name in found.file.counts
    )
    print(f"{found.file.path}, schema {found.file.revision}: {rows}", file=sys.stderr)
    print("problems" if found.problems else "ok")


def rebuilt(found: Rebuilt, *, as_json: bool) -> None:
    if as_json:
        emit_json(found.document())
        return
    for problem in found.problems:
        print(problem, file=sys.stderr)
    table(("TABLE", "ROWS"), [(name, str(count)) for name, count in found.rows.items()])
    print(f"{found.path} was made again from the records on disk", file=sys.stderr)
    if found.aside:
        print(f"the one before is {found.aside}", file=sys.stderr)


def copied(found: Copied, *, as_json: bool, verb: str) -> None:
    """Args: `verb`: what was done, `backed up` or `restored`."""
    if as_json:
        emit_json(
            {
                "status": verb,
                "file": str(found.path),
                "bytes": found.bytes,
                "runs": found.runs,
                "revision": found.revision,
                "aside": str(found.aside) if found.aside else None,
            }
        )
        return
    print(f"{verb}: {found.path}, {found.runs} runs, {human_size(found.bytes)}")
    if found.aside:
        print(f"the one before is {found.aside}", file=sys.stderr)
