"""Matrices that stay in their file: looked up by rows, multiplied by blocks, read whole for anything else."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import surgeon
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.manifest.reading import manifest_of
from surgeon.models import stored_matrix
from surgeon.models.compare_streamed import compare_streamed
from surgeon.models.load import load_model
from surgeon.models.stored_matrix import StoredMatrix
from surgeon.models.stream import StreamedModel
from tests import tiny

ROWS, COLUMNS = 37, 8
IDS = torch.randint(0, 128, (2, 12), generator=torch.Generator().manual_seed(3))


def stored(cut: int = 0) -> tuple[StoredMatrix, torch.Tensor, list[tuple[int, int]]]:
    """A matrix, its numbers, and the rows that were read of it."""
    value, read = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)), []

    def rows(first: int, behind: int) -> torch.Tensor:
        read.append((first, behind))
        return value[first:behind].clone()

    return StoredMatrix.of(torch.empty(ROWS, COLUMNS, device="meta"), rows, value.device, cut=cut), value, read


def test_only_the_rows_that_are_looked_up_are_read() -> None:
    matrix, value, read = stored()
    ids = torch.tensor([[3, 36], [0, 3]])
    assert torch.equal(functional.embedding(ids, matrix, padding_idx=0), functional.embedding(ids, value))
    assert sorted(read) == [(0, 1), (3, 4), (36, 37)]
    assert functional.embedding(torch.zeros(1, 0, dtype=torch.long), matrix).shape == (1, 0, COLUMNS)


@pytest.mark.parametrize(("cut", "blocks"), [(0, [0, 10, 20, 30, 37]), (33, [0, 10, 20, 30, 33, 37])])
def test_a_product_is_that_of_its_blocks(cut: int, blocks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_matrix, "BLOCK_NUMBERS", 10 * COLUMNS)
    matrix, value, read = stored(cut)
    inputs, bias = torch.randn(2, 5, COLUMNS), torch.randn(ROWS)
    found = functional.linear(inputs, matrix, bias)
    assert read == list(pairwise(blocks))
    torch.testing.assert_close(found, functional.linear(inputs, value, bias))
    assert torch.equal(found[..., :10], functional.linear(inputs, value[:10].clone(), bias[:10]))


def test_anything_else_is_done_with_the_whole_matrix() -> None:
    matrix, value, read = stored()
    assert (matrix.shape, matrix.dtype, matrix.device) == (value.shape, value.dtype, value.device)
    assert not matrix.is_meta
    assert not read
    inputs = torch.randn(3, COLUMNS)
    assert torch.equal(inputs @ matrix.T, inputs @ value.T)
    assert torch.equal(matrix[4:9], value[4:9])
    assert torch.equal(torch.einsum("nc,rc->nr", inputs, matrix), torch.einsum("nc,rc->nr", inputs, value))
    assert torch.equal(torch.stack((matrix, matrix)), torch.stack((value, value)))
    assert torch.equal(torch.cat(tensors=[matrix, value]), torch.cat([value, value]))


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_a_model_whose_head_has_many_blocks(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 24 rows of 128, the last one smaller: close to the whole product, equal in two models."""
    base = tiny.checkpoint(tmp_path / "base", "gemma2")
    surgeon.apply("llama-pro", base, tmp_path / "out")
    whole = load_model(base, dtype=dtype)
    monkeypatch.setattr(stored_matrix, "BLOCK_NUMBERS", 24 * 32)
    folders = CheckpointFolder.open(base), CheckpointFolder.open(tmp_path / "out")
    streamed = StreamedModel(folders[0], dtype=dtype)
    with torch.inference_mode():
        torch.testing.assert_close(streamed.module(input_ids=IDS).logits, whole(input_ids=IDS).logits)
    images = [n for n, layer in enumerate(manifest_of(folders[1]).layers) if layer.base is not None]
    (found,) = compare_streamed(*folders, IDS, dtypes=[dtype], layer_of_base=images, decode_tokens=2)
    assert found.identical


@pytest.mark.parametrize("bias", [None, torch.randn(ROWS)])
def test_rows_that_lie_apart_are_multiplied_as_by_a_parameter(bias: torch.Tensor | None) -> None:
    """As the last token of each window is by the head of a model that was loaded whole."""
    matrix, value, _ = stored()
    last = torch.randn(2, 9, COLUMNS)[:, -1:]
    weight = torch.nn.Parameter(value)
    with torch.inference_mode():
        expected = functional.linear(last, weight, bias)
        assert torch.equal(functional.linear(last, matrix, bias), expected)


def test_old_tokens_have_the_same_blocks_in_a_grown_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix cut where another one ends gives its products, whatever comes behind."""
    monkeypatch.setattr(stored_matrix, "BLOCK_NUMBERS", 10 * COLUMNS)
    _, value, _ = stored()
    grown, read = torch.cat([value, torch.randn(3, COLUMNS)]), []

    def rows(first: int, behind: int) -> torch.Tensor:
        read.append((first, behind))
        return grown[first:behind].clone()

    inputs = torch.randn(2, 5, COLUMNS)
    out = StoredMatrix.of(torch.empty(ROWS + 3, COLUMNS, device="meta"), rows, value.device, cut=ROWS)
    base, _, before = stored()
    found = functional.linear(inputs, out)[..., :ROWS]
    assert torch.equal(found, functional.linear(inputs, base))
    assert read == [*before, (ROWS, ROWS + 3)]
