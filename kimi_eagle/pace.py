"""How long stages would take: by rates that are given, or by what the like took before here.

states: about 1.4 h at 24,000 tokens a second on 4 workers (given)
draft: about 9.0 h at 3,700 tokens a second (as in run 5d0c21f0a9be)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kimi_eagle.forecast import Forecast
from kimi_eagle.manifest.load import LoadedManifest
from kimi_eagle.plan import REUSE, StagePlan
from kimi_eagle.registry.ledger import Ledger


@dataclass(frozen=True)
class Expected:
    """What a stage would take."""

    tokens: int
    """It passes through the engine, or through the trainer over all epochs."""
    tokens_per_second: float
    """Of all its workers."""
    seconds: float
    basis: str

    def document(self) -> dict[str, Any]:
        return asdict(self)

    def says(self) -> str:
        return (
            f"about {self.seconds / 3600:,.1f} h at {self.tokens_per_second:,.0f} tokens a second "
            f"({self.basis})"
        )


def expected(
    loaded: LoadedManifest,
    stages: Sequence[StagePlan],
    forecasts: Mapping[str, Forecast],
    registry: Ledger,
    given: Mapping[str, float],
) -> dict[str, Expected]:
    """Of the extractions and trainings that are not reused and whose tokens and rate are known.

    Args: `given`: tokens a second, of one worker, by stage.
    """
    found = {}
    for stage in stages:
        if stage.action == REUSE or stage.kind not in ("extract", "train"):
            continue
        tokens = _tokens(loaded, stage, stages, forecasts)
        rate, basis = _rate(stage, registry, given)
        if not tokens or not rate:
            continue
        workers = loaded.manifest.stages[stage.name].resources.workers
        if isinstance(workers, int) and workers > 1:
            rate, basis = rate * workers, f"{basis}, on {workers} workers"
        found[stage.name] = Expected(tokens, rate, tokens / rate, basis)
    return found


def _tokens(
    loaded: LoadedManifest,
    stage: StagePlan,
    stages: Sequence[StagePlan],
    forecasts: Mapping[str, Forecast],
) -> int | None:
    if stage.kind == "extract":
        forecast = forecasts.get(stage.name)
        return forecast.tokens if forecast is not None else None
    params = loaded.manifest.stages[stage.name]
    states = dict(loaded.manifest.upstream(stage.name))["states"]
    made = next(item.made for item in stages if item.name == states)
    if made is not None and "tokens" in made.metrics:
        return int(made.metrics["tokens"]) * int(getattr(params, "epochs", 1))
    forecast = forecasts.get(states)
    if forecast is None:
        return None
    return forecast.tokens * int(getattr(params, "epochs", 1))


def _rate(
    stage: StagePlan, registry: Ledger, given: Mapping[str, float]
) -> tuple[float | None, str]:
    """Tokens a second of one worker, and what that goes by."""
    if stage.name in given:
        return given[stage.name], "given"
    role = "verifier" if stage.kind == "extract" else "head"
    wanted = stage.inputs.get(role)
    if not wanted:
        return None, ""
    # Of the last ones the longest: the start of an engine says nothing of its pace.
    known = [
        (metrics, seconds, run)
        for run, metrics, seconds, inputs in registry.last_of(stage.kind)
        if inputs.get(role) == list(wanted)
    ]
    rates = [
        (float(metrics["tokens_extracted"]), seconds, run, int(metrics.get("workers", 1)))
        for metrics, seconds, run in known
        if metrics.get("tokens_extracted")
    ] + [
        (float(metrics["tokens_per_second"]) * seconds, seconds, run, 1)
        for metrics, seconds, run in known
        if metrics.get("tokens_per_second")
    ]
    if not rates:
        return None, ""
    tokens, seconds, run, workers = max(rates)
    return tokens / seconds / workers, f"as in run {run}"
