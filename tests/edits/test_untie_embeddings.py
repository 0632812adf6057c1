"""`untie_embeddings`: a head of its own with the embeddings' bytes, compared by plain transformers and taken back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear

import surgeon
from surgeon.anatomy.skeleton import CAUSAL, IMAGE_TEXT
from surgeon.blueprint.draft import Draft
from surgeon.blueprint.recipes import Constant, Recipe
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.errors import BadInput
from surgeon.manifest.reading import manifest_of
from surgeon.manifest.within import base_within
from tests import tiny, vocabularies
from tests.checkpoints import add_letters, edit_config, same_bytes, weights, write_plan
from tests.decoders import tiny_decoder
from tests.edits.test_grow_vocabulary import assert_same, logits_of, plan_of, train
from tests.quantised import tiny_quantised

UNTIE = {"op": "untie_embeddings"}
IDS = torch.randint(4, 38, (2, 12), generator=torch.Generator().manual_seed(0))
# Model types whose embeddings are tied, and what the head and the embeddings are called on disk.
LAYOUTS = {
    "gemma3": (IMAGE_TEXT, "language_model.lm_head.weight", "language_model.model.embed_tokens.weight"),
    "qwen3_5": (IMAGE_TEXT, "lm_head.weight", "model.language_model.embed_tokens.weight"),
    "gpt_oss": (CAUSAL, "lm_head.weight", "model.embed_tokens.weight"),
}


def tied(folder: Path, family: str = "qwen3") -> Path:
    settings = {"vocab_size": 320, "num_hidden_layers": 2, "tie_word_embeddings": True}
    return vocabularies.byte_level(tiny.checkpoint(folder / "base", family, **settings))


def apply(folder: Path, base: Path, out: str, *operations: dict[str, Any]) -> Path:
    return surgeon.apply(write_plan(folder / f"{out}.yaml", [*operations]), base, folder / out, device="cpu").path


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


@pytest.mark.parametrize("model_type", LAYOUTS)
def test_the_head_is_a_copy_under_the_name_that_the_layout_has(model_type: str, tmp_path: Path) -> None:
    auto, head, embedding = LAYOUTS[model_type]
    base = add_letters(tiny_decoder(tmp_path / "base", model_type, auto, dtype="bfloat16", tie_word_embeddings=True))
    if auto == IMAGE_TEXT:
        edit_config(base, tie_word_embeddings=True)
    out = apply(tmp_path, base, "out", UNTIE)
    held = weights(base)
    assert same_bytes(weights(out), held | {head: held[embedding]})
    parts = [config_of(out), config_of(out).get("text_config", {"tie_word_embeddings": False})]
    assert [part["tie_word_embeddings"] for part in parts] == [False, False]
    for dtype in ("float32", "bfloat16"):
        assert torch.equal(logits_of(base, IDS, dtype, auto), logits_of(out, IDS, dtype, auto)), dtype
    proof = surgeon.verify(base, out, device="cpu", windows=1, window=16)
    assert proof.holds and proof.identical and {c.mode for c in proof.comparisons} >= {"prefill", "cached decode"}
    surgeon.revert(out, tmp_path / "back")
    assert_same(base, tmp_path / "back")


def test_the_head_alone_trains_and_embeddings_stay(tmp_path: Path) -> None:
    base = tied(tmp_path)
    plan_of(tmp_path)
    out = apply(
        tmp_path, base, "out", UNTIE, {"op": "insert_layers", "where": {"after": [0]}, "init": {"kind": "copy"}}
    )
    assert surgeon.verify(base, out, streamed=True, windows=1, window=16).holds
    alone = apply(tmp_path, base, "alone", UNTIE)
    train(tmp_path, "alone", weight_decay=0.1)
    before, after = weights(alone), weights(tmp_path / "alone-run")
    assert [name for name in before if not torch.equal(before[name], after[name])] == ["lm_head.weight"]
    assert surgeon.verify(base, tmp_path / "alone-run", device="cpu", windows=1, window=16).holds
    folders = [CheckpointFolder.open(folder) for folder in (alone, tmp_path / "alone-run")]
    for training, apart in (((), False), (("lm_head.weight",), True)):
        assert base_within(folders[0], manifest_of(folders[0]), training=training).apart is apart
    with pytest.raises(BadInput, match=r"lm_head\.weight: trained since it was untied"):
        base_within(folders[1], manifest_of(folders[1]))
    surgeon.revert(tmp_path / "alone-run", tmp_path / "back")
    assert_same(base, tmp_path / "back")
    surgeon.make_delta(alone, tmp_path / "delta")
    surgeon.apply_delta(tmp_path / "delta", str(base), tmp_path / "again")
    assert_same(alone, tmp_path / "again")


@pytest.mark.parametrize("other", [0.0, 1.0])
def test_a_head_that_is_stored_stays_as_it_is(other: float, tmp_path: Path) -> None:
    """transformers uses it where it differs, so what it computes is what the base computes."""
    base = tied(tmp_path)
    held = weights(base)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, tie_word_embeddings=False)
    model.lm_head.weight.data = held["model.embed_tokens.weight"] + other
    for file in base.glob("model*"):
        file.unlink()
    model.save_pretrained(base)
    edit_config(base, tie_word_embeddings=True)
    out = apply(tmp_path, base, "out", UNTIE)
    assert same_bytes(weights(out), weights(base)) and len(weights(base)) == len(held) + 1
    assert torch.equal(logits_of(base, IDS, "float32"), logits_of(out, IDS, "float32"))


def test_a_base_with_grafts_and_a_quantised_one(tmp_path: Path) -> None:
    base = tied(tmp_path)
    grafted = apply(tmp_path, base, "grafted", {"op": "gated_adapters", "layers": [0], "size": 4})
    assert surgeon.verify(grafted, apply(tmp_path, grafted, "both", UNTIE), device="cpu", windows=1, window=16).holds
    quantised = tiny_quantised(tmp_path / "fp8", "qwen3", "fp8", skipped=["q_proj"], tie_word_embeddings=True)
    out = apply(tmp_path, quantised, "untied", UNTIE)
    assert config_of(out)["quantization_config"]["modules_to_not_convert"] == ["q_proj", "lm_head"]
    assert surgeon.verify(quantised, out, logits=False).holds


VOCABULARIES = (
    {"op": "trim_vocabulary", "tokens": ["abc", "the"], "pad_to_multiple_of": 8},
    {"op": "grow_vocabulary", "tokens": ["qqq", "xyxy"], "input_init": "mean"},
    {"op": "pad_to", "vocabulary": 192},
)


def fewer_rows_compute_the_same(matrix: torch.Tensor, rows: int) -> bool:
    """Whether one-row products of this processor's library do not depend on how many rows a matrix has.

    With AVX512-BF16 about one in five hundred differs by a unit in the last place.
    """
    draws = torch.Generator().manual_seed(0)
    kept = torch.randperm(len(matrix), generator=draws)[:rows].sort().values
    fewer = matrix[kept].clone()
    drawn = torch.randn(4096, 1, matrix.shape[1], generator=draws).to(matrix.dtype)
    return all(torch.equal(linear(each, matrix)[:, kept], linear(each, fewer)) for each in drawn)


@pytest.mark.parametrize(
    ("model_type", "rows"), [*zip(LAYOUTS, VOCABULARIES, strict=True), ("gpt_oss", VOCABULARIES[0])]
)
def test_rows_change_in_the_same_plan_before_or_after(model_type: str, rows: dict[str, Any], tmp_path: Path) -> None:
    """Either order gives the same tensors: those that the rows' operation alone gives, and a head with the same."""
    auto, head, embedding = LAYOUTS[model_type]
    base = add_letters(tiny_decoder(tmp_path / "base", model_type, auto, dtype="bfloat16", tie_word_embeddings=True))
    if auto == IMAGE_TEXT:
        edit_config(base, tie_word_embeddings=True)
    alone = weights(apply(tmp_path, base, "alone", rows))
    outs = [apply(tmp_path, base, "before", UNTIE, rows), apply(tmp_path, base, "after", rows, UNTIE)]
    for out in outs:
        assert same_bytes(weights(out), alone | {head: alone[embedding]})
        part = config_of(out).get("text_config", config_of(out))
        assert (part["tie_word_embeddings"], part["vocab_size"]) == (False, len(alone[embedding]))
    proof = surgeon.verify(base, outs[1], device="cpu", windows=1, window=16)
    assert {c.mode for c in proof.comparisons} >= {"prefill", "cached decode"}
    if fewer_rows_compute_the_same(weights(base)[embedding], len(alone[embedding])):
        assert proof.holds and proof.identical
    assert all(c.rounded for c in proof.comparisons)
    if rows["op"] == "trim_vocabulary":
        with pytest.raises(BadInput, match="take the base of that surgery itself"):
            surgeon.revert(outs[1], tmp_path / "back")
    else:
        surgeon.revert(outs[1], tmp_path / "back")
        assert_same(base, tmp_path / "back")
    edited = shutil.copytree(outs[0], tmp_path / "edited")
    edit_tensor_of(edited, head)
    assert not surgeon.verify(base, edited, device="cpu", windows=1, window=16).holds


def edit_tensor_of(folder: Path, name: str) -> None:
    """Turn the rows of a tensor around."""
    file = next(file for file in folder.glob("*.safetensors") if name in load_file(file))
    held = load_file(file)
    save_file(held | {name: held[name].flip(0)}, file, metadata={"format": "pt"})


def test_what_cannot_be_untied_is_refused(tmp_path: Path) -> None:
    base = tied(tmp_path)
    with pytest.raises(BadInput, match="once is enough"):
        surgeon.preview(write_plan(tmp_path / "plan.yaml", [UNTIE, UNTIE]), base)
    plan = write_plan(tmp_path / "plan.yaml", [UNTIE])
    untied = tiny.checkpoint(tmp_path / "llama", "llama")
    with pytest.raises(BadInput, match="untied already"):
        surgeon.preview(plan, untied)
    pieces = {"op": "grow_vocabulary", "tokens": ["qqq"]}
    with pytest.raises(BadInput, match="write grow_vocabulary first, say `input_init: mean`"):
        surgeon.preview(write_plan(tmp_path / "pieces.yaml", [UNTIE, pieces]), add_letters(tied(tmp_path / "letters")))
    labels = tmp_path / "labels"
    transformers.AutoModelForSequenceClassification.from_pretrained(base).save_pretrained(labels)
    with pytest.raises(BadInput, match="is no LM head"):
        surgeon.preview(plan, labels)
    shutil.rmtree(labels)


def test_another_head_is_found_on_the_twin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Draft.set_outer

    def empty(draft: Draft, name: str, recipe: Recipe) -> None:
        made(draft, name, Constant(0.0, recipe.dtype, recipe.shape))

    monkeypatch.setenv("SURGEON_CACHE", "off")
    monkeypatch.setattr(Draft, "set_outer", empty)
    with pytest.raises(BadInput, match=r"logits .* are not the base's"):
        apply(tmp_path, tied(tmp_path), "out", UNTIE)
    image = tiny_decoder(tmp_path / "qwen3_5", "qwen3_5", IMAGE_TEXT, dtype="bfloat16", tie_word_embeddings=True)
    edit_config(image, tie_word_embeddings=True)
    with pytest.raises(BadInput, match=r"logits .* are not the base's"):
        apply(tmp_path, image, "image", UNTIE)
