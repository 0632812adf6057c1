"""The operations a plan can ask for: one file each, listed here.

An operation is a pydantic spec (what the plan may say) with a method `edit(draft, facts)` that changes the
draft and returns an `OperationRecord`; everything else that the house needs to know of it is in its class too
(operation.py). A new operation is one file here and its line in the table below.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Union

from pydantic import Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema

from surgeon.common.plugins import Plugin, Registry, wrong_kind
from surgeon.errors import printable
from surgeon.operations.add_experts import AddExperts
from surgeon.operations.control_llm import ControlLLM
from surgeon.operations.dequantise import Dequantise
from surgeon.operations.domain_gate import DomainGate
from surgeon.operations.drop_experts import DropExperts
from surgeon.operations.drop_layers import DropLayers
from surgeon.operations.extract_text import ExtractText
from surgeon.operations.fold_adapters import FoldAdapters
from surgeon.operations.gated_adapters import GatedAdapters
from surgeon.operations.grow_vocabulary import GrowVocabulary
from surgeon.operations.insert_layers import InsertLayers
from surgeon.operations.merge_adapter import MergeAdapter
from surgeon.operations.merge_branches import MergeBranches
from surgeon.operations.mixture_of_control import MixtureOfControl
from surgeon.operations.operation import Legend, Operation, Origin, Paper
from surgeon.operations.pad_to import PadTo
from surgeon.operations.pmoe_experts import PMoEExperts
from surgeon.operations.stack_layers import StackLayers
from surgeon.operations.trim_vocabulary import TrimVocabulary
from surgeon.operations.untie_embeddings import UntieEmbeddings
from surgeon.operations.upcycle_experts import UpcycleExperts
from surgeon.operations.widen_attention import WidenAttention
from surgeon.operations.widen_ffn import WidenFFN
from surgeon.operations.widen_hidden import WidenHidden

GROUP = "surgeon.operations"
_BUILT_IN: tuple[type[Operation], ...] = (
    InsertLayers,
    StackLayers,
    ControlLLM,
    GatedAdapters,
    PMoEExperts,
    MixtureOfControl,
    DomainGate,
    MergeBranches,
    GrowVocabulary,
    TrimVocabulary,
    UntieEmbeddings,
    ExtractText,
    Dequantise,
    UpcycleExperts,
    DropLayers,
    DropExperts,
    AddExperts,
    FoldAdapters,
    WidenFFN,
    WidenAttention,
    WidenHidden,
    MergeAdapter,
    PadTo,
)


def _admitted(plugin: Plugin) -> type[Operation]:
    value = plugin.value
    if not (isinstance(value, type) and issubclass(value, Operation)):
        raise wrong_kind(plugin, GROUP, "a subclass of surgeon.operations.operation.Operation")
    if value.key("op") != plugin.name:
        raise wrong_kind(plugin, GROUP, f"called as its `op`, `{printable(value.key('op'))}`")
    return value


# The key in plans → the operation; those of plugins after the built-in ones.
OPERATIONS: Registry[type[Operation]] = Registry(
    GROUP, {operation.key("op"): operation for operation in _BUILT_IN}, _admitted
)


class AnyOperation:
    """Marks a field of a plan that takes every operation by its `op`; they are looked up when the schema is built."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        every: Any = Union[tuple(OPERATIONS.values())]  # noqa: UP007
        return handler.generate_schema(Annotated[every, Field(discriminator="op")])


def papers_of(done: Iterable[tuple[str, Iterable[str]]]) -> list[Paper]:
    """The papers behind operations, each given by its key and the inits of the layers that it made; each paper once.

    An operation that is unknown here (of a newer surgeon, or of a plugin that is not installed) has none.
    """
    found = [paper for op, inits in done if op in OPERATIONS for paper in OPERATIONS[op].papers_for(inits)]
    return list(dict.fromkeys(found))


def origin_of(op: str, init: str) -> Origin:
    """What a layer that operation `op` made is to who looks at it; of one that is unknown here, `made`."""
    return OPERATIONS[op].origin_of(init) if op in OPERATIONS else "made"


def legends() -> dict[str, Legend]:
    """How grafts are explained, by the letter that their signs begin with, in the order of the operations."""
    return {letter: legend for operation in OPERATIONS.values() for letter, legend in operation.legend.items()}
