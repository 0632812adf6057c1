"""`surgeon delta`: write the tensors and files of an output that its base lacks, with an index to restore it.

The base of a delta is the base of the output's last surgery. A delta contains every tensor that differs from that
base's, byte for byte, and the small files. DELTA_FILE lists what the delta contains and what the base provides, by
digests. So the output is restored exactly, or not at all.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError
from rich.console import Group, RenderableType
from rich.text import Text

from surgeon._version import __version__
from surgeon.blueprint.shards import Shard
from surgeon.checkpoint.card_metadata import metadata_of
from surgeon.checkpoint.folder import (
    CARD_FILE,
    CONFIG_FILE,
    DELTA_FILE,
    MAX_CARD_BYTES,
    MAX_CONFIG_BYTES,
    MAX_MANIFEST_BYTES,
    RECORD_FILE,
    CheckpointFolder,
    digests_of,
)
from surgeon.checkpoint.header import Header, TensorInfo
from surgeon.checkpoint.source import MAX_SIDE_FILE_BYTES, LocalSource, is_side_file
from surgeon.checkpoint.staging import check_destination
from surgeon.checkpoint.strict_json import parse_json_strict
from surgeon.checkpoint.trust import MAX_CODE_BYTES, brought_by, check_config, check_trusted
from surgeon.common.formatting import at_revision, size
from surgeon.common.json_results import plain_fields
from surgeon.common.listener import Listener, Quiet, Stopwatch
from surgeon.errors import BadInput, printable
from surgeon.manifest.card import card
from surgeon.manifest.lineage import CODE_NAME
from surgeon.manifest.manifest import MANIFEST_FILE, Entry, Manifest, Sha256, StoredTensor, seal_of
from surgeon.manifest.moves import kept_as_they_are, made_of_base
from surgeon.manifest.reading import checked, manifest_of, parse
from surgeon.manifest.run_files import ADAPTER_FOLDER, KEPT_FOLDER
from surgeon.models.templates import TEMPLATE_FILE
from surgeon.writing.job import Job, copied, in_order, mirrored_in, places_in
from surgeon.writing.readback import ReadBack
from surgeon.writing.write import check_output, execute

# The output's card in a delta, which has its own README.md.
_OUTPUT_CARD = "README.output.md"

MAX_DELTA_BYTES = 64_000_000
_Shard = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}\.safetensors$")]


class HeldTensor(StoredTensor):
    """A tensor in the delta: its value, and the shard of the delta that holds it."""

    shard: _Shard


class DeltaIndex(Entry):
    """The whole content of DELTA_FILE.

    `files` are the output's small files that the delta contains, `from_base` those that the base provides, by digests.
    `shards` are the output's shards, each with its tensors in the order of their bytes. `tensors` are the tensors that
    the delta contains. `sha256` covers all of this, so no field can be edited alone.
    """

    surgeon_delta: Literal[1]
    sha256: Sha256
    tool: str
    files: dict[str, Sha256]
    from_base: dict[str, Sha256]
    shards: dict[_Shard, list[str]]
    tensors: dict[str, HeldTensor]

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
        return (json.dumps(self.model_dump(), indent=1, ensure_ascii=False) + "\n").encode()


@dataclass(frozen=True)
class Delta:
    """An opened and checked delta; everything but the weights is in memory. `files` maps names to contents."""

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
        """The path of the delta's index in error messages."""
        return printable(str(self.path / DELTA_FILE))

    def edited(self, what: str) -> BadInput:
        """Return the error for an index that contradicts itself in the way that `what` describes."""
        return _edited(self.shown, what)

    @classmethod
    def open(cls, path: Path, *, trust_remote_code: bool = False) -> Delta:
        """Open a local folder. Raises BadInput, in one line, for the first file that is missing, edited or damaged."""
        source = LocalSource(path)
        listing = source.listing()
        if DELTA_FILE not in listing:
            raise BadInput(f"{source.shown}: no {DELTA_FILE} here, so this is no delta; `surgeon delta` makes one")
        shown = printable(str(path / DELTA_FILE))
        content = source.small(DELTA_FILE, max_bytes=MAX_DELTA_BYTES)
        data = parse_json_strict(content, file=DELTA_FILE, max_bytes=MAX_DELTA_BYTES)
        index = checked(DeltaIndex, data, "delta", file=str(path / DELTA_FILE))
        if seal_of(index.model_dump()) != index.sha256:
            raise BadInput(f"{shown}: not what its sha256 says, so it was edited or damaged; get the delta again")
        files: dict[str, bytes] = {}
        for name, digest in index.files.items():
            _check_name(name, shown)
            called = _OUTPUT_CARD if name == CARD_FILE else name
            content = source.small(called, max_bytes=_most(name))
            if hashlib.sha256(content).hexdigest() != digest:
                raise BadInput(
                    f"{printable(str(path / called))}: not what {DELTA_FILE} says, so the delta was edited or damaged;"
                    " get it again"
                )
            files[name] = content
        for name in index.from_base:
            if not is_side_file(name):
                raise _edited(shown, f"{printable(name)} is no file that comes from a base")
        if missing := {CONFIG_FILE, MANIFEST_FILE} - files.keys():
            raise _edited(shown, f"`files` lacks {sorted(missing)[0]}")
        data = parse_json_strict(files[MANIFEST_FILE], file=MANIFEST_FILE, max_bytes=MAX_MANIFEST_BYTES, constants=True)
        config = parse_json_strict(files[CONFIG_FILE], file=CONFIG_FILE, max_bytes=MAX_CONFIG_BYTES)
        if not isinstance(config, dict):
            raise _edited(shown, f"{CONFIG_FILE} holds no JSON object")
        check_trusted(brought_by(config, source), source.shown, trust_remote_code=trust_remote_code)
        check_config(config)
        headers = source.headers(sorted({tensor.shard for tensor in index.tensors.values()}))
        found = {info.name: info for header in headers.values() for info in header.tensors}
        for name in sorted(found.keys() | index.tensors.keys()):
            held, known = found.get(name), index.tensors.get(name)
            if held is None or known is None or held.file != known.shard:
                raise _edited(shown, f"{printable(name)} is not where it says")
            if (held.dtype, list(held.shape)) != (known.dtype, known.shape):
                raise _edited(shown, f"{printable(name)} is not of the dtype and shape that it says")
        manifest = parse(data, file=str(path / MANIFEST_FILE))
        if missing := manifest.files.keys() - files.keys() - index.from_base.keys():
            raise _edited(shown, f"nothing brings {printable(min(missing))}, which {MANIFEST_FILE} names")
        return cls(path, index, manifest, config, files, found, headers, source)


def _check_name(name: str, shown: str) -> None:
    """Raise BadInput for a name in the index that no small file of an output has."""
    own = (CONFIG_FILE, MANIFEST_FILE, CARD_FILE, RECORD_FILE)
    if name in own or is_side_file(name) or CODE_NAME.fullmatch(name):
        return
    raise _edited(shown, f"{printable(name)} is no file of an output")


def _most(name: str) -> int:
    """Return the most bytes that a file of this name may have."""
    known = {CONFIG_FILE: MAX_CONFIG_BYTES, MANIFEST_FILE: MAX_MANIFEST_BYTES, CARD_FILE: MAX_CARD_BYTES}
    return known.get(name, MAX_CODE_BYTES if name.endswith(".py") else MAX_SIDE_FILE_BYTES)


def _edited(shown: str, what: str) -> BadInput:
    """Return the error for an index, called `shown`, that contradicts itself."""
    return BadInput(f"{shown}: {what}; was it edited by hand?")


@dataclass(frozen=True)
class MadeDelta:
    """A written delta of `out`.

    It contains `tensors` of the output's `whole` tensors; `base` (the base of the last surgery) provides the rest and
    the small files `from_base`. `nbytes` counts the bytes in the delta.
    """

    out: Path
    path: Path
    base: str
    revision: str | None
    tensors: int
    whole: int
    nbytes: int
    whole_nbytes: int
    from_base: tuple[str, ...]
    seconds: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `--json`.

        Keys:
            `out`, `path`: the output, and its delta
            `base`, `revision`: the base that the delta needs, and its commit
            `tensors`, `bytes`: in the delta
            `whole`, `whole_bytes`: tensors and bytes of the whole output
            `from_base`: side files that come from the base
            `seconds`: seconds by stage
        """
        return plain_fields(self)


def make_delta(
    out: str | Path,
    dest: str | Path,
    *,
    base: str | Path | None = None,
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> MadeDelta:
    """Write the parts of `out` that the base of its last surgery lacks into the new folder `dest`.

    These are every tensor that is not byte for byte the base's, config.json, manifest, code and cards. The tokenizer
    and other side files are left out, as the base provides them, and so are a training run's `adapter/` and
    `base-tensors/`. With `base` (a folder), side files that are missing or different there are included. `dest` is
    absent or complete at any moment. Raises BadInput where `out` is no output of surgeon, its files contradict the
    manifest, or `dest` cannot be written.
    """
    folder = CheckpointFolder.open(Path(out), trust_remote_code=trust_remote_code)
    other = CheckpointFolder.open(Path(base), trust_remote_code=trust_remote_code) if base is not None else None
    listener, target = listener or Quiet(), Path(dest)
    for note in folder.notes:
        listener.say(note)
    manifest = manifest_of(folder)
    check_destination(target, folder.path)
    if manifest.kept or manifest.adapter is not None:
        listener.say(f"{KEPT_FOLDER}/ and {ADAPTER_FOLDER}/ stay in {folder.source.shown}: a delta is of weights alone")
    listener.begin("reading", sum(info.nbytes for info in folder.tensors.values()))
    digests = digests_of(folder, folder.tensors, listener.advance)
    base_at = _brought(manifest)
    shards = _shards(folder, base_at, digests)
    files = _small_files(folder, manifest)
    from_base = _side_files(folder, other, manifest, files)
    index = _index(folder, shards, files, from_base, digests)
    sizes = {output.name: output.numel for shard in shards for output in shard.outputs}
    own_card = card(manifest, folder.config, sizes, metadata_of(folder), delta=True)
    files = {_OUTPUT_CARD if name == CARD_FILE else name: content for name, content in files.items()}

    def finish(proof: ReadBack) -> Mapping[str, bytes]:
        """Raise BadInput where a tensor has changed since the delta's list was made."""
        for name, digest in proof.digests.items():
            if digests[name] != digest:
                raise BadInput(f"{printable(name)}: changed while the delta was made; start again when nothing writes")
        return {}

    job = Job(
        shards=shards,
        sources={"": folder.source},
        places=places_in(folder.tensors, shards),
        mirrored=mirrored_in(folder, shards),
        files=files | {DELTA_FILE: index.to_bytes(), CARD_FILE: own_card},
        finish=finish,
        identity={"what": "delta", "out": folder.identity()},
    )
    check_output(job, folder.path, target)
    stopwatch = Stopwatch()
    execute(job, target, listener, stopwatch)
    return MadeDelta(
        out=folder.path,
        path=target,
        base=manifest.base.id,
        revision=manifest.base.revision,
        tensors=len(sizes),
        whole=len(folder.tensors),
        nbytes=job.bytes_to_write,
        whole_nbytes=sum(info.nbytes for info in folder.tensors.values()),
        from_base=tuple(from_base),
        seconds=stopwatch.seconds,
    )


def _brought(manifest: Manifest) -> dict[str, StoredTensor]:
    """Return the value of each output tensor that the base provides, whole or assembled from only its bytes."""
    base_at = {place: manifest.base.tensors[name] for name, place in kept_as_they_are(manifest).items()}
    for name in made_of_base(manifest):
        made = manifest.new_tensors[name]
        base_at[name] = StoredTensor(dtype=made.dtype, shape=made.shape, sha256=made.sha256)
    return base_at


def _shards(
    out: CheckpointFolder, base_at: Mapping[str, StoredTensor], digests: Mapping[str, str]
) -> tuple[Shard, ...]:
    """Return the delta's shards: the output's tensors that the base does not provide, grouped by output shard."""
    own = {
        file: kept
        for file, infos in sorted(in_order(out).items())
        if (kept := [info for info in infos if base_at.get(info.name) != StoredTensor.of(info, digests[info.name])])
    }
    return tuple(
        Shard(f"delta-{number:05d}-of-{len(own):05d}.safetensors", tuple(copied(i.name, i) for i in infos), file)
        for number, (file, infos) in enumerate(own.items(), 1)
    )


def _index(
    out: CheckpointFolder,
    shards: tuple[Shard, ...],
    files: Mapping[str, bytes],
    from_base: dict[str, str],
    digests: Mapping[str, str],
) -> DeltaIndex:
    """Return the sealed index of a delta. Raises BadInput where the output has a shard with an unusual name."""
    try:
        index = DeltaIndex(
            surgeon_delta=1,
            sha256="0" * 64,
            tool=__version__,
            files={name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
            from_base=from_base,
            shards={file: [info.name for info in infos] for file, infos in in_order(out).items()},
            tensors={
                output.name: HeldTensor(
                    dtype=output.recipe.dtype,
                    shape=list(output.recipe.shape),
                    sha256=digests[output.name],
                    shard=shard.file,
                )
                for shard in shards
                for output in shard.outputs
            },
        )
        return index.model_copy(update={"sha256": seal_of(index.model_dump())})
    except ValidationError as error:
        problem = printable(error.errors(include_url=False)[0]["msg"])
        raise BadInput(f"{printable(str(out.path))}: {problem}: a shard's name") from None


# Files of licence terms: they always accompany the weights.
_TERMS = re.compile(r"(LICENSE|LICENCE|NOTICE|USE_POLICY).*")


def _side_files(
    out: CheckpointFolder, base: CheckpointFolder | None, manifest: Manifest, files: dict[str, bytes]
) -> dict[str, str]:
    """Return the digests of side files that the base provides; add the others, licence terms included, to `files`."""
    from_base: dict[str, str] = {}
    # A training run with a `chat_template` has written this file itself.
    named = any(run.config.get("chat_template") for run in manifest.training)
    for name in out.side_files:
        # A delta contains code itself, so that exactly the code in its manifest runs.
        if name in files:
            continue
        content = out.read_side_file(name)
        if base is None:
            brought = name not in manifest.side_files and not (named and name == TEMPLATE_FILE)
        else:
            brought = name in base.side_files and base.read_side_file(name) == content
        if brought and not _TERMS.fullmatch(name):
            from_base[name] = hashlib.sha256(content).hexdigest()
        else:
            files[name] = content
    return from_base


def _small_files(out: CheckpointFolder, manifest: Manifest) -> dict[str, bytes]:
    """Return the output's config, manifest, code and card, unchanged."""
    listing = out.source.listing()
    files = {
        CONFIG_FILE: out.source.small(CONFIG_FILE, max_bytes=MAX_CONFIG_BYTES),
        MANIFEST_FILE: out.source.small(MANIFEST_FILE, max_bytes=MAX_MANIFEST_BYTES),
    }
    for name, digest in manifest.code.items():
        content = out.read_code(name) if CODE_NAME.fullmatch(name) else None
        if content is None or hashlib.sha256(content).hexdigest() != digest:
            raise BadInput(f"{printable(str(out.path / name))}: not the file of code that {MANIFEST_FILE} names")
        files[name] = content
    if RECORD_FILE in listing and RECORD_FILE in manifest.files:
        files[RECORD_FILE] = out.source.small(RECORD_FILE, max_bytes=MAX_SIDE_FILE_BYTES)
    if CARD_FILE in listing:
        files[CARD_FILE] = out.source.small(CARD_FILE, max_bytes=MAX_CARD_BYTES)
    return files


def delta_view(made: MadeDelta) -> RenderableType:
    """Return lines on the delta's size relative to the output, and on its base."""
    base = printable(at_revision(made.base, made.revision))
    return Group(
        Text.assemble(
            ("done ", "bold green"),
            f"{printable(str(made.path))}: {made.tensors} of {made.whole} tensors, {size(made.nbytes)} of"
            f" {size(made.whole_nbytes)}",
            overflow="fold",
        ),
        Text(f"goes onto the base of the last surgery, {base}", style="dim", overflow="fold"),
        Text(f"apply it to its base: surgeon apply --delta {printable(str(made.path))} BASE OUT"),
    )
