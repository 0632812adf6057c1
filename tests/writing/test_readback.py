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
from surgeon.common.listener import Quiet
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


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A base that nobody touched for long, one number of which is none, beside a cache of its own."""
    monkeypatch.setenv("SURGEON_CACHE", str(tmp_path / "cache"))
    base = tiny.checkpoint(tmp_path / "base", "llama", num_hidden_layers=2)
    held = weights(base)
    held["model.embed_tokens.weight"][3, 0] = torch.inf
    save_file(held, base / "model.safetensors", metadata={"format": "pt"})
    os.utime(base / "model.safetensors", (1e9, 1e9))
    (tmp_path / "plan.yaml").write_text(LAYER, encoding="utf-8")
    return base


def _hashed(base: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many bytes of copies an `apply` hashes, which says what is no number."""
    listener = Quiet()
    with monkeypatch.context() as patched:
        hashed = counted(patched)
        surgeon.apply(base.parent / "plan.yaml", str(base), out, device="cpu", listener=listener)
    assert any("embed_tokens.weight: holds NaN or infinity" in line for line in listener.said)
    return sum(hashed)


@pytest.mark.usefixtures("unproven")
def test_the_digests_of_a_base_that_nobody_touched_are_known(
    old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers behind the new one have other names, so no file of the output is one of the base's."""
    whole = sum(tensor.nbytes for tensor in weights(old).values())
    # Two threads may hash one original that is copied twice.
    assert _hashed(old, tmp_path / "first", monkeypatch) >= whole
    assert _hashed(old, tmp_path / "second", monkeypatch) == 0
    written = [{p.name: p.read_bytes() for p in (tmp_path / out).iterdir()} for out in ("first", "second")]
    assert written[0] == written[1]
    assert surgeon.verify(str(old), tmp_path / "second", logits=False).holds
    # What was written to has other times.
    os.utime(old / "model.safetensors", (1e9, 1e9 + 1))
    assert _hashed(old, tmp_path / "third", monkeypatch) >= whole


@pytest.mark.usefixtures("unproven")
def test_copies_are_compared_where_digests_are_known(
    old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    surgeon.apply(tmp_path / "plan.yaml", str(old), tmp_path / "first", device="cpu")
    prove = ReadBack._prove

    def proved(self: ReadBack, shard: Shard, *rest: Any) -> None:
        with (self._staging.folder / shard.file).open("r+b") as file:
            end = os.fstat(file.fileno()).st_size
            os.pwrite(file.fileno(), bytes([os.pread(file.fileno(), 1, end - 1)[0] ^ 1]), end - 1)
        prove(self, shard, *rest)

    monkeypatch.setattr(ReadBack, "_prove", proved)
    with pytest.raises(PromiseBroken, match="was read back is not what"):
        surgeon.apply(tmp_path / "plan.yaml", str(old), tmp_path / "second", device="cpu")
    assert not (tmp_path / "second").exists()
