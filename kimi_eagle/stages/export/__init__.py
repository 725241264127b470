"""`export`: a checkpoint that was evaluated → a folder that vLLM loads as it is."""
