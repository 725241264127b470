"""A registry with some of everything that the page shows, written as runs write it: nothing of it
has run but in `registry`, events, logs and objects it is as if it had."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kimi_eagle.artifacts.locks import Lock
from kimi_eagle.identity import digest_document
from kimi_eagle.job import EventWriter
from kimi_eagle.records import ArtifactRecord
from kimi_eagle.registry.ledger import Inputs, Reuse
from kimi_eagle.registry.store import Registry
from kimi_eagle.runner import ALIVE

HOSTILE = """<script>window.hacked=1</script><img src=x onerror="window.hacked=1">'"&{{7*7}}"""
"""What a name, a label or a log may hold and no page may take for its own."""

STEPS = 120
# Where a training went on from what it had saved, and where its loss came to no number.
RESUMED, DIVERGED = 60, 90

MANIFEST = """\
version: 1
name: kimi
verifier: {path: verifier}
stages:
  draft: {kind: train, head: head, states: states, vocab: vocab, lr: 1e-4}
"""
RESOLVED = {
    "version": 1,
    "name": "kimi",
    "stages": {
        "rows": {"kind": "prepare"},
        "vocab": {"kind": "vocab"},
        "draft": {"kind": "train", "lr": 1e-4, "epochs": 3, "seed": 7},
        "score": {"kind": "evaluate"},
        "release": {"kind": "export"},
    },
}


@dataclass
class World:
    """A root for runs, and what is in it by name."""

    root: Path
    runs: dict[str, str] = field(default_factory=dict)
    artifacts: dict[str, str] = field(default_factory=dict)
    locks: list[Lock] = field(default_factory=list)

    def record(self, name: str, kind: str, state: str = "present", **more: Any) -> ArtifactRecord:
        digest = digest_document("test/1", ["pages", name, kind])
        self.artifacts[name] = digest
        return ArtifactRecord(
            digest, kind, 1234, more.get("files", {}), state, more.get("label", "")
        )

    def object(self, name: str) -> Path:
        digest = self.artifacts[name]
        folder = self.root / "objects" / digest[:2] / digest
        folder.mkdir(parents=True, exist_ok=True)
        return folder


class Writer:
    """Writes runs and stages into the registry of a world."""

    def __init__(self, world: World):
        self.world = world
        self.registry = Registry(world.root)

    def begin(self, name: str, *, title: str = "kimi", **more: Any) -> str:
        run_id = digest_document("test/1", ["run", name])[:12]
        self.world.runs[name] = run_id
        (self.world.root / run_id / "stages").mkdir(parents=True, exist_ok=True)
        values = {
            "name": title,
            "manifest_digest": digest_document("test/1", title),
            "manifest_path": "manifests/kimi.yaml",
            "manifest_text": MANIFEST,
            "resolved": json.dumps(RESOLVED),
            "overrides": json.dumps(["stages.draft.seed=7"]),
            "environment": json.dumps(
                {"python": "3.11.2", "packages": {"torch": "2.13.0"}, "code": {"commit": "c0ffee"}}
            ),
            "host": "here",
            "pid": 1,
            **more,
        }
        self.registry.begin_run(run_id, **values)
        return run_id

    def stage(
        self,
        run_id: str,
        name: str,
        kind: str,
        inputs: Inputs,
        outputs: Mapping[str, ArtifactRecord],
        *,
        parameters: Mapping[str, Any] | None = None,
        disposition: str = "executed",
        metrics: Mapping[str, Any] | None = None,
        error: str | None = None,
    ) -> int:
        """Record a stage; it goes on where `disposition` is `running`."""
        digests = {
            role: [item if isinstance(item, str) else item.digest for item in items]
            for role, items in inputs.items()
        }
        document = {
            "kind": kind,
            "code_version": 1,
            "parameters": dict(parameters or {}),
            "inputs": {role: found for role, found in digests.items() if role != "resume"},
        }
        number = self.registry.begin_execution(
            run_id,
            name,
            kind,
            digest_document("test/1", document),
            document,
            inputs,
            [],
            f"{run_id}{name}",
            {"packages": {"vllm": "0.32.0", "torch": "2.13.0"}},
        )
        if disposition != "running":
            self.registry.end_execution(
                number,
                disposition,
                seconds=12.5,
                outputs=outputs,
                metrics=metrics or {},
                error=error,
            )
        return number

    def log(self, run_id: str, stage: str, text: str) -> None:
        path = self.world.root / run_id / "stages" / f"{stage}.log"
        path.write_text(text, "utf-8")

    def events(self, run_id: str, stage: str, first: int, last: int, diverged: int = 0) -> None:
        path = self.world.root / run_id / "stages" / f"{stage}.events"
        training_events(EventWriter(path), first, last, diverged)


def training_events(writer: EventWriter, first: int, last: int, diverged: int = 0) -> None:
    """What a training of three TTT steps reports; at step `diverged` its loss is no number."""
    for step in range(first, last + 1):
        uneven = 1 + 0.06 * math.sin(step * 2.3) * math.cos(step * 0.7)
        values = {"loss": 8 * math.exp(-step / 40) * uneven, "grad_norm": 1.5 * uneven}
        for k in range(3):
            values[f"loss_{k}"] = values["loss"] / 3 + k
            values[f"full_acc_{k}"] = 0.8 ** (k + 1) * (1 - math.exp(-step / 40)) * uneven
        if step == diverged:
            values = dict.fromkeys(values, math.nan)
        writer.emit(
            "metric",
            split="train",
            step=step,
            epoch=0,
            lr=1e-4,
            values=values,
            tokens_per_second=1000.0 * uneven,
        )
        writer.progress(step, STEPS, "steps", loss=values["loss"])
    validation = {"loss_epoch": 3.5, "full_acc_0_epoch": 0.6, "full_acc_1_epoch": 0.4}
    writer.emit("metric", split="val", epoch=0, values=validation)


def evaluation_document(
    checkpoint: str, verifier: str, length: float, sets: Sequence[str] = ("mt_bench",), **more: Any
) -> dict[str, Any]:
    """An evaluation.json."""
    measured = [
        {
            "set": name,
            "draft_tokens": 3,
            "temperature": 0.0,
            "batch": 1,
            "prompts": 80,
            "acceptance_length": length + place / 10,
            "standard_error": 0.05,
            "per_position": [0.8, 0.6, 0.4],
            "draft_steps": 1000,
            "outputs_identical": True,
        }
        for place, name in enumerate(sets)
    ]
    return {
        **{key: value for key, value in measured[0].items() if key != "set"},
        "engine": "vllm",
        "checkpoint": checkpoint,
        "verifier": verifier,
        "max_tokens": 96,
        "thinking": "never",
        "simulated_acceptance_length": length - 0.02,
        "simulated_gap": -0.008,
        "sets": {name: [digest_document("test/1", name)] for name in sets},
        "measurements": measured,
        **more,
    }


def build(root: Path, *, hostile: bool = True) -> World:
    """Runs that are done, resumed, reused, failed, lost, alive, and one with hostile names."""
    world = World(root)
    writer = Writer(world)
    verifier = world.record("verifier", "verifier", "external", label="Kimi")
    source = world.record("source", "source", "external", label="chats.jsonl")
    rows = world.record("rows", "rows")
    vocab = world.record("vocab", "vocab", files={"report.json": ("0" * 64, 300)})
    other_vocab = world.record("other vocab", "vocab")
    draft = world.record(
        "draft",
        "checkpoint",
        files={"model.safetensors": ("1" * 64, 90), "config.json": ("2" * 64, 2)},
    )
    second = world.record("second draft", "checkpoint")
    snapshot = world.record("snapshot", "snapshot")
    score = world.record("score", "evaluation")
    second_score = world.record("second score", "evaluation")
    release = world.record("release", "release")

    # A training that was killed after it had saved itself, and the run that went on with it.
    killed = writer.begin("killed")
    training = {"states": [rows.digest], "vocab": [vocab.digest]}
    writer.stage(killed, "rows", "prepare", {"sources": [source]}, {"rows": rows})
    writer.stage(killed, "vocab", "vocab", {"rows": [rows.digest]}, {"vocab": vocab})
    broken = writer.stage(killed, "draft", "train", training, {}, disposition="running")
    writer.registry.add_output(broken, f"snapshot@{RESUMED}", snapshot)
    writer.registry.abandon_running(killed, "interrupted")
    writer.registry.end_run(killed, "interrupted")
    writer.events(killed, "draft", 1, RESUMED + 10)

    done = writer.begin("done")
    reused = [
        Reuse(name, found, {})
        for name, kind in (("rows", "prepare"), ("vocab", "vocab"))
        if (found := writer.registry.latest_of(kind, name)) is not None
    ]
    writer.registry.reuse_executions(done, reused, [])
    trained = writer.stage(
        done,
        "draft",
        "train",
        {**training, "resume": [snapshot.digest]},
        {"checkpoint": draft},
        parameters={"lr": 1e-4, "ttt_steps": 3},
        metrics={"val_loss": 3.5, "full_acc_0": 0.6, "steps": STEPS, "epoch": 1},
    )
    writer.events(done, "draft", RESUMED + 1, STEPS, DIVERGED)
    writer.log(done, "draft", "".join(f"line {n}\n" for n in range(1, 1001)))
    writer.stage(
        done,
        "score",
        "evaluate",
        {"checkpoint": [draft.digest], "verifier": [verifier], "prompts": [source.digest]},
        {"evaluation": score},
        parameters={"draft_tokens": 3},
        metrics={
            "acceptance_length": 2.5,
            "draft_tokens": 3,
            "checkpoint": draft.digest,
            "speeds": [
                {
                    "set": "mt_bench",
                    "draft_tokens": 3,
                    "temperature": 0.0,
                    "batch": 1,
                    "tokens_per_second": 190.0,
                    "speedup": 1.88,
                }
            ],
        },
    )
    writer.stage(
        done,
        "release",
        "export",
        {"checkpoint": [draft.digest], "evaluation": [score.digest]},
        {"release": release},
    )
    writer.registry.end_run(done, "done")

    second_run = writer.begin("second")
    writer.stage(
        second_run,
        "vocab",
        "vocab",
        {"rows": [rows.digest]},
        {"vocab": other_vocab},
        parameters={"size": 16},
    )
    writer.stage(
        second_run,
        "draft",
        "train",
        {"states": [rows.digest], "vocab": [other_vocab.digest]},
        {"checkpoint": second},
        parameters={"lr": 3e-4, "ttt_steps": 3},
        metrics={"val_loss": 4.5, "steps": STEPS},
    )
    writer.events(second_run, "draft", 1, STEPS)
    writer.stage(
        second_run,
        "score",
        "evaluate",
        {"checkpoint": [second.digest], "verifier": [verifier.digest]},
        {"evaluation": second_score},
        parameters={"draft_tokens": 3},
        metrics={"acceptance_length": 2.1, "draft_tokens": 3, "checkpoint": second.digest},
    )
    writer.registry.end_run(second_run, "done")

    failed = writer.begin("failed")
    writer.stage(
        failed,
        "draft",
        "train",
        training,
        {},
        disposition="failed",
        error="draft: the loss is no number from step 12 on; try a lower lr",
        parameters={"lr": 9.0},
    )
    writer.log(failed, "draft", "".join(f"line {n}\n" for n in range(1, 101)))
    writer.registry.end_run(failed, "failed")

    lost = writer.begin("lost")
    writer.stage(lost, "draft", "train", training, {}, disposition="running")
    writer.events(lost, "draft", 1, 30)

    alive = writer.begin("running")
    writer.stage(alive, "draft", "train", training, {}, disposition="running")
    writer.events(alive, "draft", 1, 40)
    lock = Lock(root / alive / ALIVE)
    assert lock.acquire(wait=False)
    world.locks.append(lock)

    again = writer.begin("again")
    made = writer.registry.execution(trained)
    writer.registry.reuse_executions(again, [Reuse("draft", made, {})], [])
    writer.registry.end_run(again, "done")

    sweep = writer.begin("sweep")
    for lr, loss in ((1e-4, 3.5), (3e-4, 3.1)):
        made_by = world.record(f"draft of {lr}", "checkpoint")
        writer.stage(
            sweep,
            f"draft--lr-{lr}",
            "train",
            training,
            {"checkpoint": made_by},
            parameters={"lr": lr, "ttt_steps": 3},
            metrics={"val_loss": loss},
        )
    writer.registry.end_run(sweep, "done")

    if hostile:
        _hostile(writer)
    writer.registry.close()

    world.object("score").joinpath("evaluation.json").write_text(
        json.dumps(evaluation_document(draft.digest, verifier.digest, 2.5, ("mt_bench", "gsm8k")))
    )
    world.object("second score").joinpath("evaluation.json").write_text(
        json.dumps(evaluation_document(second.digest, verifier.digest, 2.1, max_tokens=512))
    )
    world.object("vocab").joinpath("report.json").write_text(
        json.dumps(
            {
                "size": 16,
                "verifier_vocab_size": 64,
                "coverage": 0.97,
                "coverage_val": 0.95,
                "curve": [{"size": 16, "coverage": 0.97, "coverage_val": 0.95}],
            }
        )
    )
    for name, value in (("draft", b"\x80\x3f"), ("second draft", b"\x00\x40")):
        _weights(world.object(name) / "model.safetensors", value * 6)
    return world


def _weights(path: Path, data: bytes) -> None:
    """A safetensors file of one tensor."""
    entry = {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, len(data)]}
    header = json.dumps({"fc.weight": entry}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def _hostile(writer: Writer) -> None:
    """A run whose every name is what none should be."""
    run_id = writer.begin(
        "hostile",
        title=HOSTILE,
        manifest_path=HOSTILE,
        manifest_text=f"name: {json.dumps(HOSTILE)}\n",
        resolved=json.dumps({"name": HOSTILE, "stages": {"draft": {"kind": HOSTILE}}}),
        overrides=json.dumps([f"name={HOSTILE}"]),
        environment=json.dumps({"python": HOSTILE}),
        host=HOSTILE,
    )
    named = writer.world.record("hostile", "source", "external", label=HOSTILE)
    held = writer.world.record("held", "checkpoint", label=HOSTILE, files={HOSTILE: ("3" * 64, 5)})
    writer.stage(
        run_id,
        "draft",
        "train",
        {"sources": [named]},
        {"checkpoint": held},
        parameters={HOSTILE: HOSTILE},
        metrics={"val_loss": 1.0},
    )
    writer.stage(
        run_id,
        "again",
        "train",
        {"sources": [named.digest]},
        {},
        disposition="failed",
        error=HOSTILE,
    )
    writer.log(run_id, "again", f"{HOSTILE}\n")
    writer.events(run_id, "draft", 1, 5)
    writer.registry.end_run(run_id, "failed")
