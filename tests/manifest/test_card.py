"""The model card: valid metadata, the same bytes each time, and nothing of a stranger's words that acts."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import surgeon
from surgeon.checkpoint.card_metadata import NOTHING_KNOWN, Metadata, check_license, read_metadata
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.manifest.card import base_model_of, card
from surgeon.manifest.manifest import Manifest
from surgeon.manifest.reading import parse
from tests import tiny

CONFIG = {"architectures": ["LlamaForCausalLM"]}
BASE_CARD = """---
license: apache-2.0
language: [no, en]
datasets:
- user/data
base_model: somebody/else
---
# The base
"""


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grown")
    base = tiny.checkpoint(folder / "base", "llama")
    (base / "README.md").write_text(BASE_CARD)
    surgeon.apply("llama-pro", str(base), folder / "out")
    surgeon.apply("neutral-residues", str(folder / "out"), folder / "grafted")
    return folder


def manifest_of(folder: Path) -> Manifest:
    return parse(json.loads((folder / "surgery.json").read_text()), file="surgery.json")


def sizes_of(folder: Path) -> dict[str, int]:
    return {name: info.numel for name, info in CheckpointFolder.open(folder).tensors.items()}


def test_the_client_reads_what_apply_writes(grown: Path) -> None:
    from huggingface_hub import ModelCard, metadata_load

    for name, operations in (("out", ["insert-layers"]), ("grafted", ["insert-layers", "gated-adapters"])):
        data = ModelCard.load(grown / name / "README.md").data.to_dict()
        assert data == metadata_load(grown / name / "README.md")
        assert data == {
            "library_name": "transformers",
            "pipeline_tag": "text-generation",
            "license": "apache-2.0",
            # The language, not the falsehood of YAML 1.1.
            "language": ["no", "en"],
            "datasets": ["user/data"],
            "tags": ["surgeon", "model-expansion", *operations],
        }


def test_the_card_tells_what_was_done_and_how_to_go_on(grown: Path) -> None:
    native, grafted = ((grown / name / "README.md").read_text() for name in ("out", "grafted"))
    assert "trust_remote_code" not in native
    assert 'from_pretrained("path/to/this/folder", trust_remote_code=True)' in grafted
    assert "model.freeze_base()" in grafted
    assert 'json.load(manifest)["new_tensors"]' in native
    assert "surgeon revert THIS BASE --to 0" in native
    assert "surgeon revert THIS EARLIER" in grafted
    assert "wu2024llama" in native
    # The papers of earlier surgeries stay.
    assert "wu2024llama" in grafted and "signetalla2024neutral" in grafted
    assert manifest_of(grown / "out").plan in native
    assert re.search(r"^ +\+ +5  new: copy, zero-init of 4$", native, re.MULTILINE)


def test_the_same_surgery_gives_the_same_card(grown: Path, tmp_path: Path) -> None:
    surgeon.apply("llama-pro", str(grown / "base"), tmp_path / "again")
    assert (tmp_path / "again" / "README.md").read_bytes() == (grown / "out" / "README.md").read_bytes()


def test_verify_does_not_mind_the_card_and_revert_brings_the_states_own(grown: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(grown / "grafted", out)
    (out / "README.md").write_text((out / "README.md").read_text() + "\nMine.\n")
    assert surgeon.verify(grown / "out", out, logits=False).holds
    surgeon.revert(out, tmp_path / "one", to=1)
    assert (tmp_path / "one" / "README.md").read_bytes() == (grown / "out" / "README.md").read_bytes()
    surgeon.revert(out, tmp_path / "none", to=0)
    assert not (tmp_path / "none" / "README.md").exists()


def test_an_unknown_licence_is_said_and_not_invented(grown: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(grown / "base", base)
    (base / "README.md").unlink()
    applied = surgeon.apply("llama-pro", str(base), tmp_path / "out")
    assert sum("licence" in note for note in applied.preview.notes) == 1
    text = (tmp_path / "out" / "README.md").read_text()
    assert "license" not in yaml.safe_load(text.split("---")[1])
    assert "Unknown: the base's card names none" in text


@pytest.mark.parametrize("content", [b"x" * 1_000_001, None])
def test_a_card_that_cannot_be_read_stops_no_surgery(grown: Path, tmp_path: Path, content: bytes | None) -> None:
    base = tmp_path / "base"
    shutil.copytree(grown / "base", base)
    (base / "README.md").unlink()
    if content is None:
        (base / "README.md").symlink_to("/etc/hostname")
    else:
        (base / "README.md").write_bytes(content)
    assert any("licence" in note for note in surgeon.preview("llama-pro", str(base)).notes)


def test_the_base_on_the_hub_is_named(grown: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    manifest = manifest_of(grown / "grafted")
    assert base_model_of(manifest, NOTHING_KNOWN) is None
    assert base_model_of(manifest, Metadata(base_model="user/base")) == "user/base"
    first = manifest.lineage[0]
    named = first.base.model_copy(update={"id": "user/first", "revision": commit})
    ancestor = first.model_copy(update={"base": named})
    manifest = manifest.model_copy(update={"lineage": [ancestor]})
    assert base_model_of(manifest, NOTHING_KNOWN) == "user/first"
    base = manifest.base.model_copy(update={"id": "user/base", "revision": commit})
    manifest = manifest.model_copy(update={"base": base})
    text = card(manifest, CONFIG, {}, NOTHING_KNOWN, repo_id="me/mine").decode()
    data = yaml.safe_load(text.split("---")[1])
    assert (data["base_model"], data["base_model_relation"]) == ("user/base", "finetune")
    assert f"https://huggingface.co/user/base/tree/{commit}" in text
    assert '"me/mine", trust_remote_code=True, revision=revision' in text


def test_encoders_load_by_their_own_class(grown: Path) -> None:
    for head, auto, task in (
        ("RobertaForMaskedLM", "AutoModelForMaskedLM", "fill-mask"),
        ("UpcycledRobertaForSequenceClassification", "AutoModelForSequenceClassification", "text-classification"),
        ("RobertaModel", "AutoModel", None),
    ):
        text = card(manifest_of(grown / "out"), {"architectures": [head]}, {}, NOTHING_KNOWN).decode()
        assert f"model = {auto}.from_pretrained(" in text
        assert yaml.safe_load(text.split("---")[1]).get("pipeline_tag") == task


HOSTILE = "</code>`` x`\n---\nlicense: mit\n---\n<script>alert(1)</script> | [a](javascript:b) \x1b[31m ```\n# Owned"


def test_a_strangers_words_stay_in_their_spans(grown: Path) -> None:
    manifest = manifest_of(grown / "grafted")
    entry = manifest.operations[0].model_copy(update={"op": HOSTILE, "matched": HOSTILE, "reason": HOSTILE})
    layer = manifest.layers[0].model_copy(update={"init": HOSTILE})
    first = manifest.lineage[0]
    named = first.base.model_copy(update={"id": HOSTILE})
    ancestor = first.model_copy(update={"base": named, "operations": [entry]})
    manifest = manifest.model_copy(
        update={
            "operations": [entry],
            "layers": [layer, *manifest.layers[1:]],
            "lineage": [ancestor],
            "base": manifest.base.model_copy(update={"id": HOSTILE, "model_type": HOSTILE}),
            "plan": f"surgeon: 1\n{HOSTILE}\n" * 3,
        }
    )
    text = card(manifest, CONFIG, sizes_of(grown / "grafted"), NOTHING_KNOWN).decode()
    block, rest = text.removeprefix("---\n").split("\n---\n", 1)
    assert "license" not in yaml.safe_load(block)
    assert "\x1b" not in text
    outside = _without_code(rest)
    for word in ("<script", "javascript", "Owned", "license: mit"):
        assert word in rest
        assert word not in outside


def _without_code(text: str) -> str:
    """Markdown without code blocks and code spans, as CommonMark delimits them."""
    lines: list[str] = []
    fence = ""
    for line in text.splitlines():
        ticks = re.match("`{3,}", line)
        if fence:
            if ticks and set(line.strip()) == {"`"} and len(ticks[0]) >= len(fence):
                fence = ""
        elif ticks and "`" not in line[len(ticks[0]) :]:
            fence = ticks[0]
        else:
            lines.append(line)
    assert not fence
    return re.sub(r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)", "", "\n".join(lines), flags=re.DOTALL)


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ("license: mit", Metadata(license="mit")),
        ("license: [mit, apache-2.0]", Metadata(license="mit")),
        (
            "license: other\nlicense_name: llama-x\nlicense_link: LICENSE",
            Metadata(license="other", license_name="llama-x", license_link="LICENSE"),
        ),
        ("license: other\nlicense_link: javascript:alert(1)", Metadata(license="other")),
        ("license: {a: b}", NOTHING_KNOWN),
        ("license: 'a b'\nlanguage: [en, 'x y', {a: b}, fra]", Metadata(languages=("en", "fra"))),
        ("license: !!python/object/apply:os.system ['true']", Metadata(license="true")),
        ("- a\n- b", NOTHING_KNOWN),
        ("license: mit\n\tx: y", NOTHING_KNOWN),
        ("a: " + "[" * 50_000, NOTHING_KNOWN),
        ("license: mit\nx: " + "y" * 70_000, NOTHING_KNOWN),
        ("a: &a [x, x]\nb: &b [*a, *a]\nlanguage: *b", NOTHING_KNOWN),
        ("license: 2024-01-01", Metadata(license="2024-01-01")),
    ],
)
def test_metadata_of_a_base(block: str, expected: Metadata) -> None:
    assert read_metadata(f"---\n{block}\n---\n# x\n".encode()) == expected
    assert read_metadata(f"---\r\n{block}\r\n---\r\n# x\r\n".encode()) == expected


@pytest.mark.parametrize(
    "content", [b"", b"# no block\n", b"---\nlicense: mit\n", b"\xff\xfe---\n", b"x\n---\na: b\n---\n"]
)
def test_cards_without_metadata(content: bytes) -> None:
    assert read_metadata(content) == NOTHING_KNOWN


@pytest.mark.parametrize("name", ["MIT", "unknown", "other", "a b", "", "x\ny: z"])
def test_licences_the_hub_does_not_know_are_refused(name: str) -> None:
    from surgeon.errors import BadInput

    with pytest.raises(BadInput, match="--license"):
        check_license(name)
    assert check_license("apache-2.0") == "apache-2.0"


def test_what_is_read_back_is_what_was_written(grown: Path) -> None:
    known: dict[str, Any] = {
        "license": "other",
        "license_name": "x",
        "license_link": "https://x.org/y",
        "languages": ("no",),
    }
    metadata = Metadata(**known, datasets=("a/b", "c"), base_model="user/base")
    written = card(manifest_of(grown / "out"), CONFIG, {}, metadata)
    assert read_metadata(written) == metadata
