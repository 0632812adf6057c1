"""A grown model computing as its base: the same weights, grafts off, inserted layers passed over. No second copy.

What shipped code looks at is changed and put back: a layer's and a block's `grafts`, the slots of linear modules, the
layers in the decoder's list; and whether PEFT's modules add their LoRA. Only forwards without gradient and without a
cache are computed so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from surgeon.errors import BadInput, SurgeonError, printable

# Tokens on which the form of a layer's output is looked at.
_PROBED = 4


class BaseWithin:
    """The base inside `model`, whose decoder has `layers` layers, those numbered `inserted` of them not the base's.

    `grafts`: the model's grafts are the base's.
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
        """Inside, in evaluation mode and without gradient, a forward without a cache is the base's."""
        model, training = self.model, self.model.training
        with ExitStack() as back, torch.no_grad():
            back.callback(model.train, training)
            model.eval()
            for module in model.modules():
                _switch_off(module, back, grafts=not self.grafts)
            self._pass_over(back)
            yield

    def logits(self, **inputs: Tensor) -> Tensor:
        """The base's logits (of a head that hands on what it reads: its hidden states) for the inputs."""
        with self.on():
            found: Tensor = self.model(**inputs, use_cache=False).logits
        return found

    def check(self, ids: Tensor, rows: int | None) -> None:
        """Compare logits for the first `rows` tokens on `ids` (1 T), where the model computes the base's function.

        Raises SurgeonError where they differ from those of the base within.
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
        for passed in self.passed:
            back.callback(self.stack.__setitem__, passed.number, passed.layer)
            self.stack[passed.number] = passed

    def _look(self) -> None:
        """Run the model once, to see in what form inserted layers return their hidden states."""
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
    """Replaces an inserted layer, whose attributes it shows: returns what comes in.

    While it `looks`, the layer runs, and the form of what it returns is kept.
    """

    layer: nn.Module

    def __init__(self, number: int, layer: nn.Module) -> None:
        super().__init__()
        # Past nn.Module: the layer is no part of it, and stays where checkpoints and optimizers know it.
        self.__dict__["layer"] = layer
        self.number = number
        self.looks = True
        self.form: tuple[type[Any], int] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """B T D, alone or first in the layer's form."""
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
    """The decoder's list of its layers."""
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
    """Let a linear module be without its LoRA, with `grafts` a layer, a block or it be native, until `back` closes."""
    held = vars(module)
    if "lora_A" in held.get("_modules", ()):
        # As PEFT's `enable_adapters(False)` does, which also freezes the adapter.
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
