"""Mixture-of-Control's recipe for classifying texts beside others, on small real data made of files given by path.

    python -m benchmarks.glue --corpora DIR --work DIR [--rates RATE …] [--seeds N] [--minutes M]

The corpora are files LANGUAGE_KIND.train.jsonl and LANGUAGE_KIND.val.jsonl with a `text` a line. Trains a byte-level
BPE and a small RoBERTa on the training texts by masked language modelling (Liu et al. 2019, section 2), makes two tasks
of the same files, whose labels are the files' own, and trains a classification head on each by `surgeon train`:

- kind: which of the kinds an English passage is from;
- halves: whether two passages follow each other in one document, or are of two of one kind (a task of pairs).

Methods, all with the same steps, batches and seeds: the head alone, full fine-tuning, LoRA, Parallel Control and
Mixture-of-Control (Nguyen et al. 2026; linear schedule, warm-up 6 %, top 1, α 0.95). Encoder, data and every run are
records in --work: the same command goes on where it was, and writes results/glue.md of what there is.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

import surgeon
from benchmarks.measuring import machine

PAGE = Path(__file__).resolve().parent / "results" / "glue.md"
BOS, PAD, EOS, UNKNOWN, MASK = "<s>", "<pad>", "</s>", "<unk>", "<mask>"
SHAPE = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512}
VOCABULARY, LENGTH = 4096, 64
# Masked language modelling.
MASKED_STEPS, MASKED_BATCH, MASKED_RATE, MASKED_SHARE = 1500, 16, 2e-3, 0.15
RANK = 8
STEPS, BATCH = 100, 16
CHARACTERS = 160
TASKS = {"kind": (640, 480), "halves": (640, 480)}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "head alone": ("base", {"what": "head"}),
    "full fine-tuning": ("base", {"what": "all"}),
    "LoRA": ("base", {"lora": {"rank": RANK, "alpha": 2 * RANK}}),
    "Parallel Control": ("parallel", {}),
    "Mixture-of-Control": ("mixture", {}),
}
# The papers' rates for methods that add little; full fine-tuning begins lower.
RATES = {"full fine-tuning": (1e-4, 4e-4, 1.6e-3)}
OTHERS = (4e-4, 1.6e-3, 6.4e-3)


@dataclass(frozen=True)
class Run:
    """One training run: its task, method, peak rate and seed."""

    task: str
    method: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        """What its record is called."""
        return f"{self.task}+{self.method.replace(' ', '-')}+{self.rate:g}+{self.seed}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpora", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--rates", type=float, nargs="+", help="peak rates of every method, in place of those here")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after so many processor minutes")
    asked = parser.parse_args()
    asked.work.mkdir(parents=True, exist_ok=True)
    (asked.work / "records").mkdir(exist_ok=True)
    torch.set_num_threads(1)
    encoder(asked.corpora, asked.work)
    tasks(asked.corpora, asked.work)
    grown(asked.work)
    for run in runs(asked.rates, asked.seeds):
        record = asked.work / "records" / f"{run.name}.json"
        if record.is_file():
            continue
        if time.process_time() > 60 * asked.minutes:
            break
        record.write_text(json.dumps(trained(run, asked.work)), encoding="utf-8")
        print(run.name, record.read_text(), flush=True)
    write_page(asked.work)


def runs(rates: list[float] | None, seeds: int) -> Iterator[Run]:
    """All runs: by the first seed every method at its middle rate, then at the others, then by the next seed."""
    for seed in range(seeds):
        for place in (1, 0, 2) if rates is None else range(len(rates)):
            for task in TASKS:
                for method in METHODS:
                    yield Run(task, method, (rates or RATES.get(method, OTHERS))[place], seed)


def texts(corpora: Path, pattern: str) -> list[str]:
    """The texts of the files of this name, in order."""
    found = [
        json.loads(line)["text"]
        for file in sorted(corpora.glob(pattern))
        for line in file.read_text(encoding="utf-8").splitlines()
    ]
    if not found:
        sys.exit(f"{corpora}: no text in files called {pattern}")
    return found


def encoder(corpora: Path, work: Path) -> None:
    """Train the tokenizer and the small RoBERTa, `base`, unless they are there."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast, RobertaConfig, RobertaForMaskedLM

    folder = work / "base"
    if (folder / "config.json").is_file():
        return
    corpus = texts(corpora, "*.train.jsonl")
    random.Random(0).shuffle(corpus)
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    special = [BOS, PAD, EOS, UNKNOWN, MASK]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((text[:2000] for text in corpus[:3000]), trainer)
    tokenizer.post_processor = processors.RobertaProcessing((EOS, 2), (BOS, 0), add_prefix_space=True)
    config = RobertaConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH * 2 + 2,
        type_vocab_size=1,
        bos_token_id=0,
        pad_token_id=1,
        eos_token_id=2,
        **SHAPE,
    )
    torch.manual_seed(0)
    model = RobertaForMaskedLM(config)
    stream = torch.tensor([i for text in tokenizer.encode_batch([t[:4000] for t in corpus[:6000]]) for i in text.ids])
    optimizer = torch.optim.AdamW(model.parameters(), lr=MASKED_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    warm = MASKED_STEPS // 10

    def share(step: int) -> float:
        return min((step + 1) / warm, (MASKED_STEPS - step) / (MASKED_STEPS - warm))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    draws = torch.Generator().manual_seed(0)
    losses: list[float] = []
    model.train()
    for step in range(MASKED_STEPS):
        begins = torch.randint(len(stream) - LENGTH, (MASKED_BATCH,), generator=draws)
        ids = torch.stack([stream[begin : begin + LENGTH] for begin in begins.tolist()])
        # Of the chosen tokens eight in ten become the mask, one any token, one stays.
        chosen = torch.rand(ids.shape, generator=draws) < MASKED_SHARE
        how = torch.rand(ids.shape, generator=draws)
        masked = torch.where(chosen & (how < 0.8), 4, ids)
        random_ids = torch.randint(5, VOCABULARY, ids.shape, generator=draws)
        masked = torch.where(chosen & (how >= 0.9), random_ids, masked)
        loss = model(input_ids=masked, labels=torch.where(chosen, ids, -100)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if step % 100 == 99:
            print(f"masked words, step {step + 1}: loss {statistics.mean(losses[-100:]):.3f}", flush=True)
    (work / "masked.json").write_text(json.dumps({"loss": statistics.mean(losses[-50:]), "first": losses[0]}))
    made = folder.with_name("base-new")
    shutil.rmtree(made, ignore_errors=True)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD, unk_token=UNKNOWN, mask_token=MASK,
        cls_token=BOS, sep_token=EOS,
    ).save_pretrained(made)  # fmt: skip
    model.save_pretrained(made)
    made.rename(folder)


def tasks(corpora: Path, work: Path) -> None:
    """Write the tasks' training and held-out texts; of each kind as many, held-out ones from the files held out."""
    kinds = sorted({file.name.partition(".")[0] for file in corpora.glob("en_*.train.jsonl")})
    for part, nth in (("train", 0), ("val", 1)):
        drawn = random.Random(part)
        documents = {kind: texts(corpora, f"{kind}.{part}.jsonl") for kind in kinds}
        rows: dict[str, list[dict[str, str]]] = {task: [] for task in TASKS}
        for number in range(TASKS["kind"][nth]):
            kind = kinds[number % len(kinds)]
            rows["kind"].append({"text": passage(drawn.choice(documents[kind]), drawn), "label": kind})
        long = {kind: [text for text in held if len(text) > 3 * CHARACTERS] for kind, held in documents.items()}
        for number in range(TASKS["halves"][nth]):
            held = long[drawn.choice([kind for kind in kinds if len(long[kind]) > 1])]
            one, other = drawn.sample(held, 2)
            begin = drawn.randrange(len(one) - 2 * CHARACTERS)
            first, next_one = one[begin : begin + CHARACTERS], one[begin + CHARACTERS : begin + 2 * CHARACTERS]
            same = number % 2 == 0
            second = next_one if same else passage(other, drawn)
            rows["halves"].append({"text": first, "text_pair": second, "label": "same" if same else "other"})
        for task, made in rows.items():
            content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in made)
            (work / f"{task}.{part}.jsonl").write_text(content, encoding="utf-8")


def passage(text: str, drawn: random.Random) -> str:
    """Some characters of a text, from anywhere in it."""
    begin = drawn.randrange(max(1, len(text) - CHARACTERS))
    return text[begin : begin + CHARACTERS]


def grown(work: Path) -> None:
    """The encoder with control states: Parallel Control's and Mixture-of-Control's."""
    for name, more in (("parallel", {"top_k": 0, "alpha": 1.0}), ("mixture", {})):
        if not (work / name / "config.json").is_file():
            plan = {"surgeon": 1, "operations": [{"op": "mixture_of_control", "rank": RANK, **more}]}
            (work / f"{name}.yaml").write_text(yaml.safe_dump(plan), encoding="utf-8")
            surgeon.apply(work / f"{name}.yaml", str(work / "base"), work / name)


def trained(run: Run, work: Path) -> dict[str, Any]:
    """Train one run; its record."""
    model, options = METHODS[run.method]
    source = {"name": "task", "path": f"{run.task}.train.jsonl", "kind": "labels", "share": 1.0}
    config = work / "run.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "surgeon_train": 1,
                "steps": STEPS,
                "seed": run.seed,
                "batch": BATCH,
                "micro_batch": BATCH,
                "length": 2 * LENGTH,
                "validation_sequences": 10**6,
                "optimizer": {"lr": run.rate, "schedule": "linear", "warmup": 0.06, "weight_decay": 0.01},
                "sources": [source | {"validation": f"{run.task}.val.jsonl"}],
                **options,
            }
        ),
        encoding="utf-8",
    )
    target = work / "run"
    for left in (target, work / ".run.training"):
        shutil.rmtree(left, ignore_errors=True)
    begun = time.process_time()
    found = surgeon.train(work / model, config, target, device="cpu")
    assert found is not None
    record = {
        "task": run.task,
        "method": run.method,
        "rate": run.rate,
        "seed": run.seed,
        "accuracy": found.scores["task"]["accuracy"],
        "matthews": found.scores["task"].get("matthews"),
        "loss": found.losses["task"],
        "parameters": found.parameters,
        "seconds": time.process_time() - begun,
    }
    shutil.rmtree(target)
    return record


def write_page(work: Path) -> None:
    """The page of what there is."""
    records = [json.loads(file.read_text()) for file in sorted((work / "records").glob("*.json"))]
    masked = json.loads((work / "masked.json").read_text())
    lines = [
        "# Classifying texts: Mixture-of-Control's recipe beside others",
        "",
        "Written by `python -m benchmarks.glue`. A RoBERTa of"
        f" {SHAPE['num_hidden_layers']} layers of {SHAPE['hidden_size']}, trained here for {MASKED_STEPS:,} steps of"
        f" {MASKED_BATCH} × {LENGTH} tokens on masked words (loss {masked['first']:.2f} at first,"
        f" {masked['loss']:.2f} at the end: far from what real encoders know). Every run below: {STEPS} steps of"
        f" {BATCH} texts of at most {2 * LENGTH} tokens, float32, linear schedule, 6 % warm-up, weight decay 0.01, a"
        " new head drawn by the run's seed. Accuracy is on held-out files. The rate of each method is the best of those"
        " tried, by mean accuracy on the same held-out texts, so every row is a little optimistic, in the same way.",
        "",
    ]
    for task, (train, held) in TASKS.items():
        lines += [
            f"## {task}",
            "",
            f"{train} texts to train on, {held} held out.",
            "",
            "| method | trains | rate | accuracy by seed | mean | 95 % interval | other rates (mean accuracy) |",
            "|---|---|---|---|---|---|---|",
        ]
        for method in METHODS:
            mine = [found for found in records if (found["task"], found["method"]) == (task, method)]
            if not mine:
                lines.append(f"| {method} | | | not made | | | |")
                continue
            by_rate = {rate: [r["accuracy"] for r in mine if r["rate"] == rate] for rate in {r["rate"] for r in mine}}
            means = {rate: statistics.mean(found) for rate, found in by_rate.items()}
            best = max(means, key=lambda rate: (means[rate], -rate))
            half = interval(by_rate[best], held)
            others = ", ".join(f"{rate:g}: {means[rate]:.1%}" for rate in sorted(means) if rate != best)
            seeds = ", ".join(f"{value:.1%}" for value in by_rate[best])
            cells = [method, f"{mine[0]['parameters']:,}", f"{best:g}", seeds, f"{means[best]:.1%}", f"± {half:.1%}"]
            lines.append(f"| {' | '.join([*cells, others])} |")
        lines.append("")
    PAGE.write_text("\n".join(lines) + "\n" + reading(records) + "\n" + machine() + "\n", encoding="utf-8")


def interval(found: list[float], held: int) -> float:
    """Half of a 95 % interval: binomial over the texts for the mean of seeds that share them (normal approximation)."""
    mean = statistics.mean(found)
    return 1.96 * math.sqrt(mean * (1 - mean) / held)


def reading(records: list[dict[str, Any]]) -> str:
    """What the paper says, and by how much it is so here."""
    lines = [
        "## The paper's claim",
        "",
        "Table 2: on GLUE with RoBERTa-base Mixture-of-Control has 86.7 on average, LoRA 85.2, Parallel Control 85.1,"
        " DoRA 85.5 (medians of five runs, 25 to 80 epochs). Full fine-tuning and the head alone are not in the table.",
        "",
    ]
    wanted = "Mixture-of-Control"
    for task, (_, held) in TASKS.items():
        best: dict[str, float] = {}
        for method in METHODS:
            mine = [found for found in records if (found["task"], found["method"]) == (task, method)]
            means = [
                statistics.mean(r["accuracy"] for r in mine if r["rate"] == rate) for rate in {r["rate"] for r in mine}
            ]
            if means:
                best[method] = max(means)
        if wanted not in best:
            lines.append(f"- {task}: not measured yet.")
            continue
        said = []
        for method in ("LoRA", "Parallel Control", "full fine-tuning", "head alone"):
            if method in best:
                difference = best[wanted] - best[method]
                # Of two means on the same texts, as if these were different ones: the wider of the two intervals.
                half = 1.96 * math.sqrt(sum(best[m] * (1 - best[m]) / held for m in (wanted, method)))
                clear = "ahead" if difference > half else "behind" if difference < -half else "not told apart"
                said.append(f"{method} {difference:+.1%} ± {half:.1%} ({clear})")
        lines.append(f"- {task}: Mixture-of-Control minus " + ", ".join(said) + ".")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
