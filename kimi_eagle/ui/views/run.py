"""One run: how its stages came out and why they ran; its config, inputs, log and environment."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from kimi_eagle import environments, ranking
from kimi_eagle.coordinator import LOST, RUNNING, ended_with
from kimi_eagle.difference import flat
from kimi_eagle.plan import differences
from kimi_eagle.progress import headline
from kimi_eagle.records import ExecutionRecord, RunRecord
from kimi_eagle.registry.browse import dispositions, inputs_of, made_before, stages_page
from kimi_eagle.ui.layers import layers
from kimi_eagle.ui.logs import FAILED_LINES, Tail, last_progress, last_sign, tail
from kimi_eagle.ui.view import Asked, Moved, NotThere, View, address
from kimi_eagle.ui.views.finding import run_at, seconds_of

STAGES = 100
"""Stages on a page."""
TABS = ("", "curves", "config", "inputs", "log", "environment")
_GOOD = ("executed", "reused", "reproduced")
_LINES = 400
_RANKED, _INPUTS, _FAILED = 50, 50, 3


def run(asked: Asked, run_id: str, most: int = STAGES) -> View | Moved:
    """Args: `most`: stages on a page."""
    found = run_at(asked, run_id)
    if isinstance(found, Moved):
        return found
    stages, following = stages_page(asked.registry, found.id, asked.number("after"), most)
    stages = ended_with(found, stages)
    rows = [stage_row(asked, stage) for stage in stages]
    ended = dispositions(asked.registry, found.id)
    failed = [name for name, how in ended.items() if how == "failed"]
    tails = {name: tail(asked.root, found.id, name, FAILED_LINES) for name in failed[:_FAILED]}
    texts = asked.registry.run_texts(found.id)
    named = json.loads(texts["resolved"]).get("stages", {})
    left = [name for name in named if ended.get(name) not in _GOOD]
    document = {
        **head(asked, found),
        "stages": rows,
        "next": address(f"/runs/{found.id}.json", after=following) if following else None,
        "failed": {name: one.document() for name, one in tails.items()},
        "failed_not_shown": failed[_FAILED:],
        "ranking": _ranking(asked, found),
        "would_run_again": left if found.status not in ("done", RUNNING) else [],
        "waiting": left if found.status == RUNNING else [],
    }
    more = {
        **_common(found, ""),
        "tails": tails,
        "next": address(f"/runs/{found.id}", after=following) if following else None,
    }
    return View("run.html", title(found), document, more, live=found.status == RUNNING)


def _ranking(asked: Asked, found: RunRecord) -> dict[str, Any] | None:
    """The trainings of a run in order, where it has several: the variants of a matrix."""
    (count,) = asked.registry.database.ask(
        "select count(*) from executions where run_id = ? and kind = 'train'", (found.id,)
    )[0]
    if count < 2:
        return None
    ranked = ranking.of_run(asked.registry, found.id).document()
    trials = ranked["trials"]
    return {**ranked, "trials": trials[:_RANKED], "not_shown": max(len(trials) - _RANKED, 0)}


def title(found: RunRecord) -> str:
    return f"Run {found.id}, {found.name}"


def _common(found: RunRecord, tab: str) -> dict[str, Any]:
    return {"run": found, "tab": tab, "tabs": TABS}


def head(asked: Asked, found: RunRecord) -> dict[str, Any]:
    """What stands above every tab."""
    document: dict[str, Any] = {
        **asdict(found),
        "seconds": seconds_of(found),
        "no_heartbeat_since": None,
    }
    if found.status == LOST:
        sign = last_sign(asked.root, found.id)
        document["no_heartbeat_since"] = (
            datetime.fromtimestamp(sign, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
            if sign is not None
            else found.started_at
        )
    return document


def stage_row(asked: Asked, stage: ExecutionRecord) -> dict[str, Any]:
    """A stage as a table shows it."""
    made_by = None
    if stage.reused_from is not None:
        made = asked.registry.execution(stage.reused_from)
        made_by = {"run": made.run_id, "stage": made.stage, "started_at": made.started_at}
    progress: Mapping[str, Any] = {}
    if stage.disposition == RUNNING:
        event = last_progress(asked.root, stage.run_id, stage.stage) or {}
        progress = {name: event[name] for name in ("done", "total", "unit") if name in event}
    return {
        "name": stage.stage,
        "kind": stage.kind,
        "disposition": stage.disposition,
        "why": _why(asked, stage),
        "made_by": made_by,
        "seconds": stage.seconds,
        "key": stage.key,
        "outputs": dict(stage.outputs),
        "figures": headline(stage.kind, stage.metrics),
        "metrics": dict(stage.metrics),
        "resources": dict(stage.resources),
        "error": stage.error,
        "started_at": stage.started_at,
        "ended_at": stage.ended_at,
        "progress": dict(progress),
    }


def _why(asked: Asked, stage: ExecutionRecord) -> list[str]:
    """Why it ran: what of its key differs from that of the last one before it."""
    if stage.reused_from is not None:
        return []
    if stage.disposition == "reproduced":
        return ["made again to compare it"]
    if stage.document is None:
        return []
    before = made_before(asked.registry, stage)
    if before is None or before.document is None:
        return ["never made before"]
    changed = differences(dict(before.document), dict(stage.document), asked.registry.artifact)
    return changed or ["the same as before, whose output was gone"]


def config(asked: Asked, run_id: str) -> View | Moved:
    found = run_at(asked, run_id, "/config")
    if isinstance(found, Moved):
        return found
    texts = asked.registry.run_texts(found.id)
    overrides = [str(item) for item in json.loads(texts["overrides"])]
    values = layers(texts["manifest_text"], overrides, json.loads(texts["resolved"]))
    document = {
        **head(asked, found),
        "overrides": overrides,
        "values": [asdict(value) for value in values],
        "manifest": texts["manifest_text"],
    }
    return View("run_config.html", title(found), document, _common(found, "config"))


def inputs(asked: Asked, run_id: str) -> View | Moved:
    found = run_at(asked, run_id, "/inputs")
    if isinstance(found, Moved):
        return found
    stages, following = stages_page(asked.registry, found.id, asked.number("after"), STAGES // 4)
    rows = []
    for stage in stages:
        taken, hidden = inputs_of(asked.registry, stage.id, _INPUTS)
        outputs = [(role, asked.registry.artifact(d)) for role, d in stage.outputs.items()]
        rows.append(
            {
                "name": stage.stage,
                "kind": stage.kind,
                "inputs": [asdict(item) for item in taken],
                "inputs_not_shown": hidden,
                "outputs": [
                    {
                        "role": role,
                        "digest": item.digest,
                        "kind": item.kind,
                        "label": item.label,
                        "bytes": item.bytes,
                        "state": item.state,
                    }
                    for role, item in outputs
                    if item is not None
                ],
            }
        )
    path = f"/runs/{found.id}/inputs"
    document = {
        **head(asked, found),
        "stages": rows,
        "next": address(f"{path}.json", after=following) if following else None,
    }
    more = {
        **_common(found, "inputs"),
        "next": address(path, after=following) if following else None,
    }
    return View("run_inputs.html", title(found), document, more)


def log(asked: Asked, run_id: str) -> View | Moved:
    found = run_at(asked, run_id, "/log")
    if isinstance(found, Moved):
        return found
    ended = dispositions(asked.registry, found.id)
    names = [name for name, how in ended.items() if how != "reused"]
    stage = asked.one("stage") or _telling(asked, found.id, ended, names)
    if stage and stage not in ended:
        raise NotThere(f"run {found.id} has no stage {stage}")
    lines = asked.number("lines", _LINES, 1, 5000)
    shown: Tail | None = tail(asked.root, found.id, stage, lines) if stage else None
    document = {
        **head(asked, found),
        "stage": stage or None,
        "log": shown.document() if shown else None,
    }
    more = {**_common(found, "log"), "stages": names, "stage": stage, "tail": shown, "lines": lines}
    return View("run_log.html", title(found), document, more, live=found.status == RUNNING)


def _telling(asked: Asked, run_id: str, ended: Mapping[str, str], names: list[str]) -> str:
    """The stage whose log says most: what failed, else what runs, else the last that printed."""
    for wanted in ("failed", RUNNING):
        for name in names:
            if ended[name] == wanted:
                return name
    printed = (name for name in reversed(names) if tail(asked.root, run_id, name, 1).bytes)
    return next(printed, names[-1] if names else "")


def environment(asked: Asked, run_id: str) -> View | Moved:
    found = run_at(asked, run_id, "/environment")
    if isinstance(found, Moved):
        return found
    whole = json.loads(asked.registry.run_texts(found.id)["environment"])
    leaves = environments.leaves(whole) or flat(whole)
    stages, _ = stages_page(asked.registry, found.id, 0, STAGES)
    others = []
    for stage in stages:
        theirs = environments.leaves(stage.environment) if stage.reused_from is None else {}
        for name in sorted(theirs.keys() & leaves.keys()):
            if theirs[name] != leaves[name]:
                others.append({"stage": stage.stage, "name": name, "value": theirs[name]})
    document = {
        **head(asked, found),
        "environment": leaves,
        "uncommitted": environments.dirty(whole),
        "stages_that_differ": others[:200],
    }
    return View("run_environment.html", title(found), document, _common(found, "environment"))
