"""study.yaml: what it comes to, run by run, which rates it extends to, and what is refused by file and line."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from surgeon.errors import BadInput
from surgeon.lab.studies.config import loading
from surgeon.lab.studies.config.entries import PEERS
from surgeon.lab.studies.config.loading import LoadedStudy, json_schema, load_study
from surgeon.lab.studies.config.settings import measured_names, recalled_by, training_config
from surgeon.lab.studies.schedule import Run, left_by_seed, rates_of, rounds_left, runs_left
from surgeon.plan.shipped import shipped_plans, shipped_studies
from surgeon.training.config.schema import TrainConfig

SMALLEST = """\
surgeon_study: 1
steps: 10
new: [new.jsonl]
original: [known.jsonl]
methods: [neutral-residues]
"""


def written(folder: Path, text: str = SMALLEST, **texts: list[str | Path]) -> LoadedStudy:
    for name, size in (("new", 3), ("more", 1), ("known", 1), ("other", 1)):
        (folder / f"{name}.jsonl").write_text('{"text": "some words"}\n' * size)
    path = folder / "study.yaml"
    path.write_text(text, encoding="utf-8")
    return load_study(path, **texts)


def config_of(loaded: LoadedStudy, method: str, remedy: int = 0, rate: float = 1e-3) -> TrainConfig:
    """As `surgeon train` reads what is written for a run."""
    found = next(each for each in loaded.config.all_methods if each.called == method)
    data = training_config(loaded, found, loaded.config.remedies[remedy], rate=rate, seed=2, memory="../recalled.jsonl")
    return TrainConfig.model_validate_json(json.dumps(data))


def test_a_shipped_study_is_called_by_its_name() -> None:
    with pytest.raises(BadInput, match=r"^quick: no text to learn; give `new:`, or --new FILE$"):
        load_study("quick")


def test_lora_without_peft_is_refused_with_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    asked = SMALLEST.replace("methods: [", "methods: [lora, ")
    with pytest.raises(
        BadInput, match=r"study\.yaml: the method lora needs PEFT, .*; run `pip install -e '\.\[peft\]'`"
    ):
        written(tmp_path, asked)
    # Where the file asks for none, it is left out (`suited`).
    written(tmp_path)


def test_every_comparison_has_the_peers_first(tmp_path: Path) -> None:
    study = written(tmp_path).config
    assert [method.called for method in study.all_methods] == [*PEERS, "neutral-residues"]
    alone = written(tmp_path, SMALLEST + "peers: false\n").config
    assert [method.called for method in alone.all_methods] == ["neutral-residues"]
    own = SMALLEST.replace("methods: [", "methods: [{name: all, full: true}, ")
    assert written(tmp_path, own).config.all_methods[0].called == "all"


def test_by_default_the_base_writes_what_is_replayed_and_teaches(tmp_path: Path) -> None:
    config = config_of(written(tmp_path), "neutral-residues")
    assert [(s.name, s.role, s.share) for s in config.sources] == [
        ("new", "new", 0.9),
        ("known", "original", 0.0),
        ("recalled", "original", 0.1),
    ]
    assert config.preserve is not None and config.preserve.loss == "kl"
    # What no run trains on is measured as a whole; of the new text a part is held out.
    assert [source.validation for source in config.sources] == [0.1, str(tmp_path / "known.jsonl"), 0.0]
    assert (config.optimizer.lr, config.optimizer.min_lr, config.optimizer.schedule) == (1e-3, 1e-4, "cosine")
    assert (config.seed, config.steps) == (2, 10)


@pytest.mark.parametrize("replayed", [False, True], ids=["recalled", "replayed text"])
def test_a_domain_gate_is_fitted_on_what_is_replayed_never_on_what_is_measured(replayed: bool, tmp_path: Path) -> None:
    remedies = "remedies: [{name: a, replay: {source: text}}, {name: bare}]\nreplayed: [other.jsonl]\n"
    text = SMALLEST.replace("neutral-residues", "domain-gate/layers") + (remedies if replayed else "")
    loaded = written(tmp_path, text)
    gated = loaded.config.all_methods[-1].called
    config = config_of(loaded, gated)
    assert [(source.name, source.share, source.validation) for source in config.sources] == [
        ("new", 0.9, 0.1),
        ("other" if replayed else "recalled", 0.1, 0.1),
    ]
    if replayed:
        with pytest.raises(BadInput, match="with the remedy bare nothing is replayed; give the remedy"):
            config_of(loaded, gated, remedy=1)


@pytest.mark.parametrize("share", [0.0, 0.25])
def test_fisher_reads_what_is_replayed_never_what_is_measured(share: float, tmp_path: Path) -> None:
    """With a share of 0 it is read all the same, and the base writes as many sequences as it takes."""
    asked = f"remedies: [{{name: a, replay: {{share: {share}}}, preserve: {{loss: fisher, sequences: 90}}}}]\n"
    loaded = written(tmp_path, SMALLEST + asked)
    config = config_of(loaded, "full")
    assert [(source.name, source.share) for source in config.sources] == [("new", 1 - share), ("recalled", share)]
    assert recalled_by(loaded.config).tokens >= 90 * loaded.config.length


def test_peers_are_what_train_calls_them(tmp_path: Path) -> None:
    methods = "[{name: low, lora: {rank: 2, targets: ffn}}, {name: some, partial: {every: 2}}, full]"
    loaded = written(tmp_path, SMALLEST.replace("[neutral-residues]", methods))
    low, some, full = (config_of(loaded, name) for name in ("low", "some", "full"))
    assert low.lora is not None and (low.lora.rank, low.lora.targets, low.what) == (2, "ffn", None)
    assert some.model_dump(mode="json")["what"] == {"layers": {"every": 2}} and full.what == "base"
    assert config_of(written(tmp_path), "neutral-residues").what is None
    grown = written(tmp_path, SMALLEST.replace("[neutral-residues]", "[{plan: grow-vocabulary, full: true}]"))
    assert [method.kind for method in grown.config.all_methods] == [*PEERS, "plan"]
    assert config_of(grown, "grow-vocabulary").what == "all"


def test_without_original_text_what_the_base_writes_is_measured(tmp_path: Path) -> None:
    loaded = written(tmp_path, SMALLEST.replace("original: [known.jsonl]\n", ""))
    assert measured_names(loaded) == (["new"], ["recalled"])
    assert config_of(loaded, "neutral-residues").sources[-1].validation == 0.2
    assert recalled_by(loaded.config).tokens > 0.1 * loaded.config.run_tokens


def test_texts_are_replayed_by_their_shares(tmp_path: Path) -> None:
    text = SMALLEST + "remedies: [{name: replayed, replay: {source: text, share: 0.2}}, {name: nothing}]\n"
    loaded = written(tmp_path, text, new=[tmp_path / "new.jsonl", f"too={tmp_path / 'more.jsonl'}"])
    # Three times as many bytes: three times as many sequences.
    assert [(s.name, s.share) for s in config_of(loaded, "neutral-residues").sources] == [
        ("new", pytest.approx(0.6)),
        ("too", pytest.approx(0.2)),
        ("known", pytest.approx(0.2)),
    ]
    assert [s.share for s in config_of(loaded, "neutral-residues", 1).sources][-1] == 0
    other = written(tmp_path, text, replayed=[tmp_path / "other.jsonl"])
    assert [(s.name, s.share, s.validation) for s in config_of(other, "neutral-residues").sources] == [
        ("new", 0.8, 0.1),
        ("known", 0.0, str(tmp_path / "known.jsonl")),
        ("other", pytest.approx(0.2), 0.0),
    ]


def test_steps_or_tokens_or_bytes(tmp_path: Path) -> None:
    study = written(tmp_path, SMALLEST.replace("steps: 10", "tokens: 5000\nbatch: 2\nlength: 100")).config
    assert (study.run_steps, study.run_tokens) == (25, 5000)
    loaded = written(tmp_path, SMALLEST.replace("steps: 10", "bytes: 5000"))
    config = config_of(loaded, "neutral-residues")
    # Each run counts its own steps, and evaluates at the last one alone.
    assert (config.bytes, config.steps) == (5000, None) and config.evaluate_every > 10**6
    assert loaded.config.run_steps is None and loaded.config.budget["bytes"] == 5000
    assert 0 < recalled_by(loaded.config).tokens <= 100_000


# Losses of a run by its rate, as (new, original).
Law = Callable[[float], tuple[float, float]]


def extended(tmp_path: Path, law: Law, more: str = "") -> tuple[list[float], str]:
    """The rates that runs of such losses come to."""
    study = written(tmp_path, SMALLEST + "peers: false\n" + more).config
    method, remedy = study.entries[0]
    losses: dict[Run, tuple[float, float]] = {}
    for _ in range(60):
        runs = list(runs_left(study, losses))
        if not runs:
            found = rates_of(study, method, remedy, losses)
            assert found.settled and len(losses) == study.seeds * len(found.rates)
            return list(found.rates), found.open_end
        losses[runs[0]] = law(runs[0].rate)
    raise AssertionError("it never ends")


def learns_best_at(best: float) -> Law:
    return lambda rate: (5 + abs(math.log(rate / best)), 2 + rate)


def test_rates_extend_until_the_best_is_inside(tmp_path: Path) -> None:
    given = [1e-4, 3e-4, 1e-3, 3e-3]
    assert extended(tmp_path, learns_best_at(1e-3)) == (given, "")
    assert extended(tmp_path, learns_best_at(1e-2)) == ([*given, 1e-2, 3e-2], "")
    assert extended(tmp_path, learns_best_at(1e-5)) == ([3e-6, 1e-5, 3e-5, *given], "")
    # One that diverges at high rates, and one that still learns where the most rates are made.
    assert extended(tmp_path, lambda rate: (5 - rate, 2.0) if rate < 2e-3 else (math.inf, math.inf)) == (given, "")
    rates, why = extended(tmp_path, lambda rate: (5 - rate, 2.0), "most_rates: 6\n")
    assert rates == [*given, 1e-2, 3e-2] and "beyond its highest rate, 0.03" in why
    rates, why = extended(tmp_path, lambda rate: (math.inf, math.inf), "most_rates: 5\n")
    assert rates == [3e-5, *given] and "lowest" in why
    # Other seeds are made at the rates that the first one came to.
    assert extended(tmp_path, learns_best_at(1e-2), "seeds: 3\n") == ([*given, 1e-2, 3e-2], "")


def test_a_pilot_makes_rounds_that_treat_all_rows_alike(tmp_path: Path) -> None:
    """The middle rate of every method first; a further seed is one round of all rates."""
    study = written(tmp_path, SMALLEST + "seeds: 2\n").config
    rounds = list(rounds_left(study, {}))
    methods = ["full", "lora", "partial", "neutral-residues"]
    assert [(run.method, run.rate) for run in rounds[0].runs] == [(method, 3e-4) for method in methods]
    assert [(len(each.runs), each.begun) for each in rounds] == [(4, True)] + [(4, False)] * 3
    assert left_by_seed(study, {}) == {0: 16, 1: 16}
    # What is finished keeps its turn: the next method's first run comes before the first one's second.
    done = dict.fromkeys(rounds[0].runs[:1] + rounds[1].runs[:2], (5.0, 2.0))
    left = list(rounds_left(study, done))
    assert left[0].runs == rounds[0].runs[1:] and [each.begun for each in left] == [True, True, False, False]
    whole = list(runs_left(study, {}))
    assert [run.method for run in whole[:5]] == ["full"] * 4 + ["lora"]
    assert set(whole) == {run for each in rounds for run in each.runs}
    # A second seed's round has what is left of it, once rates are known: of the best inside them.
    study = written(tmp_path, SMALLEST + "seeds: 2\npeers: false\n").config
    done = {run: learns_best_at(1e-3)(run.rate) for run in runs_left(study, {})}
    (second,) = rounds_left(study, done)
    assert len(second.runs) == 4 and not second.begun and {run.seed for run in second.runs} == {1}
    (rest,) = rounds_left(study, done | {second.runs[0]: (5.0, 2.0)})
    assert rest == (second.runs[1:], True)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("[neutral-residues]", "[neutral-residus]", r"study.yaml:5: method neutral-residus: .*did you mean `neutral-"),
        ("[neutral-residues]", "[{plan: pmoe, lora: {}}]", r"plan, full, lora and partial \(.*; plan and lora given"),
        ("[neutral-residues]", "[{plan: pmoe, rate: 3}]", r"study.yaml:5: unknown key `rate`; did you mean `rates`"),
        ("[neutral-residues]", "[{plan: pmoe, train: {optimizer: {lr: 1.0e-3}}}]", "come from the study's `rates`"),
        ("[neutral-residues]", "[pmoe, pmoe]", "two methods are called 'pmoe'"),
        ("[neutral-residues]", "[{plan: pmoe, remedies: [recal]}]", "no remedy `recal`; did you mean `recalled`"),
        ("steps: 10", "steps: 10\nrates: [1.0e-3]", "1 different rate given; a frontier needs at least 4"),
        ("steps: 10", "steps: 10\nrates: [1.0e-4, 1.0e-3, 1.0e-2, 1.0e-1]", "are a factor 10 apart; give steps of 2"),
        ("steps: 10", "steps: 10\nrates: [0.1, 0.3, 0.9, 2]", "rate 2 is no learning rate"),
        ("steps: 10", "steps: 10\nbytes: 10", "one of `steps`, `tokens` and `bytes`"),
        ("[new.jsonl]", "[{path: new.jsonl, validation: 0.0}]", "losses are compared on held-out text"),
        ("[new.jsonl]", "[old.jsonl]", r"study.yaml:3: .*old.jsonl: no such file or folder; check the path"),
        ("new: [new.jsonl]\n", "", "no text to learn; give `new:`, or --new FILE"),
        ("[new.jsonl]", "[{path: new.jsonl, name: known}]", "two texts are called 'known'"),
        ("steps: 10", "steps: 10\nclaims: [{says: x, better: full, worse: lorra}]", "no method `lorra`; did you mean"),
        (
            "original: [known.jsonl]",
            "remedies: [{name: a, replay: {source: text}}]",
            r"replays text, and the study has none; give `original:` \(--original FILE\)",
        ),
        (
            "steps: 10",
            "steps: 10\nremedies: [{name: a, preserve: {}}]",
            "`preserve` teaches on original text, and nothing is replayed",
        ),
        (
            "steps: 10",
            "steps: 10\nremedies: [{name: a, replay: {share: 0}, preserve: {loss: [kl, fisher]}}]",
            "`preserve` teaches on original text, and nothing is replayed",
        ),
        (
            "steps: 10",
            "steps: 10\nremedies: [{name: a, preserve: {loss: fisher}}]",
            "fisher is estimated from original text, and there is none; add `replay: {}`, or `replay: {share: 0}`",
        ),
        (
            "steps: 10",
            "steps: 10\nremedies: [{name: a, replay: {share: 0}}]",
            "`replay.share` 0 is for `preserve: {loss: fisher}`",
        ),
    ],
)
def test_what_makes_no_fair_study_is_refused(tmp_path: Path, old: str, new: str, told: str) -> None:
    assert old in SMALLEST
    with pytest.raises(BadInput, match=told):
        written(tmp_path, SMALLEST.replace(old, new))


def test_a_method_sets_values_of_its_plan(tmp_path: Path) -> None:
    """Shipped or beside the study; errors name the method's line."""
    (tmp_path / "mine.yaml").write_text("surgeon: 1\noperations: [{op: widen_ffn, by: 64}]\n", encoding="utf-8")
    methods = """\
methods:
  - {name: moc, label: MoC, plan: mixture-of-control, set: {operations.0.rank: 8}}
  - {name: wider, plan: mine.yaml, set: {operations.0.by: 24}}
  - control-llm/dlerp8
"""
    start = SMALLEST.partition("methods")[0]
    loaded = written(tmp_path, start + methods)
    found = {method.called: method.words for method in loaded.config.methods}
    assert found == {"moc": "MoC", "wider": "wider", "control-llm-dlerp8": "control-llm-dlerp8"}
    assert loaded.plans["moc"].data()["operations"][0]["rank"] == 8
    assert loaded.plans["wider"].data()["operations"][0]["by"] == 24
    for method, why in (
        ("{plan: mixture-of-control, seed: 2}", "study.yaml:7: unknown key `seed`; did you mean `seeds`"),
        ("{plan: mixture-of-control, set: {operations.0.rnk: 8}}", "--set operations.0.rnk=8: unknown key `rnk`"),
        ("{full: true, set: {seed: 1}}", "study.yaml:7: .*`set` gives a plan other values, and the method is `full`"),
    ):
        with pytest.raises(BadInput, match=why):
            written(tmp_path, f"{start}methods:\n  - full\n  - {method}\n".replace("  - full\n", "  - copy\n"))


def test_shipped_studies_are_studies_and_no_plans(tmp_path: Path) -> None:
    for name in shipped_studies():
        assert not any(plan.startswith(("studies", "papers")) for plan in shipped_plans())
        texts = [tmp_path / "new.jsonl"]
        written(tmp_path)
        loaded = load_study(name, new=texts, original=[tmp_path / "known.jsonl"])
        # A paper's table has its own baselines alone.
        peers = {"full", "lora"} if name.startswith("papers/") else {"full", "lora", "partial"}
        assert {method.kind for method in loaded.config.all_methods} >= {*peers, "plan"}
        recalled_by(loaded.config)
    with pytest.raises(BadInput, match="neither a study nor the name of a shipped one; did you mean `quick`"):
        load_study("quik")
    # The option that is wrong is named, not the first.
    with pytest.raises(BadInput, match=r"^--new other=.*absent\.jsonl: "):
        load_study("quick", new=[*texts, f"other={tmp_path / 'absent.jsonl'}"], original=[tmp_path / "known.jsonl"])


def test_editors_get_a_schema() -> None:
    assert json_schema()["properties"]["methods"]["description"]
