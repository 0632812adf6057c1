"""A PEFT adapter sorted by what it changes: for each tensor of the base the steps that merge it, none left over.

PEFT names an adapter's tensors by modules of transformers' model in memory, or of an older one, whose names the
checkpoint may still have. Every tensor must find its place, and every place that the adapter's config names must find
its tensors: what is missing, too much, or of another shape is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field

from surgeon.blueprint.recipes import Imported, Product, Step, Trained
from surgeon.checkpoint.peft_folder import Adapter, matched
from surgeon.errors import BadInput, printable
from surgeon.families.anatomy import Anatomy
from surgeon.operations.operation import Spec

_PEFT = "base_model.model."
_OF_LORA = re.compile(
    r"(?P<module>.+)\.(?P<what>lora_[AB]\.weight|lora_B\.bias|lora_embedding_[AB]|lora_magnitude_vector(\.weight)?"
    r"|token_adapter\.trainable_tokens_delta)",
    re.DOTALL,
)
_BASE = ".base_layer"
_A_LAYER = re.compile(r"\.\d+\.")


class Settings(Spec):
    """What an adapter's config says of what it changes; lists of names are PEFT's.

    `targets` are None where a regular expression names them, which is not read. `tokens` are ids by names of modules;
    by no name, of the embeddings.
    """

    rank: Annotated[int, Field(ge=1)]
    rank_pattern: dict[str, float]
    targets: list[str] | None
    excluded: list[str]
    layers: list[int] | None
    dora: bool
    biases: Literal["none", "all", "lora_only"]
    own_bias: bool
    saved: list[str]
    tokens: dict[str, list[int]]

    def rank_of(self, module: str) -> int:
        """The rank at a module, by its path."""
        return int(matched(self.rank_pattern, module, self.rank))

    def names(self, module: str) -> bool:
        """Whether `targets` name a module, as PEFT reads them."""
        if any(_ends(module, name) for name in self.excluded) or self.saves(module):
            return False
        if not any(_ends(module, name) for name in self.targets or ()):
            return False
        number = re.search(r"\.[^.]*\.(\d+)\.", module)
        return self.layers is None or (number is not None and int(number[1]) in self.layers)

    def saves(self, path: str) -> bool:
        """Whether `modules_to_save` name a module, or one around it."""
        steps = path.split(".")
        return any(_ends(".".join(steps[:end]), name) for end in range(1, len(steps) + 1) for name in self.saved)


@dataclass(frozen=True)
class Place:
    """A parameter of transformers' model: what it is called there and on disk, its form there, its shape on disk.

    `layer` is the base's layer that it belongs to, `suffix` what it is called in it.
    """

    parameter: str
    stored: str
    form: str
    shape: tuple[int, ...]
    layer: int | None = None
    suffix: str = ""


@dataclass(frozen=True)
class Model:
    """The parameters of the base as transformers has them in memory, by name; `stack` is its list of layers."""

    places: Mapping[str, Place]
    stack: str

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
            for name, (stored, form) in sorted(found.items())
        }
        return cls(places, anatomy.derivation.stack)

    def find(self, name: str) -> Place | None:
        """A place by its parameter's name in memory, with or without the base model's prefix, or on disk."""
        prefix = self.stack.rpartition(".")[0]
        return self.places.get(name) or self.places.get(f"{prefix}.{name}") or self._stored.get(name)

    @cached_property
    def _stored(self) -> dict[str, Place]:
        return {place.stored: place for place in self.places.values() if place.stored}


@dataclass
class Sorted:
    """An adapter's tensors by the places that they change, in the order of their names.

    `called` is the plan's name for the adapter, `weight` by how much it counts.
    """

    called: str
    adapter: Adapter
    settings: Settings
    weight: float
    model: Model
    steps: dict[str, list[Step]] = field(default_factory=dict)

    def sort(self) -> dict[str, list[Step]]:
        """The steps of each place, by its parameter. Raises BadInput, which names a tensor that does not fit."""
        groups: dict[str, dict[str, str]] = {}
        for tensor in self.adapter.tensors:
            name = tensor.removeprefix(_PEFT)
            if name == tensor:
                raise self._refused(tensor, f"its name does not begin with `{_PEFT}`, as PEFT's do")
            found = _OF_LORA.fullmatch(name)
            if found is None:
                self._add_whole(tensor, name)
                continue
            what = found["what"].removesuffix(".weight") if "magnitude" in found["what"] else found["what"]
            if what in groups.setdefault(found["module"], {}):
                raise self._refused(tensor, "it is there twice")
            groups[found["module"]][what] = tensor
        for module, tensors in groups.items():
            if "token_adapter.trainable_tokens_delta" in tensors:
                self._add_tokens(module, tensors.pop("token_adapter.trainable_tokens_delta"))
            if tensors:
                self._add_product(module, tensors)
        if not self.steps:
            raise BadInput(f"{self._shown}: the adapter holds no tensors")
        self._check_complete()
        self._check_used()
        return self.steps

    # One kind of tensor after the other.

    def _add_product(self, module: str, tensors: Mapping[str, str]) -> None:
        """A LoRA's matrices, and what stands beside them."""
        first = next(iter(tensors.values()))
        place = self._place(f"{module}.weight", first)
        names = ("lora_embedding_A", "lora_embedding_B") if place.form == "embedding" else _PAIR
        down, up = self._pair(tensors, names)
        if len(place.shape) != 2 or place.form.endswith("experts"):
            raise self._refused(down, f"the base's {printable(place.stored)} is no matrix ({list(place.shape)})")
        rows, columns = place.shape[::-1] if place.form == "turned" else place.shape
        turned = place.form == "embedding"
        if turned:
            rows, columns = columns, rows
        rank = self.settings.rank_of(module)
        self._check_shape(down, (rank, columns))
        self._check_shape(up, (rows, rank))
        magnitude = self._magnitude(module, tensors, place, rows)
        scale = self.adapter.scale(module, rank)
        product = Product(self._of(down), self._of(up), scale, self.weight, magnitude, turned)
        self._step(place, product)
        if (bias := tensors.get("lora_B.bias")) is not None:
            own = self._place(f"{module}.bias", bias)
            self._check_shape(bias, own.shape)
            self._step(own, Trained(self._of(bias), self.weight * scale, added=True))
        elif self.settings.own_bias:
            raise self._refused(up, "its config says `lora_bias`, and no lora_B.bias is beside it; was the file cut?")

    def _pair(self, tensors: Mapping[str, str], names: tuple[str, str]) -> tuple[str, str]:
        for there, absent in (names, names[::-1]):
            if absent not in tensors:
                known = tensors.get(there, next(iter(tensors.values())))
                raise self._refused(known, f"no {absent.removesuffix('.weight')} is beside it; was the file cut?")
        other = next((what for what in tensors if what not in (*names, *_BESIDE)), None)
        if other is not None:
            raise self._refused(tensors[other], "a module of this kind has no such tensor")
        return tensors[names[0]], tensors[names[1]]

    def _magnitude(self, module: str, tensors: Mapping[str, str], place: Place, rows: int) -> Imported | None:
        found = tensors.get("lora_magnitude_vector")
        if (found is not None) != self.settings.dora:
            which = next(iter(tensors.values())) if found is None else found
            says, has = ("says `use_dora`", "no magnitude") if found is None else ("says no `use_dora`", "a magnitude")
            raise self._refused(which, f"the adapter's config {says}, and {has} is there; was a file cut or replaced?")
        if found is None:
            return None
        if place.form == "embedding":
            raise self._refused(found, "DoRA of embeddings is not merged; merge it with PEFT first")
        size = self.adapter.tensors[found].shape
        self._check_shape(found, (1, rows) if len(size) == 2 else (rows,))
        return self._of(found)

    def _add_tokens(self, module: str, tensor: str) -> None:
        """Rows of embeddings that were trained by themselves."""
        module = module.removesuffix(_BASE)
        place = self._place(f"{module}.weight", tensor)
        ids = next((ids for name, ids in self.settings.tokens.items() if not name or _ends(module, name)), None)
        if ids is None:
            raise self._refused(tensor, "its config's `trainable_token_indices` name no tokens of this module")
        if len(place.shape) != 2:
            raise self._refused(tensor, f"the base's {printable(place.stored)} is no matrix ({list(place.shape)})")
        if not ids or max(ids) >= place.shape[0] or min(ids) < 0 or len(set(ids)) < len(ids):
            raise self._refused(
                tensor,
                f"its config's `trainable_token_indices` are no ids of the base's {place.shape[0]} tokens, each once:"
                " the vocabulary was another",
            )
        self._check_shape(tensor, (len(ids), place.shape[1]))
        self._step(place, Trained(self._of(tensor), self.weight, tuple(ids)))

    def _add_whole(self, tensor: str, name: str) -> None:
        """A parameter that was trained whole, or saved with the adapter."""
        path, _, key = name.replace(f"{_BASE}.", ".").rpartition(".")
        place = self._place(f"{path}.{key}", tensor)
        below = _BASE in name
        biased = key == "bias" and (self.settings.biases == "all" or (self.settings.biases == "lora_only" and below))
        if not (biased or below or self.settings.saves(path) or place.form == "embedding" or _is_head(path)):
            raise self._refused(tensor, "its config says neither `modules_to_save` nor `bias` of it")
        shape = self.adapter.tensors[tensor].shape
        if shape != place.shape and shape[1:] == place.shape[1:] and (place.form == "embedding" or _is_head(path)):
            raise self._refused(
                tensor,
                f"{shape[0]} rows, the base has {place.shape[0]}: the adapter was trained with a changed vocabulary;"
                " give that base",
            )
        self._check_shape(tensor, place.shape)
        # What else changes the tensor comes after.
        self.steps.setdefault(place.parameter, []).insert(0, Trained(self._of(tensor), self.weight))

    # What must be there.

    def _check_complete(self) -> None:
        """Raise BadInput where the config names a module, and the adapter has nothing for it."""
        settings = self.settings
        for place in self.model.places.values():
            if place.parameter in self.steps:
                continue
            module, _, key = place.parameter.rpartition(".")
            # Of a tower for images, which PEFT may not have seen, all of a kind or none.
            seen = module.startswith(f"{self.model.stack}.") or not _A_LAYER.search(module) or self._has_kind(module)
            if seen and key == "weight" and place.form in _LORA_FORMS and settings.names(module):
                raise self._lacking(place.parameter, "`target_modules`")
            if settings.saves(module):
                raise self._lacking(place.parameter, "`modules_to_save`")
            biased = settings.biases == "all" or (settings.biases == "lora_only" and f"{module}.weight" in self.steps)
            if key == "bias" and biased and module.startswith(f"{self.model.stack}."):
                raise self._lacking(place.parameter, f"`bias: {settings.biases}`")
        for name in settings.tokens:
            tokens = (path for path, steps in self.steps.items() for s in steps if isinstance(s, Trained) and s.rows)
            if not any(not name or _ends(path.rpartition(".")[0], name) for path in tokens):
                reads = (each.parameter for each in self.model.places.values() if each.form == "embedding")
                raise self._lacking(name or next(reads, "the embeddings"), "`trainable_token_indices`")

    def _has_kind(self, module: str) -> bool:
        """Whether the adapter changes the same module of any layer."""
        return _A_LAYER.sub(".*.", module) in self._kinds

    @cached_property
    def _kinds(self) -> set[str]:
        return {_A_LAYER.sub(".*.", parameter.rpartition(".")[0]) for parameter in self.steps}

    def _check_used(self) -> None:
        """Each tensor of the adapter must be in just one step."""
        used = [each.tensor for steps in self.steps.values() for step in steps for each in step.inputs]
        if left := self.adapter.tensors.keys() - set(used):
            raise self._refused(min(left), "surgeon has no place for it")

    # Small steps.

    @property
    def _shown(self) -> str:
        return printable(self.called)

    def _refused(self, tensor: str, why: str) -> BadInput:
        return BadInput(f"{self._shown}: {printable(tensor)}: {why}; nothing is merged of an adapter in part")

    def _lacking(self, name: str, key: str) -> BadInput:
        return BadInput(
            f"{self._shown}: nothing for {printable(name)}, which {key} of its config names: half an adapter, or one"
            " for another base; nothing is merged in part"
        )

    def _place(self, name: str, tensor: str) -> Place:
        found = self.model.find(name)
        if found is None:
            raise self._refused(tensor, f"the base has no {printable(name)}: the adapter is for another base")
        if not found.stored:
            raise self._refused(tensor, f"the base stores {printable(found.parameter)} in parts, or as another's")
        return found

    def _check_shape(self, tensor: str, expected: tuple[int, ...]) -> None:
        shape = self.adapter.tensors[tensor].shape
        if shape != expected:
            raise self._refused(tensor, f"shape {list(shape)}, base and config call for {list(expected)}")

    def _of(self, tensor: str) -> Imported:
        found = self.adapter.tensors[tensor]
        return Imported("adapter", self.called, tensor, found.dtype, found.shape)

    def _step(self, place: Place, step: Step) -> None:
        self.steps.setdefault(place.parameter, []).append(step)


_PAIR = ("lora_A.weight", "lora_B.weight")
_BESIDE = ("lora_magnitude_vector", "lora_B.bias")
_LORA_FORMS = ("linear", "turned", "embedding")


def _ends(path: str, name: str) -> bool:
    return path == name or path.endswith(f".{name}")


def _is_head(path: str) -> bool:
    return _ends(path, "lm_head") or _ends(path, "embed_out")


def deltas(steps: Mapping[str, list[Step]]) -> Iterator[tuple[str, Product]]:
    """Every product, with the parameter that it is added to."""
    return ((name, step) for name, of in steps.items() for step in of if isinstance(step, Product))
