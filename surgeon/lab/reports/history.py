"""The history of an output through all its surgeries: the origin of each layer, its grafts, and parameter counts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from surgeon.anatomy.anatomy import Anatomy, layer_of, owner_of
from surgeon.anatomy.rows_of_ids import rows_of_ids
from surgeon.blueprint.grafts import Graft, grafts_of
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.header import TensorInfo
from surgeon.errors import BadInput, printable
from surgeon.manifest.lineage import Lineage
from surgeon.manifest.manifest import MANIFEST_FILE, GraftEntry, Manifest, StoredTensor
from surgeon.manifest.moves import layers_of
from surgeon.operations import origin_of
from surgeon.operations.operation import Origin as Made
from surgeon.runtime.states_rules import BANK

Origin = Literal["base", "widened", "changed"] | Made


@dataclass(frozen=True)
class Mark:
    """One graft of a layer: its name `text`, its letters `sign` in the picture, and its surgery's number (from 1).

    `trains` is whether an operation of the last surgery added it.
    """

    kind: str
    sign: str
    text: str
    surgery: int | None
    trains: bool


@dataclass(frozen=True)
class StackLayer:
    """One layer of the output.

    `base` is the layer's number in the first base, or None where a surgery made the layer: surgery number `surgery`, in
    its operation number `operation`, from the layers `sources` (numbers in this output). `trains`: the layer's own
    weights train, not only its grafts. A base layer is `changed` where a surgery replaced its weights; `init` names the
    way. A base layer is `widened` where it has additional rows or columns; `share` is the new share of its parameters.
    """

    index: int
    base: int | None
    origin: Origin
    init: str
    sources: tuple[int, ...]
    surgery: int | None
    operation: int | None
    trains: bool
    marks: tuple[Mark, ...]
    share: float = 0.0


@dataclass(frozen=True)
class WiderEnd:
    """A matrix outside the layers that grew, rows × columns; `below`: it contains the embeddings that layer 0 reads."""

    name: str
    before: tuple[int, int]
    after: tuple[int, int]
    below: bool

    @property
    def share(self) -> float:
        """The share of its parameters that the first base does not have."""
        return 1 - math.prod(self.before) / math.prod(self.after)


@dataclass(frozen=True)
class History:
    """The surgeries of an output, and the origins of its layers."""

    lineage: Lineage
    layers: tuple[StackLayer, ...]

    @property
    def surgeries(self) -> dict[int, Manifest]:
        """The manifests by the number of the surgery (from 1), oldest first."""
        return dict(enumerate(self.lineage.surgeries, 1))

    @property
    def base_layers(self) -> int:
        """The number of layers of the first base."""
        return self.lineage.surgeries[0].base.layers


def layer_history(folder: CheckpointFolder, manifest: Manifest) -> History:
    """Return the origin of every layer by following the lineage. Raises BadInput for an inconsistent lineage."""
    lineage = Lineage.of(manifest, file=str(folder.path / MANIFEST_FILE))
    _check(lineage, folder)
    grafts = grafts_of(folder.config)
    own = _layers_with_new_weights(manifest)
    everything = any(entry.trains == "all" for entry in manifest.operations)
    layers = [
        _layer(lineage, index, grafts.get(index, []), trains=everything or index in own)
        for index in range(len(manifest.layers))
    ]
    return History(lineage, tuple(_widened(layers, folder, lineage.surgeries[0])))


def _widened(layers: Sequence[StackLayer], folder: CheckpointFolder, first: Manifest) -> Iterator[StackLayer]:
    """Yield the layers; unchanged base layers that are larger than in the first base become `widened`."""
    before, after = _numbers(first.base.tensors), _numbers(folder.tensors)
    for layer in layers:
        was = before.get(layer.base, {}) if layer.origin == "base" else {}
        there = {suffix: size for suffix, size in after.get(layer.index, {}).items() if suffix in was}
        wider = [suffix for suffix, size in there.items() if size > was[suffix]]
        if not wider:
            yield layer
            continue
        blocks = dict.fromkeys(suffix.partition(".")[0] for suffix in wider)
        share = 1 - sum(was[suffix] for suffix in there) / sum(there.values())
        # More than two wider blocks: the whole layer is wider, norms included.
        named = "" if len(blocks) > 2 else " and ".join(blocks)
        yield replace(layer, origin="widened", init=f"wider {named}".rstrip(), share=share)


def _numbers(tensors: Mapping[str, TensorInfo] | Mapping[str, StoredTensor]) -> dict[int | None, dict[str, int]]:
    """Return the parameters of each tensor in a layer, by layer number and suffix; other tensors are left out."""
    found: dict[int | None, dict[str, int]] = {}
    for name, tensor in tensors.items():
        if (place := layer_of(name)) is not None:
            found.setdefault(place[1], {})[place[2]] = math.prod(tensor.shape)
    return found


def wider_ends(folder: CheckpointFolder, history: History, anatomy: Anatomy) -> tuple[WiderEnd, ...]:
    """Return embeddings, output head and similar matrices that are larger than in the first base."""
    first = history.lineage.surgeries[0].base.tensors
    grown = [
        (name, (was.shape[0], was.shape[1]), (info.shape[0], info.shape[1]))
        for name, info in folder.tensors.items()
        if layer_of(name) is None and (was := first.get(name)) is not None
        if len(info.shape) == len(was.shape) == 2 and info.numel > math.prod(was.shape)
        # Skip a matrix with a part for each layer, which grows with the number of layers.
        if len(_sizes_since(name, history)) == 1
    ]
    if not grown:
        return ()
    words = rows_of_ids(anatomy.derivation, anatomy.sizes.vocabulary)
    return tuple(WiderEnd(name, before, after, words.get(name, False)) for name, before, after in grown)


def _check(lineage: Lineage, folder: CheckpointFolder) -> None:
    """Raise BadInput where a manifest contradicts itself, or the last manifest contradicts the weights."""
    file = lineage.file
    there = {place[1] for name in folder.tensors if (place := layer_of(name)) is not None}
    if len(lineage.last.layers) != max(there, default=-1) + 1:
        raise BadInput(
            f"{printable(file)}: `layers` lists {len(lineage.last.layers)} layers, where there are"
            f" {max(there, default=-1) + 1} layers; was it edited by hand?"
        )
    for manifest in lineage.surgeries:
        layers_of(manifest, file=file)
        numbers = {layer.operation for layer in manifest.layers if layer.operation is not None}
        if any(not 0 <= number < len(manifest.operations) for number in numbers):
            raise BadInput(
                f"{printable(file)}: `layers` names operations {sorted(numbers)}, where there are"
                f" {len(manifest.operations)} operations; was it edited by hand?"
            )
        sources = [source for layer in manifest.layers for source in layer.sources]
        if any(not 0 <= source < len(manifest.layers) for source in sources):
            raise BadInput(f"{printable(file)}: `layers` names a source that is not a layer; was it edited by hand?")


def _layers_with_new_weights(manifest: Manifest) -> set[int]:
    """Return the layers with new tensors of the last surgery that belong to no graft."""
    found: set[int] = set()
    for name in manifest.new_tensors:
        place = layer_of(name)
        if place is not None and BANK not in name and owner_of(place[2]) is None:
            found.add(place[1])
    return found


def _layer(lineage: Lineage, index: int, grafts: Sequence[Graft], *, trains: bool) -> StackLayer:
    """Return the origin of one layer: follow it back to the surgery that made it, or to the first base."""
    surgeries = lineage.surgeries
    brought: dict[str, int] = {}
    here, changed, changed_by = index, "", None
    made_by: int | None = None
    for nth in reversed(range(len(surgeries))):
        entry = surgeries[nth].layers[here]
        for graft in entry.grafts:
            if graft.operation is not None:
                brought.setdefault(graft.text, nth + 1)
        if entry.base is not None and entry.init and not changed:
            changed, changed_by = entry.init, nth + 1
        if entry.base is None:
            made_by = nth
            break
        here = entry.base
    marks = _marks(surgeries[-1].layers[index].grafts, grafts, brought)
    if made_by is None:
        origin: Origin = "changed" if changed else "base"
        return StackLayer(index, here, origin, changed, (), changed_by, None, trains, marks)
    entry = surgeries[made_by].layers[here]
    places = lineage.layers(made_by + 1)
    by = "" if entry.operation is None else surgeries[made_by].operations[entry.operation].op
    return StackLayer(
        index=index,
        base=None,
        origin=origin_of(by, entry.init),
        init=entry.init,
        sources=tuple(sorted({places[source] for source in entry.sources if source in places})),
        surgery=made_by + 1,
        operation=entry.operation,
        trains=trains,
        marks=marks,
    )


def _marks(last: Sequence[GraftEntry], grafts: Sequence[Graft], brought: Mapping[str, int]) -> tuple[Mark, ...]:
    """Return the marks of a layer's grafts in the last manifest, `last`; `brought` maps their names to surgeries."""
    kinds = {graft.text: (graft.kind, graft.sign) for graft in grafts}
    return tuple(
        Mark(*kinds.get(graft.text, ("other", "?")), graft.text, brought.get(graft.text), graft.operation is not None)
        for graft in last
    )


@dataclass(frozen=True)
class Budget:
    """Counts of parameters; tied embeddings count once. `base` + `earlier` + `new` is the whole output.

    `earlier` counts parameters from surgeries before the last one. `stored_bytes` is the size of all tensors.
    """

    base: int
    earlier: int
    new: int
    trainable: int
    stored_bytes: int

    @property
    def total(self) -> int:
        """All parameters of the output."""
        return self.base + self.earlier + self.new


def parameter_budget(folder: CheckpointFolder, manifest: Manifest, history: History) -> Budget:
    """Return the counts of the output's parameters, from headers, manifest and lineage."""
    counts = {"base": 0, "earlier": 0, "new": 0}
    # In a tensor with a part for each layer, the parts count for the surgery that added the layers; they do not train.
    fixed = 0
    for name, info in folder.tensors.items():
        sizes = _sizes_since(name, history)
        if len(sizes) == 1:
            counts[_origin(name, manifest, history)] += info.numel
            continue
        first, before, now = sizes[0], sizes[-2], sizes[-1]
        for origin, size in (("base", first), ("earlier", before - first), ("new", now - before)):
            counts[origin] += size
        fixed += now - before
    everything = any(entry.trains == "all" for entry in manifest.operations)
    return Budget(
        **counts,
        trainable=sum(counts.values()) if everything else counts["new"] - fixed,
        stored_bytes=sum(info.nbytes for info in folder.tensors.values()),
    )


def _sizes_since(name: str, history: History) -> list[int]:
    """Return the sizes of a tensor that has a part for each layer, in the first base and after each surgery.

    The tensor is outside the layers. For any other tensor, return [0].
    """
    surgeries = history.lineage.surgeries
    made = [surgery.new_tensors.get(name) for surgery in surgeries]
    if not any(each is not None and each.stays for each in made):
        return [0]
    first = surgeries[0].base.tensors.get(name)
    sizes = [0 if first is None else math.prod(first.shape)]
    for each in made:
        sizes.append(sizes[-1] if each is None else math.prod(each.shape))
    return sizes


def _origin(name: str, manifest: Manifest, history: History) -> str:
    """Return which count a tensor belongs to: base, earlier or new."""
    if name in manifest.new_tensors:
        return "new"
    place = layer_of(name)
    if place is None:
        return "earlier" if BANK in name else "base"
    _, index, suffix = place
    grafted = owner_of(suffix) is not None or history.layers[index].base is None
    return "earlier" if grafted else "base"
