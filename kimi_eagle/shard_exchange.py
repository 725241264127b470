"""The hidden states of a states artifact, to a store elsewhere and from there, in whole shards.

    states/<2>/<digest>.safetensors   a shard
    states/<2>/<digest>.json          its rows: written last, so that a shard that has it is whole
    states_of/<2>/<digest>.json       the shards that hold the rows of a states artifact

A shard is sent, or fetched, once. One that was under way when a connection broke is gone on with
where it broke off: it lies under `.arriving/states` until it is whole. Of what arrives the shard is
digested, and then each row in it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from blake3 import blake3

from kimi_eagle.artifacts.digests import Digests
from kimi_eagle.artifacts.files import write_json
from kimi_eagle.artifacts.locks import Lock, gate
from kimi_eagle.harvest import StateStore, take_shard
from kimi_eagle.records import ArtifactRecord
from kimi_eagle.registry.keeping import Keeper
from kimi_eagle.registry.ledger import Ledger
from kimi_eagle.remote_store import RemoteError, RemoteStore
from kimi_eagle.states.contract import LayerContract
from kimi_eagle.states.layout import ROWS, shard_path, stored_digests
from kimi_eagle.states.shard_file import Listed, content_digest, read_row
from kimi_eagle.terminal import human_size

_TRIES = 2

T = TypeVar("T")


@dataclass(frozen=True)
class ShardsMoved:
    """Shards that had to be moved, and their bytes."""

    shards: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class _Listing:
    """What the `.json` of a shard says."""

    document: dict[str, Any]
    contract: LayerContract
    rows: tuple[Listed, ...]


@dataclass(frozen=True)
class _Shard:
    digest: str
    bytes: int
    listed: _Listing


class ShardExchange:
    """Between one root and one store elsewhere."""

    def __init__(
        self,
        root: Path,
        registry: Ledger,
        digests: Digests,
        remote: RemoteStore,
        tell: Callable[[str], None],
    ):
        self._root = root
        self._registry = registry
        self._digests = digests
        self._remote = remote
        self._tell = tell
        self._names = cache(remote.names)

    def push(self, record: ArtifactRecord, folder: Path) -> ShardsMoved:
        """Store the shards that hold the rows of a states artifact, which lies in `folder`.

        Raises: RemoteError; LookupError: a row is not stored here as it was made.
        """
        wanted = stored_digests((folder / ROWS).read_text("utf-8"))
        held = Keeper(self._registry).rows(list(wanted))
        gone = sum(key not in held or held[key][0] != digest for key, digest in wanted.items())
        if gone:
            raise LookupError(
                f"states {record.digest[:12]}: {gone} of {len(wanted)} rows are not stored here as "
                "they were made: there is nothing whole to push"
            )
        sizes = dict(self._registry.shards())
        shards = sorted({shard for _, shard in held.values()})
        going = [shard for shard in shards if not self._is_there(shard)]
        size = sum(sizes[shard] for shard in going)
        self._say(record.digest, "send", len(going), size, len(shards) - len(going))
        for number, shard in enumerate(going, 1):
            self._tell(f"shard {number} of {len(going)}: {human_size(sizes[shard])}")
            # Taken for each: `gc` need not wait until terabytes have gone.
            with gate(self._root, shared=True):
                self._send(shard)
        self._remote.write(
            _list_of(record.digest),
            json.dumps({"shards": [[shard, sizes[shard]] for shard in shards]}).encode("ascii"),
        )
        return ShardsMoved(len(going), size)

    def _send(self, shard: str) -> None:
        path = shard_path(self._root, shard)
        try:
            found, _ = self._digests.of(path)
            listed = path.with_suffix(".json").read_bytes()
        except OSError as error:
            raise LookupError(f"shard {shard[:12]} cannot be read: {error}") from None
        if found != shard:
            raise LookupError(f"shard {shard[:12]} is damaged: `kimi-eagle verify --all` says more")
        self._remote.put(path, f"{_name(shard)}.safetensors", shard)
        self._remote.write(f"{_name(shard)}.json", listed)

    def pull(self, record: ArtifactRecord, rows: bytes) -> ShardsMoved:
        """Fetch the shards with those rows of a states artifact that are not here.

        Args: `rows`: its list of rows, as it came.

        Raises: RemoteError: also where what came is not what it should be, where it does not fit
            on the disk, and where rows are here already as other bytes.
        """
        if blake3(rows).hexdigest() != record.files[ROWS][0]:
            raise RemoteError(f"{self._remote.url}: {ROWS} of {record.digest[:12]} is damaged")
        wanted = stored_digests(rows.decode("utf-8"))
        held = Keeper(self._registry).rows(list(wanted))
        other = sum(held[key][0] != digest for key, digest in wanted.items() if key in held)
        if other:
            raise RemoteError(
                f"{other} of {len(wanted)} rows of states {record.digest[:12]} are stored here "
                "already, as other bytes, and a row is stored once: nothing was fetched"
            )
        shards = self._needed(
            record.digest, {key: wanted[key] for key in wanted if key not in held}
        )
        size = sum(shard.bytes for shard in shards)
        self._say(record.digest, "fetch", len(shards), size)
        free = shutil.disk_usage(self._root).free
        if size > free:
            raise RemoteError(
                f"{human_size(size)} of hidden states do not fit: {human_size(free)} are free "
                f"where {self._root} lies; nothing was fetched"
            )
        for number, shard in enumerate(shards, 1):
            self._tell(f"shard {number} of {len(shards)}: {human_size(shard.bytes)}")
            with Lock(self._root / ".locks" / f"shard-{shard.digest}.lock"):
                if shard.digest not in dict(self._registry.shards()):
                    self._fetch(shard)
        return ShardsMoved(len(shards), size)

    def _needed(self, digest: str, lacking: dict[str, str]) -> list[_Shard]:
        """Shards that together hold the rows (content digest by key) that are lacking."""
        text = self._remote.read(_list_of(digest))
        if text is None:
            raise RemoteError(
                f"{self._remote.url} has no hidden states of {digest[:12]}: push it where they are"
            )
        found = []
        for shard, size in _taken(_pairs, text, _list_of(digest)):
            if not lacking:
                break
            name = f"{_name(shard)}.json"
            listed = _taken(_listing, self._remote.read(name), name)
            here = [row.key for row in listed.rows if lacking.get(row.key) == row.digest]
            if here:
                found.append(_Shard(shard, size, listed))
            for key in here:
                del lacking[key]
        if lacking:
            raise RemoteError(
                f"{self._remote.url} lacks {len(lacking)} rows of states {digest[:12]}: nothing "
                "was fetched"
            )
        return found

    def _fetch(self, shard: _Shard) -> None:
        folder = self._root / ".arriving" / "states"
        folder.mkdir(parents=True, exist_ok=True)
        staged = folder / f"{shard.digest}.safetensors"
        for _ in range(_TRIES):
            self._remote.get_on(f"{_name(shard.digest)}.safetensors", staged, shard.bytes)
            found, _ = self._digests.of(staged)
            if found == shard.digest:
                break
            staged.unlink()
        else:
            raise RemoteError(
                f"{self._remote.url}/{_name(shard.digest)}.safetensors is damaged: expected "
                f"{shard.digest[:12]}, found {found[:12]}; nothing of it was kept"
            )
        for row in shard.listed.rows:
            if content_digest(*read_row(folder, staged.name, row, shard.listed.contract)) != (
                row.digest
            ):
                staged.unlink()
                raise RemoteError(
                    f"{self._remote.url}/{_name(shard.digest)}.json is damaged: row "
                    f"{row.key[:12]} is not where it says; nothing of the shard was kept"
                )
        write_json(staged.with_suffix(".json"), shard.listed.document)
        with gate(self._root, shared=True):
            take_shard(StateStore(self._root, self._registry), self._digests, staged)
        staged.with_suffix(".json").unlink(missing_ok=True)

    def _is_there(self, shard: str) -> bool:
        names = self._names(f"states/{shard[:2]}")
        return f"{shard}.json" in names and f"{shard}.safetensors" in names

    def _say(self, digest: str, what: str, count: int, size: int, there: int = 0) -> None:
        more = f"; {there} are there already" if there else ""
        self._tell(
            f"states {digest[:12]}: {count} shards of hidden states, {human_size(size)}, to "
            f"{what}{more}"
        )


def states_in(executions: Sequence[dict[str, Any]]) -> list[str]:
    """The states artifacts among what a lineage's executions took in and made."""
    return sorted(
        {
            item["digest"]
            for execution in executions
            for item in execution["artifacts"]
            if item["kind"] == "states"
        }
    )


def _name(shard: str) -> str:
    return f"states/{shard[:2]}/{shard}"


def _list_of(digest: str) -> str:
    return f"states_of/{digest[:2]}/{digest}.json"


def _pairs(data: bytes) -> list[tuple[str, int]]:
    return [(str(shard), int(size)) for shard, size in json.loads(data)["shards"]]


def _listing(data: bytes) -> _Listing:
    document = json.loads(data)
    rows = tuple(Listed(*row) for row in document["rows"])
    return _Listing(document, LayerContract.of(document["contract"]), rows)


def _taken(read: Callable[[bytes], T], data: bytes | None, name: str) -> T:
    """What a record says. Raises: RemoteError: it is none."""
    try:
        return read(data or b"")
    except (ValueError, KeyError, TypeError) as error:
        raise RemoteError(f"{name} in the store elsewhere is no record: {error!r}") from None
