"""The metadata block at the top of a model card: which of the base's entries an output keeps, and how they are written.

Anybody can write a base's card. So scalars are read as text, each is compared with the values that the Hub allows, and
values that do not fit are left out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import yaml

from surgeon.checkpoint.folder import CARD_FILE, MAX_CARD_BYTES, CheckpointFolder
from surgeon.errors import BadInput, printable

_MAX_BLOCK = 64_000
_MOST_ENTRIES = 200
_BLOCK = re.compile(r"\A\ufeff?\s*---[ \t]*\r?\n(.*?\r?\n)---[ \t]*(?:\r?\n|\Z)", re.DOTALL)
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,79}")
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.-]{0,59}")
_LINK = re.compile(r"https?://[A-Za-z0-9._~:/?#@!$&'*+,;=%-]{1,300}|[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_LANGUAGE = re.compile(r"[A-Za-z]{2,3}(-[A-Za-z0-9]{2,8})*|code|multilingual")
_REPOSITORY = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]{0,95}/)?[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}")


@dataclass(frozen=True)
class Metadata:
    """The entries of a card that do not concern the surgery: licence, languages, datasets; `base_model` is a Hub id.

    The Hub accepts every value. `license` None: unknown.
    """

    license: str | None = None
    license_name: str | None = None
    license_link: str | None = None
    languages: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()
    base_model: str | None = None


NOTHING_KNOWN = Metadata()


def metadata_of(folder: CheckpointFolder) -> Metadata:
    """Return the metadata of a checkpoint's card; empty where the card is missing or unreadable.

    `base_model` is left out where the checkpoint is no output of surgeon.
    """
    if CARD_FILE not in folder.source.listing():
        return NOTHING_KNOWN
    try:
        found = read_metadata(folder.source.small(CARD_FILE, max_bytes=MAX_CARD_BYTES))
    except BadInput:
        # The card is too large or no regular file: the surgery can continue without its metadata.
        return NOTHING_KNOWN
    return found if folder.manifest is not None else replace(found, base_model=None)


def read_metadata(card: bytes) -> Metadata:
    """Return the metadata of a base's card; empty where there is none, or it cannot be read."""
    block = _BLOCK.match(card[:MAX_CARD_BYTES].decode("utf-8", errors="replace"))
    if block is None or len(block[1]) > _MAX_BLOCK:
        return NOTHING_KNOWN
    try:
        # The base loader knows no tags and takes every scalar as text: the language `no` stays Norwegian.
        found = yaml.load(block[1], Loader=yaml.BaseLoader)
    except (yaml.YAMLError, RecursionError, ValueError):
        return NOTHING_KNOWN
    if not isinstance(found, dict):
        return NOTHING_KNOWN
    licence = _first(found.get("license"), _LICENSE)
    named = licence == "other"
    return Metadata(
        license=licence,
        license_name=_first(found.get("license_name"), _WORD) if named else None,
        license_link=_first(found.get("license_link"), _LINK) if named else None,
        languages=_several(found.get("language"), _LANGUAGE),
        datasets=_several(found.get("datasets"), _REPOSITORY),
        base_model=_first(found.get("base_model"), _REPOSITORY),
    )


def check_license(name: str) -> str:
    """Return the licence identifier unchanged. Raises BadInput where the Hub does not know this identifier."""
    if not _LICENSE.fullmatch(name) or name in ("unknown", "other"):
        raise BadInput(
            f"--license {printable(name)}: give an identifier of the Hub's list, such as apache-2.0, mit, llama3.2"
        )
    return name


def block_of(entries: dict[str, Any]) -> str:
    """Return the metadata block, `---` lines included; entries that are None or empty are left out."""
    kept = {key: value for key, value in entries.items() if value not in (None, [], "")}
    text = yaml.safe_dump(kept, sort_keys=False, allow_unicode=False, default_flow_style=False, width=4096)
    return f"---\n{text}---\n"


def _several(value: object, pattern: re.Pattern[str]) -> tuple[str, ...]:
    """Return the distinct strings in a card's value (one or a list) that fit `pattern`; drop others silently."""
    values = value if isinstance(value, list) else [value]
    fitting = [v for v in values[:_MOST_ENTRIES] if isinstance(v, str) and pattern.fullmatch(v)]
    return tuple(dict.fromkeys(fitting))


def _first(value: object, pattern: re.Pattern[str]) -> str | None:
    """Return the first string among a card's value (one or a list) that fits `pattern`; None where none fits."""
    return next(iter(_several(value, pattern)), None)
