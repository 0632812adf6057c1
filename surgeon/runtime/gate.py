"""A domain gate: where a text is of the original domain, nothing that was added takes part.

Shapes: B batch, T tokens, D hidden size, U units of the classifier.

The gate reads h, what goes into its layer, all of it the base's. Every token gives evidence, one number:
w ĥ_t + o (`linear`) or a · relu(W ĥ_t + b) + o (`mlp`), where ĥ is h divided by its root mean square. The score of a
prefix of n tokens is Σ e / (n + k), which begins at zero: k tokens of no evidence stand before every text. The gate
opens where the score is above its threshold. Every document begins closed. Once open it stays open to the end of the
document, as later tokens attend to keys and values that hold what was added; with a `hysteresis` it closes again
where the score falls that far below the threshold.

Where it is closed the output of everything that it switches is replaced by what the base has there (`torch.where`),
so that what was added cannot reach it by any rounding. A token for which it is closed, as for all tokens before it
in its document, has the base's logits, bit for bit. All that was added is computed for every token all the same:
keys and values of branches and inserted layers are there when the gate opens, in one forward and in several over a
cache.

Evidence is summed as whole numbers of 2⁻¹⁶, so that sums do not depend on the order: a prefix in one forward, token
by token over a cache or in a packed row has the same. In training, where `domain_ids` are given, they decide
instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .gate_rules import GateRules, Gates, GateSpec
from .graft import Frame, Graft
from .losses import Flow, valid_tokens
from .newborn import Newborn, at_least_fp32
from .prefix import PrefixCache, keep_prefix, prefix_in
from .rules import Surgery

# What one of evidence is as a whole number, and the most that a token can give.
_ONE = 2**16
_MOST = 2.0**20
_EPSILON = 1e-6


class DomainGate(Newborn):
    """What a token is evidence of, and the threshold of prefixes or tokens; in at least fp32."""

    weight: nn.Parameter
    offset: nn.Parameter
    bias: nn.Parameter | None
    out: nn.Parameter | None
    threshold: nn.Parameter

    def __init__(self, spec: GateSpec, width: int) -> None:
        super().__init__()
        self.spec = spec
        self.bear(spec.births(width), absent=("bias", "out"))

    def evidence(self, hidden_states: Tensor) -> Tensor:
        """Each token's, B T D to B T 1, whole numbers of 2⁻¹⁶."""
        wide = at_least_fp32(hidden_states)
        with torch.autocast(wide.device.type, enabled=False):
            scaled = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + _EPSILON)
            weight, offset = self.weight.to(wide.dtype), self.offset.to(wide.dtype)
            if self.out is None or self.bias is None:
                found = F.linear(scaled, weight, offset)
            else:
                units = F.relu(F.linear(scaled, weight, self.bias.to(wide.dtype)))
                found = F.linear(units, self.out.to(wide.dtype), offset)
        return (found.nan_to_num(0.0).clamp(-_MOST, _MOST) * _ONE).round().long()

    def scores(self, sums: Tensor, counts: Tensor) -> Tensor:
        """Of sums of evidence over `counts` tokens, both B T 1: B T."""
        return (sums.to(torch.float32) / _ONE / counts).squeeze(-1)


class Gating:
    """The gate at work in one forward: which tokens are no padding, where documents begin, what came before.

    `forced` (B T, bool; None: the gate decides) is what is known of the tokens. `scores` (B T) are there once it has
    decided.
    """

    def __init__(
        self, valid: Tensor, begins: Tensor | None, past: PrefixCache | None, forced: Tensor | None = None
    ) -> None:
        self.valid = valid
        self.past = past
        self.forced = forced
        self.scores: Tensor | None = None
        self.found: dict[str, Tensor] = {}
        places = torch.arange(valid.shape[1], device=valid.device).expand(valid.shape)
        # The place at which each token's document begins; -1: before this forward.
        self.begin = None if begins is None else torch.where(begins, places, -1).cummax(dim=1).values
        self.places = places + 1

    def decide(self, gate: DomainGate, hidden_states: Tensor) -> Tensor:
        """Where the gate is open: B T, bool."""
        if self.forced is not None:
            return self.forced
        with torch.no_grad():
            valid = self.valid.to(hidden_states.device).unsqueeze(-1)
            sums, counts = gate.evidence(hidden_states) * valid, valid.long()
            if gate.spec.reads == "prefix_mean":
                sums, counts = self._since_begin("sums", sums), self._since_begin("counts", counts)
                self.found = {"sums": sums, "counts": counts}
                self.scores = gate.scores(sums, (counts + gate.spec.prior).clamp(min=1))
            else:
                self.scores = gate.scores(sums, counts.clamp(min=1))
            on = self.held(gate, self.scores)
            self.found["on"] = on.unsqueeze(-1)
        return on

    def _before(self, name: str) -> Tensor | None:
        return None if self.past is None else self.past.last(name)

    def _since_begin(self, name: str, values: Tensor) -> Tensor:
        """Sums over each token's document up to it: B T 1."""
        total, before = values.cumsum(dim=1), self._before(name)
        carried = total if before is None else total + before
        if self.begin is None:
            return carried
        begin = self.begin.to(values.device).unsqueeze(-1)
        outside = (total - values).gather(1, begin.clamp(min=0).expand_as(values))
        return torch.where(begin >= 0, total - outside, carried)

    def held(self, gate: DomainGate, scores: Tensor) -> Tensor:
        """Where it is open, by the last token of the document that opened or closed it: B T, bool."""
        threshold, slack = at_least_fp32(gate.threshold), gate.spec.hysteresis
        valid, places = self.valid.to(scores.device), self.places.to(scores.device)
        opened = torch.where((scores > threshold) & valid, places, 0).cummax(dim=1).values
        closed = torch.zeros_like(opened)
        if slack is not None:
            closed = torch.where((scores < threshold - slack) & valid, places, 0).cummax(dim=1).values
        if self.begin is not None:
            # A document that begins here begins closed: what opened before it does not count.
            closed = torch.maximum(closed, self.begin.to(scores.device))
        on = (opened > closed) & (opened > 0)
        before = self._before("on")
        if before is None:
            return on
        untouched = (opened == 0) & (closed == 0)
        if self.begin is not None:
            untouched = untouched & (self.begin.to(scores.device) < 0)
        return torch.where(untouched, before.squeeze(-1), on)


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

    def before(self, layer: Any, hidden_states: Tensor, frame: Frame) -> None:
        """The gate reads what goes into its layer."""
        if layer.decides:
            if frame.gating is None:
                raise RuntimeError("a layer with a domain gate was called outside its model")
            frame.on = frame.gating.decide(layer.domain_gate, hidden_states)

    def open(self, model: Any, flow: Flow, inputs: Tensor, attention_mask: Any, cache: Any) -> None:
        """Bring what earlier tokens gave, and in training what is known of these."""
        if flow.packed and not model.training:
            raise ValueError(
                "several sequences stand in one row, as in continuous batching, but a domain gate decides by the "
                "tokens before each in its sequence; give each sequence a row of its own"
            )
        past = prefix_in(cache, self.name)
        if past is None:
            _check_begins(flow.positions)
        seen = 0 if cache is None else cache.get_seq_length()
        valid = valid_tokens(attention_mask, torch.Size(inputs.shape[:2]), inputs.device, seen)
        forced = flow.domains > 0 if model.training and flow.domains is not None else None
        flow.gating = Gating(valid, _begins(flow.positions, valid), past, forced)

    def close(self, model: Any, flow: Flow, cache: Any) -> None:
        """Keep what these tokens gave for later ones."""
        keep_prefix(cache, flow.gating.past, self.name, flow.gating.found)

    def counted(self, surgery: Surgery) -> Mapping[str, tuple[type[nn.Module], int]]:
        """The gate."""
        return {"domain gates": (DomainGate, 1)}


def _check_begins(positions: Tensor | None) -> None:
    """ValueError where tokens came before these, by their positions, of which no cache says what they gave."""
    if positions is None or positions.dim() != 2 or torch.compiler.is_compiling():
        return
    if first := int(positions[:, 0].max()):
        raise ValueError(
            f"position_ids begin at {first}, and no cache holds the tokens before: a domain gate must see a document"
            " from its first token on; pass a cache that this model's own forward filled (other caches cannot serve it)"
        )


def _begins(positions: Tensor | None, valid: Tensor) -> Tensor | None:
    """Where a document begins: B T, bool; None where no positions are given.

    Of positions in several dimensions the first, time, goes back there.
    """
    if positions is None:
        return None
    if positions.dim() == 2:
        return (positions == 0).to(valid.device).expand(valid.shape)
    time = positions[0]
    back = F.pad(time[:, 1:] < time[:, :-1], (1, 0))
    return back.to(valid.device).expand(valid.shape)
