"""Checks of an output against its own manifest, without its base, for a folder that is about to be published."""

from __future__ import annotations

from collections.abc import Callable

from surgeon.anatomy.anatomy import Anatomy
from surgeon.checkpoint.folder import MANIFEST_FILE, CheckpointFolder, digests_of
from surgeon.common.check import Check, some
from surgeon.manifest.manifest import Manifest, StoredTensor
from surgeon.manifest.moves import kept_as_they_are
from surgeon.verification.base_bytes import changed_by_training
from surgeon.verification.claims import digests_beside
from surgeon.verification.static import same_code


def check_own_manifest(
    manifest: Manifest, out: CheckpointFolder, anatomy: Anatomy, *, advance: Callable[[int], None]
) -> list[Check]:
    """Check an output against its own manifest, without its base, for a folder that is about to be published.

    Unlike `check_static`, this allows that new tensors were trained since, and trusts the manifest's digests. `advance`
    receives the count of bytes read; all tensors are read once. Raises BadInput where the manifest contradicts itself.
    """
    # Without the tensors to which the surgery gave another value.
    places = {name: place for name, place in kept_as_they_are(manifest).items() if place not in manifest.new_tensors}
    described = [_own_layers(manifest, anatomy), _own_tensors(manifest, places, out), *_own_code(manifest, out)]
    if not all(check.holds for check in described):
        return described
    digests = digests_of(out, out.tensors, advance)
    return [
        *described,
        *_own_files(manifest, out),
        _own_base_tensors(manifest, places, out, digests),
        _own_new_tensors(manifest, digests),
    ]


def _own_files(manifest: Manifest, out: CheckpointFolder) -> list[Check]:
    """Return a note where files next to the weights differ, for example saved again by the training tool, or edited."""
    found = digests_beside(out, manifest.files)
    changed = [name for name, digest in manifest.files.items() if found.get(name) != digest]
    detail = f"not as surgery left them, so saved again by another tool, or edited: {some(changed)}"
    kept = f"{len(found)} beside the weights, by digest"
    return [Check("files", True, detail if changed else kept, note=bool(changed))]


def _own_layers(manifest: Manifest, anatomy: Anatomy) -> Check:
    """Check that the output has as many layers as the manifest names."""
    found, named = anatomy.sizes.layers, len(manifest.layers)
    if found != named:
        return Check("layers", False, f"{found} of them, {MANIFEST_FILE} names {named}")
    return Check("layers", True, f"all {named}, every tensor of the shape that config.json asks for")


def _own_tensors(manifest: Manifest, places: dict[str, str], out: CheckpointFolder) -> Check:
    """Check that the output has exactly the tensors that the manifest names.

    `places` are the names of kept base tensors, by their names in the base. Where the promise is not exact, these may
    be missing.
    """
    expected = {*manifest.new_tensors, *places.values()}
    missing = expected - out.tensors.keys()
    # Where a merge removed tensors, the promise is not exact: nothing else removes a base tensor.
    if manifest.promise != "exact":
        missing &= manifest.new_tensors.keys()
    if missing:
        return Check("tensors", False, f"missing: {some(sorted(missing))}")
    extra = sorted(out.tensors.keys() - expected)
    return Check.of("tensors", extra, f"not in {MANIFEST_FILE}", f"{len(out.tensors)}, each in {MANIFEST_FILE}")


def _own_code(manifest: Manifest, out: CheckpointFolder) -> list[Check]:
    """Check the code files against the manifest; no check for a native output without code."""
    if manifest.native and not manifest.code:
        return []
    if manifest.native:
        found = digests_beside(out, manifest.code)
        wrong = [name for name, digest in manifest.code.items() if found.get(name) != digest]
        return [Check.of("code", wrong, "not the base's own files", f"the base's own, {some(list(found))}, by digest")]
    if not manifest.code:
        return [Check("code", False, f"none of it is in {MANIFEST_FILE}")]
    return [same_code(manifest, manifest.code.keys(), out)]


def _own_base_tensors(
    manifest: Manifest, places: dict[str, str], out: CheckpointFolder, digests: dict[str, str]
) -> Check:
    """Check that kept base tensors have the base's digests, except tensors that training may change."""
    there = {name: place for name, place in places.items() if place in digests}
    now = {place: StoredTensor.of(out.tensors[place], digests[place]) for place in there.values()}
    changed = [place for name, place in there.items() if now[place] != manifest.base.tensors[name]]
    known = manifest.changed_of_base
    recorded = [place for place in changed if place in known and digests[place] == manifest.trained[place]]
    if len(recorded) == len(changed) and recorded:
        kept = f"{len(there) - len(changed)} byte-identical in their places; {changed_by_training(len(changed))}"
        return Check("base tensors", True, kept)
    if changed and not any(entry.trains == "all" for entry in manifest.operations):
        return Check("base tensors", False, f"not what the base held: {some(changed)}")
    trained = f", {len(changed)} trained since, as the surgery means them to be" if changed else ""
    return Check("base tensors", True, f"{len(there) - len(changed)} byte-identical in their places{trained}")


def _own_new_tensors(manifest: Manifest, digests: dict[str, str]) -> Check:
    """Check that new tensors have their digests at birth, except new tensors that training may change."""
    changed = [name for name, tensor in manifest.new_tensors.items() if digests[name] != tensor.sha256]
    fixed = [name for name in changed if manifest.new_tensors[name].stays]
    if fixed and not any(entry.trains == "all" for entry in manifest.operations):
        return Check("new tensors", False, f"trained, though they hold what is the base's: {some(fixed)}")
    trained = len(changed)
    rest = f"{len(manifest.new_tensors) - trained} as they were born"
    return Check("new tensors", True, f"{rest}, {trained} trained since" if trained else rest)
