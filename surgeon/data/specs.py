"""The schema of texts in configs: each text's path, format, share and role."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from surgeon.checkpoint.hub_calls import REPO_ID
from surgeon.common.schema import BEGIN, NEW, ORIGINAL, TEMPLATE, Entry

_DATASET, _SPLIT = "dataset:", "split:"
_PATH = (
    "file (.jsonl, .json, .txt, .parquet, or such a file with .gz), folder of such files or saved by `datasets`, or"
    " dataset:USER/NAME of the Hub"
)


class RowsSpec(Entry):
    """How the rows of a text are read."""

    kind: Annotated[
        Literal["text", "chat", "labels"] | None,
        Field(
            description="text; chat: loss on the assistant's words alone; labels: `text` (and `text_pair`) with a"
            " `label`, for a classification head; default: text or chat, as each row's keys are"
        ),
    ] = None
    field: Annotated[
        str | Annotated[list[str], Field(min_length=2, max_length=2)] | None,
        Field(description="key of the text or the messages, or [QUESTION, ANSWER]; default: the usual ones"),
    ] = None
    bad_rows: Annotated[
        Literal["refuse", "leave_out"],
        Field(description="leave_out: count rows that cannot be used and go on, if they are not more than half"),
    ] = "refuse"
    control_tokens: Annotated[
        Literal["as_text", "as_tokens"],
        Field(
            description="how the tokenizer's control tokens that stand in the text (`</s>`) are read: as any other"
            " text, or as the tokens that a chat template writes"
        ),
    ] = "as_text"

    @property
    def as_text(self) -> bool:
        """Whether control tokens in the text are read as ordinary text."""
        return self.control_tokens == "as_text"

    @property
    def reading(self) -> dict[str, Any]:
        """The given options of how rows are read, for another config."""
        return self.model_dump(include=set(RowsSpec.model_fields), exclude_unset=True)


class UnlabelledSpec(RowsSpec):
    """How the rows of a language model's text are read."""

    kind: Annotated[
        Literal["text", "chat"] | None,
        Field(description="text, or chat: the assistant's words alone count; default: as each row's keys are"),
    ] = None


class TextSpec(RowsSpec):
    """A text's path, and how to read it."""

    name: Annotated[
        str, Field(pattern=r"^[A-Za-z0-9_-]{1,60}$", description="name in reports; letters, digits, _ and -")
    ]
    path: Annotated[
        str,
        Field(
            min_length=1,
            description=_PATH,
        ),
    ]
    config: Annotated[str | None, Field(min_length=1, description="config of a Hub dataset that has several")] = None
    split: Annotated[str | None, Field(min_length=1, description="split of a dataset; default `train`")] = None
    revision: Annotated[str | None, Field(min_length=1, description="branch, tag or commit on the Hub")] = None

    @model_validator(mode="after")
    def _of_the_hub(self) -> Self:
        """Raise ValueError for a path that is an address or no dataset id, and for Hub options of a local path."""
        if "://" in self.path or self.path.startswith("hf:"):
            raise ValueError(
                f"path {self.path!r} is an address: write dataset:USER/NAME for a dataset of the Hub, and get other"
                " files first"
            )
        if self.repo_id is not None and not REPO_ID.fullmatch(self.repo_id):
            raise ValueError(f"path {self.path!r} names no dataset of the Hub: write dataset:USER/NAME")
        given = [key for key in ("config", "revision") if getattr(self, key) is not None]
        if given and self.repo_id is None:
            raise ValueError(f"`{given[0]}` is for a path of the form dataset:USER/NAME")
        return self

    @property
    def repo_id(self) -> str | None:
        """The dataset's id on the Hub; None for a local text."""
        return self.path.removeprefix(_DATASET) if self.path.startswith(_DATASET) else None


class GenerateSpec(Entry):
    """Text that the model writes itself."""

    tokens: Annotated[int, Field(ge=1, description="tokens to write, at least")]
    prompts: Annotated[
        str | None,
        Field(
            min_length=1,
            description="how documents begin. begin: begin-of-text token; template: the chat template up to the user's"
            " first word; or a file, a prompt per line: answered by a template, else continued; default: template"
            " where there is one, else begin",
        ),
    ] = None
    temperature: Annotated[
        float | None, Field(gt=0, le=10, description="sampling temperature; default 0.7 by a template, else 1")
    ] = None
    top_p: Annotated[
        float | None,
        Field(
            gt=0,
            le=1,
            description="draw from the likeliest tokens of this share of the probability; default 0.9 by a template,"
            " else 1",
        ),
    ] = None
    length: Annotated[int | None, Field(ge=2, description="longest document in tokens; default 512")] = None
    batch: Annotated[int, Field(ge=1, le=4096, description="documents at a time")] = 32


class SourceSpec(TextSpec):
    """One source of text."""

    path: Annotated[
        str,
        Field(
            description=_PATH,
        ),
    ] = ""
    generate: Annotated[
        GenerateSpec | None, Field(description="instead of `path`: the model writes the text before the first step")
    ] = None
    share: Annotated[float, Field(ge=0, le=1, description="share of the training sequences; all shares sum to 1")]
    role: Annotated[str, Field(min_length=1, description="original (what the base knows), new, or task:NAME")] = NEW
    counted: Annotated[
        bool | None,
        Field(
            description="whether cross-entropy counts its tokens; default: unless a model wrote it and the teacher of"
            " `preserve` teaches on it"
        ),
    ] = None
    validation: Annotated[
        float | str,
        Field(description="held-out text: a share of the documents (0: none), a file, or split:NAME of the dataset"),
    ] = 0.01

    @model_validator(mode="after")
    def _known(self) -> SourceSpec:
        """Raise ValueError for options that exclude each other, and for an unknown role or share."""
        if bool(self.path) == (self.generate is not None):
            raise ValueError("give either `path` or `generate`")
        if self.generate is not None and (self.field or self.split or isinstance(self.validation, str)):
            raise ValueError("`field`, `split` and files of `validation` are for texts that are there, not `generate`")
        if self.generate is not None and self.kind == "labels":
            raise ValueError("`generate` writes texts without labels; give a `path`")
        if self.generate is not None and (self.generate.prompts, self.kind) in ((TEMPLATE, "text"), (BEGIN, "chat")):
            raise ValueError("`prompts: template` makes chats (`kind: chat`), `begin` texts; change one of them")
        if self.role not in (ORIGINAL, NEW) and not (self.role.startswith("task:") and self.role[5:].strip()):
            raise ValueError(f"role {self.role!r} is not known: use original, new or task:NAME")
        if isinstance(self.validation, float) and not 0 <= self.validation < 1:
            raise ValueError("validation must be a share of at least 0 and below 1, or a file")
        return self

    @property
    def prompts(self) -> str | None:
        """How the texts that the model writes begin; None: as the model's chat template decides."""
        own = None if self.generate is None else self.generate.prompts
        return own or {"chat": TEMPLATE, "text": BEGIN}.get(self.kind or "")

    @property
    def validation_split(self) -> str | None:
        """The dataset's split that `validation` names, or None."""
        named = isinstance(self.validation, str) and self.validation.startswith(_SPLIT)
        return str(self.validation).removeprefix(_SPLIT) if named else None
