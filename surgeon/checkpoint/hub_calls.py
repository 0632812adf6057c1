"""Calls to the Hub's client: ids, and the conversion of every error to one line."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, Never, TypeVar

from surgeon.errors import BadInput, printable

_T = TypeVar("_T")
REPO_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
# Request timeout in seconds: how long the client waits for the next bytes.
TIMEOUT = 20.0
_LOG_IN = "log in with a token that may do that (`hf auth login`, or a token in HF_TOKEN)"
# Advice for HTTP codes; other codes are of the Hub's own trouble.
_ADVICE = {
    401: _LOG_IN,
    403: _LOG_IN,
    404: "check the name, and what the token may see",
    409: "it changed meanwhile: look at it, then run the same command again",
    412: "it changed meanwhile: look at it, then run the same command again",
}


def is_commit(revision: str) -> bool:
    """Return whether a revision is a full commit hash, which never moves."""
    return _COMMIT.fullmatch(revision) is not None


def is_repo_id(name: str) -> bool:
    """Return whether this is a valid repository name on the Hub."""
    return REPO_ID.fullmatch(name) is not None and ".." not in name and "--" not in name


def check_id(base: str) -> None:
    """Raise BadInput where the name is no valid Hub id."""
    if not is_repo_id(base):
        raise BadInput(
            f"{printable(base)}: no such folder, and not a Hub id either (`user/name`); check the path, or the id"
        )


def offline() -> bool:
    """Return whether the client's environment forbids network access."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


@contextlib.contextmanager
def bars_on_terminals_only() -> Iterator[None]:
    """Show the client's progress bars only on a terminal."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if sys.stderr.isatty() or are_progress_bars_disabled() or "HF_HUB_DISABLE_PROGRESS_BARS" in os.environ:
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def call_hub(ask: Callable[[], _T], repo_id: str, revision: str | None = None, *, doing: str = "read it") -> _T:
    """Return the result of the call `ask` to the client; every error becomes a BadInput of one line.

    `doing` names the attempt in the error.
    """
    try:
        return ask()
    except Exception as error:
        refuse_call(error, repo_id, revision, doing=doing)


def refuse_call(error: Exception, repo_id: str, revision: str | None = None, *, doing: str = "read it") -> Never:
    """Raise BadInput with one line and advice for an error of the client or of a library that it uses.

    A BadInput or MemoryError is raised again unchanged.
    """
    from huggingface_hub import constants, errors

    if isinstance(error, BadInput | MemoryError):
        raise error
    shown = printable(repo_id)
    answer: BaseException | None = error
    while answer is not None and not isinstance(answer, errors.HfHubHTTPError):
        answer = answer.__cause__ or answer.__context__
    if answer is not None:
        problem = _answer(answer, shown, revision, doing)
    elif constants.HF_HUB_OFFLINE or isinstance(error, errors.OfflineModeIsEnabled):
        problem = (
            "offline (HF_HUB_OFFLINE), and the cache does not hold all of it; run once online, or give a local folder"
        )
    elif isinstance(error, PermissionError):
        problem = f"the Hub's cache cannot be written ({root_cause(error)}); set HF_HOME to a folder of yours"
    else:
        problem = (
            f"the Hub cannot be reached, or does not {doing} ({root_cause(error)}); check the network, then run the"
            " same command again"
        )
    raise BadInput(f"{shown}: {problem}") from error


def _answer(error: Any, shown: str, revision: str | None, doing: str) -> str:
    """Return a description of an HTTP error of the Hub, with advice."""
    from huggingface_hub import constants, errors

    said = printable(" ".join((error.server_message or "").split()))
    detail = f" ({said})" if said else ""
    if isinstance(error, errors.GatedRepoError):
        return f"gated: accept its conditions at {constants.ENDPOINT}/{shown}, then {_LOG_IN}"
    if isinstance(error, errors.RevisionNotFoundError):
        named_by = "`revision:`" if shown.startswith("datasets/") else "`--revision`"
        return f"has no revision {printable(revision or 'main')!r}; check {named_by}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"no such folder here and no such repository on the Hub, or a private one; check the name, or {_LOG_IN}"
    code = error.response.status_code
    advice = _ADVICE.get(code, "wait some minutes, then run the same command again")
    return f"the Hub refuses to {doing} ({code}){detail}; {advice}"


def root_cause(error: BaseException) -> str:
    """Return the type and text of the error's root cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    return printable(f"{type(error).__name__}: {' '.join(str(error).split())}", 300)
