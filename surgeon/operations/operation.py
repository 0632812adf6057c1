"""What every operation is: a part of a plan that edits the draft, and what the rest of the house asks of it.

A fact about an operation is in its class: its papers, what it was trained with, what bases it takes, which grafts
it attaches. Nothing outside this folder asks which operation it has before it.
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

# What a new layer is to who looks at a picture of the stack.
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
        """The entry."""
        fields = {"author": self.authors, "title": f"{{{self.title}}}", "year": str(self.year)}
        if self.arxiv:
            fields |= {"eprint": self.arxiv, "archivePrefix": "arXiv", "url": f"https://arxiv.org/abs/{self.arxiv}"}
        kind = "misc"
        if self.venue:
            kind, fields["booktitle"] = "inproceedings", self.venue
        return "\n".join([f"@{kind}{{{self.key},", *(f"  {name} = {{{text}}}," for name, text in fields.items()), "}"])


@dataclass(frozen=True)
class TrainingDefaults:
    """What a paper trained its operation with; train.yaml can override all of it.

    `lr` is the peak, `min_lr` what it ends at; `warmup` is a number of steps or a share (0 to 1) of them; `betas` are
    AdamW's; `weight_decay` is AdamW's coefficient, to which `decay_of_rate` · `lr` is added; `clip` bounds the
    gradient's norm; `batch` counts sequences of `length` tokens; `original_share` is the share of original text mixed
    in (p). Where a paper does not say, the value is transformers' or, for warm-up, 3 % of the steps; `source` says
    which is which.
    """

    source: str
    lr: float
    min_lr: float = 0.0
    schedule: Schedule = "cosine"
    warmup: int | float = 0.03
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    decay_of_rate: float = 0.0
    clip: float = 1.0
    batch: int = 64
    length: int = 2048
    original_share: float = 0.0


@dataclass(frozen=True)
class Legend:
    """How the report's picture of the stack explains a graft's letter; `colour` is one of the page's six, 0 to 5."""

    words: str
    colour: int


@dataclass(frozen=True)
class OneOf:
    """Marks a string field; `options` is asked when a value is checked, as plugins may add to it."""

    options: Callable[[], Iterable[str]]

    def check(self, value: str) -> str:
        """The value; the error of a `Literal` where it is none of the options."""
        options = list(self.options())
        if value in options:
            return value
        expected = ", ".join(f"'{option}'" for option in options)
        raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"enum": [*self.options()]} | handler(schema)


class Spec(Bounded):
    """A part of a plan as written: types are strict, an unknown key is refused, nothing changes once it is read."""

    @classmethod
    def key(cls, field: str) -> str:
        """The one value that `field` (`op`, `kind`) has in this spec: its name in plans."""
        (value,) = get_args(cls.model_fields[field].annotation)
        return str(value)


# Of what is new in a twin: a multiple of what kernels take at once.
NEURONS = 64


class Operation(Spec):
    """One entry of a plan's `operations`. A subclass gives `op` its one value, describes every field, and edits."""

    # The papers it comes from.
    papers: ClassVar[tuple[Paper, ...]] = ()
    # What its paper trained it with.
    training: ClassVar[TrainingDefaults]
    # Whether it takes encoders; every operation takes decoders.
    on_encoders: ClassVar[bool] = False
    # Kinds of the grafts that it attaches to a model which has none.
    grafts: ClassVar[tuple[str, ...]] = ()
    # How the report explains those grafts, by the letter that each one's sign begins with.
    legend: ClassVar[Mapping[str, Legend]] = {}
    # What its new layers are, by the word that their `init` begins with; by another word they are `made`.
    origins: ClassVar[Mapping[str, Origin]] = {"copy": "copied"}
    # Entries of a plan, without `op`, that any base may be asked to take: `surgeon families BASE` tries them.
    examples: ClassVar[tuple[Mapping[str, object], ...]] = ({},)

    # What `prepare` returns, for an operation that needs more than headers and config.
    facts: ClassVar[type[Facts] | None] = None

    op: str

    def prepare(self, base: OpenedBase) -> Facts | None:
        """Find out what `edit` needs beside headers and config, as an instance of `facts`.

        Called once, before any operation edits the draft, so the facts are about the base itself. Notes and side files
        go to `base`. Raises BadInput; the caller adds file, line and operation.
        """
        return None

    @abstractmethod
    def edit(self, draft: Draft, facts: Any) -> OperationRecord:
        """Change the draft; `draft.number` is the operation's place in the plan.

        Args:
            draft: the model as the operations before this one left it.
            facts: what `prepare` returned, or what surgery.json keeps of it; None where neither is there.

        Returns what the selectors matched, what is promised and what trains. Raises BadInput for what this model
        does not allow; the caller adds file, line and operation.
        """

    def small(self, facts: Any, scale: Scale) -> tuple[Operation, Facts | None]:
        """The same operation and its facts for a small twin of the base, on which the plan is tried before it is
        carried out: where they name sizes, tokens or texts that only the base has, such as the twin has.
        """
        return self, None if facts is None else facts.small(scale)

    @property
    def has_facts(self) -> bool:
        """Whether it has facts, as the plan writes it: surgery.json then keeps those that `prepare` returned."""
        return self.facts is not None

    def with_adapters(self, facts: Any, names: Sequence[str], anatomy: Anatomy) -> Callable[[Any], Any] | None:
        """Return what makes of the loaded base a model that computes what the output must, by PEFT.

        Args:
            facts: what surgery.json keeps.
            names: folders of adapters, in the plan's order.
            anatomy: the base's.

        None: it merges no adapters. Raises BadInput where these are not those that it merged.
        """
        return None

    @classmethod
    def papers_for(cls, inits: Iterable[str]) -> tuple[Paper, ...]:
        """The papers to cite where it made new layers by these `inits` (as the manifest calls them)."""
        return cls.papers

    @classmethod
    def origin_of(cls, init: str) -> Origin:
        """What a new layer with this `init` (as the manifest calls it) is to who looks at a picture of the stack."""
        return cls.origins.get(word_of(init), "made")

    @property
    def way_on(self) -> str:
        """Why a twin of the base may show that the promise would not hold, and what to do then."""
        return "use another operation, or another base"

    @property
    def transport_settings(self) -> Mapping[str, object] | None:
        """How it solves optimal transport between layers (keywords of `TransportSettings`); None where it does not."""
        return None

    @property
    def attaches(self) -> bool:
        """Whether it attaches grafts, which need classes that surgeon ships."""
        return bool(self.grafts)

    @property
    def needs_task_ids(self) -> bool:
        """Whether its loss asks of every token which task it belongs to, task k being slot k."""
        return False


def word_of(init: str) -> str:
    """What a manifest's `init` of a layer begins with: `copy` of `copy, zero-init`; empty for an empty one."""
    return init.partition(",")[0].partition(" ")[0]
