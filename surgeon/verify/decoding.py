"""Whether an output decodes over a cache as it does without one, once what was added is no longer silent.

At birth grafts say nothing, so that one which loses between two forwards what it keeps of earlier tokens computes what
the base does all the same. Here their tensors are moved, in memory, and the model is compared with itself.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import __version__

from surgeon.common.library import first_line
from surgeon.errors import BadInput
from surgeon.models.compare import ROUNDING, decoded_steps, generated, prefilled
from surgeon.models.load import running
from surgeon.runtime.models import check_sites
from surgeon.verify.check import Check

NAME = "decoding"
# Texts, tokens of each before the first that is said, and tokens said.
_TEXTS, _PREFIX, _STEPS = 3, 24, 4
# By how much tensors are moved until logits change by this share of the largest.
_SCALES = (0.5, 4.0, 32.0)
_HEARD = 0.05
# What a gate's tokens are evidence of, in nats, and its threshold where that is summed, which no token alone passes.
_MEAN, _SPREAD, _PAGE = 3.0, 4.0, 3.5


def check_decoding(model: Any, ids: Tensor) -> Check:
    """Whether prefill and transformers' own generation, with a cache and without, agree on the first of `ids`.

    The model is in float32 afterwards, and what was added to it is noise. Where what was added has no part, and the
    base decodes otherwise over a cache itself, nothing is shown, and so it is where noise changes nothing.
    """
    model.float()
    ids = ids[:_TEXTS, : _PREFIX + _STEPS].to(model.device)
    steps = decoded_steps(ids, _STEPS)
    try:
        with torch.inference_mode(), running(model):
            names = {*model.graft_parameter_names(), *check_sites(model)}
            if not _moved(model, names, ids):
                return Check(NAME, True, "not compared: what was added changes no logit, moved from birth", note=True)
            if apart := _apart(model, ids[:, :-steps], steps):
                with model.grafts(enabled=False):
                    own = _apart(model, ids[:, :-steps], steps)
                if own:
                    return Check(NAME, True, f"not compared: without what was added, {own}", note=True)
    except BadInput as error:
        return Check(NAME, False, f"with its new tensors moved from birth, {error}")
    moved = f"with its {len(names)} new tensors moved from birth (in memory, float32)"
    if apart:
        kinds = ", ".join(graft.name for graft in model.surgery.rules)
        lost = f"with transformers {__version__} what was added ({kinds}) loses what it keeps of earlier tokens"
        return Check(NAME, False, f"{moved}, {apart}; {lost}")
    return Check(NAME, True, f"{moved}, prefill and `generate` with a cache and without agree")


def _moved(model: Any, names: set[str], ids: Tensor) -> bool:
    """Move the tensors until logits show it; whether they do at all."""
    with model.grafts(enabled=False):
        before = prefilled(model, ids)
    held = model.state_dict(keep_vars=True)
    drawn = torch.Generator().manual_seed(0)
    gates = [module for name, module in model.named_modules() if name.endswith("domain_gate")]
    apart = 0.0
    for scale in _SCALES:
        for name in held:
            if name in names and held[name].is_floating_point():
                held[name].add_(_noise(held[name], scale, drawn))
        for gate in gates:
            gate.register_forward_pre_hook(partial(_fitted, fitted=[]))
        apart = float((prefilled(model, ids) - before).abs().max())
        if not apart <= _HEARD * float(before.abs().max()):
            break
    return apart != 0


def _noise(tensor: Tensor, scale: float, drawn: torch.Generator) -> Tensor:
    """Noise for a matrix as wide as this, or for single numbers as large as these."""
    std = scale * tensor.shape[-1] ** -0.5 if tensor.dim() > 1 else 0.2 * (float(tensor.square().mean().sqrt()) or 1.0)
    return (torch.randn(tensor.shape, generator=drawn) * std).to(tensor.device)


def _fitted(gate: Any, given: tuple[Any, ...], *, fitted: list[bool]) -> None:
    """Let a gate open on the first hidden states that it is given, in the midst of them, and seldom on one token."""
    if fitted:
        return
    fitted.append(True)
    gate.offset.zero_()
    found = gate.odds(given[0])
    by = _SPREAD / found.std().clamp(min=torch.finfo(found.dtype).tiny)
    (gate.weight if gate.out is None else gate.out).mul_(by)
    gate.offset.copy_(_MEAN - found.mean() * by)
    tokens = given[0].shape[1]
    gate.threshold.fill_(_PAGE if gate.spec.reads == "cusum" else _MEAN / 2 * tokens / (tokens + gate.prior))


def _apart(model: Any, ids: Tensor, steps: int) -> str:
    """Which ways to run a model on texts differ by more than rounding, in words; empty where none does.

    So it is where most texts show it: a choice among experts may fall otherwise in one that rounds otherwise.
    """
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    found: dict[str, Tensor] = {}
    said = None
    for how, cache in (("`generate` with a cache", True), ("`generate` without a cache", False)):
        try:
            found[how], said = generated(model, inputs, steps, said, cache=cache)
        except BadInput as error:
            return f"{how} fails ({first_line(error.__cause__ or error)})"
    whole = prefilled(model, torch.cat([ids, said], dim=1))[:, ids.shape[1] - 1 : -1]
    largest = float(whole.abs().max())
    for how, logits in found.items():
        apart_B = (logits - whole).abs().amax(dim=(1, 2)).nan_to_num(nan=torch.inf)
        odd = int((apart_B > ROUNDING["float32"] * largest).sum())
        if 2 * odd > len(ids):
            return f"{how} gives other logits than prefill: {float(apart_B.max()):.3g} of {largest:.3g} apart"
    return ""
