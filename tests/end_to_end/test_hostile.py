"""Hostile and broken arguments at the command line: one line that says what to do, exit 2, nothing left behind."""

from __future__ import annotations

import ast
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import surgeon
from surgeon.cli import app
from surgeon.common.names import check_new_name
from surgeon.errors import BadInput
from surgeon.models.tokens import token_batches
from surgeon.writing.finiteness import FiniteCheck
from surgeon.writing.preview import Preview
from tests import tiny
from tests.models.test_tokens import byte_tokenizer


def refused(*arguments: object) -> str:
    """Run the command line; it must exit with 2 and exactly one line, which is returned."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 2, (result.exit_code, result.stdout, result.stderr)
    lines = [line for line in result.stderr.splitlines() if line.startswith("surgeon: ")]
    assert len(lines) == 1, result.stderr
    assert "a bug in surgeon" not in lines[0]
    return lines[0]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base with a tokenizer, and two outputs of it: native and with gates."""
    folder = tmp_path_factory.mktemp("made")
    tiny.checkpoint(folder / "base", "llama", num_hidden_layers=2, vocab_size=300)
    byte_tokenizer(folder / "base", eos=True)
    (folder / "plan.yaml").write_text(
        json.dumps(
            {"surgeon": 1, "operations": [{"op": "insert_layers", "where": {"every": 1}, "init": {"kind": "copy"}}]}
        )
    )
    surgeon.apply(folder / "plan.yaml", str(folder / "base"), folder / "out")
    (folder / "text.txt").write_text("A text of some words.\n" * 40)
    return folder


def training(folder: Path, path: str, **source: object) -> Path:
    """A training config of one step on one source."""
    config = {"surgeon_train": 1, "steps": 1, "batch": 1, "length": 8}
    entry = {"name": "a", "path": path, "share": 1.0, "validation": 0.0, **source}
    (folder / "train.yaml").write_text(json.dumps(config | {"sources": [entry]}))
    return folder / "train.yaml"


NAMES = {
    "longer than the file system takes": ("x" * 300, "at most 223 fit here"),
    "its working folder would be too long": ("x" * 250, "choose a shorter name"),
    "letters of two bytes": ("é" * 126, "its name has 252 bytes"),
    "a long path": ("y/" * 3000 + "out", "choose another place"),
    "not UTF-8": ("a\udcffb", "not UTF-8"),
    "a newline": ("a\nb", "cannot be shown"),
    "a colour": ("a\x1b[31m", "cannot be shown"),
    "dots": ("no/such/..", "write the path without it"),
    "under a file": ("plan.yaml/out", "plan.yaml is not a folder"),
    "through what is not there": ("no/../out", "is not a folder"),
    "nothing": ("", "argument 4 of `apply` is empty"),
}


def test_names_that_nothing_can_be_written_to(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made)
    before = sorted(made.iterdir())
    for name, words in NAMES.values():
        assert words in refused("apply", "plan.yaml", "base", "--", name)
    # Every command that makes a folder or a file asks the same.
    config = training(made, "text.txt")
    name, words = NAMES["its working folder would be too long"]
    for command in (
        ["train", "out", config, name],
        ["revert", "out", name],
        ["delta", "out", name],
        ["demo", "--base", "base", name],
        ["report", "out", "--html", name],
        ["routing-report", "out", "--to", name],
    ):
        assert words in refused(*command), command
    config.unlink()
    assert sorted(made.iterdir()) == before
    # typer refuses this at the command line.
    with pytest.raises(BadInput, match="a name with a NUL character"):
        surgeon.apply("plan.yaml", "base", "a\0b")


def test_names_that_are_odd_and_fine(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("-x", "out/", "x" * 223, "ein Ort", "模型", "[red]", "a.yaml"):
        check_new_name(Path(name))
    for name in ("-x", "trailing/", "x" * 223):
        command = ["apply", str(made / "plan.yaml"), str(made / "base"), "--quiet", "--", name]
        assert CliRunner().invoke(app, command).exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["-x", "trailing", "x" * 223]


def test_a_destination_that_exists_is_no_argument_of_another_kind(made: Path, tmp_path: Path) -> None:
    """Nor is anything added to a refusal that names its own cause."""
    out, base = made / "out", made / "base"
    config = training(tmp_path, str(made / "text.txt"))
    for command, end in (
        (["revert", out, base], "choose another folder, or move it away"),
        (["train", out, config, out], "is the base itself, which is never written to; choose another folder"),
        (["delta", out, base], "choose another folder, or move it away"),
    ):
        assert refused(*command).endswith(end), command


def test_quiet_leaves_the_notes_of_a_preview_out(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Preview, "notes_on_it", ("a note of the plan",))
    for options, noted in (((), True), (("-q",), False)):
        shown = CliRunner().invoke(app, ["preview", str(made / "plan.yaml"), str(made / "base"), *options]).stdout
        assert ("note: a note of the plan" in shown) == noted and "insert_layers" in shown


BROKEN_TEXTS: dict[str, tuple[bytes, str]] = {
    "half.jsonl": (b'{"text": "ab\\ud800"}\n', "half.jsonl:1: character 3 of the text is half of a UTF-16 pair"),
    "latin.txt": (b"caf\xe9 and more", "not UTF-8"),
    "number.jsonl": (b'{"text": 3}\n', "no text (3)"),
    "deep.jsonl": (b"[" * 100_000 + b"\n", "not JSON"),
    "empty.parquet": (b"", "not a parquet file that can be read"),
    "cut.parquet": (b"PAR1", "not a parquet file that can be read"),
    "noise.parquet": (b"PAR1garbagePAR1", "get the file again, or leave it out"),
    "zipped.gz": (b"\x1f\x8b", "unpack it"),
    "empty.txt": (b"", "no document with text"),
}


@pytest.mark.parametrize("name", BROKEN_TEXTS)
def test_texts_that_cannot_be_read(name: str, made: Path, tmp_path: Path) -> None:
    """A run that ends before its first step leaves no working folder."""
    content, words = BROKEN_TEXTS[name]
    (tmp_path / name).write_bytes(content)
    assert words in refused("train", made / "out", training(tmp_path, name), tmp_path / "run")
    assert words in refused("evaluate", made / "base", "--data", tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "train.yaml"])


def test_halves_of_characters_in_chats_and_probes(made: Path, tmp_path: Path) -> None:
    half = '{"messages": [{"role": "assistant", "content": "a\\udc00"}]}\n'
    (tmp_path / "chat.jsonl").write_text(half)
    config = training(tmp_path, "chat.jsonl", kind="chat")
    out = tmp_path / "out"
    out.symlink_to(made / "out")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": "chatml"}))
    assert "message 1: character 2 of the text is half of a UTF-16 pair" in refused(
        "train", out, config, tmp_path / "run"
    )
    (tmp_path / "text.jsonl").write_text('{"text": "a\\udc00"}\n')
    assert "line 1: half of a UTF-16 pair" in refused("verify", made / "base", out, "--text", tmp_path / "text.jsonl")
    for text, words in (('"\\ud800"', "half of a UTF-16 pair"), ('"a\\0b"', "a NUL character")):
        (tmp_path / "plan.yaml").write_text(f"surgeon: 1\nseed: {text}\n")
        assert f"plan.yaml:2: {words}" in refused("preview", tmp_path / "plan.yaml", made / "base")


def test_a_damaged_row_group(made: Path, tmp_path: Path) -> None:
    """The footer is sound, the column is not: its text is no UTF-8."""
    texts = pyarrow.array([b"\xff\xfe text"], pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "bad.parquet")
    assert "row group 0 cannot be read" in refused("evaluate", made / "base", "--data", tmp_path / "bad.parquet")


def test_files_that_never_end(made: Path, tmp_path: Path) -> None:
    """A FIFO that nobody writes to, and a device."""
    os.mkfifo(tmp_path / "fifo")
    for file in (tmp_path / "fifo", Path("/dev/zero"), tmp_path):
        for command in (
            ["preview", f"{file}", made / "base"] if file.is_dir() else ["train", made / "out", file, "x"],
            ["report", made / "out", "--html", tmp_path / "a.html", "--text", f"a={file}"],
            ["verify", made / "base", made / "out", "--text", file],
            ["evaluate", made / "base", "--data", file],
        ):
            refused(*command)


def test_ids_that_are_no_row_of_the_embedding(made: Path, tmp_path: Path) -> None:
    """Named with the token, its id and the number of rows, by all that read text."""
    for name in ("base", "out"):
        shutil.copytree(made / name, tmp_path / name)
        tokenizer = json.loads((made / name / "tokenizer.json").read_text())
        vocabulary = tokenizer["model"]["vocab"]
        vocabulary["z"] = 700
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "text.txt").write_text("pizza " * 40)
    base, out, text = tmp_path / "base", tmp_path / "out", tmp_path / "text.txt"
    for command in (
        ["train", out, training(tmp_path, "text.txt"), tmp_path / "run"],
        ["evaluate", base, "--data", text],
    ):
        assert "gives 'z' the id 700, the model's embedding has only 300 rows (ids 0 to 299)" in refused(*command)
    # As verify and report take their text.
    with pytest.raises(BadInput, match="'z' the id 700"):
        token_batches(out, text=text, window=8, windows=1, vocabulary=300)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "out", "text.txt", "train.yaml"]
    # What the tokenizers library refuses, in its own words.
    for change in ({"vocab": {"a": -1}}, {"vocab": {"a": 2**40}}, {"type": "None"}):
        tokenizer = json.loads((made / "base" / "tokenizer.json").read_text())
        tokenizer["model"] |= change
        (base / "tokenizer.json").write_text(json.dumps(tokenizer))
        assert "no tokenizer that can be loaded" in refused("evaluate", base, "--data", text)


NOT_FINITE = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}


@pytest.mark.parametrize("dtype", NOT_FINITE)
def test_what_is_not_finite_is_seen_in_bytes(dtype: str) -> None:
    """Against torch, for the extremes of the format, wherever pieces are cut."""
    kind = getattr(torch, dtype)
    largest, tiniest = torch.finfo(kind).max, torch.finfo(kind).smallest_normal / 2
    ordinary = torch.tensor([0.0, -0.0, 1.5, -3.25, largest, -largest, tiniest, -tiniest], dtype=kind)
    for bad in (None, math.nan, math.inf, -math.inf):
        values = ordinary if bad is None else torch.cat([ordinary, torch.tensor([bad], dtype=kind), ordinary])
        content = values.view(torch.uint8).numpy().tobytes()
        for cut in (1, 3, 7, len(content)):
            check = FiniteCheck(NOT_FINITE[dtype])
            for begin in range(0, len(content), cut):
                check(content[begin : begin + cut])
            assert check.finite is (bad is None), (bad, cut)
    whole_numbers = FiniteCheck("I64")
    whole_numbers(b"\xff" * 64)
    assert whole_numbers.finite


@pytest.mark.parametrize("read_back", ["--read-back", "--no-read-back"])
def test_nan_in_a_copied_weight_is_said(read_back: str, made: Path, tmp_path: Path) -> None:
    """Bytes pass through; that they are no numbers is said while they are copied, not only by `verify`."""
    shutil.copytree(made / "base", tmp_path / "base")
    name = "model.layers.1.mlp.up_proj.weight"
    shard = next(file for file in (tmp_path / "base").glob("*.safetensors") if name in load_file(file))
    tensors = load_file(shard)
    tensors[name][0, 0] = math.inf
    save_file(tensors, shard, metadata={"format": "pt"})
    command = ["apply", made / "plan.yaml", tmp_path / "base", tmp_path / "out", read_back]
    applied = CliRunner().invoke(app, [str(argument) for argument in command])
    assert applied.exit_code == 0
    said = [line for line in applied.stderr.splitlines() if "NaN or infinity" in line]
    assert len(said) == 1
    assert said[0].startswith(f"{name}: holds NaN or infinity in the base, copied as it is")


# Rooms that meet files which anybody may have written.
ROOMS = ("checkpoint", "anatomy", "data", "plan", "training/config", "models/tokens.py", "common/yaml.py")


def refusals() -> Iterator[tuple[str, str]]:
    """Every sentence of a BadInput in these rooms, with the place where it stands."""
    package = Path(surgeon.__file__).parent
    for room in ROOMS:
        for file in [package / room] if room.endswith(".py") else sorted((package / room).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "BadInput" and node.args:
                    said = ast.unparse(node.args[0])
                    yield f"{file.relative_to(package)}:{node.lineno}", said


def test_refusals_say_what_to_do() -> None:
    """After what was found: a semicolon or a colon and what to do, or a question that leads there."""
    found = [(where, said) for where, said in refusals() if said.startswith(("f", "'", '"'))]
    assert len(found) > 100
    # A colon stands before what to do where a semicolon is taken; some sentences end with words made elsewhere.
    advice = re.compile(
        r"[;?]|_AGAIN|: (use|write|save|import|leave|put|give) "
        r"|\{_?(error|problem|way\}|led_below|why_no_weights|no_chat|damage|empty|then|PREFERENCES|NOT_READ)"
    )
    assert not [f"{where}: {said}" for where, said in found if not advice.search(said)]
