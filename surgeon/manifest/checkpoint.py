"""A checkpoint opened for research: facts from its files, and its weights on demand."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgeon.anatomy.anatomy import Anatomy
from surgeon.anatomy.dissect import dissect_folder
from surgeon.anatomy.grafted_config import is_encoder
from surgeon.anatomy.limits import context_of, vocabulary_of
from surgeon.anatomy.shared import within
from surgeon.anatomy.skeleton import wordless_auto
from surgeon.checkpoint.folder import RECORD_FILE, CheckpointFolder, digests_of
from surgeon.checkpoint.header import TensorInfo, check_dtype
from surgeon.checkpoint.hub import id_and_revision
from surgeon.checkpoint.labels import is_classifier, label_names
from surgeon.checkpoint.source import MAX_SIDE_FILE_BYTES
from surgeon.common.places import meant
from surgeon.errors import BadInput, printable
from surgeon.grafts.composition import ATTENTION, FFN
from surgeon.manifest.manifest import MANIFEST_FILE, Manifest, StoredTensor
from surgeon.manifest.moves import recorded_tensors
from surgeon.manifest.reading import manifest_of
from surgeon.models.gguf_file import locate_base
from surgeon.models.templates import template_of

if TYPE_CHECKING:
    from surgeon.models.load import Attention


@dataclass(frozen=True, eq=False, repr=False)
class Checkpoint:
    """An opened checkpoint: config, tensor headers and surgery.json have been read and checked, but no weights.

    `name` is the path or id with which it was opened. `repo_id` and `revision` are the Hub's, None for a local folder.
    """

    name: str
    folder: CheckpointFolder
    repo_id: str | None = None
    revision: str | None = None

    def __repr__(self) -> str:
        kind = self.config.get("model_type", "unknown type")
        return f"Checkpoint({self.name!r}, {kind}, {len(self.tensors)} tensors)"

    @property
    def path(self) -> Path:
        """The local folder; for a checkpoint from the Hub, its snapshot."""
        return self.folder.path

    @property
    def id(self) -> str:
        """The id that an output's surgery.json would use for it: the repository's id, or the folder's name."""
        return self.repo_id or self.path.resolve().name

    @property
    def config(self) -> Mapping[str, Any]:
        """The content of config.json."""
        return self.folder.config

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor's dtype, shape and position in its file, by name."""
        return self.folder.tensors

    @property
    def notes(self) -> list[str]:
        """Lines for the user about the folder."""
        return self.folder.notes

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self.folder.tensors.values())

    @cached_property
    def manifest(self) -> Manifest | None:
        """The content of surgery.json; None for a checkpoint that surgeon did not make.

        Raises BadInput for an invalid one.
        """
        return None if self.folder.manifest is None else manifest_of(self.folder)

    @cached_property
    def anatomy(self) -> Anatomy:
        """The roles of its tensors: layers, blocks, sizes. Raises BadInput where its model type cannot be dissected."""
        return dissect_folder(self.folder)

    @property
    def layers(self) -> int:
        """The number of layers."""
        return self.anatomy.sizes.layers

    @property
    def is_encoder(self) -> bool:
        """Whether the model is an encoder: it reads whole sequences and predicts no next token."""
        return is_encoder(self.folder.config)

    @property
    def is_classifier(self) -> bool:
        """Whether the model has a classification head."""
        return is_classifier(self.config)

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of the model's classification head, in order; empty where config.json names none."""
        return label_names(self.config)

    @property
    def context(self) -> int | None:
        """The number of positions for which the model was made; None where config.json does not state it."""
        return context_of(self.config)

    @property
    def vocabulary(self) -> int | None:
        """The number of tokens in the model's vocabulary; None where config.json does not state it."""
        return vocabulary_of(self.config)

    @property
    def chat_template(self) -> str | None:
        """The tokenizer's chat template; None where there is none."""
        return template_of(self.folder)

    def linear_modules(self) -> tuple[list[str], str]:
        """Return (modules, other): attention and FFN modules that a LoRA can adapt, and one matrix that it cannot.

        Modules are given as `targets` names them: by paths within a layer, in the layers' order. `other` is a tensor's
        name, empty where `targets: all` would do. FFNs are left out where one has experts, because PEFT would confuse
        expert modules with the modules next to them.
        """
        linear: dict[str, dict[str, None]] = {role: {} for role in (ATTENTION, FFN)}
        others: dict[str, dict[str, str]] = {role: {} for role in (ATTENTION, FFN)}
        for index, tensors in enumerate(self.anatomy.layers):
            modules = self.anatomy.linear(index)
            for role, block in self.anatomy.blocks(index).items():
                for suffix, info in tensors.items():
                    path = suffix.removesuffix(".weight")
                    if within(suffix, block.split()) and len(info.shape) > 1 and role in linear:
                        if path in modules:
                            linear[role][path] = None
                        else:
                            others[role].setdefault(path, info.name)
        other = next((name for found in others.values() for name in found.values()), "")
        whole = [role for role, found in others.items() if not any("experts" in path.split(".") for path in found)]
        return [path for role in whole for path in linear[role]], other

    def digests(self, advance: Callable[[int], None] = lambda _bytes: None) -> dict[str, str]:
        """Return the hex sha256 of every tensor's bytes; `advance` receives the count of bytes read."""
        return digests_of(self.folder, self.folder.tensors, advance)

    def side_digests(self) -> dict[str, str]:
        """Return the hex sha256 of every file next to the shards, by name, without continual.json (`add_record`)."""
        source = self.folder.source
        others = (*self.folder.shards, RECORD_FILE, f".{RECORD_FILE}.new")
        names = [name for name in source.listing() if not name.endswith("/") and name not in others]
        return {name: hashlib.sha256(source.small(name, max_bytes=MAX_SIDE_FILE_BYTES)).hexdigest() for name in names}

    def changed_tensors(self) -> list[str]:
        """Return the names of tensors that differ from their entries in surgery.json, in dtype, shape or bytes.

        Reads all tensors. Raises BadInput where there is no surgery.json.
        """
        recorded = recorded_tensors(manifest_of(self.folder), file=str(self.path / MANIFEST_FILE))
        digests, infos = self.digests(), self.folder.tensors
        return [name for name, info in infos.items() if recorded.get(name) != StoredTensor.of(info, digests[name])]

    @staticmethod
    def check_dtype(name: str) -> None:
        """Raise BadInput for a name that is neither auto nor a floating dtype."""
        check_dtype(name)

    def load(
        self,
        *,
        dtype: str = "auto",
        device: str = "cpu",
        attention: Attention | None = None,
        say: Callable[[str], None] | None = None,
    ) -> Any:
        """Load the model as it was saved, with its head, in eval mode.

        Args:
            dtype: auto (the checkpoint's), float32, bfloat16 or float16.
            device: A torch device, such as cpu or cuda:0.
            attention: The attention implementation; None: the one that transformers chooses.
            say: Receives a line about tensors that have no place in the model.

        Raises:
            BadInput: The model cannot be loaded, or tensors are missing.
        """
        from surgeon.models.load import CLASSIFIER, load_model
        from surgeon.models.outputs import auto_class, load_encoder

        options: dict[str, Any] = {"dtype": dtype, "device": device, "attention": attention, "say": say}
        if self.is_classifier:
            return load_encoder(self.folder, auto=CLASSIFIER, **options)
        if self.is_encoder or wordless_auto(self.config) is not None:
            return load_encoder(self.folder, auto=auto_class(self.config), **options)
        return load_model(self.folder, **options)

    def tokenizer(self) -> Any:
        """Return the tokenizer in the folder, as transformers loads it. Raises BadInput where it cannot be loaded."""
        from surgeon.models.load import find_tokenizer

        found, why_not = find_tokenizer(self.path)
        if found is None:
            raise BadInput(f"{printable(str(self.path))}: {why_not}; add its tokenizer files")
        return found


def open_checkpoint(model: str | Path, *, revision: str | None = None, trust_remote_code: bool = False) -> Checkpoint:
    """Open a checkpoint: a folder, or `user/name[@revision]` on the Hub, downloaded where necessary.

    Headers, config and surgery.json are read and checked, weights are not. Code in the folder is refused without
    `trust_remote_code`. Raises BadInput, in one line, for the first thing that is missing or wrong.
    """
    name = str(model)
    located = locate_base(name, revision=revision, code=trust_remote_code)
    folder = CheckpointFolder.open(located.path, trust_remote_code=trust_remote_code)
    return Checkpoint(name, folder, located.repo_id, located.revision)


def check_model(model: str | Path, *, trust_remote_code: bool = False) -> None:
    """Raise BadInput for anything that cannot be a checkpoint: a folder that cannot be opened, or an invalid Hub id.

    The Hub itself is not called, so that such errors are reported before any download.
    """
    if Path(meant(str(model))).exists():
        open_checkpoint(model, trust_remote_code=trust_remote_code)
    else:
        id_and_revision(str(model))
