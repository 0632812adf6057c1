"""A run and its base interpolated, which costs no training."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from surgeon.checkpoint.folder import MANIFEST_FILE, CheckpointFolder
from surgeon.checkpoint.staging import check_destination
from surgeon.common.disk_space import writing
from surgeon.common.json_results import plain_fields
from surgeon.common.listener import Listener, Quiet, Stopwatch
from surgeon.common.work_folders import work_folder, working_in
from surgeon.errors import BadInput, printable
from surgeon.manifest.lineage import Lineage
from surgeon.manifest.reading import manifest_of
from surgeon.rework.revert import state_difference
from surgeon.writing.linked_shards import Moved
from surgeon.writing.write import check_output, execute


@dataclass(frozen=True)
class Blend:
    """A blend that was written: `alpha` of the run in the lowest layer, `alpha_top` in the highest.

    `tensors` were interpolated with the base's, `scaled` are those of added parts that were multiplied.
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
            `path`, `run`, `base`: the new folder; what was blended
            `alpha`, `alpha_top`: the run's share in the lowest and in the highest layer
            `tensors`, `scaled`: how many were interpolated with the base's, and how many of added parts were multiplied
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
    """Write `run` on its way back to `base`, the model that its last surgery or training began with, as `dest`.

    What trained of the base's own tensors, and copies of them, is (1 − alpha) · base + alpha · run (WiSE-FT, Wortsman
    et al., 2022); of parts that were added silent, what was zero at birth is multiplied by alpha. With `alpha_top` the
    share goes linearly from `alpha` in the lowest layer to `alpha_top` in the highest (LiNeS, Wang et al., 2025). The
    base's values lie beside the weights, so `revert` gives the base back. The same command continues one that was cut
    off.

    Args:
        run: what `train` wrote.
        dest: the new folder.
        base: the folder of the model that the run's last surgery, or training, began with.
        alpha: the run's share; 1: the run, 0: the base.
        alpha_top: its share in the highest layer; None: `alpha`.
        link: hard-link shards of the run in which nothing changes (`apply`).
        trust_remote_code: run the code that the run brings.
        listener: receives progress.

    Raises:
        BadInput: the run is another base's, or what trained has no way back to it.
    """
    for name, share in (("alpha", alpha), ("alpha_top", alpha_top)):
        if share is not None and not 0 <= share <= 1:
            raise BadInput(f"{name} is {share:g}; it must be between 0 (the base) and 1 (the run)")
    listener, target = listener or Quiet(), Path(dest)
    folder = CheckpointFolder.open(Path(run), trust_remote_code=trust_remote_code)
    opened = CheckpointFolder.open(Path(base), trust_remote_code=trust_remote_code)
    manifest = manifest_of(folder)
    state = Lineage.of(manifest, file=str(folder.path / MANIFEST_FILE)).state(None, folder)
    if (differs := state_difference(state, opened, listener)) is not None:
        raise BadInput(
            f"{folder.source.shown}: its base, {printable(state.base.id)}, has another {printable(differs)} than"
            f" {opened.source.shown}; blend it with the model that its last surgery or training began with"
        )

    from surgeon.training.blending import FINAL_FILE, Shares, blending_job, way_back, write_blended
    from surgeon.training.opening import check_as_left

    top = alpha if alpha_top is None else alpha_top
    way = way_back(folder, manifest, state)
    check_destination(target, folder.path)
    digests = check_as_left(folder, manifest, listener)
    work = work_folder(target, "blending")
    stopwatch = Stopwatch()
    with writing(work), working_in(work, target=target, marker=FINAL_FILE) as own:
        final = write_blended(folder, opened, way, Shares(alpha, top, len(manifest.layers)), work, listener)
        shares = {"alpha": alpha, "alpha_top": top}
        job = replace(blending_job(folder, opened, manifest, way, work, digests, final, shares), link=link)
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
