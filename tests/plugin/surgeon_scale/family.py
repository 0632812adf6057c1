"""Granite: Llama's tensors, other multipliers."""

from __future__ import annotations

from surgeon.families.decoders import llama_layer
from surgeon.families.family import Family

GRANITE = Family(model_type="granite", layer_parts=llama_layer)
