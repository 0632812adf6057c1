"""Training of the tensors that a surgery added, or that a config selects, and of nothing else."""
