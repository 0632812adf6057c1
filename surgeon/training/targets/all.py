"""`what: all`: every tensor."""

from __future__ import annotations

from surgeon.training.targets.target import OwnTensors


class All(OwnTensors):
    """Every tensor."""

    what = "all"

    def notes(self) -> list[str]:
        """Warn that the base's own tensors train too, where a surgery added tensors."""
        if self.manifest is None or not self.manifest.operations:
            return []
        return ["`what: all` is every tensor, the base's own too; `added` are those that surgeries added"]
