"""Sources → the conversations that `prepare` renders, each once, everything else counted."""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kimi_eagle.identity import digest_document
from kimi_eagle.rows.buckets import DUPLICATE, NOT_SAMPLED, Buckets, Place, Rejected
from kimi_eagle.rows.conversations import Conversation, read_conversation
from kimi_eagle.rows.mixture import lowest, take_counts
from kimi_eagle.rows.records import UNREADABLE, Record
from kimi_eagle.rows.sources import BadRecord, read_records

# What is remembered of a conversation's digest while duplicates are looked for: two that differ
# and share these are not to be expected before 10^19 conversations.
_REMEMBERED = 16


class SourceParams(Protocol):
    """What is read of a source's parameters."""

    @property
    def format(self) -> str: ...
    @property
    def columns(self) -> Mapping[str, str]: ...
    @property
    def roles(self) -> Mapping[str, str]: ...
    @property
    def tool_call_ids(self) -> str: ...
    @property
    def limit(self) -> int | None: ...
    @property
    def weight(self) -> float | None: ...


class Refused(ValueError):
    """A source that ends the stage; the message has its place."""


@dataclass(frozen=True)
class Taken:
    """A conversation to render."""

    place: Place
    source: int
    digest: str
    """Of what it says: equal conversations have equal ones, wherever they come from."""
    conversation: Conversation


class Intake:
    """Reads sources in order. With limits or weights everything is read twice: what a source
    gives is known only when all of it was seen."""

    def __init__(
        self,
        sources: Sequence[SourceParams],
        files: Sequence[Sequence[Path]],
        buckets: Buckets,
        *,
        on_bad_record: str = "fail",
        deduplicate: str = "exact",
        seed: int = 0,
    ):
        """
        Args:
            files: of each source.
            buckets: gets every record that is not yielded; the taker counts those that are.
            on_bad_record: `fail`: one that cannot be read raises `Refused`; `skip` counts it.
            deduplicate: `exact` or `none`.
        """
        self._sources = sources
        self._files = files
        self._buckets = buckets
        self._fails = on_bad_record == "fail"
        self._once = deduplicate == "exact"
        self._seed = seed
        self.undeclared = 0
        """Conversations taken so far that call tools and declare none: their prompts lack what a
        server would have been sent."""

    @property
    def paths(self) -> list[Path]:
        """Every file, at the number that a `Place` has for it."""
        return [path for files in self._files for path in files]

    def __iter__(self) -> Iterator[Taken]:
        """Raises: Refused; OSError."""
        chosen = self._chosen()
        seen: set[bytes] = set()
        for index in range(len(self._sources)):
            position = -1
            for place, read in self._read(index):
                if not isinstance(read, Conversation):
                    self._buckets.add(read.reason, place, read.detail)
                    continue
                digest = conversation_digest(read)
                if self._once and not _new(digest, seen):
                    self._buckets.add(DUPLICATE, place)
                    continue
                position += 1
                if chosen is not None and position not in chosen[index]:
                    self._buckets.add(NOT_SAMPLED, place)
                    continue
                self.undeclared += not read.tools and any("tool_calls" in m for m in read.messages)
                yield Taken(place, index, digest, read)

    def _chosen(self) -> list[Container[int]] | None:
        """Of each source, which of its conversations are taken; None: all are."""
        limits = [source.limit for source in self._sources]
        weights = [source.weight for source in self._sources]
        if not any(item is not None for item in (*limits, *weights)):
            return None
        seen: set[bytes] = set()
        found: list[_Digests] = []
        for index in range(len(self._sources)):
            digests = _Digests()
            for _, read in self._read(index):
                if isinstance(read, Conversation):
                    digest = conversation_digest(read)
                    if not self._once or _new(digest, seen):
                        digests.add(digest)
            found.append(digests)
        for index, digests in enumerate(found):
            if weights[index] is not None and not len(digests):
                paths = ", ".join(map(str, self._files[index]))
                raise Refused(
                    f"{paths}: source {index + 1} has no conversation that the ones before it have "
                    "not, so a mixture by weights has none of anything: leave it out"
                )
        counts = take_counts([len(digests) for digests in found], limits, weights)
        return [
            lowest(digests.all(), count, self._seed)
            for digests, count in zip(found, counts, strict=True)
        ]

    def _read(self, index: int) -> Iterator[tuple[Place, Conversation | Rejected]]:
        """Every record of a source: its conversation, or why it has none."""
        source = self._sources[index]
        before = sum(len(files) for files in self._files[:index])
        for number, path in enumerate(self._files[index], before):
            try:
                for record in read_records(path):
                    place = Place(number, record.number, record.line)
                    yield place, self._conversation(record, path, source)
            except BadRecord as error:
                raise Refused(f"{path.parent}/{error}") from None

    def _conversation(
        self, record: Record, path: Path, source: SourceParams
    ) -> Conversation | Rejected:
        if record.error is not None:
            if self._fails:
                raise Refused(
                    f"{record.place(str(path))}: {record.error}; mend the record, or set "
                    "on_bad_record: skip to leave such records out, counted"
                )
            return Rejected(record.reason or UNREADABLE, record.error)
        try:
            return read_conversation(
                record.value,
                source.format,
                source.columns,
                source.roles,
                tool_call_ids=source.tool_call_ids,
                in_table=record.in_table,
            )
        except Rejected as error:
            return error


class _Digests:
    """Digests of many conversations, packed."""

    def __init__(self) -> None:
        self._bytes = array("B")

    def __len__(self) -> int:
        return len(self._bytes) // _REMEMBERED

    def add(self, digest: str) -> None:
        self._bytes.frombytes(bytes.fromhex(digest)[:_REMEMBERED])

    def all(self) -> list[bytes]:
        data = self._bytes.tobytes()
        return [data[at : at + _REMEMBERED] for at in range(0, len(data), _REMEMBERED)]


def conversation_digest(conversation: Conversation) -> str:
    """The digest of what a conversation says, tools included."""
    return digest_document("conversation/1", conversation.document())


def _new(digest: str, seen: set[bytes]) -> bool:
    start = bytes.fromhex(digest)[:_REMEMBERED]
    if start in seen:
        return False
    seen.add(start)
    return True
