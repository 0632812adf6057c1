"""train.yaml: what is refused, by file and line, and what the papers fill in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from surgeon.data.sources import check_source
from surgeon.errors import BadInput, Mistakes
from surgeon.operations import OPERATIONS
from surgeon.training.backends import ATTENTION, TRACKERS, missing_for_attention, missing_for_tracker
from surgeon.training.config.budget import budget_of, recorded_budget, trial_of
from surgeon.training.config.loading import LoadedConfig, load_config
from surgeon.training.config.settings import fitting_micro_batch, settle
from surgeon.training.preparing import trained_too

SMALLEST = """\
surgeon_train: 1
steps: 100
sources:
  - {name: fr, path: fr.jsonl, share: 0.9}
  - {name: en, path: en.jsonl, share: 0.1, role: original}
"""


def written(folder: Path, text: str) -> LoadedConfig:
    path = folder / "train.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path)


def test_a_small_config_gets_the_operations_values_and_small_steps(tmp_path: Path) -> None:
    loaded = written(tmp_path, SMALLEST)
    settings, notes = settle(loaded, ["insert_layers", "gated_adapters"], context=1024, processes=2)
    assert (settings.lr, settings.betas, settings.length, settings.batch) == (1e-2, (0.9, 0.95), 256, 8)
    assert settings.micro_batch * settings.accumulation * 2 == settings.batch
    assert settings.warmup_steps == 3
    assert notes[0].startswith("defaults of gated_adapters: lr 0.01, min_lr 0.0, schedule cosine, warmup 3, ")
    assert "batch 8, length 256 (Neutral Residues, " in notes[0]
    assert settle(loaded, ["insert_layers"], context=100, processes=1)[0].length == 100
    control, _ = settle(loaded, ["control_llm"], context=1024, processes=1)
    assert (control.lr, control.min_lr, control.weight_decay, control.clip) == (1e-3, 2e-4, 0.1 * 1e-3, 1.0)


# Where the numbers come from, in the words that the note begins with.
FROM = {
    "insert_layers": "1e-4, 64 sequences of 2048, as OpT-DeUS",
    "stack_layers": "SOLAR's paper gives none; OpT-DeUS, section 5.5: 1e-4",
    "control_llm": "Control LLM, section 3.4: ",
    "merge_branches": "Control LLM's rate",
    "gated_adapters": "Neutral Residues, section 4.1 and Table 8: 2e-4",
    "pmoe_experts": "PMoE, section 3.2.3: 3e-4",
    "mixture_of_control": "Mixture-of-Control, Tables 4 and 5: 3e-4",
    "grow_vocabulary": "ours, no paper's: ",
    "upcycle_experts": "ours, no paper's: ",
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_notes_name_the_operation_and_its_own_paper(operation: str, tmp_path: Path) -> None:
    loaded = written(tmp_path, SMALLEST.replace(", role: original", ""))
    _, notes = settle(loaded, ["mixture_of_control", operation], context=1024, processes=1)
    assert notes[0].startswith(f"defaults of {operation}: lr ") and f" ({FROM.get(operation, '')}" in notes[0]
    mixes = {"gated_adapters": "10%", "pmoe_experts": "1%"}.get(operation)
    said = f"no source has the role `original`; the paper of {operation} mixes in {mixes} of what the base knows"
    assert (said in notes) is (mixes is not None)


def test_a_lora_learns_at_ten_times_the_rate_of_all_weights(tmp_path: Path) -> None:
    rates = [
        settle(written(tmp_path, SMALLEST + more), [], context=64, processes=1)[0].lr
        for more in ("what: all\n", "lora: {rank: 4}\n")
    ]
    assert rates == [1e-4, 1e-3]


@pytest.mark.parametrize(
    ("minutes", "seconds", "more", "expected"),
    [
        # 250 tokens a second for ten minutes: 150,000 tokens, which 200 steps share as 512 each.
        (10, 512 / 250, "", (292, 4, 128)),
        # A hundred times as fast: 65,536 tokens a step.
        (10, 512 / 25_000, "", (228, 32, 2048)),
        # Whatever the speed, no step is larger than 131,072 tokens.
        (1000, 512 / 1e6, "", (457_763, 64, 2048)),
        # What the config says stays, and the rest goes by it.
        (10, 512 / 250, "batch: 2\n", (292, 2, 256)),
        (10, 512 / 250, "length: 64\n", (292, 8, 64)),
        (10, 512 / 250, "batch: 3\nlength: 10\n", (5000, 3, 10)),
        # A step that takes longer than all minutes is made once.
        (0.01, 20.0, "", (1, 4, 128)),
    ],
)
def test_minutes_become_steps_by_the_measured_speed(
    tmp_path: Path, minutes: float, seconds: float, more: str, expected: tuple[int, int, int]
) -> None:
    config = written(tmp_path, SMALLEST.replace("steps: 100", f"minutes: {minutes}") + more).config
    budget = budget_of(config, seconds=seconds, batch=4, length=128, context=4096, packs=True)
    assert budget == (minutes, *expected)
    assert recorded_budget(budget._asdict() | {"micro_batch": 2}, minutes) == budget
    assert recorded_budget(budget._asdict(), 2 * minutes) is None and recorded_budget({}, minutes) is None


def test_a_budget_stays_within_the_models_context_and_is_measured_again_where_its_step_is_much_larger(
    tmp_path: Path,
) -> None:
    config = written(tmp_path, SMALLEST.replace("steps: 100", "minutes: 10")).config
    budget = budget_of(config, seconds=512 / 25_000, batch=4, length=128, context=1000, packs=True)
    assert (budget.batch, budget.length) == (65, 1000)
    assert not budget.is_near(4, 128) and budget.is_near(16, 1024)
    first, second = trial_of(config, None), trial_of(config, budget)
    assert (first.batch, first.length, first.minutes) == (4, 128, None)
    assert (second.batch, second.length, second.minutes) == (65, 1000, None)
    # Texts with labels are not packed: only their steps are counted.
    assert budget_of(config, seconds=3.0, batch=32, length=512, context=512, packs=False) == (10, 200, 32, 512)


def test_fewer_sequences_at_a_time_make_more_micro_batches(tmp_path: Path) -> None:
    settings, _ = settle(written(tmp_path, SMALLEST + "batch: 24\n"), [], context=64, processes=1)
    assert (settings.micro_batch, settings.accumulation) == (8, 3)
    for most, expected in ((100, (8, 3)), (7, (4, 6)), (3, (2, 12)), (1, (1, 24))):
        fewer = fitting_micro_batch(settings, most)
        assert (fewer.micro_batch, fewer.accumulation) == expected


def test_an_operation_that_is_unknown_here_gets_values_that_no_paper_gave(tmp_path: Path) -> None:
    settings, notes = settle(written(tmp_path, SMALLEST), ["of_a_plugin"], context=64, processes=1)
    assert settings.lr == 5e-5
    assert any("defaults of of_a_plugin: " in note and "(no paper's but transformers'" in note for note in notes)


def test_every_default_can_be_overridden(tmp_path: Path) -> None:
    text = SMALLEST + (
        "batch: 12\nmicro_batch: 3\nlength: 16\n"
        "optimizer: {lr: 1e-3, min_lr: 1e-4, schedule: linear, warmup: 7, betas: [0.8, 0.9], weight_decay: 0.2,"
        " clip: 0}\n"
    )
    settings, notes = settle(written(tmp_path, text), ["control_llm"], context=64, processes=2)
    assert notes == []
    assert settings.to_json() == {
        "steps": 100,
        "seed": 0,
        "batch": 12,
        "micro_batch": 3,
        "accumulation": 2,
        "length": 16,
        "lr": 1e-3,
        "min_lr": 1e-4,
        "schedule": "linear",
        "warmup_steps": 7,
        "betas": [0.8, 0.9],
        "weight_decay": 0.2,
        "clip": 0.0,
    }


@pytest.mark.parametrize(
    "change, told",
    [
        (("share: 0.9", "share: 0.5"), "shares sum to 0.6; they must sum to 1"),
        (("role: original", "role: orginal"), "train.yaml:5: sources[1] (en): role 'orginal' is not known"),
        (("steps: 100", "step: 100"), "train.yaml:2: unknown key `step`; did you mean `steps`?"),
        (("share: 0.9", "shares: 0.9"), "train.yaml:4: unknown key `shares`; did you mean `share`?"),
        (("name: en", "name: fr"), "two sources are called 'fr'"),
        (
            ("steps: 100", "steps: 100\noptimizer: {lr: 0}"),
            "train.yaml:3: `optimizer.lr` is 0; it takes a number, above 0",
        ),
        (("steps: 100", "steps: 100\nwhat: frist"), "train.yaml:3: `what` is"),
        (("steps: 100", "steps: 100\nattention: spda"), "train.yaml:3: `attention` is spda; did you mean `sdpa`?"),
        (("steps: 100", "steps: 100\nreport_to: [tensorbord]"), "tensorbord: no tracker of that name; did you mean"),
        (
            ("steps: 100", "steps: 100\nreport_to: [all]"),
            "train.yaml:3: report_to[0]: all: no tracker of that name; known",
        ),
        ((SMALLEST, ""), "is empty; it needs `surgeon_train: 1`"),
        ((SMALLEST, "- a\n"), "not a list"),
    ],
)
def test_what_is_wrong_is_named_by_line(tmp_path: Path, change: tuple[str, str], told: str) -> None:
    with pytest.raises(BadInput) as caught:
        written(tmp_path, SMALLEST.replace(*change))
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "added, told",
    [
        ("length: 65\n", "`length` is 65, the model's context 64"),
        ("batch: 7\n", "no multiple of the 2 processes"),
        ("batch: 8\nmicro_batch: 3\n", "`micro_batch` 3 does not divide the 4 sequences"),
        ("optimizer: {lr: 1e-4, min_lr: 1e-3}\n", "is above the peak"),
        ("optimizer: {warmup: 101}\n", "is 101 steps, the run only 100"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(tmp_path: Path, added: str, told: str) -> None:
    with pytest.raises(BadInput, match=told):
        settle(written(tmp_path, SMALLEST + added), ["insert_layers"], context=64, processes=2)


def test_all_numbers_that_do_not_fit_are_named_at_once(tmp_path: Path) -> None:
    loaded = written(tmp_path, SMALLEST + "length: 65\noptimizer:\n  lr: 1e-4\n  min_lr: 1e-3\n  warmup: 101\n")
    with pytest.raises(Mistakes) as caught:
        settle(loaded, ["insert_layers"], context=64, processes=1)
    assert [line.partition(": `")[0] for line in caught.value.lines] == [
        f"{tmp_path}/train.yaml:{number}" for number in (6, 9, 10)
    ]


def test_rows_in_place_of_the_file_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "w1"}\n{"text": "w2"}\n')
    with pytest.raises(
        BadInput, match=r"a.jsonl: holds rows, not a training config; name it in one: .* and `sources:`"
    ):
        load_config(tmp_path / "a.jsonl")


def test_options_replace_values_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(SMALLEST, encoding="utf-8")
    settings = ["optimizer.lr=1e-4", "steps=7", "sources.fr.share=0.5", "sources.1.share=.5", "what=[0, 1]"]
    config = load_config(path, settings).config
    assert (config.optimizer.lr, config.steps, config.what) == (1e-4, 7, [0, 1])
    assert [source.share for source in config.sources] == [0.5, 0.5]
    assert load_config(path).config.steps == 100


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("optimizer.lrr=1", "--set optimizer.lrr=1: unknown key `lrr`; did you mean `lr`?"),
        ("optimiser.lr=1", "--set optimiser.lr=1: unknown key `optimiser`; did you mean `optimizer`?"),
        (
            "steps=ten",
            '--set steps=ten: `steps` is "ten"; it takes a whole number, at least 1 and at most 1,000,000,000',
        ),
        ("sources.fe.share=0.5", "--set sources.fe.share=0.5: `sources` has no entry `fe`; did you mean `fr`?"),
        ("steps.more=1", "--set steps.more=1: `steps` is a value, which has no keys; set it as it is"),
        ("steps", "--set steps: give a key and a value, as in --set optimizer.lr=1e-4"),
    ],
)
def test_an_option_that_sets_nothing_is_named(tmp_path: Path, setting: str, told: str) -> None:
    (tmp_path / "train.yaml").write_text(SMALLEST, encoding="utf-8")
    with pytest.raises(BadInput) as caught:
        load_config(tmp_path / "train.yaml", [setting])
    assert str(caught.value) == told


def test_missing_texts_are_named_by_the_configs_line_and_the_path_looked_at(tmp_path: Path) -> None:
    text = SMALLEST.replace("share: 0.9", "share: 0.9, validation: aside.jsonl")
    loaded = written(tmp_path, text)
    (tmp_path / "en.jsonl").mkdir()
    wrong = [
        (loaded.where("sources", n, key), why)
        for n in (0, 1)
        for key, why in check_source(loaded.config.sources[n], loaded)
    ]
    assert [where for where, _ in wrong] == [f"{tmp_path}/train.yaml:{line}: " for line in (4, 4, 5)]
    assert wrong[0][1] == f"source fr: {tmp_path}/fr.jsonl: no such file or folder; check the path"
    assert wrong[1][1] == f"source fr: {tmp_path}/aside.jsonl: no such file or folder; check the path"
    assert "no .jsonl, .json, .txt, .parquet in this folder" in wrong[2][1]


def test_held_out_text_that_trains_is_said(tmp_path: Path) -> None:
    """Its path, a copy of it, or another source's; not where the source is only measured."""
    for name, text in {"fr": "w1", "copy": "w1", "en": "w2"}.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": text}))
    for aside in ("fr.jsonl", "./copy.jsonl", "en.jsonl"):
        (note,) = trained_too(written(tmp_path, SMALLEST.replace("0.9", f"0.9, validation: {aside}")))
        other = "en" if aside == "en.jsonl" else "fr"
        assert f"source fr: its held-out text is one that source {other} trains on" in note
    (note, _) = trained_too(written(tmp_path, SMALLEST.replace("en.jsonl", "fr.jsonl")))
    assert "source fr: its held-out text is one that source en trains on" in note
    only_measured = SMALLEST.replace("0.9", "1").replace("0.1", "0, validation: en.jsonl")
    assert not [*trained_too(written(tmp_path, only_measured)), *trained_too(written(tmp_path, SMALLEST))]


def test_a_data_set_of_the_hub_is_led_to_its_form(tmp_path: Path) -> None:
    loaded = written(tmp_path, SMALLEST.replace("fr.jsonl", "org/data"))
    ((_, why),) = check_source(loaded.config.sources[0], loaded)
    assert why.endswith("/org/data: no such file or folder; check the path (a dataset of the Hub is dataset:org/data)")
    for address in (
        "https://huggingface.co/datasets/org/data",
        "hf://datasets/org/data/a.jsonl",
        "hf:org/data",
        "s3://bucket/a.jsonl",
    ):
        with pytest.raises(BadInput, match=r"train.yaml:4: .*is an address: write dataset:USER/NAME for a dataset"):
            written(tmp_path, SMALLEST.replace("fr.jsonl", f'"{address}"'))


def test_names_of_transformers_are_known_before_it_is_loaded() -> None:
    from transformers.integrations import INTEGRATION_TO_CALLBACK
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    assert set(INTEGRATION_TO_CALLBACK) <= set(TRACKERS)
    own = {name for name in type(ALL_ATTENTION_FUNCTIONS)._global_mapping if not name.startswith("paged|")}
    assert own | {"eager"} <= set(ATTENTION)


def test_an_attention_that_a_program_registered_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    with pytest.raises(BadInput, match="`attention` is mine; known: eager, sdpa"):
        written(tmp_path, SMALLEST + "attention: mine\n")
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "mine", lambda *_given, **_named: None)
    assert written(tmp_path, SMALLEST + "attention: mine\n").config.attention == "mine"
    assert written(tmp_path, SMALLEST + "attention: kernels-community/flash-attn2\n").config.attention


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    there: set[str] = set()
    monkeypatch.setattr("importlib.util.find_spec", lambda module: module if module in there else None)
    assert missing_for_attention("sdpa") == missing_for_attention(None) == missing_for_attention("mine") == ""
    assert missing_for_attention("flash_attention_2") == (
        "`attention` is flash_attention_2, which needs one of the Python modules flash_attn or kernels, and none is"
        " installed; install it, or use sdpa"
    )
    assert "needs the Python module kernels" in missing_for_attention("kernels-community/flash-attn2")
    there |= {"kernels", "dagshub", "tensorboardX"}
    assert missing_for_attention("flash_attention_2") == missing_for_tracker("tensorboard") == ""
    assert missing_for_tracker("dagshub") == (
        "`report_to`: dagshub needs the Python module mlflow, which is not installed; install it, or leave dagshub out"
    )


def test_prompts_that_are_none_are_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text('[\n  "w1",\n  "w2"\n]\n')
    text = SMALLEST.replace("path: fr.jsonl", "generate: {tokens: 99, prompts: rows.json}")
    loaded = written(tmp_path, text)
    ((key, why),) = check_source(loaded.config.sources[0], loaded)
    said = "JSON without a text `prompt` in each line; write one prompt a line, as plain text or as"
    assert (key, why) == ("generate", f'source fr: {tmp_path}/rows.json: {said} {{"prompt": …}}')
