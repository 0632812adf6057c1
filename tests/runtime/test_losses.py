"""Auxiliary losses: measured as the papers say, added in training, off in eval; padding is left out."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.utils.logging import warning_once

from surgeon.grafts.control import DIVERGENCES
from surgeon.runtime.control import DISTANCES, divergence
from surgeon.runtime.interpolators import INTERPOLATORS
from surgeon.runtime.losses import given_tokens, valid_tokens
from tests import tiny
from tests.runtime.grafting import TRUNK, adapters, both, classes, config, control, grafted, perturbed, tokens

LENGTH = 10


def double(model: Any) -> Any:
    """The model in float64, rotary frequencies included, in training mode."""
    return model.double().train()


def batch() -> dict[str, Tensor]:
    """Three samples, two padded (left and right); labels skip the padding."""
    ids = tokens(3, LENGTH)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    mask[2, 8:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The task's loss, from its definition."""
    log_p = logits[:, :-1].log_softmax(-1)
    wanted = labels[:, 1:]
    picked = log_p.gather(-1, wanted.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -picked[wanted != -100].mean()


def branches(model: Any) -> list[tuple[Tensor, Tensor, Tensor, Tensor | float]]:
    """Will hold, after a forward, each interpolator's input, pre-trained and expanded states, and its α."""
    seen: list[tuple[Tensor, Tensor, Tensor, Tensor | float]] = []
    for layer in model.model.layers:
        if hasattr(layer, "control"):
            layer.interpolator.register_forward_hook(lambda module, args, out: seen.append((*args, out[1])))
    return seen


def adapter_outputs(model: Any) -> list[tuple[Tensor, Tensor | None]]:
    """Will hold, after a forward, each adapter's output and its gate before the sigmoid."""
    seen: list[tuple[Tensor, Tensor | None]] = []
    for name, module in model.named_modules():
        if name.endswith(".adapter"):
            module.register_forward_hook(lambda module, args, out: seen.append(out))
    return seen


@pytest.mark.parametrize("kind", DISTANCES)
@pytest.mark.parametrize("interpolator", [rule.key for rule in INTERPOLATORS if not rule.projects])
def test_divergence_follows_the_equation(interpolator: str, kind: str) -> None:
    weight = 0.7
    surgery = control(interpolator, divergence=kind, weight=weight, alpha=0.3)
    model = double(perturbed(grafted("llama", surgery)))
    seen = branches(model)
    inputs = batch()
    out = model(**inputs)

    valid = inputs["attention_mask"].bool()
    terms = []
    for _, p, e, alpha in seen:
        if kind == "mse":
            distance = ((p - e) ** 2).mean(-1)
        else:
            distance = 1 - (p * e).sum(-1) / (p.norm(dim=-1) * e.norm(dim=-1))
        terms.append((torch.as_tensor(alpha, dtype=torch.float64) * distance.unsqueeze(-1))[valid].mean())
    assert len(terms) == 2
    mean = torch.stack(terms).mean()
    assert mean > 1e-4
    torch.testing.assert_close(out.divergence_loss, mean.detach(), rtol=1e-9, atol=0)
    # The task's part is in fp32, as transformers computes it.
    expected = cross_entropy(out.logits, inputs["labels"]) + weight * mean
    torch.testing.assert_close(out.loss, expected, rtol=1e-6, atol=0)


def test_proj_compares_with_the_projected_branch() -> None:
    model = double(perturbed(grafted("llama", control("proj", layers=(2,)))))
    seen = branches(model)
    inputs = batch()
    out = model(**inputs)
    _, p, e, _ = seen[0]
    projected = p + p @ model.model.layers[2].interpolator.weight.T
    valid = inputs["attention_mask"].bool()
    torch.testing.assert_close(out.divergence_loss, (0.5 * ((e - projected) ** 2).mean(-1))[valid].mean().detach())


def test_each_control_block_has_its_own_weight() -> None:
    surgery = control()
    surgery["control"][0]["divergence"] = {"kind": "mse", "weight": 3.0}
    surgery["control"][1]["divergence"] = {"kind": "cosine", "weight": 0.5}
    model = double(perturbed(grafted("llama", surgery)))
    seen = branches(model)
    inputs = batch()
    out = model(**inputs)
    valid = inputs["attention_mask"].bool()
    (_, p0, e0, _), (_, p1, e1, _) = seen
    first = (0.5 * ((p0 - e0) ** 2).mean(-1))[valid].mean()
    second = (0.5 * (1 - torch.cosine_similarity(p1, e1, dim=-1)))[valid].mean()
    expected = cross_entropy(out.logits, inputs["labels"]) + (3.0 * first + 0.5 * second) / 2
    torch.testing.assert_close(out.loss, expected)


@pytest.mark.parametrize("kind", DISTANCES)
def test_divergence_is_exactly_zero_at_birth(kind: str) -> None:
    for interpolator in ("lerp", "moe", "dlerp", "proj"):
        out = grafted("qwen3", control(interpolator, divergence=kind)).train()(**batch())
        assert out.divergence_loss.item() == 0.0
        torch.testing.assert_close(out.loss, cross_entropy(out.logits, batch()["labels"]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", DISTANCES)
def test_divergence_pulls_the_expanded_branch_towards_the_pretrained_one(kind: str) -> None:
    """One small step down the divergence alone brings the branches closer; the pre-trained one feels nothing."""
    model = perturbed(grafted("llama", control(layers=(0,), divergence=kind, weight=1.0))).train()
    plain = perturbed(grafted("llama", control(layers=(0,), divergence="none"))).train()
    with_divergence, without = model(**batch()), plain(**batch())
    with_divergence.loss.backward()
    without.loss.backward()
    task = dict(plain.named_parameters())
    pull = {name: parameter.grad - task[name].grad for name, parameter in model.named_parameters()}
    inside = {name for name in pull if ".expanded." in name}
    # The embedding feeds both branches and hears of it from the expanded one.
    felt = {name for name in pull if pull[name].abs().max() > 1e-6} - {"model.embed_tokens.weight"}
    assert felt == inside
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in inside:
                parameter.sub_(1e-3 * pull[name])
    assert model(**batch()).divergence_loss < with_divergence.divergence_loss


def test_divergence_does_not_count_padding() -> None:
    model = perturbed(grafted("llama", control())).train()
    inputs = batch()
    scrambled = inputs | {"input_ids": inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, 77)}
    assert not torch.equal(inputs["input_ids"], scrambled["input_ids"])
    torch.testing.assert_close(model(**inputs).divergence_loss, model(**scrambled).divergence_loss)


def test_padding_is_read_from_every_kind_of_mask() -> None:
    flat = batch()["attention_mask"]
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    boolean = (causal & flat.bool()[:, None, :])[:, None]
    additive = torch.zeros(boolean.shape).masked_fill(~boolean, torch.finfo(torch.float32).min)
    for mask in (flat, boolean, additive):
        assert torch.equal(valid_tokens(mask, flat.shape, flat.device), flat.bool())
    shared = valid_tokens(causal[None, None], flat.shape, flat.device)
    assert torch.equal(valid_tokens(None, flat.shape, flat.device), shared)
    kinds = {"sliding_attention": additive}, {"sliding_attention": additive, "full_attention": boolean}
    for masks, expected in zip(kinds, (additive, boolean), strict=True):
        assert given_tokens({"input_ids": flat, "attention_mask": masks}, None)[1] is expected
    assert shared.all() and shared.shape == flat.shape
    with pytest.raises(ValueError, match="two-dimensional"):
        valid_tokens("causal", flat.shape, flat.device)


def test_a_four_dimensional_mask_gives_the_same_loss() -> None:
    model = perturbed(grafted("llama", control())).train()
    inputs = batch()
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    ready = {
        "attention_mask": (causal & inputs["attention_mask"].bool()[:, None, :])[:, None],
        "position_ids": torch.arange(LENGTH)[None],
    }
    torch.testing.assert_close(model(**inputs | ready).divergence_loss, model(**inputs).divergence_loss)


def test_every_divergence_that_can_be_named_is_computed() -> None:
    assert {*DISTANCES, "none"} == set(DIVERGENCES)


@pytest.mark.parametrize("kind", DISTANCES)
def test_gradients_of_the_divergence(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    p, e = (torch.randn(2, 5, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    alpha = torch.rand(2, 5, 1, generator=generator, dtype=torch.float64)
    valid = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool()
    mine = [x.clone().requires_grad_() for x in (p, e, alpha)]
    theirs = [x.clone().requires_grad_() for x in (p, e, alpha)]
    divergence(kind, *mine, valid).backward()
    if kind == "mse":
        distance = (theirs[0] - theirs[1]).pow(2).sum(-1) / 6
    else:
        distance = 1 - (theirs[0] * theirs[1]).sum(-1) / (theirs[0].norm(dim=-1) * theirs[1].norm(dim=-1))
    ((theirs[2].squeeze(-1) * distance) * valid).sum().div(valid.sum()).backward()
    for ours, expected in zip(mine, theirs, strict=True):
        torch.testing.assert_close(ours.grad, expected.grad)


def test_gradients_of_the_local_losses() -> None:
    """Through a whole model: the loss with and without them differs by the reference's gradient."""
    inputs, domains = batch(), torch.tensor([0, 1, 0])
    valid = inputs["attention_mask"].bool()
    original, new = valid & (domains == 0)[:, None], (domains > 0).double()[:, None].expand(3, LENGTH)

    def gradients(local: bool) -> dict[str, Tensor]:
        model = double(perturbed(grafted("llama", adapters("sigmoid", l1=0.5, cross_entropy=0.25))))
        seen = adapter_outputs(model)
        if local:
            model(**inputs, domain_ids=domains).loss.backward()
        else:
            out = model(**inputs)
            l1 = sum((adapted.abs().sum(-1) / adapted.shape[-1])[original].mean() for adapted, _ in seen) / 2
            gates = [torch.sigmoid(score.squeeze(-1)) for _, score in seen]
            ce = sum(-(new * g.log() + (1 - new) * (1 - g).log())[valid].mean() for g in gates) / 2
            (out.loss + 0.5 * l1 + 0.25 * ce).backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    mine, theirs = gradients(local=True), gradients(local=False)
    for name, gradient in theirs.items():
        torch.testing.assert_close(mine[name], gradient, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("per_token", [False, True])
def test_local_losses_follow_the_equations(per_token: bool) -> None:
    model = double(perturbed(grafted("llama", both())))
    seen = adapter_outputs(model)
    inputs = batch()
    domains = torch.tensor([0, 2, 0])
    if per_token:
        domains = torch.randint(0, 3, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    out = model(**inputs, domain_ids=domains)

    valid = inputs["attention_mask"].bool()
    spread = domains if per_token else domains[:, None].expand(3, LENGTH)
    original, new = valid & (spread == 0), (spread > 0).double()
    assert len(seen) == 3
    l1 = torch.stack([(adapted.abs().sum(-1) / adapted.shape[-1])[original].mean() for adapted, _ in seen]).mean()
    gates = [torch.sigmoid(score.squeeze(-1)) for _, score in seen]
    classified = torch.stack([-(new * g.log() + (1 - new) * (1 - g).log())[valid].mean() for g in gates]).mean()
    torch.testing.assert_close(out.local_l1_loss, l1.detach())
    torch.testing.assert_close(out.local_cross_entropy_loss, classified.detach())
    expected = cross_entropy(out.logits, inputs["labels"]) + out.divergence_loss + 0.5 * l1 + 0.25 * classified
    torch.testing.assert_close(out.loss, expected)


def test_l1_ignores_new_domains_and_padding() -> None:
    """Whatever stands in new-domain samples or in padding, the term stays; in the original domain it does not."""
    model = perturbed(grafted("llama", adapters("relu", l1=0.1))).train()
    inputs, domains = batch(), torch.tensor([0, 1, 0])
    expected = model(**inputs, domain_ids=domains).local_l1_loss
    assert expected > 0

    def changed(place: Any) -> Tensor:
        ids = inputs["input_ids"].clone()
        ids[place] = (ids[place] + 50) % 120 + 3
        return model(**inputs | {"input_ids": ids}, domain_ids=domains).local_l1_loss

    torch.testing.assert_close(changed(1), expected)
    torch.testing.assert_close(changed(inputs["attention_mask"] == 0), expected)
    assert (changed(2) - expected).abs() > 1e-4
    assert model(**inputs, domain_ids=torch.ones(3, dtype=torch.long)).local_l1_loss == 0


def test_l1_gradient_shrinks_the_adapters_output() -> None:
    """With a task loss that sees nothing, a step down the gradient quietens the adapter on its original domain."""
    model = perturbed(grafted("llama", adapters("relu", l1=1.0))).train()
    inputs = batch()
    inputs["labels"] = torch.full_like(inputs["labels"], -100)
    inputs["labels"][0, -1] = inputs["input_ids"][0, -1]
    before = model(**inputs, domain_ids=torch.zeros(3, dtype=torch.long))
    (before.loss - model(**inputs).loss).backward()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".adapter." in name:
                parameter.sub_(1e-2 * parameter.grad)
    assert model(**inputs, domain_ids=torch.zeros(3, dtype=torch.long)).local_l1_loss < before.local_l1_loss


def test_off_in_eval_and_without_labels() -> None:
    model = perturbed(grafted("llama", both()))
    inputs, domains = batch(), torch.tensor([0, 1, 0])
    out = model(**inputs, domain_ids=domains)
    torch.testing.assert_close(out.loss, cross_entropy(out.logits, inputs["labels"]))
    assert {"divergence_loss", "local_l1_loss", "local_cross_entropy_loss"}.isdisjoint(out.keys())
    inputs.pop("labels")
    out = model.train()(**inputs, domain_ids=domains)
    assert out.loss is None
    assert out.divergence_loss is None


def test_outputs_are_tuples_where_asked() -> None:
    model = perturbed(grafted("llama", both())).train()
    inputs = batch() | {"domain_ids": torch.tensor([0, 1, 0])}
    named = model(**inputs)
    plain = model(**inputs, return_dict=False)
    assert isinstance(plain, tuple)
    assert torch.equal(plain[0], named.loss)
    assert torch.equal(plain[-1], named.local_cross_entropy_loss)


def test_without_domain_ids_the_local_loss_is_off_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    warning_once.cache_clear()
    model = perturbed(grafted("llama", adapters("relu", l1=0.1))).train()
    logger = logging.getLogger("transformers")
    logger.propagate, before = True, logger.propagate
    try:
        with caplog.at_level(logging.WARNING):
            outs = [model(**batch()) for _ in range(3)]
    finally:
        logger.propagate = before
    assert sum("domain_ids" in record.getMessage() for record in caplog.records) == 1
    assert all(out.local_l1_loss is None for out in outs)
    torch.testing.assert_close(outs[0].loss, cross_entropy(outs[0].logits, batch()["labels"]))


def test_scaled_under_gradient_accumulation() -> None:
    """Micro-batches normalised by `num_items_in_batch` add up to the label-weighted mean of their losses."""
    model = double(perturbed(grafted("llama", both())))
    inputs = batch() | {"domain_ids": torch.tensor([0, 1, 0])}
    parts = [{name: value[i : i + 1] for name, value in inputs.items()} for i in range(3)]
    counts = torch.tensor([(part["labels"][:, 1:] != -100).sum() for part in parts])
    assert len(set(counts.tolist())) > 1
    alone = torch.stack([model(**part).loss for part in parts])
    for total in (counts.sum(), int(counts.sum())):
        accumulated = torch.stack([model(**part, num_items_in_batch=total).loss for part in parts])
        torch.testing.assert_close(accumulated, alone * counts / counts.sum())
    shifted = torch.nn.functional.pad(parts[0]["labels"], (0, 1), value=-100)[:, 1:]
    same = model(**parts[0], shift_labels=shifted, num_items_in_batch=counts.sum()).loss
    torch.testing.assert_close(same, alone[0] * counts[0] / counts.sum())


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_sequence_classifiers_get_them_too(family: str) -> None:
    torch.manual_seed(0)
    surgery = both()
    # In layer 4 the twin alone has one.
    surgery["adapters"] = [each for each in surgery["adapters"] if each["layer"] != 4]
    model = perturbed(
        classes(family, "ForSequenceClassification", surgery)(config(family, surgery, num_labels=3))
    ).train()
    inputs = batch() | {"labels": torch.tensor([0, 2, 1]), "domain_ids": torch.tensor([0, 1, 0])}
    heard: list[torch.Tensor] = []
    for module in model.modules():
        if hasattr(module, "opening"):
            module.register_forward_hook(lambda _module, _given, made: heard.append(made[0]))
    out = model(**inputs)
    original = inputs["attention_mask"].bool() & (inputs["domain_ids"] == 0)[:, None]
    loud = torch.stack([made.abs().mean(dim=-1)[original].mean() for made in heard])
    assert len(loud) == 2
    torch.testing.assert_close(out.local_l1_loss, loud.mean())
    task = torch.nn.functional.cross_entropy(out.logits, inputs["labels"])
    auxiliary = out.divergence_loss + 0.5 * out.local_l1_loss + 0.25 * out.local_cross_entropy_loss
    assert out.divergence_loss > 0
    torch.testing.assert_close(out.loss, task + auxiliary)
    out.loss.backward()
    assert model.model.layers[4].expanded.mlp.adapter.down_proj.weight.grad.any()
    assert len(model.model.layers) == TRUNK
