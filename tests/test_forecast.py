"""What an extraction would write: told by `plan`, and refused by `submit` where it does not fit."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
from conftest import WITH_STATES, Project

from kimi_eagle.sizes import parse_size

BYTES_OF_TOKEN = 4 * 128 * 2 + 4  # three aux layers and the last of 128 numbers, and an id


def _forecast(project: Project, *arguments: str) -> Any:
    return project.plan(*arguments)["states"].get("forecast")


def _rows(project: Project) -> dict[str, int]:
    """The rows' own report."""
    digest = project.plan()["rows"]["outputs"]["rows"]
    report = project.root / "objects" / digest[:2] / digest / "report.json"
    return dict(json.loads(report.read_text("utf-8")))


def test_rows_that_are_there_are_counted(made: Project) -> None:
    made.write(WITH_STATES)
    found, rows = _forecast(made), _rows(made)
    assert (found["rows"], found["tokens"]) == (rows["rows"], rows["tokens"])
    assert found["estimate"] is False
    assert 0 <= found["bytes"] - rows["tokens"] * BYTES_OF_TOKEN < 200 * rows["rows"]
    assert found["free_bytes"] > 0
    assert found["trouble"] is None
    assert (
        f"{rows['tokens']:,} tokens in {rows['rows']}" in made.cli("plan", str(made.manifest)).err
    )


def test_only_what_the_store_lacks_is_counted(extracted: Project) -> None:
    assert _forecast(extracted) is None, "nothing would be written"
    # Another stage, of which every row is there already.
    found = _forecast(extracted, "--set", "stages.states.max_bad_rows=1")
    assert (found["rows"], found["tokens"], found["bytes"]) == (0, 0, 0)


def test_the_forecast_is_what_is_written(extracted: Project) -> None:
    """Beside the headers of the shards, of which these small ones have many."""
    shards = list((extracted.root / "states").glob("*/*"))
    # Each shard has a page for its header besides.
    pages = 4096 * sum(path.suffix == ".safetensors" for path in shards)
    written = sum(path.stat().st_size for path in shards) - pages
    shutil.rmtree(extracted.root / "states")
    for name in ("registry.sqlite", "registry.sqlite-wal", "registry.sqlite-shm"):
        (extracted.root / name).unlink(missing_ok=True)
    assert extracted.cli("registry", "rebuild").code == 0
    found = _forecast(extracted)
    assert found["bytes"] == pytest.approx(written, rel=0.02 + 0.001 * len(shards))


def test_rows_that_are_not_made_yet_are_estimated(project: Project) -> None:
    project.write(WITH_STATES)
    found = _forecast(project)
    assert found["rows"] == pytest.approx(10, abs=1), "a row a conversation"
    assert found["estimate"] is True
    assert found["tokens"] == round(project.chats.stat().st_size / 4)
    assert "the rows are not made yet" in found["basis"]


def test_an_estimate_goes_by_rows_that_were_made_before(made: Project) -> None:
    made.write(WITH_STATES)
    rows = _rows(made)
    found = _forecast(made, "--set", "stages.rows.max_length=400")
    assert found["estimate"] is True
    assert found["tokens"] == pytest.approx(rows["tokens"], rel=0.01)
    assert "as in run " in found["basis"]


def test_what_does_not_fit_is_not_started(made: Project) -> None:
    made.write(WITH_STATES + "store: {quota: 50kB}\n")
    tokens = _rows(made)["tokens"]
    assert "store.quota" in _forecast(made)["trouble"]
    answer = made.submit()
    assert answer.code == 1
    assert answer.dispositions["states"] == "failed"
    (error,) = [s["error"] for s in answer.json["stages"] if s["name"] == "states"]
    assert f"would pass the quota: {tokens:,} tokens in " in error
    assert "the store holds 0 B already, and `store.quota` allows 50.0 kB; raise it, or" in error
    assert "kimi-eagle gc" in error
    log = made.root / answer.json["run_id"] / "stages" / "states.log"
    assert log.read_text("utf-8").startswith("not started: ")


def test_it_is_told_before_the_stages_before_it_run(made: Project) -> None:
    """The rows are there: nobody waits for a head and a vocab to be told of the disk."""
    made.write(WITH_STATES.replace("size: 256", "size: 128") + "store: {quota: 50kB}\n")
    answer = made.submit()
    assert answer.code == 1
    assert answer.dispositions == {"head": "reused", "rows": "reused", "states": "failed"}


def test_a_quota_is_part_of_no_key(made: Project) -> None:
    without = made.plan()
    made.write(made.manifest.read_text("utf-8") + "store: {quota: 1TB}\n")
    assert {name: stage["key"] for name, stage in made.plan().items()} == {
        name: stage["key"] for name, stage in without.items()
    }


def test_a_quota_that_is_no_size_is_refused(project: Project) -> None:
    project.write(WITH_STATES + "store: {quota: 2 elephants}\n")
    answer = project.submit()
    assert answer.code == 2
    assert "store.quota: '2 elephants' is no size" in answer.err


@pytest.mark.parametrize(
    ("text", "size"), [("500GB", 500 * 10**9), ("1.5TiB", 3 * 2**39), ("7", 7), ("2 kb", 2000)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


# How long it would take


def _expected(project: Project, stage: str, *arguments: str) -> dict[str, Any]:
    return dict(project.plan(*arguments)[stage].get("expected", {}))


TRAINED = (
    WITH_STATES
    + "  draft: {kind: train, head: head, states: states, vocab: vocab, epochs: 3, lr: 1e-3}\n"
)


def test_time_is_told_by_rates_that_are_given(made: Project) -> None:
    made.write(TRAINED)
    assert _expected(made, "states") == _expected(made, "draft") == {}, "nothing is known"
    rates = ("--rate", "states=100", "--rate", "draft=50")
    tokens = _rows(made)["tokens"]
    states = _expected(made, "states", *rates)
    assert states["seconds"] == pytest.approx(tokens / 100)
    four = _expected(made, "states", *rates, "--set", "stages.states.resources.workers=4")
    assert four["seconds"] == pytest.approx(tokens / 400)
    assert four["basis"] == "given, on 4 workers"
    assert _expected(made, "draft", *rates)["seconds"] == pytest.approx(3 * tokens / 50)
    said = made.cli("plan", str(made.manifest), "--rate", "states=0.001").err
    assert "states: about " in said
    assert " h at 0 tokens a second (given)" in said


def test_time_is_told_by_what_the_like_took_before(extracted: Project) -> None:
    assert _expected(extracted, "states") == {}, "it is there"
    (run,) = (
        run
        for run in extracted.cli("runs", "--json").json["runs"]
        for stage in run["stages"]
        if stage["name"] == "states"
    )
    seconds = next(stage["seconds"] for stage in run["stages"] if stage["name"] == "states")
    found = _expected(extracted, "states", "--set", "stages.states.dtype=fp8")
    assert found["basis"] == f"as in run {run['id']}"
    assert found["seconds"] == pytest.approx(seconds, rel=0.01)
    # without its weights the verifier is the same by its config.json
    for path in (extracted.folder / "verifier").glob("*.safetensors"):
        path.unlink()
    assert _expected(extracted, "states", "--set", "stages.states.dtype=fp8") == found


@pytest.mark.parametrize(
    ("rate", "said"),
    [("staes=5", "there is no such stage"), ("states", "is not STAGE=TOKENS"), ("states=-1", "is")],
)
def test_a_rate_that_is_none_is_bad_input(made: Project, rate: str, said: str) -> None:
    answer = made.cli("plan", str(made.manifest), "--rate", rate)
    assert answer.code == 2
    assert said in answer.err
