"""Importing rows and states that others made: the same artifacts, checked the same way."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import DEMO, Answer, Project
from safetensors.torch import save_file

from kimi_eagle.artifacts.digests import Digests
from kimi_eagle.job import EventReader, EventWriter, Given, Job, StageFailed
from kimi_eagle.registry.ledger import Ledger
from kimi_eagle.registry.schema import FILE
from kimi_eagle.rows.table import Rows, load_rows
from kimi_eagle.stages.catalog import KINDS
from kimi_eagle.stages.context import Context
from kimi_eagle.states.index import StateIndex
from kimi_eagle.states.layout import ROWS, read_rows
from kimi_eagle.states.reader import ShardReader

LAYERS = [2, 4, 5]


class Foreign:
    """Rows of a project with their states, as other trainers would keep them."""

    def __init__(self, project: Project, rows: str, states: str):
        objects = project.root / "objects"
        self.rows: Rows = load_rows(objects / rows[:2] / rows)
        text = (objects / states[:2] / states / ROWS).read_text("utf-8")
        self.listed = read_rows(text)
        index = StateIndex(project.root / FILE)
        places = index.places([row.key for row in self.listed])
        index.close()
        reader = ShardReader(project.root)
        self.states = [reader.read(places[row.key])[0].clone() for row in self.listed]
        self.ids = [
            torch.from_numpy(self.rows.ids(row).astype(np.int64)) for row in range(len(self))
        ]
        self.masks = [
            torch.from_numpy(self.rows.mask(row).astype(np.int64)) for row in range(len(self))
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def write_v1(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        for row in range(len(self)):
            torch.save(
                {
                    "input_ids": self.ids[row],
                    "hidden_states": list(self.states[row].unbind(1)),
                    "loss_mask": self.masks[row],
                },
                folder / f"data_{row}.pt",
            )

    def write_hs(self, folder: Path, numbers: dict[int, int] | None = None) -> None:
        """Args: `numbers`: row → number in the file's name, where these are others."""
        folder.mkdir(exist_ok=True)
        for row in range(len(self)):
            number = (numbers or {}).get(row, row)
            save_file(
                {"hidden_states": self.states[row].contiguous(), "token_ids": self.ids[row]},
                folder / f"hs_{number}.safetensors",
            )

    def write_arrow(self, folder: Path) -> None:
        from datasets import Dataset

        Dataset.from_dict(
            {
                "input_ids": [ids.tolist() for ids in self.ids],
                "loss_mask": [mask.tolist() for mask in self.masks],
                "seq_len": [len(ids) for ids in self.ids],
            }
        ).save_to_disk(str(folder))


@pytest.fixture
def foreign(first_extraction: tuple[Project, Answer]) -> Foreign:
    project, answer = first_extraction
    return Foreign(project, answer.outputs["rows"]["rows"], answer.outputs["states"]["states"])


class Stage:
    """Runs one stage in this process, as a worker would."""

    def __init__(self, folder: Path):
        self._folder = folder
        registry = Ledger(folder / "runs")
        self._digests = Digests(registry)
        self._registry = registry
        self.notes: list[str] = []

    def close(self) -> None:
        self._registry.close()

    def run(
        self, kind: str, samples: Path, rows: Path | None = None, **params: Any
    ) -> tuple[Path, dict[str, Any]]:
        """Its artifact's folder and its metrics."""
        paths = sorted(path for path in samples.iterdir() if path.is_file())
        given: dict[str, tuple[Given, ...]] = {
            "samples": tuple(Given("", str(path)) for path in paths),
            "verifier": (Given("0" * 64, str(DEMO / "verifier")),),
        }
        if rows is not None:
            given["rows"] = (Given("", str(rows)),)
            params["rows"] = "rows"
        params |= {"kind": kind, "samples": {"path": str(samples)}}
        job = self._folder / f"job-{len(list(self._folder.glob('job-*')))}"
        job.mkdir()
        root = self._folder / "runs"
        described = Job(
            "it", kind, params, given, str(DEMO / "verifier"), str(job), str(root), str(root / FILE)
        )
        events = job / "events.ndjson"
        context = Context(
            described,
            KINDS[kind].params.model_validate(params, strict=False),
            EventWriter(events),
        )
        module = importlib.import_module(f"kimi_eagle.stages.{kind}.run")
        try:
            metrics = module.run(context)
        finally:
            told = EventReader(events).new()
            self.notes = [event["text"] for event in told if event["event"] == "note"]
        return job / "out" / KINDS[kind].output, metrics


@pytest.fixture
def stage(tmp_path: Path) -> Any:
    found = Stage(tmp_path)
    yield found
    found.close()


def _same_rows(folder: Path, foreign: Foreign) -> bool:
    rows = (load_rows(folder), foreign.rows)
    mine, theirs = (
        [(found.id_bytes(row), found.mask(row).tobytes()) for row in range(len(found))]
        for found in rows
    )
    return mine == theirs


def _v1(stage: Stage, foreign: Foreign, folder: Path, **params: Any) -> tuple[Path, dict[str, Any]]:
    foreign.write_v1(folder)
    rows, _ = stage.run("import_rows", folder, format="v1", on_bad_record="skip")
    return stage.run("import_states", folder, rows, format="v1", layers=LAYERS, **params)


def test_v1_samples_become_the_artifacts_that_an_extraction_makes(
    stage: Stage, foreign: Foreign, tmp_path: Path
) -> None:
    folder = tmp_path / "samples"
    foreign.write_v1(folder)
    rows, metrics = stage.run("import_rows", folder, format="v1", val_ratio=0.2)
    assert _same_rows(rows, foreign)
    assert (metrics["rows_train"], metrics["rows_val"]) == (8, 2)
    states, metrics = stage.run("import_states", folder, rows, format="v1", layers=LAYERS)
    listed = read_rows((states / ROWS).read_text("utf-8"))
    assert [row.digest for row in listed] == [row.digest for row in foreign.listed]
    # Under keys of their own: the arithmetic was another's.
    assert not {row.key for row in listed} & {row.key for row in foreign.listed}
    assert json.loads((states / "contract.json").read_text("utf-8"))["numerics"] == "imported"
    assert metrics["rows_imported"] == len(foreign)
    assert metrics["agreement"] > 0.9, "the demo's answers are nearly what its verifier says"
    assert metrics["next_best"]["agreement"] <= metrics["next_best"]["chosen"] + 0.05


def test_speculators_files_are_found_by_their_tokens(
    stage: Stage, foreign: Foreign, tmp_path: Path
) -> None:
    """EXT-15: numbers in names say nothing; files of an older data set are not taken."""
    data, hidden = tmp_path / "data", tmp_path / "hidden"
    foreign.write_arrow(data)
    order = {row: len(foreign) - 1 - row for row in range(len(foreign))}
    foreign.write_hs(hidden, order)
    for number in (100, 101):
        ids = torch.arange(5) + number
        left = {"hidden_states": torch.randn(5, 4, 128).bfloat16(), "token_ids": ids}
        save_file(left, hidden / f"hs_{number}.safetensors")
    shutil.copyfile(hidden / "hs_0.safetensors", hidden / "hs_1_0.safetensors")
    rows, _ = stage.run("import_rows", data, format="arrow")
    assert _same_rows(rows, foreign)
    states, metrics = stage.run("import_states", hidden, rows, format="speculators", layers=LAYERS)
    listed = read_rows((states / ROWS).read_text("utf-8"))
    assert [row.digest for row in listed] == [row.digest for row in foreign.listed]
    assert metrics["leftover_files"] == 2
    assert "2 files hold other token ids than any row: ignored" in stage.notes
    assert any(note.startswith("hs_1_0.safetensors is no sample's name") for note in stage.notes)


def test_leftovers_alone_are_no_states(stage: Stage, foreign: Foreign, tmp_path: Path) -> None:
    """EXT-15: the folder holds as many files as there are rows, all of another data set."""
    data, hidden = tmp_path / "data", tmp_path / "hidden"
    foreign.write_arrow(data)
    rows, _ = stage.run("import_rows", data, format="arrow")
    foreign.ids = [ids + 1 for ids in foreign.ids]
    foreign.write_hs(hidden)
    with pytest.raises(StageFailed):
        stage.run("import_states", hidden, rows, format="speculators", layers=LAYERS)
    with pytest.raises(StageFailed):
        stage.run(
            "import_states", hidden, rows, format="speculators", layers=LAYERS, max_bad_rows=100
        )


def test_a_row_without_states_is_counted_against_the_limit(
    stage: Stage, foreign: Foreign, tmp_path: Path
) -> None:
    foreign.states[1][3, 2, 1] = float("nan")  # EXT-03's kin
    foreign.states[4][2] = 0
    folder = tmp_path / "samples"
    with pytest.raises(StageFailed, match=r"data_1.pt: the state of token 3 in layer slot 2"):
        _v1(stage, foreign, folder)
    with pytest.raises(StageFailed, match="refused: 1 all-zero, 1 not-finite"):
        _v1(stage, foreign, folder, max_bad_rows=1)
    states, metrics = _v1(stage, foreign, folder, max_bad_rows=2)
    listed = read_rows((states / ROWS).read_text("utf-8"))
    assert {n: row.refused for n, row in enumerate(listed) if row.refused} == {
        1: "not-finite",
        4: "all-zero",
    }
    assert metrics["rows_refused"] == 2
    assert len(stage.notes) == 2


def _damage(what: Callable[[Any], Any]) -> Callable[[Foreign], None]:
    def damage(foreign: Foreign) -> None:
        foreign.states = [what(states) for states in foreign.states]

    return damage


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        pytest.param(_damage(lambda x: x.roll(1, 0)), "the position before its own", id="shifted"),
        pytest.param(_damage(lambda x: x[:, 1:]), "expected .* 4, 128", id="a layer short"),
        pytest.param(_damage(lambda x: x[:, [0, 1, 1, 3]]), "hold the same states", id="repeated"),
    ],
)
def test_states_of_another_convention_are_refused(
    stage: Stage, foreign: Foreign, tmp_path: Path, damage: Any, says: str
) -> None:
    damage(foreign)
    with pytest.raises(StageFailed, match=says):
        _v1(stage, foreign, tmp_path / "samples")


def test_agreement_can_be_asked_for(stage: Stage, foreign: Foreign, tmp_path: Path) -> None:
    with pytest.raises(StageFailed, match=r"min_agreement 100%"):
        _v1(stage, foreign, tmp_path / "samples", min_agreement=1.0)


@pytest.mark.parametrize(
    ("sample", "reason"),
    [
        ({"loss_mask": torch.zeros(4, dtype=torch.long)}, "nothing_supervised"),
        ({"input_ids": torch.tensor([1, 2, 3, 10**6])}, "other_vocabulary"),
        ({"loss_mask": torch.tensor([0, 1, 2, 1])}, "mask"),
        ({"loss_mask": torch.ones(3)}, "bad_record"),
    ],
)
def test_samples_that_cannot_be_learnt_from_are_refused_or_counted(
    stage: Stage, tmp_path: Path, sample: dict[str, Any], reason: str
) -> None:
    folder = tmp_path / "samples"
    folder.mkdir()
    good = {"input_ids": torch.tensor([1, 2, 3, 4]), "loss_mask": torch.tensor([0, 1, 1, 1])}
    torch.save(good, folder / "data_0.pt")
    torch.save(good, folder / "data_1.pt")
    torch.save(good | sample, folder / "data_2.pt")
    with pytest.raises(StageFailed, match=r"data_2\.pt: "):
        stage.run("import_rows", folder, format="v1", val_ratio=0)
    _, metrics = stage.run("import_rows", folder, format="v1", val_ratio=0, on_bad_record="skip")
    assert metrics["rows"] == 1
    assert metrics["rejects"] == {reason: 1, "duplicate": 1}


IMPORTED = """\
version: 1
name: imported
verifier: {path: verifier}
stages:
  head: {kind: head}
  rows: {kind: import_rows, format: v1, samples: {path: "samples/*"}, val_ratio: 0.2}
  states:
    kind: import_states
    rows: rows
    format: v1
    samples: {path: "samples/*"}
    layers: [2, 4, 5]
  vocab: {kind: vocab, rows: rows, size: 256}
  draft: {kind: train, head: head, states: states, vocab: vocab, epochs: 1, ttt_steps: 1}
"""


@pytest.mark.slow
def test_a_draft_is_trained_on_imported_states(project: Project, foreign: Foreign) -> None:
    foreign.write_v1(project.folder / "samples")
    project.write(IMPORTED)
    answer = project.submit()
    assert answer.code == 0, answer.err
    assert set(answer.dispositions.values()) == {"executed"}
    (metrics,) = [s["metrics"] for s in answer.json["stages"] if s["name"] == "states"]
    assert metrics["rows_imported"] == len(foreign)
    assert set(project.submit().dispositions.values()) == {"reused"}
    assert project.cli("verify", "--all").code == 0
