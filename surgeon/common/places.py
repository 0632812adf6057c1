"""Resolution of paths that a user gives: home, variables, a page of the Hub, a folder of the Hub's cache."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote

from surgeon.common.formatting import did_you_mean
from surgeon.errors import BadInput, printable

# `Path` merges two slashes into one. The page of a file stands for its repository.
_HUB = re.compile(
    r"(?:hf:/*|(?:https?:/+)?(?:www\.)?(?:huggingface\.co|hf\.co)/)"
    r"(?:(?!datasets/|spaces/)([\w.-]+/[\w.-]+)"
    r"(?:(?:@|/(?:tree|commit)/)([^/?#]+)|/(?:blob|resolve|raw)/([^/?#]+)/[^?#]+)?/?(?:[?#].*)?|.*)"
)
_NAME = re.compile(r"[A-Za-z0-9_-]{1,60}")


def meant(given: str) -> str:
    """Return a path in a form that can be opened.

    `~` and `$NAME` are expanded; an address of the Hub becomes `user/name[@revision]`; a folder of the Hub's cache
    becomes its snapshot. Raises BadInput for an address of anything but a model, and for a cache without exactly one
    snapshot.
    """
    if not os.path.lexists(given):
        if found := _HUB.fullmatch(given):
            if found[1] is None:
                way = "but of no model's page; give its id, `user/name` or `user/name@revision`"
                if "datasets/" in given:
                    way = "of a dataset; give dataset:USER/NAME for `--data` or a source, else a file, downloaded first"
                raise BadInput(f"{printable(given)}: an address of the Hub, {way}")
            revision = found[2] or found[3]
            return f"{found[1]}@{unquote(revision)}" if revision else found[1]
        given = os.path.expandvars(os.path.expanduser(given))  # noqa: PTH111 (it leaves unknown users as they are)
    folder = Path(given).parent if Path(given).name == "snapshots" else Path(given)
    if not (folder.name.startswith("models--") and folder.is_dir()):
        return given
    snapshots = sorted(folder.glob("snapshots/*"))
    if len(snapshots) != 1:
        raise BadInput(
            f"{printable(given)}: a folder of the Hub's cache with {len(snapshots)} snapshots; give the folder of one,"
            " or the model's id (`user/name`)"
        )
    return str(snapshots[0])


def named(given: str | Path) -> tuple[str | None, str]:
    """Split NAME=FILE into name and file; an existing file's path has no name. Raises BadInput for an invalid name."""
    text = str(given)
    name, _, file = text.partition("=")
    if not file or "/" in name or Path(given).exists():
        return None, text
    if not _NAME.fullmatch(name):
        raise BadInput(
            f"{printable(text)}: no such file, and `{printable(name)}` is no name for one; a name has 1 to 60"
            " letters, digits, _ and -"
        )
    return name, file


def from_here(path: str) -> str:
    """Return a path given by an option as an absolute path, since a config's paths begin at its folder.

    A dataset id stays.
    """
    return path if path.startswith("dataset:") else str(Path(meant(path)).absolute())


def find_file(given: str | Path, shipped: Mapping[str, Path], *, what: str) -> Path:
    """Return the file for an argument: a path, or the name of a shipped `what`. Raises BadInput for neither."""
    path = Path(meant(str(given)))
    if (path.exists() and not path.is_dir()) or path.suffix in (".yaml", ".yml"):
        return path
    if str(given) in shipped:
        return shipped[str(given)]
    why = f"a folder, not a {what}" if path.is_dir() else f"neither a {what} nor the name of a shipped one"
    raise BadInput(f"{printable(str(given))}: {why}{did_you_mean(str(given), list(shipped))}")
