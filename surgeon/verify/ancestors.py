"""An output of several surgeries against an earlier state: the first base, say, of a model that learnt task after task.

Every surgery in between is known by its manifest, so what must hold is told by digests; blueprints are not drawn again.
"""

from __future__ import annotations

from collections.abc import Callable

from surgeon.checkpoint.folder import CheckpointFolder, digests_of
from surgeon.families.anatomy import dissect
from surgeon.manifest.lineage import Lineage, State
from surgeon.manifest.manifest import MANIFEST_FILE, Manifest, digest_of, held_by
from surgeon.verify.own_manifest import check_own_manifest
from surgeon.verify.static import Check, some


def earlier_state(base: CheckpointFolder, out: CheckpointFolder, manifest: Manifest) -> State | None:
    """The state of `out`, whose manifest is `manifest`, that `base` is; None unless that is before the last base.

    Raises BadInput where what stood in that state is lost, or an ancestor's manifest was edited or not kept.
    """
    if not manifest.lineage or base.tensors.keys() == manifest.base.tensors.keys():
        return None
    known = [ancestor.sha256 for ancestor in manifest.lineage]
    number = len(known)
    if base.manifest is None:
        number = 0
    elif (digest := digest_of(base.manifest)) in known:
        number = known.index(digest) + 1
    if number == len(known):
        return None
    return Lineage.of(manifest, file=str(out.path / MANIFEST_FILE)).state(number, out)


def check_ancestry(
    state: State,
    manifest: Manifest,
    base: CheckpointFolder,
    out: CheckpointFolder,
    *,
    advance: Callable[[int], None],
) -> list[Check]:
    """The static checks. `advance` hears of bytes read (of base and output together)."""
    found = digests_of(base, base.tensors, advance)
    differing = [name for name, digest in state.digests.items() if found.get(name) != digest]
    extra = [name for name in found if name not in state.digests]
    checks = [
        Check("base", False, f"not the base this was made from; differing: {some([*differing, *extra])}")
        if differing or extra
        else Check("base", True, f"the one operated on {len(state.undone)} surgeries ago, by {len(found)} digests"),
        Check(
            "base's config",
            base.config == state.config,
            "the one operated on" if base.config == state.config else "config.json is not the one operated on",
        ),
        *check_own_manifest(manifest, out, dissect(out.config, out.tensors), advance=lambda _count: None),
    ]
    if not all(check.holds for check in checks):
        return checks
    now = digests_of(out, out.tensors, advance)
    moved = [place for name, place in state.places.items() if now.get(place) != found[name]]
    trains_all = any(entry.trains == "all" for each in state.undone for entry in each.operations)
    lost = [] if trains_all else moved
    held = held_by(manifest, file=str(out.path / MANIFEST_FILE))
    edited = [name for name, digest in now.items() if held.get(name) != digest]
    return [
        *checks,
        Check("tensors since then", False, f"not byte-identical to the base's: {some(lost)}")
        if lost
        else Check("tensors since then", True, f"{len(state.places) - len(moved)} of the base's are byte-identical"),
        Check("as left", False, f"not as surgery or training left them: {some(edited)}")
        if edited
        else Check("as left", True, f"all {len(now)} tensors are as the last surgery or training left them"),
    ]
