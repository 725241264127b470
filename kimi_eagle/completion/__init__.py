"""Shell completion. What answers a shell imports argparse and sqlite3: a key press waits for it."""
