"""DeBERTa with control states: thin names over transformers' own classes."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers.models.deberta.configuration_deberta import DebertaConfig
from transformers.models.deberta.modeling_deberta import (
    DebertaForMaskedLM,
    DebertaForSequenceClassification,
    DebertaLayer,
    DebertaModel,
    DebertaOutput,
    DebertaPreTrainedModel,
    DebertaSelfOutput,
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


class UpcycledDebertaConfig(DebertaConfig):
    """The native config and `surgery`."""

    model_type = "upcycled_deberta"

    def __init__(self, surgery: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        attach_encoder_surgery(self, surgery)


class UpcycledDebertaSelfOutput(EncoderSite, DebertaSelfOutput):
    """The end of the native attention with a control state beside it."""


class UpcycledDebertaOutput(EncoderSite, DebertaOutput):
    """The end of the native FFN with a control state beside it."""


class UpcycledDebertaLayer(UpcycledEncoderLayer, DebertaLayer):
    """A layer."""

    attention_end = UpcycledDebertaSelfOutput
    ffn_end = UpcycledDebertaOutput


class UpcycledDebertaPreTrainedModel(UpcycledPreTrained, DebertaPreTrainedModel):
    """What all upcycled DeBERTa models share."""

    config_class = UpcycledDebertaConfig
    _no_split_modules: ClassVar[list[str]] = ["UpcycledDebertaLayer"]


class UpcycledDebertaModel(UpcycledEncoder, UpcycledDebertaPreTrainedModel, DebertaModel):
    """The base model."""

    layer_class = UpcycledDebertaLayer


class UpcycledDebertaForMaskedLM(UpcycledMaskedLM, UpcycledDebertaPreTrainedModel, DebertaForMaskedLM):
    """The masked language model."""

    base_class = UpcycledDebertaModel


class UpcycledDebertaForSequenceClassification(
    UpcycledEncoderClassifier, UpcycledDebertaPreTrainedModel, DebertaForSequenceClassification
):
    """The sequence classifier."""

    base_class = UpcycledDebertaModel


UpcycledDebertaConfig.register_for_auto_class()
UpcycledDebertaModel.register_for_auto_class("AutoModel")
UpcycledDebertaForMaskedLM.register_for_auto_class("AutoModelForMaskedLM")
UpcycledDebertaForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
