"""Documents, overrides and generic validation: what is read, what is refused, and where."""

from __future__ import annotations

import contextlib
import copy
import json
import pickle
from typing import Annotated, Any, Literal

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from kimi_eagle.manifest import document
from kimi_eagle.manifest.check import validate
from kimi_eagle.manifest.document import parse, parse_leniently
from kimi_eagle.manifest.overrides import apply
from kimi_eagle.manifest.problem import FieldProblem, FieldProblems, ManifestError

FILE = "run.yaml"


class Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Verifier(Strict):
    path: str
    revision: Annotated[str, Field(min_length=1)] | None = None


class Capture(Strict):
    kind: Literal["capture"]
    layers: list[int] | Literal["default"] = "default"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"


class Vocab(Strict):
    kind: Literal["vocab"]
    draft_vocab_size: int = 16
    label: str | list[int | Literal["last"]] | None = None
    sizes: Annotated[list[int], Field(min_length=1)] = [1]


class Draft(Strict):
    kind: Literal["draft"]
    lr: Annotated[float, Field(gt=0)] | Literal["default"] = "default"
    epochs: Annotated[int, Field(ge=1, le=100)] = 3
    shuffle: bool = True
    warmup: float = 0.0
    steps: tuple[int, float] = (1, 0.5)

    @field_validator("warmup")
    @classmethod
    def _not_thirteen(cls, value: float) -> float:
        if value == 13:
            raise ValueError("must not be 13")
        return value

    @model_validator(mode="after")
    def _fits(self) -> Draft:
        if self.warmup > self.epochs:
            raise FieldProblem(("warmup",), "is longer than the run", "at most epochs")
        return self


Stage = Annotated[Capture | Vocab | Draft, Field(discriminator="kind")]


class Run(Strict):
    version: Literal[1] = 1
    name: str = "base"
    verifier: Verifier | None = None
    stages: dict[Annotated[str, Field(pattern="^[a-z]+$")], Stage] = {}
    spare: Stage | None = None

    @model_validator(mode="after")
    def _names(self) -> Run:
        bad = [FieldProblem(("stages", key), "is reserved") for key in self.stages if key == "all"]
        bad += [FieldProblem(("name",), "is reserved")] if self.name == "all" else []
        if bad:
            raise FieldProblems(bad)
        return self


def read(text: str | bytes) -> Any:
    return parse(text, FILE).data


def refusal(text: str | bytes, *overrides: str) -> str:
    with pytest.raises(ManifestError) as caught:
        validate(Run, apply(parse(text, FILE), overrides))
    return str(caught.value)


# Scalars


@pytest.mark.parametrize(
    ("written", "value"),
    [
        *[
            (text, 0.00001)
            for text in ("1e-5", "1E-5", "1.0e-5", "0.00001", "+1e-5", "!!float 1e-5")
        ],
        *[("1.5e3", 1500.0), (".5", 0.5), ("1.", 1.0), ("1e5", 100000.0), ("!!float 1", 1.0)],
        *[("0", 0), ("-7", -7), ("+7", 7), ("0x1F", 31), ("0o17", 15), ("0.5", 0.5)],
        *[
            ("true", True),
            ("True", True),
            ("FALSE", False),
            ("~", None),
            ("null", None),
            ("", None),
        ],
        *[("'no'", "no"), ('"1"', "1"), ("!!str 1", "1"), ("no way", "no way")],
        *[(text, text) for text in ("1:30:00", "12:30", "1_000", "2024-01-01", "nope", "tRue")],
        *[(text, text) for text in ("695e0514", "1e-9999", "9" * 400, "0x" + "f" * 400)],
        *[("[1, a]", [1, "a"]), ("{a: 1}", {"a": 1}), (r'"\ud83d\ude00"', "😀")],
    ],
)
def test_scalars_follow_yaml_1_2_and_out_of_range_numbers_stay_text(
    written: str, value: object
) -> None:
    result = read(f"x: {written}")["x"]
    assert (result, type(result)) == (value, type(value))


@pytest.mark.parametrize("word", ["no", "No", "OFF", "n", "yes", "on", "Y"])
def test_ambiguous_switches_are_refused_as_values_only(word: str) -> None:
    assert read(f"{word}: 1") == {word: 1}
    truth = "false" if word.lower() in ("no", "off", "n") else "true"
    assert refusal(f"x: [a, {word}]") == (
        f"run.yaml:1:8: x.1: `{word}` is {truth} to some YAML readers and text to others: "
        f"write {truth}, or quote it (found '{word}')"
    )


@pytest.mark.parametrize("number", ["0123456", "-007", "00", "01.5", "01e2"])
def test_leading_zeros_are_refused(number: str) -> None:
    assert "x: a number with a leading zero is ambiguous: quote it" in refusal(f"x: {number}")


@pytest.mark.parametrize("number", [".inf", "-.INF", ".nan", "+.Inf"])
def test_numbers_that_are_not_finite_are_refused(number: str) -> None:
    assert refusal(f"x: {number}") == f"run.yaml:1:4: x: not a finite number (found '{number}')"


# Documents


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "3:1: a: repeated; first set on line 1 (found 3)"),
        ("t: {e: 3, e: 30}", "1:11: t.e: repeated; first set on line 1 (found 30)"),
        ("a: [{b: 1,\n 'b': 2}]", "2:2: a.0.b: repeated; first set on line 1 (found 2)"),
        ("1: a", "1:1: 1: keys must be text; quote it (found 1)"),
        ("a: {~: b}", '1:5: a."~": keys must be text; quote it (found null)'),
        ("a: {[1]: b}", "1:5: a: keys must be text, not lists or mappings"),
        ("a: &x {b: 1}\nc: {<<: *x}", '2:5: c."<<": merge keys are not supported'),
        ("a: 1\n---\nb: 2", "2:1: a second document starts here; only one is allowed"),
        ("", "1:1: the file holds no document"),
        ("# nothing", "1:1: the file holds no document"),
        ("[1]", "1:1: the top level must be a mapping (found [1])"),
        ("a:\n\tb: 1", r"2:1: a: indented with a tab (found '\tb: 1'); use spaces"),
        ("a:\n  b: 1\n c: 2", "3:2: does not line up with the lines above"),
        ("a: b: c", "1:5: a ':' is not allowed here (found 'a: b: c'); quote text"),
        ("a: 'x", "a: a quote is not closed"),
        ("a: [1,\nb: 2", "cannot be read as YAML"),
        ("a: @x", "1:4: a: text cannot start with this character (found 'a: @x'); quote it"),
        ("a: *x", "undefined alias"),
        ("a: !!python/object:os.system x", "1:4: a: tag !!python/object:os.system is not supp"),
        ("a: !foo {b: 1}", "1:4: a: tag !foo is not supported"),
        ("a: !!binary aGk=", "1:4: a: tag !!binary is not supported"),
        ("a: !!int x", "1:4: a: does not fit its tag !!int (found 'x')"),
        ("a: &x [*x]", "1:4: a.0: holds itself through an alias"),
        ("a: " + "[" * 500, "more than 100 levels of nesting"),
        ("a: x\x07", '1:5: character U+0007 is not allowed; write "\\x07" in double quotes'),
        (r'a: "\ud83d"', "1:4: a: holds half of a surrogate pair"),
        (b"a: 1\nb: \xff", "2: not UTF-8 text: byte 0xff at offset 8"),
    ],
)
def test_a_bad_document_is_refused_at_its_place(text: str | bytes, message: str) -> None:
    assert message in refusal(text)


def test_all_problems_of_a_document_are_reported_in_order() -> None:
    lines = refusal("a: no\nb: 007\nb: 2\n? [x]\n: 1\n---\nc: 1").splitlines()
    assert [line.split(":")[1] for line in lines] == ["1", "2", "3", "4", "6"]


@pytest.mark.parametrize("levels", [5, 60])
def test_alias_expansion_is_capped(levels: int) -> None:
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, levels)
    )
    assert "more than 100000 values once aliases are expanded" in refusal(bomb)


def test_aliases_are_copies_and_a_problem_behind_them_is_reported_once() -> None:
    data = read("a: &x {b: [1]}\nc: *x")
    data["a"]["b"].append(2)
    assert data["c"] == {"b": [1]}
    assert len(refusal("a: &x [no]\nc: *x\nd: *x").splitlines()) == 1


@pytest.mark.parametrize(
    "change", [lambda t: b"\xef\xbb\xbf" + t, lambda t: t.replace(b"\n", b"\r\n")]
)
def test_windows_editors_change_neither_data_nor_places(change: Any) -> None:
    plain = b"a: 1\nb:\n  c: [x, z]\n"
    document = parse(change(plain), FILE)
    assert document.data == read(plain)
    assert [document.locate(("a",)), document.locate(("b", "c", 1))] == [(1, 4), (3, 10)]


def test_places_of_keys_values_and_what_is_missing() -> None:
    document = parse("top:\n  list: [a,\n    b]\n", FILE)
    assert document.locate(("top",)) == (2, 3)
    assert document.locate_key(("top",)) == (1, 1)
    assert document.locate(("top", "list", 1)) == document.locate_key(("top", "list", 1)) == (3, 5)
    assert document.locate(("top", "gone", 3)) == (2, 3)
    assert document.locate_key(("top", "gone", 3)) == (1, 1)
    assert document.locate(("gone",)) == (1, 1)


_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x7f"), max_size=40)
_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | _TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXT, inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(_TEXT, _JSON, max_size=4), st.sampled_from([None, 2]))
def test_json_is_read_as_json(value: dict[str, Any], indent: int | None) -> None:
    assert repr(read(json.dumps(value, indent=indent))) == repr(value)


@given(st.dictionaries(_TEXT, _JSON, max_size=4), st.booleans())
def test_quoted_yaml_is_read_back(value: dict[str, Any], unicode: bool) -> None:
    text = yaml.safe_dump(value, default_style='"', sort_keys=False, allow_unicode=unicode)
    assert repr(read(text)) == repr(value)


@given(st.text(st.sampled_from("ab01:-?,[]{}&*!|>'\"%@#~.< \n\t\r\\\x00\u2028e_+xno"), max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(ManifestError):
        json.dumps(read(text), allow_nan=False)


# Validation

STAGE = "stages:\n  draft:\n    kind: draft\n    "


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (STAGE + "epochs: true", "4:13: stages.draft.epochs: must be a whole number (found true)"),
        (STAGE + "epochs: 2.5", "4:13: stages.draft.epochs: must be a whole number (found 2.5)"),
        (STAGE + "epochs: 2.0", "must be a whole number (found 2.0); write 2"),
        (STAGE + "epochs: 0", "4:13: stages.draft.epochs: must be at least 1 (found 0)"),
        (STAGE + "epochs: 200", "must be at most 100 (found 200)"),
        (STAGE + "shuffle: 1", "stages.draft.shuffle: must be true or false (found 1)"),
        (STAGE + "warmup: '1'", "stages.draft.warmup: must be a number (found '1')"),
        (STAGE + "warmup: 13", "stages.draft.warmup: must not be 13 (found 13)"),
        (
            STAGE + "warmup: 9",
            "4:13: stages.draft.warmup: is longer than the run (found 9); at most",
        ),
        (STAGE + "steps: [1, true]", "4:16: stages.draft.steps.1: must be a number (found true)"),
        (STAGE + "steps: [1]", "4:5: stages.draft.steps.1: is required"),
        (STAGE + "lr: x", "4:9: stages.draft.lr: must be a number or 'default' (found 'x')"),
        (
            STAGE + "lr: defualt",
            "must be a number or 'default' (found 'defualt'); did you mean 'def",
        ),
        (STAGE + "lr: -1", "4:9: stages.draft.lr: must be greater than 0 (found -1)"),
        (
            STAGE + "epoch: 1",
            "4:5: stages.draft.epoch: unknown key (found 1); did you mean 'epochs'?",
        ),
        (
            STAGE + "zzz: 1",
            "unknown key (found 1); allowed keys: kind, lr, epochs, shuffle, warmup,",
        ),
        (
            "stages: {a: {kind: drfat}}",
            "'capture', 'vocab', 'draft' (found 'drfat'); did you mean 'draft'?",
        ),
        ("stages: {a: {kind: [1]}}", "stages.a.kind: must be one of 'capture', 'vocab', 'draft'"),
        (
            "stages: {a: {lr: 1}}",
            "1:10: stages.a.kind: is required; one of 'capture', 'vocab', 'dr",
        ),
        ("stages: {a: 3}", "1:13: stages.a: must be a mapping (found 3)"),
        (
            "stages: {A: {kind: vocab}}",
            "1:10: stages.A: the key must match the pattern ^[a-z]+$ (found 'A')",
        ),
        (
            "stages: {a: {kind: capture, layers: [2, true, 5]}}",
            "1:41: stages.a.layers.1: must be a whole number (found true)",
        ),
        ("stages: {a: {kind: capture, layers: 3}}", "stages.a.layers: must be a list or 'default'"),
        (
            "stages: {a: {kind: capture, dtype: bfloat}}",
            "must be one of 'bfloat16', 'float32' (found 'bfloat'); did you mean 'bfloat16'?",
        ),
        ("stages: {a: {kind: vocab, label: 3}}", "must be text or a list (found 3); quote it"),
        (
            "stages: {a: {kind: vocab, label: [1, x]}}",
            "a.label.1: must be a whole number or 'last'",
        ),
        ("stages: {draft: {kind: draft, draft: 1}}", "1:31: stages.draft.draft: unknown key"),
        (
            "spare: {kind: vocab, draft_vocabsize: 1}",
            "1:22: spare.draft_vocabsize: unknown key (found 1); did you mean 'draft_vocab_size'?",
        ),
        ("stages: {a: {kind: vocab, sizes: []}}", "a.sizes: must not be empty (found [])"),
        ("name: 12", "1:7: name: must be text (found 12); quote it"),
        ("name: null", "1:7: name: must be text (found null)"),
        (
            "verifier: {path: v, revision: 1234567}",
            "1:31: verifier.revision: must be text (found 1234567); quote it",
        ),
        ("verifier: {path: v, revision: ''}", "verifier.revision: must not be empty (found '')"),
        ("verifier: {}", "1:1: verifier.path: is required"),
        ("version: 2", "1:10: version: must be 1 (found 2)"),
        ("version: true", "1:10: version: must be 1 (found true)"),
        ("version: 1.0", "1:10: version: must be 1 (found 1.0)"),
        (
            "name: all\nstages: {all: {kind: vocab}}",
            "1:7: name: is reserved (found 'all')\nrun.yaml:2:15: stages.all: is reserved",
        ),
    ],
)
def test_validation_says_what_is_wrong_where_it_is_written(text: str, message: str) -> None:
    assert message in refusal(text)


def test_all_problems_of_a_model_are_reported_once_each() -> None:
    lines = refusal(
        "version: true\nname: 1\nverifier: {}\n"
        "stages: {a: {kind: draft, lr: x}, b: {kind: vocab, sizes: [x]}}\nz: 1"
    )
    assert [line.split(": ")[1] for line in lines.splitlines()] == [
        "version", "name", "verifier.path", "stages.a.lr", "stages.b.sizes.0", "z",
    ]  # fmt: skip


def test_a_valid_document_becomes_the_model() -> None:
    run = validate(Run, parse(STAGE + "lr: 1e-5\n    steps: [2, 1]", FILE))
    assert run.stages == {"draft": Draft(kind="draft", lr=0.00001, steps=(2, 1.0))}


def test_strip_is_applied_to_what_pydantic_reports() -> None:
    with pytest.raises(ManifestError, match="1:11: verifier: must be text"):
        validate(Run, parse("verifier: {path: 1}", FILE), strip=lambda loc: loc[:1])


# Overrides

BASE = "name: base\nstages:\n  c: {kind: capture, layers: [1, 2]}\n  d: {kind: draft}\n"


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("stages.d.lr=1e-4", ("stages", "d", "lr"), 0.0001),
        ("name='no'", ("name",), "no"),
        ("name=a=b", ("name",), "a=b"),
        ("name=", ("name",), None),
        ("stages.c.layers.1=7", ("stages", "c", "layers", 1), 7),
        ("stages.c.layers=[3, 4]", ("stages", "c", "layers"), [3, 4]),
        ("stages.d={kind: vocab}", ("stages", "d"), {"kind": "vocab"}),
        ("stages.e={kind: vocab}", ("stages", "e"), {"kind": "vocab"}),
    ],
)
def test_an_override_sets_a_value_in_a_copy(override: str, path: Any, value: object) -> None:
    document = parse(BASE, FILE)
    before = copy.deepcopy(document.data)
    changed = apply(document, [override])
    assert changed.value(path) == value
    assert changed.locate(path) == (None, None)
    assert changed.source(path) == f"--set {override}"
    assert (document.data, document.source(path)) == (before, None)


def test_later_overrides_win_and_may_build_on_earlier_ones() -> None:
    texts = ["stages.e={kind: draft, epochs: 1}", "stages.e.epochs=2", "stages.e.epochs=4"]
    assert validate(Run, apply(parse(BASE, FILE), texts)).stages["e"] == Draft(
        kind="draft", epochs=4
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("name", "must be path=value"),
        ("=1", "must be path=value"),
        ("stages..lr=1", "must be path=value"),
        ("stage.d.lr=1", "stage: no such key; did you mean 'stages'?"),
        ("stages.zzz.lr=1", "stages.zzz: no such key; allowed keys: c, d"),
        ("name.x=1", "name: is neither a mapping nor a list, so it has no 'x' (found 'base')"),
        (
            "stages.c.layers.2=1",
            "stages.c.layers: is a list of 2 items, counted from 0, so it has no",
        ),
        ("stages.c.layers.-1=1", "stages.c.layers: is a list of 2 items"),
        ("name=yes", "name: `yes` is true to some YAML readers"),
        ("name=a: b", "name: must be in flow style, such as {a: 1} or [1, 2]; quote it"),
        ("name=a\n---\nb", "name: a second document starts here"),
        ("stages.d={a: 1, a: 2}", "stages.d.a: repeated"),
        ("stages.d.lr=abc", "stages.d.lr: must be a number or 'default' (found 'abc')"),
        ("stages.d={kind: draft, lr: abc}", "stages.d.lr: must be a number or 'default'"),
        ("stages.d={}", "stages.d.kind: is required"),
        ("nmae=x", "nmae: unknown key (found 'x'); did you mean 'name'?"),
    ],
)
def test_a_problem_of_an_override_points_to_it(override: str, message: str) -> None:
    shown = override.replace("\n", "\\n")
    assert refusal(BASE, override).startswith(f"--set {shown}: {message}")


def test_all_bad_overrides_are_reported_with_the_files_problems_first() -> None:
    assert len(refusal(BASE, "name", "x.y=1", "name=no").splitlines()) == 3
    lines = refusal("name: 1\nversion: 1", "version=2").splitlines()
    assert [line.split(": ")[0] for line in lines] == ["run.yaml:1:7", "--set version=2"]


# Reports


def test_reports_are_json_and_survive_pickling() -> None:
    with pytest.raises(ManifestError) as caught:
        validate(Run, parse("name: 1\nstages: {a: {}}", FILE))
    report = caught.value.to_json()
    assert json.loads(json.dumps(report)) == report
    assert report["file"] == FILE
    assert report["problems"][0] == {
        "path": ["name"],
        "message": "must be text",
        "line": 1,
        "column": 7,
        "found": 1,
        "hint": "quote it",
        "source": None,
    }
    assert "found" not in report["problems"][1]
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


# Two readers, one reading

_TOKENS = [
    *(
        "a",
        "key",
        "kind",
        "é",
        "😀",
        "a b",
        "a:b",
        "http://x:1/",
        "x.y",
        "=",
        "<<",
        "~",
        "..",
        "-1",
    ),
    *("1", "1e-5", "0123", "0x1f", "no", "null", "true", ".5", ".inf", "''", "'x'", "'it''s'"),
    *('"y"', '"a: b"', "'", '"', ": ", ":", "- ", "-", ", ", ",", "[", "]", "{", "}", " ", "#"),
    *(" # c", "\n", "\n\n", "\n  ", "\n    ", "\n- ", "\n  - ", "a: 1\n", "b:\n  c: 2\n"),
    *("k: [1, 2]\n", "k: {a: b}\n", "'q': 1\n", "- 1\n", "(", ")", "$", "^", ";", "/", "--", "_"),
]


@pytest.mark.skipif(not yaml.__with_libyaml__, reason="PyYAML was built without libyaml")
@given(st.lists(st.sampled_from(_TOKENS), min_size=1, max_size=14).map("".join))
@settings(max_examples=2000, deadline=None)
def test_what_libyaml_reads_is_read_the_same_without_it(text: str) -> None:
    def reading() -> Any:
        try:
            found, refused = parse_leniently(text, FILE)
        except ManifestError as error:
            return error.problems
        return json.dumps(found.data), found.values, found.keys, refused

    by_libyaml = reading()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(yaml, "__with_libyaml__", False)
        assert reading() == by_libyaml


@pytest.mark.skipif(not yaml.__with_libyaml__, reason="PyYAML was built without libyaml")
def test_plain_manifests_are_read_by_libyaml_and_those_with_more_are_not() -> None:
    assert document._root_by_libyaml("a: 1\nb: [x, 'y']\n") is not None
    for text in ("a: *x", "a: &x 1", "a: |\n  x", "a:\t1", "a: !!str 1", "a: 1\n---\nb: 2", "a: ["):
        assert document._root_by_libyaml(text) is None
    assert document._root_by_libyaml("[" * 5000 + "]" * 5000) is None, "too deep to recurse into"
