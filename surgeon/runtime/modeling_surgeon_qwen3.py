"""Qwen3 with grafts: thin names over transformers' own classes."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3DecoderLayer,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3MLP,
    Qwen3Model,
    Qwen3PreTrainedModel,
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


class UpcycledQwen3Config(Qwen3Config):
    """The native config and `surgery`; `num_hidden_layers` counts the trunk and its branches."""

    model_type = "upcycled_qwen3"

    def __init__(self, surgery: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        attach_surgery(self, surgery)


class UpcycledQwen3Attention(AttentionSite, Qwen3Attention):
    """The native attention with a control state beside it."""


class UpcycledQwen3MLP(FeedForwardSite, Qwen3MLP):
    """The native MLP with an adapter, a control state or both beside it."""


class UpcycledQwen3Branch(BranchLayer, Qwen3DecoderLayer):
    """The expanded twin of a trunk layer."""

    mlp_class = UpcycledQwen3MLP


class UpcycledQwen3DecoderLayer(UpcycledLayer, Qwen3DecoderLayer):
    """A layer of the trunk."""

    attention_class = UpcycledQwen3Attention
    mlp_class = UpcycledQwen3MLP
    branch_class = UpcycledQwen3Branch


class UpcycledQwen3PreTrainedModel(UpcycledPreTrained, Qwen3PreTrainedModel):
    """What all upcycled Qwen3 models share."""

    config_class = UpcycledQwen3Config
    _no_split_modules: ClassVar[list[str]] = ["UpcycledQwen3DecoderLayer"]
    # Hidden states of the trunk alone; attentions of trunk and branches, each branch after its twin.
    _can_record_outputs: ClassVar[dict[str, Any]] = {
        "hidden_states": UpcycledQwen3DecoderLayer,
        "attentions": Qwen3Attention,
    }


class UpcycledQwen3Model(UpcycledModel, UpcycledQwen3PreTrainedModel, Qwen3Model):
    """The base model."""

    layer_class = UpcycledQwen3DecoderLayer


class UpcycledQwen3ForCausalLM(UpcycledCausalLM, UpcycledQwen3PreTrainedModel, Qwen3ForCausalLM):
    """The language model."""

    base_class = UpcycledQwen3Model


class UpcycledQwen3ForSequenceClassification(
    UpcycledSequenceClassifier, UpcycledQwen3PreTrainedModel, Qwen3ForSequenceClassification
):
    """The sequence classifier."""

    base_class = UpcycledQwen3Model


UpcycledQwen3Config.register_for_auto_class()
UpcycledQwen3Model.register_for_auto_class("AutoModel")
UpcycledQwen3ForCausalLM.register_for_auto_class("AutoModelForCausalLM")
UpcycledQwen3ForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
