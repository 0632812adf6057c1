"""The pages of YAML files, from their JSON schemas: plans.md, training-file.md, study-file.md and tasks-file.md."""

from __future__ import annotations

import json
import re
from typing import Any

from surgeon.common.schema import Bounded
from surgeon.lab.courses.config.loading import json_schema as tasks_schema
from surgeon.lab.studies.config.loading import json_schema as study_schema
from surgeon.operations import OPERATIONS
from surgeon.operations.operation import TrainingDefaults
from surgeon.plan.plan import json_schema
from surgeon.training.config.loading import json_schema as training_schema
from surgeon.training.config.settings import FINETUNING, LORA
from tests.reference_pages.operations import link

HEAD = """\
# Plan reference

`python -m tests.reference_pages` writes this page from the schema that `surgeon schema` prints, and a test compares the
two. [Writing plans](../how-to/writing-plans.md) explains how to write a plan and what selectors mean;
[operations](operations/index.md) explains the options of each. A key that is not listed here is refused with its line.
"""

TRAINING_HEAD = """\
# Training file

Every key of a training config, as `surgeon schema --training` prints it.
[Training](../how-to/training.md) shows a whole file and the command.
RUN is the folder that the command writes.
A key that is not listed here is refused with its line.
`--set KEY=VALUE` replaces a value by its dotted key, such as `optimizer.lr=1e-4`.
`python -m tests.reference_pages` writes this page from the schema, and a test compares the two.
"""

DEFAULTS_HEAD = """\
## Defaults

Keys that a config leaves out have the defaults of the last operation that trains.
The first two rows are for runs without new tensors: `what: base`, `what: all` or `what: {layers: …}`, and `lora`.
`batch` and `length` are small by default for every operation; with `minutes` the measured speed decides both.
A default `length` beyond the model's context is reduced to it.
"Rate measured": 40 steps of 4 × 128 tokens of French help texts on SmolLM2-135M-Instruct.
Larger models and longer runs need lower rates.
`clip` is 1 for every operation.
Where a paper gives no value: 3 % warm-up, no weight decay, betas 0.9 and 0.999.
"original" is the share of original text that the paper mixes in.
surgeon adds no text by itself; a run without such text prints a note.
A domain gate is fitted before the first step and uses none of these values.

| operation | `lr` | `min_lr` | `schedule` | `warmup` | `weight_decay` | `betas` | original |
|---|---|---|---|---|---|---|---|
"""

STUDY_HEAD = """\
# Study file

Every key of a study, as `surgeon schema --study` prints it.
[Comparing methods](../how-to/comparing.md) shows a whole file and the command.
A key that is not listed here is refused with its line.
`python -m tests.reference_pages` writes this page from the schema, and a test compares the two.
"""

TASKS_HEAD = """\
# Tasks file

Every key of a tasks file, as `surgeon schema --tasks` prints it.
[Tasks one after the other](../how-to/comparing.md#tasks-one-after-the-other) shows a whole file and the command.
A key that is not listed here is refused with its line.
`python -m tests.reference_pages` writes this page from the schema, and a test compares the two.
"""


def plans_page() -> str:
    """The plan reference."""
    schema = json_schema()
    models: dict[str, Any] = schema["$defs"]
    operations = {
        models_of["properties"]["op"]["const"]: name for name, models_of in models.items() if _is_op(models_of)
    }
    assert set(operations) == set(OPERATIONS)
    parts = [HEAD, "## The plan\n", schema["description"] + "\n", _table(schema, models)]
    for op in OPERATIONS:
        model = models[operations[op]]
        parts += [f"## {op}\n", f"{model['description']} [What it is]({link(op)}).\n", _table(model, models)]
    parts.append("## What stands inside\n")
    for name in sorted(models):
        if not _is_op(models[name]):
            parts += [f"### {name}\n", models[name]["description"] + "\n", _table(models[name], models)]
    return "\n".join(parts)


def training_page() -> str:
    """The reference of training configs, with the defaults of the operations."""
    return _file_page(TRAINING_HEAD, training_schema()) + _defaults_of_operations()


def study_page() -> str:
    """The reference of studies."""
    return _file_page(STUDY_HEAD, study_schema())


def tasks_page() -> str:
    """The reference of tasks files."""
    return _file_page(TASKS_HEAD, tasks_schema())


def _file_page(head: str, schema: dict[str, Any]) -> str:
    """The reference of one kind of YAML file: the file's own keys, then those of its parts."""
    models: dict[str, Any] = schema["$defs"]
    parts = [head, "## The file\n", _table(schema, models)]
    for name in sorted(models):
        parts += [f"## {name}\n", models[name]["description"] + "\n", _table(models[name], models)]
    return "\n".join(parts)


def _defaults_of_operations() -> str:
    """The table of what a training config may leave out, by operation."""
    found = {"none": FINETUNING, "`lora`": LORA}
    found |= {f"[{op}]({link(op)})": operation.training for op, operation in OPERATIONS.items()}
    rows = [_defaults_row(name, defaults) for name, defaults in found.items()]
    sources = [f"- {name}: {defaults.source}" for name, defaults in found.items()]
    return f"\n{DEFAULTS_HEAD}" + "\n".join([*rows, "\nTheir sources:\n", *sources]) + "\n"


def _defaults_row(name: str, defaults: TrainingDefaults) -> str:
    assert defaults.clip == 1, f"{name}: the page says that every operation clips at 1"
    warmup = f"{defaults.warmup:.0%}"
    decay = f"{defaults.decay_of_rate:g} · lr" if defaults.decay_of_rate else f"{defaults.weight_decay:g}"
    original = f"{defaults.original_share:.0%}" if defaults.original_share else ""
    cells = (
        name,
        _rate(defaults.lr),
        _rate(defaults.min_lr),
        defaults.schedule,
        warmup.replace("%", " %"),
        decay,
        ", ".join(f"{beta:g}" for beta in defaults.betas),
        original.replace("%", " %"),
    )
    return f"| {' | '.join(cells)} |"


def _rate(rate: float) -> str:
    """A learning rate as configs have it: 5e-5."""
    return re.sub(r"\.?0*e-0*", "e-", f"{rate:.3e}") if rate else "0"


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
    if default is None or default == "":
        return ""
    if isinstance(default, dict):
        # The defaults of a part's keys stand in its own table.
        return "`{}`"
    if isinstance(default, list) and any(isinstance(entry, dict) for entry in default):
        # The description says it in words.
        return ""
    return f"`{_plain(default)}`"


def _plain(value: object) -> str:
    """A value as YAML has it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _type(field: dict[str, Any]) -> str:
    if "$ref" in field:
        name = _named(field["$ref"])
        return "list of operations" if name == "Operation" else f"[{name}](#{name.lower()})"
    if "const" in field:
        return f"`{_plain(field['const'])}`"
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
    words = {
        "integer": "integer",
        "number": "number",
        "string": "text",
        "boolean": "true or false",
        "object": "mapping",
    }
    return words[kind] + _bounds(field)


def _bounds(field: dict[str, Any]) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    # pydantic 2.10 writes 0.0 where newer ones write 0.
    bounds = [
        f"{sign} {int(bound) if bound == int(bound) else bound:,}"
        for key, sign in signs.items()
        if (bound := field.get(key)) is not None and bound < 2**53 and bound != Bounded.largest
    ]
    return f" {' and '.join(bounds)}" if bounds else ""


def _named(reference: str) -> str:
    return reference.rsplit("/", 1)[1]
