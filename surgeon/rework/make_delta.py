"""`surgeon delta`: write what an output has and its base lacks."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Group, RenderableType
from rich.text import Text

from surgeon._version import __version__
from surgeon.apply.job import Job, begins_in, copied, origins_in
from surgeon.apply.readback import ReadBack
from surgeon.apply.write import check_output, execute
from surgeon.blueprint.recipes import numel
from surgeon.blueprint.shards import Shard
from surgeon.checkpoint.card_metadata import Metadata, metadata_of
from surgeon.checkpoint.folder import (
    CARD_FILE,
    CONFIG_FILE,
    DELTA_FILE,
    MAX_CARD_BYTES,
    MAX_CONFIG_BYTES,
    MAX_MANIFEST_BYTES,
    CheckpointFolder,
    digests_of,
)
from surgeon.checkpoint.header import TensorInfo
from surgeon.checkpoint.staging import check_destination
from surgeon.common.formatting import size
from surgeon.common.listener import Listener, Quiet, Stopwatch
from surgeon.errors import BadInput, printable
from surgeon.manifest.card import delta_card
from surgeon.manifest.manifest import MANIFEST_FILE, Manifest, manifest_of, places_of
from surgeon.rework.delta_folder import CODE_NAME, KEPT_CARD, DeltaIndex, HeldTensor


@dataclass(frozen=True)
class MadeDelta:
    """A delta of `out` that was written: `tensors` of the output's `whole` are in it, the rest `base` (of the output's
    last surgery) brings, as it does the small files `from_base`."""

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
        """As plain data for `--json`."""
        return {
            "out": str(self.out),
            "path": str(self.path),
            "base": self.base,
            "revision": self.revision,
            "tensors": self.tensors,
            "whole": self.whole,
            "bytes": self.nbytes,
            "whole_bytes": self.whole_nbytes,
            "from_base": list(self.from_base),
            "seconds": self.seconds,
        }


def make_delta(
    out: str | Path,
    dest: str | Path,
    *,
    base: str | Path | None = None,
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> MadeDelta:
    """Write what `out` has and the base of its last surgery lacks into the new folder `dest`.

    That is every tensor that is not the base's byte for byte in its place, config.json, manifest, code and cards; the
    tokenizer and other side files stay out, as the base brings them. With `base` (a folder) those that it lacks or has
    otherwise go in. `dest` is absent or complete at any moment. Raises BadInput.
    """
    folder = CheckpointFolder.open(Path(out), trust_remote_code=trust_remote_code)
    other = CheckpointFolder.open(Path(base), trust_remote_code=trust_remote_code) if base is not None else None
    return make_delta_of(folder, Path(dest), other, metadata_of(folder), listener or Quiet())


def make_delta_of(
    folder: CheckpointFolder,
    target: Path,
    base: CheckpointFolder | None,
    metadata: Metadata,
    listener: Listener,
    *,
    repo_id: str | None = None,
    verified: Sequence[str] = (),
) -> MadeDelta:
    """`make_delta` of an opened checkpoint; `repo_id` and `verified` go into the card that it is pushed with."""
    manifest = manifest_of(folder)
    check_destination(target, folder.path)
    listener.begin("reading", sum(info.nbytes for info in folder.tensors.values()))
    digests = digests_of(folder, folder.tensors, listener.advance)
    shards = _shards(folder, manifest, digests)
    files = _small_files(folder, manifest)
    from_base = _side_files(folder, base, files)
    index = _index(folder, shards, files, from_base, digests)
    sizes = {output.name: numel(output.recipe) for shard in shards for output in shard.outputs}
    own_card = delta_card(manifest, folder.config, sizes, metadata, repo_id=repo_id, verified=verified)
    if CARD_FILE in files:
        files[KEPT_CARD] = files.pop(CARD_FILE)

    def finish(proof: ReadBack) -> Mapping[str, bytes]:
        """BadInput where a tensor is no longer what it was when the delta's list was made."""
        for name, digest in proof.digests.items():
            if digests[name] != digest:
                raise BadInput(f"{printable(name)}: changed while the delta was made; start again when nothing writes")
        return {}

    job = Job(
        shards=shards,
        origins=origins_in(folder, shards),
        begins=begins_in(folder, shards),
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


def _shards(out: CheckpointFolder, manifest: Manifest, digests: Mapping[str, str]) -> tuple[Shard, ...]:
    """The tensors of the output, by its shards, that are not the base's in their place."""
    base_at = {place: manifest.base.tensors[name] for name, place in places_of(manifest).items()}
    own: dict[str, list[TensorInfo]] = {}
    for info in sorted(out.tensors.values(), key=lambda info: info.begin):
        if base_at.get(info.name) != digests[info.name]:
            own.setdefault(info.file, []).append(info)
    return tuple(
        Shard(f"delta-{number:05d}-of-{len(own):05d}.safetensors", tuple(copied(i.name, i) for i in infos), file)
        for number, (file, infos) in enumerate(sorted(own.items()), 1)
    )


def _index(
    out: CheckpointFolder,
    shards: tuple[Shard, ...],
    files: Mapping[str, bytes],
    from_base: dict[str, str],
    digests: Mapping[str, str],
) -> DeltaIndex:
    order: dict[str, list[str]] = {file: [] for file in out.shards}
    for info in sorted(out.tensors.values(), key=lambda info: info.begin):
        order[info.file].append(info.name)
    try:
        return DeltaIndex(
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
        told = printable(error.errors(include_url=False)[0]["msg"])
        raise BadInput(f"{printable(str(out.path))}: {told}: a shard's name") from None


# Terms go where the weights go.
_TERMS = re.compile(r"(LICENSE|LICENCE|NOTICE|USE_POLICY).*")


def _side_files(out: CheckpointFolder, base: CheckpointFolder | None, files: dict[str, bytes]) -> dict[str, str]:
    """Digests of the side files that the base brings; the others, terms among them, are added to `files`."""
    from_base: dict[str, str] = {}
    for name in out.side_files:
        content = out.read_side_file(name)
        if _TERMS.fullmatch(name) or (base is not None and not _has(base, name, content)):
            files[name] = content
        else:
            from_base[name] = hashlib.sha256(content).hexdigest()
    return from_base


def _small_files(out: CheckpointFolder, manifest: Manifest) -> dict[str, bytes]:
    """Config, manifest, code and card of the output, as they are."""
    listing = out.source.listing()
    files = {
        CONFIG_FILE: out.source.small(CONFIG_FILE, max_bytes=MAX_CONFIG_BYTES),
        MANIFEST_FILE: out.source.small(MANIFEST_FILE, max_bytes=MAX_MANIFEST_BYTES),
    }
    for name, digest in manifest.code.items():
        content = out.read_code(name) if CODE_NAME.fullmatch(name) else None
        if content is None or hashlib.sha256(content).hexdigest() != digest:
            raise BadInput(f"{printable(str(out.path / name))}: not the file of code that {MANIFEST_FILE} tells of")
        files[name] = content
    if CARD_FILE in listing:
        files[CARD_FILE] = out.source.small(CARD_FILE, max_bytes=MAX_CARD_BYTES)
    return files


def _has(base: CheckpointFolder, name: str, content: bytes) -> bool:
    return name in base.side_files and base.read_side_file(name) == content


def delta_view(made: MadeDelta) -> RenderableType:
    """How much of the output the delta is, and the base it goes onto."""
    base = printable(made.base + (f"@{made.revision}" if made.revision else ""))
    return Group(
        Text.assemble(
            ("done ", "bold green"),
            f"{printable(str(made.path))}: {made.tensors} of {made.whole} tensors, {size(made.nbytes)} of"
            f" {size(made.whole_nbytes)}",
            overflow="fold",
        ),
        Text(f"goes onto the base of the last surgery, {base}", style="dim", overflow="fold"),
        Text(f"put it back: surgeon apply --delta {printable(str(made.path))} BASE OUT"),
    )
