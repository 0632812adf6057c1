"""Which tensors of a layer must be null so that it adds exactly nothing to the residual stream: found by trial.

Every parameter of the layer is nulled, then restored in the order in which modules run. What must stay null is the last
writer of each residual branch: a projection with its bias, also in experts, or the scale of a norm behind it (stored as
0, or as −1 where the norm multiplies by one plus the scale). Tensors that act on the stream itself, stored buffers
included, become 1 where they scale it and 0 where they shift it. The proof is that the layer's output equals its input
bit for bit.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surgeon.anatomy.shared import shared_in, within
from surgeon.anatomy.skeleton import Skeleton
from surgeon.anatomy.twin import stored_buffers
from surgeon.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor, nn

_TOKENS = (1, 12)
# For up to this many tensors that act on the stream itself, every choice of 0 and 1 is tried; for more, only 1 for all.
_MOST_ACTING = 6


@dataclass(frozen=True)
class Silence:
    """What silences one layer: `values` to store, by tensor name in the layer, or the `reason` why there are none.

    `identities` are the values with which norms leave their input unscaled, by name: 1, or 0 where they add one.
    """

    values: dict[str, float]
    reason: str
    identities: dict[str, float]


def in_words(kinds: Sequence[Mapping[str, float]]) -> str:
    """Return a text naming the null tensors of silenced layers, by module, over all kinds, and the number of kinds."""
    values = sorted({(name, value) for each in kinds for name, value in each.items()})
    silent = ", ".join(_short([name for name, value in values if value != 1.0])) or "nothing"
    scales = "".join(f", {name} = 1" for name in _short([name for name, value in values if value == 1.0]))
    several = f", {len(kinds)} kinds of layers" if len(kinds) > 1 else ""
    return f"{silent} silent{scales}{several}"


def _short(names: list[str]) -> list[str]:
    """Shorten parameter names to modules: `o_proj` for weight and bias of `self_attn.o_proj`, `experts.down_proj`."""
    found = []
    for name in names:
        parts = name.split(".")
        parts = parts[:-1] if parts[-1] in ("weight", "bias") else parts
        found.append(".".join(parts[-2:]) if len(parts) > 1 and "expert" in parts[-2] else parts[-1])
    return list(dict.fromkeys(found))


@dataclass
class Run:
    """A layer, or another module, with the arguments that it got in a run of the model."""

    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def stream(self) -> Tensor:
        """The residual stream that the layer adds to, (batch, positions, width)."""
        stream: Tensor = self.args[0] if self.args else self.kwargs["hidden_states"]
        return stream

    def output(self, stream: Tensor | None = None) -> Any:
        """Return the layer's output for this stream, or for another `stream`."""
        # A copy: a layer may change its input in place; input and output would then always look equal.
        stream = self.stream.clone() if stream is None else stream
        if self.args:
            given = self.layer(stream, *self.args[1:], **self.kwargs)
        else:
            given = self.layer(**(self.kwargs | {"hidden_states": stream}))
        return given[0] if isinstance(given, tuple | list) else given


def silences(twin: Skeleton, layers: list[int]) -> dict[int, Silence]:
    """Return what silences each of these layers of a twin; the twin's weights are unchanged afterwards."""
    runs, shared = captured(twin, layers), shared_in(twin)
    return {
        index: _search(runs[index], shared) if index in runs else _refused("it does not run on text alone")
        for index in layers
    }


def _refused(reason: str) -> Silence:
    """Return the result for a layer that cannot be silenced, for this reason."""
    return Silence({}, reason, {})


def captured(twin: Skeleton, layers: list[int]) -> dict[int, Run]:
    """Return the arguments that each layer gets when the model reads a text; layers that do not run are left out.

    Raises BadInput where the model computes NaN.
    """
    import torch

    wanted = {index: twin.layers[index] for index in layers}
    with torch.no_grad(), first_calls(wanted.values()) as calls:
        output = twin.model(input_ids=some_tokens(twin), use_cache=False)
    if bool(output[0].isnan().any()):
        raise BadInput("it computes NaN: is a number of config.json NaN, or 0 where something is divided by it?")
    return {index: calls[layer] for index, layer in wanted.items() if layer in calls}


@contextlib.contextmanager
def first_calls(modules: Iterable[nn.Module]) -> Iterator[dict[nn.Module, Run]]:
    """Record the arguments of each module's first call in the block, in the order in which modules are called."""
    calls: dict[nn.Module, Run] = {}

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Store the module with its arguments, unless an earlier call is stored."""
        # Copied: layers store keys and values in such mappings for layers above, and each run must see the original
        # ones.
        own = {name: copy.copy(each) if isinstance(each, MutableMapping) else each for name, each in kwargs.items()}
        calls.setdefault(module, Run(module, args, own))

    with contextlib.ExitStack() as hooks:
        for module in modules:
            hooks.enter_context(module.register_forward_pre_hook(keep, with_kwargs=True))
        yield calls


def some_tokens(twin: Skeleton) -> Tensor:
    """Return random token ids from a twin's vocabulary, (sequences, positions)."""
    import torch

    draws = torch.Generator().manual_seed(1)
    return torch.randint(5, min(twin.text.vocab_size, 120), _TOKENS, generator=draws)


def _search(run: Run, shared: Sequence[str]) -> Silence:
    """Return what silences a layer; blocks at `shared` belong to other layers too and are not changed."""
    import torch

    held = {name: value for name, value in run.layer.named_parameters() if not within(name, shared)}
    buffers = {name: value for name, value in stored_buffers(run.layer).items() if not within(name, shared)}
    kept = {name: value.detach().clone() for name, value in (*held.items(), *buffers.items())}
    order = [name for name in _order(run) if name in held]
    with torch.no_grad():
        nulls, identities = _nulls(run.layer, kept)
        try:
            for name, value in held.items():
                value.fill_(nulls[name])
            values: dict[str, float] = {}
            if not _silent(run):
                found = _of_stream(run, held, buffers, kept, identities)
                if found is None:
                    own = f" but those that it shares with others ({', '.join(shared)})" if shared else ""
                    return _refused(f"even with all its weights{own} zero a layer changes what passes through it")
                nulls |= found
                values = {name: value for name, value in found.items() if name in buffers}
            for name in order:
                held[name].copy_(kept[name])
                if not _silent(run):
                    held[name].fill_(nulls[name])
                    values[name] = nulls[name]
            dead = _without_gradient(run, held, values)
        finally:
            for name, tensor in (*held.items(), *buffers.items()):
                tensor.copy_(kept[name])
            for parameter in run.layer.parameters():
                parameter.grad = None
    if dead:
        return _refused(f"{dead[0]} would have to be zero and would then never learn")
    return Silence(values, "", identities)


def _silent(run: Run) -> bool:
    """Return whether the layer's output equals its input bit for bit."""
    import torch

    output = run.output()
    return isinstance(output, torch.Tensor) and torch.equal(output, run.stream)


def _of_stream(
    run: Run,
    held: Mapping[str, nn.Parameter],
    buffers: Mapping[str, Tensor],
    kept: Mapping[str, Tensor],
    identities: Mapping[str, float],
) -> dict[str, float] | None:
    """Return values for the tensors that scale or shift the stream itself, such that they leave it unchanged.

    Only stored buffers, and parameters with one number or one per dimension, are tried; all other parameters are null.
    The tensors hold the found values afterwards. None where no choice of 0 and 1 leaves the stream unchanged.
    """
    # Norms and biases are null already.
    vectors = {n: v for n, v in held.items() if v.ndim < 2 and n not in identities and not n.endswith("bias")}
    sought: dict[str, Tensor] = {**vectors, **buffers}
    for name, vector in vectors.items():
        vector.copy_(kept[name])
    acting = [name for name, tensor in sought.items() if _acts(run, tensor)]
    for name, vector in vectors.items():
        if name not in acting:
            vector.fill_(0.0)
    every = itertools.product((1.0, 0.0), repeat=len(acting)) if len(acting) <= _MOST_ACTING else [(1.0,) * len(acting)]
    for choice in every:
        values = dict(zip(acting, choice, strict=True))
        for name, value in values.items():
            sought[name].fill_(value)
        if _silent(run):
            return values
    return None


def _acts(run: Run, value: Tensor) -> bool:
    """Return whether the layer's output depends on this tensor while the others keep their values."""
    import torch

    before, kept = run.output(), value.clone()
    value.mul_(0.5).add_(0.25)
    after = run.output()
    value.copy_(kept)
    return not (isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor) and torch.equal(before, after))


def _without_gradient(run: Run, held: dict[str, nn.Parameter], values: dict[str, float]) -> list[str]:
    """Return the silenced parameters that get no gradient and so would never train; buffers are not counted."""
    import torch

    draws = torch.Generator().manual_seed(0)
    with torch.enable_grad():
        output = run.output(run.stream.detach().requires_grad_().clone())
        (output * torch.randn(output.shape, generator=draws)).sum().backward()
    return [name for name in values if name in held and ((grad := held[name].grad) is None or not bool(grad.any()))]


def _order(run: Run) -> list[str]:
    """Return the layer's parameters in the order in which modules run, first those of modules that are never called."""
    import torch

    with torch.no_grad(), first_calls(module for module in run.layer.modules() if module._parameters) as ran:
        run.output()
    names = {module: f"{name}." if name else "" for name, module in run.layer.named_modules()}
    apart = [module for module in names if module._parameters and module not in ran]
    return [
        f"{names[module]}{key}"
        for module in (*apart, *ran)
        for key, held in module._parameters.items()
        if held is not None
    ]


def _nulls(layer: nn.Module, kept: dict[str, Tensor]) -> tuple[dict[str, float], dict[str, float]]:
    """Return ({parameter: value with which it adds nothing}, {norm scale: value with which it scales by one})."""
    nulls = dict.fromkeys(kept, 0.0)
    identities: dict[str, float] = {}
    for prefix, module in layer.named_modules():
        scale = module._parameters.get("weight")
        name = f"{prefix}.weight"
        if scale is None or name not in kept or scale.ndim != 1 or "norm" not in type(module).__name__.lower():
            continue
        null = null_of(module, scale, kept[name])
        if null is not None:
            nulls[name], identities[name] = null, null + 1.0
    return nulls, identities


def null_of(module: nn.Module, scale: nn.Parameter, kept: Tensor) -> float | None:
    """Return the stored scale with which a norm outputs zeros for any input; None where neither 0 nor −1 does."""
    import torch

    shift = module._parameters.get("bias")
    sample = torch.randn(3, scale.shape[0], generator=torch.Generator().manual_seed(0))
    held = None if shift is None else shift.detach().clone()
    try:
        if shift is not None:
            shift.zero_()
        for null in (0.0, -1.0):
            scale.fill_(null)
            try:
                output = module(sample)
            except (RuntimeError, TypeError, ValueError, AttributeError):  # a norm that wants more than one input
                return None
            if isinstance(output, torch.Tensor) and not bool(output.any()):
                return null
        return None
    finally:
        scale.copy_(kept)
        if shift is not None and held is not None:
            shift.copy_(held)
