"""prompts → rows of what the verifier itself answers, by the token ids that it emitted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from kimi_eagle.stages.contract import (
    OUTSIDE_KEY,
    Determinism,
    External,
    Model,
    SourceFiles,
    StageKind,
    StageParams,
    VerifierFiles,
)
from kimi_eagle.stages.engine import VllmEngine
from kimi_eagle.stages.prepare.spec import Source

LIST = "answers.ndjson"
"""Beside the rows: each answer, by the digests of its ids and of its prompt's, and how it ended."""


class Sampling(Model):
    """How answers are drawn."""

    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0 is greedy: the likeliest token each time."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Tokens are drawn from the likeliest that together have this probability."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Tokens are drawn from so many of the likeliest; 0 is all."""
    max_tokens: Annotated[int, Field(ge=1)] = 1024
    """Tokens an answer may have, unless the verifier ends its turn before."""
    seed: Annotated[int, Field(ge=0)] = 0
    """With the prompt it gives the seed of each answer."""


class AnswerEngine(VllmEngine):
    """vLLM, started for the stage or served already."""

    endpoint: Annotated[
        str | None, Field(pattern=r"^https?://[^\s/@]+(/[^\s@]*)?$"), OUTSIDE_KEY
    ] = None
    """Address of a vLLM server of this verifier to ask, instead of starting one:
    `http://127.0.0.1:8000`. A token, where it wants one, is taken from the environment variable
    KIMI_EAGLE_ENDPOINT_TOKEN."""
    model: Annotated[str | None, Field(min_length=1), OUTSIDE_KEY] = None
    """The name that server has for the verifier; null where it serves one model alone."""
    concurrency: Annotated[int, Field(ge=1), OUTSIDE_KEY] = 64
    """Prompts that the server is asked at the same time."""
    timeout: Annotated[float, Field(gt=0), OUTSIDE_KEY] = 600.0
    """Seconds that an answer of the server may take."""


class RegenerateParams(StageParams):
    kind: Literal["regenerate"]
    sources: Annotated[tuple[Source, ...], Field(min_length=1)]
    """What is asked: every user turn, after the verifier's own answers to those before it.
    Answers that a source has are not read. Of format `messages`, records may also hold `turns` (a
    list of user turns) or `prompt` (one)."""
    sampling: Sampling = Sampling()
    thinking: Literal["default", "never"] = "default"
    """`never` passes `thinking=false` to the chat template."""
    on_length: Literal["keep", "drop"] = "keep"
    """What an answer that a limit cut off is: kept as it is, without an end of turn, or left out.
    Either way nothing more is asked in its conversation, and it is counted."""
    max_length: Annotated[int, Field(ge=2)] = 2048
    """Tokens a row may have; an answer is cut off there too, and a prompt without room for an
    answer is not asked."""
    val_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the conversations kept apart for validation."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Decides which conversations validate."""
    on_bad_record: Literal["fail", "skip"] = "fail"
    """What a record that cannot be read does: end the stage, or be counted and left out."""
    engine: AnswerEngine = AnswerEngine()
    shards: Annotated[int, Field(ge=1), OUTSIDE_KEY] = 1
    """vLLM engines at work at the same time, each on `tensor_parallel` GPUs and on its share of the
    conversations."""
    engines_per_gpu: Annotated[int, Field(ge=1), OUTSIDE_KEY] = 1
    """Of these `shards`, how many are on the same GPUs and divide their memory. A verifier of a few
    hundred million parameters waits for one engine's Python, not for the GPU."""
    chunk: Annotated[int, Field(ge=1), OUTSIDE_KEY] = 4096
    """Prompts in an engine's queue at once."""
    save_every: Annotated[int, Field(ge=1), OUTSIDE_KEY] = 512
    """After so many answers, or 30 seconds, answers are kept for good: a run that is ended loses
    no more than these, and submitted again asks for no others."""


class Regenerate(StageKind):
    name = "regenerate"
    summary = "ask the verifier itself, and keep the token ids it emits"
    params: ClassVar[type[StageParams]] = RegenerateParams
    output = "rows"
    code_version = 1
    # In bf16 a batch of another shape tips near ties: greedy answers part there, each of them as
    # likely as the other. The order in which prompts are asked is always the same.
    determinism = Determinism("tolerance", "answers that part at a near tie")

    @classmethod
    def externals(cls, params: Any) -> Mapping[str, tuple[External, ...]]:
        return {
            "verifier": (VerifierFiles("whole"),),
            **{
                f"sources.{index}": (SourceFiles(source.path),)
                for index, source in enumerate(params.sources)
            },
        }
