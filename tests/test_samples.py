"""Sample files of other trainers: which are read, and what is refused."""

from __future__ import annotations

import fcntl
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import case_input
from safetensors.torch import save_file

from kimi_eagle.states.samples import BadSample, read_ids, read_sample, sample_files

IDS, MASK = torch.tensor([11, 12, 13]), torch.tensor([0, 1, 1])


def _layers(dtype: Any = torch.bfloat16) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(3, 8, generator=generator).bfloat16().to(dtype) for _ in range(4)]


def _v1(path: Path, **other: Any) -> Path:
    torch.save(
        {"input_ids": IDS, "hidden_states": _layers(), "loss_mask": MASK} | other,
        path,
    )
    return path


def test_a_v1_sample_is_read_as_it_is(tmp_path: Path) -> None:
    path = _v1(tmp_path / "data_0.pt")
    found = read_sample(path, "v1")
    assert torch.equal(found.token_ids, IDS)
    assert found.loss_mask is not None
    assert torch.equal(found.loss_mask, MASK)
    assert found.states is not None
    assert torch.equal(found.states, torch.stack(_layers(), 1))
    assert torch.equal(read_ids(path, "v1"), IDS)


@pytest.mark.parametrize("axes", ["tokens,layers,hidden", "layers,tokens,hidden"])
def test_the_order_of_the_axes_is_told_never_guessed(tmp_path: Path, axes: str) -> None:
    """EXT-08: also where both would fit."""
    path = tmp_path / "data_0.safetensors"
    states = torch.stack(_layers()[:3], 1)
    stored = states if axes[0] == "t" else states.transpose(0, 1).contiguous()
    save_file({"input_ids": IDS, "loss_mask": MASK, "hidden_states": stored}, path)
    found = read_sample(path, "v1", axes).states
    assert found is not None
    assert torch.equal(found, states)
    assert stored.shape == (3, 3, 8)


def test_only_exact_names_count() -> None:
    """EXT-16: int("1_0") is 10."""
    names = ["hs_1_0", "hs_10", "hs_+1", "hs_01", "hs_٣", "hs_", "hs_2", "xhs_2", "hs_0"]
    paths = [Path(f"{name}.safetensors") for name in names]
    paths += [Path("hs_7.safetensors.lock"), Path("hs_7.safetensors.tmp"), Path("hs_3.pt")]
    files, others = sample_files(paths, "speculators")
    found = [(number, path.stem) for number, path in files]
    assert found == [(0, "hs_0"), (2, "hs_2"), (10, "hs_10")]
    assert len(others) == len(paths) - 3


def test_the_public_file_of_the_kind_name_is_ignored() -> None:  # EXT-16
    path = case_input("hidden/hs_1_0.safetensors")
    assert sample_files([path], "speculators") == ([], [path])


def test_two_files_of_one_number_are_refused() -> None:
    with pytest.raises(BadSample, match="are both sample 1: remove one"):
        sample_files([Path("data_1.pt"), Path("data_1.safetensors")], "v1")


def test_a_file_that_is_being_written_is_refused_and_a_stale_lock_is_not(tmp_path: Path) -> None:
    """EXT-17: the lock of a process that died is nobody's."""
    path, lock = tmp_path / "hs_7.safetensors", tmp_path / "hs_7.safetensors.lock"
    lock.write_text("999999", "utf-8")
    assert len(sample_files([path], "speculators")[0]) == 1
    with lock.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(BadSample, match="is still being written"):
            sample_files([path], "speculators")


class _Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("was-run",)


def test_no_code_of_a_file_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = _v1(tmp_path / "data_0.pt", more=_Evil())
    with pytest.raises(BadSample, match="could run code of whoever wrote it"):
        read_sample(path, "v1")
    (tmp_path / "data_1.pt").write_bytes(pickle.dumps(_Evil()))
    with pytest.raises(BadSample):
        read_sample(tmp_path / "data_1.pt", "v1")
    assert not (tmp_path / "was-run").exists()


def test_wider_types_are_taken_where_nothing_is_lost(tmp_path: Path) -> None:
    path = _v1(tmp_path / "data_0.pt", hidden_states=_layers(torch.float32))
    found = read_sample(path, "v1").states
    assert found is not None
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, torch.stack(_layers(), 1))
    fine = _layers(torch.float32)
    fine[2][1, 1] += 1e-4
    path = _v1(tmp_path / "data_1.pt", hidden_states=fine)
    with pytest.raises(BadSample, match="is float32, and bfloat16 would lose something of it"):
        read_sample(path, "v1")


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"loss_mask": MASK[:2]}, "3 input_ids, and a loss_mask of 2"),
        ({"input_ids": IDS.float()}, r"`input_ids` is torch.float32 \[3\]; expected whole"),
        ({"input_ids": IDS[None]}, r"`input_ids` is torch.int64 \[1, 3\]"),
        ({"input_ids": None}, "has no `input_ids`"),
        ({"hidden_states": [*_layers()[:3], torch.ones(2, 8)]}, r"shapes \[\[2, 8\], \[3, 8\]\]"),
        ({"hidden_states": torch.ones(3, 8)}, "neither a list of layers nor of three axes"),
    ],
)
def test_what_is_no_v1_sample_is_refused(tmp_path: Path, other: dict[str, Any], says: str) -> None:
    with pytest.raises(BadSample, match=says):
        read_sample(_v1(tmp_path / "data_0.pt", **other), "v1")


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    whole = _v1(tmp_path / "data_0.pt").read_bytes()
    (tmp_path / "data_1.pt").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "hs_1.safetensors").write_bytes(b"\x08")
    for name, form in (("data_1.pt", "v1"), ("hs_1.safetensors", "speculators")):
        for read in (read_sample, read_ids):
            with pytest.raises(BadSample, match="cannot be read"):
                read(tmp_path / name, form)


def test_public_states_are_read() -> None:
    found = read_sample(case_input("hidden/hs_good.safetensors"), "speculators")
    assert found.states is not None
    assert found.states.shape == (6, 4, 8)
    assert found.loss_mask is None
