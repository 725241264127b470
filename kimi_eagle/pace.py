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
from kimi_eagle.pins import Pinned
from kimi_eagle.plan import REUSE, StagePlan
from kimi_eagle.records import ArtifactRecord
from kimi_eagle.registry.keeping import Keeper
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
    gpus: int = 0
    """That it has all the time, all workers together; 0 where the manifest names none."""

    def document(self) -> dict[str, Any]:
        return {**asdict(self), "gpu_hours": self.gpus * self.seconds / 3600}

    def says(self) -> str:
        said = (
            f"about {self.seconds / 3600:,.1f} h at {self.tokens_per_second:,.0f} tokens a second "
            f"({self.basis})"
        )
        if not self.gpus:
            return said
        return f"{said}: {self.gpus * self.seconds / 3600:,.1f} GPU-hours"


def expected(
    loaded: LoadedManifest,
    stages: Sequence[StagePlan],
    forecasts: Mapping[str, Forecast],
    registry: Ledger,
    given: Mapping[str, float],
    verifier: Pinned | None = None,
) -> tuple[dict[str, Expected], dict[str, str]]:
    """Of the extractions and trainings that are not reused: those whose tokens and rate are known;
    and of the others why not, and what to do.

    Args:
        given: tokens a second, of one worker, by stage.
        verifier: as it is pinned; what ran with the same config.json counts as the like.
    """
    found: dict[str, Expected] = {}
    unknown: dict[str, str] = {}
    for stage in stages:
        if stage.action == REUSE or stage.kind not in ("extract", "train"):
            continue
        tokens = _tokens(loaded, stage, stages, forecasts)
        rate, basis = _rate(stage, registry, given, verifier)
        if tokens is None:
            rows = dict(loaded.manifest.upstream(stage.name))["rows"]
            unknown[stage.name] = (
                "how long it takes is not known, since nobody knows how many tokens there are: "
                f"say what you expect (--tokens {rows}=N)"
            )
        elif rate is None:
            unknown[stage.name] = (
                f"how long it takes for {tokens:,} tokens is not known, since none like it is on "
                f"record under this root: say what you expect (--rate {stage.name}=TOKENS a second)"
            )
        if not tokens or not rate:
            continue
        params = loaded.manifest.stages[stage.name]
        workers = params.resources.workers
        together = workers if isinstance(workers, int) else 1
        if together > 1:
            rate, basis = rate * together, f"{basis}, on {together} workers"
        gpus = params.resources.gpus * together
        found[stage.name] = Expected(tokens, rate, tokens / rate, basis, gpus)
    return found, unknown


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
    stage: StagePlan,
    registry: Ledger,
    given: Mapping[str, float],
    verifier: Pinned | None,
) -> tuple[float | None, str]:
    """Tokens a second of one worker, and what that goes by."""
    if stage.name in given:
        return given[stage.name], "given"
    role = "verifier" if stage.kind == "extract" else "head"
    wanted = stage.inputs.get(role)
    config = _config(verifier.record) if verifier is not None else None
    # Of the last ones the longest: the start of an engine says nothing of its pace.
    known = [
        (metrics, seconds, run)
        for run, metrics, seconds, inputs in registry.last_of(stage.kind)
        if (wanted and inputs.get(role) == list(wanted))
        or (config is not None and config == _config_before(inputs, role, registry))
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


def _config_before(inputs: Mapping[str, Sequence[str]], role: str, registry: Ledger) -> str | None:
    """The digest of the config.json of the verifier that an execution's inputs are of."""
    given = inputs.get(role, ())
    keeper = Keeper(registry)
    if role == "head":
        makers = [
            keeper.execution_document(item) for one in given for item in keeper.makers_of(one)
        ]
        given = [one for maker in makers for one in maker["inputs"].get("verifier", ())]
    records = [registry.artifact(one) for one in given]
    return next((_config(record) for record in records if record is not None), None)


def _config(record: ArtifactRecord) -> str | None:
    return record.files["config.json"][0] if "config.json" in record.files else None
