"""What errors say of a wrong value: every form that its schema has there, in plain words, for each key of each file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from surgeon.common.checked_yaml import check_yaml
from surgeon.common.schema_forms import Forms
from surgeon.compare.config.schema import Study
from surgeon.continual.config.schema import TasksConfig
from surgeon.errors import BadInput, Mistakes
from surgeon.evaluate.open_texts import DataConfig
from surgeon.operations import OPERATIONS
from surgeon.operations.operation import Operation
from surgeon.plan.plan import Plan, parse_plan
from surgeon.plan.sweep import Sweep
from surgeon.train.config.loading import HABITS
from surgeon.train.config.schema import TrainConfig

FILES: list[type[BaseModel]] = [Plan, Sweep, TrainConfig, TasksConfig, Study, DataConfig]
# Of no type that a key may have.
NONSENSE = [[[]]]
# pydantic's own words.
FOREIGN = ("Input", "valid", "object", "array", "Field required", "tuple", "dictionary", "instance")


class Part(BaseModel):
    kind: Literal["part"]
    size: int


class Other(BaseModel):
    kind: Literal["other"]


class Whole(BaseModel):
    which: Literal["all", "some"] | list[int] | None = None
    part: Part | Other
    names: list[str] = []


def test_every_form_is_said() -> None:
    forms = Forms(Whole.model_json_schema())
    assert forms.words({}, ("which",)) == "all, some or [N, …]"
    assert forms.words({}, ("part",)) == "{kind: part, …}, with kind one of part, other"
    assert forms.words({"part": {"kind": "part", "size": "x"}}, ("part", "size")) == "a whole number"
    assert forms.words({"names": [1]}, ("names", 0)) == "text"
    assert forms.keys({"part": {"kind": "part"}}, ("part",)) == ["kind", "size"]
    assert forms.home_of("kind") == "part.kind" and forms.home_of("nothing") is None


def refusal(model: type[BaseModel], data: dict[str, Any], habits: Mapping[str, str] = {}) -> list[str]:
    with pytest.raises(BadInput) as refused:
        check_yaml(model, data, {}, "file.yaml", what="file", habits=habits)
    return list(refused.value.lines if isinstance(refused.value, Mistakes) else [str(refused.value)])


@pytest.mark.parametrize("model", FILES, ids=lambda model: model.__name__)
def test_a_wrong_value_of_any_key_is_met_with_what_it_takes(model: type[BaseModel]) -> None:
    for key in model.model_fields:
        (line,) = [line for line in refusal(model, {key: NONSENSE}) if f"`{key}" in line and "missing" not in line]
        assert not any(word in line.replace("validation", "") for word in FOREIGN), line


@pytest.mark.parametrize("op", OPERATIONS)
def test_a_wrong_value_of_any_option_is_met_with_what_it_takes(op: str) -> None:
    operation: type[Operation] = OPERATIONS[op]
    for key in {field.alias or name for name, field in operation.model_fields.items()} - {"op"}:
        lines = refusal(Plan, {"surgeon": 1, "operations": [{"op": op, key: NONSENSE}]})
        (line,) = [line for line in lines if f"operations.0.{key}" in line]
        assert not any(word in line for word in FOREIGN), line


def test_plain_forms_are_what_they_stand_for() -> None:
    short = parse_plan("surgeon: 1\noperations: [{op: insert_layers, where: [2, 5], init: copy}]\n")
    long = parse_plan("surgeon: 1\noperations: [{op: insert_layers, where: {after: [2, 5]}, init: {kind: copy}}]\n")
    assert short.plan == long.plan and short.data() == long.data()


@pytest.mark.parametrize("key", HABITS)
def test_a_key_of_another_trainer_is_named_as_it_is_here(key: str) -> None:
    data = {"surgeon_train": 1, "steps": 1, "sources": [{"name": "a", "share": 1.0, "path": "a"}], key: 1}
    (line,) = refusal(TrainConfig, data, HABITS)
    assert f"unknown key `{key}`; here it is {HABITS[key]}" in line
    # What is named is there: a key, a key of a section, an argument of the command.
    for named in HABITS[key].split("`")[1::2]:
        fields: Any = TrainConfig
        if not named.startswith("surgeon train"):
            section, _, inner = named.partition(".")
            assert section in fields.model_fields or named == "validation", named
            if inner:
                keys = Forms(TrainConfig.model_json_schema()).keys({}, (section,))
                assert inner in keys, named


def test_a_key_that_stands_in_a_section_is_sent_there() -> None:
    data = {"surgeon_train": 1, "steps": 1, "sources": [{"name": "a", "share": 1.0, "path": "a"}], "weight_decay": 1}
    assert refusal(TrainConfig, data) == [
        "file.yaml:1: unknown key `weight_decay`; here it is `optimizer.weight_decay`"
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("merge_method: linear\nmodels: []\n", "surgeon grows one model and merges none"),
        ("slices: []\nmerge_method: passthrough\n", "stacked slices are `stack_layers`.*surgeon plans"),
    ],
)
def test_a_config_of_mergekit_is_recognised(text: str, said: str) -> None:
    with pytest.raises(BadInput, match=rf"a mergekit config.*{said}"):
        parse_plan(text)


def test_what_is_missing_is_named_with_what_it_takes() -> None:
    wrong = {"operations": [{"op": "widen_ffn", "by": 0}]}
    assert refusal(Plan, wrong) == [
        "file.yaml:1: `surgeon` is missing; it takes 1",
        "file.yaml:1: `operations.0.by` is 0; it takes a whole number, at least 1 and at most 2,147,483,648",
    ]
