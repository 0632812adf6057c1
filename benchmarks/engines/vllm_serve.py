"""`vllm serve` end to end: an output with grafts over HTTP, beside transformers.

    python -m benchmarks.engines.models WORK                 # where surgeon is installed
    python -m benchmarks.engines.vllm_serve WORK [--title TITLE]    # where vLLM is, its command on the path

Starts `vllm serve OUT --trust-remote-code` on a free port of this machine, asks `/v1/completions` for a completion of
every prompt, greedily, and compares the tokens with those of transformers; then starts it without the option, which
must fail, and shows the line by which it does. Prints one line of JSON; exit 1 where a token differs.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

PATIENCE = 600.0


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def command(folder: Path, port: int, *more: str) -> list[str]:
    """The command of the server."""
    told = ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "256"]
    return ["vllm", "serve", str(folder), *told, "--served-model-name", "out", "--enforce-eager", *more]


def ask(port: int, path: str, body: dict[str, Any] | None = None) -> Any:
    """The answer to a request."""
    content = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", content, headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        found = answer.read()
    return json.loads(found) if found else None


def served(folder: Path, prompts: list[list[int]], log: Path) -> list[list[int]]:
    """The tokens that a server generates for each prompt."""
    port = free_port()
    with (
        log.open("w") as told,
        subprocess.Popen(
            command(folder, port, "--trust-remote-code"), stdout=told, stderr=subprocess.STDOUT, env=environment()
        ) as server,
    ):
        try:
            began = time.monotonic()
            while True:
                try:
                    ask(port, "/health")
                    break
                except (urllib.error.URLError, ConnectionError, TimeoutError):
                    if server.poll() is not None or time.monotonic() - began > PATIENCE:
                        raise SystemExit(f"the server did not start; see {log}") from None
                    time.sleep(1)
            body = {"model": "out", "max_tokens": 16, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
            answers = [ask(port, "/v1/completions", {**body, "prompt": prompt}) for prompt in prompts]
            return [answer["choices"][0]["token_ids"] for answer in answers]
        finally:
            server.terminate()


def refused(folder: Path) -> str:
    """The line by which a server without `--trust-remote-code` ends."""
    ran = subprocess.run(
        command(folder, free_port()), capture_output=True, text=True, check=False, env=environment(), timeout=PATIENCE
    )
    lines = [line.strip() for line in (ran.stdout + ran.stderr).splitlines() if "trust_remote_code" in line]
    return lines[-1] if ran.returncode and lines else f"exit status {ran.returncode}"


def environment() -> dict[str, str]:
    """Of the servers: a small cache, no network."""
    return os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


def main(arguments: list[str]) -> None:
    """Run as a script."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines.vllm_serve", description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--title", default="llama, all")
    chosen = parser.parse_args(arguments)
    case = json.loads((chosen.work / "cases.json").read_text())[chosen.title]
    folder = chosen.work / "outputs" / case["folder"]
    prompts = json.loads((chosen.work / "prompts.json").read_text())
    expected = json.loads((chosen.work / "expected" / f"{case['folder']}.json").read_text())
    found = served(folder, prompts, chosen.work / "serve.log")
    right = [one["tokens"] for one in expected]
    same = sum(a == b for a, b in zip(found, right, strict=True))
    told = {"title": chosen.title, "same": same, "prompts": len(prompts), "without the option": refused(folder)}
    print(json.dumps(told, ensure_ascii=False))
    if same < len(prompts):
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
