"""Running a twin: on whole sequences, and with a cache of earlier tokens."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from surgeon.anatomy.silence import some_tokens
from surgeon.anatomy.skeleton import Skeleton

if TYPE_CHECKING:
    from torch import Tensor

# The names of a model's cache, as argument and as output; from transformers 5.24 on nearly always `cache`.
_CACHES = ("cache", "past_key_values", "cache_params", "state")
# As a share of the largest logit: how much summing in another order may change in float32.
_ROUNDING = 1e-5


def agree(base: Skeleton, result: Skeleton, *, rounding: float = _ROUNDING) -> bool:
    """Return whether two models' logits differ by no more than the order of sums explains, with and without a cache.

    `rounding` is the most by which they may differ, as a share of the largest; 0: they are equal. NaN agrees with
    nothing.
    """
    import torch

    tokens = some_tokens(base)
    with torch.no_grad():
        for run in (run_prefill, run_cached):
            one, other = run(base, tokens), run(result, tokens)
            # A logit may be infinite.
            most = rounding * float(one.abs().max()) if rounding else 0.0
            if not torch.allclose(one, other, rtol=0.0, atol=most):
                return False
    return True


def run_prefill(twin: Skeleton, tokens: Tensor) -> Tensor:
    """Return the logits of whole sequences."""
    logits: Tensor = twin.model(input_ids=tokens, use_cache=False).logits
    return logits


def cache_argument(model: Any) -> str:
    """Return the name of the argument by which a model accepts its cache."""
    taken = inspect.signature(getattr(model, "forward", model)).parameters
    return next((name for name in _CACHES if name in taken), "past_key_values")


def cache_of(output: Mapping[str, Any]) -> Any:
    """Return the cache in a model's output, or the state that RWKV and xLSTM have instead; None where there is none."""
    from surgeon.runtime.graft import cache_in

    held = dict(output.items())
    found = cache_in(held)
    return next((held[name] for name in _CACHES if held.get(name) is not None), None) if found is None else found


def run_cached(twin: Skeleton, tokens: Tensor) -> Tensor:
    """Return the logits of sequences whose last two tokens are read one by one with a cache.

    Where the model returns no cache, only the logits of the first part.
    """
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
