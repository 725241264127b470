"""One artifact: what it is, who made it and who took it in, what is inside."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kimi_eagle.artifacts.files import inside
from kimi_eagle.records import ArtifactRecord
from kimi_eagle.registry.browse import users
from kimi_eagle.registry.search import Search
from kimi_eagle.rows_view import buckets
from kimi_eagle.ui.view import Asked, Moved, View, address
from kimi_eagle.ui.views.finding import artifact_at
from kimi_eagle.verifiers.facts import VerifierError
from kimi_eagle.verifiers.folder import safetensors_header

_TENSORS, _FILES, _HEADERS = 100, 200, 4
_MOST_JSON = 4 << 20
_REPORT = "report.json"


def artifact(asked: Asked, digest: str) -> View | Moved:
    found = artifact_at(asked, digest)
    if isinstance(found, Moved):
        return found
    notes = Search(asked.registry).notes(found.digest)
    folder = asked.root / "objects" / found.digest[:2] / found.digest
    producers, _ = users(asked.registry, found.digest, made=True, size=20)
    consumers, following = users(
        asked.registry, found.digest, made=False, after=asked.number("after")
    )
    tensors, hidden, trouble = _tensors(found, folder, whole=asked.flag("tensors"))
    fates = buckets(asked.registry, found, folder) if folder.is_dir() else []
    path = f"/artifacts/{found.digest}"
    document: dict[str, Any] = {
        "digest": found.digest,
        "kind": found.kind,
        "bytes": found.bytes,
        "state": found.state,
        "label": found.label,
        "created_at": notes.created_at,
        "verified_at": notes.verified_at,
        "pinned": {"since": notes.pinned_at, "note": notes.pin_note} if notes.pinned_at else None,
        "producers": [asdict(use) for use in producers],
        "consumers": [asdict(use) for use in consumers],
        "next": address(f"{path}.json", after=following) if following else None,
        "files": {
            name: {"digest": d, "bytes": n} for name, (d, n) in sorted(found.files.items())[:_FILES]
        },
        "files_not_shown": max(len(found.files) - _FILES, 0),
        "tensors": tensors,
        "tensors_not_shown": hidden,
        "tensors_trouble": trouble,
        "vocab": _vocab(found, folder),
        "records": [
            {"bucket": b.name, "records": b.records, "share": b.share, "meaning": b.meaning}
            for b in fates
        ],
    }
    more = {
        "next": address(path, after=following) if following else None,
        "all_tensors": address(path, tensors=1),
        "folder": folder if folder.is_dir() else None,
    }
    return View("artifact.html", f"{found.kind} {found.digest[:12]}", document, more)


def _tensors(
    found: ArtifactRecord, folder: Path, *, whole: bool
) -> tuple[list[dict[str, Any]], int, str | None]:
    """What its safetensors files say of their tensors, how many are left out, and what is wrong."""
    listed: list[dict[str, Any]] = []
    names = [name for name in sorted(found.files) if name.endswith(".safetensors")]
    for name in names[:_HEADERS]:
        try:
            header = safetensors_header(inside(folder, name))
        except (VerifierError, ValueError) as error:
            return listed, 0, str(error) if folder.is_dir() else None
        listed += [
            {"file": name, "name": tensor, "dtype": entry.get("dtype"), "shape": entry.get("shape")}
            for tensor, entry in sorted(header.items())
        ]
    most = 1000 if whole else _TENSORS
    return listed[:most], max(len(listed) - most, 0), None


def _vocab(found: ArtifactRecord, folder: Path) -> dict[str, Any] | None:
    """What share of the tokens a draft vocabulary covers."""
    if found.kind != "vocab" or found.files.get(_REPORT, ("", 0))[1] > _MOST_JSON:
        return None
    try:
        report = json.loads((folder / _REPORT).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    wanted = ("size", "verifier_vocab_size", "coverage", "coverage_val", "curve", "by_script")
    return {name: report.get(name) for name in wanted} if isinstance(report, dict) else None
