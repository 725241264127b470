"""The page: what each view shows, as HTML and JSON, and that it only ever reads."""

from __future__ import annotations

import math
import shutil
import sqlite3
import sys
from collections.abc import Collection, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pages
import pytest
from conftest import Answer, Project
from pages import DIVERGED, HOSTILE, RESUMED, STEPS, World
from starlette.testclient import TestClient

from kimi_eagle.job import EventWriter
from kimi_eagle.registry import reading
from kimi_eagle.registry.reading import ReadRegistry
from kimi_eagle.registry.schema import FILE, RegistryError
from kimi_eagle.registry.store import Registry
from kimi_eagle.ui.site import site
from kimi_eagle.ui.trainings import TrainingReader


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Runs of every kind; not to be changed."""
    made = pages.build(tmp_path_factory.mktemp("pages") / "runs")
    yield made
    for lock in made.locks:
        lock.release()


@pytest.fixture(scope="module")
def client(world: World) -> Iterator[TestClient]:
    with TestClient(site(world.root), follow_redirects=False) as found:
        yield found


def addresses(
    world: World, runs: Collection[str] = (), artifacts: Collection[str] = ()
) -> list[str]:
    """Every view, of these runs and artifacts, or of all."""
    found = ["/runs", "/runs?q=state:failed", "/acceptance", "/diff"]
    for name in runs or world.runs:
        tabs = ("", "/curves", "/config", "/inputs", "/log", "/environment")
        found += [f"/runs/{world.runs[name]}{tab}" for tab in tabs]
    for name in artifacts or world.artifacts:
        path = f"/artifacts/{world.artifacts[name]}"
        found += [path, f"{path}/lineage?depth=4"]
    done, second = world.runs["done"], world.runs["second"]
    return [
        *found,
        f"/acceptance?of={done}&of={second}",
        f"/diff?a={done}&b={second}",
        f"/diff?a={done}&b={second}&all=1",
        f"/runs/{done}/curves/draft/loss",
        "/runs/ffff",
    ]


_VOID = ("input", "link", "meta", "br", "img")
_BLOCKS = ("p", "div", "ul", "ol", "dl", "table", "section", "nav", "figure", "pre", "form", "h2")


class Outline(HTMLParser):
    """What assistive technology goes by, of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.wrong: list[str] = []
        """Tags that do not fit into each other: a browser would make something else of them."""
        self._open: list[str] = []
        self.feed(text)
        self.wrong += self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if (tag in _BLOCKS and "p" in self._open) or (tag in ("a", "form") and tag in self._open):
            self.wrong.append(f"{tag} in {self._open}")
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open.pop() != tag:
            self.wrong.append(f"/{tag}")

    def all(self, name: str) -> list[dict[str, str | None]]:
        return [attrs for tag, attrs in self.tags if tag == name]


def test_every_view_is_a_page_and_a_document(world: World, client: TestClient) -> None:
    for address in addresses(world):
        page = client.get(address)
        missing = address == "/runs/ffff"
        assert page.status_code == (404 if missing else 200), address
        path, question, query = address.partition("?")
        document = client.get(f"{path}.json{question}{query}")
        assert document.status_code == page.status_code
        assert isinstance(document.json(), dict)
        outline = Outline(page.text)
        assert not outline.wrong, address
        assert len(outline.all("h1")) == len(outline.all("main")) == 1, address
        assert len(outline.all("table")) == len(outline.all("caption")), address
        assert outline.all("html")[0]["lang"] == "en"
        assert all("scope" in cell for cell in outline.all("th"))
        identities = [attrs["id"] for _, attrs in outline.tags if "id" in attrs]
        assert len(identities) == len(set(identities)), address
        labelled = {label["for"] for label in outline.all("label")}
        assert all(i.get("id") in labelled or "aria-label" in i for i in outline.all("input"))
        # Neither a script nor a style in the page itself, nothing from elsewhere.
        assert [attrs["src"] for attrs in outline.all("script")] == ["/static/page.js"]
        assert not outline.all("style")
        assert not any("style" in attrs for _, attrs in outline.tags)
        for _, attrs in outline.tags:
            for name in ("href", "src", "action"):
                assert (attrs.get(name) or "/").startswith(("/", "#")), (address, attrs)
        assert len(page.content) < 300_000


def test_what_others_wrote_is_text_on_every_page(world: World, client: TestClient) -> None:
    for address in [
        *addresses(world),
        "/runs?q=" + HOSTILE.replace("&", "%26").replace("#", "%23"),
    ]:
        text = client.get(address).text
        outline = Outline(text)
        assert len(outline.all("script")) == 1, address
        assert not outline.all("img"), address
        assert not any(name.startswith("on") for _, attrs in outline.tags for name in attrs)
    shown = client.get(f"/runs/{world.runs['hostile']}").text
    assert "&lt;script&gt;window.hacked=1&lt;/script&gt;" in shown
    assert "{{7*7}}" in shown


def test_nothing_is_written_and_nothing_but_read_is_asked(world: World) -> None:
    path = world.root / FILE
    before = path.read_bytes()
    with TestClient(site(world.root)) as client:
        for address in addresses(world):
            client.get(address)
            assert client.head(address).content == b""
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            assert client.request(method, "/runs").status_code == 405
    assert path.read_bytes() == before
    registry = ReadRegistry(world.root)
    with pytest.raises(RegistryError, match="readonly"):
        registry.end_run(world.runs["running"], "done")
    registry.close()


def test_states_are_words_with_glyphs(world: World, client: TestClient) -> None:
    text = client.get("/runs").text
    for glyph, word in (("✓", "done"), ("✗", "failed"), ("?", "lost"), ("▶", "running")):
        assert f'<span aria-hidden="true">{glyph}</span> {word}</span>' in text


def test_a_lost_run_is_never_called_running(world: World, client: TestClient) -> None:
    lost = world.runs["lost"]
    document = client.get(f"/runs/{lost}.json").json()
    assert document["status"] == "lost"
    assert [stage["disposition"] for stage in document["stages"]] == ["lost"]
    assert document["no_heartbeat_since"]
    assert "No heartbeat since" in client.get(f"/runs/{lost}").text
    found = {q: client.get(f"/runs.json?q=state:{q}").json()["runs"] for q in ("lost", "running")}
    assert {q: [run["id"] for run in runs] for q, runs in found.items()} == {
        "lost": [lost],
        "running": [world.runs["running"]],
    }


def test_a_failed_run_shows_the_end_of_its_log_first(world: World, client: TestClient) -> None:
    failed = world.runs["failed"]
    document = client.get(f"/runs/{failed}.json").json()
    lines = document["failed"]["draft"]["lines"]
    assert lines == [f"line {n}" for n in range(61, 101)]
    assert document["would_run_again"] == ["rows", "vocab", "draft", "score", "release"]
    text = client.get(f"/runs/{failed}").text
    assert text.index("line 100") < text.index("What would run again") < text.index("<caption")


def test_stages_say_why_they_ran_and_where_they_came_from(world: World, client: TestClient) -> None:
    stages = {
        stage["name"]: stage
        for stage in client.get(f"/runs/{world.runs['second']}.json").json()["stages"]
    }
    assert "lr 0.0001 → 0.0003" in stages["draft"]["why"]
    reused = client.get(f"/runs/{world.runs['done']}.json").json()["stages"][0]
    assert reused["made_by"]["run"] == world.runs["killed"]
    assert f'href="/runs/{world.runs["killed"]}"' in client.get(f"/runs/{world.runs['done']}").text
    alive = client.get(f"/runs/{world.runs['running']}.json").json()
    assert alive["stages"][0]["progress"] == {"done": 40, "total": STEPS, "unit": "steps"}
    assert alive["waiting"] == ["rows", "vocab", "draft", "score", "release"]


def test_a_page_that_did_not_change_is_not_sent_again(world: World, client: TestClient) -> None:
    first = client.get("/runs")
    again = client.get("/runs", headers={"If-None-Match": first.headers["ETag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_config_says_what_set_each_value(world: World, client: TestClient) -> None:
    document = client.get(f"/runs/{world.runs['done']}/config.json").json()
    layers = {item["path"]: item["layer"] for item in document["values"]}
    assert layers["stages.draft.lr"] == "manifest"
    assert layers["stages.draft.seed"] == "--set"
    assert layers["stages.draft.epochs"] == "default"


# Curves


def test_a_resumed_training_is_one_curve_with_its_gap(world: World, client: TestClient) -> None:
    done = world.runs["done"]
    (training,) = client.get(f"/runs/{done}/curves.json").json()["trainings"]
    assert training["resumed_after_steps"] == [RESUMED]
    charts = {chart["name"]: chart for chart in training["charts"]}
    loss = charts["loss"]["lines"][0]
    assert (loss["points"], loss["not_finite"]) == (STEPS, 1)
    assert loss["last"]["step"] == STEPS
    # One line per TTT step; what the accuracies give is no number where one of them is none.
    assert [line["label"] for line in charts["loss-per-step"]["lines"]] == [
        f"step {k}" for k in range(3)
    ]
    assert charts["simulated"]["lines"][0]["not_finite"] == 1
    text = client.get(f"/runs/{done}/curves").text
    assert f"resumed after step {RESUMED}" in text
    assert f"training is no finite number from step {DIVERGED} on" in text


def test_a_second_attempt_does_not_go_on_with_the_curves_of_the_first(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    world = World(tmp_path)
    writer = pages.Writer(world)
    run = writer.begin("run")
    number = writer.stage(run, "draft", "train", {}, {}, disposition="running")
    stage = registry.execution(number)
    reader = TrainingReader(tmp_path)
    points = []
    for attempt, steps in (("one", 30), ("one", 35), ("two", 40)):
        folder = tmp_path / ".staging" / f"{run}-draft-{attempt}"
        if not folder.exists():
            shutil.rmtree(tmp_path / ".staging", ignore_errors=True)
            folder.mkdir(parents=True)
        first = points[-1] + 1 if points and attempt == "one" else 1
        pages.training_events(EventWriter(folder / "events.ndjson"), first, steps)
        (loss, *_) = reader.training(registry, stage).charts[0].lines
        points.append(len(loss.series.steps))
        assert loss.series.steps == list(range(1, steps + 1))
    assert points == [30, 35, 40]
    registry.close()
    writer.registry.close()


def test_a_training_that_never_had_a_number_says_so(tmp_path: Path) -> None:
    writer = pages.Writer(World(tmp_path))
    run = writer.begin("run")
    writer.stage(run, "draft", "train", {}, {}, disposition="failed", error="no number")
    path = tmp_path / run / "stages" / "draft.events"
    EventWriter(path).emit("metric", split="train", step=1, epoch=0, values={"loss": math.nan})
    with path.open("ab") as file:  # as a machine that went down leaves it
        file.write(b'{"event": "metric", "spl\0\0\n')
    writer.registry.close()
    with TestClient(site(tmp_path)) as client:
        text = client.get(f"/runs/{run}/curves").text
    assert "nothing that it reported is a finite number" in text


def test_the_data_behind_a_chart_is_all_of_it(world: World, client: TestClient) -> None:
    path = f"/runs/{world.runs['done']}/curves/draft/loss"
    lines = client.get(f"{path}.csv").text.splitlines()
    assert lines[0] == "step,train/loss,val/loss"
    assert [int(line.split(",")[0]) for line in lines[1:]] == list(range(1, STEPS + 1))
    assert lines[DIVERGED] == f"{DIVERGED},NaN,"
    assert lines[STEPS].endswith(",3.5")
    part = client.get(f"{path}.json?after=9&rows=2").json()
    assert [row[0] for row in part["rows"]] == [10, 11]
    assert client.get(part["next"]).json()["rows"][0][0] == 12


def test_a_reused_training_has_the_curves_of_the_run_that_made_it(
    world: World, client: TestClient
) -> None:
    run = world.runs["again"]
    (training,) = client.get(f"/runs/{run}/curves.json").json()["trainings"]
    assert (training["run"], training["disposition"]) == (world.runs["done"], "reused")
    assert training["charts"][0]["lines"][0]["points"] == STEPS
    assert f'href="/runs/{world.runs["done"]}"' in client.get(f"/runs/{run}/curves").text


# Artifacts, lineage


def test_an_artifact_shows_its_header_its_coverage_and_who_has_to_do_with_it(
    world: World, client: TestClient
) -> None:
    draft = client.get(f"/artifacts/{world.artifacts['draft']}.json").json()
    assert draft["tensors"] == [
        {"file": "model.safetensors", "name": "fc.weight", "dtype": "BF16", "shape": [2, 3]}
    ]
    assert [use["run_id"] for use in draft["producers"]] == [world.runs["done"]]
    assert [use["stage"] for use in draft["consumers"]] == ["score", "release"]
    assert draft["verified_at"] is None
    vocab = client.get(f"/artifacts/{world.artifacts['vocab']}.json").json()
    assert vocab["vocab"]["coverage"] == 0.97
    assert "97.0%" in client.get(f"/artifacts/{world.artifacts['vocab']}").text


def test_the_start_of_a_hash_leads_to_its_page(world: World, client: TestClient) -> None:
    digest = world.artifacts["draft"]
    assert client.get(f"/artifacts/{digest[:9]}").headers["location"] == f"/artifacts/{digest}"
    assert client.get(f"/runs?q={digest[:9]}").headers["location"] == f"/artifacts/{digest}"
    run = world.runs["done"]
    assert client.get(f"/runs?q={run[:7]}").headers["location"] == f"/runs/{run}"
    assert client.get("/runs/latest/curves").headers["location"] == (
        f"/runs/{world.runs['hostile']}/curves"
    )


def test_a_lineage_is_a_drawing_and_a_list_of_the_same(world: World, client: TestClient) -> None:
    address = f"/artifacts/{world.artifacts['release']}/lineage"
    document = client.get(f"{address}.json?only=up").json()
    names = {digest: name for name, digest in world.artifacts.items()}
    shown = {names[node["digest"]] for node in document["nodes"]}
    assert shown == {"release", "draft", "score", "rows", "vocab", "verifier", "source", "snapshot"}
    text = client.get(f"{address}?only=up").text
    drawing, _, listed = text.partition("As a list")
    for node in document["nodes"]:
        assert node["digest"] in drawing
        assert node["digest"] in listed or node["digest"] == world.artifacts["release"]


# Acceptance, diff


def test_what_cannot_be_compared_is_marked_with_its_reason(
    world: World, client: TestClient
) -> None:
    query = f"of={world.runs['done']}&of={world.runs['second']}"
    document = client.get(f"/acceptance.json?{query}").json()
    apart = {row["evaluation"]: row["apart"] for row in document["rows"]}
    assert apart[world.artifacts["score"]] == []
    (reason,) = apart[world.artifacts["second score"]]
    assert "max_tokens 96 and 512" in reason
    assert [row["set"] for row in document["rows"]] == ["mt_bench", "mt_bench", "gsm8k"]
    first = document["rows"][0]
    assert (first["engine"], first["speedup"], first["standard_error"]) == (
        "vllm 0.32.0",
        1.88,
        0.05,
    )
    text = client.get(f"/acceptance?{query}").text
    assert '<tr class="apart">' in text
    assert "the bonus token included" in text
    # What was served and what was simulated never stand on one axis.
    assert text.count('<svg class="bars"') == 2


def test_a_diff_shows_what_changed_and_warns_of_two_vocab_maps(
    world: World, client: TestClient
) -> None:
    query = f"a={world.runs['done']}&b={world.runs['second']}"
    document = client.get(f"/diff.json?{query}").json()
    assert {"section": "parameters", "name": "draft.lr", "a": 0.0001, "b": 0.0003} in document[
        "differences"
    ]
    assert document["verdict"]["comparable"] is False
    text = client.get(f"/diff?{query}").text
    assert "Two different vocab maps" in text
    assert f"{document['equal']} equal hidden" in text
    assert "draft.ttt_steps" not in text
    assert "draft.ttt_steps" in client.get(f"/diff?{query}&all=1").text
    same = client.get(f"/diff?a={world.runs['done']}&b={world.runs['done']}").text
    assert "Nothing differs." in same
    assert "vocab maps" not in same


@pytest.mark.slow
def test_weights_are_compared_when_that_is_asked_for(world: World, client: TestClient) -> None:
    query = f"a={world.runs['done']}&b={world.runs['second']}"
    assert f"{query.replace('&', '&amp;')}&amp;weights=1" in client.get(f"/diff?{query}").text
    document = client.get(f"/diff.json?{query}&weights=1").json()
    (tensor,) = document["weights"]
    # Ones and twos: the difference is as large as the first.
    assert tensor["name"] == "fc.weight"
    assert tensor["relative"] == pytest.approx(1.0)
    assert "fc.weight" in client.get(f"/diff?{query}&weights=1").text


def test_the_trainings_of_a_search_stand_in_order(world: World, client: TestClient) -> None:
    run = world.runs["sweep"]
    ranking = client.get(f"/runs/{run}.json").json()["ranking"]
    assert [trial["stage"] for trial in ranking["trials"]] == [
        "draft--lr-0.0003",
        "draft--lr-0.0001",
    ]
    assert ranking["varied"] == ["lr"]
    text = client.get(f"/runs/{run}").text
    assert f'href="/runs/{run}/curves?stage=draft--lr-0.0003"' in text
    assert client.get(f"/runs/{world.runs['done']}.json").json()["ranking"] is None


# Search


def test_the_search_box_takes_terms(world: World, client: TestClient) -> None:
    def found(query: str) -> set[str]:
        names = {run: name for name, run in world.runs.items()}
        runs = client.get("/runs.json", params={"q": query}).json()["runs"]
        return {names[run["id"]] for run in runs}

    assert found("state:failed") == {"failed", "hostile"}
    assert found("state:failed kimi") == {"failed"}
    assert found("stage:evaluate") == found("stage:score") == {"done", "second"}
    assert found(f"artifact:{world.artifacts['draft'][:10]}") == {"done", "again"}
    assert found("since:2d kimi") == set(world.runs) - {"hostile"}
    assert found("since:yesterday") == set()
    assert found("name:k?mi since:2020-01-01") == set(world.runs) - {"hostile"}
    assert found(f"{world.runs['done'][:5]} kimi") == {"done"}
    assert found("state:interrupted") == {"killed"}


def test_no_match_says_which_term_excluded_everything(world: World, client: TestClient) -> None:
    text = client.get("/runs?q=state:done+stage:nothing").text
    assert f"None of {len(world.runs)} runs" in text
    rows = text.split("<tbody>")[1].split("<tr>")[1:]
    assert [row.split('class="n">')[1].split("<")[0] for row in rows] == ["4", "0"]


def test_an_address_that_asks_too_much_is_refused(client: TestClient) -> None:
    assert client.get("/acceptance?" + "of=a&" * 300).status_code == 404
    for odd in ("before=-1", "before=x", "after=99999999999999999999", "before=1e9", "after="):
        assert client.get(f"/runs?{odd}").status_code == 200
    found = client.get("/runs", params={"q": "a " * 2000})
    assert found.status_code == 200


# Reports


def test_a_report_is_one_file_that_needs_nothing(world: World, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    project = Project(world.root.parent)
    answer = project.cli("report", world.runs["done"], "-o", str(path), "--json")
    assert answer.code == 0, answer.err
    text = path.read_text("utf-8")
    assert answer.json == {
        "run": world.runs["done"],
        "file": str(path),
        "bytes": path.stat().st_size,
    }
    outline = Outline(text)
    assert not outline.wrong
    assert not outline.all("script")
    assert not outline.all("link")
    assert [attrs["href"] for attrs in outline.all("a")] == ["#main"]
    for wanted in ("Acceptance", "Lineage of release", "Curves of draft", "stages.draft.seed"):
        assert wanted in text
    answer = project.cli("report", world.runs["hostile"], "-o", str(path))
    assert answer.code == 0
    assert not Outline(path.read_text("utf-8")).all("script")


def test_a_report_that_cannot_be_written_leaves_what_was_there(
    world: World, tmp_path: Path
) -> None:
    path = tmp_path / "report.html"
    path.write_text("as it was")
    project = Project(world.root.parent)
    assert project.cli("report", "ffffff", "-o", str(path)).code == 2
    assert path.read_text() == "as it was"
    answer = project.cli("report", world.runs["done"], "-o", str(tmp_path / "none" / "report.html"))
    assert answer.code == 2
    assert "no such folder" in answer.err


# Real runs, and registries that cannot be read


@pytest.mark.slow
def test_a_run_that_really_ran_is_shown(first_run: tuple[Project, Answer]) -> None:
    project, answer = first_run
    with TestClient(site(project.root)) as client:
        document = client.get("/runs/latest.json").json()
        assert {stage["name"]: stage["outputs"] for stage in document["stages"]} == answer.outputs
        for tab in ("", "/curves", "/config", "/inputs", "/log?stage=rows", "/environment"):
            assert client.get(f"/runs/{document['id']}{tab}").status_code == 200
        rows = answer.outputs["rows"]["rows"]
        shown = client.get(f"/artifacts/{rows}.json").json()
        assert shown["records"][0]["records"] == 10
        assert {tensor["name"] for tensor in shown["tensors"]} >= {"token_ids", "loss_mask"}
        layers = {
            value["path"]: value["layer"]
            for value in client.get(f"/runs/{document['id']}/config.json").json()["values"]
        }
        assert layers["stages.vocab.size"] == "manifest"
        assert layers["stages.vocab.include"] == "default"
        report = project.folder.parent / "report.html"
        assert project.cli("report", "latest", "-o", str(report)).code == 0
        assert "vocab" in report.read_text("utf-8")


def _corrupt(path: Path) -> Any:
    path.write_bytes(b"no database at all" * 100)


def _newer(path: Path) -> Any:
    Registry(path.parent).close()
    with sqlite3.connect(path) as connection:
        connection.execute("update alembic_version set version_num = '9999'")
    connection.close()


def _older(path: Path) -> Any:
    Registry(path.parent).close()
    with sqlite3.connect(path) as connection:
        connection.execute("delete from alembic_version")
    connection.close()


def _locked(path: Path) -> Any:
    Registry(path.parent).close()
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("pragma journal_mode=delete")
    connection.execute("begin exclusive")
    return connection


@pytest.mark.parametrize(
    ("state", "make", "command"),
    [
        ("missing", lambda _: None, "submit MANIFEST"),
        ("corrupt", _corrupt, "registry rebuild"),
        ("newer", _newer, "pip install --upgrade '.[ui]'"),
        ("older", _older, "runs"),
        ("locked", _locked, "runs"),
    ],
)
def test_a_registry_that_cannot_be_read_has_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, make: Any, command: str
) -> None:
    monkeypatch.setattr(reading, "_WAIT_SECONDS", 0.1)
    path = tmp_path / FILE
    holding = make(path)
    before = path.read_bytes() if path.exists() else None
    with TestClient(site(tmp_path)) as client:
        answer = client.get("/runs.json")
        assert answer.status_code == 503
        document = answer.json()
        assert (document["state"], document["file"]) == (state, str(path))
        assert document["command"].endswith(command)
        page = client.get(f"/runs/{'a' * 12}")
        assert page.status_code == 503
        assert str(path) in page.text
        assert command.replace("'", "&#39;") in page.text
    assert (path.read_bytes() if path.exists() else None) == before
    if holding is not None:
        holding.close()


def test_an_empty_registry_says_how_to_fill_it(tmp_path: Path) -> None:
    Registry(tmp_path).close()
    with TestClient(site(tmp_path)) as client:
        assert "kimi-eagle submit MANIFEST" in client.get("/").text


def test_without_the_extra_the_command_says_how_to_get_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("kimi_eagle.ui")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    answer = Project(world.root.parent).cli("report", "latest", "-o", "report.html")
    assert answer.code == 2
    assert "pip install jinja2 starlette uvicorn" in answer.err


def test_nothing_is_vendored() -> None:
    import kimi_eagle.ui as package

    files = sorted(path.name for path in (Path(package.__file__).parent / "static").iterdir())
    # Whatever is added from elsewhere comes with its licence and digest, and a test of both.
    assert files == ["icon.svg", "page.js", "style.css"]
