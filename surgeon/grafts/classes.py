"""The source of a model type's classes with grafts, composed from the runtime's and transformers' classes.

`classes.template` contains what every model has, with placeholders. This module makes the parts that repeat or are
optional. `bundle` joins the result with the modules that it needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from surgeon.grafts.composition import (
    PREFIX,
    TORCH_CLASSES,
    Composition,
    HeadClass,
    SiteClass,
    SpanClass,
    short_name,
    upcycled,
)
from surgeon.grafts.kinds import KnownGraft
from surgeon.grafts.registry import GRAFTS
from surgeon.runtime.rules import GraftRules

# The longest line of the joined file.
WIDTH = 120

_TEXT_CONFIG = """
    def to_dict(self) -> dict[str, Any]:
        \"""Return the config as a dict; the text config does not repeat `surgery`.\"""
        return without_surgery(super().to_dict(), {path})


class {text}({native}):
    \"""The native config of the text decoder, with the `surgery` of the whole model.\"""

    grafts: ClassVar[tuple[Any, ...]] = {config}.grafts
"""

_SITE = """

class {upcycled}(Site, {native}):
    \"""The native block with room for grafts.\"""
"""

_LAYER = """

class {upcycled}({mixed_in}, {native}):
    \"""The native layer with room for grafts.\"""

    {places}
"""

_TWINNED_LAYER = """

class {upcycled}Branch({branch_mixed_in}, {native}):
    \"""The expanded twin of a trunk layer.\"""

    {places}


class {upcycled}({mixed_in}, {native}):
    \"""The native layer of the trunk, with room for grafts and an expanded twin.\"""

    {places}
    branch_of = {upcycled}Branch
"""

# The class at a block's beginning, at its end, or at both: its name's suffix, its mixins, and its docstring's words.
_SPAN_PARTS = {
    "Start": ("SpanStart", "able to keep what the block reads"),
    "End": ("SpanEnd", "able to carry grafts"),
    "Block": ("SpanEnd, SpanStart", "able to carry grafts"),
}

_SPAN = """

class {upcycled}({mixed_in}, {native}):
    \"""The native module, {able}.\"""
"""

_PLACES = """

# {are}
{name} = ({places})
"""
_SITES_ARE = "Blocks that can carry grafts."
_SPANS_ARE = "Blocks that can carry grafts: path, class and class with grafts of beginning and end; their usual name."

_OUTER = """

class {model}(UpcycledOuter, {native}):
    \"""The model without a head.\"""

    config_class = {config}
    stack = "{stack}"
    decoder_class = {text}
"""


@dataclass(frozen=True)
class Use:
    """A graft in a joined file: its rules, and the objects it gets from other parts (key, module, class)."""

    rules: KnownGraft
    taken: tuple[tuple[str, str, str], ...] | None

    @property
    def twins(self) -> bool:
        """Whether layers get expanded twins."""
        return any(kind.branching for kind in self.rules.kinds)

    @property
    def gates(self) -> bool:
        """Whether the graft closes other grafts."""
        return "gated" in self.rules.keys

    @property
    def crosses(self) -> bool:
        """Whether some of the graft's computation may cross layers."""
        return type(self.rules).crosses is not GraftRules.crosses

    @property
    def source(self) -> str:
        """The source by which the config class makes the graft: `ControlGraft({"lerp": Lerp()})`."""
        if self.taken is None:
            return f"{self.rules.module}()"
        taken = ", ".join(f'"{key}": {name}()' for key, _, name in self.taken)
        return f"{self.rules.module}({{{taken}}})"


def uses_of(raw: Mapping[str, Any], native: Composition) -> tuple[Use, ...]:
    """Return the grafts that a `config.surgery` asks for, as far as such a model can carry them."""
    rules = [rules for rules in GRAFTS.values() if rules.present(raw) and (rules.on_encoders or not native.encoder)]
    return tuple(Use(each, each.uses(raw)) for each in rules)


def classes_of(native: Composition, uses: tuple[Use, ...]) -> str:
    """Return the source of a model type's classes with these grafts, preceded by its imports."""
    several = native.text_config != native.config
    config, text_config = upcycled(native.config), upcycled(native.text_config)
    model, text = upcycled(native.model), upcycled(native.text)
    sites, spans = sites_of(native, uses), spans_of(native, uses)
    ends = [told for span in spans for told in (span.reader, span.writer)]
    imports: dict[str, set[str]] = {}
    for each in (*native.classes_beside(sites), *ends):
        module, _, name = each.rpartition(".")
        imports.setdefault(module if each in TORCH_CLASSES else f"transformers.{module}", set()).add(name)
    layer_classes = _listed([f"{short_name(each)}: {upcycled(each)}" for each in native.layers])
    twins, gated = any(use.twins for use in uses), any(use.gates for use in uses)
    once = len(native.layers) == 1 and not twins and len(sites) == 1 and not spans
    model_parts = [*(["TwinnedModel"] * twins), *(["CrossingModel"] * any(use.crosses for use in uses))]
    outer = native.model not in (native.text, native.head)
    template = (files(__package__) / "classes.template").read_text(encoding="utf-8")
    return template.format(
        imports="\n".join(f"from {name} import {', '.join(held)}" for name, held in imports.items()),
        Config=config,
        NativeConfig=short_name(native.config),
        TextConfig=text_config,
        text_config=_TEXT_CONFIG.format(
            config=config, text=text_config, native=short_name(native.text_config), path=native.path
        )
        if several
        else "",
        text_surgery="\n        self.get_text_config(decoder=True).surgery = surgery" if native.path else "",
        model_type=PREFIX + native.model_type,
        grafts=f"{uses[0].source}," if len(uses) == 1 else _listed([use.source for use in uses]),
        blocks=_blocks(sites, spans, once=once),
        layers="".join(_layer(native, each, twins, gated, sites, spans, once) for each in native.layers),
        Text=text,
        NativeText=short_name(native.text),
        text_is="The model without a head" if native.encoder else "The text decoder",
        model_parts=", ".join(model_parts or ["UpcycledModel"]),
        stack=native.stack,
        first_position=f"\n    first_position = {native.first_position}"
        if native.first_position and "CrossingModel" in model_parts
        else "",
        layer_classes=layer_classes,
        unsplit=", ".join(f'"{upcycled(each)}"' for each in native.layers),
        model=_OUTER.format(model=model, native=short_name(native.model), config=config, stack=native.stack, text=text)
        if outer
        else "",
        Model=model,
        heads=_heads(native),
        conversions="\n".join(
            f"carry_conversions({upcycled(each)}, {short_name(each)})"
            for each in dict.fromkeys((native.text, native.model))
            if each != native.head
        ),
    )


def sites_of(native: Composition, uses: tuple[Use, ...]) -> tuple[SiteClass, ...]:
    """Return the blocks that are one module and that one of the grafts may run next to."""
    roles = {role for use in uses for role in use.rules.roles}
    return tuple(site for site in native.sites if site.role in roles)


def spans_of(native: Composition, uses: tuple[Use, ...]) -> tuple[SpanClass, ...]:
    """Return the blocks that are not one module and that one of the grafts may run next to."""
    roles = {role for use in uses for role in use.rules.roles}
    return tuple(span for span in native.spans if span.role in roles)


def _blocks(sites: tuple[SiteClass, ...], spans: tuple[SpanClass, ...], *, once: bool) -> str:
    """Return the classes of blocks with grafts and the tables of their places.

    The tables are left out with `once`, where only one layer class uses them and states the place itself.
    """
    found = [("GRAFT_SITES", _SITES_ARE, *_sites(sites))] if sites else []
    found += [("GRAFT_SPANS", _SPANS_ARE, *_spans(spans))] if spans else []
    classes = "".join(source for _, _, source, _ in found)
    return classes + "".join(
        _PLACES.format(are=are, name=name, places=_placed(places)) for name, are, _, places in found if not once
    )


def _placed(places: list[str]) -> str:
    """Return the inside of a tuple, formatted as ruff does: a single place stays in one line."""
    return f"{places[0]}," if len(places) == 1 else "".join(f"\n    {place}," for place in places) + "\n"


def _layer(
    native: Composition,
    told: str,
    twins: bool,
    gated: bool,
    sites: tuple[SiteClass, ...],
    spans: tuple[SpanClass, ...],
    once: bool,
) -> str:
    """Return the class of a layer with grafts, and with `twins` of its twin; `gated`: a domain gate closes grafts.

    With `once` the class itself states the places of blocks with grafts.
    """
    stated = [f'activation_field = "{native.activation}"']
    where = f"({_sites(sites)[1][0]},)" if once else "GRAFT_SITES"
    stated += [f"sites: ClassVar[Any] = {where}"] * bool(sites) + ["spans: ClassVar[Any] = GRAFT_SPANS"] * bool(spans)
    return (_TWINNED_LAYER if twins else _LAYER).format(
        upcycled=upcycled(told),
        native=short_name(told),
        mixed_in=", ".join(
            [*["GatedLayer"] * gated, *["TwinnedLayer"] * twins, *["SpannedLayer"] * bool(spans)] or ["UpcycledLayer"]
        ),
        branch_mixed_in=", ".join(["BranchLayer", *["SpannedLayer"] * bool(spans)]),
        places="\n    ".join(stated),
    )


def _sites(sites: tuple[SiteClass, ...]) -> tuple[str, list[str]]:
    """Return the classes of blocks that are one module, and their places."""
    kinds = dict.fromkeys(site.native for site in sites)
    return "".join(_SITE.format(upcycled=upcycled(each), native=short_name(each)) for each in kinds), [
        f'("{site.block}", {short_name(site.native)}, "{site.role}", {upcycled(site.native)})' for site in sites
    ]


def _spans(spans: tuple[SpanClass, ...]) -> tuple[str, list[str]]:
    """Return the classes of blocks that are not one module, and their places."""
    found: dict[tuple[str, str], None] = {}
    places: list[str] = []
    for span in spans:
        parts = ("Block", "Block") if span.reads == span.writes else ("Start", "End")
        ends = tuple(zip((span.reader, span.writer), parts, strict=True))
        found |= dict.fromkeys(ends)
        (reader, start), (writer, end) = ends
        first = f'"{span.reads}", {short_name(reader)}, {upcycled(reader)}{start}'
        last = f'"{span.writes}", {short_name(writer)}, {upcycled(writer)}{end}'
        placed = f'({first}, {last}, "{span.role}")'
        # Formatted as ruff does with text longer than a line.
        long = len(placed) > WIDTH - 5
        places.append(f"(\n        {placed[1:-1].replace(', ', f',{chr(10)}        ')},\n    )" if long else placed)
    classes = ""
    for told, part in found:
        mixed_in, able = _SPAN_PARTS[part]
        classes += _SPAN.format(upcycled=upcycled(told) + part, mixed_in=mixed_in, native=short_name(told), able=able)
    return classes, places


def _heads(native: Composition) -> str:
    """Return the source text that makes the classes with heads: a call of `head` for each."""
    first = HeadClass(native.autos[-1], native.head, native.output)
    made = f"\nhead = partial(head_over, {upcycled(native.config)}, {upcycled(native.text)})\n"
    for head in (first, *native.heads):
        given = [short_name(head.native), short_name(head.output), f'"{head.auto}"']
        given += ["by_token=True"] * (head is first and not native.encoder)
        given += [f'base_model_prefix="{head.prefix}"'] * bool(head.prefix)
        made += _called(f"{upcycled(head.native)} = head", given)
    return made


def _called(function: str, given: list[str]) -> str:
    """Return a call formatted as ruff does: in one line, with all arguments in one line, or with one per line."""
    for opened, between, closed in (("(", ", ", ")"), ("(\n    ", ", ", "\n)"), ("(\n    ", ",\n    ", ",\n)")):
        call = function + opened + between.join(given) + closed
        if max(map(len, call.splitlines())) <= WIDTH:
            break
    return f"{call}\n"


def _listed(entries: list[str]) -> str:
    """Return entries one per line, each with a comma, as ruff keeps them; a single entry stays in its line."""
    if len(entries) == 1:
        return entries[0]
    return "".join(f"\n        {entry}," for entry in entries) + ("\n    " if entries else "")
