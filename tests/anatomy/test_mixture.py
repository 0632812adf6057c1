"""How experts lie in memory, found by trial: every way that transformers has, and what no reading is right for."""

from __future__ import annotations

import pytest
import torch

from surgeon.anatomy.mixture import Mixture, mixtures
from surgeon.anatomy.twin import twin_of
from tests.decoders import tiny_config

OLMOE = Mixture("mlp.experts", False, False, ("mlp.gate.weight",))
FOUND = {
    "llama4_text": Mixture("feed_forward.experts", True, False, ("feed_forward.router.weight",)),
    "gpt_oss": Mixture("mlp.experts", True, True, ("mlp.router.weight", "mlp.router.bias")),
    "nemotron_h": Mixture("mixer.experts", False, False, ("mixer.gate.weight", "mixer.gate.e_score_correction_bias")),
}


@pytest.mark.parametrize("model_type", FOUND)
def test_a_layout_is_found_and_the_weights_stay(model_type: str) -> None:
    twin = twin_of(tiny_config(model_type))
    before = {name: value.clone() for name, value in twin.model.state_dict().items()}
    found = mixtures(twin, list(range(len(twin.layers))))
    assert {each for each in found.values() if each is not None} == {FOUND[model_type]}
    assert all(torch.equal(value, before[name]) for name, value in twin.model.state_dict().items())


def test_experts_that_are_not_alike_are_not_understood() -> None:
    """A router that prefers experts by their places: they cannot change them."""
    twin = twin_of(tiny_config("olmoe"))
    gate = twin.layers[1].mlp.gate
    plain = gate.forward

    def preferring(stream: torch.Tensor) -> object:
        logits, weights, chosen = plain(stream)
        return logits, weights * (1 + chosen), chosen

    gate.forward = preferring
    found = mixtures(twin, [0, 1])
    assert found[0] == OLMOE
    assert found[1] is None


def test_neurons_that_are_not_alike_are_not_understood() -> None:
    twin = twin_of(tiny_config("olmoe"))
    experts = twin.layers[0].mlp.experts
    plain = experts._apply_gate
    experts._apply_gate = lambda both: plain(both) * torch.arange(1, both.shape[-1] // 2 + 1)
    assert mixtures(twin, [0])[0] is None
