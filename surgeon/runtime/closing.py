"""What a domain gate spares while it is closed for all tokens of a forward: what it switches does not run.

Then a layer with adapters, slots or a branch is its base's, and an inserted one hands on what it gets. What inserted
layers and branches would put into a cache is owed: the cache keeps what went in instead (B T D a layer; layers one
after the other share it), with all that is done to the cache in between. They are called with it, in the same order
and the same pieces, as soon as they run again, so that their keys and values are those of layers that always ran, to
the bit; of such a late call nothing but the keys and values is computed.

It is decided once a forward, and only where no graph or gradient asks for all of it. Owed are entries of a plain
`DynamicCache` that hold keys and values alone, never the first of their kind, by which transformers measures masks.
Whatever else a layer is given or returns, or where it has hooks, or its states or attention are recorded, it runs.
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
# What stands in the place of the cache among the arguments that are kept.
_CACHE = "the cache"
# What may be done to an entry between two forwards.
_DONE = ("reorder_cache", "crop", "batch_repeat_interleave", "batch_select_indices")


class GatedLayer(UpcycledLayer):
    """A trunk layer of a model with a gate.

    `spared`: closed, it is its base's layer, and leaves nothing for later tokens but in a cache. `owing` are those that
    then do not run and have entries there, by their place: the layer itself, where it was inserted (None), its twin.
    """

    # Where `decides`.
    domain_gate: Any
    # Of a layer that nobody composed, as transformers builds one for MTP.
    spared = False
    owing: Mapping[int, nn.Module | None] = {}

    def compose(self, config: Any, index: int, surgery: Surgery) -> None:
        """Let grafts in."""
        super().compose(config, index, surgery)
        twin = self._modules.get("expanded")
        owing: dict[int, nn.Module | None] = {index: None} if self.layer_gated else {}
        if twin is not None:
            owing |= {branch: twin for branch, home in surgery.homes.items() if home == index}
        self.owing = owing
        # A router is needed only where slots run.
        slots = "experts" if "slotted" not in vars(self) else ""
        own = all(graft.name in {*self.gated, slots} or graft.name == "gate" for graft in self.grafts)
        forgetful = all(_keeps_nothing(graft, surgery) for graft in self.grafts)
        plain = twin is None or not getattr(twin, "grafts", ())
        self.spared = (own or self.layer_gated) and forgetful and plain and self._numbered()

    def _numbered(self) -> bool:
        """Whether what may owe knows its place in a cache by itself."""
        own = [module for name, module in self.named_modules() if not name.startswith("expanded")]
        return all(
            {vars(module).get(name) for module in (own if owner is None else owner.modules()) for name in LAYER_NUMBERS}
            - {None}
            == {place}
            for place, owner in self.owing.items()
        )

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As a layer's, or without what the gate closes for all."""
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
        """Whether somebody waits for its call: hooks, or what loads its weights for it."""
        return bool(self._forward_hooks or self._forward_pre_hooks or "forward" in vars(self))

    def _as_the_bases(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """What the native layer returns; without calling all that would only find out that it does nothing."""
        previous, here.frame = here.frame, Flow(off=True, shape=hidden_states.shape)
        try:
            return super(UpcycledLayer, self).forward(hidden_states, *args, **kwargs)
        finally:
            here.frame = previous

    def _owes(self, hidden_states: Tensor, args: Sequence[Any], kwargs: dict[str, Any], gating: Any) -> bool:
        """Keep what went in for those that need not run; whether that is so."""
        if not self.owing:
            return True
        # Most layers of a forward get the same.
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
        """Make the keys and values that are owed to the cache that a forward got."""
        for cache in (each for each in (*args, *kwargs.values()) if self.owing and isinstance(each, DynamicCache)):
            for place, owner in self.owing.items():
                entry = cache.layers[place] if place < len(cache.layers) else None
                if getattr(entry, "owed", None):
                    run = partial(_run_off, super().__call__) if owner is None else owner
                    _paid(cache, entry, run, list(self.modules() if owner is None else owner.modules()))


def spare_routers(layers: Sequence[GatedLayer]) -> None:
    """Let routers run while the gate is closed where slots do."""
    slots = all(layer.spared for layer in layers if "slotted" in vars(layer))
    for layer in layers:
        layer.spared = layer.spared and (slots or not layer.routes)


def _keeps_nothing(graft: Graft, surgery: Surgery) -> bool:
    """Whether a graft leaves nothing for later tokens but in its layer's entry of a cache."""
    mixture = getattr(surgery.of[graft.name], "mixture", None)
    if mixture is not None:
        return not mixture.by_sequence or mixture.inference_routing != "prefix_mean"
    return graft.remembers_nothing or graft.name in ("control", "experts", "gate")


def _run_off(call: Any, *args: Any, **kwargs: Any) -> None:
    with in_flow(_OFF):
        call(*args, **kwargs)


def _kept_of(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[bool, Any, tuple[Any, ...]]:
    """Whether a layer that gets these can do without a call; the cache among them; and they without it."""
    given = (*args, *kwargs.values())
    caches = [each for each in given if isinstance(each, Cache)]
    recorder = getattr(output_capturing, "_active_collector", None)
    # With no cache, a layer that is told to keep something does so elsewhere.
    keeps = len(caches) > 1 or (not caches and any(each is True for each in given))
    plain = not keeps and all(map(_is_plain, given)) and not (recorder and recorder.get())
    rest = [_CACHE if isinstance(each, Cache) else each for each in given]
    return plain, next(iter(caches), None), (rest[: len(args)], dict(zip(kwargs, rest[len(args) :], strict=True)))


def _is_plain(given: Any) -> bool:
    """Whether a layer can do nothing with an argument but read it, or it is the cache."""
    if isinstance(given, tuple):
        return all(isinstance(each, Tensor) for each in given)
    return given is None or isinstance(given, Tensor | int | float | str | Cache)


def _entry(cache: Any, place: int) -> Any:
    """A cache's entry that may be owed; None: there is none."""
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
    """What an entry is owed: what went in, and what was done to the cache since, in this order."""
    if not getattr(entry, "owed", None):
        entry.owed = []
        for name in ("reset", *_DONE):
            # Past the entry's class, which stays transformers' own; copied or pickled, it is the copy's.
            setattr(entry, name, partial(_done, entry, name))
    found: list[tuple[Any, ...]] = entry.owed
    return found


def _done(entry: Any, name: str, *given: Any) -> None:
    """Note what is done to an entry that is owed something."""
    if name == "reset":
        _settle(entry)
        entry.reset()
    else:
        entry.owed.append((name, *given))


def _settle(entry: Any) -> list[tuple[Any, ...]]:
    """Take what an entry is owed, after which it is as any other."""
    owed: list[tuple[Any, ...]] = entry.owed
    for name in ("owed", "reset", *_DONE):
        delattr(entry, name)
    return owed


class _Made(Exception):
    """The keys and values that are needed are there."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
@torch.no_grad()
def _paid(cache: Any, entry: Any, run: Any, modules: Sequence[nn.Module]) -> None:
    """Call a layer with all that its entry is owed, as it would have been."""
    whole = any(module._forward_hooks or hasattr(module, "_hf_hook") for module in modules)
    # A cache as it was then: every layer had as many tokens as this one.
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
    for each in given:
        yield cache if isinstance(each, str) and each == _CACHE else each


def _update(entry: Any, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> None:
    entry.update(keys, values, *args[1:], **{name: each for name, each in kwargs.items() if name != "layer_idx"})
    raise _Made
