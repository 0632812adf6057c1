"""A graft for planners: its keys in `config.surgery`, their texts in previews, and their checks.

Also the initial values of the narrow matrices that several grafts share.
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

    `in_twin` defines what happens to a layer's entry when the layer gets an expanded twin: `copied`, the twin gets a
    copy too; `shared`, the entry applies to both; `refused`, no twin can be made. A `branching` kind makes twins: its
    entries name a `branch`, a layer number after the trunk. A `whole` kind has one entry for the model instead of a
    list.
    """

    key: ClassVar[str]
    mark: ClassVar[str] = "+"
    in_twin: ClassVar[Literal["copied", "shared", "refused"]] = "shared"
    branching: ClassVar[bool] = False
    whole: ClassVar[bool] = False
    # The fields of an entry, which has one layer, where its rules do not check them themselves.
    fields: ClassVar[tuple[str, ...]] = ()

    def text(self, entry: Mapping[str, Any], where: str = "") -> str:
        """Return the text for preview and manifest, such as `adapter of 512, relu gate`.

        `where` is " in the branch" in a twin.
        """
        raise NotImplementedError

    def sign(self, entry: Mapping[str, Any]) -> str:
        """Return one or two characters for the entry in pictures of the layers; by default its kind's `mark`."""
        return self.mark

    def claims(self, suffix: str) -> bool:
        """Return whether a layer's tensor is of this kind, by its name after `layers.{i}.` (a twin's with its
        prefix).
        """
        raise NotImplementedError

    def owns(self, entry: Mapping[str, Any], suffix: str) -> bool:
        """Return whether such a tensor belongs to this entry."""
        return self.claims(suffix)

    def kept(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Return a base's entry without layer numbers and marked frozen, because the new surgery did not make it."""
        return without_numbers(entry) | {"frozen": True}

    def thawed(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of an entry without `frozen`, so that it is trained."""
        return {key: copy.deepcopy(value) for key, value in entry.items() if key != "frozen"}


def without_numbers(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of an entry without the numbers of its layers."""
    return {key: copy.deepcopy(value) for key, value in entry.items() if key not in _LAYER_NUMBERS}


class KnownGraft(GraftRules):
    """A graft as planners use it: its rules, which also ship with outputs, and its kinds and checks, which do not."""

    # The kind of each key about layers; the module and class of its code; whether an encoder can carry it; the blocks
    # next to which it may run.
    kinds: ClassVar[tuple[Kind, ...]]
    part: ClassVar[str]
    module: ClassVar[str]
    on_encoders: ClassVar[bool] = False
    roles: ClassVar[tuple[str, ...]] = ("self_attn", "mlp")

    @property
    def settings(self) -> tuple[str, ...]:
        """The graft's keys that are not about layers."""
        return tuple(key for key in self.keys if key not in [kind.key for kind in self.kinds])

    def present(self, raw: Mapping[str, Any]) -> bool:
        """Return whether a `config.surgery` contains any key of this graft."""
        return any(raw.get(key) for key in self.keys)

    def check(self, surgery: Surgery, config: Any) -> None:
        """Check the result of `read`, by itself and against the rest of the config. Raises ValueError."""

    def uses(self, raw: Mapping[str, Any]) -> tuple[tuple[str, str, str], ...] | None:
        """Return the mapping that its `Graft` gets, as (key, module, class made without arguments); None for none."""
        return None


def linear_birth(rows: int, columns: int) -> Normal:
    """Return an initial matrix of variance 1/(3 · columns), the variance in `nn.Linear` and in LoRA's A."""
    return Normal((rows, columns), math.sqrt(1 / (3 * columns)))


def low_rank_births(rank: int, width_in: int, width_out: int) -> dict[str, Birth]:
    """Return the initial factors of a product B A of two narrow matrices; it adds nothing while B is still zero."""
    return {"lora_A": linear_birth(rank, width_in), "lora_B": Fill((width_out, rank))}
