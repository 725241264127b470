"""How an artifact that was made again differs from the one that was to come out: which files, which
tensors by how much, which rows of hidden states, from which step on the losses.

A difference is a flat JSON object; which fields it has says what it is about:

    {"file": "model.safetensors", "tensor": "fc.weight", "max_abs": 0.001, "max_ulp": 1,
     "differing": 3, "elements": 65536, "relative_norm": 2e-06}
    {"file": "report.json", "field": "coverage", "expected": 0.98, "found": 0.97}
    {"file": "README.md", "expected": "5d9bfe…", "found": "ba9744…"}
    {"rows": 3, "of": 10, "compared": 3, "cosine_distance": 0.0004, "max_abs": 0.25}
    {"answers": 2, "of": 400, "first": "source 0, record 17, turn 1"}
    {"loss": "train loss_0", "at": "step 12", "expected": 8.03, "found": 8.04}
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kimi_eagle.artifacts.files import inside, write_json
from kimi_eagle.artifacts.objects import Objects
from kimi_eagle.artifacts.tensors import tensor_digests
from kimi_eagle.identity import short
from kimi_eagle.records import ArtifactRecord
from kimi_eagle.registry.schema import FILE
from kimi_eagle.run_record import LossRecord
from kimi_eagle.stages.regenerate.spec import LIST as ANSWERS
from kimi_eagle.states.layout import CONTRACT, ROWS, StateRow, read_rows

Difference = dict[str, Any]

# Fields of a JSON file that are listed before the rest is only counted.
_FIELDS = 20


def text(difference: Difference) -> str:
    """A difference in words."""
    if "tensor" in difference:
        return f"{difference['file']}: {difference['tensor']} {_by_how_much(difference)}"
    if "field" in difference:
        return (
            f"{difference['file']}: {difference['field']} {_value(difference['expected'])} → "
            f"{_value(difference['found'])}"
        )
    if "rows" in difference:
        return _of_rows(difference)
    if "answers" in difference:
        return (
            f"{difference['answers']} of {difference['of']} answers are others, from "
            f"{difference['first']} on"
        )
    if "loss" in difference:
        return (
            f"the losses part at {difference['at']}: {difference['loss']} "
            f"{_value(difference['expected'])} → {_value(difference['found'])}"
        )
    if "note" in difference:
        return str(difference["note"])
    return (
        f"{difference['file']}: {_digest(difference['expected'])} expected, "
        f"{_digest(difference['found'])} found"
    )


def compare_files(
    expected: ArtifactRecord,
    found: ArtifactRecord,
    objects: Objects,
    tensors: Mapping[str, Mapping[str, str]],
    scratch: Path,
) -> list[Difference]:
    """How `found`, which is in the store, differs from `expected`, which may be.

    Args:
        tensors: digests of the expected tensors, by file and name, where they are known.
        scratch: a folder to work in.
    """
    there = objects.trouble(expected) is None
    measured: Mapping[str, list[Difference]] = {}
    if there and any(_is_tensors(path) for path in found.files):
        a, b = objects.path(expected.digest), objects.path(found.digest)
        measured = _program({"a": str(a), "b": str(b)}, scratch)["tensors"]
    differences: list[Difference] = []
    for path in sorted(expected.files.keys() | found.files.keys()):
        before, after = expected.files.get(path), found.files.get(path)
        if before == after:
            continue
        inner: list[Difference] = []
        if before is not None and after is not None:
            if path in measured:
                inner = [{"tensor": item.pop("name"), **item} for item in measured[path]]
            elif not there and path in tensors:
                inner = _by_digest(tensors[path], inside(objects.path(found.digest), path))
            elif there and path.endswith(".json"):
                inner = _fields(
                    inside(objects.path(expected.digest), path),
                    inside(objects.path(found.digest), path),
                )
        whole = {
            "expected": before[0] if before else None,
            "found": after[0] if after else None,
        }
        differences += [{"file": path, **item} for item in inner or [whole]]
    if not there:
        differences.append(
            {"note": f"the {expected.kind} that is expected is not in the store: no amounts"}
        )
    return differences


def compare_states(
    expected: ArtifactRecord,
    found: ArtifactRecord,
    objects: Objects,
    store: Path,
    other_store: Path,
    scratch: Path,
) -> list[Difference]:
    """How the rows of two states artifacts differ, by content digest, and by how much where both
    stores (their roots) hold them."""
    if objects.trouble(expected) is not None:
        return [
            {"file": ROWS, "expected": expected.files[ROWS][0], "found": found.files[ROWS][0]},
            {"note": "the states that are expected are not in the store: no amounts"},
        ]
    if expected.files[CONTRACT] != found.files[CONTRACT]:
        return _fields(
            objects.path(expected.digest) / CONTRACT, objects.path(found.digest) / CONTRACT
        )
    before, after = (_rows(objects.path(item.digest)) for item in (expected, found))
    if [(row.key, row.tokens) for row in before] != [(row.key, row.tokens) for row in after]:
        return [{"note": f"{len(before)} rows expected, {len(after)} found: other rows"}]
    pairs = {
        a.key: [a.key, a.digest, b.digest]
        for a, b in zip(before, after, strict=True)
        if a.digest != b.digest
    }
    sides = {
        name: {"root": str(root), "registry": str(root / FILE)}
        for name, root in (("a", store), ("b", other_store))
    }
    job = {"states": {**sides, "rows": list(pairs.values())}}
    return [{"rows": len(pairs), "of": len(before), **_program(job, scratch)["states"]}]


def compare_answers(
    expected: ArtifactRecord, found: ArtifactRecord, objects: Objects
) -> list[Difference]:
    """How many of the verifier's answers are other tokens; nothing where that cannot be told."""
    if objects.trouble(expected) is not None:
        return []
    before, after = (_answers(objects.path(item.digest) / ANSWERS) for item in (expected, found))
    places = before.keys() | after.keys()
    others = [place for place in places if before.get(place) != after.get(place)]
    if not others:
        return []
    source, record, turn = min(others)
    first = f"source {source}, record {record}, turn {turn}"
    return [{"answers": len(others), "of": len(before), "first": first}]


def _answers(path: Path) -> dict[tuple[int, int, int], list[str]]:
    """By place; where a source is several files, a record of each has the number."""
    found: dict[tuple[int, int, int], list[str]] = {}
    for item in map(json.loads, path.read_text("utf-8").splitlines()):
        place = (item["source"], item["record"], item["turn"])
        found.setdefault(place, []).append(item["answer"])
    return found


def weight_norms(a: Path, b: Path) -> list[dict[str, Any]]:
    """The tensors of two folders of weights with their norms and that of their difference.

    Returns: as `draft.norms.TensorNorms` has it: name, a, b, difference, relative, note.

    Raises:
        OSError: they could not be compared; the message says why.
    """
    for folder in (a, b):
        if not folder.is_dir():
            raise FileNotFoundError(f"{short(folder.name)} is not in the store any more")
    with TemporaryDirectory(prefix="kimi-eagle-") as scratch:
        job = {"a": str(a), "b": str(b)}
        return list(_program(job, Path(scratch), "kimi_eagle.draft.norms")["norms"])


def within(differences: Sequence[Difference], bound: float) -> bool:
    """Whether rows of hidden states differ by no more than `bound`, all of them compared."""
    return bool(differences) and all(
        "rows" in item and item["compared"] == item["rows"] and item["cosine_distance"] <= bound
        for item in differences
    )


def first_parting(expected: Sequence[LossRecord], found: Sequence[LossRecord]) -> list[Difference]:
    """The first loss that came out another, in the order they were logged; empty when none did."""
    for before, after in zip(expected, found, strict=False):
        for name in dict.fromkeys([*before.values, *after.values]):
            a, b = before.values.get(name), after.values.get(name)
            if a != b:
                unit = "step" if before.split == "train" else "the end of epoch"
                return [
                    {
                        "loss": f"{before.split} {name}",
                        "at": f"{unit} {before.at}",
                        "expected": a,
                        "found": b,
                    }
                ]
    if expected and len(expected) != len(found):
        return [{"note": f"{len(expected)} losses were logged then, {len(found)} now"}]
    return []


def _rows(folder: Path) -> list[StateRow]:
    return read_rows((folder / ROWS).read_text("utf-8"))


def _is_tensors(path: str) -> bool:
    return path.endswith(".safetensors")


def _by_digest(tensors: Mapping[str, str], path: Path) -> list[Difference]:
    now = tensor_digests(path)
    return [
        {"tensor": name, "expected": tensors.get(name), "found": now.get(name)}
        for name in sorted(tensors.keys() | now.keys())
        if tensors.get(name) != now.get(name)
    ]


def _fields(expected: Path, found: Path) -> list[Difference]:
    """The leaves of two JSON files that differ."""
    try:
        before, after = (json.loads(path.read_text("utf-8")) for path in (expected, found))
    except ValueError:
        return []
    listed = list(_leaves("", before, after))
    shown = [
        {"file": found.name, "field": where, "expected": a, "found": b}
        for where, a, b in listed[:_FIELDS]
    ]
    if len(listed) > _FIELDS:
        shown.append({"note": f"{found.name}: and {len(listed) - _FIELDS} more fields"})
    return shown


def _leaves(where: str, a: Any, b: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys([*a, *b]):
            yield from _leaves(f"{where}.{key}" if where else key, a.get(key), b.get(key))
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for index, (one, other) in enumerate(zip(a, b, strict=True)):
            yield from _leaves(f"{where}.{index}" if where else str(index), one, other)
    elif a != b:
        yield where, a, b


def _program(
    job: Mapping[str, Any], scratch: Path, program: str = "kimi_eagle.draft.compare"
) -> dict[str, Any]:
    """Run a program that compares tensors, with what it needs to load, in a process of its own.

    Raises:
        OSError: it could not be run; the message ends with what it said.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    given, result = scratch / "compare.json", scratch / "compared.json"
    write_json(given, dict(job))
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", program, str(given), str(result)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0 or not result.exists():
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise OSError(f"the tensors could not be compared: {last}")
    return dict(json.loads(result.read_text("utf-8")))


def _by_how_much(difference: Difference) -> str:
    if "expected" in difference:
        before, after = difference["expected"], difference["found"]
        if before is None or after is None:
            return "is new" if before is None else "is gone"
        return "is another"
    if difference["max_abs"] is None:
        return "is in one of the two alone, or of another shape or type"
    parts = [f"max abs {difference['max_abs']:.3g}"]
    if difference["max_ulp"] is not None:
        parts.append(f"{difference['max_ulp']} ulp")
    if difference["relative_norm"] is not None:
        parts.append(f"relative norm {difference['relative_norm']:.3g}")
    parts.append(f"{difference['differing']} of {difference['elements']} elements")
    return ", ".join(parts)


def _of_rows(difference: Difference) -> str:
    text = f"{difference['rows']} of {difference['of']} rows differ"
    if not difference["compared"]:
        return text
    return (
        f"{text}; of {difference['compared']} compared: cosine distance at most "
        f"{difference['cosine_distance']:.3g}, max abs {difference['max_abs']:.3g}"
    )


def _digest(value: str | None) -> str:
    return "nothing" if value is None else short(value)


def _value(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
