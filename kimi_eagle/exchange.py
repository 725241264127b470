"""Artifacts with their lineage, to a store elsewhere and from there.

    objects/<2>/<digest>/<file>     the artifact's files
    objects/<2>/<digest>.json       its record, and how it was made: written last, so that what has
                                    one is whole
    lineage/<2>/<digest>.json       the runs and executions that led to it, with all artifacts known
                                    to them by digest
    keys/<2>/<stage key>.json       what a stage made, for who would make it again

Hidden states lie in shards of their own (`shard_exchange`), and go with the states artifact that is
named, or with a checkpoint when that is asked for: they take terabytes.

What comes in is staged, digested, compared with the record, and published as a stage's output is:
whole or not at all. Of the artifacts on the way to it the registry then knows everything but the
bytes, as it does of evicted ones.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_eagle.artifacts import journal
from kimi_eagle.artifacts.digests import Digests
from kimi_eagle.artifacts.files import inside, write_text
from kimi_eagle.artifacts.locks import Lock, gate
from kimi_eagle.artifacts.objects import Objects
from kimi_eagle.books import TEXTS, Books
from kimi_eagle.records import ArtifactRecord
from kimi_eagle.registry.imports import take_in
from kimi_eagle.registry.keeping import Keeper
from kimi_eagle.registry.ledger import Ledger
from kimi_eagle.remote_store import RemoteError, RemoteStore
from kimi_eagle.shard_exchange import ShardExchange, ShardsMoved, states_in
from kimi_eagle.states.layout import ROWS
from kimi_eagle.terminal import human_size

# Beside the runs; not the staging folder, which a submit clears of what nobody works in.
_ARRIVING = ".arriving"
_STATES = "states"


@dataclass(frozen=True)
class Exchanged:
    """What was moved."""

    digest: str
    kind: str
    bytes: int
    moved: bool
    """Whether it had to be: false when it was there already."""
    executions: int
    """Of its lineage, that were new where it went."""
    shards: int = 0
    """Of hidden states, that were moved."""
    shard_bytes: int = 0


class Exchange:
    """Between one root and one store elsewhere."""

    def __init__(
        self,
        root: Path,
        registry: Ledger,
        objects: Objects,
        digests: Digests,
        remote: RemoteStore,
        tell: Callable[[str], None],
        announce: Callable[[str], None] | None = None,
    ):
        """Args: `announce` is told what hidden states are moved, instead of `tell`."""
        self._shards = ShardExchange(root, registry, digests, remote, announce or tell)
        self._root = root
        self._registry = registry
        self._objects = objects
        self._digests = digests
        self._remote = remote
        self._tell = tell

    def push(self, digest: str, *, with_states: bool = False) -> Exchanged:
        """Args: `with_states`: the hidden states that led to it go with it.

        Raises: RemoteError, LookupError: it cannot go."""
        record = self._registry.artifact(digest)
        if record is None or record.state == "external":
            raise LookupError(f"{digest[:12]} is no artifact that a stage made")
        sent = ShardsMoved()
        if record.kind == _STATES:
            trouble = self._objects.trouble(record)
            if trouble is not None:
                raise LookupError(f"{trouble}: there is nothing whole to push")
            sent = self._shards.push(record, self._objects.path(digest))
        elif with_states:
            sent = self._push_states(digest)
        with gate(self._root, shared=True):
            trouble = self._objects.trouble(record)
            if trouble is not None:
                raise LookupError(f"{trouble}: there is nothing whole to push")
            name = f"objects/{digest[:2]}/{digest}"
            there = self._remote.read(f"{name}.json") is not None
            if not there:
                for relative, (content, size) in record.files.items():
                    self._tell(f"{relative}: {human_size(size)}")
                    path = inside(self._objects.path(digest), relative)
                    self._remote.put(path, f"{name}/{relative}", content)
            runs, executions = self._lineage(digest)
            lineage = {"runs": runs, "executions": executions}
            self._remote.write(f"lineage/{digest[:2]}/{digest}.json", _bytes(lineage))
            self._remote.write(f"{name}.json", self._objects.record_path(digest).read_bytes())
        for execution in executions:
            key = execution["key"]
            made = {role: found for role, found in execution["outputs"].items() if "@" not in role}
            if digest in made.values() and execution["disposition"] == "executed":
                self._remote.write(f"keys/{key[:2]}/{key}.json", _bytes({"outputs": made}))
        moved = not there or sent.shards > 0
        return Exchanged(
            digest, record.kind, record.bytes, moved, len(executions), sent.shards, sent.bytes
        )

    def _push_states(self, digest: str) -> ShardsMoved:
        """Store the hidden states that led to an artifact, those that are here."""
        total = ShardsMoved()
        for states in states_in(self._lineage(digest)[1]):
            record = self._registry.artifact(states)
            if record is None or self._objects.trouble(record) is not None:
                self._tell(f"states {states[:12]} are not here, and not sent")
                continue
            moved = self.push(states)
            total = ShardsMoved(total.shards + moved.shards, total.bytes + moved.shard_bytes)
        return total

    def find(self, prefix: str) -> str:
        """An artifact of the store elsewhere, by the start of its digest.

        Raises: LookupError: none or several; RemoteError.
        """
        if len(prefix) < 4:
            raise LookupError(f"{prefix!r} is too short: give four characters at least")
        names = self._remote.names(f"objects/{prefix[:2]}")
        found = [name[:-5] for name in names if name.endswith(".json") and name.startswith(prefix)]
        if len(found) != 1:
            what = "nothing" if not found else f"{len(found)} artifacts"
            raise LookupError(f"{prefix} names {what} in {self._remote.url}")
        return found[0]

    def fetch_made(self, key: str, *, states: bool = False) -> bool:
        """Take in what a stage with this key made elsewhere; whether there was such.

        Args: `states`: hidden states too.

        Raises: RemoteError: also where these are there, and not asked for.
        """
        text = self._remote.read(f"keys/{key[:2]}/{key}.json")
        if text is None:
            return False
        for role, digest in _json(text, f"keys/{key}")["outputs"].items():
            if role == _STATES and not states:
                raise RemoteError(
                    f"its hidden states, which are in {self._remote.url}, are not asked for: set "
                    "`store.fetch_states` to have such fetched, or `kimi-eagle pull` them"
                )
            self.pull(digest)
        return True

    def pull(self, digest: str, *, with_states: bool = False) -> Exchanged:
        """Args: `with_states`: the hidden states that led to it come with it, as far as they are
            in the store elsewhere.

        Raises: RemoteError: also where what came is not what it should be."""
        name = f"objects/{digest[:2]}/{digest}"
        text = self._remote.read(f"{name}.json")
        if text is None:
            raise RemoteError(f"{self._remote.url} has no whole {digest[:12]}")
        made = _json(text, name)
        files = {path: (entry[0], entry[1]) for path, entry in made["files"].items()}
        record = ArtifactRecord(digest, made["kind"], made["bytes"], files)
        lineage = _json(self._remote.read(f"lineage/{digest[:2]}/{digest}.json"), "lineage")
        came = ShardsMoved()
        if record.kind == _STATES:
            came = self._shards.pull(record, self._remote.read(f"{name}/{ROWS}") or b"")
        elif with_states:
            came = self._pull_states(lineage["executions"])
        with Lock(self._root / ".locks" / f"pull-{digest}.lock"):
            known = self._registry.artifact(digest)
            here = known is not None and self._objects.trouble(record) is None
            if not here:
                self._arrive(record, name, made["made"])
            with gate(self._root, shared=True):
                runs, executions = self._take_in(lineage)
                self._registry.set_state(digest, "present")
                journal.note(self._root, journal.VERIFIED, [digest])
        self._keep_books(runs, executions, lineage["runs"])
        moved = not here or came.shards > 0
        return Exchanged(
            digest, record.kind, record.bytes, moved, len(executions), came.shards, came.bytes
        )

    def _pull_states(self, executions: Sequence[dict[str, Any]]) -> ShardsMoved:
        """Fetch the hidden states of a lineage, those that were pushed."""
        total = ShardsMoved()
        for states in states_in(executions):
            if self._remote.read(f"objects/{states[:2]}/{states}.json") is None:
                self._tell(f"states {states[:12]} are not in {self._remote.url}, and not fetched")
                continue
            moved = self.pull(states)
            total = ShardsMoved(total.shards + moved.shards, total.bytes + moved.shard_bytes)
        return total

    def _arrive(self, record: ArtifactRecord, name: str, production: dict[str, Any]) -> None:
        """Fetch an artifact, and publish it when all of it is as its record says."""
        folder = self._root / _ARRIVING / record.digest
        shutil.rmtree(folder, ignore_errors=True)
        staged = folder / record.kind
        try:
            for relative, (_, size) in record.files.items():
                self._tell(f"{relative}: {human_size(size)}")
                target = inside(staged, relative)
                target.parent.mkdir(parents=True, exist_ok=True)
                self._remote.get(f"{name}/{relative}", target)
            try:
                found = self._objects.describe(staged, record.kind)
            except ValueError as error:
                raise RemoteError(f"{self._remote.url}/{name}: {error}") from None
            for relative, (expected, _) in record.files.items():
                came = found.files[relative][0]
                if came != expected:
                    raise RemoteError(
                        f"{self._remote.url}/{name}/{relative} is damaged: expected "
                        f"{expected[:12]}, found {came[:12]}; nothing of it was kept"
                    )
            if found.digest != record.digest:
                raise RemoteError(
                    f"{self._remote.url}/{name}.json is damaged: its files make "
                    f"{found.digest[:12]}; nothing of it was kept"
                )
            with gate(self._root, shared=True):
                self._objects.publish(staged, record, production)
                self._digests.flush()
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _take_in(self, lineage: dict[str, Any]) -> tuple[list[str], list[int]]:
        known = {item.digest for item in Keeper(self._registry).artifacts()}
        runs, executions = take_in(self._registry, lineage["runs"], lineage["executions"])
        absent = {
            item["digest"]
            for execution in lineage["executions"]
            for item in execution["artifacts"]
            if not item["external"]
        } - known
        if absent:
            journal.note(self._root, journal.EVICTED, sorted(absent))
        return runs, executions

    def _keep_books(
        self, begun: Sequence[str], executions: Sequence[int], runs: Sequence[dict[str, Any]]
    ) -> None:
        books = Books(self._root, self._registry, self._tell)
        for run in runs:
            if run["id"] in begun:
                folder = self._root / run["id"]
                folder.mkdir(parents=True, exist_ok=True)
                for column, (file, end) in TEXTS.items():
                    write_text(folder / file, run[column] + end)
                books.run(run["id"])
        for execution in executions:
            books.execution(execution)

    def _lineage(self, digest: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The runs and executions that led to an artifact."""
        keeper = Keeper(self._registry)
        executions: dict[int, dict[str, Any]] = {}
        waiting, seen = [digest], set()
        while waiting:
            wanted = waiting.pop()
            if wanted in seen:
                continue
            seen.add(wanted)
            for number in keeper.makers_of(wanted):
                if number not in executions:
                    executions[number] = keeper.execution_document(number)
                    inputs = executions[number]["inputs"].values()
                    waiting += [item for digests in inputs for item in digests]
        runs = {item["run_id"] for item in executions.values()}
        return [keeper.run_document(run) for run in sorted(runs)], list(executions.values())


def _bytes(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8")


def _json(data: bytes | None, name: str) -> dict[str, Any]:
    try:
        return dict(json.loads(data or b""))
    except ValueError as error:
        raise RemoteError(f"{name} in the store elsewhere is no record: {error}") from None
