"""`upcycle_experts`: the MLP of every layer becomes a mixture of experts (sparse upcycling, Komatsuzaki et al., 2023).

The output is a class of transformers that mixes experts, found by building it (`surgeon/edits/sparse/`). `form:
shared`: the base's MLP is an unchanged shared expert for every token; routed experts begin as copies of its gate and up
with an output matrix of zeros. They add exactly zero, whatever the router chooses. `form: copies`: every expert is the
base's MLP, and the weights of the chosen ones sum to one: Σ w_e FFN(x) = FFN(x), up to rounding. `fine_grained` is
virtual-group initialisation with weight scaling (He et al., 2024); fine-tunes as experts are Branch-Train-MiX
(Sukhbaatar et al., 2024); `attention: average` also averages attention as that paper does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from surgeon.blueprint.blueprint import Claim, OperationRecord
from surgeon.blueprint.draft import Draft, LayerDraft
from surgeon.blueprint.grafts import Graft
from surgeon.blueprint.recipes import (
    Constant,
    Copy,
    Imported,
    Noised,
    Prompted,
    Random,
    Recipe,
    Summed,
    columns,
    piled,
    repeated,
    rows,
)
from surgeon.checkpoint.header import FLOAT_DTYPES
from surgeon.common.formatting import show, show_layers
from surgeon.edits.sparse.dense import BESIDE, Dense, Mixture, NoTarget, Take, check_divides
from surgeon.edits.sparse.fit import dense_of, target_for
from surgeon.edits.sparse.plain_ffn import dense_sites, routed_tensors
from surgeon.edits.sparse.target import Made, Target
from surgeon.edits.sparse.targets import TARGETS
from surgeon.errors import BadInput, printable
from surgeon.operations.operation import Legend, OneOf, Operation, Paper, Spec, TrainingDefaults
from surgeon.operations.prepare import OpenedBase, Scale, check_fine_tune
from surgeon.operations.selectors import LayerSelector, select_layers
from surgeon.operations.sites import IN_SHARED, default_activation

_BALANCE = 0.01
# In a list of experts, this name means the base itself.
BASE = "base"
_ELSEWHERE = "by a plan of its own, before or after this one"


class Prompts(Spec):
    """Settings for router rows made from prompts: the inputs of the base's MLPs on the prompts."""

    prompts: Annotated[
        list[Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]],
        Field(description="for each expert prompts of what it is for"),
    ]
    negative_prompts: Annotated[
        list[list[Annotated[str, Field(min_length=1)]]] | None,
        Field(
            description="for each expert prompts of what it is not for, none with `[]`; what these have is taken away"
        ),
    ] = None


class UpcycleExperts(Operation):
    """Turn the MLP of every layer into a mixture of experts, in a class of transformers that engines know."""

    papers: ClassVar[tuple[Paper, ...]] = (
        Paper(
            "komatsuzaki2023sparse",
            "Komatsuzaki, Aran and Puigcerver, Joan and Lee-Thorp, James and others",
            "Sparse Upcycling: Training Mixture-of-Experts from Dense Checkpoints",
            2023,
            "2212.05055",
            "ICLR",
        ),
        Paper(
            "nakamura2025drop",
            "Nakamura, Taishi and Akiba, Takuya and Fujii, Kazuki and others",
            "Drop-Upcycling: Training Sparse Mixture of Experts with Partial Re-initialization",
            2025,
            "2502.19261",
            "ICLR",
        ),
        Paper(
            "he2024upcycling",
            "He, Ethan and Khattar, Abhinav and Prenger, Ryan and others",
            "Upcycling Large Language Models into Mixture of Experts",
            2024,
            "2410.07524",
        ),
        Paper(
            "sukhbaatar2024branch",
            "Sukhbaatar, Sainbayar and Golovneva, Olga and Sharma, Vasu and others",
            "Branch-Train-MiX: Mixing Expert LLMs into a Mixture-of-Experts LLM",
            2024,
            "2403.07816",
        ),
    )
    training: ClassVar[TrainingDefaults] = TrainingDefaults("ours, no paper's: experts and routers alone", lr=1e-4)
    grafts: ClassVar[tuple[str, ...]] = ("routed_experts",)
    legend: ClassVar[Mapping[str, Legend]] = {"E": Legend("routed experts beside the FFN (sparse upcycling)", 0)}
    examples: ClassVar[tuple[Mapping[str, object], ...]] = ({}, {"form": "copies"})

    op: Literal["upcycle_experts"]
    form: Annotated[
        Literal["shared", "copies"],
        Field(description="the base's MLP as an expert that every token passes, or copies of it that are chosen from"),
    ] = "shared"
    experts: Annotated[
        Annotated[int, Field(ge=2, le=1024)] | list[str],
        Field(
            description="how many experts begin as the base's MLP; or, with `form: copies`, the fine-tunes of the base"
            " whose MLPs they are: folders, seen from the plan, or Hub ids, and `base` for the base's"
        ),
    ] = 8
    top_k: Annotated[int, Field(ge=1, le=1024, description="how many of them a token takes")] = 2
    fine_grained: Annotated[
        int, Field(ge=1, le=64, description="cut each expert into so many, of which a token takes as many times more")
    ] = 1
    init: Annotated[
        Literal["copy", "noise", "drop_upcycling"],
        Field(
            description="what experts begin as: the base's MLP, that and noise, or that with neurons drawn at random"
        ),
    ] = "copy"
    noise_std: Annotated[
        float | None,
        Field(gt=0, le=1, description="`init: noise`: its standard deviation, 0.02 by default"),
    ] = None
    noise_share: Annotated[
        float | None,
        Field(
            gt=0,
            le=1,
            description="`init: noise`: the share of each expert's neurons that get it, 0.5 by default",
        ),
    ] = None
    drop: Annotated[
        float | None,
        Field(gt=0, le=1, description="`init: drop_upcycling`: the share of neurons drawn at random, 0.5 by default"),
    ] = None
    router: Annotated[
        Literal["random"] | Prompts, Field(description="what routers begin as: random rows, or rows by prompts")
    ] = "random"
    router_std: Annotated[
        float, Field(gt=0, le=1, description="the standard deviation of random rows; rows by prompts are as long")
    ] = 0.02
    balance: Annotated[
        float | None,
        Field(
            ge=0,
            le=10,
            description="coefficient of the loss that spreads tokens over experts (router_aux_loss_coef); default:"
            " 0.01 where the class has one, and beside the MLP",
        ),
    ] = None
    layers: Annotated[
        LayerSelector, Field(description="the layers whose MLP becomes a mixture; the others keep theirs")
    ] = "all"
    attention: Annotated[
        Literal["base", "average"],
        Field(description="with other models as `experts`: the base's attention, or the mean of all of them"),
    ] = "base"
    target: Annotated[
        str | None,
        OneOf(lambda: list(dict.fromkeys(target.model_type for target in TARGETS))),
        Field(description="model_type of the output; default: the first that holds the base"),
    ] = None

    @model_validator(mode="after")
    def _check(self) -> UpcycleExperts:
        """Check that the fields fit each other. Raises ValueError."""
        # Checked here and not by Field, because for a union pydantic reports the errors of every alternative.
        if not 2 <= self._count <= 1024:
            raise ValueError(f"`experts` is a list of {self._count}: give 2 to 1024")
        if isinstance(self.experts, list) and not all(name.strip() for name in self.experts):
            raise ValueError("`experts` has an empty name; write a folder, a Hub id, or `base`")
        if self.top_k > self._count:
            raise ValueError(f"`top_k: {self.top_k}` of {self._count} experts: a token cannot take more than there are")
        if isinstance(self.experts, list) and self.form == "shared":
            raise ValueError("`experts` of other models need `form: copies`: beside a shared expert they begin silent")
        for name in ("noise_std", "noise_share"):
            if getattr(self, name) is not None and self.init != "noise":
                raise ValueError(f"`{name}` has no meaning with `init: {self.init}`")
        if self.attention == "average" and isinstance(self.experts, int):
            raise ValueError("`attention: average` is of other models; list them in `experts`")
        if isinstance(self.router, Prompts) and len(self.router.prompts) != self._count:
            raise ValueError(
                f"`prompts` has {len(self.router.prompts)} lists for {self._count} experts; give one for each"
            )
        against = self.router.negative_prompts if isinstance(self.router, Prompts) else None
        if against is not None and len(against) != self._count:
            raise ValueError(
                f"`negative_prompts` has {len(against)} lists for {self._count} experts; give one for each, `[]` for"
                " none"
            )
        if self.drop is not None and self.init != "drop_upcycling":
            raise ValueError(f"`drop` has no meaning with `init: {self.init}`")
        return self

    @property
    def _count(self) -> int:
        """Return the number of experts before they are cut."""
        return self.experts if isinstance(self.experts, int) else len(self.experts)

    @property
    def _models(self) -> tuple[str, ...]:
        """Return the plan's names of the other models that serve as experts."""
        named = () if isinstance(self.experts, int) else self.experts
        return tuple(dict.fromkeys(name for name in named if name != BASE))

    def prepare(self, base: OpenedBase) -> None:
        """Open the other models that serve as experts; check for a tokenizer where routers are made from prompts.

        Raises BadInput where a model is no fine-tune of the base, or the tokenizer is missing.
        """
        for name in self._models:
            check_fine_tune(name, base.model(name), base.folder)
        if isinstance(self.router, Prompts):
            base.notes.append("the base is run on the prompts of the routers")
            if not any(name.startswith("tokenizer") for name in base.folder.side_files):
                raise BadInput(
                    f"{base.folder.source.shown}: no tokenizer, and routers are made of prompts; add its files"
                )

    def small(self, facts: None, scale: Scale) -> tuple[Operation, None]:
        """Return (operation, no facts) with random routers for a twin, which has no tokenizer.

        No promise depends on routers.
        """
        return self.model_copy(update={"router": "random"}), None

    def edit(self, draft: Draft, facts: None) -> OperationRecord:
        """Turn every layer's MLP into experts, and the config into the config of the class with experts.

        Where no class holds the base, the form is `shared` and the plan names no class, experts are added as grafts
        instead. Raises BadInput for a base or plan that cannot be upcycled, and NoTarget where no class fits otherwise.
        """
        number = draft.number
        _check(draft)
        mixture = Mixture(self.form, self._count, self.top_k, self.fine_grained)
        try:
            dense = _dense(draft)
            sparse = self._sparse(dense)
            plain = tuple(index for index in dense.holders if index not in sparse)
            mixture = replace(mixture, plain=plain)
            target = target_for(dense, mixture, self.target)
        except NoTarget:
            if self.form == "copies" or self.target is not None:
                raise
            return self._as_grafts(draft, mixture, number)
        mixture = replace(mixture, balance=self._balance(target))
        for index in dense.holders:
            layer, kept = draft.layers[index], index in plain
            made = target.plain_layer(dense) if kept else target.layer(dense, mixture)
            down = dense.source("down").suffix
            born = {each.suffix: self._recipe(each, layer, down, f"layers.{index}") for each in made}
            dropped = target.dropped(dense, plain=kept)
            stay = {s: recipe for s, recipe in layer.tensors.items() if s not in dropped}
            if self.attention == "average":
                whole = {s: Take(s, 0, r.shape[0]) for s, r in stay.items() if s.startswith("self_attn.")}
                born |= {s: self._mean(take, layer) for s, take in whole.items()}
            layer.tensors = stay | born
            layer.rewritten |= dict.fromkeys(born, number)
            if not kept:
                layer.init = f"{mixture.count} experts, top {mixture.chosen}"
        draft.converted = target.config(dense, mixture)
        return OperationRecord(
            op=self.op,
            matched=f"{len(sparse)} layers, {mixture.count} experts each, {mixture.chosen} a token, as"
            f" {target.architecture}{target.elsewhere}{self._amended(target, mixture)}"
            + (f"; {show_layers(list(plain))} keep their MLP" if plain else "")
            + ("; attention is the mean of all models'" if self.attention == "average" else ""),
            claim=self._claim(target, dense),
            trains="new",
        )

    def _sparse(self, dense: Dense) -> list[int]:
        """Return the layers that get experts. Raises BadInput where a chosen layer has no FFN."""
        chosen = select_layers(self.layers, len(dense.layers))
        lacking = next((index for index in chosen if index not in dense.holders), None)
        if lacking is not None and self.layers != "all":
            raise BadInput(f"layer {lacking} has no FFN; choose `layers` among {show(list(dense.holders))}")
        return [index for index in chosen if index in dense.holders]

    def _as_grafts(self, draft: Draft, mixture: Mixture, number: int) -> OperationRecord:
        """Add routed experts next to every MLP, as grafts whose code ships with the weights."""
        model_type = printable(str(draft.config.get("model_type")))
        found = dense_sites(draft, self.layers)
        balance = _BALANCE if self.balance is None else self.balance
        if balance:
            draft.settings["routed_loss"] = {"balance": balance}
        for index, ffn in found.items():
            check_divides(mixture, ffn.width)
            entry: dict[str, Any] = {"experts": mixture.count, "size": ffn.width // mixture.segments}
            entry |= {"top_k": mixture.chosen} | ffn.settings(default_activation(draft, index))
            made, layer = routed_tensors(ffn, mixture, draft.anatomy.sizes.hidden), draft.layers[index]
            tensors = {each.suffix: self._recipe(each, layer, ffn.down, f"layers.{index}") for each in made}
            layer.grafts.append(Graft("routed_experts", entry, tensors, number))
        alone = "; the weight of the one expert is its score, by which the router learns" if mixture.chosen == 1 else ""
        alone += self._amended_by(balance)
        return OperationRecord(
            op=self.op,
            matched=f"{len(found)} layers, {mixture.count} experts each, {mixture.chosen} a token, beside the"
            f" MLP by modules of surgeon's own, as no class of transformers holds a {model_type} with experts"
            f"{' in these layers alone' if len(found) < len(draft.layers) else ''}{alone}",
            claim=Claim("exact", "routed experts add exactly zero beside the base's MLP, whatever the router says"),
            trains="new",
        )

    def _balance(self, target: Target) -> float:
        """Return the coefficient of the balancing loss. Raises BadInput where the router would never learn."""
        if not target.balanced:
            if self.balance:
                raise BadInput(
                    f"`balance`: {target.architecture} has no balancing loss in transformers; leave it out, or choose"
                    " another `target`"
                )
            return 0.0
        balance = _BALANCE if self.balance is None else self.balance
        if self.top_k * self.fine_grained == 1 and not balance:
            raise BadInput(
                f"`top_k: 1` without `balance`: {target.architecture} gives the one expert the weight 1 whatever its"
                " router says, so the router would never get a gradient; give `balance`, or `top_k: 2`"
            )
        return balance

    def _amended(self, target: Target, mixture: Mixture) -> str:
        """Return words on settings that the plan did not ask for and that training needs; empty where it needs none."""
        if mixture.chosen == 1 and not target.balanced:
            return "; weights are not renormalised (norm_topk_prob: false), else the router would get no gradient"
        return self._amended_by(mixture.balance)

    def _amended_by(self, balance: float) -> str:
        """Return words on a balancing loss that the plan did not ask for; empty where it asked, or there is none."""
        if self.balance is None and balance:
            return f"; a balancing loss of {balance:g} is on, by which routers learn from the first step"
        return ""

    def _claim(self, target: Target, dense: Dense) -> Claim:
        """Return the claim: exact or rounding for a shared expert, rounding for equal copies, else none."""
        if self.form == "shared":
            zero = "routed experts add exactly zero beside the base's MLP, whatever the router says"
            if target.exact(dense):
                return Claim("exact", zero)
            return Claim(
                "rounding",
                f"{zero}; but gate and up are one matrix in {target.architecture if target.fused else 'the base'}"
                f" alone, and activations of half a matrix of {dense.width} neurons, no multiple of 32, are rounded"
                " otherwise",
            )
        if self._models:
            return Claim(
                "none", f"experts are the MLPs of {len(self._models)} other models, so what they compute differs"
            )
        if self.init != "copy":
            return Claim("none", f"experts differ from the base's MLP (init: {self.init}), so what they compute does")
        if self.fine_grained > 1:
            return Claim(
                "none",
                "segments of a copy have one router row, so they are chosen together and make up the base's MLP; where"
                " rounding gives a token one value for two copies, segments of both are chosen",
            )
        one = (
            "one expert of weight 1 (in bfloat16 to the bit so far)"
            if self.top_k == 1
            else f"{self.top_k} equal experts whose weights sum to 1"
        )
        return Claim("rounding", f"{one} compute what the base's MLP does, in another order of sums")

    def _recipe(self, made: Made, layer: LayerDraft, down: str, label: str) -> Recipe:
        """Return the recipe of one tensor of a layer; `down` is the suffix of its MLP's down projection."""
        key = f"{label}.{made.suffix}"
        dtype = layer.tensors[down].dtype
        match made.role:
            case "router":
                return self._router(made, key, dtype, layer)
            case "bias":
                return Constant(0.0, "F32", made.shape)
            case "idle":
                return Constant(0.0, dtype, made.shape)
            case "down" if self.form == "shared":
                return Constant(0.0, dtype, made.shape)
        cut = made.role == "down" and self.fine_grained > 1
        still = made.role == "kept"
        joined = _joined(made.takes, layer, made.shape, still=still)
        if still and self.attention == "average" and made.suffix.startswith("self_attn."):
            return self._mean(made.takes[0], layer)
        if still or made.role == "copied" or (self.init == "copy" and not cut and not self._models):
            return joined
        # Where one tensor holds all experts, make it matrix by matrix: gate and up of each expert in turn, or the
        # output.
        each = len(made.takes) // (self._count * self.fine_grained) or 1
        parts: list[Recipe] = []
        for nth, take in enumerate(made.takes):
            expert = nth // each if made.expert is None else made.expert
            matrix: Recipe = (whole := self._whole(take, layer, expert // self.fine_grained))
            if cut:
                assert isinstance(whole, Copy | Imported), take.suffix
                begin = expert % self.fine_grained * made.shape[-1]
                matrix = columns(whole, begin, begin + made.shape[-1], float(self.fine_grained))
            parts.append(self._born(matrix, made, f"{label}.experts.{expert}", f"{key}.{nth}"))
        return parts[0] if len(parts) == 1 else piled(parts, made.shape)

    def _whole(self, take: Take, layer: LayerDraft, copy: int) -> Copy | Imported:
        """Return rows of the MLP that expert `copy` begins as, from the base or another model."""
        source = layer.tensors[take.suffix]
        assert isinstance(source, Copy), take.suffix
        shape = (take.stop - take.start, *source.shape[1:])
        name = BASE if isinstance(self.experts, int) else self.experts[copy]
        if name == BASE:
            return rows([(source, take.start, take.stop)], shape, still=False)
        assert source.source is not None, take.suffix
        return Imported("model", name, source.source, source.dtype, shape, (take.start, take.stop))

    def _mean(self, take: Take, layer: LayerDraft) -> Recipe:
        """Return the mean of an attention tensor over all models that serve as experts."""
        return Summed(tuple(self._whole(take, layer, n) for n in range(self._count)), (1,) * self._count, self._count)

    def _born(self, matrix: Recipe, made: Made, expert: str, key: str) -> Recipe:
        """Return a matrix of one expert after `init`; random neurons are the same in the expert's three matrices."""
        match self.init:
            case "noise":
                # The defaults are Drop-Upcycling's baseline.
                share, std = self.noise_share or 0.5, self.noise_std or 0.02
                return Noised(matrix, f"{expert}.neurons", key, share, int(made.role == "down"), std)
            case "drop_upcycling":
                share = 0.5 if self.drop is None else self.drop
                return Noised(matrix, f"{expert}.neurons", key, share, int(made.role == "down"))
        return matrix

    def _router(self, made: Made, key: str, dtype: str, layer: LayerDraft) -> Recipe:
        """Return random router rows, or rows from prompts; segments of one copy share a row."""
        count, width = made.shape
        if isinstance(self.router, Prompts):
            prompts = tuple(map(tuple, self.router.prompts))
            against = tuple(map(tuple, self.router.negative_prompts or ()))
            assert layer.base is not None
            whole: Recipe = Prompted(
                prompts, layer.base, self.router_std * width**0.5, dtype, (len(prompts), width), against
            )
        elif self.form == "shared":
            return Random(key, self.router_std, dtype, made.shape)
        else:
            whole = Random(key, self.router_std, dtype, (count // self.fine_grained, width))
        return whole if self.fine_grained == 1 else repeated(whole, self.fine_grained)


def _joined(takes: Sequence[Take], layer: LayerDraft, shape: tuple[int, ...], *, still: bool) -> Copy:
    """Return rows of the layer's tensors, one piece below another; `still`: they do not train (`rows`)."""
    pieces: list[tuple[Copy, int, int]] = []
    for take in takes:
        source = layer.tensors[take.suffix]
        assert isinstance(source, Copy), take.suffix
        pieces.append((source, take.start, take.stop))
    return rows(pieces, shape, still=still)


def _check(draft: Draft) -> None:
    """Raise BadInput for a base or a plan that cannot be upcycled."""
    if draft.dropped or any(layer.base is None or layer.rewritten for layer in draft.layers):
        raise BadInput(f"an earlier operation of this plan changes layers; apply it {_ELSEWHERE}")
    if draft.bank is not None or any(layer.grafts for layer in draft.layers):
        raise BadInput(
            "the model carries grafts, for which no class of transformers that mixes experts has a place; merge or"
            " revert them first"
        )
    odd = next((r for layer in draft.layers for r in layer.tensors.values() if r.dtype not in FLOAT_DTYPES), None)
    if isinstance(odd, Copy) and odd.source is not None:
        raise BadInput(
            f"{printable(odd.source)}: quantised ({odd.dtype}), and experts are to train; operate on the full-precision"
            " weights and quantise the output"
        )


def _dense(draft: Draft) -> Dense:
    """Return the base as classes with experts see it. Raises NoTarget where none could hold its layers."""
    if (further := next(iter(draft.anatomy.further), None)) is not None:
        raise NoTarget(
            f"{printable(further)}: layers that predict further tokens have an MLP of their own; take these out, or"
            f" {BESIDE}"
        )
    if "text_config" in draft.config:
        raise NoTarget(f"the layers stand in a larger model; take the text out first (`extract_text`), or {BESIDE}")
    if draft.anatomy.shared:
        raise NoTarget(
            f"{printable(draft.anatomy.shared[0])}: {IN_SHARED}, and no class known here has experts in such a block;"
            " use gated_adapters, or a dense model whose layers share none"
        )
    layers = [{suffix: recipe.shape for suffix, recipe in layer.tensors.items()} for layer in draft.layers]
    return dense_of(draft.config, layers, draft.anatomy.layer_name(0, "").removesuffix("0."))
