"""A manifest as planned: what would run and why, what that is likely to take, what does not fit.

Nothing is started, and no more than a verifier's config.json has to be here: what else is not is
listed, and what depends on it is an estimate, or said to be unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kimi_eagle.ahead import Given
from kimi_eagle.executors.gpus import least_memory
from kimi_eagle.footprint import (
    Weights,
    engine_weights,
    head_bytes,
    on_gpus,
    rows_bytes,
    training_bytes,
)
from kimi_eagle.forecast import Forecast
from kimi_eagle.manifest.execution import Local
from kimi_eagle.manifest.load import LoadedManifest
from kimi_eagle.manifest.model import Manifest
from kimi_eagle.pace import Expected, expected
from kimi_eagle.pins import Pinned, Pins
from kimi_eagle.plan import DEPENDS, REUSE, RUN, StagePlan
from kimi_eagle.runner import Runner
from kimi_eagle.sizes import parse_size
from kimi_eagle.stages.extract.spec import ExtractParams
from kimi_eagle.stages.import_states.spec import ImportStatesParams
from kimi_eagle.stages.prepare.spec import PrepareParams
from kimi_eagle.stages.train.spec import TrainParams
from kimi_eagle.states.contract import contract_of
from kimi_eagle.terminal import human_size


@dataclass(frozen=True)
class Guesses:
    """What somebody expects, by stage."""

    rates: Mapping[str, float] = field(default_factory=dict)
    """Tokens a second, of one worker."""
    rows: Mapping[str, float] = field(default_factory=dict)
    tokens: Mapping[str, float] = field(default_factory=dict)
    gpu_bytes: int | None = None
    """Memory of one GPU."""

    def over(self, manifest: Manifest) -> Guesses:
        """These, and where there are none those of the manifest.

        Raises: LookupError: a figure of no stage.
        """
        said = manifest.plan
        for option in ("rates", "rows", "tokens"):
            for name in getattr(self, option):
                if name not in manifest.stages:
                    named = ", ".join(manifest.stages)
                    given = "rate" if option == "rates" else option
                    raise LookupError(
                        f"--{given} {name}: there is no such stage; there are {named}"
                    )
        memory = parse_size(said.gpu_memory) if said.gpu_memory else None
        return Guesses(
            {**said.rates, **self.rates},
            {**said.rows, **self.rows},
            {**said.tokens, **self.tokens},
            self.gpu_bytes or memory,
        )

    def given(self) -> dict[str, Given]:
        def whole(value: float | None) -> int | None:
            return None if value is None else round(value)

        return {
            name: Given(whole(self.rows.get(name)), whole(self.tokens.get(name)))
            for name in (*self.rows, *self.tokens)
        }


@dataclass(frozen=True)
class Planned:
    stages: list[StagePlan]
    forecasts: Mapping[str, Forecast] = field(default_factory=dict)
    """Of stages that would write hidden states, by name."""
    free_bytes: int = 0
    """On the file system where hidden states are kept."""
    troubles: Mapping[str, str] = field(default_factory=dict)
    """Why what they would write does not fit, by name."""
    upstream: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Of each stage, those that it takes from."""
    expected: Mapping[str, Expected] = field(default_factory=dict)
    """How long stages would take, of those of which that is known, by name."""
    unknown: Mapping[str, str] = field(default_factory=dict)
    """Of stages of which it is not known how long they take: why, and what to do."""
    writes: Mapping[str, int] = field(default_factory=dict)
    """About how many bytes stages would write besides hidden states, by name."""
    weights: Mapping[str, Weights] = field(default_factory=dict)
    """Of engines on GPUs that would be started, by name."""
    lacking: Sequence[str] = ()
    """What is not on this machine, in words."""

    def counts(self) -> dict[str, int]:
        return {
            action: sum(stage.action == action for stage in self.stages)
            for action in (REUSE, RUN, DEPENDS)
        }

    @property
    def states_bytes(self) -> int:
        return sum(forecast.bytes for forecast in self.forecasts.values())

    @property
    def bytes(self) -> int:
        """Of all that would be written and stays, as far as is known."""
        return self.states_bytes + sum(self.writes.values())

    @property
    def trouble(self) -> str | None:
        """Why all of it together does not fit, where each part would."""
        if self.bytes <= self.free_bytes or self.troubles:
            return None
        return (
            f"all stages together would write about {human_size(self.bytes)}, and "
            f"{human_size(self.free_bytes)} are free: free some with `kimi-eagle gc`, or submit "
            "under another root (--root)"
        )

    def document(self) -> dict[str, Any]:
        """As `plan --json` prints it."""
        return {
            "stages": [
                {
                    "name": stage.name,
                    "kind": stage.kind,
                    "action": stage.action,
                    "key": stage.key,
                    "reasons": stage.reasons,
                    "outputs": dict(stage.made.outputs) if stage.made else {},
                    **self._forecast(stage.name),
                    **self._reckoned(stage.name),
                }
                for stage in self.stages
            ],
            "lacking": list(self.lacking),
            "disk": {
                "bytes": self.bytes,
                "states_bytes": self.states_bytes,
                "free_bytes": self.free_bytes,
                "trouble": self.trouble,
            },
        }

    def _reckoned(self, stage: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if stage in self.expected:
            found["expected"] = self.expected[stage].document()
        if stage in self.writes:
            found["writes_bytes"] = self.writes[stage]
        if stage in self.weights:
            found["weights"] = self.weights[stage].document()
        if stage in self.unknown:
            found["unknown"] = self.unknown[stage]
        return found

    def _forecast(self, stage: str) -> dict[str, Any]:
        forecast = self.forecasts.get(stage)
        if forecast is None:
            return {}
        fits = {"free_bytes": self.free_bytes, "trouble": self.troubles.get(stage)}
        return {"forecast": {**forecast.document(), **fits}}


def planned(runner: Runner, loaded: LoadedManifest, guesses: Guesses) -> Planned:
    """Raises: ManifestError, RegistryError."""
    pins = runner.pin(loaded, may_lack=True)
    stages = runner.plan(loaded, pins)
    forecasts = runner.forecaster.all(loaded, pins, stages, guesses.given())
    quota = loaded.manifest.store.quota_bytes
    troubles = {
        name: trouble
        for name, forecast in forecasts.items()
        if (trouble := runner.forecaster.trouble(forecast, quota)) is not None
    }
    upstream = {
        name: [source for _, source in loaded.manifest.upstream(name)]
        for name in loaded.manifest.stages
    }
    again = {stage.name: stage for stage in stages if stage.action != REUSE}
    times, unknown = expected(
        loaded, stages, forecasts, runner.registry, guesses.rates, _verifier(pins)
    )
    for name, stage in again.items():
        if stage.kind == "extract" and name not in forecasts:
            each = contract_of(loaded.manifest.stages[name], pins.verifier.facts).bytes_per_token
            unknown[name] = f"writes {each:,} bytes a token; {unknown[name]}"
    engines = {
        name: loaded.manifest.stages[name]
        for name in again
        if on_gpus(loaded.manifest.stages[name])
    }
    gpu_bytes = guesses.gpu_bytes
    if engines and gpu_bytes is None and isinstance(loaded.manifest.executor, Local):
        gpu_bytes = least_memory()
    return Planned(
        stages,
        forecasts,
        runner.forecaster.free(),
        troubles,
        upstream,
        times,
        unknown,
        {name: size for name in again if (size := _writes(loaded, pins, name, forecasts))},
        engine_weights(engines, pins.verifier, gpu_bytes),
        list(dict.fromkeys(word for words in pins.absent.values() for word in words)),
    )


def _verifier(pins: Pins) -> Pinned | None:
    """The verifier as stages pin it that take all of it."""
    found = (roles.get("verifier", ()) for roles in pins.stages.values())
    return next((item for items in found for item in items), None)


def _writes(
    loaded: LoadedManifest, pins: Pins, name: str, forecasts: Mapping[str, Forecast]
) -> int | None:
    """About how many bytes a stage writes besides hidden states; None where that is little, or
    not known."""
    params, facts = loaded.manifest.stages[name], pins.verifier.facts
    if params.kind == "head":
        return head_bytes(facts)
    if isinstance(params, PrepareParams):
        taken = [
            forecast
            for taker, forecast in forecasts.items()
            if ("rows", name) in loaded.manifest.upstream(taker)
        ]
        return rows_bytes(taken[0].rows, taken[0].tokens) if taken else None
    if isinstance(params, TrainParams):
        given = dict(loaded.manifest.upstream(name))
        states = loaded.manifest.stages[given["states"]]
        assert isinstance(states, ExtractParams | ImportStatesParams), "no other kind makes states"
        layers = facts.aux_layers(states.layers)
        vocab = loaded.manifest.stages.get(given.get("vocab", ""))
        size = getattr(vocab, "size", None)
        return training_bytes(
            params, facts, len(layers), size if isinstance(size, int) else facts.vocab_size
        )
    return None
