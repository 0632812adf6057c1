"""The record of a routing report: its fields, and how its file is read."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from surgeon.checkpoint.strict_json import parse_json_strict
from surgeon.errors import BadInput, printable


@dataclass(frozen=True)
class RouterChoices:
    """PMoE's router on one text: mean weight of each slot, share of tokens it is the largest for, and some tokens.

    `examples` are (token, its slot of largest weight).
    """

    mean: tuple[float, ...]
    largest: tuple[float, ...]
    examples: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class GateChoices:
    """A gate on one text: its mean value (α of an interpolator), and the share of tokens for which it is zero.

    `loudness` is the mean of what an adapter adds, ‖·‖₁ over the width; None for an interpolator.
    """

    mean: float
    closed: float
    loudness: float | None


@dataclass(frozen=True)
class TextChoices:
    """The choices on one text of `tokens` tokens.

    `states[s][k]` is the weight that site s gave control state k, mean over tokens; rows are in the order of
    `RoutingReport.sites`. `gates` are by the layer's number and the module (`3.adapter`, `3.interpolator`).
    """

    tokens: int
    router: RouterChoices | None
    states: tuple[tuple[float, ...], ...]
    gates: dict[str, GateChoices]


@dataclass(frozen=True)
class RoutingReport:
    """The choices of routers and gates, text by text.

    `sites` are (layer, block) of the control states, `router_layer` is the number of layers below PMoE's router.
    """

    model: str
    slots: int
    router_layer: int | None
    sites: tuple[tuple[int, str], ...]
    texts: dict[str, TextChoices] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"RoutingReport({self.model!r}, {self.slots} slots, {len(self.sites)} sites, texts {list(self.texts)})"

    def to_json(self) -> dict[str, Any]:
        """As plain data: the file's content and `--json`."""
        return {
            "surgeon_routing": 1,
            "model": self.model,
            "router": None if self.router_layer is None else {"layer": self.router_layer, "slots": self.slots},
            "sites": [list(site) for site in self.sites],
            "texts": {
                name: {
                    "tokens": text.tokens,
                    "router": None
                    if text.router is None
                    else {
                        "mean": list(text.router.mean),
                        "largest": list(text.router.largest),
                        "examples": [list(example) for example in text.router.examples],
                    },
                    "states": [list(row) for row in text.states],
                    "gates": {
                        gate: {"mean": choices.mean, "closed": choices.closed, "loudness": choices.loudness}
                        for gate, choices in text.gates.items()
                    },
                }
                for name, text in self.texts.items()
            },
        }


_MAX_BYTES = 64_000_000


Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]


Number = Annotated[float, Field(allow_inf_nan=False)]


Index = Annotated[int, Field(ge=0)]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Router(_Entry):
    mean: list[Share]
    largest: list[Share]
    examples: list[tuple[str, Index]]


class _Gate(_Entry):
    mean: Number
    closed: Share
    loudness: Number | None


class _Text(_Entry):
    tokens: Index
    router: _Router | None
    states: list[list[Share]]
    gates: dict[str, _Gate]


class _Place(_Entry):
    layer: Index
    slots: Annotated[int, Field(ge=1, le=10_000)]


class _Routing(_Entry):
    surgeon_routing: Literal[1]
    model: str
    router: _Place | None
    sites: list[tuple[Index, Literal["attention", "ffn"]]]
    texts: dict[str, _Text]


def read_routing(file: Path) -> RoutingReport:
    """The report in `file`. Raises BadInput, which names the first thing that is missing or wrong."""
    shown = printable(str(file))
    try:
        content = file.read_bytes()
    except OSError as error:
        raise BadInput(f"{shown}: cannot be read ({error.strerror})") from None
    try:
        read = _Routing.model_validate(parse_json_strict(content, file=str(file), max_bytes=_MAX_BYTES))
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = printable(".".join(str(step) for step in problem["loc"]) or "the file")
        raise BadInput(
            f"{shown}: not a routing report ({where}: {printable(problem['msg'])}); `surgeon routing-report --to FILE`"
            " writes one"
        ) from None
    slots = read.router.slots if read.router else 0
    for name, text in read.texts.items():
        if text.states and {len(text.states), *map(len, text.states)} != {len(read.sites)}:
            raise BadInput(f"{shown}: states of {printable(name)} are not {len(read.sites)} × {len(read.sites)}")
        router = text.router
        if router and (
            {len(router.mean), len(router.largest)} != {slots} or any(s >= slots for _, s in router.examples)
        ):
            raise BadInput(f"{shown}: the router of {printable(name)} has other slots than the {slots} named")
    return RoutingReport(
        model=read.model,
        slots=slots,
        router_layer=read.router.layer if read.router else None,
        sites=tuple(read.sites),
        texts={name: _text(text) for name, text in read.texts.items()},
    )


def _text(text: _Text) -> TextChoices:
    router = text.router
    return TextChoices(
        tokens=text.tokens,
        router=RouterChoices(tuple(router.mean), tuple(router.largest), tuple(router.examples)) if router else None,
        states=tuple(tuple(row) for row in text.states),
        gates={name: GateChoices(gate.mean, gate.closed, gate.loudness) for name, gate in text.gates.items()},
    )
