"""`drop_layers`: layers out, by list or by what a text shows that they add.

Block influence BI_l = 1 − E cos(x_l, x_{l+1}) (ShortGPT, Men et al. 2024); the angular distance of a block of n layers,
arccos(cos(x_l, x_{l+n})) / π (Gromov et al. 2024); the loss itself, greedily; or LaCo (Yang et al. 2024), which merges
layers into the one below: θ_l + Σ_k (θ_{l+k} − θ_l). Of one layer that is θ_l + (θ_{l+1} − θ_l) = θ_{l+1}: nothing is
merged, layer l is deleted. Layers that are still silent go without a trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from surgeon.blueprint.draft import Claim, Draft, OperationRecord
from surgeon.blueprint.measured import MeasuredLayers, Stack, TextLoss, collapsed, runs_above
from surgeon.blueprint.recipes import Constant, Recipe, Summed
from surgeon.errors import BadInput, printable
from surgeon.operations.operation import LayersOut, Operation, Paper, TrainingDefaults
from surgeon.operations.selectors import Index, select_layers, show_layers

_WORDS = {
    "block_influence": "least block influence",
    "angular": "least angular distance",
    "loss": "least loss",
}


class DropLayers(Operation):
    """Take layers out of the stack, those listed or those that matter least on a text."""

    papers: ClassVar[tuple[Paper, ...]] = (
        Paper(
            "men2024shortgpt",
            "Men, Xin and others",
            "ShortGPT: Layers in Large Language Models are More Redundant Than You Expect",
            2024,
            "2403.03853",
        ),
        Paper(
            "gromov2024unreasonable",
            "Gromov, Andrey and Tirumala, Kushal and Shapourian, Hassan and Glorioso, Paolo and Roberts, Daniel A.",
            "The Unreasonable Ineffectiveness of the Deeper Layers",
            2024,
            "2403.17887",
        ),
        Paper(
            "yang2024laco",
            "Yang, Yifei and Cao, Zouying and Zhao, Hai",
            "LaCo: Large Language Model Pruning via Layer Collapse",
            2024,
            "2402.11187",
        ),
    )
    training: ClassVar[TrainingDefaults] = TrainingDefaults("ours, no paper's: every weight of what is left", lr=5e-5)
    examples: ClassVar[tuple[Mapping[str, object], ...]] = ({"layers": [1]},)

    op: Literal["drop_layers"]
    layers: Annotated[list[Index] | None, Field(min_length=1, description="the layers that go, instead of `count`")] = (
        None
    )
    count: Annotated[int | None, Field(ge=1, description="how many go, chosen `by` what `text` shows")] = None
    by: Annotated[
        Literal["block_influence", "angular", "loss", "laco"] | None,
        Field(
            description="block_influence (default): the layers that turn the stream least; angular: the block"
            " of `count` layers that turns it least; loss: greedily, the least loss; laco: merged into the layer"
            " below, also with `layers`"
        ),
    ] = None
    text: Annotated[
        str | None,
        Field(description="text to measure on, seen from the plan: .jsonl with a text a line, or plain"),
    ] = None
    window: Annotated[int, Field(ge=2, le=2**20, description="tokens that are read at once")] = 128
    windows: Annotated[int, Field(ge=1, le=2**20, description="how many windows of the text are read")] = 16
    candidates: Annotated[
        int | None, Field(ge=1, description="of `loss`: layers of least influence tried at each step; default 4")
    ] = None
    merge: Annotated[
        int | None,
        Field(ge=1, description="of `laco`: how many layers at most go into the one below; default 2; 1 deletes it"),
    ] = None
    threshold: Annotated[
        float | None,
        Field(
            ge=-1,
            le=1,
            description="of `laco`: cosine of last states with the base's above which a merge is kept; default 0.6",
        ),
    ] = None
    interval: Annotated[
        int | None, Field(ge=1, description="of `laco`: layers from one merge down to the next; default 1")
    ] = None
    range: Annotated[
        list[Index] | None,
        Field(min_length=2, max_length=2, description="of `laco`: the lowest and the highest layer that may take part"),
    ] = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.layers is None) == (self.count is None):
            raise ValueError("give either `layers` (which go) or `count` (how many, chosen on `text`)")
        if self.count is not None and self.text is None:
            raise ValueError("`count` needs `text`: which layers matter least is measured on it")
        if self.layers is not None and self.by not in (None, "laco"):
            raise ValueError(f"`by: {self.by}` chooses layers; with `layers` it has no meaning (`laco` merges them)")
        if self.candidates is not None and self.by != "loss":
            raise ValueError("`candidates` is of `by: loss` only")
        given = (self.merge, self.threshold, self.interval, self.range)
        if given != (None,) * 4 and (self.by, self.layers) != ("laco", None):
            raise ValueError("`merge`, `threshold`, `interval` and `range` are of `by: laco` with `count` only")
        if self.range is not None and self.range[0] >= self.range[1]:
            raise ValueError(f"`range: {self.range}`: give [lowest, highest], two layers at least")
        return self

    @property
    def layers_out(self) -> LayersOut:
        """What is asked."""
        return LayersOut(
            layers=tuple(sorted(set(self.layers or ()))),
            count=self.count or 0,
            by=self.by or "block_influence",
            text=self.text,
            window=self.window,
            windows=self.windows,
            candidates=self.candidates or 4,
            # As the authors' notebook merges Baichuan-13B: three layers become one.
            merge=self.merge or 2,
            threshold=0.6 if self.threshold is None else self.threshold,
            interval=self.interval or 1,
            range=None if self.range is None else (self.range[0], self.range[1]),
        )

    def edit(self, draft: Draft, number: int) -> OperationRecord:
        """Take the layers out, or merge them into those below."""
        facts = draft.measured.get(number, MeasuredLayers())
        total = len(draft.layers)
        gone = self._gone(facts, total)
        merged = self._merged(draft, facts, gone)
        _check_grafts(draft, [*gone, *merged])
        silent = not merged and all(_is_silent(draft, layer, facts.silent) for layer in gone)
        for layer, made_of in _recipes(draft, merged).items():
            home = draft.layers[layer]
            home.tensors, home.init = made_of, "replaced" if layer in _replaced(merged) else "merged"
            home.rewritten |= dict.fromkeys(made_of, number)
        draft.drop(gone, operation=number)
        return OperationRecord(
            op=self.op,
            matched=self._matched(gone, merged, total, facts.text),
            claim=_claim(silent, len(merged) > len(_replaced(merged)), facts.text),
            trains="new" if silent else "all",
        )

    def _gone(self, facts: MeasuredLayers, total: int) -> list[int]:
        if self.layers is None:
            if not facts.layers:
                raise BadInput("which layers go is not known: it is measured on the base's own weights")
            gone = select_layers(list(facts.layers), total)
        else:
            gone = select_layers(self.layers, total)
        if len(gone) >= total:
            raise BadInput(f"all {total} layers would go; at least one must stay")
        return gone

    def _merged(self, draft: Draft, facts: MeasuredLayers, gone: Sequence[int]) -> Mapping[int, Mapping[int, int]]:
        """Of each layer that takes others in, the factors of the layers that it becomes."""
        if self.by != "laco":
            return {}
        if self.layers is None:
            found = facts.merged or {}
            named = {layer for made in found.values() for layer in made} | found.keys()
            if not found or max(named) >= len(draft.layers) or found.keys() & set(gone):
                raise BadInput("what was merged does not fit this model; was the manifest edited?")
            return found
        stack: Stack = {layer: {layer: 1} for layer in range(len(draft.layers))}
        for below, above in runs_above(gone):
            if below < 0:
                raise BadInput(f"layer 0 has no layer below to be merged into; leave {show_layers(above)} as a drop")
            pattern = draft.pattern
            if odd := [layer for layer in above if pattern[layer] != pattern[below]]:
                titles = [printable(pattern[layer][1] or f"kind {pattern[layer][0]}") for layer in (odd[0], below)]
                raise BadInput(
                    f"laco: layer {odd[0]} ({titles[0]}) and layer {below} ({titles[1]}) are of different kinds, and"
                    " their weights cannot be added; merge layers of one kind, or drop it without `by: laco`"
                )
            stack = collapsed(stack, below, len(above))
        return {layer: made for layer, made in stack.items() if made != {layer: 1}}

    def _matched(
        self, gone: Sequence[int], merged: Mapping[int, Mapping[int, int]], total: int, text: TextLoss | None
    ) -> str:
        how = _into(merged) if self.by == "laco" else ""
        if self.count is not None and self.by != "laco":
            how = f", {_WORDS[self.by or 'block_influence']}"
        found = f"{show_layers(list(gone))} of {total}{how}"
        if text is None:
            return found
        name = printable(text.text)
        return f"{found}; loss on {name} {text.before:.4f} → {text.after:.4f} nats ({text.after - text.before:+.4f})"


def _replaced(merged: Mapping[int, Mapping[int, int]]) -> dict[int, int]:
    """The layers that take one other in and so become it, each with that other: merging nothing, they are deleted."""
    alone = {layer: next(iter(made)) for layer, made in merged.items() if len(made) == 1}
    return {layer: of for layer, of in alone.items() if merged[layer][of] == 1}


def _into(merged: Mapping[int, Mapping[int, int]]) -> str:
    """What LaCo makes of the layers that stay, in words: which are merged, and which merely deleted."""
    replaced = _replaced(merged)
    real = sorted(merged.keys() - replaced.keys())
    said = [f", merged into {show_layers(real)}"] if real else []
    if replaced:
        which = ", ".join(f"{layer} by {of}" for layer, of in sorted(replaced.items()))
        said.append(
            f"; replaced: layer {which} (θ_l + (θ_l+1 − θ_l) is θ_l+1: nothing is merged there, the lower layer is what"
            " is deleted)"
        )
    return "".join(said)


def _check_grafts(draft: Draft, layers: Sequence[int]) -> None:
    """Raise BadInput where something beside the native layers would go with them."""
    carrying = [layer for layer in layers if draft.layers[layer].grafts]
    if carrying or draft.bank is not None:
        held = f"{show_layers(carrying)} carry" if carrying else "the model's layers carry"
        raise BadInput(f"{held} grafts, which cannot go with a layer: take layers out before grafting, or revert first")


def _is_silent(draft: Draft, layer: int, silent: frozenset[int]) -> bool:
    """Whether a layer of the draft adds exactly nothing: by its weights in the base, or as the plan made it."""
    home, values = draft.layers[layer], draft.kind_of(layer).silence
    if home.base is not None and not home.rewritten:
        return home.base in silent
    held = {suffix: home.tensors[suffix] for suffix in values}
    return bool(held) and all(
        isinstance(recipe, Constant) and recipe.value == values[suffix] for suffix, recipe in held.items()
    )


def _recipes(draft: Draft, merged: Mapping[int, Mapping[int, int]]) -> dict[int, dict[str, Recipe]]:
    """The tensors of the layers that take others in; quantised ones are in full precision then."""
    found: dict[int, dict[str, Recipe]] = {}
    for layer, made_of in merged.items():
        draft.open(layer)
        terms = {of: draft.opened(of) for of in made_of}
        factors = tuple(made_of.values())
        found[layer] = {
            suffix: Summed(tuple(terms[of][suffix] for of in made_of), factors)
            for suffix in draft.layers[layer].tensors
        }
    return found


def _claim(silent: bool, merged: bool, text: TextLoss | None) -> Claim:
    if silent:
        return Claim("exact", "the layers that go add exactly zero to the residual stream: what writes to it is zero")
    what = "what the layers added is gone" if not merged else "a layer is not linear in its weights"
    if text is None:
        return Claim("none", f"{what}; what that costs was not measured (`text`), and every layer is to be trained on")
    cost = f"{text.after - text.before:+.4f} nats a token on {printable(text.text)} ({text.tokens:,} tokens)"
    return Claim("none", f"{what}: {cost}; every layer is to be trained on")
