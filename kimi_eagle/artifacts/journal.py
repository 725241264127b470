"""What became of artifacts after they were made: one line each time, appended, never rewritten.

`<root>/keeping.ndjson` holds what the records beside the objects cannot: pins, evictions, and what
`verify` found. The registry says the same; from this it can be made again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kimi_eagle.clock import now

JOURNAL = "keeping.ndjson"

PINNED, UNPINNED = "pinned", "unpinned"
EVICTED, DAMAGED, VERIFIED = "evicted", "damaged", "verified"


def note(root: Path, event: str, digests: Sequence[str], *, at: str = "", **more: Any) -> str:
    """Append an event, and make it last; returns its time."""
    at = at or now()
    line = json.dumps({"at": at, "event": event, "digests": list(digests), **more}) + "\n"
    path = root / JOURNAL
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            # A crash cut the last line off: it must not swallow this one.
            line = "\n" + line
        os.write(descriptor, line.encode("utf-8"))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return at


def events(root: Path) -> Iterator[dict[str, Any]]:
    """Every event, oldest first; a line that a crash cut off is passed over."""
    try:
        text = (root / JOURNAL).read_text("utf-8")
    except FileNotFoundError:
        return
    for line in text.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and {"at", "event", "digests"} <= event.keys():
            yield event
