"""What `revert`, `make_delta`, `apply_delta` and `export_slot` give back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surgeon.manifest import Manifest


@dataclass(frozen=True)
class Reverted:
    """An earlier state that was written: state `to` of an output of `surgeries` surgeries.

    `undone` are the operations of the surgeries taken back, oldest first; `base` says what the state was called when
    the first of them began. `manifest` is the state's own, None for the first base. `tensors` it has, `dropped` are
    those of the output that it has not.
    """

    path: Path
    to: int
    surgeries: int
    base: str
    undone: tuple[tuple[str, ...], ...]
    manifest: Manifest | None
    tensors: int
    dropped: int
    nbytes: int
    left_behind: tuple[str, ...]
    seconds: dict[str, float]

    def __repr__(self) -> str:
        return f"Reverted({str(self.path)!r}, {self.to} of {self.surgeries} surgeries left, {self.tensors} tensors)"

    def to_json(self) -> dict[str, Any]:
        """As plain data for `--json`."""
        return {
            "path": str(self.path),
            "to": self.to,
            "surgeries": self.surgeries,
            "base": self.base,
            "undone": [list(operations) for operations in self.undone],
            "tensors": self.tensors,
            "dropped": self.dropped,
            "bytes": self.nbytes,
            "left_behind": list(self.left_behind),
            "seconds": self.seconds,
        }


@dataclass(frozen=True)
class MadeDelta:
    """A delta of `out` that was written: `tensors` of the output's `whole` are in it, the rest `base` (of the output's
    last surgery) brings, as it does the small files `from_base`."""

    out: Path
    path: Path
    base: str
    revision: str | None
    tensors: int
    whole: int
    nbytes: int
    whole_nbytes: int
    from_base: tuple[str, ...]
    seconds: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """As plain data for `--json`."""
        return {
            "out": str(self.out),
            "path": str(self.path),
            "base": self.base,
            "revision": self.revision,
            "tensors": self.tensors,
            "whole": self.whole,
            "bytes": self.nbytes,
            "whole_bytes": self.whole_nbytes,
            "from_base": list(self.from_base),
            "seconds": self.seconds,
        }


@dataclass(frozen=True)
class AppliedDelta:
    """A delta that was put back: `tensors` of the output's `whole` came from it, the rest from the base."""

    path: Path
    base: str
    manifest: Manifest
    tensors: int
    whole: int
    nbytes: int
    seconds: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """As plain data for `--json`."""
        return {
            "path": str(self.path),
            "base": self.base,
            "tensors": self.tensors,
            "whole": self.whole,
            "bytes": self.nbytes,
            "seconds": self.seconds,
        }


@dataclass(frozen=True)
class Exported:
    """A slot that was written as a PEFT adapter for `base` (at `revision`).

    `layers` are the base's that it adapts, in `modules` modules; `config` is its adapter_config.json, `notes` tell what
    of the output's function it does not hold.
    """

    path: Path
    slot: int
    base: str
    revision: str | None
    layers: tuple[int, ...]
    modules: int
    nbytes: int
    config: dict[str, Any]
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        return f"Exported({str(self.path)!r}, slot {self.slot} for {self.base!r}, {self.modules} modules)"

    def to_json(self) -> dict[str, Any]:
        """As plain data for `--json`."""
        return {
            "path": str(self.path),
            "slot": self.slot,
            "base": self.base,
            "revision": self.revision,
            "layers": list(self.layers),
            "modules": self.modules,
            "bytes": self.nbytes,
            "config": self.config,
            "notes": list(self.notes),
        }
