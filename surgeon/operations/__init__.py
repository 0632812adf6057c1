"""The operations a plan can use: those of papers, one file each here, and all others, one file each in `surgeon/edits`.

An operation is a pydantic spec (what the plan may contain) with a method `edit(draft, facts)` that changes the draft
and returns an `OperationRecord`; everything else about it is in its class too (operation.py). An edit is found by its
file; no list names it.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from pkgutil import iter_modules
from typing import Annotated, Any, Union

from pydantic import Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema

from surgeon.common.plugins import Plugin, Registry, wrong_kind
from surgeon.errors import printable
from surgeon.operations.control_llm import ControlLLM
from surgeon.operations.gated_adapters import GatedAdapters
from surgeon.operations.insert_layers import InsertLayers
from surgeon.operations.mixture_of_control import MixtureOfControl
from surgeon.operations.operation import Legend, Operation, Origin, Paper, TrainingDefaults
from surgeon.operations.pmoe_experts import PMoEExperts
from surgeon.operations.stack_layers import StackLayers

GROUP = "surgeon.operations"
_OF_PAPERS: tuple[type[Operation], ...] = (
    InsertLayers,
    StackLayers,
    ControlLLM,
    GatedAdapters,
    PMoEExperts,
    MixtureOfControl,
)


def _built_in() -> dict[str, type[Operation]]:
    """Return the operations by key: the papers' ones, and the one of each module of `surgeon/edits` that has one."""
    found = list(_OF_PAPERS)
    for file in iter_modules(import_module("surgeon.edits").__path__, "surgeon.edits."):
        made = (each for each in vars(import_module(file.name)).values() if isinstance(each, type))
        found += [each for each in made if issubclass(each, Operation) and each.__module__ == file.name]
    return {operation.key("op"): operation for operation in found}


def _admitted(plugin: Plugin) -> type[Operation]:
    """Return a plugin's operation.

    Raises BadInput where it is no subclass of Operation, its `op` is not the plugin's name, or it has no `training`.
    """
    value = plugin.value
    if not (isinstance(value, type) and issubclass(value, Operation)):
        raise wrong_kind(plugin, GROUP, "a subclass of surgeon.operations.operation.Operation")
    if value.key("op") != plugin.name:
        raise wrong_kind(plugin, GROUP, f"called as its `op`, `{printable(value.key('op'))}`")
    if not isinstance(getattr(value, "training", None), TrainingDefaults):
        raise wrong_kind(plugin, GROUP, "an operation whose `training` is a TrainingDefaults")
    return value


# The key in plans → the operation; plugins' operations come after the built-in ones.
OPERATIONS: Registry[type[Operation]] = Registry(GROUP, _built_in, _admitted)


class AnyOperation:
    """A marker for a plan's field that accepts every operation by its `op`, looked up when the schema is built."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema of a union of all operations, selected by `op`."""
        every: Any = Union[tuple(OPERATIONS.values())]  # noqa: UP007
        return handler.generate_schema(Annotated[every, Field(discriminator="op")])


def papers_of(done: Iterable[tuple[str, Iterable[str]]]) -> list[Paper]:
    """Return the papers of operations, each paper once.

    Each operation is given by its key and the inits of the layers that it made. An unknown operation (of a newer
    surgeon, or of a plugin that is not installed) has no papers.
    """
    found = [paper for op, inits in done if op in OPERATIONS for paper in OPERATIONS[op].papers_for(inits)]
    return list(dict.fromkeys(found))


def origin_of(op: str, init: str) -> Origin:
    """Return how pictures show a layer that operation `op` made with `init`; `made` where the operation is unknown."""
    return OPERATIONS[op].origin_of(init) if op in OPERATIONS else "made"


def legends() -> dict[str, Legend]:
    """Return the legends of grafts, by the first letter of their signs, in the order of the operations."""
    return {letter: legend for operation in OPERATIONS.values() for letter, legend in operation.legend.items()}
