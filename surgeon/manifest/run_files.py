"""Files that a training run puts next to its weights: the base's own values and a PEFT adapter, in separate folders.

Loaders do not read these folders. They stay with the run: no other command copies them. A study of tasks adds a record,
whose digest surgery.json then contains.
"""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

from surgeon.checkpoint.folder import MAX_CONFIG_BYTES, RECORD_FILE, CheckpointFolder, digests_of
from surgeon.checkpoint.header import TensorInfo
from surgeon.checkpoint.peft_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from surgeon.common.work_folders import write_durably
from surgeon.manifest.manifest import MANIFEST_FILE, AdapterEntry, StoredTensor
from surgeon.manifest.reading import written_manifest

KEPT_FOLDER = "base-tensors"
ADAPTER_FOLDER = "adapter"
ADAPTER_WEIGHTS_FILE = f"{ADAPTER_FOLDER}/{ADAPTER_WEIGHTS}"
ADAPTER_CONFIG_FILE = f"{ADAPTER_FOLDER}/{ADAPTER_CONFIG}"

# Tensor names in an output are unique, so the value from before training gets a name with this prefix.
_BEFORE = "before."


def kept_name(name: str) -> str:
    """Return the name, in its file, of the earlier value of the tensor `name`."""
    return f"{_BEFORE}{name}"


def kept_tensors(out: CheckpointFolder) -> CheckpointFolder | None:
    """Return the output's folder with only the tensors in `base-tensors/`, under the output's names; None without any.

    Raises BadInput for a file there that is no safetensors file.
    """
    files = _in(out, KEPT_FOLDER, ".safetensors")
    headers = out.source.headers(files)
    tensors = {
        name: dataclasses.replace(info, name=name)
        for header in headers.values()
        for info in header.tensors
        if (name := name_of_kept(info.name)) is not None
    }
    return dataclasses.replace(out, tensors=tensors, headers=headers, shards=tuple(files)) if tensors else None


def name_of_kept(name: str) -> str | None:
    """Return the output tensor whose earlier value has this name in `base-tensors/`; None for other names."""
    return name.removeprefix(_BEFORE) if name.startswith(_BEFORE) else None


def with_kept(out: CheckpointFolder, kept: CheckpointFolder) -> CheckpointFolder:
    """Return the output's folder with tensors of `base-tensors/` in place of their trained values."""
    found: dict[str, TensorInfo] = {**out.tensors, **{n: i for n, i in kept.tensors.items() if n in out.tensors}}
    return dataclasses.replace(out, tensors=found, headers={**out.headers, **kept.headers})


def adapter_beside(out: CheckpointFolder) -> AdapterEntry | None:
    """Return the manifest entry for the adapter in `adapter/` as it is now; None where there is no adapter.

    Reads all bytes of the adapter. Raises BadInput where a file is damaged.
    """
    if not {ADAPTER_WEIGHTS_FILE, ADAPTER_CONFIG_FILE} <= {*_in(out, ADAPTER_FOLDER, "")}:
        return None
    headers = out.source.headers([ADAPTER_WEIGHTS_FILE])
    tensors = {info.name: info for info in headers[ADAPTER_WEIGHTS_FILE].tensors}
    found = dataclasses.replace(out, tensors=tensors, headers=headers, shards=(ADAPTER_WEIGHTS_FILE,))
    digests = digests_of(found, tensors, lambda _: None)
    config = out.source.small(ADAPTER_CONFIG_FILE, max_bytes=MAX_CONFIG_BYTES)
    return AdapterEntry(
        config=hashlib.sha256(config).hexdigest(),
        tensors={name: StoredTensor.of(info, digests[name]) for name, info in sorted(tensors.items())},
    )


def _in(out: CheckpointFolder, folder: str, ending: str) -> list[str]:
    """Return the files directly in a folder of the output whose names end in `ending`, without subfolders, sorted."""
    if f"{folder}/" not in out.source.listing():
        return []
    found = [name for name in out.source.tree() if name.startswith(f"{folder}/") and name.endswith(ending)]
    return sorted(name for name in found if name.count("/") == 1)


def add_record(run: Path, text: str) -> None:
    """Write `continual.json` into an output and its digest into surgery.json, so that checks know the file."""
    write_durably(run / RECORD_FILE, text)
    manifest = written_manifest(run)
    files = manifest.files | {RECORD_FILE: hashlib.sha256(text.encode()).hexdigest()}
    write_durably(run / MANIFEST_FILE, manifest.changed(files=files).to_bytes().decode())
