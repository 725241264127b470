"""What it takes to find that nothing changed: `kimi-eagle submit` of N stages, all up to date.

    python benchmarks/noop.py --stages 1000 [--ours-only] [--record]

The whole process is measured: start, reading the manifest, looking at every input and output,
recording the run, saying so. Beside it stand DVC, redun and Snakemake on pipelines of the same
size and shape (N stages side by side, one small file in and one out), each in a virtual
environment of its own under the user's cache folder, made on first use.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import tempfile
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common import KIMI_EAGLE, Figures, Usage, measure, parser

from kimi_eagle.artifacts.files import write_json
from kimi_eagle.artifacts.objects import STAGING
from kimi_eagle.attempt import StageInputs
from kimi_eagle.manifest.load import load
from kimi_eagle.plan import RUN, StagePlan
from kimi_eagle.progress import PlainReporter
from kimi_eagle.provenance import environment
from kimi_eagle.runner import Runner
from kimi_eagle.stages.catalog import KINDS

DEMO = Path(importlib.import_module("kimi_eagle").__file__ or "").parent / "demo"
# The demo verifier's vocabulary bounds how many draft vocabularies can differ in size.
VOCABS_A_ROWS = 1000


def main() -> None:
    options = parser("Submit N unchanged stages, beside other workflow tools.")
    options.add_argument("--stages", type=int, default=1000, metavar="N")
    options.add_argument("--ours-only", action="store_true", help="leave the other tools out")
    options.add_argument("--repeat", type=int, default=5, metavar="N", help="the best of N counts")
    given = options.parse_args()
    figures = Figures(given)
    with tempfile.TemporaryDirectory(prefix="noop-") as folder:
        top = Path(folder)
        contestants = [_ours(top / "kimi-eagle", given.stages)]
        if not given.ours_only:
            for name, make in PEERS.items():
                try:
                    contestants.append(make(top / name, given.stages))
                except (subprocess.CalledProcessError, OSError, SystemExit) as error:
                    figures.emit(f"noop_cpu_{name}", None, "s", note=_reason(error))
        for contestant in contestants:
            measure(contestant.command, cwd=contestant.folder)  # the first one compiles
        # In turns: what else the machine does meets all of them alike.
        for _ in range(given.repeat):
            for contestant in contestants:
                contestant.used.append(measure(contestant.command, cwd=contestant.folder))
    best = {item.name: _best(item.used) for item in contestants}
    ours = best.pop("kimi-eagle")
    versions = {item.name: item.version for item in contestants}
    for name, used in best.items():
        figures.emit(f"noop_cpu_{name}", used.cpu_seconds, "s", version=versions[name])
        figures.emit(f"noop_rss_{name}", used.peak_bytes / 2**20, "MiB", version=versions[name])
    cpu = min((used.cpu_seconds for used in best.values()), default=None)
    memory = min((used.peak_bytes / 2**20 for used in best.values()), default=None)
    figures.emit("noop_cpu", ours.cpu_seconds, "s", cpu, stages=given.stages)
    figures.emit("noop_wall", ours.seconds, "s", stages=given.stages)
    figures.emit("noop_rss", ours.peak_bytes / 2**20, "MiB", memory, stages=given.stages)


def _best(used: list[Usage]) -> Usage:
    return Usage(
        min(item.cpu_seconds for item in used),
        min(item.seconds for item in used),
        min(item.peak_bytes for item in used),
    )


def _reason(error: BaseException) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = (error.stderr or error.stdout or b"").decode().strip().splitlines()
        return f"{error.cmd[0]} ended with {error.returncode}: {lines[-1] if lines else ''}"
    return str(error)


@dataclass
class Contestant:
    """A tool whose pipeline is up to date, and what its no-op took."""

    name: str
    version: str
    command: list[str]
    folder: Path

    def __post_init__(self) -> None:
        self.used: list[Usage] = []


# Ours


def _ours(folder: Path, count: int) -> Contestant:
    """A root that knows the outputs of every stage; no worker runs for it."""
    folder.mkdir()
    shutil.copytree(DEMO / "verifier", folder / "verifier")
    shutil.copyfile(DEMO / "first10.jsonl", folder / "chats.jsonl")
    manifest = folder / "manifest.yaml"
    manifest.write_text(_manifest(count), "utf-8")
    loaded = load(manifest)
    runner = Runner(folder / "runs", PlainReporter())
    pins = runner.pin(loaded)
    try:
        with runner.recording("seed", loaded):
            while waiting := [s for s in runner.plan(loaded, pins) if s.action == RUN]:
                for stage in waiting:
                    upstream = {
                        role: (stage.inputs[role][0], source)
                        for role, source in loaded.manifest.upstream(stage.name)
                    }
                    params = loaded.manifest.stages[stage.name]
                    given = StageInputs(
                        params, pins.verifier.path, pins.stages[stage.name], upstream
                    )
                    _seed(runner, stage, given)
                runner.digests.flush()
            runner.registry.end_run("seed", "done")
    finally:
        runner.close()
    return Contestant(
        "kimi-eagle",
        str(environment()["kimi_eagle"]),
        [*KIMI_EAGLE, "submit", "manifest.yaml", "--json"],
        folder,
    )


def _manifest(count: int) -> str:
    """One `prepare` for every thousand `vocab` stages that take from it."""
    lines = ["version: 1", "name: wide", "verifier: {path: verifier}", "stages:"]
    for index in range(count):
        group, place = divmod(index, VOCABS_A_ROWS)
        if place == 0:
            lines += [
                f"  rows-{group}:",
                "    kind: prepare",
                "    sources:",
                "      - {path: chats.jsonl}",
                "    max_length: 512",
                f"    seed: {group}",
            ]
        else:
            lines += [
                f"  vocab-{index}:",
                "    kind: vocab",
                f"    rows: rows-{group}",
                f"    size: {place}",
            ]
    return "\n".join(lines) + "\n"


def _seed(runner: Runner, stage: StagePlan, given: StageInputs) -> None:
    """Record an execution of a stage, with files in place of what a worker would have made."""
    kind = KINDS[stage.kind]
    execution = runner.registry.begin_execution(
        "seed",
        stage.name,
        stage.kind,
        str(stage.key),
        stage.document or {},
        given.records(stage),
        given.members(),
        f"seed-{stage.name}",
        environment(),
    )
    staged = runner.root / STAGING / f"seed-{stage.name}"
    staged.mkdir(parents=True)
    write_json(staged / "report.json", {"stage": stage.name})
    (staged / f"{kind.output}.safetensors").write_bytes(stage.name.encode() * 100)
    record = runner.objects.describe(staged, kind.output)
    metrics = {"size": 256, "filled": 0, "coverage": 0.99, "coverage_val": 0.98}
    runner.objects.publish(staged, record, {"key": stage.key, "stage": stage.name})
    runner.registry.end_execution(
        execution, "executed", seconds=1.0, outputs={kind.output: record}, metrics=metrics
    )


# The others


def _environment(name: str) -> tuple[Path, str]:
    """The `bin` folder of a tool's own virtual environment, made if need be, and its version."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "kimi-eagle-benchmarks" / name
    tools = folder / "bin"
    if not (tools / name).exists():
        venv.create(folder, with_pip=True, clear=True)
        _run([str(tools / "python"), "-m", "pip", "install", "--quiet", name], folder)
    code = f"import importlib.metadata as m; print(m.version({name!r}))"
    version = _run([str(tools / "python"), "-c", code], folder).decode().strip()
    return tools, version


def _run(command: list[str], folder: Path) -> bytes:
    return subprocess.run(command, cwd=folder, check=True, capture_output=True).stdout


def _dvc(folder: Path, count: int) -> Contestant:
    tools, version = _environment("dvc")
    folder.mkdir()
    dvc = str(tools / "dvc")
    _run([dvc, "init", "--no-scm", "--quiet"], folder)
    _run([dvc, "config", "core.analytics", "false"], folder)
    (folder / "in.txt").write_text("in\n", "utf-8")
    stages = []
    for index in range(count):
        (folder / f"out{index}.txt").write_text(f"in {index}\n", "utf-8")
        stages.append(
            f"  s{index}:\n    cmd: echo in {index} > out{index}.txt\n"
            f"    deps: [in.txt]\n    outs: [out{index}.txt]\n"
        )
    (folder / "dvc.yaml").write_text("stages:\n" + "".join(stages), "utf-8")
    # Takes the outputs that are there for those of the stages: the same lock as after a run.
    _run([dvc, "commit", "--force", "--quiet"], folder)
    return Contestant("dvc", version, [dvc, "repro"], folder)


def _redun(folder: Path, count: int) -> Contestant:
    tools, version = _environment("redun")
    folder.mkdir()
    (folder / "in.txt").write_text("in\n", "utf-8")
    (folder / "workflow.py").write_text(
        "from redun import File, task\n"
        "redun_namespace = 'wide'\n"
        "@task()\n"
        "def step(index: int, source: File) -> File:\n"
        "    out = File(f'out{index}.txt')\n"
        "    out.write(f'{source.read()} {index}')\n"
        "    return out\n"
        "@task()\n"
        f"def main(count: int = {count}) -> list[File]:\n"
        "    return [step(index, File('in.txt')) for index in range(count)]\n",
        "utf-8",
    )
    command = [str(tools / "redun"), "run", "workflow.py", "main"]
    _run(command, folder)
    return Contestant("redun", version, command, folder)


def _snakemake(folder: Path, count: int) -> Contestant:
    tools, version = _environment("snakemake")
    folder.mkdir()
    (folder / "in.txt").write_text("in\n", "utf-8")
    (folder / "Snakefile").write_text(
        f"rule all:\n    input: expand('out{{i}}.txt', i=range({count}))\n"
        "rule step:\n    input: 'in.txt'\n    output: 'out{i}.txt'\n"
        # (A `run:` block starts a Snakemake of its own for every job.)
        "    shell: 'echo in {wildcards.i} > {output}'\n",
        "utf-8",
    )
    command = [str(tools / "snakemake"), "--cores", "1", "--quiet", "all"]
    _run(command, folder)
    return Contestant("snakemake", version, command, folder)


PEERS: dict[str, Callable[[Path, int], Contestant]] = {
    "dvc": _dvc,
    "redun": _redun,
    "snakemake": _snakemake,
}

if __name__ == "__main__":
    main()
