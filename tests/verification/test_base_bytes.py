"""Every byte of the base that an output is to hold is compared: of copies, of parts, and beside what trained."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import surgeon
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.manifest.reading import manifest_of
from tests import tiny
from tests.decoders import tiny_decoder
from tests.oracle import STRUCTURES


def applied(base: Path, structure: str) -> Path:
    plan, out = base.parent / "plan.yaml", base.parent / "out"
    plan.write_text(json.dumps({"surgeon": 1, "operations": STRUCTURES[structure]}))
    surgeon.apply(plan, str(base), out, device="cpu")
    return out


def broken(base: Path, out: Path) -> dict[str, str]:
    checks = surgeon.verify(base, out, logits=False).checks
    return {check.name: check.detail for check in checks if not check.holds}


def turn_over(out: Path, name: str, byte: int) -> None:
    """Change one bit of a tensor."""
    info = CheckpointFolder.open(out).tensors[name]
    with (out / info.file).open("r+b") as file:
        before = os.pread(file.fileno(), 1, info.begin + byte)
        os.pwrite(file.fileno(), bytes([before[0] ^ 1]), info.begin + byte)


@pytest.mark.parametrize("structure", ["ffn", "attention", "hidden", "copied experts", "copy"])
def test_a_bit_of_any_part_of_the_base(structure: str, tmp_path: Path) -> None:
    base = tiny.checkpoint(tmp_path / "base", "llama")
    out = applied(base, structure)
    assert not broken(base, out)
    manifest = manifest_of(CheckpointFolder.open(out))
    spans = [(name, span) for name, made in manifest.new_tensors.items() for span in made.pieces.spans]
    assert spans
    for name, span in (spans[0], spans[len(spans) // 2], spans[-1]):
        for begin, end in (min(span.places), max(span.places)):
            for byte in (begin, end - 1):
                turn_over(out, name, byte)
                assert name in broken(base, out)["base tensors"]
                turn_over(out, name, byte)
    assert not broken(base, out)


def test_the_first_rows_of_a_fused_matrix_are_no_copy_of_it(tmp_path: Path) -> None:
    """Queries are the first rows of query, key and value: these bytes are compared, not the digest of the whole."""
    base = tiny_decoder(tmp_path / "base", "phi3", sliding_window=None)
    out = applied(base, "experts")
    assert not broken(base, out)
    turn_over(out, "model.layers.0.self_attn.q_proj.weight", 0)
    assert "self_attn.q_proj" in broken(base, out)["base tensors"]
