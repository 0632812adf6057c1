"""`surgeon blend`: interpolate a run and its base, and measure the result on text."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from surgeon import BaseAnswers, Blend, Prompts, check_destination, open_checkpoint, read_prompts, write_blend
from surgeon.common.devices import fast_dtype
from surgeon.common.formatting import listed, size
from surgeon.common.json_results import plain_fields
from surgeon.common.listener import Listener, Quiet
from surgeon.errors import BadInput, printable
from surgeon.lab.evaluation.evaluate import evaluate, evaluation_view
from surgeon.lab.evaluation.results import Evaluation, SourceScores

# The most KL(base ‖ model) on the base's answers, in nats a token, at which they count as kept.
MOST_KL = 0.03
# The shares that are tried in turn; the last is taken where none of them keeps the answers.
_SHARES = (1.0, 0.75, 0.5, 0.25)


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
    alpha: float | None = None,
    alpha_top: float | None = None,
    data: Sequence[str | Path] | Mapping[str, str | Path] | None = None,
    link: bool = False,
    trust_remote_code: bool = False,
    device: str = "auto",
    listener: Listener | None = None,
) -> Blended:
    """Blend `run` with its base as `write_blend` does, and measure base, run and blend on text.

    Without `alpha` the share is chosen by answers (`share_by_answers`).

    Args:
        run: the folder that `train` wrote.
        dest: the new folder.
        base: the folder of the model that the run's last surgery, or training, began with.
        alpha: the run's share; 1: the run, 0: the base; None: chosen by answers.
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
    if alpha is None:
        if alpha_top is not None:
            raise BadInput(f"alpha_top is {alpha_top:g}, and there is no alpha; give both, or neither")
        check_destination(Path(dest), Path(run))
        alpha = share_by_answers(run, base, dtype=fast_dtype(device), device=device, **more)
    written = write_blend(run, dest, base=base, alpha=alpha, alpha_top=alpha_top, link=link, **more)
    if not data:
        return Blended(written, None)
    measured = evaluate([str(base), str(run), str(dest)], data, device=device, **more)
    return Blended(written, measured)


def share_by_answers(
    run: str | Path,
    base: str | Path,
    *,
    trust_remote_code: bool = False,
    dtype: str = "auto",
    device: str = "auto",
    listener: Listener | None = None,
) -> float:
    """Return the largest of the shares 1, 0.75, 0.5 and 0.25 at which a blend keeps the base's answers, else 0.25.

    A blend keeps them where KL(base ‖ blend) is at most 0.03 nats a token on the base's own answers.

    The prompts are the shipped instructions, which the prompts that measure answers do not repeat. Nothing is trained.
    Blends are written to a temporary folder, one at a time, from the largest share on. Raises BadInput as `write_blend`
    and `kept_answers` do.
    """
    opened = open_checkpoint(base, trust_remote_code=trust_remote_code)
    key = BaseAnswers.of(opened, _some(), dtype=dtype, device=device)
    listener = listener or Quiet()
    for share in _SHARES:
        with tempfile.TemporaryDirectory(prefix="surgeon-blend-") as room:
            blended = Path(run)
            if share < 1:
                blended = Path(room) / "blend"
                write_blend(run, blended, base=base, alpha=share, trust_remote_code=trust_remote_code)
            opened = open_checkpoint(blended, trust_remote_code=trust_remote_code)
            found = key.apart(opened, opened.load(dtype=dtype, device=key.device)).loss
        listener.say(f"{share:g} of the run: KL to the base on its answers is {found:.4f} nats a token")
        if found <= MOST_KL:
            return share
    listener.say(f"no share keeps it within {MOST_KL:g}; {_SHARES[-1]:g} of the run is taken")
    return _SHARES[-1]


def _some() -> Prompts:
    """Return every third of the shipped instructions: enough for a mean over some thousand tokens."""
    whole = read_prompts("instructions")
    return Prompts(whole.name, whole.prompts[::3], whole.expected[::3])


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
