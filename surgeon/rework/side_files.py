"""The files next to a run's weights, in its delta: the values from before training that it kept, and its adapter.

Most tensors in `base-tensors/` equal the delta's base, which provides them: only tensors that the base lacks are
written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from surgeon.blueprint.blueprint import Output
from surgeon.blueprint.recipes import Copy
from surgeon.blueprint.shards import Shard
from surgeon.checkpoint.folder import CheckpointFolder, digests_of
from surgeon.checkpoint.header import TensorInfo
from surgeon.checkpoint.piece_bytes import places_of
from surgeon.checkpoint.pieces import Pieces
from surgeon.errors import BadInput, printable
from surgeon.manifest.manifest import MANIFEST_FILE, Manifest, StoredTensor
from surgeon.manifest.run_files import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FOLDER,
    ADAPTER_WEIGHTS_FILE,
    KEPT_FOLDER,
    adapter_config_beside,
    adapter_tensors,
    kept_name,
    kept_tensors,
    name_of_kept,
)
from surgeon.writing.job import in_order


@dataclass(frozen=True)
class Beside:
    """The files next to a run's weights: `held` gives their tensors in the order of their bytes, by the names there.

    `digests` and `places` belong to these tensors; `files` are the small files.
    """

    held: Mapping[str, Mapping[str, TensorInfo]]
    digests: Mapping[str, str]
    places: dict[str, Pieces]
    files: Mapping[str, bytes]

    @classmethod
    def of(cls, out: CheckpointFolder, manifest: Manifest) -> Beside:
        """Return the files next to the weights of `out`. Raises BadInput where they differ from the manifest."""
        held: dict[str, dict[str, TensorInfo]] = {}
        digests: dict[str, str] = {}
        files: dict[str, bytes] = {}
        if manifest.kept and (kept := kept_tensors(out)) is not None:
            found = digests_of(kept, kept.tensors, lambda _: None)
            _check(found, manifest.kept, out, KEPT_FOLDER)
            digests |= {kept_name(name): digest for name, digest in found.items()}
            held |= {file: {kept_name(info.name): info for info in infos} for file, infos in in_order(kept).items()}
            held = {file: infos for file, infos in held.items() if infos}
        if manifest.adapter is not None and (adapter := adapter_tensors(out)) is not None:
            found = digests_of(adapter, adapter.tensors, lambda _: None)
            content = adapter_config_beside(out)
            told = {name: tensor.sha256 for name, tensor in manifest.adapter.tensors.items()}
            _check(found, told, out, ADAPTER_FOLDER)
            if hashlib.sha256(content).hexdigest() != manifest.adapter.config:
                raise _another(out, ADAPTER_CONFIG_FILE, ADAPTER_FOLDER)
            digests |= found
            held |= {file: {info.name: info for info in infos} for file, infos in in_order(adapter).items()}
            files[ADAPTER_CONFIG_FILE] = content
        places = places_of({name: info for infos in held.values() for name, info in infos.items()})
        return cls(held, digests, places, files)

    def lacked_by(self, base_at: Mapping[str, StoredTensor]) -> tuple[Shard, ...]:
        """Return shards of a delta with the tensors that its base, which provides `base_at`, lacks."""
        own: list[list[tuple[str, TensorInfo]]] = []
        for infos in self.held.values():
            lacked = [
                (name, info)
                for name, info in infos.items()
                if base_at.get(name_of_kept(name) or "") != StoredTensor.of(info, self.digests[name])
            ]
            own += [lacked] if lacked else []
        return tuple(
            Shard(
                f"beside-{number:05d}-of-{len(own):05d}.safetensors",
                tuple(Output(name, Copy.of(info), None) for name, info in infos),
                None,
            )
            for number, infos in enumerate(own, 1)
        )


def _check(found: Mapping[str, str], told: Mapping[str, str], out: CheckpointFolder, folder: str) -> None:
    """Raise BadInput where the digests of the files in `folder` differ from the manifest's digests."""
    for name in sorted({**found, **told}):
        if found.get(name) != told.get(name):
            raise _another(out, name, folder)


def _another(out: CheckpointFolder, name: str, folder: str) -> BadInput:
    """Return the error for a file or tensor in `folder` that differs from the manifest."""
    return BadInput(
        f"{printable(str(out.path / folder))}: {printable(name)} is not what {MANIFEST_FILE} says, so it was changed"
        f" since; remove {folder}/ to make the delta without it, or train again"
    )


def other_than_trained(beside: Mapping[str, list[str]], manifest: Manifest, files: Mapping[str, bytes]) -> str | None:
    """Return how the files next to the weights in a delta's index contradict its manifest; None where they agree.

    `beside` are their tensors, `files` the small files. Digests of tensors are compared later, once they are read.
    """
    adapter = beside.get(ADAPTER_WEIGHTS_FILE)
    kept = {name for file, names in beside.items() if file != ADAPTER_WEIGHTS_FILE for name in names}
    if kept and kept != {kept_name(name) for name in manifest.kept}:
        return f"`beside` has other tensors in {KEPT_FOLDER}/ than {MANIFEST_FILE} names"
    if (adapter is None) != (ADAPTER_CONFIG_FILE not in files):
        return f"`beside` and `files` do not agree on {ADAPTER_FOLDER}/"
    if adapter is None:
        return None
    if manifest.adapter is None or {*adapter} != manifest.adapter.tensors.keys():
        return f"`beside` has another adapter than {MANIFEST_FILE} names"
    if hashlib.sha256(files[ADAPTER_CONFIG_FILE]).hexdigest() != manifest.adapter.config:
        return f"{ADAPTER_CONFIG_FILE} is not what {MANIFEST_FILE} says"
    return None
