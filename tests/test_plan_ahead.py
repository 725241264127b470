"""`plan` where there is nothing but a verifier's config.json: estimates, and what is not known."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import DEMO, LIGHT, WITH_STATES, Project
from test_forecast import TRAINED

from kimi_eagle.verifiers.facts import read_facts
from kimi_eagle.verifiers.folder import open_folder, tensor_files
from kimi_eagle.verifiers.weights import weight_bytes

MANIFESTS = Path(__file__).parent.parent / "manifests"
MATERIAL = Path(__file__).parents[2] / "shared" / "material" / "kimi-k2.5"
KIMI = pytest.mark.skipif(not MATERIAL.is_dir(), reason=f"{MATERIAL} is not on this machine")
STATES_OF_TOKEN = 4 * 7168 * 2


@pytest.fixture
def ahead(project: Project) -> Project:
    """A verifier of which there is the config.json, and no data."""
    project.write(TRAINED)
    for path in (project.folder / "verifier").iterdir():
        if path.name != "config.json":
            path.unlink() if path.is_file() else shutil.rmtree(path)
    project.chats.unlink()
    return project


def test_what_is_not_there_hinders_no_plan(ahead: Project) -> None:
    answer = ahead.cli("plan", str(ahead.manifest), "--json")
    assert answer.code == 0, answer.err
    found = {stage["name"]: stage for stage in answer.json["stages"]}
    assert {stage["action"] for stage in found.values()} == {"depends"}
    assert {stage["key"] for stage in found.values()} == {None}, "none is that of the whole"
    assert "no weights in" in found["head"]["reasons"][0]
    assert found["rows"]["reasons"][0].startswith("no tokenizer in")
    assert found["rows"]["reasons"][1].startswith("no file at")
    assert len(answer.json["lacking"]) == 3
    assert "forecast" not in found["states"]
    assert (
        "writes 1,024 bytes a token; how long it takes is not known" in found["states"]["unknown"]
    )
    assert "--tokens rows=N" in found["draft"]["unknown"]
    assert not ahead.objects()
    assert ahead.cli("runs", "--json").json == {"runs": []}
    # a submit wants it all, as ever
    assert ahead.submit().code == 2


def test_what_is_expected_can_be_said(ahead: Project) -> None:
    said = ("--tokens", "rows=1e6", "--rows", "rows=5000", "--rate", "states=1000")
    found = ahead.plan(*said, "--rate", "draft=500", "--set", "stages.states.resources.gpus=2")
    forecast = found["states"]["forecast"]
    assert (forecast["tokens"], forecast["rows"]) == (1_000_000, 5000)
    assert forecast["bytes"] == 1_000_000 * (4 * 128 * 2 + 4) + 5000 * 188
    assert (forecast["estimate"], forecast["basis"]) == (True, "as given")
    assert found["states"]["expected"]["seconds"] == 1000
    assert found["states"]["expected"]["gpu_hours"] == pytest.approx(2000 / 3600)
    assert found["draft"]["expected"]["seconds"] == 3 * 1_000_000 / 500
    assert found["rows"]["writes_bytes"] == 5 * 1_000_000 + 25 * 5000
    # rows alone bound the tokens
    bound = ahead.plan("--rows", "rows=5000")["states"]["forecast"]
    assert bound["tokens"] == 5000 * 512
    assert "if each has all of 512 tokens" in bound["basis"]


def test_it_can_be_said_in_the_manifest_and_is_part_of_nothing(project: Project) -> None:
    def digest() -> str:
        return str(project.cli("validate", str(project.manifest), "--json").json["digest"])

    project.write(TRAINED)
    before, unplanned = project.plan(), digest()
    figures = "{rates: {states: 1e5, draft: 50}, tokens: {rows: 6e6}, gpu_memory: 141GB}"
    project.write(f"{TRAINED}plan: {figures}\n")
    after = project.plan()
    keys = [{name: stage["key"] for name, stage in found.items()} for found in (before, after)]
    assert keys[0] == keys[1]
    assert digest() == unplanned
    assert after["states"]["forecast"]["tokens"] == 6_000_000
    assert after["states"]["expected"]["seconds"] == 60
    said = project.plan("--rate", "states=2e5")["states"]["expected"]
    assert said["seconds"] == 30, "an option counts for more"


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("{rates: {staets: 5}}", "plan.rates.staets: there is no stage 'staets'"),
        ("{rates: {states: 0}}", "plan.rates.states"),
        ("{gpu_memory: big}", "plan.gpu_memory: 'big' is no size"),
    ],
)
def test_what_is_said_wrongly_is_told_at_its_place(
    project: Project, plan: str, message: str
) -> None:
    project.write(WITH_STATES + f"plan: {plan}\n")
    answer = project.cli("plan", str(project.manifest))
    assert answer.code == 2
    assert message in answer.err


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--tokens", "rwos=5", "there is no such stage"),
        ("--rows", "rows=none", "is not STAGE=N"),
        ("--gpu-memory", "big", "is no size"),
    ],
)
def test_an_option_that_says_nothing_is_bad_input(
    project: Project, option: str, value: str, said: str
) -> None:
    answer = project.cli("plan", str(project.manifest), option, value)
    assert answer.code == 2
    assert said in answer.err


def test_a_limit_on_a_source_is_reckoned_with(project: Project) -> None:
    project.write(WITH_STATES)
    whole = project.plan()["states"]["forecast"]
    half = project.plan("--set", "stages.rows.sources.0.limit=5")["states"]["forecast"]
    assert half["rows"] == 5
    assert half["tokens"] == pytest.approx(whole["tokens"] / 2, rel=0.15)


def test_weights_that_do_not_fit_their_gpus_are_told(project: Project) -> None:
    project.write(WITH_STATES.replace("{kind: transformers}", "{kind: vllm, tensor_parallel: 2}"))
    size = sum(
        (project.folder / "verifier" / name).stat().st_size
        for name in set(tensor_files(project.folder / "verifier").values())
    )
    found = project.plan("--gpu-memory", "1MB")["states"]["weights"]
    assert (found["gpus"], found["bytes"], found["usable_bytes"]) == (2, size, 900_000)
    assert found["basis"] == "its files"
    assert "its weights do not fit" in found["trouble"]
    assert project.plan("--gpu-memory", "80GiB")["states"]["weights"]["trouble"] is None
    unknown = project.cli("plan", str(project.manifest)).err
    assert "not known (--gpu-memory)" in unknown or "that the engine may use" in unknown
    project.write(LIGHT)
    assert "weights" not in project.plan()["rows"]


def test_weights_are_estimated_from_the_config_as_they_are_stored() -> None:
    folder = open_folder(DEMO / "verifier")
    config = json.loads((DEMO / "verifier" / "config.json").read_text("utf-8"))
    stored = sum(path.stat().st_size for path in (DEMO / "verifier").glob("*.safetensors"))
    found = weight_bytes(folder.facts, config)
    assert found == pytest.approx(stored, rel=0.05)


def test_weights_stored_in_a_way_that_is_not_known_have_no_size() -> None:
    config = json.loads((DEMO / "verifier" / "config.json").read_text("utf-8"))
    strange = {**config, "quantization_config": {"quant_method": "runes"}}
    assert "quantization_config" not in config["text_config"], "which would count first"
    assert weight_bytes(read_facts(strange), strange) is None


# Kimi-K2.5 itself, by its config.json alone


def kimi(tmp_path: Path, *arguments: str) -> tuple[dict[str, dict[str, Any]], dict[str, Any], str]:
    (tmp_path / "Kimi-K2.5").mkdir()
    shutil.copyfile(MATERIAL / "config.json", tmp_path / "Kimi-K2.5" / "config.json")
    project = Project(tmp_path)
    project.write((MANIFESTS / "kimi-k2.5.yaml").read_text("utf-8"))
    given = ("plan", str(project.manifest), "--set", "verifier.path=Kimi-K2.5", *arguments)
    answer = project.cli(*given, "--json")
    assert answer.code == 0, answer.err
    said = project.cli(*given)
    return {stage["name"]: stage for stage in answer.json["stages"]}, answer.json, said.err


@KIMI
def test_kimi_is_planned_by_its_config_alone(tmp_path: Path) -> None:
    """600,000 rows of 10,000 tokens, as a public run had them."""
    found, whole, said = kimi(
        tmp_path,
        *("--rows", "rows=6e5", "--tokens", "rows=6e9", "--gpu-memory", "141GB"),
        *("--rate", "states=24000", "--rate", "draft=50000"),
    )
    states = found["states"]["forecast"]
    assert states["bytes"] == pytest.approx(6e9 * STATES_OF_TOKEN, rel=0.001)
    assert "do not fit: about 6,000,000,000 tokens in about 600,000 rows" in states["trouble"]
    assert found["states"]["expected"]["gpu_hours"] == pytest.approx(8 * 6e9 / 24000 / 3600)
    assert found["draft"]["expected"]["tokens"] == 3 * 6e9
    # Its 64 files hold 554.3 GiB, a vision tower of 0.9 GB among them.
    weights = found["states"]["weights"]
    assert weights["bytes"] == pytest.approx(554.3 * 2**30 - 0.9e9, rel=0.001)
    assert weights["bytes_per_gpu"] == pytest.approx(74.3e9, rel=0.01)
    assert weights["trouble"] is None
    assert found["head"]["writes_bytes"] == 2 * 163840 * 7168 * 2 + 7168 * 2
    assert whole["disk"]["states_bytes"] == states["bytes"]
    assert "(an estimate from config.json)" in said
    assert said.rstrip().endswith("Nothing was started.")


@KIMI
def test_kimi_on_smaller_gpus_does_not_fit(tmp_path: Path) -> None:
    found, _, said = kimi(tmp_path, "--gpu-memory", "80GB")
    for stage in ("states", "score"):
        assert "about 74.3 GB of weights on each of 8 GPUs" in found[stage]["weights"]["trouble"]
    assert "writes 57,344 bytes a token" in said
