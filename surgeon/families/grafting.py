"""The proof of grafts on a twin: before and after it, the logits must be the same, bit for bit, and the grafts learn.

The twin of the trunk gets the grafts of the output, by the code that ships with it; what the grafts hold at birth is
their own, and expanded twins are copies. Prefill, cached generation and one step of training are run.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from surgeon.checkpoint.weights import QUANTISATION
from surgeon.common.devices import one_thread
from surgeon.common.library import LOAD_FAILURES, config_of, first_line, quiet_transformers
from surgeon.errors import BadInput
from surgeon.families.proof import run_cached, run_prefill
from surgeon.families.silence import some_tokens
from surgeon.families.skeleton import Skeleton
from surgeon.families.twin import shrunk, stored_buffers, twin_of
from surgeon.runtime.bundle import import_bundle
from surgeon.runtime.composition import composition_of
from surgeon.runtime.gate_rules import GATE
from surgeon.runtime.rules import BRANCH

_USE = "use another model, or full fine-tuning"

_SEED = 11


def prove_grafts(trunk: Mapping[str, Any], grafted: Mapping[str, Any], *, heads: int) -> None:
    """Compare a twin, with so many heads, of the config `trunk` with one of `grafted`.

    Raises BadInput where a logit differs, or where training would leave all that is new as it is.
    """
    before = twin_of(trunk, heads=heads)
    check_grafts(before, replace(before, model=with_grafts(before, grafted, heads)))


def check_grafts(before: Skeleton, after: Skeleton) -> None:
    """Compare a twin with the one that has grafts, in float32 and bfloat16, and train that for a step.

    Raises BadInput as `prove_grafts` does.
    """
    if before.encoder:
        _prove_encoder(before, after)
        return
    tokens = some_tokens(before)
    with one_thread():
        _check_equal(before, after, tokens, "")
        _check_learns(after, tokens)
        for twin in (before, after):
            lower(twin.model)
        _check_equal(before, after, tokens, " in bfloat16")


def _prove_encoder(before: Skeleton, after: Skeleton) -> None:
    """The same of an encoder: whole sequences, one of them padded."""
    import torch

    tokens = torch.cat([some_tokens(before), some_tokens(before, seed=2)])
    mask = torch.ones_like(tokens)
    mask[1, -4:] = 0
    tokens[1, -4:] = before.text.pad_token_id or 0
    with one_thread():
        for kind in ("", " in bfloat16"):
            if kind:
                for twin in (before, after):
                    lower(twin.model)
                    twin.model.to(torch.bfloat16)
            with torch.no_grad():
                one = _encoded(before, tokens, mask, "without")
                other = _encoded(after, tokens, mask, "with")
            if not torch.equal(one, other):
                raise BadInput(
                    f"on a twin of this model the output{kind} is not the base's once it has its controls; {_USE}"
                )
            if not kind:
                _check_moves(after, tokens, mask)


def _encoded(twin: Skeleton, tokens: Any, mask: Any, how: str, **more: Any) -> Any:
    """An encoder's first output where there is no padding, or as it is where it is no output of tokens."""
    try:
        output = twin.model(input_ids=tokens, attention_mask=mask, return_dict=True, **more)[0]
    except LOAD_FAILURES as error:
        raise BadInput(f"a twin of this model cannot be run {how} controls ({first_line(error)}); {_USE}") from error
    return output[mask.bool()] if output.shape[:2] == mask.shape else output


def _check_moves(twin: Skeleton, tokens: Any, mask: Any) -> None:
    """Raise BadInput where training would leave all controls as they are."""
    import torch

    model = twin.model.train()
    names = model.freeze_base()
    if not names:
        # An earlier surgery's, which stay as they are.
        model.eval()
        return
    # A flow of one's own: without it the model says that its losses have no part.
    flow = sys.modules[type(model).__module__].Flow()
    output = _encoded(twin, tokens, mask, "with", surgery_flow=flow)
    draws = torch.Generator().manual_seed(0)
    (output * torch.randn(output.shape, generator=draws)).sum().backward()
    held = dict(model.named_parameters())
    still = [name for name in names if name.endswith("lora_B") and not _has_gradient(held[name])]
    if still:
        raise BadInput(f"on a twin of this model {still[0]} gets no gradient, so it would never learn; {_USE}")
    model.eval()


def _has_gradient(value: Any) -> bool:
    return value.grad is not None and bool(value.grad.any())


def _check_equal(before: Skeleton, after: Skeleton, tokens: Any, kind: str) -> None:
    """Raise BadInput where grafts change a logit, or what runs without them does not run with them."""
    import torch

    for what, run in (("", run_prefill), (" with a cache", run_cached)):
        with torch.no_grad():
            try:
                one = run(before, tokens)
            except LOAD_FAILURES:
                continue
            try:
                other = run(after, tokens)
            except LOAD_FAILURES as error:
                raise BadInput(
                    f"on a twin of this model with its grafts the model cannot be run{what}{kind}"
                    f" ({first_line(error)}); use another graft, or operations that add layers"
                ) from error
        if not torch.equal(one, other):
            raise BadInput(
                f"on a twin of this model the logits{what}{kind} are not the base's once it has its grafts; use"
                " operations that add layers"
            )


def lower(model: Any) -> None:
    """Give a model's tensors the dtypes that transformers gives them where bfloat16 is asked for."""
    import torch

    plan = model.eval()._get_dtype_plan(torch.bfloat16)
    kept = [(re.compile(pattern.replace("*", ".*")), dtype) for pattern, dtype in plan.items()]
    # Buffers that no checkpoint holds are not loaded, and stay as code computes them.
    for name, value in (dict(model.named_parameters()) | stored_buffers(model)).items():
        value.data = value.data.to(next((dtype for found, dtype in kept if found.search(name)), torch.bfloat16))
        value.grad = None


def with_grafts(twin: Skeleton, grafted: Mapping[str, Any], heads: int) -> Any:
    """The shipped code's model of a twin's size, with the twin's weights and newborn grafts."""
    import torch

    # In full precision, as the twin of the trunk is.
    small = shrunk({key: value for key, value in grafted.items() if key != QUANTISATION}, heads_left=heads)
    try:
        with quiet_transformers(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            kind = getattr(import_bundle(grafted), _class_of(grafted))
            model = kind._from_config(config_of(small, kind.config_class))
    except LOAD_FAILURES as error:
        raise BadInput(
            f"config.json: the grafted model cannot be built from it ({first_line(error)}); use operations that add"
            " layers"
        ) from error
    # Its buffers are of the config's dtype, as the twin's are.
    for value in (*model.parameters(), *stored_buffers(model).values()):
        value.data = value.data.float()
    held = twin.model.state_dict()
    with torch.no_grad():
        for name, value in model.state_dict().items():
            source = held.get(name.replace(f".{BRANCH}", "."))
            if source is not None:
                # Parts for the tail, which no branch reads, stay as they are: any numbers do.
                for axis, size in enumerate(source.shape):
                    value = value.narrow(axis, 0, size)
                value.copy_(source)
            elif name.endswith(f"{GATE}threshold"):
                # Open, so that what it switches is looked at: closed, a gate hides it.
                value.fill_(-1.0)
    return model.eval()


def _class_of(grafted: Mapping[str, Any]) -> str:
    """The class by which a twin with grafts is compared: a decoder's with its words, whatever head the config names."""
    native = composition_of(grafted)
    assert native is not None
    found = None if native.encoder else native.class_of(native.auto)
    return found or str(grafted["architectures"][0])


def _check_learns(twin: Skeleton, tokens: Any) -> None:
    """Raise BadInput where a step of training fails, or gives no gradient to anything new."""
    import torch

    model = twin.model.train()
    names = set(model.freeze_base())
    if not names:
        # An earlier surgery's grafts, which stay as they are.
        model.eval()
        return
    chosen = [value for name, value in model.named_parameters() if name in names]
    domains = torch.ones(len(tokens), dtype=torch.long)
    # A gate may happen to be shut for all of these tokens; the other way round it is open for some.
    for _ in range(2):
        try:
            model(input_ids=tokens, labels=tokens, domain_ids=domains).loss.backward()
        except LOAD_FAILURES as error:
            raise BadInput(
                f"on a twin of this model with its grafts a step of training fails ({first_line(error)}); use"
                " operations that add layers"
            ) from error
        if any(map(_has_gradient, model.parameters())):
            return
        with torch.no_grad():
            for value in chosen:
                value.neg_()
    raise BadInput("on a twin of this model its grafts get no gradient; use operations that add layers")
