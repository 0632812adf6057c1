"""The static proof, by bytes and without running a model: an output against its base, an earlier state, its manifest.

Against its base the blueprint is drawn anew from the plan in the manifest and the base's headers, so what is checked is
what the plan means, not what the output says about itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surgeon._version import __version__
from surgeon.blueprint.draft import Blueprint, Output
from surgeon.blueprint.recipes import Constant, Joined
from surgeon.checkpoint.card_metadata import metadata_of
from surgeon.checkpoint.folder import (
    MANIFEST_FILE,
    RECORD_FILE,
    CheckpointFolder,
    digest_of_pieces,
    digests_of,
    holds_pieces,
)
from surgeon.checkpoint.header import DTYPE_BITS, TensorInfo
from surgeon.checkpoint.own_code import OwnCode, has_own_code
from surgeon.checkpoint.peft_folder import ADAPTER_CONFIG
from surgeon.checkpoint.pieces import Pieces, indices
from surgeon.checkpoint.source import is_side_file
from surgeon.common.json_results import same_json
from surgeon.errors import printable
from surgeon.families.anatomy import Anatomy
from surgeon.families.dissect import dissect
from surgeon.manifest.compose import BaseId, base_entry, surgeries_of
from surgeon.manifest.facts import facts_of
from surgeon.manifest.lineage import Lineage, State
from surgeon.manifest.manifest import (
    AdapterEntry,
    Base,
    Manifest,
    StoredTensor,
)
from surgeon.manifest.moves import held_by, kept_as_they_are
from surgeon.manifest.reading import manifest_of
from surgeon.manifest.recipe_words import held_of
from surgeon.manifest.run_files import ADAPTER_FOLDER, KEPT_FOLDER, adapter_beside, kept_tensors
from surgeon.manifest.trainable import trainable_set
from surgeon.operations.prepare import Facts
from surgeon.plan.plan import LoadedPlan, draw, recorded_plan
from surgeon.verify.check import Check, some
from surgeon.verify.claims import (
    Beside,
    base_differences,
    check_files,
    check_manifest,
    check_origin,
    digests_beside,
    manifest_differences,
)
from surgeon.verify.side_files import check_beside

_ANOTHER_BASE = "not the base this was made from; differing"


@dataclass(frozen=True)
class Drawn:
    """What the plan in a manifest makes of a base, by headers and by the facts that the manifest keeps."""

    loaded: LoadedPlan
    blueprint: Blueprint
    anatomy: Anatomy
    facts: Mapping[int, Facts]

    @classmethod
    def of(
        cls,
        manifest: Manifest,
        config: Mapping[str, Any],
        tensors: Mapping[str, TensorInfo],
        own: OwnCode | None,
        file: str,
    ) -> Drawn:
        """Draw the plan of a manifest, which stands in `file`. Raises BadInput where that cannot be done."""
        loaded = recorded_plan(manifest.plan, source=f"{file} (plan)")
        anatomy = dissect(config, tensors, own)
        facts = facts_of(manifest, loaded.plan, file=file)
        return cls(loaded, draw(loaded, anatomy, config, facts), anatomy, facts)


def check_static(
    drawn: Drawn,
    manifest: Manifest,
    base: CheckpointFolder,
    out: CheckpointFolder,
    *,
    advance: Callable[[int], None],
) -> list[Check]:
    """Every check that needs bytes only. `advance` counts the bytes read (of base and output together)."""
    blueprint = drawn.blueprint
    described = [_config(blueprint, out), _tensors(blueprint, out), *_code(blueprint, manifest, out)]
    if not all(check.holds for check in described):
        return [*described, check_beside(out)]
    digests = digests_of(base, base.tensors, advance), digests_of(out, out.tensors, advance)
    found, lineage = _base_found(manifest, base, digests[0]), surgeries_of(base)
    wrong = base_differences(manifest.base, found)
    if lineage != manifest.lineage:
        wrong.append(MANIFEST_FILE)
    return [
        *described,
        Check.of("base", wrong, _ANOTHER_BASE, f"the one operated on, by {len(digests[0])} digests of tensors"),
        check_manifest(manifest_differences(manifest, drawn.loaded, blueprint, drawn.facts)),
        *check_origin(manifest, blueprint),
        *check_files(manifest, out, Beside.of(blueprint, found, manifest), metadata_of(base)),
        _copies(blueprint, manifest, base, out, *digests),
        *_parts(blueprint, manifest, base, out),
        _silence(blueprint, manifest, drawn.anatomy, out),
        *_dropped(blueprint, drawn.anatomy, digests[0]),
        _constants(blueprint, manifest, out, digests[1]),
        _as_born(blueprint, manifest, digests[1]),
        *_as_trained(manifest, digests[1]),
        *check_beside_training(manifest, out),
    ]


def _base_found(manifest: Manifest, base: CheckpointFolder, digests: Mapping[str, str]) -> Base:
    """What a manifest would say of the base as it is."""
    claimed = manifest.base
    files = digests_beside(base, base.side_files)
    return base_entry(base, BaseId(claimed.id, claimed.revision), layers=claimed.layers, digests=digests, files=files)


def bytes_to_read(base: CheckpointFolder, out: CheckpointFolder) -> int:
    """Bytes `check_static` reads, for a progress bar."""
    return sum(info.nbytes for folder in (base, out) for info in folder.tensors.values())


def _config(blueprint: Blueprint, out: CheckpointFolder) -> Check:
    planned, found = blueprint.config, out.config
    both = planned.keys() & found.keys()
    wrong = sorted((planned.keys() ^ found.keys()) | {key for key in both if not same_json(planned[key], found[key])})
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
    return [_same_code(manifest, blueprint.code_files, out)]


def _same_code(manifest: Manifest, names: Collection[str], out: CheckpointFolder) -> Check:
    """Whether the files of code are those that surgery put there.

    What another version shipped is not at hand: it is noted that the manifest alone says so. Such code was refused at
    opening, unless the user trusts it.
    """
    broken = "not the files that surgery put there"
    wrong = [
        name
        for name in names
        if (content := out.read_code(name)) is None or manifest.code.get(name) != hashlib.sha256(content).hexdigest()
    ]
    if wrong or out.code == "shipped":
        return Check.of("code", wrong, broken, f"{some(names)}, as this version ships them")
    if manifest.tool.version == __version__:
        return Check("code", False, f"{broken}: {some(names)}")
    version = printable(manifest.tool.version)
    return Check("code", True, f"{some(names)}, by {MANIFEST_FILE} alone as surgeon {version} shipped them", note=True)


def _copies(
    blueprint: Blueprint,
    manifest: Manifest,
    original: CheckpointFolder,
    folder: CheckpointFolder,
    base: dict[str, str],
    out: dict[str, str],
) -> Check:
    """Whether every tensor that is one of the base's whole is so, byte for byte, but for those that were to train."""
    trained = manifest.trained
    old = {o.name for o in blueprint.outputs if not o.new or o.kept.covered}
    stray = [o.name for o in blueprint.outputs if o.name in old and o.name in trained]
    told = manifest.changed_of_base
    if unasked := [name for name in stray if name not in told]:
        # Runs before there was `before` in what is recorded of them.
        may = set(trainable_set(folder, manifest, "added").names) if manifest.operations else set()
        if forbidden := [name for name in unasked if name not in may]:
            return Check("base tensors", False, f"trained, though no surgery lets them train: {some(forbidden)}")
    copied = {o.name: of for o in blueprint.outputs if (of := _copy_of(o, original.tensors)) is not None}
    if wrong := [name for name, of in copied.items() if name in told and told[name] != base[of]]:
        return Check("base tensors", False, f"said to have begun training as others than the base's: {some(wrong)}")
    untrained = [o for o in blueprint.outputs if o.name not in trained]
    copies = [o.name for o in untrained if o.name in copied]
    wrong = [name for name in copies if out[name] != base[copied[name]]]
    kept = sum(not output.new for output in untrained)
    since = f"; {changed_by_training(len(stray))}" if stray else ""
    found = f"{kept} byte-identical in their places, and {len(copies) - kept} copies of them{since}"
    return Check.of("base tensors", wrong, "not byte-identical to their originals", found)


def _copy_of(output: Output, base: Mapping[str, TensorInfo]) -> str | None:
    """The tensor of the base whose bytes, all of them, an output is; None where it is another."""
    pieces = output.pieces
    return next((name for name in pieces.tensors if pieces.is_all_of(base[name])), None)


def changed_by_training(number: int) -> str:
    """How many of the base's tensors are others now, in words."""
    return f"{number} base tensor{'s' * (number != 1)} changed by training"


def _parts(blueprint: Blueprint, manifest: Manifest, base: CheckpointFolder, out: CheckpointFolder) -> list[Check]:
    """Nothing where no tensor holds parts of the base's; else whether all parts are, byte for byte.

    Of tensors that were trained, those parts that do not train with what is new.
    """
    trains_all = any(record.trains == "all" for record in blueprint.operations)
    held: dict[str, Pieces] = {}
    for output in blueprint.outputs:
        if output.name in manifest.trained:
            pieces = Pieces(0, ()) if trains_all or output.name in manifest.changed_of_base else output.kept
        else:
            pieces = output.pieces
        if pieces.spans and _copy_of(output, base.tensors) is None:
            held[output.name] = pieces
    if not held:
        return []
    wrong = [name for name, pieces in held.items() if not holds_pieces(out, name, pieces, base)]
    parts = sum(len(pieces.spans) for pieces in held.values())
    kept = f"{len(held)} tensors hold {parts} parts of the base's, byte-identical"
    return [Check.of("parts of tensors", wrong, "not the parts of the base's that they should hold", kept)]


def _silence(blueprint: Blueprint, manifest: Manifest, anatomy: Anatomy, out: CheckpointFolder) -> Check:
    """From the anatomy, not from the recipes: which tensors of new layers must hold which constant."""
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
            info = out.tensors[name]
            checked += 1
            if bytes(out.read(name)) != Constant(value, info.dtype, info.shape).data:
                loud.append(name)
    kept = f"{checked} tensors hold exactly what keeps new layers silent"
    if not checked:
        kept = "no operation promises it" if not trained else "trained since, or no operation promises it"
    return Check.of("silent at birth", loud, "not the constant that keeps a new layer silent", kept)


def _dropped(blueprint: Blueprint, anatomy: Anatomy, base: Mapping[str, str]) -> list[Check]:
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


def _constants(blueprint: Blueprint, manifest: Manifest, folder: CheckpointFolder, out: dict[str, str]) -> Check:
    """What the plan calls constant: the zeros that keep adapters silent, gates that start at their α."""
    trained = manifest.trained
    untrained = [o for o in blueprint.outputs if o.name not in trained]
    constants = [(o.name, o.recipe) for o in untrained if isinstance(o.recipe, Constant)]
    wrong = [name for name, recipe in constants if out[name] != recipe.sha256]
    # Zeros that keep more neurons silent, say, beside those of the base.
    wider = [(o.name, o.recipe) for o in untrained if isinstance(o.recipe, Joined)]
    wrong += [name for name, recipe in wider if not _silent_beside(recipe, name, folder)]
    kept = f"{len(constants)} tensors hold the value they are born with" if constants else _none(manifest)
    return Check.of("constants", wrong, "not the value they are born with", kept)


def _silent_beside(recipe: Joined, name: str, out: CheckpointFolder) -> bool:
    """Whether the parts of a wider tensor that are constant are so, by bytes."""
    info, begin = out.tensors[name], 0
    for part in recipe.parts:
        end = begin + part.shape[recipe.axis]
        if isinstance(part, Constant):
            lying = indices(name, info.shape, DTYPE_BITS[info.dtype], recipe.axis, range(begin, end))
            if digest_of_pieces(out, lying) != part.sha256:
                return False
        begin = end
    return True


def _as_born(blueprint: Blueprint, manifest: Manifest, out: dict[str, str]) -> Check:
    trained = manifest.trained
    computed = [o.name for o in blueprint.outputs if o.new and o.computed and o.name not in trained]
    unknown = [name for name in computed if name not in manifest.new_tensors]
    if unknown:
        return Check("new tensors", False, f"not in the manifest: {some(unknown)}")
    changed = [name for name in computed if manifest.new_tensors[name].sha256 != out[name]]
    kept = f"{len(computed)} computed ones are as they were written" if computed else _none(manifest)
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


def check_beside_training(manifest: Manifest, out: CheckpointFolder) -> list[Check]:
    """What training put beside the weights, where it did: the base's own values, and an adapter.

    A note where it is not there: it stays with the run and its delta; no other command carries it along.
    """
    checks: list[Check] = []
    if manifest.kept:
        found = kept_tensors(out)
        digests = {} if found is None else digests_of(found, found.tensors, lambda _: None)
        wrong = sorted(name for name in {**digests, **manifest.kept} if digests.get(name) != manifest.kept.get(name))
        checks.append(
            Check("kept tensors", True, f"{KEPT_FOLDER}/ is not here, so `revert` cannot give the base back", note=True)
            if found is None
            else Check.of(
                "kept tensors", wrong, "not the base's own", f"{len(digests)} of the base's in {KEPT_FOLDER}/"
            )
        )
    if manifest.adapter is not None:
        checks.append(_adapter(manifest.adapter, out))
    return checks


def _adapter(entry: AdapterEntry, out: CheckpointFolder) -> Check:
    found = adapter_beside(out)
    if found is None:
        return Check("adapter", True, f"{ADAPTER_FOLDER}/ is not here; it is merged into the weights", note=True)
    both = {**entry.tensors, **found.tensors}
    wrong = sorted(name for name in both if entry.tensors.get(name) != found.tensors.get(name))
    wrong += [ADAPTER_CONFIG] if entry.config != found.config else []
    return Check.of("adapter", wrong, "not as training left it", f"{len(found.tensors)} tensors in {ADAPTER_FOLDER}/")


def earlier_state(base: CheckpointFolder, out: CheckpointFolder, manifest: Manifest) -> State | None:
    """The state of `out`, whose manifest is `manifest`, that `base` is; None unless that is before the last base.

    Raises BadInput where what stood in that state is lost, or the base's own manifest was edited.
    """
    # By shapes too: where the vocabulary grew, names are those of before.
    shapes = {name: list(info.shape) for name, info in base.tensors.items()}
    if not manifest.lineage or shapes == {name: tensor.shape for name, tensor in manifest.base.tensors.items()}:
        return None
    known = [surgery.sha256 for surgery in manifest.lineage]
    number = len(known)
    if base.manifest is None:
        number = 0
    elif (seal := manifest_of(base).sha256) in known:
        number = known.index(seal) + 1
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

    The plans of all surgeries since are drawn again, one on what the one before makes. What training left in between
    is known by the manifests alone. `advance` counts the bytes read (of base and output together).
    """
    file = str(out.path / MANIFEST_FILE)
    found = _base_found(state.undone[0], base, digests_of(base, base.tensors, advance))
    wrong = base_differences(state.base, found)
    if tuple(surgeries_of(base)) != tuple(state.undone[0].lineage):
        wrong.append(MANIFEST_FILE)
    checked = Check.of(
        "base",
        wrong,
        _ANOTHER_BASE,
        f"the one operated on {len(state.undone)} surgeries ago, by {len(found.tensors)} digests of tensors",
    )
    if wrong:
        return [checked]
    again = redrawn(state.undone, base.tensors, base.own, first=state.number + 1, file=file)
    last = again.drawn[-1]
    now = digests_of(out, out.tensors, advance)
    retrained = manifest.changed_of_base
    moved: list[str] = []
    for name, lying in state.held.items():
        place = lying.tensors[0]
        whole = lying.is_all_of(out.tensors[place])
        digest = now[place] if whole else digest_of_pieces(out, lying)
        if digest != found.tensors[name].sha256 and not (whole and place in retrained):
            moved.append(place)
    held = held_by(manifest, file=file)
    edited = [name for name, digest in now.items() if held.get(name) != StoredTensor.of(out.tensors[name], digest)]
    edited += [name for name in held if name not in now]
    return [
        checked,
        _config(last.blueprint, out),
        check_manifest(again.wrong),
        *check_origin(manifest, last.blueprint),
        *check_files(manifest, out, Beside.of(last.blueprint, manifest.base, manifest), metadata_of(out)),
        Check.of(
            "tensors since then",
            [] if again.trains_all else moved,
            "not byte-identical to the base's",
            f"{len(state.held) - len(moved) - len(retrained)} of the base's are byte-identical"
            + (f"; {changed_by_training(len(retrained))}" if retrained else ""),
        ),
        Check.of(
            "as left",
            edited,
            "not as surgery or training left them",
            f"all {len(now)} tensors are as the last surgery or training left them",
        ),
    ]


@dataclass(frozen=True)
class Redrawn:
    """The plans of several surgeries, drawn again; `wrong` are the fields of manifests that say otherwise."""

    drawn: list[Drawn]
    wrong: list[str]
    trains_all: bool


def redrawn(
    surgeries: Sequence[Manifest],
    tensors: Mapping[str, TensorInfo],
    own: OwnCode | None,
    *,
    first: int,
    file: str,
) -> Redrawn:
    """Draw the plans of `surgeries` again, the first on a base of these `tensors`, each on what the one before makes.

    `first` is the number of the first one, for messages. Raises BadInput for a plan that cannot be drawn.
    """
    drawn: list[Drawn] = []
    wrong: list[str] = []
    # The first base's tensors by their names of now, while no surgery lets them train.
    kept = dict(surgeries[0].base.tensors)
    config, files = surgeries[0].base.config, surgeries[0].base.files
    for number, manifest in enumerate(surgeries, first):
        claimed = manifest.base
        where = f"surgery {number}: "
        if not same_json(_told(config), _told(claimed.config)):
            wrong.append(f"{where}base.config")
        # What a surgery made may have been trained before the next one: of that its shape alone is known.
        found = {
            name: kept.get(name) or StoredTensor.of(info, claimed.digests.get(name, "0" * 64))
            for name, info in tensors.items()
        }
        differing = base_differences(claimed, claimed.model_copy(update={"tensors": found, "files": files}))
        wrong += [f"{where}the base's {name}" for name in differing]
        step = Drawn.of(manifest, claimed.config, tensors, own, f"{file} (surgery {number})")
        blueprint = step.blueprint
        beside = Beside.of(blueprint, claimed, manifest).names
        wrong += [f"{where}files.{name}" for name in beside ^ manifest.files.keys() if name != RECORD_FILE]
        wrong += [f"{where}{path}" for path in manifest_differences(manifest, step.loaded, blueprint, step.facts)]
        drawn.append(step)
        trains_all = any(record.trains == "all" for each in drawn for record in each.blueprint.operations)
        moved = {o.name: of for o in blueprint.outputs if (of := _unchanged(o, tensors)) is not None}
        kept = {} if trains_all else {name: kept[source] for name, source in moved.items() if source in kept}
        tensors = {o.name: _planned(o) for o in blueprint.outputs}
        config = blueprint.config
        files = {name: digest for name, digest in manifest.files.items() if is_side_file(name) or name in manifest.code}
    return Redrawn(drawn, wrong, trains_all)


def _unchanged(output: Output, base: Mapping[str, TensorInfo]) -> str | None:
    """The tensor of the base that an output is and stays while what is new trains; None where it is another."""
    of = _copy_of(output, base) if output.kept.covered else None
    return of if of is not None and base[of].shape == output.recipe.shape else None


def _planned(output: Output) -> TensorInfo:
    """A tensor of a blueprint as a header would have it; it lies nowhere."""
    recipe = output.recipe
    return TensorInfo(output.name, recipe.dtype, recipe.shape, "", 0, 0)


def _told(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config without what another tool that saves it writes of itself."""
    return {key: value for key, value in config.items() if key not in ("transformers_version", "_name_or_path")}


def check_own_manifest(
    manifest: Manifest, out: CheckpointFolder, anatomy: Anatomy, *, advance: Callable[[int], None]
) -> list[Check]:
    """An output against its own manifest, without its base: what can be checked of a folder that is to be given away.

    Unlike `check_static` this lets what a surgery made have been trained since, and believes the manifest's digests.
    `advance` counts the bytes read; all are read once.

    Raises BadInput where the manifest contradicts itself.
    """
    # But for those to which the surgery gave another value.
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
    """A note where files beside the weights are others: saved again by the tool that trained it, say, or edited."""
    found = digests_beside(out, manifest.files)
    changed = [name for name, digest in manifest.files.items() if found.get(name) != digest]
    detail = f"not as surgery left them, so saved again by another tool, or edited: {some(changed)}"
    kept = f"{len(found)} beside the weights, by digest"
    return [Check("files", True, detail if changed else kept, note=bool(changed))]


def _own_layers(manifest: Manifest, anatomy: Anatomy) -> Check:
    found, named = anatomy.sizes.layers, len(manifest.layers)
    if found != named:
        return Check("layers", False, f"{found} of them, {MANIFEST_FILE} names {named}")
    return Check("layers", True, f"all {named}, every tensor of the shape that config.json asks for")


def _own_tensors(manifest: Manifest, places: dict[str, str], out: CheckpointFolder) -> Check:
    expected = {*manifest.new_tensors, *places.values()}
    missing = expected - out.tensors.keys()
    # Where a merge folded tensors away, the promise says so: nothing else takes a base's tensor out.
    if manifest.promise != "exact":
        missing &= manifest.new_tensors.keys()
    if missing:
        return Check("tensors", False, f"missing: {some(sorted(missing))}")
    extra = sorted(out.tensors.keys() - expected)
    return Check.of("tensors", extra, f"not in {MANIFEST_FILE}", f"{len(out.tensors)}, each in {MANIFEST_FILE}")


def _own_code(manifest: Manifest, out: CheckpointFolder) -> list[Check]:
    """Nothing for a native output."""
    if manifest.native and not manifest.code:
        return []
    if has_own_code(out.config):
        held = digests_beside(out, manifest.code)
        wrong = [name for name, digest in manifest.code.items() if held.get(name) != digest]
        return [Check.of("code", wrong, "not the base's own files", f"the base's own, {some(list(held))}, by digest")]
    if not manifest.code:
        return [Check("code", False, f"none of it is in {MANIFEST_FILE}")]
    return [_same_code(manifest, manifest.code.keys(), out)]


def _own_base_tensors(
    manifest: Manifest, places: dict[str, str], out: CheckpointFolder, digests: dict[str, str]
) -> Check:
    there = {name: place for name, place in places.items() if place in digests}
    held = {place: StoredTensor.of(out.tensors[place], digests[place]) for place in there.values()}
    changed = [place for name, place in there.items() if held[place] != manifest.base.tensors[name]]
    told = manifest.changed_of_base
    recorded = [place for place in changed if place in told and digests[place] == manifest.trained[place]]
    if len(recorded) == len(changed) and recorded:
        kept = f"{len(there) - len(changed)} byte-identical in their places; {changed_by_training(len(changed))}"
        return Check("base tensors", True, kept)
    if changed and not any(entry.trains == "all" for entry in manifest.operations):
        return Check("base tensors", False, f"not what the base held: {some(changed)}")
    trained = f", {len(changed)} trained since, as the surgery means them to be" if changed else ""
    return Check("base tensors", True, f"{len(there) - len(changed)} byte-identical in their places{trained}")


def _own_new_tensors(manifest: Manifest, digests: dict[str, str]) -> Check:
    changed = [name for name, tensor in manifest.new_tensors.items() if digests[name] != tensor.sha256]
    held = [name for name in changed if held_of(manifest.new_tensors[name], manifest).stays]
    if held and not any(entry.trains == "all" for entry in manifest.operations):
        return Check("new tensors", False, f"trained, though they hold what is the base's: {some(held)}")
    trained = len(changed)
    rest = f"{len(manifest.new_tensors) - trained} as they were born"
    return Check("new tensors", True, f"{rest}, {trained} trained since" if trained else rest)
