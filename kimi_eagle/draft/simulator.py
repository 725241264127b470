"""Simulate serving from stored hidden states, without an engine: a program. Imports torch.

The draft is chained as serving chains it: over the verifier's own states first, then over its own
state and its own likeliest token, for every position at once. A proposal is accepted when it is
the verifier's own next token, argmax(lm_head(norm(last))), and so is every one before it. Rows are
then walked as answers are decoded (see `draft.walk`). Greedy; nothing is sampled.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from kimi_eagle.draft.checkpoint import BadCheckpoint
from kimi_eagle.draft.eagle3 import Eagle3, UnknownDraft
from kimi_eagle.draft.reading import read_draft
from kimi_eagle.draft.walk import Steps, answers, walk
from kimi_eagle.engines.launch import main
from kimi_eagle.job import StageFailed
from kimi_eagle.rows.table import VALIDATE, load_rows
from kimi_eagle.states.index import StateIndex
from kimi_eagle.states.layout import ROWS, read_rows
from kimi_eagle.states.reader import ShardReader

# Positions whose logits over the verifier's vocabulary are held at once.
_POSITIONS = 1024


def proposals(draft: Eagle3, states: Any, tokens: Any, starts: Any, draft_tokens: int) -> Any:
    """What the draft proposes after tokens of a row.

    Args:
        states: aux states [tokens, aux layers, hidden].
        tokens: the row's ids, int64 [tokens].
        starts: int64 [starts], indices from 1 of the tokens proposed after.

    Returns: int64 [starts, draft_tokens], verifier ids.
    """
    # Token c and the state of token c - 1 make position c - 1 of the draft.
    seen, chain = draft.read(tokens[1:], draft.combine(states[:-1].flatten(1)))
    begun = starts - 1
    state = seen[begun]
    proposed = [draft.proposed(state)]
    for step in range(1, draft_tokens):
        state = draft.draft(chain, begun, step, proposed[-1], state)
        proposed.append(draft.proposed(state))
    return torch.stack(proposed, dim=1)


def next_tokens(last: Any, norm: Any, lm_head: Any, eps: float) -> Any:
    """The verifier's own next token after each position: int64 [tokens].

    Args: `last` [tokens, hidden] before the final norm, which is RMSNorm in float32.
    """
    best = []
    for part in last.split(_POSITIONS):
        x = part.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * norm.float()
        best.append((x.to(lm_head.dtype) @ lm_head.T).argmax(-1))
    return torch.cat(best)


def simulate(job: Mapping[str, Any]) -> dict[str, Any]:
    """Over validation rows.

    Args (of `job`): `checkpoints`: folders, each simulated; `rows`, `states`: artifact folders;
        `root`, `registry`: of the state store; `head`: plain name → [file, tensor name] of norm
        and lm_head; `rms_norm_eps`; `draft_tokens`: numbers; `max_tokens`: of an answer;
        `rows_limit`: at most this many rows, or None; `device`.

    Returns: `checkpoints`, for each a list with the figures of each number of draft tokens.
    Raises: StageFailed.
    """
    device = job["device"]
    try:
        drafts = [read_draft(Path(folder), device) for folder in job["checkpoints"]]
    except (BadCheckpoint, UnknownDraft) as error:
        raise StageFailed(f"the draft cannot be simulated: {error}") from None
    norm, lm_head = (
        _tensor(job["head"][name]).to(device) for name in ("model.norm.weight", "lm_head.weight")
    )
    numbers: list[int] = job["draft_tokens"]
    found = [{number: Steps(number) for number in numbers} for _ in drafts]
    rows = agreed = emitted = 0
    with torch.inference_mode():
        for tokens, mask, states in _validation_rows(job):
            spans = answers(mask, job["max_tokens"])
            if not spans:
                continue
            rows += 1
            states = states.to(device)
            own = next_tokens(states[:, -1], norm, lm_head, job["rms_norm_eps"]).tolist()
            agreed += sum(own[at - 1] == tokens[at] for a, b in spans for at in range(a, b))
            emitted += sum(b - a for a, b in spans)
            after = [at for a, b in spans for at in range(a, b - 1)]
            starts = torch.tensor(after, dtype=torch.int64, device=device)
            ids = torch.tensor(tokens, dtype=torch.int64, device=device)
            for draft, steps in zip(drafts, found, strict=True):
                chains = _chains(draft, states[:, :-1], ids, starts, max(numbers))
                after_token = dict(zip(after, chains, strict=True))
                for one in steps.values():
                    for span in spans:
                        walk(one, tokens, span, after_token, own)
    if not rows:
        raise StageFailed("there is no validation row to simulate over: set val_ratio")
    return {
        "rows": rows,
        "tokens": emitted,
        # How far the rows are the verifier's own words: below 1, steps are left off.
        "own_words": agreed / emitted,
        "checkpoints": [[_figures(one) for one in steps.values()] for steps in found],
    }


def _chains(draft: Eagle3, states: Any, ids: Any, starts: Any, most: int) -> list[list[int]]:
    if not len(starts):
        return []
    chains: list[list[int]] = proposals(draft, states, ids, starts, most).tolist()
    return chains


def _figures(steps: Steps) -> dict[str, Any]:
    return {
        "draft_tokens": steps.draft_tokens,
        "acceptance_length": steps.acceptance_length,
        "rates": steps.rates,
        "draft_steps": steps.count,
        "left_off": len(steps.left_off),
    }


def _validation_rows(
    job: Mapping[str, Any],
) -> Iterator[tuple[Sequence[int], Sequence[int], Any]]:
    """(ids, loss mask, states [tokens, layers, hidden]) of the rows that validate."""
    rows = load_rows(Path(job["rows"]))
    listed = read_rows((Path(job["states"]) / ROWS).read_text("utf-8"))
    if len(listed) != len(rows):
        raise StageFailed(f"the states list {len(listed)} rows, the rows file has {len(rows)}")
    wanted = [row for row in rows.indices(VALIDATE) if listed[row].stored][: job["rows_limit"]]
    index = StateIndex(Path(job["registry"]))
    places = index.places([listed[number].key for number in wanted])
    index.close()
    reader = ShardReader(Path(job["root"]))
    for number in wanted:
        row = listed[number]
        place = places.get(row.key)
        if place is None or place.digest != row.digest:
            raise StageFailed(f"row {row.key[:12]} is not in the state store as it was extracted")
        states, ids = reader.read(place)
        if ids.tolist() != rows.ids(number).tolist():
            raise StageFailed(f"row {row.key[:12]}: its shard holds other tokens than the rows")
        yield ids.tolist(), rows.mask(number).tolist(), states


def _tensor(where: Sequence[str]) -> Any:
    path, name = where
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name)


if __name__ == "__main__":
    sys.exit(main(simulate))
