"""A folder with the runtime's files beside its weights loads, generates, trains and saves where surgeon is not."""

from __future__ import annotations

import json
import os
import subprocess
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, conversion_mapping

from surgeon.grafts.bundle import CODE_FILE, bundle
from surgeon.runtime.heads import carry_conversions
from surgeon.runtime.rules import GraftRules
from tests import tiny
from tests.runtime.grafting import adapters, alone, both, classes, composition, control, grafted, perturbed, tokens
from tests.warm import warm


def written(folder: Path, model: Any, family: str) -> Path:
    """A checkpoint as `surgeon apply` lays it out: weights, config with auto_map, the joined runtime."""
    folder.mkdir()
    state = {name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight")
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    edited = model.config.to_dict() | {
        "model_type": f"upcycled_{family}",
        "architectures": [type(model).__name__],
        "auto_map": composition(family).auto_map,
        "dtype": str(model.dtype).removeprefix("torch."),
    }
    (folder / "config.json").write_text(json.dumps(edited))
    (folder / CODE_FILE).write_bytes(bundle(edited))
    return folder


WITHOUT_SURGEON = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "surgeon":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocked())
try:
    import surgeon
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("surgeon can be imported here")

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers import AutoModelForQuestionAnswering

for folder in sys.argv[1:]:
    expected = load_file(f"{folder}.expected")
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    model, info = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    assert type(config) is type(model.config), "two config classes"
    assert model.can_generate()
    ids = expected["ids"]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, expected["logits"], atol=1e-5, rtol=1e-4)
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None), expected["generated"])

    model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, expected["eager"], atol=1e-5, rtol=1e-4)

    if not folder.endswith(("llama/out", "gemma2/out", "phi3/out")):
        continue  # the rest is the same for all

    base = AutoModel.from_pretrained(folder, trust_remote_code=True)
    assert type(base).__name__.endswith("Model")
    classifier = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True, num_labels=3)
    assert classifier(ids).logits.shape == (2, 3)
    # Llama's own class calls the base model otherwise, and finds nothing in a checkpoint of the others.
    assert ("AutoModelForQuestionAnswering" in config.auto_map) == folder.endswith("llama/out")
    if folder.endswith("llama/out"):
        how = {"trust_remote_code": True, "output_loading_info": True}
        answers, info = AutoModelForQuestionAnswering.from_pretrained(folder, **how)
        assert info["missing_keys"] == {"qa_outputs.weight", "qa_outputs.bias"}
        assert answers(ids).start_logits.shape == ids.shape

    new = set(model.freeze_base())
    frozen = {name: p.clone() for name, p in model.named_parameters() if name not in new}
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    out = model.train()(ids, labels=ids, domain_ids=torch.tensor([0, 1]))
    assert out.divergence_loss is not None
    out.loss.backward()
    optimiser.step()
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)

    model.eval().save_pretrained(f"{folder}-trained", max_shard_size="60KB")
    again = AutoModelForCausalLM.from_pretrained(f"{folder}-trained", trust_remote_code=True)
    assert again.config.auto_map == model.config.auto_map
    again.set_attn_implementation("eager")
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-4)
print("all done")
"""


def outside(code: str, folders: list[Path], home: Path) -> subprocess.CompletedProcess[str]:
    """Run `code` in an interpreter that sees neither this repository nor any module cache."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "HF_"))}
    env = kept | {"HF_HOME": str(home), "HF_MODULES_CACHE": str(home / "modules"), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [*warm(), "-I", "-W", "error::UserWarning", "-c", code, *map(str, folders)],
        env=env,
        cwd=home,
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_family_works_where_surgeon_is_not(tmp_path: Path) -> None:
    folders = []
    for family in tiny.FAMILIES:
        model = perturbed(grafted(family, both()))
        # One basename for all: remote code must not mix folders up.
        (tmp_path / family).mkdir()
        folder = written(tmp_path / family / "out", model, family)
        ids = tokens()
        with torch.no_grad():
            facts = {"ids": ids, "logits": model(ids).logits}
        facts["generated"] = model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None)
        model.set_attn_implementation("eager")
        with torch.no_grad():
            facts["eager"] = model(ids).logits
        save_file(facts, f"{folder}.expected")
        folders.append(folder)
    home = tmp_path / "home"
    home.mkdir()
    result = outside(WITHOUT_SURGEON, folders, home)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.strip().endswith("all done")


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_saved_and_loaded_again(family: str, tmp_path: Path) -> None:
    model = perturbed(grafted(family, both(), dtype="bfloat16"))
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    again, info = classes(family, "ForCausalLM", both()).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert again.dtype == torch.bfloat16
    before, after = model.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert again.config.surgery == model.config.surgery
    assert [path.name for path in tmp_path.glob("*.py")] == [CODE_FILE]
    assert (tmp_path / CODE_FILE).read_bytes() == bundle(json.loads((tmp_path / "config.json").read_text()))
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"] == composition(family).auto_map


def test_what_is_renamed_of_a_base_leaves_the_names_of_its_grafts() -> None:
    """Of every model type that transformers stores by other names than its class has."""
    own = ("mlp.adapter.gate_proj.weight", "self_attn.q_proj.slots.0.lora_A", "mlp.gate.slots.1.lora_B")
    own += ("expanded.mlp.adapter.down_proj.weight", "interpolator.gate.weight", "expert_router.slots.0.weight")
    known = conversion_mapping._build_checkpoint_conversion_mapping()
    for model_type in known:
        native = type("NativeConfig", (), {"model_type": model_type})
        config = type("Config", (native,), {"model_type": f"tried_{model_type}", "grafts": (GraftRules(),)})
        carry_conversions(type("Tried", (), {"config_class": config}), type("Native", (), {}))
        carried = conversion_mapping.get_checkpoint_conversion_mapping(f"tried_{model_type}")
        for each, before in zip(carried, known[model_type], strict=True):
            for one, other in ((each, before), (each.reverse_transform(), before.reverse_transform())):
                for suffix in own:
                    assert one.rename_source_key(f"model.layers.3.{suffix}")[0].endswith(f".{suffix}"), model_type
                for name in ("model.layers.3.self_attn.q_proj.weight", "transformer.h.3.ln_1.bias", "lm_head.weight"):
                    assert one.rename_source_key(name) == other.rename_source_key(name)


@pytest.mark.parametrize("graft", sorted(alone()))
def test_the_rules_name_every_tensor_of_a_graft(graft: str) -> None:
    """A name that they lack would be converted as the native model's own."""
    native = set(tiny.model("llama").state_dict())
    added = set(grafted("llama", alone()[graft]).state_dict()) - native
    # Those of an expanded twin and of the tail are a native layer's.
    layers = tuple(f".{name.split('.', 3)[3]}" for name in native if name.startswith("model.layers."))
    own = {name for name in added if not name.endswith(layers)}
    assert own or graft == "control"
    assert not [name for name in own if not any(fnmatch(name, each) for each in GraftRules.tensors)]


def test_a_missing_graft_tensor_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "out", grafted("llama", control("plerp")), "llama")
    whole = load_file(folder / "model.safetensors")
    for victim in ("model.layers.1.expanded.self_attn.q_proj.weight", "model.layers.4.interpolator.weight"):
        cut = {name: tensor for name, tensor in whole.items() if name != victim}
        save_file(cut, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=f"lacks 1 tensors.*{victim}"):
            classes("llama", "ForCausalLM", control("plerp")).from_pretrained(folder)
    # What holds nothing of a model at all is filled by transformers, as it fills its own models, with its warning.
    native, made = next(iter(cut)), grafted("llama", control("plerp"))
    filled = type(made).from_pretrained(None, config=made.config, state_dict={})
    assert filled.model.layers[4].interpolator.weight.isfinite().all()
    with pytest.raises(ValueError, match="lacks"):
        type(made).from_pretrained(None, config=made.config, state_dict={native: cut[native]})


def test_a_base_checkpoint_is_not_taken_for_a_grafted_one(tmp_path: Path) -> None:
    tiny.checkpoint(tmp_path, "llama")
    surgery = control()
    grafted_config = grafted("llama", surgery).config
    with pytest.raises(ValueError, match="lacks"):
        classes("llama", "ForCausalLM", surgery).from_pretrained(tmp_path, config=grafted_config)


def test_without_trust_nothing_loads(tmp_path: Path) -> None:
    folder = written(tmp_path / "out", grafted("llama", control()), "llama")
    with pytest.raises(ValueError, match="trust_remote_code"):
        AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)


def test_a_replaced_site_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quantiser that swaps modules by type must not drop a graft unseen."""
    folder = written(tmp_path / "out", grafted("llama", both()), "llama")
    causal = classes("llama", "ForCausalLM", both())
    tie = causal.tie_weights

    def replacing(self: Any, *args: Any, **kwargs: Any) -> None:
        tie(self, *args, **kwargs)
        # Once its grafts are in it.
        if hasattr(self, "surgery"):
            self.model.layers[0].mlp = torch.nn.Identity()

    monkeypatch.setattr(causal, "tie_weights", replacing)
    with pytest.raises(ValueError, match="something replaced them"):
        causal.from_pretrained(folder)


def test_without_a_checkpoint_every_graft_begins_silent_and_from_no_memory_of_others() -> None:
    """`from_config` leaves no tensor of a graft as the allocator gave it, and what it adds says nothing."""
    torch.use_deterministic_algorithms(True)
    try:
        # Memory that nobody fills is NaN.
        for name, surgery in alone().items():
            model = grafted("llama", surgery)
            assert all(tensor.isfinite().all() for tensor in model.state_dict().values()), name
            with torch.no_grad(), model.grafts(enabled=False):
                expected = model(tokens()).logits
            assert torch.equal(model(tokens()).logits, expected), name
    finally:
        torch.use_deterministic_algorithms(False)
    torch.manual_seed(0)
    adapter = grafted("llama", adapters(layers=(1,))).model.layers[1].mlp.adapter
    assert adapter.gate.weight.any() and adapter.up_proj.weight.any()


def test_built_on_meta_the_names_and_shapes_are_the_checkpoints() -> None:
    for family in tiny.FAMILIES:
        real = grafted(family, both())
        with torch.device("meta"):
            planned = type(real)(real.config)
        shapes = {name: tensor.shape for name, tensor in planned.state_dict().items()}
        assert shapes == {name: tensor.shape for name, tensor in real.state_dict().items()}
        native = {name: tensor.shape for name, tensor in tiny.model(family).state_dict().items()}
        assert {name: shapes[name] for name in native} == native


def test_layers_on_disk_give_the_same_logits(tmp_path: Path) -> None:
    """A device map with offloaded layers, control block and adapter among them (`device_map="auto"` makes such)."""
    model = perturbed(grafted("llama", both()))
    folder = written(tmp_path / "out", model, "llama")
    places = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    places |= {f"model.layers.{layer}": "disk" if layer in (0, 1, 4) else "cpu" for layer in range(6)}
    kind = classes("llama", "ForCausalLM", both())
    spread = kind.from_pretrained(folder, device_map=places, offload_folder=tmp_path / "offloaded")
    with torch.no_grad():
        assert torch.equal(spread(tokens()).logits, model(tokens()).logits)
    whole = kind.from_pretrained(folder, device_map="auto")
    with torch.no_grad():
        assert torch.equal(whole(tokens()).logits, model(tokens()).logits)
