"""A bench of tensors in memory, on which recipes are tried without a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surgeon.blueprint.recipes import Copy, MapRef, Place, Predictor, Recipe
from surgeon.checkpoint.header import TensorInfo
from surgeon.models.load import stored_dtype
from surgeon.transport.maps import AssignmentMap, Solution, TransportMap
from tests.quantised import pack


def drawn(name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Numbers of a tensor of the base, by its name."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# Whole numbers of three bits, and zero points of groups of them.
WHOLE, ZEROS = (torch.arange(size).mul(5).remainder(8).sub(4).view(5, -1) for size in (240, 15))

BASE: dict[str, Tensor] = {
    "a": drawn("a", 6, 4),
    "b": drawn("b", 6, 4),
    "c": drawn("c", 6, 4),
    "v": drawn("v", 6),
    "w": drawn("w", 6),
    "logit": drawn("logit", 1),
    "experts": drawn("experts", 3, 4, 6),
    "fp8": drawn("fp8", 4, 6).to(torch.float8_e4m3fn),
    "fp8 scales": drawn("fp8 scales", 2, 2, dtype=torch.float32),
    "mxfp4": torch.arange(2 * 3 * 2 * 16).mul(37).remainder(256).to(torch.uint8).view(2, 3, 2, 16),
    "mxfp4 scales": torch.arange(12).add(121).to(torch.uint8).view(2, 3, 2),
    "packed": pack(WHOLE, 3),
    "packed scales": drawn("packed scales", 5, 3),
    "packed zeros": pack(ZEROS.T, 3).T.contiguous(),
    "packed sizes": torch.tensor([5, 48]),
}
ELSEWHERE = {
    name: drawn(name, *shape, dtype=torch.float32)
    for name, shape in {
        **{"lora": (3, 4), "theirs": (6, 4)},
        **{
            "A": (2, 4),
            "B": (6, 2),
            "magnitude": (6,),
            "A of 3": (6, 6),
            "B of 3": (4, 6),
            "theirs of 3": (4, 4),
            "rows": (2, 4),
            "all": (6, 4),
        },
    }.items()
}
NAMES = {
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
}


def base(name: str) -> Copy:
    value = BASE[name]
    return Copy.of(TensorInfo(name, NAMES[value.dtype], tuple(value.shape), "", 0, value.nbytes))


class Mixing(TransportMap):
    """A map whose T is given, with entries that no sum rounds."""

    def __init__(self, size: int) -> None:
        self.solution = Solution(size, size, 1, True, 0.0, 0.0, 0.0, 0.0)
        self.t = (torch.eye(size) + torch.eye(size).roll(1, 0)) / 2

    def align_rows(self, weight_ND: Tensor) -> Tensor:
        return self.t.T @ weight_ND

    def align_columns(self, weight_RN: Tensor) -> Tensor:
        return weight_RN @ self.t

    def matrix(self) -> Tensor:
        return self.t


MATCHING = AssignmentMap(
    torch.tensor([1, 2, 0]), factor=3.0, dtype=torch.float32, solution=Solution(3, 3, 1, True, 0.0, 0.0, 0.0, 0.0)
)
MAPS: dict[str, TransportMap] = {"rows": Mixing(6), "columns": Mixing(4), "experts": MATCHING}


@dataclass
class Table:
    """A bench of tensors in memory, which keeps what recipes ask for."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    read_names: set[str] = field(default_factory=set)
    map_names: set[str] = field(default_factory=set)
    forgotten: set[str] = field(default_factory=set)
    records: dict[str, dict[str, float | int | None]] = field(default_factory=dict)

    def dtype(self, name: str) -> torch.dtype:
        return next((dtype for dtype, known_as in NAMES.items() if known_as == name), None) or stored_dtype(name)

    def compute(self, recipe: Recipe) -> Tensor:
        made = recipe.compute(self)
        assert tuple(made.shape) == recipe.shape, recipe
        return made.to(self.dtype(recipe.dtype))

    def working(self, recipe: Recipe) -> Tensor:
        return self.compute(recipe).to(torch.float32, copy=True)

    def kept(self, recipe: Recipe) -> Tensor:
        return self.compute(recipe)

    def read(self, recipe: Recipe) -> Tensor:
        whole = bytearray()
        for at, piece in sorted(pieces_by_run(recipe)):
            assert at == len(whole), recipe
            whole += piece
        self.read_names |= {*recipe.pieces.tensors}
        return torch.frombuffer(whole, dtype=self.dtype(recipe.dtype)).view(recipe.shape)

    def read_rows(self, recipe: Recipe, begin: int, end: int) -> tuple[memoryview, Tensor]:
        found = self.read(recipe)[begin:end].contiguous()
        return memoryview(bytearray(found.view(torch.uint8).numpy().tobytes())), found

    def imported(self, place: Place, name: str, tensor: str) -> Tensor:
        assert (place, name) == (("model", "other") if tensor == "theirs" else ("adapter", "mine"))
        return ELSEWHERE[tensor].clone()

    def draws(self, key: str) -> np.random.Generator:
        return np.random.default_rng([*key.encode()])

    def map_of(self, ref: MapRef) -> TransportMap:
        assert ref.coupling is not None and not ref.half_identity
        self.map_names.add(ref.coupling)
        return MAPS[ref.coupling]

    def aligned(self, coupling: str) -> Tensor:
        assert coupling == "rows"
        return self.working(base("a")) @ Mixing(4).t

    def align_columns(self, matrix: Tensor, ref: MapRef) -> Tensor:
        return matrix if ref.coupling is None else self.map_of(ref).align_columns(matrix)

    def align_rows(self, matrix: Tensor, ref: MapRef) -> Tensor:
        return matrix if ref.coupling is None else self.map_of(ref).align_rows(matrix)

    def forget(self, couplings: Iterable[str]) -> None:
        self.forgotten |= {*couplings}

    def prompted(self, prompts: Sequence[Sequence[str]], against: Sequence[Sequence[str]]) -> Mapping[int, Tensor]:
        assert (prompts, against) == ((("x", "y"), ("z",)), ((), ("q",)))
        return {layer: torch.full((2, 4), float(layer)) for layer in range(3)}

    def predictor(
        self, stack: tuple[Recipe, ...], key: str, settings: tuple[tuple[str, Any], ...], *, fit: str, keep_poor: bool
    ) -> Predictor:
        assert (len(stack), key, settings, fit, keep_poor) == (3, "key", (("hidden", 2),), "fit", False)
        for each in stack:
            self.compute(each)
        return Steep()

    def record(self, name: str, figures: Mapping[str, float | int | None]) -> None:
        self.records[name] = dict(figures)

    def stage(self, name: str) -> nullcontext[None]:
        return nullcontext()


class Steep:
    """Predicts three parts of the lower matrix less one of the upper."""

    def between(self, lower: Tensor, upper: Tensor) -> Tensor:
        return 3 * lower - upper


def pieces_by_run(recipe: Recipe) -> Iterator[tuple[int, bytes]]:
    """The runs of a recipe's pieces by their place, cut out of the base one by one."""
    for span in recipe.pieces.spans:
        content = BASE[span.tensor].contiguous().view(torch.uint8).numpy().tobytes()
        for run in range(span.count):
            begin = span.offset + run * span.step
            yield span.at + run * span.every, content[begin : begin + span.length]
