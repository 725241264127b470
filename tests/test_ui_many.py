"""The page in a registry of 10,000 runs and 100,000 artifacts, and curves of many steps: no page is
large, none leaves anything out unsaid."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cases import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from kimi_eagle.registry.browse import runs_page
from kimi_eagle.registry.neighbourhood import DOWN, MOST_NODES, UP, around
from kimi_eagle.registry.reading import ReadRegistry
from kimi_eagle.ui import graph
from kimi_eagle.ui.chart import draw, thin
from kimi_eagle.ui.site import site
from kimi_eagle.ui.trainings import Chart, Line, Series

sys.path.insert(0, str(ROOT / "benchmarks"))
import many

RUNS = 10_000


@pytest.fixture(scope="module")
def seeded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, many.Seeded]:
    root = tmp_path_factory.mktemp("many")
    made = many.seed(root, runs=RUNS, drafts=lambda number: 14 if number % 40 == 1 else 1)
    return root, made


@pytest.fixture(scope="module")
def registry(seeded: tuple[Path, many.Seeded]) -> Iterator[ReadRegistry]:
    found = ReadRegistry(seeded[0])
    yield found
    found.close()


@pytest.fixture(scope="module")
def client(seeded: tuple[Path, many.Seeded]) -> Iterator[TestClient]:
    with TestClient(site(seeded[0])) as found:
        yield found


def test_pages_of_runs_hold_each_run_once(registry: ReadRegistry) -> None:
    seen: list[int] = []
    before = None
    while True:
        page = runs_page(registry, [], [], before=before, size=500)
        seen += [row.seq for row in page.rows]
        before = page.older
        if before is None:
            break
    assert seen == list(range(RUNS - 1, -1, -1))


def test_back_from_a_page_is_the_page_before(client: TestClient) -> None:
    first = client.get("/runs.json").json()
    assert first["newer"] is None
    second = client.get(first["older"]).json()
    third = client.get(second["older"]).json()
    ids = [[run["id"] for run in page["runs"]] for page in (first, second, third)]
    assert [len(page) for page in ids] == [50, 50, 50]
    assert [run["id"] for run in client.get(third["newer"]).json()["runs"]] == ids[1]
    back = client.get(second["newer"]).json()
    assert [run["id"] for run in back["runs"]] == ids[0]
    assert back["newer"] is None
    assert back["older"] is not None
    last = client.get(f"/runs.json?before={20}").json()
    assert (len(last["runs"]), last["older"]) == (20, None)


def test_no_page_is_large(seeded: tuple[Path, many.Seeded], client: TestClient) -> None:
    made = seeded[1]
    assert made.artifacts > 99_000
    for address in (
        "/runs",
        "/runs?q=state:failed+stage:train+project-7",
        f"/runs/{made.runs[0]}",
        f"/runs/{made.runs[0]}/inputs",
        f"/artifacts/{made.verifier}",
        f"/artifacts/{made.verifier}/lineage?depth=8",
        f"/artifacts/{made.drafts[0]}/lineage?depth=8",
        f"/artifacts/{made.sources[0]}/lineage?depth=8",
        "/acceptance",
    ):
        answer = client.get(address)
        assert answer.status_code == 200, address
        assert len(answer.content) < 300_000, address


def test_who_took_in_what_all_take_in_comes_page_by_page(
    seeded: tuple[Path, many.Seeded], client: TestClient
) -> None:
    address = f"/artifacts/{seeded[1].verifier}.json"
    first = client.get(address).json()
    second = client.get(first["next"]).json()
    numbers = [use["id"] for page in (first, second) for use in page["consumers"]]
    assert len(numbers) == 100
    assert numbers == sorted(set(numbers))


def test_a_lineage_of_everything_says_what_it_does_not_show(
    seeded: tuple[Path, many.Seeded], registry: ReadRegistry
) -> None:
    made = seeded[1]
    found = around(registry, made.verifier)
    # The few that are alike are shown, the many are counted; nothing is left out unsaid.
    folded = {(fold.direction, fold.kind): fold for fold in found.folds}
    assert folded[(UP, "file")].count == many.SHARDS
    assert folded[(DOWN, "evaluate")].more
    opened = around(registry, made.verifier, opened=[folded[(DOWN, "states")].id])
    assert len(opened.nodes) == MOST_NODES
    (left,) = [fold for fold in opened.folds if fold.id == folded[(DOWN, "states")].id]
    assert left.more
    assert left.count == folded[(DOWN, "states")].count - (MOST_NODES - 2)


def test_a_search_of_fourteen_drafts_is_folded_and_opens(
    seeded: tuple[Path, many.Seeded], registry: ReadRegistry, client: TestClient
) -> None:
    made = seeded[1]
    (states,) = {
        edge.source
        for edge in around(registry, made.drafts[0], directions=(UP,)).edges
        if edge.role == "states" and edge.target == made.drafts[0]
    }
    found = around(registry, states, depth=1)
    (fold,) = [fold for fold in found.folds if fold.kind == "checkpoint"]
    assert fold.count == many.DRAFTS
    text = client.get(f"/artifacts/{states}/lineage?depth=1").text
    assert text.count(f"{many.DRAFTS} checkpoint") == 2  # drawn, and listed
    opened = client.get(f"/artifacts/{states}/lineage.json?depth=1&open={fold.id}").json()
    assert sum(node["kind"] == "checkpoint" for node in opened["nodes"]) == many.DRAFTS
    assert not opened["folded"]


def test_a_drawing_puts_what_went_in_to_the_left(
    seeded: tuple[Path, many.Seeded], registry: ReadRegistry
) -> None:
    found = around(registry, seeded[1].drafts[0], depth=4)
    columns = graph.columns_of(found)
    at = {item: number for number, column in enumerate(columns) for item in column}
    assert all(at[edge.source] < at[edge.target] for edge in found.edges)


# Curves

VALUES = st.lists(
    st.one_of(st.floats(-1e6, 1e6), st.just(math.nan)), min_size=1, max_size=2000
).filter(lambda values: any(value == value for value in values))


def series_of(values: list[float]) -> Series:
    found = Series()
    for step, value in enumerate(values, 1):
        found.add(step, None if value != value else value)
    return found


@settings(max_examples=50, deadline=None)
@given(VALUES, st.integers(1, 50))
def test_thinning_out_keeps_every_extreme_and_every_gap(values: list[float], columns: int) -> None:
    found = thin(series_of(values), 1, len(values), columns)
    drawn = [column for stretch in found.stretches for column in stretch]
    numbers = [value for value in values if value == value]
    assert min(column.low for column in drawn) == min(numbers)
    assert max(column.high for column in drawn) == max(numbers)
    assert all(column.low <= column.mean + 1e-6 for column in drawn)
    # A gap wherever numbers are followed by none, and no line across it.
    gaps = [n for n, value in enumerate(values, 1) if value != value]
    starts = [n for n in gaps if n - 1 not in gaps]
    assert [int(gap) for gap in found.gaps] == starts
    assert len(drawn) <= columns + len(gaps) + 1


def test_a_long_curve_is_drawn_small_and_summed_up_whole() -> None:
    values = [1.0] * 20_000
    values[13_337] = 99.0
    line = Line("training", "train/loss", series_of(values))
    assert line.summary["highest"] == {"step": 13_338, "value": 99.0}
    drawn = draw(Chart("loss", "Loss", "", (line,)), (), "loss")
    assert len(drawn) < 12_000
    assert "training: 1 at step 20000, from 1 to 99" in drawn


def test_joined_curves_have_each_step_once() -> None:
    before, after = series_of([1.0, math.nan, 3.0, 4.0]), Series()
    for step in (3, 4, 5):
        after.add(step, None if step == 4 else 10.0 * step)
    joined = before.joined(after, 2)
    assert joined.steps == [1, 2, 3, 4, 5]
    assert joined.lost == [1, 3]
    assert joined.values[2] == 30.0
    joined.add(4, 7.0)  # what is done again stands for what was done
    assert (joined.steps, joined.lost) == ([1, 2, 3, 4], [1])
