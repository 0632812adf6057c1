"""A domain gate: where a text is of the original domain, nothing that was added takes part.

Shapes: B batch, T tokens, D hidden size, U units of the classifier.

The gate reads h, what goes into its layer, all of it the base's. Every token gives evidence, one number:
w ĥ_t + o (`linear`) or a · relu(W ĥ_t + b) + o (`mlp`), where ĥ is h divided by its root mean square. Every document
begins closed.

`cusum` is Page's test (Biometrika 1954) in both directions. With e_t within ±4,
    u ← min(max(u + e_t − 1, 0), threshold)    opens where it passes the threshold,
    d ← min(max(d − e_t, 0), closes)           closes where it passes `closes`,
so that what a long text before has gathered does not delay the other decision. `prefix_mean`: the score of a
prefix of n tokens is Σ e / (n + k), which begins at zero: k tokens of no evidence stand before every text. `token`:
the score is e_t. Both open where the score is above the threshold and close where it falls that far below it. Without
`closes` the gate stays open to the end of the document, as later tokens attend to keys and values that hold what was
added.

Where it is closed the output of everything that it switches is replaced by what the base has there (`torch.where`),
so that what was added cannot reach it by any rounding. A token for which it is closed, as for all tokens before it
in its document, has the base's logits, bit for bit. Where it is closed for a whole forward, what it switches does not
run (`closing`).

Evidence is summed, and compared with thresholds, as whole numbers of 2⁻¹⁶, so that sums do not depend on the order: a
prefix in one forward, token by token over a cache or in a packed row has the same.

In training mode the text does not decide: where `domain_ids` are given, new tokens open the gate and original ones
close it, and without them it is open for all, so that what it switches learns from whatever it is shown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .closing import GatedLayer, spare_routers
from .gate_rules import GateRules, Gates, GateSpec
from .graft import Flow, Graft
from .losses import logger
from .newborn import Leaf
from .precision import at_least_fp32
from .prefix import NO_BOUND, Kept, Reading, keep, kept_in, latest, read_rows
from .rules import Surgery

# What one of evidence is as a whole number, and the most that a token can give.
_ONE = 2**16
_MOST = 2.0**20
# Of Page's test: the most that a token counts for, and what is taken from each towards new text, so that a kind of
# text that nobody showed, of which tokens are evidence of nothing, does not open the gate.
_CLIP = 4 * _ONE
_DRIFT = _ONE
_EPSILON = 1e-6


class DomainGate(Leaf):
    """What a token is evidence of, and the threshold of prefixes or tokens; in at least fp32.

    Its tensors are fitted and get no gradient: they are buffers.
    """

    weight: Tensor
    offset: Tensor
    bias: Tensor | None
    out: Tensor | None
    threshold: Tensor

    def __init__(self, spec: GateSpec, width: int) -> None:
        super().__init__()
        self.spec = spec
        # Nothing that unfreezes a model or waits for gradients asks for buffers.
        shapes = spec.shapes(width)
        for name in ("weight", "bias", "out", "offset", "threshold"):
            self.register_buffer(name, torch.zeros(shapes[name]) if name in shapes else None)
        # Of a prefix the tokens of no evidence; what closes, as a whole number.
        self.prior = spec.prior if spec.reads == "prefix_mean" else 0
        self.closes = int((spec.closes or 0.0) * _ONE)
        self.looked = False

    def tell_if_born(self) -> None:
        """Say once that nobody has fitted it."""
        if self.looked or torch.compiler.is_compiling():
            return
        self.looked = True
        if not bool(self.weight.any()):
            logger.warning_once(
                "The domain gate is not fitted. In training without `domain_ids` it is open for every token; outside "
                "of training it is closed for all, so that the model computes what its base does and nothing that is "
                "learned here shows, in an evaluation neither. Fit it first, by `surgeon train`."
            )

    def forward(self, hidden_states: Tensor, gating: Gating) -> Tensor:
        """Where it is open for hidden_states, B T D: B T, bool; all its tensors are read in here, where they are."""
        return gating.decide(self, hidden_states) if gating.on is None else gating.on

    def evidence(self, hidden_states: Tensor) -> Tensor:
        """Each token's, B T D to B T 1, whole numbers of 2⁻¹⁶."""
        found = self.odds(hidden_states).view(*hidden_states.shape[:-1], 1)
        return (found.nan_to_num(0.0).clamp(-_MOST, _MOST) * _ONE).round().long()

    def odds(self, hidden_states: Tensor) -> Tensor:
        """The same in nats, as the classifier has it: one row a token, 1 wide."""
        wide = at_least_fp32(hidden_states).flatten(0, -2)
        with _exactly(wide.device.type):
            scaled = F.rms_norm(wide, wide.shape[-1:], eps=_EPSILON)
            weight, offset = self.weight.to(wide.dtype), self.offset.to(wide.dtype)
            if self.out is None or self.bias is None:
                return F.linear(scaled, weight, offset)
            units = F.relu(F.linear(scaled, weight, self.bias.to(wide.dtype)))
            return F.linear(units, self.out.to(wide.dtype), offset)


class Gating(Reading):
    """The gate at work in one forward: what it reads, and what it found.

    `forced` (B T, bool; None: the gate decides) is what is known of the tokens. `evidence` (B T 1) and `on` (B T, bool)
    are there once it has read them. `shut`: it is closed for all tokens, so that what it switches need not run; only
    where `spares` allows it, and where no gradient or graph asks for all of it. `bare`: layers return hidden states and
    nothing beside.
    """

    def __init__(self, valid: Tensor, begins: Tensor | None, past: Kept | None, forced: Tensor | None = None) -> None:
        super().__init__(valid, begins, past)
        # Whether numbers may decide, and may of each row's one token: its document begins there or before.
        self.eager = _eager(valid)
        self.single = self.eager and past is not None and valid.shape[1] == 1
        if past is not None and not self.single:
            self.past = {"sums": past["state"][..., :2], "on": past["state"][..., 2:] > 0}
        self.forced = forced
        self.spares = False
        self.shut = False
        self.bare = False
        # What the last layer that did not run was given, and what is to be kept of it.
        self.given: Any = None
        self.evidence: Tensor | None = None
        self.on: Tensor | None = None
        self.found: dict[str, Tensor] = {}

    def decide(self, gate: DomainGate, hidden_states: Tensor) -> Tensor:
        """Where the gate is open: B T, bool."""
        if self.forced is not None:
            return self.forced
        with torch.no_grad():
            if self.single:
                rows = self._next(gate, hidden_states)
                state = torch.tensor([[row] for row in rows], device=hidden_states.device)
                self.on = on = torch.tensor([[row[2] > 0] for row in rows], device=hidden_states.device)
                self.shut = self.spares and not any(row[2] for row in rows)
            else:
                self.evidence = gate.evidence(hidden_states) * self.valid.to(hidden_states.device).unsqueeze(-1)
                self.on = on = self.held(*self.judged(gate, self.evidence))
                self.shut = self.spares and not bool(on.any())
                state = torch.cat([self.found["sums"], on.unsqueeze(-1)], dim=-1)
        # In one tensor, as it is sooner made.
        self.found = {"state": state}
        return on

    def sums(self, gate: DomainGate, evidence: Tensor, most: Tensor | int = NO_BOUND) -> Tensor:
        """What is summed of evidence, B T 1: B T 2.

        Page's sums towards new and towards original text, or a prefix's evidence and how many tokens it is of.
        """
        if gate.spec.reads == "cusum":
            evidence = evidence.clamp(-_CLIP, _CLIP)
            return self.clipped("sums", torch.cat([evidence - _DRIFT, -evidence], dim=-1), most)
        found = torch.cat([evidence, self.valid.to(evidence.device).unsqueeze(-1).long()], dim=-1)
        return self.since_begin("sums", found) if gate.spec.reads == "prefix_mean" else found

    def judged(self, gate: DomainGate, evidence: Tensor) -> tuple[Tensor, Tensor | None]:
        """Where evidence, B T 1, opens the gate and where it closes it (None: nowhere), whatever it was: B T, bool."""
        opens = (at_least_fp32(gate.threshold).clamp(-_MOST, _MOST) * _ONE).floor().long()
        closes = opens.new_full((1,), gate.closes)
        if gate.spec.reads == "cusum":
            limits = torch.cat([opens, closes])
            # One above it is past it.
            sums = reached = self.sums(gate, evidence, limits + 1)
        else:
            sums = self.sums(gate, evidence)
            reached = torch.cat([sums[..., :1], -sums[..., :1]], dim=-1)
            limits = torch.cat([opens, closes - opens]) * (sums[..., 1:] + gate.prior)
        self.found = {"sums": sums}
        passed = reached > limits
        return passed[..., 0], None if gate.spec.closes is None else passed[..., 1]

    def _next(self, gate: DomainGate, hidden_states: Tensor) -> list[list[int]]:
        """Both sums and whether it is open, by row, of one token over a cache, as `judged` and `held` have them.

        That is most that a model does, and one operation on tensors of one number takes longer than all of these.
        """
        assert self.past is not None
        rows: list[list[int]] = self.past["state"][:, -1].tolist()
        opens = math.floor(min(max(-_MOST, gate.threshold.item()), _MOST) * _ONE)
        reads, closes, closing = gate.spec.reads, gate.closes, gate.spec.closes is not None
        begins = [[0]] * len(rows) if self.begin is None else self.begin.tolist()
        given = zip(gate.odds(hidden_states).tolist(), self.valid.tolist(), begins, strict=True)
        for row, ((nats,), (real,), (begin,)) in enumerate(given):
            if begin:
                rows[row] = [0, 0, 0]
            if not real:
                continue
            one, other, on = rows[row]
            evidence = round(min(max(-_MOST, nats), _MOST) * _ONE) if nats == nats else 0
            if reads == "cusum":
                evidence = min(max(-_CLIP, evidence), _CLIP)
                one = min(max(one + evidence - _DRIFT, 0), opens + 1)
                other = min(max(other - evidence, 0), closes + 1)
                new, old = one > opens, other > closes
            else:
                one, other = (one + evidence, other + 1) if reads == "prefix_mean" else (evidence, 1)
                tokens = other + gate.prior
                new, old = one > opens * tokens, -one > (closes - opens) * tokens
            rows[row] = [one, other, int((on or new) and not (closing and old))]
        return rows

    def held(self, opens: Tensor, closes: Tensor | None) -> Tensor:
        """Where it is open, by the last token of the document that opened or closed it: B T, bool."""
        valid = self.valid.to(opens.device)
        begin = None if self.begin is None else self.begin.to(opens.device)
        opened = latest(opens & valid)
        closed = torch.zeros_like(opened) if closes is None else latest(closes & valid)
        if begin is not None:
            # A document that begins here begins closed: what opened before it does not count.
            closed = torch.maximum(closed, begin - 1)
        on = (opened > closed) & (opened > 0)
        before = self.before("on")
        if before is None:
            return on
        untouched = (opened == 0) & (closed <= 0)
        if begin is not None:
            untouched = untouched & (begin == 0)
        return torch.where(untouched, before.squeeze(-1), on)


def _exactly(device: str) -> Any:
    """Without autocast, where there is some: to switch off what is off takes as long as what the gate computes."""
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def _eager(tensor: Tensor) -> bool:
    """Whether a number of the tensor may decide what is computed: nothing records the computation."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined]
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


class GateGraft(Graft, GateRules):
    """The gate, and marks at what it switches."""

    def attach(self, layer: Any, config: Any, index: int, surgery: Surgery) -> bool:
        """The gate in one layer; in every layer the names of what it switches there."""
        found: Gates = surgery.of[self.name]
        if index == found.gate.layer:
            layer.domain_gate, layer.decides = DomainGate(found.gate, config.hidden_size), True
        spec = found.gated.get(index)
        if spec is not None:
            layer.gated, layer.layer_gated = frozenset(spec.grafts), spec.inserted
        return spec is not None or index == found.gate.layer

    def complete(self, model: Any, surgery: Surgery) -> None:
        """What need not run while the gate is closed; but an engine may hide what the gate reads."""
        self.refuse_engine(model.config)
        spare_routers([layer for layer in model.modules() if isinstance(layer, GatedLayer)])

    def before(self, layer: Any, hidden_states: Tensor, frame: Flow) -> None:
        """The gate reads what goes into its layer."""
        if not layer.decides:
            return
        if frame.gating is None:
            raise RuntimeError("a layer with a domain gate was called outside its model")
        if frame.gating.forced is not None and frame.domains is None:
            layer.domain_gate.tell_if_born()
        frame.on = layer.domain_gate(hidden_states, frame.gating)

    def open(self, model: Any, flow: Flow, inputs: Tensor, attention_mask: Any, cache: Any) -> None:
        """Bring what earlier tokens gave; in training what is known of these, all new where nothing is."""
        self.refuse_engine(model.config)
        if not model.training:
            flow.gating = Gating(*read_rows(flow, inputs, attention_mask, cache, owner=self.name, what=self.what))
            # What is recorded is computed for every token, and so is what a gradient may be asked of.
            flow.gating.spares = flow.gating.eager and not (flow.records_choices or torch.is_grad_enabled())
            return
        if kept_in(cache, self.name, asked=False) is not None:
            raise ValueError(
                "the cache was filled outside of training, where a domain gate decides by the text; begin with an"
                " empty one"
            )
        every = torch.ones(inputs.shape[:2], dtype=torch.bool, device=inputs.device)
        forced = every if flow.domains is None else (flow.domains > 0).to(inputs.device)
        flow.gating = Gating(every, None, None, forced)

    def close(self, model: Any, flow: Flow, cache: Any) -> None:
        """Keep what these tokens gave for later ones."""
        keep(cache, self.name, flow.gating.found)

    def counted(self, surgery: Surgery) -> Mapping[str, tuple[type[nn.Module], int]]:
        """The gate."""
        return {"domain gates": (DomainGate, 1)}
