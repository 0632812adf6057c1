"""Small safetensors files and checkpoint folders made by hand, so that every byte of them is known."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from surgeon.checkpoint.header import build_header

INDEX = "model.safetensors.index.json"
CONFIG = {"model_type": "llama", "hidden_size": 2}


def raw_file(header: Any, data: bytes = b"") -> bytes:
    """A file with this header, given as JSON data, text or bytes, whatever it says."""
    text = header if isinstance(header, bytes) else (header if isinstance(header, str) else json.dumps(header)).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor_bytes(name: str, count: int) -> bytes:
    """`count` bytes that differ from tensor to tensor."""
    return bytes((sum(name.encode()) * 31 + 7 * i) % 256 for i in range(count))


def write_shard(path: Path, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    """A well-formed file of these tensors (name → dtype, shape)."""
    header, places = build_header(
        [(name, dtype, shape) for name, (dtype, shape) in tensors.items()], metadata={"format": "pt"}
    )
    data = b"".join(tensor_bytes(name, end - begin) for name, (begin, end) in zip(tensors, places, strict=True))
    path.write_bytes(header + data)


SHARDS = {
    "model-00001-of-00002.safetensors": {"a.weight": ("BF16", (4, 2)), "b.weight": ("F32", (3,))},
    "model-00002-of-00002.safetensors": {"c.weight": ("F16", (2, 2)), "d.weight": ("F64", (1,))},
}


def write_config(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))


def write_index(folder: Path, weight_map: dict[str, Any] | None = None, **changes: Any) -> None:
    proper = {name: file for file, tensors in SHARDS.items() for name in tensors}
    content = {"metadata": {}, "weight_map": proper if weight_map is None else weight_map} | changes
    (folder / INDEX).write_text(json.dumps(content))


def sharded(folder: Path) -> Path:
    """A sound checkpoint of two shards."""
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder)
    for file, tensors in SHARDS.items():
        write_shard(folder / file, tensors)
    write_index(folder)
    return folder


def single(folder: Path) -> Path:
    """A sound checkpoint of one file."""
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder)
    write_shard(folder / "model.safetensors", {"a.weight": ("BF16", (4, 2))})
    return folder
