"""Granite: Llama's tensors, other multipliers."""

from __future__ import annotations

from surgeon.families.decoders import usual_layer
from surgeon.families.family import Family

GRANITE = Family(model_type="granite", layer_parts=usual_layer(mlp_bias=True))
