"""What `inspect`, `routing_report` and `report` give back."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.families.anatomy import Anatomy
from surgeon.manifest import Manifest

if TYPE_CHECKING:
    from surgeon.findings.gathering import Findings


# Of a report's findings, what is plain data as it stands.
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
class Inspection:
    """What a checkpoint folder is: its base facts and, if it is an output of surgeon, its manifest."""

    path: Path
    folder: CheckpointFolder
    anatomy: Anatomy
    manifest: Manifest | None
    parameters: int

    def __repr__(self) -> str:
        surgery = "no surgery" if self.manifest is None else ", ".join(o.op for o in self.manifest.operations)
        family, layers = self.anatomy.family.model_type, self.anatomy.sizes.layers
        return f"Inspection({str(self.path)!r}, {family}, {layers} layers, {self.parameters:,} parameters, {surgery})"

    def to_json(self) -> dict[str, Any]:
        """As plain data for `--json`."""
        return {
            "path": str(self.path),
            "model_type": self.anatomy.family.model_type,
            "layers": self.anatomy.sizes.layers,
            "parameters": self.parameters,
            "tied_embeddings": self.anatomy.tied,
            "shards": list(self.folder.shards),
            "surgery": self.manifest.model_dump() if self.manifest else None,
        }


@dataclass(frozen=True)
class RouterChoices:
    """PMoE's router on one text: mean weight of each slot, share of tokens it is the largest for, and some tokens.

    `examples` are (token, its slot of largest weight).
    """

    mean: tuple[float, ...]
    largest: tuple[float, ...]
    examples: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class GateChoices:
    """A gate on one text: its mean value (α of an interpolator), and the share of tokens for which it is zero.

    `loudness` is the mean of what an adapter adds, ‖·‖₁ over the width; None for an interpolator.
    """

    mean: float
    closed: float
    loudness: float | None


@dataclass(frozen=True)
class TextChoices:
    """Everything chosen on one text of `tokens` tokens.

    `states[s][k]` is the weight that site s gave control state k, mean over tokens; rows are in the order of
    `RoutingReport.sites`. `gates` are by the layer's number and what stands there (`3.adapter`, `3.interpolator`).
    """

    tokens: int
    router: RouterChoices | None
    states: tuple[tuple[float, ...], ...]
    gates: dict[str, GateChoices]


@dataclass(frozen=True)
class RoutingReport:
    """What was chosen, text by text.

    `sites` are (layer, block) of the control states, `router_layer` is how many layers lie below PMoE's router.
    """

    model: str
    slots: int
    router_layer: int | None
    sites: tuple[tuple[int, str], ...]
    texts: dict[str, TextChoices] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"RoutingReport({self.model!r}, {self.slots} slots, {len(self.sites)} sites, texts {list(self.texts)})"

    def to_json(self) -> dict[str, Any]:
        """As plain data: the file's content and `--json`."""
        return {
            "surgeon_routing": 1,
            "model": self.model,
            "router": None if self.router_layer is None else {"layer": self.router_layer, "slots": self.slots},
            "sites": [list(site) for site in self.sites],
            "texts": {
                name: {
                    "tokens": text.tokens,
                    "router": None
                    if text.router is None
                    else {
                        "mean": list(text.router.mean),
                        "largest": list(text.router.largest),
                        "examples": [list(example) for example in text.router.examples],
                    },
                    "states": [list(row) for row in text.states],
                    "gates": {
                        gate: {"mean": told.mean, "closed": told.closed, "loudness": told.loudness}
                        for gate, told in text.gates.items()
                    },
                }
                for name, text in self.texts.items()
            },
        }


@dataclass(frozen=True)
class Reported:
    """What a report wrote, and what it tells."""

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
