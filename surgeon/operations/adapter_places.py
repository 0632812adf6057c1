"""Where a PEFT adapter's tensors belong: the parameters of transformers' model in memory, and how they are stored.

A parameter is a tensor of the checkpoint, or that of all experts, which may be stored as a tensor for each expert; or
the output head of a model whose embeddings it shares.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from surgeon.blueprint.recipes import ExpertLayout
from surgeon.errors import BadInput
from surgeon.families.anatomy import Anatomy
from surgeon.families.family import Expert, Part


@dataclass(frozen=True)
class Place:
    """A parameter of transformers' model: what it is called there and on disk, its form there, its shape on disk.

    `layer` is the base's layer that it belongs to, `suffix` what it is called in it. With `expert`, it is stored for
    one expert or for all; of one expert, `rows` are those of the parameter that it is (None: all).
    """

    parameter: str
    stored: str
    form: str
    shape: tuple[int, ...]
    layer: int | None = None
    suffix: str = ""
    expert: Expert | None = None
    rows: tuple[int, int] | None = None

    @property
    def layout(self) -> ExpertLayout:
        """How each expert's matrix is stored, rows in the order that the model has them in."""
        return ExpertLayout(self.expert is not None and self.expert.transposed, interleaved=False)


@dataclass(frozen=True)
class Experts:
    """The matrices of all experts, which transformers has in one parameter: `count` of them, `rows` by `columns` each.

    `turned`: transformers says that its parameter holds them inputs by outputs.
    """

    places: tuple[Place, ...]
    count: int
    rows: int
    columns: int
    turned: bool


@dataclass(frozen=True)
class Tied:
    """Embeddings, and an output head that is the same tensor; as a tensor of its own it has the `stored` name."""

    reads: Place
    head: Place


@dataclass(frozen=True)
class Model:
    """The parameters of a base as transformers has them in memory, by name and in its order; `stack` are its layers.

    `experts` are those that hold the matrices of all experts of a layer.
    """

    places: Mapping[str, Place]
    stack: str
    experts: Mapping[str, Experts]
    _anatomy: Anatomy = field(repr=False)

    @classmethod
    def of(cls, anatomy: Anatomy) -> Model:
        """The base's."""
        known = {name: (info.shape, None, "") for name, info in anatomy.outer.items()} | {
            info.name: (info.shape, index, suffix)
            for index, held in enumerate(anatomy.layers)
            for suffix, info in held.items()
        }
        found = anatomy.derivation.parameters()
        places = {
            name: Place(name, stored, form, *known.get(stored, ((), None, "")))
            for name, (stored, form) in found.items()
        }
        stack = anatomy.derivation.stack
        experts = dict(_experts(anatomy, places, stack))
        every = {each.parameter: each for group in experts.values() for each in group.places}
        return cls(places | every, stack, experts, anatomy)

    def find(self, name: str) -> Place | None:
        """A place by its parameter's name in memory, whatever class holds the text model, or on disk."""
        found = self.places.get(name) or self._bare_places.get(self._bare(name)) or self._stored.get(name)
        if found is not None and not found.stored and found.layer is None and self.tied is not None:
            return self.tied.head if self.tied.head.parameter == found.parameter else found
        return found

    def parameters_of(self, module: str) -> list[str]:
        """The parameters that a module has itself, in its order."""
        return self._held.get(self._bare(module), [])

    def has_tokens(self, place: Place) -> bool:
        """Whether a parameter outside the layers has a row for each token."""
        return place.layer is None and place.shape[:1] == (self._anatomy.sizes.vocabulary,)

    @cached_property
    def tied(self) -> Tied | None:
        """The head of a tied model and the embeddings that it is; None where it is not, or cannot be untied."""
        if not self._anatomy.tied:
            return None
        try:
            lacking = self._anatomy.derivation.head_tensors()
        except BadInput:
            return None
        inside, rows = f"{self.stack}.", (self._anatomy.sizes.vocabulary,)
        outer = [each for each in self.places.values() if not each.parameter.startswith(inside)]
        stored = [each for each in outer if each.shape[:1] == rows]
        reads = [each for each in stored if each.form == "embedding"]
        bare = [each for each in outer if not each.stored]
        heads = [each for each in (bare if lacking else stored) if each.form == "linear"]
        if len(reads) != 1 or len(heads) != 1 or len(lacking) > 1:
            return None
        name = next(iter(lacking), heads[0].stored)
        return Tied(reads[0], replace(heads[0], stored=name, shape=reads[0].shape))

    def _bare(self, name: str) -> str:
        """A name without what stands before the text model in one class or another."""
        return re.sub(rf"^(?:(?:{re.escape(self.stack.rpartition('.')[0])}|model|language_model)\.)+", "", name)

    @cached_property
    def _bare_places(self) -> dict[str, Place]:
        return {self._bare(name): place for name, place in self.places.items()}

    @cached_property
    def _stored(self) -> dict[str, Place]:
        return {place.stored: place for place in self.places.values() if place.stored}

    @cached_property
    def _held(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name in self.places:
            found.setdefault(self._bare(name.rpartition(".")[0]), []).append(name)
        return found


def _experts(anatomy: Anatomy, places: Mapping[str, Place], stack: str) -> Iterator[tuple[str, Experts]]:
    """The parameters that hold the matrices of all experts, where it is known how each is stored."""
    for index, held in enumerate(anatomy.layers):
        inside = f"{stack}.{index}."
        stacks = {
            name.rpartition(".")[2]: place
            for name, place in places.items()
            if place.form.endswith("experts") and name.startswith(inside)
        }
        parts: dict[str, list[Part]] = {}
        for part in anatomy.kinds[anatomy.kind_of[index]].parts:
            if part.expert is not None and part.kind == "weight" and part.suffix in held:
                parts.setdefault(_word(part, stacks), []).append(part)
        for word, of_word in parts.items():
            if word in stacks:
                own = [(part, held[part.suffix].name) for part in of_word]
                yield stacks[word].parameter, _together(stacks[word], index, own)


def _word(part: Part, stacks: Mapping[str, Place]) -> str:
    """What transformers calls the parameter that a part of an expert goes to."""
    role = part.blocks[0][0]
    return "down_proj" if role == "down" else "gate_up_proj" if "gate_up_proj" in stacks else f"{role}_proj"


def _together(memory: Place, layer: int, parts: list[tuple[Part, str]]) -> Experts:
    """One parameter of all experts as it is stored: in one tensor, or in one or two for each expert."""
    first = parts[0][0]
    turned = memory.form == "turned experts"
    assert first.expert is not None, first.suffix
    if first.expert.number is None:
        place = replace(memory, stored=parts[0][1], shape=first.shape, layer=layer, suffix=first.suffix)
        count, *matrix = first.shape
        height, width = ExpertLayout(first.expert.transposed, interleaved=False).used_shape(tuple(matrix))
        return Experts((replace(place, expert=first.expert),), count, height, width, turned)
    gates = {part.expert.number: part.blocks[0][1] for part, _ in parts if part.expert and part.blocks[0][0] == "gate"}
    found: list[Place] = []
    rows = {part.expert.number: 0 for part, _ in parts if part.expert}
    for part, name in parts:
        assert part.expert is not None and part.expert.number is not None, part.suffix
        height = part.blocks[0][1]
        begin = gates.get(part.expert.number, 0) if part.blocks[0][0] == "up" else 0
        rows[part.expert.number] += height
        found.append(Place(name, name, "linear", part.shape, layer, part.suffix, part.expert, (begin, begin + height)))
    return Experts(tuple(found), len(rows), rows[0], first.shape[1], turned)
