"""Native models that contain an upcycled decoder: heads, such as `…ForCausalLM`, and models of several parts."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import make_dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import GenerationMixin, conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightTransform

from .graft import Flow
from .layers import in_flow
from .losses import EVALUATING, LOST, given_tokens, open_flow, tell, with_losses
from .models import UpcycledModel, UpcycledPreTrained, grafted_forward


class UpcycledOuter(UpcycledPreTrained):
    """A native model that contains the upcycled decoder; in training a head's loss includes the auxiliary losses.

    `freeze_base` also freezes a head that no surgery made: make the parameters of a new head trainable yourself.
    """

    decoder_class: ClassVar[type[UpcycledModel]]
    output_class: ClassVar[type[Any]]
    _no_split_modules: Any
    # Whether the head's loss is a mean over tokens, which trainers divide among micro-batches.
    by_token = False

    def __init__(self, config: Any) -> None:
        native, whole = self.decoder_class.__bases__[-1], type(config)
        upcycled = self.decoder_class.config_class
        # Native code builds the model that belongs to the config's class.
        config.get_text_config(decoder=True).__class__ = upcycled.__bases__[-1]
        config.__class__ = whole.__bases__[-1]
        try:
            super().__init__(config)
        finally:
            config.__class__ = whole
        decoder: Any = next(module for module in self.modules() if type(module) is native)
        decoder.config.__class__ = upcycled
        decoder.__class__ = self.decoder_class
        decoder.graft()
        self.surgery = decoder.surgery
        self.post_init()
        # A model between this one and the decoder was built before the decoder had its layers.
        self._no_split_modules = {*self._no_split_modules, *decoder._no_split_modules}

    def run_grafted(self, run: Callable[..., Any], given: dict[str, Any], flow: Flow | None) -> Any:
        """Return the output of `run`, the native forward, with the auxiliary losses where they apply.

        `given` are its arguments by name; `domain_ids` among them (B or B T; 0: the original domain) switch on the
        losses that need domains.
        """
        domain_ids, surgery = given.pop("domain_ids", None), self.surgery
        labels = next((given[name] for name in ("labels", "start_positions") if given.get(name) is not None), None)
        trained = open_flow(surgery, given, domain_ids) if self.training and labels is not None else None
        flow, losses = trained or flow, surgery.measures() or surgery.needs_domains()
        if self.training and domain_ids is not None and flow is None:
            if losses:
                tell(LOST)
            # In training a domain gate follows the domains.
            flow = Flow(domains=given_tokens(given, domain_ids)[2])
        asked = given.get("return_dict")
        if losses:
            given["return_dict"] = True
        with in_flow(flow):
            output: Any = run(**given)
        loss = getattr(output, "loss", None)
        differs = losses or "gate" in surgery.of
        if differs and not self.training and isinstance(loss, Tensor) and loss.requires_grad:
            tell(EVALUATING)
        if not losses:
            return output
        made = output if trained is None else with_losses(output, trained, labels, given, by_token=self.by_token)
        output = self.output_class(**made)
        return output if (self.config.return_dict if asked is None else asked) else output.to_tuple()


def head_over(
    config: type[Any], decoder: type[UpcycledModel], native: type[Any], output: type[Any], auto: str, **stated: Any
) -> Any:
    """Return a class of this file for the native head over an upcycled decoder; `AutoModelFor…` loads and saves it.

    `output` is the head's output class, `auto` the name of the `AutoModelFor…`; `stated` are more class attributes.
    """
    # The output's fields for the unweighted auxiliary losses (None where they are off); pickles find the class here.
    extra: Any = [(name, torch.FloatTensor | None, None) for graft in config.grafts for name in graft.losses]
    if extra:
        name, here = f"Upcycled{output.__name__}", {"__module__": __name__}
        output = globals().setdefault(name, make_dataclass(name, extra, bases=(output,), namespace=here))
    stated |= {"config_class": config, "decoder_class": decoder, "stack": decoder.stack, "output_class": output}
    stated |= {"forward": grafted_forward(native.forward), "__module__": __name__}
    # transformers looks for GenerationMixin among a class's own bases.
    bases = (UpcycledOuter, native, *(GenerationMixin,) * stated.get("by_token", False))
    made: Any = type(f"Upcycled{native.__name__}", bases, stated)
    made.register_for_auto_class(auto)
    carry_conversions(made, native)
    return made


def without_surgery(fields: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """Return a config's fields after removing `surgery` from the part at `path`, as the whole config has it already."""
    part = fields
    for key in path:
        part = part.get(key) or {}
    part.pop("surgery", None)
    return fields


class BesideGrafts(WeightTransform):
    """A mixin for a transformers weight conversion: a graft's tensor is renamed only as its layer is renamed."""

    __slots__ = ()
    # Splits the name of a graft's tensor into the path of its layer and the rest.
    grafts: ClassVar[re.Pattern[str]]

    def rename_source_key(self, source_key: str) -> Any:
        """Rename a tensor as transformers does; in the name of a graft's tensor only the path of its layer."""
        found = self.grafts.fullmatch(source_key)
        if found is None:
            return super().rename_source_key(source_key)
        if isinstance(self, WeightConverter):
            return source_key, None
        renamed, pattern = super().rename_source_key(f"{found[1]}_")
        return renamed[:-1] + found[2], pattern

    def reverse_transform(self) -> Any:
        """Return the reverse conversion, which treats grafts' tensors in the same way."""
        return beside_grafts(super().reverse_transform(), self.grafts)


def beside_grafts(conversion: Any, grafts: re.Pattern[str]) -> Any:
    """Return the conversion, changed to rename grafts' tensors only with their layer; `grafts` splits their names."""
    kind = type(conversion)
    if not issubclass(kind, BesideGrafts):
        # Pickles find it here.
        name, stated = f"{kind.__name__}BesideGrafts", {"__slots__": (), "__module__": __name__, "grafts": grafts}
        conversion.__class__ = globals().setdefault(name, type(name, (BesideGrafts, kind), stated))
    return conversion


def carry_conversions(upcycled: type[Any], native: type[Any]) -> None:
    """Register the native model's weight conversions for the upcycled one, so that transformers applies them to it.

    transformers finds conversions by class name and by model type, and knows only its own. A native class may serve
    several model types; the type is taken from the config.
    """
    config = upcycled.config_class
    names = (name for graft in config.grafts for name in graft.tensors)
    own = "|".join(re.escape(name.strip("*")).replace(r"\*", ".*") for name in names)
    grafts = re.compile(rf"(.*?(?:\.\d+\.|(?={own})))(.*(?:{own}).*)")
    types = (config.model_type, config.__bases__[-1].model_type)
    for ours, theirs in (types, (upcycled.__name__, native.__name__)):
        if (known := conversion_mapping.get_checkpoint_conversion_mapping(theirs)) is not None:
            # The config of a part keeps the native model type: register by class name instead.
            ours = upcycled.__name__ if ours == theirs else ours
            known = [beside_grafts(each, grafts) for each in known]
            conversion_mapping.register_checkpoint_conversion_mapping(ours, known, overwrite=True)
