"""Matrices between two layers, predicted by a small network (LESA, Yang et al. 2025, arXiv 2502.13794).

The algorithm is that of the authors' notebook, `train_LESA.ipynb`. The matrices W_1 … W_L of one module, side by side
(always along their second axis), have one singular value decomposition, [W_1 … W_L] = U Σ [V_1 … V_L]. A network learns
V_i from V_{i-1} and V_{i+1}, one singular direction (a row of each) at a time. From V_i and V_{i+1} it predicts V', and
the new layer's matrix is U Σ V'. Dimensions: D rows of a matrix, M its columns, R the rank, L the layers, B a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# How many directions pass through a trained network at once.
_AT_ONCE = 8192
# Directions with a singular value below this share of the largest are noise, which division would amplify.
_LEAST = 1e-6


@dataclass(frozen=True)
class PredictionSettings:
    """The settings of a predicting network: two hidden layers of `hidden` units, trained with AdamW at the rate `rate`.

    Training passes `epochs` times over the triples of layers, `batch` directions at once. `norm_weight` is the
    notebook's λ, see `loss`.
    """

    hidden: int
    epochs: int
    batch: int
    rate: float
    norm_weight: float


@dataclass(frozen=True)
class Fit:
    """How well a network predicts the middle layers that it learned from, measured on their matrices.

    `explained` is 1 − Σ‖W'_i − W_i‖² / Σ‖W_i‖²: 1 for a perfect prediction, 0 for one no better than zeros. `cosine` is
    the cosine between all predictions and the true matrices, `norm` the ratio of their lengths. `triples` is the number
    of triples of layers.
    """

    explained: float
    cosine: float
    norm: float
    triples: int

    def to_report(self) -> dict[str, Any]:
        """Return plain data for the manifest."""
        return {"explained": self.explained, "cosine": self.cosine, "norm": self.norm, "triples": self.triples}


@dataclass(frozen=True)
class Predictor:
    """The predictor of one module: U (`basis_DR`), the diagonal of Σ (`scale_R`), the network, and its fit."""

    basis_DR: Tensor
    scale_R: Tensor
    network: nn.Sequential
    fit: Fit

    @torch.no_grad()
    def between(self, lower: Tensor, upper: Tensor) -> Tensor:
        """Return the predicted matrix between two neighbours, of their shape, in float32."""
        both = torch.cat([coordinates(each, self.basis_DR, self.scale_R) for each in (lower, upper)], dim=1)
        made = torch.cat([self.network(part) for part in torch.split(both, _AT_ONCE)])
        matrix: Tensor = self.basis_DR @ (made * self.scale_R[:, None])
        return matrix


def learn(
    read: Callable[[int], Tensor], count: int, settings: PredictionSettings, draws: np.random.Generator
) -> Predictor:
    """Return the predictor of a module; `read(i)` returns its matrix in layer i of `count` ≥ 3: float32, one device.

    The decomposition is float64, by way of Σ W Wᵀ, which is added up layer by layer; V of all layers stays in memory.
    Raises ValueError where the matrices are zero.
    """
    basis, scale = _decomposed(read, count, draws)
    known = torch.stack([coordinates(read(number), basis, scale) for number in range(count)])
    network = _network(known.shape[2], settings.hidden, draws).to(known.device)
    _train(network, known, settings, draws)
    return Predictor(basis, scale, network, _fit(network, known, scale))


def coordinates(matrix: Tensor, basis_DR: Tensor, scale_R: Tensor) -> Tensor:
    """Return V, (R, M), of a matrix of the stack, such that the matrix is about U Σ V."""
    found: Tensor = (basis_DR.T @ matrix) / scale_R[:, None]
    return found


def loss(made_BM: Tensor, true_BM: Tensor, norm_weight: float) -> Tensor:
    """Return (1 − λ)·MSE + λ·(‖V'‖ − ‖V‖)²; λ is `norm_weight`, and the norms are over the whole batch."""
    lengths = torch.linalg.vector_norm(made_BM) - torch.linalg.vector_norm(true_BM)
    found: Tensor = (1 - norm_weight) * torch.mean((made_BM - true_BM) ** 2) + norm_weight * lengths**2
    return found


def _decomposed(read: Callable[[int], Tensor], count: int, draws: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Return (U, the diagonal of Σ), largest first. Raises ValueError where all matrices are zero.

    Any sign of a direction is right, but the network is not odd, so signs are drawn at random: a library's signs follow
    no rule. A rule (the largest element positive, say) would align directions: on a trained base it made norms 7 %
    larger.
    """
    first = read(0)
    gram = torch.zeros(first.shape[0], first.shape[0], dtype=torch.float64, device=first.device)
    for number in range(count):
        matrix = read(number).double()
        gram += matrix @ matrix.T
    squares, vectors = (found.flip(-1) for found in torch.linalg.eigh(gram))
    kept = squares > (_LEAST**2) * squares[0]
    if not bool(kept.any()):
        raise ValueError("all matrices are zero, so there is nothing to predict from")
    vectors = vectors[:, kept]
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    signs = torch.from_numpy(draws.integers(0, 2, vectors.shape[1]) * 2.0 - 1.0).to(vectors.device)
    return (vectors * largest.sign() * signs).float(), squares[kept].sqrt().float()


def _train(network: nn.Sequential, known_LRM: Tensor, settings: PredictionSettings, draws: np.random.Generator) -> None:
    """Train the network on all triples of layers, in random order; then freeze it."""
    layers, directions, _ = known_LRM.shape
    optimizer = torch.optim.AdamW(network.parameters(), lr=settings.rate)
    starts = range(0, count := (layers - 2) * directions, settings.batch)
    with torch.enable_grad():
        for _ in range(settings.epochs):
            order = draws.permutation(count)
            for start in starts:
                below, true, above = _triples(known_LRM, order[start : start + settings.batch])
                optimizer.zero_grad()
                off = loss(network(torch.cat([below, above], 1)), true, settings.norm_weight)
                torch.autograd.backward(off)
                optimizer.step()
    network.requires_grad_(False)


def _triples(known_LRM: Tensor, numbers: np.ndarray) -> Iterator[Tensor]:
    """Return three tensors of rows: of the lower, middle and upper layer of each triple that `numbers` names.

    Number n stands for the lowest layer n // R and the direction n % R.
    """
    lowest, direction = (torch.from_numpy(part).to(known_LRM.device) for part in np.divmod(numbers, known_LRM.shape[1]))
    return (known_LRM[lowest + step, direction] for step in range(3))


def _fit(network: nn.Sequential, known_LRM: Tensor, scale_R: Tensor) -> Fit:
    """Return the fit of a trained network on the layers that it learned from.

    Raises ValueError where these are all zero. Sums are in float64; as U has orthonormal columns, the length of Σ V
    equals that of U Σ V.
    """
    wrong = inner = made_square = true_square = 0.0
    for below, true, above in zip(known_LRM[:-2], known_LRM[1:-1], known_LRM[2:], strict=True):
        made = torch.cat([network(part) for part in torch.split(torch.cat([below, above], 1), _AT_ONCE)])
        made_RM, true_RM = (each.double() * scale_R.double()[:, None] for each in (made, true))
        wrong += float((made_RM - true_RM).square().sum())
        inner += float((made_RM * true_RM).sum())
        made_square += float(made_RM.square().sum())
        true_square += float(true_RM.square().sum())
    if not true_square:
        raise ValueError("the matrices of all middle layers are zero, so there is nothing to learn")
    lengths = math.sqrt(made_square * true_square)
    return Fit(
        explained=1 - wrong / true_square,
        cosine=inner / lengths if lengths else 0.0,
        norm=math.sqrt(made_square / true_square),
        triples=len(known_LRM) - 2,
    )


def _network(columns: int, hidden: int, draws: np.random.Generator) -> nn.Sequential:
    """Return a network 2M → hidden → hidden → M, with torch's default distribution, drawn from `draws`."""
    linear = [nn.Linear(2 * columns, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, columns)]
    for layer in linear:
        bound = 1 / math.sqrt(layer.in_features)
        for parameter in layer.parameters():
            drawn = draws.uniform(-bound, bound, tuple(parameter.shape))
            parameter.data = torch.from_numpy(drawn.astype(np.float32))
    return nn.Sequential(linear[0], nn.ReLU(), linear[1], nn.ReLU(), linear[2])
