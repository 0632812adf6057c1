"""Code shared by operations that change widths: tensors of an FFN, or of attention, with more rows or columns.

Most kernels sum over a wider FFN, or over more heads, in another order. So the function is the same in exact
arithmetic, but logits differ by rounding, even where everything new is zero: on CPUs in float32 in most shapes, in
bfloat16 in some.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from surgeon.anatomy.family import Part, Role
from surgeon.blueprint.draft import Draft
from surgeon.blueprint.recipes import Random
from surgeon.common.formatting import show_layers
from surgeon.errors import BadInput, printable
from surgeon.grafts.adapters import VARIANCES
from surgeon.operations.growing import New
from surgeon.operations.operation import Paper

ROUNDING = "sums over more of them are taken in another order, so logits differ by rounding"

COMPOSABLE = Paper(
    "gesmundo2023composable",
    "Gesmundo, Andrea and Maile, Kaitlin",
    "Composable Function-preserving Expansions for Transformer Architectures",
    2023,
    "2308.06103",
)


def check_alone(draft: Draft, size: str) -> None:
    """Raise BadInput where a plan or model does not allow a change of the width `size`.

    That is where an earlier operation changed anything but widths, or `size` too, where a wider stream is combined with
    other widths, and where layers that predict further tokens exist.
    """
    if draft.records and not draft.widths:
        raise BadInput("widths change in a plan of their own: apply the operations before it first, then this one")
    if draft.widths and "hidden_size" in (size, *draft.widths):
        raise BadInput("a wider residual stream stands in a plan of its own: apply two plans")
    if (beyond := next(iter(draft.anatomy.further), None)) is not None:
        raise BadInput(
            f"{printable(beyond)}: a layer that predicts further tokens has the widths of the others, and surgeon"
            " does not change it; take these layers out first"
        )
    if size in draft.widths:
        raise BadInput(f"an earlier operation of this plan changes `{size}` too: join the two, or apply two plans")


def parts_with(draft: Draft, layer: int, roles: Sequence[Role]) -> dict[str, Part]:
    """Return the tensors of a layer that hold rows of modules with these roles, by suffix.

    Raises BadInput where a role has not exactly one plain matrix, as in a mixture of experts.
    """
    kind = draft.kind_of(layer)
    found: dict[str, Part] = {}
    for part in kind.parts:
        named = [role for role, _ in part.blocks if role in roles]
        if named and part.expert is not None:
            raise BadInput(
                f"layer {layer} ({printable(part.suffix)}): its FFN is a mixture of experts, which see"
                " some of the tokens, and what is to be a part of it sees all"
            )
        if named:
            found[part.suffix] = part
    known = [role for part in found.values() if part.kind == "weight" for role, _ in part.blocks]
    if wrong := next((role for role in roles if known.count(role) != 1), None):
        raise BadInput(
            f"layer {layer}: {known.count(wrong)} modules are known as its {wrong} projection, where one is needed; the"
            " width of this model cannot change"
        )
    if kind.packed:
        raise BadInput(f"layer {layer} is quantised: widen the full-precision model, and quantise the output")
    return found


def which_layers(wider: Collection[int], draft: Draft) -> str:
    """Return words on which layers become wider: all, or those that have the widened modules."""
    if len(wider) == len(draft.layers):
        return f"all {len(wider)} layers"
    return f"{show_layers(sorted(wider))}, which have them"


def check_free(draft: Draft, *, beside: Sequence[str] = ()) -> None:
    """Raise BadInput where a graft has tensors of the changing width, except grafts of the kinds `beside`."""
    for index, layer in enumerate(draft.layers):
        for graft in layer.grafts:
            if graft.kind not in beside and (
                graft.rules.branching or any("_proj" in suffix for suffix in graft.tensors)
            ):
                raise BadInput(
                    f"layer {index} carries a graft ({graft.text}) of the width that it has now; revert it, or fold or"
                    " merge it first"
                )


def drawn(draft: Draft, new: New, init: str, reads: int) -> Random:
    """Return normal values for the new part of a matrix with `reads` inputs, of the variance that `init` names.

    Modules without a unique role are drawn by their suffix, each separately.
    """
    std = math.sqrt(VARIANCES[init](reads, len(draft.layers)))
    key = new.role if new.role and new.part.expert is None else f"{new.part.suffix}.{new.role}".removesuffix(".")
    return Random(f"operations[{draft.number}].layer[{new.layer}].{key}", std, new.of.dtype, new.shape)


def check_norms(draft: Draft, growing: Sequence[Collection[str]]) -> None:
    """Raise BadInput where a norm grows: queries or keys are then normalised over all heads together.

    `growing` are the growing suffixes of each kind of layers.
    """
    for layer, suffix in norms_that_grow(draft, growing).items():
        raise BadInput(
            f"layer {layer} ({suffix}): queries and keys are normalised over all heads together, so new heads of zeros"
            " would change what the old ones compute; `widen_attention` adds copies of all (`groups: double`)"
        )


def norms_that_grow(draft: Draft, growing: Sequence[Collection[str]]) -> dict[int, str]:
    """Return, by the lowest layer of each kind that has one, the suffix of a growing norm over all heads."""
    found: dict[int, str] = {}
    for number, (kind, grown) in enumerate(zip(draft.anatomy.kinds, growing, strict=True)):
        wide = [part for part in kind.parts if part.kind == "norm" and len(part.shape) == 1 and part.suffix in grown]
        if wide:
            found[draft.anatomy.kind_of.index(number)] = wide[0].suffix
    return found
