"""Prove a rows artifact against a running server: it renders the same prompts to the same tokens.

The messages of rows are in their sources, which are read again: they must be those that the rows
were made of. The comparison itself runs in a process of its own (`engines.serving_rows`).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_eagle.artifacts.digests import Digests
from kimi_eagle.artifacts.files import write_json
from kimi_eagle.artifacts.objects import Objects
from kimi_eagle.identity import short
from kimi_eagle.pins import Pins, pin
from kimi_eagle.recorded_inputs import rebuilt
from kimi_eagle.registry.store import Registry
from kimi_eagle.run_record import Record, StageRecord, collect

ROWS = "rows"
_PROGRAM = "kimi_eagle.engines.serving_rows"


class CannotCheck(LookupError):
    """Nothing was compared; the message says what stands in the way."""


@dataclass(frozen=True)
class ServingCheck:
    """How a comparison came out."""

    target: str
    endpoint: str
    found: Mapping[str, Any]
    """As the program wrote it."""

    @property
    def equal(self) -> bool:
        return not self.found["mismatched"] and not self.found["not_found_count"]

    def document(self) -> dict[str, Any]:
        """As `check-rows --json` prints it."""
        status = "equal" if self.equal else "differs"
        return {"status": status, "hash": self.target, "endpoint": self.endpoint, **self.found}


def check_rows(
    root: Path,
    prefix: str,
    endpoint: str,
    *,
    model: str | None,
    sources: Path | None,
    limit: int | None,
) -> ServingCheck:
    """Compare the prompts of rows with those that a server makes.

    Args:
        endpoint: the server's address, such as `http://127.0.0.1:8000`.
        model: the name it serves the verifier under; None where it serves one model.
        sources: the folder that the manifest's relative paths are relative to, where it is not the
            one it was submitted from.
        limit: rows, from the first; None is all.

    Raises:
        RegistryError, UnknownDigest, AmbiguousDigest, ManifestError.
        CannotCheck, CannotReproduce: no rows, other sources than they were made of, no server.
    """
    registry = Registry(root, create=False)
    try:
        record = collect(registry, root, prefix)
        if record.kind != ROWS:
            raise CannotCheck(f"{record.kind} {short(record.target)} is no rows artifact")
        stage = record.stages[-1]
        digests = Digests(registry)
        objects = Objects(root.absolute(), digests)
        trouble = objects.trouble(record.artifacts[record.target].record(record.target))
        if trouble is not None:
            raise CannotCheck(f"{trouble}: submit its manifest again first")
        loaded = rebuilt(record, sources)
        pins = pin(loaded, digests, lambda _prefix: ())  # rows are made of none
        _require_the_same(record, stage, pins)
    finally:
        registry.close()
    params = loaded.manifest.stages[stage.name].model_dump(mode="json")
    job = {
        "kind": stage.kind,
        "params": params,
        "sources": [
            [str(item.path) for item in pins.stages[stage.name][f"sources.{index}"]]
            for index in range(len(params["sources"]))
        ],
        "verifier": str(pins.verifier.path),
        "rows": str(objects.path(record.target)),
        "url": endpoint,
        "model": model,
        "limit": limit,
    }
    return ServingCheck(record.target, endpoint, _program(job))


def _require_the_same(record: Record, stage: StageRecord, pins: Pins) -> None:
    """Raises: CannotCheck: an input is not what the rows were made of."""
    now = pins.digests(stage.name)
    for role, before in stage.inputs.items():
        if now.get(role) != list(before):
            named = ", ".join(record.artifacts[digest].label for digest in before)
            raise CannotCheck(
                f"{role} ({named}) is not what the rows were made of: expected "
                f"{', '.join(map(short, before))}, found {', '.join(map(short, now.get(role, [])))}"
            )


def _program(job: Mapping[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="kimi-eagle-") as folder:
        given, result = Path(folder) / "job.json", Path(folder) / "result.json"
        write_json(given, dict(job))
        command = [sys.executable, "-m", "kimi_eagle.engines.serving_rows", str(given), str(result)]
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False
        )
        found = json.loads(result.read_text("utf-8")) if result.exists() else {}
    if "error" in found:
        raise CannotCheck(str(found["error"]))
    if done.returncode != 0 or not found:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise CannotCheck(f"the rows could not be compared: {last}")
    return dict(found)
