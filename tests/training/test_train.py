"""`surgeon train` end to end: what starts equal, what moves, what survives a kill, what is refused."""

from __future__ import annotations

import gc
import getpass
import hashlib
import io
import json
import os
import platform
import re
import shutil
import subprocess
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file, save_file

import surgeon
from surgeon.checkpoint.folder import CheckpointFolder, digests_of
from surgeon.common import devices, signed
from surgeon.common.listener import Quiet
from surgeon.data.encoding import Encoder
from surgeon.data.packing import Packer, held_out, split
from surgeon.data.scoring import score_sequences
from surgeon.errors import BadInput, Diverged
from surgeon.models.load import load_model
from surgeon.models.templates import TEMPLATES
from surgeon.training import dry_run, footprint, session
from surgeon.training.loading import loaded_model
from surgeon.training.objectives.next_tokens import NextTokens
from surgeon.training.places import work_folder
from surgeon.training.saved.checkpoints import RunRecord, drop_what_does_not_count, newest_checkpoint, step_of
from surgeon.training.saved.work_folder import own_work_folder
from surgeon.training.steps import trainer
from surgeon.training.steps.trainer import TRAINED_FILE
from surgeon.training.train import rehearsal_view, trained_view
from tests import tiny
from tests.commands import killed_at
from tests.test_api import check_json
from tests.training.texts import CHAT_TEMPLATE, add_tokenizer, corpus, opened_texts, text
from tests.warm import warm

CONFIG: dict[str, Any] = {
    "surgeon_train": 1,
    "steps": 12,
    "batch": 4,
    "length": 24,
    "save_every": 4,
    "evaluate_every": 6,
    "log_every": 1,
    "validation_sequences": 4,
    "optimizer": {"lr": 1e-2, "warmup": 2},
    "sources": [
        {"name": "fr", "path": "fr.jsonl", "share": 0.75, "validation": 0.1},
        {"name": "en", "path": "en.jsonl", "share": 0.25, "role": "original", "validation": 0.1},
    ],
}


def base_of(folder: Path, family: str = "llama", **overrides: Any) -> Path:
    """A tiny base with a tokenizer, and texts beside it."""
    corpus(folder / "fr.jsonl", seed=1, first=50, count=50)
    corpus(folder / "en.jsonl", seed=2, count=50)
    return add_tokenizer(tiny.checkpoint(folder / "base", family, **overrides))


def grown(folder: Path, plan: str = "neutral-residues", family: str = "llama", **overrides: Any) -> Path:
    surgeon.apply(plan, str(base_of(folder, family, **overrides)), folder / "out")
    return folder / "out"


def config(folder: Path, **changes: Any) -> Path:
    path = folder / "train.yaml"
    path.write_text(yaml.safe_dump(CONFIG | changes), encoding="utf-8")
    return path


def digests(folder: Path) -> dict[str, str]:
    opened = CheckpointFolder.open(folder)
    return digests_of(opened, opened.tensors, lambda _count: None)


def command(folder: Path, *more: str) -> list[str]:
    given = ["train", str(folder / "out"), str(folder / "train.yaml"), str(folder / "run")]
    return [*warm(), "-m", "surgeon", *given, "--device", "cpu", *more]


@pytest.mark.parametrize(
    ("plan", "family"),
    [
        ("llama-pro", "gemma2"),
        ("neutral-residues", "llama"),
        ("control-llm", "gemma2"),
        ("mixture-of-control", "llama"),
        ("pmoe", "gemma2"),
    ],
)
def test_every_preserving_plan_starts_at_the_bases_loss_and_moves_nothing_else(
    tmp_path: Path, plan: str, family: str
) -> None:
    out = grown(tmp_path, plan, family, num_hidden_layers=8)
    before = digests(out)
    trained = surgeon.train(out, config(tmp_path, steps=3, evaluate_every=2), tmp_path / "run", device="cpu")
    assert trained is not None
    # On a CPU without products of bfloat16, training measures in float32.
    base = load_model(tmp_path / "base", dtype=devices.fast_dtype("cpu"))
    encoder = Encoder(tmp_path / "base", vocabulary=128)
    for source in CONFIG["sources"]:
        documents = opened_texts(tmp_path / source["path"])
        _, held = split(documents, source["validation"], name=source["name"])
        sequences = held_out(documents, list(held), encoder, Packer(24, "isolated", 0), most=4)
        expected = score_sequences(base, sequences, micro_batch=4).loss
        assert trained.losses[source["name"]][0] == expected
    after = digests(tmp_path / "run")
    moved = {name for name in before if before[name] != after[name]}
    assert before.keys() == after.keys()
    assert moved <= trained.changes.keys() == trained.manifest.new_tensors.keys()
    assert moved == trained.changes.keys() - set(trained.unchanged)
    # Of one slot the softmax is 1 whatever its column says; that nothing trains it is told, not hidden.
    assert trained.unchanged == tuple(name for name in trained.changes if "expert_router" in name)
    checked = surgeon.verify(tmp_path / "base", tmp_path / "run", text=None, windows=1)
    assert checked.trained
    assert checked.holds
    assert not work_folder(tmp_path / "run").exists()
    shards = {info.file for name, info in CheckpointFolder.open(out).tensors.items() if name not in moved}
    untouched = shards - {CheckpointFolder.open(out).tensors[name].file for name in moved}
    assert untouched
    for file in untouched:
        assert (out / file).read_bytes() == (tmp_path / "run" / file).read_bytes()


def test_it_learns(tmp_path: Path) -> None:
    path, heard = config(tmp_path, steps=40, dtype="float32"), Quiet()
    trained = surgeon.train(grown(tmp_path), path, tmp_path / "run", device="cpu", listener=heard)
    assert trained is not None
    defaults, what, packing, first = heard.said[:4]
    assert defaults.startswith("defaults of gated_adapters: min_lr ")
    assert what.startswith(f"trains {len(trained.changes)} tensors, {trained.parameters:,} numbers (gated_adapters), ")
    assert what.endswith(", on fr, en: 96 tokens a step in windows of at most 24 tokens")
    assert packing == "packing: documents isolated (checked)"
    assert first.startswith("step 0: held-out loss in windows of at most 24 tokens: fr ")
    held = [line for line in heard.said[4:] if "held-out" in line]
    assert held and all("held-out loss in windows of at most 24 tokens: fr " in line for line in held)
    assert trained.losses["fr"][1] < trained.losses["fr"][0] - 0.2
    losses = [entry["loss"] for entry in trained.log if "loss" in entry]
    assert len(losses) == 40
    assert trained.tokens == 40 * 4 * 24
    told = trained.to_json()
    assert told["tokens_per_second"] == trained.tokens / trained.seconds
    assert told["peak_memory"] > sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
    shown = io.StringIO()
    Console(file=shown, width=200).print(trained_view(trained))
    assert f"{trained.tokens_per_second:,.0f} a second" in shown.getvalue()
    assert "peak memory" in shown.getvalue()
    lines = [line.strip() for line in shown.getvalue().splitlines()]
    assert lines[0].split() == ["source", "before", "after", "change"]
    assert lines[3] == "held-out loss in windows of at most 24 tokens"
    numbers = f"{len(trained.changes)} new tensors ({trained.parameters:,} numbers) trained"
    assert lines[-1].endswith(f"run is complete: {numbers}; every other tensor is byte for byte the same")


def test_the_last_line_says_how_much_of_the_base_trained(tmp_path: Path) -> None:
    out = grown(tmp_path)
    said = {}
    for what in ("all", "base"):
        trained = surgeon.train(out, config(tmp_path, steps=2, what=what), tmp_path / f"run-{what}", device="cpu")
        assert trained is not None
        shown = io.StringIO()
        Console(file=shown, width=200).print(trained_view(trained))
        said[what] = shown.getvalue().splitlines()[-1].partition(" is complete: ")[2]
        number = len(trained.changes)
    whole = len(surgeon.open_checkpoint(out).tensors)
    assert said["all"].startswith(f"all {whole} tensors (") and said["all"].rstrip().endswith("numbers) trained")
    assert f"numbers) trained, {number} of them the base's; every other tensor is byte" in said["base"]
    assert said["base"].startswith(f"{number} tensors (") and number < whole


def test_evaluations_and_checkpoints_are_no_part_of_the_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late, clock = 0.0, time.perf_counter

    def slow(function: Any) -> Any:
        def slowly(*arguments: Any, **named: Any) -> Any:
            nonlocal late
            late += 10_000
            return function(*arguments, **named)

        return slowly

    monkeypatch.setattr(time, "perf_counter", lambda: clock() + late)
    monkeypatch.setattr(NextTokens, "judged", slow(NextTokens.judged))
    monkeypatch.setattr(trainer, "complete", slow(trainer.complete))
    trained = surgeon.train(grown(tmp_path), config(tmp_path, steps=2), tmp_path / "run", device="cpu")
    assert trained is not None
    assert late >= 20_000
    assert 0 < trained.seconds < 10_000


@pytest.mark.parametrize("plan, tolerance", [("llama-pro", 1e-4), ("control-llm", 2e-3)])
def test_micro_batches_add_up_to_the_batch(tmp_path: Path, plan: str, tolerance: float) -> None:
    """To rounding; an auxiliary loss, a mean over tokens, weighs a micro-batch by its labels, which is not quite it."""
    out = grown(tmp_path, plan, num_hidden_layers=8)
    logs = []
    for micro_batch in (4, 1):
        path = config(tmp_path, steps=4, micro_batch=micro_batch, dtype="float32")
        trained = surgeon.train(out, path, tmp_path / f"run{micro_batch}", device="cpu")
        assert trained is not None
        logs.append([(entry["loss"], entry["grad_norm"]) for entry in trained.log if "loss" in entry])
    torch.testing.assert_close(torch.tensor(logs[0]), torch.tensor(logs[1]), rtol=tolerance, atol=1e-5)


def test_a_run_is_an_output_like_any_other(tmp_path: Path) -> None:
    """Trained again, operated on again, taken back."""
    out = grown(tmp_path)
    for start, end in ((out, "run"), (tmp_path / "run", "again")):
        surgeon.train(start, config(tmp_path, steps=2), tmp_path / end, device="cpu", link=end == "again")
    # Linked: every shard in which nothing trained, which are all of the base's.
    first, second = (
        {path.stat().st_ino for path in (tmp_path / name).glob("*.safetensors")} for name in ("run", "again")
    )
    assert len(first & second) == len(first) - 1 == 4
    again = surgeon.inspect(tmp_path / "again").manifest
    assert again is not None
    assert len(again.training) == 2
    assert surgeon.verify(tmp_path / "base", tmp_path / "again", logits=False).holds
    surgeon.revert(tmp_path / "again", tmp_path / "back")
    assert digests(tmp_path / "back") == digests(tmp_path / "base")
    assert set(surgeon.diff(tmp_path / "run", tmp_path / "again").changed) <= again.new_tensors.keys()
    surgeon.apply("llama-pro", str(tmp_path / "again"), tmp_path / "deeper")
    surgeon.train(tmp_path / "deeper", config(tmp_path, steps=2, what="added"), tmp_path / "both", device="cpu")
    assert surgeon.verify(tmp_path / "again", tmp_path / "both", logits=False).holds
    surgeon.train(tmp_path / "deeper", config(tmp_path, steps=2), tmp_path / "last", device="cpu")
    assert surgeon.verify(tmp_path / "again", tmp_path / "last", logits=False).holds
    surgeon.revert(tmp_path / "last", tmp_path / "before", to=1)
    assert digests(tmp_path / "before") == digests(tmp_path / "again")
    with pytest.raises(BadInput, match="trained or edited since surgery 2"):
        surgeon.revert(tmp_path / "both", tmp_path / "lost", to=1)


def test_a_tensor_changed_by_hand_is_found_before_and_after_training(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    out = grown(tmp_path)
    surgeon.train(out, config(tmp_path, steps=2), tmp_path / "run", device="cpu")
    for folder, name in ((out, "model.norm.weight"), (tmp_path / "run", "model.layers.0.mlp.adapter.out_proj.weight")):
        opened = CheckpointFolder.open(folder)
        name = name if name in opened.tensors else next(n for n in opened.tensors if ".adapter." in n)
        file = folder / opened.tensors[name].file
        tensors = load_file(file)
        save_file(tensors | {name: tensors[name] + 1}, file, metadata={"format": "pt"})
        with pytest.raises(BadInput, match=f"{name}: not what surgery.json of .* says"):
            surgeon.train(folder, config(tmp_path, steps=2), tmp_path / "never", device="cpu")
        assert not surgeon.verify(tmp_path / "base", folder, logits=False).holds
    assert not (tmp_path / "never").exists()


def test_what_diverges_stops_by_its_step_and_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    out = grown(tmp_path)
    path = config(tmp_path, steps=30, save_every=1, optimizer={"lr": 1e30, "warmup": 2, "clip": 0})
    with pytest.raises(Diverged, match=r"step \d+: the (loss|gradient's norm) is (nan|inf); .* the checkpoint of step"):
        surgeon.train(out, path, tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()
    kept = newest_checkpoint(work_folder(tmp_path / "run"))
    assert kept is not None
    assert step_of(kept) >= 1


@pytest.mark.parametrize(
    "change, told",
    [
        ({"length": 129}, "`length` is 129, the model's context 128"),
        ({"what": [4]}, "there is no operation 4"),
        ({"attention": "no_such"}, "`attention` is no_such; known: eager, sdpa"),
        ({"sources": [CONFIG["sources"][0] | {"path": "absent.jsonl", "share": 1.0}]}, "absent.jsonl: no such file"),
        ({"sources": [CONFIG["sources"][0] | {"kind": "chat", "share": 1.0}]}, "has no chat template"),
    ],
)
def test_refusals_leave_nothing(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    out = grown(tmp_path)
    with pytest.raises(BadInput, match=told):
        surgeon.train(out, config(tmp_path, **change), tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_other_refusals(tmp_path: Path) -> None:
    out = grown(tmp_path)
    path = config(tmp_path, steps=2)
    with pytest.raises(BadInput, match=r"no surgery\.json"):
        surgeon.train(tmp_path / "base", path, tmp_path / "run", device="cpu")
    with pytest.raises(BadInput, match="is inside the base"):
        surgeon.train(out, path, out / "run", device="cpu")
    surgeon.train(out, path, tmp_path / "run", device="cpu")
    with pytest.raises(BadInput, match=r"exists and holds .*; choose another folder"):
        surgeon.train(out, path, tmp_path / "run", device="cpu")
    (out / "tokenizer.json").unlink()
    with pytest.raises(BadInput, match="no tokenizer that can be loaded"):
        surgeon.train(out, path, tmp_path / "run2", device="cpu")


def test_chats_tasks_and_other_formats_train_together(tmp_path: Path) -> None:
    """Domains reach PMoE's router as tasks; the loss of a chat is on the assistant's words."""
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    base = add_tokenizer(tiny.checkpoint(tmp_path / "base", "qwen3"), template=CHAT_TEMPLATE)
    (tmp_path / "plan.yaml").write_text(
        "surgeon: 1\noperations:\n  - {op: pmoe_experts, threshold: 3, slots: 2, router_loss: {kind: task_id}}\n",
        encoding="utf-8",
    )
    surgeon.apply(tmp_path / "plan.yaml", str(base), tmp_path / "out")
    chats = [
        [{"role": "user", "content": text(5, n)}, {"role": "assistant", "content": text(9, n + 100)}] for n in range(20)
    ]
    parquet.write_table(arrow.table({"messages": chats}), tmp_path / "chat.parquet")
    (tmp_path / "plain.txt").write_text("\n".join(text(200, n) for n in range(60)), encoding="utf-8")
    sources = [
        {"name": "chat", "path": "chat.parquet", "kind": "chat", "share": 0.5, "role": "task:chat", "validation": 0.1},
        {"name": "plain", "path": "plain.txt", "share": 0.5, "role": "task:plain", "validation": 0.2},
    ]
    trained = surgeon.train(
        tmp_path / "out", config(tmp_path, steps=6, sources=sources), tmp_path / "run", device="cpu"
    )
    assert trained is not None
    assert trained.losses.keys() == {"chat", "plain"}
    # Two slots and a loss on the task: now the router learns.
    assert not trained.unchanged
    assert surgeon.verify(base, tmp_path / "run", logits=False).holds


def test_checkpointing_changes_nothing_but_memory(tmp_path: Path) -> None:
    out = grown(tmp_path, "control-llm", num_hidden_layers=8)
    runs = [
        surgeon.train(out, config(tmp_path, steps=3, checkpointing=each), tmp_path / f"run{each}", device="cpu")
        for each in (False, True)
    ]
    losses = [[entry["loss"] for entry in run.log if "loss" in entry] for run in runs if run is not None]
    assert len(losses[0]) == 3
    assert losses[0] == losses[1]


def test_what_is_not_for_this_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.checkpoint(tmp_path / "base", "roberta")
    surgeon.apply("mixture-of-control", str(tmp_path / "base"), tmp_path / "out")
    for name in ("fr", "en"):
        corpus(tmp_path / f"{name}.jsonl")
    with pytest.raises(BadInput, match=r"an encoder \(roberta\), which predicts no next token; .*`kind: labels`"):
        surgeon.train(tmp_path / "out", config(tmp_path), tmp_path / "run", device="cpu")
    with pytest.raises(BadInput, match="training takes auto, cpu or cuda"):
        surgeon.train(tmp_path / "out", config(tmp_path), tmp_path / "run", device="cuda:1")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(BadInput, match=r"ACCELERATE_USE_DEEPSPEED is set, .* launch without"):
        surgeon.train(tmp_path / "out", config(tmp_path), tmp_path / "run", device="cpu")


def test_float16_trains_only_as_something_wider(tmp_path: Path) -> None:
    out = grown(tmp_path, dtype="float16")
    with pytest.raises(BadInput, match="is float16, whose gradients under- and overflow"):
        surgeon.train(out, config(tmp_path, steps=2), tmp_path / "run", device="cpu")
    surgeon.train(out, config(tmp_path, steps=2, dtype="float32"), tmp_path / "run", device="cpu")
    assert {info.dtype for info in CheckpointFolder.open(tmp_path / "run").tensors.values()} == {"F16"}
    assert surgeon.verify(tmp_path / "base", tmp_path / "run", logits=False).holds


@pytest.mark.slow
def test_a_bad_line_ends_the_command_in_one_line(tmp_path: Path) -> None:
    grown(tmp_path)
    config(tmp_path)
    with (tmp_path / "fr.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"text": "w1"\n')
    ran = subprocess.run(command(tmp_path), capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert ran.stderr.startswith(f"surgeon: {tmp_path / 'fr.jsonl'}:61: not JSON (Expecting")
    assert ran.stderr.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "en.jsonl", "fr.jsonl", "out", "train.yaml"]


@pytest.mark.slow
def test_killed_and_resumed_is_as_if_never_killed(tmp_path: Path) -> None:
    """PMoE with dropout: random numbers, optimizer, order of data and schedule all go on where they were."""
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "surgeon: 1\noperations:\n  - {op: pmoe_experts, threshold: 3, dropout: 0.1}\n"
        "  - {op: gated_adapters, extra_weights: 0.2}\n",
        encoding="utf-8",
    )
    grown(tmp_path, str(plan))
    path = config(tmp_path, steps=30, save_every=5, evaluate_every=10)
    whole = surgeon.train(tmp_path / "out", path, tmp_path / "whole", device="cpu")
    assert whole is not None
    work = work_folder(tmp_path / "run")
    killed_at(10, *command(tmp_path)[len(warm()) + 2 :])
    assert not (tmp_path / "run").exists()
    # What a kill may leave of a checkpoint that was being written.
    torn = work / "checkpoint-29"
    torn.mkdir()
    (torn / "trained.safetensors").write_bytes(b"half")
    ran = subprocess.run(command(tmp_path, "--json"), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "checkpoint-29 is not complete, or not this run's, so it is passed over" in ran.stderr
    told = json.loads(ran.stdout)
    assert told["resumed_at"] >= 10
    kept_keys = ("step", "loss", "grad_norm", "learning_rate", "eval_fr_loss", "eval_en_loss")
    curves = [
        [{key: entry[key] for key in kept_keys if key in entry} for entry in log if "train_runtime" not in entry]
        for log in (whole.log, told["log"])
    ]
    assert curves[0] == curves[1]
    assert told["losses"] == whole.to_json()["losses"]
    assert digests(tmp_path / "run") == digests(tmp_path / "whole")


@pytest.fixture(scope="module")
def cut_off(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output, and a run of three steps with its checkpoints, cut off before it was published."""
    folder = tmp_path_factory.mktemp("cut-off")
    grown(folder)
    config(folder, steps=3, save_every=1)
    with pytest.MonkeyPatch.context() as patched, pytest.raises(KeyboardInterrupt):

        def killed(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        patched.setattr(session, "execute", killed)
        surgeon.train(folder / "out", folder / "train.yaml", folder / "run", device="cpu")
    return folder


def test_killed_while_it_publishes(cut_off: Path, tmp_path: Path) -> None:
    shutil.copytree(cut_off, tmp_path, dirs_exist_ok=True)
    given = (tmp_path / "out", tmp_path / "train.yaml", tmp_path / "run")
    trained = surgeon.train(*given, take_over=True, device="cpu")
    assert trained is not None
    assert trained.resumed_at == 3
    assert not trained.unchanged
    assert not work_folder(tmp_path / "run").exists()
    with pytest.raises(BadInput, match="exists"):
        surgeon.train(*given, device="cpu")


def test_answers_are_measured_on_what_is_published(tmp_path: Path) -> None:
    """They are in the result, the manifest and the card."""
    out = grown(tmp_path)
    (tmp_path / "prompts.txt").write_text("w1 w2\nw51\nw60 w61 w62\n")
    trained = surgeon.train(out, config(tmp_path, answers="prompts.txt", steps=3), tmp_path / "run", device="cpu")
    assert trained is not None and trained.answers is not None
    opened = [surgeon.open_checkpoint(tmp_path / name) for name in ("out", "run")]
    prompts = surgeon.read_prompts(tmp_path / "prompts.txt")
    (found,) = surgeon.kept_answers(opened[0], opened[1:], prompts, dtype=devices.fast_dtype("cpu"), device="cpu")
    said = found.to_json()
    check_json(trained)
    assert trained.to_json()["answers"] == said and said["kl"]["value"] > 0
    manifest = json.loads((tmp_path / "run" / "surgery.json").read_text())
    assert manifest["training"][0]["answers"] == said
    line = f"answers to 3 prompts, beside those before the run: KL {said['kl']['value']:.4f} nats a token"
    assert line in (tmp_path / "run" / "README.md").read_text()
    assert surgeon.verify(tmp_path / "base", tmp_path / "run", logits=False).holds


def test_prompts_are_checked_before_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grown(tmp_path)
    monkeypatch.setattr(session, "write_texts", lambda *_, **__: pytest.fail("the run began"))
    for prompts, told in ((" ".join(["w1"] * 200), "has no room for an answer"), ("", "has no prompt")):
        (tmp_path / "prompts.txt").write_text(prompts)
        with pytest.raises(BadInput, match=told):
            surgeon.train(tmp_path / "out", config(tmp_path, answers="prompts.txt"), tmp_path / "run", device="cpu")


def planted(work: Path) -> None:
    """Other numbers in a whole run's last checkpoint, and every digest that speaks for it made anew."""
    checkpoint = work / "checkpoint-3"
    trained = {name: torch.full_like(tensor, 7) for name, tensor in load_file(checkpoint / TRAINED_FILE).items()}
    save_file(trained, checkpoint / TRAINED_FILE)
    digest, *code, body = (work / "run.json").read_bytes().split(b"\n")
    data = json.loads(body)
    record = data.get("data", data)
    record["checkpoints"]["3"][TRAINED_FILE] = hashlib.sha256((checkpoint / TRAINED_FILE).read_bytes()).hexdigest()
    kept = b"\n".join([*code, json.dumps(data).encode()])
    assert hashlib.sha256(b"\n".join([*code, body])).hexdigest().encode() == digest
    (work / "run.json").write_bytes(hashlib.sha256(kept).hexdigest().encode() + b"\n" + kept)


def test_a_run_that_came_in_an_archive_is_not_gone_on_with(cut_off: Path, tmp_path: Path) -> None:
    """Its digests all fit; 16 of 16 planted tensors were published, exit 0."""
    shutil.copytree(cut_off, tmp_path, dirs_exist_ok=True)
    given = (tmp_path / "out", tmp_path / "train.yaml", tmp_path / "run")
    work = work_folder(tmp_path / "run")
    planted(work)
    assert newest_checkpoint(work) == work / "checkpoint-3"
    before = {path: path.read_bytes() for path in work.rglob("*") if path.is_file() and path.name != "lock"}
    with pytest.raises(BadInput) as refused:
        surgeon.train(*given, device="cpu")
    assert f"{work}: holds checkpoints of this run, the last of step 3; this user did not write it here" in str(
        refused.value
    )
    assert f"it says, by {getpass.getuser()} on {platform.node()} in {work_folder(cut_off / 'run')}, 2" in str(
        refused.value
    )
    assert "To go on with it as it is, give --take-over; to start again, remove it" in str(refused.value)
    assert all(path.read_bytes() == content for path, content in before.items())
    assert not (tmp_path / "run").exists()


def begun(cut_off: Path, folder: Path, **given: Any) -> list[str]:
    """What is said where a run goes on in this folder."""
    said: list[str] = []
    record = RunRecord.read(work_folder(cut_off / "run"))
    assert record is not None
    asked: dict[str, Any] = {"leads": True, "take_over": False, "say": said.append} | given
    with own_work_folder(work_folder(folder / "run"), folder / "run", record.fingerprint, **asked):
        pass
    return said


def test_a_run_belongs_to_its_user_and_place(cut_off: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same user, same place: nothing is said. Moved, copied, unpacked, by another key, unsigned: shown, and asked."""
    home = tmp_path / "here"
    work = work_folder(home / "run")
    shutil.copytree(work_folder(cut_off / "run"), work)
    with pytest.raises(BadInput, match=r"this user wrote it in another place: .* give --take-over; to start again"):
        begun(cut_off, home)
    (said,) = begun(cut_off, home, take_over=True)
    assert said.endswith("Taken over as it is")
    assert begun(cut_off, home) == []
    # A cache that goes, or another name for the same place, makes no difference.
    monkeypatch.setenv("SURGEON_CACHE", str(tmp_path / "cache"))
    (tmp_path / "name").symlink_to(home)
    assert begun(cut_off, tmp_path / "name") == []
    # Unpacked in the very place where it was, then moved.
    shutil.copytree(work, tmp_path / "archive")
    shutil.rmtree(work)
    (tmp_path / "archive").rename(work)
    with pytest.raises(BadInput, match="this user wrote it in another place"):
        begun(cut_off, home)
    assert len(begun(cut_off, home, take_over=True)) == 1
    home.rename(tmp_path / "there")
    with pytest.raises(BadInput, match="this user wrote it in another place"):
        begun(cut_off, tmp_path / "there")
    (tmp_path / "there").rename(home)
    assert begun(cut_off, home) == []
    # Another user, or another home.
    state = Path(os.environ["SURGEON_STATE"])
    monkeypatch.setenv("SURGEON_STATE", str(tmp_path / "state"))
    with pytest.raises(BadInput, match=rf"this user did not write it here; it says, by .* in {work}"):
        begun(cut_off, home)
    assert (tmp_path / "state" / "key").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "state" / "key").read_bytes() != (state / "key").read_bytes()


def test_a_key_that_cannot_be_kept_is_said(cut_off: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes on; continued, it asks."""
    (tmp_path / "file").touch()
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "key").write_bytes(bytes(32))
    (tmp_path / "open" / "key").chmod(0o666)
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "key").symlink_to("elsewhere")
    for number, (state, why) in enumerate(
        {"file": "Not a directory", "open": "alone can write", "link": "links"}.items()
    ):
        monkeypatch.setenv("SURGEON_STATE", str(tmp_path / state))
        signed._key_in.cache_clear()
        folder = tmp_path / str(number)
        folder.mkdir()
        (said,) = begun(cut_off, folder)
        assert re.search(
            rf"key of this user's work folders is not kept: .*{why}.*SURGEON_STATE may name a folder", said
        )
        assert not work_folder(folder / "run").exists() or begun(cut_off, folder)
        signed._key_in.cache_clear()
        work = work_folder(folder / "run")
        work.mkdir(exist_ok=True)
        RunRecord(RunRecord.read(work_folder(cut_off / "run")).fingerprint).write(work)
        signed._key_in.cache_clear()
        with pytest.raises(
            BadInput, match=rf"holds the beginning of this run; .* not kept: .*{why}.* give --take-over"
        ):
            begun(cut_off, folder)


def flip(path: Path) -> None:
    """One bit of a file is another, and its time is not."""
    found = path.stat()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def test_a_checkpoint_counts_only_as_it_was_written(cut_off: Path, tmp_path: Path) -> None:
    """Every file flipped, missing, or one too many: the checkpoint before is the newest."""
    whole = work_folder(cut_off / "run")
    assert [path.name for path in sorted(whole.glob("checkpoint-*"))] == ["checkpoint-2", "checkpoint-3"]
    names = sorted(path.name for path in (whole / "checkpoint-3").iterdir())
    assert {"trained.safetensors", "rng_state.pth"} <= {*names}
    # After the last step nobody needs them.
    before = {path.name for path in (whole / "checkpoint-2").iterdir()}
    assert {"optimizer.pt", "scheduler.pt"} == before - {*names}
    changes: list[tuple[str, Callable[[Path], object]]] = [(name, flip) for name in names]
    changes += [(name, Path.unlink) for name in names]
    # What transformers would load beside, or instead.
    more = ("scaler.pt", "rng_state_1.pth", "optimizer.bin", "pytorch_model_fsdp_0", "model.safetensors")
    changes += [(name, lambda path: path.write_bytes(b"0")) for name in more]
    changes += [("global_step3", Path.mkdir)]
    for number, (name, change) in enumerate(changes):
        work = Path(shutil.copytree(whole, tmp_path / str(number)))
        assert newest_checkpoint(work) == work / "checkpoint-3"
        change(work / "checkpoint-3" / name)
        assert newest_checkpoint(work) == work / "checkpoint-2", name
        (why,) = drop_what_does_not_count(work)
        assert "checkpoint-3" in why
        assert not (work / "checkpoint-3").exists()
    # One of nobody's, though it is whole in itself.
    shutil.copytree(whole / "checkpoint-3", work / "checkpoint-7")
    assert newest_checkpoint(work) == work / "checkpoint-2"
    flip(work / "run.json")
    with pytest.raises(
        BadInput, match=r"run\.json: damaged or edited \(.*\); remove .*, and the run starts from the beginning"
    ):
        newest_checkpoint(work)


def test_a_damaged_checkpoint_costs_its_steps_and_nothing_else(
    cut_off: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(cut_off, tmp_path, dirs_exist_ok=True)
    given = (tmp_path / "out", tmp_path / "train.yaml")
    flip(work_folder(tmp_path / "run") / "checkpoint-3" / "rng_state.pth")
    unpickled = []
    load = torch.load

    def watched(*arguments: Any, **named: Any) -> Any:
        unpickled.append(named.get("weights_only"))
        return load(*arguments, **named)

    monkeypatch.setattr(torch, "load", watched)
    listener = Quiet()
    trained = surgeon.train(*given, tmp_path / "run", take_over=True, device="cpu", listener=listener)
    assert trained is not None
    assert trained.resumed_at == 2
    assert "checkpoint-3/rng_state.pth is not what was written, so it is passed over and dropped" in listener.said
    assert unpickled
    assert all(unpickled)
    # Damaged between the last step and publishing.
    written = trainer.complete

    def damaged(checkpoint: Path, step: int, best: int | None) -> None:
        written(checkpoint, step, best)
        if step == 3:
            flip(checkpoint / "trained.safetensors")

    with monkeypatch.context() as patched:
        patched.setattr(trainer, "complete", damaged)
        with pytest.raises(
            BadInput, match=r"checkpoint-3/trained\.safetensors is not what was written; nothing is pub"
        ):
            surgeon.train(*given, tmp_path / "again", device="cpu")
    assert not (tmp_path / "again").exists()
    surgeon.train(*given, tmp_path / "again", device="cpu")
    assert digests(tmp_path / "run") == digests(tmp_path / "again")


def test_a_work_folder_that_is_not_ours_alone_is_refused(
    cut_off: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever can write beside RUN, or packs what is unpacked there, leads training nowhere else."""
    work, victim = tmp_path / ".run.training", tmp_path / "victim"
    given = (cut_off / "out", cut_off / "train.yaml", tmp_path / "run")
    victim.write_text("precious")

    def refused(plant: Callable[[], object], told: str) -> None:
        work.mkdir(exist_ok=True)
        plant()
        with pytest.raises(BadInput, match=told):
            surgeon.train(*given, device="cpu")
        assert victim.read_text() == "precious"
        assert not (tmp_path / "run").exists()
        work.unlink() if work.is_symlink() else shutil.rmtree(work)

    for name in ("run.new", ".run.json.new", "run.json", "lock", "final.safetensors", "checkpoint-1", "whole"):
        refused(
            lambda name=name: (work / name).symlink_to(victim), rf"\.run\.training/{name}: (a link|not a file), but"
        )
    refused(lambda: (work.rmdir(), work.symlink_to(tmp_path / "out")), "a link, but surgeon works in this place")
    refused(lambda: os.link(victim, work / "run.json"), "a second name of another file")
    refused(lambda: os.link(victim, work / "lock"), "not a file of its own")
    refused(lambda: os.mkfifo(work / "run.json"), "not a file")
    refused(lambda: (work / "checkpoint-1").mkdir(), "holds checkpoint-1, but no run.json, so no run of surgeon left")
    if os.geteuid() == 0:
        refused(lambda: os.chown(work, 65534, 65534), "another user's, but surgeon works in this place")
        refused(lambda: ((work / "run.json").touch(), os.chown(work / "run.json", 65534, 65534)), "another user's")
    work.mkdir(mode=0o777)
    modes = []
    monkeypatch.setattr(session, "_train", lambda run: modes.append(run.work.stat().st_mode & 0o777) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        surgeon.train(*given, device="cpu")
    assert modes == [0o700]


def test_checkpoints_of_another_run_are_not_continued(tmp_path: Path) -> None:
    out = grown(tmp_path)
    path = config(tmp_path, steps=30, save_every=1, optimizer={"lr": 1e30, "warmup": 2, "clip": 0})
    with pytest.raises(Diverged):
        surgeon.train(out, path, tmp_path / "run", device="cpu")
    with pytest.raises(BadInput, match="holds checkpoints of another run"):
        surgeon.train(out, config(tmp_path), tmp_path / "run", device="cpu")
    shutil.rmtree(work_folder(tmp_path / "run"))
    assert surgeon.train(out, config(tmp_path, steps=2), tmp_path / "run", device="cpu") is not None


def test_what_is_no_number_after_the_last_step_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The losses and gradients before each step were numbers; what the last one made is looked at too."""

    def broken(path: Path) -> dict[str, torch.Tensor]:
        return {name: torch.full_like(value, torch.nan) for name, value in load_file(path).items()}

    out, asked = grown(tmp_path), config(tmp_path, steps=2)
    monkeypatch.setattr(safetensors.torch, "load_file", broken)
    with pytest.raises(BadInput, match="holds NaN or infinity after the last step, and nothing is published of it"):
        surgeon.train(out, asked, tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_a_template_by_name_is_written_into_the_output(tmp_path: Path) -> None:
    """A base without a template learns chats as ChatML writes them; a rehearsal shows them, and writes nothing."""
    out = grown(tmp_path)
    chats = [{"instruction": text(8, n), "output": text(6, n + 50)} for n in range(12)]
    (tmp_path / "chat.json").write_text(json.dumps(chats), encoding="utf-8")
    source = {"name": "chat", "path": "chat.json", "kind": "chat", "share": 1.0, "validation": 0.2}
    asked = config(tmp_path, steps=2, sources=[source], chat_template="chatml")
    there = sorted(tmp_path.rglob("*"))
    shown = surgeon.rehearse(out, asked, tmp_path / "run", overrides=["batch=2"], device="cpu")
    assert sorted(tmp_path.rglob("*")) == there
    check_json(shown)
    assert (shown.settings["batch"], shown.tokens, shown.sources[0].documents) == (2, 2 * 2 * 24, 10)
    assert shown.seconds == 2 * shown.seconds_a_step > 0
    assert shown.peak_memory > 14 * shown.trained, "two moments and a master of what is bfloat16, and a gradient"
    asking, answering = shown.samples[0].parts
    assert not asking[1] and answering[1], "the loss is on the answer alone"
    told = io.StringIO()
    Console(file=told, width=80).print(rehearsal_view(shown))
    assert "dry run: nothing was written" in told.getvalue() and "<unk>" in told.getvalue()
    trained = surgeon.train(out, asked, tmp_path / "run", device="cpu")
    assert trained is not None
    check_json(trained)
    assert (tmp_path / "run" / "chat_template.jinja").read_text(encoding="utf-8") == TEMPLATES["chatml"]
    # No base has the file, so a delta brings it.
    surgeon.make_delta(tmp_path / "run", tmp_path / "delta")
    assert (tmp_path / "delta" / "chat_template.jinja").exists()
    assert surgeon.verify(tmp_path / "base", tmp_path / "run", logits=False).holds
    # What is trained further has the template now, and needs no name for it; another one's is refused.
    with pytest.raises(BadInput, match="--set chat_template=gemma: `chat_template` is for a base"):
        surgeon.train(tmp_path / "run", asked, tmp_path / "more", overrides=["chat_template=gemma"])


@pytest.mark.parametrize(("multiplies", "expected"), [(True, "auto"), (False, "float32")])
def test_auto_is_float32_for_bfloat16_on_a_cpu_without_its_products(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, multiplies: bool, expected: str
) -> None:
    monkeypatch.setattr(devices, "multiplies_bfloat16", lambda: multiplies)
    out = grown(tmp_path)
    trained = surgeon.train(out, config(tmp_path, steps=2), tmp_path / "run", device="cpu")
    assert trained is not None
    assert trained.manifest.training[0].config["dtype"] == expected
    assert {info.dtype for info in CheckpointFolder.open(tmp_path / "run").tensors.values()} == {"BF16"}


def test_minutes_are_made_into_steps_that_a_continued_run_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The speed is measured once: a run that was killed goes on with its steps, however fast the machine is then."""
    out = grown(tmp_path)
    asked = {key: value for key, value in CONFIG.items() if key != "steps"} | {
        "minutes": 1,
        "save_every": 2,
        "optimizer": {"lr": 1e-2},
    }
    path = tmp_path / "train.yaml"
    path.write_text(yaml.safe_dump(asked), encoding="utf-8")
    # Ten seconds a sequence: two micro-batches would take more than a minute, so that one sequence stands for all.
    monkeypatch.setattr(dry_run, "seconds_since", lambda *_: 10.0)
    shown = surgeon.rehearse(out, path, tmp_path / "run", device="cpu")
    assert (shown.settings["steps"], shown.seconds_a_step) == (1, 4 * 10.0 + 10.0)
    # A micro-batch of all four sequences, and the optimizer's step: ten seconds.
    monkeypatch.setattr(dry_run, "seconds_since", lambda *_: 5.0)
    shown = surgeon.rehearse(out, path, tmp_path / "run", device="cpu")
    assert (shown.settings["steps"], shown.seconds_a_step, shown.seconds) == (6, 10.0, 60.0)
    assert not work_folder(tmp_path / "run").exists()

    def killed(*_: Any, **__: Any) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as until, pytest.raises(RuntimeError, match="killed"):
        until.setattr(session, "_publish", killed)
        surgeon.train(out, path, tmp_path / "run", device="cpu")
    monkeypatch.setattr(dry_run, "seconds_since", lambda *_: 0.1)
    with pytest.raises(BadInput, match="holds checkpoints of another run"):
        surgeon.train(out, path, tmp_path / "run", overrides=["minutes=2"], device="cpu")
    trained = surgeon.train(out, path, tmp_path / "run", device="cpu")
    assert trained is not None and trained.settings["steps"] == trained.resumed_at == 6
    assert trained.manifest.training[0].config["minutes"] == 1
    # The same run by `steps` has the same bytes.
    by_steps = config(tmp_path, steps=6, save_every=2, optimizer={"lr": 1e-2})
    assert surgeon.train(out, by_steps, tmp_path / "other", device="cpu") is not None
    assert digests(tmp_path / "run") == digests(tmp_path / "other")


def test_the_micro_batch_is_what_is_predicted_to_fit_and_stays_when_more_memory_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, path = grown(tmp_path), config(tmp_path, steps=2)
    seen: list[int] = []
    predicted = footprint._bytes_a_sequence

    def kept(*given: Any) -> tuple[int, int]:
        each, chunk = predicted(*given)
        seen[:] = [each, chunk, footprint.checkpoint_bytes(given[1])]
        return each, chunk

    monkeypatch.setattr(footprint, "_bytes_a_sequence", kept)
    whole = surgeon.rehearse(out, path, tmp_path / "run", device="cpu")
    each, chunk, fixed = seen
    assert whole.settings["micro_batch"] == 4 and each > 0
    surgeon.rehearse(out, path, tmp_path / "run", overrides=["length=48"], device="cpu")
    assert 1.5 < seen[0] / each < 3, "twice the tokens keep about twice the memory"
    monkeypatch.setattr(devices, "free_memory", lambda _: fixed + chunk + 3 * each)
    fewer = surgeon.rehearse(out, path, tmp_path / "run", device="cpu")
    assert fewer.settings["micro_batch"] == 2
    trained = surgeon.train(out, path, tmp_path / "run", device="cpu")
    assert trained is not None and (trained.settings["micro_batch"], trained.settings["accumulation"]) == (2, 2)
    for free, more, told in (
        (fixed + chunk, [], r"1 × 24 tokens at a time .* use a smaller `length`"),
        (fixed + chunk + 3 * each, ["micro_batch=4"], r"4 × 24 tokens at a time .* use a smaller `micro_batch` or"),
    ):
        monkeypatch.setattr(devices, "free_memory", lambda _, free=free: free)
        for call in (surgeon.rehearse, surgeon.train):
            with pytest.raises(BadInput, match=told):
                call(out, path, tmp_path / "more", overrides=more, device="cpu")

    def killed(*_: Any, **__: Any) -> None:
        raise RuntimeError("killed")

    monkeypatch.setattr(devices, "free_memory", lambda _: fixed + chunk + 3 * each)
    with monkeypatch.context() as until, pytest.raises(RuntimeError, match="killed"):
        until.setattr(session, "_steps", killed)
        surgeon.train(out, path, tmp_path / "kept", overrides=["save_every=1"], device="cpu")
    # Nothing was kept before a first checkpoint, so the run begins anew, with the memory that is free now.
    monkeypatch.setattr(devices, "free_memory", lambda _: None)
    trained = surgeon.train(out, path, tmp_path / "kept", device="cpu")
    assert trained is not None and trained.settings["micro_batch"] == 4


def test_a_measured_model_is_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []

    def watched(run: Any) -> Any:
        model, parameters = loaded_model(run)
        loaded.append(weakref.ref(model.get_input_embeddings().weight))
        return model, parameters

    monkeypatch.setattr(dry_run, "loaded_model", watched)
    surgeon.rehearse(grown(tmp_path), config(tmp_path), tmp_path / "run", overrides=["what=all"], device="cpu")
    gc.collect()
    assert [reference() for reference in loaded] == [None]
