"""`insert_layers`: new layers between the base's layers (OpT-DeUS, LLaMA PRO and the inits they compare).

With `zero_init` the projections that write to the residual stream are zero (in families with post-norms: the scale of
those norms), so that the grown model computes what the base computes, to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from surgeon.anatomy.anatomy import LayerKind
from surgeon.blueprint.blueprint import Claim, OperationRecord
from surgeon.blueprint.draft import Draft, LayerDraft, silence
from surgeon.common.formatting import show_layers
from surgeon.common.schema import Many
from surgeon.errors import BadInput, printable
from surgeon.operations.expert_fusion import of_experts
from surgeon.operations.inits import INITS, AnyInit, Gap
from surgeon.operations.operation import Operation, Origin, Paper, TrainingDefaults, word_of
from surgeon.operations.prepare import Facts, OpenedBase, digest_of_file
from surgeon.operations.selectors import After, EveryPeriod, Least, WrittenGaps, select_gaps, select_periods, spread

ADEPT = Paper(
    "zhang2025adept",
    "Zhang, Jinyang and others",
    "ADEPT: Continual Pretraining via Adaptive Expansion and Dynamic Decoupled Tuning",
    2025,
    "2510.10071",
)
# The manifest's mark of layers whose place a text chose.
_LEAST = ", after least"
_Finite = Annotated[float, Field(allow_inf_nan=False)]


class LeastFacts(Facts):
    """The layers of the base that matter least on a text, above which the new ones are inserted.

    `gaps` are these layers. `before` is the base's loss in nats per token over `tokens` predictions; `scores` are the
    values by which layers were chosen, by layer number, from the bottom up.
    """

    gaps: list[Annotated[int, Field(ge=0)]]
    text: str
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    tokens: Annotated[Many, Field(ge=1)]
    before: _Finite
    scores: dict[Annotated[str, Field(pattern=r"^[0-9]{1,4}$")], _Finite]


class InsertLayers(Operation):
    """Insert layers between the base's layers: fused by optimal transport, averaged, copied or random."""

    papers = tuple(dict.fromkeys([*(init.paper for init in INITS.values()), ADEPT]))
    training = TrainingDefaults(
        "1e-4, 64 sequences of 2048, as OpT-DeUS trained its inits and those it compares (section 5.5; 11.5B: 5e-5);"
        " the rate is ours, for small runs",
        lr=1e-3,
    )
    origins: ClassVar[Mapping[str, Origin]] = {kind: init.origin for kind, init in INITS.items()}

    examples = (
        {"where": {"every": 1}, "init": {"kind": "copy"}},
        {"where": {"every_period": 1}, "init": {"kind": "copy"}},
        {"where": "all", "init": {"kind": "average"}},
        {"where": "all", "init": {"kind": "ot_fusion"}},
    )
    facts = LeastFacts
    way_on = "choose other places, or `zero_init: false` to go without the promise"

    op: Literal["insert_layers"]
    where: Annotated[WrittenGaps, Field(description="the gaps to fill, each named by the layer below it")]
    count: Annotated[
        int | None,
        Field(
            ge=1,
            description="number of new layers in all; spread evenly where there are more gaps; default: all gaps",
        ),
    ] = None
    per_gap: Annotated[int, Field(ge=1, description="new layers in each gap (LLaMA PRO's p)")] = 1
    init: Annotated[AnyInit, Field(description="how a new layer is made: a kind with its settings, or its name alone")]
    zero_init: Annotated[bool, Field(description="write nothing to the residual stream at birth")] = True

    @model_validator(mode="after")
    def _whole_periods(self) -> Self:
        """Check that `every_period` and `least` are not combined with fields that have no meaning there.

        Raises ValueError.
        """
        if isinstance(self.where, EveryPeriod):
            if self.per_gap != 1:
                raise ValueError("`per_gap` has no meaning with `every_period`: each gap gets a whole period")
            if self.init.reads_above:
                others = " or ".join(name for name, init in INITS.items() if not init.reads_above)
                raise ValueError(
                    f"init {self.init.kind} is made from both sides of a gap, a whole period from the one below it:"
                    f" with `every_period` use {others}"
                )
        if isinstance(self.where, Least) and self.count is not None:
            raise ValueError("`count` has no meaning with `least`, which says how many layers are chosen")
        return self

    @classmethod
    def papers_for(cls, inits: Iterable[str]) -> tuple[Paper, ...]:
        """Return the papers of the inits that were used, and ADEPT where a text chose the place."""
        inits = list(inits)
        words = {word_of(init) for init in inits}
        adept = (ADEPT,) if any(init.endswith(_LEAST) for init in inits) else ()
        return tuple(dict.fromkeys([*(init.paper for kind, init in INITS.items() if kind in words), *adept]))

    @property
    def transport_settings(self) -> Mapping[str, object] | None:
        """Return the optimal-transport settings of the init."""
        return self.init.transport_settings

    def prepare(self, base: OpenedBase) -> LeastFacts | None:
        """Find the layers that matter least on a text, where `where` asks for them; otherwise return None.

        Raises BadInput where the weights are not at hand, another operation comes first, or the text is too short.
        """
        where = self.where
        if not isinstance(where, Least):
            return None
        base.need_weights("which layers matter least")
        if base.number:
            raise BadInput(
                "layers are measured on a text with the base itself: make it the plan's first operation, or apply two"
                " plans"
            )
        total = base.anatomy.sizes.layers
        lowest, highest = self.init.reads_below(self.per_gap) - 1, total - 1 - self.init.reads_above
        choices = range(lowest, highest + 1)
        if where.least > len(choices):
            raise BadInput(
                f"`least` {where.least}: init {self.init.kind} fits after only {len(choices)} of the {total} layers;"
                " give fewer"
            )
        # This import loads torch and transformers.
        from surgeon.models.depth import Depth

        path, kinds = base.text(where.text), [base.anatomy.pattern[layer] for layer in range(total)]
        vocabulary = base.anatomy.sizes.vocabulary
        depth = Depth.of(
            base.folder,
            path,
            kinds,
            vocabulary=vocabulary,
            window=where.window,
            windows=where.windows,
            listener=base.listener,
        )
        scores = depth.costs(choices) if where.by == "loss" else {n: depth.first.influence[n] for n in choices}
        if where.least > len(scores):
            raise BadInput(
                f"`least` {where.least}: only {len(scores)} of {total} layers can be taken out for a measurement by"
                " loss; give fewer, or `by: influence`"
            )
        return LeastFacts(
            gaps=sorted(sorted(scores, key=lambda layer: (scores[layer], layer))[: where.least]),
            text=where.text,
            sha256=digest_of_file(path),
            tokens=depth.predictions,
            before=depth.before,
            scores={str(layer): score for layer, score in scores.items()},
        )

    @property
    def has_facts(self) -> bool:
        """Return whether layers are measured on a text."""
        return isinstance(self.where, Least)

    def edit(self, draft: Draft, facts: LeastFacts | None) -> OperationRecord:
        """Insert the layers and return what was matched and what is promised."""
        each, gaps = self._gaps(draft, facts)
        self._check_gaps(gaps, top=len(draft.layers) - 1)
        inserted = {gap: [self._layer(draft, draft.number, gap, nth, each) for nth in range(each)] for gap in gaps}
        anatomy, new = draft.anatomy, [made for layers in inserted.values() for made in layers]
        kinds = [anatomy.kinds[anatomy.kind_of[made.like]].opened for made in new]
        alike = {made.like: kind for made, kind in zip(new, kinds, strict=True)}
        ways = dict.fromkeys(self.init.ways(anatomy, like, self._zeroed(kind)) for like, kind in alike.items())
        draft.insert(inserted)
        return OperationRecord(
            op=self.op,
            matched="; ".join(
                [f"{len(new)} new layers{self._periods(each)}, after {show_layers(gaps)}{self._chosen(facts)}"]
                + [way for way in ways if way]
            ),
            claim=self._claim(kinds),
            trains="new",
        )

    def _gaps(self, draft: Draft, facts: LeastFacts | None) -> tuple[int, list[int]]:
        """Return (each, gaps): how many layers each gap gets, and the gaps, ascending.

        Raises BadInput where `least` has no facts, `count` is no multiple of `each`, or the selector matches too few
        gaps.
        """
        each, called = self.per_gap, "`per_gap`"
        if isinstance(self.where, Least):
            if facts is None or len(facts.gaps) != self.where.least:
                raise BadInput("which layers matter least is not known: it is measured on the base's own weights")
            return each, select_gaps(After(after=facts.gaps), len(draft.layers))
        if isinstance(self.where, EveryPeriod):
            each, gaps = select_periods(self.where, draft.pattern)
            called = "the period,"
        else:
            gaps = select_gaps(self.where, len(draft.layers))
        if self.count is None:
            return each, gaps
        if self.count % each:
            raise BadInput(f"`count` {self.count} is not a multiple of {called} {each}")
        return each, spread(gaps, self.count // each)

    def _periods(self, each: int) -> str:
        """Return words for `matched` about whole periods; empty without `every_period`."""
        if not isinstance(self.where, EveryPeriod):
            return ""
        return f" in whole periods of {each} {'layer' if each == 1 else 'layers'}"

    def _chosen(self, facts: LeastFacts | None) -> str:
        """Return words for `matched` on how a text chose the gaps; empty where none did."""
        if not isinstance(self.where, Least) or facts is None:
            return ""
        scores = [facts.scores[str(gap)] for gap in facts.gaps if str(gap) in facts.scores]
        found = ", ".join(f"{score:+.4f}" for score in scores)
        what = "loss without them, nats a token" if self.where.by == "loss" else "influence"
        return f", which matter least on {printable(facts.text)} ({what}: {found})"

    def _check_gaps(self, gaps: list[int], *, top: int) -> None:
        """Raise BadInput for gaps without all the layers around them that the init reads."""
        kind = self.init.kind
        others = " or ".join(name for name, init in INITS.items() if not init.reads_above)
        if self.per_gap > 1 and self.init.reads_above:
            raise BadInput(f"`per_gap` {self.per_gap} with init {kind} would make equal layers; use {others}")
        if self.init.reads_above and top in gaps:
            raise BadInput(
                f"init {kind} needs a layer above; after the top layer {top} there is none: leave that gap out of"
                f" `where`, or use {others}"
            )
        below = self.init.reads_below(self.per_gap)
        if gaps[0] + 1 < below:
            raise BadInput(
                f"init {kind} with `per_gap` {self.per_gap} needs {below} layers below each gap; after layer {gaps[0]}"
                f" there are only {gaps[0] + 1}"
            )

    def _layer(self, draft: Draft, number: int, gap: int, nth: int, each: int) -> LayerDraft:
        """Return new layer `nth` of the `each` layers in a gap."""
        label = f"operations[{number}].after[{gap}].{nth}"
        per_gap = self.per_gap
        if isinstance(self.where, EveryPeriod):
            # Each layer of a new period is made as in its own gap, above the layer that it repeats.
            gap, nth, per_gap = gap - each + 1 + nth, 0, 1
        # A fused layer takes the attention type of the layer below it; at birth it writes nothing either way.
        source = gap - per_gap + 1 + nth if self.init.reads_below(per_gap) > 1 else gap
        zeroed = self._zeroed(draft.kind_of(source).opened)
        made = self.init.make(Gap(draft, gap, nth, per_gap, label, zeroed))
        like = made.sources[0] if made.sources else gap
        kind = draft.kind_of(like)
        return LayerDraft(
            tensors=silence(made.tensors, kind.opened) if self.zero_init else made.tensors,
            opened=bool(kind.packed) or draft.layers[like].opened,
            base=None,
            like=draft.layers[like].like,
            operation=number,
            sources=made.sources,
            init=self.init.kind
            + (", zero-init" if self.zero_init else "")
            + (_LEAST if isinstance(self.where, Least) else ""),
        )

    def _zeroed(self, kind: LayerKind) -> frozenset[str]:
        """Return the suffixes whose tensors a constant replaces; none without `zero_init`."""
        return frozenset(kind.silence) if self.zero_init else frozenset()

    def _claim(self, kinds: Sequence[LayerKind]) -> Claim:
        """Return the claim: exact with `zero_init`, and which tensors of these kinds are silenced; otherwise none."""
        if not self.zero_init:
            return Claim("none", f"the new layers ({self.init.kind}) write to the residual stream from the start")
        values = {of_experts(suffix): value for kind in kinds for suffix, value in kind.silence.items()}
        silenced = [name for name, value in values.items() if value != 1.0]
        scales = [name for name, value in values.items() if value == 1.0]
        what = "have effective scale zero" if any("norm" in name for name in silenced) else "are zero"
        words = [f"{', '.join(silenced)} {what}"] * bool(silenced) + [f"{', '.join(scales)} = 1"] * bool(scales)
        return Claim("exact", f"new layers add exactly zero to the residual stream: {', '.join(words)}")
