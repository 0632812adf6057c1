"""Whether what a surgery made new is as it was made: silent where that is promised, constant, as it was written."""

from __future__ import annotations

from collections.abc import Mapping

from surgeon.blueprint.blueprint import Blueprint
from surgeon.blueprint.recipes import Constant
from surgeon.checkpoint.folder import CheckpointFolder, digest_of_pieces
from surgeon.checkpoint.pieces import Pieces
from surgeon.families.anatomy import Anatomy
from surgeon.manifest.manifest import Manifest
from surgeon.verify.check import Check, some


def check_new_tensors(
    blueprint: Blueprint, manifest: Manifest, anatomy: Anatomy, folder: CheckpointFolder, out: Mapping[str, str]
) -> list[Check]:
    """What keeps new layers silent, what the plan calls constant, and what was computed; `out` are digests."""
    return [
        _silence(blueprint, manifest, anatomy, folder, out),
        _constants(blueprint, manifest, folder, out),
        _as_born(blueprint, manifest, out),
    ]


def _silence(
    blueprint: Blueprint, manifest: Manifest, anatomy: Anatomy, folder: CheckpointFolder, out: Mapping[str, str]
) -> Check:
    """Return which tensors of new layers must be which constant: from the anatomy, not from the recipes."""
    trained = manifest.trained
    loud: list[str] = []
    checked = 0
    for layer in blueprint.layers:
        if layer.operation is None or blueprint.operations[layer.operation].claim.promise != "exact":
            continue
        kind = anatomy.kinds[anatomy.kind_of[layer.like]]
        for suffix, value in (kind.opened if layer.opened else kind).silence.items():
            name = anatomy.layer_name(layer.index, suffix)
            if name in trained:
                continue
            info = folder.tensors[name]
            checked += 1
            if out[name] != Constant(value, info.dtype, info.shape).sha256:
                loud.append(name)
    kept = f"{checked} tensors hold exactly what keeps new layers silent"
    if not checked:
        kept = "no operation promises it" if not trained else "trained since, or no operation promises it"
    return Check.of("silent at birth", loud, "not the constant that keeps a new layer silent", kept)


def check_dropped(blueprint: Blueprint, anatomy: Anatomy, base: Mapping[str, str]) -> list[Check]:
    """Nothing where no layer was taken out as silent; else whether all those were, by the base's own bytes."""
    gone = [
        layer
        for number, layers in blueprint.dropped.items()
        if blueprint.operations[number].claim.promise == "exact"
        for layer in layers
    ]
    if not gone:
        return []
    loud = [
        info.name
        for layer in gone
        for suffix, value in anatomy.kinds[anatomy.kind_of[layer]].silence.items()
        if base[(info := anatomy.layers[layer][suffix]).name] != Constant(value, info.dtype, info.shape).sha256
    ]
    kept = f"all {len(gone)} that were taken out added exactly nothing in the base"
    return [Check.of("layers taken out", loud, "not the constant that keeps a layer silent", kept)]


def _none(manifest: Manifest) -> str:
    """Why a check of new tensors had none to look at."""
    return "trained since, or the plan makes none" if manifest.trained else "the plan makes none"


def _constants(blueprint: Blueprint, manifest: Manifest, folder: CheckpointFolder, out: Mapping[str, str]) -> Check:
    """What the plan calls constant: the zeros that keep adapters silent, gates that start at their α.

    Parts of tensors too: zeros that keep more neurons silent, say, beside those of the base.
    """
    wrong: list[str] = []
    whole = 0
    for output in blueprint.outputs:
        if output.name in manifest.trained:
            continue
        for sha256, lying in output.recipe.named_values:
            entire = lying.nbytes == output.nbytes
            whole += entire
            place = {"": Pieces.whole(output.name, output.nbytes)}
            found = out[output.name] if entire else digest_of_pieces(folder, lying.through(place))
            wrong += [output.name] if found != sha256 else []
    kept = f"{whole} tensors hold their initial value" if whole else _none(manifest)
    return Check.of("constants", list(dict.fromkeys(wrong)), "not their initial value", kept)


def _as_born(blueprint: Blueprint, manifest: Manifest, out: Mapping[str, str]) -> Check:
    trained = manifest.trained
    computed = [o.name for o in blueprint.outputs if o.new and o.computed and o.name not in trained]
    unknown = [name for name in computed if name not in manifest.new_tensors]
    if unknown:
        return Check("new tensors", False, f"not in the manifest: {some(unknown)}")
    changed = [name for name in computed if manifest.new_tensors[name].sha256 != out[name]]
    kept = f"{len(computed)} computed ones are as they were written" if computed else _none(manifest)
    return Check.of("new tensors", changed, "changed since they were written", kept)
