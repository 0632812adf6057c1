"""Transport maps from manifests: entropies and marginal errors, for every surgery of the lineage."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from surgeon.errors import printable
from surgeon.manifest.manifest import Manifest
from surgeon.report.history import History

_LABEL = re.compile(
    r"operations\[(?P<operation>\d{1,6})\]\.(?P<place>after\[(?P<gap>\d{1,6})\]\.(?P<nth>\d{1,6}))\.(?P<module>\w+)"
)


@dataclass(frozen=True)
class MapFact:
    """One map that was solved to make a layer, between the two layers it was fused from.

    `layer` is the made layer's number in this output, as text (its label where that is not known). `entropy` is in
    nats, at most `uniform`. Errors are L1 distances of T's marginals from uniform.
    """

    layer: str
    module: str
    entropy: float
    uniform: float
    row_error: float
    column_error: float
    iterations: int
    converged: bool


def map_facts(history: History) -> tuple[MapFact, ...]:
    """Every map of every known surgery, oldest first. Incomplete entries of a manifest are left out."""
    found: list[MapFact] = []
    for nth, manifest in enumerate(history.surgeries):
        numbers, places = _numbers(manifest), history.places(nth)
        for name, recorded in manifest.transport_maps.items():
            label = _LABEL.fullmatch(name)
            if label is None:
                layer, module = printable(name), ""
            else:
                index = numbers.get((int(label["operation"]), label["place"]))
                layer = label["place"] if index not in places else str(places[index])
                module = label["module"]
            if (fact := _fact(layer, module, recorded)) is not None:
                found.append(fact)
    return tuple(found)


def _numbers(manifest: Manifest) -> dict[tuple[int, str], int]:
    """Layers by (operation, place in its labels): an operation's labels, in order, are its new layers, in order."""
    labels: dict[int, set[tuple[int, int, str]]] = {}
    for name in manifest.transport_maps:
        if label := _LABEL.fullmatch(name):
            known = labels.setdefault(int(label["operation"]), set())
            known.add((int(label["gap"]), int(label["nth"]), label["place"]))
    numbers: dict[tuple[int, str], int] = {}
    for operation, places in labels.items():
        made = [i for i, layer in enumerate(manifest.layers) if layer.base is None and layer.operation == operation]
        if len(made) == len(places):
            numbers |= {(operation, place): i for (_, _, place), i in zip(sorted(places), made, strict=True)}
    return numbers


def _fact(layer: str, module: str, recorded: dict[str, Any]) -> MapFact | None:
    values = {
        key: recorded.get(key) for key in ("entropy", "row_error", "column_error", "rows", "columns", "iterations")
    }
    numbers = {key: float(value) for key, value in values.items() if isinstance(value, int | float)}
    if len(numbers) < len(values) or not all(map(math.isfinite, numbers.values())):
        return None
    if numbers["rows"] < 1 or numbers["columns"] < 1:
        return None
    return MapFact(
        layer=layer,
        module=module,
        entropy=numbers["entropy"],
        uniform=math.log(numbers["rows"] * numbers["columns"]),
        row_error=numbers["row_error"],
        column_error=numbers["column_error"],
        iterations=int(numbers["iterations"]),
        converged=bool(recorded.get("converged")),
    )
