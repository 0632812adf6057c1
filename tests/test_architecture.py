"""The plan of the house: the order of the rooms, in which every import runs down, and what may be imported when.

Imports inside functions and for types alone count: they are dependencies all the same.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import surgeon
from tests.house import HERE, PACKAGE, PINS, room_of

MODULES = HERE.modules
FILES = sorted(MODULES.values())
module_of, dependencies = HERE.module_of, HERE.dependencies

# Top-down, in the order in which data flows; a room imports rooms that stand below it here, and nothing else.
ORDER = (
    "__main__",
    "cli",
    "__init__",
    "lab/reports",
    "lab/studies",
    "lab/courses",
    "lab/learning",
    "lab/evaluation",
    "lab",
    "share",
    "training",
    "rework",
    "data",
    "writing",
    "verification",
    "manifest",
    "plan",
    "edits",
    "operations",
    "models",
    "blueprint",
    "anatomy",
    "transport",
    "checkpoint",
    "grafts",
    "common",
    "runtime",
    "errors",
    "_version",
)

# A room too large to be read as one list of files has rooms of its own, in an order too; files beside them stand above
# or below, as their imports say.
INNER = {
    "training": ("remedies", "objectives", "steps", "losses", "saved", "targets", "trainable", "processes", "config")
}

# Folders of data that can compute: what WITHOUT names they import inside functions alone, where they compute.
COMPUTING = ("blueprint/recipes", "operations", "edits")

# What rooms that work on bytes and data alone never import, not even inside a function, and where else that holds.
WITHOUT = {
    "plan": ("torch", "numpy", "transformers"),
    "operations": ("torch", "numpy", "transformers"),
    # What they measure by running a model stands in a folder of its own.
    **{f"edits/{file.name}": ("torch", "numpy", "transformers") for file in (PACKAGE / "edits").glob("*.py")},
    "blueprint": ("torch", "numpy", "transformers"),
    "manifest": ("torch", "numpy", "transformers"),
    # What describes families; what finds out about others builds their models.
    **{
        f"anatomy/{name}.py": ("torch", "numpy", "transformers")
        for name in (
            "__init__",
            "family",
            "decoders",
            "anatomy",
            "dissect",
            "grafted_config",
        )
    },
    "checkpoint": ("torch", "numpy", "transformers"),
    "transport": ("surgeon.checkpoint", "surgeon.runtime", "transformers"),
    "runtime": ("surgeon.common", "surgeon.errors"),
    "grafts": ("torch", "numpy", "transformers"),
    "rework": ("torch", "numpy", "transformers"),
    "share": ("torch", "numpy", "transformers"),
    **{f"{room}/config": ("torch", "numpy", "transformers") for room in ("training", "lab/courses", "lab/studies")},
    "training/backends.py": ("torch", "numpy", "transformers"),
    **{f"training/{name}.py": ("torch", "transformers") for name in ("preparing", "processes/launching", "train")},
    **{f"lab/studies/{name}.py": ("torch", "numpy", "transformers") for name in ("schedule", "page")},
    "lab/studies/frontier.py": ("torch", "numpy", "transformers", "surgeon"),
    "lab/courses/metrics.py": ("torch", "numpy", "transformers", "surgeon"),
    **{f"common/{name}.py": ("torch", "numpy", "transformers") for name in ("yaml", "checked_yaml", "formatting")},
}


def test_every_room_has_its_place_in_the_order() -> None:
    assert {room_of(module) for module in MODULES} == set(ORDER)
    assert len(ORDER) == len(set(ORDER))


@pytest.mark.parametrize("room", ORDER)
def test_imports_run_down(room: str) -> None:
    below = ORDER[ORDER.index(room) + 1 :]
    for module in MODULES:
        if room_of(module) == room:
            up = {name for name in dependencies(module) if room_of(name) not in (room, *below)}
            assert not up, f"{module} imports {sorted(up)}: up, or beside"


def test_the_core_knows_no_edit_by_name() -> None:
    """`surgeon/operations` finds them by their files; what two share is a module of theirs without an operation."""
    named = {module: {name for name in dependencies(module) if room_of(name) == "edits"} for module in MODULES}
    assert not {module for module, names in named.items() if names and room_of(module) != "edits"}
    assert not [site for site in HERE.reaches() if room_of(site.text) == "edits"]


@pytest.mark.parametrize("room", INNER)
def test_imports_run_down_within_a_room_too(room: str) -> None:
    order = INNER[room]
    assert {path.name for path in (PACKAGE / room).iterdir() if any(path.glob("*.py"))} == set(order)
    for module in MODULES:
        within = inner_room_of(module)
        if room_of(module) == room and within in order:
            below = order[order.index(within) :]
            others = {name for name in dependencies(module) if room_of(name) == room and inner_room_of(name) in order}
            up = {name for name in others if inner_room_of(name) not in below}
            assert not up, f"{module} imports {sorted(up)}: up"


def inner_room_of(module: str) -> str:
    """`steps` of `surgeon.training.steps.trainer`; "" of a file that lies beside inner rooms."""
    parts = module.split(".")
    return parts[2] if len(parts) > 3 or (MODULES[module].name == "__init__.py" and len(parts) > 2) else ""


# Kinds of targets, objectives and remedies: their files, the words and keys by which a config names them, and what they
# alone use. The folders themselves, their bases and what stands below them may be imported anywhere.
KINDS = {
    "targets": {"added", "all", "base", "head", "last", "layers", "lora"},
    "objectives": {"labels", "next_tokens"},
    "remedies": {"blend", "fisher", "gate", "kl", "recall"},
}
_OF_KINDS = {
    *(f"surgeon.training.{folder}.{name}" for folder, names in KINDS.items() for name in names),
    *(f"surgeon.training.losses.{name}" for name in ("cached_teacher", "top_k")),
    *(f"surgeon.training.{name}" for name in ("gate_fitting", "negatives", "new_head")),
}
_WORDS = {*KINDS["targets"], *KINDS["remedies"], "preserve"}
# Read of a config alone, and those that are read of whatever holds them.
_KEYS_OF_CONFIGS = {"what", "preserve", "lora", "fitted", "labels"}
_KEYS = {*_KEYS_OF_CONFIGS, "recall_for_gate", "keep_for_gate", "within", "cached", "taught", "classifies"}


def knows_of_kinds(tree: ast.AST) -> set[str]:
    """Return where a module forks on a kind: it compares a word of one, or reads its key of a config."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare | ast.MatchValue):
            words = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
            found |= {f"line {node.lineno} compares {word!r}" for word in words & _WORDS}
        elif isinstance(node, ast.Attribute) and node.attr in _KEYS and ast.unparse(node).split(".")[-2] == "config":
            found.add(f"line {node.lineno} reads {ast.unparse(node)}")
        elif isinstance(node, ast.Attribute) and node.attr in _KEYS - _KEYS_OF_CONFIGS:
            found.add(f"line {node.lineno} reads {ast.unparse(node)}")
    return found


def of_a_kind(module: str) -> bool:
    """Whether a module of training is a kind, a part of one, the choice of one, or the schema."""
    return module in _OF_KINDS or module.startswith(
        (
            "surgeon.training.config",
            "surgeon.training.losses.preserving",
            "surgeon.training.objectives",
            "surgeon.training.remedies.original_text",
            "surgeon.training.targets.target",
        )
    )


@pytest.mark.parametrize(
    "module", [name for name in MODULES if name.startswith("surgeon.training") and not of_a_kind(name)]
)
def test_what_carries_a_run_out_knows_no_target_no_objective_and_no_remedy(module: str) -> None:
    """So one more of them is one file, its schema, and its line in the folder's table."""
    folders = {f"surgeon.training.{folder}" for folder in KINDS}
    if module not in folders:
        assert not (named := dependencies(module) & _OF_KINDS), f"{module} imports {sorted(named)}"
    assert not (found := knows_of_kinds(HERE.trees[module])), f"{module}: {sorted(found)}"


def test_every_kind_has_a_file_and_a_fork_is_noticed() -> None:
    for folder, names in KINDS.items():
        shared = {"__init__", "target", "original_text"}
        assert {file.stem for file in (PACKAGE / "training" / folder).glob("*.py")} - shared == names
    for line in (
        'if config.what == "all": pass',
        "config.lora",
        'loss in ("kl", 1)',
        "match a:\n  case 'fisher': pass",
        "run.loaded.config.classifies",
        "config.labels",
    ):
        assert knows_of_kinds(ast.parse(line)), line


def test_no_module_and_no_room_imports_in_a_circle() -> None:
    """CycleError names the circle."""
    TopologicalSorter({module: dependencies(module) for module in MODULES}).prepare()
    assert max(HERE.floors().values()) <= len(ORDER)


def test_the_house_stays_small() -> None:
    """What the rebuilding aimed at: whoever needs more rooms or loose modules says so here."""
    rooms = [name for name in ORDER if (PACKAGE / name).is_dir()]
    assert len(rooms) <= 25
    assert set(ORDER) - set(rooms) == {"__main__", "__init__", "errors", "_version"}


def test_nothing_is_larger_than_it_is_pinned() -> None:
    """Whoever raises a number of size.json does so by hand, in a commit of its own that says what went for it."""
    pinned = json.loads(PINS.read_text(encoding="utf-8"))
    above = [
        f"{name}, {key}: {count:,}, pinned at {pinned.get(name, {}).get(key, 0):,}"
        for name, counts in HERE.sizes().items()
        for key, count in counts.items()
        if count > pinned.get(name, {}).get(key, 0)
    ]
    raised = "raise these in tests/size.json by what you added, or make something smaller:"
    assert not above, "\n".join([raised, *above])


# Studies are written with what `surgeon` offers, as anybody's are; beside it they may import the errors that users read
# and plumbing that knows nothing of models: listeners, tables, YAML, work folders, devices.
LABORATORY = ("lab/learning", "lab/studies", "lab/courses", "lab/evaluation")
_PLUMBING = ("errors", "common")


@pytest.mark.parametrize("room", LABORATORY)
def test_the_laboratory_stands_on_the_public_api(room: str) -> None:
    for module in MODULES:
        if room_of(module) == room:
            below = not_public(ast.parse(MODULES[module].read_text(encoding="utf-8")), own=room)
            assert not below, f"{module} imports {sorted(below)}: not what `surgeon` offers"


def not_public(tree: ast.Module, *, own: str = "") -> set[str]:
    """What a file imports of surgeon that is neither a public name, nor plumbing, nor of its own room."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "surgeon":
            room = room_of(str(node.module))
            names = {alias.name for alias in node.names}
            if node.module == "surgeon":
                found |= {f"surgeon.{name}" for name in names - {*surgeon.__all__, *_PLUMBING}}
            elif room not in (own, *_PLUMBING):
                found |= {f"{node.module}.{name}" for name in names}
        elif isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names if alias.name.startswith("surgeon.")]
            found |= {path for path in paths if room_of(path) not in (own, *_PLUMBING)}
        elif isinstance(node, ast.ImportFrom) and node.level:
            found.add(f"a relative import, line {node.lineno}")
    return found


BENCHMARKS = sorted((PACKAGE.parent / "benchmarks").glob("*.py"))
# Benchmarks that time or patch a part of surgeon by itself, and the rooms that it lies in. All others measure what
# `surgeon` offers.
INSTRUMENTS = {
    "beside_trl": {"training"},
    "claims": {"lab"},
    "gpu": {"transport"},
    "moving": {"rework", "writing"},
    "packed_isolation": {"data", "training"},
    "real_model": {"lab"},
    "remedies": {"lab"},
    "scale": {"models"},
    "training_cost": {"manifest", "training"},
    "transport_cpu": {"transport"},
    "vocabulary": {"models"},
}


@pytest.mark.parametrize("file", BENCHMARKS, ids=lambda file: file.stem)
def test_benchmarks_stand_on_the_public_api(file: Path) -> None:
    """Those that measure a part by itself import just the rooms that are listed for them."""
    below = not_public(ast.parse(file.read_text(encoding="utf-8")))
    assert {name.split(".")[1] for name in below} == INSTRUMENTS.get(file.stem, set()), sorted(below)


@pytest.mark.parametrize("name", INSTRUMENTS)
def test_what_an_instrument_imports_is_there(name: str) -> None:
    tree = ast.parse((PACKAGE.parent / "benchmarks" / f"{name}.py").read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("surgeon."):
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                found = hasattr(module, alias.name) or importlib.util.find_spec(f"{node.module}.{alias.name}")
                assert found, f"{name}:{node.lineno} imports {node.module}.{alias.name}, which is not there"


@pytest.mark.parametrize(
    "line",
    [
        "from surgeon.models.load import load_model",
        "from surgeon import models",
        "import surgeon.training.session",
        "def f():\n    from surgeon.verification import verify",
        "from ..training import session",
    ],
)
def test_an_import_below_the_public_api_is_noticed(line: str) -> None:
    assert not_public(ast.parse(line), own="lab/studies")
    assert not not_public(ast.parse("from surgeon import apply, errors\nfrom surgeon.common.yaml import where"))


@pytest.mark.parametrize("place", WITHOUT)
def test_what_works_on_data_alone_imports_nothing_heavy(place: str) -> None:
    path = PACKAGE / place
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    assert files
    for file in files:
        lazy = str(file.parent.relative_to(PACKAGE)) in COMPUTING
        for name in imported_at_load(HERE.trees[module_of(file)]) if lazy else HERE.imports(module_of(file)):
            for forbidden in WITHOUT[place]:
                assert not (name == forbidden or name.startswith(f"{forbidden}.")), f"{file} imports {name}"


def imported_at_load(tree: ast.AST) -> set[str]:
    """What a module imports when it is imported: not what its functions import, nor what type checkers alone read."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            found |= {name for other in node.orelse for name in imported_at_load(other)}
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            found |= imported_at_load(node)
    return found


def test_recipes_bring_no_torch_before_they_compute() -> None:
    """The rule above is by syntax; this is by import, of the modules that recipes import too."""
    code = "import sys, surgeon.blueprint.recipes; print({'torch', 'numpy', 'transformers'} & sys.modules.keys() or 0)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "0", found.stdout


def test_only_the_command_line_prints_or_exits() -> None:
    for file in FILES:
        if room_of(module_of(file)) in ("cli", "__main__"):
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("print", "sys.exit", "exit", "quit"), f"{file}:{node.lineno} calls {called}"


# By these transformers (and PEFT) read folders, and run what lies in them.
LOADERS = ("from_pretrained", "from_config", "get_class_from_dynamic_module", "load_adapter", "pipeline")
_LOADING_CLASS = re.compile(r"Auto(Model|Config|Tokenizer|Processor|FeatureExtractor|ImageProcessor|Peft)\w*|Peft\w+")


def test_only_one_module_lets_transformers_load_anything() -> None:
    """It shows transformers a view of a folder that was opened and judged; there is no other way to a model."""
    for file in FILES:
        if module_of(file) == "surgeon.models.load":
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            where = f"{file}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Attribute) and node.attr in LOADERS:
                # Shipped classes pass on to transformers' own.
                assert ast.unparse(node) == "super().from_pretrained" and room_of(module_of(file)) == "runtime", where
            if isinstance(node, ast.Name | ast.Attribute):
                assert not _LOADING_CLASS.fullmatch(node.id if isinstance(node, ast.Name) else node.attr), where
            if isinstance(node, ast.ImportFrom):
                assert not [name.name for name in node.names if _LOADING_CLASS.fullmatch(name.name)], where


# What starts a process, whatever module it is called from.
_STARTS = re.compile(
    r"(subprocess\.(Popen|run|call|check_\w+|getoutput|getstatusoutput)|os\.(system|popen|fork|forkpty|exec\w+|spawn\w+"
    r"|posix_spawn\w*|startfile)|pty\.\w+|runpy\.\w+|asyncio\.create_subprocess_\w+|.*\bProcessPoolExecutor|.*\bDataLoader"
    r"|.*\bmultiprocessing\b.*|(torch\.)?multiprocessing\..*)"
)
_STARTERS = ("subprocess", "multiprocessing", "torch.multiprocessing", "runpy", "pty", "asyncio")
# Those that do, and what of it: one starts Python, without the working directory on its path; one forks, so that the
# child imports what the parent does.
_MAY_START = {"common/processes.py": {"subprocess.Popen"}, "common/child.py": {"os.fork"}}


def test_every_process_is_started_where_its_path_is_safe() -> None:
    for file in FILES:
        allowed = _MAY_START.get(str(file.relative_to(PACKAGE)), set())
        tree = ast.parse(file.read_text(encoding="utf-8"))
        # `Popen[bytes]` is a type.
        types = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Subscript)}
        for node in ast.walk(tree):
            where = f"{file}:{getattr(node, 'lineno', 0)}"
            if (
                isinstance(node, ast.Attribute)
                and id(node) not in types
                and _STARTS.fullmatch(named := ast.unparse(node))
            ):
                assert named in allowed, f"{where}: {named} (surgeon.common.processes starts Python)"
            if isinstance(node, ast.ImportFrom) and node.module in (*_STARTERS, "os", "concurrent.futures"):
                found = [name.name for name in node.names if _STARTS.fullmatch(f"{node.module}.{name.name}")]
                typed = str(file.relative_to(PACKAGE)) in _MAY_START
                assert typed or not found, f"{where}: {found}"


def test_no_page_says_to_start_it_with_the_working_directory_on_its_path() -> None:
    root = PACKAGE.parent
    pages = [root / "README.md", *(root / "docs").rglob("*.md"), *(root / "docs").rglob("*.ipynb"), *FILES]
    launched = re.compile(r"(torchrun|accelerate launch)[^`\n]* -m |python3? -m surgeon")
    for page in pages:
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            found = launched.search(line)
            # Those that say what it does.
            assert not found or page.name in ("trust.md", "__init__.py", "__main__.py"), f"{page}:{number}: {line}"


_RENAMED = re.compile(r"past_key_values|cache_params")


def test_no_code_knows_a_cache_by_a_name_that_transformers_has_renamed() -> None:
    """A graft that looks for it by one loses its state in silence; where one is needed, the model is asked."""
    asks = {"anatomy/running.py"}
    for file in FILES:
        if str(file.relative_to(PACKAGE)) in asks:
            continue
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            said = getattr(node, "arg", None) or getattr(node, "attr", None) or getattr(node, "value", None)
            named = isinstance(said, str) and _RENAMED.fullmatch(said)
            assert not named, f"{file}:{getattr(node, 'lineno', 0)}: {said} (surgeon.runtime.graft.cache_in)"


def imported_by(code: str) -> set[str]:
    ran = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nprint(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(ran.stdout.split())


def test_bytes_only_work_imports_neither_torch_nor_the_hub() -> None:
    """What keeps `apply` of a copying plan at the memory and start-up of a file copy."""
    loaded = imported_by("import surgeon.writing.apply, surgeon.verification.static, surgeon.rework.revert")
    assert "surgeon.writing.write" in loaded
    for heavy in ("torch", "numpy", "transformers", "huggingface_hub", "safetensors", "scipy", "ot"):
        assert heavy not in loaded, heavy


def test_help_imports_no_more_than_the_command_line() -> None:
    loaded = imported_by("import surgeon.cli")
    for heavy in ("pydantic", "yaml", "torch", "surgeon.writing", "surgeon.plan"):
        assert heavy not in loaded, heavy


def test_no_public_function_waits_for_torch_before_its_arguments_are_checked() -> None:
    """What a command refuses, it refuses at once: torch and transformers are imported where work begins."""
    loaded = imported_by("import surgeon\nfor name in surgeon.__all__:\n    if name.islower(): getattr(surgeon, name)")
    assert {"surgeon.training.train", "surgeon.lab.evaluation.evaluate", "surgeon.lab.reports.report"} <= loaded
    for heavy in ("torch", "transformers", "tokenizers"):
        assert heavy not in loaded, heavy
