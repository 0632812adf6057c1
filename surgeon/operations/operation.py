"""The base class of operations: an entry of a plan that edits the draft, with all facts that other modules need.

Every fact about an operation is in its class: its papers, its training settings, the bases it accepts, the grafts it
attaches. No code outside this folder asks which operation it has.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from surgeon.anatomy.anatomy import Anatomy
from surgeon.blueprint.blueprint import OperationRecord
from surgeon.blueprint.draft import Draft
from surgeon.common.schema import Bounded
from surgeon.operations.prepare import Facts, OpenedBase, Scale

Schedule = Literal["cosine", "linear", "constant"]

# How a picture of the stack shows a new layer.
Origin = Literal["copied", "fused", "made"]


@dataclass(frozen=True)
class Paper:
    """One entry of a bibliography; `arxiv` is empty where there is no preprint."""

    key: str
    authors: str
    title: str
    year: int
    arxiv: str = ""
    venue: str = ""

    @property
    def bibtex(self) -> str:
        """Return the BibTeX entry."""
        fields = {"author": self.authors, "title": f"{{{self.title}}}", "year": str(self.year)}
        if self.arxiv:
            fields |= {"eprint": self.arxiv, "archivePrefix": "arXiv", "url": f"https://arxiv.org/abs/{self.arxiv}"}
        kind = "misc"
        if self.venue:
            kind, fields["booktitle"] = "inproceedings", self.venue
        return "\n".join([f"@{kind}{{{self.key},", *(f"  {name} = {{{text}}}," for name, text in fields.items()), "}"])


@dataclass(frozen=True)
class TrainingDefaults:
    """The settings with which a paper trained its operation; train.yaml can override all of them.

    `lr` is the peak and `min_lr` the final rate; `warmup` is a share (0 to 1) of the steps; `betas` are
    AdamW's; `weight_decay` is AdamW's coefficient, to which `decay_of_rate` · `lr` is added; `clip` bounds the
    gradient's norm; `original_share` is the share of original text mixed in (p). Where a paper gives no value, it is
    transformers' default or, for warm-up, 3 % of the steps. Rates are such that a run of some 20,000 tokens learns;
    `source` states which values are the paper's.
    """

    source: str
    lr: float
    min_lr: float = 0.0
    schedule: Schedule = "cosine"
    warmup: float = 0.03
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    decay_of_rate: float = 0.0
    clip: float = 1.0
    original_share: float = 0.0


@dataclass(frozen=True)
class Legend:
    """A graft's entry in the legend of the report's picture; `colour` is one of the page's six, 0 to 5."""

    words: str
    colour: int


@dataclass(frozen=True)
class OneOf:
    """A marker for a string field; `options` is called each time that a value is checked, as plugins may add to it."""

    options: Callable[[], Iterable[str]]

    def check(self, value: str) -> str:
        """Return the value. Raises the error of a `Literal` where it is none of the options."""
        options = list(self.options())
        if value in options:
            return value
        expected = ", ".join(f"'{option}'" for option in options)
        raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the field's own schema, followed by `check`."""
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the field's JSON schema, with the options of this moment as its values."""
        return {"enum": [*self.options()]} | handler(schema)


class Spec(Bounded):
    """A part of a plan as written: types are strict, unknown keys are refused, and it is immutable."""

    @classmethod
    def key(cls, field: str) -> str:
        """Return the only value that `field` (`op`, `kind`) can have in this spec: its name in plans."""
        (value,) = get_args(cls.model_fields[field].annotation)
        return str(value)


# The number of new neurons in a twin: a multiple of what kernels take at once.
NEURONS = 64


class Operation(Spec):
    """One entry of a plan's `operations`. A subclass gives `op` its one value, describes every field, and edits."""

    # The papers that describe it.
    papers: ClassVar[tuple[Paper, ...]] = ()
    # The settings with which its paper trained it.
    training: ClassVar[TrainingDefaults]
    # Whether it accepts encoders; every operation accepts decoders.
    on_encoders: ClassVar[bool] = False
    # The kinds of grafts that it attaches to a model without any.
    grafts: ClassVar[tuple[str, ...]] = ()
    # The report's legends of those grafts, by the first letter of each graft's sign.
    legend: ClassVar[Mapping[str, Legend]] = {}
    # How pictures show its new layers, by the first word of their `init`; other words mean `made`.
    origins: ClassVar[Mapping[str, Origin]] = {"copy": "copied"}
    # Advice for messages: what to do where a twin of the output breaks the promise.
    way_on: ClassVar[str] = "use another operation, or another base"
    # Plan entries, without `op`, that fit any base: `surgeon families BASE` tries them.
    examples: ClassVar[tuple[Mapping[str, object], ...]] = ({},)

    # The type that `prepare` returns, for an operation that needs more than headers and config.
    facts: ClassVar[type[Facts] | None] = None

    op: str

    def prepare(self, base: OpenedBase) -> Facts | None:
        """Gather what `edit` needs in addition to headers and config, as an instance of `facts`.

        Called once, before any operation edits the draft, so the facts are about the base itself. Notes and side files
        are added to `base`. Raises BadInput; the caller adds file, line and operation.
        """
        return None

    @abstractmethod
    def edit(self, draft: Draft, facts: Any) -> OperationRecord:
        """Change the draft; `draft.number` is the operation's place in the plan.

        Args:
            draft: the model as the operations before this one left it.
            facts: what `prepare` returned, or what surgery.json keeps of it; None where neither exists.

        Returns what the selectors matched, what is promised and what trains. Raises BadInput for what this model does
        not allow; the caller adds file, line and operation.
        """

    def small(self, facts: Any, scale: Scale) -> tuple[Operation, Facts | None]:
        """Return (operation, facts) for a small twin of the base.

        The plan is tried on the twin before it is carried out. Sizes, tokens or texts that only the base has are
        replaced by the twin's own.
        """
        return self, None if facts is None else facts.small(scale)

    @property
    def has_facts(self) -> bool:
        """Return whether this entry has facts: surgery.json then keeps what `prepare` returned."""
        return self.facts is not None

    def with_adapters(self, facts: Any, names: Sequence[str], anatomy: Anatomy) -> Callable[[Any], Any] | None:
        """Return a function that turns the loaded base into the expected output model, by PEFT.

        Args:
            facts: what surgery.json keeps.
            names: folders of adapters, in the plan's order.
            anatomy: the base's.

        Returns None where the operation merges no adapters. Raises BadInput where `names` are not the adapters that it
        merged.
        """
        return None

    @classmethod
    def papers_for(cls, inits: Iterable[str]) -> tuple[Paper, ...]:
        """Return the papers to cite where it made new layers by these `inits` (as the manifest calls them)."""
        return cls.papers

    @classmethod
    def origin_of(cls, init: str) -> Origin:
        """Return how pictures show a new layer with this `init` (as the manifest calls it)."""
        return cls.origins.get(word_of(init), "made")

    @property
    def transport_settings(self) -> Mapping[str, object] | None:
        """Return its optimal-transport settings (keywords of `TransportSettings`); None where it uses no transport."""
        return None

    @property
    def attaches(self) -> bool:
        """Return whether it attaches grafts, which need classes that surgeon ships."""
        return bool(self.grafts)

    @property
    def needs_task_ids(self) -> bool:
        """Return whether its loss needs the task of every token (task k is slot k)."""
        return False


def word_of(init: str) -> str:
    """Return the first word of a manifest's `init`: `copy` of `copy, zero-init`; empty for an empty one."""
    return init.partition(",")[0].partition(" ")[0]
