"""The operations a plan can ask for: one file each, listed here.

An operation is a pydantic spec (what the plan may say) with a method `edit(draft, number)` that changes the
draft and returns an `OperationRecord`. A new operation is one file here and its two lines
below.
"""

from __future__ import annotations

from surgeon.operations.control_llm import ControlLLM
from surgeon.operations.gated_adapters import GatedAdapters
from surgeon.operations.insert_layers import InsertLayers
from surgeon.operations.merge_branches import MergeBranches
from surgeon.operations.mixture_of_control import MixtureOfControl
from surgeon.operations.pmoe_experts import PMoEExperts
from surgeon.operations.stack_layers import StackLayers

Operation = InsertLayers | StackLayers | ControlLLM | GatedAdapters | PMoEExperts | MixtureOfControl | MergeBranches

# Operations that know encoders; the others are for decoders alone.
ON_ENCODERS = frozenset({"mixture_of_control"})

OPERATIONS: dict[str, type[Operation]] = {
    "insert_layers": InsertLayers,
    "stack_layers": StackLayers,
    "control_llm": ControlLLM,
    "gated_adapters": GatedAdapters,
    "pmoe_experts": PMoEExperts,
    "mixture_of_control": MixtureOfControl,
    "merge_branches": MergeBranches,
}
