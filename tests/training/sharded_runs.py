"""What test_fsdp.py starts under torchrun: several runs in one group of processes, since starting one takes seconds."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

import surgeon
from surgeon.errors import SurgeonError
from surgeon.training import gate_fitting

# Of the gate's fit: what two processes do of it is the same in few.
GATE_STEPS = 200


def main(folder: Path, runs: list[str]) -> None:
    """Every run is `NAME=CONFIG`; what it told, or why it stopped, is in told.json (stopped1.txt: the second's)."""
    torch.set_num_threads(1)
    gate_fitting._STEPS = GATE_STEPS
    for run in runs:
        name, _, config = run.partition("=")
        try:
            trained = surgeon.train(folder / name / "out", folder / config, folder / name / "together", device="cpu")
        except SurgeonError as error:
            (folder / name / f"stopped{os.environ['RANK']}.txt").write_text(str(error), encoding="utf-8")
            continue
        if trained is not None:
            (folder / name / "told.json").write_text(json.dumps(trained.to_json()), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
    # As the command leaves: gloo's threads may outlive the interpreter, whose exit then aborts.
    sys.stdout.flush()
    os._exit(0)
