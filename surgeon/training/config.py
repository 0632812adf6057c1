"""train.yaml: what is asked of a training run. A strict schema; nothing unknown gets through."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from surgeon.checkpoint.hub import REPO_ID
from surgeon.errors import BadInput, printable
from surgeon.strict_yaml import Place, explain, kind_of, parse_yaml, read_text

# Shares are written with a few decimals: 0.333 three times is meant to be 1.
_SHARE_TOLERANCE = 0.005

ORIGINAL, NEW = "original", "new"
_DATASET, _SPLIT = "dataset:", "split:"


class Entry(BaseModel):
    """Of a config: nothing unknown gets through."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class TextSpec(Entry):
    """Where a text lies and how to read it."""

    name: Annotated[
        str, Field(pattern=r"^[A-Za-z0-9_-]{1,60}$", description="what reports call it; letters, digits, _ and -")
    ]
    path: Annotated[
        str,
        Field(
            min_length=1,
            description="file (.jsonl, .txt, .parquet), folder of such files or saved by `datasets`, or"
            " dataset:USER/NAME of the Hub",
        ),
    ]
    kind: Annotated[
        Literal["text", "chat"], Field(description="text, or chat: loss on the assistant's words alone")
    ] = "text"
    field: Annotated[str | None, Field(description="key of the text or the messages; default `text` or `messages`")] = (
        None
    )
    config: Annotated[str | None, Field(min_length=1, description="of a dataset on the Hub that has several")] = None
    split: Annotated[str | None, Field(min_length=1, description="of a dataset; default `train`")] = None
    revision: Annotated[str | None, Field(min_length=1, description="branch, tag or commit on the Hub")] = None

    @model_validator(mode="after")
    def _of_the_hub(self) -> Self:
        if self.repo_id is not None and not REPO_ID.fullmatch(self.repo_id):
            raise ValueError(f"path {self.path!r} names no dataset of the Hub: write dataset:USER/NAME")
        given = [key for key in ("config", "revision") if getattr(self, key) is not None]
        if given and self.repo_id is None:
            raise ValueError(f"`{given[0]}` is for a path of the form dataset:USER/NAME")
        return self

    @property
    def repo_id(self) -> str | None:
        """The dataset's id on the Hub; None where the text lies here."""
        return self.path.removeprefix(_DATASET) if self.path.startswith(_DATASET) else None

    @property
    def key(self) -> str:
        """The key of a document's text or messages."""
        return self.field or ("messages" if self.kind == "chat" else "text")


class SourceSpec(TextSpec):
    """One source of text."""

    share: Annotated[float, Field(ge=0, le=1, description="share of the training sequences; all shares sum to 1")]
    role: Annotated[
        str, Field(min_length=1, description="original (what the base knows), new, or `task:NAME`, tasks in order")
    ] = NEW
    validation: Annotated[
        float | str,
        Field(description="share of the documents held out (0: none), a file of its own, or split:NAME of the dataset"),
    ] = 0.01

    @model_validator(mode="after")
    def _known(self) -> SourceSpec:
        if self.role not in (ORIGINAL, NEW) and not (self.role.startswith("task:") and self.role[5:].strip()):
            raise ValueError(f"role {self.role!r} is not known: use original, new or task:NAME")
        if isinstance(self.validation, float) and not 0 <= self.validation < 1:
            raise ValueError("validation must be a share of at least 0 and below 1, or a file")
        return self

    @property
    def validation_split(self) -> str | None:
        """The dataset's split that `validation` names."""
        named = isinstance(self.validation, str) and self.validation.startswith(_SPLIT)
        return str(self.validation).removeprefix(_SPLIT) if named else None


class OptimizerSpec(Entry):
    """AdamW and its schedule; what is left out has the paper's value (defaults.py)."""

    lr: Annotated[float | None, Field(gt=0, description="peak learning rate")] = None
    min_lr: Annotated[float | None, Field(ge=0, description="rate at the end of the cosine")] = None
    schedule: Annotated[Literal["cosine", "linear", "constant"] | None, Field(description="after the warm-up")] = None
    warmup: Annotated[float | None, Field(ge=0, description="steps, or below 1 a share of them")] = None
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]] | None, Field(min_length=2, max_length=2)] = None
    weight_decay: Annotated[float | None, Field(ge=0, description="AdamW's; not on norms and biases")] = None
    clip: Annotated[float | None, Field(ge=0, description="largest norm of the gradient; 0: no limit")] = None


class TrainConfig(Entry):
    """What a training run is to do."""

    surgeon_train: Annotated[Literal[1], Field(description="version of this format")]
    steps: Annotated[int, Field(ge=1, description="optimizer steps")]
    sources: Annotated[list[SourceSpec], Field(min_length=1, max_length=100)]
    seed: Annotated[int, Field(ge=0, lt=2**32, description="of the order of documents and of dropout")] = 0
    what: Annotated[
        Literal["last", "all"] | list[int],
        Field(description="new tensors of the last surgery, of all, or of these operations of the last one"),
    ] = "last"
    batch: Annotated[int | None, Field(ge=1, description="sequences a step, over all processes")] = None
    micro_batch: Annotated[int | None, Field(ge=1, description="sequences at a time in one process")] = None
    length: Annotated[int | None, Field(ge=2, description="tokens a sequence")] = None
    packing: Annotated[
        Literal["isolated", "joined"],
        Field(description="isolated: no attention across documents in a sequence; joined: one text after the other"),
    ] = "isolated"
    optimizer: OptimizerSpec = OptimizerSpec()
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32"],
        Field(description="of the model while it trains; auto: the checkpoint's"),
    ] = "auto"
    attention: Annotated[str | None, Field(description="attention implementation; default: transformers' choice")] = (
        None
    )
    checkpointing: Annotated[bool, Field(description="recompute activations in the backward pass, to save memory")] = (
        False
    )
    sharding: Annotated[
        Literal["none", "fsdp"],
        Field(description="under torchrun; fsdp: each process holds a share of every tensor (FSDP2)"),
    ] = "none"
    cross_entropy: Annotated[
        Literal["auto", "torch", "chunked", "liger"],
        Field(description="torch: all logits at once; chunked: some tokens at a time; liger: liger-kernel's, on CUDA"),
    ] = "auto"
    save_every: Annotated[int, Field(ge=1, description="steps between checkpoints")] = 500
    evaluate_every: Annotated[int, Field(ge=1, description="steps between evaluations")] = 500
    validation_sequences: Annotated[int, Field(ge=1, description="at most, for each source")] = 64
    log_every: Annotated[int, Field(ge=1, description="steps between lines of the log")] = 10
    report_to: Annotated[
        list[str],
        Field(description="trackers that get the log too, as transformers names them: tensorboard, wandb, mlflow, …"),
    ] = []

    @model_validator(mode="after")
    def _fits(self) -> TrainConfig:
        total = math.fsum(source.share for source in self.sources)
        if abs(total - 1) > _SHARE_TOLERANCE:
            raise ValueError(f"the sources' shares sum to {total:g}; they must sum to 1")
        names = [source.name for source in self.sources]
        if doubled := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two sources are called {doubled!r}; names must differ")
        return self

    def domain_of(self, source: SourceSpec) -> int:
        """What `domain_ids` call a source: 0 original, 1 new; tasks count from 1 in order of their first source."""
        if source.role in (ORIGINAL, NEW):
            return int(source.role == NEW)
        tasks = list(dict.fromkeys(other.role for other in self.sources if other.role not in (ORIGINAL, NEW)))
        return 1 + tasks.index(source.role)


@dataclass(frozen=True)
class LoadedConfig:
    """A config and the file it came from; relative paths in it start at the file's folder."""

    config: TrainConfig
    source: Path

    def resolve(self, path: str) -> Path:
        """A path that the config names."""
        return self.source.parent / path


def load_config(path: Path) -> LoadedConfig:
    """Read and check a config file; BadInput names file and line."""
    text = read_text(path, what="training config")
    data, lines = parse_yaml(
        text, str(path), what="training config", needs="`surgeon_train: 1`, `steps:` and `sources:`"
    )
    if not isinstance(data, dict):
        raise BadInput(
            f"{printable(str(path))}: a training config is a mapping with `surgeon_train: 1`, `steps:` and `sources:`,"
            f" not {kind_of(data)}"
        )
    try:
        config = TrainConfig.model_validate_json(json.dumps(data))
    except ValidationError as error:
        raise BadInput(
            explain(
                error,
                data,
                lines,
                str(path),
                what="training config",
                known_keys=_known_keys,
                tags=lambda _: [],
            )
        ) from None
    return LoadedConfig(config, path)


def json_schema() -> dict[str, Any]:
    """The JSON schema of training configs, for editors that complete YAML by it."""
    schema = TrainConfig.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "surgeon training config"
    return schema


def _known_keys(problem: ErrorDetails, place: Place) -> list[str]:
    schema: type[BaseModel] = TrainConfig
    if len(place) > 1:
        nested: dict[str, type[BaseModel]] = {"sources": SourceSpec, "optimizer": OptimizerSpec}
        schema = nested[str(place[0])]
    return list(schema.model_fields)
