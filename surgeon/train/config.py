"""train.yaml: what is asked of a training run. A strict schema; nothing unknown gets through."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from surgeon.common.yaml import Place, explain, kind_of, parse_yaml, read_text
from surgeon.data.specs import NEW, ORIGINAL, Entry, SourceSpec
from surgeon.errors import BadInput, printable

# Shares are written with a few decimals: 0.333 three times is meant to be 1.
_SHARE_TOLERANCE = 0.005


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
    ] = []  # noqa: RUF012  # pydantic copies it

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
