"""`train`: hidden states → a draft."""
