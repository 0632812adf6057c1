"""Running a twin: whole sequences, and over what it keeps of earlier tokens."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from surgeon.anatomy.silence import some_tokens
from surgeon.anatomy.skeleton import Skeleton

if TYPE_CHECKING:
    from torch import Tensor

# What models call what they keep for later tokens, argument and output; from transformers 5.24 on nearly all `cache`.
_CACHES = ("cache", "past_key_values", "cache_params", "state")
# Of the largest logit: what sums in another order may change in float32.
_ROUNDING = 1e-5


def agree(base: Skeleton, result: Skeleton) -> bool:
    """Whether two models' logits differ by no more than sums in another order do, with and without a cache."""
    import torch

    tokens = some_tokens(base)
    with torch.no_grad():
        for run in (run_prefill, run_cached):
            one, other = run(base, tokens), run(result, tokens)
            if float((one - other).abs().max()) > _ROUNDING * float(one.abs().max()):
                return False
    return True


def run_prefill(twin: Skeleton, tokens: Tensor) -> Tensor:
    """Logits of whole sequences."""
    logits: Tensor = twin.model(input_ids=tokens, use_cache=False).logits
    return logits


def cache_argument(model: Any) -> str:
    """Return the name by which a model takes what was kept of earlier tokens."""
    taken = inspect.signature(getattr(model, "forward", model)).parameters
    return next((name for name in _CACHES if name in taken), "past_key_values")


def cache_of(output: Mapping[str, Any]) -> Any:
    """Return what a model's output keeps for later tokens: a cache, or what RWKV and xLSTM have in its place."""
    from surgeon.runtime.graft import cache_in

    held = dict(output.items())
    found = cache_in(held)
    return next((held[name] for name in _CACHES if held.get(name) is not None), None) if found is None else found


def run_cached(twin: Skeleton, tokens: Tensor) -> Tensor:
    """Logits of a sequence read in two parts, the second by what the first left behind, word by word."""
    import torch

    head = tokens.shape[1] - 2
    told = twin.model(input_ids=tokens[:, :head], use_cache=True)
    found: list[Tensor] = [told.logits]
    name, cache = cache_argument(twin.model), cache_of(told)
    if cache is None:
        return found[0]
    for at in range(head, tokens.shape[1]):
        told = twin.model(input_ids=tokens[:, at : at + 1], use_cache=True, **{name: cache})
        cache = cache_of(told)
        found.append(told.logits)
    return torch.cat(found, dim=1)
