"""The benchmark of a GPU runs here on a small model: on the device there is no time to find that it does not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import gpu


def test_every_row_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu, "PLANS", ("opt-deus", "neutral-residues"))
    monkeypatch.setattr(sys, "argv", ["gpu", "--work", str(tmp_path / "work"), "--tiny", "--device", "cpu"])
    gpu.main()
    rows = [line.split(" | ")[:2] for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    titles = [f"{what.removeprefix('| ')}, {by}" for what, by in rows]
    assert titles == [
        "transport, n = 64, surgeon",
        "transport, n = 64, POT, 100 iterations",
        "transport, n = 128, surgeon",
        "transport, n = 128, POT, 100 iterations",
        "verify, bfloat16",
        "verify, float32",
        "decode, base, eager",
        "decode, base, compiled",
        "decode, opt-deus, eager",
        "decode, neutral-residues, eager",
        "decode, neutral-residues, compiled",
        "train new layers, surgeon train",
        "train new layers, a plain loop",
    ]
    assert not (tmp_path / "work").exists()
