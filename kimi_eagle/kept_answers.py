"""Give new answers of the verifier their place in the store (see `rows.answers`)."""

from __future__ import annotations

import os
from pathlib import Path

from kimi_eagle.artifacts.digests import Digests
from kimi_eagle.artifacts.files import sync_folder
from kimi_eagle.job import ANSWERS


def take_answers(root: Path, digests: Digests, staged: Path, name: str) -> None:
    """Keep a file of answers that a worker announced: whoever asks the same is given them.

    Args:
        name: the set that they belong to.
    """
    digest, _ = digests.of(staged)
    target = root / ANSWERS / name / f"{digest}{staged.suffix}"
    target.parent.mkdir(parents=True, exist_ok=True)
    staged.chmod(0o444)
    with staged.open("rb") as file:
        os.fsync(file.fileno())
    staged.rename(target)
    sync_folder(target.parent)
