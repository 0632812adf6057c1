"""The layers that have the block beside which a graft is to stand: in hybrids, not all have an FFN or an attention."""

from __future__ import annotations

from surgeon.blueprint.draft import Draft
from surgeon.errors import BadInput, printable
from surgeon.operations.selectors import LayerSelector, select_layers, show
from surgeon.runtime.composition import ATTENTION

_WORDS = {ATTENTION: "token mixer (attention or what stands in its place)"}


def select_sites(draft: Draft, selector: LayerSelector, *roles: str) -> list[int]:
    """The layers that the selector matches and that have one of the blocks `roles` (ATTENTION, FFN), ascending.

    `all` means those that have one; a layer that is matched otherwise must have one. Raises BadInput, for a selector
    that fits nothing as `select_layers` does.
    """
    layers = select_layers(selector, len(draft.layers))
    fitting = [layer for layer in layers if set(roles) & draft.blocks(layer).keys()]
    if fitting == layers or (selector == "all" and fitting):
        return fitting
    words = " or ".join(_WORDS.get(role, "FFN") for role in roles)
    every = [layer for layer in range(len(draft.layers)) if set(roles) & draft.blocks(layer).keys()]
    there = f"layers {show(every)} have" if every else "no layer has"
    lacking = next(layer for layer in layers if layer not in fitting)
    raise BadInput(
        f"layer {lacking} of this {printable(draft.anatomy.family.model_type)} has no {words} beside which a graft"
        f" could stand; {there} one: choose `layers` by that"
    )
