"""Interpolation of a run with its base (WiSE-FT, LiNeS): a remedy after a run, which costs no training.

A tensor of the base becomes θ = (1 − α) θ_base + α θ_run; so does a copy of one, such as Control LLM's copied layers.
In parts that a surgery added silent, the tensors that were zero at birth are multiplied by α, which scales what these
parts add. Values are computed in float32 and rounded once; α = 1 gives the run exactly, and α = 0 the base.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgeon.anatomy.anatomy import layer_of
from surgeon.blueprint.shards import Shard, header_of
from surgeon.checkpoint.folder import MANIFEST_FILE, CheckpointFolder
from surgeon.checkpoint.header import FLOAT_DTYPES, TensorInfo
from surgeon.checkpoint.ranges import zeros_sha256
from surgeon.checkpoint.staging import check_destination
from surgeon.common.disk_space import writing
from surgeon.common.json_results import plain_fields
from surgeon.common.listener import Listener, Quiet, Stopwatch
from surgeon.common.work_folders import work_folder, working_in, write_durably
from surgeon.errors import BadInput, printable
from surgeon.manifest.lineage import Lineage, State, before_training
from surgeon.manifest.manifest import Manifest, NewTensor
from surgeon.manifest.reading import manifest_of
from surgeon.rework.revert import state_difference
from surgeon.writing.job import copied
from surgeon.writing.linked_shards import Moved
from surgeon.writing.write import check_output, execute

if TYPE_CHECKING:
    from torch import Tensor

    from surgeon.training.publishing import Change


@dataclass(frozen=True)
class Blend:
    """A blend that was written: the run's share is `alpha` in the lowest layer and `alpha_top` in the highest.

    `tensors` counts the tensors that were interpolated with the base's, `scaled` the tensors of added parts that were
    multiplied.
    """

    path: Path
    run: Path
    base: Path
    alpha: float
    alpha_top: float
    tensors: int
    scaled: int
    nbytes: int
    seconds: dict[str, float]
    moved: Moved

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `--json`.

        Keys:
            `path`: the new folder
            `run`, `base`: the folders that were blended
            `alpha`, `alpha_top`: the run's share in the lowest and in the highest layer
            `tensors`: how many tensors were interpolated with the base's
            `scaled`: how many tensors of added parts were multiplied
            `bytes`, `moved`, `seconds`: as of `apply`
        """
        return plain_fields(self)


def write_blend(
    run: str | Path,
    dest: str | Path,
    *,
    base: str | Path,
    alpha: float,
    alpha_top: float | None = None,
    link: bool = False,
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> Blend:
    """Interpolate `run` with `base`, the model that its last surgery or a training began with, and write it as `dest`.

    Each of the base's tensors that trained, and each trained copy of one, becomes (1 − alpha) · base + alpha · run
    (WiSE-FT, Wortsman et al., 2022). In parts that were added silent, the tensors that were zero at birth are
    multiplied by alpha. With `alpha_top` the share changes linearly from `alpha` in the lowest layer to `alpha_top` in
    the highest (LiNeS, Wang et al., 2025). The base's values are stored next to the weights, so `revert` restores the
    base. The same command continues one that was interrupted.

    Args:
        run: what `train` wrote.
        dest: the new folder.
        base: the folder of the model that the run's last surgery, or a training since, began with.
        alpha: the run's share; 1 gives the run, 0 the base.
        alpha_top: the run's share in the highest layer; None: `alpha`.
        link: hard-link shards of the run in which nothing changes (`apply`).
        trust_remote_code: run the code that the run brings.
        listener: receives progress.

    Raises:
        BadInput: a share is not between 0 and 1, `run` was made from another base, or a tensor that trained cannot be
            interpolated with it.
    """
    for name, share in (("alpha", alpha), ("alpha_top", alpha_top)):
        if share is not None and not 0 <= share <= 1:
            raise BadInput(f"{name} is {share:g}; it must be between 0 (the base) and 1 (the run)")
    listener, target = listener or Quiet(), Path(dest)
    folder = CheckpointFolder.open(Path(run), trust_remote_code=trust_remote_code)
    opened = CheckpointFolder.open(Path(base), trust_remote_code=trust_remote_code)
    manifest = manifest_of(folder)
    check_destination(target, folder.path)

    from surgeon.training.opening import check_as_left
    from surgeon.training.publishing import FINAL_FILE, Before, publishing_job

    way, of_base, untouched = _between(folder, opened, manifest, listener)
    top = alpha if alpha_top is None else alpha_top
    digests = check_as_left(folder, manifest, listener)
    work = work_folder(target, "blending")
    stopwatch = Stopwatch()
    with writing(work), working_in(work, target=target, marker=FINAL_FILE) as own:
        changes = _write_blended(
            folder, opened, way, partial(_share_of, bottom=alpha, top=top, layers=len(manifest.layers)), work, listener
        )
        shares = {"alpha": alpha, "alpha_top": top}
        job = publishing_job(
            folder,
            manifest,
            work,
            digests=digests,
            changes=changes,
            entry={"config": {"blend": shares}, "settings": {}, "steps": 0, "tokens": 0, "losses": {}},
            added={},
            of_base=[name for name in way if name in of_base],
            keep=Before(opened.source, {name: opened.tensors[way[name] or name] for name in untouched}),
        )
        job = replace(job, link=link)
        check_output(job, folder.path, target)
        moved = execute(job, target, listener, stopwatch)
        own.remove(last=FINAL_FILE)
    scaled = sum(was is None for was in way.values())
    return Blend(
        target,
        folder.path,
        opened.path,
        alpha,
        top,
        len(way) - scaled,
        scaled,
        job.bytes_to_write,
        stopwatch.seconds,
        moved,
    )


# The tensors of a run that are blended, each with the base's tensor that it began as; None where it began as zero.
_Way = Mapping[str, str | None]


def _between(
    run: CheckpointFolder, base: CheckpointFolder, manifest: Manifest, listener: Listener
) -> tuple[_Way, Collection[str], Collection[str]]:
    """Return what lies between a run and `base`, by which both were checked: (way, of_base, untouched).

    `of_base` are the base's own tensors that trained; `untouched` those of them that `base` has as before all training.

    Raises BadInput where the run did not begin with `base`, or nothing trained since.
    """
    from surgeon.training.opening import check_as_left

    if (began := before_training(manifest, base)) is None:
        state = Lineage.of(manifest, file=str(run.path / MANIFEST_FILE)).state(None, run)
        if (differs := state_difference(state, base, listener)) is not None:
            raise BadInput(
                f"{run.source.shown}: its base, {printable(state.base.id)}, has another {printable(differs)} than"
                f" {base.source.shown}; blend it with the model that its last surgery or a training began with"
            )
        way = _way_back(run, manifest, state)
        of_base = {name for name, was in way.items() if was and name not in manifest.new_tensors}
        return way, of_base, of_base
    check_as_left(base, began, listener)
    runs = manifest.training[len(began.training) :]
    trained = {*_trained([name for each in runs for name in each.tensors], manifest)}
    if not trained:
        raise BadInput(_NOTHING.format(run.source.shown))
    changed = manifest.changed_of_base.keys() & trained
    return {name: name for name in run.tensors if name in trained}, changed, changed - began.changed_of_base.keys()


_NOTHING = "{}: no run trained it, so there is nothing between it and its base to blend"


def _trained(names: Iterable[str], manifest: Manifest) -> list[str]:
    """Return those of the tensors `names` that trained; others were fitted, as a gate is."""
    fitted = {number for number, entry in enumerate(manifest.operations) if entry.trains == "fitted"}
    new = manifest.new_tensors
    return [name for name in names if name not in new or new[name].operation not in fitted]


def _way_back(out: CheckpointFolder, manifest: Manifest, state: State) -> _Way:
    """Return the base's tensor that each trained tensor began as; None where it began as zero.

    Tensors of parts that were added silent, but were not zero at birth, are left out, as are fitted ones. Raises
    BadInput where nothing trained, or a part began as neither silent nor a copy of the base.
    """
    in_base = {
        lying.tensors[0]: name
        for name, lying in state.pieces.items()
        if lying.tensors and lying.tensors[0] in out.tensors and lying.is_all_of(out.tensors[lying.tensors[0]])
    }
    new = manifest.new_tensors
    trained = _trained(manifest.trained, manifest)
    if not trained:
        raise BadInput(_NOTHING.format(out.source.shown))
    back: dict[str, str | None] = {name: in_base[name] for name in trained if name in in_base and name not in new}
    groups: dict[object, list[str]] = {}
    for name in trained:
        if name not in back:
            place = layer_of(name)
            groups.setdefault((place and place[1], new[name].operation if name in new else None), []).append(name)
    for names in groups.values():
        silent = [name for name in names if name in new and _was_zero(new[name])]
        copies = {name: next(iter(new[name].spans)) if name in new and new[name].is_copy else None for name in names}
        if silent and manifest.promise != "none":
            back |= dict.fromkeys(silent, None)
        elif manifest.promise == "exact" and all(was in state.tensors for was in copies.values()):
            back |= copies
        else:
            raise BadInput(
                f"{printable(names[0])}: grew in the run and was neither silent nor a copy at birth, so nothing lies"
                " between it and the base; blend a run whose surgery adds silent parts, or one without a surgery"
            )
    return {name: back[name] for name in out.tensors if name in back}


def _share_of(tensor: str, bottom: float, top: float, layers: int) -> float:
    """Return the run's share in a tensor: `bottom` in the lowest of `layers` layers, `top` in the highest.

    Between these layers it is linear. Embeddings have the share of the lowest layer; tensors after the layers have the
    share of the highest.
    """
    place = layer_of(tensor)
    if place is None:
        return bottom if "emb" in tensor or "wte" in tensor else top
    return bottom + (top - bottom) * place[1] / max(1, layers - 1)


def _was_zero(made: NewTensor) -> bool:
    """Return whether a new tensor was all zeros at birth; False for a tensor with fewer than two axes."""
    return len(made.shape) > 1 and made.sha256 == zeros_sha256(made.nbytes)


def _write_blended(
    out: CheckpointFolder,
    base: CheckpointFolder,
    way: _Way,
    share_of: Callable[[str], float],
    work: Path,
    listener: Listener,
) -> dict[str, Change]:
    """Write the blended tensors to FINAL_FILE in `work`, one at a time; return how each differs from the run.

    Args:
        out: the run.
        base: its base.
        way: the tensors to blend, as `_way_back` returns them.
        share_of: returns the run's share in a tensor.
        work: the folder to write to.
        listener: receives progress.

    Raises:
        BadInput: a tensor is not floating-point, or has numbers that are not finite.
    """
    import torch

    from surgeon.models.load import stored_dtype
    from surgeon.training.publishing import FINAL_FILE, Change

    infos = [out.tensors[name] for name in way]
    shard = Shard(FINAL_FILE, tuple(copied(info.name, info) for info in infos), None)
    changes: dict[str, Change] = {}

    def content() -> Iterator[bytes]:
        """Yield the file's header and each blended tensor's bytes; fill `changes`."""
        yield header_of(shard, None)[0]
        for info in infos:
            was = way[info.name]
            run = _read(out, info)
            before = torch.zeros_like(run) if was is None else _read(base, base.tensors[was])
            blended = torch.lerp(before, run, share_of(info.name)).to(stored_dtype(info.dtype))
            changes[info.name] = Change.between(run, blended)
            listener.advance(info.nbytes)
            yield blended.view(torch.uint8).numpy().tobytes()

    listener.begin("blending", sum(info.nbytes for info in infos))
    write_durably(work / FINAL_FILE, content())
    return changes


def _read(folder: CheckpointFolder, info: TensorInfo) -> Tensor:
    """Read a tensor as float32. Raises BadInput where its dtype is not floating-point or a number is not finite."""
    import torch

    from surgeon.models.load import stored_dtype

    if info.dtype not in FLOAT_DTYPES:
        raise BadInput(f"{printable(info.name)}: stored in {info.dtype}; only floating-point tensors can be blended")
    value = torch.frombuffer(folder.read(info.name), dtype=stored_dtype(info.dtype)).reshape(info.shape).float()
    if not bool(torch.isfinite(value).all()):
        raise BadInput(
            f"{folder.source.shown}: {printable(info.name)}: holds NaN or infinity, of which nothing can be blended"
        )
    return value
