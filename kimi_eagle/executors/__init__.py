"""Where stages run. An executor starts a job described by JSON, and knows nothing else."""
