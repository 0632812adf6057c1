"""Mixture-of-Control against the paper's equations in float64; routing that never looks ahead."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Mamba2Config, Mamba2ForCausalLM

import surgeon
from surgeon.models.load import load_model
from surgeon.runtime.graft import Frame, cache_in
from surgeon.runtime.losses import balance_loss
from surgeon.runtime.newborn import product as product_of
from surgeon.runtime.states import ControlBank, Mixing
from surgeon.runtime.states_rules import MixtureSpec, States
from tests import tiny
from tests.caches import CACHE
from tests.runtime.grafting import grafted, perturbed, states, tokens
from tests.runtime.test_experts import normal, randomised

SITES = ((0, "attention"), (0, "ffn"), (2, "attention"), (2, "ffn"), (4, "ffn"))
WIDTH = 6


def bank(**mixture: Any) -> ControlBank:
    return randomised(ControlBank(States(SITES, MixtureSpec(rank=3, alpha=0.7, **mixture)), WIDTH).double())


def reference(model: ControlBank, site: int, x: Tensor, valid: Tensor, *, training: bool) -> Tensor:
    """Equations 9 and 10 and appendix B, token by token, from the bank's own parameters."""
    spec, named = model.spec, dict(model.named_parameters())

    def g(k: int, row: Tensor) -> Tensor:
        return named[f"states.{k}.lora_B"] @ (named[f"states.{k}.lora_A"] @ row)

    kind = SITES[site][1]
    choice = [k for k, (_, other) in enumerate(SITES) if spec.shared != "by_kind" or other == kind]
    gate = {"all": "all", "by_kind": kind, "none": f"site_{site}"}[spec.shared]

    def probabilities(row: Tensor) -> Tensor:
        weight = named[f"gates.{gate}.weight"]
        if spec.gate == "linear":
            return torch.softmax(weight @ row, 0)
        low = named[f"gates.{gate}.projection"] @ row
        cosines = torch.stack([(low @ w) / (low.norm() * w.norm()) for w in weight])
        return torch.softmax(cosines / spec.temperature, 0)

    rows, columns = x.shape[:2]
    p = {(b, t): probabilities(x[b, t]) for b in range(rows) for t in range(columns)}
    real = [place for place in p if valid[place]]
    routing = spec.train_routing if training else spec.inference_routing
    output = torch.empty_like(x)
    for b, t in p:
        if routing == "token":
            shown = p[b, t]
        elif routing == "sequence_mean":
            seen = [p[b, s] for s in range(columns) if valid[b, s]]
            shown = sum(seen) / len(seen)
        elif routing == "prefix_mean":
            seen = [p[b, s] for s in range(t + 1) if valid[b, s]]
            shown = sum(seen) / len(seen) if seen else torch.zeros_like(p[b, t])
        else:
            shown = sum(p[place] for place in real) / len(real)
        chosen = shown.topk(spec.top_k).indices
        if routing == "batch_mode":
            votes = torch.zeros(len(choice))
            for place in real:
                votes[p[place].topk(spec.top_k).indices] += 1
            chosen = (votes + shown.detach()).topk(spec.top_k).indices
        total = shown[chosen].sum().clamp(min=1e-300)
        output[b, t] = spec.alpha * g(site, x[b, t])
        for k in chosen.tolist():
            output[b, t] = output[b, t] + (1 - spec.alpha) * shown[k] / total * g(choice[k], x[b, t])
    return output


CASES = [
    *product(["linear", "cosine"], ["all", "by_kind", "none"], [1, 2], ["batch_mean", "batch_mode", "token"], [True]),
    *product(
        ["linear", "cosine"], ["all", "by_kind", "none"], [1, 2], ["prefix_mean", "sequence_mean", "token"], [False]
    ),
]


@pytest.mark.parametrize("gate, shared, top_k, routing, training", CASES)
def test_forward_and_gradients_follow_the_equations(
    gate: str, shared: str, top_k: int, routing: str, training: bool
) -> None:
    where = "train_routing" if training else "inference_routing"
    how: dict[str, Any] = {where: routing, "straight_through": False, "projection": 4}
    model = bank(gate=gate, shared=shared, top_k=top_k, **how).train(training)
    valid = torch.tensor([[False, True, True, True], [True, True, True, True]])
    for site in (1, 2):
        x = normal(2, 4, WIDTH, seed=site).requires_grad_()
        output = Mixing(model, valid, None).control(site, x, Frame())
        twin = x.detach().clone().requires_grad_()
        expected = reference(model, site, twin, valid, training=training)
        real = valid.unsqueeze(-1)
        torch.testing.assert_close(output * real, expected * real, rtol=1e-9, atol=1e-11)
        direction = normal(*output.shape, seed=9) * real
        model.zero_grad()
        (output * direction).sum().backward()
        found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        (expected * direction).sum().backward()
        torch.testing.assert_close(x.grad, twin.grad, rtol=1e-8, atol=1e-9)
        for name, parameter in model.named_parameters():
            wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(
                found.get(name, torch.zeros_like(parameter)), wanted, rtol=1e-8, atol=1e-9, msg=name
            )


def test_no_routing_is_parallel_control() -> None:
    model = bank(top_k=0)
    x = normal(2, 4, WIDTH)
    state = model.states[3]
    expected = x @ (state.lora_B @ state.lora_A).T
    torch.testing.assert_close(Mixing(model, torch.ones(2, 4).bool(), None).control(3, x, Frame()), expected)
    assert not model.gates


def test_a_lone_choice_still_teaches_the_gate() -> None:
    """Softmax over one score is 1, without gradient; straight through, the value stays and has the probability's."""
    valid = torch.ones(2, 4).bool()
    x = normal(2, 4, WIDTH)
    outputs, slopes = [], []
    for straight in (False, True):
        model = bank(top_k=1, straight_through=straight).train()
        output = Mixing(model, valid, None).control(0, x, Frame())
        output.square().sum().backward()
        outputs.append(output.detach())
        slopes.append(model.gates["all"].weight.grad.abs().max().item())
    assert torch.equal(*outputs)
    assert slopes[0] < 1e-12 < 1e-6 < slopes[1]


def test_balance_loss_follows_section_3_3() -> None:
    p = torch.softmax(normal(2, 5, 4), -1)
    valid = torch.tensor([[True] * 5, [True, True, False, False, False]])
    rows = [p[b, t] for b in range(2) for t in range(5) if valid[b, t]]
    expected = 0.0
    for j in range(4):
        share = 4 / (2 * len(rows)) * sum(bool(j in row.topk(2).indices) for row in rows)
        expected += share * sum(row[j] for row in rows) / len(rows)
    torch.testing.assert_close(balance_loss(p, valid, 2), torch.as_tensor(expected).reshape(1))
    torch.testing.assert_close(balance_loss(torch.full((1, 8, 4), 0.25), torch.ones(1, 8).bool(), 4), torch.ones(1))


def test_balance_loss_joins_the_loss_in_training() -> None:
    ids = tokens()
    with_loss = perturbed(grafted("llama", states(balance_weight=0.3))).train()
    without = perturbed(grafted("llama", states(balance_weight=0.0))).train()
    out = with_loss(ids, labels=ids)
    torch.testing.assert_close(out.loss, without(ids, labels=ids).loss + 0.3 * out.balance_loss)
    assert with_loss.eval()(ids, labels=ids).balance_loss is None


@pytest.mark.parametrize("routing", ["prefix_mean", "token"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_no_logit_sees_a_later_token(family: str, routing: str) -> None:
    model = perturbed(grafted(family, states(top_k=2, inference_routing=routing)))
    ids = tokens(2, 12)
    logits = model(ids).logits
    for place in (4, 9):
        changed = ids.clone()
        changed[:, place:] = (changed[:, place:] + 17) % 128
        # Products over other rows may round otherwise; a token that is seen moves logits ten thousand times more.
        after = model(changed).logits
        torch.testing.assert_close(after[:, :place], logits[:, :place], atol=2e-6, rtol=1e-5)
        assert (after[:, place:] - logits[:, place:]).abs().max() > 1e-2


def test_training_routing_does_look_at_the_whole_batch() -> None:
    """The other half of the promise: it is made for inference only, and this shows that the test above can fail."""
    model = perturbed(grafted("llama", states(top_k=2)), scale=0.5).train()
    ids = tokens(2, 12)
    changed = ids.clone()
    changed[:, 6:] = (changed[:, 6:] + 17) % 128
    assert (model(changed).logits[:, :6] - model(ids).logits[:, :6]).abs().max() > 1e-4


def test_a_sequence_is_routed_alike_in_any_batch() -> None:
    model = perturbed(grafted("gemma3_text", states(top_k=2)))
    ids = tokens(3, 10)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    together = model(ids, attention_mask=mask).logits
    for row in range(3):
        kept = mask[row].bool()
        alone = model(ids[row : row + 1, kept]).logits
        torch.testing.assert_close(together[row : row + 1, kept], alone, atol=1e-5, rtol=1e-4)


def _zero_keeps_none() -> bool:
    """Whether this transformers' caches take `crop(0)` as how many tokens to keep, as older ones do."""
    cache = cache_in(tiny.model("llama")(tokens(), use_cache=True))
    cache.crop(0)
    return cache.get_seq_length() == 0


def test_cache_is_cropped_and_selected_with_its_routing() -> None:
    model = perturbed(grafted("llama", states(top_k=1)))
    ids = tokens(2, 10)
    cache = cache_in(model(ids, use_cache=True))
    expected = model(torch.cat([ids[:, :6], ids[:, :3]], dim=1)).logits[:, 6:]
    cache.crop(-4)
    if not _zero_keeps_none():
        cache.crop(0)  # assisted decoding's, where every draft token was right
    torch.testing.assert_close(model(ids[:, :3], **{CACHE: cache}).logits, expected, atol=1e-5, rtol=1e-4)
    cache.crop(-3)
    cache.batch_select_indices(torch.tensor([1]))
    torch.testing.assert_close(model(ids[1:, :3], **{CACHE: cache}).logits, expected[1:], atol=1e-5, rtol=1e-4)


def test_a_cache_keeps_the_latest_sums_alone() -> None:
    """As far back as they reach it can be cropped, to its beginning too; a crop between is refused."""
    model = perturbed(grafted("llama", states(top_k=1)), scale=0.5)
    ids = tokens(2, 100)
    with torch.no_grad():
        cache = cache_in(model(ids[:, :90], use_cache=True))
        model(ids[:, 90:91], **{CACHE: cache})
        kept = cache.layers[0].kept["states"]["sums"]
        assert kept.shape == (2, 64, 6 * 6) and kept.untyped_storage().nbytes() == kept.numel() * 8
        with pytest.raises(ValueError, match="drops 64 tokens of the cache, and its sums are kept for the last 64"):
            cache.crop(-64)
        cache.crop(-63)
        expected = model(torch.cat([ids[:, :28], ids[:, 40:43]], dim=1)).logits[:, 28:]
        torch.testing.assert_close(model(ids[:, 40:43], **{CACHE: cache}).logits, expected, atol=1e-5, rtol=1e-4)
        cache = cache_in(model(ids[:, :20], use_cache=True))
        cache.crop(-20)
        torch.testing.assert_close(model(ids[:, :1], **{CACHE: cache}).logits, model(ids[:, :1]).logits)


@pytest.mark.parametrize("routing", ["prefix_mean", "token"])
@pytest.mark.parametrize("top_k", [1, 2])
def test_decoding_reads_no_number_on_the_host(routing: str, top_k: int) -> None:
    """On a device without values whatever reads one raises an error; so would a longer text, sorted by choice."""
    surgery = states(top_k=top_k, inference_routing=routing, gate="cosine", projection=6)
    model = perturbed(grafted("llama", surgery))
    with torch.no_grad():
        cache = cache_in(model(tokens(), use_cache=True))
        model.to("meta")
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys.to("meta"), layer.values.to("meta")
        kept = getattr(cache.layers[0], "kept", {"states": {}})
        kept["states"] = {name: sums.to("meta") for name, sums in kept["states"].items()}
        model(tokens(2, 1).to("meta"), **{CACHE: cache})
        with pytest.raises((RuntimeError, NotImplementedError)):
            model(tokens(2, 40).to("meta"), **{CACHE: cache})


@pytest.mark.parametrize("top_k", [1, 2])
def test_controls_picked_by_index_are_the_chosen_ones(top_k: int) -> None:
    """What devices do that are slow to tell numbers, beside each chosen control's own product."""
    model = bank(top_k=top_k).eval()
    x, chosen = normal(2, 1, WIDTH), torch.tensor([[[4, 1]], [[0, 4]]])[..., :top_k]
    weights = normal(2, 1, top_k, seed=5).softmax(-1)
    with torch.no_grad():
        tables = model.tables(x)
        assert tables is not None
        found = Mixing(model, torch.ones(2, 1).bool())._by_table(x, model.states[2], chosen, weights, *tables[0])
        for row in range(2):
            expected = product_of(x[row], model.states[2](), 0.7)
            for k, weight in zip(chosen[row, 0].tolist(), weights[row, 0], strict=True):
                expected = expected + 0.3 * weight * product_of(x[row], model.states[k]())
            torch.testing.assert_close(found[row], expected)


def test_a_cache_of_another_model_is_refused() -> None:
    base = tiny.model("llama")
    model = grafted("llama", states(), base=base)
    cache = cache_in(base(tokens(), use_cache=True))
    with pytest.raises(ValueError, match="12 tokens that this model did not route"):
        model(tokens(), **{CACHE: cache})


def test_a_cache_may_count_no_tokens(tmp_path: Path) -> None:
    """Linear attention alone: the surgery is proven with a cache, and another model's cache is refused all the same."""
    config = Mamba2Config(
        num_heads=4, head_dim=16, hidden_size=32, vocab_size=64, state_size=8, num_hidden_layers=4, n_groups=1
    )
    base = Mamba2ForCausalLM(config)
    for parameter in base.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    base.save_pretrained(tmp_path / "base")
    surgeon.apply("mixture-of-control", tmp_path / "base", tmp_path / "out")
    out = load_model(tmp_path / "out")
    ids = torch.arange(1, 9)[None]
    decoded = []
    for model in (base, out):
        cache = cache_in(model(ids[:, :-1], use_cache=True))
        decoded.append(model(ids[:, -1:], **{CACHE: cache}).logits)
    assert torch.equal(*decoded)
    with pytest.raises(ValueError, match="holds tokens that this model did not route"):
        out(ids, **{CACHE: cache_in(base(ids, use_cache=True))})


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("routing", ["batch_mean", "batch_mode", "token"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_the_same_gradients(reentrant: bool, routing: str) -> None:
    ids = tokens()
    gradients = []
    for checkpointed in (False, True):
        model = perturbed(grafted("llama", states(top_k=2, train_routing=routing))).train()
        model.freeze_base()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() == set(model.graft_parameter_names())
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], atol=1e-6, rtol=1e-4, msg=name)
