"""What an extraction that waits for a writer of shards has got so far. Imports torch.

Rows arrive through the spool (`states.spool`), in no order that matters. The first rows prove the
layer convention (`engines.probe`); no shard is announced before they have.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kimi_eagle.engines.probe import POSITIONS, Probe, probe_rows
from kimi_eagle.engines.todo import Todo
from kimi_eagle.job import EventWriter, StageFailed
from kimi_eagle.states.checks import BadStates
from kimi_eagle.states.contract import LayerContract
from kimi_eagle.states.refusals import Refusals
from kimi_eagle.states.shard_file import Listed, read_row
from kimi_eagle.states.spool import Spool
from kimi_eagle.states.stored_row import Lost, states_of

# Without a row for this long while rows are awaited, something has gone wrong.
PATIENCE_SECONDS = 120.0
# Progress is told no more often than this.
_TELL_SECONDS = 0.5
_WAIT_SECONDS = 0.002
_YIELDS = 10


class Gathering:
    def __init__(
        self,
        todo: Todo,
        contract: LayerContract,
        spool: Spool,
        events: EventWriter,
        probe: Probe,
        probing: int,
        min_agreement: float,
        refusals: Refusals,
        inside: str = "",
    ):
        """Args:
        probing: how many of the first rows prove the convention.
        inside: the spool's folder inside the one that the engine was started with.
        """
        self.todo, self.probing = todo, probing
        self._contract = contract
        self._spool = spool
        self.events = events
        self._probe = probe
        self._to_probe: dict[str, Sequence[int] | None] = dict.fromkeys(todo.keys[:probing])
        self._places: dict[str, tuple[str, Listed]] = {}
        self._min_agreement = min_agreement
        self._refusals = refusals
        self.inside = inside
        self.announce: Callable[[str], None] = lambda name: events.emit("shard", name=name)
        """Is given the name of each shard that is whole and proven."""
        self._proof: Future[None] | None = None
        self._proved = False
        self._closed: list[str] = []
        self._announced: set[str] = set()
        self._tokens = 0
        self._told = 0.0
        self._started = self._last = 0.0
        self.digests: dict[str, str] = {}
        self._lost = Lost()

    def document(self) -> dict[str, Any]:
        """What the stage is told: content digest by key, and how the proof came out."""
        return {
            "digests": self.digests,
            "agreement": self._probe.agreement,
            "next_best": self._probe.next_best,
            "probed": self._probe.count,
            "refused": self._refusals.rows,
            "fp8_error": self._lost.relative(),
        }

    @property
    def whole(self) -> bool:
        """Whether every row has come."""
        return len(self.digests) + len(self._refusals.rows) == len(self.todo)

    def asks(self, row: int) -> dict[str, Any]:
        """What the connector must be told with a row (`kv_transfer_params`)."""
        # One string: vLLM copies what it is given deeply, for each request.
        return {"states": f"{self.todo.keys[row]} {self.todo.ids_digest(row)} {self.inside}"}

    def ranked(self, row: int, tokens: Sequence[int]) -> None:
        """What the engine ranks first after each position of one of the first rows."""
        if self.todo.keys[row] in self._to_probe:
            self._to_probe[self.todo.keys[row]] = tokens

    def look(self) -> None:
        """Take in what has been written since.

        Raises:
            StageFailed: too many rows must not be stored, the writer failed, or the convention is
                wrong.
        """
        if not self._started:  # the engine is up, and has been given its first rows
            self._started = self._last = time.monotonic()
        for line in self._spool.new():
            if "row" in line:
                self._take(line)
            elif "closed" in line:
                self._closed.append(line["closed"])
            elif "refused" in line:
                self._refuse(line["refused"], BadStates(line["reason"], line["message"]))
            elif "failed" in line:
                raise StageFailed(f"hidden states cannot be written: {line['failed']}")
            elif "contract" in line:
                self._compare(line["contract"])
        if not self._proved:
            self._prove()
        if self._proved:
            for name in self._closed:
                self.announce(name)
            self._announced.update(self._closed)
            self._closed = []
        now = time.monotonic()
        if now - self._told >= _TELL_SECONDS or self.whole:
            self._told = now
            rate = self._tokens / max(now - self._started, 1e-9)
            values = {"tokens/s": round(rate, 1)} if self._tokens else {}
            self.events.progress(self._tokens, self.todo.all_tokens, "tokens", **values)

    def close(self) -> None:
        """Every row is with a writer: a shard is closed when its writer has no more in hand."""
        self._spool.ask_to_close()

    def wait(self) -> None:
        """Until every row has come and every shard is closed.

        Raises: StageFailed: also when nothing comes any more.
        """
        while not self.whole:
            self.look()
            if time.monotonic() - self._last > PATIENCE_SECONDS:
                come = self.digests.keys() | self._refusals.rows.keys()
                missing = [key for key in self.todo.keys if key not in come]
                raise StageFailed(
                    f"{len(missing)} of {len(self.todo)} rows were never written, among them "
                    f"{missing[0][:12]}; see the log of the stage"
                )
            time.sleep(_WAIT_SECONDS)
        self._refusals.require(len(self.digests))
        self.close()
        until = time.monotonic() + PATIENCE_SECONDS
        while {name for name, _ in self._places.values()} - self._announced:
            if time.monotonic() > until:
                raise StageFailed("the writer of hidden states did not close its shards")
            time.sleep(_WAIT_SECONDS)
            self.look()

    def _take(self, line: Mapping[str, Any]) -> None:
        key = line["row"]
        row = self.todo.number.get(key)
        if row is None:
            return  # of another client of the same folder
        self._last = time.monotonic()
        self._tokens += line["tokens"]
        self.digests[key] = line["digest"]
        self._lost.add(line.get("lost", {}))
        listed = Listed(key, line["start"], line["tokens"], line["digest"])
        self._places[key] = (line["shard"], listed)

    def _refuse(self, key: str, error: BadStates) -> None:
        if key not in self.todo.number:
            raise StageFailed(f"the writer of hidden states refuses a row: {error}")
        self._last = time.monotonic()
        self._to_probe.pop(key, None)
        self._refusals.add(key, error)

    def _prove(self) -> None:
        """Once the first rows are there, with what the engine says of them; not in the way of the
        engine, which is fed by this thread meanwhile."""
        if self._proof is None:
            known = [(self._places.get(key), said) for key, said in self._to_probe.items()]
            if all(place is not None and said is not None for place, said in known):
                # Nor in the way of the engine's own threads: it takes all cores for a moment.
                pool = ThreadPoolExecutor(1, initializer=os.nice, initargs=(_YIELDS,))
                self._proof = pool.submit(self._compute_proof, known)
                pool.shutdown(wait=False)
        elif self._proof.done():
            self._proof.result()
            self._proved = True
            self._spool.prove()

    def _compute_proof(self, rows: Sequence[Any]) -> None:
        left = POSITIONS
        for (name, listed), tokens in rows:
            found = read_row(self._spool.folder, name, listed, self._contract)
            states = states_of(bytearray(found[0]), bytearray(found[1]), self._contract)
            if left:
                self._probe.add(states[:left], tokens[:left])
                left -= min(left, listed.tokens)
        self._probe.require(self._min_agreement)

    def _compare(self, document: Mapping[str, Any]) -> None:
        mine = self._contract.document()
        for name, value in mine.items():
            if document.get(name) != value:
                raise StageFailed(
                    f"the engine's states are others than were asked for: {name} is "
                    f"{document.get(name)!r}, not {value!r}"
                )


def gather(job: Mapping[str, Any], folder: Path, inside: str = "") -> Gathering:
    """For a job of `engines.extraction`, whose rows arrive in a folder (or one inside it)."""
    todo, contract = Todo(job["rows"]), LayerContract.of(job["contract"])
    events = EventWriter(Path(job["events"]))
    return Gathering(
        todo,
        contract,
        Spool(folder / inside),
        events,
        Probe(job["head"], job["rms_norm_eps"], contract.layers),
        probe_rows(todo.offsets),
        job["min_agreement"],
        Refusals(job["max_bad_rows"], len(todo), events.note),
        inside,
    )
