"""DeBERTa-v2 and -v3 with control states: thin names over transformers' own classes."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers.models.deberta_v2.configuration_deberta_v2 import DebertaV2Config
from transformers.models.deberta_v2.modeling_deberta_v2 import (
    DebertaV2ForMaskedLM,
    DebertaV2ForSequenceClassification,
    DebertaV2Layer,
    DebertaV2Model,
    DebertaV2Output,
    DebertaV2PreTrainedModel,
    DebertaV2SelfOutput,
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


class UpcycledDebertaV2Config(DebertaV2Config):
    """The native config and `surgery`."""

    model_type = "upcycled_deberta-v2"

    def __init__(self, surgery: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        attach_encoder_surgery(self, surgery)


class UpcycledDebertaV2SelfOutput(EncoderSite, DebertaV2SelfOutput):
    """The end of the native attention with a control state beside it."""


class UpcycledDebertaV2Output(EncoderSite, DebertaV2Output):
    """The end of the native FFN with a control state beside it."""


class UpcycledDebertaV2Layer(UpcycledEncoderLayer, DebertaV2Layer):
    """A layer."""

    attention_end = UpcycledDebertaV2SelfOutput
    ffn_end = UpcycledDebertaV2Output


class UpcycledDebertaV2PreTrainedModel(UpcycledPreTrained, DebertaV2PreTrainedModel):
    """What all upcycled DeBERTa-v2 and -v3 models share."""

    config_class = UpcycledDebertaV2Config
    _no_split_modules: ClassVar[list[str]] = ["UpcycledDebertaV2Layer"]


class UpcycledDebertaV2Model(UpcycledEncoder, UpcycledDebertaV2PreTrainedModel, DebertaV2Model):
    """The base model."""

    layer_class = UpcycledDebertaV2Layer


class UpcycledDebertaV2ForMaskedLM(UpcycledMaskedLM, UpcycledDebertaV2PreTrainedModel, DebertaV2ForMaskedLM):
    """The masked language model."""

    base_class = UpcycledDebertaV2Model


class UpcycledDebertaV2ForSequenceClassification(
    UpcycledEncoderClassifier, UpcycledDebertaV2PreTrainedModel, DebertaV2ForSequenceClassification
):
    """The sequence classifier."""

    base_class = UpcycledDebertaV2Model


UpcycledDebertaV2Config.register_for_auto_class()
UpcycledDebertaV2Model.register_for_auto_class("AutoModel")
UpcycledDebertaV2ForMaskedLM.register_for_auto_class("AutoModelForMaskedLM")
UpcycledDebertaV2ForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
