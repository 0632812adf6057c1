"""Folders written by `save_to_disk` of `datasets`: checked before that library opens the files that they name.

Format: https://arrow.apache.org/docs/format/Columnar.html (streaming), whose messages are flatbuffers.
"""

from __future__ import annotations

import os
from pathlib import Path
from struct import error as StructError
from struct import unpack_from
from typing import Any

from surgeon.checkpoint.hub_calls import root_cause
from surgeon.checkpoint.source import open_regular, read_capped
from surgeon.checkpoint.strict_json import parse_json_strict
from surgeon.errors import BadInput, printable

DICT_FILE, INFO_FILE, STATE_FILE = "dataset_dict.json", "dataset_info.json", "state.json"
_MOST = 16 * 1024 * 1024
_AGAIN = "save it again with `datasets`"


def is_saved(folder: Path) -> bool:
    """Return whether `save_to_disk` of `datasets` wrote this folder."""
    return (folder / DICT_FILE).is_file() or ((folder / INFO_FILE).is_file() and (folder / STATE_FILE).is_file())


def check_saved(folder: Path) -> None:
    """Raise BadInput where a saved folder, or a split of it, names files outside it or with compressed columns."""
    if not (folder / DICT_FILE).is_file():
        arrow_files(folder)
        return
    for split in _named(folder, DICT_FILE, "splits"):
        place = folder / _plain(split, folder / DICT_FILE)
        if place.is_symlink() or not place.is_dir():
            raise BadInput(f"{printable(str(place))}: not a folder, though {DICT_FILE} names it a split; {_AGAIN}")
        arrow_files(place)


def arrow_files(folder: Path) -> list[Path]:
    """Return the files of one saved table. Raises BadInput for any outside of its folder, and for compressed ones."""
    read_capped(folder, INFO_FILE, max_bytes=_MOST)
    names: list[str] = []
    for entry in _named(folder, STATE_FILE, "_data_files"):
        names.append(_plain(entry.get("filename") if isinstance(entry, dict) else entry, folder / STATE_FILE))
        with os.fdopen(open_regular(folder, names[-1]), "rb") as file:
            _check_uncompressed(file, folder / names[-1])
    return [folder / name for name in names]


def _named(folder: Path, file: str, key: str) -> list[Any]:
    """Return the list under `key` in a JSON file of a saved folder. Raises BadInput where there is none."""
    shown = str(folder / file)
    found = parse_json_strict(read_capped(folder, file, max_bytes=_MOST), file=shown, max_bytes=_MOST)
    named = found.get(key) if isinstance(found, dict) else None
    if not isinstance(named, list):
        raise BadInput(f"{printable(shown)}: `{key}` is no list; {_AGAIN}")
    return named


def _plain(name: Any, where: Path) -> str:
    """Return a name unchanged. Raises BadInput where it is no plain name of a file or folder in the same folder."""
    if not isinstance(name, str) or not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise BadInput(
            f"{printable(str(where))}: names {printable(repr(name), 60)}, which is no name in the folder; {_AGAIN}"
        )
    return name


def _check_uncompressed(file: Any, path: Path) -> None:
    """Raise BadInput for compressed columns: `datasets` writes none, and would unpack all of them at once."""
    import pyarrow

    try:
        for message in pyarrow.ipc.MessageReader.open_stream(pyarrow.memory_map(str(path))):
            if message.type in ("record batch", "dictionary") and _is_compressed(message.metadata, message.type):
                raise BadInput(f"{printable(str(path))}: compressed columns, which unpack to an unknown size; {_AGAIN}")
    except (pyarrow.ArrowException, OSError, ValueError, StructError) as error:
        raise BadInput(
            f"{printable(str(path))}: no Arrow file that can be read ({root_cause(error)}); {_AGAIN}"
        ) from None


# Flatbuffer field numbers: `header` of Message, `data` of DictionaryBatch, `compression` of RecordBatch.
_HEADER, _DATA, _COMPRESSION = 2, 1, 3


def _is_compressed(message: Any, kind: str) -> bool:
    """Return whether a flatbuffer `Message` of this kind (`record batch` or `dictionary`) has compressed columns.

    Raises StructError or ValueError where the message is damaged.
    """
    batch = _table(message, _table(message, 0, None), _HEADER)
    if kind == "dictionary":
        batch = _table(message, batch, _DATA)
    return _place(message, batch, _COMPRESSION) is not None


def _place(buffer: Any, table: int, field: int) -> int | None:
    """Return the position of a field of a table; None where the field is absent."""
    layout = table - unpack_from("<i", buffer, table)[0]
    size = unpack_from("<H", buffer, layout)[0]
    offset = unpack_from("<H", buffer, layout + 4 + 2 * field)[0] if 4 + 2 * field < size else 0
    return table + offset if offset else None


def _table(buffer: Any, table: int, field: int | None) -> int:
    """Return the begin of the table in a field, or of the buffer's root table."""
    place = table if field is None else _place(buffer, table, field)
    if place is None:
        raise ValueError("a message without columns")
    return int(place + unpack_from("<I", buffer, place)[0])
