"""Calls to the Hub's client: ids, time limits, and the conversion of every error to one line."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Never, TypeVar

from surgeon.errors import BadInput, printable

_T = TypeVar("_T")
REPO_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
# Request timeout in seconds: how long the client waits for the next bytes.
TIMEOUT = 20.0
# The time limit of a call in seconds, and the number of bytes for which one more second is allowed.
PATIENCE, SLOWEST = 60.0, 32_000


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


def seconds_for(nbytes: int) -> float:
    """Return the time limit in seconds for a transfer of `nbytes` bytes, also over a slow connection."""
    return PATIENCE + nbytes / SLOWEST


def in_time(ask: Callable[[], _T], repo_id: str, within: float) -> _T:
    """Return the result of `ask` if it arrives within `within` seconds; else raise BadInput.

    Errors of `ask` are passed on. The client's own timeouts apply to each read: a server that sends a byte now and then
    never exceeds them.
    """
    found: list[_T] = []
    raised: list[BaseException] = []

    def answer() -> None:
        """Call `ask`, and store its result in `found` or its error in `raised`."""
        try:
            found.append(ask())
        except BaseException as error:
            raised.append(error)

    # A daemon thread: when it is late, it is abandoned, and the program does not wait for it at exit.
    asking = threading.Thread(target=answer, daemon=True, name="hub")
    asking.start()
    asking.join(within)
    if raised:
        raise raised[0]
    if not found:
        raise BadInput(
            f"{printable(repo_id)}: the Hub has not answered in full within {within:.0f} s; check the network and"
            " HF_ENDPOINT, then run the same command again"
        )
    return found[0]


def call_hub(ask: Callable[[], _T], repo_id: str, revision: str | None, *, within: float | None = None) -> _T:
    """Return the result of the call `ask` to the client; turn every error into a BadInput of one line.

    With `within`, a call that takes longer than that many seconds raises BadInput too.
    """
    try:
        return ask() if within is None else in_time(ask, repo_id, within)
    except Exception as error:
        refuse_call(error, repo_id, revision)


def is_transient(error: Exception) -> bool:
    """Return whether a retry may help: after a broken connection, a server error or too many requests."""
    from huggingface_hub import errors

    if isinstance(error, errors.HfHubHTTPError):
        return error.response.status_code >= 500 or error.response.status_code == 429
    return not isinstance(error, BadInput | MemoryError | errors.OfflineModeIsEnabled)


def refuse_call(error: Exception, repo_id: str, revision: str | None) -> Never:
    """Raise BadInput with one line and advice for an error of the client or of a library that it uses.

    A BadInput or MemoryError is raised again unchanged.
    """
    from huggingface_hub import constants, errors

    if isinstance(error, BadInput | MemoryError):
        raise error

    shown = printable(repo_id)
    if isinstance(error, errors.GatedRepoError):
        problem = (
            f"gated: accept its conditions at {constants.ENDPOINT}/{shown}, then log in (`hf auth login`, or a token in"
            " HF_TOKEN)"
        )
    elif isinstance(error, errors.RevisionNotFoundError):
        named_by = "`revision:`" if repo_id.startswith("datasets/") else "`--revision`"
        problem = f"has no revision {printable(revision or 'main')!r}; check {named_by}"
    elif isinstance(error, errors.RepositoryNotFoundError):
        problem = (
            "no such folder here and no such repository on the Hub, or a private one; check the name, or log in"
            " (`hf auth login`, or a token in HF_TOKEN)"
        )
    elif isinstance(error, errors.HfHubHTTPError):
        problem = _status(error.response.status_code)
    elif constants.HF_HUB_OFFLINE or isinstance(error, errors.OfflineModeIsEnabled):
        problem = (
            "offline (HF_HUB_OFFLINE), and the cache does not hold all of it; run once online, or give a local folder"
        )
    elif isinstance(error, PermissionError):
        problem = f"the Hub's cache cannot be written ({first_line(error)}); set HF_HOME to a folder of yours"
    else:
        problem = f"the Hub cannot be reached ({first_line(error)}); check the network, then run the same command again"
    raise BadInput(f"{shown}: {problem}") from error


def _status(code: int) -> str:
    """Return a description of an HTTP error code of the Hub, with advice."""
    if code in (401, 403):
        return (
            f"access refused by the Hub ({code}); log in with a token that may read it (`hf auth login`, or HF_TOKEN)"
        )
    if code == 404:
        return "a file that the listing names is not there (404); try again"
    if code == 429:
        return "the Hub answers too many requests (429); wait some minutes, or log in for a higher limit"
    return f"the Hub answers {code}; try again later"


def first_line(error: BaseException) -> str:
    """Return the type and first line of the error's root cause."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return printable(f"{type(cause).__name__}: {lines[0]}" if lines else type(cause).__name__)
