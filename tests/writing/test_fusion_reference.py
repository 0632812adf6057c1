"""The fused weights against an independent float64 implementation of Algorithm 1 (tests/reference.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import surgeon
from tests import reference, tiny
from tests.checkpoints import weights

WITH_BIASES = {"attention_bias": True, "mlp_bias": True}
CASES = {
    "square": ("llama", {"num_key_value_heads": 4, "intermediate_size": 32}),
    "gqa": ("llama", {}),
    "gqa with biases": ("llama", WITH_BIASES),
    "wide heads": ("qwen3", {"intermediate_size": 80}),
    "qkv biases": ("qwen2", {}),
    "post-norms": ("gemma2", {}),
    "norms over all heads": ("olmo2", {}),
    "fused projections": ("phi3", {}),
}


def modules(layer: dict[str, np.ndarray], family: str) -> reference.Weights:
    """A layer's tensors under the reference's names."""
    names = {
        "self_attn.q_proj": "q",
        "self_attn.k_proj": "k",
        "self_attn.v_proj": "v",
        "self_attn.o_proj": "o",
        "mlp.gate_proj": "gate",
        "mlp.up_proj": "up",
        "mlp.down_proj": "down",
    }
    norms = {
        "input_layernorm": "pre_attn",
        "post_attention_layernorm": "post_attn" if family in ("gemma2", "olmo2") else "pre_mlp",
        "pre_feedforward_layernorm": "pre_mlp",
        "post_feedforward_layernorm": "post_mlp",
        "self_attn.q_norm": "q_norm",
        "self_attn.k_norm": "k_norm",
    }
    found: reference.Weights = {}
    for suffix, tensor in layer.items():
        module, _, kind = suffix.rpartition(".")
        if module == "self_attn.qkv_proj":
            found["q"], found["k"], found["v"] = np.split(tensor, [32, 48])
        elif module == "mlp.gate_up_proj":
            found["gate"], found["up"] = np.split(tensor, 2)
        elif module in norms:
            found[norms[module]] = tensor
        else:
            found[names[module] + ("_bias" if kind == "bias" else "")] = tensor
    return found


def layer(folder: Path, index: int) -> dict[str, np.ndarray]:
    start = f"model.layers.{index}."
    return {n.removeprefix(start): t.double().numpy() for n, t in weights(folder).items() if n.startswith(start)}


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rescale", ["marginal", "paper"])
def test_fused_layer_agrees_module_by_module(
    case: str, rescale: str, plan: Callable[..., Path], tmp_path: Path
) -> None:
    family, overrides = CASES[case]
    base = tiny.checkpoint(tmp_path / "base", family, dtype="float32", **overrides)
    init = {"kind": "ot_fusion", "rescale": rescale}
    surgeon.apply(plan(where={"after": [2]}, init=init, zero_init=False), str(base), tmp_path / "out")
    first, second = modules(layer(base, 2), family), modules(layer(base, 3), family)
    fused = modules(layer(tmp_path / "out", 3), family)
    expected = reference.fuse(first, second, marginal=rescale == "marginal")
    assert fused.keys() == expected.keys()
    errors = {name: relative_error(fused[name], expected[name]) for name in expected}
    assert max(errors.values()) < 1e-4, errors


@pytest.mark.parametrize("flow", ["vanilla_output", "vanilla_mlp", "vanilla"])
def test_other_flows(flow: str, plan: Callable[..., Path], tmp_path: Path) -> None:
    base = tiny.checkpoint(tmp_path / "base", "llama", dtype="float32")
    init = {"kind": "ot_fusion", "flow": flow}
    surgeon.apply(plan(where={"after": [2]}, init=init, zero_init=False), str(base), tmp_path / "out")
    first, second = modules(layer(base, 2), "llama"), modules(layer(base, 3), "llama")
    fused = modules(layer(tmp_path / "out", 3), "llama")
    expected = reference.fuse(first, second, flow=flow)
    assert max(relative_error(fused[name], expected[name]) for name in expected) < 1e-4
    plain = reference.fuse(first, second)
    changed = {name for name in expected if relative_error(expected[name], plain[name]) > 1e-3}
    assert changed >= ({"gate", "up"} if "mlp" in flow else {"o", "gate", "up"})


def test_the_order_that_is_printed(plan: Callable[..., Path], tmp_path: Path) -> None:
    """Algorithm 1's line 4 before line 6: other maps of gate and up, which alone have a T_in."""
    base = tiny.checkpoint(tmp_path / "base", "llama", dtype="float32")
    init = {"kind": "ot_fusion", "order": "cost_first"}
    surgeon.apply(plan(where={"after": [2]}, init=init, zero_init=False), str(base), tmp_path / "out")
    first, second = modules(layer(base, 2), "llama"), modules(layer(base, 3), "llama")
    fused = modules(layer(tmp_path / "out", 3), "llama")
    expected = reference.fuse(first, second, cost_first=True)
    assert max(relative_error(fused[name], expected[name]) for name in expected) < 1e-4
    plain = reference.fuse(first, second)
    assert {name for name in expected if relative_error(expected[name], plain[name]) > 1e-3} == {"gate", "up"}


def test_exact_transport(plan: Callable[..., Path], tmp_path: Path) -> None:
    base = tiny.checkpoint(tmp_path / "base", "llama", dtype="float32")
    init = {"kind": "ot_fusion", "solver": "emd"}
    surgeon.apply(plan(where={"after": [2]}, init=init, zero_init=False), str(base), tmp_path / "out")
    first, second = modules(layer(base, 2), "llama"), modules(layer(base, 3), "llama")
    expected = reference.fuse(first, second, solver="emd")
    fused = modules(layer(tmp_path / "out", 3), "llama")
    assert max(relative_error(fused[name], expected[name]) for name in expected) < 1e-4


def test_what_zero_init_leaves_of_the_fused_layer(plan: Callable[..., Path], tmp_path: Path) -> None:
    """Without post-norms o and down are zero and the rest is as fused; down's map is not even solved."""
    base = tiny.checkpoint(tmp_path / "base", "llama", dtype="float32")
    init = {"kind": "ot_fusion"}
    applied = surgeon.apply(plan(where={"after": [2]}, init=init), str(base), tmp_path / "out")
    fused = modules(layer(tmp_path / "out", 3), "llama")
    expected = reference.fuse(modules(layer(base, 2), "llama"), modules(layer(base, 3), "llama"))
    for name in ("q", "k", "v", "gate", "up", "pre_attn", "pre_mlp"):
        assert relative_error(fused[name], expected[name]) < 1e-4
    assert not fused["o"].any()
    assert not fused["down"].any()
    solved = {name.rpartition(".")[2] for name in applied.manifest.transport_maps}
    assert solved == {"query", "key", "value", "output", "gate", "up"}


def test_post_norm_families_keep_their_fused_projections(plan: Callable[..., Path], tmp_path: Path) -> None:
    base = tiny.checkpoint(tmp_path / "base", "gemma2", dtype="float32")
    surgeon.apply(plan(where={"after": [2]}, init={"kind": "ot_fusion"}), str(base), tmp_path / "out")
    fused = modules(layer(tmp_path / "out", 3), "gemma2")
    expected = reference.fuse(modules(layer(base, 2), "gemma2"), modules(layer(base, 3), "gemma2"))
    for name in ("o", "down", "gate"):
        assert relative_error(fused[name], expected[name]) < 1e-4
    assert (fused["post_attn"] == -1).all()
    assert (fused["post_mlp"] == -1).all()
