"""Qwen2 with grafts: thin names over transformers' own classes."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers.models.qwen2.configuration_qwen2 import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import (
    Qwen2Attention,
    Qwen2DecoderLayer,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen2MLP,
    Qwen2Model,
    Qwen2PreTrainedModel,
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


class UpcycledQwen2Config(Qwen2Config):
    """The native config and `surgery`; `num_hidden_layers` counts the trunk and its branches."""

    model_type = "upcycled_qwen2"

    def __init__(self, surgery: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        attach_surgery(self, surgery)


class UpcycledQwen2Attention(AttentionSite, Qwen2Attention):
    """The native attention with a control state beside it."""


class UpcycledQwen2MLP(FeedForwardSite, Qwen2MLP):
    """The native MLP with an adapter, a control state or both beside it."""


class UpcycledQwen2Branch(BranchLayer, Qwen2DecoderLayer):
    """The expanded twin of a trunk layer."""

    mlp_class = UpcycledQwen2MLP


class UpcycledQwen2DecoderLayer(UpcycledLayer, Qwen2DecoderLayer):
    """A layer of the trunk."""

    attention_class = UpcycledQwen2Attention
    mlp_class = UpcycledQwen2MLP
    branch_class = UpcycledQwen2Branch


class UpcycledQwen2PreTrainedModel(UpcycledPreTrained, Qwen2PreTrainedModel):
    """What all upcycled Qwen2 models share."""

    config_class = UpcycledQwen2Config
    _no_split_modules: ClassVar[list[str]] = ["UpcycledQwen2DecoderLayer"]
    # Hidden states of the trunk alone; attentions of trunk and branches, each branch after its twin.
    _can_record_outputs: ClassVar[dict[str, Any]] = {
        "hidden_states": UpcycledQwen2DecoderLayer,
        "attentions": Qwen2Attention,
    }


class UpcycledQwen2Model(UpcycledModel, UpcycledQwen2PreTrainedModel, Qwen2Model):
    """The base model."""

    layer_class = UpcycledQwen2DecoderLayer


class UpcycledQwen2ForCausalLM(UpcycledCausalLM, UpcycledQwen2PreTrainedModel, Qwen2ForCausalLM):
    """The language model."""

    base_class = UpcycledQwen2Model


class UpcycledQwen2ForSequenceClassification(
    UpcycledSequenceClassifier, UpcycledQwen2PreTrainedModel, Qwen2ForSequenceClassification
):
    """The sequence classifier."""

    base_class = UpcycledQwen2Model


UpcycledQwen2Config.register_for_auto_class()
UpcycledQwen2Model.register_for_auto_class("AutoModel")
UpcycledQwen2ForCausalLM.register_for_auto_class("AutoModelForCausalLM")
UpcycledQwen2ForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
