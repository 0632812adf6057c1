"""An output against its own manifest, without its base: what can be told of a folder that is to be given away.

Unlike the static proof it lets what a surgery made have been trained since; it believes the manifest's digests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from surgeon.checkpoint.folder import CheckpointFolder, digests_of
from surgeon.errors import printable
from surgeon.families.anatomy import Anatomy
from surgeon.manifest.manifest import MANIFEST_FILE, Manifest, places_of
from surgeon.verify.static import Check, some


def check_own_manifest(
    manifest: Manifest, out: CheckpointFolder, anatomy: Anatomy, *, advance: Callable[[int], None]
) -> list[Check]:
    """Tensors, code and base tensors as the manifest has them. `advance` hears of bytes read; all are read once.

    Raises BadInput where the manifest contradicts itself.
    """
    # But for those to which the surgery gave another value.
    places = {name: place for name, place in places_of(manifest).items() if place not in manifest.new_tensors}
    described = [_layers(manifest, anatomy), _tensors(manifest, places, out), *_code(manifest, out)]
    if not all(check.holds for check in described):
        return described
    digests = digests_of(out, out.tensors, advance)
    return [*described, _base_tensors(manifest, places, digests), _new_tensors(manifest, digests)]


def _layers(manifest: Manifest, anatomy: Anatomy) -> Check:
    found, told = anatomy.sizes.layers, len(manifest.layers)
    if found != told:
        return Check("layers", False, f"{found} of them, {MANIFEST_FILE} tells of {told}")
    return Check("layers", True, f"all {told}, every tensor of the shape that config.json asks for")


def _tensors(manifest: Manifest, places: dict[str, str], out: CheckpointFolder) -> Check:
    expected = {*manifest.new_tensors, *places.values()}
    missing = expected - out.tensors.keys()
    # What a merge folded away is told by the promise: nothing else takes a base's tensor out.
    if manifest.promise == "none":
        missing &= manifest.new_tensors.keys()
    if missing:
        return Check("tensors", False, f"missing: {some(sorted(missing))}")
    if extra := out.tensors.keys() - expected:
        return Check("tensors", False, f"not in {MANIFEST_FILE}: {some(sorted(extra))}")
    return Check("tensors", True, f"{len(out.tensors)}, each in {MANIFEST_FILE}")


def _code(manifest: Manifest, out: CheckpointFolder) -> list[Check]:
    """Nothing for a native output."""
    if manifest.native and not manifest.code:
        return []
    wrong = [
        name
        for name, digest in manifest.code.items()
        if (content := out.read_code(name)) is None or hashlib.sha256(content).hexdigest() != digest
    ]
    if wrong or not manifest.code:
        return [Check("code", False, f"not the files that surgery put there: {some(wrong)}")]
    whose = "as this version ships them" if out.code == "shipped" else f"of surgeon {printable(manifest.tool.version)}"
    return [Check("code", True, f"{len(manifest.code)} files, {whose}")]


def _base_tensors(manifest: Manifest, places: dict[str, str], digests: dict[str, str]) -> Check:
    there = {name: place for name, place in places.items() if place in digests}
    changed = [place for name, place in there.items() if digests[place] != manifest.base.tensors[name]]
    if changed and not any(entry.trains == "all" for entry in manifest.operations):
        return Check("base tensors", False, f"not what the base held: {some(changed)}")
    trained = f", {len(changed)} trained since, as the surgery means them to be" if changed else ""
    return Check("base tensors", True, f"{len(there) - len(changed)} byte-identical in their places{trained}")


def _new_tensors(manifest: Manifest, digests: dict[str, str]) -> Check:
    trained = sum(digests[name] != tensor.sha256 for name, tensor in manifest.new_tensors.items())
    rest = f"{len(manifest.new_tensors) - trained} as they were born"
    return Check("new tensors", True, f"{rest}, {trained} trained since" if trained else rest)
