"""A check that an output decodes the same with and without a cache, once the added tensors are no longer silent.

At birth grafts add nothing. So a graft that loses its memory of earlier tokens between two forward passes still
computes the base's function. Here the grafts' tensors are moved, in memory, and the model is compared with itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from surgeon.common.check import Check
from surgeon.common.library import first_line
from surgeon.errors import BadInput
from surgeon.models.compare import ROUNDING, decoded_steps, generated, prefilled
from surgeon.runtime.models import check_sites

NAME = "decoding"
# The number of texts, and the tokens of each in the prompt and in the continuation.
_TEXTS, _PREFIX, _STEPS = 3, 24, 6
# Mean and spread of a gate's evidence per token in nats; the threshold of summed evidence, above any single token's.
_MEAN, _SPREAD, _SUM = 2.0, 4.0, 3.5
# A gate's tensors that say how turns of a chat are found: ids with noise would find none.
_LEFT = (".turns", ".turn_threshold")


def check_decoding(model: Any, ids: Tensor) -> Check:
    """Check that prefill and transformers' `generate`, with a cache and without, agree on the first of `ids`.

    Afterwards the model is in float32, and its added tensors are noise. The check is only a note where the noise
    changes no logit, and where the base itself decodes differently with a cache. Raises BadInput where the model cannot
    be run.
    """
    model.float()
    ids = ids[:_TEXTS, : _PREFIX + _STEPS].to(model.device)
    steps = decoded_steps(ids, _STEPS)
    names = {*model.graft_parameter_names(), *check_sites(model)}
    with torch.inference_mode():
        if not _moved(model, names, ids):
            return Check(NAME, True, "not compared: what was added changes no logit, moved from birth", note=True)
        if apart := _apart(model, ids, steps):
            with model.grafts(enabled=False):
                own = _apart(model, ids, steps)
            if own:
                return Check(NAME, True, f"not compared: without what was added, {own}", note=True)
    kinds = ", ".join(graft.name for graft in model.surgery.rules)
    found = f"{apart}: {kinds} lost what came before" if apart else "prefill and `generate` agree, with a cache or not"
    return Check(NAME, not apart, f"with its {len(names)} new tensors moved from birth (in memory, float32), {found}")


def _moved(model: Any, names: set[str], ids: Tensor) -> bool:
    """Add noise as large as the layers' weights to the tensors; return whether the logits change."""
    with model.grafts(enabled=False):
        before = prefilled(model, ids)
    drawn = torch.Generator().manual_seed(0)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in names and tensor.is_floating_point() and not name.endswith(_LEFT):
            noise = torch.randn(tensor.shape, generator=drawn).to(tensor.device)
            tensor.add_(
                noise * (tensor.shape[-1] ** -0.5 if tensor.dim() > 1 else 0.2 * (tensor.square().mean().sqrt() or 1.0))
            )
    gates = [module for name, module in model.named_modules() if name.endswith("domain_gate")]
    hooks = [gate.register_forward_pre_hook(_fit) for gate in gates]
    after = prefilled(model, ids)
    for hook in hooks:
        hook.remove()
    return not _close(after, before).all()


def _fit(gate: Any, given: tuple[Any, ...]) -> None:
    """Fit a domain gate so that tokens with these hidden states both open and close it."""
    gate.threshold.fill_(_SUM if gate.spec.reads == "cusum" else 0.0)
    gate.offset.zero_()
    found = gate.odds(given[0])
    # If one token is repeated, the spread is only rounding, which must not be amplified much.
    by = _SPREAD / (found.std() + 1e-3 * found.abs().mean())
    (gate.weight if gate.out is None else gate.out).mul_(by)
    gate.offset.copy_(_MEAN - found.mean() * by)


def _apart(model: Any, ids: Tensor, steps: int) -> str:
    """Return which way of generating the last tokens differs from prefill by more than rounding; "" where none does.

    Most texts must show the difference: rounding may change the choice of experts in a single text.
    """
    prompt, said = ids.tensor_split([-steps], dim=1)
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    for how, cache in (("with a cache", True), ("without a cache", False)):
        try:
            logits, said = generated(model, inputs, steps, said, cache=cache)
        except BadInput as error:
            return f"`generate` {how} fails ({first_line(error.__cause__ or error)})"
        whole = prefilled(model, torch.cat([prompt, said], dim=1))[:, -steps - 1 : -1]
        if 2 * int(_close(logits, whole).sum()) < len(ids):
            return (
                f"`generate` {how} gives other logits than prefill, by up to {float((logits - whole).abs().max()):.3g}"
            )
    return ""


def _close(one: Tensor, other: Tensor) -> Tensor:
    """Return which texts have equal logits up to rounding: (B,), bool; both inputs are (B, T, V)."""
    return (one - other).abs().amax(dim=(1, 2)) <= ROUNDING["float32"] * other.abs().max()
