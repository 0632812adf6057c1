"""What planners know of a graft: the keys of `config.surgery` that it has, how they are shown, and their checks.

Beside these, what narrow matrices of several grafts hold at birth.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from surgeon.runtime.births import Birth, Fill, Normal
from surgeon.runtime.rules import GraftRules, Surgery

_LAYER_NUMBERS = ("layer", "branch")


class Kind:
    """One key of `config.surgery`, whose value is a list with one entry for each layer (or several).

    `in_twin`: what becomes of a layer's entry when the layer gets an expanded twin: a copy of it stands in the twin
    too, it stands for both, or no twin can be made. A `branching` kind is what makes twins: its entries name a
    `branch`, a layer of the tail. Of a `whole` kind there is one entry for the model instead of a list.
    """

    key: ClassVar[str]
    mark: ClassVar[str] = "+"
    in_twin: ClassVar[Literal["copied", "shared", "refused"]] = "shared"
    branching: ClassVar[bool] = False
    whole: ClassVar[bool] = False
    # What an entry can say, one for each layer, where its rules do not check that themselves.
    fields: ClassVar[tuple[str, ...]] = ()

    def text(self, entry: Mapping[str, Any], where: str = "") -> str:
        """What preview and manifest call it: `adapter of 512, relu gate`; `where` is " in the branch" in a twin."""
        raise NotImplementedError

    def sign(self, entry: Mapping[str, Any]) -> str:
        """One or two characters for it in pictures of the layers: its kind's `mark`, where nothing else is said."""
        return self.mark

    def claims(self, suffix: str) -> bool:
        """Whether a tensor of a layer, by what follows `layers.{i}.` (in a twin: its prefix too), is of this kind."""
        raise NotImplementedError

    def owns(self, entry: Mapping[str, Any], suffix: str) -> bool:
        """Whether such a tensor belongs to this entry."""
        return self.claims(suffix)

    def kept(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """A base's entry without layer numbers and marked frozen, as no new surgery made it."""
        return without_numbers(entry) | {"frozen": True}

    def thawed(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of an entry that trains."""
        return {key: copy.deepcopy(value) for key, value in entry.items() if key != "frozen"}


def without_numbers(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of an entry without the numbers of its layers."""
    return {key: copy.deepcopy(value) for key, value in entry.items() if key not in _LAYER_NUMBERS}


class KnownGraft(GraftRules):
    """A graft as planners know it: beside its rules, which ship, its kinds and what they check."""

    # For each key that says something of layers its kind; where its modules are; whether an encoder can carry it;
    # beside which blocks it may stand.
    kinds: ClassVar[tuple[Kind, ...]]
    part: ClassVar[str]
    module: ClassVar[str]
    on_encoders: ClassVar[bool] = False
    roles: ClassVar[tuple[str, ...]] = ("self_attn", "mlp")

    @property
    def settings(self) -> tuple[str, ...]:
        """Its keys that are of no layer."""
        return tuple(key for key in self.keys if key not in [kind.key for kind in self.kinds])

    def present(self, raw: Mapping[str, Any]) -> bool:
        """Whether a `config.surgery` says anything of it."""
        return any(raw.get(key) for key in self.keys)

    def check(self, surgery: Surgery, config: Any) -> None:
        """Check what `read` found, by itself and against the rest of the config. Raises ValueError."""

    def uses(self, raw: Mapping[str, Any]) -> tuple[tuple[str, str, str], ...] | None:
        """What its `Graft` gets as a mapping: (key, module, class made without arguments) each; None: it gets none."""
        return None


def linear_birth(rows: int, columns: int) -> Normal:
    """A matrix of variance 1/(3 · columns), as `nn.Linear` and LoRA's A have it."""
    return Normal((rows, columns), math.sqrt(1 / (3 * columns)))


def low_rank_births(rank: int, width_in: int, width_out: int) -> dict[str, Birth]:
    """A product B A of two narrow matrices that adds nothing at birth, as B is zero."""
    return {"lora_A": linear_birth(rank, width_in), "lora_B": Fill((width_out, rank))}
