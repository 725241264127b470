"""`head`: what training needs of the verifier, and nothing else."""
