"""TensorBoard's event files, written without TensorBoard.

A file is a sequence of records (TFRecord: length as uint64, masked CRC-32C of that, data, masked
CRC-32C of the data, all little-endian); a record is an `Event` protocol buffer: wall_time (1,
double), step (2, int64), file_version (3, string), summary (5). Sources: tensorflow/tensorboard,
`compat/proto/event.proto`, `compat/proto/summary.proto`, `summary/writer/record_writer.py`. So a
run has its curves in a file wherever it runs; to look at them takes the package `tensorboard`.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

_VERSION = b"brain.Event:2"
_POLYNOMIAL = 0x82F63B78  # Castagnoli, reflected
_MASK = 0xA282EAD8


class EventFile:
    """Appends scalars to a new event file in a folder; each write is whole on the disk."""

    def __init__(self, folder: Path):
        """Raises: OSError: the file cannot be made."""
        folder.mkdir(parents=True, exist_ok=True)
        moment = time.time()
        name = f"events.out.tfevents.{int(moment):010d}.{socket.gethostname()}.{os.getpid()}.0"
        self.path = folder / name
        self._file = self.path.open("ab")
        self._append(_double(1, moment) + _bytes(3, _VERSION))

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Append the scalars of one step; floats are kept in 32 bits. Raises: OSError."""
        self._append(scalars(time.time(), step, values))

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> EventFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _append(self, event: bytes) -> None:
        self._file.write(framed(event))
        self._file.flush()


def scalars(at: float, step: int, values: Mapping[str, float]) -> bytes:
    """An event with the values of one step, by tag; `at` in seconds since 1970."""
    summary = b"".join(
        _bytes(1, _bytes(1, tag.encode()) + _float(2, value)) for tag, value in values.items()
    )
    return _double(1, at) + _tag(2, 0) + _varint(step) + _bytes(5, summary)


def framed(data: bytes) -> bytes:
    """Data as a record of a TFRecord file."""
    length = struct.pack("<Q", len(data))
    return length + _crc(length) + data + _crc(data)


def _crc(data: bytes) -> bytes:
    """CRC-32C as TFRecord stores it: rotated by 15 bits, and a constant added."""
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF)


def _table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
        table.append(byte)
    return tuple(table)


_TABLE = _table()


def crc32c(data: bytes) -> int:
    """CRC-32C (RFC 3720, appendix B.4)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _tag(field: int, wire: int) -> bytes:
    return _varint(field << 3 | wire)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _bytes(field: int, data: bytes) -> bytes:
    return _tag(field, 2) + _varint(len(data)) + data


def _double(field: int, value: float) -> bytes:
    return _tag(field, 1) + struct.pack("<d", value)


def _float(field: int, value: float) -> bytes:
    try:
        packed = struct.pack("<f", value)
    except OverflowError:  # beyond 32 bits
        packed = struct.pack("<f", float("inf") if value > 0 else float("-inf"))
    return _tag(field, 5) + packed
