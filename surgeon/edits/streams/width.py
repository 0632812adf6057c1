"""A wider residual stream: which axes of which tensors grow, and what the new part of each axis holds.

Along an axis that writes (to the stream, or to a per-channel result of it), the new part is copies of the old part;
along an axis that reads the stream, it is zeros. Then every copy equals the old stream, and only the first copy is
read. Which axes grow is found by building transformers' class with a wider stream. Whether an axis writes or reads is
found on a twin: a changed slice shows in one channel of its module's output if it writes, in all if it reads. Other
sizes that a class derives from the hidden size (head sizes, state spaces) are kept by fields of the config, or
multiplied too. A choice counts only if a twin with random values computes the base's logits, up to rounding.
"""

from __future__ import annotations

import functools
import itertools
import json
import operator
import re
from collections.abc import Iterator, Mapping
from typing import Any

from surgeon.anatomy.derivation import Derivation, kept
from surgeon.anatomy.derived import Derived
from surgeon.anatomy.family import Axes, hidden_axis, with_fields
from surgeon.anatomy.growth import part_of
from surgeon.anatomy.running import run_prefill
from surgeon.anatomy.seen import Seen
from surgeon.anatomy.shared import shared_in
from surgeon.anatomy.silence import first_calls, some_tokens
from surgeon.anatomy.skeleton import Skeleton, build
from surgeon.anatomy.twin import WIDTHS, shrunk, twin_of_small
from surgeon.anatomy.widening import flat_fields
from surgeon.common.devices import one_thread
from surgeon.common.library import LOAD_FAILURES
from surgeon.edits.streams.sides import HIDDEN, Probe, heads_of
from surgeon.errors import BadInput, printable
from surgeon.operations.growing import KEYS

# Fields of a wider model's config; growing axes by suffix, for each kind of layers; growing axes outside the layers.
Stream = tuple[dict[str, int], tuple[dict[str, Axes], ...], dict[str, Axes]]
_HEADS = "num_attention_heads"
# Fields that give a width as a multiple of the stream's width.
_EXPAND = re.compile(r"(.*[._])?expand(_factor)?")
_SEED, _WIDE_SEED = 3, 7


@kept
def wider_stream(base: Derivation, times: int) -> Stream:
    """Return (fields, kinds, outer) for a stream `times` as wide: config fields, and growing axes by names on disk.

    `kinds` has the axes for each kind of layers, `outer` outside the layers. Raises BadInput where no twin with random
    values computes what the base's twin computes.
    """
    seen = base.seen
    fields, kinds, outer = _in_memory(seen.config, seen.derived, times)
    found = [_stored_axes(seen, kind, grown) for kind, grown in enumerate(kinds)]
    outside = {name: outer[target] for name, target in seen.names.outer.items() if target in outer}
    return dict(fields), tuple(found), outside


def _stored_axes(seen: Seen, kind: int, grown: Mapping[str, Axes]) -> dict[str, Axes]:
    """Return the axes of a kind's tensors as stored, from the axes in memory.

    Experts that transformers gathers in one parameter are separate matrices on disk. Raises BadInput where a stored
    tensor becomes other tensors in memory.
    """
    first, names = seen.firsts[kind]
    found: dict[str, Axes] = {}
    for part in seen.parts[kind]:
        targets = names[part.suffix]
        axes = next((grown[target] for target in targets if target in grown), None)
        if axes is None:
            continue
        if len(targets) > 1 or f"{seen.names.stem}{first}.{part.suffix}" in seen.names.converted:
            if part.expert is None or len(axes) != 1:
                raise BadInput(
                    f"layer {first} ({printable(part.suffix)}): transformers makes other tensors of it"
                    f" ({printable(', '.join(targets))}), and which side of it is the stream is not known;"
                    " widen_ffn may widen it"
                )
            axes = (axes[0]._replace(axis=hidden_axis(part)),)
        found[part.suffix] = axes
    return found


def _in_memory(config: Mapping[str, Any], derived: Derived, times: int) -> Stream:
    """Return what grows in a model whose stream is `times` as wide, by names in memory (in layers: below the layer).

    Raises BadInput where nothing can be proven.
    """
    import torch

    skeleton = derived.skeleton
    told = printable(str(config.get("model_type")))
    if skeleton.path:
        raise BadInput(
            f"{told}: other parts of it put states as wide as the stream among the text's, where no text shows them;"
            " `extract_text` makes a text model, which may become wider"
        )
    if shared := shared_in(skeleton):
        raise BadInput(
            f"{told}: its layers share a block (`{shared[0]}`), and which sides of its tensors are the stream is"
            " not known; use grafts"
        )
    failed = ""
    with one_thread(), torch.no_grad():
        found: list[tuple[int, dict[str, int], Skeleton, Skeleton]] = []
        choices = _choices(config, skeleton, times)
        for fields in ({json.dumps(choice): choice for choice in choices}).values():
            try:
                base, wide = stream_twins(config, derived, fields)
                wide.model(input_ids=some_tokens(base))
            except (BadInput, *LOAD_FAILURES) as error:
                failed = failed or str(error).partition("\n")[0]
                continue
            # Another field may set the width after all (Bloom's n_embed).
            if wide.sizes.hidden == times * base.sizes.hidden:
                found.append((sum(value.numel() for value in wide.model.parameters()), fields, base, wide))
        refused = ""
        for _, fields, base, wide in sorted(found, key=lambda each: (each[0], len(each[1]))):
            probe = Probe(base, wide, derived, times)
            for trial in probe.trials():
                if probe.holds(trial):
                    return fields, *probe.by_kind(trial)
                refused = refused or why_not(base, wide, told, f"`{HIDDEN}`")
            failed = failed or probe.odd
    raise BadInput(
        refused or f"{told}: no model with a stream {times} times as wide is known ({failed}); widen_ffn may widen it"
    )


def why_not(base: Skeleton, wide: Skeleton, told: str, grows: str) -> str:
    """Describe why a twin with a wider stream does not compute what the base's twin computes."""
    if _embeddings_differ(base, wide):
        return (
            f"{told}: its code multiplies embeddings by a number that depends on {grows}, as a twin shows, so a wider"
            " stream would change them; widen_ffn and widen_attention leave that as it is"
        )
    return (
        f"on a twin of this {told} the logits are not the base's once {grows} grows: something else in its code depends"
        " on it; widen something else, or insert layers"
    )


def _embeddings_differ(base: Skeleton, wider: Skeleton) -> bool:
    """Return whether the first layer's input already differs from the base's."""
    import torch

    with torch.no_grad(), first_calls([base.layers[0], wider.layers[0]]) as calls:
        for twin in (base, wider):
            run_prefill(twin, some_tokens(base))
    one, other = (call.stream for call in calls.values())
    return not torch.allclose(one, other[..., : one.shape[-1]])


def stream_twins(config: Mapping[str, Any], derived: Derived, fields: Mapping[str, int]) -> tuple[Skeleton, Skeleton]:
    """Return (base, wide): a twin of the base, and a wider twin with other weights.

    The wider twin's `fields` change in the same proportion as the base's; all its other fields are those of the base's
    twin. Raises BadInput where transformers cannot build one.
    """
    small = shrunk(config, heads_left=derived.heads)
    heads, keys, _ = heads_of(derived.skeleton)
    called = {_HEADS, derived.skeleton.text.attribute_map.get(_HEADS, _HEADS)}
    if called & fields.keys() and keys and heads % keys == 0:
        # Groups as large as the base's, so that fused tensors hold queries, keys and values in the same proportion.
        left = max(derived.heads, heads // keys)
        small = shrunk(config, heads_left=left)
        part = dict(flat_fields(part_of(small, derived.skeleton.path)))
        grouped = {name: left * keys // heads for name, value in part.items() if KEYS.fullmatch(name) and value}
        small = with_fields(small, derived.skeleton.path, grouped)
    base = twin_of_small(small, seed=_SEED)
    before, own = (
        {"head_dim": each.sizes.head_dim} | dict(flat_fields(each.text.to_dict())) for each in (derived.skeleton, base)
    )
    made = {
        name: own.get(name, after) * after // before.get(name, after) if before.get(name) else after
        for name, after in fields.items()
    }
    return base, twin_of_small(with_fields(small, base.path, made), seed=_WIDE_SEED)


def _choices(config: Mapping[str, Any], skeleton: Skeleton, times: int) -> Iterator[dict[str, int]]:
    """Yield the config fields that may describe the wider model, in no particular order."""
    sizes, part, full = skeleton.sizes, part_of(config, skeleton.path), dict(flat_fields(skeleton.text.to_dict()))
    stated = dict(flat_fields(part))
    called = skeleton.text.attribute_map

    def spelled(key: str) -> list[str]:
        """Return the names under which the config has a field: the class's own name for it, the common one, or both."""
        names = dict.fromkeys((called.get(key, key), key))
        return [name for name in names if name in stated] or [next(iter(names))]

    wider = dict.fromkeys(spelled(HIDDEN), sizes.hidden * times)
    held = _derived_from_width(config, skeleton, full, wider)
    narrower = {
        key: value // times
        for key, value in (full | stated).items()
        if _EXPAND.fullmatch(key) and type(value) in (int, float) and value % times == 0
    }
    narrower = {key: int(value) for key, value in narrower.items()}
    heads = dict.fromkeys(spelled(_HEADS), sizes.heads * times) if sizes.heads else {}
    heads |= {key: value * times for key, value in stated.items() if KEYS.fullmatch(key) and type(value) is int}
    stated_heads = {"head_dim": sizes.head_dim} if sizes.heads and "head_dim" not in held else {}
    # Each choice takes one of the options in each position; {} means none.
    others = {
        key: value * times
        for key, value in (full | stated).items()
        if WIDTHS.fullmatch(key) and value == sizes.hidden and key not in wider and key not in called
    }
    for more in itertools.product(({}, held), ({}, others), ({}, narrower), ({}, stated_heads, heads)):
        yield functools.reduce(operator.or_, more, wider)


def _derived_from_width(
    config: Mapping[str, Any], skeleton: Skeleton, before: Mapping[str, Any], wider: Mapping[str, int]
) -> dict[str, int]:
    """Return, with their old values, the numbers that the config's class derives from the hidden size by default."""
    try:
        built = build(with_fields(config, skeleton.path, wider))
    except BadInput:  # each choice reports this itself
        return {}
    after = dict(flat_fields(built.text.to_dict()))
    return {
        key: value
        for key, value in before.items()
        if type(value) is int and key not in wider and type(after.get(key)) is int and after[key] != value
    }
