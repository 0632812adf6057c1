"""Gemma 3 (text) with grafts: thin names over transformers' own classes."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers.models.gemma3.configuration_gemma3 import Gemma3TextConfig
from transformers.models.gemma3.modeling_gemma3 import (
    Gemma3Attention,
    Gemma3DecoderLayer,
    Gemma3ForCausalLM,
    Gemma3MLP,
    Gemma3PreTrainedModel,
    Gemma3TextForSequenceClassification,
    Gemma3TextModel,
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


class UpcycledGemma3TextConfig(Gemma3TextConfig):
    """The native config and `surgery`; `num_hidden_layers` counts the trunk and its branches."""

    model_type = "upcycled_gemma3_text"

    def __init__(self, surgery: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        attach_surgery(self, surgery)


class UpcycledGemma3TextAttention(AttentionSite, Gemma3Attention):
    """The native attention with a control state beside it."""


class UpcycledGemma3TextMLP(FeedForwardSite, Gemma3MLP):
    """The native MLP with an adapter, a control state or both beside it."""

    activation_field = "hidden_activation"


class UpcycledGemma3TextBranch(BranchLayer, Gemma3DecoderLayer):
    """The expanded twin of a trunk layer."""

    mlp_class = UpcycledGemma3TextMLP


class UpcycledGemma3TextDecoderLayer(UpcycledLayer, Gemma3DecoderLayer):
    """A layer of the trunk."""

    attention_class = UpcycledGemma3TextAttention
    mlp_class = UpcycledGemma3TextMLP
    branch_class = UpcycledGemma3TextBranch


class UpcycledGemma3TextPreTrainedModel(UpcycledPreTrained, Gemma3PreTrainedModel):
    """What all upcycled Gemma 3 (text) models share."""

    config_class = UpcycledGemma3TextConfig
    _no_split_modules: ClassVar[list[str]] = ["UpcycledGemma3TextDecoderLayer"]
    # Hidden states of the trunk alone; attentions of trunk and branches, each branch after its twin.
    _can_record_outputs: ClassVar[dict[str, Any]] = {
        "hidden_states": UpcycledGemma3TextDecoderLayer,
        "attentions": Gemma3Attention,
    }


class UpcycledGemma3TextModel(UpcycledModel, UpcycledGemma3TextPreTrainedModel, Gemma3TextModel):
    """The base model."""

    layer_class = UpcycledGemma3TextDecoderLayer


class UpcycledGemma3TextForCausalLM(UpcycledCausalLM, UpcycledGemma3TextPreTrainedModel, Gemma3ForCausalLM):
    """The language model."""

    base_class = UpcycledGemma3TextModel


class UpcycledGemma3TextForSequenceClassification(
    UpcycledSequenceClassifier, UpcycledGemma3TextPreTrainedModel, Gemma3TextForSequenceClassification
):
    """The sequence classifier."""

    base_class = UpcycledGemma3TextModel


UpcycledGemma3TextConfig.register_for_auto_class()
UpcycledGemma3TextModel.register_for_auto_class("AutoModel")
UpcycledGemma3TextForCausalLM.register_for_auto_class("AutoModelForCausalLM")
UpcycledGemma3TextForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
