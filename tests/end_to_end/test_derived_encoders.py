"""Encoders that nobody described, and heads of derived models: exact, trained, reported and taken back."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import surgeon
from surgeon.anatomy.skeleton import BASE
from surgeon.models.outputs import auto_class
from tests.checkpoints import weights
from tests.decoders import tiny_decoder
from tests.elsewhere import WITHOUT_SURGEON
from tests.encoders import tiny_encoder
from tests.share.test_peft import load, logits, train
from tests.warm import warm

STATES = "surgeon: 1\noperations:\n  - {op: mixture_of_control, rank: 4}\n"
MASKED, SEQUENCES, TOKENS, ANSWERS = (
    f"AutoModelFor{head}" for head in ("MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering")
)

# For every head: the native one's output where both have its weights, in two dtypes and with padding; eight steps of
# control states and the new head, with the balance loss; nothing else moves; a saved copy.
HEADS = (
    WITHOUT_SURGEON
    + """
import tempfile, torch, transformers
transformers.logging.set_verbosity_error()
ids = torch.arange(5, 25).reshape(2, 10)
mask = torch.ones_like(ids)
mask[1, 7:] = 0
labels = {
    "MaskedLM": {"labels": ids},
    "SequenceClassification": {"labels": torch.tensor([0, 2])},
    "TokenClassification": {"labels": ids % 3},
    "QuestionAnswering": {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 4])},
}
for auto, base, out in (line.split() for line in sys.stdin):
    Auto, head = getattr(transformers, auto), auto.removeprefix("AutoModelFor")
    more = {"num_labels": 3} if head in ("SequenceClassification", "TokenClassification") else {}
    for dtype in ("bfloat16", "float32"):
        native = Auto.from_pretrained(base, dtype=dtype, **more)
        model, info = Auto.from_pretrained(out, dtype=dtype, trust_remote_code=True, output_loading_info=True, **more)
        assert type(model).__name__ == "Upcycled" + type(native).__name__
        held = native.state_dict()
        with torch.no_grad():
            for name in info["missing_keys"]:
                assert "control_bank" not in name
                model.state_dict()[name].copy_(held[name])
        for each in (native, model):
            each.config.pad_token_id = 0
            for value in each.parameters():
                value.data = value.data.clone()
        with torch.inference_mode():
            one, other = (each.eval()(ids, attention_mask=mask)[0] for each in (native, model))
        assert torch.equal(one, other), (auto, out, dtype)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    chosen = set(model.freeze_base())
    for name in info["missing_keys"]:
        dict(model.named_parameters())[name].requires_grad_(True)
    optimizer = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad], lr=5e-3)
    losses = []
    torch.manual_seed(0)
    model.train()
    steps = 8 if sys.argv[1:] == ["train"] else 2
    for _ in range(steps):
        output = model(ids, attention_mask=mask, **labels[head])
        assert output.balance_loss > 0
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(output.loss.item())
    assert steps == 2 or losses[-1] < losses[0], (auto, out, losses)
    moved = {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}
    assert moved <= chosen | set(info["missing_keys"])
    assert {name for name in chosen if name.endswith("lora_B")} <= moved
    with torch.inference_mode(), model.grafts(enabled=False):
        # Trained, and switched off.
        assert torch.equal(*(each.eval().base_model(ids, attention_mask=mask)[0] for each in (native, model)))
    with tempfile.TemporaryDirectory() as saved, torch.inference_mode():
        model.eval().save_pretrained(saved)
        again = Auto.from_pretrained(saved, trust_remote_code=True).eval()
        for value in again.parameters():
            value.data = value.data.clone()
        assert torch.equal(again(ids, attention_mask=mask)[0], model(ids, attention_mask=mask)[0])
print("the same")
"""
)


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.yaml"
    path.write_text(STATES)
    return path


def run(lines: list[str], *arguments: str) -> None:
    told = subprocess.run(
        [*warm(), "-c", HEADS, *arguments], input="".join(lines), capture_output=True, text=True, check=False
    )
    assert told.stdout == "the same\n", told.stderr


def test_a_bert_of_old_names_from_preview_to_report_and_back(plan: Path, tmp_path: Path) -> None:
    """As bert-base-uncased: gamma and beta, a buffer of positions, a second head and a pooler that nothing reads."""
    base = tiny_encoder(tmp_path / "base", "bert", MASKED, dtype="bfloat16")
    held = weights(base)
    for file in [*base.glob("*.safetensors"), *base.glob("*.index.json")]:
        file.unlink()
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in held.items()
    }
    old["bert.embeddings.position_ids"] = torch.arange(512)[None]
    old["cls.seq_relationship.weight"] = torch.randn(2, 128).bfloat16()
    save_file(old, base / "model.safetensors", metadata={"format": "pt"})
    shown = surgeon.preview(plan, str(base))
    assert any("its controls are proven on a twin" in note for note in shown.notes)
    surgeon.apply(plan, str(base), tmp_path / "out")
    verified = surgeon.verify(base, tmp_path / "out", window=24, windows=1, dtypes=["auto", "float32"])
    assert verified.holds
    assert verified.identical
    assert [found.output for found in verified.comparisons] == ["logits", "logits"]
    report = surgeon.routing_report(tmp_path / "out", {"probe": None}, window=20, windows=1)
    assert report.sites == tuple((layer, kind) for layer in range(3) for kind in ("attention", "ffn"))
    surgeon.make_delta(tmp_path / "out", tmp_path / "delta")
    surgeon.apply_delta(tmp_path / "delta", str(base), tmp_path / "same")
    assert all(torch.equal(value, weights(tmp_path / "same")[n]) for n, value in weights(tmp_path / "out").items())
    surgeon.report(tmp_path / "out", html=tmp_path / "report.html")
    assert "control states" in (tmp_path / "report.html").read_text()
    surgeon.revert(tmp_path / "out", tmp_path / "back")
    after = weights(tmp_path / "back")
    assert after.keys() == old.keys()
    assert all(torch.equal(value, after[name]) for name, value in old.items())
    assert json.loads((base / "config.json").read_text()) == json.loads((tmp_path / "back/config.json").read_text())


def test_every_head_of_an_encoder_is_the_native_one_where_surgeon_is_not(plan: Path, tmp_path: Path) -> None:
    """A norm behind the sum and one before it; saved with a head for words, and with none."""
    lines = []
    for model_type, saved, other in (("bert", MASKED, SEQUENCES), ("modernbert", BASE, TOKENS)):
        base, out = tmp_path / model_type, tmp_path / f"{model_type}-out"
        tiny_encoder(base, model_type, saved)
        surgeon.apply(plan, str(base), out)
        assert auto_class(json.loads((out / "config.json").read_text())) == saved
        lines += [f"{auto} {base} {out}\n" for auto in ((saved, other) if saved == MASKED else (other,))]
    run(lines, "train")


def test_a_head_without_an_upcycled_class_is_carried_along(plan: Path, tmp_path: Path) -> None:
    """As electra-small-discriminator: a head that tells replaced tokens, saved under the base model's prefix."""
    from transformers import AutoConfig, ElectraForPreTraining

    tiny_encoder(tmp_path / "tiny", "electra")
    base = tmp_path / "base"
    torch.manual_seed(0)
    ElectraForPreTraining(AutoConfig.from_pretrained(tmp_path / "tiny")).save_pretrained(base)
    surgeon.apply(plan, str(base), tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["architectures"] == ["UpcycledElectraModel"]
    kept = weights(tmp_path / "out")
    assert all(torch.equal(value, kept[name]) for name, value in weights(base).items())
    assert "electra.control_bank.gates.all.weight" in kept
    verified = surgeon.verify(base, tmp_path / "out", window=24, windows=1)
    assert verified.identical
    assert [found.output for found in verified.comparisons] == ["last_hidden_state"]


def test_derived_decoders_have_their_types_other_heads(plan: Path, tmp_path: Path) -> None:
    """One that builds its base model by class, one that asks AutoModel for it."""
    lines = []
    for model_type, autos in (("gpt2", (SEQUENCES, TOKENS)), ("qwen3_moe", (SEQUENCES,))):
        base, out = tiny_decoder(tmp_path / model_type, model_type), tmp_path / f"{model_type}-out"
        surgeon.apply(plan, str(base), out)
        lines += [f"{auto} {base} {out}\n" for auto in autos]
    run(lines)
    # Its base model is called as other heads call it, so that it finds the weights, which transformers' own would not.
    assert ANSWERS in json.loads((tmp_path / "qwen3_moe-out/config.json").read_text())["auto_map"]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_peft_adapter_of_a_derived_type_is_a_slot(tmp_path: Path) -> None:
    """PEFT's logits: with experts one by one, and of GPT-2's matrices, which are stored inputs by outputs; and back."""
    path = tmp_path / "plan.yaml"
    path.write_text("surgeon: 1\noperations:\n  - {op: pmoe_experts, from_peft: adapter}\n")
    asked: dict[str, Any] = {"r": 4, "lora_alpha": 8}
    base = tiny_decoder(tmp_path / "base", "qwen3_moe")
    wanted = train(base, tmp_path / "adapter", target_modules=["q_proj"], **asked)
    surgeon.apply(path, str(base), tmp_path / "out")
    assert torch.equal(logits(load(tmp_path / "out")), wanted)
    base = tiny_decoder(tmp_path / "gpt2", "gpt2")
    names = ["c_attn", "c_fc", "mlp.c_proj"]
    wanted = train(base, tmp_path / "transposed", target_modules=names, fan_in_fan_out=True, **asked)
    path.write_text("surgeon: 1\noperations:\n  - {op: pmoe_experts, from_peft: transposed}\n")
    surgeon.apply(path, str(base), tmp_path / "grown")
    torch.testing.assert_close(logits(load(tmp_path / "grown")), wanted, atol=1e-6, rtol=1e-5)
    surgeon.export_slot(tmp_path / "grown", 0, tmp_path / "slot")
    assert json.loads((tmp_path / "slot/adapter_config.json").read_text())["fan_in_fan_out"]
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "slot").eval()
    assert torch.equal(logits(again), wanted)
