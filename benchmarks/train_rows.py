"""The rows that `train.py` trains both sides on, written as each reads them.

Shards of our state store, and for speculators a dataset and a file of hidden states a row.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from train import Setup

from kimi_eagle.draft.batches import Loader, Source, item_of
from kimi_eagle.draft.trainer import Data
from kimi_eagle.draft.vocab import VocabMap, load_map
from kimi_eagle.rows.table import TRAIN, VALIDATE, load_rows, save_rows
from kimi_eagle.stages.train.spec import TrainParams
from kimi_eagle.states.index import Place, StateIndex
from kimi_eagle.states.layout import CONTRACT, ROWS, read_rows, shard_path
from kimi_eagle.states.reader import ShardReader
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
        self.held_out_at = [(number, Place(*item)) for number, item in paths["held_out"]]
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
            "lr": setup.lr,
            "optimizer": optimizer,
            "batch_tokens": setup.batch_tokens,
            "attention": setup.attention,
            "loader_workers": 4 if setup.real else 0,
            "log_steps": 50,
            "scheduler": "none",
        }
        return TrainParams.model_validate(document, strict=False)

    def data(self, setup: Setup, params: TrainParams) -> Data:
        return self._data(list(zip(self.numbers, self.places, strict=True)), params)

    def held_out(self, setup: Setup, params: TrainParams) -> Data:
        """Of the demo: the rows that are not trained on."""
        return self._data(self.held_out_at, params)

    def _data(self, placed: list[tuple[int, Place]], params: TrainParams) -> Data:
        sources = [Source(number, f"{at:064x}", place) for at, (number, place) in enumerate(placed)]
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
        [(number, places[listed[number].key]) for number in rows.indices(VALIDATE)],
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
        [],
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
    held_out: list[tuple[int, Place]],
) -> None:
    document = {
        "root": str(root),
        "head": str(head),
        "rows": str(rows),
        "layers": layers,
        "numbers": numbers,
        "places": [_listed(place) for place in places],
        "held_out": [(number, _listed(place)) for number, place in held_out],
        "vocab": str(vocab),
    }
    (folder / "paths.json").write_text(json.dumps(document), "utf-8")


def _listed(place: Place) -> list[Any]:
    return [place.shard, place.start, place.tokens, place.digest]


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
