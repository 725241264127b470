"""YAML text → `Manifest`, with every error at its line and column."""
