"""MPT has query, key and value in one matrix, one after the other."""

from __future__ import annotations

from surgeon.families.decoders import Hint

MPT = Hint("mpt", {"attn.Wqkv": ("query", "key", "value")})
