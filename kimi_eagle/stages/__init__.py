"""The kinds of stages: each a folder with `spec.py` (pure) and `run.py` (heavy)."""
