"""What the command line and a notebook call: one function a command, typed results, no printing."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from surgeon import devices
from surgeon.blueprint import Blueprint
from surgeon.checkpoint.folder import CARD_FILE, CheckpointFolder, digests_of
from surgeon.checkpoint.hub import locate, locate_adapter, locate_delta, remote_folder
from surgeon.checkpoint.peft_folder import AdapterFolder
from surgeon.checkpoint.staging import check_destination, check_space
from surgeon.comparing import compare
from surgeon.deltas import Delta, making_job, putting_job
from surgeon.entropies import TransportReport, transport_report
from surgeon.errors import BadInput, printable
from surgeon.execute import Growth, Job, Listener, assist, execute
from surgeon.exporting import export
from surgeon.families.anatomy import dissect
from surgeon.layout import MAX_NEW_SHARD_BYTES, group_by_layer, is_hole, lay_out, nbytes
from surgeon.manifest import MANIFEST_FILE, BaseId, Manifest, adapters_of, parse
from surgeon.metadata import Metadata, metadata_of, read_metadata
from surgeon.operations.pmoe_experts import PMoEExperts
from surgeon.plan.drafting import draw
from surgeon.plan.loading import LoadedPlan, load_plan, parse_plan
from surgeon.plan.schema import json_schema
from surgeon.plan.shipped import find_plan
from surgeon.ranks import Ranks
from surgeon.recipes import Copy, is_computed, leaves, numel
from surgeon.results import (
    Applied,
    AppliedDelta,
    Continued,
    Difference,
    Evaluation,
    Exported,
    Inspection,
    MadeDelta,
    Merged,
    Preview,
    Pushed,
    Reported,
    Reverted,
    RoutingReport,
    Trained,
    Upload,
    Verification,
)
from surgeon.stopwatch import Stopwatch
from surgeon.undoing import Return, find_state
from surgeon.views.card import delta_card

if TYPE_CHECKING:
    from surgeon.verification.encoders import OutputComparison
    from surgeon.verification.logits import LogitComparison
    from surgeon.verification.static import Check
    from surgeon.verification.streaming import StreamedComparison

__all__ = [
    "Applied",
    "AppliedDelta",
    "Continued",
    "Difference",
    "Evaluation",
    "Exported",
    "Inspection",
    "MadeDelta",
    "Merged",
    "Preview",
    "Pushed",
    "Reported",
    "Reverted",
    "RoutingReport",
    "Trained",
    "TransportReport",
    "Verification",
    "apply",
    "apply_delta",
    "continual",
    "diff",
    "evaluate",
    "export_slot",
    "inspect",
    "json_schema",
    "make_delta",
    "merge",
    "parse_plan",
    "preview",
    "push",
    "report",
    "revert",
    "routing_report",
    "train",
    "transport_report",
    "verify",
]

# What a process that only moves bytes takes, interpreter included (measured by benchmarks/apply_speed.py).
_STREAMING_MEMORY = 90_000_000
_TORCH_MEMORY = 450_000_000

NO_LICENSE = "no licence known: the base's README.md names none, so the card says unknown (`surgeon push --license`)"


class Quiet:
    """A listener that keeps what is said and shows nothing."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def begin(self, stage: str, total: int, unit: str = "bytes") -> None:
        """Nothing to show."""

    def advance(self, count: int) -> None:
        """Nothing to show."""

    def rename(self, stage: str) -> None:
        """Nothing to show."""

    def say(self, line: str) -> None:
        """Kept in `said`."""
        self.said.append(line)


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
        manifest = _manifest_of(CheckpointFolder.open(target))
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


def revert(
    out: str | Path,
    dest: str | Path,
    *,
    to: int | None = None,
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> Reverted:
    """Write what `out` was after `to` of its surgeries into the new folder `dest` (None: before the last one; 0: base).

    A surgery is one applied plan. Every tensor of that state comes back byte for byte under its name of then, with its
    config.json, manifest and code; new tensors of the surgeries that stay have the values the next surgery found, so
    what was trained in between is kept. Raises BadInput, and `dest` stays absent, where a tensor is no longer what it
    was (trained, edited, merged away) or the manifest is too old or was edited.
    """
    listener = listener or Quiet()
    target = Path(dest)
    folder = CheckpointFolder.open(Path(out), trust_remote_code=trust_remote_code)
    state = find_state(folder, _manifest_of(folder), to)
    blueprint = state.blueprint(folder)
    job = Job(
        purpose=Return(state, source=str(Path(out) / MANIFEST_FILE), metadata=metadata_of(folder)),
        blueprint=blueprint,
        base=folder,
        shards=lay_out(blueprint, folder.tensors),
    )
    _check_way(job, Path(out), target)
    for note in folder.notes:
        listener.say(note)
    stopwatch = Stopwatch()
    _written(job, target, listener, stopwatch, Ranks())
    return Reverted(
        path=target,
        to=state.number,
        surgeries=state.surgeries,
        base=state.undone[0].base.id,
        undone=tuple(tuple(entry.op for entry in manifest.operations) for manifest in state.undone),
        manifest=state.manifest,
        tensors=len(blueprint.outputs),
        dropped=len(folder.tensors) - len(blueprint.outputs),
        nbytes=job.bytes_to_write,
        left_behind=tuple(folder.left_behind),
        seconds=stopwatch.seconds,
    )


def make_delta(
    out: str | Path,
    dest: str | Path,
    *,
    base: str | Path | None = None,
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> MadeDelta:
    """Write what `out` has and the base of its last surgery lacks into the new folder `dest`.

    That is every tensor that is not the base's byte for byte in its place, config.json, manifest, code and cards; the
    tokenizer and other side files stay out, as the base brings them. With `base` (a folder) those that it lacks or has
    otherwise go in. `dest` is absent or complete at any moment. Raises BadInput.
    """
    folder = CheckpointFolder.open(Path(out), trust_remote_code=trust_remote_code)
    other = CheckpointFolder.open(Path(base), trust_remote_code=trust_remote_code) if base is not None else None
    return _make_delta(folder, Path(dest), other, metadata_of(folder), listener or Quiet())


def apply_delta(
    delta: str | Path,
    base: str,
    out: str | Path,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> AppliedDelta:
    """Put `delta` (a folder, or `user/name[@revision]`) back onto `base`: `out` is what the delta was made of.

    Every tensor of `base`, which is what the last surgery was carried out on, is compared with its digest in the
    manifest and every tensor of the delta with its own. Raises BadInput where one differs; `out` then stays absent.
    """
    listener = listener or Quiet()
    target = Path(out)
    opened = Delta.open(locate_delta(str(delta)).path, trust_remote_code=trust_remote_code)
    if not Path(base).exists():
        # A base that headers tell to be another is refused before its weights are downloaded.
        putting_job(opened, remote_folder(base, revision, trust_remote_code=trust_remote_code), small_files=False)
    located = locate(base, revision=revision)
    folder = CheckpointFolder.open(located.path, trust_remote_code=trust_remote_code)
    job = putting_job(opened, folder)
    check_destination(target, opened.path)
    _check_way(job, located.path, target)
    stopwatch = Stopwatch()
    _written(job, target, listener, stopwatch, Ranks())
    return AppliedDelta(
        path=target,
        base=located.repo_id or str(located.path),
        manifest=opened.manifest,
        tensors=len(opened.tensors),
        whole=len(job.blueprint.outputs),
        nbytes=job.bytes_to_write,
        seconds=stopwatch.seconds,
    )


def push(
    out: str | Path,
    repo_id: str,
    *,
    base: str | Path | None = None,
    private: bool = False,
    revision: str | None = None,
    pull_request: bool = False,
    dry_run: bool = False,
    force: bool = False,
    license: str | None = None,
    base_model: str | None = None,
    delta: bool = False,
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> Pushed:
    """Put the output `out` into the Hub repository `repo_id` (`user/name`), as one commit, with a card that says so.

    Before that it is checked against its own manifest, or, with `base` (a folder), as `verify` does, logits included;
    what does not hold is pushed by `force` only. `revision` is a branch, made at need (or `refs/pr/N`). Only files
    that the repository lacks are sent; with `dry_run` none, and nothing is made. `license` and `base_model` go into
    the card. With `delta` what `make_delta` writes goes up. The token is huggingface_hub's own. Raises BadInput, also
    for whatever the Hub or the network answers; the repository then holds what it held, and the same call goes on
    where it stopped.
    """
    from surgeon.checkpoint.uploading import Destination, check_token, look, send
    from surgeon.sharing import card_for, check_names, check_way, pack, pack_delta, with_options

    listener = listener or Quiet()
    to = Destination(repo_id, revision, private, pull_request)
    check_names(license, base_model)
    if not dry_run:
        check_token(to)
    folder = CheckpointFolder.open(Path(out), trust_remote_code=trust_remote_code)
    manifest = _manifest_of(folder)
    before = look(to)
    check_way(to, before, force=force)
    verification = None
    if base is not None:
        verification = verify(base, out, trust_remote_code=trust_remote_code, listener=listener)
        checks = tuple(verification.checks)
        holds = verification.holds
    else:
        checks = _own_checks(folder, manifest, listener)
        holds = all(check.holds for check in checks)
    if not holds and not force:
        broken = next((f"{check.name}: {check.detail}" for check in checks if not check.holds), "its logits differ")
        raise BadInput(
            f"{printable(str(out))}: not pushed, as a promise does not hold ({broken}); --force pushes it all the same"
        )
    told = _verified(checks, verification)
    with contextlib.ExitStack() as stack:
        if delta:
            holder = stack.enter_context(_room_beside(Path(out)))
            metadata = with_options(metadata_of(folder), license=license, base_model=base_model)
            other = CheckpointFolder.open(Path(base), trust_remote_code=trust_remote_code) if base is not None else None
            made = _make_delta(folder, holder / "delta", other, metadata, listener, repo_id=repo_id, verified=told)
            parcel, known = pack_delta(made.path), metadata.license
        else:
            card = card_for(folder, manifest, repo_id, license=license, base_model=base_model, verified=told)
            parcel, known = pack(folder, manifest, card), read_metadata(card).license
        if known is None:
            listener.say("no licence known, so the card says unknown; --license apache-2.0, say, puts one in")
        listener.say(f"comparing with what {repo_id} holds")
        missing, stale = parcel.missing_in(before), parcel.stale_in(before)
        commit = None
        if (missing or stale) and not dry_run:
            listener.say(f"uploading {len(missing)} of {len(parcel.files)} files to {repo_id}")
            folder.check_unchanged()
            content = {name: parcel.files[name] for name in missing}
            message = f"surgeon: {', '.join(entry.op for entry in manifest.operations)}"
            message += " (delta)" if delta else ""
            commit = send(to, before, content, stale, message=printable(message), say=listener.say)
    return Pushed(
        path=Path(out),
        repo_id=repo_id,
        revision=revision,
        dry_run=dry_run,
        files=tuple(
            Upload(name, size, "there" if name not in missing else "changed" if name in before.files else "new")
            for name, size in parcel.sizes.items()
        ),
        stale=stale,
        left_behind=parcel.left_behind,
        checks=checks,
        verification=verification,
        license=known,
        commit=commit.commit if commit else None if dry_run else before.commit,
        url=commit.url if commit else None,
        pull_request=commit.pull_request if commit else None,
        delta=delta,
    )


def export_slot(
    out: str | Path,
    slot: int,
    dest: str | Path,
    *,
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> Exported:
    """Write slot `slot` of `out` into the new folder `dest` as a PEFT LoRA adapter for the base the slots stand on.

    `peft.PeftModel.from_pretrained(base, dest)` then computes what `out` does with all of the router's mass on the
    slot: shallow layers' shared LoRA is part of it. Matrices keep their bytes. Raises BadInput, and `dest` stays
    absent, for a slot that is not there or that stands in layers the base lacks.
    """
    listener = listener or Quiet()
    folder = CheckpointFolder.open(Path(out), trust_remote_code=trust_remote_code)
    target = Path(dest)
    try:
        exported = export(folder, _manifest_of(folder), slot, target, say=listener.say)
    except OSError as error:
        raise BadInput(_disk_trouble(error, target)) from error
    for note in exported.notes:
        listener.say(note)
    return exported


def diff(a: str | Path, b: str | Path, *, exact: bool = False, listener: Listener | None = None) -> Difference:
    """What became of the checkpoint `a` in `b`, tensor by tensor: added, removed, changed, moved, the same.

    Where the manifest of one says that the other is its base, that one is not read: names, config.json and lineage must
    fit, its digests are taken on trust. `exact` reads both. No code of either is run. Raises BadInput.
    """
    listener = listener or Quiet()
    # Code beside the weights is neither run nor copied here.
    opened = [CheckpointFolder.open(Path(folder), trust_remote_code=True) for folder in (a, b)]
    return compare(*opened, exact=exact, begin=listener.begin, advance=listener.advance)


def verify(
    base: str | Path,
    out: str | Path,
    *,
    logits: bool = True,
    streamed: bool = False,
    text: Path | None = None,
    window: int = 128,
    windows: int = 8,
    dtypes: Sequence[str] = ("auto",),
    device: str = "auto",
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> Verification:
    """Check `out` against `base`: bytes first, then logits (prefill and cached decode) on real tokens.

    `base` is what the last surgery was carried out on, or an earlier state: the first base, say, of several surgeries.

    `text` is a file to take tokens from (plain text or JSON lines), None the probe text that surgeon brings;
    `windows` 0 takes all of it. `streamed` holds one layer of each model at a time. Raises BadInput for what
    is no output of surgeon; a broken promise is told in the result.
    """
    from surgeon.verification.ancestors import ancestry_of, check_ancestry
    from surgeon.verification.static import bytes_to_read, check_static

    listener = listener or Quiet()
    if unknown := set(dtypes) - {"auto", "float32", "bfloat16", "float16"}:
        raise BadInput(f"dtype {printable(unknown.pop())!r}: use auto, float32, bfloat16 or float16")
    base_folder = CheckpointFolder.open(Path(base), trust_remote_code=trust_remote_code)
    out_folder = CheckpointFolder.open(Path(out), trust_remote_code=trust_remote_code)
    manifest = _manifest_of(out_folder)
    loaded = parse_plan(manifest.plan, source=f"{Path(out) / MANIFEST_FILE} (plan)")
    anatomy = dissect(base_folder.config, base_folder.tensors)
    if streamed and anatomy.family.encoder:
        raise BadInput(
            f"{printable(str(base))}: an encoder ({anatomy.family.model_type}), which is compared whole; leave out"
            " --streamed"
        )
    listener.begin("reading", bytes_to_read(base_folder, out_folder))
    checks: list[Check]
    if ancestry := ancestry_of(base_folder, out_folder, manifest):
        promise, trained, layer_of_base = ancestry.promise, ancestry.trained, ancestry.layer_of_base
        checks = check_ancestry(ancestry, manifest, base_folder, out_folder, advance=listener.advance)
    else:
        adapters = adapters_of(manifest, file=str(Path(out) / MANIFEST_FILE))
        blueprint = draw(loaded, anatomy, base_folder.config, adapters)
        promise, trained, layer_of_base = blueprint.promise, bool(manifest.training), blueprint.layer_of_base
        checks = check_static(blueprint, manifest, base_folder, out_folder, anatomy, advance=listener.advance)
    if not logits or not all(check.holds for check in checks):
        return Verification(promise, checks, trained=trained)

    from surgeon.verification.encoders import auto_class, compare_encoders
    from surgeon.verification.logits import compare_logits
    from surgeon.verification.streaming import compare_streamed
    from surgeon.verification.tokens import token_batches

    # Only code that is byte for byte what this version ships runs unasked; anything else was refused at opening.
    trust_remote_code = trust_remote_code or "shipped" in (base_folder.code, out_folder.code)
    device = devices.resolve(device)
    tokens = token_batches(Path(base), text=text, window=window, windows=windows, vocabulary=anatomy.sizes.vocabulary)
    comparisons: list[LogitComparison | OutputComparison] = []
    layered: list[StreamedComparison] = []
    for dtype in dtypes:
        listener.say(f"comparing logits ({dtype}) on {tokens.source}")
        if anatomy.family.encoder:
            comparisons.append(
                compare_encoders(
                    Path(base),
                    Path(out),
                    tokens.ids,
                    auto=auto_class(base_folder.config),
                    dtype=dtype,
                    device=device,
                    trust_remote_code=trust_remote_code,
                )
            )
        elif streamed:
            layer_by_layer = compare_streamed(
                Path(base),
                Path(out),
                tokens.ids,
                dtype=dtype,
                device=device,
                layer_of_base=layer_of_base,
                trust_remote_code=trust_remote_code,
            )
            layered.append(layer_by_layer)
            comparisons.extend(layer_by_layer.logits)
        else:
            comparisons.extend(
                compare_logits(
                    Path(base),
                    Path(out),
                    tokens.ids,
                    dtype=dtype,
                    device=device,
                    trust_remote_code=trust_remote_code,
                )
            )
    return Verification(promise, checks, comparisons, layered, tokens.source, trained=trained)


def train(
    out: str | Path,
    config: str | Path,
    to: str | Path,
    *,
    delta_only: bool = False,
    device: str = "auto",
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> Trained | None:
    """Train what surgery added to `out` by the config file `config`, and publish the run as the new folder `to`.

    `to` is absent or complete at any moment: every tensor that did not train is byte for byte that of `out`, which is
    checked. With `delta_only` it is the run's delta (`make_delta`), which `apply_delta` puts back onto the base. The
    same call continues a run that was cut off, from its last checkpoint. Under torchrun every process
    makes this call; None on all but the first. Raises BadInput for what cannot be trained, WrongSet where anything else
    would train, Diverged where the loss is no number any more.
    """
    from surgeon.training.config import load_config
    from surgeon.training.session import run_training

    loaded = load_config(Path(config))
    folder = CheckpointFolder.open(Path(out), trust_remote_code=trust_remote_code)
    hears = listener or Quiet()

    def as_delta(whole: Path) -> None:
        run = CheckpointFolder.open(whole, trust_remote_code=trust_remote_code)
        _make_delta(run, Path(to), None, metadata_of(run), hears)

    finished = run_training(
        folder,
        _manifest_of(folder),
        loaded,
        Path(to),
        device=device,
        trust_remote_code=trust_remote_code,
        listener=hears,
        deliver=as_delta if delta_only else None,
    )
    if finished.manifest is None:
        return None
    return Trained(
        out=Path(out),
        path=Path(to),
        manifest=finished.manifest,
        operations=finished.wanted.operations,
        settings=finished.settings.to_json(),
        parameters=finished.parameters,
        changes={name: (change.max_change, change.relative_change) for name, change in finished.changes.items()},
        losses=finished.losses,
        tokens=finished.tokens,
        log=finished.log,
        resumed_at=finished.resumed_at,
        seconds=finished.seconds,
        tokens_per_second=finished.tokens_per_second,
        peak_memory=finished.peak_memory,
    )


def continual(
    tasks: str | Path,
    base: str | Path,
    run: str | Path,
    *,
    revision: str | None = None,
    keep: bool = False,
    device: str = "auto",
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> Continued:
    """Learn the tasks of the file `tasks` one by one, and publish the model after the last as the folder `run`.

    For each task: a surgery (PMoE: a slot), a training of what is new on the task's text and a little of the earlier
    ones', and a measurement of all tasks so far. `run` is a complete checkpoint with the measurements in
    `continual.json`, absent or complete at any moment; the same call continues what was cut off, between tasks and
    within one. With `keep` the earlier tasks' runs are kept in `run`-tasks. Raises what `apply` and `train` raise;
    BadInput too where the tasks file, its texts or the base changed since.
    """
    from surgeon.tasks.config import load_tasks
    from surgeon.tasks.course import Course, Means, run_course
    from surgeon.tasks.surgeries import at_line, check_tasks, plans_of
    from surgeon.training.config import LoadedConfig
    from surgeon.training.session import Processes, run_training

    listener = listener or Quiet()
    if Processes.of_environment().size > 1:
        raise BadInput("torchrun: `surgeon continual` runs in one process; `surgeon train` takes several")
    loaded = load_tasks(Path(tasks))
    device = devices.resolve(device)
    config = loaded.config
    plans = plans_of(loaded)
    assert plans[0] is not None
    with at_line(loaded, 0):
        preview(plans[0], base, revision=revision, trust_remote_code=trust_remote_code)
    located = locate(str(base), revision=revision)
    folder = CheckpointFolder.open(located.path, trust_remote_code=trust_remote_code)
    check_tasks(loaded, plans, folder)

    def grow(number: int, before: Path, out: Path) -> None:
        plan = plans[number]
        assert plan is not None
        # The base by the name it was given: what the manifest calls it.
        source, at = (str(base), revision) if number == 0 else (str(before), None)
        with at_line(loaded, number):
            apply(plan, source, out, revision=at, device=device, trust_remote_code=trust_remote_code, listener=listener)

    def train_on(before: Path, config: LoadedConfig, to: Path) -> None:
        out = CheckpointFolder.open(before, trust_remote_code=trust_remote_code)
        run_training(
            out,
            _manifest_of(out),
            config,
            to,
            device=device,
            trust_remote_code=trust_remote_code,
            listener=listener,
        )

    def result(course: Course) -> Continued:
        return Continued(
            path=Path(run),
            base=located.repo_id or located.path.resolve().name,
            tasks=tuple(task.name for task in config.tasks),
            general=tuple(source.name for source in config.general),
            rows=tuple(course.rows),
            trainings=tuple(course.trainings),
            config=config.model_dump(mode="json", exclude_unset=True),
            fingerprint=course.fingerprint,
            resumed_after=course.resumed_after,
            kept=course.kept,
        )

    try:
        course = run_course(
            loaded,
            folder,
            Path(run),
            Means(lambda number: plans[number] is not None, grow, train_on),
            device=device,
            keep=keep,
            trust_remote_code=trust_remote_code,
            listener=listener,
            told=lambda course: json.dumps(result(course).record(), indent=1, ensure_ascii=False) + "\n",
        )
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        told = f"{printable(str(error.filename or run))}: {error.strerror or error}"
        raise BadInput(f"{told}; what is complete is kept: the same command continues") from error
    return result(course)


def evaluate(
    models: str | Path | Sequence[str | Path],
    data: str | Path | Sequence[str | Path] | Mapping[str, str | Path],
    *,
    base: str | Path | None = None,
    sources: Sequence[str] | None = None,
    length: int | None = None,
    batch: int = 8,
    most: int = 500,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> Evaluation:
    """Loss, perplexity, bits per byte and accuracy of `models` on the same held-out text, with confidence intervals.

    A model is a folder, or `user/name[@revision]` on the Hub. `data` is one or more text files or folders (`NAME=FILE`
    gives a name), a data file, a training config (what it holds out), or files by name. The first row, `base` where it
    is given, is what the others are compared with, document by document. At most `most` documents a source are taken
    (0: all), in windows of `length` tokens (None: the smallest context, at most 2048), `batch` at a time. Raises
    BadInput.
    """
    from surgeon.evaluation.models import Candidate, evaluate_models
    from surgeon.evaluation.sources import open_sources

    listener = listener or Quiet()
    for option, given, least in (("length", length, 2), ("batch", batch, 1), ("most", most, 0)):
        if given is not None and given < least:
            raise BadInput(f"{option} is {given}; it is at least {least}")
    given_models = [models] if isinstance(models, str | Path) else list(models)
    if not given_models:
        raise BadInput("no model to evaluate: give a folder or a Hub id")
    device = devices.resolve(device)
    candidates = [
        Candidate.open(model, trust_remote_code=trust_remote_code)
        for model in [*([base] if base is not None else []), *given_models]
    ]
    held = open_sources(data, only=sources or (), most=most, say=listener.say)
    return evaluate_models(
        candidates,
        held,
        length=length,
        batch=batch,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
        listener=listener,
    )


def inspect(folder: str | Path, *, trust_remote_code: bool = False) -> Inspection:
    """What a checkpoint is, what was done to it, which of its tensors are new. Raises BadInput."""
    opened = CheckpointFolder.open(Path(folder), trust_remote_code=trust_remote_code)
    manifest = _manifest_of(opened) if opened.manifest is not None else None
    return Inspection(
        path=Path(folder),
        folder=opened,
        anatomy=dissect(opened.config, opened.tensors),
        manifest=manifest,
        parameters=sum(info.numel for info in opened.tensors.values()),
    )


def routing_report(
    out: str | Path,
    texts: Mapping[str, Path | None],
    *,
    to: Path | None = None,
    window: int = 128,
    windows: int = 8,
    device: str = "auto",
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> RoutingReport:
    """Run `out` over texts, by their domains' names (None: the built-in probe), and tell what routers and gates chose.

    `windows` of `window` tokens are taken of each text, 0 for all of it. `to` gets the result as JSON. Raises BadInput
    for a checkpoint without grafts that choose, and for texts that cannot be read.
    """
    from surgeon.choices import record_choices

    report = record_choices(
        out,
        texts,
        window=window,
        windows=windows,
        device=devices.resolve(device),
        trust_remote_code=trust_remote_code,
        progress=(listener or Quiet()).say,
    )
    if to is not None:
        try:
            to.write_text(json.dumps(report.to_json(), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise BadInput(f"{printable(str(to))}: cannot be written ({error.strerror})") from None
    return report


def _own_checks(folder: CheckpointFolder, manifest: Manifest, listener: Listener) -> tuple[Check, ...]:
    from surgeon.verification.own_manifest import check_own_manifest

    listener.begin("checking", sum(info.nbytes for info in folder.tensors.values()))
    anatomy = dissect(folder.config, folder.tensors)
    return tuple(check_own_manifest(manifest, folder, anatomy, advance=listener.advance))


def _verified(checks: Sequence[Check], verification: Verification | None) -> list[str]:
    """What was checked before a push, in words for the card."""
    by = "against the base" if verification else f"against {MANIFEST_FILE}"
    lines = [f"{check.name} ({by}): {'' if check.holds else 'DOES NOT HOLD: '}{check.detail}" for check in checks]
    if verification is None:
        return lines
    for found in verification.comparisons:
        same = (
            "every value bit-identical" if found.identical else f"they differ by up to {found.max_abs_difference:.3g}"
        )
        lines.append(f"{found.mode}, {found.dtype}, {found.tokens:,} tokens of {verification.tokens}: {same}")
    return lines


def report(
    out: str | Path,
    *,
    html: str | Path | None = None,
    png: str | Path | None = None,
    base: str | Path | None = None,
    logits: bool = False,
    texts: Mapping[str, Path | None] | None = None,
    routing: str | Path | None = None,
    log: str | Path | None = None,
    maps: Sequence[str] = (),
    window: int = 128,
    windows: int = 8,
    device: str = "auto",
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> Reported:
    """Tell all that can be told of `out`: as one self-contained page `html`, as pictures in the folder `png`.

    With `base`, the static proof is run (`logits`: and logits are compared). `texts`, by their domains' names, record
    what routers and gates choose, `routing` is such a record. `log` holds losses, JSON lines of step, source and loss;
    `maps` are names of transport maps to show. Where there are control blocks, the probe sentences of Control LLM are
    run. Raises BadInput; a broken promise is told in the page and the result.
    """
    from surgeon.reporting import check_place, find, write_page
    from surgeon.views.page.document import render

    listener = listener or Quiet()
    if logits and base is None:
        raise BadInput("--verify compares logits with the base's: give --base DIR")
    if html is not None:
        check_place(Path(html))
    folder = CheckpointFolder.open(Path(out), trust_remote_code=trust_remote_code)
    manifest = _manifest_of(folder)
    verification = None
    if base is not None:
        verification = verify(
            base,
            out,
            logits=logits,
            window=window,
            windows=windows,
            device=device,
            trust_remote_code=trust_remote_code,
            listener=listener,
        )
    findings = find(
        folder,
        manifest,
        verification=verification,
        texts=texts or {},
        routing=None if routing is None else Path(routing),
        log=None if log is None else Path(log),
        maps=maps,
        window=window,
        windows=windows,
        device=devices.resolve(device),
        trust_remote_code=trust_remote_code,
        progress=listener.say,
    )
    pictures: tuple[Path, ...] = ()
    if png is not None:
        from surgeon.views.pictures import draw_pictures

        pictures = draw_pictures(findings, Path(png))
    if html is not None:
        write_page(render(findings), Path(html))
    return Reported(None if html is None else Path(html), pictures, findings)


def _loaded(plan: str | Path | LoadedPlan) -> LoadedPlan:
    return plan if isinstance(plan, LoadedPlan) else load_plan(find_plan(plan))


def _make_delta(
    folder: CheckpointFolder,
    target: Path,
    base: CheckpointFolder | None,
    metadata: Metadata,
    listener: Listener,
    *,
    repo_id: str | None = None,
    verified: Sequence[str] = (),
) -> MadeDelta:
    manifest = _manifest_of(folder)
    check_destination(target, folder.path)
    listener.begin("reading", sum(info.nbytes for info in folder.tensors.values()))
    job = making_job(folder, manifest, digests_of(folder, folder.tensors, listener.advance), base)
    sizes = {output.name: numel(output.recipe) for output in job.blueprint.outputs}
    text = delta_card(manifest, folder.config, sizes, metadata, repo_id=repo_id, verified=verified)
    job = dataclasses.replace(job, files={**(job.files or {}), CARD_FILE: text})
    _check_way(job, folder.path, target)
    stopwatch = Stopwatch()
    _written(job, target, listener, stopwatch, Ranks())
    return MadeDelta(
        out=folder.path,
        path=target,
        base=manifest.base.id,
        revision=manifest.base.revision,
        tensors=len(sizes),
        whole=len(folder.tensors),
        nbytes=job.bytes_to_write,
        whole_nbytes=sum(info.nbytes for info in folder.tensors.values()),
        from_base=tuple(name for name in folder.side_files if name not in (job.files or {})),
        seconds=stopwatch.seconds,
    )


@contextlib.contextmanager
def _room_beside(out: Path) -> Iterator[Path]:
    """A folder on the output's disk that is gone afterwards."""
    try:
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.delta-", dir=out.resolve().parent) as folder:
            yield Path(folder)
    except PermissionError as error:
        raise BadInput(
            f"{printable(str(out.resolve().parent))}: is not writable, and the delta is made there"
        ) from error


def _merging(alpha: float | None) -> LoadedPlan:
    share = "" if alpha is None else f"\n    alpha: {alpha!r}"
    return parse_plan(f"surgeon: 1\noperations:\n  - op: merge_branches{share}\n", source="merge")


def _manifest_of(folder: CheckpointFolder) -> Manifest:
    if folder.manifest is None:
        raise BadInput(
            f"{printable(str(folder.path))}: no {MANIFEST_FILE}, so this is not an output of surgeon (or it was"
            " saved again by another tool, which leaves that file out)"
        )
    return parse(folder.manifest, file=str(folder.path / MANIFEST_FILE))


def _preview(
    loaded: LoadedPlan,
    folder: CheckpointFolder,
    adapters: Mapping[str, AdapterFolder],
    *,
    max_shard_bytes: int = MAX_NEW_SHARD_BYTES,
) -> Preview:
    if folder.manifest is not None:
        # The output's lineage will tell of the base's surgeries: what cannot be read is refused before any work.
        _manifest_of(folder)
    anatomy = dissect(folder.config, folder.tensors)
    known = {name: adapter.facts for name, adapter in adapters.items()}
    blueprint = draw(loaded, anatomy, folder.config, known)
    shards = lay_out(blueprint, folder.tensors, max_new_shard_bytes=max_shard_bytes)
    texts = _texts(blueprint, loaded)
    notes = [*folder.notes, *(f"the base is run on {printable(str(path))}" for path in texts.values())]
    if metadata_of(folder).license is None:
        notes.append(NO_LICENSE)
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
    _check_way(job, base, out)
    for note in shown.notes:
        listener.say(note)
    if not shown.blueprint.native:
        from surgeon.verification.skeleton import check_skeleton

        check_skeleton(shown.blueprint)
    manifest = _written(job, out, listener, stopwatch, ranks)
    assert manifest is not None
    return manifest


def _check_way(job: Job, base: Path, out: Path) -> None:
    check_destination(out, base)
    check_space(out, job.bytes_to_write, fingerprint=job.fingerprint)


def _written(job: Job, out: Path, listener: Listener, stopwatch: Stopwatch, ranks: Ranks) -> Manifest | None:
    try:
        return execute(job, out, listener, stopwatch, ranks)
    except OSError as error:
        raise BadInput(_disk_trouble(error, out)) from error


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


def _disk_trouble(error: OSError, out: Path) -> str:
    where = printable(str(error.filename or out))
    working = printable(str(out.parent / f".{out.name}.surgeon"))
    staged = f"what was finished is kept in {working}: the same command continues"
    if error.errno == errno.ENOSPC:
        return f"{where}: the disk is full; make room and run the same command again ({staged})"
    return f"{where}: {error.strerror or error}; {staged}"
