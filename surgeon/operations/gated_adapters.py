"""`gated_adapters`: adapters parallel to the FFN, each with a gate of its own (Neutral Residues).

Talla et al., arXiv:2410.02744, section 3, figure 2. An adapter is an FFN of the backbone's GLU form and activation;
its output matrix is zero at birth, so the grown model computes what the base computes, to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from surgeon.blueprint.blueprint import Claim, OperationRecord
from surgeon.blueprint.draft import Draft
from surgeon.blueprint.grafts import Graft, recipes_of
from surgeon.blueprint.recipes import Recipe
from surgeon.common.formatting import show_layers
from surgeon.errors import BadInput
from surgeon.grafts.adapters import GATES, LOCAL_LOSSES, VARIANCES, adapter_births
from surgeon.grafts.checks import ACTIVATIONS
from surgeon.grafts.composition import FFN
from surgeon.operations.operation import NEURONS, Legend, OneOf, Operation, Paper, Spec, TrainingDefaults
from surgeon.operations.prepare import Scale
from surgeon.operations.selectors import LayerSelector
from surgeon.operations.sites import default_activation, select_sites
from surgeon.runtime.adapters_rules import ADAPTER, AdapterSpec

# Computed sizes are multiples of this, which suits the matrix units of GPUs.
_STEP = 8
# The paper's α in experiments that do not vary it (section 4.1).
_DEFAULT_WEIGHT = 0.01

LossKind = Annotated[str, OneOf(lambda: LOCAL_LOSSES)]


class LocalLoss(Spec):
    """A loss on the adapters themselves (section 3): ℓ1 of what they add on original text, or domain classification."""

    kind: Annotated[
        LossKind,
        Field(
            description="l1: mean over adapters of the output's ℓ1 norm over the width, original-domain tokens only;"
            " cross_entropy: every sigmoid gate classifies the token's domain"
        ),
    ]
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False, description="its share α of the loss")] = _DEFAULT_WEIGHT


class GatedAdapters(Operation):
    """Add gated adapters parallel to the FFN of chosen layers."""

    papers = (
        Paper(
            "signetalla2024neutral",
            r"Signe Talla, Franck and Grave, {\'E}douard and J{\'e}gou, Herv{\'e}",
            "Neutral Residues: Revisiting Adapters for Model Extension",
            2024,
            "2410.02744",
        ),
    )
    training = TrainingDefaults(
        "Neutral Residues, section 4.1 and Table 8: 2e-4, betas 0.9 and 0.95, 64 sequences of 4096, p = 0.1; rate"
        " measured",
        lr=1e-2,
        betas=(0.9, 0.95),
        original_share=0.1,
    )
    grafts = ("adapters",)
    legend: ClassVar[Mapping[str, Legend]] = {"A": Legend("gated adapter beside the FFN (Neutral Residues)", 1)}

    examples = ({"size": 8},)
    way_on = "use another graft, or operations that add layers"

    op: Literal["gated_adapters"]
    layers: Annotated[LayerSelector, Field(description="the layers that get an adapter")] = "all"
    extra_weights: Annotated[
        float | None,
        Field(gt=0, le=10, description="size as a share of the model's parameters, for all adapters together"),
    ] = None
    size: Annotated[
        int | None, Field(ge=1, le=2**20, description="hidden size of every adapter, instead of `extra_weights`")
    ] = None
    gate: Annotated[
        str,
        OneOf(lambda: GATES),
        Field(
            description="scalar gate: relu (Neutral Residues), sigmoid (its variant), none (vanilla parallel adapter)"
        ),
    ] = "relu"
    init: Annotated[
        str,
        OneOf(lambda: VARIANCES),
        Field(
            description="variance of the input matrices: 1/(d·L) (low_variance) or 2/d (he); the output matrix is zero"
        ),
    ] = "low_variance"
    activation: Annotated[
        str | None,
        OneOf(lambda: ACTIVATIONS),
        Field(description="the adapters' activation; default: the FFN's, or silu where that has parameters of its own"),
    ] = None
    local_loss: Annotated[
        Literal["default", "none"] | LocalLoss | list[LocalLoss],
        Field(description="default: l1 with a relu gate, cross_entropy with sigmoid, none without a gate; weight 0.01"),
    ] = "default"

    @model_validator(mode="after")
    def _fits(self) -> Self:
        """Check that one size is given, and that the local losses fit the gate and differ. Raises ValueError."""
        if (self.extra_weights is None) == (self.size is None):
            raise ValueError("give either `extra_weights` (a share, such as 0.2) or `size`, not both or neither")
        kinds = list(self.losses)
        if "cross_entropy" in kinds and self.gate != "sigmoid":
            raise ValueError("local_loss `cross_entropy` classifies domains by a sigmoid gate: write `gate: sigmoid`")
        if isinstance(self.local_loss, list) and len(kinds) != len(self.local_loss):
            raise ValueError("`local_loss` lists one kind twice")
        return self

    @property
    def losses(self) -> dict[LossKind, float]:
        """Return the weights of the local losses, by kind; empty where there is none."""
        match self.local_loss:
            case "none":
                return {}
            case "default":
                by_gate: dict[str, dict[LossKind, float]] = {
                    "relu": {"l1": _DEFAULT_WEIGHT},
                    "sigmoid": {"cross_entropy": _DEFAULT_WEIGHT},
                    "none": {},
                }
                return by_gate[self.gate]
            case LocalLoss():
                return {self.local_loss.kind: self.local_loss.weight}
            case _:
                return {loss.kind: loss.weight for loss in self.local_loss}

    def small(self, facts: None, scale: Scale) -> tuple[Operation, None]:
        """Return (operation, no facts) with small adapters for a twin.

        The plan's share of a twin's parameters might be zero neurons.
        """
        return self.model_copy(update={"extra_weights": None, "size": min(self.size or NEURONS, NEURONS)}), None

    def edit(self, draft: Draft, facts: None) -> OperationRecord:
        """Attach the adapters and return what was matched and what is promised."""
        number = draft.number
        layers = select_sites(draft, self.layers, FFN)
        before = draft.parameters()
        size = self.size or self._size(draft, len(layers), before)
        for layer in layers:
            home = draft.layers[layer]
            if home.graft("adapters") is not None:
                raise BadInput(f"layer {layer} has an adapter already; leave it out of `layers`")
            entry = {"size": size, "gate": self.gate, "init": self.init}
            if activation := self.activation or default_activation(draft, layer):
                entry["activation"] = activation
            home.grafts.append(Graft("adapters", entry, self._tensors(draft, number, layer, size), number))
        self._set_losses(draft)
        share = (draft.parameters() - before) / before
        return OperationRecord(
            op=self.op,
            matched=f"adapters of {size} at {show_layers(layers)}, {share:+.1%}{self._with(draft, layers)}",
            claim=Claim("exact", "the adapters' output matrices are zero"),
            trains="new",
        )

    def _with(self, draft: Draft, layers: Sequence[int]) -> str:
        """Return words for `matched` about a default activation; empty where the plan or the config names one."""
        chosen = {} if self.activation else {default_activation(draft, layer): None for layer in layers}
        return f"; activation {', '.join(chosen)} (config.json names none)" if any(chosen) else ""

    def _size(self, draft: Draft, count: int, parameters: int) -> int:
        """Return the hidden size with which `count` adapters have the plan's share of the model's parameters.

        It is rounded to a multiple of `_STEP`, and never below.
        """
        assert self.extra_weights is not None
        width = draft.anatomy.sizes.hidden
        gates = width if self.gate != "none" else 0
        size = (self.extra_weights * parameters / count - gates) / (3 * width)
        return max(_STEP, round(size / _STEP) * _STEP)

    def _tensors(self, draft: Draft, number: int, layer: int, size: int) -> dict[str, Recipe]:
        """Return the recipes of one layer's adapter, by suffix."""
        width = draft.anatomy.sizes.hidden
        births = adapter_births(AdapterSpec(layer, size, self.gate, self.init), width, len(draft.layers))
        return recipes_of(births, ADAPTER, f"operations[{number}].layer[{layer}].", draft.dtype_of(layer))

    def _set_losses(self, draft: Draft) -> None:
        """Set the local losses of the model.

        Raises BadInput where earlier adapters have other losses, or gates that do not fit.
        """
        losses = dict.fromkeys(LOCAL_LOSSES, 0.0) | self.losses
        earlier = draft.settings.get("local_loss")
        if earlier is not None and earlier != losses:
            raise BadInput(
                f"`local_loss` here means {losses}, adapters that are already there have {earlier}; a model has one"
                " setting for all its adapters"
            )
        gates = {g.entry.get("gate", "relu") for layer in draft.layers for g in layer.grafts if g.kind == "adapters"}
        if losses["cross_entropy"] and gates != {"sigmoid"}:
            raise BadInput(
                "local_loss `cross_entropy` needs a sigmoid gate at every adapter, and earlier ones have none"
            )
        draft.settings["local_loss"] = losses
