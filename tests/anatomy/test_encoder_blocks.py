"""Blocks of encoders as they are found by trial: those written by hand, and what is said where there are none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from surgeon.anatomy.composing import composition_of
from surgeon.anatomy.derived import derive
from surgeon.anatomy.twin import twin_of
from surgeon.errors import BadInput
from surgeon.grafts.bundle import import_bundle
from surgeon.grafts.composition import ATTENTION, FFN, PREFIX
from tests import tiny
from tests.encoders import tiny_encoder_config
from tests.runtime.grafting import grafted_encoder, perturbed, states, tokens


def composed(config: dict[str, Any]) -> Any:
    found = derive(config)
    return composition_of(config, found.skeleton, twin_of(config, heads=found.heads), [0])


@pytest.mark.parametrize("family", tiny.ENCODERS)
def test_the_probe_finds_what_was_written_by_hand(family: str) -> None:
    """Control states that speak, in classes written by hand and in derived ones: the same logits, bit for bit."""
    surgery = states(inference_routing="sequence_mean", top_k=2)
    by_hand = perturbed(grafted_encoder(family, surgery, head="ForMaskedLM"))
    native = tiny.model(family, head="ForMaskedLM")
    composition = composed(native.config.to_dict() | {"architectures": [type(native).__name__]})
    spans = {span.role: (span.reads, span.writes) for span in composition.spans}
    assert spans == {
        ATTENTION: ("attention.self", "attention.output.dropout"),
        FFN: ("intermediate", "output.dropout"),
    }
    config = {"model_type": PREFIX + family, "anatomy": composition.to_json(), "surgery": surgery}
    kind = getattr(import_bundle(config), composition.class_of("AutoModelForMaskedLM"))
    given = {key: value for key, value in native.config.to_dict().items() if key != "model_type"}
    derived = kind(kind.config_class(**given, surgery=surgery, anatomy=config["anatomy"]))
    derived.load_state_dict(by_hand.state_dict())
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[0, -4:] = 0
    with torch.no_grad():
        one, other = (model.eval()(ids, attention_mask=mask).logits for model in (by_hand, derived))
    assert torch.equal(one, other)


REFUSED: dict[tuple[str, str], str] = {
    ("albert", "AutoModelForMaskedLM"): "layers that share weights, or run several times, have no place of their own",
    ("fnet", "AutoModelForMaskedLM"): "no self-attention is found in its layers, which hold FNetFourierTransform, FNet",
    ("bart", "AutoModelForMaskedLM"): "bart has an encoder and a decoder that reads it",
    ("t5", "AutoModelForSequenceClassification"): "t5 has an encoder and a decoder that reads it",
    ("flaubert", "AutoModelForMaskedLM"): "keeps the parts of its layers in lists of their own",
    ("big_bird", "AutoModelForMaskedLM"): "put other modules in the place of theirs when they run",
    ("mobilebert", "AutoModelForMaskedLM"): "no FFN is found in its layers, which hold MobileBertAttention",
    ("canine", "AutoModelForSequenceClassification"): "it reads no tokens of a vocabulary",
}


@pytest.mark.parametrize(("model_type", "auto"), REFUSED)
def test_what_controls_cannot_stand_in_is_said(model_type: str, auto: str) -> None:
    with pytest.raises(BadInput) as error:
        composed(tiny_encoder_config(model_type, auto))
    assert REFUSED[model_type, auto] in str(error.value)
    assert len(str(error.value).splitlines()) == 1
