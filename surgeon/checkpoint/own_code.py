"""The code that a checkpoint brings for its own model: which files, and what its `auto_map` names in them.

Read as bytes; nothing is imported here. A folder has it once the user trusts it (`--trust-remote-code`).
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

# As transformers reads `auto_map`: a module beside the weights, and a class in it.
_REFERENCE = re.compile(r"[A-Za-z_]\w*\.[A-Za-z_]\w*")
_FILE = re.compile(r"[A-Za-z_]\w{0,99}\.py")


@dataclass(frozen=True)
class OwnCode:
    """The modules beside a checkpoint's weights, by file name, and the classes that its `auto_map` names."""

    files: Mapping[str, bytes]
    classes: Mapping[str, str]

    @property
    def builds_models(self) -> bool:
        """Whether the model is built of it: an `auto_map` may name a tokenizer alone."""
        return builds_models(self.classes)

    @cached_property
    def digest(self) -> str:
        """One digest of all of it."""
        digests = {name: hashlib.sha256(content).hexdigest() for name, content in self.files.items()}
        return hashlib.sha256(json.dumps([digests, dict(self.classes)], sort_keys=True).encode()).hexdigest()


def has_own_code(config: Mapping[str, Any]) -> bool:
    """Whether a config.json says that its model is built of classes beside the weights, which are not surgeon's.

    Those of a grafted model are surgeon's, of this version or another.
    """
    return bool(config.get("auto_map")) and not str(config.get("model_type", "")).startswith(PREFIX)


def builds_models(classes: Mapping[str, object]) -> bool:
    """Whether an `auto_map` names a class for models."""
    return any(auto.startswith("AutoModel") for auto in classes)


def own_code(config: Mapping[str, Any], source: Source, scripts: Iterable[str]) -> OwnCode:
    """The code of a folder that the user trusts. Raises BadInput where a file of it cannot be read.

    Scripts in folders below, or of names that no module has, are none of the model's: nothing can import them.
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
    """The module and the class that the `auto_map` names for an auto class; None where it names none.

    Raises BadInput for code that lies elsewhere, or that is not there.
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
