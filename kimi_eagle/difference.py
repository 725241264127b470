"""What differs between two artifacts, runs or manifests: both lineages walked to the smallest
leaves that are not the same, with their metrics side by side.

    $ kimi-eagle diff 3aae8e53 91d0c2aa
    parameters   draft.lr               0.001         3e-05
    inputs       rows: chats.jsonl      3fa5bf1f8b29  f4386f922f17
    inputs       rows: of chats.jsonl   10 rows       9 rows
    metrics      draft.val_loss         14.37         15.02
    not comparable: val_loss and full_acc are over other rows
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kimi_eagle import environments
from kimi_eagle.artifacts.tensors import counts
from kimi_eagle.identity import short
from kimi_eagle.records import ArtifactRecord
from kimi_eagle.registry.search import RUN, Search
from kimi_eagle.registry.store import Registry
from kimi_eagle.run_record import CannotReproduce, StageRecord, collect, stage_record, stages_of
from kimi_eagle.weights import Weights

STAGES, PARAMETERS, INPUTS, CODE, ENVIRONMENT, BYTES, METRICS = (
    "stages",
    "parameters",
    "inputs",
    "code",
    "environment",
    "bytes",
    "metrics",
)
SECTIONS = (STAGES, PARAMETERS, INPUTS, CODE, ENVIRONMENT, BYTES, METRICS)

# Settings of the loss itself: with others the same figure means something else.
LOSS_SETTINGS = ("loss", "ttt_steps", "ttt_step_loss_decay")

# Measures of the machine and the moment, not of what was made.
_MOMENTARY = (
    "tokens_per_second",
    "speeds",
    "speedup",
    "engine_counters",
    "bytes_written",
    "rows_extracted",
    "tokens_extracted",
    "probed",
    "agreement",
)
_ROWS_FILE = "rows.safetensors"


@dataclass(frozen=True)
class SideStage:
    """One stage of one side: what decides what it makes, and what is known of what it made."""

    name: str
    kind: str
    code_version: int
    parameters: Mapping[str, Any]
    sources: Mapping[str, Mapping[str, str]]
    """Role of an input from outside → file → digest."""
    rows_of: Mapping[str, int] = field(default_factory=dict)
    """Rows by the files that they are of."""
    key: str | None = None
    output: str | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Side:
    """One of the two things that are compared."""

    name: str
    """As it was given, resolved: a hash, a run's id, a manifest's path."""
    kind: str
    stages: tuple[SideStage, ...]

    def of_kind(self, kind: str) -> list[SideStage]:
        return [stage for stage in self.stages if stage.kind == kind]


@dataclass(frozen=True)
class Leaf:
    """One value on both sides; None where a side has none."""

    section: str
    name: str
    a: Any
    b: Any

    @property
    def equal(self) -> bool:
        return bool(self.a == self.b and isinstance(self.a, bool) == isinstance(self.b, bool))


@dataclass(frozen=True)
class Verdict:
    comparable: bool
    reasons: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    """What else not to be misled by."""

    def text(self) -> str:
        said = "; ".join(self.reasons)
        return f"{'comparable' if self.comparable else 'not comparable'}: {said}"


@dataclass(frozen=True)
class Comparison:
    a: Side
    b: Side
    leaves: tuple[Leaf, ...]
    verdict: Verdict
    weights: Weights | None = None

    @property
    def different(self) -> list[Leaf]:
        return [leaf for leaf in self.leaves if not leaf.equal]

    def document(self, *, whole: bool = False) -> dict[str, Any]:
        """As `diff --json` prints it."""
        shown = list(self.leaves) if whole else self.different
        return {
            "a": {"name": self.a.name, "kind": self.a.kind},
            "b": {"name": self.b.name, "kind": self.b.kind},
            "verdict": {
                "comparable": self.verdict.comparable,
                "reasons": list(self.verdict.reasons),
                "warnings": list(self.verdict.warnings),
            },
            "differences": [
                {"section": leaf.section, "name": leaf.name, "a": leaf.a, "b": leaf.b}
                for leaf in shown
            ],
            "equal": len(self.leaves) - len(self.different),
            **({"weights": self.weights.shown(whole=whole)} if self.weights else {}),
        }


def side_of(registry: Registry, root: Path, prefix: str) -> Side:
    """One side, by the hash of an artifact or the id of a run, or the start of it.

    A checkpoint brings its latest evaluation with it.

    Raises: UnknownDigest, AmbiguousDigest, CannotReproduce.
    """
    found, kind = Search(registry).find(prefix)
    stages: list[StageRecord] = []
    if kind == RUN:
        stages = list(stages_of(registry, root, found))
    else:
        stages = list(collect(registry, root, found).stages)
        made = [item for item in registry.consumers(found) if item.kind == "evaluate"]
        if kind == "checkpoint" and made:
            stages.append(stage_record(root, made[-1]))
    if not stages:
        raise CannotReproduce(f"{kind} {found} has no stage that came to its end")
    objects = root / "objects"
    return Side(found, kind, tuple(_recorded(registry, objects, stage) for stage in stages))


def files_of(records: Sequence[ArtifactRecord]) -> dict[str, str]:
    """File → digest, of inputs from outside."""
    found: dict[str, str] = {}
    for record in records:
        if record.kind == "source":
            name = record.label
            while name in found:  # of two files with one name in two folders
                name += "'"
            found[name] = record.digest
        else:
            found |= {path: digest for path, (digest, _) in record.files.items()}
    return found


def compare(a: Side, b: Side) -> Comparison:
    """Everything that decides, and everything that was measured, on both sides."""
    pairs = list(_pairs(a, b))
    leaves: list[Leaf] = []
    for one, other in pairs:
        if one is None or other is None:
            there = one or other
            assert there is not None, "a pair has a stage on one side at least"
            shown = f"{there.kind}, {short(there.output)}" if there.output else there.kind
            leaves.append(
                Leaf(STAGES, there.name, shown if one else None, shown if other else None)
            )
            continue
        name = one.name if one.name == other.name else f"{one.name}/{other.name}"
        leaves += _both(PARAMETERS, name, flat(one.parameters), flat(other.parameters))
        leaves.append(Leaf(CODE, f"{name}: {one.kind}", one.code_version, other.code_version))
        if one.key is not None and one.key == other.key and one.output and other.output:
            leaves.append(Leaf(BYTES, f"{name}: of the same key", one.output, other.output))
        if one.metrics and other.metrics:  # else one of them has not run
            leaves += _both(METRICS, name, _measured(one), _measured(other))
    leaves += _inputs([pair for pair in pairs if pair[0] and pair[1]])
    leaves += _environments([(x, y) for x, y in pairs if x is not None and y is not None])
    leaves.sort(key=lambda leaf: SECTIONS.index(leaf.section))
    return Comparison(a, b, tuple(leaves), verdict(a, b))


def verdict(a: Side, b: Side) -> Verdict:
    """Whether the figures of the two can be held against each other, and why not: acceptance
    lengths where both were evaluated, else what training measured."""
    reasons, warnings = [], []
    if _outside(a, "verifier") != _outside(b, "verifier"):
        reasons.append("they are for different verifiers")
    training = _training(a, b)
    evaluated = [side.of_kind("evaluate")[-1:] for side in (a, b)]
    if all(evaluated):
        (one,), (other,) = evaluated
        reasons += _evaluations(one, other)
        warnings = training
        measured = "acceptance lengths, by the same verifier, prompts and settings"
    elif a.of_kind("train") and b.of_kind("train"):
        reasons += training
        measured = "losses and accuracies, over the same rows, by the same verifier and vocab map"
    else:
        warnings = training
        measured = "they are for the same verifier"
    return Verdict(not reasons, tuple(reasons) or (measured,), tuple(warnings))


def _training(a: Side, b: Side) -> list[str]:
    """Why what training measured on one side is not what it measured on the other."""
    reasons = []
    if _outputs(a, "vocab") != _outputs(b, "vocab"):
        reasons.append(
            "they have different vocab maps: losses and accuracies are over other tokens, and "
            "output heads do not fit each other"
        )
    if _outputs(a, "prepare") != _outputs(b, "prepare"):
        reasons.append("val_loss and full_acc are over other rows")
    return reasons + _losses(a, b)


def _recorded(registry: Registry, objects: Path, stage: StageRecord) -> SideStage:
    sources: dict[str, dict[str, str]] = {}
    for role, digests in stage.inputs.items():
        records = [registry.artifact(digest) for digest in digests]
        outside = [r for r in records if r is not None and r.state == "external"]
        if outside:
            sources[role] = files_of(outside)
    output = next(iter(stage.outputs.values()), None)
    made = registry.artifact(output) if output is not None else None
    return SideStage(
        stage.name,
        stage.kind,
        int(stage.document["code_version"]),
        stage.document["parameters"],
        sources,
        rows_by_source(made, sources, objects) if made is not None else {},
        stage.key,
        output,
        stage.metrics,
        stage.environment,
    )


def rows_by_source(
    made: ArtifactRecord, sources: Mapping[str, Mapping[str, str]], objects: Path
) -> dict[str, int]:
    """How many rows are of which source, as far as the rows are there to be read."""
    path = objects / made.digest[:2] / made.digest / _ROWS_FILE
    if made.kind != "rows" or not path.exists():
        return {}
    found: dict[str, int] = {}
    with suppress(OSError):  # a damaged file is for `verify` to tell of
        for number, count in sorted(counts(path, "source").items()):
            files = ", ".join(sources.get(f"sources.{number}", {})) or f"source {number}"
            found[files] = found.get(files, 0) + count
    return found


def _pairs(a: Side, b: Side) -> Iterator[tuple[SideStage | None, SideStage | None]]:
    """The stages of both sides that answer to each other: by name and kind, then by kind."""
    left = list(b.stages)
    alone = []
    matched: dict[str, SideStage] = {}
    for stage in a.stages:
        twin = next((x for x in left if (x.name, x.kind) == (stage.name, stage.kind)), None)
        if twin is not None:
            left.remove(twin)
            matched[stage.name] = twin
    for stage in a.stages:
        twin = matched.get(stage.name)
        if twin is None:
            twin = next((x for x in left if x.kind == stage.kind), None)
            if twin is not None:
                left.remove(twin)
        if twin is None:
            alone.append(stage)
        else:
            yield stage, twin
    yield from ((stage, None) for stage in alone)
    yield from ((None, stage) for stage in left)


def _both(
    section: str, stage: str, one: Mapping[str, Any], other: Mapping[str, Any]
) -> Iterator[Leaf]:
    for name in dict.fromkeys([*one, *other]):
        yield Leaf(section, f"{stage}.{name}", one.get(name), other.get(name))


def flat(value: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """The leaves of nested mappings, by their dotted names."""
    found: dict[str, Any] = {}
    for name, item in value.items():
        path = f"{where}.{name}" if where else name
        if isinstance(item, Mapping) and item:
            found |= flat(item, path)
        elif isinstance(item, list) and item and all(isinstance(x, Mapping) for x in item):
            found |= flat({str(index): x for index, x in enumerate(item)}, path)
        else:
            found[path] = item
    return found


def _measured(stage: SideStage) -> dict[str, Any]:
    return {
        name: value
        for name, value in flat(stage.metrics).items()
        if not name.startswith(_MOMENTARY)
    }


def _inputs(pairs: Sequence[tuple[SideStage | None, SideStage | None]]) -> Iterator[Leaf]:
    """Files from outside, each file of a verifier once, however many stages take it."""
    seen: set[tuple[str, str | None, str | None]] = set()
    for one, other in pairs:
        if one is None or other is None:
            continue
        for role in dict.fromkeys([*one.sources, *other.sources]):
            shared = role in ("verifier", "tokenizer")
            then, now = one.sources.get(role, {}), other.sources.get(role, {})
            for name in dict.fromkeys([*then, *now]):
                where = f"verifier: {name}" if shared else f"{one.name}: {name}"
                item = (where, then.get(name), now.get(name))
                if item not in seen:
                    seen.add(item)
                    yield Leaf(INPUTS, *item)
        both = one.rows_of and other.rows_of
        for name in dict.fromkeys([*one.rows_of, *other.rows_of]) if both else ():
            counted = (one.rows_of.get(name), other.rows_of.get(name))
            yield Leaf(INPUTS, f"{one.name}: rows of {name}", *counted)


def _environments(pairs: Sequence[tuple[SideStage, SideStage]]) -> Iterator[Leaf]:
    """Versions and settings; several values on one side where its stages ran with several."""
    values: tuple[dict[str, list[Any]], dict[str, list[Any]]] = ({}, {})
    for pair in pairs:
        for found, stage in zip(values, pair, strict=True):
            for name, value in environments.leaves(stage.environment).items():
                known = found.setdefault(name, [])
                if value not in known:
                    known.append(value)
    one, other = values
    if not one or not other:
        return  # one side has not run yet
    for name in sorted(one.keys() | other.keys()):
        section = CODE if name.startswith("code.") or name == "kimi_eagle" else ENVIRONMENT
        yield Leaf(section, name, *(_single(found.get(name, [])) for found in values))


def _single(values: Sequence[Any]) -> Any:
    if len(values) > 1:
        return ", ".join(sorted(map(str, values)))
    return values[0] if values else None


def _outside(side: Side, role: str) -> dict[str, str]:
    return next((dict(s.sources[role]) for s in side.stages if role in s.sources), {})


def _outputs(side: Side, kind: str) -> set[str | None]:
    return {stage.output for stage in side.of_kind(kind)}


def _evaluations(one: SideStage, other: SideStage) -> list[str]:
    reasons = []
    if _prompts(one) != _prompts(other):
        reasons.append("they were evaluated on different prompts")
    then, now = flat(one.parameters), flat(other.parameters)
    reasons += [
        f"they were evaluated with {name} {then.get(name)} and {now.get(name)}"
        for name in dict.fromkeys([*then, *now])
        if then.get(name) != now.get(name)
    ]
    engines = [(stage.environment.get("packages") or {}).get("vllm") for stage in (one, other)]
    if engines[0] != engines[1]:
        reasons.append(f"they were evaluated with vLLM {engines[0]} and {engines[1]}")
    return reasons


def _prompts(stage: SideStage) -> dict[str, dict[str, str]]:
    """File → digest of an evaluation's prompts, by role."""
    roles = stage.sources.items()
    return {
        role: dict(files) for role, files in roles if role == "prompts" or role.startswith("sets.")
    }


def _losses(a: Side, b: Side) -> list[str]:
    """Settings of the loss itself that differ."""
    one, other = a.of_kind("train")[-1:], b.of_kind("train")[-1:]
    if not one or not other:
        return []
    return [
        f"they were trained with {name} {one[0].parameters.get(name)} and "
        f"{other[0].parameters.get(name)}"
        for name in LOSS_SETTINGS
        if one[0].parameters.get(name) != other[0].parameters.get(name)
    ]
