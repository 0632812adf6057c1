"""Bases stored in FP8 blocks or MXFP4: grown as bytes, exact where both are run dequantised, and back to the base."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from packaging.version import Version
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config, Qwen3Config, Qwen3ForCausalLM
from transformers.integrations import finegrained_fp8, mxfp4

import surgeon
from surgeon.anatomy.grafted_config import native_config
from surgeon.errors import BadInput
from surgeon.grafts.bundle import import_bundle
from surgeon.models.load import load_model
from tests.checkpoints import add_letters, as_bytes, same_bytes, weights
from tests.end_to_end.test_any_decoder import TRAINING
from tests.quantised import quantised, tiny_quantised
from tests.training.texts import corpus

# By model type the method, and the modules that stay as they are; layers are numbered in various ways.
LAYOUTS: dict[str, tuple[str, list[str] | None]] = {
    "qwen3_moe": ("fp8", ["lm_head", "model.layers.1.self_attn.q_proj", "model.layers.3.self_attn.q_proj"]),
    "deepseek_v3": ("fp8", None),
    "qwen3": ("fp8", ["lm_head"]),
    "gpt_oss": ("mxfp4", ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]),
}
_ATTENTION = ("self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
INSERT = {"op": "insert_layers", "where": {"every": 2}, "init": {"kind": "copy"}}
Plan = Callable[..., Path]


@pytest.mark.parametrize("model_type", LAYOUTS)
def test_grown_exactly_and_back(model_type: str, plan: Plan, tmp_path: Path) -> None:
    method, skipped = LAYOUTS[model_type]
    base = tiny_quantised(tmp_path / "base", model_type, method, skipped=skipped)
    drawn = plan(INSERT)
    shown = surgeon.preview(drawn, str(base))
    assert shown.blueprint.promise == "exact"
    assert any("found on a twin" in note for note in shown.notes)
    surgeon.apply(drawn, str(base), tmp_path / "out")
    verified = surgeon.verify(base, tmp_path / "out", window=16, windows=1, dtypes=["auto", "float32"])
    assert verified.holds
    assert verified.identical

    before, after = weights(base), weights(tmp_path / "out")
    placed = {entry.base: entry.index for entry in shown.blueprint.layers if entry.base is not None}
    for name, value in before.items():
        words = name.split(".")
        place = ".".join([*words[:2], str(placed[int(words[2])]), *words[3:]]) if ".layers." in name else name
        assert after[place].dtype == value.dtype
        assert torch.equal(as_bytes(after[place]), as_bytes(value)), name
    new = {f"model.layers.{entry.index}." for entry in shown.blueprint.layers if entry.base is None}
    assert {value.dtype for name, value in after.items() if name.startswith(tuple(new))} == {torch.bfloat16}

    surgeon.revert(tmp_path / "out", tmp_path / "back")
    assert same_bytes(weights(tmp_path / "back"), before)
    assert json.loads((base / "config.json").read_text()) == json.loads((tmp_path / "back/config.json").read_text())


@pytest.mark.parametrize("model_type", LAYOUTS)
def test_new_layers_hold_the_numbers_that_transformers_makes(model_type: str, plan: Plan, tmp_path: Path) -> None:
    """Loaded without surgeon, a copy that is not silenced is the layer that it is of, bit for bit."""
    method, skipped = LAYOUTS[model_type]
    base = tiny_quantised(tmp_path / "base", model_type, method, skipped=skipped)
    drawn = plan(INSERT | {"zero_init": False})
    layers = surgeon.preview(drawn, str(base)).blueprint.layers
    surgeon.apply(drawn, str(base), tmp_path / "out")
    one, other = (AutoModelForCausalLM.from_pretrained(folder, dtype="auto") for folder in (base, tmp_path / "out"))
    stored = weights(tmp_path / "out")
    for entry in layers:
        of = entry.base if entry.base is not None else layers[entry.sources[0]].base
        assert of is not None
        original = one.model.layers[of]
        there = other.model.layers[entry.index].state_dict()
        for name, value in original.state_dict().items():
            assert torch.equal(there[name], value), (entry.index, name)
        scales = [name for name in stored if name.startswith(f"model.layers.{entry.index}.") and "scale" in name]
        assert bool(scales) == (entry.base is not None)


def test_modules_that_are_not_quantised_keep_their_layers(plan: Plan, tmp_path: Path) -> None:
    skipped = LAYOUTS["qwen3_moe"][1]
    base = tiny_quantised(tmp_path / "base", "qwen3_moe", "fp8", skipped=skipped)
    surgeon.apply(plan(INSERT), str(base), tmp_path / "out")
    named = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    # Layers 1 and 3 are now 1 and 4, their copies 2 and 5; of these nothing is quantised.
    assert named[:5] == ["lm_head", *(f"model.layers.{index}.self_attn.q_proj" for index in (1, 2, 4, 5))]
    copies = [f"model.layers.{index}.{name}" for index in (2, 5) for name in ("mlp.experts", *_ATTENTION)]
    assert sorted(named[5:]) == sorted(copies)
    plain = {
        name.split(".")[2]
        for name, value in weights(tmp_path / "out").items()
        if name.endswith("self_attn.q_proj.weight") and value.dtype == torch.bfloat16
    }
    assert plain == {"1", "2", "4", "5"}


@pytest.mark.parametrize("model_type", ["deepseek_v3", "gpt_oss"])
def test_a_copy_that_is_not_silent_shows(model_type: str, plan: Plan, tmp_path: Path) -> None:
    base = tiny_quantised(tmp_path / "base", model_type, LAYOUTS[model_type][0])
    surgeon.apply(plan(INSERT | {"zero_init": False}), str(base), tmp_path / "loud")
    surgeon.apply(plan({"op": "stack_layers", "bottom": 3, "top": 3}), str(base), tmp_path / "stacked")
    for folder in ("loud", "stacked"):
        verified = surgeon.verify(base, tmp_path / folder, window=16, windows=1)
        assert verified.holds
        assert verified.identical is False
        assert verified.comparisons[0].max_abs_difference > 0.01


COMPUTED: dict[str, dict[str, Any]] = {
    "an average": {"init": {"kind": "average"}, "where": {"after": [1]}},
    "random weights": {"init": {"kind": "random"}},
}


_ONE_KIND: dict[str, dict[str, Any]] = {
    "gpt_oss": {"layer_types": ["full_attention"] * 4, "num_hidden_layers": 4},
}


@pytest.mark.parametrize("case", COMPUTED)
@pytest.mark.parametrize("model_type", ["qwen3", "gpt_oss"])
def test_new_layers_are_computed_of_what_quantised_ones_stand_for(
    model_type: str, case: str, plan: Plan, tmp_path: Path
) -> None:
    base = tiny_quantised(tmp_path / "base", model_type, LAYOUTS[model_type][0], **_ONE_KIND.get(model_type, {}))
    drawn = plan(INSERT | COMPUTED[case])
    surgeon.apply(drawn, str(base), tmp_path / "out")
    verified = surgeon.verify(base, tmp_path / "out", window=16, windows=1)
    assert verified.holds
    assert verified.identical
    name = "experts.gate_up_proj" if model_type == "gpt_oss" else "up_proj.weight"
    one, other = (AutoModelForCausalLM.from_pretrained(folder, dtype="auto") for folder in (base, tmp_path / "out"))
    made = other.get_parameter(f"model.layers.2.mlp.{name}").float()
    if case == "an average":
        sources = [one.get_parameter(f"model.layers.{index}.mlp.{name}").double() for index in (1, 2)]
        assert (made - (sources[0] + sources[1]) / 2).abs().max() <= 0.005 * made.abs().max()
    else:
        assert 0.015 < made.std() < 0.025


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.21"), reason="until then transformers cannot unpack such blocks"
)
def test_blocks_that_do_not_divide_a_size(plan: Plan, tmp_path: Path) -> None:
    """As DeepSeek's 576 rows in blocks of 128; transformers would divide them into equal blocks."""
    config = Qwen3Config(
        hidden_size=64,
        intermediate_size=320,
        num_hidden_layers=4,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=64,
        vocab_size=256,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    before = weights(tmp_path / "base")
    base = quantised(tmp_path / "base", "fp8")
    surgeon.apply(plan(INSERT | {"zero_init": False}), str(base), tmp_path / "loud")
    after = weights(tmp_path / "loud")
    for name in ("mlp.gate_proj", "mlp.down_proj", "self_attn.q_proj"):
        held, made = before[f"model.layers.1.{name}.weight"], after[f"model.layers.2.{name}.weight"]
        assert made.dtype == torch.bfloat16
        assert torch.allclose(made.float(), held.float(), rtol=0.07, atol=2e-4)
    model = load_model(base)
    for name in ("mlp.gate_proj", "mlp.down_proj", "self_attn.q_proj"):
        assert torch.equal(model.get_parameter(f"model.layers.1.{name}.weight"), after[f"model.layers.2.{name}.weight"])
    surgeon.apply(plan(INSERT), str(base), tmp_path / "out")
    verified = surgeon.verify(base, tmp_path / "out", window=16, windows=1)
    assert verified.holds
    assert verified.identical


def test_fusion_is_refused(plan: Plan, tmp_path: Path) -> None:
    base = tiny_quantised(tmp_path / "base", "qwen3", "fp8")
    with pytest.raises(BadInput, match=r"of a qwen3 layer are query, .* is not described, .* use init average"):
        surgeon.preview(plan(INSERT | {"init": {"kind": "ot_fusion"}, "where": {"after": [1]}}), str(base))


ADAPTERS = {"op": "gated_adapters", "size": 4}
BRANCHES = {"op": "control_llm", "layers": {"every": 2}}
STATES = {"op": "mixture_of_control", "rank": 2}
SLOTS = {"op": "pmoe_experts", "threshold": 1}
# By model type operations, and modules that are not quantised for their sake.
GRAFTED: dict[str, tuple[list[dict[str, Any]], set[str]]] = {
    # Of six layers, 2 and 5 are new.
    "qwen3_moe": (
        [INSERT, ADAPTERS, BRANCHES],
        {f"layers.{n}.mlp.adapter.{part}" for n in range(6) for part in ("gate", "gate_proj", "up_proj", "down_proj")}
        | {f"layers.{n}.expanded" for n in (1, 3, 5)}
        | {f"layers.{n}.{name}" for n in (2, 5) for name in ("mlp.experts", "self_attn.q_proj", *_ATTENTION)},
    ),
    "gpt_oss": (
        [BRANCHES, SLOTS, STATES | {"sites": ["attention"]}],
        {f"layers.{n}.self_attn.{name}.slots.0" for n in range(4) for name in ("q_proj", "v_proj")}
        | {"layers.1.expert_router.slots.0", "layers.1.expanded", "layers.3.expanded", "control_bank"},
    ),
}


@pytest.mark.parametrize("model_type", GRAFTED)
def test_grafts_stand_beside_quantised_layers(
    model_type: str, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, skipped = LAYOUTS[model_type]
    operations, listed = GRAFTED[model_type]
    base = tiny_quantised(tmp_path / "base", model_type, method, skipped=skipped)
    applied = surgeon.apply(plan(*operations), str(base), tmp_path / "out")
    assert applied.manifest.promise == "exact"
    verified = surgeon.verify(base, tmp_path / "out", window=16, windows=1)
    assert verified.holds
    assert verified.identical
    assert {comparison.mode for comparison in verified.comparisons} == {"prefill", "cached decode"}

    before, after = weights(base), weights(tmp_path / "out")
    new = {name: value for name, value in after.items() if name in applied.manifest.new_tensors}
    assert {value.dtype for value in new.values()} == {torch.bfloat16}
    kept = [as_bytes(value).tolist() for value in after.values() if value.dtype in (torch.float8_e4m3fn, torch.uint8)]
    packed = [value for value in before.values() if value.dtype in (torch.float8_e4m3fn, torch.uint8)]
    assert sorted(kept) == sorted(as_bytes(value).tolist() for value in packed)

    config, native = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "out", base))
    named = set(config["quantization_config"]["modules_to_not_convert"])
    assert {name for name in named if "layers.*" not in name} - set(skipped or ()) >= {f"model.{n}" for n in listed}
    assert named - {f"model.{name}" for name in listed} - {"model.layers.4.self_attn.q_proj"} <= set(skipped or ())
    replaced = _replaced(config, monkeypatch)
    assert replaced == {
        re.sub(r"experts\..*", "experts", name.rpartition(".")[0])
        for name, value in after.items()
        if value.dtype in (torch.float8_e4m3fn, torch.uint8)
    }

    surgeon.revert(tmp_path / "out", tmp_path / "back")
    assert same_bytes(weights(tmp_path / "back"), before)
    assert native_config(config) == native or INSERT in operations
    assert json.loads((tmp_path / "back/config.json").read_text()) == native


def _replaced(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The modules in whose place transformers puts its own where it multiplies what is quantised as it is stored."""
    kind = getattr(import_bundle(config), config["architectures"][0])
    with torch.device("meta"):
        model = kind(kind.config_class(**{key: value for key, value in config.items() if key != "model_type"}))
    settings = dict(config["quantization_config"])
    listed = settings["modules_to_not_convert"]
    if settings["quant_method"] == "fp8":
        finegrained_fp8.replace_with_fp8_linear(model, listed, FineGrainedFP8Config(**settings), pre_quantized=True)
        kinds: tuple[type, ...] = (finegrained_fp8.FP8Linear, finegrained_fp8.FP8Experts)
    else:
        # Kernels themselves are fetched from the Hub, and nothing is multiplied here.
        monkeypatch.setattr("transformers.integrations.hub_kernels.get_kernel", lambda *_, **__: None)
        mxfp4.replace_with_mxfp4_linear(model, Mxfp4Config(**settings), listed)
        kinds = (mxfp4.Mxfp4GptOssExperts,)
    # Every graft is still there.
    import_bundle(config).check_sites(model)
    return {name for name, module in model.named_modules() if isinstance(module, kinds)}


UNGRAFTED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a block that kernels replace": (
        "gpt_oss",
        ADAPTERS,
        r"layer 0: mlp is stored quantised, where transformers",
    ),
    "one of two sites": ("gpt_oss", STATES, r"attach to other blocks \(`sites`\), where the operation can"),
    "a quantised module": ("qwen3", SLOTS, r"layer 0: self_attn\.q_proj is stored in F8_E4M3, and a slot takes"),
}


@pytest.mark.parametrize("case", UNGRAFTED)
def test_grafts_that_would_be_lost_are_refused(case: str, plan: Plan, tmp_path: Path) -> None:
    model_type, operation, words = UNGRAFTED[case]
    method, skipped = LAYOUTS[model_type]
    base = tiny_quantised(tmp_path / "base", model_type, method, skipped=skipped)
    with pytest.raises(BadInput, match=words):
        surgeon.preview(plan(operation), str(base))


def test_merging_a_branch_with_a_quantised_layer(plan: Plan, tmp_path: Path) -> None:
    """Against the mean, in float64, of what the quantised weights stand for and the twin's; a described family."""
    base = tiny_quantised(tmp_path / "base", "qwen3", "fp8", skipped=["lm_head"])
    surgeon.apply(plan(BRANCHES), str(base), tmp_path / "grown")
    verified = surgeon.verify(base, tmp_path / "grown", window=16, windows=1)
    assert verified.holds
    assert verified.identical
    twin, there = "model.layers.1.expanded.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"
    draws = torch.Generator().manual_seed(3)
    for shard in (tmp_path / "grown").glob("*.safetensors"):
        held = load_file(shard)
        if twin in held:
            held[twin] = torch.randn(held[twin].shape, generator=draws).to(torch.bfloat16)
            save_file(held, shard, metadata={"format": "pt"})
    surgeon.apply(plan({"op": "merge_branches"}), str(tmp_path / "grown"), tmp_path / "merged")
    after = weights(tmp_path / "merged")
    assert after["model.layers.0.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn
    first, second = load_model(base).get_parameter(there).double(), weights(tmp_path / "grown")[twin].double()
    assert torch.equal(after[there], ((first + second) / 2).to(torch.bfloat16))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert torch.equal(merged.get_parameter(there), after[there])


def test_training_quantised_tensors_is_refused(plan: Plan, tmp_path: Path) -> None:
    base = add_letters(tiny_quantised(tmp_path / "base", "qwen3", "fp8"))
    surgeon.apply(plan({"op": "stack_layers", "bottom": 3, "top": 3}), str(base), tmp_path / "out")
    corpus(tmp_path / "words.jsonl", documents=60)
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(TRAINING))
    with pytest.raises(BadInput, match=r"layers\.\d\..*: stored in F8_E4M3, .* cannot train"):
        surgeon.train(tmp_path / "out", tmp_path / "train.yaml", tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_a_second_surgery(model_type: str, plan: Plan, tmp_path: Path) -> None:
    """Of an output whose layers are quantised and not, by turns."""
    method, skipped = LAYOUTS[model_type]
    base = tiny_quantised(tmp_path / "base", model_type, method, skipped=skipped)
    surgeon.apply(plan(INSERT), str(base), tmp_path / "one")
    surgeon.apply(plan(INSERT), str(tmp_path / "one"), tmp_path / "two")
    for before in (tmp_path / "one", base):
        verified = surgeon.verify(before, tmp_path / "two", window=16, windows=1)
        assert verified.holds
        assert verified.identical
    surgeon.revert(tmp_path / "two", tmp_path / "back")
    assert same_bytes(weights(tmp_path / "back"), weights(tmp_path / "one"))


def test_layer_by_layer_is_refused(plan: Plan, tmp_path: Path) -> None:
    base = tiny_quantised(tmp_path / "base", "qwen3", "fp8")
    surgeon.apply(plan(INSERT), str(base), tmp_path / "out")
    with pytest.raises(BadInput, match="quantised model cannot be run layer by layer"):
        surgeon.verify(base, tmp_path / "out", window=16, windows=1, streamed=True)


def _changed(folder: Path, change: Callable[[str, torch.Tensor], dict[str, torch.Tensor]]) -> None:
    """Change every attention output of a checkpoint, or what stands beside it."""
    places: dict[str, str] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        held: dict[str, torch.Tensor] = {}
        for name, value in load_file(shard).items():
            held |= change(name, value) if ".o_proj." in name else {name: value}
        save_file(held, shard, metadata={"format": "pt"})
        places |= dict.fromkeys(held, shard.name)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"weight_map": places}))


BROKEN: dict[str, tuple[Callable[[str, torch.Tensor], dict[str, torch.Tensor]], str]] = {
    "no scales": (
        lambda name, value: {} if name.endswith("_scale_inv") else {name: value},
        r"o_proj\.weight \(.*\): F8_E4M3, yet no scales",
    ),
    "scales of another grid": (
        lambda name, value: {name: torch.ones(7, 5) if name.endswith("_scale_inv") else value},
        r"o_proj\.weight_scale_inv .*: shape \[7, 5\], not the scales of a tensor of \[64, 256\] \(\[1, 2\]\)",
    ),
    "another method's bytes": (
        lambda name, value: {name: value if name.endswith("_scale_inv") else value.view(torch.uint8)},
        r"o_proj\.weight \(.*\): dtype U8, which fp8 has no such tensor of",
    ),
}


def _four_bits(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """Two numbers in a byte, and a scale for 32 of them."""
    if name.endswith("_scale_inv"):
        return {name: torch.full((64, 8), 0.01)}
    return {name: torch.arange(64 * 128).reshape(64, 128).to(torch.int8)}


def test_four_bits_in_fp8_checkpoints_are_copied_only(plan: Plan, tmp_path: Path) -> None:
    base = tiny_quantised(tmp_path / "base", "qwen3", "fp8")
    _changed(base, _four_bits)
    with pytest.raises(BadInput, match=r"layers\.2\..*: quantised \(.*\), .* not computed; use init copy"):
        surgeon.preview(plan(INSERT | COMPUTED["an average"]), str(base))
    with pytest.raises(BadInput, match=r"o_proj\.weight \(.*\): I8 in a layer that surgeon only moves as bytes"):
        surgeon.preview(plan(ADAPTERS), str(base))
    surgeon.apply(plan(INSERT), str(base), tmp_path / "out")
    verified = surgeon.verify(base, tmp_path / "out", window=16, windows=1)
    assert verified.holds
    assert verified.identical
    after = weights(tmp_path / "out")
    assert {str(after[f"model.layers.{index}.self_attn.o_proj.weight"].dtype) for index in range(6)} == {"torch.int8"}


@pytest.mark.parametrize("case", BROKEN)
def test_tensors_that_contradict_the_method(case: str, plan: Plan, tmp_path: Path) -> None:
    change, words = BROKEN[case]
    base = tiny_quantised(tmp_path / "base", "qwen3", "fp8")
    _changed(base, change)
    with pytest.raises(BadInput, match=words):
        surgeon.preview(plan(INSERT), str(base))


@pytest.mark.parametrize("method", ["bitsandbytes", "awq", "gptq", "fbgemm_fp8"])
def test_other_methods_are_named(method: str, plan: Plan, tmp_path: Path) -> None:
    base = tiny_quantised(tmp_path / "base", "qwen3", "fp8")
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"]["quant_method"] = method
    (base / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match=rf"quantised.* \({method}\)"):
        surgeon.preview(plan(INSERT), str(base))


def test_names_that_cannot_be_renumbered_are_refused(plan: Plan, tmp_path: Path) -> None:
    skipped = ["model.layers.1.self_attn.q_proj", "model.layers.3.self_attn.q_proj"]
    base = tiny_quantised(tmp_path / "base", "qwen3", "fp8", skipped=skipped)
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = [r"model.layers.[13].self_attn.q_proj"]
    (base / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match=r"surgeon cannot renumber: self_attn\.q_proj of layer 2 would"):
        surgeon.preview(plan(INSERT), str(base))


@pytest.mark.parametrize("pattern", [r"(\w+\.?)+X", "(" * 3_000, r"(.*)\1"])
def test_no_pattern_of_modules_that_stay_holds_a_command_up(pattern: str, plan: Plan, tmp_path: Path) -> None:
    base = tiny_quantised(tmp_path / "base", "qwen3", "fp8")
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = [pattern]
    (base / "config.json").write_text(json.dumps(config))
    if "X" in pattern:
        assert surgeon.preview(plan(INSERT), str(base)).blueprint.promise == "exact"
        return
    with pytest.raises(BadInput, match=r"modules_to_not_convert`: the pattern .*cannot be read"):
        surgeon.preview(plan(INSERT), str(base))
