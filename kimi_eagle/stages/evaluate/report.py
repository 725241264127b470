"""From what an engine said to figures: per set and in all. Pure.

A *run* is one temperature of one engine: `{temperature, requests}`, every request with `set`,
`conversation`, `turn`, `token_ids`, `committed`. What ran without the draft comes first: its
prompts are those of the others too, so that requests of the same place can be held together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kimi_eagle.stages.evaluate.acceptance import pool, standard_error

Run = Mapping[str, Any]

# The name under which all sets are pooled; no set can be called so, see `SetName`.
ALL = "all sets"
# What sampled tokens' log-probabilities may lie apart with and without a draft: so many nats, and
# so many standard errors. Sampling that keeps the distribution stays well within. vLLM's CPU build
# 0.32.0 does not: it loses the temperatures on the way to the rejection sampler (its stand-in for
# `expand_kernel` writes nothing into float tensors), and was seen at -21 nats beside -0.03.
_APART, _ERRORS = 0.1, 4.0


@dataclass(frozen=True)
class Decoded:
    """All that was decoded with one number of draft tokens at one temperature."""

    draft_tokens: int
    drafted: Run
    plain: Run
    """The same prompts without the draft, in the same shape of batch."""
    again: Run | None = None
    """The same without the draft in single streams, where `plain` is of batches."""
    batch: int = 1

    @property
    def temperature(self) -> float:
        return float(self.drafted["temperature"])

    def sets(self) -> list[str]:
        """The sets' names, and `ALL` last where there are several."""
        names = list(dict.fromkeys(one["set"] for one in self.drafted["requests"]))
        return [*names, ALL] if len(names) > 1 else names


def measured(decoded: Decoded, name: str, seed: int) -> dict[str, Any]:
    """The figures of one set, or of `ALL`; no speeds, which are never the same twice."""
    drafted, plain = (_of(run, name) for run in (decoded.drafted, decoded.plain))
    found = pool([one["committed"] for one in drafted], decoded.draft_tokens)
    greedy = decoded.temperature == 0
    return {
        "set": name,
        "draft_tokens": decoded.draft_tokens,
        "temperature": decoded.temperature,
        "seed": None if greedy else seed,
        "batch": decoded.batch,
        "prompts": len(drafted),
        "conversations": len({(one["set"], one["conversation"]) for one in drafted}),
        "tokens": sum(len(one["token_ids"]) for one in drafted),
        "acceptance_length": found.acceptance_length,
        "acceptance_length_per_request": found.acceptance_length_per_request,
        "acceptance_length_reason": found.reason,
        "standard_error": found.standard_error,
        "includes_bonus": True,
        "per_position": list(found.per_position),
        "draft_steps": found.draft_steps,
        **_agreement(decoded, drafted, plain, name),
    }


def _agreement(decoded: Decoded, drafted: list[Any], plain: list[Any], name: str) -> dict[str, Any]:
    """How many outputs are those without the draft, token for token.

    In batches bf16 sums differ whatever the draft, so what two runs without it show is beside it,
    and nothing is called identical. What is sampled is drawn anew, and not compared.
    """
    if decoded.temperature > 0:
        reason = "sampled: what is drawn differs, only its distribution is the same"
        none = {"outputs_equal": None, "outputs_identical": None, "outputs_reason": reason}
        return {**none, **_likelihood(drafted, plain)}
    equal = _equal(drafted, plain)
    if decoded.again is None:
        identical = equal == len(drafted)
        return {"outputs_equal": equal, "outputs_identical": identical, "outputs_reason": None}
    return {
        "outputs_equal": equal,
        "outputs_identical": None,
        "outputs_reason": f"decoded {decoded.batch} at once: the shape of a batch alone changes "
        "outputs, see outputs_equal_without_draft",
        "outputs_equal_without_draft": _equal(plain, _of(decoded.again, name)),
    }


def _likelihood(drafted: list[Any], plain: list[Any]) -> dict[str, Any]:
    """How likely the verifier finds what was drawn, per token, with the draft and without it.

    Sampling with a draft must keep the verifier's distribution, so both are means of the same
    thing; where they lie far apart it was not kept. In nats.
    """
    (ours, error), (theirs, other) = (_per_token(requests) for requests in (drafted, plain))
    alike = None
    if ours is not None and theirs is not None and error is not None and other is not None:
        alike = abs(ours - theirs) <= _APART + _ERRORS * math.hypot(error, other)
    return {
        "log_probability": ours,
        "log_probability_without_draft": theirs,
        "sampled_alike": alike,
    }


def _per_token(requests: list[Any]) -> tuple[float | None, float | None]:
    """(Mean log-probability of a token, its standard error over requests)."""
    amounts = [one.get("log_probability") for one in requests]
    counts = [len(one["token_ids"]) for one in requests]
    if None in amounts or not sum(counts):
        return None, None
    return sum(amounts) / sum(counts), standard_error(amounts, counts)


def _equal(some: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> int:
    pairs = zip(some, others, strict=True)
    return sum(a["token_ids"] == b["token_ids"] for a, b in pairs)


def _of(run: Run, name: str) -> list[Any]:
    return [one for one in run["requests"] if name in (ALL, one["set"])]


def speed(decoded: Decoded, name: str) -> dict[str, Any]:
    """Tokens per second with and without the draft, and their ratio. Batches are timed as a
    whole, so of them there is the speed of all sets alone."""
    drafted, plain = (_rate(run, name) for run in (decoded.drafted, decoded.plain))
    return {
        "set": name,
        "draft_tokens": decoded.draft_tokens,
        "temperature": decoded.temperature,
        "batch": decoded.batch,
        "tokens_per_second": drafted,
        "tokens_per_second_without_draft": plain,
        "speedup": drafted / plain if drafted is not None and plain else None,
    }


def _rate(run: Run, name: str) -> float | None:
    requests = _of(run, name)
    tokens = sum(len(one["token_ids"]) for one in requests)
    if "seconds" in run:
        seconds = run["seconds"] if len(requests) == len(run["requests"]) else None
    else:
        seconds = sum(one["seconds"] for one in requests)
    return round(tokens / seconds, 2) if seconds else None


def headline(measurements: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures that an evaluation is known by: all sets together, the first number of draft
    tokens, the first temperature."""
    first: Mapping[str, Any] | None = None
    for one in measurements:
        if first is None or (
            one["set"] == ALL
            and (one["draft_tokens"], one["temperature"])
            == (first["draft_tokens"], first["temperature"])
        ):
            first = one
    assert first is not None, "a set is never empty"
    return {name: value for name, value in first.items() if name != "set"}


def gap(simulated: float | None, served: Mapping[str, Any]) -> float | None:
    """How far the simulation lies above (+) or below (-) what was served, relative to it; None
    without both, or where decoding was not greedy."""
    length = served["acceptance_length"]
    if simulated is None or length is None or served["temperature"] != 0:
        return None
    return float(simulated / length - 1)
