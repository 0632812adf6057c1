"""study.yaml: what is compared (methods, and how each is kept from forgetting), on what text, at which rates and seeds.

A strict schema; nothing unknown gets through, and what can be refused before the first run is.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from surgeon.common.yaml import Place, check_yaml, did_you_mean, editor_schema, keys_by_section, parse_yaml, read_text
from surgeon.common.yaml import where as place_of
from surgeon.data.documents import files_of
from surgeon.data.sources import absent
from surgeon.data.specs import Entry, GenerateSpec
from surgeon.errors import BadInput, Mistakes, bad_input, printable
from surgeon.operations.domain_gate import DomainGate
from surgeon.plan.plan import LoadedPlan, load_plan
from surgeon.plan.shipped import find_plan, shipped_studies
from surgeon.train.config import SHARE_TOLERANCE, CachedSpec, LoraSpec, OptimizerSpec, PreserveSpec, first_doubled
from surgeon.train.outside import AttentionName

_WHAT = "study"
_NEEDS = "`surgeon_study: 1` and `methods:`"
_NAME = r"^[A-Za-z0-9_.-]{1,60}$"
_NAMED = re.compile(r"([A-Za-z0-9_-]{1,60})=(.+)", re.S)

# Every comparison has these; what a study leaves out of them is added.
PEERS = ("full", "lora", "partial")
# A frontier has at least so many rates, and neighbours are about this far apart.
FEWEST_RATES = 4
_NEAREST, _FARTHEST = 1.5, 4.0


class StudyText(Entry):
    """A text of a study."""

    path: Annotated[
        str,
        Field(min_length=1, description="file (.jsonl, .json, .txt, .parquet), folder of them, or dataset:USER/NAME"),
    ]
    name: Annotated[
        str | None, Field(pattern=r"^[A-Za-z0-9_-]{1,60}$", description="name in results; default: the file's")
    ] = None
    share: Annotated[
        float | None,
        Field(gt=0, le=1, description="of its kind's sequences; default: by the files' sizes"),
    ] = None
    kind: Annotated[Literal["text", "chat"], Field(description="text, or chat: the assistant's words alone count")] = (
        "text"
    )
    field: Annotated[str | None, Field(description="key of the text or the messages")] = None
    validation: Annotated[
        float | str,
        Field(description="what losses are measured on: a share of the documents, held out, or a file of its own"),
    ] = 0.1

    @property
    def called(self) -> str:
        """Its name; by default the file's."""
        return self.name or re.sub(r"[^A-Za-z0-9_-]", "_", Path(self.path).name.partition(".")[0])[:60] or "text"

    @model_validator(mode="after")
    def _held_out(self) -> StudyText:
        if isinstance(self.validation, float) and not 0 < self.validation < 1:
            raise ValueError(
                "validation must be a share above 0 and below 1, or a file: losses are compared on held-out text"
            )
        return self


class ReplaySpec(Entry):
    """Text of what the base knows, mixed into training."""

    source: Annotated[
        Literal["text", "recall"],
        Field(description="text: `replayed`, or where there is none `original`; recall: what the base wrote itself"),
    ] = "recall"
    share: Annotated[float, Field(gt=0, lt=1, description="of the training sequences")] = 0.1


class Remedy(Entry):
    """How forgetting is held off while a method trains; every method is tried with every remedy."""

    name: Annotated[str, Field(pattern=_NAME, description="name in results")]
    replay: Annotated[ReplaySpec | None, Field(description="default: nothing is replayed")] = None
    preserve: Annotated[PreserveSpec | None, Field(description="the base teaches, as in a training config")] = None
    rates: Annotated[list[float] | None, Field(min_length=1, description="instead of the method's")] = None

    @model_validator(mode="after")
    def _has_what_it_teaches_on(self) -> Remedy:
        if self.preserve is not None and self.preserve.on == "original" and self.replay is None:
            raise ValueError(
                f"remedy {self.name}: `preserve` teaches on original text, and nothing is replayed; add `replay: {{}}`,"
                " or `on: all`"
            )
        return self


class Partial(Entry):
    """Whole layers of the base that train, all else being frozen."""

    every: Annotated[int, Field(ge=1, le=1000, description="every so manyth layer, counted from the bottom")] = 4


class TrainSettings(Entry):
    """How runs train; the same for all of a study unless a method says otherwise."""

    optimizer: OptimizerSpec | None = None
    micro_batch: Annotated[int | None, Field(ge=1, description="sequences at a time")] = None
    packing: Annotated[
        Literal["isolated", "joined"] | None, Field(description="whether attention stays within documents")
    ] = None
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32"] | None, Field(description="of the model while it trains")
    ] = None
    attention: Annotated[AttentionName | None, Field(description="attention implementation")] = None
    checkpointing: Annotated[bool | None, Field(description="recompute activations, to save memory")] = None
    cross_entropy: Annotated[
        Literal["auto", "torch", "chunked", "liger"] | None, Field(description="as in a training config")
    ] = None

    @model_validator(mode="after")
    def _no_rate(self) -> TrainSettings:
        if self.optimizer is not None and (self.optimizer.lr is not None or self.optimizer.min_lr is not None):
            raise ValueError("`lr` and `min_lr` come from the study's `rates`: leave them out")
        return self


class MethodSpec(Entry):
    """One way to learn: a plan whose new tensors train, or a way to train the base as it is."""

    name: Annotated[
        str | None, Field(pattern=_NAME, description="name in results; default: the plan's, or what it is")
    ] = None
    label: Annotated[str | None, Field(min_length=1, max_length=80, description="words in results")] = None
    plan: Annotated[str | None, Field(min_length=1, description="name of a shipped plan, or a plan's file")] = None
    full: Annotated[
        Literal[True] | None,
        Field(description="full fine-tuning: every tensor of the base trains; with a plan, every one of what it grew"),
    ] = None
    lora: Annotated[LoraSpec | None, Field(description="LoRA on the base")] = None
    partial: Annotated[Partial | None, Field(description="some layers of the base train")] = None
    rates: Annotated[list[float] | None, Field(min_length=1, description="default: the study's")] = None
    remedies: Annotated[list[str] | None, Field(min_length=1, description="default: all of the study")] = None
    seeds: Annotated[int | None, Field(ge=1, le=100, description="default: the study's")] = None
    train: TrainSettings = TrainSettings()

    @model_validator(mode="after")
    def _one_way(self) -> MethodSpec:
        given = [key for key in ("plan", *PEERS) if getattr(self, key) is not None]
        if len(given) != 1 and given != ["plan", "full"]:
            raise ValueError(
                "a method is one of plan, full, lora and partial (or a plan with `full: true`, of which every tensor"
                f" trains); {' and '.join(given) or 'none'} given"
            )
        return self

    @property
    def kind(self) -> str:
        """`plan`, or which of PEERS."""
        return next(key for key in ("plan", *PEERS) if getattr(self, key) is not None)

    @property
    def called(self) -> str:
        """Its name in results."""
        if self.name is not None:
            return self.name
        if self.plan is None:
            return self.kind
        stem = self.plan.removesuffix(".yaml").removesuffix(".yml")
        return re.sub(r"[^A-Za-z0-9_.-]", "-", stem).strip("-")[-60:] or "plan"

    @property
    def words(self) -> str:
        """What people call it."""
        if self.label is not None:
            return self.label
        plain = {"full": "full fine-tuning", "lora": "LoRA", "partial": "partial tuning"}
        return plain.get(self.kind, self.called) if self.name is None else self.name


class Claim(Entry):
    """A comparison that a paper makes: `better` beats `worse`, both names of methods (or `METHOD/REMEDY`)."""

    says: Annotated[str, Field(min_length=1, max_length=300)]
    better: Annotated[str, Field(min_length=1)]
    worse: Annotated[str, Field(min_length=1)]
    on: Annotated[
        Literal["forgets", "learns"],
        Field(
            description="forgets: less original loss at equal new loss; learns: less new loss at equal original loss"
        ),
    ] = "forgets"
    paper: Annotated[str, Field(max_length=80)] = ""


class Study(Entry):
    """What is compared."""

    surgeon_study: Annotated[Literal[1], Field(description="version of this format")]
    methods: Annotated[
        list[MethodSpec], Field(min_length=1, max_length=200, description="full, lora, partial, a plan, or more")
    ]
    new: Annotated[list[StudyText], Field(max_length=50, description="text to learn; or --new")] = []  # noqa: RUF012  # pydantic copies it
    original: Annotated[
        list[StudyText],
        Field(max_length=50, description="text of what must not be forgotten; without it, what the base writes itself"),
    ] = []  # noqa: RUF012
    replayed: Annotated[
        list[StudyText], Field(max_length=50, description="replayed where a remedy says text; default: original")
    ] = []  # noqa: RUF012
    remedies: Annotated[list[Remedy], Field(min_length=1, max_length=20)] = [  # noqa: RUF012
        Remedy(name="recalled", replay=ReplaySpec(), preserve=PreserveSpec())
    ]
    rates: Annotated[list[float], Field(min_length=1, max_length=40, description="peak learning rates")] = [  # noqa: RUF012
        1e-4,
        3e-4,
        1e-3,
        3e-3,
    ]
    most_rates: Annotated[int, Field(ge=FEWEST_RATES, le=40, description="of one method, extended ones included")] = 8
    seeds: Annotated[int, Field(ge=1, le=100, description="runs of each point; three make an interval")] = 1
    steps: Annotated[int | None, Field(ge=1, description="optimizer steps of every run")] = None
    tokens: Annotated[int | None, Field(ge=1, description="tokens of every run, instead of steps")] = None
    bytes: Annotated[
        int | None,
        Field(
            ge=1, description="UTF-8 bytes of new text of every run, instead of steps: equal text whatever its tokens"
        ),
    ] = None
    batch: Annotated[int, Field(ge=1, description="sequences a step")] = 8
    length: Annotated[int, Field(ge=2, description="tokens a sequence")] = 256
    train: TrainSettings = TrainSettings()
    recall: Annotated[
        GenerateSpec | None, Field(description="how the base writes text; default: as much as is used")
    ] = None
    documents: Annotated[int, Field(ge=1, description="held-out documents that losses are measured on, a text")] = 32
    peers: Annotated[
        bool, Field(description="add full fine-tuning, LoRA and partial tuning where they are missing")
    ] = True
    claims: Annotated[list[Claim], Field(max_length=500, description="what papers say, to be judged")] = []  # noqa: RUF012

    @model_validator(mode="after")
    def _fits(self) -> Study:
        if sum(given is not None for given in (self.steps, self.tokens, self.bytes)) != 1:
            raise ValueError("give one of `steps`, `tokens` and `bytes`: every run has the same")
        texts = [text.called for group in (self.new, self.original, self.replayed) for text in group]
        for what, names in (
            ("texts", texts),
            ("methods", [method.called for method in self.methods]),
            ("remedies", [remedy.name for remedy in self.remedies]),
        ):
            if doubled := first_doubled(names):
                raise ValueError(f"two {what} are called {doubled!r}; give one of them another `name:`")
        for group in (self.new, self.original, self.replayed):
            _check_shares(group)
        known = [remedy.name for remedy in self.remedies]
        for method in self.methods:
            for name in method.remedies or ():
                if name not in known:
                    raise ValueError(f"method {method.called}: no remedy `{name}`{did_you_mean(name, known)}")
        for what, rates in self._all_rates():
            check_rates(rates, what)
        rows = {method.called for method in self.all_methods}
        rows |= {f"{method.called}/{remedy.name}" for method, remedy in self.entries}
        for claim in self.claims:
            for name in (claim.better, claim.worse):
                if name not in rows:
                    raise ValueError(f"claim {claim.says!r}: no method `{name}`{did_you_mean(name, sorted(rows))}")
        return self

    def _all_rates(self) -> Iterator[tuple[str, list[float]]]:
        yield "", self.rates
        for method in self.methods:
            if method.rates is not None:
                yield f"method {method.called}: ", method.rates
        for remedy in self.remedies:
            if remedy.rates is not None:
                yield f"remedy {remedy.name}: ", remedy.rates

    @property
    def all_methods(self) -> list[MethodSpec]:
        """All of them, full fine-tuning first, with the peers that the file left out."""
        there = {method.kind for method in self.methods}
        added = [_method(kind) for kind in PEERS if self.peers and kind not in there]
        order = {kind: number for number, kind in enumerate(PEERS)}
        return sorted([*self.methods, *added], key=lambda method: order.get(method.kind, len(PEERS)))

    @property
    def entries(self) -> list[tuple[MethodSpec, Remedy]]:
        """What has a frontier of its own: every method with each of its remedies."""
        return [
            (method, remedy)
            for method in self.all_methods
            for remedy in self.remedies
            if method.remedies is None or remedy.name in method.remedies
        ]

    def rates_of(self, method: MethodSpec, remedy: Remedy) -> list[float]:
        """The rates that an entry begins with, ascending."""
        return sorted(remedy.rates or method.rates or self.rates)

    def seeds_of(self, method: MethodSpec) -> int:
        """How many seeds a method runs with."""
        return method.seeds or self.seeds

    @property
    def run_steps(self) -> int | None:
        """Optimizer steps of every run; None where runs have so many bytes, and each its own steps."""
        if self.bytes is not None:
            return None
        return self.steps or math.ceil((self.tokens or 1) / (self.batch * self.length))

    @property
    def run_tokens(self) -> int | None:
        """Tokens of every run; None where each has its own."""
        return None if self.run_steps is None else self.run_steps * self.batch * self.length

    @property
    def budget(self) -> dict[str, int]:
        """What every run has."""
        text = {"bytes": self.bytes or 0}
        if self.run_steps is not None and self.run_tokens is not None:
            text = {"steps": self.run_steps, "tokens": self.run_tokens}
        return {**text, "batch": self.batch, "length": self.length, "seeds": self.seeds}

    @property
    def budget_words(self) -> str:
        """How much text a run has, in words."""
        return f"{self.run_tokens:,} tokens" if self.bytes is None else f"{self.bytes:,} bytes of new text"

    @property
    def recalls(self) -> bool:
        """Whether the base has to write text."""
        replays = [remedy.replay for _, remedy in self.entries]
        return not self.original or any(replay is not None and replay.source == "recall" for replay in replays)


def study_replays(study: Study) -> bool:
    """Whether a remedy replays text that is given."""
    replays = [remedy.replay for _, remedy in study.entries]
    return any(replay is not None and replay.source == "text" for replay in replays)


def _method(name: str) -> MethodSpec:
    """A method that is given by its name alone: a peer, or a plan."""
    return MethodSpec.model_validate(_spelled_out(name))


def _spelled_out(method: str) -> dict[str, Any]:
    match method:
        case "full":
            return {"full": True}
        case "lora" | "partial":
            return {method: {}}
    return {"plan": method}


def _check_shares(texts: Sequence[StudyText]) -> None:
    given = [text.share for text in texts if text.share is not None]
    total, whole = math.fsum(given), len(given) == len(texts)
    if texts and ((whole and abs(total - 1) > SHARE_TOLERANCE) or (not whole and total >= 1)):
        raise ValueError(f"the texts' shares sum to {total:g}; they must sum to 1")


def check_rates(rates: Sequence[float], what: str = "") -> None:
    """Raise ValueError for rates of which no fair frontier comes."""
    ordered = sorted(rates)
    if len(set(rates)) < FEWEST_RATES:
        several = f"{len(set(rates))} different rate{'s' if len(set(rates)) > 1 else ''}"
        raise ValueError(
            f"{what}{several} given; a frontier needs at least {FEWEST_RATES}, each two or three times the one before,"
            " such as [1e-4, 3e-4, 1e-3, 3e-3]"
        )
    if len(set(rates)) < len(rates):
        raise ValueError(f"{what}a rate is given twice; give each once")
    if ordered[0] <= 0 or ordered[-1] >= 1:
        wrong = ordered[0] if ordered[0] <= 0 else ordered[-1]
        raise ValueError(f"{what}rate {wrong:g} is no learning rate; give rates above 0 and below 1")
    for low, high in itertools.pairwise(ordered):
        if not _NEAREST <= high / low <= _FARTHEST:
            raise ValueError(
                f"{what}rates {low:g} and {high:g} are a factor {high / low:.3g} apart; give steps of 2 to 3"
                f" ({_NEAREST:g} to {_FARTHEST:g} is allowed)"
            )


@dataclass(frozen=True)
class LoadedStudy:
    """A study as read; relative paths in it start at the file's folder, those of options in the current one.

    `plans` are those of methods, by the methods' names.
    """

    config: Study
    source: Path
    lines: Mapping[Place, int]
    given: Mapping[Place, str]
    plans: Mapping[str, LoadedPlan]

    @property
    def gated(self) -> frozenset[str]:
        """Methods whose plan has a domain gate, which is fitted before the first step."""
        operations = {name: loaded.plan.operations for name, loaded in self.plans.items()}
        return frozenset(name for name, each in operations.items() if any(isinstance(op, DomainGate) for op in each))

    def where(self, *place: str | int) -> str:
        """How an error about a key begins: the file and line, or the option that set it."""
        return place_of(place, self.lines, str(self.source), self.given)

    def resolve(self, path: str) -> Path:
        """A path that the file names."""
        return self.source.parent / path

    def texts(self, group: Literal["new", "original", "replayed"]) -> list[StudyText]:
        """The texts of a kind, with shares that sum to 1."""
        texts = getattr(self.config, group)
        given = math.fsum(text.share for text in texts if text.share is not None)
        sizes = [0 if text.share is not None else self._size(text) for text in texts]
        parts = [
            text.share if text.share is not None else (1 - given) * size / sum(sizes)
            for text, size in zip(texts, sizes, strict=True)
        ]
        return [
            text.model_copy(update={"share": part / math.fsum(parts)}) for text, part in zip(texts, parts, strict=True)
        ]

    def _size(self, text: StudyText) -> int:
        """Bytes of a text's files; 1 where they are not here."""
        if text.path.startswith("dataset:"):
            return 1
        return sum(file.stat().st_size for file in files_of(self.resolve(text.path))) or 1


def find_study(study: str | Path) -> Path:
    """The file a study argument means: a path, or the name of a shipped study. BadInput where it is neither."""
    path, shipped = Path(study), shipped_studies()
    if (path.exists() and not path.is_dir()) or path.suffix in (".yaml", ".yml"):
        return path
    if str(study) in shipped:
        return shipped[str(study)]
    what = "a folder, not a study" if path.is_dir() else "neither a study file nor the name of a shipped study"
    raise BadInput(f"{printable(str(study))}: {what}{did_you_mean(str(study), list(shipped))}")


def load_study(
    study: str | Path,
    *,
    new: Sequence[str | Path] = (),
    original: Sequence[str | Path] = (),
    replayed: Sequence[str | Path] = (),
) -> LoadedStudy:
    """Read and check a study; texts that are given replace the file's. BadInput names file and line."""
    path = find_study(study)
    text = read_text(path, what=_WHAT)
    data, lines = parse_yaml(text, str(path), what=_WHAT, needs=_NEEDS)
    _spell_out(data)
    given: dict[Place, str] = {}
    for group, files in (("new", new), ("original", original), ("replayed", replayed)):
        if files:
            data[group] = [_text_of(file) for file in files]
            given[(group,)] = f"--{group} {files[0]}"
    config = check_yaml(Study, data, lines, str(path), what=_WHAT, known_keys=_KNOWN_KEYS, given=given)
    loaded = LoadedStudy(config, path, lines, given, {})
    wrong: list[str] = []
    if not config.new:
        wrong.append(f"{printable(str(path))}: no text to learn; give `new:`, or --new FILE")
    if not config.original and not config.replayed and study_replays(config):
        wrong.append(
            f"{printable(str(path))}: a remedy replays text, and the study has none; give `original:` (--original"
            " FILE), or let the remedy replay what the base writes (`source: recall`)"
        )
    wrong += _absent(loaded)
    plans = _plans(loaded, wrong)
    if wrong:
        raise bad_input(wrong)
    return LoadedStudy(config, path, lines, given, plans)


def _spell_out(data: dict[str, Any]) -> None:
    """Methods and texts that are given by a name or a path alone become entries."""
    for key, entry_of in _SHORT.items():
        if isinstance(data.get(key), list):
            data[key] = [entry_of(entry) if isinstance(entry, str) else entry for entry in data[key]]


def _entry_of_text(path: str) -> dict[str, Any]:
    return {"path": path}


_SHORT: dict[str, Callable[[str], dict[str, Any]]] = {
    "methods": _spelled_out,
    **dict.fromkeys(("new", "original", "replayed"), _entry_of_text),
}


def _text_of(given: str | Path) -> dict[str, Any]:
    """What an option says: a file, or NAME=FILE; its path starts in the current folder."""
    match = _NAMED.fullmatch(str(given))
    if match and not Path(given).exists():
        return {"name": match[1], "path": _absolute(match[2])}
    return {"path": _absolute(str(given))}


def _absolute(path: str) -> str:
    return path if path.startswith("dataset:") else str(Path(path).absolute())


def _absent(loaded: LoadedStudy) -> list[str]:
    """Every text that is not there, by its line or option."""
    wrong = []
    for group in ("new", "original", "replayed"):
        for number, text in enumerate(getattr(loaded.config, group)):
            named = [("path", text.path)]
            if isinstance(text.validation, str) and not text.validation.startswith("split:"):
                named.append(("validation", text.validation))
            for key, path in named:
                if not path.startswith("dataset:") and (why := absent(loaded.resolve(path), key)):
                    wrong.append(f"{loaded.where(group, number, key)}{why}")
    return wrong


def _plans(loaded: LoadedStudy, wrong: list[str]) -> dict[str, LoadedPlan]:
    """The plans of methods; what is no plan, or a wrong one, goes to `wrong`."""
    found = {}
    for number, method in enumerate(loaded.config.methods):
        if method.plan is None:
            continue
        beside = loaded.resolve(method.plan)
        try:
            path = beside if beside.is_file() else find_plan(method.plan)
        except BadInput as error:
            peers = "" if "did you mean" in str(error) else f" (or {', '.join(PEERS)})"
            wrong.append(f"{loaded.where('methods', number, 'plan')}method {error}{peers}")
            continue
        try:
            found[method.called] = load_plan(path)
        except BadInput as error:
            wrong += error.lines if isinstance(error, Mistakes) else [str(error)]
    return found


_SECTIONS: dict[str, type[BaseModel]] = {
    "methods": MethodSpec,
    "new": StudyText,
    "original": StudyText,
    "replayed": StudyText,
    "remedies": Remedy,
    "replay": ReplaySpec,
    "preserve": PreserveSpec,
    "teacher": CachedSpec,
    "partial": Partial,
    "lora": LoraSpec,
    "train": TrainSettings,
    "optimizer": OptimizerSpec,
    "recall": GenerateSpec,
    "claims": Claim,
}
_KNOWN_KEYS = keys_by_section(Study, _SECTIONS)


def json_schema() -> dict[str, Any]:
    """The JSON schema of studies, for editors that complete YAML by it."""
    schema = editor_schema(Study, "surgeon study")
    for key in _SHORT:
        # A name or a path alone is an entry too.
        schema["properties"][key]["items"] = {"anyOf": [{"type": "string"}, schema["properties"][key]["items"]]}
    return schema
