"""What a run keeps of itself until it is published: its folder, and checkpoints written beside the steps."""
