"""Compare models on the same held-out text and by their answers."""
