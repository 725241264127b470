"""Runs: a page of fifty, newest first, with one search box."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from kimi_eagle.coordinator import LOST, RUNNING
from kimi_eagle.registry.browse import PAGE, RunRow, count_runs, runs_page
from kimi_eagle.registry.search import RUN, Search
from kimi_eagle.registry.store import AmbiguousDigest, UnknownDigest
from kimi_eagle.registry.terms import Term, terms
from kimi_eagle.ui import chart
from kimi_eagle.ui.trainings import spark
from kimi_eagle.ui.view import Asked, Moved, View, address
from kimi_eagle.ui.views.finding import lost_runs, seconds_of

_HASH = re.compile(r"[0-9a-f]{4,64}")


def runs(asked: Asked) -> View | Moved:
    text = asked.one("q").strip()[:1000]
    found = terms(text)
    candidates: list[tuple[str, str]] = []
    if len(found) == 1 and not found[0].name and _HASH.fullmatch(text.lower()):
        try:
            digest, kind = Search(asked.registry).find(text)
            if kind == RUN:
                return Moved(f"/runs/{digest}")
            if asked.registry.artifact(digest) is not None:
                return Moved(f"/artifacts/{digest}")
            candidates = [(digest, kind)]
        except AmbiguousDigest as error:
            candidates = list(error.candidates)
        except UnknownDigest:
            pass  # then it may be part of a name
    lost = lost_runs(asked)
    before, after = asked.number("before") or None, asked.one("after")
    page = runs_page(
        asked.registry,
        found,
        lost,
        before=before,
        after=asked.number("after") if after else None,
    )
    rows = [_as_it_is(row, lost) for row in page.rows]
    total = count_runs(asked.registry, [], lost)
    matching = count_runs(asked.registry, found, lost) if found else total
    document: dict[str, Any] = {
        "query": text,
        "total": total,
        "matching": matching,
        "runs": [row.document() for row in rows],
        "newer": address("/runs.json", q=text, after=page.newer) if page.newer else None,
        "older": address("/runs.json", q=text, before=page.older) if page.older else None,
        "candidates": [{"digest": digest, "kind": kind} for digest, kind in candidates],
    }
    more = {
        "rows": rows,
        "took": {row.run.id: seconds_of(row.run) if row.run.ended_at else None for row in rows},
        "sparks": {row.run.id: _spark(asked, row) for row in rows},
        "newer": address("/runs", q=text, after=page.newer) if page.newer else None,
        "older": address("/runs", q=text, before=page.older) if page.older else None,
        "newest": address("/runs", q=text),
        "excluded": _excluded(asked, found, lost) if found and not matching else [],
        "first": before is None and not after,
        "size": PAGE,
    }
    return View("runs.html", "Runs", document, more, live=True)


def _as_it_is(row: RunRow, lost: frozenset[str]) -> RunRow:
    """The row; what was under way in a run that is lost is lost with it."""
    if row.run.status != RUNNING or row.run.id not in lost:
        return row
    counts = {LOST if how == RUNNING else how: count for how, count in row.counts.items()}
    return replace(row, run=replace(row.run, status=LOST), counts=counts)


def _spark(asked: Asked, row: RunRow) -> Any:
    return chart.sparkline(spark(asked.root, *row.training)) if row.training else ""


def _excluded(asked: Asked, found: list[Term], lost: frozenset[str]) -> list[dict[str, Any]]:
    """Of each term, how many runs it lets through alone, and how many the others do without it:
    so it is seen which of them excluded everything."""
    return [
        {
            "term": term.text,
            "alone": count_runs(asked.registry, [term], lost),
            "without": count_runs(asked.registry, [t for t in found if t is not term], lost),
        }
        for term in found
    ]
