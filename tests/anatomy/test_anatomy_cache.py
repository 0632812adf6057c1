"""What previews keep of derived bases: the second is the first, without torch; and nothing damaged or other counts."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import surgeon
from surgeon.anatomy import anatomy_cache, checkpoint_anatomy
from surgeon.common import cache, signed
from surgeon.errors import BadInput
from surgeon.writing import small_run
from tests.decoders import tiny_decoder

PLAN = "surgeon: 1\noperations:\n  - {op: insert_layers, where: {every: 2}, init: {kind: copy}}\n"
KEPT_WORDS = "kept in the cache"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_decoder(tmp_path_factory.mktemp("bases") / "base", "qwen3_moe", layers=2)


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    (tmp_path / "plan.yaml").write_text(PLAN)
    return tmp_path / "plan.yaml"


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where entries lie."""
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "anatomies"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A line for each time that a base was derived, not a twin of it."""
    lines: list[str] = []
    original, prove, proving = checkpoint_anatomy.anatomy_of, small_run.prove_small, [False]

    def counting(*args: Any, **options: Any) -> Any:
        lines.extend([] if proving[0] else ["derived"])
        return original(*args, **options)

    def proved(*args: Any) -> None:
        proving[0] = True
        prove(*args)
        proving[0] = False

    monkeypatch.setattr(small_run, "prove_small", proved)

    monkeypatch.setattr(checkpoint_anatomy, "anatomy_of", counting)
    return lines


def without_notes(shown: Any) -> dict[str, Any]:
    """All but how and when it was proven."""
    return {key: value for key, value in shown.to_json().items() if key not in ("notes", "proof")}


def entry_of(kept: Path) -> Path:
    (found,) = kept.iterdir()
    return found


def test_a_second_preview_is_the_first_without_torch(base: Path, plan: Path, kept: Path) -> None:
    first = surgeon.preview(plan, base)
    assert KEPT_WORDS not in first.notes[0] and first.proof.how == "proven"
    assert entry_of(kept).stat().st_mode & 0o077 == 0
    code = (
        "import json, sys, surgeon; found = surgeon.preview(*sys.argv[1:]);"
        " print(json.dumps([found.to_json(), found.blueprint.config, 'torch' in sys.modules]))"
    )
    ran = subprocess.run([sys.executable, "-c", code, plan, base], capture_output=True, text=True, check=True)
    shown, config, torch = json.loads(ran.stdout)
    assert not torch
    assert shown["proof"]["how"] == "cached"
    assert {key: value for key, value in shown.items() if key not in ("notes", "proof")} == json.loads(
        json.dumps(without_notes(first))
    )
    assert config == first.blueprint.config
    assert shown["notes"][0].startswith(first.notes[0]) and KEPT_WORDS in shown["notes"][0]


def test_another_plan_is_proven_by_itself(base: Path, plan: Path, kept: Path, asked: list[str]) -> None:
    surgeon.preview(plan, base)
    surgeon.preview(plan, base)
    assert len(asked) == 1
    plan.write_text(PLAN.replace("every: 2", "every: 1"))
    assert KEPT_WORDS not in surgeon.preview(plan, base).notes[0]
    assert len(asked) == 2
    plan.write_text(PLAN)
    assert KEPT_WORDS in surgeon.preview(plan, base).notes[0]
    assert len(asked) == 2


def test_a_refusal_is_made_anew(base: Path, plan: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: Any, **_options: Any) -> None:
        raise BadInput("the logits differ")

    with monkeypatch.context() as patched:
        patched.setattr(small_run, "prove_small", refuse)
        for _ in range(2):
            with pytest.raises(BadInput, match="the logits differ"):
                surgeon.preview(plan, base)
    assert not kept.exists()
    surgeon.preview(plan, base)
    plan.write_text(PLAN.replace("every: 2", "every: 1"))
    monkeypatch.setattr(small_run, "prove_small", refuse)
    with pytest.raises(BadInput, match="the logits differ"):
        surgeon.preview(plan, base)


def test_another_config_header_version_or_code_has_another_key(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = surgeon.inspect(base)
    config = json.loads((base / "config.json").read_text())
    tensors = {info.name: info for layer in folder.anatomy.layers for info in layer.values()}
    keys = {anatomy_cache._key(config, tensors)}
    assert keys == {anatomy_cache._key(dict(config), dict(tensors))}
    keys.add(anatomy_cache._key({**config, "rms_norm_eps": 1e-3}, tensors))
    keys.add(anatomy_cache._key(config, dict(list(tensors.items())[1:])))
    monkeypatch.setattr(anatomy_cache, "_code", lambda: "another")
    keys.add(anatomy_cache._key(config, tensors))
    monkeypatch.setattr(anatomy_cache, "versions", lambda: {"transformers": "0"})
    keys.add(anatomy_cache._key(config, tensors))
    assert len(keys) == 5


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1] + b" ",
        lambda content: content.partition(b"\n")[2],
        lambda content: content[:-9],
        lambda content: b"",
        lambda content: b"0" * 64 + b"\n" + b"[" * 100_000,
    ],
    ids=["changed", "without its code", "cut off", "empty", "no entry"],
)
@pytest.mark.parametrize("what", ["anatomies", "proofs"])
def test_a_damaged_entry_is_made_anew(
    base: Path, plan: Path, kept: Path, asked: list[str], what: str, damage: Callable[[bytes], bytes]
) -> None:
    first = surgeon.preview(plan, base)
    entry = entry_of(kept.parent / what)
    entry.write_bytes(damage(entry.read_bytes()))
    again = surgeon.preview(plan, base)
    assert without_notes(again) == without_notes(first)
    assert again.proof.how == ("proven" if what == "proofs" else "cached")
    asked.clear()
    assert surgeon.preview(plan, base).proof.how == "cached" and not asked


def test_an_entry_of_another_user_or_under_another_name_does_not_count(
    base: Path, plan: Path, kept: Path, tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    surgeon.preview(plan, base)
    entry = entry_of(kept.parent / "proofs")
    plan.write_text(PLAN.replace("every: 2", "every: 1"))
    surgeon.preview(plan, base)
    (other,) = set((kept.parent / "proofs").iterdir()) - {entry}
    other.write_bytes(entry.read_bytes())
    assert surgeon.preview(plan, base).proof.how == "proven"
    assert surgeon.preview(plan, base).proof.how == "cached"
    monkeypatch.setenv(signed.VARIABLE, str(tmp_path / "another user's"))
    assert surgeon.preview(plan, base).proof.how == "proven"


def test_what_others_can_write_is_not_read(base: Path, plan: Path, kept: Path, asked: list[str]) -> None:
    surgeon.preview(plan, base)
    entry = entry_of(kept)
    entry.chmod(0o666)
    surgeon.preview(plan, base)
    assert len(asked) == 2
    elsewhere = kept.parent / "elsewhere"
    entry.rename(elsewhere)
    entry.symlink_to(elsewhere)
    surgeon.preview(plan, base)
    assert len(asked) == 3 and not entry.is_symlink()
    entry.unlink()
    os.mkfifo(entry)
    surgeon.preview(plan, base)
    assert len(asked) == 4


def test_a_second_apply_and_a_static_verification_go_without_torch(
    base: Path, plan: Path, kept: Path, tmp_path: Path
) -> None:
    first = surgeon.apply(plan, base, tmp_path / "first")
    assert first.preview.proof.how == "proven"
    code = (
        "import sys, surgeon; plan, base, out = sys.argv[1:]; applied = surgeon.apply(plan, base, out);"
        " found = surgeon.verify(base, out, logits=False);"
        " print(applied.preview.proof.how, found.holds, 'torch' in sys.modules)"
    )
    asked = [sys.executable, "-c", code, plan, base, tmp_path / "second"]
    ran = subprocess.run(asked, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["cached", "True", "False"], ran.stdout
    shards = [{f.name: f.read_bytes() for f in (tmp_path / n).glob("*.safetensors")} for n in ("first", "second")]
    assert shards[0] == shards[1]


def test_off_keeps_nothing(base: Path, plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv(cache.VARIABLE, "off")
    surgeon.preview(plan, base)
    assert not (tmp_path / "home").exists()
    monkeypatch.delenv(cache.VARIABLE)
    assert cache.cache_folder("x") == tmp_path / "home" / "surgeon" / "x"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache.cache_folder("x") == Path.home() / ".cache" / "surgeon" / "x"


def test_a_folder_that_cannot_be_written_is_no_trouble(base: Path, plan: Path, kept: Path) -> None:
    kept.parent.write_text("a file")
    shown = surgeon.preview(plan, base)
    assert shown.blueprint.promise == "exact"
    assert kept.parent.read_text() == "a file"


def test_the_oldest_entries_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        cache.write_entry(tmp_path / "a", str(number), b"x", most=3)
        os.utime(tmp_path / "a" / str(number), (number, number))
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["2", "3", "4"]
    # With the 65 bytes of its code.
    monkeypatch.setattr(cache, "_MAX_BYTES", 65 * 2 + 10)
    cache.write_entry(tmp_path / "a", "5", b"x" * 9)
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["4", "5"]
    monkeypatch.setattr(cache, "MAX_ENTRY_BYTES", 70)
    assert cache.read_entry(tmp_path / "a", "5") is None
    cache.write_entry(tmp_path / "a", "6", b"x" * 9)
    assert not (tmp_path / "a" / "6").exists()


def test_another_writers_entry_may_go_while_they_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes, or two threads of one, keep entries at a time: what was listed may be renamed since."""
    real = os.scandir

    @contextlib.contextmanager
    def listed(folder: Path) -> Iterator[Iterator[os.DirEntry[str]]]:
        with real(folder) as entries:
            there = sorted(entries, key=lambda entry: entry.name)
            (folder / "0").unlink(missing_ok=True)
            yield iter(there)

    for number in range(4):
        cache.write_entry(tmp_path, str(number), b"x", most=9)
        os.utime(tmp_path / str(number), (number, number))
    monkeypatch.setattr(cache.os, "scandir", listed)
    cache.write_entry(tmp_path, "4", b"x", most=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4"]
