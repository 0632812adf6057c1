"""Recipes: how each output tensor is made. Frozen data; nothing here reads or computes a weight.

A recipe may build on other recipes (an average of a layer that an earlier operation of the same plan fused),
so a chain of operations is an expression, and a later operation sees exactly what the earlier one would
have written: inner results are rounded to their dtype before they are used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from surgeon.checkpoint.header import DTYPE_BITS
from surgeon.checkpoint.pieces import Pieces, indices, side_by_side
from surgeon.families.anatomy import of_graft


@dataclass(frozen=True, slots=True)
class Copy:
    """The base tensor `source`, byte for byte."""

    source: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes of the base, as `pieces` says, read as a tensor of `shape`."""

    pieces: Pieces
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PerLayer:
    """The parts that `of` holds for each of `count` layers along `axis`, byte for byte, in another order.

    Part `n` of the result is part `order[n]` of it.
    """

    of: Copy
    axis: int
    count: int
    order: tuple[int, ...]

    @property
    def dtype(self) -> str:
        """The dtype of what the parts are taken from."""
        return self.of.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """That of what the parts are taken from, with so many of them along the axis."""
        before, size, after = self.of.shape[: self.axis], self.of.shape[self.axis], self.of.shape[self.axis + 1 :]
        return (*before, size // self.count * len(self.order), *after)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows `start:stop` of a tensor of the base."""

    of: Copy
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Joined:
    """Rows of tensors of the base, one piece below the other, byte for byte, read as a tensor of `shape`.

    `still`: the base computes with it, under another name, so it does not train with what is new.
    """

    pieces: tuple[Rows, ...]
    dtype: str
    shape: tuple[int, ...]
    still: bool

    @property
    def whole(self) -> Copy | None:
        """The tensor of the base that it is, all of it; None where it is another."""
        piece = self.pieces[0]
        entire = len(self.pieces) == 1 and (piece.start, piece.stop) == (0, piece.of.shape[0])
        return piece.of if entire and piece.of.shape == self.shape else None


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns `start:stop` of a matrix, times `factor`."""

    of: Recipe
    start: int
    stop: int
    factor: float

    @property
    def dtype(self) -> str:
        """The dtype of the matrix."""
        return self.of.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """As many rows, and these columns."""
        return (self.of.shape[0], self.stop - self.start)


@dataclass(frozen=True, slots=True)
class _OfOne:
    """What is made of one tensor, of its dtype and shape."""

    of: Recipe

    @property
    def dtype(self) -> str:
        """The dtype of what it is made of."""
        return self.of.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what it is made of."""
        return self.of.shape


@dataclass(frozen=True, slots=True)
class Noised(_OfOne):
    """`of` with normal noise on a `share` of its neurons, of the deviation `std`, or `std` times that of `of`.

    Neurons are rows (`axis` 0) or columns (1); which, (the seed, `neurons`) says, the noise (the seed, `key`).
    """

    neurons: str
    key: str
    std: float
    relative: bool
    share: float
    axis: int


@dataclass(frozen=True, slots=True)
class Redrawn(_OfOne):
    """`of` with a `share` of its neurons drawn anew, normal with the mean and the deviation of what they held.

    Neurons are rows (`axis` 0) or columns (1); which, (the seed, `neurons`) says, their values (the seed, `key`).
    """

    neurons: str
    key: str
    share: float
    axis: int


@dataclass(frozen=True, slots=True)
class Repeated:
    """Each row of `of` so many `times`, one below the other."""

    of: Recipe
    times: int

    @property
    def dtype(self) -> str:
        """The dtype of the rows."""
        return self.of.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """So many times the rows."""
        return (self.of.shape[0] * self.times, *self.of.shape[1:])


@dataclass(frozen=True, slots=True)
class Piled:
    """Matrices one below the other, read as a tensor of `shape`."""

    parts: tuple[Recipe, ...]
    shape: tuple[int, ...]

    @property
    def dtype(self) -> str:
        """The dtype that the matrices share."""
        return self.parts[0].dtype


@dataclass(frozen=True, slots=True)
class Constant:
    """Every element is `value` (0, or the value that makes a norm's effective scale zero or one)."""

    value: float
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Listed:
    """A short vector of these values (the two biases of a gate)."""

    values: tuple[float, ...]
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Random:
    """Normal with mean zero and standard deviation `std`, seeded from (the plan's seed, `key`)."""

    key: str
    std: float
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prompted:
    """A row for each list of `prompts`: what layer `layer`'s MLP reads of them on average, scaled to length `norm`.

    Before that, what it reads on average of the list in `against` of the same number, if there are any, is taken away.
    """

    prompts: tuple[tuple[str, ...], ...]
    layer: int
    norm: float
    dtype: str
    shape: tuple[int, ...]
    against: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Imported:
    """The tensor `tensor` of the adapter that the plan calls `adapter`, rounded to nearest where `dtype` is another."""

    adapter: str
    tensor: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Taken:
    """Rows `start:stop` of the tensor `tensor` of another model, which the plan calls `model`, rounded to `dtype`."""

    model: str
    tensor: str
    start: int
    stop: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Dequantised:
    """The numbers that a quantised tensor stands for: `weight` times its `scales`, rounded once to `dtype`.

    `block` is rows by columns of FP8 numbers that share a scale. None: MXFP4, 32 numbers to an exponent, whose matrices
    are stored the other way round than they are used.
    """

    weight: Copy
    scales: Copy
    block: tuple[int, int] | None
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _OfTwo:
    """What is made of one tensor of two layers: `first` of the lower, `second` of the upper one."""

    first: Recipe
    second: Recipe

    @property
    def dtype(self) -> str:
        """The dtype of the second source."""
        return self.second.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of both sources."""
        return self.second.shape


@dataclass(frozen=True, slots=True)
class Average(_OfTwo):
    """½ (first + second), element by element."""


@dataclass(frozen=True, slots=True)
class MapRef:
    """A transport map by the name of its coupling (None: the identity), perhaps as ½ (T + I)."""

    coupling: str | None = None
    half_identity: bool = False


IDENTITY = MapRef()


@dataclass(frozen=True, slots=True)
class Block:
    """Rows `start:stop` of a tensor, aligned by `t_in` from the right and `t_out` from the left."""

    start: int
    stop: int
    t_in: MapRef
    t_out: MapRef


@dataclass(frozen=True, slots=True)
class Fused(_OfTwo):
    """½ (T_outᵀ · first · T_in + second), block of rows by block (OpT-DeUS, Algorithm 1, lines 6, 8, 9).

    A vector (bias, norm scale) has no input side: ½ (T_outᵀ · first + second).
    """

    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class OneExpert:
    """Expert `number`'s share of a tensor that holds all of them, a matrix as outputs by inputs, gate above up.

    `transposed`: it is stored inputs by outputs; `interleaved`: rows of gate and up alternate there.
    """

    of: Recipe
    number: int
    transposed: bool
    interleaved: bool

    @property
    def dtype(self) -> str:
        """The dtype of the whole."""
        return self.of.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the expert's share, as it is used."""
        first, *rest = self.of.shape[1:]
        return (*rest, first) if self.transposed else (first, *rest)


@dataclass(frozen=True, slots=True)
class Matched:
    """Of `experts`, one tensor of each, that of the expert which the coupling `by` matches with expert `number`.

    Which one that is, only the weights say: the expert of the same number stands for it where sources are listed, so
    that those of a whole layer are complete.
    """

    experts: tuple[Recipe, ...]
    number: int
    by: str

    @property
    def dtype(self) -> str:
        """The dtype that the tensors share."""
        return self.experts[self.number].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the tensors share."""
        return self.experts[self.number].shape


@dataclass(frozen=True, slots=True)
class Stacked:
    """The fused tensors of all experts in one, stored as `OneExpert` says."""

    experts: tuple[Fused, ...]
    transposed: bool
    interleaved: bool

    @property
    def dtype(self) -> str:
        """The dtype that the tensors share."""
        return self.experts[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Experts first, then each one's shape as it is stored."""
        inner = self.experts[0].shape
        return (len(self.experts), *(reversed(inner) if self.transposed else inner))


@dataclass(frozen=True, slots=True)
class Shuffled(_OfOne):
    """The elements of `of` in a random order, seeded from (the plan's seed, `key`) (OpT-DeUS, Table 7)."""

    key: str


@dataclass(frozen=True, slots=True)
class Predicted:
    """What a network predicts between matrices `below` and `below + 1` of `stack`, one of each layer (LESA).

    `settings` are those of `surgeon.apply.prediction.PredictionSettings`, as sorted pairs; draws are seeded from (the
    plan's seed, `key`). Recipes of one stack, key and settings share the network, whose fit is recorded as `fit`. A
    network that explains no variance is refused unless `keep_poor`.
    """

    stack: tuple[Recipe, ...]
    below: int
    key: str
    settings: tuple[tuple[str, Any], ...]
    fit: str
    keep_poor: bool

    @property
    def dtype(self) -> str:
        """The dtype of the upper neighbour."""
        return self.stack[self.below + 1].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the matrices share."""
        return self.stack[self.below + 1].shape

    @property
    def network(self) -> tuple[object, ...]:
        """What recipes share that share a network."""
        return self.key, self.settings, self.stack


@dataclass(frozen=True, slots=True)
class Interpolated(_OfTwo):
    """first + α (second - first), element by element, rounded once (Control LLM, Lerp8MSE0*M).

    `first` is of the pretrained branch and `second` of the expanded one. `alpha` is the share of `second`; a recipe of
    one number is its logit.
    """

    alpha: float | Recipe


@dataclass(frozen=True, slots=True)
class Summed:
    """Σ factor · term / divisor by element, in float32, rounded once: LaCo's θ_l + Σ (θ_{l+k} − θ_l), or a mean."""

    terms: tuple[Recipe, ...]
    factors: tuple[int, ...]
    divisor: int = 1

    @property
    def dtype(self) -> str:
        """The dtype of the first term."""
        return self.terms[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the terms share."""
        return self.terms[0].shape


@dataclass(frozen=True, slots=True)
class Sliced:
    """Elements `start` to `stop` of the base tensor `of` along its first axis; `again`: they stand elsewhere too."""

    of: Copy
    start: int
    stop: int
    again: bool = False

    @property
    def dtype(self) -> str:
        """The dtype of what is cut."""
        return self.of.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what is cut out."""
        return (self.stop - self.start, *self.of.shape[1:])


@dataclass(frozen=True, slots=True)
class Widened:
    """Tensors side by side along `axis`, byte for byte: a matrix with more rows, or more columns."""

    parts: tuple[Recipe, ...]
    axis: int

    @property
    def dtype(self) -> str:
        """The dtype of the first part."""
        return self.parts[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole."""
        first, axis = self.parts[0].shape, self.axis
        return (*first[:axis], sum(part.shape[axis] for part in self.parts), *first[axis + 1 :])


# Products in float32 with few rows on the CPU take so many output columns at once (measured with MKL on AVX-512, one
# thread and two: results/head_width.md): the last V mod 4 logits are summed in another order, and of a head with more
# rows these stand within a whole block.
HEAD_BLOCK = 4


@dataclass(frozen=True, slots=True)
class Extended:
    """The tensor `of` with more rows below its own, each the mean of rows of `of`: those named, or of all of them.

    `made_of` says which, one entry for each new row; an empty one means all. The bytes of `of` come first.
    """

    of: Copy
    made_of: tuple[tuple[int, ...], ...]

    @property
    def dtype(self) -> str:
        """The dtype of what is extended."""
        return self.of.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape with the new rows."""
        return (self.of.shape[0] + len(self.made_of), *self.of.shape[1:])


Recipe = (
    Copy
    | Moved
    | PerLayer
    | Joined
    | Columns
    | Noised
    | Redrawn
    | Repeated
    | Piled
    | Constant
    | Listed
    | Random
    | Prompted
    | Imported
    | Taken
    | Dequantised
    | Average
    | Fused
    | OneExpert
    | Matched
    | Stacked
    | Shuffled
    | Predicted
    | Interpolated
    | Summed
    | Sliced
    | Widened
    | Extended
)


def one_expert(of: Recipe, number: int, *, transposed: bool, interleaved: bool) -> Recipe:
    """Expert `number`'s share of a tensor of all experts, the simplest recipe that makes it."""
    match of:
        case Stacked(experts) if (of.transposed, of.interleaved) == (transposed, interleaved):
            return experts[number]
        case Average(first, second):
            lower = one_expert(first, number, transposed=transposed, interleaved=interleaved)
            return Average(lower, one_expert(second, number, transposed=transposed, interleaved=interleaved))
        case Constant(value, dtype):
            return Constant(value, dtype, OneExpert(of, number, transposed, interleaved).shape)
        case _:
            return OneExpert(of, number, transposed, interleaved)


@dataclass(frozen=True, slots=True)
class WholeHeads:
    """Couplings solved together, whole attention heads onto whole heads: those named, of query, key and value.

    `output` is the attention output of both layers, whose columns count in the comparison of heads.
    """

    query: str
    key: str
    value: str
    output: tuple[Recipe, Recipe]
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def names(self) -> tuple[str, str, str]:
        """The couplings of query, key and value."""
        return self.query, self.key, self.value


@dataclass(frozen=True, slots=True)
class TextSupport:
    """Rows are compared by their modules' outputs on the first `samples` tokens of a text, in windows."""

    text: str
    samples: int
    window: int


@dataclass(frozen=True, slots=True)
class Coupling:
    """A transport map that several recipes share: rows `start:stop` of `first` (after `t_in`) onto those of `second`.

    `settings` are the keyword arguments of `surgeon.transport.TransportSettings`, kept as sorted pairs so
    that this stays plain data. With `whole_heads` it is one of three that are solved together. `support` None compares
    the rows themselves; else `first` and `second` are tensors of the base, whose modules are run. With `groups` the
    rows are those of routers, and the map is a permutation of experts, which form so many groups. `cost_first` compares
    the rows of `first` before `t_in`, which then only moves them.
    """

    name: str
    first: Recipe
    second: Recipe
    start: int
    stop: int
    t_in: MapRef
    settings: tuple[tuple[str, Any], ...]
    whole_heads: WholeHeads | None = None
    support: TextSupport | None = None
    groups: int | None = None
    cost_first: bool = False


def sources(recipe: Recipe) -> Iterator[Recipe]:
    """The direct inputs of `recipe`."""
    match recipe:
        case Average(first, second) | Fused(first, second, _):
            yield first
            yield second
        case Dequantised(weight, scales):
            yield weight
            yield scales
        case Joined(pieces):
            yield from dict.fromkeys(piece.of for piece in pieces)
        case OneExpert(of) | Extended(of, _) | PerLayer(of) | Columns(of) | _OfOne(of) | Repeated(of):
            yield of
        case Sliced(of):
            yield of
        case Widened(parts):
            yield from parts
        case Matched(experts, number):
            yield experts[number]
        case Stacked(experts):
            yield from experts
        case Predicted(stack):
            yield from stack
        case Piled(parts):
            yield from parts
        case Summed(terms):
            yield from terms
        case Interpolated(first, second, alpha):
            yield first
            yield second
            if not isinstance(alpha, float):
                yield alpha
        case _:
            return


def leaves(recipe: Recipe) -> Iterator[Recipe]:
    """The recipes at the bottom of the expression, in order, repeats included."""
    below = list(sources(recipe))
    if not below:
        yield recipe
    for source in below:
        yield from leaves(source)


def maps_used(recipe: Recipe) -> tuple[str, ...]:
    """Names of the couplings whose maps `recipe` needs directly, in order, each once."""
    refs = [ref for block in recipe.blocks for ref in (block.t_in, block.t_out)] if isinstance(recipe, Fused) else []
    direct = [ref.coupling for ref in refs if ref.coupling is not None]
    direct += [recipe.by] if isinstance(recipe, Matched) else []
    below = [name for source in sources(recipe) for name in maps_used(source)]
    return tuple(dict.fromkeys([*direct, *below]))


def describe(recipe: Recipe) -> dict[str, Any]:
    """The recipe as JSON data for the manifest; nested recipes stay nested."""
    match recipe:
        case Copy(source):
            return {"copy": source}
        case Moved(pieces):
            return {"moved": [*pieces.tensors]}
        case PerLayer(of, axis, _, order):
            return {"per_layer": of.source, "axis": axis, "order": list(order)}
        case Joined(pieces, still=still):
            return {"rows": [[piece.of.source, piece.start, piece.stop] for piece in pieces], "still": still}
        case Noised(of, neurons, key):
            size = {"std": recipe.std, "relative": recipe.relative}
            return {"noised": describe(of), "neurons": neurons, "key": key, "share": recipe.share, **size}
        case Redrawn(of, neurons, key):
            return {"redrawn": describe(of), "neurons": neurons, "key": key, "share": recipe.share}
        case Columns(of, start, stop, factor):
            return {"columns": describe(of), "from": start, "to": stop, "times": factor}
        case Repeated(of, times):
            return {"repeated": describe(of), "times": times}
        case Piled(parts):
            return {"piled": [describe(part) for part in parts]}
        case Constant(value):
            return {"constant": value}
        case Listed(values):
            return {"values": list(values)}
        case Random(key, std):
            return {"random": key, "std": std}
        case Imported(adapter, tensor):
            return {"imported": tensor, "adapter": adapter}
        case Prompted(prompts, layer, norm):
            told = {"prompted": layer, "prompts": [len(listed) for listed in prompts], "norm": norm}
            return told | ({"against": [len(listed) for listed in recipe.against]} if recipe.against else {})
        case Taken(model, tensor, start, stop):
            return {"taken": tensor, "model": model, "from": start, "to": stop}
        case Average(first, second):
            return {"average": [describe(first), describe(second)]}
        case Fused(first, second, blocks):
            return {
                "fused": [describe(first), describe(second)],
                "blocks": [
                    {"rows": [b.start, b.stop], "t_in": _map_text(b.t_in), "t_out": _map_text(b.t_out)} for b in blocks
                ],
            }
        case Dequantised(weight, scales):
            return {"dequantised": [describe(weight), describe(scales)]}
        case OneExpert(of, number):
            return {"expert": number, "of": describe(of)}
        case Matched(experts, number, by):
            return {"matched": number, "by": by, "of": describe(experts[number])}
        case Stacked(experts):
            return {"stacked": [describe(expert) for expert in experts]}
        case Shuffled(of, key):
            return {"shuffled": describe(of), "key": key}
        case Predicted(stack, below, key):
            return {
                "predicted": [describe(recipe) for recipe in stack[below : below + 2]],
                "key": key,
                "of": len(stack),
            }
        case Extended(of, made_of):
            # Which rows is said by the vocabulary's own entry in the manifest.
            return {"extended": describe(of), "rows": len(made_of), "named": sum(map(bool, made_of))}
        case Sliced(of, start, stop):
            return {"again" if recipe.again else "copy": of.source, "rows": [start, stop]}
        case Widened(parts, axis):
            sizes = [part.shape[axis] for part in parts]
            return {"joined": [describe(part) for part in parts], "axis": axis, "sizes": sizes}
        case Summed(terms, factors):
            summed = {"summed": [describe(term) for term in terms], "factors": list(factors)}
            return {**summed, "divisor": recipe.divisor} if recipe.divisor > 1 else summed
        case Interpolated(first, second, alpha):
            share = alpha if isinstance(alpha, float) else {"sigmoid": describe(alpha)}
            return {"interpolated": [describe(first), describe(second)], "alpha": share}


def _map_text(ref: MapRef) -> str:
    if ref.coupling is None:
        return "identity"
    return f"½({ref.coupling} + identity)" if ref.half_identity else ref.coupling


def numel(recipe: Recipe) -> int:
    """Number of elements of the tensor the recipe makes."""
    return math.prod(recipe.shape)


def fits_of(recipe: Recipe) -> Iterator[str]:
    """Names of the fits of the networks that predict something the recipe is made of."""
    if isinstance(recipe, Predicted):
        yield recipe.fit
    for source in sources(recipe):
        yield from fits_of(source)


def is_computed(recipe: Recipe) -> bool:
    """Whether the recipe needs computation, so that weights must be read into memory."""
    return not isinstance(recipe, Copy | Moved | PerLayer | Joined | Constant | Listed)


def moves(recipe: Recipe) -> Pieces:
    """The bytes of the base that a recipe lays into its tensor as they are, and where."""
    bits, shape = DTYPE_BITS[recipe.dtype], recipe.shape
    nbytes = numel(recipe) * bits // 8
    match recipe:
        case Moved(pieces):
            return pieces
        case Copy(source):
            return Pieces.whole(source, nbytes)
        case PerLayer(of, axis, count, order):
            size = of.shape[axis] // count
            slices = [part * size + nth for part in order for nth in range(size)]
            return indices(of.source, of.shape, bits, axis, slices)
        case Joined(pieces):
            rows = [indices(p.of.source, p.of.shape, bits, 0, range(p.start, p.stop)) for p in pieces]
            return _stacked(rows, before=1)
        case Sliced(of, start, stop):
            return indices(of.source, of.shape, bits, 0, range(start, stop))
        case Widened(parts, axis):
            before = math.prod(shape[:axis])
            return _stacked([moves(part) for part in parts], before=before)
        case Extended(of):
            return Pieces(nbytes, moves(of).spans)
        case _:
            return Pieces(nbytes, ())


def keeps(recipe: Recipe) -> Pieces:
    """Those bytes of a new tensor that are the base's own, and stay as they are where what is new trains.

    Of a copy there are none: it begins as what it was copied from. What a graft held is as new as it was.
    """
    found = moves(recipe)
    match recipe:
        case PerLayer() | Extended() | Joined(still=True):
            return found
        case Widened(parts, axis):
            own = [moves(part) if _is_own(part) else Pieces(moves(part).nbytes, ()) for part in parts]
            return _stacked(own, before=math.prod(recipe.shape[:axis]))
        case _:
            return Pieces(found.nbytes, ())


def _is_own(part: Recipe) -> bool:
    """Whether a part of a wider tensor is the base's own, in the one place that it has."""
    moved = isinstance(part, Copy) or (isinstance(part, Sliced) and not part.again)
    return moved and not any(map(of_graft, moves(part).tensors))


def _stacked(parts: Sequence[Pieces], *, before: int) -> Pieces:
    """Parts side by side, `before` times a run of each."""
    places = side_by_side([part.nbytes // before for part in parts], before=before)
    inner = {str(nth): part for nth, part in enumerate(parts)}
    return Pieces.of(sum(part.nbytes for part in parts), places).through(inner)
