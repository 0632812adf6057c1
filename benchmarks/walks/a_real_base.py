"""A real base: SmolLM2-135M learns French, at its own sizes; what training does, on a small base in its place."""

from __future__ import annotations

from pathlib import Path

from benchmarks.walks.walk import Step

PAGE = "a-real-base.md"
NAME = "HuggingFaceTB/SmolLM2-135M"
PUSHED = "user/SmolLM2-135M-french"

# The published config with random weights, and the small base's tokenizer: there is no network.
BASE = """
import shutil, sys, torch
from transformers import LlamaConfig, LlamaForCausalLM

small, folder = sys.argv[1:]
torch.manual_seed(0)
config = LlamaConfig(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
    num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192, rms_norm_eps=1e-5,
    initializer_range=1 / 24, rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    tie_word_embeddings=True, bos_token_id=0, eos_token_id=0)
LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
for name in ("tokenizer.json", "tokenizer_config.json"):
    shutil.copyfile(f"{small}/{name}", f"{folder}/{name}")
"""

INTRODUCTION = """\
# A real base learns French

You grow [SmolLM2-135M](https://huggingface.co/HuggingFaceTB/SmolLM2-135M), train only the new layers on French, and
keep its English.
The same commands work for any base of the [families](../reference/families.md); this one fits a laptop.

**Where the output comes from.**
This page was made without a network, so no line comes from SmolLM2's weights.

- *Sizes*: the command ran on a model of SmolLM2-135M's published config with random weights.
  Layers, bytes, memory, times and proofs do not depend on the weights' values.
- *Small base*: the same command ran on a Llama of 7.9M parameters under SmolLM2's name.
  It was trained on English manual pages.
  Its losses show what the steps do; SmolLM2's will be others.

Both were served by a stand-in for the Hub on this machine: MACHINE.
`python -m benchmarks.newcomer a-real-base` ran the commands and wrote this page; "…" marks output that is left out.
"""

TRAIN = """\
surgeon_train: 1
steps: 300
batch: 8
length: 256
log_every: 100
optimizer: {lr: 1.0e-3}
preserve: {loss: kl}           # the base as teacher, on the text that it wrote
sources:
  - {name: french, path: french.jsonl, share: 0.8, validation: 0.02}
  - {name: memory, path: memory.jsonl, share: 0.2, role: original, validation: 0.02}
"""

BEGUN = "Ce programme permet de"

LABELS = {"sizes": "*Sizes:*", "losses": "*Small base, under SmolLM2's name:*"}

STEPS = (
    Step(
        f"surgeon preview llama-pro {NAME}",
        title="Preview",
        says="`preview` fetches the config and the headers of the weights, not the weights.",
        cuts=(("26-27", "2-3"),),
        then="15 new layers, one on top of each pair.\n"
        "Only they train, so AdamW keeps its state for 53M of 188M parameters.",
        at="sizes",
    ),
    Step(
        f"surgeon apply llama-pro {NAME} out",
        title="Apply and verify",
        says="`apply` downloads the base once and streams it through.",
        at="sizes",
    ),
    Step(
        f"surgeon verify {NAME} out",
        says="`verify` compares every tensor, then every logit of a probe text.",
        cuts=(("comparing", "holds  base tensors"), ("holds  constants", "logits on")),
        at="sizes",
    ),
    Step(f"surgeon apply llama-pro {NAME} out", at="losses", hidden=True),
    Step(
        f"surgeon recall {NAME} --tokens 40000 --length 256 --to memory.jsonl",
        title="Text to remember by",
        says="You seldom have the text that a base was trained on.\n"
        "`recall` has the base write some, to be replayed while it learns French.",
        at="losses",
    ),
    Step(
        "surgeon train out train.yaml run --dry-run",
        title="Train",
        says="`french.jsonl` has a JSON object per line, with the key `text`: here, French manual pages.\n"
        "A [dataset of the Hub](../how-to/training-data.md) works as well.",
        writes=(("train.yaml", TRAIN),),
        cuts=(("trains 135", "trains  53"),),
        at="sizes",
    ),
    Step(
        "surgeon train out train.yaml run",
        says="The run on the small base:",
        cuts=(("peak rate", "step 0"),),
        at="losses",
    ),
    Step(
        f"surgeon evaluate run --base {NAME} --data french=french-held-out.jsonl --data english=english-held-out.jsonl"
        f' --prompt "{BEGUN}" --answer-tokens 24',
        title="Evaluate",
        says="Both texts are new to both models.\n`english-held-out.jsonl` is real English, not what the base wrote.",
        then="French is much better, English a little worse: Δ has both, with their intervals.",
        at="losses",
    ),
    Step(
        f"surgeon verify {NAME} run",
        title="Verify and push",
        says="Did training change only the new layers?",
        cuts=(("comparing", "holds  base tensors"), ("holds  silent", "trained:")),
        at="losses",
    ),
    Step(
        f"surgeon push run {PUSHED} --license apache-2.0",
        says="`push` verifies again, writes the model card and uploads the small base's run.",
        cuts=(("look at it", "load it"),),
        at="losses",
    ),
)

END = """\
## Next

- [Remembering](../how-to/remembering.md): other ways to forget less.
- [Comparing methods](../how-to/comparing.md): is another operation better for your text?
- [Large runs](../how-to/large-runs.md): a larger base, several GPUs.
"""


def prepare(desk: Path, new: Path, original: Path) -> None:
    """Write the French to learn, what is held out of both languages, and the training file."""
    (desk / "train.yaml").write_text(TRAIN, encoding="utf-8")
    lines = new.read_text(encoding="utf-8").splitlines(keepends=True)
    (desk / "french.jsonl").write_text("".join(lines[100:]), encoding="utf-8")
    (desk / "french-held-out.jsonl").write_text("".join(lines[:100]), encoding="utf-8")
    known = original.read_text(encoding="utf-8").splitlines(keepends=True)
    (desk / "english-held-out.jsonl").write_text("".join(known[:100]), encoding="utf-8")
