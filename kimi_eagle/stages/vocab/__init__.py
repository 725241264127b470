"""`vocab`: rows → the draft's vocabulary."""
