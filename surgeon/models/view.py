"""Views: what transformers sees of a folder, a private folder with links to checked shards and files written here.

Other files next to the weights (adapters, other indexes, code) are not in it, and config.json contains only what
describes the model. Nothing large is read or copied.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from surgeon.checkpoint.folder import CONFIG_FILE, CheckpointFolder
from surgeon.checkpoint.source import MAX_SIDE_FILE_BYTES, LocalSource, is_side_file, read_capped, resolved
from surgeon.checkpoint.strict_json import json_object
from surgeon.checkpoint.trust import MAX_CODE_BYTES, looked_in, only_in_code, without_auto_map
from surgeon.checkpoint.weights import INDEX_FILE, SINGLE_FILE
from surgeon.common.disk_space import writing
from surgeon.common.library import described, has_type
from surgeon.errors import BadInput

# A folder with none of these has no tokenizer; any other failure to load one gets a message of its own.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
)
# The files of a processor of images and text, besides its tokenizer's.
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
# Side files that are not part of a tokenizer, though transformers reads some of them when it makes one. Audio settings
# name a model elsewhere, which transformers would load; videos are left out (`find_processor`).
_NOT_A_TOKENIZER = frozenset(
    {"generation_config.json", "audio_tokenizer_config.json", "video_preprocessor_config.json", *PROCESSOR_FILES}
)
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", *PROCESSOR_FILES)
_POSITIONS = frozenset({"rope_scaling", "rope_parameters"})

# Settings that transformers' tokenizers pass to code that opens files, or use as paths; transformers saves such paths
# itself.
_LOADING = frozenset(
    {
        "init_inputs",
        "tokenizer_object",
        "cache_dir",
        "token",
        "revision",
        "subfolder",
        "proxies",
        "force_download",
        "local_files_only",
        "is_local",
        "trust_remote_code",
        "code_revision",
        "name_or_path",
        "audio_tokenizer",
    }
)


@contextlib.contextmanager
def view_of_model(folder: CheckpointFolder, config: Mapping[str, Any]) -> Iterator[Path]:
    """Yield a temporary folder with `config` as config.json, the index, and links to the shards of `folder`.

    It includes the folder's scripts where the model is built from the folder's own classes. Raises BadInput where a
    shard has changed since `folder` was opened, or (caused by an OSError) no folder can be made.
    """
    with _private_folder(folder.path) as view:
        with writing(view):
            _write(view / CONFIG_FILE, config)
            for file in folder.shards:
                os.close(folder.open_shard(file))
                (view / file).parent.mkdir(parents=True, exist_ok=True)
                (view / file).symlink_to(resolved(folder.path, file).absolute())
            if folder.shards != (SINGLE_FILE,):
                places = {name: info.file for name, info in folder.tensors.items()}
                _write(view / INDEX_FILE, {"metadata": {}, "weight_map": places})
            if folder.classes == "own":
                for name in folder.scripts:
                    (view / name).parent.mkdir(parents=True, exist_ok=True)
                    (view / name).write_bytes(read_capped(folder.path, name, max_bytes=MAX_CODE_BYTES))
        yield view


@contextlib.contextmanager
def view_of_tokenizer(folder: Path, *, images: bool = False) -> Iterator[Path]:
    """Yield a temporary folder with those files of `folder`'s tokenizer that an output keeps.

    With `images` it also has the files of a processor of images and text. Files that an output would not keep (links
    out of the folder, large ones) are not in it. Raises BadInput where there is no such folder, or none can be made.
    """
    files = (CONFIG_FILE, *TOKENIZER_FILES, *(PROCESSOR_FILES if images else ()))
    with _private_folder(folder) as view:
        listing = LocalSource(folder).listing()
        beside = _beside(folder, listing)
        for name, size in listing.items():
            wanted = name in files or (is_side_file(name) and name not in _NOT_A_TOKENIZER)
            if wanted and size <= MAX_SIDE_FILE_BYTES:
                with contextlib.suppress(BadInput):
                    _show(folder, name, view, beside)
        yield view


def _beside(folder: Path, listing: Mapping[str, int]) -> dict[str, Any]:
    """Return the settings in which transformers looks for a class's name; unreadable files count as empty."""
    found: list[dict[str, Any]] = []
    for name in (CONFIG_FILE, _SETTINGS[0]):
        content = b""
        with contextlib.suppress(BadInput):
            content = read_capped(folder, name, max_bytes=MAX_SIDE_FILE_BYTES) if name in listing else b""
        found.append(json_object(content))
    return looked_in(*found)


def _show(folder: Path, name: str, view: Path, beside: Mapping[str, Any]) -> None:
    """Put one file of a tokenizer into the view: settings filtered to those of the tokenizer, other files as links."""
    (view / name).parent.mkdir(exist_ok=True)
    if name not in (CONFIG_FILE, *_SETTINGS):
        (view / name).symlink_to(resolved(folder, name).absolute())
        return
    content = read_capped(folder, name, max_bytes=MAX_SIDE_FILE_BYTES)
    settings = json_object(content)
    if not settings:
        # Copied unchanged: transformers reports what is wrong with it.
        (view / name).write_bytes(content)
        return
    if name == CONFIG_FILE:
        # The model's origin is one of the hints by which transformers chooses a tokenizer's class.
        hint = {key: settings[key] for key in ("_name_or_path",) if isinstance(settings.get(key), str)}
        kept = without_auto_map(described(settings)) | hint
        if not has_type(settings.get("model_type")):
            # For a type that it does not have, such as an output with grafts, transformers fails at scaled positions
            # (Llama 3.1).
            kept = {key: value for key, value in kept.items() if key not in _POSITIONS}
    else:
        settings = settings if only_in_code(settings, beside) else without_auto_map(settings)
        kept = {key: _parts(value) for key, value in settings.items() if not _opens_files(key)}
    _write(view / name, _own_classes(kept))


def _parts(value: Any) -> Any:
    """Return the settings of a processor's part, filtered like those of the whole."""
    if not isinstance(value, dict):
        return value
    return _own_classes({key: inner for key, inner in value.items() if not _opens_files(key)})


def _opens_files(key: str) -> bool:
    """Return whether the setting `key` may make transformers open a file or run code; private settings count."""
    return key.startswith("_") or key.endswith(("_file", "_files")) or key in _LOADING


def _own_classes(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings without class names of a wrong sort: transformers would call their `from_pretrained` anyway."""
    return {key: value for key, value in settings.items() if key not in _SORTS or _is_of(value, _SORTS[key])}


# Settings that name a class, and the transformers class from which it must be derived.
_SORTS = {
    "tokenizer_class": "PreTrainedTokenizerBase",
    "processor_class": "ProcessorMixin",
    "image_processor_type": "ImageProcessingMixin",
}


def _is_of(name: Any, sort: str) -> bool:
    """Return whether a setting names a class derived from `sort`; True also for None and for unknown names."""
    import transformers

    if not isinstance(name, str):
        return name is None
    found = getattr(transformers, name, None)
    return found is None or (isinstance(found, type) and issubclass(found, getattr(transformers, sort)))


def _write(path: Path, content: Mapping[str, Any]) -> None:
    """Write settings as a JSON file."""
    path.write_text(json.dumps(content), encoding="utf-8")


@contextlib.contextmanager
def _private_folder(of: Path) -> Iterator[Path]:
    """Yield a private temporary folder with the name of `of`: transformers stores a folder's code under that name."""
    try:
        # If links and a few lines cannot be removed, that is no reason to fail after the work is done.
        holder = tempfile.TemporaryDirectory(prefix="surgeon-view-", ignore_cleanup_errors=True)
    except OSError as error:
        raise BadInput(
            f"no temporary folder can be made ({error.strerror}); set TMPDIR to a folder that you may write to"
        ) from error
    with holder as room:
        view = Path(room) / (of.resolve().name or "checkpoint")
        with writing(view):
            view.mkdir(mode=0o700)
        yield view
