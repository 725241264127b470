"""Views as HTML: Jinja2 with everything escaped, and the words that templates share."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from kimi_eagle.identity import short
from kimi_eagle.terminal import human_seconds, human_size
from kimi_eagle.ui import chart
from kimi_eagle.ui.marks import mark
from kimi_eagle.ui.view import View, address

HERE = Path(__file__).parent


def html(view: View, *, path: str, query: str = "", report: bool = False) -> str:
    """A view as a page.

    Args:
        path: where it is, without `.json`.
        report: without links and scripts, its style inside.
    """
    text: str = (
        _environment()
        .get_template(view.template)
        .render(
            view=view,
            doc=view.document,
            title=view.title,
            path=path,
            json_path=f"{path}.json" + (f"?{query}" if query else ""),
            report=report,
            **view.more,
        )
    )
    return text


def style() -> Markup:
    """The style sheet, for a file that has to have all in it."""
    return Markup((HERE / "static" / "style.css").read_text("utf-8"))  # noqa: S704 (our own file)


@cache
def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals |= {"address": address, "mark": mark, "style": style}
    made.filters |= {
        "short": short,
        "size": human_size,
        "when": when,
        "took": took,
        "figure": figure,
        "cell": cell,
        "percent": lambda value: "-" if value is None else f"{value:.1%}",
    }
    return made


def when(moment: str | None) -> str:
    """A time of the registry to the second, in UTC."""
    return "-" if moment is None else moment[:19].replace("T", " ")


def took(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.1f} s" if seconds < 60 else human_seconds(seconds)


def figure(value: Any) -> str:
    """A number for people."""
    if value is None:
        return "-"
    return chart.short(value) if isinstance(value, float) else str(value)


def cell(value: Any) -> str:
    """Any value of a record as text; a digest by its start."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return short(value) if len(value) in (40, 64) and value.isalnum() else value
    return json.dumps(value, ensure_ascii=False)
