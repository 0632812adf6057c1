"""What a training run puts beside its weights, in folders of its own: the base's own values, and a PEFT adapter.

No loader looks there, and no other command carries it along: it stays with the run.
"""

from __future__ import annotations

import dataclasses
import hashlib

from surgeon.checkpoint.folder import MAX_CONFIG_BYTES, CheckpointFolder, digests_of
from surgeon.checkpoint.header import TensorInfo
from surgeon.checkpoint.peft_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from surgeon.manifest.manifest import AdapterEntry, StoredTensor

KEPT_FOLDER = "base-tensors"
ADAPTER_FOLDER = "adapter"

# An output has one tensor of each name: what one was before training is written under another.
_BEFORE = "before."


def kept_name(name: str) -> str:
    """What the earlier value of the tensor `name` is called in its file."""
    return f"{_BEFORE}{name}"


def kept_tensors(out: CheckpointFolder) -> CheckpointFolder | None:
    """The output with the tensors that lie in `base-tensors/`, by the output's names for them; None where none do.

    Raises BadInput for a file there that is no safetensors file.
    """
    files = _in(out, KEPT_FOLDER, ".safetensors")
    headers = out.source.headers(files)
    tensors = {
        (name := info.name.removeprefix(_BEFORE)): dataclasses.replace(info, name=name)
        for header in headers.values()
        for info in header.tensors
        if info.name.startswith(_BEFORE)
    }
    return dataclasses.replace(out, tensors=tensors, headers=headers, shards=tuple(files)) if tensors else None


def with_kept(out: CheckpointFolder, kept: CheckpointFolder) -> CheckpointFolder:
    """The output, with what lies in `base-tensors/` in the place of what training made of it."""
    found: dict[str, TensorInfo] = {**out.tensors, **{n: i for n, i in kept.tensors.items() if n in out.tensors}}
    return dataclasses.replace(out, tensors=found, headers={**out.headers, **kept.headers})


def adapter_beside(out: CheckpointFolder) -> AdapterEntry | None:
    """What a manifest says of the adapter in `adapter/` as it is; None where there is none. Raises BadInput."""
    weights, config = f"{ADAPTER_FOLDER}/{ADAPTER_WEIGHTS}", f"{ADAPTER_FOLDER}/{ADAPTER_CONFIG}"
    if not {weights, config} <= {*_in(out, ADAPTER_FOLDER, "")}:
        return None
    headers = out.source.headers([weights])
    tensors = {info.name: info for info in headers[weights].tensors}
    digests = digests_of(
        dataclasses.replace(out, tensors=tensors, headers=headers, shards=(weights,)), tensors, lambda _: None
    )
    content = out.source.small(config, max_bytes=MAX_CONFIG_BYTES)
    return AdapterEntry(
        config=hashlib.sha256(content).hexdigest(),
        tensors={name: StoredTensor.of(info, digests[name]) for name, info in sorted(tensors.items())},
    )


def _in(out: CheckpointFolder, folder: str, ending: str) -> list[str]:
    """The files right in a folder of the output."""
    if f"{folder}/" not in out.source.listing():
        return []
    found = [name for name in out.source.tree() if name.startswith(f"{folder}/") and name.endswith(ending)]
    return sorted(name for name in found if name.count("/") == 1)
