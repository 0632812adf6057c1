"""Killed at any moment, `out` is absent or complete, and the same command again finishes the job."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import surgeon
from tests import tiny

# A process that has imported all it needs forks a child a trial, so that kills fall into the writing and not
# into Python's start-up. Runs without torch, as plans of bytes alone do once their promise was proven.
TRIALS = """
import hashlib, json, os, random, shutil, signal, sys, time
from pathlib import Path
import surgeon
import surgeon.apply.apply, surgeon.apply.write, surgeon.verify.static

base, work, trials = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
out, staging = work / "out", work / ".out.surgeon"

def digest(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}

def apply():
    surgeon.apply("llama-pro", base, out)

durations = []
for _ in range(3):
    shutil.rmtree(out, ignore_errors=True)
    began = time.perf_counter()
    apply()
    durations.append(time.perf_counter() - began)
expected = digest(out)
shutil.rmtree(out)
rng = random.Random(0)
seen = {"absent": 0, "complete": 0, "staged": 0}
for trial in range(trials):
    child = os.fork()
    if child == 0:
        try:
            apply()
        except BaseException as error:
            sys.stderr.write(f"{error!r}\\n")
            os._exit(1)
        os._exit(0)
    # Every tenth child is left alone for long, so that some end whatever else the machine is doing.
    time.sleep(rng.uniform(0, 1.2 * max(durations)) * (10 if trial % 10 == 9 else 1))
    os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the run after a kill failed"
    if out.exists():
        assert digest(out) == expected
        assert surgeon.verify(base, out, logits=False).holds
        seen["complete"] += 1
        if rng.random() < 0.5:
            surgeon.apply("llama-pro", base, out) if (staging / "journal.jsonl").exists() else None
        shutil.rmtree(out)
        shutil.rmtree(staging, ignore_errors=True)
    else:
        seen["absent"] += 1
        seen["staged"] += staging.exists()
        if rng.random() < 0.3:
            apply()
            assert digest(out) == expected
            assert not staging.exists()
            shutil.rmtree(out)
assert "torch" not in sys.modules
print(json.dumps(seen))
"""


def test_thirty_kills(tmp_path: Path) -> None:
    base = tiny.checkpoint(
        tmp_path / "base", "llama", hidden_size=128, intermediate_size=384, num_hidden_layers=12, shard="400KB"
    )
    work = tmp_path / "work"
    work.mkdir()
    surgeon.apply("llama-pro", base, tmp_path / "proven")
    ran = subprocess.run(
        [sys.executable, "-c", TRIALS, str(base), str(work), "30"], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    seen = json.loads(ran.stdout)
    # Not vacuous: kills fell before, in the middle of and after the work.
    assert seen["staged"] >= 1, seen
    assert seen["complete"] >= 1, seen
