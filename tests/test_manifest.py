"""Manifests: what they may say, what is refused where, and what makes two of them the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from conftest import DEMO

from kimi_eagle.app import validate
from kimi_eagle.manifest.document import parse
from kimi_eagle.manifest.load import LoadedManifest, load
from kimi_eagle.manifest.model import json_schema, resolved
from kimi_eagle.manifest.problem import ManifestError
from kimi_eagle.stages.catalog import KINDS
from kimi_eagle.stages.contract import Reference
from kimi_eagle.verifiers.facts import VerifierError, VerifierFacts, read_facts

BASE = """\
version: 1
name: base
verifier: {path: ./verifier, revision: "a1b2c3d"}
stages:
  head: {kind: head}
  rows: {kind: prepare, sources: [{path: chats.jsonl}], max_length: 64, val_ratio: 0.2, seed: 42}
  states: {kind: extract, rows: rows, layers: [2, 4, 5], dtype: bfloat16}
  vocab: {kind: vocab, rows: rows, size: 16}
  draft: {kind: train, head: head, states: states, vocab: vocab, lr: 1.0e-5, epochs: 3}
  score: {kind: evaluate, checkpoint: draft, prompts: {path: prompts.jsonl}, draft_tokens: 3}
  release: {kind: export, checkpoint: draft, evaluation: score}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.yaml"


def read(path: Path, text: str | bytes = BASE, *overrides: str) -> LoadedManifest:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return load(path, overrides)


def refusals(path: Path, text: str | bytes, *overrides: str) -> list[str]:
    """One line a problem, the file's path left out."""
    with pytest.raises(ManifestError) as caught:
        read(path, text, *overrides)
    return str(caught.value).replace(str(path), "run.yaml").splitlines()


def swap(old: str, new: str) -> str:
    assert BASE.count(old) == 1
    return BASE.replace(old, new)


@pytest.mark.parametrize(
    "written", ["1e-5", "1E-5", "1.0e-5", "0.00001", "+1.0E-05", "!!float 1e-5"]
)
def test_a_number_is_the_same_however_it_is_written(path: Path, written: str) -> None:
    # MAN-01
    found = read(path, swap("1.0e-5", written))
    lr = resolved(found.manifest)["stages"]["draft"]["lr"]
    assert (type(lr), lr) == (float, 1e-05)
    assert found.digest == read(path).digest


def test_a_whole_number_is_a_number(path: Path) -> None:
    one, other = read(path, swap("lr: 1.0e-5", "lr: 1")), read(path, swap("lr: 1.0e-5", "lr: 1.0"))
    assert one.digest == other.digest


def case(old: str, new: str, *expected: str) -> Any:
    return pytest.param(swap(old, new), expected, id=new.strip()[:40])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # MAN-02
        case("epochs: 3", "epochs: 3, epochs: 30", "9:89: stages.draft.epochs: repeated", "line 9"),
        case(
            "  score:", "  vocab: {kind: vocab, rows: rows, size: 32}\n  score:", "10:3", "line 8"
        ),
        # MAN-04
        case("name: base", "name: no", "2:7: name: `no` is false to some", "quote it", "'no'"),
        case("name: base", "name: off", "2:7: name:", "quote it"),
        case("name: base", "name: false", "2:7: name: must be text (found false)"),
        case("name: base", "name: 12", "2:7: name: must be text (found 12); quote it"),
        # MAN-05
        case(
            "epochs: 3", "epochs: true", "stages.draft.epochs: must be a whole number (found true)"
        ),
        case("epochs: 3", "epochs: 2.5", "stages.draft.epochs: must be a whole number (found 2.5)"),
        case("epochs: 3", "epochs: '3'", "stages.draft.epochs: must be a whole number (found '3')"),
        case("epochs: 3", "epochs: 0", "stages.draft.epochs: must be at least 1 (found 0)"),
        case("[2, 4, 5]", "[2, true, 5]", "stages.states.layers.1: must be a whole number", "true"),
        case("1.0e-5", "true", "stages.draft.lr: must be a number (found true)"),
        case("1.0e-5", ".nan", "stages.draft.lr: not a finite number"),
        case("version: 1", "version: true", "version: must be 1 (found true)"),
        case("version: 1", "version: 2", "version: must be 1 (found 2)"),
        # MAN-06, CLI-03
        case("size: 16", "sise: 16", "8:36: stages.vocab.sise: unknown key", "did you mean 'size'"),
        case("epochs: 3", "epoch: 3", "stages.draft.epoch: unknown key (found 3)", "'epochs'"),
        case("verifier: {", "verifer: {", "3:1: verifer: unknown key", "did you mean 'verifier'"),
        # MAN-09
        case(
            '"a1b2c3d"', "1234567", "3:40: verifier.revision: must be text", "1234567", "quote it"
        ),
        case('"a1b2c3d"', "0123456", "3:40: verifier.revision:", "0123456", "quote it"),
        # MAN-13
        case("seed: 42", "seed: 12:30", "stages.rows.seed: must be a whole number (found '12:30')"),
        case("seed: 42", "seed: 1:30:00", "must be a whole number (found '1:30:00')"),
        # References
        case("rows: rows, layers", "rows: row, layers", "7:33: stages.states.rows", "'rows'?"),
        case("rows: rows, layers", "rows: head, layers", "or import_rows; 'head' is of kind head"),
        case("rows: rows, layers", "rows: nothing, layers", "or regenerate or import_rows: rows"),
        case("kind: prepare", "kind: prepair", "6:16: stages.rows.kind: must be", "'prepare'?"),
        case("kind: prepare", "knd: prepare", "stages.rows.kind: is required"),
        case("  draft:", "  Draft:", "9:3: stages.Draft: the key must match the pattern"),
        case("evaluation: score", "evaluation: draft", "must name a stage of kind evaluate"),
        # MAN-18
        case("  vocab: {", "\tvocab: {", "8:1: stages", "indented with a tab"),
        case("version: 1\n", "version: 1\n---\n", "2:1", "second document"),
    ],
)
def test_a_fault_is_refused_at_its_place(path: Path, text: str, expected: tuple[str, ...]) -> None:
    lines = refusals(path, text)
    fitting = [line for line in lines if all(part in line for part in expected)]
    assert len(fitting) == 1, lines
    assert fitting[0].startswith("run.yaml:")


@pytest.mark.parametrize("text", ["695e0514", "'1234567'", "'0123456'"])
def test_a_revision_is_that_exact_text(path: Path, text: str) -> None:
    # MAN-09
    found = read(path, swap('"a1b2c3d"', text))
    assert found.manifest.verifier.revision == text.strip("'")


def test_byte_order_mark_and_windows_line_ends_change_nothing(path: Path) -> None:
    # MAN-11
    plain = read(path)
    for data in (b"\xef\xbb\xbf" + BASE.encode(), BASE.replace("\n", "\r\n").encode()):
        found = read(path, data)
        assert resolved(found.manifest) == resolved(plain.manifest)
        assert found.digest == plain.digest


def facts_of(layers: int) -> VerifierFacts:
    config = json.loads((DEMO / "verifier" / "config.json").read_text("utf-8"))
    config["text_config"]["num_hidden_layers"] = layers
    return read_facts(config)


@pytest.mark.parametrize(("layers", "ids"), [(61, (2, 30, 58)), (8, (2, 4, 5)), (7, (2, 3, 4))])
def test_default_layers_follow_the_depth(layers: int, ids: tuple[int, ...]) -> None:
    # MAN-14
    assert facts_of(layers).aux_layers("default") == ids


@pytest.mark.parametrize(("layers", "ids"), [(1, "[2, 0, -2]"), (4, "[2, 2, 1]"), (6, "[2, 3, 3]")])
def test_default_layers_that_collapse_are_refused_with_what_they_came_to(
    layers: int, ids: str
) -> None:
    # MAN-14
    with pytest.raises(VerifierError) as caught:
        facts_of(layers).aux_layers("default")
    assert ids in str(caught.value)


def test_layers_are_checked_against_the_verifier_at_their_place(path: Path) -> None:
    # MAN-14, EXT-07
    config = json.loads((DEMO / "verifier" / "config.json").read_text("utf-8"))
    config["text_config"]["num_hidden_layers"] = 4
    (path.parent / "verifier").mkdir()
    (path.parent / "verifier" / "config.json").write_text(json.dumps(config), "utf-8")
    for written in ("default", "[2, 4, 5]", "[2, 2, 3]", "[3, 2]"):
        path.write_text(swap("[2, 4, 5]", written), "utf-8")
        with pytest.raises(ManifestError) as caught:
            validate(path, ())
        assert f"{path}:7:47: stages.states.layers" in str(caught.value)


def test_a_switch_can_be_turned_off(path: Path) -> None:
    # MAN-16
    draft = "draft: {norm_before_residual: %s}"
    on, off = (
        read(path, swap("epochs: 3", f"epochs: 3, {draft % word}")) for word in ("true", "false")
    )
    assert on.manifest.stages["draft"].draft.norm_before_residual is True
    assert off.manifest.stages["draft"].draft.norm_before_residual is False
    keys = [KINDS["train"].identity(one.manifest.stages["draft"], facts_of(8)) for one in (on, off)]
    assert keys[0] != keys[1]


def test_defaults_written_out_are_accepted_and_the_same(path: Path) -> None:
    # MAN-18
    least = read(path)
    whole = read(path, json.dumps(resolved(least.manifest), indent=1))
    assert whole.digest == least.digest
    again = read(path, yaml.safe_dump(resolved(least.manifest)))
    assert again.digest == least.digest


def test_comments_order_and_style_change_nothing(path: Path) -> None:
    plain = read(path)
    data = yaml.safe_load(BASE)
    text = "# a comment\n" + yaml.safe_dump(data, default_flow_style=False, sort_keys=True)
    assert read(path, text).digest == plain.digest


def test_all_faults_of_a_file_are_told_at_once_in_its_order(path: Path) -> None:
    text = (
        BASE.replace("name: base", "name: no")
        .replace("kind: head}", "kind: hed}")
        .replace("rows: rows, layers", "rows: row, layers")
        .replace("size: 16", "size: 16, size: 17, sise: 1")
        .replace("epochs: 3", "epochs: 0")
        .replace("draft_tokens: 3", "draft_tokens: x")
        .replace("evaluation: score", "evaluation: scores")
    )
    places = [line.split(": ")[1] for line in refusals(path, text)]
    assert places == [
        "name",
        "stages.head.kind",
        "stages.states.rows",
        "stages.vocab.size",
        "stages.vocab.sise",
        "stages.draft.epochs",
        "stages.score.draft_tokens",
        "stages.release.evaluation",
    ]


def test_a_refused_key_is_not_told_again_as_missing(path: Path) -> None:
    lines = refusals(path, swap("verifier: {path: ./verifier,", "verifier: {<<: {a: b},"))
    assert [line.split(": ")[1] for line in lines] == ['verifier."<<"']


def test_an_evaluation_releases_only_the_checkpoint_it_measured(path: Path) -> None:
    # EVA-06
    other = BASE + (
        "  other: {kind: train, head: head, states: states, vocab: vocab}\n"
        "  early: {kind: export, checkpoint: other, evaluation: score}\n"
    )
    (line,) = refusals(path, other)
    assert "13:56: stages.early.evaluation: 'score' evaluates 'draft', not 'other'" in line


def test_stages_cannot_wait_for_each_other() -> None:
    order = list(KINDS)
    for kind in KINDS.values():
        for field in kind.params.model_fields.values():
            for mark in field.metadata:
                for named in mark.kinds if isinstance(mark, Reference) else ():
                    assert order.index(named) < order.index(kind.name)


def test_overrides_go_through_the_same_validation(path: Path) -> None:
    set_ = read(path, BASE, "stages.draft.lr=1e-4", "stages.draft.epochs=5")
    written = read(path, BASE.replace("1.0e-5, epochs: 3", "0.0001, epochs: 5"))
    assert set_.digest == written.digest
    lines = refusals(path, BASE, "stages.draft.epochs=2.5", "stages.draft.epoch=1", "name=12")
    assert sorted(line.split(": ")[:2] for line in lines) == [
        ["--set name=12", "name"],
        ["--set stages.draft.epoch=1", "stages.draft.epoch"],
        ["--set stages.draft.epochs=2.5", "stages.draft.epochs"],
    ]
    assert any("did you mean 'epochs'?" in line for line in lines)


def test_an_override_reaches_into_what_the_file_leaves_out(path: Path) -> None:
    found = read(
        path, BASE, "stages.draft.noise.std=0.1", "stages.release.gate.min_first_position=0.3"
    )
    assert found.manifest.stages["draft"].noise.std == 0.1
    assert found.manifest.stages["release"].gate.min_first_position == 0.3
    assert "did you mean 'draft'?" in refusals(path, BASE, "stages.drft.lr=1")[0]
    assert "no such key" in refusals(path, BASE, "stages.draft.nose.std=1")[0]


@pytest.fixture(scope="module")
def schema() -> jsonschema.protocols.Validator:
    found = json_schema()
    jsonschema.Draft202012Validator.check_schema(found)
    return jsonschema.Draft202012Validator(found)


def test_the_schema_accepts_what_the_loader_accepts(
    path: Path, schema: jsonschema.protocols.Validator
) -> None:
    schema.validate(yaml.safe_load(BASE))
    schema.validate(resolved(read(path).manifest))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("size: 16", "sise: 16"),
        ("kind: prepare", "kind: prepair"),
        ("epochs: 3", "epochs: 0"),
        ("epochs: 3", "epochs: true"),
        ("  draft:", "  Draft:"),
        ("name: base", "nom: base"),
        ("[2, 4, 5]", "[]"),
        ("version: 1", "version: 2"),
    ],
)
def test_the_schema_refuses_what_the_loader_refuses(
    path: Path, schema: jsonschema.protocols.Validator, old: str, new: str
) -> None:
    text = swap(old, new)
    assert refusals(path, text)
    assert not schema.is_valid(yaml.safe_load(text))


MANIFESTS = sorted((Path(__file__).parent.parent / "manifests").glob("*.yaml"))


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_every_manifest_of_the_project_is_valid(
    manifest: Path, schema: jsonschema.protocols.Validator
) -> None:
    validate(manifest, ())
    schema.validate(parse(manifest.read_bytes(), str(manifest)).data)
    schema.validate(resolved(load(manifest).manifest))


def test_the_schema_that_editors_use_is_that_of_the_code() -> None:
    # `make schema` writes it again
    written = Path(__file__).parent.parent / "manifests" / "schema.json"
    assert json.loads(written.read_text("utf-8")) == json_schema()
