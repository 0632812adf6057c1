"""Models of any type with grafts: the native model is built whole, then its layers become upcycled ones.

transformers' own `__init__` knows what its layers want, so it builds trunk and tail; then the layers of the trunk,
and the blocks beside which something stands, change their class to a named one composed of theirs, and the tail is
cut off. Loading refuses half a graft, and grafts can train alone.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.utils import output_capturing

from .layers import UpcycledLayer, copy_unsaved, current_flow, in_flow
from .losses import Flow, tell_of_lost_losses, token_domains
from .newborn import Newborn
from .rules import Surgery, read_surgery

# Names of grafts' own tensors; `*` is any text.
GRAFT_TENSORS = (
    "*mlp.adapter.*",
    "*interpolator.*",
    "*expert_router.*",
    "*control_bank.*",
    "*domain_gate.*",
    "*.lora_*",
)


class _Off(threading.local):
    # Models whose grafts take no part in what this thread runs.
    models: tuple[nn.Module, ...] = ()


_off = _Off()


class UpcycledPreTrained(PreTrainedModel):
    """What upcycled models share; `stack` is the path of the list of layers in the model that holds it."""

    stack: ClassVar[str]
    surgery: Surgery
    # What the native model counts a text's positions from where it gives its decoder some.
    first_position: ClassVar[int] = 0

    @classmethod
    def is_custom_code(cls) -> bool:
        """No: its modules are native ones, all of whose buffers transformers must fill as it does in its own models."""
        return False

    def _get_dtype_plan(self, dtype: torch.dtype) -> dict[str, Any]:
        # What a native model keeps in float32 goes by names such as `gate`, which parts of grafts have too.
        plan: dict[str, Any] = super()._get_dtype_plan(dtype)
        plan = {name: held for name, held in plan.items() if name not in self._left_by_quantisers()}
        return dict.fromkeys(GRAFT_TENSORS, dtype) | plan if plan else plan

    @property
    def _keep_in_fp32_modules(self) -> Any:
        # Every quantiser of transformers leaves what stands here, and asks a model that is marked as its own.
        kept = self.__dict__.get("kept_in_fp32", self.native_class()._keep_in_fp32_modules)
        return {*(kept or ()), *self._left_by_quantisers()} if getattr(self, "is_quantized", False) else kept

    @_keep_in_fp32_modules.setter
    def _keep_in_fp32_modules(self, kept: Any) -> None:
        self.__dict__["kept_in_fp32"] = kept

    def _left_by_quantisers(self) -> set[str]:
        rules = self.surgery.rules if hasattr(self, "surgery") else ()
        replaces = tuple(kind for graft in rules for kind in graft.replaces)
        return {name for name, module in self.named_modules() if isinstance(module, replaces)}

    def graft_parameter_names(self) -> list[str]:
        """Names of the parameters that the surgery added and that train, in the model's order."""
        owners: list[str] = []
        for name, module in self.named_modules():
            if isinstance(module, UpcycledModel):
                prefix = f"{name}." if name else ""
                trained = (
                    each.replace("layers.", f"{self.stack}.", 1) for each in read_surgery(module.config).trains()
                )
                owners += [f"{prefix}{owner}" for owner in trained]
        return [name for name, _ in self.named_parameters() if name.startswith(tuple(owners))]

    def freeze_base(self) -> list[str]:
        """Let exactly the parameters of `graft_parameter_names()` train; returns their names."""
        names = self.graft_parameter_names()
        chosen = set(names)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name in chosen)
        return names

    @contextmanager
    def grafts(self, *, enabled: bool) -> Iterator[None]:
        """With `enabled=False`, inside and in this thread, the model computes what its base does, bit for bit.

        Grafts take no part, and inserted layers hand on what they get (they run, and fill their place in a cache, but
        what they make is not used). So it is with and without a cache; one that was made inside is for inside.
        `enabled=True` inside of it switches them on again.
        """
        before = _off.models
        own = tuple(module for module in self.modules() if isinstance(module, UpcycledModel))
        others = tuple(model for model in before if not any(model is module for module in own))
        _off.models = others if enabled else (*others, *own)
        try:
            yield
        finally:
            _off.models = before

    @classmethod
    def native_class(cls) -> type[PreTrainedModel]:
        """The class of transformers that this one extends."""
        natives = (kind for kind in cls.__mro__ if issubclass(kind, PreTrainedModel))
        return next(kind for kind in natives if not issubclass(kind, UpcycledPreTrained))

    # For these two transformers reads the source of a class's module, which here is not the one where experts and
    # attention are: the model would run experts one by one, and so sum otherwise than the base does.
    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return bool(cls.native_class()._can_set_experts_implementation())

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return bool(cls.native_class()._can_set_attn_implementation())

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Newborn):
            module.initialise()
        else:
            super()._init_weights(module)

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """As transformers', but a checkpoint that lacks a graft's tensor is refused, not filled at random."""
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        missing = sorted(set(info["missing_keys"]) & set(graft_tensors(model)))
        if missing:
            raise ValueError(
                f"the checkpoint lacks {len(missing)} tensors of its config's surgery, first of them "
                f"`{missing[0]}`; download it again in full, or apply the surgery again"
            )
        check_sites(model)
        return (model, info) if output_loading_info else model


class UpcycledModel(UpcycledPreTrained):
    """The model whose config's surgery says which grafts stand in its layers: a text decoder, or an encoder."""

    layer_classes: ClassVar[Mapping[type[nn.Module], type[UpcycledLayer]]]

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        own_class(config, self.config_class)
        super().__init__(config, *args, **kwargs)
        self.graft()

    def graft(self) -> None:
        """Make the native layers upcycled ones; the tail goes, its twins stand beside the trunk."""
        surgery = self.surgery = read_surgery(self.config)
        above, _, name = self.stack.rpartition(".")
        parent = self.get_submodule(above)
        layers: Any = getattr(parent, name)[: surgery.trunk_layers]
        setattr(parent, name, layers)
        for index, layer in enumerate(layers):
            layer.__class__ = self.layer_classes[type(layer)]
            layer.compose(self.config, index, surgery)
        for graft in surgery.rules:
            graft.complete(self, surgery)
        # Kept by class when a model is made, and this one was made as another; before 5.23 by the class's name.
        registry: Any = output_capturing._CAN_RECORD_REGISTRY
        registry[str(type(self)) if type(registry) is dict else self] = self._can_record_outputs
        # The native class's, kept by the model itself, would hide this one's.
        self.__dict__.pop("_no_split_modules", None)
        self.post_init()

    def init_parallel_plans(self) -> None:
        """As transformers', but the twin of a layer is split over devices as the layer itself."""
        super().init_parallel_plans()
        surgery: Surgery | None = getattr(self, "surgery", None)
        if surgery is None or not surgery.homes:
            return
        layer = f"{self.stack.rpartition('.')[2]}.*."
        for kind in ("_tp_plan", "_ep_plan", "_fsdp_plan"):
            plan = getattr(self, kind, None) or {}
            plan.update({name.replace(layer, f"{layer}expanded.", 1): how for name, how in plan.items()})

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self:
            # What a model sets in its layers by walking through them, it does not set in their twins.
            for layer in cast(nn.ModuleList, self.get_submodule(self.stack)):
                copy_unsaved(layer, layer._modules.get("expanded"))

    def run_grafted(self, run: Callable[..., Any], given: dict[str, Any], flow: Flow | None) -> Any:
        """`run`, the native forward, with what crosses layers; `given` are its arguments by name."""
        flow, domains = current_flow() if flow is None else flow, given.pop("domain_ids", None)
        if flow is None and self.training:
            tell_of_lost_losses(self.surgery)
        crossing, flow = self.crossing(flow, given | {"domain_ids": domains})
        with in_flow(flow):
            output = run(**given)
        if flow is not None:
            # A model may fill the cache that it is given and not name it in its output (RecurrentGemma).
            named = getattr(output, "past_key_values", None)
            cache = given.get("past_key_values") if named is None else named
            for graft in crossing:
                graft.close(self, flow, cache)
        return output

    @property
    def grafts_off(self) -> bool:
        """Whether this thread is in `grafts(enabled=False)`."""
        return any(model is self for model in _off.models)

    def crossing(self, flow: Flow | None, given: Mapping[str, Any]) -> tuple[list[Any], Flow | None]:
        """A forward begins: the grafts that cross layers, opened, and the flow that goes to all layers, if one does.

        `given` are the forward's arguments by name. For drafts by a model's first layers transformers lowers the
        config's `num_hidden_layers`; what begins above them takes no part.
        """
        if self.grafts_off:
            _check_kept_nothing(given.get("past_key_values"))
            return [], Flow(off=True)
        self._make_room_for_twins(given.get("past_key_values"))
        depth = self.config.num_hidden_layers
        firsts = ((graft, graft.crosses(self.surgery)) for graft in self.surgery.rules)
        found = [graft for graft, first in firsts if first is not None and first < depth]
        if flow is None and found:
            flow = Flow()
        if flow is not None:
            flow.packed = any(given.get(name) is not None for name in ("cu_seq_lens_q", "seq_idx"))
        if flow is not None and found:
            inputs = given_inputs(given.get("input_ids"), given.get("inputs_embeds"))
            positions = given.get("position_ids")
            # Counted from 0, as grafts know them.
            flow.positions = positions if positions is None else positions - self.first_position
            if flow.domains is None:
                flow.domains = token_domains(given.get("domain_ids"), torch.Size(inputs.shape[:2]))
            for graft in found:
                graft.open(self, flow, inputs, given.get("attention_mask"), given.get("past_key_values"))
        return found, flow

    def _make_room_for_twins(self, cache: Any) -> None:
        """Give a cache made for the first layers alone the places of their twins, which lie behind all layers'.

        Raises ValueError for a kind of cache that cannot be lengthened.
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


def model_forward(native: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of an `UpcycledModel` over `native`, with its arguments."""
    names = tuple(inspect.signature(native).parameters)[1:]

    @wraps(native)
    def forward(self: UpcycledModel, *args: Any, surgery_flow: Flow | None = None, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        return self.run_grafted(partial(native, self), given, surgery_flow)

    return forward


def _check_kept_nothing(cache: Any) -> None:
    """ValueError where grafts keep something in a cache, which would miss what is computed without them."""
    if any(getattr(layer, "kept", None) for layer in getattr(cache, "layers", ())):
        raise ValueError("the cache was filled with grafts on; in `grafts(enabled=False)` begin with an empty one")


class EmptyPlace(DynamicLayer):
    """A place in a cache where nothing is."""

    def crop(self, *_: Any) -> None:
        """Nothing to forget, which the native one of older versions does not bear."""


def own_class(config: Any, kind: type[Any]) -> None:
    """Make `kind` the class of a config that came with a copy of it.

    vLLM sends its workers a config together with a copy of all that its class names; grafts of that copy would put
    modules of their own code into the model, which do not see the frames of this one's layers.
    """
    if type(config) is not kind and type(config).__qualname__ == kind.__qualname__:
        config.__class__ = kind


def counted_modules(surgery: Surgery) -> dict[str, tuple[type[nn.Module], int]]:
    """Modules that a surgery adds, whose tensors a checkpoint must hold: their class and how many there must be."""
    return {what: told for graft in surgery.rules for what, told in graft.counted(surgery).items()}


def graft_tensors(model: nn.Module) -> list[str]:
    """Names of all tensors that a graft holds, trained or not."""
    bases = [module for module in model.modules() if isinstance(module, UpcycledModel)]
    kinds = {kind for base in bases for kind, _ in counted_modules(read_surgery(base.config)).values()}
    owners = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, tuple(kinds)))
    return [name for name in model.state_dict() if name.startswith(owners)]


def check_sites(model: nn.Module) -> None:
    """Refuse a model whose grafts something (a quantiser, a kernel replacer) has replaced or dropped."""
    for name, base in model.named_modules():
        if not isinstance(base, UpcycledModel):
            continue
        counted = counted_modules(read_surgery(base.config))
        expected = {what: count for what, (_, count) in counted.items()}
        found = {what: sum(isinstance(m, kind) for m in base.modules()) for what, (kind, _) in counted.items()}
        if found != expected:
            raise ValueError(
                f"{name or 'the model'} has {_listed(found)} after loading; the config describes"
                f" {_listed(expected)}: something replaced them; a quantiser leaves what its `modules_to_not_convert`"
                " names: give it the modules that hold them"
            )


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def given_inputs(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
    """Token ids or embeddings, whichever the caller gave."""
    given = input_ids if input_ids is not None else inputs_embeds
    if given is None:
        raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
    return given
