"""A routing report that `surgeon routing-report --to` wrote, read again; as untrusted as any file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from surgeon.checkpoint.strict_json import parse_json_strict
from surgeon.errors import BadInput, printable
from surgeon.results import GateChoices, RouterChoices, RoutingReport, TextChoices

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
    """The report in `file`; BadInput names the first thing that is not as it must be."""
    shown = printable(str(file))
    try:
        content = file.read_bytes()
    except OSError as error:
        raise BadInput(f"{shown}: cannot be read ({error.strerror})") from None
    try:
        told = _Routing.model_validate(parse_json_strict(content, file=str(file), max_bytes=_MAX_BYTES))
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = printable(".".join(str(step) for step in problem["loc"]) or "the file")
        raise BadInput(
            f"{shown}: not a routing report ({where}: {printable(problem['msg'])}); `surgeon routing-report --to FILE`"
            " writes one"
        ) from None
    slots = told.router.slots if told.router else 0
    for name, text in told.texts.items():
        if text.states and {len(text.states), *map(len, text.states)} != {len(told.sites)}:
            raise BadInput(f"{shown}: states of {printable(name)} are not {len(told.sites)} × {len(told.sites)}")
        router = text.router
        if router and (
            {len(router.mean), len(router.largest)} != {slots} or any(s >= slots for _, s in router.examples)
        ):
            raise BadInput(f"{shown}: the router of {printable(name)} speaks of other slots than the {slots} named")
    return RoutingReport(
        model=told.model,
        slots=slots,
        router_layer=told.router.layer if told.router else None,
        sites=tuple(told.sites),
        texts={name: _text(text) for name, text in told.texts.items()},
    )


def _text(text: _Text) -> TextChoices:
    router = text.router
    return TextChoices(
        tokens=text.tokens,
        router=RouterChoices(tuple(router.mean), tuple(router.largest), tuple(router.examples)) if router else None,
        states=tuple(tuple(row) for row in text.states),
        gates={name: GateChoices(gate.mean, gate.closed, gate.loudness) for name, gate in text.gates.items()},
    )
