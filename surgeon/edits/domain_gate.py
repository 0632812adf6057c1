"""`domain_gate`: one gate decides for every token whether the parts that the plan added are active.

An expert gate (Aljundi et al., CVPR 2017) decides by the data's domain which of two models computes: the base or the
grown one; here it decides for every token, from the base's own hidden states of the tokens so far. Where it decides
*original*, the logits are the base's bit for bit, whatever training made of the added parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from surgeon.blueprint.blueprint import Claim, OperationRecord
from surgeon.blueprint.draft import Draft
from surgeon.blueprint.grafts import Graft, recipes_of
from surgeon.common.formatting import show_layers
from surgeon.errors import BadInput
from surgeon.grafts.gate import FORMS, READS, gate_births
from surgeon.grafts.registry import GRAFTS
from surgeon.operations.operation import Legend, OneOf, Operation, Paper, TrainingDefaults
from surgeon.runtime.gate_rules import GATE, OPENS, GateSpec

# Default evidence of original text, in nats, that closes a gate.
_CLOSES = 6.0


class DomainGate(Operation):
    """Add a gate, fitted before training, that switches everything that earlier operations of the plan added."""

    papers = (
        Paper(
            "aljundi2017expert",
            "Aljundi, Rahaf and Chakravarty, Punarjay and Tuytelaars, Tinne",
            "Expert Gate: Lifelong Learning with a Network of Experts",
            2017,
            "1611.06194",
            "CVPR",
        ),
    )
    training = TrainingDefaults(
        "ours: the gate is fitted before training and trains no further; this rate is transformers'", lr=5e-5
    )
    grafts = ("domain_gate", "gated")
    legend: ClassVar[Mapping[str, Legend]] = {
        "D": Legend("domain gate: reads what goes into the layer", 4),
        "d": Legend("takes part only where the domain gate is open", 4),
    }
    # Without other operations it has nothing to switch.
    examples = ()

    op: Literal["domain_gate"]
    layer: Annotated[
        int,
        Field(
            ge=0,
            description="layers of the base below the states that it reads (0: the embeddings); all that is added must"
            " lie above them",
        ),
    ] = 0
    reads: Annotated[
        str,
        OneOf(lambda: READS),
        Field(
            description="how evidence is gathered. cusum: sums that find where the text changes (Page's test);"
            " prefix_mean: the mean over the document up to each token; token: each token by itself"
        ),
    ] = "cusum"
    form: Annotated[
        str, OneOf(lambda: FORMS), Field(description="the classifier: an MLP of one layer, or a linear one")
    ] = "mlp"
    units: Annotated[int, Field(ge=1, le=4096, description="size of the MLP")] = 64
    prior: Annotated[
        int, Field(ge=0, le=4096, description="prefix_mean: tokens of no evidence before every document")
    ] = 8
    false_positives: Annotated[
        float,
        Field(
            gt=0,
            lt=1,
            description="share of the held-out tokens of each original source that may lose the base's bits (cusum), or"
            " on which it may be open: training sets its threshold by it",
        ),
    ] = 0.03
    opens: Annotated[
        float,
        Field(
            ge=0,
            allow_inf_nan=False,
            description="cusum: evidence of new text, in nats, that opens it at least; more where `false_positives`"
            " asks for it",
        ),
    ] = OPENS
    closes: Annotated[
        Annotated[float, Field(ge=0, allow_inf_nan=False)] | Literal[False] | None,
        Field(
            # In this order, as `Literal[False]` takes 0.
            union_mode="left_to_right",
            description="evidence of original text, in nats, that closes an open gate; for prefix_mean and token how"
            " far the score falls below the threshold; false: it stays open to the end of the document; default: 6 for"
            " cusum, else false",
        ),
    ] = None

    def edit(self, draft: Draft, facts: None) -> OperationRecord:
        """Add the gate to the layer whose input it reads, and a mark to everything that it switches."""
        number = draft.number
        self._check(draft)
        added = _added(draft)
        if not added:
            raise BadInput(
                "nothing before it in the plan adds layers or grafts, so it has nothing to switch; write it after"
                " insert_layers, gated_adapters, control_llm, pmoe_experts or mixture_of_control"
            )
        lowest = min(added)
        if self.layer > lowest:
            raise BadInput(
                f"`layer: {self.layer}` reads above layer {lowest}, which has {added[lowest][1]} of this plan; all that"
                f" it switches must lie above what it reads: write `layer: {lowest}`{' or less' if lowest else ''}"
            )
        for layer, (entry, _) in added.items():
            draft.layers[layer].grafts.append(Graft("gated", entry, {}, number))
        home = draft.layers[self.layer]
        births = gate_births(GateSpec(**{**self._entry(), "layer": self.layer}), draft.anatomy.sizes.hidden)
        tensors = recipes_of(births, GATE, f"operations[{number}].", draft.dtype_of(self.layer))
        home.grafts.append(Graft("domain_gate", self._entry(), tensors, number))
        what = ", ".join(dict.fromkeys(words for _, words in added.values()))
        where = show_layers(sorted(added))
        return OperationRecord(
            op=self.op,
            matched=f"a gate that reads what goes into layer {self.layer} switches {what} of {where}",
            claim=Claim(
                "exact", "the gate is closed at birth, and what is closed is replaced by the base's own output"
            ),
            trains="fitted",
        )

    def _entry(self) -> dict[str, Any]:
        """Return the gate's settings as `config.surgery` stores them."""
        return {
            "reads": self.reads,
            "form": self.form,
            "units": self.units,
            "prior": self.prior,
            "closes": self._closes(),
            "false_positives": self.false_positives,
            "opens": self.opens,
            "turns": self.reads == "cusum" and self._closes() is not None,
        }

    def _closes(self) -> float | None:
        """Return the evidence that closes an open gate; None where nothing closes it."""
        if self.closes is None:
            return _CLOSES if self.reads == "cusum" else None
        return None if self.closes is False else float(self.closes)

    def _check(self, draft: Draft) -> None:
        """Raise BadInput where this model or plan does not allow a gate."""
        if any(graft.kind == "domain_gate" for layer in draft.layers for graft in layer.grafts):
            raise BadInput(
                "the model has a domain gate already, and one decides for all; take this one out of the plan, or the"
                " earlier one back (`surgeon revert`)"
            )
        changed = [index for index, layer in enumerate(draft.layers) if layer.rewritten]
        if changed or draft.dropped or draft.widths or draft.converted is not None:
            where = f" ({show_layers(changed)})" if changed else ""
            raise BadInput(
                f"an operation before it changes the base's own layers{where}, which no gate switches back; gate a plan"
                " that adds layers, branches, adapters, slots or control states"
            )
        if any(record.trains == "all" for record in draft.records):
            raise BadInput(
                "an operation before it trains the whole model, and no gate switches the base's own tensors back; gate"
                " a plan whose new parts train alone (insert_layers in the place of stack_layers)"
            )
        before = {
            graft.operation is None for layer in draft.layers for graft in layer.grafts if graft.kind == "experts"
        }
        if len(before) > 1:
            raise BadInput(
                "the base has slots of its own, which one router weighs together with the new ones, so that a gate"
                " cannot switch these alone; gate the plan of the first slots, or leave the gate out"
            )


def _added(draft: Draft) -> dict[int, tuple[dict[str, Any], str]]:
    """Return, by layer, (entry, words) for what the plan added there: an entry of `gated`, and a description."""
    graft_of = {kind.key: rules.name for rules in GRAFTS.values() for kind in rules.kinds}
    found: dict[int, tuple[dict[str, Any], str]] = {}
    for index, layer in enumerate(draft.layers):
        new = [graft for graft in layer.grafts if graft.operation is not None]
        # A layer with only a router, whose slots are all in other layers, adds nothing itself.
        names = sorted({graft_of[graft.kind] for graft in new if graft.tensors or graft.kind == "control_states"})
        inserted = layer.base is None
        if names or inserted:
            words = [*(["an inserted layer"] if inserted else []), *names]
            found[index] = ({"inserted": inserted, "grafts": names}, " and ".join(words))
    return found
