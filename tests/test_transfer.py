"""The state store behind speculators' own data set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Answer, Project

from kimi_eagle.rows.table import load_rows
from kimi_eagle.states.layout import ROWS, StateRow, read_rows, write_rows


def _folder(project: Project, answer: Answer, stage: str) -> Path:
    (digest,) = answer.outputs[stage].values()
    return project.root / "objects" / digest[:2] / digest


@pytest.mark.slow
def test_speculators_reads_rows_from_the_store(
    first_extraction: tuple[Project, Answer], tmp_path: Path
) -> None:
    from datasets import Dataset
    from speculators.train.data import ArrowDataset, SampleUnavailable

    from kimi_eagle.draft.transfer import StoreTransfer

    project, answer = first_extraction
    rows = load_rows(_folder(project, answer, "rows"))
    data = Dataset.from_dict(
        {
            "input_ids": [rows.ids(row).tolist() for row in range(len(rows))],
            "loss_mask": [rows.mask(row).tolist() for row in range(len(rows))],
            "seq_len": [len(rows.ids(row)) for row in range(len(rows))],
        }
    )
    data.set_format("torch")
    data.save_to_disk(str(tmp_path / "data"))
    # One row whose states were refused.
    listed = read_rows((_folder(project, answer, "states") / ROWS).read_text("utf-8"))
    listed[2] = StateRow(listed[2].key, "", listed[2].tokens, "all-zero")
    (tmp_path / ROWS).write_text(write_rows(listed), "utf-8")
    transfer = StoreTransfer.open(tmp_path, project.root)
    samples: Any = ArrowDataset(
        512, str(tmp_path / "data"), transfer=transfer, on_missing="skip", train_ratio=1.0
    )
    assert len(samples) == len(rows)
    for row in range(len(rows)):
        sample = samples[row]
        if row == 2:
            assert isinstance(sample, SampleUnavailable)
            continue
        assert sample["hidden_states"].shape == (listed[row].tokens, 3 * 128)
        assert sample["hidden_states"].dtype == torch.bfloat16
        assert sample["verifier_last_hidden_states"].shape == (listed[row].tokens, 128)
        assert sample["input_ids"].tolist() == rows.ids(row).tolist()
    assert transfer.get_cached(len(rows)) is None
    assert transfer.get_cached(-1) is None
    with pytest.raises(RuntimeError, match="extract the rows first"):
        transfer.get_generated({})
