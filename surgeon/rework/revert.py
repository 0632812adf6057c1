"""`surgeon revert`: restore an earlier state of an output, byte for byte or not at all."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from surgeon.blueprint.blueprint import Output
from surgeon.blueprint.recipes import Copy
from surgeon.blueprint.shards import lay_out
from surgeon.checkpoint.card_metadata import metadata_of
from surgeon.checkpoint.folder import CONFIG_FILE, CheckpointFolder, digests_of
from surgeon.checkpoint.header import TensorInfo
from surgeon.checkpoint.source import GGUF_RECORD, is_side_file
from surgeon.checkpoint.tokenizer_files import without
from surgeon.checkpoint.trust import check_written
from surgeon.common.formatting import listed, size
from surgeon.common.json_results import plain_fields, same_json
from surgeon.common.listener import Listener, Quiet, Stopwatch
from surgeon.errors import BadInput, printable
from surgeon.manifest.compose import BaseId, base_entry, surgeries_of
from surgeon.manifest.lineage import Lineage, State, instead_of, shown_name
from surgeon.manifest.manifest import MANIFEST_FILE, Manifest
from surgeon.manifest.reading import manifest_of
from surgeon.manifest.run_files import kept_tensors, with_kept
from surgeon.writing.job import Job, manifest_and_card, mirrored_in, model_files, places_in
from surgeon.writing.linked_shards import Moved as HowMoved
from surgeon.writing.readback import ReadBack
from surgeon.writing.write import check_output, execute


@dataclass(frozen=True)
class Reverted:
    """An earlier state that was written: state `to` of an output of `surgeries` surgeries.

    `undone` are the operations of the undone surgeries, oldest first. `base` is the state's name when the first undone
    surgery began. `manifest` is the state's own, None for the first base. `tensors` counts the state's tensors,
    `dropped` the output's tensors that the state lacks. `moved` states how the bytes were copied. `digest` is the
    state's. `checked_against` names what it was compared with, apart from OUT's own manifest: `base`, `base_digest`,
    both or none.
    """

    path: Path
    to: int
    surgeries: int
    base: str
    undone: tuple[tuple[str, ...], ...]
    manifest: Manifest | None
    tensors: int
    dropped: int
    nbytes: int
    left_behind: tuple[str, ...]
    seconds: dict[str, float]
    digest: str
    checked_against: tuple[str, ...]
    moved: HowMoved = field(default_factory=HowMoved)

    def __repr__(self) -> str:
        return f"Reverted({str(self.path)!r}, {self.to} of {self.surgeries} surgeries left, {self.tensors} tensors)"

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `--json`.

        Keys:
            `path`: the new folder
            `to`, `surgeries`: the number of surgeries that are left, and that OUT had
            `base`: the restored state's name
            `undone`: the operations of each surgery that was undone
            `tensors`, `bytes`, `seconds`: what was written
            `dropped`: the number of OUT's tensors that the state lacks
            `left_behind`: files that were not written
            `moved`: as in `apply`
            `digest`: the state's digest
            `checked_against`: what the state was compared with: `base`, `base_digest`, both, or nothing (then the
                state is
                only OUT's own statement)
        """
        return plain_fields(self, without=("manifest",))


def revert(
    out: str | Path,
    dest: str | Path,
    *,
    to: int | None = None,
    base: str | Path | None = None,
    base_digest: str | None = None,
    link: bool = False,
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> Reverted:
    """Write the state of `out` after `to` of its surgeries into the new folder `dest`.

    With `to` None this is the state before the last surgery, with 0 the first base. A surgery is one applied plan.
    Every tensor of that state is restored byte for byte under its earlier name, with its config.json, manifest and
    code. New tensors of the remaining surgeries have the values that the next surgery found, so training in between is
    kept. Side files of `out` are copied where they equal the state's. Raises BadInput, and `dest` stays absent, where a
    tensor has changed since (trained, edited, merged away) or the manifest was edited. With `link`, shards of that
    state that `out` has unchanged are hard-linked and become read-only (`apply`).

    Only the manifest of `out` describes the state, and whoever writes an output can make it describe any state. With
    `base`, the folder of the state itself, or `base_digest`, which `apply` showed when it operated on the state,
    BadInput is raised where they differ. Without both, the listener and `checked_against` report that nothing was
    compared.
    """
    listener = listener or Quiet()
    target = Path(dest)
    folder = CheckpointFolder.open(Path(out), trust_remote_code=trust_remote_code)
    manifest = manifest_of(folder)
    # Values from before training may be next to the weights, only for the last surgery's training.
    kept = kept_tensors(folder) if manifest.kept else None
    layout = folder.tensors
    folder = folder if kept is None else with_kept(folder, kept)
    state = Lineage.of(manifest, file=str(folder.path / MANIFEST_FILE)).state(to, folder)
    _check_no_gguf(state, folder)
    against = _compare_state(state, folder, base, base_digest, trust_remote_code=trust_remote_code, listener=listener)
    job = reverting_job(folder, state, layout, link=link)
    lost = _lost_files(job, state, folder, listener)
    check_output(job, Path(out), target)
    for note in folder.notes:
        listener.say(note)
    stopwatch = Stopwatch()
    moved = execute(job, target, listener, stopwatch)
    return Reverted(
        path=target,
        to=state.number,
        surgeries=state.lineage.count,
        base=state.undone[0].base.id,
        undone=tuple(tuple(entry.op for entry in manifest.operations) for manifest in state.undone),
        manifest=state.manifest,
        tensors=len(job.outputs),
        dropped=len(folder.tensors) - len(job.outputs),
        nbytes=job.bytes_to_write,
        left_behind=tuple(
            sorted({*folder.left_behind, *folder.side_files, *lost} - {*(job.carried_names or ()), *job.files})
        ),
        seconds=stopwatch.seconds,
        digest=state.digest,
        checked_against=against,
        moved=moved,
    )


def _check_no_gguf(state: State, out: CheckpointFolder) -> None:
    """Raise BadInput where the state is a GGUF file, from which `dequantise` made a checkpoint."""
    surgery = state.undone[0]
    if GGUF_RECORD in state.base.files and any(operation.op == "dequantise" for operation in surgery.operations):
        raise BadInput(
            f"{out.source.shown}: surgery {state.number + 1} (dequantise) began with a GGUF file, of which only the"
            f" numbers are here; {instead_of(surgery)}"
        )


def _compare_state(
    state: State,
    out: CheckpointFolder,
    base: str | Path | None,
    base_digest: str | None,
    *,
    trust_remote_code: bool,
    listener: Listener,
) -> tuple[str, ...]:
    """Compare the state described by `out` with what the user gave; return the names of the given options.

    Args:
        state: The state, as the manifest of `out` describes it.
        out: The output.
        base: The folder of the state itself; None: not given.
        base_digest: The state's digest; None: not given.
        trust_remote_code: Whether the code of `base` may run.
        listener: Receives the progress, and a note where nothing was given.

    Raises:
        BadInput: The state is another.
    """
    if base_digest is not None and state.digest != base_digest:
        raise BadInput(
            f"{out.source.shown}: its {MANIFEST_FILE} gives that state the digest {state.digest}, not the"
            f" {printable(base_digest)} asked for; {instead_of(state.undone[0])}"
        )
    if base is not None:
        opened = CheckpointFolder.open(Path(base), trust_remote_code=trust_remote_code)
        if (differs := state_difference(state, opened, listener)) is not None:
            raise BadInput(
                f"{out.source.shown}: its {MANIFEST_FILE} and {opened.source.shown} differ in {printable(differs)};"
                f" {instead_of(state.undone[0])}"
            )
    if base is None and base_digest is None:
        listener.say(
            f"{out.source.shown}: only its own {MANIFEST_FILE} says what the base was (digest {state.digest}); give"
            " --base BASE or --base-digest HEX to compare it"
        )
    return tuple(name for name, given in (("base", base), ("base_digest", base_digest)) if given is not None)


def _lost_files(job: Job, state: State, out: CheckpointFolder, listener: Listener) -> list[str]:
    """Return, and report, the side files of the state that cannot be written because `out` has changed or lost them."""
    lost = [name for name in state.base.files if name not in job.files and name not in (job.carried_names or ())]
    for name in lost:
        listener.say(
            f"{printable(name)} is not written: the state had it, and {out.source.shown} has another or none; the"
            " base has it"
        )
    return lost


def state_difference(state: State, base: CheckpointFolder, listener: Listener) -> str | None:
    """Return the first tensor or file of a state that the folder `base` lacks or has changed; None if all are equal.

    All tensors of `base` are read where config, lineage and names are equal. Raises BadInput where one cannot be read.
    """
    then = state.base
    if not same_json(then.config, base.config):
        return CONFIG_FILE
    if surgeries_of(base) != state.undone[0].lineage:
        return MANIFEST_FILE
    if names := sorted(then.tensors.keys() ^ base.tensors.keys()):
        return names[0]
    files = {name: hashlib.sha256(base.read_side_file(name)).hexdigest() for name in base.side_files}
    listener.begin("reading the base", sum(info.nbytes for info in base.tensors.values()))
    digests = digests_of(base, base.tensors, listener.advance)
    found = base_entry(base, BaseId(then.id, then.revision), layers=then.layers, digests=digests, files=files)
    differing = (name for name, tensor in then.tensors.items() if found.tensors[name] != tensor)
    return next(differing, None) or next((n for n in then.files if found.files.get(n) != then.files[n]), None)


def reverting_job(out: CheckpointFolder, state: State, layout: Mapping[str, TensorInfo], *, link: bool = False) -> Job:
    """Return the job that writes an earlier state of `out`, with tensors distributed to shards as in `layout`.

    Raises BadInput where its config.json leads to foreign code.
    """
    trusted = out.config.get("auto_map") if out.own is not None else None
    check_written(state.config, printable(str(out.path / MANIFEST_FILE)), trusted=trusted)
    outputs = [
        Output(name, Copy(lying.spans, state.tensors[name].dtype, state.tensors[name].shape), None)
        for name, lying in state.pieces.items()
    ]
    shards = lay_out(outputs, layout)
    files = model_files(state.config, shards, state.code) | _grown_files(out, state)
    carried = {n: digest for n, digest in state.base.files.items() if n not in files and _holds(out, n, digest)}
    if state.manifest is not None:
        files |= manifest_and_card(state.manifest, state.config, shards, metadata_of(out))

    def finish(proof: ReadBack) -> Mapping[str, bytes]:
        """Raise BadInput where a tensor or file differs from what the first undone surgery found."""
        if torn := [name for name, digest in carried.items() if proof.files[name] != digest]:
            raise BadInput(f"{printable(torn[0])}: changed meanwhile; start again when nothing writes to it")
        changed = [name for name in state.pieces if proof.digests[name] != state.base.tensors[name].sha256]
        if changed:
            more = f" (and {len(changed) - 1} more tensors)" if len(changed) > 1 else ""
            raise BadInput(
                f"{shown_name(changed[0], state.pieces[changed[0]].tensors[0])}{more}: trained or edited since surgery"
                f" {state.number + 1}, so what stood there then is not in {printable(out.source.shown)}"
                f" (`keep_base: true` in a training config keeps it); {instead_of(state.undone[0])}"
            )
        return {}

    return Job(
        shards=shards,
        sources={"": out.source},
        places=places_in(out.tensors, shards),
        mirrored=mirrored_in(out, shards),
        files=files,
        carried=out,
        carried_names=tuple(carried),
        finish=finish,
        identity={"revert": state.number, "base": state.digest, "carried": carried, "out": out.identity()},
        link=link,
    )


def _grown_files(out: CheckpointFolder, state: State) -> dict[str, bytes]:
    """Return a state's tokenizer files where the vocabulary grew since: the output's files without the insertions."""
    found: dict[str, bytes] = {}
    for name in dict.fromkeys(name for manifest in state.undone for name in manifest.side_files):
        digest = state.base.files.get(name)
        if digest is None or name not in out.side_files or not is_side_file(name):
            continue
        content = out.read_side_file(name)
        for manifest in reversed(state.undone):
            content = without(content, manifest.side_files[name].inserted if name in manifest.side_files else ())
        if hashlib.sha256(content).hexdigest() == digest:
            found[name] = content
    return found


def _holds(out: CheckpointFolder, name: str, digest: str) -> bool:
    """Return whether the output has the side file `name` with this digest."""
    return name in out.side_files and hashlib.sha256(out.read_side_file(name)).hexdigest() == digest


def _compared(reverted: Reverted) -> str:
    """Return the end of a sentence on what the restored state was compared with; "" for nothing."""
    names = {"base": "the base", "base_digest": "the digest given"}
    return "".join(f", as does {names[each]}" for each in reverted.checked_against)


def reverted_view(reverted: Reverted) -> RenderableType:
    """Return lines on what was undone, and on the restored state."""
    undone = "; ".join(", ".join(map(printable, operations)) or "training" for operations in reverted.undone)
    state = f"the base {printable(reverted.base)}" if reverted.to == 0 else f"{reverted.to} of its surgeries"
    lines: list[RenderableType] = [
        Text.assemble(
            ("done ", "bold green"), f"{printable(str(reverted.path))}: {state}, without {undone}", overflow="fold"
        ),
        Text(
            f"{reverted.tensors} tensors ({size(reverted.nbytes)}), each what its digest in {MANIFEST_FILE}"
            f" says{_compared(reverted)}; {reverted.dropped} dropped",
            style="dim",
        ),
    ]
    if reverted.moved.text:
        lines.append(Text(reverted.moved.text, style="dim"))
    if reverted.left_behind:
        lines.append(Text(f"not carried along: {listed(reverted.left_behind)}", style="dim"))
    return Group(*lines)
