"""The saved state of a run until it is published: its work folder, and its checkpoints."""
