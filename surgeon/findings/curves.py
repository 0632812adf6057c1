"""Learning and forgetting: a log of losses, JSON lines of `step`, `source` and `loss`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from surgeon.checkpoint.strict_json import parse_json_strict
from surgeon.errors import BadInput, printable

MAX_LOG_BYTES = 64_000_000


@dataclass(frozen=True)
class Curve:
    """Losses on one source, in nats a token, by step."""

    source: str
    points: tuple[tuple[int, float], ...]


def read_curves(log: Path) -> tuple[Curve, ...]:
    """One curve a source, in the order they appear; BadInput names the first line that is not one of a log.

    Lines without a `loss` and `source` (a trainer's other news) are passed over; so are losses that are no numbers.
    """
    shown = printable(str(log))
    try:
        if log.stat().st_size > MAX_LOG_BYTES:
            raise BadInput(f"{shown}: {log.stat().st_size} bytes; a log of losses has at most {MAX_LOG_BYTES}")
        lines = log.read_bytes().splitlines()
    except OSError as error:
        raise BadInput(f"{shown}: cannot be read ({error.strerror})") from None
    curves: dict[str, list[tuple[int, float]]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        entry = parse_json_strict(line, file=f"{log}, line {number}", max_bytes=1_000_000)
        if not isinstance(entry, dict):
            raise BadInput(f'{shown}, line {number}: expected {{"step": …, "source": …, "loss": …}}')
        step, source, loss = entry.get("step"), entry.get("source"), entry.get("loss")
        if source is None or loss is None:
            continue
        if not isinstance(source, str) or type(step) is not int or not isinstance(loss, int | float):
            raise BadInput(
                f"{shown}, line {number}: expected a whole number as `step`, a text as `source`, a number as `loss`"
            )
        if math.isfinite(loss):
            curves.setdefault(source, []).append((step, float(loss)))
    if not curves:
        raise BadInput(f'{shown}: no line has a loss; expected {{"step": …, "source": …, "loss": …}}')
    return tuple(Curve(source, tuple(sorted(points))) for source, points in curves.items())
