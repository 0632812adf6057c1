"""What `verify` and `diff` give back."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surgeon.verification.encoders import OutputComparison
    from surgeon.verification.logits import LogitComparison
    from surgeon.verification.static import Check
    from surgeon.verification.streaming import FirstDifference, StreamedComparison


@dataclass(frozen=True)
class Verification:
    """Whether an output keeps its manifest's promises.

    `checks` are the static ones, `comparisons` those by logits. `holds` is true when every promise holds;
    where none was made (`promise` none), differing logits are as promised, and so they are where the output was
    `trained` since the surgery.
    """

    promise: str
    checks: list[Check]
    comparisons: list[LogitComparison | OutputComparison] = field(default_factory=list)
    streamed: list[StreamedComparison] = field(default_factory=list)
    tokens: str = ""
    trained: bool = False

    def __repr__(self) -> str:
        checks = f"{sum(check.holds for check in self.checks)} of {len(self.checks)} checks hold"
        return f"Verification(holds={self.holds}, promise {self.promise!r}, identical={self.identical}, {checks})"

    @property
    def identical(self) -> bool | None:
        """Whether all compared logits (and hidden states) were bit-identical; None when none were compared."""
        if not self.comparisons:
            return None
        return self.first_difference is None and all(c.identical for c in self.comparisons)

    @property
    def first_difference(self) -> FirstDifference | None:
        """The first base layer after which hidden states differ, where the comparison went layer by layer."""
        return next((s.first_difference for s in self.streamed if s.first_difference is not None), None)

    @property
    def holds(self) -> bool:
        """Whether every promise of the manifest holds."""
        kept = self.promise == "none" or self.trained or self.identical is not False
        return kept and all(check.holds for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """As plain data for `--json`."""
        return {
            "promise": self.promise,
            "trained": self.trained,
            "holds": self.holds,
            "identical": self.identical,
            "checks": [asdict(check) for check in self.checks],
            "tokens": self.tokens,
            # JSON knows no infinity, which is what logits that are not numbers count as.
            "comparisons": [
                {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(c).items()}
                for c in self.comparisons
            ],
            "first_difference": asdict(self.first_difference) if self.first_difference else None,
        }


@dataclass(frozen=True)
class Difference:
    """What became of checkpoint `a` in checkpoint `b`.

    `changed` and `moved` map names in `a` to names in `b`: other bytes (perhaps in another layer), and the same bytes
    in another layer. `config` holds the keys of config.json that differ, with both values (None: absent); `sizes` the
    bytes of every tensor of each. `told` is the one of the two that was not read: the other's manifest says what it
    held. None: both were read.
    """

    a: Path
    b: Path
    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: dict[str, str]
    moved: dict[str, str]
    same: tuple[str, ...]
    config: dict[str, tuple[Any, Any]]
    sizes: tuple[dict[str, int], dict[str, int]]
    told: Path | None

    def __repr__(self) -> str:
        kinds = ("same", "moved", "changed", "removed", "added")
        counts = ", ".join(f"{len(getattr(self, kind))} {kind}" for kind in kinds)
        return f"Difference({str(self.a)!r}, {str(self.b)!r}, {counts}, {len(self.config)} keys of config.json)"

    @property
    def identical(self) -> bool:
        """Whether every tensor and the config are the same."""
        return not (self.added or self.removed or self.changed or self.moved or self.config)

    def to_json(self) -> dict[str, Any]:
        """As plain data for `--json`."""
        return {
            "a": str(self.a),
            "b": str(self.b),
            "identical": self.identical,
            "not_read": str(self.told) if self.told is not None else None,
            "added": list(self.added),
            "removed": list(self.removed),
            "changed": [{"a": a, "b": b} for a, b in self.changed.items()],
            "moved": [{"a": a, "b": b} for a, b in self.moved.items()],
            "same": list(self.same),
            "config": {key: {"a": a, "b": b} for key, (a, b) in self.config.items()},
        }
