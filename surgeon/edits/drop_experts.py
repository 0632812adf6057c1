"""`drop_experts`: remove experts of a mixture, by list or by how little they add on a text.

REAP (Lasby et al., 2025) removes the experts with the least S_j = E [g_j(x) · ‖f_j(x)‖] over the tokens that the router
sends to them, with their rows of the router. The output has the base's own class with fewer experts in each layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from surgeon.anatomy.anatomy import Anatomy
from surgeon.anatomy.family import Part
from surgeon.blueprint.blueprint import Claim, OperationRecord
from surgeon.blueprint.draft import Draft, LayerDraft
from surgeon.blueprint.recipes import Copy, Recipe, rows, side_by_side, whole
from surgeon.edits.losses import TextLoss, said_of
from surgeon.edits.mixtures import (
    EXPERT_NUMBER,
    ExpertNumber,
    LayerKey,
    Mixtures,
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
        if base.number:
            raise BadInput(
                "experts are measured on a text with the base itself: make it the plan's first operation, or apply two"
                " plans"
            )
        # This import loads torch and transformers.
        from surgeon.edits.measuring.expert_choice import Experts

        mixtures, anatomy = mixtures_of(base.anatomy), base.anatomy
        gone = listed(self.experts or {}, mixtures)
        if self.experts is not None:
            self._check(gone, mixtures, anatomy)
        path = base.text(self.text)
        counts = {layer: count for layer, (count, _) in mixtures.items()}
        vocabulary = anatomy.sizes.vocabulary
        measured = Experts(base.folder, counts, path, vocabulary=vocabulary, window=self.window, windows=self.windows)
        if self.count is not None:
            groups = {layer: anatomy.kinds[anatomy.kind_of[layer]].expert_groups for layer in mixtures}
            gone = least(measured.scores(self.by or "reap"), self.count, groups)
            self._check(gone, mixtures, anatomy)
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
        self._check(gone, mixtures, draft.anatomy)
        check_plain(draft)
        for home in draft.layers:
            if home.base in gone:
                _take_out(home, mixtures[home.base], gone[home.base], draft)
        before = next(iter(mixtures.values()))[0]
        count = before - len(next(iter(gone.values())))
        draft.widths |= sizes_with(draft, before, count)
        how = f", {_WORDS[self.by or 'reap']}" if self.experts is None else ""
        found = f"{before - count} of {before} experts in each of {len(gone)} layers{how}"
        return OperationRecord(self.op, found + said_of(facts.cost), _claim(facts.cost), trains="all")

    def _check(self, gone: Mapping[int, Sequence[int]], mixtures: Mixtures, anatomy: Anatomy) -> None:
        """Raise BadInput for experts that do not exist or occur twice, or too many or unevenly many of them."""
        check_layers(gone, mixtures)
        sizes = {len(set(numbers)) for numbers in gone.values()}
        for layer, numbers in gone.items():
            count, _ = mixtures[layer]
            # `odd` is the list of unknown numbers, or True where a number occurs twice.
            if odd := [number for number in numbers if number >= count] or (len(set(numbers)) < len(numbers)):
                what = "one is named twice" if odd is True else f"there is no expert {odd[0]}"
                raise BadInput(f"layer {layer} has experts 0 to {count - 1}: {what}")
            groups = anatomy.kinds[anatomy.kind_of[layer]].expert_groups
            each = {sum(number * groups // count == group for number in numbers) for group in range(groups)}
            if len(each) > 1:
                raise BadInput(f"layer {layer}: its experts form {groups} groups; take as many out of each")
        if len(sizes) > 1:
            raise BadInput(f"layers would lose {min(sizes)} to {max(sizes)} experts; the config has one number for all")


def least(scores: Mapping[int, Sequence[float]], count: int, groups: Mapping[int, int]) -> dict[int, list[int]]:
    """Return the experts of the lowest scores: `count` of each layer, equally many of each group.

    Raises BadInput where `count` does not divide by the groups.
    """
    found: dict[int, list[int]] = {}
    for layer, values in scores.items():
        size = len(values) // groups[layer]
        each, rest = divmod(count, groups[layer])
        if rest:
            raise BadInput(f"`count: {count}`: the experts form {groups[layer]} groups, and as many of each must go")
        inside = [range(begin, begin + size) for begin in range(0, len(values), size)]
        ranked = [sorted(numbers, key=lambda number: (values[number], number)) for numbers in inside]
        found[layer] = sorted(number for order in ranked for number in order[:each])
    return found


def _take_out(home: LayerDraft, mixture: tuple[int, list[Part]], gone: Sequence[int], draft: Draft) -> None:
    """Remove the experts `gone` from one layer, and renumber the other experts.

    Raises BadInput where none would stay.
    """
    count, own = mixture
    kept = [number for number in range(count) if number not in gone]
    if not kept:
        raise BadInput(f"all {count} experts would go; at least one must stay")
    parts, made = {part.suffix: part for part in own}, dict[str, Recipe]()
    for suffix, recipe in home.tensors.items():
        part = parts.get(suffix)
        if part is None:
            made[suffix] = recipe
            continue
        assert isinstance(recipe, Copy), suffix
        number = None if part.expert is None else part.expert.number
        if number is None:
            made[suffix] = _only(recipe, kept)
            home.rewritten[suffix] = draft.number
        elif number in kept:
            place = kept.index(number)
            name = EXPERT_NUMBER.sub(str(place), suffix)
            made[name] = recipe if place == number else whole(recipe)
            if place != number:
                home.rewritten[name] = draft.number
    home.tensors = made


def _only(of: Copy, kept: Sequence[int]) -> Recipe:
    """Return a tensor of all experts with only the rows, slices or numbers of the experts that stay."""
    if of.shape[0] == 1 and len(of.shape) == 2:
        return side_by_side([of.columns(number, number + 1) for number in kept], 1)
    ends = [number for number in kept if number + 1 not in kept]
    begins = [number for number in kept if number - 1 not in kept]
    runs = [(of, begin, end + 1) for begin, end in zip(begins, ends, strict=True)]
    return rows(runs, (len(kept), *of.shape[1:]), still=True)


def _claim(cost: TextLoss | None) -> Claim:
    """Return the claim: none, with the cost where it was measured."""
    what = "tokens go to other experts, and what those that are gone added is gone"
    if cost is None:
        return Claim("none", f"{what}; what that costs was not measured (`text`), and every layer is to be trained on")
    return Claim("none", f"{what}: {cost.a_token}; every layer is to be trained on")
