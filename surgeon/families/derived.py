"""What is found out about a model type: its layers, their kinds, and what silences each.

From a config alone: the model is built without weights, and a twin with random ones is probed. Cached by the config.
Names of a checkpoint's tensors and their shapes are matched as transformers itself would load them.
"""

from __future__ import annotations

import contextlib
import copy
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from surgeon.checkpoint.header import FLOAT_DTYPES, QUANTISED_DTYPES, TensorInfo
from surgeon.checkpoint.own_code import OwnCode
from surgeon.checkpoint.trust import refuse_quantised
from surgeon.checkpoint.weights import QUANTISATION, quantisation
from surgeon.common.devices import one_thread
from surgeon.common.library import LOAD_FAILURES, first_line
from surgeon.errors import BadInput, printable
from surgeon.families.anatomy import (
    Anatomy,
    Derivation,
    LayerKind,
    Packed,
    layer_of,
    owner_of,
)
from surgeon.families.composing import composition_of
from surgeon.families.decoders import HINTS
from surgeon.families.encoder_blocks import encoder_composition, told_class
from surgeon.families.family import OWN_CONFIG, Family, Part, Sizes
from surgeon.families.grafted_config import config_with_grafts, head_with_grafts
from surgeon.families.grafting import prove_grafts
from surgeon.families.growth import grown
from surgeon.families.kinds import described_kinds, numbered
from surgeon.families.mixture import Mixture, groups_of, mixtures
from surgeon.families.names import Names, match
from surgeon.families.own_classes import code_of, like, trusted, written
from surgeon.families.proof import check_runs, layer_axis, prove, run_cached
from surgeon.families.quantised import check_stored, is_scale, left_out, packed_of, quantizer_of, renumbered, skips
from surgeon.families.roles import InMemory, with_roles
from surgeon.families.silence import Silence, in_words, silences, some_tokens
from surgeon.families.skeleton import Skeleton, build, is_known
from surgeon.families.twin import twin_of
from surgeon.families.whole_heads import heads_move
from surgeon.runtime.composition import Composition
from surgeon.runtime.states_rules import BANK

# Ids by which a model is built larger to see what grows with its vocabulary.
_MORE_WORDS = 1024
# Some divide their width by three, or have norms as wide as one head.
_ENCODER_HEADS = (2, 3, 1)
_NO_LAYERS = "layers are added to decoders alone"
# A twin has two heads; some code wants more.
_HEADS = (2, 4, 8)


@dataclass(frozen=True)
class Derived:
    """A model type as it was found: `kind_of[i]` is the number of layer `i`'s kind, `silence[kind]` what silences it.

    `mixture[kind]` are its experts, where it has any that are understood. `titles[kind]` names a kind for people;
    `heads` is how many a twin has. `seconds` is what finding it all took.
    """

    skeleton: Skeleton
    kind_of: tuple[int, ...]
    titles: tuple[str, ...]
    silence: tuple[Silence, ...]
    mixture: tuple[Mixture | None, ...]
    heads: int
    seconds: float

    @property
    def evidence(self) -> str:
        """What was proven, in one line."""
        if self.skeleton.encoder:
            kinds = f", {len(self.titles)} kinds" if len(self.titles) > 1 else ""
            return f"an encoder of {len(self.kind_of)} layers{kinds}; its controls are proven on a twin"
        found = in_words([each.values for each in self.silence])
        return f"proven on a twin in {self.seconds:.1f} s: {found}"


def derive(config: Mapping[str, Any]) -> Derived:
    """Find out about the model of a config.json. Raises BadInput where transformers cannot build it, or no stack."""
    return _derived(json.dumps(config, sort_keys=True))


@lru_cache(maxsize=8)
def _derived(kept: str) -> Derived:
    config = json.loads(kept)
    began = time.perf_counter()
    skeleton = build(config)
    count = len(skeleton.layers)
    if count < 1:
        raise BadInput(f"config.json: {count} layers; at least 1 is needed; {OWN_CONFIG}")
    keys = described_kinds(skeleton)
    left = skips(config, skeleton)
    kind_of = numbered(list(zip(keys, left, strict=True)))
    firsts = [kind_of.index(kind) for kind in range(max(kind_of) + 1)]
    found, mixed, heads = _unprobed(config, firsts) if skeleton.encoder else _probed(config, firsts)
    return Derived(
        skeleton=skeleton,
        kind_of=tuple(kind_of),
        titles=tuple(_title(keys[index], skeleton, index, _left_of(left[index], left)) for index in firsts),
        silence=tuple(found[index] for index in firsts),
        mixture=tuple(mixed[index] for index in firsts),
        heads=heads,
        seconds=time.perf_counter() - began,
    )


def _unprobed(
    config: Mapping[str, Any], layers: list[int]
) -> tuple[dict[int, Silence], dict[int, Mixture | None], int]:
    """The same of an encoder, to which no layer is added."""
    return dict.fromkeys(layers, Silence({}, _NO_LAYERS, {})), dict.fromkeys(layers), _encoder_heads(config)


def _encoder_heads(config: Mapping[str, Any]) -> int:
    """With how many heads a twin of an encoder runs; where it never does, what seeks its blocks will say why."""
    import torch

    for heads in _ENCODER_HEADS:
        with one_thread(), torch.no_grad(), contextlib.suppress(*LOAD_FAILURES):
            twin = twin_of(config, heads=heads)
            twin.model(input_ids=some_tokens(twin))
            return heads
    return _ENCODER_HEADS[0]


def _probed(config: Mapping[str, Any], layers: list[int]) -> tuple[dict[int, Silence], dict[int, Mixture | None], int]:
    """What silences these layers and what experts they have, found on a twin, and how many heads the twin has.

    These are as few as its code can run with.
    """
    failed: Exception | None = None
    for heads in _HEADS:
        try:
            with one_thread():
                twin = twin_of(config, heads=heads)
                return silences(twin, layers), mixtures(twin, layers), heads
        except Exception as error:  # whatever a model's code raises on sizes that it was not written for
            failed = failed or error
    assert failed is not None
    raise BadInput(
        f"config.json: a tiny twin of this {printable(str(config.get('model_type')))} does not run"
        f" ({first_line(failed)}), so nothing can be proven of it; {OWN_CONFIG}, or update transformers"
    ) from failed


def _left_of(left: tuple[str, ...], all_left: list[tuple[str, ...]]) -> list[str]:
    """What a layer does not quantise, where some other layer does."""
    return [name for name in left if any(name not in other for other in all_left)]


def _title(key: Any, skeleton: Skeleton, index: int, left: list[str]) -> str:
    """A kind by its type in the config, or by the classes of its blocks."""
    listed = [value.strip("'") for name, value in key[1] if name.endswith(("types", "type"))]
    blocks = [type(child).__name__ for _, child in skeleton.layers[index].named_children()]
    shown = ", ".join(dict.fromkeys(listed)) or ", ".join(name for name in blocks if "Norm" not in name)
    return f"{shown}, {left[0]} not quantised" if left else shown


@dataclass(frozen=True)
class _Found(Derivation):
    """A checkpoint of a derived model type."""

    config: Mapping[str, Any]
    derived: Derived
    names: Names
    packed: tuple[Mapping[str, Packed], ...]
    parts: tuple[tuple[Part, ...], ...]

    @property
    def evidence(self) -> str:  # type: ignore[override]
        """What was proven of the model type."""
        return self.derived.evidence

    @property
    def stack(self) -> str:  # type: ignore[override]
        """As `Derivation` says."""
        return self.derived.skeleton.stack

    @property
    def same_names(self) -> bool:
        """As `Derivation` says."""
        prefix = f"{self.derived.skeleton.model.base_model_prefix}."
        inside = all(
            targets == (suffix,) for layer in self.names.layers for suffix, targets in layer.items() if targets
        )
        outside = all(name.removeprefix(prefix) == t.removeprefix(prefix) for name, t in self.names.outer.items() if t)
        full = not self.names.converted and quantisation(self.config) is None
        return inside and outside and full and not self.derived.skeleton.path

    @property
    def composition(self) -> Composition:
        """The classes that carry grafts. Raises BadInput where there are none."""
        if code_of(self.config) is not None:
            raise BadInput(
                "config.json: `auto_map` names the base's own code, and grafts are composed of transformers' classes;"
                " use operations that add whole layers (insert_layers, stack_layers)"
            )
        return composition_for(json.dumps(self.config, sort_keys=True))

    @property
    def activation(self) -> str:
        """As `Derivation` says."""
        return self.composition.activation

    def blocks(self, layer: int) -> dict[str, str]:
        """As `Derivation` says."""
        if self.composition.encoder:
            modules = dict(self.derived.skeleton.layers[layer].named_modules())
            return {
                span.role: span.writes
                for span in self.composition.spans
                for reads, writes in ((modules.get(span.reads), modules.get(span.writes)),)
                if reads is not None and told_class(type(reads)) == span.reader
                if writes is not None and told_class(type(writes)) == span.writer
            }
        held = self.derived.skeleton.layers[layer]._modules
        found: dict[str, str] = {}
        for site in self.composition.sites:
            block = held.get(site.block)
            if block is not None and told_class(type(block)) == site.native:
                found.setdefault(site.role, site.block)
        return found

    def whole_heads(self, layer: int) -> bool:
        """As `Derivation` says."""
        kind = self.derived.kind_of[layer]
        first = self.derived.kind_of.index(kind)
        stem = f"{self.names.stem}{first}."
        places = {
            part.suffix: targets[0]
            for part in self.parts[kind]
            if len(targets := self.names.layers[first][part.suffix]) == 1
            and f"{stem}{part.suffix}" not in self.names.converted
        }
        return heads_move(self.config, first, self.parts[kind], places, _sizes(self.derived))

    def linear(self, layer: int) -> dict[str, tuple[int, ...]]:
        """As `Derivation` says."""
        modules = self.derived.skeleton.layers[layer].named_modules()
        elsewhere = _of_other_tokens(json.dumps(self.config, sort_keys=True), self.derived.heads)[layer]
        shapes = {name: _linear_shape(each) for name, each in modules if name not in elsewhere}
        return {name: shape for name, shape in shapes.items() if shape is not None}

    def grafted(
        self, trunk: Mapping[str, Any], order: Sequence[int], twins: Sequence[int], modules: Sequence[str]
    ) -> dict[str, Any]:
        """As `Derivation` says."""
        composition = self.composition
        head = head_with_grafts(composition, trunk)
        made = copy.deepcopy(dict(trunk))
        if twins:
            whole = [*order, *(order[twin] for twin in twins)]
            made = self._grown(whole, trunk=len(order))
            # It names modules of the trunk's layers, whose numbers branches do not change.
            made |= {key: copy.deepcopy(trunk[key]) for key in (QUANTISATION,) if key in trunk}
        made = left_out(made, modules, self.derived.skeleton)
        return config_with_grafts(composition, head, trunk, made)

    def prove_grafts(self, trunk: Mapping[str, Any], grafted: Mapping[str, Any]) -> None:
        """As `Derivation` says."""
        _prove_grafts(json.dumps([trunk, grafted, self.derived.heads], sort_keys=True))

    def grown(self, order: Sequence[int], opened: Sequence[int] = ()) -> dict[str, Any]:
        """As `Derivation` says."""
        made = self._grown(order)
        stack = f"{self.derived.skeleton.stack}."
        made = renumbered(self.config, made, order, (self.names.stem, stack))
        before = skips(self.config, self.derived.skeleton)
        after = skips(made, _skeleton(json.dumps(made, sort_keys=True))) if any(before) else [()] * len(order)
        for index, source in enumerate(order):
            if before[source] != after[index]:
                name = min(set(before[source]) ^ set(after[index]))
                raise BadInput(
                    f"config.json: `quantization_config` names modules in a way that surgeon cannot renumber: {name} of"
                    f" layer {index} would not be stored as layer {source}'s is; write out the names of its modules"
                )
        modules = [f"{stack}{index}.{name}" for index in opened for name in self._modules(order[index])]
        return written(left_out(made, modules, self.derived.skeleton))

    def _grown(self, order: Sequence[int], trunk: int | None = None) -> dict[str, Any]:
        return copy.deepcopy(_grown(json.dumps(self.config), tuple(order), trunk))

    def _modules(self, layer: int) -> list[str]:
        """The modules of a layer that hold its quantised tensors."""
        return list(dict.fromkeys(packed.module for packed in self.packed[self.derived.kind_of[layer]].values()))

    def prove(
        self,
        grown: Mapping[str, Any],
        order: Sequence[int],
        kept: Sequence[bool],
        silenced: Sequence[Mapping[str, float]],
        silent: Mapping[int, Mapping[str, float]],
    ) -> None:
        """As `Derivation` says."""
        in_memory = [self._in_memory(source, values) for source, values in zip(order, silenced, strict=True)]
        before = {layer: self._in_memory(layer, values) for layer, values in silent.items()}
        told = [self.config, like(grown, self.config), [*order], [*kept], in_memory, before, self.derived.heads]
        _prove(json.dumps(told, sort_keys=True))

    def check_runs(self, grown: Mapping[str, Any]) -> None:
        """As `Derivation` says."""
        told = [self.config, like(grown, self.config), self.derived.heads]
        _check_runs(json.dumps(told, sort_keys=True))

    def _in_memory(self, layer: int, values: Mapping[str, float]) -> dict[str, float]:
        """Values of tensors of a layer, given by suffix on disk, by the names of its parameters."""
        made = _made_of(_without_scales(self.names.layers[layer], self.config))
        return {
            name: values[suffixes[0]]
            for name, suffixes in made.items()
            if all(values.get(suffix) == values.get(suffixes[0]) is not None for suffix in suffixes)
        }

    @property
    def path(self) -> tuple[str, ...]:  # type: ignore[override]
        """As `Derivation` says."""
        return self.derived.skeleton.path

    def vocabulary_tensors(self, rows: int) -> dict[str, bool]:
        """As `Derivation` says: the model is built once more, with more ids, and what grew is compared."""
        before = self.derived.skeleton
        _check_one_vocabulary(before)
        more = copy.deepcopy(dict(self.config))
        part = more
        for key in self.path:
            part = part.setdefault(key, {})
        # As many as keep any padding inside the model as it was.
        part["vocab_size"] = rows + _MORE_WORDS
        after = build(more).model.state_dict(keep_vars=True)
        held = before.model.state_dict(keep_vars=True)
        wider = {
            name for name, value in held.items() if name not in after or tuple(after[name].shape) != tuple(value.shape)
        }
        reads = before.model.get_input_embeddings()
        writes = before.model.get_output_embeddings()
        known = {
            id(value): module is reads
            for module in (writes, reads)
            if module is not None
            for value in module.parameters()
        }
        found: dict[str, bool] = {}
        for name, target in self.names.outer.items():
            if target not in wider:
                continue
            wider.discard(target)
            grew = [other - one for one, other in zip(held[target].shape, after[target].shape, strict=False)]
            if id(held[target]) not in known or grew != [_MORE_WORDS, *[0] * (held[target].ndim - 1)]:
                raise BadInput(
                    f"{printable(name)}: has a part for each id of the vocabulary and is neither the embedding nor the"
                    " output head, so it cannot be extended; this model's vocabulary cannot grow"
                )
            found[name] = known[id(held[target])]
        # What is tied to the embedding is not stored.
        if left := sorted(wider - set(before.model.all_tied_weights_keys)):
            raise BadInput(
                f"{printable(left[0])}: has a part for each id of the vocabulary and is not stored as surgeon expects;"
                " this model's vocabulary cannot grow"
            )
        return found

    def layer_axis(self, grown: Mapping[str, Any], name: str, layers: int) -> int | None:
        """As `Derivation` says."""
        place = self.names.outer.get(name)
        before = self.derived.skeleton.model.state_dict(keep_vars=True).get(place or "")
        if before is None:
            return None
        built = _skeleton(json.dumps(like(grown, self.config), sort_keys=True))
        after = built.model.state_dict(keep_vars=True).get(place)
        if after is None or after.shape == before.shape:
            return None
        return layer_axis(tuple(before.shape), tuple(after.shape), len(self.derived.kind_of), layers)


@lru_cache(maxsize=8)
def _prove(told: str) -> None:
    """Once for what preview and apply ask alike."""
    config, grown, order, kept, silenced, silent, heads = json.loads(told)
    prove(config, grown, order, kept, silenced, {int(n): values for n, values in silent.items()}, heads=heads)


@lru_cache(maxsize=8)
def _check_runs(told: str) -> None:
    """Once for what preview and apply ask alike."""
    config, grown, heads = json.loads(told)
    check_runs(config, grown, heads=heads)


@lru_cache(maxsize=8)
def _prove_grafts(told: str) -> None:
    """Once for what preview and apply ask alike."""
    trunk, grafted, heads = json.loads(told)
    prove_grafts(trunk, grafted, heads=heads)


def _linear_shape(module: Any) -> tuple[int, int] | None:
    """A linear module's outputs and inputs, GPT-2's `Conv1D`, which stores its matrix transposed, among them."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    if not isinstance(module, nn.Linear | Conv1D):
        return None
    first, second = module.weight.shape
    return (second, first) if isinstance(module, Conv1D) else (first, second)


@lru_cache(maxsize=8)
def _of_other_tokens(kept: str, heads: int) -> tuple[frozenset[str], ...]:
    """Of each layer the linear modules that a twin runs on other tokens than the layer's own, by their path in it.

    Attention over a compressed cache (MLA) expands at every step what earlier tokens left there; experts see some of
    the tokens. What is decided for each token of a layer says nothing of those.
    """
    import torch
    from torch import nn

    twin = twin_of(json.loads(kept), heads=heads)
    found: list[set[str]] = [set() for _ in twin.layers]
    handles = []
    for layer, others in zip(twin.layers, found, strict=True):
        own = [0]

        def begins(_: nn.Module, given: Any, named: Any, own: list[int] = own) -> None:
            own[0] = (given[0] if given else named["hidden_states"]).shape[:-1].numel()

        def runs(_: nn.Module, given: Any, named: Any, own: Any, name: str, others: set[str]) -> None:
            if (given[0] if given else next(iter(named.values()))).shape[:-1].numel() != own[0]:
                others.add(name)

        handles.append(layer.register_forward_pre_hook(begins, with_kwargs=True))
        for name, module in layer.named_modules():
            if _linear_shape(module) is not None:
                hook = partial(runs, own=own, name=name, others=others)
                handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    # What cannot be run with a cache is found out, and refused, elsewhere.
    with one_thread(), torch.no_grad(), contextlib.suppress(*LOAD_FAILURES):
        run_cached(twin, some_tokens(twin))
    for handle in handles:
        handle.remove()
    return tuple(map(frozenset, found))


@lru_cache(maxsize=8)
def composition_for(kept: str) -> Composition:
    """The classes that carry grafts for a config.json, given as JSON text. Raises BadInput where there are none."""
    config = json.loads(kept)
    found = derive(config)
    firsts = [found.kind_of.index(kind) for kind in range(len(found.titles))]
    compose = encoder_composition if found.skeleton.encoder else composition_of
    return compose(config, found.skeleton, twin_of(config, heads=found.heads), firsts)


def _check_one_vocabulary(skeleton: Skeleton) -> None:
    """Raise BadInput where the decoder reads tokens by a second embedding, which has a size of its own."""
    from torch import nn

    reads = skeleton.model.get_input_embeddings()
    fields = {key: value for key, value in skeleton.text.to_dict().items() if "vocab_size" in key}
    sizes = {value: key for key, value in fields.items() if key != "vocab_size"}
    for name, module in skeleton.model.get_submodule(skeleton.stack.rpartition(".")[0]).named_modules():
        if isinstance(module, nn.Embedding) and module is not reads and module.num_embeddings in sizes:
            raise BadInput(
                f"{printable(name)}: tokens are read by this embedding too, of `{sizes[module.num_embeddings]}` rows,"
                " which surgeon does not extend; this model's vocabulary cannot grow"
            )


@lru_cache(maxsize=16)
def _grown(kept: str, order: tuple[int, ...], trunk: int | None) -> dict[str, Any]:
    """As `grown` says of a config.json, given as JSON text; nobody may change it."""
    config = json.loads(kept)
    return grown(config, derive(config).skeleton, order, trunk)


@lru_cache(maxsize=2)
def _skeleton(kept: str) -> Skeleton:
    return build(json.loads(kept))


def _without_scales(stored: Mapping[str, tuple[str, ...]], config: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """What holds a layer's values: a scale is copied along with the tensor whose numbers it tells the size of."""
    return {suffix: targets for suffix, targets in stored.items() if not is_scale(config, suffix)}


def _made_of(stored: Mapping[str, tuple[str, ...]]) -> dict[str, list[str]]:
    """Of each tensor of a layer in memory the suffixes on disk that it is made of."""
    made: dict[str, list[str]] = {}
    for suffix, targets in stored.items():
        for target in targets:
            made.setdefault(target, []).append(suffix)
    return made


def anatomy_of(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    own: OwnCode | None = None,
    *,
    carries_grafts: bool = False,
) -> Anatomy:
    """Dissect a checkpoint; with grafts, `config` is that of its trunk.

    `own` is the checkpoint's own code, which runs here. Raises BadInput where its model cannot be built, or names the
    first tensor that does not fit.
    """
    config = trusted(config, own)
    if not is_known(config):
        raise _unknown(config)
    refuse_quantised(config, passed=own is None)
    found = derive(config)
    _check_part(config, found.skeleton)
    tensors, grafts, bank = _without_grafts(tensors) if carries_grafts else (tensors, {}, {})
    check_stored(config, tensors)
    names = match(found.skeleton, found.kind_of, tensors, quantizer_of(config))
    if (named := next(filter(_of_bank, tensors), None)) is not None:
        raise BadInput(
            f"{printable(named)} ({tensors[named].file}): the name of control states, which this checkpoint has none"
            " of; take the tensor out"
        )
    _check_stems(names, (*tensors, *(info.name for graft in grafts.values() for info in graft.values())))
    _check_numbers(names, tensors)
    count = len(found.kind_of)
    layers = tuple({s: tensors[f"{names.stem}{index}.{s}"] for s in names.layers[index]} for index in range(count))
    firsts = [found.kind_of.index(kind) for kind in range(len(found.titles))]
    packed = tuple(packed_of(config, names.layers[first], layers[first]) for first in firsts)
    sizes = _sizes(found)
    # What stands beside the layers, as a decoder's control states do, begins as their names do.
    prefix, stem = _parted(names.stem, found.skeleton)
    _check_grafts(grafts, bank, count, prefix)
    kinds = tuple(
        _kind(found, kind, first, names, _without_scales(names.layers[first], config), layers[first], packed[kind])
        for kind, first in enumerate(firsts)
    )
    return Anatomy(
        family=Family(str(config["model_type"]), prefix, stem, found.skeleton.encoder),
        sizes=sizes,
        kinds=kinds,
        kind_of=found.kind_of,
        prefix=prefix,
        layers=layers,
        outer={name: tensors[name] for name in names.outer},
        layer_types=[found.titles[kind] for kind in found.kind_of] if len(found.titles) > 1 else None,
        tied=bool(found.skeleton.model.all_tied_weights_keys),
        grafted=tuple(grafts.get(index, {}) for index in range(count)),
        bank={name.removeprefix(prefix): info for name, info in bank.items()},
        idle=tuple(name for name, target in names.outer.items() if not target),
        beyond=tuple(
            {suffix: tensors[f"{names.stem}{index}.{suffix}"] for suffix in suffixes}
            for index, suffixes in names.beyond.items()
        ),
        derivation=_Found(config, found, names, packed, tuple(kind.parts for kind in kinds)),
    )


def _check_stems(names: Names, stored: Iterable[str]) -> None:
    """Raise BadInput where layers are called as surgeon cannot tell by a name, or something else is called so."""
    for name in stored:
        place = layer_of(name)
        if (place is not None and place[0]) != (name.startswith(names.stem) and names.stem):
            raise BadInput(
                f"{printable(name)}: layers of this checkpoint are called `{printable(names.stem)}…`, a name that"
                " surgeon does not know layers by; save the model with transformers once, and operate on that"
            )


def _check_numbers(names: Names, tensors: Mapping[str, TensorInfo]) -> None:
    """Raise BadInput for a tensor that stands among the layers and is none's, by a number that no reader would take."""
    above, _, own = names.stem.removesuffix(".").rpartition(".")
    for name, place in names.outer.items():
        if not place and name.startswith((names.stem, *((f"{own}.",) if above else ()))):
            raise BadInput(
                f"{printable(name)} ({tensors[name].file}): not the name of a layer's tensor; layers are numbered 0,"
                f" 1, 2, … in plain digits (`{names.stem}0.…`): rename it, or get the model's own files"
            )


def _unknown(config: Mapping[str, Any]) -> BadInput:
    """The error for a model type that neither transformers nor the checkpoint's own code has."""
    wraps = isinstance(config.get("text_config"), Mapping)
    hint = "; it wraps a text model: save that alone (its `text_config` and language_model tensors)" if wraps else ""
    return BadInput(
        f"config.json: model_type {printable(str(config['model_type']))!r} is no text decoder or encoder of the"
        f" installed transformers{hint}; update transformers, or use a model that it has"
    )


def _without_grafts(
    tensors: Mapping[str, TensorInfo],
) -> tuple[dict[str, TensorInfo], dict[int, dict[str, TensorInfo]], dict[str, TensorInfo]]:
    """A checkpoint's native tensors; those of grafts, by layer and suffix; and those of the bank of control states."""
    native: dict[str, TensorInfo] = {}
    grafts: dict[int, dict[str, TensorInfo]] = {}
    bank: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        place = layer_of(name)
        if place is not None and owner_of(place[2]) is not None:
            held = grafts.setdefault(place[1], {}).setdefault(place[2], info)
            if held is not info:
                raise BadInput(
                    f"{printable(name)} ({info.file}): to transformers the same tensor as {printable(held.name)}; keep"
                    " one of them"
                )
        elif _of_bank(name):
            bank[name] = info
        else:
            native[name] = info
    return native, grafts, bank


def _of_bank(name: str) -> bool:
    """Whether a tensor is called as those of control states are."""
    return layer_of(name) is None and (name.startswith(BANK) or f".{BANK}" in name)


def _parted(stem: str, skeleton: Skeleton) -> tuple[str, str]:
    """A stem as what it shares with the decoder's other tensors, and the name of its list: `model.`, `layers.`.

    Of an encoder the list may stand lower in the base model: `bert.`, `encoder.layer.`.
    """
    if skeleton.encoder:
        base = f"{skeleton.model.base_model_prefix}."
        prefix = base if stem.startswith(base) else ""
        return prefix, stem.removeprefix(prefix)
    above, dot, own = stem.removesuffix(".").rpartition(".")
    return above + dot, f"{own}."


def _check_grafts(
    grafts: Mapping[int, Mapping[str, TensorInfo]], bank: Mapping[str, TensorInfo], count: int, prefix: str
) -> None:
    """Raise BadInput for a graft's tensor where no layer, or no decoder, is."""
    for index, held in grafts.items():
        if index >= count:
            info = next(iter(held.values()))
            raise BadInput(
                f"{printable(info.name)} ({info.file}): the config has {count} layers, so there is no layer {index};"
                " is config.json another model's?"
            )
    for name, info in bank.items():
        if not name.startswith(f"{prefix}{BANK}"):
            raise BadInput(
                f"{printable(name)} ({info.file}): control states stand at `{printable(prefix)}{BANK}…` here; is"
                " config.json another model's?"
            )


def _sizes(found: Derived) -> Sizes:
    text, layers = found.skeleton.text, len(found.kind_of)
    fields = text.to_dict()

    def of(key: str) -> int:
        # By the class's own name for it; of a size that differs between layers there is no one value.
        value = fields.get(text.attribute_map.get(key, key))
        return value if type(value) is int else 0

    heads = of("num_attention_heads")
    return Sizes(
        layers=layers,
        hidden=of("hidden_size"),
        intermediate=of("intermediate_size"),
        heads=heads,
        kv_heads=of("num_key_value_heads") or heads,
        head_dim=of("head_dim") or (of("hidden_size") // heads if heads else 0),
        vocabulary=of("vocab_size"),
    )


def _check_part(config: Mapping[str, Any], skeleton: Skeleton) -> None:
    """Raise BadInput where settings of the text's part stand elsewhere, and transformers finds them all the same.

    What surgery changes would be written into the part, and the settings elsewhere no longer be read.
    """
    if not skeleton.path or isinstance(config.get(skeleton.path[0]), Mapping):
        return
    left_out = type(skeleton.text)().to_dict()
    told = skeleton.text.to_dict()
    if any(told[key] != left_out.get(key) for key in told if key not in ("dtype", "transformers_version")):
        raise BadInput(
            f"config.json: the text's settings do not stand in `{skeleton.path[0]}`, a layout of this type that surgeon"
            " does not know; save the config with transformers once (AutoConfig.from_pretrained(…).save_pretrained(…))"
        )


def _kind(
    found: Derived,
    kind: int,
    first: int,
    names: Names,
    stored: Mapping[str, tuple[str, ...]],
    tensors: Mapping[str, TensorInfo],
    packed: Mapping[str, Packed],
) -> LayerKind:
    """What layers of a kind hold, of which layer `first` is the lowest."""
    silence = found.silence[kind]
    parts: list[Part] = []
    for suffix, targets in stored.items():
        info = tensors[suffix]
        if not targets:
            continue
        if info.dtype not in (*FLOAT_DTYPES, *QUANTISED_DTYPES):
            raise BadInput(
                f"{printable(info.name)} ({info.file}): dtype {info.dtype}; surgery needs plain floating-point weights"
                f" ({', '.join(sorted(FLOAT_DTYPES))})"
            )
        parts.append(
            Part(suffix, info.shape, _part_kind(targets[0], info, silence), (), silence.identities.get(targets[0]))
        )
    values, reason = _on_disk(silence.values, stored)
    # What is quantised cannot be aligned.
    hint = HINTS.get(str(found.skeleton.model.config.model_type))
    hinted = hint.roles if hint is not None else {}
    known = parts if packed else with_roles(parts, _sizes(found), values, _in_memory(found, kind, first, names), hinted)
    refusal, groups = silence.reason or reason, groups_of(found.skeleton.text)
    return LayerKind(tuple(known), values, refusal, found.titles[kind], packed, groups)


def _in_memory(found: Derived, kind: int, first: int, names: Names) -> InMemory:
    held = found.skeleton.layers[first].state_dict(keep_vars=True)
    stem = f"{names.stem}{first}."
    return InMemory(
        targets=names.layers[first],
        shapes={name: tuple(value.shape) for name, value in held.items()},
        converted={
            suffix: names.converted[f"{stem}{suffix}"]
            for suffix in names.layers[first]
            if f"{stem}{suffix}" in names.converted
        },
        mixture=found.mixture[kind],
    )


def _part_kind(target: str, info: TensorInfo, silence: Silence) -> Any:
    if target in silence.identities:
        return "norm"
    if target.endswith("bias") or (target.removesuffix(".bias") + ".weight") in silence.identities:
        return "bias"
    return "weight" if len(info.shape) > 1 else "other"


def _on_disk(values: Mapping[str, float], stored: Mapping[str, tuple[str, ...]]) -> tuple[dict[str, float], str]:
    """What silences a layer, by suffix on disk; or why it cannot be said there."""
    found: dict[str, float] = {}
    for suffix, targets in stored.items():
        silent = [target for target in targets if target in values]
        if silent and (len(silent) < len(targets) or len({values[target] for target in silent}) > 1):
            other = next((target for target in targets if target not in values), targets[0])
            return {}, f"{suffix} is stored in one tensor with {other}, which must not be silent"
        if silent:
            found[suffix] = values[silent[0]]
    # As modules run, in whatever order a checkpoint stores its tensors.
    runs = {name: index for index, name in enumerate(values)}
    return dict(sorted(found.items(), key=lambda each: min(runs[name] for name in stored[each[0]]))), ""
