"""Which models of the installed transformers take which surgery: every model type, tiny, from plan to proof.

`python -m benchmarks.coverage [--encoders] [TYPE …] [--to FILE]` makes a tiny checkpoint of each type (its default
config with sizes shrunk, changed by tests/decoders.py where that cannot run, in bfloat16), applies one plan for each
surgery, verifies the output against its base (every byte, and logits of prefill and cached generation in bfloat16 and
in float32) and reverts it (every byte). `apply` itself runs a step of training on a twin where it attaches something.
It prints a table: `exact`, or the first line of the reason. With `--encoders` it does so with encoders and control
states alone (tests/encoders.py), whose outputs are compared on whole sequences, some of them padded.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

PLANS = {
    "insert": "{op: insert_layers, where: {every: 1}, init: {kind: copy}}",
    "branch": "{op: control_llm, layers: {every: 1}}",
    "adapters": "{op: gated_adapters, size: 8}",
    "slot": "{op: pmoe_experts, threshold: 1}",
    "states": "{op: mixture_of_control, rank: 4}",
}
ENCODER_PLANS = {"states": PLANS["states"]}


@dataclass
class Row:
    """What one model type gave: a word or a reason for each surgery, and the seconds it took."""

    model_type: str
    auto: str
    told: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


def tried(model_type: str, auto: str, plans: dict[str, str], made: Callable[..., Path]) -> Row:
    """Every plan on a tiny checkpoint of this type, as `made` makes it."""
    import surgeon
    from surgeon.errors import SurgeonError

    row, began = Row(model_type, auto), time.perf_counter()
    with scratch() as folder:
        try:
            base = made(folder / "base", model_type, auto, dtype="bfloat16")
        except Exception as error:
            row.told = dict.fromkeys(plans, f"no tiny checkpoint: {_line(error)}")
            return row
        for name, operation in plans.items():
            plan, out = folder / f"{name}.yaml", folder / name
            plan.write_text(f"surgeon: 1\nseed: 0\noperations:\n  - {operation}\n")
            try:
                surgeon.apply(str(plan), str(base), out)
                found = surgeon.verify(str(base), out, windows=2, window=32, dtypes=("auto", "float32"))
                surgeon.revert(out, folder / f"{name}-back")
                same = _same_bytes(base, folder / f"{name}-back")
                row.told[name] = "exact" if found.holds and found.identical and same else "DIFFERS"
            except SurgeonError as error:
                row.told[name] = _line(error)
            except Exception as error:
                row.told[name] = f"CRASH {type(error).__name__}: {_line(error)}"
    row.seconds = time.perf_counter() - began
    gc.collect()
    return row


def _same_bytes(base: Path, back: Path) -> bool:
    """Whether both folders hold the same tensors, bit for bit, and the same config."""
    import torch
    from safetensors.torch import load_file

    one, other = (
        {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}
        for folder in (base, back)
    )
    configs = [json.loads((folder / "config.json").read_text()) for folder in (base, back)]
    return configs[0] == configs[1] and one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder that is gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="surgeon-coverage-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _line(error: BaseException) -> str:
    words = str(error).splitlines()[0] if str(error) else type(error).__name__
    return words.replace("|", "/")[:230]


def table(rows: list[Row], plans: dict[str, str]) -> str:
    """The rows as Markdown, after how many are exact."""
    counts = ", ".join(f"{name} {sum(row.told.get(name) == 'exact' for row in rows)}" for name in plans)
    lines = [f"exact, of {len(rows)}: {counts}", "", f"| model type | auto class | {' | '.join(plans)} |"]
    lines.append("|---" * (len(plans) + 2) + "|")
    for row in rows:
        auto = row.auto.removeprefix("AutoModelFor")
        lines.append(f"| {row.model_type} | {auto} | {' | '.join(row.told.get(name, '') for name in plans)} |")
    return "\n".join(lines)


def main() -> None:
    from tests.decoders import decoders, tiny_decoder
    from tests.encoders import encoders, tiny_encoder

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("types", nargs="*")
    parser.add_argument("--encoders", action="store_true")
    parser.add_argument("--to", type=Path)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    plans, made = (ENCODER_PLANS, tiny_encoder) if asked.encoders else (PLANS, tiny_decoder)
    for model_type, auto in encoders() if asked.encoders else decoders():
        if asked.types and model_type not in asked.types:
            continue
        with contextlib.redirect_stderr(io.StringIO()):
            row = tried(model_type, auto, plans, made)
        rows.append(row)
        print(f"{row.seconds:6.1f} s  {model_type} {auto}: {row.told}", file=sys.stderr, flush=True)
    text = table(rows, plans)
    print(text)
    if asked.to:
        asked.to.write_text(text + "\n")


if __name__ == "__main__":
    main()
