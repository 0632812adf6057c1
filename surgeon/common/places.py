"""What people mean by a path: their home, a variable, a page of the Hub, a folder of its cache."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote

from surgeon.common.formatting import did_you_mean
from surgeon.errors import BadInput, printable

# `Path` makes one slash of two. The page of a file means its repository.
_HUB = re.compile(
    r"(?:hf:/*|(?:https?:/+)?(?:www\.)?(?:huggingface\.co|hf\.co)/)"
    r"(?:(?!datasets/|spaces/)([\w.-]+/[\w.-]+)"
    r"(?:(?:@|/(?:tree|commit)/)([^/?#]+)|/(?:blob|resolve|raw)/([^/?#]+)/[^?#]+)?/?(?:[?#].*)?|.*)"
)
_NAME = re.compile(r"[A-Za-z0-9_-]{1,60}")


def meant(given: str) -> str:
    """Return a path as it can be opened.

    `~` and `$NAME` are written out; an address of the Hub is `user/name[@revision]`; a folder of the Hub's cache is the
    snapshot in it. Raises BadInput for an address of something else than a model, and for a cache that leaves a choice.
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
    """Split NAME=FILE into both; what is a file as it stands has no name. Raises BadInput for another name."""
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
    """Return a path that an option names from the root: those of a file begin at its folder. A data set stays."""
    return path if path.startswith("dataset:") else str(Path(meant(path)).absolute())


def find_file(given: str | Path, shipped: Mapping[str, Path], *, what: str) -> Path:
    """Return the file that an argument means: a path, or the name of a shipped `what`. Raises BadInput for neither."""
    path = Path(meant(str(given)))
    if (path.exists() and not path.is_dir()) or path.suffix in (".yaml", ".yml"):
        return path
    if str(given) in shipped:
        return shipped[str(given)]
    why = f"a folder, not a {what}" if path.is_dir() else f"neither a {what} nor the name of a shipped one"
    raise BadInput(f"{printable(str(given))}: {why}{did_you_mean(str(given), list(shipped))}")
