"""From Python: what the command line does, and an import that loads nothing."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from conftest import Answer, Project
from test_import_safety import SLOW, _loaded

import kimi_eagle
from kimi_eagle.api import ManifestError, RegistryError, Silent


def test_import_loads_nothing() -> None:
    assert _loaded(["kimi_eagle"], [*SLOW, "argparse", "sqlite3"]) == {"kimi_eagle": []}
    heavy = [name for name in SLOW if name != "pydantic"]
    assert _loaded(["kimi_eagle.api"], heavy) == {"kimi_eagle.api": []}


def test_it_says_what_the_command_line_says(first_run: tuple[Project, Answer]) -> None:
    project, answer = first_run
    root = kimi_eagle.open(project.root)
    assert repr(root) == f"kimi_eagle.open({str(project.root)!r})"
    planned = root.plan(project.manifest)
    told = project.cli("plan", str(project.manifest), "--json").json
    told["disk"]["free_bytes"] = planned.free_bytes  # which others write to meanwhile
    assert planned.document() == told
    ((run, stages),) = root.runs()
    assert run.id == answer.json["run_id"]
    assert [stage.stage for stage in stages] == ["head", "rows", "vocab"]
    rows = answer.outputs["rows"]["rows"]
    assert root.show(rows[:8]).kind == "rows"
    assert (root.folder(rows[:8]) / "rows.safetensors").is_file()
    lineage = root.lineage(rows[:8], down=False)
    assert lineage.document() == project.cli("lineage", rows[:8], "--up", "--json").json
    assert root.validate(project.manifest).verifier_checked


def test_runs_are_filtered_as_on_the_command_line(first_run: tuple[Project, Answer]) -> None:
    project, answer = first_run
    root = kimi_eagle.open(str(project.root))
    now = datetime.now(UTC)
    rows = answer.outputs["rows"]["rows"]
    kept: list[dict[str, Any]] = [
        {},
        {"since": now - timedelta(days=1)},
        {"since": (now - timedelta(days=1)).replace(tzinfo=None)},
        {"stage": "vocab", "status": "done", "name": "li*", "artifact": rows[:8], "limit": 1},
    ]
    assert [len(root.runs(**wanted)) for wanted in kept] == [1, 1, 1, 1]
    left: list[dict[str, Any]] = [{"since": now}, {"stage": "draft"}, {"status": "failed"}]
    assert [len(root.runs(**wanted)) for wanted in left] == [0, 0, 0]


def test_submit_reuses_and_tells_a_reporter(made: Project) -> None:
    told: list[str] = []

    class Told(Silent):
        def stage_ended(self, outcome: Any) -> None:
            told.append(outcome.name)

    root = kimi_eagle.open(made.root)
    outcome = root.submit(made.manifest, {"stages.vocab.size": 128}, Told())
    assert outcome.status == "done"
    found = {stage.name: stage.disposition for stage in outcome.stages}
    assert found == {"head": "reused", "rows": "reused", "vocab": "executed"}
    assert told == ["vocab"]
    again = root.submit(made.manifest, ["stages.vocab.size=128"])
    assert {stage.disposition for stage in again.stages} == {"reused"}


def test_the_root_is_that_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KIMI_EAGLE_ROOT", "elsewhere")
    assert kimi_eagle.open().path == Path("elsewhere")
    monkeypatch.delenv("KIMI_EAGLE_ROOT")
    assert kimi_eagle.open().path == Path("runs")


def test_mistakes_are_errors_with_words(first_run: tuple[Project, Answer], tmp_path: Path) -> None:
    project, answer = first_run
    root = kimi_eagle.open(project.root)
    with pytest.raises(RegistryError, match="there is no registry"):
        kimi_eagle.open(tmp_path).runs()
    with pytest.raises(ManifestError, match="did you mean 'size'"):
        root.validate(project.manifest, {"stages.vocab.sise": 3})
    with pytest.raises(TypeError, match="a mapping, or a list"):
        root.plan(project.manifest, "stages.vocab.size=3")
    with pytest.raises(LookupError, match="starts with ffffffff"):
        root.show("ffffffff")
    with pytest.raises(LookupError, match="is no artifact but a run"):
        root.folder(answer.json["run_id"])
    with pytest.raises(LookupError, match="is a head, not a checkpoint"):
        root.load_checkpoint(answer.outputs["head"]["head"])
    source = next(
        node
        for node in root.lineage(answer.outputs["rows"]["rows"]).nodes
        if node.state == "external"
    )
    with pytest.raises(LookupError, match="is external: its files are not in the store"):
        root.folder(source.digest)


def test_submit_in_another_thread_is_refused(made: Project) -> None:
    caught: list[BaseException] = []

    def submit() -> None:
        try:
            kimi_eagle.open(made.root).submit(made.manifest)
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=submit)
    thread.start()
    thread.join()
    assert "main thread" in str(caught[0])
