"""Classes of a checkpoint's own code, imported as a separate package from the bytes that were read and checked.

Only code passed to `trusted` in this process can run: no other folder, no cache, no Hub. A config names its code by the
code's digest, in a field that no config.json can have.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surgeon.checkpoint.own_code import OwnCode, module_and_class
from surgeon.common.library import LOAD_FAILURES, first_line
from surgeon.errors import BadInput, printable

# check_config refuses config.json files with such a field.
_FIELD = "__code__"
_trusted: dict[str, OwnCode] = {}
# Removed when the process ends; until then Python may read the source again.
_rooms: list[tempfile.TemporaryDirectory[str]] = []


def trusted(config: Mapping[str, Any], code: OwnCode | None) -> dict[str, Any]:
    """Return the config marked as built from `code`, which the user trusts; a copy of it where `code` is None."""
    if code is None:
        return dict(config)
    _trusted[code.digest] = code
    return {**config, _FIELD: code.digest}


def code_of(config: Mapping[str, Any]) -> OwnCode | None:
    """Return the code that a config's model is built from; None where it is transformers' own."""
    return _trusted[config[_FIELD]] if _FIELD in config else None


def own_class(code: OwnCode, auto: str) -> Any:
    """Return the class that the code has for an auto class; None where its `auto_map` names none. This runs the code.

    Raises BadInput, one line, for any exception of the code, and for code that is stored elsewhere.
    """
    named = module_and_class(code, auto)
    if named is None:
        return None
    module, name = named
    try:
        return getattr(importlib.import_module(f"{_package(code)}.{module}"), name)
    except LOAD_FAILURES as error:
        raise BadInput(
            f"{printable(module)}.py: {name}, which config.json's `auto_map` names, cannot be imported"
            f" ({first_line(error)}); install what it needs, or update it for this version of transformers"
        ) from error


def _package(code: OwnCode) -> str:
    """Return the name of the package with this code's modules; its digest separates it from any other code."""
    name = f"surgeon_own_{code.digest}"
    if name not in sys.modules:
        room = tempfile.TemporaryDirectory(prefix="surgeon-own-", ignore_cleanup_errors=True)
        _rooms.append(room)
        for file, content in code.files.items():
            (Path(room.name) / file).write_bytes(content)
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [room.name]
        sys.modules[name] = importlib.util.module_from_spec(spec)
    return name
