"""kimi-eagle: train EAGLE-3 draft models from one manifest, and know which bytes made them."""

__version__ = "0.1.0"
