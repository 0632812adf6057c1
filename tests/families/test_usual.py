"""The shipped table of usual models says what is derived of them, to previews alone, and nothing of anything else."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import transformers

import surgeon
from surgeon.common import cache
from surgeon.errors import SurgeonError
from surgeon.families import anatomy_cache, checkpoint_anatomy, usual, usual_table
from surgeon.families.decoders import USUAL_DECODERS, USUAL_ENCODERS
from surgeon.families.dissect import dissect
from tests import tiny
from tests import usual as generator
from tests.usual import config_for, differences, headers_of
from tests.usual_types import USUAL

FROM_TABLE = "from surgeon's table of usual models"
PLANS = ("llama-pro", "neutral-residues", "control-llm/lerp8-mse-0-star", "opt-deus")

# The config.json files of published models, as they are, but for texts.
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
LLAMA2 = {
    "_name_or_path": "meta-llama/Llama-2-7b-hf",
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.0.dev0",
    "use_cache": True,
    "vocab_size": 32768,
}
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GEMMA = {
    "architectures": ["GemmaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "head_dim": 256,
    "hidden_act": "gelu",
    "hidden_activation": None,
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 16384,
    "max_position_embeddings": 8192,
    "model_type": "gemma",
    "num_attention_heads": 8,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.38.0.dev0",
    "use_cache": True,
    "vocab_size": 256000,
}
GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "initializer_range": 0.02,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "torch_dtype": "float32",
    "transformers_version": "4.42.4",
    "use_cache": True,
    "vocab_size": 256000,
}
GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "initializer_range": 0.02,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "use_cache": True,
    "vocab_size": 262144,
}
OLMO2 = {
    "architectures": ["Olmo2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "model_type": "olmo2",
    "num_attention_heads": 16,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "pad_token_id": 100277,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.47.0",
    "use_cache": True,
    "vocab_size": 100352,
}
PHI4 = {
    "_name_or_path": "Phi-4",
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 100257,
    "embd_pdrop": 0.0,
    "eos_token_id": 100265,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "initializer_range": 0.02,
    "intermediate_size": 17920,
    "max_position_embeddings": 16384,
    "model_type": "phi3",
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
    "num_key_value_heads": 10,
    "original_max_position_embeddings": 16384,
    "pad_token_id": 100349,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 250000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.47.0",
    "use_cache": True,
    "vocab_size": 100352,
}
PUBLISHED = {
    "Llama 3.2 1B": LLAMA,
    "Llama 2 7B": LLAMA2,
    "Mistral 7B": MISTRAL,
    "Qwen2.5 0.5B": QWEN2,
    "Qwen3 0.6B": QWEN3,
    "Gemma 2B": GEMMA,
    "Gemma 2 2B": GEMMA2,
    "Gemma 3 1B": GEMMA3,
    "OLMo 2 1B": OLMO2,
    "Phi-4": PHI4,
}

of_this_version = pytest.mark.skipif(
    json.loads(usual_table.FILE.read_text())["transformers"] != transformers.__version__,
    reason="the table is of another version of transformers, so nothing of it counts",
)


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder for caches that is empty."""
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def table() -> usual_table.Table:
    found = usual_table.read_table()
    assert found is not None, "stale: python -m tests.usual"
    return found


def entry_for(config: dict[str, Any], tensors: dict[str, Any]) -> Any:
    return usual.known(config, tensors, lambda: dissect(config, tensors).derivation)


def test_the_table_is_of_the_pinned_transformers() -> None:
    pinned = re.search(r"^transformers==(.+)$", Path("constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert json.loads(usual_table.FILE.read_text())["transformers"] == pinned[1], "python -m tests.usual"


def test_the_table_is_of_the_code_that_derives(table: usual_table.Table) -> None:
    assert table.code == generator.code_files()
    assert set(table.types) == set(USUAL) == {*USUAL_DECODERS, *USUAL_ENCODERS}


@of_this_version
# All of them are derived when the table is written, by the code whose digests it names.
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "phi3", "deberta-v2"])
def test_an_entry_is_what_is_derived(model_type: str, table: usual_table.Table) -> None:
    made = generator.type_entry(model_type)
    assert made.model_dump(mode="json") == table.types[model_type].model_dump(mode="json"), "python -m tests.usual"


@of_this_version
@pytest.mark.parametrize("model_type", USUAL)
def test_of_other_configs_too_the_table_says_what_is_derived(model_type: str) -> None:
    # All of them are compared when the table is written.
    for config in islice(generator.variations(model_type), [*USUAL].index(model_type) % 7, None, 20):
        assert not differences(config, headers_of(config)), config


@of_this_version
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_in_the_table(name: str) -> None:
    config = PUBLISHED[name]
    assert not differences(config, headers_of(config))


@of_this_version
def test_a_base_model_alone_is_in_the_table() -> None:
    config = config_for("llama")
    assert not differences(config, headers_of(config, below="model."))


@of_this_version
def test_the_order_of_tensors_is_the_checkpoint_s() -> None:
    config = config_for("llama", attention_bias=True)
    assert not differences(config, dict(reversed(headers_of(config).items())))


def _changed(name: str, **changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def change(tensors: dict[str, Any]) -> dict[str, Any]:
        return {key: replace(info, **changes) if key == name else info for key, info in tensors.items()}

    return change


def _lacking(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda tensors: {key: info for key, info in tensors.items() if key != name}


def _with(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda tensors: tensors | {name: replace(tensors["model.norm.weight"], name=name)}


QUERY, NORM = "model.layers.3.self_attn.q_proj.weight", "model.norm.weight"
OTHER_TENSORS = {
    "another shape": _changed(QUERY, shape=(60, 67)),
    "another shape outside": _changed(NORM, shape=(67,)),
    "quantised": _changed(QUERY, dtype="F8_E4M3"),
    "no number": _changed(NORM, dtype="I64"),
    "one lacks": _lacking(QUERY),
    "one outside lacks": _lacking(NORM),
    "no head": _lacking("lm_head.weight"),
    "one more": _with("model.layers.3.self_attn.q_proj.bias"),
    "one more outside": _with("score.weight"),
    "one above the stack": _with("model.layers.7.input_layernorm.weight"),
    "another way to write a number": _with("model.layers.03.input_layernorm.weight"),
}


@of_this_version
@pytest.mark.parametrize("change", OTHER_TENSORS)
def test_other_tensors_are_not_in_the_table(change: str) -> None:
    config = config_for("llama")
    tensors = headers_of(config)
    assert entry_for(config, tensors) is not None
    assert entry_for(config, OTHER_TENSORS[change](tensors)) is None


OTHER_CONFIGS: dict[str, dict[str, Any]] = {
    "an unknown field": {"norm_style": "none"},
    "another kind of value": {"rms_norm_eps": "1e-6"},
    "another activation": {"hidden_act": "relu2"},
    "another rotary embedding": {
        "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}
    },
    "a flag that is a number": {"attention_bias": 0},
    "a list as long as the stack": {"eos_token_id": [1, 2, 3, 4, 5, 6, 7]},
    "types of layers": {"layer_types": ["full_attention"] * 7},
    "quantised": {"quantization_config": {"quant_method": "fp8"}},
    "another head": {"architectures": ["LlamaForSequenceClassification"]},
    "one layer": {"num_hidden_layers": 1},
    "too many layers": {"num_hidden_layers": 20_000},
    "one head": {"num_attention_heads": 1, "num_key_value_heads": 1},
    "heads that do not divide the width": {"num_attention_heads": 4},
    "an odd head": {"head_dim": 5},
    "padding beyond the vocabulary": {"pad_token_id": 130},
    "another type": {"model_type": "granite"},
}


@of_this_version
@pytest.mark.parametrize("change", OTHER_CONFIGS)
def test_other_configs_are_not_in_the_table(change: str) -> None:
    config = config_for("llama")
    assert usual._is_tried(config, usual_table.read_table().types["llama"])  # type: ignore[union-attr]
    # Whatever its tensors are.
    changed = config | OTHER_CONFIGS[change]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(usual, "_sorted_out", lambda *_: ("model.", ({},), {}))
        assert entry_for(changed, {}) is None


@of_this_version
def test_a_table_of_other_code_does_not_count(
    monkeypatch: pytest.MonkeyPatch, table: usual_table.Table, tmp_path: Path
) -> None:
    config = config_for("llama")
    tensors = headers_of(config)

    def counts(changed: usual_table.Table) -> bool:
        (tmp_path / "table.json").write_text(changed.model_dump_json())
        monkeypatch.setattr(usual_table, "FILE", tmp_path / "table.json")
        usual_table.read_table.cache_clear()
        return entry_for(config, tensors) is not None

    llama = table.types["llama"]
    file = "models/llama/modeling_llama.py"
    try:
        assert counts(table)
        assert not counts(table.model_copy(update={"code_digest": "0" * 64}))
        assert not counts(table.model_copy(update={"code": table.code[1:]}))
        assert not counts(table.model_copy(update={"code": (*table.code, "no/file.py")}))
        assert not counts(table.model_copy(update={"transformers": "5.0.0"}))
        assert not counts(table.model_copy(update={"files": {**table.files, "modeling_utils.py": "0" * 64}}))
        edited = llama.model_copy(update={"files": {**llama.files, file: "0" * 64}})
        assert file in llama.files
        assert not counts(table.model_copy(update={"types": {"llama": edited}}))
        (tmp_path / "table.json").write_text("{")
        usual_table.read_table.cache_clear()
        assert entry_for(config, tensors) is None
        (tmp_path / "table.json").unlink()
        usual_table.read_table.cache_clear()
        assert entry_for(config, tensors) is None
    finally:
        usual_table.read_table.cache_clear()


@of_this_version
def test_a_plugin_s_hint_is_derived_with(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_for("llama")
    tensors = headers_of(config)
    assert entry_for(config, tensors) is not None
    monkeypatch.setattr(type(usual.HINTS), "plugin_of", lambda _self, name: name)
    assert entry_for(config, tensors) is None


def without_notes(shown: Any) -> dict[str, Any]:
    """All but what is known of its proof."""
    told = shown.to_json()
    del told["proof"]
    findings = (FROM_TABLE, "found on a twin", "an encoder")
    return told | {"notes": [note for note in told["notes"] if not note.startswith(findings)]}


@of_this_version
@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("plan", PLANS)
def test_a_preview_from_the_table_is_the_derived_one(
    plan: str, family: str, fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tiny.checkpoint(tmp_path / "base", family)

    def shown() -> Any:
        try:
            return surgeon.preview(plan, base)
        except SurgeonError as error:
            return error

    one = shown()
    monkeypatch.setenv(cache.VARIABLE, "off")
    other = shown()
    if isinstance(other, SurgeonError):
        assert str(one) == str(other)
        return
    assert any(note.startswith(FROM_TABLE) for note in one.notes) and other.notes[0].startswith("found on a twin")
    assert without_notes(one) == without_notes(other)
    assert one.blueprint == other.blueprint


@of_this_version
@pytest.mark.parametrize("family", ["roberta", "deberta"])
@pytest.mark.parametrize("head", tiny.ENCODER_HEADS)
def test_a_preview_of_an_encoder_is_the_derived_one(
    family: str, head: str, fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "base"
    tiny.model(family, dtype="bfloat16", head=head).save_pretrained(base)
    one = surgeon.preview("mixture-of-control/glue", base)
    monkeypatch.setenv(cache.VARIABLE, "off")
    other = surgeon.preview("mixture-of-control/glue", base)
    assert f"{FROM_TABLE}: an encoder of 6 layers" in one.notes[0] and "found on a twin" in other.notes[0]
    assert without_notes(one) == without_notes(other) and one.blueprint == other.blueprint


@of_this_version
def test_an_encoder_alone_or_below_its_name_is_in_the_table() -> None:
    whole = config_for("roberta")
    held = {name: info for name, info in headers_of(whole).items() if name.startswith("roberta.")}
    below = {
        name.removeprefix("roberta."): replace(info, name=name.removeprefix("roberta.")) for name, info in held.items()
    }
    for config in (whole, whole | {"architectures": ["RobertaModel"]}):
        assert not differences(config, held)
        assert not differences(config, below)


@of_this_version
def test_a_first_preview_neither_proves_nor_says_so(fresh: Path, base: Path) -> None:
    code = (
        "import json, sys, surgeon; found = surgeon.preview(*sys.argv[1:]);"
        " print(json.dumps([found.to_json(), sorted({'torch', 'transformers'} & set(sys.modules))]))"
    )
    for plan in ("llama-pro", "neutral-residues", "drop-layers"):
        ran = subprocess.run([sys.executable, "-c", code, plan, base], capture_output=True, text=True, check=True)
        shown, imported = json.loads(ran.stdout)
        assert imported == []
        assert shown["notes"][0] == (f"{FROM_TABLE}: down_proj, o_proj silent; `apply` derives and proves it itself")
        assert shown["proof"]["how"] == ("none" if plan == "drop-layers" else "promised")
    assert not fresh.exists()


@of_this_version
def test_what_is_inspected_is_in_the_table_too(fresh: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as without:
        without.setenv(cache.VARIABLE, "off")
        derived = surgeon.inspect(base).to_json()

    def refuse(*_args: Any, **_options: Any) -> None:
        raise AssertionError("the base was derived")

    monkeypatch.setattr(checkpoint_anatomy, "anatomy_of", refuse)
    assert surgeon.inspect(base).to_json() == derived
    assert not fresh.exists()


@of_this_version
def test_once_applied_a_preview_knows_the_proof(fresh: Path, base: Path, tmp_path: Path) -> None:
    surgeon.apply("llama-pro", base, tmp_path / "out")
    assert surgeon.preview("llama-pro", base).proof.how == "cached"


@of_this_version
def test_a_refusal_is_the_derived_one_s(fresh: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"intermediate_size": 49}))
    with pytest.raises(SurgeonError, match=r"mlp.*shape .*the config requires"):
        surgeon.preview("llama-pro", base)


def test_apply_and_verify_never_read_the_table(
    fresh: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: Any) -> None:
        raise AssertionError("the table was read")

    monkeypatch.setattr(anatomy_cache, "known", refuse)
    applied = surgeon.apply("llama-pro", base, tmp_path / "out")
    assert applied.preview.notes[0].startswith("found on a twin")
    assert surgeon.verify(base, tmp_path / "out", logits=False).holds


def test_without_a_cache_a_preview_derives_and_proves(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.VARIABLE, "off")
    shown = surgeon.preview("llama-pro", base)
    assert shown.notes[0].startswith("found on a twin") and shown.proof.how == "proven"


def test_a_preview_refuses_a_width_that_code_forbids(tmp_path: Path) -> None:
    """What a promise of rounding rests on is tried before the preview gives it: Gemma 2 multiplies by the root."""
    base = tiny.checkpoint(tmp_path / "base", "gemma2")
    plan = tmp_path / "plan.yaml"
    plan.write_text('{"surgeon": 1, "operations": [{"op": "widen_hidden", "times": 2}]}')
    with pytest.raises(SurgeonError, match="multiplies embeddings"):
        surgeon.preview(plan, str(base))
