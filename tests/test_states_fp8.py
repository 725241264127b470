"""Hidden states as fp8: what they lose, where they lie, and that they are others than bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import WITH_STATES, Project, new_project
from safetensors.torch import load_file

from kimi_eagle.states import fp8
from kimi_eagle.states.contract import LayerContract
from kimi_eagle.states.index import Place
from kimi_eagle.states.layout import shard_path
from kimi_eagle.states.reader import ShardReader
from kimi_eagle.states.shard_file import Listed, read_row
from kimi_eagle.states.shards import ShardWriter
from kimi_eagle.states.spool import Spool, close_what_was_left
from kimi_eagle.states.stored_row import Lost, as_stored, store
from kimi_eagle.states.stored_row import states_of as stored_states

CONTRACT = LayerContract((2, 4, 8), 64, "fp8", "vllm")
WITH_FP8 = WITH_STATES.replace("{kind: extract,", "{kind: extract, dtype: fp8,")


def drawn(tokens: int, seed: int = 0) -> Any:
    """States among which the first token's are a thousand times as large, as verifiers have it."""
    states = torch.randn(tokens, 3, 64, generator=torch.Generator().manual_seed(seed))
    states[0] *= 1000
    return states.to(torch.bfloat16)


def test_every_number_is_off_by_a_sixteenth_at_most_or_by_next_to_nothing() -> None:
    """e4m3 has 3 bits of mantissa; below its smallest normal number steps are 2^-9 of a scale."""
    states = drawn(50).float()
    back = fp8.decode(*fp8.encode(drawn(50))).float()
    scales = states.abs().amax(-1, keepdim=True) / 448
    allowed = torch.maximum(states.abs() / 16, scales * 2**-10)
    # What is read again is rounded to bfloat16.
    assert bool(((back - states).abs() <= allowed * 1.001 + states.abs() / 256).all())
    largest = states.abs().amax(-1)
    assert torch.allclose(back.abs().amax(-1), largest, rtol=1 / 128)


def test_what_is_lost_is_measured_by_layer() -> None:
    states = drawn(40)
    states[:, 1] = 1.0  # a layer of which nothing is lost
    lost = Lost()
    for part in (states[:15], states[15:]):
        lost.add(store(part, CONTRACT).lost)
    back = as_stored(states, CONTRACT).float() - states.float()
    expected = [
        float(back[:, layer].norm() / states[:, layer].float().norm()) for layer in range(3)
    ]
    assert lost.relative() == pytest.approx(expected, abs=1e-5)
    assert expected[1] == 0
    assert 0.01 < expected[0] < 0.04
    plain = LayerContract((2, 4, 8), 64, "bfloat16", "vllm")
    lost = Lost()
    lost.add(store(states, plain).lost)
    assert lost.relative() is None


def test_it_takes_half_and_a_little_of_the_real_model() -> None:
    real = LayerContract((2, 30, 58, 61), 7168, "fp8", "vllm")
    assert real.engine_bytes_per_token == 57_344
    assert real.bytes_per_token == 28_672 + 16


def write(folder: Path, rows: dict[str, Any]) -> tuple[ShardWriter, list[str]]:
    folder.mkdir()
    names: list[str] = []
    writer = ShardWriter(folder, CONTRACT, 1 << 30, names.append)
    for key, states in rows.items():
        writer.add(key, states, torch.arange(len(states)))
    return writer, names


def test_a_shard_is_readable_by_anybody_and_by_us(tmp_path: Path) -> None:
    rows = {key: drawn(tokens, tokens) for key, tokens in (("a", 5), ("b", 9), ("c", 1))}
    writer, names = write(tmp_path / "staging", rows)
    writer.flush()
    shard = "5" * 64
    path = shard_path(tmp_path, shard)
    path.parent.mkdir(parents=True)
    (tmp_path / "staging" / names[0]).rename(path)
    plain = load_file(path)
    assert plain["hidden_states"].dtype == torch.float8_e4m3fn
    assert plain["scales"].shape == (15, 3)
    whole = torch.cat([as_stored(states, CONTRACT) for states in rows.values()])
    assert torch.equal(fp8.decode(plain["hidden_states"], plain["scales"]), whole)
    reader, start = ShardReader(tmp_path), 0
    for key, states in rows.items():
        read, ids = reader.read(Place(shard, start, len(states), writer.digests[key]))
        assert torch.equal(read, as_stored(states, CONTRACT))
        assert ids.tolist() == list(range(len(states)))
        start += len(states)


def test_what_a_killed_writer_left_is_closed_scales_and_all(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    rows = {"a": drawn(5), "b": drawn(7, 1)}
    writer, _ = write(folder, rows)
    Spool(folder).prove()
    (name,) = (path.with_suffix(".safetensors").name for path in folder.glob("*.partial"))
    listed = Listed("b", 5, 7, writer.digests["b"])
    before = read_row(folder, name, listed, CONTRACT)
    assert torch.equal(
        stored_states(*map(bytearray, before), CONTRACT), as_stored(rows["b"], CONTRACT)
    )
    assert writer._open is not None
    writer._open.release()  # its lock, as when it is killed
    assert close_what_was_left(folder) == [name]
    assert read_row(folder, name, listed, CONTRACT) == before
    assert load_file(folder / name)["scales"].shape == (12, 3)
    assert not list(folder.glob("*.scales"))


def test_extracted_as_fp8_rows_have_keys_of_their_own_and_what_they_lose_is_told(
    extracted: Project,
) -> None:
    before = extracted.submit()
    extracted.write(WITH_FP8)
    answer = extracted.submit()
    assert answer.code == 0, answer.err
    (stage,) = (item for item in answer.json["stages"] if item["name"] == "states")
    assert stage["disposition"] == "executed"
    metrics = stage["metrics"]
    assert metrics["rows_extracted"] == metrics["rows"] == 10
    assert metrics["agreement"] >= 0.97
    assert len(metrics["fp8_error"]) == 4
    assert all(0.005 < error < 0.05 for error in metrics["fp8_error"])
    ours, theirs = extracted.states_of(answer), extracted.states_of(before)
    assert not ours.keys() & theirs.keys()
    for (one, _), (other, _) in zip(ours.values(), theirs.values(), strict=True):
        assert one.dtype == torch.bfloat16
        assert torch.equal(one, fp8.decode(*fp8.encode(other)))
    assert extracted.submit().dispositions["states"] == "reused"


DRAFT = """\
  draft: {kind: train, head: head, states: states, vocab: vocab, epochs: 1, ttt_steps: 1,
    batch_tokens: 512}
"""


@pytest.mark.slow
def test_vllms_rows_are_stored_as_fp8_on_their_way_and_trained_on(tmp_path: Path) -> None:
    manifest = WITH_FP8.replace("{kind: transformers}", "{kind: vllm}") + DRAFT
    project = new_project(tmp_path / "project", manifest)
    answer = project.submit()
    assert answer.code == 0, answer.err
    metrics = {stage["name"]: stage["metrics"] for stage in answer.json["stages"]}
    assert metrics["states"]["agreement"] >= 0.97
    assert all(0.005 < error < 0.05 for error in metrics["states"]["fp8_error"])
    assert len(project.states_of(answer)) == 10
    project.write(manifest.replace("dtype: fp8, ", ""))
    plain = project.submit()
    assert plain.code == 0, plain.err
    (draft,) = (stage for stage in plain.json["stages"] if stage["name"] == "draft")
    losses = [found["val_loss"] for found in (metrics["draft"], draft["metrics"])]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
