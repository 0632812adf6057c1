"""RoBERTa with control states: thin names over transformers' own classes."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers.models.roberta.configuration_roberta import RobertaConfig
from transformers.models.roberta.modeling_roberta import (
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
    RobertaLayer,
    RobertaModel,
    RobertaOutput,
    RobertaPreTrainedModel,
    RobertaSelfOutput,
)

# Every shipped file is named here: transformers 5.0 copies only what this file itself imports.
from .surgeon_adapters import GatedAdapter  # noqa: F401
from .surgeon_encoders import (
    EncoderSite,
    UpcycledEncoder,
    UpcycledEncoderClassifier,
    UpcycledEncoderLayer,
    UpcycledMaskedLM,
    attach_encoder_surgery,
)
from .surgeon_experts import ExpertLinear  # noqa: F401
from .surgeon_frames import Frame  # noqa: F401
from .surgeon_interpolators import Interpolator  # noqa: F401
from .surgeon_layers import UpcycledLayer  # noqa: F401
from .surgeon_losses import Flow  # noqa: F401
from .surgeon_low_rank import LowRank  # noqa: F401
from .surgeon_models import UpcycledPreTrained
from .surgeon_precision import at_least_fp32  # noqa: F401
from .surgeon_sites import site_control  # noqa: F401
from .surgeon_specs import MixtureSpec  # noqa: F401
from .surgeon_states import ControlBank  # noqa: F401
from .surgeon_surgery import Surgery  # noqa: F401


class UpcycledRobertaConfig(RobertaConfig):
    """The native config and `surgery`."""

    model_type = "upcycled_roberta"

    def __init__(self, surgery: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        attach_encoder_surgery(self, surgery)


class UpcycledRobertaSelfOutput(EncoderSite, RobertaSelfOutput):
    """The end of the native attention with a control state beside it."""


class UpcycledRobertaOutput(EncoderSite, RobertaOutput):
    """The end of the native FFN with a control state beside it."""


class UpcycledRobertaLayer(UpcycledEncoderLayer, RobertaLayer):
    """A layer."""

    attention_end = UpcycledRobertaSelfOutput
    ffn_end = UpcycledRobertaOutput


class UpcycledRobertaPreTrainedModel(UpcycledPreTrained, RobertaPreTrainedModel):
    """What all upcycled RoBERTa models share."""

    config_class = UpcycledRobertaConfig
    _no_split_modules: ClassVar[list[str]] = ["RobertaEmbeddings", "UpcycledRobertaLayer"]


class UpcycledRobertaModel(UpcycledEncoder, UpcycledRobertaPreTrainedModel, RobertaModel):
    """The base model."""

    layer_class = UpcycledRobertaLayer
    numbered = True

    def __init__(self, config: Any, add_pooling_layer: bool = True) -> None:
        super().__init__(config, add_pooling_layer=add_pooling_layer)


class UpcycledRobertaForMaskedLM(UpcycledMaskedLM, UpcycledRobertaPreTrainedModel, RobertaForMaskedLM):
    """The masked language model."""

    base_class = UpcycledRobertaModel
    base_options: ClassVar[dict[str, Any]] = {"add_pooling_layer": False}


class UpcycledRobertaForSequenceClassification(
    UpcycledEncoderClassifier, UpcycledRobertaPreTrainedModel, RobertaForSequenceClassification
):
    """The sequence classifier."""

    base_class = UpcycledRobertaModel
    base_options: ClassVar[dict[str, Any]] = {"add_pooling_layer": False}


UpcycledRobertaConfig.register_for_auto_class()
UpcycledRobertaModel.register_for_auto_class("AutoModel")
UpcycledRobertaForMaskedLM.register_for_auto_class("AutoModelForMaskedLM")
UpcycledRobertaForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
