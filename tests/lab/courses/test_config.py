"""tasks.yaml: what it comes to for each task, and what is refused by file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from surgeon.data.specs import SourceSpec
from surgeon.errors import BadInput
from surgeon.lab.courses.config.loading import LoadedTasks, check_texts, json_schema, load_tasks, plans_of, training_of
from surgeon.lab.courses.config.schema import ExpertSettings, TaskSource, TrainSettings
from surgeon.operations.pmoe_experts import PMoEExperts
from surgeon.training.config.schema import TrainConfig

SMALLEST = """\
surgeon_continual: 1
train: {steps: 10}
tasks:
  - name: law
    sources: [{path: law.jsonl}]
  - name: code
    sources:
      - {path: code.jsonl, share: 0.8}
      - {path: general.jsonl, role: original}
  - name: maths
    sources: [{path: maths.jsonl}]
"""


def written(folder: Path, text: str) -> LoadedTasks:
    path = folder / "tasks.yaml"
    path.write_text(text, encoding="utf-8")
    return load_tasks(path)[""]


def test_shares_roles_and_domains(tmp_path: Path) -> None:
    config = written(tmp_path, SMALLEST).config
    assert config.replay == 0.01
    shares = [[(s.name, s.role, s.share) for s in training_of(config, t).sources] for t in range(3)]
    assert shares[0] == [("law", "task:law", 1.0)]
    assert shares[1] == [
        ("law", "task:law", pytest.approx(0.01 / 1.01)),
        ("code", "task:code", pytest.approx(0.8 / 1.01)),
        ("code-2", "original", pytest.approx(0.2 / 1.01)),
    ]
    # What was mixed into an earlier task's training is none of that task's to be replayed.
    assert [name for name, _, _ in shares[2]] == ["law", "code", "maths"]
    assert [share for _, _, share in shares[2]] == pytest.approx([0.01 / 1.02, 0.01 / 1.02, 1 / 1.02])
    last = training_of(config, 2)
    assert [last.domain_of(source) for source in last.sources] == [1, 2, 3]
    assert [training_of(config, t).seed for t in range(3)] == [0, 1, 2]


def test_without_replay_earlier_tasks_are_watched_only(tmp_path: Path) -> None:
    config = written(tmp_path, SMALLEST + "replay: 0\n").config
    assert [source.share for source in training_of(config, 2).sources] == [0, 0, 1]


def test_each_task_has_its_plan(tmp_path: Path) -> None:
    text = SMALLEST.replace("  - name: maths\n", "  - name: maths\n    plan: {rank: 2}\n    train: {steps: 3}\n")
    text += "plan: {rank: 8, threshold: 4, router_loss: {kind: task_id}}\nseed: 5\n"
    text += "next_plan: {new_slot_mass: paper, trains_also: [router, shared]}\n"
    loaded = written(tmp_path, text)
    operations = [plan.plan.operations[0] for plan in plans_of(loaded) if plan is not None]
    assert all(isinstance(operation, PMoEExperts) for operation in operations)
    first, second, third = (operation.model_dump(exclude_unset=True) for operation in operations)
    assert first == {"op": "pmoe_experts", "rank": 8, "threshold": 4, "router_loss": {"kind": "task_id"}}
    paper = {"new_slot_mass": "paper", "trains_also": ["router", "shared"]}
    assert second == {"op": "pmoe_experts", "rank": 8, "router_loss": {"kind": "task_id"}, **paper}
    assert third == second | {"rank": 2}
    assert [training_of(loaded.config, t).steps for t in range(3)] == [10, 10, 3]


def test_other_plans_by_name_by_file_and_none(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "surgeon: 1\noperations:\n  - {op: gated_adapters, extra_weights: 0.2}\n", encoding="utf-8"
    )
    text = SMALLEST.replace("  - name: code\n", "  - name: code\n    plan: llama-pro\n")
    plans = plans_of(written(tmp_path, text + "plan: mine.yaml\nnext_plan: none\n"))
    assert [plan and plan.plan.operations[0].op for plan in plans] == ["gated_adapters", "insert_layers", None]


def test_rows_options_and_texts_take_the_place_of_what_the_file_says(tmp_path: Path) -> None:
    path = tmp_path / "tasks.yaml"
    rows = "rows:\n  full: {plan: none, next_plan: none, train.what: all}\n"
    rows += "  slots: {tasks.law.train.steps: 3, replay: 0}\n"
    memory = "memory: [{name: lima}]\n"
    path.write_text(SMALLEST.replace("{path: law.jsonl}", "{}") + memory + rows, encoding="utf-8")
    texts = {"law": tmp_path / "other.jsonl", "lima": "dataset:some/lima"}
    found = load_tasks(path, ["tasks.0.train.steps=5", "seed=4"], texts=texts)
    assert list(found) == ["full", "slots"]
    full, slots = (loaded.config for loaded in found.values())
    assert [training_of(full, t).what for t in range(3)] == ["all"] * 3
    assert plans_of(found["full"]) == [None] * 3
    # An option goes over a row, and a task's `steps` over the file's.
    assert [training_of(slots, t).steps for t in range(3)] == [5, 10, 10]
    assert [source.path for source in training_of(slots, 0).sources] == [str(tmp_path / "other.jsonl")]
    # What is in memory is replayed from the first task on, as an earlier task is, and without replay not at all.
    shares = [{source.name: source.share for source in training_of(full, t).sources} for t in range(3)]
    assert shares[0] == {"law": pytest.approx(1 / 1.01), "lima": pytest.approx(0.01 / 1.01)}
    assert shares[2] == {
        "law": pytest.approx(0.01 / 1.03),
        "code": pytest.approx(0.01 / 1.03),
        "maths": pytest.approx(1 / 1.03),
        "lima": pytest.approx(0.01 / 1.03),
    }
    assert {source.name: source.role for source in training_of(full, 2).sources}["lima"] == "original"
    assert [source.name for source in training_of(slots, 0).sources] == ["law"]
    assert list(load_tasks(path, texts=texts, row="full")) == ["full"]
    for given, told in (
        ({"texts": texts, "row": "fll"}, r"--row fll: no row of .*tasks\.yaml; its rows: full, slots$"),
        ({"texts": texts | {"lwa": "x"}}, r"--text lwa=x: the file has no such source; did you mean `law`\?$"),
        ({"texts": {"law": "x"}}, r"tasks\.yaml:\d+: source lima has no `path`; add one, or --text lima=FILE$"),
        (
            {"texts": texts, "overrides": ["train.stps=5"]},
            r"--set train\.stps=5: unknown key `stps`; did you mean `steps`",
        ),
    ):
        with pytest.raises(BadInput, match=told):
            load_tasks(path, **given)
    path.write_text(
        path.read_text(encoding="utf-8").replace("plan: none, next_plan", "plan: nonne, next_plan"), encoding="utf-8"
    )
    with pytest.raises(BadInput, match=r"^row full: plan=nonne: nonne: neither a plan file nor the name"):
        plans_of(load_tasks(path, texts=texts)["full"])
    with pytest.raises(
        BadInput, match=r"^papers/pmoe/table-11: neither a tasks file nor the name of a shipped one; did"
    ):
        load_tasks("papers/pmoe/table-11")


def test_settings_are_those_of_what_they_are_for() -> None:
    assert ExpertSettings.model_fields.keys() <= PMoEExperts.model_fields.keys()
    assert TaskSource.model_fields.keys() <= SourceSpec.model_fields.keys()
    assert TrainSettings.model_fields.keys() <= TrainConfig.model_fields.keys()
    assert json_schema()["properties"].keys() >= {"tasks", "plan", "replay", "general"}


@pytest.mark.parametrize(
    "change, told",
    [
        (("steps: 10", "stepps: 10"), r"tasks\.yaml:2: unknown key `stepps`; did you mean `steps`\?"),
        (("train: {steps: 10}\n", ""), r"task law has no `steps`"),
        (("name: code", "name: law"), r"two tasks or general sources are called 'law'"),
        (("share: 0.8", "share: 1.0"), r"tasks\.yaml:6: .*shares sum to 1; they must sum to 1"),
        (("{path: law.jsonl}", "{path: law.jsonl, role: original}"), r"tasks\.yaml:4: .*needs a source of the role"),
        (("{path: law.jsonl}", "{path: law.jsonl, validation: 0.0}"), r"tasks\.yaml:5: .*above 0 and below 1"),
        (("{path: law.jsonl}", "{path: law.jsonl, name: code}"), r"two sources are called 'code'"),
        (("{path: law.jsonl}", "{paht: law.jsonl}"), r"tasks\.yaml:5: unknown key `paht`; did you mean `path`\?"),
        (("surgeon_continual: 1", "surgeon_continual: 2"), r"tasks\.yaml:1: `surgeon_continual` is 2"),
        (("tasks:\n", "plan: none\ntasks:\n"), r"the first task needs a plan"),
        (("tasks:\n", "plan: {rank: 0}\ntasks:\n"), r"tasks\.yaml:3: `plan\.rank` is 0"),
        (("tasks:\n", "plan: {ranks: 4}\ntasks:\n"), r"tasks\.yaml:3: unknown key `ranks`; did you mean `rank`\?"),
        (("tasks:\n", "replay: 2\ntasks:\n"), r"tasks\.yaml:3: `replay` is 2"),
    ],
)
def test_refusals(tmp_path: Path, change: tuple[str, str], told: str) -> None:
    assert change[0] in SMALLEST
    with pytest.raises(BadInput, match=told) as refused:
        written(tmp_path, SMALLEST.replace(*change, 1))
    assert "\n" not in str(refused.value)


def test_a_plan_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"tasks\.yaml:12: neerby: neither a plan file nor the name"):
        plans_of(written(tmp_path, SMALLEST + "next_plan: neerby\n"))


@pytest.mark.parametrize("text, told", [("", "is empty"), ("- 1\n", "is a mapping with")])
def test_no_tasks_file(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(BadInput, match=told):
        written(tmp_path, text)


def test_texts_that_are_not_there_are_named_by_line(tmp_path: Path) -> None:
    loaded = written(tmp_path, SMALLEST)
    paths = [source.path for task in loaded.config.tasks for source in task.sources]
    for path in paths[1:]:
        (tmp_path / path).write_text('{"text": "a text"}\n', encoding="utf-8")
    with pytest.raises(BadInput) as refused:
        check_texts(loaded)
    line = next(n for n, text in enumerate(SMALLEST.splitlines(), 1) if paths[0] in text)
    told = f"{tmp_path}/tasks.yaml:{line}: source law: {tmp_path}/{paths[0]}: no such file or folder; check the path"
    assert str(refused.value) == told
    (tmp_path / paths[0]).write_text('{"text": "a text"}\n', encoding="utf-8")
    check_texts(loaded)
