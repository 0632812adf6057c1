"""A domain gate: on text of the original domain, the modules that it switches take no part.

Shapes: B batch, T tokens, D hidden size, U units of the classifier.

The gate reads h, the input of its layer, which only modules of the base have computed. Each token gives one number
e_t, its evidence for new text: w ĥ_t + o (`linear`) or a · relu(W ĥ_t + b) + o (`mlp`), where ĥ is h divided by its
root mean square. The gate is closed at the beginning of every document.

`cusum` is Page's test (Biometrika 1954) in both directions. With e_t clamped to ±4,
    u ← min(max(u + e_t − 1, 0), threshold)    opens the gate where it passes the threshold,
    d ← min(max(d − e_t, 0), closes)           closes the gate where it passes `closes`.
The upper bounds keep the sum over a long text from delaying the opposite decision.
`prefix_mean`: the score of a prefix of n tokens is Σ e / (n + k). It begins at zero, as if k tokens without evidence
preceded the text. `token`: the score is e_t. Both open the gate where the score is above the threshold, and close it
where the score is more than `closes` below the threshold.
Without `closes` the gate stays open to the end of the document, because later tokens attend to keys and values that
contain what was added.

`turns`: in a chat, the turns of the user decide, each for the answer after it; the text before the first one is read
as a document. The gate is closed within the turn. It is open for the answer if Σ e over the turn is above
`turn_threshold`, and d, which begins at zero with the turn, has not passed `closes` within it: the turn has new text,
and no stretch of original text. The evidence of answers counts for nothing. Turns are found by token ids (`marks`),
so with `inputs_embeds` alone a chat is read as a document.

Where the gate is closed, `torch.where` replaces the output of each switched module by the base's value, so that no
rounding lets an addition through. A token has the base's logits, bit for bit, if the gate is closed for this token
and for all tokens before it in its document. If the gate is closed for a whole forward, the switched modules do not
run (`closing`).

Evidence is summed and compared with thresholds in integer units of 2⁻¹⁶, so that sums do not depend on the order of
additions: a prefix gets the same sums in one forward, token by token over a KV cache, and in a packed row.

In training mode the text does not decide. `domain_ids`, where given, open the gate for new tokens and close it for
original ones. Without them the gate is open for all tokens, so that the switched modules learn from all text.
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
from .prefix import NO_BOUND, Kept, Reading, keep, kept_in, latest, previous, read_rows
from .rules import Surgery

# One nat of evidence in integer units; the bound on a token's evidence, in nats.
_ONE = 2**16
_MOST = 2.0**20
# Page's test: the bound on a token's evidence, and the drift that is subtracted from the evidence for new text. The
# drift keeps the gate closed on kinds of text on which it was not fitted, whose tokens give about zero evidence.
_CLIP = 4 * _ONE
_DRIFT = _ONE
_EPSILON = 1e-6
# Where a token is: in a document, in a turn of the user, or behind such a turn.
_DOCUMENT, _ASKED, _AFTER = range(3)
# The id of no token, where there is no earlier token or ids are not given.
_NO_ID = -2


class DomainGate(Leaf):
    """The classifier that gives each token's evidence, and the gate's threshold; computed in at least fp32.

    Its tensors are fitted before training and get no gradient: they are buffers.
    """

    weight: Tensor
    offset: Tensor
    bias: Tensor | None
    out: Tensor | None
    threshold: Tensor
    turn_threshold: Tensor
    turns: Tensor

    def __init__(self, spec: GateSpec, width: int) -> None:
        super().__init__()
        self.spec = spec
        # Code that unfreezes parameters or waits for their gradients ignores buffers.
        shapes = spec.shapes(width)
        for name in ("weight", "bias", "out", "offset", "threshold", "turn_threshold", "turns"):
            self.register_buffer(name, torch.zeros(shapes[name]) if name in shapes else None)
        # k, the tokens without evidence before a prefix; `closes` in integer units.
        self.prior = spec.prior if spec.reads == "prefix_mean" else 0
        self.closes = int((spec.closes or 0.0) * _ONE)
        self.looked = False

    def tell_if_born(self) -> None:
        """Warn once if the gate has not been fitted."""
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
        """Return where the gate is open for `hidden_states`, B T D: B T, bool.

        The decision reads the gate's tensors only inside this call, so that hooks may load them for it.
        """
        return gating.decide(self, hidden_states) if gating.on is None else gating.on

    def evidence(self, hidden_states: Tensor) -> Tensor:
        """Return each token's evidence in integer units of 2⁻¹⁶: B T D to B T 1."""
        found = self.odds(hidden_states).view(*hidden_states.shape[:-1], 1)
        return (found.nan_to_num(0.0).clamp(-_MOST, _MOST) * _ONE).round().long()

    def marks(self) -> Tensor:
        """Return the pairs of ids by which turns are found: 3 2, int64.

        The rows: the user's turn begins after it, the user's turn ends with it, the answer begins at it. A pair is (id
        of the token before, or −1 for any; id of the token, or −1 for none). `turns` holds each id plus 1 as three
        digits to base 256, since a checkpoint's dtype may have only eight significant bits.
        """
        ids: Tensor = _id_of(*self.turns.long().unbind(-1))
        return ids

    def odds(self, hidden_states: Tensor) -> Tensor:
        """Return each token's evidence in nats, the classifier's output: B T D to B·T 1."""
        wide = at_least_fp32(hidden_states).flatten(0, -2)
        with _exactly(wide.device.type):
            scaled = F.rms_norm(wide, wide.shape[-1:], eps=_EPSILON)
            weight, offset = self.weight.to(wide.dtype), self.offset.to(wide.dtype)
            if self.out is None or self.bias is None:
                return F.linear(scaled, weight, offset)
            units = F.relu(F.linear(scaled, weight, self.bias.to(wide.dtype)))
            return F.linear(units, self.out.to(wide.dtype), offset)


class Gating(Reading):
    """The gate's state in one forward: what it reads and what it has decided.

    `ids` (B T): the tokens; None: only their embeddings are known.
    `forced` (B T, bool; None: the gate decides) is the decision known from `domain_ids`. The gate sets `on` (B T, bool)
    when it decides, and `evidence` (B T 1) unless each row is one token over a cache. `shut`: the gate is closed for
    all tokens, so that the switched modules need not run. It is true only where `spares` is: where no gradient or graph
    needs the whole computation. `bare`: layers return hidden states and nothing else.
    """

    def __init__(
        self,
        valid: Tensor,
        begins: Tensor | None,
        past: Kept | None,
        forced: Tensor | None = None,
        ids: Tensor | None = None,
    ) -> None:
        super().__init__(valid, begins, past)
        self.ids = torch.full_like(valid, _NO_ID, dtype=torch.long) if ids is None else ids
        # `eager`: Python may branch on the values of tensors. `single`: it may, and each row is one token over a cache.
        self.eager = _eager(valid)
        self.single = self.eager and past is not None and valid.shape[1] == 1
        if past is not None and not self.single:
            self.past = {"sums": past["state"][..., :2], "on": past["state"][..., 2:3] > 0, "turns": past["state"]}
        self.forced = forced
        self.spares = False
        self.shut = False
        self.bare = False
        # The arguments of the last skipped layer, and what `_kept_of` in `closing` returned for them.
        self.given: Any = None
        self.evidence: Tensor | None = None
        self.on: Tensor | None = None
        self.found: dict[str, Tensor] = {}

    def decide(self, gate: DomainGate, hidden_states: Tensor) -> Tensor:
        """Return where the gate is open: B T, bool; keep sums and decision in `found` for later tokens."""
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
                state = self.states(gate, self.evidence)
                self.on = on = state[..., 2] > 0
                self.shut = self.spares and not bool(on.any())
        # One tensor is faster to make than two.
        self.found = {"state": state}
        return on

    def states(self, gate: DomainGate, evidence: Tensor) -> Tensor:
        """Return the state after each token, of integer evidence B T 1: two sums, whether it is open, B T 3, int64.

        Where turns are read, two numbers more: `by_turns`.
        """
        on = self.held(*self.judged(gate, evidence))
        state = torch.cat([self.found["sums"], on.unsqueeze(-1)], dim=-1)
        return self.by_turns(gate, evidence, state) if gate.spec.turns else state

    def sums(self, gate: DomainGate, evidence: Tensor, most: Tensor | int = NO_BOUND) -> Tensor:
        """Return two sums up to each token, B T 2, of integer evidence B T 1.

        `cusum`: Page's sums towards new and towards original text, both at most `most`. `prefix_mean`: the evidence of
        the prefix and its number of tokens. `token`: the evidence of the token and 1 (0 for padding).
        """
        if gate.spec.reads == "cusum":
            evidence = evidence.clamp(-_CLIP, _CLIP)
            return self.clipped("sums", torch.cat([evidence - _DRIFT, -evidence], dim=-1), most)
        found = torch.cat([evidence, self.valid.to(evidence.device).unsqueeze(-1).long()], dim=-1)
        return self.since_begin("sums", found) if gate.spec.reads == "prefix_mean" else found

    def judged(self, gate: DomainGate, evidence: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return which tokens open the gate and which close it (None: none can), from evidence B T 1: B T, bool each.

        Whether the gate was open before has no influence here; `held` accounts for it.
        """
        opens = _units(gate.threshold)
        closes = opens.new_full((1,), gate.closes)
        if gate.spec.reads == "cusum":
            limits = torch.cat([opens, closes])
            # One integer unit above a limit is past it.
            sums = reached = self.sums(gate, evidence, limits + 1)
        else:
            sums = self.sums(gate, evidence)
            reached = torch.cat([sums[..., :1], -sums[..., :1]], dim=-1)
            limits = torch.cat([opens, closes - opens]) * (sums[..., 1:] + gate.prior)
        self.found = {"sums": sums}
        passed = reached > limits
        return passed[..., 0], None if gate.spec.closes is None else passed[..., 1]

    def by_turns(self, gate: DomainGate, evidence: Tensor, state: Tensor) -> Tensor:
        """Return the state after each token where turns of a user decide: B T 5, int64.

        A token's state is two sums, whether the gate is open, where the token is, and its id. In a document the first
        three are those of `state` (B T 3). In a chat the sums are Σ e and d of the last turn of the user; where d has
        passed `closes`, it stays there to the end of the turn.
        """
        device = evidence.device
        valid, ids = self.valid.to(device), self.ids.to(device)
        nowhere = evidence.new_tensor([0, 0, 0, _DOCUMENT, _NO_ID]).expand(len(ids), 1, 5)
        kept = self.before("turns")
        past = nowhere if kept is None else kept.to(device)
        begin = torch.zeros_like(ids) if self.begin is None else self.begin.to(device)
        # The token before in the same document, which a pair of ids may name.
        place = previous(valid)
        before = torch.where(place > 0, ids.gather(1, (place - 1).clamp(min=0)), past[..., 4])
        before = torch.where(place < begin, _NO_ID, before)
        marks = gate.marks()
        here = (ids.unsqueeze(-1) == marks[:, 1]) & ((marks[:, 0] < 0) | (before.unsqueeze(-1) == marks[:, 0]))
        asks, ends, answers = (here & valid.unsqueeze(-1)).unbind(-1)
        document = torch.cat(
            [F.pad(state, (0, 1), value=_DOCUMENT), torch.where(valid, ids, before).unsqueeze(-1)], dim=-1
        )
        if self.eager and not bool(asks.any() | (past[..., 3] != _DOCUMENT).any()):
            return document
        # Places are counted from 1. A turn that began in an earlier document counts no more.
        asked, ended, answered = latest(asks), latest(ends | answers), latest(answers)
        new = (asked > 0) & (asked >= begin)
        old = ~new & (begin == 0) & (past[..., 3] != _DOCUMENT)
        within = (new & (ended < asked)) | (old & (ended == 0) & (past[..., 3] == _ASKED))

        turn = Reading(within, asks, {"up": past[..., :1], "down": past[..., 1:2]})
        counted = evidence.clamp(-_CLIP, _CLIP) * (within & ~asks).unsqueeze(-1)
        up = turn.since_begin("up", counted).squeeze(-1)
        down = turn.clipped("down", -counted, gate.closes + 1).squeeze(-1)
        passed = latest(within & (down > gate.closes))
        spoilt = torch.where(new, passed >= asked, (passed > 0) | (past[..., 1] > gate.closes))
        down = torch.where(spoilt, gate.closes + 1, down)
        opens = latest(answers & ~spoilt & (up > _units(gate.turn_threshold)))
        on = torch.where(answered > asked, opens == answered, ~new & (past[..., 2] > 0)) & ~within

        where = torch.where(within, _ASKED, _AFTER)
        chat = torch.stack([up, down, on.long(), where, document[..., 4]], dim=-1)
        return torch.where((new | old).unsqueeze(-1), chat, document)

    def _next(self, gate: DomainGate, hidden_states: Tensor) -> list[list[int]]:
        """Advance the gate by one cached token; return each row's state, as `decide` keeps it.

        The result equals that of `states`. Generation calls this for every token, and a single tensor operation takes
        longer than all of this Python code.
        """
        assert self.past is not None
        rows: list[list[int]] = self.past["state"][:, -1].tolist()
        opens = math.floor(min(max(-_MOST, gate.threshold.item()), _MOST) * _ONE)
        if gate.spec.turns:
            asked = math.floor(min(max(-_MOST, gate.turn_threshold.item()), _MOST) * _ONE)
            marks = [[_id_of(*digits) for digits in pair] for pair in gate.turns.tolist()]
        reads, closes, closing = gate.spec.reads, gate.closes, gate.spec.closes is not None
        begins = [[0]] * len(rows) if self.begin is None else self.begin.tolist()
        given = zip(gate.odds(hidden_states).tolist(), self.valid.tolist(), begins, self.ids.tolist(), strict=True)
        for row, ((nats,), (real,), (begin,), (token,)) in enumerate(given):
            if begin:
                rows[row] = [0, 0, 0, _DOCUMENT, _NO_ID][: len(rows[row])]
            if not real:
                continue
            evidence = round(min(max(-_MOST, nats), _MOST) * _ONE) if nats == nats else 0
            one, other, on, *turns = rows[row]
            if turns:
                where, before = turns
                asks, ends, answers = (token == mark and first in (-1, before) for first, mark in marks)
                if asks:
                    one, other, on, where = 0, 0, 0, _ASKED
                elif where != _DOCUMENT and (ends or answers):
                    where = _AFTER
                    on = int(one > asked and other <= closes) if answers else on
                elif where == _ASKED:
                    evidence = min(max(-_CLIP, evidence), _CLIP)
                    one += evidence
                    # Past `closes` it stays there.
                    other = min(max(other - evidence, 0), closes + 1) if other <= closes else other
                turns = [where, token]
                if where != _DOCUMENT:
                    rows[row] = [one, other, on, *turns]
                    continue
            if reads == "cusum":
                evidence = min(max(-_CLIP, evidence), _CLIP)
                one = min(max(one + evidence - _DRIFT, 0), opens + 1)
                other = min(max(other - evidence, 0), closes + 1)
                new, old = one > opens, other > closes
            else:
                one, other = (one + evidence, other + 1) if reads == "prefix_mean" else (evidence, 1)
                tokens = other + gate.prior
                new, old = one > opens * tokens, -one > (closes - opens) * tokens
            rows[row] = [one, other, int((on or new) and not (closing and old)), *turns]
        return rows

    def held(self, opens: Tensor, closes: Tensor | None) -> Tensor:
        """Return where the gate is open: B T, bool. The last token so far that opened or closed it decides.

        Only tokens of the same document count. A token that both opens and closes the gate closes it.
        """
        valid = self.valid.to(opens.device)
        begin = None if self.begin is None else self.begin.to(opens.device)
        opened = latest(opens & valid)
        closed = torch.zeros_like(opened) if closes is None else latest(closes & valid)
        if begin is not None:
            # A document that begins in this forward begins closed: tokens that opened the gate before do not count.
            closed = torch.maximum(closed, begin - 1)
        on = (opened > closed) & (opened > 0)
        before = self.before("on")
        if before is None:
            return on
        untouched = (opened == 0) & (closed <= 0)
        if begin is not None:
            untouched = untouched & (begin == 0)
        return torch.where(untouched, before.squeeze(-1), on)


def _id_of(high: Any, middle: Any, low: Any) -> Any:
    """Return the id of which `turns` holds these digits: numbers or tensors."""
    return (high * 256 + middle) * 256 + low - 1


def _units(threshold: Tensor) -> Tensor:
    """Return a threshold, of one element, in integer units of 2⁻¹⁶."""
    return (at_least_fp32(threshold).clamp(-_MOST, _MOST) * _ONE).floor().long()


def _exactly(device: str) -> Any:
    """Return a context without autocast, or an empty one where autocast is off already.

    Switching autocast off takes as long as the gate's own computation.
    """
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def _eager(tensor: Tensor) -> bool:
    """Return whether Python may branch on the tensor's values: no compiler, tracer or CUDA graph is recording."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined]
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


class GateGraft(Graft, GateRules):
    """The graft that adds the gate and marks the modules that it switches."""

    def attach(self, layer: Any, config: Any, index: int, surgery: Surgery) -> bool:
        """Add the gate to its layer, and to every layer the names of the grafts that the gate switches there."""
        found: Gates = surgery.of[self.name]
        if index == found.gate.layer:
            layer.domain_gate, layer.decides = DomainGate(found.gate, config.hidden_size), True
        spec = found.gated.get(index)
        if spec is not None:
            layer.gated, layer.layer_gated = frozenset(spec.grafts), spec.inserted
        return spec is not None or index == found.gate.layer

    def complete(self, model: Any, surgery: Surgery) -> None:
        """Refuse an engine's attention (ValueError); let routers run with a closed gate where slots need them."""
        self.refuse_engine(model.config)
        spare_routers([layer for layer in model.modules() if isinstance(layer, GatedLayer)])

    def before(self, layer: Any, hidden_states: Tensor, frame: Flow) -> None:
        """Decide from the input of the gate's layer where the gate is open; store it in `frame.on`."""
        if not layer.decides:
            return
        if frame.gating is None:
            raise RuntimeError("a layer with a domain gate was called outside its model")
        if frame.gating.forced is not None and frame.domains is None:
            layer.domain_gate.tell_if_born()
        frame.on = layer.domain_gate(hidden_states, frame.gating)

    def open(self, model: Any, flow: Flow, inputs: Tensor, attention_mask: Any, cache: Any) -> None:
        """Create the forward's `Gating`, from the sums that the cache keeps of earlier tokens.

        In training it has the decision that `domain_ids` give, open for all tokens without them. Raises ValueError for
        an engine's attention, and in training for a cache that was filled outside of training.
        """
        self.refuse_engine(model.config)
        if not model.training:
            rows = read_rows(flow, inputs, attention_mask, cache, owner=self.name, what=self.what)
            flow.gating = Gating(*rows, ids=inputs if inputs.dim() == 2 else None)
            # Recorded choices and gradients need every module to run.
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
        """Keep the sums and decisions of these tokens in the cache for later tokens."""
        keep(cache, self.name, flow.gating.found)

    def counted(self, surgery: Surgery) -> Mapping[str, tuple[type[nn.Module], int]]:
        """Return that the model has one `DomainGate`."""
        return {"domain gates": (DomainGate, 1)}
