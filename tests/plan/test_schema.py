"""The schema that editors get, and the plans that ship."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from surgeon.cli import app
from surgeon.operations.inits import INITS
from surgeon.plan import shipped
from surgeon.plan.plan import json_schema, parse_plan


def test_every_field_is_described_or_says_itself_what_it_is() -> None:
    schema = json_schema()
    for name, definition in schema["$defs"].items():
        assert definition["description"], name
        assert definition["additionalProperties"] is False, f"{name} lets unknown keys through"
        for key, field in definition["properties"].items():
            # A part's own description stands for it; the one value of `op` and `kind` says all.
            told = {"description", "const", "$ref", "oneOf"} & field.keys()
            assert told, f"{name}.{key} has no description"


def test_the_command_prints_it() -> None:
    result = CliRunner().invoke(app, ["schema"])
    assert result.exit_code == 0
    assert json.loads(result.stdout) == json_schema()
    both = CliRunner().invoke(app, ["schema", "--training", "--tasks"])
    assert (both.exit_code, both.stdout) == (2, "")


def test_a_folder_called_like_a_shipped_plan_is_not_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An output that has the name of its plan, say."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama-pro").mkdir()
    assert shipped.find_plan("llama-pro").is_file()


@pytest.mark.parametrize("name", shipped.shipped_plans())
def test_shipped_plans_are_found_by_name_and_load(name: str) -> None:
    loaded = shipped.load_named(name)
    assert loaded.text.startswith("# "), "a plan begins with a line that says what it is"
    printed = CliRunner().invoke(app, ["plans", name])
    assert printed.stdout == loaded.text


selectors = st.one_of(
    st.sampled_from(["all", "top_half", "bottom_half", "middle", "top_and_bottom"]),
    st.builds(lambda n: {"every": n}, st.integers(1, 99)),
    st.builds(lambda layers: {"after": layers}, st.lists(st.integers(0, 99), min_size=1, max_size=5)),
    st.builds(lambda a, b: {"range": [a, b]}, st.integers(0, 99), st.integers(0, 99)),
)
inits = st.one_of(
    st.builds(lambda kind: {"kind": kind}, st.sampled_from(sorted(INITS))),
    st.builds(
        lambda reg, rescale: {"kind": "ot_fusion", "reg": reg, "rescale": rescale},
        st.floats(1e-6, 1e3),
        st.sampled_from(["marginal", "paper"]),
    ),
)


@given(selectors, inits, st.integers(0, 2**63 - 1), st.booleans())
def test_plans_survive_yaml(where: object, init: dict, seed: int, zero_init: bool) -> None:
    """What is written by PyYAML (1e-05 and all) is read back as the same plan."""
    data = {
        "surgeon": 1,
        "seed": seed,
        "operations": [{"op": "insert_layers", "where": where, "init": init, "zero_init": zero_init}],
    }
    plan = parse_plan(yaml.safe_dump(data), source="plan").plan
    dumped = plan.model_dump(mode="json", exclude_unset=True)
    assert dumped == data
