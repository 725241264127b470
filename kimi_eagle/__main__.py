"""`python -m kimi_eagle` is `kimi-eagle`."""

import sys

from kimi_eagle.cli import main

sys.exit(main())
