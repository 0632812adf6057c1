"""The table of usual models' anatomies: `python -m tests.usual` derives and writes surgeon/families/usual.json anew.

Each type is derived of configs whose sizes are all different, so that every number of a shape has one reading. What is
so written is then compared with what is derived of other configs: other sizes and depths, other orders of layers, and
every form of value that the table lets a field have. A difference ends the run, and nothing is written.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from surgeon.checkpoint.header import TensorInfo
from surgeon.errors import BadInput
from surgeon.families import usual, usual_table
from surgeon.families.anatomy import Anatomy
from surgeon.families.composing import _ACTIVATIONS
from surgeon.families.derivation import Found
from surgeon.families.dissect import dissect
from surgeon.families.skeleton import build
from surgeon.families.usual import sizes_of
from surgeon.families.usual_table import (
    ANY_TEXT,
    LABELS,
    TYPES,
    HeadEntry,
    LayerEntry,
    OuterTensor,
    PartShape,
    SizeField,
    Table,
    TypeEntry,
    When,
    digest_of_files,
    form_of,
)
from surgeon.runtime.composition import short_name
from tests.house import HERE
from tests.usual_types import FULL, SLIDING, USUAL, Usual

# So many as classes take for theirs where a config does not say how many share a key.
MANY_HEADS = {"num_attention_heads": 32, "hidden_size": 384}
# And so many words as their own padding is one of.
MANY_WORDS = {"vocab_size": 40_000}

SHARED_FILES = (
    "configuration_utils.py",
    "conversion_mapping.py",
    "core_model_loading.py",
    "modeling_utils.py",
    "models/auto/modeling_auto.py",
)
# Whatever they say, nothing follows from it.
_TEXTS = ("_name_or_path", "transformers_version")
# Fields that the class does not have.
_DEFAULTS: When = {"sliding_window_pattern": 6}


def headers_of(config: Mapping[str, Any], *, below: str = "") -> dict[str, TensorInfo]:
    """The tensors of a model of this config as it is saved; those `below` a prefix alone, without it."""
    model = build(config).model
    held = model.state_dict(keep_vars=True)
    names = [name for name in sorted(held) if name not in model.all_tied_weights_keys and name.startswith(below)]
    return {name.removeprefix(below): _info(name.removeprefix(below), tuple(held[name].shape)) for name in names}


def _info(name: str, shape: tuple[int, ...]) -> TensorInfo:
    size = 2
    for each in shape:
        size *= each
    return TensorInfo(name, "BF16", shape, "model.safetensors", 0, size)


def config_for(model_type: str, **changes: Any) -> dict[str, Any]:
    """A config.json of a usual type, of the distinct sizes but for `changes`."""
    told = {"model_type": model_type, "architectures": [USUAL[model_type].head], **USUAL[model_type].distinct}
    return told | {"pad_token_id": 0, **changes}


def derived_anatomy(config: Mapping[str, Any]) -> Anatomy:
    return dissect(config, headers_of(config))


def type_entry(model_type: str) -> TypeEntry:
    """A type's entry, derived."""
    from transformers import CONFIG_MAPPING

    told = USUAL[model_type]
    kind = CONFIG_MAPPING[model_type]
    stated = {each.name: each.default for each in fields(kind)}
    left_out = kind().to_dict()
    one = derived_anatomy(config_for(model_type))
    assert isinstance(one.derivation, Found) and one.derivation.same_names
    first = TypeEntry(
        files=_files(model_type, kind),
        prefix=one.prefix,
        stem=one.family.stem.removeprefix(one.prefix),
        encoder=one.family.encoder,
        sizes={name: _size(model_type, field, stated.get(field)) for name, (field, _) in told.sizes.items()},
        required=_required(model_type),
        defaults={
            field: left_out.get(field, _DEFAULTS.get(field))
            for field in sorted({*_activations(told), *_conditions(told), "pad_token_id"})
        },
        fields=_forms(told),
        activations=_activations(told),
        title="" if told.pattern is not None else one.kinds[0].title,
        pattern=told.pattern,
        compositions={},
        layers=(),
        heads=(),
    )
    heads = [_head_entry(model_type, first, when) for when in told.outside]
    return first.model_copy(
        update={
            "layers": tuple(_layer_entry(model_type, first, when) for when in told.settings),
            "heads": tuple(head for head, _ in heads),
            "compositions": {head.composition: composition for head, composition in heads},
        }
    )


def _files(model_type: str, kind: Any) -> dict[str, str]:
    import transformers

    above = Path(transformers.__file__).parent
    module = Path(sys.modules[kind.__module__].__file__ or "")
    own = [module, module.with_name(module.name.replace("configuration_", "modeling_"))]
    return _digests(above, [str(file.relative_to(above)) for file in own])


def _digests(above: Path, names: Iterable[str]) -> dict[str, str]:
    return {name: digest_of_files(above, (name,)) for name in names}


def _conditions(told: Usual) -> list[str]:
    """The fields by which entries are chosen."""
    pattern = told.pattern
    periods = (*pattern.listed, *pattern.unlisted) if pattern else ()
    whens = [*told.settings, *told.outside, *(period.when for period in periods)]
    return [*(pattern.needs.values() if pattern else ()), *(field for when in whens for field in when)]


def _activations(told: Usual) -> tuple[str, ...]:
    return () if told.encoder else tuple(key for key in _ACTIVATIONS if key in told.free)


def _size(model_type: str, field: str, default: Any) -> SizeField:
    whole = 2 if field == LABELS else default if type(default) is int else None
    if field not in ("num_key_value_heads", "head_dim"):
        zero = field == "type_vocab_size" and _has_blocks(config_for(model_type, **{field: 0}))
        return SizeField(field=field, default=whole, may_be_zero=zero)
    config = without(field, config_for(model_type, **MANY_HEADS))
    absent = _sizes(config)
    same = absent is not None and absent == _sizes(config | {field: None})
    return SizeField(field=field, default=whole, may_be_null=same)


def _has_blocks(config: Mapping[str, Any]) -> bool:
    """Whether a model of this config runs, so that its blocks are found."""
    try:
        return bool(derived_anatomy(config).derivation.blocks(0))
    except BadInput:
        return False


def without(field: str, config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != field}


def _required(model_type: str) -> tuple[str, ...]:
    """The fields without which a config cannot be derived."""
    config = config_for(model_type, **MANY_HEADS, **MANY_WORDS)
    # Of sizes that an encoder's class has values of its own for, a twin would be as large as they say.
    held = ("pad_token_id", *(field for field, _ in USUAL[model_type].sizes.values() if field != LABELS))
    return tuple(field for field in held if _sizes(without(field, config)) is None)


def _sizes(config: Mapping[str, Any]) -> Any:
    """The sizes that a config comes to; None where it cannot be derived."""
    try:
        return derived_anatomy(config).sizes
    except BadInput:
        return None


def _forms(told: Usual) -> dict[str, tuple[str, ...]]:
    found: dict[str, set[str]] = {"model_type": {ANY_TEXT}, **{field: {ANY_TEXT} for field in _TEXTS}}
    # An encoder without them is taken without its head, as few are saved.
    found["architectures"] = {form_of(named) for named in ([told.head], [told.base], *([] if told.encoder else [None]))}
    free = [(field, value) for field, values in told.free.items() for value in values]
    stated = [each for when in (*told.ropes, *told.settings, *told.outside) for each in when.items()]
    for field, value in (*free, *stated):
        found.setdefault(field, set()).add(form_of(value))
    return {field: tuple(sorted(forms)) for field, forms in sorted(found.items())}


def _names(entry: TypeEntry, config: Mapping[str, Any]) -> dict[int, str]:
    """The one name of each number that a shape may have."""
    numbers = sizes_of(config, entry)
    told = USUAL[str(config["model_type"])]
    # An encoder's heads are as wide together as its stream, each with keys of its own.
    left_out = ("layers", *(("query", "kv", "kv_heads", "head_dim") if told.encoder else ()))
    known = [name for name in (*numbers, *told.composed) if name not in left_out]
    named = {name: usual.shape_of((name,), numbers)[0] for name in known}
    found = {number: name for name, number in named.items()}
    assert len(found) == len(named), "two sizes are equal"
    return found


def _layer_entry(model_type: str, entry: TypeEntry, when: When) -> LayerEntry:
    config = config_for(model_type, **when)
    anatomy, name = derived_anatomy(config), _names(entry, config)
    kind, derivation = anatomy.kinds[0], anatomy.derivation
    # Kinds of one model differ in their titles alone.
    assert {replace(each, title="") for each in map(_hashable, anatomy.kinds)} == {replace(_hashable(kind), title="")}
    return LayerEntry(
        when=when,
        parts={
            part.suffix: PartShape(
                shape=tuple(name[each] for each in part.shape),
                kind=part.kind,
                blocks=tuple((role, name[rows]) for role, rows in part.blocks),
                identity=part.identity,
            )
            for part in kind.parts
        },
        silence=dict(kind.silence),
        refusal=kind.refusal,
        blocks=dict(derivation.blocks(0)),
        linear={path: (name[rows], name[columns]) for path, (rows, columns) in derivation.linear(0).items()},
        whole_heads={
            usual.grouping(sizes_of(other, entry)): derived_anatomy(other).derivation.whole_heads(0)
            for other in _grouped(model_type, config)
        },
    )


def _grouped(model_type: str, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The config with heads that share keys in each of the ways."""
    told = USUAL[model_type]
    return [{**config, "num_key_value_heads": count} for count in told.kv_heads] or [dict(config)]


def _hashable(kind: Any) -> Any:
    return replace(kind, silence=tuple(kind.silence.items()), packed=())


def _head_entry(model_type: str, entry: TypeEntry, when: When) -> tuple[HeadEntry, dict[str, Any]]:
    """What stands outside the layers, and the classes that carry grafts."""
    config = config_for(model_type, **when)
    name = _names(entry, config)
    held = {each: _info(each, tuple(value.shape)) for each, value in build(config).model.state_dict().items()}
    saved = headers_of(config)
    anatomy = dissect(config, held)
    assert isinstance(anatomy.derivation, Found)
    reads = {} if entry.encoder else anatomy.derivation.vocabulary_tensors(anatomy.sizes.vocabulary)
    composition = anatomy.derivation.composition

    def whole(each: str) -> str:
        """The name as a model with a head has it."""
        return each if anatomy.prefix else f"{entry.prefix}{each}"

    def is_needed(each: str) -> bool:
        # Heads come and go on encoders, and the pooler that they alone read.
        return each in saved and (not entry.encoder or (whole(each).startswith(entry.prefix) and "pooler." not in each))

    made = HeadEntry(
        when=when,
        stack=anatomy.derivation.stack,
        tied=anatomy.tied,
        outer={
            whole(each): OuterTensor(
                shape=tuple(name[size] for size in info.shape), needed=is_needed(each), reads=reads.get(each)
            )
            for each, info in anatomy.outer.items()
        },
        composition=short_name(composition.head),
    )
    return made, composition.to_json()


def differences(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> list[str]:
    """In what the table's anatomy of a base is another than the derived one; where one of them is none, that."""
    listed = usual.known(config, tensors, lambda: dissect(config, tensors).derivation)
    try:
        derived = dissect(config, tensors)
    except BadInput as error:
        return [] if listed is None else [f"the table has an entry, and deriving refuses: {error}"]
    if listed is None:
        return ["the table has no entry for it"]
    found = [
        each.name
        for each in fields(Anatomy)
        if each.name != "derivation" and getattr(listed, each.name) != getattr(derived, each.name)
    ]
    found += [
        f"order of layer {index}"
        for index, (one, other) in enumerate(zip(listed.layers, derived.layers, strict=True))
        if [*one] != [*other]
    ]
    found += [] if [*listed.kinds[0].silence] == [*derived.kinds[0].silence] else ["order of silence"]
    for question, ask in _questions(derived).items():
        one, other = _answer(ask, listed), _answer(ask, derived)
        if one != other or (isinstance(one, dict) and [*one] != [*other]):
            found.append(f"{question}: {one} in place of {other}")
    return found


def _answer(ask: Any, anatomy: Anatomy) -> Any:
    try:
        return ask(anatomy.derivation)
    except BadInput as error:
        return str(error)


def _questions(anatomy: Anatomy) -> dict[str, Any]:
    count = anatomy.sizes.layers
    whole = list(range(count))
    asked: dict[str, Any] = {
        "stack": lambda own: own.stack,
        "path": lambda own: own.path,
        "same names": lambda own: own.same_names,
        "activation": lambda own: own.activation,
    }
    if not anatomy.family.encoder:
        asked["vocabulary"] = lambda own: own.vocabulary_tensors(anatomy.sizes.vocabulary)
        asked["parameters"] = lambda own: sorted(own.parameters().items())
        asked["activations"] = lambda own: [own.own_activation(layer) for layer in (0, count - 1)]
        if anatomy.tied:
            asked["head"] = lambda own: own.head_tensors()
            asked["untied"] = lambda own: own.untied({})
    for layer in {anatomy.kind_of.index(kind) for kind in set(anatomy.kind_of)}:
        asked[f"blocks of {layer}"] = lambda own, layer=layer: dict(own.blocks(layer))
        asked[f"linear of {layer}"] = lambda own, layer=layer: dict(own.linear(layer))
        asked[f"heads of {layer}"] = lambda own, layer=layer: own.whole_heads(layer)
    for order in orders(count):
        asked[f"grown {order}"] = lambda own, order=order: own.grown(order)
    twins = [0, count - 1]
    asked["grafted"] = lambda own: own.grafted(own.grown([*whole, 0]), [*whole, 0], (), ())
    asked["grafted with twins"] = lambda own: own.grafted(own.grown([*whole, 1]), [*whole, 1], twins, ())
    asked["axes"] = lambda own: own.layer_axes(own.grown([*whole, 0]), count + 1)
    return asked


def orders(count: int) -> list[list[int]]:
    """Orders of layers that plans make: a copy above every second, all stacked, a period more, some out, one moved."""
    whole = list(range(count))
    return [
        [each for layer in whole for each in ([layer, layer] if layer % 2 else [layer])],
        [*whole, *whole],
        [*whole, *whole[-2:]],
        whole[: count // 2 + 1],
        [0, *whole],
    ]


def variations(model_type: str) -> Iterator[dict[str, Any]]:
    """Configs of a type: every form of every field, every setting, other sizes, depths and types of layers."""
    told = USUAL[model_type]
    samples = {**told.free, **dict.fromkeys(_TEXTS, ("a/b", "5.0.0"))}
    for number in range(max(map(len, samples.values()))):
        config = config_for(model_type, **{field: of[number % len(of)] for field, of in samples.items()})
        yield config | ({TYPES: [FULL] * 7} if config.get("use_sliding_window") else {})
    for rope in told.ropes:
        yield config_for(model_type, **rope)
    for settings, outside in itertools.product(told.settings, told.outside):
        if all(outside.get(field, value) == value for field, value in settings.items()):
            yield config_for(model_type, **settings, **{k: v for k, v in outside.items() if k not in settings})
    for architectures in ([told.base],) if told.encoder else (None, [told.base]):
        yield config_for(model_type, architectures=architectures)
    for sizes in OTHER_SIZES:
        held = {field for field, _ in told.sizes.values()}
        yield config_for(model_type, **{field: value for field, value in sizes.items() if field in held})
    for layers in (2, 3, 13):
        yield config_for(model_type, num_hidden_layers=layers)
    for left_out in () if told.encoder else ("head_dim", "num_key_value_heads"):
        yield without(left_out, config_for(model_type, **MANY_HEADS))
    yield without("pad_token_id", config_for(model_type, **MANY_WORDS))
    if told.encoder:
        if model_type != "roberta":  # which cannot be run without them
            yield config_for(model_type, type_vocab_size=0)
        yield config_for(model_type, id2label={"0": "no", "1": "yes"}, label2id={"no": 0, "yes": 1})
        yield without(LABELS, config_for(model_type))
        if "relative" in told.sizes:
            yield config_for(model_type, max_relative_positions=-1)
    if told.pattern is not None:
        for types in ([FULL] * 7, [SLIDING] * 7, [FULL, SLIDING] * 3 + [FULL], [SLIDING] * 3 + [FULL] * 4):
            yield config_for(model_type, layer_types=types, **{**_on(told), "sliding_window": 8})
            yield config_for(model_type, layer_types=types)


def _on(told: Usual) -> dict[str, Any]:
    return {"use_sliding_window": True, "max_window_layers": 3} if "use_sliding_window" in told.free else {}


OTHER_SIZES: tuple[dict[str, int], ...] = (
    # All of one size, so that each of them has several readings.
    {
        **dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 64),
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
    },
    {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 32, "hidden_size": 64, "vocab_size": 1000},
    {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "hidden_size": 64, "intermediate_size": 512},
)


def code_files() -> tuple[str, ...]:
    """The files of surgeon that derive a base: those that checkpoint_anatomy.py imports, and what these import."""
    found: dict[str, None] = {}
    todo = ["surgeon.families.checkpoint_anatomy", "surgeon.families.dissect"]
    while todo:
        module = todo.pop()
        if module not in found:
            found[module] = None
            todo += sorted(HERE.dependencies(module))
    return tuple(sorted(str(HERE.modules[module].relative_to(HERE.package)) for module in found))


def table(types: Mapping[str, TypeEntry]) -> Table:
    import transformers

    files = code_files()
    digest = digest_of_files(usual_table.PACKAGE, files)
    return Table(
        transformers=transformers.__version__,
        files=_digests(Path(transformers.__file__).parent, SHARED_FILES),
        code=files,
        code_digest=digest,
        types=dict(types),
    )


def written(made: Table) -> str:
    """As the file has it: one line for each tensor and field."""
    return f"{_block(made.model_dump(mode='json', exclude_defaults=True), 0)}\n"


def _block(value: Any, depth: int) -> str:
    line = json.dumps(value, ensure_ascii=False)
    if len(line) + depth <= 118 or not isinstance(value, dict | list):
        return line
    inside = " " * (depth + 1)
    if isinstance(value, list):
        held = [f"{inside}{_block(each, depth + 1)}" for each in value]
        return "[\n" + ",\n".join(held) + f"\n{' ' * depth}]"
    held = [f"{inside}{json.dumps(key)}: {_block(each, depth + 1)}" for key, each in value.items()]
    return "{\n" + ",\n".join(held) + f"\n{' ' * depth}}}"


def faults(types: Mapping[str, TypeEntry]) -> Iterator[str]:
    """What the table of these types would say that is not derived so, for each variation of them."""
    made = table(types)
    with patch.object(usual, "read_table", lambda: made):
        for model_type in types:
            for config in variations(model_type):
                found = differences(config, headers_of(config))
                if found:
                    yield "\n  ".join([json.dumps(config), *found])


def main() -> None:
    """Write the table, or end with what is wrong of it."""
    types = {model_type: type_entry(model_type) for model_type in USUAL}
    if found := [*faults(types)]:
        sys.exit("\n".join([*found, "nothing is written"]))
    usual_table.FILE.write_text(written(table(types)), encoding="utf-8")


if __name__ == "__main__":
    main()
