"""`surgeon demo`: make a base, grow it by a shipped plan, prove that nothing was lost, show both writing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from surgeon import api
from surgeon.demo.base import DemoBase, make_base, sample
from surgeon.errors import BadInput, printable
from surgeon.execute import Listener

PLAN = "opt-deus"
PROMPT = "Return the"
WRITTEN_TOKENS = 40


@dataclass(frozen=True)
class Demo:
    """What a demo did: the base it trained, the surgery, its proof, and what both models write."""

    folder: Path
    base: DemoBase
    applied: api.Applied
    verification: api.Verification
    prompt: str
    base_writes: str
    out_writes: str


def run_demo(folder: Path, *, seconds: float = 25.0, seed: int = 0, listener: Listener) -> Demo:
    """Run the demo into the new folder `folder` (`base/` and `grown/` in it). BadInput where it exists."""
    if folder.exists():
        raise BadInput(f"{printable(str(folder))} exists; name another folder: surgeon demo DIR")
    base_folder, out = folder / "base", folder / "grown"
    base_folder.mkdir(parents=True)
    listener.say(f"training a small Llama on Python's own documentation (about {seconds:.0f} s)")
    listener.begin("training", 1000)
    done = 0

    def tell(fraction: float, _words: str) -> None:
        nonlocal done
        step = int(fraction * 1000) - done
        done += step
        listener.advance(step)

    base = make_base(base_folder, seconds=seconds, seed=seed, progress=tell)
    listener.say(f"growing it by the shipped plan {PLAN}")
    applied = api.apply(PLAN, str(base_folder), out, listener=listener)
    listener.say("verifying: bytes, then logits in prefill and cached decode")
    verification = api.verify(base_folder, out, dtypes=("auto", "float32"), listener=listener)
    return Demo(
        folder=folder,
        base=base,
        applied=applied,
        verification=verification,
        prompt=PROMPT,
        base_writes=sample(base_folder, PROMPT, WRITTEN_TOKENS),
        out_writes=sample(out, PROMPT, WRITTEN_TOKENS),
    )
