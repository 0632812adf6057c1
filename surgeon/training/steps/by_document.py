"""Attention computed document by document: where packed documents are kept apart, no score across them is computed.

For a sequence of several documents transformers gives `sdpa` a mask. On a CPU `sdpa` then computes all T² scores of a
sequence of T tokens and discards the masked ones. Here attention runs on each document of n tokens separately: it
computes n² / 2 scores where attention is causal, without a mask, else n². A token sees the same tokens; sums are taken
in another order and in float32, so results differ by rounding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_SDPA = "sdpa"


class Span(NamedTuple):
    """The tokens `begin` to `end` of a sequence, which see no others; `causal`: each sees all of them up to itself."""

    begin: int
    end: int
    causal: bool


def spans_of(mask: Tensor) -> list[list[Span]] | None:
    """Return the documents of each sequence by the mask (B 1 T T, true: seen); None where it keeps no documents apart.

    A document begins where a token does not see the token before it. It is also None where a token sees another
    document, or the mask has another form.
    """
    if mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[2] != mask.shape[3]:
        return None
    length, found = mask.shape[-1], []
    causal = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
    for seen in mask[:, 0]:
        begins = [0, *(torch.nonzero(~seen.diagonal(-1)).flatten() + 1).tolist()]
        row, within = [], 0
        for begin, end in zip(begins, [*begins[1:], length], strict=True):
            own = seen[begin:end, begin:end]
            within += int(own.sum())
            row.append(Span(begin, end, bool((own == causal[: end - begin, : end - begin]).all())))
        if within != int(seen.sum()):
            return None
        found.append(row)
    return found if any(len(row) > 1 for row in found) else None


def _attended(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **more: Any
) -> Tensor:
    """Return what transformers' sdpa computes; on a CPU in float32, rounded to the dtype of `query`.

    In a narrower dtype torch's backward takes 4 ms there for the shortest document, and twice float32's time for long
    ones. The forward is in float32 without gradients too, so that a model's loss is the same with and without them.
    """
    dtype = query.dtype
    if query.device.type == "cpu" and dtype.itemsize < 4:
        query, key, value = query.float(), key.float(), value.float()
        if attention_mask is not None and attention_mask.is_floating_point():
            attention_mask = attention_mask.float()
    result: Tensor = sdpa_attention_forward(module, query, key, value, attention_mask, **more)[0]
    return result.to(dtype)


@contextlib.contextmanager
def by_document() -> Iterator[None]:
    """Make `sdpa` attend document by document within the context, on a CPU and where its mask keeps documents apart.

    Nothing changes where `sdpa` is already replaced.
    """
    # Layers share a mask, which is analysed once.
    known = WeakTensorKeyDictionary()

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **more: Any
    ) -> tuple[Tensor, None]:
        """Attend document by document where the mask keeps documents apart on a CPU, else as transformers' sdpa."""
        spans = None
        if attention_mask is not None and query.device.type == "cpu" and more.get("position_bias") is None:
            if attention_mask not in known:
                known[attention_mask] = spans_of(attention_mask)
            spans = known[attention_mask]
        shape = (len(query), query.shape[2], key.shape[2])
        if spans is None or attention_mask is None or shape != (len(spans), *attention_mask.shape[2:]):
            return _attended(module, query, key, value, attention_mask, **more), None
        rows = []
        for number, row in enumerate(spans):
            # Unlike a slice's, the gradient of a split is no tensor of the whole size for each document.
            lengths = [end - begin for begin, end, _ in row]
            queries, keys, values = (torch.split(each[number : number + 1], lengths, 2) for each in (query, key, value))
            parts = []
            for (begin, end, causal), q, k, v in zip(row, queries, keys, values, strict=True):
                seen = None if causal else attention_mask[number : number + 1, :, begin:end, begin:end]
                options = more | {"is_causal": causal}
                parts.append(_attended(module, q, k, v, seen, **options))
            rows.append(torch.cat(parts, dim=1))
        return torch.cat(rows), None

    before = ALL_ATTENTION_FUNCTIONS[_SDPA]
    if before is not sdpa_attention_forward:
        # `sdpa` is replaced already: by the user, or by an outer context of this function.
        yield
        return
    ALL_ATTENTION_FUNCTIONS[_SDPA] = attend
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[_SDPA]
