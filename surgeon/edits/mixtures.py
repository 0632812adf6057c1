"""Mixtures of experts, as operations that change their number find them: their tensors, and the config's counts.

Of a layer that has more experts than before: their order, their tensors, their rows of the router.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import Field

from surgeon.anatomy.anatomy import Anatomy
from surgeon.anatomy.family import Part
from surgeon.anatomy.growth import part_of
from surgeon.blueprint.draft import Draft, LayerDraft
from surgeon.blueprint.recipes import Below, Constant, Copy, Recipe, rows, side_by_side, sliced_along, whole
from surgeon.common.schema import Many
from surgeon.errors import BadInput, printable
from surgeon.operations.operation import Spec
from surgeon.operations.prepare import OpenedBase, digest_of_file

if TYPE_CHECKING:
    from surgeon.edits.measuring.expert_choice import Estimate, Experts


# An expert's number in a tensor's suffix.
EXPERT_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
# Of keys of a config that count experts, those that count something else; and those that say how many a token takes.
_OTHERS = ("per_tok", "shared", "top", "active", "selected", "group")
_AT_ONCE = re.compile(r".*experts_per_tok(en)?|.*expert.*top_?k|top_k_experts|moe_.*top_?k|moe_k|num_selected_experts")
ExpertNumber = Annotated[int, Field(ge=0, le=65535)]
LayerKey = Annotated[str, Field(pattern=r"^[0-9]{1,4}$")]
# How operations that measure experts on a text are told of it.
JudgedBy = Annotated[
    str | None, Field(description="text to judge by, seen from the plan: .jsonl with a text a line, or plain")
]
HeldOut = Annotated[str | None, Field(description="text to measure the cost on; default: what follows in `text`")]
Window = Annotated[int, Field(ge=2, le=2**20, description="tokens that are read at once")]
Windows = Annotated[int, Field(ge=2, le=2**20, description="how many windows are judged by, and measured on")]
# By layer how many experts it has, and what belongs to them.
Mixtures = Mapping[int, tuple[int, list[Part]]]


class Loss(Spec):
    """A mean over windows in nats a token, with the ends of its 95 % interval."""

    mean: Annotated[float, Field(allow_inf_nan=False)]
    low: Annotated[float, Field(allow_inf_nan=False)]
    high: Annotated[float, Field(allow_inf_nan=False)]

    @classmethod
    def of(cls, found: Estimate) -> Loss:
        """What was measured."""
        return cls(mean=found.mean, low=found.low, high=found.high)

    @property
    def shown(self) -> str:
        """A difference, in words."""
        return f"{self.mean:+.4f} [{self.low:+.4f}, {self.high:+.4f}]"


class Cost(Spec):
    """The loss of `tokens` predictions of a text, `before` in the base, and by how much it `grows`."""

    text: str
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    tokens: Annotated[Many, Field(ge=1)]
    before: Loss
    grows: Loss

    @property
    def a_token(self) -> str:
        """By how much, in words."""
        return f"{self.grows.shown} nats a token on {printable(self.text)} ({self.tokens:,} tokens)"

    @property
    def said(self) -> str:
        """From what to what, in words."""
        return f"; loss on {printable(self.text)} {self.before.mean:.4f} nats, {self.grows.shown}"


def mixtures_to_measure(base: OpenedBase) -> Mixtures:
    """`mixtures_of` a base on which experts are to be measured.

    Raises BadInput where the weights are not at hand, or another operation comes first.
    """
    base.need_weights("which experts matter on a text")
    if base.number:
        raise BadInput(
            "experts are measured on a text with the base itself: make it the plan's first operation, or apply two"
            " plans"
        )
    return mixtures_of(base.anatomy)


def measured_on(
    base: OpenedBase, mixtures: Mixtures, text: str, held_out: str | None, *, window: int, windows: int
) -> tuple[Experts, dict[str, Any]]:
    """The experts, measured on a text, and what every `Cost` says of what it costs to change them."""
    # Imports torch and transformers.
    from surgeon.edits.measuring.expert_choice import Experts

    path = base.text(text)
    other = None if held_out is None else base.text(held_out)
    measured = Experts.of(
        base.folder,
        {layer: count for layer, (count, _) in mixtures.items()},
        (path, other),
        vocabulary=base.anatomy.sizes.vocabulary,
        window=window,
        windows=windows,
    )
    digest = digest_of_file(other or path)
    before = Loss.of(measured.before)
    return measured, {
        "text": held_out or text,
        "sha256": digest,
        "tokens": measured.predictions,
        "before": before,
    }


def check_layers(named: Mapping[int, Sequence[int]], mixtures: Mixtures) -> None:
    """Raise BadInput where experts of other layers are named than of those that have some."""
    if missing := sorted(mixtures.keys() ^ named.keys()):
        raise BadInput(
            f"layer {missing[0]}: name experts of every layer that has some, and of no other: the config has one"
            f" number of experts for all ({', '.join(map(str, mixtures))})"
        )


def mixtures_of(anatomy: Anatomy) -> dict[int, tuple[int, list[Part]]]:
    """The layers that have experts: how many, and what belongs to them. Raises BadInput where there are none."""
    found: dict[int, tuple[int, list[Part]]] = {}
    for layer, number in enumerate(anatomy.kind_of):
        kind = anatomy.kinds[number]
        own = [
            part for part in kind.parts if part.expert is not None or (part.blocks and part.blocks[0][0] == "router")
        ]
        if not own:
            continue
        if kind.packed:
            raise BadInput(
                f"layer {layer}: its experts are quantised, so their number cannot change; use the full-precision"
                " model, or `dequantise` it first"
            )
        found[layer] = next(part.blocks[0][1] for part in own if part.expert is None), own
    if not found:
        raise BadInput("no layer of this model has experts that surgeon understands; is it a mixture of experts?")
    if (further := next((name for name in anatomy.further if ".experts." in name), None)) is not None:
        raise BadInput(
            f"{printable(further)}: layers that predict further tokens have experts of their own, which the config"
            " counts with these; take these layers out first"
        )
    return found


def listed(
    experts: Sequence[int] | Mapping[str, Sequence[int]], mixtures: Mapping[int, object]
) -> dict[int, list[int]]:
    """Experts of every layer of a mixture, as a plan lists them: for all layers the same, or by layer."""
    if isinstance(experts, Mapping):
        return {int(layer): [*numbers] for layer, numbers in experts.items()}
    return {layer: [*experts] for layer in mixtures}


def counted(draft: Draft) -> dict[str, int]:
    """The whole numbers of the text's part of the config, by key."""
    part = part_of(draft.config, draft.anatomy.derivation.path)
    return {key: value for key, value in part.items() if type(value) is int}


def chosen_by(draft: Draft) -> dict[str, int]:
    """What the config calls the number of experts that a token takes, with that number."""
    return {key: value for key, value in counted(draft).items() if _AT_ONCE.fullmatch(key)}


def sizes_with(draft: Draft, before: int, after: int) -> dict[str, int]:
    """What the config calls the number of experts, with the new one. Raises BadInput where that cannot be."""
    found = [key for key, value in counted(draft).items() if "expert" in key and value == before]
    found = [key for key in found if not any(word in key for word in _OTHERS)]
    if not found:
        raise BadInput("config.json: no field says how many experts there are, so their number cannot change")
    for key, value in chosen_by(draft).items():
        if value > after:
            raise BadInput(f"{after} experts would be left of {before}, and each token takes {value} (`{key}`)")
    return dict.fromkeys(found, after)


def check_plain(draft: Draft) -> None:
    """Raise BadInput where an earlier operation made layers, or others than the base's."""
    if draft.bank is not None or any(layer.grafts for layer in draft.layers):
        raise BadInput("the model carries grafts beside its layers; change experts before grafting, or revert first")
    if draft.records and (draft.dropped or any(home.base is None or home.rewritten for home in draft.layers)):
        raise BadInput("an earlier operation of this plan changed layers; change experts first, or apply two plans")


# The lowest number of bfloat16, and of float16.
_LOWEST = {"F16": -65504.0}
_NEVER = -3.3895313892515355e38


class Place(NamedTuple):
    """One expert of the output: the base's expert that it is, or (`new`) that it is made of."""

    source: int
    new: bool


def groups_in(layer: int, count: int, anatomy: Anatomy, more: int) -> list[tuple[range, int]]:
    """The experts of each group of a layer, and how many of `more` it gets. Raises BadInput where that is uneven."""
    groups = anatomy.kinds[anatomy.kind_of[layer]].expert_groups
    if more % groups:
        raise BadInput(f"layer {layer}: its experts form {groups} groups, which must stay equal; add as many to each")
    size = count // groups
    return [(range(begin, begin + size), more // groups) for begin in range(0, count, size)]


def in_turn(inside: range, more: int) -> list[int]:
    """Each expert once, and again until there are enough; in their order."""
    return sorted(inside[number % len(inside)] for number in range(more))


def shared_out(inside: range, more: int, scores: Sequence[float]) -> Iterator[int]:
    """Copies in the order in which an expert's score, shared by its copies, is the largest (D'Hondt's rule)."""
    heap = [(-scores[number], number, 1) for number in inside]
    heapq.heapify(heap)
    for _ in range(more):
        _, number, held = heap[0]
        yield number
        heapq.heapreplace(heap, (-scores[number] / (held + 1), number, held + 1))


def add_to(home: LayerDraft, own: Sequence[Part], places: Sequence[Place], draft: Draft, *, silent: bool) -> None:
    """Give one layer its new experts, and number those behind them anew."""
    parts, made = {part.suffix: part for part in own}, dict[str, Recipe]()
    lowest = _lowest(own) if silent else {}
    copies: dict[int, list[int]] = {}
    for place, (source, _) in enumerate(places):
        copies.setdefault(source, []).append(place)
    for suffix, recipe in home.tensors.items():
        part = parts.get(suffix)
        if part is None:
            made[suffix] = recipe
            continue
        assert isinstance(recipe, Copy), suffix
        number = None if part.expert is None else part.expert.number
        null = silent and part.expert is not None and part.blocks[0][0] == "down"
        if number is None:
            made[suffix] = _with_more(recipe, places, "zero" if null else lowest.get(suffix, ""))
            home.rewritten[suffix] = draft.number
            continue
        for place in copies[number]:
            name = EXPERT_NUMBER.sub(str(place), suffix)
            if places[place].new:
                made[name] = Constant(0.0, recipe.dtype, recipe.shape) if null else _again(recipe)
            else:
                made[name] = recipe if place == number else whole(recipe)
            if place != number:
                home.rewritten[name] = draft.number
    home.tensors = made


def corrections(own: Sequence[Part]) -> list[str]:
    """What is added to each expert's score where tokens choose, and not to its weight."""
    routers = [part for part in own if part.blocks[0][0] == "router" and not part.suffix.endswith(".bias")]
    # Those with a number for each expert.
    return [part.suffix for part in routers if part.shape in ((part.shape[-1],), (1, part.shape[-1]))]


def _lowest(own: Sequence[Part]) -> dict[str, str]:
    """Of a layer's router the tensors whose numbers keep tokens from an expert: how, by suffix.

    A correction is added to scores between 0 and 1, so one of 2 less than the least keeps them away, and balancing
    without a loss may raise it. The bias of a router's product has no such bound: the lowest number keeps them away.
    """
    if found := corrections(own):
        return dict.fromkeys(found, "below")
    biases = [p.suffix for p in own if p.blocks[0][0] == "router" and len(p.shape) == 1 and p.suffix.endswith(".bias")]
    if not biases:
        raise BadInput(
            "`how: zero`: this router has no bias, so for some text its product with any new row is the largest, and a"
            " silent expert that is taken lessens the others' weights; use `how: duplicate` with `top_k: grown`, which"
            " is the base by rounding"
        )
    return dict.fromkeys(biases, "lowest")


def _again(of: Copy) -> Recipe:
    """A tensor of the base once more, to train."""
    return rows([(of, 0, of.shape[0])], of.shape, still=False)


def _with_more(of: Copy, places: Sequence[Place], fill: str) -> Recipe:
    """What all experts share a tensor in, with the new ones' rows, slices or numbers: copies, or as `fill` says."""
    axis = int(of.shape[0] == 1 and len(of.shape) == 2)

    def part(start: int, stop: int, *, again: bool) -> Recipe:
        if not again and (start, stop) == (0, of.shape[axis]):
            # A whole tensor is read a few rows at a time.
            return of
        return sliced_along(of, axis, start, stop, again=again)

    def new(sources: list[int]) -> Iterator[Recipe]:
        shape = (1, len(sources)) if axis else (len(sources), *of.shape[1:])
        if fill == "below":
            yield Below(of, shape)
        elif fill:
            yield Constant(0.0 if fill == "zero" else _LOWEST.get(of.dtype, _NEVER), of.dtype, shape)
        else:
            yield from (part(source, source + 1, again=True) for source in sources)

    pieces: list[Recipe] = []
    at = 0
    while at < len(places):
        end = next((n for n in range(at, len(places)) if places[n].new != places[at].new), len(places))
        sources = [place.source for place in places[at:end]]
        pieces += new(sources) if places[at].new else [part(sources[0], sources[-1] + 1, again=False)]
        at = end
    return side_by_side(pieces, axis)
