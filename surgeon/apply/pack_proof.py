"""The proof of unpacked matrices: what a plan makes of a format's codes is what its definition says, bit for bit.

The definition is computed anew here, from single bits and in float64; where compressed-tensors is installed, it is
asked too.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from surgeon.blueprint.recipes import Recipe, Unpacked
from surgeon.common.library import LOAD_FAILURES
from surgeon.errors import BadInput, printable
from surgeon.families.compressed import Code

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

    from surgeon.blueprint.blueprint import Output
    from surgeon.blueprint.recipes import Bench

_ROWS = 40


@dataclass(frozen=True)
class _Stored:
    """Of a bench as much as the recipe uses: made-up tensors in the place of stored ones, by the recipe's field."""

    made: Unpacked
    held: dict[str, Tensor]

    def dtype(self, name: str) -> torch.dtype:
        """As the bench says."""
        from surgeon.models.load import stored_dtype

        return stored_dtype(name)

    def read(self, recipe: Recipe, *, finite: bool = True) -> Tensor:
        """The tensor for one of the recipe's inputs."""
        return next(self.held[key] for key in self.held if getattr(self.made, key) is recipe)


def prove_packs(outputs: Iterable[Output]) -> None:
    """Unpack codes of each of the plan's formats as it does, and compare bits. Raises BadInput where they differ."""
    formats: dict[tuple[Any, ...], tuple[str, Unpacked]] = {}
    for output in outputs:
        if isinstance(each := output.recipe, Unpacked):
            key = (each.code, each.shape[1], each.scales.dtype, each.zeros is None, each.order is None)
            formats.setdefault(key, (output.name, each))
    for name, recipe in formats.values():
        made, held = _made_up(recipe)
        ours = made.compute(cast("Bench", _Stored(made, held)))
        asked = {"the format's definition": _defined(made, held), "compressed-tensors": _by_library(made, held)}
        for who, theirs in asked.items():
            if theirs is not None and not _same(ours, theirs):
                raise BadInput(
                    f"{printable(name)}: surgeon makes other numbers of this format ({made.code}, scales"
                    f" {made.scales.dtype}) than {who}; use the versions that constraints.txt names, or report it"
                )


def _same(ours: Tensor, theirs: Tensor) -> bool:
    import torch

    one, other = (each.nan_to_num(0.0).view(torch.int16) for each in (ours, theirs))
    return ours.dtype == theirs.dtype and torch.equal(one, other) and torch.equal(ours.isnan(), theirs.isnan())


def _made_up(recipe: Unpacked) -> tuple[Unpacked, dict[str, Tensor]]:
    """The same format with few rows, and drawn tensors to read."""
    import torch

    from surgeon.models.load import stored_dtype

    (rows, columns), code = recipe.shape, recipe.code
    whole = code.block[0] == rows
    few = min(rows, max(_ROWS, 2 * code.block[0])) if not whole else min(rows, _ROWS)
    code = replace(code, block=(few if whole else code.block[0], code.block[1]))
    grid = (-(-few // code.block[0]), -(-columns // code.block[1]))
    draw = torch.Generator().manual_seed(0)

    def drawn(shape: tuple[int, ...], low: int, high: int, dtype: torch.dtype) -> Tensor:
        return torch.randint(low, high, shape, generator=draw).to(dtype)

    words = (few, code.words(columns)) if code.packed else (few, columns)
    held = {"scales": (torch.rand(grid, generator=draw) / 64 + 1e-4).to(stored_dtype(recipe.scales.dtype))}
    if code.packed:
        held["weight"] = drawn(words, -(1 << 31), 1 << 31, torch.int32)
    else:
        held["weight"] = torch.arange(few * columns).remainder(256).to(torch.uint8).view(few, columns)
        held["weight"] = held["weight"].view(torch.int8 if code.bits else torch.float8_e4m3fn)
    if recipe.zeros is not None:
        packed = code.zeros_packed
        shape = (code.words(few), grid[1]) if packed else grid
        low, high = (-(1 << 31), 1 << 31) if packed else (-(1 << (code.bits or 4) - 1), 1 << (code.bits or 4) - 1)
        held["zeros"] = drawn(shape, low, high, torch.int32 if packed else torch.int8)
    if recipe.order is not None:
        held["order"] = drawn((columns,), 0, grid[1], torch.int32)
    return replace(recipe, code=code, shape=(few, columns), sizes=None), held


def _defined(made: Unpacked, held: dict[str, Tensor]) -> Tensor:
    """(q − z) · s in float64, of numbers read bit by bit."""
    import numpy as np
    import torch

    rows, columns = made.shape
    code, block = made.code, made.code.block
    weight = held["weight"]
    numbers = _bits(weight.numpy(), code, columns) if code.packed else weight.double().numpy()
    of_rows = np.arange(rows) // block[0]
    of_columns = held["order"].numpy() if "order" in held else np.arange(columns) // block[1]
    scales = held["scales"].double().numpy()
    if "zeros" in held:
        zeros = held["zeros"]
        read = _bits(zeros.numpy().T, code, scales.shape[0]).T if code.zeros_packed else zeros.double().numpy()
        numbers = numbers - read[np.ix_(of_rows, of_columns)]
    product = torch.from_numpy(numbers * scales[np.ix_(of_rows, of_columns)])
    return product.to(held["scales"].dtype).to(_Stored(made, {}).dtype(made.dtype))


def _bits(words: np.ndarray[Any, Any], code: Code, count: int) -> np.ndarray[Any, Any]:
    import numpy as np

    stored = np.ascontiguousarray(words).astype("<i4").view(np.uint8).reshape(len(words), -1)
    single = np.unpackbits(stored, axis=1, bitorder="little")[:, : count * code.bits]
    values = single.reshape(len(words), count, code.bits) @ (2.0 ** np.arange(code.bits))
    return np.asarray(values - 2.0 ** (code.bits - 1))


def _by_library(made: Unpacked, held: dict[str, Tensor]) -> Tensor | None:
    """What compressed-tensors makes of it; None where it is not installed, or has no such format any more."""
    try:
        compressors = importlib.import_module("compressed_tensors.compressors")
        quantization = importlib.import_module("compressed_tensors.quantization")
    except ImportError:
        return None
    if made.order is not None:
        return None
    import torch

    (rows, columns), code = made.shape, made.code
    strategy = "group" if code.block[0] == 1 else "block"
    strategy = {(rows, columns): "tensor", (1, columns): "channel"}.get(code.block, strategy)
    weights = quantization.QuantizationArgs(
        num_bits=code.bits or 8,
        type="int" if code.bits else "float",
        symmetric=not code.zeros_packed if code.packed else made.zeros is None,
        strategy=strategy,
        group_size=code.block[1] if strategy == "group" else None,
        block_structure=[*code.block] if strategy == "block" else None,
    )
    stored = {"weight_packed" if code.packed else "weight": held["weight"], "weight_scale": held["scales"]}
    if "zeros" in held:
        stored["weight_zero_point"] = held["zeros"]
    if code.packed:
        stored["weight_shape"] = torch.tensor([rows, columns])
    kind = compressors.BaseCompressor.get_value_from_registry("pack-quantized" if code.packed else "naive-quantized")
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=weights)
    try:
        found: Tensor = kind.decompress(stored, scheme)["weight"]
    except LOAD_FAILURES:
        # It fails on zero points of a few rows, say; what it does not make cannot differ.
        return None
    return found.to(_Stored(made, {}).dtype(made.dtype))
