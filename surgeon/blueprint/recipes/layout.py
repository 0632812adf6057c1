"""How a tensor that holds the matrices of all experts stores each of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ExpertLayout:
    """Between a matrix as it is used, outputs by inputs with gate above up, and as it is stored.

    `transposed`: stored are inputs by outputs; `interleaved`: rows of gate and up alternate there.
    """

    transposed: bool
    interleaved: bool

    @property
    def plain(self) -> bool:
        """Whether a matrix is stored as it is used."""
        return not (self.transposed or self.interleaved)

    def used(self, stored: Tensor) -> Tensor:
        """The matrix as it is used."""
        import torch

        own = stored.T.contiguous() if self.transposed else stored
        return torch.cat([own[::2], own[1::2]]) if self.interleaved else own

    def stored(self, used: Tensor) -> Tensor:
        """The matrix as it is stored."""
        import torch

        own = torch.stack(used.chunk(2), dim=1).flatten(0, 1) if self.interleaved else used
        return own.T if self.transposed else own

    def used_shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of what is used."""
        return stored[::-1] if self.transposed else stored

    def stored_shape(self, used: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of what is stored."""
        return used[::-1] if self.transposed else used
