"""Tell what an output is and what it does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from surgeon import devices
from surgeon.api.common import Quiet, manifest_of
from surgeon.api.proving import verify
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.errors import BadInput, printable
from surgeon.execute import Listener
from surgeon.families.anatomy import dissect
from surgeon.results import Inspection, Reported, RoutingReport


def inspect(folder: str | Path, *, trust_remote_code: bool = False) -> Inspection:
    """What a checkpoint is, what was done to it, which of its tensors are new. Raises BadInput."""
    opened = CheckpointFolder.open(Path(folder), trust_remote_code=trust_remote_code)
    manifest = manifest_of(opened) if opened.manifest is not None else None
    return Inspection(
        path=Path(folder),
        folder=opened,
        anatomy=dissect(opened.config, opened.tensors),
        manifest=manifest,
        parameters=sum(info.numel for info in opened.tensors.values()),
    )


def routing_report(
    out: str | Path,
    texts: Mapping[str, Path | None],
    *,
    to: Path | None = None,
    window: int = 128,
    windows: int = 8,
    device: str = "auto",
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> RoutingReport:
    """Run `out` over texts, by their domains' names (None: the built-in probe), and tell what routers and gates chose.

    `windows` of `window` tokens are taken of each text, 0 for all of it. `to` gets the result as JSON. Raises BadInput
    for a checkpoint without grafts that choose, and for texts that cannot be read.
    """
    from surgeon.choices import record_choices

    report = record_choices(
        out,
        texts,
        window=window,
        windows=windows,
        device=devices.resolve(device),
        trust_remote_code=trust_remote_code,
        progress=(listener or Quiet()).say,
    )
    if to is not None:
        try:
            to.write_text(json.dumps(report.to_json(), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise BadInput(f"{printable(str(to))}: cannot be written ({error.strerror})") from None
    return report


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
    """Tell all that can be told of `out`: as one self-contained page `html`, as pictures in the folder `png`.

    With `base`, the static proof is run (`logits`: and logits are compared). `texts`, by their domains' names, record
    what routers and gates choose, `routing` is such a record. `log` holds losses, JSON lines of step, source and loss;
    `maps` are names of transport maps to show. Where there are control blocks, the probe sentences of Control LLM are
    run. Raises BadInput; a broken promise is told in the page and the result.
    """
    from surgeon.reporting import check_place, find, write_page
    from surgeon.views.page.document import render

    listener = listener or Quiet()
    if logits and base is None:
        raise BadInput("--verify compares logits with the base's: give --base DIR")
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
        from surgeon.views.pictures import draw_pictures

        pictures = draw_pictures(findings, Path(png))
    if html is not None:
        write_page(render(findings), Path(html))
    return Reported(None if html is None else Path(html), pictures, findings)
