"""Writing a job's output: shard by shard from the base into a staged folder, published by one rename.

A shard that equals the base's byte for byte shares its blocks, or is linked: none of its bytes moves
(linked_shards.py). Other copied tensors pass as bytes, undecoded; zeros are holes; only computed tensors are read into
memory (and only then is torch imported). While the next shard is written, other threads read the last one back and
compare it with the base (readback.py).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgeon.blueprint.blueprint import Output
from surgeon.blueprint.recipes import Constant
from surgeon.blueprint.shards import Shard, group_by_layer, header_of
from surgeon.checkpoint.header import header_bytes
from surgeon.checkpoint.piece_bytes import copy_pieces
from surgeon.checkpoint.ranges import WriteBehind, reserve, write_all
from surgeon.checkpoint.source import OpenShards
from surgeon.checkpoint.staging import Staging, check_destination, check_space, working_folder
from surgeon.common.disk_space import writing
from surgeon.common.listener import Listener, Stopwatch
from surgeon.common.work_folders import write_new
from surgeon.errors import SurgeonError, printable
from surgeon.writing.job import Job, data_of
from surgeon.writing.linked_shards import Moved as HowMoved
from surgeon.writing.linked_shards import Unmoved, bytes_to_move, way_to
from surgeon.writing.readback import ReadBack, Way

if TYPE_CHECKING:
    from surgeon.writing.compute import Evaluator

# The kernel copies with the processor: two copies at once use two cores, and more do not help a disk.
_WRITERS = 2


def check_output(job: Job, base: Path, out: Path) -> None:
    """Raise BadInput where the job cannot be written to `out`.

    That is where `out` exists, or is inside `base`, where the disk has no room, or where the job links and files cannot
    be linked there.
    """
    check_destination(out, base)
    check_space(out, bytes_to_move(job, out), fingerprint=job.fingerprint)


def execute(job: Job, out: Path, listener: Listener, stopwatch: Stopwatch) -> HowMoved:
    """Write the output of `job` to `out`, and return how the bytes of the shards got there.

    `stopwatch` times the stages. At any moment `out` is absent or complete. An interrupted run of the same job is
    continued; a complete output of the same job is left as it is. Raises BadInput for what the user can mend (disk
    full, base changed meanwhile) and PromiseBroken when the bytes read back differ from the bytes written.
    """
    working = working_folder(out)
    kept = f"what was finished is kept in {printable(str(working))}: the same command continues"
    with (
        writing(out, kept=kept, kept_in=working, needed_bytes=bytes_to_move(job, out)),
        Staging(out, fingerprint=job.fingerprint, say=listener.say) as staging,
    ):
        if staging.already_published:
            listener.say(f"{printable(str(out))} was already complete; nothing to do")
            return HowMoved()
        moved = _write(job, staging, way_to(job, out), listener, stopwatch)
        staging.publish()
        return moved


def _write(job: Job, staging: Staging, way: Way, listener: Listener, stopwatch: Stopwatch) -> HowMoved:
    """Write everything into the staged folder; return how the bytes of the shards got there.

    A job that can never succeed leaves nothing there: the folder is removed, and the error is raised again.
    """
    listener.begin("writing", job.bytes_to_write)
    try:
        with (
            ReadBack(job.sources, job.places, staging, compare=job.read_back, recall=job.recall) as proof,
            Unmoved(job, way, proof) as unmoved,
        ):
            run = _Run(job, staging, proof, unmoved, listener, stopwatch)
            run.all_shards()
            with stopwatch.stage("wait for read-back"):
                proof.settle()
                _say_not_finite(proof, listener)
                run.small_files()
                last = job.finish(proof)
        job.check_unchanged()
        proof.keep()
        for name, content in last.items():
            run.small_file(name, content)
        if job.look is not None:
            with stopwatch.stage("look"):
                job.look(staging.folder)
    except SurgeonError:
        # The fault lies in the base or the plan and will not pass: the same command would fail again.
        staging.abandon()
        raise
    return HowMoved.of(job, proof.ways)


def _say_not_finite(proof: ReadBack, listener: Listener) -> None:
    """Report tensors with NaN or infinity. They are copied, not refused, as a sound base may hold an infinity."""
    if proof.not_finite:
        names = sorted(proof.not_finite)
        more = f" and {len(names) - 1} more tensors" if len(names) > 1 else ""
        listener.say(
            f"{printable(names[0])}{more}: holds NaN or infinity in the base, copied as it is; `surgeon verify` shows"
            " whether the base computes with it, and training stops at a loss that is no number"
        )


@dataclass(eq=False)
class _Run:
    """An execution in the staged folder: shards are written, and read back meanwhile."""

    job: Job
    staging: Staging
    proof: ReadBack
    unmoved: Unmoved
    listener: Listener
    stopwatch: Stopwatch
    _evaluator: Evaluator | None = field(default=None, init=False)
    _layers_done: int = field(default=0, init=False)

    @property
    def folder(self) -> Path:
        """The staged folder."""
        return self.staging.folder

    @property
    def evaluator(self) -> Evaluator:
        """Return the evaluator, made at first use because it imports torch."""
        if self._evaluator is None:
            from surgeon.writing.compute import Evaluator

            computing = self.job.computing
            assert computing is not None
            self._evaluator = Evaluator(
                computing.blueprint,
                computing.base,
                device=computing.device,
                stopwatch=self.stopwatch,
                adapters=computing.adapters,
                models=computing.models,
            )
        return self._evaluator

    def write(self, shard: Shard, then: Sequence[Output]) -> dict[str, Any]:
        """Write a shard's file; return reports of the maps solved for its tensors.

        While tensors are computed, finished ones are written and those that the next layer needs are read; `then` is
        the layer that comes after this shard.
        """
        header, places = self._header(shard)
        place_of = {output.name: place for output, place in zip(shard.outputs, places, strict=True)}
        computes = any(output.computed for output in shard.outputs)
        file = self.folder / shard.file
        file.parent.mkdir(exist_ok=True)
        # A file of this name is removed first: it may be the base's file, linked by an interrupted run.
        file.unlink(missing_ok=True)
        target = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        try:
            reserve(target, places[-1][1])
            write_all(target, header, 0)
            self._copy(shard, target, places[0][0])
            with WriteBehind(target, self.listener.advance) as behind:
                for layer, following in pairwise([*group_by_layer(shard.outputs), then]):
                    if computes:
                        self.evaluator.expect(layer, following)
                        self._show(layer)
                    for output in layer:
                        _write_tensor(self, output, target, *place_of[output.name], behind)
        finally:
            os.close(target)
        return self.evaluator.take_reports() if computes else {}

    def _copy(self, shard: Shard, target: int, begin: int) -> None:
        """Copy all source bytes of a shard into its file, whose data begins at `begin`."""
        copies = [output for output in shard.outputs if output.pieces.spans and not output.computed]
        places = {output.name: self.job.places[output.name] for output in copies}
        with self.stopwatch.stage("copy"), OpenShards(self.job.sources) as shards:
            pieces = data_of(shard.outputs, places)
            copy_pieces(pieces, shards.opened, target=target, begin=begin, progress=self.listener.advance)

    def _show(self, layer: Sequence[Output]) -> None:
        """Show in the progress line which new layer is being computed; skip a layer without computed tensors."""
        if any(output.computed for output in layer):
            self._layers_done += 1
            self.listener.rename(f"writing, new layer {self._layers_done} of {_computed_layers(self.job.shards)}")

    def close(self) -> None:
        """Stop computing, and reading ahead for it."""
        if self._evaluator is not None:
            self._evaluator.close()

    def skip(self, outputs: Sequence[Output]) -> None:
        """Count tensors as done that an earlier run made."""
        for output in outputs:
            if output.computed:
                self.evaluator.skip(output)
        self._layers_done += sum(any(o.computed for o in layer) for layer in group_by_layer(outputs))

    def _header(self, shard: Shard) -> tuple[bytes, list[tuple[int, int]]]:
        """Return the bytes of a shard's header, and (begin, end) in bytes of each tensor in its file.

        Where the shard equals the file that it mirrors, these are that file's own, so that all ways give the same file.
        """
        if (same := self.job.unchanged.get(shard.file)) is not None:
            with OpenShards(self.job.sources) as shards:
                header = header_bytes(shards.opened(same.place), same.header, file=same.file)
            return header, [(info.begin, info.end) for info in same.header.tensors]
        mirrored = self.job.mirrored.get(shard.file)
        return header_of(shard, None if mirrored is None else mirrored.header)

    def all_shards(self) -> None:
        """Write every shard: shards without computed tensors in threads, the others here, one after another."""
        computed = [shard for shard in self.job.shards if any(o.computed for o in shard.outputs)]
        with ThreadPoolExecutor(_WRITERS, thread_name_prefix="write") as writers:
            try:
                copies = [writers.submit(self.shard, s) for s in self.job.shards if s not in computed]
                for number, shard in enumerate(computed):
                    waiting = [s.outputs for s in computed[number + 1 :] if not self.staging.is_done(s.file)]
                    self.shard(shard, _first_layer(waiting))
                for copy in as_completed(copies):
                    copy.result()
            except BaseException:
                writers.shutdown(wait=False, cancel_futures=True)
                raise
            finally:
                self.close()

    def shard(self, shard: Shard, then: Sequence[Output] = ()) -> None:
        """Write one shard, unless an earlier run did or its file can be linked.

        `then` is the layer computed after it.
        """
        if self._done_earlier(shard):
            return
        if self.unmoved.take(shard, self.folder / shard.file, self.stopwatch):
            self.listener.advance(shard.nbytes)
        else:
            self.proof.add(shard, self.write(shard, then))

    def _done_earlier(self, shard: Shard) -> bool:
        """Return whether an earlier run finished the shard; if so, use its record and count its tensors as done."""
        record = self.staging.is_done(shard.file)
        if record is None:
            return False
        self.proof.remember(shard.file, record)
        self.skip(shard.outputs)
        self.listener.advance(sum(output.nbytes for output in shard.outputs if not output.is_hole))
        return True

    def small_files(self) -> None:
        """Write the small files that are known beforehand, and the side files that are carried along."""
        job = self.job
        for name, content in job.files.items():
            self.small_file(name, content)
        if job.carried is not None:
            for name in job.carried.side_files if job.carried_names is None else job.carried_names:
                self.small_file(name, job.carried.read_side_file(name))

    def small_file(self, name: str, content: bytes) -> None:
        """Write and journal a small file, and keep its digest."""
        file = self.folder / name
        file.parent.mkdir(exist_ok=True)
        write_new(file, content)
        self.proof.files[name] = hashlib.sha256(content).hexdigest()
        self.staging.done(name, {})


def _computed_layers(shards: Sequence[Shard]) -> int:
    """Return how many layers (or groups of tensors outside them) have something to compute."""
    layers = (layer for shard in shards for layer in group_by_layer(shard.outputs))
    return sum(any(output.computed for output in layer) for layer in layers)


def _first_layer(shards: Sequence[Sequence[Output]]) -> Sequence[Output]:
    """Return the outputs of the layer that is computed next; `shards` are the outputs still to come, shard by shard."""
    return next((group_by_layer(outputs)[0] for outputs in shards if outputs), ())


def _write_tensor(run: _Run, output: Output, target: int, begin: int, end: int, behind: WriteBehind) -> None:
    """Write a tensor that is computed or constant at `begin:end` of the file; holes and copies need nothing here."""
    if output.computed:
        for made in run.evaluator.make(output):
            with run.stopwatch.stage("wait for writing"):
                behind.write(made, begin)
            begin += len(made)
        assert begin == end, output.name
    elif isinstance(output.recipe, Constant) and not output.is_hole:
        write_all(target, output.recipe.data, begin)
        run.listener.advance(end - begin)
