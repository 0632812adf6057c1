"""What ways of learning French keep of a real chat model's answers: SmolLM2-135M-Instruct, a row for each run.

    python -m benchmarks.real_model run --base DIR --new FILE --known NAME=FILE … --work DIR
                                        [--only NAME …] [--most N]
    python -m benchmarks.real_model page

BASE is a chat model without surgery.json (full fine-tuning of an output is not blended); FILE are JSON lines with
`text`. A call makes the rows that are missing, in an order in which every method has its first rate and seed before any
has its second, and may be stopped at any moment: a row is added to results/real_model.jsonl when its run is measured.
NAME is the beginning of a row's name (METHOD/REMEDY/RATE/SEED). Every run trains 40 steps of 4 × 128 tokens; those with
the remedy have a quarter of their tokens from the base (free chats, and answers to the shipped instructions), with the
base as the teacher (KL). Every run but the gate's is also measured half blended with the base.

Measured on held-out text: losses; KL(base ‖ run) on the base's answers to the shipped prompts, none of which trains;
and the shares of answers that are the base's. Differences between methods are paired by seed, at equal French.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import surgeon  # noqa: E402
from benchmarks.frontier import interval, table  # noqa: E402
from surgeon.common.devices import fast_dtype  # noqa: E402
from surgeon.common.listener import Quiet  # noqa: E402
from surgeon.lab.evaluation.results import ModelScores, SourceScores  # noqa: E402
from surgeon.lab.studies import frontier  # noqa: E402

PAGE = ROOT / "benchmarks" / "results" / "real_model.md"
RECORD = PAGE.with_suffix(".jsonl")
STEPS, BATCH, LENGTH = 40, 4, 128
BLENDS = (0.5,)
SEEDS = (0, 1, 2)
# Held-out documents of each text, and of the new text for a study.
DOCUMENTS = 8
NEW = "french"
# Of everything that is measured or written: the checkpoint's, or float32 on CPUs without products of bfloat16.
DTYPE = fast_dtype("auto")


class Method(NamedTuple):
    """A way of learning: its label, the plan it grows by (None: none), what else its config has, its rates."""

    label: str
    plan: str | None
    config: dict[str, Any]
    rates: tuple[float, ...]
    gated: bool = False


METHODS = {
    "full": Method("full fine-tuning", None, {"what": "all"}, (5e-5, 1e-4, 2e-4)),
    "opt-deus": Method("fused layers (OpT-DeUS)", "opt-deus", {}, (1e-3, 2e-3)),
    "llama-pro": Method("copied layers (LLaMA PRO)", "llama-pro", {}, (5e-4, 1e-3, 2e-3)),
    "lora": Method("LoRA, rank 16", None, {"lora": {"rank": 16}}, (3e-4, 1e-3)),
    "neutral-residues": Method("Neutral Residues", "neutral-residues", {}, (5e-3, 1.5e-2)),
    "control-llm": Method("Control LLM", "control-llm", {}, (3e-4, 1e-3)),
    "mixture-of-control": Method("Mixture-of-Control", "mixture-of-control", {}, (1e-3, 5e-3)),
    "pmoe": Method("PMoE", "pmoe", {}, (1e-3, 3e-3)),
    "gate": Method("new layers behind a gate", "domain-gate/layers", {}, (1e-3, 2e-3), gated=True),
}
NONE, REMEDY = "none", "recalled + KL"


class Run(NamedTuple):
    """One run: a method, a remedy, a rate and a seed."""

    method: str
    remedy: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        """The name of its row."""
        return f"{self.method}/{self.remedy}/{self.rate:g}/{self.seed}"


def wanted() -> Iterator[Run]:
    """Yield all runs, those first that say most: with the remedy before without, seeds and rates in turns."""
    for seed in SEEDS:
        for remedy in (REMEDY, NONE):
            for place in range(max(len(method.rates) for method in METHODS.values())):
                for name, method in METHODS.items():
                    # A gate keeps what it is closed for, so nothing is replayed behind it.
                    fits = remedy == (NONE if method.gated else remedy)
                    if place < len(method.rates) and fits:
                        yield Run(name, remedy, method.rates[place], seed)


def config_of(run: Run, new: Path, work: Path) -> dict[str, Any]:
    """Return the training config of a run."""
    method = METHODS[run.method]
    shares = {"own": 0.15, "answers": 0.1} if run.remedy == REMEDY else {"own": 0.0, "answers": 0.0}
    sources: list[dict[str, Any]] = [
        {"name": NEW, "path": str(new), "share": 1 - sum(shares.values()), "validation": 0.1},
        *(
            {"name": name, "path": f"{name}.jsonl", "share": share, "role": "original", "validation": 0.1}
            for name, share in shares.items()
        ),
    ]
    return {
        "surgeon_train": 1,
        "steps": STEPS,
        "batch": BATCH,
        "length": LENGTH,
        "seed": run.seed,
        "validation_sequences": 1,
        "recall_for_gate": 0,
        "optimizer": {"lr": run.rate, "warmup": 0.1},
        **method.config,
        **({"preserve": {"loss": "kl"}} if run.remedy == REMEDY else {}),
        "sources": sources,
    }


def measured(base: Path, models: Sequence[Path], texts: Sequence[str]) -> list[dict[str, Any]]:
    """Return each model's losses on every text, and what it keeps of the base's answers, prompt by prompt."""
    found = surgeon.evaluate([base, *models], texts, answers="shipped", most=DOCUMENTS, length=256, dtype=DTYPE)
    of_base = {cell.source: cell.loss.value for cell in found.models[0].sources}
    return [figures(each, of_base) for each in found.models[1:]]


def figures(model: ModelScores[SourceScores], of_base: dict[str, float]) -> dict[str, Any]:
    """Return the figures of one model, beside the base's losses."""
    assert model.kept is not None and model.kept.apart is not None
    pairs = zip(model.kept.base_answers, model.kept.answers, strict=True)
    return {
        "losses": {cell.source: cell.loss.value for cell in model.sources},
        "base": of_base,
        "kept": model.kept.to_json(),
        "nats": [round(each, 5) for each in model.kept.apart.nats.tolist()],
        "tokens": model.kept.apart.tokens.tolist(),
        "same": [int(own.text == base.text) for base, own in pairs],
    }


def carry_out(run: Run, base: Path, new: Path, known: dict[str, str], work: Path) -> dict[str, Any]:
    """Make one run and its blends, and return its row."""
    method, folder = METHODS[run.method], work / "run"
    for each in (folder, work / "grown", *work.glob("blend-*")):
        shutil.rmtree(each, ignore_errors=True)
    out = base
    if method.plan is not None:
        out = surgeon.apply(method.plan, base, work / "grown", overrides=[f"seed={run.seed}"], listener=Quiet()).path
    config = work / "train.yaml"
    config.write_text(yaml.safe_dump(config_of(run, new, work)), encoding="utf-8")
    trained = surgeon.train(out, config, folder, listener=Quiet())
    assert trained is not None
    held = work / "held.yaml"
    sources = [{"name": NEW, "path": str(new), "share": 1.0, "validation": 0.1}]
    held.write_text(yaml.safe_dump({"surgeon_train": 1, "steps": 1, "sources": sources}), encoding="utf-8")
    texts = [str(held), *(f"{name}={path}" for name, path in known.items())]
    row: dict[str, Any] = {"run": run._asdict(), "dtype": DTYPE, "parameters": trained.parameters}
    row["seconds"] = round(trained.seconds, 1)
    blends: dict[str, Path] = {}
    for share in () if method.gated else BLENDS:
        try:
            surgeon.write_blend(folder, work / f"blend-{share:g}", base=base, alpha=share)
        except surgeon.BadInput as error:
            row["unblended"] = str(error)
            break
        blends[f"{share:g}"] = work / f"blend-{share:g}"
    own, *blended = measured(base, [folder, *blends.values()], texts)
    return row | own | {"blended": dict(zip(blends, blended, strict=True))}


def rows() -> list[dict[str, Any]]:
    """Return the committed rows."""
    if not RECORD.exists():
        return []
    return [json.loads(line) for line in RECORD.read_text(encoding="utf-8").splitlines()]


def make(base: Path, new: Path, known: dict[str, str], work: Path, *, only: Sequence[str], most: int) -> None:
    """Make up to `most` rows that are missing."""
    work.mkdir(parents=True, exist_ok=True)
    instructions = str(files("surgeon.data") / "instructions.jsonl")
    surgeon.recall(base, tokens=8000, length=256, to=work / "own.jsonl", once=True, dtype=DTYPE)
    answers = work / "answers.jsonl"
    surgeon.recall(base, tokens=4000, length=128, prompts=instructions, to=answers, once=True, dtype=DTYPE)
    there = {Run(**row["run"]).name for row in rows()}
    missing = [run for run in wanted() if run.name not in there and run.name.startswith(tuple(only) or "")]
    for run in missing[:most]:
        row = carry_out(run, base, new, known, work)
        with RECORD.open("a", encoding="utf-8") as record:
            record.write(json.dumps(row) + "\n")
        kept = row["kept"]
        print(
            f"{run.name}: French {row['losses'][NEW] - row['base'][NEW]:+.3f}, KL {kept['kl']['value']:.4f},"
            f" same {kept['same']['value']:.0%}, {row['seconds']:.0f} s",
            flush=True,
        )


def over_seeds(values: Sequence[float]) -> str:
    """Return the mean of a value for each seed, with its interval where there are three seeds."""
    found = frontier.interval(values)
    return interval(None if found is None else {"mean": found.mean, "half": found.half})


def runs_of(found: Sequence[dict[str, Any]], method: str, remedy: str, seed: int) -> list[dict[str, Any]]:
    """Return the rows of a method's runs of one seed."""
    run = {"method": method, "remedy": remedy, "seed": seed}
    return [row for row in found if run.items() <= row["run"].items()]


def points(rows: Sequence[dict[str, Any]], *, blended: bool) -> list[tuple[float, float]]:
    """Return (change of French loss, KL on answers) of runs, and where `blended` of their blends."""
    measured = [each for row in rows for each in (row, *(row["blended"].values() if blended else ()))]
    return [(each["losses"][NEW] - each["base"][NEW], each["kept"]["kl"]["value"]) for each in measured]


def paired(found: Sequence[dict[str, Any]], method: str, remedy: str) -> list[tuple[float, frontier.Pair]]:
    """Return (how much more a method moves answers than full fine-tuning with the remedy, the common range of French).

    One for each seed for which both have runs that cover some of the same French.
    """
    apart = []
    for seed in SEEDS:
        both = [runs_of(found, name, given, seed) for name, given in ((method, remedy), ("full", REMEDY))]
        # Blends of one method beside runs of another would differ in two things.
        blended = all(rows and all(row["blended"] for row in rows) for rows in both)
        mine, full = (frontier.envelope(points(rows, blended=blended)) for rows in both)
        difference, shared = frontier.difference(mine, full), frontier.common_range(mine, full)
        if difference is not None and shared is not None:
            apart.append((difference, shared))
    return apart


def differences(found: Sequence[dict[str, Any]], method: str, remedy: str) -> list[float]:
    """Return the differences of `paired` alone."""
    return [difference for difference, _ in paired(found, method, remedy)]


def beside(found: Sequence[dict[str, Any]], method: str, remedy: str) -> list[str]:
    """Return a row of the table at equal French; its range is the mean over seeds."""
    apart = paired(found, method, remedy)
    result = frontier.interval([difference for difference, _ in apart])
    shown = "" if result is None else interval({"mean": result.mean, "half": result.half}, signed=True)
    ends = [sum(shared[end] for _, shared in apart) / len(apart) for end in (1, 0)] if apart else []
    return [METHODS[method].label, remedy, str(len(apart)), " to ".join(f"{end:.2f}" for end in ends), shown]


def summary(found: Sequence[dict[str, Any]]) -> list[str]:
    """Return the table of all runs and blends: a line for each method, remedy, rate and share, over its seeds."""
    groups: dict[tuple[str, str, float, str], list[dict[str, Any]]] = {}
    for row in found:
        run = Run(**row["run"])
        groups.setdefault((run.method, run.remedy, run.rate, ""), []).append(row)
        for share, blended in row["blended"].items():
            groups.setdefault((run.method, run.remedy, run.rate, share), []).append(blended)
    known = [name for name in found[0]["losses"] if name != NEW]
    cells = []
    for (method, remedy, rate, share), each in sorted(groups.items(), key=lambda group: (group[0][0], group[0][1:])):
        changes = [[one["losses"][name] - one["base"][name] for one in each] for name in (NEW, *known)]
        kept = [[one["kept"][key]["value"] for one in each] for key in ("kl", "prefix", "same")]
        label = METHODS[method].label + (f", {share} of it" if share else "")
        cells.append([label, remedy, f"{rate:g}", str(len(each)), *map(over_seeds, (changes[0], *kept, *changes[1:]))])
    return table(["method", "with", "rate", "seeds", "French", "KL on answers", "prefix", "same", *known], cells, 2)


def equal_french(found: Sequence[dict[str, Any]]) -> list[str]:
    """Return the table of every method beside full fine-tuning with the remedy, at equal French."""
    pairs = dict.fromkeys((row["run"]["method"], row["run"]["remedy"]) for row in found)
    compared = [beside(found, *pair) for pair in pairs if pair != ("full", REMEDY)]
    return table(["method", "with", "seeds", "French", "KL on answers"], compared, 2)


def conclusion(found: Sequence[dict[str, Any]]) -> str:
    """Return what the rows allow to conclude: of each method with the remedy and three seeds, at equal French."""
    said = []
    for method in dict.fromkeys(row["run"]["method"] for row in found):
        apart = frontier.interval(differences(found, method, REMEDY)) if method != "full" else None
        if apart is None or apart.half is None:
            continue
        low, high = apart.mean - apart.half, apart.mean + apart.half
        verdict = "moved answers less" if high < 0 else "moved answers more" if low > 0 else "not shown to differ"
        said.append(f"{METHODS[method].label} {verdict} ({apart.mean:+.3f} [{low:+.3f}, {high:+.3f}] nats a token)")
    if not said:
        return "Nothing can be concluded yet: no method has three seeds beside full fine-tuning's."
    return f"At equal French, over three seeds, beside full fine-tuning with the same remedy: {'; '.join(said)}."


def write_page() -> None:
    """Write the page from the committed rows."""
    found = rows()
    lines = [
        f"# {__doc__.splitlines()[0]}",
        "",
        conclusion(found),
        f"One chat model, one text, {STEPS} steps of {BATCH} × {LENGTH} tokens, at the rates of the table alone.",
        "",
        "Losses are changes from the base, in nats a token; prefix is the share of an answer before the first"
        " difference.",
        "Intervals are over seeds (95 %); without one there are fewer than three.",
        "",
        *summary(found),
        "",
        "## At equal French, beside full fine-tuning with the same remedy",
        "",
        "The difference of KL on answers, averaged over the range of French loss that both methods' runs and blends"
        " cover; below 0 the method keeps answers better.",
        "",
        *equal_french(found),
    ]
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--base", type=Path, required=True)
    running.add_argument("--new", type=Path, required=True)
    running.add_argument("--known", action="append", default=[])
    running.add_argument("--work", type=Path, required=True)
    running.add_argument("--only", nargs="*", default=[])
    running.add_argument("--most", type=int, default=10_000)
    commands.add_parser("page")
    given = parser.parse_args()
    if given.command == "run":
        named = dict(each.split("=", 1) for each in given.known)
        make(given.base, given.new.resolve(), named, given.work, only=given.only, most=given.most)
    else:
        write_page()
