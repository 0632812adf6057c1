"""The anatomy of a checkpoint: which tensor is which part of which layer, and what its model type was found to be.

Of a checkpoint that carries grafts it is that of the native trunk beneath (grafted_config.py).
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
from surgeon.errors import printable
from surgeon.grafts.kinds import Kind
from surgeon.grafts.registry import kinds
from surgeon.runtime.rules import BRANCH

# Only a number right after a family's stem (`layers.`) at the known place is a layer index: renaming changes it
# alone, never a substring. Text decoders stand under these words: never under those of a tower for images or sound.
_TEXT_STEM = (
    r"(?:(?:model|language_model|text_model|transformer|decoder|backbone|gpt_neox\w*|biogpt|rwkv|llm|lm|thinker|base_model)\.)*"
    r"(?:layers?|h|blocks?)\."
    # Of an encoder's name, or a model's own: CPM-Ant, GIT, ProphetNet; Qianfan-OCR as transformers saves it.
    r"|(?:cpmant|git|language_model\.model)\.encoder\.layers?\."
    r"|prophetnet\.decoder\.layers\."
)


# The same of encoders, which stand under their model type's name, or alone.
_ENCODER_STEM = (
    r"(?:(?:\w*bert\w*|bros|canine|data2vec_text|electra|ernie|esmc?|fnet|gte|layoutlm\w*|lilt|longformer|luke"
    r"|markuplm|mpnet|mra|new|nystromformer|roformer|splinter|tapas|transformer|yoso)\.(?:(?:encoder|transformer)\.)?layers?"
    r"|(?:encoder|transformer)\.layer)\."
)


@cache
def _layer_name() -> re.Pattern[str]:
    return re.compile(
        rf"(?P<stem>{_TEXT_STEM}|{_ENCODER_STEM})"
        r"(?P<index>0|[1-9][0-9]{0,8})\.(?P<suffix>.+)",
        re.DOTALL,
    )


# The names of LayerNorm's parts in checkpoints older than PyTorch's LayerNorm; transformers accepts both.
OLD_NORMS = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}

# What predicts further tokens and is no layer above the stack.
_FURTHER = re.compile(r"(?:^|\.)mtp\w*\.")


# Of the quantised dtypes those whose numbers surgeon reads in no layout.
_UNREAD = tuple(dtype for dtype in QUANTISED_DTYPES if dtype not in ("F8_E4M3", "U8"))


def within(name: str, block: str) -> bool:
    """Whether a module or tensor of a layer belongs to one of its blocks, given as `Derivation.blocks` names it."""
    return any(name == path or name.startswith(f"{path}.") for path in block.split())


@dataclass(frozen=True)
class LayerKind:
    """What layers of one kind hold: their `parts`, and the values to store, by suffix, that silence such a layer.

    `refusal` says why none can (then `silence` is empty); `title` names the kind where a model has several. `packed`
    are the quantised tensors, by suffix, of which new layers hold the numbers in full precision. `expert_groups` is how
    many groups its experts form, some of which a router chooses first.
    """

    parts: tuple[Part, ...]
    silence: Mapping[str, float]
    refusal: str = ""
    title: str = ""
    packed: Mapping[str, Packed] = field(default_factory=dict)
    expert_groups: int = 1

    @cached_property
    def opened(self) -> LayerKind:
        """The same kind in full precision: no quantised tensor, no scales."""
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
        """Whether layers of both kinds hold the same tensors and are silent by the same values.

        They may differ in a setting, as layers with sliding and with full attention do.
        """
        # In whatever order their tensors are stored.
        one, two = ({part.suffix: part for part in kind.parts} for kind in (self, other))
        return (one, self.silence, self.expert_groups) == (two, other.silence, other.expert_groups)

    def name_opened(self, suffix: str) -> str:
        """What a tensor is called in full precision."""
        return self.packed[suffix].suffix if suffix in self.packed else suffix


@dataclass(frozen=True)
class Found:
    """What was found of a base beside its tensors: `kinds[kind_of[i]]` is layer `i`'s kind.

    With `prefix` begin the names of what a graft adds outside the layers (`model.` or nothing). `idle` are tensors
    outside the layers that no model of this config has a place for: they are copied like any other, and compute
    nothing.
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

    `layers[i]` maps a tensor's suffix (`self_attn.q_proj.weight`) to its entry in the header; `outer`
    maps full names outside the layers, and of blocks that several layers run (shared.py). Of a base that carries
    grafts, family, sizes and layers are those of its trunk; `grafted[i]` holds the tensors of a layer's grafts, `bank`
    those of control states, by what follows the prefix.

    `derivation` is what was found out about the model type; `beyond` are tensors of layers above the stack, which
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
        """The parts of a layer of a model whose layers are all of one kind (of the first, where there are several)."""
        return self.kinds[0].parts

    @property
    def pattern(self) -> tuple[tuple[int, str], ...]:
        """Of each layer its kind's number and title: what is equal for layers that can stand in each other's place."""
        types = self.layer_types or [self.kinds[kind].title for kind in self.kind_of]
        kinds: dict[str, set[int]] = {}
        for kind, title in zip(self.kind_of, types, strict=True):
            kinds.setdefault(title, set()).add(kind)
        # What differs in other things than its title says (a router that the first of them has not) has a number too.
        return tuple(
            (kind, title if len(kinds[title]) == 1 else f"{title} (kind {kind})".strip())
            for kind, title in zip(self.kind_of, types, strict=True)
        )

    @property
    def twins(self) -> tuple[int, ...]:
        """The layers that have an expanded twin."""
        return tuple(index for index, held in enumerate(self.grafted) if any(map(in_branch, held)))

    @property
    def further(self) -> dict[str, TensorInfo]:
        """The tensors that predict further tokens (MTP), by name: of layers above the stack, or called `mtp.…`."""
        above = {info.name: info for tensors in self.beyond for info in tensors.values()}
        return above | {name: self.outer[name] for name in self.idle if _FURTHER.search(name)}

    @property
    def shared(self) -> tuple[str, ...]:
        """The tensors of blocks that several layers run, by name."""
        return tuple(name for name in self.outer if layer_of(name) is not None)

    @property
    def unread(self) -> TensorInfo | None:
        """A quantised tensor of a layer of which nothing in full precision can be made; None where there is none."""
        for kind, tensors in zip(self.kind_of, self.layers, strict=True):
            for part in self.kinds[kind].parts:
                # Norms of old checkpoints may have other names.
                found = tensors.get(part.suffix)
                if found is not None and found.dtype in _UNREAD:
                    return found
        return None

    def unused(self, layer: int) -> frozenset[str]:
        """The suffixes of a layer's tensors that are buffers of old versions of transformers, which nothing reads."""
        kind, held = self.kinds[self.kind_of[layer]], self.layers[layer]
        parts = {part.suffix for part in kind.parts}
        # Of quantised layers, scales are no parts either.
        if any(held[suffix].dtype in QUANTISED_DTYPES for suffix in parts & held.keys()):
            return frozenset()
        return frozenset(suffix for suffix in held.keys() - parts if not suffix.endswith(tuple(OLD_NORMS)))

    def outer_name(self, suffix: str) -> str:
        """The full name of a tensor of the base model that belongs to no layer."""
        return f"{self.prefix}{suffix}"

    def layer_name(self, index: int, suffix: str) -> str:
        """The full name of a layer's tensor."""
        return f"{self.family.stem}{index}.{suffix}"

    def module_name(self, index: int, path: str) -> str:
        """What transformers' model calls a module of a layer, whose tensors may be stored under another name."""
        return f"{self.derivation.stack}.{index}.{path}"

    def blocks(self, layer: int) -> Mapping[str, str]:
        """What a layer calls the blocks beside which grafts can stand, by their usual name (ATTENTION, FFN)."""
        return self.derivation.blocks(layer)

    def linear(self, layer: int) -> Mapping[str, tuple[int, ...]]:
        """The linear modules of a layer by their path in it, with their shape (out × in)."""
        return self.derivation.linear(layer)


def with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The config that has transformers load numbers in this dtype, wherever it names one."""
    made = {key: with_dtype(each, dtype) if isinstance(each, Mapping) else each for key, each in config.items()}
    named = [key for key in ("dtype", "torch_dtype") if made.get(key) is not None]
    # The text's part is read by its own name, and the top by the newer one.
    return made | dict.fromkeys(named or (["dtype"] if "model_type" in made else []), dtype)


def layer_of(name: str) -> tuple[str, int, str] | None:
    """A tensor's name as (text before the number, layer, suffix); None outside the layers."""
    found = _layer_name().fullmatch(name)
    return (found["stem"], int(found["index"]), found["suffix"]) if found else None


def places_of(names: Iterable[str]) -> dict[str, tuple[str, int, str]]:
    """Where tensors stand, as `layer_of` says, by their names; without those outside the layers."""
    return {name: place for name in names if (place := layer_of(name)) is not None}


def of_graft(name: str) -> bool:
    """Whether a tensor is of a graft, by its name."""
    place = layer_of(name)
    return place is not None and owner_of(place[2]) is not None


def renumbered(name: str, layers: Mapping[int, int]) -> str:
    """The name with its layer's new number, unchanged outside the layers. Raises KeyError where `layers` lacks it."""
    place = layer_of(name)
    if place is None:
        return name
    stem, index, suffix = place
    return f"{stem}{layers[index]}.{suffix}"


def owner_of(suffix: str) -> Kind | None:
    """Which kind of graft a layer's tensor belongs to, by what follows `layers.{i}.`; None for a native one."""
    claiming = [kind for kind in kinds().values() if kind.claims(suffix)]
    # A twin's tensors are the twin's where no graft inside it claims them.
    return next((kind for kind in claiming if not kind.branching), next(iter(claiming), None))


def in_branch(suffix: str) -> bool:
    """Whether a layer's tensor stands in its expanded twin."""
    return suffix.startswith(BRANCH)


def without_a_place(names: Sequence[str]) -> str:
    """A line that names tensors which the model has no place for."""
    shown = ", ".join(printable(name) for name in names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"the model has no place for {shown}{more}: carried along byte for byte, computing nothing"
