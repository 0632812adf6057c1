"""The plan: what is asked. A strict schema; nothing unknown gets through."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from surgeon.operations import AnyOperation
from surgeon.operations.operation import Operation


class Plan(BaseModel):
    """A list of operations, applied in order; later selectors see the model as the earlier ones left it."""

    # Built at first use: operations of plugins are read then.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, defer_build=True)

    surgeon: Annotated[Literal[1], Field(description="version of the plan format")]
    seed: Annotated[int, Field(ge=0, lt=2**63, description="seeds every random tensor, together with its name")] = 0
    operations: Annotated[list[Annotated[Operation, AnyOperation]], Field(min_length=1, max_length=100)]


def json_schema() -> dict[str, Any]:
    """The JSON schema of plans, for editors that complete YAML by it."""
    schema = Plan.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "surgeon plan"
    return schema
