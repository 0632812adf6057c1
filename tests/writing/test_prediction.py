"""LESA's decomposition and loss against numpy in float64, and that the network learns what lies between layers."""

from __future__ import annotations

import io
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

import surgeon
from surgeon.errors import BadInput
from surgeon.writing.apply import applied_view
from surgeon.writing.prediction import PredictionSettings, coordinates, learn, loss
from tests import decoders, tiny
from tests.checkpoints import weights

PLAN = """\
surgeon: 1
operations:
  - {op: insert_layers, where: {after: [2, 4]}, init: {kind: lesa, poor_fit: keep}, zero_init: %s}
"""


def straight(rows: int, columns: int, *, layers: int = 10) -> list[torch.Tensor]:
    """Matrices on a line, so that what lies between two is known."""
    start, step = torch.randn(2, rows, columns, generator=torch.Generator().manual_seed(0))
    return [start + 0.1 * number * step for number in range(layers)]


def settings(**changed: float) -> PredictionSettings:
    known = {"hidden": 64, "epochs": 1, "batch": 16, "rate": 1e-3, "norm_weight": 5e-4}
    return PredictionSettings(**known | changed)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(8, 24), (24, 8)])
def test_the_decomposition_is_numpys_of_matrices_side_by_side(shape: tuple[int, int]) -> None:
    """Along the second axis whatever the shape; of V each row to the sign of its direction."""
    stack = straight(*shape)
    found = learn(stack.__getitem__, len(stack), settings(), np.random.default_rng(0))
    u, singular, v = np.linalg.svd(torch.cat(stack, 1).double().numpy(), full_matrices=False)
    kept = len(found.scale_R)
    # Matrices on a line span no more than two of them.
    assert kept == min(shape[0], 2 * shape[1])
    assert found.scale_R.numpy() == pytest.approx(singular[:kept], rel=1e-5)
    assert found.basis_DR.abs().numpy() == pytest.approx(np.abs(u[:, :kept]), abs=1e-4)
    made = [coordinates(matrix, found.basis_DR, found.scale_R) for matrix in stack]
    assert torch.cat(made, 1).abs().numpy() == pytest.approx(np.abs(v[:kept]), abs=1e-4)


def test_the_loss_is_the_formula() -> None:
    made, true = np.random.default_rng(0).standard_normal((2, 5, 7))
    lengths = np.linalg.norm(made) - np.linalg.norm(true)
    expected = 0.7 * ((made - true) ** 2).mean() + 0.3 * lengths**2
    assert float(loss(torch.from_numpy(made), torch.from_numpy(true), 0.3)) == pytest.approx(expected, rel=1e-12)


def trained() -> list[torch.Tensor]:
    """The matrices of eight residual layers trained on a task, so that their norms and spectra are no random draws."""
    generator = torch.Generator().manual_seed(0)
    inputs, turn = torch.randn(256, 48, generator=generator), torch.randn(48, 48, generator=generator) / 7
    layers = [(torch.randn(48, 48, generator=generator) * 0.05).requires_grad_() for _ in range(8)]
    optimizer = torch.optim.AdamW(layers, lr=3e-3)
    for _ in range(120):
        state = inputs
        for matrix in layers:
            state = state + torch.tanh(state @ matrix.T) / 8
        optimizer.zero_grad()
        torch.autograd.backward((state - torch.tanh(inputs @ turn.T)).square().mean())
        optimizer.step()
    return [matrix.detach() for matrix in layers]


def by_the_notebook(stack: list[torch.Tensor], epochs: int, seed: int) -> tuple[list[torch.Tensor], float]:
    """LESA in a few lines, as its authors' notebook has it: the matrices for all gaps, and the variance explained.

    Draws come from numpy: signs of directions, the network's parameters, the order of samples in each epoch.
    """
    draws = np.random.default_rng(seed)
    u, s, v = torch.linalg.svd(torch.cat(stack, 1).double(), full_matrices=False)
    drawn = torch.from_numpy(draws.integers(0, 2, len(s)) * 2.0 - 1)
    sign = u.gather(0, u.abs().argmax(0, keepdim=True))[0].sign() * drawn
    u, s, v = (u * sign).float(), s.float(), torch.stack((v * sign[:, None]).float().chunk(len(stack), 1))
    inputs, wanted = torch.cat([v[:-2], v[2:]], 2).flatten(0, 1), v[1:-1].flatten(0, 1)
    sizes = (inputs.shape[1], 256, 256, wanted.shape[1])
    first, second, third = (torch.nn.Linear(*pair) for pair in itertools.pairwise(sizes))
    for linear in (first, second, third):
        for parameter in linear.parameters():
            bound = linear.in_features**-0.5
            parameter.data = torch.from_numpy(draws.uniform(-bound, bound, tuple(parameter.shape))).float()
    network = torch.nn.Sequential(first, torch.nn.ReLU(), second, torch.nn.ReLU(), third)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    for _ in range(epochs):
        for rows in torch.from_numpy(draws.permutation(len(inputs))).split(64):
            made, true = network(inputs[rows]), wanted[rows]
            off = (1 - 5e-4) * ((made - true) ** 2).mean() + 5e-4 * (made.norm() - true.norm()) ** 2
            optimizer.zero_grad()
            torch.autograd.backward(off)
            optimizer.step()
    with torch.no_grad():
        scales = s.repeat(len(stack) - 2)[:, None]
        wrong = ((network(inputs) - wanted) * scales).square().sum() / (wanted * scales).square().sum()
        between = [(u * s) @ network(torch.cat([v[gap], v[gap + 1]], 1)) for gap in range(len(stack) - 1)]
    return between, 1 - float(wrong)


@pytest.mark.parametrize("shape", [(24, 48), (48, 24)])
def test_it_is_the_notebooks_algorithm(shape: tuple[int, int]) -> None:
    """On matrices of residual layers trained on a task: norms, elements and fit; and far from silent."""
    stack = [matrix[: shape[0], : shape[1]].contiguous() for matrix in trained()]
    expected, explained = by_the_notebook(stack, epochs=10, seed=7)
    found = learn(stack.__getitem__, 8, settings(hidden=256, epochs=10, batch=64), np.random.default_rng(7))
    made = torch.stack([found.between(*pair) for pair in itertools.pairwise(stack)])
    assert float((made - torch.stack(expected)).norm() / made.norm()) < 1e-2
    assert found.fit.explained == pytest.approx(explained, abs=1e-3)
    assert float(made.norm(dim=(1, 2)).mean() / torch.stack(stack).norm(dim=(1, 2)).mean()) > 0.6


def test_it_learns_what_lies_between() -> None:
    """Nearer to the truth than either neighbour, which one epoch is not; the fit says as much."""
    stack = straight(6, 24)
    found = [learn(stack.__getitem__, 10, settings(epochs=epochs), np.random.default_rng(0)) for epochs in (1, 300)]
    truth = (stack[4] + stack[5]) / 2
    errors = [float((each.between(stack[4], stack[5]) - truth).norm()) for each in found]
    assert errors[1] < float((stack[4] - truth).norm()) < errors[0]
    assert found[0].fit.explained < 0.1 < 0.9 < found[1].fit.explained
    assert found[1].fit.cosine == pytest.approx(1, abs=0.05)


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
    assert 0.3 < float(made.norm()) / float(old["model.layers.2.mlp.down_proj.weight"].float().norm()) < 2
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


def test_how_well_networks_fit_is_shown_and_recorded(tmp_path: Path) -> None:
    """In preview that it is not known yet; in the result, manifest and card what it is. None at all is refused."""
    base, plan = tiny.checkpoint(tmp_path / "base", "qwen3"), tmp_path / "plan.yaml"
    plan.write_text(PLAN % "false")
    assert "is known after apply" in surgeon.preview(plan, str(base)).blueprint.operations[0].matched
    applied = surgeon.apply(plan, str(base), tmp_path / "out")
    fits = applied.manifest.fits
    assert len(fits) == 7
    assert max(fit.explained for fit in fits.values()) <= 0, "the tiny base's networks explain something: another base"
    shown = io.StringIO()
    Console(file=shown, width=1000).print(applied_view(applied))
    card = (applied.path / "README.md").read_text(encoding="utf-8")
    for text in (shown.getvalue(), card):
        assert "7 networks explain -" in text
        assert "no better than zeros" in text
    assert applied.to_json()["fits"].keys() == fits.keys()
    assert surgeon.verify(str(base), applied.path).holds
    plan.write_text((PLAN % "false").replace("poor_fit: keep", "poor_fit: refuse"))
    with pytest.raises(BadInput, match="no more than zeros would"):
        surgeon.apply(plan, str(base), tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
