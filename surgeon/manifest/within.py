"""The base inside an output: which layers and rows of the output are the base's, and whether they are still unchanged.

Operations that add layers, grafts or rows overwrite nothing of the base. So the base is a part of every such output:
its layers without the inserted ones, without grafts, with the first rows of the embeddings. After several surgeries,
each of their starting models is.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from surgeon.anatomy.anatomy import layer_of
from surgeon.checkpoint.folder import MANIFEST_FILE, CheckpointFolder
from surgeon.common.formatting import at_revision
from surgeon.errors import BadInput, printable
from surgeon.manifest.lineage import Lineage, State, instead_of, shown_name
from surgeon.manifest.manifest import Manifest
from surgeon.manifest.moves import recorded_tensors


@dataclass(frozen=True)
class Within:
    """The place of the base in an output: all `layers` but `inserted`, and `rows` of the embeddings (None: all).

    `newborn`: the surgeries promise the base's function and nothing was trained yet, so the output computes it.
    `apart`: tensors of the base are to train, so only a frozen copy of the output keeps containing it. `grafts`: the
    output's grafts are the base's, from an earlier surgery. `last`: the base is the model with which the last surgery
    began, not the first base. `shown` describes the base.
    """

    layers: int
    inserted: tuple[int, ...]
    rows: int | None
    newborn: bool
    apart: bool = False
    grafts: bool = False
    last: bool = False
    shown: str = "the base"


def base_within(
    out: CheckpointFolder, manifest: Manifest, *, training: Collection[str] = (), last: bool = False
) -> Within:
    """Return the place of the first surgery's base in `out`, judged by headers and digests; no weights are read.

    With `last`, the base is the model with which the last surgery began. `training` are tensors of `out` whose values
    will change, except first rows that stay fixed. Raises BadInput naming the first base tensor that the output no
    longer has, and where the base's grafts and new grafts are next to each other.
    """
    file = str(out.path / MANIFEST_FILE)
    lineage = Lineage.of(manifest, file=file)
    number = lineage.count - 1 if last else 0
    state = lineage.state(number, out)
    now = recorded_tensors(manifest, file=file)
    for name, lying in state.pieces.items():
        place, whole = lying.tensors[0], lying.is_all_of(out.tensors[lying.tensors[0]])
        if not whole and (layer_of(name) is not None or len(lying.tensors) > 1):
            raise BadInput(
                f"{shown_name(name, place)}: a part of a wider tensor, so the base is not run inside"
                f" {printable(str(out.path))}; {instead_of(state.undone[0])}"
            )
        if _module(name) != _module(place):
            raise BadInput(
                f"{shown_name(name, place)}: in a module of another kind, whose other parts cannot be left out, so the"
                f" base is not run inside {printable(str(out.path))}; {instead_of(state.undone[0])}"
            )
        if whole and now[place].sha256 != state.base.tensors[name].sha256:
            raise BadInput(
                f"{shown_name(name, place)}: not what it was in the base (it was trained or merged since), so the base"
                f" is not in {printable(str(out.path))} any more; {instead_of(state.undone[0])}"
            )
    heads = _untied(state)
    for name, sha256 in heads.items():
        if now[name].sha256 != sha256:
            raise BadInput(
                f"{printable(name)}: trained since it was untied, and the base has no such tensor, so the base is not"
                f" run inside {printable(str(out.path))}; {instead_of(state.undone[0])}"
            )
    kept = set(state.layers)
    inserted = tuple(layer for layer in range(len(manifest.layers)) if layer not in kept)
    grown = [more.start for more in state.more.values()]
    newborn = state.promise == "exact" and not state.trained
    held = {place for lying in state.pieces.values() for place in lying.tensors}
    apart = not (held | heads.keys()).isdisjoint(training)
    grafts = number > 0 and _grafts_are_old(manifest, inserted, str(out.path))
    shown = "the base"
    if number:
        began = printable(at_revision(state.base.id, state.base.revision))
        shown = f"the model as it stood when the last surgery began ({began})"
    return Within(len(manifest.layers), inserted, min(grown, default=None), newborn, apart, grafts, number > 0, shown)


def _untied(state: State) -> dict[str, str]:
    """Return, by name, the digests of copies outside layers that surgeries added, such as an untied output head."""
    return {
        name: made.sha256
        for manifest in state.undone
        for name, made in manifest.new_tensors.items()
        if layer_of(name) is None and made.is_copy
    }


def _grafts_are_old(manifest: Manifest, inserted: Collection[int], shown: str) -> bool:
    """Return whether all grafts on layers not inserted by the last surgery are older than it; False without grafts.

    Raises BadInput where only some are new.
    """
    kept = [layer for number, layer in enumerate(manifest.layers) if number not in inserted]
    new = {graft.operation is not None for layer in kept for graft in layer.grafts}
    if len(new) > 1:
        raise BadInput(
            f"{printable(shown)}: the last surgery grafted onto a model that had grafts, and these cannot be switched"
            " off alone, so the model as it was before is not run inside it; teach with the first base (`teacher:"
            " base`), or leave `preserve` out"
        )
    return new == {False}


def _module(name: str) -> str:
    """Return a tensor's name with its layer number replaced by `*`."""
    place = layer_of(name)
    return name if place is None else f"{place[0]}*.{place[2]}"
