"""chat files → rows of token ids with a loss mask, split by conversation, rejects counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from kimi_eagle.stages.contract import (
    EXTERNAL_PATH,
    OUTSIDE_KEY,
    Determinism,
    External,
    Model,
    SourceFiles,
    StageKind,
    StageParams,
    VerifierFiles,
)


class Source(Model):
    """One source of conversations."""

    path: Annotated[str, Field(min_length=1), EXTERNAL_PATH]
    """A file or a glob, relative to the manifest: `.jsonl` or `.json`, also `.gz` and `.xz`."""
    format: Literal["messages", "sharegpt", "alpaca"] = "messages"
    """`messages`: OpenAI style; `sharegpt`: `conversations` of from/value; `alpaca`:
    instruction/input/output."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """At most this many conversations, from the start."""


class PrepareParams(StageParams):
    kind: Literal["prepare"]
    sources: Annotated[tuple[Source, ...], Field(min_length=1)]
    max_length: Annotated[int, Field(ge=2)] = 2048
    """Tokens a row may have; longer ones are cut at the end, and dropped if nothing that is
    learnt remains."""
    val_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the conversations kept apart for validation."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Decides which conversations validate."""
    thinking: Literal["auto", "always", "never"] = "auto"
    """How serving prompts open. `auto`: as the template's default for turns that carry
    reasoning, or that follow one which does in answer to the same question (a tool call);
    with `thinking=false` for the others."""
    workers: Annotated[int | None, Field(ge=1), OUTSIDE_KEY] = None
    """Processes that render, as many as there are cores unless given; the rows are the same."""
    on_bad_record: Literal["fail", "skip"] = "fail"
    """What a record that cannot be read does: end the stage, or be counted and left out."""


class Prepare(StageKind):
    name = "prepare"
    summary = "render conversations as serving would, and mark what the verifier said"
    params: ClassVar[type[StageParams]] = PrepareParams
    output = "rows"
    code_version = 2
    determinism = Determinism("bitwise")

    @classmethod
    def externals(cls, params: Any) -> Mapping[str, tuple[External, ...]]:
        return {
            "tokenizer": (VerifierFiles("tokenizer"),),
            # One role a source: which files came of which pattern is part of the key.
            **{
                f"sources.{index}": (SourceFiles(source.path),)
                for index, source in enumerate(params.sources)
            },
        }
