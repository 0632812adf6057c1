"""The classes of an encoder's model, and its blocks beside which controls stand."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from surgeon.anatomy.silence import some_tokens
from surgeon.anatomy.skeleton import BASE, Skeleton, classes_of
from surgeon.anatomy.stream_blocks import Block, blocks_in, mixes, told_class, watched
from surgeon.common.devices import one_thread
from surgeon.common.library import LOAD_FAILURES, first_line
from surgeon.errors import BadInput, printable
from surgeon.grafts.composition import (
    ATTENTION,
    ENCODER_AUTOS,
    FFN,
    Composition,
    HeadClass,
    SpanClass,
)

_USE = "use another model, or full fine-tuning"


def heads_of(model: Any, autos: Sequence[str]) -> tuple[HeadClass, ...]:
    """The heads that these auto classes find for a model's type, where they say what they return.

    One that calls its base model otherwise than the others would not find their weights: it is given their name for it
    or, where its class bears no other, left out, unless the config says that these weights are its own.
    """
    import transformers
    from transformers.modeling_layers import GenericForQuestionAnswering

    found: list[HeadClass] = []
    for auto in autos:
        for name in classes_of(model.config.model_type, auto)[:1]:
            native: Any = getattr(transformers, name, None)
            output = None if native is None else _returned(native)
            fits = getattr(native, "config_class", None) is type(model.config)
            own = name in (getattr(model.config, "architectures", None) or ())
            if output is None or not fits:
                continue
            same = own or native.base_model_prefix == model.base_model_prefix
            if same or issubclass(native, GenericForQuestionAnswering):
                prefix = "" if same else model.base_model_prefix
                found.append(HeadClass(auto, told_class(native), told_class(output), prefix))
    return tuple(found)


def _returned(native: type[Any]) -> type[Any] | None:
    """The class that a head's forward is annotated to return, beside plain tuples."""
    import typing

    from transformers.utils import ModelOutput

    try:
        told = typing.get_type_hints(inspect.unwrap(native.forward)).get("return")
    except (NameError, TypeError):  # annotations for type checkers alone
        return None
    kinds = [
        each for each in (told, *typing.get_args(told)) if isinstance(each, type) and issubclass(each, ModelOutput)
    ]
    return kinds[0] if kinds else None


def encoder_composition(
    config: Mapping[str, Any], skeleton: Skeleton, twin: Skeleton, layers: Sequence[int]
) -> Composition:
    """The classes of an encoder's model; `layers` are one of each kind, whose blocks are sought on the `twin`.

    Raises BadInput where a layer has no self-attention or no FFN that controls could stand beside, saying what it has.
    """
    model_type = str(config["model_type"])
    model = skeleton.model
    base = model.base_model
    prefix = "" if base is model else f"{model.base_model_prefix}."
    if not skeleton.stack.startswith(prefix):
        raise _unfit(model_type, f"its layers (`{skeleton.stack}`) are no part of its base model")
    spans = _spans(model_type, twin, layers)
    first, *heads = heads_of(model, ENCODER_AUTOS)
    if told_class(type(base)).rpartition(".")[2] not in classes_of(model_type, BASE):
        raise _unfit(model_type, f"its base model is a {type(base).__name__}, which AutoModel does not find")
    try:
        return Composition(
            model_type=model_type,
            autos=(first.auto,),
            config=told_class(type(model.config)),
            text_config=told_class(type(model.config)),
            path=(),
            head=first.native,
            model=told_class(type(base)),
            text=told_class(type(base)),
            stack=skeleton.stack.removeprefix(prefix),
            output=first.output,
            activation="",
            layers=tuple(dict.fromkeys(told_class(type(layer)) for layer in skeleton.layers)),
            sites=(),
            heads=tuple(heads),
            spans=spans,
        )
    except ValueError as error:
        raise _unfit(model_type, str(error)) from error


def _unfit(model_type: str, reason: str) -> BadInput:
    return BadInput(f"{printable(model_type)}: no control states can stand in it ({printable(reason)}); {_USE}")


def _spans(model_type: str, twin: Skeleton, layers: Sequence[int]) -> tuple[SpanClass, ...]:
    import torch

    found: dict[SpanClass, None] = {}
    with torch.no_grad(), one_thread():
        if not isinstance(getattr(twin.text, "vocab_size", None), int):
            raise _unfit(model_type, "its config has no `vocab_size`: it reads no tokens of a vocabulary")
        ids = some_tokens(twin)

        def run() -> Any:
            try:
                return twin.model(input_ids=ids)
            except LOAD_FAILURES as error:
                raise _unfit(model_type, f"a tiny twin of it does not read a text: {first_line(error)}") from error

        modules = {index: list(twin.layers[index].modules()) for index in layers}
        seen_of = {index: watched(twin.layers[index], run) for index in layers}
        for index in layers:
            if (seen := seen_of[index]) is None:
                raise _unfit(model_type, f"its layer {index} does not run once on a text alone")
            if set(twin.layers[index].modules()) - set(modules[index]):
                raise _unfit(model_type, "its layers put other modules in the place of theirs when they run")
            roles: dict[str, Block] = {}
            for span in blocks_in(seen, twin.text.hidden_size):
                role = _role(model_type, span, run, ids.shape[1])
                if role not in roles or span.size > roles[role].size:
                    roles[role] = span
            for role, words in ((ATTENTION, "self-attention"), (FFN, "FFN")):
                if role not in roles:
                    held = ", ".join(type(child).__name__ for child in twin.layers[index].children())
                    raise _unfit(model_type, f"no {words} is found in its layers, which hold {held}")
                found[roles[role].told(role)] = None
    return tuple(found)


def _role(model_type: str, block: Block, run: Callable[[], Any], count: int) -> str:
    """Whether a block mixes tokens. Raises BadInput where no token sees later ones: a decoder's."""
    later, earlier = mixes(block, run, count)
    if later and not earlier:
        raise _unfit(model_type, "its tokens do not see later ones: it is a decoder without a head for language")
    return ATTENTION if later or earlier else FFN
