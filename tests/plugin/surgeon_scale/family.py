"""GLM stores gate and up of its FFN in one matrix, which no name that most decoders share says."""

from __future__ import annotations

from surgeon.families.decoders import Hint

GLM = Hint("glm", {"mlp.gate_up_proj": ("gate", "up")})
