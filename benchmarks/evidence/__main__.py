"""Learning French against forgetting English, method by method: what surgery is for, measured.

    python benchmarks/evidence --base DIR --corpora DIR --work DIR [--jobs 2] [--until MINUTES] [--report]

Trains every method of methods.py on French text with p = 0.1 and p = 0 of rough English stand-in mixed in, equal
tokens for all, rates swept, several seeds for the headline rows. Each run is a process; its record is one line of
benchmarks/results/evidence/runs.jsonl, written when it is done, so the same command continues what was cut off
(`--until`: begin no run after so many minutes). The table, the frontier's plot and the comparison with the papers
(benchmarks/results/evidence.md) are made anew from the records each time; `--report` makes only them.

DIR of --corpora holds NAME.train.jsonl and NAME.val.jsonl of fr_man, fr_gnome, fr_handbook, fr_office, en_man and
en_office.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

import yaml  # noqa: E402
from methods import BY_NAME, METHODS, RATES, SEEDS, SHARES, Method, leader  # noqa: E402
from one import grown  # noqa: E402
from records import Records, key_of  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path)
    parser.add_argument("--corpora", type=Path)
    parser.add_argument("--work", type=Path, help="folder for the grown checkpoints; kept, and used again")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--threads", type=int, default=1, help="of each run")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--sweep-steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=2, help="sequences a step")
    parser.add_argument("--length", type=int, default=128, help="tokens a sequence")
    parser.add_argument("--until", type=float, default=float("inf"), help="minutes")
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    records = Records()
    if not arguments.report:
        if not (arguments.base and arguments.corpora and arguments.work):
            parser.error("--base, --corpora and --work are needed to run")
        Bench(arguments, records).go()
    from report import write

    write(records)


class Bench:
    """The runs in their order: sweeps, headline rows, the other rows, more seeds."""

    def __init__(self, arguments: argparse.Namespace, records: Records) -> None:
        self.arguments = arguments
        self.records = records
        self.end = time.monotonic() + 60 * arguments.until
        self.lock = threading.Lock()

    def go(self) -> None:
        """Run what is not yet in the records."""
        with ThreadPoolExecutor(self.arguments.jobs) as pool:
            families = dict.fromkeys(method.family for method in METHODS)
            rates = dict(zip(families, pool.map(self._sweep, families), strict=True))
            headline = [method for method in METHODS if method.headline]
            others = [method for method in METHODS if not method.headline]
            order = [
                *((method, 0.1, 0) for method in headline),
                *((method, 0.0, 0) for method in headline),
                *((method, 0.1, seed) for seed in range(1, SEEDS) for method in headline),
                *((method, 0.1, 0) for method in others),
                *((method, 0.0, 0) for method in others),
                *((method, 0.0, seed) for seed in range(1, SEEDS) for method in headline),
            ]
            specs = [
                self._spec(method.name, share, rate, seed, self.arguments.steps)
                for method, share, seed in order
                if (rate := rates[method.family]) is not None
            ]
            list(pool.map(self._run, specs))

    def _grow(self, method: Method, seed: int) -> None:
        import surgeon
        from surgeon.checkpoint.folder import CheckpointFolder
        from surgeon.errors import BadInput
        from surgeon.plan import shipped

        out = grown(self.arguments.work, method.name, seed)
        if out.exists():
            try:
                CheckpointFolder.open(out)
            except BadInput:
                # Grown by another version, with that version's code.
                shutil.rmtree(out)
            else:
                return
        plan = yaml.safe_load(shipped.find_plan(method.plan).read_text(encoding="utf-8")) | {"seed": seed}
        file = out.with_suffix(".yaml")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(yaml.safe_dump(plan), encoding="utf-8")
        surgeon.apply(str(file), str(self.arguments.base), out)

    def _spec(self, method: str, share: float, rate: float, seed: int, steps: int) -> dict[str, Any]:
        asked = self.arguments
        return {
            "method": method,
            "p": share,
            "rate": rate,
            "seed": seed,
            "steps": steps,
            "batch": asked.batch,
            "length": asked.length,
            "device": asked.device,
        }

    def _sweep(self, family: str) -> float | None:
        """The rate of the best trade-off after a short run with replay; None where time was up before.

        Neutral Residues, section 4.1, chooses by the trade-off too; here it is the sum of both losses.
        """
        method = leader(family)
        losses: dict[int, float] = {}

        def loss_at(index: int) -> float | None:
            spec = self._spec(method.name, SHARES[0], RATES[index], 0, self.arguments.sweep_steps)
            if (record := self._run(spec)) is not None:
                losses[index] = record["curve"][-1]["fr"] + record["curve"][-1]["en"]
            return losses.get(index)

        middle = RATES.index(method.middle)
        wanted = [middle, middle + 1, middle - 1]
        while wanted:
            if loss_at(wanted.pop(0)) is None:
                return None
            best = min(losses, key=losses.__getitem__)
            if not wanted:
                wanted = [at for at in (best - 1, best + 1) if at not in losses and 0 <= at < len(RATES)]
        return RATES[min(losses, key=losses.__getitem__)]

    def _run(self, spec: dict[str, Any]) -> dict[str, Any] | None:
        with self.lock:
            if (known := self.records.get(key_of(spec))) is not None:
                return known
        if time.monotonic() > self.end:
            return None
        asked = self.arguments
        with self.lock:
            for method in (BY_NAME[spec["method"]], BY_NAME["nr"]):
                if method.how == "plan":
                    self._grow(method, spec["seed"])
        command = [sys.executable, str(Path(__file__).parent / "one.py"), json.dumps(spec), str(asked.threads)]
        paths = [str(path) for path in (asked.work, asked.base, asked.corpora)]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(asked.threads)}
        ran = subprocess.run([*command, *paths], capture_output=True, text=True, check=False, env=environment)
        if ran.returncode:
            raise SystemExit(f"{spec}:\n{ran.stderr}")
        record: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
        with self.lock:
            self.records.add(record)
            point = record["curve"][-1]
            print(
                f"{BY_NAME[spec['method']].label}, p {spec['p']:g}, rate {spec['rate']:g}, seed {spec['seed']},"
                f" {spec['steps']} steps: fr {point['fr']:.3f}, en {point['en']:.3f} ({record['seconds']:.0f} s)",
                flush=True,
            )
        return record


if __name__ == "__main__":
    main()
