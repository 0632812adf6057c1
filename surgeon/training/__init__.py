"""Training what surgery made, and nothing else."""
