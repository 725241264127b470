"""One side of `train.py`: `make SETUP`, `ours SETUP` or `theirs SETUP`; prints its figures."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from train import Setup
from train_rows import DEVICE, Material, make

from kimi_eagle.draft.compute import compute_of
from kimi_eagle.draft.model import build, freeze_as
from kimi_eagle.draft.packing import step as step_of
from kimi_eagle.draft.trainer import Stopped, Trainer
from kimi_eagle.stages.train.spec import TrainParams


def flops_per_token(model: Any, params: TrainParams) -> float:
    """Of the model as it is defined: 2 a weight forward, 4 backward; of frozen heads only what
    reaches their input. Attention itself is left out."""
    trunk = sum(p.numel() for n, p in model.layers.named_parameters() if p.ndim == 2)
    head, steps = model.lm_head.weight.numel(), params.ttt_steps
    # fc needs no gradient of its input.
    return 6 * trunk * steps + 4 * model.fc.weight.numel() + 4 * head * steps + 2 * head


def wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def moment() -> float:
    """Seconds: of the wall on a GPU, of work on a CPU, where others work beside us."""
    return time.perf_counter() if DEVICE.type == "cuda" else time.process_time()


def peak() -> int:
    if DEVICE.type == "cuda":
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def new_model(material: Material, params: TrainParams, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return build(params, material.facts, material.vocab, material.head, material.layers)


class TimedTrainer(Trainer):
    """Our trainer, stopped after the steps that are timed."""

    setup: Setup
    marks: list[tuple[float, int]]

    def _step(self, *arguments: Any) -> None:
        super()._step(*arguments)
        if self.steps_run in (self.setup.warm_up, self.setup.warm_up + self.setup.steps):
            wait()
            self.marks.append((moment(), self.tokens_run))


def ours(setup: Setup) -> dict[str, Any]:
    material = Material(setup)
    params = material.params(setup, setup.optimizers[0])
    model = new_model(material, params)
    freeze_as(model, torch.bfloat16)
    model.to(DEVICE)
    compiled = setup.compiled and DEVICE.type == "cuda"
    attention = setup.attention
    if attention == "auto":
        attention = "flex" if compiled else "sdpa" if DEVICE.type == "cuda" else "eager"
    compute = compute_of(model, params, attention, compiled=compiled)
    data = material.data(setup, params)
    numbers = first_rows(data.items, setup.batch_tokens)
    batch = data.loader.load(numbers, 0).to(DEVICE)
    step = step_of(data.items, 0, [numbers])
    loss, _ = compute.heads(compute.unroll(batch), batch, step.supervised)
    loss.backward()
    model.zero_grad(set_to_none=True)
    first = float(loss.detach())
    del loss, batch
    found = {}
    for optimizer in setup.optimizers:
        params = material.params(setup, optimizer)
        seen: list[dict[str, float]] = []
        trainer = TimedTrainer(
            model,
            params,
            data,
            None,
            compute=compute,
            device=DEVICE,
            report=lambda figures, _rates, seen=seen: seen.append(dict(figures.milliseconds)),
        )
        trainer.setup, trainer.marks = setup, []
        trainer._stopping = lambda trainer=trainer: trainer.steps_run >= setup.total
        torch.cuda.reset_peak_memory_stats() if DEVICE.type == "cuda" else None
        with contextlib.suppress(Stopped):
            trainer.run()
        trainer._figures.read()
        (t0, before), (t1, after) = trainer.marks
        timed = seen[setup.warm_up : setup.warm_up + setup.steps]
        found[optimizer] = {
            "tokens_per_second": (after - before) / (t1 - t0),
            "step_ms": (t1 - t0) * 1000 / setup.steps,
            "phases": {name: sum(s[name] for s in timed) / len(timed) for name in timed[0]},
            "peak_bytes": peak(),
            "flops_per_token": flops_per_token(model, params),
            "first_loss": first,
            "compiled": compiled,
        }
        del trainer
    return found


class Enough(Exception):
    """Every step that was to be timed has been."""


def first_rows(items: Any, size: int) -> tuple[int, ...]:
    chosen: list[int] = []
    room = size
    for number, item in enumerate(items):
        if item.positions + 1 > room:
            break
        chosen.append(number)
        room -= item.positions + 1
    return tuple(chosen)


class Theirs:
    """speculators' model, data and trainer, for the rows of ours."""

    def __init__(self, setup: Setup, material: Material):
        from speculators.models.eagle3 import Eagle3DraftModel
        from speculators.models.eagle3.data import shift_batch
        from speculators.train import trainer as upstream
        from speculators.train.data import ArrowDataset
        from speculators.train.dataloader import _setup_dataloader

        self.setup, self.material, self.upstream = setup, material, upstream
        self.params = material.params(setup, setup.optimizers[0])
        if DEVICE.type != "cuda":
            upstream._StepTimer = cpu_timer(upstream)
        self.dataset = ArrowDataset(
            max_len=setup.batch_tokens,
            datapath=str(material.folder / "theirs"),
            vllm_endpoint="http://127.0.0.1:1/v1",
            on_missing="raise",
            train_ratio=1.0,
        )
        self.loader = _setup_dataloader(
            self.dataset,
            setup.batch_tokens,
            material.facts.hidden_size,
            num_workers=setup.workers,
            num_target_layers=len(material.layers),
            preprocess=shift_batch,
        )
        self.kwargs, _ = Eagle3DraftModel.get_trainer_kwargs(
            ttt_steps=self.params.ttt_steps,
            ttt_step_loss_decay=1.0,
            loss_fn="kl_div",
            loss_implementation=setup.their_loss if DEVICE.type == "cuda" else "eager",
        )

    def new_model(self, seed: int = 0) -> Any:
        from speculators.models.eagle3 import Eagle3DraftModel
        from transformers import LlamaConfig

        from kimi_eagle.draft.architecture import decoder_config

        material = self.material
        torch.manual_seed(seed)
        decoder = decoder_config(self.params.draft, material.facts)
        decoder.pop("model_type")
        model = Eagle3DraftModel.from_training_args(
            LlamaConfig(**decoder),
            t2d=material.vocab.t2d,
            d2t=material.vocab.d2t,
            draft_vocab_size=material.vocab.draft_size,
            norm_before_residual=False,
            target_layer_ids=material.layers,
            ttt_steps=self.params.ttt_steps,
            verifier_name_or_path=str(material.head),
            draft_attn_impl="simple_flex_attention" if DEVICE.type == "cuda" else "sdpa",
        )
        return model.to(DEVICE)

    def trainer(self, model: Any, optimizer: str, stop: Any) -> Any:
        """Their trainer, which calls `stop(trainer, steps done)` after each step."""

        class Told(self.upstream.Trainer):
            def setup_trainer(self) -> None:
                if DEVICE.type != "cuda":
                    self.local_rank, self.device_type = "cpu", "cpu"
                super().setup_trainer()

            def maybe_save_checkpoint(self, *_: Any, **__: Any) -> None:
                """Nothing is saved while it is timed."""

            def _schedulers_step(self) -> None:
                super()._schedulers_step()
                stop(self, self.global_step + 1)

        config = self.upstream.TrainerConfig(
            lr=self.params.lr,
            num_epochs=self.params.epochs,
            save_path=str(self.material.folder / "unused"),
            train_call_kwargs=self.kwargs,
            val_call_kwargs=self.kwargs,
            optimizer=optimizer,
            scheduler_type="none",
            log_freq=10**9,
        )
        return Told(model, config, self.loader)


def theirs(setup: Setup) -> dict[str, Any]:
    material = Material(setup)
    side = Theirs(setup, material)
    upstream, on_gpu = side.upstream, DEVICE.type == "cuda"
    model = side.new_model()
    batch = collated(material, setup, side.loader.collate_fn, side.dataset)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        _, loss, _ = model(**batch, **side.kwargs)
    first = float(loss.detach())
    del loss, batch
    found = {}
    for optimizer in setup.optimizers:
        marks: list[float] = []

        def timed(trainer: Any, done: int, marks: list[float] = marks) -> None:
            if done in (setup.warm_up, setup.warm_up + setup.steps):
                wait()
                marks.append(moment())
            if done == setup.warm_up + setup.steps:
                trainer.config = trainer.config._replace(log_freq=1)
            if done > setup.total:
                raise Enough

        trainer = side.trainer(model, optimizer, timed)
        profiles: list[dict[str, float]] = []
        keep = MetricHandler(profiles)
        upstream.metric_logger.addHandler(keep)
        upstream.metric_logger.setLevel("INFO")
        torch.cuda.reset_peak_memory_stats() if on_gpu else None
        with contextlib.suppress(Enough):
            trainer.run_training()
        upstream.metric_logger.removeHandler(keep)
        t0, t1 = marks
        profiled = profiles[1:]
        names = {
            "fetch": "fetch_ms",
            "forward": "fwd_ms",
            "backward": "bwd_ms",
            "optimizer": "opt_ms",
        }
        found[optimizer] = {
            "tokens_per_second": timed_tokens(side.loader, setup) / (t1 - t0),
            "step_ms": (t1 - t0) * 1000 / setup.steps,
            "phases": {
                name: sum(p[key] for p in profiled) / len(profiled) for name, key in names.items()
            },
            "peak_bytes": peak(),
            "flops_per_token": flops_per_token(model, side.params),
            "first_loss": first,
        }
        del trainer
    return found


def losses(setup: Setup) -> dict[str, list[float]]:
    """Of drafts that either side trained, from the same weights: the loss over the same rows, which
    neither was trained on, as our trainer computes it. One a seed."""
    material = Material(setup)
    params = material.params(setup, setup.optimizers[0])
    data, held_out = material.data(setup, params), material.held_out(setup, params)
    compute_options = ("eager" if DEVICE.type == "cpu" else "sdpa",)
    side = Theirs(setup, material)
    found: dict[str, list[float]] = {"ours": [], "theirs": []}

    def validated(model: Any, seed: int, steps: int) -> float:
        freeze_as(model, torch.bfloat16)
        compute = compute_of(model, params, *compute_options, compiled=False)
        mine = params.model_copy(update={"seed": seed})
        trainer = Trainer(
            model,
            mine,
            data,
            held_out,
            compute=compute,
            device=DEVICE,
            report=lambda *_: None,
            stopping=lambda: trainer.steps_run >= steps,
        )
        if steps:
            with contextlib.suppress(Stopped):
                trainer.run()
        values = trainer._validation()
        assert values is not None, "rows were held out"
        return values["loss"]

    def stop(_: Any, done: int) -> None:
        if done > setup.steps:
            raise Enough

    for seed in range(setup.seeds):
        model = new_model(material, params, seed).to(DEVICE)
        found["ours"].append(validated(model, seed, setup.steps))
        model = side.new_model(seed)
        torch.manual_seed(seed)
        with contextlib.suppress(Enough):
            side.trainer(model, setup.optimizers[0], stop).run_training()
        found["theirs"].append(validated(model, seed, 0))
    return found


def timed_tokens(loader: Any, setup: Setup) -> int:
    """Positions of the batches that were timed, which their sampler gives again for the asking."""
    sampler, seen, tokens = loader.batch_sampler, 0, 0
    epoch = 0
    while seen < setup.warm_up + setup.steps:
        for batch in sampler._generate_batches(epoch):
            if setup.warm_up <= seen < setup.warm_up + setup.steps:
                tokens += int(sum(sampler.lengths[batch]) - len(batch))
            seen += 1
        epoch += 1
    return tokens


def collated(material: Material, setup: Setup, collate: Any, dataset: Any) -> dict[str, Any]:
    params = material.params(setup, "adamw")
    numbers = first_rows(material.data(setup, params).items, setup.batch_tokens)
    batch = collate([dataset[number] for number in numbers])
    return {n: v.to(DEVICE) for n, v in batch.items() if isinstance(v, torch.Tensor)}


def cpu_timer(upstream: Any) -> Any:
    class Timer(upstream._StepTimer):
        """Their step timer, without an accelerator to wait for."""

        def mark(self, name: str) -> None:
            if self.enabled:
                self._marks[name] = time.perf_counter()

        def now(self) -> float | None:
            return time.perf_counter() if self.enabled else None

    return Timer


class MetricHandler:
    """A logging handler that keeps their step profiles."""

    level = 0

    def __init__(self, profiles: list[dict[str, float]]):
        self._profiles = profiles

    def handle(self, record: Any) -> bool:
        if isinstance(record.msg, dict) and record.msg.get("profile"):
            self._profiles.append(record.msg["profile"])
        return True


def main() -> int:
    part, path = sys.argv[1:]
    document = json.loads(Path(path).read_text("utf-8"))
    setup = Setup(**{**document, "optimizers": tuple(document["optimizers"])})
    os.environ.setdefault("TQDM_DISABLE", "1")
    found = {"make": make, "ours": ours, "theirs": theirs, "losses": losses}[part](setup)
    print()
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
