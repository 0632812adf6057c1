"""A byte flipped in every file of an output and of a delta, files that were not there, and headers that lie."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest

import surgeon
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.common.check import Check
from surgeon.common.listener import Quiet
from surgeon.errors import BadInput, SurgeonError
from tests import tiny
from tests.checkpoints import edit_tensor, weights
from tests.manifest.edits import edited
from tests.verification.outputs import Made


@pytest.fixture
def made(outputs: dict[str, Made]) -> Made:
    """An output of three surgeries, trained, with code, and the base of the last."""
    return outputs["three"]


@pytest.fixture
def out(made: Made, tmp_path: Path) -> Path:
    """A copy of the output, to be spoilt."""
    return Path(shutil.copytree(made.out, tmp_path / "out"))


def files_of(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def flip(file: Path, place: float) -> None:
    """Flip one bit of a file, at a share of its length."""
    content = bytearray(file.read_bytes())
    content[int(place * (len(content) - 1))] ^= 1
    file.write_bytes(content)


def checks(base: Path, out: Path) -> list[Check]:
    return surgeon.verify(base, out, logits=False, trust_remote_code=True).checks


def refused_or_broken(base: Path, out: Path) -> bool:
    try:
        return not all(check.holds for check in checks(base, out))
    except SurgeonError:
        return True


def test_a_byte_flipped_in_any_file_is_found_against_the_base(made: Made, out: Path) -> None:
    assert all(check.holds and not check.note for check in checks(made.base, out))
    for name in files_of(out):
        for place in (0.5, 1.0):
            whole = (out / name).read_bytes()
            flip(out / name, place)
            if name == "README.md":
                # It may be edited, and is another once it is pushed: that is said, and no promise is broken.
                notes = [check for check in checks(made.base, out) if check.note]
                assert [note.name for note in notes] == ["card"]
            else:
                assert refused_or_broken(made.base, out), name
            (out / name).write_bytes(whole)


def test_revert_writes_no_file_that_is_not_what_the_state_had(made: Made, out: Path, tmp_path: Path) -> None:
    carried = [name for name in files_of(made.base) if name in CheckpointFolder.open(made.base).side_files]
    assert len(carried) > 3
    for name in carried:
        (out / name).write_bytes((out / name).read_bytes() + b"\n")
    (out / "vocab.txt").write_text("not there before")
    listener = Quiet()
    reverted = surgeon.revert(out, tmp_path / "back", listener=listener)
    assert not {*carried, "vocab.txt"} & {*files_of(tmp_path / "back")}
    assert {*carried, "vocab.txt"} <= {*reverted.left_behind}
    for name in carried:
        assert any(name in line and "the base has it" in line for line in listener.said)


def test_a_byte_flipped_in_any_file_of_a_delta_is_refused(made: Made, tmp_path: Path) -> None:
    delta = Path(shutil.copytree(made.out.parent / "delta", tmp_path / "delta"))
    for name in files_of(delta):
        if name == "README.md":
            continue  # the delta's card, which is never read; the output's is README.output.md
        for place in (0.5, 1.0):
            whole = (delta / name).read_bytes()
            flip(delta / name, place)
            with pytest.raises(SurgeonError):
                surgeon.apply_delta(delta, str(made.base), tmp_path / "again", trust_remote_code=True)
            (delta / name).write_bytes(whole)
    assert files_of(tmp_path) == [f"delta/{name}" for name in files_of(delta)]
    surgeon.apply_delta(delta, str(made.base), tmp_path / "again")
    assert all(check.holds and not check.note for check in checks(made.base, tmp_path / "again"))


def test_a_header_of_another_dtype_is_refused(made: Made, out: Path, tmp_path: Path) -> None:
    """The bytes, and so their digest, are the same: bfloat16 read as float16 is another model."""
    delta = Path(shutil.copytree(made.out.parent / "delta", tmp_path / "delta"))
    for folder in (out, delta):
        for shard in folder.glob("*.safetensors"):
            shard.write_bytes(shard.read_bytes().replace(b'"dtype":"BF16"', b'"dtype":"F16" '))
    assert refused_or_broken(made.base, out)
    with pytest.raises(BadInput, match=r"F16 \[.*\] now, BF16 \[.*\] then"):
        surgeon.revert(out, tmp_path / "back")
    with pytest.raises(BadInput, match="not of the dtype"):
        surgeon.apply_delta(delta, str(made.base), tmp_path / "again")


STRANGERS: dict[str, bool] = {
    "adapter_config.json": True,
    "adapter_model.safetensors": True,
    "pytorch_model.bin": True,
    "custom_generate/generate.py": True,
    "video_preprocessor_config.json": True,
    "tokenizer.model": True,
    "vocab.txt": True,
    "additional_chat_templates/more.jinja": True,
    "notes.md": False,
    "model.gguf": False,
    "training_args.bin": False,
    "results.json": False,
    ".gitattributes": False,
    "original/params.bin": False,
}


@pytest.mark.parametrize("name", STRANGERS)
def test_files_that_surgeon_did_not_write(name: str, made: Made, out: Path) -> None:
    """What transformers may load is no output of the plan; anything else is named, and in nobody's way."""
    (out / name).parent.mkdir(exist_ok=True)
    (out / name).write_text("{}")
    if STRANGERS[name]:
        assert refused_or_broken(made.base, out)
        return
    found = {check.name: check for check in checks(made.base, out)}
    assert all(check.holds for check in found.values())
    assert found["other files"].note and name.partition("/")[0] in found["other files"].detail


@pytest.mark.parametrize("command", ["verify", "apply --delta"])
def test_a_base_of_another_config_is_another_base(command: str, made: Made, tmp_path: Path) -> None:
    other = Path(shutil.copytree(made.base, tmp_path / "other"))
    text = (other / "config.json").read_text()
    (other / "config.json").write_text(text.replace('"rope_theta": 10000.0', '"rope_theta": 5000.0'))
    assert (other / "config.json").read_text() != text
    if command == "verify":
        assert refused_or_broken(other, made.out)
        return
    with pytest.raises(BadInput, match=r"config\.json: not what the delta's base holds"):
        surgeon.apply_delta(made.out.parent / "delta", str(other), tmp_path / "again")


def zeroed(out: Path) -> None:
    """400 bytes of a tensor of the base, and a manifest by which the base held them and everything may train."""
    tensor = CheckpointFolder.open(out).tensors["model.embed_tokens.weight"]
    content = bytearray((out / tensor.file).read_bytes())
    content[tensor.begin : tensor.begin + 400] = bytes(400)
    (out / tensor.file).write_bytes(content)
    digest = hashlib.sha256(content[tensor.begin : tensor.end]).hexdigest()

    def change(manifest: dict[str, Any]) -> None:
        manifest["base"]["tensors"][tensor.name]["sha256"] = digest
        for operation in manifest["operations"]:
            operation["trains"] = "all"

    edited(out, change, seal=True)


def test_zeroed_weights_behind_an_edited_manifest(made: Made, out: Path, tmp_path: Path) -> None:
    first = made.base.parent / "base"
    digest = surgeon.inspect(made.out).manifest.base_digest
    zeroed(out)
    for earlier in (made.base, first):
        assert refused_or_broken(earlier, out)
    with pytest.raises(BadInput, match=f"not the {digest} asked for"):
        surgeon.revert(out, tmp_path / "back", base_digest=digest)
    with pytest.raises(BadInput, match=f"and {made.base} differ in"):
        surgeon.revert(out, tmp_path / "back", base=made.base)
    with pytest.raises(BadInput, match=f"and {first} differ in"):
        surgeon.revert(made.out, tmp_path / "back", base=first)
    assert not (tmp_path / "back").exists()
    for name, given in {"back": {"base_digest": digest}, "again": {"base_digest": digest, "base": made.base}}.items():
        assert surgeon.revert(made.out, tmp_path / name, **given).checked_against == tuple(sorted(given))
    # Without either it is OUT's own word, and that is said.
    told = Quiet()
    alone = surgeon.revert(out, tmp_path / "believed", listener=told).to_json()
    assert alone["checked_against"] == [] and alone["digest"] != digest
    assert any("only its own surgery.json says" in line and alone["digest"] in line for line in told.said)


@pytest.mark.parametrize("seal", [False, True])
def test_an_edited_config_of_the_base_is_not_written_out(seal: bool, made: Made, out: Path, tmp_path: Path) -> None:
    """Alone the edit is seen by the seal; sealed anew, by the digest that apply showed."""
    digest = surgeon.inspect(made.out).manifest.base_digest
    edited(out, lambda manifest: manifest["base"]["config"]["rope_parameters"].update(rope_theta=5000.0), seal=seal)
    with pytest.raises(BadInput, match="asked for" if seal else "edited since surgeon wrote it"):
        surgeon.revert(out, tmp_path / "back", base_digest=digest if seal else None)
    assert not (tmp_path / "back").exists()


def test_code_that_no_version_at_hand_shipped(made: Made, out: Path) -> None:
    """Trusted by the user, and known to the manifest, which its writer sealed: this version's it is not."""
    name = "modeling_surgeon.py"
    (out / name).write_bytes((out / name).read_bytes() + b"# more\n")
    digest = hashlib.sha256((out / name).read_bytes()).hexdigest()
    edited(out, lambda manifest: manifest["files"].update({name: digest}), seal=True)
    assert [check.name for check in checks(made.base, out) if not check.holds] == ["code"]
    edited(out, lambda manifest: manifest["tool"].update(version="0.0.1"), seal=True)
    noted = [check.name for check in checks(made.base, out) if check.note]
    assert noted == ["code", "written by", "card"]
    assert surgeon.verify(made.base, out, logits=False, trust_remote_code=True).holds


def test_a_base_of_another_kind_is_one_check(made: Made, tmp_path: Path) -> None:
    other = tiny.checkpoint(tmp_path / "other", "qwen2")
    assert [check.name for check in checks(other, made.out) if not check.holds] == ["base"]


def test_another_base_of_other_shapes_is_named_first(tmp_path: Path) -> None:
    base = tiny.checkpoint(tmp_path / "base", "llama")
    other = tiny.checkpoint(tmp_path / "other", "qwen3")
    surgeon.apply("llama-pro", base, tmp_path / "out")
    first = checks(other, tmp_path / "out")[0]
    assert (first.name, first.holds) == ("base", False)
    assert first.detail.startswith("not the base this was made from; differing: config.json, ")
    assert [check.name for check in checks(base, tmp_path / "out")].count("base") == 1


def test_a_foreign_base_and_an_output_in_the_base_s_place_are_bad_input(tmp_path: Path) -> None:
    """And a base with one tensor changed breaks the promise, as before."""
    base = tiny.checkpoint(tmp_path / "base", "llama")
    out = surgeon.apply("llama-pro", base, tmp_path / "out").path
    further = surgeon.apply("llama-pro", out, tmp_path / "further").path
    with pytest.raises(BadInput, match=r"further: was made from .*out; did you swap BASE and OUT\?"):
        checks(further, out)
    changed = shutil.copytree(base, tmp_path / "changed")
    for number, name in enumerate(weights(base)):
        edit_tensor(changed, name, lambda value: value + 1)
        if number == 0:
            assert "base" in {check.name for check in checks(changed, out) if not check.holds}
    with pytest.raises(BadInput, match=r"changed: no tensor of it is of the base that OUT was made from; give that"):
        checks(changed, out)
