"""Curves: what the events of a training become, and where they are written as a run goes."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from conftest import Answer, Project

from kimi_eagle.curves import points, series
from kimi_eagle.event_file import EventFile, crc32c, framed, scalars
from kimi_eagle.job import EventReader, EventWriter
from kimi_eagle.manifest.load import load
from kimi_eagle.manifest.model import Manifest
from kimi_eagle.outcome import StageOutcome
from kimi_eagle.plan import StagePlan
from kimi_eagle.progress import PlainReporter
from kimi_eagle.training_log import TrainingLog

MANIFEST = """\
version: 1
name: curves
verifier: {path: verifier}
stages:
  head: {kind: head}
  rows: {kind: prepare, sources: [{path: chats.jsonl}]}
  states: {kind: extract, rows: rows}
  vocab: {kind: vocab, rows: rows}
  draft: {kind: train, head: head, states: states, vocab: vocab}
  score: {kind: evaluate, checkpoint: draft, prompts: {path: data/mt_bench.jsonl}}
"""
RUN = "0123456789ab"


def needs(package: str) -> Any:
    return pytest.mark.skipif(not find_spec(package), reason=f"{package} is not installed")


def train_events(writer: EventWriter, steps: int = 3) -> None:
    """What a training reports: losses and accuracies a step, and a validation at its end."""
    for step in range(1, steps + 1):
        accuracies = {f"full_acc_{k}": 0.5 / (k + 1) for k in range(2)}
        writer.emit(
            "metric",
            split="train",
            step=step,
            epoch=0,
            lr={"adamw": 1e-3, "muon": 0.02} if step == 3 else 1e-3,
            values={"loss": 8.0 / step, **accuracies, "cond_acc_1": 0.5, "grad_norm": None},
            milliseconds={"forward": 12.5},
            tokens_per_second=1000.0,
        )
        writer.progress(step, steps, "steps", loss=8.0 / step)
    writer.emit("metric", split="val", epoch=0, values={"loss_epoch": 3.0, "full_acc_0_epoch": 0.4})


@pytest.fixture
def events(tmp_path: Path) -> list[dict[str, Any]]:
    train_events(EventWriter(tmp_path / "events"))
    return list(EventReader(tmp_path / "events").new())


def test_events_become_curves_over_optimizer_steps(events: list[dict[str, Any]]) -> None:
    found = series(points(events))
    assert found["train/loss"] == [(1, 8.0), (2, 4.0), (3, 8.0 / 3)]
    assert found["val/loss"] == [(3, 3.0)]  # at the step before it
    assert found["train/simulated_acceptance_length"][0] == (1, 1 + 0.5 + 0.25)
    assert found["val/simulated_acceptance_length"] == [(3, 1.4)]
    assert found["train/lr"] == [(1, 1e-3), (2, 1e-3)]
    assert found["train/lr_muon"] == [(3, 0.02)]
    assert found["perf/tokens_per_second"][-1] == (3, 1000.0)
    assert found["perf/milliseconds_forward"][0] == (1, 12.5)
    assert "train/grad_norm" not in found  # it was no number


def test_the_simulated_length_counts_up_to_the_first_step_that_is_missing() -> None:
    # EVA-05: accuracies of 0.8, 0.5, 0.5 given that those before were right: 0.8, 0.4, 0.2
    values = {"full_acc_0": 0.8, "full_acc_1": 0.4, "full_acc_2": 0.2, "full_acc_4": 0.1}
    event = {"event": "metric", "split": "train", "step": 1, "values": values}
    ((_, point),) = points([event])
    assert point["train/simulated_acceptance_length"] == pytest.approx(1 + 1.4)


def test_a_record_has_the_bytes_of_tensorboards_own_writer() -> None:
    # Written by tensorboard 2.21.0 from the same event.
    expected = (
        "3800000000000000a3797d5709000020c0524bda4110ac022a2a0a110a0a747261696e2f6c6f737315000020"
        "400a150a0e76616c2f66756c6c5f6163635f30150000403f6c6fcd3b"
    )
    event = scalars(1764576000.5, 300, {"train/loss": 2.5, "val/full_acc_0": 0.75})
    assert framed(event).hex() == expected


@pytest.mark.parametrize(("data", "crc"), [(b"123456789", 0xE3069283), (b"\0" * 32, 0x8A9136AA)])
def test_crc_of_known_data(data: bytes, crc: int) -> None:
    assert crc32c(data) == crc  # RFC 3720, appendix B.4


@needs("tensorboard")
def test_tensorboard_reads_an_event_file(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with EventFile(tmp_path) as file:
        for step in (1, 2, 70_000):
            file.add(step, {"train/loss": 1 / step, "größe": 1e300})
    found = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in found.Scalars("train/loss")] == [
        (step, pytest.approx(1 / step)) for step in (1, 2, 70_000)
    ]
    assert found.Scalars("größe")[0].value == float("inf")


class Told(PlainReporter):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def _say(self, text: str) -> None:
        self.said.append(text)


class Run:
    """A run whose stages report and end, without having been executed."""

    def __init__(self, root: Path, manifest: Manifest):
        self.reporter = Told()
        self.log = TrainingLog(self.reporter, manifest)
        self.folder = root / RUN
        self.folder.mkdir(parents=True)
        self.log.run_started(RUN, self.folder)

    def train(self, error: str | None = None) -> None:
        stage = StagePlan("draft", "train", key="k" * 64)
        stage.document = {"parameters": {"lr": 1e-3, "draft": {"layers": 1}}}
        self.log.stage_started(stage)
        path = self.folder / "events"
        train_events(EventWriter(path))
        for event in EventReader(path).new():
            self.log.stage_event(stage, event)
        outputs = {} if error else {"checkpoint": "c" * 64}
        usage = {"peak_memory_bytes": 2**30, "cpu_seconds": 1.5}
        how = "failed" if error else "executed"
        metrics = {"steps": 3}
        self.log.stage_ended(
            StageOutcome("draft", "train", how, "k", outputs, metrics, 1.0, error, None, usage)
        )

    def evaluate(self) -> None:
        stage = StagePlan("score", "evaluate", inputs={"checkpoint": ["c" * 64]})
        self.log.stage_started(stage)
        metrics = {"acceptance_length": 2.5, "outputs_identical": True, "per_position": [0.5]}
        self.log.stage_ended(StageOutcome("score", "evaluate", "executed", "e", {}, metrics, 1.0))

    def scalars(self, stage: str) -> dict[str, list[tuple[int, float]]]:
        """Of the one event file of a stage, by tag, read by its own framing."""
        (path,) = (self.folder / "tensorboard" / stage).iterdir()
        found: dict[str, list[tuple[int, float]]] = {}
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            record, data = data[12 : 12 + length], data[16 + length :]
            step, values = _decoded(record)
            for tag, value in values.items():
                found.setdefault(tag, []).append((step, value))
        return found


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protocol buffer, as far as event files have them."""
    while data:
        key, data = _varint(data)
        if key & 7 == 0:
            value, data = _varint(data)
            yield key >> 3, value
        elif key & 7 == 2:
            size, data = _varint(data)
            yield key >> 3, data[:size]
            data = data[size:]
        else:
            form = "<d" if key & 7 == 1 else "<f"
            size = struct.calcsize(form)
            yield key >> 3, struct.unpack(form, data[:size])[0]
            data = data[size:]


def _varint(data: bytes) -> tuple[int, bytes]:
    value = 0
    for index, byte in enumerate(data):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, data[index + 1 :]
    raise ValueError("it ends within a number")


def _decoded(record: bytes) -> tuple[int, dict[str, float]]:
    event = dict(_fields(record))
    values = [dict(_fields(item)) for _, item in _fields(event.get(5, b""))]
    return event.get(2, 0), {value[1].decode(): value[2] for value in values}


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(MANIFEST, "utf-8")
    return path


def test_a_training_is_logged_for_tensorboard_without_being_asked(
    tmp_path: Path, manifest: Path
) -> None:
    run = Run(tmp_path, load(manifest).manifest)
    run.train()
    found = run.scalars("draft")
    assert found["train/loss"] == [(1, 8.0), (2, 4.0), (3, pytest.approx(8 / 3))]
    assert found["val/full_acc_0"] == [(3, pytest.approx(0.4))]
    assert found["perf/peak_memory_bytes"] == [(3, 2.0**30)]
    (hint,) = (text for text in run.reporter.said if "--logdir" in text)
    assert hint.startswith(f"curves: tensorboard --logdir {run.folder / 'tensorboard'}")
    assert ("pip install tensorboard" in hint) == (find_spec("tensorboard") is None)
    run.evaluate()
    assert run.scalars("score") == {"eval/mt_bench/acceptance_length": [(3, 2.5)]}


def test_stages_without_figures_leave_no_log(first_run: tuple[Project, Answer]) -> None:
    project, answer = first_run
    assert not (project.root / answer.json["run_id"] / "tensorboard").exists()


def test_where_it_is_logged_changes_no_key_and_no_manifest(tmp_path: Path, manifest: Path) -> None:
    plain = load(manifest)
    sets = ("logging.tensorboard=false", "logging.wandb={project: a}", "logging.mlflow={}")
    other = load(manifest, sets)
    assert other.manifest.logging != plain.manifest.logging
    assert other.digest == plain.digest
    assert other.manifest.stages == plain.manifest.stages
    run = Run(tmp_path, load(manifest, sets[:1]).manifest)
    run.train()
    assert not (run.folder / "tensorboard").exists()


def test_what_cannot_be_logged_ends_no_run(tmp_path: Path, manifest: Path) -> None:
    run = Run(tmp_path, load(manifest).manifest)
    (run.folder / "tensorboard").write_text("in the way")
    run.train()
    (told,) = (text for text in run.reporter.said if text.startswith("no curves"))
    assert told.startswith("no curves for tensorboard from here on: ")
    assert told.endswith("; the run goes on")


@pytest.mark.skipif(find_spec("mlflow") is not None, reason="mlflow is installed")
def test_a_tracker_that_is_not_installed_is_named_with_its_package(
    tmp_path: Path, manifest: Path
) -> None:
    run = Run(tmp_path, load(manifest, ["logging.mlflow={}"]).manifest)
    run.train()
    run.train()
    (told,) = (text for text in run.reporter.said if text.startswith("no curves"))
    assert "it is not installed: pip install mlflow-skinny" in told


def test_a_password_in_a_manifest_is_refused(manifest: Path) -> None:
    from kimi_eagle.manifest.problem import ManifestError

    with pytest.raises(ManifestError, match="holds a password"):
        load(manifest, ["logging.mlflow.tracking_uri=https://me:secret@example.org"])


@needs("mlflow")
def test_mlflow_has_the_curves_and_the_parameters(
    tmp_path: Path, manifest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    run = Run(tmp_path, load(manifest, ["logging.mlflow={}"]).manifest)
    run.train()
    run.train(error="it diverged")
    assert not [text for text in run.reporter.said if text.startswith("no curves")]
    client = MlflowClient((run.folder / "mlflow" / "store").as_uri())
    experiment = client.get_experiment_by_name("curves")
    failed, done = client.search_runs([experiment.experiment_id])
    assert (failed.info.status, done.info.status) == ("FAILED", "FINISHED")
    assert done.info.run_name == f"{RUN}/draft"
    assert done.data.params == {"lr": "0.001", "draft.layers": "1"}
    history = client.get_metric_history(done.info.run_id, "train/loss")
    assert [(m.step, m.value) for m in history] == [(1, 8.0), (2, 4.0), (3, 8.0 / 3)]


def _wandb_records(data: bytes) -> Iterator[bytes]:
    """The records of a file of wandb: those of a LevelDB log, behind seven bytes of its own."""
    record, at = b"", 7
    while at + 7 <= len(data):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


@needs("wandb")
def test_wandb_keeps_the_curves_offline(tmp_path: Path, manifest: Path) -> None:
    from wandb.proto.wandb_internal_pb2 import Record

    run = Run(tmp_path, load(manifest, ["logging.wandb={project: p}"]).manifest)
    run.train()
    assert not [text for text in run.reporter.said if text.startswith("no curves")]
    (path,) = (run.folder / "wandb").glob("wandb/offline-run-*/run-*.wandb")
    losses = []
    for data in _wandb_records(path.read_bytes()):
        record = Record.FromString(data)
        losses += [
            (record.history.step.num, json.loads(item.value_json))
            for item in record.history.item
            if "train/loss" in (item.key, *item.nested_key)
        ]
    assert losses == [(1, 8.0), (2, 4.0), (3, 8.0 / 3)]
