"""`surgeon continual` end to end: three tasks on a tiny Llama, what is measured, what is kept, what a kill costs."""

from __future__ import annotations

import fcntl
import io
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import surgeon
from surgeon.checkpoint.folder import CheckpointFolder, digests_of
from surgeon.checkpoint.open_files import HeldFolder
from surgeon.common import signed
from surgeon.common.listener import Quiet
from surgeon.data.encoding import Encoder
from surgeon.data.packing import Packer, held_out, split
from surgeon.errors import BadInput
from surgeon.lab.courses import course
from surgeon.lab.courses.continual import Continued
from surgeon.models.load import load_model
from surgeon.share.parcel import pack
from surgeon.share.push import hold_output
from surgeon.training.places import work_folder as training_folder
from tests import tiny
from tests.commands import killed_at
from tests.test_api import check_json
from tests.training.texts import CHAT_TEMPLATE, add_tokenizer, corpus, opened_texts, text
from tests.warm import warm

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONFIG: dict[str, Any] = {
    "surgeon_continual": 1,
    "plan": {"rank": 8, "threshold": 1, "targets": TARGETS, "dropout": 0.05},
    "train": {
        "steps": 16,
        "batch": 8,
        "length": 24,
        "save_every": 4,
        "evaluate_every": 16,
        "dtype": "float32",
        "optimizer": {"lr": 3e-2, "warmup": 2},
    },
    "replay": 0.1,
    "validation_sequences": 8,
    "general": [{"name": "other", "path": "other.jsonl"}],
    "tasks": [{"name": name, "sources": [{"path": f"{name}.jsonl", "validation": 0.2}]} for name in "abc"],
}
SHORT = CONFIG["train"] | {"steps": 2, "batch": 2, "save_every": 2, "evaluate_every": 2}


def prepared(folder: Path, **changes: Any) -> Path:
    """A base, texts of tasks that use words of their own, a tasks file."""
    folder.mkdir(exist_ok=True)
    add_tokenizer(tiny.checkpoint(folder / "base", "llama", num_hidden_layers=4))
    for number, name in enumerate("abc"):
        corpus(folder / f"{name}.jsonl", seed=number + 1, first=30 * number, count=8, documents=40)
    corpus(folder / "other.jsonl", seed=9, documents=20)
    return tasks_file(folder, **changes)


def tasks_file(folder: Path, **changes: Any) -> Path:
    path = folder / "tasks.yaml"
    path.write_text(yaml.safe_dump(CONFIG | changes, sort_keys=False), encoding="utf-8")
    return path


def carried_out(folder: Path, *, keep: bool = False) -> Continued:
    return surgeon.continual(folder / "tasks.yaml", folder / "base", folder / "run", keep=keep, device="cpu")


def tensors(folder: Path) -> dict[str, str]:
    opened = CheckpointFolder.open(folder)
    return digests_of(opened, opened.tensors, lambda _count: None)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@dataclass(frozen=True)
class Whole:
    """A run that nothing interrupted, with the earlier tasks' models."""

    folder: Path
    told: Continued

    @property
    def models(self) -> list[Path]:
        return [self.folder / "run-tasks" / "01-a", self.folder / "run-tasks" / "02-b", self.folder / "run"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("whole")
    prepared(folder)
    told = carried_out(folder, keep=True)
    return Whole(folder, told)


def test_each_task_is_learnt_and_every_earlier_one_measured(whole: Whole) -> None:
    told = whole.told
    check_json(told)
    assert [len(row) for row in told.matrix] == [1, 2, 3]
    assert list(told.rows[0]) == ["a", "b", "c", "other"]
    for number, name in enumerate(told.tasks):
        assert told.rows[number + 1][name].loss < told.rows[0][name].loss - 0.2
        assert told.matrix[number][number] > told.rows[0][name].accuracy + 0.1
    last = told.matrix[-1]
    assert told.overall[-1] == pytest.approx(sum(last) / 3)
    forgotten = [last[i] - told.matrix[i][i] for i in range(3)]
    assert told.backward[-1] == pytest.approx(sum(forgotten) / 3)
    before, after = (row["other"].accuracy for row in (told.rows[0], told.rows[-1]))
    assert told.delta[-1] == pytest.approx(after - before)
    assert [training["steps"] for training in told.trainings] == [16, 16, 16]
    assert not (whole.folder / ".run.continual").exists()


def test_performance_is_what_a_plain_loop_finds(whole: Whole) -> None:
    """Of the models that are left after each task: greedy guesses counted by hand."""
    encoder = Encoder(whole.folder / "base", vocabulary=128)
    for number, folder in enumerate([whole.folder / "base", *whole.models]):
        model = load_model(folder)
        for name, measured in whole.told.rows[number].items():
            documents = opened_texts(whole.folder / f"{name}.jsonl")
            numbers = list(range(20)) if name == "other" else list(split(documents, 0.2, name=name)[1])
            held = held_out(documents, numbers, encoder, Packer(24, "isolated", 0), most=8)
            ids, positions = (torch.tensor([getattr(each, part) for each in held]) for part in ("ids", "positions"))
            with torch.no_grad():
                guesses = model(ids, position_ids=positions, use_cache=False).logits.argmax(-1)
            right = count = 0
            for row, each in zip(guesses.tolist(), held, strict=True):
                for guess, label in zip(row[:-1], each.labels[1:], strict=True):
                    count += label != -100
                    right += guess == label
            assert (measured.right, measured.tokens) == (right, count), (folder, name)


def test_what_earlier_tasks_learnt_stays_to_the_byte(whole: Whole, tmp_path: Path) -> None:
    held = [tensors(whole.folder / "base"), *(tensors(folder) for folder in whole.models)]
    for earlier, later in itertools.pairwise(held):
        assert earlier.keys() < later.keys()
        assert {name: later[name] for name in earlier} == earlier
    slots = [{name.split(".slots.")[1].split(".")[0] for name in each if ".slots." in name} for each in held]
    assert slots == [set(), {"0"}, {"0", "1"}, {"0", "1", "2"}]
    surgeon.revert(whole.folder / "run", tmp_path / "back")
    assert tensors(tmp_path / "back") == held[2]


def test_the_run_verifies_against_the_base_and_is_a_complete_checkpoint(whole: Whole) -> None:
    run = whole.folder / "run"
    checked = surgeon.verify(whole.folder / "base", run, window=16, windows=1)
    assert checked.holds
    assert checked.trained
    assert checked.promise == "exact"
    assert any("39 of the base's are byte-identical" in check.detail for check in checked.checks)
    # A state in between is a base too, and so is the one before the last surgery.
    for state in whole.models[:2]:
        assert surgeon.verify(state, run, logits=False).holds
    code = (
        "import sys; sys.modules['surgeon'] = None\n"
        "import torch; from transformers import AutoModelForCausalLM\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(run)!r}, trust_remote_code=True)\n"
        "print(model.generate(torch.tensor([[10, 11, 12]]), max_new_tokens=4, do_sample=False).shape[1])"
    )
    ran = subprocess.run([*warm(), "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.strip().isdecimal()
    record = json.loads((run / "continual.json").read_text(encoding="utf-8"))
    assert record["matrix"] == whole.told.matrix
    assert record["backward_transfer"] == whole.told.backward
    assert str(whole.folder) not in json.dumps(record)


def test_verify_finds_what_was_changed_since_the_first_base(whole: Whole, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    for folder, name in (
        ("run", "model.norm.weight"),
        ("run", "model.layers.3.self_attn.q_proj.slots.0.lora_A"),
        ("base", "model.norm.weight"),
    ):
        shutil.rmtree(tmp_path, ignore_errors=True)
        shutil.copytree(whole.folder / "run", tmp_path / "run")
        shutil.copytree(whole.folder / "base", tmp_path / "base")
        opened = CheckpointFolder.open(tmp_path / folder)
        name = name if name in opened.tensors else next(n for n in opened.tensors if ".slots.0.lora_A" in n)
        file = tmp_path / folder / opened.tensors[name].file
        loaded = load_file(file)
        save_file(loaded | {name: loaded[name] + 1}, file, metadata={"format": "pt"})
        checked = surgeon.verify(tmp_path / "base", tmp_path / "run", logits=False)
        assert not checked.holds
        assert any(name in check.detail for check in checked.checks if not check.holds), checked.checks


class Interrupted(Exception):
    """Stands for a kill: nothing of surgeon's catches it."""


def edited(path: Path) -> None:
    """One bit of a file is another, and its time is not."""
    found = path.stat()
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def test_what_was_changed_between_two_calls_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs and grown models of a course that was cut off count only as they were written."""
    prepared(tmp_path / "one", train=SHORT, tasks=CONFIG["tasks"][:2])
    measure = course._Course._measure

    def cut(self: Any, *given: Any) -> None:
        if not given or given[0].name == "02-b":
            raise Interrupted
        measure(self, *given)

    def carried_on(folder: Path, *, to: str) -> list[str]:
        listener = Quiet()
        with monkeypatch.context() as patched, pytest.raises(Interrupted):
            patched.setattr(course._Course, to, cut)
            given = (folder / "tasks.yaml", folder / "base", folder / "run")
            surgeon.continual(*given, keep=True, take_over=True, device="cpu", listener=listener)
        return [line for line in listener.said if line.startswith(("01-", "02-"))]

    assert carried_on(tmp_path / "one", to="_measure") == []
    cases = {
        "01-a/tokenizer.json": "01-a/tokenizer.json is not what was written, so task 1 is learnt again",
        "01-a/SHARD": "is not what was written, so task 1 is learnt again",
        "02-b/SHARD": "is not what was written, so it is made again",
        "02-b.grown/tokenizer_config.json": "is not what was written, so it is made again",
    }
    for number, (what, why) in enumerate(cases.items()):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "one", folder)
        path = course.work_folder(folder / "run") / what
        path = sorted(path.parent.glob("*.safetensors"))[-1] if path.name == "SHARD" else path
        shutil.rmtree(path) if path.is_dir() else edited(path)
        assert any(why in line for line in carried_on(folder, to="carry_out")), what
    # What is whole in itself, and was put there, is none of its models; a copy of all of it is not gone on with.
    shutil.copytree(tmp_path / "one", tmp_path / "planted")
    work = course.work_folder(tmp_path / "planted" / "run")
    with pytest.raises(BadInput, match=r"holds this run after 1 of its tasks; this user wrote it in another place"):
        carried_out(tmp_path / "planted", keep=True)
    state = course.State.read(work / "course.json")
    assert state is not None
    del state[0].made["02-b"]
    state[0].write(work / "course.json")
    assert "02-b is not in course.json, so it is made again" in carried_on(tmp_path / "planted", to="carry_out")
    (tmp_path / "one" / ".run.continual" / "course.json").write_bytes(b'{"rows": []}')
    with pytest.raises(BadInput, match=r"course\.json: damaged or edited \(.*\); remove"):
        carried_out(tmp_path / "one", keep=True)


def test_cut_off_anywhere_between_its_steps_it_ends_the_same(
    whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One course, cut off before or after every kind of step; the folder is what a kill there leaves."""
    shutil.copytree(whole.folder, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("run*"))
    cuts: Iterator[tuple[str, int, bool]] = iter(
        [
            ("_measure", 0, False),
            ("_measure", 0, True),
            ("_grown", 1, True),
            ("_train", 0, True),
            ("_drop", 0, False),
            ("_train", 0, False),
            ("_measure", 0, False),
            ("_measure", 0, True),
            ("_drop", 2, True),
            ("publish", 0, False),
            ("publish", 0, True),
        ]
    )
    ended = None
    made = 0
    while ended is None:
        cut = next(cuts, None)
        with monkeypatch.context() as patched:
            if cut is not None:
                name, skip, after = cut
                original = getattr(course._Course, name)
                calls = {"left": skip}

                def step(
                    self: Any,
                    *given: Any,
                    original: Any = original,
                    calls: dict[str, int] = calls,
                    after: bool = after,
                ) -> Any:
                    calls["left"] -= 1
                    if calls["left"] < 0 and not after:
                        raise Interrupted
                    done = original(self, *given)
                    if calls["left"] < 0:
                        raise Interrupted
                    return done

                patched.setattr(course._Course, name, step)
            try:
                ended = carried_out(tmp_path, keep=True)
            except Interrupted:
                made += 1
    assert made == 11
    assert ended.resumed_after == 3
    assert ended.record() == whole.told.record()
    assert files(tmp_path / "run") == files(whole.folder / "run")
    assert tensors(tmp_path / "run-tasks" / "02-b") == tensors(whole.models[1])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in whole.folder.iterdir())


@pytest.mark.slow
def test_killed_in_the_middle_of_the_second_task(whole: Whole, tmp_path: Path) -> None:
    shutil.copytree(whole.folder, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("run*"))
    given = [str(tmp_path / name) for name in ("tasks.yaml", "base", "run")]
    command = [*warm(), "-m", "surgeon", "continual", *given, "--device", "cpu"]
    killed_at(8, *command[command.index("continual") :], within=training_folder(Path("02-b")).name)
    assert not (tmp_path / "run").exists()
    ran = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "continuing after 1 of 3 tasks" in ran.stderr
    assert "continuing from the checkpoint of step" in ran.stderr
    told = json.loads(ran.stdout)
    assert told["resumed_after"] == 1
    assert told["matrix"] == whole.told.matrix
    assert files(tmp_path / "run") == files(whole.folder / "run")
    # Without --keep nothing else is left.
    assert not (tmp_path / "run-tasks").exists()
    assert not course.work_folder(tmp_path / "run").exists()


def test_another_file_base_or_text_does_not_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of one task; what changes below is among its texts.
    one = {"tasks": CONFIG["tasks"][:1]}
    path = prepared(tmp_path, train=SHORT, **one)

    def cut(*_: Any) -> None:
        raise Interrupted

    with monkeypatch.context() as patched:
        patched.setattr(course._Course, "_train", cut)
        with pytest.raises(Interrupted):
            carried_out(tmp_path)
    original = path.read_text(encoding="utf-8")
    tasks_file(tmp_path, train=SHORT | {"steps": 3}, **one)
    with pytest.raises(BadInput, match=r"\.run\.continual: holds another run \(the tasks file, its texts, the base"):
        carried_out(tmp_path)
    path.write_text(original, encoding="utf-8")
    with (tmp_path / "a.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"text": "w1 w2"}\n')
    with pytest.raises(BadInput, match="holds another run"):
        carried_out(tmp_path)
    shutil.rmtree(course.work_folder(tmp_path / "run"))
    # What has no part in any number may differ from call to call.
    with monkeypatch.context() as patched:
        patched.setattr(course._Course, "_train", cut)
        with pytest.raises(Interrupted):
            carried_out(tmp_path)
    tasks_file(tmp_path, train=SHORT | {"micro_batch": 1, "log_every": 1}, **one)
    assert carried_out(tmp_path).resumed_after == 0


def test_a_kept_name_in_the_way_and_two_at_once(tmp_path: Path) -> None:
    prepared(tmp_path, train=SHORT)
    (tmp_path / "run-tasks").mkdir()
    with pytest.raises(BadInput, match="run-tasks: exists; --keep puts"):
        carried_out(tmp_path, keep=True)
    work = course.work_folder(tmp_path / "run")
    work.mkdir()
    with (work / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(BadInput, match="is writing it; wait for it"):
            carried_out(tmp_path)
    (tmp_path / "run").mkdir()
    with pytest.raises(BadInput, match="run: exists; give a new folder in it"):
        carried_out(tmp_path)


@pytest.mark.parametrize(
    "change, told",
    [
        ({"plan": {"threshold": 4}}, r"tasks\.yaml:2: `threshold` 4 leaves no layer for the slots"),
        ({"plan": {"targets": ["nothing"]}}, r"tasks\.yaml:2: `targets` names 'nothing'"),
        ({"train": SHORT | {"length": 200}}, "`length` is 200, the model's context 128"),
        ({"train": SHORT | {"batch": 5, "micro_batch": 2}}, "`micro_batch` 2 does not divide the 5 sequences"),
        (
            {"general": [{"name": "other", "path": "other.jsonl", "kind": "chat"}]},
            r"no keys of a chat \(messages",
        ),
    ],
)
def test_what_a_later_step_would_refuse_is_refused_first(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    prepared(tmp_path, **change)
    with pytest.raises(BadInput, match=told):
        carried_out(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "base",
        "tasks.yaml",
        *(f"{n}.jsonl" for n in ("a", "b", "c", "other")),
    }


def test_a_bad_line_of_the_last_task_is_told_before_the_first(tmp_path: Path) -> None:
    prepared(tmp_path)
    with (tmp_path / "c.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"text": "w1"\n')
    with pytest.raises(BadInput, match=r"c\.jsonl:41: not JSON"):
        carried_out(tmp_path)
    assert not course.work_folder(tmp_path / "run").exists()


def test_several_processes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(BadInput, match="runs in one process"):
        carried_out(tmp_path)


def test_one_lora_for_all_tasks_and_the_papers_own_procedure(tmp_path: Path) -> None:
    """Baselines: nothing added after the first task; and one softmax, router and shared LoRA trained on."""
    prepared(tmp_path, train=SHORT, next_plan="none", general=[], tasks=CONFIG["tasks"][:2])
    single = carried_out(tmp_path)
    assert single.delta == [None, None]
    manifest = surgeon.inspect(single.path).manifest
    assert manifest is not None
    assert len(manifest.training) == 2
    assert not manifest.lineage
    assert surgeon.verify(tmp_path / "base", single.path, logits=False).holds
    with (single.path / "continual.json").open("a") as record:
        record.write(" ")
    assert not surgeon.verify(tmp_path / "base", single.path, logits=False).holds
    shutil.rmtree(tmp_path / "run")
    paper = {"new_slot_mass": "paper", "trains_also": ["router", "shared"]}
    asked = CONFIG["plan"] | {"router_loss": {"kind": "task_id"}}
    tasks_file(tmp_path, train=SHORT, plan=asked, next_plan=paper, tasks=CONFIG["tasks"][:2])
    carried_out(tmp_path)
    # The shared LoRA trained on: the base is what the slots stand on all the same.
    assert surgeon.verify(tmp_path / "base", tmp_path / "run", logits=False).holds
    with pytest.raises(BadInput, match="has slots already, and the router's loss takes the first task for the first"):
        surgeon.continual(tmp_path / "tasks.yaml", tmp_path / "run", tmp_path / "more", device="cpu")
    tasks_file(tmp_path, train=SHORT, plan=asked, next_plan="none", tasks=CONFIG["tasks"][:2])
    with pytest.raises(
        BadInput, match=r"task 2 gets no slot, and `router_loss: \{kind: task_id\}` takes each task for"
    ):
        surgeon.continual(tmp_path / "tasks.yaml", tmp_path / "base", tmp_path / "more", device="cpu")
    assert not list(tmp_path.glob(".more*"))


def test_chats_are_measured_on_responses_alone(tmp_path: Path) -> None:
    prepared(tmp_path)
    add_tokenizer(tmp_path / "base", template=CHAT_TEMPLATE)
    chats = [
        {"messages": [{"role": "user", "content": text(5, n)}, {"role": "assistant", "content": text(3, n + 50)}]}
        for n in range(12)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats), encoding="utf-8")
    task = {"name": "a", "sources": [{"path": "a.jsonl", "kind": "chat", "validation": "a.jsonl"}]}
    tasks_file(tmp_path, train=SHORT | {"length": 12}, tasks=[task], validation_sequences=100)
    told = carried_out(tmp_path)
    # Three words and the end of the turn, of each of twelve responses; what the last sequence lacks is not counted.
    assert 12 * 4 - 4 <= told.rows[0]["a"].tokens <= 12 * 4


def test_what_was_measured_goes_along_to_the_hub(whole: Whole) -> None:
    with HeldFolder(whole.folder / "run") as held:
        parcel = pack(hold_output(held, trust_remote_code=False), held, b"card")
    assert "continual.json" in parcel.files
    assert not parcel.left_behind


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared(tmp_path, train=SHORT)

    def full(path: Path, *_: Any) -> None:
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(signed, "write_durably", full)
        with pytest.raises(BadInput, match=r"course\.json: the disk is full \(.* free there\); .* complete is kept"):
            carried_out(tmp_path)
    assert not (tmp_path / "run").exists()


def test_the_command_shows_the_matrix(whole: Whole) -> None:
    from rich.console import Console

    from surgeon.lab.courses.continual import continued_view

    console = Console(width=120, record=True, file=io.StringIO())
    console.print(continued_view(whole.told))
    shown = console.export_text()
    assert f"{100 * whole.told.backward[-1]:+.1f}" in shown
    assert f"{whole.told.overall[-1]:.1%}" in shown
    assert repr(whole.told).startswith("Continued(")
