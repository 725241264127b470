"""The page in a real browser: it opens without errors and asks nobody else, goes on while a run
goes on, and serves people without scripts, by keyboard and by screen reader.

With KIMI_EAGLE_SCREENSHOTS=1 (`make screenshots`) the pictures it takes become those of the docs.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pages
import pytest
from cases import ROOT
from conftest import Answer, Project, halted_worker_of, kill, wait_for
from pages import RESUMED, STEPS, World
from test_ui import addresses

playwright = pytest.importorskip("playwright.sync_api")
axe = pytest.importorskip("axe_playwright_python.sync_playwright")

from playwright.sync_api import Browser, Page, expect  # noqa: E402

sys.path.insert(0, str(ROOT / "benchmarks"))
import many  # noqa: E402

pytestmark = pytest.mark.slow

IMAGES = ROOT / "docs" / "images"
_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with playwright.sync_playwright() as driver:
        own = driver.chromium.executable_path
        path = own if Path(own).exists() else next(filter(None, map(shutil.which, _NAMES)), None)
        if path is None:
            pytest.skip(
                "no Chromium: `playwright install chromium`, or Debian's chromium-headless-shell"
            )
        # Chromium has no sandbox for root.
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        found = driver.chromium.launch(executable_path=path, args=options)
        expect.set_options(timeout=30_000)  # beside other tests a core is slow
        yield found
        found.close()


@contextmanager
def served(root: Path) -> Iterator[str]:
    """The address, with the token, of `kimi-eagle ui` for a root."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kimi_eagle", "--root", str(root), "ui", "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.communicate(timeout=20)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = pages.build(tmp_path_factory.mktemp("pages") / "runs")
    yield made
    for lock in made.locks:
        lock.release()


@pytest.fixture(scope="module")
def address(world: World) -> Iterator[str]:
    with served(world.root) as found:
        yield found


@dataclass
class Visit:
    """A page of a context of its own, and all that went wrong in it."""

    page: Page
    base: str
    troubles: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)

    def open(self, path: str) -> Page:
        self.page.goto(self.base + path)
        return self.page

    def hears(self, kind: str, text: str) -> None:
        # A page that is not there says so in the console too: that is no error of the page.
        if kind in ("error", "warning") and "status of 404" not in text:
            self.troubles.append(f"{self.page.url}: {text}")

    def asks(self, url: str) -> None:
        if not url.startswith((self.base, "data:")):
            self.foreign.append(url)


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., Visit]]:
    contexts = []

    def begin(address: str, **options: Any) -> Visit:
        context = browser.new_context(viewport={"width": 1280, "height": 800}, **options)
        context.set_default_timeout(30_000)
        contexts.append(context)
        made = Visit(context.new_page(), address.partition("/?")[0])
        made.page.on("console", lambda message: made.hears(message.type, message.text))
        made.page.on("pageerror", lambda error: made.hears("error", str(error)))
        made.page.on("dialog", lambda dialog: made.hears("error", dialog.message))
        made.page.on("request", lambda request: made.asks(request.url))
        made.page.goto(address)
        expect(made.page).to_have_url(f"{made.base}/runs")
        return made

    yield begin
    for context in contexts:
        context.close()


def test_every_view_opens_without_errors_and_asks_nobody_else(
    world: World, address: str, visit: Callable[..., Visit]
) -> None:
    there = visit(address)
    for path in addresses(world, ("done", "hostile"), ("draft", "vocab", "hostile", "held")):
        page = there.open(path)
        expect(page.locator("h1")).to_have_count(1)
        # What others wrote makes no element: neither run nor refused, which the console would tell.
        expect(page.locator("main img, main script")).to_have_count(0)
    assert there.troubles == []
    assert there.foreign == []


SPOKEN = (
    "/runs",
    "/runs?q=state:done+nothing",
    "/runs/{failed}",
    "/runs/{lost}",
    "/runs/{done}/curves",
    "/runs/{done}/config",
    "/runs/{done}/inputs",
    "/runs/{done}/log",
    "/runs/{done}/curves/draft/loss",
    "/acceptance?of={done}&of={second}",
    "/diff?a={done}&b={second}",
    "/runs/ffff",
)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_serious_stands_in_the_way_of_anybody(
    world: World, address: str, visit: Callable[..., Visit], scheme: str
) -> None:
    # axe is put into the page from outside, which the page itself allows nobody.
    there = visit(address, color_scheme=scheme, bypass_csp=True)
    paths = [path.format(**world.runs) for path in SPOKEN]
    paths += [
        f"/artifacts/{world.artifacts['draft']}",
        f"/artifacts/{world.artifacts['vocab']}",
        f"/artifacts/{world.artifacts['release']}/lineage",
    ]
    found = {path: serious(there.open(path)) for path in paths}
    assert {path: violations for path, violations in found.items() if violations} == {}


def serious(page: Page) -> list[str]:
    """What axe finds that is serious, with where it is."""
    violations = axe.Axe().run(page).response["violations"]
    return [
        f"{item['id']}: {item['help']} ({node['html'][:120]})"
        for item in violations
        if item["impact"] in ("serious", "critical")
        for node in item["nodes"][:3]
    ]


def test_the_check_sees_what_is_serious(address: str, visit: Callable[..., Visit]) -> None:
    there = visit(address, bypass_csp=True)
    there.page.set_content("<html><body><img src='/x'><input></body></html>")
    assert {text.partition(":")[0] for text in serious(there.page)} >= {"image-alt", "label"}


def test_a_real_run_is_followed_to_its_end(
    first_run: tuple[Project, Answer], tmp_path: Path, visit: Callable[..., Visit]
) -> None:
    project = first_run[0].copy(tmp_path / "project")
    project.write(project.manifest.read_text("utf-8").replace("size: 256", "size: 128"))
    with served(project.root) as address:
        there = visit(address)
        rows = there.page.locator("tbody tr")
        expect(rows).to_have_count(1)
        run = project.start_submit()
        try:
            worker = halted_worker_of(project.root)
            # The list takes the run in by itself, and so does its own page what comes of it.
            expect(rows).to_have_count(2)
            expect(rows.first).to_contain_text("▶ running")
            expect(there.page.get_by_role("status")).to_contain_text(": running")
            rows.first.get_by_role("link").first.click()
            page = there.page
            stage = page.locator("tr", has=page.get_by_role("rowheader", name="vocab"))
            expect(stage).to_contain_text("▶ running")
            expect(stage).to_contain_text("size 256 → 128")
            kill(worker, signal.SIGCONT)
            expect(stage).to_contain_text("✓ executed")
            expect(page.locator("h1")).to_contain_text("✓ done")
            expect(page.get_by_role("status")).to_contain_text("It has ended")
            assert run.wait(60) == 0
        finally:
            run.kill()
            run.communicate()
        assert there.troubles == []


def test_curves_grow_while_they_are_looked_at(
    world: World, address: str, visit: Callable[..., Visit]
) -> None:
    from kimi_eagle.job import EventWriter

    there = visit(address)
    run = world.runs["running"]
    page = there.open(f"/runs/{run}/curves")
    figures = page.get_by_role("figure").first
    figures.locator("summary").click()
    row = figures.locator("tbody tr").first
    expect(row).to_contain_text("40")
    path = world.root / run / "stages" / "draft.events"
    pages.training_events(EventWriter(path), 41, 55)
    expect(row).to_contain_text("at 55")  # what was opened is open still
    assert there.troubles == []


def test_one_cursor_goes_through_all_charts_and_tells_exact_values(
    world: World, address: str, visit: Callable[..., Visit]
) -> None:
    there = visit(address)
    page = there.open(f"/runs/{world.runs['done']}/curves")
    charts = page.locator("svg.chart")
    box = charts.first.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] - 12 * box["width"] / 640, box["y"] + 40)
    expect(page.locator("[data-readout]")).to_contain_text(f"step {STEPS}: train/loss ")
    expect(page.locator("svg.chart .cursor[visibility=visible]")).to_have_count(charts.count())
    assert there.troubles == []


def test_everything_is_reached_without_scripts(
    world: World, address: str, visit: Callable[..., Visit]
) -> None:
    there = visit(address, java_script_enabled=False)
    page = there.page
    page.get_by_role("searchbox").fill("state:done kimi stage:score")
    page.get_by_role("button", name="Search").click()
    expect(page.locator("tbody tr")).to_have_count(2)
    page.locator("tbody tr").nth(1).get_by_role("link").first.click()
    expect(page.locator("h1")).to_contain_text("✓ done")
    for tab, shown in (
        ("Config", "stages.draft.seed"),
        ("Inputs and outputs", "checkpoint"),
        ("Log", "line 1000"),
        ("Environment", "packages.torch"),
        ("Curves", f"Resumed after step {RESUMED}"),
    ):
        page.get_by_role("link", name=tab, exact=True).click()
        expect(page.locator("main")).to_contain_text(shown)
    page.locator("summary").first.click()
    page.get_by_role("link", name="Every point of Loss", exact=True).click()
    expect(page.locator("tbody tr")).to_have_count(STEPS)
    there.open(f"/artifacts/{world.artifacts['release']}")
    page.get_by_role("link", name="Lineage", exact=True).click()
    page.get_by_role("link", name="Upstream only").click()
    expect(page.get_by_role("heading", name="Came from")).to_be_visible()
    page.get_by_role("link", name="Acceptance", exact=True).click()
    page.get_by_role("checkbox").nth(0).check()
    page.get_by_role("checkbox").nth(1).check()
    page.get_by_role("button", name="Show side by side").click()
    expect(page.locator("main")).to_contain_text("cannot be compared")
    page.get_by_role("link", name="Diff", exact=True).click()
    page.get_by_label("A", exact=True).fill(world.runs["done"])
    page.get_by_label("B", exact=True).fill(world.runs["second"])
    page.get_by_role("button", name="Compare").click()
    expect(page.get_by_role("alert")).to_contain_text("Two different vocab maps")
    assert there.foreign == []


def test_the_keyboard_gets_everywhere(
    world: World, address: str, visit: Callable[..., Visit]
) -> None:
    there = visit(address)
    page = there.page
    page.keyboard.press("Tab")
    skip = page.get_by_role("link", name="Skip to content")
    expect(skip).to_be_focused()
    expect(skip).to_be_in_viewport()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    page.keyboard.press("Tab")  # the table, to be scrolled
    page.keyboard.press("Tab")
    first = page.locator("tbody a").first
    expect(first).to_be_focused()
    expect(first).to_have_css("outline-style", "solid")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_contain_text("Run")
    # A drawing is not walked through link by link: the list beside it is.
    page = there.open(f"/artifacts/{world.artifacts['release']}/lineage")
    page.locator("section li a").first.focus()
    page.keyboard.press("Shift+Tab")
    expect(page.locator(".graphs")).to_be_focused()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing: requests are no news."""


def test_a_page_of_another_origin_gets_nothing(
    world: World, address: str, visit: Callable[..., Visit], tmp_path: Path
) -> None:
    there = visit(address)
    base = there.base
    (tmp_path / "index.html").write_text(
        f"<p id=out></p><iframe src='{base}/runs'></iframe><script>"
        f"fetch('{base}/runs.json', {{credentials: 'include'}}).then("
        "a => out.textContent = 'read ' + a.status, e => out.textContent = 'refused')</script>"
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        statuses: dict[str, int] = {}
        there.page.on("response", lambda r: statuses.update({r.url: r.status}))
        # A browser gives the cookies of one port of a host to every other.
        there.page.goto(f"http://127.0.0.1:{server.server_port}/")
        expect(there.page.locator("#out")).to_have_text("refused")
        wait_for(lambda: there.page.wait_for_timeout(20) or f"{base}/runs" in statuses, "an answer")
        assert statuses[f"{base}/runs"] == 403
    finally:
        server.shutdown()


def test_ten_thousand_runs_are_leafed_through(tmp_path: Path, visit: Callable[..., Visit]) -> None:
    made = many.seed(tmp_path, runs=10_000, drafts=lambda n: 14 if n % 40 == 1 else 1)
    with served(tmp_path) as address:
        there = visit(address)
        page = there.page
        expect(page.locator("main")).to_contain_text("10,000 runs")
        expect(page.locator("tbody tr")).to_have_count(50)
        for _ in range(3):
            page.get_by_role("link", name="Older").click()
        expect(page.locator("tbody tr").first).to_contain_text(made.runs[-151])
        page.get_by_role("link", name="Newest").click()
        expect(page.locator("tbody tr").first).to_contain_text(made.runs[-1])
        page = there.open(f"/artifacts/{made.verifier}/lineage")
        page.get_by_role("link", name="40 file not shown").click()
        expect(page.locator("section li").filter(has_text="file")).to_have_count(many.SHARDS)
        assert there.troubles == []


def test_a_report_opens_alone(world: World, tmp_path: Path, browser: Browser) -> None:
    path = tmp_path / "report.html"
    project = Project(world.root.parent)
    for name in ("hostile", "done"):
        assert project.cli("report", world.runs[name], "-o", str(path)).code == 0
        context = browser.new_context(offline=True, bypass_csp=False)
        page = context.new_page()
        said: list[str] = []
        asked: list[str] = []
        page.on("console", lambda message, said=said: said.append(message.text))
        page.on("request", lambda request, asked=asked: asked.append(request.url))
        page.goto(path.as_uri())
        expect(page.locator("h1")).to_have_count(1)
        expect(page.locator("main img, script")).to_have_count(0)
        assert (said, asked) == ([], [path.as_uri()])
        context.close()
    context = browser.new_context(bypass_csp=True)
    page = context.new_page()
    page.goto(path.as_uri())
    expect(page.locator("svg.chart")).to_have_count(7)
    assert serious(page) == []
    context.close()


PICTURES = {
    "runs": "/runs",
    "curves": "/runs/{done}/curves",
    "acceptance": "/acceptance?of={done}&of={second}",
}


def test_pictures_for_the_docs(
    tmp_path: Path, visit: Callable[..., Visit], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = IMAGES if "KIMI_EAGLE_SCREENSHOTS" in os.environ else tmp_path / "images"
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path)  # so that no path of this machine is in them
    world = pages.build(Path("runs"), hostile=False)
    with served(Path("runs")) as address:
        there = visit(address)
        paths = {name: path.format(**world.runs) for name, path in PICTURES.items()}
        paths["lineage"] = f"/artifacts/{world.artifacts['release']}/lineage"
        for name, path in paths.items():
            picture = folder / f"{name}.png"
            there.open(path).screenshot(path=picture)
            assert 10_000 < picture.stat().st_size < 150_000, "none, or too large to be kept"
    for lock in world.locks:
        lock.release()
