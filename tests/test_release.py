"""Releases: parity with the checkpoint, SGLang's form, the verifier it is for, card, pushing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from cases import material
from drafts import DRAFT_VOCAB, HIDDEN, LAYERS, ROPE, VOCAB, draft_document, write_draft
from safetensors.torch import load_file, save_file

from kimi_eagle.draft.checkpoint import BadCheckpoint, check_checkpoint
from kimi_eagle.draft.eagle3 import Eagle3
from kimi_eagle.draft.reading import draft_config, read_draft
from kimi_eagle.draft.release import check_against, check_published, same_logits
from kimi_eagle.draft.sglang import read_sglang, write_sglang
from kimi_eagle.job import StageFailed
from kimi_eagle.stages.export.card import FOLDER, VERIFIER, Origin, model_card, serve_command
from kimi_eagle.stages.export.push import push_folder
from kimi_eagle.stages.export.spec import ExportParams, Push
from kimi_eagle.verifiers.folder import open_folder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_draft(tmp_path / "checkpoint")


def _sglang(checkpoint: Path, folder: Path) -> Path:
    folder.mkdir()
    config = check_checkpoint(checkpoint)
    write_sglang(folder, config, draft_config(config), load_file(checkpoint / "model.safetensors"))
    return folder


def test_sglangs_form_read_as_sglang_reads_it_computes_the_same(
    checkpoint: Path, tmp_path: Path
) -> None:
    written = read_sglang(_sglang(checkpoint, tmp_path / "out"))
    same_logits(read_draft(checkpoint), written)
    assert written.config == read_draft(checkpoint).config


def test_sglangs_form_has_its_names_and_its_layer_ids(checkpoint: Path, tmp_path: Path) -> None:
    out = _sglang(checkpoint, tmp_path / "out")
    config = json.loads((out / "config.json").read_text("utf-8"))
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    # EXP-04: always written; the output of layer i, from 0.
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    # EXP-03, EXP-06
    assert (config["vocab_size"], config["draft_vocab_size"]) == (VOCAB, DRAFT_VOCAB)
    # EXP-05
    assert config["rope_theta"] == 50000.0
    scaling = {name: value for name, value in ROPE.items() if name != "rope_theta"}
    assert config["rope_scaling"] == {**scaling, "type": "yarn"}
    weights = load_file(out / "model.safetensors")
    assert "midlayer.self_attn.q_proj.weight" in weights
    assert not [name for name in weights if name.startswith("layers.")]
    assert torch.equal(weights["d2t"], torch.arange(DRAFT_VOCAB) * 3)  # offsets, as SGLang adds


@pytest.mark.parametrize(
    "name", ["torchspec_kimi_k25_eagle3.json", "specforge_kimi-k25-eagle3.json"]
)
def test_our_config_has_every_key_that_public_drafts_have(
    checkpoint: Path, tmp_path: Path, name: str
) -> None:
    """But for what says nothing of a Llama decoder, or is the library's own note."""
    public = json.loads(material(f"drafts/{name}").read_text("utf-8"))
    ours = json.loads((_sglang(checkpoint, tmp_path / "out") / "config.json").read_text("utf-8"))
    idle = {
        "attention_dropout",
        "dtype",  # of transformers 5; `torch_dtype` is read everywhere
        "initializer_range",
        "max_window_layers",
        "pretraining_tp",
        "sliding_window",
        "transformers_version",
        "use_cache",
        "use_sliding_window",
    }
    assert public.keys() - ours.keys() <= idle
    assert public["architectures"] == ours["architectures"]
    if public.get("rope_scaling"):
        assert public["rope_scaling"].keys() <= ours["rope_scaling"].keys()


def _altered(folder: Path, change: Callable[[Any], Any]) -> Path:
    path = folder / "config.json"
    config = json.loads(path.read_text("utf-8"))
    change(config)
    path.write_text(json.dumps(config))
    return folder


def _reweighed(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c.pop("eagle_config"), "guess"),
        (lambda c: c.pop("draft_vocab_size"), "guess"),
        (lambda c: c.pop("rope_theta"), "guess"),
        (lambda c: c.update(vocab_size=DRAFT_VOCAB), "embed_tokens"),
        (lambda c: c.update(draft_vocab_size=VOCAB), "d2t|lm_head"),
        (lambda c: c.update(architectures=["LlamaForCausalLM"]), "architectures"),
    ],
)
def test_sglangs_reader_refuses_what_would_be_guessed(
    checkpoint: Path, tmp_path: Path, change: Any, says: str
) -> None:
    with pytest.raises(BadCheckpoint, match=says):
        read_sglang(_altered(_sglang(checkpoint, tmp_path / "out"), change))


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.pop("midlayer.hidden_norm.weight"),
        lambda w: w.update(d2t=w["d2t"] + torch.arange(DRAFT_VOCAB)),  # absolute ids
        lambda w: w.update(d2t=w["d2t"].flip(0)),
        lambda w: w.update({"midlayer.bias": torch.zeros(3)}),
    ],
)
def test_sglangs_reader_refuses_other_tensors(
    checkpoint: Path, tmp_path: Path, change: Any
) -> None:
    with pytest.raises(BadCheckpoint):
        read_sglang(_reweighed(_sglang(checkpoint, tmp_path / "out"), change))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"norm_before_residual": True}, "norm_before_residual"),
        ({"norm_output": True}, "norm_output"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}, "id 0"),
    ],
)
def test_drafts_that_sglang_runs_otherwise_are_refused(
    tmp_path: Path, config: Any, says: str
) -> None:
    with pytest.raises(BadCheckpoint, match=says):
        _sglang(write_draft(tmp_path / "checkpoint", **config), tmp_path / "out")


def test_a_draft_of_two_layers_is_not_for_sglang(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="2 layers"):
        _sglang(write_draft(tmp_path / "checkpoint", layers=2), tmp_path / "out")


@pytest.mark.parametrize(
    "name", ["fc.weight", "layers.0.self_attn.k_proj.weight", "lm_head.weight", "norm.weight"]
)
def test_one_bit_in_any_tensor_breaks_parity(checkpoint: Path, name: str) -> None:
    good = read_draft(checkpoint)
    weights = dict(good._t)
    weights[name] = weights[name] * 1.01
    with pytest.raises(BadCheckpoint, match="logits differ"):
        same_logits(good, Eagle3(good.config, weights))


def test_other_settings_break_parity(checkpoint: Path) -> None:
    good = read_draft(checkpoint)
    for changed in (
        replace(good.config, rope={**ROPE, "rope_theta": 10000.0}),  # EXP-05
        replace(good.config, rope={"rope_type": "default", "rope_theta": 50000.0}),
        replace(good.config, aux_layers=(1, 3, 4)),
        replace(good.config, norm_before_residual=True),
    ):
        with pytest.raises(BadCheckpoint):
            same_logits(good, Eagle3(changed, good._t))


# The verifier it is for


@pytest.fixture
def verifier(checkpoint: Path, tmp_path: Path) -> Any:
    folder = tmp_path / "verifier"
    folder.mkdir()
    embedding = load_file(checkpoint / "model.safetensors")["embed_tokens.weight"]
    save_file({"model.embed_tokens.weight": embedding}, folder / "model.safetensors")
    (folder / "config.json").write_text(
        json.dumps(
            {
                "model_type": "kimi_k2",
                "hidden_size": HIDDEN,
                "num_hidden_layers": 8,
                "num_attention_heads": 2,
                "vocab_size": VOCAB,
                "rope_theta": ROPE["rope_theta"],
                "rope_scaling": {n: v for n, v in ROPE.items() if n != "rope_theta"},
            }
        )
    )
    return open_folder(folder)


def _against(verifier: Any, folder: Path) -> None:
    config = check_checkpoint(folder)
    weights = load_file(folder / "model.safetensors")
    check_against(verifier, config, Eagle3(draft_config(config), weights), weights)


def test_a_draft_for_this_verifier_passes(verifier: Any, checkpoint: Path) -> None:
    _against(verifier, checkpoint)


def _decoder(**changed: Any) -> Callable[[Any], Any]:
    return lambda config: config["transformer_layer_config"].update(changed)


@pytest.mark.parametrize(
    "rope",
    [
        {**ROPE, "rope_theta": 10000.0},
        {"rope_type": "default", "rope_theta": 50000.0},
        {**ROPE, "factor": 32.0},
        {**ROPE, "mscale": 0.5},
    ],
)
def test_other_rotary_settings_than_the_verifiers_are_refused(  # EXP-05
    verifier: Any, checkpoint: Path, rope: Any
) -> None:
    _altered(checkpoint, _decoder(rope_parameters=rope))
    with pytest.raises(BadCheckpoint, match="rotary settings"):
        _against(verifier, checkpoint)


def test_an_embedding_that_is_not_the_verifiers_is_refused(  # EXP-08, lightseekorg/TorchSpec#38
    verifier: Any, checkpoint: Path
) -> None:
    def change(weights: dict[str, Any]) -> None:
        weights["embed_tokens.weight"][3] += 1

    _reweighed(checkpoint, change)
    with pytest.raises(BadCheckpoint, match="in 1 of 64 tokens"):
        _against(verifier, checkpoint)
    _altered(checkpoint, lambda config: config.update(embed_requires_grad=True))
    _against(verifier, checkpoint)


def test_layers_that_the_verifier_lacks_are_refused(verifier: Any, checkpoint: Path) -> None:
    _altered(checkpoint, lambda c: c.update(eagle_aux_hidden_state_layer_ids=[2, 4, 8]))
    with pytest.raises(BadCheckpoint, match="verifier of 8 layers"):
        _against(verifier, checkpoint)


@pytest.mark.parametrize("text", ["/home/me/draft", "~/x", "file:///x", "C:\\x", "../verifier"])
def test_a_place_of_this_machine_is_found_wherever_it_stands(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"a": [{"b": text}]}))
    with pytest.raises(BadCheckpoint, match="names a place"):
        check_published(tmp_path)


def test_public_names_are_no_places(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"a": "moonshotai/Kimi-K2.5", "b": None}))
    check_published(tmp_path)


# The card


MEASURED = {
    "set": "mt_bench",
    "draft_tokens": 3,
    "temperature": 0.0,
    "batch": 1,
    "prompts": 160,
    "acceptance_length": 2.4125,
    "acceptance_length_per_request": 2.5,
    "standard_error": 0.051,
    "includes_bonus": True,
    "per_position": [0.7, 0.45, 0.25],
    "outputs_equal": 160,
    "outputs_identical": True,
}
EVALUATION = {
    **MEASURED,
    "measurements": [MEASURED],
    "simulated_acceptance_length": 2.35,
    "simulated_gap": -0.0259,
}
ORIGIN = Origin(
    "c" * 64,
    "e" * 64,
    "f" * 64,
    {"digest": "a" * 64, "conversations": 1200, "tokens": 34567, "rejected": 3},
    {"digest": "b" * 64, "coverage": 0.9927},
)


def _card(target: str = "vllm", **changed: Any) -> str:
    name = "moonshotai/Kimi-K2.5"
    document = draft_document()
    return model_card(target, "mit", name, {**EVALUATION, **changed}, ORIGIN, document)


def test_the_card_tells_what_it_was_made_from_and_how_to_make_it_again() -> None:
    card = _card()
    front = yaml.safe_load(card.split("---")[1])
    assert front["base_model"] == "moonshotai/Kimi-K2.5"
    (metric,) = front["model-index"][0]["results"][0]["metrics"]
    assert (metric["value"], metric["args"]["k"]) == (2.4125, 3)
    assert "| mt_bench | 160 | 3 | 0 | 2.413 ± 0.051 | 2.500 | 0.700, 0.450, 0.250 |" in card
    assert "1,200 conversations, 34,567 tokens, 3 records left out" in card
    assert "covers 99.27%" in card
    assert f"kimi-eagle reproduce {'c' * 64}" in card
    assert serve_command("vllm", 3) in card
    assert "2.350 (-2.6% of what was served)" in card


def test_the_command_of_the_card_names_every_setting() -> None:
    command = serve_command("vllm", 3)
    settings = json.loads(command.split("'")[1])
    assert settings == {"method": "eagle3", "model": FOLDER, "num_speculative_tokens": 3}
    assert VERIFIER in command
    sglang = serve_command("sglang", 3).split()
    assert sglang[sglang.index("--speculative-num-draft-tokens") + 1] == "4"


def test_the_card_for_sglang_says_whose_layer_ids_they_are() -> None:
    assert "Aux layers [1, 3, 4] as SGLang counts them" in _card("sglang")
    assert f"{LAYERS}" in _card("sglang")


def test_the_card_says_how_far_outputs_agree() -> None:
    assert "identical to decoding without the draft" in _card()
    assert "8 of 160 outputs" in _card(outputs_identical=None, outputs_equal=8)
    batched = _card(outputs_identical=None, outputs_equal=8, outputs_equal_without_draft=9)
    assert "between two runs without the draft 9 are" in batched


# Pushing


def test_a_release_is_pushed_whole_and_once(checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "there" / "draft"
    assert push_folder(checkpoint, target, overwrite=False).startswith("copied")
    assert sorted(p.name for p in target.iterdir()) == sorted(p.name for p in checkpoint.iterdir())
    assert "already" in push_folder(checkpoint, target, overwrite=False)
    assert [path.name for path in target.parent.iterdir()] == ["draft"]


def test_what_lies_there_is_replaced_only_when_told(checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "draft"
    target.mkdir()
    (target / "mine.txt").write_text("x")
    with pytest.raises(StageFailed, match="holds something else"):
        push_folder(checkpoint, target, overwrite=False)
    assert (target / "mine.txt").read_text() == "x"
    push_folder(checkpoint, target, overwrite=True)
    assert not (target / "mine.txt").exists()


@pytest.mark.parametrize("given", [{}, {"folder": "/a", "repository": "a/b"}, {"folder": "a"}])
def test_a_push_has_one_place(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Push(**given)


def test_what_is_made_again_is_pushed_nowhere() -> None:
    from kimi_eagle.stages.export.spec import Export

    params = ExportParams.model_validate(
        {"kind": "export", "checkpoint": "a", "evaluation": "b", "push": {"folder": "/x"}}
    )
    assert Export.again(params).push is None
    assert Export.identity(params, SimpleNamespace())["push"]["folder"] == "/x"


@pytest.mark.parametrize("name", ["/models/kimi", "./kimi", "~/kimi", "a/b/c", "C:\\kimi", ""])
def test_the_verifiers_public_name_is_no_path(name: str) -> None:
    given = {"kind": "export", "checkpoint": "a", "evaluation": "b", "base_model": name}
    with pytest.raises(ValueError, match="pattern"):
        ExportParams.model_validate(given)
    assert ExportParams.model_validate({**given, "base_model": "moonshotai/Kimi-K2.5"})
