"""Checks of configs and headers for a blueprint that changes widths, or takes tensors of other models."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from surgeon.anatomy.anatomy import Anatomy
from surgeon.anatomy.dissect import dissect
from surgeon.anatomy.family import OWN_CONFIG
from surgeon.anatomy.grafted_config import native_config
from surgeon.anatomy.growth import part_of
from surgeon.anatomy.rows_of_ids import VOCABULARY_KEY
from surgeon.blueprint.blueprint import Blueprint
from surgeon.checkpoint.damages import ANOTHER
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.header import FLOAT_DTYPES, TensorInfo
from surgeon.errors import BadInput, printable
from surgeon.operations.growing import divisor_of

# Keys that count experts, or how many of them a token takes.
_COUNTS = re.compile(r".*experts(_per_tok(en)?)?$|moe_(topk|k|top_k)$|.*top_k_experts$")
HIDDEN, INNER, HEADS, KEYS = "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"
HEAD = "head_dim"


def widened_sizes(blueprint: Blueprint, anatomy: Anatomy, config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the sizes that differ between the base's config and the output's, by field, as (before, after).

    Fields that count experts are left out.
    """
    known = {HIDDEN: anatomy.sizes.hidden, INNER: anatomy.sizes.intermediate, HEAD: anatomy.sizes.head_dim}
    known |= {HEADS: anatomy.sizes.heads, KEYS: anatomy.sizes.kv_heads}
    part = part_of(native_config(config), anatomy.derivation.path)
    found: dict[str, tuple[int, int]] = {}
    for field, after in blueprint.resized.items():
        before = field_in(part, field) or known.get(field) or _left_out(config, field)
        if before != after and not _counts(field):
            found[field] = before, after
    return found


def field_in(part: Mapping[str, Any], field: str) -> int:
    """Return an integer field of a config part, with dots for nested parts; 0 where there is no such integer."""
    *inside, key = field.split(".")
    for step in inside:
        part = part.get(step) or {}
    value = part.get(key)
    return value if type(value) is int else 0


def _left_out(config: Mapping[str, Any], field: str) -> int:
    """Return the default of transformers' class for a field that config.json leaves out."""
    from surgeon.anatomy.derived import derive

    return field_in(derive(native_config(config)).skeleton.text.to_dict(), field)


def _counts(field: str) -> bool:
    """Return whether a field counts experts; for a nested field, by its last name."""
    return _COUNTS.match(field.rpartition(".")[2]) is not None


def lost_divisors(blueprint: Blueprint, anatomy: Anatomy, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a note for each size that a smaller power of two divides than before, up to `MOST_DIVIDED`."""
    sizes = widened_sizes(blueprint, anatomy, config)
    if blueprint.new_rows:
        rows = part_of(blueprint.config, anatomy.derivation.path)[VOCABULARY_KEY]
        sizes[VOCABULARY_KEY] = (anatomy.sizes.vocabulary, rows)
    for key, (before, after) in sizes.items():
        one, other = divisor_of(before), divisor_of(after)
        if other < one:
            yield (
                f"`{key}` {after} is a multiple of {other}, the base's {before} of {one}: devices that share it,"
                f" kernels and quantisations (Q8_0 32, K-quants 256) may need {one}; `pad_to` makes it one"
            )


def check_taken(blueprint: Blueprint, base: CheckpointFolder, models: Mapping[str, CheckpointFolder]) -> None:
    """Raise BadInput where a tensor taken from another model is missing, quantised, or not of the base's shape."""
    for name, tensors in blueprint.taken.items():
        for tensor in tensors:
            there, here = models[name].tensors.get(tensor), base.tensors[tensor]
            found = "none" if there is None else f"{there.dtype} {list(there.shape)}"
            if there is None or there.shape != here.shape or there.dtype not in FLOAT_DTYPES:
                raise BadInput(
                    f"{printable(name)}: {printable(tensor)} is {found}, the base's {here.dtype} {list(here.shape)};"
                    " give a fine-tune of the base's own architecture, in full precision"
                )


def check_shapes(blueprint: Blueprint, anatomy: Anatomy) -> None:
    """Raise BadInput where widths changed and the config does not need exactly the planned tensors."""
    if blueprint.resized:
        from surgeon.anatomy.skeleton import build

        shown = printable(anatomy.family.model_type)
        planned = [TensorInfo(o.name, o.recipe.dtype, o.recipe.shape, "planned", 0, 0) for o in blueprint.outputs]
        try:
            if blueprint.native:
                build(blueprint.config)
        except BadInput as error:
            why = str(error).removesuffix(f"; {OWN_CONFIG}")
            raise BadInput(
                f"{shown}: a model of these widths cannot be described; choose other widths, or insert layers: {why}"
            ) from error
        try:
            dissect(blueprint.config, {info.name: info for info in planned})
        except BadInput as error:
            why = str(error).removesuffix(f"; {ANOTHER}")
            raise BadInput(
                f"{shown}: its code wants other tensors at these widths than are known to change with them; widen"
                f" something else, or insert layers: {why}"
            ) from error
