"""transformers' own tests of a model and of its generation, run on outputs beside their base.

    python -m benchmarks.transformers_suite --tests PATH [--only llama …] [--outputs gate …] [--test NAME …]
    python -m benchmarks.transformers_suite --page

PATH is a folder with transformers' `tests` in it: the unpacked sdist of the installed version
(`pip download transformers==VERSION --no-binary :all: --no-deps`), which has `test_modeling_common.py` and the like
alone, with `causal_lm_tester.py` and the folders `generation`, `exporters`, `models` and `utils` put in from a checkout
of its sources. `parameterized` and `httpx` must be installed; nothing is downloaded.

The base is the model of transformers' own tester, saved; each output is a plan applied to it. The tests then get the
classes that the output's folder ships, and the config that it holds, with the tester's sizes. What a folder of tests
cannot import (several devices) and pipelines, which need the Hub, are left out for base and outputs alike. A test that
fails is run twice more and counts as passed if it then passes, as some are flaky. With `--test` these tests alone run,
failures are shown in full and nothing is written; else results/transformers_suite_VERSION.md is, from this and earlier
runs (a `.jsonl` beside it).
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import types
import unittest
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# A page for each version of transformers.
PAGE = HERE / "results" / f"transformers_suite_{version('transformers')}.md"
RECORD = PAGE.with_suffix(".jsonl")
# Which sources the newest rows took what the sdist lacks from; each page names its own.
CHECKOUT = "5.15.0.dev0"

# By what the table calls a base: the module of its tests, its test case there.
BASES: Mapping[str, tuple[str, str]] = {
    "llama": ("llama", "LlamaModelTest"),
    "qwen3_moe": ("qwen3_moe", "Qwen3MoeModelTest"),
    "gemma3": ("gemma3", "Gemma3TextModelTest"),
    "qwen3_next": ("qwen3_next", "Qwen3NextModelTest"),
}
_ADAPTERS = {"op": "gated_adapters", "size": 8}
_SLOTS = {"op": "pmoe_experts", "rank": 2, "slots": 2, "threshold": 1}
_CONTROL = {"op": "control_llm", "layers": [1]}
_STATES = {"op": "mixture_of_control", "rank": 4, "top_k": 1}
_GATE = {"op": "domain_gate"}
OUTPUTS: Mapping[str, list[dict[str, Any]]] = {
    "base": [],
    "native insertion": [{"op": "insert_layers", "where": {"after": [1]}, "init": {"kind": "copy"}}],
    "adapters": [_ADAPTERS],
    "slots": [_SLOTS],
    "control": [_CONTROL],
    "states": [_STATES],
    "gate": [_ADAPTERS, _GATE],
    "all together": [_CONTROL, _ADAPTERS, _SLOTS, _STATES, _GATE],
}
# Mixins of tests on several devices, and of pipelines.
LEFT_OUT = {
    "test_fsdp_mixin": "FSDPTesterMixin",
    "test_tensor_parallel_mixin": "TensorParallelTesterMixin",
    "test_expert_parallel_mixin": "ExpertParallelTesterMixin",
    "test_pipeline_mixin": "PipelineTesterMixin",
}
# By the tester's name for a class: the auto class that finds it, and the table in which transformers names it.
HEADS = {
    "causal_lm_class": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    "question_answering_class": ("AutoModelForQuestionAnswering", "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES"),
    "sequence_classification_class": (
        "AutoModelForSequenceClassification",
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    ),
    "token_classification_class": (
        "AutoModelForTokenClassification",
        "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    ),
}
# The most that one test may take, on a machine that has other work too.
LIMIT_S = 900
# Why a test that the base passes cannot be passed: the tests, the outputs, the line.
EXPLAINED: tuple[tuple[tuple[str, ...], tuple[str, ...], str], ...] = (
    (
        ("test_num_layers_is_small",),
        ("native insertion", "control", "all together"),
        "the test allows the model of its own tester two layers, and the surgery adds one",
    ),
    (
        ("test_custom_4d_attention_mask",),
        ("states", "gate", "all together"),
        "several continuations of one text in a row, told apart by a 4-D mask, are refused where something is summed"
        " over each document",
    ),
    (
        ("test_training_overfit",),
        ("gate", "all together"),
        "a domain gate that was not fitted is closed outside of training, so that what was learned behind it has no"
        " part in what the test generates",
    ),
)


@dataclass
class Row:
    """What a model's tests gave; `failed` with the first line of each failure."""

    base: str
    output: str
    passed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


def native_case(tests: Path, base: str) -> Any:
    """transformers' test case of a base. Raises SystemExit where `tests` does not hold what it needs."""
    sys.path.insert(0, str(tests))
    for name, kind in LEFT_OUT.items():
        stand_in = types.ModuleType(f"tests.{name}")
        setattr(stand_in, kind, type(kind, (), {}))
        sys.modules[stand_in.__name__] = stand_in
    module, case = BASES[base]
    try:
        found = importlib.import_module(f"tests.models.{module}.test_modeling_{module}")
    except ImportError as error:
        raise SystemExit(f"{tests}: {error}; --help says what the folder must hold") from None
    return getattr(found, case)


def native_tester(case: Any) -> Any:
    """The tester of a test case, with the native classes."""
    made = case("test_model")
    made.setUp()
    return made.model_tester


def made_output(tester: Any, output: str, folder: Path) -> tuple[Path, Path]:
    """The tester's model saved, and a plan applied to it: both folders."""
    import torch

    import surgeon

    torch.manual_seed(0)
    config = tester.get_config()
    tester.causal_lm_class(config).save_pretrained(folder / "base")
    (folder / "plan.yaml").write_text(json.dumps({"surgeon": 1, "operations": OUTPUTS[output]}), encoding="utf-8")
    surgeon.apply(str(folder / "plan.yaml"), str(folder / "base"), folder / "output")
    return folder / "base", folder / "output"


def shipped_classes(output: Path, tester: Any) -> dict[str, Any]:
    """The classes that an output's folder names, by the tester's names for them; None for a head that it lacks."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    told = json.loads((output / "config.json").read_text()).get("auto_map")
    if told is None:
        return {name: getattr(tester, name) for name in ("config_class", "base_model_class", *HEADS)}
    autos = {
        "config_class": "AutoConfig",
        "base_model_class": "AutoModel",
        **{key: auto for key, (auto, _) in HEADS.items()},
    }
    found = {
        name: get_class_from_dynamic_module(told[auto], str(output)) if auto in told else None
        for name, auto in autos.items()
    }
    make_known(found)
    read_as_native(found["base_model_class"], tester.base_model_class)
    return found


def make_known(classes: Mapping[str, Any]) -> None:
    """Let the auto classes find shipped classes, and the tests, which go by names, know what they are."""
    import transformers
    from transformers.models.auto import modeling_auto

    config = classes["config_class"]
    transformers.AutoConfig.register(config.model_type, config)
    for name, (auto, mapping) in {"base_model_class": ("AutoModel", "MODEL_MAPPING_NAMES"), **HEADS}.items():
        if classes[name] is not None:
            getattr(transformers, auto).register(config, classes[name])
            getattr(modeling_auto, mapping)[config.model_type] = classes[name].__name__


def read_as_native(shipped: Any, native: Any) -> None:
    """Let what reads the source of a model's file (its year, the names of decorators) read the native one's."""
    original, module = inspect.getfile, sys.modules[shipped.__module__]

    def getfile(told: Any) -> str:
        ours = told is module or (isinstance(told, type) and told.__module__ == module.__name__)
        return original(native if ours else told)

    inspect.getfile = getfile


def tester_of(kind: Any, classes: Mapping[str, Any], base: Path, output: Path) -> Any:
    """transformers' tester `kind` with an output's classes and its config."""
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (base, output))
    own = {"model_type", "architectures", "auto_map", "dtype", "transformers_version"}
    changed = {key: value for key, value in after.items() if key not in own and before.get(key) != value}
    depth = after["num_hidden_layers"]

    class Tester(kind):  # type: ignore[misc]
        def __init__(self, parent: Any, **kwargs: Any) -> None:
            super().__init__(parent, **kwargs)
            self.native = kind(parent)
            self.num_hidden_layers = depth

        def get_config(self) -> Any:
            """The native tester's config, with what the surgery changed."""
            told = vars(self) | {"num_hidden_layers": self.native.num_hidden_layers}
            vars(self.native).update({key: value for key, value in told.items() if key not in ("native", *classes)})
            fields = self.native.get_config().to_dict()
            fields.pop("model_type")
            fields.pop("transformers_version", None)
            return self.config_class(**(fields | changed))

    for name, found in classes.items():
        setattr(Tester, name, found)
    # Without a class for a head, transformers' own would be looked up.
    Tester._verify_and_infer_model_attributes = classmethod(lambda cls: None)
    return Tester


def case_of(tests: Path, base: str, output: str, folder: Path) -> Any:
    """The test case of an output, made in `folder`; the base's own for `base`."""
    native = native_case(tests, base)
    if output == "base":
        return native
    tester = native_tester(native)
    before, after = made_output(tester, output, folder)
    classes = shipped_classes(after, tester)
    named = {"model_tester_class": tester_of(type(tester), classes, before, after)}
    if getattr(native, "_torch_compile_train_cls", None) is not None:
        named["_torch_compile_train_cls"] = classes["causal_lm_class"]
    return type(native.__name__, (native,), named)


def run_tests(case: Any, names: list[str], row: Row, *, shown: bool) -> None:
    """Run tests of a case, each up to three times where it is not known to fail, into a row."""
    case.setUpClass()
    for name in names:
        for _ in range(1 if explained(name, row.output) else 3):
            result = unittest.TestResult()
            with limited_to(LIMIT_S):
                case(name).run(result)
            wrong = [*result.errors, *result.failures]
            if not wrong:
                break
        if wrong:
            row.failed[name] = wrong[0][1].strip().splitlines()[-1][:300]
            if shown:
                print(name, wrong[0][1], flush=True)
        else:
            (row.skipped if result.skipped else row.passed).append(name)
    case.tearDownClass()


@contextmanager
def limited_to(seconds: int) -> Iterator[None]:
    """Let a test that never ends fail."""

    def end(*_: Any) -> None:
        raise TimeoutError(f"it took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def inner(tests: Path, base: str, output: str, only: list[str]) -> Row:
    """One row, in this process."""
    row = Row(base, output)
    with tempfile.TemporaryDirectory() as folder:
        case = case_of(tests, base, output, Path(folder))
        found = unittest.TestLoader().getTestCaseNames(case)
        names = [name for name in found if not only or any(told in name for told in only)]
        run_tests(case, names, row, shown=bool(only))
    return row


def explained(test: str, output: str) -> str | None:
    """The line that says why an output cannot pass a test; None where there is none."""
    return next((line for tests, outputs, line in EXPLAINED if test in tests and output in outputs), None)


def page(rows: Mapping[tuple[str, str], Row]) -> str:
    """The table, and each test that a base passes and an output of it does not."""
    lines = [
        "# transformers' own tests on outputs",
        "",
        "`python -m benchmarks.transformers_suite --tests PATH`, with transformers"
        f" {version('transformers')} and torch {version('torch')} on a CPU: the tests of every model and those of"
        " generation, on a base and on outputs of it, passed / failed / skipped. Tests of pipelines and of several"
        " devices are left out; what asks for the Hub fails on a base too. Tests that the sdist lacks were of a public"
        f" copy of {CHECKOUT}.",
        "",
        "| base | " + " | ".join(OUTPUTS) + " |",
        "|---" * (len(OUTPUTS) + 1) + "|",
    ]
    missed: dict[tuple[str, str], dict[str, list[str]]] = {}
    for base in (base for base in BASES if (base, "base") in rows):
        cells = []
        for output in OUTPUTS:
            row = rows.get((base, output))
            cells.append("" if row is None else f"{len(row.passed)} / {len(row.failed)} / {len(row.skipped)}")
            if row is None or (base, "base") not in rows:
                continue
            for name in sorted({*rows[base, "base"].passed} - {*row.passed}):
                missed.setdefault((name, reason(row, name)), {}).setdefault(base, []).append(output)
        lines.append(f"| {base} | " + " | ".join(cells) + " |")
    lines += ["", "## What a base passes and its output does not", ""]
    lines += ["| test | outputs | why |", "|---|---|---|"] if missed else ["Nothing."]
    for (name, why), found in sorted(missed.items()):
        places = "; ".join(f"{base}: {', '.join(outputs)}" for base, outputs in found.items())
        lines.append(f"| `{name}` | {places} | {why} |")
    return "\n".join(lines) + "\n"


def reason(row: Row, name: str) -> str:
    """Why a test is not passed: the reviewed line, or what it failed with."""
    found = "skipped" if name in row.skipped else row.failed.get(name, "not there")
    return explained(name, row.output) or f"not explained: {found}".replace("|", "\\|")


def read_rows() -> dict[tuple[str, str], Row]:
    """The rows of earlier runs."""
    kept = RECORD.read_text().splitlines() if RECORD.exists() else []
    return {(row.base, row.output): row for row in (Row(**json.loads(line)) for line in kept)}


def main(arguments: list[str]) -> int:
    """Run what is asked for; 1 where an output misses a test of its base that no line explains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=Path)
    parser.add_argument("--only", nargs="+", choices=BASES, default=[*BASES])
    parser.add_argument("--outputs", nargs="+", choices=OUTPUTS, default=[*OUTPUTS])
    parser.add_argument("--test", nargs="+", default=[])
    parser.add_argument("--page", action="store_true", help="the page alone, from the record")
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    told = parser.parse_args(arguments)
    if told.tests is None and not told.page:
        parser.error("--tests PATH is missing; --help says what it must hold")
    if told.inner:
        row = inner(told.tests.resolve(), told.only[0], told.outputs[0], told.test)
        print(json.dumps(asdict(row)))
        return 0
    rows = {} if told.test else read_rows()
    if told.page:
        PAGE.write_text(page(rows))
        return int("not explained" in page(rows))
    # What is compiled is kept from one row to the next, and apart from what other programs compile.
    with tempfile.TemporaryDirectory() as compiled:
        os.environ |= {"HF_HUB_OFFLINE": "1", "TORCHINDUCTOR_CACHE_DIR": compiled}
        run_rows(told, rows)
    return int("not explained" in page(rows))


def run_rows(told: argparse.Namespace, rows: dict[tuple[str, str], Row]) -> None:
    """Run what is asked for, each row in a process of its own, and write it down."""
    for base in told.only:
        for output in told.outputs:
            row = rows[base, output] = in_a_process(told.tests, base, output, told.test)
            print(f"{base}, {output}: {len(row.passed)} / {len(row.failed)} / {len(row.skipped)}", flush=True)
            if told.test:
                continue
            RECORD.write_text("".join(json.dumps(asdict(each)) + "\n" for each in rows.values()))
            PAGE.write_text(page(rows))


def in_a_process(tests: Path, base: str, output: str, only: list[str]) -> Row:
    """One row, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.transformers_suite", "--inner", "--tests", str(tests)]
    command += ["--only", base, "--outputs", output, *(["--test", *only] if only else [])]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise SystemExit(ran.stderr)
    *shown, row = ran.stdout.splitlines()
    if only:
        print("\n".join(shown))
    return Row(**json.loads(row))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
