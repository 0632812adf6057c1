"""Only the grafts train, all of them train, and checkpointing, threads and compilation change nothing."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from tests import tiny
from tests.runtime.grafting import (
    adapters,
    both,
    control,
    every_graft,
    every_graft_in,
    everything,
    experts,
    grafted,
    inserted,
    perturbed,
    tokens,
    with_copies,
)


def batch(seed: int = 5, length: int = 10) -> dict[str, torch.Tensor]:
    ids = tokens(2, length, seed=seed)
    return {"input_ids": ids, "labels": ids, "domain_ids": torch.tensor([0, 1])}


def gradients(model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(**inputs).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_gradients_reach_every_new_parameter_and_no_other(family: str) -> None:
    base = tiny.model(family)
    for graft, surgery in every_graft_in(family, "llama").items():
        model = perturbed(grafted(family, surgery, base=base)).train()
        names = model.freeze_base()
        whole = tuple(f"model.layers.{layer}." for layer in inserted(surgery))
        known = {name for name in with_copies(base.state_dict(), surgery) if not name.startswith(whole)}
        # A gate is fitted, by no gradient.
        every = [name for name, _ in model.named_parameters() if "domain_gate." not in name]
        new = [name for name in every if name not in known]
        assert names == new == model.graft_parameter_names(), graft
        assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == set(new), graft
        # Enough tokens that every ReLU gate opens at some.
        found = gradients(model, batch(length=48))
        assert set(found) == set(new), graft
        silent = [name for name, gradient in found.items() if not gradient.any() or not gradient.isfinite().all()]
        assert not silent, (graft, silent)


def test_first_steps_from_birth_bring_every_parameter_to_life() -> None:
    """At birth e = p and the adapters' output is zero, so some gradients are zero; no graft may stay so."""
    for graft, surgery in every_graft().items():
        model = grafted("llama", surgery).train()
        model.freeze_base()
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
        for step in range(3):
            model.zero_grad()
            model(**batch(step)).loss.backward()
            optimiser.step()
        moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
        assert moved == set(model.graft_parameter_names()), graft


def test_inserted_layers_train_and_frozen_grafts_do_not() -> None:
    surgery = both() | {"new_layers": [2]}
    surgery["control"][0]["frozen"] = True
    surgery["adapters"][0]["frozen"] = True
    model = grafted("llama", surgery)
    names = set(model.freeze_base())
    parts = {name.removeprefix("model.layers.").split(".")[0] for name in names}
    assert parts == {"2", "4"}
    assert {f"model.layers.2.{name}" for name, _ in model.model.layers[2].named_parameters()} <= names
    assert not any(name.startswith("model.layers.4.self_attn") for name in names)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3"])
def test_checkpointing_gives_the_same_gradients(family: str, reentrant: bool, frozen: bool) -> None:
    for surgery in (everything(), control("moe"), adapters("relu", layers=(3,), l1=0.1)):
        model = perturbed(grafted(family, surgery)).train()
        if frozen:
            model.freeze_base()
        plain = gradients(model, batch())
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        assert any(layer.gradient_checkpointing for layer in model.model.layers)
        branches = [module for module in model.modules() if type(module).__name__.endswith("Branch")]
        assert bool(branches) == ("control" in surgery)
        # Switched on as everywhere; while their layers run they are not checkpointed once more.
        assert all(module.gradient_checkpointing for module in branches)
        again = gradients(model, batch())
        assert plain.keys() == again.keys()
        for name, gradient in plain.items():
            # Reentrant checkpointing adds the parts of a gradient in another order.
            atol = 1e-5 * max(1.0, gradient.abs().max().item())
            torch.testing.assert_close(again[name], gradient, rtol=1e-4, atol=atol, msg=name)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_branches_are_not_computed_twice_more_by_checkpointing() -> None:
    model = perturbed(grafted("llama", control(layers=(2,)))).train()
    calls: list[int] = []
    model.model.layers[2].expanded.register_forward_hook(lambda *_: calls.append(1))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model(**batch()).loss.backward()
    assert len(calls) == 2  # once forward, once when the layer is run again


def test_threads_do_not_meet() -> None:
    model = perturbed(grafted("llama", everything())).train()
    expected = {seed: model(**batch(seed)).loss.item() for seed in range(24)}
    wrong: list[int] = []

    def work(seeds: range) -> None:
        wrong.extend(seed for seed in seeds if model(**batch(seed)).loss.item() != expected[seed])

    workers = [threading.Thread(target=work, args=(range(k, 24, 4),)) for k in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    "graft, training",
    [("lerp and adapters", False), ("adapted branch", True), ("experts", True)],
)
def test_compiles_without_a_graph_break(graft: str, training: bool) -> None:
    """Of two layers, as compiling takes its time for each."""
    surgeries = {
        "lerp and adapters": adapters("relu", layers=(0, 1), l1=0.1) | control(layers=(1,), trunk=2),
        "adapted branch": adapters("sigmoid", layers=(0, 1, 2), l1=0.5, cross_entropy=0.25)
        | control("moe", layers=(1,), trunk=2),
        "experts": experts(threshold=1, groups=(0, 1), task_id=0.5, trunk=2),
    }
    model = perturbed(grafted("llama", surgeries[graft], num_hidden_layers=2)).train(training)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    inputs = batch()
    expected, got = model(**inputs), compiled(**inputs)
    torch.testing.assert_close(got.loss, expected.loss)
    torch.testing.assert_close(got.logits, expected.logits)


def test_resized_embeddings_keep_the_function_of_old_tokens() -> None:
    model = perturbed(grafted("qwen3", both()))
    ids = tokens()
    before = model(ids).logits
    model.resize_token_embeddings(144, mean_resizing=False)
    after = model(ids).logits
    assert after.shape[-1] == 144
    torch.testing.assert_close(after[..., :128], before)
