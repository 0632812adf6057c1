"""Validators that weigh several keys against each other: their own sentence is printed as it is, after file and line.

The cases are complete: every sentence that a validator of the plan, of its parts and of the other config files can
raise must be seen in one of them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surgeon.errors import BadInput
from surgeon.lab.courses.config.loading import load_tasks
from surgeon.lab.evaluation.open_texts import open_texts
from surgeon.plan.plan import load_plan
from surgeon.training.config.loading import load_config
from tests.house import PACKAGE

VALIDATING = [
    *sorted(file for room in ("operations", "edits") for file in (PACKAGE / room).glob("*.py")),
    PACKAGE / "common" / "schema.py",
    PACKAGE / "data" / "specs.py",
    PACKAGE / "training" / "config" / "schema.py",
    PACKAGE / "lab" / "courses" / "config" / "schema.py",
    PACKAGE / "lab" / "evaluation" / "open_texts.py",
]

CONTROL = "op: control_llm, layers: all"
FUSION = "op: insert_layers, where: all, init: {kind: ot_fusion"

# (operation, its key in messages, the sentence)
OPERATIONS = [
    (f"{CONTROL}, interpolator: {{alpha: 0}}", "`alpha` 0 leaves the expanded branch out, which would never train"),
    (
        f"{CONTROL}, interpolator: {{kind: moe, inference_alpha: 0.5}}",
        "`inference_alpha` needs one α for all tokens (",
    ),
    (f"{CONTROL}, interpolator: {{kind: dlerp, alpha: 1}}", "`alpha` must be below 1 where `dlerp` learns it"),
    (f"{CONTROL}, expansion: stack, divergence: {{}}", "`divergence` has no meaning with `expansion: stack`, which"),
    (
        f"{CONTROL}, interpolator: {{kind: proj}}, divergence: {{kind: none}}",
        "interpolator `proj` projects for the divergence, which is `none`: use `lerp`",
    ),
    ("op: pad_to", "give at least one of `tensor_parallel`, `multiple_of` and `vocabulary`"),
    ("op: gated_adapters", "give either `extra_weights` (a share, such as 0.2) or `size`, not both or neither"),
    (
        "op: gated_adapters, size: 8, local_loss: {kind: cross_entropy}",
        "local_loss `cross_entropy` classifies domains by a sigmoid gate: write `gate: sigmoid`",
    ),
    (
        "op: gated_adapters, size: 8, local_loss: [{kind: l1}, {kind: l1}]",
        "`local_loss` lists one kind twice",
    ),
    (
        "op: insert_layers, where: {least: 1, text: en.jsonl}, count: 2, init: copy",
        "`count` has no meaning with `least`, which says how many layers are chosen",
    ),
    ("op: stack_layers, bottom: 0.5", "give `bottom` and `top` (two overlapping copies), or `times` (how often"),
    ("op: stack_layers, times: 2, top: 0.5", "give `bottom` and `top` (two overlapping copies), or `times` (how often"),
    (
        "op: stack_layers, bottom: 1, top: 1, range: [0, 1]",
        "give `bottom` and `top` (two overlapping copies), or `times`",
    ),
    ("op: stack_layers, slices: [[0, 2]], times: 2", "give `bottom` and `top` (two overlapping copies), or `times`"),
    ("op: stack_layers, slices: [[2, 2]]", "a slice is [first, end], without its end"),
    (
        "op: stack_layers, slices: [[0, 10000], [0, 1]]",
        "a slice is [first, end], without its end; all hold 10000 layers at most",
    ),
    (
        "op: insert_layers, where: {every_period: 1}, per_gap: 2, init: {kind: copy}",
        "`per_gap` has no meaning with `every_period`: each gap gets a whole period",
    ),
    (
        "op: insert_layers, where: {every_period: 1}, init: {kind: average}",
        "init average is made from both sides of a gap, a whole period from the one below it:",
    ),
    ("op: trim_vocabulary", "name what stays: `text`, `tokens` or `scripts`, or several of them"),
    (
        "op: trim_vocabulary, tokens: [a], most: 3",
        "`least` and `most` count tokens of `text`; name one",
    ),
    (
        "op: grow_vocabulary, special: [' ']",
        "' ': write a token of 1 to ",
    ),
    (
        "op: grow_vocabulary, special: [<a>], added: [<a>]",
        "'<a>': 2 times in `special` and `added`; list it once",
    ),
    (
        "op: grow_vocabulary",
        "empty, so there is nothing to add: name words in `tokens`, or `special` or `added` tokens",
    ),
    (
        "op: grow_vocabulary, tokens: {learn: a.txt, count: 3}",
        "`how: unseen` needs `keep`, the text that is to tokenise as before",
    ),
    (
        "op: grow_vocabulary, tokens: {learn: a.txt, count: 3, keep: b.txt, how: appended}",
        "`keep` has no meaning with `how: ",
    ),
    ("op: upcycle_experts, experts: 2, top_k: 3", "`top_k: 3` of 2 experts: a token cannot take more than there are"),
    ("op: upcycle_experts, attention: average", "`attention: average` is of other models; list them in `experts`"),
    ("op: upcycle_experts, experts: [a, b]", "`experts` of other models need `form: copies`: beside a shared"),
    ("op: upcycle_experts, form: copies, experts: [base]", "`experts` is a list of 1: give 2 to 1024"),
    ("op: upcycle_experts, form: copies, experts: [base, ' ']", "`experts` has an empty name; write a folder"),
    ("op: upcycle_experts, experts: 3, router: {prompts: [[a], [b]]}", "`prompts` has 2 lists for 3 experts; give one"),
    (
        "op: upcycle_experts, experts: 2, router: {prompts: [[a], [b]], negative_prompts: [[c]]}",
        "`negative_prompts` has 1 lists for 2 experts; give one for each, `[]` for none",
    ),
    ("op: upcycle_experts, noise_share: 0.1", "`noise_share` has no meaning with `init: copy`"),
    ("op: upcycle_experts, init: noise, drop: 0.1", "`drop` has no meaning with `init: noise`"),
    ("op: drop_layers", "give either `layers` (which go) or `count` (how many, chosen on `text`)"),
    ("op: drop_layers, count: 2", "`count` needs `text`: which layers matter least is measured on it"),
    (
        "op: drop_layers, layers: [1], by: loss",
        "`by: loss` chooses layers; with `layers` it has no meaning",
    ),
    ("op: drop_layers, layers: [1], candidates: 2", "`candidates` is of `by: loss` only"),
    (
        "op: drop_layers, layers: [1], merge: 2",
        "`merge`, `threshold`, `interval` and `range` are of `by: laco` only",
    ),
    (
        "op: drop_layers, count: 2, text: en.jsonl, by: laco, range: [3, 3]",
        "`range: [3, 3]`: give [lowest, highest], two layers at least",
    ),
    ("op: drop_experts", "give either `experts` (which go) or `count` (how many, chosen on `text`)"),
    ("op: drop_experts, count: 2", "`count` needs `text`: which experts matter least is measured on it"),
    ("op: drop_experts, experts: [1], by: loss", "`by` chooses experts; with `experts` it has no meaning"),
    ("op: add_experts", "give one of `times` (as many times), `count` (so many more) and `experts` (copies of these)"),
    (
        "op: add_experts, times: 2, how: zero, top_k: grown",
        "`how: zero` does not change what a token takes; leave `top_k` out",
    ),
    (
        "op: add_experts, count: 2, top_k: grown",
        "`top_k: grown` needs `times`: as many copies of each expert, nothing to choose",
    ),
    ("op: widen_hidden", "give either `to` (the new hidden_size) or `times` (how many times as wide)"),
    ("op: widen_ffn, by: 8, to: 64", "give either `to` (the new width) or `by` (how many neurons more)"),
    ("op: mixture_of_control, sites: [ffn, ffn]", "`sites` names a site twice"),
]


def said(load: Callable[[Path], Any], path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BadInput) as caught:
        load(path)
    assert "\n" not in str(caught.value) and "it should be" not in str(caught.value)
    return str(caught.value)


def of_operation(operation: str, folder: Path) -> str:
    plan = (
        f"surgeon: 1\noperations:\n  - {{op: insert_layers, where: all, init: {{kind: copy}}}}\n  - {{{operation}}}\n"
    )
    return said(load_plan, folder / "plan.yaml", plan)


TRAIN = "surgeon_train: 1\nsteps: 4\nsources:\n"
TASKS = "surgeon_continual: 1\ntrain: {steps: 4}\ntasks:\n"
DATA = "surgeon_data: 1\nsources:\n"
LAW = "  - {name: law, sources: [{path: law.txt}]}\n"
LABELS = f"{TRAIN}  - {{name: a, path: a.jsonl, share: 1, kind: labels}}\n"
Load = Callable[[Path], Any]

# (how it is read, the text, the line, what the entry is called, the sentence)
CONFIGS: list[tuple[Load, str, int, str, str]] = [
    (
        load_config,
        f"epochs: 1\n{TRAIN}  - {{name: a, path: a.txt, share: 1}}\n",
        1,
        "",
        "give `steps`, or `epochs`, `bytes` or `minutes` from which they are computed, and no two of them",
    ),
    (
        load_config,
        f"what: base\nlora: {{rank: 4}}\n{TRAIN}  - {{name: a, path: a.txt, share: 1}}\n",
        1,
        "",
        "`what` and `lora` exclude each other",
    ),
    (
        load_config,
        f"keep_best: b\n{TRAIN}  - {{name: a, path: a.txt, share: 1, validation: 0.5}}\n",
        1,
        "",
        "`keep_best` names 'b', no source that holds text out; those that do: a",
    ),
    (
        load_config,
        f"{TRAIN}  - {{name: a, path: a.txt, share: 0.5}}\n",
        1,
        "",
        "the sources' shares sum to 0.5; they must",
    ),
    (
        load_config,
        TRAIN + 2 * "  - {name: a, path: a.txt, share: 0.5}\n",
        1,
        "",
        "two sources are called 'a'; names must differ",
    ),
    (
        load_config,
        f"{TRAIN}  - {{name: a, path: 'dataset:b', share: 1}}\n",
        4,
        "sources[0] (a): ",
        "path 'dataset:b' names no dataset of the Hub: write dataset:USER/NAME",
    ),
    (
        load_config,
        f"{TRAIN}  - {{name: a, path: 'https://a.b/c', share: 1}}\n",
        4,
        "sources[0] (a): ",
        "path 'https://a.b/c' is an address: write dataset:USER/NAME for a dataset of the Hub",
    ),
    (
        load_config,
        f"{TRAIN}  - {{name: a, path: a.txt, share: 1, generate: {{tokens: 100}}}}\n",
        4,
        "sources[0] (a): ",
        "give either `path` or `generate`",
    ),
    (
        load_config,
        f"{TRAIN}  - {{name: a, field: body, share: 1, generate: {{tokens: 100}}}}\n",
        4,
        "sources[0] (a): ",
        "`field`, `split` and files of `validation` are for texts that are there, not `generate`",
    ),
    (
        load_config,
        f"{TRAIN}  - {{name: a, share: 1, kind: labels, generate: {{tokens: 100}}}}\n",
        4,
        "sources[0] (a): ",
        "`generate` writes texts without labels; give a `path`",
    ),
    (
        load_config,
        f"{TRAIN}  - {{name: a, share: 1, kind: text, generate: {{tokens: 100, prompts: template}}}}\n",
        4,
        "sources[0] (a): ",
        "`prompts: template` makes chats (`kind: chat`), `begin` texts; change one of them",
    ),
    (
        load_config,
        f"{TRAIN}  - {{name: a, path: a.txt, revision: main, share: 1}}\n",
        4,
        "sources[0] (a): ",
        "`revision` is for a path of the form dataset:USER/NAME",
    ),
    (
        load_config,
        f"{TRAIN}  - {{name: a, path: a.txt, share: 1, role: old}}\n",
        4,
        "sources[0] (a): ",
        "role 'old' is not known: use original, new or task:NAME",
    ),
    (
        load_config,
        f"{TRAIN}  - {{name: a, path: a.txt, share: 1, validation: 1.5}}\n",
        4,
        "sources[0] (a): ",
        "validation must be a share of at least 0 and below 1, or a file",
    ),
    (
        load_config,
        f"{LABELS}  - {{name: b, path: b.txt, share: 0}}\n",
        1,
        "",
        "source 'b' is of the kind text, others have labels; one run trains one task",
    ),
    *(
        (load_config, f"preserve: {{{given}}}\n" + TRAIN + "  - {name: a, path: a.txt, share: 1}\n", 1, "", sentence)
        for given, sentence in (
            ("loss: [kl, kl]", "`loss` names kl twice; give each term once"),
            ("loss: [kl], weight: {fisher: 2}", "`weight` is given for fisher, which `loss` does not"),
            ("loss: [kl, fisher], weight: 2", "`weight` 2 is one number for two terms, whose sizes differ; give it by"),
            ("loss: fisher, temperature: 2", "`temperature` is for a teacher, and fisher has none; leave it out"),
            ("sequences: 8", "`sequences` is for fisher, which `loss` does not name; leave it out"),
        )
    ),
    (
        load_config,
        f"{TRAIN}  - {{name: a, path: a.txt, share: 1, counted: false}}\n",
        1,
        "",
        "source 'a' has `counted: false`, and no teacher of `preserve` teaches on it, so it teaches nothing; leave",
    ),
    (load_config, f"{LABELS}answers: shipped\n", 1, "", "`answers` compares what a model writes, and with labels it"),
    (load_config, f"{LABELS}preserve: {{}}\n", 1, "", "`preserve` holds next tokens to the base's, which texts with"),
    (
        load_config,
        f"bytes: 9\n{LABELS}".replace("steps: 4\n", ""),
        1,
        "",
        "`bytes` counts text that a language model predicts",
    ),
    (
        load_config,
        LABELS.replace("steps: 4", "bytes: 4"),
        1,
        "",
        "`bytes` counts text that a language model predicts; with labels give `epochs` or `steps`",
    ),
    (load_config, f"{LABELS}labels: [a, b, a]\n", 1, "", "`labels` names 'a' twice; names must differ"),
    (
        load_config,
        f"{TRAIN}  - {{name: a, path: a.jsonl, share: 1}}\nwhat: head\n",
        1,
        "",
        "`what: head` is for texts with labels; give every source `kind: labels`, or leave it out",
    ),
    (
        load_config,
        f"sharding: fsdp\nlora: {{dora: true}}\n{TRAIN}  - {{name: a, path: a.jsonl, share: 1}}\n",
        1,
        "",
        "`lora.dora` measures whole rows, which `sharding` takes apart; leave one of them out",
    ),
    (load_config, f"{LABELS}what: mtp\n", 5, "", "`what: mtp` is gone: train MTP layers with a trainer that runs"),
    (
        load_config,
        f"{LABELS}cross_entropy: chunked\n",
        1,
        "",
        "`cross_entropy` is for language models; leave it",
    ),
    (
        open_texts,
        DATA + 2 * "  - {name: a, path: a.txt}\n",
        1,
        "",
        "two sources are called 'a'; names must differ",
    ),
    (
        load_tasks,
        TASKS + "  - {name: law, sources: [{path: a.txt, validation: 0.0}]}\n",
        4,
        "tasks[0] (law): ",
        "validation must be a share above 0 and below 1, or a file: performance is measured on it",
    ),
    (
        load_tasks,
        TASKS + "  - {name: law, sources: [{path: a.txt, role: original}]}\n",
        4,
        "tasks[0] (law): ",
        "a task needs a source of the role `task`",
    ),
    (
        load_tasks,
        TASKS + "  - {name: law, sources: [{path: a.txt, share: 0.5}]}\n",
        4,
        "tasks[0] (law): ",
        "the sources' shares sum to 0.5; they must sum to 1",
    ),
    (load_tasks, TASKS + 2 * LAW, 1, "", "two tasks or general sources are called 'law'; names must differ"),
    (
        load_tasks,
        f"{TASKS}{LAW}  - {{name: tax, sources: [{{path: a.txt, name: law}}]}}\n",
        1,
        "",
        "two sources are called 'law'; give one of them another `name:`",
    ),
    (
        load_tasks,
        TASKS + "".join(f"  - {{name: t{n}, sources: [{{path: a.txt}}]}}\n" for n in range(101)),
        1,
        "",
        "101 sources; a continual run takes 100 at most",
    ),
    (load_tasks, f"plan: none\n{TASKS}{LAW}", 1, "", "the first task needs a plan: there is nothing yet"),
    (load_tasks, f"surgeon_continual: 1\ntasks:\n{LAW}", 1, "", "task law has no `steps`: say so many under `train:`"),
    (
        load_tasks,
        f"surgeon_continual: 1\ntrain: {{steps: 2, epochs: 1}}\ntasks:\n{LAW}",
        2,
        "",
        "give `steps` or `epochs`, not both (null takes a key away)",
    ),
    (
        load_tasks,
        f"surgeon_continual: 1\ntrain: {{epochs: 1}}\ntasks:\n{LAW}{LAW.replace('law', 'tax')}",
        1,
        "",
        "task tax has `epochs` and replays earlier tasks, whose text would count too; give `steps`, or `replay: 0`",
    ),
    (
        load_tasks,
        f"surgeon_continual: 1\ntrain: {{steps: 1, keep_best: lwa}}\ntasks:\n{LAW}",
        1,
        "",
        "task law: `keep_best` names 'lwa'; texts held out by then: law",
    ),
]


@pytest.mark.parametrize(("operation", "sentence"), OPERATIONS)
def test_a_sentence_about_an_operation_is_printed_as_it_is(operation: str, sentence: str, tmp_path: Path) -> None:
    op = operation.split(",")[0].removeprefix("op: ")
    start = f"{tmp_path}/plan.yaml:4: operations[1] ({op}): {sentence}"
    assert of_operation(operation, tmp_path).startswith(start)


def test_the_line_is_that_of_the_part_that_the_sentence_is_about(tmp_path: Path) -> None:
    plan = "surgeon: 1\noperations:\n  - op: control_llm\n    layers: all\n    interpolator:\n      alpha: 0\n"
    told = said(load_plan, tmp_path / "plan.yaml", plan)
    assert told.startswith(f"{tmp_path}/plan.yaml:5: operations[0] (control_llm): `alpha` 0 leaves the expanded")


@pytest.mark.parametrize(("load", "text", "line", "entry", "sentence"), CONFIGS)
def test_a_sentence_of_a_config_is_printed_as_it_is(
    load: Load, text: str, line: int, entry: str, sentence: str, tmp_path: Path
) -> None:
    told = said(load, tmp_path / "file.yaml", text)
    assert told.startswith(f"{tmp_path}/file.yaml:{line}: {entry}{sentence}")


def raised_sentences() -> list[str]:
    """What validators raise, as patterns: f-strings with anything where something is filled in."""
    found = []
    for file in VALIDATING:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Raise)
                and isinstance(node.exc, ast.Call)
                and ast.unparse(node.exc.func) == "ValueError"
            ):
                (sentence,) = node.exc.args
                parts = sentence.values if isinstance(sentence, ast.JoinedStr) else [sentence]
                words = [re.escape(str(part.value)) if isinstance(part, ast.Constant) else ".*" for part in parts]
                found.append("".join(words))
    return found


def test_every_validator_has_its_case(tmp_path: Path) -> None:
    seen = [of_operation(operation, tmp_path) for operation, _ in OPERATIONS]
    seen += [said(load, tmp_path / "file.yaml", text) for load, text, *_ in CONFIGS]
    sentences = raised_sentences()
    assert len(sentences) >= 29
    for sentence in sentences:
        assert any(re.search(sentence, told) for told in seen), sentence
