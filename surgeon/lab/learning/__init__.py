"""Learn new text and keep what the base knows, by one command."""
