"""What a plan says of a graft stands in the output's config as the shipped code reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import surgeon
from surgeon.runtime.spread import for_each_layer
from tests import tiny

LERP = {"kind": "lerp", "alpha": 0.3, "inference_alpha": 0.2}
LORA = {"op": "pmoe_experts", "threshold": 2, "dropout": 0.1}

# The operation, the key of `config.surgery`, and what must be in its first entry (or in it, where it is no list).
CASES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "interpolator": (
        {"op": "control_llm", "layers": [1], "interpolator": LERP, "divergence": {"kind": "mse", "weight": 0.7}},
        "control",
        {"layer": 1, "interpolator": LERP | {"learnable": False}, "divergence": {"kind": "mse", "weight": 0.7}},
    ),
    "adapters": ({"op": "gated_adapters", "size": 12, "gate": "sigmoid"}, "adapters", {"size": 12, "gate": "sigmoid"}),
    "local loss": (
        {"op": "gated_adapters", "size": 12, "local_loss": {"kind": "l1", "weight": 0.25}},
        "local_loss",
        {"l1": 0.25, "cross_entropy": 0.0},
    ),
    "control states": (
        {"op": "mixture_of_control", "rank": 3, "top_k": 2, "alpha": 0.6, "balance_weight": 0.05},
        "mixture",
        {"rank": 3, "top_k": 2, "alpha": 0.6, "balance_weight": 0.05},
    ),
}


def surgery(base: Path, *operations: dict[str, Any]) -> dict[str, Any]:
    plan = surgeon.parse_plan(json.dumps({"surgeon": 1, "operations": operations}))
    return for_each_layer(surgeon.preview(plan, base).blueprint.config["surgery"])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.checkpoint(tmp_path_factory.mktemp("base"), "llama")


@pytest.mark.parametrize("case", CASES)
def test_settings_reach_the_config(case: str, base: Path) -> None:
    operation, key, expected = CASES[case]
    found = surgery(base, operation)[key]
    entry = found[0] if isinstance(found, list) else found
    assert {name: entry[name] for name in expected} == expected


@pytest.mark.parametrize(("alpha", "scale"), [(None, 1.0), (4, 1.0), (8, 2.0), (1, 0.25)])
def test_loras_count_alpha_by_rank_times(alpha: int | None, scale: float, base: Path) -> None:
    """As in LoRA: α / rank; without α the rank itself, so once."""
    operation = LORA | {"rank": 4} | ({} if alpha is None else {"alpha": alpha})
    for layer in surgery(base, operation)["experts"]:
        for slot in layer["slots"]:
            assert (slot["rank"], slot["scale"], slot["dropout"]) == (4, scale, 0.1)


@pytest.mark.parametrize(("closes", "stored"), [(0, 0.0), (0.0, 0.0), (2, 2.0), (False, None)])
def test_a_gate_that_closes_at_nothing_is_not_one_that_stays_open(
    closes: float | bool, stored: float | None, base: Path
) -> None:
    gate = {"op": "domain_gate", "reads": "token", "closes": closes}
    found = surgery(base, {"op": "gated_adapters", "size": 4}, gate)["domain_gate"][0]["closes"]
    assert found == stored and (found is None) == (stored is None)
