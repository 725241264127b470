"""Verifiers: facts from any nesting, exact tensor names, stale indexes, and what is refused."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import case_input, case_json, demo_verifier, material
from safetensors.torch import save_file

from kimi_eagle.draft.architecture import decoder_config
from kimi_eagle.stages.train.spec import DraftArchitecture
from kimi_eagle.verifiers.facts import VerifierError, VerifierFacts, read_facts
from kimi_eagle.verifiers.folder import INDEX, SINGLE, open_folder, tensor_files

FLAT: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "rope_theta": 50000.0,
    "tie_word_embeddings": False,
}
YARN = {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096}
EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def _facts(**changed: Any) -> VerifierFacts:
    return read_facts({**FLAT, **changed})


def _folder(path: Path, config: dict[str, Any], shards: dict[str, list[str]], index: Any) -> Path:
    """A verifier of one-number tensors: file → names, and the index's weight_map."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    for file, names in shards.items():
        save_file({name: torch.ones(1) for name in names}, path / file)
    if index is not None:
        (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return path


def _single(path: Path, *names: str, **changed: Any) -> Path:
    return _folder(path, {**FLAT, **changed}, {SINGLE: list(names)}, None)


@pytest.mark.parametrize(
    ("name", "hidden", "layers", "vocab", "aux"),
    [
        ("kimi_k25_published_dims_config_only", 7168, 61, 163840, (2, 30, 58)),
        ("kimi_k25_tiny", 8, 8, 64, (2, 4, 5)),
    ],
)
def test_public_nested_configs_are_read_from_the_text_part(
    name: str, hidden: int, layers: int, vocab: int, aux: tuple[int, ...]
) -> None:
    facts = read_facts(case_json(f"verifiers/{name}/config.json"))  # EXT-19
    assert (facts.hidden_size, facts.num_layers, facts.vocab_size) == (hidden, layers, vocab)
    assert facts.aux_layers("default") == aux
    assert facts.embed_tokens == "language_model.model.embed_tokens.weight"


def test_the_real_config() -> None:  # EXT-19
    facts = read_facts(json.loads(material("kimi-k2.5/config.json").read_text()))
    assert (facts.hidden_size, facts.head_dim, facts.num_kv_heads) == (7168, 128, 64)
    assert (facts.bos_token_id, facts.eos_token_id, facts.pad_token_id) == (163584, 163585, 163839)
    assert facts.max_positions == 262144
    assert facts.rms_norm_eps == 1e-5
    assert (facts.rope["rope_type"], facts.rope["rope_theta"]) == ("yarn", 50000.0)
    assert facts.rope["factor"] == 64.0
    assert facts.lm_head == "language_model.lm_head.weight"


def test_numbers_outside_the_text_part_are_never_used() -> None:  # EXT-19
    vision = {"hidden_size": 1152, "vt_hidden_size": 1152, "num_hidden_layers": 27}
    config = {"model_type": "kimi_k25", "hidden_size": 1152, "vision_config": vision}
    assert read_facts({**config, "text_config": FLAT}).hidden_size == 8
    with pytest.raises(VerifierError, match=r"text_config\.hidden_size"):
        read_facts({**config, "text_config": {**FLAT, "hidden_size": None}})
    with pytest.raises(VerifierError, match="text_config"):
        read_facts(config)


@pytest.mark.parametrize("n", [61, 8, 7, 6, 4, 1])
def test_public_default_layers(n: int) -> None:  # MAN-14
    (vector,) = [v for v in case_json("masks/vectors.json")["aux_layers"] if v["n"] == n]
    facts = _facts(num_hidden_layers=n)
    if "ids" in vector:
        assert facts.aux_layers("default") == tuple(vector["ids"])
    else:
        with pytest.raises(VerifierError) as caught:
            facts.aux_layers("default")
        computed = vector["error"].split("]")[0].strip("[").replace(",", ", ")
        assert f"[{computed}]" in str(caught.value)


@pytest.mark.parametrize("layers", [(0, 3, 7), (1,), (2, 4, 5)])
def test_named_layers_that_fit(layers: tuple[int, ...]) -> None:
    assert _facts().aux_layers(layers) == layers


@pytest.mark.parametrize("layers", [(), (2, 2), (5, 4), (2, 8), (-1, 2), (2, 4, 5, 8)], ids=str)
def test_named_layers_that_do_not(layers: tuple[int, ...]) -> None:  # MAN-14
    with pytest.raises(VerifierError, match=r"distinct, ascending and within 0\.\.7"):
        _facts().aux_layers(layers)


@pytest.mark.parametrize(
    ("changed", "theta", "kind"),
    [
        pytest.param({}, 50000.0, "default", id="flat theta"),
        pytest.param({"rope_scaling": YARN}, 50000.0, "yarn", id="older pair"),
        pytest.param({"rope_scaling": None}, 50000.0, "default", id="null scaling"),
        pytest.param(
            {"rope_theta": None, "rope_parameters": {**YARN, "rope_theta": 7.0}},
            7.0,
            "yarn",
            id="newer form",
        ),
        pytest.param({"rope_parameters": YARN}, 50000.0, "yarn", id="newer form, theta beside"),
        pytest.param(
            {"rope_parameters": {"rope_theta": 7.0}, "rope_scaling": YARN, "rope_theta": None},
            7.0,
            "yarn",
            id="both forms",
        ),
        pytest.param({"rope_theta": None}, 10000.0, "default", id="none: the family's default"),
    ],
)
def test_theta_and_scaling_from_wherever_they_are(
    changed: dict[str, Any], theta: float, kind: str
) -> None:  # EXP-05
    rope = _facts(**changed).rope
    assert (rope["rope_theta"], rope["rope_type"]) == (theta, kind)
    assert "type" not in rope
    if kind == "yarn":
        assert (rope["factor"], rope["original_max_position_embeddings"]) == (64.0, 4096)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"rope_theta": "50000"}, "rope_theta"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": True}, "rope_theta"),
        ({"rope_scaling": "yarn"}, "rope_scaling"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "layer type"),
        ({"hidden_size": "8"}, "hidden_size"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"vocab_size": True}, "vocab_size"),
        ({"head_dim": "x"}, "head_dim"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
        ({"model_type": "gpt9"}, "gpt9"),
        ({"model_type": None}, "None"),
        ({"model_type": ["llama"]}, "llama"),
    ],
    ids=str,
)
def test_facts_that_are_no_facts_are_refused_by_name(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(VerifierError, match=says):
        _facts(**changed)


def test_the_draft_takes_rope_and_vocabulary_of_the_verifier() -> None:  # EXP-03, EXP-05
    facts = read_facts(case_json("verifiers/kimi_k25_tiny/config.json"))
    config = decoder_config(DraftArchitecture(), facts)
    assert config["vocab_size"] == 64
    assert config["rope_parameters"] == facts.rope
    assert config["rope_parameters"]["rope_theta"] == 50000.0


def test_a_head_without_a_stored_one_is_the_embedding(tmp_path: Path) -> None:  # TRN-01
    config = case_json("verifiers/tied_no_lm_head/config.json")
    folder = open_folder(_folder(tmp_path, config, {SINGLE: [EMBED, NORM]}, None))
    assert {plain: name for plain, (_, name) in folder.head_tensors().items()} == {
        EMBED: EMBED,
        NORM: NORM,
        HEAD: EMBED,
    }


def test_a_tied_head_is_the_embedding_even_where_another_is_stored(tmp_path: Path) -> None:
    folder = open_folder(_single(tmp_path, EMBED, NORM, HEAD, tie_word_embeddings=True))  # TRN-01
    assert folder.head_tensors()[HEAD][1] == EMBED


def test_an_untied_head_that_is_missing_is_refused(tmp_path: Path) -> None:  # TRN-02
    config = case_json("verifiers/untied_no_lm_head/config.json")
    folder = open_folder(_folder(tmp_path, config, {SINGLE: [EMBED, NORM]}, None))
    with pytest.raises(VerifierError, match=r"lm_head\.weight.*tie_word_embeddings: false"):
        folder.head_tensors()


def test_ties_are_not_assumed_where_nothing_says_so(tmp_path: Path) -> None:  # TRN-02
    config = {key: value for key, value in FLAT.items() if key != "tie_word_embeddings"}
    folder = open_folder(_folder(tmp_path, config, {SINGLE: [EMBED, NORM]}, None))
    with pytest.raises(VerifierError, match="lm_head"):
        folder.head_tensors()


ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def _public_index(name: str) -> dict[str, str]:
    weight_map = case_json(f"verifiers/{name}/model.safetensors.index.json")["weight_map"]
    return dict(weight_map)


def test_a_public_index_that_omits_a_shard_is_stale(tmp_path: Path) -> None:  # TRN-05
    index = _public_index("index_omits_shard2")
    _folder(tmp_path, FLAT, {ONE: [EMBED], TWO: [NORM, HEAD]}, index)
    with pytest.raises(VerifierError, match=rf"stale: {TWO} holds ({HEAD}|{NORM})"):
        open_folder(tmp_path).head_tensors()


def test_a_public_index_that_names_an_absent_tensor_is_stale(tmp_path: Path) -> None:  # TRN-05
    index = _public_index("index_names_absent_tensor")
    _folder(tmp_path, FLAT, {ONE: [EMBED, NORM]}, index)
    with pytest.raises(VerifierError, match=rf"stale: it says {HEAD} is in {ONE}"):
        open_folder(tmp_path).head_tensors()


WHOLE = {EMBED: ONE, NORM: TWO, HEAD: TWO}


@pytest.mark.parametrize(
    ("shards", "index", "says"),
    [
        pytest.param({ONE: [EMBED], TWO: [NORM]}, WHOLE, HEAD, id="shard lacks a tensor"),
        pytest.param({ONE: [EMBED, NORM], TWO: [HEAD]}, WHOLE, NORM, id="in another shard"),
        pytest.param({ONE: [EMBED]}, WHOLE, TWO, id="shard is missing"),
        pytest.param({ONE: [EMBED, "x"], TWO: [NORM, HEAD]}, WHOLE, "x", id="omits a tensor"),
        pytest.param(
            {ONE: [EMBED, HEAD], TWO: [NORM, HEAD]}, WHOLE, f"both hold {HEAD}", id="held twice"
        ),
        pytest.param(
            {ONE: [EMBED], TWO: [NORM, HEAD], "z.safetensors": [EMBED, "x"]},
            WHOLE,
            "z.safetensors holds x",
            id="a shard beside, of a known and an unknown tensor",
        ),
        pytest.param({ONE: [EMBED]}, {EMBED: f"../{ONE}"}, "stale", id="outside the folder"),
        pytest.param({ONE: [EMBED]}, {EMBED: 1}, "file name", id="no name"),
        pytest.param({ONE: [EMBED]}, {}, "no weight_map", id="empty"),
        pytest.param({ONE: [EMBED]}, None, "neither", id="no index"),
    ],
)
def test_indexes_that_disagree_with_their_shards_are_refused(
    tmp_path: Path, shards: Any, index: Any, says: str
) -> None:  # TRN-05
    _folder(tmp_path, FLAT, shards, index)
    with pytest.raises(VerifierError, match=says):
        tensor_files(tmp_path)


def test_a_second_copy_under_other_names_is_not_read(tmp_path: Path) -> None:
    shards = {ONE: [EMBED], TWO: [NORM, HEAD], "consolidated.safetensors": ["tok_embeddings"]}
    assert tensor_files(_folder(tmp_path, FLAT, shards, WHOLE)) == WHOLE


def test_names_are_exact_not_suffixes(tmp_path: Path) -> None:
    """A prediction layer has an embedding of its own, and every layer has norms."""
    others = ["model.layers.61.embed_tokens.weight", "model.layers.0.norm.weight"]
    folder = open_folder(_single(tmp_path, *others, "model.layers.61.shared_head.head.weight"))
    with pytest.raises(VerifierError, match=r"no tensor model\.embed_tokens\.weight"):
        folder.locate(EMBED)


def test_another_name_is_answered_with_the_nearest(tmp_path: Path) -> None:  # TRN-06
    stored = ["backbone.embeddings.weight", "backbone.norm_f.weight", HEAD]
    with pytest.raises(VerifierError, match=r"nearest are .*backbone\.embeddings\.weight"):
        open_folder(_single(tmp_path, *stored)).head_tensors()


def test_a_public_unknown_architecture_is_answered_with_what_it_holds(tmp_path: Path) -> None:
    config = case_json("verifiers/backbone_embeddings/config.json")  # TRN-06
    layer = "backbone.layers.0.norm.weight"
    names = ["backbone.embeddings.weight", "backbone.norm_f.weight", HEAD, layer]
    with pytest.raises(VerifierError, match="nemotron_h") as caught:
        open_folder(_folder(tmp_path, config, {SINGLE: names}, None))
    assert "backbone.embeddings.weight" in str(caught.value)
    assert layer not in str(caught.value)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "not a readable"),
        (b"\x00" * 7, "not a readable"),
        (struct.pack("<Q", 2**40) + b"{}", "not a readable"),
        (struct.pack("<Q", 2) + b"[]", "not a readable"),
        (struct.pack("<Q", 7) + b'{"a":1}', "not a readable"),
        (struct.pack("<Q", 8) + b'{"a":{}}', "not a readable"),
        (struct.pack("<Q", 29) + b'{"a":{"data_offsets":[0,"4"]}}'[:29], "not a readable"),
        (struct.pack("<Q", 28) + b'{"a":{"data_offsets":[0,4]}}', "truncated or altered"),
        (struct.pack("<Q", 2) + b"{}x", "truncated or altered"),
    ],
)
def test_damaged_weights_are_refused(tmp_path: Path, data: bytes, says: str) -> None:
    (tmp_path / SINGLE).write_bytes(data)
    with pytest.raises(VerifierError, match=says):
        tensor_files(tmp_path)


@pytest.mark.parametrize("data", [None, b"", b"[]", b"\xff", b"{"])
def test_a_folder_without_a_readable_config_is_refused(tmp_path: Path, data: bytes | None) -> None:
    if data is not None:
        (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(VerifierError, match=r"config\.json"):
        open_folder(tmp_path)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:  # CLI-04
    with pytest.raises(VerifierError, match="does not exist"):
        open_folder(tmp_path / "moonshotai" / "Kimi-K2.5")


def test_a_byte_of_the_template_is_part_of_the_tokenizer(tmp_path: Path) -> None:  # PRE-33
    folder = open_folder(_single(tmp_path, EMBED))
    assert folder.part("tokenizer") == ("config.json",)
    (tmp_path / "chat_template.jinja").write_text("x")
    (tmp_path / "README.md").write_text("x")
    assert open_folder(tmp_path).part("tokenizer") == ("chat_template.jinja", "config.json")
    assert "README.md" not in open_folder(tmp_path).files


def test_the_demo_verifier_has_the_tensors_of_training() -> None:
    folder = open_folder(demo_verifier())
    names = {name for _, name in folder.head_tensors().values()}
    assert names == {folder.facts.embed_tokens, folder.facts.norm, folder.facts.lm_head}
    assert all(name.startswith("language_model.") for name in names)


def test_a_public_layer_count_that_is_too_small(tmp_path: Path) -> None:  # MAN-14
    for name in ("one_layer", "four_layers", "six_layers"):
        shutil.copy(case_input(f"verifiers/{name}/config.json"), tmp_path / "config.json")
        with pytest.raises(VerifierError, match="do not fit"):
            open_folder(tmp_path).facts.aux_layers("default")
