"""How fast a file's digest is, the first time and when nothing changed.

    python benchmarks/hash.py [--mib 1024] [--record]

First look: `Digests.of` on a file it does not know, beside `blake3` alone with every thread on
the mapped file; in turns, the best of several, the file in the page cache. Second look: a fresh
`Digests` over what the registry remembers, as a new process would have it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3
from common import Figures, parser

from kimi_eagle.artifacts.digests import Digests
from kimi_eagle.registry.ledger import Ledger


def main() -> None:
    options = parser("Digest a file for the first time, and when nothing changed.")
    options.add_argument("--mib", type=int, default=1024, help="size of the file")
    options.add_argument("--repeat", type=int, default=5, metavar="N", help="the best of N counts")
    given = options.parse_args()
    figures = Figures(given)
    with tempfile.TemporaryDirectory(prefix="hash-") as folder:
        path = Path(folder) / "file"
        _fill(path, given.mib)
        time.sleep(0.2)  # what changed just now is not remembered
        first, plain, second = [], [], []
        for turn in range(given.repeat):
            ledger = Ledger(Path(folder) / f"runs-{turn}")
            first.append(_seconds(lambda ledger=ledger: _look(ledger, path)))
            plain.append(_seconds(lambda: _plain(path)))
            second.append(_seconds(lambda ledger=ledger: _look(ledger, path)))
            ledger.close()
        gib = given.mib / 1024
        figures.emit("hash_first", gib / min(first), "GiB/s", gib / min(plain), mib=given.mib)
        figures.emit("hash_unchanged", min(second) * 1000, "ms", mib=given.mib)


def _fill(path: Path, mib: int) -> None:
    block = bytes(range(256)) * 4096
    with path.open("wb") as file:
        for number in range(mib):
            file.write(number.to_bytes(8, "little") + block[8:])


def _look(ledger: Ledger, path: Path) -> None:
    digests = Digests(ledger)
    digests.of(path)
    digests.flush()


def _plain(path: Path) -> None:
    blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()


def _seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
