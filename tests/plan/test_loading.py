"""Plans that must be refused: each ends in one line that names file, line and remedy."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from surgeon.errors import BadInput, Mistakes
from surgeon.plan.plan import load_plan, parse_plan
from surgeon.plan.shipped import find_plan

GOOD = """\
surgeon: 1
seed: 7
operations:
  - op: insert_layers
    where: {every: 2}
    init:
      kind: ot_fusion
      reg: 6e-2
"""


def refused(text: str) -> str:
    with pytest.raises(BadInput) as caught:
        parse_plan(text, source="plan.yaml")
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("plan.yaml")
    return message


def test_good_plan_with_numbers_as_yaml_1_2_reads_them() -> None:
    plan = parse_plan(GOOD, source="plan.yaml").plan
    assert plan.seed == 7
    assert plan.operations[0].init.reg == 0.06


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("every: 2", "evry: 2"), ["plan.yaml:5", "evry", "every"]),
        (("where:", "wher:"), ["plan.yaml:5", "unknown key `wher`", "did you mean `where`?"]),
        (("seed: 7", "sed: 7"), ["plan.yaml:2", "unknown key `sed`", "did you mean `seed`?"]),
        (("reg:", "regg:"), ["plan.yaml:8", "unknown key `regg`", "did you mean `reg`?"]),
        (("insert_layers", "insert_layer"), ["plan.yaml:4", "unknown op `insert_layer`", "`insert_layers`"]),
        (("ot_fusion", "ot_fuson"), ["plan.yaml:7", "unknown kind `ot_fuson`", "`ot_fusion`"]),
        (("6e-2", "-1"), ["plan.yaml:8", "reg", "-1", "above 0"]),
        (("6e-2", "'0.06'"), ["plan.yaml:8", "reg", '"0.06"', "number"]),
        (("6e-2", ".inf"), ["plan.yaml:8", "not a finite number"]),
        (("seed: 7", "seed: 010"), ["plan.yaml:2", "010", "decimal"]),
        (("seed: 7", "seed: " + "9" * 20), ["plan.yaml:2", "9" * 20, "more than 19 digits", "lower it"]),
        (("every: 2", "every: 0"), ["plan.yaml:5", "every` is 0", "at least 1"]),
        (("every: 2", "every: true"), ["plan.yaml:5", "every` is true", "it takes a whole number"]),
        (("every: 2", "after: [-1]"), ["plan.yaml:5", "after.0` is -1", "at least 0"]),
        (("every: 2", "after: []"), ["plan.yaml:5", "after` is []", "at least 1 entry"]),
        (("seed: 7", "seed: yes"), ["plan.yaml:2", "seed", '"yes"']),
        (("seed: 7", "seed: true"), ["plan.yaml:2", "seed", "true"]),
        (("surgeon: 1", "surgeon: 2"), ["plan.yaml:1", "surgeon"]),
        (("seed: 7", "surgeon: 1"), ["plan.yaml:2", "given twice", "line 1"]),
        (("{every: 2}", "{every: 2, every: 3}"), ["plan.yaml:5", "`every` given twice"]),
        (("{every: 2}", "nowhere"), ["plan.yaml:5", "nowhere"]),
        (("    where: {every: 2}\n", ""), ["plan.yaml:4", "where", "missing"]),
        (("      kind: ot_fusion\n", ""), ["plan.yaml:6", "kind", "ot_fusion"]),
    ],
)
def test_refusals_name_line_and_remedy(change: tuple[str, str], expected: list[str]) -> None:
    text = GOOD.replace(*change)
    assert text != GOOD
    message = refused(text)
    for word in expected:
        assert word in message, message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "empty"),
        ("# nothing\n", "empty"),
        ("- 1\n", "a plan is a mapping"),
        ("surgeon: 1\noperations: []\n", "operations"),
        ("surgeon: 1\noperations:\n  - !!python/object/apply:os.system ['true']\n", "plan.yaml:3: tag"),
        ("surgeon: !mine 1\n", "plan.yaml:1: tag"),
        ("surgeon: 1\n  bad: [\n", "not valid YAML"),
        ("surgeon: [" * 500, "nested more than"),
        ("? [a, b]\n: 1\n", "a key must be a plain word, not a list or a mapping"),
        ("&a [*a]\n", "contains itself"),
    ],
)
def test_documents_that_are_no_plan(text: str, expected: str) -> None:
    assert expected in refused(text)


def test_alias_bomb_is_stopped_by_the_count_of_what_it_expands_to() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    assert "expands to more than" in refused("\n".join(lines))


def test_files_that_cannot_be_a_plan(tmp_path: Path) -> None:
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"surgeon: 1\n# caf\xe9\n")
    with pytest.raises(BadInput, match=r"latin\.yaml:2: not UTF-8"):
        load_plan(latin)
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * 1_000_001)
    with pytest.raises(BadInput, match="larger than"):
        load_plan(large)
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    with pytest.raises(BadInput, match="regular file"):
        load_plan(pipe)
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(BadInput, match="regular file"):
        load_plan(tmp_path / "folder.yaml")
    with pytest.raises(BadInput, match="cannot read the plan"):
        load_plan(tmp_path / "absent.yaml")


def test_control_characters_of_a_plan_do_not_reach_the_terminal() -> None:
    message = refused('surgeon: 1\n"\\e[31mred": 1\noperations: [{op: pmoe_experts}]\n')
    assert "\x1b" not in message
    assert "\\x1b[31mred" in message


def test_every_mistake_is_named_at_once_each_by_its_line() -> None:
    wrong = """\
surgeon: 1
sed: 3
operations:
  - op: insert_layers
    where: {evry: 2}
    init: {kind: ot_fusionn}
    zero_init: maybe
  - op: control_lm
  - op: gated_adapters
    layer: all
  - op: control_llm
    layer: all
    interpolator: {kind: lerp, alpah: 0.5, alpha: 3}
"""
    with pytest.raises(Mistakes) as caught:
        parse_plan(wrong, source="plan.yaml")
    assert list(caught.value.lines) == [
        "plan.yaml:2: unknown key `sed`; did you mean `seed`?",
        "plan.yaml:5: unknown key `evry`; did you mean `every`?",
        "plan.yaml:6: unknown kind `ot_fusionn`; did you mean `ot_fusion`?",
        'plan.yaml:7: `operations.0.zero_init` is "maybe"; it takes true or false',
        "plan.yaml:8: unknown op `control_lm`; did you mean `control_llm`?",
        "plan.yaml:10: unknown key `layer`; did you mean `layers`?",
        "plan.yaml:12: unknown key `layer`; did you mean `layers`?",
        "plan.yaml:13: `operations.3.interpolator.alpha` is 3; it takes a number, at least 0 and at most 1",
        "plan.yaml:13: unknown key `alpah`; did you mean `alpha`?",
    ]
    assert str(caught.value).splitlines() == list(caught.value.lines)
    assert pickle.loads(pickle.dumps(caught.value)).lines == caught.value.lines


def test_at_most_three_plans_are_suggested(tmp_path: Path) -> None:
    def told(plan: str) -> str:
        with pytest.raises(BadInput) as caught:
            find_plan(plan)
        return str(caught.value)

    assert "did you mean `opt-deus`, `opt-deus/emd` or `opt-deus/" in told("opt-dues")
    assert "did you mean `control-llm`, `control-llm/" in told("Control_LLM")
    assert "did you mean `ablation/average`, `ablation/copy` or `ablation/random`?" in told("ablation")
    assert "`surgeon plans` lists the names" in told("zzz")
    # A path whose letters are those of a name, in order.
    (tmp_path / "mixture-of-control" / "top-7").mkdir(parents=True)
    assert "`surgeon plans` lists the names" in told(str(tmp_path / "mixture-of-control" / "top-7"))
    for name in ("mine", "other"):
        (tmp_path / f"{name}.yaml").write_text(GOOD, encoding="utf-8")
    (tmp_path / "train.yaml").write_text("surgeon_train: 1\n", encoding="utf-8")
    mine = f"a folder, not a plan; did you mean `{tmp_path}/mine.yaml` or `{tmp_path}/other.yaml`?"
    assert told(str(tmp_path)).endswith(mine)
