"""`extract`: rows → the verifier's hidden states, kept by row."""
