"""Which layers `ot_fusion` takes: modules by their usual names, and neighbours of one kind."""

from __future__ import annotations

from pathlib import Path

import pytest

import surgeon
from surgeon.errors import BadInput
from tests.checkpoints import write_plan
from tests.decoders import tiny_decoder


def test_modules_that_nothing_is_known_to_align_by_are_refused_by_name(tmp_path: Path) -> None:
    fused = {"op": "insert_layers", "where": {"after": [0]}, "init": "ot_fusion"}
    plan = write_plan(tmp_path / "plan.yaml", [fused])
    for model_type, module in (("bloom", r"self_attention\.query_key_value"), ("mamba", r"mixer\.\S+")):
        with pytest.raises(BadInput, match=rf"how to align {module}.* of a {model_type}|{model_type} layer .* nothing"):
            surgeon.preview(plan, tiny_decoder(tmp_path / model_type, model_type, layers=2))
    # Norms by OPT's names are known; layers of one title say what one has alone.
    surgeon.preview(plan, tiny_decoder(tmp_path / "opt", "opt", layers=2))
    dots = tiny_decoder(tmp_path / "dots", "dots1", layers=2, first_k_dense_replace=1)
    with pytest.raises(BadInput, match=r"layers 0 and 1 are of different kinds \(mlp\.\S+ is in layer [01] alone\)"):
        surgeon.preview(plan, dots)
