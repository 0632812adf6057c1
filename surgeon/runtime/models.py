"""Decoders with grafts, mixed in before a family's native classes."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import can_return_tuple

from .layers import UpcycledLayer
from .losses import Flow, accumulation_scale, close_flow, open_flow, tell_of_lost_losses, tell_of_mode
from .pretrained import UpcycledBase, UpcycledPreTrained, given_inputs
from .rules import read_surgery


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
        for graft in surgery.rules:
            graft.complete(self, surgery)
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
        """The native forward. In training a domain gate goes by `domain_ids`; else they are for the heads' losses."""
        if surgery_flow is None and self.training:
            tell_of_lost_losses(self.surgery)
        given = {
            "input_ids": input_ids,
            "inputs_embeds": inputs_embeds,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "past_key_values": past_key_values,
            "domain_ids": domain_ids,
            **{name: kwargs.get(name) for name in ("cu_seq_lens_q", "seq_idx")},
        }
        crossing, surgery_flow = self.crossing(surgery_flow, given)
        output = super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **(kwargs if surgery_flow is None else kwargs | {"surgery_flow": surgery_flow}),
        )
        if surgery_flow is not None:
            for graft in crossing:
                graft.close(self, surgery_flow, getattr(output, "past_key_values", None))
        return output


class UpcycledHead(UpcycledPreTrained):
    """A native head over the upcycled base; its loss in training holds the auxiliary losses."""

    base_class: ClassVar[type[UpcycledModel]]
    output_class: ClassVar[type[Any]]

    def _head_forward(self, domain_ids: Tensor | None, scale: float | Tensor = 1.0, **given: Any) -> Any:
        """The native forward, given what it is to have by name; `scale` is by how much auxiliary losses count."""
        flow: Flow | None = None
        if self.training and given["labels"] is not None:
            inputs = given_inputs(given["input_ids"], given["inputs_embeds"])
            flow = open_flow(self.surgery, inputs, given["attention_mask"], domain_ids)
            given["surgery_flow"] = flow or Flow()
        elif self.training and domain_ids is not None:
            given["domain_ids"] = domain_ids
        output = super().forward(return_dict=True, **given)
        if not self.training:
            tell_of_mode(self.surgery, output.loss)
        return self.output_class(**close_flow(output, flow, scale))


class UpcycledCausalLM(UpcycledHead):
    """The language-modelling head."""

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
    ) -> Any:
        """The native forward; `domain_ids` (B or B T; 0: the original domain) switch the local losses on."""
        scale: float | Tensor = 1.0
        if self.training and labels is not None:
            scale = accumulation_scale(labels, kwargs.get("shift_labels"), kwargs.get("num_items_in_batch"))
        return self._head_forward(
            domain_ids,
            scale,
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            labels=labels,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            **kwargs,
        )


class UpcycledSequenceClassifier(UpcycledHead):
    """The classification head.

    `freeze_base` freezes `score` too, as no surgery made it: let it train by itself where it is new.
    """

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
    ) -> Any:
        """The native forward; `domain_ids` (B or B T; 0: the original domain) switch the local losses on."""
        return self._head_forward(
            domain_ids,
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            labels=labels,
            use_cache=use_cache,
            **kwargs,
        )
