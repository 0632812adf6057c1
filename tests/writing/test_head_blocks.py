"""`heads: blocks`: the order in which a layer keeps its heads changes nothing, and heads stay heads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import surgeon
from tests import tiny
from tests.checkpoints import weights

HIDDEN = 32
# Groups swapped, and the query heads of the first of them.
HEAD_ORDER, KV_ORDER = [2, 3, 1, 0], [1, 0]
# Biases, norms over all heads, norms over one head with heads of their own size, fused projections, post-norms.
FAMILIES = ["llama", "qwen2", "qwen3", "olmo2", "phi3", "gemma2"]
LOWER, NEW, UPPER = 2, 3, 4  # layers of the output; in the base the upper one is layer 3

Layer = dict[str, Tensor]


def layer(tensors: dict[str, Tensor], index: int) -> Layer:
    start = f"model.layers.{index}."
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}


def reordered(weights_of_layer: Layer) -> Layer:
    """The same layer with its heads in another order: the function it computes is the same."""

    def rows(tensor: Tensor, order: list[int]) -> Tensor:
        return tensor.view(len(order), -1, *tensor.shape[1:])[order].reshape(tensor.shape).contiguous()

    made = dict(weights_of_layer)
    for suffix, tensor in weights_of_layer.items():
        module = suffix.removeprefix("self_attn.").rpartition(".")[0]
        if module in ("q_norm", "k_norm") and len(tensor) != len(
            weights_of_layer[f"self_attn.{module[0]}_proj.weight"]
        ):
            continue  # one norm for every head
        if module in ("q_proj", "q_norm"):
            made[suffix] = rows(tensor, HEAD_ORDER)
        elif module in ("k_proj", "v_proj", "k_norm"):
            made[suffix] = rows(tensor, KV_ORDER)
        elif module == "o_proj" and tensor.ndim == 2:
            made[suffix] = rows(tensor.T.contiguous(), HEAD_ORDER).T.contiguous()
        elif module == "qkv_proj":
            query, key, value = tensor.split([HIDDEN, HIDDEN // 2, HIDDEN // 2])
            made[suffix] = torch.cat([rows(query, HEAD_ORDER), rows(key, KV_ORDER), rows(value, KV_ORDER)])
    return made


def with_layer(base: Path, folder: Path, index: int, replaced: Layer) -> Path:
    """A copy of a checkpoint in which one layer's tensors are others."""
    folder.mkdir()
    for path in base.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
            continue
        shard = load_file(path)
        names = {name: name.removeprefix(f"model.layers.{index}.") for name in shard}
        save_file({n: replaced.get(s, shard[n]) if s != n else shard[n] for n, s in names.items()}, folder / path.name)
    return folder


@pytest.fixture
def fused(plan: Callable[..., Path], tmp_path: Path) -> Callable[..., dict[str, Tensor]]:
    """All weights after one layer was fused between layers 2 and 3 of a base."""
    numbers = iter(range(99))

    def run(base: Path, **init: Any) -> dict[str, Tensor]:
        written = plan(where={"after": [LOWER]}, init={"kind": "ot_fusion", "heads": "blocks", **init}, zero_init=False)
        out = tmp_path / f"out-{next(numbers)}"
        surgeon.apply(written, str(base), out)
        return weights(out)

    return run


def assert_same(found: Layer, expected: Layer, tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for suffix, tensor in expected.items():
        torch.testing.assert_close(found[suffix], tensor, rtol=0, atol=tolerance, msg=lambda m, s=suffix: f"{s}: {m}")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("init", [{"solver": "emd"}, {"reg": 0.3}], ids=["emd", "sinkhorn"])
def test_order_of_heads_does_not_matter(
    family: str, init: dict[str, Any], fused: Callable[..., dict[str, Tensor]], tmp_path: Path
) -> None:
    """Other head orders below change nothing; above, the fused layer has that order."""
    base = tiny.checkpoint(tmp_path / "base", family, dtype="float32")
    before = weights(base)
    plain = layer(fused(base, **init), NEW)
    below = with_layer(base, tmp_path / "below", 2, reordered(layer(before, 2)))
    above = with_layer(base, tmp_path / "above", 3, reordered(layer(before, 3)))
    assert_same(layer(fused(below, **init), NEW), plain, 1e-5)
    assert_same(layer(fused(above, **init), NEW), reordered(plain), 1e-5)


def test_rows_that_go_free_do_depend_on_the_order(fused: Callable[..., dict[str, Tensor]], tmp_path: Path) -> None:
    """What the tests above would miss if they compared too little: attention's own output, its columns unaligned."""
    base = tiny.checkpoint(tmp_path / "base", "llama", dtype="float32")
    below = with_layer(base, tmp_path / "below", 2, reordered(layer(weights(base), 2)))
    plain, found = (layer(fused(folder, heads="free"), NEW) for folder in (base, below))
    assert float((plain["self_attn.o_proj.weight"] - found["self_attn.o_proj.weight"]).abs().max()) > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_of_copies_with_reordered_heads_is_kept(
    family: str, fused: Callable[..., dict[str, Tensor]], tmp_path: Path
) -> None:
    """Both sources are one layer, its heads in two orders: what is fused is that layer, scores and all."""
    base = tiny.checkpoint(tmp_path / "base", family, dtype="float32")
    twin = with_layer(base, tmp_path / "twin", 3, reordered(layer(weights(base), 2)))
    found = fused(twin, solver="emd")
    attention = {suffix for suffix in layer(found, NEW) if suffix.startswith("self_attn.")}
    expected = layer(found, UPPER)
    assert_same({s: layer(found, NEW)[s] for s in attention}, {s: expected[s] for s in attention}, 1e-6)
    torch.testing.assert_close(scores(family, layer(found, NEW)), scores(family, expected), rtol=0, atol=1e-5)
    # Not all orders compute the same numbers at the same place: the scores are those of the upper layer's order.
    assert float((scores(family, layer(found, LOWER)) - scores(family, expected)).abs().max()) > 1e-3


def scores(family: str, weights_of_layer: Layer) -> Tensor:
    """Attention weights (heads, tokens, tokens) of a few tokens, by transformers' own layer."""
    model = tiny.model(family, attn_implementation="eager")
    block = model.model.layers[0]
    missing, unexpected = block.load_state_dict(weights_of_layer, strict=False)
    assert not missing
    assert not unexpected
    hidden = torch.randn(1, 6, HIDDEN, generator=torch.Generator().manual_seed(5))
    places = model.model.rotary_emb(hidden, torch.arange(6)[None])
    mask = torch.full((6, 6), float("-inf")).triu(1)[None, None]
    with torch.inference_mode():
        _, found = block.self_attn(hidden, position_embeddings=places, attention_mask=mask)
    assert found is not None
    return found[0]


def test_all_three_maps_are_reported_with_their_own_rows(plan: Callable[..., Path], base: Path, tmp_path: Path) -> None:
    written = plan(where={"after": [2]}, init={"kind": "ot_fusion", "heads": "blocks"})
    maps = surgeon.apply(written, str(base), tmp_path / "out").manifest.transport_maps
    rows = {name.rpartition(".")[2]: report["rows"] for name, report in maps.items()}
    assert rows == {"query": 32, "key": 16, "value": 16, "output": 32, "gate": 48, "up": 48}
    assert all(report["converged"] for report in maps.values())


def test_maps_of_a_fused_layer_serve_the_next(plan: Callable[..., Path], base: Path, tmp_path: Path) -> None:
    """A second operation fuses a layer that the first one made: its heads' maps come first."""
    first = {"op": "insert_layers", "where": {"after": [2]}, "init": {"kind": "ot_fusion", "heads": "blocks"}}
    second = first | {"where": {"after": [2, 3]}}
    applied = surgeon.apply(plan(first, second), str(base), tmp_path / "out")
    assert len(applied.manifest.transport_maps) == 18
    assert surgeon.verify(base, tmp_path / "out", window=24, windows=1).identical
