"""Steps read one number from their device: whatever reads makes the host wait until the device has caught up."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import surgeon
from surgeon.training.steps import trainer
from surgeon.training.steps.optimizer import MasterAdamW
from tests.training.test_train import config, grown

STEPS = 3
# What reads without an operation of torch, and the operations that read: shapes or branches follow from values.
_METHODS = ("tolist", "cpu", "numpy")
_OPERATIONS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "unique_consecutive", "equal")


class Reads(TorchDispatchMode):
    """A count of readings of tensors by surgeon's functions, and by those that an output ships."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def count(self) -> None:
        """Count a reading for the function that asks torch for it, where it is surgeon's."""
        frame: Any = sys._getframe(2)
        while "/torch/" in frame.f_code.co_filename:
            frame = frame.f_back
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(Path(surgeon.__file__).parent) or file.name == "modeling_surgeon.py":
            self.found[frame.f_code.co_name] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masks = isinstance(args[1], (list, tuple)) if len(args) > 1 else False
        name = func.overloadpacket.__name__
        by_mask = (
            name.startswith("index")
            and masks
            and any(each is not None and each.dtype == torch.bool for each in args[1])
        )
        if name in _OPERATIONS or by_mask:
            self.count()
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def reads() -> Iterator[Counter[str]]:
    """Count readings within the context."""
    with pytest.MonkeyPatch.context() as patch, Reads() as mode:
        for name in _METHODS:
            plain = getattr(torch.Tensor, name)

            def read(tensor: Any, *args: Any, plain: Any = plain, **given: Any) -> Any:
                mode.count()
                return plain(tensor, *args, **given)

            patch.setattr(torch.Tensor, name, read)
        yield mode.found


# Where a step reads: the norm and the loss together; and what is still on the host, by the functions that ask for it.
EXPECTED = {"_get_grad_norm": STEPS, "_counts": 2 * STEPS}
TAUGHT = {"<listcomp>": STEPS, "teaching": STEPS, "_term": 2 * STEPS}


@pytest.mark.parametrize(
    "plan, more",
    [
        ("neutral-residues", {}),
        ("control-llm", {}),
        ("pmoe", {}),
        ("opt-deus", {"preserve": {"loss": "kl"}}),
        ("opt-deus", {"what": "all", "preserve": {"loss": "kl"}}),
    ],
)
def test_a_step_reads_one_number(
    plan: str, more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device: on CPUs attention reads where documents end."""
    monkeypatch.setattr(trainer, "by_document", contextlib.nullcontext)
    found: Counter[str] = Counter()
    for kind, name in (
        (trainer.SurgeonTrainer, "get_batch_samples"),
        (trainer.SurgeonTrainer, "training_step"),
        (trainer.SurgeonTrainer, "_get_grad_norm"),
        (MasterAdamW, "step"),
    ):
        monkeypatch.setattr(kind, name, counting(getattr(kind, name), found))
    surgeon.train(grown(tmp_path, plan), config(tmp_path, steps=STEPS, **more), tmp_path / "run", device="cpu")
    assert found == EXPECTED | (TAUGHT if "preserve" in more else {})


def counting(plain: Any, found: Counter[str]) -> Any:
    """A function whose readings are added to `found`."""

    def counted(*args: Any, **given: Any) -> Any:
        with reads() as each:
            made = plain(*args, **given)
        found.update(each)
        return made

    return counted
