"""Push with the real client against a stand-in Hub: what goes up, what is refused, what a rerun sends, what loads."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import surgeon
from surgeon.checkpoint.folder import CheckpointFolder, digests_of
from surgeon.cli import app
from surgeon.errors import BadInput
from tests import tiny
from tests.checkpoint.stand_in_hub import COMMIT, Hub, files_of, serve
from tests.elsewhere import WITHOUT_SURGEON
from tests.manifest.edits import edited, resealed
from tests.test_api import check_json
from tests.warm import warm

TOKEN = "hf_" + "x" * 34
MODEL = "/api/models/user/model"


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, a native output of it, and a grafted output."""
    folder = tmp_path_factory.mktemp("grown")
    base = tiny.checkpoint(folder / "base", "llama")
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    (base / "LICENSE").write_text("terms")
    surgeon.apply("llama-pro", str(base), folder / "native")
    surgeon.apply("neutral-residues", str(base), folder / "grafted")
    return folder


@pytest.fixture
def out(grown: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(grown / "native", tmp_path / "out"))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """An account without repositories, which the client in this process talks to by LFS and never waits for."""
    from huggingface_hub import constants

    for name, value in (("HF_TOKEN", TOKEN), ("NO_PROXY", "127.0.0.1"), ("no_proxy", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with serve(Hub({}, exists=False)) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        yield hub


def digests(folder: Path) -> dict[str, str]:
    opened = CheckpointFolder.open(folder)
    return digests_of(opened, opened.tensors, lambda _count: None)


def refused(out: Path, **options: Any) -> str:
    with pytest.raises(BadInput) as caught:
        surgeon.push(out, "user/model", **options)
    message = str(caught.value)
    assert "\n" not in message
    assert TOKEN not in message
    return message


# The command line, and then a stranger.

LOADER = (
    WITHOUT_SURGEON
    + """
import torch
for block in json.loads(sys.argv[1]):
    exec(block, globals())
trained = sorted(name for name, parameter in model.named_parameters() if parameter.requires_grad)
ids = torch.arange(3, 23).reshape(2, 10) % model.config.vocab_size
with torch.inference_mode():
    logits = model(ids).logits
json.dump({"class": type(model).__name__, "logits": logits.float().flatten().tolist(), "trained": trained}, sys.stdout)
"""
)


def python_of(card: str) -> list[str]:
    """What a card tells to run."""
    return re.findall("^```python\n(.*?)^```$", card, re.DOTALL | re.MULTILINE)


def in_a_process(*command: str, **environment: str) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    ran = subprocess.run(
        [*warm(), *command],
        env=clean | {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert TOKEN not in ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.parametrize("kind", ["native", "grafted"])
def test_what_was_pushed_loads_where_surgeon_is_not(grown: Path, tmp_path: Path, kind: str) -> None:
    with serve(Hub({}, exists=False, part_bytes=10_000 if kind == "grafted" else None)) as hub:
        at = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
        told = in_a_process(
            *("-m", "surgeon", "push", str(grown / kind), "user/model", "--base", str(grown / "base"), "--json"), **at
        )
        pushed = json.loads(told)
        assert (pushed["commit"], pushed["verification"]["identical"]) == (hub.commit, True)
        assert {file["state"] for file in pushed["files"]} == {"new"}
        here = files_of(grown / kind)
        assert {name: content for name, content in hub.files.items() if name != "README.md"} == {
            name: content for name, content in here.items() if name != "README.md"
        }
        card = hub.files["README.md"].decode()
        assert 'from_pretrained("user/model"' in card
        assert "every value bit-identical" in card
        assert ("trust_remote_code=True" in card) == (kind == "grafted")
        # Something else is committed later; the pinned commit is what was pushed.
        hub.history[hub.commit] = hub.files
        hub.files, hub.commit = {"config.json": b"{}"}, "0" * 40
        del at["HF_TOKEN"]
        at["HF_HOME"] = str(tmp_path / "empty")
        told = [block.replace('revision = "main"', f'revision = "{pushed["commit"]}"') for block in python_of(card)]
        theirs = json.loads(in_a_process("-c", LOADER, json.dumps(told), **at))
    local = python_of((grown / "native" / "README.md").read_text())[:1]
    local = [block.replace("path/to/this/folder", str(grown / "base")) for block in local]
    ours = json.loads(in_a_process("-c", LOADER, json.dumps(local), HF_HOME=str(tmp_path / "base")))
    assert theirs["class"] == ("UpcycledLlamaForCausalLM" if kind == "grafted" else "LlamaForCausalLM")
    assert theirs["logits"] == ours["logits"]
    assert theirs["trained"] == sorted(json.loads((grown / kind / "surgery.json").read_text())["new_tensors"])


def test_large_files_go_to_a_store_of_their_own(grown: Path, tmp_path: Path) -> None:
    """Xet, which the client takes where it is installed: the real one, with a folder for a store."""
    pytest.importorskip("hf_xet")
    with serve(Hub({}, exists=False, cas=tmp_path / "cas")) as hub:
        at = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path)}
        in_a_process("-m", "surgeon", "push", str(grown / "native"), "user/model", "--json", **at)
    for shard in sorted((grown / "native").glob("*.safetensors")):
        assert hub.files[shard.name].decode() == hashlib.sha256(shard.read_bytes()).hexdigest()
    assert any((tmp_path / "cas").rglob("*"))
    assert not hub.uploads


# What goes up.


def test_a_push_again_sends_nothing(hub: Hub, out: Path) -> None:
    first = surgeon.push(out, "user/model")
    assert first.commit == hub.commit
    assert [path for method, path in hub.posted if path.endswith("/commit/main")] == [f"{MODEL}/commit/main"]
    hub.posted.clear()
    again = surgeon.push(out, "user/model")
    assert (again.sent, again.commit, again.url) == ((), hub.commit, None)
    assert not hub.posted


def test_only_what_changed_is_sent(hub: Hub, out: Path) -> None:
    surgeon.push(out, "user/model")
    hub.posted.clear()
    (out / "generation_config.json").write_text('{"do_sample": false}')
    pushed = surgeon.push(out, "user/model")
    # The card says of each push which files are not as surgery left them.
    sent = {(file.name, file.state) for file in pushed.sent}
    assert sent == {("README.md", "changed"), ("generation_config.json", "changed")}
    assert b"edited: generation_config.json" in hub.files["README.md"]
    assert not hub.uploads
    assert hub.files["generation_config.json"] == b'{"do_sample": false}'


def test_a_dry_run_sends_nothing(hub: Hub, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    (out / "notes.txt").write_text("mine")
    (out / "evil.pkl").write_bytes(b"0")
    shown = surgeon.push(out, "user/model", dry_run=True)
    check_json(shown)
    assert not hub.posted
    assert not hub.exists
    assert {file.state for file in shown.files} == {"new"}
    assert shown.left_behind == ("evil.pkl", "notes.txt")
    assert sum(file.nbytes for file in shown.files) > sum(f.stat().st_size for f in out.glob("*.safetensors"))
    assert shown.commit is None


def test_what_would_be_loaded_beside_it_is_taken_out(hub: Hub, out: Path) -> None:
    hub.exists = True
    hub.files = {
        "surgery.json": b"{}",
        "model.safetensors": b"old",
        "modeling_surgeon.py": b"old",
        "notes.md": b"kept",
        "original/model.safetensors": b"kept",
    }
    pushed = surgeon.push(out, "user/model")
    assert pushed.stale == ("model.safetensors", "modeling_surgeon.py")
    assert {"notes.md", "original/model.safetensors"} <= hub.files.keys()
    assert not {"model.safetensors", "modeling_surgeon.py"} & hub.files.keys()


def test_a_branch_and_a_pull_request(hub: Hub, out: Path) -> None:
    hub.exists, hub.files = True, {"README.md": b"---\nlicense: mit\n---\n", "model.safetensors": b"somebody's"}
    before = dict(hub.files)
    opened = surgeon.push(out, "user/model", pull_request=True)
    assert opened.pull_request == f"{hub.endpoint}/user/model/discussions/1"
    assert "surgery.json" in hub.pull_requests[0]
    # Its shards lie there by now.
    hub.posted.clear()
    (out / "generation_config.json").write_text("{}")
    surgeon.push(out, "user/model", revision="refs/pr/1")
    assert not hub.uploads
    assert "--force" in refused(out, revision="grown")
    # The branch begins as main, whose weights would be loaded in place of these.
    assert surgeon.push(out, "user/model", revision="grown", force=True).stale == ("model.safetensors",)
    assert hub.files == before
    there = hub.history[hub.branches["grown"]]
    assert "surgery.json" in there
    assert "model.safetensors" not in there
    hub.posted.clear()
    assert not surgeon.push(out, "user/model", revision="grown").sent
    assert not hub.posted
    for revision in (COMMIT, "refs/pr/7"):
        assert "--revision" in refused(out, revision=revision)
    assert "against main" in refused(out, revision="grown", pull_request=True)


def test_a_branch_of_a_new_repository(hub: Hub, out: Path) -> None:
    surgeon.push(out, "user/model", revision="grown")
    assert "surgery.json" in hub.history[hub.branches["grown"]]
    assert not hub.files


# What does not go up.


def test_what_does_not_verify_stays_here(hub: Hub, out: Path) -> None:
    shard = out / "model-00001-of-00005.safetensors"
    shard = shard if shard.exists() else sorted(out.glob("*.safetensors"))[0]
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    message = refused(out)
    assert "does not hold" in message
    assert "--force" in message
    assert not hub.posted
    forced = surgeon.push(out, "user/model", force=True)
    assert not all(check.holds for check in forced.checks)
    assert b"DOES NOT HOLD" in hub.files["README.md"]


def test_trained_tensors_are_no_broken_promise(hub: Hub, out: Path) -> None:
    from safetensors.torch import load_file, save_file

    manifest = json.loads((out / "surgery.json").read_text())
    name = next(name for name in manifest["new_tensors"] if name.endswith("down_proj.weight"))
    shard = out / json.loads((out / "model.safetensors.index.json").read_text())["weight_map"][name]
    held = load_file(shard)
    save_file(held | {name: held[name] + 1}, shard, metadata={"format": "pt"})
    pushed = surgeon.push(out, "user/model")
    assert all(check.holds for check in pushed.checks)
    assert "1 trained since" in pushed.checks[-1].detail


def test_a_base_it_was_not_made_from_is_told(hub: Hub, out: Path, grown: Path, tmp_path: Path) -> None:
    other = tiny.checkpoint(tmp_path / "other", "llama", seed=7)
    assert "no tensor of it is of the base" in refused(out, base=other)


def test_foreign_code_and_hostile_names_stay_here(hub: Hub, out: Path, grown: Path, tmp_path: Path) -> None:
    (out / "modeling_evil.py").write_text("raise SystemExit")
    assert "code of its own" in refused(out)
    grafted = Path(shutil.copytree(grown / "grafted", tmp_path / "grafted"))
    (tmp_path / "secret.py").write_text("secret")
    digest = hashlib.sha256(b"secret").hexdigest()
    edited(grafted, lambda manifest: manifest["files"].update({"../secret.py": digest}), seal=True)
    assert "code" in refused(grafted)
    surgeon.push(grafted, "user/model", force=True)
    assert not any("secret" in name for name in hub.files)


def test_no_output_of_surgeon_is_not_pushed(hub: Hub, grown: Path) -> None:
    assert "no surgery.json" in refused(grown / "base")
    assert not hub.posted


def test_somebodys_model_is_not_buried(hub: Hub, out: Path) -> None:
    hub.exists, hub.files = True, {"model.safetensors": b"somebody's", "config.json": b"{}"}
    assert "--force" in refused(out)
    assert not hub.posted


def test_who_may_see_it(hub: Hub, out: Path) -> None:
    """A new repository is private unless asked to be public; one that is there and is the other is refused."""
    surgeon.push(out, "user/model")
    assert hub.private
    assert "exists and is private; --public is for new ones" in refused(out, public=True)
    hub.private = False
    assert "exists and is public; --private is for new ones" in refused(out, public=False)
    assert surgeon.push(out, "user/model").sent == ()
    hub.exists, hub.files = False, {}
    surgeon.push(out, "user/model", public=True)
    assert not hub.private


# Only what lies in the folder, and only what was checked.


def test_links_are_refused_whatever_their_name(hub: Hub, out: Path, tmp_path: Path) -> None:
    secret = tmp_path / "id_rsa"
    secret.write_text("secret")
    (out / "secret.txt").write_text("secret")
    (out / "additional_chat_templates").mkdir()
    shard = next(out.glob("*.safetensors")).name
    absent = ["continual.json", "chat_template.jinja", "LICENSE.txt", "additional_chat_templates/x.jinja"]
    for name in [*absent, "README.md", "surgery.json", "config.json", "generation_config.json", shard]:
        path = out / name
        kept = path.read_bytes() if path.exists() else None
        for target in (secret, Path("secret.txt"), tmp_path / "nowhere"):
            path.unlink(missing_ok=True)
            path.symlink_to(target)
            assert path.name in refused(out)
        if kept is not None:
            # Even to the very bytes, beside it: what it leads to may be another file in a moment.
            (out / "original").write_bytes(kept)
            path.unlink()
            path.symlink_to("original")
            assert "a link; only files that lie in the folder itself are sent" in refused(out)
        path.unlink()
        if kept is not None:
            path.write_bytes(kept)
    assert not hub.posted
    (out.parent / "way").symlink_to(out)
    surgeon.push(out.parent / "way", "user/model")
    assert not [name for name, content in hub.files.items() if content == b"secret"]


def swapped(path: Path) -> None:
    """Another file of the same name, size and time."""
    found = path.stat()
    path.with_name("other").write_bytes(bytes(found.st_size))
    os.utime(path.with_name("other"), ns=(found.st_atime_ns, found.st_mtime_ns))
    path.with_name("other").rename(path)


def zeroed(path: Path) -> None:
    """The same file with other bytes, and its time set back."""
    found = path.stat()
    with path.open("r+b") as file:
        file.seek(found.st_size - 400)
        file.write(bytes(400))
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


@pytest.mark.parametrize("change", [swapped, zeroed])
@pytest.mark.parametrize("kind", ["shard", "side file"])
@pytest.mark.parametrize("moment", ["after the checks", "while it is sent"])
def test_what_changes_after_the_checks_is_not_pushed(
    hub: Hub, out: Path, monkeypatch: pytest.MonkeyPatch, moment: str, kind: str, change: Any
) -> None:
    from huggingface_hub import HfApi

    from surgeon.share import push

    path = sorted(out.glob("*.safetensors"))[-1] if kind == "shard" else out / "generation_config.json"
    path.write_bytes(path.read_bytes().ljust(500))
    place, name = (push, "_own_checks") if moment == "after the checks" else (HfApi, "preupload_lfs_files")
    real = getattr(place, name)

    def then(*arguments: Any, **named: Any) -> Any:
        found = real(*arguments, **named)
        change(path)
        return found

    monkeypatch.setattr(place, name, then)
    assert f"{path.name}: changed while it was checked and sent" in refused(out)
    assert not any("/commit/" in path for _, path in hub.posted)
    assert not hub.files


# The base that the manifest names.


def test_it_is_checked_against_the_base_that_it_names(
    hub: Hub, grown: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from surgeon.checkpoint.hub import Located
    from surgeon.share import push
    from surgeon.writing import apply

    there = Located(grown / "base", "user/base", "a" * 40)
    monkeypatch.setattr(apply, "locate_base", lambda *_, **__: there)
    out = tmp_path / "out"
    surgeon.apply("llama-pro", str(grown / "base"), out)
    asked: list[Any] = []

    def found(name: str, **options: Any) -> Located:
        asked.append((name, options))
        return there

    monkeypatch.setattr(push, "locate", found)
    pushed = surgeon.push(out, "user/model")
    assert asked == [("user/base", {"revision": "a" * 40, "download": True})]
    assert pushed.no_base is None
    assert pushed.verification is not None
    assert pushed.verification.identical
    # Weights of the base, and the manifest edited to agree: the base itself disagrees.
    shard = sorted(out.glob("*.safetensors"))[0]
    before = digests(out)
    zeroed(shard)
    text = (out / "surgery.json").read_text()
    for tensor, digest in digests(out).items():
        text = text.replace(before[tensor], digest)
    (out / "surgery.json").write_text(json.dumps(resealed(json.loads(text))))
    assert "a promise does not hold" in refused(out)

    def gone(*_: Any, **__: Any) -> Located:
        raise BadInput("user/base: gone")

    monkeypatch.setattr(push, "locate", gone)
    shown = surgeon.push(out, "user/model", dry_run=True)
    assert shown.no_base == "its base cannot be had (user/base: gone); --base DIR checks against it"
    assert shown.verification is None


# The card.


def test_licence_and_base_go_into_the_card(hub: Hub, out: Path) -> None:
    surgeon.push(out, "user/model", license="mit", base_model="user/base")
    head = hub.files["README.md"].decode().split("---")[1]
    assert "license: mit\n" in head
    assert "base_model: user/base\nbase_model_relation: finetune\n" in head
    for options in ({"license": "My Own"}, {"base_model": "base"}):
        assert f"--{next(iter(options)).replace('_', '-')}" in refused(out, **options)


def test_an_edited_card_goes_up_as_it_is(hub: Hub, out: Path) -> None:
    card = (out / "README.md").read_text() + "\nAnd then I trained it.\n"
    (out / "README.md").write_text(card)
    assert "--license" in refused(out, license="mit")
    surgeon.push(out, "user/model")
    assert hub.files["README.md"].decode() == card
    (out / "README.md").write_text("---\nlicense: [a, b]\n---\n")
    assert '"license" must be a string' in refused(out)


def test_the_hubs_own_check_takes_the_card(hub: Hub, grown: Path) -> None:
    from huggingface_hub import ModelCard

    hub.exists = True
    for kind in ("native", "grafted"):
        ModelCard.load(grown / kind / "README.md").validate()
    with pytest.raises(ValueError, match="base_model_relation"):
        ModelCard("---\nbase_model_relation: x\n---\n").validate()
    assert [path for _, path in hub.posted] == ["/api/validate-yaml"] * 3


# Tokens and trouble.


def test_tokens(hub: Hub, out: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    hub.role = "read"
    assert "can only read" in refused(out)
    hub.refuse["/api/whoami-v2"] = (401, "")
    assert "(401)" in refused(out)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    assert "needs a token" in refused(out)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in refused(out)
    assert not hub.posted


PLACES = {
    "create": "/api/repos/create",
    "look": MODEL,
    "preupload": f"{MODEL}/preupload/",
    "batch": "/user/model.git/",
    "upload": "/lfs/",
    "commit": f"{MODEL}/commit/",
}


@pytest.mark.parametrize(
    ("place", "status", "code", "expected"),
    [
        ("create", 401, "", r"refuses to create the repository \(401\); log in"),
        (
            "create",
            403,
            "You don't have the rights",
            r"refuses to create the repository \(403\) \(You don't have the rights\)",
        ),
        ("create", 429, "", r"\(429\); wait"),
        ("create", 500, "", r"\(500\); wait"),
        ("look", 500, "", r"\(500\); wait"),
        ("preupload", 403, "", "refuses to write to the repository"),
        ("preupload", 404, "RepoNotFound", "no such repository"),
        ("preupload", 429, "", r"\(429\); wait"),
        ("batch", 500, "", r"\(500\); wait"),
        ("upload", 403, "", r"\(403\)"),
        ("upload", 500, "", r"\(500\); wait"),
        ("commit", 401, "", r"\(401\)"),
        ("commit", 404, "RevisionNotFound", "no revision"),
        ("commit", 409, "", r"\(409\); it changed meanwhile"),
        ("commit", 429, "", r"\(429\); wait"),
        ("commit", 500, "", r"\(500\); wait"),
    ],
)
def test_a_refusal_is_one_line_and_a_rerun_completes(
    hub: Hub, out: Path, place: str, status: int, code: str, expected: str
) -> None:
    if place == "preupload" and status == 404:
        hub.exists = True
    hub.refuse[PLACES[place]] = (status, code)
    message = refused(out)
    assert message.startswith("user/model: ")
    assert re.search(expected, message), message
    assert "surgery.json" not in hub.files
    uploaded = len(hub.uploads)
    hub.refuse.clear()
    hub.posted.clear()
    pushed = surgeon.push(out, "user/model")
    assert pushed.commit == hub.commit
    shards = len(list(out.glob("*.safetensors")))
    assert len(hub.uploads) + uploaded == shards
    assert len(hub.uploads) == (0 if place == "commit" else shards)


def test_a_connection_cut_within_a_file(hub: Hub, out: Path) -> None:
    """The client tries six times a file; what arrived before is not sent again."""
    hub.cuts = 1_000
    message = refused(out)
    assert "does not write to the repository" in message
    assert "again" in message
    assert "surgery.json" not in hub.files
    hub.cuts = 2
    assert surgeon.push(out, "user/model").commit == hub.commit
    assert "surgery.json" in hub.files


def test_one_blob_lacks(hub: Hub, out: Path) -> None:
    shards = sorted(out.glob("*.safetensors"))
    last = hashlib.sha256(shards[-1].read_bytes()).hexdigest()
    hub.refuse[f"/lfs/whole/{last}"] = (500, "")
    refused(out)
    hub.refuse.clear()
    sent = len(hub.uploads)
    assert sent == len(shards) - 1
    surgeon.push(out, "user/model")
    assert len(hub.uploads) == len(shards)


def test_somebody_else_commits_meanwhile(hub: Hub, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from surgeon.checkpoint.uploading import send

    surgeon.push(out, "user/model")
    (out / "generation_config.json").write_text("{}")

    def late(*arguments: Any, **options: Any) -> Any:
        hub.history[hub.commit] = hub.files
        hub.commit = "f" * 40
        return send(*arguments, **options)

    monkeypatch.setattr("surgeon.share.push.send", late)
    assert "A commit has happened since" in refused(out)
    monkeypatch.setattr("surgeon.share.push.send", send)
    assert surgeon.push(out, "user/model").sent


def test_nobody_answers(hub: Hub, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "cannot be reached" in refused(out)


def test_a_hub_that_says_nothing(hub: Hub, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    from surgeon.checkpoint import uploading

    monkeypatch.setattr(uploading, "_SILENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert "ReadTimeout" in refused(out)


def test_the_terminal_shows_it(hub: Hub, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (out / "notes.txt").write_text("mine")
    shown = run("push", str(out), "user/model", "--dry-run")
    assert "new " in shown
    assert "stays here: notes.txt" in shown
    assert "would go to user/model; nothing was sent" in shown
    shown = run("push", str(out), "user/model")
    assert f'from_pretrained("user/model", revision="{hub.commit}")' in shown
    assert re.search(r"\b(\d+) of \1 checks", shown)
    assert "holds all of it already" in run("push", str(out), "user/model")
    hub.role = "read"
    result = CliRunner().invoke(app, ["push", str(out), "user/model"])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("surgeon: user/model: the token can only read; ")


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert TOKEN not in result.output
    return result.stdout


@pytest.mark.parametrize("name", ["model", "user/", "../x", "user/model/x", "user/a--b", "user/a b"])
def test_names_the_hub_does_not_know(hub: Hub, out: Path, name: str) -> None:
    with pytest.raises(BadInput, match="user/name"):
        surgeon.push(out, name)
    assert not hub.posted
