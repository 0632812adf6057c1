"""Attention implementations registered with transformers: its own flash attention over torch's, and broken ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers.modeling_flash_attention_utils as flash
from torch import Tensor
from torch.nn import functional as F
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

FLASH = "flash_by_segments"


class Flash:
    """In the place of flash_attn's functions; `seen` are the boundaries of documents that they were given."""

    def __init__(self) -> None:
        self.seen: list[list[int] | None] = []

    def func(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Rows of one length, B T H D."""
        self.seen.append(None)
        rows, length = q.shape[:2]
        found = self._attend(*(each.flatten(0, 1) for each in (q, k, v)), [length] * rows, **options)
        return found.view(q.shape)

    def varlen(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:
        """Segments one after the other, N H D."""
        lengths = cu_seqlens_q.diff().tolist()
        assert torch.equal(cu_seqlens_q, cu_seqlens_k)
        assert sum(lengths) == len(q)
        assert int(max_seqlen_q or 0) == max(lengths)
        self.seen.append(lengths)
        return self._attend(q, k, v, lengths, softmax_scale=softmax_scale, causal=causal, window_size=window_size)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lengths: list[int],
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:
        found = []
        for parts in zip(*(each.split(lengths) for each in (q, k, v)), strict=True):
            count = len(parts[0])
            seen = torch.ones(count, count, dtype=torch.bool)
            seen = seen.tril() if causal else seen
            seen = seen.triu(-window_size[0]) if window_size[0] >= 0 else seen
            given = (each.transpose(0, 1)[None] for each in parts)
            made = F.scaled_dot_product_attention(*given, attn_mask=seen, scale=softmax_scale, enable_gqa=True)
            found.append(made[0].transpose(0, 1))
        return torch.cat(found)


def register(monkeypatch: pytest.MonkeyPatch, name: str, attend: Any, mask: Any = None) -> None:
    """Add an implementation to transformers' own."""
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, name, attend)
    if mask is not None:
        monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, name, mask)


@pytest.fixture
def by_segments(monkeypatch: pytest.MonkeyPatch) -> Flash:
    """transformers' own flash attention under the name `FLASH`, on a CPU."""
    made, plain = Flash(), flash._lazy_imports

    def imports(implementation: str | None, *given: Any, **named: Any) -> Any:
        if implementation != FLASH:
            return plain(implementation, *given, **named)
        return made.func, made.varlen, None, flash._pad_input, flash._unpad_input

    monkeypatch.setattr(flash, "_lazy_imports", imports)
    monkeypatch.setattr(flash, "_loaded_implementation", None)
    register(monkeypatch, FLASH, flash_attention_forward, flash_attention_mask)
    return made


def no_mask(module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: Any, **options: Any) -> Any:
    """A plugin's attention that takes no mask and no boundaries."""
    return sdpa_attention_forward(module, query, key, value, None, **options | {"is_causal": True})


def whole_rows(*, position_ids: Any = None, mask_function: Any = None, **options: Any) -> Any:
    """A mask that leaves documents out of account."""
    from transformers.masking_utils import causal_mask_function

    return sdpa_mask(mask_function=causal_mask_function, **options)


def one_token_more(**options: Any) -> Any:
    """A mask in which the first token of each document sees the last one of the document before."""
    mask = sdpa_mask(**options)
    if mask is None or mask.shape[-1] != mask.shape[-2]:
        return mask
    return mask | torch.ones_like(mask).tril().triu(-1)


def leaky_layer(number: int) -> Any:
    """Attention that isolates in all layers but one."""

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        if module.layer_idx == number:
            return no_mask(module, query, key, value, None, **options)
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    return attend
