"""What is summed over a sequence up to each token, kept in a cache beside keys and values.

So a token's choice that depends on all tokens before it is the same in one forward and in several over a cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin


class PrefixCache(CacheLayerMixin):
    """Values at every token so far, each B T ·, by name; one more layer of a cache, of one `owner`.

    As a layer it is reordered, repeated, cropped and selected together with keys and values.
    """

    is_croppable = True
    supports_early_init = False

    def __init__(self, owner: str, first: Any = None) -> None:
        super().__init__()
        self.owner = owner
        # As the first layer's, so that masks are made for that one and not for this: beside a static layer, a mask that
        # is left out as nothing is padded would show tokens the places that are still empty.
        self.is_sliding = bool(getattr(first, "is_sliding", False))
        self.is_compileable = bool(getattr(first, "is_compileable", False))
        self.held: dict[Any, Tensor] = {}
        self.keys = self.values = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare."""

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Never called by a layer of the model that runs. Raises NotImplementedError."""
        raise NotImplementedError(
            "a layer writes keys where the cache has no place for them: this model's forward runs more layers than "
            "config.num_hidden_layers says, so its first layers cannot draft for it (`assistant_early_exit`); use "
            "another draft model"
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As a layer that keeps everything."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens seen."""
        return next((held.shape[1] for held in self.held.values()), 0)

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def get_max_cache_shape(self) -> int:
        """No limit (the name before transformers 5.20)."""
        return -1

    def last(self, name: Any) -> Tensor | None:
        """The value at the last token, B 1 ·; None before the first."""
        return self.held[name][:, -1:] if self.held else None

    def append(self, found: Mapping[Any, Tensor]) -> None:
        """Take what a forward found for its tokens."""
        if self.held:
            self.held = {name: torch.cat([self.held[name], new], dim=1) for name, new in found.items()}
        else:
            self.held = dict(found)

    def _map(self, change: Any) -> None:
        self.held = {name: change(held) for name, held in self.held.items()}

    def reset(self) -> None:
        """Forget everything."""
        self.held = {}

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequences in another order."""
        self._map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence `repeats` times."""
        self._map(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Some of the sequences."""
        self._map(lambda x: x[indices])

    def crop(self, tokens: int) -> None:
        """Forget the last -`tokens`, for 0 none; a positive number, as older versions gave it, is how many to keep."""
        if tokens:
            self._map(lambda x: x[:, :tokens])

    def offload(self) -> None:
        """Small: stays where it is."""

    def prefetch(self) -> None:
        """Stays where it is."""


def prefix_in(cache: Any, owner: str, *, asked: bool = True) -> PrefixCache | None:
    """What `owner` kept of earlier tokens in a cache; ValueError where it is `asked` for and those were not its own."""
    held = (layer for layer in getattr(cache, "layers", ()) if isinstance(layer, PrefixCache))
    found = next((layer for layer in held if layer.owner == owner), None)
    if found is None and asked and cache is not None and not torch.compiler.is_compiling():
        seen = int(cache.get_seq_length())
        if seen:
            raise ValueError(
                f"the cache holds {seen} tokens that this model did not route; pass one that its own forward filled"
            )
    return found


def keep_prefix(cache: Any, past: PrefixCache | None, owner: str, found: Mapping[Any, Tensor]) -> None:
    """Put what a forward found for its tokens behind what `past` holds (None: into a new layer of the cache)."""
    if not found or cache is None:
        return
    if past is None:
        past = PrefixCache(owner, cache.layers[0])
        cache.layers.append(past)
    past.append(found)


def running_sum(values: Tensor, before: Tensor | None) -> Tensor:
    """Sums over tokens up to and with each: B T ·, begun at `before` (B 1 ·)."""
    sums = values.cumsum(dim=1)
    return sums if before is None else sums + before
