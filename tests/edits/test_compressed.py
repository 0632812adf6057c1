"""`dequantise` of what compressed-tensors stores: to the bit the numbers that were packed, and what transformers reads.

The numbers are this test's own, in float64 (`Coded.plain`).
"""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

import surgeon
from surgeon.anatomy.compressed import packs_of
from surgeon.blueprint.recipes import Unpacked
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.edits import dequantise
from surgeon.errors import BadInput
from tests.checkpoints import edit_config, edit_tensor, weights, write_plan
from tests.decoders import tiny_decoder
from tests.quantised import Coded, compressed

needs_library = pytest.mark.skipif(
    importlib.util.find_spec("compressed_tensors") is None, reason="needs the extra compressed"
)

# Of each base, how attention and the rest are stored; where both are stored alike, transformers reads it.
CODES: dict[str, tuple[str, str, tuple[Coded, ...]]] = {
    "packs": ("llama", "bfloat16", (Coded(),)),
    "zero points": ("qwen3_moe", "bfloat16", (Coded(symmetric=False), Coded(bits=3, symmetric=False, size=32))),
    "halves": ("llama", "float16", (Coded(bits=5, scales="float16", strategy="channel", symmetric=False),)),
    "experts": ("qwen3_moe", "bfloat16", (Coded(bits=4, strategy="tensor"),)),
    "int8": ("llama", "bfloat16", (Coded("int-quantized", 8, symmetric=False),)),
    "one number": (
        "llama",
        "bfloat16",
        (Coded("naive-quantized", 8, strategy="tensor"), Coded(bits=8, strategy="tensor")),
    ),
    "fp8": ("llama", "bfloat16", (Coded("float-quantized", 8, "float", strategy="block"),)),
}


def _base(folder: Path, model_type: str = "llama", *coded: Coded, dtype: str = "bfloat16") -> Path:
    return compressed(tiny_decoder(folder, model_type, dtype=dtype, num_hidden_layers=2), *(coded or (Coded(),)))


@needs_library
@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("case", CODES)
def test_it_is_what_was_packed_and_what_transformers_reads(case: str, tmp_path: Path) -> None:
    model_type, dtype, coded = CODES[case]
    plain = weights(tiny_decoder(tmp_path / "plain", model_type, dtype=dtype, num_hidden_layers=2))
    base = _base(tmp_path / "base", model_type, *coded, dtype=dtype)
    surgeon.apply("dequantise", base, tmp_path / "out", device="cpu")
    made = weights(tmp_path / "out")
    assert made.keys() == plain.keys()
    for name, value in plain.items():
        if value.ndim == 2 and "_proj" in name:
            code = coded[0] if "self_attn" in name else coded[-1]
            value = code.plain(name, (value.shape[0], value.shape[1]), value.dtype)
        assert value.dtype == made[name].dtype and torch.equal(value, made[name]), name
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert surgeon.verify(base, tmp_path / "out", logits=False).holds
    if len(coded) == 1:
        opened = CompressedTensorsConfig(dequantize=True)
        theirs = AutoModelForCausalLM.from_pretrained(base, dtype="auto", quantization_config=opened).state_dict()
        ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").state_dict()
        # Before 5.23 modules keep their scales, and are opened as they run.
        if not (transformers.__version__ < "5.23" and any(name.endswith("_scale") for name in theirs)):
            assert theirs.keys() == ours.keys() and all(
                torch.equal(value, ours[name]) for name, value in theirs.items()
            )
        verified = surgeon.verify(base, tmp_path / "out", device="cpu", window=16, windows=1)
        assert verified.holds and verified.identical
    else:
        # Where transformers would make other numbers, nothing is proven by them.
        assert "not proven" in surgeon.preview("dequantise", base).proof.text
        with pytest.raises(BadInput, match=r"compare tensors alone \(`surgeon verify --static`\)"):
            surgeon.verify(base, tmp_path / "out", device="cpu", window=16, windows=1)


@needs_library
@pytest.mark.parametrize("case", ["packs", "int8", "fp8"])
def test_a_mistake_in_numbers_is_noticed_on_a_twin(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_type, dtype, coded = CODES[case]
    base = _base(tmp_path / "base", model_type, *coded, dtype=dtype)
    compute = Unpacked.compute

    def off(recipe: Unpacked, bench: Any) -> torch.Tensor:
        made = compute(recipe, bench)
        made[5, 5] *= 2
        return made

    monkeypatch.setattr(Unpacked, "compute", off)
    # What was proven before the mistake does not count.
    monkeypatch.setenv("SURGEON_CACHE", "off")
    with pytest.raises(BadInput, match=r"on a twin of this model, the logits .* are not the base's"):
        surgeon.apply("dequantise", base, tmp_path / "out", device="cpu")
    assert not (tmp_path / "out").exists()


def test_what_transformers_cannot_load_is_not_said_to_be_proven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dequantise, "find_spec", lambda name: name)
    proof = surgeon.preview("dequantise", _base(tmp_path / "base", "qwen3_moe", Coded(symmetric=False))).proof
    assert (proof.how, proof.libraries) == ("unproven", {})
    assert proof.text.startswith("not proven: transformers leaves out the zero points of experts")


Change = Callable[[str, torch.Tensor], torch.Tensor | None]
_DOWN = "model.layers.1.mlp.down_proj"


def _without(end: str) -> Change:
    return lambda name, value: None if name.endswith(end) else value


def _as(end: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda name, value: change(value) if name.endswith(end) else value


# What is changed of one module, in symmetric packs with groups of 16, and the words that name it.
TENSORS: dict[str, tuple[Change, str]] = {
    "no scale": (_without("weight_scale"), r"weight_packed \(.*\): I32, yet no .*down_proj\.weight_scale"),
    "no shape": (_without("weight_shape"), r"down_proj\.weight_shape: missing; expected the two sizes"),
    "no pack": (_without("weight_packed"), r"weight_(scale|shape) \(.*\): no quantised matrix stands beside it"),
    "fewer words": (
        _as("packed", lambda t: t[:, :-1].clone()),
        r"weight_packed .*: \d+ words a row, where \d+ columns",
    ),
    "fewer rows": (_as("packed", lambda t: t[:-1].clone()), r"weight_scale .*: BF16 \[.*\], not one for each of"),
    "fewer groups": (
        _as("scale", lambda t: t[:, :-1].clone()),
        r"weight_packed .* words a row, where \d+ columns of 4",
    ),
    "scales of whole numbers": (_as("scale", lambda t: t.to(torch.int8)), r"weight_scale .*: I8"),
    "a pack of bytes": (_as("packed", lambda t: t.to(torch.int8)), r"weight_packed .*: I8 .* is I32, rows by columns"),
    "flat": (_as("packed", lambda t: t.flatten()), r"weight_packed .*: I32 \[\d+\]; a matrix"),
}
_WEIGHTS = Coded().weights
# What config.json is changed to say of the same base.
SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "ignored": ({"ignore": [_DOWN]}, rf"{_DOWN}\.weight_packed .*: quantised, yet `ignore` .* names {_DOWN}"),
    "ignored by a pattern": ({"ignore": ["re:.*down_proj"]}, r"quantised, yet `ignore` .* names re:\.\*down_proj"),
    "bits": ({"num_bits": 8}, r"weight_packed .*: \d+ words a row, where \d+ columns of 8 bits"),
    "group": ({"group_size": 32}, r"weight_packed .*: \d+ words a row, where \d+ columns of 4 bits"),
    "no group": ({"group_size": 0}, r"`quantization_config\.config_groups\.group_0\.weights\.group_size` is 0"),
    "not symmetric": ({"symmetric": False}, r"weight_zero_point: missing, and group `group_0` .* is not symmetric"),
    "another format": ({"format": "nvfp4-pack-quantized"}, r"format nvfp4-pack-quantized, which surgeon does not"),
    "plain": ({"format": "int-quantized", "num_bits": 8}, r"in the format int-quantized, which stores no such tensor"),
    "for others": ({"targets": ["re:.*nothing"]}, r"quantised, yet no group of config\.json's"),
    "endless": ({"targets": [r"re:(?:(.)|(.)(.))*[!?]$"]}, r"quantised, yet no group of config\.json's"),
    "sparse": ({"sparsity_config": {"format": "sparse-24-bitmask"}}, r"sparse weights are not dequantised"),
    "rotated": ({"transform_config": {"config_groups": {}, "x": 1}}, r"rotated weights are not dequantised"),
}


def _settings(base: Path, **told: Any) -> None:
    config = json.loads((base / "config.json").read_text())["quantization_config"]
    group = config["config_groups"]["group_0"]
    for key, value in told.items():
        where = group["weights"] if key in _WEIGHTS else group if key in ("targets", "format") else config
        where[key] = value
    edit_config(base, quantization_config=config)


def _change(base: Path, change: Change) -> None:
    """Change the tensors of one module, or take some out."""
    index = base / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    for file in {place for name, place in places.items() if name.startswith(_DOWN)}:
        held = load_file(base / file)
        made = {name: change(name, value) if name.startswith(_DOWN) else value for name, value in held.items()}
        save_file({n: value for n, value in made.items() if value is not None}, base / file, {"format": "pt"})
        places = {n: place for n, place in places.items() if place != file or made.get(n) is not None}
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))


@pytest.mark.parametrize("case", [*TENSORS, *SETTINGS])
def test_packs_that_contradict_the_config_are_refused_by_name(case: str, tmp_path: Path) -> None:
    base = _base(tmp_path / "base")
    if case in TENSORS:
        change, words = TENSORS[case]
        _change(base, change)
    else:
        told, words = SETTINGS[case]
        _settings(base, **told)
    with pytest.raises(BadInput, match=words):
        surgeon.preview("dequantise", base)


def test_no_settings_end_as_a_bug(tmp_path: Path) -> None:
    base = _base(tmp_path / "base")
    odd = [None, True, 0, -1, 10**30, 1.5, "", "x", "re:(", [], [[]], [1], {}, {"weights": 3}, [["re:"]]]
    keys = [*_WEIGHTS, "targets", "format", "ignore", "config_groups", "sparsity_config", "block_structure"]
    kept = (base / "config.json").read_bytes()
    tensors = CheckpointFolder.open(base).tensors
    refused = 0
    for key, value in itertools.product(keys, odd):
        (base / "config.json").write_bytes(kept)
        _settings(base, **{key: value})
        try:
            packs_of(json.loads((base / "config.json").read_text()), tensors)
        except BadInput:
            refused += 1
    assert refused > len(keys) * 7


@needs_library
def test_sizes_that_are_read_are_compared(tmp_path: Path) -> None:
    wrong = _base(tmp_path / "wrong")
    edit_tensor(wrong, f"{_DOWN}.weight_shape", lambda value: value + 1)
    with pytest.raises(BadInput, match=rf"{_DOWN}\.weight: stored as \d+ rows of \d+, yet its weight_shape says"):
        surgeon.apply("dequantise", wrong, tmp_path / "out", device="cpu")
    assert not (tmp_path / "out").exists()


def test_without_the_library_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dequantise, "find_spec", lambda _: None)
    with pytest.raises(BadInput, match=r"unpacked by the package compressed-tensors: `pip install compressed-tensors`"):
        surgeon.preview("dequantise", _base(tmp_path / "base"))


def test_columns_in_another_order_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dequantise, "find_spec", lambda name: name)
    with pytest.raises(BadInput, match=r"weight_g_idx: groups of columns in another order, .* full-precision weights"):
        surgeon.preview("dequantise", _base(tmp_path / "base", "llama", Coded(ordered=True)))


def test_other_surgery_asks_for_it_first(tmp_path: Path) -> None:
    base = _base(tmp_path / "base")
    write_plan(tmp_path / "plan.yaml", [{"op": "drop_layers", "layers": [1]}])
    with pytest.raises(
        BadInput, match=r"quantised \(compressed-tensors\); `dequantise` it first, by a plan of its own"
    ):
        surgeon.preview(tmp_path / "plan.yaml", base)


@needs_library
def test_scales_of_activations_are_left_out_and_said(tmp_path: Path) -> None:
    """Nobody needs them once numbers are plain; without them the model computes what the weights alone say."""
    base = _base(tmp_path / "base")
    index = json.loads((base / "model.safetensors.index.json").read_text())
    file = index["weight_map"][f"{_DOWN}.weight_packed"]
    scale = {name: torch.ones(1) for name in (f"{_DOWN}.input_scale", "model.layers.1.self_attn.k_scale")}
    save_file(load_file(base / file) | scale, base / file, {"format": "pt"})
    index["weight_map"] |= dict.fromkeys(scale, file)
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    made = surgeon.apply("dequantise", base, tmp_path / "out", device="cpu")
    assert "left out: 2 scales of quantised activations and caches" in made.manifest.operations[0].matched
    assert not scale.keys() & weights(tmp_path / "out").keys()
    assert surgeon.verify(base, tmp_path / "out", logits=False).holds
