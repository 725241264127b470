"""What a record says was taken in, found again: its manifest, its code versions, its inputs from
outside, each of which must be what it was."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kimi_eagle.manifest.check import validate
from kimi_eagle.manifest.document import Document, Location
from kimi_eagle.manifest.load import LoadedManifest
from kimi_eagle.manifest.model import Manifest
from kimi_eagle.manifest.problem import ManifestError
from kimi_eagle.pins import Pins
from kimi_eagle.records import ArtifactRecord
from kimi_eagle.run_record import CannotReproduce, Record
from kimi_eagle.stages.catalog import KINDS


@dataclass(frozen=True)
class WrongInput:
    """An input from outside that is not what the record says."""

    stage: str
    role: str
    name: str
    expected: str | None
    found: str | None

    def text(self) -> str:
        return (
            f"{self.stage}: {self.role} {self.name}: expected {self.expected or 'nothing'}, "
            f"found {self.found or 'nothing'}"
        )


class InputsDiffer(CannotReproduce):
    """The inputs are not those that were recorded; nothing was run."""

    def __init__(self, wrong: Sequence[WrongInput], detail: str | None = None):
        self.wrong = tuple(wrong)
        lines = [detail] if detail else []
        lines += [item.text() for item in wrong]
        super().__init__(
            "\n".join([*lines, "the inputs are not those of the record: nothing was run"])
        )


def rebuilt(record: Record, sources: Path | None) -> LoadedManifest:
    """The recorded manifest, as if it lay in `sources`, or else where it was submitted from.

    An absolute path that leads nowhere is looked for under its last name in `sources`: what is
    there is compared with the record, as everything is.
    """
    origin = Path(record.run.manifest_path)
    folder = origin.parent if sources is None else sources
    data = json.loads(json.dumps(record.manifest))
    if sources is not None:
        places = [data["verifier"]]
        for stage in data["stages"].values():
            single = [stage.get("prompts"), stage.get("map")]
            places += [*stage.get("sources", ()), *filter(None, single)]
        for place in places:
            path = Path(place["path"])
            if path.is_absolute() and not path.exists():
                place["path"] = path.name
    document = Document(str(folder / origin.name), data, {(): Location(None, None)}, {})
    text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
    return LoadedManifest(validate(Manifest, document), document, folder / origin.name, text, ())


def code_is_the_same(record: Record) -> None:
    """Raises: CannotReproduce: the code of a stage's kind makes other bytes by now."""
    for stage in record.stages:
        kind = KINDS.get(stage.kind)
        if kind is None:
            raise CannotReproduce(f"this version has no stages of kind {stage.kind}")
        then = stage.document.get("code_version")
        if then != kind.code_version:
            raise CannotReproduce(
                f"{stage.name}: the code of {stage.kind} has version {kind.code_version} here, it "
                f"had {then} then: use the version that made it "
                f"({stage.environment.get('kimi_eagle', 'unknown')}), or `--env recorded`"
            )


def pinned(record: Record, loaded: LoadedManifest, pin: Callable[[LoadedManifest], Pins]) -> Pins:
    """The inputs from outside, which `pin` finds, and which are those of the record.

    Raises: InputsDiffer.
    """
    try:
        pins = pin(loaded)
    except ManifestError as error:
        raise InputsDiffer(_missing(record, error), str(error)) from None
    wrong = []
    for stage in record.stages:
        for role, items in pins.stages[stage.name].items():
            expected = [(d, record.artifacts[d].record(d)) for d in stage.inputs.get(role, ())]
            found = [(item.record.digest, item.record) for item in items]
            if [d for d, _ in expected] != [d for d, _ in found]:
                wrong += _wrong_inputs(stage.name, role, expected, found)
    if wrong:
        raise InputsDiffer(list(dict.fromkeys(wrong)))
    return pins


def _missing(record: Record, error: ManifestError) -> list[WrongInput]:
    """What was to be where a manifest's path leads to nothing."""
    found = []
    for problem in error.problems:
        for stage in record.stages:
            for role, digests in stage.inputs.items():
                place = ("stages", stage.name, *role.split("."), "path")
                verifier = role in ("verifier", "tokenizer") and problem.path[:1] == ("verifier",)
                if verifier or tuple(map(str, problem.path)) == place:
                    found += [
                        WrongInput(stage.name, role, record.artifacts[d].record(d).label, d, None)
                        for d in digests
                    ]
    return found


def _wrong_inputs(
    stage: str,
    role: str,
    expected: Sequence[tuple[str, ArtifactRecord]],
    found: Sequence[tuple[str, ArtifactRecord]],
) -> list[WrongInput]:
    """Name by name where the files of a role differ; of folders, the files in them."""
    then = dict(_named(expected))
    now = dict(_named(found))
    wrong = [
        WrongInput(stage, role, name, then.get(name), now.get(name))
        for name in dict.fromkeys([*then, *now])
        if then.get(name) != now.get(name)
    ]
    order = ", ".join(record.label for _, record in found)
    return wrong or [WrongInput(stage, role, f"in another order ({order})", None, None)]


def _named(items: Sequence[tuple[str, ArtifactRecord]]) -> list[tuple[str, str]]:
    named = []
    for digest, record in items:
        if record.kind == "source":
            named.append((record.label, digest))
        else:
            named += [(path, found) for path, (found, _) in record.files.items()]
    return named
