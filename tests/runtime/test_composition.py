"""`anatomy` in config.json: read as names alone, since code is made of it, and a stranger may have written it."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

import surgeon
from surgeon.anatomy.grafted_config import changed_fields, native_config
from surgeon.errors import BadInput
from surgeon.grafts.bundle import CODE_FILE, bundle
from surgeon.grafts.composition import composition_of, read_composition
from tests.decoders import tiny_decoder

QWEN = "models.qwen3_moe.modeling_qwen3_moe.Qwen3Moe"
ANATOMY: dict[str, Any] = {
    "autos": ["AutoModelForCausalLM"],
    "config": "models.qwen3_moe.configuration_qwen3_moe.Qwen3MoeConfig",
    "text_config": "models.qwen3_moe.configuration_qwen3_moe.Qwen3MoeConfig",
    "path": [],
    "head": f"{QWEN}ForCausalLM",
    "model": f"{QWEN}Model",
    "text": f"{QWEN}Model",
    "stack": "layers",
    "output": "modeling_outputs.MoeCausalLMOutputWithPast",
    "activation": "hidden_act",
    "layers": [f"{QWEN}DecoderLayer"],
    "sites": [
        {"block": "self_attn", "native": f"{QWEN}Attention", "role": "self_attn"},
        {"block": "mlp", "native": f"{QWEN}SparseMoeBlock", "role": "mlp"},
    ],
    "trunk": {},
}


def test_it_reads_what_it_writes() -> None:
    found = read_composition("qwen3_moe", ANATOMY)
    assert found.to_json() | {"trunk": {}} == ANATOMY
    assert found.auto_map == {
        "AutoConfig": "modeling_surgeon.UpcycledQwen3MoeConfig",
        "AutoModel": "modeling_surgeon.UpcycledQwen3MoeModel",
        "AutoModelForCausalLM": "modeling_surgeon.UpcycledQwen3MoeForCausalLM",
    }
    assert found.class_of("AutoModelForImageTextToText") is None


def test_the_code_follows_from_the_config_and_imports_torch_and_transformers_alone() -> None:
    surgery = {"trunk_layers": 2, "adapters": [{"layer": 0, "size": 8}]}
    config = {"model_type": "upcycled_qwen3_moe", "anatomy": ANATOMY, "surgery": surgery}
    code = bundle(config)
    assert code == bundle(json.loads(json.dumps(config)))
    imported = {
        node.module.partition(".")[0]
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.ImportFrom) and node.module is not None
    }
    assert imported <= {
        "__future__",
        "collections",
        "contextlib",
        "dataclasses",
        "functools",
        "itertools",
        "torch",
        "transformers",
        "typing",
    }


@pytest.mark.parametrize(
    "change",
    [
        {"head": "os.system"},
        {"head": f"{QWEN}ForCausalLM\nimport os"},
        {"layers": [f"{QWEN}DecoderLayer", "models.llama.modeling_llama.Qwen3MoeDecoderLayer"]},
        {"layers": [], "stack": 'layers"; import os'},
        {"path": ["text_config", "'"]},
        {"activation": "hidden act"},
        {"autos": []},
        {"autos": ["AutoModelForVision2Seq"]},
        {"sites": [{"block": "mlp", "native": f"{QWEN}MLP", "role": "norm"}]},
        {"sites": [{"block": "mlp", "native": f"{QWEN}MLP"}]},
        {"sites": "mlp"},
        {"output": None},
        {"more": "words"},
    ],
)
def test_names_alone_are_taken(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"config\.anatomy"):
        read_composition("qwen3_moe", ANATOMY | change)
    assert composition_of({"model_type": "upcycled_qwen3_moe", "anatomy": ANATOMY | change}) is None


def test_a_model_type_is_a_name_too() -> None:
    for model_type in ('qwen3_moe"\nimport os\n"', "", "qwen3 moe"):
        assert composition_of({"model_type": f"upcycled_{model_type}", "anatomy": ANATOMY}) is None


def test_fields_that_read_otherwise_are_kept_and_put_back() -> None:
    trunk = {"num_hidden_layers": 4, "text_config": {"layer_types": ["a"], "same": 1}, "gone": None}
    grafted = {"num_hidden_layers": 6, "text_config": {"layer_types": ["a", "a"], "same": 1, "made": 2}}
    assert changed_fields(trunk, grafted) == {
        "num_hidden_layers": [4],
        "text_config/layer_types": [["a"]],
        "text_config/made": [],
        "gone": [None],
    }


def test_a_block_that_reads_tokens_along_another_axis_has_no_place_for_grafts(tmp_path: Path) -> None:
    """XLNet's: nothing shows there what goes from one token to the next."""
    base = tiny_decoder(tmp_path / "base", "xlnet", layers=2)
    plan = surgeon.parse_plan("surgeon: 1\noperations:\n  - {op: gated_adapters, size: 8}\n")
    with pytest.raises(BadInput, match="has no FFN beside which a graft could stand"):
        surgeon.preview(plan, str(base))


def test_a_strangers_anatomy_is_refused(tmp_path: Path) -> None:
    """Code that does not follow from the config is a stranger's; a trunk that cannot be read is named."""
    base = tiny_decoder(tmp_path / "base", "olmoe")
    plan = surgeon.parse_plan("surgeon: 1\noperations:\n  - {op: control_llm, layers: [1]}\n")
    shown = surgeon.preview(plan, str(base))
    assert native_config(shown.blueprint.config) == json.loads((base / "config.json").read_text())
    (tmp_path / "plan.yaml").write_text("surgeon: 1\noperations:\n  - {op: control_llm, layers: [1]}\n")
    surgeon.apply(tmp_path / "plan.yaml", str(base), tmp_path / "out")
    file = tmp_path / "out/config.json"
    told = json.loads(file.read_text())
    assert (tmp_path / "out" / CODE_FILE).read_bytes() == bundle(told)
    for change, words in (
        ({"layers": [f"{QWEN}DecoderLayer"]}, "is not what this version of surgeon ships"),
        ({"head": "os.system"}, "auto_map"),
        ({"trunk": {"model_type": ["llama"]}}, "`anatomy` says of `model_type` what cannot be read"),
        ({"trunk": {"a/b": [1]}}, "`anatomy` says of `a/b` what cannot be read"),
        ({"trunk": None}, "`anatomy` cannot be read"),
    ):
        file.write_text(json.dumps(told | {"anatomy": told["anatomy"] | change}))
        with pytest.raises(BadInput, match=words):
            surgeon.preview(plan, str(tmp_path / "out"))
