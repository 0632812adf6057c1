"""A PEFT adapter sorted by what it changes: for each tensor of the base, the steps that merge the adapter into it.

PEFT names an adapter's tensors by the modules of transformers' model in memory, or of an older one, whose names the
checkpoint may still use. Every tensor of the adapter must have a place in the base, and every place that the adapter's
config names must have its tensors: a missing tensor, a surplus tensor or a wrong shape raises BadInput with its name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import TypeGuard

from surgeon.blueprint.recipes import Imported, Product, Step, Trained
from surgeon.checkpoint.damages import unwrapped
from surgeon.checkpoint.peft_folder import Adapter
from surgeon.edits.adapter_places import Experts, Model, Place, Settings, ends, is_head
from surgeon.errors import BadInput, printable

_PEFT = "base_model.model."
_OF_LORA = re.compile(
    r"(?P<module>.+)\.(?P<what>lora_[AB]\.weight|lora_B\.bias|lora_embedding_[AB]|lora_magnitude_vector(\.weight)?"
    r"|token_adapter\.trainable_tokens_delta)",
    re.DOTALL,
)
_BASE = ".base_layer"
# Heads for other tasks than predicting the next token.
_HEADS = ("score.", "classifier.", "qa_outputs.", "v_head.")
# Name parts that PEFT adds around a parameter that it saves whole.
_AS_LAID = re.compile(r"\.(token_adapter\.)?base_layer\.|\.modules_to_save\.(default\.)?")
_SAVED = re.compile(r"\.modules_to_save\.(default\.)?")
# A module's name, and the rest: a change to the module, or one of its own parameters.
_OF_MODULE = re.compile(r"(.+?)((?:\.base_layer)*\.(?:lora_.+|token_adapter\..+|\w+))", re.DOTALL)
_A_LAYER = re.compile(r"\.\d+\.")


@dataclass
class Sorted:
    """An adapter's tensors by the places that they change, in the order of their names.

    `called` is the plan's name for the adapter, `weight` the factor of its changes. `pairs` are its low-rank products
    by the path of the module, or parameter, that they adapt. `apart`: the adapter gives tied embeddings and head
    different values; otherwise, and always for `shared` steps, both change alike. `rows` is the number of embedding
    rows, where they were resized before training.
    """

    called: str
    adapter: Adapter
    settings: Settings
    weight: float
    model: Model
    steps: dict[str, list[Step]] = field(default_factory=dict)
    pairs: dict[str, Product] = field(default_factory=dict)
    shared: list[Step] = field(default_factory=list)
    apart: bool = False
    rows: int | None = None
    _square: list[tuple[str, Product, Experts]] = field(default_factory=list)

    def sort(self) -> dict[str, list[Step]]:
        """Fill all fields from the adapter's tensors, and return the steps of each place, by its parameter.

        Raises BadInput with the name of a tensor that does not fit, and where the adapter is incomplete or empty.
        """
        groups: dict[str, dict[str, str]] = {}
        # PEFT does not read its copies of modules as they were before `modules_to_save`.
        read = [name for name in self.adapter.tensors if ".original_module." not in name]
        for tensor in read:
            name = unwrapped(tensor).removeprefix(_PEFT)
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
                self._add_pair(module, tensors)
        for parameter, product, experts in self._square:
            self._add_experts(parameter, replace(product, turned=self._packing(product, experts)), experts)
        if not self.steps:
            raise BadInput(f"{self._shown}: the adapter holds no tensors")
        self._check_complete()
        self._check_used(read)
        self.apart |= self._heads_differ()
        return self.steps

    # Methods that each add one kind of tensor.

    def _add_pair(self, module: str, tensors: Mapping[str, str]) -> None:
        """Add a LoRA's matrices at a module, or at one of its parameters.

        Where a module has several adapted parameters, PEFT nests the wrappers; the first parameter is the innermost.
        """
        own = module
        while own.endswith(_BASE):
            own = own.removesuffix(_BASE)
        nested = (len(module) - len(own)) // len(_BASE)
        wrapped = [name for name in self.model.parameters_of(own) if self.settings.targets_parameter(name)]
        if not wrapped:
            self._add_product(f"{module}.weight", module, tensors)
        elif nested >= len(wrapped):
            raise self._refused(
                next(iter(tensors.values())),
                f"its config's `target_parameters` name {len(wrapped)} parameters of {printable(own)}, and it is for"
                f" one more",
            )
        elif (parameter := wrapped[-1 - nested]) in self.model.experts:
            self._read_experts(parameter, self.model.experts[parameter], tensors)
        else:
            self._add_product(parameter, parameter, tensors)

    def _add_product(self, parameter: str, path: str, tensors: Mapping[str, str]) -> None:
        """Add a LoRA's matrices, magnitude and bias; `path` is the name that rank and alpha patterns match."""
        first, module = next(iter(tensors.values())), parameter.rpartition(".")[0]
        place = self._place(parameter, first)
        by_module = path != parameter
        # The config may use the name in training or in memory. Without targets PEFT uses its own; tied modules need
        # none.
        called = (path.replace(_BASE, ""), place.parameter.removesuffix(".weight"))
        named = any(self.settings.names(each, place.form) for each in called) or self._is_tied(place)
        if by_module and self.settings.targets != [] and not named:
            raise self._refused(
                first,
                "its config's `target_modules` name no such module, so PEFT leaves it out: name it there, or take its"
                " tensors out",
            )
        names = ("lora_embedding_A", "lora_embedding_B") if place.form == "embedding" and by_module else _PAIR
        down, up = self._pair(tensors, names)
        if len(place.shape) != 2 or (place.form == "turned" and not by_module):
            raise self._refused(down, f"the base's {printable(place.stored)} is no matrix ({list(place.shape)})")
        rows, columns = place.shape[::-1] if place.form == "turned" else place.shape
        turned = names != _PAIR
        if turned:
            rows, columns = columns, rows
        rank = self.settings.rank_of(path)
        self._check_shape(down, (rank, columns))
        self._check_shape(up, (rows, rank))
        magnitude = self._magnitude(module, tensors, place, rows)
        scale = self.adapter.scale(path, rank)
        product = Product(self._of(down), self._of(up), scale, self.weight, magnitude, turned)
        self._step(place, product)
        self.pairs[path] = product
        self.apart |= self._is_tied(place)
        if (bias := tensors.get("lora_B.bias")) is not None:
            own = self._place(f"{module}.bias", bias)
            self._check_shape(bias, own.shape)
            self._step(own, Trained(self._of(bias), self.weight * scale, added=True))
        elif self.settings.own_bias:
            raise self._refused(up, "its config says `lora_bias`, and no lora_B.bias is beside it; was the file cut?")

    def _read_experts(self, parameter: str, experts: Experts, tensors: Mapping[str, str]) -> None:
        """Add a LoRA's matrices for all experts: expert e has r rows of A, and columns e, e + E … of B.

        Whether the matrices are transposed is read from their shapes; a pair for square matrices waits until all other
        pairs are known (`_packing`). Raises BadInput where shapes do not fit.
        """
        down, up = self._pair(tensors, _PAIR)
        if len(tensors) > 2:
            other = next(name for what, name in tensors.items() if what not in _PAIR)
            raise self._refused(other, "a parameter of experts has no such tensor")
        rank, count = self.settings.rank_of(parameter), experts.count
        shapes = [list(self.adapter.tensors[name].shape) for name in (down, up)]
        called = {
            turned: [[rank * count, inputs], [outputs, rank * count]]
            # Keys are 0 for outputs × inputs and 1 for transposed matrices.
            for turned, (outputs, inputs) in enumerate(
                ((experts.rows, experts.columns), (experts.columns, experts.rows))
            )
        }
        ways = [bool(turned) for turned, both in called.items() if shapes == both]
        if not ways:
            raise self._refused(
                down,
                f"shape {shapes[0]} and {shapes[1]} of its lora_B, where {count} experts of {experts.rows} by"
                f" {experts.columns}, by rank {rank}, call for {called[0][0]} and {called[0][1]}",
            )
        scale = self.adapter.scale(parameter, rank)
        product = Product(
            self._of(down), self._of(up), scale, self.weight, turned=ways[0] and not experts.turned, expert=(0, count)
        )
        if len(ways) > 1 and not experts.turned:
            self._square.append((parameter, product, experts))
        else:
            self._add_experts(parameter, product, experts)

    def _add_experts(self, parameter: str, product: Product, experts: Experts) -> None:
        """Add a product to the place of every expert's matrix, or to the one place of all experts."""
        for place in experts.places:
            number = None if place.expert is None else place.expert.number
            of_one = product if number is None else replace(product.of_expert(number), rows=place.rows)
            self._step(place, of_one)
        self.pairs[parameter] = product

    def _packing(self, product: Product, experts: Experts) -> bool:
        """Return whether a pair for square matrices is transposed, by the adapter's other pairs.

        Raises BadInput where these do not decide it.
        """
        others = {each.turned for each in self.pairs.values() if each.expert is not None}
        if len(others) != 1:
            raise self._refused(
                product.down.tensor,
                f"the experts' matrices are square ({experts.rows} by {experts.columns}), which PEFT packs one way up"
                " to 0.18 and the other way from 0.19; merge it with the PEFT that trained it",
            )
        return others.pop()

    def _pair(self, tensors: Mapping[str, str], names: tuple[str, str]) -> tuple[str, str]:
        """Return (A, B): the names of the two tensors.

        Raises BadInput where one is missing, or another tensor is surplus.
        """
        for there, absent in (names, names[::-1]):
            if absent not in tensors:
                known = tensors.get(there, next(iter(tensors.values())))
                raise self._refused(known, f"no {absent.removesuffix('.weight')} is beside it; was the file cut?")
        other = next((what for what in tensors if what not in (*names, *_BESIDE)), None)
        if other is not None:
            raise self._refused(tensors[other], "a module of this kind has no such tensor")
        return tensors[names[0]], tensors[names[1]]

    def _magnitude(self, module: str, tensors: Mapping[str, str], place: Place, rows: int) -> Imported | None:
        """Return DoRA's magnitude; None without DoRA. Raises BadInput where config and tensors differ about it."""
        found = tensors.get("lora_magnitude_vector")
        if (found is not None) != self.settings.dora:
            which = next(iter(tensors.values())) if found is None else found
            says, has = ("says `use_dora`", "no magnitude") if found is None else ("says no `use_dora`", "a magnitude")
            raise self._refused(which, f"the adapter's config {says}, and {has} is there; was a file cut or replaced?")
        if found is None:
            return None
        size = self.adapter.tensors[found].shape
        self._check_shape(found, (1, rows) if len(size) == 2 else (rows,))
        return self._of(found)

    def _add_tokens(self, module: str, tensor: str) -> None:
        """Add rows of embeddings that were trained separately (`trainable_token_indices`).

        Raises BadInput where the config lists no ids for the module, or ids that the base does not have.
        """
        module = module.removesuffix(_BASE)
        place = self._place(f"{module}.weight", tensor)
        ids = next((ids for name, ids in self.settings.tokens.items() if not name or ends(module, name)), None)
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
        self._step(place, step := Trained(self._of(tensor), self.weight, tuple(ids)))
        self.shared += [step] if place.form == "embedding" else []

    def _add_whole(self, tensor: str, name: str) -> None:
        """Add a parameter that was trained whole, or saved with the adapter.

        The first such tensor for embeddings or head may have another number of rows, which sets `rows`. Raises BadInput
        where the config does not name the parameter, or its shape does not fit.
        """
        path, _, key = _AS_LAID.sub(".", name).rpartition(".")
        place = self._place(f"{path}.{key}", tensor)
        below = _BASE in name
        biased = key == "bias" and (self.settings.biases == "all" or (self.settings.biases == "lora_only" and below))
        if not (biased or below or self.settings.saves(path) or place.form == "embedding" or is_head(path)):
            raise self._refused(tensor, "its config says neither `modules_to_save` nor `bias` of it")
        shape = self.adapter.tensors[tensor].shape
        if self.rows is None and shape[1:] == place.shape[1:] and self.model.has_tokens(place) and shape != place.shape:
            self.rows, place = shape[0], replace(place, shape=shape)
            if self.weight != 1.0:
                raise self._refused(tensor, "other rows than the base's, which count whole; leave `weight` out")
        self._check_shape(tensor, place.shape)
        # Inserted first: other changes of the tensor apply after it.
        self.steps.setdefault(place.parameter, []).insert(0, step := Trained(self._of(tensor), self.weight))
        if self._is_tied(place):
            alone = self.settings.saves(path)
            self.apart |= alone
            # If PEFT wrapped either of the two, the values inside belong to both.
            self.shared += [step] if (below or place.form == "embedding") and not alone else []

    def _is_tied(self, place: Place) -> bool:
        """Return whether a tensor is the embeddings or the head of a base that ties them."""
        if place.layer is not None or place.form not in ("linear", "embedding") or (tied := self.model.tied) is None:
            return False
        return place.parameter in (tied.reads.parameter, tied.head.parameter)

    def _heads_differ(self) -> bool:
        """Return whether a tied head has trained values that the embeddings do not have."""
        changed = (self.model.find(name) for name in self.steps)
        if (
            not any(place is not None and self._is_tied(place) for place in changed)
            or (tied := self.model.tied) is None
        ):
            return False
        own, other = (
            {
                (self.adapter.tensors[each.values.tensor].sha256, each.rows)
                for each in self.steps.get(name, ())
                if isinstance(each, Trained)
            }
            for name in (tied.head.parameter, tied.reads.parameter)
        )
        return not own <= other

    # Checks that everything is there.

    def _check_complete(self) -> None:
        """Raise BadInput where the config names a module and the adapter has no tensors for it."""
        settings = self.settings
        for place in self.model.places.values():
            if place.parameter in self.steps:
                continue
            module, _, key = place.parameter.rpartition(".")
            # PEFT may not have seen the modules of an image tower, so these must be complete only if one of the kind is
            # there.
            seen = module.startswith(f"{self.model.stack}.") or not _A_LAYER.search(module) or self._has_kind(module)
            if seen and key == "weight" and place.form in _LORA_FORMS and settings.names(module, place.form):
                raise self._lacking(place.parameter, "`target_modules`", of_expert=place.expert is not None)
            of_experts = self.model.experts.get(place.parameter)
            if settings.targets_parameter(place.parameter) and not (
                of_experts is not None and all(each.parameter in self.steps for each in of_experts.places)
            ):
                raise self._lacking(place.parameter, "`target_parameters`")
            if settings.saves(module):
                raise self._lacking(place.parameter, "`modules_to_save`")
            biased = settings.biases == "all" or (settings.biases == "lora_only" and f"{module}.weight" in self.steps)
            if key == "bias" and biased and module.startswith(f"{self.model.stack}."):
                raise self._lacking(place.parameter, f"`bias: {settings.biases}`")
        for name, ids in settings.tokens.items():
            tokens = {
                path.rpartition(".")[0]: [*s.rows]
                for path, steps in self.steps.items()
                for s in steps
                if isinstance(s, Trained) and s.rows
            }
            # PEFT saves the same rows of a tied pair once.
            same = self.model.tied is not None and ids in tokens.values()
            if not same and not any(not name or ends(path, name) for path in tokens):
                reads = (each.parameter for each in self.model.places.values() if each.form == "embedding")
                raise self._lacking(name or next(reads, "the embeddings"), "`trainable_token_indices`")

    def _has_kind(self, module: str) -> bool:
        """Return whether the adapter changes the same module in any layer."""
        return _A_LAYER.sub(".*.", module) in self._kinds

    @cached_property
    def _kinds(self) -> set[str]:
        """Return the changed modules' paths, with `*` for the layer's number."""
        return {_A_LAYER.sub(".*.", parameter.rpartition(".")[0]) for parameter in self.steps}

    def _check_used(self, tensors: Iterable[str]) -> None:
        """Raise BadInput where one of these tensors is in no step."""
        used = [each.tensor for steps in self.steps.values() for step in steps for each in step.inputs]
        if left := {*tensors} - set(used):
            raise self._refused(min(left), "surgeon has no place for it")

    # Small helpers.

    @property
    def _shown(self) -> str:
        """Return the adapter's name for messages."""
        return printable(self.called)

    def _refused(self, tensor: str, why: str) -> BadInput:
        """Return the error for a tensor of the adapter, with the reason."""
        return BadInput(f"{self._shown}: {printable(tensor)}: {why}; nothing is merged of an adapter in part")

    def _lacking(self, name: str, key: str, *, of_expert: bool = False) -> BadInput:
        """Return the error for a place that the config names under `key`, and for which the adapter has no tensors."""
        which = "one for another base"
        if of_expert:
            which = "trained where experts are no modules (then take the name out of `target_modules`)"
        return BadInput(
            f"{self._shown}: nothing for {printable(name)}, which {key} of its config names: half an adapter, or"
            f" {which}; nothing is merged in part"
        )

    def _place(self, name: str, tensor: str) -> Place:
        """Return the place of a parameter in the base.

        Raises BadInput, with the likely reason, where the base does not have it.
        """
        found = self.model.find(name)
        if found is None:
            why = "the adapter is for another base"
            if tensor.endswith(".lora_B.bias") and self.model.find(name.removesuffix("bias") + "weight"):
                why = "`lora_bias` goes into a module's own bias, and this has none; train it without `lora_bias`"
            above = accumulate(name.split(".")[:-2], "{}.{}".format)
            if not tensor.startswith(_PEFT) or ".lora_" in name or any(self.model.find(f"{m}.weight") for m in above):
                why = "no adapter of PEFT's has such a name"
            if inner := next((each for each in self.model.places if name.endswith(f".{each}")), ""):
                why = f"take `{printable(name.removesuffix(inner))}` out of the names, in a copy of the adapter"
            if name.startswith(_HEADS):
                why = "merge with PEFT, into the model with the head that it was trained with"
            raise self._refused(tensor, f"the base has no {printable(name)}: {why}")
        if not found.stored:
            raise self._refused(
                tensor, f"the base stores {printable(found.parameter)} in parts, as another's, or for several layers"
            )
        if self.rows is not None and self.model.has_tokens(found):
            return replace(found, shape=(self.rows, *found.shape[1:]))
        return found

    def _check_shape(self, tensor: str, expected: tuple[int, ...]) -> None:
        """Raise BadInput where a tensor of the adapter has another shape than `expected`."""
        shape = self.adapter.tensors[tensor].shape
        if shape != expected:
            turned = ": it is transposed, or A and B are exchanged" if shape == expected[::-1] and shape[1:] else ""
            raise self._refused(tensor, f"shape {list(shape)}, base and config call for {list(expected)}{turned}")

    def _of(self, tensor: str) -> Imported:
        """Return the recipe of a tensor of the adapter."""
        found = self.adapter.tensors[tensor]
        return Imported("adapter", self.called, tensor, found.dtype, found.shape)

    def _step(self, place: Place, step: Step) -> None:
        """Append a step to the steps of a place."""
        self.steps.setdefault(place.parameter, []).append(step)


_PAIR = ("lora_A.weight", "lora_B.weight")
_BESIDE = ("lora_magnitude_vector", "lora_B.bias")
_LORA_FORMS = ("linear", "turned", "embedding")


def name_for_peft(tensor: str, model: Model) -> str:
    """Return PEFT's name for an adapter's tensor, with the name of the base's module in it."""
    name = _SAVED.sub(".", unwrapped(tensor).removeprefix(_PEFT))
    if (found := _OF_MODULE.fullmatch(name)) is not None:
        module, what = found.groups()
        place = model.find(f"{module}.weight")
        # Experts' parts are no longer modules in transformers; PEFT finds them by their older names.
        if place is not None and ends(place.parameter, f"{module.rpartition('.')[2]}.weight"):
            name = place.parameter.removesuffix(".weight") + what
    return _PEFT + name


def sets_whole(step: Step) -> TypeGuard[Trained]:
    """Return whether a step replaces all rows by trained values, or adds trained values to all rows."""
    return isinstance(step, Trained) and step.rows is None
