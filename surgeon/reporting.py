"""`surgeon report`: gather what is to be told of an output, running what was asked for, and write the page."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.entropies import by_blocks, transport_report
from surgeon.errors import BadInput, printable
from surgeon.families.anatomy import dissect
from surgeon.findings.alignment import Probing, tell_alignment
from surgeon.findings.curves import read_curves
from surgeon.findings.gathering import Findings, HeatMap, gather
from surgeon.findings.recorded import read_routing
from surgeon.manifest import Manifest
from surgeon.results import RoutingReport, Verification

if TYPE_CHECKING:
    from torch import Tensor

# A heat map in the page has at most this many cells a side.
_CELLS = 192


def find(
    folder: CheckpointFolder,
    manifest: Manifest,
    *,
    verification: Verification | None,
    texts: Mapping[str, Path | None],
    routing: Path | None,
    log: Path | None,
    maps: Sequence[str],
    window: int,
    windows: int,
    device: str,
    trust_remote_code: bool,
    progress: Callable[[str], None],
) -> Findings:
    """Everything the page tells; models are run for `texts`, and where there are control blocks. Raises BadInput."""
    if texts and routing is not None:
        raise BadInput("--text and --routing exclude each other: record anew, or show what was recorded")
    # Files are read first, so that a wrong path is told before any work.
    recorded = read_routing(routing) if routing is not None else None
    curves = read_curves(log) if log is not None else ()
    anatomy = dissect(folder.config, folder.tensors)
    heat_maps: list[HeatMap] = []
    if maps:

        def keep(name: str, matrix: Tensor) -> None:
            heat_maps.append(_heat_map(name, matrix))

        transport_report(folder.path, maps=maps, keep=keep, device=device, progress=progress)
    return gather(
        folder,
        anatomy,
        manifest,
        verification=verification,
        heat_maps=tuple(heat_maps),
        routing=recorded or _record(folder, texts, window, windows, device, trust_remote_code, progress),
        probing=_probe(folder, device, trust_remote_code, progress),
        curves=curves,
        progress=progress,
    )


def check_place(html: Path) -> None:
    """BadInput where the page cannot be written there, told before any work."""
    shown = printable(str(html))
    if html.is_dir():
        raise BadInput(f"--html {shown}: a folder; give the page's file name")
    if not html.parent.is_dir():
        raise BadInput(f"--html {shown}: cannot be written, there is no folder {printable(str(html.parent))}; make it")


def write_page(page: str, to: Path) -> None:
    """Write the page beside its place and move it there: `to` is the old file or the whole new one."""
    try:
        handle, staged = tempfile.mkstemp(prefix=f".{to.name}.", dir=to.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(page)
            Path(staged).chmod(0o644)
            Path(staged).replace(to)
        except BaseException:
            Path(staged).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise BadInput(f"{printable(str(to))}: cannot be written ({error.strerror})") from None


def _record(
    folder: CheckpointFolder,
    texts: Mapping[str, Path | None],
    window: int,
    windows: int,
    device: str,
    trust_remote_code: bool,
    progress: Callable[[str], None],
) -> RoutingReport | None:
    if not texts:
        return None
    from surgeon.choices import record_choices

    return record_choices(
        folder.path,
        texts,
        window=window,
        windows=windows,
        device=device,
        trust_remote_code=trust_remote_code,
        progress=progress,
    )


def _probe(
    folder: CheckpointFolder, device: str, trust_remote_code: bool, progress: Callable[[str], None]
) -> Probing | None:
    surgery = folder.config.get("surgery")
    if not isinstance(surgery, dict) or not surgery.get("control"):
        return None
    return tell_alignment(folder, device=device, trust_remote_code=trust_remote_code, progress=progress)


def _heat_map(name: str, matrix: Tensor) -> HeatMap:
    rows, columns = matrix.shape
    cells, block = by_blocks(matrix.float().cpu() * rows, _CELLS)
    return HeatMap(name, rows, columns, block, tuple(tuple(row) for row in cells.tolist()))
