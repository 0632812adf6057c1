"""`surgeon push`: publish an output on the Hub, as one commit, after it was verified."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from surgeon.anatomy.dissect import dissect_folder
from surgeon.checkpoint.card_metadata import NOTHING_KNOWN, Metadata, check_license, read_metadata
from surgeon.checkpoint.folder import CARD_FILE, CONFIG_FILE, MAX_CARD_BYTES, RECORD_FILE, CheckpointFolder
from surgeon.checkpoint.hub import locate
from surgeon.checkpoint.hub_calls import is_commit, is_repo_id
from surgeon.checkpoint.open_files import HeldFolder
from surgeon.checkpoint.source import MAX_SIDE_FILE_BYTES, is_side_file
from surgeon.checkpoint.uploading import Destination, Repository, check_token, look, send
from surgeon.checkpoint.weights import INDEX_FILE, SINGLE_FILE
from surgeon.common.check import Check
from surgeon.common.formatting import listed, size
from surgeon.common.json_results import plain_fields
from surgeon.common.listener import Listener, Quiet
from surgeon.common.tables import FittedTable
from surgeon.errors import BadInput, printable
from surgeon.manifest.card import HUB_ID, card
from surgeon.manifest.manifest import MANIFEST_FILE, Manifest
from surgeon.manifest.reading import manifest_of
from surgeon.share.parcel import Upload, pack
from surgeon.verification.claims import check_beside
from surgeon.verification.own_manifest import check_own_manifest
from surgeon.verification.verification import Verification, verdict
from surgeon.verification.verify import verify


@dataclass(frozen=True)
class Pushed:
    """A push, or with `dry_run` a preview of it.

    `revision` is the requested branch, None for main. `stale` are files removed from the repository because they would
    be loaded together with the new ones. `left_behind` are files of the folder that are not uploaded. `checks` were
    made before, against the output's own manifest (`verification` None; `no_base` states why) or against its base.
    `commit` is the hash to pin: the repository's existing commit where nothing had to be sent, None in a dry run.
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
    no_base: str | None = None

    def __repr__(self) -> str:
        verb = "would send" if self.dry_run else "sent"
        where = f"{self.repo_id!r}, commit {self.commit}" if self.commit else repr(self.repo_id)
        return f"Pushed({where}, {verb} {len(self.sent)} of {len(self.files)} files)"

    @property
    def sent(self) -> tuple[Upload, ...]:
        """The files that the repository lacked or had with other content."""
        return tuple(file for file in self.files if file.state != "there")

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `--json`.

        Keys:
            `path`, `repo_id`: the output, and the repository
            `revision`: the branch (null: main)
            `url`, `pull_request`: the addresses of the commit and of the pull request (null: none)
            `dry_run`: true if nothing was sent
            `files`: each with `name`, `bytes`, `state`: `new`, `changed`, or `there` (not sent again)
            `stale`: files removed from the repository
            `left_behind`: files of the folder that were not sent
            `checks`: checks by the output's own manifest, or against its base, each with `name`, `holds`, `detail`,
                `note`
            `verification`: the keys of `verify` against its base (null: the base was not found)
            `no_base`: why the base was not found (null: it was found)
            `license`: the card's licence
            `commit`: the hash to pin (null: a dry run)
        """
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
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> Pushed:
    """Publish an output in a repository of the Hub, as one commit, with a card that reports what was done and checked.

    Before that, the output is checked as in `verify`, logits included, against its base where that is available; else
    against its own manifest, and `no_base` states why. Regular files are sent by an allow-list, and stay open from
    before the checks; a link is refused. Files that the repository already has are not sent again. The token is
    huggingface_hub's.

    Args:
        out: the output's folder
        repo_id: the repository, `user/name`
        base: the folder to check against; without it, the base that the manifest names, from the cache or the Hub
        public: whether a new repository is public; False refuses a repository that is public already
        revision: the branch, created if missing (or `refs/pr/N`); None: main
        pull_request: open a pull request instead of a commit
        dry_run: send nothing, make nothing, download nothing
        force: push even if a check fails, or over a model of another tool
        license: the card's licence, where the base's is unknown
        base_model: the base's Hub id in the card
        trust_remote_code: run the output's own code
        listener: gets progress and notes

    Returns:
        the commit, and every file with whether it was sent

    Raises:
        BadInput: also for every error of the Hub or the network; the repository is then unchanged, and the same call
            continues where it stopped
    """
    to = Destination(repo_id, revision, public, pull_request)
    check_names(license, base_model)
    listener = listener or Quiet()
    if not dry_run:
        check_token(to)
    # Every file stays open from the first step to the last.
    with HeldFolder(Path(out)) as held:
        folder = hold_output(held, trust_remote_code=trust_remote_code)
        for note in folder.notes:
            listener.say(note)
        manifest = manifest_of(folder)
        before = look(to)
        check_repository(to, before, force=force)
        found, no_base = find_base(manifest, base, listener, download=not dry_run)
        if found is None:
            checked = _Checked(_own_checks(folder, manifest, listener), None, no_base)
        else:
            encoder = dissect_folder(folder).family.encoder
            # Verifying against a base that the user did not name should not need memory for two models.
            streamed = base is None and not encoder
            proof = verify(found, out, streamed=streamed, trust_remote_code=trust_remote_code, listener=listener)
            checked = _Checked(tuple(proof.checks), proof, None)
        if not force:
            checked.check_kept(folder)
        text = card_for(folder, manifest, held, repo_id, Given(license, base_model, tuple(checked.words())))
        parcel, known = pack(folder, held, text), read_metadata(text).license
        if known is None:
            listener.say("no licence known, so the card says unknown; --license apache-2.0, say, puts one in")
        listener.say(f"comparing with what {repo_id} holds")
        missing, stale = parcel.missing_in(before), parcel.stale_in(before)
        held.check_unchanged()
        commit = None
        if (missing or stale) and not dry_run:
            listener.say(f"uploading {len(missing)} of {len(parcel.files)} files to {repo_id}")
            done = ", ".join(entry.op for entry in manifest.operations) or "training"
            commit = send(
                to,
                before,
                {name: parcel.files[name] for name in missing},
                stale,
                message=printable(f"surgeon: {done}"),
                check_unchanged=held.check_unchanged,
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
        no_base=checked.no_base,
    )


def hold_output(held: HeldFolder, *, trust_remote_code: bool) -> CheckpointFolder:
    """Open the output in `held`, and hold open every file of it that may be sent. Raises BadInput, also for a link."""
    folder = CheckpointFolder.open(held.path, trust_remote_code=trust_remote_code)
    manifest, listing = manifest_of(folder), folder.source.listing()
    # The manifest names the code files, and anybody can write a manifest.
    code = [name for name in manifest.code if name in listing and "/" not in name and name.endswith(".py")]
    side = [name for name, nbytes in listing.items() if is_side_file(name) and nbytes <= MAX_SIDE_FILE_BYTES]
    names = [CONFIG_FILE, *folder.shards, *side, *code, MANIFEST_FILE]
    if SINGLE_FILE not in folder.shards:
        names.append(INDEX_FILE)
    names += [name for name in (RECORD_FILE, CARD_FILE) if name in listing]
    for name in sorted(names):
        held.hold(name)
    # Open again, so that everything that is checked was read while the files were held open.
    return CheckpointFolder.open(held.path, trust_remote_code=trust_remote_code)


def find_base(
    manifest: Manifest, base: str | Path | None, listener: Listener, *, download: bool
) -> tuple[Path | None, str | None]:
    """Return (folder, None) for the base to check against, or (None, reason) where it is not available.

    The base is the given one, else the manifest's at its commit, from the cache or, with `download`, the Hub.
    """
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
    """The checks before a push: against the base (`verification`), else against the manifest (`no_base` states why)."""

    checks: tuple[Check, ...]
    verification: Verification | None
    no_base: str | None

    def check_kept(self, folder: CheckpointFolder) -> None:
        """Raise BadInput, which names the first broken promise, where a promise of the output does not hold."""
        broken = next((f"{check.name}: {check.detail}" for check in self.checks if not check.holds), None)
        if broken is None and self.verification is not None and not self.verification.holds:
            broken = "its logits differ"
        if broken is not None:
            raise BadInput(
                f"{printable(str(folder.path))}: not pushed, as a promise does not hold ({broken}); --force pushes it"
                " all the same"
            )

    def words(self) -> list[str]:
        """Return a line for each check, for the card."""
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


def _own_checks(folder: CheckpointFolder, manifest: Manifest, listener: Listener) -> tuple[Check, ...]:
    """Check the output against its own manifest, all tensors read once; return the checks."""
    listener.begin("checking", sum(info.nbytes for info in folder.tensors.values()))
    anatomy = dissect_folder(folder)
    return (check_beside(folder), *check_own_manifest(manifest, folder, anatomy, advance=listener.advance))


def pushed_view(pushed: Pushed) -> RenderableType:
    """Return a table of the uploaded files, the amount that is new, and the commit to pin."""
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
        lines.append(Text(f'load it: from_pretrained("{pushed.repo_id}", revision="{pushed.commit}")'))
    return Group(*lines)


@dataclass(frozen=True)
class Given:
    """The user's part of the card: licence and base model, where given, and lines about the checks."""

    license: str | None
    base_model: str | None
    verified: tuple[str, ...]

    def over(self, metadata: Metadata) -> Metadata:
        """Return the metadata of the base's card with the given values inserted."""
        if self.license is not None:
            metadata = dataclasses.replace(metadata, license=self.license, license_name=None, license_link=None)
        if self.base_model is not None:
            metadata = dataclasses.replace(metadata, base_model=self.base_model)
        return metadata


def card_for(folder: CheckpointFolder, manifest: Manifest, held: HeldFolder, repo_id: str, given: Given) -> bytes:
    """Return the card to upload: with the repository's name and the checks, unless somebody edited the folder's card.

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
    """Raise BadInput for a licence or model name that is invalid on the Hub."""
    if license is not None:
        check_license(license)
    if base_model is not None and not HUB_ID.fullmatch(base_model):
        raise BadInput(f"--base-model {printable(base_model)}: not a model of the Hub; give `user/name`")


def check_repository(to: Destination, there: Repository, *, force: bool) -> None:
    """Raise BadInput where the repository has the wrong visibility, or a push would overwrite a model of another tool.

    A pull request needs an existing repository.
    """
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
