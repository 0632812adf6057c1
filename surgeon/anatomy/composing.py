"""The transformers classes from which a derived model's upcycled classes are composed: found on its skeleton and twin.

Grafts run next to a layer's attention or its FFN, whatever the model calls them. Trial shows which block is which
(stream_blocks.py): a block that mixes tokens is attention, or replaces it; another block is an FFN, or experts.

Where no field of config.json names an FFN's activation, a twin's FFN is watched as it runs. Its code may call the
activation by a function (LFM2), name it inside another setting (DBRX), or write it out as a formula (BLOOM). The torch
functions that it calls identify the activation.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from surgeon.anatomy.silence import captured, first_calls, some_tokens
from surgeon.anatomy.skeleton import BASE, CAUSAL, IMAGE_TEXT, Skeleton, auto_of, classes_of
from surgeon.anatomy.stream_blocks import Block, blocks_in, mixes, modules_in, norms_sum, told_class, watched
from surgeon.common.devices import one_thread
from surgeon.common.library import LOAD_FAILURES, first_line
from surgeon.errors import BadInput, printable
from surgeon.grafts.composition import (
    ATTENTION,
    ENCODER_AUTOS,
    FFN,
    OTHER_AUTOS,
    Composition,
    HeadClass,
    SiteClass,
    SpanClass,
)

if TYPE_CHECKING:
    from torch import nn


# The config's fields that may name the activation.
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act", "activation", "act_fn")


def composition_of(config: Mapping[str, Any], skeleton: Skeleton, twin: Skeleton, layers: Sequence[int]) -> Composition:
    """Return the classes of a config's model; `layers` holds one layer of each kind, whose blocks are probed on `twin`.

    Raises BadInput where a class is not one of transformers' own, or the decoder is not a model by itself; for an
    encoder, where a layer has no self-attention or no FFN that controls could run next to, naming what it has.
    """
    model = skeleton.model
    text = model.get_submodule(skeleton.holder)
    own = (_of_encoder if skeleton.encoder else _of_decoder)(config, skeleton, text, twin, layers)
    try:
        return Composition(
            model_type=str(config["model_type"]),
            config=told_class(type(model.config)),
            text_config=told_class(type(skeleton.text)),
            path=skeleton.path,
            text=told_class(type(text)),
            stack=skeleton.stack.removeprefix(f"{skeleton.holder}."),
            layers=tuple(dict.fromkeys(told_class(type(layer)) for layer in skeleton.layers)),
            **own,
        )
    except ValueError as error:
        raise _unfit(config, skeleton, str(error)) from error


def _of_decoder(
    config: Mapping[str, Any], skeleton: Skeleton, text: Any, twin: Skeleton, layers: Sequence[int]
) -> dict[str, Any]:
    """Return the fields of a composition that are specific to a decoder. Raises BadInput."""
    import torch
    from transformers import CONFIG_MAPPING, MODEL_MAPPING

    model = skeleton.model
    if type(model.config) is not CONFIG_MAPPING[str(config["model_type"])] or text is model:
        raise _unfit(config, skeleton, "its decoder is no model that transformers builds by itself")
    with torch.no_grad(), one_thread():
        sites, spans = _probed(twin, layers)
        output = type(twin.model(input_ids=some_tokens(twin), use_cache=False, return_dict=True))
    return {
        "autos": _autos(config, type(model)),
        "head": told_class(type(model)),
        "model": told_class(MODEL_MAPPING.get(type(model.config), type(model))),
        "output": told_class(output),
        "activation": _activation(skeleton.text),
        "sites": sites,
        "spans": spans,
        "heads": _heads_of(model, OTHER_AUTOS),
        "first_position": _first_position(twin),
    }


def _of_encoder(
    config: Mapping[str, Any], skeleton: Skeleton, text: Any, twin: Skeleton, layers: Sequence[int]
) -> dict[str, Any]:
    """Return the fields of a composition that are specific to an encoder. Raises BadInput."""
    model = skeleton.model
    if text is not model.base_model:
        raise _unfit(config, skeleton, f"its layers (`{skeleton.stack}`) are no part of its base model")
    spans = _encoder_spans(config, twin, layers)
    first, *heads = _heads_of(model, ENCODER_AUTOS)
    kind = type(text)
    if kind.__name__ not in classes_of(config["model_type"], BASE):
        raise _unfit(config, skeleton, f"its base model is a {kind.__name__}, which AutoModel does not find")
    return {
        "autos": (first.auto,),
        "head": first.native,
        "model": told_class(kind),
        "output": first.output,
        "activation": "",
        "sites": (),
        "spans": spans,
        "heads": tuple(heads),
    }


def _autos(config: Mapping[str, Any], head: type[Any]) -> tuple[str, ...]:
    """Return the auto classes that find `head` for its config's class, first the one by which it was built."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    known = {CAUSAL: MODEL_FOR_CAUSAL_LM_MAPPING, IMAGE_TEXT: MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING}
    found = [auto for auto, mapping in known.items() if mapping.get(head.config_class, None) is head]
    own = auto_of(config)
    return tuple(dict.fromkeys((own, *found))) if own is not None else tuple(found)


def _unfit(config: Mapping[str, Any], skeleton: Skeleton, reason: str) -> BadInput:
    """Return the error for a model from which no classes with grafts can be composed; it shows `reason`."""
    told, why = printable(str(config.get("model_type"))), printable(reason)
    if skeleton.encoder:
        return BadInput(f"{told}: no control states can stand in it ({why}); use another model, or full fine-tuning")
    return BadInput(f"{told}: no upcycled classes can be composed for it ({why}); use operations that add layers")


def _heads_of(model: Any, autos: Sequence[str]) -> tuple[HeadClass, ...]:
    """Return the heads that these auto classes find for a model's type, where their output class is annotated.

    A head whose base-model prefix differs from the model's would not find the base model's weights. It gets the model's
    prefix if its class allows that; otherwise it is left out. If the config names the head itself, the weights have its
    prefix, and it stays unchanged.
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
    """Return the output class that a head's forward is annotated to return, besides tuples; None without one."""
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


def _activation(text: Any) -> str:
    """Return the config field that names an activation; empty where none does, or where the activation has parameters.

    Grafts could not share these parameters.
    """
    from transformers.activations import ACT2FN

    named = {key: getattr(text, key, None) for key in _ACTIVATIONS}
    known = {key: ACT2FN[name] for key, name in named.items() if isinstance(name, str) and name in ACT2FN}
    return next((key for key, made in known.items() if next(made.parameters(), None) is None), "")


def _probed(twin: Skeleton, layers: Sequence[int]) -> tuple[tuple[SiteClass, ...], tuple[SpanClass, ...]]:
    """Return the blocks of a decoder's layers that grafts can run next to: modules (sites), and spans of modules."""
    kinds, width, ids = {type(layer) for layer in twin.layers}, twin.text.hidden_size, some_tokens(twin)
    sites: dict[SiteClass, None] = {}
    spans: dict[SpanClass, None] = {}
    for layer in captured(twin, list(layers)).values():
        seen = watched(layer.layer, layer.output)
        if seen is None:
            continue

        def role_of(block: Block, run: Callable[[], Any] = layer.output) -> str:
            """Return ATTENTION for a block that mixes tokens, else FFN."""
            return ATTENTION if any(mixes(block, run, ids.shape[1])) else FFN

        # A layer inside another layer (Zamba's) adds to the stream by itself and is not a block.
        blocks = [(block, role_of(block)) for block in modules_in(seen, width) if type(block.reader) not in kinds]
        chosen = {role: _chosen([block for block, own in blocks if own == role], role) for role in (ATTENTION, FFN)}
        asked = {role for role, block in chosen.items() if block is None or norms_sum(seen, block.reads)}
        # With tokens along another axis, the trial cannot show whether a block mixes them.
        shown = asked and seen.stream.shape == (*ids.shape, width)
        largest = _largest(blocks_in(seen, width) if shown else [], role_of)
        found = {role: block for role, block in largest.items() if role in asked}
        if chosen[FFN] is None and FFN not in found:
            # The FFN may be inside a module that runs before a token mixer and adds nothing by itself (Zamba 2).
            inner = [block for block in modules_in(seen, width, inside=True) if role_of(block) == FFN]
            chosen[FFN] = _chosen(inner, FFN)
        for role, block in chosen.items():
            if role in found:
                spans[found[role].told(role)] = None
            elif block is not None:
                sites[SiteClass(block.reads, told_class(type(block.reader)), role)] = None
    return tuple(sites), tuple(spans)


def _chosen(blocks: Sequence[Block], role: str) -> Block | None:
    """Return one of several modules of a role: the last whose name fits the role, else the last."""
    words = ("attn", "attention") if role == ATTENTION else ("mlp",)
    named = [block for block in blocks if any(word in block.reads for word in words)]
    return next(reversed(named or list(blocks)), None)


def _largest(blocks: Sequence[Block], role_of: Callable[[Block], str]) -> dict[str, Block]:
    """Return the largest of these blocks for each role."""
    found: dict[str, Block] = {}
    for block in blocks:
        role = role_of(block)
        if role not in found or block.size > found[role].size:
            found[role] = block
    return found


def _encoder_spans(config: Mapping[str, Any], twin: Skeleton, layers: Sequence[int]) -> tuple[SpanClass, ...]:
    """Return the blocks of an encoder's layers. Raises BadInput where a layer has no attention or no FFN."""
    import torch

    if not isinstance(getattr(twin.text, "vocab_size", None), int):
        raise _unfit(config, twin, "its config has no `vocab_size`: it reads no tokens of a vocabulary")
    ids = some_tokens(twin)

    def run() -> Any:
        """Run the twin on the tokens. Raises BadInput where it fails."""
        try:
            return twin.model(input_ids=ids)
        except LOAD_FAILURES as error:
            raise _unfit(config, twin, f"a tiny twin of it does not read a text: {first_line(error)}") from error

    def role_of(block: Block) -> str:
        """Return ATTENTION for a block that mixes tokens, else FFN. Raises BadInput for a causal block."""
        later, earlier = mixes(block, run, ids.shape[1])
        if later and not earlier:
            raise _unfit(config, twin, "its tokens do not see later ones: it is a decoder without a head for language")
        return ATTENTION if later or earlier else FFN

    found: dict[SpanClass, None] = {}
    with torch.no_grad(), one_thread():
        modules = {index: list(twin.layers[index].modules()) for index in layers}
        seen_of = {index: watched(twin.layers[index], run) for index in layers}
        for index in layers:
            if (seen := seen_of[index]) is None:
                raise _unfit(config, twin, f"its layer {index} does not run once on a text alone")
            if set(twin.layers[index].modules()) - set(modules[index]):
                raise _unfit(config, twin, "its layers put other modules in the place of theirs when they run")
            blocks = _largest(blocks_in(seen, twin.text.hidden_size), role_of)
            for role, words in ((ATTENTION, "self-attention"), (FFN, "FFN")):
                if role not in blocks:
                    held = ", ".join(type(child).__name__ for child in twin.layers[index].children())
                    raise _unfit(config, twin, f"no {words} is found in its layers, which hold {held}")
                found[blocks[role].told(role)] = None
    return tuple(found)


def _first_position(twin: Skeleton) -> int:
    """Return the first position that the model passes to its decoder, 0 if it passes none; PaliGemma counts from 1."""
    import torch

    with torch.no_grad(), one_thread(), first_calls([twin.model.get_submodule(twin.holder)]) as calls:
        twin.model(input_ids=some_tokens(twin), use_cache=False)
    positions = next((call.kwargs.get("position_ids") for call in calls.values()), None)
    # Not every decoder gets one list of positions per text.
    return int(positions[0, 0]) if isinstance(positions, torch.Tensor) and positions.dim() == 2 else 0


def activation_in(twin: Skeleton, block: nn.Module) -> str:
    """Return the activation that a block of the twin applies, by its usual name; empty where it is none of those known.

    The twin cannot be used afterwards: the block's forward stays wrapped.
    """
    import torch
    from torch.nn import functional as F
    from torch.overrides import TorchFunctionMode

    called: dict[str, None] = {}
    # ReLU, squaring and tanh (part of GELU's tanh approximation) can be called through several functions.
    squares = (torch.square, torch.pow, torch.Tensor.pow, torch.Tensor.square)
    names: dict[Any, str] = {
        F.silu: "silu",
        torch.relu: "relu",
        F.relu: "relu",
        torch.Tensor.relu: "relu",
        torch.tanh: "tanh",
    }
    names |= dict.fromkeys(squares, "square") | {torch.Tensor.tanh: "tanh"}

    class Watch(TorchFunctionMode):
        """A mode that records which of these functions are called."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            """Record the usual name of an activation that is called, then call the function."""
            if func is F.gelu:
                called["gelu" if (kwargs or {}).get("approximate", "none") == "none" else "tanh"] = None
            elif func in names:
                called[names[func]] = None
            return func(*args, **(kwargs or {}))

    own = block.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        """Run the block's own forward, and record the functions that it calls."""
        with Watch():
            return own(*args, **kwargs)

    block.forward = watched
    with torch.no_grad(), one_thread():
        twin.model(input_ids=some_tokens(twin), use_cache=False)
    found = [name for name in ("silu", "gelu", "relu") if name in called]
    if len(found) > 1:
        return ""
    if found == ["relu"]:
        return "relu2" if "square" in called else "relu"
    return found[0] if found else "gelu_pytorch_tanh" if "tanh" in called else ""
