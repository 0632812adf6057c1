"""OLMo 2 with grafts: thin names over transformers' own classes."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers.modeling_layers import GenericForSequenceClassification
from transformers.models.olmo2.configuration_olmo2 import Olmo2Config
from transformers.models.olmo2.modeling_olmo2 import (
    Olmo2Attention,
    Olmo2DecoderLayer,
    Olmo2ForCausalLM,
    Olmo2MLP,
    Olmo2Model,
    Olmo2PreTrainedModel,
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


class UpcycledOlmo2Config(Olmo2Config):
    """The native config and `surgery`; `num_hidden_layers` counts the trunk and its branches."""

    model_type = "upcycled_olmo2"

    def __init__(self, surgery: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        attach_surgery(self, surgery)


class UpcycledOlmo2Attention(AttentionSite, Olmo2Attention):
    """The native attention with a control state beside it."""


class UpcycledOlmo2MLP(FeedForwardSite, Olmo2MLP):
    """The native MLP with an adapter, a control state or both beside it."""


class UpcycledOlmo2Branch(BranchLayer, Olmo2DecoderLayer):
    """The expanded twin of a trunk layer."""

    mlp_class = UpcycledOlmo2MLP


class UpcycledOlmo2DecoderLayer(UpcycledLayer, Olmo2DecoderLayer):
    """A layer of the trunk."""

    attention_class = UpcycledOlmo2Attention
    mlp_class = UpcycledOlmo2MLP
    branch_class = UpcycledOlmo2Branch


class UpcycledOlmo2PreTrainedModel(UpcycledPreTrained, Olmo2PreTrainedModel):
    """What all upcycled OLMo 2 models share."""

    config_class = UpcycledOlmo2Config
    _no_split_modules: ClassVar[list[str]] = ["UpcycledOlmo2DecoderLayer"]
    # Hidden states of the trunk alone; attentions of trunk and branches, each branch after its twin.
    _can_record_outputs: ClassVar[dict[str, Any]] = {
        "hidden_states": UpcycledOlmo2DecoderLayer,
        "attentions": Olmo2Attention,
    }


class UpcycledOlmo2Model(UpcycledModel, UpcycledOlmo2PreTrainedModel, Olmo2Model):
    """The base model."""

    layer_class = UpcycledOlmo2DecoderLayer


class UpcycledOlmo2ForCausalLM(UpcycledCausalLM, UpcycledOlmo2PreTrainedModel, Olmo2ForCausalLM):
    """The language model."""

    base_class = UpcycledOlmo2Model


class UpcycledOlmo2ForSequenceClassification(
    UpcycledSequenceClassifier, GenericForSequenceClassification, UpcycledOlmo2PreTrainedModel
):
    """The sequence classifier (transformers 5.0 has none of its own for this family)."""

    base_class = UpcycledOlmo2Model


UpcycledOlmo2Config.register_for_auto_class()
UpcycledOlmo2Model.register_for_auto_class("AutoModel")
UpcycledOlmo2ForCausalLM.register_for_auto_class("AutoModelForCausalLM")
UpcycledOlmo2ForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
