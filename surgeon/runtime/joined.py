"""Importing a joined file here, as transformers does where it is loaded: what is built and tested is what ships."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from .bundle import CODE_FILE, bundle


def import_bundle(config: Mapping[str, Any]) -> ModuleType:
    """The module that `bundle(config)` is; imported once in a process for each content."""
    return _imported(bundle(config))


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Where joined files lie as long as the process runs: saving a model copies its file from there."""
    return tempfile.TemporaryDirectory(prefix="surgeon-runtime-")


@cache
def _imported(content: bytes) -> ModuleType:
    package = f"surgeon_joined_{hashlib.sha256(content).hexdigest()[:16]}"
    file = Path(_folder().name) / package / CODE_FILE
    file.parent.mkdir()
    file.write_bytes(content)
    # Saved models name their code by the module's last name, and pickles find the module by its whole one.
    parent = ModuleType(package)
    parent.__path__ = [str(file.parent)]
    sys.modules[package] = parent
    name = f"{package}.{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
