"""Models of any type with grafts: the native model is built first, then its layers change their class."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import output_capturing

from .graft import Flow, here
from .layers import UpcycledLayer, in_flow
from .losses import LOST, tell
from .newborn import Leaf
from .rules import Surgery, read_surgery


class UpcycledPreTrained(PreTrainedModel):
    """The base class of upcycled models; `stack` is the path of the list of layers in the model that holds it."""

    stack: ClassVar[str]
    surgery: Surgery

    # False makes transformers fill the buffers of the native modules, as it does in its own models.
    is_custom_code = classmethod(lambda cls: False)

    @property
    def supports_pp_plan(self) -> bool:
        """Raise ValueError; only vLLM and SGLang read this, where they would split the layers over processes."""
        raise ValueError("layers with grafts run in one process alone; set pipeline_parallel_size to 1")

    def _get_dtype_plan(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return the dtypes of modules that are not loaded in `dtype`; grafts' tensors always are."""
        # A native model lists what stays in float32 by names such as `gate`, which modules of grafts may have too.
        plan: dict[str, Any] = super()._get_dtype_plan(dtype)
        left = self._left_by_quantisers()
        plan = {name: held for name, held in plan.items() if name not in left}
        own = (pattern for graft in self.surgery.rules for pattern in graft.tensors)
        return dict.fromkeys(own, dtype) | plan if plan else plan

    @property
    def _keep_in_fp32_modules(self) -> Any:
        # Every quantiser of transformers leaves the modules listed here, and marks the model before it reads the list.
        kept = self.__dict__.get("kept_in_fp32", self.native_class()._keep_in_fp32_modules)
        return {*(kept or ()), *self._left_by_quantisers()} if getattr(self, "is_quantized", False) else kept

    @_keep_in_fp32_modules.setter
    def _keep_in_fp32_modules(self, kept: Any) -> None:
        self.__dict__["kept_in_fp32"] = kept

    def _left_by_quantisers(self) -> set[str]:
        """Return the names of modules of grafts' classes, which quantisers must not replace."""
        replaces = tuple(kind for graft in self.surgery.rules for kind in graft.replaces)
        held = self.named_modules()
        return {name for name, module in held if isinstance(module, replaces) or hasattr(module, "spanning")}

    def grafted_models(self) -> dict[str, UpcycledModel]:
        """Return the models with grafts, this one or those inside it, by the prefix of their tensors' names."""
        held = self.named_modules()
        return {f"{name}." if name else "": module for name, module in held if isinstance(module, UpcycledModel)}

    def graft_parameter_names(self) -> list[str]:
        """Return the names of the trainable parameters that the surgery added, in the model's order."""
        owners = tuple(
            prefix + owner.replace("layers.", f"{model.stack}.", 1)
            for prefix, model in self.grafted_models().items()
            for owner in model.surgery.trains()
        )
        return [name for name, _ in self.named_parameters() if name.startswith(owners)]

    def freeze_base(self) -> list[str]:
        """Make exactly the parameters of `graft_parameter_names()` trainable; return their names."""
        names = dict.fromkeys(self.graft_parameter_names())
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name in names)
        return list(names)

    @contextmanager
    def grafts(self, *, enabled: bool) -> Iterator[None]:
        """Switch grafts off (`enabled=False`) inside the context and in this thread.

        The model then computes what its base does, bit for bit: grafts take no part, and inserted layers return their
        input. Use a cache that was filled inside only inside. A nested `enabled=True` switches grafts on again.
        """
        before, own = here.off, tuple(self.grafted_models().values())
        others = tuple(model for model in before if model not in own)
        here.off = others if enabled else (*others, *own)
        try:
            yield
        finally:
            here.off = before

    @classmethod
    def native_class(cls) -> Any:
        """Return the class of transformers that this class extends."""
        natives = (kind for kind in cls.__mro__ if issubclass(kind, PreTrainedModel))
        return next(kind for kind in natives if not issubclass(kind, UpcycledPreTrained))

    # For these two, transformers reads the source of a class's module, but native experts and attention are defined in
    # another one: the model would run experts one by one, and so sum in another order than the base.
    _can_set_experts_implementation = classmethod(lambda cls: cls.native_class()._can_set_experts_implementation())
    _can_set_attn_implementation = classmethod(lambda cls: cls.native_class()._can_set_attn_implementation())

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Fill a module's tensors that no checkpoint has filled."""
        if isinstance(module, Leaf):
            module.initialise()
        else:
            super()._init_weights(module)

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """Load a model as transformers does, but raise ValueError where the checkpoint lacks a graft's tensor.

        transformers would fill the tensor at random. If the checkpoint holds none of the model's tensors at all,
        transformers fills them with its usual warning.
        """
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        lacked, grafted = set(info["missing_keys"]), check_sites(model)
        if (missing := sorted(lacked & set(grafted))) and not lacked.issuperset(model.state_dict()):
            raise ValueError(
                f"the checkpoint lacks {len(missing)} tensors of its config's surgery, first of them `{missing[0]}`;"
                " download it again in full, or apply the surgery again"
            )
        return (model, info) if output_loading_info else model


class UpcycledModel(UpcycledPreTrained):
    """A model whose layers have the grafts that `config.surgery` describes.

    `layer_classes` maps each native class of layers to its class with grafts.
    """

    layer_classes: ClassVar[Mapping[type[nn.Module], type[UpcycledLayer]]]

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        if type(config) is not self.config_class and type(config).__qualname__ == self.config_class.__qualname__:
            # vLLM sends its workers a config with a copy of its class, whose grafts are copies of this code's too.
            config.__class__ = self.config_class
        super().__init__(config, *args, **kwargs)
        self.graft()

    def graft(self) -> None:
        """Change the native layers into layers with grafts; drop the tail, whose layers become twins in the trunk."""
        surgery = self.surgery = read_surgery(self.config)
        layers: Any = self.get_submodule(self.stack)
        if surgery.homes:
            layers = layers[: surgery.trunk_layers]
            self.set_submodule(self.stack, layers)
        for index, layer in enumerate(layers):
            layer.__class__ = self.layer_classes[type(layer)]
            layer.compose(self.config, index, surgery)
        for graft in surgery.rules:
            graft.complete(self, surgery)
        # transformers registers this by class when a model is made, and this model was made as the native class. (The
        # key is the model, or before 5.23 the class's name.)
        registry: Any = output_capturing._CAN_RECORD_REGISTRY
        registry[str(type(self)) if type(registry) is dict else self] = self._can_record_outputs
        # The instance has the native class's value, which would hide this class's.
        self.__dict__.pop("_no_split_modules", None)
        self.post_init()

    def run_grafted(self, run: Callable[..., Any], given: dict[str, Any], flow: Flow | None) -> Any:
        """Return the output of `run`, the native forward, in a flow; `given` are its arguments by name."""
        given.pop("domain_ids", None)
        if flow is None and self.training and (self.surgery.measures() or self.surgery.needs_domains()):
            tell(LOST)
        with in_flow(Flow(off=True) if self in here.off else flow):
            return run(**given)


def grafted_forward(native: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward of an upcycled model: it wraps `native` and accepts its arguments and `domain_ids`."""
    known = inspect.signature(native)
    names = tuple(known.parameters)[1:]

    @wraps(native)
    def forward(self: Any, *args: Any, surgery_flow: Flow | None = None, **kwargs: Any) -> Any:
        """Run the native forward with grafts; `surgery_flow` is a flow that the caller wants to read."""
        given = dict(zip(names, args, strict=False)) | kwargs
        return self.run_grafted(partial(native, self), given, here.flow if surgery_flow is None else surgery_flow)

    # Trainers and generation read this signature; a `**kwargs` stays last.
    held = list(known.parameters.values())
    at = len(held) - (held[-1].kind is inspect.Parameter.VAR_KEYWORD)
    added = inspect.Parameter("domain_ids", inspect.Parameter.KEYWORD_ONLY, default=None)
    forward.__signature__ = known.replace(parameters=[*held[:at], added, *held[at:]])  # type: ignore[attr-defined]
    return forward


def check_sites(model: Any) -> list[str]:
    """Return the names of grafts' tensors in a model; raise ValueError where modules of grafts are missing.

    A quantiser or a kernel replacer may have replaced them.
    """
    bases = model.grafted_models().values()
    counted = [(b, *each) for b in bases for graft in b.surgery.rules for each in graft.counted(b.surgery).items()]
    for base, what, (kind, expected) in counted:
        if (found := sum(isinstance(module, kind) for module in base.modules())) != expected:
            raise ValueError(
                f"the model has {found} {what} after loading; the config describes {expected}: something replaced them;"
                " a quantiser leaves what its `modules_to_not_convert` names: give it the modules that hold them"
            )
    kinds = tuple(kind for _, _, (kind, _) in counted)
    owners = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, kinds))
    return [name for name in model.state_dict() if name.startswith(owners)]
