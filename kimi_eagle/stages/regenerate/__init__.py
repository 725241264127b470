"""`regenerate`: prompts → the verifier's own answers, as rows."""
