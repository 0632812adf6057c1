"""`surgeon demo`: make a base, grow it by a plan, prove that nothing was lost, show what training then learns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from surgeon import api
from surgeon.demo.base import STEPS_A_SECOND, DemoBase, make_base, sample
from surgeon.demo.corpus import code, documentation
from surgeon.demo.learning import Learning, learn
from surgeon.errors import BadInput, printable
from surgeon.execute import Listener

PLAN = "opt-deus"
PROMPT = "Return the"
WRITTEN_TOKENS = 40
# Of the base's steps, what the grown model trains.
LEARNING_SHARE = 1 / 3


@dataclass(frozen=True)
class Demo:
    """What a demo did: the base it trained, the surgery, its proof, what both models write, what training taught."""

    folder: Path
    base: DemoBase
    applied: api.Applied
    verification: api.Verification
    prompt: str
    base_writes: str
    out_writes: str
    learning: Learning

    @property
    def holds(self) -> bool:
        """Whether every promise does, of the surgery and of the run."""
        return self.verification.holds and self.learning.verification.holds


def run_demo(folder: Path, *, seconds: float = 25.0, seed: int = 0, listener: Listener) -> Demo:
    """Run the demo into the new folder `folder`: `base/`, `grown/` and `run/`. BadInput where it exists.

    `seconds` is about what the base's training takes on one core; what follows it grows with it.
    """
    if folder.exists():
        raise BadInput(f"{printable(str(folder))} exists; name another folder: surgeon demo DIR")
    documents = documentation()
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

    base = make_base(base_folder, documents=documents, seconds=seconds, seed=seed, progress=tell)
    listener.say(f"growing it by the shipped plan {PLAN}")
    applied = api.apply(PLAN, str(base_folder), out, listener=listener)
    listener.say("verifying: bytes, then logits in prefill and cached decode")
    verification = api.verify(base_folder, out, dtypes=("auto", "float32"), listener=listener)
    base_writes, out_writes = (sample(each, PROMPT, WRITTEN_TOKENS) for each in (base_folder, out))
    steps = max(1, round(seconds * STEPS_A_SECOND * LEARNING_SHARE))
    listener.say("training the new layers on the library's code, of which the base has seen nothing")
    learning = learn(
        base_folder, out, folder / "run", known=documents, new=code(), steps=steps, seed=seed, listener=listener
    )
    return Demo(
        folder=folder,
        base=base,
        applied=applied,
        verification=verification,
        prompt=PROMPT,
        base_writes=base_writes,
        out_writes=out_writes,
        learning=learning,
    )
