"""What is found out of a model type by building and probing it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import surgeon
from benchmarks.published_configs import PUBLISHED
from surgeon.anatomy.decoders import USUAL_DECODERS
from surgeon.anatomy.derived import derive
from surgeon.anatomy.dissect import dissect
from surgeon.anatomy.growth import grown
from surgeon.anatomy.kinds import described_kinds, numbered
from surgeon.anatomy.silence import silences
from surgeon.anatomy.skeleton import CAUSAL, IMAGE_TEXT, build
from surgeon.anatomy.twin import shrunk, twin_of
from surgeon.blueprint.draft import Draft
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.edits.embeddings import vocabulary_tensors
from surgeon.errors import BadInput
from tests import tiny
from tests.decoders import checkpoint_of, tiny_config, tiny_decoder

# What silences a layer, as whoever reads transformers' code finds it.
_WRITES = {"self_attn.o_proj.weight": 0.0, "mlp.down_proj.weight": 0.0}
_POST_NORMS = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")
BY_HAND = dict.fromkeys(USUAL_DECODERS, _WRITES) | {
    "gemma2": dict.fromkeys(_POST_NORMS, -1.0),
    "gemma3_text": dict.fromkeys(_POST_NORMS, -1.0),
    "olmo2": dict.fromkeys(_POST_NORMS, 0.0),
}


def test_an_encoder_that_generates_has_its_layers_in_a_list_of_an_encoder_s_name() -> None:
    """Norms before its blocks: a layer can be silent; BERT's, with norms behind them, cannot."""
    found = derive(tiny_config("megatron-bert"))
    assert found.skeleton.stack == "bert.encoder.layer" and not found.skeleton.encoder
    assert all(each.values and not each.reason for each in found.silence)
    assert all("zero a layer changes" in each.reason for each in derive(tiny_config("bert")).silence)


@pytest.mark.parametrize("family", USUAL_DECODERS)
def test_the_probe_finds_what_was_written_by_hand(family: str, tmp_path: Path) -> None:
    """Of the nine usual types: the same silence, the same values, for every layer."""
    folder = CheckpointFolder.open(tiny.checkpoint(tmp_path / "base", family))
    by_hand = BY_HAND[family]
    found = derive(folder.config)
    assert [dict(each.values) for each in found.silence] == [dict(by_hand)] * len(found.silence)
    assert not any(each.reason for each in found.silence)


def test_a_twin_keeps_everything_but_sizes() -> None:
    config = tiny_config("qwen3_moe") | {
        "hidden_size": 4096,
        "head_dim": 128,
        "num_experts": 128,
        "vocab_size": 150_000,
    }
    small = shrunk(config)
    assert small["num_hidden_layers"] == config["num_hidden_layers"]
    assert small["head_dim"] == config["head_dim"]
    assert (small["num_experts"], small["vocab_size"]) == (8, 256)
    assert small["hidden_size"] < 300
    assert shrunk(small) == small


def test_a_twin_is_the_same_each_time_and_leaves_the_draws_of_others_alone() -> None:
    import torch

    config = tiny_config("olmo3")
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, other = twin_of(config), twin_of(config)
    assert torch.equal(torch.get_rng_state(), before)
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    third = twin_of(config, seed=1)
    assert not torch.equal(next(iter(one.model.parameters())), next(iter(third.model.parameters())))


def test_probing_leaves_the_twins_weights_as_they_were() -> None:
    import torch

    twin = twin_of(tiny_config("olmo3"))
    before = {name: value.clone() for name, value in twin.model.state_dict().items()}
    found = silences(twin, [0, 1])
    assert all(torch.equal(value, before[name]) for name, value in twin.model.state_dict().items())
    assert set(found[0].values) == {"post_attention_layernorm.weight", "post_feedforward_layernorm.weight"}


GROWN: dict[str, tuple[dict[str, Any], list[int], dict[str, Any]]] = {
    # One dense layer before those of experts: a copy of it is dense as well.
    "deepseek_v3": ({}, [0, 0, 1, 2, 3], {"num_hidden_layers": 5}),
    # Layers without rotary positions, which the config leaves to be derived from an interval.
    "smollm3": ({"no_rope_layers": None}, [0, 1, 2, 3, 3], {"no_rope_layers": [1, 1, 1, 0, 0]}),
    "gpt2": ({}, [0, 1, 1, 2, 3], {"n_layer": 5}),
}


@pytest.mark.parametrize("model_type", GROWN)
def test_a_grown_config_says_what_every_layer_is(model_type: str) -> None:
    changes, order, wanted = GROWN[model_type]
    config = tiny_config(model_type, **changes)
    if model_type == "smollm3":
        config = {key: value for key, value in config.items() if key not in ("no_rope_layers", "layer_types")}
    skeleton = build(config)
    made = grown(config, skeleton, order)
    kinds, now = described_kinds(skeleton), described_kinds(build(made))
    assert [kind[0] for kind in now] == [kinds[source][0] for source in order]
    assert {key: made[key] for key in wanted} == wanted


@pytest.mark.parametrize(
    ("model_type", "auto", "lists"),
    [
        ("hunyuan_v1_moe", CAUSAL, {"moe_topk": [2, 1, 2, 2]}),
        ("step3p7", IMAGE_TEXT, {"swiglu_limits": [0.0, 7.0, 0.0, 7.0], "swiglu_limits_shared": [0.0, 16.0, 0.0, 0.0]}),
    ],
)
def test_lists_that_a_class_reads_layer_by_layer_follow_the_layers(
    model_type: str, auto: str, lists: dict[str, list[float]]
) -> None:
    """Whatever their names; a list that is as long by chance stays."""
    config = tiny_config(model_type, auto)
    text = config.get("text_config", config)
    text |= lists | {"suppress": [1, 2, 3, 4]}
    made = grown(config, build(config), [0, 1, 1, 2, 3])
    wanted = {key: [value[source] for source in (0, 1, 1, 2, 3)] for key, value in lists.items()}
    found = made.get("text_config", made)
    assert {key: found[key] for key in (*lists, "suppress")} == wanted | {"suppress": [1, 2, 3, 4]}


def test_layers_that_depend_on_their_number_are_left_as_many() -> None:
    """Also for branches, which count as layers: the advice is what keeps the depth."""
    config = tiny_config("minicpm3")
    for order, trunk in (([0, 0, 1, 2, 3], None), ([0, 1, 2, 3, 3], 4)):
        with pytest.raises(BadInput, match="so use adapters, slots or control states, which keep the depth"):
            grown(config, build(config), order, trunk)


def test_kinds_are_layers_that_differ_in_nothing_but_weights() -> None:
    found = derive(tiny_config("qwen3_next"))
    assert found.kind_of == tuple(numbered(list(found.kind_of)))
    types = json.loads(json.dumps(found.skeleton.text.layer_types))
    assert [found.titles[kind] for kind in found.kind_of] == types


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "a billion layers": ({"num_hidden_layers": 10**9}, "more than 1000 is refused"),
    "a billion experts": ({"num_local_experts": 10**9}, "more than 4096 is refused"),
    "beyond any number": ({"hidden_size": 10**30}, r"beyond 2\^31 is refused"),
    "no layers": ({"num_hidden_layers": 0}, "0 layers; at least 1 is needed"),
    "a text for a size": ({"hidden_size": "wide"}, "cannot build this mixtral"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_config_is_refused_before_it_costs_anything(case: str) -> None:
    changes, words = HOSTILE[case]
    with pytest.raises(BadInput, match=words):
        derive(tiny_config("mixtral") | changes)


def test_a_second_embedding_of_tokens_grows_with_the_first(tmp_path: Path) -> None:
    """Gemma 4 reads tokens once more for each layer: ids beyond those rows would be out of range."""
    base, out, plan = tmp_path / "base", tmp_path / "out", tmp_path / "plan.yaml"
    field, rows = "vocab_size_per_layer_input", tiny_config("gemma4_text")["vocab_size"]
    folder = CheckpointFolder.open(
        tiny_decoder(base, "gemma4_text", hidden_size_per_layer_input=8, vocab_size_per_layer_input=rows)
    )
    embeddings = {"model.embed_tokens.weight", "model.embed_tokens_per_layer.weight"}
    assert vocabulary_tensors(Draft(dissect(folder.config, folder.tensors), folder.config, seed=0)) == dict.fromkeys(
        embeddings, True
    )
    plan.write_text(f'{{"surgeon": 1, "operations": [{{"op": "pad_to", "vocabulary": {2 * rows - 1}}}]}}')
    surgeon.apply(plan, str(base), out)
    config = json.loads((out / "config.json").read_text())
    assert config["vocab_size"] == config[field] == 2 * rows - 1
    found = surgeon.verify(base, out, windows=1, window=16)
    assert found.holds and found.identical
    plan.write_text(plan.read_text()[:-2] + ', {"op": "insert_layers", "where": "all", "init": {"kind": "copy"}}]}')
    with pytest.raises(BadInput, match=r"embed_tokens_per_layer\.weight holds a part for each layer and a row"):
        surgeon.preview(plan, base)
    folder = CheckpointFolder.open(checkpoint_of(PUBLISHED["gemma4_text"] | {field: 325}, tmp_path / "more"))
    with pytest.raises(BadInput, match=rf"embed_tokens_per_layer: tokens are read .* 325 rows \(`{field}`\)"):
        vocabulary_tensors(Draft(dissect(folder.config, folder.tensors), folder.config, seed=0))


def test_positions_that_a_model_counts_from_one_are_known_to_grafts(tmp_path: Path) -> None:
    """PaliGemma gives its decoder positions from 1; what takes a whole text would miss a token before them."""
    for model_type, first in (("paligemma", 1), ("llava", None)):
        base, out = tiny_decoder(tmp_path / model_type, model_type, IMAGE_TEXT), tmp_path / f"{model_type}-out"
        plan = tmp_path / "plan.yaml"
        plan.write_text('{"surgeon": 1, "operations": [{"op": "mixture_of_control", "rank": 4}]}')
        surgeon.apply(plan, base, out)
        assert json.loads((out / "config.json").read_text())["anatomy"].get("first_position") == first
        assert surgeon.verify(base, out, window=12, windows=2).identical


@pytest.mark.parametrize(
    ("family", "left_out", "sizes"),
    [
        ("qwen2", "num_key_value_heads", {"num_attention_heads": 32, "num_key_value_heads": 32, "hidden_size": 256}),
        ("gemma", "num_key_value_heads", {"num_attention_heads": 16, "num_key_value_heads": 16, "hidden_size": 256}),
        ("phi3", "pad_token_id", {"vocab_size": 32064, "pad_token_id": 32000}),
    ],
)
def test_what_a_config_leaves_out_is_as_its_class_has_it(
    family: str, left_out: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    """A twin is small, its class's own defaults are not: key and value heads, and tokens, shrink with the rest."""
    base, out, plan = tiny.checkpoint(tmp_path / "base", family, **sizes), tmp_path / "out", tmp_path / "plan.yaml"
    config = json.loads((base / "config.json").read_text())
    del config[left_out]
    (base / "config.json").write_text(json.dumps(config))
    insert = {"op": "insert_layers", "where": {"after": [1]}, "init": {"kind": "copy"}}
    operations = [insert, {"op": "gated_adapters", "layers": [0], "size": 8}]
    plan.write_text(json.dumps({"surgeon": 1, "operations": operations}))
    surgeon.apply(plan, base, out)
    assert surgeon.verify(base, out, window=12, windows=1).identical
