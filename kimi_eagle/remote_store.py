"""Files in a store elsewhere: an object store or a shared folder, by URL, through fsspec.

What is written is read back and compared, since a store says "done" to what it was sent, and what
it was sent may have been changed on the way; what is read is compared by who reads it. A transfer
that breaks off is begun again a few times.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from blake3 import blake3

_TRIES = 3
_PAUSE_SECONDS = 0.25
_CHUNK = 8 << 20

T = TypeVar("T")


class RemoteError(OSError):
    """A store elsewhere cannot be used; the message says which, what failed, and why."""


class _Altered(Exception):
    """A file came out another than it was sent."""


class RemoteStore:
    """The files under one URL; names have slashes between their parts."""

    def __init__(self, url: str):
        """Raises: RemoteError: nothing here can speak to such a URL."""
        if find_spec("fsspec") is None:
            raise RemoteError(f"{url}: fsspec is not installed: pip install 'kimi-eagle[remote]'")
        from fsspec.core import url_to_fs

        self.url = url.rstrip("/")
        try:
            options = {} if "://" not in url or url.startswith("file:") else _NO_CACHE
            self._fs, self._base = url_to_fs(self.url, **options)
        except (ImportError, ValueError) as error:
            raise RemoteError(f"{url} cannot be used as a store: {error}") from None

    def put(self, path: Path, name: str, digest: str) -> None:
        """Store a file, of this BLAKE3 digest. Raises: RemoteError."""

        def send() -> None:
            target = self._at(name)
            self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
            self._fs.put_file(str(path), target)
            found = self._digest(target)
            if found != digest:
                with suppress(*_broken()):
                    self._fs.rm_file(target)
                raise _Altered(f"it was sent as {digest[:12]} and arrived as {found[:12]}")

        self._tried(send, name, "stored")

    def write(self, name: str, data: bytes) -> None:
        """Store these bytes as a file, whole or not at all. Raises: RemoteError."""

        def send() -> None:
            target = self._at(name)
            self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
            self._fs.pipe_file(target, data)
            if self._fs.cat_file(target) != data:
                with suppress(*_broken()):
                    self._fs.rm_file(target)
                raise _Altered("it arrived as something else")

        self._tried(send, name, "stored")

    def get(self, name: str, path: Path) -> None:
        """Fetch a file; whoever asked compares it. Raises: RemoteError."""
        self._tried(lambda: self._fs.get_file(self._at(name), str(path)), name, "fetched")

    def get_on(self, name: str, path: Path, size: int) -> None:
        """Fetch a large file part after part, going on behind what `path` has of it already;
        whoever asked compares it. Raises: RemoteError.

        Args: `size`: of the whole, in bytes.
        """
        with path.open("ab") as file:
            if file.tell() > size:
                file.truncate(0)
            at = file.seek(0, 2)
            while at < size:
                end = min(at + _CHUNK, size)
                file.write(self._tried(partial(self._part, name, at, end), name, "fetched"))
                at = end

    def _part(self, name: str, start: int, end: int) -> bytes:
        data = bytes(self._fs.cat_file(self._at(name), start=start, end=end))
        if len(data) != end - start:
            raise _Altered(f"bytes {start} to {end} came as {len(data)} bytes")
        return data

    def read(self, name: str) -> bytes | None:
        """A small file whole; None when there is none. Raises: RemoteError."""

        def fetch() -> bytes | None:
            try:
                return bytes(self._fs.cat_file(self._at(name)))
            except FileNotFoundError:
                return None

        return self._tried(fetch, name, "read")

    def names(self, folder: str) -> list[str]:
        """The names of what lies directly in a folder. Raises: RemoteError."""

        def fetch() -> list[str]:
            try:
                found = self._fs.ls(self._at(folder), detail=False)
            except FileNotFoundError:
                return []
            return sorted(str(path).rstrip("/").rpartition("/")[2] for path in found)

        return self._tried(fetch, folder, "listed")

    def _at(self, name: str) -> str:
        return f"{self._base}/{name}"

    def _digest(self, target: str) -> str:
        hasher = blake3()
        with self._fs.open(target, "rb", block_size=_CHUNK) as file:
            while chunk := file.read(_CHUNK):
                hasher.update(chunk)
        return hasher.hexdigest()

    def _tried(self, act: Callable[[], T], name: str, what: str) -> T:
        for again in range(_TRIES):
            try:
                return act()
            except FileNotFoundError as error:
                raise RemoteError(f"{self.url}/{name} is not there: {error}") from None
            except _broken() as error:
                if again == _TRIES - 1:
                    raise RemoteError(
                        f"{self.url}/{name} could not be {what}, in {_TRIES} tries: "
                        f"{type(error).__name__}: {error}"
                    ) from None
            time.sleep(_PAUSE_SECONDS * 2**again)
        raise AssertionError("it has returned or raised")


# A listing that was read once is not what another writes meanwhile.
_NO_CACHE: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}


def _broken() -> tuple[type[BaseException], ...]:
    """What libraries raise when a connection, or a store, fails: they have classes of their own."""
    found: list[type[BaseException]] = [OSError, EOFError, _Altered]
    if find_spec("botocore") is not None:
        from botocore.exceptions import BotoCoreError, ClientError

        found += [BotoCoreError, ClientError]
    if find_spec("aiohttp") is not None:
        from aiohttp import ClientError as HttpError

        found.append(HttpError)
    return tuple(found)
