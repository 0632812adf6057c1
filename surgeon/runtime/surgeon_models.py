"""What every upcycled model shares, mixed in before a family's native classes."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import can_return_tuple

from .surgeon_adapters import BlockGate, GatedAdapter, InputProjection, OutputProjection
from .surgeon_interpolators import Interpolator
from .surgeon_layers import BranchLayer, UpcycledLayer
from .surgeon_losses import (
    Flow,
    UpcycledCausalLMOutput,
    UpcycledSequenceClassifierOutput,
    accumulation_scale,
    close_flow,
    open_flow,
)
from .surgeon_surgery import read_surgery

BORN_WITH_VALUES = (Interpolator, InputProjection, OutputProjection, BlockGate)


def attach_surgery(config: Any, surgery: dict[str, Any] | None) -> None:
    """Give a config its `surgery`, checked, and the `auto_map` by which remote loading finds its classes."""
    config.surgery = surgery
    read_surgery(config)
    kind = type(config)
    file, prefix = kind.__module__.rpartition(".")[2], kind.__name__.removesuffix("Config")
    if getattr(config, "auto_map", None) is None:
        config.auto_map = {
            "AutoConfig": f"{file}.{prefix}Config",
            "AutoModel": f"{file}.{prefix}Model",
            "AutoModelForCausalLM": f"{file}.{prefix}ForCausalLM",
            "AutoModelForSequenceClassification": f"{file}.{prefix}ForSequenceClassification",
        }


class UpcycledPreTrained(PreTrainedModel):
    """Loading that refuses half a graft, and training of the grafts alone."""

    def graft_parameter_names(self) -> list[str]:
        """Names of the parameters that the surgery added and that train, in the model's order."""
        owners: list[str] = []
        for name, module in self.named_modules():
            if isinstance(module, UpcycledModel):
                prefix = f"{name}." if name else ""
                surgery = read_surgery(module.config)
                owners += [f"{prefix}layers.{layer}." for layer in surgery.new_layers]
                for control in surgery.controls.values():
                    if not control.frozen:
                        owners += [f"{prefix}layers.{control.layer}.{part}." for part in ("expanded", "interpolator")]
                homes = {control.branch: f"{control.layer}.expanded" for control in surgery.controls.values()}
                for adapter in surgery.adapters.values():
                    if not adapter.frozen:
                        owners.append(f"{prefix}layers.{homes.get(adapter.layer, adapter.layer)}.mlp.adapter.")
        return [name for name, _ in self.named_parameters() if name.startswith(tuple(owners))]

    def freeze_base(self) -> list[str]:
        """Let exactly the parameters of `graft_parameter_names()` train; returns their names."""
        names = self.graft_parameter_names()
        chosen = set(names)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name in chosen)
        return names

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, BORN_WITH_VALUES):
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
    """The base model: native, with its trunk made of upcycled layers."""

    layer_class: ClassVar[type[UpcycledLayer]]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._graft()

    def _graft(self) -> None:
        """Put the upcycled trunk in the place of the native layers; the tail moves into its twins."""
        trunk = range(read_surgery(self.config).trunk_layers)
        self.layers = nn.ModuleList([self.layer_class(self.config, index) for index in trunk])
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        domain_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """The native forward. `domain_ids` is for the heads' losses and has no part in the output."""
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )


class UpcycledCausalLM(UpcycledPreTrained):
    """The language-modelling head; its loss in training holds the auxiliary losses."""

    base_class: ClassVar[type[UpcycledModel]]

    def __init__(self, config: Any) -> None:
        # The native head would build the native base model.
        PreTrainedModel.__init__(self, config)
        self.model = self.base_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.surgery = read_surgery(config)
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]  # transformers is not typed
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        domain_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> UpcycledCausalLMOutput:
        """The native forward; `domain_ids` (B or B T; 0: the original domain) switch the local losses on."""
        flow: Flow | None = None
        scale: float | Tensor = 1.0
        if self.training and labels is not None:
            flow = open_flow(self.surgery, _inputs(input_ids, inputs_embeds), attention_mask, domain_ids)
            scale = accumulation_scale(labels, kwargs.get("shift_labels"), kwargs.get("num_items_in_batch"))
        output = super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            labels=labels,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            return_dict=True,
            **(kwargs if flow is None else kwargs | {"surgery_flow": flow}),
        )
        return UpcycledCausalLMOutput(**close_flow(output, flow, self.surgery.local_loss, scale))


class UpcycledSequenceClassifier(UpcycledPreTrained):
    """The classification head; its loss in training holds the auxiliary losses.

    `freeze_base` freezes `score` too, as no surgery made it: let it train by itself where it is new.
    """

    base_class: ClassVar[type[UpcycledModel]]

    def __init__(self, config: Any) -> None:
        # The generic head would ask AutoModel, which does not know this model type.
        PreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = self.base_class(config)
        self.score = nn.Linear(config.hidden_size, self.num_labels, bias=False)
        self.surgery = read_surgery(config)
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]  # transformers is not typed
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        domain_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> UpcycledSequenceClassifierOutput:
        """The native forward; `domain_ids` (B or B T; 0: the original domain) switch the local losses on."""
        flow = None
        if self.training and labels is not None:
            flow = open_flow(self.surgery, _inputs(input_ids, inputs_embeds), attention_mask, domain_ids)
        output = super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            labels=labels,
            use_cache=use_cache,
            return_dict=True,
            **(kwargs if flow is None else kwargs | {"surgery_flow": flow}),
        )
        return UpcycledSequenceClassifierOutput(**close_flow(output, flow, self.surgery.local_loss, 1.0))


def graft_tensors(model: nn.Module) -> list[str]:
    """Names of all tensors that a graft holds, trained or not."""
    owners = tuple(
        f"{name}."
        for name, module in model.named_modules()
        if isinstance(module, BranchLayer | Interpolator | GatedAdapter)
    )
    return [name for name in model.state_dict() if name.startswith(owners)]


def check_sites(model: nn.Module) -> None:
    """Refuse a model whose grafts something (a quantiser, a kernel replacer) has replaced or dropped."""
    for name, base in model.named_modules():
        if not isinstance(base, UpcycledModel):
            continue
        surgery = read_surgery(base.config)
        branches = sum(isinstance(module, BranchLayer) for module in base.modules())
        interpolators = sum(isinstance(module, Interpolator) for module in base.modules())
        adapters = sum(isinstance(module, GatedAdapter) for module in base.modules())
        expected = (len(surgery.controls), len(surgery.controls), len(surgery.adapters))
        if (branches, interpolators, adapters) != expected:
            raise ValueError(
                f"{name or 'the model'} has {branches} branches, {interpolators} interpolators, {adapters} "
                f"adapters after loading; the config describes {expected}: something replaced them"
            )


def _inputs(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
    given = input_ids if input_ids is not None else inputs_embeds
    if given is None:
        raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
    return given
