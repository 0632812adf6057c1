"""`fold_adapters`: adapters without a gate become a part of the FFN that they run next to.

FFN and adapter are both W_d (σ(W_g x) ⊙ W_u x) with the same σ, so their sum is an FFN with [W_g; G], [W_u; U] and
[W_d, D]: the native class with a larger `intermediate_size`, and the same function.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from surgeon.anatomy.family import Role
from surgeon.blueprint.blueprint import Claim, OperationRecord
from surgeon.blueprint.draft import Draft
from surgeon.blueprint.grafts import Graft
from surgeon.blueprint.recipes import Constant, Copy, Recipe, side_by_side, sliced
from surgeon.common.formatting import show_layers
from surgeon.edits.widths import ROUNDING, check_alone, check_free, parts_with
from surgeon.errors import BadInput, printable
from surgeon.operations.gated_adapters import GatedAdapters
from surgeon.operations.growing import divisor_of
from surgeon.operations.operation import Operation
from surgeon.runtime.adapters_rules import ADAPTER

_PROJECTIONS: Mapping[Role, str] = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


class FoldAdapters(Operation):
    """Fold adapters without a gate into the FFN, as native width."""

    papers = GatedAdapters.papers
    training = replace(GatedAdapters.training, source="those of gated_adapters, at their paper's rate", lr=2e-4)

    op: Literal["fold_adapters"]
    multiple_of: Annotated[
        int | None,
        Field(
            ge=1,
            le=65536,
            description="the new `intermediate_size` becomes a multiple of this; default: the largest power of two, up"
            " to 256, that divides the base's",
        ),
    ] = None

    def edit(self, draft: Draft, facts: None) -> OperationRecord:
        """Append the adapters' matrices to the FFNs' own; FFNs without an adapter get zeros, as all share one width."""
        check_alone(draft, "intermediate_size")
        folded = {index: graft for index, layer in enumerate(draft.layers) if (graft := layer.graft("adapters"))}
        _check(draft, folded)
        size = max(int(graft.entry["size"]) for graft in folded.values())
        before = draft.anatomy.sizes.intermediate
        size += -(before + size) % (self.multiple_of or divisor_of(before))
        for index, layer in enumerate(draft.layers):
            _append(draft, index, folded.get(index), size)
            layer.grafts = [graft for graft in layer.grafts if graft.kind != "adapters"]
        draft.settings.pop("local_loss", None)
        draft.widths["intermediate_size"] = before + size
        left = "; other grafts stay" if any(layer.grafts for layer in draft.layers) or draft.bank else ""
        return OperationRecord(
            op=self.op,
            matched=f"adapters of {show_layers(sorted(folded))}, FFNs of {before} become {before + size}{left}",
            claim=Claim("rounding", f"FFN and adapter are one FFN of both widths; {ROUNDING}"),
            trains="new",
        )


def _check(draft: Draft, folded: Mapping[int, Graft]) -> None:
    """Raise BadInput where there is nothing to fold, or an adapter cannot be folded."""
    if not folded:
        raise BadInput("there is no adapter to fold in this model")
    for index, graft in folded.items():
        if (gate := graft.entry.get("gate", "relu")) != "none":
            raise BadInput(
                f"the adapter of layer {index} has a {gate} gate, one number for each token that multiplies what it"
                " adds, and an FFN has none; only adapters with `gate: none` can be folded"
            )
        if (activation := graft.entry.get("activation")) is not None:
            raise BadInput(
                f"the adapter of layer {index} names an activation of its own ({activation}), and an FFN has one for"
                " all its neurons; only adapters without `activation` can be folded"
            )
    check_free(draft, beside=("adapters",))


def _append(draft: Draft, index: int, graft: Graft | None, size: int) -> None:
    """Append `size` neurons to a layer's FFN: those of its adapter, and zeros.

    Biases of gate and up get as many zeros; that of down stays. Raises BadInput where a matrix of the adapter has
    another dtype than the one that it joins.
    """
    home = draft.layers[index]
    for suffix, part in parts_with(draft, index, tuple(_PROJECTIONS)).items():
        recipe, writes = home.tensors[suffix], part.blocks[0][0] == "down"
        if writes and part.kind != "weight":
            continue
        pieces: list[Recipe] = []
        begin = 0
        for role, rows in part.blocks:
            if len(part.blocks) == 1:
                pieces.append(recipe)
            else:
                assert isinstance(recipe, Copy), suffix
                pieces.append(sliced(recipe, begin, begin + rows))
            rest = size
            if graft is not None and part.kind == "weight":
                pieces.append(graft.tensors[f"{ADAPTER}{_PROJECTIONS[role]}.weight"])
                rest -= int(graft.entry["size"])
            shape = (recipe.shape[0], rest) if writes else (rest, *recipe.shape[1:])
            pieces += [Constant(0.0, recipe.dtype, shape)] if rest else []
            begin += rows
        if odd := next((piece.dtype for piece in pieces if piece.dtype != recipe.dtype), None):
            raise BadInput(
                f"layer {index} ({printable(suffix)}): {recipe.dtype}, and {odd} of another matrix is to stand in it;"
                " store the layer's matrices in one dtype"
            )
        home.tensors[suffix] = side_by_side(pieces, int(writes))
        home.rewritten[suffix] = draft.number
