"""Plumbing for every room: strict YAML, progress, timing, devices, several processes. Knows nothing of models."""
