"""Show what `app` found. On a terminal: aligned tables; in a pipe: tab-separated lines without a
header, whole hashes; with `--json`: one JSON document."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from kimi_eagle.app import Lineage, Planned, Shown, Validation
from kimi_eagle.identity import short
from kimi_eagle.manifest.model import resolved
from kimi_eagle.outcome import RunOutcome, StageOutcome, outcome_document
from kimi_eagle.plan import StagePlan
from kimi_eagle.records import ExecutionRecord, Node, RunRecord

# Metrics that the table of a run shows, by kind, in order.
_HEADLINES: dict[str, tuple[str, ...]] = {
    "head": ("bytes",),
    "prepare": ("rows", "tokens", "supervised_tokens", "rejected"),
    "extract": ("rows", "rows_extracted", "tokens_extracted", "agreement"),
    "vocab": ("size", "coverage"),
    "train": ("epoch", "val_loss", "full_acc_0", "steps"),
    "evaluate": ("acceptance_length", "outputs_identical", "speedup"),
    "export": ("bytes",),
}

PROGRESS_SECONDS = 60.0


@contextmanager
def while_read(stream: TextIO) -> Iterator[None]:
    """Go on in silence when the reader of a stream goes away (`| head`)."""
    try:
        yield
        stream.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def emit_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on a terminal, tab-separated values in a pipe."""
    if not sys.stdout.isatty():
        for row in rows:
            print("\t".join(cell.replace("\t", " ").replace("\n", " ") for cell in row))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    grid = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for index, name in enumerate(header):
        grid.add_column(name, overflow="fold", no_wrap=index < len(header) - 1)
    for row in rows:
        grid.add_row(*row)
    Console(highlight=False, markup=False).print(grid)


def digest(value: str | None) -> str:
    """A hash as this output shows it: short for people, whole in a pipe."""
    if value is None:
        return "-"
    return short(value) if sys.stdout.isatty() else value


def size(count: int) -> str:
    """Bytes for people: 4.7 GB. In a pipe the plain number."""
    if not sys.stdout.isatty():
        return str(count)
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


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


def planned(found: Planned, *, as_json: bool) -> None:
    if as_json:
        emit_json(found.document())
        return
    table(
        ("#", "STAGE", "ACTION", "KEY", "WHY"),
        [
            (str(number), stage.name, stage.action, digest(stage.key), "; ".join(stage.reasons))
            for number, stage in enumerate(found.stages, 1)
        ],
    )
    counts = ", ".join(f"{count} {action}" for action, count in found.counts().items() if count)
    print(f"{counts}. Nothing was started.", file=sys.stderr)


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
                digest(next(iter(stage.outputs.values()), None)),
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
    print(f"run {found.run_id}: {found.status}", file=sys.stderr)


def _acceptance(metrics: Mapping[str, Any]) -> str:
    value = metrics.get("acceptance_length")
    if value is None:
        return f"unknown: {metrics.get('acceptance_length_reason', 'no draft step was made')}"
    same = "identical to" if metrics.get("outputs_identical") else "DIFFERENT from"
    return (
        f"{value:.3f}, pooled, the bonus token included, {metrics.get('draft_tokens')} draft "
        f"tokens; outputs {same} decoding without the draft"
    )


def headline(kind: str, metrics: Mapping[str, Any]) -> str:
    """The figures of a stage that matter most, in one line."""
    shown = []
    for name in _HEADLINES.get(kind, ()):
        value = metrics.get(name)
        if value is not None:
            text = f"{value:.4g}" if isinstance(value, float) else str(value).lower()
            shown.append(f"{name}={text}")
    return " ".join(shown)


def runs(found: Sequence[tuple[RunRecord, Sequence[ExecutionRecord]]], *, as_json: bool) -> None:
    if as_json:
        emit_json(
            {
                "runs": [
                    {**asdict(run), "stages": [_stage_json(stage) for stage in stages]}
                    for run, stages in found
                ]
            }
        )
        return
    table(
        ("RUN", "NAME", "STATUS", "STARTED", "EXECUTED", "REUSED"),
        [
            (
                run.id,
                run.name,
                run.status,
                run.started_at,
                str(sum(stage.disposition == "executed" for stage in stages)),
                str(sum(stage.disposition == "reused" for stage in stages)),
            )
            for run, stages in found
        ],
    )
    if not found:
        print("no runs yet; `kimi-eagle submit MANIFEST` makes one", file=sys.stderr)


def _stage_json(stage: ExecutionRecord) -> dict[str, Any]:
    return {
        "name": stage.stage,
        "kind": stage.kind,
        "disposition": stage.disposition,
        "key": stage.key,
        "outputs": dict(stage.outputs),
        "metrics": dict(stage.metrics),
        "seconds": stage.seconds,
        "error": stage.error,
        "started_at": stage.started_at,
        "ended_at": stage.ended_at,
    }


def shown(found: Shown, root: Path, *, as_json: bool) -> None:
    if found.run is not None:
        _shown_run(found, root, as_json=as_json)
    else:
        _shown_artifact(found, as_json=as_json)


def _shown_run(found: Shown, root: Path, *, as_json: bool) -> None:
    run, texts = found.run, found.texts or {}
    assert run is not None
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
    print(f"run {run.id}  {run.name}  {run.status}")
    print(f"started {run.started_at}, ended {run.ended_at or '-'}, on {run.host}")
    print(f"manifest {run.manifest_path} ({digest(run.manifest_digest)}), logs in {root / run.id}")
    table(
        ("STAGE", "KIND", "RESULT", "TIME", "OUTPUT", "METRICS"),
        [
            (
                stage.stage,
                stage.kind,
                stage.disposition,
                f"{stage.seconds:.1f}s" if stage.seconds is not None else "-",
                digest(next(iter(stage.outputs.values()), None)),
                headline(stage.kind, stage.metrics),
            )
            for stage in found.stages
        ],
    )
    for stage in found.stages:
        if stage.error:
            print(f"{stage.stage}: {stage.error}")


def _shown_artifact(found: Shown, *, as_json: bool) -> None:
    artifact = found.artifact
    assert artifact is not None
    if as_json:
        emit_json(
            {
                "type": "artifact",
                "digest": artifact.digest,
                "kind": artifact.kind,
                "bytes": artifact.bytes,
                "state": artifact.state,
                "label": artifact.label,
                "files": {
                    path: {"digest": d, "bytes": n} for path, (d, n) in artifact.files.items()
                },
                "producers": [
                    {"run": item.run_id, **_stage_json(item)} for item in found.producers
                ],
                "consumers": [
                    {"run": item.run_id, **_stage_json(item)} for item in found.consumers
                ],
            }
        )
        return
    print(f"{artifact.kind} {artifact.digest}")
    print(
        f"{size(artifact.bytes)}, {artifact.state}"
        + (f", {artifact.label}" if artifact.label else "")
    )
    for item in found.producers:
        print(
            f"made by stage {item.stage} of run {item.run_id}: {headline(item.kind, item.metrics)}"
        )
    for item in found.consumers:
        print(f"taken by stage {item.stage} of run {item.run_id}")
    if artifact.files:
        table(
            ("FILE", "BYTES", "DIGEST"),
            [(path, size(n), digest(d)) for path, (d, n) in sorted(artifact.files.items())],
        )


def lineage(found: Lineage, *, as_json: bool) -> None:
    if as_json:
        emit_json(found.document())
        return
    nodes = {node.digest: node for node in found.nodes}
    up: dict[str, list[tuple[str, str]]] = {}
    down: dict[str, list[tuple[str, str]]] = {}
    for edge in found.edges:
        up.setdefault(edge.target, []).append((edge.source, edge.stage or edge.role))
        down.setdefault(edge.source, []).append((edge.target, edge.stage or edge.role))
    print(_node(nodes[found.digest]))
    for title, edges in (("from", up), ("into", down)):
        if found.digest in edges:
            print(f"{title}:")
            _tree(found.digest, edges, nodes, 1, set())


def _node(node: Node) -> str:
    label = f"  {node.label}" if node.label else ""
    state = "" if node.state in ("present", "external") else f"  [{node.state}]"
    return f"{node.kind} {digest(node.digest)}  {size(node.bytes)}{label}{state}"


def _tree(
    at: str,
    edges: Mapping[str, Sequence[tuple[str, str]]],
    nodes: Mapping[str, Node],
    depth: int,
    shown_before: set[str],
) -> None:
    for other, by in sorted(edges.get(at, ()), key=lambda item: (nodes[item[0]].kind, item)):
        again = other in shown_before and other in edges
        print(f"{'  ' * depth}{_node(nodes[other])}  ({by})" + ("  …above" if again else ""))
        shown_before.add(other)
        if not again:
            _tree(other, edges, nodes, depth + 1, shown_before)


class PlainReporter:
    """Progress as plain lines on standard error: one for each start and end, one a minute."""

    def __init__(self) -> None:
        self._last = 0.0

    def __enter__(self) -> PlainReporter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        """Nothing to put away."""

    def _say(self, text: str) -> None:
        with while_read(sys.stderr):
            print(text, file=sys.stderr, flush=True)

    def run_started(self, run_id: str, folder: Path) -> None:
        self._say(f"run {run_id} in {folder}")

    def stage_reused(self, stage: StagePlan, made: ExecutionRecord) -> None:
        self._say(f"{stage.name}: reused from run {made.run_id}")

    def stage_started(self, stage: StagePlan) -> None:
        self._last = time.monotonic()
        self._say(f"{stage.name}: running ({'; '.join(stage.reasons)})")

    def stage_event(self, stage: StagePlan, event: Mapping[str, Any]) -> None:
        if event["event"] == "note":
            self._say(f"{stage.name}: {event['text']}")
        elif event["event"] == "progress" and time.monotonic() - self._last >= PROGRESS_SECONDS:
            self._last = time.monotonic()
            self._say(f"{stage.name}: {progress_text(event)}")

    def stage_ended(self, outcome: StageOutcome) -> None:
        if outcome.disposition == "executed":
            text = headline(outcome.kind, outcome.metrics)
            self._say(f"{outcome.name}: done in {outcome.seconds:.1f}s  {text}")
        else:
            self._say(f"{outcome.name}: FAILED after {outcome.seconds:.1f}s: {outcome.error}")
            self._say(f"{outcome.name}: log {outcome.log}")

    def note(self, text: str) -> None:
        self._say(text)


class TerminalReporter(PlainReporter):
    """The same lines, and a bar that moves while a stage runs."""

    def __init__(self) -> None:
        super().__init__()
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._console = Console(stderr=True, highlight=False, markup=False)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._task: Any = None

    def _say(self, text: str) -> None:
        self._console.print(text)

    def _stop(self) -> None:
        self._progress.stop()

    def stage_started(self, stage: StagePlan) -> None:
        super().stage_started(stage)
        self._progress.start()
        self._task = self._progress.add_task(stage.name, total=None)

    def stage_event(self, stage: StagePlan, event: Mapping[str, Any]) -> None:
        if event["event"] == "progress" and self._task is not None:
            self._progress.update(
                self._task,
                total=event["total"],
                completed=event["done"],
                description=f"{stage.name}: {progress_text(event)}",
            )
        else:
            super().stage_event(stage, event)

    def stage_ended(self, outcome: StageOutcome) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None
            self._progress.stop()
        super().stage_ended(outcome)


def progress_text(event: Mapping[str, Any]) -> str:
    """A progress event in words: `30 of 120 steps, loss 2.1`."""
    extra = "".join(
        f", {name} {value:.4g}" if isinstance(value, float) else f", {name} {value}"
        for name, value in event.items()
        if name not in ("event", "done", "total", "unit")
    )
    return f"{event['done']} of {event['total']} {event['unit']}{extra}"


def reporter() -> PlainReporter:
    return TerminalReporter() if sys.stderr.isatty() else PlainReporter()
