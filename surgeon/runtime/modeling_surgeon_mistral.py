"""Mistral with grafts: thin names over transformers' own classes."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers.models.mistral.configuration_mistral import MistralConfig
from transformers.models.mistral.modeling_mistral import (
    MistralAttention,
    MistralDecoderLayer,
    MistralForCausalLM,
    MistralForSequenceClassification,
    MistralMLP,
    MistralModel,
    MistralPreTrainedModel,
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


class UpcycledMistralConfig(MistralConfig):
    """The native config and `surgery`; `num_hidden_layers` counts the trunk and its branches."""

    model_type = "upcycled_mistral"

    def __init__(self, surgery: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        attach_surgery(self, surgery)


class UpcycledMistralAttention(AttentionSite, MistralAttention):
    """The native attention with a control state beside it."""


class UpcycledMistralMLP(FeedForwardSite, MistralMLP):
    """The native MLP with an adapter, a control state or both beside it."""


class UpcycledMistralBranch(BranchLayer, MistralDecoderLayer):
    """The expanded twin of a trunk layer."""

    mlp_class = UpcycledMistralMLP


class UpcycledMistralDecoderLayer(UpcycledLayer, MistralDecoderLayer):
    """A layer of the trunk."""

    attention_class = UpcycledMistralAttention
    mlp_class = UpcycledMistralMLP
    branch_class = UpcycledMistralBranch


class UpcycledMistralPreTrainedModel(UpcycledPreTrained, MistralPreTrainedModel):
    """What all upcycled Mistral models share."""

    config_class = UpcycledMistralConfig
    _no_split_modules: ClassVar[list[str]] = ["UpcycledMistralDecoderLayer"]
    # Hidden states of the trunk alone; attentions of trunk and branches, each branch after its twin.
    _can_record_outputs: ClassVar[dict[str, Any]] = {
        "hidden_states": UpcycledMistralDecoderLayer,
        "attentions": MistralAttention,
    }


class UpcycledMistralModel(UpcycledModel, UpcycledMistralPreTrainedModel, MistralModel):
    """The base model."""

    layer_class = UpcycledMistralDecoderLayer


class UpcycledMistralForCausalLM(UpcycledCausalLM, UpcycledMistralPreTrainedModel, MistralForCausalLM):
    """The language model."""

    base_class = UpcycledMistralModel


class UpcycledMistralForSequenceClassification(
    UpcycledSequenceClassifier, UpcycledMistralPreTrainedModel, MistralForSequenceClassification
):
    """The sequence classifier."""

    base_class = UpcycledMistralModel


UpcycledMistralConfig.register_for_auto_class()
UpcycledMistralModel.register_for_auto_class("AutoModel")
UpcycledMistralForCausalLM.register_for_auto_class("AutoModelForCausalLM")
UpcycledMistralForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
