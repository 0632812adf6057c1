"""Phi-3 with grafts: thin names over transformers' own classes."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers.models.phi3.configuration_phi3 import Phi3Config
from transformers.models.phi3.modeling_phi3 import (
    Phi3Attention,
    Phi3DecoderLayer,
    Phi3ForCausalLM,
    Phi3ForSequenceClassification,
    Phi3MLP,
    Phi3Model,
    Phi3PreTrainedModel,
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


class UpcycledPhi3Config(Phi3Config):
    """The native config and `surgery`; `num_hidden_layers` counts the trunk and its branches."""

    model_type = "upcycled_phi3"

    def __init__(self, surgery: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        attach_surgery(self, surgery)


class UpcycledPhi3Attention(AttentionSite, Phi3Attention):
    """The native attention with a control state beside it."""


class UpcycledPhi3MLP(FeedForwardSite, Phi3MLP):
    """The native MLP with an adapter, a control state or both beside it."""


class UpcycledPhi3Branch(BranchLayer, Phi3DecoderLayer):
    """The expanded twin of a trunk layer."""

    mlp_class = UpcycledPhi3MLP


class UpcycledPhi3DecoderLayer(UpcycledLayer, Phi3DecoderLayer):
    """A layer of the trunk."""

    attention_class = UpcycledPhi3Attention
    mlp_class = UpcycledPhi3MLP
    branch_class = UpcycledPhi3Branch


class UpcycledPhi3PreTrainedModel(UpcycledPreTrained, Phi3PreTrainedModel):
    """What all upcycled Phi-3 models share."""

    config_class = UpcycledPhi3Config
    _no_split_modules: ClassVar[list[str]] = ["UpcycledPhi3DecoderLayer"]
    # Hidden states of the trunk alone; attentions of trunk and branches, each branch after its twin.
    _can_record_outputs: ClassVar[dict[str, Any]] = {
        "hidden_states": UpcycledPhi3DecoderLayer,
        "attentions": Phi3Attention,
    }


class UpcycledPhi3Model(UpcycledModel, UpcycledPhi3PreTrainedModel, Phi3Model):
    """The base model."""

    layer_class = UpcycledPhi3DecoderLayer


class UpcycledPhi3ForCausalLM(UpcycledCausalLM, UpcycledPhi3PreTrainedModel, Phi3ForCausalLM):
    """The language model."""

    base_class = UpcycledPhi3Model


class UpcycledPhi3ForSequenceClassification(
    UpcycledSequenceClassifier, UpcycledPhi3PreTrainedModel, Phi3ForSequenceClassification
):
    """The sequence classifier."""

    base_class = UpcycledPhi3Model


UpcycledPhi3Config.register_for_auto_class()
UpcycledPhi3Model.register_for_auto_class("AutoModel")
UpcycledPhi3ForCausalLM.register_for_auto_class("AutoModelForCausalLM")
UpcycledPhi3ForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
