"""Registries are complete: whatever can be chosen by name is in the section of its operation, and plans may say it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from surgeon.anatomy.decoders import USUAL_DECODERS, USUAL_ENCODERS
from surgeon.grafts import adapters, control, gate, states
from surgeon.grafts.registry import INTERPOLATORS
from surgeon.operations.inits import INITS
from surgeon.plan.plan import json_schema
from tests.reference_pages.operations import sections

DOCS = Path(__file__).resolve().parents[2] / "docs" / "reference"

# What is chosen → its operation, and the names.
CHOICES: dict[str, tuple[str, Iterable[str]]] = {
    "interpolators": ("control_llm", INTERPOLATORS),
    "divergences": ("control_llm", control.DIVERGENCES),
    "gates of adapters": ("gated_adapters", adapters.GATES),
    "inits of adapters": ("gated_adapters", adapters.VARIANCES),
    "local losses": ("gated_adapters", adapters.LOCAL_LOSSES),
    "inits of layers": ("insert_layers", INITS),
    "gates of control states": ("mixture_of_control", states.MIXTURE_GATES),
    "sharing of gates": ("mixture_of_control", states.GATE_SHARING),
    "routing in training": ("mixture_of_control", states.TRAIN_ROUTINGS),
    "routing at inference": ("mixture_of_control", states.INFERENCE_ROUTINGS),
    "what domain gates read": ("domain_gate", gate.READS),
    "forms of domain gates": ("domain_gate", gate.FORMS),
    "sites": ("mixture_of_control", states.SITES),
}
NAMED = [(what, name) for what, (_, names) in CHOICES.items() for name in names]


@pytest.mark.parametrize(("what", "name"), NAMED)
def test_what_can_be_chosen_is_in_its_section(what: str, name: str) -> None:
    op, _ = CHOICES[what]
    page, text = sections()[op]
    assert re.search(rf"`[^`]*\b{name}\b[^`]*`", text), f"{page.name}: the section {op} does not name {name}"


def test_plans_may_say_whatever_can_be_chosen() -> None:
    said = json.dumps(json_schema())
    reference = (DOCS / "plans.md").read_text(encoding="utf-8")
    for what, name in NAMED:
        assert f'"{name}"' in said, f"{what}: the schema of plans has no {name}"
        assert f"`{name}`" in reference, f"{what}: plans.md has no {name} (python -m tests.reference_pages)"


@pytest.mark.parametrize("model_type", [*USUAL_DECODERS, *USUAL_ENCODERS])
def test_every_family_is_in_the_page_of_families(model_type: str) -> None:
    assert re.search(rf"\b{model_type}\b", (DOCS / "families.md").read_text(encoding="utf-8"))
