"""The losses of an output, and of its base where that is given, on texts: what a report shows where nothing chooses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from surgeon.common.listener import Listener
from surgeon.errors import printable
from surgeon.evaluate.evaluate import evaluate
from surgeon.evaluate.open_texts import open_texts
from surgeon.evaluate.results import SourceScores


@dataclass(frozen=True)
class TextLoss:
    """The scores of one model on one text; `of_base` says that it is the base."""

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
    """Measure the losses as `surgeon evaluate` does, text by text.

    Args:
        out: the output's folder
        base: the base's, a row of its own
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
    # Names of texts are anybody's; those of sources are not.
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
