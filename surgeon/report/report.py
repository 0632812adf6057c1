"""`surgeon report`: one self-contained page about an output, and its figures as pictures."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.common import devices
from surgeon.common.listener import Listener, Quiet
from surgeon.errors import BadInput, printable
from surgeon.families.anatomy import dissect
from surgeon.manifest.manifest import Manifest, manifest_of
from surgeon.report.alignment import Probing, branch_alignment
from surgeon.report.curves import read_curves
from surgeon.report.findings import Findings, HeatMap, gather
from surgeon.report.routing_record import RoutingReport, read_routing
from surgeon.report.transport import by_blocks, transport_report
from surgeon.verify.verify import Verification, verify

if TYPE_CHECKING:
    from torch import Tensor

# The findings that are plain data already.
_TOLD = (
    "name",
    "model_type",
    "dtypes",
    "budget",
    "maps",
    "spectra",
    "heat_maps",
    "probing",
    "runs",
    "curves",
    "notes",
)


@dataclass(frozen=True)
class Reported:
    """The files that a report wrote, and its findings."""

    html: Path | None
    pictures: tuple[Path, ...]
    findings: Findings

    def __repr__(self) -> str:
        return f"Reported({str(self.html) if self.html else None!r}, {len(self.pictures)} pictures)"

    def to_json(self) -> dict[str, Any]:
        """As plain data for `--json`: the files, and every number they show."""
        held = self.findings
        return {
            "html": None if self.html is None else str(self.html),
            "pictures": [str(path) for path in self.pictures],
            "layers": [asdict(layer) for layer in held.history.layers],
            "promise": held.manifest.promise,
            "verification": held.verification and held.verification.to_json(),
            "routing": held.routing and held.routing.to_json(),
            **{name: _plain(getattr(held, name)) for name in _TOLD},
        }


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return [_plain(one) for one in value] if isinstance(value, tuple) else value


def report(
    out: str | Path,
    *,
    html: str | Path | None = None,
    png: str | Path | None = None,
    base: str | Path | None = None,
    logits: bool = False,
    texts: Mapping[str, Path | None] | None = None,
    routing: str | Path | None = None,
    log: str | Path | None = None,
    maps: Sequence[str] = (),
    window: int = 128,
    windows: int = 8,
    device: str = "auto",
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> Reported:
    """Report on `out`: as one self-contained page `html`, and as pictures in the folder `png`.

    With `base` it runs the static proof (with `logits`, it compares logits too). On `texts`, by their domains' names,
    it records what routers and gates choose; `routing` is such a record. `log` holds losses, JSON lines of step,
    source and loss; `maps` are names of transport maps to show. Where there are control blocks, it runs the probe
    sentences of Control LLM. Raises BadInput where an option or file is wrong, PromiseBroken where `verify` cannot run
    `out`; a check that fails is shown in the page and the result.
    """
    from surgeon.report.page.document import render

    listener = listener or Quiet()
    if logits and base is None:
        raise BadInput("--verify compares logits with the base's; give --base DIR")
    if html is not None:
        check_place(Path(html))
    folder = CheckpointFolder.open(Path(out), trust_remote_code=trust_remote_code)
    manifest = manifest_of(folder)
    verification = None
    if base is not None:
        verification = verify(
            base,
            out,
            logits=logits,
            window=window,
            windows=windows,
            device=device,
            trust_remote_code=trust_remote_code,
            listener=listener,
        )
    findings = find(
        folder,
        manifest,
        verification=verification,
        texts=texts or {},
        routing=None if routing is None else Path(routing),
        log=None if log is None else Path(log),
        maps=maps,
        window=window,
        windows=windows,
        device=devices.resolve(device),
        trust_remote_code=trust_remote_code,
        progress=listener.say,
    )
    pictures: tuple[Path, ...] = ()
    if png is not None:
        from surgeon.report.pictures import draw_pictures

        pictures = draw_pictures(findings, Path(png))
    if html is not None:
        write_page(render(findings), Path(html))
    return Reported(None if html is None else Path(html), pictures, findings)


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
    """Everything that the page shows; runs models for `texts` and for control blocks. Raises BadInput as `report`."""
    if texts and routing is not None:
        raise BadInput("--text and --routing exclude each other; record on texts, or show a record")
    # Files are read first, so that a wrong path is reported before any work.
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
    """Raise BadInput, before any work, where the page cannot be written there."""
    shown = printable(str(html))
    if html.is_dir():
        raise BadInput(f"--html {shown}: a folder; give the page's file name")
    if not html.parent.is_dir():
        raise BadInput(f"--html {shown}: cannot be written, there is no folder {printable(str(html.parent))}; make it")


def write_page(page: str, to: Path) -> None:
    """Write the page beside `to`, then rename it: `to` is the old file or the new one. Raises BadInput on an error."""
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
    from surgeon.report.routing import record_choices

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
    return branch_alignment(folder, device=device, trust_remote_code=trust_remote_code, progress=progress)


def _heat_map(name: str, matrix: Tensor) -> HeatMap:
    rows, columns = matrix.shape
    cells, block = by_blocks(matrix.float().cpu() * rows, _CELLS)
    return HeatMap(name, rows, columns, block, tuple(tuple(row) for row in cells.tolist()))
