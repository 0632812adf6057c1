"""Paths as people give them: each is what can be opened, or is refused with the way on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import surgeon
from surgeon.checkpoint.hub import locate
from surgeon.common.places import meant, named
from surgeon.common.yaml import parse_yaml
from surgeon.errors import BadInput

PAGE = "https://huggingface.co/org/a-b.c"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("~/base", "HOME/base"),
        ("$HOME/base", "HOME/base"),
        ("${HOME}/base", "HOME/base"),
        ("$NOWHERE/base", "$NOWHERE/base"),
        ("org/a-b.c@main", "org/a-b.c@main"),
        ("hf://org/a-b.c", "org/a-b.c"),
        ("hf:/org/a-b.c@v1", "org/a-b.c@v1"),
        ("hf:org/a-b.c", "org/a-b.c"),
        (PAGE, "org/a-b.c"),
        (f"{PAGE}/", "org/a-b.c"),
        (f"{PAGE}?library=transformers#usage", "org/a-b.c"),
        (PAGE.removeprefix("https://"), "org/a-b.c"),
        (PAGE.replace("//", "/"), "org/a-b.c"),
        (f"{PAGE}/tree/main", "org/a-b.c@main"),
        (f"{PAGE}/tree/refs%2Fpr%2F1", "org/a-b.c@refs/pr/1"),
        (f"{PAGE}/blob/v2/config.json", "org/a-b.c@v2"),
        (f"{PAGE}/resolve/main/a/b.safetensors?download=true", "org/a-b.c@main"),
    ],
)
def test_what_people_give(given: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NOWHERE", raising=False)
    assert meant(given) == found.replace("HOME", str(tmp_path))


@pytest.mark.parametrize("rest", ["gpt2", "spaces/org/a", "org/a/tree/main/onnx", "org/a/discussions"])
def test_an_address_of_no_model_is_led_on(rest: str) -> None:
    with pytest.raises(BadInput, match=r"of no model's page; give its id, `user/name`"):
        locate(f"https://huggingface.co/{rest}", revision=None)
    pages = ("https://huggingface.co/datasets/org/a", "hf://datasets/org/a/a.jsonl", "hf:/datasets/org/a")
    for address in (*pages, "hf:datasets/org/a"):
        with pytest.raises(BadInput, match="of a dataset; give dataset:USER/NAME for `--data` or a source"):
            meant(address)


def test_a_name_that_is_none_is_at_fault(tmp_path: Path) -> None:
    file = tmp_path / "a=b.txt"
    for name in ("my text", "", "a.b", "x" * 61):
        with pytest.raises(BadInput, match="is no name for one; a name has 1 to 60 letters, digits, _ and -"):
            named(f"{name}={file}")
    file.touch()
    assert named(file) == (None, str(file))
    assert named("fr=") == (None, "fr=")
    assert named(f"fr={file}") == ("fr", str(file))


def test_what_is_there_is_meant_whatever_it_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("~", "$HOME", "hf.co/org/a"):
        (tmp_path / name).mkdir(parents=True)
        assert meant(name) == name


def test_a_folder_of_the_cache_is_its_snapshot(tmp_path: Path) -> None:
    folder = tmp_path / "models--org--a"
    (folder / "snapshots" / "1").mkdir(parents=True)
    for given in (folder, folder / "snapshots", folder / "snapshots" / "1"):
        assert meant(str(given)) == str(folder / "snapshots" / "1")
    (folder / "snapshots" / "2").mkdir()
    with pytest.raises(BadInput, match="cache with 2 snapshots; give the folder of one, or the model's id"):
        meant(str(folder))


@pytest.mark.parametrize(
    ("name", "words"), [("model.gguf", "does not begin as a GGUF file"), ("a.safetensors", "its config")]
)
def test_a_file_as_a_base_is_led_on(name: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    with pytest.raises(BadInput, match=words):
        surgeon.open_checkpoint(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: &a {b: 1}\nc:\n  <<: *a\n", "x.yaml:3: merge keys"),
        ("a:\n\u00a0 b: 1\n", "x.yaml:2: U+00A0 where"),
        ("a:\n  -\u00a0b: 1\n", "x.yaml:2: U+00A0 where"),
        ("a: 1\nb:\u00a02\n", "x.yaml:2: U+00A0 where"),
        ("a: 1\n\n  \u200bb: 2\n", "x.yaml:3: U+200B where"),
        # What input methods for Chinese and Japanese type.
        ("a: 1\nb:\u30002\n", "x.yaml:2: U+3000 where"),
        ("a: 1\nb: 2\x1a\n", "x.yaml:2: not valid YAML: a control character (\\x1a)"),
    ],
)
def test_yaml_that_only_looks_right_is_named_by_its_line(text: str, said: str) -> None:
    with pytest.raises(BadInput) as refused:
        parse_yaml(text, "x.yaml", what="plan", needs="`a`")
    assert str(refused.value).startswith(said)


def test_a_plan_that_json_wrote_has_its_emoji() -> None:
    assert parse_yaml(json.dumps({"a": "😀"}), "x.yaml", what="plan", needs="`a`").data == {"a": "😀"}
    with pytest.raises(BadInput, match="half of a UTF-16 pair"):
        parse_yaml('{"a": "\\ud83d"}', "x.yaml", what="plan", needs="`a`")


def test_odd_spaces_in_a_text_are_the_text_s_own() -> None:
    text = "a: «\u00a0oui\u00a0»\nb: |\n  Alors\u00a0: oui\nc: 'd\u00a0'\n"
    assert parse_yaml(text, "x.yaml", what="plan", needs="`a`").data["a"] == "«\u00a0oui\u00a0»"
