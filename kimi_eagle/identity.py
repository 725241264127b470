"""What a thing *is*, apart from where and how it was made: one digest, one canonical encoding.

Every digest in the system is BLAKE3-256 in lower-case hex (64 characters), stored whole and
shown as its first twelve. Files are digested over their bytes; everything else over the
canonical encoding of a tagged document `["kimi-eagle.<what>/<version>", value]`, so that two
kinds of things never share a digest by accident. `tests/test_identity.py` pins golden values:
a change there invalidates every cache that exists.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3

DIGEST_LENGTH = 64
SHOWN = 12
MINIMUM_PREFIX = 4


def short(digest: str) -> str:
    """The form of a digest that people are shown."""
    return digest[:SHOWN]


def canonical(value: Any) -> bytes:
    """Encode a JSON-type value so that equal values have equal bytes.

    Keys are sorted, floats have their shortest form that reads back the same (and zero one sign),
    tuples are lists, text is UTF-8. 1, 1.0 and true are three values.

    Raises:
        TypeError: a value that is not dict (with text keys), list, tuple, str, int, float,
            bool or None; nothing is guessed for unknown types.
        ValueError: a float that is not finite, or text that is not valid Unicode.
    """
    plain = _plain(value, "$")
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"text with a lone surrogate has no identity: {error}") from None


def _plain(value: Any, where: str) -> Any:
    kind = type(value)
    if value is None or kind in (str, int, bool):
        return value
    if kind is float:
        if not math.isfinite(value):
            raise ValueError(f"{where}: {value} has no identity (not a finite number)")
        return value + 0.0  # -0.0 equals 0.0, and becomes it
    if kind is dict:
        for key in value:
            if type(key) is not str:
                raise TypeError(f"{where}: key {key!r} is not text")
        return {key: _plain(item, f"{where}.{key}") for key, item in value.items()}
    if kind in (list, tuple):
        return [_plain(item, f"{where}.{index}") for index, item in enumerate(value)]
    raise TypeError(f"{where}: a value of type {kind.__name__} has no identity")


def digest_bytes(data: bytes) -> str:
    return blake3(data).hexdigest()


def digest_document(tag: str, value: Any) -> str:
    """The digest of `value` as a document of the kind `tag` (for example `stage/1`)."""
    return digest_bytes(canonical([f"kimi-eagle.{tag}", value]))


def digest_file(path: Path) -> str:
    """The digest of a file's bytes, read with every core.

    Raises:
        OSError: the file cannot be read.
    """
    hasher = blake3(max_threads=blake3.AUTO)
    hasher.update_mmap(path)
    return hasher.hexdigest()


def digest_tree(kind: str, files: Mapping[str, tuple[str, int]]) -> str:
    """The digest of an artifact: its kind, and every file's relative path, digest and size."""
    return digest_document(
        "tree/1",
        {"kind": kind, "files": {path: [digest, size] for path, (digest, size) in files.items()}},
    )


def stage_key(
    kind: str,
    code_version: int,
    parameters: Mapping[str, Any],
    inputs: Mapping[str, Iterable[str]],
) -> tuple[str, dict[str, Any]]:
    """The key of a stage, and the document it is the digest of (kept, so that a miss explains
    itself field by field)."""
    document = {
        "kind": kind,
        "code_version": code_version,
        "parameters": dict(parameters),
        "inputs": {role: list(digests) for role, digests in inputs.items()},
    }
    return digest_document("stage/1", document), document


def row_key(verifier: str, contract: Mapping[str, Any], token_ids: bytes) -> str:
    """The key under which the hidden states of one row are kept.

    Args:
        verifier: digest of the verifier.
        contract: layer ids, their convention, dtype and numerics (see `states.contract`).
        token_ids: the row's ids as little-endian int32 bytes.
    """
    return digest_document(
        "row/1",
        {"verifier": verifier, "contract": dict(contract), "token_ids": digest_bytes(token_ids)},
    )
