"""The static proof: an output is compared with its base by bytes, without running a model.

The blueprint is drawn again from the plan in the manifest and the base's headers. So the check uses the meaning of the
plan, not what the output states about itself. New tensors must be as they were made: silent where promised, constant,
or as written. The results of training runs must be there, in the tensors and next to them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from surgeon._version import __version__
from surgeon.anatomy.anatomy import Anatomy
from surgeon.anatomy.anatomy_cache import recalled
from surgeon.anatomy.grafted_config import is_grafted
from surgeon.blueprint.blueprint import Blueprint
from surgeon.blueprint.recipes import Constant
from surgeon.checkpoint.card_metadata import metadata_of
from surgeon.checkpoint.folder import (
    CONFIG_FILE,
    MANIFEST_FILE,
    CheckpointFolder,
    digest_of_pieces,
    digests_of,
)
from surgeon.checkpoint.header import TensorInfo
from surgeon.checkpoint.own_code import OwnCode
from surgeon.checkpoint.peft_folder import ADAPTER_CONFIG
from surgeon.checkpoint.pieces import Pieces
from surgeon.common.check import Check, some
from surgeon.common.formatting import at_revision
from surgeon.common.json_results import same_json
from surgeon.errors import BadInput, printable
from surgeon.grafts.bundle import grafts_in
from surgeon.grafts.ranges import by_ranges
from surgeon.manifest.compose import BaseId, base_entry, surgeries_of
from surgeon.manifest.facts import facts_of
from surgeon.manifest.manifest import (
    AdapterEntry,
    Base,
    Manifest,
)
from surgeon.manifest.run_files import ADAPTER_FOLDER, KEPT_FOLDER, adapter_beside, kept_tensors
from surgeon.operations.prepare import Facts
from surgeon.plan.plan import LoadedPlan, draw, recorded_plan
from surgeon.verification.base_bytes import Original, check_base_bytes
from surgeon.verification.claims import (
    Beside,
    base_differences,
    check_beside,
    check_files,
    check_manifest,
    check_origin,
    digests_beside,
    manifest_differences,
)

ANOTHER_BASE = "not the base this was made from; differing"


@dataclass(frozen=True)
class Drawn:
    """The plan in a manifest, drawn on a base from headers and from the facts that the manifest keeps."""

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
        """Draw the plan of a manifest that was read from `file`. Raises BadInput where it cannot be drawn."""
        loaded = recorded_plan(manifest.plan, source=f"{file} (plan)")
        anatomy = recalled(config, tensors, own)
        facts = facts_of(manifest, loaded.plan, file=file)
        return cls(loaded, draw(loaded, anatomy, config, facts), anatomy, facts)


def check_static(
    drawn: Drawn,
    manifest: Manifest,
    base: CheckpointFolder,
    out: CheckpointFolder,
    *,
    facts: bool,
    advance: Callable[[int], None],
) -> list[Check]:
    """Run every check that needs only bytes; return the checks in the order of a report.

    Where config, tensors' shapes or code differ from the plan, no tensor is read and most other checks are left out.
    With `facts`, the operations' own checks of their facts run too. `advance` receives the count of bytes read (base
    and output together). Raises BadInput where no tensor of `base` is one that the manifest names.
    """
    blueprint = drawn.blueprint
    described = [check_config(blueprint, out), _tensors(blueprint, out), *_code(blueprint, manifest, out)]
    if not all(check.holds for check in described):
        return [*_another_base(manifest, base), *described, check_beside(out)]
    digests = digests_of(base, base.tensors, advance), digests_of(out, out.tensors, advance)
    found, lineage = base_found(manifest, base, digests[0]), surgeries_of(base)
    wrong = base_differences(manifest.base, found)
    _check_known(manifest, base, wrong)
    if lineage != manifest.lineage:
        wrong.append(MANIFEST_FILE)
    return [
        *described,
        Check.of("base", wrong, ANOTHER_BASE, f"the one operated on, by {len(digests[0])} digests of tensors"),
        check_manifest(manifest_differences(manifest, drawn.loaded, blueprint, drawn.facts)),
        *check_origin(manifest, blueprint),
        *check_files(manifest, out, Beside.of(blueprint, found, manifest), metadata_of(base)),
        *(check for each in drawn.facts.values() if facts for check in each.checks(base, out)),
        check_base_bytes(blueprint, manifest, Original(base, digests[0]), out, digests[1]),
        *check_dropped(blueprint, drawn.anatomy, digests[0]),
        *check_new_tensors(blueprint, manifest, drawn.anatomy, out, digests[1]),
        *check_trained(manifest, digests[1]),
        *check_beside_training(manifest, out),
    ]


def base_found(manifest: Manifest, base: CheckpointFolder, digests: Mapping[str, str]) -> Base:
    """Return the manifest's entry of the base, computed from the actual base."""
    claimed = manifest.base
    files = digests_beside(base, base.side_files)
    return base_entry(base, BaseId(claimed.id, claimed.revision), layers=claimed.layers, digests=digests, files=files)


def bytes_to_read(base: CheckpointFolder, out: CheckpointFolder) -> int:
    """Return the number of bytes that `check_static` reads, for a progress bar."""
    return sum(info.nbytes for folder in (base, out) for info in folder.tensors.values())


def _another_base(manifest: Manifest, base: CheckpointFolder) -> list[Check]:
    """Return a failed check where config or headers show that this is not the recorded base; else nothing."""
    claimed = {name: (of.dtype, [*of.shape]) for name, of in manifest.base.tensors.items()}
    found = {name: (of.dtype, [*of.shape]) for name, of in base.tensors.items()}
    wrong = [] if same_json(manifest.base.config, base.config) else [CONFIG_FILE]
    wrong += sorted(name for name in {**claimed, **found} if claimed.get(name) != found.get(name))
    _check_known(manifest, base, wrong)
    return [Check.of("base", wrong, ANOTHER_BASE, "")] if wrong else []


def _check_known(manifest: Manifest, base: CheckpointFolder, wrong: Collection[str]) -> None:
    """Raise BadInput where every tensor of `base` is `wrong`: it is another model, not the base with a change."""
    if base.tensors.keys() <= {*wrong}:
        named = printable(at_revision(manifest.base.id, manifest.base.revision))
        raise BadInput(
            f"{base.source.shown}: no tensor of it is of the base that OUT was made from; give that ({named})"
        )


def check_config(blueprint: Blueprint, out: CheckpointFolder) -> Check:
    """Check that config.json is as the plan makes it."""
    planned, found = blueprint.config, dict(out.config)
    if is_grafted(planned) and is_grafted(found):
        # Outputs of earlier versions had an entry for each layer.
        found["surgery"] = by_ranges(found["surgery"])
    both = planned.keys() & found.keys()
    wrong = sorted((planned.keys() ^ found.keys()) | {key for key in both if not same_json(planned[key], found[key])})
    return Check.of("config", wrong, "config.json differs from what the plan makes it", "as the plan makes it")


def _tensors(blueprint: Blueprint, out: CheckpointFolder) -> Check:
    """Check that the output has exactly the planned tensors, with their shapes and dtypes."""
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
    """Check that the code next to the weights is the shipped code; no check for a native output."""
    if blueprint.native:
        return []
    return [same_code(manifest, blueprint.code_files, out)]


def same_code(manifest: Manifest, names: Collection[str], out: CheckpointFolder) -> Check:
    """Check that the code files are the files that surgery wrote.

    The code of other versions is not available: a note then states that only the manifest confirms it. Such code was
    refused at opening, unless the user trusts it.
    """
    broken = "not the files that surgery put there"
    wrong = [
        name
        for name in names
        if (content := out.read_code(name)) is None or manifest.code.get(name) != hashlib.sha256(content).hexdigest()
    ]
    if wrong or out.classes == "shipped":
        grafts = ", ".join(grafts_in(out.config))
        digest = ", ".join(manifest.code.get(name, "")[:12] for name in names)
        return Check.of(
            "code", wrong, broken, f"{some(names)} ({digest}…): the file of surgeon {__version__} for {grafts}"
        )
    if manifest.tool.version == __version__:
        return Check("code", False, f"{broken}: {some(names)}")
    version = printable(manifest.tool.version)
    return Check("code", True, f"{some(names)}, by {MANIFEST_FILE} alone as surgeon {version} shipped them", note=True)


def check_trained(manifest: Manifest, out: Mapping[str, str]) -> list[Check]:
    """Check that the output has the tensors of its last training run; no check for an untrained output."""
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
    """Check the files that training put next to the weights: the base's own values, and an adapter.

    Where they are missing, the check is only a note: they stay with the run; no other command copies them.
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
    """Check that the adapter in `adapter/` equals the manifest's entry; only a note where the folder is missing."""
    found = adapter_beside(out)
    if found is None:
        return Check("adapter", True, f"{ADAPTER_FOLDER}/ is not here; it is merged into the weights", note=True)
    both = {**entry.tensors, **found.tensors}
    wrong = sorted(name for name in both if entry.tensors.get(name) != found.tensors.get(name))
    wrong += [ADAPTER_CONFIG] if entry.config != found.config else []
    return Check.of("adapter", wrong, "not as training left it", f"{len(found.tensors)} tensors in {ADAPTER_FOLDER}/")


def check_new_tensors(
    blueprint: Blueprint, manifest: Manifest, anatomy: Anatomy, folder: CheckpointFolder, out: Mapping[str, str]
) -> list[Check]:
    """Check the constants that keep new layers silent, the plan's other constants, and computed tensors.

    `out` are the output's digests.
    """
    return [
        _silence(blueprint, manifest, anatomy, folder, out),
        _constants(blueprint, manifest, folder, out),
        _as_born(blueprint, manifest, out),
    ]


def _silence(
    blueprint: Blueprint, manifest: Manifest, anatomy: Anatomy, folder: CheckpointFolder, out: Mapping[str, str]
) -> Check:
    """Check the constants that keep new layers silent; the anatomy names these constants, not the recipes."""
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
    """Check, by the base's own bytes, that layers removed as silent were silent; no check where there are none."""
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


def _none(manifest: Manifest, why: str) -> str:
    """Return why a check of new tensors found none to check: for `why`, or for training."""
    return f"trained since, or {why}" if manifest.trained else why


def _constants(blueprint: Blueprint, manifest: Manifest, folder: CheckpointFolder, out: Mapping[str, str]) -> Check:
    """Check the plan's constants: zeros that keep adapters silent, gates that start at their α.

    Parts of tensors are checked too, for example zeros that keep additional neurons silent next to the base's neurons.
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
    kept = f"{whole} tensors hold their initial value" if whole else _none(manifest, "the plan makes none")
    return Check.of("constants", list(dict.fromkeys(wrong)), "not their initial value", kept)


def _as_born(blueprint: Blueprint, manifest: Manifest, out: Mapping[str, str]) -> Check:
    """Check that computed new tensors that were not trained have the manifest's digests."""
    trained = manifest.trained
    computed = [o.name for o in blueprint.outputs if o.new and o.computed and o.name not in trained]
    unknown = [name for name in computed if name not in manifest.new_tensors]
    if unknown:
        return Check("new tensors", False, f"not in the manifest: {some(unknown)}")
    changed = [name for name in computed if manifest.new_tensors[name].sha256 != out[name]]
    none = _none(manifest, "the plan computes none")
    kept = f"{len(computed)} computed ones are as they were written" if computed else none
    return Check.of("new tensors", changed, "changed since they were written", kept)
