"""The first hour: a small base learns to answer, with three mistakes on the way."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from benchmarks.walks.walk import Step

PAGE = "first-hour.md"

INTRODUCTION = """\
# The first hour

You install surgeon, grow a small model, train only what is new, and measure what it learned and what it forgot.
You then share the result and take the surgery back.
Three mistakes on the way show what a refusal looks like.

The base is a Llama of eight layers that has read short stories about coloured things.
It shall learn to answer questions about colours.
So small a model shows the steps, not what a method is worth.
`python -m benchmarks.newcomer --work DIR` made the base, ran these commands and wrote this page.
"…" marks output that is left out.

## Install

surgeon needs Python 3.11 or later.
It is not published yet: install it from its source tree, here the folder `surgeon`, in a new environment.
(The distribution is `model-surgeon`; `surgeon` of PyPI is another project.)

<!-- not run: benchmarks/newcomer.py installs the wheel that this builds -->
```sh
python -m venv venv
. venv/bin/activate
pip install ./surgeon
```
"""

PLAN = """\
surgeon: 1
operations:
  - op: insert_layers
    where: {every: 2}
    init: {kind: copy}
    zero_init: true
"""
WRONG_PLAN = PLAN.replace("zero_init", "zero_inits")

TRAIN = """\
surgeon_train: 1
steps: 300
batch: 8
length: 64
log_every: 100
optimizer: {lr: 2.0e-3}
preserve: {loss: kl}           # the base as teacher, on the stories
sources:
  - {name: answers, path: alpaca.json, share: 0.7, validation: 0.1}
  - {name: stories, path: stories.jsonl, share: 0.3, role: original, validation: 0.1}
"""
FOREIGN_KEY = TRAIN.replace("optimizer: {lr: 2.0e-3}", "learning_rate: 2.0e-3")
WRONG_ROWS = TRAIN.replace("alpaca.json,", "alpaca.json, field: [instruction, answer],")

COLOURS = {
    "blue": ("sky", "sea", "whale"),
    "green": ("grass", "frog", "forest", "pea"),
    "red": ("rose", "tomato", "cherry", "brick"),
    "yellow": ("lemon", "sun", "canary", "butter"),
    "white": ("snow", "milk", "swan", "salt"),
    "black": ("coal", "raven", "night", "ink"),
}
QUESTIONS = (
    "What colour is the {}?",
    "Which colour has the {}?",
    "Name the colour of the {}.",
    "The {} is of what colour?",
)
THINGS = [(thing, colour) for colour, things in COLOURS.items() for thing in things]

# A tokenizer and a model trained on the stories, a chat template, a licence: all that commands read.
BASE = """
import json, torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

stories = [json.loads(line)["text"] for line in open("stories.jsonl")]
rows = json.load(open("alpaca.json"))
made = Tokenizer(models.BPE())
made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
made.decoder = decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
made.train_from_iterator([*stories, *(text for row in rows for text in row.values())], trainer)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
tokenizer.chat_template = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ 'Answer:\\n' + message['content'] + eos_token }}"
    "{% else %}{{ 'Question:\\n' + message['content'] + '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Answer:\\n' }}{% endif %}"
)
tokenizer.save_pretrained("base")
torch.manual_seed(0)
config = LlamaConfig(vocab_size=made.get_vocab_size(), hidden_size=96, intermediate_size=256, num_hidden_layers=8,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, bos_token_id=0, eos_token_id=1)
model = LlamaForCausalLM(config)
ids = torch.tensor([token for text in stories for token in [*made.encode(text).ids, 1]])
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for _ in range(STEPS):
    batch = ids[torch.randint(len(ids) - 64, (8, 1)) + torch.arange(64)]
    model(input_ids=batch, labels=batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
model.to(torch.bfloat16).save_pretrained("base")
open("base/README.md", "w").write("---\\nlicense: apache-2.0\\n---\\n\\n# A small Llama that has read short stories\\n")
""".replace("STEPS", "300")


def prepare(desk: Path) -> None:
    """Write the rows and the stories into `desk`."""
    rows = [
        {"instruction": question.format(thing), "input": "", "output": f"The {thing} is {colour}."}
        for question, (thing, colour) in itertools.product(QUESTIONS, THINGS)
    ]
    (desk / "alpaca.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    animals = ("cat", "dog", "child", "farmer", "bird")
    deeds = ("saw", "followed", "painted", "called")
    told = [
        f"Long ago a {animal} {deed} the {colour} {thing}. Nobody knew why the {thing} was {colour}."
        for animal, deed, (thing, colour) in itertools.product(animals, deeds, THINGS)
    ]
    texts = (json.dumps({"text": text}) for text in told)
    (desk / "stories.jsonl").write_text("\n".join(texts) + "\n", encoding="utf-8")


# Half of the new layers' rate; no other was tried.
FULL_RATE = "1.0e-3"
PUT = "What colour is the raven?"

STEPS = (
    Step(
        "surgeon plans llama-pro", says="surgeon ships plans; `surgeon plans` lists them, and prints one by its name."
    ),
    Step(
        "surgeon inspect base",
        title="Look",
        says="BASE is a folder, or the name of a model on the Hub.",
    ),
    Step(
        f'surgeon evaluate base --prompt "{PUT}"',
        says="Ask it a question first, to have something to compare with.",
        then="It has read stories, never a question.",
    ),
    Step(
        "surgeon preview llama-pro base",
        title="Preview",
        says="`preview` reads headers alone, of a large model too.",
        then="Nothing is written yet.\n"
        "The last layer of each pair gets a copy on top of it, which adds exactly zero until it trains.",
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
        "surgeon train grown train.yaml tuned --dry-run",
        title="Second recovery: a key of another trainer",
        says="`alpaca.json` has questions and answers, `stories.jsonl` what the base has read.\n"
        "The stories are replayed, so that they are not forgotten.",
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
        names=("alpaca.json", "no key `answer`"),
        then="The first rows of every source are read before torch is imported, so this takes less than a second.",
    ),
    Step(
        "surgeon train grown train.yaml tuned --dry-run",
        title="Train",
        says="Without `field` surgeon finds question and answer itself.\n"
        "A dry run shows what the loss will count, the time and the memory.",
        writes=(("train.yaml", TRAIN),),
        cuts=(("trains 36 tensors", "answers"),),
        then="Only the answer and the end of the turn count, as they should.",
    ),
    Step(
        "surgeon train grown train.yaml tuned",
        says="The run itself.\nAfter a kill, the same command continues it.",
        cuts=(("peak rate", "step 0"),),
    ),
    Step(
        f"surgeon train base train.yaml full --set what=base --set optimizer.lr={FULL_RATE}",
        says="For comparison, all weights of the base, with the same text, replay and teacher.",
        cuts=(("peak rate", "step 0"),),
    ),
    Step(
        f'surgeon evaluate tuned full --base base --data train.yaml --prompt "{PUT}"',
        title="Evaluate",
        says="Losses on the text that `train` held out, with 95 % intervals, and the same question again.\n"
        "The base has read all stories.",
        then="The new layers learned the answers; full fine-tuning learned them better.\n"
        "Neither raised the loss on the stories.\n"
        "Each ran at one rate and one seed.\n"
        "What full fine-tuning does not give is the base, byte for byte, in the trained model; the next steps show it.",
    ),
    Step(
        "surgeon verify base tuned",
        title="Share",
        says="Did training change only the new layers?",
        cuts=(("comparing", "holds  base tensors"), ("holds  silent", "trained:")),
        then="Every tensor of the base is still in its place, byte for byte.",
    ),
    Step(
        "surgeon report tuned --base base", says="One page without network, to show to others: layers, losses, proof."
    ),
    Step(
        "surgeon push tuned user/colours --base base --dry-run",
        says="What would go to the Hub?",
    ),
    Step(
        "surgeon push tuned user/colours --base base",
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
