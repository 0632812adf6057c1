"""The gated adapter against Neutral Residues' equations in float64, forward and gradients."""

from __future__ import annotations

import math

import pytest
import torch

from surgeon.grafts.adapters import GATES, VARIANCES, adapter_births
from surgeon.runtime.adapters import GatedAdapter
from surgeon.runtime.adapters_rules import AdapterSpec
from tests import tiny
from tests.runtime.grafting import HIDDEN, adapters, grafted, perturbed, tokens


def disturbed(gate: str, activation: str) -> GatedAdapter:
    module = GatedAdapter(AdapterSpec(layer=0, size=7, gate=gate), 8, activation).double()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("gate", GATES)
def test_forward_and_gradients_follow_the_equation(gate: str, activation: str) -> None:
    module = disturbed(gate, activation)
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(4), dtype=torch.float64).requires_grad_()
    output, _ = module(x)

    named = {name: parameter.detach().clone().requires_grad_() for name, parameter in module.named_parameters()}
    twin = x.detach().clone().requires_grad_()

    def act(z: torch.Tensor) -> torch.Tensor:
        if activation == "silu":
            return z / (1 + torch.exp(-z))
        return 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))

    hidden = act(twin @ named["gate_proj.weight"].T) * (twin @ named["up_proj.weight"].T)
    expected = hidden @ named["down_proj.weight"].T
    if gate != "none":
        score = (twin * named["gate.weight"]).sum(-1, keepdim=True)
        expected = (score * (score > 0) if gate == "relu" else 1 / (1 + torch.exp(-score))) * expected
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-12)

    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    (output * direction).sum().backward()
    (expected * direction).sum().backward()
    torch.testing.assert_close(x.grad, twin.grad, rtol=1e-9, atol=1e-10)
    assert set(named) == {name for name, _ in module.named_parameters()}
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, named[name].grad, rtol=1e-9, atol=1e-10)


# The paper's section 3 and He et al., for a hidden size of 256 and six layers.
VARIANCE = {"low_variance": 1 / (256 * 6), "he": 2 / 256}
# What a score of -1, 0 and 2 opens a gate to.
OPEN_BY = {"relu": (0.0, 0.0, 2.0), "sigmoid": (1 / (1 + math.e), 0.5, 1 / (1 + math.exp(-2)))}


@pytest.mark.parametrize("gate", [gate for gate in GATES if gate != "none"])
def test_how_far_a_score_opens_a_gate(gate: str) -> None:
    assert {*OPEN_BY, "none"} == set(GATES)
    opened = disturbed(gate, "silu").opening(torch.tensor((-1.0, 0.0, 2.0), dtype=torch.float64))
    torch.testing.assert_close(opened, torch.tensor(OPEN_BY[gate], dtype=torch.float64))


@pytest.mark.parametrize("kind", VARIANCES)
def test_births_are_the_papers(kind: str) -> None:
    births = adapter_births(AdapterSpec(layer=0, size=300, init=kind), 256, 6)
    read = [births[name] for name in ("gate_proj.weight", "up_proj.weight", "gate.weight")]
    assert [birth.std for birth in read] == [pytest.approx(math.sqrt(VARIANCE[kind]))] * 3
    assert births["down_proj.weight"].value == 0


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_adapter_speaks_the_backbones_activation_and_joins_the_ffn(family: str) -> None:
    """The MLP module's output is the native MLP's plus the adapter's, whatever norm the family puts after it."""
    model = perturbed(grafted(family, adapters("none", layers=(3,))))
    mlp = model.model.layers[3].mlp
    native = tiny.model(family).model.layers[3].mlp
    x = torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(8))
    activation = {
        "gemma": torch.nn.GELU("tanh"),
        "gemma2": torch.nn.GELU("tanh"),
        "gemma3_text": torch.nn.GELU("tanh"),
    }.get(family, torch.nn.SiLU())
    adapter = mlp.adapter
    expected = native(x) + adapter.down_proj(activation(adapter.gate_proj(x)) * adapter.up_proj(x))
    torch.testing.assert_close(mlp(x), expected)


def test_silent_adapter_leaves_a_perturbed_neighbour_alone() -> None:
    """A ReLU gate that is closed for every token gives exactly the base's function, however large the adapter."""
    base = tiny.model("gemma2")
    model = perturbed(grafted("gemma2", adapters("relu"), base=base))
    ids = tokens()
    assert not torch.equal(model(ids).logits, base(ids).logits)
    with torch.no_grad():
        for layer in (0, 3):
            model.model.layers[layer].mlp.adapter.gate.weight.zero_()
    assert torch.equal(model(ids).logits, base(ids).logits)
