"""`evaluate`: a draft's acceptance length, where it will serve."""
