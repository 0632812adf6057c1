"""The Hub as a source of checkpoints: snapshots through the client's cache, or only headers without any weights.

`huggingface_hub` is imported only when first used. It follows the client's environment variables (HF_ENDPOINT, HF_HOME,
HF_TOKEN, HF_HUB_OFFLINE, HF_HUB_DISABLE_PROGRESS_BARS). In offline mode no socket is opened.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surgeon.checkpoint.folder import (
    CARD_FILE,
    CONFIG_FILE,
    DELTA_FILE,
    MANIFEST_FILE,
    MAX_CARD_BYTES,
    CheckpointFolder,
)
from surgeon.checkpoint.header import Header, header_length, parse_header
from surgeon.checkpoint.hub_calls import (
    TIMEOUT,
    bars_on_terminals_only,
    call_hub,
    check_id,
    is_commit,
    offline,
)
from surgeon.checkpoint.peft_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS, check_adapter_files
from surgeon.checkpoint.source import MAX_SIDE_FILE_BYTES, LocalSource, is_side_file, read_capped
from surgeon.checkpoint.weights import INDEX_FILE, choose_weights
from surgeon.common.places import meant
from surgeon.errors import BadInput, printable, said_of
from surgeon.grafts.bundle import CODE_FILE

_SMALL = (CONFIG_FILE, INDEX_FILE, MANIFEST_FILE)
_HEADERS_AT_ONCE = 8


@dataclass(frozen=True)
class Located:
    """The place of a base: a local folder and, if it came from the Hub, its repository and commit."""

    path: Path
    repo_id: str | None = None
    revision: str | None = None


def id_and_revision(name: str, revision: str | None = None) -> tuple[str, str | None]:
    """Split `user/name[@revision]` into Hub id and revision. Raises BadInput for an invalid id, or two revisions."""
    repo_id, at, named = meant(name).partition("@")
    check_id(repo_id if at and named else name)
    if at and revision is not None:
        raise BadInput(f"{printable(name)}: names a revision, and `--revision` another; leave one of them out")
    return repo_id, named or revision


def locate(base: str, *, revision: str | None, code: bool = False, download: bool = True) -> Located:
    """Find a base: a local path, or `user/name[@revision]` on the Hub, downloaded into the cache where necessary.

    The download contains config, index, manifest, allow-listed side files and exactly the shards that hold the weights.
    It never contains a pickle, and contains Python files only with `code`. Offline or without `download`, only the
    cache is searched. Raises BadInput where the base is not found or gated, the revision is unknown, or the base is
    neither cached nor reachable.
    """
    base = meant(base)
    if Path(base).exists():
        if revision is not None:
            raise BadInput(f"{printable(base)}: a local folder has no revision; leave `--revision` out")
        return Located(Path(base))
    repo_id, revision = id_and_revision(base, revision)
    if offline() or not download:
        return _cached(repo_id, revision)
    repository = _Repository.ask(repo_id, revision)
    names = [name for name, size in repository.files.items() if _comes_along(name, size, code=code)]
    return _downloaded(repository, revision, [*names, *choose_weights(repository).files])


def locate_adapter(adapter: str) -> Located:
    """Find a PEFT adapter on the Hub (`user/name[@revision]`); download its config and weights into the cache.

    Raises BadInput in the same cases as `locate`. A pickle is never downloaded.
    """
    repo_id, revision = id_and_revision(adapter)
    if offline():
        return _snapshot(repo_id, revision, [ADAPTER_CONFIG, ADAPTER_WEIGHTS], offline=True)
    repository = _Repository.ask(repo_id, revision)
    files = repository.files
    check_adapter_files(files, repository.shown, files)
    beside = [name for name, size in files.items() if is_side_file(name) and size <= MAX_SIDE_FILE_BYTES]
    return _downloaded(repository, revision, [ADAPTER_CONFIG, ADAPTER_WEIGHTS, *beside])


def locate_delta(delta: str) -> Located:
    """Find a delta: a local path, or `user/name` or `user/name@revision` on the Hub, downloaded into the cache.

    Raises BadInput in the same cases as `locate`. Only tensors and files that a delta may contain are downloaded.
    """
    delta = meant(delta)
    if Path(delta).exists():
        return Located(Path(delta))
    repo_id, revision = id_and_revision(delta)
    if offline():
        return _snapshot(repo_id, revision, [DELTA_FILE], offline=True)
    repository = _Repository.ask(repo_id, revision)
    if DELTA_FILE not in repository.files:
        raise BadInput(f"{repository.shown}: no {DELTA_FILE} there, so this is not a delta; check the name")
    names = [
        name
        for name, size in repository.files.items()
        if _comes_along(name, size, code=True) or ("/" not in name and name.endswith((".safetensors", ".md", ".json")))
    ]
    return _downloaded(repository, revision, names)


def remote_folder(repo_id: str, revision: str | None, *, trust_remote_code: bool = False) -> CheckpointFolder:
    """Open a checkpoint on the Hub (`user/name[@revision]`) without downloading weights.

    Headers are read by range requests. Everything except the weights is read and checked as in `CheckpointFolder.open`;
    reading a tensor raises BadInput. In offline mode the cached checkpoint is opened. Raises BadInput in the same cases
    as `locate` and `CheckpointFolder.open`.
    """
    repo_id, revision = id_and_revision(repo_id, revision)
    if offline():
        return CheckpointFolder.open(_cached(repo_id, revision).path, trust_remote_code=trust_remote_code)
    repository = _Repository.ask(repo_id, revision)
    with said_of(repository.shown):
        return CheckpointFolder.assemble(repository, path=Path(repo_id), trust_remote_code=trust_remote_code)


def open_headers(base: str | Path, *, revision: str | None, trust_remote_code: bool) -> CheckpointFolder:
    """Open a base, given as a folder or a Hub id, for callers that read no weights.

    Raises BadInput as `CheckpointFolder.open` and `remote_folder` do.
    """
    base = meant(str(base))
    if Path(base).exists():
        return CheckpointFolder.open(Path(base), trust_remote_code=trust_remote_code)
    return remote_folder(base, revision, trust_remote_code=trust_remote_code)


@dataclass(frozen=True)
class _Repository:
    """One commit of a Hub repository, as a source of headers and small files.

    `files` maps file names to sizes in bytes.
    """

    repo_id: str
    commit: str
    files: dict[str, int]

    @classmethod
    def ask(cls, repo_id: str, revision: str | None) -> _Repository:
        """Ask the Hub for the files of a revision and its commit. Raises BadInput where the call fails."""
        from huggingface_hub import HfApi

        info = call_hub(
            lambda: HfApi().model_info(repo_id, revision=revision, files_metadata=True, timeout=TIMEOUT),
            repo_id,
            revision,
        )
        files = {entry.rfilename: entry.size or 0 for entry in info.siblings or []}
        return cls(repo_id, _commit_of(info, repo_id), dict(sorted(files.items())))

    @property
    def shown(self) -> str:
        """The repository's name in error messages."""
        return printable(self.repo_id)

    @property
    def at_hand(self) -> bool:
        """Whether small files can be read without a download: always false."""
        return False

    def listing(self) -> dict[str, int]:
        """Return the top-level files and chat templates with their sizes; of other folders, only the names."""
        found: dict[str, int] = {}
        for name, size in self.files.items():
            folder, slash, _ = name.partition("/")
            if slash:
                found[f"{folder}/"] = 0
            if not slash or is_side_file(name):
                found[name] = size
        return dict(sorted(found.items()))

    def tree(self) -> Iterator[str]:
        """Return an iterator over the names of all files of the repository."""
        return iter(self.files)

    def small(self, name: str, *, max_bytes: int) -> bytes:
        """Return a small file's content, through the cache. Raises BadInput where it is too large."""
        from huggingface_hub import hf_hub_download

        if self.files.get(name, 0) > max_bytes:
            raise BadInput(
                f"{self.shown}: {printable(name)} has {self.files[name]:,} bytes, at most {max_bytes:,} are read; is it"
                " the right repository?"
            )
        with bars_on_terminals_only():
            path = call_hub(
                lambda: hf_hub_download(self.repo_id, name, revision=self.commit),
                self.repo_id,
                self.commit,
            )
        folder = Path(path)
        for _ in name.split("/"):
            folder = folder.parent
        return read_capped(folder, name, max_bytes=max_bytes)

    def check_small(self, name: str) -> None:
        """Do nothing: every file on the Hub is a regular file."""

    def headers(self, files: list[str]) -> dict[str, Header]:
        """Return each shard's header by two requests: first the bytes with its length, then the whole header.

        Raises BadInput where a request fails or a header is damaged.
        """
        with ThreadPoolExecutor(_HEADERS_AT_ONCE, thread_name_prefix="headers") as pool:
            return dict(zip(files, pool.map(self._header, files), strict=True))

    def _header(self, file: str) -> Header:
        """Request and parse one shard's header. Raises BadInput where a request fails or the header is damaged."""
        size = self.files[file]
        length = header_length(self._prefix(file, 64), file=file, file_size=size)
        return parse_header(self._prefix(file, 8 + length), file=file, file_size=size)

    def _prefix(self, file: str, count: int) -> bytes:
        """Return the first `count` bytes of a file, by a range request. Raises BadInput where it fails."""
        from huggingface_hub import constants, hf_hub_url
        from huggingface_hub.utils import (  # type: ignore[attr-defined]
            build_hf_headers,
            hf_raise_for_status,
            http_stream_backoff,
        )

        headers = build_hf_headers() | {"Range": f"bytes=0-{count - 1}", "Accept-Encoding": "identity"}
        url = hf_hub_url(self.repo_id, file, revision=self.commit)

        def ask() -> bytes:
            """Request the bytes, and again after an error that may be temporary."""
            content = b""
            timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
            with http_stream_backoff("GET", url, headers=headers, timeout=timeout) as response:
                hf_raise_for_status(response)
                # A server that ignores ranges sends everything: close the connection when there is enough.
                for piece in response.iter_bytes():
                    content += piece
                    if len(content) >= count:
                        break
            return content[:count]

        return call_hub(ask, self.repo_id, self.commit)

    def open_shard(self, file: str) -> int:
        """Raise BadInput: the weights were not downloaded."""
        raise BadInput(
            f"{self.shown}: the weights ({printable(file)}) were not downloaded, only their headers;"
            " give a local folder"
        )

    def identity(self) -> list[dict[str, Any]]:
        """Return the repository and its commit."""
        return [{"repo_id": self.repo_id, "commit": self.commit}]

    def check_unchanged(self) -> None:
        """Do nothing: a commit does not change."""


def dataset_commit(repo_id: str, revision: str | None) -> str:
    """Return the commit hash of a dataset's revision (branch, tag or commit) on the Hub.

    Raises BadInput as `locate` does.
    """
    from huggingface_hub import HfApi

    shown = f"datasets/{repo_id}"
    info = call_hub(lambda: HfApi().dataset_info(repo_id, revision=revision, timeout=TIMEOUT), shown, revision)
    return _commit_of(info, shown)


def _commit_of(info: Any, repo_id: str) -> str:
    """Return the full commit hash in the Hub's answer. Raises BadInput where there is none."""
    if info.sha is None or not is_commit(info.sha):
        raise BadInput(f"{printable(repo_id)}: the Hub names no commit; try again")
    return str(info.sha)


def _comes_along(name: str, size: int, *, code: bool) -> bool:
    """Return whether a file next to the weights is downloaded with them."""
    if is_side_file(name):
        return size <= MAX_SIDE_FILE_BYTES
    # The output's card repeats the licence and languages in the base's card.
    if name == CARD_FILE:
        return size <= MAX_CARD_BYTES
    return name in (*_SMALL, CODE_FILE) or (code and name.endswith(".py") and "/" not in name)


def _cached(repo_id: str, revision: str | None) -> Located:
    """Return the snapshot in the cache, without network access. Raises BadInput where a part of it is missing."""
    found = _snapshot(repo_id, revision, [CONFIG_FILE], offline=True)
    choose_weights(LocalSource(found.path), shown=printable(repo_id))
    return found


def _downloaded(repository: _Repository, revision: str | None, names: list[str]) -> Located:
    """Download files of a repository, all at the commit that was listed.

    The client receives the revision's name, so that its cache records which commit this revision was. Raises BadInput
    where the revision moved to another commit meanwhile.
    """
    found = _snapshot(repository.repo_id, revision, names)
    if found.revision != repository.commit:
        raise BadInput(
            f"{repository.shown}: {printable(revision or 'main')!r} moved to another commit while it was read; run the"
            " same command again, or name a commit"
        )
    return found


def _snapshot(repo_id: str, revision: str | None, names: list[str], *, offline: bool = False) -> Located:
    """Download these files of a repository into the cache (`offline`: only look them up); return where they are.

    Raises BadInput where the call fails.
    """
    from huggingface_hub import snapshot_download

    with bars_on_terminals_only():
        found = call_hub(
            lambda: snapshot_download(
                repo_id,
                revision=revision,
                local_files_only=offline,
                allow_patterns=[glob.escape(name) for name in names],
            ),
            repo_id,
            revision,
        )
    path = Path(found)
    return Located(path, repo_id, path.name)
