"""Tensors are taken out of a verifier byte for byte, into the file that safetensors would write."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from kimi_eagle.stages.head.copy import copy, find


def test_the_copy_is_the_file_that_safetensors_writes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    dtypes = [
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.float64,
    ]
    tensors = {
        f"model.{number % 3}.ü{number}.weight": torch.randn(3, number + 1).to(dtype)
        for number, dtype in enumerate([*dtypes, *dtypes])
    }
    source = tmp_path / "source.safetensors"
    save_file({**tensors, "between": torch.ones(5)}, source)
    plain = {f"plain.{name}": find(source, name) for name in reversed(tensors)}
    assert copy(plain, tmp_path / "copy") == sum(item.nbytes for item in tensors.values())
    save_file(
        {f"plain.{name}": tensor for name, tensor in tensors.items()},
        tmp_path / "expected",
        metadata={"format": "pt"},
    )
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "expected").read_bytes()


def test_one_tensor_may_be_there_under_two_names(tmp_path: Path) -> None:
    weight = torch.randn(4, 3)
    save_file({"embed": weight}, tmp_path / "source")
    found = find(tmp_path / "source", "embed")
    copy({"embed_tokens": found, "lm_head": found}, tmp_path / "copy")
    read = load_file(tmp_path / "copy")
    assert torch.equal(read["embed_tokens"], weight)
    assert torch.equal(read["lm_head"], weight)
