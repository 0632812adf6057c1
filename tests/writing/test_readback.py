"""What is read back: every copy of a tensor is compared, however often it was copied before, and hashed once."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import surgeon
from surgeon.blueprint.shards import Shard
from surgeon.checkpoint.header import read_header
from surgeon.checkpoint.piece_bytes import places_of
from surgeon.checkpoint.source import LocalSource
from surgeon.errors import PromiseBroken
from surgeon.writing import readback
from surgeon.writing.readback import ReadBack
from tests import tiny
from tests.checkpoints import weights

PLAN = "surgeon: 1\noperations:\n  - {op: upcycle_experts, experts: 4}\n"
LAYER = "surgeon: 1\noperations:\n  - {op: insert_layers, where: {after: [0]}, init: {kind: copy}}\n"


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From here on, the sizes of what is hashed of copies."""
    hashed: list[int] = []

    class Counted:
        def __init__(self) -> None:
            self.plain = hashlib.sha256()

        def update(self, piece: bytes) -> None:
            hashed.append(len(piece))
            self.plain.update(piece)

        def hexdigest(self) -> str:
            return self.plain.hexdigest()

    monkeypatch.setattr(readback, "hashlib", SimpleNamespace(sha256=Counted))
    return hashed


@pytest.mark.parametrize("read_back", [True, False])
@pytest.mark.usefixtures("unproven")
def test_copies_of_one_tensor_are_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_back: bool) -> None:
    """Digests of the manifest are those of the bytes that lie in the output, those of copies too."""
    base = tiny.checkpoint(tmp_path / "base", "llama", num_hidden_layers=1)
    (tmp_path / "plan.yaml").write_text(PLAN, encoding="utf-8")
    hashed = counted(monkeypatch)
    made = surgeon.apply(tmp_path / "plan.yaml", str(base), tmp_path / "out", device="cpu", read_back=read_back)
    held = weights(tmp_path / "out")
    found = made.manifest.new_tensors
    assert sum("experts." in output for output in found) >= 12
    for output, facts in found.items():
        assert facts.sha256 == hashlib.sha256(held[output].view(torch.uint8).numpy().tobytes()).hexdigest(), output
    # Of gate and up there are four copies more than in the base.
    assert 0 < sum(hashed) <= sum(tensor.nbytes for tensor in weights(base).values())


def test_tensors_of_one_name_in_two_files_are_two(tmp_path: Path) -> None:
    """What a run keeps of the base lies beside the weights by the names that they have: its digests are its own."""
    files = ["kept.safetensors", "model.safetensors"]
    for file in files:
        save_file({"weight": torch.zeros(2)}, tmp_path / file)
    infos = [header.tensors[0] for header in LocalSource(tmp_path).headers(files).values()]
    assert [info.name for info in infos] == ["weight", "weight"]
    assert len({places_of({info.name: info}, source)["weight"] for info in infos for source in ("", "other")}) == 4


@pytest.mark.usefixtures("unproven")
def test_a_later_copy_with_another_bit_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny.checkpoint(tmp_path / "base", "llama", num_hidden_layers=1)
    (tmp_path / "plan.yaml").write_text(PLAN, encoding="utf-8")
    prove = ReadBack._prove

    def proved(self: ReadBack, shard: Shard, *rest: Any) -> None:
        with (self._staging.folder / shard.file).open("r+b") as file:
            infos = {info.name: info for info in read_header(file.fileno(), file=shard.file).tensors}
            for name, info in infos.items():
                if name.endswith("experts.3.gate_proj.weight"):
                    os.pwrite(file.fileno(), bytes([os.pread(file.fileno(), 1, info.begin)[0] ^ 1]), info.begin)
        prove(self, shard, *rest)

    monkeypatch.setattr(ReadBack, "_prove", proved)
    with pytest.raises(PromiseBroken, match=r"experts\.3\.gate_proj.*was read back is not what .*gate_proj"):
        surgeon.apply(tmp_path / "plan.yaml", str(base), tmp_path / "out", device="cpu")
    assert not (tmp_path / "out").exists()
