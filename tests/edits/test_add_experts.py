"""`add_experts` against plain transformers: rows put together by hand, logits, losses, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import surgeon
from surgeon.blueprint.recipes import experts as experts_recipes
from surgeon.errors import BadInput
from tests.checkpoints import weights
from tests.edits.test_drop_experts import KINDS, load, mixture

_GROUPS = KINDS["deepseek_v3"] | {"n_routed_experts": 32}
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": KINDS["qwen3_moe"],
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "dtype": "bfloat16"},
    "gpt_oss": KINDS["gpt_oss"] | {"num_local_experts": 32, "dtype": "bfloat16"},
    "deepseek_v3": _GROUPS,
    "qwen3_next": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 4,
        "moe_intermediate_size": 32,
        "head_dim": 16,
    },
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 32},
}
Base = Callable[[str], Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Base:
    """Tiny mixtures with a tokenizer, each made once; biases of routers are random."""
    folder = tmp_path_factory.mktemp("bases")

    def base(kind: str) -> Path:
        if not (folder / kind).exists():
            mixture(folder / kind, kind, SIZES.get(kind, {}))
        return folder / kind

    return base


def applied(base: Path, folder: Path, **entry: Any) -> surgeon.Applied:
    """The output of a plan of one `add_experts`."""
    folder.mkdir(exist_ok=True)
    plan = json.dumps({"surgeon": 1, "operations": [{"op": "add_experts", **entry}]})
    return surgeon.apply(surgeon.parse_plan(plan, source=str(folder / "plan.yaml")), base, folder / "out", device="cpu")


# By the base's type: the plan, which expert each expert of the output is or was made of, and what is promised. In
# groups, new experts stand behind those of their group.
GROWN: list[tuple[str, dict[str, Any], list[int], str]] = [
    ("qwen3_moe", {"times": 3, "top_k": "grown"}, [*range(8), *sorted([*range(8)] * 2)], "rounding"),
    ("mixtral", {"times": 2, "top_k": "grown"}, [0, 1, 2, 3, 0, 1, 2, 3], "none"),
    ("qwen3_next", {"times": 2, "top_k": "grown"}, [*range(8), *range(8)], "rounding"),
    ("qwen3_moe", {"experts": {"0": [5, 1], "1": [1, 5]}}, [*range(8), 1, 5], "none"),
    ("gpt_oss", {"how": "zero", "count": 32}, [*range(32), *range(32)], "none"),
    ("deepseek_v3", {"how": "zero", "count": 2}, [*range(16), 0, *range(16, 32), 16], "rounding"),
    ("deepseek_v3", {"how": "zero", "times": 2}, [*range(16), *range(16), *range(16, 32), *range(16, 32)], "exact"),
]


@pytest.mark.parametrize(("kind", "entry", "order", "promise"), GROWN)
def test_new_experts_are_copies_or_silent_and_logits_are_as_promised(
    kind: str, entry: dict[str, Any], order: list[int], promise: str, made: Base, tmp_path: Path
) -> None:
    base, zero = made(kind), entry.get("how") == "zero"
    done = applied(base, tmp_path, **entry)
    before, after = load(base), load(done.path)
    assert type(before) is type(after) and done.manifest.native and done.manifest.promise == promise
    held = {**dict(after.named_parameters()), **dict(after.named_buffers())}
    grown, firsts = 0, [order.index(number) for number in range(max(order) + 1)]
    new = [place for place in range(len(order)) if place not in firsts]
    for name, value in {**dict(before.named_parameters()), **dict(before.named_buffers())}.items():
        if held[name].shape == value.shape:
            assert torch.equal(held[name], value), name
            continue
        grown += 1
        assert torch.equal(held[name][firsts], value), name
        if zero and "down_proj" in name:
            assert not held[name][new].any()
        elif zero and value.ndim == 1:
            assert bool((held[name][new].double() <= value.double().min() - 1.5).all())
            assert kind == "gpt_oss" or bool((held[name][new] >= value.min() - 3).all())
        else:
            assert torch.equal(held[name][new], value[[order[place] for place in new]]), name
    assert grown == {"qwen3_moe": 6, "mixtral": 6, "gpt_oss": 12, "deepseek_v3": 4, "qwen3_next": 12}[kind]
    ids = torch.randint(0, 320, (3, 21), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        one, other = (model(input_ids=ids).logits for model in (before, after))
        if promise == "exact":
            assert torch.equal(one, other)
        # Stored in bfloat16, where scores may be equal, copies that all are taken are the base in float32.
        one, other = (model.float()(input_ids=ids).logits for model in (before, after))
    assert torch.allclose(one, other, atol=1e-5) == (promise != "none" or zero or "top_k" in entry)
    assert surgeon.verify(base, done.path, device="cpu", windows=1, window=16).holds
    back = surgeon.revert(done.path, tmp_path / "back")
    found, wanted = weights(back.path), weights(base)
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3_moe", {"how": "zero", "count": 8}, "this router has no bias"),
    # Their twins show it: groups are chosen by their two best; the choice is by shares of all experts.
    (
        "deepseek_v3",
        {"times": 2, "top_k": "grown"},
        "on a twin of this model, the logits .*its router does not give copies shares",
    ),
    ("ernie4_5_moe", {"how": "zero", "count": 8}, "choice or weights depend on experts that no token takes"),
    ("deepseek_v3", {"count": 3}, "its experts form 2 groups, which must stay equal; add as many to each"),
    ("deepseek_v3", {"experts": [0, 1]}, "its experts form 2 groups, which must stay equal"),
    ("qwen3_moe", {"experts": [8]}, "layer 0 has experts 0 to 7: there is no expert 8"),
    ("qwen3_moe", {"experts": {"0": [1]}}, "layer 1: name experts of every layer"),
    ("qwen3_moe", {"experts": {"0": [1], "1": [1, 2]}}, "layers would get 1 to 2 experts"),
    ("qwen3_moe", {"count": 4096}, "would have 4104 experts; more than 4096"),
]


@pytest.mark.parametrize(("kind", "entry", "said"), REFUSED)
def test_what_router_and_class_do_not_allow_is_refused(
    kind: str, entry: dict[str, Any], said: str, made: Base, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=said):
        applied(made(kind), tmp_path, **entry)


def test_the_proof_sees_a_correction_that_is_not_low_enough(
    made: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SURGEON_CACHE", "off")
    monkeypatch.setattr(experts_recipes, "below", lambda least: least + 0.1)
    with pytest.raises(BadInput, match="on a twin of this model, the logits"):
        applied(made("deepseek_v3"), tmp_path, how="zero", times=2)
