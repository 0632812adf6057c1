"""Entropies of transport maps between inserted layers and their neighbours, against POT in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import ot
import pytest
from typer.testing import CliRunner

import surgeon
from surgeon.cli import app
from surgeon.lab.reports.transport import MODULES, transport_report
from tests import tiny
from tests.checkpoints import weights


def sinkhorn_entropy(lower: np.ndarray, upper: np.ndarray) -> float:
    """The entropy, in nats, of T of the two layers' rows: Algorithm 1 and section 7.3, by POT in float64."""
    cost = ot.dist(lower, upper, metric="euclidean")
    n, m = cost.shape
    plan = ot.sinkhorn(
        np.full(n, 1 / n), np.full(m, 1 / m), cost, 0.06, method="sinkhorn_log", numItermax=100_000, stopThr=1e-9
    )
    return float(-(plan[plan > 0] * np.log(plan[plan > 0])).sum())


def layer(tensors: dict, index: int) -> dict[str, np.ndarray]:
    roles = {"query": "self_attn.q_proj", "output": "self_attn.o_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
    return {role: tensors[f"model.layers.{index}.{name}.weight"].double().numpy() for role, name in roles.items()}


@pytest.mark.parametrize("init", ["copy", "ot_fusion"])
def test_entropies_are_pots(init: str, tmp_path: Path) -> None:
    """Of rows as they stand, up's too: beside an attention output of zeros its map is not uniform (Table 8: gate and up
    of LLaMA PRO at about three quarters of what is possible)."""
    base, out = tiny.checkpoint(tmp_path / "base", "llama"), tmp_path / "out"
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "surgeon: 1\noperations:\n  - op: insert_layers\n    where: {after: [2]}\n"
        f"    init: {{kind: {init}}}\n    zero_init: {'true' if init == 'copy' else 'false'}\n"
    )
    surgeon.apply(plan, str(base), out)
    found = {(m.neighbour, m.module): m for m in transport_report(out).maps}
    assert len(found) == 2 * len(MODULES)
    tensors = weights(out)
    for neighbour, (lower, upper) in {"below": (2, 3), "above": (3, 4)}.items():
        first, second = layer(tensors, lower), layer(tensors, upper)
        for module in ("query", "output", "up", "down"):
            entropy = sinkhorn_entropy(first[module], second[module])
            assert found[neighbour, module].entropy == pytest.approx(entropy, rel=1e-4), (neighbour, module)
    silent = found["below", "down"]
    assert silent.uniform == pytest.approx(2 * math.log(32))
    if init == "copy":  # rows of zeros are all alike: the map is uniform, as in the paper's table
        assert silent.entropy == pytest.approx(silent.uniform, rel=1e-6)
        assert found["above", "up"].entropy < 0.95 * found["above", "up"].uniform
    assert all(m.converged for m in found.values())


def test_means_are_over_all_maps_of_a_module(base: Path, tmp_path: Path) -> None:
    surgeon.apply("llama-pro", str(base), tmp_path / "out")
    report = transport_report(tmp_path / "out")
    for module in MODULES:
        entropies = [found.entropy for found in report.maps if found.module == module]
        assert report.mean(module) == pytest.approx(sum(entropies) / len(entropies))
    assert report.to_json()["entropy"].keys() == set(MODULES)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tiny.checkpoint(tmp_path / "base", "gemma2")


REFUSED: dict[str, tuple[Callable[[Path, Path], list[object]], str]] = {
    "no output of surgeon": (lambda base, out: [base], "not an output of surgeon"),
    "an option of before": (lambda base, out: [out, "--trained", base], "reports on the trained model"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_are_one_line(case: str, base: Path, tmp_path: Path) -> None:
    surgeon.apply("copy", str(base), tmp_path / "out")
    arguments, words = REFUSED[case]
    result = CliRunner().invoke(app, ["transport-report", *map(str, arguments(base, tmp_path / "out"))])
    assert result.exit_code == 2, result.output
    told = [line for line in result.stderr.splitlines() if line.startswith("surgeon:")]
    assert len(told) == 1
    assert words in told[0]


def test_a_checkpoint_without_inserted_layers_has_no_map(base: Path, tmp_path: Path) -> None:
    surgeon.apply("neutral-residues", str(base), tmp_path / "out")
    result = CliRunner().invoke(app, ["transport-report", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "no map" in result.stderr
