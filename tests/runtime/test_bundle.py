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

import surgeon.runtime
from surgeon.errors import BadInput
from surgeon.grafts.bundle import CODE_FILE, bundle, ordered, part_of, roots_of
from surgeon.grafts.classes import classes_of, uses_of
from surgeon.grafts.registry import GRAFTS
from surgeon.runtime.graft import Graft
from tests import tiny
from tests.runtime.grafting import alone, composition, everything, joining, states

ROOT = Path(__file__).resolve().parents[2]
RUNTIME = Path(surgeon.runtime.__file__).parent


def definitions(source: str) -> dict[str, str]:
    """What a file defines or does at its top level, imports and docstring aside, by name."""
    found: dict[str, str] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        name = getattr(node, "name", None) or ast.unparse(getattr(node, "targets", [getattr(node, "target", node)])[0])
        assert name not in found, name
        found[name] = ast.dump(node)
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
    """What stands in the joined file stands so in its parts, in their order, and then the template's classes."""
    native = composition(family)
    uses = uses_of(surgery, native)
    expected: dict[str, str] = {}
    for part in ordered(roots_of(native, uses)):
        expected |= definitions((RUNTIME / f"{part.module.rpartition('.')[2]}.py").read_text())
    expected |= definitions(classes_of(native, uses))
    joined = definitions(bundle(joining(family, surgery)).decode())
    assert list(joined) == list(expected)
    assert joined == expected


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


def test_rules_name_the_modules_that_build_on_them() -> None:
    for rules in GRAFTS.values():
        module = getattr(importlib.import_module(rules.part), rules.module)
        assert issubclass(module, Graft) and issubclass(module, type(rules).__bases__[-1])


@pytest.mark.parametrize(
    "surgery", [None, [], "x", {"control": "x"}, {"control": [3]}, {"control": [{"interpolator": {"kind": []}}]}]
)
def test_a_config_that_says_nonsense_gives_a_file_all_the_same(surgery: Any) -> None:
    """What the config says is refused where it is read; whether code beside it is ours can be told before."""
    ast.parse(bundle(joining("llama", surgery)))


def test_parts_are_flat_and_import_torch_and_transformers_only() -> None:
    allowed = {"torch", "transformers"} | set(sys.stdlib_module_names)
    shipped = [path for path in RUNTIME.glob("*.py") if path.stem != "__init__"]
    assert shipped
    for path in shipped:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1 and node.module and (RUNTIME / f"{node.module}.py").exists(), path.name
            elif isinstance(node, ast.ImportFrom | ast.Import):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
                assert {name.partition(".")[0] for name in names} <= allowed, (path.name, names)


def test_what_joins_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import json, sys; from surgeon.grafts.bundle import bundle; bundle(json.loads(sys.argv[1]));"
        " assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, json.dumps(joining("llama", {}))], check=True, cwd=ROOT)


def test_same_bytes_in_another_process_with_another_hash_seed() -> None:
    code = (
        "import json, sys, hashlib; from surgeon.grafts.bundle import bundle;"
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
    # Of imports the joiner has them by module, not as isort would.
    for command in (["check", "--ignore", "I001"], ["format", "--check"]):
        asked = ["-m", "ruff", *command, "--config", str(ROOT / "pyproject.toml"), "--no-cache", str(tmp_path)]
        result = subprocess.run([sys.executable, *asked], capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    "source",
    ["from .rules import one_of as renamed\n", "from . import rules\n", "from ..errors import BadInput\n"],
    ids=["renamed", "a module itself", "above"],
)
def test_imports_that_no_joined_file_can_have_are_refused(source: str) -> None:
    with pytest.raises((AssertionError, BadInput), match=r"which no joined file can|does not ship"):
        part_of("surgeon.runtime.odd", source)
