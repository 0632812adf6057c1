"""`surgeon blend`: interpolate a run and its base, and measure the result on text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from surgeon import Blend, write_blend
from surgeon.common.formatting import listed, size
from surgeon.common.json_results import plain_fields
from surgeon.common.listener import Listener
from surgeon.errors import printable
from surgeon.lab.evaluation.evaluate import evaluate, evaluation_view
from surgeon.lab.evaluation.results import Evaluation, SourceScores


@dataclass(frozen=True)
class Blended:
    """A blend, and the scores of base, run and blend on the given text (None: no text was given)."""

    written: Blend
    measured: Evaluation[SourceScores] | None

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `--json`.

        Keys:
            `written`: the keys of `write_blend`
            `measured`: the keys of `evaluate`, for base, run and blend (null: no text was given)
        """
        return plain_fields(self)


def blend(
    run: str | Path,
    dest: str | Path,
    *,
    base: str | Path,
    alpha: float,
    alpha_top: float | None = None,
    data: Sequence[str | Path] | Mapping[str, str | Path] | None = None,
    link: bool = False,
    trust_remote_code: bool = False,
    device: str = "auto",
    listener: Listener | None = None,
) -> Blended:
    """Blend `run` with its base as `write_blend` does, and measure base, run and blend on text.

    Args:
        run: the folder that `train` wrote.
        dest: the new folder.
        base: the folder of the model that the run's last surgery, or training, began with.
        alpha: the run's share; 1: the run, 0: the base.
        alpha_top: the run's share in the highest layer; None: `alpha`.
        data: texts as for `evaluate`; None: nothing is measured.
        link: hard-link shards of the run in which nothing changes.
        trust_remote_code: run the code that the models bring.
        device: where the models are measured.
        listener: receives progress.

    Raises:
        BadInput: as `write_blend`, and where a text cannot be opened.
    """
    more: dict[str, Any] = {"trust_remote_code": trust_remote_code, "listener": listener}
    written = write_blend(run, dest, base=base, alpha=alpha, alpha_top=alpha_top, link=link, **more)
    if not data:
        return Blended(written, None)
    measured = evaluate([str(base), str(run), str(dest)], data, device=device, **more)
    return Blended(written, measured)


def blended_view(blended: Blended) -> RenderableType:
    """Return a text for the terminal: what was blended, and the scores on the given text."""
    written = blended.written
    shares = f"{written.alpha:g}"
    if written.alpha_top != written.alpha:
        shares += f" in the lowest layer to {written.alpha_top:g} in the highest"
    parts = [f"{written.tensors} tensors interpolated"] * bool(written.tensors)
    parts += [f"{written.scaled} of added parts multiplied"] * bool(written.scaled)
    lines: list[RenderableType] = [
        Text.assemble(
            ("done ", "bold green"), f"{printable(str(written.path))}: {shares} of the run, the rest of the base"
        ),
        Text(f"{listed(parts)} ({size(written.nbytes)} written); `surgeon revert` gives the base back", style="dim"),
    ]
    if written.moved.text:
        lines.append(Text(written.moved.text, style="dim"))
    if blended.measured is not None:
        lines += [Text(), evaluation_view(blended.measured)]
    return Group(*lines)
