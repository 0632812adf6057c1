"""Grow a base by a plan: preview, apply, and merge, which folds branches back."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from surgeon import devices
from surgeon.api.common import Quiet, check_way, manifest_of, written
from surgeon.api.proving import verify
from surgeon.blueprint import Blueprint
from surgeon.checkpoint.folder import CARD_FILE, CheckpointFolder
from surgeon.checkpoint.hub import locate, locate_adapter, remote_folder
from surgeon.checkpoint.peft_folder import AdapterFolder
from surgeon.errors import BadInput, printable
from surgeon.execute import Growth, Job, Listener, assist
from surgeon.families.anatomy import dissect
from surgeon.layout import MAX_NEW_SHARD_BYTES, group_by_layer, is_hole, lay_out, nbytes
from surgeon.manifest import BaseId, Manifest
from surgeon.metadata import metadata_of
from surgeon.operations.pmoe_experts import PMoEExperts
from surgeon.plan.drafting import draw
from surgeon.plan.loading import LoadedPlan, load_plan, parse_plan
from surgeon.plan.shipped import find_plan
from surgeon.ranks import Ranks
from surgeon.recipes import Copy, is_computed, leaves, numel
from surgeon.results import Applied, Merged, Preview
from surgeon.stopwatch import Stopwatch

# What a process that only moves bytes takes, interpreter included (measured by benchmarks/apply_speed.py).
_STREAMING_MEMORY = 90_000_000

_TORCH_MEMORY = 450_000_000

_NO_LICENSE = "no licence known: the base's README.md names none, so the card says unknown (`surgeon push --license`)"


def preview(
    plan: str | Path | LoadedPlan, base: str | Path, *, revision: str | None = None, trust_remote_code: bool = False
) -> Preview:
    """Show what `apply` would do, reading headers and config only.

    `plan` is a file, the name of a shipped plan, or what `parse_plan` made of a text; `base` a folder or a Hub id
    (whose weights are not downloaded). Raises BadInput for everything `apply` would refuse before writing.
    """
    base = str(base)
    loaded = _loaded(plan)
    if Path(base).exists():
        folder = CheckpointFolder.open(Path(base), trust_remote_code=trust_remote_code)
    else:
        folder = remote_folder(base, revision, trust_remote_code=trust_remote_code)
    return _preview(loaded, folder, _adapters(loaded))


def apply(
    plan: str | Path | LoadedPlan,
    base: str | Path,
    out: str | Path,
    *,
    revision: str | None = None,
    device: str = "auto",
    max_shard_bytes: int = MAX_NEW_SHARD_BYTES,
    read_back: bool = True,
    trust_remote_code: bool = False,
    listener: Listener | None = None,
    ranks: Ranks | None = None,
) -> Applied:
    """Grow `base` by `plan` into the new folder `out`.

    With `read_back` what was written is read again and compared with the base on the way: the static part of
    `verify`. `device` computes new weights; `max_shard_bytes` cuts shards of new tensors, between layers. `ranks` are
    the processes that torchrun has started (`surgeon.ranks.joined`), which all make this call.

    `out` is absent or complete at any moment; the same call continues what a killed one began. Raises BadInput.
    """
    listener = listener or Quiet()
    ranks = ranks or Ranks()
    target, base = Path(out), str(base)
    loaded = _loaded(plan)
    adapters = _adapters(loaded)
    if not Path(base).exists():
        # Everything that can be refused is refused before the first weight is downloaded.
        _preview(loaded, remote_folder(base, revision, trust_remote_code=trust_remote_code), adapters)
    located = locate(base, revision=revision)
    folder = CheckpointFolder.open(located.path, trust_remote_code=trust_remote_code)
    shown = _preview(loaded, folder, adapters, max_shard_bytes=max_shard_bytes)
    job = Job(
        purpose=Growth(
            loaded,
            BaseId(located.repo_id or located.path.resolve().name, located.revision),
            texts={name: _digest(path) for name, path in _texts(shown.blueprint, loaded).items()},
            metadata=metadata_of(folder),
            adapters=adapters,
        ),
        blueprint=shown.blueprint,
        base=folder,
        shards=shown.shards,
        device=_device(device, ranks) if _computes(shown.blueprint) else "cpu",
        read_back=read_back,
    )
    stopwatch = Stopwatch()
    if ranks.leads:
        with ranks.leading():
            manifest = _lead(job, shown, located.path, target, listener, stopwatch, ranks)
    else:
        assist(job, listener, stopwatch, ranks)
        manifest = manifest_of(CheckpointFolder.open(target))
    left_behind = tuple(name for name in folder.left_behind if name != CARD_FILE)
    return Applied(target, manifest, shown, left_behind, stopwatch.seconds, read_back)


def merge(
    out: str | Path,
    dest: str | Path,
    *,
    alpha: float | None = None,
    text: Path | None = None,
    window: int = 128,
    windows: int = 8,
    device: str = "auto",
    listener: Listener | None = None,
) -> Merged:
    """Fold the control blocks of `out` back into one layer each, into the new folder `dest`, and measure the cost.

    Control LLM's Lerp8MSE0*M (Table 5): weights are interpolated by `alpha` (None: the α used at inference). That does
    not preserve the function, so both models are run on real tokens, as in `verify`. Raises BadInput.
    """
    merged = apply(_merging(alpha), str(out), dest, device=device, listener=listener)
    return Merged(
        merged, verify(out, dest, text=text, window=window, windows=windows, device=device, listener=listener)
    )


def _loaded(plan: str | Path | LoadedPlan) -> LoadedPlan:
    return plan if isinstance(plan, LoadedPlan) else load_plan(find_plan(plan))


def _merging(alpha: float | None) -> LoadedPlan:
    share = "" if alpha is None else f"\n    alpha: {alpha!r}"
    return parse_plan(f"surgeon: 1\noperations:\n  - op: merge_branches{share}\n", source="merge")


def _preview(
    loaded: LoadedPlan,
    folder: CheckpointFolder,
    adapters: Mapping[str, AdapterFolder],
    *,
    max_shard_bytes: int = MAX_NEW_SHARD_BYTES,
) -> Preview:
    if folder.manifest is not None:
        # The output's lineage will tell of the base's surgeries: what cannot be read is refused before any work.
        manifest_of(folder)
    anatomy = dissect(folder.config, folder.tensors)
    known = {name: adapter.facts for name, adapter in adapters.items()}
    blueprint = draw(loaded, anatomy, folder.config, known)
    shards = lay_out(blueprint, folder.tensors, max_new_shard_bytes=max_shard_bytes)
    texts = _texts(blueprint, loaded)
    notes = [*folder.notes, *(f"the base is run on {printable(str(path))}" for path in texts.values())]
    if metadata_of(folder).license is None:
        notes.append(_NO_LICENSE)
    outputs = blueprint.outputs
    new = sum(numel(output.recipe) for output in outputs if output.new)
    after = sum(numel(output.recipe) for output in outputs)
    trains_all = any(record.trains == "all" for record in blueprint.operations)
    read = {
        leaf.source: folder.tensors[leaf.source].nbytes
        for output in outputs
        for leaf in leaves(output.recipe)
        if isinstance(leaf, Copy)
    }
    return Preview(
        plan=loaded,
        blueprint=blueprint,
        shards=shards,
        model_type=anatomy.family.model_type,
        parameters_before=sum(info.numel for info in folder.tensors.values()),
        parameters_after=after,
        parameters_new=new,
        parameters_trainable=after if trains_all else new,
        bytes_to_read=sum(read.values()),
        bytes_to_write=sum(nbytes(output) for output in outputs if not is_hole(output)),
        bytes_holes=sum(nbytes(output) for output in outputs if is_hole(output)),
        peak_memory=_peak_memory(blueprint),
        notes=tuple(notes),
    )


def _lead(
    job: Job, shown: Preview, base: Path, out: Path, listener: Listener, stopwatch: Stopwatch, ranks: Ranks
) -> Manifest:
    """Check what stands in the way of a surgery, then write."""
    check_way(job, base, out)
    for note in shown.notes:
        listener.say(note)
    if not shown.blueprint.native:
        from surgeon.verification.skeleton import check_skeleton

        check_skeleton(shown.blueprint)
    manifest = written(job, out, listener, stopwatch, ranks)
    assert manifest is not None
    return manifest


def _texts(blueprint: Blueprint, loaded: LoadedPlan) -> dict[str, Path]:
    """The texts that the plan has the base run on, by their names in the plan; BadInput where one is missing."""
    found: dict[str, Path] = {}
    for coupling in blueprint.couplings.values():
        if coupling.support is not None:
            path = Path(loaded.source).parent / coupling.support.text
            if not path.is_file():
                raise BadInput(
                    f"{printable(str(path))}: no such text, which `support: activations` of the plan asks for"
                )
            found[coupling.support.text] = path
    return found


def _adapters(loaded: LoadedPlan) -> dict[str, AdapterFolder]:
    """The PEFT adapters that the plan imports, opened, by their names in the plan."""
    opened: dict[str, AdapterFolder] = {}
    for operation in loaded.plan.operations:
        if not isinstance(operation, PMoEExperts) or operation.from_peft is None:
            continue
        name = operation.from_peft
        beside = Path(loaded.source).parent / name
        path = beside if beside.exists() else Path(name)
        if path.exists():
            opened[name] = AdapterFolder.open(path, id=path.resolve().name)
        else:
            located = locate_adapter(name)
            opened[name] = AdapterFolder.open(located.path, id=located.repo_id or name, revision=located.revision)
    return opened


def _digest(text: Path) -> str:
    with text.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _device(device: str, ranks: Ranks) -> str:
    """The device of this process; of several, `auto` gives each its own."""
    resolved = devices.resolve(device)
    return ranks.local_device or resolved if device == "auto" and resolved == "cuda" else resolved


def _computes(blueprint: Blueprint) -> bool:
    return any(is_computed(output.recipe) for output in blueprint.outputs)


def _peak_memory(blueprint: Blueprint) -> int:
    """An estimate, in bytes: the interpreter, and the largest working set of a recipe that computes."""
    computed = [output.recipe for output in blueprint.outputs if is_computed(output.recipe)]
    if not computed:
        return _STREAMING_MEMORY if blueprint.native else _TORCH_MEMORY
    # Two sources and a result in float32 and one in the tensor's dtype; transport adds the cost (rows × rows),
    # the lower source after T_in, and the map of the attention output that stays for gate and up.
    largest = max(4 * 4 * numel(recipe) for recipe in computed)
    # Maps of whole heads are a number for each pair of heads.
    rows = [c.stop - c.start for c in blueprint.couplings.values() if c.whole_heads is None]
    maps = sorted((4 * n * n for n in rows), reverse=True)
    # One layer's sources, read ahead, and finished tensors that wait to be written.
    new = [[o for o in layer if is_computed(o.recipe)] for layer in group_by_layer(blueprint.outputs)]
    waiting = 2 * max(sum(map(nbytes, layer)) for layer in new) + 3 * max(nbytes(o) for layer in new for o in layer)
    return _TORCH_MEMORY + largest + (2 * maps[0] if maps else 0) + waiting
