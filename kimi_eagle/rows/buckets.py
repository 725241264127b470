"""The accounting of `prepare`: every input record ends in exactly one bucket, named and placed.
Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kimi_eagle.rows.records import place

KEPT, DUPLICATE, NOT_SAMPLED = "kept", "duplicate", "not_sampled"

# What is left out by intent, and is no fault of the record.
INTENDED = (DUPLICATE, NOT_SAMPLED)

Reason = Literal[
    "duplicate",
    "not_sampled",
    "unreadable",
    "truncated",
    "record_too_large",
    "not_a_record",
    "unknown_form",
    "no_messages",
    "bad_message",
    "unknown_role",
    "two_systems",
    "no_assistant_turn",
    "no_user_turn",
    "empty_assistant",
    "unsupported_modality",
    "bad_tools",
    "bad_tools_json",
    "null_filled",
    "control_token_in_text",
    "think_token_in_text",
    "template_error",
    "template_mismatch",
    "reasoning_not_rendered",
    "tools_not_rendered",
    "prompt_not_proven",
    "too_long",
    "too_long_no_supervision",
]
BUCKETS: Mapping[str, str] = {
    "kept": "gave at least one row",
    "duplicate": "the same conversation as one before it",
    "not_sampled": "left out by a source's limit or weight",
    "unreadable": "not JSON, or damaged",
    "truncated": "the file ends inside it",
    "record_too_large": "more bytes than a record may have",
    "not_a_record": "no JSON object",
    "unknown_form": "none of the forms that are read",
    "no_messages": "nothing said in it",
    "bad_message": "a turn that would have to be guessed",
    "unknown_role": "a turn of nobody that is known",
    "two_systems": "two system texts",
    "no_assistant_turn": "no answer to learn from",
    "no_user_turn": "no question to ask",
    "empty_assistant": "an answer that says nothing",
    "unsupported_modality": "images, sound, or other than text",
    "bad_tools": "tool calls, results or declarations that do not fit together",
    "bad_tools_json": "tools or arguments that are no JSON",
    "null_filled": "a table's struct whose nulls cannot be told from missing keys",
    "control_token_in_text": "text that would act as a control token",
    "think_token_in_text": "text that would open or end the reasoning",
    "template_error": "the chat template refuses it",
    "template_mismatch": "the chat template does not render a turn behind its prompt",
    "reasoning_not_rendered": "the chat template leaves the reasoning out",
    "tools_not_rendered": "the chat template writes nothing for tools",
    "prompt_not_proven": "the tokenizer gives the prompt as a whole other ids",
    "too_long": "more text than the tokenizer can encode",
    "too_long_no_supervision": "nothing that is learnt within max_length",
}

_EXAMPLES = 3


class Rejected(ValueError):
    """A record that is left out; `reason` is the name it is counted under."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class Place:
    """Where a record stands: its file, by its position among the stage's files, and in it."""

    file: int
    record: int
    line: int | None


@dataclass(frozen=True)
class Example:
    place: Place
    detail: str


class Buckets:
    """Counts records by what became of them, and remembers the first few of each."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, list[Example]] = {}

    def add(self, bucket: str, at: Place, detail: str = "") -> None:
        self.counts[bucket] += 1
        examples = self.examples.setdefault(bucket, [])
        if len(examples) < _EXAMPLES and bucket != KEPT:
            examples.append(Example(at, detail))

    @property
    def records(self) -> int:
        """How many records there were in all."""
        return self.counts.total()

    @property
    def rejected(self) -> int:
        """How many were left out for what they are."""
        return self.records - self.counts[KEPT] - sum(self.counts[name] for name in INTENDED)

    def metrics(self) -> dict[str, int]:
        """Bucket → records; they sum to all that were read."""
        return dict(sorted(self.counts.items()))

    def document(self) -> dict[str, Any]:
        """As report.json has it; files by number, for a name is no part of an artifact."""
        return {
            name: {
                "records": count,
                "examples": [
                    {
                        "file": example.place.file,
                        "record": example.place.record,
                        "line": example.place.line,
                        "detail": example.detail,
                    }
                    for example in self.examples.get(name, [])
                ],
            }
            for name, count in sorted(self.counts.items())
        }

    def notes(self, names: list[str]) -> list[str]:
        """A line for every bucket of what was left out, with places; `names` of the files."""
        return [
            f"{self.counts[name]} left out, {name}: {', '.join(self.places(name, names))}"
            for name in sorted(self.counts)
            if name != KEPT
        ]

    def places(self, bucket: str, names: list[str]) -> list[str]:
        found = []
        for example in self.examples.get(bucket, []):
            at = place(names[example.place.file], example.place.record, example.place.line)
            found.append(f"{at} ({example.detail})" if example.detail else at)
        return found

    def exceeded(
        self, max_rejected: float | None, by_reason: Mapping[str, int], names: list[str]
    ) -> list[str]:
        """What a manifest's limits do not allow, in words."""
        found = []
        share = self.rejected / self.records if self.records else 0.0
        if max_rejected is not None and share > max_rejected:
            found.append(
                f"{self.rejected} of {self.records} records ({share:.1%}) were left out, "
                f"max_rejected allows {max_rejected:.1%}"
            )
        for name, most in sorted(by_reason.items()):
            if self.counts[name] > most:
                places = ", ".join(self.places(name, names))
                found.append(f"{self.counts[name]} {name}, allowed are {most}: {places}")
        return found
