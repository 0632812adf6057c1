"""The suite can fail: a wrong entry of a registry, or a wrong rule, makes several tests of it fail.

Each case is a copy of the package with one deliberate mistake, on which the tests that ought to notice are run. New
entries are nonsense that keeps every promise at birth: only tests that take their cases from the registry see them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.house import PACKAGE
from tests.warm import warmer

ROOT = Path(__file__).resolve().parents[2]
FAILURES = 3


@dataclass(frozen=True)
class Mutation:
    """Edits (file in the package, what stands there once, what is put in its place), and the tests that must notice."""

    edits: tuple[tuple[str, str, str], ...]
    tests: tuple[str, ...]


NONSENSE_INTERPOLATOR = '''
class Nonsense(ScalarInterpolator):
    """The pre-trained branch, whatever the other one is."""

    rule = _RULES["nonsense"]

    def forward(self, hidden: Tensor, pretrained: Tensor, expanded: Tensor) -> tuple[Tensor, float | Tensor]:
        return pretrained, self.share(pretrained)


class Dlerp(Interpolator):
'''
NONSENSE_INIT = '''
class NonsenseInit(Init):
    """The layer two below, whether or not there is one."""

    kind: Literal["nonsense"]

    def make(self, gap: Gap) -> NewLayer:
        return NewLayer(dict(gap.draft.layers[gap.below + 2].tensors), (gap.below + 2,))


# An init's `kind`'''

LERP = '''one α."""
        alpha = self.share(pretrained)
        return torch.lerp({}, alpha), alpha
'''

MUTATIONS = {
    "new interpolator": Mutation(
        (
            ("runtime/control.py", "\nclass Dlerp(Interpolator):\n", NONSENSE_INTERPOLATOR),
            (
                "runtime/control_rules.py",
                '    LateralRule("proj"',
                '    InterpolatorRule("nonsense", "Nonsense"),\n    LateralRule("proj"',
            ),
        ),
        ("tests/runtime/test_interpolators.py",),
    ),
    "interpolator": Mutation(
        (
            (
                "runtime/control.py",
                LERP.format("pretrained, expanded"),
                LERP.format("expanded, pretrained"),
            ),
        ),
        ("tests/runtime/test_interpolators.py",),
    ),
    "new gate": Mutation(
        (
            ("runtime/adapters_rules.py", 'GATES = ("relu",', 'GATES = ("open", "relu",'),
            ("runtime/adapters.py", '= {"relu": F.relu', '= {"open": torch.ones_like, "relu": F.relu'),
        ),
        (
            "tests/runtime/test_adapters.py",
            "tests/runtime/test_training.py::test_gradients_reach_every_new_parameter_and_no_other[llama]",
            "tests/runtime/test_training.py::test_first_steps_from_birth_bring_every_parameter_to_life",
        ),
    ),
    "gate": Mutation(
        (("runtime/adapters.py", '"sigmoid": torch.sigmoid', '"sigmoid": torch.tanh'),),
        ("tests/runtime/test_adapters.py",),
    ),
    "new adapter init": Mutation(
        (
            (
                "runtime/adapters_rules.py",
                '    "he": lambda width',
                '    "large": lambda width, layers: 1.0,\n    "he": lambda width',
            ),
        ),
        ("tests/runtime/test_adapters.py", "tests/operations/test_choices.py"),
    ),
    "adapter init": Mutation(
        (("runtime/adapters_rules.py", "1 / (width * layers)", "1 / width"),),
        ("tests/runtime/test_adapters.py", "tests/test_golden.py"),
    ),
    "new init": Mutation(
        (
            ("operations/inits.py", "\n# An init's `kind`", NONSENSE_INIT),
            ("operations/inits.py", "Shuffle, Lesa)", "Shuffle, Lesa, NonsenseInit)"),
        ),
        ("tests/operations/test_inits.py", "tests/plan/test_schema.py"),
    ),
    "init": Mutation(
        (("operations/inits.py", "Average(recipe, upper[suffix])", "Average(recipe, recipe)"),),
        ("tests/operations/test_inits.py", "tests/test_golden.py"),
    ),
    "new loss": Mutation(
        (
            ("runtime/control_rules.py", 'DIVERGENCES = ("mse",', 'DIVERGENCES = ("nothing", "mse",'),
            (
                "runtime/control.py",
                '= {"mse": squared_error',
                '= {"nothing": lambda anchor, expanded: 0 * expanded.sum(dim=-1), "mse": squared_error',
            ),
        ),
        ("tests/runtime/test_losses.py",),
    ),
    "loss": Mutation(
        (("runtime/control.py", "(expanded - anchor).square()", "(expanded - anchor).abs()"),),
        ("tests/runtime/test_losses.py",),
    ),
    "routing": Mutation(
        (("runtime/experts.py", "F.softmax(known, dim=-1)", "F.softmax(-known, dim=-1)"),),
        ("tests/runtime/test_experts.py",),
    ),
}


@pytest.fixture(scope="module")
def python() -> Iterator[list[str]]:
    """An interpreter that has imported transformers, and nothing of surgeon: that is each case's own."""
    with warmer() as command:
        yield command


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mistake_is_noticed_by_several_tests(name: str, python: list[str], tmp_path: Path) -> None:
    mutation = MUTATIONS[name]
    # With its byte code, which Python takes by a source's time and size: only what is edited is compiled anew.
    shutil.copytree(PACKAGE, tmp_path / "surgeon")
    for beside in ("tests", "plans", "docs", "pyproject.toml"):
        (tmp_path / beside).symlink_to(ROOT / beside)
    for file, old, new in mutation.edits:
        path = tmp_path / "surgeon" / file
        text = path.read_text(encoding="utf-8")
        assert text.count(old) >= 1, f"{file} no longer has {old!r}: make this mistake where it stands now"
        path.write_text(text.replace(old, new), encoding="utf-8")
    quietly = ("-q", "-n", "0", "-p", "no:cacheprovider", f"--maxfail={FAILURES}")
    # What comes with transformers may be a plugin of pytest as well.
    quietly += ("-W", "ignore:Module already imported so cannot be rewritten")
    ran = subprocess.run(
        [*python, "-m", "pytest", *quietly, *mutation.tests],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    found = re.search(r"(\d+) failed", ran.stdout)
    assert ran.returncode == 1 and found is not None, ran.stdout[-2000:]
    assert int(found[1]) >= FAILURES, ran.stdout[-2000:]
