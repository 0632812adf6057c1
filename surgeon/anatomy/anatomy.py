"""The anatomy of a checkpoint: which tensor is which part of which layer, and what was found about its model type.

The anatomy of a checkpoint that carries grafts describes the native trunk without them (grafted_config.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

from surgeon.anatomy.derivation import Derivation
from surgeon.anatomy.family import Family, Packed, Part, Sizes
from surgeon.checkpoint.header import QUANTISED_DTYPES, TensorInfo
from surgeon.common.formatting import listed
from surgeon.grafts.kinds import Kind
from surgeon.grafts.registry import kinds
from surgeon.runtime.rules import BRANCH

# Only a number right after a family's stem (`layers.`) at a known place is a layer index. So renaming changes only the
# index, never another substring. Text decoders have these words in their names; towers for images or sound have others.
_TEXT_STEM = (
    r"(?:(?:model|language_model|text_model|transformer|decoder|backbone|gpt_neox\w*|biogpt|rwkv|llm|lm|thinker|base_model)\.)*"
    r"(?:layers?|h|blocks?)\."
    # Decoders whose stack is called `encoder` or has the model's name: CPM-Ant, GIT, ProphetNet; Qianfan-OCR as
    # transformers saves it.
    r"|(?:cpmant|git|language_model\.model)\.encoder\.layers?\."
    r"|prophetnet\.decoder\.layers\."
)


# The stems of encoders: under the name of their model type, or without any.
_ENCODER_STEM = (
    r"(?:(?:\w*bert\w*|bros|canine|data2vec_text|electra|ernie|esmc?|fnet|gte|layoutlm\w*|lilt|longformer|luke"
    r"|markuplm|mpnet|mra|new|nystromformer|roformer|splinter|tapas|transformer|yoso)\.(?:(?:encoder|transformer)\.)?layers?"
    r"|(?:encoder|transformer)\.layer)\."
)


@cache
def _layer_name() -> re.Pattern[str]:
    """Return the pattern of a layer tensor's name: `stem` before the number, `index`, and `suffix` after it."""
    return re.compile(
        rf"(?P<stem>{_TEXT_STEM}|{_ENCODER_STEM})"
        r"(?P<index>0|[1-9][0-9]{0,8})\.(?P<suffix>.+)",
        re.DOTALL,
    )


# The names of LayerNorm's parts in checkpoints older than PyTorch's LayerNorm; transformers accepts both.
OLD_NORMS = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}

# Names of modules that predict further tokens (MTP) and are not numbered as layers above the stack.
_FURTHER = re.compile(r"(?:^|\.)mtp\w*\.")


# The quantised dtypes whose numbers surgeon cannot read in any layout.
_UNREAD = tuple(dtype for dtype in QUANTISED_DTYPES if dtype not in ("F8_E4M3", "U8"))


@dataclass(frozen=True)
class LayerKind:
    """A kind of layers: the `parts` that each contains, and the values to store, by suffix, that silence such a layer.

    `refusal` gives the reason where no values silence it (then `silence` is empty). `title` names the kind where a
    model has several kinds. `packed` are the quantised tensors, by suffix; new layers hold their numbers in full
    precision. `expert_groups` is the number of groups of its experts, from which the router first chooses some; 1
    without groups.
    """

    parts: tuple[Part, ...]
    silence: Mapping[str, float]
    refusal: str = ""
    title: str = ""
    packed: Mapping[str, Packed] = field(default_factory=dict)
    expert_groups: int = 1

    @cached_property
    def opened(self) -> LayerKind:
        """The same kind in full precision: without quantised tensors and without scales."""
        if not self.packed:
            return self
        return replace(
            self,
            parts=tuple(
                part
                if (found := self.packed.get(part.suffix)) is None
                else replace(part, suffix=found.suffix, shape=found.shape)
                for part in self.parts
            ),
            silence={self.name_opened(suffix): value for suffix, value in self.silence.items()},
            packed={},
        )

    def is_like(self, other: LayerKind) -> bool:
        """Return whether layers of both kinds hold the same tensors and are silenced by the same values.

        The kinds may differ in a setting, as layers with sliding and with full attention do.
        """
        # The order in which tensors are stored does not matter.
        one, two = ({part.suffix: part for part in kind.parts} for kind in (self, other))
        return (one, self.silence, self.expert_groups) == (two, other.silence, other.expert_groups)

    def name_opened(self, suffix: str) -> str:
        """Return the suffix that a tensor has in full precision."""
        return self.packed[suffix].suffix if suffix in self.packed else suffix


@dataclass(frozen=True)
class Found:
    """The findings about a base other than its tensors: `kinds[kind_of[i]]` is layer `i`'s kind.

    `prefix` begins the names of the tensors that a graft adds outside the layers (`model.` or empty). `idle` are
    tensors outside the layers for which no model of this config has a place: they are copied like all others and
    compute nothing.
    """

    family: Family
    sizes: Sizes
    kinds: tuple[LayerKind, ...]
    kind_of: tuple[int, ...]
    prefix: str
    layer_types: list[str] | None
    tied: bool
    idle: tuple[str, ...]


@dataclass(frozen=True)
class Anatomy(Found):
    """A base checkpoint by parts.

    `layers[i]` maps a tensor's suffix (`self_attn.q_proj.weight`) to its entry in the header. `outer` maps full names
    of tensors outside the layers to their entries, and also the tensors of blocks that several layers run (shared.py).
    For a base that carries grafts, family, sizes and layers describe its trunk; `grafted[i]` holds the tensors of a
    layer's grafts, and `bank` those of control states, by the name after the prefix.

    `derivation` answers questions about the model type. `beyond` are the tensors of layers above the stack, which
    predict further tokens, by layer and suffix.
    """

    layers: tuple[dict[str, TensorInfo], ...]
    outer: dict[str, TensorInfo]
    grafted: tuple[dict[str, TensorInfo], ...]
    bank: dict[str, TensorInfo]
    derivation: Derivation
    beyond: tuple[dict[str, TensorInfo], ...] = ()

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of a layer, for a model whose layers are all of one kind (of the first kind, where there are
        several).
        """
        return self.kinds[0].parts

    @property
    def pattern(self) -> tuple[tuple[int, str], ...]:
        """For each layer its kind's number and title: equal for layers that can replace each other."""
        types = self.layer_types or [self.kinds[kind].title for kind in self.kind_of]
        kinds: dict[str, set[int]] = {}
        for kind, title in zip(self.kind_of, types, strict=True):
            kinds.setdefault(title, set()).add(kind)
        # Kinds with the same title that differ otherwise (one has a router, say) get their number in the title too.
        return tuple(
            (kind, title if len(kinds[title]) == 1 else f"{title} (kind {kind})".strip())
            for kind, title in zip(self.kind_of, types, strict=True)
        )

    @property
    def twins(self) -> tuple[int, ...]:
        """The numbers of the layers that have an expanded twin (a branch)."""
        return tuple(index for index, held in enumerate(self.grafted) if any(map(in_branch, held)))

    @property
    def further(self) -> dict[str, TensorInfo]:
        """The tensors that predict further tokens (MTP), by name: those of layers above the stack, and those called
        `mtp.…`.
        """
        above = {info.name: info for tensors in self.beyond for info in tensors.values()}
        return above | {name: self.outer[name] for name in self.idle if _FURTHER.search(name)}

    @property
    def shared(self) -> tuple[str, ...]:
        """The names of the tensors of blocks that several layers run."""
        return tuple(name for name in self.outer if layer_of(name) is not None)

    @property
    def unread(self) -> TensorInfo | None:
        """A quantised tensor of a layer that surgeon cannot convert to full precision; None where there is none."""
        for kind, tensors in zip(self.kind_of, self.layers, strict=True):
            for part in self.kinds[kind].parts:
                # Norms of old checkpoints may have other names.
                found = tensors.get(part.suffix)
                if found is not None and found.dtype in _UNREAD:
                    return found
        return None

    def unused(self, layer: int) -> frozenset[str]:
        """Return the suffixes of a layer's tensors that nothing reads: buffers of old versions of transformers."""
        kind, held = self.kinds[self.kind_of[layer]], self.layers[layer]
        parts = {part.suffix for part in kind.parts}
        # In quantised layers, scales are not parts either.
        if any(held[suffix].dtype in QUANTISED_DTYPES for suffix in parts & held.keys()):
            return frozenset()
        return frozenset(suffix for suffix in held.keys() - parts if not suffix.endswith(tuple(OLD_NORMS)))

    def outer_name(self, suffix: str) -> str:
        """Return the full name of a tensor of the base model that belongs to no layer."""
        return f"{self.prefix}{suffix}"

    def layer_name(self, index: int, suffix: str) -> str:
        """Return the full name of a layer's tensor."""
        return f"{self.family.stem}{index}.{suffix}"

    def module_name(self, index: int, path: str) -> str:
        """Return the name of a layer's module in transformers' model; its tensors may be stored under another name."""
        return f"{self.derivation.stack}.{index}.{path}"

    def blocks(self, layer: int) -> Mapping[str, str]:
        """Return the paths of a layer's blocks next to which grafts can run, by the usual name (ATTENTION, FFN)."""
        return self.derivation.blocks(layer)

    def linear(self, layer: int) -> Mapping[str, tuple[int, ...]]:
        """Return the shape (out × in) of each linear module of a layer, by its path in the layer."""
        return self.derivation.linear(layer)


def with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return the config with this dtype in place of every dtype that it names, so that transformers loads in it.

    A part with a `model_type` that names no dtype gets the field `dtype`.
    """
    made = {key: with_dtype(each, dtype) if isinstance(each, Mapping) else each for key, each in config.items()}
    named = [key for key in ("dtype", "torch_dtype") if made.get(key) is not None]
    # Where a part names no dtype, a part with a `model_type` gets the newer field, `dtype`.
    return made | dict.fromkeys(named or (["dtype"] if "model_type" in made else []), dtype)


def layer_of(name: str) -> tuple[str, int, str] | None:
    """Split a tensor's name into (text before the number, layer, suffix); return None for one outside the layers."""
    found = _layer_name().fullmatch(name)
    return (found["stem"], int(found["index"]), found["suffix"]) if found else None


def places_of(names: Iterable[str]) -> dict[str, tuple[str, int, str]]:
    """Return the result of `layer_of` for each name; names outside the layers are left out."""
    return {name: place for name in names if (place := layer_of(name)) is not None}


def of_graft(name: str) -> bool:
    """Return whether a tensor belongs to a graft, by its name."""
    place = layer_of(name)
    return place is not None and owner_of(place[2]) is not None


def renumbered(name: str, layers: Mapping[int, int]) -> str:
    """Return the name with its layer's new number, or unchanged outside the layers.

    Raises KeyError where `layers` lacks the old number.
    """
    place = layer_of(name)
    if place is None:
        return name
    stem, index, suffix = place
    return f"{stem}{layers[index]}.{suffix}"


def owner_of(suffix: str) -> Kind | None:
    """Return the kind of graft that a layer's tensor belongs to, by the text after `layers.{i}.`; None for a native
    tensor.
    """
    claiming = [kind for kind in kinds().values() if kind.claims(suffix)]
    # A tensor inside an expanded twin belongs to the twin only where no other graft inside it claims the tensor.
    return next((kind for kind in claiming if not kind.branching), next(iter(claiming), None))


def in_branch(suffix: str) -> bool:
    """Return whether a layer's tensor belongs to its expanded twin."""
    return suffix.startswith(BRANCH)


def without_a_place(names: Sequence[str]) -> str:
    """Return a line that names tensors for which the model has no place."""
    return f"the model has no place for {listed(names, 3)}: carried along byte for byte, computing nothing"
