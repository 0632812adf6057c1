"""Encoders from plan to output: exact, loadable where surgeon is not, a base again, and refused where they must be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import surgeon
from surgeon.cli import app
from surgeon.errors import BadInput
from surgeon.grafts.bundle import CODE_FILE
from surgeon.plan import shipped
from tests import tiny
from tests.checkpoints import weights
from tests.elsewhere import WITHOUT_SURGEON, run_elsewhere
from tests.runtime.grafting import classes, composition

LOADER = (
    WITHOUT_SURGEON
    + """
import torch, transformers
results = {}
for folder, auto, trust in zip(sys.argv[1::3], sys.argv[2::3], sys.argv[3::3]):
    kind = getattr(transformers, auto)
    model, info = kind.from_pretrained(folder, output_loading_info=True, trust_remote_code=trust == "trust")
    assert not info["missing_keys"], info
    model.to(model.dtype)
    ids = torch.arange(3, 23).reshape(2, 10)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    with torch.inference_mode():
        told = model(ids, attention_mask=mask)[0]
    results[folder] = {"class": type(model).__name__, "told": told.float().flatten().tolist()}
    if trust == "trust":
        names = model.freeze_base()
        labels = ids if auto.endswith("MaskedLM") else torch.tensor([0, 2])
        if auto != "AutoModel":
            loss = model.train()(ids, attention_mask=mask, labels=labels)
            assert loss.balance_loss is not None
            loss.loss.backward()
            assert {n for n, p in model.named_parameters() if p.grad is not None} == set(names)
        model.eval().save_pretrained(folder + "-saved")
        again = kind.from_pretrained(folder + "-saved", trust_remote_code=True)
        again.to(again.dtype)
        with torch.inference_mode():
            assert torch.equal(again(ids, attention_mask=mask)[0], told)
json.dump(results, sys.stdout)
"""
)


def saved(folder: Path, family: str, *, head: str = "ForSequenceClassification", dtype: str = "bfloat16") -> Path:
    tiny.model(family, head=head, dtype=dtype).save_pretrained(folder, max_shard_size="60KB")
    return folder


@pytest.mark.parametrize("family", tiny.ENCODERS)
def test_every_head_is_exact_and_loads_where_surgeon_is_not(family: str, tmp_path: Path) -> None:
    arguments, pairs = [], []
    for head in tiny.ENCODER_HEADS:
        base, out = saved(tmp_path / f"base-{head}", family, head=head), tmp_path / f"out-{head}"
        surgeon.apply("mixture-of-control", str(base), out)
        # As stored, in bfloat16, they are run by the other process.
        verification = surgeon.verify(base, out, window=32, windows=1, dtypes=("float32",))
        assert verification.holds and verification.identical
        assert [c.dtype for c in verification.comparisons] == ["float32"]
        config = json.loads((out / "config.json").read_text())
        assert config["auto_map"] == composition(family).auto_map
        assert config["model_type"] == f"upcycled_{family}" and config["num_hidden_layers"] == 6
        assert config["surgery"]["mixture"]["inference_routing"] == "sequence_mean"
        assert [path.name for path in out.glob("*.py")] == [CODE_FILE]
        auto = f"AutoModel{head}"
        arguments += [str(base), auto, "plain", str(out), auto, "trust"]
        pairs.append((str(base), str(out)))
    results = run_elsewhere(LOADER, *arguments, cache=tmp_path)
    for base_name, out_name in pairs:
        native, grown = results[base_name], results[out_name]
        assert grown["told"] == native["told"]
        assert grown["class"] == f"Upcycled{native['class']}"


@pytest.mark.parametrize("family", tiny.ENCODERS)
def test_a_pretrained_output_takes_a_new_head(family: str, tmp_path: Path) -> None:
    """As for GLUE: surgery on the masked language model, then a classifier on top of it."""
    base, out = saved(tmp_path / "base", family, head="ForMaskedLM"), tmp_path / "out"
    surgeon.apply("mixture-of-control", str(base), out)
    kind = classes(family, "ForSequenceClassification")
    model, info = kind.from_pretrained(out, num_labels=2, output_loading_info=True)
    assert info["missing_keys"] and not any("control_bank" in name for name in info["missing_keys"])
    kept = weights(out)
    body = {name: tensor for name, tensor in model.state_dict().items() if name.startswith(model.base_model_prefix)}
    assert all(torch.equal(kept[name], tensor) for name, tensor in body.items())
    assert model.to(model.dtype)(torch.arange(3, 23).reshape(2, 10)).logits.shape == (2, 2)


def test_a_checkpoint_of_old_names_passes_through(tmp_path: Path) -> None:
    """Norms' gamma and beta, the buffer of positions, a pooler beside another head: as roberta-base has them."""
    base = saved(tmp_path / "base", "roberta", head="ForMaskedLM")
    held = weights(base)
    for shard in [*base.glob("*.safetensors"), *base.glob("*.index.json")]:
        shard.unlink()
    renamed = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    old = {}
    for name, tensor in held.items():
        part = next((part for part in renamed if name.endswith(part)), "")
        old[name.removesuffix(part) + renamed[part] if part else name] = tensor
    old["roberta.embeddings.position_ids"] = torch.arange(136)[None]
    old["roberta.pooler.dense.weight"] = torch.randn(32, 32).bfloat16()
    save_file(old, base / "model.safetensors", metadata={"format": "pt"})
    surgeon.apply("mixture-of-control", str(base), tmp_path / "out")
    kept = weights(tmp_path / "out")
    assert all(torch.equal(kept[name], tensor) for name, tensor in old.items())
    verification = surgeon.verify(base, tmp_path / "out", window=32, windows=1)
    assert verification.holds and verification.identical


def test_a_broken_output_is_told(tmp_path: Path) -> None:
    from surgeon.models.outputs import compare_outputs

    base, out = saved(tmp_path / "base", "deberta-v2"), tmp_path / "out"
    surgeon.apply("mixture-of-control", str(base), out)
    for shard in out.glob("*.safetensors"):
        held = load_file(shard)
        for name in [name for name in held if name.endswith("lora_B")]:
            held[name] = torch.ones_like(held[name])
        save_file(held, shard, metadata={"format": "pt"})
    ids = torch.arange(3, 103).reshape(5, 20)
    auto = "AutoModelForSequenceClassification"
    found = compare_outputs(base, out, ids, auto=auto)
    assert not found.identical and found.max_abs_difference > 0 and found.output == "logits"
    assert found.tokens == 100 - 2 * 6
    assert compare_outputs(base, base, ids, auto=auto).identical
    with pytest.raises(BadInput, match="the base has 136 positions, a window has 137 tokens; use a smaller window"):
        compare_outputs(base, base, torch.ones(1, 137, dtype=torch.long), auto=auto)


def test_an_output_is_no_base_for_a_second_bank_and_can_be_taken_back(tmp_path: Path) -> None:
    base, out = saved(tmp_path / "base", "deberta"), tmp_path / "out"
    surgeon.apply("mixture-of-control", str(base), out)
    with pytest.raises(BadInput, match="the model has control states already"):
        surgeon.apply("mixture-of-control", str(out), tmp_path / "twice")
    assert not (tmp_path / "twice").exists()
    surgeon.revert(out, tmp_path / "back")
    before, after = weights(base), weights(tmp_path / "back")
    assert before.keys() == after.keys() and all(torch.equal(after[name], t) for name, t in before.items())
    assert json.loads((tmp_path / "back/config.json").read_text()) == json.loads((base / "config.json").read_text())
    difference = surgeon.diff(base, out)
    assert not difference.removed and not difference.changed
    assert all("control_bank." in name for name in difference.added)


@pytest.mark.parametrize(
    "plan",
    [n for n in shipped.shipped_plans() if not n.startswith(("mixture-of-control", "control-llm/", "opt-deus/"))],
)
def test_other_plans_are_refused_in_one_line(plan: str, tmp_path: Path) -> None:
    base = saved(tmp_path / "base", "roberta")
    result = CliRunner().invoke(app, ["apply", plan, str(base), str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "the base is an encoder (roberta), and this operation is for decoders; on an encoder use" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_done_to_an_encoder_is_told(tmp_path: Path, plan: Callable[..., Path]) -> None:
    base = saved(tmp_path / "base", "roberta")
    asked = plan({"op": "mixture_of_control", "routing": {"inference": "prefix_mean"}})
    with pytest.raises(
        BadInput, match=r"`routing.inference: prefix_mean` on an encoder, .* write sequence_mean or token"
    ):
        surgeon.preview(asked, str(base))
    ahead = plan({"op": "mixture_of_control", "routing": {"inference": "sequence_mean"}}, name="ahead.yaml")
    decoder = tiny.checkpoint(tmp_path / "decoder", "llama")
    with pytest.raises(
        BadInput, match=r"`routing.inference: sequence_mean` on a decoder, .* write prefix_mean or token"
    ):
        surgeon.preview(ahead, str(decoder))
    surgeon.apply("mixture-of-control", str(base), tmp_path / "out")
    with pytest.raises(BadInput, match=r"an encoder \(roberta\), which is compared whole; leave out --streamed"):
        surgeon.verify(base, tmp_path / "out", streamed=True)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"architectures": ["RobertaForTokenClassification"]}))
    drawn = surgeon.preview("mixture-of-control", str(base)).blueprint
    assert drawn.config["architectures"] == ["UpcycledRobertaForTokenClassification"]


def test_routing_report_tells_what_an_encoder_chose(tmp_path: Path) -> None:
    for family in tiny.ENCODERS:
        surgeon.apply("mixture-of-control", str(saved(tmp_path / family, family)), tmp_path / f"{family}-out")
        report = surgeon.routing_report(tmp_path / f"{family}-out", {"probe": None}, window=20, windows=2)
        assert report.sites == tuple((layer, kind) for layer in range(6) for kind in ("attention", "ffn"))
        assert all(abs(sum(row) - 1) < 1e-6 for row in report.texts["probe"].states)
    with pytest.raises(BadInput, match="a window has 400 tokens; use a smaller window"):
        surgeon.routing_report(tmp_path / "roberta-out", {"probe": None}, window=400, windows=1)


def test_a_config_that_names_no_class_is_the_base_model(tmp_path: Path) -> None:
    """As microsoft/deberta-v3-base: `deberta.…` and heads of its training in the weights, no `architectures`."""
    base = saved(tmp_path / "base", "deberta-v2", head="ForMaskedLM")
    config = json.loads((base / "config.json").read_text())
    del config["architectures"]
    (base / "config.json").write_text(json.dumps(config))
    surgeon.apply("mixture-of-control", str(base), tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["architectures"] == ["UpcycledDebertaV2Model"]
    verification = surgeon.verify(base, tmp_path / "out", window=32, windows=1)
    assert verification.holds and [c.output for c in verification.comparisons] == ["last_hidden_state"]
