"""A study under way: texts and base are read, the base writes and is measured, and the runs are dealt out to workers.

In RESULTS/work lie what the base wrote, and grown models and runs while they are needed; the record of a finished run
is written when it is done and never changed (records.py). The same command always knows what is left to do.

What its numbers depend on are digests: what is made under another one is no part of it. Where files lie makes no
difference, so that a study may move with its texts.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from surgeon import Checkpoint, __version__, check_training, load_config, text_files
from surgeon.common.listener import Listener
from surgeon.common.schema import BEGIN, TEMPLATE
from surgeon.common.work_folders import write_durably
from surgeon.errors import BadInput, bad_input, printable
from surgeon.lab.studies.analysis import find
from surgeon.lab.studies.budget import SECONDS_FILE, Budget, earlier_seconds, left_out
from surgeon.lab.studies.config.entries import Remedy
from surgeon.lab.studies.config.loading import GROUPS, LoadedStudy
from surgeon.lab.studies.config.settings import (
    RECALLED,
    measured_names,
    recalled_by,
    sources,
    training_config,
)
from surgeon.lab.studies.findings import Findings
from surgeon.lab.studies.frontier import Pair
from surgeon.lab.studies.records import BASE, Record, Records, digest, losses_of
from surgeon.lab.studies.schedule import Run, rounds_left, runs_left, sizes_left
from surgeon.lab.studies.workers import Answer, Task, Workers

# What the base wrote, as training configs in their folder name it.
_MEMORY = f"../{RECALLED}.jsonl"


@dataclass(frozen=True)
class Request:
    """What a study is to do on the opened base.

    With `take_over` what lies in `work` is gone on with although it came from elsewhere.
    """

    loaded: LoadedStudy
    base: Checkpoint
    work: Path
    kept: Path | None
    device: str
    trust_remote_code: bool
    minutes: float | None
    listener: Listener
    take_over: bool = False


@dataclass
class Course:
    """A study under way, and what it has found."""

    request: Request
    records: Records
    common: str
    budget: Budget
    found: dict[Run, Record] = field(default_factory=dict)
    grown: set[tuple[str, int]] = field(default_factory=set)
    growing: set[tuple[str, int]] = field(default_factory=set)
    busy: set[Run] = field(default_factory=set)

    @classmethod
    def open(cls, request: Request) -> Course:
        """Read what is there. Raises BadInput where it is another study's, or what a run asks for is refused."""
        common = study_digest(request.loaded, request.base, request.listener)
        course = cls(
            request,
            Records(request.work, request.take_over, request.listener.say),
            common,
            Budget(request.minutes, earlier_seconds(request.work)),
        )
        course.records.check_study(common)
        # What a killed call left: whole or not, it is made again.
        for name in ("runs", "grown"):
            shutil.rmtree(request.work / name, ignore_errors=True)
            (request.work / name).mkdir()
        (request.work / "configs").mkdir(exist_ok=True)
        course._check_configs()
        course._read()
        return course

    @property
    def memory(self) -> Path:
        """The file of what the base wrote."""
        return self.request.work / f"{RECALLED}.jsonl"

    def _check_configs(self) -> None:
        """Raise BadInput for training configs that `surgeon train` would refuse, of whatever method."""
        wrong: list[str] = []
        study, base = self.request.loaded.config, self.request.base
        for method, remedy in study.entries:
            run = Run(method.called, remedy.name, study.rates_of(method, remedy)[0], 0)
            try:
                config = load_config(path := self._config(run))
                if method.plan is None:
                    check_training(base, config)
            except BadInput as error:
                # The config is a file of this study's own, which its user has not written.
                why = re.sub(rf"^{re.escape(printable(str(path)))}(:\d+)?: ", "", str(error))
                wrong.append(f"{self.request.loaded.shown}: method {method.called}: {why}")
        if wrong:
            raise bad_input(wrong)

    def _read(self) -> int:
        """Take in the records that are there, as far as this study asks for them; return how many."""
        before = len(self.found)
        get = self.records.get
        while new := {run: found for run in self._runs_left() if (found := get(run.key, self._print(run))) is not None}:
            self.found |= new
        return len(self.found) - before

    def _runs_left(self) -> list[Run]:
        return list(runs_left(self.request.loaded.config, self._losses()))

    def _losses(self) -> dict[Run, Pair]:
        return {run: losses_of(record, self.names, by_byte=False) for run, record in self.found.items()}

    @property
    def names(self) -> tuple[list[str], list[str]]:
        """The names of the texts that losses are measured on."""
        return measured_names(self.request.loaded)

    @property
    def begun(self) -> bool:
        """Whether there is something to show: the base was measured."""
        return BASE in self.records.found

    @property
    def start(self) -> Record:
        """The base's own losses."""
        return self.records.found[BASE]

    def findings(self) -> Findings:
        """What is found so far; the base is measured."""
        return find(self.request.loaded, self.request.base.id, self.start, self.found, self.names)

    def carry_out(self, workers: Workers) -> None:
        """Make every run that is left, or as many as there is time for. Raises BadInput, and what `train` raises."""
        self._begin(workers)
        say, budget = self.request.listener.say, self.budget
        if self.found:
            say(f"continuing after {len(self.found)} finished runs")
        if left := self._runs_left():
            budget.check()
            say(f"{len(left)} runs to make at least; each is a line here once it is measured")
        self.request.listener.begin("runs", len(self.found) + len(left), "runs")
        self.request.listener.advance(len(self.found))
        while True:
            while workers.free and (task := self._next()) is not None:
                workers.begin(task)
            if not self.busy and not self.growing:
                break
            budget.at_once = max(budget.at_once, len(self.busy))
            first = not budget.made
            self._done(*workers.wait())
            if first and budget.made and (sizes := self._sizes_left()):
                say(budget.expected(sizes, len(self._waiting())))
        if budget.minutes is not None and (sizes := self._sizes_left()):
            say(f"--minutes {budget.minutes:g}: left out: {left_out(sizes)}; the same command without it goes on")

    def _sizes_left(self) -> list[tuple[int, int]]:
        return sizes_left(self.request.loaded.config, self._losses())

    def _waiting(self) -> set[tuple[str, str]]:
        """Rows without a run, by method and remedy."""
        return {(run.method, run.remedy) for run in self._runs_left()} - {
            (run.method, run.remedy) for run in self.found
        }

    def _begin(self, workers: Workers) -> None:
        """Have the base write what it must, and measure it."""
        study, request = self.request.loaded.config, self.request
        fingerprint = digest([self.common, BASE])
        measured = self.records.get(BASE, fingerprint) is not None
        if not measured:
            # A text that cannot be used is refused before the base writes for hours.
            self._alone(workers, self._task("texts", configs=self._each_remedys(), **self._measuring()))
        if study.recalls:
            spec = recalled_by(study)
            if spec.prompts is None:
                spec = spec.model_copy(update={"prompts": TEMPLATE if request.base.chat_template else BEGIN})
            elif spec.prompts not in (BEGIN, TEMPLATE):
                spec = spec.model_copy(update={"prompts": str(request.loaded.resolve(spec.prompts).absolute())})
            request.listener.say(f"the base writes {spec.tokens:,} tokens")
            asked = {"asked": spec.model_dump(), "to": str(self.memory), "take_over": request.take_over}
            self._alone(workers, self._task("recall", **self._named_base(), **asked))
        if not measured:
            request.listener.say("measuring the base")
            answer = self._alone(workers, self._task("base", **self._measuring()))
            self.records.add(BASE, fingerprint, Record.parse(answer))

    def _each_remedys(self) -> list[str]:
        """A training config of each remedy: together they have all texts that runs are trained on."""
        study = self.request.loaded.config
        first = {remedy.name: (method, remedy) for method, remedy in reversed(study.entries)}
        runs = [Run(m.called, r.name, study.rates_of(m, r)[0], 0) for m, r in first.values()]
        return [str(self._config(run)) for run in runs]

    def _alone(self, workers: Workers, task: Task) -> Answer:
        workers.begin(task)
        return _checked(workers.wait()[1], "")

    def _task(self, do: str, **more: Any) -> Task:
        """What a worker gets: the base where it lies, unless `more` says otherwise, and how models run."""
        request = self.request
        by = {"base": str(request.base.path), "device": request.device, "trust_remote_code": request.trust_remote_code}
        return {"do": do, **by, **more}

    def _named_base(self) -> Task:
        """The base by the name that it was given, which a grown model's manifest and what it writes are kept under."""
        return {"base": self.request.base.name, "revision": self.request.base.revision}

    def _measuring(self) -> Task:
        """What a worker gets for measuring."""
        config = self.request.work / "configs" / "measured.yaml"
        request, study = self.request, self.request.loaded.config
        every = sources(request.loaded, Remedy(name="none"), _MEMORY)
        total = sum(source["share"] for source in every)
        data = {"surgeon_train": 1, "steps": 1, "sources": [s | {"share": s["share"] / total} for s in every]}
        write_durably(config, yaml.safe_dump(data, sort_keys=False))
        return {
            "measure": str(config),
            "study": self.common,
            "names": [name for group in self.names for name in group],
            "documents": study.documents + study.choosing,
            "length": study.length,
        }

    def _next(self) -> Task | None:
        """The next task that can begin now; None where none can, or no more fits."""
        for run in self._wanted():
            if run.method not in self.request.loaded.plans:
                return self._run_task(run, self.request.base.path)
            grown = (run.method, run.seed)
            if grown in self.grown:
                return self._run_task(run, self._grown(*grown))
            if grown not in self.growing:
                self.growing.add(grown)
                return self._grow_task(run)
        return None

    def _wanted(self) -> list[Run]:
        """The runs that may begin now; with --minutes of rounds that are begun, or fit as a whole."""
        if self.budget.minutes is None:
            return [run for run in self._runs_left() if run not in self.busy]
        return self.budget.allow(rounds_left(self.request.loaded.config, self._losses()), self.busy)

    def _done(self, task: Task, answer: Answer) -> None:
        """Keep what a task found."""
        if task["do"] == "grow":
            _checked(answer, f"method {task['method']}: ")
            self.growing.remove((task["method"], task["seed"]))
            self.grown.add((task["method"], task["seed"]))
            return
        run = Run(*task["run"])
        self.busy.remove(run)
        found = _checked(answer, f"{run.words}: ")
        record = Record.parse(found)
        self.records.add(run.key, self._print(run), record)
        self.found[run] = record
        self.budget.made.append(answer["seconds"])
        with (self.request.work / SECONDS_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"run": run.key, "seconds": answer["seconds"]}) + "\n")
        self._report(run, record, answer["seconds"])
        # The seeds of a rate that was not known before may be there.
        self.request.listener.advance(self._read())
        self._drop(task)

    def _report(self, run: Run, record: Record, seconds: float) -> None:
        listener = self.request.listener
        if record.measured is None:
            listener.say(f"{run.words}: diverged ({record.diverged})")
        else:
            new, original = losses_of(record, self.names, by_byte=False)
            listener.say(f"{run.words}: new {new:.3f}, original {original:.3f} ({seconds:.0f} s)")
        listener.advance(1)

    def _drop(self, task: Task) -> None:
        """Remove what no run needs any more; with `keep` the run goes where it is seen."""
        run, target = Run(*task["run"]), Path(task["to"])
        if self.request.kept is not None and target.exists():
            place = self.request.kept / run.key
            if place.exists():
                shutil.rmtree(place)
            target.rename(place)
        shutil.rmtree(target, ignore_errors=True)
        needed = {(each.method, each.seed) for each in [*self._runs_left(), *self.busy]}
        for grown in sorted(self.grown - needed):
            shutil.rmtree(self._grown(*grown), ignore_errors=True)
            self.grown.remove(grown)

    def _grown(self, method: str, seed: int) -> Path:
        return self.request.work / "grown" / f"{method}+{seed}"

    def _grow_task(self, run: Run) -> Task:
        plan = self.request.loaded.plans[run.method]
        return self._task(
            "grow",
            **self._named_base(),
            method=run.method,
            seed=run.seed,
            plan=plan.text,
            source=plan.source,
            to=str(self._grown(run.method, run.seed)),
        )

    def _run_task(self, run: Run, out: Path) -> Task:
        self.busy.add(run)
        request, budget = self.request, self.budget
        return self._task(
            "run",
            run=[run.method, run.remedy, run.rate, run.seed],
            out=str(out),
            config=str(self._config(run)),
            to=str(request.work / "runs" / run.key),
            keep=request.kept is not None,
            blend=request.loaded.config.blend,
            new=self.names[0],
            limit=None if budget.is_known else budget.minutes and [budget.minutes, budget.left],
            **self._measuring(),
        )

    def _config(self, run: Run) -> Path:
        """The training config of a run, written: what `surgeon train` takes."""
        path = self.request.work / "configs" / f"{run.key}.yaml"
        write_durably(path, yaml.safe_dump(self._training(run), sort_keys=False))
        return path

    def _training(self, run: Run) -> dict[str, Any]:
        loaded = self.request.loaded
        method, remedy = next(
            (method, remedy)
            for method, remedy in loaded.config.entries
            if (method.called, remedy.name) == (run.method, run.remedy)
        )
        return training_config(loaded, method, remedy, rate=run.rate, seed=run.seed, memory=_MEMORY)

    def _print(self, run: Run) -> str:
        plan = self.request.loaded.plans.get(run.method)
        return run_digest(self.common, None if plan is None else plan.data(), self._training(run))


def _checked(answer: Answer, what: str) -> Answer:
    """An answer without its time. Raises BadInput for one that says why the task could not be done."""
    if "error" in answer:
        raise bad_input([f"{what}{line}" for line in answer["error"]])
    return {key: value for key, value in answer.items() if key != "seconds"}


# Training keys that change no number.
_PASSING = ("micro_batch", "checkpointing", "log_every")


def run_digest(common: str, plan: Any, training: Mapping[str, Any]) -> str:
    """Of what a run's numbers depend on.

    Args:
        common: what is common to all runs, by `study_digest`.
        plan: the plan as plain data, or None.
        training: the run's training config.
    """
    settings = {key: value for key, value in training.items() if key not in _PASSING}
    settings["sources"] = [_without_places(source) for source in training["sources"]]
    return digest([common, plan, settings])


def _without_places(source: Mapping[str, Any]) -> dict[str, Any]:
    """A source without its files, whose content is common to all; that a file is held out for it is kept."""
    held = source["validation"]
    in_file = isinstance(held, str) and not held.startswith("split:")
    found = {key: value for key, value in source.items() if key != "path"}
    return found | ({"validation": "a file"} if in_file else {})


def study_digest(loaded: LoadedStudy, base: Checkpoint, listener: Listener) -> str:
    """Of what every number of the study depends on: base, texts, and how losses are measured."""
    study = loaded.config
    listener.begin("reading", base.nbytes)
    held = base.digests(listener.advance)
    texts = []
    for group in GROUPS:
        for text in loaded.texts(group):
            files: list[Any] = [_digest_of(loaded, text.path)]
            if isinstance(text.validation, str):
                files.append(_digest_of(loaded, text.validation))
            texts.append([group, text.called, text.share, text.kind, text.field, files])
    return digest(
        {
            "choosing": study.choosing,
            "blend": study.blend,
            "version": __version__,
            "base": held,
            "base_config": base.config,
            "texts": texts,
            "validation": [
                text.validation
                for group in ("new", "original")
                for text in loaded.texts(group)
                if isinstance(text.validation, float)
            ],
            "recall": recalled_by(study).model_dump() if study.recalls else None,
            "documents": study.documents,
            "budget": [study.run_steps or f"{study.bytes} bytes", study.batch, study.length],
        }
    )


def _digest_of(loaded: LoadedStudy, path: str) -> Any:
    """Return the digests of a text's files; of a dataset on the Hub its name."""
    if path.startswith(("dataset:", "split:")):
        return path
    found = []
    for file in text_files(loaded.resolve(path)):
        with file.open("rb") as handle:
            found.append(hashlib.file_digest(handle, "sha256").hexdigest())
    return found
