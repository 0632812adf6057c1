"""Each interpolator against the paper's equation in float64, forward and gradients; exact on equal branches."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from surgeon.runtime import control
from surgeon.runtime.control import Interpolator
from surgeon.runtime.control_rules import INTERPOLATORS, InterpolatorSpec

WIDTH = 8
ALPHA = 0.3


CLASSES: dict[str, type[Interpolator]] = {rule.key: getattr(control, rule.module) for rule in INTERPOLATORS}
SCALAR_ALPHA = [rule.key for rule in INTERPOLATORS if rule.scalar_alpha]


def build_interpolator(spec: InterpolatorSpec, width: int) -> Interpolator:
    return CLASSES[spec.kind](spec, width)


def test_every_rule_is_the_one_of_its_class() -> None:
    assert all(kind.rule.key == key for key, kind in CLASSES.items())


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


EQUATIONS = {"lerp": lerp, "proj": lerp, "plerp": plerp, "slerp": slerp, "dlerp": dlerp, "dlerp_in": dlerp_in}
# A hard choice follows no equation with a gradient of its own; it has its own test.
CHOICES = ("moe",)


@pytest.mark.parametrize("learnable", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in CLASSES if kind not in CHOICES])
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
@pytest.mark.parametrize("kind", CLASSES)
def test_both_branches_have_a_share_that_alpha_sets(kind: str, learnable: bool) -> None:
    """Whatever the interpolator: α is what it says, each branch gets a gradient, and so does every tensor it learns."""
    h, p, e = (state.requires_grad_() for state in states())
    torch.manual_seed(5)
    module = build_interpolator(InterpolatorSpec(kind=kind, alpha=ALPHA, learnable=learnable), WIDTH).double()
    module.initialise()
    combined, alpha = module(h, p, e)
    alpha = torch.as_tensor(alpha, dtype=torch.float64)
    if kind not in CHOICES:
        torch.testing.assert_close(alpha, torch.full_like(alpha, ALPHA), rtol=1e-6, atol=1e-6)
    (combined * states(seed=9)[0]).sum().backward(retain_graph=True)
    assert p.grad is not None and p.grad.abs().max() > 0
    assert e.grad is not None and e.grad.abs().max() > 0
    ((module.anchor(p) * e).sum() + alpha.sum()).backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("kind", [kind for kind in CLASSES if kind not in CHOICES])
def test_a_greater_share_lies_nearer_to_the_expanded_branch(kind: str) -> None:
    h, p, e = states()
    apart = []
    for alpha in (0.2, 0.8):
        module = build_interpolator(InterpolatorSpec(kind=kind, alpha=alpha), WIDTH).double()
        module.initialise()
        with torch.no_grad():
            apart.append(float((module(h, p, e)[0] - e).norm()))
    assert apart[1] < 0.5 * apart[0]


@pytest.mark.parametrize("kind", [rule.key for rule in INTERPOLATORS if not rule.unmergeable])
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
@pytest.mark.parametrize("kind", CLASSES)
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


def test_slerp_has_finite_gradients_on_equal_and_on_opposite_branches() -> None:
    module = made("slerp", learnable=True)
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


def test_anchor_is_detached_and_projected_by_proj_alone() -> None:
    _, p, _ = states()
    p.requires_grad_()
    for kind in CLASSES:
        module = made(kind)
        anchor = module.anchor(p)
        if kind == "proj":
            torch.testing.assert_close(anchor, p + torch.einsum("dc,btc->btd", module.weight, p))
            anchor.sum().backward()
            assert module.weight.grad is not None
        else:
            assert torch.equal(anchor, p)
            assert not anchor.requires_grad
    assert p.grad is None
