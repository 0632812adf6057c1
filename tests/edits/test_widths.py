"""`fold_adapters`, `widen_ffn` and `widen_attention`: the native class with wider matrices, put together by hand here.

Logits are compared in float64 with those of transformers' own classes, gradients with those of what was folded.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import surgeon
from surgeon.anatomy.skeleton import CAUSAL
from surgeon.errors import BadInput
from tests import tiny, vocabularies
from tests.checkpoints import add_letters, weights
from tests.decoders import tiny_decoder
from tests.edits.test_grow_vocabulary import assert_same, plan_of, train

FFN, ATTENTION = {"op": "widen_ffn", "by": 13}, {"op": "widen_attention", "groups": 2}
FOLD = {"op": "fold_adapters"}
IDS = torch.randint(4, 38, (2, 12), generator=torch.Generator().manual_seed(0))


def base_of(folder: Path, family: str = "llama", **overrides: Any) -> Path:
    settings = {"vocab_size": 320, "num_hidden_layers": 3, "dtype": "bfloat16"} | overrides
    return vocabularies.byte_level(tiny.checkpoint(folder / "base", family, **settings))


def load(folder: Path) -> Any:
    # What multiplies all experts at once does not take float64.
    eager = {"trust_remote_code": True, "experts_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **eager).eval()


def same_function(one: Path, other: Path) -> bool:
    """Norms and rotary angles are in float32 inside, whatever the model is in."""
    with torch.no_grad():
        a, b = load(one)(IDS).logits, load(other)(IDS).logits
    return torch.allclose(a, b, rtol=0, atol=1e-5)


def apply(folder: Path, on: Path, name: str, *operations: dict[str, Any]) -> Path:
    return surgeon.apply(plan_of(folder, *operations, name=f"{name}.yaml"), on, folder / name, device="cpu").path


def verified(base: Path, out: Path) -> bool:
    found = surgeon.verify(base, out, device="cpu", windows=1, window=16)
    assert found.holds, [check for check in found.checks if not check.holds]
    return found.promise == "rounding" and any("parts of them" in check.detail for check in found.checks)


def with_adapters(folder: Path, family: str) -> tuple[Path, Path]:
    """A base, and an output whose adapters of two sizes hold what training could have left in them."""
    base = base_of(folder, family)
    adapters = [
        {"op": "gated_adapters", "gate": "none", "layers": [layer], "size": size} for layer, size in ((0, 8), (2, 4))
    ]
    out = apply(folder, base, "adapters", *adapters)
    draws = torch.Generator().manual_seed(1)
    for shard in out.glob("*.safetensors"):
        held = load_file(shard)
        for name in (name for name in held if name.endswith("adapter.down_proj.weight")):
            held[name] = torch.randn(held[name].shape, generator=draws).to(held[name].dtype)
        save_file(held, shard, metadata={"format": "pt"})
    return base, out


def joined_by_hand(held: dict[str, torch.Tensor], layer: int) -> dict[str, torch.Tensor]:
    """[W_g; G], [W_u; U], [W_d, D]: gate, up and down of a layer, zeros where an adapter is narrower, or not there."""
    stem = f"model.layers.{layer}.mlp."
    if fused := f"{stem}gate_up_proj.weight" in held:
        gate, up = held[f"{stem}gate_up_proj.weight"].chunk(2)
    else:
        gate, up = held[f"{stem}gate_proj.weight"], held[f"{stem}up_proj.weight"]
    down, made = held[f"{stem}down_proj.weight"], {}
    wide = {name: held.get(f"{stem}adapter.{name}_proj.weight", torch.zeros(0, 32)) for name in ("gate", "up")}
    writes = held.get(f"{stem}adapter.down_proj.weight", torch.zeros(32, 0))
    pad = 16 - writes.shape[1]
    rows = {k: torch.cat([w, wide[k], torch.zeros(pad, 32)]).bfloat16() for k, w in (("gate", gate), ("up", up))}
    made["down_proj"] = torch.cat([down, writes, torch.zeros(32, pad)], 1).bfloat16()
    made |= {"gate_up_proj": torch.cat([*rows.values()])} if fused else {f"{k}_proj": w for k, w in rows.items()}
    return {f"{stem}{name}.weight": value for name, value in made.items()}


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3"])
def test_adapters_become_native_width(family: str, tmp_path: Path) -> None:
    base, adapted = with_adapters(tmp_path, family)
    out = apply(tmp_path, adapted, "out", FOLD)
    config = json.loads((base / "config.json").read_text())
    assert json.loads((out / "config.json").read_text()) == config | {"intermediate_size": 64}
    assert not list(out.glob("*.py"))
    held, found = weights(adapted), weights(out)
    expected = {name: value for name, value in held.items() if ".adapter." not in name}
    for layer in range(3):
        expected |= joined_by_hand(held, layer)
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    assert type(load(out)).__module__.startswith("transformers.") and same_function(adapted, out)
    assert not same_function(base, out)
    assert verified(adapted, out)
    surgeon.revert(out, tmp_path / "back")
    assert_same(adapted, tmp_path / "back")


def test_what_was_folded_learns_as_it_did_beside_the_ffn(tmp_path: Path) -> None:
    """Gradients of the folded rows and columns are the adapter's; the first base comes back, and a delta joins."""
    base, adapted = with_adapters(tmp_path, "llama")
    out = apply(tmp_path, adapted, "out", FOLD | {"multiple_of": 1})
    gradients = []
    for folder in (adapted, out):
        model = load(folder)
        model(IDS, labels=IDS).loss.backward()
        gradients.append({name: value.grad for name, value in model.named_parameters()})
    before, after = gradients
    for name in ("gate", "up", "down"):
        own, wide = (f"model.layers.0.mlp.{where}{name}_proj.weight" for where in ("adapter.", ""))
        found = after[wide][:, 48:] if name == "down" else after[wide][48:]
        assert torch.allclose(found, before[own], rtol=1e-4, atol=1e-7) and before[own].abs().max() > 1e-5
    surgeon.revert(out, tmp_path / "first", to=0)
    assert_same(base, tmp_path / "first")
    surgeon.make_delta(out, tmp_path / "delta")
    surgeon.apply_delta(tmp_path / "delta", str(adapted), tmp_path / "again")
    assert (tmp_path / "again" / "surgery.json").read_bytes() == (out / "surgery.json").read_bytes()
    assert_same(out, tmp_path / "again")


@pytest.mark.parametrize(
    ("family", "operations"),
    [
        ("phi3", [FFN | {"init": "copy", "by": 60}, ATTENTION | {"init": "copy"}]),
        ("qwen2", [ATTENTION]),
        ("olmo2", [ATTENTION]),
        ("gemma3_text", [ATTENTION | {"init": "he"}, FFN | {"init": "he"}]),
        ("starcoder2", [FFN]),
    ],
)
def test_wider_models_compute_the_same(family: str, operations: list[dict[str, Any]], tmp_path: Path) -> None:
    if family == "starcoder2":  # which surgeon derives, and has no gate
        base = add_letters(tiny_decoder(tmp_path / "base", family, CAUSAL, dtype="bfloat16"))
    else:
        base = base_of(tmp_path, family)
    out = apply(tmp_path, base, "out", *operations)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (base, out))
    done = {entry["op"]: entry for entry in operations}
    expected = dict(before)
    if "widen_ffn" in done:
        expected["intermediate_size"] += done["widen_ffn"]["by"]
    if "widen_attention" in done:
        expected |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": before.get("head_dim", 8)}
    assert after == expected
    held, found = weights(base), weights(out)
    assert held.keys() == found.keys()
    for name, value in held.items():
        wider = found[name]
        if name.endswith(("down_proj.weight", "o_proj.weight", "c_proj.weight")):
            assert torch.equal(wider[:, : value.shape[1]], value) and not wider[:, value.shape[1] :].any()
        elif "gate_up" not in name and "qkv" not in name:
            assert torch.equal(wider[: len(value)], value), name
    if family == "phi3":
        gate, up = held["model.layers.1.mlp.gate_up_proj.weight"].chunk(2)
        expected_rows = torch.cat([gate, gate, gate[:12], up, up, up[:12]])
        assert torch.equal(found["model.layers.1.mlp.gate_up_proj.weight"], expected_rows)
    if family == "olmo2":  # under a norm over all heads
        for name in ("q_proj", "k_proj", "q_norm", "k_norm"):
            old, new = found[f"model.layers.1.self_attn.{name}.weight"].chunk(2)
            assert torch.equal(old, new), name
    assert same_function(base, out) and verified(base, out)
    surgeon.revert(out, tmp_path / "back")
    assert_same(base, tmp_path / "back")


def test_training_moves_what_is_new_alone(tmp_path: Path) -> None:
    base = base_of(tmp_path)
    apply(tmp_path, base, "out", FFN, ATTENTION)
    train(tmp_path, "out", weight_decay=0.5)
    held, born, after = (weights(folder) for folder in (base, tmp_path / "out", tmp_path / "out-run"))
    changed = {name for name, value in after.items() if not torch.equal(value, born[name])}
    assert changed == {name for name, value in held.items() if born[name].shape != value.shape}
    for name, value in held.items():
        kept = after[name][tuple(slice(size) for size in value.shape)]
        assert torch.equal(kept.view(torch.uint8), value.contiguous().view(torch.uint8)), name
    proof = surgeon.verify(base, tmp_path / "out-run", device="cpu", windows=2, window=16)
    assert proof.holds and proof.trained
    surgeon.revert(tmp_path / "out-run", tmp_path / "back")
    assert_same(base, tmp_path / "back")
    # Wider once more, on what was trained; each state comes back.
    apply(tmp_path, tmp_path / "out-run", "two", FFN)
    surgeon.revert(tmp_path / "two", tmp_path / "one")
    assert_same(tmp_path / "out-run", tmp_path / "one")
    surgeon.revert(tmp_path / "two", tmp_path / "none", to=0)
    assert_same(base, tmp_path / "none")


def test_a_promise_that_is_broken_is_found(tmp_path: Path) -> None:
    base = base_of(tmp_path)
    out = apply(tmp_path, base, "out", FFN)
    found = surgeon.verify(base, out, device="cpu", windows=1, window=16)
    assert found.holds and found.rounded
    apart = [dataclasses.replace(c, identical=False, max_abs_difference=99.0) for c in found.comparisons]
    assert not dataclasses.replace(found, comparisons=apart).holds
    name = "model.layers.1.mlp.down_proj.weight"
    shard = next(path for path in out.glob("*.safetensors") if name in load_file(path))
    for place in ((3, 2), (3, 50)):
        held = load_file(shard)
        held[name][place] += 1
        save_file(held, shard, metadata={"format": "pt"})
        wrong = {check.name for check in surgeon.verify(base, out, logits=False).checks if not check.holds}
        assert "base tensors" in wrong
        held[name][place] -= 1
        save_file(held, shard, metadata={"format": "pt"})


ADAPTER = {"op": "gated_adapters", "size": 4}
REFUSED: dict[str, tuple[list[list[dict[str, Any]]], str]] = {
    "a gate": ([[ADAPTER], [FOLD]], "has a relu gate"),
    "another activation": ([[ADAPTER | {"gate": "none", "activation": "relu"}], [FOLD]], "an activation of its own"),
    "no adapter": ([[FOLD]], "no adapter to fold"),
    "a twin": ([[ADAPTER | {"gate": "none"}], [{"op": "control_llm", "layers": [1]}], [FOLD]], "carries a graft"),
    "a slot": (
        [[{"op": "pmoe_experts", "rank": 2, "targets": ["down_proj"], "threshold": 1}], [FFN]],
        "carries a graft",
    ),
    "not alone": ([[ADAPTER, FFN]], "a plan of their own"),
    "another after it": ([[FFN, ADAPTER]], "put this one into a second plan"),
    "twice": ([[FFN, FFN]], "join the two"),
    "far too wide": ([[{"op": "widen_ffn", "by": 2**31 - 1}]], r"would have 2147483695 neurons; beyond 2\^31"),
    "narrower": ([[{"op": "widen_ffn", "to": 40}]], "have 48 neurons already"),
    "heads that do not divide": (
        [[ATTENTION | {"groups": 1}]],
        "class builds heads of another size",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_wider_is_refused_in_a_line(case: str, tmp_path: Path) -> None:
    plans, words = REFUSED[case]
    base = base_of(tmp_path)
    for number, operations in enumerate(plans[:-1]):
        base = apply(tmp_path, base, f"step{number}", *operations)
    with pytest.raises(BadInput, match=words) as refused:
        surgeon.preview(plan_of(tmp_path, *plans[-1]), base)
    assert "\n" not in str(refused.value)


def test_norms_over_all_heads_and_rows_that_kernels_do_not_take_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"must be a multiple of the 2 that there are \(`groups: double`\)"):
        surgeon.preview(plan_of(tmp_path, ATTENTION | {"groups": 1}), base_of(tmp_path, "olmo2"))
    neox = tiny_decoder(tmp_path / "neox", "gpt_neox", CAUSAL, dtype="bfloat16")
    with pytest.raises(BadInput, match=r"with 4 heads transformers' class builds heads of another size"):
        surgeon.preview(plan_of(tmp_path, ATTENTION), neox)
    helium = tiny_decoder(tmp_path / "helium", "helium", CAUSAL, dtype="bfloat16")
    with pytest.raises(BadInput, match=r"out: the model cannot be run .*; widen something else"):
        surgeon.preview(plan_of(tmp_path, ATTENTION), helium)
    rounds = tiny_decoder(tmp_path / "rounds", "lfm2", CAUSAL, dtype="bfloat16", block_multiple_of=32)
    with pytest.raises(BadInput, match=r"FFNs of 64 or 96 neurons, and none of 77; .* wider `by: 32`"):
        surgeon.preview(plan_of(tmp_path, FFN), rounds)
    experts = tiny_decoder(tmp_path / "experts", "qwen3_moe", CAUSAL, dtype="bfloat16")
    with pytest.raises(BadInput, match=r"experts of 64 neurons would have 77, .* by a multiple of 8"):
        surgeon.preview(plan_of(tmp_path, FFN), experts)


SIXTEEN = {"op": "widen_ffn", "by": 16}


@pytest.mark.parametrize(
    ("kind", "ffn"),
    # Experts one by one; fused, turned and alternating, beside sinks; a width that the class rounds.
    [("qwen3_moe", SIXTEEN | {"init": "copy"}), ("gpt_oss", SIXTEEN), ("lfm2", {"op": "widen_ffn", "by": 32})],
)
def test_a_derived_type_becomes_wider_once_a_twin_did(kind: str, ffn: dict[str, Any], tmp_path: Path) -> None:
    changes = {"block_multiple_of": 32} if kind == "lfm2" else {}
    base = tiny_decoder(tmp_path / "base", kind, CAUSAL, dtype="bfloat16", **changes)
    out = apply(tmp_path, base, "out", ATTENTION, ffn)
    assert verified(base, out)
    held, found = weights(base), weights(out)
    grown = set()
    for name, value in held.items():
        old = tuple(slice(size) for size in value.shape)
        assert torch.equal(found[name][old], value), name
        if found[name].shape != value.shape:
            grown.add(name.split(".")[-2] if name.endswith("weight") else name.split(".")[-1])
            rest = found[name].clone()
            rest[old] = 0
            written = name.endswith(("sinks", "bias")) or any(f".{each}" in name for each in WRITES)
            assert rest.any() != written, name
    assert grown == GROWN[kind] and same_function(base, out)


WRITES = ("down_proj", "o_proj", "out_proj", "w2")
HEADS = {"q_proj", "k_proj", "v_proj"}
GROWN = {
    "qwen3_moe": HEADS | {"o_proj", "gate_proj", "up_proj", "down_proj"},
    "gpt_oss": HEADS | {"o_proj", "sinks", "gate_up_proj", "gate_up_proj_bias", "down_proj"} | {"bias"},
    "lfm2": HEADS | {"out_proj", "w1", "w2", "w3"},
}


def test_the_proof_of_widths_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from surgeon.operations import growing

    base, made = tiny_decoder(tmp_path / "base", "smollm3", CAUSAL, dtype="bfloat16"), growing.Constant
    monkeypatch.setattr(growing, "Constant", lambda _value, *rest: made(0.5, *rest))
    with pytest.raises(BadInput, match=r"the logits .* are not the base's"):
        surgeon.preview(plan_of(tmp_path, ATTENTION), base)


def test_what_is_new_is_stored_as_what_it_stands_in(tmp_path: Path) -> None:
    """float32 norms and one such matrix in a layer of bfloat16."""
    base = base_of(tmp_path)
    kept = ("norm.weight", "layers.1.mlp.down_proj.weight", "layers.2.self_attn.o_proj.weight")
    for shard in base.glob("*.safetensors"):
        held = {name: value.float() if name.endswith(kept) else value for name, value in load_file(shard).items()}
        save_file(held, shard, metadata={"format": "pt"})
    wide = [{"op": "widen_ffn", "by": 16}, {"op": "widen_attention", "groups": "double"}]
    out = apply(tmp_path, base, "out", *wide)
    before, after = weights(base), weights(out)
    assert {name: value.dtype for name, value in after.items()} == {name: v.dtype for name, v in before.items()}
    assert same_function(base, out) and verified(base, out)
