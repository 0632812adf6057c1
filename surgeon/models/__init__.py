"""Running checkpoints: loaded whole or layer by layer, on tokens of a text, and compared by logits."""
