"""The settings of a PEFT adapter's config, read as PEFT reads them, and the places of its tensors in a base.

A place is a parameter of transformers' model in memory. On disk it is one tensor of the checkpoint; or, for a parameter
of all experts, one tensor or a tensor for each expert; or the output head of a model with tied embeddings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from surgeon.anatomy.anatomy import Anatomy
from surgeon.anatomy.derivation import Derivation, kept
from surgeon.anatomy.family import Expert, Part
from surgeon.blueprint.recipes import ExpertLayout
from surgeon.checkpoint.peft_folder import ADAPTER_CONFIG, AdapterFolder, matched, numbers_of
from surgeon.common.patterns import Matcher
from surgeon.edits.embeddings import head_tensors
from surgeon.errors import BadInput, printable
from surgeon.operations.operation import Spec


class Settings(Spec):
    """The settings of an adapter's config that decide what it changes; lists of names work as in PEFT.

    `targets` is None where `pattern`, a regular expression, names the targets; `excluding` is such an expression for
    `exclude_modules`, empty where these are a list. `layers_pattern` are names of lists of layers. `tokens` maps names
    of modules to token ids; the empty name means the embeddings. `parameters` are `target_parameters`.
    """

    rank: Annotated[int, Field(ge=1)]
    rank_pattern: dict[str, float]
    targets: list[str] | None
    excluded: list[str]
    layers: list[int] | None
    layers_pattern: list[str] = []  # noqa: RUF012  # pydantic copies it
    pattern: str = ""
    excluding: str = ""
    dora: bool
    biases: Literal["none", "all", "lora_only"]
    own_bias: bool
    saved: list[str]
    tokens: dict[str, list[int]]
    parameters: list[str] = []  # noqa: RUF012  # pydantic copies it

    def rank_of(self, module: str) -> int:
        """Return the rank at a module, or at one of `target_parameters`, by its path."""
        return int(matched(self.rank_pattern, module, self.rank, self._matcher))

    @cached_property
    def _matcher(self) -> Matcher:
        """Return a matcher of PEFT's patterns, which names the adapter's config in errors."""
        return Matcher(ADAPTER_CONFIG)

    def names(self, module: str, form: str = "linear") -> bool:
        """Return whether `targets` or `pattern` name a module, by the rules of PEFT's `check_target_module_exists`.

        False for a module that is excluded or saved whole. `form` is one of `FORMS`.
        """
        if self.excluding and self._matcher.whole(self.excluding, module):
            return False
        if any(ends(module, name) for name in self.excluded) or self.saves(module):
            return False
        if self.pattern.lower() == "all-linear":
            return form != "embedding" and not is_head(module)
        if self.targets is None:
            return self._matcher.whole(self.pattern, module)
        if module in self.targets or not any(ends(module, name) for name in self.targets):
            return module in self.targets
        return not self.layers or self._number(module) in self.layers

    def _number(self, module: str) -> int | None:
        """Return the number of a module's layer: the first number in its path, or the first after `layers_pattern`.

        None where the path has no such number.
        """
        steps = module.split(".")
        numbers = [at for at, step in enumerate(steps[:-1]) if at and step.isdecimal()]
        if not self.layers_pattern:
            return next((int(steps[at]) for at in numbers if at > 1), None)
        found = (at for name in self.layers_pattern for at in numbers if ends(".".join(steps[:at]), name))
        return next((int(steps[at]) for at in found), None)

    def saves(self, path: str) -> bool:
        """Return whether `modules_to_save` name a module or one around it; a name matches ends of paths, as in PEFT."""
        return any(f"{name}." in f"{path}." for name in self.saved)

    def targets_parameter(self, path: str) -> bool:
        """Return whether `target_parameters` name a parameter."""
        return any(ends(path, name) for name in self.parameters)


def settings_of(folder: AdapterFolder) -> Settings:
    """Return an opened adapter's settings, with PEFT's defaults for what its config leaves out.

    Raises BadInput for invalid values.
    """
    config, shown = folder.config, folder.shown
    targets, layers, tokens = (
        config.get(k) for k in ("target_modules", "layers_to_transform", "trainable_token_indices")
    )
    excluded, stems = config.get("exclude_modules"), config.get("layers_pattern")
    try:
        return Settings(
            rank=config.get("r", 8),
            rank_pattern=numbers_of(config, "rank_pattern", shown),
            targets=None if isinstance(targets, str) else targets or [],
            pattern=targets if isinstance(targets, str) else "",
            excluded=[] if isinstance(excluded, str) else excluded or [],
            excluding=excluded if isinstance(excluded, str) else "",
            layers_pattern=[stems] if isinstance(stems, str) and stems else stems or [],
            layers=[layers] if type(layers) is int else layers,
            dora=config.get("use_dora") or False,
            biases=config.get("bias") or "none",
            own_bias=config.get("lora_bias") or False,
            saved=config.get("modules_to_save") or [],
            tokens={"": tokens} if isinstance(tokens, list) else tokens or {},
            parameters=config.get("target_parameters") or [],
        )
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = printable(".".join(str(step) for step in problem["loc"]))
        raise BadInput(f"{shown}: {where}: {printable(problem['msg'])}; get the adapter's own file again") from None


def ends(path: str, name: str) -> bool:
    """Return whether a path equals a name, or ends in it."""
    return path == name or path.endswith(f".{name}")


def is_head(path: str) -> bool:
    """Return whether a module is an output head, by its name."""
    return ends(path, "lm_head") or ends(path, "embed_out")


# The form of a parameter: the matrix of a linear module, outputs × inputs or transposed ("turned"); an embedding; the
# matrices of all experts, each outputs × inputs or transposed; anything else.
FORMS = ("linear", "turned", "embedding", "experts", "turned experts", "other")


@kept
def parameters(base: Derivation) -> dict[str, tuple[str, str]]:
    """Return (tensor, form) for every parameter of transformers' model, by the parameter's name.

    `tensor` is the name of the stored tensor, empty where several tensors store the parameter, or another parameter's
    tensor does. `form` is one of `FORMS`.
    """
    names, stack = base.seen.names, base.stack
    # A tensor that several layers share is not a parameter of one layer.
    model = base.seen.skeleton.model
    shared = {of for name, of in model.all_tied_weights_keys.items() if name.startswith(f"{stack}.")}
    stored = {target: name for name, target in names.outer.items() if target and target not in shared}
    for index, layer in enumerate(names.layers):
        for suffix, targets in layer.items():
            name = f"{names.stem}{index}.{suffix}"
            if len(targets) == 1 and name not in names.converted:
                stored[f"{stack}.{index}.{targets[0]}"] = name
    return {
        f"{path}.{key}".removeprefix("."): (stored.get(f"{path}.{key}".removeprefix("."), ""), _form(module, key))
        for path, module in model.named_modules()
        for key, value in module._parameters.items()
        if value is not None
    }


def _form(module: Any, key: str) -> str:
    """Return the form of a module's parameter, one of `FORMS`."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    if key == "weight" and isinstance(module, nn.Linear | Conv1D | nn.Embedding):
        return "turned" if isinstance(module, Conv1D) else "linear" if isinstance(module, nn.Linear) else "embedding"
    if module._parameters[key].ndim == 3:
        return "turned experts" if getattr(module, "is_transposed", False) else "experts"
    return "other"


@dataclass(frozen=True)
class Place:
    """A parameter of transformers' model: its name there and on disk, its form there, its shape on disk.

    `layer` is the base's layer that it belongs to, `suffix` its name within that layer. With `expert`, it is stored for
    one expert or for all; for one expert, `rows` are the rows of the parameter that this tensor stores (None: all).
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
        """Return how each expert's matrix is stored; its rows are in the model's order."""
        return ExpertLayout(self.expert is not None and self.expert.transposed, interleaved=False)


@dataclass(frozen=True)
class Experts:
    """The matrices of all experts in one parameter of transformers: `count` experts, `rows` × `columns` each.

    `turned`: transformers declares that the parameter holds them inputs × outputs.
    """

    places: tuple[Place, ...]
    count: int
    rows: int
    columns: int
    turned: bool


@dataclass(frozen=True)
class Tied:
    """Embeddings, and an output head tied to them; `head.stored` is the name that an untied head would have."""

    reads: Place
    head: Place


@dataclass(frozen=True)
class Model:
    """The parameters of a base as in transformers' memory, by name and in order; `stack` is the path of its layers.

    `experts` are the parameters that hold the matrices of all experts of a layer.
    """

    places: Mapping[str, Place]
    stack: str
    experts: Mapping[str, Experts]
    _anatomy: Anatomy = field(repr=False)

    @classmethod
    def of(cls, anatomy: Anatomy) -> Model:
        """Return the parameters of a base."""
        known = {name: (info.shape, None, "") for name, info in anatomy.outer.items()} | {
            info.name: (info.shape, index, suffix)
            for index, held in enumerate(anatomy.layers)
            for suffix, info in held.items()
        }
        found = parameters(anatomy.derivation)
        places = {
            name: Place(name, stored, form, *known.get(stored, ((), None, "")))
            for name, (stored, form) in found.items()
        }
        stack = anatomy.derivation.stack
        experts = dict(_experts(anatomy, places, stack))
        every = {each.parameter: each for group in experts.values() for each in group.places}
        return cls(places | every, stack, experts, anatomy)

    def find(self, name: str) -> Place | None:
        """Return the place of a parameter by its name, in memory (whatever class holds the text model) or on disk.

        None where the base has no such parameter.
        """
        found = self.places.get(name) or self._bare_places.get(self._bare(name)) or self._stored.get(name)
        if found is not None and not found.stored and found.layer is None and self.tied is not None:
            return self.tied.head if self.tied.head.parameter == found.parameter else found
        return found

    def parameters_of(self, module: str) -> list[str]:
        """Return the names of the parameters that a module itself has, in order."""
        return self._held.get(self._bare(module), [])

    def has_tokens(self, place: Place) -> bool:
        """Return whether a parameter outside the layers has a row for each token."""
        return place.layer is None and place.shape[:1] == (self._anatomy.sizes.vocabulary,)

    @cached_property
    def tied(self) -> Tied | None:
        """Return the embeddings and head of a tied model; None where it is not tied, or cannot be untied."""
        if not self._anatomy.tied:
            return None
        try:
            lacking = head_tensors(self._anatomy.derivation)
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
        """Return a name without the prefix that a class puts before the text model."""
        return re.sub(rf"^(?:(?:{re.escape(self.stack.rpartition('.')[0])}|model|language_model)\.)+", "", name)

    @cached_property
    def _bare_places(self) -> dict[str, Place]:
        """Return the places by their parameters' bare names (`_bare`)."""
        return {self._bare(name): place for name, place in self.places.items()}

    @cached_property
    def _stored(self) -> dict[str, Place]:
        """Return the places by the names of their tensors on disk."""
        return {place.stored: place for place in self.places.values() if place.stored}

    @cached_property
    def _held(self) -> dict[str, list[str]]:
        """Return the names of parameters by the bare name of the module that has them."""
        found: dict[str, list[str]] = {}
        for name in self.places:
            found.setdefault(self._bare(name.rpartition(".")[0]), []).append(name)
        return found


def _experts(anatomy: Anatomy, places: Mapping[str, Place], stack: str) -> Iterator[tuple[str, Experts]]:
    """Yield (parameter, experts) for each parameter that holds the matrices of all experts.

    Parameters whose experts are stored in an unknown way are left out.
    """
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
    """Return transformers' name of the parameter that a part of an expert goes to."""
    role = part.blocks[0][0]
    return "down_proj" if role == "down" else "gate_up_proj" if "gate_up_proj" in stacks else f"{role}_proj"


def _together(memory: Place, layer: int, parts: list[tuple[Part, str]]) -> Experts:
    """Return one parameter of all experts as it is stored: in one tensor, or in one or two for each expert.

    `memory` is its place in memory; `parts` are the stored parts with their tensors' names.
    """
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
