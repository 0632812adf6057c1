"""What errors say of a wrong value: every form that its schema has there, in plain words, for each key of each file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from surgeon.common.checked_yaml import check_yaml
from surgeon.common.schema import Forms
from surgeon.common.yaml import Document
from surgeon.errors import BadInput, Mistakes
from surgeon.lab.courses.config.schema import TasksConfig
from surgeon.lab.evaluation.open_texts import DataConfig
from surgeon.lab.studies.config.schema import Study
from surgeon.operations import OPERATIONS
from surgeon.operations.operation import Operation
from surgeon.plan.plan import Plan, parse_plan
from surgeon.training.config.loading import HABITS
from surgeon.training.config.schema import TrainConfig

FILES: list[type[BaseModel]] = [Plan, TrainConfig, TasksConfig, Study, DataConfig]
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


def test_a_name_says_its_characters() -> None:
    (told,) = refusal(DataConfig, {"surgeon_data": 1, "sources": [{"name": "fr text", "path": "a.txt"}]})
    assert told.endswith('`sources.0.name` is "fr text"; it takes text of 1 to 60 letters, digits, _ and -')


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
        check_yaml(model, Document(data, {}, "file.yaml", "file"), habits)
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


# A slice of mergekit's.
A = "{sources: [{model: a, layer_range: [0, 2]}]}"


def test_a_key_that_stands_in_a_section_is_sent_there() -> None:
    data = {"surgeon_train": 1, "steps": 1, "sources": [{"name": "a", "share": 1.0, "path": "a"}], "weight_decay": 1}
    assert refusal(TrainConfig, data) == [
        "file.yaml:1: unknown key `weight_decay`; here it is `optimizer.weight_decay`"
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("merge_method: linear\nmodels: []\n", "surgeon grows one model and merges none"),
        ("models: [{model: a}, {model: b}]\n", "surgeon grows one model and merges none"),
        (
            f"slices: [{A}, {A.replace('a,', 'b,')}]\nmerge_method: passthrough\n",
            r"merges models a, b; surgeon grows",
        ),
        (f"slices: [{A.replace('a,', 'a+lora,')}]\nmerge_method: passthrough\n", "merges models a, lora; surgeon"),
    ],
)
def test_a_config_of_mergekit_that_merges_is_recognised(text: str, said: str) -> None:
    with pytest.raises(BadInput, match=rf"a mergekit config.*{said}"):
        parse_plan(text)


def test_a_config_of_mergekit_that_stacks_one_model_is_a_plan() -> None:
    text = f"dtype: bfloat16\nmerge_method: passthrough\nslices:\n- {A}\n- {A.replace('0, 2', '1, 3')}\n"
    loaded = parse_plan(text, source="x.yml")
    (operation,) = loaded.data()["operations"]
    assert (operation["slices"], operation["dtype"]) == ([[0, 2], [1, 3]], "bfloat16")
    assert loaded.text == text and loaded.operation(0) == "x.yml:3: operations[0] (stack_layers)"
    changed = parse_plan(text, overrides=["operations.0.slices=[[0, 1], [0, 1]]"])
    assert changed.data()["operations"][0]["slices"] == [[0, 1], [0, 1]]
    wrong = text.replace("[1, 3]}", "[1, 3, 5],\n  parameters: {scale: 0.0}}") + "tokenizer_source: base\n"
    with pytest.raises(BadInput) as refused:
        parse_plan(wrong, source="x.yml")
    assert [line.split(";")[0] for line in str(refused.value).splitlines()] == [
        "x.yml:5: `slices.1.sources.0.layer_range` is [1, 3, 5]",
        "x.yml:6: unknown key `parameters`",
        "x.yml:7: unknown key `tokenizer_source`",
    ]


def test_what_is_missing_is_named_with_what_it_takes() -> None:
    wrong = {"operations": [{"op": "widen_ffn", "by": 0}]}
    assert refusal(Plan, wrong) == [
        "file.yaml:1: `surgeon` is missing; it takes 1",
        "file.yaml:1: `operations.0.by` is 0; it takes a whole number, at least 1 and at most 2,147,483,648",
    ]
