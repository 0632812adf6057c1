"""Rounding that keeps a small change of a matrix: each number goes up or down so that the errors of a row cancel.

Numbers of a checkpoint lie on the grid of their dtype. A change much smaller than the grid's step is lost when each
number is rounded to the nearest. Here the choice for each column looks at the error that the columns before left on
given directions (an adapter's A: what it reads of its input), and takes the neighbour that makes it least. That is
error feedback in as many numbers a row as there are directions: one pass, no random numbers.
Dimensions: N rows, M columns, R directions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def neighbours(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The numbers of `dtype` next below and next above (both the number itself, where it is one), and as wide."""
    import torch

    nearest = values.to(dtype)
    rounded = nearest.to(values.dtype)
    infinity = torch.full_like(nearest, float("inf"))
    other = torch.nextafter(nearest, torch.where(values > rounded, infinity, -infinity)).to(values.dtype)
    # Beyond the largest number there is none.
    other = torch.where((values == rounded) | other.isinf(), rounded, other)
    return torch.minimum(rounded, other), torch.maximum(rounded, other)


def guided(values_NM: Tensor, dtype: torch.dtype, directions_RM: Tensor, own_NM: Tensor | None = None) -> Tensor:
    """Values rounded to `dtype` so that each row's error is least on the `directions`, in the dtype of the values.

    `own_NM` is one direction more for each row. Columns on which all directions are zero are rounded to nearest.
    """
    import torch

    value_MN = values_NM.T.contiguous()
    below, above = (each.T.contiguous() for each in neighbours(values_NM, dtype))
    # Errors in place of numbers: up costs less than down where the pull is above the middle of the two.
    middle_MN = (below + above).mul_(0.5).sub_(value_MN)
    down_MN, up_MN = below.sub_(value_MN), above.sub_(value_MN)
    directions_MR = directions_RM.T.contiguous()
    weights = directions_MR.square().sum(1).tolist()
    own_MN = None if own_NM is None else own_NM.T.contiguous()
    left_RN = values_NM.new_zeros(directions_RM.shape[0], len(values_NM))
    left_N, pull_N = values_NM.new_zeros(len(values_NM)), values_NM.new_zeros(len(values_NM))
    for column, weight in enumerate(weights):
        if own_MN is not None:
            torch.mv(left_RN.T, directions_MR[column], out=pull_N)
            pull_N.addcmul_(own_MN[column], left_N)
            whole = own_MN[column].square().add_(weight)
            pull_N.div_(whole.masked_fill_(whole == 0, 1.0)).neg_()
        elif weight:
            torch.mv(left_RN.T, directions_MR[column], out=pull_N)
            pull_N.mul_(-1 / weight)
        else:
            pull_N.zero_()
        error = torch.where(pull_N > middle_MN[column], up_MN[column], down_MN[column])
        down_MN[column] = error
        left_RN.addr_(directions_MR[column], error)
        if own_MN is not None:
            left_N.addcmul_(own_MN[column], error)
    # A value and its error add up to a number of the grid, but for a bit of float32.
    return down_MN.add_(value_MN).T.to(dtype).to(values_NM.dtype)
