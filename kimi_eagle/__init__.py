"""kimi-eagle: train EAGLE-3 draft models from one manifest, and know which bytes made them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from os import PathLike

    from kimi_eagle.api import Root

__all__ = ["__version__", "open"]
__version__ = "0.1.0"


def open(root: str | PathLike[str] | None = None) -> Root:
    """A root: registry, artifacts and runs, as the command line's `--root`.

    It need not be there yet: the first submit makes it. Without one: $KIMI_EAGLE_ROOT, else `runs`.
    """
    # Imported here: `import kimi_eagle` loads nothing.
    from kimi_eagle.api import Root

    return Root(root)
