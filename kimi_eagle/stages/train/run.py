"""Train the draft with speculators' model, losses and trainer."""

from __future__ import annotations

import json
import logging
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kimi_eagle.draft.architecture import decoder_config
from kimi_eagle.draft.checkpoint import BadCheckpoint, write_checkpoint
from kimi_eagle.draft.vocab import BadVocab, VocabMap, load_map
from kimi_eagle.job import StageFailed
from kimi_eagle.rows.table import TRAIN, VALIDATE, load_rows
from kimi_eagle.stages.context import Context
from kimi_eagle.states.index import placed_rows
from kimi_eagle.states.layout import CONTRACT
from kimi_eagle.states.reader import ShardReader
from kimi_eagle.verifiers.facts import VerifierFacts, read_facts

os.environ.setdefault("TQDM_DISABLE", "1")  # the log keeps lines; progress goes by events


def run(context: Context) -> dict[str, Any]:
    from speculators.models.eagle3 import Eagle3DraftModel
    from speculators.train.trainer import TrainerConfig

    from kimi_eagle.draft.trainer import DraftTrainer

    logging.basicConfig(level=logging.INFO)
    params = context.params
    head = context.path("head")
    facts = read_facts(json.loads((head / "config.json").read_text("utf-8")))
    try:
        vocab = load_map(context.path("vocab"))
    except BadVocab as error:
        raise StageFailed(f"the vocab artifact does not hold together: {error}") from None
    contract = json.loads((context.path("states") / CONTRACT).read_text("utf-8"))
    layers = contract["layers"][:-1]
    _seed(params.seed)
    model = _model(Eagle3DraftModel, params, facts, vocab, head, layers)
    train, validate, refused = _loaders(context, facts, len(layers))
    kwargs = {
        "ttt_steps": params.ttt_steps,
        "ttt_step_loss_decay": params.ttt_step_loss_decay,
        "loss_fn": params.loss,
        "loss_implementation": "eager",
    }
    train_kwargs, val_kwargs = Eagle3DraftModel.get_trainer_kwargs(**kwargs)
    total = params.epochs * len(train)
    config = TrainerConfig(
        lr=params.lr,
        num_epochs=params.epochs,
        save_path=str(context.scratch("trainer")),
        train_call_kwargs=train_kwargs,
        val_call_kwargs=val_kwargs,
        optimizer=params.optimizer,
        weight_decay=params.weight_decay,
        muon_lr=params.muon_lr,
        scheduler_type=params.scheduler,
        scheduler_warmup_ratio=params.warmup_ratio,
        log_freq=1,
    )
    trainer = DraftTrainer(
        model,
        config,
        train,
        validate,
        keep=params.keep,
        report=lambda record: _report(context, record, total),
    )
    started = time.monotonic()
    trainer.run_training()
    seconds = time.monotonic() - started
    if trainer.kept is None:
        raise StageFailed("no epoch was kept: the validation loss was never a number")
    try:
        write_checkpoint(context.out("checkpoint"), model.config, trainer.kept, None)
    except BadCheckpoint as error:
        raise StageFailed(f"the checkpoint must not be served: {error}") from None
    metrics = _metrics(trainer, params, total, seconds, train)
    return {**metrics, "rows_without_states": refused} if refused else metrics


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _model(
    kind: Any, params: Any, facts: VerifierFacts, vocab: VocabMap, head: Path, layers: list[int]
) -> Any:
    from transformers import LlamaConfig

    if vocab.verifier_size != facts.vocab_size:
        raise StageFailed(
            f"the vocab artifact is for a verifier vocabulary of {vocab.verifier_size}, the head "
            f"has {facts.vocab_size}: they are of different verifiers"
        )
    decoder = decoder_config(params.draft, facts)
    decoder.pop("model_type")
    attention = params.attention
    if attention == "auto":
        attention = "flex" if torch.cuda.is_available() else "sdpa"
    return kind.from_training_args(
        LlamaConfig(**decoder),
        t2d=vocab.t2d,
        d2t=vocab.d2t,
        draft_vocab_size=vocab.draft_size,
        norm_before_residual=params.draft.norm_before_residual,
        target_layer_ids=list(layers),
        ttt_steps=params.ttt_steps,
        verifier_name_or_path=str(head),
        draft_attn_impl="simple_flex_attention" if attention == "flex" else attention,
    )


def _loaders(context: Context, facts: VerifierFacts, aux: int) -> tuple[Any, Any, int]:
    """Training and validation batches, and how many rows have no states."""
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.data import CollateFn
    from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2
    from torch.utils.data import DataLoader

    from kimi_eagle.draft.data import Sample, StatesDataset

    params = context.params
    states = context.path("states")
    rows = load_rows(context.path("rows"))
    placed = placed_rows(states, Path(context.job.registry), len(rows))
    refused = sum(place is None for _, place in placed)
    if refused:
        context.events.note(f"{refused} of {len(rows)} rows have no states and are left out")

    def loader(split: int) -> Any:
        samples = [
            Sample(number, key, place)
            for number in rows.indices(split)
            for key, place in [placed[number]]
            if place is not None
        ]
        if not samples:
            return None
        dataset = StatesDataset(
            rows,
            samples,
            ShardReader(context.root),
            params.batch_tokens,
            noise=params.noise if split == TRAIN else None,
            seed=params.seed,
        )
        sampler = MultipackDistributedBatchSamplerV2(
            batch_max_length=params.batch_tokens,
            lengths=dataset.approx_lengths,
            num_replicas=1,
            rank=0,
            seed=params.seed,
        )
        dataset.epoch_of = sampler
        return DataLoader(
            dataset,
            batch_sampler=sampler,
            num_workers=params.loader_workers,
            collate_fn=CollateFn(
                params.batch_tokens, facts.hidden_size, aux, preprocess=shift_batch
            ),
        )

    train = loader(TRAIN)
    if train is None:
        raise StageFailed("there is no training row")
    return train, loader(VALIDATE), refused


def _report(context: Context, record: dict[str, Any], total: int) -> None:
    """One optimizer step, or one validation, as speculators logs it."""
    events = context.events
    if "train" in record:
        step, metrics = record["global_step"] + 1, record["train"]
        profile = record.get("profile") or {}
        events.emit(
            "metric",
            split="train",
            step=step,
            epoch=record["epoch"],
            lr=record["lr"],
            values=metrics,
            tokens_per_second=profile.get("tokens_per_s"),
        )
        events.progress(step, total, "steps", epoch=record["epoch"] + 1, loss=metrics.get("loss"))
    elif "val" in record:
        events.emit("metric", split="val", epoch=record["epoch"], values=record["val"])


def _metrics(trainer: Any, params: Any, total: int, seconds: float, train: Any) -> dict[str, Any]:
    kept = {name.removesuffix("_epoch"): value for name, value in trainer.kept_metrics.items()}
    accuracies = {f"full_acc_{k}": kept.get(f"full_acc_{k}") for k in range(params.ttt_steps)}
    measured = [value for value in accuracies.values() if value is not None]
    tokens = int(sum(train.dataset.approx_lengths)) * params.epochs
    return {
        "steps": total,
        "epochs": params.epochs,
        "epoch": trainer.kept_epoch + 1,
        "val_loss": kept.get("loss"),
        **accuracies,
        # The share of positions where steps 0..k are all right, summed, and the bonus token.
        "simulated_acceptance_length": 1 + sum(measured) if measured else None,
        "tokens": tokens,
        "tokens_per_second": round(tokens / seconds, 1),
        "parameters_trained": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
    }
