"""Every hint says what the modules are: tried by what the model itself does with them, its cache included.

The rows that a hint gives a role are negated, weights and bias, and the model shows which they were: keys and values in
its cache change sign, or what attention or the MLP puts out does. A hint with any two roles exchanged fails.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from surgeon.anatomy.decoders import HINTS, Hint
from surgeon.anatomy.dissect import dissect
from surgeon.anatomy.family import Role
from surgeon.anatomy.twin import twin_of
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.runtime.graft import cache_in
from tests.decoders import tiny_decoder

# Negating these rows negates the named reading and leaves the others as they are (True), or changes the block's output
# otherwise (False). What a role does to a reading that is not listed is not looked at.
EFFECTS: dict[Role, dict[str, str]] = {
    "query": {"keys": "same", "values": "same", "block": "other"},
    "key": {"keys": "negated", "values": "same", "block": "other"},
    "value": {"keys": "same", "values": "negated", "block": "negated"},
    "output": {"keys": "same", "values": "same", "block": "negated"},
    "gate": {"block": "other"},
    "up": {"block": "negated"},
    "down": {"block": "negated"},
}
# Without a gate the activation stands between the two.
UNGATED: dict[Role, dict[str, str]] = {"up": {"block": "other"}}


class Tried:
    """A tiny model of a hint's type, of which the first layer is looked at."""

    def __init__(self, model_type: str, folder: Path) -> None:
        self.folder = tiny_decoder(folder, model_type)
        twin = twin_of(json.loads((self.folder / "config.json").read_text()))
        self.model, self.layer = twin.model, twin.layers[0]
        with torch.no_grad():
            for name, parameter in self.layer.named_parameters():
                if name.endswith(".bias"):  # what a block adds whatever its input is
                    parameter.zero_()

    def readings(self, block: str) -> dict[str, Tensor]:
        """Keys and values that layer 0 keeps, and what its block puts out."""
        seen: list[Any] = []
        hook = self.layer.get_submodule(block).register_forward_hook(
            lambda _module, _inputs, output: seen.append(output)
        )
        with torch.inference_mode():
            cache = cache_in(self.model(torch.arange(3, 11)[None], use_cache=True))
        hook.remove()
        output = seen[0][0] if isinstance(seen[0], tuple) else seen[0]
        return {"keys": cache.layers[0].keys, "values": cache.layers[0].values, "block": output}

    def negated(self, path: str, start: int, stop: int) -> dict[str, Tensor]:
        """The readings with these rows of a matrix negated."""
        weight = self.layer.get_submodule(path).weight
        with torch.no_grad():
            weight[start:stop].neg_()
            found = self.readings(path.rpartition(".")[0])
            weight[start:stop].neg_()
        return found


def effect(before: Tensor, after: Tensor) -> str:
    """What became of a reading."""
    scale = float(before.abs().max())
    if float((after - before).abs().max()) < 1e-5 * scale:
        return "same"
    return "negated" if float((after + before).abs().max()) < 1e-5 * scale else "other"


def wrong(tried: Tried, path: str, blocks: tuple[tuple[Role, int], ...], *, gated: bool) -> list[str]:
    """What the model does otherwise than the roles say, one line each."""
    before = tried.readings(path.rpartition(".")[0])
    found, start = [], 0
    for role, rows in blocks:
        after = tried.negated(path, start, start + rows)
        start += rows
        for reading, expected in (EFFECTS if gated else EFFECTS | UNGATED)[role].items():
            seen = effect(before[reading], after[reading])
            if seen != expected:
                found.append(f"{path}: with the rows of `{role}` negated {reading} are {seen}, not {expected}")
    return found


def known_blocks(folder: Path) -> dict[str, tuple[tuple[Role, int], ...]]:
    """The rows of each role in the matrices of layer 0, by path."""
    opened = CheckpointFolder.open(folder)
    parts = dissect(opened.config, opened.tensors).kinds[0].parts
    return {part.suffix.removesuffix(".weight"): part.blocks for part in parts if part.kind == "weight"}


def test_the_usual_names_without_a_gate_are_what_the_model_does(tmp_path: Path) -> None:
    """With biases, and an activation between the two: `c_fc` and `c_proj`."""
    tried = Tried("starcoder2", tmp_path / "base")
    known = {path: blocks for path, blocks in known_blocks(tried.folder).items() if path.startswith("mlp.")}
    assert [role for blocks in known.values() for role, _ in blocks] == ["up", "down"]
    assert not [line for path, blocks in known.items() for line in wrong(tried, path, blocks, gated=False)]
    for (path, ((_, rows),)), other in zip(known.items(), ("down", "up"), strict=True):
        assert wrong(tried, path, ((other, rows),), gated=False)


@pytest.fixture(scope="module", params=list(HINTS))
def hinted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Hint, Tried]]:
    yield HINTS[request.param], Tried(request.param, tmp_path_factory.mktemp("hints") / "base")


def test_a_hint_counts_and_is_what_the_model_does(hinted: tuple[Hint, Tried]) -> None:
    hint, tried = hinted
    known = known_blocks(tried.folder)
    assert {path: tuple(role for role, _ in known[path]) for path in hint.roles} == dict(hint.roles)
    roles = [role for rows in known.values() for role, _ in rows]
    assert {"up", "down"} <= set(roles), "a gate alone is none"
    assert not [line for path in hint.roles for line in wrong(tried, path, known[path], gated="gate" in roles)]


def test_a_hint_with_roles_exchanged_is_not(hinted: tuple[Hint, Tried]) -> None:
    hint, tried = hinted
    known = known_blocks(tried.folder)
    for path in hint.roles:
        sizes = dict(known[path])
        for roles in permutations(sizes):
            if roles != tuple(sizes):
                exchanged = tuple((role, sizes[role]) for role in roles)
                assert wrong(tried, path, exchanged, gated=True), roles
