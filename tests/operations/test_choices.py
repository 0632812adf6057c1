"""Registries are complete: whatever can be chosen by name is in the page of its operation, and plans may say it."""

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

DOCS = Path(__file__).resolve().parents[2] / "docs" / "reference"

# What is chosen → its page, and the names.
CHOICES: dict[str, tuple[str, Iterable[str]]] = {
    "interpolators": ("operations/control_llm.md", INTERPOLATORS),
    "divergences": ("operations/control_llm.md", control.DIVERGENCES),
    "gates of adapters": ("operations/gated_adapters.md", adapters.GATES),
    "inits of adapters": ("operations/gated_adapters.md", adapters.VARIANCES),
    "local losses": ("operations/gated_adapters.md", adapters.LOCAL_LOSSES),
    "inits of layers": ("operations/insert_layers.md", INITS),
    "gates of control states": ("operations/mixture_of_control.md", states.MIXTURE_GATES),
    "sharing of gates": ("operations/mixture_of_control.md", states.GATE_SHARING),
    "routing in training": ("operations/mixture_of_control.md", states.TRAIN_ROUTINGS),
    "routing at inference": ("operations/mixture_of_control.md", states.INFERENCE_ROUTINGS),
    "what domain gates read": ("operations/domain_gate.md", gate.READS),
    "forms of domain gates": ("operations/domain_gate.md", gate.FORMS),
    "sites": ("operations/mixture_of_control.md", states.SITES),
}
NAMED = [(what, name) for what, (_, names) in CHOICES.items() for name in names]


@pytest.mark.parametrize(("what", "name"), NAMED)
def test_what_can_be_chosen_is_in_its_page(what: str, name: str) -> None:
    page, _ = CHOICES[what]
    text = (DOCS / page).read_text(encoding="utf-8")
    assert re.search(rf"`[^`]*\b{name}\b[^`]*`", text), f"{page} does not name {name}"


def test_plans_may_say_whatever_can_be_chosen() -> None:
    said = json.dumps(json_schema())
    reference = (DOCS / "plans.md").read_text(encoding="utf-8")
    for what, name in NAMED:
        assert f'"{name}"' in said, f"{what}: the schema of plans has no {name}"
        assert f"`{name}`" in reference, f"{what}: plans.md has no {name} (python -m tests.reference_pages)"


@pytest.mark.parametrize("model_type", [*USUAL_DECODERS, *USUAL_ENCODERS])
def test_every_family_is_in_the_page_of_families(model_type: str) -> None:
    assert re.search(rf"\b{model_type}\b", (DOCS / "families.md").read_text(encoding="utf-8"))
