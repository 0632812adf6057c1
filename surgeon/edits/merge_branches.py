"""`merge_branches`: fold control blocks back into one layer each (Control LLM, Table 5, Lerp8MSE0*M).

W = (1 - α) W_pre-trained + α W_expanded, tensor by tensor. The layers are not linear in their weights, so this changes
the function; `surgeon merge` measures the cost.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from surgeon.blueprint.blueprint import Claim, OperationRecord
from surgeon.blueprint.draft import Draft
from surgeon.blueprint.grafts import Graft
from surgeon.blueprint.recipes import Interpolated, Recipe
from surgeon.common.formatting import show
from surgeon.errors import BadInput
from surgeon.grafts.registry import INTERPOLATORS
from surgeon.operations.control_llm import CONTROL_LLM
from surgeon.operations.operation import Operation, TrainingDefaults
from surgeon.runtime.control_rules import INTERPOLATOR
from surgeon.runtime.rules import BRANCH


class MergeBranches(Operation):
    """Turn every control block into one native layer again; other grafts stay."""

    papers = (CONTROL_LLM,)
    training = TrainingDefaults("Control LLM's rate", lr=5e-5, min_lr=1e-5, decay_of_rate=0.1)

    op: Literal["merge_branches"]
    alpha: Annotated[
        float | None,
        Field(ge=0, le=1, description="share of the expanded branch; default: the one used at inference"),
    ] = None

    def edit(self, draft: Draft, facts: None) -> OperationRecord:
        """Replace both branches of each control block by interpolated weights."""
        merged = [index for index, layer in enumerate(draft.layers) if layer.graft("control") is not None]
        if not merged:
            raise BadInput("there is no control block to merge in this model")
        for index in merged:
            layer = draft.layers[index]
            control = layer.graft("control")
            assert control is not None
            inside = next((graft for graft in layer.grafts if graft.in_branch), None)
            if inside is not None:
                raise BadInput(
                    f"the control block of layer {index} holds more than a layer ({inside.text}), which cannot be"
                    " folded into one"
                )
            self._merge(draft, control, index, draft.number)
        share = "α at inference" if self.alpha is None else f"α {self.alpha:g}"
        return OperationRecord(
            op=self.op,
            matched=f"control blocks of layers {show(merged)}, {share}",
            claim=Claim("none", "a layer is not linear in its weights, so one block cannot do what two did"),
            trains="new",
        )

    def _merge(self, draft: Draft, control: Graft, index: int, number: int) -> None:
        """Replace a layer's tensors by their interpolation with the control block's, and remove the block."""
        layer = draft.layers[index]
        draft.open(index)
        alpha = self.alpha if self.alpha is not None else _inference_alpha(control, index)
        unused = draft.anatomy.unused(layer.like)
        for suffix, recipe in layer.tensors.items():
            if suffix in unused:
                continue
            layer.tensors[suffix] = Interpolated(recipe, control.tensors[f"{BRANCH}{suffix}"], alpha)
            layer.rewritten[suffix] = number
        layer.init = "merged"
        layer.grafts.remove(control)


def _inference_alpha(control: Graft, index: int) -> float | Recipe:
    """Return the one α that the block uses in evaluation: a number, or the recipe of its learned logit.

    Raises BadInput where each token has its own α.
    """
    stated: dict[str, Any] = {"kind": "lerp", "alpha": 0.5} | control.entry.get("interpolator", {})
    rule, why = INTERPOLATORS[stated["kind"]], ""
    learned = stated.get("inference_alpha") is None and stated.get("learnable")
    if learned and "logit" not in rule.learned(0.5):
        why = "learns its α in another form than a logit"
    if why := rule.unmergeable or why:
        raise BadInput(
            f"the control block of layer {index} has interpolator `{stated['kind']}`, which {why}; say which fixed"
            " share to take with `alpha` (--alpha)"
        )
    if stated.get("inference_alpha") is not None:
        return float(stated["inference_alpha"])
    return control.tensors[f"{INTERPOLATOR}logit"] if learned else float(stated["alpha"])
