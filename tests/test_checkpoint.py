"""Checkpoints: a real small draft is written, and whatever would not serve is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import case_json
from safetensors.torch import load_file, save_file

from kimi_eagle.draft.architecture import decoder_config
from kimi_eagle.draft.checkpoint import (
    CONFIG,
    WEIGHTS,
    BadCheckpoint,
    check_checkpoint,
    write_checkpoint,
)
from kimi_eagle.draft.vocab import VocabMap
from kimi_eagle.stages.train.spec import DraftArchitecture, TrainParams
from kimi_eagle.verifiers.facts import VerifierFacts, read_facts

LAYERS = [2, 4, 5]
ROPE = {
    "rope_theta": 50000.0,
    "rope_type": "yarn",
    "factor": 64.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
TEXT: dict[str, Any] = {
    "model_type": "kimi_k2",
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 50000.0,
    "rope_scaling": {key: value for key, value in ROPE.items() if key.split("_")[0] != "rope"}
    | {"type": "yarn"},
    "tie_word_embeddings": False,
    "max_position_embeddings": 262144,
}


def _facts() -> VerifierFacts:
    return read_facts({"model_type": "kimi_k25", "text_config": TEXT})


def _head(folder: Path) -> Path:
    """A `head` artifact: flat config, three tensors by their plain names, an index."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "model.embed_tokens.weight": torch.randn(64, 8, generator=generator),
        "model.norm.weight": torch.ones(8),
        "lm_head.weight": torch.randn(64, 8, generator=generator),
    }
    save_file(tensors, folder / "model.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({**TEXT, "model_type": "deepseek_v3"}))
    return folder


def _vocab(size: int) -> VocabMap:
    if size == 64:
        return VocabMap(None, None, 64, 64)
    step = 64 // size
    t2d = torch.zeros(64, dtype=torch.bool)
    t2d[::step] = True
    return VocabMap(t2d, torch.arange(size) * (step - 1), 64, size)


def _draft(folder: Path, size: int = 16, **draft: Any) -> tuple[Any, dict[str, Any]]:
    """Configuration and bf16 weights of a draft, made as training makes it."""
    from kimi_eagle.draft.model import build

    params = TrainParams.model_validate(
        {"kind": "train", "head": "h", "states": "s", "vocab": "v", "draft": draft}
    )
    model = build(params, _facts(), _vocab(size), _head(folder), LAYERS)
    return model.config, {
        name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        for name, tensor in model.state_dict().items()
    }


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Any]]:
    return _draft(tmp_path_factory.mktemp("draft") / "head")


@pytest.fixture
def checkpoint(tmp_path: Path, draft: tuple[Any, dict[str, Any]]) -> Path:
    write_checkpoint(tmp_path, *draft, None)
    return tmp_path


def _config(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / CONFIG).read_text("utf-8")))


def _alter(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = _config(folder)
    change(config)
    (folder / CONFIG).write_text(json.dumps(config))


def _alter_weights(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS)


def test_what_is_written_passes_and_says_what_serving_needs(checkpoint: Path) -> None:
    config = check_checkpoint(checkpoint)
    assert config["eagle_aux_hidden_state_layer_ids"] == LAYERS  # EXP-04
    assert config["draft_vocab_size"] == 16  # EXP-03
    assert config["transformer_layer_config"]["vocab_size"] == 64  # EXP-03
    assert config["speculators_model_type"] == "eagle3"
    assert config["norm_before_residual"] is False  # MAN-16


def test_theta_and_scaling_are_those_of_the_verifier(checkpoint: Path) -> None:  # EXP-05
    assert _config(checkpoint)["transformer_layer_config"]["rope_parameters"] == ROPE


def test_the_decoder_is_written_whole(checkpoint: Path) -> None:
    """Also what equals the library's defaults of today, which another version may have changed."""
    written = _config(checkpoint)["transformer_layer_config"]
    expected = decoder_config(DraftArchitecture(), _facts())
    assert {name: written[name] for name in expected if name in written} == expected


def test_theta_and_scaling_survive_reading_the_draft_back(checkpoint: Path) -> None:  # EXP-05
    from speculators.models.eagle3 import Eagle3SpeculatorConfig

    read = Eagle3SpeculatorConfig.from_pretrained(checkpoint).transformer_layer_config
    assert dict(read.rope_parameters) == ROPE
    assert (read.vocab_size, read.max_position_embeddings) == (64, 262144)


def test_no_path_of_this_machine_is_in_the_checkpoint(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = (checkpoint / CONFIG).read_text("utf-8")
    assert str(tmp_path_factory.getbasetemp()) not in text
    assert _config(checkpoint)["speculators_config"]["verifier"]["name_or_path"] is None


def test_the_config_does_not_depend_on_where_the_head_lay(tmp_path: Path, draft: Any) -> None:
    written = []
    for name, (config, weights) in (("one", draft), ("two", _draft(tmp_path / "elsewhere"))):
        (tmp_path / name).mkdir()
        write_checkpoint(tmp_path / name, config, weights, None)
        written.append((tmp_path / name / CONFIG).read_bytes())
    assert written[0] == written[1]


def test_frozen_weights_that_serving_does_not_read_are_left_out(checkpoint: Path) -> None:
    names = set(load_file(checkpoint / WEIGHTS))
    assert {"t2d", "d2t", "fc.weight", "lm_head.weight", "embed_tokens.weight"} <= names
    assert not any(name.startswith("verifier_") for name in names)  # EXP-08


def test_norm_before_residual_can_be_turned_on(tmp_path: Path) -> None:  # MAN-16
    config, weights = _draft(tmp_path / "head", norm_before_residual=True)
    write_checkpoint(tmp_path, config, weights, None)
    assert _config(tmp_path)["norm_before_residual"] is True


def test_the_whole_vocabulary_needs_no_map(tmp_path: Path) -> None:  # VOC-12
    config, weights = _draft(tmp_path / "head", 64)
    write_checkpoint(tmp_path, config, weights, None)
    assert _config(tmp_path)["draft_vocab_size"] == 64
    assert not {"t2d", "d2t"} & set(load_file(tmp_path / WEIGHTS))


def test_a_public_name_of_the_verifier_is_kept(tmp_path: Path, draft: Any) -> None:
    write_checkpoint(tmp_path, *draft, "moonshotai/Kimi-K2.5")
    verifier = check_checkpoint(tmp_path)["speculators_config"]["verifier"]
    assert verifier["name_or_path"] == "moonshotai/Kimi-K2.5"


@pytest.mark.parametrize(
    "path", ["/models/kimi", "./kimi", "../kimi", "~/kimi", "a/b/c", "C:\\kimi", "file:///kimi", ""]
)
def test_a_path_for_the_verifiers_name_is_refused(tmp_path: Path, draft: Any, path: str) -> None:
    with pytest.raises(BadCheckpoint, match="by a path"):
        write_checkpoint(tmp_path, *draft, path)


def _decoder(**changed: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda config: config["transformer_layer_config"].update(changed)


def _without(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda config: config.pop(name)


def _set(**changed: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda config: config.update(changed)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        pytest.param(_decoder(vocab_size=16), "embed_tokens", id="EXP-03 draft size as vocab"),
        pytest.param(_without("eagle_aux_hidden_state_layer_ids"), "guess", id="EXP-04 no ids"),
        pytest.param(_set(eagle_aux_hidden_state_layer_ids=[]), "guess", id="EXP-04 empty ids"),
        pytest.param(_set(eagle_aux_hidden_state_layer_ids=[2, 4]), "fc", id="too few ids"),
        pytest.param(_set(eagle_aux_hidden_state_layer_ids=[2, 4, 5, 7]), "fc", id="the last too"),
        pytest.param(_set(eagle_aux_hidden_state_layer_ids=[2, 4, 4]), "repeat", id="ids repeat"),
        pytest.param(_set(eagle_aux_hidden_state_layer_ids=[5, 4, 2]), "down", id="ids go down"),
        pytest.param(_without("draft_vocab_size"), "no draft_vocab_size", id="EXP-06 no size"),
        pytest.param(_set(draft_vocab_size=64), "lm_head", id="EXP-06 whole size"),
        pytest.param(_set(draft_vocab_size=32), "lm_head", id="VOC-06 another size"),
        pytest.param(_decoder(rope_parameters=None), "rope_theta", id="EXP-05 no rope"),
        pytest.param(_decoder(rope_parameters={"factor": 64.0}), "rope_theta", id="EXP-05 theta"),
        pytest.param(
            _decoder(rope_parameters={"rope_theta": 1.0, "rope_type": "yarn"}),
            "factor",
            id="EXP-05 scaling without factor",
        ),
        pytest.param(_decoder(hidden_size=16), "shape", id="another width"),
        pytest.param(_without("transformer_layer_config"), "rope_theta", id="no decoder"),
    ],
)
def test_configs_that_would_not_serve_as_trained_are_refused(
    checkpoint: Path, change: Callable[[dict[str, Any]], Any], says: str
) -> None:
    _alter(checkpoint, change)
    with pytest.raises(BadCheckpoint, match=says):
        check_checkpoint(checkpoint)


def test_the_public_bad_config_is_refused(checkpoint: Path) -> None:  # EXP-03
    bad = case_json("export/bad_config.json")
    bad["transformer_layer_config"]["rope_parameters"] = ROPE
    (checkpoint / CONFIG).write_text(json.dumps(bad))
    with pytest.raises(BadCheckpoint):
        check_checkpoint(checkpoint)


@pytest.mark.parametrize(
    "name",
    ["fc.weight", "embed_tokens.weight", "lm_head.weight", "layers.0.self_attn.q_proj.weight"],
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_number_that_is_not_finite_is_refused_by_name(
    checkpoint: Path, name: str, value: float
) -> None:  # EXP-08
    _alter_weights(checkpoint, lambda weights: weights[name].view(-1)[-1:].fill_(value))
    with pytest.raises(BadCheckpoint, match=f"{name} holds"):
        check_checkpoint(checkpoint)


def test_weights_with_nan_are_never_written_as_good(tmp_path: Path, draft: Any) -> None:  # EXP-08
    config, weights = draft
    blank = torch.full_like(weights["embed_tokens.weight"], float("nan"))
    with pytest.raises(BadCheckpoint, match=r"embed_tokens\.weight"):
        write_checkpoint(tmp_path, config, {**weights, "embed_tokens.weight": blank}, None)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        pytest.param(lambda w: w["lm_head.weight"].zero_(), "never filled", id="EXP-08 zeros"),
        pytest.param(lambda w: w.pop("embed_tokens.weight"), "lacks embed", id="no embedding"),
        pytest.param(lambda w: w.pop("t2d"), "without", id="no t2d"),
        pytest.param(lambda w: [w.pop("t2d"), w.pop("d2t")], "without t2d", id="no map"),
        pytest.param(lambda w: w["t2d"].fill_(True), "64 tokens.* 16", id="VOC-08 count"),
        pytest.param(lambda w: w["d2t"].add_(1), "does not point", id="shifted map"),
        pytest.param(lambda w: w["d2t"].add_(torch.arange(16)), "absolute ids", id="absolute ids"),
        pytest.param(lambda w: w.update(d2t=w["d2t"].int()), "int64", id="VOC-05 d2t dtype"),
        pytest.param(lambda w: w.update(t2d=w["t2d"].byte()), "bool", id="VOC-05 t2d dtype"),
    ],
)
def test_weights_that_do_not_hold_together_are_refused(
    checkpoint: Path, change: Callable[[dict[str, Any]], Any], says: str
) -> None:
    _alter_weights(checkpoint, change)
    with pytest.raises(BadCheckpoint, match=says):
        check_checkpoint(checkpoint)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
@pytest.mark.parametrize("data", [None, b"", b"{"], ids=["missing", "empty", "cut off"])
def test_files_that_cannot_be_read_are_refused(
    checkpoint: Path, name: str, data: bytes | None
) -> None:
    (checkpoint / name).unlink()
    if data is not None:
        (checkpoint / name).write_bytes(data)
    with pytest.raises(BadCheckpoint, match="cannot be read"):
        check_checkpoint(checkpoint)
