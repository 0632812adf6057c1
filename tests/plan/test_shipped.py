"""The shipped plans: how they are listed, shown and named, and values that `--set` gives them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from surgeon.cli import app
from surgeon.common.yaml import Document
from surgeon.plan import shipped
from surgeon.plan.plan import overrides_of

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**15), 10**15)
    | st.floats(-1e9, 1e9)
    | st.text("aé: '\"\\#-0.e", max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(["operations.0.alpha", "seed"]), plain, min_size=1))
def test_values_come_through_the_option_as_they_are(settings: dict[str, object]) -> None:
    document = Document({"seed": 0, "operations": [{"op": "mixture_of_control"}]}, {}, "plan.yaml", "plan")
    document.override(overrides_of(settings), example="")
    operation = document.data["operations"][0]
    found = {"operations.0.alpha": operation.get("alpha"), "seed": document.data["seed"]}
    assert {key: found[key] for key in settings} == settings


def test_the_list_of_plans_fits_a_screen_and_names_every_one_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    short, every = (CliRunner().invoke(app, ["plans", *more]).stdout.splitlines() for more in ([], ["--all"]))
    assert len(short) <= 30
    assert [line.split()[0] for line in short[:-1]] == [
        plan.name for plan in shipped.described() if "/" not in plan.name
    ]
    left = [name for name in shipped.shipped_plans() if "/" in name]
    variants, papers = (int(word) for word in short[-1].split() if word.isdecimal())
    assert variants == len(left) == len(every) - len(short) - papers
    assert {*left} < {line.split()[0] for line in every}


def test_a_plan_is_shown_by_its_name() -> None:
    shown = CliRunner().invoke(app, ["plans", "control-llm/dlerp8"]).stdout
    assert shown.startswith("# Control LLM, Table 5: ") and shown == shipped.text_of("control-llm/dlerp8")
    as_json = CliRunner().invoke(app, ["plans", "control-llm/dlerp8", "--json"]).stdout
    assert json.loads(as_json) == {"control-llm/dlerp8": shown}
    missed = CliRunner().invoke(app, ["plans", "control-llm/dlerp9"])
    assert missed.exit_code == 2 and "did you mean `control-llm/dlerp8" in missed.stderr
