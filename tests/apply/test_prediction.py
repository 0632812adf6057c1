"""LESA's decomposition and loss against numpy in float64, and that the network learns what lies between layers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import surgeon
from surgeon.apply.prediction import PredictionSettings, learn, loss
from surgeon.errors import BadInput
from tests import decoders, tiny
from tests.end_to_end.conftest import weights

PLAN = "surgeon: 1\noperations:\n  - {op: insert_layers, where: {after: [2, 4]}, init: {kind: lesa}, zero_init: %s}\n"


def straight(rows: int, columns: int, *, layers: int = 10) -> list[torch.Tensor]:
    """Matrices on a line, so that what lies between two is known."""
    start, step = torch.randn(2, rows, columns, generator=torch.Generator().manual_seed(0))
    return [start + 0.1 * number * step for number in range(layers)]


def settings(**changed: float) -> PredictionSettings:
    known = {"hidden": 64, "epochs": 1, "rate": 1e-3, "columns": 1024, "norm_weight": 5e-5}
    return PredictionSettings(**known | changed)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(8, 24), (24, 8)])
def test_the_decomposition_is_numpys(shape: tuple[int, int]) -> None:
    stack = straight(*shape)
    found = learn(stack.__getitem__, len(stack), settings(), np.random.default_rng(0))
    wide = [matrix.double().numpy() if shape[0] < shape[1] else matrix.T.double().numpy() for matrix in stack]
    u, singular, v = np.linalg.svd(np.concatenate(wide, axis=1), full_matrices=False)
    spread = np.sqrt(len(stack) * max(shape))
    assert np.sort(found.scale_R.numpy() * spread)[::-1] == pytest.approx(singular, rel=1e-5)
    projector = found.basis_DR.double().numpy() @ found.basis_DR.double().numpy().T
    assert projector == pytest.approx(u @ u.T, abs=1e-5)
    for number, matrix in enumerate(stack):
        own = v[:, number * max(shape) : (number + 1) * max(shape)] * spread
        known = found.coordinates(matrix).double().numpy()
        assert (known**2).sum(0) == pytest.approx((own**2).sum(0), rel=1e-4)


def test_the_loss_is_the_formula() -> None:
    made, true = np.random.default_rng(0).standard_normal((2, 5, 7))
    lengths = np.linalg.norm(made, axis=1) - np.linalg.norm(true, axis=1)
    expected = ((made - true) ** 2).mean() + 0.3 * (lengths**2).mean()
    assert float(loss(torch.from_numpy(made), torch.from_numpy(true), 0.3)) == pytest.approx(expected, rel=1e-12)


def test_it_learns_what_lies_between() -> None:
    """Nearer to the truth than either neighbour, which one epoch is not."""
    stack = straight(6, 48)
    errors = []
    for epochs in (1, 150):
        found = learn(stack.__getitem__, len(stack), settings(epochs=epochs), np.random.default_rng(0))
        truth = (stack[4] + stack[5]) / 2
        errors.append(float((found.between(stack[4], stack[5]) - truth).norm()))
    nearest = float((stack[4] - truth).norm())
    assert errors[1] < nearest < errors[0]


def test_a_stack_of_zeros_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to predict from"):
        learn(lambda _: torch.zeros(4, 8), 3, settings(), np.random.default_rng(0))


def test_a_predicted_layer(tmp_path: Path) -> None:
    """The same for the same seed, norms the neighbours' average; silent where the plan says so."""
    base, plan = tiny.checkpoint(tmp_path / "base", "qwen3"), tmp_path / "plan.yaml"
    plan.write_text(PLAN % "false")
    found = [weights(surgeon.apply(plan, str(base), tmp_path / name).path) for name in ("one", "two")]
    assert all(torch.equal(found[0][name], tensor) for name, tensor in found[1].items())
    old, new = weights(base), found[0]
    norm = (old["model.layers.2.input_layernorm.weight"] + old["model.layers.3.input_layernorm.weight"]) / 2
    assert torch.equal(new["model.layers.3.input_layernorm.weight"], norm)
    made = new["model.layers.3.mlp.down_proj.weight"].float()
    assert 0 < float(made.norm()) < 2 * float(old["model.layers.2.mlp.down_proj.weight"].float().norm())
    plan.write_text(PLAN % "true")
    silent = surgeon.apply(plan, str(base), tmp_path / "silent").path
    assert surgeon.verify(str(base), silent, dtypes=("float32",)).identical


def test_what_cannot_be_predicted(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(PLAN % "true")
    with pytest.raises(BadInput, match="experts of two layers do not correspond"):
        surgeon.preview(plan, str(decoders.tiny_decoder(tmp_path / "experts", "mixtral", layers=6)))
    plan.write_text(PLAN.replace("[2, 4]", "[0]") % "true")
    with pytest.raises(BadInput, match="learns from three neighbouring layers, and only 2"):
        surgeon.preview(plan, str(tiny.checkpoint(tmp_path / "two", "llama", num_hidden_layers=2)))
