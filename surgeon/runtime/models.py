"""What every upcycled model shares, mixed in before a family's native classes."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import can_return_tuple

from .adapters import BlockGate, GatedAdapter, InputProjection, OutputProjection
from .experts import LoraSlot, RouterColumn
from .interpolators import Interpolator
from .layers import BranchLayer, UpcycledLayer
from .losses import (
    Flow,
    UpcycledCausalLMOutput,
    UpcycledSequenceClassifierOutput,
    accumulation_scale,
    close_flow,
    open_flow,
    tell_of_lost_losses,
    valid_tokens,
)
from .states import ControlBank, ControlState, Mixing, MixtureGate, RoutingCache
from .surgery import Surgery, read_surgery

BORN_WITH_VALUES = (
    Interpolator,
    InputProjection,
    OutputProjection,
    BlockGate,
    LoraSlot,
    RouterColumn,
    ControlState,
    MixtureGate,
)
# Modules that a surgery adds, whose tensors a checkpoint must hold, and how many of them a config describes.
GRAFTS = (BranchLayer, Interpolator, GatedAdapter, LoraSlot, RouterColumn, ControlState, MixtureGate)


def attach_surgery(config: Any, surgery: dict[str, Any] | None) -> None:
    """Give a config its `surgery`, checked, and the `auto_map` by which remote loading finds its classes."""
    config.surgery = surgery
    mixture = read_surgery(config).mixture
    if mixture is not None and mixture.inference_routing == "sequence_mean":
        raise ValueError(
            "config.surgery: mixture inference_routing is `sequence_mean`, by which a decoder's token would see later "
            "ones; it must be `prefix_mean` or `token`"
        )
    add_auto_map(config, ("ForCausalLM", "ForSequenceClassification"))


def add_auto_map(config: Any, heads: tuple[str, ...]) -> None:
    """Name the classes beside the config's own in `auto_map`, where it has none."""
    kind = type(config)
    file, prefix = kind.__module__.rpartition(".")[2], kind.__name__.removesuffix("Config")
    if getattr(config, "auto_map", None) is None:
        config.auto_map = {
            "AutoConfig": f"{file}.{prefix}Config",
            "AutoModel": f"{file}.{prefix}Model",
            **{f"AutoModel{head}": f"{file}.{prefix}{head}" for head in heads},
        }


class UpcycledPreTrained(PreTrainedModel):
    """Loading that refuses half a graft, and training of the grafts alone."""

    def graft_parameter_names(self) -> list[str]:
        """Names of the parameters that the surgery added and that train, in the model's order."""
        owners: list[str] = []
        for name, module in self.named_modules():
            if isinstance(module, UpcycledBase):
                prefix = f"{name}." if name else ""
                owners += [f"{prefix}{owner}" for owner in _training(read_surgery(module.config))]
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


class UpcycledBase(UpcycledPreTrained):
    """The base model, whose config's surgery says which grafts stand in it."""

    control_bank: ControlBank | None


class UpcycledModel(UpcycledBase):
    """The base model: native, with its trunk made of upcycled layers."""

    layer_class: ClassVar[type[UpcycledLayer]]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._graft()

    def _graft(self) -> None:
        """Put the upcycled trunk in the place of the native layers; the tail moves into its twins."""
        surgery = self.surgery = read_surgery(self.config)
        self.layers = nn.ModuleList([self.layer_class(self.config, index) for index in range(surgery.trunk_layers)])
        self.control_bank = None
        if surgery.mixture is not None:
            self.control_bank = ControlBank(surgery.mixture, surgery.sites, self.config.hidden_size)
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
        surgery_flow: Flow | None = None,
        **kwargs: Any,
    ) -> Any:
        """The native forward. `domain_ids` is for the heads' losses and has no part in the output."""
        if surgery_flow is None and self.training and torch.is_grad_enabled():
            tell_of_lost_losses(self.surgery)
        if surgery_flow is None and self.surgery.routes:
            surgery_flow = Flow()
        past: RoutingCache | None = None
        if surgery_flow is not None and self.control_bank is not None:
            past = _routing_cache(past_key_values, self.surgery)
            inputs = given_inputs(input_ids, inputs_embeds)
            seen = 0 if past_key_values is None else past_key_values.get_seq_length()
            valid = valid_tokens(attention_mask, torch.Size(inputs.shape[:2]), inputs.device, seen)
            surgery_flow.mixing = Mixing(self.control_bank, valid, past)
            surgery_flow.mixing.choices = [] if surgery_flow.records_choices else None
        output = super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **(kwargs if surgery_flow is None else kwargs | {"surgery_flow": surgery_flow}),
        )
        if surgery_flow is not None and surgery_flow.mixing is not None and surgery_flow.mixing.sums:
            _keep_routing(surgery_flow.mixing, past, getattr(output, "past_key_values", None))
        return output


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
        asked = False
        if self.training and labels is not None:
            asked = True
            flow = open_flow(self.surgery, given_inputs(input_ids, inputs_embeds), attention_mask, domain_ids)
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
            **(kwargs | {"surgery_flow": flow or Flow()} if asked else kwargs),
        )
        return UpcycledCausalLMOutput(**close_flow(output, flow, scale))


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
        asked = False
        if self.training and labels is not None:
            asked = True
            flow = open_flow(self.surgery, given_inputs(input_ids, inputs_embeds), attention_mask, domain_ids)
        output = super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            labels=labels,
            use_cache=use_cache,
            return_dict=True,
            **(kwargs | {"surgery_flow": flow or Flow()} if asked else kwargs),
        )
        return UpcycledSequenceClassifierOutput(**close_flow(output, flow, 1.0))


def graft_tensors(model: nn.Module) -> list[str]:
    """Names of all tensors that a graft holds, trained or not."""
    owners = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, GRAFTS))
    return [name for name in model.state_dict() if name.startswith(owners)]


def check_sites(model: nn.Module) -> None:
    """Refuse a model whose grafts something (a quantiser, a kernel replacer) has replaced or dropped."""
    for name, base in model.named_modules():
        if not isinstance(base, UpcycledBase):
            continue
        surgery = read_surgery(base.config)
        controls, sites = len(surgery.controls), len(surgery.sites)
        slots = sum(len(slot.targets) for experts in surgery.experts.values() for slot in experts.slots)
        columns = 0 if surgery.router is None else len(surgery.router.slots)
        gates = 0 if base.control_bank is None else len(base.control_bank.gates)
        expected = (controls, controls, len(surgery.adapters), slots, columns, sites, gates)
        found = tuple(sum(isinstance(module, kind) for module in base.modules()) for kind in GRAFTS)
        if found != expected:
            raise ValueError(
                f"{name or 'the model'} has {_counted(found)} after loading; the config describes"
                f" {_counted(expected)}: something replaced them"
            )


def _counted(counts: tuple[int, ...]) -> str:
    names = ("branches", "interpolators", "adapters", "slots", "router columns", "control states", "gates")
    return ", ".join(f"{count} {name}" for count, name in zip(counts, names, strict=True))


def _training(surgery: Surgery) -> list[str]:
    """What the names of parameters that train begin with, below the base model."""
    owners = [f"layers.{layer}." for layer in surgery.new_layers]
    for control in surgery.controls.values():
        if not control.frozen:
            owners += [f"layers.{control.layer}.{part}." for part in ("expanded", "interpolator")]
    homes = {control.branch: f"{control.layer}.expanded" for control in surgery.controls.values()}
    for adapter in surgery.adapters.values():
        if not adapter.frozen:
            owners.append(f"layers.{homes.get(adapter.layer, adapter.layer)}.mlp.adapter.")
    for experts in surgery.experts.values():
        home = homes.get(experts.layer, experts.layer)
        owners += [
            f"layers.{home}.{target}.slots.{slot.slot}."
            for slot in experts.slots
            if not slot.frozen
            for target in slot.targets
        ]
    if surgery.router is not None:
        columns = [column for column in surgery.router.slots if not column.frozen]
        owners += [f"layers.{surgery.router.layer}.expert_router.slots.{column.slot}." for column in columns]
    if surgery.mixture is not None and not surgery.mixture.frozen:
        owners.append("control_bank.")
    return owners


def _routing_cache(cache: Any, surgery: Surgery) -> RoutingCache | None:
    """The layer of a cache that holds earlier tokens' routing; an error where earlier tokens have none."""
    found = next((layer for layer in getattr(cache, "layers", ()) if isinstance(layer, RoutingCache)), None)
    mixture = surgery.mixture
    asked = mixture is not None and mixture.top_k > 0 and mixture.inference_routing == "prefix_mean"
    if found is None and asked and cache is not None and not torch.compiler.is_compiling():
        seen = int(cache.get_seq_length())
        if seen:
            raise ValueError(
                f"the cache holds {seen} tokens that this model did not route; pass one that its own forward filled"
            )
    return found


def _keep_routing(mixing: Mixing, past: RoutingCache | None, cache: Any) -> None:
    if cache is None:
        return
    if past is None:
        past = RoutingCache(is_sliding=bool(getattr(cache.layers[0], "is_sliding", False)))
        cache.layers.append(past)
    mixing.keep(past)


def given_inputs(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
    """Token ids or embeddings, whichever the caller gave."""
    given = input_ids if input_ids is not None else inputs_embeds
    if given is None:
        raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
    return given
