"""`init`: a first manifest for a verifier's folder, which validates and plans as it is."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from cases import DEMO_VERIFIER, material
from conftest import DEMO, Answer, Project

from kimi_eagle.manifest.load import load
from kimi_eagle.starter import manifest_name

# As `make smollm2` makes it: flat, tied, no rope scaling.
SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """Conversations and questions where `init` expects them, and no manifest yet."""
    (tmp_path / "chats").mkdir()
    shutil.copyfile(DEMO / "first10.jsonl", tmp_path / "chats" / "some.jsonl")
    shutil.copyfile(DEMO / "prompts.jsonl", tmp_path / "prompts.jsonl")
    return Project(tmp_path)


def config_only(project: Project, config: dict[str, Any]) -> Path:
    folder = project.folder / "verifier"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def init(project: Project, folder: Path, *arguments: str, code: int = 0) -> Answer:
    answer = project.cli("init", str(folder), "-o", str(project.manifest), *arguments)
    assert answer.code == code, answer.err
    return answer


def written(project: Project) -> Any:
    """The manifest that was written, once it validates and plans."""
    validated = project.cli("validate", str(project.manifest), "--json")
    assert validated.code == 0, validated.err
    assert validated.json["verifier_checked"]
    stages = project.plan()
    manifest = load(project.manifest).manifest
    # Of a config.json alone no key is known.
    whole = any((project.folder / manifest.verifier.path).glob("*.safetensors"))
    assert {name: stage["action"] for name, stage in stages.items()} == {
        **dict.fromkeys(["head", "rows"], "run" if whole else "depends"),
        **dict.fromkeys(["states", "vocab", "draft", "score", "release"], "depends"),
    }
    return manifest


def test_the_demos_verifier(project: Project) -> None:
    found = init(project, DEMO_VERIFIER, "--json").json
    assert found["status"] == "written"
    assert found["found"]["model_type"] == "kimi_k25, config in `text_config`"
    assert found["found"]["chat template"] == "chat_template.jinja, writes <think>"
    assert [line.split(":")[0] for line in found["to_do"]] == [
        "stages.rows.sources",
        "stages.score.prompts",
        "stages.release",
    ]
    stages = written(project).stages
    assert stages["states"].layers == (2, 4, 5)
    assert (stages["vocab"].size, stages["rows"].max_length) == (512, 1024)
    text = project.manifest.read_text("utf-8")
    assert text.count("FILL IN") == 3
    assert "thinking: auto" in text
    assert text.endswith("\n")


def test_smollm2s_shape(project: Project) -> None:
    folder = config_only(project, SMOLLM2)
    found = init(project, folder, "--json").json
    assert "tied" in found["found"]["vocabulary"]
    assert "lm_head" not in found["found"]["tensors"]
    stages = written(project).stages
    assert stages["states"].layers == (2, 15, 27)
    assert stages["vocab"].size == 16384
    assert "thinking" not in project.manifest.read_text("utf-8")


def test_the_real_config_alone(project: Project) -> None:
    folder = config_only(project, json.loads(material("kimi-k2.5/config.json").read_text()))
    found = init(project, folder, "--json").json
    missing = [line.split(":")[0].split(" (")[0] for line in found["to_do"][:3]]
    assert missing == [
        "there are no weights",
        "there is no tokenizer",
        "there is no chat template",
    ]
    stages = written(project).stages
    assert stages["states"].layers == (2, 30, 58)
    assert stages["states"].engine.tensor_parallel == 8
    assert stages["vocab"].size == 32000
    assert "57,344 bytes a token" in project.manifest.read_text("utf-8")


def test_the_real_tokenizer(project: Project) -> None:
    found = init(project, material("kimi-k2.5"), "--json").json
    assert found["found"]["tokenizer"] == "tiktoken.model"
    assert found["found"]["weights"] == "none here"


def test_what_was_given_needs_no_filling_in(project: Project) -> None:
    shutil.copyfile(DEMO / "first10.jsonl", project.folder / "more.jsonl")
    given = [str(project.folder / "chats"), str(project.folder / "more.jsonl")]
    sources = [part for path in given for part in ("--source", path)]
    prompts = str(project.folder / "prompts.jsonl")
    answer = init(project, DEMO_VERIFIER, *sources, "--prompts", prompts, "--name", "two: words")
    assert "stages.rows" not in answer.out
    assert project.manifest.read_text("utf-8").count("FILL IN") == 1  # the licence
    manifest = written(project)
    assert manifest.name == "two-words"
    assert [source.path for source in manifest.stages["rows"].sources] == given


def test_paths_are_seen_from_the_manifest(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = project.folder / "a 'b' \"c\": {d} #教师"
    shutil.copytree(DEMO_VERIFIER, odd)
    (project.folder / "below").mkdir()
    monkeypatch.chdir(project.folder)
    arguments = ["-o", "below/m.yaml", "--source", "*/some.jsonl", "--prompts", "prompts.jsonl"]
    assert project.cli("init", odd.name, *arguments).code == 0
    found = load(Path("below/m.yaml")).manifest
    assert found.verifier.path == f"../{odd.name}"
    assert [item.path for item in found.stages["rows"].sources] == ["../*/some.jsonl"]
    assert project.cli("plan", "below/m.yaml").code == 0


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5, 6, 7, 200])
def test_any_number_of_layers_gives_aux_layers_that_fit(project: Project, layers: int) -> None:
    init(project, config_only(project, {**SMOLLM2, "num_hidden_layers": layers}))
    found = written(project).stages["states"].layers
    assert 1 <= len(found) <= 3


@pytest.mark.parametrize(
    ("weights", "gpus"), [(10**9, 1), (60 * 10**9, 2), (554 * 10**9, 8), (0, 1)]
)
def test_the_weights_say_how_many_gpus(project: Project, weights: int, gpus: int) -> None:
    folder = config_only(project, {**SMOLLM2, "num_attention_heads": 64})
    if weights:
        with (folder / "model.safetensors").open("wb") as file:
            file.truncate(weights)  # a file with a hole: it has the size, not the bytes
    found = init(project, folder, "--json").json
    assert load(project.manifest).manifest.stages["states"].engine.tensor_parallel == gpus
    assert any("weights" in line for line in found["to_do"]), "a hole holds no tensors"


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("tokenizer.json", '{"model": {"vocab": {"a": 70000}}}', "has the id 70000"),
        ("tokenizer.json", "no JSON", "holds no token ids"),
        ("tiktoken.model", "", "no tokenizer_config.json that names TikTokenTokenizer"),
        ("model.safetensors.index.json", "{}", "the weights are not whole"),
    ],
)
def test_what_is_wrong_with_the_folder_is_told(
    project: Project, name: str, text: str, told: str
) -> None:
    folder = config_only(project, SMOLLM2)
    (folder / name).write_text(text)
    assert told in init(project, folder).out


def test_a_tokenizer_whose_vocabulary_is_a_list_is_counted(project: Project) -> None:
    folder = config_only(project, {**SMOLLM2, "vocab_size": 3})
    vocab = [["a", 0.0], ["b", 0.0], ["c", 0.0], ["d", 0.0]]  # a unigram model's
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
    assert "has the id 3" in init(project, folder).out


# Refusals


def refused(answer: Answer, told: str) -> None:
    assert told in answer.err
    assert len(answer.err.splitlines()) == 1


def test_a_file_that_is_there_is_left_alone_unless_forced(project: Project) -> None:
    project.write("mine")
    refused(init(project, DEMO_VERIFIER, code=2), "--force to replace it")
    assert project.manifest.read_text() == "mine"
    init(project, DEMO_VERIFIER, "--force")
    assert yaml.safe_load(project.manifest.read_text("utf-8"))["version"] == 1


def test_a_folder_is_no_place_for_a_manifest(project: Project) -> None:
    project.manifest.mkdir()
    for force in ([], ["--force"]):
        refused(init(project, DEMO_VERIFIER, *force, code=2), "is there already")


def test_what_is_no_verifier_is_refused(project: Project) -> None:
    refused(init(project, project.folder / "none", code=2), "does not exist")
    refused(init(project, project.folder / "chats", code=2), "config.json does not exist")
    folder = config_only(project, {**SMOLLM2, "model_type": "gpt2"})
    refused(init(project, folder, code=2), "model_type 'gpt2' is not known")
    refused(init(project, folder, "--json", code=2), "model_type 'gpt2' is not known")
    assert not project.manifest.exists()


def test_a_name_that_no_manifest_can_hold_is_refused(project: Project) -> None:
    folder = project.folder / os.fsdecode(b"verifier-\xff")
    shutil.copytree(DEMO_VERIFIER, folder)
    answer = init(project, folder, code=2)
    assert "no UTF-8" in answer.err


@pytest.mark.parametrize(
    ("text", "name"),
    [("Kimi-K2.5", "Kimi-K2.5"), ("..a b/c", "a-b-c"), ("教师", "draft"), ("x" * 300, "x" * 100)],
)
def test_names(text: str, name: str) -> None:
    assert manifest_name(text) == name
