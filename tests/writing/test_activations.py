"""`support: activations` against the native model's forward hooks and POT in float64."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ot
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.spatial.distance import cdist
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import surgeon
from surgeon.anatomy.decoders import USUAL_DECODERS
from surgeon.blueprint.recipes import TextSupport
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.cli import app
from surgeon.models.tokens import token_batches
from surgeon.writing.couplings import activations
from tests import tiny
from tests.checkpoints import weights
from tests.models.test_tokens import byte_tokenizer
from tests.writing.test_fusion_reference import relative_error

SAMPLES, WINDOW = 150, 16
SUPPORT: dict[str, Any] = {"support": "activations", "text": "text.txt", "samples": SAMPLES, "window": WINDOW}
INIT = {"kind": "ot_fusion", "cost_scale": "max"} | SUPPORT


def base_with_text(folder: Path, family: str) -> Path:
    base = tiny.checkpoint(folder / "base", family, dtype="float32", vocab_size=300)
    byte_tokenizer(base, eos=True)
    (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog; then it sleeps. " * 8)
    return base


def hooked(base: Path, text: Path, modules: list[str]) -> dict[str, np.ndarray]:
    """Outputs of native modules, (rows, samples), by transformers alone."""
    ids = token_batches(base, text=text, window=WINDOW, windows=-(-SAMPLES // WINDOW), vocabulary=300).ids
    model = AutoModelForCausalLM.from_pretrained(base)
    kept: dict[str, torch.Tensor] = {}
    for name in modules:
        model.get_submodule(name).register_forward_hook(lambda _m, _i, out, name=name: kept.__setitem__(name, out))
    with torch.no_grad():
        model(ids)
    return {name: out.flatten(0, 1)[:SAMPLES].T.double().numpy() for name, out in kept.items()}


@pytest.mark.parametrize("family", USUAL_DECODERS)
def test_activations_are_the_native_models(family: str, tmp_path: Path) -> None:
    base = base_with_text(tmp_path, family)
    folder = CheckpointFolder.open(base)
    names = [n for n in folder.tensors if ".layers.2." in n and "norm" not in n and n.endswith(".weight")]
    support = TextSupport("text.txt", SAMPLES, WINDOW)
    found = activations(folder, names, support, text=tmp_path / "text.txt", device=torch.device("cpu"))
    expected = hooked(base, tmp_path / "text.txt", [name.removesuffix(".weight") for name in names])
    assert len(names) >= 4
    for name in names:
        native = expected[name.removesuffix(".weight")]
        assert found[name].shape == native.shape == (folder.tensors[name].shape[0], SAMPLES)
        np.testing.assert_allclose(found[name].numpy(), native, rtol=1e-5, atol=1e-6)


def transport(lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
    """n T of two modules' activations: Euclidean cost over its maximum, Sinkhorn at 0.06, float64."""
    cost = cdist(lower, upper)
    n, m = cost.shape
    plan = ot.sinkhorn(
        np.full(n, 1 / n),
        np.full(m, 1 / m),
        cost / cost.max(),
        0.06,
        method="sinkhorn_log",
        numItermax=100_000,
        stopThr=1e-11,
    )
    return plan * n


def test_fused_weights_agree_with_pot(plan: Callable[..., Path], tmp_path: Path) -> None:
    """Maps from activations, applied to weights by the flow of Table 1."""
    base = base_with_text(tmp_path, "llama")
    chosen = plan(where={"after": [2]}, init=INIT, zero_init=False)
    applied = surgeon.apply(chosen, str(base), tmp_path / "out")
    roles = {"q": "self_attn.q_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj", "gate": "mlp.gate_proj"}
    fired = hooked(base, tmp_path / "text.txt", [f"model.layers.{i}.{name}" for i in (2, 3) for name in roles.values()])
    tensors, grown = weights(base), weights(tmp_path / "out")
    maps = {r: transport(*(fired[f"model.layers.{i}.{name}"] for i in (2, 3))) for r, name in roles.items()}
    for role, name in roles.items():
        lower, upper = (tensors[f"model.layers.{i}.{name}.weight"].double().numpy() for i in (2, 3))
        lower = lower @ maps["o"] if role == "gate" else lower
        expected = (maps[role].T @ lower + upper) / 2
        assert relative_error(grown[f"model.layers.3.{name}.weight"].double().numpy(), expected) < 1e-4, role
    assert set(applied.manifest.texts) == {"text.txt"}
    assert surgeon.verify(base, tmp_path / "out", logits=False).holds


def test_permuted_neurons_are_found_by_what_they_do(plan: Callable[..., Path], tmp_path: Path) -> None:
    """Layer 2 writes nothing, so layer 3 sees what it sees; layer 3's queries are layer 2's in another order."""
    base = base_with_text(tmp_path, "llama")
    order = torch.randperm(32, generator=torch.Generator().manual_seed(1))
    query, norm = "self_attn.q_proj.weight", "input_layernorm.weight"
    before = weights(base)
    for path in base.glob("*.safetensors"):
        tensors = load_file(path)
        for name in tensors:
            if name in ("model.layers.2.self_attn.o_proj.weight", "model.layers.2.mlp.down_proj.weight"):
                tensors[name].zero_()
            elif name == f"model.layers.3.{query}":
                tensors[name] = before[f"model.layers.2.{query}"][order].clone()
            elif name == f"model.layers.3.{norm}":
                tensors[name] = before[f"model.layers.2.{norm}"].clone()
        save_file(tensors, path, metadata={"format": "pt"})
    chosen = plan(where={"after": [2]}, init=INIT | {"solver": "emd", "cost_scale": "mean"}, zero_init=False)
    surgeon.apply(chosen, str(base), tmp_path / "out")
    fused = weights(tmp_path / "out")[f"model.layers.3.{query}"]
    torch.testing.assert_close(fused, before[f"model.layers.2.{query}"][order], rtol=1e-5, atol=1e-6)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no text named": ({"text": None}, "needs a `text`"),
    "text missing": ({"text": "nowhere.txt"}, "nowhere.txt: no such text"),
    "too short": ({"samples": 4096}, "asks for 4096"),
    "unscaled cost": ({"cost_scale": "none"}, "cost_scale: max"),
    "whole heads": ({"heads": "blocks"}, "heads: blocks"),
    "text without activations": ({"support": "weights"}, "support: activations"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_are_one_line(case: str, plan: Callable[..., Path], tmp_path: Path) -> None:
    changed, words = REFUSED[case]
    base = base_with_text(tmp_path, "llama")
    init = {key: value for key, value in (INIT | changed).items() if value is not None}
    chosen = plan(where={"after": [2]}, init=init)
    result = CliRunner().invoke(app, ["apply", str(chosen), str(base), str(tmp_path / "out"), "--quiet"])
    assert result.exit_code == 2, result.output
    told = [line for line in result.stderr.splitlines() if line.startswith("surgeon:")]
    assert len(told) == 1
    assert words in told[0], told[0]
    assert not (tmp_path / "out").exists()


def test_layers_made_by_an_earlier_operation_have_no_activations(plan: Callable[..., Path], tmp_path: Path) -> None:
    base = base_with_text(tmp_path, "llama")
    first = {"op": "insert_layers", "where": {"after": [2]}, "init": {"kind": "copy"}}
    second = {"op": "insert_layers", "where": {"after": [3]}, "init": INIT}
    result = CliRunner().invoke(app, ["preview", str(plan(first, second)), str(base)])
    assert result.exit_code == 2
    assert "layer 3 was made by an earlier operation" in result.stderr


def test_another_text_is_another_output(plan: Callable[..., Path], tmp_path: Path) -> None:
    base = base_with_text(tmp_path, "llama")
    chosen = plan(where={"after": [2]}, init=INIT)
    surgeon.apply(chosen, str(base), tmp_path / "one")
    (tmp_path / "text.txt").write_text("Something else was said here, and at some length. " * 8)
    surgeon.apply(chosen, str(base), tmp_path / "two")
    one, two = (json.loads((tmp_path / name / "surgery.json").read_text()) for name in ("one", "two"))
    assert one["texts"] != two["texts"]
    name = "model.layers.3.self_attn.q_proj.weight"
    assert one["new_tensors"][name]["sha256"] != two["new_tensors"][name]["sha256"]
