"""MPT has query, key and value in one matrix, one after the other."""

from __future__ import annotations

from surgeon.anatomy.decoders import Hint

MPT = Hint("mpt", {"attn.Wqkv": ("query", "key", "value")})
