"""Proof: by bytes, by logits, layer by layer."""
