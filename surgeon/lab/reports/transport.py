"""Entropies of transport maps: how many neurons each neuron corresponds to (OpT-DeUS, section 7.3, Table 8).

For each inserted layer and each module, the transport problem of Algorithm 1 is solved twice: between the base layer
below and the new layer, and between the new layer and the base layer above. The cost uses the rows as stored, as the
algorithm is printed. After the transformation T_in, the map of gate and up next to a layer whose attention output is
zero would be uniform for every layer. The report gives the entropy of the map T in nats. Its maximum is log(n·m), where
every neuron corresponds equally to every neuron of the other layer. Layers of any initialisation can be compared in
this way.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from surgeon.anatomy.dissect import dissect_folder
from surgeon.blueprint.blueprint import Blueprint
from surgeon.blueprint.draft import Draft
from surgeon.blueprint.recipes import Coupling, MapRef
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.common import devices
from surgeon.common.json_results import plain_fields
from surgeon.common.listener import Listener, Quiet, Stopwatch
from surgeon.common.tables import FittedTable
from surgeon.errors import BadInput, printable
from surgeon.lab.reports.history import History, layer_history
from surgeon.manifest.manifest import MANIFEST_FILE, Manifest
from surgeon.manifest.reading import manifest_of
from surgeon.operations.fusion import fuse_layers
from surgeon.operations.inits import OtFusion
from surgeon.plan.plan import recorded_plan

MODULES = ("query", "key", "value", "output", "gate", "up", "down")
# The modules of a layer's experts, and the name of one expert's map.
_OF_EXPERTS = ("expert gate", "expert up", "expert down")
_EXPERT = re.compile(r"experts\.\d{1,6}\.(?P<role>\w+)")
# The names of new layers' maps in a manifest.
_LABEL = re.compile(
    r"operations\[(?P<operation>\d{1,6})\]\.(?P<place>after\[(?P<gap>\d{1,6})\]\.(?P<nth>\d{1,6}))\.(?P<module>[\w.]+)"
)


@dataclass(frozen=True)
class MapReport:
    """One transport map: between inserted layer `layer` and its neighbour, the base layer `below` or `above` it.

    `entropy` is measured in the checkpoint, `uniform` is the largest possible; both are in nats. Marginal errors are L1
    distances from uniform. Maps of experts are numbered by the experts of the upper layer: `experts.5.gate`.
    """

    layer: int
    neighbour: str
    module: str
    entropy: float
    uniform: float
    iterations: int
    converged: bool
    row_error: float
    column_error: float

    @property
    def name(self) -> str:
        """The map's name: `12.below.query`."""
        return f"{self.layer}.{self.neighbour}.{self.module}"

    @property
    def group(self) -> str:
        """The module's name, the same for all experts."""
        return _group(self.module)


@dataclass(frozen=True)
class MapFact:
    """One map that was solved when a layer was made, between the two layers that were fused.

    `module` is the same for all experts. `layer` is the new layer's number in this output, as text (its label where the
    number is not known). `entropy` is in nats, at most `uniform`. Errors are L1 distances of T's marginals from
    uniform.
    """

    layer: str
    module: str
    entropy: float
    uniform: float
    row_error: float
    column_error: float
    iterations: int
    converged: bool


@dataclass(frozen=True)
class TransportReport:
    """The transport maps of a checkpoint."""

    maps: tuple[MapReport, ...]

    def __repr__(self) -> str:
        means = ", ".join(f"{module} {self.mean(module):.3g}" for module in self.modules)
        return f"TransportReport({len(self.maps)} maps, entropy in nats: {means})"

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that have maps: first spaces (latents, heads), then modules in the order of a layer.

        All experts count as one.
        """
        groups = dict.fromkeys(found.group for found in self.maps)
        spaces = [group for group in groups if group not in (*MODULES, *_OF_EXPERTS)]
        return (*spaces, *(module for module in (*MODULES, *_OF_EXPERTS) if module in groups))

    def mean(self, module: str) -> float:
        """Return the mean entropy of a module's maps over layers, neighbours and experts."""
        return fmean(found.entropy for found in self.maps if found.group == module)

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `--json`.

        Keys:
            `entropy`: by module, the mean over its maps
            `maps`: each map's place, entropies, iterations and errors
        """
        return {
            "entropy": {module: self.mean(module) for module in self.modules},
            "maps": [{"name": m.name, **plain_fields(m)} for m in self.maps],
        }


def transport_report(
    out: str | Path,
    *,
    device: str = "auto",
    listener: Listener | None = None,
) -> TransportReport:
    """Solve for the transport maps of inserted layers, and report their entropies (Table 8).

    The solver's settings come from the operation that fused the layers; for other layers they are those of Algorithm 1
    (reg 0.06).

    Args:
        out: the output's folder
        device: where maps are solved
        listener: gets progress

    Returns:
        the maps' entropies and marginal errors

    Raises:
        BadInput: where nothing was inserted
    """
    folder = CheckpointFolder.open(Path(out))
    drawn = _drawn(folder)
    found = _solve(folder, drawn, devices.resolve(device), (listener or Quiet()).say)
    return TransportReport(tuple(_map_report(name, solved) for name, solved in found.items()))


def _drawn(folder: CheckpointFolder) -> list[dict[str, Coupling]]:
    """Return the maps of each inserted layer and neighbour. Raises BadInput where there are no maps."""
    pairs = _pairs(layer_history(folder, manifest_of(folder)))
    if not pairs:
        raise BadInput(
            f"{printable(str(folder.path))}: no operation inserted a layer between two of the base, so it has no maps;"
            " give another output"
        )
    drawn = [made for pair in pairs if (made := _draw(folder, *pair)) is not None]
    if not drawn:
        raise BadInput(
            f"{printable(str(folder.path))}: the inserted layers and their neighbours are of different kinds, so no"
            " modules of theirs correspond; give another output"
        )
    return drawn


def _map_report(name: str, found: Mapping[str, Any]) -> MapReport:
    """Return the report of one map from what was found when it was solved."""
    layer, neighbour, module = name.split(".", 2)
    return MapReport(
        layer=int(layer),
        neighbour=neighbour,
        module=module,
        uniform=math.log(found["rows"] * found["columns"]),
        **{key: found[key] for key in ("entropy", "iterations", "converged", "row_error", "column_error")},
    )


def _pairs(history: History) -> list[tuple[int, str, int, int, Mapping[str, object]]]:
    """Return (inserted layer, neighbour, lower layer, upper layer, solver settings) for each pair.

    In a chain of surgeries, the inserted layers of all surgeries are included, with their numbers in the last output.
    """
    plans = {
        number: recorded_plan(manifest.plan, source=f"{MANIFEST_FILE} (plan)").plan
        for number, manifest in history.surgeries.items()
    }
    kept = [layer.index for layer in history.layers if layer.base is not None]
    pairs = []
    for layer in history.layers:
        index = layer.index
        below = max((k for k in kept if k < index), default=None)
        above = min((k for k in kept if k > index), default=None)
        if layer.base is not None or layer.operation is None or below is None or above is None:
            continue
        assert layer.surgery is not None
        operation = plans[layer.surgery].operations[layer.operation]
        settings = operation.transport_settings or OtFusion(kind="ot_fusion").transport_settings
        pairs += [(index, "below", below, index, settings), (index, "above", index, above, settings)]
    return pairs


def _group(module: str) -> str:
    """Return a module's name without the number of an expert."""
    of_expert = _EXPERT.fullmatch(module)
    return module if of_expert is None else f"expert {of_expert['role']}"


def _draw(
    folder: CheckpointFolder, layer: int, neighbour: str, lower: int, upper: int, settings: Mapping[str, object]
) -> dict[str, Coupling] | None:
    """Return the maps between two layers, by name; None where the layers are of different kinds."""
    draft = Draft(dissect_folder(folder), folder.config, seed=0)
    draft.layers = [draft.layers[lower], draft.layers[upper]]
    if not draft.kind_of(0).is_like(draft.kind_of(1)):
        return None
    label, nothing = f"{layer}.{neighbour}", frozenset[str]()
    fuse_layers(
        draft,
        below=0,
        label=label,
        flow="opt_deus",
        settings=settings,
        skip=nothing,
        unaligned="average",
        order="cost_first",
    )
    return draft.couplings


def _solve(
    folder: CheckpointFolder,
    drawn: list[dict[str, Coupling]],
    device: str,
    progress: Callable[[str], None],
) -> dict[str, dict[str, Any]]:
    """Solve all maps, and return their reports by name; the maps of one pair are freed before the next pair."""
    from surgeon.writing.compute import Evaluator

    found: dict[str, dict[str, Any]] = {}
    for number, couplings in enumerate(drawn, 1):
        layer, neighbour = next(iter(couplings)).split(".")[:2]
        progress(f"solving the maps of layer {layer} and its neighbour {neighbour} ({number} of {len(drawn)})")
        only_maps = Blueprint(0, (), couplings, (), (), folder.config)
        evaluator = Evaluator(only_maps, folder, device=device, stopwatch=Stopwatch())
        for name, coupling in couplings.items():
            evaluator.map_of(MapRef(name))
            if _EXPERT.search(name):  # no other map needs it
                evaluator.forget([name])
            if coupling.groups is None:
                found[name] = evaluator.maps.reports[name]
    return found


def map_facts(history: History) -> tuple[MapFact, ...]:
    """Return every map that the manifests record, oldest surgery first; incomplete entries are left out."""
    found: list[MapFact] = []
    for surgery, manifest in history.surgeries.items():
        numbers, places = _numbers(manifest), history.lineage.layers(surgery)
        for name, recorded in manifest.transport_maps.items():
            label = _LABEL.fullmatch(name)
            if label is None:
                layer, module = printable(name), ""
            else:
                index = numbers.get((int(label["operation"]), label["place"]))
                layer = label["place"] if index not in places else str(places[index])
                module = _group(label["module"])
            if "partners" in recorded:  # a matching of experts, not a map between neurons
                continue
            if (fact := _fact(layer, module, recorded)) is not None:
                found.append(fact)
    return tuple(found)


def _numbers(manifest: Manifest) -> dict[tuple[int, str], int]:
    """Return layer numbers by (operation, place in its labels).

    The labels of an operation, sorted, match its new layers in order.
    """
    labels: dict[int, set[tuple[int, int, str]]] = {}
    for name in manifest.transport_maps:
        if label := _LABEL.fullmatch(name):
            known = labels.setdefault(int(label["operation"]), set())
            known.add((int(label["gap"]), int(label["nth"]), label["place"]))
    numbers: dict[tuple[int, str], int] = {}
    for operation, places in labels.items():
        made = [i for i, layer in enumerate(manifest.layers) if layer.base is None and layer.operation == operation]
        if len(made) == len(places):
            numbers |= {(operation, place): i for (_, _, place), i in zip(sorted(places), made, strict=True)}
    return numbers


def _fact(layer: str, module: str, recorded: dict[str, Any]) -> MapFact | None:
    """Return a map that a manifest records; None where a number is missing or not valid."""
    values = {
        key: recorded.get(key) for key in ("entropy", "row_error", "column_error", "rows", "columns", "iterations")
    }
    numbers = {key: float(value) for key, value in values.items() if isinstance(value, int | float)}
    if len(numbers) < len(values) or not all(map(math.isfinite, numbers.values())):
        return None
    if numbers["rows"] < 1 or numbers["columns"] < 1:
        return None
    return MapFact(
        layer=layer,
        module=module,
        entropy=numbers["entropy"],
        uniform=math.log(numbers["rows"] * numbers["columns"]),
        row_error=numbers["row_error"],
        column_error=numbers["column_error"],
        iterations=int(numbers["iterations"]),
        converged=bool(recorded.get("converged")),
    )


def transport_view(report: TransportReport) -> RenderableType:
    """Return a table with a row for each module: entropies, the largest possible, and the worst marginal error."""
    table = FittedTable("module")
    for column in ("entropy (nats)", "at most", "iterations", "L1 error"):
        table.add_column(column)
    for module in report.modules:
        maps = [found for found in report.maps if found.group == module]
        table.add_row(
            module,
            f"{report.mean(module):.2f}",
            f"{maps[0].uniform:.2f}",
            str(max(found.iterations for found in maps)),
            f"{max(max(found.row_error, found.column_error) for found in maps):.1e}",
        )
    layers = len({found.layer for found in report.maps})
    lines: list[RenderableType] = [
        Text(f"mean over {layers} inserted layer{'s' * (layers != 1)} and the base layers below and above"),
        table,
    ]
    if open_ones := [found.name for found in report.maps if not found.converged]:
        lines.append(Text(f"not converged: {', '.join(open_ones[:6])}", style="yellow"))
    return Group(*lines)
