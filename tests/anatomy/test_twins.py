"""What a proof is made of: twins and tiny checkpoints, random in every stored tensor, each of which counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from surgeon.anatomy.twin import fill_buffers, shrunk, stored_buffers, twin_of
from tests import tiny
from tests.checkpoints import weights
from tests.decoders import tiny_config, tiny_decoder
from tests.encoders import tiny_encoder
from tests.quantised import tiny_quantised

# Stored buffers of one number that scales the stream, of a router, of constants and of decays made by the code.
BUFFERED = ("gemma4_text", "deepseek_v3", "apertus", "minimax")


class Held(nn.Module):
    """One buffer of each kind that a model may have."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Buffer(torch.ones(1))
        self.variance = nn.Buffer(torch.ones(64))
        self.shift = nn.Buffer(torch.zeros(64))
        self.decay = nn.Buffer(torch.linspace(0.1, 1, 64))
        self.fp8 = nn.Buffer(torch.full((), 2.0**-9, dtype=torch.bfloat16))
        self.low, self.high = nn.Buffer(torch.tensor(-float("inf"))), nn.Buffer(torch.tensor(float("inf")))
        self.empty = nn.Buffer(torch.full((64,), float("nan")))
        self.allowed = nn.Buffer(torch.ones(4, 4).tril())
        self.added = nn.Buffer(torch.full((4, 4), -float("inf")).triu(1))
        self.index, self.fixed = nn.Buffer(torch.arange(4)), nn.Buffer(torch.ones(2, dtype=torch.complex64))
        self.table = nn.Buffer(torch.ones(4), persistent=False)


def test_a_buffer_gets_random_values_in_its_valid_range() -> None:
    made, before = Held(), dict(Held().named_buffers())
    fill_buffers(made, 0)
    assert stored_buffers(made).keys() == before.keys() - {"index", "fixed", "table"}
    kept = ("allowed", "added", "index", "fixed", "table")
    held = dict(made.named_buffers())
    assert all(torch.equal(held[name], before[name]) for name in kept)
    for name in held.keys() - {*kept}:
        value = held[name]
        assert value.dtype == before[name].dtype and value.isfinite().all(), name
        assert not torch.equal(value, before[name]) and (value.ndim == 0 or value.unique().numel() == len(value)), name
    for name in ("scale", "variance", "decay", "fp8"):
        assert bool(((held[name] > 0.5 * before[name]) & (held[name] < before[name])).all()), name
    assert bool((held["empty"] > 0).all() and (held["shift"] >= 0).all()) and held["low"] < 0 < held["high"]


def test_towers_say_how_wide_a_smaller_text_is() -> None:
    """Dots3-Note and Inkling: another width is an error there; what is not the text's is the tower's own."""
    towers = {"hidden_size": 640, "text_hidden_size": 4096, "adapter_out_dim": 4096, "adapter_in_dim": 640}
    made = shrunk(
        {"text_config": {"hidden_size": 4096}, "audio_config": towers, "other_config": {"adapter_out_dim": 7}}
    )
    width = made["text_config"]["hidden_size"]
    assert width < 640 and made["other_config"] == {"adapter_out_dim": 7}
    own = made["audio_config"]["hidden_size"]
    assert made["audio_config"] == {
        "hidden_size": own,
        "text_hidden_size": width,
        "adapter_out_dim": width,
        "adapter_in_dim": own,
    }


@pytest.mark.parametrize("model_type", BUFFERED)
def test_a_twin_holds_no_initial_value(model_type: str) -> None:
    config = tiny_config(model_type)
    one, other = (twin_of(config, seed=seed).model for seed in (0, 1))
    stored, again = one.state_dict(), other.state_dict()
    assert stored_buffers(one)
    for name, value in stored.items():
        assert not torch.equal(value, again[name]), name
    computed = {name: value for name, value in one.named_buffers() if name not in stored}
    assert all(torch.equal(value, dict(other.named_buffers())[name]) for name, value in computed.items())


TINY: dict[str, Callable[[Path], Path]] = {
    "gemma2": lambda folder: tiny.checkpoint(folder, "gemma2"),
    "roberta": lambda folder: tiny.checkpoint(folder, "roberta"),
    "gemma4_text": lambda folder: tiny_decoder(folder, "gemma4_text", hidden_size_per_layer_input=8),
    "nystromformer": lambda folder: tiny_encoder(folder, "nystromformer"),
    "deepseek_v3": lambda folder: tiny_quantised(folder, "deepseek_v3", "fp8"),
}


@pytest.mark.parametrize("case", TINY)
def test_tiny_checkpoints_hold_no_initial_value(case: str, tmp_path: Path) -> None:
    for name, value in weights(TINY[case](tmp_path / "base")).items():
        if value.is_floating_point():
            several = value.numel() == 1 or value.float().unique().numel() > 1
            assert several and value.float().flatten()[0] not in (0.0, 1.0), name
