"""Two checkpoints, loaded whole and compared, as `verify` does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from surgeon.models.compare import LogitComparison, compare_models, load_pair


def compare_logits(base: Path, out: Path, ids: Tensor, *, dtype: str = "auto", **given: Any) -> list[LogitComparison]:
    """Load base and output, and compare their logits on `ids` (windows, window); what else is given is the models'."""
    return compare_models(*load_pair(base, out, dtype=dtype), ids, **given)
