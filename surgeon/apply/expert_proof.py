"""The proof of more experts on a twin: a tiny model with the base's own number of them, and one with the plan's.

Widths alone are those of a twin. Counts, groups and how many a token takes are the base's, so every tensor is put
together just as the plan says. Routers get large rows, so that scores lie far apart, as a trained model's may.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from surgeon.apply.twin_proof import SEEDS, load_into, place_in, running_twin, saved, tensors_of
from surgeon.blueprint.blueprint import Blueprint
from surgeon.blueprint.recipes import Below, Constant, Copy, Joined, Recipe, below
from surgeon.checkpoint.header import TensorInfo
from surgeon.checkpoint.pieces import Span
from surgeon.common.devices import one_thread
from surgeon.errors import BadInput, printable
from surgeon.families.anatomy import Anatomy
from surgeon.families.grafted_config import native_config
from surgeon.families.names import made_of
from surgeon.families.proof import agree, check_same
from surgeon.families.skeleton import Skeleton
from surgeon.families.twin import shrunk, twin_of_small

if TYPE_CHECKING:
    from torch import Tensor

_LARGE = 8.0


def prove_experts(
    blueprint: Blueprint, anatomy: Anatomy, config: Mapping[str, Any], counts: Mapping[str, tuple[int, int]]
) -> None:
    """Carry a plan that adds experts out on a twin and compare logits: bits where it promises them, else to rounding.

    `counts` are what config.json counts of experts, before and after. Raises BadInput where logits differ.
    """
    if not _same_on_twins(blueprint, anatomy, config):
        raise _refusal(anatomy, counts)


def prove_moves(blueprint: Blueprint, anatomy: Anatomy, config: Mapping[str, Any]) -> None:
    """Carry a plan that moves bytes to tensors of other names out on a twin, which transformers loads, and compare.

    Raises BadInput where a logit differs, in float32 or bfloat16.
    """
    if not _same_on_twins(blueprint, anatomy, config):
        raise BadInput(
            f"{printable(anatomy.family.model_type)}: on a twin transformers loads another model from tensors of these"
            " names; leave them as they are"
        )


def _same_on_twins(blueprint: Blueprint, anatomy: Anatomy, config: Mapping[str, Any]) -> bool:
    """Whether twins have the same logits: the base's, and one of the tensors that a plan makes of the base's."""
    import torch

    with one_thread(), torch.no_grad():
        heads, _ = running_twin(config)
        base, result = (
            twin_of_small(shrunk(native_config(each), heads_left=heads, all_experts=True), seed=seed)
            for each, seed in zip((config, blueprint.config), SEEDS, strict=True)
        )
        held = _held(base, anatomy)
        load_into(base, dict(held.values()))
        wanted = _on_disk(result, (output.name for output in blueprint.outputs))
        made: dict[str, Tensor] = {}
        for output in blueprint.outputs:
            place = place_in(output.name, wanted, result)
            if place is None:
                if output.new:
                    raise BadInput(
                        f"{printable(output.name)}: the plan makes this tensor, transformers' class has no place for it"
                    )
                continue
            made[place] = _value(output.recipe, held, tensors_of(anatomy), wanted[place], output.recipe.shape[0])
        load_into(result, made)
        return _same_bits(base, result, blueprint) if blueprint.promise == "exact" else agree(base, result)


def _on_disk(twin: Skeleton, names: Iterable[str]) -> dict[str, Tensor]:
    """A twin's tensors, by names in memory, by those that transformers saves them under, and by others of `names`."""
    held = dict(twin.model.state_dict()) | saved(twin)
    others = made_of(twin.model, [name for name in names if place_in(name, held, twin) is None])
    renamed = {name: made.names[0] for name, made in others.items() if not made.converted}
    return held | {name: held[place] for name, place in renamed.items() if place in held}


def _held(base: Skeleton, anatomy: Anatomy) -> dict[str, tuple[str, Tensor]]:
    """By the base's name for each of its tensors: the twin's name for it, and the twin's values; routers' are large."""
    names = tensors_of(anatomy)
    stored = _on_disk(base, names)
    found: dict[str, tuple[str, Tensor]] = {}
    for name in names:
        if (place := place_in(name, stored, base)) is not None:
            found[name] = place, stored[place].clone()
    for layer, number in enumerate(anatomy.kind_of):
        for part in anatomy.kinds[number].parts:
            if part.blocks and part.blocks[0][0] == "router" and len(part.shape) > 1 and part.shape[0] > 1:
                found[anatomy.layer_name(layer, part.suffix)][1].mul_(_LARGE)
    return found


def _value(
    recipe: Recipe, held: Mapping[str, tuple[str, Tensor]], stored: Mapping[str, TensorInfo], like: Tensor, rows: int
) -> Tensor:
    """What a recipe makes of the twin's tensors, as wide as `like`; `rows` are those of the whole in the output.

    Raises BadInput for a tensor that has no place.
    """
    import torch

    match recipe:
        case Joined(parts=parts, axis=axis):
            return torch.cat([_value(part, held, stored, like, rows) for part in parts], dim=axis)
        case Copy(source=str(source)) if source in held:
            return held[source][1]
        case Copy(spans=(span,)) if span.tensor in held and len(recipe.shape) == held[span.tensor][1].ndim:
            whole = held[span.tensor][1]
            part = _share(whole, span, stored[span.tensor].nbytes)
            return part.reshape(-1, *whole.shape[1:]) if len(whole) > 1 else part.reshape(recipe.shape[0], -1)
        case Copy(spans=spans) if all(span.tensor in held for span in spans):
            shares = [_share(held[span.tensor][1], span, stored[span.tensor].nbytes) for span in spans]
            return torch.cat(shares).reshape(like.shape)
        case Below(of=of):
            least = _value(of, held, stored, like, rows).min()
            return least.new_full(recipe.shape, float(below(least)))
        case Constant(float(value)):
            # Where experts lie below one another, a twin's have fewer rows.
            return torch.full((recipe.shape[0] * len(like) // rows, *like.shape[1:]), value)
    raise BadInput(
        "the plan changes experts and computes tensors: nothing can be proven of both together; apply two plans"
    )


def _share(whole: Tensor, span: Span, size: int) -> Tensor:
    """The same share of a twin's tensor as a run is of the base's `size` bytes."""
    begin, end = (edge * whole.numel() // size for edge in (span.offset, span.offset + span.length))
    return whole.flatten()[begin:end]


def _same_bits(base: Skeleton, result: Skeleton, blueprint: Blueprint) -> bool:
    """Whether logits are equal to the bit, in float32 and in bfloat16."""
    import torch

    order, kept = [each.like for each in blueprint.layers], [each.base is not None for each in blueprint.layers]
    try:
        for dtype in (torch.float32, torch.bfloat16):
            for twin in (base, result):
                twin.model.to(dtype)
            check_same(base, result, order, kept)
    except BadInput:
        return False
    return True


def _refusal(anatomy: Anatomy, counts: Mapping[str, tuple[int, int]]) -> BadInput:
    told = ", ".join(f"`{key}` {before} → {after}" for key, (before, after) in counts.items())
    why = (
        "its router does not give copies shares of one weight (scores that are not normalised, or groups that are"
        " chosen first); use `top_k: fixed`, which promises nothing and measures the loss"
        if len(counts) > 1
        else "its router's choice or weights depend on experts that no token takes; use `how: duplicate`"
    )
    return BadInput(f"{printable(anatomy.family.model_type)}, {told}: on a twin the logits are not the base's: {why}")
