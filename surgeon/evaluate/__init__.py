"""Models beside each other on the same held-out text."""
