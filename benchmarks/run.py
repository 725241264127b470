"""What a run's stages came to, as figures: acceptance and speedup in vLLM, tokens/s, bytes, memory.

    python benchmarks/run.py [RUN] [--root runs] [--record]

RUN is the start of a run's hash, or `latest`. Figures are recorded with the machine, versions and
time of the stage that made them; of a stage that the run took over from an earlier one, of whoever
executed it. `acceptance_<set>` is pooled, the bonus token
included; `speedup_batch_<n>` is tokens a second with the draft over without; the other rates are
of whole stages, the start of an engine included, but for training, where it is the median step's.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from common import Figures, circumstances, parser

from kimi_eagle.evaluations import table
from kimi_eagle.identity import short
from kimi_eagle.records import ExecutionRecord
from kimi_eagle.registry.search import Search
from kimi_eagle.registry.store import Registry
from kimi_eagle.stages.evaluate.report import ALL

Figure = tuple[str, float | None, str, float | None, dict[str, Any]]


def main() -> None:
    options = parser("Print what a run's stages came to.")
    options.add_argument("run", nargs="?", default="latest", metavar="RUN")
    options.add_argument("--root", type=Path, default=Path("runs"), metavar="DIR")
    given = options.parse_args()
    figures = Figures(given)
    registry = Registry(given.root, create=False)
    try:
        run = Search(registry).run(given.run)
        for stage in registry.stages_of(run.id):
            made = executed(registry, stage)
            figures.made = {**circumstances(made.environment), "at": made.started_at}
            for name, value, unit, baseline, more in figures_of(registry, given.root, made):
                about = {"manifest": run.name, "run": short(run.id), "stage": stage.stage}
                figures.emit(name, value, unit, baseline, **about, **more)
    finally:
        registry.close()


def executed(registry: Registry, stage: ExecutionRecord) -> ExecutionRecord:
    """The execution that made what a stage of a run came out as."""
    for digest in stage.outputs.values():
        made = registry.producers(digest)
        if made:
            return made[-1]
    return stage


def figures_of(registry: Registry, root: Path, made: ExecutionRecord) -> Iterator[Figure]:
    found = made.metrics
    if not made.outputs:
        return  # it failed, or was ended
    if made.kind == "regenerate" and found.get("answers_generated"):
        yield "regenerate_tokens", rate(found["answer_tokens"], found["seconds_asking"]), *PER_S
    elif made.kind == "extract" and found.get("tokens_extracted"):
        tokens = found["tokens_extracted"]
        yield "states_tokens", rate(tokens, made.seconds), *PER_S
        yield "states_bytes_per_token", found["bytes_written"] / tokens, "bytes", None, {}
    elif made.kind == "train":
        yield "train_tokens", median_step(root, made), *PER_S
        if (peak := found.get("peak_gpu_bytes")) is not None:  # none on a CPU
            yield "train_peak_memory", peak / 1e9, "GB", None, {}
        if (length := found.get("simulated_acceptance_length")) is not None:
            steps = (made.document or {}).get("parameters", {}).get("ttt_steps")
            yield "acceptance_simulated", length, "tokens", None, {"draft_tokens": steps}
    elif made.kind == "evaluate":
        for evaluation in table(registry, root, [made.outputs["evaluation"]]).evaluations:
            settings = {"max_tokens": evaluation.document["max_tokens"]}
            yield from acceptance(evaluation.document["measurements"], settings)
            yield from speedup(evaluation.speeds, settings)
    elif made.kind == "export":
        yield "release_bytes", found["bytes"], "bytes", None, {}


def median_step(root: Path, made: ExecutionRecord) -> float | None:
    """Tokens a second of a training's median step: the first ones compile."""
    path = root / made.run_id / "stages" / f"{made.stage}.events"
    if not path.exists():
        return None
    events = map(json.loads, path.read_text("utf-8").splitlines())
    found = [one["tokens_per_second"] for one in events if one.get("split") == "train"]
    rates = [one for one in found if one]
    return statistics.median(rates) if rates else None


PER_S: tuple[str, None, dict[str, Any]] = ("tokens/s", None, {})


def rate(tokens: int, seconds: float | None) -> float | None:
    return tokens / seconds if seconds else None


def acceptance(lines: Iterable[Mapping[str, Any]], settings: dict[str, Any]) -> Iterator[Figure]:
    for line in lines:
        kept = ("draft_tokens", "temperature", "batch", "prompts", "tokens", "per_position")
        more = {name: line[name] for name in kept}
        more["per_position"] = [round(share, 4) for share in more["per_position"]]
        name = f"acceptance_{label(line['set'])}"
        yield name, line["acceptance_length"], "tokens", None, {**settings, **more}


def speedup(lines: Iterable[Mapping[str, Any]], settings: dict[str, Any]) -> Iterator[Figure]:
    """Of all sets together; tokens a second, beside those without the draft."""
    lines = [line for line in lines if line["speedup"] is not None]
    together = [line for line in lines if line["set"] == ALL] or lines
    for line in together:
        more = {name: line[name] for name in ("draft_tokens", "temperature", "set")}
        plain = line["tokens_per_second_without_draft"]
        name = f"speedup_batch_{line['batch']}"
        yield name, line["tokens_per_second"], "tokens/s", plain, {**settings, **more}


def label(name: str) -> str:
    return "all" if name == ALL else name.replace("/", "_")


if __name__ == "__main__":
    main()
