"""Count the supervised tokens of training rows, choose or take in a map, report what it covers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np

from kimi_eagle.artifacts.files import write_json
from kimi_eagle.draft.vocab import REPORT, BadVocab, save_map
from kimi_eagle.draft.vocab_import import import_map
from kimi_eagle.job import StageFailed
from kimi_eagle.rows.scripts import script_of
from kimi_eagle.rows.table import TRAIN, VALIDATE, Rows, load_rows
from kimi_eagle.rows.tokenizer import load_tokenizer, token_count
from kimi_eagle.stages.context import Context
from kimi_eagle.stages.vocab.choose import choose, coverage, curve, curve_sizes, rank

# Included tokens that the report names one by one.
_NAMED = 64


def run(context: Context) -> dict[str, Any]:
    params, whole = context.params, context.verifier.facts.vocab_size
    rows = load_rows(context.path("rows"))
    folder = context.path("tokenizer")
    tokenizer = load_tokenizer(folder)
    # Ids past the tokenizer's own are padding of the embedding, whatever config.json says.
    real = min(token_count(folder), whole)
    # What is kept apart to measure by has no say in the choice.
    counts, apart = _counts(rows, TRAIN), _counts(rows, VALIDATE)
    include = _include(params.include, tokenizer, counts, real)
    filled = forced = 0
    try:
        if params.map is not None:
            paths = [Path(given.path) for given in context.job.inputs["map"]]
            selected = _imported(context, paths, whole, include)
        elif params.size in (None, "full", whole):
            selected = list(range(whole))
        else:
            choice = choose(counts, params.size, whole, real, include)
            selected, filled, forced = list(choice.selected), choice.filled, choice.forced
    except (ValueError, BadVocab) as error:
        raise StageFailed(str(error)) from None
    out = context.out("vocab")
    save_map(out, selected, whole)
    chosen = set(selected)
    report = {
        "verifier_vocab_size": whole,
        "tokenizer_size": real,
        "size": len(selected),
        "imported": params.map is not None,
        "filled": filled,
        "forced": forced,
        "padding": sum(token >= real for token in selected),
        "coverage": coverage(counts, chosen),
        "coverage_val": coverage(apart, chosen),
        "include": _named(include, tokenizer, counts, chosen),
        "by_source": _parts(rows, chosen, lambda row: str(int(rows.source[row]))),
        "by_script": _parts(rows, chosen, lambda row: script_of(_said(rows, row, tokenizer))),
        "curve": curve(counts, apart, rank(counts, real, include), curve_sizes(real, len(chosen))),
    }
    write_json(out / REPORT, report)
    return report


def _counts(rows: Rows, split: int) -> dict[int, int]:
    wanted = np.repeat(rows.split == split, np.diff(rows.offsets)) & (rows.loss_mask == 1)
    tokens, counts = np.unique(rows.token_ids[wanted], return_counts=True)
    return {int(token): int(count) for token, count in zip(tokens, counts, strict=True)}


def _include(given: Any, tokenizer: Any, counts: Mapping[int, int], real: int) -> list[int]:
    """The ids to include, ascending.

    Raises:
        StageFailed: a token that the tokenizer does not have.
    """
    if given == "default":
        added = tokenizer.get_added_vocab().items()
        return sorted(token for text, token in added if text.strip() and counts.get(token))
    vocabulary = tokenizer.get_vocab()
    found = set()
    for item in given:
        if isinstance(item, str) and item not in vocabulary:
            near = ", ".join(map(repr, get_close_matches(item, vocabulary, n=3, cutoff=0.7)))
            raise StageFailed(
                f"include: the tokenizer has no token {item!r}"
                + (f"; did you mean {near}?" if near else "; give its id, or one that it has")
            )
        token = vocabulary[item] if isinstance(item, str) else item
        if token >= real:
            raise StageFailed(f"include: token id {token} is not one of the {real} that there are")
        found.add(int(token))
    return sorted(found)


def _imported(context: Context, paths: list[Path], whole: int, include: list[int]) -> list[int]:
    """The verifier ids of a map that was given; what was asked for beside it must hold of it."""
    params = context.params
    found = import_map(paths, whole, params.map.d2t)
    if params.size is not None and params.size != found.draft_size:
        raise StageFailed(
            f"the map has {found.draft_size} tokens, and size says {params.size}: leave size out, "
            "or give a map of that size"
        )
    selected: list[int] = found.t2d.nonzero().flatten().tolist()
    missing = sorted(set(include) - set(selected))
    if missing and params.include != "default":
        raise StageFailed(f"the map lacks {len(missing)} tokens to include: {missing[:8]}")
    if missing:
        context.events.note(
            f"the map lacks {len(missing)} added tokens that rows hold: {missing[:8]}; a draft "
            "can never propose them"
        )
    return selected


def _named(
    include: list[int], tokenizer: Any, counts: Mapping[int, int], chosen: set[int]
) -> list[dict[str, Any]]:
    texts = tokenizer.convert_ids_to_tokens(include[:_NAMED])
    return [
        {"id": token, "token": text, "count": counts.get(token, 0), "known": token in chosen}
        for token, text in zip(include, texts, strict=False)
    ]


def _parts(rows: Rows, chosen: set[int], part_of: Any) -> dict[str, dict[str, Any]]:
    """Coverage of training rows and of those kept apart, by parts that rows belong to."""
    known: Any = np.zeros(int(rows.token_ids.max(initial=0)) + 1, bool)
    known[[token for token in chosen if token < len(known)]] = True
    found: dict[str, Counter[str]] = {}
    for row, (covered, total) in enumerate(_covered(rows, known)):
        part = found.setdefault(part_of(row), Counter())
        name = "val" if rows.split[row] == VALIDATE else "train"
        part.update({f"rows_{name}": 1, f"tokens_{name}": total, f"covered_{name}": covered})
    return {
        part: {
            "rows": counted["rows_train"],
            "rows_val": counted["rows_val"],
            "tokens": counted["tokens_train"],
            "tokens_val": counted["tokens_val"],
            "coverage": _share(counted["covered_train"], counted["tokens_train"]),
            "coverage_val": _share(counted["covered_val"], counted["tokens_val"]),
        }
        for part, counted in sorted(found.items())
    }


def _covered(rows: Rows, known: Any) -> Iterator[tuple[int, int]]:
    """(covered, all) supervised tokens of each row."""
    for row in range(len(rows)):
        ids = rows.ids(row)[rows.mask(row) == 1]
        yield int(known[ids].sum()), len(ids)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _said(rows: Rows, row: int, tokenizer: Any) -> str:
    """The text of a row's supervised tokens."""
    ids = rows.ids(row)[rows.mask(row) == 1].tolist()
    return str(tokenizer.decode(ids, skip_special_tokens=True))
