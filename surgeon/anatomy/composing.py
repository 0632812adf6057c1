"""Of which of transformers' classes the upcycled ones of a derived model are composed: found on its skeleton and twin.

Grafts stand beside a layer's attention or its FFN, whatever the model calls them. Which block is which is found by
trial: what a token's state does to later tokens goes through a token mixer (attention, a state space, a convolution),
and what it does to its own alone through an FFN (one, or experts). Where a block is no module, or one that norms the
sum of the stream and what it adds (BERT), its beginning and its end are found by what is added to the stream.

Where no field of config.json names an FFN's activation, a twin's FFN is watched as it runs. Its code may call the
activation by a function (LFM2), name it inside another setting (DBRX), or write it out as a formula (BLOOM). What it
calls of torch shows which it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surgeon.anatomy.encoder_blocks import heads_of
from surgeon.anatomy.silence import some_tokens
from surgeon.anatomy.skeleton import CAUSAL, IMAGE_TEXT, Skeleton, auto_of
from surgeon.anatomy.stream_blocks import Block, blocks_in, mixes, norms_sum, told_class, watched
from surgeon.common.devices import one_thread
from surgeon.common.library import LOAD_FAILURES
from surgeon.errors import BadInput, printable
from surgeon.grafts.composition import ATTENTION, FFN, OTHER_AUTOS, Composition, SiteClass, SpanClass

if TYPE_CHECKING:
    from torch import Tensor, nn


# The config's fields that may name the activation.
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act", "activation", "act_fn")
# Two states of a token mixer or an FFN that differ by less are equal but for rounding.
_TOLERANCE = 1e-4


def composition_of(config: Mapping[str, Any], skeleton: Skeleton, twin: Skeleton, layers: Sequence[int]) -> Composition:
    """The classes of a config's model; `layers` are one of each kind, whose blocks are probed on the `twin`.

    Raises BadInput where a class is not one that transformers has as its own, or the decoder is no model by itself.
    """
    from transformers import CONFIG_MAPPING, MODEL_MAPPING

    model = skeleton.model
    text = model.get_submodule(skeleton.holder)
    whole = MODEL_MAPPING.get(type(model.config), type(model))
    built_of = CONFIG_MAPPING[str(config["model_type"])]
    if type(model.config) is not built_of or text is model:
        raise _unfit(config, "its decoder is no model that transformers builds by itself")
    sites, spans, output = _probed(twin, layers)
    try:
        return Composition(
            model_type=str(config["model_type"]),
            autos=_autos(config, type(model)),
            config=told_class(type(model.config)),
            text_config=told_class(type(skeleton.text)),
            path=skeleton.path,
            head=told_class(type(model)),
            model=told_class(whole),
            text=told_class(type(text)),
            stack=skeleton.stack.removeprefix(f"{skeleton.holder}."),
            output=told_class(output),
            activation=_activation(skeleton.text),
            layers=tuple(dict.fromkeys(told_class(type(layer)) for layer in skeleton.layers)),
            sites=sites,
            spans=spans,
            heads=heads_of(model, OTHER_AUTOS),
            first_position=_first_position(twin),
        )
    except ValueError as error:
        raise _unfit(config, str(error)) from error


def _autos(config: Mapping[str, Any], head: type[Any]) -> tuple[str, ...]:
    """The auto classes that find `head` for a config of its model type, the one that it was built by first."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    known = {CAUSAL: MODEL_FOR_CAUSAL_LM_MAPPING, IMAGE_TEXT: MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING}
    found = [auto for auto, mapping in known.items() if mapping.get(head.config_class, None) is head]
    own = auto_of(config)
    return tuple(dict.fromkeys((own, *found))) if own is not None else tuple(found)


def _unfit(config: Mapping[str, Any], reason: str) -> BadInput:
    return BadInput(
        f"{printable(str(config.get('model_type')))}: no upcycled classes can be composed for it ({printable(reason)});"
        " use operations that add layers"
    )


def _activation(text: Any) -> str:
    """The config's field that names an activation; one with parameters of its own, which none could share, is none."""
    from transformers.activations import ACT2FN

    named = {key: getattr(text, key, None) for key in _ACTIVATIONS}
    known = {key: ACT2FN[name] for key, name in named.items() if isinstance(name, str) and name in ACT2FN}
    return next((key for key, made in known.items() if next(made.parameters(), None) is None), "")


@dataclass
class _Run:
    """A block with what a run of the model gave it, and what it made of that."""

    block: nn.Module
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor
    reads: str

    @property
    def x(self) -> Tensor:
        x: Tensor = self.args[0] if self.args else self.kwargs[self.reads]
        return x

    def again(self, x: Tensor) -> Tensor:
        made = (
            self.block(x, *self.args[1:], **self.kwargs) if self.args else self.block(**self.kwargs | {self.reads: x})
        )
        return _first(made)


def _first(made: Any) -> Tensor:
    output: Tensor = made[0] if isinstance(made, tuple | list) else made
    return output


def _probed(twin: Skeleton, layers: Sequence[int]) -> tuple[tuple[SiteClass, ...], tuple[SpanClass, ...], type[Any]]:
    """The blocks of these layers beside which something can stand, and the class of what the model returns."""
    import torch

    kinds = {type(layer) for layer in twin.layers}
    sites: dict[SiteClass, None] = {}
    spans: dict[SpanClass, None] = {}
    with torch.no_grad(), one_thread():
        runs, output = _captured(twin, layers)
        for index in layers:
            # A layer inside another (Zamba's) adds to the stream by itself.
            blocks = [run for run in runs[index] if type(run.block) not in kinds]
            told = [(run, role) for run in blocks if (role := _role(run, twin.text.hidden_size)) is not None]
            chosen = {role: _chosen([run for run, kind in told if kind == role], role) for role in (ATTENTION, FFN)}
            found = _without_modules(twin, index, chosen)
            if chosen[FFN] is None and FFN not in found:
                # It may stand in a module that runs before a token mixer and adds nothing by itself (Zamba 2).
                inner = _captured(twin, [index], inside=True)[0][index]
                chosen[FFN] = _chosen([run for run in inner if _role(run, twin.text.hidden_size) == FFN], FFN)
            for role, run in chosen.items():
                if role in found:
                    spans[found[role].told(role)] = None
                elif run is not None:
                    sites[SiteClass(run.name, told_class(type(run.block)), role)] = None
    return tuple(sites), tuple(spans), output


def _without_modules(twin: Skeleton, index: int, chosen: Mapping[str, _Run | None]) -> dict[str, Block]:
    """Blocks of a layer, by role, that are no modules, or norm the sum of the stream and what they add."""
    ids = some_tokens(twin)

    def run() -> Any:
        return twin.model(input_ids=ids, use_cache=False)

    seen = watched(twin.layers[index], run)
    # With tokens along another axis nothing shows what goes from one to the next.
    if seen is None or seen.stream.shape != (*ids.shape, twin.text.hidden_size):
        return {}
    asked = {role for role, block in chosen.items() if block is None or norms_sum(seen, block.name)}
    found: dict[str, Block] = {}
    for block in blocks_in(seen, twin.text.hidden_size) if asked else ():
        role = ATTENTION if any(mixes(block, run, ids.shape[1])) else FFN
        if role in asked and (role not in found or block.size > found[role].size):
            found[role] = block
    return found


def _first_position(twin: Skeleton) -> int:
    """What the model counts positions from where it gives its decoder some of its own: PaliGemma does, from 1."""
    import torch

    firsts: list[int] = []

    def hook(_: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        positions = given.get("position_ids")
        firsts.append(int(positions[0, 0]) if isinstance(positions, torch.Tensor) and positions.dim() == 2 else 0)

    handle = twin.model.get_submodule(twin.holder).register_forward_pre_hook(hook, with_kwargs=True)
    try:
        with torch.no_grad(), one_thread():
            twin.model(input_ids=some_tokens(twin), use_cache=False)
    finally:
        handle.remove()
    return next(iter(firsts), 0)


def _chosen(runs: Sequence[_Run], role: str) -> _Run | None:
    """Of several blocks of one role the one that is called so, else the last."""
    words = ("attn", "attention") if role == ATTENTION else ("mlp",)
    named = [run for run in runs if any(word in run.name for word in words)]
    return next(reversed(named or list(runs)), None)


def _captured(
    twin: Skeleton, layers: Sequence[int], *, inside: bool = False
) -> tuple[dict[int, list[_Run]], type[Any]]:
    """What blocks of these layers get and make when the model reads a text; with `inside`, those in their blocks."""
    runs: dict[int, list[_Run]] = {index: [] for index in layers}

    def keep(index: int, name: str, reads: str) -> Callable[..., None]:
        def hook(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> None:
            runs[index].append(_Run(block, name, args, kwargs, _first(made), reads))

        return hook

    hooks = [
        block.register_forward_hook(
            keep(index, name, next(iter(inspect.signature(block.forward).parameters), "")), with_kwargs=True
        )
        for index in layers
        for name, block in twin.layers[index].named_modules()
        # A block is a class of its own, made of parts: norms and single matrices are none.
        if name
        and name.count(".") == int(inside)
        and type(block).__module__.startswith("transformers.")
        and any(True for _ in block.children())
        and any(held.ndim > 1 for held in block.parameters())
    ]
    try:
        output = twin.model(input_ids=some_tokens(twin), use_cache=False, return_dict=True)
    finally:
        for hook in hooks:
            hook.remove()
    return runs, type(output)


def _role(run: _Run, width: int) -> str | None:
    """Whether a block mixes tokens or not; None for what does not go from the stream's width to it."""
    import torch

    try:
        x = run.x
    except (KeyError, IndexError):
        return None
    fits = isinstance(x, torch.Tensor) and isinstance(run.output, torch.Tensor) and x.is_floating_point()
    # With tokens along the second axis: where they are not, nothing shows what goes from one to the next.
    if not fits or x.ndim != 3 or x.shape[1] < 2 or x.shape[-1] != width or run.output.numel() != x.numel():
        return None
    other = x.clone()
    other[:, 0] = -other[:, 0].flip(-1)
    try:
        before, after = run.again(x), run.again(other)
    except LOAD_FAILURES:  # a block that cannot be run by itself
        return None
    apart = (before - after).reshape(x.shape).abs()[:, 1:].max() / before.abs().max().clamp(min=1e-12)
    return ATTENTION if apart > _TOLERANCE else FFN


def activation_in(twin: Skeleton, block: nn.Module) -> str:
    """The activation that a block of the twin applies, by its usual name; empty where that is none of those known.

    The twin is of no other use afterwards.
    """
    import torch
    from torch.nn import functional as F
    from torch.overrides import TorchFunctionMode

    called: dict[str, None] = {}
    # ReLU and its square, and the parts of GELU's approximation by tanh, are called by several names.
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
        """Notes what is called."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is F.gelu:
                called["gelu" if (kwargs or {}).get("approximate", "none") == "none" else "tanh"] = None
            elif func in names:
                called[names[func]] = None
            return func(*args, **(kwargs or {}))

    own = block.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
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
