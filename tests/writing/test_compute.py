"""The evaluator: what recipes compute with, on a tiny base with numbers of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from surgeon.blueprint.blueprint import Blueprint, Output
from surgeon.blueprint.recipes import (
    Bench,
    Constant,
    Copy,
    ExpertLayout,
    OneExpert,
    Random,
    Recipe,
    Summed,
    average,
    extended,
    rows,
    side_by_side,
)
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.errors import BadInput
from surgeon.writing.compute import Evaluator
from tests import tiny

UP, DOWN = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tiny.checkpoint(tmp_path / "base", "llama", shard="1GB")


def opened(base: Path, *outputs: Output, seed: int = 3) -> Evaluator:
    folder = CheckpointFolder.open(base)
    return Evaluator(Blueprint(seed, outputs, {}, (), (), folder.config), folder)


def copy(base: Path, name: str) -> Copy:
    return Copy.of(CheckpointFolder.open(base).tensors[name])


def stored(base: Path) -> dict[str, Tensor]:
    return load_file(base / "model.safetensors")


def spoilt(base: Path, name: str, *at: int) -> None:
    values = stored(base)
    values[name][at] = torch.inf
    save_file(values, base / "model.safetensors", metadata={"format": "pt"})


def test_arithmetic_is_in_float32_and_rounded_once(base: Path) -> None:
    """In bfloat16 the sum of three would be rounded twice."""
    evaluator, values = opened(base), stored(base)
    names = [f"model.layers.{n}.mlp.up_proj.weight" for n in range(3)]
    made = evaluator.compute(Summed(tuple(copy(base, name) for name in names), (1, 1, 1)))
    exact = sum(values[name].double() for name in names)
    narrow = values[names[0]] + values[names[1]] + values[names[2]]
    assert torch.equal(made, exact.bfloat16()) and not torch.equal(made, narrow)
    assert evaluator.working(copy(base, UP)).dtype == torch.float32


def test_an_inner_result_is_rounded_as_if_it_had_been_written(base: Path) -> None:
    evaluator, (one, other) = opened(base), (copy(base, UP), copy(base, DOWN))
    a, b = (stored(base)[name].double() for name in (UP, DOWN))
    twice = ((a + b) / 2).bfloat16().double()
    made = evaluator.compute(average(average(one, other), other))
    assert torch.equal(made, ((twice + b) / 2).bfloat16()) and not torch.equal(made, (a / 4 + b * 3 / 4).bfloat16())


def test_what_a_recipe_changes_in_place_is_a_copy_of_its_own(base: Path) -> None:
    evaluator, recipe = opened(base), copy(base, UP)
    evaluator.kept(recipe)
    evaluator.working(recipe).zero_()
    assert torch.equal(evaluator.kept(recipe), stored(base)[UP])


def test_random_numbers_follow_from_seed_and_key_alone(base: Path) -> None:
    def drawn(seed: int, key: str) -> Tensor:
        return opened(base, seed=seed).compute(Random(key, 1.0, "F32", (4,)))

    digest = hashlib.sha256(b"3:key").digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
    assert torch.equal(drawn(3, "key"), torch.from_numpy(generator.standard_normal(4, dtype=np.float32)))
    assert not torch.equal(drawn(4, "key"), drawn(3, "key")) and not torch.equal(drawn(3, "other"), drawn(3, "key"))


@pytest.mark.parametrize("part", ["whole", "rows", "columns", "expert", "more rows"])
def test_a_number_that_is_not_finite_is_named_by_its_place(part: str, base: Path) -> None:
    """However little of the tensor is read, the place is that in the whole."""
    spoilt(base, UP, 5, 7)
    whole = copy(base, UP)
    recipes: dict[str, Recipe] = {
        "whole": whole,
        "rows": rows([(copy(base, DOWN), 0, 2), (whole, 4, 8)], (6, 32), still=False),
        "columns": whole.columns(6, 9),
        "expert": OneExpert(Copy(whole.spans, "BF16", (3, 16, 32), UP), 0, ExpertLayout(False, False)),
        "more rows": extended(whole, ((),)),
    }
    place = r"\[5, 7\]"
    with pytest.raises(BadInput, match=rf"{UP} \(model.safetensors\): holds inf at {place}"):
        opened(base).compute(recipes[part])
    clean = whole.columns(8, 32)
    assert torch.equal(opened(base).compute(clean), stored(base)[UP][:, 8:])


def test_parts_of_several_tensors_are_read_as_they_lie(base: Path) -> None:
    values, one, other = stored(base), copy(base, UP), copy(base, DOWN)
    wide = side_by_side([one, other.columns(3, 5), Constant(0.5, "BF16", (48, 1))], 1)
    made = opened(base).compute(wide)
    assert torch.equal(made, torch.cat([values[UP], values[DOWN][:, 3:5], torch.full((48, 1), 0.5).bfloat16()], 1))


def test_new_values_that_leave_the_range_are_refused(base: Path) -> None:
    output = Output("new", Summed((Constant(6e4, "F16", (2,)),), (2,)), 0)
    with pytest.raises(BadInput, match="new: the new values leave the range of F16; use a base in a wider dtype"):
        list(opened(base, output).make(output))


@dataclass(frozen=True)
class Wrong(Recipe):
    """Makes fewer numbers than it says."""

    of: Recipe
    dtype: str
    shape: tuple[int, ...]

    @property
    def inputs(self) -> tuple[Recipe, ...]:
        return (self.of,)

    def compute(self, bench: Bench) -> Tensor:
        return bench.working(self.of)[1:]


class Short(Wrong):
    """A recipe of pieces that lack a row."""

    def compute_in_pieces(self, bench: Bench) -> Iterator[memoryview | Tensor]:
        yield self.compute(bench)


def test_a_recipe_that_makes_another_shape_is_refused(base: Path) -> None:
    """As an output, and within another recipe."""
    wrong = Wrong(copy(base, UP), "BF16", (48, 32))

    def made(recipe: Recipe) -> Iterator[memoryview]:
        output = Output("new", recipe, 0)
        return opened(base, output).make(output)

    for recipe in (wrong, average(wrong, wrong)):
        with pytest.raises(BadInput, match=r"new: Wrong makes a tensor of shape \[47, 32\], where .* \[48, 32\] is"):
            list(made(recipe))
    short = Short(copy(base, UP), "BF16", (48, 32))
    with pytest.raises(BadInput, match=r"new: 3008 bytes were made by Short, its BF16 \[48, 32\] has 3072"):
        list(made(short))
