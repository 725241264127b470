"""What a writer of shards tells the stage that waits for its rows: a folder and a journal in it.

The writer belongs to the engine (`engines.states_writer`), which may be a server that was started
by somebody else; so they meet in a folder. `journal-*.ndjson` is appended by one writer each, one
JSON object a line, in this order for each row: its states are filled, then its line is written.

    {"contract": {…}}                                     first: what the states are
    {"row": key, "digest": …, "shard": name, "start": n, "tokens": n, "lost": {…}}
    {"refused": key, "reason": …, "message": …}           a row that must not be stored
    {"closed": name}                                      a shard that is whole
    {"failed": text}                                      the writer cannot go on

A file `close` asks the writers to close what they have open, as long as it is there; `proved` says
that the rows were proven to be the verifier's, so that what is left after a kill may be kept. Pure
but for the folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kimi_eagle.states.contract import LayerContract
from kimi_eagle.states.shard_file import Listed, salvage

CLOSE = "close"
PROVED = "proved"
_JOURNAL = "journal-"


class Journal:
    """The writer's end."""

    def __init__(self, folder: Path, contract: LayerContract):
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{_JOURNAL}{os.getpid()}.ndjson"
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self.say({"contract": contract.document()})

    def say(self, *lines: Mapping[str, Any]) -> None:
        text = "".join(json.dumps(line) + "\n" for line in lines)
        os.write(self._file, text.encode("utf-8"))

    def row(
        self,
        key: str,
        digest: str,
        shard: str,
        start: int,
        tokens: int,
        lost: Mapping[str, Any] | None = None,
    ) -> None:
        """A row whose states are filled. Args: `lost`: see `states.fp8`."""
        place = {"shard": shard, "start": start, "tokens": tokens}
        self.say({"row": key, "digest": digest, **place, **({"lost": lost} if lost else {})})


class Spool:
    """The end of the stage that waits."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._read: dict[Path, int] = {}
        (folder / CLOSE).unlink(missing_ok=True)  # of one that was killed

    def new(self) -> Iterator[dict[str, Any]]:
        """The lines of all journals that were written since it last looked."""
        for path in _journals(self.folder):
            lines, self._read[path] = _lines(path, self._read.get(path, 0))
            yield from lines

    def ask_to_close(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)  # no row may have come yet
        (self.folder / CLOSE).touch()

    def prove(self) -> None:
        (self.folder / PROVED).touch()


def close_what_was_left(folder: Path) -> list[str]:
    """Close the shards that a killed writer left open; returns the names of all that are whole.

    Nothing is kept of a folder whose rows had not been proven.
    """
    if not (folder / PROVED).exists():
        return []
    whole: list[str] = []
    for path in _journals(folder):
        contract: LayerContract | None = None
        rows: dict[str, list[Listed]] = {}
        for line in _lines(path, 0)[0]:
            if "contract" in line:
                contract = LayerContract.of(line["contract"])
            elif "row" in line:
                row = Listed(line["row"], line["start"], line["tokens"], line["digest"])
                rows.setdefault(line["shard"], []).append(row)
        for name, listed in rows.items():
            if (folder / name).exists():
                whole.append(name)
            elif contract is not None:
                made = salvage(folder, name, listed, contract)
                whole += [made] if made is not None else []
    return whole


def _journals(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{_JOURNAL}*.ndjson"))


def _lines(path: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """The whole lines from an offset on, and the offset after them."""
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read()
    whole = data.rfind(b"\n") + 1
    return [json.loads(line) for line in data[:whole].splitlines()], offset + whole
