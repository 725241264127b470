"""The train stage as the worker runs it, on made-up states: its guards, its record, its starts."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("speculators", reason="needs the extra cpu or gpu")

from safetensors.torch import load_file, save_file
from trainings import LAYERS, VOCAB, params_of, random_rows, vocab_map, write_head

from kimi_eagle.draft.checkpoint import check_checkpoint
from kimi_eagle.draft.vocab import save_map
from kimi_eagle.identity import digest_file
from kimi_eagle.job import EventReader, EventWriter, Given, Job, StageFailed
from kimi_eagle.records import ShardRecord
from kimi_eagle.registry.ledger import Ledger
from kimi_eagle.stages.context import Context
from kimi_eagle.stages.train.run import run
from kimi_eagle.states.layout import StateRow, shard_path, write_rows
from kimi_eagle.states.shard_file import content_digest

LENGTHS = [23, 17, 20, 31, 9, 40, 25, 14]
VALIDATING = {6, 7}
SHARD = "5" * 64


@pytest.fixture(autouse=True)
def _own_handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


class Given_:
    """Everything a train stage takes, in a folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.head = write_head(folder / "head")
        rows, states = random_rows(folder / "rows", LENGTHS)
        rows.split[list(VALIDATING)] = 1
        self.rows, self.states = rows, states
        (folder / "vocab").mkdir()
        chosen = vocab_map().t2d.nonzero().flatten().tolist()
        save_map(folder / "vocab", chosen, VOCAB)
        report = {"verifier_vocab_size": VOCAB, "size": len(chosen)}
        (folder / "vocab" / "report.json").write_text(json.dumps(report))
        self.write_rows()
        held = [states.read(type("At", (), {"start": n})) for n in range(len(LENGTHS))]
        path = shard_path(folder, SHARD)
        path.parent.mkdir(parents=True)
        both = torch.cat([item for item, _ in held]), torch.cat([ids for _, ids in held])
        save_file({"hidden_states": both[0], "token_ids": both[1]}, path)
        starts = [sum(LENGTHS[:n]) for n in range(len(LENGTHS))]
        listed = [
            (
                f"{n:064x}",
                starts[n],
                LENGTHS[n],
                content_digest(held[n][0].view(torch.uint8).numpy()),
            )
            for n in range(len(LENGTHS))
        ]
        registry = Ledger(folder)
        registry.add_shard(ShardRecord(SHARD, 1, tuple(listed)))
        registry.close()
        (folder / "states-artifact").mkdir()
        text = write_rows(StateRow(key, digest, tokens) for key, _, tokens, digest in listed)
        (folder / "states-artifact" / "rows.txt").write_text(text)
        contract = {"layers": [*LAYERS, 6]}
        (folder / "states-artifact" / "contract.json").write_text(json.dumps(contract))

    def write_rows(self) -> None:
        from dataclasses import asdict

        from safetensors.numpy import save_file as save_arrays

        arrays = {name: array for name, array in asdict(self.rows).items() if array is not None}
        save_arrays(arrays, self.folder / "rows" / "rows.safetensors")

    def context(self, name: str, resume: Path | None = None, **values: Any) -> Context:
        given = {"epochs": 1, "lr": 5e-3, "ttt_steps": 2, "head": "h", "states": "s"}
        params = params_of(**{**given, **values})
        job = self.folder / name
        job.mkdir()
        inputs = {
            "head": (Given("", str(self.head)),),
            "states": (Given("", str(self.folder / "states-artifact")),),
            "rows": (Given("", str(self.folder / "rows")),),
            "vocab": (Given("", str(self.folder / "vocab")),),
        }
        if params.init_from is not None:
            inputs["init_from"] = (Given("", str(self.folder / "first/out/checkpoint")),)
        if resume is not None:
            inputs["resume"] = (Given("e" * 64, str(resume)),)
        made = Job(
            "draft",
            "train",
            params.model_dump(mode="json"),
            inputs,
            "",
            str(job),
            str(self.folder),
            str(self.folder / "registry.sqlite"),
            saves=True,
        )
        return Context(made, params, EventWriter(job / "events.ndjson"))


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Given_:
    return Given_(tmp_path_factory.mktemp("stage") / "given")


@pytest.fixture(scope="module")
def first(given: Given_) -> tuple[Context, dict[str, Any]]:
    context = given.context("first", epochs=2)
    return context, run(context)


def events_of(context: Context) -> list[dict[str, Any]]:
    return list(EventReader(Path(context.job.folder) / "events.ndjson").new())


def test_the_record_says_what_was_trained_and_on_what(
    given: Given_, first: tuple[Context, dict[str, Any]]
) -> None:
    context, metrics = first
    check_checkpoint(context.out("checkpoint"))
    assert metrics["steps"] == metrics["steps_run"] > 2
    assert metrics["aims_agreement"] >= 0.97
    assert metrics["rows_without_supervision"] == metrics["rows_cut"] == 0
    assert metrics["tokens"] == 2 * sum(n - 1 for n in LENGTHS[:6])
    assert len(metrics["lm_head_digest"]) == len(metrics["embed_tokens_digest"]) == 64
    found = events_of(context)
    steps = [e for e in found if e["event"] == "metric" and e["split"] == "train"]
    assert [event["step"] for event in steps] == list(range(1, metrics["steps"] + 1))
    assert {"loss", "loss_0", "full_acc_1", "cond_acc_1", "grad_norm"} <= set(steps[0]["values"])
    (second,) = (e for e in found if e.get("split") == "val" and e["epoch"] == 1)
    kept = [e for e in found if e.get("split") == "val" and e["epoch"] + 1 == metrics["epoch"]]
    assert kept[0]["values"]["loss_epoch"] == metrics["val_loss"]
    assert second["values"]["full_acc_0_epoch"] <= 1
    saved = [e for e in found if e["event"] == "snapshot"]
    assert [(e["epoch"], e["cursor"]) for e in saved] == [(1, 0), (2, 0)]
    assert saved[1]["parent"] == saved[0]["step"]


def test_going_on_at_the_end_of_the_last_epoch_makes_the_checkpoint_again(
    given: Given_, first: tuple[Context, dict[str, Any]]
) -> None:  # TRN-10
    context, metrics = first
    for at, name in ((0, "again0"), (1, "again1")):
        saved = [e for e in events_of(context) if e["event"] == "snapshot"][at]
        again = given.context(name, epochs=2, resume=context.snapshots / saved["name"])
        found = run(again)
        assert found["steps"] == metrics["steps"]
        assert found["steps_run"] == metrics["steps"] - saved["step"]
        weights = [c.out("checkpoint") / "model.safetensors" for c in (context, again)]
        assert digest_file(weights[0]) == digest_file(weights[1])


def test_fine_tuning_starts_from_the_weights_and_keeps_the_map(
    given: Given_, first: tuple[Context, dict[str, Any]]
) -> None:
    tuned = given.context("tuned", vocab=None, init_from="abcd", lr=1e-9, scheduler="none")
    run(tuned)
    before, after = (
        load_file(c.out("checkpoint") / "model.safetensors") for c in (first[0], tuned)
    )
    assert torch.equal(before["t2d"], after["t2d"])
    for name, tensor in before.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(after[name], tensor, atol=1e-6, rtol=1e-2)
    other = given.context("mismatch", init_from="abcd")
    save_map(given.folder / "vocab", list(range(48)), VOCAB)
    try:
        with pytest.raises(StageFailed, match="is not that of the checkpoint in init_from"):
            run(other)
    finally:
        save_map(given.folder / "vocab", vocab_map().t2d.nonzero().flatten().tolist(), VOCAB)
    wide = given.context("wide", init_from="abcd", draft={"intermediate_size": 32})
    with pytest.raises(StageFailed, match="give `draft` the checkpoint's architecture"):
        run(wide)


def test_rows_without_supervision_are_counted_not_trained_on(given: Given_) -> None:  # TRN-14
    before = given.rows.loss_mask.copy()
    end = LENGTHS[0]
    try:
        given.rows.loss_mask[:end] = 0
        given.write_rows()
        context = given.context("fewer", batch_tokens=32)
        metrics = run(context)
        assert metrics["rows_without_supervision"] == 1
        assert metrics["rows_cut"] == 1  # the one of 40 tokens
        assert "1 rows have no supervised token" in str(events_of(context))
        given.rows.loss_mask[:] = 0
        given.write_rows()
        with pytest.raises(StageFailed, match="no training row with a supervised token"):
            run(given.context("none"))
    finally:
        given.rows.loss_mask[:] = before
        given.write_rows()


def test_a_row_that_is_not_as_it_was_extracted_is_refused(given: Given_) -> None:
    listing = given.folder / "states-artifact" / "rows.txt"
    text = listing.read_text("utf-8")
    try:
        listing.write_text(text.replace(text.split()[1], "d" * 64, 1))
        with pytest.raises(StageFailed, match="row 000000000000 is not in the state store"):
            run(given.context("altered"))
    finally:
        listing.write_text(text)


def test_aiming_at_another_norm_stops_before_the_first_step(
    given: Given_, monkeypatch: pytest.MonkeyPatch
) -> None:  # TRN-16
    from kimi_eagle.draft import probe as module

    real = module.safe_open

    class Turned:
        """The head artifact as if its norm had another sign in every second place."""

        def __init__(self, *arguments: Any, **options: Any):
            self._file = real(*arguments, **options)

        def __enter__(self) -> Turned:
            self._file.__enter__()
            return self

        def __exit__(self, *problem: Any) -> None:
            self._file.__exit__(*problem)

        def get_tensor(self, name: str) -> Any:
            tensor = self._file.get_tensor(name)
            tensor[::2] *= -1
            return tensor

        def get_slice(self, name: str) -> Any:
            return self._file.get_slice(name)

    monkeypatch.setattr(module, "safe_open", Turned)
    context = given.context("norm")
    with pytest.raises(StageFailed, match="would aim at the verifier's most likely token in only"):
        run(context)
    assert not [e for e in events_of(context) if e["event"] == "metric"]
