"""`--set KEY=VALUE` on plans: what is set is checked, carried out, recorded, and named in errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import surgeon
from surgeon.cli import app
from surgeon.common.yaml import parse_yaml, written_yaml
from surgeon.errors import BadInput
from surgeon.plan.plan import LoadedPlan, load_plan, parse_plan
from tests import tiny

PLAN = """\
surgeon: 1
operations:
  - op: control_llm
    layers: [0, 1]
    interpolator: {kind: lerp, alpha: 0.5}
  - op: gated_adapters
    size: 16
    layers: [0]
  - op: gated_adapters
    size: 8
    layers: [1]
"""


def changed(*overrides: str) -> LoadedPlan:
    return parse_plan(PLAN, source="plan.yaml", overrides=overrides)


def refusal(*overrides: str, plan: str = PLAN) -> str:
    with pytest.raises(BadInput) as caught:
        parse_plan(plan, source="plan.yaml", overrides=overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("setting", "written"),
    [
        ("seed=3", ("seed: 7", "seed: 3")),
        ("operations.0.interpolator.alpha=0.25", ("alpha: 0.5", "alpha: 0.25")),
        ("operations.control_llm.interpolator.alpha=2.5e-1", ("alpha: 0.5", "alpha: 0.25")),
        ("operations.0.layers.1=2", ("[1, 3]", "[1, 2]")),
        ("operations.0.layers={every: 2}", ("[1, 3]", "{every: 2}")),
        ("operations.1.size=4", ("size: 16", "size: 4")),
        ("operations.1={op: pmoe_experts, slots: 2}", ("op: gated_adapters, size: 16", "op: pmoe_experts, slots: 2")),
        ("operations.2.local_loss.kind=l1", ("size: 8", "size: 8, local_loss: {kind: l1}")),
    ],
)
def test_a_plan_with_a_value_set_is_the_plan_with_that_value_written(setting: str, written: tuple[str, str]) -> None:
    plan = (
        "surgeon: 1\nseed: 7\noperations:\n"
        "  - {op: control_llm, layers: [1, 3], interpolator: {kind: lerp, alpha: 0.5}}\n"
        "  - {op: gated_adapters, size: 16}\n  - {op: gated_adapters, size: 8}\n"
    )
    assert written[0] in plan
    by_option = parse_plan(plan, overrides=[setting])
    assert by_option.plan == parse_plan(plan.replace(*written)).plan
    # Its text says the same without the option, and names the option.
    assert parse_plan(by_option.text).plan == by_option.plan
    assert by_option.text.startswith(f"# With --set {setting}\n")


def test_without_an_option_the_text_stays_as_it_was_written() -> None:
    assert changed().text == PLAN and not changed().given


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("operations.0.layer=all", "unknown key `layer`; did you mean `layers`?"),
        ("operations.0.interpolator.alfa=1", "unknown key `alfa`; did you mean `alpha`?"),
        ("operation.0.layers=all", "unknown key `operation`; did you mean `operations`?"),
        ("sed=1", "unknown key `sed`; did you mean `seed`?"),
        ("operations.3.size=1", "`operations` has no entry `3`; it has 3, counted from 0"),
        ("operations.-1.size=1", "`operations` has no entry `-1`"),
        ("operations.control_lm.layers=all", "no entry `control_lm`; did you mean `control_llm`?"),
        ("operations.gated_adapters.size=1", "`operations` has 2 entries `gated_adapters`; give the number of one"),
        ("operations.1.size.half=1", "`operations.1.size` is a value, which has no keys; set it as it is"),
        ("operations.1.size=big", '`operations.1.size` is "big"; it takes a whole number, at least 1'),
        ("operations.1.size=0", "`operations.1.size` is 0; it takes a whole number, at least 1"),
        ("operations.1.size=010", "write the number `010` in plain decimal digits"),
        ("operations.0.interpolator.kind=lurp", "did you mean `lerp`?"),
        ("operations.0.op=control_lm", "unknown op `control_lm`; did you mean `control_llm`?"),
        ("operations.0.layers.9=1", "`operations.0.layers` has no entry `9`; it has 2, counted from 0"),
        ("operations.1.size=[1", "not valid YAML"),
        ("operations.1.size=!!python/object:os.system {}", "is not allowed"),
        ("operations=[]", "`operations` is []; it takes at least 1 entry"),
        ("surgeon=2", "`surgeon` is 2"),
        ("seed", "give a key and a value, as in --set operations.0.layers=all"),
        ("=1", "give a key and a value"),
        ("operations..size=1", "give a key and a value"),
        (".".join("a" * 5000) + "=1", "nested more than 40 deep"),
    ],
)
def test_what_cannot_be_set_is_refused_by_its_option(setting: str, message: str) -> None:
    refused = refusal(setting)
    assert refused.startswith(f"--set {setting[:60]}") and message in refused, refused
    assert "\n" not in refused


def test_what_the_file_has_wrong_is_still_named_by_its_line() -> None:
    refused = refusal("operations.1.size=4", plan=PLAN.replace("layers:", "layer:"))
    assert "plan.yaml:4: unknown key `layer`; did you mean `layers`?" in refused


def test_what_is_wrong_with_an_operation_as_a_whole_names_what_was_set_in_it() -> None:
    where = "plan.yaml:6, with --set operations.1.size=: operations[1] (gated_adapters): give either `extra_weights`"
    assert refusal("operations.1.size=").startswith(where)


def test_what_the_base_refuses_names_the_option_that_asked_for_it(tmp_path: Path) -> None:
    base = tiny.checkpoint(tmp_path / "base", "llama")
    (tmp_path / "plan.yaml").write_text(PLAN, encoding="utf-8")
    with pytest.raises(BadInput) as caught:
        surgeon.preview(tmp_path / "plan.yaml", base, overrides=["operations.0.layers=[99]"])
    where = f"{tmp_path / 'plan.yaml'}:3: operations[0] (control_llm, with --set operations.0.layers=[99]): "
    assert str(caught.value).startswith(where)


def test_the_manifest_has_the_plan_as_it_was_carried_out(tmp_path: Path) -> None:
    base = tiny.checkpoint(tmp_path / "base", "llama")
    setting = ["--set", "operations.0.interpolator.alpha=0.125", "--set", "seed=5"]
    again = [*("apply", "control-llm", str(base), str(tmp_path / "out")), *setting, "--quiet"]
    assert CliRunner().invoke(app, again).exit_code == 0
    manifest = json.loads((tmp_path / "out" / "surgery.json").read_text())
    recorded = parse_plan(manifest["surgeries"][-1]["plan"] if "surgeries" in manifest else manifest["plan"]).plan
    assert recorded == load_plan(_shipped("control-llm"), ["operations.0.interpolator.alpha=0.125", "seed=5"]).plan
    assert recorded.seed == 5 and recorded.operations[0].interpolator.alpha == 0.125
    assert surgeon.verify(base, tmp_path / "out").holds
    shown = CliRunner().invoke(app, ["preview", "control-llm", str(base), *setting, "--json"])
    assert "alpha 0.125" in shown.stdout or json.loads(shown.stdout)["promise"] == "exact"
    # From the recorded text alone the same weights are made.
    surgeon.apply(parse_plan(manifest["plan"]), base, tmp_path / "twice")
    assert surgeon.diff(tmp_path / "out", tmp_path / "twice", exact=True).identical


def test_a_plan_on_stdin_and_one_that_was_parsed_take_options_too(tmp_path: Path) -> None:
    base = tiny.checkpoint(tmp_path / "base", "llama")
    asked = ["preview", "-", str(base), "--set", "operations.1.size=4", "--json"]
    piped = json.loads(CliRunner().invoke(app, asked, input=PLAN).stdout)
    parsed = surgeon.preview(parse_plan(PLAN), base, overrides=["operations.1.size=4"])
    # The second one knows what the first has proven.
    assert {**piped, "proof": None} == {**parsed.to_json(), "proof": None}
    assert piped["parameters"] != surgeon.preview(parse_plan(PLAN), base).to_json()["parameters"]


def test_a_delta_takes_no_option_of_plans(tmp_path: Path) -> None:
    ran = CliRunner().invoke(app, ["apply", "--delta", "delta", "base", str(tmp_path / "out"), "--set", "seed=1"])
    assert ran.exit_code == 2 and "--set changes a plan, and --delta applies none" in ran.stderr


def _shipped(name: str) -> Path:
    from surgeon.plan.shipped import find_plan

    return find_plan(name)


# What our reader may give: numbers of at most 19 digits, finite, and text without NUL and half pairs.
_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
_NUMERIC = st.sampled_from(
    ["6e-2", "010", "1", "1.5", ".5", "null", "~", "yes", "true", "on", "2001-01-01", "0x1f", ""]
)
_SCALAR = st.one_of(
    *(st.none(), st.booleans(), st.integers(-(10**18), 10**18), _TEXT, _NUMERIC),
    st.floats(allow_nan=False, allow_infinity=False),
)
_DATA = st.recursive(
    _SCALAR,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT | _NUMERIC, inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(_TEXT | _NUMERIC, _DATA, min_size=1, max_size=3))
def test_what_is_written_as_yaml_is_read_back_as_it_is(data: dict) -> None:
    again = parse_yaml(written_yaml(data), "text", what="text", needs="something").data
    assert again == data and list(again) == list(data)
    assert json.dumps(again) == json.dumps(data)
