"""PMoE (Jung and Kim, section 3.1): LoRA slots at linear modules; one router at layer τ weighs those of deeper layers.

Shapes: B batch, T tokens, D hidden size, S slots, R the sum of the ranks of a group's slots.

W' x = W₀ x + Σ_k G(h_τ)_k s_k B_k A_k x (Eq. 5), G = softmax(h_τ W_g) (Eq. 4); s_k is LoRA's scale. Slots of one
group are computed as one product: A stacked by rows, B by columns, G between them. Each group has a product of its
own, so that a later surgery that adds a group leaves the results of the other groups unchanged, to the bit.

A later group has a mass m, zero at birth. With g the distribution over the slots before the group and g' the softmax
over all slots, old slots have the weights g + m (g' − g), and new ones g'. So at birth old slots keep their weights,
and the new ones add zero, as their B is zero; m and the new columns of W_g learn from there. Without a mass all slots
have the weights g', as in the paper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from .experts_rules import EXPERTS, ExpertRules, Experts, ExpertsSpec, RouterSpec, SlotSpec
from .graft import Flow, Graft, here
from .losses import masked_mean
from .newborn import Leaf, LowRank, as_linear
from .precision import at_least_fp32
from .rules import Surgery, engine_of, engine_ranks


class LoraSlot(LowRank):
    """The low-rank product B A of one slot at one linear module."""


class WithSlots(nn.Module):
    """A mixin before a linear module that adds slots; the module may have only some of the model's slots."""

    def __init__(self, native: nn.Linear | Conv1D, specs: Sequence[SlotSpec], *, routed: bool) -> None:
        width_in, width_out = native.weight.shape if isinstance(native, Conv1D) else reversed(native.weight.shape)
        super().__init__(width_in, width_out, bias=native.bias is not None)
        self.widths = (width_in, width_out)
        self.routed = routed
        self.slots = nn.ModuleDict({str(spec.slot): LoraSlot(spec.rank, width_in, width_out) for spec in specs})
        self.groups = _grouped(specs, lambda spec: spec.group)

    def forward(self, x: Tensor) -> Tensor:
        """Return W' x (Eq. 5): … in to … out.

        Raises RuntimeError where routed slots get no routing, and under tensor parallelism, which does not split slots.
        """
        output: Tensor = super().forward(x)
        if (x.shape[-1], output.shape[-1]) != self.widths:
            raise RuntimeError(
                "a module with PMoE slots is split over devices (tensor parallel), and its slots are not; load the"
                " model without `tp_plan`"
            )
        frame, routing = here.frame, None
        if frame is not None and frame.off:
            return output
        if self.routed:
            if frame is None or frame.routing is None:
                raise RuntimeError("a module with PMoE slots was called outside its layer, which brings the routing")
            routing = _as_in(x, frame.routing)
        grown = output
        for group in self.groups:
            for slots in _grouped(group, _dropout) if self.training else (group,):
                grown = grown + self._product(x, slots, routing)
        if frame is not None:
            return frame.where_open(EXPERTS, grown, output)
        return grown

    def _product(self, x: Tensor, group: tuple[SlotSpec, ...], routing: Tensor | None) -> Tensor:
        """Return what the slots of a group add for x: … out; without `routing` weighed only by their scale."""
        downs, ups = zip(*(self.slots[str(spec.slot)]() for spec in group), strict=True)
        down = downs[0] if len(downs) == 1 else torch.cat(downs)
        up = ups[0] if len(ups) == 1 else torch.cat(ups, dim=1)
        dropout = _dropout(group[0])
        narrow = F.linear(F.dropout(x, dropout, self.training and dropout > 0), down)
        if routing is not None:
            narrow = narrow * _weights(routing, group).to(narrow.dtype)
        elif group[0].scale != 1.0:
            narrow = narrow * group[0].scale
        return F.linear(narrow, up)


def _as_in(x: Tensor, routing: Tensor) -> Tensor:
    """Return the routing in the shape of a module's tokens: … S. Raises RuntimeError where their number differs."""
    if routing.shape[:-1] == x.shape[:-1]:
        return routing
    if routing.shape[:-1].numel() != x.shape[:-1].numel():
        raise RuntimeError(
            "a module with PMoE slots runs on other tokens than its layer (a compressed cache that it expands, say),"
            " whose routing is not known; leave it out of `targets`"
        )
    return routing.reshape(*x.shape[:-1], routing.shape[-1])


class ExpertLinear(WithSlots, nn.Linear):
    """A native linear module with slots."""


class Affine(nn.Module):
    """A linear layer W x + b with the tensor names of `nn.Linear` but another class: engines replace `nn.Linear`."""

    bias: nn.Parameter | None

    def __init__(self, width_in: int, width_out: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width_out, width_in))
        self.register_parameter("bias", nn.Parameter(torch.empty(width_out)) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        """Return W x + b: … in to … out."""
        return F.linear(x, self.weight, self.bias)


class ExpertAffine(WithSlots, Affine):
    """A linear module with slots for vLLM and other engines, which load its tensors but do not replace it."""


class Transposed(Conv1D):
    """The linear module of GPT-2, whose matrix is stored as inputs × outputs."""

    def __init__(self, width_in: int, width_out: int, *, bias: bool) -> None:
        assert bias, "it has one always"
        super().__init__(width_out, width_in)


class ExpertTransposed(WithSlots, Transposed):
    """The linear module of GPT-2 with slots."""


# Outside of training all slots of a group are one product, frozen or not. A later surgery freezes slots, and splitting
# the product then would change the order of its sums.
def _grouped(specs: Sequence[SlotSpec], key: Callable[[SlotSpec], float]) -> list[tuple[SlotSpec, ...]]:
    """Return the slots grouped by `key`; the slots of a group are computed as one product."""
    groups: dict[float, list[SlotSpec]] = {}
    for spec in specs:
        groups.setdefault(key(spec), []).append(spec)
    return [tuple(group) for group in groups.values()]


def _dropout(spec: SlotSpec) -> float:
    """Return a slot's dropout probability in training; 0 for a frozen slot."""
    return 0.0 if spec.frozen else spec.dropout


def _weights(routing: Tensor, group: tuple[SlotSpec, ...]) -> Tensor:
    """Return the weight s_k G_k for every row of a group's A: B T R."""
    parts = [
        (routing[..., spec.slot : spec.slot + 1] * spec.scale).expand(*routing.shape[:-1], spec.rank) for spec in group
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


class RouterColumn(Leaf):
    """A slot's column of W_g, stored as 1 × D; the first column of a later group also holds the group's mass."""

    def __init__(self, width: int, *, enters: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, width))
        self.mass = nn.Parameter(torch.empty(1)) if enters else None

    def initialise(self) -> None:
        """Fill the column with the variance of `nn.Linear`, and set the mass to zero."""
        super().initialise()
        as_linear(self.weight)

    def forward(self) -> tuple[Tensor, Tensor | None]:
        """Return the column and the mass; None: the column holds no mass."""
        return self.weight, self.mass


class ExpertRouter(nn.Module):
    """The router G(h_τ): for every token one distribution over the slots, which all deeper layers share."""

    def __init__(self, spec: RouterSpec, width: int) -> None:
        super().__init__()
        self.slots = nn.ModuleDict(
            {str(column.slot): RouterColumn(width, enters=spec.enters_with(column)) for column in spec.slots}
        )
        groups = sorted({column.group for column in spec.slots})
        self.sizes = [sum(column.group == group for column in spec.slots) for group in groups]

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the slots' weights and the log softmax over all slots (Eq. 7), both B T S, in at least fp32."""
        columns = list(self.slots.values())
        # Each group's scores come from a product of its own: a wider product might round the old columns differently.
        scores, masses, start = [], [], 0
        for size in self.sizes:
            group = [column() for column in columns[start : start + size]]
            scores.append(F.linear(hidden_states, torch.cat([weight for weight, _ in group])))
            masses.append(group[0][1])
            start += size
        known = at_least_fp32(scores[0])
        weights = F.softmax(known, dim=-1)
        for score, mass in zip(scores[1:], masses[1:], strict=True):
            known = torch.cat([known, at_least_fp32(score)], dim=-1)
            wider = F.softmax(known, dim=-1)
            count = weights.shape[-1]
            old = torch.lerp(weights, wider[..., :count], mass.to(weights.dtype))
            weights = torch.cat([old, wider[..., count:]], dim=-1)
        return weights, F.log_softmax(known, dim=-1)


class ExpertGraft(Graft, ExpertRules):
    """The graft that adds slots to linear modules, and their router to one layer."""

    replaces = (WithSlots,)

    def attach(self, layer: Any, config: Any, index: int, surgery: Surgery) -> bool:
        """Replace every module that a slot targets by one with slots; add the router to its layer.

        Returns whether the layer has slots or the router.
        """
        found: Experts = surgery.of[self.name]
        if index in found.by_layer:
            kind = ExpertLinear if engine_of(config) is None else ExpertAffine
            layer.slotted = attach_experts(layer, found.by_layer[index], kind)
        if found.router is None or found.router.layer != index:
            return index in found.by_layer
        layer.expert_router = ExpertRouter(found.router, config.hidden_size)
        layer.routes = True
        layer.loss_weights["router_loss"] = found.router_loss.task_id
        return True

    def complete(self, model: Any, surgery: Surgery) -> None:
        """Raise ValueError where an engine splits matrices over processes, as it does not split slots."""
        if engine_ranks(model.config) > 1:
            raise ValueError(
                f"{engine_of(model.config)} splits matrices over processes here, but does not split PMoE's slots beside"
                " them; set tensor_parallel_size to 1"
            )

    def before(self, layer: Any, hidden_states: Tensor, frame: Flow) -> None:
        """Check that modules with slots are still there; in the router's layer compute the routing and its loss."""
        for owner in (layer, layer._modules.get("expanded")):
            for block, name in getattr(owner, "slotted", ()):
                check_slots(block, name)
        if layer.routes:
            routed = layer.expert_router(hidden_states)
            frame.routing = routed[0]
            valid, domains = frame.valid, frame.domains
            if valid is not None and domains is not None and layer.loss_weights["router_loss"] > 0:
                frame.measure("router_loss", task_loss(routed[1], valid, domains))

    def counted(self, surgery: Surgery) -> Mapping[str, tuple[type[nn.Module], int]]:
        """Return the classes and numbers of slots and of the router's columns."""
        found: Experts = surgery.of[self.name]
        slots = sum(len(slot.targets) for experts in found.by_layer.values() for slot in experts.slots)
        columns = 0 if found.router is None else len(found.router.slots)
        return {"slots": (LoraSlot, slots), "router columns": (RouterColumn, columns)}


def attach_experts(
    layer: nn.Module, spec: ExpertsSpec, kind: type[WithSlots] = ExpertLinear
) -> list[tuple[nn.Module, str]]:
    """Replace every module of a layer that a slot targets by a `kind`, or an `ExpertTransposed` for a GPT-2 module.

    Returns each replaced module's parent and its name there. Raises ValueError for a target that is no linear module.
    """
    places = []
    for target in dict.fromkeys(target for slot in spec.slots for target in slot.targets):
        native = layer.get_submodule(target)
        if not isinstance(native, nn.Linear | Conv1D):
            raise ValueError(f"config.surgery: experts of layer {spec.layer} target `{target}`, no linear module")
        here = [slot.at(target) for slot in spec.slots if target in slot.targets]
        parent, _, name = target.rpartition(".")
        made = ExpertTransposed if isinstance(native, Conv1D) else kind
        block = layer.get_submodule(parent)
        setattr(block, name, made(native, here, routed=spec.routed))
        if kind is ExpertAffine:
            # vLLM decides what to fuse once for all blocks of a class with the same names of children: add a name.
            block.has_slots = nn.Identity()
        places.append((block, name))
    return places


def check_slots(block: nn.Module, name: str) -> None:
    """Raise RuntimeError where the child `name` of a block has lost its slots, because other code replaced it.

    Quantisers and engines replace linear modules after loading too. A wrapper with the module inside is accepted, such
    as PEFT's.
    """
    found = block._modules.get(name)
    if isinstance(found, WithSlots) or torch.compiler.is_compiling():
        return
    if found is None or not any(isinstance(module, WithSlots) for module in found.modules()):
        raise RuntimeError(
            f"`{name}` had PMoE's slots, and a {type(found).__name__} stands in its place: something replaced it by its"
            " type after loading, and its slots were lost; let it leave modules with slots as they are"
        )


def task_loss(log_probabilities: Tensor, tokens: Tensor, domains: Tensor) -> Tensor:
    """Return the mean of −log G_k (Eq. 7) over those of `tokens` (B T, bool) whose domain is a task; shape (1,).

    Domain k ≥ 1 belongs to slot k − 1; domain 0, original text, to no slot. Raises ValueError for a domain without a
    slot.
    """
    count = log_probabilities.shape[-1]
    if not torch.compiler.is_compiling() and int(domains.max()) > count:
        raise ValueError(
            f"domain_ids go up to {int(domains.max())}; there are {count} slots (0: original text, k: slot k - 1)"
        )
    chosen = tokens & (domains > 0)
    slot = (domains - 1).clamp(min=0).unsqueeze(-1)
    return masked_mean(-log_probabilities.gather(-1, slot).squeeze(-1), chosen).reshape(1)
