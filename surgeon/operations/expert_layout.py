"""`expert_layout`: the experts of a mixture in one tensor for all, or in tensors for each.

transformers computes with one tensor of all experts' matrices (gate above up) and saves most types with tensors for
each expert. It loads both; other engines and tools read one of them. Every tensor passes as bytes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from surgeon.blueprint.blueprint import Claim, OperationRecord
from surgeon.blueprint.draft import Draft
from surgeon.blueprint.recipes import Copy, Recipe, rows, whole
from surgeon.errors import BadInput, printable
from surgeon.operations.operation import Operation, Paper, TrainingDefaults

# Of a tensor in memory: for each expert the suffixes on disk, one below the other, with their rows.
_Saved = list[list[tuple[str, int]]]


class ExpertLayout(Operation):
    """The experts of every layer in one tensor for all of them, or in tensors for each, as transformers has both."""

    papers: ClassVar[tuple[Paper, ...]] = (
        Paper(
            "gale2023megablocks",
            "Gale, Trevor and Narayanan, Deepak and Young, Cliff and Zaharia, Matei",
            "MegaBlocks: Efficient Sparse Training with Mixture-of-Experts",
            2023,
            "2211.15841",
            "MLSys",
        ),
    )
    training: ClassVar[TrainingDefaults] = TrainingDefaults("ours, no paper's: nothing is new", lr=1e-5)
    examples: ClassVar[tuple[Mapping[str, object], ...]] = ({"layout": "stacked"}, {"layout": "separate"})

    op: Literal["expert_layout"]
    layout: Annotated[
        Literal["stacked", "separate"],
        Field(
            description="stacked: one tensor for all experts of a layer, by the names that transformers computes with;"
            " separate: tensors for each expert, by the names that it saves"
        ),
    ]

    def edit(self, draft: Draft, facts: None) -> OperationRecord:
        """Put tensors of the other layout in the place of those of experts."""
        if draft.records:
            raise BadInput("experts are laid out by a plan of its own: apply the operations before it first")
        if draft.bank is not None or any(layer.grafts for layer in draft.layers):
            raise BadInput("the model carries grafts beside its layers; lay its experts out first, or revert them")
        if any(kind.packed for kind in draft.anatomy.kinds):
            raise BadInput("the experts are quantised; lay out the full-precision model's, or `dequantise` it first")
        known = draft.anatomy.derivation.expert_layouts()
        before, after, changed = 0, 0, 0
        for index, home in enumerate(draft.layers):
            saved = known[draft.anatomy.kind_of[index]]
            made = _stacked(home.tensors, saved) if self.layout == "stacked" else _separate(home.tensors, saved)
            new = [suffix for suffix in made if suffix not in home.tensors]
            if any(len(saved[suffix]) > 1 for suffix in saved.keys() & (made.keys() ^ home.tensors.keys())):
                before, after, changed = before + len(home.tensors), after + len(made), changed + 1
                home.tensors = made
                home.rewritten |= dict.fromkeys(new, draft.number)
        if not changed:
            raise BadInput(self._nothing(draft, known))
        draft.converted = copy.deepcopy(draft.config)
        return OperationRecord(
            op=self.op,
            matched=f"experts of {changed} layers {_HOW[self.layout]}, {before:,} tensors become {after:,}"
            + (_ABOVE if any(".experts." in name for name in draft.anatomy.further) else ""),
            claim=Claim("exact", "transformers loads the same experts from both layouts, byte for byte"),
            trains="new",
        )

    def _nothing(self, draft: Draft, known: tuple[dict[str, _Saved], ...]) -> str:
        """Why there is nothing to lay out."""
        if any(len(saved) > 1 for kind in known for saved in kind.values()):
            return f"the experts are {_HOW[self.layout]} already; leave this operation out"
        model_type = printable(draft.anatomy.family.model_type)
        return f"transformers has one layout alone for the experts of a {model_type}, or none: it has no other to load"


_HOW = {"stacked": "in one tensor for all", "separate": "in tensors for each"}
_ABOVE = "; layers that predict further tokens stay as they are"


def _stacked(tensors: Mapping[str, Recipe], known: Mapping[str, _Saved]) -> dict[str, Recipe]:
    """A layer's tensors with one for all experts, in the place of the first expert's."""
    first: dict[str, str] = {}
    parts: set[str] = set()
    for suffix, saved in known.items():
        names = [name for expert in saved for name, _ in expert]
        there = [name for name in names if name in tensors]
        if len(there) == len(names) and suffix not in tensors:
            first[names[0]] = suffix
            parts.update(names)
        elif there and len(saved) > 1:
            lacking = next((name for name in names if name not in tensors), suffix)
            raise BadInput(
                f"{printable(there[0])} is there and {printable(lacking)} is not what transformers saves beside it;"
                " save the model with transformers once"
            )
    made: dict[str, Recipe] = {}
    for suffix, recipe in tensors.items():
        if (new := first.get(suffix)) is not None:
            made[new] = _together(tensors, known[new])
        elif suffix not in parts:
            made[suffix] = recipe
    return made


def _together(tensors: Mapping[str, Recipe], saved: _Saved) -> Recipe:
    """The rows of all experts, one below the other."""
    held = [_copied(tensors[name]) for expert in saved for name, _ in expert]
    if len(held) == 1:
        return whole(held[0])
    shape = (len(saved), sum(count for _, count in saved[0]), *held[0].shape[1:])
    return rows([(each, 0, each.shape[0]) for each in held], shape, still=True)


def _separate(tensors: Mapping[str, Recipe], known: Mapping[str, _Saved]) -> dict[str, Recipe]:
    """A layer's tensors with those of each expert in the place of one for all."""
    made: dict[str, Recipe] = {}
    for suffix, recipe in tensors.items():
        if suffix not in known:
            made[suffix] = recipe
            continue
        at, of = 0, _copied(recipe)
        for expert in known[suffix]:
            for name, count in expert:
                shape = (count, *of.shape[2:])
                made[name] = (
                    whole(of) if len(known[suffix]) == 1 else rows([(of, at, at + count)], shape, still=True, axes=2)
                )
                at += count
    return made


def _copied(recipe: Recipe) -> Copy:
    assert isinstance(recipe, Copy), recipe
    return recipe
