"""checkpoint + verifier + prompts → acceptance length, measured in vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints, model_validator

from kimi_eagle.stages.contract import (
    EXTERNAL_PATH,
    OUTSIDE_KEY,
    Determinism,
    External,
    Model,
    Reference,
    SourceFiles,
    StageKind,
    StageParams,
    VerifierFiles,
)
from kimi_eagle.stages.engine import VllmEngine

SetName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$", max_length=64)]
Positive = Annotated[int, Field(ge=1)]
Temperature = Annotated[float, Field(ge=0, le=2)]


class Prompts(Model):
    """Evaluation prompts, one JSON object a line."""

    path: Annotated[str, Field(min_length=1), EXTERNAL_PATH]
    """Lines with `messages`, `turns` (MT-Bench, Spec-Bench), `prompt` (HumanEval) or `question`
    (GSM8K), as they are published."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """At most this many prompts of each set, from the start."""
    turns: Positive | None = None
    """At most this many turns of each; every turn is asked after the verifier's own answers."""
    by_category: bool = False
    """Whether every `category` of the file is a set of its own, `<set>/<category>`, as Spec-Bench
    reports them."""


class Endpoint(Model):
    """vLLM servers that run already: they must answer `/v1/completions` and `/metrics`."""

    kind: Literal["endpoint"]
    url: Annotated[str, Field(pattern=r"^https?://"), OUTSIDE_KEY]
    """The server with the draft: nobody else may use it meanwhile."""
    plain_url: Annotated[str, Field(pattern=r"^https?://"), OUTSIDE_KEY]
    """A server of the same verifier without the draft."""


class EvaluateParams(StageParams):
    kind: Literal["evaluate"]
    checkpoint: Annotated[str, Reference("train")]
    states: Annotated[str | None, Reference("extract")] = None
    """Hidden states whose validation rows serving is simulated over as well, without an engine."""
    prompts: Prompts | None = None
    """One set of prompts; or several, each under its name, in `sets`."""
    sets: dict[SetName, Prompts] = Field(default_factory=dict)
    draft_tokens: Positive | Annotated[tuple[Positive, ...], Field(min_length=1)] = 3
    """Tokens the draft proposes a step; of several numbers the first gives the headline."""
    max_tokens: Annotated[int, Field(ge=1)] = 128
    """Tokens generated a turn, unless the verifier ends it before."""
    temperature: Temperature | Annotated[tuple[Temperature, ...], Field(min_length=1)] = 0.0
    """0 decodes greedily; of several temperatures the first gives the headline."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Of sampling; the n-th request (from 0) has seed + n."""
    batch: Positive = 1
    """Requests decoded together. Above 1, outputs are compared beside what two runs without the
    draft show, since batch shape alone changes bf16 outputs."""
    thinking: Literal["default", "never"] = "default"
    """`never` passes `thinking=false` to the chat template."""
    simulate_rows: Positive | None = None
    """At most this many validation rows of `states`; null takes all."""
    engine: Annotated[VllmEngine | Endpoint, Field(discriminator="kind")] = VllmEngine()

    @model_validator(mode="after")
    def _asks_something(self) -> EvaluateParams:
        if self.prompts is None and not self.sets:
            raise ValueError("needs `prompts`, or several of them by name in `sets`")
        if self.prompts is not None and self.sets:
            raise ValueError("has both `prompts` and `sets`: name the one among the others")
        if len(set(self.lengths)) < len(self.lengths):
            raise ValueError("draft_tokens names a number twice")
        if len(set(self.temperatures)) < len(self.temperatures):
            raise ValueError("temperature names a number twice")
        return self

    @property
    def named_sets(self) -> dict[str, Prompts]:
        """The sets by name; `prompts` alone is the set of that name."""
        return dict(self.sets) if self.prompts is None else {"prompts": self.prompts}

    @property
    def lengths(self) -> tuple[int, ...]:
        """The numbers of draft tokens, the headline's first."""
        one = self.draft_tokens
        return (one,) if isinstance(one, int) else one

    @property
    def temperatures(self) -> tuple[float, ...]:
        one = self.temperature
        return one if isinstance(one, tuple) else (one,)


class Evaluate(StageKind):
    name = "evaluate"
    summary = "serve the draft in vLLM with and without it, and simulate it from stored states"
    params: ClassVar[type[StageParams]] = EvaluateParams
    output = "evaluation"
    code_version = 3
    determinism = Determinism("bitwise-like-hardware")
    inherits: ClassVar[Mapping[str, tuple[str, ...]]] = {"rows": ("states", "rows")}

    @classmethod
    def externals(cls, params: Any) -> Mapping[str, tuple[External, ...]]:
        if params.prompts is not None:
            sets = {"prompts": (SourceFiles(params.prompts.path),)}
        else:
            sets = {f"sets.{name}": (SourceFiles(one.path),) for name, one in params.sets.items()}
        return {"verifier": (VerifierFiles("whole"),), **sets}

    @classmethod
    def identity(cls, params: Any, facts: Any) -> dict[str, Any]:
        found = super().identity(params, facts)
        # What changes nothing must not change the key.
        if not any(params.temperatures):
            del found["seed"]
        if params.states is None:
            del found["simulate_rows"]
        return found
