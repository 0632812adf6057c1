"""`surgeon gguf-pattern`: the file with the pattern is what a converter that knows of it would have written.

llama.cpp itself reads such files in benchmarks/engines.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

import surgeon
from tests import tiny

KINDS = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"]
KEY = "gemma2.attention.sliding_window_pattern"


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def value(held: Any) -> bytes:
    """A value with its type before it."""
    match held:
        case bool():
            return struct.pack("<I?", 7, held)
        case int():
            return struct.pack("<II", 4, held)
        case float():
            return struct.pack("<If", 6, held)
        case str():
            return struct.pack("<I", 8) + text(held)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(held)) + b"".join(map(text, held))
        case [bool(), *_]:
            return struct.pack("<IIQ", 9, 7, len(held)) + struct.pack(f"<{len(held)}?", *held)
        case _:
            return struct.pack("<IIQ", 9, 5, len(held)) + struct.pack(f"<{len(held)}i", *held)


def gguf(values: dict[str, Any], *, version: int = 3) -> bytes:
    """A GGUF file of two tensors, as ggml's docs/gguf.md has it."""
    alignment = values.get("general.alignment", 32)
    data = [bytes(range(1, 25)), b"\xff" * 8]
    made = b"GGUF" + struct.pack("<IQQ", version, len(data), len(values))
    made += b"".join(text(key) + value(held) for key, held in values.items())
    offset = 0
    for number, held in enumerate(data):
        made += text(f"blk.{number}.weight") + struct.pack("<IQIQ", 1, len(held) // 4, 0, offset)
        offset += -(-len(held) // alignment) * alignment
    for held in [b"", *data]:
        made += held
        made += bytes(-len(made) % alignment)
    return made


def values(**changed: Any) -> dict[str, Any]:
    return {
        "general.architecture": "gemma2",
        "gemma2.block_count": len(KINDS),
        "gemma2.attention.layer_norm_rms_epsilon": 1e-6,
        "tokenizer.ggml.tokens": ["<pad>", "é", ""],
        "tokenizer.ggml.token_type": [3, 1, 1],
        "tokenizer.ggml.add_bos_token": True,
        **changed,
    }


@pytest.fixture
def out(tmp_path: Path) -> Path:
    made = tiny.checkpoint(tmp_path / "out", "gemma2", num_hidden_layers=len(KINDS))
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | {"layer_types": KINDS}))
    return made


@pytest.mark.parametrize("changed", [{}, {"general.alignment": 64}])
def test_the_pattern_stands_in_the_file_and_the_rest_is_as_it_was(
    changed: dict[str, Any], out: Path, tmp_path: Path
) -> None:
    (tmp_path / "old.gguf").write_bytes(gguf(values(**changed)))
    made = surgeon.gguf_pattern(out, tmp_path / "old.gguf", tmp_path / "new.gguf")
    pattern = [kind == "sliding_attention" for kind in KINDS]
    assert (tmp_path / "new.gguf").read_bytes() == gguf(values(**changed, **{KEY: pattern}))
    assert (made.pattern, made.nbytes) == (tuple(pattern), (tmp_path / "new.gguf").stat().st_size)


@pytest.mark.parametrize(
    "content, words",
    [
        (b"PK\3\4 and more", "is no GGUF file; give one"),
        (gguf(values(), version=1), "GGUF version 1; convert"),
        (gguf(values())[:200], "ends before its header does; convert"),
        (gguf(values())[:16] + b"\xff" * 8, "header has 18,446,744,073,709,551,615 entries of one kind"),
        (gguf(values())[:16] + struct.pack("<Q", 9_000_000), "ends before its header does; convert"),
        (gguf(values(**{"general.architecture": "llama"})), "architecture `llama`; .* use it as it is"),
        (gguf(values(**{"gemma2.block_count": 4})), "has 4 layers, config.json .* has 5; give"),
        (gguf(values(**{KEY: [True] * 5})), "has `gemma2.attention.sliding_window_pattern` already"),
    ],
)
def test_files_that_do_not_fit_are_refused(content: bytes, words: str, out: Path, tmp_path: Path) -> None:
    (tmp_path / "old.gguf").write_bytes(content)
    with pytest.raises(surgeon.BadInput, match=words):
        surgeon.gguf_pattern(out, tmp_path / "old.gguf", tmp_path / "new.gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old.gguf", "out"]


def test_so_are_checkpoints_and_destinations(out: Path, tmp_path: Path) -> None:
    (tmp_path / "old.gguf").write_bytes(gguf(values()))
    with pytest.raises(surgeon.BadInput, match="no `layer_types`"):
        llama = tiny.checkpoint(tmp_path / "llama", "llama")
        surgeon.gguf_pattern(llama, tmp_path / "old.gguf", tmp_path / "new.gguf")
    with pytest.raises(surgeon.BadInput, match=r"old\.gguf: is the base"):
        surgeon.gguf_pattern(out, tmp_path / "old.gguf", tmp_path / "old.gguf")
    with pytest.raises(surgeon.BadInput, match="no such file"):
        surgeon.gguf_pattern(out, tmp_path / "none.gguf", tmp_path / "new.gguf")


def test_any_byte_of_the_header_may_be_wrong(out: Path, tmp_path: Path) -> None:
    """The file is written, or refused in one line."""
    content = gguf(values())
    for at in range(0, len(content) - 96, 4):
        for wrong in (0xFF, content[at] ^ 0x01):
            (tmp_path / "old.gguf").write_bytes(content[:at] + bytes([wrong]) + content[at + 1 :])
            try:
                surgeon.gguf_pattern(out, tmp_path / "old.gguf", tmp_path / "new.gguf")
                (tmp_path / "new.gguf").unlink()
            except surgeon.BadInput as error:
                assert "\n" not in str(error)
    with (tmp_path / "large.gguf").open("wb") as file:
        # A hole of 300 MB, which a key is said to hold.
        file.write(
            content[:24] + struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 8, 2) + struct.pack("<Q", 3 * 10**8)
        )
        file.truncate(4 * 10**8)
    with pytest.raises(surgeon.BadInput, match="its header has more than 268,435,456 bytes"):
        surgeon.gguf_pattern(out, tmp_path / "large.gguf", tmp_path / "new.gguf")


@pytest.mark.parametrize(
    "types, words",
    [
        ([["sliding_attention"]] * 5, "`layer_types` is .*, expected a list of names"),
        ([{}] * 5, "`layer_types` is .*, expected a list of names"),
        ("sliding_attention", "`layer_types` is .*, expected a list of names"),
        (["chunked_attention"] * 5, "no `layer_types` of sliding_attention and full_attention"),
    ],
)
def test_layers_of_no_kind(types: Any, words: str, out: Path, tmp_path: Path) -> None:
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"layer_types": types}))
    (tmp_path / "old.gguf").write_bytes(gguf(values()))
    with pytest.raises(surgeon.BadInput, match=words):
        surgeon.gguf_pattern(out, tmp_path / "old.gguf", tmp_path / "new.gguf")
