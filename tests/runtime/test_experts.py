"""PMoE's slots and router against the paper's equations in float64, and what adding a slot keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from surgeon.runtime.experts import ExpertLinear, ExpertRouter, task_loss
from surgeon.runtime.experts_rules import RouterSlotSpec, RouterSpec, SlotSpec
from surgeon.runtime.graft import Frame, here
from tests import tiny
from tests.runtime.grafting import TRUNK, classes, config, experts, grafted, perturbed, tokens


def randomised(module: torch.nn.Module, seed: int = 2) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module


def normal(*shape: int, seed: int = 4) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("groups", [(0, 0, 0), (0, 0, 1), (0, 1, 2)])
@pytest.mark.parametrize("ranks", [(2, 2, 2), (1, 3, 2)])
def test_weighted_slots_follow_equation_5(groups: tuple[int, ...], ranks: tuple[int, ...], bias: bool) -> None:
    scales = (1.0, 0.5, 2.0)
    specs = [
        SlotSpec(slot=k, rank=rank, targets=("x",), scale=scale, group=group)
        for k, (rank, scale, group) in enumerate(zip(ranks, scales, groups, strict=True))
    ]
    module = randomised(ExpertLinear(torch.nn.Linear(6, 7, bias=bias), specs, routed=True).double())
    x, routing = normal(2, 5, 6).requires_grad_(), torch.softmax(normal(2, 5, 3, seed=5), -1).requires_grad_()
    previous, here.frame = here.frame, Frame(routing=routing)
    try:
        output = module(x)
    finally:
        here.frame = previous

    named = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
    x2, g2 = x.detach().clone().requires_grad_(), routing.detach().clone().requires_grad_()
    expected = x2 @ named["weight"].T + (named["bias"] if bias else 0)
    for k, scale in enumerate(scales):
        delta = scale * named[f"slots.{k}.lora_B"] @ named[f"slots.{k}.lora_A"]
        expected = expected + g2[..., k : k + 1] * (x2 @ delta.T)
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-12)
    direction = normal(*output.shape, seed=9)
    (output * direction).sum().backward()
    (expected * direction).sum().backward()
    torch.testing.assert_close(x.grad, x2.grad, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(routing.grad, g2.grad, rtol=1e-9, atol=1e-10)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, named[name].grad, rtol=1e-9, atol=1e-10)


def of_one_group(*, frozen: tuple[int, ...], dropout: float) -> Any:
    """A module with three slots of one group."""
    specs = [SlotSpec(slot=k, rank=4, targets=("x",), scale=1.0, dropout=dropout, frozen=k in frozen) for k in range(3)]
    return randomised(ExpertLinear(torch.nn.Linear(64, 64), specs, routed=False))


def test_which_slots_are_frozen_changes_no_bit_outside_of_training() -> None:
    """A later surgery freezes slots whose dropout, in training, set them apart."""
    x = normal(16, 64).float()
    outputs = [of_one_group(frozen=frozen, dropout=0.5).eval()(x) for frozen in ((), (0,), (0, 1), (0, 1, 2))]
    assert all(torch.equal(output, outputs[0]) for output in outputs)


@pytest.mark.parametrize("frozen", [(0,), (2,)])
def test_dropout_is_on_the_input_of_slots_that_train(frozen: tuple[int, ...]) -> None:
    x = normal(16, 64).float()
    module = of_one_group(frozen=frozen, dropout=0.5).train()
    assert not torch.equal(module(x), module(x))
    with torch.no_grad():
        for k in set(range(3)) - set(frozen):
            module.slots[str(k)].lora_B.zero_()
    assert torch.equal(module(x), module(x))
    torch.testing.assert_close(module(x), module.eval()(x))


def test_a_matrix_that_is_split_over_devices_is_refused() -> None:
    """As transformers' tensor parallelism does, which shows a module a part of its inputs or takes a part of them."""
    module = ExpertLinear(torch.nn.Linear(8, 6), [SlotSpec(0, 2, ("q_proj",))], routed=False)
    for part, width in ((module.weight[:3], 8), (module.weight[:, :4], 4)):
        module.weight, module.bias = torch.nn.Parameter(part.detach().clone()), None
        with pytest.raises(RuntimeError, match=r"split over devices .* load the model without `tp_plan`"):
            module(torch.ones(1, 2, width))


def test_router_is_a_softmax_over_linear_scores() -> None:
    router = randomised(ExpertRouter(RouterSpec(3, tuple(RouterSlotSpec(k) for k in range(4))), 6).double())
    h = normal(2, 5, 6)
    weights, logs = router(h)
    scores = h @ torch.cat([router.slots[str(k)].weight for k in range(4)]).T
    expected = torch.exp(scores) / torch.exp(scores).sum(-1, keepdim=True)
    torch.testing.assert_close(weights, expected)
    torch.testing.assert_close(logs, expected.log())


def test_the_slot_of_the_greatest_score_weighs_most() -> None:
    router = randomised(ExpertRouter(RouterSpec(3, tuple(RouterSlotSpec(k) for k in range(3))), 6).double())
    h = normal(2, 5, 6)
    scores = h @ torch.cat([router.slots[str(k)].weight for k in range(3)]).T
    assert torch.equal(router(h)[0].argmax(-1), scores.argmax(-1))


def test_a_later_group_enters_through_its_mass() -> None:
    columns = (RouterSlotSpec(0), RouterSlotSpec(1), RouterSlotSpec(2, group=1), RouterSlotSpec(3, group=2))
    router = randomised(ExpertRouter(RouterSpec(3, columns), 6).double())
    h = normal(2, 5, 6)
    with torch.no_grad():
        router.slots["2"].mass.fill_(0.25)
        router.slots["3"].mass.fill_(0.5)
    weights, logs = router(h)
    scores = [(h @ router.slots[str(k)].weight.T).squeeze(-1) for k in range(4)]

    def softmax(count: int) -> list[Tensor]:
        powers = [torch.exp(score) for score in scores[:count]]
        return [power / sum(powers) for power in powers]

    known = softmax(2)
    wider = softmax(3)
    known = [0.75 * old + 0.25 * new for old, new in zip(known, wider, strict=False)] + wider[2:]
    wider = softmax(4)
    known = [0.5 * old + 0.5 * new for old, new in zip(known, wider, strict=False)] + wider[3:]
    torch.testing.assert_close(weights, torch.stack(known, -1))
    torch.testing.assert_close(logs, torch.stack(softmax(4), -1).log())
    with torch.no_grad():
        router.slots["2"].mass.fill_(1.0)
        router.slots["3"].mass.fill_(1.0)
    torch.testing.assert_close(router(h)[0], torch.stack(softmax(4), -1), msg="with mass 1 it is the paper's")


def test_task_loss_is_equation_7_over_task_tokens() -> None:
    logs = torch.log_softmax(normal(2, 4, 3), -1)
    valid = torch.tensor([[True, True, True, False], [True, True, True, True]])
    domains = torch.tensor([[1, 3, 0, 2], [2, 2, 0, 1]])
    counted = [(0, 0, 0), (0, 1, 2), (1, 0, 1), (1, 1, 1), (1, 3, 0)]
    expected = -sum(logs[b, t, k] for b, t, k in counted) / len(counted)
    torch.testing.assert_close(task_loss(logs, valid, domains), expected.reshape(1))
    with pytest.raises(ValueError, match="go up to 4; there are 3 slots"):
        task_loss(logs, valid, domains + 1)


def added(model: Any, family: str, group: int) -> Any:
    """`model`, with slots 0 and 1, as it is after a further surgery gave it slot 2."""
    groups = (0, 0, group)
    surgery = experts(groups=groups, ranks=(3, 5, 4))
    wider = classes(family, "ForCausalLM", surgery)._from_config(config(family, surgery), dtype=model.dtype)
    missing, unexpected = wider.load_state_dict(model.state_dict(), strict=False)
    assert not unexpected and all(".slots.2." in name for name in missing)
    wider.tie_weights()
    return wider.eval()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_adding_a_slot_by_its_mass_keeps_every_bit(family: str, dtype: str) -> None:
    """Earlier slots are trained by then, so it is their function that must stay."""
    model = perturbed(grafted(family, experts(), dtype=dtype))
    ids = tokens()
    before = model(ids).logits
    assert not torch.equal(before, tiny.model(family, dtype=dtype)(ids).logits)
    torch.manual_seed(5)
    assert torch.equal(added(model, family, group=1)(ids).logits, before)
    torch.manual_seed(5)
    assert not torch.equal(added(model, family, group=0)(ids).logits, before), "the paper's softmax moves mass"


def test_an_added_slot_learns() -> None:
    """Its B, then its column, and the mass by which it takes weight from the old ones."""
    model = added(perturbed(grafted("llama", experts())), "llama", group=1).train()
    ids = tokens()
    model(ids, labels=ids).loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if ".slots.2." in name}
    assert gradients[f"model.layers.{TRUNK - 1}.mlp.down_proj.slots.2.lora_B"].abs().max() > 0
    assert gradients["model.layers.3.expert_router.slots.2.mass"].abs().max() > 0


def test_router_loss_is_added_and_reaches_the_router_alone() -> None:
    model = grafted("llama", experts(task_id=0.7)).train()
    ids = tokens()
    domains = torch.tensor([1, 2])
    plain = model(ids, labels=ids)
    out = model(ids, labels=ids, domain_ids=domains)
    assert plain.router_loss is None
    torch.testing.assert_close(out.loss, plain.loss + 0.7 * out.router_loss)
    hidden = model.model(ids, output_hidden_states=True).hidden_states[3]
    logs = model.model.layers[3].expert_router(hidden)[1]
    expected = -(logs[0, :, 0].sum() + logs[1, :, 1].sum()) / ids.numel()
    torch.testing.assert_close(out.router_loss, expected)
    with pytest.raises(ValueError, match="go up to 3; there are 2 slots"):
        model(ids, labels=ids, domain_ids=torch.tensor([3, 0]))


def test_all_deeper_layers_share_one_distribution() -> None:
    """The router reads h_τ, the output of layer τ, once for all."""
    model = perturbed(grafted("gemma2", experts(threshold=2)))
    ids = tokens()
    calls: list[Tensor] = []
    router = model.model.layers[2].expert_router
    router.register_forward_hook(lambda module, args, out: calls.append(args[0]))
    hidden = model.model(ids, output_hidden_states=True).hidden_states
    assert len(calls) == 1
    assert torch.equal(calls[0], hidden[2])
    assert [i for i, layer in enumerate(model.model.layers) if hasattr(layer, "expert_router")] == [2]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_no_logit_sees_a_later_token(family: str) -> None:
    model = perturbed(grafted(family, experts(threshold=2, groups=(0, 1))))
    ids = tokens(2, 12)
    changed = ids.clone()
    changed[:, 7:] = (changed[:, 7:] + 17) % 128
    assert torch.equal(model(changed).logits[:, :7], model(ids).logits[:, :7])
    assert (model(changed).logits[:, 7:] - model(ids).logits[:, 7:]).abs().max() > 1e-2


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_the_same_gradients(reentrant: bool) -> None:
    ids = tokens()
    gradients = []
    for checkpointed in (False, True):
        model = perturbed(grafted("llama", experts(task_id=0.5, groups=(0, 1)))).train()
        model.freeze_base()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model(ids, labels=ids, domain_ids=torch.tensor([1, 2]), use_cache=False).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert "model.layers.3.expert_router.slots.0.weight" in gradients[0]
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], atol=1e-6, rtol=1e-4, msg=name)
