"""A GGUF file as a base: its checkpoint is what transformers' loader makes, and what is no whole model is refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import surgeon
from surgeon.common.listener import Quiet
from surgeon.errors import BadInput
from surgeon.models import gguf_file

gguf = pytest.importorskip("gguf")

WIDTH, LAYERS, HEADS, FFN = 64, 2, 4, 96
BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]


def byte_tokens() -> list[str]:
    """Two special tokens, GPT-2's letters for the 256 bytes, and two merged ones."""
    letters = [chr(each) for each in BYTES]
    letters += [chr(256 + number) for number in range(256 - len(BYTES))]
    return ["<|im_start|>", "<|im_end|>", *letters, "ab", "cd"]


def write_gguf(path: Path, *, pre: str = "smollm", architecture: str = "llama", without: str = "") -> Path:
    """Write a small llama with random weights, its matrices in Q8_0."""
    draw, tokens = np.random.default_rng(0), byte_tokens()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_license("mit")
    writer.add_languages(["fr", "en"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, *([1] * 258)])
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    shapes = {"token_embd": (len(tokens), WIDTH), "output_norm": (WIDTH,), "output": (len(tokens), WIDTH)}
    for layer in range(LAYERS):
        of_layer = {"attn_q": WIDTH, "attn_k": WIDTH // 2, "attn_v": WIDTH // 2, "attn_output": WIDTH}
        shapes |= {f"blk.{layer}.{name}": (rows, WIDTH) for name, rows in of_layer.items()}
        shapes |= {f"blk.{layer}.ffn_gate": (FFN, WIDTH), f"blk.{layer}.ffn_up": (FFN, WIDTH)}
        shapes |= {f"blk.{layer}.ffn_down": (WIDTH, FFN)}
        shapes |= {f"blk.{layer}.attn_norm": (WIDTH,), f"blk.{layer}.ffn_norm": (WIDTH,)}
    for name, shape in shapes.items():
        values = (draw.standard_normal(shape) * 0.05).astype(np.float32)
        if name == without:
            continue
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", values + 1)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            packed = gguf.quants.quantize(values, kind)
            writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SURGEON_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf")


def test_the_base_is_what_transformers_loads(model: Path, tmp_path: Path) -> None:
    base = surgeon.apply("dequantise", model, tmp_path / "base")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=model.name, dtype=torch.bfloat16)
    found = AutoModelForCausalLM.from_pretrained(base.path)
    assert found.dtype == torch.bfloat16 and found.state_dict().keys() == expected.state_dict().keys()
    assert all(torch.equal(found.state_dict()[name], each) for name, each in expected.state_dict().items())
    tokens = AutoTokenizer.from_pretrained(base.path)("abcd 12 é").input_ids
    assert tokens == AutoTokenizer.from_pretrained(tmp_path, gguf_file=model.name)("abcd 12 é").input_ids
    facts = json.loads((base.path / "surgery.json").read_text())["facts"]["0"]
    assert facts["file"] == "tiny.gguf" and facts["sha256"] == hashlib.sha256(model.read_bytes()).hexdigest()
    assert sum(facts["types"].values()) == 3 + 9 * LAYERS
    assert surgeon.verify(model, base.path).holds
    with pytest.raises(BadInput, match=r"\(dequantise\) began with a GGUF file.*take the base .* \(tiny\.gguf\)"):
        surgeon.revert(base.path, tmp_path / "back")
    card = (base.path / "README.md").read_text()
    assert "license: mit\n" in card and "language:\n- fr\n- en\n" in card


def test_any_plan_takes_the_file(model: Path, tmp_path: Path) -> None:
    lines: list[str] = []

    class Listener(Quiet):
        def say(self, line: str) -> None:
            lines.append(line)

    surgeon.apply("dequantise", model, tmp_path / "base", listener=Listener())
    assert sum("transformers reads" in line for line in lines) == 1
    assert sum("pre-tokenizer is smollm" in line for line in lines) == 1
    lines.clear()
    grown = surgeon.apply(
        "llama-pro", model, tmp_path / "out", listener=Listener(), overrides=["operations.0.where.every=1"]
    )
    assert not any("transformers reads" in line for line in lines), "it is kept"
    assert surgeon.verify(model, grown.path).holds
    assert json.loads((grown.path / "gguf.json").read_text())["file"] == "tiny.gguf"
    # Of an output of `dequantise`, the state before a later surgery is here; of the file itself, what the loader made.
    deeper = surgeon.apply(
        "llama-pro", tmp_path / "base", tmp_path / "deeper", overrides=["operations.0.where.every=1"]
    )
    surgeon.revert(deeper.path, tmp_path / "back", base=tmp_path / "base")
    surgeon.revert(grown.path, tmp_path / "loaded")
    with pytest.raises(BadInput, match="began with a GGUF file"):
        surgeon.revert(deeper.path, tmp_path / "first", to=0)
    with pytest.raises(BadInput, match="nothing is quantised here"):
        surgeon.apply("dequantise", tmp_path / "base", tmp_path / "again")


def test_a_plain_splitter_is_not_said_to_change(tmp_path: Path) -> None:
    folder = gguf_file.checkpoint_of(write_gguf(tmp_path / "plain.gguf", pre="gpt-2"), say=lambda line: None)
    assert json.loads((folder / "gguf.json").read_text())["notes"] == []
    # Another file of the same name is another checkpoint.
    other = gguf_file.checkpoint_of(write_gguf(tmp_path / "plain.gguf"), say=lambda line: None)
    assert other != folder and other.name == folder.name == "plain.gguf"


def test_what_is_no_whole_model_is_refused(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(file: Path, words: str) -> None:
        with pytest.raises(BadInput, match=words) as error:
            surgeon.apply("dequantise", file, tmp_path / "out")
        assert str(error.value).startswith(str(file)) and "\n" not in str(error.value)
        assert not (tmp_path / "out").exists() and not list((tmp_path / "cache").glob("gguf/.*"))

    content = model.read_bytes()
    cut, text = tmp_path / "cut.gguf", tmp_path / "text.gguf"
    text.write_text("version https://git-lfs.github.com/spec/v1\n")
    refused(text, "does not begin as a GGUF file")
    for share in (0.9, 0.3, 0.01):
        cut.write_bytes(content[: int(len(content) * share)])
        refused(cut, "cut or damaged")
    refused(write_gguf(tmp_path / "hole.gguf", without="blk.1.ffn_up"), "has no model.layers.1.mlp.up_proj.weight")
    refused(write_gguf(tmp_path / "other.gguf", architecture="nonesuch"), "transformers does not load it")
    monkeypatch.setenv("SURGEON_CACHE", "off")
    refused(model, "SURGEON_CACHE=off")
    monkeypatch.setattr(gguf_file, "find_spec", lambda name: None)
    refused(model, "needs gguf, which is not installed")


def test_a_foreign_record_is_refused(model: Path, tmp_path: Path) -> None:
    folder = gguf_file.checkpoint_of(model, say=lambda line: None)
    (folder / "gguf.json").write_text('{"file": 3}')
    with pytest.raises(BadInput, match=r"gguf\.json: not as surgeon writes it"):
        surgeon.apply("dequantise", model, tmp_path / "base")
