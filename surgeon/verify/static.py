"""The static proof, by bytes and without running a model: an output against its base.

Against its base the blueprint is drawn anew from the plan in the manifest and the base's headers, so what is checked is
what the plan means, not what the output says about itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from surgeon._version import __version__
from surgeon.blueprint.blueprint import Blueprint
from surgeon.checkpoint.card_metadata import metadata_of
from surgeon.checkpoint.folder import (
    CONFIG_FILE,
    MANIFEST_FILE,
    CheckpointFolder,
    digests_of,
)
from surgeon.checkpoint.header import TensorInfo
from surgeon.checkpoint.own_code import OwnCode
from surgeon.common.json_results import same_json
from surgeon.errors import printable
from surgeon.families.anatomy import Anatomy
from surgeon.families.anatomy_cache import recalled
from surgeon.families.grafted_config import is_grafted
from surgeon.grafts.bundle import grafts_in
from surgeon.grafts.ranges import by_ranges
from surgeon.manifest.compose import BaseId, base_entry, surgeries_of
from surgeon.manifest.facts import facts_of
from surgeon.manifest.manifest import (
    Base,
    Manifest,
)
from surgeon.operations.prepare import Facts
from surgeon.plan.plan import LoadedPlan, draw, recorded_plan
from surgeon.verify.base_bytes import Original, check_base_bytes
from surgeon.verify.check import Check, some
from surgeon.verify.claims import (
    Beside,
    base_differences,
    check_files,
    check_manifest,
    check_origin,
    check_trimmed,
    digests_beside,
    manifest_differences,
)
from surgeon.verify.new_tensors import check_dropped, check_new_tensors
from surgeon.verify.side_files import check_beside
from surgeon.verify.trained import check_beside_training, check_trained

ANOTHER_BASE = "not the base this was made from; differing"


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
        """Draw the plan of a manifest, which was read from `file`. Raises BadInput where that cannot be done."""
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
    advance: Callable[[int], None],
) -> list[Check]:
    """Every check that needs bytes only. `advance` counts the bytes read (of base and output together)."""
    blueprint = drawn.blueprint
    described = [check_config(blueprint, out), _tensors(blueprint, out), *_code(blueprint, manifest, out)]
    if not all(check.holds for check in described):
        return [*_another_base(manifest, base), *described, check_beside(out)]
    digests = digests_of(base, base.tensors, advance), digests_of(out, out.tensors, advance)
    found, lineage = base_found(manifest, base, digests[0]), surgeries_of(base)
    wrong = base_differences(manifest.base, found)
    if lineage != manifest.lineage:
        wrong.append(MANIFEST_FILE)
    return [
        *described,
        Check.of("base", wrong, ANOTHER_BASE, f"the one operated on, by {len(digests[0])} digests of tensors"),
        check_manifest(manifest_differences(manifest, drawn.loaded, blueprint, drawn.facts)),
        *check_origin(manifest, blueprint),
        *check_files(manifest, out, Beside.of(blueprint, found, manifest), metadata_of(base)),
        *check_trimmed(manifest, base, out),
        check_base_bytes(blueprint, manifest, Original(base, digests[0]), out, digests[1]),
        *check_dropped(blueprint, drawn.anatomy, digests[0]),
        *check_new_tensors(blueprint, manifest, drawn.anatomy, out, digests[1]),
        *check_trained(manifest, digests[1]),
        *check_beside_training(manifest, out),
    ]


def base_found(manifest: Manifest, base: CheckpointFolder, digests: Mapping[str, str]) -> Base:
    """What a manifest would say of the base as it is."""
    claimed = manifest.base
    files = digests_beside(base, base.side_files)
    return base_entry(base, BaseId(claimed.id, claimed.revision), layers=claimed.layers, digests=digests, files=files)


def bytes_to_read(base: CheckpointFolder, out: CheckpointFolder) -> int:
    """Bytes `check_static` reads, for a progress bar."""
    return sum(info.nbytes for folder in (base, out) for info in folder.tensors.values())


def _another_base(manifest: Manifest, base: CheckpointFolder) -> list[Check]:
    """A failed check where config or headers show that this is not the base that was operated on, else nothing."""
    claimed = {name: (of.dtype, [*of.shape]) for name, of in manifest.base.tensors.items()}
    found = {name: (of.dtype, [*of.shape]) for name, of in base.tensors.items()}
    wrong = [] if same_json(manifest.base.config, base.config) else [CONFIG_FILE]
    wrong += sorted(name for name in {**claimed, **found} if claimed.get(name) != found.get(name))
    return [Check.of("base", wrong, ANOTHER_BASE, "")] if wrong else []


def check_config(blueprint: Blueprint, out: CheckpointFolder) -> Check:
    """Whether config.json is as the plan makes it."""
    planned, found = blueprint.config, dict(out.config)
    if is_grafted(planned) and is_grafted(found):
        # Outputs had an entry for each layer before.
        found["surgery"] = by_ranges(found["surgery"])
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
    return [same_code(manifest, blueprint.code_files, out)]


def same_code(manifest: Manifest, names: Collection[str], out: CheckpointFolder) -> Check:
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
