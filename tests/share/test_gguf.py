"""`surgeon gguf`: the base's pre-tokenizer, each layer's window, what is refused at once, and nothing half-written.

A short stand-in has the interface of llama.cpp's converter. The converter itself runs where SURGEON_LLAMA_CPP names a
checkout of llama.cpp (with `sentencepiece`, which it needs).
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import surgeon
from surgeon.cli import app
from surgeon.errors import BadInput
from surgeon.models.load import load_gguf
from tests import tiny
from tests.test_api import check_json
from tests.vocabularies import ENGLISH, byte_level, sentencepiece_like, write_text

TEXT = "the cat sat on the mat"
STAND_IN = """
import argparse, hashlib, json, os
from pathlib import Path
from types import SimpleNamespace


class gguf:
    class GGUFWriter:
        def __init__(self, path, arch):
            self.path, self.arch, self.kv_data, self.tensors = Path(path), arch, [{}], [{}]

        def add(self, name, value):
            self.kv_data[0][name] = SimpleNamespace(value=value)

        def add_sliding_window_pattern(self, value):
            self.add(f"{self.arch}.attention.sliding_window_pattern", value)

        def write_header_to_file(self, path=None):
            self.path.write_text(json.dumps({name: each.value for name, each in self.kv_data[0].items()}))


class ModelBase:
    @classmethod
    def register(cls, *names):
        return lambda kind: kind


class TextModel(ModelBase):
    def get_vocab_base_pre(self, tokenizer):
        ids = tokenizer.encode("TEXT")
        ids = ids if isinstance(ids, list) else ids.ids
        if hashlib.sha256(str(ids).encode()).hexdigest() == "DIGEST":
            return "known"
        raise NotImplementedError("BPE pre-tokenizer was not recognized")


@ModelBase.register(
    "LlamaForCausalLM",  # and what is called so (by others)
    "Gemma3ForCausalLM",
)
class Model(TextModel):
    pass


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    for name in ("outfile", "outtype", "model-name"):
        parser.add_argument(f"--{name}")
    given = parser.parse_args()
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(given.out / "tokenizer.json"))
    config = json.loads((given.out / "config.json").read_text())
    writer = gguf.GGUFWriter(given.outfile, config["model_type"])
    rows = int(os.environ.get("ROWS", 64))
    kind = "F16" if given.outtype == "q8_0" and rows % 32 else given.outtype.upper()
    writer.tensors[0]["blk.0.ffn_down.weight"] = SimpleNamespace(shape=(32, rows), dtype=SimpleNamespace(name=kind))
    writer.add("general.name", given.model_name)
    writer.add("tokenizer.ggml.model", os.environ.get("KIND", "gpt2"))
    writer.add("tokenizer.ggml.pre", Model().get_vocab_base_pre(tokenizer))
    ids = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    writer.add("tokenizer.ggml.tokens", [token for token, _ in ids][: int(os.environ.get("TOKENS", 10**6))])
    if config.get("sliding_window"):
        writer.add(f"{writer.arch}.attention.sliding_window", config["sliding_window"])
    writer.write_header_to_file()
    if os.environ.get("FAILS"):
        raise RuntimeError("half of it is written")
"""


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base with a tokenizer, its outputs, and a stand-in converter that knows the base's tokenizer alone."""
    from transformers import AutoTokenizer

    room = tmp_path_factory.mktemp("grown")
    base = byte_level(tiny.checkpoint(room / "base", "llama", vocab_size=320), size=320)
    byte_level(tiny.checkpoint(room / "stranger", "llama", vocab_size=320), size=310)
    kept = write_text(room / "kept.jsonl", ENGLISH[1:2])
    surgeon.apply(plan(f"trim_vocabulary, text: {kept}, pad_to_multiple_of: 32"), base, room / "trimmed")
    surgeon.apply("neutral-residues", base, room / "grafted")
    surgeon.apply(
        "untie-embeddings", byte_level(tiny.checkpoint(room / "tied", "qwen3", vocab_size=320)), room / "qwen3"
    )
    windows = tiny.checkpoint(room / "windows", "gemma3_text", vocab_size=320, num_hidden_layers=12)
    surgeon.apply("llama-pro", byte_level(windows, size=320), room / "deeper")
    ids = AutoTokenizer.from_pretrained(base).encode(TEXT)
    digest = hashlib.sha256(str(ids).encode()).hexdigest()
    (room / "convert_hf_to_gguf.py").write_text(STAND_IN.replace("DIGEST", digest).replace("TEXT", TEXT))
    return room


def plan(operation: str) -> Any:
    """A plan of one operation."""
    return surgeon.parse_plan(f"surgeon: 1\noperations: [{{op: {operation}}}]")


def written(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_a_trimmed_vocabulary_has_its_bases_pre_tokenizer(grown: Path, tmp_path: Path) -> None:
    """The converter is named by a file here, and by its folder below."""
    file = tmp_path / "mine-q8_0.gguf"
    script = grown / "convert_hf_to_gguf.py"
    made = surgeon.write_gguf(grown / "trimmed", file, converter=script, base=grown / "base", type="q8_0")
    found = written(file)
    assert found["tokenizer.ggml.pre"] == made.pre == "known"
    assert found["general.name"] == made.name == "mine"
    config = json.loads((grown / "trimmed" / "config.json").read_text())
    assert len(found["tokenizer.ggml.tokens"]) == config["vocab_size"] < 320
    assert made.nbytes == file.stat().st_size and made.architecture == "llama" and made.tensors == 1
    assert [path.name for path in tmp_path.iterdir()] == ["mine-q8_0.gguf"]
    assert repr(made) == f"WrittenGguf({str(file)!r}, llama, q8_0, 1 tensors)"
    check_json(made)


def test_each_layers_window_is_written(grown: Path, tmp_path: Path) -> None:
    ran = CliRunner().invoke(
        app, ["gguf", str(grown / "deeper"), str(tmp_path / "deep.gguf"), "--converter", str(grown)]
    )
    assert ran.exit_code == 0, ran.output
    assert "gemma3_text, 1 tensors, pre-tokenizer known, bf16" in ran.stdout
    types = json.loads((grown / "deeper" / "config.json").read_text())["layer_types"]
    assert len(types) == 18 and types != [*types[:6], *types[:6], *types[:6]]
    wanted = [each == "sliding_attention" for each in types]
    assert written(tmp_path / "deep.gguf")["gemma3_text.attention.sliding_window_pattern"] == wanted


FOUND_BY_IT = [
    ("trimmed", {}, "bf16", r"trimmed: the converter knows no pre-tokenizer by its tokens; give --base base,"),
    ("deeper", {"FAILS": "1"}, "bf16", r"failed \(RuntimeError: half of it is written\)$"),
    ("deeper", {"ROWS": "40"}, "q8_0", r"blk\.0\.ffn_down\.weight has rows of 40, no multiple of 32"),
    ("deeper", {"TOKENS": "9"}, "bf16", r"tokenizer\.json: a vocabulary of SentencePiece"),
]


@pytest.mark.parametrize(("out", "environment", "type", "why"), FOUND_BY_IT, ids=["pre", "fails", "rows", "tokens"])
def test_what_the_converter_finds_leaves_nothing(
    grown: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    out: str,
    environment: dict[str, str],
    type: str,
    why: str,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BadInput, match=why) as refused:
        surgeon.write_gguf(grown / out, tmp_path / "x.gguf", converter=grown, type=type)
    assert "\n" not in str(refused.value)
    assert not [*tmp_path.iterdir()]


REFUSED_AT_ONCE = [
    (["trimmed", "there.gguf"], "there.gguf: already exists"),
    (["trimmed", "no/x.gguf"], "no: no such folder"),
    (["base", "x.gguf"], "no surgery.json"),
    (["grafted", "x.gguf"], "UpcycledLlamaForCausalLM has grafts, which llama.cpp does not know; merge"),
    (["qwen3", "x.gguf"], "Qwen3ForCausalLM is none of the 2 classes of"),
    (["trimmed", "x.gguf", "--type", "Q4_K_M"], "writes bf16, q8_0, f16, f32; llama-quantize makes it of a bf16 file"),
    (["trimmed", "x.gguf", "--type", "fp7"], "writes bf16, q8_0, f16, f32"),
    (["trimmed", "x.gguf", "--converter", "nowhere"], "nowhere: no such file"),
    (["trimmed", "x.gguf", "--converter", "trimmed/tokenizer.json"], "no converter that surgeon knows"),
    (["trimmed", "x.gguf", "--converter", "trimmed/model.safetensors"], "not Python; give llama.cpp's"),
    (["trimmed", "x.gguf", "--base", "stranger"], "has no tokenizer.json of a base of trimmed; give the base"),
]


@pytest.mark.parametrize(("given", "why"), REFUSED_AT_ONCE, ids=[why[:20] for _, why in REFUSED_AT_ONCE])
def test_what_is_refused_at_once(
    grown: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], why: str
) -> None:
    room = tmp_path / "room"
    room.mkdir()
    for path in grown.iterdir():
        (room / path.name).symlink_to(path)
    if "trimmed/model.safetensors" in given:
        given = [*given[:-1], f"trimmed/{next((grown / 'trimmed').glob('*.safetensors')).name}"]
    (room / "there.gguf").write_text("mine")
    before = sorted(room.iterdir())
    monkeypatch.chdir(room)
    monkeypatch.setattr("surgeon.share.gguf.start_python", None)
    ran = CliRunner().invoke(app, ["gguf", *given, *([] if "--converter" in given else ["--converter", "."])])
    assert ran.exit_code == 2 and why in ran.stderr, ran.output
    assert ran.stderr.count("\n") == 1
    assert sorted(room.iterdir()) == before and (room / "there.gguf").read_text() == "mine"


def test_a_refusal_comes_before_torch(grown: Path) -> None:
    code = (
        "import sys, surgeon\ntry:\n"
        f"    surgeon.write_gguf({str(grown / 'qwen3')!r}, {str(grown / 'x.gguf')!r}, converter={str(grown)!r})\n"
        "except surgeon.BadInput:\n    print({'torch', 'transformers'} & sys.modules.keys() or 'none')"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "none"


def test_without_a_converter(grown: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BadInput, match=r"no convert_hf_to_gguf\.py on the PATH; give --converter"):
        surgeon.write_gguf(grown / "trimmed", tmp_path / "x.gguf")


def test_a_tokenizer_that_splits_otherwise_has_no_name(grown: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(grown / "trimmed", tmp_path / "out"))
    edited = json.loads((out / "tokenizer.json").read_text())
    edited["pre_tokenizer"]["add_prefix_space"] = True
    (out / "tokenizer.json").write_text(json.dumps(edited))
    with pytest.raises(BadInput, match=r"tokenizer\.json: splits text otherwise than the base's"):
        surgeon.write_gguf(out, tmp_path / "x.gguf", converter=grown, base=grown / "base")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_depth_by_which_llama_cpp_takes_another_scale(grown: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(grown / "deeper", tmp_path / "out"))
    config = json.loads((out / "config.json").read_text())
    told = {"num_hidden_layers": 62, "layer_types": ["full_attention"] * 62, "hidden_size": 128}
    from surgeon.checkpoint.folder import CheckpointFolder

    folder = CheckpointFolder.open(out)
    folder.config.update(config | told)
    from surgeon.share.gguf import _check_served

    with pytest.raises(BadInput, match=r"scales queries by 1/√32 .*\(`query_pre_attn_scalar`\)"):
        _check_served(folder, grown / "convert_hf_to_gguf.py")


@pytest.fixture(scope="module")
def real(grown: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """llama.cpp's converter, which knows the tiny base's tokenizer under the name that it has for SmolLM's."""
    from transformers import AutoTokenizer

    if (given := os.environ.get("SURGEON_LLAMA_CPP")) is None:
        pytest.skip("SURGEON_LLAMA_CPP names no checkout of llama.cpp")
    room = tmp_path_factory.mktemp("llama.cpp")
    for name in ("convert_hf_to_gguf.py", "gguf-py"):
        (room / name).symlink_to(Path(given) / name)
    shutil.copytree(Path(given) / "conversion", room / "conversion")
    (room / "convert_hf_to_gguf.py").unlink()
    shutil.copy(Path(given) / "convert_hf_to_gguf.py", room)
    file = room / "conversion" / "base.py"
    text = file.read_text(encoding="utf-8")
    line = re.search(r"^ +chktxt = ('.*')$", text, re.M)
    smollm = re.search(r'chkhsh == "(\w{64})":\n[^\n]+\n +res = "smollm"', text)
    assert line is not None and smollm is not None
    ids = AutoTokenizer.from_pretrained(grown / "base").encode(ast.literal_eval(line[1]))
    digest = hashlib.sha256(str(ids).encode()).hexdigest()
    file.write_text(text.replace(smollm[1], digest), encoding="utf-8")
    return room


def test_the_converter_itself(grown: Path, real: Path, tmp_path: Path) -> None:
    """Logits are the output's own to the bit, in bfloat16; windows and a mixture's counts are in the file."""
    from transformers import AutoModelForCausalLM

    gguf = pytest.importorskip("gguf")
    surgeon.apply("upcycle-experts", grown / "base", tmp_path / "experts")
    for name, base in (("trimmed", "base"), ("deeper", None)):
        given = None if base is None else grown / base
        surgeon.write_gguf(grown / name, tmp_path / f"{name}.gguf", converter=real, base=given)
    surgeon.write_gguf(tmp_path / "experts", tmp_path / "experts.gguf", converter=real)
    model, missing, _ = load_gguf(tmp_path / "trimmed.gguf")
    own = AutoModelForCausalLM.from_pretrained(grown / "trimmed", dtype=torch.bfloat16)
    ids = torch.arange(4, 40)[None]
    with torch.no_grad():
        assert not missing and torch.equal(model(ids).logits, own(ids).logits)
    fields = {name: gguf.GGUFReader(tmp_path / f"{name}.gguf").fields for name in ("trimmed", "deeper", "experts")}
    assert fields["trimmed"]["tokenizer.ggml.pre"].contents() == "smollm"
    types = json.loads((grown / "deeper" / "config.json").read_text())["layer_types"]
    pattern = fields["deeper"]["gemma3.attention.sliding_window_pattern"].contents()
    assert np.array_equal(pattern, [each == "sliding_attention" for each in types])
    assert fields["experts"]["glm4moe.expert_count"].contents() == 8


def test_the_converter_refuses_a_changed_sentencepiece(grown: Path, real: Path, tmp_path: Path) -> None:
    """Without tokenizer.model it would write one score for all tokens."""
    base = sentencepiece_like(tiny.checkpoint(tmp_path / "base", "llama", vocab_size=336), size=336)
    kept = write_text(tmp_path / "kept.jsonl", ENGLISH[1:2])
    surgeon.apply(plan(f"trim_vocabulary, text: {kept}, pad_to_multiple_of: 8"), base, tmp_path / "out")
    with pytest.raises(BadInput, match="a vocabulary of SentencePiece"):
        surgeon.write_gguf(tmp_path / "out", tmp_path / "x.gguf", converter=real, base=base)
    assert not (tmp_path / "x.gguf").exists()
