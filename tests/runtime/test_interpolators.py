"""Interpolators: what holds of every one, and those of the paper and its code against their equations in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from surgeon.runtime.births import Normal
from surgeon.runtime.control import Interpolator
from surgeon.runtime.interpolators import INTERPOLATORS, Interpolation, InterpolatorSpec

WIDTH = 8
ALPHA = 0.3
# As near to no and to the whole share as a logit may be.
LITTLE = 1e-9


RULES: dict[str, Interpolation] = {rule.key: rule for rule in INTERPOLATORS}
SCALAR_ALPHA = [rule.key for rule in INTERPOLATORS if rule.scalar_alpha]
# A gate that is born with random numbers has no one α to begin with.
STATED = [rule.key for rule in INTERPOLATORS if not any(isinstance(b, Normal) for b in rule.matrices(WIDTH).values())]


def build_interpolator(spec: InterpolatorSpec, width: int) -> Interpolator:
    return Interpolator(RULES[spec.kind], spec, width)


def test_every_interpolator_has_a_key_of_its_own() -> None:
    assert len(RULES) == len(INTERPOLATORS)


def made(kind: str, *, noise: float = 0.5, **spec: Any) -> Interpolator:
    """A float64 interpolator, born and then disturbed."""
    torch.manual_seed(5)
    module = build_interpolator(InterpolatorSpec(kind=kind, **({"alpha": ALPHA} | spec)), WIDTH).double()
    module.initialise()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module


def states(seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Input, pre-trained and expanded states, 2 × 5 × WIDTH."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(2, 5, WIDTH, generator=generator, dtype=torch.float64) for _ in range(3)]
    return made[0].to(dtype), made[1].to(dtype), made[2].to(dtype)


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def share(named: dict[str, Tensor]) -> Tensor | float:
    """α of the interpolators with one α."""
    return sigmoid(named["logit"]) if "logit" in named else ALPHA


def lerp(named: dict[str, Tensor], h: Tensor, p: Tensor, e: Tensor) -> Tensor:
    return (1 - share(named)) * p + share(named) * e


def plerp(named: dict[str, Tensor], h: Tensor, p: Tensor, e: Tensor) -> Tensor:
    lateral = torch.eye(WIDTH, dtype=torch.float64) + named["weight"]
    return (1 - share(named)) * torch.einsum("dc,btc->btd", lateral, p) + share(named) * e


def slerp(named: dict[str, Tensor], h: Tensor, p: Tensor, e: Tensor) -> Tensor:
    cosine = (p * e).sum(-1, keepdim=True) / (p.norm(dim=-1, keepdim=True) * e.norm(dim=-1, keepdim=True))
    theta, alpha = torch.acos(cosine), share(named)
    return (torch.sin((1 - alpha) * theta) * p + torch.sin(alpha * theta) * e) / torch.sin(theta)


def bias(named: dict[str, Tensor]) -> Tensor | float:
    return named.get("bias", math.log(ALPHA / (1 - ALPHA)))


def dlerp(named: dict[str, Tensor], h: Tensor, p: Tensor, e: Tensor) -> Tensor:
    alpha = sigmoid((torch.cat([p, e], -1) * named["weight"]).sum(-1, keepdim=True) + bias(named))
    return (1 - alpha) * p + alpha * e


def dlerp_in(named: dict[str, Tensor], h: Tensor, p: Tensor, e: Tensor) -> Tensor:
    alpha = sigmoid((h * named["weight"]).sum(-1, keepdim=True) + bias(named))
    return (1 - alpha) * p + alpha * e


# Of the paper and its public code; of any other one, the tests of every interpolator say whether it is one.
EQUATIONS = {"lerp": lerp, "proj": lerp, "plerp": plerp, "slerp": slerp, "dlerp": dlerp, "dlerp_in": dlerp_in}


@pytest.mark.parametrize("learnable", [False, True])
@pytest.mark.parametrize("kind", EQUATIONS)
def test_forward_and_gradients_follow_the_equation(kind: str, learnable: bool) -> None:
    module = made(kind, learnable=learnable)
    inputs = [state.requires_grad_() for state in states()]
    combined, _ = module(*inputs)
    named = {name: parameter.detach().clone().requires_grad_() for name, parameter in module.named_parameters()}
    twins = [state.detach().clone().requires_grad_() for state in inputs]
    expected = EQUATIONS[kind](named, *twins)
    torch.testing.assert_close(combined, expected, rtol=1e-10, atol=1e-12)

    direction = states(seed=9)[0]
    (combined * direction).sum().backward()
    (expected * direction).sum().backward()
    for mine, theirs in zip(inputs, twins, strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-8, atol=1e-10)
    for name, parameter in module.named_parameters():
        if kind == "proj" and name == "weight":  # trains through the divergence alone
            assert parameter.grad is None
        else:
            torch.testing.assert_close(parameter.grad, named[name].grad, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("kind", [rule.key for rule in INTERPOLATORS if "logit" in rule.learned(0.5)])
def test_a_tensor_called_logit_is_the_log_odds_of_alpha(kind: str) -> None:
    """`merge_branches` takes σ(logit) for the learned α, whatever the interpolator."""
    module = made(kind, learnable=True)
    _, alpha = module(*states())
    torch.testing.assert_close(alpha, sigmoid(module.logit))


@pytest.mark.parametrize("learnable", [False, True])
@pytest.mark.parametrize("kind", RULES)
def test_both_branches_have_a_share_that_alpha_sets(kind: str, learnable: bool) -> None:
    """Whatever the interpolator: α is what it says, each branch gets a gradient, and so does every tensor it learns."""
    h, p, e = (state.requires_grad_() for state in states())
    torch.manual_seed(5)
    module = build_interpolator(InterpolatorSpec(kind=kind, alpha=ALPHA, learnable=learnable), WIDTH).double()
    module.initialise()
    combined, alpha = module(h, p, e)
    alpha = torch.as_tensor(alpha, dtype=torch.float64)
    assert (alpha.numel() == 1) == RULES[kind].scalar_alpha
    if kind in STATED:
        torch.testing.assert_close(alpha, torch.full_like(alpha, ALPHA), rtol=1e-6, atol=1e-6)
    (combined * states(seed=9)[0]).sum().backward(retain_graph=True)
    assert p.grad is not None and p.grad.abs().max() > 0
    assert e.grad is not None and e.grad.abs().max() > 0
    ((module.anchor(p) * e).sum() + alpha.sum()).backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("kind", RULES)
def test_the_share_leads_from_the_pretrained_branch_to_the_expanded_one(kind: str) -> None:
    h, p, e = states()
    apart = []
    for alpha in (LITTLE, 0.2, 0.8, 1 - LITTLE):
        with torch.no_grad():
            combined, _ = made(kind, noise=0.0, alpha=alpha)(h, p, e)
        apart.append(float((combined - e).norm()))
        if alpha == LITTLE:
            torch.testing.assert_close(combined, p, rtol=1e-6, atol=1e-6)
    assert apart == sorted(apart, reverse=True)
    assert apart[-1] < 1e-6


@pytest.mark.parametrize("kind", RULES)
def test_a_token_has_a_share_of_its_own_whatever_was_learned(kind: str) -> None:
    """α is a share however far its tensors move, and no token sees another, as a cache shows them one by one."""
    inputs = states()
    module = made(kind, noise=5.0, learnable=True).eval()
    with torch.no_grad():
        combined, alpha = module(*inputs)
        last, _ = module(*(state[:, -1:] for state in inputs))
    assert bool(((torch.as_tensor(alpha) >= 0) & (torch.as_tensor(alpha) <= 1)).all())
    torch.testing.assert_close(combined[:, -1:], last, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", [rule.key for rule in INTERPOLATORS if not rule.unmergeable] + ["dlerp", "dlerp_in"])
def test_branches_that_can_be_merged_are_joined_in_a_straight_line(kind: str) -> None:
    """`merge_branches` makes p + α (e − p) of the weights, whatever the interpolator."""
    h, p, e = states()
    combined, alpha = made(kind, learnable=True)(h, p, e)
    torch.testing.assert_close(combined, p + alpha * (e - p), rtol=1e-12, atol=1e-12)


def test_moe_takes_one_branch_whole_and_its_gate_learns_straight_through() -> None:
    module = made("moe", learnable=True)
    h, p, e = (state.requires_grad_() for state in states())
    combined, probability = module(h, p, e)

    scores = torch.einsum("kd,btd->btk", module.weight, h) + module.bias
    soft = torch.exp(scores) / torch.exp(scores).sum(-1, keepdim=True)
    chosen = soft.argmax(-1, keepdim=True) == 1
    assert 0 < chosen.sum() < chosen.numel()
    assert torch.equal(combined, torch.where(chosen, e, p))
    torch.testing.assert_close(probability, soft[..., 1:], rtol=1e-12, atol=0)

    direction = states(seed=9)[0]
    (combined * direction).sum().backward()
    # Straight through: the choice's gradient ⟨g, e − p⟩ goes to π₁, whose scores' Jacobian is π₀π₁ (−1, 1).
    to_choice = (direction * (e - p)).sum(-1)
    to_scores = (soft[..., 0] * soft[..., 1] * to_choice)[..., None] * torch.tensor([-1.0, 1.0]).double()
    torch.testing.assert_close(module.weight.grad, torch.einsum("btk,btd->kd", to_scores, h))
    torch.testing.assert_close(module.bias.grad, to_scores.sum((0, 1)))
    torch.testing.assert_close(e.grad, torch.where(chosen, direction, torch.zeros_like(direction)))
    torch.testing.assert_close(p.grad, torch.where(chosen, torch.zeros_like(direction), direction))


def test_a_fresh_moe_gives_tokens_to_both_branches() -> None:
    module = build_interpolator(InterpolatorSpec(kind="moe"), 512)
    torch.manual_seed(0)
    module.initialise()
    assert abs(module.weight.std().item() / math.sqrt(1 / (3 * 512)) - 1) < 0.1
    _, probability = module(*(torch.randn(1, 400, 512) for _ in range(3)))
    assert 0.3 < (probability >= 0.5).float().mean() < 0.7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("kind", RULES)
def test_equal_branches_pass_unchanged_whatever_alpha_is(kind: str, alpha: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = build_interpolator(InterpolatorSpec(kind=kind, alpha=alpha, learnable=True), 64).to(dtype)
    module.initialise()
    h, p = torch.randn(2, 33, 64, dtype=dtype), 30 * torch.randn(2, 33, 64, dtype=dtype)
    combined, _ = module(h, p, p.clone())
    assert torch.equal(combined, p)


@pytest.mark.parametrize("kind", SCALAR_ALPHA)
@pytest.mark.parametrize("trained, inferred", [(0.0, 0.5), (1.0, 0.5), (0.5, 1.0)])
def test_alpha_of_training_and_of_inference(kind: str, trained: float, inferred: float) -> None:
    module = made(kind, noise=0.0, alpha=trained, inference_alpha=inferred)
    fixed = {alpha: made(kind, noise=0.0, alpha=alpha) for alpha in (trained, inferred)}
    inputs = states()
    assert torch.equal(module.train()(*inputs)[0], fixed[trained](*inputs)[0])
    assert torch.equal(module.eval()(*inputs)[0], fixed[inferred](*inputs)[0])
    assert not torch.equal(fixed[trained](*inputs)[0], fixed[inferred](*inputs)[0])


@pytest.mark.parametrize("kind", RULES)
def test_gradients_are_finite_on_equal_and_on_opposite_branches(kind: str) -> None:
    module = made(kind, learnable=True)
    h, p, _ = states()
    for e in (p.clone(), -p, p + 1e-9):
        expanded = e.requires_grad_()
        combined, _ = module(h, p, expanded)
        combined.sum().backward()
        assert torch.isfinite(combined).all()
        assert torch.isfinite(expanded.grad).all()


def test_slerp_keeps_the_norm_where_lerp_does_not() -> None:
    p = torch.nn.functional.normalize(states()[1], dim=-1)
    e = torch.nn.functional.normalize(states()[2], dim=-1)
    norms = made("slerp")(p, p, e)[0].norm(dim=-1)
    torch.testing.assert_close(norms, torch.ones_like(norms))
    assert (made("lerp")(p, p, e)[0].norm(dim=-1) < 0.99).all()


@pytest.mark.parametrize("kind", RULES)
def test_the_anchor_is_the_pretrained_branch_and_sends_it_no_gradient(kind: str) -> None:
    _, p, _ = states()
    p.requires_grad_()
    assert torch.equal(made(kind, noise=0.0).anchor(p), p)
    anchor = made(kind).anchor(p)
    assert anchor.requires_grad == RULES[kind].projects
    if RULES[kind].projects:
        anchor.sum().backward()
    else:
        assert torch.equal(anchor, p)
    assert p.grad is None


def test_the_anchor_of_proj_is_projected() -> None:
    _, p, _ = states()
    module = made("proj")
    torch.testing.assert_close(module.anchor(p), p + torch.einsum("dc,btc->btd", module.weight, p))
