"""A small stand-in for the Hub on the loopback interface: model info, tree, files with ranges, and refusals."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "1234567890abcdef1234567890abcdef12345678"


@dataclass
class Hub:
    """What the server serves and what it was asked. `refuse` maps a path's beginning to (status, X-Error-Code)."""

    files: dict[str, bytes]
    repo_id: str = "user/model"
    endpoint: str = ""
    ranges: bool = True
    refuse: dict[str, tuple[int, str]] = field(default_factory=dict)
    # (method, file, bytes of it that were sent)
    sent: list[tuple[str, str, int]] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    failures_before_success: int = 0

    def bytes_sent(self, file: str) -> int:
        """Bytes of a file's content that went over the wire."""
        return sum(count for method, name, count in self.sent if method == "GET" and name == file)


def files_of(folder: Path) -> dict[str, bytes]:
    """A folder's files by relative name."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

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
        for beginning, (status, code) in hub.refuse.items():
            if path.startswith(beginning):
                self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": code})
                return
        info = f"/api/models/{hub.repo_id}"
        files = f"/{hub.repo_id}/resolve/"
        if path in (info, f"{info}/revision/main", f"{info}/revision/{COMMIT}"):
            siblings = [{"rfilename": name, "size": len(content)} for name, content in hub.files.items()]
            self._send_json({"id": hub.repo_id, "sha": COMMIT, "siblings": siblings})
        elif path == f"{info}/tree/{COMMIT}":
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in hub.files.items()
            ]
            self._send_json(entries)
        elif path.startswith(f"{info}/revision/"):
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif path.startswith(files) and path.split("/", 5)[5] in hub.files:
            self._send_file(path.split("/", 5)[5])
        elif path.startswith(files):
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        else:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"})

    def _send_file(self, name: str) -> None:
        hub = self.hub
        content = hub.files[name]
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
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


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    """Serve `hub` on a free port of the loopback interface."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
