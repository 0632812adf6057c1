"""A grown model that computes as its base: the same weights, grafts off, inserted layers skipped. No second copy.

The attributes that the shipped code reads are changed and restored: a layer's and a block's `grafts`, the slots of
linear modules, the layers in the decoder's list, and whether PEFT's modules add their LoRA. Only forwards without
gradient and without a cache run like this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from surgeon.errors import BadInput, SurgeonError, printable

# The number of tokens for the run that shows the form of a layer's output.
_PROBED = 4


class BaseWithin:
    """The base inside `model`, whose decoder has `layers` layers; those numbered in `inserted` are not the base's.

    `grafts`: the model's grafts belong to the base, and stay on.
    """

    def __init__(self, model: Any, *, layers: int, inserted: Sequence[int], grafts: bool = False) -> None:
        """Find the layers. Raises BadInput where the decoder's list of layers is not known."""
        self.model = model
        self.grafts = grafts
        self.passed: list[_PassedOver] = []
        self.stack: Any = None
        if inserted:
            self.stack = _stack(model, layers)
            self.passed = [_PassedOver(number, self.stack[number]) for number in inserted]
            self._look()

    @contextmanager
    def on(self) -> Iterator[None]:
        """Have the model compute as its base while the context is open, in evaluation mode and without gradient.

        The caller must run it without a cache (`use_cache=False`).
        """
        model, training = self.model, self.model.training
        with ExitStack() as back, torch.no_grad():
            back.callback(model.train, training)
            model.eval()
            for module in model.modules():
                _switch_off(module, back, grafts=not self.grafts)
            self._pass_over(back)
            yield

    def logits(self, **inputs: Tensor) -> Tensor:
        """Return the base's logits for the inputs (for a head that passes its input on, hidden states)."""
        with self.on():
            found: Tensor = self.model(**inputs, use_cache=False).logits
        return found

    def check(self, ids: Tensor, rows: int | None) -> None:
        """Compare the logits of the base inside with the whole model's, for the first `rows` tokens on `ids` (1 T).

        It is for surgery that kept the function. Raises SurgeonError where the logits differ.
        """
        training = self.model.training
        self.model.eval()
        with torch.no_grad():
            whole = self.model(input_ids=ids, use_cache=False).logits
        self.model.train(training)
        if not torch.equal(self.logits(input_ids=ids)[..., :rows], whole[..., :rows]):
            raise SurgeonError(
                f"{printable(type(self.model).__name__)}: without what was added it does not compute what the base"
                " does, though the surgery kept its function; leave `preserve` out"
            )

    def _pass_over(self, back: ExitStack) -> None:
        """Replace inserted layers in the decoder's list by modules that return their input, until `back` closes."""
        for passed in self.passed:
            back.callback(self.stack.__setitem__, passed.number, passed.layer)
            self.stack[passed.number] = passed

    def _look(self) -> None:
        """Run the model once, to record in which form inserted layers return their hidden states."""
        ids = torch.arange(_PROBED, device=self.model.device)[None]
        training = self.model.training
        self.model.eval()
        with ExitStack() as back, torch.no_grad():
            back.callback(self.model.train, training)
            self._pass_over(back)
            self.model(input_ids=ids, use_cache=False)
        for passed in self.passed:
            passed.looks = False


class _PassedOver(nn.Module):
    """A module that replaces an inserted layer, passes attribute access on to it, and returns its input.

    While `looks` is True, the layer runs, and the form of its output is recorded.
    """

    layer: nn.Module

    def __init__(self, number: int, layer: nn.Module) -> None:
        super().__init__()
        # Bypasses nn.Module, so that the layer is not registered as a submodule, and keeps its place for checkpoints
        # and optimizers.
        self.__dict__["layer"] = layer
        self.number = number
        self.looks = True
        self.form: tuple[type[Any], int] | None = None

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the replaced layer."""
        return getattr(self.__dict__["layer"], name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the input (B T D) in the form of the layer's output: by itself, or first in a tuple or list.

        While `looks` is True, run the layer, record the form and return the layer's output.
        """
        if self.looks:
            made = self.layer(hidden_states, *args, **kwargs)
            if isinstance(made, tuple | list):
                self.form = type(made), len(made)
            return made
        if self.form is None:
            return hidden_states
        kind, count = self.form
        return kind([hidden_states, *([None] * (count - 1))])


def _stack(model: Any, layers: int) -> Any:
    """Return the decoder's list of its layers. Raises BadInput where it is not found."""
    found = [
        module
        for module in model.get_decoder().children()
        if isinstance(module, nn.ModuleList) and len(module) == layers
    ]
    if len(found) != 1:
        raise BadInput(
            f"{printable(type(model).__name__)}: its list of {layers} layers is not found, so inserted ones cannot be"
            " passed over; leave `preserve` out"
        )
    return found[0]


def _switch_off(module: Any, back: ExitStack, *, grafts: bool) -> None:
    """Turn off a linear module's LoRA, and with `grafts` a module's grafts, until `back` closes."""
    held = vars(module)
    if "lora_A" in held.get("_modules", ()):
        # Like PEFT's `enable_adapters(False)`, which would also freeze the adapter.
        back.callback(setattr, module, "_disable_adapters", module._disable_adapters)
        module._disable_adapters = True
    if not grafts:
        return
    if isinstance(own := held.get("grafts"), tuple) and own:
        back.callback(setattr, module, "grafts", own)
        module.grafts = ()
    if isinstance(groups := held.get("groups"), list) and "routed" in held:
        # Linear modules with PMoE's slots.
        back.callback(setattr, module, "groups", groups)
        back.callback(setattr, module, "routed", held["routed"])
        module.groups, module.routed = [], False
