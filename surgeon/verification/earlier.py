"""Verification of an output of several surgeries against an earlier state: all plans since then are drawn again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surgeon.blueprint.blueprint import Output
from surgeon.checkpoint.card_metadata import metadata_of
from surgeon.checkpoint.folder import MANIFEST_FILE, RECORD_FILE, CheckpointFolder, digest_of_pieces, digests_of
from surgeon.checkpoint.header import TensorInfo
from surgeon.checkpoint.own_code import OwnCode
from surgeon.checkpoint.source import is_side_file
from surgeon.common.check import Check
from surgeon.common.json_results import same_json
from surgeon.manifest.compose import surgeries_of
from surgeon.manifest.lineage import Lineage, State
from surgeon.manifest.manifest import Base, Manifest, StoredTensor
from surgeon.manifest.moves import recorded_tensors
from surgeon.manifest.reading import manifest_of
from surgeon.verification.base_bytes import changed_by_training, copy_of
from surgeon.verification.claims import (
    Beside,
    base_differences,
    check_files,
    check_manifest,
    check_origin,
    manifest_differences,
)
from surgeon.verification.static import ANOTHER_BASE, Drawn, base_found, check_config


def earlier_state(base: CheckpointFolder, out: CheckpointFolder, manifest: Manifest) -> State | None:
    """Return the state of `out` (with its `manifest`) that equals `base`; None where `base` is the last surgery's base.

    Raises BadInput where content of that state is lost, or the base's own manifest was edited.
    """
    # Compare shapes too: where the vocabulary grew, names are unchanged.
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
    """Check an output of several surgeries against an earlier state, for example its first base.

    The plans of all surgeries since then are drawn again, each on the result of the one before. Training in between is
    known only from the manifests. `advance` receives the count of bytes read (base and output together).
    """
    file = str(out.path / MANIFEST_FILE)
    found = base_found(state.undone[0], base, digests_of(base, base.tensors, advance))
    wrong = base_differences(state.base, found)
    if tuple(surgeries_of(base)) != tuple(state.undone[0].lineage):
        wrong.append(MANIFEST_FILE)
    checked = Check.of(
        "base",
        wrong,
        ANOTHER_BASE,
        f"the one operated on {len(state.undone)} surgeries ago, by {len(found.tensors)} digests of tensors",
    )
    if wrong:
        return [checked]
    again = redrawn(state.undone, base.tensors, base.own, first=state.number + 1, file=file)
    last = again.drawn[-1]
    now = digests_of(out, out.tensors, advance)
    moved, trained = _changed_since(state, manifest, found, out, now)
    left = recorded_tensors(manifest, file=file)
    edited = [name for name, digest in now.items() if left.get(name) != StoredTensor.of(out.tensors[name], digest)]
    edited += [name for name in left if name not in now]
    return [
        checked,
        check_config(last.blueprint, out),
        check_manifest(again.wrong),
        *check_origin(manifest, last.blueprint),
        *check_files(manifest, out, Beside.of(last.blueprint, manifest.base, manifest), metadata_of(out)),
        *(check for facts in last.facts.values() for check in facts.checks(None, out)),
        Check.of(
            "tensors since then",
            [] if again.trains_all else moved,
            "not byte-identical to the base's",
            f"{len(state.pieces) - len(moved) - trained} of the base's are byte-identical"
            + (f"; {changed_by_training(trained)}" if trained else ""),
        ),
        Check.of(
            "as left",
            edited,
            "not as surgery or training left them",
            f"all {len(now)} tensors are as the last surgery or training left them",
        ),
    ]


def _changed_since(
    state: State, manifest: Manifest, base: Base, out: CheckpointFolder, digests: Mapping[str, str]
) -> tuple[list[str], int]:
    """Return (changed, trained): tensors that differ from the base though nothing trained them, and a count.

    `trained` is the number of the base's tensors that differ because training changed them.

    Args:
        state: The earlier state, which locates its tensors in the output.
        manifest: The output's manifest.
        base: The manifest's entry of the actual base.
        out: The output.
        digests: The digests of all its tensors.
    """
    retrained = manifest.changed_of_base.keys()
    moved: list[str] = []
    trained = 0
    for name, lying in state.pieces.items():
        place = lying.tensors[0]
        digest = digests[place] if lying.is_all_of(out.tensors[place]) else digest_of_pieces(out, lying)
        if digest == base.tensors[name].sha256:
            continue
        if retrained.isdisjoint(lying.tensors):
            moved.append(place)
        else:
            trained += 1
    return moved, trained


@dataclass(frozen=True)
class Redrawn:
    """The plans of several surgeries, drawn again; `wrong` are the manifests' fields that contradict them."""

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
    """Draw the plans of `surgeries` again, the first on a base of these `tensors`, each next on the result before it.

    `first` is the number of the first surgery, for messages. Raises BadInput for a plan that cannot be drawn.
    """
    drawn: list[Drawn] = []
    wrong: list[str] = []
    # The first base's tensors by their current names, as long as no surgery lets them train.
    kept = dict(surgeries[0].base.tensors)
    config, files = surgeries[0].base.config, surgeries[0].base.files
    for number, manifest in enumerate(surgeries, first):
        claimed = manifest.base
        where = f"surgery {number}: "
        if not same_json(_own(config), _own(claimed.config)):
            wrong.append(f"{where}base.config")
        # A surgery's new tensors may have been trained before the next surgery: only their shapes are known.
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
    """Return the base tensor that an output equals and that stays fixed in training; None if there is none."""
    of = copy_of(output, base) if output.kept.covered else None
    return of if of is not None and base[of].shape == output.recipe.shape else None


def _planned(output: Output) -> TensorInfo:
    """Return a blueprint's tensor as a header entry; it is in no file."""
    recipe = output.recipe
    return TensorInfo(output.name, recipe.dtype, recipe.shape, "", 0, output.nbytes)


def _own(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without the fields in which a tool that saves it names itself."""
    return {key: value for key, value in config.items() if key not in ("transformers_version", "_name_or_path")}
