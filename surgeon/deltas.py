"""Deltas: what an output has that its base lacks, as a folder of its own, and the output put together again.

The base of a delta is what the output's last surgery was carried out on. A delta holds every tensor that is not one of
that base's, byte for byte and in its place, and the small files; DELTA_FILE names what it holds and what comes from
the base, by digests, so that the output comes back as it was or not at all.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from surgeon import __version__
from surgeon.blueprint import Blueprint, Output
from surgeon.checkpoint.folder import (
    CARD_FILE,
    CONFIG_FILE,
    DELTA_FILE,
    MAX_CARD_BYTES,
    MAX_CODE_BYTES,
    MAX_CONFIG_BYTES,
    MAX_MANIFEST_BYTES,
    CheckpointFolder,
    code_of,
)
from surgeon.checkpoint.header import Header, TensorInfo
from surgeon.checkpoint.peft_folder import AdapterFolder
from surgeon.checkpoint.side_files import MAX_SIDE_FILE_BYTES, is_side_file
from surgeon.checkpoint.source import LocalSource, Source
from surgeon.checkpoint.strict_json import parse_json_strict
from surgeon.checkpoint.weights import INDEX_FILE, SINGLE_FILE
from surgeon.errors import BadInput, printable
from surgeon.execute import Job, index_of
from surgeon.families.anatomy import dissect, renumbered
from surgeon.layout import Shard
from surgeon.manifest import MANIFEST_FILE, Manifest, Sha256, layers_of, parse
from surgeon.metadata import NOTHING_KNOWN, Metadata
from surgeon.readback import ReadBack
from surgeon.recipes import Copy

FORMAT = 1
# The output's own card, as README.md of a delta is the delta's.
KEPT_CARD = "README.output.md"
MAX_DELTA_BYTES = 64_000_000

_CODE_NAME = re.compile(r"[A-Za-z0-9_]{1,100}\.py")
# Terms go where the weights go.
_TERMS = re.compile(r"(LICENSE|LICENCE|NOTICE|USE_POLICY).*")
# What stands before the delta's tensors and shards, so that they are told from the base's of the same name.
_MARK = "delta/"

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
class AsItIs:
    """The purpose of a job whose small files are known beforehand: a delta that is made.

    `what` tells two such jobs apart beside their files.
    """

    source: str
    told: Manifest
    what: str
    metadata: Metadata = NOTHING_KNOWN
    # Nothing is imported.
    adapters: Mapping[str, AdapterFolder] = field(default_factory=dict)

    def identity(self) -> dict[str, Any]:
        """What is made; its files are known to the job."""
        return {"what": self.what}

    def code(self, name: str, config: Mapping[str, Any]) -> bytes:
        """No code but what is among the job's files."""
        raise AssertionError(name)

    def settle(self, job: Job, proof: ReadBack) -> None:
        """BadInput where a tensor is no longer what it was when the delta's list was made."""
        assert job.files is not None
        listed = DeltaIndex.model_validate_json(job.files[DELTA_FILE]).tensors
        for name, digest in proof.base_digests.items():
            if listed[name].sha256 != digest:
                raise BadInput(f"{printable(name)}: changed while the delta was made; start again when nothing writes")

    def manifest(self, job: Job, proof: ReadBack) -> Manifest:
        """The output's, as it was."""
        return self.told


@dataclass(frozen=True)
class PutBack(AsItIs):
    """The purpose of a job that puts a delta back onto its base. `held` are digests of the delta's tensors."""

    held: Mapping[str, str] = field(default_factory=dict)

    def settle(self, job: Job, proof: ReadBack) -> None:
        """BadInput where the base is another, or the delta was edited."""
        proof.digest_the_rest()
        for name, digest in proof.base_digests.items():
            own = name.removeprefix(_MARK)
            if name.startswith(_MARK) and self.held[own] != digest:
                raise BadInput(
                    f"{printable(own)}: not what {DELTA_FILE} of {self.source} says, so the delta was edited or"
                    " damaged; get it again. Nothing was written"
                )
            if not name.startswith(_MARK) and self.told.base.tensors.get(name) != digest:
                raise wrong_base(self.told, name, job.base.source.shown)


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


def making_job(
    out: CheckpointFolder,
    manifest: Manifest,
    digests: Mapping[str, str],
    base: CheckpointFolder | None,
) -> Job:
    """The job that writes the delta of an output whose tensors have these `digests`; its card is not among its files.

    With a `base`, side files that it lacks or has otherwise go into the delta.
    """
    base_at = {place: manifest.base.tensors[name] for name, place in _places(manifest).items()}
    own: dict[str, list[TensorInfo]] = {}
    order: dict[str, list[str]] = {file: [] for file in out.shards}
    for info in sorted(out.tensors.values(), key=lambda info: info.begin):
        order[info.file].append(info.name)
        if base_at.get(info.name) != digests[info.name]:
            own.setdefault(info.file, []).append(info)
    shards = tuple(
        Shard(f"delta-{number:05d}-of-{len(own):05d}.safetensors", tuple(_copy(i.name, i) for i in infos), file)
        for number, (file, infos) in enumerate(sorted(own.items()), 1)
    )
    files = _small_files(out, manifest)
    from_base: dict[str, str] = {}
    for name in out.side_files:
        content = out.read_side_file(name)
        if _TERMS.fullmatch(name) or (base is not None and not _has(base, name, content)):
            files[name] = content
        else:
            from_base[name] = hashlib.sha256(content).hexdigest()
    shown = printable(str(out.path))
    try:
        index = DeltaIndex(
            surgeon_delta=1,
            tool=__version__,
            files={name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
            from_base=from_base,
            shards=order,
            tensors={
                output.name: HeldTensor(shard=shard.file, sha256=digests[output.name])
                for shard in shards
                for output in shard.outputs
            },
        )
    except ValidationError as error:
        raise BadInput(f"{shown}: {printable(error.errors(include_url=False)[0]['msg'])}: a shard's name") from None
    written = {KEPT_CARD if name == CARD_FILE else name: content for name, content in files.items()}
    return Job(
        purpose=AsItIs(source=shown, told=manifest, what="delta"),
        blueprint=_blueprint(shards, out.config),
        base=out,
        shards=shards,
        files=written | {DELTA_FILE: index.to_bytes()},
    )


def putting_job(delta: Delta, base: CheckpointFolder, *, small_files: bool = True) -> Job:
    """The job that writes the output again. Raises BadInput where headers (and `small_files`) tell that it cannot."""
    manifest, shown = delta.manifest, printable(str(delta.path / DELTA_FILE))
    missing = sorted(manifest.base.tensors.keys() - base.tensors.keys())
    unknown = sorted(base.tensors.keys() - manifest.base.tensors.keys())
    if missing or unknown:
        raise wrong_base(manifest, (missing or unknown)[0], base.source.shown)
    both = _both(delta, base)
    source_of = {place: name for name, place in _places(manifest).items()}
    source_of |= {name: f"{_MARK}{name}" for name in delta.tensors}
    named = [name for names in delta.index.shards.values() for name in names]
    if len(named) != len(set(named)) or not delta.tensors.keys() <= set(named):
        raise _edited(shown, "`shards` does not name each tensor once")
    if SINGLE_FILE in delta.index.shards and len(delta.index.shards) > 1:
        raise _edited(shown, f"`shards` has {SINGLE_FILE} beside others")
    shards: list[Shard] = []
    for file, names in delta.index.shards.items():
        for name in names:
            if name not in source_of:
                raise _edited(shown, f"{printable(name)} is neither the base's nor the delta's")
        infos = {name: both.tensors[source_of[name]] for name in names}
        twins = {info.file for info in infos.values()}
        if not twins:
            raise _edited(shown, f"`shards` has {printable(file)} without a tensor")
        twin = twins.pop() if len(twins) == 1 else None
        shards.append(Shard(file, tuple(_copy(name, info) for name, info in infos.items()), twin))
    outputs = {output.name: both.tensors[source_of[output.name]] for shard in shards for output in shard.outputs}
    try:
        dissect(delta.config, {name: dataclasses.replace(info, name=name) for name, info in outputs.items()})
    except BadInput as error:
        raise BadInput(f"{shown}: what would be put together is no model ({error})") from error
    files = dict(delta.files)
    for name, digest in delta.index.from_base.items() if small_files else ():
        content = base.read_side_file(name) if name in base.side_files else None
        if content is None or hashlib.sha256(content).hexdigest() != digest:
            how = "not there" if content is None else "not what the output had"
            raise BadInput(
                f"{base.source.shown}: {printable(name)} is {how}; take the base as the surgery found it, or make the"
                " delta with `--base`, so that it brings that file. Nothing was written"
            )
        files[name] = content
    if delta.index.shards.keys() != {SINGLE_FILE}:
        files[INDEX_FILE] = index_of(tuple(shards))
    return Job(
        purpose=PutBack(
            source=printable(str(delta.path)),
            told=manifest,
            what="put back",
            held={name: tensor.sha256 for name, tensor in delta.index.tensors.items()},
        ),
        blueprint=_blueprint(tuple(shards), delta.config),
        base=both,
        shards=tuple(shards),
        files=files,
    )


def wrong_base(manifest: Manifest, name: str, shown: str) -> BadInput:
    """What is said of a base that the delta does not belong to: `name` is the first tensor that tells."""
    revision = f"@{manifest.base.revision}" if manifest.base.revision else ""
    return BadInput(
        f"{printable(name)}: not what the delta's base holds there, so {shown} is another checkpoint; the delta goes"
        f" onto what its last surgery found, {printable(manifest.base.id + revision)}. Nothing was written"
    )


@dataclass(frozen=True)
class _Both:
    """The base's files, and the delta's shards behind a mark."""

    base: Source
    delta: LocalSource

    @property
    def shown(self) -> str:
        """What errors call it."""
        return self.base.shown

    def listing(self) -> dict[str, int]:
        """The base's."""
        return self.base.listing()

    def small(self, name: str, *, max_bytes: int) -> bytes:
        """The base's."""
        return self.base.small(name, max_bytes=max_bytes)

    def check_small(self, name: str) -> None:
        """As the base's."""
        self.base.check_small(name)

    def headers(self, files: list[str]) -> dict[str, Header]:
        """Of the base's shards."""
        return self.base.headers(files)

    def open_shard(self, file: str) -> int:
        """A read-only descriptor."""
        if file.startswith(_MARK):
            return self.delta.open_shard(file.removeprefix(_MARK))
        return self.base.open_shard(file)

    def identity(self) -> list[dict[str, Any]]:
        """Of all shards."""
        return [*self.base.identity(), *self.delta.identity()]

    def check_unchanged(self) -> None:
        """Of all shards."""
        self.base.check_unchanged()
        self.delta.check_unchanged()


def _both(delta: Delta, base: CheckpointFolder) -> CheckpointFolder:
    marked = {
        f"{_MARK}{name}": dataclasses.replace(info, name=f"{_MARK}{name}", file=f"{_MARK}{info.file}")
        for name, info in delta.tensors.items()
    }
    return dataclasses.replace(
        base,
        tensors=base.tensors | marked,
        headers=base.headers | {f"{_MARK}{file}": header for file, header in delta.headers.items()},
        source=_Both(base.source, delta.source),
    )


def _places(manifest: Manifest) -> dict[str, str]:
    """Where the base's tensors stand in the output, by their names in the base."""
    layers = layers_of(manifest, file=MANIFEST_FILE)
    try:
        return {name: renumbered(name, layers) for name in manifest.base.tensors}
    except KeyError as error:
        raise BadInput(
            f"{MANIFEST_FILE}: names a tensor of base layer {error.args[0]}, which `layers` has not; was it edited by"
            " hand?"
        ) from None


def _copy(name: str, info: TensorInfo) -> Output:
    return Output(name, Copy(info.name, info.dtype, info.shape), True, None)


def _blueprint(shards: tuple[Shard, ...], config: dict[str, Any]) -> Blueprint:
    return Blueprint(
        seed=0,
        outputs=tuple(output for shard in shards for output in shard.outputs),
        couplings={},
        layers=(),
        operations=(),
        config=config,
    )


def _small_files(out: CheckpointFolder, manifest: Manifest) -> dict[str, bytes]:
    """Config, manifest, code and card of the output, as they are."""
    listing = out.source.listing()
    files = {
        CONFIG_FILE: out.source.small(CONFIG_FILE, max_bytes=MAX_CONFIG_BYTES),
        MANIFEST_FILE: out.source.small(MANIFEST_FILE, max_bytes=MAX_MANIFEST_BYTES),
    }
    for name, digest in manifest.code.items():
        content = out.read_code(name) if _CODE_NAME.fullmatch(name) else None
        if content is None or hashlib.sha256(content).hexdigest() != digest:
            raise BadInput(f"{printable(str(out.path / name))}: not the file of code that {MANIFEST_FILE} tells of")
        files[name] = content
    if CARD_FILE in listing:
        files[CARD_FILE] = out.source.small(CARD_FILE, max_bytes=MAX_CARD_BYTES)
    return files


def _has(base: CheckpointFolder, name: str, content: bytes) -> bool:
    return name in base.side_files and base.read_side_file(name) == content


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
    if name in (CONFIG_FILE, MANIFEST_FILE, CARD_FILE) or is_side_file(name) or _CODE_NAME.fullmatch(name):
        return
    raise _edited(shown, f"{printable(name)} is no file of an output")


def _most(name: str) -> int:
    """Bytes that a file of this name may have."""
    known = {CONFIG_FILE: MAX_CONFIG_BYTES, MANIFEST_FILE: MAX_MANIFEST_BYTES, CARD_FILE: MAX_CARD_BYTES}
    return known.get(name, MAX_CODE_BYTES if name.endswith(".py") else MAX_SIDE_FILE_BYTES)


def _edited(shown: str, what: str) -> BadInput:
    return BadInput(f"{shown}: {what}; was it edited by hand?")
