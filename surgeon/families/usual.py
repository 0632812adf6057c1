"""Anatomies of usual models from a table that surgeon ships (usual.json), for what reads alone and proves nothing.

Deriving a base takes seconds, nearly all of them the import of torch and transformers. What comes out depends on sizes
in ways that are known beforehand, so the table holds it for each usual type and its settings, shapes written as names
of sizes (`query`, `2*intermediate`). `python -m tests.usual` writes the table, from what is derived of configs whose
sizes are all different. An entry counts only where nothing that it followed from has changed: the files of surgeon that
derive, transformers' version and files, and the config, each field of which must be one that the table knows, with a
value of a form that was tried. The checkpoint must hold exactly the tensors expected, in their shapes. Whatever does
not fit, there is no entry, and the base is derived.
"""

from __future__ import annotations

import copy
import importlib.util
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from surgeon.checkpoint.header import FLOAT_DTYPES, TensorInfo
from surgeon.errors import BadInput
from surgeon.families.anatomy import Anatomy, Derivation, LayerKind
from surgeon.families.decoders import HINTS
from surgeon.families.deferred import Deferred
from surgeon.families.family import Family, Part, Sizes
from surgeon.families.grafted_config import config_with_grafts, head_with_grafts
from surgeon.families.growth import grown_part
from surgeon.families.kinds import numbered
from surgeon.families.settings import check_settings, check_sizes
from surgeon.families.silence import in_words
from surgeon.families.skeleton import check_counts
from surgeon.families.usual_table import (
    ANY_TEXT,
    LABELS,
    NUMBERS,
    TYPES,
    HeadEntry,
    LayerEntry,
    PartShape,
    Pattern,
    Period,
    TypeEntry,
    digest_of_files,
    form_of,
    read_table,
)
from surgeon.runtime.composition import Composition, read_composition


def known(
    config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], made: Callable[[], Derivation]
) -> Anatomy | None:
    """A base's anatomy by the table; None where it has no entry that counts for all of this base.

    Args:
        config: Its config.json, which carries no grafts and names no code of its own.
        tensors: Its tensors, by name.
        made: Derives the base, for what the table does not answer.
    """
    entry = _entry_of(config)
    if entry is None or not _is_tried(config, entry):
        return None
    numbers = sizes_of(config, entry)
    padding = entry.value(config, "pad_token_id")
    types = types_of(config, entry, numbers["layers"])
    layer, head = entry.first(entry.layers, config), entry.first(entry.heads, config)
    fits = _is_regular(numbers) and (padding is None or padding < numbers["vocabulary"])
    if types is None or layer is None or head is None or not fits:
        return None
    sorted_out = _sorted_out(entry, layer, head, numbers, tensors)
    if sorted_out is None:
        return None
    prefix, layers, outer = sorted_out
    kind_of = numbered(types)
    titles = [types[kind_of.index(kind)] for kind in range(max(kind_of) + 1)]
    base = _Base(entry, layer, head, numbers, types, config, tuple(outer))
    return Anatomy(
        family=Family(str(config["model_type"]), f"{prefix}{entry.stem}", entry.encoder),
        sizes=Sizes(**{key: numbers[key] for key in Sizes.__dataclass_fields__}),
        kinds=tuple(
            LayerKind(
                tuple(_part(suffix, layer.parts[suffix], numbers) for suffix in layers[kind_of.index(kind)]),
                dict(layer.silence),
                layer.refusal,
                title,
            )
            for kind, title in enumerate(titles)
        ),
        kind_of=tuple(kind_of),
        prefix=prefix,
        layers=layers,
        outer=outer,
        layer_types=types if len(titles) > 1 else None,
        tied=head.tied,
        grafted=tuple({} for _ in layers),
        bank={},
        idle=(),
        derivation=Listed(base, made),
    )


@dataclass(frozen=True)
class _Base:
    """A base that the table has entries for: these, its sizes, its layers' types and the names outside its layers."""

    entry: TypeEntry
    layer: LayerEntry
    head: HeadEntry
    numbers: Mapping[str, int]
    types: list[str]
    config: Mapping[str, Any]
    outer: tuple[str, ...]


class Listed(Deferred):
    """A derivation that answers from the table; what the table cannot answer is asked of the base's own.

    Nothing was proven of the base: that takes torch and transformers, and is left to who writes.
    """

    same_names = True
    proven = False
    path = ()

    def __init__(self, base: _Base, made: Callable[[], Derivation]) -> None:
        super().__init__(made)
        self._base = base
        self.stack = base.head.stack
        found = in_words([base.layer.silence for _ in set(base.types)])
        if base.entry.encoder:
            found = f"an encoder of {len(base.types)} layers"
        self.evidence = f"from surgeon's table of usual models: {found}; `apply` derives and proves it itself"

    @cached_property
    def _composition(self) -> Composition:
        base = self._base
        found = read_composition(str(base.config["model_type"]), base.entry.compositions[base.head.composition])
        return replace(found, activation=self.activation)

    @property
    def activation(self) -> str:
        """As `Derivation` says."""
        entry, config = self._base.entry, self._base.config
        return next((key for key in entry.activations if entry.value(config, key) is not None), "")

    def blocks(self, layer: int) -> Mapping[str, str]:
        """As `Derivation` says."""
        return dict(self._base.layer.blocks)

    def linear(self, layer: int) -> Mapping[str, tuple[int, ...]]:
        """As `Derivation` says."""
        return {path: shape_of(shape, self._base.numbers) for path, shape in self._base.layer.linear.items()}

    def whole_heads(self, layer: int) -> bool:
        """As `Derivation` says."""
        found = self._base.layer.whole_heads.get(grouping(self._base.numbers))
        return self.own.whole_heads(layer) if found is None else found

    def grown(self, order: Sequence[int], opened: Sequence[int] = ()) -> dict[str, Any]:
        """As `Derivation` says."""
        base = self._base
        # Of a single layer no list of the config is known to be of layers.
        if opened or len(order) < 2:
            return self.own.grown(order, opened)
        made = grown_part(base.config, len(base.types), base.entry.sizes["layers"].field, order)
        types = [base.types[source] for source in order]
        if base.entry.pattern is not None and types_of(made, base.entry, len(order)) != types:
            made[TYPES] = types
        return made

    def grafted(
        self, trunk: Mapping[str, Any], order: Sequence[int], twins: Sequence[int], modules: Sequence[str]
    ) -> dict[str, Any]:
        """As `Derivation` says."""
        head = head_with_grafts(self._composition, trunk)
        made = self.grown([*order, *(order[twin] for twin in twins)]) if twins else copy.deepcopy(dict(trunk))
        return config_with_grafts(self._composition, head, trunk, made)

    def vocabulary_tensors(self, rows: int) -> dict[str, bool]:
        """As `Derivation` says."""
        base = self._base
        if base.entry.encoder:
            return self.own.vocabulary_tensors(rows)
        below = base.entry.prefix
        known = {name.removeprefix(below): each for name, each in base.head.outer.items() if each.reads is not None}
        found = {
            name: known[short].reads is True for name in base.outer if (short := name.removeprefix(below)) in known
        }
        # Of a base model that was saved without its head, it is not known how the head would follow.
        if any(each.needed and name not in {n.removeprefix(below) for n in found} for name, each in known.items()):
            return self.own.vocabulary_tensors(rows)
        return found

    def parameters(self) -> dict[str, tuple[str, str]]:
        """As `Derivation` says."""
        base, below = self._base, self._base.entry.prefix
        if base.entry.encoder:
            return self.own.parameters()
        bare = not any(name.startswith(below) for name in base.outer)
        stem = f"{'' if bare else below}{base.entry.stem}"
        stored = {name if name in base.head.outer else f"{below}{name}": name for name in base.outer}
        forms = {True: "embedding", False: "linear", None: "other"}
        found = {name: (stored.get(name, ""), forms[each.reads]) for name, each in base.head.outer.items()}
        for index in range(len(base.types)):
            for suffix in base.layer.parts:
                form = "linear" if suffix.removesuffix(".weight") in base.layer.linear else "other"
                found[f"{self.stack}.{index}.{suffix}"] = f"{stem}{index}.{suffix}", form
        return found

    def untied(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """As `Derivation` says."""
        return {**copy.deepcopy(dict(config)), "tie_word_embeddings": False}

    def head_tensors(self) -> dict[str, str]:
        """As `Derivation` says."""
        base = self._base
        known, below = base.head.outer, base.entry.prefix
        reads = [name for name in base.outer if (known.get(name) or known[f"{below}{name}"]).reads is True]
        writes = [name for name, each in known.items() if each.reads is False]
        if base.entry.encoder or not base.head.tied or len(reads) != 1 or len(writes) != 1:
            return self.own.head_tensors()
        return {} if writes[0] in base.outer else {writes[0]: reads[0]}

    def text_model(self) -> tuple[dict[str, Any], dict[str, str]]:
        """As `Derivation` says, which refuses a usual model."""
        return self.own.text_model()

    def layer_axes(self, grown: Mapping[str, Any], layers: int) -> dict[str, int]:
        """As `Derivation` says: no tensor of a usual type outside its layers depends on their number."""
        return {}


def _entry_of(config: Mapping[str, Any]) -> TypeEntry | None:
    """The entry of a config's type, where all that it followed from is as it was."""
    table, model_type = read_table(), str(config["model_type"])
    entry = table.types.get(model_type) if table is not None else None
    if table is None or entry is None or HINTS.plugin_of(model_type) is not None:
        return None
    place = importlib.util.find_spec("transformers")
    if place is None or not place.submodule_search_locations or metadata.version("transformers") != table.transformers:
        return None
    above = Path(place.submodule_search_locations[0])
    files = {**table.files, **entry.files}
    return entry if all(digest_of_files(above, (name,)) == found for name, found in files.items()) else None


def _is_tried(config: Mapping[str, Any], entry: TypeEntry) -> bool:
    """Whether each field of a config is one that the entry knows, with a value of a form that it was tried with."""
    try:
        check_sizes(config)
        check_settings(config)
        check_counts(config)
    except BadInput:
        return False
    sizes = {size.field: size for size in entry.sizes.values()}
    for field, value in config.items():
        if field in sizes:
            null, zero = sizes[field].may_be_null, sizes[field].may_be_zero
            fits = field == LABELS or (null if value is None else type(value) is int and (zero or value != 0))
        elif field == NUMBERS:
            fits = LABELS in sizes
        elif field == TYPES:
            fits = entry.pattern is not None and _may_list(config, entry, entry.pattern)
        else:
            forms = entry.fields.get(field, ())
            fits = form_of(value) in forms or (isinstance(value, str) and ANY_TEXT in forms)
            # What is as long as the stack would be taken for a list of layers.
            fits = fits and not (isinstance(value, list) and len(value) == config["num_hidden_layers"])
        if not fits:
            return False
    return config.keys() >= set(entry.required) and _are_labels(config)


def _are_labels(config: Mapping[str, Any]) -> bool:
    """Whether labels, where there are any, have the numbers from 0 on, and are by name what they are by number."""
    names, numbers = config.get(LABELS), config.get(NUMBERS)
    if names is None:
        return numbers is None
    by_number = isinstance(names, dict) and list(names) == [str(number) for number in range(len(names))]
    if not by_number or not all(isinstance(name, str) for name in names.values()):
        return False
    return numbers is None or numbers == {name: int(number) for number, name in names.items()}


def _may_list(config: Mapping[str, Any], entry: TypeEntry, pattern: Pattern) -> bool:
    """Whether a config may list the types of layers that it lists."""
    types = set(config[TYPES] or ())
    known: Period | None = entry.first(pattern.listed, config)
    needed = (entry.value(config, pattern.needs[name]) for name in types & pattern.needs.keys())
    return known is not None and bool(types) and types <= set(known.types) and all(type(n) is int for n in needed)


def sizes_of(config: Mapping[str, Any], entry: TypeEntry) -> dict[str, int]:
    """The sizes of a config by their names: those of `Sizes`, what else tensors are as large as, and their products."""
    stated: dict[str, int] = {}
    for name, size in entry.sizes.items():
        value = config.get(size.field)
        value = size.default or 0 if value is None else value
        # Of labels, their number.
        stated[name] = len(value) if isinstance(value, dict) else value
    heads: int = stated["heads"]
    found = stated | {
        "kv_heads": stated.get("kv_heads") or heads,
        "head_dim": stated.get("head_dim") or stated["hidden"] // heads,
    }
    return found | {"query": heads * found["head_dim"], "kv": found["kv_heads"] * found["head_dim"]}


def _is_regular(numbers: Mapping[str, int]) -> bool:
    """Whether no size is so small, or so odd, that a layer may come out otherwise."""
    whole = numbers["hidden"] % numbers["heads"] == 0
    return whole and numbers["layers"] > 1 and numbers["heads"] > 1 and numbers["head_dim"] % 2 == 0


def grouping(numbers: Mapping[str, int]) -> str:
    """How query heads share key and value heads."""
    if numbers["heads"] == numbers["kv_heads"]:
        return "each its own"
    return "all one" if numbers["kv_heads"] == 1 else "in groups"


def types_of(config: Mapping[str, Any], entry: TypeEntry, layers: int) -> list[str] | None:
    """The type of each layer, or its kind's title; None where the class would list types in a way not known here."""
    if entry.pattern is None:
        return [entry.title] * layers
    if TYPES in config:
        return list(config[TYPES])
    found: Period | None = entry.first(entry.pattern.unlisted, config)
    return None if found is None else [found.types[index % len(found.types)] for index in range(layers)]


def shape_of(shape: Iterable[str], numbers: Mapping[str, int]) -> tuple[int, ...]:
    """A shape in numbers: a dimension is a sum of products of sizes and whole numbers."""

    def product(term: str) -> int:
        return math.prod(numbers[factor] if factor in numbers else int(factor) for factor in term.split("*"))

    return tuple(sum(product(term) for term in each.split("+")) for each in shape)


def _part(suffix: str, found: PartShape, numbers: Mapping[str, int]) -> Part:
    blocks = tuple((role, shape_of((rows,), numbers)[0]) for role, rows in found.blocks)
    return Part(suffix, shape_of(found.shape, numbers), found.kind, blocks, found.identity)


def _sorted_out(
    entry: TypeEntry, layer: LayerEntry, head: HeadEntry, numbers: Mapping[str, int], tensors: Mapping[str, TensorInfo]
) -> tuple[str, tuple[dict[str, TensorInfo], ...], dict[str, TensorInfo]] | None:
    """What names of the base model begin with, the tensors of each layer by suffix, and those outside.

    None where they are not exactly those expected, in their shapes and in full precision.
    """
    prefix = entry.prefix if any(name.startswith(entry.prefix) for name in tensors) else ""
    expected = {suffix: shape_of(part.shape, numbers) for suffix, part in layer.parts.items()}
    beside = {name: shape_of(each.shape, numbers) for name, each in head.outer.items()}
    needed = {name for name, each in head.outer.items() if each.needed and (prefix or name.startswith(entry.prefix))}
    # Of none there is no tensor.
    needed = {name for name in needed if 0 not in beside[name]}
    layers: tuple[dict[str, TensorInfo], ...] = tuple({} for _ in range(numbers["layers"]))
    outer: dict[str, TensorInfo] = {}
    above, by_number = f"{prefix}{entry.stem}", {str(index): layer for index, layer in enumerate(layers)}
    for name, info in tensors.items():
        number, _, suffix = name.removeprefix(above).partition(".")
        held = by_number.get(number) if name.startswith(above) else None
        shape = expected.get(suffix) if held is not None else beside.get(name if prefix else f"{entry.prefix}{name}")
        if shape != info.shape or info.dtype not in FLOAT_DTYPES:
            return None
        if held is not None:
            held[suffix] = info
        else:
            outer[name] = info
    whole = {name if prefix else f"{entry.prefix}{name}" for name in outer} >= needed
    return (prefix, layers, outer) if whole and all(len(held) == len(expected) for held in layers) else None
