"""The name by which decoders of the installed transformers take a cache: `cache`, before 5.24 `past_key_values`."""

from __future__ import annotations

from transformers import LlamaForCausalLM

from surgeon.anatomy.running import cache_argument
from surgeon.runtime.graft import cache_in

__all__ = ["CACHE", "cache_in"]

CACHE = cache_argument(LlamaForCausalLM)
