"""The demo's draft where it serves, and drafts that were spoilt: slow, run by `make test`."""

from __future__ import annotations

import json
import platform
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command import kimi_eagle
from safetensors.torch import load_file, save_file
from servers import demo_options, vllm

from kimi_eagle.draft.checkpoint import BadCheckpoint, check_checkpoint
from kimi_eagle.draft.eagle3 import Eagle3
from kimi_eagle.draft.reading import draft_config
from kimi_eagle.draft.release import check_against
from kimi_eagle.draft.simulator import simulate
from kimi_eagle.engines.endpoint_generate import generate
from kimi_eagle.engines.vllm_options import draft_options
from kimi_eagle.rows.render import Renderer
from kimi_eagle.rows.tokenizer import load_tokenizer
from kimi_eagle.stages.evaluate.report import gap
from kimi_eagle.stages.export.card import FOLDER, VERIFIER
from kimi_eagle.stages.export.gate import gate
from kimi_eagle.stages.export.spec import Gate
from kimi_eagle.verifiers.folder import open_folder

ROOT = Path(__file__).resolve().parent.parent
DEMO_VERIFIER = ROOT / "kimi_eagle" / "demo" / "verifier"

pytestmark = pytest.mark.slow


def _object(store: Path, demo: dict[str, Any], stage: str) -> Path:
    (digest,) = demo[stage]["outputs"].values()
    return Path(store / "objects" / digest[:2] / digest)


def test_serving_confirms_the_simulation(demo: dict[str, Any]) -> None:
    metrics = demo["score"]["metrics"]
    assert abs(metrics["simulated_gap"]) <= 0.05
    assert metrics["simulated_gap"] == pytest.approx(
        metrics["simulated_acceptance_length"] / metrics["acceptance_length"] - 1
    )


def test_compare_shows_the_demos_evaluation(
    store: Path,
    demo: dict[str, Any],
) -> None:
    for stage in ("draft", "score", "release"):
        (digest,) = demo[stage]["outputs"].values()
        found = kimi_eagle(store, "compare", digest[:12])
        (line,) = found["lines"]
        (figures,) = line["figures"]
        assert figures["acceptance_length"] == demo["score"]["metrics"]["acceptance_length"]
        assert figures["speedup"] == demo["score"]["metrics"]["speedup"]


Change = Callable[[dict[str, Any], dict[str, Any]], None]


def _rolled(config: dict[str, Any], weights: dict[str, Any]) -> None:
    """The aux layers in another order than they were trained in."""
    blocks = weights["fc.weight"].chunk(len(config["eagle_aux_hidden_state_layer_ids"]), dim=1)
    weights["fc.weight"] = torch.cat([*blocks[1:], blocks[0]], dim=1).contiguous()


def _shuffled(config: dict[str, Any], weights: dict[str, Any]) -> None:
    order = torch.randperm(len(weights["d2t"]), generator=torch.Generator().manual_seed(0))
    places = torch.arange(len(order))
    weights["d2t"] = (places + weights["d2t"])[order] - places


def _unscaled(config: dict[str, Any], weights: dict[str, Any]) -> None:
    rope = config["transformer_layer_config"]["rope_parameters"]
    config["transformer_layer_config"]["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": rope["rope_theta"],
    }


def _random_embedding(config: dict[str, Any], weights: dict[str, Any]) -> None:
    old = weights["embed_tokens.weight"]
    drawn = torch.randn(old.shape, generator=torch.Generator().manual_seed(0))
    weights["embed_tokens.weight"] = (drawn * old.float().std()).to(old.dtype)


def _spoilt(checkpoint: Path, folder: Path, change: Change) -> Path:
    folder.mkdir()
    config = json.loads((checkpoint / "config.json").read_text("utf-8"))
    weights = load_file(checkpoint / "model.safetensors")
    change(config, weights)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


def _released(folder: Path) -> None:
    """What `export` checks of a checkpoint before it looks at an evaluation's figures."""
    config = check_checkpoint(folder)
    weights = load_file(folder / "model.safetensors")
    check_against(
        open_folder(DEMO_VERIFIER), config, Eagle3(draft_config(config), weights), weights
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_shuffled, "d2t does not point"),
        (_unscaled, "rotary settings"),
        (_random_embedding, "embed_tokens.weight differs"),
    ],
)
def test_spoilt_drafts_are_not_released(  # EXP-05, EXP-08
    store: Path,
    demo: dict[str, Any],
    tmp_path: Path,
    change: Change,
    says: str,
) -> None:
    checkpoint = _object(store, demo, "draft")
    _released(checkpoint)
    with pytest.raises(BadCheckpoint, match=says):
        _released(_spoilt(checkpoint, tmp_path / "spoilt", change))


def test_spoilt_drafts_show_in_the_simulation(  # EVA-06
    store: Path,
    demo: dict[str, Any],
    tmp_path: Path,
) -> None:
    """Rolled layers pass every check of the files: what they cost is seen without an engine."""
    checkpoint = _object(store, demo, "draft")
    verifier = open_folder(DEMO_VERIFIER)
    spoilt = [
        _spoilt(checkpoint, tmp_path / str(number), change)
        for number, change in enumerate((_rolled, _random_embedding))
    ]
    _released(spoilt[0])
    found = simulate(
        {
            "checkpoints": [str(folder) for folder in (checkpoint, *spoilt)],
            "rows": str(_object(store, demo, "rows")),
            "states": str(_object(store, demo, "states")),
            "root": str(store),
            "registry": str(store / "registry.sqlite"),
            "head": {n: [str(p), t] for n, (p, t) in verifier.head_tensors().items()},
            "rms_norm_eps": verifier.facts.rms_norm_eps,
            "draft_tokens": [3],
            "max_tokens": 96,
            "rows_limit": 24,
            "device": "cpu",
        }
    )
    good, *bad = (figures[0]["acceptance_length"] for figures in found["checkpoints"])
    served = json.loads((_object(store, demo, "score") / "evaluation.json").read_text("utf-8"))
    assert abs(good / served["acceptance_length"] - 1) < 0.1  # half the rows
    for length in bad:
        claimed = {**served, "simulated_acceptance_length": length}
        claimed["simulated_gap"] = gap(length, served)
        (lacking,) = gate(claimed, Gate(max_simulated_gap=0.05))
        assert lacking.what.startswith("the gap between simulated and served")
        # And were it served so, by its length.
        assert gate({**served, "acceptance_length": length}, Gate(min_acceptance_length=2.5))


@pytest.fixture(scope="module")
def server(store: Path, demo: dict[str, Any]) -> Iterator[str]:
    """vLLM, started by the command that the release's model card prints."""
    release = _object(store, demo, "release")
    card = (release / "README.md").read_text("utf-8")
    (command,) = re.findall(r"^(vllm serve .*)$", card, re.MULTILINE)
    words = shlex.split(command.replace(VERIFIER, str(DEMO_VERIFIER)).replace(FOLDER, str(release)))
    assert words[:2] == ["vllm", "serve"]
    # Of this machine and this verifier, not of the draft.
    here = ["--dtype", "bfloat16", "--no-enable-prefix-caching", "--max-num-seqs", "1"]
    job = {"draft": None, "draft_tokens": 3, "cpu": True, "mla": True}
    amx = torch.cpu._is_amx_tile_supported()
    needed = draft_options(job, machine=platform.machine(), amx=amx)
    if "worker_extension_cls" in needed:  # as docs/troubleshooting.md says
        here += ["--worker-extension-cls", needed["worker_extension_cls"]]
    with vllm(store / "server.log", *words[1:], *here, *demo_options()) as address:
        yield address


def test_the_command_of_the_card_serves_what_was_measured(
    server: str,
    store: Path,
    demo: dict[str, Any],
    tmp_path: Path,
) -> None:
    """The same tokens, committed by the same steps, as when the draft was evaluated."""
    outputs = json.loads((_object(store, demo, "score") / "outputs.json").read_text("utf-8"))[:6]
    job = {
        "conversations": outputs,
        "runs": [{"temperature": 0.0, "requests": outputs}],
        "temperatures": [0.0],
        "seed": 0,
        "batch": 1,
        "draft": "served",
        "draft_tokens": 3,
        "max_tokens": 96,
        "engine": {"url": server, "plain_url": server},
        "label": "at an endpoint",
        "events": str(tmp_path / "events"),
    }
    (run,) = generate(job)["runs"]
    for measured, served in zip(outputs, run["requests"], strict=True):
        assert served["token_ids"] == measured["with_draft"]
        assert served["committed"] == measured["committed"]
        assert served["finish_reason"] == measured["finish_reason"]


def test_a_server_is_asked_the_second_turn_after_its_own_answer(
    server: str, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(DEMO_VERIFIER)
    renderer = Renderer(tokenizer)
    messages = [{"role": "user", "content": "Which number is larger, 90 or 71?"}]
    talk = {
        "set": "turns",
        "conversation": 0,
        "messages": messages,
        "later": ["What is the capital of Peru?"],
        "prompt": renderer.encode(renderer.prompt(messages)),
    }
    job = {
        "conversations": [talk],
        "runs": None,
        "temperatures": [0.0],
        "seed": 0,
        "batch": 1,
        "thinking": "default",
        "tokenizer": str(DEMO_VERIFIER),
        "draft": "served",
        "draft_tokens": 3,
        "max_tokens": 64,
        "max_model_len": 512,
        "engine": {"url": server, "plain_url": server},
        "label": "at an endpoint",
        "events": str(tmp_path / "events"),
    }
    (greedy,) = generate(job)["runs"]
    first, second = greedy["requests"]
    said = tokenizer.decode(first["token_ids"][:-1]).partition("</think>")[2]
    assert "90" in said
    assert said in tokenizer.decode(second["prompt"])  # the answer, without its reasoning
    assert "Lima" in tokenizer.decode(second["token_ids"])
    assert first["log_probability"] is None
    alone = {**talk, "later": []}
    brief = {**job, "conversations": [alone], "temperatures": [0.5], "max_tokens": 6}
    (sampled,) = generate(brief)["runs"]
    assert sampled["requests"][0]["log_probability"] < 0
