"""The layers that have the block that a graft is to be beside: in hybrids, not all have an FFN or an attention.

Where transformers multiplies quantised numbers as they are stored, it puts modules of its own in the place of the
model's. A graft at such a place would not be there then: it is refused. Routed experts, which begin as copies of an
FFN, can stand in layers whose FFN is one of plain matrices.
"""

from __future__ import annotations

from collections.abc import Sequence

from surgeon.blueprint.draft import Draft
from surgeon.common.formatting import layers_have, show
from surgeon.errors import BadInput, printable
from surgeon.grafts.composition import ATTENTION
from surgeon.operations.selectors import LayerSelector, select_layers

# What is said of an FFN that is no layer's own.
IN_SHARED = "the model's FFN stands in a block that several layers share"
_WORDS = {ATTENTION: "token mixer (attention or what stands in its place)"}


def select_sites(draft: Draft, selector: LayerSelector, *roles: str) -> list[int]:
    """The layers that the selector matches and that have one of the blocks `roles` (ATTENTION, FFN), ascending.

    `all` means those that have one; a layer that is matched otherwise must have one. Raises BadInput, for a selector
    that fits nothing as `select_layers` does.
    """
    layers = select_layers(selector, len(draft.layers))
    _check_kept(draft, layers, roles)
    fitting = [layer for layer in layers if set(roles) & draft.blocks(layer).keys()]
    if fitting == layers or (selector == "all" and fitting):
        return fitting
    words = " or ".join(_WORDS.get(role, "FFN") for role in roles)
    every = [layer for layer in range(len(draft.layers)) if set(roles) & draft.blocks(layer).keys()]
    there = (
        f"layers {show(every)} have one: choose `layers` by that" if every else f"no layer has one: {_instead(draft)}"
    )
    lacking = next(layer for layer in layers if layer not in fitting)
    raise BadInput(
        f"layer {lacking} of this {printable(draft.anatomy.family.model_type)} has no {words} beside which a graft"
        f" could stand; {there}"
    )


def _instead(draft: Draft) -> str:
    """What a model takes of whose layers none has the block."""
    mixers = any(ATTENTION in draft.blocks(layer) for layer in range(len(draft.layers)))
    return "use insert_layers" + (" or mixture_of_control, which stands beside token mixers too" if mixers else "")


def default_activation(draft: Draft, layer: int) -> str:
    """The activation of what stands beside a layer's FFN, where no field of config.json names one; else empty.

    It is the FFN's own, as a twin shows, and SiLU where that is none that others could have (xIELU, which learns).
    """
    if draft.anatomy.derivation.activation:
        return ""
    return draft.anatomy.derivation.own_activation(draft.layers[layer].like) or "silu"


def _check_kept(draft: Draft, layers: Sequence[int], roles: Sequence[str]) -> None:
    """Raise BadInput for a block that would be another one, without its grafts, where the model runs quantised."""
    for layer in layers:
        replaced = {packed.replaced for packed in draft.kind_of(layer).packed.values()}
        for role, block in draft.blocks(layer).items():
            if role in roles and block in replaced:
                raise BadInput(
                    f"layer {layer}: its experts are stored in MXFP4, where transformers' kernels put a block of their"
                    f" own in the place of `{printable(block)}`, without what stands beside it; attach to the attention"
                    " alone (`sites: [attention]`), where the operation can, or use another operation"
                )
            if role in roles and (ends := sorted(replaced.intersection(block.split()))):
                raise BadInput(
                    f"layer {layer}: {printable(ends[0])} is stored quantised, where transformers' kernels put a module"
                    " of their own in its place, without what stands beside it; operate on the full-precision model"
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
    """Raise BadInput where something beside the native layers would go with them."""
    carrying = [layer for layer in layers if draft.layers[layer].grafts]
    if carrying or draft.bank is not None:
        what = layers_have(carrying) if carrying else "the model's layers have"
        raise BadInput(f"{what} grafts, which cannot go with a layer: take layers out before grafting, or revert first")
