"""Exactly what the manifest names trains, across surgeries; anything else stops before the first step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import surgeon
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.errors import BadInput
from surgeon.manifest.manifest import Manifest
from surgeon.manifest.reading import parse
from surgeon.manifest.trainable import TrainableSet, trainable_set
from surgeon.models.load import load_model
from surgeon.training.config.settings import Settings
from surgeon.training.steps import optimizer as stepping
from surgeon.training.steps import trainer
from surgeon.training.steps.optimizer import MasterAdamW, make_schedule
from surgeon.training.trainable.trainable_set import TrainedParameters, WrongSet, check_set, unfreeze
from tests import tiny


def opened(path: Path) -> tuple[CheckpointFolder, Manifest]:
    folder = CheckpointFolder.open(path)
    return folder, parse(folder.manifest, file="surgery.json")


@pytest.mark.parametrize(
    "plan", ["llama-pro", "neutral-residues", "control-llm", "mixture-of-control", "pmoe", "pmoe/next-task"]
)
def test_last_surgery_is_what_the_model_itself_would_train(tmp_path: Path, plan: str) -> None:
    base = tiny.base_for(plan, tmp_path)
    surgeon.apply(plan, str(base), tmp_path / "out")
    folder, manifest = opened(tmp_path / "out")
    wanted = trainable_set(folder, manifest, "last")
    model = load_model(tmp_path / "out")
    names = unfreeze(model, wanted, base_names=folder.tensors)
    assert set(names) == set(manifest.new_tensors)
    if hasattr(model, "graft_parameter_names"):
        assert names == model.graft_parameter_names()
    # Every one of them is reached by a gradient, and nothing else is.
    ids = torch.randint(3, 120, (2, 12), generator=torch.Generator().manual_seed(0))
    domains = {"domain_ids": torch.tensor([0, 1])} if hasattr(model, "surgery") else {}
    model.train()(input_ids=ids, labels=ids, **domains).loss.backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} <= set(names)


def test_all_surgeries_and_single_operations(tmp_path: Path) -> None:
    tiny.checkpoint(tmp_path / "base", "llama")
    surgeon.apply("neutral-residues", str(tmp_path / "base"), tmp_path / "one")
    surgeon.apply("llama-pro", str(tmp_path / "one"), tmp_path / "two")
    folder, manifest = opened(tmp_path / "two")
    last, everything = (trainable_set(folder, manifest, what) for what in ("last", "added"))
    adapters = [name for name in folder.tensors if ".adapter." in name]
    assert set(last.names) == set(manifest.new_tensors)
    assert set(everything.names) == set(last.names) | set(adapters)
    assert everything.operations == ("gated_adapters", "insert_layers")
    assert trainable_set(folder, manifest, [0]).names == last.names
    with pytest.raises(BadInput, match="there is no operation 3 in the last surgery; it has 0 \\(insert_layers\\)"):
        trainable_set(folder, manifest, [3])


def test_solar_trains_everything(tmp_path: Path) -> None:
    tiny.checkpoint(tmp_path / "base", "qwen2")
    surgeon.apply("solar", str(tmp_path / "base"), tmp_path / "out")
    folder, manifest = opened(tmp_path / "out")
    wanted = trainable_set(folder, manifest, "last")
    model = load_model(tmp_path / "out")
    assert unfreeze(model, wanted, base_names=folder.tensors) == [name for name, _ in model.named_parameters()]


def test_a_set_that_differs_stops_before_the_first_step() -> None:
    model = tiny.model("llama")
    names = [name for name, _ in model.named_parameters()]
    wanted = TrainableSet(tuple(names[-2:]), ("insert_layers",))
    assert unfreeze(model, wanted, base_names=names) == names[-2:]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    check_set(model, wanted.names, optimizer=optimizer)
    dict(model.named_parameters())[names[0]].requires_grad_(True)
    with pytest.raises(WrongSet, match=f"{names[0]}: trains, and must not"):
        check_set(model, wanted.names)
    dict(model.named_parameters())[names[0]].requires_grad_(False)
    dict(model.named_parameters())[names[-1]].requires_grad_(False)
    with pytest.raises(WrongSet, match=f"{names[-1]}: is frozen, and must train"):
        check_set(model, wanted.names)
    with pytest.raises(WrongSet, match="the optimizer holds 2 parameters, 1 are to train"):
        check_set(model, wanted.names[:1], optimizer=optimizer)
    with pytest.raises(WrongSet, match="the checkpoint has no tensor of this name"):
        unfreeze(model, TrainableSet(("no.such",), ()), base_names=names)
    with pytest.raises(WrongSet, match="has no parameter of this name"):
        unfreeze(model, TrainableSet(("no.such",), ()), base_names=[*names, "no.such"])


def test_below_the_lowest_trainable_layer_nothing_is_kept_for_the_backward_pass(tmp_path: Path) -> None:
    """OpT-DeUS inserts in the top half for this: what lies below runs without autograd."""
    tiny.checkpoint(tmp_path / "base", "llama", num_hidden_layers=8)
    surgeon.apply("llama-pro", str(tmp_path / "base"), tmp_path / "out")
    folder, manifest = opened(tmp_path / "out")
    model = load_model(tmp_path / "out", attention="eager")
    unfreeze(model, trainable_set(folder, manifest, "last"), base_names=folder.tensors)
    lowest = min(index for index, layer in enumerate(manifest.layers) if layer.base is None)
    assert lowest > 0
    tracked: dict[int, bool] = {}
    for index, layer in enumerate(model.model.layers):
        layer.register_forward_hook(
            lambda _module, _inputs, output, index=index: tracked.__setitem__(
                index, (output[0] if isinstance(output, tuple) else output).requires_grad
            )
        )
    ids = torch.randint(3, 120, (2, 12))
    model.train()(input_ids=ids, labels=ids).loss.backward()
    assert tracked == {index: index >= lowest for index in range(len(manifest.layers))}


def settings(**changes: object) -> Settings:
    values: dict[str, object] = {
        "steps": 20,
        "seed": 0,
        "batch": 1,
        "micro_batch": 1,
        "accumulation": 1,
        "length": 8,
        "lr": 1e-3,
        "min_lr": 1e-4,
        "schedule": "cosine",
        "warmup_steps": 4,
        "betas": (0.9, 0.99),
        "weight_decay": 0.0,
        "clip": 1.0,
    }
    return Settings(**(values | changes))  # type: ignore[arg-type]


def test_schedules_rise_to_the_peak_and_fall_to_the_floor() -> None:
    for schedule, last in (("cosine", 1e-4), ("linear", 1e-4), ("constant", 1e-3)):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
        scheduler = make_schedule(optimizer, settings(schedule=schedule))
        rates = []
        for _ in range(21):
            rates.append(scheduler.get_last_lr()[0])
            optimizer.step()
            scheduler.step()
        assert rates[:4] == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3])
        assert max(rates) == pytest.approx(1e-3)
        assert rates[20] == pytest.approx(last)


def test_updates_too_small_for_bfloat16_add_up_in_the_masters() -> None:
    narrow = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    wide = torch.nn.Parameter(torch.ones(8))
    plain = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    ours = MasterAdamW([narrow], lr=1e-4)
    theirs = [torch.optim.AdamW([wide], lr=1e-4), torch.optim.AdamW([plain], lr=1e-4)]
    for _ in range(100):
        for parameter, optimizer in ((narrow, ours), (wide, theirs[0]), (plain, theirs[1])):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
    assert torch.equal(narrow.detach(), wide.detach().bfloat16())
    assert torch.equal(plain.detach(), torch.ones(8, dtype=torch.bfloat16))  # what goes wrong without


def test_parts_are_updated_once_each_as_by_one_step_of_adamw(monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts of one parameter and of two: narrow and wide ones, in two groups, one without a gradient."""
    dtypes = (torch.bfloat16, torch.float32, torch.bfloat16, torch.float32, torch.bfloat16)
    for numbers in (1, 12):
        monkeypatch.setattr(stepping, "_PART", numbers)
        ours, wide = (
            [torch.nn.Parameter(torch.ones(8, dtype=d)) for d in each] for each in (dtypes, [torch.float32] * 5)
        )
        groups = [
            [{"params": p[:2], "weight_decay": 0.1}, {"params": p[2:], "weight_decay": 0.0}] for p in (ours, wide)
        ]
        steppers = MasterAdamW(groups[0], lr=1e-3), torch.optim.AdamW(groups[1], lr=1e-3, fused=True)
        for seed in range(5):
            for place, (own, theirs) in enumerate(zip(ours, wide, strict=True)):
                drawn = torch.randn(8, generator=torch.Generator().manual_seed(10 * seed + place)).bfloat16()
                own.grad, theirs.grad = (None, None) if place == 3 else (drawn.to(own.dtype), drawn.float())
            for each in steppers:
                each.step()
            assert all(parameter.grad is None for parameter in (*ours, *steppers[0].masters.values()))
        for own, theirs in zip(ours, wide, strict=True):
            assert torch.equal(steppers[0].masters.get(own, own), theirs)
            assert torch.equal(own, theirs.to(own.dtype))


def test_a_restored_optimizer_goes_on_as_if_nothing_had_happened() -> None:
    def make() -> tuple[torch.nn.Parameter, MasterAdamW]:
        parameter = torch.nn.Parameter(torch.linspace(-1, 1, 16).bfloat16())
        return parameter, MasterAdamW([parameter], lr=3e-4)

    def steps(parameter: torch.nn.Parameter, optimizer: MasterAdamW, seeds: range) -> None:
        for seed in seeds:
            parameter.grad = torch.randn(16, generator=torch.Generator().manual_seed(seed)).bfloat16()
            optimizer.step()

    whole, first = make(), make()
    steps(*whole, range(40))
    steps(*first, range(25))
    again = make()
    with torch.no_grad():
        again[0].copy_(first[0])
    again[1].load_state_dict(first[1].state_dict())
    steps(*again, range(25, 40))
    assert torch.equal(again[0], whole[0])
    assert torch.equal(*(next(iter(optimizer.masters.values())) for _, optimizer in (again, whole)))


def test_nothing_decays_of_what_trains_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weight decay would move what is fixed of it, whose gradient alone is kept from it."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    seen: dict[str, Any] = {}
    monkeypatch.setattr(trainer, "make_optimizer", lambda whole, settings, *, decayed: seen.update(decayed=decayed))
    monkeypatch.setattr(trainer, "check_set", lambda model, names, *, optimizer: seen.update(names=names))
    fixed = {"1.weight": 2}
    made = SimpleNamespace(
        optimizer=None,
        model=model,
        run=SimpleNamespace(settings=None),
        parameters=TrainedParameters(("0.weight", "1.weight"), fixed),
        get_decay_parameter_names=lambda whole: [name for name, _ in whole.named_parameters()],
    )
    trainer.SurgeonTrainer.create_optimizer(made)
    assert seen == {"decayed": {"0.weight"}, "names": ("0.weight", "1.weight")}
