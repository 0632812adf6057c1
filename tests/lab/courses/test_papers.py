"""What papers ran, as shipped: tasks files and studies, carried out on a tiny base with few and short steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import surgeon
from surgeon.common.listener import Quiet
from surgeon.errors import BadInput
from surgeon.lab.courses import course
from surgeon.lab.courses.config.loading import load_tasks, plans_of, training_of
from surgeon.lab.courses.results import ContinuedRows, continued_view
from surgeon.plan.shipped import described, shipped_tasks, text_of
from tests.lab.courses.paper_texts import base, lacking, tasks_of, texts
from tests.test_api import check_json

PAPERS = sorted(shipped_tasks())


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("papers")
    base(made)
    return made


@pytest.mark.parametrize("name", PAPERS)
def test_every_row_of_a_table_is_read_and_fits_the_base(name: str, room: Path) -> None:
    rows = load_tasks(name, texts=dict.fromkeys(lacking(name), room / "x"))
    assert "" not in rows
    for loaded in rows.values():
        for number, plan in enumerate(plans_of(loaded)):
            training = training_of(loaded.config, number)
            assert training.optimizer.lr is not None
            assert training.batch is not None
            assert plan is not None or training.what is not None or training.lora is not None or number > 0
            if plan is not None and number == 0:
                surgeon.preview(plan, room / "base")
    assert f"surgeon continual {name} BASE RUN --text " in text_of(name)
    assert name in {each.name for each in described()}


class Interrupted(Exception):
    """Stands for a kill: nothing of surgeon's catches it."""


def test_opt_deus_pre_trains_what_is_new_and_fine_tunes_all(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows, the second cut off between its stages; the same call goes on, and what is complete is left alone."""
    name = "papers/opt-deus/table-2"
    given = texts(room, name)
    short = ["train.batch=2", "train.length=24", "validation_sequences=4", "tasks.cpt.train.steps=2"]
    short += [f"tasks.{task}.sources.0.validation=0.2" for task in tasks_of(name)]

    def run(row: str, *more: str) -> ContinuedRows:
        listener.said.clear()
        found = surgeon.continual(
            name,
            room / "base",
            room / "run",
            overrides=[*short, *more],
            texts=given,
            row=row,
            device="cpu",
            listener=listener,
        )
        assert isinstance(found, ContinuedRows)
        return found

    listener = Quiet()
    first = run("base")
    train = course._Course._train

    def cut(self: Any, number: int, *rest: Any) -> None:
        if number == 1:
            raise Interrupted
        train(self, number, *rest)

    with monkeypatch.context() as patched, pytest.raises(Interrupted):
        patched.setattr(course._Course, "_train", cut)
        run("opt-deus")
    assert run("base").rows["base"].record() == first.rows["base"].record()
    assert listener.said[1:] == [f"{room / 'run' / 'base'} was already complete"]
    grown = run("opt-deus")
    assert "continuing after 1 of 2 tasks" in listener.said
    check_json(grown)
    manifest = surgeon.inspect(room / "run" / "opt-deus").manifest
    assert manifest is not None
    pre_trained, tuned = (set(training.tensors) for training in manifest.training)
    assert pre_trained == set(manifest.new_tensors)
    assert tuned > pre_trained
    assert tuned == set(surgeon.open_checkpoint(room / "run" / "opt-deus").tensors)
    assert [each["settings"]["lr"] for each in grown.rows["opt-deus"].trainings] == [1e-4, 1e-5]
    continued_view(grown)
    with pytest.raises(
        BadInput, match=r"base: of another run \(the tasks file, its texts, the base or surgeon changed"
    ):
        run("base", "tasks.cpt.train.steps=3")
    record = room / "run" / "base" / "continual.json"
    record.write_text(record.read_text(encoding="utf-8").replace('"tokens"', '"token"'), encoding="utf-8")
    with pytest.raises(
        BadInput, match=r"continual\.json: damaged or edited; move .*base away, and the row is run again"
    ):
        run("base")
