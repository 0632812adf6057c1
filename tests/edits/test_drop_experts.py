"""`drop_experts` against plain transformers: scores by hand, experts cut out of the class, losses of the output."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

import surgeon
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.errors import BadInput
from surgeon.models.load import load_model
from surgeon.models.tokens import token_batches
from tests import tiny, vocabularies
from tests.checkpoints import weights, write_plan
from tests.decoders import tiny_decoder
from tests.vocabularies import ENGLISH, write_text

WINDOW, WINDOWS = 16, 6
READ = {"text": "en.jsonl", "window": WINDOW, "windows": WINDOWS}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 24, "num_experts_per_tok": 2, "head_dim": 16},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16},
    # Groups of experts, and a buffer with a number for each.
    "deepseek_v3": {
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 16,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "qk_nope_head_dim": 8,
        "num_key_value_heads": 4,
    },
}
Base = Callable[[str], Path]


def mixture(folder: Path, kind: str, sizes: dict[str, Any]) -> Path:
    """A tiny mixture with a tokenizer."""
    sizes = {"vocab_size": 320, "num_hidden_layers": 2, "dtype": "float32"} | sizes
    return vocabularies.byte_level(tiny.checkpoint(folder, kind, **sizes))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Base:
    """Tiny mixtures in float32 with a tokenizer, each made once."""
    folder = tmp_path_factory.mktemp("bases")

    def base(kind: str) -> Path:
        if not (folder / kind).exists():
            mixture(folder / kind, kind, KINDS.get(kind, {}))
        return folder / kind

    return base


def applied(base: Path, folder: Path, **entry: Any) -> surgeon.Applied:
    """The output of a plan of one `drop_experts`, with the text beside it."""
    folder.mkdir(exist_ok=True)
    write_text(folder / "en.jsonl", ENGLISH, times=8)
    plan = json.dumps({"surgeon": 1, "operations": [{"op": "drop_experts", **entry}]})
    return surgeon.apply(surgeon.parse_plan(plan, source=str(folder / "plan.yaml")), base, folder / "out", device="cpu")


def tokens(base: Path, folder: Path) -> tuple[Tensor, Tensor]:
    """The windows that experts are judged by, and those that their cost is measured on."""
    text = folder / "en.jsonl"
    ids = token_batches(base, text=text, window=WINDOW, windows=2 * WINDOWS, vocabulary=320).ids
    return ids[:WINDOWS], ids[WINDOWS:]


@torch.inference_mode()
def losses(model: Any, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].double()
    return functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(1)


def load(folder: Path) -> Any:
    return load_model(CheckpointFolder.open(folder)).eval()


def gone_of(done: surgeon.Applied) -> dict[int, list[int]]:
    (facts,) = (kept.model_dump(exclude_unset=True) for kept in done.manifest.facts.values())
    return {int(layer): numbers for layer, numbers in facts["gone"].items()}


# By the base's type: the experts that go; of the second every layer loses others.
GONE: dict[str, Any] = {
    "qwen3_moe": [1, 6],
    "gpt_oss": {"0": [0, 3, 7], "1": [2, 3, 4]},
    "deepseek_v3": {"1": [3, 4]},
}


@pytest.mark.parametrize("kind", GONE)
def test_listed_experts_go_and_the_others_stay_as_they_are(kind: str, made: Base, tmp_path: Path) -> None:
    base, listed = made(kind), GONE[kind]
    done = applied(base, tmp_path, experts=listed, **READ)
    gone = listed if isinstance(listed, dict) else {"0": listed, "1": listed}
    before, after = load(base), load(done.path)
    assert type(before) is type(after) and done.manifest.native and done.manifest.promise == "none"
    cut = 0
    for name, value in {**dict(before.named_parameters()), **dict(before.named_buffers())}.items():
        found = after.get_parameter(name) if name in dict(after.named_parameters()) else after.get_buffer(name)
        if value.shape != found.shape:
            layer = name.split("layers.")[1].split(".")[0]
            kept = [number for number in range(8) if number not in gone[layer]]
            value, cut = value[kept], cut + 1
        assert torch.equal(found, value), name
    # Gate and up, down, the router; biases of gpt_oss; the buffer of deepseek.
    assert cut == {"qwen3_moe": 6, "gpt_oss": 12, "deepseek_v3": 4}[kind]
    assert surgeon.verify(base, done.path, device="cpu", windows=1, window=16).holds
    # What was measured before it was made is what it is.
    (facts,) = (kept.model_dump(exclude_unset=True) for kept in done.manifest.facts.values())
    cost, (_, measured) = facts["cost"], tokens(base, tmp_path)
    for key, model in (("before", before), ("after", after)):
        assert cost[key] == pytest.approx(float(losses(model, measured).mean()), abs=1e-5)
    assert cost["tokens"] == WINDOWS * (WINDOW - 1)


@torch.inference_mode()
def by_hand(base: Path, ids: Tensor) -> tuple[list[list[float]], list[list[int]]]:
    """REAP's scores, and how many tokens go to each expert, from each layer's input and the stored matrices alone."""
    model, held = load(base), weights(base)
    scores, counts = [], []
    for number, layer in enumerate(model.model.layers):
        read: list[Tensor] = []
        handle = layer.mlp.register_forward_pre_hook(lambda _, given, read=read: read.append(given[0]))
        model(input_ids=ids, use_cache=False)
        handle.remove()
        states = read[0].flatten(0, 1).double()
        stem = f"model.layers.{number}.mlp."
        shares = torch.softmax(states @ held[f"{stem}gate.weight"].double().T, dim=-1)
        chosen = shares.topk(2, dim=-1).indices
        scores.append([])
        counts.append([])
        for expert in range(8):
            gate, up, down = (held[f"{stem}experts.{expert}.{w}_proj.weight"].double() for w in ("gate", "up", "down"))
            sent = (chosen == expert).any(-1)
            own = states[sent]
            made = (functional.silu(own @ gate.T) * (own @ up.T)) @ down.T
            scores[-1].append(float((shares[sent, expert] * made.norm(dim=-1)).mean()) if len(own) else 0.0)
            counts[-1].append(len(own))
    return scores, counts


def lowest(scores: list[list[float]] | list[list[int]], count: int) -> dict[int, list[int]]:
    ranked = {layer: sorted(range(8), key=lambda e: (values[e], e)) for layer, values in enumerate(scores)}
    return {layer: sorted(order[:count]) for layer, order in ranked.items()}


def test_reap_and_frequency_are_as_by_hand_and_differ(made: Base, tmp_path: Path) -> None:
    base = made("qwen3_moe")
    done = applied(base, tmp_path, count=3, **READ)
    scores, counts = by_hand(base, tokens(base, tmp_path)[0])
    assert gone_of(done) == lowest(scores, 3)
    often = applied(base, tmp_path / "often", count=3, by="frequency", **READ)
    assert gone_of(often) == lowest(counts, 3) != lowest(scores, 3)
    assert "3 of 8 experts in each of 2 layers, least router weight" in done.manifest.operations[0].matched
    with pytest.raises(BadInput, match="is lost"):
        surgeon.revert(done.path, tmp_path / "back")


def test_by_loss_each_expert_is_missed_alone(made: Base, tmp_path: Path) -> None:
    base = made("qwen3_moe")
    done = applied(base, tmp_path, count=1, by="loss", **READ)
    judged, whole = tokens(base, tmp_path)[0], load(base)
    for layer in range(2):
        found = []
        for number in range(8):
            model = copy.deepcopy(whole)
            block, kept = model.model.layers[layer].mlp, [e for e in range(8) if e != number]
            for part in (block.experts, block.gate):
                part.num_experts = 7
                for value in part.parameters():
                    value.data = value.data[kept]
            found.append(float(losses(model, judged).mean()))
        assert gone_of(done)[layer] == [found.index(min(found))]


def test_planted_dead_experts_are_found_by_what_they_put_out_not_by_how_often_they_are_chosen(
    made: Base, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    shutil.copytree(made("qwen3_moe"), base)
    write_text(tmp_path / "en.jsonl", ENGLISH, times=8)
    # Of each layer the one that is chosen most.
    dead = {
        layer: max(range(8), key=of.__getitem__) for layer, of in enumerate(by_hand(base, tokens(base, tmp_path)[0])[1])
    }
    names = {f"model.layers.{layer}.mlp.experts.{number}.down_proj.weight" for layer, number in dead.items()}
    for file in base.glob("*.safetensors"):
        held = {name: value * (name not in names) for name, value in load_file(file).items()}
        save_file(held, file, metadata={"format": "pt"})
    assert gone_of(applied(base, tmp_path, count=1, **READ)) == {layer: [number] for layer, number in dead.items()}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3_moe", {"experts": [8]}, "layer 0 has experts 0 to 7: there is no expert 8"),
    ("qwen3_moe", {"experts": [2, 2]}, "one is named twice"),
    ("qwen3_moe", {"experts": {"0": [1]}}, "layer 1: name experts of every layer that has some"),
    ("qwen3_moe", {"experts": {"0": [1], "1": [1, 2]}}, "layers would lose 1 to 2 experts"),
    (
        "qwen3_moe",
        {"experts": [*range(7)]},
        "1 experts would be left of 8, and each token takes 2",
    ),
    ("deepseek_v3", {"experts": {"1": [0]}}, "its experts form 2 groups; take as many out of each"),
    ("qwen3_moe", {"count": 2, "text": "en.jsonl", "windows": 9999}, "too short to measure experts on"),
    ("qwen3_moe", {"count": 2, "text": "none.jsonl"}, "no such text"),
]


@pytest.mark.parametrize(("kind", "entry", "said"), REFUSED)
def test_what_the_class_cannot_hold_is_refused(
    kind: str, entry: dict[str, Any], said: str, made: Base, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=said):
        applied(made(kind), tmp_path, **entry)


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no layer of this model has experts"):
        applied(tiny.checkpoint(tmp_path / "base", "llama", num_hidden_layers=2), tmp_path, experts=[0])


def test_experts_in_the_rows_of_matrices_stay_as_they_are(tmp_path: Path) -> None:
    """dbrx: operations on its experts are refused, new layers and grafts are not."""
    base = tiny_decoder(tmp_path / "base", "dbrx", dtype="bfloat16")
    for operation, words in (
        ({"op": "drop_experts", "experts": [0]}, "no layer of this model has experts that surgeon understands"),
        ({"op": "add_experts", "times": 2}, "no layer of this model has experts that surgeon understands"),
        ({"op": "widen_ffn", "by": 16}, "no layer has an FFN whose projections are known"),
        (
            {"op": "upcycle_experts", "form": "shared", "experts": 2},
            "the base is a mixture of experts already",
        ),
    ):
        with pytest.raises(BadInput, match=words) as refused:
            surgeon.preview(write_plan(tmp_path / "plan.yaml", [operation]), base)
        assert "\n" not in str(refused.value)
    layers = {"op": "insert_layers", "where": {"after": [0]}, "init": {"kind": "copy"}}
    plan = write_plan(tmp_path / "plan.yaml", [layers, {"op": "gated_adapters", "size": 4}])
    out = surgeon.apply(plan, base, tmp_path / "out", device="cpu").path
    assert surgeon.verify(base, out, device="cpu", windows=1, window=16).identical
