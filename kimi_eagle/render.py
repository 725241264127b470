"""Show what `app` found. On a terminal: aligned tables; in a pipe: tab-separated lines without a
header, whole hashes; with `--json`: one JSON document."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kimi_eagle.app import Lineage, RunsFound, Shown, Validation
from kimi_eagle.coordinator import LOST
from kimi_eagle.dot import members_only
from kimi_eagle.exchange import Exchanged
from kimi_eagle.identity import short
from kimi_eagle.manifest.model import resolved
from kimi_eagle.outcome import RunOutcome, outcome_document
from kimi_eagle.progress import headline
from kimi_eagle.progress import reporter as reporter
from kimi_eagle.records import ExecutionRecord, Node, RunRecord
from kimi_eagle.render_rows import bucket_documents, buckets
from kimi_eagle.terminal import Hash, cells, columns, cut, human_size, plain, table, word
from kimi_eagle.terminal import while_read as while_read


def emit_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False))


def digest(value: str | None, needed: int = 0) -> str:
    """A hash as this output shows it: short for people, whole in a pipe."""
    if value is None:
        return "-"
    return value[: max(len(short(value)), needed)] if sys.stdout.isatty() else value


def size(count: int) -> str:
    """Bytes for people: 4.7 GB. In a pipe the plain number."""
    return human_size(count) if sys.stdout.isatty() else str(count)


def when(time: str | None) -> str:
    """A time for people, to the minute, in UTC; in a pipe to the microsecond."""
    if time is None:
        return "-"
    return time[:16].replace("T", " ") if sys.stdout.isatty() else time


def _hash(value: str | None, needed: Mapping[str, int]) -> str:
    """A hash as a cell of a table."""
    return "-" if value is None else Hash(value, needed.get(value, 0))


def _text(text: str) -> str:
    """Text that others wrote: on a terminal, with nothing in it that the terminal acts upon."""
    return "\n".join(plain(line) for line in text.split("\n")) if sys.stdout.isatty() else text


def validation(found: Validation, *, as_json: bool) -> None:
    loaded = found.loaded
    if as_json:
        emit_json(
            {
                "status": "valid",
                "digest": loaded.digest,
                "verifier_checked": found.verifier_checked,
                "resolved": resolved(loaded.manifest),
            }
        )
        return
    print(f"{loaded.path}: valid, {len(loaded.manifest.stages)} stages, digest {loaded.digest}")
    if not found.verifier_checked:
        print(
            f"the verifier folder {loaded.manifest.verifier.path} is not on this machine: layers "
            "and vocabulary were not checked against it",
            file=sys.stderr,
        )


def outcome(found: RunOutcome, *, as_json: bool) -> None:
    if as_json:
        emit_json(outcome_document(found))
        return
    table(
        ("STAGE", "KIND", "RESULT", "TIME", "OUTPUT", "METRICS"),
        [
            (
                stage.name,
                stage.kind,
                stage.disposition,
                f"{stage.seconds:.1f}s",
                _hash(next(iter(stage.outputs.values()), None), {}),
                headline(stage.kind, stage.metrics),
            )
            for stage in found.stages
        ],
    )
    for stage in found.stages:
        if stage.kind == "train" and stage.outputs:
            print(f"checkpoint {stage.outputs['checkpoint']} ({stage.name})")
        if stage.kind == "evaluate" and stage.outputs:
            print(f"acceptance length {_acceptance(stage.metrics)} ({stage.name})")
    print(f"run {found.run_id}: {word(found.status, sys.stderr)}", file=sys.stderr)


def _acceptance(metrics: Mapping[str, Any]) -> str:
    value = metrics.get("acceptance_length")
    if value is None:
        return f"unknown: {metrics.get('acceptance_length_reason', 'no draft step was made')}"
    said = (
        f"{value:.3f}, pooled, the bonus token included, {metrics.get('draft_tokens')} draft tokens"
    )
    simulated, gap = (metrics.get(f"simulated_{name}") for name in ("acceptance_length", "gap"))
    if simulated is not None:
        said += f"; simulated {simulated:.3f}" + (f" ({gap:+.1%})" if gap is not None else "")
    identical = metrics.get("outputs_identical")
    if identical is None:
        return f"{said}; outputs not compared: {metrics.get('outputs_reason')}"
    same = "identical to" if identical else "DIFFERENT from"
    return f"{said}; outputs {same} decoding without the draft"


def exchanged(moved: Exchanged, url: str, *, as_json: bool) -> None:
    """What `push` or `pull` did."""
    if as_json:
        emit_json({**asdict(moved), "url": url})
        return
    how = f"{human_size(moved.bytes)} moved" if moved.moved else "there already"
    if moved.shards:
        how += f", {moved.shards} shards of hidden states ({human_size(moved.shard_bytes)})"
    print(f"{moved.kind} {moved.digest}: {how}, and {moved.executions} stages of its lineage")


def detached(run_id: str, root: Path, *, as_json: bool) -> None:
    if as_json:
        emit_json({"run_id": run_id, "status": "running"})
        return
    print(run_id)
    print(
        f"it runs on without you: `kimi-eagle --root {root} attach {run_id}` shows its progress",
        file=sys.stderr,
    )


def ended(run: RunRecord, *, as_json: bool) -> None:
    if as_json:
        emit_json({"run_id": run.id, "status": run.status})
        return
    print(f"run {run.id}: {word(run.status, sys.stdout)}")


def runs(found: RunsFound, *, as_json: bool) -> None:
    if as_json:
        emit_json(
            {
                "runs": [
                    {**asdict(run), "stages": [_stage_json(stage) for stage in stages]}
                    for run, stages in found.runs
                ]
            }
        )
        return
    table(
        ("RUN", "NAME", "STATUS", "STARTED", "EXECUTED", "REUSED"),
        [
            (
                _hash(run.id, found.needed),
                run.name,
                run.status,
                when(run.started_at),
                str(sum(stage.disposition == "executed" for stage in stages)),
                str(sum(stage.disposition == "reused" for stage in stages)),
            )
            for run, stages in found.runs
        ],
    )
    if not found.all:
        print("no runs yet; `kimi-eagle submit MANIFEST` makes one", file=sys.stderr)
    elif not found.runs:
        print(f"none of {found.all} runs is as asked for", file=sys.stderr)


def _stage_json(stage: ExecutionRecord) -> dict[str, Any]:
    return {
        "name": stage.stage,
        "kind": stage.kind,
        "disposition": stage.disposition,
        "key": stage.key,
        "outputs": dict(stage.outputs),
        "metrics": dict(stage.metrics),
        "seconds": stage.seconds,
        "resources": dict(stage.resources),
        "error": stage.error,
        "started_at": stage.started_at,
        "ended_at": stage.ended_at,
    }


def shown(found: Shown, root: Path, *, as_json: bool) -> None:
    if found.run is not None:
        _shown_run(found, found.run, root, as_json=as_json)
    elif found.artifact is not None:
        _shown_artifact(found, root, as_json=as_json)
    elif as_json:
        emit_json({"type": found.kind, "digest": found.digest, **_shown_json(found)})
    else:
        _shown_other(found)


def _shown_json(found: Shown) -> dict[str, Any]:
    if found.stages:
        return {
            "document": found.stages[-1].document,
            "stages": [{"run": stage.run_id, **_stage_json(stage)} for stage in found.stages],
        }
    if found.runs:
        return {"runs": [asdict(run) for run in found.runs]}
    if found.holders:
        return {"holders": [{"artifact": item, "path": path} for item, path in found.holders]}
    return dict(found.state or {})


def _shown_other(found: Shown) -> None:
    print(f"{found.kind} {found.digest}")
    for name, value in (found.state or {}).items():
        print(f"{name} {value}")
    for artifact, path in found.holders:
        print(f"{_text(path)} of artifact {digest(artifact)}")
    if found.runs:
        table(
            ("RUN", "NAME", "STATUS", "STARTED"),
            [
                (_hash(run.id, found.needed), run.name, run.status, when(run.started_at))
                for run in found.runs
            ],
        )
    if found.stages:
        table(
            ("RUN", "STAGE", "KIND", "RESULT", "STARTED", "TIME", "OUTPUT"),
            [
                (
                    _hash(stage.run_id, found.needed),
                    stage.stage,
                    stage.kind,
                    stage.disposition,
                    when(stage.started_at),
                    _seconds(stage.seconds),
                    _hash(next(iter(stage.outputs.values()), None), found.needed),
                )
                for stage in found.stages
            ],
        )
        print(json.dumps(found.stages[-1].document, ensure_ascii=False))


def _shown_run(found: Shown, run: RunRecord, root: Path, *, as_json: bool) -> None:
    texts = found.texts or {}
    if as_json:
        emit_json(
            {
                "type": "run",
                **asdict(run),
                "stages": [_stage_json(stage) for stage in found.stages],
                "manifest": texts["manifest_text"],
                "overrides": json.loads(texts["overrides"]),
                "resolved": json.loads(texts["resolved"]),
                "environment": json.loads(texts["environment"]),
            }
        )
        return
    print(f"run {run.id}  {_text(run.name)}  {word(run.status, sys.stdout)}")
    print(f"started {when(run.started_at)}, ended {when(run.ended_at)}, on {run.host}")
    print(f"manifest {run.manifest_path} ({digest(run.manifest_digest)}), logs in {root / run.id}")
    if run.status == LOST:
        print(
            f"its coordinator, process {run.pid} on {run.host}, is gone; "
            f"`kimi-eagle cancel {run.id}` or the next submit records that"
        )
    table(
        (
            *("STAGE", "KIND", "RESULT", "TIME", "OUTPUT", "KEY"),
            *("CPU", "MEMORY", "WRITTEN", "METRICS"),
        ),
        [
            (
                stage.stage,
                stage.kind,
                stage.disposition,
                _seconds(stage.seconds),
                _hash(next(iter(stage.outputs.values()), None), found.needed),
                _hash(stage.key, found.needed),
                *_resources(stage),
                headline(stage.kind, stage.metrics),
            )
            for stage in found.stages
        ],
    )
    for stage in found.stages:
        if stage.error:
            print(f"{stage.stage}: {_text(stage.error)}")


def _seconds(seconds: float | None) -> str:
    return f"{seconds:.1f}s" if seconds is not None else "-"


def _resources(stage: ExecutionRecord) -> tuple[str, str, str]:
    """Seconds of CPU, peak memory and bytes written, `-` where that is not known."""
    memory, written = (
        size(stage.resources[name]) if stage.resources.get(name) is not None else "-"
        for name in ("peak_memory_bytes", "bytes_written")
    )
    return _seconds(stage.resources.get("cpu_seconds")), memory, written


def _shown_artifact(found: Shown, root: Path, *, as_json: bool) -> None:
    artifact, notes = found.artifact, found.notes
    assert artifact is not None
    assert notes is not None
    if as_json:
        pinned = {"since": notes.pinned_at, "note": notes.pin_note} if notes.pinned_at else None
        emit_json(
            {
                "type": "artifact",
                "digest": artifact.digest,
                "kind": artifact.kind,
                "bytes": artifact.bytes,
                "state": artifact.state,
                "label": artifact.label,
                "created_at": notes.created_at,
                "verified_at": notes.verified_at,
                "pinned": pinned,
                "files": {
                    path: {"digest": d, "bytes": n} for path, (d, n) in artifact.files.items()
                },
                "producers": [
                    {"run": item.run_id, **_stage_json(item)} for item in found.producers
                ],
                "consumers": [
                    {"run": item.run_id, **_stage_json(item)} for item in found.consumers
                ],
                **({"buckets": bucket_documents(found.buckets)} if found.buckets else {}),
            }
        )
        return
    print(f"{artifact.kind} {artifact.digest}")
    print(
        f"{size(artifact.bytes)}, {word(artifact.state, sys.stdout)}"
        + (f", {_text(artifact.label)}" if artifact.label else "")
    )
    verified = f"verified {when(notes.verified_at)}" if notes.verified_at else "never verified"
    print(f"known since {when(notes.created_at)}, {verified}")
    if notes.pinned_at:
        note = f": {_text(notes.pin_note)}" if notes.pin_note else ""
        print(f"pinned {when(notes.pinned_at)}{note}")
    folder = root / "objects" / artifact.digest[:2] / artifact.digest
    if folder.is_dir():
        print(f"in {folder}")
    for item in found.producers:
        again = " again" if item.disposition == "reproduced" else ""
        print(
            f"made{again} by stage {item.stage} of run {item.run_id}: "
            f"{headline(item.kind, item.metrics)}"
        )
        cpu, memory, written = _resources(item)
        print(
            f"  in {_seconds(item.seconds)}, {cpu} of CPU, peak memory {memory}, written {written};"
            f" key {digest(item.key, found.needed.get(item.key or '', 0))}"
        )
    for item in found.consumers:
        print(f"taken by stage {item.stage} of run {item.run_id}")
    buckets(found.buckets)
    if artifact.files:
        table(
            ("FILE", "BYTES", "DIGEST"),
            [(path, size(n), _hash(d, {})) for path, (d, n) in sorted(artifact.files.items())],
        )


def lineage(found: Lineage, *, as_json: bool, files: bool = False) -> None:
    if as_json:
        emit_json(found.document())
        return
    folded = {} if files else members_only(found.nodes, found.edges, found.digest)
    tree = _Tree(found, folded)
    print(tree.node(found.digest))
    for title, edges in (("from", tree.up), ("into", tree.down)):
        if found.digest in edges:
            print(f"{title}:")
            tree.print_below(found.digest, edges, 1, set())


class _Tree:
    """A lineage as indented lines; what was shown before is named again, not opened again."""

    def __init__(self, found: Lineage, folded: Mapping[str, str]):
        self._nodes: Mapping[str, Node] = {node.digest: node for node in found.nodes}
        self._needed = found.needed
        self._folded = folded
        self.up: dict[str, list[tuple[str, str]]] = {}
        self.down: dict[str, list[tuple[str, str]]] = {}
        for edge in found.edges:
            self.up.setdefault(edge.target, []).append((edge.source, edge.stage or edge.role))
            self.down.setdefault(edge.source, []).append((edge.target, edge.stage or edge.role))

    def node(self, name: str, indent: str = "", more: str = "") -> str:
        """A line for an artifact, `more` at its end; on a terminal names are cut to its width, and
        hashes never."""
        node = self._nodes[name]
        hashed = digest(node.digest, self._needed.get(node.digest, 0))
        said = f"{indent}{node.kind} {hashed}  {size(node.bytes)}"
        state = "" if node.state in ("present", "external") else f"  [{node.state}]"
        rest = (f"  {_text(node.label)}" if node.label else "") + more
        if sys.stdout.isatty():
            rest = cut(rest, max(columns() - cells(said + state), 0))
        return said + state.replace(node.state, word(node.state, sys.stdout)) + rest

    def print_below(
        self,
        at: str,
        edges: Mapping[str, Sequence[tuple[str, str]]],
        depth: int,
        shown_before: set[str],
    ) -> None:
        indent = "  " * depth
        hidden = 0
        for other, by in sorted(
            edges.get(at, ()), key=lambda item: (self._nodes[item[0]].kind, item)
        ):
            if self._folded.get(other) == at:
                hidden += 1
                continue
            again = other in shown_before and other in edges
            role = "" if by == self._nodes[other].label else f"  ({_text(by)})"
            print(self.node(other, indent, role + ("  …above" if again else "")))
            shown_before.add(other)
            if not again:
                self.print_below(other, edges, depth + 1, shown_before)
        if hidden:
            print(f"{indent}{hidden} files")
