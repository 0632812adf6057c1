"""`surgeon push`: put an output on the Hub, as one commit, once it verifies."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from surgeon.checkpoint.card_metadata import metadata_of, read_metadata
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.uploading import Destination, check_token, look, send
from surgeon.common.formatting import listed, size
from surgeon.common.listener import Listener, Quiet
from surgeon.common.plain import plain_fields
from surgeon.errors import BadInput, printable
from surgeon.families.anatomy import dissect
from surgeon.manifest.manifest import MANIFEST_FILE, Manifest, manifest_of
from surgeon.rework.make_delta import make_delta_of
from surgeon.share.parcel import Given, Parcel, card_for, check_names, check_way, pack, pack_delta
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
        told = "would send" if self.dry_run else "sent"
        where = f"{self.repo_id!r}, commit {self.commit}" if self.commit else repr(self.repo_id)
        return f"Pushed({where}, {told} {len(self.sent)} of {len(self.files)} files)"

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
    check_way(to, before, force=force)
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
        told = (
            f"{held} of {len(pushed.checks)} checks against its own {MANIFEST_FILE} hold (--base compares logits too)"
        )
        lines.append(Text(told, style="green" if held == len(pushed.checks) else "bold red"))
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
            lines.append(Text(f"put it back: surgeon apply --delta {pushed.repo_id}@{pushed.commit} BASE OUT"))
        else:
            lines.append(Text(f'load it: from_pretrained("{pushed.repo_id}", revision="{pushed.commit}")'))
    return Group(*lines)
