"""What people look at in a rows artifact: what became of every record, and rows as text.

The base install has no array library: the rows file is read with the standard library, a row at a
time. Only text needs the package `tokenizers`, loaded when a row is asked for.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_eagle.identity import digest_file, short
from kimi_eagle.records import ArtifactRecord
from kimi_eagle.registry.search import RunFilter, Search
from kimi_eagle.registry.store import UnknownDigest
from kimi_eagle.rows.buckets import BUCKETS, KEPT
from kimi_eagle.rows.records import place
from kimi_eagle.verifiers.facts import VerifierError
from kimi_eagle.verifiers.folder import safetensors_header

if TYPE_CHECKING:
    from kimi_eagle.registry.store import Registry

ROWS, REPORT, TABLE = "rows", "report.json", "rows.safetensors"
# What `_decoder` reads, the first that a folder has.
_TOKENIZERS = ("tokenizer.json",)
_CODES = {"I32": ("i", 4), "I64": ("q", 8), "U8": ("B", 1)}


@dataclass(frozen=True)
class Bucket:
    """Records with one fate: how many, and where the first of them are."""

    name: str
    records: int
    share: float
    meaning: str
    examples: Sequence[Mapping[str, Any]]
    """`file` (its name), `record`, `line` (None in a table), `place` for people, `detail`."""


@dataclass(frozen=True)
class RowView:
    """One row, readable."""

    row: int
    rows: int
    split: str
    file: str
    record: int
    line: int | None
    token_ids: Sequence[int]
    loss_mask: Sequence[int]
    tokens: Sequence[str]
    """Of each id its entry in the vocabulary, as the tokenizer spells it."""
    spans: Sequence[tuple[bool, str]]
    """The text in pieces that are supervised, or are not."""

    @property
    def place(self) -> str:
        return place(self.file, self.record, self.line)

    def document(self) -> dict[str, Any]:
        """As `show --row --json` prints it."""
        return {
            "type": "row",
            "row": self.row,
            "rows": self.rows,
            "split": self.split,
            "source": {"file": self.file, "record": self.record, "line": self.line},
            "token_ids": list(self.token_ids),
            "loss_mask": list(self.loss_mask),
            "tokens": list(self.tokens),
            "spans": [{"supervised": learnt, "text": text} for learnt, text in self.spans],
        }


def buckets(registry: Registry, artifact: ArtifactRecord, folder: Path) -> list[Bucket]:
    """What became of the records that an artifact was made from; most first, what was kept before
    that. Nothing when the artifact is not on disk, or counts nothing.

    Args:
        folder: of the artifact in the store.
    """
    if artifact.kind != ROWS or not (folder / REPORT).is_file():
        return []
    report = _report(folder)
    names = _names(registry, artifact.digest)
    try:
        counted = dict(report["buckets"])
        total = sum(entry["records"] for entry in counted.values())
        ordered = sorted(
            counted.items(), key=lambda item: (item[0] != KEPT, -item[1]["records"], item[0])
        )
        return [
            Bucket(
                name,
                entry["records"],
                entry["records"] / total,
                BUCKETS.get(name, ""),
                [_example(example, names) for example in entry["examples"]],
            )
            for name, entry in ordered
        ]
    except (KeyError, IndexError, TypeError, ValueError):
        return []  # a report of another kind, or an altered one: `verify` tells


def _example(example: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    number = int(example["file"])
    name = names[number] if number < len(names) else f"file {number}"
    at = place(name, example["record"], example["line"])
    return {**example, "file": name, "place": at}


def _report(folder: Path) -> dict[str, Any]:
    try:
        value = json.loads((folder / REPORT).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _names(registry: Registry, rows: str) -> list[str]:
    """The names of the files that rows came of, by number. An artifact has none: the same data in
    other files makes the same rows; those of the run that made them last are told."""
    makers = registry.producers(rows)
    inputs = (makers[-1].document or {}).get("inputs", {}) if makers else {}
    roles = sorted((int(role[8:]), role) for role in inputs if role.startswith("sources."))
    digests = [digest for _, role in roles for digest in inputs[role]]
    records = [registry.artifact(digest) for digest in digests]
    return [
        record.label if record and record.label else short(digest)
        for digest, record in zip(digests, records, strict=True)
    ]


def rows(
    root: Path,
    registry: Registry,
    prefix: str,
    numbers: Sequence[int],
    sample: int,
    tokenizer: Path | None,
) -> list[RowView]:
    """Rows of a rows artifact, by their numbers from 0.

    Args:
        prefix: the start of its hash, or the name of the stage that made it in the newest run that
            has such a stage.
        sample: as many more, from the first to the last at equal distances.
        tokenizer: a folder, or a tokenizer.json, to decode with; None finds the one that the rows
            were made with.

    Raises:
        LookupError: the hash names no rows, there are no such rows, their tokenizer is not here, or
            the package that decodes is not.
        UnknownDigest, AmbiguousDigest: see `Search.find`.
        OSError: a file cannot be read.
    """
    digest, kind = _named(registry, prefix)
    artifact = registry.artifact(digest)
    if artifact is None or artifact.kind != ROWS:
        raise LookupError(f"{short(digest)} is a {kind}, and --row shows a row of a rows artifact")
    folder = root / "objects" / digest[:2] / digest
    if not (folder / TABLE).is_file():
        raise LookupError(
            f"rows {short(digest)} is not in the store ({folder}); a run of its manifest makes it"
        )
    table = _Table(folder / TABLE)
    for number in numbers:
        if not 0 <= number < len(table):
            raise LookupError(f"no row {number}: rows {short(digest)} has 0 to {len(table) - 1}")
    numbers = [*numbers, *spread(len(table), sample)]
    decoder = _decoder(_tokenizer_file(root, registry, digest, tokenizer))
    names = _names(registry, digest)
    return [_view(table, number, decoder, names) for number in numbers]


def _named(registry: Registry, said: str) -> tuple[str, str]:
    """What the start of a hash names, or else a stage: its hash and kind.

    Raises: UnknownDigest, AmbiguousDigest: neither does.
    """
    search = Search(registry)
    try:
        return search.find(said, what="artifact")
    except UnknownDigest:
        for run in search.runs(RunFilter(stage=said), 1):
            for stage in registry.stages_of(run.id):
                if stage.stage == said and ROWS in stage.outputs:
                    return stage.outputs[ROWS], ROWS
        raise


def spread(count: int, sample: int) -> list[int]:
    """`sample` of `count` numbers from 0, the first and the last among them; all if they are fewer.

    (With one, the first.)
    """
    if sample >= count:
        return list(range(count))
    return [index * (count - 1) // max(sample - 1, 1) for index in range(sample)]


def _view(table: _Table, number: int, decoder: Any, names: Sequence[str]) -> RowView:
    start, end = table.values("offsets", number, 2)
    ids, mask = (
        table.values("token_ids", start, end - start),
        table.values("loss_mask", start, end - start),
    )
    spans, at = [], 0
    for learnt, run in groupby(mask):
        length = len(list(run))
        text = decoder.decode(ids[at : at + length], skip_special_tokens=False)
        spans.append((bool(learnt), text))
        at += length
    # Rows that a stage made without files know their source alone.
    file = table.one("file", number) if table.has("file") else len(names)
    line = table.one("line", number) if table.has("line") else 0
    return RowView(
        number,
        len(table),
        "validate" if table.one("split", number) else "train",
        names[file] if file < len(names) else f"source {table.one('source', number)}",
        table.one("record", number),
        line or None,
        ids,
        mask,
        [decoder.id_to_token(token) or f"[{token}]" for token in ids],
        spans,
    )


class _Table:
    """The rows file, read where it is asked for."""

    def __init__(self, path: Path):
        self._path = path
        try:
            self._header = safetensors_header(path)
        except VerifierError as error:
            raise OSError(str(error)) from None
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
        self._base = 8 + length

    def __len__(self) -> int:
        return int(self._header["offsets"]["shape"][0]) - 1

    def has(self, name: str) -> bool:
        return name in self._header

    def values(self, name: str, start: int, count: int) -> list[int]:
        """`count` values of an array, from `start`.

        Raises:
            OSError: the file has no such array.
        """
        entry = self._header.get(name)
        if entry is None:
            raise OSError(f"{self._path} has no {name}: it is no table of rows")
        code, size = _CODES[entry["dtype"]]
        with self._path.open("rb") as file:
            file.seek(self._base + entry["data_offsets"][0] + start * size)
            found = array(code, file.read(count * size))
        assert found.itemsize == size, "as C has them on every platform that is supported"
        return found.tolist()

    def one(self, name: str, row: int) -> int:
        return self.values(name, row, 1)[0]


def _tokenizer_file(root: Path, registry: Registry, digest: str, given: Path | None) -> Path:
    """The file of the tokenizer that rows were made with: the one given, a head's in the store, or
    that of the verifier's folder as a manifest names it.

    Raises: LookupError.
    """
    if given is not None:
        found = [given / name for name in _TOKENIZERS] if given.is_dir() else [given]
        path = next((path for path in found if path.is_file()), None)
        if path is None:
            raise LookupError(f"no {' or '.join(_TOKENIZERS)} at {given}")
        return path
    makers = registry.producers(digest)
    record = None
    for maker in makers:
        (named,) = (maker.document or {}).get("inputs", {}).get("tokenizer", [None])
        record = registry.artifact(named) if named else None
    files = record.files if record is not None else {}
    name = next((name for name in _TOKENIZERS if name in files), None)
    if name is None:
        raise LookupError(
            f"the registry knows no {' or '.join(_TOKENIZERS)} that rows {short(digest)} were made "
            "with; give its folder: --tokenizer FOLDER"
        )
    wanted = files[name][0]
    for holder, relative in Search(registry).holders(wanted):
        path = root / "objects" / holder[:2] / holder / relative
        if path.is_file():
            return path
    for maker in makers:
        run = registry.run(maker.run_id)
        if run is None:
            continue
        verifier = json.loads(registry.run_texts(run.id)["resolved"])["verifier"]["path"]
        beside = Path(run.manifest_path).parent / str(verifier) / name
        if beside.is_file() and digest_file(beside) == wanted:
            return beside
    raise LookupError(
        f"the {name} that rows {short(digest)} were made with ({short(wanted)}) is neither in the "
        "store nor where the manifest had it; give its folder: --tokenizer FOLDER"
    )


def _decoder(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise LookupError(
            "decoding rows needs the package tokenizers, which is not installed here; "
            "`pip install tokenizers` is enough"
        ) from None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - tokenizers raises plain Exception
        raise LookupError(f"{path} cannot be read: {error}") from None
