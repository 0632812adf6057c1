"""`add_experts`: a mixture gets more experts, copies of its own or silent new ones.

`how: duplicate` is expert upcycling (Dwivedi et al., 2026): E experts become mE, each copy with its expert's row of the
router. With `top_k: grown` a token takes all m copies of each expert that it took before, each with 1/m of the weight:
the sum equals the base's, up to rounding. With `top_k: fixed`, as in the paper, copies displace other experts. `how:
zero`: the new experts' down projections are zero, and their router biases are such that no token takes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from surgeon.anatomy.family import Part
from surgeon.blueprint.blueprint import Claim, OperationRecord
from surgeon.blueprint.draft import Draft, LayerDraft
from surgeon.blueprint.recipes import Below, Constant, Copy, Recipe, rows, side_by_side, sliced_along
from surgeon.edits.mixtures import (
    ExpertNumber,
    LayerExperts,
    LayerKey,
    Mixtures,
    Place,
    arrange,
    check_layers,
    check_plain,
    chosen_by,
    listed,
    mixtures_of,
    sizes_with,
)
from surgeon.errors import BadInput
from surgeon.operations.operation import Operation, Paper, TrainingDefaults

# The scores of the base's experts stay bit-identical where both numbers of experts divide by this: sigmoids are
# computed in such blocks, products in blocks of 16 (measured on the CPU with float32 and bfloat16, 1 to 300 tokens, 16
# to 512 experts).
_ROUTER_BLOCK = 32
_MOST = 4096


# The lowest finite number of float16, and of other dtypes (that of bfloat16).
_LOWEST = {"F16": -65504.0}
_NEVER = -3.3895313892515355e38


class AddExperts(Operation):
    """Add experts to every layer of a mixture: copies of its own, or silent new ones."""

    papers = (
        Paper(
            "dwivedi2026expert",
            "Dwivedi, Chaitanya and Huang, Binxuan and Gupta, Himanshu and Jayarao, Pratik and Varshney, Neeraj and"
            " Yin, Bing",
            "Expert Upcycling: Shifting the Compute-Efficient Frontier of Mixture-of-Experts",
            2026,
            "2604.19835",
        ),
    )
    training = TrainingDefaults("ours, no paper's: copies learn apart by all weights", lr=5e-5)
    examples = ({"times": 2, "top_k": "grown"}, {"times": 2})

    way_on = (
        "its router does not give copies shares of one weight (scores that are not normalised, or groups that are"
        " chosen first), or its choice or weights depend on experts that no token takes; use `how: duplicate` with"
        " `top_k: fixed`, which promises nothing"
    )

    op: Literal["add_experts"]
    how: Annotated[
        Literal["duplicate", "zero"],
        Field(description="copies with their routers' rows, or experts that add zero and that no token takes at birth"),
    ] = "duplicate"
    times: Annotated[
        int | None, Field(ge=2, le=64, description="how many times as many experts there will be; instead of `count`")
    ] = None
    count: Annotated[int | None, Field(ge=1, le=_MOST, description="how many experts each layer gets")] = None
    experts: Annotated[
        list[ExpertNumber] | dict[LayerKey, list[ExpertNumber]] | None,
        Field(min_length=1, description="the experts that get a copy, in every layer or by layer; instead of `count`"),
    ] = None
    top_k: Annotated[
        Literal["fixed", "grown"],
        Field(description="with `times`: a token takes as many experts as before, or as many times more"),
    ] = "fixed"

    @model_validator(mode="after")
    def _fits(self) -> Self:
        """Check that the fields choose experts in exactly one way and fit each other. Raises ValueError."""
        if sum(each is not None for each in (self.times, self.count, self.experts)) != 1:
            raise ValueError(
                "give one of `times` (as many times), `count` (so many more) and `experts` (copies of these)"
            )
        if self.how == "zero" and self.top_k == "grown":
            raise ValueError("`how: zero` does not change what a token takes; leave `top_k` out")
        if self.top_k == "grown" and self.times is None:
            raise ValueError("`top_k: grown` needs `times`: as many copies of each expert, nothing to choose")
        return self

    def edit(self, draft: Draft, facts: None) -> OperationRecord:
        """Add the new experts and their router rows after the old experts of their layer, or of their group.

        Raises BadInput where the experts to copy do not exist, or are distributed unevenly.
        """
        mixtures = mixtures_of(draft.anatomy)
        added = self._given(mixtures)
        check_plain(draft)
        for home in draft.layers:
            if home.base in mixtures:
                own = mixtures[home.base]
                places = _places(home.base, added[home.base], own)
                _add_to(home, own.parts, places, draft, silent=self.how == "zero")
        before, more = next(iter(mixtures.values())).count, len(next(iter(added.values())))
        chosen = chosen_by(draft)
        draft.widths |= sizes_with(draft, before, before + more)
        if self.top_k == "grown":
            if not chosen:
                raise BadInput("config.json: no field says how many experts a token takes; use `top_k: fixed`")
            draft.widths |= {key: value * (self.times or 1) for key, value in chosen.items()}
        matched = f"{before} experts become {before + more} in each of {len(mixtures)} layers, {self._what}"
        return OperationRecord(
            self.op,
            matched,
            self._claim((before, before + more), max(chosen.values(), default=0), draft, mixtures),
            trains="new" if self.how == "zero" else "all",
        )

    @property
    def _what(self) -> str:
        """Return words for `matched` on what the new experts are."""
        if self.how == "zero":
            return "the new ones with zero down projections, taken by no token"
        copies = "copies of them" if self.experts is None else "copies of those listed"
        return copies + (f"; a token takes {self.times} times as many" if self.top_k == "grown" else "")

    def _given(self, mixtures: Mixtures) -> dict[int, list[int]]:
        """Return the experts that new ones are made of, by layer."""
        if self.experts is not None:
            found = listed(self.experts, mixtures)
            check_layers(found, mixtures)
            sizes = {len(numbers) for numbers in found.values()}
            if len(sizes) > 1:
                raise BadInput(
                    f"layers would get {min(sizes)} to {max(sizes)} experts; the config has one number for all"
                )
            return found
        made: dict[int, list[int]] = {}
        for layer, own in mixtures.items():
            more = self.count or own.count * ((self.times or 1) - 1)
            each = _of_each_group(layer, own, more)
            # In each group every expert once, then each again until there are enough.
            made[layer] = sorted(inside[number % len(inside)] for inside in own.by_group for number in range(each))
        return made

    def _claim(self, counts: tuple[int, int], chosen: int, draft: Draft, mixtures: Mixtures) -> Claim:
        """Return the claim: silent experts and shared weights keep the function where ties are impossible.

        `counts` are the numbers of experts before and after, `chosen` how many a token takes.
        """
        if self.how == "zero":
            same = "no token takes the new experts, whatever it reads: their choice is below every other"
            tied = "a token may take the other of two whose choice is the same number, as happens in bfloat16"
            odd = next((count for count in counts if count % _ROUTER_BLOCK), None)
            if not all(_in_float32(layer, mixtures) for layer in draft.layers if layer.base in mixtures):
                return Claim("none", f"{same}, which a twin shows in float32; {tied}", in_float32=True)
            if odd is not None:
                why = f"; {odd} experts are no multiple of {_ROUTER_BLOCK}, and a processor may round their scores"
                return Claim("rounding", f"{same}{why} otherwise")
            if chosen > 2 and any(_corrections(own.parts) for own in mixtures.values()):
                return Claim("rounding", f"{same}; the {chosen} weights of a token may be summed in another order")
            return Claim("exact", same)
        if self.top_k == "grown":
            same = f"a token takes all {self.times} copies of each expert that it took, whose weights are shares of one"
            if all(_in_float32(layer, mixtures, every=True) for layer in draft.layers if layer.base in mixtures):
                return Claim("rounding", f"{same}; sums are taken in another order")
            tied = "in bfloat16 two experts' scores may be equal, and a token that took one then takes shares of both"
            return Claim("none", f"{same}, which a twin shows in float32; {tied}", in_float32=True)
        return Claim("none", "a token takes as many experts as before, and copies take places of others among these")


def _in_float32(layer: LayerDraft, mixtures: Mixtures, *, every: bool = False) -> bool:
    """Return whether a layer's router has float32 tensors (any, or with `every` all): then scores are rarely equal."""
    assert layer.base is not None
    own = [part.suffix for part in mixtures[layer.base].parts if part.blocks[0][0] == "router"]
    held = [layer.tensors[suffix].dtype == "F32" for suffix in own]
    return all(held) if every else any(held)


def _of_each_group(layer: int, own: LayerExperts, more: int) -> int:
    """Return how many of `more` new experts each group of a layer gets.

    Raises BadInput where they do not divide by the groups.
    """
    if more % own.groups:
        raise _uneven(layer, own)
    return more // own.groups


def _uneven(layer: int, own: LayerExperts) -> BadInput:
    """Return the error for new experts that would make the groups of a layer differ in size."""
    return BadInput(f"layer {layer}: its experts form {own.groups} groups, which must stay equal; add as many to each")


def _places(layer: int, added: Sequence[int], own: LayerExperts) -> list[Place]:
    """Return the experts of an output layer in order. Raises BadInput where groups would differ in size."""
    if odd := [number for number in added if number >= own.count]:
        raise BadInput(f"layer {layer} has experts 0 to {own.count - 1}: there is no expert {odd[0]}")
    if own.count + len(added) > _MOST:
        raise BadInput(f"layer {layer} would have {own.count + len(added)} experts; more than {_MOST} is refused")
    made: list[Place] = []
    each = _of_each_group(layer, own, len(added))
    for inside in own.by_group:
        new = sorted(number for number in added if number in inside)
        if len(new) != each:
            raise _uneven(layer, own)
        made += [Place(number, False) for number in inside] + [Place(number, True) for number in new]
    return made


def _add_to(home: LayerDraft, own: Sequence[Part], places: Sequence[Place], draft: Draft, *, silent: bool) -> None:
    """Add the new experts to one layer, and renumber the experts behind them.

    `own` are the parts of experts and router, `places` the layer's experts in their new order. With `silent`, new down
    projections are zero, and router biases keep tokens away. Raises BadInput where a router has no such bias.
    """
    lowest = _lowest(own) if silent else {}

    def is_null(part: Part) -> bool:
        """Return whether new experts have zeros in this part."""
        return silent and part.blocks[0][0] == "down"

    def stacked(of: Copy, part: Part) -> Recipe:
        """Return a tensor of all experts, or of the router, with the new ones."""
        return _with_more(of, places, "zero" if is_null(part) else lowest.get(part.suffix, ""))

    def born(of: Copy, part: Part) -> Recipe:
        """Return a tensor of a new expert: zeros, or a second copy of the base's, which trains."""
        return (
            Constant(0.0, of.dtype, of.shape) if is_null(part) else rows([(of, 0, of.shape[0])], of.shape, still=False)
        )

    arrange(home, own, places, draft, stacked=stacked, born=born)


def _corrections(own: Sequence[Part]) -> list[str]:
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
    if found := _corrections(own):
        return dict.fromkeys(found, "below")
    biases = [p.suffix for p in own if p.blocks[0][0] == "router" and len(p.shape) == 1 and p.suffix.endswith(".bias")]
    if not biases:
        raise BadInput(
            "`how: zero`: this router has no bias to keep tokens from silent experts, which would lower the others'"
            " weights; use `how: duplicate` with `top_k: grown`, which keeps the base's function to rounding"
        )
    return dict.fromkeys(biases, "lowest")


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
