"""Running checkpoints, loaded whole or layer by layer, on tokens of a text, and comparing their logits."""
