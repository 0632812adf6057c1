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

Evidence is summed as whole numbers of 2⁻¹⁶, so that sums do not depend on the order: a prefix in one forward, token
by token over a cache or in a packed row has the same.

In training mode the text does not decide: where `domain_ids` are given, new tokens open the gate and original ones
close it, and without them it is open for all, so that what it switches learns from whatever it is shown.
"""

from __future__ import annotations

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
from .newborn import Newborn, without
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


class DomainGate(Newborn):
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
        self.births = spec.births(width)
        for name, birth in self.births.items():
            self.register_buffer(name, torch.zeros(birth.shape))
        without(self, "bias", "out")
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
        wide = at_least_fp32(hidden_states)
        with _exactly(wide.device.type):
            scaled = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + _EPSILON)
            weight, offset = self.weight.to(wide.dtype), self.offset.to(wide.dtype)
            if self.out is None or self.bias is None:
                found = F.linear(scaled, weight, offset)
            else:
                units = F.relu(F.linear(scaled, weight, self.bias.to(wide.dtype)))
                found = F.linear(units, self.out.to(wide.dtype), offset)
        return (found.nan_to_num(0.0).clamp(-_MOST, _MOST) * _ONE).round().long()


class Gating(Reading):
    """The gate at work in one forward: what it reads, and what it found.

    `forced` (B T, bool; None: the gate decides) is what is known of the tokens. `evidence` (B T 1) and `on` (B T, bool)
    are there once it has read them. `shut`: it is closed for all tokens, so that what it switches need not run; only
    where `skips` allows it, and where no gradient or graph asks for all of it. `bare`: layers return hidden states and
    nothing beside.
    """

    def __init__(self, valid: Tensor, begins: Tensor | None, past: Kept | None, forced: Tensor | None = None) -> None:
        # Whether each row has one token, over a cache: then a document begins there or before.
        self.single = past is not None and valid.shape[1] == 1 and not torch.compiler.is_compiling()
        super().__init__(valid, None if self.single else begins, past)
        if self.single and begins is not None:
            self.begin = begins.long()
        self.forced = forced
        self.skips = False
        self.shut = False
        self.bare = False
        self.evidence: Tensor | None = None
        self.on: Tensor | None = None
        self.found: dict[str, Tensor] = {}

    def decide(self, gate: DomainGate, hidden_states: Tensor) -> Tensor:
        """Where the gate is open: B T, bool."""
        if self.forced is not None:
            return self.forced
        with torch.no_grad():
            valid = self.valid.to(hidden_states.device).unsqueeze(-1)
            self.evidence = gate.evidence(hidden_states) * valid
            self.on = on = self.held(*self.judged(gate, self.evidence))
            self.found["on"] = on.unsqueeze(-1)
        self.shut = self.skips and _eager(on) and not bool(on.any())
        return on

    def looks(self) -> bool:
        """Whether it may find itself closed for all, so that it decides before its layer runs."""
        return self.skips and self.forced is None and _eager(self.valid)

    def scores(self, gate: DomainGate, evidence: Tensor) -> Tensor:
        """What is compared with the threshold, of evidence, B T 1: B T; by Page's test as if nothing had opened yet."""
        if gate.spec.reads == "cusum":
            return self.clipped("up", evidence.clamp(-_CLIP, _CLIP) - _DRIFT, NO_BOUND).squeeze(-1) / _ONE
        counts = self.valid.to(evidence.device).unsqueeze(-1).long()
        if gate.spec.reads == "prefix_mean":
            evidence, counts = self.since_begin("sums", evidence), self.since_begin("counts", counts)
            self.found = {"sums": evidence, "counts": counts}
            counts = counts + gate.spec.prior
        return (evidence.to(torch.float32) / _ONE / counts.clamp(min=1)).squeeze(-1)

    def judged(self, gate: DomainGate, evidence: Tensor) -> tuple[Tensor, Tensor | None]:
        """Where evidence, B T 1, opens the gate and where it closes it (None: nowhere), whatever it was: B T, bool."""
        if gate.spec.reads == "cusum":
            return self._tested(gate, evidence)
        scores, threshold, slack = self.scores(gate, evidence), at_least_fp32(gate.threshold), gate.spec.closes
        return scores > threshold, None if slack is None else scores < threshold - slack

    def _tested(self, gate: DomainGate, evidence: Tensor) -> tuple[Tensor, Tensor | None]:
        """As `judged`, by Page's test towards new text and, where the gate may close, towards original text."""
        evidence, closes = evidence.clamp(-_CLIP, _CLIP), gate.spec.closes
        # One above it is past it.
        most = (at_least_fp32(gate.threshold) * _ONE).floor().long()
        summed = self._next if self.single else self.clipped
        up = summed("up", evidence - _DRIFT, most + 1)
        self.found = {"up": up}
        if closes is None:
            return (up > most).squeeze(-1), None
        limit = int(closes * _ONE)
        down = summed("down", -evidence, limit + 1)
        self.found["down"] = down
        return (up > most).squeeze(-1), (down > limit).squeeze(-1)

    def _next(self, name: str, steps: Tensor, most: Tensor | int) -> Tensor:
        """As `clipped`, of one token over a cache, which is most that a model does."""
        valid = self.valid.to(steps.device).unsqueeze(-1)
        before = self._ahead(name)
        return torch.where(valid, (before + steps).clamp(min=0).clamp(max=most), before)

    def _ahead(self, name: str) -> Tensor:
        """What was kept of the token before a row's one token: B 1 1; zeros where a document begins with that one."""
        before = self.before(name)
        assert before is not None
        return before if self.begin is None else before.masked_fill((self.begin > 0).to(before.device).unsqueeze(-1), 0)

    def held(self, opens: Tensor, closes: Tensor | None) -> Tensor:
        """Where it is open, by the last token of the document that opened or closed it: B T, bool."""
        valid = self.valid.to(opens.device)
        if self.single:
            on = self._ahead("on").squeeze(-1) | (opens & valid)
            return on if closes is None else on & ~(closes & valid)
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
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined]
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
            # What is recorded is computed for every token.
            flow.gating.skips = not flow.records_choices
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
