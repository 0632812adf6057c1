"""Checkpoints on disk: safetensors headers, folders and the Hub as sources, the staged atomic writer."""
