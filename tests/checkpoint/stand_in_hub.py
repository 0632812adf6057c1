"""A small stand-in for the Hub on the loopback interface: model info, tree, files with ranges, and refusals.

It takes pushes too, as the client makes them: repositories, branches, LFS blobs (whole or in parts), Xet tokens,
commits and pull requests.
"""

from __future__ import annotations

import base64
import hashlib
import json
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

COMMIT = "1234567890abcdef1234567890abcdef12345678"


@dataclass
class Hub:
    """What the server serves and what it was asked. `refuse` maps a path's beginning to (status, X-Error-Code)."""

    files: dict[str, bytes]
    repo_id: str = "user/model"
    # Or "datasets".
    kind: str = "models"
    endpoint: str = ""
    ranges: bool = True
    refuse: dict[str, tuple[int, str]] = field(default_factory=dict)
    # (method, file, bytes of it that were sent)
    sent: list[tuple[str, str, int]] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    failures_before_success: int = 0
    # What a push meets. `posted` are (method, path) of everything that may change something.
    exists: bool = True
    private: bool = False
    role: str = "write"
    commit: str = COMMIT
    history: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    pull_requests: list[dict[str, bytes]] = field(default_factory=list)
    posted: list[tuple[str, str]] = field(default_factory=list)
    part_bytes: int | None = None
    cas: Path | None = None
    # This many uploads are cut in the middle of a file.
    cuts: int = 0

    @property
    def uploads(self) -> list[str]:
        """Blobs (or parts of them) that were sent."""
        return [path for method, path in self.posted if method == "PUT"]

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """The commit and files of a branch or commit; None where there is no such revision."""
        if revision in ("main", self.commit):
            return self.commit, self.files
        commit = self.branches.get(revision, revision)
        return (commit, self.history[commit]) if commit in self.history else None

    def bytes_sent(self, file: str) -> int:
        """Bytes of a file's content that went over the wire."""
        return sum(count for method, name, count in self.sent if method == "GET" and name == file)


def files_of(folder: Path) -> dict[str, bytes]:
    """A folder's files by relative name."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def _is_large(name: str) -> bool:
    return name.endswith(".safetensors")


def _sibling(name: str, content: bytes) -> dict[str, Any]:
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    entry: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": blob}
    if _is_large(name):
        entry["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return entry


def _entry(name: str, content: bytes | None) -> dict[str, Any]:
    """A file of a tree, or a folder where there is no content."""
    oid = hashlib.sha1(name.encode() if content is None else content).hexdigest()
    kind = "directory" if content is None else "file"
    return {"type": kind, "path": name, "size": len(content or b""), "oid": oid}


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"
    # Answers are written in two pieces, the second of which would wait for 40 ms.
    disable_nagle_algorithm = True

    def log_message(self, *_: Any) -> None:
        """Silence."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub = self.hub
        path = self.path.split("?")[0]
        if hub.repo_id in path:
            hub.tokens.add(self.headers.get("Authorization", ""))
        if self._refused(path):
            return
        info = f"/api/{hub.kind}/{hub.repo_id}"
        files = f"/{hub.repo_id}/resolve/" if hub.kind == "models" else f"/{hub.kind}/{hub.repo_id}/resolve/"
        revision = "main"
        for begin in (f"{info}/revision/", f"{info}/tree/", files):
            if path.startswith(begin):
                revision = unquote(path.removeprefix(begin).split("/")[0])
        found = hub.at(revision)
        if path == "/api/whoami-v2":
            self._whoami()
        elif path.startswith(f"{info}/xet-write-token/"):
            self._xet_token()
        elif not hub.exists:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
        elif found is not None and path in (info, f"{info}/revision/{path.rpartition('/')[2]}"):
            siblings = [_sibling(name, content) for name, content in found[1].items()]
            self._send_json({"id": hub.repo_id, "sha": found[0], "private": hub.private, "siblings": siblings})
        elif found is not None and path.startswith(f"{info}/tree/"):
            self._send_tree(found[1], path.removeprefix(f"{info}/tree/").partition("/")[2])
        elif path.startswith(f"{info}/revision/"):
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif (
            found is not None
            and path.startswith(files)
            and (name := path.removeprefix(files).partition("/")[2]) in found[1]
        ):
            self._send_file(name, *found)
        elif path.startswith(files):
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        else:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"})

    def _send_tree(self, there: dict[str, bytes], folder: str) -> None:
        """What lies in a folder and, where asked, in those below; 404 where there is no such folder."""
        begin = f"{folder}/" if folder else ""
        inside = {name: content for name, content in there.items() if name.startswith(begin)}
        if not inside:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        deep = parse_qs(urlsplit(self.path).query).get("recursive", ["false"])[0].lower() == "true"
        parents = {
            str(parent)
            for name in inside
            for parent in PurePosixPath(name.removeprefix(begin)).parents
            if str(parent) != "."
        }
        entries = [_entry(f"{begin}{parent}", None) for parent in sorted(parents)]
        entries += [_entry(name, content) for name, content in inside.items()]
        self._send_json([e for e in entries if deep or "/" not in e["path"].removeprefix(begin)])

    def _send_file(self, name: str, commit: str, there: dict[str, bytes]) -> None:
        hub = self.hub
        content = there[name]
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        asked = self.headers.get("Range")
        if hub.failures_before_success and asked:
            hub.failures_before_success -= 1
            self._send(503, b"", {})
            return
        if asked and hub.ranges:
            begin, end = asked.removeprefix("bytes=").split("-")
            last = min(int(end), len(content) - 1) if end else len(content) - 1
            headers["Content-Range"] = f"bytes {begin}-{last}/{len(content)}"
            piece = content[int(begin) : last + 1]
            hub.sent.append((self.command, name, len(piece)))
            self._send(206, piece, headers)
        else:
            hub.sent.append((self.command, name, len(content)))
            self._send(200, content, headers)

    def _refused(self, path: str) -> bool:
        for beginning, (status, code) in self.hub.refuse.items():
            if path.startswith(beginning):
                self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": code})
                return True
        return False

    def do_POST(self) -> None:
        self._take("POST")

    def do_PUT(self) -> None:
        self._take("PUT")

    def _take(self, method: str) -> None:
        hub, url = self.hub, urlsplit(self.path)
        length = int(self.headers.get("Content-Length", 0))
        if method == "PUT" and hub.cuts:
            hub.cuts -= 1
            self.rfile.read(length // 2)
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        body = self.rfile.read(length)
        if len(body) < length:
            # The client was killed: half of a request is none.
            self.close_connection = True
            return
        if self._refused(url.path):
            return
        paths_info = f"/api/{hub.kind}/{hub.repo_id}/paths-info/"
        if url.path.startswith(paths_info):
            # A question, though it is a POST.
            self._paths(unquote(url.path.removeprefix(paths_info)), body)
            return
        hub.posted.append((method, url.path))
        model = f"/api/models/{hub.repo_id}"
        revision = unquote(url.path.rpartition("/")[2])
        if url.path == "/api/validate-yaml":
            self._validate(json.loads(body)["content"])
        elif url.path == "/api/repos/create":
            asked = json.loads(body)
            if hub.exists:
                self._send(409, b"{}", {"X-Error-Message": "You already created this model repo"})
                return
            hub.exists, hub.private = True, asked.get("visibility") == "private"
            self._send_json({"url": f"{hub.endpoint}/{hub.repo_id}"})
        elif not hub.exists:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
        elif url.path.startswith(f"{model}/branch/"):
            hub.history[hub.commit] = dict(hub.files)
            hub.branches[revision] = hub.commit
            self._send(201, b"{}", {})
        elif url.path.startswith(f"{model}/preupload/"):
            self._preupload(json.loads(body)["files"])
        elif url.path == f"/{hub.repo_id}.git/info/lfs/objects/batch":
            self._send_json({"transfer": "basic", "objects": [self._blob(o) for o in json.loads(body)["objects"]]})
        elif url.path.startswith("/lfs/part/"):
            _, _, _, oid, number = url.path.split("/")
            hub.blobs[f"{oid}.{number}"] = body
            self._send(200, b"", {"ETag": hashlib.md5(body).hexdigest()})
        elif url.path.startswith("/lfs/whole/"):
            self._keep(revision, body)
        elif url.path.startswith("/lfs/complete/"):
            parts = [f"{revision}.{part['partNumber']}" for part in json.loads(body)["parts"]]
            self._keep(revision, b"".join(hub.blobs[part] for part in parts))
        elif url.path.startswith(f"{model}/commit/"):
            self._commit(revision, body, pull_request="create_pr" in parse_qs(url.query))
        else:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})

    def _paths(self, revision: str, body: bytes) -> None:
        found = self.hub.at(revision)
        if found is None:
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            return
        asked = json.loads(body)["paths"] if body.startswith(b"{") else parse_qs(body.decode())["paths"]
        entries = [_entry(name, found[1][name]) for name in asked if name in found[1]]
        folders = [name for name in asked if any(there.startswith(f"{name}/") for there in found[1])]
        self._send_json(entries + [_entry(name, None) for name in folders])

    def _whoami(self) -> None:
        if not self.headers.get("Authorization"):
            self._send(401, b"", {"X-Error-Message": "Invalid credentials in Authorization header"})
            return
        token = {"displayName": "mine", "role": self.hub.role}
        self._send_json({"type": "user", "name": "user", "orgs": [], "auth": {"type": "token", "accessToken": token}})

    def _xet_token(self) -> None:
        self._send_json({"casUrl": f"local://{self.hub.cas}", "accessToken": "x", "exp": 4_000_000_000})

    def _validate(self, card: str) -> None:
        data = yaml.safe_load(card.split("---")[1])
        problems = [
            f'"{key}" must be a string' for key in ("license", "base_model") if not isinstance(data.get(key, ""), str)
        ]
        if data.get("base_model_relation") not in (None, "adapter", "finetune", "merge", "quantized"):
            problems.append('"base_model_relation" must be one of [adapter, merge, quantized, finetune]')
        errors = [{"message": problem} for problem in problems]
        content = json.dumps({"errors": errors, "warnings": []}).encode()
        self._send(400 if errors else 200, content, {"Content-Type": "application/json"})

    def _preupload(self, files: list[dict[str, Any]]) -> None:
        told = []
        for file in files:
            mode = "lfs" if _is_large(file["path"]) else "regular"
            told.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": None})
        self._send_json({"files": told})

    def _blob(self, asked: dict[str, Any]) -> dict[str, Any]:
        hub, oid = self.hub, asked["oid"]
        if oid in hub.blobs:
            return asked
        upload: dict[str, Any] = {"href": f"{hub.endpoint}/lfs/whole/{oid}"}
        if hub.part_bytes is not None:
            numbers = range(1, -(-asked["size"] // hub.part_bytes) + 1)
            header = {str(n): f"{hub.endpoint}/lfs/part/{oid}/{n}" for n in numbers}
            header["chunk_size"] = str(hub.part_bytes)
            upload = {"href": f"{hub.endpoint}/lfs/complete/{oid}", "header": header}
        return asked | {"actions": {"upload": upload}}

    def _keep(self, oid: str, content: bytes) -> None:
        if hashlib.sha256(content).hexdigest() != oid:
            self._send(400, b"", {"X-Error-Message": "not the content that was announced"})
            return
        self.hub.blobs[oid] = content
        self._send_json({})

    def _commit(self, revision: str, body: bytes, *, pull_request: bool) -> None:
        hub = self.hub
        found = hub.at(revision)
        if found is None:
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            return
        entries = [json.loads(line) for line in body.splitlines()]
        if entries[0]["value"].get("parentCommit", found[0]) != found[0]:
            self._send(412, b"", {"X-Error-Message": "A commit has happened since. Please refresh and try again."})
            return
        files = dict(found[1])
        for entry in entries[1:]:
            value = entry["value"]
            match entry["key"]:
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    # What went to a content-addressed store of its own stands here by its digest.
                    files[value["path"]] = hub.blobs[value["oid"]] if hub.cas is None else value["oid"].encode()
                case "deletedFile":
                    del files[value["path"]]
        hub.history[found[0]] = dict(found[1])
        commit = hashlib.sha1(found[0].encode() + body).hexdigest()
        told = {"commitUrl": f"{hub.endpoint}/{hub.repo_id}/commit/{commit}", "commitOid": commit}
        if pull_request:
            hub.pull_requests.append(files)
            hub.branches[f"refs/pr/{len(hub.pull_requests)}"] = commit
            told["pullRequestUrl"] = f"{hub.endpoint}/{hub.repo_id}/discussions/{len(hub.pull_requests)}"
        elif revision == "main":
            hub.files, hub.commit = files, commit
        else:
            hub.branches[revision] = commit
        hub.history[commit] = files
        self._send_json(told)

    def _send_json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            try:
                self.wfile.write(body)
            except (BrokenPipeError, ConnectionResetError):
                # A client that has what it wants hangs up.
                self.close_connection = True


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Silence about clients that are gone."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def serve(hub: Hub, *mixed_in: type, join: bool = False) -> Iterator[Hub]:
    """Serve `hub` on a free port of the loopback interface.

    `mixed_in` are classes that the handler of requests begins with. With `join` the end waits for all that was sent,
    which clients that keep their connections open never let end.
    """
    handler = type("Handler", (*mixed_in, _Handler), {"hub": hub})
    server = _Server(("127.0.0.1", 0), handler)
    server.daemon_threads = not join
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
