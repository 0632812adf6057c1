"""No stranger's code runs unasked, and what lies beside the weights changes nothing unseen: in every command."""

from __future__ import annotations

import json
import shutil
import socket
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file

import surgeon
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.trust import check_written, leads_to_code
from surgeon.common.library import config_of, described
from surgeon.common.listener import Quiet
from surgeon.errors import BadInput
from surgeon.grafts.bundle import CODE_FILE
from surgeon.models.load import find_processor, find_tokenizer, load_model
from surgeon.models.view import view_of_model
from tests import tiny
from tests.models.test_tokens import byte_tokenizer
from tests.training.texts import add_tokenizer, corpus

GROWN: list[dict[str, Any]] = [
    {"op": "control_llm", "layers": [1]},
    {"op": "pmoe_experts", "threshold": 1, "slots": 1},
]
TRAINING: dict[str, Any] = {"steps": 1, "batch": 1, "length": 8, "save_every": 1, "evaluate_every": 1, "log_every": 1}


@dataclass(frozen=True)
class World:
    """A base, what grew out of it natively and with grafts, a delta, and the files that commands take."""

    room: Path

    @property
    def base(self) -> Path:
        return self.room / "base"

    @property
    def out(self) -> Path:
        return self.room / "out"


def plan_of(path: Path, *operations: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"surgeon": 1, "operations": list(operations)}))
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Made once; tests change copies."""
    room = tmp_path_factory.mktemp("trust")
    add_tokenizer(tiny.checkpoint(room / "base", "llama", num_hidden_layers=2))
    corpus(room / "text.jsonl", documents=6)
    source = {"name": "text", "path": "text.jsonl", "validation": 0.2, "share": 1.0}
    (room / "train.yaml").write_text(yaml.safe_dump({"surgeon_train": 1, "sources": [source], **TRAINING}))
    tasks = {"surgeon_continual": 1, "train": TRAINING, "tasks": [{"name": "a", "sources": [{"path": "text.jsonl"}]}]}
    (room / "tasks.yaml").write_text(yaml.safe_dump(tasks))
    plan_of(room / "copy.json", {"op": "insert_layers", "where": "all", "count": 1, "init": {"kind": "copy"}})
    surgeon.apply(plan_of(room / "grown.json", *GROWN), str(room / "base"), room / "out")
    surgeon.make_delta(room / "out", room / "delta")
    return World(room)


@pytest.fixture
def world(made: World, tmp_path: Path) -> World:
    shutil.copytree(made.room, tmp_path / "w")
    return World(tmp_path / "w")


@pytest.fixture(autouse=True)
def _nobody_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> NoReturn:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)


# Commands that read a folder which is nobody's output yet, and those that read an output; each as (world, folder).
Command = Callable[[World, Path], Any]
OF_A_BASE: dict[str, Command] = {
    "preview": lambda w, f: surgeon.preview(w.room / "grown.json", f),
    "apply": lambda w, f: surgeon.apply(w.room / "grown.json", str(f), w.room / "new"),
    "verify": lambda w, f: surgeon.verify(f, w.out),
    "evaluate": lambda w, f: surgeon.evaluate(f, w.room / "text.jsonl"),
    "evaluate beside": lambda w, f: surgeon.evaluate(w.out, w.room / "text.jsonl", base=f),
    "continual": lambda w, f: surgeon.continual(w.room / "tasks.yaml", f, w.room / "new"),
    "apply --delta": lambda w, f: surgeon.apply_delta(w.room / "delta", f, w.room / "new"),
    "delta --base": lambda w, f: surgeon.make_delta(w.out, w.room / "new", base=f),
    "report --base": lambda w, f: surgeon.report(w.out, html=w.room / "new.html", base=f, logits=True),
    "inspect": lambda w, f: surgeon.inspect(f),
}
OF_AN_OUTPUT: dict[str, Command] = {
    "verify": lambda w, f: surgeon.verify(w.base, f),
    "verify --streamed": lambda w, f: surgeon.verify(w.base, f, streamed=True),
    "apply": lambda w, f: surgeon.apply(w.room / "copy.json", str(f), w.room / "new"),
    "evaluate": lambda w, f: surgeon.evaluate(f, w.room / "text.jsonl"),
    "train": lambda w, f: surgeon.train(f, w.room / "train.yaml", w.room / "new", device="cpu"),
    "merge": lambda w, f: surgeon.merge(f, w.room / "new"),
    "revert": lambda w, f: surgeon.revert(f, w.room / "new"),
    "delta": lambda w, f: surgeon.make_delta(f, w.room / "new"),
    "routing": lambda w, f: surgeon.routing_report(f, {"probe": None}),
    "report": lambda w, f: surgeon.report(f, html=w.room / "new.html"),
    "export-slot": lambda w, f: surgeon.export_slot(f, 0, w.room / "new"),
    "push": lambda w, f: surgeon.push(f, "user/name", dry_run=True),
    "inspect": lambda w, f: surgeon.inspect(f),
}


def script(folder: Path, name: str) -> None:
    """Code that leaves a trace wherever it runs."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"import pathlib\npathlib.Path({str(folder.parent / 'RAN')!r}).touch()\n")


def settings(folder: Path, name: str = "config.json", **changes: Any) -> None:
    file = folder / name
    before = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(before | changes))


def own_code(folder: Path) -> None:
    script(folder, "modeling_x.py")
    settings(folder, auto_map={"AutoConfig": "modeling_x.C", "AutoModelForCausalLM": "modeling_x.M"})


def own_tokenizer(folder: Path, name: str, **mapped: Any) -> None:
    """A tokenizer whose class is in the folder's code alone."""
    settings(folder, "tokenizer_config.json", tokenizer_class="XTokenizer")
    settings(folder, name, auto_map={"AutoTokenizer": ["x.XTokenizer", None], **mapped})


KERNEL = "kernels-community/flash-attn"
ELSEWHERE = "evil/code--modeling_x.Model"
Planted = dict[str, tuple[Callable[[Path], object], str]]
# What is planted, and a word that the refusal must say. A base of a type that transformers has needs none of this code.
LEFT_OUT: Planted = {
    "generate": (lambda f: script(f, "custom_generate/generate.py"), "custom_generate/generate.py"),
    "a file of code": (lambda f: script(f, "modeling_x.py"), "modeling_x.py"),
    "code deep below": (lambda f: script(f, ".a/b/c/x.py"), "x.py"),
    "a capital suffix": (lambda f: script(f, "X.PY"), "X.PY"),
    "auto_map": (own_code, "config.json"),
    "auto_map of a tokenizer": (
        lambda f: settings(f, "tokenizer_config.json", auto_map={"AutoTokenizer": [ELSEWHERE, None]}),
        "tokenizer_config.json",
    ),
    "auto_map of images": (
        lambda f: settings(
            f,
            "preprocessor_config.json",
            auto_map={"AutoImageProcessor": ELSEWHERE},
            image_processor_type="CLIPImageProcessorFast",
        ),
        "preprocessor_config.json",
    ),
    "auto_map of a part": (
        lambda f: settings(
            f,
            "processor_config.json",
            image_processor={"auto_map": {"AutoImageProcessor": "x.P"}, "image_processor_type": "CLIPImageProcessor"},
        ),
        "processor_config.json",
    ),
}
CODE: Planted = {
    "a tokenizer": (lambda f: own_tokenizer(f, "tokenizer_config.json"), "tokenizer_config.json"),
    "a tokenizer of the config": (lambda f: own_tokenizer(f, "config.json", AutoConfig="x.C"), "auto_map"),
    "a tokenizer in a list": (
        lambda f: settings(f, "tokenizer_config.json", auto_map=["x.T", None], tokenizer_class=None),
        "tokenizer_config.json",
    ),
    "auto_map of a processor": (
        lambda f: settings(f, "processor_config.json", image_processor={"auto_map": {"AutoImageProcessor": "x.P"}}),
        "processor_config.json",
    ),
    "auto_map of a preprocessor": (
        lambda f: settings(f, "preprocessor_config.json", auto_map={"AutoFeatureExtractor": ELSEWHERE}),
        "preprocessor_config.json",
    ),
    "auto_map of generation": (
        lambda f: settings(f, "generation_config.json", a=[{"auto_map": {"x": "y"}}]),
        "generation_config.json",
    ),
    "auto_map nested": (lambda f: settings(f, rope_parameters={"auto_map": "x.C"}), "auto_map"),
    "a reference": (lambda f: settings(f, tokenizer_class=ELSEWHERE), "evil/code"),
    "a reference in a list": (lambda f: settings(f, "tokenizer_config.json", a=[["x", ELSEWHERE]]), "evil/code"),
    "a video processor": (
        lambda f: settings(f, "video_preprocessor_config.json", auto_map={"AutoVideoProcessor": ELSEWHERE}),
        "video_preprocessor_config.json",
    ),
    "pipelines": (lambda f: settings(f, custom_pipelines={"x": {"impl": "x.P", "pt": ["M"]}}), "custom_pipelines"),
    "a kernel": (lambda f: settings(f, attn_implementation=KERNEL), "attn_implementation"),
    "a kernel hidden": (lambda f: settings(f, _attn_implementation={"": f"paged|{KERNEL}"}), "attn_implementation"),
    "a kernel inside": (lambda f: settings(f, _attn_implementation_internal=KERNEL), "attn_implementation"),
    "experts": (lambda f: settings(f, experts_implementation=KERNEL), "experts_implementation"),
    "trust": (lambda f: settings(f, trust_remote_code=True), "trust_remote_code"),
    "kernels": (lambda f: settings(f, use_kernels=True), "use_kernels"),
}
OTHER_MODEL: Planted = {
    "quantised": (lambda f: settings(f, quantization_config={"quant_method": "bitsandbytes"}), "quantised"),
    "compressed": (lambda f: settings(f, compression_config={"quant_method": "x"}), "quantised"),
    "other weights": (lambda f: settings(f, transformers_weights="other.safetensors"), "transformers_weights"),
    "other configs": (
        lambda f: (settings(f, configuration_files=["config.5.0.json"]), settings(f, "config.5.0.json")),
        "configuration_files",
    ),
    "fusion": (lambda f: settings(f, fusion_config={"x": 1}), "fusion_config"),
    "fields renamed": (lambda f: settings(f, attribute_map={"hidden_act": "mlp"}), "attribute_map"),
    "fields hidden": (lambda f: settings(f, __dict__={"hidden_size": 8}), "__dict__"),
}
REFUSED = LEFT_OUT | CODE | OTHER_MODEL


@pytest.mark.parametrize("attack", REFUSED)
def test_every_command_refuses_it_in_either_folder(attack: str, world: World) -> None:
    plant, word = REFUSED[attack]
    for folder, commands in ((world.base, OF_A_BASE), (world.out, OF_AN_OUTPUT)):
        if folder == world.base and attack in LEFT_OUT:
            continue
        kept = shutil.copytree(folder, world.room / "kept")
        plant(folder)
        for name, command in commands.items():
            if name == "inspect" and attack not in OTHER_MODEL:
                # To look is what a maintainer wants, and runs nothing.
                looked = surgeon.inspect(folder)
                assert looked.anatomy is None and word in " ".join(looked.to_json()["foreign_code"])
                continue
            with pytest.raises(BadInput) as refusal:
                command(world, folder)
            assert word in str(refusal.value), (name, str(refusal.value))
            assert "\n" not in str(refusal.value)
            assert not (world.room / "new").exists(), name
        shutil.rmtree(folder)
        kept.rename(folder)
    assert not list(world.room.rglob("RAN"))


def test_code_that_transformers_does_not_need_is_left_out_of_a_base(world: World) -> None:
    """As transformers reads such a folder without trust: no command runs it, and no output has anything of it."""
    clean = {name: (world.base / name).read_bytes() for name in ("config.json", "tokenizer_config.json")}
    words = find_tokenizer(world.base)[0]("w1 w2 w3")["input_ids"]
    for plant, _ in LEFT_OUT.values():
        plant(world.base)
    new = world.room / "new"
    for name, command in OF_A_BASE.items():
        command(world, world.base)
        if new.is_dir() and name not in ("apply", "delta --base"):
            assert (new / "tokenizer_config.json").exists()
            assert "auto_map" not in (new / "tokenizer_config.json").read_text()
        if new.is_dir():
            shutil.rmtree(new)
    folder = CheckpointFolder.open(world.base)
    assert (folder.code, folder.classes, folder.own) == ("none", "installed", None)
    assert folder.config == json.loads(clean["config.json"])
    note = folder.notes[0]
    assert note.endswith("are left out: transformers has llama itself") and "tokenizer_config.json's `auto_map`" in note
    assert find_tokenizer(world.base)[0]("w1 w2 w3")["input_ids"] == words
    surgeon.apply(world.room / "copy.json", str(world.base), new)
    assert not [path for path in new.rglob("*") if path.suffix.lower() == ".py"]
    assert not [path for path in new.glob("*.json") if leads_to_code(json.loads(path.read_text()))]
    found = surgeon.verify(world.base, new, windows=1, window=16)
    assert found.holds and found.identical
    surgeon.revert(new, world.room / "back", base=world.base)
    for name, content in clean.items():
        assert json.loads((world.room / "back" / name).read_text()) == json.loads(content)
    own_tokenizer(world.base, "tokenizer_config.json")
    with pytest.raises(BadInput, match="an `auto_map` for AutoTokenizer, and transformers has no XTokenizer"):
        surgeon.preview(world.room / "copy.json", world.base)
    settings(world.base, model_type="x")
    for name, command in OF_A_BASE.items():
        if name != "inspect":
            # Where OUT is taken that is said first, before BASE is opened.
            with pytest.raises(BadInput, match=r"code of its own \(config.json has an `auto_map`\)|exists and holds"):
                command(world, world.base)
    # An output has no code that surgeon does not put there, whatever its type.
    own_code(new)
    for command in (OF_AN_OUTPUT["verify"], OF_AN_OUTPUT["evaluate"], OF_AN_OUTPUT["push"]):
        with pytest.raises(BadInput, match="code of its own"):
            command(world, new)
    assert not list(world.room.rglob("RAN"))


def test_a_delta_is_judged_like_a_folder(world: World) -> None:
    for attack in ("generate", "a file of code", "auto_map of a tokenizer"):
        delta = shutil.copytree(world.room / "delta", world.room / attack)
        LEFT_OUT[attack][0](delta)
        with pytest.raises(BadInput, match="code of its own"):
            surgeon.apply_delta(delta, world.base, world.room / "new")


def test_edited_or_missing_code_is_not_what_surgeon_ships(world: World) -> None:
    code = world.out / CODE_FILE
    ours = code.read_bytes()
    for content, word in ((ours + b"\n", CODE_FILE), (None, "not there")):
        if content is None:
            code.unlink()
        else:
            code.write_bytes(content)
        for name, command in OF_AN_OUTPUT.items():
            if name != "inspect":
                with pytest.raises(BadInput, match=word):
                    command(world, world.out)
        assert word in surgeon.inspect(world.out).folder.foreign


@pytest.mark.parametrize("key", ["auto_map", "attn_implementation", "transformers_weights", "__class__"])
def test_no_config_of_a_manifest_is_written_that_would_be_refused(key: str) -> None:
    planted = {"auto_map": {"AutoModel": "evil/code--m.M"}, "attn_implementation": KERNEL}.get(key, "x")
    with pytest.raises(BadInput, match=key):
        check_written({"model_type": "llama", key: planted}, "OUT/surgery.json")
    check_written({"model_type": "llama", "auto_map": None, "attn_implementation": "sdpa"}, "OUT/surgery.json")


def test_trust_lets_run_what_a_model_needs_of_this_folder_and_nothing_else(world: World) -> None:
    """The flag is given; still, neither `generate` nor stray files are needed by classes that are installed."""
    script(world.base, "custom_generate/generate.py")
    script(world.base, "stray.py")
    found = surgeon.verify(world.base, world.out, trust_remote_code=True, windows=1, window=16)
    assert found.holds and found.identical
    script(world.out, "custom_generate/generate.py")
    found = surgeon.verify(world.base, world.out, trust_remote_code=True, windows=1, window=16)
    assert {check.name for check in found.checks if not check.holds} == {"beside the weights"}
    surgeon.evaluate([world.base, world.out], world.room / "text.jsonl", trust_remote_code=True)
    assert not list(world.room.rglob("RAN"))


def test_own_code_runs_for_its_folder_once_it_is_trusted(world: World) -> None:
    own_code(world.base)
    with (world.base / "modeling_x.py").open("a") as file:
        file.write(
            "from transformers import LlamaConfig, LlamaForCausalLM\n"
            "from .beside import NAME\n"
            "class C(LlamaConfig):\n    model_type = 'x'\n"
            "class M(LlamaForCausalLM):\n    config_class = C\n    told = NAME\n"
        )
    (world.base / "beside.py").write_text("NAME = 'own'\n")
    settings(world.base, model_type="x", name_or_path="evil/elsewhere", _name_or_path="evil/elsewhere")
    with pytest.raises(BadInput, match="code of its own"):
        load_model(world.base)
    assert not (world.room / "RAN").exists()
    assert load_model(CheckpointFolder.open(world.base, trust_remote_code=True)).told == "own"
    assert (world.room / "RAN").exists()


def adapter(folder: Path) -> None:
    """A LoRA on every query that PEFT would load, and that changes every logit."""
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 64, "target_modules": ["q_proj"]}
    config["base_model_name_or_path"] = "user/other"
    (folder / "adapter_config.json").write_text(json.dumps(config))
    name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    tensors = {name.format(i, "A"): torch.ones(2, 32) for i in (0, 1)}
    tensors |= {name.format(i, "B"): torch.ones(32, 2) for i in (0, 1)}
    save_file(tensors, folder / "adapter_model.safetensors")


def test_an_adapter_beside_the_base_is_set_aside_with_a_word(world: World) -> None:
    text = world.room / "text.jsonl"
    before = surgeon.evaluate(world.base, text).to_json()["models"]
    adapter(world.base)
    (world.base / "custom_generate").mkdir()
    told = "adapter_config.json is set aside"
    listener = Quiet()
    evaluated = surgeon.evaluate(world.base, text, listener=listener)
    assert evaluated.to_json()["models"] == before
    assert any(told in note for note in evaluated.notes)
    notes = surgeon.preview(world.room / "copy.json", world.base).notes
    assert any(told in note for note in notes) and any("custom_generate" in note for note in notes)
    assert any("`merge_adapter` merges it" in note for note in notes)
    merged = surgeon.preview(plan_of(world.room / "merge.json", {"op": "merge_adapter", "from": "base"}), world.base)
    assert len(merged.blueprint.changes) == 2
    surgeon.apply(world.room / "copy.json", str(world.base), world.room / "new", listener=listener)
    assert any(line.startswith(told) for line in listener.said)
    assert not list((world.room / "new").glob("*adapter*")) and not (world.room / "new" / "custom_generate").exists()
    listener = Quiet()
    verified = surgeon.verify(world.base, world.room / "new", windows=1, window=16, listener=listener)
    assert verified.holds and any(told in line for line in listener.said)
    assert any(told in note for note in surgeon.inspect(world.base).to_json()["notes"])


def test_weights_that_only_the_code_left_out_fits_are_refused_by_its_name(world: World) -> None:
    own_code(world.base)
    name = "model.layers.1.mlp.up_proj.weight"
    for file in world.base.glob("model*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            save_file(tensors | {name: tensors[name][:-8].contiguous()}, file, metadata={"format": "pt"})
    with pytest.raises(BadInput, match=r"modeling_x\.M\) was left out, as transformers has llama") as refusal:
        surgeon.preview(world.room / "copy.json", world.base)
    assert name in str(refusal.value) and str(refusal.value).endswith("read it, then pass `--trust-remote-code`")
    assert "\n" not in str(refusal.value)


def rank_shard(folder: Path) -> None:
    save_file({"x": torch.zeros(1)}, folder / "shard-00001-model-00001-of-00001.safetensors")


@pytest.mark.parametrize(
    ("plant", "name"),
    [
        (adapter, "adapter_config.json"),
        (lambda f: (f / "custom_generate").mkdir(), "custom_generate"),
        (lambda f: (f / "custom_generate").symlink_to(".."), "custom_generate"),
        (lambda f: (f / "pytorch_model.bin.index.json").write_text("{}"), "pytorch_model.bin.index.json"),
        (lambda f: save_file({"x": torch.zeros(1)}, f / "other.safetensors"), "other.safetensors"),
        (rank_shard, "shard-00001"),
    ],
)
def test_verify_names_what_was_planted_beside_an_output(
    plant: Callable[[Path], object], name: str, world: World
) -> None:
    plant(world.out)
    found = surgeon.verify(world.base, world.out)
    assert not found.holds
    assert {name in check.detail for check in found.checks if not check.holds} == {True}
    with pytest.raises(BadInput, match="not pushed"):
        _pushed_as_checked(world.out)


def _pushed_as_checked(out: Path) -> None:
    from surgeon.manifest.reading import manifest_of
    from surgeon.share.push import _Checked, _own_checks

    folder = CheckpointFolder.open(out)
    _Checked(_own_checks(folder, manifest_of(folder), Quiet()), None, None).check_kept(folder)


def add_tensors(folder: Path, **tensors: torch.Tensor) -> None:
    shard = next(iter(sorted(folder.glob("model*.safetensors"))))
    save_file(load_file(shard) | tensors, shard, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    listed["weight_map"] |= dict.fromkeys(tensors, shard.name)
    index.write_text(json.dumps(listed))


IDLE = ("visual.proj", "lm_head.extra", "model.rotary_emb.inv_freq")


def test_tensors_without_a_place_are_carried_and_named_everywhere(world: World) -> None:
    add_tensors(world.base, **{name: torch.ones(3, dtype=torch.bfloat16) for name in IDLE})
    assert any(IDLE[0] in note for note in surgeon.preview(world.room / "copy.json", world.base).notes)
    for plan in ("copy.json", "grown.json"):
        out, listener = world.room / plan.removesuffix(".json"), Quiet()
        surgeon.apply(world.room / plan, str(world.base), out, listener=listener)
        assert any("no place for" in line and IDLE[0] in line for line in listener.said)
        assert set(IDLE) <= CheckpointFolder.open(out).tensors.keys()
        for streamed in (False, True):
            listener = Quiet()
            found = surgeon.verify(world.base, out, windows=1, window=16, streamed=streamed, listener=listener)
            assert found.holds and found.identical
            assert any("no place for" in line and IDLE[0] in line for line in listener.said)
    evaluated = surgeon.evaluate([world.base, out], world.room / "text.jsonl")
    assert sum("visual.proj" in note for note in evaluated.notes) == 2
    listener = Quiet()
    surgeon.train(out, world.room / "train.yaml", world.room / "run", device="cpu", listener=listener)
    assert any("visual.proj" in line for line in listener.said)
    assert set(IDLE) <= CheckpointFolder.open(world.room / "run").tensors.keys()


@pytest.mark.parametrize(
    "name",
    [
        "embed_tokens.weight",
        "model.model.norm.weight",
        "model.model.layers.0.mlp.up_proj.weight",
        "model.lm_head.weight",
    ],
)
def test_a_tensor_that_transformers_takes_for_another_is_refused_everywhere(name: str, world: World) -> None:
    """Without a word, transformers loads whichever of the two comes last."""
    add_tensors(world.base, **{name: torch.zeros(8, dtype=torch.bfloat16)})
    for command in ("preview", "apply", "verify", "inspect"):
        with pytest.raises(BadInput, match="the same tensor"):
            OF_A_BASE[command](world, world.base)
    with pytest.raises(BadInput):
        surgeon.evaluate(world.base, world.room / "text.jsonl")


def test_names_of_control_states_are_not_carried_along(world: World) -> None:
    add_tensors(world.base, **{"model.control_bank.0.keys": torch.zeros(3, dtype=torch.bfloat16)})
    with pytest.raises(BadInput, match="name of control states"):
        surgeon.preview(world.room / "copy.json", world.base)


def test_a_view_is_private_and_shows_checked_files_alone(world: World) -> None:
    adapter(world.base)
    (world.base / "model.safetensors.index.json.bak").touch()
    (world.base / "pytorch_model.bin.index.json").write_text("{}")
    settings(world.base, "generation_config.json", x=1)
    folder = CheckpointFolder.open(world.base)
    with view_of_model(folder, described(folder.config)) as view:
        names = {path.name for path in view.iterdir()}
        assert names == {"config.json", "model.safetensors.index.json", *folder.shards}
        assert stat.S_IMODE(view.stat().st_mode) == 0o700 == stat.S_IMODE(view.parent.stat().st_mode)
        for shard in folder.shards:
            assert (view / shard).readlink() == (world.base / shard).resolve()
    assert not view.parent.exists()


def test_what_a_config_may_not_hide_is_left_out_of_the_view() -> None:
    from transformers import LlamaConfig, NemotronHConfig

    described_ones = {"hidden_size": 8, "rope_theta": 1e6, "pretraining_tp": 1, "num_labels": 3, "model_type": "llama"}
    hiding = {"to_dict": 1, "get_text_config": None, "base_model_tp_plan": {}, "_auto_class": "AutoConfig"}
    hiding |= {"_name_or_path": "a/b", "attn_implementation": "flash_attention_2"}
    assert described(described_ones | hiding, LlamaConfig) == described_ones
    assert described({"attn_implementation": "eager"}, LlamaConfig) == {"attn_implementation": "eager"}
    # Nothing sets these properties; Nemotron-H reads an old field by the name of one.
    assert described({"use_return_dict": True, "hidden_size": 8}, LlamaConfig) == {"hidden_size": 8}
    pattern = {"hybrid_override_pattern": "M-M*-M-"}
    assert described(pattern | {"use_return_dict": True}, NemotronHConfig) == pattern
    assert config_of(pattern, NemotronHConfig).num_hidden_layers == 7


def test_a_tokenizer_reads_no_file_that_its_settings_name(world: World, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("secret")
    before = find_tokenizer(world.base)[0]("w1 w2 w3")["input_ids"]
    for planted in (
        {"vocab_file": str(tmp_path / "elsewhere"), "init_inputs": [str(tmp_path / "elsewhere")]},
        {"fast_tokenizer_files": ["tokenizer.5.0.json"], "gguf_file": "/dev/zero", "tokenizer_object": "x"},
        {"tokenizer_class": "AutoModelForCausalLM"},
        {"tokenizer_class": "pipeline"},
        {"name_or_path": "evil/elsewhere", "_commit_hash": "x", "local_files_only": False, "revision": "x"},
    ):
        file = world.base / "tokenizer_config.json"
        kept = file.read_text()
        (world.base / "tokenizer.5.0.json").write_text("{}")
        settings(world.base, "tokenizer_config.json", **planted)
        found, why_not = find_tokenizer(world.base)
        assert found is not None and found("w1 w2 w3")["input_ids"] == before, (planted, why_not)
        file.write_text(kept)


def test_a_processor_loads_no_model_of_sound_from_elsewhere(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import BertConfig

    asked: list[Any] = []
    monkeypatch.setattr(BertConfig, "from_pretrained", lambda *asked_for, **_: asked.append(asked_for))
    sound = {"audio_tokenizer_class": "BertConfig", "audio_tokenizer_name_or_path": str(world.out)}
    part = {"audio_tokenizer": sound}
    for name, planted in (("audio_tokenizer_config.json", sound), ("processor_config.json", part)):
        settings(world.base, name, **planted)
        settings(world.base, "processor_config.json", processor_class="LlavaProcessor")
        assert find_processor(world.base)[0] is None
        (world.base / name).unlink()
    assert not asked


def test_settings_that_cannot_be_written_again_are_refused(world: World) -> None:
    for word in ('"\\ud800"', "[" * 700 + "]" * 700):
        (world.base / "tokenizer_config.json").write_text(
            f'{{"auto_map": {{"AutoTokenizer": ["x.T", null]}}, "tokenizer_class": "LlamaTokenizer", "x": {word}}}'
        )
        with pytest.raises(BadInput, match=r"tokenizer_config\.json"):
            CheckpointFolder.open(world.base)


def test_what_real_checkpoints_hold_is_no_obstacle(world: World) -> None:
    """Of folders on the Hub: old notes of transformers, other formats, and paths that are spelled with dashes."""
    cache = "/root/.cache/huggingface/hub/models--meta-llama--Llama-3.1-8B/snapshots/0e9e"
    settings(
        world.base,
        _name_or_path=cache,
        _attn_implementation_autoset=True,
        attn_implementation="flash_attention_2",
        quantization_config=None,
        auto_map=None,
        pretraining_tp=1,
        unsloth_version="2024.9",
        trust_remote_code=False,
    )
    settings(
        world.base,
        "tokenizer_config.json",
        name_or_path="models--a--b.c",
        special_tokens_map_file=f"{cache}/special_tokens_map.json",
        trust_remote_code=False,
        chat_template="{% for m in messages %}--{{ m.role }}--{% endfor %}",
    )
    for name in ("original/params.json", "onnx/model.onnx", "model-q4.gguf", "pytorch_model-00001-of-00001.bin"):
        (world.base / name).parent.mkdir(exist_ok=True)
        (world.base / name).write_bytes(b"{}")
    for name in ("pytorch_model.bin.index.json", "README.md", "LICENSE", ".gitattributes"):
        (world.base / name).write_text("{}")
    folder = CheckpointFolder.open(world.base)
    assert (folder.code, folder.classes, folder.notes) == ("none", "installed", [])
    surgeon.apply(world.room / "copy.json", str(world.base), world.room / "new")
    found = surgeon.verify(world.base, world.room / "new", windows=1, window=16)
    assert found.holds and found.identical


def test_a_tokenizer_beside_grafts_loads_without_their_code(tmp_path: Path) -> None:
    """transformers reads the config first, and would ask; the tokenizer needs nothing of it."""
    base = tiny.checkpoint(tmp_path / "base", "llama", vocab_size=300)
    byte_tokenizer(base, eos=True)
    (tmp_path / "plan.yaml").write_text("surgeon: 1\noperations: [{op: gated_adapters, size: 4}]\n")
    surgeon.apply(tmp_path / "plan.yaml", base, tmp_path / "out")
    before = set(sys.modules)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=False)
    assert not [name for name in sys.modules.keys() - before if "modeling_surgeon" in name]
    own = transformers.AutoTokenizer.from_pretrained(base)
    assert (type(tokenizer), tokenizer("some words").input_ids) == (type(own), own("some words").input_ids)
