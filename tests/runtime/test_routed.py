"""`upcycle_experts` where no class of transformers holds the base: experts beside its MLP, by modules of surgeon's own.

The reference is transformers' own class in float64 with a naive sum over the experts of every single token beside each
MLP; nothing of the code under test takes part in it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import surgeon
from surgeon.cli import app
from surgeon.errors import BadInput
from surgeon.models.load import load_model
from surgeon.models.tokens import token_batches
from tests import tiny
from tests.checkpoints import train, weights
from tests.decoders import tiny_decoder
from tests.edits.test_grow_vocabulary import assert_same
from tests.edits.test_upcycle_experts import trained
from tests.models.test_tokens import byte_tokenizer
from tests.training.texts import add_tokenizer

EXPERTS = 4
# Of each family how many experts a token takes, and into how many segments each is cut.
CASES = {"gemma2": (1, 1), "gemma3_text": (2, 2), "glm4": (2, 1), "starcoder2": (2, 2)}


def base_of(folder: Path, family: str) -> Path:
    if family in ("glm4", "starcoder2"):
        return tiny_decoder(folder / "base", family, dtype="bfloat16", layers=2)
    # One of them has more neurons than a twin, of which a segment is no share of the twin's.
    wide: dict[str, Any] = {"intermediate_size": 160} if family == "gemma3_text" else {}
    return tiny.checkpoint(folder / "base", family, num_hidden_layers=2, **wide)


def plan_of(folder: Path, **options: Any) -> Path:
    path = folder / "plan.yaml"
    entry = {"op": "upcycle_experts", "experts": EXPERTS} | options
    path.write_text(json.dumps({"surgeon": 1, "operations": [entry]}))
    return path


def model_of(folder: Path) -> Any:
    options = {"dtype": torch.float64, "trust_remote_code": True, "output_loading_info": True}
    model, told = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    return model.eval()


class Beside(nn.Module):
    """An MLP and what is added to it, token by token."""

    def __init__(self, mlp: Any, own: dict[str, torch.Tensor], top_k: int) -> None:
        super().__init__()
        self.mlp = mlp
        self.top_k = top_k
        self.own = nn.ParameterDict({name: nn.Parameter(value.double()) for name, value in own.items()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        act = next(getattr(self.mlp, name) for name in ("act_fn", "activation_fn", "act") if hasattr(self.mlp, name))
        rows = []
        for token in x.reshape(-1, x.shape[-1]):
            scores = [1 / (1 + torch.exp(-(row @ token))) for row in self.own["router"]]
            best = sorted(range(len(scores)), key=lambda number: -float(scores[number].detach()))[: self.top_k]
            total = sum(scores[number] for number in best) if self.top_k > 1 else 1.0
            made = torch.zeros_like(token)
            for number in best:
                if "gate_proj" in self.own:
                    inner = act(self.own["gate_proj"][number] @ token) * (self.own["up_proj"][number] @ token)
                else:
                    inner = act(self.own["up_proj"][number] @ token + self.own["up_bias"][number])
                made = made + scores[number] / total * (self.own["down_proj"][number] @ inner)
            rows.append(made)
        return self.mlp(x) + torch.stack(rows).view_as(x)


@pytest.mark.parametrize("family", CASES)
def test_experts_beside_the_mlp(family: str, tmp_path: Path) -> None:
    top_k, segments = CASES[family]
    base, out, back = base_of(tmp_path, family), tmp_path / "out", tmp_path / "back"
    options = {"top_k": top_k, "fine_grained": segments}
    applied = surgeon.apply(plan_of(tmp_path, **options), base, out, device="cpu")
    assert applied.manifest.promise == "exact"
    assert "no class of transformers holds" in applied.manifest.operations[0].matched
    proof = surgeon.verify(base, out, device="cpu", windows=1, window=16)
    assert proof.holds and proof.identical

    held, born = weights(base), weights(out)
    mlp = {n.removeprefix("model.layers.0.mlp."): value for n, value in held.items()}
    if family == "starcoder2":
        reading = {"up_proj": mlp["c_fc.weight"], "up_bias": mlp["c_fc.bias"]}
    elif "gate_up_proj.weight" in mlp:
        reading = dict(zip(("gate_proj", "up_proj"), mlp["gate_up_proj.weight"].chunk(2), strict=True))
    else:
        reading = {name: mlp[f"{name}.weight"] for name in ("gate_proj", "up_proj")}
    routed = "model.layers.0.mlp.routed."
    assert {n.removeprefix(routed) for n in born if n.startswith(routed)} == {"router", "down_proj", *reading}
    for name, of in reading.items():
        whole = born[f"{routed}{name}"]
        assert whole.shape[0] == EXPERTS * segments
        assert torch.equal(whole, torch.cat([of] * EXPERTS).view(whole.shape))
    assert not born[f"{routed}down_proj"].any() and born[f"{routed}router"].any()

    train(out, seed=3)
    found, wanted = model_of(out), model_of(base)
    own = weights(out)
    for index, layer in enumerate(wanted.model.layers):
        stem = f"model.layers.{index}.mlp.routed."
        tensors = {n.removeprefix(stem): v for n, v in own.items() if n.startswith(stem)}
        layer.mlp = Beside(layer.mlp, tensors, top_k * segments)
    ids = torch.randint(4, 100, (2, 9), generator=torch.Generator().manual_seed(0))
    results = []
    for model in (found, wanted):
        result = model(input_ids=ids, labels=ids)
        result.loss.backward()
        results.append(result)
    torch.testing.assert_close(results[0].logits, results[1].logits, rtol=1e-9, atol=1e-9)
    gradients = dict(found.named_parameters())
    for index, layer in enumerate(wanted.model.layers):
        for name, value in layer.mlp.own.items():
            ours = gradients[f"model.layers.{index}.mlp.routed.{name}"].grad
            assert value.grad.any(), name
            torch.testing.assert_close(ours, value.grad, rtol=1e-7, atol=1e-10)
    surgeon.revert(out, back)
    assert_same(base, back)


def test_a_delta_leaves_out_what_the_base_has_and_compiling_changes_nothing(tmp_path: Path) -> None:
    base, out = base_of(tmp_path, "gemma2"), tmp_path / "out"
    surgeon.apply(plan_of(tmp_path), base, out, device="cpu")
    surgeon.make_delta(out, tmp_path / "delta")
    names = {name for path in (tmp_path / "delta").glob("*.safetensors") for name in load_file(path)}
    # Gate and up are made of the base's rows.
    own = ("router", "down_proj")
    assert names == {f"model.layers.{layer}.mlp.routed.{name}" for layer in range(2) for name in own}
    surgeon.apply_delta(tmp_path / "delta", base, tmp_path / "again")
    assert_same(out, tmp_path / "again")
    train(out, seed=5)
    model = model_of(out)
    ids = torch.arange(4, 24).view(2, 10)
    with torch.no_grad():
        plain = model(input_ids=ids).logits
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(torch.compiler, "is_compiling", lambda: True)
            torch.testing.assert_close(model(input_ids=ids).logits, plain, rtol=1e-9, atol=1e-9)


def test_training_moves_experts_and_routers_alone(tmp_path: Path) -> None:
    """From the second step on the router has a gradient, and experts part; one expert a token is enough for it."""
    base = add_tokenizer(base_of(tmp_path, "gemma2"))
    out = surgeon.apply(plan_of(tmp_path, top_k=1), base, tmp_path / "out", device="cpu").path
    run = trained(tmp_path, out)
    held, born, after = weights(base), weights(out), weights(run)
    assert all(torch.equal(after[name], value) for name, value in held.items())
    for layer in range(2):
        for name in ("router", "gate_proj", "up_proj", "down_proj"):
            place = f"model.layers.{layer}.mlp.routed.{name}"
            assert not torch.equal(after[place], born[place]), place
        inner = after[f"model.layers.{layer}.mlp.routed.gate_proj"]
        assert any(not torch.equal(one, inner[0]) for one in inner[1:])
    surgeon.revert(run, tmp_path / "back")
    assert_same(base, tmp_path / "back")


def test_the_loss_that_spreads_tokens_and_the_shares_that_are_reported(tmp_path: Path) -> None:
    """By naive sums over tokens, padding left out; at birth the loss alone gives routers a gradient."""
    base = byte_tokenizer(tiny.checkpoint(tmp_path / "base", "gemma2", num_hidden_layers=2, vocab_size=300), eos=False)
    out = tmp_path / "out"
    applied = surgeon.apply(plan_of(tmp_path), base, out, device="cpu")
    assert "a balancing loss of 0.01 is on" in applied.manifest.operations[0].matched
    ids = torch.randint(4, 100, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids}
    model = model_of(out).train()
    model(**batch).loss.backward()
    routers = {name: value for name, value in model.named_parameters() if name.endswith(".router")}
    assert len(routers) == 2 and all(value.grad.abs().max() > 0 for value in routers.values())

    train(out, seed=3)
    model = model_of(out)
    read: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda _module, inputs, _output: read.append(inputs[0].detach()))
    with torch.no_grad():
        plain, told = model(**batch).loss, model.train()(**batch)
    wanted = []
    for layer, x in zip(model.model.layers, read[:2], strict=True):
        taken, parts = [0.0] * EXPERTS, [0.0] * EXPERTS
        valid = [token for token, there in zip(x.flatten(0, 1), mask.flatten(), strict=True) if there]
        for token in valid:
            scores = [float(1 / (1 + torch.exp(-(row @ token)))) for row in layer.mlp.routed.router.detach()]
            for number in sorted(range(EXPERTS), key=lambda number: -scores[number])[:2]:
                taken[number] += 1 / len(valid)
            parts = [part + score / sum(scores) / len(valid) for part, score in zip(parts, scores, strict=True)]
        wanted.append(sum(EXPERTS / 2 * f * p for f, p in zip(taken, parts, strict=True)))
    torch.testing.assert_close(float(told.routed_balance_loss), sum(wanted) / 2)
    torch.testing.assert_close(told.loss, plain + 0.01 * told.routed_balance_loss)

    report = surgeon.routing_report(out, {"probe": None}, window=16, windows=3)
    heard = load_model(out)
    rows: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    for index, layer in enumerate(heard.model.layers):
        layer.mlp.register_forward_hook(lambda _module, inputs, _output, index=index: rows[index].append(inputs[0]))
    with torch.inference_mode():
        heard(token_batches(out, text=None, window=16, windows=3, vocabulary=300).ids, use_cache=False)
        for index, layer in enumerate(heard.model.layers):
            scores = (torch.cat(rows[index]).flatten(0, 1).float() @ layer.mlp.routed.router.float().T).sigmoid()
            chosen = scores.argsort(dim=-1, descending=True)[:, :2]
            found = report.texts["probe"].experts[str(index)]
            shares = [float((chosen == number).any(-1).double().mean()) for number in range(EXPERTS)]
            assert found.tokens == pytest.approx(shares)
    page = tmp_path / "page.html"
    surgeon.report(out, html=page, texts={"probe": None}, window=16, windows=3)
    assert "Routed experts by layer" in page.read_text()
    shown = CliRunner().invoke(app, ["routing-report", str(out), "--window", "16", "--windows", "3"])
    assert "share of tokens that take each, most used first" in shown.output, shown.output


def test_no_loss_where_none_is_asked_for(tmp_path: Path) -> None:
    base, out = base_of(tmp_path, "gemma2"), tmp_path / "out"
    surgeon.apply(plan_of(tmp_path, balance=0), base, out, device="cpu")
    assert "routed_loss" not in json.loads((out / "config.json").read_text())["surgery"]
    ids = torch.arange(4, 14).view(1, 10)
    assert not hasattr(model_of(out).train()(input_ids=ids, labels=ids), "routed_balance_loss")


def test_what_these_modules_cannot_do_is_refused_in_one_line(tmp_path: Path) -> None:
    base = base_of(tmp_path, "gemma2")
    for options, words in (
        ({"form": "copies"}, "use `form: shared` without `target`, which brings modules of its own"),
        ({"target": "glm4_moe"}, "no class of transformers known here computes what this gemma2 does"),
        ({"fine_grained": 5}, "`fine_grained: 5` does not divide the 48 neurons"),
    ):
        with pytest.raises(BadInput, match=words) as told:
            surgeon.preview(plan_of(tmp_path, **options), base)
        assert "\n" not in str(told.value)
