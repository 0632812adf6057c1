"""Adapters merged: what PEFT computes with base and adapter, all of it or nothing, and what rounding leaves."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import surgeon
from surgeon.anatomy.dissect import dissect
from surgeon.blueprint.recipes import Adapted, Product, adapted
from surgeon.blueprint.recipes.adapted import guided, neighbours
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.peft_folder import Adapter, AdapterFolder
from surgeon.edits.adapter_changes import Sorted, name_for_peft
from surgeon.edits.adapter_places import Model, Settings, settings_of
from surgeon.edits.merge_adapter import read_adapter
from surgeon.errors import BadInput
from surgeon.models.load import load_model
from surgeon.operations import prepare
from surgeon.writing.compute import Evaluator
from tests import mtp, tiny, vocabularies
from tests.adapters import lora
from tests.checkpoints import add_letters, write_plan
from tests.decoders import tiny_decoder

# peft asks transformers for what transformers deprecates.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*LoRA tensor.s. have invalid shape:UserWarning"),
    pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
    # It looks for them among modules alone, and uses them for parameters.
    pytest.mark.filterwarnings("ignore:The following ..*_pattern keys did not match:RuntimeWarning"),
]

# Modules of a model, and settings by which PEFT finds those that it adapts.
MODULES = [
    f"{stem}.{number}.{block}"
    for stem in ("model.layers", "vision.blocks", "layers", "model.encoder.layer")
    for number in (0, 1, 11)
    for block in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj", "mlp.experts.1.up_proj")
] + ["lm_head", "model.embed_tokens", "q_proj", "my_q_proj"]
NAMED: list[dict[str, Any]] = [
    {"target_modules": r".*\.(?:q_proj|k_proj|up_proj)"},
    {"target_modules": r"model\.layers\.\d+\.self_attn\.(q_proj|k_proj)"},
    {"target_modules": r"(?:.*?layers.*?(?:q_proj|down_proj))|(?:lm_head)"},
    {"target_modules": r"q_proj"},
    {"target_modules": r".*_proj", "exclude_modules": r"vision\..*"},
    {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]},
    {"target_modules": ["q_proj", "lm_head"], "layers_to_transform": 1, "layers_pattern": "layers"},
    {"target_modules": ["up_proj", "down_proj"], "layers_to_transform": [0, 11], "layers_pattern": ["blocks", "layer"]},
    {"target_modules": ["model.layers.0.self_attn.q_proj", "k_proj"], "layers_to_transform": [11]},
    {"target_modules": ["q_proj"], "layers_to_transform": [], "exclude_modules": ["layers.1.self_attn.q_proj"]},
    {"target_modules": ["q_proj", "down_proj"], "modules_to_save": ["lm_head"], "exclude_modules": "lm_head"},
]


@pytest.mark.parametrize("config", NAMED)
def test_settings_name_the_modules_that_peft_adapts(config: dict[str, Any], tmp_path: Path) -> None:
    adapter = AdapterFolder.open(lora(tmp_path / "adapter"), id="adapter")
    settings = settings_of(replace(adapter, config={**adapter.config, "exclude_modules": None} | config))
    wanted = {name for name in MODULES if check_target_module_exists(peft.LoraConfig(**config), name)}
    assert {name for name in MODULES if settings.names(name)} == wanted
    assert wanted and len(wanted) < len(MODULES)


# By an expression: one that means the same and that Python's own matching is quick at.
COSTLY = {"(a+)+b": "a+b", "(.*)*x": ".*x", ".*.*.*q_proj": ".*q_proj", "q{1,9999}": "q+", "q" * 501: "q" * 501}


@pytest.mark.parametrize("costly", COSTLY)
def test_a_costly_expression_is_matched_as_peft_does(costly: str, tmp_path: Path) -> None:
    adapter = AdapterFolder.open(lora(tmp_path / "adapter"), id="adapter")
    settings = settings_of(replace(adapter, config={**adapter.config, "target_modules": costly}))
    assert [settings.names(name) for name in MODULES] == [bool(re.fullmatch(COSTLY[costly], name)) for name in MODULES]


@pytest.mark.parametrize("unread", ["(?<=q)q", "(q"])
def test_an_expression_that_is_not_read_is_refused(unread: str, tmp_path: Path) -> None:
    adapter = AdapterFolder.open(lora(tmp_path / "adapter"), id="adapter")
    with pytest.raises(BadInput, match="cannot be read"):
        any(map(settings_of(replace(adapter, config={**adapter.config, "target_modules": unread})).names, MODULES))


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
IDS = torch.randint(3, 120, (2, 12), generator=torch.Generator().manual_seed(0))
Base = Callable[[str], Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Base:
    """Tiny bases in float32, each made once."""
    folder = tmp_path_factory.mktemp("bases")

    def base(kind: str) -> Path:
        if (folder / kind).exists():
            return folder / kind
        if kind in ("gpt2", "falcon_h1", "qwen3_moe", "mixtral", "gpt_oss"):
            return tiny_decoder(folder / kind, kind)
        tied = {} if kind != "qwen2_untied" else {"tie_word_embeddings": False}
        kind_of = kind.partition("_untied")[0]
        return tiny.checkpoint(folder / kind, kind_of, dtype="float32", num_hidden_layers=2, **tied)

    return base


def trained(base: Path, folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """An adapter that PEFT saves, all of whose numbers have moved."""
    model = peft.get_peft_model(
        load_model(CheckpointFolder.open(base)), peft.LoraConfig(**{"r": 4, "lora_alpha": 6} | config)
    )
    drawn = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, value in model.named_parameters():
            if value.requires_grad:
                value.add_(torch.randn(value.shape, generator=drawn) * 0.1)
    model.save_pretrained(str(folder))
    return folder


def merged(base: Path, folder: Path, **entry: Any) -> surgeon.Applied:
    """The output of a plan of one merge, which lies in `folder` with its adapters."""
    plan = json.dumps({"surgeon": 1, "operations": [{"op": "merge_adapter", "from": "adapter", **entry}]})
    return surgeon.apply(surgeon.parse_plan(plan, source=str(folder / "plan.yaml")), base, folder / "out", device="cpu")


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(IDS).logits
    return found


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
# By the base's type: settings of PEFT's adapters.
ORACLE: dict[str, tuple[str, dict[str, Any]]] = {
    "ranks and alphas by module": (
        "llama",
        {
            "target_modules": [*ATTENTION, "down_proj", "lm_head"],
            "use_rslora": True,
            "rank_pattern": {"q_proj": 2, "layers.1.mlp.down_proj": 3},
            "alpha_pattern": {"layers.0.self_attn.k_proj": 1.5},
            "modules_to_save": ["input_layernorm"],
            "trainable_token_indices": [7, 3],
        },
    ),
    "subtracted": ("llama", {"target_modules": ["q_proj", "down_proj"], "lora_alpha": -8}),
    "embeddings": ("llama", {"target_modules": ["embed_tokens", "q_proj"], "modules_to_save": ["lm_head"]}),
    "DoRA": ("llama", {"target_modules": r".*\.(?:q_proj|down_proj|embed_tokens)", "use_dora": True}),
    "biases": ("qwen2", {"target_modules": ["q_proj", "o_proj"], "bias": "all"}),
    "biases of a LoRA": ("qwen2", {"target_modules": ["q_proj"], "bias": "lora_only", "lora_bias": True}),
    "tied, by tokens": ("qwen3", {"target_modules": ATTENTION, "trainable_token_indices": [3, 5]}),
    "all linear": ("gemma3_text", {"target_modules": "all-linear", "exclude_modules": ["v_proj"]}),
    "Conv1D": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "Conv1D by DoRA": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "use_dora": True, "fan_in_fan_out": True}),
    "hybrid": ("falcon_h1", {"target_modules": ["in_proj", "q_proj", "down_proj"]}),
    # PEFT takes the modules that experts once were for their parameters.
    "experts, one by one": ("qwen3_moe", {"target_modules": "all-linear", "use_rslora": True}),
    "experts of other names": (
        "mixtral",
        {
            "target_modules": ["v_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "experts.down_proj"],
            "rank_pattern": {"experts.down_proj": 3},
            "alpha_pattern": {"gate_up_proj": 5},
        },
    ),
    "experts in one tensor": (
        "gpt_oss",
        {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj", "router.weight"]},
    ),
    "a tied head": ("qwen3", {"target_modules": ["lm_head", "q_proj"], "trainable_token_indices": [3, 5]}),
    "tied embeddings": ("qwen3", {"target_modules": ["embed_tokens"]}),
    "both, tied in training": ("qwen3", {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}),
    "a tied head, whole": ("qwen3", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "tied embeddings, whole": ("qwen3", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
    "rows of a tied head": ("qwen3", {"target_modules": ["q_proj"], "trainable_token_indices": {"lm_head": [3, 5]}}),
    "other rows of a tied head": (
        "qwen3",
        {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [3, 5], "lm_head": [5, 7]}},
    ),
    "the same rows of both": (
        "qwen3",
        {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [3, 5], "lm_head": [3, 5]}},
    ),
    # PEFT saves whatever ends so.
    "every norm": ("qwen3", {"target_modules": ["q_proj"], "modules_to_save": ["norm"]}),
}
# Those of a tied base that come out untied, as their adapters set embeddings and head apart.
UNTIED = {"a tied head", "tied embeddings", "both, tied in training", "a tied head, whole", "tied embeddings, whole"}
UNTIED |= {"rows of a tied head", "other rows of a tied head"}


@pytest.mark.parametrize("case", ORACLE)
def test_it_computes_what_peft_does_with_base_and_adapter(case: str, made: Base, tmp_path: Path) -> None:
    kind, config = ORACLE[case]
    base = made(kind)
    trained(base, tmp_path / "adapter", **config)
    applied = merged(base, tmp_path)
    expected = logits(
        peft.PeftModel.from_pretrained(load_model(CheckpointFolder.open(base)), str(tmp_path / "adapter"))
    )
    found = logits(load_model(CheckpointFolder.open(applied.path)))
    assert (found - expected).abs().max() < 2e-5
    assert (expected - logits(load_model(CheckpointFolder.open(base)))).abs().max() > 1e-2
    assert applied.manifest.native and applied.manifest.promise == "none"
    before, after = tensors(base), tensors(applied.path)
    changed = {name for name, value in after.items() if name not in before or not torch.equal(value, before[name])}
    assert changed == set(applied.manifest.new_tensors)
    assert changed - {"lm_head.weight"} <= {name.partition(", expert ")[0] for name in applied.manifest.merged}
    assert ("lm_head.weight" in after.keys() - before.keys()) == (case in UNTIED)
    assert ("the output head gets a tensor of its own" in applied.manifest.operations[0].matched) == (case in UNTIED)


RESIZED: dict[str, tuple[str, int, dict[str, Any]]] = {
    "more rows": ("llama", 140, {"target_modules": ["q_proj", "down_proj"]}),
    "fewer, as padding went": ("llama", 120, {"target_modules": ["q_proj"]}),
    "tied": ("qwen3", 140, {"target_modules": ["q_proj"]}),
    "tied, and adapted": ("qwen3", 133, {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True}),
    "tied, a head adapted": ("qwen3", 140, {"target_modules": ["lm_head", "q_proj"]}),
    "tied, embeddings adapted": ("qwen3", 140, {"target_modules": ["embed_tokens", "q_proj"]}),
    "tied, new tokens": ("qwen3", 140, {"target_modules": ["q_proj"], "trainable_token_indices": [128, 139]}),
    "adapted": ("llama", 140, {"target_modules": ["embed_tokens", "lm_head"]}),
    "trained whole": ("llama", 140, {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}),
    "new tokens by themselves": ("llama", 140, {"target_modules": ["q_proj"], "trainable_token_indices": [128, 139]}),
}


def resized(base: Path, folder: Path, rows: int, **config: Any) -> Any:
    """An adapter that PEFT saves of a base whose embeddings were resized, and PEFT's model of both."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(rows)
    peft_model = peft.get_peft_model(model, peft.LoraConfig(**{"r": 4, "lora_alpha": 6} | config))
    with torch.no_grad():
        for _, value in peft_model.named_parameters():
            if value.requires_grad:
                value.add_(torch.randn(value.shape) * 0.1)
    peft_model.save_pretrained(str(folder))
    return peft_model


@pytest.mark.parametrize("case", RESIZED)
def test_an_adapter_of_resized_embeddings_brings_its_rows(case: str, made: Base, tmp_path: Path) -> None:
    kind, rows, config = RESIZED[case]
    base = made(kind)
    with_adapter = resized(base, tmp_path / "adapter", rows, **config)
    # Merging a tied pair, PEFT adds both changes to one matrix; it runs them apart.
    expected = logits(with_adapter if case.startswith("tied,") else with_adapter.merge_and_unload())
    applied = merged(base, tmp_path)
    model = load_model(CheckpointFolder.open(applied.path))
    found = logits(model)
    assert found.shape[-1] == rows == model.config.vocab_size and applied.manifest.native
    assert (found - expected).abs().max() < 2e-5
    assert f"{rows} rows for tokens, the adapter's, in place of 128" in applied.manifest.operations[0].matched
    for streamed in (False, True):
        found = surgeon.verify(base, applied.path, device="cpu", streamed=streamed, windows=1, window=16)
        assert found.holds and found.comparisons and not found.identical
    if case in ("more rows", "fewer, as padding went"):
        adapter = [str(tmp_path / "adapter")]
        found = surgeon.verify(base, applied.path, device="cpu", adapters=adapter, windows=1, window=16)
        assert found.holds and found.comparisons[-1].max_abs_difference < 2e-5


def test_its_tokenizer_and_template_come_along(made: Base, tmp_path: Path) -> None:
    """With embeddings of another size in any case; else a template is named, and taken if the plan says so."""
    base = tiny.checkpoint(tmp_path / "base", "llama", dtype="float32", num_hidden_layers=2)
    add_letters(base)
    (base / "vocab.json").write_text("{}")
    lora(tmp_path / "adapter", layers=2)
    assert not [note for note in merged(base, tmp_path).preview.notes if "template" in note]
    shutil.rmtree(tmp_path / "out")
    letters = add_letters(tmp_path / "letters")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        content = (letters / name).read_text()
        (tmp_path / "adapter" / name).write_text(content.replace('"Ġ"', '"Q"'))
    (tmp_path / "adapter" / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "adapter" / "README.md").write_text("mine")
    kept = merged(base, tmp_path)
    (note,) = [note for note in kept.preview.notes if "template" in note]
    assert "`tokenizer: adapter` takes it" in note and not (kept.path / "chat_template.jinja").exists()
    assert surgeon.verify(base, kept.path, device="cpu", logits=False).holds
    shutil.rmtree(kept.path)
    plan = {"tokenizer": "adapter"}
    for number in range(2):
        if number:
            shutil.rmtree(tmp_path / "adapter")
            plan = {}
            resized(base, tmp_path / "adapter", 140, target_modules=["q_proj"])
            for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
                shutil.copy(tmp_path / "again" / name, tmp_path / "adapter")
        out = merged(base, tmp_path, **plan).path
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            assert (out / name).read_bytes() == (tmp_path / "adapter" / name).read_bytes()
        assert not (out / "vocab.json").exists() and "mine" not in (out / "README.md").read_text()
        assert surgeon.verify(base, out, device="cpu", logits=False).holds
        surgeon.make_delta(out, tmp_path / f"delta-{number}")
        shutil.rmtree(tmp_path / "again", ignore_errors=True)
        again = surgeon.apply_delta(tmp_path / f"delta-{number}", str(base), tmp_path / "again").path
        assert (again / "tokenizer.json").read_bytes() == (out / "tokenizer.json").read_bytes()
        (out / "tokenizer.json").write_text((letters / "tokenizer.json").read_text())
        assert not surgeon.verify(base, out, device="cpu", logits=False).holds
        shutil.rmtree(out)
    (tmp_path / "adapter" / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["x.Y", null]}}')
    with pytest.raises(BadInput, match=r"tokenizer_config\.json has `auto_map`, which no output gets"):
        merged(base, tmp_path)
    (tmp_path / "adapter" / "tokenizer_config.json").write_text("{}")
    for content, said in (
        (
            '{"model": {"type": "BPE", "vocab": {"a": 0}}, "added_tokens": [{"id": 140}]}',
            " has the id 140, and the output 140 rows",
        ),
        ('{"model": {}}', ": no `model` with a `vocab`"),
        ("version https://git-lfs.github.com/spec/v1", ": not valid JSON"),
    ):
        (tmp_path / "adapter" / "tokenizer.json").write_text(content)
        with pytest.raises(BadInput, match=rf"tokenizer\.json{said}"):
            merged(base, tmp_path)
    (tmp_path / "adapter" / "tokenizer.json").unlink()
    assert any("no vocabulary lies in the adapter's folder" in note for note in merged(base, tmp_path).preview.notes)


@pytest.mark.parametrize(
    ("new", "said"),
    [({"<think>": 300}, r"1 tokens or .* lacks \('<think>'\)"), ({"<s>": 9}, r"lacks \('<s>'\)")],
)
def test_a_tokenizer_with_other_tokens_is_said_to_be_left(new: dict[str, int], said: str, tmp_path: Path) -> None:
    base = vocabularies.byte_level(tiny.checkpoint(tmp_path / "base", "llama", num_hidden_layers=2, vocab_size=320))
    shutil.copy(base / "tokenizer.json", lora(tmp_path / "adapter", layers=2))
    asked = write_plan(tmp_path / "plan.yaml", [{"op": "merge_adapter", "from": "adapter"}])
    assert not any("tokenizer" in note for note in surgeon.preview(asked, base).notes)
    held = json.loads((base / "tokenizer.json").read_text())
    held["added_tokens"] += [{"content": content, "id": number} for content, number in new.items()]
    (tmp_path / "adapter" / "tokenizer.json").write_text(json.dumps(held))
    (note,) = [note for note in surgeon.preview(asked, base).notes if "tokenizer" in note]
    assert re.search(said, note) and "`tokenizer: adapter` takes it" in note


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json", "config.json"])
def test_a_file_in_another_case_is_named(name: str, tmp_path: Path) -> None:
    base = tiny.checkpoint(tmp_path / "base", "llama", num_hidden_layers=2)
    file = (base if name == "config.json" else lora(tmp_path / "adapter", layers=2)) / name
    file.rename(file.with_name(name.title()))
    with pytest.raises(BadInput, match=f"no {name} here;.* rename {name.title()} to {name}"):
        merged(base, tmp_path)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_a_file_of_an_adapter_leads_to_its_folder(name: str, made: Base, tmp_path: Path) -> None:
    folder = lora(tmp_path / "adapter", layers=2)
    with pytest.raises(BadInput, match=f"{name}: a file; give the adapter's folder, {re.escape(str(folder))}$"):
        merged(made("llama"), tmp_path, **{"from": f"adapter/{name}"})


def test_rows_of_tokens_are_all_there_and_count_whole(made: Base, tmp_path: Path) -> None:
    resized(made("llama"), tmp_path / "adapter", 140, target_modules=["q_proj"])
    lora(tmp_path / "other", layers=2)
    for source, said in (
        ({"adapter": "adapter", "weight": 0.5}, "count whole; leave `weight` out"),
        (["adapter", "other"], "merged first and alone"),
    ):
        with pytest.raises(BadInput, match=said):
            merged(made("llama"), tmp_path, **{"from": source})
    renamed(tmp_path / "adapter", lambda name, value: {} if "lm_head" in name else {name: value})
    with pytest.raises(BadInput, match=r"140 rows for tokens and none for lm_head\.weight"):
        merged(made("llama"), tmp_path)


@pytest.mark.parametrize("kind", ["B is zero", "alpha is zero", "weight is zero", "not a number"])
def test_an_adapter_that_does_nothing_is_no_success(kind: str, made: Base, tmp_path: Path) -> None:
    """A number that is none is another matter, and named as that."""
    folder = lora(tmp_path / "adapter", layers=2, **({"lora_alpha": 0} if kind == "alpha is zero" else {}))
    if kind in ("B is zero", "not a number"):
        fill = 0.0 if kind == "B is zero" else torch.nan
        renamed(folder, lambda name, value: {name: torch.full_like(value, fill) if "lora_B" in name else value})
    if kind == "weight is zero":
        text = merged(made("llama"), tmp_path, **{"from": {"adapter": "adapter", "weight": 0}}).manifest.merge_text
        assert text == "2 tensors stay as they are: what was merged adds nothing"
        return
    said = {
        "not a number": "NaN",
        "alpha is zero": "this adapter does nothing: `lora_alpha` is 0",
        "B is zero": "this adapter does nothing: B is zero in all 2",
    }
    with pytest.raises(BadInput, match=said[kind]):
        merged(made("llama"), tmp_path)


def test_an_adapter_that_is_cut_is_named_with_its_folder(made: Base, tmp_path: Path) -> None:
    """Of two adapters the reader cannot tell otherwise which one it is."""
    lora(tmp_path / "adapter", layers=2)
    file = lora(tmp_path / "other", layers=2) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(BadInput, match=r"/other: adapter_model\.safetensors: truncated, 1 bytes are missing"):
        merged(made("llama"), tmp_path, **{"from": ["adapter", "other"]})


WRAPPED_NAMES: dict[str, Callable[[str], str]] = {
    "torch.compile": lambda name: name.replace("model.model.", "model._orig_mod.model."),
    "around the adapter": lambda name: f"_orig_mod.{name}",
    "DDP": lambda name: f"module.{name}",
    "DDP within": lambda name: name.replace("base_model.model.", "base_model.model.module."),
    "FSDP": lambda name: name.replace("self_attn.", "self_attn._fsdp_wrapped_module."),
    "a whole state": lambda name: name.replace(".weight", ".default.weight"),
    "no name of PEFT's": lambda name: name.removeprefix("base_model.model."),
    "an image-text wrapper's": lambda name: name.replace("model.model.", "model.model.language_model."),
    "an older one's": lambda name: name.replace("base_model.model.", "base_model.model.language_model."),
}


@pytest.mark.parametrize("case", WRAPPED_NAMES)
def test_names_of_wrappers_are_read_through(case: str, made: Base, tmp_path: Path) -> None:
    lora(tmp_path / "adapter", layers=2)
    expected = tensors(merged(made("llama"), tmp_path).path)
    shutil.rmtree(tmp_path / "out")
    renamed(tmp_path / "adapter", lambda name, value: {WRAPPED_NAMES[case](name): value})
    found = tensors(merged(made("llama"), tmp_path).path)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("case", WRAPPED_NAMES)
def test_verify_gives_peft_the_names_that_it_knows(case: str, made: Base, tmp_path: Path) -> None:
    """PEFT leaves out others in silence."""
    base = CheckpointFolder.open(made("llama"))
    known = Model.of(dissect(base.config, base.tensors))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert name_for_peft(WRAPPED_NAMES[case](name), known) == name
    if case == "a whole state":
        return
    for whole in ("norm.weight", "embed_tokens.weight", "embed_tokens.token_adapter.trainable_tokens_delta"):
        name = f"base_model.model.model.{whole}"
        assert name_for_peft(WRAPPED_NAMES[case](name), known) == name
        assert name_for_peft(name.replace(".weight", ".modules_to_save.default.weight"), known) == name


def test_verify_holds_for_a_merge_whose_names_were_read_through(made: Base, tmp_path: Path) -> None:
    lora(tmp_path / "adapter", layers=2)
    renamed(tmp_path / "adapter", lambda name, value: {WRAPPED_NAMES["DDP within"](name): value})
    out = merged(made("llama"), tmp_path).path
    adapters = [str(tmp_path / "adapter")]
    assert surgeon.verify(made("llama"), out, adapters=adapters, device="cpu", windows=2, window=16).holds


@pytest.mark.parametrize("targets", [["k_proj", "q_proj"], ["k_proj"], ".*k_proj", "all-linear"])
def test_modules_of_config_and_file_are_the_same(targets: object, made: Base, tmp_path: Path) -> None:
    lora(tmp_path / "adapter", layers=2, target_modules=targets)
    lacking = targets == "all-linear" or "q_proj" in targets  # type: ignore[operator]
    with pytest.raises(BadInput, match="nothing for" if lacking else "q_proj.lora_.*: its config's `target_modules`"):
        merged(made("llama"), tmp_path)


def test_a_bias_needs_a_module_that_has_one(made: Base, tmp_path: Path) -> None:
    folder = lora(tmp_path / "adapter", layers=2, lora_bias=True)
    renamed(folder, lambda name, v: {name: v} | ({f"{name[:-8]}B.bias": v[0].clone()} if "lora_A" in name else {}))
    with pytest.raises(BadInput, match="`lora_bias` goes into a module's own bias, and this has none"):
        merged(made("llama"), tmp_path)


def test_a_page_of_the_hub_is_the_adapter_s_id(monkeypatch: pytest.MonkeyPatch, made: Base, tmp_path: Path) -> None:
    asked: list[str] = []

    def located(name: str) -> None:
        asked.append(name)
        raise BadInput("asked")

    monkeypatch.setattr(prepare, "locate_adapter", located)
    with pytest.raises(BadInput, match="asked"):
        merged(made("llama"), tmp_path, **{"from": "hf://user/adapter"})
    assert asked == ["user/adapter"]


def test_a_text_model_s_adapter_fits_the_class_with_images(tmp_path: Path) -> None:
    """And the tower beside the text, whose modules have the same names, keeps its bytes."""
    base = tiny_decoder(tmp_path / "base", "gemma3")
    before = tensors(base)
    shapes = {name.partition(".layers.0.")[2]: tuple(v.shape) for name, v in before.items() if "language_model" in name}
    layers = len({found[1] for name in before if (found := re.search(r"language_model.*\.layers\.(\d+)", name))})
    lora(tmp_path / "adapter", {"self_attn.q_proj": shapes["self_attn.q_proj.weight"]}, layers=layers)
    after = tensors(merged(base, tmp_path).path)
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert len(changed) == layers and all("vision" not in name and ".q_proj." in name for name in changed)


def test_several_are_merged_in_turn_by_their_weights(made: Base, tmp_path: Path) -> None:
    base = made("llama")
    for seed in (1, 2):
        trained(base, tmp_path / str(seed), seed=seed, target_modules=["q_proj", "v_proj"])
    applied = merged(base, tmp_path, **{"from": [{"adapter": "1", "weight": 0.5}, "2"]})
    before, after = tensors(base), tensors(applied.path)
    for name, value in after.items():
        expected = before[name].double()
        for folder, weight in (("1", 0.5), ("2", 1.0)):
            held = load_file(tmp_path / folder / "adapter_model.safetensors")
            module = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{module}.lora_A.weight" in held:
                up, down = (held[f"{module}.lora_{part}.weight"].double() for part in "BA")
                expected = expected + weight * 1.5 * up @ down
        assert torch.allclose(value.double(), expected, atol=1e-6), name


def test_an_output_is_verified_and_comes_back_by_a_delta(made: Base, tmp_path: Path) -> None:
    base = tiny.checkpoint(tmp_path / "base", "llama", num_hidden_layers=2)
    lora(tmp_path / "adapter", layers=2)
    out = merged(base, tmp_path).path
    assert surgeon.verify(base, out, device="cpu", windows=2, window=16).holds
    with pytest.raises(BadInput, match="is lost"):
        surgeon.revert(out, tmp_path / "back")
    surgeon.make_delta(out, tmp_path / "delta")
    surgeon.apply_delta(tmp_path / "delta", str(base), tmp_path / "again")
    assert all(torch.equal(value, tensors(tmp_path / "again")[name]) for name, value in tensors(out).items())


def test_verify_runs_base_and_adapter_by_peft_and_catches_a_broken_merge(
    made: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = made("llama")
    for name, seed in (("adapter", 1), ("other", 2)):
        trained(base, tmp_path / name, seed=seed, target_modules=["q_proj", "down_proj"])
    both = [str(tmp_path / "adapter"), str(tmp_path / "other")]
    out = merged(base, tmp_path, **{"from": ["adapter", "other"]}).path
    asked: dict[str, Any] = {"device": "cpu", "windows": 2, "window": 16}
    found = surgeon.verify(base, out, adapters=both, **asked)
    assert found.holds and found.checks[-1].name == "adapter"
    compared = found.comparisons[-1]
    assert compared.mode == "base + adapter, by PEFT" and compared.rounded
    assert found.comparisons[0].max_abs_difference > 100 * compared.max_abs_difference
    for given, options, said in (
        (both[:1], {}, "2 adapters were merged, and 1 are given"),
        (both[::-1], {}, r"not the adapter that was merged \(adapter\)"),
        (both, {"logits": False}, "compares logits of whole models"),
    ):
        with pytest.raises(BadInput, match=said):
            surgeon.verify(base, out, adapters=given, **asked | options)
    # A merge that leaves the adapter out of one module in four says of itself that all is well.
    taken = Product.taken
    monkeypatch.setattr(
        Product,
        "taken",
        lambda self, values, *of: values if "layers.1.mlp" in self.down.tensor else taken(self, values, *of),
    )
    shutil.rmtree(out)
    merged(base, tmp_path, **{"from": ["adapter", "other"]})
    assert surgeon.verify(base, out, **asked).holds
    broken = surgeon.verify(base, out, adapters=both, **asked)
    assert not broken.holds and [check.name for check in broken.checks if not check.holds] == ["adapter"]


# Experts.


def renamed(folder: Path, change: Callable[[str, Tensor], dict[str, Tensor]], **config: Any) -> None:
    """Write an adapter's tensors anew, each as what `change` makes of it; `config` has new entries of its config."""
    file, settings = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    held = {name: value for old, tensor in load_file(file).items() for name, value in change(old, tensor).items()}
    save_file({name: value.contiguous() for name, value in held.items()}, file, metadata={"format": "pt"})
    settings.write_text(json.dumps(json.loads(settings.read_text()) | config))


def as_packed_before(tensors: dict[str, Tensor], experts: int) -> Callable[[str, Tensor], dict[str, Tensor]]:
    """Pairs of experts as PEFT 0.18 had them for the same product: A and B each in the other's place.

    There ΔW of expert e is Σ_k A[e r + k, i] B[o, k E + e] in row i and column o.
    """

    def change(name: str, value: Tensor) -> dict[str, Tensor]:
        if ".experts." not in name:
            return {name: value}
        if "lora_A" in name:
            up = tensors[name.replace("lora_A", "lora_B")]
            return {name: up.unflatten(1, (-1, experts)).permute(2, 1, 0).flatten(0, 1)}
        down = tensors[name.replace("lora_B", "lora_A")]
        return {name: down.unflatten(0, (experts, -1)).permute(2, 1, 0).flatten(1, 2)}

    return change


@pytest.fixture(scope="module")
def mixture(made: Base, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A folder with an adapter of experts whose matrices of gate and up are square, and what merging it makes."""
    folder = tmp_path_factory.mktemp("mixture")
    trained(made("qwen3_moe"), folder / "adapter", target_modules=["q_proj"], target_parameters=EXPERTS)
    return folder, tensors(merged(made("qwen3_moe"), folder).path)


@pytest.mark.parametrize("kept", [EXPERTS, EXPERTS[:1]])
def test_experts_packed_as_before_peft_0_19_make_the_same(
    kept: list[str], mixture: tuple[Path, dict[str, Tensor]], made: Base, tmp_path: Path
) -> None:
    """By their shapes; square ones alone are refused."""
    shutil.copytree(mixture[0] / "adapter", tmp_path / "adapter")
    turned = as_packed_before(load_file(tmp_path / "adapter/adapter_model.safetensors"), 8)

    def change(name: str, value: Tensor) -> dict[str, Tensor]:
        if kept == EXPERTS or ".experts." not in name:
            return turned(name, value)
        # Of gate and up alone PEFT wraps nothing twice.
        return {new.replace(".base_layer", ""): v for new, v in turned(name, value).items() if ".base_layer" in name}

    renamed(tmp_path / "adapter", change, target_parameters=kept)
    if kept != EXPERTS:
        with pytest.raises(BadInput, match=r"layers.0.mlp.experts.lora_A.weight: the experts' matrices are square"):
            merged(made("qwen3_moe"), tmp_path)
        return
    found = tensors(merged(made("qwen3_moe"), tmp_path).path)
    assert all(torch.allclose(value, mixture[1][name], atol=1e-6) for name, value in found.items())


def test_experts_that_were_modules_are_merged_one_by_one(made: Base, tmp_path: Path) -> None:
    """As adapters of transformers 4 have them, which PEFT packs as it loads them."""
    base = made("qwen3_moe")
    drawn = torch.Generator().manual_seed(0)
    held = {
        f"base_model.model.{name.removesuffix('weight')}lora_{part}.weight": torch.randn(shape, generator=drawn) * 0.1
        for name, value in tensors(base).items()
        if ".experts." in name
        for part, shape in (("A", (2, value.shape[1])), ("B", (value.shape[0], 2)))
    }
    names = ["gate_proj", "up_proj", "down_proj"]
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 6, "target_modules": names}
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(config))
    save_file(held, tmp_path / "adapter/adapter_model.safetensors", metadata={"format": "pt"})
    out = merged(base, tmp_path).path
    expected = logits(
        peft.PeftModel.from_pretrained(load_model(CheckpointFolder.open(base)), str(tmp_path / "adapter"))
    )
    assert (logits(load_model(CheckpointFolder.open(out))) - expected).abs().max() < 2e-5
    shutil.rmtree(out)
    renamed(tmp_path / "adapter", lambda name, value: {name: value} if ".experts.3.up" not in name else {})
    with pytest.raises(
        BadInput, match=r"nothing for model\.layers\.0\.mlp\.experts\.3\.up_proj\.weight.*experts are no mod"
    ):
        merged(base, tmp_path)


# What rounding leaves.


def small_change(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """A matrix on the grid of bfloat16, A, and a change of three thousandths of a hundredth of it."""
    drawn = torch.Generator().manual_seed(seed)
    matrix = (torch.randn(64, 512, generator=drawn) * 0.02).bfloat16().float()
    down, up = torch.randn(8, 512, generator=drawn), torch.randn(64, 8, generator=drawn)
    change = up @ down
    return matrix, down, change * (3e-4 * matrix.norm() / change.norm())


def kept(made: Tensor, matrix: Tensor, change: Tensor) -> float:
    return float(((made - matrix) * change).sum() / change.square().sum())


def test_guided_rounding_keeps_what_rounding_to_nearest_loses() -> None:
    matrix, down, change = small_change()
    values = matrix + change
    nearest, found = values.bfloat16().float(), guided(values, torch.bfloat16, down)
    below, above = neighbours(values, torch.bfloat16)
    assert ((found == below) | (found == above)).all() and (below <= values).all() and (values <= above).all()
    assert torch.equal(torch.minimum((nearest - below).abs(), (nearest - above).abs()), torch.zeros_like(nearest))
    assert kept(nearest, matrix, change) < 0.25 and kept(found, matrix, change) > 0.95
    errors = [((made - values) @ down.T).norm() for made in (nearest, found)]
    assert errors[1] < 0.1 * errors[0]
    # Rows are rounded for themselves, and a direction of a row's own counts as well.
    assert torch.equal(guided(values[5:9], torch.bfloat16, down), found[5:9])
    own = torch.nn.functional.normalize(change, dim=1)
    assert kept(guided(values, torch.bfloat16, down[:0], own), matrix, change) > 0.99


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_neighbours_are_next_to_each_other(dtype: torch.dtype) -> None:
    """By the bits of the dtype, zeros and the largest numbers included."""
    values = torch.cat(
        [torch.randn(500, generator=torch.Generator().manual_seed(0)), torch.tensor([0.0, 1.0, -1e-42, 65504.0])]
    )
    below, above = (each.to(dtype) for each in neighbours(values, dtype))
    on_it = values.to(dtype).float() == values
    assert torch.equal(below[on_it], above[on_it]) and torch.equal(below[on_it].float(), values[on_it])
    apart = torch.nextafter(below, torch.full_like(below, torch.inf))
    assert torch.equal(apart[~on_it], above[~on_it])


@pytest.fixture(scope="module")
def gentle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base in bfloat16 and an adapter whose change is far smaller than the steps of its numbers."""
    folder = tmp_path_factory.mktemp("gentle")
    tiny.checkpoint(folder / "base", "llama", num_hidden_layers=2, hidden_size=128, intermediate_size=256)
    modules = {"self_attn.q_proj": (128, 128), "mlp.down_proj": (128, 256)}
    lora(folder / "adapter", modules, layers=2, lora_alpha=0.004)
    return folder


@pytest.mark.parametrize(("entry", "least", "most"), [({}, 0.95, 1.01), ({"rounding": "nearest"}, 0.0, 0.5)])
def test_small_changes_survive_and_the_manifest_says_how_much(
    entry: Mapping[str, Any], least: float, most: float, gentle: Path, tmp_path: Path
) -> None:
    (tmp_path / "adapter").symlink_to(gentle / "adapter")
    applied = merged(gentle / "base", tmp_path, **entry)
    before, after, held = tensors(gentle / "base"), tensors(applied.path), tensors(gentle / "adapter")
    assert len(applied.manifest.merged) == 4
    for name, said in applied.manifest.merged.items():
        up, down = (held[f"base_model.model.{name.removesuffix('weight')}lora_{part}.weight"].double() for part in "BA")
        change, matrix = 0.002 * up @ down, before[name].double()
        assert said.kept == pytest.approx(kept(after[name].double(), matrix, change), abs=1e-3)
        assert said.nearest == pytest.approx(kept((matrix + change).bfloat16().double(), matrix, change), abs=1e-3)
        assert said.change == pytest.approx(float(change.norm() / matrix.norm()), rel=1e-4)
        assert least < said.kept < most and said.nearest < 0.5 and bool(said.guided) is (not entry)


def test_float32_keeps_all_of_it_and_the_config_says_so(gentle: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter").symlink_to(gentle / "adapter")
    applied = merged(gentle / "base", tmp_path, dtype="float32")
    assert all(said.kept > 0.999 and not said.guided for said in applied.manifest.merged.values())
    stored = {name: value.dtype for name, value in tensors(applied.path).items()}
    assert {name for name, dtype in stored.items() if dtype == torch.float32} == set(applied.manifest.merged)
    assert load_model(CheckpointFolder.open(applied.path)).dtype == torch.float32
    assert surgeon.verify(gentle / "base", applied.path, device="cpu", windows=1, window=16).holds


def test_rows_at_a_time_make_the_same(gentle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "adapter").symlink_to(gentle / "adapter")
    whole = merged(gentle / "base", tmp_path)
    (recipe,) = [o.recipe for o in whole.preview.blueprint.outputs if o.name == "model.layers.1.mlp.down_proj.weight"]
    assert isinstance(recipe, Adapted) and not recipe.reads
    opened = AdapterFolder.open(gentle / "adapter", id="adapter")
    bench = Evaluator(whole.preview.blueprint, CheckpointFolder.open(gentle / "base"), adapters={"adapter": opened})
    monkeypatch.setattr(adapted, "_NUMBERS_AT_ONCE", 7 * 256)
    parts = [*recipe.compute_in_pieces(bench)]
    assert len(parts) == 19 and torch.equal(
        torch.cat(parts), tensors(whole.path)["model.layers.1.mlp.down_proj.weight"]
    )
    assert bench.take_reports()[recipe.name] == pytest.approx(whole.manifest.merged[recipe.name].model_dump())
    monkeypatch.setattr(Adapted, "_streams", False)
    assert torch.equal(replace(recipe).compute(bench), torch.cat(parts))
    assert bench.take_reports()[recipe.name] == pytest.approx(whole.manifest.merged[recipe.name].model_dump())


# All of an adapter or nothing.


KNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "of many kinds": (
        "qwen2_untied",
        {
            "target_modules": ["q_proj", "down_proj", "lm_head"],
            "use_dora": True,
            "modules_to_save": ["input_layernorm"],
            "trainable_token_indices": [7, 3],
            "bias": "lora_only",
        },
    ),
    "of experts": ("gpt_oss", {"target_modules": ["q_proj"], "target_parameters": [*EXPERTS, "router.weight"]}),
}


@pytest.fixture(scope="module", params=KNOWN)
def known(
    request: pytest.FixtureRequest, made: Base, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Model, Adapter, Settings]:
    """A base's parameters, and an adapter by its headers."""
    folder = tmp_path_factory.mktemp("known")
    kind, config = KNOWN[request.param]
    trained(made(kind), folder / "adapter", **config)
    base = CheckpointFolder.open(made(kind))
    model = Model.of(dissect(base.config, base.tensors))
    opened = AdapterFolder.open(folder / "adapter", id="adapter")
    return model, opened.facts, read_adapter(opened, "mine", model)[0].settings


def sort(known: tuple[Model, Adapter, Settings], spoil: Callable[[dict[str, Any]], None], **settings: Any) -> None:
    model, adapter, told = known
    held = dict(adapter.tensors)
    spoil(held)
    Sorted("mine", replace(adapter, tensors=held), told.model_copy(update=settings), 1.0, model).sort()


def module_of(name: str) -> str:
    """What of the base a tensor of the adapter is about, as a pattern."""
    below = name.removeprefix("base_model.model.").removesuffix(".weight").removesuffix(".bias")
    return re.escape(re.sub(r"\.(base_layer\.)?(lora_.*|token_adapter.*|base_layer)$", "", below))


def test_each_tensor_deleted_turned_or_renamed_is_refused_by_name(known: tuple[Model, Adapter, Settings]) -> None:
    sort(known, lambda held: None)
    assert len(known[1].tensors) in (20, 32)
    for name, info in known[1].tensors.items():
        pair = {each for each in known[1].tensors if each.partition(".lora_")[0] == name.partition(".lora_")[0]}
        with pytest.raises(BadInput, match=module_of(name)):
            sort(known, lambda held, pair=pair: [held.pop(each) for each in pair])  # type: ignore[misc]
        turned = replace(info, shape=info.shape[::-1] if len(info.shape) > 1 else (*info.shape, 1))
        with pytest.raises(BadInput, match=module_of(name)):
            sort(known, lambda held, name=name: held.pop(name))  # type: ignore[misc]
        with pytest.raises(BadInput, match=module_of(name)):
            sort(known, lambda held, name=name, turned=turned: held.update({name: turned}))  # type: ignore[misc]
        for other in {f"{name}x", name.replace("layers.1", "layers.2"), name.replace("_proj", "_project"), f"x{name}"}:
            if other != name:
                with pytest.raises(BadInput, match=r"^mine: "):
                    sort(known, lambda held, name=name, other=other: held.update({other: held.pop(name)}))  # type: ignore[misc]


def test_an_adapter_of_another_base_is_said_to_be_one(tmp_path: Path) -> None:
    """By what does not fit and the base that its config names; where all fits, by the name alone."""
    base = tiny.checkpoint(tmp_path / "some-base", "llama", num_hidden_layers=2)
    write_plan(tmp_path / "plan.yaml", [{"op": "merge_adapter", "from": "adapter"}])
    other = "org/other-7b"
    for shape, layers, name in (((64, 64), 2, other), ((32, 32), 3, other), ((32, 32), 2, "X/Some-Base@main")):
        shutil.rmtree(tmp_path / "adapter", ignore_errors=True)
        lora(tmp_path / "adapter", {"self_attn.q_proj": shape}, layers=layers, base_model_name_or_path=name)
        if name.endswith("main"):
            said = [note for note in surgeon.preview(tmp_path / "plan.yaml", base).notes if "trained on" in note]
            assert said == [f"adapter: trained on {name}, its config says"]
            continue
        with pytest.raises(BadInput, match=r"layers\.\d\.self_attn.*on org/other-7b \(this base is .*some-base: is"):
            surgeon.preview(tmp_path / "plan.yaml", base)


def test_what_no_base_of_words_has_is_led_on(made: Base, tmp_path: Path) -> None:
    for number, (name, said) in enumerate(
        {
            "base_model.model.score.weight": "with the head that it was trained with",
            "lora_unet_mid_block.weight": "no adapter of PEFT's has such a name",
        }.items()
    ):
        folder = lora(tmp_path / f"{number}", layers=2, modules_to_save=["score"])
        renamed(folder, lambda old, value, name=name: {old: value, name: torch.ones(2, 32)})  # type: ignore[misc]
        with pytest.raises(BadInput, match=said):
            merged(made("llama"), tmp_path, **{"from": f"{number}"})


def test_rows_of_layers_for_further_tokens_are_said_to_stay(tmp_path: Path) -> None:
    """DeepSeek's have copies of the head, which is merged without them; experts of such layers cannot change alone."""
    base = mtp.checkpoint(tmp_path / "base", "deepseek_v3")
    lora(tmp_path / "adapter", layers=0, target_modules=["lm_head"])
    pair = {"A": torch.ones(2, 32), "B": torch.ones(128, 2)}
    named = {f"base_model.model.lm_head.lora_{part}.weight": value for part, value in pair.items()}
    save_file(named, tmp_path / "adapter" / "adapter_model.safetensors", metadata={"format": "pt"})
    plan = write_plan(tmp_path / "plan.yaml", [{"op": "merge_adapter", "from": "adapter"}])
    (done,) = surgeon.preview(plan, base).blueprint.operations
    assert "layers.4.shared_head.head.weight, " in done.matched
    assert done.matched.endswith(", for further tokens, stay as they were")
    for model_type in ("deepseek_v3", "mellum"):
        experts = mtp.checkpoint(tmp_path / model_type, model_type)
        for operation in ({"op": "drop_experts", "experts": [1]}, {"op": "add_experts", "times": 2}):
            with pytest.raises(BadInput, match=r"experts\.\d.*: layers that predict further tokens have experts"):
                surgeon.preview(write_plan(tmp_path / "plan.yaml", [operation]), experts)
