"""Phi (1, 1.5, 2) calls the output of attention and both matrices of its FFN by names of its own."""

from __future__ import annotations

from surgeon.families.decoders import Hint

PHI = Hint("phi", {"self_attn.dense": ("output",), "mlp.fc1": ("up",), "mlp.fc2": ("down",)})
