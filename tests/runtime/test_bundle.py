"""The joined file holds exactly its parts and the template, is the same everywhere, and reads like written code."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import surgeon.runtime
from surgeon.runtime.bundle import CODE_FILE, bundle, ordered, part_of, present_in, roots_of
from surgeon.runtime.classes import classes_of, uses_of
from surgeon.runtime.folding import folded
from surgeon.runtime.graft import Graft
from surgeon.runtime.registry import GRAFTS
from tests import tiny
from tests.runtime.grafting import adapters, alone, composition, everything, joining, states

ROOT = Path(__file__).resolve().parents[2]
RUNTIME = Path(surgeon.runtime.__file__).parent
NOT_SHIPPED = {"__init__", "bundle", "classes", "composition", "folding", "needed", "present", "registry"}


def definitions(source: str) -> dict[str, list[str]]:
    """What a file defines or does at its top level, imports and docstring aside, by name.

    Each as what it is made of: a class of its name and bases, and its members; all else of itself.
    """
    found: dict[str, list[str]] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        name = getattr(node, "name", None) or ast.unparse(getattr(node, "targets", [getattr(node, "target", node)])[0])
        assert name not in found, name
        found[name] = [ast.dump(node)]
        if isinstance(node, ast.ClassDef):
            found[name] = [ast.dump(each) for each in (*node.decorator_list, *node.bases, *node.body)]
    return found


CASES = [
    (family, name, surgery)
    for family in (*tiny.FAMILIES, *tiny.ENCODERS)
    for name, surgery in (
        {"states": states()} if family in tiny.ENCODERS else alone() | {"everything": everything()}
    ).items()
]


@pytest.mark.parametrize(("family", "name", "surgery"), CASES, ids=[f"{family}-{name}" for family, name, _ in CASES])
def test_joined_file_and_its_parts_agree(family: str, name: str, surgery: dict[str, Any]) -> None:
    """What stands in the joined file stands so in its parts, in their order, and the template's classes are all there.

    Of plain classes members are left out; of those that torch or transformers call, none is but bare annotations.
    """
    native = composition(family)
    uses = uses_of(surgery, native)
    joined = definitions(bundle(joining(family, surgery)).decode())
    expected: dict[str, list[str]] = {}
    for part in ordered(roots_of(native, uses)):
        source = (RUNTIME / f"{part.module.rpartition('.')[2]}.py").read_text()
        expected |= definitions(folded(source, present_in(surgery, native, uses)))
    composed = definitions(classes_of(native, uses))
    expected |= composed
    assert list(joined) == [name for name in expected if name in joined]
    assert {name: joined[name] for name in composed} == composed
    for name, members in joined.items():
        kept = iter(expected[name])
        assert all(member in kept for member in members), name
    for name in ("UpcycledOuter", "UpcycledLayer", "UpcycledPreTrained"):
        methods = [[each for each in said[name] if each.startswith("FunctionDef")] for said in (joined, expected)]
        assert methods[0] == methods[1]


@pytest.mark.parametrize(("family", "name", "surgery"), CASES, ids=[f"{family}-{name}" for family, name, _ in CASES])
def test_every_name_of_a_joined_file_is_known_there(family: str, name: str, surgery: dict[str, Any]) -> None:
    """Nothing that was left out is asked for: not a name, and of objects of the parts' own no attribute."""
    text = bundle(joining(family, surgery)).decode()
    tree = ast.parse(text)
    asked = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    left_out = set()
    for part in ordered(roots_of(composition(family), uses_of(surgery, composition(family)))):
        for each in part.definitions:
            left_out |= {member.name for member in each.members if member.name}
    defined = {getattr(node, "name", "") for node in ast.walk(tree)}
    defined |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    defined |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    # A birth's `values` and `shape` have names that dictionaries and tensors have too.
    assert not (left_out - defined - set(dir(dict)) - set(dir(torch.Tensor))) & asked


def test_what_only_planners_ask_of_a_graft_does_not_ship() -> None:
    for name, surgery in alone().items():
        text = bundle(joining("llama", surgery)).decode()
        assert "(Kind)" not in text and "def check(" not in text and "def claims(" not in text, name


def test_only_what_a_surgery_needs_is_joined() -> None:
    """No graft's modules or rules stand in a file of another; empty entries ask for nothing."""
    own = {name: rules.module for name, rules in GRAFTS.items()}
    for name, surgery in alone().items():
        text = bundle(joining("llama", surgery | {"older_layers": []})).decode()
        assert [graft for graft, mark in own.items() if f"\nclass {mark}(" in text] == [name]
        empty = {key: [] for other in GRAFTS.values() for key in other.keys if key not in surgery}
        assert bundle(joining("llama", surgery | empty)).decode() == text


# How many lines a file may have, for each graft alone: what a stranger has to read.
LINES = {"control": 1105, "adapters": 640, "experts": 1130, "routed": 820, "states": 1345, "gate": 1580}


def test_a_file_is_as_short_as_its_graft_allows() -> None:
    assert LINES.keys() == GRAFTS.keys()
    for name, surgery in alone().items():
        lines = len(bundle(joining("llama", surgery)).splitlines())
        assert lines <= LINES[name], f"{name}: {lines} lines"
    assert len(bundle(joining("llama", adapters(l1=0.01))).splitlines()) <= 755, "adapters with a local loss"


BRANCHES = """
class Layer:
    if TWINS and SITES:
        twin = None
    # Off.
    if GATES:
        gate = None

    def forward(self, x):
        import torch

        if GATES and x is None:
            return x
        if TWINS and x is not None:
            x = x + 1
        if not TWINS:
            return 0
        else:
            x = x + 2
        if SITES or GATES:
            return torch.relu(x)
        return x
"""
TAKEN = """
class Layer:
    twin = None

    def forward(self, x):
        if x is not None:
            x = x + 1
        x = x + 2
        return torch.relu(x)
"""


def test_of_a_branch_only_what_a_model_takes_is_left() -> None:
    future = "from __future__ import annotations\n"
    found = folded(future + BRANCHES, {"TWINS", "SITES"})
    assert found == future + "\nimport torch\n" + TAKEN
    with pytest.raises(AssertionError, match="elif"):
        folded("if GATES:\n    x = 1\nelif y:\n    x = 2\n", frozenset())


def test_rules_name_the_modules_that_build_on_them() -> None:
    for rules in GRAFTS.values():
        module = getattr(importlib.import_module(rules.part), rules.module)
        assert issubclass(module, Graft) and issubclass(module, type(rules))


@pytest.mark.parametrize(
    "surgery", [None, [], "x", {"control": "x"}, {"control": [3]}, {"control": [{"interpolator": {"kind": []}}]}]
)
def test_a_config_that_says_nonsense_gives_a_file_all_the_same(surgery: Any) -> None:
    """What the config says is refused where it is read; whether code beside it is ours can be told before."""
    ast.parse(bundle(joining("llama", surgery)))


def test_parts_are_flat_and_import_torch_and_transformers_only() -> None:
    allowed = {"torch", "transformers"} | set(sys.stdlib_module_names)
    shipped = [path for path in RUNTIME.glob("*.py") if path.stem not in NOT_SHIPPED]
    assert shipped
    for path in shipped:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1 and node.module and (RUNTIME / f"{node.module}.py").exists(), path.name
                assert node.module not in NOT_SHIPPED - {"present"}, path.name
            elif isinstance(node, ast.ImportFrom | ast.Import):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
                assert {name.partition(".")[0] for name in names} <= allowed, (path.name, names)


def test_what_joins_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import json, sys; from surgeon.runtime.bundle import bundle; bundle(json.loads(sys.argv[1]));"
        " assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, json.dumps(joining("llama", {}))], check=True, cwd=ROOT)


def test_same_bytes_in_another_process_with_another_hash_seed() -> None:
    code = (
        "import json, sys, hashlib; from surgeon.runtime.bundle import bundle;"
        " print(hashlib.sha256(b''.join(bundle(json.loads(said)) for said in sys.argv[1:])).hexdigest())"
    )
    said = [json.dumps(joining(family, {})) for family in ("phi3", "deberta-v2")]
    runs = [
        subprocess.run(
            [sys.executable, "-c", code, *said],
            check=True, cwd=ROOT, capture_output=True, text=True, env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert len(runs[0]) == 65 and runs[0] == runs[1]


def test_it_reads_like_written_code(tmp_path: Path) -> None:
    for family, name, surgery in CASES:
        (tmp_path / f"{family}-{name}").mkdir()
        made = bundle(joining(family, surgery))
        (tmp_path / f"{family}-{name}" / CODE_FILE).write_bytes(made)
    for command in (["check"], ["format", "--check"]):
        asked = ["-m", "ruff", *command, "--config", str(ROOT / "pyproject.toml"), "--no-cache", str(tmp_path)]
        result = subprocess.run([sys.executable, *asked], capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    "source",
    ["from .rules import one_of as renamed\n", "from . import rules\n", "from ..errors import BadInput\n"],
    ids=["renamed", "a module itself", "above"],
)
def test_imports_that_no_joined_file_can_have_are_refused(source: str) -> None:
    with pytest.raises(AssertionError):
        part_of("surgeon.runtime.odd", source)
