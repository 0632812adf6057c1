"""Mixture-of-Control (Nguyen et al., ICML 2026 workshop CoLoRAI): control states beside attention and FFN.

Shapes: B batch, T tokens, D hidden size, L control states among which a gate chooses, K of them chosen.

A site s is a block with a control state. It adds to its block's output α g_s(x) + (1 − α) Σ_k π_k(x) g_k(x) (Eq. 9),
with g_k(x) = B_k A_k x, B zero at birth, x the block's input, and π the gate's probabilities of the K chosen
control states, scaled to sum to one (Eq. 10: the softmax over the chosen scores). K = 0 is Parallel Control: g_s(x).
Where a model type normalises what a block adds to the residual stream (Gemma 2 and 3, OLMo 2), the sum of block and
control is normalised.

In training all tokens of a batch share one choice (appendix B): the K control states with the highest mean
probability (`batch_mean`) or with the most tokens that choose them (`batch_mode`). With `token` each token chooses
instead. At inference each token chooses, by its own probabilities (`token`) or by their mean over its document up to
it (`prefix_mean`): a token's choice never depends on later tokens, on padding or on other documents of the batch. In
encoders, where tokens attend to their whole sequence, the mean is over the sequence (`sequence_mean`).

The model keeps all control states in one bank: a site also uses control states of other layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .graft import Flow, Graft
from .losses import balance_loss, selected, valid_tokens
from .newborn import Leaf, LowRank, as_linear, product
from .precision import at_least_fp32
from .prefix import Kept, Reading, check_one_document, keep, kept_in, read_rows, several_in_a_row
from .rules import Surgery
from .states_rules import MixtureSpec, States, StatesRules


class ControlState(LowRank):
    """The control state g(x) = B A x of one site: D to D."""


class MixtureGate(Leaf):
    """A gate that scores L control states for every token: W x, or cos(P x, w_k) / τ (appendix B.2)."""

    def __init__(self, spec: MixtureSpec, count: int, width: int) -> None:
        super().__init__()
        self.temperature = spec.temperature
        linear = spec.gate == "linear"
        self.projection = None if linear else nn.Parameter(torch.empty(spec.projection, width))
        self.weight = nn.Parameter(torch.empty(count, width if linear else spec.projection))

    def initialise(self) -> None:
        """Fill every matrix with the variance of `nn.Linear`."""
        for matrix in self.parameters(recurse=False):
            as_linear(matrix)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of x: B T D to B T L, in at least fp32."""
        if self.projection is None:
            return at_least_fp32(F.linear(x, self.weight))
        projected = F.linear(x, self.projection)
        directions = F.normalize(at_least_fp32(self.weight), dim=-1).to(projected.dtype)
        scores = at_least_fp32(F.linear(projected, directions))
        # In a bf16 model this is several times faster than `vector_norm` or `normalize` in fp32.
        length = projected.square().sum(dim=-1, keepdim=True, dtype=scores.dtype).sqrt()
        cosines: Tensor = scores / (length.clamp(min=1e-12) * self.temperature)
        return cosines


class ControlBank(nn.Module):
    """All control states of a model and their gates."""

    def __init__(self, found: States, width: int) -> None:
        super().__init__()
        self.spec = spec = found.mixture
        self.blocks = found.blocks
        self.states = nn.ModuleList([ControlState(spec.rank, width, width) for _ in self.blocks])
        gates = spec.gates(self.blocks)
        self.gates = nn.ModuleDict({name: MixtureGate(spec, len(choice), width) for name, choice in gates.items()})

    def choice_of(self, site: int) -> list[int]:
        """Return the numbers of the control states among which a site's gate chooses."""
        return self.spec.choice_of(site, self.blocks)


class Mixing(Reading):
    """The state of all control states in one forward: the bank, and the sums of probabilities over documents.

    `found` maps each site to its sums of probabilities, and "counts" to the number of tokens in each sum. `choices`
    (None: not recorded) collects each site's choice as (site, chosen B' T' K, weights B' T' K); B' and T' are 1 where
    the whole batch shares one choice. A chosen number is an index into `ControlBank.choice_of(site)`.
    """

    def __init__(
        self, bank: ControlBank, valid: Tensor, begins: Tensor | None = None, past: Kept | None = None
    ) -> None:
        super().__init__(valid, begins, past)
        self.bank = bank
        self.found: dict[int | str, Tensor] = {}
        self.choices: list[tuple[int, Tensor, Tensor]] | None = None

    def control(self, site: int, x: Tensor, frame: Flow) -> Tensor:
        """Return what site number `site` adds to its block's output (Eq. 9): B T D, for the block's input x, B T D."""
        spec, choice = self.bank.spec, self.bank.choice_of(site)
        own = self.bank.states[site]
        if spec.top_k == 0:
            return product(x, own())
        probabilities = F.softmax(self.bank.gates[spec.gate_of(site, self.bank.blocks)](x), dim=-1)
        if own.training and spec.balance_weight > 0:
            frame.measure("balance_loss", balance_loss(probabilities, self.valid, spec.top_k))
        shown, ranking = self._shown(site, probabilities, training=own.training)
        chosen, weights = choose(shown, ranking, spec)
        if self.choices is not None:
            self.choices.append((site, chosen.detach(), weights.detach()))
        weights = (1 - spec.alpha) * weights
        # The choice and the number of tokens for each are values of tensors, on which a compiled graph cannot branch.
        compiling = torch.compiler.is_compiling()
        if chosen.shape[:2] != x.shape[:2]:
            if not compiling:
                return self._together(x, site, [choice[number] for number in chosen.flatten().tolist()], weights)
            chosen, weights = (each.expand(*x.shape[:2], -1) for each in (chosen, weights))
        route = self._by_weight if compiling else self._by_token
        return product(x, own(), spec.alpha) + route(x, chosen, weights, choice)

    def _shown(self, site: int, probabilities: Tensor, *, training: bool) -> tuple[Tensor, Tensor]:
        """Return the probabilities that give the weights, and the ranking whose K greatest are chosen.

        Both are B T L, or 1 1 L where the whole batch shares one choice.
        """
        spec = self.bank.spec
        if (spec.train_routing if training else spec.inference_routing) == "token":
            return probabilities, probabilities
        valid = self.valid.unsqueeze(-1).to(probabilities.dtype)
        if not training and spec.inference_routing == "sequence_mean":
            mean = (probabilities * valid).sum(dim=1, keepdim=True) / valid.sum(dim=1, keepdim=True).clamp(min=1)
            shown = mean.expand_as(probabilities)
            return shown, shown
        if not training:
            if "counts" not in self.found:
                self.found["counts"] = self.since_begin("counts", _wide(valid))
            self.found[site] = self.since_begin(site, _wide(probabilities * valid))
            counts = self.found["counts"].to(valid.device).clamp(min=1)
            shown = (self.found[site] / counts).to(probabilities.dtype)
            return shown, shown
        shown = (probabilities * valid).sum(dim=(0, 1), keepdim=True) / valid.sum().clamp(min=1)
        if spec.train_routing == "batch_mean":
            return shown, shown
        votes = (selected(probabilities, spec.top_k) * valid).sum(dim=(0, 1), keepdim=True)
        # Votes are whole numbers and the mean is at most 1: it decides between equal votes.
        return shown, votes + shown.detach()

    def _together(self, x: Tensor, site: int, others: list[int], weights: Tensor) -> Tensor:
        """Return the weighted sum of a site's own control and of the controls `others`, as one product: B T D.

        All tokens share the choice `others`, with `weights` 1 1 K.
        """
        downs, ups = zip(*(self.bank.states[number]() for number in (site, *others)), strict=True)
        # The weights scale the matrices B, which are smaller than the activations.
        shares = [weights.new_full((1,), self.bank.spec.alpha), *weights.flatten().split(1)]
        scaled = [up * share.to(up.dtype) for up, share in zip(ups, shares, strict=True)]
        return F.linear(F.linear(x, torch.cat(downs)), torch.cat(scaled, dim=1))

    def _by_token(self, x: Tensor, chosen: Tensor, weights: Tensor, choice: list[int]) -> Tensor:
        """Return the weighted sum of each token's chosen controls, B T D; `chosen` and `weights` are B T K.

        Each control runs only on the tokens that chose it.
        """
        rows, count = x.reshape(-1, x.shape[-1]), chosen.shape[-1]
        asked = chosen.flatten()
        order = asked.argsort(stable=True)
        shares = torch.bincount(asked, minlength=len(choice)).tolist()
        hit = [(choice[number], share) for number, share in enumerate(shares) if share]
        if len(hit) == 1 and count == 1:
            return product(rows, self.bank.states[hit[0][0]](), weights.reshape(-1, 1)).view_as(x)
        sorted_rows = rows.index_select(0, order // count)
        sorted_weights = weights.reshape(-1, 1).index_select(0, order)
        parts = zip(hit, sorted_rows.split([n for _, n in hit]), sorted_weights.split([n for _, n in hit]), strict=True)
        made = torch.cat([product(part, self.bank.states[number](), weight) for (number, _), part, weight in parts])
        # Back in the order of tokens: the K outputs of a token are neighbours again, always summed in the same order.
        return made.index_select(0, order.argsort()).view(len(rows), count, -1).sum(dim=1).view_as(x)

    def _by_weight(self, x: Tensor, chosen: Tensor, weights: Tensor, choice: list[int]) -> Tensor:
        """Return the same sum as `_by_token` from two products of all controls: B T D.

        A control that a token did not choose has the weight 0 there.
        """
        downs, ups = zip(*(self.bank.states[number]() for number in choice), strict=True)
        narrow = F.linear(x, torch.cat(downs)).unflatten(-1, (len(choice), -1))
        shares = torch.zeros(*x.shape[:2], len(choice), dtype=weights.dtype, device=x.device)
        shares = shares.scatter(-1, chosen, weights).to(x.dtype)
        return F.linear((narrow * shares.unsqueeze(-1)).flatten(-2), torch.cat(ups, dim=1))


class StatesGraft(Graft, StatesRules):
    """The graft that adds control states to the outputs of blocks, and their bank to the model."""

    def blocks(self, surgery: Surgery, index: int) -> tuple[str, ...]:
        """Return the blocks of layer `index` that carry a control state."""
        found: States = surgery.of[self.name]
        return tuple({"attention": "self_attn", "ffn": "mlp"}[kind] for kind in found.sites_of(index))

    def attach(self, layer: Any, config: Any, index: int, surgery: Surgery) -> bool:
        """Give each block of the layer that carries a control state its site number; the modules lie in the bank."""
        sites = surgery.of[self.name].sites_of(index)
        for kind, block in (("attention", "self_attn"), ("ffn", "mlp")):
            if kind in sites:
                getattr(layer, block).site = sites[kind]
        if sites:
            layer.loss_weights["balance_loss"] = surgery.of[self.name].mixture.balance_weight
        return bool(sites)

    def beside(self, block: Any, x: Tensor, output: Tensor, frame: Flow | None) -> Tensor:
        """Return the block's output plus the site's control."""
        return output + site_control(block.site, x, frame)

    def complete(self, model: Any, surgery: Surgery) -> None:
        """Add the bank to the model; raise ValueError where an engine's attention would make choices wrong."""
        surgery.of[self.name].mixture.refuse_engine(model.config)
        model.control_bank = ControlBank(surgery.of[self.name], model.config.hidden_size)

    def open(self, model: Any, flow: Flow, inputs: Tensor, attention_mask: Any, cache: Any) -> None:
        """Create the forward's `Mixing`, from the bank and the sums that the cache keeps of earlier tokens."""
        spec: MixtureSpec = model.control_bank.spec
        flow.mixing = Mixing(model.control_bank, *_rows(model, spec, flow, inputs, attention_mask, cache))
        flow.mixing.choices = [] if flow.records_choices else None

    def close(self, model: Any, flow: Flow, cache: Any) -> None:
        """Keep the sums of these tokens' probabilities in the cache for later tokens."""
        keep(cache, self.name, flow.mixing.found)

    def counted(self, surgery: Surgery) -> Mapping[str, tuple[type[nn.Module], int]]:
        """Return the classes and numbers of the bank's control states and gates."""
        found: States = surgery.of[self.name]
        gates = len(found.mixture.gates(found.blocks))
        return {"control states": (ControlState, len(found.sites)), "gates": (MixtureGate, gates)}


def _wide(values: Tensor) -> Tensor:
    """Return values in fp64, as a document's sum is a difference of two sums; in fp32 on MPS, which has no fp64."""
    return values.to(torch.float32 if values.device.type == "mps" else torch.float64)


def _rows(
    model: Any, spec: MixtureSpec, flow: Flow, inputs: Tensor, attention_mask: Any, cache: Any
) -> tuple[Tensor, Tensor | None, Kept | None]:
    """Return the arguments of this forward's `Mixing` after the bank: valid, begins and past.

    Raises ValueError where a choice depends on documents that cannot be known.
    """
    spec.refuse_engine(model.config)
    by_sequence = spec.by_sequence and not model.training
    if by_sequence and spec.inference_routing == "prefix_mean":
        return read_rows(flow, inputs, attention_mask, cache, owner=StatesGraft.name, what=spec.what)
    if model.training and kept_in(cache, StatesGraft.name, asked=False) is not None:
        raise ValueError(
            "the cache was filled outside of training, where control states choose otherwise; begin with an empty one"
        )
    seen = 0 if cache is None else cache.get_seq_length()
    valid = valid_tokens(attention_mask, torch.Size(inputs.shape[:2]), inputs.device, seen)
    if by_sequence:
        if flow.packed:
            raise several_in_a_row(spec.what)
        check_one_document(flow.positions, attention_mask, valid, spec.what)
    return valid, None, None


def site_control(site: int, x: Tensor, frame: Flow | None) -> Tensor:
    """Return what a site adds to its block's output: B T D, for its input `x`. RuntimeError outside its layer."""
    if frame is None or frame.mixing is None:
        raise RuntimeError("a block with a control state was called outside its layer, which brings the bank")
    mixing: Mixing = frame.mixing
    return mixing.control(site, x, frame)


def choose(shown: Tensor, ranking: Tensor, spec: MixtureSpec) -> tuple[Tensor, Tensor]:
    """Return (numbers of the K control states of greatest `ranking`, their weights), … K both (Eq. 10).

    The weights are the probabilities `shown` of the chosen, scaled to sum to one. With K = 1 the weight is always 1, so
    that the task's loss would give the gate no gradient; with `straight_through` the weights also have the gradient of
    the sum of the unscaled probabilities.
    """
    chosen = ranking.topk(spec.top_k, dim=-1).indices
    picked = shown.gather(-1, chosen)
    total = picked.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(picked.dtype).tiny)
    weights = picked / total
    return chosen, weights * (total / total.detach()) if spec.straight_through else weights
