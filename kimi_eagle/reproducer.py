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
from pathlib import Path

from kimi_eagle import comparison
from kimi_eagle.artifacts.files import sync_folder, write_json
from kimi_eagle.artifacts.locks import gate
from kimi_eagle.artifacts.objects import STAGING
from kimi_eagle.attempt import Attempts, StageInputs, with_records
from kimi_eagle.comparison import Difference
from kimi_eagle.forecast import makes_states
from kimi_eagle.harvest import StateStore
from kimi_eagle.identity import short, stage_key
from kimi_eagle.interrupts import Interrupted, interruptible
from kimi_eagle.manifest.load import LoadedManifest
from kimi_eagle.outcome import Reporter
from kimi_eagle.pins import Pins
from kimi_eagle.plan import RUN, StagePlan, differences
from kimi_eagle.provenance import environment
from kimi_eagle.recorded_inputs import code_is_the_same, pinned, rebuilt
from kimi_eagle.records import ArtifactRecord, ShardRecord
from kimi_eagle.registry.ledger import Ledger, Reuse
from kimi_eagle.registry.store import Registry
from kimi_eagle.reproduction import (
    CANNOT,
    DIFFERS,
    IDENTICAL,
    INTERRUPTED,
    RANK,
    REUSED,
    WITHIN_TOLERANCE,
    Reproduction,
    StageResult,
)
from kimi_eagle.run_record import (
    CannotReproduce,
    Record,
    StageRecord,
    collect,
    losses,
    read,
)
from kimi_eagle.runner import Runner
from kimi_eagle.stages.catalog import KINDS
from kimi_eagle.states.layout import ROWS, shard_path, stored_digests


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
        code_is_the_same(self._record)
        pins = pinned(self._record, loaded, self._runner.pin)
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
                    run_again = [stage for stage in self._record.stages if stage.name in again]
                    result.compare_environments(run_again, environment())
                    for warning in result.warnings:
                        self._reporter.note(f"warning: {warning}")
                    self._loop(loaded, pins, plans, again, states, result)
                result.status = max(
                    (stage.status for stage in result.stages), key=RANK.index, default=CANNOT
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
            if makes_states(stage.kind):
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
            if makes_states(self._stages[source].kind) and self._remade.get(source) != digest:
                store = StateStore(self._runner.root, self._runner.registry)
        kind, params = KINDS[stage.kind], loaded.manifest.stages[stage.name]
        identity = kind.identity(params, pins.verifier.facts)
        stage.key, stage.document = stage_key(kind.name, kind.code_version, identity, stage.inputs)
        again = kind.again(params)
        given = StageInputs(again, pins.verifier.path, pins.stages[stage.name], upstream)
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
            if makes_states(stage.kind):
                # Its rows go with this attempt: only how they were made is kept.
                runner.registry.set_state(found.digest, "evicted")
                return comparison.compare_states(
                    expected, found, runner.objects, runner.root, states.root, scratch
                )
            tensors = self._record.tensors.get(expected.digest, {})
            listed = comparison.compare_files(expected, found, runner.objects, tensors, scratch)
            if stage.kind == "regenerate":
                listed = comparison.compare_answers(expected, found, runner.objects) + listed
        except OSError as error:
            return [{"note": str(error)}]
        then = self._stages[stage.name].losses
        events = runner.root / run_id / "stages" / f"{stage.name}.events"
        return listed + comparison.first_parting(then, losses(events))

    def _adopt(self, digest: str, states: StateStore) -> None:
        """Keep rows that came out the same, where the store lacks them."""
        runner = self._runner
        runner.history.check_shards()  # what the index lists may be gone from the disk
        rows = stored_digests((runner.objects.path(digest) / ROWS).read_text("utf-8"))
        missing = runner.registry.missing_rows(sorted(rows))
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

    def _artifact(self, digest: str) -> ArtifactRecord:
        return self._record.artifacts[digest].record(digest)

    def _expected(self, stage: StageRecord) -> str:
        return stage.outputs[KINDS[stage.kind].output]
