"""The static proof, by bytes and without running a model: an output against its base, an earlier state, its manifest.

Against its base the blueprint is drawn anew from the plan in the manifest and the base's headers, so what is checked is
what the plan means, not what the output says about itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import islice

from surgeon.apply.write import constant_bytes
from surgeon.blueprint.draft import Blueprint
from surgeon.blueprint.recipes import Constant, Copy, Listed, is_computed, numel
from surgeon.checkpoint.folder import MANIFEST_FILE, CheckpointFolder, digests_of
from surgeon.checkpoint.header import DTYPE_BITS
from surgeon.checkpoint.ranges import zeros_sha256
from surgeon.errors import printable
from surgeon.families.anatomy import Anatomy, dissect
from surgeon.manifest.lineage import Lineage, State, trainable_set
from surgeon.manifest.manifest import Manifest, digest_of, held_by, places_of

_ANOTHER_BASE = "not the base this was made from; differing"


@dataclass(frozen=True)
class Check:
    """One thing that was promised, whether it holds, and what was found."""

    name: str
    holds: bool
    detail: str

    @classmethod
    def of(cls, name: str, wrong: Collection[str], broken: str, kept: str) -> Check:
        """A check that holds, and says what is `kept`, where no name is `wrong`; else it says what is `broken`."""
        return cls(name, not wrong, f"{broken}: {some(wrong)}" if wrong else kept)


def check_static(
    blueprint: Blueprint,
    manifest: Manifest,
    base: CheckpointFolder,
    out: CheckpointFolder,
    anatomy: Anatomy,
    *,
    advance: Callable[[int], None],
) -> list[Check]:
    """Every check that needs bytes only. `advance` counts the bytes read (of base and output together)."""
    described = [_config(blueprint, out), _tensors(blueprint, out), *_code(blueprint, manifest, out)]
    if not all(check.holds for check in described):
        return described
    digests = digests_of(base, base.tensors, advance), digests_of(out, out.tensors, advance)
    return [
        *described,
        _base_is_the_one(manifest, digests[0]),
        _copies(blueprint, manifest, out, *digests),
        _silence(blueprint, manifest, anatomy, out),
        _constants(blueprint, manifest, digests[1]),
        _as_born(blueprint, manifest, digests[1]),
        *_as_trained(manifest, digests[1]),
    ]


def bytes_to_read(base: CheckpointFolder, out: CheckpointFolder) -> int:
    """Bytes `check_static` reads, for a progress bar."""
    return sum(info.nbytes for folder in (base, out) for info in folder.tensors.values())


def _config(blueprint: Blueprint, out: CheckpointFolder) -> Check:
    wrong = [
        key for key in sorted({*blueprint.config, *out.config}) if blueprint.config.get(key) != out.config.get(key)
    ]
    return Check.of("config", wrong, "config.json differs from what the plan makes it", "as the plan makes it")


def _tensors(blueprint: Blueprint, out: CheckpointFolder) -> Check:
    expected = {output.name: (output.recipe.dtype, output.recipe.shape) for output in blueprint.outputs}
    found = {name: (info.dtype, info.shape) for name, info in out.tensors.items()}
    if missing := [name for name in expected if name not in found]:
        return Check("tensors", False, f"missing: {some(missing)}")
    if extra := [name for name in found if name not in expected]:
        return Check("tensors", False, f"not in the plan: {some(extra)}")
    wrong = [name for name in expected if expected[name] != found[name]]
    kept = f"all {len(expected)} there, of the planned shapes and dtypes"
    return Check.of("tensors", wrong, "of another shape or dtype than planned", kept)


def _code(blueprint: Blueprint, manifest: Manifest, out: CheckpointFolder) -> list[Check]:
    """Nothing for a native output; else whether the code beside the weights is what was shipped with them."""
    if blueprint.native:
        return []
    whose = (
        "as this version ships them" if out.code == "shipped" else f"as surgeon {manifest.tool.version} shipped them"
    )
    return [_same_code(manifest, blueprint.code_files, out, whose)]


def _same_code(manifest: Manifest, names: Collection[str], out: CheckpointFolder, whose: str) -> Check:
    """Whether the files of code are those that the manifest knows by their digests."""
    wrong = [
        name
        for name in names
        if (content := out.read_code(name)) is None or manifest.code.get(name) != hashlib.sha256(content).hexdigest()
    ]
    return Check.of("code", wrong, "not the files that surgery put there", f"{some(names)}, {whose}")


def _base_is_the_one(manifest: Manifest, base: dict[str, str]) -> Check:
    changed = [name for name in manifest.base.tensors if manifest.base.tensors[name] != base.get(name)]
    return Check.of("base", changed, _ANOTHER_BASE, f"the one operated on, by {len(base)} digests")


def _copies(
    blueprint: Blueprint, manifest: Manifest, folder: CheckpointFolder, base: dict[str, str], out: dict[str, str]
) -> Check:
    trained = manifest.trained
    stray = [o.name for o in blueprint.outputs if not o.new and o.name in trained]
    if stray:
        may = set(trainable_set(folder, manifest, "all").names)
        if forbidden := [name for name in stray if name not in may]:
            return Check("base tensors", False, f"trained, though no surgery lets them train: {some(forbidden)}")
    untrained = [o for o in blueprint.outputs if o.name not in trained]
    copies = {o.name: o.recipe.source for o in untrained if isinstance(o.recipe, Copy)}
    wrong = [name for name, source in copies.items() if out[name] != base[source]]
    kept = sum(not output.new for output in untrained)
    since = f"; {len(stray)} were trained, as a surgery lets them" if stray else ""
    found = f"{kept} byte-identical in their places, and {len(copies) - kept} copies of them{since}"
    return Check.of("base tensors", wrong, "not byte-identical to their originals", found)


def _silence(blueprint: Blueprint, manifest: Manifest, anatomy: Anatomy, out: CheckpointFolder) -> Check:
    """From the family, not from the recipes: which tensors of new layers must hold which constant."""
    must = anatomy.family.silence(anatomy.parts)
    trained = manifest.trained
    loud: list[str] = []
    checked = 0
    for layer in blueprint.layers:
        if layer.operation is None or blueprint.operations[layer.operation].claim.promise != "exact":
            continue
        for suffix, value in must.items():
            name = anatomy.layer_name(layer.index, suffix)
            if name in trained:
                continue
            info = out.tensors[name]
            checked += 1
            if bytes(out.read(name)) != constant_bytes(Constant(value, info.dtype, info.shape)):
                loud.append(name)
    kept = f"{checked} tensors hold exactly what keeps new layers silent"
    if not checked:
        kept = "no operation promises it" if not trained else "trained since, or no operation promises it"
    return Check.of("silent at birth", loud, "not the constant that keeps a new layer silent", kept)


def _constants(blueprint: Blueprint, manifest: Manifest, out: dict[str, str]) -> Check:
    """What the plan calls constant: the zeros that keep adapters silent, gates that start at their α."""
    trained = manifest.trained
    untrained = [o for o in blueprint.outputs if o.name not in trained]
    constants = [(o.name, o.recipe) for o in untrained if isinstance(o.recipe, Constant | Listed)]
    wrong = [name for name, recipe in constants if out[name] != _constant_digest(recipe)]
    kept = f"{len(constants)} tensors hold the value they are born with"
    return Check.of("constants", wrong, "not the value they are born with", kept)


def _constant_digest(recipe: Constant | Listed) -> str:
    if isinstance(recipe, Constant) and recipe.value == 0:
        return zeros_sha256(numel(recipe) * DTYPE_BITS[recipe.dtype] // 8)
    return hashlib.sha256(constant_bytes(recipe)).hexdigest()


def _as_born(blueprint: Blueprint, manifest: Manifest, out: dict[str, str]) -> Check:
    trained = manifest.trained
    computed = [o.name for o in blueprint.outputs if o.new and is_computed(o.recipe) and o.name not in trained]
    unknown = [name for name in computed if name not in manifest.new_tensors]
    if unknown:
        return Check("new tensors", False, f"not in the manifest: {some(unknown)}")
    changed = [name for name in computed if manifest.new_tensors[name].sha256 != out[name]]
    kept = f"{len(computed)} computed ones are as they were written"
    return Check.of("new tensors", changed, "changed since they were written", kept)


def _as_trained(manifest: Manifest, out: dict[str, str]) -> list[Check]:
    """Nothing for an output that was not trained; else whether it holds what its last training run left."""
    if not manifest.training:
        return []
    trained = manifest.trained
    wrong = [name for name, digest in trained.items() if out.get(name) != digest]
    idle = [name for run in manifest.training for name, tensor in run.tensors.items() if tensor.max_change == 0]
    changes = f"; {len(idle)} did not change in it: {some(idle)}" if idle else ", every one of them changed"
    steps = sum(run.steps for run in manifest.training)
    kept = f"{len(trained)} as {steps:,} steps of training left them{changes}"
    return [Check.of("trained tensors", wrong, "not as training left them", kept)]


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


def check_earlier(
    state: State,
    manifest: Manifest,
    base: CheckpointFolder,
    out: CheckpointFolder,
    *,
    advance: Callable[[int], None],
) -> list[Check]:
    """An output of several surgeries against an earlier state: the first base, say, of a model that learnt many tasks.

    Every surgery in between is known by its manifest, so digests show what must hold; blueprints are not drawn again.
    `advance` counts the bytes read (of base and output together)."""
    found = digests_of(base, base.tensors, advance)
    differing = [name for name, digest in state.digests.items() if found.get(name) != digest]
    extra = [name for name in found if name not in state.digests]
    checks = [
        Check.of(
            "base",
            [*differing, *extra],
            _ANOTHER_BASE,
            f"the one operated on {len(state.undone)} surgeries ago, by {len(found)} digests",
        ),
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
        Check.of(
            "tensors since then",
            lost,
            "not byte-identical to the base's",
            f"{len(state.places) - len(moved)} of the base's are byte-identical",
        ),
        Check.of(
            "as left",
            edited,
            "not as surgery or training left them",
            f"all {len(now)} tensors are as the last surgery or training left them",
        ),
    ]


def check_own_manifest(
    manifest: Manifest, out: CheckpointFolder, anatomy: Anatomy, *, advance: Callable[[int], None]
) -> list[Check]:
    """An output against its own manifest, without its base: what can be checked of a folder that is to be given away.

    Unlike `check_static` this lets what a surgery made have been trained since, and believes the manifest's digests.
    `advance` counts the bytes read; all are read once.

    Raises BadInput where the manifest contradicts itself.
    """
    # But for those to which the surgery gave another value.
    places = {name: place for name, place in places_of(manifest).items() if place not in manifest.new_tensors}
    described = [_own_layers(manifest, anatomy), _own_tensors(manifest, places, out), *_own_code(manifest, out)]
    if not all(check.holds for check in described):
        return described
    digests = digests_of(out, out.tensors, advance)
    return [*described, _own_base_tensors(manifest, places, digests), _own_new_tensors(manifest, digests)]


def _own_layers(manifest: Manifest, anatomy: Anatomy) -> Check:
    found, named = anatomy.sizes.layers, len(manifest.layers)
    if found != named:
        return Check("layers", False, f"{found} of them, {MANIFEST_FILE} names {named}")
    return Check("layers", True, f"all {named}, every tensor of the shape that config.json asks for")


def _own_tensors(manifest: Manifest, places: dict[str, str], out: CheckpointFolder) -> Check:
    expected = {*manifest.new_tensors, *places.values()}
    missing = expected - out.tensors.keys()
    # Where a merge folded tensors away, the promise says so: nothing else takes a base's tensor out.
    if manifest.promise == "none":
        missing &= manifest.new_tensors.keys()
    if missing:
        return Check("tensors", False, f"missing: {some(sorted(missing))}")
    extra = sorted(out.tensors.keys() - expected)
    return Check.of("tensors", extra, f"not in {MANIFEST_FILE}", f"{len(out.tensors)}, each in {MANIFEST_FILE}")


def _own_code(manifest: Manifest, out: CheckpointFolder) -> list[Check]:
    """Nothing for a native output."""
    if manifest.native and not manifest.code:
        return []
    if not manifest.code:
        return [Check("code", False, f"none of it is in {MANIFEST_FILE}")]
    whose = "as this version ships them" if out.code == "shipped" else f"of surgeon {printable(manifest.tool.version)}"
    return [_same_code(manifest, manifest.code.keys(), out, whose)]


def _own_base_tensors(manifest: Manifest, places: dict[str, str], digests: dict[str, str]) -> Check:
    there = {name: place for name, place in places.items() if place in digests}
    changed = [place for name, place in there.items() if digests[place] != manifest.base.tensors[name]]
    if changed and not any(entry.trains == "all" for entry in manifest.operations):
        return Check("base tensors", False, f"not what the base held: {some(changed)}")
    trained = f", {len(changed)} trained since, as the surgery means them to be" if changed else ""
    return Check("base tensors", True, f"{len(there) - len(changed)} byte-identical in their places{trained}")


def _own_new_tensors(manifest: Manifest, digests: dict[str, str]) -> Check:
    trained = sum(digests[name] != tensor.sha256 for name, tensor in manifest.new_tensors.items())
    rest = f"{len(manifest.new_tensors) - trained} as they were born"
    return Check("new tensors", True, f"{rest}, {trained} trained since" if trained else rest)


def some(names: Collection[str]) -> str:
    """The first three names, and how many more."""
    shown = ", ".join(printable(name) for name in islice(names, 3))
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
