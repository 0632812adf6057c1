"""`upcycle_experts` from plan to training and back, against the native class put together by hand from the base.

Logits and gradients are those of transformers' own class on the base's tensors; nothing of the code under test says
which class that is, what its settings are, or which tensor goes where.
"""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import surgeon
from benchmarks.published_configs import PUBLISHED
from surgeon.errors import BadInput
from tests import tiny
from tests.checkpoints import weights
from tests.decoders import checkpoint_of, tiny_decoder
from tests.edits.test_grow_vocabulary import assert_same
from tests.training.texts import add_tokenizer, corpus

OP = "upcycle_experts"
# d_ff a multiple of 32, no window: what every target holds to the bit.
SIZES: dict[str, Any] = {"num_hidden_layers": 2, "intermediate_size": 64}
OWN: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "phi3": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False},
}
ROUTED: dict[str, Any] = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
GLM: dict[str, Any] = ROUTED | {
    "n_shared_experts": 1,
    "first_k_dense_replace": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
}
MANY: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
THETA: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
# Base, form, the class and what it takes beside the base's own sizes.
CASES = [
    ("llama", "shared", "Glm4Moe", GLM),
    ("qwen2", "shared", "Glm4Moe", GLM | {"attention_bias": True, "tie_word_embeddings": True}),
    ("qwen3", "shared", "Glm4Moe", GLM | {"use_qk_norm": True, "head_dim": 16, "tie_word_embeddings": True}),
    ("phi3", "shared", "Glm4Moe", GLM),
    ("granite", "shared", "GraniteMoeShared", MANY | {"shared_intermediate_size": 64}),
    ("mistral", "copies", "Mixtral", MANY | THETA),
    (
        "qwen3",
        "copies",
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
        | {"head_dim": 16, "tie_word_embeddings": True},
    ),
    ("granite", "copies", "GraniteMoe", MANY),
    ("olmo2", "copies", "FlexOlmo", {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True} | THETA),
]


# Published bases, the class of their copies, and what of it a base has nothing for.
OTHERS = {
    "seed_oss": ("qwen2_moe", ["mlp.shared_expert.down_proj.weight", "mlp.shared_expert_gate.weight"]),
    "ernie4_5": ("ernie4_5_moe", ["mlp.moe_statics.e_score_correction_bias"]),
    "cohere2": ("cohere2_moe", []),
    "lfm2": ("lfm2_moe", ["feed_forward.expert_bias"]),
    "hunyuan_v1_dense": ("hunyuan_v1_moe", ["mlp.shared_mlp.down_proj.weight"]),
    "nemotron_h": ("nemotron_h", ["mixer.shared_experts.up_proj.weight", "mixer.gate.e_score_correction_bias"]),
}
# A dense hybrid, whose FFN is a shared expert of no others.
HYBRID: dict[str, Any] = {
    **{"architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "vocab_size": 512},
    **{"attention_multiplier": 0.0625, "embedding_multiplier": 12, "residual_multiplier": 0.246, "logits_scaling": 6},
    **{"hidden_size": 64, "intermediate_size": 96, "shared_intermediate_size": 96, "num_hidden_layers": 3},
    **{"layer_types": ["mamba", "attention", "mamba"], "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"mamba_chunk_size": 8, "mamba_d_conv": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_expand": 2},
    **{"mamba_n_groups": 1, "mamba_n_heads": 8, "num_local_experts": 0, "num_experts_per_tok": 0},
    **{"max_position_embeddings": 512, "position_embedding_type": "nope", "tie_word_embeddings": True},
}


@pytest.mark.parametrize("family", OTHERS)
def test_copies_of_a_published_base_in_a_class_of_its_maker(family: str, tmp_path: Path) -> None:
    model_type, idle = OTHERS[family]
    base = checkpoint_of(PUBLISHED[family], tmp_path / "base", dtype="bfloat16")
    out = upcycled(tmp_path, base, form="copies")
    assert json.loads((out / "config.json").read_text())["model_type"] == model_type
    found = surgeon.verify(base, out, windows=1, window=16, dtypes=("float32",))
    assert found.holds and found.promise == "rounding"
    held = weights(out)
    assert all(sum(value.any() for n, value in held.items() if n.endswith(f".1.{suffix}")) == 0 for suffix in idle)
    assert all(any(name.endswith(f".1.{suffix}") for name in held) for suffix in idle)
    loaded(out)
    surgeon.revert(out, tmp_path / "back")
    back, held = weights(tmp_path / "back"), weights(base)
    assert back.keys() == held.keys() and all(torch.equal(value, back[name]) for name, value in held.items())


@pytest.mark.parametrize("family", ["hunyuan_v1_dense", "nemotron_h", "granitemoehybrid"])
def test_experts_beside_the_ffn_in_a_class_of_its_maker(family: str, tmp_path: Path) -> None:
    base = checkpoint_of(PUBLISHED.get(family, HYBRID), tmp_path / "base", dtype="bfloat16")
    out = upcycled(tmp_path, base)
    assert not list(out.glob("*.py"))
    found = surgeon.verify(base, out, windows=1, window=16)
    assert found.holds and found.promise == "exact"
    # Experts that answer are heard, so that their zeros are what keeps the function.
    held = weights(out)
    for name, value in held.items():
        if (".experts." in name and "down_proj" in name) or "block_sparse_moe.output_linear" in name:
            value += 1.0
    save_file(held, out / "model.safetensors", {"format": "pt"})
    for file in out.glob("model*-of-*"):
        file.unlink()
    (out / "model.safetensors.index.json").unlink(missing_ok=True)
    ids = torch.arange(3, 19)[None]
    with torch.no_grad():
        one, other = (loaded(folder)(input_ids=ids).logits for folder in (base, out))
    assert float((one - other).abs().max()) > 0.1


def base_of(folder: Path, family: str, dtype: str = "bfloat16", **overrides: Any) -> Path:
    if family == "granite":
        return tiny_decoder(folder / "base", "granite", dtype=dtype, layers=2)
    return tiny.checkpoint(folder / "base", family, dtype=dtype, **(SIZES | OWN.get(family, {}) | overrides))


def plan_of(folder: Path, name: str = "plan", **options: Any) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps({"surgeon": 1, "operations": [{"op": OP, "experts": 4} | options]}))
    return path


def upcycled(folder: Path, base: Path, name: str = "out", **options: Any) -> Path:
    return surgeon.apply(plan_of(folder, name, **options), base, folder / name, device="cpu").path


def loaded(folder: Path, dtype: str = "float32", **options: Any) -> Any:
    """By plain transformers, without code of the folder's own."""
    options = {"dtype": getattr(torch, dtype), "output_loading_info": True} | options
    model, told = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    for value in model.parameters():
        value.data = value.data.clone()
    return model.eval()


def by_hand(base: Path, out: Path, form: str, prefix: str, own: dict[str, Any], dtype: str) -> Any:
    """The native class with the base's tensors in memory; routers alone are the output's, as they are drawn."""
    config = json.loads((base / "config.json").read_text())
    sizes = {key: config[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    sizes |= {key: config[key] for key in ("num_attention_heads", "num_key_value_heads", "rms_norm_eps")}
    # One of an end of sequence that the small vocabulary has.
    sizes |= {"eos_token_id": 2, "pad_token_id": 0}
    if "Granite" in prefix:
        multipliers = ("embedding", "residual", "attention")
        sizes |= {f"{word}_multiplier": config.get(f"{word}_multiplier", 1.0) for word in multipliers}
        sizes["logits_scaling"] = config.get("logits_scaling", 1.0)
        sizes["rope_parameters"] = config["rope_parameters"]
        sizes["tie_word_embeddings"] = config.get("tie_word_embeddings", False)
    kind = getattr(transformers, f"{prefix}Config")(**(sizes | own))
    model = getattr(transformers, f"{prefix}ForCausalLM")._from_config(kind, dtype=getattr(torch, dtype))
    held, routers = weights(base), weights(out)
    heads, kv, head_dim = config["num_attention_heads"], config["num_key_value_heads"], config.get("head_dim") or 8
    state = model.state_dict()
    done: set[str] = set()

    def put(name: str, value: torch.Tensor) -> None:
        assert state[name].shape == value.shape, name
        state[name].copy_(value)
        done.add(name)

    for name, value in held.items():
        if ".mlp." in name:
            continue
        if "qkv_proj" in name:
            widths = [heads * head_dim, kv * head_dim, kv * head_dim]
            for word, part in zip("qkv", value.split(widths), strict=True):
                put(name.replace("qkv", word), part)
        else:
            put(name, value)
    for index in range(config["num_hidden_layers"]):
        stem = f"model.layers.{index}."
        mlp = {n.rpartition("mlp.")[2]: v for n, v in held.items() if n.startswith(f"{stem}mlp.")}
        both = mlp.get("gate_up_proj.weight")
        gate, up = both.chunk(2) if both is not None else (mlp["gate_proj.weight"], mlp["up_proj.weight"])
        down = mlp["down_proj.weight"]
        (router,) = [
            v for n, v in routers.items() if n.startswith(stem) and n.endswith((".gate.weight", "layer.weight"))
        ]
        block = f"{stem}{'block_sparse_moe' if 'Granite' in prefix else 'mlp'}."
        put(f"{block}experts.gate_up_proj", torch.cat([gate, up]).expand(4, -1, -1))
        put(f"{block}experts.down_proj", (torch.zeros_like(down) if form == "shared" else down).expand(4, -1, -1))
        put(f"{block}{'router' if 'Granite' in prefix else 'gate'}.weight", router)
        if prefix == "Glm4Moe":
            put(f"{block}gate.e_score_correction_bias", torch.zeros(4))
            for word, value in (("gate", gate), ("up", up), ("down", down)):
                put(f"{block}shared_experts.{word}_proj.weight", value)
        elif form == "shared":
            put(f"{stem}shared_mlp.input_linear.weight", torch.cat([gate, up]))
            put(f"{stem}shared_mlp.output_linear.weight", down)
    assert done >= state.keys() - ({"lm_head.weight"} if kind.tie_word_embeddings else set())
    return model.eval()


@pytest.mark.parametrize(("family", "form", "prefix", "own"), CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES])
def test_the_output_is_the_native_class_and_computes_what_the_base_does(
    family: str, form: str, prefix: str, own: dict[str, Any], tmp_path: Path
) -> None:
    base = base_of(tmp_path, family)
    out = upcycled(tmp_path, base, form=form)
    ids = torch.randint(3, 100, (2, 24), generator=torch.Generator().manual_seed(0))
    for dtype in ("float32", "bfloat16") if family in ("llama", "granite") else ("float32",):
        before, model, reference = loaded(base, dtype), loaded(out, dtype), by_hand(base, out, form, prefix, own, dtype)
        assert type(model).__name__ == type(reference).__name__ and not hasattr(model.config, "auto_map")
        with torch.inference_mode():
            old, found, wanted = (each(input_ids=ids).logits for each in (before, model, reference))
        assert torch.equal(found, wanted)
        if form == "shared":
            assert torch.equal(found, old)
        else:
            eps = torch.finfo(old.dtype).eps
            assert float((found - old).abs().max()) <= 16 * eps * float(old.abs().max())
    model, reference = loaded(out), by_hand(base, out, form, prefix, own, "float32")
    for each in (model, reference):
        each(input_ids=ids, labels=ids).loss.backward()
    for name, value in reference.named_parameters():
        assert torch.equal(value.grad, model.get_parameter(name).grad), name
    experts = [n for n, v in model.named_parameters() if ".experts." in n and float(v.grad.abs().max()) > 0]
    assert all("down_proj" in name for name in experts) if form == "shared" else len(experts) == 4
    padded = torch.ones(2, 9, dtype=torch.long)
    padded[0, :4] = 0
    for mask in (None, padded):
        given = {"attention_mask": mask, "pad_token_id": 0, "max_new_tokens": 6}
        assert torch.equal(*(loaded(folder).generate(ids[:, :9], **given) for folder in (base, out)))
    # By its own name and settings in any engine: no field is left to a class's default that computes otherwise.
    config = json.loads((out / "config.json").read_text())
    assert config["num_experts"] == config["num_local_experts"] == 4 and "surgery" not in config
    surgeon.revert(out, tmp_path / "back")
    assert_same(base, tmp_path / "back")


def trained(folder: Path, out: Path, **options: Any) -> Path:
    corpus(folder / "fr.jsonl", documents=20)
    config = {
        "surgeon_train": 1,
        "steps": 4,
        "batch": 2,
        "length": 16,
        "validation_sequences": 2,
        "optimizer": {"lr": 1e-2, "warmup": 0},
        "sources": [{"name": "fr", "path": "fr.jsonl", "share": 1.0, "validation": 0.1}],
    } | options
    (folder / "train.yaml").write_text(json.dumps(config))
    surgeon.train(out, folder / "train.yaml", folder / f"{out.name}-run", device="cpu")
    return folder / f"{out.name}-run"


@pytest.mark.parametrize(("form", "top_k"), [("shared", 2), ("shared", 1), ("copies", 2), ("copies", 1)])
def test_experts_part_and_routers_move(form: str, top_k: int, tmp_path: Path) -> None:
    base = add_tokenizer(base_of(tmp_path, "llama", dtype="float32"))
    out = upcycled(tmp_path, base, form=form, top_k=top_k)
    run = trained(tmp_path, out)
    born, after = weights(out), weights(run)
    changed = {name for name, value in born.items() if not torch.equal(value, after[name])}
    assert all(".experts." in name or name.endswith(".gate.weight") for name in changed)
    routers = [name for name in born if name.endswith(("mlp.gate.weight", "moe.gate.weight"))]
    assert len(routers) == 2 and changed >= set(routers)
    word = "down_proj" if form == "shared" else "w2"
    for layer in range(2):
        downs = [v for n, v in after.items() if f"layers.{layer}." in n and ".experts." in n and word in n]
        assert len(downs) == 4
        assert min(float((a - b).abs().max()) for a, b in pairwise(downs)) > 1e-4
    proof = surgeon.verify(base, run, device="cpu", windows=1, window=16)
    assert proof.holds and proof.trained
    if form == "shared":
        surgeon.revert(run, tmp_path / "back")
        assert_same(base, tmp_path / "back")
    else:
        with pytest.raises(BadInput, match="trained or edited since"):
            surgeon.revert(run, tmp_path / "back")


def test_layers_before_and_after_in_plans_of_their_own(tmp_path: Path) -> None:
    base = base_of(tmp_path, "phi3")
    layers = tmp_path / "layers.yaml"
    insert = {"op": "insert_layers", "where": {"after": [0]}, "init": {"kind": "copy"}}
    layers.write_text(json.dumps({"surgeon": 1, "operations": [insert]}))
    surgeon.apply(layers, base, tmp_path / "one", device="cpu")
    upcycled(tmp_path, tmp_path / "one", "two")
    surgeon.apply(layers, tmp_path / "two", tmp_path / "three", device="cpu")
    for earlier, name in ((base, "base"), (tmp_path / "one", "one"), (tmp_path / "two", "two")):
        proof = surgeon.verify(earlier, tmp_path / "three", device="cpu", windows=1, window=16)
        assert proof.holds and proof.identical, name
    for number, name in enumerate(("base", "one", "two")):
        surgeon.revert(tmp_path / "three", tmp_path / f"back-{number}", to=number)
        assert_same(tmp_path / name, tmp_path / f"back-{number}")


def test_a_delta_brings_only_what_the_base_lacks(tmp_path: Path) -> None:
    for family, form in (("phi3", "shared"), ("granite", "copies")):
        folder = tmp_path / family
        folder.mkdir()
        base = base_of(folder, family)
        out = upcycled(folder, base, form=form)
        made = surgeon.make_delta(out, folder / "delta")
        held = weights(folder / "delta")
        assert made.tensors == len(held) and all("proj" not in n or "down_proj" in n for n in held)
        surgeon.apply_delta(folder / "delta", str(base), folder / "again")
        for file in out.iterdir():
            assert file.read_bytes() == (folder / "again" / file.name).read_bytes(), file.name


def test_what_was_edited_since_is_found(tmp_path: Path) -> None:
    base = base_of(tmp_path, "phi3")
    out = upcycled(tmp_path, base)
    kept = {path: path.read_bytes() for path in out.iterdir()}

    def failing(name: str) -> set[str]:
        shard = next(path for path in kept if path.suffix == ".safetensors" and name in load_file(path))
        tensors = load_file(shard)
        tensors[name].view(-1)[3] += 1
        save_file(tensors, shard, metadata={"format": "pt"})
        checks = surgeon.verify(base, out, logits=False).checks
        shard.write_bytes(kept[shard])
        return {check.name for check in checks if not check.holds}

    assert failing("model.layers.1.self_attn.k_proj.weight") == {"base tensors"}
    assert failing("model.layers.0.mlp.shared_experts.up_proj.weight") == {"base tensors"}
    assert failing("model.layers.0.mlp.experts.3.gate_proj.weight") == {"base tensors"}
    assert failing("model.layers.1.mlp.experts.0.down_proj.weight") == {"constants"}
    assert failing("model.layers.1.mlp.gate.weight") == {"new tensors"}


def test_noise_stays_exact_beside_a_shared_expert_alone(tmp_path: Path) -> None:
    base = base_of(tmp_path, "llama")
    out = upcycled(tmp_path, base, init="noise", noise_std=0.1, noise_share=1.0)
    assert surgeon.verify(base, out, device="cpu", windows=1, window=16).identical
    before, after = weights(base), weights(out)
    plain = before["model.layers.0.mlp.gate_proj.weight"].float()
    drawn = [after[f"model.layers.0.mlp.experts.{e}.gate_proj.weight"].float() - plain for e in range(4)]
    assert all(float(each.std()) == pytest.approx(0.1, rel=0.1) for each in drawn)
    assert abs(float(torch.corrcoef(torch.stack([each.flatten() for each in drawn]))[0, 1])) < 0.1
    # By default half of the neurons, the same in an expert's three matrices, by N(0, 0.02²): Drop-Upcycling's baseline.
    copies = upcycled(tmp_path, base, "copies", form="copies", init="noise")
    experts = weights(copies)
    moved = []
    for theirs, ours, axis in (("gate", "w1", 1), ("up", "w3", 1), ("down", "w2", 0)):
        apart = experts[f"model.layers.0.block_sparse_moe.experts.1.{ours}.weight"].float()
        apart -= before[f"model.layers.0.mlp.{theirs}_proj.weight"].float()
        moved.append((apart != 0).any(axis))
        assert float(apart[apart != 0].std()) == pytest.approx(0.02, rel=0.15)
    assert int(moved[0].sum()) == len(moved[0]) // 2 and torch.equal(moved[0], moved[1])
    assert torch.equal(moved[0], moved[2])
    proof = surgeon.verify(base, copies, device="cpu", windows=1, window=16)
    assert proof.promise == "none" and proof.holds and not proof.identical
    with pytest.raises(BadInput, match="take the base of that surgery"):
        surgeon.revert(copies, tmp_path / "back")


@pytest.mark.parametrize(("family", "form"), [("llama", "shared"), ("olmo2", "copies"), ("granite", "copies")])
def test_experts_cut_into_segments(family: str, form: str, tmp_path: Path) -> None:
    """Segments of a copy are chosen together (their router rows are equal) and sum to it; beside a shared one, zero."""
    base = base_of(tmp_path, family, dtype="float32")
    out = upcycled(tmp_path, base, form=form, fine_grained=4, top_k=1)
    config = json.loads((out / "config.json").read_text())
    assert (config["num_experts"], config["num_experts_per_tok"]) == (16, 4)
    proof = surgeon.verify(base, out, device="cpu", windows=1, window=32)
    assert (
        proof.holds and proof.identical == (form == "shared") and proof.promise == ("exact", "none")[form != "shared"]
    )
    assert all(c.max_abs_difference < 1e-5 for c in proof.comparisons)
    before, after = weights(base), weights(out)
    gate, down = (before[f"model.layers.1.mlp.{word}_proj.weight"] for word in ("gate", "down"))
    for expert in (0, 6, 15):
        rows = slice(expert % 4 * 16, expert % 4 * 16 + 16)
        if family == "granite":
            block = "model.layers.1.block_sparse_moe"
            found = after[f"{block}.input_linear.weight"][expert][:16], after[f"{block}.output_linear.weight"][expert]
        else:
            names = (f"model.layers.1.mlp.experts.{expert}.{word}_proj.weight" for word in ("gate", "down"))
            found = after[next(names)], after[next(names)]
        assert torch.equal(found[0], gate[rows])
        assert torch.equal(found[1], torch.zeros_like(found[1]) if form == "shared" else 4 * down[:, rows])
    if form == "shared":
        surgeon.revert(out, tmp_path / "back")
        assert_same(base, tmp_path / "back")


@pytest.mark.parametrize("family", ["llama", "granite"])
def test_drop_upcycling_draws_neurons_anew(family: str, tmp_path: Path) -> None:
    """Of each expert a quarter of its neurons, the same in its three matrices, by the statistics of what they were."""
    base = base_of(tmp_path, family, dtype="float32")
    out = upcycled(tmp_path, base, form="copies", init="drop_upcycling", drop=0.25)
    before, after = weights(base), weights(out)
    stem = "model.layers.0.mlp."
    old = [before[f"{stem}{word}_proj.weight"] for word in ("gate", "up", "down")]
    chosen: list[tuple[int, ...]] = []
    for expert in range(4):
        if family == "granite":
            block = "model.layers.0.block_sparse_moe."
            gate, up = after[f"{block}input_linear.weight"][expert].chunk(2)
            new = [gate, up, after[f"{block}output_linear.weight"][expert]]
        else:
            new = [after[f"model.layers.0.block_sparse_moe.experts.{expert}.{w}.weight"] for w in ("w1", "w3", "w2")]
        moved = [(a != b).any(axis) for a, b, axis in zip(old, new, (1, 1, 0), strict=True)]
        assert torch.equal(moved[0], moved[1]) and torch.equal(moved[0], moved[2]) and int(moved[0].sum()) == 16
        chosen.append(tuple(moved[0].nonzero().flatten().tolist()))
        for a, b, rows in ((old[0], new[0], True), (old[2], new[2], False)):
            was, now = (x[moved[0]] if rows else x[:, moved[0]] for x in (a, b))
            assert float(now.std()) == pytest.approx(float(was.std()), rel=0.15)
            assert abs(float(now.mean() - was.mean())) < 0.2 * float(was.std())
    assert len(set(chosen)) == 4
    assert surgeon.verify(base, out, device="cpu", windows=1, window=8).promise == "none"


def fine_tune(base: Path, folder: Path, seed: int) -> Path:
    """The base with other MLPs, in float32 and in one shard."""
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    drawn = torch.Generator().manual_seed(seed)
    tensors = {
        name: value.float() + (0.05 * torch.randn(value.shape, generator=drawn) if ".mlp." in name else 0)
        for name, value in weights(base).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("family", ["phi3", "granite"])
def test_fine_tunes_as_experts(family: str, tmp_path: Path) -> None:
    """Each expert is a model's own MLP; where one is sure to be chosen, the output computes with that one's."""
    base = base_of(tmp_path, family)
    models = [fine_tune(base, tmp_path / name, seed) for seed, name in enumerate(("one", "two"))]
    named = ["base", "one", str(models[1])]
    out = upcycled(tmp_path, base, form="copies", experts=named, top_k=1)
    proof = surgeon.verify(base, out, device="cpu", windows=1, window=16)
    assert proof.promise == "none" and proof.holds and not proof.identical
    ids = torch.arange(3, 23).reshape(2, 10)
    for expert, folder in enumerate((base, *models)):
        model, wanted = loaded(out), loaded(base)
        own = weights(folder)
        for index, layer in enumerate(model.model.layers):
            (router,) = [m for n, m in layer.named_modules() if n.endswith((".router", ".gate"))]
            # A router that reads nothing chooses the first; experts change places so that this is the one meant.
            router.weight.data.zero_()
            (experts,) = [m for n, m in layer.named_modules() if n.endswith(".experts")]
            for value in (experts.gate_up_proj, experts.down_proj):
                value.data[:] = value.data[expert].clone()
            for name, value in wanted.model.layers[index].mlp.named_parameters():
                value.data.copy_(own[f"model.layers.{index}.mlp.{name}"].bfloat16())
        with torch.inference_mode():
            found, expected = model(input_ids=ids).logits, wanted(input_ids=ids).logits
        assert float((found - expected).abs().max()) < 1e-5, folder
    if family == "granite":
        # Experts in one tensor are computed as a whole.
        with pytest.raises(BadInput, match="take the base of that surgery"):
            surgeon.revert(out, tmp_path / "back")
    else:
        # The base's own MLP is there as an expert, byte for byte.
        surgeon.revert(out, tmp_path / "back")
        assert_same(base, tmp_path / "back")


@pytest.mark.parametrize("family", ["phi3", "qwen3"])
def test_attention_is_averaged_where_that_is_asked(family: str, tmp_path: Path) -> None:
    """Branch-Train-MiX: the mean over all models, the base among them where it is named; else the base's."""
    base = base_of(tmp_path, family, dtype="float32")
    models = [fine_tune(base, tmp_path / name, seed) for seed, name in enumerate(("one", "two"))]
    kept = upcycled(tmp_path, base, "kept", form="copies", experts=["base", "one", "two"])
    out = upcycled(tmp_path, base, form="copies", experts=["base", "one", "two"], attention="average")
    assert surgeon.verify(base, out, device="cpu", windows=1, window=16).holds
    held = [weights(folder) for folder in (base, *models)]
    found, before = weights(out), weights(kept)
    for name in (
        "self_attn.o_proj.weight",
        "self_attn.qkv_proj.weight" if family == "phi3" else "self_attn.q_norm.weight",
    ):
        name = f"model.layers.1.{name}"
        mean = torch.stack([each[name].double() for each in held]).mean(0)
        parts = [name.replace("qkv", part) for part in "qkv"] if "qkv" in name else [name]
        assert torch.allclose(torch.cat([found[part] for part in parts]).double(), mean, atol=1e-6)
        assert torch.equal(torch.cat([before[part] for part in parts]), held[0][name])
    assert torch.equal(found["model.layers.1.input_layernorm.weight"], held[0]["model.layers.1.input_layernorm.weight"])
    with pytest.raises(BadInput, match="take the base of that surgery"):
        surgeon.revert(out, tmp_path / "back")


@pytest.mark.parametrize(
    ("family", "options", "setting"),
    [
        ("qwen3", {"form": "copies", "layers": {"every": 2}}, {"mlp_only_layers": [0, 2]}),
        ("phi3", {"form": "shared", "layers": [2, 3]}, {"first_k_dense_replace": 2}),
        ("llama", {"form": "shared", "layers": [1, 3]}, None),
    ],
)
def test_some_layers_keep_their_mlp(
    family: str, options: dict[str, Any], setting: dict[str, Any] | None, tmp_path: Path
) -> None:
    """Natively where a class says so in its config, by modules beside the MLP else; and back."""
    base = base_of(tmp_path, family, num_hidden_layers=4)
    out = upcycled(tmp_path, base, **options)
    proof = surgeon.verify(base, out, device="cpu", windows=1, window=16)
    assert proof.holds and proof.promise == ("rounding" if options["form"] == "copies" else "exact")
    config = json.loads((out / "config.json").read_text())
    assert ("surgery" in config) == (setting is None) and (setting or {}).items() <= config.items()
    with_experts = {int(name.split(".")[2]) for name in weights(out) if ".experts." in name or ".routed." in name}
    assert with_experts == ({2, 3} if family == "phi3" else {1, 3})
    surgeon.revert(out, tmp_path / "back")
    assert_same(base, tmp_path / "back")


def test_a_class_with_experts_in_every_layer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="it has experts in every layer"):
        upcycled(tmp_path, base_of(tmp_path, "granite"), form="copies", layers=[1])


def test_a_class_that_keeps_any_mlp_holds_a_llama_of_some_experts(tmp_path: Path) -> None:
    base = base_of(tmp_path, "llama")
    out = upcycled(tmp_path, base, form="copies", layers=[1])
    config = json.loads((out / "config.json").read_text())
    assert (config["model_type"], config["mlp_only_layers"], config["qkv_bias"]) == ("qwen2_moe", [0], False)
    found = surgeon.verify(base, out, windows=1, window=16, dtypes=("float32",))
    assert found.holds and found.promise == "rounding"


@pytest.mark.parametrize(("form", "segments"), [("shared", 1), ("copies", 2)])
def test_routers_by_prompts(form: str, segments: int, tmp_path: Path) -> None:
    """Rows point where the mean of what each layer's MLP reads of an expert's prompts points, by transformers.

    Less the mean of what it reads of negative prompts, where an expert has any.
    """
    base = add_tokenizer(base_of(tmp_path, "llama"))
    prompts = [["w1 w2 w3", "w4 w5"], ["w6 w7 w8 w9"]]
    against: list[list[str]] = [[], ["w30 w31 w32", "w4 w5"] if form == "copies" else []]
    router = {"prompts": prompts, "negative_prompts": against} if form == "copies" else {"prompts": prompts}
    options: dict[str, Any] = {"experts": 2, "top_k": 1, "fine_grained": segments, "router": router}
    out = upcycled(tmp_path, base, form=form, **options)
    proof = surgeon.verify(base, out, device="cpu", windows=1, window=16)
    assert proof.holds and proof.promise == ("exact" if form == "shared" else "none")
    tokenizer, model = transformers.AutoTokenizer.from_pretrained(base), loaded(base)
    read: dict[int, list[torch.Tensor]] = {}
    for index, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_pre_hook(
            lambda _, given, index=index: read.setdefault(index, []).append(given[0][0])
        )
    rows: list[list[torch.Tensor]] = [[], []]
    for texts, others in zip(prompts, against, strict=True):
        means: list[list[torch.Tensor]] = [[], []]
        for each in (texts, others):
            read.clear()
            with torch.no_grad():
                for text in each:
                    model(input_ids=tokenizer(text, return_tensors="pt").input_ids)
            for index, found in read.items():
                means[index].append(torch.cat(found).mean(0))
        for index, (mean, *less) in enumerate(means):
            rows[index].append(mean - less[0] if less else mean)
    after = weights(out)
    for index in range(2):
        wanted = torch.stack([0.02 * 32**0.5 * row / row.norm() for row in rows[index]]).repeat_interleave(segments, 0)
        found = next(
            v for n, v in after.items() if n.startswith(f"model.layers.{index}.") and n.endswith(".gate.weight")
        )
        assert float((found.float() - wanted).abs().max()) < 1e-3
    same = options | {"router": {"prompts": prompts, "negative_prompts": [prompts[0], []]}}
    with pytest.raises(BadInput, match="reads the same of the prompts and the negative prompts of expert 0"):
        surgeon.apply(plan_of(tmp_path, form=form, **same), base, tmp_path / "nothing", device="cpu")
    assert not (tmp_path / "nothing").exists()
    (base / "tokenizer.json").unlink()
    (base / "tokenizer_config.json").unlink()
    with pytest.raises(BadInput, match="no tokenizer, and routers are made of prompts"):
        surgeon.preview(plan_of(tmp_path, form=form, **options), base)


def test_other_models_than_fine_tunes_are_refused(tmp_path: Path) -> None:
    base = add_tokenizer(base_of(tmp_path, "llama"))
    tiny.checkpoint(tmp_path / "wider", "llama", **(SIZES | {"intermediate_size": 96}))
    tiny.checkpoint(tmp_path / "mistral", "mistral", **(SIZES | {"sliding_window": None}))
    add_tokenizer(tiny.checkpoint(tmp_path / "deeper", "llama", **(SIZES | {"num_hidden_layers": 3})))
    other = tiny.checkpoint(tmp_path / "tokens", "llama", **SIZES)
    tokenizer = json.loads((base / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = {piece: -1 - n for piece, n in tokenizer["model"]["vocab"].items()}
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    for name, words in (
        ("wider", "`intermediate_size` is 96, the base's 64; experts must be fine-tunes"),
        ("mistral", "`model_type` is 'mistral', the base's 'llama'"),
        ("deeper", "`num_hidden_layers` is 3, the base's 2"),
        ("tokens", "another vocabulary than the base's"),
        ("nowhere", "nowhere"),
    ):
        plan = plan_of(tmp_path, form="copies", experts=["base", name])
        with pytest.raises(BadInput, match=words) as told:
            surgeon.preview(plan, base)
        assert "\n" not in str(told.value)


def test_a_promise_of_rounding_is_checked(tmp_path: Path) -> None:
    """Logits that differ by more than the order of sums makes of them break it."""
    from tests.compared_logits import compare_logits

    base = base_of(tmp_path, "llama", dtype="float32")
    out = upcycled(tmp_path, base, form="copies")
    proof = surgeon.verify(base, out, device="cpu", windows=1, window=16)
    assert proof.promise == "rounding" and proof.holds and proof.rounded and not proof.identical
    shard = next(p for p in sorted(out.glob("*.safetensors")) if any(".w2." in name for name in load_file(p)))
    tensors = load_file(shard)
    name = next(name for name in tensors if ".w2." in name)
    tensors[name] *= 1.01
    save_file(tensors, shard, metadata={"format": "pt"})
    found = compare_logits(base, out, torch.arange(4, 36).reshape(2, 16))
    assert not all(each.rounded for each in found)


def test_rotary_factors_of_a_twin_are_of_its_heads(tmp_path: Path) -> None:
    """LongRoPE has one for each pair of a head's dimensions, and a twin has two heads where the base has four."""
    base = base_of(tmp_path, "phi3")
    config = json.loads((base / "config.json").read_text())
    factors = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 2.1, 2.2, 2.3]}
    config |= {"rope_theta": 10000.0, "rope_scaling": {"type": "longrope"} | factors}
    del config["rope_parameters"]
    (base / "config.json").write_text(json.dumps(config | {"original_max_position_embeddings": 64}))
    shown = surgeon.preview(plan_of(tmp_path, form="copies"), base)
    assert "MixtralForCausalLM" in shown.blueprint.operations[0].matched


REFUSED = [
    ("llama", {}, {"fine_grained": 3}, "`fine_grained: 3` does not divide the 64 neurons"),
    ("llama", {}, {"fine_grained": 16}, "`fine_grained: 16` makes experts of 4 neurons, .* a multiple of 8; give 8"),
    ("llama", {"intermediate_size": 100}, {"form": "copies"}, "multiple of 8 neurons.*use `form: shared` without"),
    ("llama", {"mlp_bias": True}, {"form": "copies"}, "an MLP with biases.*use `form: shared`"),
    ("gemma3_text", {}, {"form": "copies"}, "no class of transformers known here computes"),
    ("olmo2", {}, {"target": "dots1"}, r"use `form: copies` \(flex_olmo\)"),
    (
        "qwen2",
        {"use_sliding_window": True, "num_hidden_layers": 4},
        {"form": "copies"},
        "some of its layers have an attention window",
    ),
    ("llama", {}, {"target": "mixtral"}, "has no `form: shared`; use one of glm4_moe"),
    ("llama", {}, {"balance": 0.1}, "Glm4MoeForCausalLM has no balancing loss"),
    ("llama", {}, {"form": "copies", "top_k": 1, "balance": 0.0}, "the router would never get a gradient"),
]


@pytest.mark.parametrize(
    ("family", "options", "words"),
    [
        ("lfm2", {"form": "copies", "top_k": 1}, "lfm2_moe: it gives one expert the weight 1 whatever"),
        ("lfm2", {"form": "copies", "layers": [0, 1]}, "lfm2_moe: its layers without experts are the lowest alone"),
        ("nemotron_h", {"layers": [0, 1]}, "layer 0 has no FFN; choose `layers` among 1, 4, 6"),
        ("jamba", {"form": "copies"}, "layer 1 has experts already, and those of the classes known here are all alike"),
        ("bamba", {"form": "copies"}, "layers 0 and 2 hold different tensors, and none of the classes has such layers"),
        ("bamba", {"form": "copies", "target": "lfm2_moe"}, "`target: lfm2_moe` is for a base of type lfm2"),
    ],
)
def test_what_no_class_of_a_maker_holds(family: str, options: dict[str, Any], words: str, tmp_path: Path) -> None:
    base = checkpoint_of(PUBLISHED[family], tmp_path / "base", dtype="bfloat16")
    with pytest.raises(BadInput, match=words):
        surgeon.preview(plan_of(tmp_path, **options), base)


@pytest.mark.parametrize(("family", "overrides", "options", "words"), REFUSED, ids=range(len(REFUSED)))
def test_what_no_class_holds_is_refused_in_one_line(
    family: str, overrides: dict[str, Any], options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    base = base_of(tmp_path, family, **overrides)
    with pytest.raises(BadInput, match=words) as told:
        surgeon.preview(plan_of(tmp_path, **options), base)
    assert "\n" not in str(told.value)


def test_a_mixture_is_not_upcycled_again_and_nothing_follows_in_the_plan(tmp_path: Path) -> None:
    base = base_of(tmp_path, "llama")
    out = upcycled(tmp_path, base)
    with pytest.raises(BadInput, match="the base is a mixture of experts already"):
        surgeon.preview(plan_of(tmp_path), out)
    with pytest.raises(BadInput, match=r"mlp\.experts\.0\.down_proj\.weight: the base is a mixture of experts already"):
        surgeon.preview(plan_of(tmp_path), tiny_decoder(tmp_path / "hybrid", "qwen3_next"))
    with pytest.raises(
        BadInput, match=r"\(mixtral, .*, ernie4_5_moe: it has RMS norms; the base.* cohere2_moe: it has layers with"
    ):
        surgeon.preview(plan_of(tmp_path, form="copies"), tiny_decoder(tmp_path / "cohere", "cohere"))
    insert = {"op": "insert_layers", "where": {"after": [0]}, "init": {"kind": "copy"}}
    for operations, words in (
        ([{"op": OP}, insert], "comes after `upcycle_experts`, which makes a model of other tensors"),
        ([insert, {"op": OP}], "an earlier operation of this plan changes layers"),
        ([{"op": "gated_adapters", "layers": "all", "size": 4}, {"op": OP}], "the model carries grafts"),
    ):
        plan = tmp_path / "both.yaml"
        plan.write_text(json.dumps({"surgeon": 1, "operations": operations}))
        with pytest.raises(BadInput, match=words):
            surgeon.preview(plan, base)
