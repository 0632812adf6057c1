"""The layers that have the block to which a graft is parallel: in hybrids, some have no FFN or no attention.

For quantised layers transformers' kernels may replace the model's modules by their own. A graft at a replaced module
would be lost, so it is refused. Routed experts, which begin as copies of an FFN, need layers whose FFN consists of
plain matrices.
"""

from __future__ import annotations

from collections.abc import Sequence

from surgeon.blueprint.draft import Draft
from surgeon.common.formatting import layers_have, show
from surgeon.errors import BadInput, printable
from surgeon.grafts.composition import ATTENTION
from surgeon.operations.selectors import LayerSelector, select_layers

# A description of an FFN that does not belong to one layer.
IN_SHARED = "the model's FFN stands in a block that several layers share"
_WORDS = {ATTENTION: "token mixer (attention or what stands in its place)"}


def select_sites(draft: Draft, selector: LayerSelector, *roles: str) -> list[int]:
    """Return the layers that the selector matches and that have one of the blocks `roles` (ATTENTION, FFN), ascending.

    `all` means the layers that have one; a layer matched by another selector must have one. Raises BadInput, for a
    selector that matches nothing as `select_layers` does.
    """
    layers = select_layers(selector, len(draft.layers))
    _check_kept(draft, layers, roles)
    fitting = [layer for layer in layers if set(roles) & draft.blocks(layer).keys()]
    if fitting == layers or (selector == "all" and fitting):
        return fitting
    words = " or ".join(_WORDS.get(role, "FFN") for role in roles)
    every = [layer for layer in range(len(draft.layers)) if set(roles) & draft.blocks(layer).keys()]
    there = "no layer has one: use insert_layers or mixture_of_control, which stands beside token mixers too"
    if every:
        there = f"layers {show(every)} have one: choose `layers` by that"
    lacking = next(layer for layer in layers if layer not in fitting)
    raise BadInput(
        f"layer {lacking} of this {printable(draft.anatomy.family.model_type)} has no {words} beside which a graft"
        f" could stand; {there}"
    )


def default_activation(draft: Draft, layer: int) -> str:
    """Return the activation of a graft at a layer's FFN, where no field of config.json names one; otherwise empty.

    It is the FFN's own, found on a twin, or SiLU where that one cannot be used elsewhere (xIELU, which has parameters).
    """
    if draft.anatomy.derivation.activation:
        return ""
    return draft.anatomy.derivation.own_activation(draft.layers[layer].like) or "silu"


def _check_kept(draft: Draft, layers: Sequence[int], roles: Sequence[str]) -> None:
    """Raise BadInput for a block that kernels for quantised layers would replace, without its grafts."""
    for layer in layers:
        replaced = {packed.replaced for packed in draft.kind_of(layer).packed.values()}
        for role, block in draft.blocks(layer).items():
            if role in roles and (ends := sorted(replaced.intersection((block, *block.split())))):
                raise BadInput(
                    f"layer {layer}: {printable(ends[0])} is stored quantised, where transformers' kernels put a module"
                    " of their own in its place, without what stands beside it; attach to other blocks (`sites`), where"
                    " the operation can, or operate on the full-precision model"
                )


def check_adapted(draft: Draft, layer: int, modules: Sequence[str]) -> None:
    """Raise BadInput for a linear module of a layer that slots cannot adapt, because it is quantised."""
    packed = {found.module: suffix for suffix, found in draft.kind_of(layer).packed.items()}
    for module in modules:
        if (suffix := packed.get(module)) is not None:
            raise BadInput(
                f"layer {layer}: {printable(module)} is stored in {draft.layers[layer].tensors[suffix].dtype}, and a"
                " slot takes its module's place, where transformers' kernels look for their own; name `targets` that"
                " are not quantised in any layer, or use another operation"
            )


def check_grafts(draft: Draft, layers: Sequence[int]) -> None:
    """Raise BadInput where the layers, or the model, have grafts, which would be removed with the layers."""
    carrying = [layer for layer in layers if draft.layers[layer].grafts]
    if carrying or draft.bank is not None:
        what = layers_have(carrying) if carrying else "the model's layers have"
        raise BadInput(f"{what} grafts, which cannot go with a layer: take layers out before grafting, or revert first")
