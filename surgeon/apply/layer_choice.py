"""What a plan that takes layers out asks of weights and text: known before the blueprint is drawn."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from surgeon.blueprint.measured import MeasuredLayers, TextLoss
from surgeon.blueprint.recipes import Constant
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.header import DTYPE_BITS
from surgeon.errors import BadInput, printable
from surgeon.families.anatomy import Anatomy
from surgeon.operations.operation import LayersOut, Operation

# Bytes of a tensor that are looked at at once, and numbers of them.
_BYTES = 1 << 20


def measured_layers(
    operations: Sequence[Operation], source: str, base: CheckpointFolder, anatomy: Anatomy
) -> dict[int, MeasuredLayers]:
    """What is measured of the layers of `base` for those of the `operations` that take some out, by their numbers.

    `source` is the plan's file, where paths of texts start. Raises BadInput, also where weights are not at hand.
    """
    asked = {number: each.layers_out for number, each in enumerate(operations) if each.layers_out is not None}
    if not asked or anatomy.family.encoder:
        # Why an encoder loses none, the draft says.
        return {}
    if not base.source.at_hand:
        raise BadInput(
            f"{base.source.shown}: which layers are silent, and what a loss is without some, only the weights say;"
            " download the base first, and give its folder"
        )
    silent = frozenset(silent_layers(base, anatomy))
    found: dict[int, MeasuredLayers] = {}
    for number, wanted in asked.items():
        if wanted.text is None:
            found[number] = MeasuredLayers(silent=silent)
            continue
        if number:
            raise BadInput(
                f"operations[{number}] measures layers on a text, which is done on the base: make it the plan's first"
                " operation, or apply two plans"
            )
        found[number] = _measured(wanted, Path(source).parent / wanted.text, base, anatomy, silent)
    return found


def _measured(
    wanted: LayersOut, text: Path, base: CheckpointFolder, anatomy: Anatomy, silent: frozenset[int]
) -> MeasuredLayers:
    """Runs the base, which needs torch."""
    from surgeon.models.depth import Depth

    if not text.is_file():
        raise BadInput(f"{printable(str(text))}: no such text, which `drop_layers` asks for; check the path")
    kinds = [anatomy.pattern[layer] for layer in range(anatomy.sizes.layers)]
    depth = Depth.of(
        base, text, kinds, vocabulary=anatomy.sizes.vocabulary, window=wanted.window, windows=wanted.windows
    )
    choice = depth.choose(wanted)
    with text.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    measured = TextLoss(str(wanted.text), digest, depth.predictions, depth.before, choice.loss, choice.scores)
    return MeasuredLayers(() if wanted.layers else choice.layers, choice.merged, silent, measured)


def silent_layers(base: CheckpointFolder, anatomy: Anatomy) -> list[int]:
    """The layers that add exactly nothing, by the bytes of what writes to the residual stream. Raises BadInput."""
    found: list[int] = []
    for index, tensors in enumerate(anatomy.layers):
        kind = anatomy.kinds[anatomy.kind_of[index]]
        plain = not kind.packed and not anatomy.grafted[index]
        if kind.silence and plain and all(_holds(base, tensors[s].name, value) for s, value in kind.silence.items()):
            found.append(index)
    return found


def _holds(base: CheckpointFolder, name: str, value: float) -> bool:
    """Whether every element of a tensor is this value, by its bytes."""
    info = base.tensors[name]
    width = DTYPE_BITS[info.dtype] // 8
    pattern = Constant(value, info.dtype, (_BYTES // width,)).data
    # First a few: of a layer that is not silent, these say so.
    ends = [64, *range(_BYTES, info.nbytes, _BYTES), info.nbytes]
    begin = 0
    for end in ends:
        end = min(end, info.nbytes)
        if bytes(base.read_part(name, slice(begin, end))) != pattern[: end - begin]:
            return False
        begin = end
    return True
