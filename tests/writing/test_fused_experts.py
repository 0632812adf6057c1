"""Layers of experts fused by optimal transport, against a float64 reference that knows nothing of surgeon.

The reference (tests/reference.py) is numpy, scipy and POT; how each model type lays its experts out on disk is written
here once more.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist

import surgeon
from surgeon.errors import BadInput
from tests import reference
from tests.checkpoints import weights
from tests.decoders import tiny_decoder

Layer = dict[str, np.ndarray]
EXPERTS = 8

# Changes to the tiny configs: two neighbours must be of one kind.
BASES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "mixtral": {"head_dim": 16},
    "granitemoe": {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
    "gpt_oss": {"layer_types": ["full_attention"] * 3, "num_hidden_layers": 3},
    "deepseek_v3": {"first_k_dense_replace": 1},
}
# What nobody knows how to align there.
LATENT = ("kv_a_layernorm", "kv_a_proj_with_mqa", "kv_b_proj", "q_a_layernorm", "q_a_proj", "q_b_proj")
AVERAGED = {"gpt_oss": ["self_attn.sinks"], "deepseek_v3": [f"self_attn.{word}" for word in LATENT]}
# The projections of one expert on disk, where these are stored one by one.
ONE_BY_ONE = {
    "qwen3_moe": "mlp.experts.{}.{}_proj.weight",
    "deepseek_v3": "mlp.experts.{}.{}_proj.weight",
    "mixtral": "block_sparse_moe.experts.{}.{}.weight",
}
MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}
ROUTERS = {"mixtral": "block_sparse_moe.gate", "granitemoe": "block_sparse_moe.router.layer", "gpt_oss": "mlp.router"}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def base(model_type: str) -> Path:
        if model_type not in made:
            folder = tmp_path_factory.mktemp("base") / model_type
            made[model_type] = tiny_decoder(folder, model_type, layers=3, **BASES[model_type])
            # New models have zeros there.
            edit(folder, "correction_bias", lambda _, value: torch.randn(value.shape))
        return made[model_type]

    return base


def edit(folder: Path, part: str, change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    """Give the tensors with `part` in their names other values."""
    torch.manual_seed(7)
    for shard in sorted(folder.glob("*.safetensors")):
        held = load_file(shard)
        changed = {name: change(name, value) if part in name else value for name, value in held.items()}
        save_file({name: value.contiguous() for name, value in changed.items()}, shard, metadata={"format": "pt"})


def plan(folder: Path, *, zero_init: bool = True, **init: Any) -> Path:
    operation = {"op": "insert_layers", "where": {"after": [1]}, "init": {"kind": "ot_fusion"} | init}
    path = folder / "plan.yaml"
    path.write_text(json.dumps({"surgeon": 1, "operations": [operation | {"zero_init": zero_init}]}))
    return path


def layer(folder: Path, index: int) -> Layer:
    start = f"model.layers.{index}."
    return {n.removeprefix(start): t.double().numpy() for n, t in weights(folder).items() if n.startswith(start)}


def experts_of(held: Layer, model_type: str) -> Layer:
    """A layer's experts and router under the reference's names, matrices as outputs by inputs."""
    router = ROUTERS.get(model_type, "mlp.gate")
    found = {"router": held[f"{router}.weight"]}
    for name in (f"{router}.bias", f"{router}.e_score_correction_bias"):
        if name in held:
            found["router_bias"] = held[name]
    if model_type == "granitemoe":
        both = held["block_sparse_moe.input_linear.weight"]
        found["gate"], found["up"] = np.split(both, 2, axis=1)
        found["down"] = held["block_sparse_moe.output_linear.weight"]
    elif model_type == "gpt_oss":
        both, biases = held["mlp.experts.gate_up_proj"].swapaxes(1, 2), held["mlp.experts.gate_up_proj_bias"]
        found |= {"gate": both[:, ::2], "up": both[:, 1::2], "down": held["mlp.experts.down_proj"].swapaxes(1, 2)}
        found |= {"gate_bias": biases[:, ::2], "up_bias": biases[:, 1::2]}
        found["down_bias"] = held["mlp.experts.down_proj_bias"]
    else:
        words = MIXTRAL if model_type == "mixtral" else {name: name for name in MIXTRAL}
        for name, word in words.items():
            found[name] = np.stack([held[ONE_BY_ONE[model_type].format(e, word)] for e in range(EXPERTS)])
    return found


def others_of(held: Layer) -> Layer:
    """Attention, norms and a shared expert under the reference's names, as far as it knows them."""
    names = {
        "self_attn.q_proj": "q",
        "self_attn.k_proj": "k",
        "self_attn.v_proj": "v",
        "self_attn.o_proj": "o",
        "self_attn.q_norm": "q_norm",
        "self_attn.k_norm": "k_norm",
        "input_layernorm": "pre_attn",
        "post_attention_layernorm": "pre_mlp",
        "mlp.shared_experts.gate_proj": "gate",
        "mlp.shared_experts.up_proj": "up",
        "mlp.shared_experts.down_proj": "down",
    }
    found: Layer = {}
    for suffix, value in held.items():
        module, _, kind = suffix.rpartition(".")
        if module in names:
            found[names[module] + ("_bias" if kind == "bias" else "")] = value
    return found


def matched(first: np.ndarray, second: np.ndarray, groups: int) -> list[int]:
    """Of each row of the second the partner in the first; of groups, by trying every permutation that keeps them."""
    cost = cdist(first, second, "sqeuclidean")
    if groups == 1:
        rows, columns = linear_sum_assignment(cost)
        return [int(rows[np.flatnonzero(columns == e)[0]]) for e in range(len(second))]
    size = len(first) // groups
    tried = (
        [group * size + place for group, inside in zip(order, places, strict=True) for place in inside]
        for order in itertools.permutations(range(groups))
        for places in itertools.product(itertools.permutations(range(size)), repeat=groups)
    )
    return min(tried, key=lambda partners: cost[partners, range(len(second))].sum())


def check(
    base: Path, out: Path, model_type: str, *, groups: int = 1, reg: float = 0.06, solver: str = "sinkhorn"
) -> list[int]:
    """Compare every tensor of the layer between layers 1 and 2 with the reference; returns the partners."""
    lower, upper, new = layer(base, 1), layer(base, 2), layer(out, 2)
    first, second = experts_of(lower, model_type), experts_of(upper, model_type)
    output = "self_attn.o_proj.weight"
    t_o = len(upper[output]) * reference.transport(lower[output], upper[output], reg=reg, solver=solver)
    partners = matched(first["router"] @ t_o, second["router"], groups)
    expected = reference.fuse_experts(first, second, partners, t_o, reg=reg, solver=solver)
    others = reference.fuse(others_of(lower), others_of(upper), reg=reg, solver=solver)
    expected |= {f"plain {name}": value for name, value in others.items()}
    found = experts_of(new, model_type) | {f"plain {n}": v for n, v in others_of(new).items()}
    for suffix in (name for name in new if name.removesuffix(".weight") in AVERAGED.get(model_type, ())):
        expected[suffix], found[suffix] = 0.5 * (lower[suffix] + upper[suffix]), new[suffix]
    assert found.keys() == expected.keys()
    assert sum(value.size for value in found.values()) == sum(value.size for value in new.values())
    for name, value in expected.items():
        assert np.abs(found[name] - value).max() < 2e-5 * np.abs(value).max(), name
    return partners


@pytest.mark.parametrize("solver", ["sinkhorn", "emd"])
def test_permuted_experts_are_found_again(solver: str, bases: Callable[[str], Path], tmp_path: Path) -> None:
    """The upper layer is the lower one, its experts in another order and in each of them the neurons."""
    base = bases("qwen3_moe")
    draws = np.random.default_rng(5)
    order = draws.permutation(EXPERTS)
    inside = [draws.permutation(64) for _ in range(EXPERTS)]
    lower = {n: t for n, t in weights(base).items() if n.startswith("model.layers.1.")}

    def permuted(name: str, _value: torch.Tensor) -> torch.Tensor:
        parts = name.replace("layers.2.", "layers.1.").split(".")
        if "experts" not in parts:
            made = lower[".".join(parts)]
            return made[torch.from_numpy(order)] if name.endswith("mlp.gate.weight") else made
        number = int(parts[5])
        parts[5] = str(order[number])
        neurons = torch.from_numpy(inside[number])
        return lower[".".join(parts)].index_select(1 if "down_proj" in name else 0, neurons)

    twin = tmp_path / "base"
    twin.mkdir()
    for file in base.iterdir():
        (twin / file.name).write_bytes(file.read_bytes())
    edit(twin, "layers.2.", permuted)
    solved = {"solver": solver, "reg": 0.3}
    made = surgeon.apply(plan(tmp_path, zero_init=False, **solved), str(twin), tmp_path / "out").manifest
    assert check(twin, tmp_path / "out", "qwen3_moe", **solved) == order.tolist()
    assert made.transport_maps["operations[0].after[1].0.experts"]["partners"] == order.tolist()
    if solver == "emd":
        # Where everything is found again, the new layer is the upper one, but for down, whose columns nothing aligns.
        upper, new = experts_of(layer(twin, 2), "qwen3_moe"), experts_of(layer(tmp_path / "out", 2), "qwen3_moe")
        assert all(np.allclose(new[name], upper[name], rtol=1e-6) for name in ("router", "gate", "up"))


@pytest.mark.parametrize("model_type", [name for name in BASES if name != "qwen3_moe"])
def test_every_layout_is_fused_as_the_reference_fuses(
    model_type: str, bases: Callable[[str], Path], tmp_path: Path
) -> None:
    base = bases(model_type)
    config = json.loads((base / "config.json").read_text())
    # Where maps are mixtures, what is moved before what shows in every number.
    solver = "sinkhorn" if model_type == "deepseek_v3" else "emd"
    written = plan(tmp_path, zero_init=False, solver=solver, unaligned="average")
    said = surgeon.apply(written, str(base), tmp_path / "out").preview.blueprint.operations[0].matched
    check(base, tmp_path / "out", model_type, solver=solver, groups=config.get("n_group", 1))
    assert f"experts matched by {ROUTERS.get(model_type, 'mlp.gate')}, then fused one by one" in said
    assert said.partition("averaged as they stand: ")[2].split(", ") == AVERAGED.get(model_type, [""])


def test_silent_at_birth(bases: Callable[[str], Path], tmp_path: Path) -> None:
    """With a shared expert, correction biases and groups of experts."""
    surgeon.apply(plan(tmp_path, unaligned="average"), str(bases("deepseek_v3")), tmp_path / "out")
    verified = surgeon.verify(bases("deepseek_v3"), tmp_path / "out", window=24, windows=1)
    assert verified.holds
    assert verified.identical


def test_stacked_experts_of_a_fused_layer_are_fused_again(bases: Callable[[str], Path], tmp_path: Path) -> None:
    """Two operations of one plan write what two surgeries write, one expert after the other."""
    base = bases("gpt_oss")
    written = plan(tmp_path, unaligned="average", solver="emd")
    twice = tmp_path / "twice.yaml"
    twice.write_text(json.dumps({"surgeon": 1, "operations": json.loads(written.read_text())["operations"] * 2}))
    surgeon.apply(twice, str(base), tmp_path / "both")
    surgeon.apply(written, str(base), tmp_path / "one")
    surgeon.apply(written, str(tmp_path / "one"), tmp_path / "two")
    both, apart = weights(tmp_path / "both"), weights(tmp_path / "two")
    assert both.keys() == apart.keys()
    assert all(torch.equal(value, apart[name]) for name, value in both.items())
    report = surgeon.transport_report(tmp_path / "one")
    assert report.modules == ("query", "key", "value", "output", "expert gate", "expert up", "expert down")
    assert len([found for found in report.maps if found.group == "expert gate"]) == 2 * EXPERTS


def test_what_cannot_be_aligned_is_refused_by_name(bases: Callable[[str], Path], tmp_path: Path) -> None:
    for model_type, named in AVERAGED.items():
        with pytest.raises(BadInput, match=f"{', '.join(named)} of a {model_type} layer.*`unaligned: average`"):
            surgeon.preview(plan(tmp_path), str(bases(model_type)))
    known = surgeon.families(bases("gpt_oss")).kinds[0]
    assert (known.experts, known.unaligned) == ("mlp.router", ("self_attn.sinks",))
