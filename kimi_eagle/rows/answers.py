"""Answers of a verifier as they were emitted, kept so that none is asked for twice. Imports numpy.

`<root>/answers/<set>/<digest>.safetensors`: a set is one verifier asked in one way (see
`set_digest`); each file holds answers in the order they came, and is named after its bytes:

- `prompts` uint8 [answers, 32]: the digest of each prompt's ids
- `token_ids` int32 [tokens]; `offsets` int64 [answers + 1]: what was emitted, its end included
- `stopped` uint8 [answers]: 1 where the verifier ended its turn, 0 where the limit did

A worker writes files into its job's folder and announces them; the coordinator gives them their
place. Nothing but time is lost when they go.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save_file

from kimi_eagle.identity import digest_bytes, digest_document
from kimi_eagle.job import ANSWERS

STOP, LENGTH = "stop", "length"
_SUFFIX = ".safetensors"
_SAVE_SECONDS = 30.0


@dataclass(frozen=True)
class Answer:
    """What the verifier emitted after a prompt."""

    token_ids: Any
    """int32 [tokens]; with the token that ended the turn last, where `finish` is `stop`."""
    finish: str
    """`stop`: the verifier ended its turn; `length`: the limit cut it off."""


@dataclass(frozen=True)
class Prompt:
    """A prompt as token ids, and how many tokens its answer may have."""

    token_ids: tuple[int, ...]
    limit: int

    @property
    def key(self) -> str:
        """The digest of the ids as little-endian int32."""
        return digest_bytes(np.asarray(self.token_ids, "<i4").tobytes())


def set_digest(verifier: str, engine: str, sampling: Mapping[str, Any]) -> str:
    """What answers have in common that may stand in for each other: whose they are, from which kind
    of engine, and how they were sampled (their limit apart: see `Answers.get`)."""
    return digest_document(
        "answers/1", {"verifier": verifier, "engine": engine, "sampling": dict(sampling)}
    )


def answers_folder(root: Path, name: str) -> Path:
    """Where the answers of a set are kept."""
    return root / ANSWERS / name


def seed_of(seed: int, prompt: Prompt) -> int:
    """The seed of one answer, below 2^63: of the prompt's own, so that it does not matter which
    other prompts are asked."""
    return int(digest_document("answer-seed/1", [seed, prompt.key])[:15], 16)


class Answers:
    """Answers by prompt."""

    def __init__(self) -> None:
        self._known: dict[str, Answer] = {}

    def __len__(self) -> int:
        return len(self._known)

    def add(self, key: str, answer: Answer) -> None:
        """Keep an answer; of two to one prompt the one that ended, or the longer, or the first."""
        before = self._known.get(key)
        if before is None or _rank(answer) > _rank(before):
            self._known[key] = answer

    def get(self, prompt: Prompt) -> Answer | None:
        """The answer under the prompt's limit: one with a higher limit begins with it."""
        found = self._known.get(prompt.key)
        if found is None:
            return None
        if len(found.token_ids) > prompt.limit:
            return Answer(found.token_ids[: prompt.limit], LENGTH)
        if found.finish == LENGTH and len(found.token_ids) < prompt.limit:
            return None
        return found

    def load(self, folder: Path) -> list[Path]:
        """Take in every file of a folder; returns those that are damaged, which are passed over."""
        damaged = []
        for path in sorted(folder.glob(f"*{_SUFFIX}")):
            data = path.read_bytes()
            if digest_bytes(data) != path.stem:
                damaged.append(path)
                continue
            self.take(load(data))
        return damaged

    def load_new(self, folder: Path) -> None:
        """Take in files that were just written, and are not named after their bytes yet."""
        for path in sorted(folder.glob(f"*{_SUFFIX}")):
            self.take(load(path.read_bytes()))

    def take(self, arrays: Mapping[str, Any]) -> None:
        """Take in the arrays of one file."""
        offsets, ids = arrays["offsets"], arrays["token_ids"]
        for row, prompt in enumerate(arrays["prompts"]):
            finish = STOP if arrays["stopped"][row] else LENGTH
            self.add(bytes(prompt).hex(), Answer(ids[offsets[row] : offsets[row + 1]], finish))


def _rank(answer: Answer) -> tuple[bool, int]:
    return answer.finish == STOP, len(answer.token_ids)


class AnswerWriter:
    """Collects answers and writes a file of them now and then."""

    def __init__(self, folder: Path, save_every: int, announce: Callable[[str], None]):
        """Args: `save_every`: answers in a file; one is also written after 30 seconds.
        `announce` is called with the name of each finished file."""
        self._folder = folder
        self._save_every = save_every
        self._announce = announce
        self._new: list[tuple[str, Answer]] = []
        self._saved_at = time.monotonic()

    def add(self, key: str, answer: Answer) -> None:
        self._new.append((key, answer))
        late = time.monotonic() - self._saved_at >= _SAVE_SECONDS
        if len(self._new) >= self._save_every or late:
            self.flush()

    def flush(self) -> None:
        """Write what has been collected."""
        self._saved_at = time.monotonic()
        if not self._new:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"{secrets.token_hex(8)}{_SUFFIX}"
        answers = [answer for _, answer in self._new]
        lengths = [len(answer.token_ids) for answer in answers]
        prompts = b"".join(bytes.fromhex(key) for key, _ in self._new)
        save_file(
            {
                "prompts": np.frombuffer(prompts, np.uint8).reshape(-1, 32),
                "token_ids": np.concatenate(
                    [np.asarray(answer.token_ids, np.int32) for answer in answers]
                ),
                "offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
                "stopped": np.array([a.finish == STOP for a in answers], np.uint8),
            },
            self._folder / name,
        )
        self._new = []
        self._announce(name)
