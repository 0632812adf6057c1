"""The choice of tensors that train: tensors added by surgeries, the base's own, layers of the stack, or all.

The manifest decides, not tensor names or positions. A tensor with both base rows and new rows trains in part.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from surgeon.anatomy.anatomy import Anatomy
from surgeon.anatomy.dissect import dissect_folder
from surgeon.checkpoint.folder import MANIFEST_FILE, CheckpointFolder
from surgeon.checkpoint.header import DTYPE_BITS
from surgeon.common.formatting import show_layers
from surgeon.errors import BadInput, printable
from surgeon.manifest.lineage import Lineage
from surgeon.manifest.manifest import Manifest
from surgeon.manifest.moves import Box, boxes_of
from surgeon.operations.operation import Spec
from surgeon.operations.selectors import LayerSelector, select_layers


class LayersSpec(Spec):
    """Whole layers of the model as it is."""

    layers: Annotated[LayerSelector, Field(description="as plans select layers: `top_half`, `{every: 4}`, `[0, 7]`")]


What = Literal["last", "added", "base", "all"] | LayersSpec | Sequence[int]


@dataclass(frozen=True)
class Fixed:
    """The `boxes` of a tensor that do not train: disjoint, each a (from, to) along every axis."""

    boxes: tuple[Box, ...]

    @property
    def size(self) -> int:
        """The count of numbers in all boxes."""
        return sum(map(_numbers, self.boxes))

    def reversed(self, shape: Sequence[int]) -> Fixed:
        """Return the complement: the boxes of a tensor of this shape that train at present."""
        left: list[Box] = [tuple((0, size) for size in shape)]
        for taken in self.boxes:
            left = [part for box in left for part in _around(box, taken)]
        return Fixed(tuple(sorted(left)))

    @property
    def slices(self) -> Iterator[tuple[slice, ...]]:
        """The index of each box, as slices along every axis."""
        return (tuple(itertools.starmap(slice, box)) for box in self.boxes)


def _numbers(box: Box) -> int:
    """Return the count of numbers in a box."""
    return math.prod(end - begin for begin, end in box)


def _around(box: Box, taken: Box) -> Iterator[Box]:
    """Yield the parts of a box outside another box."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, taken, strict=True))
    if any(begin >= end for begin, end in common):
        yield box
        return
    for axis, ((begin, end), (first, last)) in enumerate(zip(box, common, strict=True)):
        for part in ((begin, first), (last, end)):
            if part[0] < part[1]:
                yield (*common[:axis], part, *box[axis + 1 :])


@dataclass(frozen=True)
class TrainableSet:
    """Names of tensors that train, in the checkpoint's order, and the operations that made them, in order.

    `fixed` gives, for tensors that train in part, their fixed boxes. `of_base` are the tensors with content of the base
    that is to change. `title` describes the set where no operation does. `fitted` are tensors that get their values
    before the first step, and never by a gradient.
    """

    names: tuple[str, ...]
    operations: tuple[str, ...]
    fixed: Mapping[str, Fixed] = dataclasses.field(default_factory=dict)
    of_base: frozenset[str] = frozenset()
    title: str = ""
    fitted: tuple[str, ...] = ()
    # Tensors that train as a whole, next to a LoRA.
    beside: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        """A description of the set."""
        return self.title or ", ".join(dict.fromkeys(self.operations))


def trainable_set(
    out: CheckpointFolder, manifest: Manifest | None, what: What, anatomy: Anatomy | None = None
) -> TrainableSet:
    """Return the tensors of `out` that train under `what`.

    `last` and `added` are the new tensors of the last surgery, and of all surgeries; numbers are operations of the last
    surgery. `base` are the tensors that are not new, `all` are all, `layers` the tensors of layers. Where an operation
    trains everything (SOLAR), `last` and `added` do too. `manifest` is None for a model without surgery, which has
    nothing new. Raises BadInput where an operation, layer or tensor does not exist, where surgeries do not fit
    together, and where nothing is left to train.
    """
    if manifest is None and (isinstance(what, Sequence) and what not in ("base", "all")):
        raise BadInput(
            f"{printable(str(out.path))}: no output of surgeon (it has no {MANIFEST_FILE}), so nothing was added that"
            " could train alone; say `what: all`, `what: {layers: …}` or `lora: {…}`"
        )
    if isinstance(what, LayersSpec) or what in ("base", "all"):
        return _whole(out, manifest, what, anatomy or dissect_folder(out))
    assert manifest is not None
    return _added(out, manifest, what)


def _whole(out: CheckpointFolder, manifest: Manifest | None, what: What, anatomy: Anatomy) -> TrainableSet:
    """Return all tensors, the base's own, or those of layers, as far as the model computes with them."""
    added = _all_added(out, manifest)
    # Layers above the stack, which predict further tokens, and tensors without a place in the model are not run.
    idle = {*anatomy.idle, *(info.name for layer in anatomy.beyond for info in layer.values())}
    fixed: dict[str, Fixed] = {}
    if isinstance(what, LayersSpec):
        chosen = select_layers(what.layers, len(anatomy.layers))
        names = {
            info.name for index in chosen for part in (anatomy.layers, anatomy.grafted) for info in part[index].values()
        }
        title = f"all of {show_layers(chosen)}"
    elif what == "base":
        names = out.tensors.keys() - added.names - added.still
        for name, part in added.fixed.items():
            names |= {name}
            fixed[name] = part.reversed(out.tensors[name].shape)
        title = "the base's own tensors"
    else:
        names, title = set(out.tensors), "every tensor"
    training = tuple(name for name in out.tensors if name in names - idle - added.fitted)
    if not training:
        raise BadInput(
            f"{printable(str(out.path))}: nothing to train: `what` has no tensor that the model computes with"
        )
    of_base = frozenset(training) - (added.names - added.fixed.keys())
    # Where only the base's own tensors train, a domain gate has nothing to pass on yet.
    fits = manifest is not None and not added.names.isdisjoint(training)
    return TrainableSet(training, (), fixed, of_base, title, _fitted(manifest) if manifest and fits else ())


@dataclass(frozen=True)
class _Added:
    """Tensors that surgeries made, by their current names.

    `fixed` gives their boxes that are the base's. `still` are tensors with the base's content among parts that do not
    train. `fitted`, which are not among `names`, never train by a gradient. `everything`: one of the operations trains
    all tensors.
    """

    names: frozenset[str]
    operations: tuple[str, ...]
    fixed: Mapping[str, Fixed]
    still: frozenset[str]
    fitted: frozenset[str]
    everything: bool


def _all_added(out: CheckpointFolder, manifest: Manifest | None) -> _Added:
    """Return the tensors that all surgeries added. Raises BadInput where the surgeries do not fit together."""
    if manifest is None:
        return _Added(frozenset(), (), {}, frozenset(), frozenset(), everything=False)
    lineage = Lineage.of(manifest, file=str(out.path / MANIFEST_FILE))
    return _of(out, lineage.since(0), None, lineage)


def _of(
    out: CheckpointFolder, surgeries: Iterable[Manifest], only: Sequence[int] | None, lineage: Lineage | None
) -> _Added:
    """Return the tensors that the surgeries made, under their current names.

    For a single surgery (`lineage` None) only the tensors of the operations `only` count; None: of all operations.
    """
    chosen: dict[str, None] = {}
    operations: list[str] = []
    still: set[str] = set()
    fitted: set[str] = set()
    everything = False
    fixed: dict[str, Fixed] = {}
    for nth, surgery in enumerate(surgeries, 1):
        numbers = list(range(len(surgery.operations))) if only is None else sorted(set(only))
        fits = {number for number, operation in enumerate(surgery.operations) if operation.trains == "fitted"}
        for number in numbers:
            if number not in fits:
                operations.append(surgery.operations[number].op)
            everything = everything or surgery.operations[number].trains == "all"
        made = [name for name, tensor in surgery.new_tensors.items() if tensor.operation in numbers]
        now = dict(zip(made, made, strict=True)) if lineage is None else lineage.places(nth, made)
        for name, place in now.items():
            tensor = surgery.new_tensors[name]
            if tensor.operation in fits:
                fitted.add(place)
                continue
            if tensor.stays:
                # A tensor with a part of the base more than once also contains new content.
                still |= {place} if tensor.pieces.repeats else set()
                continue
            chosen[place] = None
            if tensor.kept.spans:
                # Where a vocabulary grew twice, all rows after the first base's train.
                fixed.setdefault(place, Fixed(boxes_of(tensor.kept, tensor.shape, DTYPE_BITS[tensor.dtype])))
        if lineage is not None and nth < lineage.count:
            # A later merge may have removed the branches of an earlier surgery.
            chosen = {name: None for name in chosen if name in out.tensors}
    fixed = {name: part for name, part in fixed.items() if name in chosen}
    return _Added(frozenset(chosen), tuple(operations), fixed, frozenset(still), frozenset(fitted), everything)


def _added(out: CheckpointFolder, manifest: Manifest, what: What) -> TrainableSet:
    """Return the new tensors of the last surgery, of all surgeries, or of some operations of the last one.

    A tensor with a part for each layer stays fixed, since it contains the parts of old layers.
    """
    shown = printable(str(out.path / MANIFEST_FILE))
    if what == "added":
        found = _all_added(out, manifest)
    else:
        only = None if isinstance(what, str) else what
        numbers = range(len(manifest.operations))
        if unknown := [number for number in only or () if number not in numbers]:
            raise BadInput(
                f"{shown}: there is no operation {unknown[0]} in the last surgery; it has"
                f" {', '.join(f'{n} ({printable(manifest.operations[n].op)})' for n in numbers)}"
            )
        assert not isinstance(only, LayersSpec | str)
        found = _of(out, (manifest,), only, None)
    if found.everything:
        names = tuple(name for name in out.tensors if name not in found.fitted)
        of_base = frozenset(names) - (found.names - found.fixed.keys())
        return TrainableSet(names, found.operations, {}, of_base, fitted=_fitted(manifest))
    missing = [name for name in found.names if name not in out.tensors]
    if missing:
        raise BadInput(
            f"{shown}: names the new tensor {printable(min(missing))}, which no shard has; download it again"
        )
    if not found.names:
        raise BadInput(
            f"{shown}: nothing to train: what was asked for has no new tensor; say `what: all`, `what: base`,"
            " `what: {layers: …}` or `lora: {…}`"
        )
    names = tuple(name for name in out.tensors if name in found.names)
    return TrainableSet(names, found.operations, found.fixed, fitted=_fitted(manifest))


def _fitted(manifest: Manifest) -> tuple[str, ...]:
    """Return the tensors that the last surgery's first run fits; later runs keep them fixed.

    The other tensors were trained with the fitted values, so these must not change.
    """
    fits = {number for number, operation in enumerate(manifest.operations) if operation.trains == "fitted"}
    done = {name for run in manifest.training for name in run.tensors}
    return tuple(name for name, new in manifest.new_tensors.items() if new.operation in fits and name not in done)
