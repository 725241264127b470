"""A small project of real parts: the demo verifier, ten chats, and the three light stages."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import command
import outputs
import pytest
import yaml
from ray_cluster import RayCluster
from slurm_cluster import SlurmCluster, unpacked

import kimi_eagle
from kimi_eagle.artifacts.locks import Lock
from kimi_eagle.cli import main

DEMO = Path(kimi_eagle.__file__).parent / "demo"
MANIFESTS = Path(__file__).resolve().parent.parent / "manifests"

LIGHT = """\
version: 1
name: light
verifier: {path: verifier}
stages:
  head: {kind: head}
  rows: {kind: prepare, sources: [{path: chats.jsonl}], max_length: 512, val_ratio: 0.2}
  vocab: {kind: vocab, rows: rows, size: 256}
"""

# The quickest real stage, for what is about the runner rather than about stages.
HEAD = """\
version: 1
name: head
verifier: {path: verifier}
stages:
  head: {kind: head}
"""


CORES = sorted(os.sched_getaffinity(0))
"""All that the tests were given, in however many processes they run."""

if "PYTEST_XDIST_WORKER" in os.environ:
    # Each process has its share of the cores, one at least: engines bind a thread to every core
    # that they are allowed, and an engine's threads wait for each other.
    _own = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    _cores = CORES[_own :: int(os.environ["PYTEST_XDIST_WORKER_COUNT"])]
    os.sched_setaffinity(0, _cores or [CORES[_own % len(CORES)]])

# Started in the background, this process ignores interrupts, and so would all that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The longest first, so that nothing long is left to one process at the end; after them what waits
# for the demo.
LONGEST = (
    "test_demo",
    "test_faults",
    "test_ray",
    "test_resume",
    "test_reproduce",
    "test_regenerate_engines",
    "test_demo_elsewhere",
)
# Their tests are long and share nothing that is costly within a process.
APART = ("test_faults", "test_demo_elsewhere")
# A training by two processes runs once for those that compare theirs with it.
TOGETHER = {"test_slurm": "test_ray"}


def group_of(nodeid: str) -> str:
    """Tests that share costly fixtures, and so a process: those of a file."""
    stem = Path(nodeid.partition("::")[0]).stem
    return nodeid if stem in APART and "[" in nodeid else TOGETHER.get(stem, stem)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name no test after bytes: those of gzip hold the second they were packed in, and the two
    processes that share the tests out refuse to start when they find different names."""
    return argname if isinstance(val, bytes) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {group: at for at, group in enumerate(LONGEST)}

    def place(item: pytest.Item) -> int:
        return order.get(group_of(item.nodeid.partition("[")[0]), len(order))

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Groups go to processes whole. (`--dist loadgroup` does not see its marks with pytest 9.)"""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False
    return ByGroup(config, log)


@dataclass(frozen=True)
class Answer:
    """What a command said."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out.splitlines()[-1])

    @property
    def dispositions(self) -> dict[str, str]:
        return {stage["name"]: stage["disposition"] for stage in self.json["stages"]}

    @property
    def outputs(self) -> dict[str, dict[str, str]]:
        return {stage["name"]: stage["outputs"] for stage in self.json["stages"]}


@dataclass(frozen=True)
class Project:
    """A folder with a manifest and what it names, and a root for its runs."""

    folder: Path

    @property
    def root(self) -> Path:
        return self.folder / "runs"

    @property
    def manifest(self) -> Path:
        return self.folder / "manifest.yaml"

    @property
    def chats(self) -> Path:
        return self.folder / "chats.jsonl"

    def write(self, text: str) -> None:
        self.manifest.write_text(text, "utf-8")

    def cli(self, *arguments: str, root: Path | None = None) -> Answer:
        """Run a command in this process; stages still run in theirs."""
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            try:
                code = main(["--root", str(root or self.root), *arguments])
            except SystemExit as exit_:
                code = int(exit_.code or 0)
        outputs.check(arguments, code, out.getvalue())
        return Answer(code, out.getvalue(), err.getvalue())

    def cli_bare(self, *arguments: str) -> str:
        """Run a command line as it is; what it printed."""
        out = io.StringIO()
        with redirect_stdout(out):
            assert main(list(arguments)) == 0
        return out.getvalue()

    def submit(self, *arguments: str, root: Path | None = None) -> Answer:
        return self.cli("submit", str(self.manifest), "--json", *arguments, root=root)

    def plan(self, *arguments: str, root: Path | None = None) -> dict[str, dict[str, Any]]:
        answer = self.cli("plan", str(self.manifest), "--json", *arguments, root=root)
        assert answer.code == 0, answer.err
        return {stage["name"]: stage for stage in answer.json["stages"]}

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        """Start a command in a process of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "kimi_eagle", "--root", str(self.root), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )

    def start_submit(self) -> subprocess.Popen[str]:
        return self.start("submit", str(self.manifest), "--json")

    def object_of(self, answer: Answer, stage: str) -> Path:
        """The folder of a stage's artifact in the store."""
        (digest,) = answer.outputs[stage].values()
        return self.root / "objects" / digest[:2] / digest

    def states_of(self, answer: Answer, stage: str = "states") -> dict[str, tuple[Any, Any]]:
        """(states, token ids) of each row of an extraction, by row key, in its order."""
        from agreement import states_of

        return states_of(self.root, self.object_of(answer, stage).name)

    def objects(self) -> set[str]:
        return {path.name for path in (self.root / "objects").glob("*/*") if path.is_dir()}

    def copy(self, folder: Path) -> Project:
        shutil.copytree(self.folder, folder, copy_function=shutil.copyfile)
        return Project(folder)


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 60) -> Any:
    """The first true value of a condition."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not come about in {seconds} s"
        time.sleep(0.02)
    return value


def workers(root: Path) -> dict[int, list[str]]:
    """Processes, by id, that work on a job under a root: guards and workers."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            if any(str(root) in part and part.endswith("job.json") for part in line):
                found[int(entry.name)] = line
    return found


def worker_of(root: Path) -> int:
    """Wait for a stage's worker (not its guard); its process id."""

    def find() -> int | None:
        return next(
            (pid for pid, line in workers(root).items() if not any(map(is_guard, line))), None
        )

    return int(wait_for(find, "a worker"))


def is_guard(part: str) -> bool:
    return part.endswith("guard.py") or part == "kimi_eagle.executors.guard"


def halted_worker_of(root: Path) -> int:
    """A stage's worker, stopped in its tracks: nothing ends before a test is ready for it."""
    worker = worker_of(root)
    kill(worker, signal.SIGSTOP)
    # A request to end that comes before it has stopped would be heard first: its number is lower.
    stat = Path(f"/proc/{worker}/stat")
    wait_for(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "its halt")
    return worker


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    os.kill(pid, number)


def new_project(folder: Path, manifest: str = LIGHT) -> Project:
    folder.mkdir(parents=True)
    shutil.copytree(DEMO / "verifier", folder / "verifier")
    shutil.copyfile(DEMO / "first10.jsonl", folder / "chats.jsonl")
    project = Project(folder)
    project.write(manifest)
    return project


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """Nothing has run yet."""
    return new_project(tmp_path / "project")


@pytest.fixture
def head_project(tmp_path: Path) -> Project:
    return new_project(tmp_path / "project", HEAD)


@pytest.fixture(scope="session")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, Answer]:
    """A project whose stages all ran once, and the answer of that; not to be changed."""
    project = new_project(tmp_path_factory.mktemp("first") / "project")
    answer = project.submit()
    assert answer.code == 0, answer.err
    return project, answer


@pytest.fixture
def made(first_run: tuple[Project, Answer], tmp_path: Path) -> Project:
    """A copy of the project that ran, runs and all."""
    return first_run[0].copy(tmp_path / "project")


WITH_STATES = (
    LIGHT
    + "  states: {kind: extract, rows: rows, engine: {kind: transformers}, shard_bytes: 100000}\n"
)


TWO_PROCESSES = (
    WITH_STATES
    + """\
  draft: {kind: train, head: head, states: states, vocab: vocab, epochs: 8, lr: 1e-3,
          batch_tokens: 128, accumulate: 2, noise: {std: 0.05}, save_steps: 2}
"""
)


@pytest.fixture(scope="session")
def first_extraction(
    first_run: tuple[Project, Answer], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Project, Answer]:
    """The project of `first_run`, and hidden states of its rows in several shards."""
    project = first_run[0].copy(tmp_path_factory.mktemp("extracted") / "project")
    project.write(WITH_STATES)
    answer = project.submit()
    assert answer.code == 0, answer.err
    return project, answer


@pytest.fixture
def extracted(first_extraction: tuple[Project, Answer], tmp_path: Path) -> Project:
    """A copy of the project with hidden states."""
    return first_extraction[0].copy(tmp_path / "project")


@pytest.fixture(scope="session")
def two_processes(
    first_extraction: tuple[Project, Answer], tmp_path_factory: pytest.TempPathFactory
) -> Answer:
    """A training by two processes of this machine, of hidden states that were there already."""
    project = first_extraction[0].copy(tmp_path_factory.mktemp("two") / "project")
    project.write(TWO_PROCESSES)
    answer = project.submit("--set", "stages.draft.devices=2")
    assert answer.code == 0, answer.err
    return answer


@pytest.fixture(scope="module")
def ray() -> Iterator[RayCluster]:
    pytest.importorskip("ray", reason="ray is not installed")
    cluster = RayCluster()
    try:
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    base = tmp_path_factory.mktemp("slurm")
    unpacked(base)
    cluster = SlurmCluster(base)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def at_slurm(slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> SlurmCluster:
    for name, value in slurm.environment.items():
        monkeypatch.setenv(name, value)
    return slurm


@dataclass(frozen=True)
class DemoRuns:
    """What the demo made, and a manifest small enough to be trained several times."""

    folder: Path

    @property
    def root(self) -> Path:
        return self.folder / "runs"

    @property
    def small(self) -> Path:
        return self.folder / "small" / "small.yaml"

    def stages(self, name: str) -> dict[str, dict[str, Any]]:
        """The stages of `demo` or `small`, as `submit` told of them; not to be changed."""
        return command.by_name(json.loads((self.folder / f"{name}.json").read_text("utf-8")))

    def make(self) -> None:
        demo = MANIFESTS / "demo.yaml"
        for name, manifest in (("demo", demo), ("small", self._small())):
            document = command.kimi_eagle(self.root, "submit", str(manifest))
            (self.folder / f"{name}.json").write_text(json.dumps(document), "utf-8")
        # Nothing is executed; tests ask for the latest run, and mean the demo.
        command.kimi_eagle(self.root, "submit", str(demo))

    def _small(self) -> Path:
        """A manifest of ten conversations."""
        manifest = yaml.safe_load((MANIFESTS / "first-run.yaml").read_text("utf-8"))
        manifest["verifier"]["path"] = str(DEMO / "verifier")
        manifest["stages"]["rows"]["sources"][0]["path"] = str(DEMO / "first10.jsonl")
        for stage in ("states", "score"):
            # Little to clear: it takes a second of each start to clear a GiB.
            manifest["stages"][stage]["engine"] = {"kind": "vllm", "cpu_kv_cache_gib": 0.125}
        manifest["stages"]["score"]["prompts"] = {"path": str(DEMO / "prompts.jsonl"), "limit": 2}
        self.small.parent.mkdir(parents=True, exist_ok=True)
        self.small.write_text(yaml.safe_dump(manifest), "utf-8")
        return self.small


@pytest.fixture(scope="session")
def demo_runs(tmp_path_factory: pytest.TempPathFactory) -> DemoRuns:
    """Made once for all slow tests, by the first process that needs it; the others wait for it."""
    base = tmp_path_factory.getbasetemp()
    runs = DemoRuns((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "demo-runs")
    with Lock(runs.folder / "lock"):
        made = runs.folder / "made"
        if not made.exists():
            runs.make()
            made.touch()
    return runs


@pytest.fixture(scope="module")
def store(demo_runs: DemoRuns, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with the demo's runs, of one file alone: what `latest` is there does not depend on
    which files' tests the process had before."""
    return shutil.copytree(demo_runs.root, tmp_path_factory.mktemp("store") / "runs", symlinks=True)


@pytest.fixture(scope="session")
def small(demo_runs: DemoRuns) -> Path:
    """A manifest of ten conversations, small enough to be trained several times."""
    return demo_runs.small


@pytest.fixture(scope="session")
def demo(demo_runs: DemoRuns) -> dict[str, dict[str, Any]]:
    """The demo's stages, in `store`."""
    return demo_runs.stages("demo")


@pytest.fixture(scope="session")
def first(demo_runs: DemoRuns) -> dict[str, dict[str, Any]]:
    """The stages of `small`, in `store`."""
    return demo_runs.stages("small")
