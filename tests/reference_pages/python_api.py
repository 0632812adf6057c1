"""The page of the Python interface, from what `surgeon` exports: python.md."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

from pydantic import BaseModel

import surgeon
from tests.reference_pages.json_keys import SECTIONS

HEAD = '''\
# From Python

`import surgeon` has a function for each command, with the command's options as keyword arguments.
Results are typed, print as one line, and give plain data by `to_json()`.

```python
from pathlib import Path

import surgeon

plan = surgeon.parse_plan("""
surgeon: 1
operations:
  - op: insert_layers
    where: {after: [3, 5]}
    init: {kind: copy}
""")
print(surgeon.preview(plan, "base-model"))
with surgeon.ProgressListener() as listener:  # bars on stderr; without a listener nothing is printed
    grown = surgeon.apply(plan, "base-model", "deeper", listener=listener)
proof = surgeon.verify("base-model", grown.path, dtypes=["auto", "float32"])
assert proof.holds and proof.identical

try:
    surgeon.apply("opt-deus", "base-model", "deeper")
except surgeon.BadInput as error:
    print(error)  # deeper: exists; choose another folder, or move it away

config = surgeon.TrainConfig(
    surgeon_train=1,
    steps=2,
    batch=2,
    length=16,
    sources=[surgeon.SourceSpec(name="wiki", path="wiki.jsonl", share=1.0, validation=0.1)],
    optimizer=surgeon.OptimizerSpec(lr=1e-4),
)
surgeon.train("deeper", surgeon.LoadedConfig(config, Path("here.yaml")), "trained")

base = surgeon.open_checkpoint("base-model")
windows = surgeon.cut(surgeon.open_texts({"wiki": "wiki.txt"}), base, length=64)["wiki"]
before, after = (surgeon.score(surgeon.open_checkpoint(name).load(), windows) for name in ("base-model", "trained"))
print(f"{after.loss:.4f} nats a token, {after.loss_difference(before).value:+.4f} by training")
```

- `plan` is a file, a shipped plan's name, or a parsed plan; `overrides=["seed=1"]` is `--set seed=1`.
- Where the command line ends with exit code 2, Python raises `BadInput`, with one line for each mistake.
  With exit code 3 it raises `PromiseBroken`; a check that fails in `verify` is in the result instead.
- A listener of your own has `begin(stage, total, unit)`, `advance(count)`, `rename(stage)` and `say(line)`.
- Transformers loads the outputs, and surgeon is not needed there; those with grafts need `trust_remote_code=True`.
- In a model with grafts, `freeze_base()` freezes all but what surgery added and returns the names of what trains.

`python -m tests.reference_pages` writes what follows from the docstrings, and a test compares the two.
'''

_GROUPS = {
    "Grow and prove": "preview apply verify families",
    "Train and measure": "learn train rehearse recall evaluate compare continual",
    "Look": "inspect diff report transport_report routing_report",
    "Undo, convert, share": (
        "revert refresh blend write_blend share_by_answers merge make_delta apply_delta export_slot write_gguf push"
    ),
    "Plans": (
        "parse_plan load_plan load_named LoadedPlan find_plan shipped_plans shipped_studies"
        " shipped_tasks"
        " overrides_of json_schema OPERATIONS RouterLoss"
    ),
    "Checkpoints": "open_checkpoint Checkpoint Manifest check_model check_destination add_record",
    "Training configs": (
        "load_config LoadedConfig TrainConfig SourceSpec GenerateSpec OptimizerSpec LoraSpec LayersSpec PreserveSpec"
        " TeacherSpec RunSettings settle check_training discard_run"
    ),
    "Texts and scores": (
        "open_texts HeldOut held_out_text TextSpec UnlabelledSpec open_source check_source is_chat text_files written"
        " cut pack Windows score Scores Ratio divergence judge Judged encode_prompts EncodedPrompts answer Answer"
        " read_prompts Prompts kept_answers KeptAnswers BaseAnswers kept_table"
    ),
    "Results and what the terminal shows": (
        "Applied Blend preview_view Verification verification_view Trained Evaluation evaluation_view SourceScores"
        " LabelScores"
    ),
    "Errors and progress": "SurgeonError BadInput PromiseBroken Diverged ProgressListener __version__",
}
# What is neither a function nor a class has no docstring of its own.
_VALUES = {
    "OPERATIONS": "The operations by name, those of plugins too; each is a pydantic model.",
    "__version__": "The version of surgeon.",
}

# The most columns of a signature in one row: pages have no room for more.
_WIDEST = 100


def python_page() -> str:
    """Every exported name once, with its signature and the first paragraph of its docstring."""
    parts = [HEAD]
    listed: list[str] = []
    for group, names in _GROUPS.items():
        parts.append(f"## {group}\n")
        for name in names.split():
            parts.append(f"### {name}\n\n{_entry(name, getattr(surgeon, name))}")
            listed.append(name)
    assert sorted(listed) == surgeon.__all__, set(listed) ^ set(surgeon.__all__)
    assert set(SECTIONS) <= set(listed)
    return "\n".join(parts)


def _entry(name: str, found: Any) -> str:
    if name in _VALUES:
        return f"{_VALUES[name]}\n"
    text = " ".join((inspect.getdoc(found) or "").partition("\n\n")[0].split())
    if inspect.isfunction(found):
        keys = f" [Keys of `to_json()`](json.md#{name})." if name in SECTIONS else ""
        return f"```text\n{_signature(found)}\n```\n\n{text}{keys}\n"
    return f"{text}\n{_members(found)}"


def _signature(function: Callable[..., Any]) -> str:
    """Names and defaults of the parameters, and the type of the result."""
    signature = inspect.signature(function)
    written: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in written:
            written.append("*")
        default = "" if parameter.default is parameter.empty else f"={_value(parameter.default)}"
        written.append(f"{parameter.name}{default}")
    whole = f"{function.__name__}({', '.join(written)}) -> {signature.return_annotation}"
    if len(whole) <= _WIDEST:
        return whole
    # A default's own spaces stay: what is wrapped has none.
    words = ", ".join(one.replace(" ", "\0") for one in written) + ","
    rows = textwrap.wrap(words, _WIDEST - 4, break_long_words=False, break_on_hyphens=False)
    inner = textwrap.indent("\n".join(rows), "    ").replace("\0", " ")
    return f"{function.__name__}(\n{inner}\n) -> {signature.return_annotation}"


def _value(default: object) -> str:
    return "…" if callable(default) else repr(default)


def _members(found: Any) -> str:
    """The fields of a class, and what it can be asked for."""
    if issubclass(found, BaseException):
        return ""
    given = list(found.model_fields) if issubclass(found, BaseModel) else []
    given = [field.name for field in fields(found)] if is_dataclass(found) else given
    public = {name: value for name, value in vars(found).items() if not name.startswith("_") and name not in given}
    asked = [name for name, value in public.items() if isinstance(value, property)]
    called = [f"{name}()" for name, value in public.items() if inspect.isfunction(value)]
    lines = [
        f"- {title}: {', '.join(f'`{name}`' for name in names)}"
        for title, names in (("fields", given), ("properties", asked), ("methods", called))
        if names
    ]
    return "\n" + "\n".join(lines) + "\n" if lines else ""
