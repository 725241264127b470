"""The curves of a run's trainings: small charts, and the data behind each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kimi_eagle.coordinator import RUNNING, ended_with
from kimi_eagle.records import ExecutionRecord, RunRecord
from kimi_eagle.registry.ledger import EXECUTION, execution_record
from kimi_eagle.ui import chart as drawing
from kimi_eagle.ui.trainings import Chart, Training, TrainingReader
from kimi_eagle.ui.view import Asked, Moved, NotThere, View, address
from kimi_eagle.ui.views.finding import run_at
from kimi_eagle.ui.views.run import TABS, head, title

# What a page draws: the trainings of a larger search are chosen one by one.
SHOWN = 2
_ROWS = 500


def curves(asked: Asked, reader: TrainingReader, run_id: str) -> View | Moved:
    found = run_at(asked, run_id, "/curves")
    if isinstance(found, Moved):
        return found
    stages = trained(asked, found)
    wanted = asked.all("stage")
    shown = [stage for stage in stages if stage.stage in wanted] if wanted else stages
    trainings = [reader.training(asked.registry, stage) for stage in shown[:SHOWN]]
    document = {
        **head(asked, found),
        "trainings": [documented(found, training) for training in trainings],
        "stages": [stage.stage for stage in stages],
    }
    more = {
        "run": found,
        "tab": "curves",
        "tabs": TABS,
        "drawn": [drawn(found, training) for training in trainings],
        "hidden": [stage.stage for stage in stages if stage not in shown[:SHOWN]],
    }
    return View("run_curves.html", title(found), document, more, live=found.status == RUNNING)


def data(asked: Asked, reader: TrainingReader, run_id: str, stage: str, name: str) -> View | Moved:
    """The table behind one chart: every point of it."""
    found = run_at(asked, run_id, f"/curves/{stage}/{name}")
    if isinstance(found, Moved):
        return found
    chosen = [item for item in trained(asked, found) if item.stage == stage]
    if not chosen:
        raise NotThere(f"run {found.id} has no training {stage}")
    chart = reader.training(asked.registry, chosen[-1]).chart(name)
    if chart is None:
        raise NotThere(f"training {stage} of run {found.id} has no curves called {name} yet")
    after = asked.number("after", -1) if asked.one("after") else -1
    most = asked.number("rows", _ROWS, 1, _ROWS)
    rows = chart.rows(after, most + 1)
    path = f"/runs/{found.id}/curves/{stage}/{name}"
    following = rows[most - 1][0] if len(rows) > most else None
    document = {
        "run": found.id,
        "stage": stage,
        "chart": chart.title,
        "unit": chart.unit,
        "columns": chart.header(),
        "rows": rows[:most],
        "next": address(f"{path}.json", after=following) if following is not None else None,
        "summary": [line.summary for line in chart.lines],
    }
    more = {
        "run": found,
        "next": address(path, after=following) if following is not None else None,
        "count": max(len(line.series.steps) for line in chart.lines),
    }
    return View(
        "curve_data.html",
        f"{chart.title}, {stage} of run {found.id}",
        document,
        more,
        csv=lambda: [chart.header(), *chart.rows()],
    )


def trained(asked: Asked, found: RunRecord) -> list[ExecutionRecord]:
    """The trainings of a run, in its order."""
    rows = asked.registry.database.ask(
        f"select {EXECUTION} from executions where run_id = ? and kind = 'train' "  # noqa: S608
        "order by id limit 500",
        (found.id,),
    )
    return ended_with(found, [execution_record(row) for row in rows])


def documented(found: RunRecord, training: Training) -> dict[str, Any]:
    """A training's curves with figures of all their points, and where the points are."""
    return {
        "stage": training.stage,
        "run": training.run_id,
        "disposition": training.disposition,
        "resumed_after_steps": list(training.resumed),
        "charts": [
            {
                "name": chart.name,
                "title": chart.title,
                "unit": chart.unit,
                "lines": [line.summary for line in chart.lines],
                "data": address(f"/runs/{found.id}/curves/{training.stage}/{chart.name}.json"),
            }
            for chart in training.charts
        ],
    }


def drawn(found: RunRecord, training: Training) -> dict[str, Any]:
    """A training for the template: each chart drawn, with where its data is."""
    return {
        "training": training,
        "charts": [
            {
                "chart": chart,
                "svg": drawing.draw(chart, training.resumed, f"{training.stage}-{chart.name}"),
                "legend": [(drawing.key(line), line.label) for line in chart.lines],
                "path": f"/runs/{found.id}/curves/{training.stage}/{chart.name}",
                "figures": figures(chart),
            }
            for chart in training.charts
        ],
    }


def figures(chart: Chart) -> list[Mapping[str, Any]]:
    return [line.summary for line in chart.lines]
