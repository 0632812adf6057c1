"""Gather everything that a report shows of an output. Models run only for logits, and for what routers choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surgeon.anatomy.dissect import dissect_folder
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.common.json_results import plain, plain_fields
from surgeon.common.listener import Listener
from surgeon.lab.reports.curves import Curve, TrainingRun, curves_of, training_runs
from surgeon.lab.reports.history import Budget, History, WiderEnd, layer_history, parameter_budget, wider_ends
from surgeon.lab.reports.routing import routing_report
from surgeon.lab.reports.routing_record import RoutingReport
from surgeon.lab.reports.transport import MapFact, map_facts
from surgeon.manifest.manifest import Manifest
from surgeon.manifest.reading import manifest_of
from surgeon.verification.verification import Verification
from surgeon.verification.verify import verify


@dataclass(frozen=True)
class Findings:
    """The contents of a report; a field is empty or None where it was not requested or does not apply.

    `name` is the name of the output folder, without its path. `verification` is None where no base was given.
    """

    name: str
    model_type: str
    dtypes: tuple[str, ...]
    manifest: Manifest
    history: History
    ends: tuple[WiderEnd, ...]
    budget: Budget
    maps: tuple[MapFact, ...]
    verification: Verification | None
    routing: RoutingReport | None
    runs: tuple[TrainingRun, ...]
    curves: tuple[Curve, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `--json`: every number that the page shows."""
        return {
            "layers": plain(self.history.layers),
            "promise": self.manifest.promise,
            **plain_fields(self, without=("manifest", "history")),
        }


def gather(
    out: Path,
    base: str | Path | None,
    texts: Mapping[str, Path | None],
    *,
    logits: bool,
    window: int,
    windows: int,
    device: str,
    trust_remote_code: bool,
    listener: Listener,
) -> Findings:
    """Read and measure everything that the page shows.

    Args:
        out: the output's folder
        base: the base's folder, against which the static proof runs; None: no proof
        texts: by their domains' names, texts on which choices of routers and gates are recorded; empty: none
        logits: also compare logits with the base's
        window: tokens in each sequence
        windows: sequences of each text; 0: all of it
        device: where models run
        trust_remote_code: run the output's own code
        listener: gets progress and notes

    Returns:
        the contents of the report

    Raises:
        BadInput: where a file or option is wrong
        PromiseBroken: where `verify` cannot run the output
    """
    folder = CheckpointFolder.open(out, trust_remote_code=trust_remote_code)
    manifest = manifest_of(folder)
    running: dict[str, Any] = {
        "window": window,
        "windows": windows,
        "device": device,
        "trust_remote_code": trust_remote_code,
        "listener": listener,
    }
    routing = routing_report(out, texts, **running) if texts else None
    verification = None if base is None else verify(base, out, logits=logits, **running)
    anatomy = dissect_folder(folder)
    history = layer_history(folder, manifest)
    runs = training_runs(history)
    return Findings(
        name=folder.path.resolve().name,
        model_type=anatomy.family.model_type,
        dtypes=tuple(sorted({info.dtype for info in folder.tensors.values()})),
        manifest=manifest,
        history=history,
        ends=wider_ends(folder, history, anatomy),
        budget=parameter_budget(folder, manifest, history),
        maps=map_facts(history),
        verification=verification,
        routing=routing,
        runs=runs,
        curves=curves_of(runs),
        notes=tuple(folder.notes),
    )
