"""The code that a checkpoint contains for its own model: its files, and the classes that its `auto_map` names in them.

The code is read as bytes; nothing is imported here. A folder has it only if the user trusts it (`--trust-remote-code`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from surgeon.checkpoint.source import Source
from surgeon.checkpoint.trust import MAX_CODE_BYTES
from surgeon.errors import BadInput, printable
from surgeon.grafts.bundle import CODE_FILE
from surgeon.grafts.composition import PREFIX

# The form of an `auto_map` entry in transformers: a module next to the weights, and a class in it.
_REFERENCE = re.compile(r"[A-Za-z_]\w*\.[A-Za-z_]\w*")
_FILE = re.compile(r"[A-Za-z_]\w{0,99}\.py")


@dataclass(frozen=True)
class OwnCode:
    """The Python modules next to a checkpoint's weights, by file name, and the classes that its `auto_map` names."""

    files: Mapping[str, bytes]
    classes: Mapping[str, str]

    @property
    def builds_models(self) -> bool:
        """Whether the model is built of this code: an `auto_map` may name only a tokenizer."""
        return builds_models(self.classes)

    @cached_property
    def digest(self) -> str:
        """One digest of all files and class names."""
        digests = {name: hashlib.sha256(content).hexdigest() for name, content in self.files.items()}
        return hashlib.sha256(json.dumps([digests, dict(self.classes)], sort_keys=True).encode()).hexdigest()


def has_own_code(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json names model classes next to the weights that are not surgeon's.

    The classes of a grafted model are surgeon's, of this version or another.
    """
    return bool(config.get("auto_map")) and not str(config.get("model_type", "")).startswith(PREFIX)


def builds_models(classes: Mapping[str, object]) -> bool:
    """Return whether an `auto_map` names a model class."""
    return any(auto.startswith("AutoModel") for auto in classes)


def own_code(config: Mapping[str, Any], source: Source, scripts: Iterable[str]) -> OwnCode:
    """Return the code of a folder that the user trusts. Raises BadInput where a code file cannot be read.

    Scripts in subfolders, or with names that no module can have, are left out: nothing can import them.
    """
    files: dict[str, bytes] = {}
    for name in scripts:
        if _FILE.fullmatch(name) is None:
            continue
        if name == CODE_FILE:
            raise BadInput(f"{source.shown}: {name} is what surgeon calls its own code; rename the file, or remove it")
        files[name] = source.small(name, max_bytes=MAX_CODE_BYTES)
    mapped = config.get("auto_map")
    classes = (
        {key: value for key, value in mapped.items() if isinstance(value, str)} if isinstance(mapped, dict) else {}
    )
    return OwnCode(files, classes)


def module_and_class(code: OwnCode, auto: str) -> tuple[str, str] | None:
    """Return the module and class that `auto_map` names for an auto class; None where it names none.

    Raises BadInput for code in another repository, or code that is missing.
    """
    reference = code.classes.get(auto)
    if reference is None:
        return None
    shown = printable(reference)
    if _REFERENCE.fullmatch(reference) is None:
        raise BadInput(
            f"config.json: `auto_map` names {shown} for {auto}; surgeon runs code that lies beside the weights alone:"
            " copy the files of that repository here, and name them without it"
        )
    module, _, name = reference.partition(".")
    if f"{module}.py" not in code.files:
        raise BadInput(
            f"config.json: `auto_map` names {shown} for {auto}, but {module}.py is not beside the weights; put it there"
        )
    return module, name
