"""The proof that stored last states are the verifier's: they must give its own next tokens.

argmax(lm_head(norm(last))) is computed from the state alone and compared with the token that the
engine itself ranks first after the same prefix, at every position of the first rows, before
anything is stored. A state taken one layer early or after the norm agrees far less often; bf16
ties leave some per cent of disagreement (98.4 % agreement was measured on SmolLM2-135M).

The same is asked of every other way in which the states could be meant (`Convention`): when the
one that is claimed does not hold, the error says which does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open

from kimi_eagle.job import StageFailed

# Positions that are enough to tell a wrong convention from ties.
POSITIONS = 512

# Positions that other conventions are tried on: each takes as long as the claimed one.
_TRIED = 128

# Of few positions this many may differ, and up to a fifth of them: one tie in 20 is not 3 %.
_TIES = 3

# An RMSNorm leaves mean square 1, but for bf16, once its weight is divided out; a state before the
# norm has another in every position.
_NORMED = 0.02

TOKENS_FIRST = "tokens,layers,hidden"
LAYERS_FIRST = "layers,tokens,hidden"
HIDDEN_BEFORE_LAYERS = "tokens,hidden,layers"


@dataclass(frozen=True)
class Convention:
    """A way to find the last states in what an engine gave."""

    slot: int
    """Which layer slot holds them."""
    normed: bool = False
    """Whether they are after the final norm already."""
    axes: str = TOKENS_FIRST
    """The order in which the numbers lie in memory."""
    shift: int = 0
    """1: the state at a position is that of the position before it; -1: of the one after."""

    def says(self, layers: Sequence[int] | None) -> str:
        parts = [f"layer slot {self.slot}"]
        if layers is not None:
            parts[0] += f" (layer {layers[self.slot]})"
        parts[0] += " is the last layer's, "
        parts[0] += "after the final norm already" if self.normed else "before the final norm"
        if self.axes != TOKENS_FIRST:
            parts.append(f"axes lie in the order {self.axes}")
        if self.shift:
            where = "before" if self.shift > 0 else "after"
            parts.append(f"each state belongs to the position {where} its own")
        return ", ".join(parts)


class Probe:
    """Counts agreement over positions."""

    def __init__(
        self,
        head: Mapping[str, Sequence[str]],
        eps: float,
        layers: Sequence[int] | None = None,
    ):
        """Args:
        head: plain name → (file, tensor name) of norm and lm_head.
        eps: of the final norm.
        layers: the ids of the layer slots, for messages.
        """
        self._norm = _load(head["model.norm.weight"]).float()
        self._lm_head = _load(head["lm_head.weight"])
        self._eps = eps
        self._layers = layers
        self._agreed = 0
        self._normed = 0
        self._tried: dict[Convention, int] = {}
        self._tried_on = 0
        self._slots = 0
        self.count = 0

    def add(self, states: Any, tokens: Sequence[int], known: Any | None = None) -> None:
        """Take one row, or the beginning of one.

        Args:
            states: [positions, layers, hidden]; the last slot is the one that is claimed to hold
                the last layer's output before the final norm.
            tokens: the token that the engine ranks first after each position.
            known: bool [positions], where `tokens` says something; None: everywhere.
        """
        after = torch.tensor([int(token) for token in tokens])
        if states.dim() != 3 or len(after) != len(states):
            raise ValueError(f"states {list(states.shape)} for {len(after)} next tokens")
        self._slots = states.shape[1]
        known = torch.ones(len(after), dtype=torch.bool) if known is None else torch.tensor(known)
        at = known.nonzero().flatten()
        last = states[at, -1]
        best = self._best(last, normed=False)
        self._agreed += int((best == after[at]).sum())
        self._normed += int(self._is_normed(last).sum())
        self.count += len(at)
        few = min(len(at), _TRIED - self._tried_on)
        if few > 0:
            self._try_others(states, after, known, at[:few], best[:few])
            self._tried_on += few

    def _try_others(self, states: Any, after: Any, known: Any, at: Any, best: Any) -> None:
        for convention, vectors in _readings(states, at):
            given = best
            if convention != self.claimed:
                given = self._best(vectors, normed=convention.normed)
            self._count(convention, int((given == after[at]).sum()))
        for shift in (1, -1):
            # Of a neighbour that is not there, or says nothing, nothing is known.
            beside = (at - shift).clamp(0, len(after) - 1)
            told = known[beside] & (beside == at - shift)
            moved = Convention(states.shape[1] - 1, shift=shift)
            self._count(moved, int(((best == after[beside]) & told).sum()))

    def _count(self, convention: Convention, agreed: int) -> None:
        self._tried[convention] = self._tried.get(convention, 0) + agreed

    def _best(self, vectors: Any, *, normed: bool) -> Any:
        """The token ranked first from each state: int64 [positions]."""
        x = vectors.float()
        if not normed:
            # RMSNorm as DeepSeek-V3 and Llama define it: x / sqrt(mean(x²) + eps) · weight.
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._eps) * self._norm
        return (x.to(self._lm_head.dtype) @ self._lm_head.T).argmax(-1)

    def _is_normed(self, vectors: Any) -> Any:
        """Whether each state looks like the output of the final norm: bool [positions]."""
        used = self._norm != 0
        square = (vectors.float()[:, used] / self._norm[used]).pow(2).mean(-1)
        return (square - 1).abs() < _NORMED

    @property
    def claimed(self) -> Convention:
        return Convention(self._slots - 1)

    @property
    def agreement(self) -> float:
        """Share of all positions where the claimed convention gives the engine's own token."""
        return self._agreed / self.count if self.count else 0.0

    @property
    def best_other(self) -> tuple[Convention, float] | None:
        """The convention other than the claimed one that agrees most often, and how often."""
        others = [item for item in self._tried.items() if item[0] != self.claimed]
        if not others:
            return None
        convention, agreed = max(others, key=lambda item: item[1])
        return convention, agreed / self._tried_on

    @property
    def next_best(self) -> dict[str, Any] | None:
        """`best_other` for metrics: `{convention, agreement, chosen, positions}`; `chosen` is the
        agreement of the claimed one on the same positions."""
        found = self.best_other
        if found is None:
            return None
        return {
            "convention": found[0].says(self._layers),
            "agreement": found[1],
            "chosen": self._tried.get(self.claimed, 0) / self._tried_on,
            "positions": self._tried_on,
        }

    def require(self, least: float) -> None:
        """Raises: StageFailed when fewer than `least` of the positions agree."""
        if not self.count:
            raise StageFailed("no position was probed: nothing says what the states are")
        self._require_before_norm(least)
        wrong = self.count - self._agreed
        if wrong > max((1 - least) * self.count, min(_TIES, self.count // 5)):
            raise StageFailed(
                f"the last states give the verifier's own next token at only {self.agreement:.1%} "
                f"of {self.count} positions (min_agreement {least:.0%}): the layer convention does "
                f"not hold for this engine; nothing was stored. {self._what_fits(least)}"
            )

    def require_best(self) -> None:
        """The same where nobody knows the engine's own tokens and `add` was given those of the
        text: people's choice is not always the verifier's, but no other convention may fit better.

        Raises: StageFailed.
        """
        self._require_before_norm(1.0)
        found = self.best_other
        if found is None:
            raise StageFailed("no position was probed: nothing says what the states are")
        ours = self._tried.get(self.claimed, 0)
        # Three standard deviations of a share of so many positions, at its widest.
        if found[1] * self._tried_on - ours > 1.5 * self._tried_on**0.5:
            raise StageFailed(
                f"the last states give the next token of the text at {ours / self._tried_on:.1%} "
                f"of {self._tried_on} positions, and at {found[1]:.1%} if "
                f"{found[0].says(self._layers)}: the layers are not what they are said to be"
            )

    def _require_before_norm(self, least: float) -> None:
        # Where the norm's weight is nearly the same throughout, the argmax cannot tell.
        if self._normed >= max(1, min(least, 0.97) * self.count):
            raise StageFailed(
                f"the last states are after the final norm: their mean square is 1 at "
                f"{self._normed} of {self.count} positions, the norm's weight divided out. Stored "
                "are those before it; nothing was stored"
            )

    def _what_fits(self, least: float) -> str:
        found = self.best_other
        if found is None:
            return "No other convention was tried"
        tried = (
            f"{found[0].says(self._layers)} ({found[1]:.1%} of {self._tried_on} positions, "
            f"against {self._tried.get(self.claimed, 0) / self._tried_on:.1%})"
        )
        if found[1] >= least:
            return f"What fits instead: {tried}"
        return f"No other convention fits either; the next best: {tried}"


def _readings(states: Any, at: Any) -> Iterator[tuple[Convention, Any]]:
    """Every convention, and what it takes for the last states of some positions.

    Args: states: [positions, layers, hidden]; at: int64 [some].
    Yields: vectors [some, hidden]. Another order of the axes reads the same numbers in memory.
    """
    positions, slots, hidden = states.shape
    flat = states.contiguous().flatten()
    layers_first = flat.view(slots, positions, hidden)
    hidden_first = flat.view(positions, hidden, slots)
    for slot in range(slots):
        for normed in (False, True):
            yield Convention(slot, normed), states[at, slot]
        if positions > 1 and slots > 1:
            yield Convention(slot, axes=LAYERS_FIRST), layers_first[slot, at]
        if slots > 1:
            yield Convention(slot, axes=HIDDEN_BEFORE_LAYERS), hidden_first[at, :, slot]


def probe_rows(offsets: Sequence[int]) -> int:
    """How many of the first rows make up enough positions."""
    rows = 1
    while rows < len(offsets) - 1 and offsets[rows] - offsets[0] < POSITIONS:
        rows += 1
    return rows


def _load(where: Sequence[str]) -> Any:
    path, name = where
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name)
