"""Recipes: how each output tensor is made. Each class defines its inputs, its bytes of the base and its computation.

A new recipe is a class derived from `Recipe`, here or in a plugin; no other module needs to know it.
"""

from surgeon.blueprint.recipes.adapted import Adapted, Product, Rounding, Step, Trained
from surgeon.blueprint.recipes.alignment import IDENTITY, Block, MapRef
from surgeon.blueprint.recipes.copies import (
    Copy,
    KeptRows,
    kept_rows,
    per_layer,
    renamed,
    rows,
    sliced,
    sliced_along,
    whole,
)
from surgeon.blueprint.recipes.drawn import Constant, Noised, Random, Shuffled
from surgeon.blueprint.recipes.elsewhere import Dequantised, Imported, Prompted, Unpacked
from surgeon.blueprint.recipes.experts import Below, Matched, OneExpert, below, one_expert
from surgeon.blueprint.recipes.fused import (
    Coupling,
    Fused,
    Interpolated,
    Summed,
    WholeHeads,
    average,
    columns,
)
from surgeon.blueprint.recipes.joined import ExpertLayout, Joined, piled, repeated, side_by_side, stacked_experts
from surgeon.blueprint.recipes.means import HEAD_BLOCK, Means, extended
from surgeon.blueprint.recipes.predicted import Predicted
from surgeon.blueprint.recipes.recipe import Bench, Place, Predictor, Recipe

__all__ = [
    "HEAD_BLOCK",
    "IDENTITY",
    "Adapted",
    "Below",
    "Bench",
    "Block",
    "Constant",
    "Copy",
    "Coupling",
    "Dequantised",
    "ExpertLayout",
    "Fused",
    "Imported",
    "Interpolated",
    "Joined",
    "KeptRows",
    "MapRef",
    "Matched",
    "Means",
    "Noised",
    "OneExpert",
    "Place",
    "Predicted",
    "Predictor",
    "Product",
    "Prompted",
    "Random",
    "Recipe",
    "Rounding",
    "Shuffled",
    "Step",
    "Summed",
    "Trained",
    "Unpacked",
    "WholeHeads",
    "average",
    "below",
    "columns",
    "extended",
    "kept_rows",
    "one_expert",
    "per_layer",
    "piled",
    "renamed",
    "repeated",
    "rows",
    "side_by_side",
    "sliced",
    "sliced_along",
    "stacked_experts",
    "whole",
]
