"""`keep: none`: hidden states last as long as a run needs them, and are not forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import WITH_STATES, Project
from keeping import Store, state

from kimi_eagle.artifacts.digests import Digests
from kimi_eagle.artifacts.locks import Lock
from kimi_eagle.artifacts.objects import Objects
from kimi_eagle.eviction import ALIVE, Released, release_states
from kimi_eagle.manifest.load import load
from kimi_eagle.registry.keeping import Keeper
from kimi_eagle.short_lived import taken

OURS = "f" * 12


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    found = Store(tmp_path / "runs")
    yield found
    found.close()


def release(store: Store, digest: str) -> Released:
    objects = Objects(store.root, Digests(store.registry))
    return release_states(store.root, objects, Keeper(store.registry), digest, OURS)


def test_its_shards_go_and_those_of_others_stay(store: Store) -> None:
    shards = [store.shard("a", "b"), store.shard("c"), store.shard("d")]
    other = store.states("c")
    ours = store.states("a", "b", "c")
    record = store.registry.artifact(ours)
    assert record is not None
    assert release(store, ours) == Released(len("a b") + record.bytes)
    assert store.shards() == {shards[1], shards[2]}, "another lists c, and d is nobody's"
    assert not store.folder(ours).exists()
    assert store.folder(other).is_dir()
    assert [r.digest for r in Keeper(store.registry).artifacts("state = 'evicted'")] == [ours]
    assert store.cli("lineage", ours).code == 0
    assert release(store, ours).why_not == "it is gone already"


def test_what_is_pinned_stays(store: Store) -> None:
    shard, ours = store.shard("a"), store.states("a")
    assert store.cli("pin", ours).code == 0
    assert release(store, ours).why_not == "it is pinned"
    assert store.shards() == {shard}


def test_what_another_run_holds_stays(store: Store) -> None:
    shard, ours = store.shard("a"), store.states("a")
    # Made by a run that lives, which is not the one that is done with it.
    run = store.registry.producers(ours)[0].run_id
    (store.root / run).mkdir()
    with Lock(store.root / run / ALIVE):
        assert release(store, ours).why_not == "another run works with it"
        assert store.shards() == {shard}
        assert store.folder(ours).is_dir()
    assert release(store, ours).why_not == ""


def _manifest(project: Project, keep: str) -> Project:
    states = WITH_STATES.replace("rows: rows, engine", f"rows: rows, keep: {keep}, engine")
    draft = "{kind: train, head: head, states: states, vocab: vocab, epochs: 1, ttt_steps: 1}"
    project.write(f"{states}  draft: {draft}\n")
    return project


def test_only_stages_that_say_so_are_taken(project: Project) -> None:
    keeping = load(_manifest(project, "all").manifest).manifest
    assert taken(keeping) == {}
    losing = load(_manifest(project, "none").manifest).manifest
    assert taken(losing) == {"states": ["draft"]}


def test_it_is_part_of_no_key(made: Project) -> None:
    keys = [_manifest(made, keep).plan()["states"]["key"] for keep in ("all", "none")]
    assert keys[0] == keys[1]


@pytest.mark.slow
def test_a_training_leaves_no_states_and_a_later_one_has_them_made_again(made: Project) -> None:
    project = _manifest(made, "none")
    answer = project.submit()
    assert answer.code == 0, answer.err
    assert "its hidden states were evicted (keep: none)" in answer.err
    (states,) = answer.outputs["states"].values()
    assert state(project, states) == "evicted"
    assert not list((project.root / "states").rglob("*.safetensors"))
    assert states in project.cli("lineage", answer.outputs["draft"]["checkpoint"], "--json").out
    again = project.submit()
    assert set(again.dispositions.values()) == {"reused"}
    assert "evicted" not in again.err
    other = project.plan("--set", "stages.draft.lr=1e-4")
    assert other["states"]["action"] == "run"
    assert other["states"]["forecast"]["rows"] == 10
    assert project.cli("verify", "--all").code == 0
