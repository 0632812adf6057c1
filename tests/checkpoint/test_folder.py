"""Checkpoint folders: what is opened, what is carried along, and one clear line for everything refused."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.header import build_header
from surgeon.checkpoint.source import is_side_file
from surgeon.checkpoint.trust import leads_to_code
from surgeon.errors import BadInput
from tests.checkpoint.files import (
    INDEX,
    SHARDS,
    raw_file,
    sharded,
    single,
    tensor_bytes,
    write_config,
    write_index,
    write_shard,
)

FIRST, SECOND = sorted(SHARDS)


def refused(folder: Path) -> str:
    with pytest.raises(BadInput) as caught:
        CheckpointFolder.open(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert "\x1b" not in message
    return message


def test_shards(tmp_path: Path) -> None:
    folder = CheckpointFolder.open(sharded(tmp_path))
    assert folder.shards == (FIRST, SECOND)
    assert list(folder.tensors) == ["a.weight", "b.weight", "c.weight", "d.weight"]
    assert folder.tensors["b.weight"].file == FIRST
    assert folder.config["model_type"] == "llama"
    assert (folder.manifest, folder.notes, folder.side_files, folder.left_behind) == (None, [], (), ())
    for name, info in folder.tensors.items():
        assert bytes(folder.read(name)) == tensor_bytes(name, info.nbytes)
    assert folder.headers[FIRST].tensors[0] == folder.tensors["a.weight"]


@pytest.mark.parametrize("damage", ["shard", "header", "index", "config.json", "generation_config.json", "settings"])
def test_damage_names_the_folder(tmp_path: Path, damage: str) -> None:
    """A command may be given two: the reader cannot tell otherwise in which of them a shard is cut."""
    folder = sharded(tmp_path / "model")
    if damage == "shard":
        os.truncate(folder / FIRST, (folder / FIRST).stat().st_size - 1)
    elif damage == "header":
        (folder / FIRST).write_bytes(raw_file({"a": {}}))
    elif damage == "index":
        write_index(folder, {"a.weight": "../away.safetensors"})
    elif damage == "settings":
        write_config(folder, __class__="x")
    else:
        (folder / damage).write_text("{")
    assert refused(folder).startswith(f"{folder}: ")


def test_a_shard_cut_while_it_is_read_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = CheckpointFolder.open(sharded(tmp_path))
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(BadInput, match=f"^{tmp_path}: {FIRST}: ends within tensor a.weight"):
        folder.read("a.weight")


def test_a_single_file_wins_over_an_index(tmp_path: Path) -> None:
    """As in transformers; what is ignored is told."""
    sharded(tmp_path)
    everything = SHARDS[FIRST] | SHARDS[SECOND]
    write_shard(tmp_path / "model.safetensors", everything)
    folder = CheckpointFolder.open(tmp_path)
    assert folder.shards == ("model.safetensors",)
    assert set(folder.tensors) == set(everything)
    assert "model.safetensors is used" in folder.notes[0]
    assert set(folder.left_behind) == {INDEX, FIRST, SECOND}


def test_unrelated_safetensors_are_ignored_with_a_note(tmp_path: Path) -> None:
    write_shard(sharded(tmp_path) / "adapter_model.safetensors", {"x": ("F32", (1,))})
    folder = CheckpointFolder.open(tmp_path)
    assert "adapter_model.safetensors" in folder.notes[0]
    assert folder.left_behind == ("adapter_model.safetensors",)
    assert "x" not in folder.tensors


def without_weights(folder: Path, *names: str) -> None:
    for path in [*folder.glob("*.safetensors"), folder / INDEX]:
        path.unlink()
    for name in names:
        (folder / name).write_bytes(b"\x80\x02")


def replaced(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def make_socket(path: Path) -> None:
    # Socket names are short: bind where we are.
    here = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def quantised(folder: Path, dtype: str) -> None:
    write_shard(folder / FIRST, SHARDS[FIRST] | {"b.weight": (dtype, (8,))})


def edit_config(folder: Path, key: str, value: object) -> None:
    """Another value of a key, or of one in a part of the config."""
    config = json.loads((folder / "config.json").read_text())
    part, dot, name = key.rpartition(".")
    (config.setdefault(part, {}) if dot else config)[name] = value
    (folder / "config.json").write_text(json.dumps(config))


TOO_DEEP = '{"a":' * 100 + "1" + "}" * 100

REFUSED: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "empty folder": (lambda f: (shutil.rmtree(f), f.mkdir()), ["no config.json and no weights"]),
    "missing folder": (shutil.rmtree, ["no such folder"]),
    "a file": (lambda f: (shutil.rmtree(f), f.write_text("x")), ["not a folder"]),
    "missing config": (lambda f: (f / "config.json").unlink(), ["no config.json"]),
    "config cut": (lambda f: (f / "config.json").write_text('{"a": '), ["config.json", "not closed"]),
    "config no JSON": (lambda f: (f / "config.json").write_text("model: x"), ["config.json", "not valid JSON"]),
    "config a list": (lambda f: (f / "config.json").write_text("[1]"), ["config.json", "a list", "JSON object"]),
    "config too deep": (lambda f: (f / "config.json").write_text(TOO_DEEP), ["config.json", "nested more than"]),
    "config too big": (
        lambda f: (f / "config.json").write_text(json.dumps({"x": "y" * 4_000_000})),
        ["config.json", "at most 4,000,000"],
    ),
    "config with a key twice": (
        lambda f: (f / "config.json").write_text('{"hidden_size": 1, "hidden_size": 2}'),
        ["config.json", "'hidden_size' occurs twice"],
    ),
    "config with a long number": (
        lambda f: (f / "config.json").write_text('{"a": ' + "1" * 5000 + "}"),
        ["config.json", "digits"],
    ),
    "generation_config with infinity": (
        lambda f: (f / "generation_config.json").write_text('{"temperature": 1e999}'),
        ["generation_config.json", "more than a float can hold"],
    ),
    "tokenizer_config with a key twice": (
        lambda f: (f / "tokenizer_config.json").write_text('{"a": 1, "a": 2}'),
        ["tokenizer_config.json", "'a' occurs twice"],
    ),
    "tokenizer cut": (lambda f: (f / "tokenizer.json").write_text('{"model": {'), ["tokenizer.json", "not closed"]),
    "special tokens a list": (
        lambda f: (f / "special_tokens_map.json").write_text("[]"),
        ["special_tokens_map.json", "a list", "JSON object"],
    ),
    "index with NaN": (lambda f: (f / INDEX).write_text('{"weight_map": NaN}'), [INDEX, "NaN is not JSON"]),
    "config a FIFO": (lambda f: replaced(f / "config.json", os.mkfifo), ["config.json", "a FIFO"]),
    "config a directory": (lambda f: replaced(f / "config.json", Path.mkdir), ["config.json", "a directory"]),
    "only .bin": (lambda f: without_weights(f, "pytorch_model-00001-of-00002.bin"), ["pickled", "weights_only"]),
    "only .pt": (lambda f: without_weights(f, "model.pt"), ["pickled", "model.pt", "save the model"]),
    "only .pth": (lambda f: without_weights(f, "consolidated.00.pth"), ["pickled", "save the model"]),
    "only GGUF": (lambda f: without_weights(f, "model-q4.gguf"), ["GGUF", "model-q4.gguf"]),
    "GGUF and nothing else": (
        lambda f: (without_weights(f, "model-q4.gguf"), (f / "config.json").unlink()),
        ["GGUF", "model-q4.gguf"],
    ),
    "no weights": (without_weights, ["no weights", "model.safetensors"]),
    "only an adapter": (
        lambda f: without_weights(f, "adapter_model.safetensors"),
        ["adapter_model", "not the model's"],
    ),
    "shards without an index": (lambda f: (f / INDEX).unlink(), [FIRST, INDEX]),
    "missing shard": (lambda f: (f / SECOND).unlink(), [SECOND, "missing"]),
    "shard a link to nowhere": (
        lambda f: replaced(f / SECOND, lambda p: p.symlink_to("nowhere.safetensors")),
        [SECOND, "no such file"],
    ),
    "extra shard": (
        lambda f: shutil.copy(f / FIRST, f / "model-00003-of-00003.safetensors"),
        ["model-00003-of-00003.safetensors", "does not name it"],
    ),
    "index no object": (lambda f: (f / INDEX).write_text("[]"), [INDEX, "weight_map"]),
    "index without a map": (lambda f: (f / INDEX).write_text("{}"), [INDEX, "weight_map"]),
    "index with an empty map": (lambda f: write_index(f, {}), [INDEX, "weight_map"]),
    "index with a tensor twice": (
        lambda f: (f / INDEX).write_text('{"weight_map": {"a": "x", "a": "x"}}'),
        [INDEX, "'a' occurs twice"],
    ),
    "index a FIFO": (lambda f: replaced(f / INDEX, os.mkfifo), [INDEX, "a FIFO"]),
    "index a directory": (lambda f: replaced(f / INDEX, Path.mkdir), [INDEX, "a directory"]),
    "index too big": (lambda f: os.truncate(f / INDEX, 64_000_001), [INDEX, "64,000,001"]),
    "index lacks a tensor": (
        lambda f: write_index(f, {"a.weight": FIRST, "c.weight": SECOND, "d.weight": SECOND}),
        [FIRST, "b.weight", "does not name"],
    ),
    "index has a tensor too many": (
        lambda f: write_index(f, {n: s for s, t in SHARDS.items() for n in t} | {"e.weight": SECOND}),
        ["e.weight", SECOND, "lacks it"],
    ),
    "index names the other shard": (
        lambda f: write_index(f, {n: s for s, t in SHARDS.items() for n in t} | {"a.weight": SECOND}),
        ["a.weight", FIRST, f"places in {SECOND}"],
    ),
    "integers for weights": (lambda f: quantised(f, "I32"), [FIRST, "b.weight", "I32", "floating-point"]),
    "quantised to 8 bits": (
        lambda f: (quantised(f, "F8_E4M3"), write_config(f, quantization_config={"quant_method": "fp8\x1b"})),
        ["config.json", "the base is quantised (fp8\\x1b)"],
    ),
    "own code in the config": (
        lambda f: write_config(f, model_type="x", auto_map={"AutoModel": "modeling_x.X"}),
        ["auto_map", "--trust-remote-code"],
    ),
    "own code in the folder": (
        lambda f: ((f / "modeling_x.py").write_text(""), write_config(f, model_type="x")),
        ["modeling_x.py", "--trust-remote-code"],
    ),
    "shard a FIFO": (lambda f: replaced(f / FIRST, os.mkfifo), [FIRST, "a FIFO", "regular file"]),
    "shard a directory": (lambda f: replaced(f / FIRST, Path.mkdir), [FIRST, "a directory"]),
    "shard a socket": (lambda f: replaced(f / FIRST, make_socket), [FIRST, "a socket"]),
    "shard a device": (
        lambda f: replaced(f / FIRST, lambda p: p.symlink_to("/dev/zero")),
        [FIRST, "out of the folder"],
    ),
    "shard a link outside": (
        lambda f: (
            (f / FIRST).rename(f.parent / "elsewhere.safetensors"),
            (f / FIRST).symlink_to(f.parent / "elsewhere.safetensors"),
        ),
        [FIRST, "elsewhere.safetensors", "out of the folder"],
    ),
    "shard a link to itself": (
        lambda f: replaced(f / FIRST, lambda p: p.symlink_to(p.name)),
        [FIRST, "a link behind a link"],
    ),
    "config a link outside": (
        lambda f: ((f / "config.json").rename(f.parent / "c"), (f / "config.json").symlink_to("../c")),
        ["config.json", "out of the folder"],
    ),
    "no tensors at all": (
        lambda f: (without_weights(f), (f / "model.safetensors").write_bytes(raw_file({}))),
        ["model.safetensors", "no tensors"],
    ),
    "a shard under the single file's name": (
        lambda f: shutil.copy(f / FIRST, f / "model.safetensors"),
        ["model.safetensors: lies beside model.safetensors.index.json, so it is read alone", "remove the one"],
    ),
    **{
        f"config with {key} {wrong}": (
            lambda f, key=key, wrong=wrong: edit_config(f, key, wrong),
            [f"config.json: `{key}` is {wrong!r}, expected"],
        )
        for key in ("model_type", "architectures", "layer_types", "text_config.model_type")
        for wrong in ([[]], {}, 3, [3])
    },
    "manifest no object": (lambda f: (f / "surgery.json").write_text("3"), ["surgery.json", "JSON object"]),
    "manifest too big": (
        lambda f: ((f / "surgery.json").touch(), os.truncate(f / "surgery.json", 64_000_001)),
        ["surgery.json", "64,000,001"],
    ),
    "shard broken": (lambda f: os.truncate(f / FIRST, (f / FIRST).stat().st_size - 3), [FIRST, "3 bytes are missing"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    break_it, words = REFUSED[case]
    base = sharded(tmp_path / "base")
    break_it(base)
    message = refused(base)
    for word in words:
        assert word in message, message


@pytest.mark.parametrize(
    "file",
    [
        "../model.safetensors",
        "/etc/passwd.safetensors",
        "sub/../model.safetensors",
        ".sub/model.safetensors",
        "sub//model.safetensors",
        "a/b/c/d/model.safetensors",
        "sub\\model.safetensors",
        ".hidden.safetensors",
        "",
        ".safetensors",
        "model.bin",
        "model\x00.safetensors",
        "model\x1b[31m.safetensors",
        "m" * 300 + ".safetensors",
        7,
        None,
        ["model.safetensors"],
    ],
)
def test_index_entries_are_plain_names(file: object, tmp_path: Path) -> None:
    write_index(sharded(tmp_path), {"a.weight": file})
    assert "expected the name of a .safetensors file" in refused(tmp_path)


def test_the_line_that_converts_pickled_weights_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    base = sharded(tmp_path)
    without_weights(base)
    a = torch.arange(6.0).reshape(3, 2)
    torch.save({"a.weight": a, "tied.weight": a}, base / "pytorch_model-00001-of-00002.bin")
    torch.save({"b.weight": a.T[:1]}, base / "pytorch_model-00002-of-00002.bin")
    command = re.search(r"`(python -c .*)`", refused(base))
    assert command is not None
    python, option, code = shlex.split(command[1])
    monkeypatch.chdir(base)
    exec(code, {})
    folder = CheckpointFolder.open(base)
    found = {name: torch.frombuffer(folder.read(name), dtype=torch.float32).tolist() for name in folder.tensors}
    flat = a.flatten().tolist()
    assert (python, option, found) == ("python", "-c", {"a.weight": flat, "tied.weight": flat, "b.weight": flat[::2]})
    # What a pickle runs where it may: here it is refused.
    torch.save({"a.weight": Path("x")}, base / "pytorch_model-00001-of-00002.bin")
    with pytest.raises(pickle.UnpicklingError):
        exec(code, {})


def test_shards_may_lie_in_a_folder_below_that_is_no_way_out(tmp_path: Path) -> None:
    base = sharded(tmp_path / "base")
    flat = CheckpointFolder.open(base)
    nested = {info.name: f"weights/{info.file}" for info in flat.tensors.values()}
    (base / "weights").mkdir()
    for file in flat.shards:
        (base / file).rename(base / "weights" / file)
    write_index(base, nested)
    folder = CheckpointFolder.open(base)
    assert {info.name: info.file for info in folder.tensors.values()} == nested
    assert all(folder.read(name) == tensor_bytes(name, info.nbytes) for name, info in folder.tensors.items())
    assert folder.left_behind == ()
    (base / "weights").rename(tmp_path / "elsewhere")
    (base / "weights").symlink_to(tmp_path / "elsewhere")
    assert "missing, of 2 shards" in refused(base)
    # Swapped after it was opened.
    with pytest.raises(BadInput, match="behind a folder's link that leads out"):
        folder.read("a.weight")


def hub_cache(root: Path) -> tuple[Path, Path]:
    """A checkpoint as the Hub's client keeps it: (snapshot, blobs)."""
    repository = root / "models--user--name"
    snapshot, blobs = repository / "snapshots" / ("0" * 40), repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    sharded(snapshot)
    templates = snapshot / "additional_chat_templates"
    templates.mkdir()
    (templates / "tool.jinja").write_text("{{ x }}")
    (snapshot / "tokenizer.json").write_text("{}")
    for number, path in enumerate(sorted(path for path in snapshot.rglob("*") if path.is_file())):
        blob = blobs / f"{number:040x}"
        path.rename(blob)
        path.symlink_to(os.path.relpath(blob, path.parent))
    return snapshot, blobs


def test_the_hub_cache_s_links_work(tmp_path: Path) -> None:
    snapshot, _ = hub_cache(tmp_path)
    folder = CheckpointFolder.open(snapshot)
    assert len(folder.tensors) == 4
    assert bytes(folder.read("c.weight")) == tensor_bytes("c.weight", 8)
    assert folder.side_files == ("additional_chat_templates/tool.jinja", "tokenizer.json")
    assert folder.read_side_file("additional_chat_templates/tool.jinja") == b"{{ x }}"
    folder.check_unchanged()
    # A cache that was moved as a whole and linked to.
    (tmp_path / "link").symlink_to(snapshot)
    assert len(CheckpointFolder.open(tmp_path / "link").tensors) == 4


def test_the_hub_cache_s_shared_store_works(tmp_path: Path) -> None:
    """Newer clients keep one copy for many repositories: the blob is itself a link, of exactly one shape."""
    snapshot, blobs = hub_cache(tmp_path)
    blob = blobs / (snapshot / FIRST).readlink().name
    shared = tmp_path / "blobs" / "ab" / ("ab" * 32)
    shared.parent.mkdir(parents=True)
    blob.rename(shared)
    blob.symlink_to(os.path.relpath(shared, blob.parent))
    assert len(CheckpointFolder.open(snapshot).tensors) == 4
    elsewhere = tmp_path / "blobs" / "secret"
    shared.rename(elsewhere)
    blob.unlink()
    blob.symlink_to(elsewhere)
    assert "out of the folder" in refused(snapshot)


def test_blobs_that_lead_elsewhere_are_refused(tmp_path: Path) -> None:
    snapshot, blobs = hub_cache(tmp_path)
    moved = tmp_path / "moved"
    blobs.rename(moved)
    blobs.symlink_to(moved)
    assert "out of the folder" in refused(snapshot)


def test_a_link_to_a_neighbour_works(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / FIRST).rename(tmp_path / "first.bin")
    (tmp_path / FIRST).symlink_to("first.bin")
    assert len(CheckpointFolder.open(tmp_path).tensors) == 4


def test_an_infinity_in_a_config_is_what_transformers_writes_for_it(tmp_path: Path) -> None:
    from transformers import PreTrainedConfig

    base = sharded(tmp_path)
    text = '{"model_type": "mamba2", "time_step_limit": [0.0, Infinity], "low": -Infinity, "none": NaN}'
    (base / "config.json").write_text(text)
    config = CheckpointFolder.open(base).config
    assert config == PreTrainedConfig._encode_special_floats(json.loads(text))
    assert config["time_step_limit"] == [0.0, {"__float__": "Infinity"}]


def test_code_with_trust(tmp_path: Path) -> None:
    write_config(sharded(tmp_path), auto_map={"AutoModel": "modeling_x.X"})
    (tmp_path / "modeling_x.py").write_text("")
    folder = CheckpointFolder.open(tmp_path, trust_remote_code=True)
    assert folder.left_behind == () and folder.side_files == ("modeling_x.py",)
    assert folder.own is not None and folder.own.files == {"modeling_x.py": b""}
    (tmp_path / "not-a-module.py").write_text("")
    assert CheckpointFolder.open(tmp_path, trust_remote_code=True).left_behind == ("not-a-module.py",)
    (tmp_path / "modeling_surgeon.py").write_text("")
    with pytest.raises(BadInput, match="what surgeon calls its own code"):
        CheckpointFolder.open(tmp_path, trust_remote_code=True)


OF_TOKENIZERS = {"AutoTokenizer": ["x.T", None]}
OF_MODELS = {"AutoConfig": "x.C", "AutoModelForCausalLM": "evil/x--x.M"}
# Files of settings beside a config.json, and the words of the refusal where the code is needed.
BRINGS: dict[str, tuple[dict[str, dict[str, object]], str]] = {
    "text": ({"config.json": {"text_config": {"model_type": "llama", "auto_map": OF_MODELS}}}, ""),
    "text unknown": (
        {"config.json": {"text_config": {"model_type": "x", "auto_map": OF_MODELS}}},
        "an `auto_map` for AutoConfig, and transformers has no x",
    ),
    "tokenizer of the type": ({"tokenizer_config.json": {"auto_map": ["x.T", None], "model_type": "llama"}}, ""),
    "tokenizer of a type without": (
        {"tokenizer_config.json": {"auto_map": OF_TOKENIZERS}, "config.json": {"model_type": "llama"}},
        "an `auto_map` for AutoTokenizer, and no class of transformers beside it",
    ),
    "tokenizer of the config": (
        {
            "tokenizer_config.json": {"auto_map": OF_TOKENIZERS},
            "config.json": {"model_type": "llama", "tokenizer_class": "LlamaTokenizer", "auto_map": OF_TOKENIZERS},
        },
        "",
    ),
    "processor of the type": (
        {
            "preprocessor_config.json": {"auto_map": {"AutoProcessor": "x.P", "AutoImageProcessor": "x.I"}},
            "config.json": {"model_type": "qwen2_vl"},
        },
        "",
    ),
    "processor of the text alone": ({"config.json": {"auto_map": OF_MODELS | {"AutoProcessor": "x.P"}}}, ""),
    "processor unknown": (
        {"preprocessor_config.json": {"parts": [{"auto_map": {"AutoProcessor": "x.P"}, "processor_class": "XP"}]}},
        "an `auto_map` for AutoProcessor, and transformers has no XP",
    ),
}


@pytest.mark.parametrize("case", BRINGS)
def test_code_is_left_out_where_transformers_has_the_class(case: str, tmp_path: Path) -> None:
    files, words = BRINGS[case]
    write_config(sharded(tmp_path), model_type="phi3")
    for name, content in files.items():
        before = json.loads((tmp_path / name).read_text()) if name == "config.json" else {}
        (tmp_path / name).write_text(json.dumps(before | content))
    if words:
        assert words in refused(tmp_path)
        return
    folder = CheckpointFolder.open(tmp_path)
    for name in files:
        kept = folder.config if name == "config.json" else json.loads(folder.read_side_file(name))
        assert not leads_to_code(kept)
        assert f"{name}'s `auto_map`" in folder.notes[0] or not leads_to_code(files[name])


def test_code_of_a_tokenizer_goes_along_once_it_is_trusted(tmp_path: Path) -> None:
    """Left behind, what names it would point nowhere."""
    write_config(sharded(tmp_path), model_type="llama")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": OF_TOKENIZERS}))
    (tmp_path / "x.py").write_text("")
    folder = CheckpointFolder.open(tmp_path, trust_remote_code=True)
    assert folder.own is not None and not folder.own.builds_models and folder.classes == "installed"
    assert folder.side_files == ("tokenizer_config.json", "x.py")


CARRIED = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "qwen.tiktoken",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "tekken.json",
    "tokenizer.model.v3",
    "tokenizer.model.v7m1",
    "LICENSE",
    "LICENSE.md",
    "LICENSE-APACHE.txt",
    "NOTICE",
    "USE_POLICY.md",
]
LEFT = [
    "modeling_x.pyc",
    "LICENSE.py",
    "LICENSE.sh",
    ".hidden.model",
    ".gitattributes",
    "README.md",
    "training_args.bin",
    "optimizer.pt",
    "scheduler.pkl",
    "other.jinja",
    "config.yaml",
    "x.model\n",
    "x.model.vbs",
]


def test_side_files_by_allow_list(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "original").mkdir()
    for name in [*CARRIED, *LEFT, "additional_chat_templates/evil.sh", "original/tokenizer.model"]:
        (tmp_path / name).write_text("{}" if name.endswith(".json") else name)
    folder = CheckpointFolder.open(tmp_path, trust_remote_code=True)
    assert folder.side_files == tuple(sorted(CARRIED))
    assert set(folder.left_behind) == {*LEFT, "original/", "additional_chat_templates/evil.sh"}
    assert folder.read_side_file("LICENSE") == b"LICENSE"


def test_every_file_that_a_tokenizer_of_transformers_is_made_of_is_a_side_file() -> None:
    """As its sources name them; nothing of them is imported."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.origin is not None
    named: set[str] = set()
    for file in Path(spec.origin).parent.glob("models/*/tokenization*.py"):
        named.update(re.findall(r'"\w+_file": "([^"]+)"', file.read_text(encoding="utf-8")))
    assert len(named) > 15 and not [name for name in named if not is_side_file(name)]


@pytest.mark.parametrize(
    "name",
    [
        "../tokenizer.json",
        "/tokenizer.json",
        "a/tokenizer.json",
        "additional_chat_templates/../x.jinja",
        "config.json",
        "surgery.json",
        "a.model/b",
    ],
)
def test_names_that_are_no_side_files(name: str) -> None:
    assert not is_side_file(name)


def test_side_files_that_are_not_plain_files_stay_behind_with_a_note(tmp_path: Path) -> None:
    sharded(tmp_path / "base")
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "base" / "tokenizer.json").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "base" / "vocab.txt")
    (tmp_path / "base" / "merges.txt").symlink_to("nowhere")
    (tmp_path / "base" / "huge.model").touch()
    os.truncate(tmp_path / "base" / "huge.model", 64_000_001)
    folder = CheckpointFolder.open(tmp_path / "base")
    assert folder.side_files == ()
    assert set(folder.left_behind) == {"tokenizer.json", "vocab.txt", "merges.txt", "huge.model"}
    notes = "\n".join(folder.notes)
    for word in ("tokenizer.json", "out of the folder", "a FIFO", "merges.txt", "64,000,001"):
        assert word in notes


def test_a_side_file_swapped_for_a_link_is_not_followed(tmp_path: Path) -> None:
    sharded(tmp_path / "base")
    tokenizer = tmp_path / "base" / "tokenizer.json"
    tokenizer.write_text("{}")
    folder = CheckpointFolder.open(tmp_path / "base")
    (tmp_path / "secret").write_text("secret")
    replaced(tokenizer, lambda p: p.symlink_to(tmp_path / "secret"))
    with pytest.raises(BadInput, match="out of the folder"):
        folder.read_side_file("tokenizer.json")


def test_the_manifest_is_parsed_and_not_judged(tmp_path: Path) -> None:
    (sharded(tmp_path) / "surgery.json").write_text('{"anything": [1, 2.5]}')
    folder = CheckpointFolder.open(tmp_path)
    assert folder.manifest == {"anything": [1, 2.5]}
    assert folder.left_behind == ()


def test_identity_tells_every_shard(tmp_path: Path) -> None:
    folder = CheckpointFolder.open(sharded(tmp_path))
    found = (tmp_path / FIRST).stat()
    assert folder.identity()[0] == {
        "name": FIRST,
        "size": found.st_size,
        "mtime_ns": found.st_mtime_ns,
        "inode": found.st_ino,
    }
    assert [entry["name"] for entry in folder.identity()] == [FIRST, SECOND]
    json.dumps(folder.identity())


def touch(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def same_but_another_inode(path: Path) -> None:
    times = path.stat()
    other = path.with_name("copy")
    shutil.copy(path, other)
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    other.rename(path)


def longer(path: Path) -> None:
    times = path.stat()
    with path.open("ab") as file:
        file.write(b"x")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("change", [touch, same_but_another_inode, longer])
def test_a_base_that_changes_under_the_run(change: Callable[[Path], None], tmp_path: Path) -> None:
    folder = CheckpointFolder.open(sharded(tmp_path))
    folder.check_unchanged()
    change(tmp_path / SECOND)
    for attempt in (folder.check_unchanged, lambda: folder.open_shard(SECOND), lambda: folder.read("c.weight")):
        with pytest.raises(BadInput, match=f"{SECOND}: changed since"):
            attempt()
    os.close(folder.open_shard(FIRST))


def test_a_shard_that_goes_away(tmp_path: Path) -> None:
    folder = CheckpointFolder.open(sharded(tmp_path))
    (tmp_path / SECOND).unlink()
    with pytest.raises(BadInput, match=f"{SECOND}: no such file"):
        folder.check_unchanged()


def test_shards_are_opened_for_reading_only(tmp_path: Path) -> None:
    fd = CheckpointFolder.open(sharded(tmp_path)).open_shard(FIRST)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(fd, b"x", 0)
    os.close(fd)


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    opened = Path("/proc/self/fd")
    if not opened.is_dir():
        pytest.skip("open descriptors are counted through /proc")
    before = len(list(opened.iterdir()))
    folder = CheckpointFolder.open(sharded(tmp_path))
    folder.read("a.weight")
    folder.check_unchanged()
    touch(tmp_path / FIRST)
    for case in ("again", "and again"):
        with pytest.raises(BadInput):
            folder.open_shard(FIRST)
        os.truncate(tmp_path / SECOND, 20 + len(case))
        refused(tmp_path)
    assert len(list(opened.iterdir())) == before


AS_NOBODY = """
import os, sys
from pathlib import Path
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.errors import BadInput
if os.geteuid() == 0:
    os.setegid(65534)
    os.seteuid(65534)
try:
    CheckpointFolder.open(Path(sys.argv[1]))
except BadInput as error:
    print(error)
"""


@pytest.mark.parametrize("name", ["config.json", INDEX, FIRST, "."])
def test_permission_denied(name: str) -> None:
    # pytest's own temporary folders are closed to others as a whole.
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        base = sharded(Path(place) / "base")
        base.chmod(0o755)
        (base / name).chmod(0)
        ran = subprocess.run([sys.executable, "-c", AS_NOBODY, str(base)], capture_output=True, text=True, check=True)
        (base / name).chmod(0o755)
    assert "permission denied" in ran.stdout
    assert name.removesuffix(".") in ran.stdout


def test_many_sparse_shards_open_without_their_data(tmp_path: Path) -> None:
    """200 shards of 4 GB of holes each: headers are all that is read, and nothing is kept in memory."""
    weight_map = {}
    for number in range(200):
        file = f"model-{number + 1:05d}-of-00200.safetensors"
        entries = [(f"model.layers.{number}.part_{part}.weight", "BF16", (18_000, 18_000)) for part in range(6)]
        header, places = build_header(entries, metadata={"format": "pt"})
        (tmp_path / file).write_bytes(header)
        os.truncate(tmp_path / file, places[-1][1])
        weight_map |= {name: file for name, _, _ in entries}
    write_config(tmp_path)
    write_index(tmp_path, weight_map)
    folder = CheckpointFolder.open(tmp_path)
    assert len(folder.tensors) == 1200
    assert sum(info.nbytes for info in folder.tensors.values()) == 1200 * 648_000_000


@pytest.mark.parametrize("other", ["Model.safetensors", INDEX.title(), FIRST.upper()])
def test_a_file_in_another_case_is_named(tmp_path: Path, other: str) -> None:
    """Names are other names on Linux, and a copy from a system that takes them for the same has them."""
    made = single if other == "Model.safetensors" else sharded
    made(tmp_path)
    own = next(file for file in tmp_path.iterdir() if file.name == other.lower())
    own.rename(tmp_path / other)
    assert refused(tmp_path).endswith(f"; rename {other} to {own.name}")
