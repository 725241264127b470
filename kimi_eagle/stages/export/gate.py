"""What an evaluation must show before a checkpoint is released. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeGuard

from kimi_eagle.stages.export.spec import Gate

# A draft that is right about its second token less often than this, of the times it was right
# about its first, is fed other states than it was trained on; poor drafts reach several times it.
COLLAPSE = 0.05


@dataclass(frozen=True)
class Shortfall:
    """One thing that an evaluation lacks for a release."""

    what: str
    found: object
    needed: object
    by: float | None = None
    """How much is missing, where both are numbers."""

    def __str__(self) -> str:
        short = f" ({self.by:.4g} short)" if self.by is not None else ""
        return f"{self.what} is {self.found}, needed is {self.needed}{short}"


def belongs(evaluation: Mapping[str, Any], checkpoint: str, verifier: str) -> list[Shortfall]:
    """Whether it is this checkpoint that was evaluated, with this verifier.

    Args: `checkpoint`, `verifier`: digests of what is to be released.
    """
    return [
        Shortfall(f"the {name} that was evaluated", evaluation.get(name), digest)
        for name, digest in (("checkpoint", checkpoint), ("verifier", verifier))
        if evaluation.get(name) != digest
    ]


def gate(evaluation: Mapping[str, Any], needed: Gate) -> list[Shortfall]:
    """What an evaluation lacks; empty when it may be released.

    Shares that are missing, outside 0..1 or rising and lengths outside 1..k+1 are measuring errors
    and never pass; with `refuse_collapse` nor does a draft that never helps, or is right once and
    then never again.
    """
    lacking = _length("acceptance length", evaluation, needed.min_acceptance_length)
    if evaluation.get("engine_kind") == "endpoint" and not needed.served_elsewhere:
        wanted = "vLLM started with this checkpoint (or `served_elsewhere: true`)"
        lacking.append(Shortfall("what was measured", "a draft at an endpoint", wanted))
    measurements = evaluation.get("measurements") or []
    for name, least in needed.min_of_sets.items():
        # The first of a set has the headline's number of draft tokens and temperature.
        found: Mapping[str, Any] = next((one for one in measurements if one.get("set") == name), {})
        lacking += _length(f"acceptance length of {name}", found, least)
    lacking += _positions(evaluation, needed)
    lacking += _simulated(evaluation, needed.max_simulated_gap)
    return lacking + _agreement(evaluation, needed)


def _length(what: str, measured: Mapping[str, Any], least: float) -> list[Shortfall]:
    length, limit = measured.get("acceptance_length"), measured.get("draft_tokens")
    if not _number(length) or type(limit) is not int:
        return [Shortfall(what, length, f"at least {least}")]
    if not 1 <= length <= limit + 1:
        return [Shortfall(what, length, f"within 1 and {limit + 1}")]
    if length < least:
        return [Shortfall(what, round(length, 4), f"at least {least}", least - length)]
    return []


def _positions(evaluation: Mapping[str, Any], needed: Gate) -> list[Shortfall]:
    limit = evaluation.get("draft_tokens")
    positions = _shares(evaluation.get("per_position"))
    if positions is None or len(positions) != limit:
        return [
            Shortfall(
                "acceptance per position",
                evaluation.get("per_position"),
                f"{limit} shares within 0 and 1, none above the one before",
            )
        ]
    first, least = positions[0], needed.min_first_position
    what = "acceptance at the first position"
    if first < least:
        return [Shortfall(what, round(first, 4), f"at least {least}", least - first)]
    if needed.refuse_collapse and first == 0:
        return [Shortfall(what, 0.0, "some: the draft never helps")]
    if needed.refuse_collapse and len(positions) > 1 and positions[1] < COLLAPSE * first:
        return [
            Shortfall(
                "acceptance past the first position",
                positions,
                f"at least {COLLAPSE:.0%} of the one before: so little means that the draft and "
                "the engine disagree on its states",
            )
        ]
    return []


def _simulated(evaluation: Mapping[str, Any], most: float | None) -> list[Shortfall]:
    if most is None:
        return []
    gap = evaluation.get("simulated_gap")
    what = "the gap between simulated and served acceptance length"
    if not _number(gap):
        wanted = f"at most {most:.1%}: name `states` in the evaluation, and decode greedily first"
        return [Shortfall(what, gap, wanted)]
    if not abs(gap) <= most:  # NaN is no number to pass by
        return [Shortfall(what, f"{gap:+.1%}", f"within {most:.1%}", abs(gap) - most)]
    return []


def _agreement(evaluation: Mapping[str, Any], needed: Gate) -> list[Shortfall]:
    equal, asked = evaluation.get("outputs_equal"), evaluation.get("prompts")
    what = "agreement with decoding without the draft"
    found = f"{equal} of {asked} outputs"
    lacking = []
    if evaluation.get("sampled_alike") is False:
        lacking.append(
            Shortfall(
                "the log-probability of sampled tokens",
                evaluation.get("log_probability"),
                f"that without the draft, {evaluation.get('log_probability_without_draft')}",
            )
        )
    if needed.outputs_identical and evaluation.get("outputs_identical") is not True:
        reason = evaluation.get("outputs_reason")
        wanted = "all of them" + (f" ({reason})" if reason else "")
        lacking.append(Shortfall(what, found, wanted))
    least = needed.min_output_agreement
    if least is not None:
        of = evaluation.get("outputs_equal_without_draft", asked)
        if not _number(equal) or not _number(of) or of == 0:
            lacking.append(Shortfall(what, found, f"{least:.1%} of them"))
        elif equal / of < least:
            lacking.append(Shortfall(what, f"{equal / of:.1%}", f"{least:.1%}", least - equal / of))
    return lacking


def _number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shares(value: object) -> list[float] | None:
    """Shares within 0 and 1, none above the one before it; None for anything else."""
    if not isinstance(value, list | tuple) or not all(map(_number, value)):
        return None
    shares = [1.0, *map(float, value)]
    falling = all(0 <= after <= before for before, after in pairwise(shares))
    return shares[1:] if falling else None
