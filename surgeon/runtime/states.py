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
from .prefix import Kept, Reading, check_one_document, keep, kept_in, read_rows, several_in_a_row, tokens_in
from .rules import Surgery
from .states_rules import MixtureSpec, States, StatesRules

# The number of the latest tokens whose sums of probabilities a cache keeps: it can be cropped by as many less one.
_KEPT = 64
# Up to so many choices a forward, a device that is slow to tell numbers picks each token's controls by index.
_FEW = 32

# All matrices A of a choice as L D R, all B as L R D.
Tables = tuple[Tensor, Tensor]


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

    def forward(self, x: Tensor, made: dict[nn.Module, Tensor]) -> Tensor:
        """Return the scores of x: B T D to B T L, in at least fp32.

        `made` keeps the gate's directions for other sites of the forward.
        """
        if self.projection is None:
            return at_least_fp32(F.linear(x, self.weight))
        projected = F.linear(x, self.projection)
        directions = made.get(self)
        if directions is None:
            directions = (F.normalize(at_least_fp32(self.weight), dim=-1) / self.temperature).to(projected.dtype)
            # With gradients each layer has a graph of its own, which checkpointing may make again.
            if not (torch.is_grad_enabled() or torch.compiler.is_compiling()):
                made[self] = directions
        scores = at_least_fp32(F.linear(projected, directions))
        length = torch.linalg.vector_norm(projected, dim=-1, keepdim=True, dtype=scores.dtype)
        cosines: Tensor = scores / length.clamp(min=1e-12)
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
        self.choices = [spec.choice_of(site, self.blocks) for site in range(len(self.blocks))]
        # The first column of each site's sums in what a cache keeps.
        self.columns = [sum(map(len, self.choices[:site])) for site in range(len(self.blocks))]

    def choice_of(self, site: int) -> list[int]:
        """Return the numbers of the control states among which a site's gate chooses."""
        return self.choices[site]

    def tables(self, x: Tensor) -> dict[int, Tables] | None:
        """Return the control states of each choice in tables, by the choice's first number.

        None where parameters have not the device and dtype of x, as hooks may hold them elsewhere.
        """
        if any(p.device != x.device or p.dtype != x.dtype for p in self.states.parameters()):
            return None
        made = {}
        for choice in {numbers[0]: numbers for numbers in self.choices}.values():
            downs, ups = zip(*(self.states[number]() for number in choice), strict=True)
            made[choice[0]] = torch.stack(downs).mT.contiguous(), torch.stack(ups).mT.contiguous()
        return made


class Mixing(Reading):
    """The state of all control states in one forward: the bank, and the sums of probabilities over documents.

    `found` maps each site to its sums of probabilities at the last tokens. `choices` (None: not recorded) collects each
    site's choice as (site, chosen B' T' K, weights B' T' K); B' and T' are 1 where the whole batch shares one choice. A
    chosen number is an index into `ControlBank.choice_of(site)`.
    """

    def __init__(
        self, bank: ControlBank, valid: Tensor, begins: Tensor | None = None, past: Kept | None = None
    ) -> None:
        if past is not None:
            past = {"sums": past["sums"][:, -1:]}
            if begins is not None and valid.shape[1] == 1:
                # One token in a row either begins a document or continues one.
                past, begins = {"sums": past["sums"].masked_fill(begins.unsqueeze(-1), 0)}, None
        super().__init__(valid, begins, past)
        self.bank = bank
        self.found: dict[int, Tensor] = {}
        self.choices: list[tuple[int, Tensor, Tensor]] | None = None
        # What sites share: the directions of gates, tables of control states, tokens as weights of sums (B T 1).
        self.directions: dict[nn.Module, Tensor] = {}
        self.tables: dict[int, Tables] | None = None
        self.tokens = _wide(valid).unsqueeze(-1)

    def control(self, site: int, x: Tensor, frame: Flow) -> Tensor:
        """Return what site number `site` adds to its block's output (Eq. 9): B T D, for the block's input x, B T D."""
        spec, choice = self.bank.spec, self.bank.choice_of(site)
        own = self.bank.states[site]
        if spec.top_k == 0:
            return product(x, own())
        gate = self.bank.gates[spec.gate_of(site, self.bank.blocks)]
        probabilities = F.softmax(gate(x, self.directions), dim=-1)
        if own.training and spec.balance_weight > 0:
            frame.measure("balance_loss", balance_loss(probabilities, self.valid, spec.top_k))
        shown, ranking = self._shown(site, probabilities, training=own.training)
        chosen, weights = choose(shown, ranking, spec)
        if self.choices is not None:
            self.choices.append((site, chosen.detach(), weights.detach()))
        # The choice and the number of tokens for each are values of tensors, on which a compiled graph cannot branch.
        compiling = torch.compiler.is_compiling()
        if chosen.numel() <= _FEW and not (x.is_cpu or own.training or compiling or torch.is_grad_enabled()):
            self.tables = self.tables or self.bank.tables(x)
            if self.tables is not None:
                return self._by_table(x, own, chosen, weights, *self.tables[choice[0]])
        weights = (1 - spec.alpha) * weights
        made = product(x, own(), spec.alpha)
        if chosen.shape[:2] == (1, 1) and not compiling:
            for number, weight in zip(chosen.flatten().tolist(), weights.unbind(-1), strict=True):
                made = made + product(x, self.bank.states[choice[number]](), weight.unsqueeze(-1))
            return made
        chosen, weights = (each.expand(*x.shape[:2], -1) for each in (chosen, weights))
        route = self._by_weight if compiling else self._by_token
        return route(x, made, chosen, weights, choice)

    def before(self, name: Any) -> Tensor | None:
        """Return the kept sums of site `name` at each row's last token before this forward, B 1 L; None: no token."""
        if self.past is None:
            return None
        return self.past["sums"].narrow(-1, self.bank.columns[name], len(self.bank.choices[name]))

    def _shown(self, site: int, probabilities: Tensor, *, training: bool) -> tuple[Tensor, Tensor]:
        """Return the probabilities that give the weights, and the ranking whose K greatest are chosen.

        Both are B T L, or 1 1 L where the whole batch shares one choice.
        """
        spec = self.bank.spec
        if (spec.train_routing if training else spec.inference_routing) == "token":
            return probabilities, probabilities
        if not training and spec.inference_routing == "prefix_mean":
            # Only the ratios of means count, and sums have the same.
            shown = self.since_begin(site, probabilities * self.tokens.to(probabilities.device))
            # A copy, so that the sums of all tokens do not wait for the end of the forward.
            self.found[site] = shown if shown.shape[1] <= _KEPT else shown[:, -_KEPT:].clone()
            return shown, shown
        valid = self.valid.unsqueeze(-1).to(probabilities.dtype)
        if not training:
            shown = (probabilities * valid).sum(dim=1, keepdim=True).expand_as(probabilities)
            return shown, shown
        shown = (probabilities * valid).sum(dim=(0, 1), keepdim=True) / valid.sum().clamp(min=1)
        if spec.train_routing == "batch_mean":
            return shown, shown
        votes = (selected(probabilities, spec.top_k) * valid).sum(dim=(0, 1), keepdim=True)
        # Votes are whole numbers and the mean is at most 1: it decides between equal votes.
        return shown, votes + shown.detach()

    def _by_token(self, x: Tensor, own: Tensor, chosen: Tensor, weights: Tensor, choice: list[int]) -> Tensor:
        """Return the sum of `own`, B T D, and of each token's chosen controls; `chosen` and `weights` are B T K.

        Each control runs only on the tokens that chose it.
        """
        rows, made, asked = x.reshape(-1, x.shape[-1]), own.flatten(0, 1), chosen.flatten()
        order = asked.argsort(stable=True)
        weights = weights.reshape(-1, 1)
        shares = torch.bincount(asked, minlength=len(choice)).tolist()
        for number, places in zip(choice, order.split(shares), strict=True):
            if len(places):
                tokens = places // chosen.shape[-1]
                part = product(rows[tokens], self.bank.states[number](), weights[places])
                # A token chooses a control once, so that the order of its sums is always that of controls.
                made = made.index_add_(0, tokens, part)
        return made.view_as(x)

    def _by_weight(self, x: Tensor, own: Tensor, chosen: Tensor, weights: Tensor, choice: list[int]) -> Tensor:
        """Return the same sum as `_by_token` from two products of all controls: B T D.

        A control that a token did not choose has the weight 0 there.
        """
        downs, ups = zip(*(self.bank.states[number]() for number in choice), strict=True)
        narrow = F.linear(x, torch.cat(downs)).unflatten(-1, (len(choice), -1))
        shares = torch.zeros(*x.shape[:2], len(choice), dtype=weights.dtype, device=x.device)
        shares = shares.scatter(-1, chosen, weights).to(x.dtype)
        return own + F.linear((narrow * shares.unsqueeze(-1)).flatten(-2), torch.cat(ups, dim=1))

    def _by_table(self, x: Tensor, own: Any, chosen: Tensor, weights: Tensor, down: Tensor, up: Tensor) -> Tensor:
        """Return the weighted sum of the control `own` and each token's chosen ones, for few tokens: B T D."""
        alpha, count = self.bank.spec.alpha, chosen.shape[-1]
        rows, asked = x.reshape(-1, x.shape[-1]), chosen.flatten()
        narrow = _summed(rows if count == 1 else rows.repeat_interleave(count, dim=0), down, asked)
        if count > 1:
            narrow = (narrow * weights.reshape(-1, 1).to(x.dtype)).view(len(rows), -1)
        made = _summed(narrow, up, asked)
        return torch.addmm(made, F.linear(rows, own.lora_A), own.lora_B.t(), beta=1 - alpha, alpha=alpha).view_as(x)


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
        bank: ControlBank = model.control_bank
        flow.mixing = Mixing(bank, *_rows(model, bank.spec, flow, inputs, attention_mask, cache))
        flow.mixing.choices = [] if flow.records_choices else None

    def close(self, model: Any, flow: Flow, cache: Any) -> None:
        """Keep the sums of these tokens' probabilities in the cache for later tokens."""
        found: dict[int, Tensor] = flow.mixing.found
        if found and cache is not None:
            sums = torch.cat([found[site].to(flow.mixing.valid.device) for site in sorted(found)], dim=-1)
            keep(cache, self.name, {"sums": sums}, _KEPT)

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
    seen = tokens_in(cache)
    valid = valid_tokens(attention_mask, torch.Size(inputs.shape[:2]), inputs.device, seen)
    if by_sequence:
        if flow.packed:
            raise several_in_a_row(spec.what)
        check_one_document(flow.positions, attention_mask, valid, spec.what)
    return valid, None, None


def _summed(rows: Tensor, table: Tensor, asked: Tensor) -> Tensor:
    """Return each row times the matrices asked for it, one below the other: N K·J to N ·; `table` is L J ·."""
    count, width = rows.shape
    matrices = table.index_select(0, asked).view(count, width, -1)
    return rows @ matrices[0] if count == 1 else torch.bmm(rows.unsqueeze(1), matrices).squeeze(1)


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
    if spec.top_k == 1 and not torch.is_grad_enabled():
        return chosen, torch.ones_like(chosen, dtype=shown.dtype)
    picked = shown.gather(-1, chosen)
    total = picked.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(picked.dtype).tiny)
    weights = picked / total
    return chosen, weights * (total / total.detach()) if spec.straight_through else weights
