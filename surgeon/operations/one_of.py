"""Fields of plans whose values come from a registry, so that they are not listed a second time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema


@dataclass(frozen=True)
class OneOf:
    """Marks a string field; `options` is asked when a value is checked, as plugins may add to it."""

    options: Callable[[], Iterable[str]]

    def check(self, value: str) -> str:
        """The value; the error of a `Literal` where it is none of the options."""
        options = list(self.options())
        if value in options:
            return value
        expected = ", ".join(f"'{option}'" for option in options)
        raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"enum": [*self.options()]} | handler(schema)
