"""Native models in which an upcycled one stands, as heads and models of several parts, and what their configs say.

A head's loss in training holds the auxiliary losses, and its output names them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import conversion_mapping

from .layers import in_flow
from .losses import Flow, accumulation_scale, close_flow, open_flow, tell_of_lost_losses, tell_of_mode, token_domains
from .models import UpcycledModel, UpcycledPreTrained, given_inputs
from .rules import read_surgery

# Arguments of heads that ask for a loss.
_LABELS = ("labels", "start_positions")


class UpcycledOuter(UpcycledPreTrained):
    """A native model in which the text decoder stands somewhere: a head, or a model of several parts."""

    decoder_class: ClassVar[type[UpcycledModel]]
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


class UpcycledHead(UpcycledOuter):
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
    """The forward of an `UpcycledHead` over `native`, with its arguments and `domain_ids`."""
    known = inspect.signature(native)
    names = tuple(known.parameters)[1:]
    added = inspect.Parameter("domain_ids", inspect.Parameter.KEYWORD_ONLY, default=None)

    @wraps(native)
    def forward(
        self: UpcycledHead,
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


def attach_surgery(config: Any, surgery: dict[str, Any] | None, anatomy: dict[str, Any] | None) -> None:
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
