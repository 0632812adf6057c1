"""The draft that operations edit, in plan order; `Draft.finish` numbers the layers and returns the frozen `Blueprint`.

No weight is read here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from surgeon.anatomy.anatomy import Anatomy, LayerKind
from surgeon.anatomy.family import MOST_LAYERS, with_fields
from surgeon.anatomy.grafted_config import native_config
from surgeon.blueprint.blueprint import (
    Blueprint,
    GraftNote,
    Layer,
    OperationRecord,
    Output,
)
from surgeon.blueprint.grafts import (
    Graft,
    bank_of,
    described_surgery,
    grafts_of,
    inserted_before,
    settings_of,
    twins_of,
)
from surgeon.blueprint.recipes import (
    Constant,
    Copy,
    Coupling,
    Dequantised,
    Recipe,
    Unpacked,
    per_layer,
    whole,
)
from surgeon.checkpoint.header import FLOAT_DTYPES, TensorInfo
from surgeon.errors import BadInput, printable
from surgeon.grafts.bundle import CODE_FILE
from surgeon.runtime.rules import BRANCH
from surgeon.runtime.states_rules import BANK


def silence(tensors: Mapping[str, Recipe], kind: LayerKind) -> dict[str, Recipe]:
    """Return a layer's recipes by suffix, with the tensors that write to the residual stream replaced by constants.

    Raises BadInput where no layer of this kind can be silenced.
    """
    if kind.refusal:
        of = f" ({printable(kind.title)})" if kind.title else ""
        raise BadInput(
            f"this kind of layer{of} cannot be added without changing the model: {printable(kind.refusal, 300)}; use"
            " `zero_init: false`, or an operation that leaves the layers as they are"
        )
    silenced = dict(tensors)
    for suffix, value in kind.silence.items():
        recipe = tensors[suffix]
        silenced[suffix] = Constant(value, recipe.dtype, recipe.shape)
    return silenced


# The dtype of new layers of a quantised base; and the ending of the FP8 scales that full-precision layers do not read.
_OPENED = "BF16"
_ACTIVATIONS = "activation_scale"


@dataclass(slots=True)
class LayerDraft:
    """A layer while operations work on the draft: its tensors by suffix, and where the layer comes from.

    `opened`: the layer holds in full precision what the base stores quantised. `base` is the number of the base layer
    that it is (None for a new one). `like` is the base layer whose kind and settings (attention type, other entries of
    the config) it shares. `operation` made it. `sources` are the layers it was made from, numbered as in the current
    draft. `rewritten` maps the suffix of a changed tensor of a base layer to the operation that changed it. `grafts`
    are the modules added to the native tensors.
    """

    tensors: dict[str, Recipe]
    base: int | None
    like: int
    operation: int | None = None
    sources: tuple[int, ...] = ()
    init: str = ""
    rewritten: dict[str, int] = field(default_factory=dict)
    grafts: list[Graft] = field(default_factory=list)
    opened: bool = False

    def graft(self, kind: str) -> Graft | None:
        """Return the graft of this kind on the trunk's layer itself (not in its twin), or None."""
        return next((graft for graft in self.grafts if graft.kind == kind and not graft.in_branch), None)


@dataclass(frozen=True, slots=True)
class Outer:
    """A tensor outside the layers; `operation` made it or changed its values; None where it is still the base's."""

    recipe: Recipe
    operation: int | None


class Draft:
    """The model while operations edit it, one after another."""

    def __init__(self, anatomy: Anatomy, config: Mapping[str, Any], *, seed: int) -> None:
        """Begin a draft with the base's own tensors, config and grafts, before any operation."""
        self.anatomy = anatomy
        self.seed = seed
        # Sizes that operations changed and that layers share, by config key (`with_fields`).
        self.widths: dict[str, int] = {}
        # By operation number, the base layers that the operation took out.
        self.dropped: dict[int, tuple[int, ...]] = {}
        # The tensors outside the layers, by name: the base's in their order, then the ones that operations added.
        self.outer = {name: Outer(Copy.of(info), None) for name, info in anatomy.outer.items()}
        # The tensors of layers above the stack, by suffix, one dict per layer.
        self.beyond = [{s: Outer(Copy.of(info), None) for s, info in tensors.items()} for tensors in anatomy.beyond]
        # The config of the trunk without grafts; `finish` writes back what grafts need.
        self.config = native_config(config)
        # Other changes of config.json, each under its own name; applied to the finished config, in order.
        self.config_edits: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {}
        # Where a text model was taken out of a larger one: the base's tensor name -> the output's tensor name.
        self.renamed: Mapping[str, str] | None = None
        self.couplings: dict[str, Coupling] = {}
        self.records: list[OperationRecord] = []
        # Where the model becomes one of another class: the config.json of that class.
        self.converted: dict[str, Any] | None = None
        # Model-wide keys of `config.surgery`.
        self.settings: dict[str, Any] = settings_of(config)
        brought = grafts_of(config)
        # The mixture's control states for all layers, which are stored outside the layers.
        self.bank = bank_of(config)
        if self.bank is not None:
            self.bank.tensors = {suffix: Copy.of(info) for suffix, info in anatomy.bank.items()}
        self.layers = [
            LayerDraft(
                tensors={suffix: Copy.of(info) for suffix, info in tensors.items()},
                base=index,
                like=index,
                grafts=_with_tensors(brought.get(index, []), anatomy.grafted[index]),
            )
            for index, tensors in enumerate(anatomy.layers)
        ]
        # Layers that earlier surgeries of the base inserted; known only where those surgeries left grafts too.
        self.inserted_before = inserted_before(config)

    @property
    def number(self) -> int:
        """Return the number, in the plan, of the operation that is at work."""
        return len(self.records)

    def set_outer(self, name: str, recipe: Recipe) -> None:
        """Replace or add a tensor outside the layers, recorded under the operation that is at work."""
        self.outer[name] = Outer(recipe, self.number)

    def add_coupling(self, coupling: Coupling) -> None:
        """Register a transport map that recipes share; its name must be new, and maps that it builds on come first."""
        assert coupling.name not in self.couplings, coupling.name
        self.couplings[coupling.name] = coupling

    def copy_of(self, source: int, *, operation: int, opened: bool = False) -> LayerDraft:
        """Return a new layer with the native tensors of layer `source`; in full precision if `opened`.

        Grafts are not copied, and neither are buffers that nothing reads.
        """
        original = self.layers[source]
        unused = self.anatomy.unused(original.like)
        plain = {suffix: recipe for suffix, recipe in original.tensors.items() if suffix not in unused}
        return LayerDraft(
            tensors=self.opened(source) if opened else plain,
            opened=original.opened or (opened and bool(self.kind_of(source).packed)),
            base=None,
            like=original.like,
            operation=operation,
            sources=(source,),
            init="copy",
        )

    def insert(self, inserted: Mapping[int, list[LayerDraft]]) -> None:
        """Insert new layers; `inserted` maps the number of a layer in the current stack to the new layers above it.

        Raises BadInput where the model would have more than MOST_LAYERS layers.
        """
        count = len(self.layers) + sum(len(layers) for layers in inserted.values())
        if count > MOST_LAYERS:
            raise BadInput(f"the model would grow to {count} layers; more than {MOST_LAYERS} is refused")
        stack: list[LayerDraft] = []
        for index, layer in enumerate(self.layers):
            stack.append(layer)
            stack.extend(inserted.get(index, ()))
        # Sources are numbers of the stack before this edit, so renumber them.
        moved = {id(layer): new for new, layer in enumerate(stack)}
        renumbered = [moved[id(layer)] for layer in self.layers]
        for layer in stack:
            layer.sources = tuple(renumbered[source] for source in layer.sources)
        self.layers = stack

    def drop(self, numbers: Iterable[int], *, operation: int) -> None:
        """Remove layers (numbers of the current stack) and record which base layers `operation` dropped."""
        gone = {id(self.layers[number]) for number in numbers}
        of_base = [layer.base for layer in self.layers if id(layer) in gone and layer.base is not None]
        stack = [layer for layer in self.layers if id(layer) not in gone]
        moved = {id(layer): new for new, layer in enumerate(stack)}
        renumbered = [moved.get(id(layer)) for layer in self.layers]
        for layer in stack:
            found = (renumbered[source] for source in layer.sources)
            layer.sources = tuple(source for source in found if source is not None)
        self.layers = stack
        self.dropped[operation] = tuple(sorted(of_base))

    def kind_of(self, layer: int) -> LayerKind:
        """Return the kind of a layer of the draft; the full-precision kind where the layer is opened."""
        kind = self.anatomy.kinds[self.anatomy.kind_of[self.layers[layer].like]]
        return kind.opened if self.layers[layer].opened else kind

    def opened(self, layer: int) -> dict[str, Recipe]:
        """Return a layer's recipes by suffix, in full precision, so that a new layer made of them can train.

        Leaves out buffers that old versions of transformers stored next to the parameters and that nothing reads.
        """
        tensors, packed = self.layers[layer].tensors, self.kind_of(layer).packed
        scales = {found.scales for found in packed.values()} | self.anatomy.unused(self.layers[layer].like)
        made: dict[str, Recipe] = {}
        for suffix, recipe in tensors.items():
            if (found := packed.get(suffix)) is not None:
                weight, scale = recipe, tensors[found.scales]
                assert isinstance(weight, Copy), suffix
                assert isinstance(scale, Copy), found.scales
                made[found.suffix] = Dequantised(weight, scale, found.block, _OPENED, found.shape)
            elif suffix not in scales and not (packed and suffix.endswith(_ACTIVATIONS)):
                made[suffix] = recipe
        return made

    def open(self, layer: int) -> None:
        """Replace a layer's quantised tensors by full-precision ones; do nothing where the layer is not quantised."""
        home = self.layers[layer]
        if self.kind_of(layer).packed:
            home.tensors, home.opened = self.opened(layer), True

    @property
    def pattern(self) -> list[tuple[int, str]]:
        """Return (kind number, kind title) of each layer of the current stack."""
        pattern = self.anatomy.pattern
        return [pattern[layer.like] for layer in self.layers]

    def dtype_of(self, layer: int) -> str:
        """Return the dtype of a layer's largest tensor.

        For a quantised layer, return the dtype in which its new tensors are stored.
        """
        if self.kind_of(layer).packed:
            return _OPENED
        tensors, parts = self.layers[layer].tensors, self.kind_of(layer).parts
        return max((tensors[part.suffix] for part in parts), key=lambda recipe: recipe.numel).dtype

    def blocks(self, layer: int) -> Mapping[str, str]:
        """Return a layer's own names of the blocks that can take grafts, by their usual name (ATTENTION, FFN)."""
        return self.anatomy.blocks(self.layers[layer].like)

    def linear(self, layer: int) -> Mapping[str, tuple[int, ...]]:
        """Return the linear modules of a layer: path within the layer -> weight shape (out × in)."""
        return self.anatomy.linear(self.layers[layer].like)

    def parameters(self) -> int:
        """Return the number of parameters of the current model, grafts included; tied embeddings count once."""
        held = [recipe for layer in self.layers for recipe in layer.tensors.values()]
        grafts = [graft for layer in self.layers for graft in layer.grafts] + ([self.bank] if self.bank else [])
        held += [recipe for graft in grafts for recipe in graft.tensors.values()]
        held += [each.recipe for each in self.outer.values()]
        return sum(recipe.numel for recipe in held)

    def finish(self) -> Blueprint:
        """Number the layers, name the tensors, extend the config, and return the blueprint.

        Raises BadInput where a tensor cannot be made: it has a wrong shape, or is quantised.
        """
        grafted = any(layer.grafts for layer in self.layers)
        config = self.converted
        if config is None:
            trunk = self.trunk_config()
            config = self._grafted_config(trunk) if grafted else trunk
        config = with_fields(config, self.anatomy.derivation.path, self.widths)
        outer = [Output(name, each.recipe, each.operation) for name, each in self.outer.items()]
        known = len(self.anatomy.outer)
        outputs = [*self._with_parts(outer[:known], config), *outer[known:]]
        for edit in self.config_edits.values():
            config = edit(config)
        for index, layer in enumerate(self.layers):
            stem = self.anatomy.layer_name(index, "")
            if layer.base is None and not self.widths:
                _check_like(stem, layer, self.kind_of(index))
            own = {} if layer.base is None else self.anatomy.layers[layer.base]
            for suffix, recipe in layer.tensors.items():
                output = Output(f"{stem}{suffix}", recipe, layer.rewritten.get(suffix, layer.operation))
                if output.operation is None and not output.is_hole:
                    _check_kept(output, own.get(suffix), self.records)
                outputs.append(output)
            for graft in layer.grafts:
                for suffix, recipe in graft.tensors.items():
                    outputs.append(Output(f"{stem}{suffix}", recipe, graft.operation))
        for number, tensors in enumerate(self.beyond, start=len(self.layers)):
            for suffix, each in tensors.items():
                outputs.append(Output(self.anatomy.layer_name(number, suffix), each.recipe, each.operation))
        if self.bank is not None:
            for suffix, recipe in self.bank.tensors.items():
                outputs.append(Output(self.anatomy.outer_name(suffix), recipe, self.bank.operation))
        left = tuple(output.name for output in outputs if self.renamed is not None and output.name not in self.renamed)
        if self.renamed is not None:
            last, names = len(self.records) - 1, self.renamed
            outputs = [_moved(output, names[output.name], last) for output in outputs if output.name in names]
        for output in outputs:
            _check_stored(output)
        types = self.anatomy.layer_types
        return Blueprint(
            seed=self.seed,
            outputs=tuple(outputs),
            couplings=dict(self.couplings),
            layers=tuple(
                _finished(index, layer, types[layer.like] if types else None) for index, layer in enumerate(self.layers)
            ),
            operations=tuple(self.records),
            config=config,
            code_files=(CODE_FILE,) if grafted else (),
            dropped=dict(self.dropped),
            resized=dict(self.widths),
            left_behind={len(self.records) - 1: left} if left else {},
            converted=self.converted is not None,
        )

    def _with_parts(self, outputs: list[Output], config: Mapping[str, Any]) -> list[Output]:
        """Return the tensors outside the layers; a tensor with one part per layer gets parts for the new layers.

        The part of a new layer, or of a branch, is the part of the layer that it is like. Raises BadInput where an
        operation changed such a tensor.
        """
        found = self.anatomy.derivation
        twins, stored = twins_of([layer.grafts for layer in self.layers]), self.anatomy.twins
        layers, order = self.anatomy.sizes.layers, [layer.like for layer in self.layers]
        # A branch runs with its trunk layer's inputs; its own part only makes the shapes fit, and nothing computes with
        # it.
        place = {layer: layers + nth for nth, layer in enumerate(stored)}
        bases = [(twin, self.layers[twin].base) for twin in twins]
        order += [order[twin] if base is None else place.get(base, order[twin]) for twin, base in bases]
        before, count = layers + len(stored), len(order)
        if order == list(range(before)):
            return outputs
        branching = [graft for twin in twins for graft in self.layers[twin].grafts if graft.rules.branching]
        by = [self._last_of_depth, *(graft.operation for graft in branching)]
        last = max((operation for operation in by if operation is not None), default=len(self.records) - 1)
        # A depth other than the trunk's, so that a tensor with one part per layer changes its shape and can be
        # recognised.
        full, depth = config, count
        if count == layers:
            full, depth = self._of_other_depth()
        native = dict(full) | {key: self.config.get(key) for key in ("model_type", "architectures")}
        axes, made = found.layer_axes(native, depth), list[Output]()
        for output in outputs:
            axis = axes.get(output.name)
            if axis is None:
                made.append(output)
                continue
            if not isinstance(output.recipe, Copy):
                raise BadInput(
                    f"{printable(output.name)} holds a part for each layer and a row for each id, and a plan changes"
                    " one of them: grow the vocabulary by a plan of its own, and add layers to its output"
                )
            made.append(Output(output.name, per_layer(output.recipe, axis, before, tuple(order)), last))
        return made

    def _of_other_depth(self) -> tuple[Mapping[str, Any], int]:
        """Return (config, depth) of a model of the base's type with another depth.

        Where no such config can be made, return the base's own config and depth. Where the base has twins, return the
        base's own config, with the twins as its last layers.
        """
        found, layers, twins = self.anatomy.derivation, self.anatomy.sizes.layers, self.anatomy.twins
        if twins:
            return found.grafted(self.config, range(layers), twins, ()), layers + len(twins)
        try:
            return found.grown((*range(layers), layers - 1)), layers + 1
        except BadInput:
            return self.config, layers

    @property
    def _last_of_depth(self) -> int | None:
        """Return the number of the last operation that added or removed layers; None where no operation did."""
        made_by = [layer.operation for layer in self.layers if layer.operation is not None]
        return max([*made_by, *self.dropped], default=None)

    def trunk_config(self) -> dict[str, Any]:
        """Return the config of the layers as it would be without grafts."""
        order = [layer.like for layer in self.layers]
        opened = [index for index, layer in enumerate(self.layers) if layer.opened]
        unchanged = order == list(range(self.anatomy.sizes.layers)) and not opened
        return copy.deepcopy(self.config) if unchanged else self.anatomy.derivation.grown(order, opened)

    def _grafted_config(self, trunk: Mapping[str, Any]) -> dict[str, Any]:
        """Return the config `trunk` extended by the runtime's classes and by `surgery`, which describes all grafts."""
        grafts = [layer.grafts for layer in self.layers]
        order = [layer.like for layer in self.layers]
        made = self.anatomy.derivation.grafted(trunk, order, twins_of(grafts), self._graft_modules())
        new = [index for index, layer in enumerate(self.layers) if layer.base is None]
        older = [index for index, layer in enumerate(self.layers) if layer.base in self.inserted_before]
        made["surgery"] = described_surgery(
            grafts, new_layers=new, older_layers=older, settings=self.settings, bank=self.bank
        )
        return made

    def _graft_modules(self) -> list[str]:
        """Return transformers' names of the modules that hold grafts' tensors; a twin, or a bank, is one module."""
        found: list[str] = []
        for index, layer in enumerate(self.layers):
            for suffix in (suffix for graft in layer.grafts for suffix in graft.tensors):
                held = BRANCH if suffix.startswith(BRANCH) else suffix
                found.append(self.anatomy.module_name(index, held.rpartition(".")[0]))
        if self.bank is not None:
            found.append(f"{self.anatomy.derivation.stack.rpartition('.')[0]}.{BANK}".strip("."))
        return list(dict.fromkeys(found))


def _moved(output: Output, name: str, operation: int) -> Output:
    """Return a base tensor's output under the name `name`: the same bytes, still used by the model."""
    if name == output.name:
        return output
    assert isinstance(output.recipe, Copy), output.name
    return Output(name, whole(output.recipe), operation)


def _check_like(stem: str, layer: LayerDraft, kind: LayerKind) -> None:
    """Raise BadInput where an operation made a new layer's tensor in a shape that its kind does not have."""
    for part in kind.parts:
        recipe = layer.tensors.get(part.suffix)
        if recipe is not None and part.suffix not in layer.rewritten and recipe.shape != part.shape:
            raise BadInput(
                f"{printable(stem + part.suffix)}: the plan makes this tensor ({printable(layer.init)}) of shape"
                f" {list(recipe.shape)}, a layer of this model has {list(part.shape)}; make it of that shape"
            )


def _check_kept(output: Output, own: TensorInfo | None, records: list[OperationRecord]) -> None:
    """Raise BadInput where a base layer's `own` tensor is replaced and no operation is named as the maker."""
    if own is None or output.recipe != Copy.of(own):
        raise BadInput(
            f"{printable(output.name)}: {type(output.recipe).__name__} makes it in a layer of the base, as no"
            f" operation's; the one that did ({', '.join(record.op for record in records)}) must name itself in the"
            " layer's `rewritten`"
        )


def _check_stored(output: Output) -> None:
    """Raise BadInput where a quantised tensor, which can only be moved, would be computed or computed with."""
    recipe = output.recipe
    if output.computed:
        odd = next((each.dtype for each in _inside(recipe) if each.dtype not in FLOAT_DTYPES), None)
    else:
        stored = recipe.dtype in FLOAT_DTYPES or output.is_hole or output.pieces.covered
        odd = None if stored else recipe.dtype
    if odd is not None:
        raise BadInput(
            f"{printable(output.name)}: quantised ({odd}), so its values can be copied but not computed; use init copy,"
            " or operate on the full-precision weights and quantise the output"
        )


def _inside(recipe: Recipe) -> Iterator[Recipe]:
    """Yield a recipe and the recipes it is made of, without the stored inputs of dequantised tensors."""
    yield recipe
    for source in () if isinstance(recipe, (Dequantised, Unpacked)) else recipe.inputs:
        yield from _inside(source)


def _with_tensors(grafts: list[Graft], tensors: Mapping[str, TensorInfo]) -> list[Graft]:
    """Add each tensor of a layer's grafts to the graft that owns it; return the grafts.

    Raises BadInput where no graft owns it.
    """
    for suffix, info in tensors.items():
        owner = next((graft for graft in grafts if graft.owns(suffix)), None)
        if owner is None:
            raise BadInput(f"{printable(info.name)} ({info.file}): config.json's `surgery` has no graft it belongs to")
        owner.tensors[suffix] = Copy.of(info)
    return grafts


def _finished(index: int, layer: LayerDraft, layer_type: str | None) -> Layer:
    """Return a layer of the draft as the blueprint shows it, under its final number."""
    notes = tuple(GraftNote(graft.text, graft.operation) for graft in layer.grafts)
    made_from, like = layer.sources, layer.like
    return Layer(index, layer.base, layer.operation, layer.init, made_from, layer_type, like, notes, layer.opened)
