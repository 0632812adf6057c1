"""Of an encoder's layer the blocks beside which controls stand: found by watching what is added to the stream.

A layer adds to the stream what its blocks make of it, and norms the sum or what a block reads. On a twin every tensor
that goes into a module or out of it is kept, and a sum is recognised by its value, bit for bit: the stream so far plus
what one module put out. That module is the end of a block; the first that reads the stream, or its norm, is the
beginning. What a token's state does to other tokens goes through attention, what it does to its own alone through an
FFN.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from surgeon.common.devices import one_thread
from surgeon.common.library import LOAD_FAILURES, first_line
from surgeon.errors import BadInput, printable
from surgeon.families.silence import some_tokens
from surgeon.families.skeleton import BASE, Skeleton, classes_of
from surgeon.runtime.composition import (
    ATTENTION,
    ENCODER_AUTOS,
    FFN,
    TORCH_CLASSES,
    Composition,
    HeadClass,
    SpanClass,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

# Of two runs that differ in one token alone, states of other tokens that differ by less are equal but for rounding.
_TOLERANCE = 1e-4
_USE = "use another model, or full fine-tuning"


def told_class(kind: type[Any]) -> str:
    """A class as a composition names it."""
    if kind.__module__.startswith("torch.nn.modules."):
        return f"torch.nn.{kind.__name__}"
    return f"{kind.__module__.removeprefix('transformers.')}.{kind.__name__}"


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


@dataclass
class _Event:
    """What one module got and put out in a layer's run; `before` and `after` number its start and its end."""

    name: str
    module: nn.Module
    given: list[Tensor]
    before: int
    made: Tensor | None = None
    after: int = 0


@dataclass
class _Watched:
    """A layer's run: what it got first, what its modules did, and what it put out."""

    stream: Tensor
    events: list[_Event] = field(default_factory=list)
    output: Tensor | None = None
    clock: int = 0


@dataclass(frozen=True)
class _Span:
    """A block: the module that reads first and the one whose output is added to the stream."""

    reads: str
    reader: nn.Module
    writes: str
    writer: nn.Module

    @property
    def size(self) -> int:
        """Parameters at both ends."""
        return sum(value.numel() for module in {self.reader, self.writer} for value in module.parameters())


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
        watched = {index: _watch(twin.layers[index], run) for index in layers}
        for index in layers:
            if (seen := watched[index]) is None:
                raise _unfit(model_type, f"its layer {index} does not run once on a text alone")
            if set(twin.layers[index].modules()) - set(modules[index]):
                raise _unfit(model_type, "its layers put other modules in the place of theirs when they run")
            roles: dict[str, _Span] = {}
            for span in _blocks(seen, twin.text.hidden_size):
                role = _role(model_type, span, run, ids.shape[1])
                if role not in roles or span.size > roles[role].size:
                    roles[role] = span
            for role, words in ((ATTENTION, "self-attention"), (FFN, "FFN")):
                if role not in roles:
                    raise _unfit(
                        model_type, f"no {words} is found in its layers, which hold {_held(twin.layers[index])}"
                    )
                span = roles[role]
                ends = told_class(type(span.reader)), told_class(type(span.writer))
                found[SpanClass(span.reads, ends[0], span.writes, ends[1], role)] = None
    return tuple(found)


def _held(layer: nn.Module) -> str:
    return ", ".join(type(child).__name__ for _, child in layer.named_children())


def _watch(layer: nn.Module, run: Callable[[], Any]) -> _Watched | None:
    """What happens in a layer when the model reads a text; None where it does not run, or not once."""
    import torch

    runs: list[_Watched] = []
    running: list[_Event] = []

    def tensors(*held: Any) -> list[Tensor]:
        return [each.clone() for each in held if isinstance(each, torch.Tensor) and each.is_floating_point()]

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = tensors(*args, *kwargs.values())
        if module is layer:
            # What gets no state by itself is no layer that adds to one.
            runs.append(_Watched(given[0] if given else torch.empty(0)))
        elif runs:
            seen = runs[-1]
            seen.clock += 1
            seen.events.append(_Event(names[module], module, given, seen.clock))
            running.append(seen.events[-1])

    def end(module: nn.Module, _args: tuple[Any, ...], made: Any) -> None:
        put = tensors(made[0] if isinstance(made, tuple | list) else made)
        if not runs:
            return  # parts of a layer that does not run as one
        seen = runs[-1]
        seen.clock += 1
        if module is layer:
            seen.output = put[0] if put else None
        else:
            event = running.pop()
            event.made, event.after = (put[0] if put else None), seen.clock

    names = {module: name for name, module in layer.named_modules()}
    hooks = [module.register_forward_pre_hook(begin, with_kwargs=True) for module in names]
    hooks += [module.register_forward_hook(end) for module in names]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return runs[0] if len(runs) == 1 and runs[0].output is not None else None


def _blocks(seen: _Watched, width: int) -> list[_Span]:
    """The blocks of a layer, in the order in which they are added to the stream."""
    import torch

    times: dict[nn.Module, int] = {}
    for event in seen.events:
        times[event.module] = times.get(event.module, 0) + 1
    # The stream, and norms of it, one of which may be the stream from there on; and what was that before.
    streams = [seen.stream]
    before: list[Tensor] = []
    spans: list[_Span] = []
    began = 0
    # Every tensor in the order in which it is first seen, the layer's own output last.
    shown = sorted(
        [(event.before, value) for event in seen.events for value in event.given]
        + [(event.after, event.made) for event in seen.events if event.made is not None],
        key=lambda each: each[0],
    )
    for at, value in [*shown, (seen.clock + 1, seen.output)]:
        if value is None or value.shape != seen.stream.shape or value.shape[-1] != width:
            continue
        if any(torch.equal(value, known) for known in (*streams, *before)):
            continue
        # What runs several times in a layer cannot stand for one place in it.
        ended = [e for e in seen.events if e.made is not None and began < e.after <= at and times[e.module] == 1]
        ended.sort(key=lambda event: -event.after)
        added = next(((event, stream) for stream in streams for event in ended if _adds(event, stream, value)), None)
        if added is not None:
            if (span := _span(seen, *added, began, times)) is not None:
                spans.append(span)
            before += streams
            streams, began = [value], at - 1
        elif any(
            _is_norm(event.module) and _same(event.made, value) and event.given and _same(streams[0], event.given[0])
            for event in seen.events
        ):
            streams.append(value)
    return spans


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and not module._modules


def _adds(event: _Event, stream: Tensor, value: Tensor) -> bool:
    """Whether a value is the stream and what a module put out."""
    import torch

    made = event.made
    if made is None or made.numel() != stream.numel() or torch.equal(made, value):
        return False
    return torch.equal(stream + made.reshape(stream.shape), value)


def _span(seen: _Watched, writer: _Event, stream: Tensor, began: int, times: Mapping[nn.Module, int]) -> _Span | None:
    """The block that ends at `writer`; a norm that it ends with, of what is added alone, is left out."""
    import torch

    if _is_norm(writer.module) and writer.given:
        inner = [event for event in seen.events if event.made is not None and event.after < writer.before]
        inner.sort(key=lambda event: -event.after)
        found = next((event for event in inner if _same(event.made, writer.given[0])), None)
        if found is None:
            return None
        writer = found
    readings = [stream, *(e.made for e in seen.events if _is_norm(e.module) and e.given and _same(e.given[0], stream))]
    for event in seen.events:
        inside = event.name == writer.name or not writer.name.startswith(f"{event.name}.")
        starts = began <= event.before <= writer.before and inside and not _is_norm(event.module)
        if not starts or not event.given or next(event.module.parameters(), None) is None:
            continue
        if any(reading is not None and torch.equal(event.given[0], reading) for reading in readings):
            fits = times[event.module] == 1 and all(_known(each.module) for each in (event, writer))
            return _Span(event.name, event.module, writer.name, writer.module) if fits else None
    return None


def _same(one: Tensor | None, other: Tensor) -> bool:
    import torch

    return one is not None and torch.equal(one, other)


def _known(module: nn.Module) -> bool:
    return told_class(type(module)) in TORCH_CLASSES or type(module).__module__.startswith("transformers.models.")


def _role(model_type: str, span: _Span, run: Callable[[], Any], count: int) -> str:
    """Whether a block mixes tokens: its output at other tokens, when it reads another state of the first or the last.

    Raises BadInput where no token sees later ones: a decoder's.
    """
    made: list[Tensor] = []
    turned: list[int] = []

    def turn(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key = "" if args else next(iter(inspect.signature(module.forward).parameters))
        x = (args[0] if args else kwargs[key]).clone()
        for token in turned:
            x[:, token] = -x[:, token].flip(-1)
        return ((x, *args[1:]), kwargs) if args else (args, kwargs | {key: x})

    def keep(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        made.append((output[0] if isinstance(output, tuple | list) else output).clone())

    hooks = [
        span.reader.register_forward_pre_hook(turn, with_kwargs=True),
        span.writer.register_forward_hook(keep),
    ]
    try:
        run()
        # Behind the last there may be padding of the model's own.
        for token in (0, count - 1):
            turned[:] = [token]
            run()
    finally:
        for hook in hooks:
            hook.remove()
    before, first, last = made
    scale = before.abs().max().clamp(min=1e-12)
    later = bool((before - first)[:, 1:count].abs().max() / scale > _TOLERANCE)
    earlier = bool((before - last)[:, : count - 1].abs().max() / scale > _TOLERANCE)
    if later and not earlier:
        raise _unfit(model_type, "its tokens do not see later ones: it is a decoder without a head for language")
    return ATTENTION if later or earlier else FFN
