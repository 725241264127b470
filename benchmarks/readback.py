"""How fast hidden states are read back for training: rows in random order, packed into batches.

    python benchmarks/readback.py [--mib 1024] [--row-tokens 512] [--record]

One process and one thread, the files in the page cache, Kimi-K2.5's shape (4 layers of 7168
bfloat16, 57,344 bytes a token). Ours: rows of shards through `ShardReader`, which looks into the
mapped shard, and the one copy into the batch. Beside it, in turns, the same batches from a plain
safetensors file for each row (`safetensors.torch.load_file`), which is how speculators keeps them.
The best of several turns counts.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import Figures, parser
from safetensors.torch import load_file, save_file

from kimi_eagle.states.index import Place
from kimi_eagle.states.layout import shard_path
from kimi_eagle.states.reader import ShardReader

LAYERS, HIDDEN = 4, 7168
BYTES_OF_TOKEN = LAYERS * HIDDEN * 2
ROWS_OF_SHARD = 16
BATCH_TOKENS = 4096

Read = Callable[[int], tuple[Any, Any]]


def main() -> None:
    options = parser("Read rows of hidden states back in random order.")
    options.add_argument("--mib", type=int, default=1024, help="size of the store")
    options.add_argument("--row-tokens", type=int, default=512, help="tokens of a row")
    options.add_argument("--repeat", type=int, default=5, metavar="N", help="the best of N counts")
    given = options.parse_args()
    figures = Figures(given)
    torch.set_num_threads(1)
    rows = max(ROWS_OF_SHARD, given.mib * 2**20 // (BYTES_OF_TOKEN * given.row_tokens))
    with tempfile.TemporaryDirectory(prefix="readback-") as folder:
        top = Path(folder)
        places = _shards(top, rows, given.row_tokens)
        _files(top, places)
        batch = torch.empty((BATCH_TOKENS, LAYERS, HIDDEN), dtype=torch.bfloat16)
        batch_ids = torch.empty(BATCH_TOKENS, dtype=torch.int32)
        ours, theirs = [], []
        for turn in range(given.repeat):
            order = list(range(rows))
            random.Random(turn).shuffle(order)
            # As a training that begins: nothing is open yet.
            reader = ShardReader(top)
            read_ours = partial(_placed, reader, places)
            ours.append(_seconds(order, read_ours, batch, batch_ids))
            theirs.append(_seconds(order, partial(_whole, top), batch, batch_ids))
        gigabytes = rows * given.row_tokens * BYTES_OF_TOKEN / 1e9
        figures.emit(
            "readback",
            gigabytes / min(ours),
            "GB/s",
            gigabytes / min(theirs),
            rows=rows,
            row_tokens=given.row_tokens,
            gigabytes=round(gigabytes, 2),
        )


def _states(tokens: int) -> Any:
    return torch.rand(tokens, LAYERS, HIDDEN).to(torch.bfloat16)


def _shards(top: Path, rows: int, tokens: int) -> list[Place]:
    """Rows in shards, as `states.shards` describes these."""
    places: list[Place] = []
    while len(places) < rows:
        count = min(ROWS_OF_SHARD, rows - len(places))
        shard = f"{len(places):064x}"
        path = shard_path(top, shard)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(
            {
                "hidden_states": _states(count * tokens),
                "token_ids": torch.arange(count * tokens, dtype=torch.int32),
                "offsets": torch.arange(count + 1) * tokens,
            },
            path,
        )
        places += [Place(shard, row * tokens, tokens, "") for row in range(count)]
    return places


def _files(top: Path, places: Sequence[Place]) -> None:
    """The same rows, each in a file of its own."""
    reader = ShardReader(top)
    for row, place in enumerate(places):
        states, ids = reader.read(place)
        save_file({"hidden_states": states.clone(), "token_ids": ids.clone()}, _file(top, row))


def _file(top: Path, row: int) -> Path:
    return top / f"hs_{row}.safetensors"


def _placed(reader: ShardReader, places: Sequence[Place], row: int) -> tuple[Any, Any]:
    return reader.read(places[row])


def _whole(top: Path, row: int) -> tuple[Any, Any]:
    found = load_file(_file(top, row))
    return found["hidden_states"], found["token_ids"]


def _seconds(order: Sequence[int], read: Read, batch: Any, batch_ids: Any) -> float:
    """How long all rows take into batches, each filled up to its end."""
    started = time.perf_counter()
    for _ in _batches(order, read, batch, batch_ids):
        pass  # here a training would take its step
    return time.perf_counter() - started


def _batches(order: Sequence[int], read: Read, batch: Any, batch_ids: Any) -> Iterator[int]:
    used = 0
    for row in order:
        states, ids = read(row)
        if used + len(ids) > len(batch_ids):
            yield used
            used = 0
        batch[used : used + len(ids)] = states
        batch_ids[used : used + len(ids)] = ids
        used += len(ids)
    yield used


if __name__ == "__main__":
    main()
