"""Gemma 2 with grafts: thin names over transformers' own classes."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers.models.gemma2.configuration_gemma2 import Gemma2Config
from transformers.models.gemma2.modeling_gemma2 import (
    Gemma2Attention,
    Gemma2DecoderLayer,
    Gemma2ForCausalLM,
    Gemma2ForSequenceClassification,
    Gemma2MLP,
    Gemma2Model,
    Gemma2PreTrainedModel,
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


class UpcycledGemma2Config(Gemma2Config):
    """The native config and `surgery`; `num_hidden_layers` counts the trunk and its branches."""

    model_type = "upcycled_gemma2"

    def __init__(self, surgery: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        attach_surgery(self, surgery)


class UpcycledGemma2Attention(AttentionSite, Gemma2Attention):
    """The native attention with a control state beside it."""


class UpcycledGemma2MLP(FeedForwardSite, Gemma2MLP):
    """The native MLP with an adapter, a control state or both beside it."""

    activation_field = "hidden_activation"


class UpcycledGemma2Branch(BranchLayer, Gemma2DecoderLayer):
    """The expanded twin of a trunk layer."""

    mlp_class = UpcycledGemma2MLP


class UpcycledGemma2DecoderLayer(UpcycledLayer, Gemma2DecoderLayer):
    """A layer of the trunk."""

    attention_class = UpcycledGemma2Attention
    mlp_class = UpcycledGemma2MLP
    branch_class = UpcycledGemma2Branch


class UpcycledGemma2PreTrainedModel(UpcycledPreTrained, Gemma2PreTrainedModel):
    """What all upcycled Gemma 2 models share."""

    config_class = UpcycledGemma2Config
    _no_split_modules: ClassVar[list[str]] = ["UpcycledGemma2DecoderLayer"]
    # Hidden states of the trunk alone; attentions of trunk and branches, each branch after its twin.
    _can_record_outputs: ClassVar[dict[str, Any]] = {
        "hidden_states": UpcycledGemma2DecoderLayer,
        "attentions": Gemma2Attention,
    }


class UpcycledGemma2Model(UpcycledModel, UpcycledGemma2PreTrainedModel, Gemma2Model):
    """The base model."""

    layer_class = UpcycledGemma2DecoderLayer


class UpcycledGemma2ForCausalLM(UpcycledCausalLM, UpcycledGemma2PreTrainedModel, Gemma2ForCausalLM):
    """The language model."""

    base_class = UpcycledGemma2Model


class UpcycledGemma2ForSequenceClassification(
    UpcycledSequenceClassifier, UpcycledGemma2PreTrainedModel, Gemma2ForSequenceClassification
):
    """The sequence classifier."""

    base_class = UpcycledGemma2Model


UpcycledGemma2Config.register_for_auto_class()
UpcycledGemma2Model.register_for_auto_class("AutoModel")
UpcycledGemma2ForCausalLM.register_for_auto_class("AutoModelForCausalLM")
UpcycledGemma2ForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
