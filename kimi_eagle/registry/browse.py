"""The registry a page at a time: each question is answered in time that does not grow with what is
in the registry, as far as SQLite's indices allow, and never with more than a page of rows."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kimi_eagle.records import SNAPSHOT_ROLE, ExecutionRecord, RunRecord
from kimi_eagle.registry.ledger import EXECUTION, execution_record, marks
from kimi_eagle.registry.store import Registry
from kimi_eagle.registry.terms import Term, conjunction

PAGE = 50
_RUN = ", ".join(f"runs.{name}" for name in RunRecord.__dataclass_fields__)


@dataclass(frozen=True)
class RunRow:
    """A run as a list of runs shows it."""

    run: RunRecord
    seq: int
    counts: Mapping[str, int] = field(default_factory=dict)
    """Of its stages, by how they came out."""
    training: tuple[str, str] | None = None
    """(run, stage) where its first training was executed; an earlier run where it is reused."""
    val_loss: float | None = None
    """The lowest of its trainings, each of the epoch that it kept."""
    acceptance_length: float | None = None
    """The highest of its evaluations, the bonus token included."""

    def document(self) -> dict[str, Any]:
        return {
            **asdict(self.run),
            "seq": self.seq,
            "stages": dict(self.counts),
            "val_loss": self.val_loss,
            "acceptance_length": self.acceptance_length,
        }


@dataclass(frozen=True)
class RunsPage:
    """A page of runs, newest first."""

    rows: Sequence[RunRow]
    newer: int | None
    """Where the page before begins: runs after this number; None on the first page."""
    older: int | None


def runs_page(
    registry: Registry,
    of: Sequence[Term],
    lost: Collection[str],
    *,
    before: int | None = None,
    after: int | None = None,
    size: int = PAGE,
) -> RunsPage:
    """The newest runs that all terms let through; below or above a run's number where one is
    given."""
    condition, values = conjunction(of, lost)
    at = after if after is not None else before
    if at is not None:
        condition += " and runs.seq > ?" if after is not None else " and runs.seq < ?"
    order = "asc" if after is not None else "desc"
    found = registry.database.ask(
        f"select {_RUN}, runs.seq from runs where {condition} "  # noqa: S608
        f"order by runs.seq {order} limit ?",
        [*values, *([] if at is None else [at]), size + 1],
    )
    more = len(found) > size
    found = found[:size]
    if after is not None:
        found.reverse()
    rows = [RunRow(_run(row), row["seq"]) for row in found]
    older_left = more if after is None else bool(rows)
    newer_left = more if after is not None else before is not None
    return RunsPage(
        _with_stages(registry, rows),
        rows[0].seq if newer_left and rows else None,
        rows[-1].seq if older_left and rows else None,
    )


def count_runs(registry: Registry, of: Sequence[Term], lost: Collection[str]) -> int:
    """How many runs all terms let through."""
    condition, values = conjunction(of, lost)
    return int(
        registry.database.ask(f"select count(*) from runs where {condition}", values)[0][0]  # noqa: S608
    )


def _run(row: Any) -> RunRecord:
    return RunRecord(**{name: row[name] for name in RunRecord.__dataclass_fields__})


def _with_stages(registry: Registry, rows: Sequence[RunRow]) -> list[RunRow]:
    """The rows with what their stages came to."""
    ids = [row.run.id for row in rows]
    if not ids:
        return []
    listed = marks(ids)
    counts: dict[str, dict[str, int]] = {}
    for run_id, disposition, count in registry.database.ask(
        "select run_id, disposition, count(*) from executions "  # noqa: S608
        f"where run_id in ({listed}) group by run_id, disposition",
        ids,
    ):
        counts.setdefault(run_id, {})[disposition] = count
    figures: dict[str, list[Any]] = {}
    for row in registry.database.ask(
        "select e.run_id, e.kind, coalesce(m.run_id, e.run_id) as made_by, "  # noqa: S608
        "coalesce(m.stage, e.stage) as made_as, "
        "json_extract(coalesce(m.metrics, e.metrics), '$.val_loss') as loss, "
        "json_extract(coalesce(m.metrics, e.metrics), '$.acceptance_length') as length "
        "from executions e left join executions m on m.id = e.reused_from "
        f"where e.run_id in ({listed}) and +e.kind in ('train', 'evaluate') order by e.id",
        ids,
    ):
        figures.setdefault(row["run_id"], []).append(row)
    return [_figured(row, counts.get(row.run.id, {}), figures.get(row.run.id, ())) for row in rows]


def _figured(row: RunRow, counts: Mapping[str, int], found: Sequence[Any]) -> RunRow:
    trained = [item for item in found if item["kind"] == "train"]
    losses = [item["loss"] for item in trained if item["loss"] is not None]
    lengths = [item["length"] for item in found if item["length"] is not None]
    return RunRow(
        row.run,
        row.seq,
        counts,
        (trained[0]["made_by"], trained[0]["made_as"]) if trained else None,
        min(losses, default=None),
        max(lengths, default=None),
    )


# Stages


@dataclass(frozen=True)
class Input:
    """What a stage took in."""

    role: str
    position: int
    digest: str
    kind: str
    label: str
    bytes: int
    state: str


def stages_page(
    registry: Registry, run_id: str, after: int, size: int
) -> tuple[list[ExecutionRecord], int | None]:
    """The stages of a run whose number is above `after`, and the last one's number where there are
    more."""
    rows = registry.database.ask(
        f"select {EXECUTION} from executions where run_id = ? and id > ? order by id limit ?",  # noqa: S608
        (run_id, after, size + 1),
    )
    found = [execution_record(row) for row in rows[:size]]
    return found, found[-1].id if len(rows) > size else None


def dispositions(registry: Registry, run_id: str) -> dict[str, str]:
    """How each stage of a run came out, the latest where it was tried again."""
    rows = registry.database.ask(
        "select stage, disposition from executions where run_id = ? order by id", (run_id,)
    )
    return {row["stage"]: row["disposition"] for row in rows}


def made_before(registry: Registry, stage: ExecutionRecord) -> ExecutionRecord | None:
    """The latest execution before this one of its kind that came to its end, by the same name if
    there is one."""
    # Without the name by the order they came in (`+`): of a kind there may be very many.
    for which in ("kind = ? and stage = ?", "+kind = ? and ? is not null"):
        rows = registry.database.ask(
            f"select {EXECUTION} from executions where {which} "  # noqa: S608
            "and disposition = 'executed' and id < ? order by id desc limit 1",
            (stage.kind, stage.stage, stage.id),
        )
        if rows:
            return execution_record(rows[0])
    return None


def inputs_of(registry: Registry, execution: int, size: int) -> tuple[list[Input], int]:
    """What an execution took in, by role; and how much more it took in than is given here."""
    rows = registry.database.ask(
        "select i.role, i.position, i.digest, a.kind, a.label, a.bytes, a.state "
        "from execution_inputs i join artifacts a on a.digest = i.digest "
        "where i.execution = ? order by i.role, i.position limit ?",
        (execution, size),
    )
    (count,) = registry.database.ask(
        "select count(*) from execution_inputs where execution = ?", (execution,)
    )[0]
    return [Input(*row) for row in rows], count - len(rows)


@dataclass(frozen=True)
class Saved:
    """Where a training was saved that another went on from."""

    execution: int
    run_id: str
    stage: str
    step: int


def resumed_from(registry: Registry, execution: int) -> Saved | None:
    """The earlier training that saved what an execution went on from."""
    rows = registry.database.ask(
        "select e.id, e.run_id, e.stage, o.role from execution_inputs i "
        "join execution_outputs o on o.digest = i.digest and o.role like ? "
        "join executions e on e.id = o.execution "
        "where i.execution = ? and i.role = 'resume' and e.id < ? order by e.id desc limit 1",
        (f"{SNAPSHOT_ROLE}%", execution, execution),
    )
    for row in rows:
        step = str(row["role"]).removeprefix(SNAPSHOT_ROLE)
        if step.isdigit():
            return Saved(row["id"], row["run_id"], row["stage"], int(step))
    return None


# Artifacts


@dataclass(frozen=True)
class Use:
    """An execution that made an artifact or took it in."""

    id: int
    run_id: str
    stage: str
    kind: str
    disposition: str
    started_at: str


def users(
    registry: Registry, digest: str, *, made: bool, after: int = 0, size: int = PAGE
) -> tuple[list[Use], int | None]:
    """Executions that made an artifact, or took it in; from the number above `after` on, and the
    last one's number where there are more."""
    table = "execution_outputs" if made else "execution_inputs"
    rows = registry.database.ask(
        "select id, run_id, stage, kind, disposition, started_at from executions "  # noqa: S608
        f"where id in (select execution from {table} where digest = ?) and id > ? "
        "and disposition in ('executed', 'reproduced', 'running') order by id limit ?",
        (digest, after, size + 1),
    )
    found = [Use(*row) for row in rows[:size]]
    return found, found[-1].id if len(rows) > size else None


def evaluations(registry: Registry, size: int = PAGE) -> list[dict[str, Any]]:
    """The latest evaluations: digest, run, stage, checkpoint, acceptance length."""
    rows = registry.database.ask(
        "select o.digest, e.run_id, e.stage, e.started_at, e.metrics from executions e "
        "join execution_outputs o on o.execution = e.id and o.role = 'evaluation' "
        "where e.kind = 'evaluate' and e.disposition = 'executed' order by e.id desc limit ?",
        (size,),
    )
    found = []
    for row in rows:
        metrics = json.loads(row["metrics"])
        found.append(
            {
                "digest": row["digest"],
                "run": row["run_id"],
                "stage": row["stage"],
                "started_at": row["started_at"],
                "checkpoint": metrics.get("checkpoint"),
                "acceptance_length": metrics.get("acceptance_length"),
                "draft_tokens": metrics.get("draft_tokens"),
            }
        )
    return found
