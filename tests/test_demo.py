"""The main job, end to end, with the real engines: slow, run by `make test`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from command import by_name, kimi_eagle

ROOT = Path(__file__).resolve().parent.parent
MANIFESTS = ROOT / "manifests"

pytestmark = pytest.mark.slow


def test_the_demo_trains_a_draft_that_serving_confirms(demo: dict[str, Any]) -> None:
    metrics = demo["score"]["metrics"]
    assert metrics["acceptance_length"] >= 2.0
    assert metrics["outputs_identical"] is True
    assert metrics["draft_tokens"] == 3


def test_the_demo_again_executes_nothing(store: Path, demo: dict[str, Any]) -> None:
    again = by_name(kimi_eagle(store, "submit", str(MANIFESTS / "demo.yaml")))
    assert {stage["disposition"] for stage in again.values()} == {"reused"}
    assert again["states"]["metrics"]["rows_extracted"] == 0
    assert {n: s["outputs"] for n, s in again.items()} == {n: s["outputs"] for n, s in demo.items()}


def test_our_count_of_accepted_tokens_agrees_with_the_engines(demo: dict[str, Any]) -> None:
    """vLLM counts tokens past the end of a turn as accepted; we do not, so ours is never above."""
    metrics = demo["score"]["metrics"]
    counters = metrics["engine_counters"]
    drafts = counters["vllm:spec_decode_num_drafts"]
    theirs = 1 + counters["vllm:spec_decode_num_accepted_tokens"] / drafts
    assert metrics["draft_steps"] == drafts
    assert theirs - 0.25 < metrics["acceptance_length"] <= theirs


def test_ten_conversations_split_eight_and_two(store: Path, first: dict[str, Any]) -> None:
    from kimi_eagle.rows.table import TRAIN, VALIDATE, load_rows

    digest = first["rows"]["outputs"]["rows"]
    rows = load_rows(store / "objects" / digest[:2] / digest)
    apart = {int(rows.record[row]) for row in rows.indices(VALIDATE)}
    assert len(apart) == 2
    assert len({int(rows.record[row]) for row in rows.indices(TRAIN)}) == 8


def test_rows_that_are_held_are_not_extracted_again(
    store: Path, demo: dict[str, Any], tmp_path: Path
) -> None:
    """Sources in another order, another split, fewer rows: the verifier is not even started."""
    manifest = yaml.safe_load((MANIFESTS / "demo.yaml").read_text("utf-8"))
    manifest["verifier"]["path"] = str(ROOT / "kimi_eagle/demo/verifier")
    rows = manifest["stages"]["rows"]
    rows["sources"] = [
        {"path": str(ROOT / "kimi_eagle/demo/chats_sharegpt.jsonl"), "format": "sharegpt"},
        {"path": str(ROOT / "kimi_eagle/demo/chats.jsonl"), "limit": 100},
    ]
    rows["val_ratio"] = 0.3
    manifest["stages"] = {"rows": rows, "states": manifest["stages"]["states"]}
    path = tmp_path / "other.yaml"
    path.write_text(yaml.safe_dump(manifest), "utf-8")
    other = by_name(kimi_eagle(store, "submit", str(path)))
    assert other["states"]["disposition"] == "executed"
    assert other["states"]["metrics"]["rows"] > 100
    assert other["states"]["metrics"]["rows_extracted"] == 0
    assert other["states"]["outputs"] != demo["states"]["outputs"]


def test_only_lr_changed_runs_training_and_what_follows(
    store: Path, small: Path, first: dict[str, Any]
) -> None:
    planned = by_name(kimi_eagle(store, "plan", str(small), "--set", "stages.draft.lr=1e-4"))
    actions = {name: stage["action"] for name, stage in planned.items()}
    assert actions == {
        "head": "reuse",
        "rows": "reuse",
        "states": "reuse",
        "vocab": "reuse",
        "draft": "run",
        "score": "depends",
        "release": "depends",
    }
    assert planned["draft"]["reasons"] == ["lr 3e-05 → 0.0001"]


def test_two_trainings_share_one_extraction(
    store: Path, small: Path, first: dict[str, Any], tmp_path: Path
) -> None:
    manifest = yaml.safe_load(small.read_text("utf-8"))
    draft = manifest["stages"]["draft"]
    manifest["stages"] = {
        **{name: manifest["stages"][name] for name in ("head", "rows", "states", "vocab")},
        "draft": draft,
        "other": {**draft, "seed": 1, "epochs": 1},
    }
    path = tmp_path / "two.yaml"
    path.write_text(yaml.safe_dump(manifest), "utf-8")
    stages = by_name(kimi_eagle(store, "submit", str(path)))
    assert stages["states"]["disposition"] == "reused"
    assert stages["draft"]["disposition"] == "reused"
    assert stages["other"]["disposition"] == "executed"
    assert stages["other"]["outputs"] != stages["draft"]["outputs"]


def test_lineage_goes_down_to_the_files(store: Path, demo: dict[str, Any]) -> None:
    checkpoint = demo["draft"]["outputs"]["checkpoint"]
    found = kimi_eagle(store, "lineage", checkpoint, "--up")
    kinds: dict[str, int] = {}
    for node in found["nodes"]:
        kinds[node["kind"]] = kinds.get(node["kind"], 0) + 1
        assert len(node["digest"]) == 64
    assert {"checkpoint", "rows", "states", "vocab", "head", "verifier", "tokenizer"} <= set(kinds)
    assert kinds["source"] == 2
    weights = {n["label"] for n in found["nodes"] if n["kind"] == "file"}
    assert "model-00001-of-00002.safetensors" in weights
    made = {(edge["to"], edge["stage"]) for edge in found["edges"]}
    assert (checkpoint, "draft") in made


def test_a_release_loads_from_its_folder_alone(store: Path, demo: dict[str, Any]) -> None:
    """vLLM and speculators read config.json; nothing in it points to this machine."""
    digest = demo["release"]["outputs"]["release"]
    folder = store / "objects" / digest[:2] / digest
    text = (folder / "config.json").read_text("utf-8")
    config = json.loads(text)
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["draft_vocab_size"] == 512
    rope = config["transformer_layer_config"]["rope_parameters"]
    assert rope["rope_theta"] == 50000.0
    assert rope["rope_type"] == "yarn"
    assert str(store) not in text
    assert str(ROOT) not in text
    card = (folder / "README.md").read_text("utf-8")
    assert yaml.safe_load(card.split("---")[1])["pipeline_tag"] == "text-generation"


def test_a_gate_that_is_not_met_releases_nothing(
    store: Path, small: Path, first: dict[str, Any]
) -> None:
    outcome = kimi_eagle(
        store,
        "submit",
        str(small),
        "--set",
        "stages.release.gate.min_acceptance_length=3.99",
        code=1,
    )
    release = by_name(outcome)["release"]
    assert release["disposition"] == "failed"
    assert "acceptance length" in release["error"]
    assert release["outputs"] == {}
