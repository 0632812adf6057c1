"""The layers that have the block that a graft is to be beside: in hybrids, not all have an FFN or an attention.

Where transformers multiplies quantised numbers as they are stored, it puts modules of its own in the place of the
model's. A graft at such a place would not be there then: it is refused. Routed experts, which begin as copies of an
FFN, can stand in layers whose FFN is one of plain matrices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surgeon.anatomy.family import Part, Role
from surgeon.anatomy.sparse.dense import Mixture, Take
from surgeon.anatomy.sparse.target import Made
from surgeon.blueprint.draft import Draft
from surgeon.common.formatting import layers_have, show
from surgeon.errors import BadInput, printable
from surgeon.grafts.composition import ATTENTION, FFN
from surgeon.operations.selectors import LayerSelector, select_layers
from surgeon.runtime.routed_rules import ROUTED

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


_READING: tuple[Role, ...] = ("gate", "up")


@dataclass(frozen=True)
class PlainFFN:
    """An FFN of plain matrices: of what reads, gate before up, the rows of its weight and (or none) of its bias.

    `down` is the suffix of the matrix that writes, `width` how many neurons there are.
    """

    reading: Mapping[Role, tuple[Take, Take | None]]
    down: str
    width: int

    @property
    def biased(self) -> bool:
        """Whether all that reads has biases."""
        return all(bias is not None for _, bias in self.reading.values())

    def settings(self, activation: str) -> dict[str, Any]:
        """What an entry of `routed_experts` says beyond the usual: no gate, biases, an activation of their own."""
        made: dict[str, Any] = {} if "gate" in self.reading else {"gated": False}
        made |= {"biased": True} if self.biased else {}
        return made | ({"activation": activation} if activation else {})


def dense_sites(draft: Draft, selector: LayerSelector) -> dict[int, PlainFFN]:
    """The layers that the selector matches, each with its FFN; of `all` those that have a plain one.

    Raises BadInput where a layer that is matched otherwise, or every layer, has none.
    """
    sites = select_sites(draft, selector, FFN)
    found = {index: ffn for index in sites if (ffn := _plain_ffn(draft.kind_of(index).parts)) is not None}
    lacking = next((index for index in sites if index not in found), None)
    if lacking is None or (selector == "all" and found):
        return found
    if draft.anatomy.shared and not any(part.blocks for part in draft.kind_of(lacking).parts):
        raise BadInput(
            f"layer {lacking}: {IN_SHARED}, and experts begin as copies of a layer's own; use gated_adapters, or a"
            " dense model whose layers share none"
        )
    mixed = any(part.expert is not None for part in draft.kind_of(lacking).parts)
    why = (
        "is a mixture of experts already; use the dense original"
        if mixed
        else "has no matrices that are known as its up and down projections, of which experts could begin as copies"
    )
    raise BadInput(
        f"the FFN of layer {lacking} of this {printable(draft.anatomy.family.model_type)} {why}"
        + (f"; choose `layers` among {show(sorted(found))}" if found else "")
    )


def _plain_ffn(parts: tuple[Part, ...]) -> PlainFFN | None:
    if any(part.expert is not None for part in parts):
        return None
    takes: dict[tuple[str, Role], Take] = {}
    for part in parts:
        begin = 0
        for role, rows in part.blocks:
            takes[part.kind, role] = Take(part.suffix, begin, begin + rows)
            begin += rows
    reading = {role: (take, takes.get(("bias", role))) for role in _READING if (take := takes.get(("weight", role)))}
    down = next((part for part in parts if part.kind == "weight" and ("down", part.shape[0]) in part.blocks), None)
    if down is None or "up" not in reading or any(t.stop - t.start != down.shape[1] for t, _ in reading.values()):
        return None
    return PlainFFN(reading, down.suffix, down.shape[1])


def routed_tensors(ffn: PlainFFN, mixture: Mixture, hidden: int) -> list[Made]:
    """The tensors of a layer's routed experts, each all experts' in one."""
    size = ffn.width // mixture.segments
    numbers = [expert % mixture.segments for expert in range(mixture.count)]

    def all_of(take: Take) -> tuple[Take, ...]:
        return tuple(take.part(number, mixture.segments) for number in numbers)

    made = [Made(f"{ROUTED}router", (mixture.count, hidden), "router")]
    inner = (mixture.count, size, hidden)
    made += [Made(f"{ROUTED}{role}_proj", inner, "inner", all_of(take)) for role, (take, _) in ffn.reading.items()]
    made += [
        Made(f"{ROUTED}{role}_bias", (mixture.count, size), "copied", all_of(bias))
        for role, (_, bias) in ffn.reading.items()
        if bias is not None and ffn.biased
    ]
    down = Take(ffn.down, 0, hidden)
    return [*made, Made(f"{ROUTED}down_proj", (mixture.count, hidden, size), "down", (down,) * mixture.count)]


def check_grafts(draft: Draft, layers: Sequence[int]) -> None:
    """Raise BadInput where something beside the native layers would go with them."""
    carrying = [layer for layer in layers if draft.layers[layer].grafts]
    if carrying or draft.bank is not None:
        what = layers_have(carrying) if carrying else "the model's layers have"
        raise BadInput(f"{what} grafts, which cannot go with a layer: take layers out before grafting, or revert first")
