"""The verifier of Kimi-K2.5's shape in its tiny form: opened, planned, loaded by transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cases import demo_verifier, material

from kimi_eagle.demo.kimi_shape import build, layer_shapes, shaped
from kimi_eagle.verifiers.facts import VerifierError, read_facts
from kimi_eagle.verifiers.folder import open_folder, tensor_files

LAYERS, EXPERTS = 4, 4
DEMO = demo_verifier().parent


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("shape") / "verifier"
    build(DEMO / "verifier", out, LAYERS, EXPERTS, tiny=True, seed=0)
    return out


def manifest(verifier: Path) -> dict[str, Any]:
    """`kimi-shape.yaml` over the demo's conversations."""
    path = Path(__file__).parent.parent / "manifests" / "kimi-shape.yaml"
    found: dict[str, Any] = yaml.safe_load(path.read_text("utf-8"))
    found["verifier"] = {"path": str(verifier)}
    stages = found["stages"]
    source = {"path": str(DEMO / "chats.jsonl"), "format": "messages", "limit": 6}
    stages["rows"].update(sources=[source], max_length=256, val_ratio=0.2)
    stages["states"]["engine"] = {"kind": "transformers"}
    stages["vocab"]["size"] = 512
    stages["score"]["prompts"]["path"] = str(DEMO / "prompts.jsonl")
    return found


def submitted(folder: Path, document: dict[str, Any], command: str) -> Any:
    path = folder / "shape.yaml"
    path.write_text(yaml.safe_dump(document), "utf-8")
    words = [sys.executable, "-m", "kimi_eagle", "--root", str(folder / "runs"), command, str(path)]
    done = subprocess.run([*words, "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_its_names_are_those_of_the_checkpoint_in_the_hubs_form(verifier: Path) -> None:
    demo = {name for name in tensor_files(DEMO / "verifier") if ".layers." not in name}
    names = tensor_files(verifier)
    assert {name for name in names if ".layers." not in name} == demo
    for number in (0, 1):  # a dense one, and one of experts
        of_layer = f"language_model.model.layers.{number}."
        theirs = {name for name in tensor_files(DEMO / "verifier") if name.startswith(of_layer)}
        assert {name for name in names if name.startswith(of_layer)} == theirs
    folder = open_folder(verifier)
    assert (folder.facts.num_layers, folder.facts.prefix) == (LAYERS, "language_model.")
    folder.head_tensors()


def test_the_manifest_is_planned_on_it(verifier: Path, tmp_path: Path) -> None:
    plan = submitted(tmp_path, manifest(verifier), "plan")
    assert [stage["name"] for stage in plan["stages"]][-1] == "release"


@pytest.mark.slow
def test_its_states_are_extracted_and_proven(verifier: Path, tmp_path: Path) -> None:
    document = manifest(verifier)
    document["stages"] = {name: document["stages"][name] for name in ("rows", "states")}
    states = submitted(tmp_path, document, "submit")["stages"][-1]
    assert states["metrics"]["agreement"] == 1
    assert states["metrics"]["rows_extracted"] == 6


def test_transformers_says_the_next_token_id(verifier: Path) -> None:
    from transformers import AutoModelForImageTextToText

    model, report = AutoModelForImageTextToText.from_pretrained(
        verifier, dtype=torch.bfloat16, local_files_only=True, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tokens = torch.tensor([[5, 300, 7, 42, 900]])
    with torch.inference_mode():
        said = model(input_ids=tokens).logits.argmax(-1)
    assert said.tolist() == (tokens + 1).tolist()


def test_full_size_has_kimis_dimensions_and_names() -> None:
    real = json.loads(material("kimi-k2.5/config.json").read_text("utf-8"))
    config = shaped(real, 4, 16, tiny=False)
    theirs, ours = read_facts(real), read_facts(config)
    for name in ("hidden_size", "vocab_size", "num_heads", "head_dim", "intermediate_size", "rope"):
        assert getattr(ours, name) == getattr(theirs, name), name
    shapes = layer_shapes(config["text_config"], 1)
    layer = "language_model.model.layers.1"
    assert shapes[f"{layer}.self_attn.q_b_proj.weight"] == (12288, 1536)
    assert shapes[f"{layer}.self_attn.kv_b_proj.weight"] == (16384, 512)
    assert shapes[f"{layer}.mlp.shared_experts.down_proj.weight"] == (7168, 2048)


def test_another_config_is_refused(tmp_path: Path) -> None:
    config = json.loads((DEMO / "verifier" / "config.json").read_text("utf-8"))
    flat = {**config["text_config"], "model_type": "kimi_k2"}
    (tmp_path / "config.json").write_text(json.dumps(flat), "utf-8")
    with pytest.raises(VerifierError, match="model_type must be kimi_k25"):
        build(tmp_path, tmp_path / "out", LAYERS, EXPERTS, tiny=True, seed=0)
    assert not (tmp_path / "out").exists()
