"""Layers that predict further tokens after a surgery: transformers' own drafts, to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import surgeon
from tests import mtp

IDS = torch.randint(3, 100, (1, 12), generator=torch.manual_seed(0))
INSERTED = {"op": "insert_layers", "where": {"after": [1, 3]}, "count": 2, "init": {"kind": "copy"}}
ADAPTERS = {"op": "gated_adapters", "layers": "all", "extra_weights": 0.2}
BRANCH = {"op": "control_llm", "layers": {"every": 4}}
# A type, its MTP layers, its dtype, and what is done to it; of the last two transformers makes layers of our class.
SURGERIES: dict[str, tuple[str, int, str, list[dict[str, Any]]]] = {
    "two MTP layers, inserted layers": ("deepseek_v3", 2, "bfloat16", [INSERTED]),
    "grafts too": ("glm4_moe", 1, "float32", [INSERTED, ADAPTERS]),
    "names without numbers, a branch": ("mellum", 1, "bfloat16", [BRANCH]),
}


def applied(folder: Path, operations: list[dict[str, Any]]) -> Path:
    plan = folder / "plan.yaml"
    plan.write_text(json.dumps({"surgeon": 1, "operations": operations}), encoding="utf-8")
    surgeon.apply(plan, folder / "base", folder / "out")
    return folder / "out"


@pytest.mark.parametrize("name", SURGERIES)
def test_drafts_are_the_bases_to_the_bit_and_tokens_the_models_own(name: str, tmp_path: Path) -> None:
    model_type, depth, dtype, operations = SURGERIES[name]
    base = mtp.loaded(mtp.checkpoint(tmp_path / "base", model_type, depth=depth, dtype=dtype))
    out = mtp.loaded(applied(tmp_path, operations))
    drafted, expected = mtp.drafts(out, IDS), mtp.drafts(base, IDS)
    assert len(drafted) == depth
    assert all(torch.equal(one, other) for one, other in zip(drafted, expected, strict=True))
    assert torch.equal(mtp.generated(out, IDS, use_mtp=True), mtp.generated(out, IDS))
