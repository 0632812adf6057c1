"""`surgeon push`: put an output on the Hub, as one commit, once it verifies."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from surgeon.checkpoint.card_metadata import NOTHING_KNOWN, Metadata, check_license, metadata_of, read_metadata
from surgeon.checkpoint.folder import CARD_FILE, CONFIG_FILE, DELTA_FILE, MAX_CARD_BYTES, RECORD_FILE, CheckpointFolder
from surgeon.checkpoint.uploading import Destination, Repository, check_token, look, send
from surgeon.checkpoint.weights import INDEX_FILE, SINGLE_FILE
from surgeon.common.formatting import listed, size
from surgeon.common.listener import Listener, Quiet
from surgeon.common.plain import plain_fields
from surgeon.errors import BadInput, printable
from surgeon.families.anatomy import dissect
from surgeon.manifest.card import HUB_ID, card
from surgeon.manifest.manifest import MANIFEST_FILE, Manifest, manifest_of
from surgeon.rework.make_delta import make_delta_of
from surgeon.runtime.bundle import CODE_FILE
from surgeon.verify.static import Check, check_own_manifest
from surgeon.verify.verify import Verification, verdict, verify


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
    the output's own manifest (`verification` None) or against its base. `commit` is the hash to pin, that of the
    repository as it was where nothing had to be sent; None in a dry run.
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

    def __repr__(self) -> str:
        verb = "would send" if self.dry_run else "sent"
        where = f"{self.repo_id!r}, commit {self.commit}" if self.commit else repr(self.repo_id)
        return f"Pushed({where}, {verb} {len(self.sent)} of {len(self.files)} files)"

    @property
    def sent(self) -> tuple[Upload, ...]:
        """The files that the repository lacked or held otherwise."""
        return tuple(file for file in self.files if file.state != "there")

    def to_json(self) -> dict[str, Any]:
        """As plain data for `--json`."""
        return plain_fields(self)


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
    listener = listener or Quiet()
    to = Destination(repo_id, revision, private, pull_request)
    check_names(license, base_model)
    if not dry_run:
        check_token(to)
    folder = CheckpointFolder.open(Path(out), trust_remote_code=trust_remote_code)
    manifest = manifest_of(folder)
    before = look(to)
    check_repository(to, before, force=force)
    verification = None
    if base is not None:
        verification = verify(base, out, trust_remote_code=trust_remote_code, listener=listener)
    checks = tuple(verification.checks) if verification else _own_checks(folder, manifest, listener)
    if not force:
        _check_kept(folder, checks, verification)
    given = Given(license, base_model, tuple(_verified(checks, verification)))
    with contextlib.ExitStack() as stack:
        if delta:
            room = stack.enter_context(_room_beside(Path(out)))
            other = CheckpointFolder.open(Path(base), trust_remote_code=trust_remote_code) if base is not None else None
            parcel, known = _packed_delta(folder, other, room / "delta", repo_id, given, listener)
        else:
            card = card_for(folder, manifest, repo_id, given)
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
            commit = send(to, before, content, stale, message=_message(manifest, delta=delta), say=listener.say)
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


def _check_kept(folder: CheckpointFolder, checks: Sequence[Check], verification: Verification | None) -> None:
    """Raise BadInput where the output does not keep what it promises."""
    broken = next((f"{check.name}: {check.detail}" for check in checks if not check.holds), None)
    if broken is None and verification is not None and not verification.holds:
        broken = "its logits differ"
    if broken is not None:
        raise BadInput(
            f"{printable(str(folder.path))}: not pushed, as a promise does not hold ({broken}); --force pushes it all"
            " the same"
        )


def _packed_delta(
    folder: CheckpointFolder,
    base: CheckpointFolder | None,
    target: Path,
    repo_id: str,
    given: Given,
    listener: Listener,
) -> tuple[Parcel, str | None]:
    """The delta of `folder`, made at `target`, as it goes up, and its licence."""
    metadata = given.over(metadata_of(folder))
    made = make_delta_of(folder, target, base, metadata, listener, repo_id=repo_id, verified=given.verified)
    return pack_delta(made.path), metadata.license


def _message(manifest: Manifest, *, delta: bool) -> str:
    """The commit's message."""
    operations = ", ".join(entry.op for entry in manifest.operations)
    return printable(f"surgeon: {operations}{' (delta)' if delta else ''}")


def _own_checks(folder: CheckpointFolder, manifest: Manifest, listener: Listener) -> tuple[Check, ...]:
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


def pushed_view(pushed: Pushed) -> RenderableType:
    """What went up (or would), how much of it is new, and the commit to pin."""
    table = Table(box=None, show_header=False, pad_edge=False)
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
        held = sum(check.holds for check in pushed.checks)
        summary = (
            f"{held} of {len(pushed.checks)} checks against its own {MANIFEST_FILE} hold (--base compares logits too)"
        )
        lines.append(Text(summary, style="green" if held == len(pushed.checks) else "bold red"))
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

    def stale_in(self, there: Repository) -> tuple[str, ...]:
        """Files of the repository that transformers would load instead of these, or beside them."""
        loaded = (name for name in there.files if name not in self.files and "/" not in name and _is_loaded(name))
        return tuple(sorted(loaded))


def pack(folder: CheckpointFolder, manifest: Manifest, text: bytes) -> Parcel:
    """An output's files by the allow-list: weights, config, manifest, side files, its code, and the card `text`."""
    listing = folder.source.listing()
    # The manifest names the code files, and anybody can write a manifest.
    code = [name for name in manifest.code if name in listing and "/" not in name and name.endswith(".py")]
    names = [CONFIG_FILE, *folder.shards, *folder.side_files, *code, MANIFEST_FILE]
    if SINGLE_FILE not in folder.shards:
        names.append(INDEX_FILE)
    if RECORD_FILE in listing:
        names.append(RECORD_FILE)
    files: dict[str, Path | bytes] = {name: folder.path / name for name in sorted(names)}
    files[CARD_FILE] = text
    sizes = {name: len(c) if isinstance(c, bytes) else c.stat().st_size for name, c in files.items()}
    left = {name for name in listing if name not in files and not name.endswith("/")}
    return Parcel(files, sizes, tuple(sorted(left | {n for n in folder.left_behind if n not in files})))


def pack_delta(folder: Path) -> Parcel:
    """A delta's files; surgeon has just written all of them."""
    files: dict[str, Path | bytes] = {
        path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()
    }
    return Parcel(files, {name: (folder / name).stat().st_size for name in files}, ())


@dataclass(frozen=True)
class Given:
    """What a push writes into the card: licence and base model where they were given, and lines about the checks."""

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


def card_for(folder: CheckpointFolder, manifest: Manifest, repo_id: str, given: Given) -> bytes:
    """The card to upload: with the repository's name and the checks, unless somebody edited the folder's card.

    An edited card is uploaded unchanged. Raises BadInput where a licence or base model is given for an edited card.
    """
    sizes = {name: info.numel for name, info in folder.tensors.items()}
    found: bytes | None = None
    if CARD_FILE in folder.source.listing():
        found = folder.source.small(CARD_FILE, max_bytes=MAX_CARD_BYTES)
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
    """Raise BadInput where a push would publish what should be private, or overwrite a model of another tool."""
    if to.private and there.exists and there.private is False:
        raise BadInput(
            f"{to.repo_id} exists and is public; --private is for new ones: make it private in its settings first"
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
    """Whether transformers may load a file of this name, at the top of a repository, as weights or code."""
    # With a delta's mark beside it, surgeon would not open the checkpoint.
    return name in (INDEX_FILE, DELTA_FILE, CODE_FILE) or name.endswith(".safetensors")
