"""`widen_hidden`: the native class with a stream that carries itself, put together by hand here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import surgeon
from benchmarks.published import published
from surgeon.anatomy.skeleton import IMAGE_TEXT
from surgeon.edits.streams.sides import Probe
from surgeon.errors import BadInput
from tests.checkpoints import weights
from tests.decoders import tiny_decoder
from tests.edits.test_grow_vocabulary import assert_same, plan_of, train
from tests.edits.test_widths import apply, base_of, load, same_function

TWICE = {"op": "widen_hidden", "times": 2}
READING = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "qkv_proj", "gate_up_proj")


def widened(held: dict[str, torch.Tensor], times: int, *, tied: bool) -> dict[str, torch.Tensor]:
    """Of every tensor what the wider stream asks for: copies of what writes, zeros beside what reads."""
    found: dict[str, torch.Tensor] = {}
    for name, value in held.items():
        module, part = name.split(".")[-2:]
        if module in READING:
            zeros = torch.zeros(len(value), value.shape[-1] * (times - 1), dtype=value.dtype)
            found[name] = torch.cat([value, zeros], 1) if part == "weight" else value
        elif module in ("q_norm", "k_norm"):
            found[name] = value
        elif module == "embed_tokens":
            found[name] = torch.cat([value] * times, 1)
        elif module == "lm_head" or (name == "model.norm.weight" and tied):
            found[name] = torch.cat([value, *[torch.zeros_like(value)] * (times - 1)], -1)
        else:
            found[name] = torch.cat([value] * times, 0)
    return found


@pytest.mark.parametrize(
    ("family", "overrides", "asked"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}, {"times": 2}),
        ("qwen3", {}, {"to": 96}),
        ("phi3", {}, {"times": 2}),
    ],
)
def test_a_wider_stream_computes_the_same(
    family: str, overrides: dict[str, Any], asked: dict[str, int], tmp_path: Path
) -> None:
    base = base_of(tmp_path, family, num_hidden_layers=2, **overrides)
    out = apply(tmp_path, base, "out", {"op": "widen_hidden"} | asked)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (base, out))
    times = asked.get("times", 3)
    assert after == before | {"hidden_size": 32 * times, "head_dim": before.get("head_dim") or 8}
    held, found = weights(base), weights(out)
    expected = widened(held, times, tied=before.get("tie_word_embeddings", False))
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    assert type(load(out)).__module__.startswith("transformers.") and same_function(base, out)
    proof = surgeon.verify(base, out, device="cpu", windows=1, window=16, streamed=family == "llama")
    assert proof.holds and proof.promise == "rounding" and proof.rounded
    # Layer by layer it is the first copy that is compared.
    assert proof.first_difference is None or proof.first_difference.where != "the embeddings"
    surgeon.revert(out, tmp_path / "back")
    assert_same(base, tmp_path / "back")


def test_a_mean_and_a_shift_are_those_of_one_copy(tmp_path: Path) -> None:
    """LayerNorm with biases, an FFN without a gate: the last norm of tied embeddings silences all but the first."""
    base = tiny_decoder(tmp_path / "base", "starcoder2", dtype="bfloat16", layers=2, tie_word_embeddings=True)
    out = apply(tmp_path, base, "out", TWICE)
    held, found = (weights(folder)["model.norm.bias"] for folder in (base, out))
    assert held.any() and torch.equal(found, torch.cat([held, torch.zeros_like(held)]))
    proof = surgeon.verify(base, out, device="cpu", windows=1, window=16)
    assert proof.holds and proof.promise == "rounding" and proof.rounded


def read(value: torch.Tensor) -> torch.Tensor:
    return torch.cat([value, torch.zeros_like(value)], 1)


def each_twice(parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.cat([part for part in parts for _ in range(2)])


@pytest.mark.parametrize("model_type", ["dbrx", "lfm2"])
def test_axes_and_sides_of_a_derived_type_are_found(model_type: str, tmp_path: Path) -> None:
    """dbrx divides its width by its heads, which become twice as many; lfm2 has three matrices in one, and a filter."""
    base = published(tmp_path / "base", model_type)
    out = apply(tmp_path, base, "out", TWICE)
    held, found = weights(base), weights(out)
    if model_type == "dbrx":
        stem = "transformer.blocks.3."
        fused = f"{stem}norm_attn_norm.attn.Wqkv.weight"
        queries, keys, values = held[fused].split([64, 32, 32])
        expected = {
            fused: read(each_twice((queries, keys, values))),
            f"{stem}ffn.experts.mlp.w1": read(held[f"{stem}ffn.experts.mlp.w1"]),
            f"{stem}ffn.experts.mlp.w2": torch.cat([held[f"{stem}ffn.experts.mlp.w2"]] * 2, 1),
            f"{stem}ffn.router.layer.weight": read(held[f"{stem}ffn.router.layer.weight"]),
        }
    else:
        stem = "model.layers.0.conv."
        expected = {
            f"{stem}in_proj.weight": read(each_twice(held[f"{stem}in_proj.weight"].chunk(3))),
            f"{stem}conv.weight": torch.cat([held[f"{stem}conv.weight"]] * 2),
            f"{stem}out_proj.weight": read(torch.cat([held[f"{stem}out_proj.weight"]] * 2)),
        }
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    proof = surgeon.verify(base, out, device="cpu", windows=1, window=16)
    assert proof.holds and proof.promise == "rounding"
    surgeon.revert(out, tmp_path / "back")
    assert_same(base, tmp_path / "back")


def test_of_gathered_experts_and_of_corners_what_is_new_trains(tmp_path: Path) -> None:
    """olmoe has each expert on disk and all in one parameter, and gets more heads: matrices grow on both sides."""
    base = published(tmp_path / "base", "olmoe")
    apply(tmp_path, base, "out", TWICE)
    train(tmp_path, "out", steps=16, weight_decay=0.5)
    held, born, after = (weights(tmp_path / name) for name in ("base", "out", "out-run"))
    for name, value in after.items():
        kept = value[tuple(slice(size) for size in held[name].shape)]
        assert torch.equal(kept.view(torch.uint8), held[name].contiguous().view(torch.uint8)), name
        assert torch.equal(value, born[name]) == (value.shape == held[name].shape), name
    proof = surgeon.verify(base, tmp_path / "out-run", device="cpu", windows=1, window=16)
    assert proof.holds and proof.trained
    apply(tmp_path, tmp_path / "out-run", "wider", TWICE)
    surgeon.revert(tmp_path / "wider", tmp_path / "one")
    assert_same(tmp_path / "out-run", tmp_path / "one")
    surgeon.revert(tmp_path / "out-run", tmp_path / "back")
    assert_same(base, tmp_path / "back")


def test_a_side_that_is_wrong_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = published(tmp_path / "base", "qwen2_moe")
    told = Probe._writes
    monkeypatch.setattr(
        Probe, "_writes", lambda self, name, axis: told(self, name, axis) != name.endswith("gate.weight")
    )
    with pytest.raises(BadInput, match="on a twin of this qwen2_moe the logits are not the base's"):
        surgeon.preview(plan_of(tmp_path, TWICE), base)


def test_a_copy_that_is_none_is_found(tmp_path: Path) -> None:
    base = base_of(tmp_path, num_hidden_layers=2)
    out = apply(tmp_path, base, "out", TWICE)
    for name, place in (("model.embed_tokens.weight", (5, 40)), ("model.layers.1.mlp.down_proj.weight", (40, 3))):
        shard = next(path for path in out.glob("*.safetensors") if name in load_file(path))
        held = load_file(shard)
        held[name][place] += 1
        save_file(held, shard, metadata={"format": "pt"})
        found = surgeon.verify(base, out, logits=False)
        assert "base tensors" in {check.name for check in found.checks if not check.holds}
        held[name][place] -= 1
        save_file(held, shard, metadata={"format": "pt"})


def test_what_cannot_be_wider_is_refused_in_a_line(tmp_path: Path) -> None:
    base, ffn = base_of(tmp_path), {"op": "widen_ffn", "by": 8}
    grafted = apply(tmp_path, base, "grafted", {"op": "gated_adapters", "size": 4})
    pictures = tiny_decoder(tmp_path / "pictures", "qwen3_vl", IMAGE_TEXT, dtype="bfloat16", layers=1)
    alibi = tiny_decoder(tmp_path / "alibi", "bloom", dtype="bfloat16", layers=1)
    # As published, by a field that its class takes and does not keep.
    config = json.loads((alibi / "config.json").read_text())
    (alibi / "config.json").write_text(json.dumps(config | {"n_embed": config.pop("hidden_size")}))
    gemma = base_of(tmp_path / "gemma", "gemma2")
    for on, operations, words in (
        (base, [{"op": "widen_hidden", "to": 48}], "give a multiple of 32, 64 say"),
        (base, [{"op": "widen_hidden", "to": 32}], "give a multiple of 32, 64 say"),
        (base, [{"op": "widen_hidden", "to": 2**31}], "at most 64 times"),
        (base, [TWICE, ffn], "in a plan of its own"),
        (base, [ffn, TWICE], "in a plan of its own"),
        (base, [TWICE, {"op": "gated_adapters", "size": 4}], "put this one into a second plan"),
        (grafted, [TWICE], "layer 0 carries a graft as wide as the stream"),
        (
            gemma,
            [TWICE | {"times": 4}],
            r"plan\.yaml:\d+: operations\[0\] \(widen_hidden\): gemma2: .* multiplies embeddings",
        ),
        (pictures, [TWICE], "other parts of it put states as wide as the stream among the text's"),
        (alibi, [TWICE], "on a twin of this bloom the logits are not the base's once `hidden_size` grows"),
    ):
        with pytest.raises(BadInput, match=words) as refused:
            surgeon.preview(plan_of(tmp_path, *operations), on)
        assert "\n" not in str(refused.value)
