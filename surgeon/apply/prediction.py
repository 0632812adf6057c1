"""Matrices between two layers, predicted by a small network (LESA, Yang et al. 2025, arXiv 2502.13794).

The matrices W_1 … W_L of one module, of all layers side by side, have one singular value decomposition,
[W_1 … W_L] = U Σ [V_1 … V_L]. From V_{i-1} and V_{i+1} a network learns V_i, column by column; from V_i and V_{i+1} it
then tells what lies between them, V', and the new layer's matrix is U Σ V'. Dimensions: D the shorter side of a matrix
(they are put side by side along it, so that U is as small as it can be), R the rank, M the longer side, C the columns
learnt from, L the layers, B a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

# Columns that pass through the network at once: while it learns, and when it is used.
_BATCH, _COLUMNS_AT_ONCE = 256, 8192
# Directions whose singular value is below this share of the largest are noise that division would blow up.
_LEAST = 1e-6


@dataclass(frozen=True)
class PredictionSettings:
    """A hidden layer of `hidden` units; `epochs` over the triples of layers with Adam at `rate`.

    Of each layer `columns` columns are learnt from, the same of all; `norm_weight` is that of the squared difference of
    the columns' lengths, beside the mean squared error.
    """

    hidden: int
    epochs: int
    rate: float
    columns: int
    norm_weight: float


@dataclass(frozen=True)
class Predictor:
    """U, Σ and the network of one module."""

    basis_DR: Tensor
    scale_R: Tensor
    network: nn.Sequential
    wide: bool

    def coordinates(self, matrix: Tensor) -> Tensor:
        """V of a matrix, (R, M), scaled to a mean square of one over the whole stack."""
        return (self.basis_DR.T @ _oriented(matrix, self.wide)) / self.scale_R[:, None]

    @torch.no_grad()
    def between(self, lower: Tensor, upper: Tensor) -> Tensor:
        """The matrix between two neighbours, in their shape, float32."""
        both = torch.cat([self.coordinates(lower), self.coordinates(upper)]).T
        made = torch.cat([self.network(part) for part in torch.split(both, _COLUMNS_AT_ONCE)]).T
        matrix = self.basis_DR @ (made * self.scale_R[:, None])
        return _oriented(matrix, self.wide).contiguous()


def learn(
    read: Callable[[int], Tensor], count: int, settings: PredictionSettings, draws: np.random.Generator
) -> Predictor:
    """The predictor of a module, whose matrices in `count` layers, three at least, `read` gives: float32, one device.

    The decomposition is float64, by way of Σ W Wᵀ, which is added up layer by layer.
    """
    first = read(0)
    wide = first.shape[0] <= first.shape[1]
    gram = torch.zeros(min(first.shape), min(first.shape), dtype=torch.float64, device=first.device)
    for number in range(count):
        matrix = _oriented(read(number), wide).double()
        gram += matrix @ matrix.T
    squares, vectors = torch.linalg.eigh(gram)
    kept = squares > (_LEAST**2) * squares[-1]
    if not bool(kept.any()):
        raise ValueError("all matrices are zero, so there is nothing to predict from")
    # Σ over all layers of V Vᵀ is the identity: divided by this, a number of V has a mean square of one.
    scale = (squares[kept] / (count * max(first.shape))).sqrt()
    network = _network(int(kept.sum()), settings.hidden, draws).to(first.device)
    found = Predictor(vectors[:, kept].float(), scale.float(), network, wide)
    longer = max(first.shape)
    columns = torch.from_numpy(np.sort(draws.permutation(longer)[: settings.columns])).to(first.device)
    known = torch.stack([found.coordinates(read(number))[:, columns] for number in range(count)])
    _train(network, known, settings, draws)
    return found


def loss(made_BR: Tensor, true_BR: Tensor, norm_weight: float) -> Tensor:
    """Mean squared error, and the mean squared difference of the columns' lengths."""
    lengths = torch.linalg.vector_norm(made_BR, dim=1) - torch.linalg.vector_norm(true_BR, dim=1)
    return torch.mean((made_BR - true_BR) ** 2) + norm_weight * torch.mean(lengths**2)


def _train(network: nn.Sequential, known_LRC: Tensor, settings: PredictionSettings, draws: np.random.Generator) -> None:
    layers, _, columns = known_LRC.shape
    optimizer = torch.optim.Adam(network.parameters(), lr=settings.rate)
    with torch.enable_grad():
        for _ in range(settings.epochs):
            for batch in np.array_split(order := draws.permutation((layers - 2) * columns), -(-len(order) // _BATCH)):
                middle, column = (torch.from_numpy(part).to(known_LRC.device) for part in np.divmod(batch, columns))
                below, true, above = (known_LRC[middle + step, :, column] for step in range(3))
                optimizer.zero_grad()
                off = loss(network(torch.cat([below, above], 1)), true, settings.norm_weight)
                torch.autograd.backward(off)
                optimizer.step()
    network.requires_grad_(False)


def _network(rank: int, hidden: int, draws: np.random.Generator) -> nn.Sequential:
    """2R → hidden → R, drawn as torch draws linear layers, from `draws`."""
    network = nn.Sequential(nn.Linear(2 * rank, hidden), nn.ReLU(), nn.Linear(hidden, rank))
    for layer in (network[0], network[2]):
        assert isinstance(layer, nn.Linear)
        bound = 1 / math.sqrt(layer.in_features)
        for parameter in layer.parameters():
            drawn = draws.uniform(-bound, bound, tuple(parameter.shape))
            parameter.data = torch.from_numpy(drawn.astype(np.float32))
    return network


def _oriented(matrix: Tensor, wide: bool) -> Tensor:
    return matrix if wide else matrix.T
