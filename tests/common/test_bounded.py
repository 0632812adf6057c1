"""Numbers of files: each has an upper bound in its type, so that none is counted up to that takes memory or hours."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import surgeon
from surgeon.common.schema import Bounded
from tests.commands import refused
from tests.decoders import tiny_decoder
from tests.house import HERE
from tests.manifest.edits import edited


def _models(of: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for model in of.__subclasses__():
        yield model
        yield from _models(model)


def _unbounded(schema: Any, model: type[BaseModel] | None = None) -> Iterator[str]:
    """Numbers of a core schema without an upper bound, but for those of models within, which are asked themselves."""
    if isinstance(schema, dict):
        if schema.get("type") in ("int", "float") and not schema.keys() & {"le", "lt"}:
            yield str(schema)
        if schema.get("type") == "model" and schema["cls"] is not model:
            return
        schema = [value for key, value in schema.items() if key not in ("metadata", "serialization")]
    for each in schema if isinstance(schema, list | tuple) else ():
        yield from _unbounded(each, model)


def test_every_number_that_a_file_brings_has_a_bound() -> None:
    for module, file in HERE.modules.items():
        if "pydantic" in file.read_text(encoding="utf-8") or "Spec)" in file.read_text(encoding="utf-8"):
            importlib.import_module(module)
    models = {each for each in _models(BaseModel) if each.__module__.startswith("surgeon.")}
    # The package's own table, and answers about a config that only this user's key signs.
    of_ours = {each for each in models if each.__module__.startswith("surgeon.anatomy.")}
    assert len(models - of_ours) > 100
    for model in models - of_ours:
        assert issubclass(model, Bounded), model
        model.model_rebuild()
        assert not [*_unbounded(model.__pydantic_core_schema__, model)], model


@pytest.mark.parametrize("number", [300_000_000, 10**13, 10**40])
def test_a_number_of_a_sealed_manifest_takes_no_memory(number: int, plan: Callable[..., Path], tmp_path: Path) -> None:
    base, out = tiny_decoder(tmp_path / "base", "llama"), tmp_path / "out"
    surgeon.apply(plan({"op": "insert_layers", "where": {"every": 2}, "init": {"kind": "copy"}}), str(base), out)
    edited(out, lambda manifest: manifest["base"].update(layers=number), seal=True)
    for command in (["inspect", out], ["verify", "--static", base, out], ["revert", out, tmp_path / "again"]):
        told = refused(*command)
        assert "surgery.json" in told
        assert "base.layers" in told
