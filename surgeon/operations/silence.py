"""Making a new layer silent: it adds exactly zero to the residual stream at birth."""

from __future__ import annotations

from collections.abc import Mapping

from surgeon.families.family import Family, Part
from surgeon.recipes import Constant, Recipe


def silence(tensors: Mapping[str, Recipe], family: Family, parts: tuple[Part, ...]) -> dict[str, Recipe]:
    """A layer's recipes, by suffix, with those replaced that write to the residual stream (`Family.silence`)."""
    silenced = dict(tensors)
    for suffix, value in family.silence(parts).items():
        recipe = tensors[suffix]
        silenced[suffix] = Constant(value, recipe.dtype, recipe.shape)
    return silenced
