"""Spaces inside a layer: their units change places in transformers' own class, and a fused layer finds them again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import surgeon
from benchmarks.published_configs import PUBLISHED
from surgeon.anatomy.dissect import dissect_folder
from surgeon.anatomy.family import Space
from surgeon.anatomy.inner_spaces import _holds, inner_spaces
from surgeon.anatomy.silence import captured
from surgeon.anatomy.twin import twin_of
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.errors import BadInput
from surgeon.runtime.graft import cache_in
from tests.caches import CACHE
from tests.checkpoints import weights, write_plan
from tests.decoders import checkpoint_of, tiny_decoder

# Of each type two neighbours of one kind, or one layer where it has none; and what units it has.
LAYERS: dict[str, tuple[list[int], list[str]]] = {
    "lfm2": ([3, 4], ["conv.channels"]),
    "gpt_neox": ([1, 2], ["attention.heads"]),
    "bamba": ([3, 4], ["mamba.heads"]),
    "jamba": ([3], ["mamba.channels"]),
    "nemotron_h": ([2], ["mixer.groups"]),
}
IDS = torch.randint(5, 300, (2, 11), generator=torch.Generator().manual_seed(0))


def relabelled(held: dict[str, torch.Tensor], spaces: tuple[Space, ...], left: int | None) -> dict[str, torch.Tensor]:
    """A layer's tensors with the units of its spaces in another order, but for those in one place."""
    moved = {suffix: value.clone() for suffix, value in held.items()}
    draws = torch.Generator().manual_seed(1)
    for space in spaces:
        order = torch.randperm(space.units, generator=draws)
        if torch.equal(order, torch.arange(space.units)):
            order = order.flip(0)
        for nth, slot in enumerate(space.slots):
            if nth != left:
                places = slot.start + (order[:, None] * slot.each + torch.arange(slot.each)).flatten()
                begin = torch.arange(slot.start, slot.start + len(places))
                source = moved[slot.suffix].index_select(slot.axis, places)
                moved[slot.suffix].index_copy_(slot.axis, begin, source)
    return moved


def logits(folder: Path) -> torch.Tensor:
    """Those of a text read at once, and of its end read token by token."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        found = [model(IDS, use_cache=False).logits]
        begun = model(IDS[:, :8], use_cache=True)
        for at in range(8, IDS.shape[1]):
            begun = model(IDS[:, at : at + 1], **{CACHE: cache_in(begun)}, use_cache=True)
            found.append(begun.logits)
    return torch.cat(found, dim=1)


def write(folder: Path, stem: str, layers: dict[int, dict[str, torch.Tensor]]) -> None:
    """Give layers of a checkpoint other values."""
    other = {f"{stem}{index}.{suffix}": value for index, held in layers.items() for suffix, value in held.items()}
    for shard in sorted(folder.glob("*.safetensors")):
        save_file({n: other.get(n, v).contiguous() for n, v in load_file(shard).items()}, shard, {"format": "pt"})


@pytest.mark.parametrize("model_type", LAYERS)
def test_units_change_places_and_are_found_again(model_type: str, tmp_path: Path) -> None:
    base = checkpoint_of(PUBLISHED[model_type], tmp_path / "base", dtype="float32")
    (below, *above), named = LAYERS[model_type]
    anatomy = dissect_folder(CheckpointFolder.open(base))
    spaces, stem = anatomy.derivation.spaces(below), anatomy.family.stem
    assert [space.name for space in spaces] == named
    own = f"{stem}{max([below, *above])}."
    held = {name.removeprefix(own): value for name, value in weights(base).items() if name.startswith(own)}
    write(base, stem, {below: held})
    before = logits(base)
    write(base, stem, {below: relabelled(held, spaces, None)})
    assert torch.allclose(before, logits(base), atol=1e-4 * float(before.abs().max()))
    if not above:
        for left in (0, len(spaces[0].slots) - 1):
            write(base, stem, {below: relabelled(held, spaces, left)})
            assert not torch.allclose(before, logits(base), atol=1e-3 * float(before.abs().max()))
        return
    # In the layer between them all is where the upper one has it; with T as it is the lower half is 1/n as large.
    first = spaces[0].slots[0]
    rows = slice(first.start, first.start + spaces[0].units * first.each)
    for rescale, share in (("marginal", 1.0), ("paper", 1 / (spaces[0].units * first.each))):
        init = {"kind": "ot_fusion", "solver": "emd", "rescale": rescale}
        insert = {"op": "insert_layers", "where": {"after": [below]}, "init": init, "zero_init": False}
        made = surgeon.apply(write_plan(tmp_path / "plan.yaml", [insert]), base, tmp_path / rescale).manifest
        assert {f"operations[0].after[{below}].0.{name}" for name in named} <= made.transport_maps.keys()
        if model_type == "gpt_neox":
            assert surgeon.transport_report(tmp_path / rescale).modules == (*named, "up", "down")
        new = weights(tmp_path / rescale)
        found = new[f"{stem}{above[0]}.{first.suffix}"][rows]
        assert torch.allclose(found, 0.5 * (1 + share) * held[first.suffix][rows], atol=1e-5)
        for suffix, value in held.items() if share == 1.0 else ():
            assert torch.allclose(new[f"{stem}{above[0]}.{suffix}"], value, atol=1e-5), suffix


def test_what_cannot_be_shown_on_a_twin_is_no_space(tmp_path: Path) -> None:
    """Heads with slopes of their own (ALiBi), in which they differ, stay where they are."""
    config = {"model_type": "bloom", "architectures": ["BloomForCausalLM"], "hidden_size": 64, "n_layer": 2}
    base = checkpoint_of(config | {"n_head": 4, "vocab_size": 320}, tmp_path / "base")
    assert dissect_folder(CheckpointFolder.open(base)).derivation.spaces(0) == ()
    fused = {"op": "insert_layers", "where": {"after": [0]}, "init": "ot_fusion"}
    plan = write_plan(tmp_path / "plan.yaml", [fused])
    with pytest.raises(BadInput, match=r"how to align self_attention\.query_key_value of a bloom"):
        surgeon.preview(plan, base)
    # Norms by OPT's names are known.
    surgeon.preview(plan, tiny_decoder(tmp_path / "opt", "opt", layers=2))
    dots = tiny_decoder(tmp_path / "dots", "dots1", layers=2, first_k_dense_replace=1)
    with pytest.raises(BadInput, match=r"layers 0.* and 1.* are of different kinds, so there is nothing between them"):
        surgeon.preview(plan, dots)


def test_a_place_whose_move_changes_nothing_proves_nothing() -> None:
    twin = twin_of(PUBLISHED["lfm2"])
    run, (space,) = captured(twin, [0])[0], inner_spaces(PUBLISHED["lfm2"], twin, 0, 2)
    with torch.no_grad():
        assert _holds(run, space)
        twin.layers[0].conv.conv.weight.fill_(0.5)
        assert not _holds(run, space)


def test_heads_that_stand_in_blocks_of_several_are_no_space(tmp_path: Path) -> None:
    """CodeGen keeps queries, values and keys of a quarter of its heads together: with four heads, those of each."""
    config = {"model_type": "codegen", "n_embd": 64, "n_layer": 1, "n_positions": 64, "rotary_dim": 4}
    for heads, found in ((4, ["attn.heads"]), (16, [])):
        base = checkpoint_of(config | {"n_head": heads, "vocab_size": 320}, tmp_path / str(heads))
        spaces = dissect_folder(CheckpointFolder.open(base)).derivation.spaces(0)
        assert [space.name for space in spaces] == found
