"""`extract_text`: towers for text as causal models, by plain transformers on both sides, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import surgeon
from surgeon.anatomy.skeleton import CAUSAL, IMAGE_TEXT
from surgeon.errors import BadInput
from tests import tiny
from tests.checkpoints import add_letters, edit_config, same_bytes, weights, write_plan
from tests.decoders import tiny_decoder
from tests.edits.test_grow_vocabulary import assert_same, logits_of

EXTRACT = {"op": "extract_text"}
IDS = torch.randint(4, 38, (2, 12), generator=torch.Generator().manual_seed(0))
# What the tower is, and what the names of its tensors begin with before and after.
TOWERS = {
    "gemma3": ("gemma3_text", {"language_model.model.": "model."}),
    "llava": ("llama", {"language_model.model.": "model.", "language_model.lm_head.": "lm_head."}),
    "qwen3_vl": ("qwen3", {"model.language_model.": "model.", "lm_head.": "lm_head."}),
    "qwen3_5": ("qwen3_5_text", {"model.language_model.": "model.", "lm_head.": "lm_head.", "mtp.": "mtp."}),
}


def base_of(folder: Path, model_type: str, **changes: Any) -> Path:
    base = add_letters(tiny_decoder(folder / "base", model_type, IMAGE_TEXT, dtype="bfloat16", **changes))
    (base / "preprocessor_config.json").write_text("{}")
    (base / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    return base


def apply(folder: Path, base: Path, out: str, *operations: dict[str, Any]) -> Any:
    return surgeon.apply(write_plan(folder / f"{out}.yaml", [*operations]), base, folder / out, device="cpu")


def moved(held: dict[str, torch.Tensor], begins: dict[str, str]) -> dict[str, torch.Tensor]:
    found = {}
    for name, value in held.items():
        for before, after in begins.items():
            if name.startswith(before):
                found[after + name.removeprefix(before)] = value
    return found


@pytest.mark.parametrize("model_type", TOWERS)
def test_the_tower_is_a_causal_model_with_the_same_logits(model_type: str, tmp_path: Path) -> None:
    text_type, begins = TOWERS[model_type]
    base = base_of(tmp_path, model_type)
    if "mtp." in begins:
        first = min(base.glob("*.safetensors"))
        save_file(load_file(first) | {"mtp.fc.weight": torch.randn(4, 4)}, first, metadata={"format": "pt"})
        index = json.loads((base / "model.safetensors.index.json").read_text())
        index["weight_map"]["mtp.fc.weight"] = first.name
        (base / "model.safetensors.index.json").write_text(json.dumps(index))
    applied = apply(tmp_path, base, "out", EXTRACT)
    out = applied.path
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == text_type and "vision_config" not in config
    assert "mrope_section" not in json.dumps(config)
    assert same_bytes(weights(out), moved(weights(base), begins))
    assert applied.left_behind == ("preprocessor_config.json",)
    carried = {"chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert carried <= {file.name for file in out.iterdir()} and not (out / "preprocessor_config.json").exists()
    for dtype in ("float32", "bfloat16"):
        assert torch.equal(logits_of(base, IDS, dtype, IMAGE_TEXT), logits_of(out, IDS, dtype, CAUSAL)), dtype
    proof = surgeon.verify(base, out, device="cpu", windows=1, window=16)
    assert proof.holds and proof.identical and {c.mode for c in proof.comparisons} == {"prefill", "cached decode"}


def test_a_delta_brings_it_and_surgeries_go_on(tmp_path: Path) -> None:
    base = base_of(tmp_path, "llava")
    out = apply(tmp_path, base, "out", EXTRACT).path
    assert surgeon.verify(base, out, streamed=True, windows=1, window=16).holds
    made = surgeon.make_delta(out, tmp_path / "delta")
    assert made.tensors == 0
    surgeon.apply_delta(tmp_path / "delta", str(base), tmp_path / "again")
    assert_same(out, tmp_path / "again")
    layers = {"op": "insert_layers", "where": {"after": [1]}, "init": {"kind": "copy"}}
    deeper = apply(tmp_path, out, "deeper", layers).path
    assert surgeon.verify(out, deeper, device="cpu", windows=1, window=16).holds
    surgeon.revert(deeper, tmp_path / "back")
    assert_same(out, tmp_path / "back")
    for number, of in ((None, out), (0, deeper)):
        with pytest.raises(BadInput, match=r"multi_modal_projector.* left behind by surgery 1 \(extract_text\)"):
            surgeon.revert(of, tmp_path / "first", to=number)
    # A tensor of another tower that is added, and one byte of a tensor that moved, are found.
    held = load_file(out / "model.safetensors")
    held["model.norm.weight"][0] += 1
    save_file(held, out / "model.safetensors", metadata={"format": "pt"})
    assert "base tensors" in {c.name for c in surgeon.verify(base, out, logits=False).checks if not c.holds}


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("mllama", r"cross_attn .*attend to images inside the text tower"),
        ("paligemma", r"gemma has its tensors, and on a twin gives other logits"),
        ("qwen3_vl_moe", r"qwen3_moe has its tensors, and on a twin gives other logits"),
    ],
)
def test_towers_that_no_causal_class_holds(model_type: str, reason: str, tmp_path: Path) -> None:
    """PaliGemma's has the tensors of a Gemma, and reads a prompt in both directions: the twin's logits decide."""
    with pytest.raises(BadInput, match=reason) as told:
        surgeon.preview(write_plan(tmp_path / "plan.yaml", [EXTRACT]), base_of(tmp_path, model_type))
    assert "\n" not in str(told.value)


def test_what_else_is_refused(tmp_path: Path) -> None:
    base, plan = base_of(tmp_path, "llava"), write_plan(tmp_path / "plan.yaml", [EXTRACT])
    with pytest.raises(BadInput, match=r"a text model \(llama\) already"):
        surgeon.preview(plan, tiny.checkpoint(tmp_path / "llama", "llama"))
    layers = {"op": "insert_layers", "where": {"after": [1]}, "init": {"kind": "copy"}}
    for operations, reason in (([layers, EXTRACT], "by a plan of its own"), ([EXTRACT, layers], "of other tensors")):
        with pytest.raises(BadInput, match=reason):
            surgeon.preview(write_plan(tmp_path / "two.yaml", operations), base)
    transformers.AutoModel.from_pretrained(base).save_pretrained(tmp_path / "headless")
    with pytest.raises(BadInput, match=r"lm_head\.weight: no shard has this tensor, and the text model needs it"):
        surgeon.preview(plan, tmp_path / "headless")
    edit_config(base, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    with pytest.raises(BadInput, match="`quantization_config` is left over"):
        surgeon.preview(plan, base)
