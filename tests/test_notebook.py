"""The notebook of the documentation: that it is one, and that it runs."""

from __future__ import annotations

import ast
import contextlib
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from cases import ROOT

NOTEBOOK = ROOT / "docs" / "examples" / "from-python.ipynb"


def cells() -> Iterator[str]:
    document = json.loads(NOTEBOOK.read_text("utf-8"))
    yield from (
        "".join(cell["source"]) for cell in document["cells"] if cell["cell_type"] == "code"
    )


def test_the_notebook_is_one_and_holds_no_outputs() -> None:
    nbformat.validate(nbformat.read(NOTEBOOK, as_version=4))
    document = json.loads(NOTEBOOK.read_text("utf-8"))
    assert not any(cell.get("outputs") for cell in document["cells"])


@pytest.fixture
def beside_the_notebook(monkeypatch: pytest.MonkeyPatch, store: Path) -> None:
    monkeypatch.chdir(NOTEBOOK.parent)
    monkeypatch.setenv("KIMI_EAGLE_ROOT", str(store))


@pytest.mark.slow
def test_the_notebook_runs(demo: dict[str, dict[str, Any]], beside_the_notebook: None) -> None:
    shown: list[Any] = []
    printed = io.StringIO()
    names: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.redirect_stdout(printed):
        for text in cells():
            _run_cell(text, names, shown.append)
    assert names["outcome"].status == "done"
    assert {stage.disposition for stage in names["outcome"].stages} == {"reused"}
    assert names["made"]["draft"] == demo["draft"]["outputs"]["checkpoint"]
    assert "acceptance length 2." in printed.getvalue()
    assert "chats.jsonl" in printed.getvalue()
    assert names["draft"].config.draft_vocab_size == 512
    assert shown[-1]["draft"] == "run"
    assert shown[-1]["states"] == "reuse"


def _run_cell(text: str, names: dict[str, Any], show: Callable[[Any], None]) -> None:
    """Execute a cell as a notebook does: the value of a last expression is shown."""
    body = ast.parse(text).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), str(NOTEBOOK), "exec"), names)
    if last is not None:
        show(eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), names))
