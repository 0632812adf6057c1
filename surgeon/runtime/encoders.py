"""Encoders with control states (Mixture-of-Control), mixed in before a family's native classes.

Post-norm: a block's output becomes LayerNorm(block(x) + control(x) + x), where x is what the block reads. Every token
sees the whole sequence, so a token's choice may: at inference `sequence_mean` is by the mean over all valid tokens of
its sequence, whatever else is in the batch.

Native encoders pass their layers a fixed list of arguments, so the forward's `Flow` reaches them through this thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.utils import can_return_tuple

from .graft import Frame, current_frame, enter_frame
from .losses import Flow, close_flow
from .prefix import check_one_document, several_in_a_row
from .pretrained import UpcycledBase, UpcycledPreTrained, attach_surgery, given_inputs
from .rules import read_surgery
from .states import ControlBank, Mixing, site_control

_BALANCE = "balance_loss"


def attach_encoder_surgery(config: Any, surgery: dict[str, Any] | None, heads: tuple[str, ...]) -> None:
    """As `attach_surgery`; of grafts, an encoder can carry control states. Raises ValueError for others."""
    # Empty entries say nothing.
    given = {key for key, value in (surgery or {}).items() if value}
    if others := sorted(given - {"trunk_layers", "control_states", "mixture"}):
        raise ValueError(f"config.surgery: an encoder carries control states only, not {', '.join(others)}")
    attach_surgery(config, surgery, heads)


class _Running(threading.local):
    flow: Flow | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """As `_Active`."""
        return type(self), ()


_thread = _Running()


@contextmanager
def running(flow: Flow | None) -> Iterator[None]:
    """Let the base model and the layers that this thread runs find `flow`."""
    previous = _thread.flow
    _thread.flow = flow
    try:
        yield
    finally:
        _thread.flow = previous


class EncoderSite(nn.Module):
    """Mixed in before the end of a block, attention's or the FFN's: adds a control state to what the block writes."""

    def __init__(self, config: Any, site: int) -> None:
        super().__init__(config)
        self.site = site

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        """LayerNorm(block + control + residual), B T D; `input_tensor`, the residual, is what the block read."""
        native: Any = self
        frame = current_frame()
        if frame is not None and frame.off:
            return super().forward(hidden_states, input_tensor)  # type: ignore[no-any-return]
        written = native.dropout(native.dense(hidden_states)) + site_control(self.site, input_tensor, frame)
        output: Tensor = native.LayerNorm(written + input_tensor)
        return output


class UpcycledEncoderLayer(nn.Module):
    """A native layer whose blocks may end in a control state."""

    attention_end: ClassVar[type[EncoderSite]]
    ffn_end: ClassVar[type[EncoderSite]]

    def __init__(self, config: Any, sites: dict[str, int], **native: Any) -> None:
        super().__init__(config, **native)
        self.grafted = bool(sites)
        if "attention" in sites:
            attention: Any = self.attention
            attention.output = self.attention_end(config, sites["attention"])
        if "ffn" in sites:
            self.output = self.ffn_end(config, sites["ffn"])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer; the flow of this forward brings the bank and takes the balance loss."""
        flow = _thread.flow
        if flow is not None and flow.off:
            return super().__call__(*args, off=True, **kwargs)
        if flow is None or flow.mixing is None or not self.grafted:
            return super().__call__(*args, **kwargs)
        *output, balance = super().__call__(*args, mixing=flow.mixing, measured=flow.valid is not None, **kwargs)
        if balance.numel():
            flow.add({_BALANCE: balance}, {_BALANCE: flow.mixing.bank.spec.balance_weight})
        return output[0] if len(output) == 1 else tuple(output)

    def forward(
        self, *args: Any, mixing: Mixing | None = None, measured: bool = False, off: bool = False, **kwargs: Any
    ) -> Any:
        """The native output; with `mixing` the balance losses after it (one for each site, or none), in a flat tuple.

        A pure function of its arguments, which gradient checkpointing may run again.
        """
        frame = Frame(mixing=mixing, off=off)
        previous = enter_frame(frame)
        try:
            output = super().forward(*args, **kwargs)
        finally:
            enter_frame(previous)
        if mixing is None:
            return output
        flat = output if isinstance(output, tuple) else (output,)
        none = flat[0].new_zeros(0, dtype=torch.float32)
        return *flat, frame.measured(_BALANCE, flat[0]) if measured else none


class UpcycledEncoder(UpcycledBase):
    """The base model: native, its layers able to carry control states."""

    layer_class: ClassVar[type[UpcycledEncoderLayer]]
    # Whether the family's layers are told their own number.
    numbered: ClassVar[bool] = False

    def __init__(self, config: Any, **native: Any) -> None:
        super().__init__(config, **native)
        surgery = self.surgery = read_surgery(config)
        states = surgery.of.get("states")
        layers = []
        for index in range(surgery.trunk_layers):
            sites = {} if states is None else states.sites_of(index)
            layers.append(self.layer_class(config, sites, **({"layer_idx": index} if self.numbered else {})))
        self.encoder.layer = nn.ModuleList(layers)
        self.control_bank = None if states is None else ControlBank(states, config.hidden_size)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        surgery_flow: Flow | None = None,
        **kwargs: Any,
    ) -> Any:
        """The native forward. A flow given by the caller tells afterwards what was routed where."""
        flow = surgery_flow or _thread.flow
        if self.grafts_off:
            flow = Flow(off=True)
        elif self.control_bank is not None:
            flow = flow or Flow()
            inputs = given_inputs(input_ids, inputs_embeds)
            given = kwargs | {"position_ids": position_ids}
            flow.mixing = Mixing(self.control_bank, self._rows(self.control_bank, attention_mask, inputs, given))
            flow.mixing.choices = [] if flow.records_choices else None
        with running(flow):
            return super().forward(
                input_ids=input_ids,
                attention_mask=attention_mask,
                token_type_ids=token_type_ids,
                position_ids=position_ids,
                inputs_embeds=inputs_embeds,
                **kwargs,
            )

    def _rows(self, bank: ControlBank, attention_mask: Any, inputs: Tensor, given: Mapping[str, Any]) -> Tensor:
        """Which tokens are no padding, B T; ValueError where choices are by sequences, and a row is not one."""
        valid, spec = _valid(attention_mask, inputs), bank.spec
        spec.refuse_engine(self.config)
        if spec.by_sequence and not self.training:
            if given.get("cu_seq_lens_q") is not None:
                raise several_in_a_row(spec.what)
            check_one_document(given["position_ids"], None, valid, spec.what)
        return valid


class UpcycledEncoderHead(UpcycledPreTrained):
    """A native head over the upcycled base; its loss in training holds the balance loss.

    `freeze_base` freezes the head too, as no surgery made it: let it train by itself where it is new.
    """

    base_class: ClassVar[type[UpcycledEncoder]]
    base_options: ClassVar[dict[str, Any]] = {}
    output_class: ClassVar[type[Any]]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        setattr(self, self.base_model_prefix, self.base_class(config, **self.base_options))
        self.surgery = read_surgery(config)
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]  # transformers is not typed
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        surgery_flow: Flow | None = None,
        **kwargs: Any,
    ) -> Any:
        """The native forward."""
        flow, measured = surgery_flow, self.training and labels is not None and self.surgery.measures
        if measured:
            flow = flow or Flow()
            flow.valid = _valid(attention_mask, given_inputs(input_ids, inputs_embeds))
        with running(flow):
            output = super().forward(
                input_ids=input_ids,
                attention_mask=attention_mask,
                token_type_ids=token_type_ids,
                position_ids=position_ids,
                inputs_embeds=inputs_embeds,
                labels=labels,
                return_dict=True,
                **kwargs,
            )
        return self.output_class(**close_flow(output, flow if measured else None, 1.0))


def _valid(attention_mask: Tensor | None, inputs: Tensor) -> Tensor:
    """Which tokens are no padding: B T, bool."""
    if attention_mask is None:
        return torch.ones(inputs.shape[:2], dtype=torch.bool, device=inputs.device)
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2:
        shape = list(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise ValueError(
            f"attention_mask is {shape}; which tokens control states look at is told by the two-dimensional one"
        )
    return attention_mask.bool()
