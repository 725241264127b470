"""Where stages run. An executor starts a task described by JSON, and knows nothing else."""
