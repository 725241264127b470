"""The writer of shards beside an engine: ring, shard files, spool; without an engine."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from kimi_eagle.engines.ring import ALIGNMENT, Ring, aligned
from kimi_eagle.engines.writer_process import Writers
from kimi_eagle.states.contract import LayerContract
from kimi_eagle.states.shard_file import Listed, OpenShard, read_row
from kimi_eagle.states.shards import ShardWriter
from kimi_eagle.states.spool import Spool, close_what_was_left

CONTRACT = LayerContract((2, 4, 5, 8), 16, "bfloat16", "vllm")
WIDTH = CONTRACT.bytes_per_token


def states(tokens: int, seed: int = 0) -> Any:
    drawn = torch.randn(
        tokens, len(CONTRACT.layers), 16, generator=torch.Generator().manual_seed(seed)
    )
    return drawn.to(torch.bfloat16)


def raw(tensor: Any) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())


def ids_of(tokens: int) -> Any:
    return torch.arange(tokens, dtype=torch.int32)


# The ring


@given(st.lists(st.tuples(st.integers(1, 700), st.booleans()), max_size=60))
def test_regions_of_a_ring_never_overlap_and_what_has_room_is_given(
    asked: list[tuple[int, bool]],
) -> None:
    ring = Ring(1024)
    held: list[tuple[int, int]] = []
    for size, give_back in asked:
        room = ring.room()
        start = ring.take(size)
        assert (start is not None) == (aligned(size) <= room)
        if start is not None:
            end = start + aligned(size)
            assert start % ALIGNMENT == 0
            assert 0 <= start < end <= ring.size
            assert all(end <= first or last <= start for first, last in held)
            held.append((start, end))
        if give_back and held:
            held.pop(0)
            ring.give_back()
    for _ in held:
        ring.give_back()
    assert ring.room() == ring.size


# The file


def test_a_shard_reads_as_safetensors_whatever_the_order_it_was_filled_in(tmp_path: Path) -> None:
    shard = OpenShard(tmp_path, CONTRACT)
    rows = [states(3, 1), states(5, 2), states(1, 3)]
    starts = [
        shard.place(f"{n:064x}", len(row), "d" * 64, raw(ids_of(len(row))))
        for n, row in enumerate(rows)
    ]
    for start, row in reversed(list(zip(starts, rows, strict=True))):
        shard.fill(start, raw(row))
    assert not list(tmp_path.glob("*.safetensors")), "it is not found before it is whole"
    path = tmp_path / shard.close()
    assert sorted(file.suffix for file in tmp_path.iterdir()) == [".json", ".safetensors"]
    found = load_file(path)
    assert torch.equal(found["hidden_states"], torch.cat(rows))
    assert torch.equal(found["token_ids"], torch.cat([ids_of(len(row)) for row in rows]))
    assert found["offsets"].tolist() == [0, 3, 8, 9]
    with safe_open(path, framework="pt") as file:
        assert '"layers": [2, 4, 5, 8]' in file.metadata()["contract"]


def test_a_row_is_read_back_before_and_after_its_shard_is_closed(tmp_path: Path) -> None:
    shard = OpenShard(tmp_path, CONTRACT)
    shard.fill(shard.place("a" * 64, 2, "d" * 64, raw(ids_of(2))), raw(states(2, 1)))
    shard.fill(shard.place("b" * 64, 3, "d" * 64, raw(ids_of(3))), raw(states(3, 2)))
    row = Listed("b" * 64, 2, 3, "d" * 64)
    assert read_row(tmp_path, shard.name, row, CONTRACT) == (raw(states(3, 2)), b"")
    shard.close()
    assert read_row(tmp_path, shard.name, row, CONTRACT) == (raw(states(3, 2)), b"")


def test_rows_written_one_after_another_roll_over_into_shards(tmp_path: Path) -> None:
    names: list[str] = []
    writer = ShardWriter(tmp_path, CONTRACT, 6 * WIDTH, names.append)
    for number in range(5):
        writer.add(f"{number:064x}", states(3, number), ids_of(3))
    assert len(names) == 2
    writer.flush()
    writer.flush()
    assert [len(load_file(tmp_path / name)["offsets"]) - 1 for name in names] == [2, 2, 1]


# The process


class Engine:
    """Hands rows to a writer as the connector does."""

    def __init__(
        self,
        spool: Path,
        shard_bytes: int = 1 << 20,
        ring_bytes: int = 1 << 16,
        processes: int = 1,
    ):
        self.writers = Writers(str(spool), CONTRACT, shard_bytes, ring_bytes, processes)
        self.ring = Ring(ring_bytes)
        self.given = 0
        self.back = 0

    def hand_over(self, key: str, row: Any, folder: str = "", ids: str = "") -> None:
        size = aligned(row.numel() * 2) + aligned(4 * len(row))
        while (at := self.ring.take(size)) is None:
            self.collect()
            time.sleep(0.001)
        ids_at = at + aligned(row.numel() * 2)
        self.writers.memory[at : at + row.numel() * 2] = raw(row)
        self.writers.memory[ids_at : ids_at + 4 * len(row)] = raw(ids_of(len(row)))
        digest = blake3(raw(ids_of(len(row)))).hexdigest()
        self.writers.hand_over([(key, folder, ids or digest, len(row), at, ids_at)])
        self.given += 1

    def collect(self) -> None:
        for _ in range(self.writers.let_go()):
            self.ring.give_back()
            self.back += 1


def lines_until(spool: Spool, enough: Any, seconds: float = 30.0) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    until = time.monotonic() + seconds
    while not enough(found):
        assert time.monotonic() < until, found
        found += spool.new()
        time.sleep(0.005)
    return found


def of(lines: list[dict[str, Any]], what: str) -> list[dict[str, Any]]:
    return [line for line in lines if what in line]


@pytest.mark.parametrize("processes", [1, 3])
def test_rows_go_through_a_ring_that_is_smaller_than_they_are(
    tmp_path: Path, processes: int
) -> None:
    """More bytes than the ring has, several shards, every row as it was; in order from one."""
    engine = Engine(tmp_path, 200 * WIDTH, 1 << 14, processes)
    rows = {secrets.token_hex(32): states(7 + number % 5, number) for number in range(100)}
    for key, row in rows.items():
        engine.hand_over(key, row)
    spool = Spool(tmp_path)
    lines = lines_until(spool, lambda found: len(of(found, "row")) == 100)
    spool.ask_to_close()
    used = {line["shard"] for line in of(lines, "row")}
    lines += lines_until(spool, lambda found: len(of(lines + found, "closed")) == len(used))
    engine.collect()
    assert engine.back == 100
    engine.writers.end()
    written = [line["row"] for line in of(lines, "row")]
    assert written == list(rows) if processes == 1 else set(written) == set(rows)
    assert len(list(tmp_path.glob("journal-*"))) == processes
    assert {line["closed"] for line in of(lines, "closed")} == used
    assert len(used) > 3
    for line in of(lines, "row"):
        row = rows[line["row"]]
        found = load_file(tmp_path / line["shard"])["hidden_states"]
        assert torch.equal(found[line["start"] : line["start"] + line["tokens"]], row)
        assert line["digest"] == blake3(raw(row)).hexdigest()
    assert not list(tmp_path.glob("*.partial"))


def test_states_that_must_not_be_stored_are_refused_and_the_others_kept(tmp_path: Path) -> None:
    # EXT-03, EXT-07, EXT-09
    engine = Engine(tmp_path)
    zero, repeated, endless = states(4, 1), states(4, 2), states(4, 3)
    zero[2, 1] = 0
    repeated[:, 1] = repeated[:, 0]
    endless[0, 0, 0] = float("inf")
    for number, row in enumerate([states(4), zero, repeated, endless]):
        engine.hand_over(f"{number:064x}", row)
    engine.hand_over("no key", states(4))
    engine.hand_over("9" * 64, states(4), "../elsewhere")
    engine.hand_over("8" * 64, states(4), ids=blake3(b"others").hexdigest())
    lines = lines_until(Spool(tmp_path), lambda found: len(of(found, "refused")) == 6)
    engine.writers.end()
    assert [line["row"] for line in of(lines, "row")] == [f"{0:064x}"]
    assert [line["reason"] for line in of(lines, "refused")] == [
        "all-zero",
        "repeated-layer",
        "not-finite",
        "no-key",
        "no-key",
        "other-tokens",
    ]
    assert not (tmp_path.parent / "elsewhere").exists()


def test_what_a_killed_writer_left_is_closed_with_the_rows_that_are_whole(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    for number in range(3):
        engine.hand_over(f"{number:064x}", states(4, number))
    spool = Spool(tmp_path)
    lines = lines_until(spool, lambda found: len(of(found, "row")) == 3)
    engine.writers._writers[0]._process.kill()
    engine.writers._writers[0]._process.wait()
    (partial,) = tmp_path.glob("*.partial")
    with partial.open("r+b") as file:  # the last row did not reach the disk
        file.truncate(4096 + 9 * WIDTH)
    assert close_what_was_left(tmp_path) == [], "nobody had proven them"
    spool.prove()
    (name,) = close_what_was_left(tmp_path)
    assert name == lines[-1]["shard"]
    found = load_file(tmp_path / name)
    assert torch.equal(found["hidden_states"], torch.cat([states(4, 0), states(4, 1)]))
    assert close_what_was_left(tmp_path) == [name], "it is found again"


def test_an_engine_whose_writer_has_ended_is_told_so(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.writers._writers[0]._process.kill()
    engine.writers._writers[0]._process.wait()
    with pytest.raises(RuntimeError, match="has ended"):
        engine.hand_over("a" * 64, states(4))
    engine.writers.end()
