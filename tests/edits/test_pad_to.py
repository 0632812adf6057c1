"""`pad_to`: heads within their groups, neurons and rows, padded by hand here, compared by plain transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import surgeon
from surgeon.anatomy.skeleton import CAUSAL
from surgeon.edits import pad_to
from surgeon.errors import BadInput
from tests import tiny, vocabularies
from tests.checkpoints import add_letters, weights, write_plan
from tests.decoders import tiny_decoder
from tests.edits.test_grow_vocabulary import assert_same, check_promise, logits_of

IDS = torch.randint(4, 38, (2, 12), generator=torch.Generator().manual_seed(0))
# Of each base heads, key-value heads and hidden size; what devices make of them.
SHAPES = {
    "llama": ((28, 4, 224), 8, (32, 4)),
    "qwen2": ((14, 2, 224), 8, (16, 2)),
    "phi3": ((9, 3, 144), 2, (12, 4)),
    "gemma3_text": ((10, 5, 160), 4, (16, 8)),
}


def base_of(folder: Path, family: str, heads: int, keys: int, hidden: int, **more: Any) -> Path:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": keys, "hidden_size": hidden} | more
    sizes = {"intermediate_size": 100, "vocab_size": 320, "num_hidden_layers": 2} | sizes
    return vocabularies.byte_level(tiny.checkpoint(folder / "base", family, **sizes))


def apply(folder: Path, base: Path, out: str, **options: int) -> Path:
    plan = write_plan(folder / f"{out}.yaml", [{"op": "pad_to", **options}])
    return surgeon.apply(plan, base, folder / out, device="cpu").path


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def grouped(rows: torch.Tensor, keys: int, each: int, wide: int, more: int) -> torch.Tensor:
    """Rows of heads, which stand in `keys` groups of `each`, in groups of `wide` with `more` groups behind."""
    rest = rows.shape[1:]
    held = rows.reshape(keys, each, -1, *rest)
    padded = torch.zeros(keys + more, wide, *held.shape[2:], dtype=rows.dtype)
    padded[:keys, :each] = held
    return padded.reshape(-1, *rest)


@pytest.mark.parametrize("family", SHAPES)
def test_heads_are_padded_within_their_groups(family: str, tmp_path: Path) -> None:
    (heads, keys, hidden), devices, (wide, wide_keys) = SHAPES[family]
    base = base_of(tmp_path, family, heads, keys, hidden)
    out = apply(tmp_path, base, "out", tensor_parallel=devices, multiple_of=32)
    held, found, config = weights(base), weights(out), config_of(out)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (wide, wide_keys)
    assert config["intermediate_size"] == 128
    one = {"keys": keys, "each": heads // keys, "wide": wide // wide_keys, "more": wide_keys - keys}
    plain = {"keys": keys, "each": 1, "wide": 1, "more": wide_keys - keys}
    head_dim = config["head_dim"]
    for layer in range(2):
        stem = f"model.layers.{layer}.self_attn."
        for kind in ("weight", "bias"):
            names = {role: f"{stem}{role}_proj.{kind}" for role in ("q", "k", "v")}
            if f"{stem}qkv_proj.{kind}" in held:
                parts = held[f"{stem}qkv_proj.{kind}"].split([n * head_dim for n in (heads, keys, keys)])
                padded = [grouped(part, **how) for part, how in zip(parts, (one, plain, plain), strict=True)]
                assert torch.equal(found[f"{stem}qkv_proj.{kind}"], torch.cat(padded))
            elif names["q"] in held:
                for role, how in (("q", one), ("k", plain), ("v", plain)):
                    assert torch.equal(found[names[role]], grouped(held[names[role]], **how)), role
        output = f"{stem}o_proj.weight"
        assert torch.equal(found[output], grouped(held[output].T, **one).T)
    for dtype, most in (("float32", 1e-5), ("bfloat16", 2e-2)):
        before, after = logits_of(base, IDS, dtype), logits_of(out, IDS, dtype)
        assert float((before - after).abs().max()) <= most * float(before.abs().max())
    proof = surgeon.verify(base, out, device="cpu", windows=1, window=16)
    assert proof.holds and proof.promise == "rounding", [check for check in proof.checks if not check.holds]
    surgeon.revert(out, tmp_path / "back")
    assert_same(base, tmp_path / "back")


def test_rows_of_the_vocabulary_keep_the_bound_and_pieces_come_back(tmp_path: Path) -> None:
    base = base_of(tmp_path, "qwen3", 6, 2, 96)
    out = apply(tmp_path, base, "out", vocabulary=128)
    check_promise(base, out, 320, ("float32", "bfloat16"))
    assert config_of(out) == config_of(base) | {"vocab_size": 384}
    both = apply(tmp_path, base, "both", vocabulary=128, tensor_parallel=4)
    assert surgeon.verify(base, both, streamed=True, windows=1, window=16).holds
    surgeon.make_delta(both, tmp_path / "delta")
    surgeon.apply_delta(tmp_path / "delta", str(base), tmp_path / "again")
    assert_same(both, tmp_path / "again")
    surgeon.revert(both, tmp_path / "back")
    assert_same(base, tmp_path / "back")
    # One column of an old head that is another is found.
    from tests.checkpoints import edit_tensor

    edit_tensor(both, "model.layers.1.self_attn.o_proj.weight", lambda value: value.index_fill(1, torch.tensor([0]), 1))
    assert "base tensors" in {c.name for c in surgeon.verify(base, both, logits=False).checks if not c.holds}


def test_sinks_stand_within_the_groups_of_their_heads(tmp_path: Path) -> None:
    """Of gpt-oss, which mixes experts: each query head has a number of its own beside its rows."""
    sparse = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, "head_dim": 16}
    base = base_of(tmp_path, "gpt_oss", 6, 2, 96, intermediate_size=64, **sparse)
    out = apply(tmp_path, base, "out", tensor_parallel=4)
    held, found = (weights(folder)["model.layers.1.self_attn.sinks"] for folder in (base, out))
    assert torch.equal(found, grouped(held, 2, 3, 4, 0))
    assert surgeon.verify(base, out, device="cpu", windows=1, window=16).holds
    hybrid = add_letters(tiny_decoder(tmp_path / "hybrid", "qwen3_next", CAUSAL, dtype="bfloat16"))
    out = apply(tmp_path, hybrid, "hybrid-out", multiple_of=96)
    assert surgeon.verify(hybrid, out, device="cpu", windows=1, window=16).holds


def test_what_cannot_be_padded_is_refused(tmp_path: Path) -> None:
    base = base_of(tmp_path, "llama", 4, 2, 64)
    olmo = tiny.checkpoint(tmp_path / "olmo2", "olmo2", num_attention_heads=2, num_key_value_heads=1)
    for folder, options, reason in (
        (base, {"tensor_parallel": 2, "multiple_of": 50}, "the base divides already"),
        (base, {"tensor_parallel": 48}, "choose fewer devices"),
        (olmo, {"tensor_parallel": 4}, "normalised over all heads together"),
    ):
        with pytest.raises(BadInput, match=reason) as told:
            surgeon.preview(write_plan(tmp_path / "plan.yaml", [{"op": "pad_to", **options}]), folder)
        assert "\n" not in str(told.value)


def test_layers_for_further_tokens_have_the_widths_of_the_others(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    base = tiny_decoder(tmp_path / "base", "qwen3_5_text", CAUSAL)
    first = min(base.glob("*.safetensors"))
    save_file(load_file(first) | {"mtp.layers.0.mlp.up_proj.weight": torch.zeros(64, 64)}, first)
    index = config_of(base) and json.loads((base / "model.safetensors.index.json").read_text())
    index["weight_map"]["mtp.layers.0.mlp.up_proj.weight"] = first.name
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    for operation in ({"op": "pad_to", "multiple_of": 96}, {"op": "widen_ffn", "by": 8}):
        with pytest.raises(BadInput, match=r"mtp\.layers\.0.* predicts further tokens"):
            surgeon.preview(write_plan(tmp_path / "plan.yaml", [operation]), base)


def test_zeros_behind_all_groups_are_found_on_the_twin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads would read other keys and values than before."""
    made = pad_to._padded

    def at_the_end(*given: Any) -> Iterator[Any]:
        pieces = [*made(*given)]
        yield from sorted(pieces, key=lambda piece: isinstance(piece, pad_to.Constant))

    monkeypatch.setattr(pad_to, "_padded", at_the_end)
    with pytest.raises(BadInput, match=r"the logits .* are not the base's"):
        apply(tmp_path, base_of(tmp_path, "llama", 6, 2, 96), "out", tensor_parallel=4)


def test_what_no_longer_divides_is_noted(tmp_path: Path) -> None:
    base = base_of(tmp_path, "llama", 4, 2, 64, intermediate_size=128)
    shown = surgeon.preview(write_plan(tmp_path / "plan.yaml", [{"op": "widen_ffn", "by": 12}]), base)
    assert any("`intermediate_size` 140 is a multiple of 4, the base's 128 of 128" in note for note in shown.notes)
    even = surgeon.preview(write_plan(tmp_path / "plan.yaml", [{"op": "widen_ffn", "by": 128}]), base)
    assert not any("is a multiple of" in note for note in even.notes)
