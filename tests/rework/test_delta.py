"""Deltas: what an output has beside its base, put back byte for byte or not at all; pushed, and the docs' commands."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import surgeon
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.cli import app
from surgeon.errors import BadInput
from surgeon.manifest.manifest import seal_of
from surgeon.rework import make_delta as making
from surgeon.rework.apply_delta import applying_job
from tests import tiny
from tests.checkpoint.stand_in_hub import Hub
from tests.checkpoints import train, write_plan
from tests.commands import refused
from tests.decoders import tiny_decoder
from tests.rework.test_revert import ADAPTERS, CONTROL, INSERT
from tests.share.test_push import hub as hub  # the fixture
from tests.training.test_train import config, grown
from tests.training.texts import add_tokenizer
from tests.verification.test_claims import DELETE, edited, edits, field_of, places

GRAFTS: list[dict[str, Any]] = [
    INSERT,
    CONTROL,
    {"op": "gated_adapters", "layers": "all", "size": 12},
    {"op": "pmoe_experts", "slots": 2},
    {"op": "mixture_of_control", "rank": 4},
]


@pytest.fixture
def account(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """An account that may make `user/repo`, to push to and to download from in this process."""
    from huggingface_hub import constants

    empty: Hub = request.getfixturevalue("hub")
    empty.repo_id = "user/repo"
    template = f"{empty.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return empty


@pytest.mark.parametrize(
    ("kind", "operation", "brought"),
    [
        # Query, key and value are rows of one matrix of the base; what is for each layer is its parts in another order.
        ("phi3", {"op": "upcycle_experts", "experts": 2, "top_k": 1}, "self_attn.q_proj.weight"),
        ("gemma4_text", INSERT | {"where": {"after": [1]}}, "embed_tokens_per_layer.weight"),
    ],
)
def test_what_is_put_together_of_the_base_is_not_in_a_delta(
    kind: str, operation: dict[str, Any], brought: str, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"sliding_window": None} if kind == "phi3" else {"hidden_size_per_layer_input": 8}
    base, out = tiny_decoder(tmp_path / "base", kind, **changes), tmp_path / "out"
    surgeon.apply(write_plan(tmp_path / "plan.yaml", [operation]), str(base), out)
    made = surgeon.inspect(out).manifest
    assert made is not None and any(brought in name for name in made.new_tensors)
    surgeon.make_delta(out, tmp_path / "delta")
    held = {name for path in (tmp_path / "delta").glob("*.safetensors") for name in load_file(path)}
    assert held and not any(brought in name for name in held)
    surgeon.apply_delta(tmp_path / "delta", str(base), tmp_path / "again")
    assert files(tmp_path / "again") == files(out)


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def make(folder: Path, operations: list[dict[str, Any]], family: str = "llama", **options: Any) -> Path:
    """A base with a tokenizer and a licence, and an output of it."""
    base = add_tokenizer(tiny.checkpoint(folder / "base", family))
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    (base / "LICENSE").write_text("terms")
    surgeon.apply(write_plan(folder / "plan.yaml", operations), str(base), folder / "out", **options)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, an output, and its delta."""
    folder = make(tmp_path_factory.mktemp("delta"), [INSERT])
    surgeon.make_delta(folder / "out", folder / "delta")
    return folder


@pytest.fixture
def spoilt(made: Path, tmp_path: Path) -> Iterator[Path]:
    """Copies, to be spoilt; nothing may be written beside them by what is refused."""
    folder = Path(shutil.copytree(made, tmp_path / "all"))
    before = sorted(path.name for path in folder.iterdir())
    yield folder
    assert sorted(path.name for path in folder.iterdir()) == before


def put_back(folder: Path) -> str:
    return refused("apply", "--delta", folder / "delta", folder / "base", folder / "again")


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("operations", [[INSERT], GRAFTS], ids=["native", "grafted"])
@pytest.mark.parametrize("trained", [False, True])
def test_round_trip(tmp_path: Path, family: str, operations: list[dict[str, Any]], trained: bool) -> None:
    make(tmp_path, operations, family, max_shard_bytes=20_000)
    if trained:
        train(tmp_path / "out", seed=1)
    out, delta, again = tmp_path / "out", tmp_path / "delta", tmp_path / "again"
    made = surgeon.make_delta(out, delta)
    manifest = surgeon.inspect(out).manifest
    held = {name for shard in delta.glob("*.safetensors") for name in load_file(shard)}
    assert held == manifest.new_tensors.keys()
    assert (made.tensors, made.whole) == (len(held), len(held) + len(manifest.base.tensors))
    assert len(list(delta.glob("*.safetensors"))) > 1
    assert "tokenizer.json" in made.from_base
    assert not {"tokenizer.json", "model.safetensors.index.json"} & files(delta).keys()
    assert (delta / "LICENSE").read_text() == "terms"
    put = surgeon.apply_delta(delta, str(tmp_path / "base"), again)
    assert (put.tensors, put.whole) == (made.tensors, made.whole)
    # The very files, headers of shards included; of shards that another tool saved, every tensor.
    found, expected = files(again), files(out)
    if trained:
        assert surgeon.diff(out, again, exact=True).identical
        found, expected = (
            {name: content for name, content in each.items() if "safetensors" not in name} for each in (found, expected)
        )
    assert found == expected
    verified = surgeon.verify(tmp_path / "base", again, logits=not trained, window=24, windows=1)
    without = [check for check in verified.checks if check.name != "decoding"]
    assert without == surgeon.verify(tmp_path / "base", out, logits=False).checks
    assert trained or verified.holds


def test_trained_base_tensors_go_along_and_one_shard_may_hold_both(tmp_path: Path) -> None:
    make(tmp_path, [INSERT])
    out = tmp_path / "out"
    train(out, "model.norm.weight", seed=2)
    whole = {name: value for shard in out.glob("*.safetensors") for name, value in load_file(shard).items()}
    for file in [*out.glob("*.safetensors"), out / "model.safetensors.index.json"]:
        file.unlink()
    save_file(whole, out / "model.safetensors", metadata={"format": "pt"})
    made = surgeon.make_delta(out, tmp_path / "delta")
    assert made.tensors == len(surgeon.inspect(out).manifest.new_tensors) + 1
    surgeon.apply_delta(tmp_path / "delta", str(tmp_path / "base"), tmp_path / "again")
    assert surgeon.diff(out, tmp_path / "again", exact=True).identical
    assert files(out).keys() == files(tmp_path / "again").keys()


def test_the_base_of_a_delta_is_that_of_the_last_surgery(tmp_path: Path) -> None:
    make(tmp_path, [INSERT])
    train(tmp_path / "out", seed=3)
    surgeon.apply(write_plan(tmp_path / "2.yaml", [ADAPTERS]), str(tmp_path / "out"), tmp_path / "second")
    made = surgeon.make_delta(tmp_path / "second", tmp_path / "delta")
    assert made.base == "out"
    assert "output of surgeon" in (tmp_path / "delta" / "README.md").read_text()
    told = put_back(tmp_path)
    assert "another checkpoint" in told
    assert "out" in told
    surgeon.apply_delta(tmp_path / "delta", str(tmp_path / "out"), tmp_path / "again")
    assert surgeon.diff(tmp_path / "second", tmp_path / "again", exact=True).identical
    assert (tmp_path / "second" / "surgery.json").read_bytes() == (tmp_path / "again" / "surgery.json").read_bytes()


def test_a_run_kept_as_a_delta(tmp_path: Path) -> None:
    out = grown(tmp_path)
    surgeon.train(out, config(tmp_path, steps=2), tmp_path / "run", device="cpu")
    surgeon.make_delta(tmp_path / "run", tmp_path / "delta")
    surgeon.apply_delta(tmp_path / "delta", str(tmp_path / "base"), tmp_path / "again")
    assert files(tmp_path / "again") == files(tmp_path / "run")


# What is refused.


def test_another_base(spoilt: Path) -> None:
    train(spoilt / "base", "model.layers.3.mlp.up_proj.weight", seed=1)
    told = put_back(spoilt)
    assert "model.layers.3.mlp.up_proj.weight: not what the delta's base holds" in told
    assert "Nothing was written" in told


def test_a_base_of_other_tensors(spoilt: Path) -> None:
    shutil.rmtree(spoilt / "base")
    tiny.checkpoint(spoilt / "base", "qwen2")
    assert "another checkpoint" in put_back(spoilt)


def test_a_tokenizer_that_differs(spoilt: Path, tmp_path: Path) -> None:
    (spoilt / "out" / "tokenizer_config.json").write_text("{}")
    shutil.rmtree(spoilt / "delta")
    surgeon.make_delta(spoilt / "out", spoilt / "delta")
    assert "tokenizer_config.json is not what the output had" in put_back(spoilt)
    shutil.rmtree(spoilt / "delta")
    made = surgeon.make_delta(spoilt / "out", spoilt / "delta", base=spoilt / "base")
    assert "tokenizer_config.json" not in made.from_base
    surgeon.apply_delta(spoilt / "delta", str(spoilt / "base"), tmp_path / "again")
    assert (tmp_path / "again" / "tokenizer_config.json").read_text() == "{}"


def edit_index(folder: Path, change: Any) -> None:
    file = folder / "delta" / "delta.json"
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))


def test_an_edited_delta(spoilt: Path) -> None:
    (shard,) = (spoilt / "delta").glob("*.safetensors")
    tensors = load_file(shard)
    name = sorted(tensors)[0]
    save_file(tensors | {name: torch.ones_like(tensors[name])}, shard, metadata={"format": "pt"})
    assert f"{name}: not what delta.json" in put_back(spoilt)
    save_file({key: value for key, value in tensors.items() if key != name}, shard, metadata={"format": "pt"})
    assert f"{name} is not where it says" in put_back(spoilt)


@pytest.mark.parametrize("name", ["config.json", "surgery.json"])
def test_an_edited_file(spoilt: Path, name: str) -> None:
    file = spoilt / "delta" / name
    file.write_bytes(file.read_bytes() + b" ")
    assert f"{name}: not what delta.json says" in put_back(spoilt)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.update(surgeon_delta=2),
        lambda data: data.update(more=1),
        lambda data: data["files"].update({"../../evil": "0" * 64}),
        lambda data: data["files"].update({"sub/evil.py": "0" * 64}),
        lambda data: data["files"].pop("config.json"),
        lambda data: data["from_base"].update({"evil.py": "0" * 64}),
        lambda data: data["shards"].update({"../model.safetensors": []}),
        lambda data: data["shards"].update({"model-9.safetensors": []}),
        lambda data: next(iter(data["shards"].values())).append("nobody's"),
        lambda data: next(iter(data["shards"].values())).pop(),
        lambda data: next(iter(data["shards"].values())).extend(next(iter(data["shards"].values()))[:1]),
        lambda data: data["tensors"].popitem(),
    ],
)
def test_an_edited_list(spoilt: Path, change: Any) -> None:
    edit_index(spoilt, change)
    assert "delta" in put_back(spoilt)


def test_any_field_of_a_delta_sealed_anew(spoilt: Path) -> None:
    """Each edited, emptied and left out: refused, or the output is what it was."""
    file, base = spoilt / "delta" / "delta.json", CheckpointFolder.open(spoilt / "base")
    data = json.loads(file.read_text())

    def written() -> Any:
        job = applying_job(making.Delta.open(spoilt / "delta"), base)
        return job.files, [(shard.file, [output.name for output in shard.outputs]) for shard in job.shards]

    expected, fields, refusals = written(), set(), 0
    for path, value in places(data):
        # One tensor, file or shard stands for all.
        if (field := field_of(path)) in fields:
            continue
        fields.add(field)
        for other in (*edits(value), DELETE):
            changed = edited(data, path, other)
            file.write_text(json.dumps(changed | {"sha256": seal_of(changed)}))
            try:
                assert written() == expected, f"{field}: {other!r}"
            except BadInput as error:
                assert "\n" not in str(error)
                refusals += 1
    assert refusals > len(fields) > 10


def test_a_delta_is_no_checkpoint_and_a_checkpoint_no_delta(spoilt: Path) -> None:
    for command in (["preview", "llama-pro"], ["inspect"], ["verify", spoilt / "base"]):
        assert "a delta, which lacks its base's tensors" in refused(*command, spoilt / "delta")
    assert "no delta.json" in refused("apply", "--delta", spoilt / "out", spoilt / "base", spoilt / "again")
    assert "no surgery.json" in refused("delta", spoilt / "base", spoilt / "again")
    assert "exists" in refused("delta", spoilt / "out", spoilt / "base")
    assert "exists" in refused("apply", "--delta", spoilt / "delta", spoilt / "base", spoilt / "out")


# Pushed.


@pytest.mark.parametrize("operations", [[INSERT], [ADAPTERS]], ids=["native", "grafted"])
def test_the_documented_way(
    account: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operations: list[dict[str, Any]]
) -> None:
    """The commands of docs/how-to/sharing.md, as they stand there."""
    make(tmp_path, operations)
    (tmp_path / "out").rename(tmp_path / "OUT")
    (tmp_path / "base").rename(tmp_path / "BASE")
    monkeypatch.chdir(tmp_path)
    section = (
        (Path(__file__).resolve().parents[2] / "docs" / "how-to" / "sharing.md")
        .read_text()
        .partition("## Deltas")[2]
        .partition("\n## ")[0]
    )
    commands = re.findall(r"^    (\S+) (.*)$", section, re.MULTILINE)
    assert len(commands) == 4
    for program, line in commands:
        if program == "hf":
            assert line == "upload user/repo DELTA"
            account.exists, account.files = True, files(tmp_path / "DELTA")
            continue
        ran = CliRunner().invoke(app, line.split())
        assert ran.exit_code == 0, (line, ran.stdout, ran.stderr)
    for name in ("OUT2", "OUT3"):
        assert files(tmp_path / name) == files(tmp_path / "OUT")


def test_a_delta_on_the_hub_is_no_base_and_gives_way_to_the_whole(account: Hub, made: Path, tmp_path: Path) -> None:
    surgeon.make_delta(made / "out", tmp_path / "delta")
    account.exists, account.files = True, files(tmp_path / "delta")
    with pytest.raises(BadInput, match="a delta, which lacks"):
        surgeon.preview("llama-pro", "user/repo")
    surgeon.push(made / "out", "user/repo", force=True)
    assert "delta.json" not in account.files
    assert surgeon.preview("llama-pro", "user/repo").parameters_new
    with pytest.raises(BadInput, match=r"no delta\.json there"):
        surgeon.apply_delta("user/repo", str(made / "base"), tmp_path / "again")
