"""Parts of layers in another order, read as bytes in pieces, against torch's own indexing."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from surgeon.apply import parts
from surgeon.apply.parts import parts_in_order
from surgeon.blueprint.recipes import Copy, PerLayer
from surgeon.checkpoint.ranges import compare_pieces, sha256_pieces
from surgeon.errors import BadInput

BEGIN = 5


# The default takes many rows at once; 96 bytes are two rows of the first shape, 32 less than one row of any.
@pytest.mark.parametrize("buffer", [parts._BUFFER, 96, 32])
@pytest.mark.parametrize(("shape", "axis"), [((7, 12), 1), ((12, 7), 0), ((3, 6, 5), 1), ((2, 3, 6), 2)])
def test_parts_in_order(
    buffer: int, shape: tuple[int, ...], axis: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "_BUFFER", buffer)
    value = torch.randn(shape)
    file = tmp_path / "file"
    file.write_bytes(bytes(BEGIN) + value.numpy().tobytes())
    order = (0, 0, 1, 2, 2, 2, 1)
    recipe = PerLayer(Copy("it", "F32", shape), axis, 3, order)
    size = shape[axis] // 3
    wanted = value.index_select(axis, torch.tensor([part * size + n for part in order for n in range(size)]))
    assert recipe.shape == wanted.shape
    content = wanted.contiguous().numpy().tobytes()
    with file.open("rb") as opened:
        found = [bytes(piece) for piece in parts_in_order(opened.fileno(), BEGIN, recipe)]
        assert b"".join(found) == content
        assert max(map(len, found)) <= max(buffer * len(order) // 3, buffer)
        digest = sha256_pieces(parts_in_order(opened.fileno(), BEGIN, recipe))
    assert digest == hashlib.sha256(content).hexdigest()
    # What takes the first part of each layer out again gives the original.
    file.write_bytes(content)
    back = PerLayer(Copy("it", "F32", recipe.shape), axis, 7, (0, 2, 3))
    original = tmp_path / "original"
    original.write_bytes(value.numpy().tobytes())
    with file.open("rb") as opened, original.open("rb") as other:
        assert compare_pieces(parts_in_order(opened.fileno(), 0, back), other.fileno(), 0) is not None
        edited = bytearray(value.numpy().tobytes())
        edited[-1] ^= 1
        original.write_bytes(edited)
        assert compare_pieces(parts_in_order(opened.fileno(), 0, back), other.fileno(), 0) is None
        with pytest.raises(BadInput, match="ends"):
            list(parts_in_order(opened.fileno(), len(content), back))
