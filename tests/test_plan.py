"""Planning: what is reused, what runs, what depends, and the reason of each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from conftest import DEMO

from kimi_eagle.identity import digest_document
from kimi_eagle.manifest.load import load
from kimi_eagle.manifest.model import Manifest
from kimi_eagle.plan import DEPENDS, REUSE, RUN, StagePlan, plan
from kimi_eagle.records import ExecutionRecord
from kimi_eagle.stages.catalog import KINDS
from kimi_eagle.stages.contract import VerifierFiles
from kimi_eagle.stages.vocab.spec import Vocab
from kimi_eagle.verifiers.facts import VerifierFacts, read_facts

MANIFEST = """\
version: 1
name: whole
verifier: {path: verifier}
stages:
  head: {kind: head}
  rows: {kind: prepare, sources: [{path: chats.jsonl}]}
  states: {kind: extract, rows: rows, layers: [2, 4, 5]}
  vocab: {kind: vocab, rows: rows, size: 256}
  draft: {kind: train, head: head, states: states, vocab: vocab, lr: 3e-5}
  score: {kind: evaluate, checkpoint: draft, prompts: {path: prompts.jsonl}}
  release: {kind: export, checkpoint: draft, evaluation: score}
"""
STAGES = ("head", "rows", "states", "vocab", "draft", "score", "release")


@dataclass
class Past:
    """A history in memory: every stage it ran made an artifact named after its key."""

    made: dict[str, ExecutionRecord] = field(default_factory=dict)
    gone: dict[str, str] = field(default_factory=dict)

    def made_by_key(self, key: str) -> ExecutionRecord | None:
        return self.made.get(key)

    def latest_of(self, kind: str, stage: str) -> ExecutionRecord | None:
        of_kind = [record for record in self.made.values() if record.kind == kind]
        return next((r for r in reversed(of_kind) if r.stage == stage), (of_kind or [None])[-1])

    def trouble(self, execution: ExecutionRecord) -> str | None:
        return self.gone.get(execution.stage)

    def run(self, stage: StagePlan) -> ExecutionRecord:
        assert stage.key is not None
        record = ExecutionRecord(
            resources={},
            id=len(self.made) + 1,
            run_id="0123456789ab",
            stage=stage.name,
            kind=stage.kind,
            key=stage.key,
            document=json.loads(json.dumps(stage.document)),
            disposition="executed",
            reused_from=None,
            metrics={},
            environment={},
            error=None,
            seconds=1.0,
            started_at="",
            ended_at="",
            outputs={KINDS[stage.kind].output: digest_document("test/1", stage.key)},
        )
        self.made[stage.key] = record
        return record


@pytest.fixture(scope="module")
def facts() -> VerifierFacts:
    return read_facts(json.loads((DEMO / "verifier" / "config.json").read_text("utf-8")))


@dataclass
class Case:
    """A manifest that is planned again and again against one past."""

    manifest: Path
    facts: VerifierFacts
    past: Past = field(default_factory=Past)
    content: dict[str, str] = field(default_factory=dict)

    def load(self, *overrides: str) -> Manifest:
        return load(self.manifest, overrides).manifest

    def externals(self, manifest: Manifest) -> Mapping[str, Mapping[str, list[str]]]:
        return {
            name: {
                role: [
                    self.content.get(item.part if isinstance(item, VerifierFiles) else item.path)
                    or digest_document("test/1", str(item))
                    for item in items
                ]
                for role, items in KINDS[stage.kind].externals(stage).items()
            }
            for name, stage in manifest.stages.items()
        }

    def plan(self, *overrides: str) -> dict[str, StagePlan]:
        manifest = self.load(*overrides)
        stages = plan(manifest, self.facts, self.externals(manifest), self.past)
        return {stage.name: stage for stage in stages}

    def run(self, *overrides: str) -> list[str]:
        """Run what is to be run, as the runner would; the names of what ran."""
        manifest, settled, ran = self.load(*overrides), {}, []
        while True:
            stages = plan(manifest, self.facts, self.externals(manifest), self.past, settled)
            for stage in stages:
                if stage.action == REUSE and stage.made is not None:
                    settled[stage.name] = stage.made
            waiting = [stage for stage in stages if stage.action == RUN]
            if not waiting:
                return ran
            settled[waiting[0].name] = self.past.run(waiting[0])
            self.past.gone.pop(waiting[0].name, None)
            ran.append(waiting[0].name)

    def actions(self, *overrides: str) -> dict[str, str]:
        return {name: stage.action for name, stage in self.plan(*overrides).items()}


@pytest.fixture
def case(tmp_path: Path, facts: VerifierFacts) -> Case:
    path = tmp_path / "manifest.yaml"
    path.write_text(MANIFEST, "utf-8")
    return Case(path, facts)


@pytest.fixture
def ran(case: Case) -> Case:
    assert case.run() == list(STAGES)
    return case


def test_at_first_what_has_its_inputs_runs_and_the_rest_depends(case: Case) -> None:
    planned = case.plan()
    assert {name: stage.action for name, stage in planned.items()} == {
        "head": RUN,
        "rows": RUN,
        **dict.fromkeys(STAGES[2:], DEPENDS),
    }
    assert planned["rows"].reasons == ["never made before"]
    assert planned["draft"].reasons == ["depends on head, states, vocab, rows"]
    assert planned["draft"].key is None


def test_afterwards_everything_is_reused(ran: Case) -> None:
    # RUN-15
    assert set(ran.actions().values()) == {REUSE}
    assert ran.plan()["draft"].reasons == ["made by run 0123456789ab"]


def test_a_changed_learning_rate_runs_training_and_what_follows(ran: Case) -> None:
    # RUN-02
    planned = ran.plan("stages.draft.lr=1e-4")
    assert {name for name, stage in planned.items() if stage.action != REUSE} == {
        "draft",
        "score",
        "release",
    }
    assert planned["draft"].action == RUN
    assert planned["draft"].reasons == ["lr 3e-05 → 0.0001"]
    assert planned["score"].reasons == ["depends on draft"]


@pytest.mark.parametrize(
    ("override", "stage", "reason"),
    [
        ("stages.rows.max_length=64", "rows", "max_length 2048 → 64"),
        ("stages.rows.sources.0.limit=3", "rows", "sources None → 3"),
        ("stages.states.layers=[1, 2, 3]", "states", "layers [2, 4, 5] → [1, 2, 3]"),
        ("stages.vocab.size=32", "vocab", "size 256 → 32"),  # VOC-06
        ("stages.vocab.size=null", "vocab", "size 256 → None"),
        ("stages.draft.seed=1", "draft", "seed 0 → 1"),
        ("stages.draft.noise={std: 0.1}", "draft", "noise None → "),
        ("stages.draft.draft.norm_before_residual=true", "draft", "norm_before_residual False"),
        ("stages.score.draft_tokens=5", "score", "draft_tokens 3 → 5"),
        ("stages.release.gate.min_acceptance_length=2", "release", "min_acceptance_length 1.0 →"),
    ],
)
def test_a_changed_setting_runs_its_stage_and_is_the_reason(
    ran: Case, override: str, stage: str, reason: str
) -> None:
    (changed,) = (item for item in ran.plan(override).values() if item.action == RUN)
    assert changed.name == stage
    if not reason.startswith("sources"):
        assert reason in "; ".join(changed.reasons)
    assert len(changed.reasons) == 1


@pytest.mark.parametrize(
    "override",
    [
        "name=other",
        "verifier.revision=v2",
        "verifier.path=elsewhere",
        "stages.states.shard_bytes=1024",
        "stages.draft.loader_workers=8",
        "stages.draft.muon_lr=0.5",  # of an optimizer that is not used
        "stages.draft.lr=0.00003",
        "stages.states.layers=[2, 4, 5]",
    ],
)
def test_placement_names_and_spelling_change_no_key(ran: Case, override: str) -> None:
    # RUN-05
    assert set(ran.actions(override).values()) == {REUSE}


def test_a_default_written_out_changes_no_key(ran: Case) -> None:
    # MAN-18; the verifier's default layers are [2, 4, 5]
    assert set(ran.actions("stages.states.layers=default").values()) == {REUSE}


def test_a_changed_source_runs_what_reads_it_and_names_it(ran: Case) -> None:
    ran.content["chats.jsonl"] = digest_document("test/1", "other")
    planned = ran.plan()
    assert [name for name, stage in planned.items() if stage.action == RUN] == ["rows"]
    (reason,) = planned["rows"].reasons
    assert reason.startswith("input sources.0 changed (")
    assert reason.endswith(f" → {ran.content['chats.jsonl'][:12]})")


def test_a_changed_tokenizer_runs_rows_and_a_changed_weight_does_not(ran: Case) -> None:
    # PRE-33
    ran.content["whole"] = digest_document("test/1", "weights")
    assert ran.actions()["rows"] == REUSE
    assert ran.actions()["head"] == ran.actions()["states"] == RUN
    ran.content["tokenizer"] = digest_document("test/1", "template")
    assert ran.actions()["rows"] == RUN


def test_the_same_output_again_cuts_off_everything_below(ran: Case) -> None:
    (before,) = (record for record in ran.past.made.values() if record.stage == "rows")
    ran.content["chats.jsonl"] = digest_document("test/1", "compressed")
    rows = ran.plan()["rows"]
    ran.past.made[str(rows.key)] = replace(ran.past.run(rows), outputs=before.outputs)
    assert set(ran.actions().values()) == {REUSE}


def test_a_changed_code_version_is_named(ran: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    # RUN-03
    monkeypatch.setattr(Vocab, "code_version", Vocab.code_version + 1)
    planned = ran.plan()
    assert planned["vocab"].action == RUN
    old = Vocab.code_version - 1
    assert planned["vocab"].reasons == [
        f"code of vocab changed (version {old} → {Vocab.code_version})"
    ]


def test_another_version_of_a_package_is_named_and_runs_nothing(ran: Case) -> None:
    # RUN-03
    for key, made in ran.past.made.items():
        environment = {"kimi_eagle": "0.1.0", "packages": {"torch": "2.12.0", "vllm": "1"}}
        ran.past.made[key] = replace(made, environment=environment)
    manifest = ran.load()
    now = {"kimi-eagle": "0.2.0", "python": "3.12", "torch": "2.13.0"}
    stages = plan(manifest, ran.facts, ran.externals(manifest), ran.past, versions=now)
    assert {stage.action for stage in stages} == {REUSE}
    assert stages[0].reasons == [
        "made by run 0123456789ab",
        "made with kimi-eagle 0.1.0, now 0.2.0",
        "made with torch 2.12.0, now 2.13.0",
    ]


def test_what_is_gone_but_not_needed_stays_gone(ran: Case) -> None:
    ran.past.gone["states"] = "states: 5 rows are not stored"
    planned = ran.plan()
    assert planned["states"].action == REUSE
    assert "gone from the disk, but nothing needs it" in planned["states"].reasons
    assert ran.run() == []


def test_what_is_gone_and_needed_is_made_again_first(ran: Case) -> None:
    ran.past.gone |= {"states": "states: 5 rows are not stored", "rows": "rows is missing"}
    planned = ran.plan("stages.draft.lr=1e-4")
    assert planned["states"].reasons == ["states: 5 rows are not stored"]
    assert ran.run("stages.draft.lr=1e-4") == ["rows", "states", "draft", "score", "release"]


def test_what_is_gone_and_taken_by_nothing_is_made_again(ran: Case) -> None:
    # RUN-14
    ran.past.gone["release"] = "release: model.safetensors was altered"
    planned = ran.plan()
    assert [name for name, stage in planned.items() if stage.action == RUN] == ["release"]
    assert planned["release"].reasons == ["release: model.safetensors was altered"]


def test_two_trainings_share_one_extraction(case: Case) -> None:
    more = "  other: {kind: train, head: head, states: states, vocab: vocab, lr: 1e-3}\n"
    case.manifest.write_text(MANIFEST + more, "utf-8")
    ran = case.run()
    assert sorted(ran) == sorted([*STAGES, "other"])


def test_two_stages_that_say_the_same_run_once(case: Case) -> None:
    case.manifest.write_text(MANIFEST + "  again: {kind: head}\n", "utf-8")
    assert "again" not in case.run()
    planned = case.plan()
    assert planned["again"].key == planned["head"].key


def test_stages_are_planned_in_the_order_of_their_needs_however_they_are_written(
    case: Case,
) -> None:
    head, *lines = MANIFEST.partition("stages:\n")[2].splitlines(keepends=True)
    text = MANIFEST.partition("stages:\n")[0] + "stages:\n" + "".join(reversed(lines)) + head
    case.manifest.write_text(text, "utf-8")
    order = list(case.plan())
    assert sorted(order) == sorted(STAGES)
    for before, after in (("rows", "states"), ("vocab", "draft"), ("score", "release")):
        assert order.index(before) < order.index(after)


def test_keys_do_not_depend_on_the_order_of_stages(ran: Case) -> None:
    lines = MANIFEST.splitlines(keepends=True)
    ran.manifest.write_text("".join(lines[:4] + lines[:3:-1]), "utf-8")
    assert set(ran.actions().values()) == {REUSE}


def test_a_key_is_of_json_types_alone(ran: Case) -> None:
    def types(value: Any) -> set[type]:
        if isinstance(value, dict):
            return {dict}.union(*(types(item) for item in value.values()))
        if isinstance(value, list):
            return {list}.union(*(types(item) for item in value))
        return {type(value)}

    for stage in ran.plan().values():
        assert types(stage.document) <= {dict, list, str, int, float, bool, type(None)}
