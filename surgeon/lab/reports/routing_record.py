"""The record of what routers and gates choose: `surgeon routing-report --to` writes it and `report` reads it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from surgeon.checkpoint.strict_json import parse_json_strict
from surgeon.common.files import read_given
from surgeon.errors import BadInput, printable

_MAX_BYTES = 64_000_000

Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Index = Annotated[int, Field(ge=0)]
Site = tuple[Index, Literal["attention", "ffn"]]


class NothingChooses(BadInput):
    """The error for an output that has no routers and gates whose choices could be recorded."""


class _Entry:
    """The base class of a record's parts; a file must contain exactly the annotated fields."""

    __pydantic_config__ = ConfigDict(extra="forbid", ser_json_inf_nan="constants")


@dataclass(frozen=True)
class RouterChoices(_Entry):
    """PMoE's router on one text: mean weight of each slot, share of tokens that prefer each slot, and some tokens.

    `examples` contains pairs (token, its slot of largest weight).
    """

    mean: tuple[Share, ...]
    largest: tuple[Share, ...]
    examples: tuple[tuple[str, Index], ...]


@dataclass(frozen=True)
class GateChoices(_Entry):
    """A gate on one text: its mean value (α for an interpolator), and the share of tokens for which it is zero.

    `loudness` is the mean of ‖output‖₁ / width of an adapter; None for an interpolator.
    """

    mean: Number
    closed: Share
    loudness: Number | None


@dataclass(frozen=True)
class ExpertChoices(_Entry):
    """Routed experts of one layer on one text: for each expert, the share of tokens that take it, and mean weight."""

    tokens: Annotated[tuple[Share, ...], Field(min_length=1)]
    weight: tuple[Share, ...]

    @property
    def unused(self) -> int:
        """The number of experts that no token takes."""
        return sum(share == 0 for share in self.tokens)


@dataclass(frozen=True)
class TextChoices(_Entry):
    """The choices on one text of `tokens` tokens.

    `states[s][k]` is the weight that site s gave control state k, mean over tokens; rows are in the order of
    `RoutingReport.sites`. `gates` are by the layer's number and the module (`3.adapter`, `3.interpolator`), `experts`
    by the layer's number (`3`, or `3.branch`).
    """

    tokens: Index
    router: RouterChoices | None
    states: tuple[tuple[Share, ...], ...]
    gates: dict[str, GateChoices]
    experts: dict[str, ExpertChoices] = field(default_factory=dict)


@dataclass(frozen=True)
class RouterPlace(_Entry):
    """The place of a router: the number of layers below it, and its number of slots."""

    layer: Index
    slots: Annotated[int, Field(ge=1, le=10_000)]


@dataclass(frozen=True)
class RoutingReport(_Entry):
    """The choices of routers and gates on each text; `sites` lists (layer, block) of the control states.

    `surgeon_routing` is the version of the file format.
    """

    surgeon_routing: Literal[1]
    model: str
    router: RouterPlace | None
    sites: tuple[Site, ...]
    texts: dict[str, TextChoices]

    def __repr__(self) -> str:
        return f"RoutingReport({self.model!r}, {self.slots} slots, {len(self.sites)} sites, texts {list(self.texts)})"

    @property
    def slots(self) -> int:
        """The number of the router's slots; 0 without a router."""
        return self.router.slots if self.router else 0

    @property
    def gates(self) -> list[str]:
        """The names of all gates."""
        return list(dict.fromkeys(gate for text in self.texts.values() for gate in text.gates))

    @property
    def routed(self) -> bool:
        """Whether layers have routed experts."""
        return any(text.experts for text in self.texts.values())

    def most_used(self, text: TextChoices, most: int) -> str:
        """Return, as text, the control states with most of a text's weight, and their shares of it."""
        sums = [sum(row[state] for row in text.states) for state in range(len(self.sites))]
        total = sum(sums) or 1.0
        order = sorted(range(len(sums)), key=lambda state: -sums[state])[:most]
        return ", ".join(f"{self.sites[s][0]}.{self.sites[s][1]} {sums[s] / total:.0%}" for s in order if sums[s])

    def to_json(self) -> dict[str, Any]:
        """Return plain data: the file's content and `--json`.

        Keys:
            `surgeon_routing`: version of the format
            `model`: the output's name
            `router`: its `layer` and `slots`, or null
            `sites`: each site's layer and block
            `texts`: by name `tokens`, `router` (`mean`, `largest`, `examples`), `states`, `gates`, `experts` (by layer
                `tokens`, each expert's share of them, and `weight`)
        """
        plain: dict[str, Any] = TypeAdapter(RoutingReport).dump_python(self, mode="json")
        return plain


def read_routing(file: Path) -> RoutingReport:
    """Return the report in `file`. Raises BadInput, which names the first thing that is missing or wrong."""
    shown = printable(str(file))
    content = read_given(file, what="routing record", most=_MAX_BYTES)
    try:
        read = TypeAdapter(RoutingReport).validate_python(
            parse_json_strict(content, file=str(file), max_bytes=_MAX_BYTES, constants=True)
        )
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = printable(".".join(str(step) for step in problem["loc"]) or "the file")
        raise BadInput(
            f"{shown}: not a routing report ({where}: {printable(problem['msg'])}); `surgeon routing-report --to FILE`"
            " writes one"
        ) from None
    for name, text in read.texts.items():
        if text.states and {len(text.states), *map(len, text.states)} != {len(read.sites)}:
            raise BadInput(f"{shown}: states of {printable(name)} are not {len(read.sites)} × {len(read.sites)}")
        odd = [layer for layer, found in text.experts.items() if len(found.tokens) != len(found.weight)]
        if odd:
            raise BadInput(f"{shown}: experts of layer {printable(odd[0])} have shares and weights of other numbers")
        router = text.router
        if router and (
            {len(router.mean), len(router.largest)} != {read.slots} or any(s >= read.slots for _, s in router.examples)
        ):
            raise BadInput(f"{shown}: the router of {printable(name)} has other slots than the {read.slots} named")
    return read
