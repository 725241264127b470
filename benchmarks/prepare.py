"""How fast conversations become rows, beside speculators' own `prepare-data`, and in what memory.

    python benchmarks/prepare.py [--verifier FOLDER] [--source FILE] [--conversations N] [--record]

Both are given the same conversations and the same tokenizer with its chat template (those of
FOLDER, in a folder of their own, so that neither meets the verifier's architecture), and two
processes; both are whole processes, start and all. speculators renders through vLLM's rendering
server, which is started before and not counted. The rate is that of the same tokens, those of our
rows: speculators writes a row a turn with all that precedes it, so that its own count is larger.
CPU seconds are given beside the rate, since a machine that others use too has no other measure;
they include the server's.

Memory is the largest process's, for the source and for one four times as long.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from common import Figures, Usage, measure, parser
from serving import answers, free_port

import kimi_eagle
from kimi_eagle.job import RESULT, Given, Job

DEMO = Path(kimi_eagle.__file__).parent / "demo"
# The smallest model that vLLM knows how to render for.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
    "max_position_embeddings": 65536,
    "torch_dtype": "bfloat16",
}


def main() -> None:
    options = parser("Prepare rows, beside speculators' prepare-data.")
    options.add_argument("--verifier", type=Path, default=DEMO / "verifier")
    options.add_argument(
        "--source",
        type=Path,
        help="JSON lines of `messages` or `conversations`, OpenAI's or ShareGPT's",
    )
    options.add_argument("--conversations", type=int, default=2000)
    options.add_argument("--max-length", type=int, default=2048)
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--ours-only", action="store_true", help="do not run speculators")
    given = options.parse_args()
    figures = Figures(given)
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", VLLM_NO_USAGE_STATS="1")
    with tempfile.TemporaryDirectory(prefix="prepare-") as name:
        folder = Path(name)
        model = _model(given.verifier, folder / "model")
        sources = [_source(given, folder / f"{n}.jsonl", n) for n in (1, 4)]
        ours, metrics = _prepare(model, sources[0], folder / "ours", given)
        more, _ = _prepare(model, sources[1], folder / "more", given)
        theirs = None if given.ours_only else _speculators(model, sources[0], folder, given)
    said: dict[str, Any] = {
        "conversations": metrics["conversations"],
        "seconds": round(ours.seconds, 2),
        "cpu_seconds": round(ours.cpu_seconds, 2),
        "prompts_proven": metrics["prompts_proven"],
    }
    baseline = None
    if theirs is not None:
        usage, counts = theirs
        baseline = metrics["tokens"] / usage.seconds
        said["speculators"] = {
            **counts,
            "seconds": round(usage.seconds, 2),
            "cpu_seconds": round(usage.cpu_seconds, 2),
        }
        said["cpu_ratio"] = round(usage.cpu_seconds / ours.cpu_seconds, 2)
    rate = metrics["tokens"] / ours.seconds
    figures.emit("prepare_vs_speculators", rate, "tokens/s", baseline, **said)
    mib = 1 << 20
    figures.emit("prepare_memory_4x", more.peak_bytes / mib, "MiB", ours.peak_bytes / mib)


def _model(verifier: Path, target: Path) -> Path:
    """A folder with the verifier's tokenizer and template alone."""
    from kimi_eagle.rows.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(verifier)
    tokenizer.save_pretrained(target)
    (target / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": len(tokenizer)}))
    return target


def _source(given: Any, target: Path, times: int) -> Path:
    """`times` as many conversations; copies differ in what their first question begins with."""
    source = given.source or DEMO / "chats.jsonl"
    lines = source.read_text("utf-8").splitlines()
    found = [_record(json.loads(line)) for line in islice(lines, given.conversations)]
    found = [record for record in found if any(t["role"] == "user" for t in record["turns"])]
    with target.open("w", encoding="utf-8") as file:
        for number in range(given.conversations * times):
            record = found[number % len(found)]
            turns = record["turns"]
            first = next(i for i, turn in enumerate(turns) if turn["role"] == "user")
            again = f"({number // len(found)}) " if number >= len(found) else ""
            asked = {**turns[first], "content": again + turns[first]["content"]}
            turns = [*turns[:first], asked, *turns[first + 1 :]]
            file.write(json.dumps({"conversations": turns, "tools": record.get("tools")}) + "\n")
    return target


def _record(record: dict[str, Any]) -> dict[str, Any]:
    """A conversation as both sides read it, with the field's roles for ShareGPT's."""
    roles = {"human": "user", "gpt": "assistant"}
    turns = [
        turn
        if "role" in turn
        else {"role": roles.get(turn["from"], turn["from"]), "content": turn["value"]}
        for turn in record.get("messages") or record["conversations"]
    ]
    return {"turns": turns, "tools": record.get("tools")}


def _prepare(model: Path, source: Path, folder: Path, given: Any) -> tuple[Usage, dict[str, Any]]:
    folder.mkdir()
    params = {
        "kind": "prepare",
        "sources": [{"path": str(source)}],
        "max_length": given.max_length,
        "workers": given.workers,
    }
    inputs = {"tokenizer": (Given("", str(model)),), "sources.0": (Given("", str(source)),)}
    place = str(folder)
    job = Job("rows", "prepare", params, inputs, str(model), place, place, "").write()
    usage = measure([sys.executable, "-m", "kimi_eagle.worker", str(job)])
    return usage, json.loads((folder / RESULT).read_text("utf-8"))["metrics"]


def _speculators(
    model: Path, source: Path, folder: Path, given: Any
) -> tuple[Usage, dict[str, int]]:
    out = folder / "theirs"
    with _server(model) as (url, process):
        before = _cpu_seconds(process)
        usage = measure(
            [
                *(sys.executable, "-m", "speculators", "prepare-data"),
                *("--model", str(model), "--data", str(source), "--output", str(out)),
                *("--seq-length", str(given.max_length), "--render-endpoint", url),
                *("--num-preprocessing-workers", str(given.workers)),
            ]
        )
        served = _cpu_seconds(process) - before
    from datasets import load_from_disk

    rows = load_from_disk(str(out))
    counts = {"rows": len(rows), "tokens": int(sum(rows["seq_len"]))}
    return Usage(usage.cpu_seconds + served, usage.seconds, usage.peak_bytes), counts


@contextmanager
def _server(model: Path) -> Iterator[tuple[str, int]]:
    """vLLM's rendering server, once it answers."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "launch", "render", str(model)]
    command += ["--port", str(port), "--host", "127.0.0.1", "--disable-uvicorn-access-log"]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}"
            for _ in range(600):
                if process.poll() is not None or answers(url):
                    break
                time.sleep(0.5)
            if process.poll() is not None or not answers(url):
                log.seek(0)
                raise SystemExit(f"vLLM did not start:\n{log.read().decode()[-4000:]}")
            yield url, process.pid
        finally:
            process.terminate()
            process.wait()


def _cpu_seconds(process: int) -> float:
    """What a process has used so far, every thread of it."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
