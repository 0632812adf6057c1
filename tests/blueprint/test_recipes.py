"""Every recipe against its formula, in float64 and rounded once; what it reads is what it says that it is made of.

Cases are complete: a class of recipes without one fails, and so does one that reads an input which it does not name.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import Tensor

from surgeon.anatomy.compressed import Code
from surgeon.blueprint import recipes as known
from surgeon.blueprint.recipes import (
    Adapted,
    Below,
    Bench,
    Block,
    Constant,
    Copy,
    Dequantised,
    ExpertLayout,
    Fused,
    Imported,
    Interpolated,
    Joined,
    MapRef,
    Matched,
    Means,
    Noised,
    OneExpert,
    Predicted,
    Product,
    Prompted,
    Random,
    Recipe,
    Shuffled,
    Summed,
    Trained,
    Units,
    Unpacked,
    average,
    columns,
    extended,
    kept_rows,
    one_expert,
    per_layer,
    piled,
    repeated,
    rows,
    side_by_side,
    sliced,
    stacked_experts,
)
from surgeon.checkpoint.header import TensorInfo
from tests.blueprint.table import BASE, ELSEWHERE, NAMES, WHOLE, ZEROS, Mixing, Table, base, pieces_by_run

A, B, C = (BASE[name].double() for name in "abc")
E = BASE["experts"].double()
T4, T6 = Mixing(4).t.double(), Mixing(6).t.double()


def noised(values: Tensor, axis: int, change: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """`values` where half of the rows, or columns, are changed by numbers drawn by `key`."""
    table, count = Table(), values.shape[axis]
    moved = values.movedim(axis, 0).clone()
    where = np.sort(table.draws("neurons").permutation(count)[: count // 2])
    shape = tuple(values.index_select(axis, torch.from_numpy(where)).shape)
    numbers = torch.from_numpy(table.draws("key").standard_normal(shape, dtype=np.float32)).double().movedim(axis, 0)
    moved[where] = change(moved[where], numbers)
    return moved.movedim(0, axis)


def unpacked(weight: Tensor, scales: Tensor) -> Tensor:
    """MXFP4 number by number: sign, two bits of exponent, one of mantissa; an exponent for 32 of them."""
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    out = torch.zeros(*weight.shape[:2], weight.shape[2] * 32, dtype=torch.float64)
    for expert, row, block, byte in np.ndindex(*weight.shape):
        for half, code in enumerate(
            (int(weight[expert, row, block, byte]) & 15, int(weight[expert, row, block, byte]) >> 4)
        ):
            number = values[code & 7] * (-1 if code & 8 else 1) * 2.0 ** (int(scales[expert, row, block]) - 127)
            out[expert, row, block * 32 + byte * 2 + half] = number
    return out.transpose(-1, -2)


def mine(name: str) -> Imported:
    """A tensor of an adapter."""
    return Imported("adapter", "mine", name, "F32", tuple(ELSEWHERE[name].shape))


def trained() -> Tensor:
    """`a` half of the way to trained values, two of its rows all of it to others."""
    made = (A + ELSEWHERE["all"].double()) / 2
    made[[4, 1]] = ELSEWHERE["rows"].double()
    return made


@dataclass(frozen=True)
class Case:
    """A recipe, and the tensor that it is to make."""

    recipe: Recipe
    expected: Tensor
    # What a bit of rounding in float32 may change, of numbers that are not exact there.
    tolerance: float = 0.0


PLAIN, TURNED, BRAIDED = ExpertLayout(False, False), ExpertLayout(True, False), ExpertLayout(True, True)
LORA_A, LORA_B, LENGTHS = (ELSEWHERE[name].double() for name in ("A", "B", "magnitude"))
LOGIT = float(torch.sigmoid(BASE["logit"].float()))
STD = 0.02
GROUPS = torch.arange(48) // 16
STACK = tuple(base(name) for name in "abc")

CASES: dict[str, Case] = {
    "copy": Case(base("a"), A),
    "layers": Case(
        per_layer(base("a"), 0, 3, (2, 0, 0)),
        A.view(3, 2, 4)[[2, 0, 0]].reshape(6, 4),
    ),
    "layers as columns": Case(
        per_layer(base("a"), 1, 2, (1, 0, 1)),
        torch.cat([A[:, 2:], A[:, :2], A[:, 2:]], 1),
    ),
    "rows": Case(
        rows([(base("a"), 1, 3), (base("b"), 0, 2)], (2, 8), still=True),
        torch.cat([A[1:3], B[:2]]).reshape(2, 8),
    ),
    "kept rows": Case(kept_rows(base("a"), (0, 1, 4)), A[[0, 1, 4]]),
    "slices": Case(sliced(base("a"), 2, 5), A[2:5]),
    "slices again": Case(sliced(base("a"), 2, 5, again=True), A[2:5]),
    "columns of rows": Case(rows([(base("a"), 2, 5)], (3, 4), still=False).columns(1, 3), A[2:5, 1:3]),
    "more rows": Case(
        side_by_side([base("a"), Constant(0.5, "BF16", (2, 4)), sliced(base("b"), 1, 3)], 0),
        torch.cat([A, torch.full((2, 4), 0.5), B[1:3]]),
    ),
    "more columns": Case(
        side_by_side([base("a"), base("b")], 1),
        torch.cat([A, B], 1),
    ),
    "piled": Case(piled([base("a"), base("b")], (2, 6, 4)), torch.stack([A, B])),
    "repeated": Case(repeated(base("a"), 3), torch.stack([A, A, A], 1).reshape(18, 4)),
    "stacked": Case(stacked_experts([base("a"), base("b")], PLAIN), torch.stack([A, B])),
    "stacked, turned": Case(stacked_experts([base("a"), base("b")], TURNED), torch.stack([A.T, B.T])),
    "stacked, braided": Case(
        stacked_experts([base("a"), base("b")], BRAIDED),
        torch.stack([each[[0, 3, 1, 4, 2, 5]].T for each in (A, B)]),
    ),
    "constant": Case(Constant(0.3, "BF16", (2, 3)), torch.full((2, 3), 0.3, dtype=torch.float64)),
    "constant between two": Case(Constant(1 + 2**-8, "BF16", (2,)), torch.ones(2)),
    "constants": Case(Constant((1.0, -2.5), "BF16", (2,)), torch.tensor([1.0, -2.5])),
    "random": Case(
        Random("key", STD, "BF16", (6, 4)),
        torch.from_numpy(Table().draws("key").standard_normal((6, 4), dtype=np.float32)).double() * STD,
        tolerance=2**-8,
    ),
    "noised": Case(
        Noised(base("a"), "neurons", "key", 0.5, 0, STD),
        noised(A, 0, lambda old, numbers: old + STD * numbers),
        tolerance=2**-8,
    ),
    "redrawn": Case(
        Noised(base("a"), "neurons", "key", 0.5, 1),
        noised(A, 1, lambda old, numbers: old.mean() + old.std() * numbers),
        tolerance=2**-8,
    ),
    "shuffled": Case(
        Shuffled(base("a"), "key"),
        A.flatten()[torch.from_numpy(Table().draws("key").permutation(24))].view(6, 4),
    ),
    "imported": Case(
        Imported("adapter", "mine", "lora", "BF16", (3, 4)),
        ELSEWHERE["lora"].double(),
    ),
    "taken": Case(
        Imported("model", "other", "theirs", "BF16", (3, 4), (1, 4)),
        ELSEWHERE["theirs"][1:4].double(),
    ),
    "columns taken": Case(
        columns(Imported("model", "other", "theirs", "BF16", (3, 4), (1, 4)), 1, 3, 2.0),
        ELSEWHERE["theirs"][1:4, 1:3].bfloat16().double() * 2,
    ),
    "prompted": Case(
        Prompted((("x", "y"), ("z",)), 2, 0.25, "BF16", (2, 4), ((), ("q",))),
        torch.full((2, 4), 0.5),
    ),
    "fp8": Case(
        Dequantised(base("fp8"), base("fp8 scales"), (2, 3), "BF16", (4, 6)),
        BASE["fp8"].double() * torch.kron(BASE["fp8 scales"].double(), torch.ones(2, 3, dtype=torch.float64)),
        tolerance=2**-8,
    ),
    "mxfp4": Case(
        Dequantised(base("mxfp4"), base("mxfp4 scales"), None, "BF16", (2, 64, 3)),
        unpacked(BASE["mxfp4"], BASE["mxfp4 scales"]),
    ),
    "packed": Case(
        Unpacked(
            weight=base("packed"),
            scales=base("packed scales"),
            zeros=base("packed zeros"),
            sizes=base("packed sizes"),
            code=Code(3, floating=False, packed=True, symmetric=False, strategy="group", block=(1, 16)),
            dtype="BF16",
            shape=(5, 48),
        ),
        ((WHOLE - ZEROS[:, GROUPS]) * BASE["packed scales"].double()[:, GROUPS]).bfloat16().double(),
    ),
    "below": Case(Below(base("a"), (3,)), (A.min() - 2).expand(3)),
    "average": Case(average(base("a"), base("b")), (A + B) / 2),
    "fused": Case(
        Fused(base("a"), base("b"), (Block(0, 6, MapRef("columns"), MapRef("rows")),)),
        (T6.T @ A @ T4 + B) / 2,
    ),
    "fused by columns": Case(
        Fused(base("a"), base("b"), (Block(0, 2, MapRef("columns"), MapRef()), Block(2, 6, MapRef(), MapRef()))),
        (torch.cat([A[:2] @ T4, A[2:]]) + B) / 2,
    ),
    "fused vector": Case(
        Fused(base("v"), base("w"), (Block(0, 6, MapRef(), MapRef("rows")),)),
        (T6.T @ BASE["v"].double() + BASE["w"].double()) / 2,
    ),
    "fused by a map of more": Case(
        Fused(base("a"), base("b"), (Block(0, 6, MapRef("columns"), MapRef("rows"), own=False),)),
        (T6.T @ A @ T4 + B) / 2,
    ),
    "units": Case(
        Units(((base("a"), MapRef("columns"), 0, 2, 2), (base("b"), MapRef(), 1, 0, 2)), 2),
        torch.cat([(A @ T4)[2:].reshape(2, 8), B.T.reshape(2, 12)], 1) / 2,
    ),
    "interpolated": Case(Interpolated(base("a"), base("b"), 0.25), A + 0.25 * (B - A)),
    "interpolated by a logit": Case(
        Interpolated(base("a"), base("b"), base("logit")),
        A + LOGIT * (B - A),
        tolerance=2**-8,
    ),
    "summed": Case(Summed(STACK, (-1, 1, 1)), B + C - A),
    "columns": Case(columns(base("a"), 1, 3, 2.0), A[:, 1:3] * 2),
    "expert": Case(OneExpert(base("experts"), 1, PLAIN), E[1]),
    "expert, turned": Case(OneExpert(base("experts"), 2, TURNED), E[2].T),
    "expert, braided": Case(OneExpert(base("experts"), 0, BRAIDED), E[0].T[[0, 2, 4, 1, 3, 5]]),
    "expert of a sum": Case(
        OneExpert(Summed((base("experts"),), (2,)), 1, PLAIN),
        2 * E[1],
    ),
    "matched": Case(Matched(STACK, 2, "experts"), B),
    "predicted": Case(
        Predicted(STACK, 1, "key", (("hidden", 2),), "fit", keep_poor=False),
        3 * B - C,
    ),
    "means": Case(
        Means(base("a"), ((0, 2, 5), (1,)), 6),
        torch.stack([A[[0, 2, 5]].mean(0), A[1]]),
    ),
    "adapted": Case(
        Adapted(base("a"), (Product(mine("A"), mine("B"), 0.5),), "a", "BF16", "nearest"),
        A + 0.5 * LORA_B @ LORA_A,
        tolerance=2**-8,
    ),
    "adapted twice, turned": Case(
        Adapted(
            base("b"),
            (Product(mine("A of 3"), mine("B of 3"), 2.0, 0.25), Product(mine("A of 3"), mine("B of 3"), 2.0)),
            "b",
            "BF16",
            "nearest",
            turned=True,
        ),
        B + 2.5 * (ELSEWHERE["B of 3"].double() @ ELSEWHERE["A of 3"].double()).T,
        tolerance=2**-8,
    ),
    "adapted by DoRA": Case(
        Adapted(base("a"), (Product(mine("A"), mine("B"), 0.5, magnitude=mine("magnitude")),), "a", "BF16", "nearest"),
        torch.nn.functional.normalize(A + 0.5 * LORA_B @ LORA_A, dim=1) * LENGTHS[:, None],
        tolerance=2**-8,
    ),
    "adapted embedding": Case(
        Adapted(base("a"), (Product(mine("B of 3"), mine("theirs of 3"), 0.5, turned=True),), "a", "BF16", "nearest"),
        A + 0.5 * (ELSEWHERE["theirs of 3"].double() @ ELSEWHERE["B of 3"].double()).T,
        tolerance=2**-8,
    ),
    "adapted, stored turned": Case(
        Adapted(base("c"), (Product(mine("A of 3"), mine("B of 3"), 1.0),), "c", "BF16", "nearest", turned=True),
        C + (ELSEWHERE["B of 3"].double() @ ELSEWHERE["A of 3"].double()).T,
        tolerance=2**-8,
    ),
    "trained": Case(
        Adapted(base("a"), (Trained(mine("all"), 0.5), Trained(mine("rows"), rows=(4, 1))), "a", "BF16", "nearest"),
        trained(),
        tolerance=2**-8,
    ),
    "added": Case(
        Adapted(base("v"), (Trained(mine("magnitude"), 2.0, added=True),), "v", "BF16", "nearest"),
        BASE["v"].double() + 2 * LENGTHS,
        tolerance=2**-8,
    ),
    "extended": Case(
        extended(base("a"), ((0, 2, 5), ())),
        torch.cat([A, A[[0, 2, 5]].mean(0, keepdim=True), A.mean(0, keepdim=True)]),
    ),
}

# Without the library that unpacks it, one cannot be computed.
_UNPACKS = pytest.mark.skipif(find_spec("compressed_tensors") is None, reason="needs compressed-tensors")
COMPUTED = [pytest.param(name, marks=[_UNPACKS] if name == "packed" else []) for name in CASES]


def rounded(case: Case) -> Tensor:
    return case.expected.to(Table().dtype(case.recipe.dtype))


@pytest.mark.parametrize("name", COMPUTED)
def test_it_makes_what_its_formula_says(name: str) -> None:
    """To the bit, in its own shape and dtype; where float32 is not exact, but for one step of bfloat16."""
    case = CASES[name]
    made = Table().compute(case.recipe)
    assert (made.dtype, tuple(made.shape)) == (Table().dtype(case.recipe.dtype), case.recipe.shape)
    off = (made.double() - rounded(case).double()).abs()
    assert bool((off <= case.tolerance * case.expected.abs()).all()), off.max()
    # Rounded once, not on the way too: no tolerance hides a result that is a step off in many places.
    assert float((off > 0).float().mean()) <= 0.1


@pytest.mark.parametrize("name", COMPUTED)
def test_it_reads_what_it_says_that_it_is_made_of(name: str) -> None:
    recipe, table = CASES[name].recipe, Table()
    table.compute(recipe)
    # Which expert is the partner, only the weights say.
    among = recipe.experts if isinstance(recipe, Matched) else (recipe,)
    assert table.map_names <= set(recipe.maps)
    assert table.read_names in [set(each.sources) for each in among]
    assert set(recipe.reads) <= set(recipe.sources)
    assert {leaf.dtype for leaf in recipe.leaves} <= {*NAMES.values()}


# How tensors are made, for people: of a recipe that says what it is, and of one that says more than its name.
HOW = {
    "copy": "a copy of a",
    "rows": "bytes of a, b",
    "more rows": "a copy of a, constant 0.5, bytes of b, side by side",
    "constants": "constant 1.0, -2.5",
    "random": "normal of deviation 0.02, drawn by key",
    "shuffled": "shuffled a",
    "taken": "theirs of the model other",
    "average": "the average of a, b",
    "fused": "the average of a, b, aligned by columns, rows",
    "predicted": "predicted a, b, c",
    "adapted": "a copy of a with 1.0 of 0.5 times A of the adapter mine, B of the adapter mine; rounded as nearest",
    "trained": "a copy of a with 0.5 of all of the adapter mine; 1.0 of rows of the adapter mine in rows 4, 1; rounded"
    " as nearest",
}


@pytest.mark.parametrize("name", CASES)
def test_how_it_is_made_is_said_in_a_line(name: str) -> None:
    how = CASES[name].recipe.how
    assert how == HOW.get(name, how) and how.isprintable() and how.strip() == how != ""


@pytest.mark.parametrize("name", COMPUTED)
def test_its_facts_agree_with_what_it_makes(name: str) -> None:
    """Size, and that the bytes which it holds as they are, and those that stay, are the base's at their places."""
    recipe = CASES[name].recipe
    made = Table().compute(recipe).contiguous()
    assert (recipe.numel, recipe.nbytes) == (made.numel(), made.nbytes) and hash(recipe) == hash(recipe)
    content = stored(made, made.dtype)
    assert all(content[at : at + len(piece)] == piece for at, piece in pieces_by_run(recipe))
    assert set(recipe.kept.spans) <= set(recipe.own.spans) <= set(recipe.pieces.spans)
    assert recipe.pieces.nbytes == recipe.own.nbytes == recipe.kept.nbytes == recipe.nbytes
    if isinstance(recipe, Copy):
        assert recipe.pieces.covered and not recipe.computed
    if isinstance(recipe, Constant):
        assert recipe.data == content and recipe.sha256 == hashlib.sha256(content).hexdigest()
    parts = recipe.compute_in_pieces(Table())
    assert b"".join(part if isinstance(part, memoryview) else stored(part, made.dtype) for part in parts) == content


def stored(value: Tensor, dtype: torch.dtype) -> bytes:
    return value.to(dtype).contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_every_class_has_a_case() -> None:
    classes = {each for each in vars(known).values() if isinstance(each, type) and issubclass(each, Recipe)} - {Recipe}
    assert classes == {type(case.recipe) for case in CASES.values()}


def test_a_bench_is_what_recipes_ask_for() -> None:
    bench: Bench = Table()
    assert {name for name in vars(Bench) if not name.startswith("_")} <= set(dir(bench))


def test_what_is_all_zeros_is_a_hole() -> None:
    assert Constant(0.0, "BF16", (2,)).is_hole and not Constant((0.0, 0.0), "BF16", (2,)).is_hole
    assert not any(case.recipe.is_hole for case in CASES.values())


@pytest.mark.parametrize("still", [True, False])
def test_whole_rows_are_a_copy_of_a_tensor(still: bool) -> None:
    assert rows([(base("a"), 0, 6)], (6, 4), still=still).source == "a"
    assert rows([(base("a"), 0, 6)], (4, 6), still=still).source is None
    assert rows([(base("a"), 0, 5)], (5, 4), still=still).source is None
    assert rows([(base("a"), 0, 5)], (5, 4), still=still).kept.covered is still


def test_of_a_wider_tensor_the_old_part_stays() -> None:
    """Not copies of it, nor what a graft held: they are new."""
    graft = TensorInfo("model.layers.0.mlp.adapter.up_proj.weight", "BF16", (6, 4), "", 0, 48)
    wide = side_by_side([base("a"), sliced(base("a"), 0, 6, again=True), Copy.of(graft)], 1)
    assert [(span.tensor, span.at) for span in wide.kept.spans] == [("a", 0)]
    assert {span.tensor for span in wide.pieces.spans} == {"a", graft.name}


def test_maps_that_one_expert_alone_needs_are_freed_after_it() -> None:
    def expert(by: str) -> Recipe:
        return Fused(base("a"), base("b"), (Block(0, 6, MapRef("columns"), MapRef(by)),))

    table = Table()
    maps = {"rows": "rows", "columns": "columns"}
    both = stacked_experts([expert("rows"), average(base("a"), base("b"))], PLAIN)
    assert both.maps == tuple(reversed(maps)) and both.compute(table).shape == (2, 6, 4)
    assert table.forgotten == {"rows", "columns"}
    table = Table()
    stacked_experts([expert("rows"), expert("rows")], PLAIN).compute(table)
    assert not table.forgotten


@pytest.mark.parametrize("layout", [PLAIN, TURNED, BRAIDED])
def test_one_expert_out_of_many_is_the_simplest_recipe(layout: ExpertLayout) -> None:
    stacked = stacked_experts([base("a"), base("b")], layout)
    assert one_expert(stacked, 1, layout) == base("b")
    whole = average(base("experts"), base("experts"))
    assert one_expert(whole, 1, layout) == average(
        OneExpert(base("experts"), 1, layout), OneExpert(base("experts"), 1, layout)
    )
    zeros = one_expert(Constant(0.0, "BF16", (3, 4, 6)), 1, layout)
    assert zeros == Constant(0.0, "BF16", (4, 6) if layout is PLAIN else (6, 4))
    other = ExpertLayout(not layout.transposed, False)
    assert torch.equal(
        Table().compute(one_expert(stacked, 0, other)),
        other.used(Table().compute(stacked)[0]),
    )
    assert isinstance(stacked, Joined) and math.prod(stacked.shape) == 48
