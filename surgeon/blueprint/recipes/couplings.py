"""Transport maps as data: what several recipes share, named, solved once, freed after its last user."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from surgeon.blueprint.recipes.alignment import MapRef
from surgeon.blueprint.recipes.recipe import Recipe


@dataclass(frozen=True, slots=True)
class WholeHeads:
    """Couplings solved together, whole attention heads onto whole heads: those named, of query, key and value.

    `output` is the attention output of both layers, whose columns count in the comparison of heads.
    """

    query: str
    key: str
    value: str
    output: tuple[Recipe, Recipe]
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def names(self) -> tuple[str, str, str]:
        """The couplings of query, key and value."""
        return self.query, self.key, self.value


@dataclass(frozen=True, slots=True)
class TextSupport:
    """Rows are compared by their modules' outputs on the first `samples` tokens of a text, in windows."""

    text: str
    samples: int
    window: int


@dataclass(frozen=True, slots=True)
class Coupling:
    """A transport map that several recipes share: rows `start:stop` of `first` (after `t_in`) onto those of `second`.

    `settings` are the keyword arguments of `surgeon.transport.TransportSettings`, kept as sorted pairs so
    that this stays plain data. With `whole_heads` it is one of three that are solved together. `support` None compares
    the rows themselves; else `first` and `second` are tensors of the base, whose modules are run. With `groups` the
    rows are those of routers, and the map is a permutation of experts, which form so many groups. `cost_first` compares
    the rows of `first` before `t_in`, which then only moves them.
    """

    name: str
    first: Recipe
    second: Recipe
    start: int
    stop: int
    t_in: MapRef
    settings: tuple[tuple[str, Any], ...]
    whole_heads: WholeHeads | None = None
    support: TextSupport | None = None
    groups: int | None = None
    cost_first: bool = False

    @property
    def needs(self) -> Iterator[str]:
        """Names of the couplings that are solved with it or before it."""
        made_from = [self.first, self.second]
        if self.whole_heads is not None:
            yield from self.whole_heads.names
            made_from.extend(self.whole_heads.output)
        for source in made_from:
            yield from source.maps
        if self.t_in.coupling is not None:
            yield self.t_in.coupling
