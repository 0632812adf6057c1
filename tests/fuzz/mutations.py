"""Valid files made wrong: a value replaced, deleted, doubled, moved or swapped; bytes flipped; the end cut off."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

Draw = Callable[[st.SearchStrategy[Any]], Any]

# What programs trip over, of every kind that JSON and YAML have.
HOSTILE: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 7, 2**31, 2**63, -(2**63), 10**60, 0.0, -0.5, 0.5, 1.5, 1e-300, 1e300),
    *(
        "",
        " ",
        "x",
        "0",
        "1",
        "01",
        "nan",
        "../x",
        "/dev/zero",
        "a\0b",
        "a\nb",
        "\x1b[31m",
        "é" * 200,
        "\ud800",
        "[/red]",
    ),
    *([], [0], [[]], [None], ["x", "x"], [-1, 2**40], {}, {"": 0}, {"x": {"x": {}}}),
]
# Not JSON, though Python reads it.
RAW = ["NaN", "Infinity", "-Infinity", "1e999", "-0", "9" * 100, "[" * 200 + "]" * 200, '"\\ud800"', "01", "'x'", ""]
_HERE = "\ue000here"


def places(data: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in JSON data below the top, the containers too."""
    entries = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    found: list[tuple[Any, ...]] = []
    for key, value in entries:
        found += [(*at, key), *places(value, (*at, key))]
    return found


def _parent(data: Any, place: tuple[Any, ...]) -> Any:
    for key in place[:-1]:
        data = data[key]
    return data


def mutated_json(draw: Draw, data: Any) -> str:
    """JSON text of `data` with one thing wrong; sometimes no JSON any more."""
    data = json.loads(json.dumps(data))
    # Long lists of the same (tensors, tokens) would take all draws: few of each container are looked at.
    known = places(data)
    place = (
        draw(st.sampled_from(known)) if draw(st.booleans()) else draw(st.sampled_from([p for p in known if len(p) < 3]))
    )
    inside, key = _parent(data, place), place[-1]
    raw: str | None = None
    match draw(st.sampled_from(["replace", "replace", "replace", "raw", "delete", "rename", "double", "swap", "wrap"])):
        case "replace":
            inside[key] = draw(st.sampled_from(HOSTILE))
        case "raw":
            raw, inside[key] = draw(st.sampled_from(RAW)), _HERE
        case "delete":
            del inside[key]
        case "rename" if isinstance(inside, dict):
            inside[draw(st.sampled_from(["x", "", f"{key}x", f"{key}".upper(), "a\0b", "\x1b"]))] = inside.pop(key)
        case "double" if isinstance(inside, dict):
            raw, inside[key] = f"{json.dumps(inside[key])}, {json.dumps(key)}: {json.dumps(inside[key])}", _HERE
        case "double":
            inside.append(inside[key])
        case "swap":
            other = draw(st.sampled_from(known))
            if other[: len(place)] != place and place[: len(other)] != other:
                there = _parent(data, other)
                inside[key], there[other[-1]] = there[other[-1]], inside[key]
        case _:
            inside[key] = [inside[key]]
    text = json.dumps(data)
    return text if raw is None else text.replace(json.dumps(_HERE), raw)


def mutated_bytes(draw: Draw, content: bytes) -> bytes:
    """`content` with some bytes flipped, cut, doubled or put in."""
    at = draw(st.integers(0, max(0, len(content) - 1)))
    match draw(st.sampled_from(["flip", "cut", "double", "insert", "empty", "mark"])):
        case "flip":
            return (
                content[:at] + bytes([content[at] ^ draw(st.integers(1, 255))]) + content[at + 1 :]
                if content
                else b"\0"
            )
        case "cut":
            return content[:at]
        case "double":
            return content[:at] + content[at : at + draw(st.integers(1, 64))] + content[at:]
        case "insert":
            return content[:at] + draw(st.binary(min_size=1, max_size=8)) + content[at:]
        case "empty":
            return b""
        case _:
            return b"\xef\xbb\xbf" + content


def mutated_text(draw: Draw, content: bytes) -> bytes:
    """A JSON file with one thing wrong, in its values or in its bytes."""
    if draw(st.integers(0, 3)):
        return mutated_json(draw, json.loads(content)).encode("utf-8", "surrogatepass")
    return mutated_bytes(draw, content)


def mutated_shard(draw: Draw, content: bytes) -> bytes:
    """A safetensors file with one thing wrong in its header, its length or its bytes."""
    (length,) = struct.unpack("<Q", content[:8])
    header, data = content[8 : 8 + length], content[8 + length :]
    if draw(st.integers(0, 3)):
        text = mutated_json(draw, json.loads(header)).encode("utf-8", "surrogatepass")
        return struct.pack("<Q", len(text)) + text + data
    prefix = mutated_bytes(draw, content[: 8 + length])
    return prefix + data
