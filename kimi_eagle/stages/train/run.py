"""Train the draft: speculators' model and losses, with a loop of our own."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kimi_eagle import garbage
from kimi_eagle.artifacts.files import write_json
from kimi_eagle.draft import snapshot as snapshots
from kimi_eagle.draft.batches import Loader, PackedBatch, Source, item_of
from kimi_eagle.draft.checkpoint import BadCheckpoint, write_checkpoint
from kimi_eagle.draft.compute import Compute, dtype_of, seed_everything, that_works
from kimi_eagle.draft.figures import Diverged, Impossible, StepFigures
from kimi_eagle.draft.model import BadStart, build, freeze_as, init_vocab, prove_frozen, start_from
from kimi_eagle.draft.peers import FIGURES, Group, RanksFailed, launch, leave_failure
from kimi_eagle.draft.probe import Agreement, probe
from kimi_eagle.draft.snapshot import BadSnapshot, Progress
from kimi_eagle.draft.trainer import Alone, Data, Peers, Stopped, Trainer
from kimi_eagle.draft.vocab import BadVocab, VocabMap, load_map
from kimi_eagle.job import EVENTS, JOB, EventWriter, Job, StageFailed
from kimi_eagle.parent import end_with
from kimi_eagle.rows.table import TRAIN, VALIDATE, Rows, load_rows
from kimi_eagle.stages.context import Context
from kimi_eagle.stages.train.spec import TrainParams
from kimi_eagle.states.index import placed_rows
from kimi_eagle.states.layout import CONTRACT
from kimi_eagle.states.reader import ShardReader
from kimi_eagle.verifiers.facts import read_facts


def run(context: Context) -> dict[str, Any]:
    params = context.params
    if params.processes == 1:
        return _told(context, Alone())
    job = Path(context.job.folder) / JOB
    module = "kimi_eagle.stages.train.run"
    try:
        return dict(json.loads(launch(module, job, params.devices, params.resources.nodes)))
    except RanksFailed as error:
        raise StageFailed(str(error)) from None


def main(arguments: list[str]) -> int:
    """One of several processes: `torchrun -m kimi_eagle.stages.train.run JOB.json`."""
    garbage.look_seldom()
    end_with(os.getppid())  # torchrun starts it in a session of its own, where nothing else ends it
    job = Path(arguments[0])
    read = Job.read(job)
    params = TrainParams.model_validate(read.params, strict=False)
    context = Context(read, params, EventWriter(job.parent / EVENTS))
    group = Group()
    try:
        figures = _told(context, group)
        if group.rank == 0:
            write_json(job.parent / FIGURES, figures)
    except StageFailed as error:
        leave_failure(job, str(error))
        return 1
    finally:
        group.close()
    return 0


def _told(context: Context, peers: Peers) -> dict[str, Any]:
    """Raises: StageFailed, for everything that can be wrong with what training is given."""
    try:
        return _run(context, peers)
    except (BadStart, BadVocab, BadSnapshot, Diverged, Impossible) as error:
        raise StageFailed(str(error)) from None
    except BadCheckpoint as error:
        raise StageFailed(f"the checkpoint must not be served: {error}") from None
    except Stopped:
        raise StageFailed("stopped; what was done is saved, and submitting again goes on") from None


def _run(context: Context, peers: Peers) -> dict[str, Any]:
    params = context.params
    head = context.path("head")
    facts = read_facts(json.loads((head / "config.json").read_text("utf-8")))
    vocab = load_map(context.path("vocab")) if params.vocab is not None else None
    if params.init_from is not None:
        vocab = init_vocab(context.path("init_from"), vocab)
    assert vocab is not None, "the manifest names one of the two"
    contract = json.loads((context.path("states") / CONTRACT).read_text("utf-8"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    seed_everything(params)
    model = build(params, facts, vocab, head, contract["layers"][:-1])
    frozen = prove_frozen(model, head, vocab)
    if params.init_from is not None:
        start_from(model, context.path("init_from"))
    freeze_as(model, dtype_of(params))
    model.to(device)
    reporter = _Reporter(context, silent=peers.rank != 0)
    rows = _rows(context, reporter.note, pin=device.type == "cuda")
    batch = rows.train.loader.load(_probed(rows.train), 0).to(device)
    compute = that_works(model, params, device, batch, reporter.note)
    agreement = _agreement(params, batch, compute, head, vocab, facts.rms_norm_eps)
    trainer = Trainer(
        model,
        params,
        rows.train,
        rows.validate,
        compute=compute,
        device=device,
        peers=peers,
        report=reporter.step,
        report_validation=reporter.validation,
        snapshots=context.snapshots if context.job.saves else None,
        announce=lambda name, progress: _announce(context, name, progress),
        # Several would have to agree on the step: they are ended, and go on from what was saved.
        stopping=_asked_to_stop() if peers.size == 1 else lambda: False,
    )
    reporter.total = trainer.total
    resumed = context.job.inputs.get("resume")
    if resumed:
        trainer.resume(snapshots.read(Path(resumed[0].path)))
        done = trainer.progress
        reporter.note(
            f"goes on from step {done.step} of {trainer.total} (epoch {done.epoch}, "
            f"checkpoint {resumed[0].digest[:12]})"
        )
    before = trainer.progress.step
    started = time.monotonic()
    trainer.run()
    seconds = time.monotonic() - started
    if peers.rank == 0:
        write_checkpoint(context.out("checkpoint"), model.config, trainer.checkpoint(), None)
    kept = trainer.progress.kept or {}
    accuracies = {f"full_acc_{k}": kept.get(f"full_acc_{k}") for k in range(params.ttt_steps)}
    measured = [value for value in accuracies.values() if value is not None]
    return {
        "steps": trainer.progress.step,
        "steps_run": trainer.progress.step - before,
        "resumed_from_step": before or None,
        "epochs": params.epochs,
        "epoch": trainer.progress.kept_epoch,
        "val_loss": kept.get("loss"),
        **accuracies,
        # The share of positions where steps 0..k are all right, summed, and the bonus token.
        "simulated_acceptance_length": 1 + sum(measured) if measured else None,
        **rows.figures,
        "tokens": rows.positions * params.epochs,
        "tokens_per_second": round(trainer.tokens_run * peers.size / seconds, 1)
        if trainer.tokens_run
        else None,
        # Of this process, as torch has it: what the driver and other libraries take comes on top.
        "peak_gpu_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
        "devices": peers.size,
        "attention": compute.attention,
        "compiled": compute.compiled,
        "parameters_trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "embed_tokens_digest": frozen["model.embed_tokens.weight"],
        "lm_head_digest": frozen["lm_head.weight"],
        "norm_digest": frozen["model.norm.weight"],
        "aims_agreement": agreement.aims,
        "next_token_agreement": agreement.next_token,
        "probed_positions": agreement.positions,
    }


@dataclass(frozen=True)
class _RowsToTrainOn:
    train: Data
    validate: Data | None
    positions: int
    figures: dict[str, int]


def _rows(context: Context, note: Callable[[str], None], *, pin: bool) -> _RowsToTrainOn:
    """The rows of both splits, found in the state store.

    Raises: StageFailed: a row is not there as it was extracted, or none is left to train on.
    """
    params = context.params
    rows = load_rows(context.path("rows"))
    placed = placed_rows(context.path("states"), Path(context.job.registry), len(rows))
    figures = {"rows_without_supervision": 0, "rows_without_states": 0, "rows_cut": 0}
    found: dict[int, Data | None] = {}
    for split in (TRAIN, VALIDATE):
        sources, items = [], []
        for number in rows.indices(split):
            key, place = placed[number]
            if place is None:
                figures["rows_without_states"] += 1
                continue
            source = Source(number, key, place)
            item = item_of(source, rows.mask(number), params.ttt_steps, params.batch_tokens)
            if not item.supervised[0]:
                figures["rows_without_supervision"] += 1
                continue
            figures["rows_cut"] += source.place.tokens - 1 > item.positions
            sources.append(source)
            items.append(item)
        found[split] = _data(context, rows, sources, items, split, pin) if items else None
    train = found[TRAIN]
    if train is None:
        raise StageFailed(
            "there is no training row with a supervised token "
            f"({figures['rows_without_supervision']} have none within {params.batch_tokens} "
            "tokens): nothing can be learnt"
        )
    if figures["rows_without_supervision"]:
        note(
            f"{figures['rows_without_supervision']} rows have no supervised token and are left out"
        )
    if figures["rows_without_states"]:
        note(
            f"{figures['rows_without_states']} of {len(rows)} rows have no states and are left out"
        )
    positions = sum(item.positions for item in train.items)
    return _RowsToTrainOn(train, found[VALIDATE], positions, figures)


def _data(
    context: Context, rows: Rows, sources: list[Source], items: list[Any], split: int, pin: bool
) -> Data:
    params = context.params
    loader = Loader(
        rows,
        sources,
        ShardReader(context.root),
        size=params.batch_tokens,
        ttt_steps=params.ttt_steps,
        seed=params.seed,
        noise=params.noise if split == TRAIN else None,
        pin=pin,
    )
    return Data(items, loader)


def _agreement(
    params: Any, batch: PackedBatch, compute: Compute, head: Path, vocab: VocabMap, eps: float
) -> Agreement:
    """Raises: StageFailed: training would aim at other tokens than the verifier."""
    found: Agreement = probe(batch, compute.heads, head, vocab, eps)
    if found.aims < params.min_agreement:
        raise StageFailed(
            f"of {found.positions} probed positions, training would aim at the verifier's most "
            f"likely token in only {found.aims:.1%} (at least {params.min_agreement:.0%} by "
            "min_agreement): its final norm or head is not what the states were made for"
        )
    return found


def _probed(data: Data) -> tuple[int, ...]:
    """The first rows that fit into a batch."""
    room = data.loader.size
    chosen: list[int] = []
    for number, item in enumerate(data.items):
        if item.positions > room:
            break
        chosen.append(number)
        room -= item.positions
    return tuple(chosen)


def _asked_to_stop() -> Any:
    """Whether this process was asked to end (SIGTERM): it then saves first."""
    asked: list[int] = []

    def note(number: int, _frame: Any) -> None:
        asked.append(number)

    signal.signal(signal.SIGTERM, note)
    return lambda: bool(asked)


def _announce(context: Context, name: str, progress: Progress) -> None:
    context.events.emit(
        "snapshot",
        name=name,
        step=progress.step,
        epoch=progress.epoch,
        cursor=progress.cursor,
        parent=progress.parent,
        val_loss=(progress.validation or {}).get("loss") if progress.cursor == 0 else None,
    )


class _Reporter:
    """Passes figures on as events."""

    def __init__(self, context: Context, *, silent: bool):
        """Args: `silent`: another process says the same."""
        self._events = None if silent else context.events
        self.total = 0

    def note(self, text: str) -> None:
        if self._events is not None:
            self._events.note(text)

    def step(self, figures: StepFigures, rates: dict[str, float]) -> None:
        if self._events is None:
            return
        milliseconds = sum(figures.milliseconds.values())
        lr: Any = rates if len(rates) > 1 else next(iter(rates.values()))
        self._events.emit(
            "metric",
            split="train",
            step=figures.step,
            epoch=figures.epoch,
            lr=lr,
            values=dict(figures.values),
            milliseconds=dict(figures.milliseconds),
            tokens_per_second=figures.tokens * 1000 / milliseconds if milliseconds else None,
        )
        self._events.progress(
            figures.step,
            self.total,
            "steps",
            epoch=figures.epoch + 1,
            loss=figures.values.get("loss"),
        )

    def validation(self, epoch: int, values: dict[str, float]) -> None:
        if self._events is not None:
            named = {f"{name}_epoch": value for name, value in values.items()}
            self._events.emit("metric", split="val", epoch=epoch, values=named)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
