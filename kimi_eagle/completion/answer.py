"""`kimi-eagle _complete SHELL WORD…`: what the scripts of the shells ask."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence

from kimi_eagle.completion.words import complete

# Where bash parts words besides blanks.
_BREAKS = frozenset("=:")


def answer(
    arguments: Sequence[str],
    parser_of: Callable[[Iterable[str]], argparse.ArgumentParser],
    commands: Sequence[str],
) -> int:
    """Print what the last word could become.

    Args:
        arguments: the shell's name and the words after the program's name, up to the one at the
            cursor.
        parser_of, commands: see `words.complete`.
    """
    shell, *words = arguments or ["bash"]
    parted = False
    if shell == "bash":
        words, parted = _joined(words)
    found = complete(parser_of, commands, words)
    if parted:
        # bash completes what follows the break alone.
        held = max(words[-1].rfind(sign) for sign in _BREAKS) + 1
        found.words = [(word[held:], what) for word, what in found.words]
    print("\n".join(found.lines(described=shell != "bash")))
    return 0


def _joined(words: Sequence[str]) -> tuple[list[str], bool]:
    """Words as they were typed, and whether the last was parted."""
    found: list[str] = []
    glue = False
    for word in words:
        is_break = bool(word) and set(word) <= _BREAKS
        if found and (glue or is_break):
            found[-1] += word
        else:
            found.append(word)
        parted = glue or is_break
        glue = is_break
    return found, bool(words) and parted
