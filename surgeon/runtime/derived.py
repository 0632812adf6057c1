"""Models of any type with grafts: the native model is built whole, then its layers become upcycled ones.

transformers' own `__init__` knows what its layers want, so it builds trunk and tail; then the layers of the trunk,
and the blocks beside which something stands, change their class to a named one composed of theirs. An expanded twin
is a copy of its layer with the number of its place in the tail, so that it has the layer's kind and a cache of its
own; the tail itself is cut off.

Native code passes nothing of ours to its layers, so the forward's `Flow` reaches them through this thread.
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
from transformers import PreTrainedConfig, conversion_mapping
from transformers.utils import output_capturing

from .graft import Graft
from .layers import BranchLayer, GraftedLayer, Site, UpcycledLayer, beside_block
from .losses import Flow, accumulation_scale, close_flow, open_flow, tell_of_lost_losses, tell_of_mode, token_domains
from .pretrained import UpcycledBase, UpcycledPreTrained, given_inputs
from .rules import Surgery, read_surgery

# Attributes by which modules know their layer's number.
LAYER_NUMBERS = ("layer_idx", "layer_index", "layer_id", "layer_number", "block_idx")
# Arguments of heads that ask for a loss.
_LABELS = ("labels", "start_positions")
# Names of grafts' own tensors; `*` is any text.
GRAFT_TENSORS = (
    "*mlp.adapter.*",
    "*interpolator.*",
    "*expert_router.*",
    "*control_bank.*",
    "*domain_gate.*",
    "*.lora_*",
)


class _Forward(threading.local):
    flow: Flow | None = None
    rest: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        """As `_Active`."""
        return type(self), ()


_forward = _Forward()


@contextmanager
def in_flow(flow: Flow | None) -> Iterator[None]:
    """Let the decoder and the layers that this thread runs find `flow`."""
    previous = _forward.flow
    _forward.flow = flow
    try:
        yield
    finally:
        _forward.flow = previous


Rest = tuple[Any, ...] | list[Any] | None


def one_tensor(made: Any) -> tuple[Tensor, Rest]:
    """A module's output, and what came with it; None where it came alone."""
    return (made[0], made[1:]) if isinstance(made, tuple | list) else (made, None)


def with_rest(output: Tensor, rest: Rest) -> Any:
    """The output in the form in which it came."""
    if rest is None:
        return output
    return [output, *rest] if isinstance(rest, list) else (output, *rest)


class DerivedSite(Site):
    """Mixed in before a native block of any form: what it reads comes first, what it writes first in what it returns.

    Grafts stand at the block's usual name, `self_attn` or `mlp`: at the block itself or, where the model calls it
    otherwise, at a `Seat` beside it.
    """

    seat: nn.Module
    # What the block calls its input.
    reads: str

    def carry(self, seat: nn.Module, grafts: tuple[Graft, ...]) -> None:
        """Take grafts that stand at `seat`."""
        # Past nn.Module, which would take the seat for a part of the block.
        self.__dict__["seat"] = seat
        self.reads = next(iter(inspect.signature(self.forward).parameters))
        self.grafts = grafts

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The native output with what grafts make of it; experts may give it as one row a token."""
        output, rest = one_tensor(super().__call__(*args, **kwargs))
        x = args[0] if args else kwargs[self.reads]
        shape = output.shape
        output = beside_block(self.seat, self.grafts, x, output.reshape(x.shape))
        return with_rest(output.reshape(shape), rest)


class Seat(nn.Module):
    """Where grafts of a block stand that the model calls by another name."""


class DerivedGrafted(GraftedLayer):
    """A native layer, built already, into which grafts put their modules."""

    # Of each block that can carry grafts: its name, its native class, its usual name, and its class with grafts.
    sites: ClassVar[tuple[tuple[str, type[nn.Module], str, type[DerivedSite]], ...]]
    # The config field that names the backbone's activation.
    activation_field: ClassVar[str]

    def compose(self, config: Any, index: int, surgery: Surgery) -> None:
        """Let grafts in; `index` is the layer's, of trunk or tail."""
        self.open_blocks(index, surgery)
        asked = {role for graft in surgery.rules for role in graft.blocks(surgery, index)}
        if lacking := sorted(role for role in asked if not self.carries(role)):
            raise ValueError(f"config.surgery: layer {index} has no `{lacking[0]}` beside which a graft could stand")
        self.grafts: tuple[Graft, ...] = tuple(
            graft for graft in surgery.rules if graft.attach(self, config, index, surgery)
        )
        self._weigh(surgery, index)

    def open_blocks(self, index: int, surgery: Surgery) -> None:
        """Make the blocks beside which grafts stand able to carry them."""
        for name, native, role, kind in self.sites:
            beside = tuple(graft for graft in surgery.rules if role in graft.blocks(surgery, index))
            found = self._modules.get(name)
            if type(found) is not native or not beside:
                continue
            found.__class__ = kind
            block: Any = found
            seat = block if name == role else Seat()
            setattr(self, role, seat)
            vars(seat)["activation_field"] = self.activation_field
            block.carry(seat, beside)

    def carries(self, role: str) -> bool:
        """Whether a block can carry grafts, by its usual name."""
        return any(kept == role and isinstance(self._modules.get(name), kind) for name, _, kept, kind in self.sites)


class DerivedBranch(DerivedGrafted, BranchLayer):
    """An expanded twin; of what it returns only the hidden states count."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The native output, B T D."""
        return one_tensor(super().forward(*args, **kwargs))[0]


class FirstOutput(nn.Module):
    """Mixed in between `DerivedLayer` and the native layer: keeps what comes with the hidden states."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The native hidden states, B T D."""
        output, _forward.rest = one_tensor(super().forward(*args, **kwargs))
        return output


class DerivedLayer(DerivedGrafted, UpcycledLayer):
    """A trunk layer, with what the surgery put into it and beside it."""

    branch_of: ClassVar[type[DerivedBranch]]

    def compose_with(self, twin: nn.Module | None, config: Any, index: int, surgery: Surgery) -> None:
        """Let grafts in; `twin` is a native copy of the layer, which a control block puts beside it."""
        if twin is not None:
            twin.__class__ = self.branch_of
            vars(self)["branch_class"] = partial(_at_tail, twin, index, surgery)
        self.compose(config, index, surgery)
        vars(self).pop("branch_class", None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer in this thread's flow; what it returns is of the native form."""
        hidden_states, args = (args[0], args[1:]) if args else (kwargs.pop("hidden_states"), ())
        flow = _forward.flow
        if flow is None or not (self.grafts or flow.off):
            output = super(UpcycledLayer, self).__call__(hidden_states, None, *args, **kwargs)
        else:
            output = super().__call__(hidden_states, *args, surgery_flow=flow, **kwargs)
        rest, _forward.rest = _forward.rest, None
        return with_rest(output, rest)


def copied(layer: nn.Module) -> nn.Module:
    """A native layer's copy. Both have one config: what is set there later, such as the attention, holds for both."""
    held = (value for module in layer.modules() for value in vars(module).values())
    return copy.deepcopy(layer, {id(value): value for value in held if isinstance(value, PreTrainedConfig)})


def _at_tail(twin: Any, home: int, surgery: Surgery, config: Any, branch: int) -> Any:
    """A copy of layer `home` as layer `branch` of the tail."""
    for module in twin.modules():
        for name in LAYER_NUMBERS:
            if vars(module).get(name) == home:
                setattr(module, name, branch)
    twin.compose(config, branch, surgery)
    return twin


class DerivedPreTrained(UpcycledPreTrained):
    """What upcycled models of any type share; `stack` is the path of the list of layers in the model that holds it."""

    stack: ClassVar[str]

    @classmethod
    def is_custom_code(cls) -> bool:
        """No: its modules are native ones, all of whose buffers transformers must fill as it does in its own models."""
        return False

    def _get_dtype_plan(self, dtype: torch.dtype) -> dict[str, Any]:
        # What a native model keeps in float32 goes by names such as `gate`, which parts of grafts have too.
        plan: dict[str, Any] = super()._get_dtype_plan(dtype)
        return dict.fromkeys(GRAFT_TENSORS, dtype) | plan if plan else plan

    def graft_parameter_names(self) -> list[str]:
        """Names of the parameters that the surgery added and that train, in the model's order."""
        owners: list[str] = []
        for name, module in self.named_modules():
            if isinstance(module, DerivedModel):
                prefix = f"{name}." if name else ""
                told = (owner.replace("layers.", f"{self.stack}.", 1) for owner in read_surgery(module.config).trains())
                owners += [f"{prefix}{owner}" for owner in told]
        return [name for name, _ in self.named_parameters() if name.startswith(tuple(owners))]


class DerivedModel(DerivedPreTrained, UpcycledBase):
    """The text decoder: native, with its trunk made of upcycled layers."""

    layer_classes: ClassVar[Mapping[type[nn.Module], type[DerivedLayer]]]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.graft()

    def graft(self) -> None:
        """Make the native layers upcycled ones; the tail goes, its twins stand beside the trunk."""
        surgery = self.surgery = read_surgery(self.config)
        above, _, name = self.stack.rpartition(".")
        parent = self.get_submodule(above)
        layers: Any = getattr(parent, name)[: surgery.trunk_layers]
        setattr(parent, name, layers)
        twins = {home: copied(layers[home]) for home in surgery.homes.values()}
        for index, layer in enumerate(layers):
            layer.__class__ = self.layer_classes[type(layer)]
            layer.compose_with(twins.get(index), self.config, index, surgery)
        for graft in surgery.rules:
            graft.complete(self, surgery)
        # Kept by class when a model is made, and this one was made as another; before 5.23 by the class's name.
        registry: Any = output_capturing._CAN_RECORD_REGISTRY
        registry[str(type(self)) if type(registry) is dict else self] = self._can_record_outputs
        # The native class's, kept by the model itself, would hide this one's.
        self.__dict__.pop("_no_split_modules", None)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self:
            # What a model sets in its layers by walking through them, it does not set in their twins.
            for layer in cast(nn.ModuleList, self.get_submodule(self.stack)):
                copy_unsaved(layer, layer._modules.get("expanded"))

    def run_grafted(self, run: Callable[..., Any], given: dict[str, Any], flow: Flow | None) -> Any:
        """`run`, the native forward, with what crosses layers; `given` are its arguments by name."""
        flow, domains = _forward.flow if flow is None else flow, given.pop("domain_ids", None)
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


def copy_unsaved(layer: nn.Module, twin: nn.Module | None) -> None:
    """Give a layer's twin, if it has one, the layer's buffers that no checkpoint holds."""
    held = dict(layer.named_modules())
    for name, module in () if twin is None else twin.named_modules():
        for key in module._non_persistent_buffers_set:
            source = held[name]._buffers.get(key) if name in held else None
            own = module._buffers[key]
            if own is not None and source is not None and own.shape == source.shape:
                own.copy_(source)


def decoder_forward(native: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a `DerivedModel` over `native`, with its arguments."""
    names = tuple(inspect.signature(native).parameters)[1:]

    @wraps(native)
    def forward(self: DerivedModel, *args: Any, surgery_flow: Flow | None = None, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        return self.run_grafted(partial(native, self), given, surgery_flow)

    return forward


class DerivedOuter(DerivedPreTrained):
    """A native model in which the text decoder stands somewhere: a head, or a model of several parts."""

    decoder_class: ClassVar[type[DerivedModel]]
    _no_split_modules: Any

    def __init__(self, config: Any) -> None:
        upcycled, native = self.decoder_class.config_class, self.decoder_class.__bases__[-1]
        text, whole = config.get_text_config(decoder=True), type(config)
        # Native code asks by a config's class which model to build.
        text.__class__ = upcycled.__bases__[-1]
        config.__class__ = whole.__bases__[-1]
        try:
            super().__init__(config)
        finally:
            config.__class__ = whole
        decoder: Any
        (decoder,) = (module for module in self.modules() if type(module) is native)
        decoder.config.__class__ = upcycled
        decoder.__class__ = self.decoder_class
        decoder.graft()
        self.surgery = decoder.surgery
        self.post_init()
        # A model between the two was made before the decoder had its layers.
        self._no_split_modules = {*self._no_split_modules, *decoder._no_split_modules}


class DerivedHead(DerivedOuter):
    """A native head over the upcycled decoder; its loss in training holds the auxiliary losses.

    `freeze_base` freezes the head too where no surgery made it: let one that is new train by itself.
    """

    output_class: ClassVar[type[Any]]
    # Whether its loss is a mean over tokens, which trainers share out among micro-batches.
    by_token: ClassVar[bool]

    def run_grafted(
        self, run: Callable[..., Any], given: dict[str, Any], domain_ids: Tensor | None, flow: Flow | None
    ) -> Any:
        """`run`, the native forward; `domain_ids` (B or B T; 0: the original domain) switch the local losses on."""
        labels = next((given[name] for name in _LABELS if given.get(name) is not None), None)
        if not self.training or labels is None:
            if self.training and domain_ids is not None and flow is None:
                tell_of_lost_losses(self.surgery)
                inputs = given_inputs(given.get("input_ids"), given.get("inputs_embeds"))
                flow = Flow(domains=token_domains(domain_ids, torch.Size(inputs.shape[:2])))
            with in_flow(flow):
                output = run(**given)
            if not self.training:
                tell_of_mode(self.surgery, getattr(output, "loss", None))
            return self.with_losses(output)
        inputs = given_inputs(given.get("input_ids"), given.get("inputs_embeds"))
        flow = open_flow(self.surgery, inputs, given.get("attention_mask"), domain_ids)
        asked = given.pop("return_dict", None)
        in_fields = self.config.return_dict if asked is None else asked
        with in_flow(flow or Flow()):
            output = run(return_dict=True, **given)
        if flow is None:
            output = self.with_losses(output)
        else:
            scale: float | Tensor = 1.0
            if self.by_token:
                scale = accumulation_scale(labels, given.get("shift_labels"), given.get("num_items_in_batch"))
            output = self.output_class(**close_flow(output, flow, scale))
        return output if in_fields else output.to_tuple()

    def with_losses(self, output: Any) -> Any:
        """The native output with fields for the auxiliary losses, all of them None; a tuple as it is."""
        is_native = type(output) is self.output_class.__bases__[0]
        return self.output_class(**output) if is_native else output


def head_forward(native: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a `DerivedHead` over `native`, with its arguments and `domain_ids`."""
    known = inspect.signature(native)
    names = tuple(known.parameters)[1:]
    added = inspect.Parameter("domain_ids", inspect.Parameter.KEYWORD_ONLY, default=None)

    @wraps(native)
    def forward(
        self: DerivedHead,
        *args: Any,
        domain_ids: Tensor | None = None,
        surgery_flow: Flow | None = None,
        **kwargs: Any,
    ) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        return self.run_grafted(partial(native, self), given, domain_ids, surgery_flow)

    # What trainers and generation look at; a `**kwargs` stays the last.
    held = list(known.parameters.values())
    at = len(held) - (held[-1].kind is inspect.Parameter.VAR_KEYWORD)
    forward.__signature__ = known.replace(parameters=[*held[:at], added, *held[at:]])  # type: ignore[attr-defined]
    return forward


def trunk_states(native: type[Any]) -> dict[str, Any]:
    """What of a decoder's modules can be recorded; of its layers' hidden states, those of the trunk."""
    recorded = dict(getattr(native, "_can_record_outputs", None) or {})
    return recorded | {key: DerivedLayer for key in recorded if key == "hidden_states"}


def attach_derived(config: Any, surgery: dict[str, Any] | None, anatomy: dict[str, Any] | None) -> None:
    """Give a config its `surgery`, checked, and the `anatomy` that its classes were composed by.

    Where the text decoder's config is a part of it, the part knows the surgery too.
    """
    config.surgery, config.anatomy = surgery, anatomy
    text = config.get_text_config(decoder=True)
    text.surgery = surgery
    read_surgery(text, type(config).grafts)


def without_surgery(fields: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """A config's fields, its part at `path` without `surgery`, which stands above it."""
    part = fields
    for key in path:
        part = part.get(key) or {}
    part.pop("surgery", None)
    return fields


def carry_conversions(upcycled: type[Any], native: type[Any]) -> None:
    """Let transformers read and write an upcycled model's tensors as the native one's.

    It does so for its own classes, by name, and by model type; of other code it must be told.
    """
    known = conversion_mapping.get_checkpoint_conversion_mapping
    register = conversion_mapping.register_checkpoint_conversion_mapping
    if (by_class := known(native.__name__)) is not None:
        register(upcycled.__name__, by_class, overwrite=True)
    native_type, own_type = native.config_class.model_type, upcycled.config_class.model_type
    if (by_type := known(native_type)) is not None:
        register(own_type, by_type, overwrite=True)
