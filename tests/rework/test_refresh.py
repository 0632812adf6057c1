"""`surgeon refresh`: the code of an output that an earlier surgeon wrote, written anew, and nothing else of it."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import surgeon
from surgeon.errors import BadInput, PromiseBroken
from tests import tiny
from tests.checkpoints import write_plan
from tests.commands import refused
from tests.manifest.edits import edited

CODE = "modeling_surgeon.py"
STATES: dict[str, Any] = {
    "op": "mixture_of_control", "sites": ["attention"], "rank": 4, "routing": {"train": "batch_mean"}
}  # fmt: skip


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base and an output of it with control states, as this version writes it."""
    folder = tmp_path_factory.mktemp("grown")
    base = tiny.checkpoint(folder / "base", "llama")
    surgeon.apply(write_plan(folder / "plan.yaml", [STATES]), str(base), folder / "out")
    return base, folder / "out"


def earlier(out: Path, to: Path) -> Path:
    """A copy of an output with the code of an earlier version, which looked the cache up by its name."""
    shutil.copytree(out, to)
    code = (to / CODE).read_text()
    old = code.replace("cache_in(given)", 'given.get("past_key_values")')
    assert old != code
    return with_code(to, old)


def with_code(out: Path, code: str) -> Path:
    (out / CODE).write_text(code)
    digest = hashlib.sha256(code.encode()).hexdigest()
    return edited(out, lambda manifest: manifest["files"].update({CODE: digest}), seal=True)


def small(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in (CODE, "surgery.json")}


def test_an_earlier_output_is_refused_with_the_way_on(grown: tuple[Path, Path], tmp_path: Path) -> None:
    out = earlier(grown[1], tmp_path / "out")
    line = refused("verify", grown[0], out, "--static")
    assert f"`surgeon refresh {out}` writes this version's" in line and CODE in line


def test_only_the_code_and_its_digest_change(grown: tuple[Path, Path], tmp_path: Path) -> None:
    base, written = grown
    out = earlier(written, tmp_path / "out")
    before = json.loads((out / "surgery.json").read_text())
    found = surgeon.refresh(out)
    assert (out / CODE).read_bytes() == (written / CODE).read_bytes() and small(out) == small(written)
    after = json.loads((out / "surgery.json").read_text())
    assert found.before == before["files"][CODE] != found.now == after["files"][CODE]
    assert {key for key in after if after[key] != before.get(key)} == {"files", "sha256"}
    assert surgeon.verify(base, out, logits=False).holds
    # Again, there is nothing to do.
    content = (out / "surgery.json").read_bytes()
    assert surgeon.refresh(out).before == found.now and (out / "surgery.json").read_bytes() == content


def test_a_refresh_that_was_cut_off_is_finished(grown: tuple[Path, Path], tmp_path: Path) -> None:
    out = earlier(grown[1], tmp_path / "out")
    shutil.copyfile(grown[1] / CODE, out / CODE)
    surgeon.refresh(out)
    assert surgeon.verify(grown[0], out, logits=False).holds


def test_what_is_not_as_surgery_left_it_stays_as_it_is(grown: tuple[Path, Path], tmp_path: Path) -> None:
    out = earlier(grown[1], tmp_path / "out")
    shard = next(path for path in sorted(out.glob("*.safetensors")) if "layers.1" in str(load_file(path).keys()))
    held = load_file(shard)
    name = next(name for name in held if "q_proj" in name)
    held[name] = torch.zeros_like(held[name])
    save_file(held, shard, metadata={"format": "pt"})
    kept = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(PromiseBroken, match="base tensors: "):
        surgeon.refresh(out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == kept


def test_edited_code_and_native_outputs_are_refused(grown: tuple[Path, Path], tmp_path: Path) -> None:
    out = Path(shutil.copytree(grown[1], tmp_path / "out"))
    (out / CODE).write_text((out / CODE).read_text() + "\n# mine\n")
    assert f"{CODE}: was edited since the surgery" in refused("refresh", out)
    insert = {"op": "insert_layers", "where": {"after": [0]}, "init": {"kind": "copy"}}
    surgeon.apply(write_plan(tmp_path / "plan.yaml", [insert]), str(grown[0]), tmp_path / "deeper")
    assert "ships no code of surgeon's" in refused("refresh", tmp_path / "deeper")
    with pytest.raises(BadInput, match=r"no surgery\.json"):
        surgeon.refresh(grown[0])


def test_other_code_beside_it_is_refused_and_nothing_changes(grown: tuple[Path, Path], tmp_path: Path) -> None:
    out = earlier(grown[1], tmp_path / "out")
    (out / "generate.py").write_text("raise SystemExit\n")
    kept = {path.name: path.read_bytes() for path in out.iterdir()}
    assert "generate.py" in refused("refresh", out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == kept
