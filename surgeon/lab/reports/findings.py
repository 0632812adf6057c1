"""Gather everything that a report shows of an output. Models run only where the report needs them.

Where the output has no routers or gates, the report shows losses on texts, of the output and of its base where that is
given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgeon.anatomy.dissect import dissect_folder
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.common import devices
from surgeon.common.json_results import plain, plain_fields
from surgeon.common.listener import Listener
from surgeon.errors import printable
from surgeon.lab.evaluation.evaluate import evaluate
from surgeon.lab.evaluation.open_texts import open_texts
from surgeon.lab.evaluation.results import SourceScores
from surgeon.lab.reports.curves import Curve, TrainingRun, read_curves, training_runs
from surgeon.lab.reports.history import Budget, History, WiderEnd, layer_history, parameter_budget, wider_ends
from surgeon.lab.reports.routing import routing_report
from surgeon.lab.reports.routing_record import NothingChooses, RoutingReport, read_routing
from surgeon.lab.reports.transport import MapFact, map_facts, see_maps
from surgeon.manifest.manifest import Manifest
from surgeon.manifest.reading import manifest_of
from surgeon.verification.verification import Verification
from surgeon.verification.verify import verify

if TYPE_CHECKING:
    from torch import Tensor

    from surgeon.lab.reports.measurements import Probing, Spectrum


# A heat map in the page has at most this many cells a side.
_CELLS = 192


@dataclass(frozen=True)
class HeatMap:
    """A transport map whose rows are scaled to sum to 1; each cell is the maximum of a square block of side `block`."""

    name: str
    rows: int
    columns: int
    block: int
    cells: tuple[tuple[float, ...], ...]


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
    spectra: tuple[Spectrum, ...]
    verification: Verification | None
    heat_maps: tuple[HeatMap, ...]
    routing: RoutingReport | None
    losses: tuple[TextLoss, ...]
    probing: Probing | None
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


@dataclass(frozen=True)
class Sources:
    """The inputs of a report besides the output: the base, the texts for models, and files to read.

    With `base` the static proof runs; with `logits` it also compares the models' logits. `texts` maps names of domains
    to texts. `routing` is a record that replaces texts, `log` is a file of losses, `maps` lists names of transport
    maps. `windows` sequences of `window` tokens are taken from each text.
    """

    base: str | Path | None
    logits: bool
    texts: Mapping[str, Path | None]
    routing: Path | None = None
    log: Path | None = None
    maps: Sequence[str] = ()
    window: int = 128
    windows: int = 8

    @property
    def files(self) -> list[tuple[str, Path]]:
        """(Description for errors, path) of each file to read."""
        named = [("text", text) for text in self.texts.values()]
        named += [("routing record", self.routing), ("log of losses", self.log)]
        return [(what, file) for what, file in named if file is not None]


def gather(out: Path, sources: Sources, *, device: str, trust_remote_code: bool, listener: Listener) -> Findings:
    """Read and measure everything that the page shows; models run for the proof, for texts and for control blocks.

    Raises BadInput, and PromiseBroken where `verify` cannot run the output.
    """
    folder = CheckpointFolder.open(out, trust_remote_code=trust_remote_code)
    manifest = manifest_of(folder)
    running: dict[str, Any] = {
        "window": sources.window,
        "windows": sources.windows,
        "device": device,
        "trust_remote_code": trust_remote_code,
        "listener": listener,
    }
    device = devices.resolve(device)
    # Files are read first, so that a wrong path is reported before any work.
    recorded = read_routing(sources.routing) if sources.routing is not None else None
    curves = read_curves(sources.log) if sources.log is not None else ()
    verification = None if sources.base is None else verify(sources.base, out, logits=sources.logits, **running)
    anatomy = dissect_folder(folder)
    heat_maps = _heat_maps(folder, sources.maps, device, listener)
    losses: tuple[TextLoss, ...] = ()
    if sources.texts:
        try:
            recorded = routing_report(out, sources.texts, **running)
        except NothingChooses:
            losses = text_losses(out, sources.base, sources.texts, **running)
    from surgeon.lab.reports.measurements import branch_alignment, gate_spectra

    surgery = folder.config.get("surgery")
    branches = isinstance(surgery, dict) and bool(surgery.get("control"))
    probing = branch_alignment(folder, device, listener) if branches else None
    history = layer_history(folder, manifest)
    return Findings(
        name=folder.path.resolve().name,
        model_type=anatomy.family.model_type,
        dtypes=tuple(sorted({info.dtype for info in folder.tensors.values()})),
        manifest=manifest,
        history=history,
        ends=wider_ends(folder, history, anatomy),
        budget=parameter_budget(folder, manifest, history),
        maps=map_facts(history),
        spectra=gate_spectra(folder, anatomy, listener),
        verification=verification,
        heat_maps=heat_maps,
        routing=recorded,
        losses=losses,
        probing=probing,
        runs=training_runs(history),
        curves=curves,
        notes=tuple(folder.notes),
    )


def _heat_maps(folder: CheckpointFolder, maps: Sequence[str], device: str, listener: Listener) -> tuple[HeatMap, ...]:
    """Solve for the named transport maps, each once, and return them as heat maps."""
    found: list[HeatMap] = []

    def keep(name: str, matrix: Tensor) -> None:
        """Store a map as a heat map, its rows scaled to sum to 1."""
        rows, columns = matrix.shape
        cells, block = _by_blocks(matrix.float().cpu() * rows)
        found.append(HeatMap(name, rows, columns, block, tuple(tuple(row) for row in cells.tolist())))

    if maps:
        see_maps(folder, maps, keep, device, listener)
    return tuple(found)


def _by_blocks(matrix: Tensor) -> tuple[Tensor, int]:
    """Reduce a matrix to at most `_CELLS` a side by block maxima; return (the reduced matrix, the side of a block)."""
    from torch.nn import functional

    block = -(-max(matrix.shape) // _CELLS)
    return functional.max_pool2d(matrix[None, None], block, ceil_mode=True)[0, 0], block


@dataclass(frozen=True)
class TextLoss:
    """The scores of one model on one text; `of_base`: the model is the base."""

    text: str
    of_base: bool
    scores: SourceScores

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `--json`."""
        return {"text": self.text, "model": "base" if self.of_base else "output", **self.scores.to_json()}


def text_losses(
    out: Path,
    base: str | Path | None,
    texts: Mapping[str, Path | None],
    *,
    window: int,
    windows: int,
    device: str,
    trust_remote_code: bool,
    listener: Listener,
) -> tuple[TextLoss, ...]:
    """Return the losses that `surgeon evaluate` would measure, text by text.

    Args:
        out: the output's folder
        base: the base's folder; it gets rows of its own
        texts: by their names; None is the built-in probe
        window: tokens in each window
        windows: documents of each text; 0: all of it
        device: where the models run
        trust_remote_code: run the models' own code
        listener: gets progress and notes

    Returns:
        the base's and the output's losses, text by text

    Raises:
        BadInput: for models that are no causal language models, and for texts that cannot be read
    """
    probe = Path(str(files("surgeon.models") / "probe.txt"))
    # A text may have any name, but a source's name is restricted. So sources get other names, which are replaced below.
    opened = open_texts({f"text-{nth}": text or probe for nth, text in enumerate(texts.values())})
    named = [replace(text, name=name) for name, text in zip(texts, opened, strict=True)]
    for nth, text in enumerate(named):
        if windows and len(text) > windows:
            ways = "--windows N takes more, --windows 0 all"
            listener.say(f"text {printable(text.name)}: {windows} of its {len(text):,} documents; {ways}")
            named[nth] = text.sample(windows)
    found = evaluate(
        str(out),
        named,
        base=base if base is None else str(base),
        length=window,
        most=0,
        device=device,
        trust_remote_code=trust_remote_code,
        listener=listener,
    )
    rows = [(base is not None and nth == 0, row) for nth, row in enumerate(found.models)]
    return tuple(TextLoss(name, of_base, row.sources[nth]) for nth, name in enumerate(texts) for of_base, row in rows)
