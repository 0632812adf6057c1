"""What one execution writes, from what, and to what purpose."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from surgeon._version import __version__
from surgeon.apply.readback import ReadBack
from surgeon.blueprint.draft import Blueprint
from surgeon.blueprint.shards import Shard, is_hole, nbytes
from surgeon.checkpoint.card_metadata import NOTHING_KNOWN, Metadata
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.peft_folder import AdapterFolder
from surgeon.manifest.manifest import BaseId, Manifest, compose
from surgeon.plan.loading import LoadedPlan
from surgeon.runtime.bundle import bundle


class Purpose(Protocol):
    """What a job is for: a surgery (`Growth`), or taking surgeries back (undoing.py)."""

    @property
    def source(self) -> str:
        """What errors call the plan."""

    @property
    def adapters(self) -> Mapping[str, AdapterFolder]:
        """The adapters that recipes import from."""

    def identity(self) -> dict[str, Any]:
        """What the output's bytes depend on beside the base and the blueprint, as JSON data."""

    def code(self, name: str, config: Mapping[str, Any]) -> bytes:
        """The content of one of the blueprint's `code_files`, beside weights of this config."""

    def settle(self, job: Job, proof: ReadBack) -> None:
        """Everything is written and read back: raise BadInput where it must not be published."""

    def manifest(self, job: Job, proof: ReadBack) -> Manifest | None:
        """The output's manifest; None for an output that has none."""

    @property
    def metadata(self) -> Metadata:
        """What the base's card says of licence, languages and the like, for the output's."""


@dataclass(frozen=True)
class Growth:
    """A surgery by a plan.

    `texts` are digests of the texts that it has the base run on, `adapters` what it imports, by the plan's names.
    """

    loaded: LoadedPlan
    base_id: BaseId
    texts: Mapping[str, str] = field(default_factory=dict)
    metadata: Metadata = NOTHING_KNOWN
    adapters: Mapping[str, AdapterFolder] = field(default_factory=dict)

    @property
    def source(self) -> str:
        """The plan's file."""
        return self.loaded.source

    def identity(self) -> dict[str, Any]:
        """The plan, how the base is called, the texts and the adapters."""
        return {
            "plan": self.loaded.plan.model_dump(mode="json"),
            "base_id": [self.base_id.name, self.base_id.revision],
            "texts": dict(self.texts),
            "metadata": asdict(self.metadata),
            "adapters": {name: adapter.facts.identity() for name, adapter in self.adapters.items()},
        }

    def code(self, name: str, config: Mapping[str, Any]) -> bytes:
        """As this version ships it."""
        return bundle(config)

    def settle(self, job: Job, proof: ReadBack) -> None:
        """Hash what the output has no copy of, so that the manifest names the whole base."""
        proof.digest_the_rest()
        for adapter in self.adapters.values():
            adapter.check_unchanged()

    def manifest(self, job: Job, proof: ReadBack) -> Manifest:
        """Everything that was done."""
        return compose(
            self.loaded,
            job.blueprint,
            job.base,
            self.base_id,
            job.shards,
            digests={output.name: proof.digest_of(output) for output in job.blueprint.outputs if output.new},
            base_digests=proof.base_digests,
            maps=proof.maps,
            texts=self.texts,
            adapters={name: adapter.facts for name, adapter in self.adapters.items()},
        )


@dataclass(frozen=True)
class Job:
    """One execution: what is written, from what, to what purpose."""

    purpose: Purpose
    blueprint: Blueprint
    base: CheckpointFolder
    shards: tuple[Shard, ...]
    device: str = "cpu"
    read_back: bool = True
    # Every file beside the shards, where that is known beforehand; None: config, index, code, side files and so on.
    files: Mapping[str, bytes] | None = None

    def code(self, name: str) -> bytes:
        """The content of one of the blueprint's `code_files`."""
        return self.purpose.code(name, self.blueprint.config)

    @property
    def fingerprint(self) -> str:
        """Digest of everything the output's bytes depend on; a staged folder of another is never continued."""
        content = {
            "version": __version__,
            "base": self.base.identity(),
            "config": self.base.config,
            "shards": [[shard.file, len(shard.outputs)] for shard in self.shards],
            "code": {name: hashlib.sha256(self.code(name)).hexdigest() for name in self.blueprint.code_files},
            "device": self.device,
            "files": {name: hashlib.sha256(content).hexdigest() for name, content in (self.files or {}).items()},
            **self.purpose.identity(),
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def bytes_to_write(self) -> int:
        """Bytes of tensor data that are really written (holes are not)."""
        return sum(nbytes(o) for shard in self.shards for o in shard.outputs if not is_hole(o))
