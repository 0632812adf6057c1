"""The operations a plan can ask for: one file each, listed here.

An operation is a pydantic spec (what the plan may say) with a method `edit(draft, number)` that changes the
draft and returns an `OperationRecord`. A new operation is one file here and one line in `OPERATIONS`.
"""

from __future__ import annotations

from surgeon.operations.insert_layers import InsertLayers
from surgeon.operations.stack_layers import StackLayers

OPERATIONS: dict[str, type[InsertLayers] | type[StackLayers]] = {
    "insert_layers": InsertLayers,
    "stack_layers": StackLayers,
}
