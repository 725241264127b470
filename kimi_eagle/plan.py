"""What would run, and why: stage keys against what the registry knows. Pure.

$ kimi-eagle plan manifests/demo.yaml
  #  STAGE   ACTION   KEY           WHY
  1  rows    reuse    9c41e07a51c2  made by run 71be04…
  2  states  run      50aa3c18e0b4  layers [2, 18, 33] → [2, 16, 31]
  3  draft   depends  -             on states
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kimi_eagle.identity import short, stage_key
from kimi_eagle.manifest.model import Manifest
from kimi_eagle.records import ArtifactRecord, ExecutionRecord
from kimi_eagle.stages.catalog import KINDS
from kimi_eagle.verifiers.facts import VerifierFacts

REUSE = "reuse"
RUN = "run"
DEPENDS = "depends"


# What is known of the artifact with a digest: reasons then name the files that changed.
Named = Callable[[str], ArtifactRecord | None]


class History(Protocol):
    """What planning asks about the past."""

    def made_by_key(self, key: str) -> ExecutionRecord | None: ...

    def latest_of(self, kind: str, stage: str) -> ExecutionRecord | None: ...

    def trouble(self, execution: ExecutionRecord) -> str | None:
        """Why an execution's outputs cannot be used as they are on disk; None when they can."""
        ...


@dataclass
class StagePlan:
    """One stage as planned; `key` is None while an input is not known yet."""

    name: str
    kind: str
    action: str = DEPENDS
    key: str | None = None
    document: dict[str, Any] | None = None
    inputs: dict[str, list[str]] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    made: ExecutionRecord | None = None


def plan(
    manifest: Manifest,
    facts: VerifierFacts,
    externals: Mapping[str, Mapping[str, list[str]]],
    history: History,
    settled: Mapping[str, ExecutionRecord] | None = None,
    versions: Mapping[str, str] | None = None,
    named: Named | None = None,
    lacking: Mapping[str, Sequence[str]] | None = None,
) -> list[StagePlan]:
    """Decide for every stage, in the order they would run.

    Args:
        externals: digests of the external inputs, by stage and role.
        settled: stages this run has executed or reused already; they are not looked at again.
        versions: those of the packages now; what was made with others says so.
        named: see `differences`.
        lacking: of stages whose external inputs are not all here, what is not, in words.

    A stage whose outputs are known but gone from the disk runs again only if something that needs
    them runs, or nothing takes from it: a known digest is enough to key its consumers.
    """
    settled = settled or {}
    stages: dict[str, StagePlan] = {}
    absent: dict[str, str] = {}
    for name in manifest.order():
        absent_here = (lacking or {}).get(name, ())
        stage = _keyed(manifest, name, facts, externals[name], stages, absent_here)
        stages[name] = stage
        if stage.key is None:
            continue
        if name in settled and settled[name].key == stage.key:
            stage.made, stage.action = settled[name], REUSE
            stage.reasons = _made(stage.made, versions or {})
            continue
        stage.made = history.made_by_key(stage.key)
        if stage.made is None:
            stage.action = RUN
            stage.reasons = _why(stage, history.latest_of(stage.kind, name), named)
            continue
        stage.action = REUSE
        stage.reasons = _made(stage.made, versions or {})
        trouble = history.trouble(stage.made)
        if trouble is not None:
            absent[name] = trouble
    _run_absent(manifest, stages, absent)
    return list(stages.values())


def _keyed(
    manifest: Manifest,
    name: str,
    facts: VerifierFacts,
    externals: Mapping[str, list[str]],
    before: Mapping[str, StagePlan],
    lacking: Sequence[str],
) -> StagePlan:
    params = manifest.stages[name]
    kind = KINDS[params.kind]
    stage = StagePlan(name, params.kind)
    inputs = {role: list(digests) for role, digests in externals.items()}
    waits = []
    for role, source in manifest.upstream(name):
        made = before[source].made
        if made is None:
            waits.append(source)
        else:
            inputs[role] = [made.outputs[KINDS[made.kind].output]]
    stage.inputs = inputs
    if waits:
        stage.reasons = [f"depends on {', '.join(dict.fromkeys(waits))}"]
    stage.reasons += lacking
    if stage.reasons:
        return stage
    stage.key, stage.document = stage_key(
        kind.name, kind.code_version, kind.identity(params, facts), inputs
    )
    return stage


def _run_absent(
    manifest: Manifest, stages: Mapping[str, StagePlan], absent: Mapping[str, str]
) -> None:
    """Backwards: what is gone from the disk is made again where it is needed."""
    takers: dict[str, list[str]] = {name: [] for name in stages}
    for name in stages:
        for _, source in manifest.upstream(name):
            takers[source].append(name)
    for name in reversed(list(stages)):
        if name not in absent:
            continue
        needed = [taker for taker in takers[name] if stages[taker].action != REUSE]
        if needed or not takers[name]:
            stages[name].action = RUN
            stages[name].reasons = [absent[name]]
        else:
            stages[name].reasons += [absent[name], "gone from the disk, but nothing needs it"]


def _made(made: ExecutionRecord, versions: Mapping[str, str]) -> list[str]:
    """Which run made it, and with which versions that are others now."""
    before = versions_of(made.environment)
    others = [
        f"made with {name} {before[name]}, now {version}"
        for name, version in versions.items()
        if name in before and before[name] != version
    ]
    return [f"made by run {made.run_id}", *others]


def versions_of(environment: Mapping[str, Any]) -> dict[str, str]:
    """The versions in a recorded environment that can change what a stage makes."""
    named = {"kimi-eagle": environment.get("kimi_eagle"), "python": environment.get("python")}
    return {name: str(version) for name, version in named.items() if version} | dict(
        environment.get("packages", {})
    )


def _why(stage: StagePlan, before: ExecutionRecord | None, named: Named | None = None) -> list[str]:
    if before is None or before.document is None or stage.document is None:
        return ["never made before"]
    return differences(before.document, stage.document, named) or ["never made before"]


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], named: Named | None = None
) -> list[str]:
    """What differs between two key documents, smallest first, in words.

    Where `named` knows an input from outside, the files of it that changed are named.
    """
    found = []
    if old["code_version"] != new["code_version"]:
        found.append(
            f"code of {new['kind']} changed (version {old['code_version']} → {new['code_version']})"
        )
    found += _leaves("", old["parameters"], new["parameters"])
    roles = dict.fromkeys([*old["inputs"], *new["inputs"]])
    for role in roles:
        before, after = old["inputs"].get(role), new["inputs"].get(role)
        if before != after:
            found += _input_changes(role, before or [], after or [], named)
    return found


def _input_changes(
    role: str, before: list[str], after: list[str], named: Named | None
) -> list[str]:
    whole = [f"input {role} changed ({_digests(before)} → {_digests(after)})"]
    if named is None:
        return whole
    then, now = (_outside([named(digest) for digest in items]) for items in (before, after))
    if then is None or now is None:
        return whole
    found = []
    for name in dict.fromkeys([*then, *now]):
        if name not in then:
            found.append(f"{name} is new ({short(now[name])})")
        elif name not in now:
            found.append(f"{name} is gone (was {short(then[name])})")
        elif then[name] != now[name]:
            found.append(f"{name} changed ({short(then[name])} → {short(now[name])})")
    return found or whole  # the same files in another order


def _outside(records: list[ArtifactRecord | None]) -> dict[str, str] | None:
    """File → digest of inputs from outside; None when they are not, or not known, or two of them
    have one name."""
    files: list[tuple[str, str]] = []
    for record in records:
        if record is None or record.state != "external":
            return None
        if record.kind == "source":
            files.append((f"source {record.label}", record.digest))
        else:
            files += [(f"{record.kind} {path}", d) for path, (d, _) in record.files.items()]
    found = dict(files)
    return found if len(found) == len(files) else None


def _digests(items: list[str] | None) -> str:
    return ", ".join(short(item) for item in items) if items else "none"


def _leaves(where: str, old: Any, new: Any) -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for key in dict.fromkeys([*old, *new]):
            path = f"{where}.{key}" if where else key
            if key not in old:
                found.append(f"{path} is new: {new[key]}")
            elif key not in new:
                found.append(f"{path} is gone (was {old[key]})")
            else:
                found += _leaves(path, old[key], new[key])
        return found
    return [] if old == new and type(old) is type(new) else [f"{where} {old} → {new}"]
