"""`rank`: the trainings of a run in order, what tells them apart, what cannot be compared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Answer, Project
from test_registry import RUN

from kimi_eagle.identity import digest_document
from kimi_eagle.records import ArtifactRecord
from kimi_eagle.registry.ledger import Reuse
from kimi_eagle.registry.store import Registry

ROWS, STATES, VOCAB, HEAD, PROMPTS = (digest_document("test/1", name) for name in "rsvhp")


def artifact(name: str, kind: str) -> ArtifactRecord:
    return ArtifactRecord(digest_document("test/1", name), kind, 1, {}, "present", name)


class Books:
    """A registry in which stages come to their end without having run."""

    def __init__(self, root: Path):
        self.project = Project(root.parent)
        self.registry = Registry(root)
        self.begin("a" * 12)

    def begin(self, run: str) -> None:
        self.run = run
        self.registry.begin_run(run, **RUN)

    def stage(
        self,
        name: str,
        kind: str,
        parameters: dict[str, Any],
        inputs: dict[str, list[str]],
        metrics: dict[str, Any] | None,
    ) -> str:
        """Record a stage, which fails where it has no metrics; what it makes, by digest."""
        output = artifact(name, "checkpoint" if kind == "train" else "evaluation")
        document = {"kind": kind, "code_version": 1, "parameters": parameters, "inputs": inputs}
        number = self.registry.begin_execution(
            self.run, name, kind, digest_document("test/1", document), document, {}, [], name, {}
        )
        self.registry.end_execution(
            number,
            "failed" if metrics is None else "executed",
            seconds=1.0,
            outputs={} if metrics is None else {output.kind: output},
            metrics=metrics or {},
        )
        return output.digest

    def train(self, name: str, val_loss: float | None, **parameters: Any) -> str:
        inputs = {"head": [HEAD], "states": [STATES], "vocab": [VOCAB], "rows": [ROWS]}
        metrics = None if val_loss is None else {"val_loss": val_loss}
        values = {"lr": 1e-4, "ttt_steps": 3, "draft": {"layers": 1}, **parameters}
        return self.stage(name, "train", values, inputs, metrics)

    def evaluate(self, name: str, checkpoint: str, length: float, **parameters: Any) -> None:
        inputs = {"checkpoint": [checkpoint], "prompts": [PROMPTS]}
        values = {"draft_tokens": 3, **parameters}
        self.stage(name, "evaluate", values, inputs, {"acceptance_length": length})

    def rank(self, *arguments: str) -> Answer:
        return self.project.cli("rank", self.run, *arguments)


@pytest.fixture
def books(tmp_path: Path) -> Iterator[Books]:
    found = Books(tmp_path / "runs")
    yield found
    found.registry.close()


def test_by_validation_loss_until_all_are_evaluated(books: Books) -> None:
    low = books.train("draft--lr-1e-4", 2.5)
    high = books.train("draft--lr-3e-4", 2.1, lr=3e-4)
    found = books.rank("--json").json
    assert (found["by"], found["varied"], found["warnings"]) == ("val_loss", ["lr"], [])
    assert [(t["rank"], t["stage"], t["settings"]) for t in found["trials"]] == [
        (1, "draft--lr-3e-4", {"lr": 3e-4}),
        (2, "draft--lr-1e-4", {"lr": 1e-4}),
    ]
    books.evaluate("score--lr-3e-4", high, 2.2)
    assert books.rank("--json").json["by"] == "val_loss"
    books.evaluate("score--lr-1e-4", low, 2.7)
    found = books.rank("--json").json
    assert found["by"] == "acceptance_length"
    assert [t["checkpoint"] for t in found["trials"]] == [low, high]
    assert books.rank("--json", "--by", "val_loss").json["trials"][0]["checkpoint"] == high


def test_what_failed_is_listed_last_without_a_rank(books: Books) -> None:
    books.train("draft--seed-0", None, seed=0)
    books.train("draft--seed-1", 2.0, seed=1)
    books.train("draft--seed-2", 2.0, seed=2)
    lines = [line.split("\t") for line in books.rank().out.splitlines()]
    assert [(line[0], line[1], line[-2]) for line in lines] == [
        ("1", "draft--seed-1", "1"),
        ("1", "draft--seed-2", "2"),
        ("-", "draft--seed-0", "0"),
    ]
    assert lines[-1][-1] == "failed"


def test_losses_over_other_things_are_not_ranked_in_silence(books: Books) -> None:
    books.train("draft--ttt_steps-3", 3.0)
    books.train("draft--ttt_steps-5", 5.0, ttt_steps=5)
    answer = books.rank()
    assert answer.code == 0
    assert "warning: val_loss is of other things where ttt_steps differ" in answer.err


def test_each_evaluation_of_a_checkpoint_is_a_trial(books: Books) -> None:
    checkpoint = books.train("draft", 3.0)
    books.evaluate("score--draft_tokens-3", checkpoint, 2.0)
    books.evaluate("score--draft_tokens-5", checkpoint, 2.4, draft_tokens=5)
    found = books.rank("--json").json
    assert [t["evaluation"] for t in found["trials"]] == [
        "score--draft_tokens-5",
        "score--draft_tokens-3",
    ]
    assert found["varied"] == ["evaluation.draft_tokens"]
    assert found["warnings"]


def test_a_reused_training_has_the_figures_of_the_run_that_made_it(books: Books) -> None:
    books.train("draft", 1.5)
    (made,) = books.registry.stages_of(books.run)
    books.begin("b" * 12)
    books.registry.reuse_executions(books.run, [Reuse("again", made, {})], [])
    (trial,) = books.rank("--json").json["trials"]
    assert (trial["stage"], trial["disposition"], trial["val_loss"]) == ("again", "reused", 1.5)


def test_a_run_without_training_is_refused(books: Books) -> None:
    answer = books.rank()
    assert answer.code == 2
    assert f"run {books.run} has no stage of kind train" in answer.err
