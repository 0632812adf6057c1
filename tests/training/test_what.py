"""What trains: the base's own tensors, some layers, everything, a LoRA; on a plain base and on outputs."""

from __future__ import annotations

import io
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import surgeon
from surgeon.anatomy.dissect import dissect_folder
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.common.listener import Quiet
from surgeon.errors import BadInput
from surgeon.lab.reports.inspect import inspection_view
from surgeon.manifest.reading import manifest_of
from surgeon.manifest.run_files import ADAPTER_FOLDER, KEPT_FOLDER
from surgeon.manifest.trainable import Fixed, LayersSpec, TrainableSet, trainable_set
from surgeon.manifest.within import base_within
from surgeon.models.load import load_model
from surgeon.models.teacher import BaseWithin
from surgeon.training.config.loading import LoadedConfig, load_config
from surgeon.training.config.schema import TrainConfig
from surgeon.training.opening import opened_run
from surgeon.training.places import work_folder
from surgeon.training.preparing import prepare
from surgeon.training.saved.checkpoints import step_of
from surgeon.training.steps import trainer
from surgeon.training.targets.lora import Lora
from tests import tiny
from tests.decoders import tiny_decoder
from tests.training.test_train import CONFIG, base_of, config, digests
from tests.training.texts import add_tokenizer, corpus

SHORT: dict[str, Any] = {
    "steps": 2,
    "batch": 2,
    "validation_sequences": 1,
    "optimizer": {"lr": 1e-2, "warmup": 0},
}


def trained(folder: Path, out: str, to: str, **changes: Any) -> Any:
    found = surgeon.train(folder / out, config(folder, **(SHORT | changes)), folder / to, device="cpu")
    assert found is not None
    return found


def checks(base: Path, out: Path) -> dict[str, Any]:
    found = surgeon.verify(base, out, logits=False)
    assert found.holds, [check for check in found.checks if not check.holds]
    return {check.name: check for check in found.checks}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied base in bfloat16, of which all was trained and is kept, then a LoRA on that."""
    folder = tmp_path_factory.mktemp("plain")
    base_of(folder, "gemma2", num_hidden_layers=2)
    trained(folder, "base", "run", what="all", keep_base=True)
    trained(folder, "run", "second", lora={"rank": 2, "targets": ["q_proj"]})
    return folder


def test_all_of_a_plain_base_trains_and_is_told_and_comes_back(plain: Path, tmp_path: Path) -> None:
    before, after = digests(plain / "base"), digests(plain / "run")
    assert before.keys() == after.keys()
    assert not any(before[name] == after[name] for name in before)
    manifest = manifest_of(CheckpointFolder.open(plain / "run"))
    assert manifest.operations == []
    assert manifest.changed_of_base == before == manifest.kept
    assert manifest.trained == after
    found = checks(plain / "base", plain / "run")
    assert f"{len(before)} base tensors changed by training" in found["base tensors"].detail
    assert found["kept tensors"].detail == f"{len(before)} of the base's in {KEPT_FOLDER}/"
    # transformers loads what trained, and nothing of what is kept.
    loaded = AutoModelForCausalLM.from_pretrained(plain / "run").state_dict()
    own = load_model(plain / "run").state_dict()
    assert all(torch.equal(loaded[name], own[name]) for name in own)
    for run in ("run", "second"):
        surgeon.revert(plain / run, tmp_path / run)
        assert digests(tmp_path / run) == before
        names = {path.name for path in (plain / "base").iterdir()}
        assert {path.name for path in (tmp_path / run).iterdir()} == names
        for name in names - {"model.safetensors.index.json"}:
            assert (tmp_path / run / name).read_bytes() == (plain / "base" / name).read_bytes(), name


def test_what_was_widened_twice_and_trained_whole_holds_against_the_first_base(tmp_path: Path) -> None:
    """The base's tensors stand there in pieces, of which training's record says that they are others now."""
    base = base_of(tmp_path, "llama", num_hidden_layers=2)
    for out, of, operation in (
        ("wide", base, {"op": "widen_hidden", "times": 2}),
        ("wider", tmp_path / "wide", {"op": "widen_ffn", "to": 256}),
    ):
        plan = tmp_path / f"{out}.yaml"
        plan.write_text(json.dumps({"surgeon": 1, "operations": [operation]}), encoding="utf-8")
        surgeon.apply(plan, of, tmp_path / out)
    trained(tmp_path, "wider", "run", what="all")
    for before, check in ((base, "tensors since then"), (tmp_path / "wide", "base tensors")):
        assert "changed by training" in checks(before, tmp_path / "run")[check].detail


def test_what_changed_is_shown(plain: Path) -> None:
    shown = io.StringIO()
    Console(file=shown, width=200).print(inspection_view(surgeon.inspect(plain / "second")))
    told, number = " ".join(shown.getvalue().split()), len(digests(plain / "base"))
    assert "surgery none: the base was trained as it is" in told
    assert f"base tensors {number} changed by training; {number} kept in {KEPT_FOLDER}/" in told
    assert f"adapter 4 tensors in {ADAPTER_FOLDER}/, merged into the weights" in told
    card = (plain / "second" / "README.md").read_text(encoding="utf-8")
    assert card.count(f"{number} base tensors changed by training") == 1
    assert "nothing was added: the base was trained as it is" in card


def test_a_delta_leaves_what_is_kept_and_the_adapter_with_the_run(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    listener = Quiet()
    monkeypatch.setattr(listener, "say", said.append)
    surgeon.make_delta(plain / "second", tmp_path / "delta", listener=listener)
    assert any(f"{KEPT_FOLDER}/ and {ADAPTER_FOLDER}/ stay in" in line for line in said)
    held = {name for file in (tmp_path / "delta").glob("*.safetensors") for name in load_file(file)}
    assert held == {*digests(plain / "second")}
    surgeon.apply_delta(tmp_path / "delta", str(plain / "base"), tmp_path / "again")
    assert digests(tmp_path / "again") == digests(plain / "second")
    found = checks(plain / "base", tmp_path / "again")
    assert found["kept tensors"].note and found["adapter"].note


def test_what_is_kept_must_be_the_bases(plain: Path, tmp_path: Path) -> None:
    shutil.copytree(plain / "run", tmp_path / "run")
    file = next((tmp_path / "run" / KEPT_FOLDER).iterdir())
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    found = surgeon.verify(plain / "base", tmp_path / "run", logits=False)
    assert [check.name for check in found.checks if not check.holds] == ["kept tensors"]
    with pytest.raises(BadInput, match="trained or edited since surgery 1"):
        surgeon.revert(tmp_path / "run", tmp_path / "back")
    shutil.rmtree(tmp_path / "run" / KEPT_FOLDER)
    with pytest.raises(BadInput, match=r"`keep_base: true` in a training config keeps it"):
        surgeon.revert(tmp_path / "run", tmp_path / "back")
    assert checks(plain / "base", tmp_path / "run")["kept tensors"].note


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_a_lora_is_merged_and_loads_in_peft(plain: Path) -> None:
    from peft import PeftModel

    before, after = digests(plain / "run"), digests(plain / "second")
    moved = {name for name in before if before[name] != after[name]}
    assert moved == {name for name in before if "q_proj" in name}
    assert checks(plain / "base", plain / "second")["adapter"].detail == f"4 tensors in {ADAPTER_FOLDER}/"
    under = AutoModelForCausalLM.from_pretrained(plain / "run", dtype=torch.float32)
    stored = {name: value.clone() for name, value in under.state_dict().items()}
    merged = PeftModel.from_pretrained(under, plain / "second" / ADAPTER_FOLDER).merge_and_unload().state_dict()
    found = load_model(plain / "second").state_dict()
    held = load_file(plain / "second" / ADAPTER_FOLDER / "adapter_model.safetensors")
    for name, value in merged.items():
        change = value - stored[name]
        assert bool(change.any()) == (name in moved)
        if name not in moved:
            assert torch.equal(found[name], value.to(torch.bfloat16)), name
            continue
        # Each number is one of the two next to PEFT's; on what the adapter reads they err less than the nearest ones.
        read = held[f"base_model.model.{name.removesuffix('weight')}lora_A.weight"].float()
        errors = [((made.float() - value) @ read.T).norm() for made in (found[name], value.to(torch.bfloat16))]
        assert ((found[name].float() - value).abs() <= 2**-7 * value.abs()).all()
        assert errors[0] < errors[1]


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_a_lora_on_transposed_matrices(tmp_path: Path) -> None:
    """GPT-2's Conv1D stores a matrix inputs by outputs; DoRA's lengths are then those of columns."""
    from peft import PeftModel

    add_tokenizer(tiny_decoder(tmp_path / "base", "gpt2"))
    for name, seed in (("fr", 1), ("en", 2)):
        corpus(tmp_path / f"{name}.jsonl", seed=seed)
    trained(tmp_path, "base", "run", lora={"rank": 2, "targets": ["c_fc"], "dropout": 0.1, "dora": True}, steps=2)
    ids = torch.arange(10, 30)[None]
    with torch.no_grad():
        merged = load_model(tmp_path / "run")(ids).logits
        base = load_model(tmp_path / "base")
        assert not torch.allclose(base(ids).logits, merged, atol=1e-3)
        under = PeftModel.from_pretrained(base, tmp_path / "run" / ADAPTER_FOLDER).eval()
        torch.testing.assert_close(under(ids).logits, merged, atol=1e-5, rtol=1e-5)
    trained(tmp_path, "base", "all", lora={}, steps=1)
    names = load_file(tmp_path / "all" / ADAPTER_FOLDER / "adapter_model.safetensors")
    assert {name.split(".")[-3] for name in names} == {"c_attn", "c_proj", "c_fc"}


def test_dora_needs_rows_with_a_length(tmp_path: Path) -> None:
    """A silent copy's writing projections are zero; the others can be adapted."""
    base_of(tmp_path)
    operations = [{"op": "insert_layers", "where": {"after": [2]}, "count": 1, "init": {"kind": "copy"}}]
    (tmp_path / "plan.yaml").write_text(json.dumps({"surgeon": 1, "operations": operations}))
    surgeon.apply(tmp_path / "plan.yaml", str(tmp_path / "base"), tmp_path / "out")
    for call in (surgeon.train, surgeon.rehearse):
        with pytest.raises(
            BadInput, match=r"layers\.3\.\S+ has rows of zeros, as silent layers have.* leave `lora.dora` out"
        ):
            call(tmp_path / "out", config(tmp_path, lora={"rank": 2, "dora": True}), tmp_path / "run", device="cpu")
    trained(tmp_path, "out", "run", lora={"rank": 2, "dora": True, "targets": ["q_proj", "up_proj"]})


def test_under_a_lora_the_base_is_within(tmp_path: Path) -> None:
    base = tiny.checkpoint(tmp_path / "base", "llama", num_hidden_layers=2)
    model, plain = load_model(base), load_model(base)
    names = [f"model.layers.{index}.mlp.up_proj.weight" for index in range(2)]
    opened = CheckpointFolder.open(base)

    def attached(model: Any, seed: int, **more: Any) -> tuple[str, ...]:
        given = {"surgeon_train": 1, "steps": 1, "seed": seed, "lora": {"rank": 2, **more}}
        source = {"name": "fr", "path": "fr.jsonl", "share": 1.0}
        asked = LoadedConfig(TrainConfig.model_validate(given | {"sources": [source]}), tmp_path / "train.yaml")
        return (
            Lora(asked, opened, None, dissect_folder(opened), None).attach(model, TrainableSet(tuple(names), ())).names
        )

    trains = attached(model, 7, dora=True)
    ids = torch.randint(3, 100, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = plain(ids).logits
        assert torch.equal(model(ids).logits, expected)
        for name in trains:
            model.get_parameter(name).add_(0.1)
        assert not torch.equal(model(ids).logits, expected)
        assert torch.equal(BaseWithin(model, layers=2, inserted=()).logits(input_ids=ids), expected)
        assert not torch.equal(model(ids).logits, expected)
    # The lengths of rows train as well. The same seed draws the same, another one does not.
    assert len(trains) == 6
    first = [attached(each := load_model(base), seed) and each.get_parameter(trains[0]) for seed in (7, 7, 8)]
    assert torch.equal(first[0], first[1])
    assert not torch.equal(first[0], first[2])


def test_base_and_layers_of_an_output(tmp_path: Path) -> None:
    """Neutral Residues' adapters and two tokens more: what is the base's own trains, and those do not, and back."""
    base_of(tmp_path, "llama", num_hidden_layers=4)
    surgeon.apply("neutral-residues", str(tmp_path / "base"), tmp_path / "out")
    run = trained(tmp_path, "out", "run", what="base", keep_base=True, preserve={"loss": "kl"})
    manifest = manifest_of(CheckpointFolder.open(tmp_path / "out"))
    assert run.changes.keys() == digests(tmp_path / "base").keys()
    assert not run.changes.keys() & manifest.new_tensors.keys()
    assert any("loss.preserve" in entry for entry in run.log)
    checks(tmp_path / "base", tmp_path / "run")
    surgeon.revert(tmp_path / "run", tmp_path / "back")
    assert digests(tmp_path / "back") == digests(tmp_path / "base")
    out = CheckpointFolder.open(tmp_path / "out")
    layer = trainable_set(out, manifest, LayersSpec(layers=[1, 3]))
    assert set(layer.names) == {name for name in out.tensors if ".layers.1." in name or ".layers.3." in name}
    assert layer.of_base == {name for name in layer.names if ".adapter" not in name}
    whole, added = (trainable_set(out, manifest, what) for what in ("all", "added"))
    assert set(whole.names) == set(out.tensors) == {*run.changes, *added.names}
    assert not added.of_base


def test_what_was_tuned_and_then_grown_is_taught_by_what_it_was(tmp_path: Path) -> None:
    """Where the first base is lost: the model of the last surgery's begin, with its trained grafts, to the bit."""
    base_of(tmp_path, dtype="float32", num_hidden_layers=2)
    plans = {
        "grafted": {"op": "gated_adapters", "layers": [0], "size": 4},
        "grown": {"op": "insert_layers", "where": {"after": [0]}, "init": {"kind": "copy"}},
    }
    for name, operation in plans.items():
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"surgeon": 1, "operations": [operation]}))
    surgeon.apply(tmp_path / "grafted.yaml", str(tmp_path / "base"), tmp_path / "grafted")
    trained(tmp_path, "grafted", "tuned", what="all")
    surgeon.apply(tmp_path / "grown.yaml", str(tmp_path / "tuned"), tmp_path / "grown")

    def said(out: str, to: str, **preserve: Any) -> tuple[str, list[float]]:
        listener = Quiet()
        what: dict[str, Any] = {"what": "all"} if out == "plain" else {}
        path = config(tmp_path, **SHORT | {"log_every": 1, "steps": 6, "preserve": preserve} | what)
        run = surgeon.train(tmp_path / out, path, tmp_path / to, device="cpu", listener=listener)
        assert run is not None
        return "\n".join(listener.said), [entry["loss.preserve"] for entry in run.log if "loss.preserve" in entry]

    lines, terms = said("grown", "run", on="all")
    teacher = "the model as it stood when the last surgery began (tuned)"
    assert f"`preserve`: the first base is not in the model any more, so {teacher} teaches" in lines
    assert f"{teacher} within teaches: kl on all text" in lines
    assert terms[0] == 0
    assert terms[-1] > 0
    run = CheckpointFolder.open(tmp_path / "run")
    within = base_within(run, manifest_of(run), last=True)
    model, tuned = load_model(run), load_model(tmp_path / "tuned")
    ids = torch.arange(10, 40)[None]
    with torch.no_grad():
        expected = tuned(ids).logits
        assert not torch.equal(model(ids).logits, expected)
    own = BaseWithin(model, layers=within.layers, inserted=within.inserted, grafts=within.grafts)
    assert torch.equal(own.logits(input_ids=ids), expected)
    with pytest.raises(BadInput, match=r"trained or edited when .* or say `teacher: \{surgery: last\}`"):
        said("grown", "other", teacher="base")
    assert teacher in said("grown", "asked", teacher={"surgery": "last", "cached": 4})[0]
    # Tuned, and never grown: what it says as it stands.
    trained(tmp_path, "base", "plain", what="all")
    lines, terms = said("plain", "again", on="all")
    assert "a frozen copy of the model as it stands, which no surgery made, teaches" in lines
    assert terms[0] == 0


def test_of_grown_tensors_the_bases_part_trains(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("surgeon: 1\noperations: [{op: widen_ffn, by: 8}]\n")
    base = tiny.checkpoint(tmp_path / "base", "llama", num_hidden_layers=1)
    surgeon.apply(tmp_path / "plan.yaml", str(base), tmp_path / "out")
    out = CheckpointFolder.open(tmp_path / "out")
    manifest = manifest_of(out)
    last, own = (trainable_set(out, manifest, what) for what in ("last", "base"))
    for name, fixed in last.fixed.items():
        shape = out.tensors[name].shape
        assert fixed.size + own.fixed[name].size == math.prod(shape)
        assert fixed.reversed(shape) == own.fixed[name]
    assert own.fixed.keys() == last.fixed.keys() == set(last.names)
    corners = Fixed((((2, 4), (0, 3)), ((6, 8), (1, 2))))
    left = torch.ones(8, 3)
    for part in corners.slices:
        left[part] = 0
    for part in corners.reversed((8, 3)).slices:
        assert left[part].all()
        left[part] = 0
    assert not left.any() and corners.size + corners.reversed((8, 3)).size == 24
    assert trainable_set(out, manifest, "all").fixed == {}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, r"train\.yaml:1: `what` is not given, and .*base has no surgery .*say `what: all`"),
        ({"what": "last"}, r"train\.yaml:\d+: `what`: .*nothing was added that could train alone"),
        ({"what": "bas"}, "did you mean `base`"),
        ({"what": {"layers": [7]}}, r"train\.yaml:\d+: `what`: there is no layer 7: the model has layers 0 to 1"),
        ({"what": {"layer": [7]}}, "unknown key `layer`; did you mean `layers`"),
        ({"what": "all", "lora": {}}, "`what` and `lora` exclude each other"),
        ({"lora": {"rang": 3}}, "did you mean `rank`"),
        ({"lora": {"targets": "fn"}}, "did you mean `ffn`"),
        ({"lora": {"targets": ["x_proj"]}}, r"no module of .* is called x_proj"),
        ({"lora": {"targets": ["embed_tokens"]}}, "no matrix of a linear module"),
    ],
)
def test_refusals(plain: Path, change: dict[str, Any], told: str) -> None:
    with pytest.raises(BadInput, match=told):
        trained(plain, "base", "no", **change)
    assert not list(plain.glob(".no.*"))
    assert not (plain / "no").exists()


def test_without_peft_it_is_said(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"needs PEFT, which is not installed; run `pip install -e '\.\[peft\]'`"):
        trained(plain, "base", "no", lora={})


def test_epochs_are_passes_through_what_is_new(tmp_path: Path) -> None:
    base_of(tmp_path, "llama", num_hidden_layers=1)
    given = {"batch": 4, "length": 16, "steps": None, "optimizer": {"lr": 1e-3, "warmup": 0.5}, "what": {"layers": [0]}}
    listener = Quiet()
    loaded = load_config(config(tmp_path, epochs=2, **given))
    folder = CheckpointFolder.open(tmp_path / "base")
    run = opened_run(prepare(folder, None, loaded, tmp_path / "run", device="cpu", processes=1), listener)
    new = run.data.mixture.streams[0]
    tokens = sum(len(new.encoder.encode(new.documents.read(int(number)))[0]) for number in new.numbers)
    steps = math.ceil(2 * tokens / (0.75 * 4 * 16))
    assert run.settings.steps == steps
    assert run.settings.warmup_steps == round(0.5 * steps)
    for _ in range(steps * 4):
        run.data.mixture.next()
    # Up to the last step's rounding, two passes of the new text whatever the old one has.
    assert new.epoch == 2 or (new.epoch, new.position) >= (1, len(new.numbers) - 4)
    assert any(note.startswith(f"epochs 2: {steps} steps of 64 tokens") for note in run.data.notes)
    for wrong in ({"epochs": 1, "steps": 3}, {"steps": None}, {"bytes": 9, "steps": 3}):
        with pytest.raises(BadInput, match="give `steps`, or `epochs`"):
            load_config(config(tmp_path, **wrong))


def test_bytes_are_of_the_new_text_that_the_run_draws(tmp_path: Path) -> None:
    """As many steps as it takes, whatever tokens are: of another tokenizer's, other steps of the same text."""
    base_of(tmp_path, "llama", num_hidden_layers=1)
    given = {"batch": 4, "length": 16, "steps": None, "what": {"layers": [0]}}
    folder = CheckpointFolder.open(tmp_path / "base")
    for wanted in (700, 5000):
        loaded = load_config(config(tmp_path, bytes=wanted, **given))
        run = opened_run(prepare(folder, None, loaded, tmp_path / "run", device="cpu", processes=1), Quiet())
        new, steps = run.data.mixture.streams[0], run.settings.steps
        drawn = [run.data.mixture.next() for _ in range(4 * steps)]
        assert any(note.startswith(f"bytes {wanted:,}: {steps} steps of 64 tokens") for note in run.data.notes)
        # Which tokens a sequence has is the packer's; their share of a document's bytes is counted by hand.
        tokens = sum(len(sequence.ids) for sequence in drawn if sequence.domain == 1)
        made, left = 0.0, tokens
        for count, nbytes in new.lengths():
            made += nbytes * min(1, left / count)
            left -= count
            if left <= 0:
                break
        # The mixture gives whole sequences, so it may be one of them before or behind its share.
        assert abs(made - wanted) < 16 * (2 + 4) * made / tokens


def test_the_best_step_is_published_and_survives_a_kill(tmp_path: Path) -> None:
    """What is not trained on is forgotten, so the best step on it is an early one, whatever was killed when."""
    base_of(tmp_path, "llama", num_hidden_layers=1, dtype="float32")
    given: dict[str, Any] = {
        "steps": 5,
        "evaluate_every": 1,
        "save_every": 2,
        "what": "all",
        "keep_best": "en",
        "optimizer": {"lr": 0.03, "warmup": 0, "schedule": "constant"},
        # Of `en` nothing is trained on: it is forgotten.
        "sources": [source | {"share": float(source["name"] == "fr")} for source in CONFIG["sources"]],
    }
    whole = trained(tmp_path, "base", "run", **given)
    measured = {entry["step"]: entry["eval_en_loss"] for entry in whole.log if "eval_en_loss" in entry}
    best = min(measured, key=lambda step: measured[step])
    assert best == whole.published_step < 4
    assert whole.losses["en"][1] == measured[best]
    manifest = manifest_of(CheckpointFolder.open(tmp_path / "run"))
    assert manifest.training[-1].published_step == best
    # What lies there is the model of that step: its held-out loss is.
    again = trained(tmp_path, "run", "next", **(given | {"steps": 1, "evaluate_every": 9}))
    assert again.losses["en"][0] == measured[best]

    class Killed(Exception):
        pass

    def kill_after(step: int) -> Any:
        def complete(folder: Path, at: int, best: int | None = None) -> None:
            finish(folder, at, best)
            if at >= step:
                raise Killed

        return complete

    finish = trainer.complete
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "complete", kill_after(5))
        with pytest.raises(Killed):
            trained(tmp_path, "base", "other", **given)
    work = work_folder(tmp_path / "other")
    kept = sorted(step_of(folder) for folder in work.glob("checkpoint-*"))
    assert best in kept
    assert kept == [best, 4, 5]
    # Where the best checkpoint is damaged, those after it would publish a worse one: they go too.
    (work / f"checkpoint-{best}" / trainer.TRAINED_FILE).write_bytes(b"")
    listener = Quiet()
    resumed = surgeon.train(
        tmp_path / "base", config(tmp_path, **(SHORT | given)), tmp_path / "other", device="cpu", listener=listener
    )
    assert resumed is not None
    assert any("the best so far, which is gone" in line for line in listener.said)
    assert resumed.resumed_at < best
    assert digests(tmp_path / "other") == digests(tmp_path / "run")
    with pytest.raises(BadInput, match="`keep_best` names 'de', no source that holds text out; those that do: fr, en"):
        load_config(config(tmp_path, keep_best="de"))
