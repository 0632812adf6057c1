"""Everything that a report shows of an output, gathered in one place. Runs a model only on request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.families.anatomy import Anatomy
from surgeon.manifest.manifest import Manifest
from surgeon.report.alignment import Probing
from surgeon.report.budget import Budget, parameter_budget
from surgeon.report.curves import Curve, TrainingRun, training_runs
from surgeon.report.history import History, layer_history
from surgeon.report.maps import MapFact, map_facts
from surgeon.report.routing_record import RoutingReport
from surgeon.report.spectra import Spectrum, gate_spectra
from surgeon.verify.verify import Verification


@dataclass(frozen=True)
class HeatMap:
    """A transport map, its rows scaled to sum to 1; `cells` hold the largest of square blocks of side `block`."""

    name: str
    rows: int
    columns: int
    block: int
    cells: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Findings:
    """The contents of a report; a field is empty or None where it was not requested or does not apply.

    `name` is the output folder's name, without its path. `verification` is None where no base was given.
    """

    name: str
    model_type: str
    dtypes: tuple[str, ...]
    manifest: Manifest
    history: History
    budget: Budget
    maps: tuple[MapFact, ...]
    spectra: tuple[Spectrum, ...]
    verification: Verification | None = None
    heat_maps: tuple[HeatMap, ...] = ()
    routing: RoutingReport | None = None
    probing: Probing | None = None
    runs: tuple[TrainingRun, ...] = ()
    curves: tuple[Curve, ...] = ()
    notes: tuple[str, ...] = field(default=())


def gather(
    folder: CheckpointFolder,
    anatomy: Anatomy,
    manifest: Manifest,
    *,
    verification: Verification | None = None,
    heat_maps: tuple[HeatMap, ...] = (),
    routing: RoutingReport | None = None,
    probing: Probing | None = None,
    curves: tuple[Curve, ...] = (),
    progress: Callable[[str], None] = lambda line: None,
) -> Findings:
    """Combine facts from headers, manifest and gating matrices with results of running. Raises BadInput as `find`."""
    history = layer_history(folder, manifest)
    return Findings(
        name=Path(folder.path).resolve().name,
        model_type=anatomy.family.model_type,
        dtypes=tuple(sorted({info.dtype for info in folder.tensors.values()})),
        manifest=manifest,
        history=history,
        budget=parameter_budget(folder, manifest, history),
        maps=map_facts(history),
        spectra=gate_spectra(folder, anatomy, progress=progress),
        verification=verification,
        heat_maps=heat_maps,
        routing=routing,
        probing=probing,
        runs=training_runs(history),
        curves=curves,
        notes=tuple(folder.notes),
    )
