"""For each axis that grows with the hidden size: whether it writes or reads the residual stream, found on a twin.

A slice along the axis is changed. If only the output channel of the same number changes, the axis writes to the stream;
if all channels change, it reads the stream. An axis that shows in no module's output is tried both ways.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surgeon.anatomy.derived import Derived
from surgeon.anatomy.family import Axes, Axis
from surgeon.anatomy.running import agree, run_prefill
from surgeon.anatomy.silence import first_calls, null_of, some_tokens
from surgeon.anatomy.skeleton import Skeleton
from surgeon.anatomy.widening import flat_fields
from surgeon.common.library import LOAD_FAILURES
from surgeon.errors import BadInput, printable
from surgeon.operations.growing import KEYS

if TYPE_CHECKING:
    from torch import Tensor

HIDDEN = "hidden_size"
# How an axis may be divided: into queries, keys and values, into blocks as wide as the stream, or not at all.
_SPLITS = ("heads", "hidden", "whole")
_MOST_TRIALS = 16
_SLICE = 3


@dataclass(frozen=True)
class Trial:
    """A guess about what grows: for each axis of a tensor in memory, whether it writes; and how axes are divided."""

    writes: Mapping[tuple[str, int], bool]
    split: str


class Probe:
    """A twin of the base and a wider twin, with the inputs of each of the base twin's modules."""

    def __init__(self, base: Skeleton, wide: Skeleton, derived: Derived, times: int) -> None:
        """Run the base's twin once to record inputs, and find which tensors grow, along which axes.

        Sets `odd` where a tensor of the wider twin is not `times` as large.
        """
        self._base, self._wide, self._kind_of, self._times = base, wide, derived.kind_of, times
        self._derived = derived
        paths = {module: path for path, module in base.model.named_modules()}
        with first_calls(paths) as calls:
            base.model(input_ids=some_tokens(base), use_cache=False)
        self._calls = {paths[module]: call for module, call in calls.items()}
        held, grown = (
            {
                name: value
                for name, value in each.model.state_dict().items()
                if name not in each.model.all_tied_weights_keys
            }
            for each in (base, wide)
        )
        self._held, self._grown = held, grown
        changed = {name: axes for name, axes in base.changes(wide).items() if name in held or name in grown}
        self._grows = {name: list(axes) for name, axes in changed.items() if axes is not None}
        others = [
            name
            for name, axes in changed.items()
            if axes is None or any(after != before * times for before, after in axes.values())
        ]
        others += held.keys() ^ grown.keys()
        # Names a tensor of the wider twin whose sizes are not `times` the base's; empty where there is none.
        self.odd = f"{printable(min(others))} would be another" if others else ""

    def trials(self) -> Iterator[Trial]:
        """Yield trials, the likeliest first: sides that outputs show, and both sides for axes that no output shows.

        Yields nothing where the wider twin has tensors of other sizes (`odd`). Raises BadInput for a tensor that does
        not affect the twin's logits.
        """
        if self.odd:
            return
        known: dict[tuple[str, int], bool] = {}
        unknown: list[tuple[str, int]] = []
        for name, axes in self._first_ones():
            for axis in axes:
                side = self._writes(name, axis)
                if side is None:
                    unknown.append((name, axis))
                    self._check_used(name, axis)
                else:
                    known[name, axis] = side
        choices = itertools.product((True, False), repeat=len(unknown))
        for sides in itertools.islice(choices, _MOST_TRIALS):
            for split in _SPLITS:
                yield Trial(known | dict(zip(unknown, sides, strict=True)), split)

    def _first_ones(self) -> Iterator[tuple[str, list[int]]]:
        """Yield (name, axes) for each tensor that grows outside the layers, or in the lowest layer of each kind."""
        for name, axes in self._grows.items():
            layer = self._layer_of(name)
            if layer is None or layer[0] in self._derived.firsts:
                yield name, axes

    def _layer_of(self, name: str) -> tuple[int, str] | None:
        """Return (layer, name in the layer) of a tensor; None for a tensor outside the layers."""
        stem = f"{self._base.stack}."
        if not name.startswith(stem):
            return None
        number, _, rest = name.removeprefix(stem).partition(".")
        return int(number), rest

    def _writes(self, name: str, axis: int) -> bool | None:
        """Return whether a slice along the axis changes only the channel of its number in its module's output.

        None: the module does not run by itself, or its output does not change.
        """
        import torch

        call = self._calls.get(name.rpartition(".")[0])
        if call is None:
            return None
        size = self._held[name].shape[axis]
        before = _numbers(call.layer(*call.args, **call.kwargs))
        with _moved(self._held[name], axis):
            after = _numbers(call.layer(*call.args, **call.kwargs))
        differing = [one != other for one, other in zip(before, after, strict=True) if not torch.equal(one, other)]
        if not differing:
            return None
        return all(_tells_of(changed, size) for changed in differing)

    def _check_used(self, name: str, axis: int) -> None:
        """Raise BadInput for a tensor that no text reaches (such as one for images): nothing would be proven for it."""
        import torch

        tokens = some_tokens(self._base)
        before = run_prefill(self._base, tokens)
        with _moved(self._held[name], axis):
            after = run_prefill(self._base, tokens)
        if torch.equal(before, after):
            raise BadInput(
                f"{printable(name)}: grows with `{HIDDEN}`, and no text reaches it on a twin, so that nothing can be"
                " proven of a wider one; widen_ffn may widen this model"
            )

    def holds(self, trial: Trial) -> bool:
        """Fill the wider twin as the trial says; return whether it computes what the base's twin computes."""
        import torch

        for name, value in self._grown.items():
            made = self._held[name]
            for axis in self._axes(name, trial, self._base):
                made = widened(made, axis, self._times)
            if made.shape != value.shape:
                return False
            value.copy_(made)
        self._wide.model.tie_weights()
        try:
            with torch.no_grad():
                return agree(self._base, self._wide) and (_goes_on(self._wide) or not _goes_on(self._base))
        except LOAD_FAILURES:
            return False

    def _axes(self, name: str, trial: Trial, of: Skeleton) -> Axes:
        """Return how a tensor grows, with the sizes of `of`, which is the twin or the base."""
        layer = self._layer_of(name)
        like = name
        if layer is not None:
            like = f"{self._base.stack}.{self._kind_of.index(self._kind_of[layer[0]])}.{layer[1]}"
        return tuple(
            Axis(
                axis, self._behind(name) if trial.writes[like, axis] else 0.0, self._shares(name, axis, trial.split, of)
            )
            for axis in self._grows.get(name, ())
        )

    def _shares(self, name: str, axis: int, split: str, of: Skeleton) -> tuple[int, ...]:
        """Return the proportions of the parts of an axis; (1,) where twin and base divide it into different numbers."""
        found: list[tuple[int, ...]] = []
        for each in (self._base, self._derived.skeleton):
            size, sizes, heads = each.shapes[name][axis], each.sizes, heads_of(each)
            if split == "hidden" and size % sizes.hidden == 0:
                found.append((1,) * (size // sizes.hidden))
            elif split == "heads" and size == sum(heads) * sizes.head_dim:
                found.append(heads)
        fits = len(found) > 1 and len(found[0]) == len(found[1])
        # False is 0, the twin; True is 1, the base.
        return found[of is not self._base] if fits else (1,)

    def _behind(self, name: str) -> float | None:
        """Return the fill value for the new part of a tensor that writes; None for copies of the old part.

        With tied embeddings, tensors after the layers get a value that gives zeros, so that the head reads only the
        first copy.
        """
        model, (path, _, key) = self._base.model, name.rpartition(".")
        head, words = model.get_output_embeddings(), model.get_input_embeddings()
        tied = head is not None and words is not None and head.weight is words.weight
        last = f"{self._base.stack}.{len(self._kind_of) - 1}"
        order = list(self._calls)
        if not tied or self._layer_of(name) is not None or path not in order or order.index(path) < order.index(last):
            return None
        module = model.get_submodule(path)
        scale = module._parameters.get("weight")
        if key != "weight" or scale is None or scale.ndim != 1:
            return 0.0
        return null_of(module, scale, scale.detach().clone()) or 0.0

    def by_kind(self, trial: Trial) -> tuple[tuple[dict[str, Axes], ...], dict[str, Axes]]:
        """Return (kinds, outer): what grows in each kind of layers of the base, and outside the layers, by name."""
        kinds: list[dict[str, Axes]] = [{} for _ in range(max(self._kind_of) + 1)]
        outer: dict[str, Axes] = {}
        for name, _ in self._first_ones():
            layer, axes = self._layer_of(name), self._axes(name, trial, self._derived.skeleton)
            if layer is None:
                outer[name] = axes
            else:
                kinds[self._kind_of[layer[0]]][layer[1]] = axes
        return tuple(kinds), outer


@contextlib.contextmanager
def _moved(value: Tensor, axis: int) -> Iterator[None]:
    """Change the numbers of one slice of a tensor within the context, and restore them afterwards."""
    part = value.select(axis, min(_SLICE, value.shape[axis] - 1))
    kept = part.clone()
    part.mul_(0.5).add_(0.25)
    try:
        yield
    finally:
        part.copy_(kept)


def _numbers(given: Any) -> list[Tensor]:
    """Return the floating-point tensors in a module's output."""
    import torch

    if isinstance(given, torch.Tensor):
        return [given.clone()] if given.is_floating_point() else []
    if isinstance(given, Mapping):
        given = list(given.values())
    return [value for each in given for value in _numbers(each)] if isinstance(given, tuple | list) else []


def _tells_of(changed: Tensor, size: int) -> bool:
    """Return whether, along some axis of length `size`, only the entry with the slice's number changed."""
    number = min(_SLICE, size - 1)
    return any(
        length == size and changed.movedim(axis, 0).flatten(1).any(1).nonzero().flatten().tolist() == [number]
        for axis, length in enumerate(changed.shape)
    )


def _goes_on(twin: Skeleton) -> bool:
    """Return whether a twin that keeps its state in its modules can read one more token after a prompt."""
    tokens = some_tokens(twin)
    try:
        twin.model(input_ids=tokens, use_cache=True)
        twin.model(input_ids=tokens[:, -1:], use_cache=True)
    except LOAD_FAILURES:
        return False
    return True


def widened(value: Tensor, axis: Axis, times: int) -> Tensor:
    """Return a tensor grown along an axis, with the new values after each of its parts."""
    import torch

    size = value.shape[axis.axis]
    pieces: list[Tensor] = []
    for part in torch.split(value, [size * share // sum(axis.shares) for share in axis.shares], dim=axis.axis):
        pieces += [part] * (times if axis.new is None else 1)
        pieces += [] if axis.new is None else [torch.full_like(part, axis.new)] * (times - 1)
    return torch.cat(pieces, dim=axis.axis)


def heads_of(twin: Skeleton) -> tuple[int, int, int]:
    """Return (query heads, key heads, value heads); keys and values have equally many."""
    heads = twin.sizes.heads
    keys = (value for key, value in flat_fields(twin.text.to_dict()) if KEYS.fullmatch(key) and type(value) is int)
    count = next(keys, heads)
    return heads, count, count
