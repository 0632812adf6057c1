"""What papers ran, as shipped: tasks files and studies, carried out on a tiny base with few and short steps."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import surgeon
from surgeon.common.listener import Quiet
from surgeon.continual import course
from surgeon.continual.config.loading import load_tasks
from surgeon.continual.config.settings import plans_of, training_of
from surgeon.continual.results import ContinuedRows, continued_view
from surgeon.errors import BadInput
from surgeon.plan.shipped import described, shipped_tasks, text_of
from tests import tiny
from tests.test_api import check_json
from tests.train.texts import CHAT_TEMPLATE, add_tokenizer, corpus, text

PAPERS = sorted(shipped_tasks())
# The cluster's numbers as a laptop has them; rates and all else are the papers'.
SMALL = ["train.batch=2", "train.length=24", "validation_sequences=4"]


def sources_of(name: str) -> dict[str, str]:
    """The names of a shipped file's sources without a path, and their kinds."""
    with pytest.raises(BadInput) as refused:
        load_tasks(name)
    found = re.findall(
        r"table-\d+\.yaml:\d+: source (\S+) has no `path`; add one, or --text \1=FILE", str(refused.value)
    )
    assert len(found) == len(str(refused.value).splitlines())
    return {each: "chat" if f"name: {each}\n    sources: [{{kind: chat" in text_of(name) else "text" for each in found}


def texts(room: Path, name: str) -> dict[str, Path | None]:
    given: dict[str, Path | None] = {}
    for number, (source, kind) in enumerate(sources_of(name).items()):
        file = room / f"{source}.jsonl"
        given[source] = file
        if kind == "text":
            corpus(file, seed=number + 1, first=30 * number, count=8, documents=20)
            continue
        turns = [[("user", text(5, n)), ("assistant", text(3, n + 50))] for n in range(20)]
        chats = [{"messages": [{"role": role, "content": said} for role, said in each]} for each in turns]
        file.write_text("".join(json.dumps(chat) + "\n" for chat in chats), encoding="utf-8")
    return given


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("papers")
    add_tokenizer(tiny.checkpoint(made / "base", "llama", num_hidden_layers=8, hidden_size=16), template=CHAT_TEMPLATE)
    return made


def held_out(name: str) -> list[str]:
    """A held-out part that a few documents have too."""
    tasks = next(iter(load_tasks(name, texts=dict.fromkeys(sources_of(name), "x")).values())).config.tasks
    return [f"tasks.{task.name}.sources.0.validation=0.2" for task in tasks]


@pytest.mark.parametrize("name", PAPERS)
def test_every_row_of_a_table_is_read_and_fits_the_base(name: str, room: Path) -> None:
    rows = load_tasks(name, texts=dict.fromkeys(sources_of(name), room / "x"))
    assert "" not in rows
    for loaded in rows.values():
        for number, plan in enumerate(plans_of(loaded)):
            training = training_of(loaded.config, number)
            assert training.optimizer.lr is not None
            assert training.batch is not None
            assert plan is not None or training.what is not None or training.lora is not None or number > 0
            if plan is not None:
                surgeon.preview(plan, room / "base")
    assert f"surgeon continual {name} BASE RUN --text " in text_of(name)
    assert name in {each.name for each in described()}


class Interrupted(Exception):
    """Stands for a kill: nothing of surgeon's catches it."""


def test_opt_deus_pre_trains_what_is_new_and_fine_tunes_all(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows, the second cut off between its stages; the same call goes on, and what is complete is left alone."""
    name = "papers/opt-deus/table-2"
    given = texts(room, name)
    short = [*SMALL, *held_out(name), "tasks.cpt.train.steps=2"]

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
    assert pre_trained == {tensor.name for operation in manifest.operations for tensor in operation.new_tensors}
    assert tuned > pre_trained
    assert tuned == set(surgeon.open_checkpoint(room / "run" / "opt-deus").tensors)
    assert [each["settings"]["optimizer"]["lr"] for each in grown.rows["opt-deus"].trainings] == [1e-4, 1e-5]
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
