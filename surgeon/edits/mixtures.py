"""Mixtures of experts, for operations that change the number of experts: their tensors, and the config's counts.

For a layer that gets more experts: their order, their tensors, and their rows of the router.
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
# Parts of config keys with "expert" that count something else; and the keys for how many experts a token takes.
_OTHERS = ("per_tok", "shared", "top", "active", "selected", "group")
_AT_ONCE = re.compile(r".*experts_per_tok(en)?|.*expert.*top_?k|top_k_experts|moe_.*top_?k|moe_k|num_selected_experts")
ExpertNumber = Annotated[int, Field(ge=0, le=65535)]
LayerKey = Annotated[str, Field(pattern=r"^[0-9]{1,4}$")]
# Fields of operations that measure experts on a text.
JudgedBy = Annotated[
    str | None, Field(description="text to judge by, seen from the plan: .jsonl with a text a line, or plain")
]
HeldOut = Annotated[str | None, Field(description="text to measure the cost on; default: what follows in `text`")]
Window = Annotated[int, Field(ge=2, le=2**20, description="tokens that are read at once")]
Windows = Annotated[int, Field(ge=2, le=2**20, description="how many windows are judged by, and measured on")]
# By layer: its number of experts, and the parts that belong to them.
Mixtures = Mapping[int, tuple[int, list[Part]]]


class Loss(Spec):
    """A mean over windows in nats per token, with the ends of its 95 % interval."""

    mean: Annotated[float, Field(allow_inf_nan=False)]
    low: Annotated[float, Field(allow_inf_nan=False)]
    high: Annotated[float, Field(allow_inf_nan=False)]

    @classmethod
    def of(cls, found: Estimate) -> Loss:
        """Return a measured estimate in the form that facts keep."""
        return cls(mean=found.mean, low=found.low, high=found.high)

    @property
    def shown(self) -> str:
        """Return the difference and its interval in words."""
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
        """Describe the growth in words."""
        return f"{self.grows.shown} nats a token on {printable(self.text)} ({self.tokens:,} tokens)"

    @property
    def said(self) -> str:
        """Describe the base's loss and the growth in words."""
        return f"; loss on {printable(self.text)} {self.before.mean:.4f} nats, {self.grows.shown}"


def mixtures_to_measure(base: OpenedBase) -> Mixtures:
    """Return `mixtures_of` a base on which experts are to be measured.

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
    """Return (experts, fields): the experts, measured on a text, and the fields that every `Cost` shares."""
    # This import loads torch and transformers.
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
    """Raise BadInput unless the layers in `named` are exactly the layers with experts."""
    if missing := sorted(mixtures.keys() ^ named.keys()):
        raise BadInput(
            f"layer {missing[0]}: name experts of every layer that has some, and of no other: the config has one"
            f" number of experts for all ({', '.join(map(str, mixtures))})"
        )


def mixtures_of(anatomy: Anatomy) -> dict[int, tuple[int, list[Part]]]:
    """Return (number of experts, their parts) for each layer with experts.

    Raises BadInput where there are none, they are quantised, or layers that predict further tokens have experts too.
    """
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
    """Return experts by layer, from a plan's list: the same for all layers of a mixture, or by layer."""
    if isinstance(experts, Mapping):
        return {int(layer): [*numbers] for layer, numbers in experts.items()}
    return {layer: [*experts] for layer in mixtures}


def counted(draft: Draft) -> dict[str, int]:
    """Return the integers of the config's text part, by key."""
    part = part_of(draft.config, draft.anatomy.derivation.path)
    return {key: value for key, value in part.items() if type(value) is int}


def chosen_by(draft: Draft) -> dict[str, int]:
    """Return the config's entries, by key, for how many experts a token goes to."""
    return {key: value for key, value in counted(draft).items() if _AT_ONCE.fullmatch(key)}


def sizes_with(draft: Draft, before: int, after: int) -> dict[str, int]:
    """Return the config's entries for the number of experts, set to `after`; `before` is the present number.

    Raises BadInput where no entry has it, or a token takes more than `after` experts.
    """
    found = [key for key, value in counted(draft).items() if "expert" in key and value == before]
    found = [key for key in found if not any(word in key for word in _OTHERS)]
    if not found:
        raise BadInput("config.json: no field says how many experts there are, so their number cannot change")
    for key, value in chosen_by(draft).items():
        if value > after:
            raise BadInput(f"{after} experts would be left of {before}, and each token takes {value} (`{key}`)")
    return dict.fromkeys(found, after)


def check_plain(draft: Draft) -> None:
    """Raise BadInput where an earlier operation added layers or changed the base's."""
    if draft.bank is not None or any(layer.grafts for layer in draft.layers):
        raise BadInput("the model carries grafts beside its layers; change experts before grafting, or revert first")
    if draft.records and (draft.dropped or any(home.base is None or home.rewritten for home in draft.layers)):
        raise BadInput("an earlier operation of this plan changed layers; change experts first, or apply two plans")


# The lowest finite number of float16, and of other dtypes (that of bfloat16).
_LOWEST = {"F16": -65504.0}
_NEVER = -3.3895313892515355e38


class Place(NamedTuple):
    """One expert of the output: the base's expert `source`, or, if `new`, an expert made from it."""

    source: int
    new: bool


def groups_in(layer: int, count: int, anatomy: Anatomy, more: int) -> list[tuple[range, int]]:
    """Return (experts, more) for each group of a layer: its experts, and how many of the `more` new ones it gets.

    Raises BadInput where the new experts do not divide by the groups.
    """
    groups = anatomy.kinds[anatomy.kind_of[layer]].expert_groups
    if more % groups:
        raise BadInput(f"layer {layer}: its experts form {groups} groups, which must stay equal; add as many to each")
    size = count // groups
    return [(range(begin, begin + size), more // groups) for begin in range(0, count, size)]


def in_turn(inside: range, more: int) -> list[int]:
    """Return `more` experts of a group, ascending: each once, then each again until there are enough."""
    return sorted(inside[number % len(inside)] for number in range(more))


def shared_out(inside: range, more: int, scores: Sequence[float]) -> Iterator[int]:
    """Yield experts to copy: always the one with the largest score per copy so far (D'Hondt's rule)."""
    heap = [(-scores[number], number, 1) for number in inside]
    heapq.heapify(heap)
    for _ in range(more):
        _, number, held = heap[0]
        yield number
        heapq.heapreplace(heap, (-scores[number] / (held + 1), number, held + 1))


def add_to(home: LayerDraft, own: Sequence[Part], places: Sequence[Place], draft: Draft, *, silent: bool) -> None:
    """Add the new experts to one layer, and renumber the experts behind them.

    `own` are the parts of experts and router, `places` the layer's experts in their new order. With `silent`, new down
    projections are zero, and router biases keep tokens away. Raises BadInput where a router has no such bias.
    """
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
    """Return the suffixes of corrections: numbers added to experts' scores for the choice, but not for the weight."""
    routers = [part for part in own if part.blocks[0][0] == "router" and not part.suffix.endswith(".bias")]
    # Router tensors with one number for each expert.
    return [part.suffix for part in routers if part.shape in ((part.shape[-1],), (1, part.shape[-1]))]


def _lowest(own: Sequence[Part]) -> dict[str, str]:
    """Return the router tensors whose numbers can keep tokens from an expert; by suffix, how.

    A correction is added to scores between 0 and 1, so one that is 2 below the minimum keeps tokens away, and balancing
    without a loss may raise it later. The bias of a router's product has no such bound: the lowest number keeps them
    away. Raises BadInput where the router has neither.
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
    """Return a second copy of a base's tensor, which trains."""
    return rows([(of, 0, of.shape[0])], of.shape, still=False)


def _with_more(of: Copy, places: Sequence[Place], fill: str) -> Recipe:
    """Return a tensor of all experts with slices for the new ones.

    `fill` is "" for copies, "zero", "below" (below the minimum) or "lowest" (the lowest number of the dtype).
    """
    axis = int(of.shape[0] == 1 and len(of.shape) == 2)

    def part(start: int, stop: int, *, again: bool) -> Recipe:
        """Return old slices `start:stop`, or the whole tensor."""
        if not again and (start, stop) == (0, of.shape[axis]):
            # A whole tensor can be read a few rows at a time.
            return of
        return sliced_along(of, axis, start, stop, again=again)

    def new(sources: list[int]) -> Iterator[Recipe]:
        """Yield the slices of new experts made from these sources."""
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
