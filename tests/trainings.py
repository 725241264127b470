"""A draft of a made-up verifier, small enough to be trained in a moment, and data for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kimi_eagle.draft.batches import Loader, Source, item_of
from kimi_eagle.draft.compute import Compute, dtype_of
from kimi_eagle.draft.kernels import Kernels
from kimi_eagle.draft.losses import Heads
from kimi_eagle.draft.model import build, freeze_as
from kimi_eagle.draft.trainer import Data, Trainer
from kimi_eagle.draft.unroll import Unroll
from kimi_eagle.draft.vocab import VocabMap
from kimi_eagle.rows.table import Rows, load_rows, save_rows
from kimi_eagle.stages.train.spec import TrainParams
from kimi_eagle.states.index import Place
from kimi_eagle.verifiers.facts import read_facts

HIDDEN, VOCAB, DRAFT_VOCAB = 32, 96, 48
LAYERS = [1, 2, 4]
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
CONFIG = {
    "model_type": "deepseek_v3",
    "hidden_size": HIDDEN,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "v_head_dim": 8,
    "intermediate_size": 64,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_parameters": ROPE,
    "tie_word_embeddings": False,
}
CPU = torch.device("cpu")


def params_of(**values: Any) -> TrainParams:
    given = {"kind": "train", "head": "h", "states": "s", "vocab": "v", "batch_tokens": 64}
    return TrainParams.model_validate({**given, **values}, strict=False)


def write_head(folder: Path) -> Path:
    """A `head` artifact with weights of about the size that real ones have."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(1)
    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=generator),
        "model.norm.weight": 1 + 0.1 * torch.randn(HIDDEN, generator=generator),
        "lm_head.weight": 0.3 * torch.randn(VOCAB, HIDDEN, generator=generator),
    }
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def vocab_map() -> VocabMap:
    """Every second token."""
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[:: VOCAB // DRAFT_VOCAB] = True
    return VocabMap(t2d, torch.arange(DRAFT_VOCAB), VOCAB, DRAFT_VOCAB)


def new_model(head: Path, params: TrainParams, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return build(params, read_facts(CONFIG), vocab_map(), head, LAYERS)


class MemoryStates:
    """Hidden states as `ShardReader` gives them, from memory."""

    def __init__(self, states: Sequence[Any], ids: Sequence[Any]):
        self._held = list(zip(states, ids, strict=True))

    def read(self, place: Place) -> tuple[Any, Any]:
        return self._held[place.start]


def random_rows(folder: Path, lengths: Sequence[int], aux: int = 3) -> tuple[Rows, MemoryStates]:
    """Rows of random tokens, whose first quarter, at least three, is not supervised."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(7)
    ids = [torch.randint(0, VOCAB, (n,), generator=generator).to(torch.int32) for n in lengths]
    masks = [[int(at >= max(4, n // 4)) for at in range(n)] for n in lengths]
    states = [
        torch.randn(n, aux + 1, HIDDEN, generator=generator).to(torch.bfloat16) for n in lengths
    ]
    none = [0] * len(lengths)
    save_rows(folder, [item.tolist() for item in ids], masks, none, none, none)
    return load_rows(folder), MemoryStates(states, ids)


def data_of(rows: Rows, states: Any, params: TrainParams, numbers: Sequence[int]) -> Data:
    sources = [Source(n, f"{n:064x}", Place("memory", n, len(rows.ids(n)), "")) for n in numbers]
    items = [
        item_of(source, rows.mask(source.row), params.ttt_steps, params.batch_tokens)
        for source in sources
    ]
    loader = Loader(
        rows,
        sources,
        states,
        size=params.batch_tokens,
        ttt_steps=params.ttt_steps,
        seed=params.seed,
        noise=params.noise,
    )
    return Data(items, loader)


def parts_of(model: Any, params: TrainParams, chunk: int = 2048) -> Compute:
    """What a trainer runs a batch of the model through, on a CPU."""
    dtype = dtype_of(params)
    freeze_as(model, dtype)
    kernels = Kernels(compiled=False)
    attention = "eager" if params.attention == "auto" else params.attention
    common = {"dtype": dtype, "kernels": kernels}
    unroll = Unroll(model, steps=params.ttt_steps, attention=attention, **common)
    decay = params.ttt_step_loss_decay
    heads = Heads(model, loss=params.loss, decay=decay, chunk=chunk, **common)
    return Compute(unroll, heads, attention, compiled=False)


def new_trainer(
    head: Path, params: TrainParams, train: Data, validate: Data | None = None, **more: Any
) -> Trainer:
    model = new_model(head, params, params.seed)
    report = more.pop("report", lambda _figures, _rates: None)
    compute = parts_of(model, params)
    return Trainer(
        model, params, train, validate, compute=compute, device=CPU, report=report, **more
    )
