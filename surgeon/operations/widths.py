"""What operations that change widths share: an FFN's, or attention's, tensors with more rows or columns.

Sums over a wider FFN, or over more heads, are taken in another order by most kernels, so the function is the same in
exact arithmetic and logits differ by rounding, also where everything new is zero: on CPUs in float32 in most shapes, in
bfloat16 in some.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from surgeon.blueprint.draft import Draft
from surgeon.blueprint.recipes import Constant, Copy, Joined, Random, Recipe, side_by_side, sliced, sliced_along
from surgeon.common.formatting import show_layers
from surgeon.errors import BadInput, printable
from surgeon.families.anatomy import LayerKind
from surgeon.families.family import Part, Role, inner_width
from surgeon.runtime.composition import FFN

# What predicts further tokens, where it is no layer above the stack.
_FURTHER = ("mtp.", "model.mtp.")
# K-quants pack so many numbers together; no kernel needs more.
MOST_DIVIDED = 256
# Of experts: 16 bytes of bfloat16.
_OF_EXPERTS = 8
ROUNDING = "sums over more of them are taken in another order, so logits differ by rounding"


def divisor_of(size: int) -> int:
    """The largest power of two, up to `MOST_DIVIDED`, that divides a size."""
    return math.gcd(size, MOST_DIVIDED)


def check_alone(draft: Draft, size: str) -> None:
    """Raise BadInput where an earlier operation of the plan changed something else than widths, or this `size` too."""
    if draft.records and not draft.widths:
        raise BadInput("widths change in a plan of their own: apply the operations before it first, then this one")
    if draft.widths and "hidden_size" in (size, *draft.widths):
        raise BadInput("a wider residual stream stands in a plan of its own: apply two plans")
    beyond = [info.name for tensors in draft.anatomy.beyond for info in tensors.values()]
    beyond += [name for name in draft.anatomy.idle if name.startswith(_FURTHER)]
    if beyond:
        raise BadInput(
            f"{printable(beyond[0])}: a layer that predicts further tokens has the widths of the others, and surgeon"
            " does not change it; take these layers out first"
        )
    if size in draft.sizes:
        raise BadInput(f"an earlier operation of this plan changes `{size}` too: join the two, or apply two plans")


def parts_with(draft: Draft, layer: int, roles: Sequence[Role]) -> dict[str, Part]:
    """The tensors of a layer that hold rows of modules of these roles, by suffix.

    Raises BadInput where one of the roles is not there as one plain matrix, as in a mixture of experts.
    """
    kind = draft.kind_of(layer)
    found: dict[str, Part] = {}
    for part in kind.parts:
        named = [role for role, _ in part.blocks if role in roles]
        if named and part.expert is not None:
            raise BadInput(
                f"layer {layer} ({printable(part.suffix)}): its FFN is a mixture of experts, which see"
                " some of the tokens, and what is to be a part of it sees all"
            )
        if named:
            found[part.suffix] = part
    known = [role for part in found.values() if part.kind == "weight" for role, _ in part.blocks]
    if wrong := next((role for role in roles if known.count(role) != 1), None):
        raise BadInput(
            f"layer {layer}: {known.count(wrong)} modules are known as its {wrong} projection, where one is needed; the"
            " width of this model cannot change"
        )
    if kind.packed:
        raise BadInput(f"layer {layer} is quantised: widen the full-precision model, and quantise the output")
    return found


# Of each kind of layers, the tensors that become larger, by suffix: along which axis, from and to how many.
Growths = Sequence[Mapping[str, tuple[int, int, int]]]


@dataclass(frozen=True)
class Neurons:
    """The neurons of one module in a tensor of a layer: along `axis` those from `begin` on, `count`, and `more` new."""

    suffix: str
    role: Role
    of: Copy
    axis: int
    begin: int
    count: int
    more: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what is new."""
        return (*self.of.shape[: self.axis], self.more, *self.of.shape[self.axis + 1 :])

    @property
    def zeros(self) -> tuple[Recipe, ...]:
        """Zeros for what is new."""
        return (Constant(0.0, self.of.dtype, self.shape),)

    @property
    def repeated(self) -> tuple[Recipe, ...]:
        """Copies of the lowest neurons, in turn."""
        turns = [min(self.count, self.more - done) for done in range(0, self.more, self.count)]
        return tuple(sliced_along(self.of, self.axis, self.begin, self.begin + n, again=True) for n in turns)


_FFN: tuple[Role, ...] = ("gate", "up", "down")


def wider_ffns(draft: Draft, *, by: int = 0, multiple_of: int = 1) -> tuple[dict[str, int], Growths]:
    """The config's fields with which every FFN is wider, and what grows with them: `by`, or up to a multiple.

    Raises BadInput where an FFN's width follows from no field that is known.
    """
    before = draft.anatomy.sizes.intermediate
    plain = [_plain_neurons(kind, before) for kind in draft.anatomy.kinds]
    if before and all(each is not None for each in plain):
        after = before + (by or -before % multiple_of)
        grown = [{suffix: (axis, before, after) for suffix, axis in (each or {}).items()} for each in plain]
        return ({"intermediate_size": after} if after > before else {}), grown
    fields = draft.anatomy.derivation.inner_fields(by=by, multiple_of=multiple_of)
    grown = list(draft.anatomy.derivation.growths(fields)) if fields else []
    for number, found in enumerate(grown):
        known = {part.suffix for part in draft.anatomy.kinds[number].parts if _of_ffn(part)}
        if unknown := sorted(found.keys() - known):
            raise BadInput(
                f"layer {draft.anatomy.kind_of.index(number)} ({printable(unknown[0])}): grows with"
                f" {' and '.join(f'`{field}`' for field in fields)}, and what of it is a neuron is not known, so this"
                " model's FFNs cannot become wider"
            )
        _check_experts(draft, number, found)
    return fields, grown


def _check_experts(draft: Draft, number: int, grown: Mapping[str, tuple[int, int, int]]) -> None:
    """Raise BadInput where experts would have rows that kernels which multiply all of them at once do not take."""
    for part in draft.anatomy.kinds[number].parts:
        if part.suffix not in grown or part.expert is None or not _writes(part):
            continue
        _, before, after = grown[part.suffix]
        width = inner_width(part) * after // before
        if width % _OF_EXPERTS and not inner_width(part) % _OF_EXPERTS:
            raise BadInput(
                f"layer {draft.anatomy.kind_of.index(number)}: experts of {inner_width(part)} neurons would have"
                f" {width}, and kernels that multiply all experts at once take rows of 16 bytes: widen them by a"
                f" multiple of {_OF_EXPERTS}"
            )


def inner_widths(draft: Draft) -> list[int]:
    """The widths of FFNs and of experts, each once, from the smallest. Raises BadInput where none is known."""
    widths = {inner_width(p) for kind in draft.anatomy.kinds for p in kind.parts if p.kind == "weight" and _writes(p)}
    if not widths:
        raise BadInput("no layer has an FFN whose projections are known, so none can become wider; widen another model")
    return sorted(widths)


def shown_growth(draft: Draft, growths: Growths) -> str:
    """Which widths become which, in words."""
    grown = {
        (before := inner_width(part)): before * after // size
        for kind, here in zip(draft.anatomy.kinds, growths, strict=True)
        for part in kind.parts
        if part.kind == "weight" and _writes(part) and part.suffix in here
        for _, size, after in [here[part.suffix]]
    }
    each = [f"of {before} become {after}" for before, after in sorted(grown.items())]
    return f"FFNs {', '.join(each)}"


def _writes(part: Part) -> bool:
    return any(role == "down" for role, _ in part.blocks)


def _of_ffn(part: Part) -> bool:
    return any(role in _FFN for role, _ in part.blocks)


def _plain_neurons(kind: LayerKind, width: int) -> dict[str, int] | None:
    """The axis of each tensor that holds neurons of a layer's one FFN of this width; None where it has another one."""
    own = [part for part in kind.parts if _of_ffn(part)]
    roles = sorted(role for part in own if part.kind == "weight" for role, _ in part.blocks)
    if any(part.expert is not None for part in own) or roles not in ([], ["down", "up"], ["down", "gate", "up"]):
        return None
    held = {part.suffix: neurons_of(part) for part in own if part.kind == "weight" or part.blocks[0][0] != "down"}
    if any(rows != width for _, blocks in held.values() for _, rows in blocks):
        return None
    return {suffix: axis for suffix, (axis, _) in held.items()}


def neurons_of(part: Part) -> tuple[int, tuple[tuple[Role, int], ...]]:
    """Along which axis a tensor of an FFN, or of experts, holds neurons; and its modules there, with how many each.

    Where rows of gate and up alternate they are one module's.
    """
    expert, role = part.expert, part.blocks[0][0]
    turned = expert is not None and expert.transposed
    stacked = expert is not None and expert.number is None
    axis = int(stacked) + (int((role == "down") != turned) if part.kind == "weight" else 0)
    if role == "down" or (expert is not None and expert.interleaved):
        return axis, ((role, part.shape[axis]),)
    return axis, part.blocks


def lengthen(draft: Draft, growths: Growths, born: Callable[[int, Neurons], Sequence[Recipe]]) -> list[int]:
    """Give the FFNs of all layers the neurons that `growths` says; return which layers changed.

    In what reads the stream they are as `born` makes them for a layer; biases and columns that write are zeros.

    Raises BadInput where a layer's FFN is not known, or is quantised.
    """
    changed: list[int] = []
    for index, layer in enumerate(draft.layers):
        kind = draft.kind_of(index)
        grown = growths[draft.anatomy.kind_of[layer.like]]
        if kind.packed:
            raise BadInput(f"layer {index} is quantised: widen the full-precision model, and quantise the output")
        if not grown and FFN in draft.blocks(index):
            raise BadInput(
                f"layer {index}: 0 modules are known as its up projection, where one is needed; the width of this model"
                " cannot change"
            )
        parts = {part.suffix: part for part in kind.parts}
        for suffix, (_, before, after) in grown.items():
            layer.tensors[suffix] = _longer(index, layer.tensors[suffix], parts[suffix], (before, after), born)
            layer.rewritten[suffix] = draft.number
        changed += [index] if grown else []
    if not changed:
        raise BadInput("no layer has an FFN that could become wider; widen another model")
    return changed


def _longer(
    layer: int, of: Recipe, part: Part, size: tuple[int, int], born: Callable[[int, Neurons], Sequence[Recipe]]
) -> Joined:
    """A tensor of an FFN with more neurons behind those of each module, as `size` grows: before, after."""
    assert isinstance(of, Copy), part.suffix
    axis, blocks = neurons_of(part)
    pieces: list[Recipe] = []
    begin, (before, after) = 0, size
    for role, count in blocks:
        new = Neurons(part.suffix, role, of, axis, begin, count, count * (after - before) // before)
        pieces.append(of if len(blocks) == 1 else sliced_along(of, axis, begin, begin + count))
        pieces += new.zeros if role == "down" or part.kind != "weight" else born(layer, new)
        begin += count
    return side_by_side(pieces, axis)


def which_layers(wider: Collection[int], draft: Draft) -> str:
    """Which layers become wider: all, or those that have what becomes wider."""
    if len(wider) == len(draft.layers):
        return f"all {len(wider)} layers"
    return f"{show_layers(sorted(wider))}, which have them"


def check_free(draft: Draft, *, beside: Sequence[str] = ()) -> None:
    """Raise BadInput where a graft has tensors as wide as what changes, but for those of the kinds `beside`."""
    for index, layer in enumerate(draft.layers):
        for graft in layer.grafts:
            if graft.kind not in beside and (
                graft.rules.branching or any("_proj" in suffix for suffix in graft.tensors)
            ):
                raise BadInput(
                    f"layer {index} carries a graft ({graft.text}) of the width that it has now; revert it, or fold or"
                    " merge it first"
                )


def with_rows(recipe: Recipe, part: Part, more: Mapping[Role, Sequence[Recipe]]) -> Joined:
    """A tensor with more rows behind those of each of its blocks."""
    if len(part.blocks) == 1:
        return side_by_side((recipe, *more[part.role]), 0)
    assert isinstance(recipe, Copy), part.suffix
    pieces: list[Recipe] = []
    begin = 0
    for role, rows in part.blocks:
        pieces += [sliced(recipe, begin, begin + rows), *more[role]]
        begin += rows
    return side_by_side(pieces, 0)


def widen(
    draft: Draft, layer: int, reading: Sequence[Role], writing: Role, more: Mapping[Role, Sequence[Recipe]]
) -> set[str]:
    """Give a layer's modules that read the stream `more` rows, and the one that writes `more` columns.

    Of biases of the former as many zeros; the latter's stays. Returns the suffixes that changed.
    """
    home = draft.layers[layer]
    changed: set[str] = set()
    for suffix, part in parts_with(draft, layer, (*reading, writing)).items():
        recipe = home.tensors[suffix]
        # A layer may hold its matrices in several dtypes: what is new is stored as what it stands in.
        born = {role: tuple(_stored_as(recipe.dtype, piece) for piece in pieces) for role, pieces in more.items()}
        if part.blocks[0][0] == writing:
            if part.kind != "weight":
                continue
            made = side_by_side((recipe, *born[writing]), 1)
        elif part.kind == "weight":
            made = with_rows(recipe, part, born)
        else:
            rows = {role: sum(piece.shape[0] for piece in more[role]) for role, _ in part.blocks}
            zeros = {role: (Constant(0.0, recipe.dtype, (count,)),) for role, count in rows.items()}
            made = with_rows(recipe, part, zeros)
        odd = next((each.dtype for each in made.parts if each.dtype != recipe.dtype), None)
        if odd is not None:
            raise BadInput(
                f"layer {layer} ({printable(suffix)}): {recipe.dtype}, and {odd} of another matrix is to stand in it;"
                " store the layer's matrices in one dtype"
            )
        home.tensors[suffix] = made
        changed.add(suffix)
    return changed


def _stored_as(dtype: str, piece: Recipe) -> Recipe:
    return replace(piece, dtype=dtype) if isinstance(piece, Constant | Random) else piece
