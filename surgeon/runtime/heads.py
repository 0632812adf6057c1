"""Native models in which an upcycled one stands, as heads and models of several parts."""

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
    """A native model in which the upcycled decoder stands; a head's loss in training holds the auxiliary losses.

    `freeze_base` freezes the head too where no surgery made it: let one that is new train by itself.
    """

    decoder_class: ClassVar[type[UpcycledModel]]
    output_class: ClassVar[type[Any]]
    _no_split_modules: Any
    # Whether its loss is a mean over tokens, which trainers share out among micro-batches.
    by_token = False

    def __init__(self, config: Any) -> None:
        native, whole = self.decoder_class.__bases__[-1], type(config)
        upcycled = self.decoder_class.config_class
        # Native code asks by a config's class which model to build.
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
        # A model between the two was made before the decoder had its layers.
        self._no_split_modules = {*self._no_split_modules, *decoder._no_split_modules}

    def run_grafted(self, run: Callable[..., Any], given: dict[str, Any], flow: Flow | None) -> Any:
        """`run`, the native forward; `domain_ids` (B or B T; 0: the original domain) switch the local losses on."""
        domain_ids, surgery = given.pop("domain_ids", None), self.surgery
        labels = next((given[name] for name in ("labels", "start_positions") if given.get(name) is not None), None)
        trained = open_flow(surgery, given, domain_ids) if self.training and labels is not None else None
        flow, losses = trained or flow, surgery.measures() or surgery.needs_domains()
        if self.training and domain_ids is not None and flow is None:
            if losses:
                tell(LOST)
            # A domain gate goes by them.
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
    """The native head over an upcycled decoder, as a class of this file: what `AutoModelFor…` finds and saves."""
    # In training the auxiliary losses, before their weights (None where they are off); pickles find it here.
    extra: Any = [(name, torch.FloatTensor | None, None) for graft in config.grafts for name in graft.losses]
    if extra:
        name, here = f"Upcycled{output.__name__}", {"__module__": __name__}
        output = globals().setdefault(name, make_dataclass(name, extra, bases=(output,), namespace=here))
    stated |= {"config_class": config, "decoder_class": decoder, "stack": decoder.stack, "output_class": output}
    stated |= {"forward": grafted_forward(native.forward), "__module__": __name__}
    # transformers looks for it among a class's own bases.
    bases = (UpcycledOuter, native, *(GenerationMixin,) * stated.get("by_token", False))
    made: Any = type(f"Upcycled{native.__name__}", bases, stated)
    made.register_for_auto_class(auto)
    carry_conversions(made, native)
    return made


def without_surgery(fields: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """A config's fields, its part at `path` without `surgery`, which stands above it."""
    part = fields
    for key in path:
        part = part.get(key) or {}
    part.pop("surgery", None)
    return fields


class BesideGrafts(WeightTransform):
    """What is mixed into a conversion of transformers': tensors of grafts go where their layer goes, by their names."""

    __slots__ = ()
    # Of a graft's tensor what stands before its place in the layer, and the rest.
    grafts: ClassVar[re.Pattern[str]]

    def rename_source_key(self, source_key: str) -> Any:
        """As transformers', but of a graft's tensor the first part alone."""
        found = self.grafts.fullmatch(source_key)
        if found is None:
            return super().rename_source_key(source_key)
        if isinstance(self, WeightConverter):
            return source_key, None
        renamed, pattern = super().rename_source_key(f"{found[1]}_")
        return renamed[:-1] + found[2], pattern

    def reverse_transform(self) -> Any:
        """As transformers', and beside grafts too."""
        return beside_grafts(super().reverse_transform(), self.grafts)


def beside_grafts(conversion: Any, grafts: re.Pattern[str]) -> Any:
    """The conversion as one that leaves the tensors of grafts their names, which `grafts` parts."""
    kind = type(conversion)
    if not issubclass(kind, BesideGrafts):
        # Pickles find it here.
        name, stated = f"{kind.__name__}BesideGrafts", {"__slots__": (), "__module__": __name__, "grafts": grafts}
        conversion.__class__ = globals().setdefault(name, type(name, (BesideGrafts, kind), stated))
    return conversion


def carry_conversions(upcycled: type[Any], native: type[Any]) -> None:
    """Let transformers read and write an upcycled model's tensors as the native one's.

    It does so for its own classes, by name, and by model type; of other code it must be told. A type may have another's
    class: its config says which it is.
    """
    config = upcycled.config_class
    names = (name for graft in config.grafts for name in graft.tensors)
    own = "|".join(re.escape(name.strip("*")).replace(r"\*", ".*") for name in names)
    grafts = re.compile(rf"(.*?(?:\.\d+\.|(?={own})))(.*(?:{own}).*)")
    types = (config.model_type, config.__bases__[-1].model_type)
    for ours, theirs in (types, (upcycled.__name__, native.__name__)):
        if (known := conversion_mapping.get_checkpoint_conversion_mapping(theirs)) is not None:
            # A part's config keeps its type, which is the native model's too.
            ours = upcycled.__name__ if ours == theirs else ours
            known = [beside_grafts(each, grafts) for each in known]
            conversion_mapping.register_checkpoint_conversion_mapping(ours, known, overwrite=True)
