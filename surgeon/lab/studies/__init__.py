"""Compare ways of learning new text without forgetting, by fair frontiers of finished runs."""
