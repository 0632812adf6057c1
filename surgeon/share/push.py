"""`surgeon push`: put an output on the Hub, as one commit, once it verifies."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.text import Text

from surgeon.checkpoint.card_metadata import NOTHING_KNOWN, Metadata, check_license, metadata_of, read_metadata
from surgeon.checkpoint.folder import CARD_FILE, CONFIG_FILE, DELTA_FILE, MAX_CARD_BYTES, RECORD_FILE, CheckpointFolder
from surgeon.checkpoint.hub import is_commit, is_repo_id, locate
from surgeon.checkpoint.open_files import HeldFolder
from surgeon.checkpoint.source import MAX_SIDE_FILE_BYTES, is_side_file
from surgeon.checkpoint.uploading import Destination, Repository, check_token, look, send
from surgeon.checkpoint.weights import INDEX_FILE, SINGLE_FILE
from surgeon.common.disk_space import writing
from surgeon.common.formatting import listed, size
from surgeon.common.json_results import plain_fields
from surgeon.common.listener import Listener, Quiet
from surgeon.common.tables import FittedTable
from surgeon.common.work_folders import working_in, write_durably
from surgeon.errors import BadInput, printable
from surgeon.families.dissect import dissect
from surgeon.manifest.card import HUB_ID, card
from surgeon.manifest.manifest import MANIFEST_FILE, Manifest
from surgeon.manifest.reading import manifest_of
from surgeon.manifest.run_files import files_beside
from surgeon.rework.make_delta import make_delta_of
from surgeon.runtime.bundle import CODE_FILE
from surgeon.verify.check import Check
from surgeon.verify.own_manifest import check_own_manifest
from surgeon.verify.side_files import check_beside
from surgeon.verify.verify import Verification, verdict, verify

# Says of the folder beside OUT, in which a delta is made to be pushed, that a push made it.
_MARKER = "push"


@dataclass(frozen=True)
class Upload:
    """A file of a push: its size in bytes, and whether the repository lacks it, holds another, or holds just this."""

    name: str
    nbytes: int
    state: Literal["new", "changed", "there"]


@dataclass(frozen=True)
class Pushed:
    """A push, or with `dry_run` what one would do.

    `revision` is the branch asked for, None for main. `stale` are files of the repository that are taken out, as they
    would be loaded beside these; `left_behind` those of the folder that do not go up. `checks` were made before, by
    the output's own manifest (`verification` None; `no_base` says why) or against its base. `commit` is the hash to
    pin, that of the repository as it was where nothing had to be sent; None in a dry run.
    """

    path: Path
    repo_id: str
    revision: str | None
    dry_run: bool
    files: tuple[Upload, ...]
    stale: tuple[str, ...]
    left_behind: tuple[str, ...]
    checks: tuple[Check, ...]
    verification: Verification | None
    license: str | None
    commit: str | None
    url: str | None
    pull_request: str | None
    delta: bool = False
    no_base: str | None = None

    def __repr__(self) -> str:
        verb = "would send" if self.dry_run else "sent"
        where = f"{self.repo_id!r}, commit {self.commit}" if self.commit else repr(self.repo_id)
        return f"Pushed({where}, {verb} {len(self.sent)} of {len(self.files)} files)"

    @property
    def sent(self) -> tuple[Upload, ...]:
        """The files that the repository lacked or held otherwise."""
        return tuple(file for file in self.files if file.state != "there")

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `--json`."""
        return plain_fields(self)


def push(
    out: str | Path,
    repo_id: str,
    *,
    base: str | Path | None = None,
    public: bool | None = None,
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
    """Put an output into a repository of the Hub, as one commit, with a card that says what was done and checked.

    Before that it is checked as `verify` does, logits included, against its base where that can be had; else against
    its own manifest, and `no_base` says why. Regular files are sent by an allow-list, and stay open from before the
    checks; a link is refused. Files that the repository has are not sent again. The token is huggingface_hub's own.

    Args:
        out: the output's folder
        repo_id: the repository, `user/name`
        base: the folder to check against; without it, the base that the manifest names, from the cache or the Hub
        public: whether all may see a new repository; False refuses one that is public already
        revision: the branch, made at need (or `refs/pr/N`); None: main
        pull_request: open one in place of a commit
        dry_run: send nothing, make nothing, download nothing
        force: push although a check fails, or over a model of another tool
        license: for the card, where the base's is unknown
        base_model: for the card, the base's id on the Hub
        delta: send what `make_delta` writes
        trust_remote_code: run the output's own code
        listener: gets progress and notes

    Returns:
        the commit, and every file with whether it was sent

    Raises:
        BadInput: also for whatever the Hub or the network answers; the repository is then as it was, and the same call
            goes on where it stopped
    """
    listener = listener or Quiet()
    to = Destination(repo_id, revision, public, pull_request)
    check_names(license, base_model)
    if not dry_run:
        check_token(to)
    with contextlib.ExitStack() as stack:
        held = stack.enter_context(HeldFolder(Path(out)))
        folder = hold_output(held, trust_remote_code=trust_remote_code, beside=delta)
        for note in folder.notes:
            listener.say(note)
        manifest = manifest_of(folder)
        before = look(to)
        check_repository(to, before, force=force)
        checked = _checked(folder, manifest, base, listener, download=not dry_run, trust_remote_code=trust_remote_code)
        if not force:
            checked.check_kept(folder)
        given = Given(license, base_model, tuple(checked.words()))
        if delta:
            room = stack.enter_context(_room_beside(Path(out)))
            other = CheckpointFolder.open(Path(base), trust_remote_code=trust_remote_code) if base is not None else None
            made, known = _make_delta(folder, other, room / "delta", repo_id, given, listener)
            held.check_unchanged()
            held = stack.enter_context(HeldFolder(made))
            parcel = pack_delta(held)
        else:
            card = card_for(folder, manifest, held, repo_id, given)
            parcel, known = pack(folder, held, card), read_metadata(card).license
        if known is None:
            listener.say("no licence known, so the card says unknown; --license apache-2.0, say, puts one in")
        listener.say(f"comparing with what {repo_id} holds")
        missing, stale = parcel.missing_in(before), parcel.stale_in(before)
        held.check_unchanged()
        commit = None
        if (missing or stale) and not dry_run:
            listener.say(f"uploading {len(missing)} of {len(parcel.files)} files to {repo_id}")
            content = {name: parcel.files[name] for name in missing}
            message = _message(manifest, delta=delta)
            commit = send(
                to, before, content, stale, message=message, say=listener.say, check_unchanged=held.check_unchanged
            )
    return Pushed(
        path=Path(out),
        repo_id=repo_id,
        revision=revision,
        dry_run=dry_run,
        files=parcel.uploads(before, missing),
        stale=stale,
        left_behind=parcel.left_behind,
        checks=checked.checks,
        verification=checked.verification,
        license=known,
        commit=commit.commit if commit else None if dry_run else before.commit,
        url=commit.url if commit else None,
        pull_request=commit.pull_request if commit else None,
        delta=delta,
        no_base=checked.no_base,
    )


def hold_output(held: HeldFolder, *, trust_remote_code: bool, beside: bool = False) -> CheckpointFolder:
    """Open the output in `held`, and hold every file of it that may be sent. Raises BadInput, for a link too.

    With `beside` also what training put beside the weights, which goes into a delta alone.
    """
    folder = CheckpointFolder.open(held.path, trust_remote_code=trust_remote_code)
    manifest, listing = manifest_of(folder), folder.source.listing()
    # The manifest names the code files, and anybody can write a manifest.
    code = [name for name in manifest.code if name in listing and "/" not in name and name.endswith(".py")]
    side = [name for name, nbytes in listing.items() if is_side_file(name) and nbytes <= MAX_SIDE_FILE_BYTES]
    names = [CONFIG_FILE, *folder.shards, *side, *code, MANIFEST_FILE]
    if SINGLE_FILE not in folder.shards:
        names.append(INDEX_FILE)
    names += [name for name in (RECORD_FILE, CARD_FILE) if name in listing]
    names += files_beside(folder) if beside else ()
    for name in sorted(names):
        held.hold(name)
    # Once more, so that all that is read and checked was read while it was held.
    return CheckpointFolder.open(held.path, trust_remote_code=trust_remote_code)


def find_base(
    manifest: Manifest, base: str | Path | None, listener: Listener, *, download: bool
) -> tuple[Path | None, str | None]:
    """The base to check against, or None and why: the given one, else what the manifest names, if it can be had."""
    if base is not None:
        return Path(base), None
    named, revision = manifest.base.id, manifest.base.revision
    shown = printable(named)
    if not is_repo_id(named) or revision is None or not is_commit(revision):
        return None, f"its base was a folder, {shown}; --base DIR checks against it"
    listener.say(f"checking against its base, {shown} at commit {revision}, from the cache or the Hub")
    try:
        return locate(named, revision=revision, download=download).path, None
    except BadInput as error:
        reason = f"its base cannot be had ({error}); --base DIR checks against it"
        listener.say(f"not checked against its base: {reason}")
        return None, reason


@dataclass(frozen=True)
class _Checked:
    """The checks before a push: against the base (`verification`), else against its manifest (`no_base` says why)."""

    checks: tuple[Check, ...]
    verification: Verification | None
    no_base: str | None

    def check_kept(self, folder: CheckpointFolder) -> None:
        """Raise BadInput where the output does not keep what it promises."""
        broken = next((f"{check.name}: {check.detail}" for check in self.checks if not check.holds), None)
        if broken is None and self.verification is not None and not self.verification.holds:
            broken = "its logits differ"
        if broken is not None:
            raise BadInput(
                f"{printable(str(folder.path))}: not pushed, as a promise does not hold ({broken}); --force pushes it"
                " all the same"
            )

    def words(self) -> list[str]:
        """A line for each check, for the card."""
        by = "against the base" if self.verification else f"against {MANIFEST_FILE}"
        lines = [
            f"{check.name} ({by}): {'' if check.holds else 'DOES NOT HOLD: '}{check.detail}" for check in self.checks
        ]
        if self.verification is None:
            return lines
        for found in self.verification.comparisons:
            largest = f"they differ by up to {found.max_abs_difference:.3g}"
            same = "every value bit-identical" if found.identical else largest
            lines.append(f"{found.mode}, {found.dtype}, {found.tokens:,} tokens of {self.verification.tokens}: {same}")
        return lines


def _checked(
    folder: CheckpointFolder,
    manifest: Manifest,
    base: str | Path | None,
    listener: Listener,
    *,
    download: bool,
    trust_remote_code: bool,
) -> _Checked:
    """Verify the output against its base, logits included, where that can be had; else against its own manifest."""
    found, no_base = find_base(manifest, base, listener, download=download)
    if found is None:
        return _Checked(_own_checks(folder, manifest, listener), None, no_base)
    verification = verify(
        found,
        folder.path,
        # One that was not asked for should not need the memory of two models.
        streamed=base is None and not dissect(folder.config, folder.tensors, folder.own).family.encoder,
        trust_remote_code=trust_remote_code,
        listener=listener,
    )
    return _Checked(tuple(verification.checks), verification, no_base)


def _make_delta(
    folder: CheckpointFolder,
    base: CheckpointFolder | None,
    target: Path,
    repo_id: str,
    given: Given,
    listener: Listener,
) -> tuple[Path, str | None]:
    """Write the delta of `folder` to `target`; where it is, and its licence."""
    metadata = given.over(metadata_of(folder))
    made = make_delta_of(folder, target, base, metadata, listener, repo_id=repo_id, verified=given.verified)
    return made.path, metadata.license


def _message(manifest: Manifest, *, delta: bool) -> str:
    """The commit's message."""
    operations = ", ".join(entry.op for entry in manifest.operations) or "training"
    return printable(f"surgeon: {operations}{' (delta)' if delta else ''}")


def _own_checks(folder: CheckpointFolder, manifest: Manifest, listener: Listener) -> tuple[Check, ...]:
    listener.begin("checking", sum(info.nbytes for info in folder.tensors.values()))
    anatomy = dissect(folder.config, folder.tensors, folder.own)
    return (check_beside(folder), *check_own_manifest(manifest, folder, anatomy, advance=listener.advance))


@contextlib.contextmanager
def _room_beside(out: Path) -> Iterator[Path]:
    """A folder of ours on the output's disk, empty, and gone afterwards."""
    place = out.resolve()
    room = place.with_name(f".{place.name}.push")
    with writing(room), working_in(room, target=room, marker=_MARKER) as work:
        write_durably(room / _MARKER, "")
        # What a killed push left is made anew.
        work.clear(but=(_MARKER,))
        try:
            yield room
        finally:
            work.remove()


def pushed_view(pushed: Pushed) -> RenderableType:
    """The files that went up (or would), how much of it is new, and the commit to pin."""
    table = FittedTable(headings=False)
    styles = {"new": "green", "changed": "yellow", "there": "dim"}
    for file in pushed.files:
        table.add_row(Text(file.state, style=styles[file.state]), size(file.nbytes), printable(file.name))
    for name in pushed.stale:
        table.add_row(Text("taken out", style="red"), "", printable(name))
    lines: list[RenderableType] = [table, Text()]
    if pushed.left_behind:
        lines.append(Text(f"stays here: {listed(pushed.left_behind)}", style="dim"))
    if pushed.verification is not None:
        lines.append(verdict(pushed.verification))
    else:
        kept = sum(check.holds for check in pushed.checks)
        summary = f"{kept} of {len(pushed.checks)} checks against its own {MANIFEST_FILE} hold"
        lines.append(Text(summary, style="green" if kept == len(pushed.checks) else "bold red"))
        lines.append(Text(f"not checked against its base: {pushed.no_base}", style="yellow"))
    sent = sum(file.nbytes for file in pushed.sent)
    whole = sum(file.nbytes for file in pushed.files)
    amount = f"{len(pushed.sent)} of {len(pushed.files)} files, {size(sent)} of {size(whole)}"
    where = f"{pushed.repo_id}@{printable(pushed.revision)}" if pushed.revision else pushed.repo_id
    if pushed.dry_run:
        lines.append(Text(f"dry run: {amount} would go to {where}; nothing was sent"))
    elif pushed.url is None:
        lines.append(Text.assemble(("done ", "bold green"), f"{where} holds all of it already, commit {pushed.commit}"))
    else:
        lines.append(Text.assemble(("done ", "bold green"), f"{amount}, to {where}"))
        lines.append(Text(f"look at it: {printable(pushed.pull_request or pushed.url)}"))
        if pushed.delta:
            lines.append(Text(f"apply it to its base: surgeon apply --delta {pushed.repo_id}@{pushed.commit} BASE OUT"))
        else:
            lines.append(Text(f'load it: from_pretrained("{pushed.repo_id}", revision="{pushed.commit}")'))
    return Group(*lines)


@dataclass(frozen=True)
class Parcel:
    """The files that the repository will hold: contents (paths, or bytes made here) by name, and their sizes.

    `left_behind` are files of the folder that are not uploaded.
    """

    files: Mapping[str, Path | bytes]
    sizes: Mapping[str, int]
    left_behind: tuple[str, ...]

    def missing_in(self, there: Repository) -> tuple[str, ...]:
        """The names that the repository lacks, or holds with other content."""
        return tuple(name for name, content in self.files.items() if not there.holds(name, content))

    def uploads(self, there: Repository, missing: Collection[str]) -> tuple[Upload, ...]:
        """Each file with its size, and whether the repository holds it; `missing` are the names that it lacks so."""
        return tuple(
            Upload(name, size, "there" if name not in missing else "changed" if name in there.files else "new")
            for name, size in self.sizes.items()
        )

    def stale_in(self, there: Repository) -> tuple[str, ...]:
        """Files of the repository that transformers would load instead of these, or beside them."""
        loaded = (name for name in there.files if name not in self.files and "/" not in name and _is_loaded(name))
        return tuple(sorted(loaded))


def pack(folder: CheckpointFolder, held: HeldFolder, text: bytes) -> Parcel:
    """An output's files by the allow-list, all of them held, and the card `text`."""
    files = _contents(held, folder.shards) | {CARD_FILE: text}
    sizes = {**held.sizes, CARD_FILE: len(text)}
    left = {name for name in folder.source.listing() if name not in files and not name.endswith("/")}
    return Parcel(files, sizes, tuple(sorted(left | {n for n in folder.left_behind if n not in files})))


def pack_delta(held: HeldFolder) -> Parcel:
    """A delta's files; surgeon has just written all of them."""
    for path in sorted(held.path.rglob("*")):
        if not path.is_dir() or path.is_symlink():
            held.hold(path.relative_to(held.path).as_posix())
    return Parcel(_contents(held, [name for name in held.sizes if name.endswith(".safetensors")]), held.sizes, ())


def _contents(held: HeldFolder, shards: Collection[str]) -> dict[str, Path | bytes]:
    """Return the files that are held, by name: shards as paths, everything else as the bytes that were checked."""
    return {name: held.place(name) if name in shards else held.content(name) for name in held.sizes}


@dataclass(frozen=True)
class Given:
    """The part of the card that a push writes: licence and base model, where given, and lines about the checks."""

    license: str | None
    base_model: str | None
    verified: tuple[str, ...]

    def over(self, metadata: Metadata) -> Metadata:
        """The metadata of the base's card, with the given values in place."""
        if self.license is not None:
            metadata = dataclasses.replace(metadata, license=self.license, license_name=None, license_link=None)
        if self.base_model is not None:
            metadata = dataclasses.replace(metadata, base_model=self.base_model)
        return metadata


def card_for(folder: CheckpointFolder, manifest: Manifest, held: HeldFolder, repo_id: str, given: Given) -> bytes:
    """The card to upload: with the repository's name and the checks, unless somebody edited the folder's card.

    An edited card is uploaded unchanged. Raises BadInput where a licence or base model is given for an edited card.
    """
    sizes = {name: info.numel for name, info in folder.tensors.items()}
    found: bytes | None = None
    if held.sizes.get(CARD_FILE, 0) > MAX_CARD_BYTES:
        raise BadInput(f"{printable(str(folder.path / CARD_FILE))}: at most {MAX_CARD_BYTES:,} bytes are sent")
    if CARD_FILE in held.sizes:
        found = held.content(CARD_FILE)
    metadata = read_metadata(found) if found is not None else NOTHING_KNOWN
    if found is not None and found != card(manifest, folder.config, sizes, metadata):
        if given.license is not None or given.base_model is not None:
            option = "--license" if given.license is not None else "--base-model"
            raise BadInput(
                f"{printable(str(folder.path / CARD_FILE))}: edited by hand, so {option} has no effect; edit it too"
            )
        return found
    return card(manifest, folder.config, sizes, given.over(metadata), repo_id=repo_id, verified=given.verified)


def check_names(license: str | None, base_model: str | None) -> None:
    """Raise BadInput where the Hub knows no licence or model spelled like this."""
    if license is not None:
        check_license(license)
    if base_model is not None and not HUB_ID.fullmatch(base_model):
        raise BadInput(f"--base-model {printable(base_model)}: not a model of the Hub; give `user/name`")


def check_repository(to: Destination, there: Repository, *, force: bool) -> None:
    """Raise BadInput where others see what they should not, or a push would overwrite a model of another tool."""
    if to.public is not None and there.exists and there.private is to.public:
        is_now, wanted = ("private", "public") if to.public else ("public", "private")
        raise BadInput(
            f"{to.repo_id} exists and is {is_now}; --{wanted} is for new ones: make it {wanted} in its settings first"
        )
    if to.pull_request and not there.exists:
        raise BadInput(
            f"{to.repo_id}: no such repository (or the token may not see it) to open a pull request in; check the name"
        )
    weights = [name for name in there.files if name.endswith((".safetensors", ".bin", ".gguf"))]
    if weights and MANIFEST_FILE not in there.files and not to.pull_request and not force:
        raise BadInput(
            f"{to.shown} holds a model that is not an output of surgeon ({printable(weights[0])}); use another name, or"
            " --pr, or --force to commit over it"
        )


def _is_loaded(name: str) -> bool:
    """Return whether transformers may load a file of this name, at the top of a repository, as weights or code."""
    # With a delta's mark beside it, surgeon would not open the checkpoint.
    return name in (INDEX_FILE, DELTA_FILE, CODE_FILE) or name.endswith(".safetensors")
