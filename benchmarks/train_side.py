"""One side of `train.py`: `make SETUP`, `ours SETUP` or `theirs SETUP`; prints its figures.

`make` writes the same rows twice: as shards of our state store, and as speculators reads them (a
dataset and a file of hidden states a row).
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from train import Setup

from kimi_eagle.draft.batches import Loader, Source, item_of
from kimi_eagle.draft.compute import compute_of
from kimi_eagle.draft.model import build, freeze_as
from kimi_eagle.draft.packing import step as step_of
from kimi_eagle.draft.trainer import Data, Stopped, Trainer
from kimi_eagle.draft.vocab import VocabMap, load_map
from kimi_eagle.rows.table import TRAIN, load_rows, save_rows
from kimi_eagle.stages.train.spec import TrainParams
from kimi_eagle.states.index import Place, StateIndex
from kimi_eagle.states.layout import CONTRACT, ROWS, read_rows, shard_path
from kimi_eagle.states.shards import ShardReader
from kimi_eagle.verifiers.facts import read_facts

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HIDDEN, VOCAB, ROW_TOKENS, DISTINCT = 7168, 163840, 1024, 32
# As the head stage writes it for Kimi-K2.5.
KIMI = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": VOCAB,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 64.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "bos_token_id": 163584,
    "eos_token_id": 163585,
    "pad_token_id": 163839,
}
DEMO = """\
version: 1
name: benchmark
verifier: {{path: {demo}/verifier}}
stages:
  head: {{kind: head}}
  rows:
    kind: prepare
    sources:
      - {{path: {demo}/chats.jsonl, format: messages}}
    max_length: 256
    val_ratio: 0.1
  states: {{kind: extract, rows: rows, layers: [2, 4, 5], engine: {{kind: transformers}}}}
  vocab: {{kind: vocab, rows: rows, size: {vocab}}}
"""


class Material:
    """Rows, states, head and map as `make` left them."""

    def __init__(self, setup: Setup):
        self.folder = Path(setup.folder)
        paths = json.loads((self.folder / "paths.json").read_text("utf-8"))
        self.root, self.head = Path(paths["root"]), Path(paths["head"])
        self.rows = load_rows(Path(paths["rows"]))
        self.layers = paths["layers"]
        self.facts = read_facts(json.loads((self.head / "config.json").read_text("utf-8")))
        self.numbers = [int(number) for number in paths["numbers"]]
        self.places = [Place(*item) for item in paths["places"]]
        self.vocab = (
            every_fifth(setup.draft_vocab) if setup.real else load_map(Path(paths["vocab"]))
        )

    def params(self, setup: Setup, optimizer: str) -> TrainParams:
        document = {
            "kind": "train",
            "head": "head",
            "states": "states",
            "vocab": "vocab",
            "epochs": 1 if setup.real else 50,
            "lr": 1e-4,
            "optimizer": optimizer,
            "batch_tokens": setup.batch_tokens,
            "attention": setup.attention,
            "loader_workers": 4 if setup.real else 0,
            "log_steps": 50,
            "scheduler": "none",
        }
        return TrainParams.model_validate(document, strict=False)

    def data(self, setup: Setup, params: TrainParams) -> Data:
        sources = [
            Source(number, f"{at:064x}", place)
            for at, (number, place) in enumerate(zip(self.numbers, self.places, strict=True))
        ]
        items = [
            item_of(s, self.rows.mask(s.row), params.ttt_steps, params.batch_tokens)
            for s in sources
        ]
        loader = Loader(
            self.rows,
            sources,
            ShardReader(self.root),
            size=params.batch_tokens,
            ttt_steps=params.ttt_steps,
            seed=0,
            pin=DEVICE.type == "cuda",
        )
        return Data(items, loader)


def every_fifth(size: int) -> VocabMap:
    selected = torch.arange(size) * 5
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[selected] = True
    return VocabMap(t2d, selected - torch.arange(size), VOCAB, size)


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


def new_model(material: Material, params: TrainParams) -> Any:
    torch.manual_seed(0)
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


def theirs(setup: Setup) -> dict[str, Any]:
    from speculators.models.eagle3 import Eagle3DraftModel
    from speculators.models.eagle3.data import shift_batch
    from speculators.train import trainer as upstream
    from speculators.train.data import ArrowDataset
    from speculators.train.dataloader import _setup_dataloader
    from transformers import LlamaConfig

    from kimi_eagle.draft.architecture import decoder_config

    material = Material(setup)
    on_gpu = DEVICE.type == "cuda"
    if not on_gpu:
        upstream._StepTimer = cpu_timer(upstream)

    class Timed(upstream.Trainer):
        marks: list[tuple[float, int]]
        profiles: list[dict[str, float]]

        def setup_trainer(self) -> None:
            if not on_gpu:
                self.local_rank, self.device_type = "cpu", "cpu"
            super().setup_trainer()

        def maybe_save_checkpoint(self, *_: Any, **__: Any) -> None:
            """Nothing is saved while it is timed."""

        def _schedulers_step(self) -> None:
            super()._schedulers_step()
            done = self.global_step + 1
            if done in (setup.warm_up, setup.warm_up + setup.steps):
                wait()
                self.marks.append((moment(), done))
            if done == setup.warm_up + setup.steps:
                self.config = self.config._replace(log_freq=1)
            if done > setup.total:
                raise Enough

    dataset = ArrowDataset(
        max_len=setup.batch_tokens,
        datapath=str(material.folder / "theirs"),
        vllm_endpoint="http://127.0.0.1:1/v1",
        on_missing="raise",
        train_ratio=1.0,
    )
    params = material.params(setup, setup.optimizers[0])
    torch.manual_seed(0)
    decoder = decoder_config(params.draft, material.facts)
    decoder.pop("model_type")
    model = Eagle3DraftModel.from_training_args(
        LlamaConfig(**decoder),
        t2d=material.vocab.t2d,
        d2t=material.vocab.d2t,
        draft_vocab_size=material.vocab.draft_size,
        norm_before_residual=False,
        target_layer_ids=material.layers,
        ttt_steps=params.ttt_steps,
        verifier_name_or_path=str(material.head),
        draft_attn_impl="simple_flex_attention" if on_gpu else "sdpa",
    )
    model.to(DEVICE)
    loader = _setup_dataloader(
        dataset,
        setup.batch_tokens,
        material.facts.hidden_size,
        num_workers=setup.workers,
        num_target_layers=len(material.layers),
        preprocess=shift_batch,
    )
    kwargs, _ = Eagle3DraftModel.get_trainer_kwargs(
        ttt_steps=params.ttt_steps,
        ttt_step_loss_decay=1.0,
        loss_fn="kl_div",
        loss_implementation=setup.their_loss if on_gpu else "eager",
    )
    batch = collated(material, setup, loader.collate_fn, dataset)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        _, loss, _ = model(**batch, **kwargs)
    first = float(loss.detach())
    del loss, batch
    found = {}
    for optimizer in setup.optimizers:
        config = upstream.TrainerConfig(
            lr=params.lr,
            num_epochs=params.epochs,
            save_path=str(material.folder / "unused"),
            train_call_kwargs=kwargs,
            val_call_kwargs=kwargs,
            optimizer=optimizer,
            scheduler_type="none",
            log_freq=10**9,
        )
        trainer = Timed(model, config, loader)
        trainer.marks, trainer.profiles = [], []
        keep = MetricHandler(trainer.profiles)
        upstream.metric_logger.addHandler(keep)
        upstream.metric_logger.setLevel("INFO")
        torch.cuda.reset_peak_memory_stats() if on_gpu else None
        with contextlib.suppress(Enough):
            trainer.run_training()
        upstream.metric_logger.removeHandler(keep)
        (t0, _), (t1, _) = trainer.marks
        profiled = trainer.profiles[1:]
        names = {
            "fetch": "fetch_ms",
            "forward": "fwd_ms",
            "backward": "bwd_ms",
            "optimizer": "opt_ms",
        }
        found[optimizer] = {
            "tokens_per_second": timed_tokens(loader, setup) / (t1 - t0),
            "step_ms": (t1 - t0) * 1000 / setup.steps,
            "phases": {
                name: sum(p[key] for p in profiled) / len(profiled) for name, key in names.items()
            },
            "peak_bytes": peak(),
            "flops_per_token": flops_per_token(model, params),
            "first_loss": first,
        }
        del trainer
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


def make(setup: Setup) -> None:
    folder = Path(setup.folder)
    (make_real if setup.real else make_demo)(setup, folder)
    make_theirs(setup, folder)


def make_demo(setup: Setup, folder: Path) -> None:
    import kimi_eagle

    demo = Path(kimi_eagle.__file__).parent / "demo"
    manifest = folder / "manifest.yaml"
    manifest.write_text(DEMO.format(demo=demo, vocab=setup.draft_vocab), "utf-8")
    root = folder / "runs"
    command = [sys.executable, "-m", "kimi_eagle", "--root", str(root), "submit", str(manifest)]
    done = subprocess.run([*command, "--json"], stdout=subprocess.PIPE, text=True, check=True)
    stages = {stage["name"]: stage["outputs"] for stage in json.loads(done.stdout)["stages"]}
    at = {}
    for name, outputs in stages.items():
        (digest,) = outputs.values()
        at[name] = root / "objects" / digest[:2] / digest
    rows = load_rows(at["rows"])
    listed = read_rows((at["states"] / ROWS).read_text("utf-8"))
    index = StateIndex(root / "registry.sqlite")
    places = index.places([row.key for row in listed])
    index.close()
    numbers = rows.indices(TRAIN)
    layers = json.loads((at["states"] / CONTRACT).read_text("utf-8"))["layers"][:-1]
    write_paths(
        folder,
        root,
        at["head"],
        at["rows"],
        layers,
        numbers,
        [places[listed[number].key] for number in numbers],
        at["vocab"],
    )


def make_real(setup: Setup, folder: Path) -> None:
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    head = folder / "head"
    head.mkdir()

    def matrix(*shape: int, scale: float = 0.02) -> Any:
        drawn = torch.randn(*shape, generator=generator, device=DEVICE, dtype=torch.bfloat16)
        return (drawn * scale).cpu()

    tensors = {
        "model.embed_tokens.weight": matrix(VOCAB, HIDDEN),
        "lm_head.weight": matrix(VOCAB, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
    }
    save_file(tensors, head / "model.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (head / "model.safetensors.index.json").write_text(json.dumps(index))
    (head / "config.json").write_text(json.dumps(KIMI))
    drawn = np.random.default_rng(0).zipf(1.2, size=(DISTINCT, ROW_TOKENS)) % 163000
    mask = [0] * 4 + [1] * (ROW_TOKENS - 4)
    none = [0] * DISTINCT
    (folder / "rows").mkdir()
    save_rows(folder / "rows", drawn.tolist(), [mask] * DISTINCT, none, none, none)
    places = []
    root = folder / "runs"
    per_shard = 8
    for shard in range(DISTINCT // per_shard):
        path = shard_path(root, f"{shard:064x}")
        path.parent.mkdir(parents=True, exist_ok=True)
        own = drawn[shard * per_shard : (shard + 1) * per_shard].reshape(-1)
        states = matrix(len(own), 4, HIDDEN, scale=1.0)
        ids = torch.from_numpy(own.astype(np.int32))
        save_file({"hidden_states": states, "token_ids": ids}, path)
        places += [
            Place(f"{shard:064x}", row * ROW_TOKENS, ROW_TOKENS, "") for row in range(per_shard)
        ]
    numbers = [number % DISTINCT for number in range(setup.rows)]
    write_paths(
        folder,
        root,
        head,
        folder / "rows",
        [2, 30, 58],
        numbers,
        [places[number] for number in numbers],
        None,
    )


def write_paths(
    folder: Path,
    root: Path,
    head: Path,
    rows: Path,
    layers: list[int],
    numbers: list[int],
    places: list[Place],
    vocab: Path | None,
) -> None:
    document = {
        "root": str(root),
        "head": str(head),
        "rows": str(rows),
        "layers": layers,
        "numbers": numbers,
        "places": [[p.shard, p.start, p.tokens, p.digest] for p in places],
        "vocab": str(vocab),
    }
    (folder / "paths.json").write_text(json.dumps(document), "utf-8")


def make_theirs(setup: Setup, folder: Path) -> None:
    """The rows as speculators reads them; a row that comes again is a link to its file."""
    import datasets

    material = Material(setup)
    reader = ShardReader(material.root)
    out = folder / "theirs" / "hidden_states"
    out.mkdir(parents=True)
    listed: dict[str, list[Any]] = {"input_ids": [], "loss_mask": [], "seq_len": []}
    written: dict[Place, Path] = {}
    for at, (number, place) in enumerate(zip(material.numbers, material.places, strict=True)):
        path = out / f"hs_{at}.safetensors"
        if place in written:
            os.link(written[place], path)
        else:
            states, ids = reader.read(place)
            save_file({"hidden_states": states.contiguous(), "token_ids": ids.long()}, path)
            written[place] = path
        listed["input_ids"].append(material.rows.ids(number).tolist())
        listed["loss_mask"].append(material.rows.mask(number).tolist())
        listed["seq_len"].append(place.tokens)
    dataset = datasets.Dataset.from_dict(listed)
    dataset.set_format("torch", columns=["input_ids", "loss_mask", "seq_len"])
    dataset.save_to_disk(str(folder / "theirs"))


def main() -> int:
    part, path = sys.argv[1:]
    document = json.loads(Path(path).read_text("utf-8"))
    setup = Setup(**{**document, "optimizers": tuple(document["optimizers"])})
    os.environ.setdefault("TQDM_DISABLE", "1")
    found = {"make": make, "ours": ours, "theirs": theirs}[part](setup)
    print()
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
