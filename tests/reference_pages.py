"""The plan reference, docs/plans.md, written from the JSON schema of plans: `python -m tests.reference_pages`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from surgeon.operations import OPERATIONS
from surgeon.plan.plan import json_schema

PAGE = Path(__file__).resolve().parent.parent / "docs" / "plans.md"

HEAD = """\
# Plan reference

`python -m tests.reference_pages` writes this page from the schema that `surgeon schema` prints, and a test compares the
two. [Writing plans](writing-plans.md) explains how to write a plan and what selectors mean; the page of each operation
explains its options. A key that is not listed here is refused with its line.
"""


def page() -> str:
    """The whole page."""
    schema = json_schema()
    models: dict[str, Any] = schema["$defs"]
    operations = {
        models_of["properties"]["op"]["const"]: name for name, models_of in models.items() if _is_op(models_of)
    }
    assert set(operations) == set(OPERATIONS)
    parts = [HEAD, "## The plan\n", schema["description"] + "\n", _table(schema, models)]
    for op in OPERATIONS:
        model = models[operations[op]]
        parts += [f"## {op}\n", f"{model['description']} [What it is](operations/{op}.md).\n", _table(model, models)]
    parts.append("## What stands inside\n")
    for name in sorted(models):
        if not _is_op(models[name]):
            parts += [f"### {name}\n", models[name]["description"] + "\n", _table(models[name], models)]
    return "\n".join(parts)


def _is_op(model: dict[str, Any]) -> bool:
    return "op" in model["properties"]


def _table(model: dict[str, Any], models: dict[str, Any]) -> str:
    rows = ["| option | type | default | meaning |", "|---|---|---|---|"]
    required = model.get("required", [])
    for key, field in model["properties"].items():
        default = "required" if key in required else _default(field)
        rows.append(f"| `{key}` | {_type(field)} | {default} | {_meaning(field, models)} |")
    return "\n".join(rows) + "\n"


def _meaning(field: dict[str, Any], models: dict[str, Any]) -> str:
    told = field.get("description")
    if told is None and "$ref" in field:
        told = models[_named(field["$ref"])]["description"]
    return (told or "").replace("|", "\\|")


def _default(field: dict[str, Any]) -> str:
    default = field.get("default")
    if default is None:
        return ""
    if isinstance(default, dict):
        # The parts' own defaults stand in their tables.
        return "its own"
    return f"`{default if isinstance(default, str) else json.dumps(default, ensure_ascii=False)}`"


def _type(field: dict[str, Any]) -> str:
    if "$ref" in field:
        name = _named(field["$ref"])
        return "list of operations" if name == "Operation" else f"[{name}](#{name.lower()})"
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    for union in ("anyOf", "oneOf"):
        if union in field:
            return " or ".join(_type(each) for each in field[union] if each.get("type") != "null")
    kind = field["type"]
    if kind == "array":
        if "prefixItems" in field:
            return "[" + ", ".join(_type(each) for each in field["prefixItems"]) + "]"
        items = field["items"]
        return "list of operations" if "discriminator" in items else f"list of {_type(items)}"
    words = {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false"}
    return words[kind] + _bounds(field)


def _bounds(field: dict[str, Any]) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    # pydantic 2.10 writes 0.0 where newer ones write 0.
    bounds = [
        f"{sign} {int(bound) if bound == int(bound) else bound:,}"
        for key, sign in signs.items()
        if (bound := field.get(key)) is not None and bound < 2**53
    ]
    return f" {' and '.join(bounds)}" if bounds else ""


def _named(reference: str) -> str:
    return reference.rsplit("/", 1)[1]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
