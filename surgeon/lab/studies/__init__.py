"""Compare ways of learning new text without forgetting: fair frontiers of finished runs."""
