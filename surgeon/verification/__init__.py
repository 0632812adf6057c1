"""Proof: an output against its base, its plan and its manifest; any two checkpoints against each other."""
