"""`control_llm`: trainable copies parallel to (concat) or on top of (stack) chosen layers (Control LLM).

Wei et al., arXiv:2501.10979, sections 3.2 and 3.3, figure 5. Concat: a copy of the layer runs on the same input, and an
interpolator combines both outputs; equal at birth, they are combined without rounding, whatever α is. Stack: a copy
above the layer that adds nothing at birth. Hybrid: both in turn, stack first, as in the public code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from surgeon.blueprint.blueprint import Claim, OperationRecord
from surgeon.blueprint.draft import Draft, LayerDraft, silence
from surgeon.blueprint.grafts import Graft, recipes_of
from surgeon.blueprint.recipes import Recipe
from surgeon.common.formatting import show_layers
from surgeon.errors import BadInput
from surgeon.grafts.control import DIVERGENCES
from surgeon.grafts.registry import INTERPOLATORS
from surgeon.operations.operation import Legend, OneOf, Operation, Paper, Spec, TrainingDefaults
from surgeon.operations.selectors import LayerSelector, select_layers
from surgeon.runtime.control_rules import INTERPOLATOR
from surgeon.runtime.interpolators import Interpolation, InterpolatorSpec
from surgeon.runtime.rules import BRANCH

CONTROL_LLM = Paper(
    "wei2025control",
    "Wei, Haichao and Ren, Yunxiang and Fu, Zhoutong and Lunia, Aman and Chen, Yi-Lin and Leung, Alice and Xu, Ya",
    "Control LLM: Controlled Evolution for Intelligence Retention in LLM",
    2025,
    "2501.10979",
)


class Interpolator(Spec):
    """How the outputs of the two branches are combined (section 3.3); α is the share of the expanded branch."""

    kind: Annotated[
        str,
        OneOf(lambda: INTERPOLATORS),
        Field(
            description="one α (lerp; plerp with a projection, slerp along the arc, proj projecting for the divergence)"
            " or one for each token, from both branches (dlerp), from the input (dlerp_in), or 0 or 1 (moe)"
        ),
    ] = "lerp"
    alpha: Annotated[float, Field(ge=0, le=1, description="share of the expanded branch at birth")] = 0.5
    inference_alpha: Annotated[
        float | None, Field(ge=0, le=1, description="share in evaluation, if another (Lerp8MSE0*)")
    ] = None
    learnable: Annotated[bool, Field(description="train α (Lerp8MSEα), or the bias of the gate that makes it")] = False

    @property
    def rule(self) -> Interpolation:
        """Return the rules of this kind of interpolator."""
        return INTERPOLATORS[self.kind]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        """Check that the values of α fit this kind of interpolator. Raises ValueError."""
        if self.alpha == 0:
            raise ValueError(
                "`alpha` 0 leaves the expanded branch out, which would never train; the paper's Lerp8MSE0 trains that"
                " branch alone: write `alpha: 1.0` (and `inference_alpha: 0.5` for Lerp8MSE0*)"
            )
        if self.inference_alpha is not None and not self.rule.scalar_alpha:
            scalar = ", ".join(rule.key for rule in INTERPOLATORS.values() if rule.scalar_alpha)
            raise ValueError(f"`inference_alpha` needs one α for all tokens ({scalar}), not `{self.kind}`")
        if self.alpha == 1 and (self.learnable or not self.rule.scalar_alpha):
            raise ValueError(f"`alpha` must be below 1 where `{self.kind}` learns it")
        return self


class Divergence(Spec):
    """The loss that keeps the expanded branch near the pre-trained one in training (section 3.4)."""

    kind: Annotated[
        str,
        OneOf(lambda: DIVERGENCES),
        Field(description="mean square over the hidden size, or 1 - cosine; tokens of padding left out"),
    ] = "mse"
    weight: Annotated[float, Field(ge=0, allow_inf_nan=False, description="its share λ of the loss")] = 1.0


class ControlLLM(Operation):
    """Add trainable copies of chosen layers: parallel with an interpolator, on top, or both in turn."""

    papers = (CONTROL_LLM,)
    training = TrainingDefaults(
        "Control LLM, section 3.4: AdamW, 5e-5 to 1e-5, cosine, 1000 warm-up steps; weight decay 10 % of"
        " the rate; 512 sequences of 8192; the rate is ours, for small runs",
        lr=1e-3,
        min_lr=2e-4,
        decay_of_rate=0.1,
    )
    grafts = ("control",)
    legend: ClassVar[Mapping[str, Legend]] = {"C": Legend("control block: a trainable twin (Control LLM)", 3)}

    examples = (
        {"layers": "all"},
        {"layers": "all", "expansion": "stack"},
    )
    way_on = "use another graft, or operations that add layers"

    op: Literal["control_llm"]
    layers: Annotated[LayerSelector, Field(description="the layers to expand; the paper's 8 of 32: `{every: 4}`")]
    expansion: Annotated[
        Literal["concat", "stack", "hybrid"],
        Field(description="a side branch (concat), a layer on top (stack), or both by turns, stack first (hybrid)"),
    ] = "concat"
    interpolator: Interpolator = Interpolator()
    divergence: Divergence = Divergence()

    @model_validator(mode="after")
    def _fits(self) -> Self:
        """Check that interpolator and divergence have a meaning with this `expansion`, and fit each other.

        Raises ValueError.
        """
        if self.expansion == "stack":
            given = sorted({"interpolator", "divergence"} & self.model_fields_set)
            if given:
                raise ValueError(
                    f"`{given[0]}` has no meaning with `expansion: stack`, which has one branch: leave it out"
                )
        elif self.interpolator.rule.projects and self.divergence.kind == "none":
            kind = self.interpolator.kind
            raise ValueError(f"interpolator `{kind}` projects for the divergence, which is `none`: use `lerp`")
        return self

    @property
    def attaches(self) -> bool:
        """Return whether grafts are attached; copies on top are native layers."""
        return self.expansion != "stack"

    def edit(self, draft: Draft, facts: None) -> OperationRecord:
        """Attach the branches, insert the copies, and return what was matched and what is promised."""
        number = draft.number
        layers = select_layers(self.layers, len(draft.layers))
        stacked, beside = self._split(layers)
        claim = self._claim(beside, stacked, quantised=any(draft.kind_of(layer).packed for layer in beside))
        for layer in beside:
            draft.layers[layer].grafts.extend(self._branch(draft, number, layer))
        copies: dict[int, list[LayerDraft]] = {}
        for layer in stacked:
            copied = draft.copy_of(layer, operation=number, opened=True)
            copied.tensors = silence(copied.tensors, draft.kind_of(layer).opened)
            copied.init = "copy, zero-init"
            copies[layer] = [copied]
        draft.insert(copies)
        matched = [f"side branches at {show_layers(beside)}"] if beside else []
        matched += [f"copies after {show_layers(stacked)}"] if stacked else []
        return OperationRecord(self.op, "; ".join(matched), claim, trains="new")

    def _split(self, layers: list[int]) -> tuple[list[int], list[int]]:
        """Return (stacked, parallel): the layers that get a copy on top, and the layers that get a parallel copy.

        Raises BadInput where `hybrid` has only one layer.
        """
        match self.expansion:
            case "concat":
                return [], layers
            case "stack":
                return layers, []
            case "hybrid":
                if len(layers) < 2:
                    raise BadInput(
                        "`expansion: hybrid` alternates, which needs two layers or more; `layers` matches one"
                    )
                return layers[::2], layers[1::2]

    def _branch(self, draft: Draft, number: int, layer: int) -> list[Graft]:
        """Return the control block of a layer, and copies of its other grafts for the twin.

        Raises BadInput where the layer has a control block already, or a graft that cannot be copied.
        """
        home = draft.layers[layer]
        if home.graft("control") is not None:
            raise BadInput(f"layer {layer} has a control block already; leave it out of `layers`")
        barred = next((graft for graft in home.grafts if graft.rules.in_twin == "refused"), None)
        if barred is not None:
            raise BadInput(
                f"layer {layer} has {barred.text}, which cannot be copied into a twin: attach control blocks first"
            )
        # The twin of a layer with an adapter or experts has them too; otherwise the two would differ at birth.
        twin = {f"{BRANCH}{suffix}": recipe for suffix, recipe in draft.opened(layer).items()}
        entry = {"interpolator": self.interpolator.model_dump(), "divergence": self.divergence.model_dump()}
        grafts = [Graft("control", entry, twin | self._gate(draft, number, layer), number)]
        grafts += [graft.twin(number) for graft in home.grafts if graft.rules.in_twin == "copied"]
        return grafts

    def _gate(self, draft: Draft, number: int, layer: int) -> dict[str, Recipe]:
        """Return recipes of the interpolator's tensors, with the runtime's initial values.

        A fixed lerp has none.
        """
        spec = InterpolatorSpec(**self.interpolator.model_dump())
        births = self.interpolator.rule.births(spec, draft.anatomy.sizes.hidden)
        return recipes_of(births, INTERPOLATOR, f"operations[{number}].layer[{layer}].", draft.dtype_of(layer))

    def _claim(self, beside: list[int], stacked: list[int], *, quantised: bool) -> Claim:
        """Return the exact claim, with a reason for the branches and one for the copies on top."""
        reasons = []
        if beside:
            where = ", where the base is run dequantised to bfloat16" if quantised else ""
            reasons.append(f"both branches are born equal{where}, and equal branches are fused without rounding")
        if stacked:
            reasons.append("copies on top add exactly zero to the residual stream")
        return Claim("exact", "; ".join(reasons))
