"""Make the registry again from the records on disk.

runs                 <run>/run.json; of a run whose folder is gone, what its artifacts say of it
executions           <run>/stages/*.json, <run>/reused.json
artifacts            the same; their state from the journal (artifacts/journal.py) and the disk
pins                 the journal
shards and rows      states/**/<digest>.json
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kimi_eagle.artifacts.journal import DAMAGED, EVICTED, PINNED, UNPINNED, VERIFIED, events
from kimi_eagle.books import REUSED, RUN, STAGES, TEXTS
from kimi_eagle.records import SNAPSHOT_ROLE
from kimi_eagle.survey import OBJECTS, STATES

_RUN = (
    "id",
    "seq",
    "name",
    "kind",
    "status",
    "manifest_digest",
    "manifest_path",
    "manifest_text",
    "resolved",
    "overrides",
    "environment",
    "started_at",
    "ended_at",
    "host",
    "pid",
)
_EXECUTION = (
    "id",
    "run_id",
    "stage",
    "kind",
    "key",
    "document",
    "disposition",
    "reused_from",
    "attempt",
    "metrics",
    "resources",
    "environment",
    "error",
    "seconds",
    "started_at",
    "ended_at",
)
_ARTIFACT = ("digest", "kind", "bytes", "files", "label", "created_at")
_JSON = frozenset({"document", "metrics", "resources", "environment", "files"})
_STATES = {VERIFIED: "present", DAMAGED: "missing", EVICTED: "evicted"}


@dataclass
class Records:
    """Every record under a root, as read."""

    runs: list[dict[str, Any]] = field(default_factory=list)
    executions: list[dict[str, Any]] = field(default_factory=list)
    reuses: list[dict[str, Any]] = field(default_factory=list)
    artifacts: dict[str, dict[str, Any]] = field(default_factory=dict)
    shards: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Records that could not be used, each in words."""


def read(root: Path) -> Records:
    """Read every record under a root; one that is damaged is named and passed over."""
    found = Records()
    for path in sorted(root.glob(f"*/{RUN}")):
        run = _json(path, found, [column for column in _RUN if column not in TEXTS])
        if run is None or not _add_texts(path.parent, run, found):
            continue
        found.runs.append(run)
        for stage in sorted((path.parent / STAGES).glob("*.json")):
            execution = _json(stage, found, (*_EXECUTION, "inputs", "outputs", "artifacts"))
            if execution is not None:
                found.executions.append(execution)
                for artifact in execution["artifacts"]:
                    found.artifacts.setdefault(artifact["digest"], artifact)
        reused = path.parent / REUSED
        if reused.exists():
            found.reuses += [
                {**item, "run_id": run["id"]} for item in _json(reused, found, ()) or ()
            ]
    _recover(root, found)
    for path in sorted((root / STATES).glob("??/*.json")):
        whole = path.with_suffix(".safetensors")
        if whole.exists():
            shard = _json(path, found, ("rows",))
            if shard is not None:
                moment = shard.get("created_at") or _time_of(whole)
                found.shards.append(
                    {
                        "digest": path.stem,
                        "bytes": whole.stat().st_size,
                        "created_at": moment,
                        "rows": shard["rows"],
                    }
                )
    return found


def tables(root: Path, found: Records) -> dict[str, list[dict[str, Any]]]:
    """The rows of a registry that says what the records say."""
    _number(found)
    executions = found.executions + list(_reused(found))
    executions.sort(key=lambda item: item["id"])
    shards, rows = _shards(found)
    state, verified, pins = _kept(root, found)
    return {
        "runs": [
            {column: run[column] for column in _RUN}
            for run in sorted(found.runs, key=lambda run: run["seq"])
        ],
        "artifacts": [
            {
                **_row(artifact, _ARTIFACT),
                "state": "external" if artifact["external"] else state[digest],
                "verified_at": verified.get(digest),
            }
            for digest, artifact in sorted(found.artifacts.items())
        ],
        "artifact_members": [
            {"parent": digest, "path": path, "child": child}
            for digest, artifact in sorted(found.artifacts.items())
            for path, child in artifact["members"].items()
        ],
        "pins": list(pins.values()),
        "executions": [_row(item, _EXECUTION) for item in executions],
        "execution_inputs": [
            {"execution": item["id"], "role": role, "position": position, "digest": digest}
            for item in executions
            for role, digests in item["inputs"].items()
            for position, digest in enumerate(digests)
        ],
        "execution_outputs": [
            {"execution": item["id"], "role": role, "digest": digest}
            for item in executions
            for role, digest in item["outputs"].items()
        ],
        "state_shards": shards,
        "state_rows": rows,
    }


def _json(path: Path, found: Records, needed: Sequence[str]) -> Any:
    try:
        value = json.loads(path.read_text("utf-8"))
        lacking = [name for name in needed if name not in value]
    except (OSError, ValueError, TypeError) as error:
        found.problems.append(f"{path} cannot be read: {error}")
        return None
    if lacking:
        found.problems.append(f"{path} is no whole record: it lacks {', '.join(lacking)}")
        return None
    return value


def _add_texts(folder: Path, run: dict[str, Any], found: Records) -> bool:
    """The columns of a run that are files of their own; false when one is missing."""
    for column, (name, end) in TEXTS.items():
        try:
            run[column] = (folder / name).read_bytes().decode("utf-8").removesuffix(end)
        except (OSError, UnicodeDecodeError) as error:
            found.problems.append(f"{folder / name} cannot be read: {error}")
            return False
    return True


def _row(document: Mapping[str, Any], columns: Sequence[str]) -> dict[str, Any]:
    """A record's columns as the registry stores them."""
    return {
        name: json.dumps(document[name])
        if name in _JSON and document[name] is not None
        else document[name]
        for name in columns
    }


def _time_of(path: Path) -> str:
    moment = datetime.fromtimestamp(path.stat().st_mtime, UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _recover(root: Path, found: Records) -> None:
    """Artifacts of runs whose folder is gone: their own records say how they were made."""
    known = {run["id"] for run in found.runs}
    stubs: dict[str, dict[str, Any]] = {}
    for path in sorted((root / OBJECTS).glob("??/*.json")):
        if path.stem in found.artifacts:
            continue
        record = _json(path, found, ("digest", "kind", "bytes", "files", "made"))
        if record is None:
            continue
        made, digest = record["made"], record["digest"]
        run, document = made.get("run"), made.get("document")
        if run is None or run in known or not document:
            continue  # the run's own records say that it did not come to be
        moment = _time_of(path)
        stubs.setdefault(run, _stub(run, moment, made.get("environment", {})))
        found.artifacts[digest] = _artifact(digest, record["kind"], record, moment)
        found.executions.append(
            {
                "id": None,
                "run_id": run,
                "stage": made["stage"],
                "kind": document["kind"],
                "key": made["key"],
                "document": document,
                "disposition": made.get("disposition", "executed"),
                "reused_from": None,
                "attempt": None,
                "metrics": made.get("metrics", {}),
                "resources": {},
                "environment": made.get("environment", {}),
                "error": None,
                "seconds": None,
                "started_at": moment,
                "ended_at": moment,
                "inputs": document["inputs"],
                "outputs": {made.get("role", record["kind"]): digest},
            }
        )
    found.runs += stubs.values()
    for execution in found.executions:
        for digests in execution["inputs"].values():
            for digest in digests:
                # Of an input that nothing describes, the digest is all that is left.
                found.artifacts.setdefault(
                    digest, _artifact(digest, "source", None, execution["started_at"])
                )


def _stub(run: str, moment: str, environment: Mapping[str, Any]) -> dict[str, Any]:
    empty = dict.fromkeys(("manifest_digest", "manifest_path", "manifest_text", "host"), "")
    return {
        **empty,
        "id": run,
        "seq": None,
        "name": "(recovered)",
        "kind": "submit",
        "status": "done",
        "resolved": "{}",
        "overrides": "[]",
        "environment": json.dumps(environment),
        "started_at": moment,
        "ended_at": moment,
        "pid": 0,
    }


def _artifact(
    digest: str, kind: str, record: Mapping[str, Any] | None, moment: str
) -> dict[str, Any]:
    return {
        "digest": digest,
        "kind": kind,
        "bytes": record["bytes"] if record else 0,
        "files": record["files"] if record else {},
        "label": "",
        "created_at": moment,
        "external": record is None,
        "members": {},
    }


def _number(found: Records) -> None:
    """Give runs and executions numbers that are theirs alone.

    Those they had are kept; where two have the same, of registries that were begun anew, all are
    counted again by time.
    """
    _renumber(found.runs, "seq", ())
    taken = [*found.executions, *found.reuses]
    _renumber(taken, "id", found.reuses)


def _renumber(items: Sequence[dict[str, Any]], name: str, reuses: Sequence[dict[str, Any]]) -> None:
    numbers = [item[name] for item in items if item[name] is not None]
    by_time = sorted(items, key=lambda item: (item["started_at"], item[name] or 0))
    if len(set(numbers)) == len(numbers):
        last = max(numbers, default=0)
        by_time = [item for item in by_time if item[name] is None]
    else:
        last = 0
        for item in reuses:
            item["reused_from"] = None  # it names a number of before: found by key instead
    for number, item in enumerate(by_time, last + 1):
        item[name] = number


# As `Ledger.reuse_executions` leaves them.
_KEPT_WHERE_IT_WAS_MADE: dict[str, Any] = {
    "document": None,
    "metrics": {},
    "resources": {},
    "environment": {},
}


def _reused(found: Records) -> Iterator[dict[str, Any]]:
    """What runs took from earlier executions, with all that is as of those."""
    by_id = {item["id"]: item for item in found.executions}
    by_key: dict[str, list[dict[str, Any]]] = {}
    for item in sorted(found.executions, key=lambda item: str(item["started_at"])):
        if item["disposition"] == "executed":
            by_key.setdefault(item["key"], []).append(item)
    for item in found.reuses:
        made = by_id.get(item["reused_from"])
        if made is None or made["key"] != item["key"]:
            same = by_key.get(item["key"], [])
            before = [other for other in same if other["started_at"] <= item["started_at"]]
            made = next(reversed(before or same), None)
        if made is None:
            found.problems.append(
                f"run {item['run_id']} reused stage {item['stage']} of a run that left no record"
            )
            continue
        yield {
            **made,
            "id": item["id"],
            "run_id": item["run_id"],
            "stage": item["stage"],
            "disposition": "reused",
            "reused_from": made["id"],
            "attempt": None,
            **_KEPT_WHERE_IT_WAS_MADE,
            "error": None,
            "seconds": item["seconds"],
            "started_at": item["started_at"],
            "ended_at": item["ended_at"],
        }


def _shards(found: Records) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Shards oldest first; a row that several hold is found in the first."""
    shards: list[dict[str, Any]] = []
    rows: dict[str, dict[str, Any]] = {}
    for shard in sorted(found.shards, key=lambda item: (item["created_at"], item["digest"])):
        listed = shard["rows"]
        shards.append({**shard, "rows": len(listed), "tokens": sum(row[2] for row in listed)})
        for key, start, tokens, digest in listed:
            rows.setdefault(
                key,
                {
                    "key": key,
                    "shard": shard["digest"],
                    "start": start,
                    "tokens": tokens,
                    "digest": digest,
                },
            )
    return shards, list(rows.values())


def _kept(
    root: Path, found: Records
) -> tuple[dict[str, str], dict[str, str], dict[str, dict[str, Any]]]:
    """(state, time of the last verification, pin) by digest, of what is stored."""
    history = [
        (str(execution["ended_at"]), "present", [digest])
        for execution in found.executions
        if execution["ended_at"] is not None
        for role, digest in execution["outputs"].items()
        if not role.startswith(SNAPSHOT_ROLE)
    ]
    # What was saved on the way came to be before its execution ended, and may have gone before.
    history += [
        (str(found.artifacts[digest]["created_at"]), "present", [digest])
        for execution in found.executions
        for role, digest in execution["outputs"].items()
        if role.startswith(SNAPSHOT_ROLE) and digest in found.artifacts
    ]
    verified: dict[str, str] = {}
    pins: dict[str, dict[str, Any]] = {}
    for event in events(root):
        digests = [digest for digest in event["digests"] if digest in found.artifacts]
        if event["event"] in _STATES:
            history.append((event["at"], _STATES[event["event"]], digests))
        for digest in digests:
            if event["event"] == VERIFIED:
                verified[digest] = event["at"]
            elif event["event"] == PINNED:
                text = event.get("note", "")
                pins[digest] = {"digest": digest, "note": text, "created_at": event["at"]}
            elif event["event"] == UNPINNED:
                pins.pop(digest, None)
    state = dict.fromkeys(found.artifacts, "present")
    for _, came_to, digests in sorted(history, key=lambda item: item[0]):
        state.update(dict.fromkeys(digests, came_to))
    for digest, said in state.items():
        if said == "evicted" and found.artifacts[digest]["kind"] == "snapshot":
            # Saved again by a later training, it has the time at which it was first.
            if (root / OBJECTS / digest[:2] / digest).is_dir():
                state[digest] = "present"
        elif said == "present" and not (root / OBJECTS / digest[:2] / digest).is_dir():
            state[digest] = "missing"
    return state, verified, pins
