"""Learn new text and keep what the base knows, by one command; and the demo, which does so on a small base."""
