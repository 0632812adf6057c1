"""Blocks of a layer, found by watching it run: modules that read the residual stream, and what is added to it.

A layer adds the outputs of its blocks to the stream, and norms the sum or a block's input. On a twin every tensor that
enters or leaves a module is recorded. A block may be one module that reads a state and returns one. Where it is not one
module, or is one that norms the sum of the stream and its addition (BERT), the sum is recognised by its value, bit for
bit: the stream so far plus the output of one module. That module is the end of a block; the first module that reads the
stream, or its norm, is the beginning. A block in which a token's state affects other tokens is attention, a state space
or a convolution; one in which it affects only its own token is an FFN.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from surgeon.grafts.composition import TORCH_CLASSES, SpanClass

if TYPE_CHECKING:
    from torch import Tensor, nn

# Two runs differ in one token only; if states of other tokens differ by less than this, they are equal up to rounding.
_TOLERANCE = 1e-4


def told_class(kind: type[Any]) -> str:
    """Return a class's name in a composition: `torch.nn.` and its name, or its path below `transformers`."""
    if kind.__module__.startswith("torch.nn.modules."):
        return f"torch.nn.{kind.__name__}"
    return f"{kind.__module__.removeprefix('transformers.')}.{kind.__name__}"


@dataclass
class _Event:
    """The inputs and output of one module in a layer's run; `before` and `after` number its start and its end."""

    name: str
    module: nn.Module
    given: list[Tensor]
    before: int
    made: Tensor | None = None
    after: int = 0


@dataclass
class Watched:
    """A layer's run: its first input, what its modules did, and its output."""

    stream: Tensor
    events: list[_Event] = field(default_factory=list)
    output: Tensor | None = None
    clock: int = 0


@dataclass(frozen=True)
class Block:
    """A block: the module that reads the stream first, and the module whose output is added to the stream."""

    reads: str
    reader: nn.Module
    writes: str
    writer: nn.Module

    @property
    def size(self) -> int:
        """The number of parameters of the first and the last module."""
        return sum(value.numel() for module in {self.reader, self.writer} for value in module.parameters())

    def told(self, role: str) -> SpanClass:
        """Return the entry that describes this block in a composition; `role` is ATTENTION or FFN."""
        return SpanClass(self.reads, told_class(type(self.reader)), self.writes, told_class(type(self.writer)), role)


def watched(layer: nn.Module, run: Callable[[], Any]) -> Watched | None:
    """Record what happens in a layer when the model reads a text; return None where it does not run exactly once."""
    import torch

    runs: list[Watched] = []
    running: list[_Event] = []

    def tensors(*held: Any) -> list[Tensor]:
        """Return copies of the floating-point tensors among `held`, in the stream's shape where only that differs."""
        found = [each.clone() for each in held if isinstance(each, torch.Tensor) and each.is_floating_point()]
        # A block may read the one text as a matrix with one row per token.
        shape = runs[-1].stream.shape if runs else torch.Size()
        flat = shape[1:] if len(shape) == 3 and shape[0] == 1 else None
        return [each.view(shape) if each.shape == flat else each for each in found]

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a run of the layer, or record the start and the inputs of a module in it."""
        first = _read_first(module, args)
        given = tensors(*args, *(kwargs[name] for name in sorted(kwargs, key=lambda name: name != first)))
        if module is layer:
            # A layer that gets no state as an argument cannot add to one.
            runs.append(Watched(given[0] if given else torch.empty(0)))
        elif runs:
            seen = runs[-1]
            seen.clock += 1
            seen.events.append(_Event(names[module], module, given, seen.clock))
            running.append(seen.events[-1])

    def end(module: nn.Module, _args: tuple[Any, ...], made: Any) -> None:
        """Record the output of the layer, or the end and the output of a module in it."""
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
    with contextlib.ExitStack() as hooks:
        for module in names:
            hooks.enter_context(module.register_forward_pre_hook(begin, with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(end))
        run()
    return runs[0] if len(runs) == 1 and runs[0].output is not None else None


def _read_first(module: nn.Module, args: tuple[Any, ...]) -> str:
    """Return the name of a module's first argument where it is passed by keyword; empty where it is positional."""
    return "" if args else next(iter(inspect.signature(module.forward).parameters), "")


def modules_in(seen: Watched, width: int, *, inside: bool = False) -> list[Block]:
    """Return the modules of a layer that read states of `width` and return as many numbers, each as a block.

    Only the layer's children are searched; with `inside` only the children of these. Norms and single matrices are not
    blocks. Modules with tokens along another axis than the second are left out: a trial could not show whether they mix
    tokens.
    """
    return [
        Block(event.name, event.module, event.name, event.module)
        for event in seen.events
        # A block is a class of its own with submodules: norms and single matrices are not blocks.
        if event.name.count(".") == int(inside)
        and type(event.module).__module__.startswith("transformers.")
        and any(True for _ in event.module.children())
        and any(held.ndim > 1 for held in event.module.parameters())
        and event.given
        and event.made is not None
        and event.given[0].ndim == 3
        and event.given[0].shape[1] > 1
        and event.given[0].shape[-1] == width
        and event.made.numel() == event.given[0].numel()
    ]


def blocks_in(seen: Watched, width: int) -> list[Block]:
    """Return the blocks of a layer, in the order in which they are added to the stream."""
    import torch

    times: dict[nn.Module, int] = {}
    for event in seen.events:
        times[event.module] = times.get(event.module, 0) + 1
    # `streams`: the stream and norms of it, one of which may be the stream from there on. `before`: earlier values of
    # these.
    streams = [seen.stream]
    before: list[Tensor] = []
    spans: list[Block] = []
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
        # A module that runs several times in a layer does not identify one place in it.
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
    """Return whether a module is a norm: its class has `norm` in its name, and it has no submodules."""
    return "norm" in type(module).__name__.lower() and not module._modules


def _adds(event: _Event, stream: Tensor, value: Tensor) -> bool:
    """Return whether `value` is the sum of the stream and a module's output."""
    import torch

    made = event.made
    if made is None or made.numel() != stream.numel() or torch.equal(made, value):
        return False
    return torch.equal(stream + made.reshape(stream.shape), value)


def _span(seen: Watched, writer: _Event, stream: Tensor, began: int, times: Mapping[nn.Module, int]) -> Block | None:
    """Return the block that ends at `writer`; None where no module that a composition can name begins it.

    If `writer` only norms a block's output, the block ends at the module before it. `began` is the time at which the
    block before ended; `times` counts how often each module ran.
    """
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
        # Skip classes that a composition cannot name: a plain sequence, whose first module reads the same tensor, say.
        fits = times[event.module] == 1 and all(_known(each.module) for each in (event, writer))
        if fits and any(reading is not None and torch.equal(event.given[0], reading) for reading in readings):
            return Block(event.name, event.module, writer.name, writer.module)
    return None


def _same(one: Tensor | None, other: Tensor) -> bool:
    """Return whether both tensors are equal bit for bit; False where `one` is None."""
    import torch

    return one is not None and torch.equal(one, other)


def _known(module: nn.Module) -> bool:
    """Return whether a composition can name a module's class."""
    return told_class(type(module)) in TORCH_CLASSES or type(module).__module__.startswith("transformers.models.")


def norms_sum(seen: Watched, name: str) -> bool:
    """Return whether a module of the layer itself adds its input to its result and returns a norm of the sum."""
    block = next((event for event in seen.events if event.name == name), None)
    if block is None or block.made is None or not block.given:
        return False
    inner = [event for event in seen.events if event.name.startswith(f"{name}.")]
    return any(
        _is_norm(event.module)
        and _same(event.made, block.made)
        and any(_adds(other, block.given[0], event.given[0]) for other in inner)
        for event in inner
        if event.given
    )


def mixes(block: Block, run: Callable[[], Any], count: int) -> tuple[bool, bool]:
    """Return (later, earlier): whether a block's output depends on earlier tokens, and on later tokens.

    `later`: outputs after the first token change with the first token's input state. `earlier`: outputs before the last
    token change with the last token's input state. `run` has the model read one text of `count` tokens.
    """
    made: list[Tensor] = []
    turned: list[int] = []

    def by_token(x: Tensor) -> Tensor:
        """Return states with tokens along the second axis, as a view: a matrix gets an axis for the batch."""
        return x.view(1, *x.shape) if x.ndim == 2 else x

    def turn(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Change the input states of the tokens in `turned`: reverse them and flip their signs."""
        key = _read_first(module, args)
        x = (args[0] if args else kwargs[key]).clone()
        for token in turned:
            by_token(x)[:, token] = -by_token(x)[:, token].flip(-1)
        return ((x, *args[1:]), kwargs) if args else (args, kwargs | {key: x})

    def keep(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        """Record the block's output."""
        made.append(by_token(output[0] if isinstance(output, tuple | list) else output).clone())

    def output(*tokens: int) -> Tensor:
        """Return the block's first output, with the input states of these tokens changed."""
        turned[:] = tokens
        made.clear()
        run()
        return made[0]

    reads = block.reader.register_forward_pre_hook(turn, with_kwargs=True)
    with reads, block.writer.register_forward_hook(keep):
        # After the last token there may be padding that the model adds.
        before, first, last = output(), output(0), output(count - 1)
    scale = before.abs().max().clamp(min=1e-12)
    later = bool((before - first)[:, 1:count].abs().max() / scale > _TOLERANCE)
    earlier = bool((before - last)[:, : count - 1].abs().max() / scale > _TOLERANCE)
    return later, earlier
