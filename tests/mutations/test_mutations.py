"""The suite can fail: a wrong entry of a registry, or a wrong rule, makes several tests of it fail.

Each case is a copy of the package with one deliberate mistake, on which the tests that ought to notice are run. New
entries are nonsense that keeps every promise at birth: only tests that take their cases from the registry see them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.mutations.planting import Edit, plant, run_tests
from tests.warm import warmer

FAILURES = 3


@dataclass(frozen=True)
class Mutation:
    """A mistake, and the tests that must notice it."""

    edits: tuple[Edit, ...]
    tests: tuple[str, ...]


def golden(*plans: str) -> Iterator[str]:
    """The tests of what these plans make of a Llama."""
    return (f"tests/test_golden.py::test_blueprint_is_the_agreed_one[{plan}-llama]" for plan in plans)


NONSENSE_INTERPOLATOR = '''
class Nonsense(Interpolation):
    """The pre-trained branch, whatever the other one is."""

    key = "nonsense"

    def join(self, tensors: Mapping[str, Tensor], p: Tensor, e: Tensor, alpha: float | Tensor) -> Tensor:
        return p


INTERPOLATORS = (Nonsense(), '''
NONSENSE_INIT = '''
class NonsenseInit(Init):
    """The layer two below, whether or not there is one."""

    kind: Literal["nonsense"]

    def make(self, gap: Gap) -> NewLayer:
        return NewLayer(dict(gap.draft.layers[gap.below + 2].tensors), (gap.below + 2,))


# An init's `kind`'''

MUTATIONS = {
    "new interpolator": Mutation(
        (("runtime/interpolators.py", "\nINTERPOLATORS = (", NONSENSE_INTERPOLATOR),),
        ("tests/runtime/test_interpolators.py",),
    ),
    "interpolator": Mutation(
        (("runtime/interpolators.py", "return p.lerp(e, alpha)", "return e.lerp(p, alpha)"),),
        ("tests/runtime/test_interpolators.py",),
    ),
    "new gate": Mutation(
        (
            ("grafts/adapters.py", 'GATES = ("relu",', 'GATES = ("open", "relu",'),
            (
                "runtime/adapters.py",
                "else torch.sigmoid(score)",
                'else torch.ones_like(score) if self.spec.gate == "open" else torch.sigmoid(score)',
            ),
        ),
        (
            "tests/runtime/test_adapters.py",
            "tests/runtime/test_training.py::test_gradients_reach_every_new_parameter_and_no_other[llama]",
            "tests/runtime/test_training.py::test_first_steps_from_birth_bring_every_parameter_to_life",
        ),
    ),
    "gate": Mutation(
        (("runtime/adapters.py", "else torch.sigmoid(score)", "else torch.tanh(score)"),),
        ("tests/runtime/test_adapters.py",),
    ),
    "new adapter init": Mutation(
        (
            (
                "grafts/adapters.py",
                '    "he": lambda width',
                '    "large": lambda width, layers: 1.0,\n    "he": lambda width',
            ),
        ),
        ("tests/runtime/test_adapters.py", "tests/operations/test_choices.py"),
    ),
    "adapter init": Mutation(
        (("grafts/adapters.py", "1 / (width * layers)", "1 / width"),),
        (
            "tests/runtime/test_adapters.py",
            *golden("neutral-residues", "domain-gate"),
        ),
    ),
    "new init": Mutation(
        (
            ("operations/inits.py", "\n# An init's `kind`", NONSENSE_INIT),
            ("operations/inits.py", "Shuffle, Lesa)", "Shuffle, Lesa, NonsenseInit)"),
        ),
        ("tests/operations/test_inits.py", "tests/plan/test_schema.py"),
    ),
    "init": Mutation(
        (("operations/inits.py", "average(recipe, upper[suffix])", "average(recipe, recipe)"),),
        ("tests/operations/test_inits.py", *golden("average")),
    ),
    "new loss": Mutation(
        (
            ("grafts/control.py", 'DIVERGENCES = ("mse",', 'DIVERGENCES = ("nothing", "mse",'),
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
    plant(mutation.edits, tmp_path)
    ran = run_tests(python, tmp_path, mutation.tests, most=FAILURES)
    assert ran.code == 1 and ran.count >= FAILURES, ran.text[-2000:]
