"""A tensor with adapters merged into it: W + s · B A, values trained in its place, and their rounding.

All steps are computed in float32, in order, and the result is rounded once. Where rounding to nearest would lose more
than a hundredth of a row's change, that row is rounded so that its errors cancel on the inputs that the adapters read:
each number is rounded up or down accordingly.

Numbers of a checkpoint lie on the grid of their dtype. A change much smaller than the grid's step is lost when each
number is rounded to the nearest. Here the choice for each column considers the error that the earlier columns left
along given directions (an adapter's A: what it reads of its input), and takes the neighbour that makes the error least.
This is error feedback with one running error per row and direction: one pass, no random numbers.

Dimensions: N rows, M columns, R directions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from surgeon.blueprint.recipes.copies import Copy
from surgeon.blueprint.recipes.elsewhere import Imported
from surgeon.blueprint.recipes.recipe import Bench, Recipe
from surgeon.common.formatting import listed, show

if TYPE_CHECKING:
    import torch
    from torch import Tensor


Rounding = Literal["auto", "nearest", "guided"]

# The largest share of a row's change that rounding to nearest may lose.
MAY_LOSE = 0.01
# How many numbers are processed at a time, so that intermediate results stay in the processor's cache.
_NUMBERS_AT_ONCE = 1 << 19


@dataclass(frozen=True)
class Product:
    """The share `weight` of what a LoRA adds, `scale` · B A; a `magnitude` (DoRA) then sets the length of rows.

    `turned`: the product is transposed (for embeddings, which have a row for each input); then columns get the length.
    `expert` is (number, count) where the pair A, B serves `count` experts and the product is for one of them: its r
    rows of A, and every count-th column of B. `rows` selects the rows of the product that the tensor has; None: all.
    """

    down: Imported
    up: Imported
    scale: float
    weight: float = 1.0
    magnitude: Imported | None = None
    turned: bool = False
    expert: tuple[int, int] | None = None
    rows: tuple[int, int] | None = None

    @property
    def rank(self) -> int:
        """Return the rank of the product."""
        return self.down.shape[0] // (1 if self.expert is None else self.expert[1])

    def of_expert(self, number: int) -> Product:
        """Return the product of another expert, from the same pair."""
        assert self.expert is not None
        return replace(self, expert=(number, self.expert[1]))

    @property
    def inputs(self) -> tuple[Imported, ...]:
        """Return the adapter's tensors."""
        return (self.down, self.up) if self.magnitude is None else (self.down, self.up, self.magnitude)

    @property
    def how(self) -> str:
        """Describe the step: the weight, the scale and the adapter's tensors."""
        of = "" if self.expert is None else f"expert {self.expert[0]} of "
        return f"{self.weight} of {self.scale} times {of}{listed(each.how for each in self.inputs)}"

    def given(self, bench: Bench) -> tuple[Tensor, ...]:
        """Return the two matrices of B A in the tensor's layout, without the scale; and the magnitude, if any."""
        down, up = self._pair(bench)
        magnitude = () if self.magnitude is None else (bench.working(self.magnitude),)
        left, right = (down.T, up.T) if self.turned else (up, down)
        return left if self.rows is None else left[slice(*self.rows)], right, *magnitude

    def _pair(self, bench: Bench) -> tuple[Tensor, Tensor]:
        """Return (A, B); where the pair serves many experts, read it once and return only this expert's share."""
        import torch

        if self.expert is None:
            return bench.working(self.down), bench.working(self.up)
        number, count = self.expert
        down = bench.kept(self.down)[number * self.rank : (number + 1) * self.rank]
        up = bench.kept(self.up)[:, number::count]
        return down.to(bench.device, torch.float32), up.to(bench.device, torch.float32)

    def taken(self, values: Tensor, base: Tensor, rows: slice, given: Sequence[Tensor]) -> Tensor:
        """Return the slice `rows` of the tensor with the product added.

        `values` are these rows after the earlier steps, `base` the rows before any step, `given` the factors. As in
        PEFT, DoRA divides by the lengths of the base's rows with only this product added. For columns, `given` holds
        the magnitude already divided by these lengths.
        """
        left, right, *magnitude = (each.to(values.dtype) for each in given)
        added = values.addmm(left[rows], right, alpha=self.scale)
        if magnitude and self.turned:
            added.mul_(magnitude[0].flatten())
        elif magnitude:
            own = base.addmm(left[rows], right, alpha=self.scale).norm(dim=1)
            added.mul_((magnitude[0].flatten()[rows] / own)[:, None])
        return added if self.weight == 1.0 else values.lerp(added, self.weight)


@dataclass(frozen=True)
class Trained:
    """A step of `weight` of the way to values that were trained in the place of all rows, or of the rows `rows`.

    `added`: the values are added instead, as a LoRA's own bias is.
    """

    values: Imported
    weight: float = 1.0
    rows: tuple[int, ...] | None = None
    added: bool = False

    @property
    def inputs(self) -> tuple[Imported, ...]:
        """Return the adapter's tensor."""
        return (self.values,)

    @property
    def how(self) -> str:
        """Describe the step: the weight, the adapter's tensor, and in which rows it applies."""
        where = "" if self.rows is None else f" in rows {show([*self.rows])}"
        return f"{self.weight} of {self.values.how}{' added' if self.added else where}"

    def given(self, bench: Bench) -> tuple[Tensor, ...]:
        """Return the adapter's values as a tuple of one matrix; a vector becomes one row."""
        values = bench.working(self.values)
        return (values if values.ndim > 1 else values[None],)

    def taken(self, values: Tensor, base: Tensor, rows: slice, given: Sequence[Tensor]) -> Tensor:
        """Return the slice `rows` of the tensor with the trained values put in or added.

        `values` are these rows after the earlier steps, `given` the adapter's values; `base` is not used.
        """
        own = given[0].to(values.dtype)
        if self.added:
            return values.add(own[rows], alpha=self.weight)
        if self.rows is None:
            return own[rows].clone() if self.weight == 1.0 else values.lerp(own[rows], self.weight)
        made = values.clone()
        for number, value in zip(self.rows, own, strict=True):
            if rows.start <= number < rows.stop:
                at = number - rows.start
                made[at] = value if self.weight == 1.0 else values[at].lerp(value, self.weight)
        return made


Step = Product | Trained


@dataclass(frozen=True)
class Adapted(Recipe):
    """The tensor `of` after the steps of adapters, one after another, rounded to `dtype`.

    `turned`: it is stored inputs × outputs (GPT-2). Its rounding is recorded under `name`.
    """

    of: Recipe
    steps: tuple[Step, ...]
    name: str
    dtype: str
    rounding: Rounding = "auto"
    turned: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the tensor `of`."""
        return self.of.shape

    @property
    def inputs(self) -> tuple[Recipe, ...]:
        """Return the tensor `of` and the adapters' tensors."""
        return (self.of, *(each for step in self.steps for each in step.inputs))

    @property
    def reads(self) -> tuple[str, ...]:
        """Return the tensor `of`; nothing where its rows are read a few at a time."""
        return () if self._streams else self.of.reads

    @property
    def how(self) -> str:
        """Describe the tensor, and what adapters merge into it."""
        return f"{self.of.how} with {'; '.join(step.how for step in self.steps)}; rounded as {self.rounding}"

    @property
    def own_change(self) -> str:
        """Return the name under which its rounding is recorded."""
        return self.name

    @property
    def working_set(self) -> int:
        """Return the bytes of a batch of rows before and after, grid neighbours and float32 intermediates.

        Where rows are not read a few at a time, the whole tensor before and after counts too.
        """
        whole = 0 if self._streams else 2 * self.numel
        at_once = 7 * min(self.numel, max(_NUMBERS_AT_ONCE, self.shape[-1]))
        return 4 * (whole + at_once + sum(each.numel for each in self.inputs[1:]))

    def compute(self, bench: Bench) -> Tensor:
        """Return all rows, in the layout in which they are stored."""
        import torch

        made = torch.cat([*self._parts(bench)]).view(self._used)
        return made.T.contiguous() if self.turned else made

    def compute_in_pieces(self, bench: Bench) -> Iterator[Tensor]:
        """Yield the rows of a large tensor a few at a time: a head may take gigabytes."""
        if self._streams:
            yield from self._parts(bench)
        else:
            yield bench.compute(self)

    @cached_property
    def _streams(self) -> bool:
        """Return whether rows are read a few at a time: `of` is a whole matrix of the base, outputs × inputs."""
        return isinstance(self.of, Copy) and self.of.source is not None and len(self.shape) == 2 and not self.turned

    @property
    def _used(self) -> tuple[int, ...]:
        """Return the shape as the adapters see the tensor: outputs × inputs."""
        return self.shape[::-1] if self.turned else self.shape

    def _parts(self, bench: Bench) -> Iterator[Tensor]:
        """Yield the tensor's rows (outputs × inputs), some at a time; record the figures for all of them at the end."""
        record = _Record()
        dtype = bench.dtype(self.dtype)
        given = [self._given(step, bench) for step in self.steps]
        factors = [own[1] for step, own in zip(self.steps, given, strict=True) if isinstance(step, Product)]
        for rows, before in self._rows(bench):
            after = before
            for step, own in zip(self.steps, given, strict=True):
                after = step.taken(after, before, rows, own)
            yield record.rounded(before, after, dtype, self.rounding, factors, own=self._has_own).to(dtype)
        bench.record(self.name, record.figures)

    def _given(self, step: Step, bench: Bench) -> tuple[Tensor, ...]:
        """Return the adapter's factors for a step, as the step's `given` does.

        DoRA of embeddings divides by lengths of columns, which are computed here over all rows.
        """
        found = step.given(bench)
        if not isinstance(step, Product) or step.magnitude is None or not step.turned:
            return found
        left, right, magnitude = found
        parts = ((rows, before.double()) for rows, before in self._rows(bench))
        squares = sum(
            before.addmm(left[rows].double(), right.double(), alpha=step.scale).square().sum(0)
            for rows, before in parts
        )
        return left, right, (magnitude.double().flatten() / squares**0.5).to(magnitude.dtype)

    @property
    def _has_own(self) -> bool:
        """Return whether a step changes the tensor outside the span of the rows of A: trained values, or DoRA."""
        return any(not isinstance(step, Product) or step.magnitude is not None for step in self.steps)

    def _rows(self, bench: Bench) -> Iterator[tuple[slice, Tensor]]:
        """Yield (rows, values): a slice, and the numbers there, outputs × inputs, in float32 (float64 stays).

        A vector is one row.
        """
        whole = None if self._streams else bench.working(self.of)
        if whole is not None:
            whole = whole[None] if whole.ndim == 1 else whole.T.contiguous() if self.turned else whole
        count, length = self.shape if whole is None else (len(whole), whole[0].numel())
        at_once = max(1, _NUMBERS_AT_ONCE // max(1, length))
        for begin in range(0, count, at_once):
            rows = slice(begin, min(begin + at_once, count))
            yield rows, self._read(bench, rows) if whole is None else whole[rows]

    def _read(self, bench: Bench, rows: slice) -> Tensor:
        """Read some rows of a tensor that is read a few rows at a time."""
        import torch

        assert isinstance(self.of, Copy)
        found = bench.read_rows(self.of, rows.start, rows.stop)[1].to(bench.device)
        return found.to(torch.float64 if found.dtype == torch.float64 else torch.float32)


@dataclass
class _Record:
    """A running record of how large a tensor's change ΔW is and how much of it rounding keeps; sums are in float64.

    `weight` is ‖W‖² and `change` ‖ΔW‖². `nearest` and `kept` are inner products of ΔW with the rounded change, for
    rounding to nearest and for the chosen rounding. `guided` is the number of rows that were rounded along directions.
    """

    weight: float = 0.0
    change: float = 0.0
    nearest: float = 0.0
    kept: float = 0.0
    guided: int = 0

    def rounded(
        self, before: Tensor, after: Tensor, dtype: Any, rounding: Rounding, factors: list[Tensor], *, own: bool
    ) -> Tensor:
        """Return rows after all steps, rounded to `dtype`, and add their figures to the record.

        `factors` are the adapters' A, with the rows' columns. `own`: each row's change is one more direction.
        """
        import torch

        change = after - before
        made = after.to(dtype).to(after.dtype)
        lengths = change.square().sum(1).double()
        nearest = ((made - before) * change).sum(1).double()
        self.weight += float(before.square().sum(1).double().sum())
        self.change += float(lengths.sum())
        self.nearest += float(nearest.sum())
        lost = (lengths > 0) & ((nearest < (1 - MAY_LOSE) * lengths) | (rounding == "guided"))
        if rounding != "nearest" and bool(lost.any()) and not torch.equal(made, after):
            poor = lost.nonzero()[:, 0]
            # Directions are scaled so that their mean length is about that of the row's own change.
            known = (rows.to(after.dtype) for rows in factors)
            each = [rows * (len(rows) ** 0.5 / rows.norm().clamp_min(1e-30)) for rows in known]
            directions = torch.cat([before.new_zeros(0, before.shape[1]), *each])
            other = torch.nn.functional.normalize(change[poor], dim=1) if own else None
            made[poor] = guided(after[poor], dtype, directions, other)
            nearest[poor] = ((made[poor] - before[poor]) * change[poor]).sum(1).double()
            self.guided += len(poor)
        self.kept += float(nearest.sum())
        return made

    @property
    def figures(self) -> dict[str, float | int | None]:
        """Return ‖ΔW‖ / ‖W‖ (`change`), the shares of ΔW that rounding keeps, and the number of `guided` rows.

        `nearest` is the share with rounding to nearest, `kept` the share with the chosen rounding. `change` is None
        where W is zero.
        """
        kept = (self.nearest / self.change, self.kept / self.change) if self.change else (1.0, 1.0)
        return {
            "change": (self.change / self.weight) ** 0.5 if self.weight else None,
            "nearest": kept[0],
            "kept": kept[1],
            "guided": self.guided,
        }


def neighbours(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return (below, above): the next numbers of `dtype`, in the dtype of `values`.

    Both equal a value that `dtype` has. Beyond the largest finite number, both are the rounded value.
    """
    import torch

    nearest = values.to(dtype)
    rounded = nearest.to(values.dtype)
    infinity = torch.full_like(nearest, float("inf"))
    other = torch.nextafter(nearest, torch.where(values > rounded, infinity, -infinity)).to(values.dtype)
    # Beyond the largest finite number there is no neighbour.
    other = torch.where((values == rounded) | other.isinf(), rounded, other)
    return torch.minimum(rounded, other), torch.maximum(rounded, other)


def guided(values_NM: Tensor, dtype: torch.dtype, directions_RM: Tensor, own_NM: Tensor | None = None) -> Tensor:
    """Return values rounded to `dtype` so that each row's error along the `directions` is least.

    The result has the dtype of the values. `own_NM` is one more direction for each row. Columns on which all directions
    are zero are rounded to nearest.
    """
    import torch

    value_MN = values_NM.T.contiguous()
    below, above = (each.T.contiguous() for each in neighbours(values_NM, dtype))
    # Work with errors instead of numbers: rounding up costs less where the pull is above the middle of both errors.
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
    # A value plus its error is a number of the grid, up to the last bit of float32.
    return down_MN.add_(value_MN).T.to(dtype).to(values_NM.dtype)
