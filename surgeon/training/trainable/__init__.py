"""What trains: the set a manifest or a config names, and a LoRA over a frozen model."""
