"""Which command prints which document, and the JSON Schema of each."""

from __future__ import annotations

import re
from typing import Any

from pydantic import TypeAdapter

from kimi_eagle.outputs import asking, keeping, running
from kimi_eagle.outputs.shapes import ErrorOutput

OUTPUTS: dict[str, Any] = {
    "init": running.InitOutput,
    "validate": running.ValidateOutput,
    "plan": running.PlanOutput,
    "why": running.WhyOutput,
    "submit": running.SubmitOutput | running.RunStatusOutput,
    "runs": asking.RunsOutput,
    "show": asking.ShowOutput,
    "rank": asking.RankOutput,
    "attach": running.SubmitOutput,
    "cancel": running.RunStatusOutput,
    "lineage": asking.LineageOutput,
    "diff": asking.DiffOutput,
    "compare": asking.CompareOutput,
    "report": asking.ReportOutput,
    "reproduce": running.ReproduceOutput,
    "verify": keeping.VerifyOutput,
    "check-rows": keeping.CheckRowsOutput,
    "gc": keeping.GcOutput,
    "push": keeping.ExchangedOutput,
    "pull": keeping.ExchangedOutput,
    "pin": keeping.PinOutput,
    "unpin": keeping.PinOutput,
    "registry check": keeping.RegistryCheckOutput,
    "registry rebuild": keeping.RegistryRebuildOutput,
    "registry backup": keeping.RegistryCopyOutput,
    "registry restore": keeping.RegistryCopyOutput,
    "doctor": keeping.DoctorOutput,
    "error": ErrorOutput,
}
"""By command; `error` is what any of them prints when it refuses (exit code 2)."""


def schema_of(command: str) -> dict[str, Any]:
    """The JSON Schema of what `kimi-eagle COMMAND --json` prints, if it is not refused.

    Raises: KeyError for a command that prints no such document.
    """
    made = TypeAdapter(OUTPUTS[command]).json_schema()
    title = "a refusal" if command == "error" else f"kimi-eagle {command} --json"
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **_plain(made),
        "title": title,
    }


def file_of(command: str) -> str:
    """The name of the file below docs/schemas."""
    return re.sub(r"\W+", "-", command) + ".json"


def _plain(value: Any) -> Any:
    """Without the titles that pydantic makes of names."""
    if isinstance(value, dict):
        return {
            name: _plain(item)
            for name, item in value.items()
            if not (name == "title" and isinstance(item, str))
        }
    return [_plain(item) for item in value] if isinstance(value, list) else value
