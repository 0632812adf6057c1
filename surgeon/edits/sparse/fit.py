"""The search for a class that holds a base: both are built, all tensors must fit, and tiny twins must agree."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from surgeon.anatomy.names import as_loaded, made_of
from surgeon.anatomy.skeleton import Skeleton, build
from surgeon.anatomy.twin import shrunk, twin_of
from surgeon.common.devices import one_thread
from surgeon.common.library import LOAD_FAILURES, first_line, quiet_transformers
from surgeon.edits.sparse.dense import BESIDE, STEM, Dense, Form, Mixture, NoTarget, check_divides
from surgeon.edits.sparse.target import Made, Target
from surgeon.edits.sparse.targets import TARGETS
from surgeon.errors import BadInput, printable

if TYPE_CHECKING:
    from torch import Tensor

# torch's grouped_mm, which multiplies many experts at once, needs rows of a multiple of 16 bytes: 8 numbers of 16 bits.
_GROUPED = 8
# The share of the twin's largest logit by which rounding may change one function's logits.
_ROUNDING = 1e-4


def dense_of(config: Mapping[str, Any], layers: Sequence[Mapping[str, tuple[int, ...]]], stem: str) -> Dense:
    """Return a base by its config.json and the shapes in its layers, whose names begin with `stem`.

    Raises NoTarget where no class is known that could hold such layers with experts in them.
    """
    kinds: list[Mapping[str, tuple[int, ...]]] = []
    numbers: list[int] = []
    for shapes in layers:
        if shapes not in kinds:
            kinds.append(shapes)
        numbers.append(kinds.index(shapes))
    return _dense(json.dumps([config, kinds, numbers, stem], sort_keys=True))


def target_for(dense: Dense, mixture: Mixture, named: str | None = None) -> Target:
    """Return the class that holds a base as such a mixture; `named` is the class that a plan chooses.

    Raises NoTarget where no class does, with the reason for each, and BadInput where the named class has no such form.
    """
    check_divides(mixture, dense.width)
    own = [target for target in TARGETS if target.form == mixture.form and named in (None, target.model_type)]
    asked = [target for target in own if target.is_near(dense)]

    def why_not(target: Target) -> str:
        """Return why this class does not hold the base as the mixture; empty where it does."""
        uneven = f"it multiplies experts of a multiple of {_GROUPED} neurons, and the base has {dense.width}"
        refusal = target.refusal(mixture)
        first = mixture.plain[:1] and dense.holders[:1]
        wrong = refusal or _why_not(dense, target, mixture.segments, first)
        return wrong or (uneven if dense.width % _GROUPED else "")

    # For each reason, the classes that it rules out.
    reasons: dict[str, list[str]] = {}
    for target in asked:
        wrong = why_not(target)
        if not wrong:
            _check_segments(dense, mixture)
            return target
        reasons.setdefault(wrong, []).append(target.model_type)
    if not own:
        held = ", ".join(t.model_type for t in TARGETS if t.form == mixture.form and t.extends in ("", _type(dense)))
        raise BadInput(f"`target: {printable(str(named))}` has no `form: {mixture.form}`; use one of {held}")
    if not asked and named is not None and own[0].extends:
        raise BadInput(f"`target: {printable(named)}` is for a base of type {own[0].extends}; leave `target` out")
    others = (t for t in TARGETS if t.form != mixture.form and t.is_near(dense) and not why_not(t))
    other = next(others, None)
    why = "; ".join(f"{', '.join(which)}: {reason}" for reason, which in reasons.items()) or _far(dense)
    raise NoTarget(
        f"no class of transformers known here computes what this {printable(_type(dense))} does"
        f" with experts in the place of its MLP ({why}); "
        + (BESIDE if other is None else f"use `form: {other.form}` ({other.model_type})")
    )


def _type(dense: Dense) -> str:
    """Return the base's model type."""
    return str(dense.config.get("model_type"))


def _far(dense: Dense) -> str:
    """Describe why no class is even tried."""
    if dense.stem != STEM:
        return f"its layers are called `{printable(dense.stem)}0.…`, and those of the classes `{STEM}0.…`"
    if len(dense.kinds) > 1:
        other = list(dense.kinds)[1]
        return f"layers 0 and {other} hold different tensors, and none of the classes has such layers"
    return "its FFN has no gate, and theirs do"


def _check_segments(dense: Dense, mixture: Mixture) -> None:
    """Raise BadInput where experts are cut into pieces of a size that transformers cannot multiply."""
    width = dense.width // mixture.segments
    if width % _GROUPED:
        fitting = [n for n in range(2, mixture.segments) if dense.width % (n * _GROUPED) == 0]
        raise BadInput(
            f"`fine_grained: {mixture.segments}` makes experts of {width} neurons, and transformers multiplies those of"
            f" a multiple of {_GROUPED}; give {max(fitting, default=1)}"
        )


@functools.lru_cache(maxsize=16)
def _dense(told: str) -> Dense:
    """Return the base from its JSON text `told`; kept, because building it takes time."""
    config, kinds, numbers, stem = json.loads(told)
    shapes = [{suffix: tuple(shape) for suffix, shape in kind.items()} for kind in kinds]
    return Dense(config, build(config).text.to_dict(), [shapes[number] for number in numbers], stem)


@functools.lru_cache(maxsize=64)
def _why_not(dense: Dense, target: Target, segments: int, plain: tuple[int, ...]) -> str:
    """Describe why a class does not hold a base; empty where it does. `plain` are layers that keep their MLP."""
    # A few experts suffice for this test.
    mixture = Mixture(target.form, experts=4, top_k=2, segments=segments)
    try:
        skeleton, other = build(dense.config), build(target.config(dense, mixture))
        return _misfit(target, dense, mixture, skeleton, other) or _unlike(target, dense, plain)
    except BadInput as error:
        return printable(str(error).removeprefix("config.json: "), 160)
    except LOAD_FAILURES as error:
        return printable(first_line(error), 160)


def _misfit(target: Target, dense: Dense, mixture: Mixture, skeleton: Skeleton, other: Skeleton) -> str:
    """Describe the first tensor that only one of class and base has, or that differs in size; empty where all fit."""
    # Tensors outside the layers, then those of the layers.
    planned = {name: shape for name, shape in skeleton.shapes.items() if not name.startswith(f"{skeleton.stack}.")}
    for index, shapes in dense.kinds.items():
        stem = f"{skeleton.stack}.{index}."
        new = target.layer(dense, mixture) if index in dense.holders else []
        dropped = target.dropped(dense) if new else set()
        planned |= {f"{stem}{suffix}": shape for suffix, shape in shapes.items() if suffix not in dropped}
        planned |= {f"{stem}{each.suffix}": each.shape for each in new}
    inside = tuple(f"{other.stack}.{index}." for index in dense.kinds)
    wanted = {n: s for n, s in other.shapes.items() if n.startswith(inside) or not n.startswith(f"{other.stack}.")}

    def told(name: str) -> str:
        """Return a tensor's name for messages, within its layer."""
        return printable(next((name.removeprefix(each) for each in inside if name.startswith(each)), name))

    found = made_of(other.model, planned)
    numbers = dict.fromkeys((name for made in found.values() for name in made.names), 0)
    for name, made in found.items():
        target_name = made.names[0]
        if target_name not in wanted:
            return f"it has no {told(name)}"
        if not made.converted and wanted[target_name] != planned[name]:
            return f"its {told(name)} is {list(wanted[target_name])}, the base's another"
        numbers[target_name] += math.prod(planned[name])
    tied = set(other.model.all_tied_weights_keys)
    odd = next((name for name, count in numbers.items() if count != math.prod(wanted[name])), None)
    if odd is not None:
        return f"its {told(odd)} is {list(wanted[odd])}, the base's of another size"
    lacking = next((name for name in wanted if name not in numbers and name not in tied), None)
    return "" if lacking is None else f"the base has nothing for its {told(lacking)}"


def _unlike(target: Target, base: Dense, plain: tuple[int, ...]) -> str:
    """Describe how a tiny twin's logits differ in this class; empty where they are the same.

    Layers in `plain` keep the MLP.
    """
    import torch

    mixture = Mixture(target.form, experts=4, top_k=2, plain=plain)
    with one_thread(), quiet_transformers(), torch.no_grad():
        twin = twin_of(base.config)
        held: dict[str, Tensor] = {name: value.detach() for name, value in twin.model.state_dict().items()}
        stem = f"{twin.stack}."
        own = [
            {n.removeprefix(f"{stem}{index}."): v for n, v in held.items() if n.startswith(f"{stem}{index}.")}
            for index in range(len(twin.layers))
        ]
        shapes = [{suffix: tuple(value.shape) for suffix, value in each.items()} for each in own]
        dense = Dense(shrunk(base.config), twin.text.to_dict(), shapes, base.stem)
        tensors = {name: value for name, value in held.items() if not name.startswith(stem)}
        draws = torch.Generator().manual_seed(0)
        for index, layer in enumerate(own):
            kept, holds = index in plain, index in dense.holders
            dropped = target.dropped(dense, plain=kept) if holds else set()
            tensors |= {f"{stem}{index}.{s}": v for s, v in layer.items() if s not in dropped}
            for made in (target.plain_layer(dense) if kept else target.layer(dense, mixture)) if holds else ():
                # Otherwise the bias is a buffer, which the model already has.
                if made.role != "bias" or target.row:
                    tensors[f"{stem}{index}.{made.suffix}"] = _of_twin(made, layer, target.form, draws)
        with torch.random.fork_rng(devices=[]):
            other = build(target.config(dense, mixture), buffers=True)
        names = [name for name, _ in other.model.named_parameters()]
        loaded = as_loaded(other.model, {name: value.contiguous() for name, value in tensors.items()}, names)
        for name, value in loaded.items():
            owner, _, key = name.rpartition(".")
            other.model.get_submodule(owner)._parameters[key] = torch.nn.Parameter(value, requires_grad=False)
        other.model.tie_weights()
        ids = torch.randint(int(twin.text.vocab_size), (2, 40), generator=draws)
        one, two = (model.model.eval()(input_ids=ids, use_cache=False).logits for model in (twin, other))
        apart = float((one - two).abs().max())
    largest = float(one.abs().max())
    if math.isfinite(apart) and apart <= _ROUNDING * largest:
        return ""
    return f"a tiny twin gives logits that differ by {apart:.2g}, the largest being {largest:.2g}"


def _of_twin(made: Made, own: Mapping[str, Tensor], form: Form, draws: Any) -> Tensor:
    """Return a tensor of a twin's layer; with a shared expert, the other experts' outputs are zero."""
    import torch

    if made.role == "router":
        return torch.randn(made.shape, generator=draws)
    if made.role in ("idle", "bias") or (made.role == "down" and form == "shared"):
        return torch.zeros(made.shape)
    return torch.cat([own[take.suffix][take.start : take.stop] for take in made.takes]).reshape(made.shape)
