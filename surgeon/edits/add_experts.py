"""`add_experts`: a mixture gets more experts, copies of its own or silent new ones.

`how: duplicate` is expert upcycling (Dwivedi et al., 2026): E experts become mE, each copy with its expert's row of the
router. With `top_k: grown` a token takes all m copies of each expert that it took before, each with 1/m of the weight:
the sum equals the base's, up to rounding. With `top_k: fixed`, as in the paper, copies displace other experts. `how:
zero`: the new experts' down projections are zero, and their router biases are such that no token takes them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from surgeon.anatomy.anatomy import Anatomy
from surgeon.blueprint.blueprint import Claim, OperationRecord
from surgeon.blueprint.draft import Draft, LayerDraft
from surgeon.edits.mixtures import (
    Cost,
    ExpertNumber,
    HeldOut,
    JudgedBy,
    LayerKey,
    Loss,
    Mixtures,
    Place,
    Window,
    Windows,
    add_to,
    check_layers,
    check_plain,
    chosen_by,
    corrections,
    groups_in,
    in_turn,
    listed,
    measured_on,
    mixtures_of,
    mixtures_to_measure,
    shared_out,
    sizes_with,
)
from surgeon.errors import BadInput
from surgeon.operations.operation import Operation, Paper, TrainingDefaults
from surgeon.operations.prepare import Facts, OpenedBase

if TYPE_CHECKING:
    from surgeon.edits.measuring.expert_choice import Experts

# The scores of the base's experts stay bit-identical where both numbers of experts divide by this: sigmoids are
# computed in such blocks, products in blocks of 16 (measured on the CPU with float32 and bfloat16, 1 to 300 tokens, 16
# to 512 experts).
_ROUTER_BLOCK = 32
_MOST = 4096


class GrowthCost(Cost):
    """How much the loss of `tokens` predictions, `before` in the base, grows with the copies.

    `random` is the growth with as many copies of experts drawn at random.
    """

    random: Loss


class AddedFacts(Facts):
    """The experts that are copied, by layer, where a text chose them; and the cost, where one was measured."""

    copied: dict[LayerKey, list[ExpertNumber]] = {}  # noqa: RUF012  # pydantic copies it
    cost: GrowthCost | None = None


class AddExperts(Operation):
    """Add experts to every layer of a mixture: copies of its own, or silent new ones."""

    papers: ClassVar[tuple[Paper, ...]] = (
        Paper(
            "dwivedi2026expert",
            "Dwivedi, Chaitanya and Huang, Binxuan and Gupta, Himanshu and Jayarao, Pratik and Varshney, Neeraj and"
            " Yin, Bing",
            "Expert Upcycling: Shifting the Compute-Efficient Frontier of Mixture-of-Experts",
            2026,
            "2604.19835",
        ),
    )
    training: ClassVar[TrainingDefaults] = TrainingDefaults(
        "ours, no paper's: copies learn apart by all weights", lr=5e-5
    )
    examples: ClassVar[tuple[Mapping[str, object], ...]] = ({"times": 2, "top_k": "grown"}, {"times": 2})
    facts: ClassVar[type[Facts] | None] = AddedFacts

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
    by: Annotated[
        Literal["uniform", "reap", "frequency"] | None,
        Field(
            description="with `count`, which experts get copies: uniform (default), each in turn; reap, by mean router"
            " weight times norm of the output; frequency, by how many tokens go to them"
        ),
    ] = None
    text: JudgedBy = None
    held_out: HeldOut = None
    window: Window = 128
    windows: Windows = 16

    @model_validator(mode="after")
    def _fits(self) -> Self:
        """Check that the fields choose experts in exactly one way and fit each other. Raises ValueError."""
        if sum(each is not None for each in (self.times, self.count, self.experts)) != 1:
            raise ValueError(
                "give one of `times` (as many times), `count` (so many more) and `experts` (copies of these)"
            )
        if self.by is not None and self.count is None:
            raise ValueError("`by` chooses which experts get copies; it needs `count`")
        if self.by in ("reap", "frequency") and self.text is None:
            raise ValueError(f"`by: {self.by}` needs `text`: which experts matter is measured on it")
        if self.held_out is not None and self.text is None:
            raise ValueError("`held_out` needs `text`, which experts are judged by")
        if self.how == "zero" and (self.text is not None or self.top_k == "grown"):
            raise ValueError(
                "`how: zero` changes neither what a token takes nor the loss; leave `text` and `top_k` out"
            )
        if self.top_k == "grown" and (self.times is None or self.text is not None):
            raise ValueError(
                "`top_k: grown` needs `times`, and no `text`: as many copies of each expert, nothing to choose"
            )
        return self

    @property
    def way_on(self) -> str:
        """Return why a twin of the output may break the promise, and what to do then."""
        if self.how == "zero":
            return "its router's choice or weights depend on experts that no token takes; use `how: duplicate`"
        return (
            "its router does not give copies shares of one weight (scores that are not normalised, or groups that are"
            " chosen first); use `top_k: fixed`, which promises nothing and measures the loss"
        )

    def prepare(self, base: OpenedBase) -> AddedFacts:
        """Choose the experts to copy on a text, and measure what the copies cost; without a text, do nothing.

        Raises BadInput where the weights are not at hand, or another operation comes first.
        """
        if self.text is None:
            return AddedFacts()
        mixtures, anatomy = mixtures_to_measure(base), base.anatomy
        measured, said = measured_on(base, mixtures, self.text, self.held_out, window=self.window, windows=self.windows)
        chosen = self.by in ("reap", "frequency")
        scores = measured.scores("frequency" if self.by == "frequency" else "reap")
        added = self._most(scores, mixtures, anatomy) if chosen else self._given(mixtures, anatomy)
        places = {layer: self._places(layer, added[layer], mixtures, anatomy) for layer in mixtures}
        count = len(next(iter(added.values())))
        by_chance = self._by_chance(mixtures, anatomy, count)
        return AddedFacts(
            copied={str(layer): numbers for layer, numbers in added.items()} if chosen else {},
            cost=_cost(measured, (places, by_chance), said),
        )

    def edit(self, draft: Draft, facts: AddedFacts | None) -> OperationRecord:
        """Add the new experts and their router rows after the old experts of their layer, or of their group.

        Raises BadInput where the experts to copy are not known, do not exist, or are distributed unevenly.
        """
        facts = facts or AddedFacts()
        mixtures = mixtures_of(draft.anatomy)
        if self.by in ("reap", "frequency"):
            if not facts.copied:
                raise BadInput("which experts get copies is not known: it is measured on the base's own weights")
            added = {int(layer): numbers for layer, numbers in facts.copied.items()}
            _check_layers(added, mixtures)
        else:
            added = self._given(mixtures, draft.anatomy)
        check_plain(draft)
        for home in draft.layers:
            if home.base in mixtures:
                places = self._places(home.base, added[home.base], mixtures, draft.anatomy)
                add_to(home, mixtures[home.base][1], places, draft, silent=self.how == "zero")
        before, more = next(iter(mixtures.values()))[0], len(next(iter(added.values())))
        chosen = chosen_by(draft)
        draft.widths |= sizes_with(draft, before, before + more)
        if self.top_k == "grown":
            if not chosen:
                raise BadInput("config.json: no field says how many experts a token takes; use `top_k: fixed`")
            draft.widths |= {key: value * (self.times or 1) for key, value in chosen.items()}
        matched = f"{before} experts become {before + more} in each of {len(mixtures)} layers, {self._what}"
        return OperationRecord(
            self.op,
            matched + _said(facts.cost),
            self._claim(facts.cost, (before, before + more), max(chosen.values(), default=0), draft),
            trains="new" if self.how == "zero" else "all",
        )

    @property
    def _what(self) -> str:
        """Return words for `matched` on what the new experts are."""
        if self.how == "zero":
            return "the new ones with zero down projections, taken by no token"
        which = {"reap": "those of most router weight times norm of output", "frequency": "those most often chosen"}
        copies = f"copies of {which.get(self.by or '', 'them' if self.experts is None else 'those listed')}"
        return copies + (f"; a token takes {self.times} times as many" if self.top_k == "grown" else "")

    def _given(self, mixtures: Mixtures, anatomy: Anatomy) -> dict[int, list[int]]:
        """Return the experts that new ones are made of, by layer, where no text chooses them."""
        if self.experts is not None:
            found = listed(self.experts, mixtures)
            _check_layers(found, mixtures)
            return found
        made: dict[int, list[int]] = {}
        for layer, (count, _) in mixtures.items():
            more = self.count or count * ((self.times or 1) - 1)
            made[layer] = [n for group in groups_in(layer, count, anatomy, more) for n in in_turn(*group)]
        return made

    def _most(
        self, scores: Mapping[int, Sequence[float]], mixtures: Mixtures, anatomy: Anatomy
    ) -> dict[int, list[int]]:
        """Return the experts that matter most, by layer; one that matters twice as much gets a second copy earlier."""
        assert self.count is not None
        return {
            layer: sorted(
                n for group in groups_in(layer, c, anatomy, self.count) for n in shared_out(*group, scores[layer])
            )
            for layer, (c, _) in mixtures.items()
        }

    def _by_chance(self, mixtures: Mixtures, anatomy: Anatomy, more: int) -> dict[int, list[Place]]:
        """Return the experts of each layer with as many copies of random experts, for comparison."""
        drawn = random.Random(0)
        return {
            layer: self._places(
                layer,
                sorted(drawn.choice(inside) for inside, n in groups_in(layer, c, anatomy, more) for _ in range(n)),
                mixtures,
                anatomy,
            )
            for layer, (c, _) in mixtures.items()
        }

    def _places(self, layer: int, added: Sequence[int], mixtures: Mixtures, anatomy: Anatomy) -> list[Place]:
        """Return the experts of an output layer in order. Raises BadInput where groups would differ in size."""
        count, _ = mixtures[layer]
        if odd := [number for number in added if number >= count]:
            raise BadInput(f"layer {layer} has experts 0 to {count - 1}: there is no expert {odd[0]}")
        if count + len(added) > _MOST:
            raise BadInput(f"layer {layer} would have {count + len(added)} experts; more than {_MOST} is refused")
        made: list[Place] = []
        groups = groups_in(layer, count, anatomy, len(added))
        for inside, each in groups:
            own = sorted(number for number in added if number in inside)
            if len(own) != each:
                raise BadInput(
                    f"layer {layer}: its experts form {len(groups)} groups, which must stay equal; add as many to each"
                )
            made += [Place(number, False) for number in inside] + [Place(number, True) for number in own]
        return made

    def _claim(self, cost: GrowthCost | None, counts: tuple[int, int], chosen: int, draft: Draft) -> Claim:
        """Return the claim: silent experts and shared weights keep the function where ties are impossible.

        `counts` are the numbers of experts before and after, `chosen` how many a token takes.
        """
        mixtures = mixtures_of(draft.anatomy)
        if self.how == "zero":
            same = "no token takes the new experts, whatever it reads: their choice is below every other"
            tied = "a token may take the other of two whose choice is the same number, as happens in bfloat16"
            odd = next((count for count in counts if count % _ROUTER_BLOCK), None)
            if not all(_in_float32(layer, mixtures) for layer in draft.layers if layer.base in mixtures):
                return Claim("none", f"{same}, which a twin shows in float32; {tied}", in_float32=True)
            if odd is not None:
                why = f"; {odd} experts are no multiple of {_ROUTER_BLOCK}, and a processor may round their scores"
                return Claim("rounding", f"{same}{why} otherwise")
            if chosen > 2 and any(corrections(own) for _, own in mixtures.values()):
                return Claim("rounding", f"{same}; the {chosen} weights of a token may be summed in another order")
            return Claim("exact", same)
        if self.top_k == "grown":
            same = f"a token takes all {self.times} copies of each expert that it took, whose weights are shares of one"
            if all(_in_float32(layer, mixtures, every=True) for layer in draft.layers if layer.base in mixtures):
                return Claim("rounding", f"{same}; sums are taken in another order")
            tied = "in bfloat16 two experts' scores may be equal, and a token that took one then takes shares of both"
            return Claim("none", f"{same}, which a twin shows in float32; {tied}", in_float32=True)
        what = "a token takes as many experts as before, and copies take places of others among these"
        if cost is None:
            return Claim("none", f"{what}; what that costs was not measured (`text`)")
        return Claim("none", f"{what}: {cost.a_token}")


def _check_layers(added: Mapping[int, Sequence[int]], mixtures: Mixtures) -> None:
    """Raise BadInput unless exactly the mixture's layers get experts, and all get as many."""
    check_layers(added, mixtures)
    sizes = {len(numbers) for numbers in added.values()}
    if len(sizes) > 1:
        raise BadInput(f"layers would get {min(sizes)} to {max(sizes)} experts; the config has one number for all")


def _in_float32(layer: LayerDraft, mixtures: Mixtures, *, every: bool = False) -> bool:
    """Return whether a layer's router has float32 tensors (any, or with `every` all): then scores are rarely equal."""
    assert layer.base is not None
    own = [part.suffix for part in mixtures[layer.base][1] if part.blocks[0][0] == "router"]
    held = [layer.tensors[suffix].dtype == "F32" for suffix in own]
    return all(held) if every else any(held)


def _cost(
    measured: Experts,
    grown: tuple[Mapping[int, Sequence[Place]], Mapping[int, Sequence[Place]]],
    said: Mapping[str, Any],
) -> GrowthCost:
    """Return how the loss grows with the copies and with random ones.

    `grown` are the experts by layer with the copies, and with random ones; `said` are the fields about the text.
    """
    grows, by_chance = (
        Loss.of(measured.cost({layer: [place.source for place in places] for layer, places in each.items()}))
        for each in grown
    )
    return GrowthCost(**said, grows=grows, random=by_chance)


def _said(cost: GrowthCost | None) -> str:
    """Return words for `matched` on the measured cost; empty where none was measured."""
    if cost is None:
        return ""
    return f"{cost.said} with them (with as many copies at random {cost.random.shown})"
