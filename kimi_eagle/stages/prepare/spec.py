"""chat files → rows of token ids with a loss mask, split by conversation, rejects counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from kimi_eagle.rows.buckets import Reason
from kimi_eagle.rows.forms import Form
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

# What a form calls the parts of a record, as far as records may call them otherwise.
Column = Literal[
    "messages",
    "tools",
    "system",
    "instruction",
    "input",
    "output",
    "history",
    "prompt",
    "response",
    "chosen",
    "rejected",
    "traj",
    "role",
    "content",
]


Role = Literal["system", "user", "assistant", "tool"]


class Source(Model):
    """One source of conversations."""

    path: Annotated[str, Field(min_length=1), EXTERNAL_PATH]
    """A file, a glob or a folder, relative to the manifest: `.jsonl` or `.json`, also `.gz`, `.xz`
    or `.zst`; `.parquet`; or the folder of a Hugging Face dataset that was saved to disk."""
    format: Form = "auto"
    """`messages`: OpenAI style; `sharegpt`: `conversations` of from/value; `alpaca`:
    instruction/input/output; `pairs`: prompt/response; `preference`: any of these with
    chosen/rejected, of which the chosen answer is learnt; `tau_bench`, `glaive`: tool traces;
    `auto`: by the keys that each record has."""
    columns: dict[Column, Annotated[str, Field(min_length=1)]] = Field(default_factory=dict)
    """What the form calls it: what the records call it, such as `{messages: dialogue}`; `role` and
    `content` are within the turns."""
    roles: dict[str, Role] = Field(default_factory=dict)
    """What the turns call who speaks: who that is, such as `{Human: user, AI: assistant}`."""
    tool_call_ids: Literal["keep", "kimi"] = "keep"
    """`kimi`: ids of tool calls are written anew as Kimi's models write them, functions.NAME:N, for
    traces of other models: Kimi's template writes the id, and the function's name only within
    it."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """At most this many conversations, chosen by `seed` and by what they say: neither the order of
    records nor that of files matters."""
    weight: Annotated[float, Field(gt=0, le=1_000_000)] | None = None
    """Its share of the mixture, in conversations, beside the other sources' weights. The source
    with fewest for its weight gives all it has; none gives a conversation twice."""


class Limits(Model):
    """What may be left out before the stage fails instead."""

    max_rejected: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of the records that may be left out for what they are: duplicates, and what `limit`
    and `weight` leave out, do not count."""
    by_reason: dict[Reason, Annotated[int, Field(ge=0)]] = Field(default_factory=dict)
    """Reason: how many records may be left out for it, such as `{unknown_role: 0}`."""


class PrepareParams(StageParams):
    kind: Literal["prepare"]
    sources: Annotated[tuple[Source, ...], Field(min_length=1)]
    max_length: Annotated[int, Field(ge=2)] = 2048
    """Tokens a row may have; longer ones are cut at the end, and dropped if nothing that is
    learnt remains."""
    val_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the conversations kept apart for validation: exactly this share of those that
    differ, the number that trains rounded down. Equal conversations are on one side."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Decides which conversations validate, and which a limit or a weight takes."""
    thinking: Literal["auto", "always", "never"] = "auto"
    """How serving prompts open. `auto`: as the template's default for turns that carry
    reasoning, or that follow one which does in answer to the same question (a tool call);
    with `thinking=false` for the others."""
    workers: Annotated[int | None, Field(ge=1), OUTSIDE_KEY] = None
    """Processes that render, as many as there are cores unless given; the rows are the same."""
    on_bad_record: Literal["fail", "skip"] = "fail"
    """What a record that cannot be read does: end the stage, or be counted and left out. The same
    holds for a file that is cut off."""
    deduplicate: Literal["none", "exact"] = "exact"
    """`exact`: a conversation that says what one before it said, in any form, is left out."""
    limits: Limits = Limits()

    @model_validator(mode="after")
    def _all_weights_or_none(self) -> PrepareParams:
        weighted = [source.weight is not None for source in self.sources]
        if any(weighted) and not all(weighted):
            raise ValueError("give every source a weight, or none")
        return self


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
