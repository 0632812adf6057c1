"""The source of a model type's named classes with grafts, composed of the runtime's and transformers' own.

`classes.template` has what every model has, with names to be filled in; here are what is there several times or not
always. `bundle` joins all of it to the modules that it needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from .composition import PREFIX, TORCH_CLASSES, Composition, short_name, upcycled
from .registry import GRAFTS
from .rules import GraftRules

# How long a line of the joined file may be.
WIDTH = 120

_TEXT_CONFIG = """
    def to_dict(self) -> dict[str, Any]:
        \"""As the native config's.\"""
        return without_surgery(super().to_dict(), {path})


class {text}({native}):
    \"""The native config of the text decoder, with the `surgery` of the whole.\"""

    grafts: ClassVar[tuple[Graft, ...]] = {config}.grafts
"""

_SITE = """

class {upcycled}(Site, {native}):
    \"""The native block, able to carry grafts.\"""
"""

_LAYER = """

class {upcycled}({mixed_in}, {native}):
    \"""A layer.\"""

    {places}
"""

_TWINNED_LAYER = """

class {upcycled}Branch({branch_mixed_in}, {native}):
    \"""The expanded twin of a trunk layer.\"""

    {places}


class {upcycled}({mixed_in}, {native}):
    \"""A layer of the trunk.\"""

    {places}
    branch_of = {upcycled}Branch
"""

# The class at a block's end, at its beginning, or at both: what it is called after the native one, and is composed of.
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
_SITES_ARE = (
    "Blocks that can carry grafts: their name in a layer, their class, what grafts call them, their class with grafts."
)
_SPANS_ARE = "Blocks that can carry grafts: path, class and class with grafts of beginning and end; their usual name."

_OUTPUT = """

@dataclass
class {upcycled}({native}):
    \"""The native output, and in training the auxiliary losses before their weights (None where they are off).{losses}
"""

_HEAD = """

class {upcycled}({bases}):
    \"""{what}.\"""

    config_class = {config}
    stack = "{stack}"
    decoder_class = {text}
    output_class = {output}
    by_token = {by_token}{prefix}
    forward = head_forward({native}.forward)
"""

_OUTER = """

class {model}(UpcycledOuter, {native}):
    \"""The model without a head.\"""

    config_class = {config}
    stack = "{stack}"
    decoder_class = {text}
"""


@dataclass(frozen=True)
class Use:
    """A graft in a joined file: its rules, and what it gets from other parts (key, module, class)."""

    rules: GraftRules
    taken: tuple[tuple[str, str, str], ...] | None

    @property
    def twins(self) -> bool:
        """Whether layers get expanded twins."""
        return any(kind.branching for kind in self.rules.kinds)

    @property
    def gates(self) -> bool:
        """Whether it closes others."""
        return "gated" in self.rules.keys

    @property
    def crosses(self) -> bool:
        """Whether something of it may cross layers."""
        return type(self.rules).crosses is not GraftRules.crosses

    @property
    def source(self) -> str:
        """How the config class makes it: `ControlGraft({"lerp": Lerp()})`."""
        if self.taken is None:
            return f"{self.rules.module}()"
        taken = ", ".join(f'"{key}": {name}()' for key, _, name in self.taken)
        return f"{self.rules.module}({{{taken}}})"


def uses_of(raw: Mapping[str, Any], native: Composition) -> tuple[Use, ...]:
    """The grafts that a `config.surgery` asks for, as far as such a model can carry them."""
    rules = [rules for rules in GRAFTS.values() if rules.present(raw) and (rules.on_encoders or not native.encoder)]
    return tuple(Use(each, each.uses(raw)) for each in rules)


def classes_of(native: Composition, uses: tuple[Use, ...]) -> str:
    """The source of a model type's classes with these grafts, its imports before it."""
    several = native.text_config != native.config
    config, text_config = upcycled(native.config), upcycled(native.text_config)
    model, text = upcycled(native.model), upcycled(native.text)
    own_heads = (native.head, *(head.native for head in native.heads))
    outer = list(dict.fromkeys((native.text, native.model, *own_heads)))
    spans = [told for span in native.spans for told in (span.reader, span.writer)]
    imports: dict[str, set[str]] = {}
    for each in (*native.classes, *spans):
        module, _, name = each.rpartition(".")
        imports.setdefault(module if each in TORCH_CLASSES else f"transformers.{module}", set()).add(name)
    if not native.encoder:
        imports["transformers"] = {"GenerationMixin"}
    layer_classes = "".join(f"\n        {short_name(each)}: {upcycled(each)}," for each in native.layers)
    twins, gated = any(use.twins for use in uses), any(use.gates for use in uses)
    model_parts = [*(["TwinnedModel"] * twins), *(["CrossingModel"] * any(use.crosses for use in uses))]
    found_by = {**dict.fromkeys(native.autos, native.head), **{head.auto: head.native for head in native.heads}}
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
        model_type=PREFIX + native.model_type,
        grafts=f"{uses[0].source}," if len(uses) == 1 else _listed(uses),
        blocks=_blocks(native),
        layers="".join(_layer(native, each, twins, gated) for each in native.layers),
        Text=text,
        NativeText=short_name(native.text),
        text_is="The model without a head" if native.encoder else "The text decoder",
        model_parts=", ".join(model_parts or ["UpcycledModel"]),
        stack=native.stack,
        first_position=f"\n    first_position = {native.first_position}"
        if native.first_position and "CrossingModel" in model_parts
        else "",
        layer_classes=f"{layer_classes}\n    ",
        unsplit=", ".join(f'"{upcycled(each)}"' for each in native.layers),
        model=_OUTER.format(model=model, native=short_name(native.model), config=config, stack=native.stack, text=text)
        if native.model not in (native.text, native.head)
        else "",
        Model=model,
        heads=_heads(native, uses),
        registered="\n".join(f'{upcycled(told)}.register_for_auto_class("{auto}")' for auto, told in found_by.items()),
        conversions="\n".join(f"carry_conversions({upcycled(each)}, {short_name(each)})" for each in outer),
    )


def _blocks(native: Composition) -> str:
    """The classes of blocks with grafts, and where they stand."""
    found = [("GRAFT_SITES", _SITES_ARE, *_sites(native))] if native.sites or not native.spans else []
    found += [("GRAFT_SPANS", _SPANS_ARE, *_spans(native))] if native.spans else []
    classes = "".join(source for _, _, source, _ in found)
    return classes + "".join(
        _PLACES.format(
            are=are, name=name, places="".join(f"\n    {place}," for place in places) + ("\n" if places else "")
        )
        for name, are, _, places in found
    )


def _layer(native: Composition, told: str, twins: bool, gated: bool) -> str:
    """The class of a layer with grafts, and with `twins` that of its twin; `gated`: a domain gate closes grafts."""
    held = {"sites": "GRAFT_SITES"} if native.sites or not native.spans else {}
    held |= {"spans": "GRAFT_SPANS"} if native.spans else {}
    stated = [f'activation_field = "{native.activation}"']
    stated += [f"{key}: ClassVar[Any] = {name}" for key, name in held.items()]
    spanned = ", SpannedLayer" if native.spans else ""
    own = [*(["GatedLayer"] * gated), *(["TwinnedLayer"] if twins else [] if gated else ["UpcycledLayer"])]
    return (_TWINNED_LAYER if twins else _LAYER).format(
        upcycled=upcycled(told),
        native=short_name(told),
        mixed_in=", ".join(own) + spanned,
        branch_mixed_in=f"BranchLayer{spanned}",
        places="\n    ".join(stated),
    )


def _sites(native: Composition) -> tuple[str, list[str]]:
    """The classes of blocks that are modules, and where they stand."""
    kinds = dict.fromkeys(site.native for site in native.sites)
    return "".join(_SITE.format(upcycled=upcycled(each), native=short_name(each)) for each in kinds), [
        f'("{site.block}", {short_name(site.native)}, "{site.role}", {upcycled(site.native)})' for site in native.sites
    ]


def _spans(native: Composition) -> tuple[str, list[str]]:
    """The same of blocks that are none."""
    found: dict[tuple[str, str], None] = {}
    places: list[str] = []
    for span in native.spans:
        parts = ("Block", "Block") if span.reads == span.writes else ("Start", "End")
        ends = tuple(zip((span.reader, span.writer), parts, strict=True))
        found |= dict.fromkeys(ends)
        (reader, start), (writer, end) = ends
        first = f'"{span.reads}", {short_name(reader)}, {upcycled(reader)}{start}'
        last = f'"{span.writes}", {short_name(writer)}, {upcycled(writer)}{end}'
        placed = f'({first}, {last}, "{span.role}")'
        # As ruff formats what is longer than a line.
        long = len(placed) > WIDTH - 5
        places.append(f"(\n        {placed[1:-1].replace(', ', f',{chr(10)}        ')},\n    )" if long else placed)
    classes = ""
    for told, part in found:
        mixed_in, able = _SPAN_PARTS[part]
        classes += _SPAN.format(upcycled=upcycled(told) + part, mixed_in=mixed_in, native=short_name(told), able=able)
    return classes, places


def _heads(native: Composition, uses: tuple[Use, ...]) -> str:
    """The classes of heads, and of what they return."""
    outputs = {native.output: "UpcycledOutput"}
    outputs |= {head.output: upcycled(head.output) for head in native.heads if head.output != native.output}
    losses = _losses({name: what for use in uses for name, what in use.rules.losses.items()})
    made = "".join(
        _OUTPUT.format(upcycled=own, native=short_name(told), losses=losses) for told, own in outputs.items()
    )

    def generates(head: str) -> bool:
        return head == native.head and not native.encoder

    prefixes = {head.native: head.prefix for head in native.heads}
    all_heads = [(native.head, native.output), *((head.native, head.output) for head in native.heads)]
    return made + "".join(
        _HEAD.format(
            upcycled=upcycled(told),
            native=short_name(told),
            # transformers looks for it among a class's own bases.
            bases=f"UpcycledHead, {short_name(told)}" + (", GenerationMixin" if generates(told) else ""),
            what="The model with its head" if told == native.head else "The model with another head",
            config=upcycled(native.config),
            stack=native.stack,
            text=upcycled(native.text),
            output=outputs[output],
            by_token=generates(told),
            prefix=f'\n    base_model_prefix = "{prefixes[told]}"' if prefixes.get(told) else "",
        )
        for told, output in all_heads
    )


def _listed(uses: tuple[Use, ...]) -> str:
    """The grafts one a line, as a tuple that ends with a comma stays."""
    return "".join(f"\n        {use.source}," for use in uses) + ("\n    " if uses else "")


def _losses(fields: Mapping[str, str]) -> str:
    """The rest of an output class from its docstring on: what its own fields are, and they themselves."""
    if not fields:
        return '"""'
    told = "".join(f"\n    {name}: {what}." for name, what in fields.items())
    held = "".join(f"\n    {name}: torch.FloatTensor | None = None" for name in fields)
    return f'\n{told}\n    """\n{held}'
