"""The Hub as a source, against a stand-in on the loopback interface: what is fetched, what is refused, offline."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from surgeon.checkpoint.hub import locate
from surgeon.errors import BadInput
from tests.checkpoint.files import INDEX, SHARDS, sharded, single, write_config, write_shard
from tests.checkpoint.stand_in_hub import COMMIT, Hub, files_of, serve

FIRST, SECOND = sorted(SHARDS)
INFO, FILES = "/api/models/user/model", "/user/model/resolve/"

# HF_ENDPOINT and its kin are read when the client is imported: who has others is a process of its own.
CLIENT = """
import json, sys
sockets = []
# The first socket that is made or used from here on is remembered, whoever makes it.
sys.addaudithook(lambda event, arguments: sockets.append(event) if event.startswith("socket.") else None)
from dataclasses import asdict
from surgeon.checkpoint.hub import locate, remote_folder
from surgeon.errors import BadInput
assert "huggingface_hub" not in sys.modules
for line in sys.stdin:
    call, options = json.loads(line)
    sockets.clear()
    try:
        if call == "locate":
            located = locate(options.pop("base"), **options)
            told = {"path": str(located.path), "repo_id": located.repo_id, "revision": located.revision}
        else:
            folder = remote_folder(**options)
            told = {
                "tensors": {name: [i.dtype, i.shape, i.file, i.begin, i.end] for name, i in folder.tensors.items()},
                "shards": folder.shards, "side_files": folder.side_files, "left_behind": folder.left_behind,
                "config": folder.config, "manifest": folder.manifest, "notes": folder.notes,
                "identity": folder.identity(), "path": str(folder.path),
                "sha256": {file: header.sha256 for file, header in folder.headers.items()},
            }
            folder.check_unchanged()
            try:
                told["read"] = len(folder.read(next(iter(folder.tensors))))
            except BadInput as error:
                told["read"] = str(error)
    except BadInput as error:
        told = {"refused": str(error)}
    print(json.dumps(told | {"sockets": sockets, "torch": "torch" in sys.modules}), flush=True)
"""


def settings(hub: Hub, home: Path) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    proxies = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    return clean | proxies | {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home)}


def ask_all(hub: Hub, home: Path, calls: list[tuple[str, dict[str, Any]]], **environment: str) -> list[dict[str, Any]]:
    """Call after call in one process."""
    ran = subprocess.run(
        [sys.executable, "-c", CLIENT],
        input="".join(json.dumps(call) + "\n" for call in calls),
        env=settings(hub, home) | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr
    told = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(told) == len(calls)
    assert not any(each["torch"] for each in told)
    if not any("refused" in each for each in told):
        # No bars where nobody looks; the client says that it tries again.
        assert ran.stderr == "" or "Retrying in" in ran.stderr
    return told


def ask(hub: Hub, home: Path, call: str, options: dict[str, Any], **environment: str) -> dict[str, Any]:
    (told,) = ask_all(hub, home, [(call, options)], **environment)
    return told


LOCATE: tuple[str, dict[str, Any]] = ("locate", {"base": "user/model", "revision": None})
REMOTE: tuple[str, dict[str, Any]] = ("remote", {"repo_id": "user/model", "revision": None})


def refused(hub: Hub, home: Path, *calls: tuple[str, dict[str, Any]], **environment: str) -> list[str]:
    messages = [told["refused"] for told in ask_all(hub, home, list(calls), **environment)]
    assert not any("\n" in message for message in messages)
    return messages


BIG = {
    "model-00001-of-00002.safetensors": {"a.weight": ("BF16", (400, 500))},
    "model-00002-of-00002.safetensors": {"c.weight": ("F32", (100, 100))},
}
OTHERS = ["pytorch_model.bin", "original/consolidated.00.pth", "README.md", "flax_model.msgpack", "run.sh"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    write_config(folder)
    for file, tensors in BIG.items():
        write_shard(folder / file, tensors)
    (folder / INDEX).write_text(
        json.dumps({"metadata": {}, "weight_map": {name: file for file, held in BIG.items() for name in held}})
    )
    (folder / "tokenizer.json").write_text("{}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool.jinja").write_text("x")
    (folder / "original").mkdir()
    write_shard(folder / "consolidated.safetensors", {"x": ("F32", (1000, 100))})
    for name in OTHERS:
        (folder / name).write_bytes(b"0" * 1000)
    return folder


@pytest.fixture
def hub(base: Path) -> Iterator[Hub]:
    with serve(Hub(files_of(base))) as hub:
        yield hub


@dataclass
class Awkward(Hub):
    """A server on which somebody pushes `moves` times right after a listing was asked for."""

    moves: int = 0


class AwkwardAnswers:
    """Answers of such a server."""

    hub: Awkward
    path: str

    def _answer(self) -> None:
        hub = self.hub
        super()._answer()  # type: ignore[misc]
        if hub.moves and self.path.startswith(INFO):
            hub.moves -= 1
            hub.history[hub.commit] = hub.files
            hub.commit = f"{hub.moves:040x}"
            hub.files = hub.files | {"tokenizer.json": f"[{hub.moves}]".encode()}


@dataclass(frozen=True)
class Standing:
    """A stand-in and one process that asks it again and again, each time with an empty cache."""

    hub: Awkward
    home: Path
    client: subprocess.Popen[str]

    def told(self, call: tuple[str, dict[str, Any]]) -> dict[str, Any]:
        assert self.client.stdin is not None and self.client.stdout is not None
        shutil.rmtree(self.home, ignore_errors=True)
        print(json.dumps(call), file=self.client.stdin, flush=True)
        found: dict[str, Any] = json.loads(self.client.stdout.readline())
        return found

    def refused(self, *calls: tuple[str, dict[str, Any]]) -> list[str]:
        found = [self.told(call)["refused"] for call in calls]
        assert not any("\n" in message for message in found)
        return found


@contextmanager
def one_client(home: Path) -> Iterator[Standing]:
    """A stand-in without files and a process that asks it, until the block ends."""
    with (
        serve(Awkward({}), AwkwardAnswers) as hub,
        subprocess.Popen(
            [sys.executable, "-c", CLIENT],
            env=settings(hub, home),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as client,
    ):
        assert isinstance(hub, Awkward) and client.stdin is not None
        yield Standing(hub, home, client)
        client.stdin.close()


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standing]:
    with one_client(tmp_path_factory.mktemp("home")) as standing:
        yield standing


@pytest.fixture
def standing(one_process: Standing, base: Path) -> Standing:
    hub = one_process.hub
    hub.files, hub.refuse, hub.commit, hub.moves = files_of(base), {}, COMMIT, 0
    hub.sent.clear()
    return one_process


def header_bytes(content: bytes) -> int:
    return 8 + struct.unpack("<Q", content[:8])[0]


def test_a_preview_fetches_headers_and_no_byte_of_weights(hub: Hub, base: Path, tmp_path: Path) -> None:
    from surgeon.checkpoint.folder import CheckpointFolder

    told = ask(hub, tmp_path / "home", *REMOTE)
    assert told["sockets"]  # what the offline test relies on: the alarm works
    local = CheckpointFolder.open(base)
    assert told["tensors"] == {
        name: [i.dtype, list(i.shape), i.file, i.begin, i.end] for name, i in local.tensors.items()
    }
    assert tuple(told["shards"]) == local.shards
    assert tuple(told["side_files"]) == local.side_files
    assert set(told["left_behind"]) == set(local.left_behind)
    assert told["config"] == local.config
    assert told["notes"] == local.notes
    assert told["sha256"] == {file: header.sha256 for file, header in local.headers.items()}
    assert told["identity"][0] == {"repo_id": "user/model", "commit": COMMIT}
    assert "not downloaded" in told["read"]
    for file in (FIRST, SECOND):
        pieces = [count for _, name, count in hub.sent if name == file]
        assert sorted(pieces) == [64, header_bytes(hub.files[file])]
    fetched = {name for method, name, _ in hub.sent if method == "GET"}
    assert fetched == {"config.json", INDEX, FIRST, SECOND}


def test_a_server_without_ranges_is_hung_up_on(hub: Hub, tmp_path: Path) -> None:
    hub.ranges = False
    told = ask(hub, tmp_path / "home", "remote", {"repo_id": "user/model", "revision": "main"})
    assert set(told["tensors"]) == {"a.weight", "c.weight"}


def test_a_server_s_own_trouble_is_waited_out(hub: Hub, tmp_path: Path) -> None:
    hub.failures_before_success = 2
    told = ask(hub, tmp_path / "home", "remote", {"repo_id": "user/model", "revision": "main"})
    assert set(told["tensors"]) == {"a.weight", "c.weight"}


def test_download_then_offline(hub: Hub, base: Path, tmp_path: Path) -> None:
    """Exactly what an output needs is fetched; afterwards the cache serves it without opening a socket."""
    from surgeon.checkpoint.folder import CheckpointFolder

    home = tmp_path / "home"
    options = {"base": "user/model", "revision": None}
    told = ask(hub, home, "locate", options)
    assert (told["repo_id"], told["revision"]) == ("user/model", COMMIT)
    wanted = {
        "config.json",
        INDEX,
        FIRST,
        SECOND,
        "tokenizer.json",
        "additional_chat_templates/tool.jinja",
        "README.md",
    }
    assert {name for method, name, _ in hub.sent if method == "GET"} == wanted
    path = Path(told["path"])
    assert set(files_of(path)) == wanted
    cached = CheckpointFolder.open(path)
    assert cached.read("a.weight") == CheckpointFolder.open(base).read("a.weight")
    assert cached.side_files == ("additional_chat_templates/tool.jinja", "tokenizer.json")

    hub.sent.clear()
    again = ask(hub, home, "locate", options)
    assert again["path"] == told["path"]
    assert not [entry for entry in hub.sent if entry[0] == "GET" and entry[1].endswith(".safetensors")]

    hub.sent.clear()
    from_cache = [("locate", options), ("remote", {"repo_id": "user/model", "revision": COMMIT})]
    offline, preview = ask_all(hub, home, from_cache, HF_HUB_OFFLINE="1")
    assert (offline["path"], offline["revision"], offline["sockets"]) == (told["path"], COMMIT, [])
    assert preview["read"] == 400_000
    assert preview["sockets"] == []
    assert hub.sent == []

    (path / SECOND).unlink()
    message = ask(hub, home, "locate", options, HF_HUB_OFFLINE="1")
    assert "missing" in message["refused"] or "offline" in message["refused"]
    assert message["sockets"] == []


def test_offline_and_not_cached(hub: Hub, tmp_path: Path) -> None:
    for message in refused(hub, tmp_path / "home", LOCATE, REMOTE, HF_HUB_OFFLINE="1"):
        assert message.startswith("user/model: offline (HF_HUB_OFFLINE)")
    assert hub.tokens == set()


def test_code_is_fetched_when_asked(hub: Hub, tmp_path: Path) -> None:
    hub.files["modeling_x.py"] = b"# code"
    options: dict[str, Any] = {"base": "user/model", "revision": "main"}
    path = Path(ask(hub, tmp_path / "home", "locate", options)["path"])
    assert not list(path.glob("*.py"))
    ask(hub, tmp_path / "home", "locate", options | {"code": True})
    assert [file.name for file in path.glob("*.py")] == ["modeling_x.py"]


def test_a_single_file_is_fetched_alone(tmp_path: Path) -> None:
    single(sharded(tmp_path / "base"))
    with serve(Hub(files_of(tmp_path / "base"))) as hub:
        path = Path(ask(hub, tmp_path / "home", "locate", {"base": "user/model", "revision": None})["path"])
        assert {file.name for file in path.glob("*.safetensors")} == {"model.safetensors"}


def test_the_token_is_used(hub: Hub, tmp_path: Path) -> None:
    options = {"repo_id": "user/model", "revision": None}
    ask(hub, tmp_path / "home", "remote", options, HF_TOKEN="hf_secret")
    assert hub.tokens == {"Bearer hf_secret"}


@pytest.mark.parametrize(
    ("refuse", "words"),
    [
        ({INFO: (404, "RepoNotFound")}, ["no such repository", "check the name"]),
        ({INFO: (401, "RepoNotFound")}, ["no such repository", "HF_TOKEN"]),
        ({INFO: (401, "")}, ["refuses", "401", "log in"]),
        ({INFO: (403, "")}, ["refuses", "403", "HF_TOKEN"]),
        ({FILES: (403, "GatedRepo")}, ["gated", "/user/model", "HF_TOKEN"]),
        ({FILES: (401, "GatedRepo")}, ["gated", "/user/model", "HF_TOKEN"]),
        ({INFO: (404, "RevisionNotFound")}, ["no revision 'main'", "--revision"]),
    ],
)
def test_refusals(refuse: dict[str, tuple[int, str]], words: list[str], standing: Standing) -> None:
    standing.hub.refuse = refuse
    for message in standing.refused(LOCATE, REMOTE):
        assert message.startswith("user/model: ")
        for word in words:
            assert word in message, message


def test_a_gated_shard_is_told_by_the_preview(standing: Standing) -> None:
    standing.hub.refuse = {f"{FILES}{COMMIT}/{FIRST}": (403, "GatedRepo")}
    assert "gated" in standing.refused(REMOTE)[0]


def test_a_branch_that_moves_is_read_at_one_commit(standing: Standing) -> None:
    """A preview reads all of it at the listing's commit; a download that met another one is refused."""
    hub = standing.hub
    hub.moves = 1
    preview = standing.told(REMOTE)
    assert hub.commit != COMMIT
    assert {shard["commit"] for shard in preview["identity"]} == {COMMIT}
    hub.moves = 2
    assert "'main' moved to another commit while it was read" in standing.refused(LOCATE)[0]
    hub.moves = 0
    located = standing.told(LOCATE)
    assert located["revision"] == hub.commit
    assert (Path(located["path"]) / "tokenizer.json").read_bytes() == hub.files["tokenizer.json"]


def test_nobody_answers(hub: Hub, tmp_path: Path) -> None:
    hub.endpoint = "http://127.0.0.1:9"
    assert "cannot be reached" in refused(hub, tmp_path / "home", REMOTE)[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({FIRST: None}, [FIRST, "missing"]),
        ({INDEX: None}, ["without", INDEX]),
        ({"config.json": None}, ["no config.json"]),
        ({"modeling_x.py": b"", "config.json": b'{"model_type": "x"}'}, ["modeling_x.py", "--trust-remote-code"]),
        ({FIRST: b"\xff" * 100}, [FIRST, "at most 100,000,000"]),
        ({FIRST: b"version https://git-lfs.github.com/spec/v1\n"}, [FIRST, "git-lfs"]),
        (
            {INDEX: json.dumps({"weight_map": {"a": "../x.safetensors"}}).encode()},
            ["in the same folder, or in one"],
        ),
    ],
)
def test_a_broken_repository_is_refused_before_the_download(
    change: dict[str, bytes | None], words: list[str], standing: Standing
) -> None:
    hub = standing.hub
    for name, content in change.items():
        if content is None:
            del hub.files[name]
        else:
            hub.files[name] = content
    (message,) = standing.refused(REMOTE)
    for word in words:
        assert word in message, message
    assert hub.bytes_sent(SECOND) < 1000


@pytest.mark.parametrize(
    "name",
    ["no/such/folder", "./no/such", "/no/such", "~/model", "model", "user/..", "user/", "a b/c", "user/na\x1bme"],
)
def test_neither_folder_nor_id(name: str) -> None:
    with pytest.raises(BadInput, match="no such folder") as caught:
        locate(name, revision=None)
    assert "\x1b" not in str(caught.value)


def test_local_folders(tmp_path: Path) -> None:
    located = locate(str(tmp_path), revision=None)
    assert (located.path, located.repo_id, located.revision) == (tmp_path, None, None)
    with pytest.raises(BadInput, match="has no revision"):
        locate(str(tmp_path), revision="main")
