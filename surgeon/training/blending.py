"""A trained output on the way back to its base: what trained is interpolated with what it was (WiSE-FT, LiNeS).

Of a tensor of the base, θ = (1 − α) θ_base + α θ_run; the same of a copy of one, such as Control LLM's twins. Of parts
that a surgery added silent, what was zero at birth is multiplied by α: that is the scale of what they add. Values are
computed in float32 and rounded once; α = 1 and α = 0 give both ends exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from surgeon.anatomy.anatomy import layer_of
from surgeon.blueprint.shards import Shard, header_of
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.header import FLOAT_DTYPES, TensorInfo
from surgeon.checkpoint.ranges import zeros_sha256
from surgeon.common.listener import Listener
from surgeon.common.work_folders import write_durably
from surgeon.errors import BadInput, printable
from surgeon.manifest.lineage import State
from surgeon.manifest.manifest import Manifest, NewTensor
from surgeon.models.load import stored_dtype
from surgeon.training.publishing import FINAL_FILE as FINAL_FILE
from surgeon.training.publishing import Before, Change, Final, publishing_job
from surgeon.writing.job import Job, copied


@dataclass(frozen=True)
class Shares:
    """How much of the run is taken: `bottom` in the lowest of `layers` layers, `top` in the highest, linear between."""

    bottom: float
    top: float
    layers: int

    def of(self, tensor: str) -> float:
        """The share in a tensor; embeddings are the lowest layer's, what comes after the layers is the highest's."""
        place = layer_of(tensor)
        if place is None:
            return self.bottom if "emb" in tensor or "wte" in tensor else self.top
        return self.bottom + (self.top - self.bottom) * place[1] / max(1, self.layers - 1)


# The tensors of a run that are blended: each with the tensor of the base that it was, or None where it was zero.
Way = Mapping[str, str | None]


def way_back(out: CheckpointFolder, manifest: Manifest, state: State) -> Way:
    """What each tensor that trained was before. Raises BadInput where that is neither the base's nor zero."""
    fitted = {number for number, entry in enumerate(manifest.operations) if entry.trains == "fitted"}
    in_base = {
        lying.tensors[0]: name
        for name, lying in state.pieces.items()
        if lying.tensors and lying.tensors[0] in out.tensors and lying.is_all_of(out.tensors[lying.tensors[0]])
    }
    new = manifest.new_tensors
    trained = [name for name in manifest.trained if name not in new or new[name].operation not in fitted]
    if not trained:
        raise BadInput(f"{out.source.shown}: no run trained it, so there is nothing between it and its base to blend")
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


def _was_zero(made: NewTensor) -> bool:
    return len(made.shape) > 1 and made.sha256 == zeros_sha256(made.nbytes)


def write_blended(
    out: CheckpointFolder, base: CheckpointFolder, way: Way, shares: Shares, work: Path, listener: Listener
) -> Final:
    """Write the blended tensors to `work`'s FINAL_FILE, one after the other, and measure how each differs from the run.

    Args:
        out: the run.
        base: its base.
        way: what is blended.
        shares: how much of the run is taken.
        work: the folder to write to.
        listener: receives progress.

    Raises:
        BadInput: a tensor is no floating-point one, or holds numbers that are not finite.
    """
    infos = [out.tensors[name] for name in way]
    shard = Shard(FINAL_FILE, tuple(copied(info.name, info) for info in infos), None)
    changes: dict[str, Change] = {}

    def content() -> Iterator[bytes]:
        yield header_of(shard, None)[0]
        for info in infos:
            was = way[info.name]
            run = _read(out, info)
            before = torch.zeros_like(run) if was is None else _read(base, base.tensors[was])
            blended = torch.lerp(before, run, shares.of(info.name)).to(stored_dtype(info.dtype))
            delta, norm = blended.double() - run.double(), float(run.double().norm())
            changes[info.name] = Change(float(delta.abs().max()), float(delta.norm()) / norm if norm else None)
            listener.advance(info.nbytes)
            yield blended.view(torch.uint8).numpy().tobytes()

    listener.begin("blending", sum(info.nbytes for info in infos))
    write_durably(work / FINAL_FILE, content())
    return Final(changes)


def _read(folder: CheckpointFolder, info: TensorInfo) -> Tensor:
    """A tensor in float32. Raises BadInput where it is no floating-point one, or a number of it is not finite."""
    if info.dtype not in FLOAT_DTYPES:
        raise BadInput(f"{printable(info.name)}: stored in {info.dtype}; only floating-point tensors can be blended")
    value = torch.frombuffer(folder.read(info.name), dtype=stored_dtype(info.dtype)).reshape(info.shape).float()
    if not bool(torch.isfinite(value).all()):
        raise BadInput(
            f"{folder.source.shown}: {printable(info.name)}: holds NaN or infinity, of which nothing can be blended"
        )
    return value


def blending_job(
    out: CheckpointFolder,
    base: CheckpointFolder,
    manifest: Manifest,
    way: Way,
    work: Path,
    digests: Mapping[str, str],
    final: Final,
    shares: Mapping[str, float],
) -> Job:
    """The job that writes the blend: the run's shards, with what `write_blended` left in `work`, and the base's values.

    Args:
        out: the run.
        base: its base, whose values are kept beside the weights where the run no longer has them.
        manifest: the run's manifest.
        way: what is blended.
        work: the work folder.
        digests: of every tensor of the run.
        final: what `write_blended` returned.
        shares: what the manifest says of the blend.
    """
    entry = {"config": {"blend": dict(shares)}, "settings": {}, "steps": 0, "tokens": 0, "losses": {}}
    new = manifest.new_tensors
    in_base = {name: was for name, was in way.items() if was is not None and name not in new}
    return publishing_job(
        out,
        manifest,
        work,
        digests=digests,
        final=final,
        entry=entry,
        added={},
        of_base=tuple(in_base),
        keep=Before(base.source, {name: base.tensors[was] for name, was in in_base.items()}),
    )
