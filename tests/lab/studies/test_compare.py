"""`surgeon compare` end to end on a tiny Llama: what runs find, what a kill costs, what the page says of it."""

from __future__ import annotations

import gzip
import html
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import surgeon
from surgeon.cli import app
from surgeon.common.listener import Quiet
from surgeon.errors import BadInput
from surgeon.lab.studies import running, workers
from surgeon.lab.studies.compare import Compared
from surgeon.lab.studies.config import loading, settings
from surgeon.lab.studies.config.loading import load_study
from surgeon.lab.studies.config.settings import suited, training_config
from surgeon.lab.studies.page import render
from surgeon.lab.studies.records import RUNS_FILE, Record, losses_of, read_packed
from surgeon.plan.shipped import folder
from surgeon.training.config.loading import load_config
from surgeon.training.remedies import blend as blending
from tests import tiny, vocabularies
from tests.decoders import tiny_decoder
from tests.lab.reports.test_page import Reader
from tests.studies import RESULTS, STUDIES, findings_of
from tests.test_api import check_json
from tests.training.texts import add_tokenizer, corpus
from tests.warm import warm

STUDY = """\
surgeon_study: 1
steps: 3
batch: 2
length: 24
documents: 3
most_rates: 4
peers: false
rates: [3.0e-4, 1.0e-3, 3.0e-3, 1.0e-2]
blend: [0.5]
recall: {tokens: 300, length: 24}
methods:
  - full
  - {name: wide, label: <b>wide</b>, plan: neutral-residues, rates: [3.0e-3, 1.0e-2, 3.0e-2, 1.0e-1]}
claims:
  - {says: wide beats full, better: wide, worse: full}
"""


@dataclass(frozen=True)
class Whole:
    """A study that nothing interrupted."""

    folder: Path
    told: Compared
    said: list[str]
    names: list[str]


def carried_out(folder: Path, results: str = "results", **asked: Any) -> Compared:
    given = {"new": [folder / "new.jsonl"], "original": [folder / "known.jsonl"], "device": "cpu"} | asked
    return surgeon.compare(folder / "study.yaml", folder / "base", folder / results, **given)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("study")
    add_tokenizer(tiny.checkpoint(folder / "base", "llama"))
    corpus(folder / "new.jsonl", seed=1, first=30, count=8, documents=30)
    corpus(folder / "known.jsonl", seed=2, count=20, documents=10)
    (folder / "study.yaml").write_text(STUDY, encoding="utf-8")
    heard = Heard()
    return Whole(folder, carried_out(folder, jobs=1, listener=heard), heard.lines, heard.names)


class Heard(Quiet):
    """Keeps what is said, and what the bar is called."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names: list[str] = []

    def rename(self, stage: str) -> None:
        """Keep it."""
        self.names.append(stage)

    def say(self, line: str) -> None:
        """Keep it."""
        self.lines.append(line)


def files(results: Path) -> dict[str, bytes]:
    """Everything but what depends on the day, or on the processes."""
    kept = (path for path in results.rglob("*") if path.is_file())
    passing = ("seconds.jsonl", "lock", "worker-0.log", "worker-1.log", "study.json", ".recalled.jsonl.signed")
    return {str(path.relative_to(results)): path.read_bytes() for path in kept if path.name not in passing}


def lines_of(runs: Path) -> list[Any]:
    """The lines of a file of records: the study's, then one for each run."""
    return [json.loads(line) for line in gzip.decompress(runs.read_bytes()).splitlines()]


def write_lines(runs: Path, lines: list[Any]) -> None:
    runs.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))


def forget(runs: Path, *names: str) -> None:
    """Take the records of these runs out of the file."""
    write_lines(runs, [line for line in lines_of(runs) if line.get("run") not in names])


def test_each_method_has_its_frontier_of_finished_runs(whole: Whole) -> None:
    found = whole.told.findings
    assert whole.told.made == 8 and [len(row.points) for row in found.rows] == [4, 8, 4, 8]
    assert not found.missing and found.unit == "nats a token"
    # How far one is, and which run it is of.
    assert f"full, recalled, rate {found.rows[0].points[0].rate:g}, seed 0: training 3 of 3" in whole.names
    assert any(name.startswith("the base: ") for name in whole.names)
    assert sum(line.endswith(": begun") for line in whole.said) == 8
    # What is ahead is said before the first run, and again once it is known how long one takes.
    ahead, *said = (line for line in whole.said[2:] if not line.endswith(": begun"))
    assert ahead == "8 runs to make at least; each is a line here once it is measured"
    assert [": new " in line for line in said] == [True, False] + 7 * [True]
    assert re.fullmatch(r"a run took \d+ s: 7 more take about \d+ s", said[1])
    for row in found.rows[::2]:
        points = [(point.new, point.original) for point in row.points]
        assert row.trained > 0 and all(point.seed == 0 for point in row.points)
        # The higher the rate, the more is learned in three steps of a model that knows nothing.
        assert sorted(points, reverse=True) == points and points[-1][0] < found.start[0] - 0.1
    best = min((each.best.sum, each.label, each.best.shown_rate) for each in found.rows if each.best is not None)
    assert found.advice.startswith(f"For this data at this budget (144 tokens a run): {best[1]}, rate {best[2]}: new")
    assert best[0] == min(point.new + point.original for each in found.rows for point in each.points)
    # Models go once they are measured, and so does what they were grown from.
    kept = ["comparison.html", "results.json", "runs.jsonl.gz", "work"]
    assert sorted(path.name for path in whole.told.path.iterdir()) == kept
    for name in ("runs", "grown"):
        assert not list((whole.told.path / "work" / name).iterdir())


def test_a_run_is_what_train_and_evaluate_find(whole: Whole, tmp_path: Path) -> None:
    """By hand, from the config that the study wrote: the same losses to the last bit."""
    row = whole.told.findings.rows[2]
    config = whole.told.path / "work" / "configs" / "wide+recalled+0.01+0.yaml"
    surgeon.apply("neutral-residues", str(whole.folder / "base"), tmp_path / "out")
    surgeon.train(tmp_path / "out", config, tmp_path / "run", device="cpu")
    found = surgeon.evaluate(
        tmp_path / "run", config, base=whole.folder / "base", sources=["new", "known"], length=24, most=3, device="cpu"
    )
    point = next(point for point in row.points if point.rate == 1e-2)
    losses = [found.of(str(tmp_path / "run"), name).loss.value for name in ("new", "known")]
    assert losses == [point.new, point.original]
    start = [found.of(str(whole.folder / "base"), name).loss.value for name in ("new", "known")]
    assert tuple(start) == whole.told.findings.start


def test_what_a_killed_worker_leaves_is_continued_byte_for_byte(
    whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three records of eight are there no more; of two workers, one dies in a run, and then this process in a blend."""
    results = tmp_path / "results"
    shutil.copytree(whole.told.path, results)
    # The study of somebody else, or of another place, is not taken for this one.
    with pytest.raises(BadInput, match=r"holds this study, 9 losses measured; this user wrote it in another place"):
        carried_out(whole.folder, str(results), jobs=1)
    forget(results / RUNS_FILE, "full+recalled+0.003+0", "wide+recalled+0.03+0", "wide+recalled+0.1+0")
    for name in ("comparison.html", "results.json"):
        (results / name).unlink()
    monkeypatch.setattr(workers, "PYTHON", warm())
    begin = workers.Processes.begin
    begun: list[str] = []

    def begin_and_kill(self: workers.Processes, task: dict[str, Any]) -> None:
        begin(self, task)
        begun.append(task["do"])
        if begun.count("run") == 2:
            self.kill(1)

    monkeypatch.setattr(workers.Processes, "begin", begin_and_kill)
    with pytest.raises(BadInput, match=r"worker-\d.log: a worker .*; the same command goes on"):
        carried_out(whole.folder, str(results), jobs=2, take_over=True)
    forget(results / RUNS_FILE, "wide+recalled+0.1+0")

    def cut(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(blending, "execute", cut)
        carried_out(whole.folder, str(results), jobs=1)
    assert list((results / "work" / "runs").glob("*+0")) and list((results / "work" / "runs").glob(".*blending"))
    told = carried_out(whole.folder, str(results), jobs=1)
    assert 1 <= told.made <= 3
    assert files(results) == files(whole.told.path)
    # Losses that were put there since, digest and all, do not count by themselves.
    lines = lines_of(results / RUNS_FILE)
    changed = next(line for line in lines if line.get("run") == "full+recalled+0.003+0")
    changed["record"]["measured"]["new"]["loss"] = 0.001
    write_lines(results / RUNS_FILE, lines)
    with pytest.raises(
        BadInput,
        match=rf"{RUNS_FILE}: holds losses of full\+recalled\+0\.003\+0; this user did not write it here",
    ):
        carried_out(whole.folder, str(results), jobs=1)


def test_all_runs_lie_in_one_file_from_which_alone_a_study_goes_on(whole: Whole, tmp_path: Path) -> None:
    """Without the work folder, texts elsewhere: the same page without a run made anew, where the file may count."""
    for name in ("new.jsonl", "known.jsonl"):
        shutil.copy(whole.folder / name, tmp_path / name)
    moved = {"new": [tmp_path / "new.jsonl"], "original": [tmp_path / "known.jsonl"], "jobs": 1}
    results = tmp_path / "results"
    results.mkdir()
    runs = results / RUNS_FILE
    shutil.copyfile(whole.told.path / RUNS_FILE, runs)
    lines = lines_of(runs)
    assert len(lines) == 10 and lines[1]["run"] == "base"
    with pytest.raises(BadInput, match=rf"{RUNS_FILE}: holds this study, 9 losses measured; this user did not write"):
        carried_out(whole.folder, str(results), jobs=1)
    told = carried_out(whole.folder, str(results), take_over=True, **moved)
    assert told.made == 0 and told.findings == whole.told.findings
    kept = files(whole.told.path)
    assert (
        files(results).items() >= {name: kept[name] for name in (RUNS_FILE, "results.json", "comparison.html")}.items()
    )
    # A run that nobody has.
    forget(runs, lines[2]["run"])
    heard = Heard()
    assert carried_out(whole.folder, str(results), jobs=1, minutes=60, listener=heard).made == 1
    assert "1 runs to make" in "".join(heard.lines) and "a run took" not in "".join(heard.lines)
    assert runs.read_bytes() == kept[RUNS_FILE]
    # Losses that were changed since do not count by themselves, nor does anything that is none.
    lines[1]["record"]["measured"]["new"]["loss"] = 0.001
    for wrong, why in (
        (lines, f"{RUNS_FILE}: holds losses of base; this user did not write it here"),
        ([{"surgeon_runs": 1, "study": "of something else"}, *lines[1:]], "holds runs of another study"),
        ([{"surgeon_runs": 2}], "its version is 2"),
        ([*lines, lines[1]], "or occurs twice"),
        ([*lines, {"run": "../base"}], "is not the name of a run"),
        ([*lines, []], "a line is no object"),
        ([], "empty"),
    ):
        write_lines(runs, wrong)
        with pytest.raises(BadInput, match=why):
            carried_out(whole.folder, str(results), jobs=1)
    runs.write_bytes(kept[RUNS_FILE][:-20])
    with pytest.raises(BadInput, match="damaged or edited"):
        carried_out(whole.folder, str(results), jobs=1)


def test_the_committed_studies_hold_every_run_of_their_pages() -> None:
    """What a clone has of them: as many records as results.json has points, with the same losses."""
    folder = Path(__file__).parents[3] / "benchmarks" / "results"
    studies = list(folder.glob("frontier_*/results.json"))
    assert studies
    for results in studies:
        found = json.loads(results.read_text(encoding="utf-8"))
        packed = read_packed(results.with_name(RUNS_FILE))
        assert packed is not None
        losses = {name: Record.parse(entry["record"]) for name, entry in packed.records.items()}
        names = found["texts"]["new"], found["texts"]["original"]
        points = {
            f"{row['method']}+{row['remedy']}+{point['rate']:g}+{point['seed']}": (point["new"], point["original"])
            for row in found["rows"]
            for point in row["points"]
        }
        points["base"] = found["start"]["new"], found["start"]["original"]
        finished = {name: losses_of(each, names, by_byte=False) for name, each in losses.items() if each.measured}
        assert finished == points, results


@pytest.mark.parametrize("study", STUDIES)
def test_the_committed_pages_are_drawn_as_now(study: str) -> None:
    """`python -m tests.drawings` draws them; that results.json is worked out of runs is benchmarks.claims' to say."""
    found = findings_of(study)
    assert (RESULTS / study / "comparison.html").read_text(encoding="utf-8") == render(found)


def test_a_worker_that_fails_says_what_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file beside the study that is called as a module is no part of it."""
    python = warm()
    for name in ("transformers", "selectors", "tokenizers", "safetensors"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('planted')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f":{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(workers, "PYTHON", python)
    with workers.Processes(1, logs=tmp_path, tell=print) as started:
        started.begin({"do": "nothing that it knows"})
        with pytest.raises(
            BadInput, match=r"worker-0.log: a worker ended with 1 \(KeyError: 'nothing that it knows'\)"
        ):
            started.wait()


def test_a_worker_tells_how_far_it_is(whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "PYTHON", warm())
    told: list[str] = []
    plan = (folder() / "neutral-residues.yaml").read_text(encoding="utf-8")
    task = {"do": "grow", "method": "wide", "seed": 0, "plan": plan, "source": "plan", "to": str(tmp_path / "grown")}
    by = {"base": str(whole.folder / "base"), "revision": None, "device": "cpu", "trust_remote_code": False}
    with workers.Processes(1, logs=tmp_path, tell=told.append) as started:
        started.begin(task | by)
        done, answer = started.wait()
    assert done == task | by and answer.keys() == {"seconds"} and (tmp_path / "grown").is_dir()
    assert told and all(re.fullmatch(r"wide: .+ [\d,]+ of [\d,]+", line) for line in told)
    assert len(told) <= 100 * len({line.rpartition(" of ")[0].rsplit(" ", 1)[0] for line in told})


def test_more_rates_keep_what_is_there_and_another_study_is_refused(
    whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "results"
    shutil.copytree(whole.told.path, results)
    again = tmp_path / "study.yaml"

    def asked(was: str, now: str, **more: Any) -> Compared:
        again.write_text(STUDY.replace(was, now), encoding="utf-8")
        texts = {"new": [whole.folder / "new.jsonl"], "original": [whole.folder / "known.jsonl"]}
        asked = {"device": "cpu", "jobs": 1, "take_over": True} | texts | more
        return surgeon.compare(again, whole.folder / "base", results, **asked)

    told = asked("seeds", "seeds", minutes=1e-9)
    assert told.made == 0 and told.findings == whole.told.findings
    # A pilot without time for one run is refused, and its page says what it left out.
    with pytest.raises(BadInput, match=r"--minutes 1e-09: what comes before the first run took \d+ s, and is kept;"):
        asked("most_rates: 4", "seeds: 2", minutes=1e-9)
    assert json.loads((results / "results.json").read_text(encoding="utf-8"))["missing"] == [
        "full, recalled, seed 0: rate 0.03",
        "wide, recalled, seed 0: rate 0.3",
        "full, recalled: 1 more seeds, once its rates are known",
        "wide, recalled: 1 more seeds, once its rates are known",
    ]
    # A record of the first seed that is lost is made again, and those of others are taken in after it.
    carry_out, made = running.carry_out, []

    def known(task: dict[str, Any], tell: Callable[[str], None]) -> dict[str, Any]:
        if task["do"] not in ("run", "grow"):
            return carry_out(task, tell)
        made.append(task["do"])
        return {**lines[1]["record"], "seconds": 1.0}

    lines = lines_of(results / RUNS_FILE)
    with monkeypatch.context() as patched:
        patched.setattr(running, "carry_out", known)
        told = asked("most_rates: 4", "extend: false\nseeds: 2")
        assert told.made == made.count("run") == 8
        forget(results / RUNS_FILE, "full+recalled+0.001+0")
        assert asked("most_rates: 4", "extend: false\nseeds: 2", minutes=60).made == 1
    for old, new, why in (
        ("steps: 3", "steps: 4", "holds runs of another study"),
        ("plan: neutral-residues,", "plan: pmoe,", "a run of another method of this name"),
        ("length: 24}", "length: 20}", "holds runs of another study"),
    ):
        with pytest.raises(BadInput, match=why):
            asked(old, new)
    with pytest.raises(BadInput, match="holds runs of another study"):
        asked("seeds", "seeds", new=[whole.folder / "known.jsonl"], original=[whole.folder / "new.jsonl"])
    memory = results / "work" / "recalled.jsonl"
    kept = memory.read_bytes()
    memory.write_bytes(kept + kept)
    with pytest.raises(BadInput, match=r"recalled.jsonl: not what this model writes by these settings; remove it, and"):
        asked("seeds", "seeds")
    memory.unlink()
    assert asked("seeds", "seeds").made == 0 and memory.read_bytes() == kept
    lines = lines_of(results / RUNS_FILE)
    lines[1]["record"]["measured"]["new"]["boss"] = lines[1]["record"]["measured"]["new"].pop("loss")
    write_lines(results / RUNS_FILE, lines)
    with pytest.raises(BadInput, match=rf"{RUNS_FILE}: damaged or edited \(base: .*\); remove it"):
        asked("seeds", "seeds")


def test_refused_before_anything_is_made(whole: Whole, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("mine")
    for results, asked, why in (
        (tmp_path / "full", {}, "holds letter.txt, and no study"),
        (whole.folder / "base" / "results", {}, "is, holds or lies in the base"),
        (tmp_path / "no" / "results", {}, "there is no folder"),
        (tmp_path / "results", {"jobs": 0}, "--jobs 0: give a number above 0"),
        (tmp_path / "results", {"device": "cuda:1"}, "CUDA_VISIBLE_DEVICES chooses"),
    ):
        with pytest.raises(BadInput, match=why):
            carried_out(whole.folder, str(results), **asked)
    # Neither the folder of kept runs, nor one in it, leads elsewhere.
    for number, link in enumerate(("runs", "runs/one")):
        linked = tmp_path / f"linked-{number}"
        (linked / link).parent.mkdir(parents=True)
        (linked / link).symlink_to(tmp_path / "full")
        with pytest.raises(BadInput, match=f"{link}: a link; --keep puts runs there"):
            carried_out(whole.folder, str(linked), keep=True)
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["letter.txt"]
    study = tmp_path / "study.yaml"
    study.write_text(STUDY.replace("length: 24\n", "length: 4096\n"), encoding="utf-8")
    with pytest.raises(BadInput, match=r"study.yaml:4: `length` is 4096, the base's context 128; use 128 at most"):
        surgeon.compare(study, whole.folder / "base", tmp_path / "results", new=[whole.folder / "new.jsonl"])
    assert not (tmp_path / "results").exists()


def test_what_runs_would_refuse_is_said_before_the_base_writes(whole: Whole, tmp_path: Path) -> None:
    """And a folder in which nothing was finished takes another study."""
    study = tmp_path / "study.yaml"
    blank = tmp_path / "blank.jsonl"
    blank.write_text("\n\n")
    texts = {"new": [whole.folder / "new.jsonl"], "original": [whole.folder / "known.jsonl"]}

    def asked(methods: str = "", **changed: Any) -> Compared:
        study.write_text(STUDY.partition("methods")[0] + f"methods: [full, {methods}]\n", encoding="utf-8")
        place = whole.folder / "base", tmp_path / "results"
        return surgeon.compare(study, *place, device="cpu", jobs=1, minutes=1e-9, **(texts | changed))

    for methods, changed, why in (
        ("", {"new": [blank]}, "blank.jsonl: no document with text"),
        ("", {"original": ["kept=" + str(whole.folder / "new.jsonl")]}, "is new text too, and what is learned"),
        ("{lora: {targets: [gone]}}", {}, "^[^:]*: method lora: no module of .* is called gone"),
        ("{partial: {every: 9}}", {}, "method partial: .* matches nothing in a model of 6 layers"),
    ):
        with pytest.raises(BadInput, match=why):
            asked(methods, **changed)
        assert not list((tmp_path / "results").glob("work/*recalled*"))
    with pytest.raises(BadInput, match=r"--minutes 1e-09: what comes before .* took .*; no run began; give"):
        asked()
    assert (tmp_path / "results" / "comparison.html").exists()


def test_methods_that_say_no_more_are_as_the_base_allows(tmp_path: Path) -> None:
    """Experts, and fewer layers than partial tuning counts."""
    corpus(tmp_path / "new.jsonl", documents=3)
    study = tmp_path / "study.yaml"
    study.write_text("surgeon_study: 1\nsteps: 2\nmethods: [full]\n", encoding="utf-8")
    loaded = load_study(study, new=[tmp_path / "new.jsonl"])
    for model_type, targets in (
        ("gpt2", None),
        ("qwen3_moe", [f"self_attn.{name}_proj" for name in "koqv"]),
    ):
        base = surgeon.open_checkpoint(tiny_decoder(tmp_path / model_type, model_type, layers=3))
        found = suited(loaded, base)
        _, lora, partial = found.config.all_methods
        assert lora.lora is not None and lora.lora.targets == (targets or "all")
        assert partial.partial is not None and partial.partial.every == 3
        noted = ["LoRA"] if targets else []
        assert [note.partition(":")[0] for note in found.notes] == [*noted, "partial tuning"]
        for method in found.config.all_methods:
            config = tmp_path / "train.yaml"
            asked = training_config(found, method, found.config.remedies[0], rate=1e-3, seed=0, memory="memory.jsonl")
            config.write_text(json.dumps(asked), encoding="utf-8")
            surgeon.check_training(base, load_config(config))
    assert suited(loaded, surgeon.open_checkpoint(tiny.checkpoint(tmp_path / "llama", "llama"))) is loaded


def test_the_study_quick_goes_without_lora_where_peft_is_not_there(
    whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {"new": [whole.folder / "new.jsonl"], "original": [whole.folder / "known.jsonl"]}
    base = surgeon.open_checkpoint(whole.folder / "base")
    with_it = [method.called for method in suited(load_study("quick", **texts), base).config.all_methods]
    for module in (loading, settings):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    found = suited(load_study("quick", **texts), base)
    assert [method.called for method in found.config.all_methods] == [each for each in with_it if each != "lora"]
    assert with_it[:3] == ["full", "lora", "partial"]
    (note,) = (note for note in found.notes if "LoRA" in note)
    assert note.startswith("LoRA is left out: it needs PEFT, which is not installed; run `pip install ")


@pytest.fixture
def page(whole: Whole) -> Iterator[Reader]:
    reader = Reader()
    reader.feed(whole.told.page.read_text(encoding="utf-8"))
    yield reader


def test_the_page_says_what_was_found_and_runs_nothing(whole: Whole, page: Reader) -> None:
    assert not page.open and len(set(page.ids)) == len(page.ids)
    assert not {tag for tag, _ in page.elements} & {"script", "b", "link", "iframe"}
    words = " ".join(page.words)
    found = whole.told.findings
    assert found.advice in words and "<b>wide</b>" in words
    assert "wide beats full" in words
    for row in found.rows:
        assert row.best is not None and f"{row.best.original:.4f}" in words
    result = json.loads((whole.told.path / "results.json").read_text(encoding="utf-8"))
    assert {"path", "page", "made", "seconds"} == whole.told.to_json().keys() - result.keys()
    assert repr(whole.told).startswith("Compared(") and "8 runs" in repr(whole.told)
    check_json(whole.told)


def test_the_figure_has_the_best_methods_and_full_fine_tuning_with_their_remedies() -> None:
    found = findings_of("frontier_en-llama-8m")
    drawn = re.findall(r'class="name (s\d)( muted)?">([^<]+)', render(found))
    coloured = [name for _, muted, name in drawn if not muted]
    ranked = sorted((row for row in found.rows if row.area and row.kind != "full"), key=lambda row: row.area.mean)
    best: dict[str, Any] = {}
    for row in ranked:
        best.setdefault(row.method, row)
    first = [*best.values()][:3]
    assert [name[:19] for name in coloured] == [f"{row.method}, {row.remedy}"[:19] for row in first]
    grey = {name for _, muted, name in drawn if muted}
    assert grey == {f"full, {row.remedy}"[:20] for row in first}
    rows = re.findall(r"<tr><t[hd][^>]*>([^<]+)</t[hd]>", html.unescape(render(found)))
    places = [rows.index(row.label) for row in ranked]
    assert places == sorted(places)


def test_the_table_fits_and_the_same_command_has_nothing_to_do(whole: Whole, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = whole.folder
    command = ["compare", folder / "study.yaml", folder / "base", folder / "results", "--device", "cpu", "--jobs", "1"]
    command += ["--new", folder / "new.jsonl", "--original", folder / "known.jsonl"]
    for width in (60, 80, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        ran = CliRunner().invoke(app, [str(word) for word in command])
        assert ran.exit_code == 0, ran.output
        assert max(map(len, ran.stdout.splitlines())) <= width
        assert "full fine-tuning" in ran.stdout and "For this data at this budget (144 tokens a run)" in ran.stdout


def test_equal_bytes_are_other_steps_of_other_tokens(tmp_path: Path) -> None:
    """The base as it is and with words of the new text as tokens, all of each training on as much text."""
    vocabularies.byte_level(tiny.checkpoint(tmp_path / "base", "llama", vocab_size=300))
    vocabularies.write_text(tmp_path / "new.jsonl", vocabularies.FRENCH, times=5)
    vocabularies.write_text(tmp_path / "known.jsonl", vocabularies.ENGLISH)
    words = '[" lumière", " terrasse", " était", " légère", " déserte"]'
    (tmp_path / "words.yaml").write_text(
        f"surgeon: 1\noperations:\n  - {{op: grow_vocabulary, tokens: {words}}}\n", encoding="utf-8"
    )
    study = STUDY.partition("recall")[0].replace("steps: 3", "bytes: 500")
    study += "choosing: 2\nremedies: [{name: bare}]\n"
    study += "methods: [full, {name: words, plan: words.yaml, full: true}]\n"
    (tmp_path / "study.yaml").write_text(study, encoding="utf-8")
    told = carried_out(tmp_path, jobs=1, keep=True)
    plain, blended, grown = told.findings.rows
    assert told.findings.unit == "bits a byte" and told.findings.budget["bytes"] == 500
    # Two sequences of 24 tokens a step; of the grown tokenizer's fewer have the same text.
    assert 1 < grown.steps < plain.steps
    # Embeddings and head, which new rows are a part of, train whole.
    assert grown.trained > plain.trained
    records = {line["run"]: line["record"] for line in lines_of(told.path / RUNS_FILE)[1:]}
    measured = [record["measured"]["new"] for record in records.values()]
    assert {(source["documents"], source["nbytes"]) for source in measured} == {
        (measured[0]["documents"], measured[0]["nbytes"])
    }
    assert len({source["tokens"] for source in measured}) == 2
    # A run's blend is `surgeon blend`'s, and of a model whose vocabulary grew there is none.
    assert blended.blended and len(blended.points) == 2 * len(plain.points) and blended.trained == plain.trained
    assert [note for note in told.findings.notes if note.startswith("words: none of its runs is blended")]
    key, half = "full+bare+0.01+0", tmp_path / "half"
    surgeon.write_blend(told.path / "runs" / key, half, base=tmp_path / "base", alpha=0.5)
    texts = told.path / "work" / "configs" / "measured.yaml"
    found = surgeon.evaluate(half, texts, sources=["new", "known"], length=24, most=5, device="cpu").models[0]
    record = Record.parse(records[key])
    # Of two documents, or four, one or two choose, and the others are reported.
    parts = {2: ([0], [1]), 4: ([0, 2], [1, 3])}
    losses = []
    for source in found.sources:
        held = record.blended[0.5][source.source]
        assert (held.loss, held.documents) == (source.loss.value, source.documents)
        assert held.of(range(held.documents), by_byte=False) == pytest.approx(held.loss, abs=1e-4)
        losses.append([held.of(each, by_byte=True) for each in parts[held.documents]])
    point = next(point for point in blended.points if (point.rate, point.share) == (1e-2, 0.5))
    assert list(zip(*losses, strict=True)) == [point.chosen, (point.new, point.original)]
    words_of_page = told.page.read_text(encoding="utf-8")
    assert f"{grown.steps} to {plain.steps} steps" in words_of_page and "500 bytes of new text" in words_of_page
