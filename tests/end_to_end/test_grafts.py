"""Plans with grafts, from preview to a process without surgeon that loads, generates, trains, saves and reloads."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

import surgeon
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.cli import app
from surgeon.grafts.adapters import GATES, VARIANCES
from surgeon.grafts.bundle import CODE_FILE, bundle
from surgeon.models.compare_streamed import compare_streamed
from surgeon.runtime.adapters import GatedAdapter
from surgeon.runtime.adapters_rules import AdapterSpec
from surgeon.runtime.interpolators import InterpolatorSpec
from surgeon.runtime.spread import for_each_layer
from tests import tiny
from tests.checkpoints import attaches_grafts, train, weights, write_plan
from tests.compared_logits import compare_logits
from tests.elsewhere import WITHOUT_SURGEON, load_elsewhere, run_elsewhere
from tests.runtime.test_interpolators import RULES, build_interpolator
from tests.shipped_plans import SHIPPED, plan_of

# The paper's own initialisation of a next slot changes what a trained base computes, and says so.
NOT_EXACT = ("pmoe/next-task-paper",)
GRAFT_PLANS = [name for name in SHIPPED if name not in NOT_EXACT and attaches_grafts(name)]
CONTROL: dict[str, Any] = {"op": "control_llm", "layers": [1, 4]}
ADAPTERS: dict[str, Any] = {"op": "gated_adapters", "layers": "all", "size": 12}
EXPERTS: dict[str, Any] = {"op": "pmoe_experts", "slots": 2}
STATES: dict[str, Any] = {"op": "mixture_of_control", "rank": 4}
INSERT: dict[str, Any] = {"op": "insert_layers", "where": {"after": [2]}, "init": {"kind": "average"}}


# Grafts know no family by name: of these each has what others lack (packed projections, norms behind blocks, windows,
# norms of heads). Every family's insertion is in test_depth_growth.py.
SOME = ("llama", "gemma2", "gemma3_text", "qwen3", "phi3")


@dataclass(frozen=True)
class Grown:
    """A base and its output: where both lie, what was previewed and applied, what both did elsewhere."""

    base: Path
    out: Path
    shown: Any
    applied: Any
    elsewhere: tuple[dict[str, Any], dict[str, Any]]


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Grown]:
    """One plan with every graft on every family, all loaded in one process without surgeon."""
    folder = tmp_path_factory.mktemp("grown")
    operations = [INSERT, CONTROL | {"layers": {"every": 2}, "expansion": "hybrid"}, ADAPTERS, EXPERTS, STATES]
    plan = folder / "plan.yaml"
    plan.write_text(json.dumps({"surgeon": 1, "operations": operations}, indent=1))
    made: dict[str, tuple[Path, Path, Any, Any]] = {}
    for family in SOME:
        base, out = tiny.checkpoint(folder / f"base-{family}", family), folder / f"out-{family}"
        made[family] = (base, out, surgeon.preview(plan, str(base)), surgeon.apply(plan, str(base), out))
    folders = [path for base, out, *_ in made.values() for path in (base, out)]
    told = iter(load_elsewhere(*folders, cache=folder, trust=True))
    return {family: Grown(*paths, elsewhere=(next(told), next(told))) for family, paths in made.items()}


@pytest.mark.parametrize("family", SOME)
def test_every_family_from_preview_to_generation(family: str, grown: dict[str, Grown]) -> None:
    """Inserted layer, control blocks (stacked and beside), adapters, slots and control states in one plan."""
    here = grown[family]
    base, out, (native, upcycled) = here.base, here.out, here.elsewhere
    assert not here.shown.blueprint.native
    assert here.applied.manifest.promise == "exact"
    assert upcycled["class"].startswith("Upcycled")
    assert upcycled["layers"] == len(here.shown.blueprint.layers) == 6 + 1 + 2
    assert upcycled["logits"] == native["logits"]
    assert upcycled["told"] == native["told"]
    assert upcycled["told_uncached"] == native["told_uncached"]

    # As stored, in bfloat16, they are run by the other process, and layer by layer.
    verification = surgeon.verify(base, out, window=24, windows=1, dtypes=("float32",))
    assert verification.holds
    assert verification.identical
    assert {comparison.dtype for comparison in verification.comparisons} == {"float32"}
    assert surgeon.verify(base, out, window=12, windows=1, streamed=True).identical


def opened(shard: Path) -> None:
    """Give all of a shard's grafts and its gate values, as training does: the gate opens on some prefixes."""
    drawn = torch.Generator().manual_seed(0)
    tensors = {
        name: value if name.endswith("threshold") else torch.randn(value.shape, generator=drawn).to(value.dtype) / 4
        for name, value in load_file(shard).items()
    }
    save_file(tensors, shard, metadata={"format": "pt"})


def test_a_domain_gate_is_streamed_as_it_runs_closed_and_open(tmp_path: Path) -> None:
    """What it keeps in a cache beside keys and values has each decoded token run from end to end."""
    base, out = tiny.checkpoint(tmp_path / "base", "llama", num_hidden_layers=3), tmp_path / "out"
    plan = tmp_path / "plan.yaml"
    operations = [INSERT | {"where": {"after": [1]}}, ADAPTERS | {"layers": [1, 2]}, {"op": "domain_gate", "layer": 1}]
    plan.write_text(json.dumps({"surgeon": 1, "operations": operations}))
    surgeon.apply(plan, str(base), out, device="cpu")
    dtypes = ("auto", "float32")
    verification = surgeon.verify(base, out, window=12, windows=2, streamed=True, dtypes=dtypes, device="cpu")
    assert verification.holds
    assert verification.identical
    assert len(verification.comparisons) == 2 * len(dtypes)

    (shard,) = {info.file for name, info in CheckpointFolder.open(out).tensors.items() if "domain_gate" in name}
    opened(out / shard)
    folders = CheckpointFolder.open(base), CheckpointFolder.open(out)
    ids = torch.randint(0, 128, (6, 12), generator=torch.Generator().manual_seed(1))
    streamed = compare_streamed(*folders, ids, dtypes=dtypes, layer_of_base=(0, 1, 3), decode_tokens=4)
    for found, dtype in zip(streamed, dtypes, strict=True):
        whole = compare_logits(*folders, ids, dtype=dtype, decode_tokens=4, batch_size=4)
        assert list(found.logits) == whole
        # Open on some tokens, closed on others, which have the base's logits.
        assert all(0 < mode.same < mode.tokens for mode in whole)


def test_a_gate_closes_slots_that_have_no_loss(tmp_path: Path) -> None:
    """The gate knows domains, and nothing that is shipped would count a loss; a step of training is tried."""
    operations = [{"op": "pmoe_experts", "rank": 4, "slots": 1}, {"op": "domain_gate"}]
    plan = write_plan(tmp_path / "plan.yaml", operations)
    base = tiny.checkpoint(tmp_path / "base", "llama", num_hidden_layers=2)
    assert surgeon.apply(plan, str(base), tmp_path / "out", device="cpu").path.is_dir()


def written(value: Any) -> Any:
    """What a plan says, whatever its numbers are."""
    if isinstance(value, dict):
        return {key: written(each) for key, each in value.items()}
    return [written(each) for each in value] if isinstance(value, list) else None if type(value) is float else value


# Plans that differ in a weight or a share alone (of a paper's row of ablations) are the same model at birth.
OF_A_KIND: dict[str, list[str]] = {}
for _name in GRAFT_PLANS:
    _operations = plan_of(_name).data()["operations"]
    OF_A_KIND.setdefault(json.dumps(written(_operations)), []).append(_name)


@pytest.mark.parametrize("name", [names[0] for names in OF_A_KIND.values()])
def test_shipped_plans_verify_as_exact(name: str, tmp_path: Path) -> None:
    """One of each kind; what the others are made of, number by number, tests/golden has."""
    base = tiny.base_for(name, tmp_path)
    applied = surgeon.apply(name, str(base), tmp_path / "out")
    assert applied.manifest.promise == "exact"
    verification = surgeon.verify(base, tmp_path / "out", window=24, windows=1)
    assert verification.holds
    assert verification.identical


TRAINER = (
    WITHOUT_SURGEON
    + """
import torch
from transformers import AutoModelForCausalLM
out, saved = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True, dtype="float32")
before = {name: value.clone() for name, value in model.named_parameters()}
new = model.freeze_base()
ids = torch.arange(3, 43).reshape(4, 10)
batch = {"input_ids": ids, "labels": ids, "domain_ids": torch.tensor([0, 1, 0, 1])}
model.train()
optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
for _ in range(3):
    optimiser.zero_grad()
    result = model(**batch)
    result.loss.backward()
    optimiser.step()
moved = [name for name, value in model.named_parameters() if not torch.equal(value, before[name])]
model.eval().save_pretrained(saved)
again = AutoModelForCausalLM.from_pretrained(saved, trust_remote_code=True)
with torch.inference_mode():
    same = bool(torch.equal(model(ids).logits, again(ids).logits))
losses = {key: float(value) for key, value in result.items() if key.endswith("_loss")}
json.dump({"new": new, "moved": moved, "same": same, "losses": losses}, sys.stdout)
"""
)


def test_what_is_new_and_nothing_else_trains_without_surgeon(
    base: Path, plan: Callable[..., Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    chosen = plan(INSERT, CONTROL | {"interpolator": {"kind": "dlerp", "learnable": True}}, ADAPTERS)
    applied = surgeon.apply(chosen, str(base), out)
    ran = run_elsewhere(TRAINER, str(out), str(tmp_path / "saved"), cache=tmp_path)
    assert set(ran["new"]) == set(applied.manifest.new_tensors)
    assert set(ran["moved"]) == set(ran["new"])
    assert ran["same"]
    assert ran["losses"]["divergence_loss"] > 0
    assert ran["losses"]["local_l1_loss"] > 0


def test_grafted_output_is_a_base_for_the_next_plan(base: Path, plan: Callable[..., Path], tmp_path: Path) -> None:
    """Grafts move with their layers; what an earlier surgery made does not train again; trained grafts stay exact."""
    first, second = tmp_path / "first", tmp_path / "second"
    surgeon.apply(plan(ADAPTERS | {"gate": "sigmoid"}, CONTROL, name="first.yaml"), str(base), first)
    train(first, seed=7, scale=0.1)
    chosen = plan(INSERT | {"where": {"after": [0]}}, CONTROL | {"layers": [1]}, name="second.yaml")
    applied = surgeon.apply(chosen, str(first), second)
    verification = surgeon.verify(first, second, window=24, windows=1)
    assert verification.holds
    assert verification.identical
    surgery = for_each_layer(json.loads((second / "config.json").read_text())["surgery"])
    assert [entry["layer"] for entry in surgery["control"]] == [1, 2, 5]
    assert [entry.get("frozen", False) for entry in surgery["control"]] == [False, True, True]
    assert surgery["new_layers"] == [1]
    ran = run_elsewhere(TRAINER, str(second), str(tmp_path / "saved"), cache=tmp_path)
    assert set(ran["new"]) == set(applied.manifest.new_tensors)
    operations = [[entry.op for entry in surgery.operations] for surgery in applied.manifest.lineage]
    assert operations == [["gated_adapters", "control_llm"]]


def born_interpolator(spec: InterpolatorSpec) -> nn.Module:
    """As its own code initialises it."""
    module = build_interpolator(spec, 32)
    module.initialise()
    return module


def born_adapter(gate: str, init: str) -> nn.Module:
    """Of the variance that Neutral Residues (section 3) and He et al. have for a hidden size of 32 and 6 layers."""
    module = GatedAdapter(AdapterSpec(1, 12, gate), 32, "silu")
    variance = {"low_variance": 1 / (32 * 6), "he": 2 / 32}[init]
    for name, parameter in module.named_parameters():
        nn.init.normal_(parameter, std=0.0 if name == "down_proj.weight" else math.sqrt(variance))
    return module


@pytest.mark.parametrize(
    ("operation", "owner", "build"),
    [
        *(
            (
                CONTROL | {"interpolator": {"kind": kind} | more},
                "interpolator.",
                lambda kind=kind, more=more: born_interpolator(InterpolatorSpec(kind=kind, **more)),
            )
            for kind, more in [
                *((kind, {"learnable": True, "alpha": 0.7}) for kind in RULES),
                ("dlerp", {}),
                ("plerp", {}),
            ]
        ),
        *(
            (
                ADAPTERS | {"gate": gate, "init": init},
                "mlp.adapter.",
                lambda gate=gate, init=init: born_adapter(gate, init),
            )
            for gate in GATES
            for init in VARIANCES
        ),
    ],
)
def test_tensors_are_born_as_their_papers_say_by_the_names_of_the_shipped_code(
    operation: dict[str, Any],
    owner: str,
    build: Callable[[], nn.Module],
    base: Path,
    plan: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """Names and shapes are the module's, constants and deviations an interpolator's own or the adapters' paper's."""
    surgeon.apply(plan(operation), str(base), tmp_path / "out")
    prefix = f"model.layers.1.{owner}"
    found = {k.removeprefix(prefix): v.float() for k, v in weights(tmp_path / "out").items() if k.startswith(prefix)}
    torch.manual_seed(0)
    module = build()
    expected = {name: value.detach() for name, value in module.named_parameters()}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].shape == value.shape
        if value.numel() < 3 or not value.any():
            assert torch.equal(found[name], value.bfloat16().float()), name
        else:
            # Two samples of n values each; four standard errors of their ratio.
            assert found[name].std() == pytest.approx(value.std().item(), rel=4 / math.sqrt(value.numel())), name


def test_code_is_copied_verbatim_and_checked(base: Path, plan: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    surgeon.apply(plan(ADAPTERS), str(base), out)
    assert [path.name for path in out.glob("*.py")] == [CODE_FILE]
    assert (out / CODE_FILE).read_bytes() == bundle(json.loads((out / "config.json").read_text()))
    (out / CODE_FILE).write_text("raise SystemExit('run')\n")
    assert CliRunner().invoke(app, ["verify", str(base), str(out)]).exit_code == 2
    trusted = surgeon.verify(base, out, trust_remote_code=True, logits=False)
    assert not trusted.holds
    assert [check.name for check in trusted.checks if not check.holds] == ["code"]


REFUSED: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
    "alpha 0": ([CONTROL | {"interpolator": {"kind": "lerp", "alpha": 0.0}}], ["alpha: 1.0", "Lerp8MSE0"]),
    "inference alpha of dlerp": (
        [CONTROL | {"interpolator": {"kind": "dlerp", "inference_alpha": 0.5}}],
        ["inference_alpha", "dlerp"],
    ),
    "alpha 1 learnt": ([CONTROL | {"interpolator": {"alpha": 1.0, "learnable": True}}], ["below 1"]),
    "stack with interpolator": ([CONTROL | {"expansion": "stack", "interpolator": {}}], ["no meaning", "stack"]),
    "hybrid of one": ([CONTROL | {"expansion": "hybrid", "layers": [3]}], ["hybrid", "two layers"]),
    "proj without divergence": (
        [CONTROL | {"interpolator": {"kind": "proj"}, "divergence": {"kind": "none"}}],
        ["proj", "lerp"],
    ),
    "two blocks on a layer": ([CONTROL, CONTROL | {"layers": [4]}], ["operations[1]", "layer 4", "already"]),
    "two adapters on a layer": ([ADAPTERS, ADAPTERS], ["layer 0", "already"]),
    "both sizes": ([ADAPTERS | {"extra_weights": 0.2}], ["extra_weights", "size"]),
    "neither size": ([{"op": "gated_adapters"}], ["extra_weights", "size"]),
    "cross-entropy without sigmoid": (
        [ADAPTERS | {"local_loss": {"kind": "cross_entropy"}}],
        ["cross_entropy", "sigmoid"],
    ),
    "two local losses": (
        [ADAPTERS | {"layers": [0]}, ADAPTERS | {"layers": [1], "local_loss": {"kind": "l1", "weight": 0.5}}],
        ["local_loss", "one setting"],
    ),
    "stacking grafted layers": ([ADAPTERS, {"op": "stack_layers", "bottom": 4, "top": 4}], ["layer 2 has grafts"]),
    "merging nothing": ([{"op": "merge_branches"}], ["no control block"]),
    "merging a gate for every token": (
        [CONTROL | {"interpolator": {"kind": "dlerp"}}, {"op": "merge_branches"}],
        ["dlerp", "alpha"],
    ),
    "unknown interpolator": ([CONTROL | {"interpolator": {"kind": "larp"}}], ["larp"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_are_one_line_and_write_nothing(
    case: str, base: Path, plan: Callable[..., Path], tmp_path: Path
) -> None:
    operations, words = REFUSED[case]
    result = CliRunner().invoke(app, ["apply", str(plan(*operations)), str(base), str(tmp_path / "out")])
    assert result.exit_code == 2, result.output
    told = result.stderr.strip()
    assert len(told.splitlines()) == 1
    for word in words:
        assert word in told, told
    assert not (tmp_path / "out").exists()
