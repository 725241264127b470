"""The script that a text is mostly written in, as a stand-in for its language. Standard library.

Told from the letters by their Unicode names, nothing is guessed beyond that: English and German are
both `Latin`. Counted are letters alone, but for:

- `Code`: more than half of the text, line breaks apart, is inside fenced blocks (three backticks);
- `Digits`: no letters, or fewer than digits;
- `Symbols`: neither letters nor digits;
- `Japanese`: kana, and Han beside at least a tenth of kana; else `Han`.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from functools import lru_cache

CODE, DIGITS, SYMBOLS, JAPANESE, HAN = "Code", "Digits", "Symbols", "Japanese", "Han"
_KANA_SHARE = 0.1
_FENCED = re.compile(r"```[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
_NAMED = {"CJK": HAN, "KANGXI": HAN, "HIRAGANA": JAPANESE, "KATAKANA": JAPANESE}


def script_of(text: str) -> str:
    """The script of a text: `Latin`, `Han`, `Cyrillic`, …, or one of the names above."""
    letters: Counter[str] = Counter()
    digits = 0
    for char in text:
        if char.isalpha():
            letters[_script(char)] += 1
        else:
            digits += char.isdigit()
    fenced = sum(len("".join(block.split("\n"))) for block in _FENCED.findall(text))
    if fenced * 2 > len(text.replace("\n", "")):
        return CODE
    total = sum(letters.values())
    if digits > total:
        return DIGITS
    if not total:
        return SYMBOLS
    if letters[JAPANESE] >= _KANA_SHARE * (letters[JAPANESE] + letters[HAN]) > 0:
        letters[JAPANESE] += letters.pop(HAN, 0)
    # Of two that are as frequent, the name that comes first: equal texts give equal answers.
    return min(letters, key=lambda name: (-letters[name], name))


@lru_cache(maxsize=65_536)
def _script(char: str) -> str:
    first = unicodedata.name(char, "OTHER").split(" ")[0].split("-")[0]
    if first in ("FULLWIDTH", "HALFWIDTH", "MODIFIER", "MATHEMATICAL"):
        plain = unicodedata.normalize("NFKC", char)
        if plain != char and plain[:1].isalpha():
            return _script(plain[0])
    return _NAMED.get(first, first.capitalize())
