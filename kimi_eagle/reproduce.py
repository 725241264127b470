"""Make an artifact again from its record, beside the one there is, and say whether it came out so.

    $ kimi-eagle reproduce 3aae8e53
    STAGE   KIND     RESULT     EXPECTED      FOUND
    head    head     reused     6be47dacc73e  6be47dacc73e
    states  extract  reused     5d9bfefaa4eb  5d9bfefaa4eb
    draft   train    identical  3aae8e53c3d4  3aae8e53c3d4

Nothing that is there is overwritten: what comes out another is another object, recorded as
`reproduced`, which no later run takes for its own. Stages that write hidden states are given a
store of their own, or they would find the rows that are to be compared.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kimi_eagle import comparison
from kimi_eagle.artifacts.files import sync_folder, write_json
from kimi_eagle.artifacts.locks import gate
from kimi_eagle.artifacts.objects import STAGING
from kimi_eagle.attempt import Attempts, StageInputs, StateStore, with_records
from kimi_eagle.comparison import Difference
from kimi_eagle.environments import changes, dirty
from kimi_eagle.identity import short, stage_key
from kimi_eagle.manifest.check import validate
from kimi_eagle.manifest.document import Document, Location
from kimi_eagle.manifest.load import LoadedManifest
from kimi_eagle.manifest.model import Manifest
from kimi_eagle.manifest.problem import ManifestError
from kimi_eagle.outcome import Reporter
from kimi_eagle.pins import Pins
from kimi_eagle.plan import RUN, StagePlan, differences
from kimi_eagle.provenance import environment
from kimi_eagle.records import ArtifactRecord, ShardRecord
from kimi_eagle.registry.ledger import Ledger, Reuse
from kimi_eagle.registry.store import Registry
from kimi_eagle.run_record import (
    CannotReproduce,
    Record,
    StageRecord,
    collect,
    losses,
    read,
)
from kimi_eagle.runner import Interrupted, Runner, interruptible
from kimi_eagle.stages.catalog import KINDS
from kimi_eagle.states.layout import ROWS, read_rows, shard_path

REUSED = "reused"
IDENTICAL = "identical"
WITHIN_TOLERANCE = "within_tolerance"
DIFFERS = "differs"
CANNOT = "cannot"
INTERRUPTED = "interrupted"

# From best to worst: a reproduction is as good as its worst stage.
_RANK = (REUSED, IDENTICAL, WITHIN_TOLERANCE, DIFFERS, CANNOT)


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


@dataclass(frozen=True)
class StageResult:
    """How one stage came out."""

    name: str
    kind: str
    status: str
    expected: str
    found: str | None
    differences: tuple[Difference, ...] = ()
    error: str | None = None


@dataclass
class Reproduction:
    """How a reproduction came out."""

    target: str
    run_id: str
    status: str = CANNOT
    stages: list[StageResult] = field(default_factory=list)
    changed: list[dict[str, Any]] = field(default_factory=list)
    """What of the environment changed: name, then, now, and the stages it was other for."""
    warnings: list[str] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """As `reproduce --json` prints it."""
        return {
            "status": self.status,
            "hash": self.target,
            "run_id": self.run_id,
            "stages": [asdict(stage) for stage in self.stages],
            "environment": {"changed": self.changed},
            "warnings": self.warnings,
        }


def find(root: Path, prefix: str, file: Path | None) -> Record:
    """The record to go by: that in a file, or else what the registry under `root` knows.

    Raises: CannotReproduce, RegistryError, UnknownDigest, AmbiguousDigest, OSError.
    """
    if file is not None:
        return read(file, prefix)
    registry = Registry(root, create=False)
    try:
        return collect(registry, root, prefix)
    finally:
        registry.close()


def reproduce(
    root: Path, record: Record, *, sources: Path | None, deep: bool, reporter: Reporter
) -> Reproduction:
    """See `Reproducer.run`."""
    runner = Runner(root, reporter)
    try:
        return Reproducer(runner, record, reporter).run(sources=sources, deep=deep)
    finally:
        runner.close()


class Reproducer:
    """Makes what a record describes again, under a runner's root."""

    def __init__(self, runner: Runner, record: Record, reporter: Reporter):
        self._runner = runner
        self._record = record
        self._reporter = reporter
        self._stages = {stage.name: stage for stage in record.stages}
        self._remade: dict[str, str] = {}
        """Stage → what it made this time."""

    def run(self, *, sources: Path | None, deep: bool) -> Reproduction:
        """Check the inputs, run what must be run, compare.

        Args:
            sources: the folder that the manifest's relative paths are relative to, where it is
                not the one it was submitted from.
            deep: run every stage that leads to the target, whatever the store holds.

        Raises:
            InputsDiffer: an input is missing or another; nothing was run.
            CannotReproduce: this program would run something else; nothing was run.
        """
        self._runner.clear_dead()
        loaded = rebuilt(self._record, sources)
        _code_is_the_same(self._record)
        pins = self._pinned(loaded)
        plans = self._plans(loaded, pins)
        run_id = secrets.token_hex(6)
        result = Reproduction(self._record.target, run_id)
        private = self._runner.root / STAGING / f"{run_id}-states"
        status = "failed"
        with self._runner.recording(run_id, loaded, "reproduce"):
            states = StateStore(private, Ledger(private))
            try:
                with interruptible():
                    again = self._settle(loaded, pins, plans, deep, result)
                    self._compare_environments(result, again)
                    self._loop(loaded, pins, plans, again, states, result)
                result.status = max(
                    (stage.status for stage in result.stages), key=_RANK.index, default=CANNOT
                )
                status = "failed" if result.status == CANNOT else "done"
            except (Interrupted, KeyboardInterrupt):
                result.status = status = INTERRUPTED
            finally:
                states.registry.close()
                shutil.rmtree(private, ignore_errors=True)
                self._runner.end(run_id, status)
            write_json(self._runner.root / run_id / "outcome.json", result.document())
        return result

    def _pinned(self, loaded: LoadedManifest) -> Pins:
        """The inputs from outside, which are those of the record.

        Raises: InputsDiffer.
        """
        try:
            pins = self._runner.pin(loaded)
        except ManifestError as error:
            raise InputsDiffer(self._missing(error), str(error)) from None
        wrong = []
        for stage in self._record.stages:
            for role, items in pins.stages[stage.name].items():
                expected = [(d, self._artifact(d)) for d in stage.inputs.get(role, ())]
                found = [(item.record.digest, item.record) for item in items]
                if [d for d, _ in expected] != [d for d, _ in found]:
                    wrong += _wrong_inputs(stage.name, role, expected, found)
        if wrong:
            raise InputsDiffer(list(dict.fromkeys(wrong)))
        return pins

    def _missing(self, error: ManifestError) -> list[WrongInput]:
        """What was to be where a manifest's path leads to nothing."""
        found = []
        for problem in error.problems:
            for stage in self._record.stages:
                for role, digests in stage.inputs.items():
                    place = ("stages", stage.name, *role.split("."), "path")
                    verifier = role in ("verifier", "tokenizer") and problem.path[:1] == (
                        "verifier",
                    )
                    if verifier or tuple(map(str, problem.path)) == place:
                        found += [
                            WrongInput(stage.name, role, self._artifact(d).label, d, None)
                            for d in digests
                        ]
        return found

    def _plans(self, loaded: LoadedManifest, pins: Pins) -> dict[str, StagePlan]:
        """Each stage as this program would run it, which is as it was run.

        Raises: CannotReproduce: its parameters would be others.
        """
        plans = {}
        for stage in self._record.stages:
            kind = KINDS[stage.kind]
            key, document = stage_key(
                kind.name,
                kind.code_version,
                kind.identity(loaded.manifest.stages[stage.name], pins.verifier.facts),
                stage.inputs,
            )
            if key != stage.key:
                others = differences(stage.document, json.loads(json.dumps(document)))
                raise CannotReproduce(
                    f"{stage.name} would not be run as it was: {'; '.join(others)}; use the "
                    f"version that made it ({stage.environment.get('kimi_eagle', 'unknown')})"
                )
            plans[stage.name] = StagePlan(
                stage.name,
                stage.kind,
                RUN,
                key,
                document,
                {role: list(digests) for role, digests in stage.inputs.items()},
                [f"to be compared with what run {stage.run_id} made"],
            )
        return plans

    def _settle(
        self,
        loaded: LoadedManifest,
        pins: Pins,
        plans: Mapping[str, StagePlan],
        deep: bool,
        result: Reproduction,
    ) -> set[str]:
        """Say which stages are run again, and record the use of the others, so that they stay."""
        registry = self._runner.registry
        with gate(self._runner.root, shared=True):
            again = self._again(loaded, deep)
            made = {
                name: registry.made_by_key(stage.key)
                for name, stage in self._stages.items()
                if name not in again and self._trouble(name) is None
            }
            registry.reuse_executions(
                result.run_id,
                [
                    Reuse(name, execution, with_records(plans[name], pins.stages[name]))
                    for name, execution in made.items()
                    if execution is not None and execution.outputs == self._stages[name].outputs
                ],
                pins.members(made),
            )
        return again

    def _again(self, loaded: LoadedManifest, deep: bool) -> set[str]:
        """The stages to run: the target's, and those below whose artifacts are not whole."""
        if deep:
            return set(self._stages)
        again = {self._record.stage}
        for name in reversed(self._stages):
            if name in again:
                for _, source in loaded.manifest.upstream(name):
                    if self._trouble(source) is not None:
                        again.add(source)
        return again

    def _trouble(self, name: str) -> str | None:
        """Why what a stage once made cannot be used from this store; None when it can."""
        for digest in self._stages[name].outputs.values():
            if self._runner.registry.artifact(digest) is None:
                return f"{short(digest)} is not in the registry"
            trouble = self._runner.history.artifact_trouble(self._artifact(digest))
            if trouble is not None:
                return trouble
        return None

    def _loop(
        self,
        loaded: LoadedManifest,
        pins: Pins,
        plans: Mapping[str, StagePlan],
        again: set[str],
        states: StateStore,
        result: Reproduction,
    ) -> None:
        for name, stage in self._stages.items():
            if name not in again:
                if self._trouble(name) is None:
                    expected = self._expected(stage)
                    result.stages.append(StageResult(name, stage.kind, REUSED, expected, expected))
                continue
            outcome = self._one(loaded, pins, plans[name], states, result.run_id)
            result.stages.append(outcome)
            self._reporter.note(f"{name}: {outcome.status.replace('_', ' ')}")
            if outcome.status == CANNOT:
                return

    def _one(
        self,
        loaded: LoadedManifest,
        pins: Pins,
        stage: StagePlan,
        states: StateStore,
        run_id: str,
    ) -> StageResult:
        """Run one stage again and compare what it makes."""
        runner = self._runner
        expected = self._artifact(self._expected(self._stages[stage.name]))
        damage = runner.objects.trouble(expected)
        if not runner.objects.path(expected.digest).is_dir():
            damage = None  # it is not there, which harms nobody
        given, store, notes = self._given(loaded, pins, stage, states)
        attempts = Attempts(
            runner.root, runner.registry, runner.objects, runner.digests, self._reporter, store
        )
        outcome = attempts.execute(run_id, stage, given, disposition="reproduced")
        self._reporter.stage_ended(outcome)

        def result(
            status: str, found: str | None, listed: Sequence[Difference] = ()
        ) -> StageResult:
            return StageResult(
                stage.name,
                stage.kind,
                status,
                expected.digest,
                found,
                (*listed, *notes),
                outcome.error,
            )

        if outcome.error is not None:
            return result(CANNOT, None)
        found = outcome.outputs[KINDS[stage.kind].output]
        self._remade[stage.name] = found
        if found == expected.digest:
            if stage.kind == "extract":
                self._adopt(found, states)
            if damage is not None:
                notes.append({"note": f"{damage}: what was made this time took its place"})
            return result(IDENTICAL, found)
        made = runner.registry.artifact(found)
        assert made is not None, "what a stage made is in the registry"
        listed = self._differences(stage, run_id, expected, made, states)
        determinism = KINDS[stage.kind].determinism
        if determinism.bound is None or not comparison.within(listed, determinism.bound):
            return result(DIFFERS, found, listed)
        notes.append({"note": f"the tolerance is {determinism.bound:g} ({determinism.measure})"})
        return result(WITHIN_TOLERANCE, found, listed)

    def _given(
        self, loaded: LoadedManifest, pins: Pins, stage: StagePlan, states: StateStore
    ) -> tuple[StageInputs, StateStore, list[Difference]]:
        """What a stage is given, entered in its plan; where it finds hidden states; and what is to
        be said of the inputs."""
        upstream, notes, store = {}, list[Difference](), states
        for role, source in loaded.manifest.upstream(stage.name):
            digest = self._taken(source)
            upstream[role] = (digest, source)
            stage.inputs[role] = [digest]
            if digest != self._expected(self._stages[source]):
                notes.append({"note": f"made from the {role} of this time, which are others"})
            if self._stages[source].kind == "extract" and self._remade.get(source) != digest:
                store = StateStore(self._runner.root, self._runner.registry)
        kind, params = KINDS[stage.kind], loaded.manifest.stages[stage.name]
        identity = kind.identity(params, pins.verifier.facts)
        stage.key, stage.document = stage_key(kind.name, kind.code_version, identity, stage.inputs)
        given = StageInputs(params, pins.verifier.path, pins.stages[stage.name], upstream)
        return given, store, notes

    def _taken(self, source: str) -> str:
        """What a stage takes from another: what that made this time, if it came out the same or
        the recorded one is not there; so one difference is not told of every stage above it."""
        recorded = self._expected(self._stages[source])
        remade = self._remade.get(source, recorded)
        return remade if remade == recorded or self._trouble(source) is not None else recorded

    def _differences(
        self,
        stage: StagePlan,
        run_id: str,
        expected: ArtifactRecord,
        found: ArtifactRecord,
        states: StateStore,
    ) -> list[Difference]:
        runner = self._runner
        scratch = states.root / "compared"
        try:
            if stage.kind == "extract":
                # Its rows go with this attempt: only how they were made is kept.
                runner.registry.set_state(found.digest, "evicted")
                return comparison.compare_states(
                    expected, found, runner.objects, runner.root, states.root, scratch
                )
            tensors = self._record.tensors.get(expected.digest, {})
            listed = comparison.compare_files(expected, found, runner.objects, tensors, scratch)
        except OSError as error:
            return [{"note": str(error)}]
        then = self._stages[stage.name].losses
        events = runner.root / run_id / "stages" / f"{stage.name}.events"
        return listed + comparison.first_parting(then, losses(events))

    def _adopt(self, digest: str, states: StateStore) -> None:
        """Keep rows that came out the same, where the store lacks them."""
        runner = self._runner
        runner.history.check_shards()  # what the index lists may be gone from the disk
        rows = read_rows((runner.objects.path(digest) / ROWS).read_text("utf-8"))
        keys = {row.key for row in rows}
        missing = runner.registry.missing_rows(sorted(keys))
        for shard, size in states.registry.shards() if missing else ():
            source = shard_path(states.root, shard)
            listed = json.loads(source.with_suffix(".json").read_text("utf-8"))["rows"]
            if not missing & {row[0] for row in listed}:
                continue
            target = shard_path(runner.root, shard)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source.with_suffix(".json"), target.with_suffix(".json"))
            # Training may read it here and there: one file, two names.
            target.unlink(missing_ok=True)
            target.hardlink_to(source)
            sync_folder(target.parent)
            runner.registry.add_shard(
                ShardRecord(shard, size, tuple((r[0], r[1], r[2], r[3]) for r in listed))
            )

    def _compare_environments(self, result: Reproduction, again: set[str]) -> None:
        found: dict[str, dict[str, Any]] = {}
        unclean: dict[str, list[str]] = {}
        for stage in self._record.stages:
            if stage.name not in again:
                continue
            for change in changes(stage.environment, environment()):
                entry = {**asdict(change), "text": change.text(), "stages": []}
                found.setdefault(change.text(), entry)["stages"].append(stage.name)
            diff = dirty(stage.environment)
            if diff is not None:
                unclean.setdefault(diff, []).append(stage.name)
        result.changed = list(found.values())
        for diff, names in unclean.items():
            same = dirty(environment()) == diff
            warning = (
                f"{', '.join(names)}: made from a checkout with changes that were not committed "
                f"(their digest {diff}): the commit alone does not say what ran; the checkout here "
                + ("has the same changes" if same else "does not have them")
            )
            result.warnings.append(warning)
            self._reporter.note(f"warning: {warning}")

    def _artifact(self, digest: str) -> ArtifactRecord:
        return self._record.artifacts[digest].record(digest)

    def _expected(self, stage: StageRecord) -> str:
        return stage.outputs[KINDS[stage.kind].output]


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
            places += [*stage.get("sources", ()), *filter(None, [stage.get("prompts")])]
        for place in places:
            path = Path(place["path"])
            if path.is_absolute() and not path.exists():
                place["path"] = path.name
    document = Document(str(folder / origin.name), data, {(): Location(None, None)}, {})
    text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
    return LoadedManifest(validate(Manifest, document), document, folder / origin.name, text, ())


def _code_is_the_same(record: Record) -> None:
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
