"""`surgeon learn`: look at base and text, remember, pilot, grow, train, blend, measure what was learned and kept.

Nothing here that other commands do not do: what is decided is written as a plan and a training file, and by hand the
same commands give the same bytes.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from rich.console import Group, RenderableType
from rich.text import Text

from surgeon import (
    Checkpoint,
    Evaluation,
    HeldOut,
    SourceScores,
    SourceSpec,
    TextSpec,
    Verification,
    apply,
    check_destination,
    encode_prompts,
    evaluate,
    evaluation_view,
    open_checkpoint,
    open_texts,
    read_prompts,
    recall,
    share_by_answers,
    train,
    verify,
    write_blend,
    written,
)
from surgeon.common.devices import fast_dtype
from surgeon.common.json_results import plain_fields
from surgeon.common.listener import Listener, Quiet
from surgeon.common.places import meant, named
from surgeon.common.signed import read_signed, write_signed
from surgeon.common.work_folders import write_durably
from surgeon.errors import BadInput, bad_input, printable

if TYPE_CHECKING:
    from surgeon import Trained

# The plan of each way (None: nothing grows), what trains, and the rates of the pilots.
_WAYS: Mapping[str, tuple[str | None, str, tuple[float, float]]] = {
    "layers": ("opt-deus", "last", (1e-3, 2e-3)),
    "most": (None, "all", (5e-5, 1e-4)),
    "exact": ("domain-gate/layers", "last", (1e-3, 2e-3)),
}
# The shares of a run's tokens that the base wrote: freely, and in answer to the shipped instructions.
_RECALLED, _ANSWERED = 0.15, 0.1
# Shares of the minutes: for each pilot, and for the run.
_PILOT, _RUN = 0.1, 0.4
# Tokens that the base writes freely for each minute, and the fewest; tokens of its answers to instructions (about 100).
_RECALL, _LEAST_RECALL, _ANSWERS = 250, 2000, 4000
# The longest of these texts, in tokens.
_WRITTEN = 128
_HELD_OUT = 0.1
_FEWEST_STEPS = 10
_MOST_MINUTES = 100_000
# How much held-out text models are measured on.
_MEASURED: Mapping[str, Any] = {"most": 16, "length": 256}
_SHOWN = 10
_LONGEST_SHOWN = 160
_LISTED = "`{surgeon_data: 1, sources: [{name: …, path: …, bad_rows: leave_out}]}`"
_SOURCES = f"a source with keys stands in a data file: --new DATA.yaml, which holds {_LISTED}"
NEW, OWN, TO_INSTRUCTIONS = "new", "own", "answers"
# What a call asks for, in words.
_ASKED = {"base": "the base", "way": "the way", "minutes": "--minutes", "seed": "--seed", "texts": "--new"}
_DECIDED, _RECORD = "decided.json", "learn.record"


@dataclass(frozen=True)
class Learned:
    """What `learn` made: the model at `path`, how, and what it learned and kept beside the base.

    `way` is layers, most or exact; `share` is the run's share in the blend with its base (1: no blend); `commands`
    make the same model by hand, in the folder `work`.
    """

    path: Path
    work: Path
    way: str
    rate: float
    pilots: dict[str, float]
    steps: int
    share: float
    seconds: float
    commands: tuple[str, ...]
    evaluation: Evaluation[SourceScores]
    verification: Verification

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `--json`.

        Keys:
            `path`, `work`: the model, and the folder with its plan, training file and recalled text
            `way`: layers, most or exact
            `rate`, `pilots`: the learning rate, and by rate the loss on new text after a pilot
            `steps`, `share`: steps of training, and the run's share in the blend with its base (1: no blend)
            `seconds`: of the whole call
            `commands`: what makes the same model by hand
            `evaluation`, `verification`: the keys of `evaluate` and of `verify`
        """
        return plain_fields(self)


def _shown(asked: Any) -> str:
    """Return a value that was asked for, for an error: numbers short, texts as NAME=FILE."""
    if isinstance(asked, Mapping):
        return ", ".join(printable(f"{name}={file}") for name, file in asked.items())
    return f"{asked:g}" if isinstance(asked, float) else printable(str(asked))


def learn(
    base: str | Path,
    *,
    new: Sequence[str | Path],
    to: str | Path,
    minutes: float = 10.0,
    most: bool = False,
    exact: bool = False,
    answers: str | Path = "shipped",
    seed: int = 0,
    device: str = "auto",
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> Learned:
    """Let a base learn new text and keep what it knows, and show both beside the base.

    The base writes text of its own, which is replayed with the base as the teacher (KL). Two pilots choose the rate.
    New layers, fused by optimal transport, learn; with `most`, all of the base; with `exact`, new layers behind a gate,
    which is closed for what the base knows. Where nothing is gated, the run is blended with its base until it keeps the
    base's answers, but not where all of an output of surgeon trained. The folder TO-learn has the plan, the training
    file and what was decided. The same call continues an interrupted one.

    Args:
        base: The model: a folder, or an output of surgeon for the next text.
        new: Texts to learn, each a file, NAME=FILE or a data file (.yaml, as of `evaluate`).
        to: The new folder.
        minutes: About how long pilots, training and recalled text may take; measuring answers comes on top.
        most: Train all of the base, in place of new layers.
        exact: Put the new layers behind a gate.
        answers: Prompts by which kept answers are measured (`read_prompts`).
        seed: Seed of new tensors, recalled text and training.
        device: Where models run.
        trust_remote_code: Run the base's own code.
        listener: Receives progress.

    Returns:
        What was made.

    Raises:
        BadInput: A text cannot be read or is none that the base has to learn, or as the commands do that are called.
    """
    begun = time.perf_counter()
    if most and exact:
        raise BadInput("--most trains all of the base, --exact only new layers behind a gate; give one of them")
    if not 0 < minutes <= _MOST_MINUTES:
        raise BadInput(f"--minutes {minutes:g}: must be more than 0, and at most {_MOST_MINUTES:,}")
    if not 0 <= seed < 2**32:
        # Of a training file, which would refuse it after the recall and the first pilot.
        raise BadInput(f"--seed {seed}: must be at least 0, and below {2**32:,}")
    way = "most" if most else "exact" if exact else "layers"
    target = Path(to)
    opened = open_checkpoint(base, trust_remote_code=trust_remote_code)
    check_destination(target, opened.path)
    texts = _texts(new, opened)
    encode_prompts(read_prompts(answers).prompts, opened)
    run = _Learning(opened, target, way, texts, minutes, seed, device, trust_remote_code, listener or Quiet())
    run.begin()
    run.say(f"{run.work} has the plan, the training file and what is decided; the same command continues")
    run.remember()
    run.check_is_new()
    grown = run.grow()
    decided = run.decide(grown)
    share = run.train(grown, decided)
    measured = evaluate([opened, target], run.work / "train.yaml", answers=answers, **_MEASURED, **run.measuring)
    return Learned(
        path=target,
        work=run.work,
        way=way,
        rate=decided["rate"],
        pilots=decided["pilots"],
        steps=decided["steps"],
        share=share,
        seconds=time.perf_counter() - begun,
        commands=run.commands(share),
        evaluation=measured,
        verification=verify(opened.path, target, logits=False, trust_remote_code=trust_remote_code),
    )


@dataclass(frozen=True)
class _Text:
    """A text to learn: its source of a training file, without shares, with an absolute path; and the opened text."""

    source: Mapping[str, Any]
    opened: HeldOut


def _texts(new: Sequence[str | Path], base: Checkpoint) -> dict[str, _Text]:
    """Open the texts to learn; return them by name.

    Raises BadInput without any, where two have one name, and for rows that the base cannot read.
    """
    found: dict[str, _Text] = {}
    for number, given in enumerate(new):
        name, file = named(given)
        path = Path(meant(file)).absolute()
        listed = name is None and path.suffix in (".yaml", ".yml")
        name = name or (NEW if len(new) == 1 else f"{NEW}{number + 1}")
        try:
            texts = open_texts(path if listed else {name: path})
            written(texts, [base])
        except BadInput as error:
            lines = str(error).split("\n")
            raise bad_input([*lines, _SOURCES] if not listed and "the source" in str(error) else lines) from None
        for text in texts:
            spec = text.documents.rows.spec
            if isinstance(spec, SourceSpec):
                raise BadInput(f"{printable(str(path))}: a training file; for --new write a data file: {_LISTED}")
            assert isinstance(spec, TextSpec)
            if spec.name in (*found, OWN, TO_INSTRUCTIONS):
                shown = printable(str(given))
                raise BadInput(f"--new {shown}: the name {spec.name} is taken; give another: NAME=FILE")
            place = spec.path if spec.repo_id else str(path.parent / meant(spec.path))
            found[spec.name] = _Text({**spec.model_dump(exclude_defaults=True), "path": place}, text)
    if not found:
        raise BadInput("nothing to learn: give a text (--new FILE)")
    return found


@dataclass(frozen=True)
class _Learning:
    """One call of `learn`; `work` is the folder beside the target that keeps what a call that is cut off has done."""

    base: Checkpoint
    target: Path
    way: str
    texts: Mapping[str, _Text]
    minutes: float
    seed: int
    device: str
    trust_remote_code: bool
    listener: Listener

    @property
    def work(self) -> Path:
        """The folder of the plan, the training file, recalled text and decisions."""
        return self.target.with_name(f"{self.target.name}-learn")

    @property
    def running(self) -> dict[str, Any]:
        """Arguments of every call that runs a model."""
        return {"device": self.device, "trust_remote_code": self.trust_remote_code, "listener": self.listener}

    @property
    def measuring(self) -> dict[str, Any]:
        """Arguments of every call that only runs a model: those of `running`, and a dtype that is fast here."""
        return {**self.running, "dtype": fast_dtype(self.device)}

    @property
    def chats(self) -> bool:
        """Whether the base answers instructions, by a chat template."""
        return bool(self.base.tokenizer().chat_template)

    @property
    def _written(self) -> int:
        """The longest text that the base writes, in tokens."""
        return min(_WRITTEN, self.base.context or _WRITTEN)

    def say(self, line: str) -> None:
        """Show a line."""
        self.listener.say(line)

    def remember(self) -> None:
        """Have the base write text of its own, and answers to shipped instructions where it has a chat template."""
        tokens = max(_LEAST_RECALL, round(_RECALL * self.minutes))
        self.say(f"the base writes {tokens:,} tokens of its own, to be replayed")
        settings: dict[str, Any] = {"seed": self.seed, "once": True, **self.measuring}
        recall(self.base.path, tokens=tokens, length=self._written, to=self.work / f"{OWN}.jsonl", **settings)
        if self.chats:
            self.say("it answers shipped instructions, to be replayed too")
            prompts = str(files("surgeon.data") / "instructions.jsonl")
            answered = self.work / f"{TO_INSTRUCTIONS}.jsonl"
            recall(self.base.path, tokens=_ANSWERS, length=self._written, prompts=prompts, to=answered, **settings)

    def check_is_new(self) -> None:
        """Raise BadInput where the base predicts a text to learn as well as the text that it wrote itself."""
        opened = [text.opened for text in self.texts.values()]
        found = evaluate(self.base, [*opened, f"{OWN}={self.work / OWN}.jsonl"], **_MEASURED, **self.measuring)
        bits = {cell.source: cell.bits_per_byte.value for cell in found.models[0].sources}
        for name, text in self.texts.items():
            self.say(f"{name}: costs the base {bits[name]:.2f} bits a byte, its own text {bits[OWN]:.2f}")
            if bits[name] <= bits[OWN]:
                raise BadInput(
                    f"{printable(text.source['path'])}: costs the base {bits[name]:.2f} bits a byte, no more than"
                    f" text of its own ({bits[OWN]:.2f}), so there is nothing to learn; give text that is new to it"
                )

    def grow(self) -> Path:
        """Grow the base by the way's plan, unless that was done; return the model to train."""
        plan = _WAYS[self.way][0]
        if plan is None:
            return self.base.path
        grown = self.work / "grown"
        if not grown.exists():
            self.say(f"growing it by the shipped plan {plan}")
            apply(plan, self.base.path, grown, overrides=[f"seed={self.seed}"], **self.running)
        return grown

    def decide(self, grown: Path) -> dict[str, Any]:
        """Choose rate, steps, batch and length by two pilots; write them, and the training file, to the work folder."""
        decided = self._recorded()
        if "steps" in decided:
            return decided
        pilots: dict[float, Trained] = {}
        length: dict[str, Any] = {"minutes": _PILOT * self.minutes}
        for rate in _WAYS[self.way][2]:
            self.say(f"a pilot of {_PILOT * self.minutes:.2g} minutes at the rate {rate:g}")
            self._write_config(rate, {**length, "validation_sequences": 16})
            pilot = self.work / "pilot"
            shutil.rmtree(pilot, ignore_errors=True)
            trained = train(grown, self.work / "train.yaml", pilot, **self.running)
            assert trained is not None, "learn is one process"
            pilots[rate] = trained
            # All pilots have the steps of the first.
            length = {key: trained.settings[key] for key in ("steps", "batch", "length")}
        shutil.rmtree(pilot)
        losses = {rate: sum(each.losses[name][1] for name in self.texts) for rate, each in pilots.items()}
        rate = min(losses, key=lambda each: losses[each])
        a_step = length["batch"] * length["length"]
        steps = round(_RUN * 60 * self.minutes * _speed(pilots[rate]) / a_step)
        if steps < _FEWEST_STEPS:
            needed = self.minutes * _FEWEST_STEPS / max(steps, 1)
            raise BadInput(
                f"--minutes {self.minutes:g}: has time for {steps} steps of {a_step:,} tokens here,"
                f" from which little is learned; give about {needed:.2g}"
            )
        decided |= {"rate": rate, "pilots": {f"{each:g}": loss for each, loss in losses.items()}, "steps": steps}
        self._write_config(rate, {**length, "steps": steps})
        self._record(decided)
        return decided

    def begin(self) -> None:
        """Begin or continue in the work folder.

        Raises BadInput where it is of a call with other texts or options, or where this user did not begin it here.
        """
        base = str(self.base.path.resolve())
        texts = {name: {**text.source} for name, text in self.texts.items()}
        asked = {"base": base, "way": self.way, "minutes": self.minutes, "seed": self.seed, "texts": texts}
        if not self.work.exists():
            self.work.mkdir()
            self._record({"asked": asked})
        before = self._recorded().get("asked") or {}
        if other := [key for key, value in asked.items() if before.get(key) != value]:
            said = "; ".join(f"{_ASKED[key]} {_shown(before.get(key))}, not {_shown(asked[key])}" for key in other)
            raise BadInput(f"{printable(str(self.work))}: is of a call with {said}; give the same again, or remove it")

    def _recorded(self) -> dict[str, Any]:
        """Return what was asked and decided. Raises BadInput where this user did not record it in this place."""
        try:
            found = read_signed(self.work / _RECORD)
        except ValueError:
            found = None
        if found is None or not found.here:
            raise BadInput(
                f"{printable(str(self.work))}: was not begun by this user in this place, so nothing in it is trusted;"
                " remove it"
            )
        recorded: dict[str, Any] = found.data
        return recorded

    def _record(self, decided: Mapping[str, Any]) -> None:
        """Write what was asked and decided: signed, and for people to read."""
        write_durably(self.work / _DECIDED, json.dumps(decided, indent=2) + "\n")
        write_signed(self.work / _RECORD, decided)

    def _write_config(self, rate: float, length: Mapping[str, Any]) -> None:
        """Write the training file; `length` has the keys of how long it trains."""
        gated, what = self.way == "exact", _WAYS[self.way][1]
        others = {OWN: _RECALLED, **({TO_INSTRUCTIONS: _ANSWERED} if self.chats else {})}
        # Behind a gate, what the base wrote fits the gate and is not replayed.
        shares = {name: 0.0 if gated else share for name, share in others.items()}
        new = (1 - sum(shares.values())) / len(self.texts)
        config = {
            "surgeon_train": 1,
            **length,
            "seed": self.seed,
            "what": what,
            "keep_base": what == "all",
            "optimizer": {"lr": rate},
            "recall_for_gate": 0,
            **({} if gated else {"preserve": {"loss": "kl"}}),
            "sources": [
                *({**text.source, "share": round(new, 6), "validation": _HELD_OUT} for text in self.texts.values()),
                *(
                    {"name": name, "path": f"{name}.jsonl", "share": share, "role": "original", "validation": _HELD_OUT}
                    for name, share in shares.items()
                ),
            ],
        }
        write_durably(self.work / "train.yaml", yaml.safe_dump(config, sort_keys=False, allow_unicode=True))

    def train(self, grown: Path, decided: Mapping[str, Any]) -> float:
        """Train, and publish the run or its blend with the base; return the run's share."""
        run = self.work / "run"
        if not run.exists():
            self.say(f"training: {decided['steps']:,} steps at the rate {decided['rate']:g}")
            train(grown, self.work / "train.yaml", run, **self.running)
        share = 1.0
        if self.way != "exact":
            self.say("choosing the run's share by answers to shipped instructions")
            share = share_by_answers(run, self.base.path, **self.measuring)
        if share < 1:
            write_blend(
                run,
                self.target,
                base=self.base.path,
                alpha=share,
                trust_remote_code=self.trust_remote_code,
                listener=self.listener,
            )
            shutil.rmtree(run)
        else:
            run.rename(self.target)
        # Made again by the plan, in the same bytes.
        shutil.rmtree(self.work / "grown", ignore_errors=True)
        return share

    def commands(self, share: float) -> tuple[str, ...]:
        """Return the commands that make the same model by hand, in the work folder."""
        base, plan = str(self.base.path.resolve()), _WAYS[self.way][0]
        grow = [] if plan is None else [f"surgeon apply {plan} {base} grown --set seed={self.seed}"]
        trained = "grown" if grow else base
        blend = [f"surgeon blend run blended --with {base} --alpha {share:g}"] * (share < 1)
        return (*grow, f"surgeon train {trained} train.yaml run", *blend)


def _speed(trained: Trained) -> float:
    """Return the tokens a second of a pilot."""
    assert trained.tokens_per_second is not None, "it has steps of its own"
    return trained.tokens_per_second


def learned_view(learned: Learned) -> RenderableType:
    """Return a text for the terminal: what was learned and kept, ten answers side by side, and how it was made."""
    kept = learned.evaluation.models[1].kept
    parts: list[RenderableType] = [
        evaluation_view(replace(learned.evaluation, notes=())),
        Text(),
    ]
    if kept is not None:
        step = max(1, len(kept.prompts) // _SHOWN)
        for prompt, base, own in list(zip(kept.prompts, kept.base_answers, kept.answers, strict=True))[::step][:_SHOWN]:
            texts = [printable(" ".join(each.text.split()), _LONGEST_SHOWN) for each in (base, own)]
            parts += [
                Text(printable(prompt), style="bold"),
                Text(f"  the base    {texts[0]}"),
                Text(f"  this model  {'the same' if texts[0] == texts[1] else texts[1]}"),
            ]
        parts += [Text()]
    holds = learned.verification.holds
    blended = "" if learned.share == 1 else f", {learned.share:g} of it and the rest of the base"
    parts += [
        Text(f"{learned.steps:,} steps at the rate {learned.rate:g}{blended}; {learned.seconds / 60:.1f} minutes"),
        Text(f"by hand, in {printable(str(learned.work))}:", style="dim"),
        *(Text(f"  {printable(command, 1000)}", style="dim") for command in learned.commands),
        Text(
            f"{printable(str(learned.path))} is complete; what it promises of the base {'holds' if holds else 'FAILS'}",
            style="bold green" if holds else "bold red",
        ),
    ]
    return Group(*parts)
