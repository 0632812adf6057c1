"""Llama with grafts: thin names over transformers' own classes."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaMLP,
    LlamaModel,
    LlamaPreTrainedModel,
)

# Every shipped file is named here: transformers 5.0 copies only what this file itself imports.
from .surgeon_adapters import GatedAdapter  # noqa: F401
from .surgeon_experts import ExpertLinear  # noqa: F401
from .surgeon_frames import Frame  # noqa: F401
from .surgeon_interpolators import Interpolator  # noqa: F401
from .surgeon_layers import BranchLayer, UpcycledLayer
from .surgeon_losses import Flow  # noqa: F401
from .surgeon_low_rank import LowRank  # noqa: F401
from .surgeon_models import (
    UpcycledCausalLM,
    UpcycledModel,
    UpcycledPreTrained,
    UpcycledSequenceClassifier,
    attach_surgery,
)
from .surgeon_precision import at_least_fp32  # noqa: F401
from .surgeon_sites import AttentionSite, FeedForwardSite
from .surgeon_specs import AdapterSpec  # noqa: F401
from .surgeon_states import ControlBank  # noqa: F401
from .surgeon_surgery import Surgery  # noqa: F401


class UpcycledLlamaConfig(LlamaConfig):
    """The native config and `surgery`; `num_hidden_layers` counts the trunk and its branches."""

    model_type = "upcycled_llama"

    def __init__(self, surgery: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        attach_surgery(self, surgery)


class UpcycledLlamaAttention(AttentionSite, LlamaAttention):
    """The native attention with a control state beside it."""


class UpcycledLlamaMLP(FeedForwardSite, LlamaMLP):
    """The native MLP with an adapter, a control state or both beside it."""


class UpcycledLlamaBranch(BranchLayer, LlamaDecoderLayer):
    """The expanded twin of a trunk layer."""

    mlp_class = UpcycledLlamaMLP


class UpcycledLlamaDecoderLayer(UpcycledLayer, LlamaDecoderLayer):
    """A layer of the trunk."""

    attention_class = UpcycledLlamaAttention
    mlp_class = UpcycledLlamaMLP
    branch_class = UpcycledLlamaBranch


class UpcycledLlamaPreTrainedModel(UpcycledPreTrained, LlamaPreTrainedModel):
    """What all upcycled Llama models share."""

    config_class = UpcycledLlamaConfig
    _no_split_modules: ClassVar[list[str]] = ["UpcycledLlamaDecoderLayer"]
    # Hidden states of the trunk alone; attentions of trunk and branches, each branch after its twin.
    _can_record_outputs: ClassVar[dict[str, Any]] = {
        "hidden_states": UpcycledLlamaDecoderLayer,
        "attentions": LlamaAttention,
    }


class UpcycledLlamaModel(UpcycledModel, UpcycledLlamaPreTrainedModel, LlamaModel):
    """The base model."""

    layer_class = UpcycledLlamaDecoderLayer


class UpcycledLlamaForCausalLM(UpcycledCausalLM, UpcycledLlamaPreTrainedModel, LlamaForCausalLM):
    """The language model."""

    base_class = UpcycledLlamaModel


class UpcycledLlamaForSequenceClassification(
    UpcycledSequenceClassifier, UpcycledLlamaPreTrainedModel, LlamaForSequenceClassification
):
    """The sequence classifier."""

    base_class = UpcycledLlamaModel


UpcycledLlamaConfig.register_for_auto_class()
UpcycledLlamaModel.register_for_auto_class("AutoModel")
UpcycledLlamaForCausalLM.register_for_auto_class("AutoModelForCausalLM")
UpcycledLlamaForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
