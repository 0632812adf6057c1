"""The questions that a checkpoint of a derived model type answers: grown configs, grafts, and proofs on a twin."""

from __future__ import annotations

import contextlib
import copy
import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache, partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast, get_type_hints

from pydantic import JsonValue, TypeAdapter

from surgeon.anatomy.composing import activation_in, composition_of
from surgeon.anatomy.derived import derive
from surgeon.anatomy.family import Space
from surgeon.anatomy.grafted_config import config_with_grafts, head_with_grafts
from surgeon.anatomy.growth import grown, layer_axis
from surgeon.anatomy.inner_spaces import inner_spaces
from surgeon.anatomy.quantised import left_out, renumbered, skips
from surgeon.anatomy.running import run_cached
from surgeon.anatomy.seen import Seen
from surgeon.anatomy.silence import some_tokens
from surgeon.anatomy.skeleton import Skeleton, build
from surgeon.anatomy.stream_blocks import told_class
from surgeon.anatomy.twin import twin_of
from surgeon.checkpoint.weights import QUANTISATION
from surgeon.common.cache import digest_of
from surgeon.common.devices import one_thread
from surgeon.common.library import LOAD_FAILURES
from surgeon.errors import BadInput
from surgeon.grafts.composition import FFN, Composition

_Asked = ParamSpec("_Asked")
_Answer = TypeVar("_Answer")


def kept(ask: Callable[Concatenate[Derivation, _Asked], _Answer]) -> Callable[Concatenate[Derivation, _Asked], _Answer]:
    """Wrap a question of `Derivation` so that its answer is cached, across commands too; refusals are not cached.

    A question that only one operation asks is a function of its own, which takes the derivation. Answers are JSON data.
    """

    @wraps(ask)
    def asked(self: Derivation, /, *given: _Asked.args, **named: _Asked.kwargs) -> _Answer:
        """Return the cached answer to this question; without one, compute the answer with `ask` and cache it."""
        question = digest_of([ask.__module__, ask.__qualname__, *given, named])
        if question in self.answers:
            kind = get_type_hints(ask)["return"]
            return cast("_Answer", TypeAdapter(kind).validate_python(self.answers[question]))
        answer = ask(self, *given, **named)
        self.answers[question] = json.loads(json.dumps(answer))
        self.is_new = True
        return answer

    return asked


class Derivation:
    """The findings about a model type, and the questions that can be asked of it.

    `find` examines the base; it is called only where an answer is not cached. `answers` are cached answers of an
    earlier command, from `day`, by question. `is_new` is True once there are further answers.
    """

    def __init__(
        self,
        find: Callable[[], Seen],
        answers: Mapping[str, JsonValue] | None = None,
        day: datetime.date | None = None,
    ) -> None:
        self._find, self.day = find, day
        self.answers = dict(answers or {})
        self.is_new = day is None

    @cached_property
    def seen(self) -> Seen:
        """The examined base, from which answers are computed."""
        return self._find()

    @property
    def evidence(self) -> str:
        """A line with what was proven of the model type, and the date where the proof comes from the cache."""
        found = self._evidence()
        return found if self.is_new else f"{found} (on {self.day}, kept in the cache)"

    @kept
    def _evidence(self) -> str:
        """Return the findings in one line."""
        return self.seen.derived.evidence

    @property
    @kept
    def stack(self) -> str:
        """The name of the list of decoder layers in transformers' model."""
        return self.seen.skeleton.stack

    @property
    @kept
    def path(self) -> tuple[str, ...]:
        """The path of the text decoder's fields in config.json."""
        return self.seen.skeleton.path

    @property
    def composition(self) -> Composition:
        """The classes that carry grafts (`Composition`). Raises BadInput where there are none."""
        return composition_for(json.dumps(self.seen.config, sort_keys=True))

    @property
    @kept
    def activation(self) -> str:
        """The config field that names the backbone's activation; empty where there is none."""
        return self.composition.activation

    @kept
    def own_activation(self, layer: int) -> str:
        """Return the activation that base layer `layer`'s FFN applies, as observed on a twin.

        Empty where adapters have no such activation. For models whose config names none.
        """
        block = self.blocks(layer).get(FFN)
        if block is None:
            return ""
        twin = twin_of(self.seen.config, heads=self.seen.derived.heads)
        own, *others = block.split()
        return activation_in(twin, twin.layers[layer] if others else twin.layers[layer].get_submodule(own))

    @kept
    def blocks(self, layer: int) -> dict[str, str]:
        """Return the paths of base layer `layer`'s blocks next to which grafts can run, by usual name (ATTENTION, FFN).

        A block that is not a module is given by its first and last module, separated by a space. A layer need not have
        both blocks. Raises BadInput where the model's code cannot carry grafts.
        """
        held = {name: told_class(type(each)) for name, each in self.seen.skeleton.layers[layer].named_modules()}
        found: dict[str, str] = {}
        for site in self.composition.sites:
            if held.get(site.block) == site.native:
                found.setdefault(site.role, site.block)
        for span in self.composition.spans:
            if (held.get(span.reads), held.get(span.writes)) == (span.reader, span.writer):
                found.setdefault(span.role, span.modules)
        return found

    @kept
    def spaces(self, layer: int) -> tuple[Space, ...]:
        """Return the spaces inside base layer `layer` whose units can change places, by suffix, as tried on a twin.

        A space is left out where one of its tensors is stored differently from how it is in memory.
        """
        seen, kind = self.seen, self.seen.derived.kind_of[layer]
        if seen.packed[kind]:
            return ()
        back = {name: suffix for suffix, name in seen.places(kind).items()}
        found = inner_spaces(seen.config, seen.skeleton, seen.firsts[kind][0], seen.skeleton.sizes.heads)
        return tuple(
            space._replace(slots=tuple(slot._replace(suffix=back[slot.suffix]) for slot in space.slots))
            for space in found
            if back.keys() >= {slot.suffix for slot in space.slots}
        )

    @kept
    def linear(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Return the shape (out × in) of each linear module of base layer `layer`, by its path in the layer.

        Modules that run on other tokens than the layer's own are left out.
        """
        modules = self.seen.skeleton.layers[layer].named_modules()
        elsewhere = _of_other_tokens(json.dumps(self.seen.config, sort_keys=True), self.seen.derived.heads)[layer]
        shapes = {name: _linear_shape(each) for name, each in modules if name not in elsewhere}
        return {name: shape for name, shape in shapes.items() if shape is not None}

    @kept
    def grafted(
        self, trunk: Mapping[str, Any], order: Sequence[int], twins: Sequence[int], modules: Sequence[str]
    ) -> dict[str, Any]:
        """Return the config.json of a model with grafts, except its `surgery`; `trunk` is the config of its trunk.

        Layer `n` of the trunk is like base layer `order[n]`; the layers numbered in `twins` have an expanded twin.
        `modules` are the grafts' modules, which stay in full precision also where the base is quantised. Raises
        BadInput where no such config exists.
        """
        composition = self.composition
        head = head_with_grafts(composition, trunk)
        made = copy.deepcopy(dict(trunk))
        if twins:
            whole = [*order, *(order[twin] for twin in twins)]
            made = grown(self.seen.config, self.seen.skeleton, whole, len(order))
            # The quantisation settings name modules of the trunk's layers, whose numbers branches do not change.
            made |= {key: copy.deepcopy(trunk[key]) for key in (QUANTISATION,) if key in trunk}
        made = left_out(made, modules, self.seen.skeleton)
        return config_with_grafts(composition, head, trunk, made)

    @kept
    def grown(self, order: Sequence[int], opened: Sequence[int] = ()) -> dict[str, Any]:
        """Return the config.json of a model whose layer `n` is like base layer `order[n]`.

        `opened` are the numbers of layers that are no longer quantised. Raises BadInput where there is no such config.
        """
        made = grown(self.seen.config, self.seen.skeleton, order)
        stack = f"{self.seen.skeleton.stack}."
        made = renumbered(self.seen.config, made, order, (self.seen.names.stem, stack))
        before = skips(self.seen.config, self.seen.skeleton)
        after = skips(made, _skeleton(json.dumps(made, sort_keys=True))) if any(before) else [()] * len(order)
        for index, source in enumerate(order):
            if before[source] != after[index]:
                name = min(set(before[source]) ^ set(after[index]))
                raise BadInput(
                    f"config.json: `quantization_config` names modules in a way that surgeon cannot renumber: {name} of"
                    f" layer {index} would not be stored as layer {source}'s is; write out the names of its modules"
                )
        packed = {index: self.seen.packed[self.seen.derived.kind_of[order[index]]].values() for index in opened}
        modules = dict.fromkeys(f"{stack}{index}.{each.module}" for index in opened for each in packed[index])
        return left_out(made, list(modules), self.seen.skeleton)

    @kept
    def layer_axes(self, grown: Mapping[str, Any], layers: int) -> dict[str, int]:
        """Return, by name, the axis along which a tensor outside the layers holds one part per layer.

        Tensors without such an axis are left out. `grown` is a config of the base's type for `layers` layers, a number
        different from the base's.
        """
        here, there = self.seen.skeleton, _skeleton(json.dumps(grown, sort_keys=True))
        changed = {place for place, axes in here.changes(there).items() if axes is not None}
        axes = {
            name: layer_axis(here.shapes[place], there.shapes[place], len(here.layers), layers)
            for name, place in self.seen.names.outer.items()
            if place in changed
        }
        return {name: axis for name, axis in axes.items() if axis is not None}


def _linear_shape(module: Any) -> tuple[int, int] | None:
    """Return (outputs, inputs) of a linear module, or of GPT-2's `Conv1D`, which stores the transpose; else None."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    if not isinstance(module, nn.Linear | Conv1D):
        return None
    first, second = module.weight.shape
    return (second, first) if isinstance(module, Conv1D) else (first, second)


@lru_cache(maxsize=8)
def _of_other_tokens(kept: str, heads: int) -> tuple[frozenset[str], ...]:
    """Return, per layer, the paths of linear modules that a twin runs on other tokens than the layer's own.

    Attention over a compressed cache (MLA) expands the cached latents of earlier tokens at every step; experts see only
    some of the tokens. A decision made per token of the layer does not apply to such modules.
    """
    import torch
    from torch import nn

    twin = twin_of(json.loads(kept), heads=heads)
    found: list[set[str]] = [set() for _ in twin.layers]
    handles = contextlib.ExitStack()
    for layer, others in zip(twin.layers, found, strict=True):
        own = [0]

        def begins(_: nn.Module, given: Any, named: Any, own: list[int] = own) -> None:
            """Record on how many tokens the layer runs."""
            own[0] = (given[0] if given else named["hidden_states"]).shape[:-1].numel()

        def runs(_: nn.Module, given: Any, named: Any, own: Any, name: str, others: set[str]) -> None:
            """Add a linear module to `others` where it runs on another number of tokens than the layer."""
            if (given[0] if given else next(iter(named.values()))).shape[:-1].numel() != own[0]:
                others.add(name)

        handles.enter_context(layer.register_forward_pre_hook(begins, with_kwargs=True))
        for name, module in layer.named_modules():
            if _linear_shape(module) is not None:
                hook = partial(runs, own=own, name=name, others=others)
                handles.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
    # A model that cannot run with a cache is detected and refused elsewhere.
    with handles, one_thread(), torch.no_grad(), contextlib.suppress(*LOAD_FAILURES):
        run_cached(twin, some_tokens(twin))
    return tuple(map(frozenset, found))


@lru_cache(maxsize=8)
def composition_for(kept: str) -> Composition:
    """Return the classes that carry grafts for a config.json, given as JSON text.

    Raises BadInput where there are none.
    """
    config = json.loads(kept)
    found = derive(config)
    return composition_of(config, found.skeleton, twin_of(config, heads=found.heads), found.firsts)


@lru_cache(maxsize=2)
def _skeleton(kept: str) -> Skeleton:
    """Return the model of a config.json, given as JSON text, built on the meta device."""
    return build(json.loads(kept))
