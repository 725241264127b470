"""How often Python looks for garbage, in programs that load a great deal of code."""

from __future__ import annotations

import gc

# New objects between two looks at the young ones; Python's own is 700. Each look at the old ones
# goes through all that has been loaded: it takes a fifth of the time that vLLM takes to load.
_NEW_OBJECTS = 10_000


def look_seldom() -> None:
    """For the rest of this process."""
    gc.set_threshold(_NEW_OBJECTS, *gc.get_threshold()[1:])
