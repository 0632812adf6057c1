"""Layers with stored buffers, tensors and lists with a part for each layer: exact where promised, else refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import surgeon
from surgeon.errors import BadInput
from tests.checkpoints import same_bytes, weights
from tests.decoders import tiny_decoder
from tests.models.grown import edit
from tests.own_code import installed

INSERT = "surgeon: 1\noperations:\n  - {op: insert_layers, where: {after: [0, 2]}, init: {kind: copy}}\n"

# Lines of the model's code, that are changed.
MADE = "        self.mix, self.wash = PebbleMix(config, number), PebbleWash(config)\n"
FIRST = "        hidden_states = hidden_states + self.mix(self.before_mix(hidden_states), cache)\n"
LAST = "        return hidden_states + self.wash(self.before_wash(hidden_states))\n"
OUTSIDE = "        self.backbone.last = PebbleScale(config.width)\n"
LOOP = """        for layer in self.backbone.blocks:
            stream = layer(stream, past_key_values if use_cache else None)
"""


def held(*buffers: str) -> dict[str, str]:
    """The layer holds these buffers, given as name and initial value."""
    lines = (f"        self.register_buffer({each})\n" for each in buffers)
    return {MADE: MADE + "".join(lines)}


def leaves(expression: str) -> dict[str, str]:
    """The layer returns this, of `hidden_states` as it is with both its branches."""
    return {LAST: LAST.replace("return", "hidden_states =") + f"        return {expression}\n"}


def each_layer(made: str, line: str) -> dict[str, str]:
    """Something is made outside the layers, and a line run before each of them, of number `n`."""
    loop = LOOP.replace("for layer in self.backbone.blocks", "for n, layer in enumerate(self.backbone.blocks)")
    return {
        OUTSIDE: OUTSIDE + f"        {made}\n",
        LOOP: loop.replace("            stream", f"            {line}\n            stream"),
    }


ONE, WIDE = "'gain', torch.ones(1)", "'shift', torch.zeros(config.width)"
# Changes to the code, and the values that new layers must hold in buffers.
EXACT: dict[str, tuple[dict[str, str], dict[str, float]]] = {
    "scales the stream": (held(ONE) | leaves("hidden_states * self.gain"), {"gain": 1.0}),
    "scales what it gets, in place": (
        held(ONE) | {FIRST: f"        hidden_states *= self.gain\n{FIRST}"},
        {"gain": 1.0},
    ),
    "scales each dimension": (
        held("'gain', torch.ones(1, 1, config.width)") | leaves("self.gain * hidden_states"),
        {"gain": 1.0},
    ),
    "shifts the stream": (held(WIDE) | leaves("hidden_states + self.shift"), {"shift": 0.0}),
    "both, one in a block": (
        held(ONE, WIDE) | leaves("self.gain * hidden_states + self.shift"),
        {"gain": 1.0, "shift": 0.0},
    ),
    "both, as parameters": (
        {
            MADE: f"{MADE}        self.gain = nn.Parameter(torch.ones(1))\n"
            "        self.shift = nn.Parameter(torch.zeros(config.width))\n"
        }
        | leaves("self.gain * hidden_states + self.shift"),
        {"gain": 1.0, "shift": 0.0},
    ),
    "decays": (held("'decay', torch.full((1,), 0.1)") | leaves("hidden_states * (1 - self.decay)"), {"decay": 0.0}),
    "scales a branch": (held(ONE) | {FIRST: FIRST.replace("+ self.mix", "+ self.gain * self.mix")}, {}),
    "has a part outside that a branch reads": (
        each_layer(
            "self.backbone.parts = nn.Parameter(torch.zeros(config.depth, config.width))",
            "layer.part = self.backbone.parts[n]",
        )
        | {FIRST: FIRST.replace("self.before_mix(hidden_states)", "self.before_mix(hidden_states) + self.part")},
        {},
    ),
}
REFUSED: dict[str, tuple[dict[str, str], dict[str, Any], str]] = {
    "a scale that is never one": (
        held(ONE) | leaves("hidden_states * self.gain.sigmoid()"),
        {},
        "even with all its weights zero",
    ),
    "a buffer that layers share": (
        each_layer(
            "shared = torch.ones(1)\n        for block in self.backbone.blocks: block.register_buffer('gain', shared)",
            "pass",
        )
        | leaves("hidden_states * self.gain"),
        {},
        "those that it shares with others \\(gain\\) zero",
    ),
    "a part outside that scales the stream": (
        each_layer(
            "self.backbone.gains = nn.Buffer(torch.ones(config.depth))", "stream = stream * self.backbone.gains[n]"
        ),
        {},
        "the logits .* are not the base's",
    ),
    "a tensor outside for each layer": (
        each_layer(
            "self.backbone.gains = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(config.depth))",
            "stream = stream * self.backbone.gains[n]",
        ),
        {},
        "gains.3: stands outside the layers and depends on their number .there with 5 layers, not with 3",
    ),
    "a tensor outside of layers by layers": (
        each_layer(
            "self.backbone.mixed = nn.Parameter(torch.ones(config.depth, config.depth))",
            "stream = stream * self.backbone.mixed[n].sum()",
        ),
        {},
        r"mixed: stands outside the layers and depends on their number .\[3, 3\] with 3 layers, \[5, 5\] with 5",
    ),
    "a list of the config that is not lengthened": (
        each_layer("self.gains = config.gains", "stream = stream * self.gains[n]"),
        {"gains": [0.9, 1.1, 0.8]},
        "cannot be run",
    ),
    "a list of the config that ends early": (
        each_layer("self.gains = config.gains", "stream = stream * dict(enumerate(self.gains)).get(n, 1.0)"),
        {"gains": [0.9, 1.1, 0.8]},
        "the logits .* are not the base's",
    ),
}


def applied(tmp_path: Path, patch: pytest.MonkeyPatch, changed: dict[str, str], **config: Any) -> tuple[Path, Path]:
    base = installed(tmp_path / "base", changed, patch, **config)
    (tmp_path / "plan.yaml").write_text(INSERT)
    surgeon.apply(tmp_path / "plan.yaml", base, tmp_path / "out")
    return base, tmp_path / "out"


@pytest.mark.parametrize("case", EXACT)
def test_layers_with_buffers_are_exact(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed, wanted = EXACT[case]
    base, out = applied(tmp_path, monkeypatch, changed)
    found = surgeon.verify(base, out, windows=1, window=16, dtypes=("auto", "float32"))
    assert found.holds and found.identical and found.promise == "exact"
    before, after = weights(base), weights(out)
    for old, new, source in ((0, 1, 0), (3, 4, 2)):
        for name in ("gain", "shift", "decay"):
            if (own := f"backbone.blocks.{source}.{name}") in before:
                assert torch.equal(after[f"backbone.blocks.{old}.{name}"], before[own])
                made = after[f"backbone.blocks.{new}.{name}"]
                assert torch.equal(made, torch.full_like(made, wanted[name]) if name in wanted else before[own])
    surgeon.revert(out, tmp_path / "back")
    assert same_bytes(before, weights(tmp_path / "back"))


def test_gemma_4_grows_beside_and_between(tmp_path: Path) -> None:
    """Its layers end with a stored scale of the stream: 1 in new layers, the base's in an expanded twin."""
    base = tiny_decoder(tmp_path / "base", "gemma4_text", dtype="bfloat16")
    (tmp_path / "plan.yaml").write_text(
        "surgeon: 1\noperations:\n  - {op: insert_layers, where: {after: [1]}, init: {kind: copy}}\n"
        "  - {op: control_llm, layers: [0, 6], expansion: hybrid}\n"
    )
    out = tmp_path / "out"
    applied = surgeon.apply(tmp_path / "plan.yaml", base, out)
    assert any("layer_scalar = 1" in record.claim.reason for record in applied.preview.blueprint.operations)
    before, after = weights(base), weights(out)
    scale = "layer_scalar"
    own = {name: float(value) for name, value in after.items() if name.endswith(scale)}
    kept = {number: float(before[f"model.layers.{number}.{scale}"]) for number in range(6)}
    assert own.pop(f"model.layers.7.expanded.{scale}") == kept[5]
    assert [own[f"model.layers.{n}.{scale}"] for n in range(5)] == [kept[0], 1.0, kept[1], 1.0, kept[2]]
    for streamed in (False, True):
        options: dict[str, Any] = {"windows": 1, "window": 16, "dtypes": ("auto", "float32"), "streamed": streamed}
        found = surgeon.verify(base, out, **options)
        assert found.holds and found.identical
    surgeon.revert(out, tmp_path / "back")
    assert same_bytes(before, weights(tmp_path / "back"))
    edit(out, f"model.layers.3.{scale}", lambda value: value * 0.5)
    broken = surgeon.verify(base, out, logits=False)
    assert {check.name for check in broken.checks if not check.holds} >= {"silent at birth"}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_exact_is_refused(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed, config, words = REFUSED[case]
    with pytest.raises(BadInput, match=words):
        applied(tmp_path, monkeypatch, changed, **config)
    assert not (tmp_path / "out").exists()
