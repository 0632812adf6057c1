"""Skipping modules that a domain gate switches, while the gate is closed for all tokens of a forward.

A layer with adapters, slots or a branch then runs as the base's layer, and an inserted layer returns its input.
Inserted layers and branches then owe keys and values to the KV cache: the cache keeps their input instead (B T D a
layer; consecutive skipped layers share it) and records each operation on the cache in between. When such a layer runs
again, it is first called with these inputs, in the same order and the same pieces. So its keys and values equal those
of a layer that always ran, to the bit. Such a late call computes only the keys and values.

Whether to skip is decided once a forward, and only where no graph or gradient needs the whole computation. Only
entries of a plain `DynamicCache` that hold nothing but keys and values can be owed, and never the first entry of a
kind, by which transformers sizes masks. A layer always runs where it gets or returns anything else, where it has
hooks, and where its hidden states or attentions are recorded.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.utils import output_capturing

from .graft import Flow, Graft, here
from .layers import LAYER_NUMBERS, UpcycledLayer, in_flow
from .rules import Surgery

_OFF = Flow(off=True)
# Replaces the cache among the arguments that are kept.
_CACHE = "the cache"
# Operations on a cache entry that may occur between two forwards.
_DONE = ("reorder_cache", "crop", "batch_repeat_interleave", "batch_select_indices")


class GatedLayer(UpcycledLayer):
    """A trunk layer of a model with a gate.

    `spared`: while the gate is closed, the layer equals its base's layer (an inserted layer: its input) and keeps
    nothing for later tokens except in a KV cache, so that it may be skipped. `owing` maps the index of each cache entry
    that skipping leaves unfilled to the module that fills it: None for the layer itself (inserted), or its twin.
    """

    # Only in the layer that `decides`.
    domain_gate: Any
    # Defaults for a layer without a call of `compose`, such as one that transformers builds for MTP.
    spared = False
    owing: Mapping[int, nn.Module | None] = {}

    def compose(self, config: Any, index: int, surgery: Surgery) -> None:
        """Add grafts to the layer, and set whether it may be skipped while the gate is closed."""
        super().compose(config, index, surgery)
        twin = self._modules.get("expanded")
        owing: dict[int, nn.Module | None] = {index: None} if self.layer_gated else {}
        if twin is not None:
            owing |= {branch: twin for branch, home in surgery.homes.items() if home == index}
        self.owing = owing
        # In a layer without slots, `experts` is only the router, which nothing needs while all slots are skipped.
        slots = "experts" if "slotted" not in vars(self) else ""
        own = all(graft.name in {*self.gated, slots} or graft.name == "gate" for graft in self.grafts)
        forgetful = all(_keeps_nothing(graft, surgery) for graft in self.grafts)
        plain = twin is None or not getattr(twin, "grafts", ())
        self.spared = (own or self.layer_gated) and forgetful and plain and self._numbered()

    def _numbered(self) -> bool:
        """Return whether every module that may owe keys and values stores the index of its cache entry itself."""
        own = [module for name, module in self.named_modules() if not name.startswith("expanded")]
        return all(
            {vars(module).get(name) for module in (own if owner is None else owner.modules()) for name in LAYER_NUMBERS}
            - {None}
            == {place}
            for place, owner in self.owing.items()
        )

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the layer, or skip what the gate switches there if it is closed for all tokens."""
        flow = here.flow
        gating = None if flow is None or flow.off else flow.gating
        if flow is None or gating is None:
            return super().__call__(hidden_states, *args, **kwargs)
        if self.decides and gating.spares:
            flow.on = self.domain_gate(hidden_states, gating)
        spared = gating.shut and self.spared and not self._watched()
        if not (spared and self._owes(hidden_states, args, kwargs, gating)):
            self._pay(args, kwargs)
            output = super().__call__(hidden_states, *args, **kwargs)
        elif self.layer_gated:
            return hidden_states
        else:
            output = self._as_the_bases(hidden_states, *args, **kwargs)
        gating.bare = isinstance(output, Tensor)
        return output

    def _watched(self) -> bool:
        """Return whether other code depends on the layer's call: hooks, or a replaced `forward` that loads weights."""
        return bool(self._forward_hooks or self._forward_pre_hooks or "forward" in vars(self))

    def _as_the_bases(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the native layer's output, without the calls of grafts that would all change nothing."""
        previous, here.frame = here.frame, Flow(off=True, shape=hidden_states.shape)
        try:
            return super(UpcycledLayer, self).forward(hidden_states, *args, **kwargs)
        finally:
            here.frame = previous

    def _owes(self, hidden_states: Tensor, args: Sequence[Any], kwargs: dict[str, Any], gating: Any) -> bool:
        """Keep the layer's input for each module in `owing`; return whether the layer may be skipped."""
        if not self.owing:
            return True
        # Most layers of a forward get the same arguments, which are looked at once.
        asked = (*kwargs, *map(id, args), *map(id, kwargs.values()))
        if gating.given is None or gating.given[0] != asked:
            gating.given = asked, *_kept_of(args, kwargs)
        _, plain, cache, kept = gating.given
        entries = [] if cache is None else [_entry(cache, place) for place in self.owing]
        if not (plain and gating.bare) or None in entries:
            return False
        for entry in entries:
            _log(entry).append(("", hidden_states, *kept))
        return True

    def _pay(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Compute the keys and values that this layer owes to the caches among its arguments, if there are any."""
        for cache in (each for each in (*args, *kwargs.values()) if self.owing and isinstance(each, DynamicCache)):
            for place, owner in self.owing.items():
                entry = cache.layers[place] if place < len(cache.layers) else None
                if getattr(entry, "owed", None):
                    run = partial(_run_off, super().__call__) if owner is None else owner
                    _paid(cache, entry, run, list(self.modules() if owner is None else owner.modules()))


def spare_routers(layers: Sequence[GatedLayer]) -> None:
    """Let the layer with the router run while the gate is closed, if any layer with slots runs then."""
    slots = all(layer.spared for layer in layers if "slotted" in vars(layer))
    for layer in layers:
        layer.spared = layer.spared and (slots or not layer.routes)


def _keeps_nothing(graft: Graft, surgery: Surgery) -> bool:
    """Return whether a graft keeps nothing for later tokens except in its layer's cache entry."""
    mixture = getattr(surgery.of[graft.name], "mixture", None)
    if mixture is not None:
        return not mixture.by_sequence or mixture.inference_routing != "prefix_mean"
    return graft.remembers_nothing or graft.name in ("control", "experts", "gate")


def _run_off(call: Any, *args: Any, **kwargs: Any) -> None:
    """Make a call with all grafts switched off."""
    with in_flow(_OFF):
        call(*args, **kwargs)


def _kept_of(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[bool, Any, tuple[Any, ...]]:
    """Return (whether a layer with these arguments may be skipped, their cache or None, the arguments to keep).

    In the arguments to keep, `_CACHE` replaces the cache.
    """
    given = (*args, *kwargs.values())
    caches = [each for each in given if isinstance(each, Cache)]
    recorder = getattr(output_capturing, "_active_collector", None)
    # If no cache is given but some argument is True (such as `use_cache`), the layer keeps its state elsewhere.
    keeps = len(caches) > 1 or (not caches and any(each is True for each in given))
    plain = not keeps and all(map(_is_plain, given)) and not (recorder and recorder.get())
    rest = [_CACHE if isinstance(each, Cache) else each for each in given]
    return plain, next(iter(caches), None), (rest[: len(args)], dict(zip(kwargs, rest[len(args) :], strict=True)))


def _is_plain(given: Any) -> bool:
    """Return whether an argument is the cache, or of a type that a layer only reads."""
    if isinstance(given, tuple):
        return all(isinstance(each, Tensor) for each in given)
    return given is None or isinstance(given, Tensor | int | float | str | Cache)


def _entry(cache: Any, place: int) -> Any:
    """Return the cache entry at index `place` if keys and values may be owed to it, else None.

    A cache that makes its entries on demand gets the missing ones.
    """
    if type(cache) is not DynamicCache or cache.offloading:
        return None
    if place < len(cache.layers) and getattr(cache.layers[place], "owed", None):
        return cache.layers[place]
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) <= place:
            cache.layers.append(cache.layer_class_to_replicate())
    entry = cache.layers[place] if place < len(cache.layers) else None
    first = not any(type(each) is type(entry) for each in cache.layers[:place])
    return None if first or type(entry) not in (DynamicLayer, DynamicSlidingWindowLayer) else entry


def _log(entry: Any) -> list[tuple[Any, ...]]:
    """Return the list of what is owed to an entry: layer inputs and later cache operations, in order.

    The first call creates the list and makes the entry record operations.
    """
    if not getattr(entry, "owed", None):
        entry.owed = []
        for name in ("reset", *_DONE):
            # On the instance, as the class is transformers' own. A copied or pickled entry gets its own.
            setattr(entry, name, partial(_done, entry, name))
    found: list[tuple[Any, ...]] = entry.owed
    return found


def _done(entry: Any, name: str, *given: Any) -> None:
    """Record the cache operation `name` on an entry that is owed something; `reset` runs and clears what is owed."""
    if name == "reset":
        _settle(entry)
        entry.reset()
    else:
        entry.owed.append((name, *given))


def _settle(entry: Any) -> list[tuple[Any, ...]]:
    """Return what is owed to an entry, and make the entry an ordinary one again."""
    owed: list[tuple[Any, ...]] = entry.owed
    for name in ("owed", "reset", *_DONE):
        delattr(entry, name)
    return owed


class _Made(Exception):
    """The signal that ends a late call: the keys and values have been computed."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
@torch.no_grad()
def _paid(cache: Any, entry: Any, run: Any, modules: Sequence[nn.Module]) -> None:
    """Fill an entry: call its layer with each owed input, and apply each recorded operation, in order.

    A call ends when it has computed keys and values, unless `modules`, those of the layer, have hooks.
    """
    whole = any(module._forward_hooks or hasattr(module, "_hf_hook") for module in modules)
    # The cache as the layer would have seen it then: every entry had as many tokens as this one.
    then = copy.copy(cache)
    then.layers = [entry] * len(cache.layers)
    if not whole:
        then.update = partial(_update, entry)
    for name, *given in _settle(entry):
        if name:
            getattr(entry, name)(*given)
            continue
        hidden_states, args, kwargs = given
        named = dict(zip(kwargs, _with_cache(kwargs.values(), then), strict=True))
        with contextlib.suppress(_Made):
            run(hidden_states, *_with_cache(args, then), **named)


def _with_cache(given: Any, cache: Any) -> Iterator[Any]:
    """Yield kept arguments, with `cache` in place of `_CACHE`."""
    for each in given:
        yield cache if isinstance(each, str) and each == _CACHE else each


def _update(entry: Any, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> None:
    """Append keys and values to an entry, without the layer's index; then end the late call by raising `_Made`."""
    entry.update(keys, values, *args[1:], **{name: each for name, each in kwargs.items() if name != "layer_idx"})
    raise _Made
