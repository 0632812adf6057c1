"""`drop_experts`: remove experts of a mixture, by list or by how little they add on a text.

REAP (Lasby et al., 2025) removes the experts with the least S_j = E [g_j(x) · ‖f_j(x)‖] over the tokens that the router
sends to them, with their rows of the router. The output has the base's own class with fewer experts in each layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from surgeon.anatomy.family import Part
from surgeon.blueprint.blueprint import OperationRecord
from surgeon.blueprint.draft import Draft
from surgeon.blueprint.recipes import Copy, Recipe, rows, side_by_side
from surgeon.edits.losses import TextLoss, check_first, claim_of_cost, said_of
from surgeon.edits.mixtures import (
    ExpertNumber,
    LayerKey,
    Mixtures,
    Place,
    arrange,
    check_layers,
    check_plain,
    listed,
    mixtures_of,
    sizes_with,
)
from surgeon.errors import BadInput
from surgeon.operations.operation import Operation, Paper, TrainingDefaults
from surgeon.operations.prepare import Facts, OpenedBase, digest_of_file

_By = Literal["reap", "frequency", "loss"]
_WORDS = {
    "reap": "least router weight times norm of output",
    "frequency": "least often chosen",
    "loss": "least loss alone",
}


class ExpertFacts(Facts):
    """The experts to drop, by layer, where a text chose them; and the cost, where one was measured."""

    gone: dict[LayerKey, list[ExpertNumber]] = {}  # noqa: RUF012  # pydantic copies it
    cost: TextLoss | None = None


class DropExperts(Operation):
    """Remove experts from every layer of a mixture: the ones listed, or the ones that matter least on a text."""

    papers = (
        Paper(
            "lasby2025reap",
            "Lasby, Mike and Lazarevich, Ivan and Sinnadurai, Nish and Lie, Sean and Ioannou, Yani and Thangarasa,"
            " Vithursan",
            "REAP the Experts: Why Pruning Prevails for One-Shot MoE compression",
            2025,
            "2510.13999",
        ),
    )
    training = TrainingDefaults("ours, no paper's: every weight of what is left", lr=5e-5)
    examples = ({"experts": [1]},)
    facts = ExpertFacts

    op: Literal["drop_experts"]
    experts: Annotated[
        list[ExpertNumber] | dict[LayerKey, list[ExpertNumber]] | None,
        Field(
            min_length=1,
            description="the experts that go, of every layer the same, or by layer as many of each; instead of `count`",
        ),
    ] = None
    count: Annotated[
        int | None, Field(ge=1, le=65535, description="how many go of each layer, chosen `by` what `text` shows")
    ] = None
    by: Annotated[
        _By | None,
        Field(
            description="reap (default): of least mean router weight times norm of the expert's output; frequency: to"
            " which the fewest tokens go; loss: without which alone the loss is least"
        ),
    ] = None
    text: Annotated[
        str | None, Field(description="text to judge by, seen from the plan: .jsonl with a text a line, or plain")
    ] = None
    window: Annotated[int, Field(ge=2, le=2**20, description="tokens that are read at once")] = 128
    windows: Annotated[
        int, Field(ge=1, le=2**20, description="how many windows are judged by; the loss is measured on as many behind")
    ] = 16

    @model_validator(mode="after")
    def _fits(self) -> Self:
        """Check that experts are chosen in exactly one way, with a text where one is needed. Raises ValueError."""
        if (self.experts is None) == (self.count is None):
            raise ValueError("give either `experts` (which go) or `count` (how many, chosen on `text`)")
        if self.count is not None and self.text is None:
            raise ValueError("`count` needs `text`: which experts matter least is measured on it")
        if self.experts is not None and self.by is not None:
            raise ValueError("`by` chooses experts; with `experts` it has no meaning")
        return self

    def prepare(self, base: OpenedBase) -> ExpertFacts:
        """Choose the experts to drop on a text, and measure what it costs to lose them; without a text, do nothing.

        Raises BadInput where the weights are not at hand, or another operation comes first.
        """
        if self.text is None:
            return ExpertFacts()
        base.need_weights("which experts matter on a text")
        check_first(base, "experts")
        # This import loads torch and transformers.
        from surgeon.edits.measuring.expert_choice import Experts

        mixtures = mixtures_of(base.anatomy)
        gone = listed(self.experts or {}, mixtures)
        if self.experts is not None:
            self._check(gone, mixtures)
        path = base.text(self.text)
        counts = {layer: own.count for layer, own in mixtures.items()}
        vocabulary = base.anatomy.sizes.vocabulary
        measured = Experts(base.folder, counts, path, vocabulary=vocabulary, window=self.window, windows=self.windows)
        if self.count is not None:
            gone = _least(measured.scores(self.by or "reap"), self.count, mixtures)
            self._check(gone, mixtures)
        kept = {layer: [n for n in range(counts[layer]) if n not in numbers] for layer, numbers in gone.items()}
        cost = TextLoss(
            text=self.text,
            sha256=digest_of_file(path),
            tokens=measured.predictions,
            before=measured.loss({}),
            after=measured.loss(kept),
        )
        chosen = {str(layer): numbers for layer, numbers in gone.items()} if self.experts is None else {}
        return ExpertFacts(gone=chosen, cost=cost)

    def edit(self, draft: Draft, facts: ExpertFacts | None) -> OperationRecord:
        """Remove the experts and their router rows, and renumber the other experts."""
        facts = facts or ExpertFacts()
        mixtures = mixtures_of(draft.anatomy)
        if self.experts is not None:
            gone = listed(self.experts, mixtures)
        elif not facts.gone:
            raise BadInput("which experts go is not known: it is measured on the base's own weights")
        else:
            gone = {int(layer): numbers for layer, numbers in facts.gone.items()}
        self._check(gone, mixtures)
        check_plain(draft)
        for home in draft.layers:
            if home.base in gone:
                own = mixtures[home.base]
                kept = [number for number in range(own.count) if number not in gone[home.base]]
                if not kept:
                    raise BadInput(f"all {own.count} experts would go; at least one must stay")
                places = [Place(number, False) for number in kept]
                arrange(home, own.parts, places, draft, stacked=partial(_only, kept))
        before = next(iter(mixtures.values())).count
        count = before - len(next(iter(gone.values())))
        draft.widths |= sizes_with(draft, before, count)
        how = f", {_WORDS[self.by or 'reap']}" if self.experts is None else ""
        found = f"{before - count} of {before} experts in each of {len(gone)} layers{how}"
        claim = claim_of_cost("tokens go to other experts, and what those that are gone added is gone", facts.cost)
        return OperationRecord(self.op, found + said_of(facts.cost), claim, trains="all")

    def _check(self, gone: Mapping[int, Sequence[int]], mixtures: Mixtures) -> None:
        """Raise BadInput for experts that do not exist or occur twice, or too many or unevenly many of them."""
        check_layers(gone, mixtures)
        sizes = {len(set(numbers)) for numbers in gone.values()}
        for layer, numbers in gone.items():
            count, groups = mixtures[layer].count, mixtures[layer].by_group
            # `odd` is the list of unknown numbers, or True where a number occurs twice.
            if odd := [number for number in numbers if number >= count] or (len(set(numbers)) < len(numbers)):
                what = "one is named twice" if odd is True else f"there is no expert {odd[0]}"
                raise BadInput(f"layer {layer} has experts 0 to {count - 1}: {what}")
            if len({sum(number in inside for number in numbers) for inside in groups}) > 1:
                raise BadInput(f"layer {layer}: its experts form {len(groups)} groups; take as many out of each")
        if len(sizes) > 1:
            raise BadInput(f"layers would lose {min(sizes)} to {max(sizes)} experts; the config has one number for all")


def _least(scores: Mapping[int, Sequence[float]], count: int, mixtures: Mixtures) -> dict[int, list[int]]:
    """Return the experts of the lowest scores: `count` of each layer, equally many of each group.

    Raises BadInput where `count` does not divide by the groups.
    """
    found: dict[int, list[int]] = {}
    for layer, values in scores.items():
        own = mixtures[layer]
        each, rest = divmod(count, own.groups)
        if rest:
            raise BadInput(f"`count: {count}`: the experts form {own.groups} groups, and as many of each must go")
        ranked = [sorted(numbers, key=lambda number: (values[number], number)) for numbers in own.by_group]
        found[layer] = sorted(number for order in ranked for number in order[:each])
    return found


def _only(kept: Sequence[int], of: Copy, _part: Part) -> Recipe:
    """Return a tensor of all experts with only the rows, slices or numbers of the experts that stay."""
    if of.shape[0] == 1 and len(of.shape) == 2:
        return side_by_side([of.columns(number, number + 1) for number in kept], 1)
    ends = [number for number in kept if number + 1 not in kept]
    begins = [number for number in kept if number - 1 not in kept]
    runs = [(of, begin, end + 1) for begin, end in zip(begins, ends, strict=True)]
    return rows(runs, (len(kept), *of.shape[1:]), still=True)
