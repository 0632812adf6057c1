"""Compare models on the same held-out text."""
