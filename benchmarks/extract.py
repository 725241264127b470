"""Tokens a second of extraction, beside plain prefill of the same prompts in the same engine.

    python benchmarks/extract.py [--model FOLDER] [--prompts 2000] [--length 1000] [--repeat 5]
                                 [--starts 1] [--by worker connector] [--buffer MIB] [--example]
                                 [--speculators] [--profile] [--record]

Engines with the same settings, each in a process of its own, take turns on the same random
prompts: vLLM alone (one token a prompt), vLLM handing states over as in the `extract` stage
(until every row is checked, digested and in a closed shard, and proven; not until the shards have
left the page cache), in one way or in both, and with `--example` vLLM's own
ExampleHiddenStatesConnector, a file a request, until every file is there. `--speculators` adds that
connector behind vLLM's server and asked by speculators' own `generate-offline-data`, as its own log
times it. On a CPU all are bound to the same cores; the example connector does not run there, and an
engine can be a third faster than the next one like it for as long as it lives: `--starts` says how
often all are started anew. With `--profile` a last turn of plain and ours is traced by torch's
profiler, which slows it: `profiled_step` says where a step's time went.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from common import Figures, parser
from engine_trace import per_step
from serving import answers, free_port

from kimi_eagle.engines.extraction import CONNECTOR, WORKER, extraction_job
from kimi_eagle.engines.launch import engine_environment, environment, has_gpu
from kimi_eagle.engines.todo import Todo
from kimi_eagle.stages.engine import ExtractEngine
from kimi_eagle.stages.extract.spec import ExtractParams
from kimi_eagle.states.contract import LayerContract
from kimi_eagle.verifiers.folder import open_folder

# The sides that one may ask for, and the names of their figures.
OTHERS = {
    "example": "example_connector_tokens",
    "speculators": "speculators_offline_tokens",
}
DEMO = Path(__file__).resolve().parent.parent / "kimi_eagle" / "demo" / "verifier"


def main() -> None:
    options = parser("Extraction beside plain prefill.")
    options.add_argument("--model", type=Path, default=DEMO)
    options.add_argument("--prompts", type=int, default=200)
    options.add_argument("--length", type=int, default=100, help="tokens of a prompt")
    options.add_argument("--batched", type=int, default=8192, help="tokens in one forward pass")
    options.add_argument("--compiled", action="store_true", help="without enforce_eager")
    options.add_argument("--repeat", type=int, default=5, metavar="N")
    options.add_argument("--starts", type=int, default=1, help="of all engines, `--repeat` each")
    options.add_argument("--example", action="store_true", help="vLLM's example connector too")
    options.add_argument(
        "--speculators", action="store_true", help="and through speculators' generate-offline-data"
    )
    options.add_argument(
        "--by",
        choices=[WORKER, CONNECTOR],
        nargs="+",
        help="who hands states over, as the stage by default",
    )
    options.add_argument("--buffer", type=int, metavar="MIB", help="between engine and writers")
    options.add_argument("--profile", action="store_true", help="trace a last turn")
    options.add_argument("--side", help=argparse.SUPPRESS)
    options.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.side is not None:
        _side(given.side, json.loads(given.job.read_text("utf-8")))
        return
    if CONNECTOR in (given.by or []) and not has_gpu():
        raise SystemExit("--by connector is measured on a GPU")
    with tempfile.TemporaryDirectory(prefix="extract-") as folder:
        _compare(given, Path(folder))


def _compare(given: argparse.Namespace, folder: Path) -> None:
    others = [side for side in OTHERS if getattr(given, side)]
    count = 1 + len(given.by or ["ours"]) + len(others)
    job = _job(given, folder, min(0.9 / count, 0.3))
    (folder / "job.json").write_text(json.dumps(job), "utf-8")
    ours = given.by or [job["by"]]
    sides = ["plain", *ours, *others]
    tokens = given.prompts * given.length
    rates: dict[str, list[float]] = {side: [] for side in sides}
    tails: dict[str, list[float]] = {side: [] for side in sides}
    steps: dict[str, dict[str, float]] = {}
    for _ in range(given.starts):
        running = {}
        for side in sides:
            # One after the other: vLLM takes what others allocate meanwhile for its own, and would
            # give its cache less.
            running[side] = Side(side, folder, given.profile)
            running[side].wait()
        for turn in range(given.repeat + 1):
            for name in sides if turn % 2 else reversed(sides):
                seconds, *after = running[name].take_turn()
                if turn:  # the first is for warming up
                    rates[name].append(tokens / seconds)
                    tails[name] += after
        steps = {side: running[side].traced() for side in ["plain", *ours] if given.profile}
        for one in running.values():
            one.end()
    figures = Figures(given)
    plain = statistics.median(rates["plain"])
    more = {
        "model": job["name"],
        "prompts": given.prompts,
        "length": given.length,
        "batched": given.batched,
        "eager": not given.compiled,
        **({"buffer_mib": given.buffer} if given.buffer else {}),
        "repeat": given.repeat,
        "starts": given.starts,
        "turns": {side: [round(rate) for rate in found] for side, found in rates.items()},
    }
    for by in ours:
        # Turns are close together: what slows the machine slows both.
        pairs = [mine / theirs for mine, theirs in zip(rates[by], rates["plain"], strict=True)]
        mine = {**more, "by": by, "pairs": [round(pair, 4) for pair in pairs]}
        figures.emit("extract_tokens", statistics.median(rates[by]), "tokens/s", plain, **mine)
        figures.emit("extract_vs_prefill", statistics.median(pairs), "ratio", **mine)
        figures.emit("extract_after_the_engine", statistics.median(tails[by]), "s", **mine)
        if steps:
            took = {f"{side}_ms": steps[side] for side in ("plain", by)}
            found, theirs = steps[by]["step"], steps["plain"]["step"]
            figures.emit("profiled_step", found, "ms", theirs, **mine, **took)
    for side in others:
        figures.emit(OTHERS[side], statistics.median(rates[side]), "tokens/s", plain, **more)


def _job(given: argparse.Namespace, folder: Path, share: float) -> dict[str, Any]:
    import numpy as np

    verifier = open_folder(given.model)
    facts = verifier.facts
    drawn = np.random.default_rng(0)
    low, high = min(100, facts.vocab_size // 4), facts.vocab_size - facts.vocab_size // 8
    rows = {
        f"{number:064x}": drawn.integers(low, high, given.length) for number in range(given.prompts)
    }
    Todo.write(folder / "rows.npz", rows)
    params = ExtractParams.model_validate(
        {
            "kind": "extract",
            "rows": "rows",
            # Random tokens leave more ties than text does; what is measured here is speed.
            "min_agreement": 0.5,
            "engine": {
                "kind": "vllm",
                "max_batched_tokens": given.batched,
                "enforce_eager": not given.compiled,
                "gpu_memory_utilization": round(share, 2),
                "buffer_mib": given.buffer,
            },
        }
    )
    contract = LayerContract(
        layers=(*facts.aux_layers("default"), facts.num_layers),
        hidden_size=facts.hidden_size,
        dtype="bfloat16",
        numerics="vllm",
    )
    shards = folder / "shards"
    job = extraction_job(
        verifier, contract, params, folder / "rows.npz", shards, folder / "events.ndjson"
    )
    traces = str(folder / "traces") if given.profile else None
    more = {"name": given.model.resolve().name, "files": str(folder / "files"), "traces": traces}
    return {**job, **more}


class Side:
    """One engine in a process of its own, which takes a turn when it is asked to."""

    def __init__(self, side: str, folder: Path, traced: bool):
        # As the stage starts it; a server is processes of its own.
        env = environment() if side == "speculators" else engine_environment(ExtractEngine())
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--side", side, "--job", str(folder / "job.json")],
            env={**env, "VLLM_CUSTOM_SCOPES_FOR_PROFILING": "1" if traced else "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        atexit.register(self.end)

    def wait(self) -> str:
        """Its next answer; what the engine prints besides is passed over."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("answer "):
                return line.split(maxsplit=1)[1]
        raise SystemExit(f"a side ended with {self._process.wait()}")

    def take_turn(self) -> list[float]:
        """Seconds in all; of ours, also those after the engine's last row."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return [float(part) for part in self.wait().split()]

    def traced(self) -> dict[str, float]:
        """Milliseconds of a step and of its parts in one more turn (`engine_trace.per_step`)."""
        assert self._process.stdin is not None
        self._process.stdin.write("trace\n")
        self._process.stdin.flush()
        return dict(json.loads(self.wait()))

    def end(self) -> None:
        """With its engine, which takes its time to end by itself, or outlives it. Once."""
        atexit.unregister(self.end)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _side(side: str, job: Mapping[str, Any]) -> None:
    turns = {"plain": Plain, "example": Example, "speculators": Speculators}
    runs = turns[side](job) if side in turns else Ours({**job, "by": side})
    print("answer ready", flush=True)
    for turn, asked in enumerate(sys.stdin):
        if asked.strip() == "trace":
            runs.llm.start_profile()
            runs.turn(turn)
            runs.llm.stop_profile()
            print("answer", json.dumps(per_step(Path(job["traces"]) / side)), flush=True)
        else:
            print("answer", *runs.turn(turn), flush=True)


def _traced(job: Mapping[str, Any], side: str) -> dict[str, Any]:
    """Options of an engine that can be traced, into a folder of its own."""
    if job["traces"] is None:
        return {}
    folder = str(Path(job["traces"]) / side)
    more = {"torch_profiler_with_stack": False, "torch_profiler_dump_cuda_time_total": False}
    return {"profiler_config": {"profiler": "torch", "torch_profiler_dir": folder, **more}}


class Plain:
    def __init__(self, job: Mapping[str, Any], **options: Any):
        from kimi_eagle.engines.vllm_options import common_options, start_engine

        self.job, self.todo = job, Todo(job["rows"])
        self.llm = start_engine({**common_options(job), **(options or _traced(job, "plain"))})

    def turn(self, number: int) -> list[float]:
        started = time.perf_counter()
        self.generate()
        return [time.perf_counter() - started]

    def generate(self) -> Any:
        from vllm import SamplingParams

        prompts = [
            {"prompt_token_ids": self.todo.ids(row).tolist()} for row in range(len(self.todo))
        ]
        sampling = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
        return self.llm.generate(prompts, sampling, use_tqdm=False)


class Ours:
    def __init__(self, job: Mapping[str, Any]):
        from kimi_eagle.engines.vllm_extract import start

        self.folder = Path(job["shards"]) / job["by"]
        self.job = {**job, "shards": str(self.folder)}
        self.llm = start(self.job, **_traced(job, job["by"]))

    def turn(self, number: int) -> list[float]:
        from kimi_eagle.engines.gathering import gather
        from kimi_eagle.engines.vllm_extract import QUEUE_TOKENS, feed

        gathering = gather(self.job, self.folder, f"turn-{number}")
        started = time.perf_counter()
        feed(self.llm, gathering, QUEUE_TOKENS, self.job["by"])
        fed = time.perf_counter()
        gathering.wait()
        ended = time.perf_counter()
        shutil.rmtree(self.folder / f"turn-{number}")
        return [ended - started, ended - fed]


def _example_options(job: Mapping[str, Any]) -> dict[str, Any]:
    layers = {"eagle_aux_hidden_state_layer_ids": job["contract"]["layers"]}
    return {
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": layers},
        },
        "kv_transfer_config": {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": job["files"]},
        },
    }


class Example(Plain):
    def __init__(self, job: Mapping[str, Any]):
        if not has_gpu():
            raise SystemExit("vLLM's example connector needs a GPU")
        super().__init__(job, **_example_options(job))

    def turn(self, number: int) -> list[float]:
        from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
            load_hidden_states,
        )

        started = time.perf_counter()
        paths = [o.kv_transfer_params["hidden_states_path"] for o in self.generate()]
        load_hidden_states(paths[-1])  # waits for the last of them
        while not all(Path(path).exists() for path in paths):
            time.sleep(0.001)
        seconds = time.perf_counter() - started
        shutil.rmtree(self.job["files"])
        return [seconds]


class Speculators:
    """vLLM's server with the example connector, and speculators' client, a process a turn."""

    # Requests at a time: with the 32 of its own the server waits for the client.
    CONCURRENCY = 256

    def __init__(self, job: Mapping[str, Any]):
        from datasets import Dataset

        from kimi_eagle.engines.vllm_options import common_options

        if not has_gpu():
            raise SystemExit("vLLM's example connector needs a GPU")
        self.folder = Path(job["files"]).parent / "speculators"
        job = {**job, "files": str(self.folder / "files")}
        todo = Todo(job["rows"])
        ids = [todo.ids(row).tolist() for row in range(len(todo))]
        rows = Dataset.from_dict({"input_ids": ids, "loss_mask": ids}).with_format("torch")
        rows.save_to_disk(str(self.folder / "rows"))
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
        options = {**common_options(job), **_example_options(job)}
        command += [options.pop("model"), "--port", str(port), "--host", "127.0.0.1"]
        command += ["--disable-uvicorn-access-log", *_flags(options)]
        self.log = (self.folder / "log").open("w+")
        self.server = subprocess.Popen(command, stdout=self.log, stderr=self.log)
        while not answers(self.url):
            if self.server.poll() is not None:
                self.log.seek(0)
                raise SystemExit(f"vLLM did not start:\n{self.log.read()[-4000:]}")
            time.sleep(0.5)

    def turn(self, number: int) -> list[float]:
        out = self.folder / f"turn-{number}"
        done = subprocess.run(
            [
                *(sys.executable, "-m", "speculators", "generate-offline-data", "--fail-on-error"),
                *("--endpoint", f"{self.url}/v1", "--concurrency", str(self.CONCURRENCY)),
                *("--preprocessed-data", str(self.folder / "rows"), "--output", str(out)),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        timed = re.search(r"Timing: ([0-9.]+)s elapsed", done.stdout)
        if done.returncode or timed is None:
            raise SystemExit(f"generate-offline-data failed:\n{done.stdout[-4000:]}")
        shutil.rmtree(out)
        return [float(timed[1])]


def _flags(options: Mapping[str, Any]) -> list[str]:
    """Options of `vllm.LLM` as its command line takes them."""
    flags = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            said = json.dumps(value) if isinstance(value, dict) else str(value)
            flags += [f"--{flag}", said]
    return flags


if __name__ == "__main__":
    main()
