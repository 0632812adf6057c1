"""Expanded twins: a twin is a copy of a trunk layer inside this layer, with the layer number of its place in the tail.

As a copy, the twin is of the layer's kind (such as sliding-window attention). By its number, it has a cache entry of
its own.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from .graft import Flow, cache_in, here
from .layers import LAYER_NUMBERS, UpcycledLayer, one_tensor
from .models import UpcycledModel
from .rules import Surgery


class BranchLayer(UpcycledLayer):
    """An expanded twin inside its trunk layer, with its own index of cache and masks.

    Gradient checkpointing wraps the whole trunk layer; a second checkpoint inside would only compute the twin twice.
    """

    @property
    def gradient_checkpointing(self) -> bool:
        """Return the value that the model-wide switch set; False while the trunk layer runs."""
        return bool(self.__dict__.get("switched")) and here.frame is None

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, value: bool) -> None:
        self.__dict__["switched"] = value

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the native layer's hidden states, B T D, without anything else that it returns."""
        return one_tensor(super(UpcycledLayer, self).forward(*args, **kwargs))[0]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the native layer; the trunk layer around it handles this thread's flow."""
        return super(UpcycledLayer, self).__call__(*args, **kwargs)


class TwinnedLayer(UpcycledLayer):
    """A trunk layer that may have a twin."""

    branch_of: ClassVar[type[BranchLayer]]

    def compose(self, config: Any, index: int, surgery: Surgery) -> None:
        """Make `twin`, the layer's copy for a control block if it has one; then add grafts to the layer."""
        branch = next((branch for branch, home in surgery.homes.items() if home == index), None)
        # Set past nn.Module: the twin becomes a submodule only where a graft registers it.
        self.__dict__["twin"] = None if branch is None else self._twin_at(branch, config, index, surgery)
        super().compose(config, index, surgery)
        del self.__dict__["twin"]

    def _twin_at(self, branch: int, config: Any, index: int, surgery: Surgery) -> Any:
        """Return a copy of this layer, whose number is `index`, with the number `branch` of the tail and its grafts."""
        twin: Any = copied(self)
        twin.__class__ = self.branch_of
        for module in twin.modules():
            for name in LAYER_NUMBERS:
                if vars(module).get(name) == index:
                    setattr(module, name, branch)
        twin.compose(config, branch, surgery)
        return twin


def copied(layer: nn.Module) -> nn.Module:
    """Return a copy of a layer that shares the layer's config, so that later settings hold for both."""
    held = (value for module in layer.modules() for value in vars(module).values())
    return copy.deepcopy(layer, {id(value): value for value in held if isinstance(value, PreTrainedConfig)})


def copy_unsaved(layer: nn.Module, twin: nn.Module | None) -> None:
    """Copy to a layer's twin, if there is one, the values of the layer's buffers that no checkpoint holds."""
    held = dict(layer.named_modules())
    for name, module in () if twin is None else twin.named_modules():
        for key in module._non_persistent_buffers_set:
            source = held[name]._buffers.get(key) if name in held else None
            own = module._buffers[key]
            if own is not None and source is not None and own.shape == source.shape:
                own.copy_(source)


class TwinnedModel(UpcycledModel):
    """A model with layers that have twins."""

    def init_parallel_plans(self) -> None:
        """Make transformers' plans for parallel devices, and split each twin as its layer is split."""
        super().init_parallel_plans()
        # The names as plans write them: only names that twins have get an entry, as kinds of layers differ.
        held = {re.sub(r"\.\d+(?=\.|$)", ".*", name) for name, _ in (*self.named_modules(), *self.named_parameters())}
        layer = f"{self.stack.rpartition('.')[2]}.*."
        for kind in ("_tp_plan", "_ep_plan", "_fsdp_plan"):
            plan = getattr(self, kind, None) or {}
            twins = {name.replace(layer, f"{layer}expanded.", 1): how for name, how in plan.items()}
            plan.update({name: how for name, how in twins.items() if name in held})

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Fill a module's tensors that no checkpoint has filled; twins get their layers' unsaved buffers."""
        super()._init_weights(module)
        if module is self:
            # A native model may fill buffers by a loop over its layers, which does not reach their twins.
            for layer in cast(nn.ModuleList, self.get_submodule(self.stack)):
                copy_unsaved(layer, layer._modules.get("expanded"))

    def run_grafted(self, run: Callable[..., Any], given: dict[str, Any], flow: Flow | None) -> Any:
        """Return the output of `run`, the native forward, after giving its cache entries for the twins."""
        if self not in here.off:
            self._make_room_for_twins(cache_in(given))
        return super().run_grafted(run, given, flow)

    def _make_room_for_twins(self, cache: Any) -> None:
        """Append the twins' entries to a cache that was made for only the first layers.

        When a model's first layers draft tokens, transformers lowers the config's `num_hidden_layers`, but the entries
        of their twins come after the entries of all trunk layers. Raises ValueError for a kind of cache that cannot be
        lengthened.
        """
        depth, surgery = self.config.num_hidden_layers, self.surgery
        if cache is None or depth >= surgery.layers or getattr(cache, "layer_class_to_replicate", None) is not None:
            return
        twins = {branch: home for branch, home in surgery.homes.items() if home < depth}
        held = cache.layers
        if len(held) > max(twins, default=-1):
            return
        if not isinstance(cache, DynamicCache):
            raise ValueError(
                f"the {type(cache).__name__} has {len(held)} places, but expanded twins of the first {depth} layers "
                f"have theirs up to {max(twins) + 1}; pass a DynamicCache, or a cache made while "
                f"config.num_hidden_layers is {surgery.layers}"
            )
        whole = copy.copy(self.config)
        whole.num_hidden_layers = surgery.layers
        empty = DynamicCache(config=whole).layers
        for index in range(len(held), max(twins) + 1):
            held.append(empty[index] if index in twins else EmptyPlace())
            if index in twins and getattr(held[twins[index]], "record_past", False):
                held[index].activate_past_recording()


class EmptyPlace(DynamicLayer):
    """A cache entry that stays empty."""

    def crop(self, *_: Any) -> None:
        """Do nothing; in older versions the native method fails on an empty entry."""
