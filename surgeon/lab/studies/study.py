"""A study in progress: read its texts and base, let the base write text, measure the base, and give runs to workers.

RESULTS/work contains the text that the base wrote, and grown models and runs while they are needed. The record of a
finished run is written when the run ends and never changes (records.py). So the same command always finds out what is
left to do.

Digests identify everything that a number depends on; a record under another digest is not used. File locations are not
part of the digests, so a study and its texts may be moved.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from surgeon import Checkpoint, __version__, check_training, load_config, text_files
from surgeon.common.files import file_digests
from surgeon.common.listener import Listener
from surgeon.common.schema import BEGIN, TEMPLATE
from surgeon.common.work_folders import write_durably
from surgeon.errors import BadInput, bad_input, printable
from surgeon.lab.studies.analysis import find
from surgeon.lab.studies.budget import Budget, left_out
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
from surgeon.lab.studies.schedule import Run, left_by_seed, rounds_left, runs_left
from surgeon.lab.studies.workers import Answer, Task, Workers

# Path of the text that the base wrote, relative to the folder of the training configs.
_MEMORY = f"../{RECALLED}.jsonl"


@dataclass(frozen=True)
class Request:
    """The settings of one call of a study, with the opened base.

    With `take_over` the call continues a work folder that this user did not write here.
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
    """A study in progress, with the records found so far.

    `common` is the digest of everything that all runs depend on. `grown` and `growing` contain (method, seed) of grown
    models, finished and in progress. `busy` contains the runs in progress.
    """

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
        """Open the work folder and load its records.

        Raises BadInput where the records belong to another study, or a training config would be refused.
        """
        common = study_digest(request.loaded, request.base, request.listener)
        course = cls(
            request,
            Records(request.work, request.take_over, request.listener.say),
            common,
            Budget(request.minutes),
        )
        course.records.check_study(common)
        # Remove what an interrupted call left, complete or not; it is made again.
        for name in ("runs", "grown"):
            shutil.rmtree(request.work / name, ignore_errors=True)
            (request.work / name).mkdir()
        (request.work / "configs").mkdir(exist_ok=True)
        course._check_configs()
        course._read()
        return course

    @property
    def memory(self) -> Path:
        """Path of the text that the base wrote."""
        return self.request.work / f"{RECALLED}.jsonl"

    def _check_configs(self) -> None:
        """Raise BadInput where `surgeon train` would refuse the training config of a method with a remedy."""
        wrong: list[str] = []
        study, base = self.request.loaded.config, self.request.base
        for method, remedy in study.entries:
            run = Run(method.called, remedy.name, study.rates_of(method, remedy)[0], 0)
            try:
                config = load_config(path := self._config(run))
                if method.plan is None:
                    check_training(base, config)
            except BadInput as error:
                # Leave the config's path out: this study wrote the file, the user does not know it.
                why = re.sub(rf"^{re.escape(printable(str(path)))}(:\d+)?: ", "", str(error))
                wrong.append(f"{self.request.loaded.shown}: method {method.called}: {why}")
        if wrong:
            raise bad_input(wrong)

    def _read(self) -> int:
        """Load the records of runs that this study wants; return how many were new."""
        before = len(self.found)
        get = self.records.get
        while new := {run: found for run in self._runs_left() if (found := get(run.key, self._print(run))) is not None}:
            self.found |= new
        return len(self.found) - before

    def _runs_left(self) -> list[Run]:
        """Return the runs that are not finished, in the order in which to make them."""
        return list(runs_left(self.request.loaded.config, self._losses()))

    def _losses(self) -> dict[Run, Pair]:
        """Return the losses of the finished runs, in nats a token."""
        return {run: losses_of(record, self.names, by_byte=False) for run, record in self.found.items()}

    @property
    def names(self) -> tuple[list[str], list[str]]:
        """(Names of the new texts, names of the original texts) on which losses are measured."""
        return measured_names(self.request.loaded)

    @property
    def begun(self) -> bool:
        """Whether the base was measured, so that there are results to show."""
        return BASE in self.records.found

    @property
    def start(self) -> Record:
        """The record of the base."""
        return self.records.found[BASE]

    def findings(self) -> Findings:
        """Return the results so far; the base must have been measured."""
        return find(self.request.loaded, self.request.base.id, self.start, self.found, self.names)

    def carry_out(self, workers: Workers) -> None:
        """Make every run that is left, or as many as time allows. Raises BadInput, and the errors of `train`."""
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
            if first and budget.made and (more := self._left_by_seed()):
                say(budget.expected(more.total(), len(self._waiting())))
        if budget.minutes is not None and (more := self._left_by_seed()):
            say(f"--minutes {budget.minutes:g}: left out: {left_out(more)}; the same command without it goes on")

    def _left_by_seed(self) -> Counter[int]:
        """Return how many runs of each seed are left, as far as rates are known."""
        return left_by_seed(self.request.loaded.config, self._losses())

    def _waiting(self) -> set[tuple[str, str]]:
        """Return (method, remedy) of the rows that have no finished run."""
        return {(run.method, run.remedy) for run in self._runs_left()} - {
            (run.method, run.remedy) for run in self.found
        }

    def _begin(self, workers: Workers) -> None:
        """Check the texts, let the base write text where the study needs it, and measure the base."""
        study, request = self.request.loaded.config, self.request
        fingerprint = digest([self.common, BASE])
        measured = self.records.get(BASE, fingerprint) is not None
        if not measured:
            # Refuse a text that cannot be used now, before the base writes text for hours.
            self._alone(workers, self._task("texts", configs=self._each_remedys(), **self._measuring()))
        if study.recalls:
            spec = recalled_by(study)
            if spec.prompts not in (None, BEGIN, TEMPLATE):
                spec = spec.model_copy(update={"prompts": str(request.loaded.resolve(spec.prompts).absolute())})
            request.listener.say(f"the base writes {spec.tokens:,} tokens")
            asked = {"asked": spec.model_dump(), "to": str(self.memory), "take_over": request.take_over}
            self._alone(workers, self._task("recall", **self._named_base(), **asked))
        if not measured:
            request.listener.say("measuring the base")
            answer = self._alone(workers, self._task("base", **self._measuring()))
            self.records.add(BASE, fingerprint, Record.parse(answer))

    def _each_remedys(self) -> list[str]:
        """Return paths of one training config per remedy; together they contain all texts on which runs train."""
        study = self.request.loaded.config
        first = {remedy.name: (method, remedy) for method, remedy in reversed(study.entries)}
        runs = [Run(m.called, r.name, study.rates_of(m, r)[0], 0) for m, r in first.values()]
        return [str(self._config(run)) for run in runs]

    def _alone(self, workers: Workers, task: Task) -> Answer:
        """Carry out one task while no other one runs, and return its answer. Raises BadInput where it fails."""
        workers.begin(task)
        return _checked(workers.wait()[1], "")

    def _task(self, do: str, **more: Any) -> Task:
        """Return a task for a worker, with the base's folder, device and trust; `more` adds or replaces keys."""
        request = self.request
        by = {"base": str(request.base.path), "device": request.device, "trust_remote_code": request.trust_remote_code}
        return {"do": do, **by, **more}

    def _named_base(self) -> Task:
        """Return the base by its given name, because manifests of grown models and of written text record this name."""
        return {"base": self.request.base.name, "revision": self.request.base.revision}

    def _measuring(self) -> Task:
        """Return the keys of a task that measures losses; write the config that lists the measured texts."""
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
        """Return the next task that can begin now; None where no task can begin, or no further run fits the time."""
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
        """Return the runs that may begin now; with --minutes, only from rounds that have begun or fit as a whole."""
        if self.budget.minutes is None:
            return [run for run in self._runs_left() if run not in self.busy]
        return self.budget.allow(rounds_left(self.request.loaded.config, self._losses()), self.busy)

    def _done(self, task: Task, answer: Answer) -> None:
        """Process a finished task: mark the grown model as finished, or store the run's record and report it."""
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
        self._report(run, record, answer["seconds"])
        # Rates that are known only now may have stored records of further seeds.
        self.request.listener.advance(self._read())
        self._drop(task)

    def _report(self, run: Run, record: Record, seconds: float) -> None:
        """Report a finished run, and advance the progress by one run."""
        listener = self.request.listener
        if record.measured is None:
            listener.say(f"{run.words}: diverged ({record.diverged})")
        else:
            new, original = losses_of(record, self.names, by_byte=False)
            listener.say(f"{run.words}: new {new:.3f}, original {original:.3f} ({seconds:.0f} s)")
        listener.advance(1)

    def _drop(self, task: Task) -> None:
        """Remove the trained run (with `keep`: move it to the kept runs) and grown models that no run needs."""
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
        """Return the folder of the grown model of a method and seed."""
        return self.request.work / "grown" / f"{method}+{seed}"

    def _grow_task(self, run: Run) -> Task:
        """Return the task that grows the model of a run."""
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
        """Mark a run as in progress; return the task that trains it on the model `out` and measures it."""
        self.busy.add(run)
        self.request.listener.say(f"{run.words}: begun")
        request, budget = self.request, self.budget
        # `limit` is [limit in minutes, seconds left] only where a limit was given and no run's time is known yet.
        return self._task(
            "run",
            run=[run.method, run.remedy, run.rate, run.seed],
            out=str(out),
            config=str(self._config(run)),
            to=str(request.work / "runs" / run.key),
            keep=request.kept is not None,
            blend=request.loaded.config.blend,
            limit=None if budget.made else budget.minutes and [budget.minutes, budget.left],
            **self._measuring(),
        )

    def _config(self, run: Run) -> Path:
        """Write the training config of a run for `surgeon train`, and return its path."""
        path = self.request.work / "configs" / f"{run.key}.yaml"
        write_durably(path, yaml.safe_dump(self._training(run), sort_keys=False))
        return path

    def _training(self, run: Run) -> dict[str, Any]:
        """Return a run's training config as plain data."""
        loaded = self.request.loaded
        method, remedy = next(
            (method, remedy)
            for method, remedy in loaded.config.entries
            if (method.called, remedy.name) == (run.method, run.remedy)
        )
        return training_config(loaded, method, remedy, rate=run.rate, seed=run.seed, memory=_MEMORY)

    def _print(self, run: Run) -> str:
        """Return the digest of everything that a run's numbers depend on."""
        plan = self.request.loaded.plans.get(run.method)
        return run_digest(self.common, None if plan is None else plan.data(), self._training(run))


def _checked(answer: Answer, what: str) -> Answer:
    """Return the answer without `seconds`. Raises BadInput where the answer is an error."""
    if "error" in answer:
        raise bad_input([f"{what}{line}" for line in answer["error"]])
    return {key: value for key, value in answer.items() if key != "seconds"}


# Training keys that do not change a run's results.
_PASSING = ("micro_batch", "checkpointing", "log_every")


def run_digest(common: str, plan: Any, training: Mapping[str, Any]) -> str:
    """Return the digest of everything that a run's numbers depend on.

    Args:
        common: what is common to all runs, by `study_digest`.
        plan: the plan as plain data, or None.
        training: the run's training config.
    """
    settings = {key: value for key, value in training.items() if key not in _PASSING}
    settings["sources"] = [_without_places(source) for source in training["sources"]]
    return digest([common, plan, settings])


def _without_places(source: Mapping[str, Any]) -> dict[str, Any]:
    """Return a source without file paths, because the files' content is in the study's digest.

    Whether `validation` names a file is kept.
    """
    held = source["validation"]
    in_file = isinstance(held, str) and not held.startswith("split:")
    found = {key: value for key, value in source.items() if key != "path"}
    return found | ({"validation": "a file"} if in_file else {})


def study_digest(loaded: LoadedStudy, base: Checkpoint, listener: Listener) -> str:
    """Return the digest of everything that all numbers depend on: base, texts, and how losses are measured."""
    study = loaded.config
    listener.begin("reading", base.nbytes)
    held = base.digests(listener.advance)
    texts = []
    for group in GROUPS:
        for text in loaded.texts(group):
            files: list[Any] = [_content(loaded, text.path)]
            if isinstance(text.validation, str):
                files.append(_content(loaded, text.validation))
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


def _content(loaded: LoadedStudy, path: str) -> str | list[str]:
    """Return the digests of a text's files; for a dataset on the Hub its name."""
    return path if path.startswith(("dataset:", "split:")) else file_digests(text_files(loaded.resolve(path)))
