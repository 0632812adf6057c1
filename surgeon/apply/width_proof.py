"""The proof of wider layers on a twin: what a plan makes of a tiny model of the base's config computes what that does.

A twin is too small for the plan's own widths, so it gets fewer of the same: another group of heads, some neurons, a
stream as many times as wide. Each tensor is put together as the plan says, each new part in its share of what is new.
Sums over more numbers are taken in another order, so logits may differ by rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surgeon.apply.shapes import HEAD, HEADS, HIDDEN, KEYS, field_in, widened_sizes
from surgeon.apply.twin_proof import (
    SEEDS,
    held_tensor,
    load_into,
    place_in,
    running_twin,
    saved,
    tensors_of,
    value_of,
)
from surgeon.blueprint.blueprint import Blueprint
from surgeon.blueprint.recipes import Constant, Copy, Joined, Recipe
from surgeon.checkpoint.header import TensorInfo
from surgeon.common.devices import one_thread
from surgeon.common.library import LOAD_FAILURES, first_line
from surgeon.errors import BadInput, printable
from surgeon.families.anatomy import Anatomy, with_fields
from surgeon.families.derived import derive
from surgeon.families.family import LARGEST_SIZE
from surgeon.families.grafted_config import is_grafted, native_config
from surgeon.families.proof import agree
from surgeon.families.silence import some_tokens
from surgeon.families.skeleton import Skeleton
from surgeon.families.stream_width import hidden_fields, stream_twins, why_not
from surgeon.families.twin import shrunk, twin_of_small

if TYPE_CHECKING:
    from torch import Generator, Tensor

# A multiple of what kernels take at once; as many as a twin's adapter has.
_NEURONS = 64
_HEAD = 8


def prove_widths(blueprint: Blueprint, anatomy: Anatomy, config: Mapping[str, Any]) -> None:
    """Carry a plan that widens layers out on a twin and compare the logits, up to rounding.

    Raises BadInput where they differ by more, so that something else in the model depends on what became wider.
    """
    import torch

    sizes = widened_sizes(blueprint, anatomy, config)
    if not sizes:
        return
    path = anatomy.derivation.path
    before = dict(config)
    if not path and "head_dim" in blueprint.config:
        # A class that states it, as the output's does, is shrunk otherwise than one that does not.
        before["head_dim"] = blueprint.config["head_dim"]
    derived = derive(native_config(before))
    wider = not is_grafted(config) and any(key in sizes for key in hidden_fields(derived.skeleton))
    with one_thread(), torch.no_grad():
        stream = stream_twins(native_config(before), derived, blueprint.resized) if wider else None
        # A class that rounds a width may make nothing of a few neurons more.
        for most in (_NEURONS, LARGEST_SIZE):
            base, result = _twins(before, anatomy, sizes, most) if stream is None else stream
            if _shapes(base) != _shapes(result):
                break
        else:
            raise BadInput(
                "a twin of this model becomes no wider by what the plan changes, so nothing can be proven of it"
            )
        _fill(blueprint, anatomy, base, result, by_name=anatomy.derivation.same_names or is_grafted(config))
        grows = " and ".join(f"`{key}`" for key in sizes)
        try:
            same = agree(base, result)
        except LOAD_FAILURES as error:
            raise BadInput(
                f"a twin of this model cannot be run with more {grows} ({first_line(error)}): its code has sizes that"
                " do not follow; widen something else"
            ) from error
        if not same:
            raise BadInput(why_not(base, result, printable(anatomy.family.model_type), grows))


def _twins(
    config: dict[str, Any], anatomy: Anatomy, sizes: Mapping[str, tuple[int, int]], most: int
) -> tuple[Skeleton, Skeleton]:
    """The twin of the base, and a wider one whose tensors are still its own."""
    path = anatomy.derivation.path
    own = _with_own_heads(config, anatomy, sizes) if HEADS in sizes else None
    if own is not None:
        small, base = own
        part_at(small, path).update({key: after for key, (_, after) in sizes.items() if _of_heads(key)})
        _widen(small, path, {key: size for key, size in sizes.items() if not _of_heads(key)}, most)
    else:
        heads, base = running_twin(config)
        small = shrunk(native_config(config), heads_left=heads)
        _widen(small, path, sizes, most)
    return base, twin_of_small(small, seed=SEEDS[1])


def _of_heads(field: str) -> bool:
    """Whether a field of the config counts heads."""
    return field in (HEADS, KEYS) or field.endswith("_heads")


def _shapes(twin: Skeleton) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in twin.model.state_dict().items()}


def _fill(blueprint: Blueprint, anatomy: Anatomy, base: Skeleton, result: Skeleton, *, by_name: bool) -> None:
    """Make the tensors of the wider twin as the plan says; what has the shape that it had is the base's twin's.

    `by_name`: names on disk are those in memory; else tensors are put together as stored, and loaded by transformers.
    Raises BadInput where one has another shape, and the plan leaves it as it is.
    """
    import torch

    draws = torch.Generator().manual_seed(SEEDS[1])
    held, wanted = (each.model.state_dict() if by_name else saved(each) for each in (base, result))
    twin = _Twin(base, held, tensors_of(anatomy), draws)
    wider = {name for name, value in wanted.items() if name not in held or held[name].shape != value.shape}
    # Also what has other names on disk.
    made = {name: held[name] for name in wanted.keys() - wider}
    for output in blueprint.outputs:
        place = place_in(output.name, wanted, result)
        if place is not None:
            made[place] = _value(output.recipe, twin, wanted[place], output.name)
    if left := sorted(wider - made.keys() - set(result.model.all_tied_weights_keys)):
        raise BadInput(f"{printable(left[0])}: has another shape in a wider model, and the plan leaves it as it is")
    if by_name:
        for name, value in made.items():
            wanted[name].copy_(value)
        result.model.tie_weights()
    else:
        load_into(result, made)


def _grows_groups(sizes: Mapping[str, tuple[int, int]], anatomy: Anatomy) -> bool:
    """Whether more query heads read one key-value head than before."""
    own = {HEADS: anatomy.sizes.heads, KEYS: anatomy.sizes.kv_heads}
    heads, keys = (sizes.get(key, (of, of)) for key, of in own.items())
    return heads[1] * keys[0] != heads[0] * keys[1]


def _with_own_heads(
    config: Mapping[str, Any], anatomy: Anatomy, sizes: Mapping[str, tuple[int, int]]
) -> tuple[dict[str, Any], Skeleton] | None:
    """The config of a twin with as many heads as the base, in groups as large, and the twin; heads may be smaller.

    Its hidden size is divided by these heads and by those of the output, as many classes want it. None where it does
    not run, and fewer heads would show the same; else raises BadInput.
    """
    import torch

    if is_grafted(config):
        # Grafts of the base are in a twin of the whole config alone.
        return None
    failed: Exception | None = None
    divided = math.lcm(anatomy.sizes.heads, sizes[HEADS][1])
    for size in (_HEAD, anatomy.sizes.head_dim):
        small = shrunk(native_config(config), heads_left=anatomy.sizes.heads)
        own = {key: before for key, (before, _) in sizes.items() if _of_heads(key)}
        own |= {HEADS: anatomy.sizes.heads, KEYS: anatomy.sizes.kv_heads, HEAD: size}
        own[HIDDEN] = divided * -(-_NEURONS // divided)
        part_at(small, anatomy.derivation.path).update(own)
        try:
            twin = twin_of_small(small, seed=SEEDS[0])
            with torch.no_grad():
                twin.model(input_ids=some_tokens(twin))
            return small, twin
        except (BadInput, *LOAD_FAILURES) as error:
            failed = failed or error
    if not _grows_groups(sizes, anatomy):
        return None
    assert failed is not None
    raise BadInput(
        f"a twin of this model with the base's own heads cannot be run ({first_line(failed)}), so nothing can be proven"
        " of larger groups"
    )


def part_at(config: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """The part of a config at `path`, itself."""
    for key in path:
        config = config[key]
    return config


def _widen(small: dict[str, Any], path: tuple[str, ...], sizes: Mapping[str, tuple[int, int]], most: int) -> None:
    """Give the small config's text part a little more of what the plan widens, of neurons at `most` so many."""
    part = part_at(small, path)
    heads, keys = part.get(HEADS, 0), part.get(KEYS) or part.get(HEADS, 0)
    if heads and HEADS in sizes:
        part.setdefault("head_dim", part.get(HIDDEN, 0) // heads)
    if HEADS in sizes:
        part[HEADS], part[KEYS] = heads + heads // keys, keys + 1
    for field, (old, new) in sizes.items():
        if field != HEAD and not _of_heads(field):
            part.update(with_fields(part, (), {field: (field_in(part, field) or old) + min(new - old, most)}))


@dataclass(frozen=True)
class _Twin:
    """What the wider twin is made of: the base's twin and its tensors, the base's own as stored, random numbers."""

    base: Skeleton
    held: Mapping[str, Tensor]
    stored: Mapping[str, TensorInfo]
    draws: Generator

    def rows(self, part: Copy) -> Tensor:
        """A tensor of the base's twin, or the same share of its rows, or columns, as `part` is of one of the base's."""
        (span,) = part.spans
        source, size = held_tensor(span.tensor, self.base, self.held), self.stored[span.tensor].nbytes
        shape, each = self.stored[span.tensor].shape, size // span.count
        # Runs of every row, or of every expert's matrix, are a part of one axis.
        axis = next(n for n in range(len(shape)) if math.prod(shape[:n]) == span.count)
        width = source.shape[axis]
        start, stop = (edge * width // each for edge in (span.offset, span.offset + span.length))
        return source.narrow(axis, start, stop - start)


def _value(recipe: Recipe, twin: _Twin, like: Tensor, name: str) -> Tensor:
    """What a recipe makes of a twin's tensors, of the shape of `like`. Raises BadInput where it makes another shape."""
    if isinstance(recipe, Joined):
        value = _joined(recipe, twin, like, name)
    else:
        value = value_of(recipe, twin.base, twin.held, twin.stored, like, twin.draws)
    if value.shape != like.shape:
        raise BadInput(
            f"{printable(name)}: on a twin the plan makes it of shape {list(value.shape)}, transformers' class needs"
            f" {list(like.shape)}"
        )
    return value


def _joined(recipe: Joined, twin: _Twin, like: Tensor, name: str) -> Tensor:
    """What is put together of a twin's tensors, of the shape of `like`; what is new in its share of what is more."""
    import torch

    axis = recipe.axis
    if any(isinstance(part, Joined) for part in recipe.parts):
        # Wider along two axes: a row of parts is as high as what it holds of the base, and those of constants share
        # what is left.
        held = [next((each for each in part.walk() if isinstance(each, Copy)), None) for part in recipe.parts]
        counts = [0 if each is None else twin.rows(each).shape[axis] for each in held]
        left = like.shape[axis] - sum(counts)
        sizes = [part.shape[axis] if each is None else 0 for each, part in zip(held, recipe.parts, strict=True)]
        counts = [count + (left * size // sum(sizes) if size else 0) for count, size in zip(counts, sizes, strict=True)]
        return torch.cat(
            [
                _value(part, twin, like.narrow(axis, 0, count), name)
                for part, count in zip(recipe.parts, counts, strict=True)
            ],
            dim=axis,
        )
    old = [twin.rows(each) if isinstance(each, Copy) and not each.trains else None for each in recipe.parts]
    more = like.shape[axis] - sum(each.shape[axis] for each in old if each is not None)
    total = sum(each.shape[axis] for each, found in zip(recipe.parts, old, strict=True) if found is None)
    pieces = []
    for part, found in zip(recipe.parts, old, strict=True):
        count = more * part.shape[axis] // total if total else 0
        pieces.append(_new(part, count, axis, twin, like) if found is None else found)
    return torch.cat(pieces, dim=axis)


def _new(part: Recipe, count: int, axis: int, twin: _Twin, like: Tensor) -> Tensor:
    """`count` new rows or columns: constants, copies in turn, or random where they are drawn or computed."""
    import torch

    shape = (*like.shape[:axis], count, *like.shape[axis + 1 :])
    match part:
        case Constant(value) if not isinstance(value, tuple):
            return torch.full(shape, value, dtype=like.dtype)
        case Copy():
            source = twin.rows(part)
            return source.index_select(axis, torch.arange(count) % source.shape[axis])
        case _:
            noise: Tensor = torch.randn(shape, generator=twin.draws)
            return noise.mul_(float(like.shape[-1]) ** -0.5)
