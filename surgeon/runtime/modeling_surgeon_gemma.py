"""Gemma with grafts: thin names over transformers' own classes."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers.models.gemma.configuration_gemma import GemmaConfig
from transformers.models.gemma.modeling_gemma import (
    GemmaAttention,
    GemmaDecoderLayer,
    GemmaForCausalLM,
    GemmaForSequenceClassification,
    GemmaMLP,
    GemmaModel,
    GemmaPreTrainedModel,
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


class UpcycledGemmaConfig(GemmaConfig):
    """The native config and `surgery`; `num_hidden_layers` counts the trunk and its branches."""

    model_type = "upcycled_gemma"

    def __init__(self, surgery: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        attach_surgery(self, surgery)


class UpcycledGemmaAttention(AttentionSite, GemmaAttention):
    """The native attention with a control state beside it."""


class UpcycledGemmaMLP(FeedForwardSite, GemmaMLP):
    """The native MLP with an adapter, a control state or both beside it."""


class UpcycledGemmaBranch(BranchLayer, GemmaDecoderLayer):
    """The expanded twin of a trunk layer."""

    mlp_class = UpcycledGemmaMLP


class UpcycledGemmaDecoderLayer(UpcycledLayer, GemmaDecoderLayer):
    """A layer of the trunk."""

    attention_class = UpcycledGemmaAttention
    mlp_class = UpcycledGemmaMLP
    branch_class = UpcycledGemmaBranch


class UpcycledGemmaPreTrainedModel(UpcycledPreTrained, GemmaPreTrainedModel):
    """What all upcycled Gemma models share."""

    config_class = UpcycledGemmaConfig
    _no_split_modules: ClassVar[list[str]] = ["UpcycledGemmaDecoderLayer"]
    # Hidden states of the trunk alone; attentions of trunk and branches, each branch after its twin.
    _can_record_outputs: ClassVar[dict[str, Any]] = {
        "hidden_states": UpcycledGemmaDecoderLayer,
        "attentions": GemmaAttention,
    }


class UpcycledGemmaModel(UpcycledModel, UpcycledGemmaPreTrainedModel, GemmaModel):
    """The base model."""

    layer_class = UpcycledGemmaDecoderLayer


class UpcycledGemmaForCausalLM(UpcycledCausalLM, UpcycledGemmaPreTrainedModel, GemmaForCausalLM):
    """The language model."""

    base_class = UpcycledGemmaModel


class UpcycledGemmaForSequenceClassification(
    UpcycledSequenceClassifier, UpcycledGemmaPreTrainedModel, GemmaForSequenceClassification
):
    """The sequence classifier."""

    base_class = UpcycledGemmaModel


UpcycledGemmaConfig.register_for_auto_class()
UpcycledGemmaModel.register_for_auto_class("AutoModel")
UpcycledGemmaForCausalLM.register_for_auto_class("AutoModelForCausalLM")
UpcycledGemmaForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
