"""Files on disk: written whole or not at all, digested once, kept by what they hold."""
