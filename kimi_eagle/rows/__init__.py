"""Conversations → token-exact rows: reading, rendering, splitting, and the rows file."""
