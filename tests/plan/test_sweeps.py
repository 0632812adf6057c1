"""Sweeps: a plan with other values; what their files may say, how their points are named, shown and carried out."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import surgeon
from surgeon.cli import app
from surgeon.errors import BadInput
from surgeon.plan import shipped
from surgeon.plan.plan import parse_plan
from surgeon.plan.sweep import LoadedSweep, Sweep, json_schema, load_sweep, overrides_of
from tests import tiny

HEAD = "surgeon_sweep: 1\nplan: mixture-of-control\n"


def written(folder: Path, text: str) -> Path:
    path = folder / "alpha.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def points_of(folder: Path, text: str) -> dict[str, tuple[str, ...]]:
    return {point.name: point.overrides for point in load_sweep(written(folder, text)).points}


def test_every_combination_of_values_is_a_point_that_they_name(tmp_path: Path) -> None:
    assert points_of(tmp_path, f"{HEAD}values: {{operations.0.alpha: [0.5, 0.99], operations.0.top_k: [1, 3]}}\n") == {
        "alpha-0.5-1": ("operations.0.alpha=0.5", "operations.0.top_k=1"),
        "alpha-0.5-3": ("operations.0.alpha=0.5", "operations.0.top_k=3"),
        "alpha-0.99-1": ("operations.0.alpha=0.99", "operations.0.top_k=1"),
        "alpha-0.99-3": ("operations.0.alpha=0.99", "operations.0.top_k=3"),
    }


def test_a_named_point_sets_what_it_says(tmp_path: Path) -> None:
    text = f"{HEAD}points:\n  as-it-is: {{}}\n  two: {{operations.0.sites: [ffn], operations.0.gate.kind: linear}}\n"
    assert points_of(tmp_path, text) == {
        "as-it-is": (),
        "two": ('operations.0.sites=["ffn"]', "operations.0.gate.kind=linear"),
    }


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "the sweep is empty; it needs `surgeon_sweep: 1`"),
        (HEAD, "give one of `values`, .* and `points`"),
        (f"{HEAD}values: {{a: [1]}}\npoints: {{b: {{}}}}\n", "give one of `values`, .* and `points`"),
        (f"{HEAD}value: {{a: [1]}}\n", "alpha.yaml:3: unknown key `value`; did you mean `values`?"),
        (f"{HEAD}values: {{a: []}}\n", "alpha.yaml:3: .*at least 1"),
        (f"{HEAD}values: {{a: [[1]]}}\n", r"alpha.yaml:3: `values.a.0"),
        (f"{HEAD}points: {{a/b: {{}}}}\n", "alpha.yaml:3: "),
        ("surgeon_sweep: 2\nplan: solar\nvalues: {a: [1]}\n", "alpha.yaml:1: "),
    ],
)
def test_what_is_no_sweep_is_refused_with_its_line(text: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=why):
        load_sweep(written(tmp_path, text))


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
    from surgeon.common.yaml import Document

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
    left = [each for each in (*shipped.names(), *shipped.sweeps()) if "/" in each]
    counts = [int(word) for word in short[-1].split() if word.isdecimal()]
    assert sum(counts[:2]) == len(left) == len(every) - len(short) - counts[2]
    assert {*left} < {line.split()[0] for line in every}


@pytest.mark.parametrize("name", shipped.sweeps())
def test_every_point_that_ships_is_a_plan(name: str) -> None:
    loaded = shipped.find_sweep(name)
    assert loaded is not None and loaded.text.startswith("# "), "a sweep begins with a line that says what it is"
    assert loaded.sweep.plan in shipped.names()
    texts = shipped.texts(name)
    assert len(texts) == len(loaded.points)
    for point, (qualified, text) in zip(loaded.points, texts.items(), strict=True):
        assert qualified == f"{name.partition('/')[0]}/{point.name}"
        assert shipped.load_named(qualified).text == text
        # The command that is shown is the same plan, and its text alone too: surgery.json keeps no more.
        words = shlex.split(point.options)
        assert words[::2] == ["--set"] * (len(words) // 2)
        by_options = shipped.load_named(loaded.sweep.plan, words[1::2])
        assert by_options.plan == parse_plan(text, source="plan").plan == shipped.load_named(qualified).plan


def test_names_of_plans_sweeps_and_points_differ() -> None:
    every = [*shipped.names(), *shipped.sweeps(), *shipped.points()]
    assert len(set(every)) == len(every)
    folder = shipped.folder()
    # As many points as the files have.
    assert len(shipped.points()) == sum(
        len(found.points) for name in shipped.sweeps() if (found := shipped.find_sweep(name)) is not None
    )
    assert all((folder / f"{name}.yaml").is_file() for name in shipped.names())


def test_no_plan_but_a_head_differs_from_its_familys_head_in_one_value_alone() -> None:
    """Such plans are points of a sweep; those that are kept, and why, stand here."""
    kept = {
        "llama-pro/paper": "the paper's own numbers of layers, under its name",
        "control-llm/hybrid": "native layers by turns with branches",
        "control-llm/stack": "native layers, no branches",
        "opt-deus/experts": "for mixtures of experts",
        "pmoe/eight-slots": "the plan that sweeps go from",
    }
    plans = {name: _flat(shipped.load_named(name).data()) for name in shipped.names()}
    near = set()
    for name, values in plans.items():
        head = plans.get(name.partition("/")[0])
        if "/" in name and head is not None and sum(values.get(k) != head.get(k) for k in {*values, *head}) <= 1:
            near.add(name)
    assert near == kept.keys()


def _flat(data: object, at: str = "") -> dict[str, object]:
    if isinstance(data, dict):
        return {key: leaf for name, inner in data.items() for key, leaf in _flat(inner, f"{at}.{name}").items()}
    if isinstance(data, list):
        return {key: leaf for n, inner in enumerate(data) for key, leaf in _flat(inner, f"{at}.{n}").items()}
    return {at: data}


def test_the_command_lists_shows_and_refuses(tmp_path: Path) -> None:
    listed = CliRunner().invoke(app, ["plans", "--all"]).stdout
    assert "mixture-of-control/alpha" in listed and "(7 points)" in listed
    shown = CliRunner().invoke(app, ["plans", "mixture-of-control/alpha"]).stdout
    assert "#     surgeon apply mixture-of-control BASE OUT --set operations.0.alpha=0.5\n" in shown
    assert "#   mixture-of-control/alpha-0.5\n" in shown
    # What is printed is the sweep still.
    path = written(tmp_path, shown)
    assert load_sweep(path).sweep == Sweep(
        surgeon_sweep=1, plan="mixture-of-control", values={"operations.0.alpha": [0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99]}
    )
    own = CliRunner().invoke(app, ["plans", str(path), "--json"])
    assert next(iter(json.loads(own.stdout))) == str(tmp_path / "alpha-0.5")
    one = CliRunner().invoke(app, ["plans", "mixture-of-control/alpha-0.5"]).stdout
    assert one.startswith("# With --set operations.0.alpha=0.5\n") and "alpha: 0.5" in one
    for sweep in ("mixture-of-control/alpha", str(path)):
        refused = CliRunner().invoke(app, ["apply", sweep, "base", "out"])
        assert refused.exit_code == 2
        assert (
            f"{sweep}: a sweep, not a plan; `surgeon plans {sweep}` lists the command of each of its 7"
            in refused.stderr
        )
    missed = CliRunner().invoke(app, ["plans", "mixture-of-control/alpha-0.55"])
    assert missed.exit_code == 2 and "did you mean `mixture-of-control/alpha-0.5`" in missed.stderr
    schema = CliRunner().invoke(app, ["schema", "--sweep"])
    assert json.loads(schema.stdout) == json_schema()


def test_a_point_is_carried_out_by_its_name_and_by_options(tmp_path: Path) -> None:
    base = tiny.checkpoint(tmp_path / "base", "llama")
    name, settings = "mixture-of-control/alpha-0.5", ["operations.0.alpha=0.5"]
    surgeon.apply(name, str(base), tmp_path / "named")
    surgeon.apply("mixture-of-control", str(base), tmp_path / "set", overrides=settings)
    assert (tmp_path / "named" / "surgery.json").read_bytes() == (tmp_path / "set" / "surgery.json").read_bytes()
    assert json.loads((tmp_path / "named" / "surgery.json").read_text())["plan"].startswith("# With --set op")


def test_a_sweep_of_ones_own_names_a_plan_beside_it(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("surgeon: 1\noperations: [{op: widen_ffn, by: 64}]\n", encoding="utf-8")
    path = written(tmp_path, "surgeon_sweep: 1\nplan: mine.yaml\nvalues: {operations.0.by: [8, 16]}\n")
    loaded = shipped.find_sweep(path)
    assert isinstance(loaded, LoadedSweep)
    found = [*shipped.swept(loaded).values()][1]
    assert (found.path, found.overrides) == (tmp_path / "mine.yaml", ("operations.0.by=16",))
