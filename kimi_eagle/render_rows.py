"""Show rows: what became of the records, and a row as text with what is supervised marked."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from kimi_eagle.rows_view import Bucket, RowView
from kimi_eagle.terminal import coloured, paint, plain, table

_OPEN, _CLOSE = "⟦", "⟧"


def bucket_documents(found: Sequence[Bucket]) -> dict[str, object]:
    """As `show --json` has them."""
    return {
        bucket.name: {"records": bucket.records, "examples": list(bucket.examples)}
        for bucket in found
    }


def buckets(found: Sequence[Bucket]) -> None:
    if not found:
        return
    table(
        ("BUCKET", "RECORDS", "SHARE", "MEANS", "FOR EXAMPLE"),
        [
            (
                bucket.name,
                str(bucket.records),
                f"{bucket.share:.2%}",
                bucket.meaning,
                _example(bucket) if bucket.examples else "-",
            )
            for bucket in found
        ],
    )


def _example(bucket: Bucket) -> str:
    first = bucket.examples[0]
    return f"{first['place']}: {first['detail']}" if first["detail"] else str(first["place"])


def rows(found: Sequence[RowView], *, as_json: bool) -> None:
    if as_json:
        documents = [row.document() for row in found]
        print(json.dumps(documents[0] if len(documents) == 1 else documents, ensure_ascii=False))
        return
    colour = coloured(sys.stdout)
    for index, row in enumerate(found):
        learnt = sum(row.loss_mask)
        print(
            ("\n" if index else "") + f"row {row.row} of {row.rows}, {row.split}: "
            f"{len(row.token_ids)} tokens, {learnt} supervised; from {plain(row.place)}"
        )
        print("".join(_span(text, learnt, colour) for learnt, text in row.spans))


def _span(text: str, learnt: bool, colour: bool) -> str:
    """A piece of text: what is supervised in colour, or between brackets where there is none."""
    if sys.stdout.isatty():
        text = "\n".join(plain(line) for line in text.split("\n"))
    if not learnt:
        return text
    if not colour:
        return f"{_OPEN}{text}{_CLOSE}"
    # Each line for itself: a pager that shows one of them has its colour.
    return "\n".join(paint(line, "good", sys.stdout) for line in text.split("\n"))
