"""The layer stack of an output through all its surgeries: where each layer comes from, and what it carries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from surgeon.blueprint.grafts import Graft, grafts_of
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.errors import BadInput, printable
from surgeon.families.anatomy import layer_of
from surgeon.families.grafted import owner_of
from surgeon.manifest.manifest import MANIFEST_FILE, Manifest, layers_of, parse
from surgeon.runtime.states_rules import BANK

Origin = Literal["base", "changed", "copied", "fused", "made"]


# How an init is called in a manifest, and what that is to the reader of a picture.
_ORIGINS: dict[str, Origin] = {"ot_fusion": "fused", "average": "fused", "copy": "copied", "copied": "copied"}


@dataclass(frozen=True)
class Mark:
    """One graft of a layer: `text` in words, `sign` as the picture letters it; `surgery` brought it (1: the first)."""

    kind: str
    sign: str
    text: str
    surgery: int | None
    trains: bool


@dataclass(frozen=True)
class StackLayer:
    """One layer of the output.

    `base` is its number in the first base, None for one that surgery number `surgery` made, by its operation number
    `operation`, from the layers `sources` (numbers in this output). `trains`: the layer's own weights train, not only
    what stands beside them. A layer of the base to which a surgery gave other weights is `changed`, as `init` says.
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


@dataclass(frozen=True)
class History:
    """The manifests of an output's surgeries, oldest first, and its layers. `first` numbers the oldest one known."""

    surgeries: tuple[Manifest, ...]
    first: int
    layers: tuple[StackLayer, ...]

    @property
    def base_layers(self) -> int:
        """How many layers the first base had."""
        return self.surgeries[0].base.layers

    def places(self, nth: int) -> dict[int, int]:
        """For each layer of the output of known surgery `nth` (from 0), its number in the output of the last."""
        return _places(self.surgeries, nth)


def tell_history(folder: CheckpointFolder, manifest: Manifest) -> History:
    """Follow every layer back through the lineage, as far as manifests were kept. Raises BadInput for a broken one."""
    earlier: list[Manifest] = []
    for ancestor in reversed(manifest.lineage):
        if ancestor.manifest is None:
            break
        file = f"{folder.path / MANIFEST_FILE} (lineage)"
        earlier.insert(0, parse(ancestor.manifest | {"lineage": []}, file=file))
    surgeries = (*earlier, manifest)
    _check(surgeries, folder)
    first = len(manifest.lineage) - len(earlier) + 1
    grafts = grafts_of(folder.config)
    own = _layers_with_new_weights(manifest)
    everything = any(entry.trains == "all" for entry in manifest.operations)
    layers = [
        _layer(surgeries, first, index, grafts.get(index, []), trains=everything or index in own)
        for index in range(len(manifest.layers))
    ]
    return History(surgeries, first, tuple(layers))


def _check(surgeries: Sequence[Manifest], folder: CheckpointFolder) -> None:
    """BadInput where manifests contradict each other, or the weights beside the last."""
    file = str(folder.path / MANIFEST_FILE)
    held = {place[1] for name in folder.tensors if (place := layer_of(name)) is not None}
    counts = [len(manifest.layers) for manifest in surgeries]
    found = [*(manifest.base.layers for manifest in surgeries[1:]), max(held, default=-1) + 1]
    for manifest, told, real in zip(surgeries, counts, found, strict=True):
        layers_of(manifest, file=file)
        numbers = [layer.operation for layer in manifest.layers if layer.operation is not None]
        sources = [source for layer in manifest.layers for source in layer.sources]
        if told != real or any(not 0 <= n < len(manifest.operations) for n in numbers):
            raise BadInput(
                f"{printable(file)}: `layers` tells of {told} layers and of operations {sorted(set(numbers))}, where"
                f" there are {real} layers and {len(manifest.operations)} operations; was it edited by hand?"
            )
        if any(not 0 <= source < told for source in sources):
            raise BadInput(f"{printable(file)}: `layers` names a source that is no layer; was it edited by hand?")


def _places(surgeries: Sequence[Manifest], nth: int) -> dict[int, int]:
    places = {index: index for index in range(len(surgeries[nth].layers))}
    for later in surgeries[nth + 1 :]:
        there = {layer.base: index for index, layer in enumerate(later.layers) if layer.base is not None}
        places = {index: there[now] for index, now in places.items() if now in there}
    return places


def _layers_with_new_weights(manifest: Manifest) -> set[int]:
    found: set[int] = set()
    for name in manifest.new_tensors:
        place = layer_of(name)
        if place is not None and BANK not in name and owner_of(place[2]) is None:
            found.add(place[1])
    return found


def _layer(
    surgeries: Sequence[Manifest], first: int, index: int, grafts: Sequence[Graft], *, trains: bool
) -> StackLayer:
    """Walk down from the last surgery until one made the layer, or the first base had it."""
    brought: dict[str, int] = {}
    here, changed, changed_by = index, "", None
    made_by: int | None = None
    for nth in reversed(range(len(surgeries))):
        entry = surgeries[nth].layers[here]
        for graft in entry.grafts:
            if graft.operation is not None:
                brought.setdefault(graft.text, nth + first)
        if entry.base is not None and entry.init and not changed:
            changed, changed_by = entry.init, nth + first
        if entry.base is None:
            made_by = nth
            break
        here = entry.base
    kinds = {graft.text: graft for graft in grafts}
    last = surgeries[-1].layers[index]
    marks = tuple(
        Mark(
            kind=kinds[graft.text].kind if graft.text in kinds else "other",
            sign=kinds[graft.text].sign if graft.text in kinds else "?",
            text=graft.text,
            surgery=brought.get(graft.text),
            trains=graft.operation is not None,
        )
        for graft in last.grafts
    )
    if made_by is None:
        origin: Origin = "changed" if changed else "base"
        return StackLayer(index, here, origin, changed, (), changed_by, None, trains, marks)
    entry = surgeries[made_by].layers[here]
    places = _places(surgeries, made_by)
    return StackLayer(
        index=index,
        base=None,
        origin=_ORIGINS.get(entry.init.partition(",")[0].split()[0] if entry.init else "", "made"),
        init=entry.init,
        sources=tuple(sorted({places[source] for source in entry.sources if source in places})),
        surgery=made_by + first,
        operation=entry.operation,
        trains=trains,
        marks=marks,
    )
