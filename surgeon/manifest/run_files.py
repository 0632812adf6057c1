"""What a training run puts beside its weights: the base's own values and a PEFT adapter, in folders of their own.

No loader looks there. It stays with the run, and goes into the run's delta; no other command carries it along. A study
of tasks adds a record, which surgery.json then vouches for.
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
        name: dataclasses.replace(info, name=name)
        for header in headers.values()
        for info in header.tensors
        if (name := name_of_kept(info.name)) is not None
    }
    return dataclasses.replace(out, tensors=tensors, headers=headers, shards=tuple(files)) if tensors else None


def name_of_kept(name: str) -> str | None:
    """The tensor of which this one, in `base-tensors/`, holds the earlier value; None for another name."""
    return name.removeprefix(_BEFORE) if name.startswith(_BEFORE) else None


def with_kept(out: CheckpointFolder, kept: CheckpointFolder) -> CheckpointFolder:
    """The output, with what lies in `base-tensors/` in the place of what training made of it."""
    found: dict[str, TensorInfo] = {**out.tensors, **{n: i for n, i in kept.tensors.items() if n in out.tensors}}
    return dataclasses.replace(out, tensors=found, headers={**out.headers, **kept.headers})


def adapter_tensors(out: CheckpointFolder) -> CheckpointFolder | None:
    """The output with the tensors of the adapter in `adapter/` alone; None where there is none. Raises BadInput."""
    if ADAPTER_WEIGHTS_FILE not in files_beside(out):
        return None
    headers = out.source.headers([ADAPTER_WEIGHTS_FILE])
    tensors = {info.name: info for info in headers[ADAPTER_WEIGHTS_FILE].tensors}
    return dataclasses.replace(out, tensors=tensors, headers=headers, shards=(ADAPTER_WEIGHTS_FILE,))


def adapter_beside(out: CheckpointFolder) -> AdapterEntry | None:
    """What a manifest says of the adapter in `adapter/` as it is; None where there is none. Raises BadInput."""
    found = adapter_tensors(out)
    if found is None:
        return None
    digests = digests_of(found, found.tensors, lambda _: None)
    return AdapterEntry(
        config=hashlib.sha256(adapter_config_beside(out)).hexdigest(),
        tensors={name: StoredTensor.of(info, digests[name]) for name, info in sorted(found.tensors.items())},
    )


def adapter_config_beside(out: CheckpointFolder) -> bytes:
    """The config of the adapter in `adapter/`. Raises BadInput where it cannot be read."""
    return out.source.small(ADAPTER_CONFIG_FILE, max_bytes=MAX_CONFIG_BYTES)


def files_beside(out: CheckpointFolder) -> list[str]:
    """The files that training put beside the weights and that a delta carries, by their names in the output."""
    adapter = {ADAPTER_WEIGHTS_FILE, ADAPTER_CONFIG_FILE}
    found = _in(out, ADAPTER_FOLDER, "")
    return [*_in(out, KEPT_FOLDER, ".safetensors"), *(sorted(adapter) if adapter <= {*found} else ())]


def _in(out: CheckpointFolder, folder: str, ending: str) -> list[str]:
    """The files right in a folder of the output."""
    if f"{folder}/" not in out.source.listing():
        return []
    found = [name for name in out.source.tree() if name.startswith(f"{folder}/") and name.endswith(ending)]
    return sorted(name for name in found if name.count("/") == 1)


def add_record(run: Path, text: str) -> None:
    """Write `continual.json` into an output of surgeon and its digest into surgery.json, so that checks know it."""
    write_durably(run / RECORD_FILE, text)
    manifest = written_manifest(run)
    files = manifest.files | {RECORD_FILE: hashlib.sha256(text.encode()).hexdigest()}
    write_durably(run / MANIFEST_FILE, manifest.changed(files=files).to_bytes().decode())
