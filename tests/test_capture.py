"""Rows out of forward passes, as an engine cuts and orders them; with real writers, no engine."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kimi_eagle.engines.capture import Batch, Capture
from kimi_eagle.engines.todo import Todo
from kimi_eagle.states.contract import LayerContract
from kimi_eagle.states.shard_file import Listed, read_row
from kimi_eagle.states.spool import Spool
from kimi_eagle.states.stored_row import states_of

CONTRACT = LayerContract((2, 4, 5, 8), 16, "bfloat16", "vllm")


def settings(folder: Path, lengths: list[int], ring_bytes: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    rows = {f"{row:064x}": rng.integers(0, 500, length) for row, length in enumerate(lengths)}
    Todo.write(folder / "rows.npz", rows)
    (folder / "spool").mkdir()
    return {
        "rows": str(folder / "rows.npz"),
        "contract": CONTRACT.document(),
        "spool": str(folder / "spool"),
        "shard_bytes": 1 << 20,
        "ring_bytes": ring_bytes,
    }


def states(row: int, length: int) -> Any:
    """bfloat16 [tokens, layers, hidden], other ones for each row."""
    drawn = torch.randn(length, 4, 16, generator=torch.Generator().manual_seed(row))
    return drawn.to(torch.bfloat16)


class Engine:
    """Runs tokens of rows in passes, and tells a capture of each."""

    def __init__(self, given: Mapping[str, Any]):
        self.folder = Path(given["spool"])
        self.todo = Todo(given["rows"])
        self.capture = Capture(given, torch.device("cpu"))
        self.states = [states(row, self.todo.tokens(row)) for row in range(len(self.todo))]

    def run(self, *parts: tuple[str, int, int]) -> None:
        """A pass: (name, tokens done before, tokens of it) of each request."""
        starts, done, found, ids = [0], [], [], []
        for name, before, count in parts:
            row = int(name.partition("-")[0])
            length = self.todo.tokens(row)
            whole = torch.cat([self.states[row], torch.full((1, 4, 16), -1.0).bfloat16()])
            found.append(whole[before : before + count])
            ids += [*self.todo.ids(row), 999][before : before + count]
            assert before + count <= length + 1
            starts.append(starts[-1] + count)
            done.append(before)
        both = torch.cat(found)
        # Padding, and a buffer that the engine uses again.
        token_ids = torch.cat([torch.tensor(ids, dtype=torch.int32), torch.zeros(7).int()])
        names = [name for name, _, _ in parts]
        self.capture.take(both, Batch(names, starts, done, token_ids))
        token_ids.zero_()

    def into(self, folder: str) -> None:
        self.capture.into(folder)
        self.spool = Spool(self.folder / folder)

    def said(self, count: int) -> list[Any]:
        """What the writer says of that many rows."""
        self.capture.flush()
        found: list[Any] = []
        until = time.monotonic() + 30
        while len(found) < count:
            assert time.monotonic() < until, f"{len(found)} of {count} rows"
            found += [line for line in self.spool.new() if "row" in line or "refused" in line]
            time.sleep(0.005)
        return found

    def agrees(self, rows: list[int]) -> None:
        """These rows and no others are written, and whole."""
        seen = []
        for line in self.said(len(rows)):
            listed = Listed(line["row"], line["start"], line["tokens"], line["digest"])
            raw, scales = read_row(self.spool.folder, line["shard"], listed, CONTRACT)
            row = self.todo.number[line["row"]]
            written = states_of(bytearray(raw), bytearray(scales), CONTRACT)
            assert torch.equal(written, self.states[row]), row
            seen.append(row)
        assert sorted(seen) == rows


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A writer takes seconds to start."""
    made = Engine(settings(tmp_path_factory.mktemp("capture"), [5, 40, 3, 1, 17], 1 << 16))
    yield made
    made.capture.end()


@pytest.fixture
def engine(running: Engine, request: pytest.FixtureRequest) -> Engine:
    """Whose rows go to a folder of the test's own."""
    running.into(request.node.name)
    return running


def test_rows_of_one_pass_and_rows_of_several(engine: Engine) -> None:
    engine.run(("0-1f", 0, 5), ("3-aa", 0, 1), ("1-2e", 0, 12))
    engine.run(("0-1f", 5, 1), ("1-2e", 12, 20), ("2-77", 0, 3))  # a token that row 0 generates
    engine.run(("4", 0, 17), ("1-2e", 32, 8))
    engine.agrees([0, 1, 2, 3, 4])


def test_a_request_that_was_put_off_begins_anew(engine: Engine) -> None:
    engine.run(("1", 0, 30))
    engine.run(("0", 0, 5))
    engine.run(("1", 0, 25))
    engine.run(("1", 25, 15))
    engine.agrees([0, 1])


def test_tokens_that_were_never_seen_are_an_error(engine: Engine) -> None:
    with pytest.raises(RuntimeError, match="12 tokens of row 1 were not seen"):
        engine.run(("1", 12, 28))


def test_what_an_engine_runs_to_warm_up_is_nobodys(engine: Engine) -> None:
    warming = Batch(["_warmup_prefill_"], [0, 4], [0], torch.zeros(4, dtype=torch.int32))
    engine.capture.take(torch.zeros(4, 4, 16).bfloat16(), warming)
    engine.run(("2", 0, 3))
    engine.agrees([2])


def test_other_token_ids_are_refused(engine: Engine) -> None:
    drawn = torch.ones(3, 4, 16).bfloat16()
    engine.capture.take(drawn, Batch(["2"], [0, 3], [0], torch.tensor([1, 2, 3]).int()))
    (said,) = engine.said(1)
    assert said["refused"] == engine.todo.keys[2]


def test_a_row_that_no_ring_has_room_for(tmp_path: Path) -> None:
    engine = Engine(settings(tmp_path, [200], 1 << 12))
    with pytest.raises(RuntimeError, match=r"a row of 200 tokens takes .* raise engine.buffer_mib"):
        engine.run(("0", 0, 200))
    engine.capture.end()


def test_however_rows_are_cut_and_ordered_all_of_each_is_written(tmp_path: Path) -> None:
    """Through a ring that has room for few of them."""
    drawn = random.Random(0)
    lengths = [drawn.randint(1, 60) for _ in range(150)]
    engine = Engine(settings(tmp_path, lengths, 3 << 12))
    for turn in range(3):
        engine.into(f"turn-{turn}")
        waiting, running = list(range(150)), dict[int, int]()
        while waiting or running:
            while waiting and len(running) < 8:
                running[waiting.pop(0)] = 0
            parts, left = [], 96
            for row in drawn.sample(sorted(running), len(running)):
                if drawn.random() < 0.05:
                    running[row] = 0  # preempted
                count = min(left, lengths[row] - running[row], drawn.randint(1, 60))
                if count > 0:
                    parts.append((f"{row}-x", running[row], count))
                    running[row] += count
                    left -= count
            engine.run(*parts)
            running = {row: done for row, done in running.items() if done < lengths[row]}
        engine.agrees(list(range(150)))
    engine.capture.end()
