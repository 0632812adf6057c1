"""A delta's folder: what an output has that its base lacks, and the index that puts the two together.

The base of a delta is what the output's last surgery was carried out on. A delta holds every tensor that is not one of
that base's, byte for byte and in its place, and the small files; DELTA_FILE names what it holds and what comes from
the base, by digests, so that the output comes back as it was or not at all.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from surgeon.checkpoint.folder import (
    CARD_FILE,
    CONFIG_FILE,
    DELTA_FILE,
    MAX_CARD_BYTES,
    MAX_CODE_BYTES,
    MAX_CONFIG_BYTES,
    MAX_MANIFEST_BYTES,
    code_of,
)
from surgeon.checkpoint.header import Header, TensorInfo
from surgeon.checkpoint.source import MAX_SIDE_FILE_BYTES, LocalSource, is_side_file
from surgeon.checkpoint.strict_json import parse_json_strict
from surgeon.errors import BadInput, printable
from surgeon.manifest.manifest import MANIFEST_FILE, Manifest, Sha256, parse

FORMAT = 1

# The output's own card, as README.md of a delta is the delta's.
KEPT_CARD = "README.output.md"
MAX_DELTA_BYTES = 64_000_000
CODE_NAME = re.compile(r"[A-Za-z0-9_]{1,100}\.py")
_Shard = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}\.safetensors$")]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class HeldTensor(_Entry):
    """A tensor of the delta: in which of its shards, and its digest."""

    shard: _Shard
    sha256: Sha256


class DeltaIndex(_Entry):
    """Everything that DELTA_FILE says.

    `files` are the output's small files that the delta brings, `from_base` those that the base does, by digests.
    `shards` are the output's, with their tensors in the order of their bytes; of these the delta brings `tensors`.
    """

    surgeon_delta: Literal[1]
    tool: str
    files: dict[str, Sha256]
    from_base: dict[str, Sha256]
    shards: dict[_Shard, list[str]]
    tensors: dict[str, HeldTensor]

    def to_bytes(self) -> bytes:
        """The file's content."""
        return (json.dumps(self.model_dump(), indent=1, ensure_ascii=False) + "\n").encode()


@dataclass(frozen=True)
class Delta:
    """A delta that was opened and checked: everything but the weights is here. `files` are contents by name."""

    path: Path
    index: DeltaIndex
    manifest: Manifest
    config: dict[str, Any]
    files: Mapping[str, bytes]
    tensors: Mapping[str, TensorInfo]
    headers: Mapping[str, Header]
    source: LocalSource

    @property
    def shown(self) -> str:
        """What errors call its index."""
        return printable(str(self.path / DELTA_FILE))

    def edited(self, what: str) -> BadInput:
        """The error for an index that contradicts itself."""
        return _edited(self.shown, what)

    @classmethod
    def open(cls, path: Path, *, trust_remote_code: bool = False) -> Delta:
        """Open a local folder. Raises BadInput, one line, for the first thing that is not as it must be."""
        source = LocalSource(path)
        listing = source.listing()
        if DELTA_FILE not in listing:
            raise BadInput(f"{source.shown}: no {DELTA_FILE} here, so this is no delta; `surgeon delta` makes one")
        shown = printable(str(path / DELTA_FILE))
        index = _index(source.small(DELTA_FILE, max_bytes=MAX_DELTA_BYTES), shown)
        files: dict[str, bytes] = {}
        for name, digest in index.files.items():
            _check_name(name, shown)
            content = source.small(KEPT_CARD if name == CARD_FILE else name, max_bytes=_most(name))
            if hashlib.sha256(content).hexdigest() != digest:
                raise BadInput(
                    f"{printable(str(path / name))}: not what {DELTA_FILE} says, so the delta was edited or damaged;"
                    " get it again"
                )
            files[name] = content
        for name in index.from_base:
            if not is_side_file(name):
                raise _edited(shown, f"{printable(name)} is no file that comes from a base")
        if missing := {CONFIG_FILE, MANIFEST_FILE} - files.keys():
            raise _edited(shown, f"`files` lacks {sorted(missing)[0]}")
        data = parse_json_strict(files[MANIFEST_FILE], file=MANIFEST_FILE, max_bytes=MAX_MANIFEST_BYTES)
        config = parse_json_strict(files[CONFIG_FILE], file=CONFIG_FILE, max_bytes=MAX_CONFIG_BYTES)
        if not isinstance(config, dict):
            raise _edited(shown, f"{CONFIG_FILE} holds no JSON object")
        whose, told = code_of(config, listing, source)
        if whose == "foreign" and not trust_remote_code:
            raise BadInput(
                f"{source.shown}: the delta brings its own code ({told}); it is neither run nor copied unless you have"
                " read it and say `--trust-remote-code`"
            )
        headers = source.headers(sorted({tensor.shard for tensor in index.tensors.values()}))
        found = {info.name: info for header in headers.values() for info in header.tensors}
        for name in sorted(found.keys() | index.tensors.keys()):
            if name not in found or name not in index.tensors or found[name].file != index.tensors[name].shard:
                raise _edited(shown, f"{printable(name)} is not where it says")
        manifest = parse(data, file=str(path / MANIFEST_FILE))
        return cls(path, index, manifest, config, files, found, headers, source)


def _index(content: bytes, shown: str) -> DeltaIndex:
    data = parse_json_strict(content, file=DELTA_FILE, max_bytes=MAX_DELTA_BYTES)
    if isinstance(data, dict) and data.get("surgeon_delta") not in (FORMAT, None):
        raise BadInput(
            f"{shown}: delta format {printable(repr(data['surgeon_delta']))}, this surgeon reads {FORMAT}; use the"
            " version that wrote it, or a newer one"
        )
    try:
        return DeltaIndex.model_validate(data)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = printable(".".join(str(step) for step in problem["loc"]) or "the file")
        raise BadInput(f"{shown}: not a surgeon delta: {where}: {printable(problem['msg'])}") from None


def _check_name(name: str, shown: str) -> None:
    if name in (CONFIG_FILE, MANIFEST_FILE, CARD_FILE) or is_side_file(name) or CODE_NAME.fullmatch(name):
        return
    raise _edited(shown, f"{printable(name)} is no file of an output")


def _most(name: str) -> int:
    """Bytes that a file of this name may have."""
    known = {CONFIG_FILE: MAX_CONFIG_BYTES, MANIFEST_FILE: MAX_MANIFEST_BYTES, CARD_FILE: MAX_CARD_BYTES}
    return known.get(name, MAX_CODE_BYTES if name.endswith(".py") else MAX_SIDE_FILE_BYTES)


def _edited(shown: str, what: str) -> BadInput:
    return BadInput(f"{shown}: {what}; was it edited by hand?")
