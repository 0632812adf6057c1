"""Bad input at the command line: one clear line on stderr, exit 2, no traceback, nothing left behind."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from surgeon._version import __version__
from surgeon.anatomy.skeleton import build
from surgeon.cli import app
from surgeon.models.compare import LogitComparison
from surgeon.verification.verification import Verification
from tests.checkpoints import INDEX, edit_config, edit_tensor
from tests.commands import refused


def first_shard(base: Path) -> Path:
    return sorted(base.glob("*.safetensors"))[0]


def rewrite_header(base: Path, change: Callable[[dict], None]) -> None:
    shard = first_shard(base)
    raw = shard.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + size])
    change(header)
    new = json.dumps(header).encode()
    shard.write_bytes(struct.pack("<Q", len(new)) + new + raw[8 + size :])


def overlap(header: dict) -> None:
    names = [name for name in header if name != "__metadata__"]
    header[names[1]]["data_offsets"] = [header[names[1]]["data_offsets"][0] - 2, header[names[1]]["data_offsets"][1]]


def index_names(base: Path, value: str) -> None:
    index = json.loads((base / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = value
    (base / INDEX).write_text(json.dumps(index))


def pickle_only(base: Path) -> None:
    for shard in base.glob("*.safetensors"):
        shard.unlink()
    (base / INDEX).unlink()
    (base / "pytorch_model.bin").write_bytes(b"\x80\x02")


def replace_shard(base: Path, make: Callable[[Path], object]) -> None:
    shard = first_shard(base)
    shard.unlink()
    make(shard)


def flip_nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor[3, 1] = float("nan")
    return tensor


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"

BROKEN_BASES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "missing config": (lambda b: (b / "config.json").unlink(), ["config.json"]),
    "config not JSON": (lambda b: (b / "config.json").write_text("{"), ["config.json"]),
    "unknown model_type": (lambda b: edit_config(b, model_type="mumba"), ["mumba", "no text decoder or encoder"]),
    "missing shard": (lambda b: first_shard(b).unlink(), ["model-00001-of-"]),
    "extra shard": (
        lambda b: (b / "model-00009-of-00009.safetensors").write_bytes(first_shard(b).read_bytes()),
        ["00009"],
    ),
    "index leads out": (lambda b: index_names(b, "../evil.safetensors"), ["evil"]),
    "index absolute": (lambda b: index_names(b, "/etc/passwd"), ["passwd"]),
    "truncated shard": (lambda b: os.truncate(first_shard(b), first_shard(b).stat().st_size - 10), ["model-00001"]),
    "header too long": (lambda b: first_shard(b).write_bytes(struct.pack("<Q", 1 << 60) + b"{}"), ["model-00001"]),
    "header beyond file": (lambda b: first_shard(b).write_bytes(struct.pack("<Q", 5000) + b"{}"), ["model-00001"]),
    "header not JSON": (lambda b: first_shard(b).write_bytes(struct.pack("<Q", 8) + b"notjson!"), ["model-00001"]),
    "overlapping offsets": (lambda b: rewrite_header(b, overlap), ["model-00001"]),
    "unknown dtype": (
        lambda b: rewrite_header(
            b, lambda h: next(v for k, v in h.items() if k != "__metadata__").update(dtype="BF17")
        ),
        ["BF17"],
    ),
    "shape against config": (lambda b: edit_config(b, intermediate_size=64), ["mlp", "shape"]),
    "pickle only": (pickle_only, ["safetensors"]),
    "quantised": (
        lambda b: edit_config(b, quantization_config={"quant_method": "gptq"}),
        ["`quantization_config` is left over"],
    ),
    "packed": (
        lambda b: edit_config(b, quantization_config={"quant_method": "compressed-tensors"}),
        ["`quantization_config` is left over"],
    ),
    "own remote code": (
        lambda b: edit_config(b, model_type="own", auto_map={"AutoModel": "modeling_x.X"}),
        ["--trust-remote-code"],
    ),
    "lfs pointer": (lambda b: replace_shard(b, lambda p: p.write_bytes(LFS)), ["git lfs pull"]),
    "fifo": (lambda b: replace_shard(b, os.mkfifo), ["model-00001", "regular"]),
    "device": (lambda b: replace_shard(b, lambda p: p.symlink_to("/dev/zero")), ["model-00001"]),
    "directory as shard": (lambda b: replace_shard(b, Path.mkdir), ["model-00001"]),
    "NaN where weights are fused": (
        lambda b: edit_tensor(b, "model.layers.3.mlp.up_proj.weight", flip_nan),
        ["model.layers.3.mlp.up_proj.weight", "nan"],
    ),
}


@pytest.mark.parametrize("case", BROKEN_BASES)
def test_broken_bases(case: str, base: Path, tmp_path: Path) -> None:
    break_it, words = BROKEN_BASES[case]
    break_it(base)
    message = refused("apply", "opt-deus", base, tmp_path / "out")
    for word in words:
        assert word in message, message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base"]


def test_nan_is_no_obstacle_to_copying(base: Path, tmp_path: Path) -> None:
    """Bytes pass through undecoded, whatever they mean."""
    edit_tensor(base, "model.layers.3.mlp.up_proj.weight", flip_nan)
    assert CliRunner().invoke(app, ["apply", "llama-pro", str(base), str(tmp_path / "out")]).exit_code == 0


def test_missing_base_and_plan(base: Path, tmp_path: Path) -> None:
    assert "absent" in refused("apply", "opt-deus", tmp_path / "absent", tmp_path / "out")
    assert "did you mean `opt-deus`" in refused("preview", "opt-dues", base)
    assert "absent.yaml" in refused("preview", tmp_path / "absent.yaml", base)


@pytest.mark.parametrize(
    ("insert", "words"),
    [
        ({"where": {"after": [6]}, "init": {"kind": "copy"}}, ["plan.yaml:5", "no layer 6", "0 to 5"]),
        ({"where": {"after": [5]}, "init": {"kind": "average"}}, ["plan.yaml:5", "layer above"]),
        ({"where": "all", "count": 9, "init": {"kind": "copy"}}, ["`count` 9", "5 gaps"]),
        ({"where": {"every": 2}, "per_gap": 3, "init": {"kind": "copy"}}, ["per_gap", "only 2"]),
        ({"where": "all", "per_gap": 2, "init": {"kind": "ot_fusion"}}, ["per_gap", "copy or random"]),
        ({"where": {"every": 99}, "init": {"kind": "copy"}}, ["matches nothing"]),
    ],
)
def test_plans_that_do_not_fit_the_base(
    insert: dict, words: list[str], base: Path, plan: Callable[..., Path], tmp_path: Path
) -> None:
    message = refused("apply", plan(**insert), base, tmp_path / "out")
    for word in words:
        assert word in message, message
    assert not (tmp_path / "out").exists()


def test_destinations(base: Path, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "thesis.txt").write_text("mine")
    assert "exists and holds thesis.txt" in refused("apply", "copy", base, taken)
    assert "base" in refused("apply", "copy", base, base)
    assert "base" in refused("apply", "copy", base, base / "inside")
    (tmp_path / "above").symlink_to(base / "..")
    refused("apply", "copy", base, tmp_path / "above")
    refused("apply", "copy", base, tmp_path / "no" / "such" / "parent")
    assert not (base / "inside").exists()


def test_devices_and_sizes(base: Path, tmp_path: Path) -> None:
    assert "cuda:99" in refused("apply", "opt-deus", base, tmp_path / "out", "--device", "cuda:99")
    assert "unknown" in refused("apply", "opt-deus", base, tmp_path / "out", "--device", "gpu")
    assert "500MB" in refused("apply", "opt-deus", base, tmp_path / "out", "--max-shard-size", "big")
    assert not (tmp_path / "out").exists()


def test_broken_promises_exit_3(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    runner = CliRunner()
    assert runner.invoke(app, ["apply", "opt-deus", str(base), str(out)]).exit_code == 0
    edit_tensor(out, "model.layers.3.self_attn.o_proj.weight", lambda t: t + 1)
    result = runner.invoke(app, ["verify", str(base), str(out)])
    assert result.exit_code == 3
    assert "model.layers.3.self_attn.o_proj.weight" in result.stdout


def test_a_changed_base_tensor_is_named(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    runner = CliRunner()
    assert runner.invoke(app, ["apply", "copy", str(base), str(out)]).exit_code == 0
    edit_tensor(out, "model.layers.0.mlp.up_proj.weight", lambda t: t * 2)
    result = runner.invoke(app, ["verify", str(base), str(out), "--static", "--json"])
    assert result.exit_code == 3
    broken = [check for check in json.loads(result.stdout)["checks"] if not check["holds"]]
    assert [check["name"] for check in broken] == ["base tensors"]
    assert "model.layers.0.mlp.up_proj.weight" in broken[0]["detail"]


def test_what_is_no_output_of_surgeon(base: Path, tmp_path: Path) -> None:
    assert "surgery.json" in refused("revert", base, tmp_path / "earlier")
    out = tmp_path / "out"
    CliRunner().invoke(app, ["apply", "copy", str(base), str(out)])
    manifest = json.loads((out / "surgery.json").read_text())
    for version in (1, 99):
        (out / "surgery.json").write_text(json.dumps(manifest | {"surgeon_manifest": version}))
        message = refused("verify", base, out)
        assert f"manifest format {version}, this surgeon reads 3" in message and "by the same plan" in message
    (out / "surgery.json").write_text(json.dumps(manifest | {"extra": 1}))
    assert "extra" in refused("inspect", out)


def test_a_bug_is_one_line_too(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def boom(*_: object, **__: object) -> None:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr("surgeon.inspect", boom, raising=False)
    assert "a bug in surgeon: RuntimeError: first line (" in refused("inspect", base, code=1)


def test_the_version_needs_no_command() -> None:
    for arguments in (["--version"], ["--debug", "--version"]):
        shown = CliRunner().invoke(app, arguments)
        assert (shown.exit_code, shown.stdout) == (0, f"surgeon {__version__}\n"), shown.output


def test_preview_of_405b_shape_from_sparse_shards(tmp_path: Path) -> None:
    """126 layers of width 16384 in 191 shards that are holes: headers and config are all that is read."""
    from surgeon.checkpoint.header import build_header

    folder = tmp_path / "405b"
    folder.mkdir()
    sizes = {
        "num_hidden_layers": 126,
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
    }
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False, **sizes}
    (folder / "config.json").write_text(json.dumps(config))
    held_in_memory = build(config).model.state_dict(keep_vars=True)
    entries = [(name, "BF16", tuple(value.shape)) for name, value in held_in_memory.items()]
    weight_map = {}
    for number in range(191):
        file = f"model-{number + 1:05d}-of-00191.safetensors"
        held = entries[number::191]
        header, places = build_header(held, metadata={"format": "pt"})
        with (folder / file).open("wb") as shard:
            shard.write(header)
            shard.truncate(places[-1][1])
        weight_map |= {name: file for name, _, _ in held}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    result = CliRunner().invoke(app, ["preview", "opt-deus", str(folder), "--json"])
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["parameters"]["before"] == 405_853_388_800
    assert len(told["layers"]) == 189
    assert told["promise"] == "exact"


def test_logits_that_are_no_numbers_are_told_in_valid_json() -> None:
    infinite = LogitComparison("prefill", "bfloat16", 8, False, math.inf, math.inf, 0.0, 1.0, math.inf)
    told = json.dumps(Verification("none", [], [infinite]).to_json(), allow_nan=False)
    assert json.loads(told)["comparisons"][0]["kl"] == "inf"
