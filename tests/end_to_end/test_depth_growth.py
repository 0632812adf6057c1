"""Plan → preview → apply → load elsewhere → verify, for every family and every shipped plan."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import surgeon
from surgeon.anatomy.decoders import USUAL_DECODERS
from tests import tiny
from tests.checkpoints import attaches_grafts, weights
from tests.elsewhere import load_elsewhere
from tests.shipped_plans import SHIPPED, plan_of

# Plans that attach nothing. Merging is another matter: branches that were never trained merge without a loss.
DEPTH_PLANS = [
    name
    for name in SHIPPED
    if not attaches_grafts(name) and not any(op.op == "merge_branches" for op in plan_of(name).plan.operations)
]


# Copies as layers pass through less code than fused ones: two families that differ are enough.
GROWN = [("opt-deus", family) for family in USUAL_DECODERS] + [("llama-pro", family) for family in ("llama", "gemma2")]


@dataclass(frozen=True)
class Grown:
    """A base and its output: where both lie, the base's digests before, previews, what both did elsewhere."""

    base: Path
    out: Path
    before: dict[str, str]
    shown: Any
    applied: Any
    elsewhere: tuple[dict[str, Any], dict[str, Any]]


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Grown]:
    """Both plans on every family, all loaded in one process without surgeon."""
    folder = tmp_path_factory.mktemp("grown")
    made: dict[tuple[str, str], tuple[Any, ...]] = {}
    for plan, family in GROWN:
        base = tiny.checkpoint(folder / f"base-{family}", family)
        out, before = folder / f"{plan}-{family}", digests(base)
        made[plan, family] = (base, out, before, surgeon.preview(plan, str(base)), surgeon.apply(plan, str(base), out))
    told = iter(load_elsewhere(*(path for base, out, *_ in made.values() for path in (base, out)), cache=folder))
    return {case: Grown(*parts, elsewhere=(next(told), next(told))) for case, parts in made.items()}


@pytest.mark.parametrize(("plan", "family"), GROWN)
def test_every_family_from_preview_to_generation(plan: str, family: str, grown: dict[tuple[str, str], Grown]) -> None:
    here = grown[plan, family]
    base, out, (native, larger) = here.base, here.out, here.elsewhere
    layers = here.shown.blueprint.layers
    assert [layer.base for layer in here.applied.preview.blueprint.layers] == [layer.base for layer in layers]
    assert larger["class"] == native["class"]
    assert larger["layers"] == len(layers) > native["layers"]
    assert larger["logits"] == native["logits"]
    assert larger["told"] == native["told"]
    assert larger["told_uncached"] == native["told_uncached"]

    # As stored, in bfloat16, they are run by the other process.
    verification = surgeon.verify(base, out, window=24, windows=1, dtypes=("float32",))
    assert verification.holds
    assert verification.identical
    assert {comparison.dtype for comparison in verification.comparisons} == {"float32"}
    # Layer by layer every family is compared with grafts (test_grafts.py) and in models/test_streaming.py.
    if plan == "llama-pro":
        streamed = surgeon.verify(base, out, window=24, windows=1, streamed=True)
        assert streamed.holds
        assert streamed.identical
    assert here.before == digests(base)


@pytest.mark.parametrize("plan", DEPTH_PLANS)
def test_what_a_plan_promises_is_so(plan: str, tmp_path: Path) -> None:
    """Exact: every logit is identical. Rounding: as nearly so. None: some differs, or the promise says too little."""
    base, out = tiny.base_for(plan, tmp_path), tmp_path / "out"
    applied = surgeon.apply(plan, str(base), out)
    verification = surgeon.verify(base, out, window=24, windows=1)
    assert verification.holds
    if applied.manifest.promise == "rounding":
        assert verification.rounded
    else:
        assert verification.identical is (applied.manifest.promise == "exact")
    assert applied.manifest.native
    if not verification.identical:
        load_elsewhere(out, cache=tmp_path)


def test_solar_is_two_overlapping_copies(base: Path, tmp_path: Path) -> None:
    """Six layers, three quarters (rounded to 4) twice: 0 1 2 3 | 2 3 4 5."""
    surgeon.apply("solar", str(base), tmp_path / "out")
    before, after = weights(base), weights(tmp_path / "out")
    for index, source in enumerate([0, 1, 2, 3, 2, 3, 4, 5]):
        name = "mlp.gate_proj.weight"
        assert torch.equal(after[f"model.layers.{index}.{name}"], before[f"model.layers.{source}.{name}"])


def test_llama_pro_copies_the_top_of_each_group(base: Path, plan: Callable[..., Path], tmp_path: Path) -> None:
    chosen = plan(where={"every": 3}, per_gap=2, init={"kind": "copy"}, zero_init=True)
    applied = surgeon.apply(chosen, str(base), tmp_path / "out")
    assert [layer.base for layer in applied.manifest.layers] == [0, 1, 2, None, None, 3, 4, 5, None, None]
    before, after = weights(base), weights(tmp_path / "out")
    for index, source in {3: 1, 4: 2, 8: 4, 9: 5}.items():
        for name in ("self_attn.q_proj.weight", "mlp.up_proj.weight", "input_layernorm.weight"):
            assert torch.equal(after[f"model.layers.{index}.{name}"], before[f"model.layers.{source}.{name}"])
        assert not after[f"model.layers.{index}.self_attn.o_proj.weight"].any()
        assert not after[f"model.layers.{index}.mlp.down_proj.weight"].any()


def test_whole_periods_keep_a_pattern_that_single_layers_break(plan: Callable[..., Path], tmp_path: Path) -> None:
    """Gemma 3's config says every sixth layer; above the last whole period the base has one layer more."""
    base = tiny.checkpoint(tmp_path / "base", "gemma3_text", num_hidden_layers=13)
    types = ["sliding_attention"] * 5 + ["full_attention"]
    copies = {"init": {"kind": "copy"}}
    surgeon.apply(plan(where={"every_period": 2}, name="whole.yaml", **copies), str(base), tmp_path / "whole")
    surgeon.apply(plan(where={"every": 4}, name="single.yaml", **copies), str(base), tmp_path / "single")
    whole = json.loads((tmp_path / "whole/config.json").read_text())
    assert whole["layer_types"] == [*types * 3, "sliding_attention"]
    assert [layer.base for layer in surgeon.inspect(tmp_path / "whole").manifest.layers] == [
        *range(12),
        *[None] * 6,
        12,
    ]
    before, after = weights(base), weights(tmp_path / "whole")
    for source in range(6, 12):
        name = "self_attn.q_proj.weight"
        assert torch.equal(after[f"model.layers.{source + 6}.{name}"], before[f"model.layers.{source}.{name}"])
    assert surgeon.verify(base, tmp_path / "whole", window=24, windows=1).identical

    broken = "repeat every 6 layers, the output's no longer"
    for name in ("whole", "single"):
        notes = surgeon.preview(tmp_path / f"{name}.yaml", str(base)).notes
        card = (tmp_path / name / "README.md").read_text()
        assert (any(broken in note for note in notes), broken in card) == (name == "single", name == "single")
        assert ("whatever runs the base runs this" in card) is (name == "whole")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"per_gap": 2, "init": {"kind": "copy"}}, "`per_gap` has no meaning with `every_period`"),
        ({"init": {"kind": "average"}}, "init average is made from both sides of a gap.* use copy or random"),
        ({"init": {"kind": "ot_fusion"}}, "init ot_fusion is made from both sides"),
        ({"count": 7, "init": {"kind": "copy"}}, "`count` 7 is not a multiple of the period, 2"),
    ],
)
def test_what_whole_periods_cannot_be(
    asked: dict[str, Any], words: str, plan: Callable[..., Path], tmp_path: Path
) -> None:
    base = tiny.checkpoint(tmp_path / "gemma", "gemma2")
    with pytest.raises(surgeon.BadInput, match=words):
        surgeon.preview(plan(where={"every_period": 1}, **asked), str(base))


def test_new_tensors_live_in_shards_of_their_own(base: Path, tmp_path: Path) -> None:
    applied = surgeon.apply("opt-deus", str(base), tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    new = set(applied.manifest.new_tensors)
    assert {index[name] for name in new}.isdisjoint(index[name] for name in set(index) - new)


def test_operations_compose_and_selectors_see_what_came_before(
    base: Path, plan: Callable[..., Path], tmp_path: Path
) -> None:
    """One plan of two operations is byte for byte two plans of one operation each."""
    first = {"op": "insert_layers", "where": {"after": [0, 3]}, "init": {"kind": "average"}}
    second = {
        "op": "insert_layers",
        "where": {"after": [1, 6]},
        "init": {"kind": "ot_fusion"},
        "zero_init": False,
    }
    surgeon.apply(plan(first, second, name="both.yaml"), str(base), tmp_path / "both")
    surgeon.apply(plan(first, name="first.yaml"), str(base), tmp_path / "first")
    surgeon.apply(plan(second, name="second.yaml"), str(tmp_path / "first"), tmp_path / "second")
    both, second_after_first = weights(tmp_path / "both"), weights(tmp_path / "second")
    assert both.keys() == second_after_first.keys()
    for name, tensor in both.items():
        assert torch.equal(tensor, second_after_first[name]), name
    lineage = surgeon.inspect(tmp_path / "second").manifest.lineage
    assert [[entry.op for entry in surgery.operations] for surgery in lineage] == [["insert_layers"]]


def test_random_init_depends_on_seed_and_name_only(base: Path, plan: Callable[..., Path], tmp_path: Path) -> None:
    chosen = {"where": {"after": [1, 4]}, "init": {"kind": "random"}, "zero_init": False}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        surgeon.apply(plan(seed=seed, name=f"{name}.yaml", **chosen), str(base), tmp_path / name)
    a, b, c = (weights(tmp_path / name) for name in "abc")
    name = "model.layers.2.mlp.gate_proj.weight"
    assert torch.equal(a[name], b[name])
    assert not torch.equal(a[name], c[name])
    assert not torch.equal(a[name], a["model.layers.6.mlp.gate_proj.weight"])
    assert a[name].float().std() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(a["model.layers.2.input_layernorm.weight"], torch.ones(32, dtype=torch.bfloat16))


def test_shuffle_keeps_the_multiset_of_each_matrix(base: Path, plan: Callable[..., Path], tmp_path: Path) -> None:
    where = {"after": [2]}
    surgeon.apply(plan(where=where, init={"kind": "ot_fusion"}, name="ot.yaml"), str(base), tmp_path / "ot")
    surgeon.apply(plan(where=where, init={"kind": "shuffle"}, name="s.yaml"), str(base), tmp_path / "shuffled")
    ot, shuffled = weights(tmp_path / "ot"), weights(tmp_path / "shuffled")
    for module in ("self_attn.q_proj", "mlp.gate_proj"):
        name = f"model.layers.3.{module}.weight"
        assert not torch.equal(ot[name], shuffled[name])
        assert torch.equal(ot[name].flatten().sort().values, shuffled[name].flatten().sort().values)
    norm = "model.layers.3.input_layernorm.weight"
    assert torch.equal(ot[norm], shuffled[norm])


def test_side_files_are_carried_and_foreign_ones_left(base: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "LICENSE"):
        (base / name).write_text(json.dumps({"content of": name}))
    (base / "training_args.bin").write_bytes(b"pickle")
    applied = surgeon.apply("copy", str(base), tmp_path / "out")
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "LICENSE",
        "generation_config.json",
    ):
        assert (tmp_path / "out" / name).read_bytes() == (base / name).read_bytes()
    assert "training_args.bin" in applied.left_behind
    assert not (tmp_path / "out" / "training_args.bin").exists()


def test_config_keeps_every_field_it_had(base: Path, tmp_path: Path) -> None:
    config = json.loads((base / "config.json").read_text()) | {
        "rope_theta": 5e5,
        "my_field": [1, 2],
        "no_rope_layers": [0] * 6,
    }
    (base / "config.json").write_text(json.dumps(config))
    surgeon.apply("copy", str(base), tmp_path / "out")
    after = json.loads((tmp_path / "out" / "config.json").read_text())
    layers = after["num_hidden_layers"]
    assert after == config | {"num_hidden_layers": layers, "no_rope_layers": [0] * layers}


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "qwen2"])
def test_layer_types_follow_their_layers(family: str, tmp_path: Path) -> None:
    base = tiny.checkpoint(tmp_path / "base", family)
    surgeon.apply("llama-pro", str(base), tmp_path / "out")
    before = json.loads((base / "config.json").read_text())["layer_types"]
    after = json.loads((tmp_path / "out" / "config.json").read_text())["layer_types"]
    manifest = surgeon.inspect(tmp_path / "out").manifest
    sources = [layer.base if layer.base is not None else before_source(manifest, layer) for layer in manifest.layers]
    assert after == [before[source] for source in sources]


def before_source(manifest, layer) -> int:
    return manifest.layers[layer.sources[0]].base


def test_single_file_base_and_float32(tmp_path: Path) -> None:
    base = tiny.checkpoint(tmp_path / "base", "llama", dtype="float32", shard="1GB")
    assert (base / "model.safetensors").exists()
    surgeon.apply("opt-deus", str(base), tmp_path / "out")
    verification = surgeon.verify(base, tmp_path / "out", window=24, windows=2)
    assert verification.holds
    assert verification.identical
