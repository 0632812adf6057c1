"""The Hub as a destination: which files a repository holds, which of a folder's are new, and one commit for these.

Uploads use huggingface_hub's own commit (Xet, else LFS). Blobs that arrived stay on the Hub, so a rerun after a failure
sends only the missing blobs. The files of a push appear together or not at all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surgeon.checkpoint.hub_calls import (
    TIMEOUT,
    bars_on_terminals_only,
    call_hub,
    is_commit,
    is_repo_id,
    offline,
    refuse_call,
)
from surgeon.errors import BadInput, printable

# Request timeout in seconds while a commit is made: the Hub checks every file of it.
_SILENCE = 120.0


@dataclass(frozen=True)
class RemoteFile:
    """One file of a repository: its size in bytes, its sha256 if it is large, its git object id if it is small."""

    size: int
    sha256: str | None
    blob: str | None


@dataclass(frozen=True)
class Repository:
    """A repository at the chosen branch, as it was before a push.

    Where `exists` is false, the push creates it first. Where `branches_off` is true, the push creates the branch from
    main, and `commit` and `files` are main's.
    """

    repo_id: str
    exists: bool
    commit: str | None
    private: bool | None
    files: Mapping[str, RemoteFile]
    branches_off: bool = False

    def holds(self, name: str, content: Path | bytes) -> bool:
        """Return whether the repository already has this file, byte for byte.

        A local file is read only where the sizes agree. `create_commit` also skips unchanged files, but it does not
        report them, it reads every file, and it sends a request that a dry run must not make. A dry run shows the same
        list.
        """
        there = self.files.get(name)
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        if there is None or there.size != size:
            return False
        if there.sha256 is not None:
            return _digest("sha256", content) == there.sha256
        return there.blob is not None and _digest("sha1", content, b"blob %d\0" % size) == there.blob


@dataclass(frozen=True)
class Destination:
    """The target of a push: a repository, a branch of it (None: main), or a new pull request.

    `public` states whether a new repository is public (None: no). Raises BadInput for a name that is not `user/name`, a
    commit as the branch, or a pull request together with a branch.
    """

    repo_id: str
    branch: str | None = None
    public: bool | None = None
    pull_request: bool = False

    def __post_init__(self) -> None:
        """Raise BadInput for options that do not fit together, as the class describes."""
        if not is_repo_id(self.repo_id):
            raise BadInput(f"{printable(self.repo_id)}: not a repository of the Hub; give `user/name`")
        if self.branch is not None and is_commit(self.branch):
            raise BadInput(f"--revision {self.branch}: a commit cannot be changed; give a branch")
        if self.pull_request and self.branch not in (None, "main"):
            raise BadInput("--pr opens a pull request against main; leave `--revision` out")

    @property
    def shown(self) -> str:
        """The destination's name in error messages."""
        return f"{self.repo_id}@{printable(self.branch)}" if self.branch else self.repo_id


@dataclass(frozen=True)
class Commit:
    """The result of a push: the commit to pin, its address, and the pull request if one was opened."""

    commit: str
    url: str
    pull_request: str | None


def check_token(to: Destination) -> None:
    """Raise BadInput where there is no token, the Hub does not know the token, or the token cannot write.

    Other HTTP errors of this look-up are ignored. Raises BadInput too where the Hub cannot be reached.
    """
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.errors import HfHubHTTPError

    _refuse_offline(to)
    how = f"create a write token at {constants.ENDPOINT}/settings/tokens, then `hf auth login`, or set HF_TOKEN"
    if get_token() is None:
        raise BadInput(f"{to.shown}: pushing needs a token of the Hub; {how}")
    with _with_timeout():
        try:
            account = HfApi().whoami()
        except HfHubHTTPError as error:
            if error.response.status_code == 401:
                raise BadInput(f"{to.shown}: the Hub does not know the token (401), or it expired; {how}") from error
            # This request has a strict rate limit; the push itself will show what the token may do.
            return
        except Exception as error:
            refuse_call(error, to.shown, doing="look up the token's account")
    token = (account.get("auth") or {}).get("accessToken") or {}
    if token.get("role") == "read":
        raise BadInput(f"{to.shown}: the token can only read; {how}")


def look(to: Destination) -> Repository:
    """Return the current state of the destination's repository and branch.

    A missing repository, or a missing branch, is no error: the push creates it. Raises BadInput where the state cannot
    be read.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    def ask(revision: str | None) -> Any:
        """Ask the Hub for the repository's files and state at a revision."""
        return HfApi().model_info(to.repo_id, revision=revision, files_metadata=True, timeout=TIMEOUT)

    _refuse_offline(to)
    branches_off = False
    with _with_timeout():
        try:
            info = ask(to.branch)
        except RevisionNotFoundError as error:
            if to.branch is None or to.branch.startswith("refs/"):
                refuse_call(error, to.shown, to.branch)
            branches_off = True
            info = call_hub(lambda: ask(None), to.shown)
        except GatedRepoError as error:
            refuse_call(error, to.shown)
        except RepositoryNotFoundError:
            return Repository(to.repo_id, exists=False, commit=None, private=None, files={})
        except Exception as error:
            refuse_call(error, to.shown)
    files = {
        entry.rfilename: RemoteFile(
            size=entry.size or 0, sha256=entry.lfs.sha256 if entry.lfs else None, blob=entry.blob_id
        )
        for entry in info.siblings or []
    }
    return Repository(to.repo_id, True, info.sha, info.private, files, branches_off)


def send(
    to: Destination,
    before: Repository,
    files: Mapping[str, Path | bytes],
    stale: Sequence[str],
    *,
    message: str,
    check_unchanged: Callable[[], None],
) -> Commit:
    """Upload `files` and commit them, deleting the `stale` files; create the repository and branch where necessary.

    `check_unchanged` is called between upload and commit and raises where a local file changed after it was checked.
    Raises BadInput where the Hub refuses or cannot be reached; no commit is made then (a new repository or branch may
    exist already), and blobs that arrived are not sent again.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api = HfApi()
    with _with_timeout(), bars_on_terminals_only():
        if not before.exists:
            call_hub(
                # Fail if it exists after all: it may be public, which nobody has checked.
                lambda: api.create_repo(to.repo_id, private=not to.public, exist_ok=False),
                to.shown,
                doing="create the repository",
            )
        if to.branch is not None and (before.branches_off or not before.exists):
            branch = to.branch
            call_hub(
                lambda: api.create_branch(to.repo_id, branch=branch, exist_ok=True),
                to.shown,
                doing="create the branch",
            )
        added = [CommitOperationAdd(name, content) for name, content in files.items()]
        call_hub(
            lambda: api.preupload_lfs_files(
                to.repo_id, added, revision=to.branch, create_pr=to.pull_request, free_memory=False
            ),
            to.shown,
            to.branch,
            doing="write to the repository",
        )
        check_unchanged()
        operations: list[Any] = [*added, *(CommitOperationDelete(name) for name in stale)]
        made = call_hub(
            lambda: api.create_commit(
                to.repo_id,
                operations,
                commit_message=message,
                revision=to.branch,
                create_pr=to.pull_request,
                parent_commit=before.commit,
            ),
            to.shown,
            to.branch,
            doing="write to the repository",
        )
    return Commit(commit=made.oid, url=made.commit_url, pull_request=made.pr_url)


def _digest(algorithm: str, content: Path | bytes, prefix: bytes = b"") -> str:
    """Return the hex digest of `prefix` followed by the content of bytes or of a file."""
    digest = hashlib.new(algorithm, prefix, usedforsecurity=False)
    if isinstance(content, bytes):
        digest.update(content)
        return digest.hexdigest()
    with content.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


@contextmanager
def _with_timeout() -> Iterator[None]:
    """Set a request timeout, which the client lacks, until the block ends."""
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils._http import default_client_factory

    def factory() -> Any:
        """Return the client's default HTTP client with the timeouts set, in seconds."""
        client = default_client_factory()
        client.timeout = type(client.timeout)(_SILENCE, connect=TIMEOUT)
        return client

    set_client_factory(factory)
    try:
        yield
    finally:
        set_client_factory(default_client_factory)


def _refuse_offline(to: Destination) -> None:
    """Raise BadInput where the client's environment forbids network access."""
    if offline():
        raise BadInput(f"{to.shown}: offline (HF_HUB_OFFLINE); pushing needs the network")
