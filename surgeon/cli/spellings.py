"""The names of commands' options, and their help texts."""

from __future__ import annotations

import re
from pathlib import Path

from surgeon.cli.options import Spelling
from surgeon.common.places import meant
from surgeon.errors import BadInput, printable


def _complete_plan(incomplete: str) -> list[str]:
    """Return completions: shipped plans, and files and folders that begin with the typed text."""
    typed = Path(incomplete)
    folder, start = (typed, "") if incomplete.endswith("/") else (typed.parent, typed.name)
    beside = sorted(folder.glob("*")) if incomplete and folder.is_dir() else []
    files = [f"{path}/" if path.is_dir() else str(path) for path in beside if path.name.startswith(start)]
    return [*complete_shipped(incomplete), *files]


def complete_shipped(incomplete: str) -> list[str]:
    """Return completions: shipped plans."""
    from surgeon.plan import shipped

    return [name for name in shipped.shipped_plans() if name.startswith(incomplete)]


def _named_texts(given: list[str]) -> dict[str, Path | None]:
    """Return the files of `--text NAME=FILE` by name. Raises BadInput for another form, or a repeated name."""
    named: dict[str, Path | None] = {}
    for entry in given:
        name, equals, file = entry.partition("=")
        if not (name and equals and file):
            raise BadInput(f"--text {printable(entry)}: give a name and a file, as in --text french=fr.txt")
        if name in named:
            raise BadInput(f"--text {printable(entry)}: the name {printable(name)} is given twice")
        named[name] = Path(meant(file))
    return named


def _count(text: str) -> int:
    """Return a number of tokens such as 200000, 200k or 1.5M as an int. Raises BadInput for anything else."""
    found = re.fullmatch(r"([0-9][0-9_,]*(?:\.[0-9]+)?)([kKmM]?)", text)
    number = float(re.sub("[_,]", "", found[1])) * {"": 1, "k": 10**3, "m": 10**6}[found[2].lower()] if found else 0
    if not found or number < 1 or number != int(number):
        raise BadInput(f"--tokens {printable(text)}: give a whole number, such as 200000, 200k or 1.5M")
    return int(number)


def _bytes(text: str) -> int:
    """Return a size such as 500MB or 2GB in bytes. Raises BadInput for anything else."""
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "B": 1}
    for unit, factor in units.items():
        if text.upper().endswith(unit):
            number = text[: -len(unit)].strip()
            if number.replace(".", "", 1).isdigit() and float(number) > 0:
                return max(1, int(float(number) * factor))
    raise BadInput(f"--max-shard-size {printable(text)}: give a size such as 500MB or 2GB")


_S = Spelling
_DTYPES = "in auto (the checkpoint's), float32, bfloat16 or float16"
# Keyed by parameter, or by command and parameter where a command gives the parameter another meaning.
SPELLINGS = {
    "plan": _S("plan file, name of a shipped plan, or - for stdin", "PLAN", kind=str, complete=_complete_plan),
    "base": _S("base checkpoint: a folder, or user/name[@revision] on the Hub", "BASE", kind=str),
    "out": _S("folder of the output", "OUT"),
    "overrides": _S(
        "a value in place of the plan's: seed=1, operations.0.init.reg=0.1; may be given again", "KEY=VALUE", "--set"
    ),
    "revision": _S("Hub revision (branch, tag or commit) of the base"),
    "device": _S("auto, cpu, cuda, cuda:N"),
    "link": _S("hard-link shards that stay as they are; both names are read-only then"),
    "take_over": _S("go on with a work folder that you did not begin in this place (a copy, an archive)"),
    "trust_remote_code": _S("run and carry a base's own code (its auto_map)"),
    "text": _S("take tokens from this text or JSON-lines file"),
    "texts": _S(
        "NAME=FILE: a domain and its text, to run the output on; repeatable",
        option="--text",
        convert=_named_texts,
    ),
    "window": _S("tokens in each sequence", least=2),
    "windows": _S("sequences from each text; 0 takes the whole text", least=0),
    "dtype": _S(f"run the model {_DTYPES}"),
    "report.windows": _S("sequences from each text (for losses: documents); 0 takes the whole text", least=0),
    "apply.device": _S("device that computes new weights: auto, cpu, cuda, cuda:N"),
    "apply.max_shard_bytes": _S(
        "largest shard of new tensors, cut between layers",
        option="--max-shard-size",
        kind=str,
        convert=_bytes,
        default="2GB",
    ),
    "apply.read_back": _S("read the output again and compare it with the base", option="--read-back/--no-read-back"),
    "verify.out": _S("the output: a folder, or user/name[@revision] on the Hub", "OUT", kind=str),
    "verify.logits": _S("bytes only, run no model", option="--static", off=True),
    "verify.streamed": _S("hold one layer of each model at a time"),
    "verify.dtypes": _S(f"run the models {_DTYPES}; may be given again", option="--dtype"),
    "verify.adapters": _S(
        "compare with BASE and this merged adapter, as PEFT runs them; may be given again", option="--adapter"
    ),
    "train.out": _S("folder of the output, or of a base of any kind", "OUT"),
    "train.config": _S("training file: data, steps, optimizer", "TRAIN.YAML", kind=Path),
    "train.to": _S("folder of the trained output", "RUN"),
    "train.overrides": _S(
        "a value in place of the config's: optimizer.lr=1e-4, sources.NAME.share=0.5; may be given again",
        "KEY=VALUE",
        "--set",
    ),
    "train.device": _S("auto, cpu, cuda"),
    "learn.to": _S("folder of the model; TO-learn has its plan, training file and recalled text", "RUN", "--to"),
    "learn.new": _S("text to learn: FILE, NAME=FILE or a data file (.yaml); may be given again"),
    "learn.minutes": _S("about how long it learns; measuring answers comes on top"),
    "learn.most": _S("train all of the base, which learns most"),
    "learn.exact": _S("put the new layers behind a gate, which is closed for what the base knows"),
    "learn.seed": _S("seed of new tensors, recalled text and training", least=0),
    "learn.answers": _S("measure kept answers by these prompts: shipped, or a file", "FILE"),
    "recall.tokens": _S("tokens to write, at least: 200000, 200k, 1.5M", "N", kind=str, convert=_count),
    "recall.to": _S("file of JSON lines, for a source of `train`; with fewer tokens it is continued", "FILE"),
    "recall.prompts": _S(
        "begin (the begin-of-text token), template (the bare chat template), or a file with a prompt a line, to answer"
        " by a template, else to continue  [default: template where BASE has one, else begin]"
    ),
    "recall.temperature": _S("temperature of the draws; default: 0.7 by a chat template, else 1"),
    "recall.top_p": _S("draw among the likeliest tokens of this share; default: 0.9 by a chat template, else 1"),
    "recall.length": _S("longest document in tokens; default: 512"),
    "recall.once": _S(
        "FILE may be there with enough tokens, if BASE wrote it by these settings, here: nothing is done"
    ),
    "recall.batch": _S("documents at a time"),
    "recall.seed": _S("seed of the draws", least=0),
    "evaluate.models": _S("folders or Hub ids (user/name[@revision])", "MODEL…"),
    "evaluate.data": _S(
        "text file or folder, NAME=FILE, a data file (.yaml), or a training config; may be given again",
        "DATA",
        "--data",
    ),
    "evaluate.base": _S(
        "the base, a folder or a Hub id; it is the first row, and others are compared with it", kind=str
    ),
    "evaluate.answers": _S("compare answers with the first model's: shipped (prompts), or a file of prompts", "FILE"),
    "evaluate.prompts": _S("have each model answer this, greedily; may be given again", "TEXT", "--prompt"),
    "evaluate.answer_tokens": _S("most new tokens of an answer", least=1),
    "evaluate.sources": _S("evaluate on this source only; may be given again", option="--source"),
    "evaluate.length": _S("tokens in a window; default: the smallest context, at most 2048", least=2),
    "evaluate.batch": _S("windows at a time", least=1),
    "evaluate.most": _S("documents of each source; 0 takes all", least=0),
    "evaluate.kl": _S("measure KL(first ‖ model) too: how far each is from the first, with both in memory"),
    "evaluate.dtype": _S(f"run the models {_DTYPES}"),
    "evaluate.labels": _S("the texts have labels, and the models a classification head"),
    "continual.tasks": _S("tasks file, or name of a shipped one (`surgeon plans`)", "TASKS", kind=str),
    "continual.run": _S("folder of the model after the last task; of a file with rows, of a run for each", "RUN"),
    "continual.overrides": _S(
        "a value in place of the file's: train.steps=10; may be given again", "KEY=VALUE", "--set"
    ),
    "continual.texts": _S("NAME=FILE: the text of a source; may be given again", option="--text", convert=_named_texts),
    "continual.row": _S("run this row alone", "NAME"),
    "continual.keep": _S("keep the earlier tasks' models, in RUN-tasks"),
    "continual.device": _S("auto, cpu, cuda"),
    "compare.study": _S("study file, or name of a shipped study", "STUDY", kind=str),
    "compare.overrides": _S(
        "a value in place of the study's: steps=100, documents=8; may be given again", "KEY=VALUE", "--set"
    ),
    "compare.results": _S("folder of the page and the records", "RESULTS"),
    "compare.new": _S("text to learn: FILE or NAME=FILE; may be given again"),
    "compare.original": _S("text of what must not be forgotten; without it, the base writes some"),
    "compare.replayed": _S("text to replay where a remedy says `text`; default: the original"),
    "compare.minutes": _S("leave out what does not fit, for all rows alike: seeds first, then rates at the ends"),
    "compare.jobs": _S("runs at a time; default: as cores, memory, GPUs allow"),
    "compare.keep": _S("keep every trained model, in RESULTS/runs"),
    "compare.device": _S("auto, cpu, cuda"),
    "blend.run": _S("a run of `surgeon train`", "RUN"),
    "blend.dest": _S("folder of the blend", "DEST"),
    "blend.base": _S("the model that RUN's last surgery or a training began with: a folder", option="--with"),
    "blend.alpha": _S("share of RUN; 1: RUN, 0: the base; default: chosen by answers", least=0, most=1),
    "blend.alpha_top": _S("its share in the highest layer, linear between (LiNeS)", least=0, most=1),
    "blend.data": _S("measure base, RUN and blend on this text: FILE or NAME=FILE; may be given again"),
    "merge.dest": _S("folder of the merged model", "DEST"),
    "merge.merged": _S("folder of the merged model, where OUT is a base and DEST a PEFT adapter", "MERGED"),
    "merge.alpha": _S("share of the expanded branch; default: the one at inference", least=0, most=1),
    "revert.dest": _S("folder of the earlier state", "DEST"),
    "revert.to": _S("keep the first N surgeries; default: all but the last", "N"),
    "revert.base": _S("the folder of that state: read, and refused where OUT says another of it"),
    "revert.base_digest": _S("the state's digest, as `apply` showed it for its base; refuse any other", "HEX"),
    "delta.dest": _S("folder of the delta", "DEST"),
    "delta.base": _S("the base: the delta then includes side files that differ from the base's"),
    "export-slot.slot": _S("the slot's number, as `surgeon inspect` shows it", "SLOT", least=0),
    "export-slot.dest": _S("folder of the adapter", "DEST"),
    "gguf.file": _S("new file; its name, without the type, is the model's", "FILE", kind=Path),
    "gguf.type": _S("type of matrices: bf16, q8_0, f16, f32"),
    "gguf.converter": _S(
        "checkout of llama.cpp, or its convert_hf_to_gguf.py, which runs; default: the one on the PATH", kind=Path
    ),
    "gguf.base": _S("base whose tokenizer names the pre-tokenizer of a changed vocabulary", kind=str),
    "push.repo_id": _S("repository of the Hub: user/name", "REPO"),
    "push.base": _S("verify against this base first, logits included; default: the one that OUT names"),
    "push.public": _S("who may see the repository, if it is new  [default: private]", option="--public/--private"),
    "push.revision": _S("branch to push to, created at need; default: main"),
    "push.pull_request": _S("open a pull request instead of committing", option="--pr"),
    "push.dry_run": _S("show what would be uploaded and how much is new"),
    "push.force": _S("push although a check fails, or over a model that is not surgeon's"),
    "push.license": _S("licence for the card, where the base's is unknown: apache-2.0, mit, …"),
    "push.base_model": _S("the base's id on the Hub for the card, where it was a folder: user/name"),
    "diff.a": _S("a checkpoint's folder", "A"),
    "diff.b": _S("another checkpoint's folder", "B"),
    "diff.exact": _S("read both, even where a manifest records one of them"),
    "routing-report.to": _S("write the record to this JSON file"),
    "report.html": _S("write the page to this file (default: OUT's name with .html)"),
    "report.base": _S("the base's folder: run the static proof against it"),
    "report.logits": _S("with --base: compare logits too", option="--verify"),
    "inspect.checkpoint": _S("a checkpoint: a folder, or user/name[@revision] on the Hub", "CHECKPOINT", kind=str),
    "families.base": _S(
        "base checkpoint: a folder, or user/name[@revision] on the Hub; default: none", "BASE", kind=str
    ),
}
