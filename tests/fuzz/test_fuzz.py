"""Files that anybody may have written, made wrong in every way: refused in one line, or the result holds.

Never a traceback (exit 1), never a hang, never an output that `verify` does not confirm. The suite takes a few examples
of each file, always the same; `SURGEON_FUZZ=2000 python -m pytest tests/fuzz` takes that many times as many, other ones
each time.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import surgeon
from surgeon.cli import app
from surgeon.common.checked_yaml import MOST_PROBLEMS
from tests import tiny
from tests.fuzz.mutations import mutated_bytes, mutated_json, mutated_shard, mutated_text
from tests.models.test_tokens import byte_tokenizer

TIMES = int(os.environ.get("SURGEON_FUZZ", "1"))
INDEX = "model.safetensors.index.json"
# A command takes about a tenth of a second of the processor here; what takes this long is as good as hanging.
LIMIT_SECONDS = 20

PLAN = {
    "surgeon": 1,
    "seed": 3,
    "operations": [
        {"op": "insert_layers", "where": {"every": 2}, "init": {"kind": "ot_fusion", "reg": 0.1}, "zero_init": True}
    ],
}
GRAFT = {
    "surgeon": 1,
    "operations": [
        {"op": "control_llm", "layers": {"every": 2}, "interpolator": {"kind": "lerp", "alpha": 0.5}},
        {"op": "gated_adapters", "layers": "all", "size": 4, "local_loss": {"kind": "l1", "weight": 0.01}},
    ],
}
TRAIN = {
    "surgeon_train": 1,
    "steps": 1,
    "batch": 1,
    "length": 8,
    "optimizer": {"lr": 1e-3, "warmup": 0, "betas": [0.9, 0.95]},
    "sources": [{"name": "a", "path": "texts.jsonl", "share": 1.0, "validation": 0.5, "role": "new"}],
}
TEXTS = [{"text": f"one text of some words, number {number}"} for number in range(4)]


def fuzzed(examples: int) -> Callable[[Any], Any]:
    """The same examples in each run of the suite; others where more are asked for."""
    return settings(
        max_examples=examples * TIMES,
        derandomize=TIMES == 1,
        database=None,
        # By the clock a busy machine would fail; see `run`, and `timeout` for what waits for ever.
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def run(*arguments: object, codes: tuple[int, ...]) -> int:
    """Run the command line; it must end with one of `codes`, and with a line for each mistake where it refuses."""
    begun = time.process_time()
    ran = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert time.process_time() - begun < LIMIT_SECONDS, arguments
    assert ran.exit_code in codes, (arguments, ran.exit_code, ran.stdout[-500:], ran.stderr[-2000:])
    if ran.exit_code == 2:
        lines = [line for line in ran.stderr.splitlines() if line.startswith("surgeon: ")]
        # Beside them there may be notes, which are said before.
        assert 1 <= len(lines) <= MOST_PROBLEMS and ran.stderr.rstrip().splitlines()[-len(lines) :] == lines, ran.stderr
    return ran.exit_code


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What examples are made from: a base, an output with grafts, a plan, a training config and its texts."""
    folder = tmp_path_factory.mktemp("sound")
    small = {
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_attention_heads": 2,
        "vocab_size": 300,
    }
    tiny.checkpoint(folder / "base", "llama", shard="10KB", num_key_value_heads=1, head_dim=4, **small)
    byte_tokenizer(folder / "base", eos=True)
    (folder / "plan.yaml").write_text(json.dumps(PLAN))
    (folder / "graft.yaml").write_text(json.dumps(GRAFT))
    (folder / "train.yaml").write_text(json.dumps(TRAIN))
    (folder / "texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in TEXTS))
    surgeon.apply(folder / "graft.yaml", str(folder / "base"), folder / "out")
    return folder


class Copy:
    """A copy of the sound files, for one example."""

    def __init__(self, sound: Path) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="surgeon-fuzz-")
        self.path = Path(self._home.name) / "work"
        shutil.copytree(sound, self.path)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self._home.cleanup()


def apply_and_verify(folder: Path, plan: str = "plan.yaml") -> None:
    """What is accepted must be an output that holds; what is refused leaves nothing behind."""
    out = folder / "grown"
    before = set(folder.iterdir())
    if run("apply", folder / plan, folder / "base", out, "--quiet", codes=(0, 2)) == 0:
        run("verify", folder / "base", out, "--static", "--quiet", codes=(0,))
        if TIMES > 1:
            run("verify", folder / "base", out, "--window", 4, "--windows", 1, "--quiet", codes=(0, 2))
    else:
        assert set(folder.iterdir()) == before


@fuzzed(40)
@given(st.data())
@pytest.mark.timeout(900 * TIMES)
def test_files_of_a_base(sound: Path, data: st.DataObject) -> None:
    with Copy(sound) as folder:
        name = data.draw(
            st.sampled_from(["config.json", "config.json", INDEX, "shard", "shard", "generation_config.json"])
        )
        if name == "shard":
            file = data.draw(st.sampled_from(sorted((folder / "base").glob("*.safetensors"))))
            file.write_bytes(mutated_shard(data.draw, file.read_bytes()))
        else:
            file = folder / "base" / name
            file.write_bytes(mutated_text(data.draw, file.read_bytes()))
        apply_and_verify(folder, data.draw(st.sampled_from(["plan.yaml", "graft.yaml"])))


@fuzzed(16)
@given(st.data())
@pytest.mark.timeout(900 * TIMES)
def test_files_of_an_output(sound: Path, data: st.DataObject) -> None:
    """Its manifest, its config with grafts, its shards: `verify` holds, refuses or denies, and so do the others."""
    with Copy(sound) as folder:
        out = folder / "out"
        name = data.draw(st.sampled_from(["surgery.json", "surgery.json", "config.json", "shard"]))
        if name == "shard":
            file = data.draw(st.sampled_from(sorted(out.glob("*.safetensors"))))
            file.write_bytes(mutated_shard(data.draw, file.read_bytes()))
        else:
            (out / name).write_bytes(mutated_text(data.draw, (out / name).read_bytes()))
        run("verify", folder / "base", out, "--static", "--quiet", codes=(0, 2, 3))
        run("inspect", out, codes=(0, 2))
        if TIMES > 1:
            run("revert", out, folder / "earlier", "--quiet", codes=(0, 2, 3))
            run("delta", out, folder / "delta", "--quiet", codes=(0, 2, 3))
            run("report", out, "--html", folder / "page.html", "--quiet", codes=(0, 2, 3))
            run("apply", folder / "plan.yaml", out, folder / "again", "--quiet", codes=(0, 2))


@fuzzed(24)
@given(st.data())
@pytest.mark.timeout(900 * TIMES)
def test_plans(sound: Path, data: st.DataObject) -> None:
    with Copy(sound) as folder:
        plan = data.draw(st.sampled_from(["plan.yaml", "graft.yaml"]))
        (folder / plan).write_bytes(_mutated_yaml(data.draw, (folder / plan).read_bytes()))
        apply_and_verify(folder, plan)


@fuzzed(6)
@given(st.data())
@pytest.mark.timeout(900 * TIMES)
def test_training_configs(sound: Path, data: st.DataObject) -> None:
    with Copy(sound) as folder:
        file = folder / "train.yaml"
        file.write_bytes(_mutated_yaml(data.draw, file.read_bytes()))
        # Numbers of steps that are asked for honestly take long.
        read = _read(file)
        if isinstance(read, dict) and any(type(read.get(key)) is int and read[key] > 64 for key in ("steps", "batch")):
            return
        run("train", folder / "out", file, folder / "run", "--quiet", codes=(0, 2))


@fuzzed(6)
@given(st.data())
@pytest.mark.timeout(900 * TIMES)
def test_tokenizers_and_texts(sound: Path, data: st.DataObject) -> None:
    with Copy(sound) as folder:
        name = data.draw(st.sampled_from(["tokenizer.json", "tokenizer_config.json", "texts.jsonl"]))
        file = folder / name if name == "texts.jsonl" else folder / "base" / name
        content = file.read_bytes()
        if name == "texts.jsonl":
            first, rest = content.split(b"\n", 1)
            file.write_bytes(mutated_text(data.draw, first) + b"\n" + rest)
        else:
            file.write_bytes(mutated_text(data.draw, content))
        run("evaluate", folder / "base", "--data", folder / "texts.jsonl", "--quiet", codes=(0, 2))


def _mutated_yaml(draw: Callable[[Any], Any], content: bytes) -> bytes:
    if draw(st.integers(0, 3)):
        return mutated_json(draw, json.loads(content)).encode("utf-8", "surrogatepass")
    return mutated_bytes(draw, yaml.safe_dump(json.loads(content)).encode())


def _read(file: Path) -> Any:
    try:
        return yaml.safe_load(file.read_bytes())
    except (yaml.YAMLError, ValueError):
        return None
