"""`mixture_of_control`: low-rank control states parallel to attention and FFN, mixed across layers.

Mixture-of-Control, Nguyen et al., ICML 2026 workshop CoLoRAI, sections 4.2 and 5.3, appendix B. A site adds to its
block's output its own control and, by a gate, those of other sites (Eq. 9, 10). Every control's writing matrix is zero
at birth.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from surgeon.blueprint.blueprint import Claim, OperationRecord
from surgeon.blueprint.draft import Draft
from surgeon.blueprint.grafts import Graft, recipes_of
from surgeon.common.formatting import show
from surgeon.errors import BadInput
from surgeon.grafts.composition import ATTENTION, FFN
from surgeon.grafts.states import (
    GATE_SHARING,
    INFERENCE_ROUTINGS,
    MIXTURE_GATES,
    TRAIN_ROUTINGS,
    bank_births,
    fewest_to_choose,
)
from surgeon.operations.operation import Legend, OneOf, Operation, Paper, Spec, TrainingDefaults
from surgeon.operations.selectors import LayerSelector
from surgeon.operations.sites import select_sites
from surgeon.runtime.states_rules import BANK, SITES, MixtureSpec

Site = Annotated[str, OneOf(lambda: SITES)]
_ROLES = {"attention": ATTENTION, "ffn": FFN}


class Gate(Spec):
    """The gate that chooses among the control states of all layers (section 4.2, appendix B.2)."""

    kind: Annotated[
        str,
        OneOf(lambda: MIXTURE_GATES),
        Field(description="scores W x, or cosines of a low-dimensional projection of x with one vector a control"),
    ] = "linear"
    shared: Annotated[
        str,
        OneOf(lambda: GATE_SHARING),
        Field(
            description="one gate for all sites; one for attention's and one for the FFN's, each among its own kind;"
            " one for each site"
        ),
    ] = "all"
    projection: Annotated[int, Field(ge=1, le=2**16, description="size of the cosine gate's projection (Table 5)")] = (
        256
    )
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False, description="cosines are divided by it")] = 0.3
    straight_through: Annotated[
        bool,
        Field(
            description="also give the gate the gradient of the chosen probabilities' sum, values unchanged: with"
            " `top_k` 1 the paper's softmax over one score has no gradient"
        ),
    ] = True


class Routing(Spec):
    """The tokens over which a choice is made (appendix B.2)."""

    train: Annotated[
        str,
        OneOf(lambda: TRAIN_ROUTINGS),
        Field(description="one choice a batch: greatest mean probability, or chosen by most tokens; or one a token"),
    ] = "batch_mean"
    inference: Annotated[
        Annotated[str, OneOf(lambda: INFERENCE_ROUTINGS)] | None,
        Field(
            description="each token by the mean over its sequence up to it (decoders), over all of its sequence"
            " (encoders), or by itself; null: the mean that the base can take. A decoder's token never sees later ones"
        ),
    ] = None


class MixtureOfControl(Operation):
    """Add control states parallel to attention, FFN or both of chosen layers, and gates that mix them across layers."""

    papers = (
        Paper(
            "nguyen2026mixture",
            "Nguyen, Duc Anh and Luu, Tien Ngoc and Pham, Tung and Tran, Toan",
            "Mixture-of-Control: State-Aware Fine-Tuning for Transformer-based Models",
            2026,
            venue="ICML Workshop on Connecting Low-rank Representations in AI (CoLoRAI)",
        ),
    )
    training = TrainingDefaults(
        "Mixture-of-Control, Tables 4 and 5: 3e-4, linear, warm-up 6 %, weight decay 0.01, 32 sequences of 256; rate"
        " measured",
        lr=1e-2,
        schedule="linear",
        warmup=0.06,
        weight_decay=0.01,
    )
    on_encoders = True
    grafts = ("control_states", "mixture")
    legend: ClassVar[Mapping[str, Legend]] = {"M": Legend("control states (Mixture-of-Control)", 2)}
    way_on = "use another graft, or full fine-tuning"

    op: Literal["mixture_of_control"]
    layers: Annotated[LayerSelector, Field(description="the layers that get control states")] = "all"
    sites: Annotated[list[Site], Field(min_length=1, description="the blocks that get them: attention, ffn")] = [  # noqa: RUF012  # pydantic copies it
        "attention",
        "ffn",
    ]
    rank: Annotated[
        int,
        Field(
            ge=1,
            le=2**16,
            description="rank of every control state; 64 gives the parameter counts of the paper's Table 1",
        ),
    ] = 64
    top_k: Annotated[
        int, Field(ge=0, description="controls chosen beside a site's own; 0: Parallel Control, without a gate")
    ] = 1
    alpha: Annotated[float, Field(ge=0, le=1, description="share of a site's own control; the paper: 0.6 to 0.95")] = (
        0.95
    )
    gate: Annotated[Gate, Field(description="what chooses among the control states")] = Gate()
    routing: Annotated[Routing, Field(description="over which tokens it chooses")] = Routing()
    balance_weight: Annotated[
        float, Field(ge=0, allow_inf_nan=False, description="share λ of the load-balancing loss; the paper: 0.001-0.02")
    ] = 0.01

    @field_validator("sites")
    @classmethod
    def _once(cls, sites: list[Site]) -> list[Site]:
        """Return the sites. Raises ValueError where one is named twice."""
        if len(set(sites)) != len(sites):
            raise ValueError("`sites` names a site twice")
        return sites

    def edit(self, draft: Draft, facts: None) -> OperationRecord:
        """Attach the control states and their gates, and return what was matched and what is promised."""
        number = draft.number
        if draft.bank is not None:
            raise BadInput(
                "the model has control states already, and a gate's size is fixed at birth; name all `layers` in one"
                " operation, or take the earlier one back (`surgeon revert`)"
            )
        layers = select_sites(draft, self.layers, *(_ROLES[site] for site in self.sites))
        sites = {
            layer: [site for site in SITES if site in self.sites and _ROLES[site] in draft.blocks(layer)]
            for layer in layers
        }
        kinds = [site for here in sites.values() for site in here]
        choice = self._candidates(kinds)
        if self.top_k > choice:
            raise BadInput(f"`top_k` {self.top_k} is more than the {choice} control states a gate chooses among")
        before = draft.parameters()
        for layer in layers:
            draft.layers[layer].grafts.append(Graft("control_states", {"sites": sites[layer]}, {}, number))
        mixture = self._entry(draft)
        dtype = draft.dtype_of(0)
        births = bank_births(MixtureSpec(**mixture), kinds, draft.anatomy.sizes.hidden)
        draft.bank = Graft("mixture", mixture, recipes_of(births, BANK, f"operations[{number}].", dtype), number)
        share = (draft.parameters() - before) / before
        chosen = "Parallel Control" if self.top_k == 0 else f"top {self.top_k} of {choice}"
        return OperationRecord(
            op=self.op,
            matched=f"{len(kinds)} control states of rank {self.rank} at {' and '.join(self.sites)} of layers"
            f" {show(layers)}, {chosen}, {share:+.2%}",
            claim=Claim("exact", "every control's writing matrix is zero"),
            trains="new",
        )

    def _candidates(self, kinds: list[Site]) -> int:
        """Return how many control states a gate chooses among."""
        return fewest_to_choose(MixtureSpec(self.rank, shared=self.gate.shared), kinds)

    def _inference_routing(self, draft: Draft) -> str:
        """Return the routing at inference. Raises BadInput where this kind of base does not allow the plan's choice."""
        family = draft.anatomy.family
        own, other = ("sequence_mean", "prefix_mean") if family.encoder else ("prefix_mean", "sequence_mean")
        if self.routing.inference == other:
            kind = (
                "an encoder, which reads whole sequences" if family.encoder else "a decoder, which must not look ahead"
            )
            raise BadInput(
                f"`routing.inference: {other}` on {kind} ({family.model_type}): write {own} or token, or leave it out"
            )
        return self.routing.inference or own

    def _entry(self, draft: Draft) -> dict[str, Any]:
        """Return the mixture's settings as `config.surgery` stores them."""
        return {
            "rank": self.rank,
            "top_k": self.top_k,
            "alpha": self.alpha,
            "gate": self.gate.kind,
            "shared": self.gate.shared,
            "projection": self.gate.projection,
            "temperature": self.gate.temperature,
            "train_routing": self.routing.train,
            "inference_routing": self._inference_routing(draft),
            "balance_weight": self.balance_weight,
            "straight_through": self.gate.straight_through,
        }
