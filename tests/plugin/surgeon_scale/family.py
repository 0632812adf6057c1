"""Granite: Llama's tensors, other multipliers. SmolLM3: the same, some layers without rotary embeddings."""

from __future__ import annotations

from surgeon.families.decoders import usual_layer
from surgeon.families.family import Family

GRANITE = Family(model_type="granite", layer_parts=usual_layer(mlp_bias=True))
SMOLLM3 = Family(model_type="smollm3", layer_parts=usual_layer(mlp_bias=True), tied_by_default=True)
