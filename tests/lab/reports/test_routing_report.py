"""What routers and gates choose is recorded as the model computes it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import surgeon
from surgeon.cli import app
from surgeon.models.load import load_model
from surgeon.models.tokens import token_batches
from tests import tiny
from tests.checkpoints import train
from tests.commands import refused
from tests.models.test_tokens import byte_tokenizer

OPERATIONS: tuple[dict[str, Any], ...] = (
    {"op": "control_llm", "layers": [1], "interpolator": {"kind": "dlerp"}},
    {"op": "gated_adapters", "layers": [0, 1], "size": 8},
    {"op": "pmoe_experts", "threshold": 2, "slots": 3},
    {"op": "mixture_of_control", "layers": [0, 3], "rank": 3, "top_k": 2},
)


@pytest.fixture
def out(plan: Callable[..., Path], tmp_path: Path) -> Path:
    base = tiny.checkpoint(tmp_path / "base", "llama", dtype="float32", vocab_size=300)
    byte_tokenizer(base, eos=False)
    surgeon.apply(plan(*OPERATIONS), str(base), tmp_path / "out")
    train(tmp_path / "out", seed=4)
    return tmp_path / "out"


def test_what_is_recorded_is_what_the_model_computes(out: Path, tmp_path: Path) -> None:
    report = surgeon.routing_report(out, {"probe": None}, window=16, windows=3, to=tmp_path / "routing.json")
    told = report.texts["probe"]
    assert told.tokens == 48

    model = load_model(out)
    ids = token_batches(out, text=None, window=16, windows=3, vocabulary=300).ids
    heard: dict[str, list[torch.Tensor]] = {"router": [], "gate": []}
    router = model.model.layers[2].expert_router
    router.register_forward_hook(lambda module, args, result: heard["router"].append(result[0]))
    gate = model.model.layers[0].mlp.adapter.gate
    gate.register_forward_hook(lambda module, args, result: heard["gate"].append(torch.relu(result)))
    with torch.inference_mode():
        model(ids, use_cache=False)
    weights = torch.cat(heard["router"]).flatten(0, 1)
    assert told.router is not None
    torch.testing.assert_close(torch.tensor(told.router.mean), weights.mean(0), atol=1e-5, rtol=1e-4)
    shares = torch.bincount(weights.argmax(-1), minlength=3) / len(weights)
    assert told.router.largest == pytest.approx(tuple(shares.tolist()))
    opened = torch.cat(heard["gate"])
    assert told.gates["0.adapter"].mean == pytest.approx(opened.mean().item(), rel=1e-4)
    assert told.gates["0.adapter"].closed == pytest.approx((opened == 0).double().mean().item())
    # The twin of layer 1 was made before the adapters: it has none, its interpolator chooses for every token.
    assert set(told.gates) == {"0.adapter", "1.adapter", "1.interpolator"}
    assert report.sites == ((0, "attention"), (0, "ffn"), (3, "attention"), (3, "ffn"))
    for row in told.states:
        assert sum(row) == pytest.approx(1, rel=1e-5), "two of four are chosen, and their weights add up to one"
        assert 2 <= sum(value > 0 for value in row) <= 4
    assert json.loads((tmp_path / "routing.json").read_text()) == report.to_json()


def test_command_line_and_refusals(out: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Some words of a domain, again and again. " * 20)
    options = ["--text", f"one={text}", "--window", "8", "--windows", "2"]
    ran = CliRunner().invoke(app, ["routing-report", str(out), *options])
    assert ran.exit_code == 0, ran.output
    assert "slot 2" in ran.output
    assert "0.adapter" in ran.output
    assert "custom code" not in ran.output
    ran = CliRunner().invoke(app, ["routing-report", str(out), *options, "--json", "-q"])
    assert set(json.loads(ran.stdout)["texts"]) == {"one"}
    base = tmp_path / "base"
    assert "no grafts here" in refused("routing-report", base)
    assert "give a name and a file" in refused("routing-report", out, "--text", "x.txt")
    assert "given twice" in refused("routing-report", out, "--text", f"a={text}", "--text", f"a={text}")
    assert "nowhere.txt" in refused("routing-report", out, "--text", f"a={tmp_path / 'nowhere.txt'}")


def test_grafts_that_choose_nothing_are_refused(plan: Callable[..., Path], tmp_path: Path) -> None:
    base = tiny.checkpoint(tmp_path / "base", "llama")
    surgeon.apply(plan({"op": "gated_adapters", "gate": "none", "size": 8}), str(base), tmp_path / "out")
    assert "neither router nor gate" in refused("routing-report", tmp_path / "out")
