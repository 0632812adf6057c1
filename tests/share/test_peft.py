"""PEFT adapters as slots and back: peft's own logits, its own bits, and every refusal."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import surgeon
from surgeon.cli import app
from surgeon.common.listener import Quiet
from surgeon.errors import BadInput
from surgeon.runtime.spread import for_each_layer
from tests import tiny
from tests.checkpoint.stand_in_hub import COMMIT, Hub, files_of, serve
from tests.checkpoints import weights
from tests.commands import refused, run_surgeon
from tests.manifest.edits import edited

# peft asks transformers for what transformers deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

IDS = torch.arange(3, 43).reshape(4, 10)
IMPORT: dict[str, Any] = {"op": "pmoe_experts", "from_peft": "adapter"}
INSERT: dict[str, Any] = {"op": "insert_layers", "where": {"after": [0, 3]}, "init": {"kind": "copy"}}
EVERYWHERE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

# family and LoraConfig: what differs is rank, scale and fused modules.
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "query and value": ("llama", {"target_modules": ["q_proj", "v_proj"], "r": 4, "lora_alpha": 8}),
    "patterns": (
        "llama",
        {
            "target_modules": EVERYWHERE,
            "r": 6,
            "lora_alpha": 5,
            "use_rslora": True,
            "lora_dropout": 0.1,
            "rank_pattern": {"q_proj": 2, r"layers.[2-3].mlp.up_proj": 3},
            "alpha_pattern": {"down_proj": 7, r"^model.layers.1.self_attn.v_proj": 11, r"layers.\d.*gate_proj": 3},
        },
    ),
    "some layers": ("llama", {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1, 4]}),
    "gemma2": ("gemma2", {"target_modules": EVERYWHERE, "r": 3, "lora_alpha": 7}),
    "fused": ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj"], "r": 5, "lora_alpha": 16}),
}


def train(base: Path, adapter: Path, *, steps: int = 3, seed: int = 0, **config: Any) -> torch.Tensor:
    """A LoRA that peft trains on `base` in float32 for a few steps and saves; its logits."""
    torch.manual_seed(seed)
    native = AutoModelForCausalLM.from_pretrained(base, dtype="float32")
    model = get_peft_model(native, LoraConfig(task_type="CAUSAL_LM", **config))
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-2)
    model.train()
    for _ in range(steps):
        optimiser.zero_grad()
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimiser.step()
    model.eval().save_pretrained(adapter)
    return logits(model)


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(IDS).logits
    return found


def load(out: Path, dtype: str = "float32") -> Any:
    return AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True, dtype=dtype).eval()


def with_adapter(base: Path, adapter: Path) -> torch.Tensor:
    native = AutoModelForCausalLM.from_pretrained(base, dtype="float32")
    return logits(PeftModel.from_pretrained(native, adapter).eval())


@pytest.fixture
def base32(tmp_path: Path) -> Path:
    """A tiny Llama in float32."""
    return tiny.checkpoint(tmp_path / "base", "llama", dtype="float32")


@pytest.fixture(scope="module")
def _trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    train(tiny.checkpoint(folder / "base", "llama"), folder / "adapter", target_modules=["q_proj"])
    return folder / "adapter"


@pytest.fixture
def adapter(_trained: Path, tmp_path: Path) -> Path:
    """A LoRA at `q_proj` of the tiny Llama, to be spoilt."""
    return Path(shutil.copytree(_trained, tmp_path / "adapter"))


@pytest.mark.parametrize("case", ADAPTERS)
def test_an_adapter_as_the_only_slot_computes_what_peft_computes(
    case: str, plan: Callable[..., Path], tmp_path: Path
) -> None:
    family, config = ADAPTERS[case]
    base, out, adapter = tmp_path / "base", tmp_path / "out", tmp_path / "adapter"
    tiny.checkpoint(base, family, dtype="float32")
    expected = train(base, adapter, **config)
    native = logits(load(base))
    applied = surgeon.apply(plan(IMPORT), str(base), out)
    assert applied.manifest.promise == "none"
    assert (expected - native).abs().max() > 0.1
    close(logits(load(out)), expected)
    assert surgeon.verify(base, out, window=24, windows=1).holds
    assert_exports(out, 0, tmp_path / "exported", base, adapter)
    surgeon.apply(plan(IMPORT | {"from_peft": "exported"}, name="again.yaml"), str(base), tmp_path / "again")
    assert_equal(weights(tmp_path / "again"), weights(out))
    assert (tmp_path / "again" / "config.json").read_bytes() == (out / "config.json").read_bytes()
    close(logits(load(out, "bfloat16")).float(), expected, atol=0.5)


def close(found: torch.Tensor, expected: torch.Tensor, *, atol: float = 1e-4) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=atol)


def assert_exports(out: Path, slot: int, dest: Path, base: Path, adapter: Path) -> None:
    """Bit for bit the tensors of `adapter`, and the same logits where peft loads them on `base`."""
    exported = surgeon.export_slot(out, slot, dest)
    assert exported.base == base.name
    assert sorted(path.name for path in dest.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    before, after = (load_file(folder / "adapter_model.safetensors") for folder in (adapter, dest))
    assert after.keys() == before.keys()
    for name, value in before.items():
        assert torch.equal(after[name], value), name
    close(with_adapter(base, dest), with_adapter(base, adapter), atol=1e-6)


def test_shallow_layers_become_the_shared_lora(plan: Callable[..., Path], base32: Path, tmp_path: Path) -> None:
    out, adapter = tmp_path / "out", tmp_path / "adapter"
    expected = train(base32, adapter, target_modules=["q_proj", "v_proj"], r=4, lora_alpha=3)
    surgeon.apply(plan(IMPORT | {"threshold": 2}), str(base32), out)
    entries = for_each_layer(json.loads((out / "config.json").read_text())["surgery"])["experts"]
    assert [entry["routed"] for entry in entries] == [False, False, True, True, True, True]
    close(logits(load(out)), expected)
    assert_exports(out, 0, tmp_path / "exported", base32, adapter)
    told = refused("apply", plan(IMPORT), out, tmp_path / "again")
    assert "0-1" in told
    assert "threshold: 0" in told
    assert not (tmp_path / "again").exists()


def on_slot(model: Any, slot: int, slots: int) -> Any:
    """The model with all of its router's mass on one slot."""
    router = next(module for module in model.modules() if type(module).__name__ == "ExpertRouter")
    mass = torch.nn.functional.one_hot(torch.tensor(slot), slots).float()
    router.forward = lambda hidden: (mass.expand(*hidden.shape[:-1], slots), mass.expand(*hidden.shape[:-1], slots))
    return model


def test_two_adapters_beside_each_other_and_taken_out_again(
    plan: Callable[..., Path], base32: Path, tmp_path: Path
) -> None:
    """Second import, layers inserted beneath, verify and revert after the adapters are gone."""
    first, second = tmp_path / "adapter", tmp_path / "second"
    states = [base32, *(tmp_path / f"state-{number}" for number in (1, 2, 3))]
    told = [
        train(base32, first, target_modules=["q_proj", "v_proj"], r=4),
        train(base32, second, seed=1, target_modules=["down_proj"], layers_to_transform=[3, 5], r=2, lora_dropout=0.2),
    ]
    plans = [
        plan(IMPORT, name="1.yaml"),
        plan(IMPORT | {"from_peft": "second"}, name="2.yaml"),
        plan(INSERT, name="3.yaml"),
    ]
    for chosen, before, after in zip(plans, states, states[1:], strict=False):
        surgeon.apply(chosen, str(before), after)
    for slot, adapter in enumerate((first, second)):
        for number in (2, 3):
            close(logits(on_slot(load(states[number]), slot, 2)), told[slot])
            exported = tmp_path / f"exported-{number}-{slot}"
            assert_exports(states[number], slot, exported, base32, adapter)
            assert json.loads((exported / "adapter_config.json").read_text())["lora_dropout"] == (0.0, 0.2)[slot]
    digests = {name: entry.sha256 for name, entry in surgeon.inspect(states[2]).manifest.new_tensors.items()}
    shutil.rmtree(first)
    shutil.rmtree(second)
    for before, after in itertools.pairwise(states):
        assert surgeon.verify(before, after, window=24, windows=1).holds
    surgeon.revert(states[3], tmp_path / "reverted", to=2)
    assert surgeon.verify(states[1], tmp_path / "reverted", logits=False).holds
    assert digests == {n: e.sha256 for n, e in surgeon.inspect(tmp_path / "reverted").manifest.new_tensors.items()}
    surgeon.revert(states[3], tmp_path / "native", to=0)
    assert_equal(weights(tmp_path / "native"), weights(base32))
    assert not surgeon.diff(states[1], states[2]).identical


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_a_new_slot_beside_an_imported_one(plan: Callable[..., Path], base32: Path, tmp_path: Path) -> None:
    """An ordinary slot takes the imported one's targets and leaves the function as it is, to the bit."""
    out, grown = tmp_path / "out", tmp_path / "grown"
    train(base32, tmp_path / "adapter", target_modules=["o_proj"], layers_to_transform=[2, 3])
    surgeon.apply(plan(IMPORT), str(base32), out)
    applied = surgeon.apply(plan({"op": "pmoe_experts"}, name="next.yaml"), str(out), grown)
    assert applied.manifest.promise == "exact"
    assert surgeon.verify(out, grown, window=24, windows=1).identical
    assert "model.layers.0.self_attn.o_proj.slots.1.lora_A" in applied.manifest.new_tensors


def test_values_are_rounded_to_the_base(plan: Callable[..., Path], base: Path, tmp_path: Path) -> None:
    """A float32 adapter on a bfloat16 base: to nearest, said so; the manifest keeps the adapter's own digests."""
    out, adapter = tmp_path / "out", tmp_path / "adapter"
    expected = train(base, adapter, target_modules=["q_proj"])
    applied = surgeon.apply(plan(IMPORT), str(base), out)
    assert "F32 values are rounded to BF16" in applied.manifest.operations[0].reason
    found, given = weights(out), load_file(adapter / "adapter_model.safetensors")
    for layer in range(6):
        value = given[f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_B.weight"]
        assert torch.equal(found[f"model.layers.{layer}.self_attn.q_proj.slots.0.lora_B"], value.bfloat16())
    kept = applied.manifest.facts["0"]
    assert kept.tensors.keys() == given.keys()
    close(logits(load(out)), expected, atol=0.1)


def test_layers_inserted_before_the_import_have_none(plan: Callable[..., Path], base32: Path, tmp_path: Path) -> None:
    out, adapter = tmp_path / "out", tmp_path / "adapter"
    expected = train(base32, adapter, target_modules=["v_proj"])
    surgeon.apply(plan(INSERT, IMPORT), str(base32), out)
    close(logits(load(out)), expected)
    assert_exports(out, 0, tmp_path / "exported", base32, adapter)


def test_an_adapter_on_the_hub_is_pinned(plan: Callable[..., Path], base: Path, tmp_path: Path) -> None:
    home, adapter = tmp_path / "home", tmp_path / "local"
    train(base, adapter, target_modules=["q_proj"])
    chosen = plan(IMPORT | {"from_peft": "user/adapter"})
    files = files_of(adapter) | {"adapter_model.bin": b"never", "README.md": b"-"}
    with serve(Hub(files, repo_id="user/adapter")) as hub:
        shown = run_surgeon(hub, home, "preview", str(chosen), str(base))
        assert shown.returncode == 0, shown.stderr
        applied = run_surgeon(hub, home, "apply", str(chosen), str(base), str(tmp_path / "out"))
        assert applied.returncode == 0, applied.stderr
        assert hub.bytes_sent("adapter_model.bin") == 0
        unknown = plan(IMPORT | {"from_peft": "user/adapter@gone"}, name="gone.yaml")
        told = run_surgeon(hub, home, "preview", str(unknown), str(base))
        assert told.returncode == 2
        assert "gone" in told.stderr
    kept = surgeon.inspect(tmp_path / "out").manifest.facts["0"]
    assert (kept.id, kept.revision) == ("user/adapter", COMMIT)
    offline = run_surgeon(hub, home, "preview", str(chosen), str(base), HF_HUB_OFFLINE="1")
    assert offline.returncode == 0, offline.stderr
    assert surgeon.verify(base, tmp_path / "out", logits=False).holds


def test_a_changed_adapter_is_refused(plan: Callable[..., Path], base: Path, adapter: Path, tmp_path: Path) -> None:
    """Between looking and writing: nothing is published. Another adapter is another job."""

    class Meddler(Quiet):
        def begin(self, stage: str, total: int) -> None:
            edit_tensors(adapter, lambda tensors: {name: value + 1 for name, value in tensors.items()})

    with pytest.raises(BadInput, match="changed"):
        surgeon.apply(plan(IMPORT), str(base), tmp_path / "out", listener=Meddler())
    assert not (tmp_path / "out").exists()


def edit_tensors(adapter: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    file = adapter / "adapter_model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def rename(old: str, new: str) -> Callable[[Path], None]:
    return lambda adapter: edit_tensors(adapter, lambda t: {name.replace(old, new): v for name, v in t.items()})


def value(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """One tensor changed; None takes it out."""
    full = f"base_model.model.model.layers.{name}.weight"
    return lambda adapter: edit_tensors(
        adapter, lambda t: {n: v for n, v in (t | {full: change(t[full])}).items() if v is not None}
    )


def config(**changes: Any) -> Callable[[Path], None]:
    def edit(adapter: Path) -> None:
        file = adapter / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return edit


def pickled(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")


def cut(adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-3])


def linked(adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    file.rename(adapter.parent / "elsewhere.safetensors")
    file.symlink_to(adapter.parent / "elsewhere.safetensors")


NOTHING = config()
REFUSED: dict[str, tuple[Callable[[Path], Any], dict[str, Any], list[str]]] = {
    "rank beside it": (NOTHING, {"rank": 4}, ["plan.yaml:5", "rank", "leave it out"]),
    "alpha beside it": (NOTHING, {"alpha": 4.0}, ["alpha"]),
    "targets beside it": (NOTHING, {"targets": ["q_proj"]}, ["targets"]),
    "dropout beside it": (NOTHING, {"dropout": 0.0}, ["dropout"]),
    "two slots": (NOTHING, {"slots": 2}, ["one slot"]),
    "nowhere": (NOTHING, {"from_peft": "nowhere"}, ["nowhere", "no such folder"]),
    "all below the router": (
        rename("layers.5.", "layers.0."),
        {"threshold": 5},
        ["layers 0-4", "no slot", "lower `threshold`"],
    ),
    "not a LoRA": (config(peft_type="IA3"), {}, ["peft_type", "IA3"]),
    "in another case": (config(peft_type="lora"), {}, ["'lora'; only LORA is read; write it so"]),
    "no peft_type": (config(peft_type=None), {}, ["peft_type"]),
    "dora": (config(use_dora=True), {}, ["use_dora", "DoRA"]),
    "bias": (config(bias="lora_only"), {}, ["bias", "lora_only"]),
    "lora_bias": (config(lora_bias=True), {}, ["lora_bias"]),
    "modules_to_save": (config(modules_to_save=["lm_head"]), {}, ["modules_to_save"]),
    "token indices": (config(trainable_token_indices=[1]), {}, ["trainable_token_indices"]),
    "layer replication": (config(layer_replication=[[0, 4], [2, 5]]), {}, ["layer_replication"]),
    "unknown to surgeon": (config(use_tomorrow={"a": 1}), {}, ["use_tomorrow"]),
    **{
        kind: (config(init_lora_weights=kind), {}, ["init_lora_weights", kind, "plain LoRA"])
        for kind in ("pissa", "pissa_niter_4", "olora", "loftq", "corda", "lora_ga")
    },
    "head": (rename("model.layers.0.self_attn.q_proj", "lm_head"), {}, ["lm_head", "outside"]),
    "embedding": (
        rename("model.layers.0.self_attn.q_proj.lora_A.weight", "model.embed_tokens.lora_embedding_A"),
        {},
        ["embed_tokens"],
    ),
    "other modules": (rename("q_proj", "query"), {}, ["self_attn.query", "another base"]),
    "more layers": (rename("layers.5.", "layers.31."), {}, ["layer 31", "6 layers"]),
    "huge layer": (rename("layers.5.", "layers.99999999999."), {}, ["99999999999"]),
    "other width": (
        value("2.self_attn.q_proj.lora_A", lambda v: torch.cat([v, v], dim=1)),
        {},
        ["[8, 64]", "[rank, 32]", "another base"],
    ),
    "other rows": (value("2.self_attn.q_proj.lora_B", lambda v: v[:3].clone()), {}, ["[3, 8]", "[32, rank]"]),
    "ranks that differ": (value("2.self_attn.q_proj.lora_A", lambda v: v[:2].clone()), {}, ["[2, 32]", "[32, 8]"]),
    "rank 0": (value("2.self_attn.q_proj.lora_A", lambda v: v[:0].clone()), {}, ["lora_A", "no numbers in it"]),
    "A without B": (value("2.self_attn.q_proj.lora_B", lambda _: None), {}, ["no lora_B"]),
    "B without A": (value("2.self_attn.q_proj.lora_A", lambda _: None), {}, ["no lora_A"]),
    "empty": (lambda a: edit_tensors(a, lambda _: {}), {}, ["no tensors"]),
    "NaN": (value("2.self_attn.q_proj.lora_B", lambda v: v.fill_(float("nan"))), {}, ["layers.2", "NaN"]),
    "infinity": (value("2.self_attn.q_proj.lora_B", lambda v: v.fill_(float("inf"))), {}, ["infinity"]),
    "integers": (value("2.self_attn.q_proj.lora_B", lambda v: v.to(torch.int8)), {}, ["I8"]),
    "pickled": (pickled, {}, ["adapter_model.bin", "save_pretrained"]),
    "cut": (cut, {}, ["truncated"]),
    "a link elsewhere": (linked, {}, ["link"]),
    "no config": (lambda a: (a / "adapter_config.json").unlink(), {}, ["adapter_config.json"]),
    "no JSON": (lambda a: (a / "adapter_config.json").write_text("{"), {}, ["adapter_config.json"]),
    "key twice": (
        lambda a: (a / "adapter_config.json").write_text('{"peft_type": "LORA", "peft_type": "LORA"}'),
        {},
        ["twice"],
    ),
    "a list": (lambda a: (a / "adapter_config.json").write_text("[]"), {}, ["list"]),
    "alpha of NaN": (lambda a: (a / "adapter_config.json").write_text('{"lora_alpha": NaN}'), {}, ["NaN"]),
    "alpha of words": (config(lora_alpha="8"), {}, ["lora_alpha"]),
    "dropout 1": (config(lora_dropout=1.0), {}, ["lora_dropout"]),
    "rslora of words": (config(use_rslora="yes"), {}, ["use_rslora"]),
    "a pattern that refers back": (config(alpha_pattern={r"(.*)\1": 3}), {}, ["alpha_pattern", "(.*)", "not read"]),
    "a pattern that is none": (config(alpha_pattern={"q_proj(": 3}), {}, ["alpha_pattern"]),
    "patterns as a list": (config(alpha_pattern=[3]), {}, ["alpha_pattern"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_of_import_are_one_line(
    case: str, plan: Callable[..., Path], base: Path, adapter: Path, tmp_path: Path
) -> None:
    spoil, more, words = REFUSED[case]
    spoil(adapter)
    told = refused("apply", plan(IMPORT | more), base, tmp_path / "out")
    for word in words:
        assert word in told, told
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out.surgeon*"))


def test_refusals_of_export_are_one_line(plan: Callable[..., Path], base: Path, adapter: Path, tmp_path: Path) -> None:
    out, dest = tmp_path / "out", tmp_path / "dest"
    surgeon.apply(plan(IMPORT), str(base), out)
    assert "no slot 3; there is slot 0" in refused("export-slot", out, 3, dest)
    assert "is inside the base" in refused("export-slot", out, 0, out / "adapter")
    assert "exists" in refused("export-slot", out, 0, adapter)
    assert "not an output" in refused("export-slot", base, 0, dest)
    native = tmp_path / "native"
    surgeon.apply(plan(INSERT, name="native.yaml"), str(base), native)
    assert "has no slots" in refused("export-slot", native, 0, dest)

    inserted = tmp_path / "inserted"
    surgeon.apply(plan(INSERT, {"op": "pmoe_experts"}, name="inserted.yaml"), str(base), inserted)
    told = refused("export-slot", inserted, 0, dest)
    assert "layer 1" in told
    assert "lacks" in told

    branched = tmp_path / "branched"
    surgeon.apply(plan({"op": "control_llm", "layers": [2]}, name="branch.yaml"), str(out), branched)
    assert "side branch of layer 2" in refused("export-slot", branched, 0, dest)
    (out / "surgery.json").unlink()
    assert "surgery.json" in refused("export-slot", out, 0, dest)
    assert not dest.exists()


def test_export_from_the_command_line(plan: Callable[..., Path], base: Path, adapter: Path, tmp_path: Path) -> None:
    out, dest = tmp_path / "out", tmp_path / "dest"
    surgeon.apply(plan(IMPORT), str(base), out)
    result = CliRunner().invoke(app, ["export-slot", str(out), "0", str(dest), "--json", "--quiet"])
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["config"] == json.loads((dest / "adapter_config.json").read_text())
    assert told["config"]["target_modules"] == ["q_proj"]
    assert told["layers"] == list(range(6))
    assert told["base"] == "base"


def test_a_manifest_that_lost_or_changed_its_adapter(
    plan: Callable[..., Path], base: Path, adapter: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    surgeon.apply(plan(IMPORT), str(base), out)
    found = json.loads((out / "surgery.json").read_text())["facts"]["0"]
    edited(out, lambda manifest: manifest.pop("facts"), seal=True)
    assert "nothing is known of the adapter" in refused("verify", "--static", base, out)
    odd = found | {"alpha_pattern": {"(a+": 1.0}}
    edited(out, lambda manifest: manifest.update(facts={"0": odd}), seal=True)
    assert "alpha_pattern" in refused("verify", "--static", base, out)
    edited(out, lambda manifest: manifest.update(facts={"0": found | {"alpha": 99.0}}), seal=True)
    assert not surgeon.verify(base, out, logits=False).holds
