"""The norms of weights that `diff` shows: of every type, without torch, against what torch says."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Project

numpy = pytest.importorskip("numpy", reason="norms of weights need numpy")
torch = pytest.importorskip("torch", reason="its norms are compared with torch's")

from safetensors.torch import load_file, save_file  # noqa: E402

from kimi_eagle.draft import norms  # noqa: E402


def pair(folder: Path, a: dict[str, Any], b: dict[str, Any]) -> dict[str, norms.TensorNorms]:
    for name, tensors in (("a", a), ("b", b)):
        (folder / name).mkdir()
        save_file(tensors, folder / name / "model.safetensors")
    return {item.name: item for item in norms.norms(folder / "a", folder / "b")}


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_norms_are_those_of_torch(
    tmp_path: Path, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norms, "_CHUNK", 100)  # in several parts
    torch.manual_seed(0)
    x = torch.randn(33, 17, dtype=torch.float64).to(kind)
    y = (x.double() + 0.01 * torch.randn(33, 17, dtype=torch.float64)).to(kind)
    found = pair(tmp_path, {"w": x}, {"w": y})["w"]
    difference = y.double() - x.double()
    assert found.a == pytest.approx(float(x.double().norm()), rel=1e-12)
    assert found.b == pytest.approx(float(y.double().norm()), rel=1e-12)
    assert found.difference == pytest.approx(float(difference.norm()), rel=1e-12)
    assert found.relative == pytest.approx(float(difference.norm() / x.double().norm()), rel=1e-12)
    assert found.note is None


def test_a_long_sum_of_bfloat16_is_not_rounded_as_bfloat16(tmp_path: Path) -> None:
    x = torch.full((3000, 1000), 2.0**-10, dtype=torch.bfloat16)
    found = pair(tmp_path, {"w": x}, {"w": -x})["w"]
    assert found.a == pytest.approx(2.0**-10 * 3e6**0.5, rel=1e-12)
    assert (found.b, found.relative) == (found.a, pytest.approx(2.0))


def test_what_cannot_be_subtracted_is_said(tmp_path: Path) -> None:
    one, two = torch.ones(2, 3), torch.ones(2, 3)
    a = {"gone": one, "shape": one.clone(), "type": one.clone(), "bad": one * float("nan")}
    b = {"new": two, "shape": torch.ones(6), "type": two.half(), "bad": two.clone()}
    a |= {"f8": torch.ones(4).to(torch.float8_e4m3fn), "empty": torch.ones(0)}
    b |= {"f8": torch.ones(4).to(torch.float8_e4m3fn), "empty": torch.ones(0)}
    found = pair(tmp_path, a, b)
    assert {name: item.note for name, item in found.items()} == {
        "bad": "not finite",
        "empty": None,
        "f8": "type F8_E4M3",
        "gone": "in a alone",
        "new": "in b alone",
        "shape": "shape [2, 3] and [6]",
        "type": "type F32 and F16",
    }
    assert found["gone"].a == found["new"].b == pytest.approx(6**0.5)
    assert found["type"].difference == 0
    assert (found["bad"].a, found["bad"].b) == (None, pytest.approx(6**0.5))
    assert (found["empty"].a, found["empty"].relative) == (0.0, None)
    json.dumps([item.__dict__ for item in found.values()], allow_nan=False)


def test_norms_load_no_torch() -> None:
    code = "import sys, kimi_eagle.draft.norms; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_diff_shows_the_norms_of_what_was_trained_apart(head_project: Project) -> None:
    first = head_project.submit().outputs["head"]["head"]
    (shard,) = (
        path
        for path in (head_project.folder / "verifier").glob("model-*.safetensors")
        if "language_model.model.norm.weight" in load_file(path)
    )
    tensors = load_file(shard)
    tensors["language_model.model.norm.weight"] *= 2
    save_file(tensors, shard, {"format": "pt"})
    second = head_project.submit().outputs["head"]["head"]
    answer = head_project.cli("diff", first, second, "--json")
    (norm,) = answer.json["weights"]
    assert norm["b"] == pytest.approx(2 * norm["a"])
    assert norm["relative"] == pytest.approx(1.0)
    whole = head_project.cli("diff", first, second, "--json", "--all").json["weights"]
    assert [item["difference"] for item in whole[1:]] == [0.0] * (len(whole) - 1)
    assert len(whole) > 1
    row = next(
        line.split("\t")
        for line in head_project.cli("diff", first, second).out.splitlines()
        if line.startswith(norm["name"])
    )
    assert row[4] == "1"
    assert f"| {norm['name']} |" in head_project.cli("diff", first, second, "--md").out
    shutil.rmtree(head_project.root / "objects" / first[:2] / first)
    gone = head_project.cli("diff", first, second, "--json")
    assert "weights" not in gone.json
    assert f"no norms of weights: {first[:12]} is not in the store any more" in gone.err
