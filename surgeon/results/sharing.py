"""What `push` gives back."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from surgeon.results.proving import Verification

if TYPE_CHECKING:
    from surgeon.verification.static import Check


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
        return {
            "path": str(self.path),
            "repo_id": self.repo_id,
            "revision": self.revision,
            "dry_run": self.dry_run,
            "files": [{"name": file.name, "bytes": file.nbytes, "state": file.state} for file in self.files],
            "stale": list(self.stale),
            "left_behind": list(self.left_behind),
            "checks": [asdict(check) for check in self.checks],
            "verification": self.verification.to_json() if self.verification else None,
            "license": self.license,
            "commit": self.commit,
            "url": self.url,
            "pull_request": self.pull_request,
            "delta": self.delta,
        }
