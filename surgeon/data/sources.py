"""Opening a config's text source: files, or tables of the `datasets` library (extra `datasets`), saved or on the Hub.

For a table, one number per document is kept in memory; rows are read from the files that `datasets` memory-maps.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from surgeon.checkpoint.hub import dataset_commit
from surgeon.checkpoint.hub_calls import REPO_ID, bars_on_terminals_only, is_commit, offline, root_cause
from surgeon.common.child import Child, Failed, Limited
from surgeon.common.installation import lacking
from surgeon.common.schema import BEGIN, TEMPLATE
from surgeon.data.chats import Chat
from surgeon.data.documents import Corpus, Documents, stamps
from surgeon.data.layouts import Document, columns_of, document_of
from surgeon.data.parquet import FewRows
from surgeon.data.recall import beginnings
from surgeon.data.rows import Row, Rows
from surgeon.data.saved_tables import arrow_files, check_saved, is_saved
from surgeon.data.specs import SourceSpec, TextSpec
from surgeon.errors import BadInput, printable

if TYPE_CHECKING:
    from surgeon.models.tokenizer import Tokenizer

DEFAULT_SPLIT = "train"
# The feature types of `datasets` that are decoded from the row's own bytes only.
_FEATURES = {"Value", "ClassLabel", "Translation", "TranslationVariableLanguages", "Json"}


class Naming(Protocol):
    """A config that names sources: `source` is its file, `resolve` makes a path in it absolute."""

    @property
    def source(self) -> Path:
        """The config's file, for errors."""

    def resolve(self, path: str) -> Path:
        """Return the path to open for a path in the config."""


@dataclass(frozen=True)
class OpenedSource:
    """A source's text, its held-out text where that is separate, and its commit if it is from the Hub."""

    text: Corpus
    held_out: Corpus | None = None
    commit: str | None = None


def check_source(source: TextSpec, named_by: Naming) -> list[tuple[str, str]]:
    """Return faults in the first rows of a source, or a missing library, as pairs of (config key, message)."""
    wrong: list[tuple[str, str]] = []
    paths = [("path", source.path)]
    if isinstance(source, SourceSpec) and source.generate is not None:
        prompts = source.generate.prompts
        try:
            if prompts not in (None, BEGIN, TEMPLATE):
                beginnings(str(named_by.resolve(prompts)))
        except BadInput as error:
            wrong.append(("generate", f"source {source.name}: {error}"))
        return wrong
    if source.repo_id is not None:
        paths = []
        if find_spec("datasets") is None:
            wrong.append(("path", _no_library(f"source {source.name}: {source.path}")))
    if isinstance(source, SourceSpec) and isinstance(source.validation, str) and source.validation_split is None:
        paths.append(("validation", source.validation))
    for key, given in paths:
        path = named_by.resolve(given)
        if key == "path" and is_saved(path):
            continue
        try:
            Documents.begin(path, source)
        except BadInput as error:
            of_the_hub = key == "path" and REPO_ID.fullmatch(given) and not path.parent.exists()
            do = f" (a dataset of the Hub is dataset:{given})" if of_the_hub else ""
            wrong += [(key, f"source {source.name}: {line}{do}") for line in str(error).split("\n")]
    return wrong


def is_chat(source: TextSpec, named_by: Naming) -> bool:
    """Return whether a source is known to contain chats: by its kind, or by the first document of a file."""
    if source.kind is not None or not source.path or source.repo_id is not None:
        return source.kind == "chat"
    with contextlib.suppress(BadInput):
        return isinstance(Documents.begin(named_by.resolve(source.path), source).read(0), Chat)
    return False


def open_source(
    source: TextSpec,
    named_by: Naming,
    tokenizer: Tokenizer | None = None,
    write: Callable[[Chat], object] | None = None,
) -> OpenedSource:
    """Open a source of `named_by` and read it completely; control tokens of the `tokenizer` in it are counted.

    Chats for which `write` raises BadInput count as bad rows. Raises BadInput where the source cannot be read or is
    empty.
    """
    aside: str | None = None
    held_out: Corpus | None = None
    rows, rows_aside = (Rows(source, tokenizer, write) for _ in range(2))
    if isinstance(source, SourceSpec):
        aside = source.validation_split
        if isinstance(source.validation, str) and aside is None:
            held_out = Documents(named_by.resolve(source.validation), rows_aside)
    path, commit = named_by.resolve(source.path), None
    table: Callable[[str | None, Rows], Table] | None = partial(saved_table, path) if is_saved(path) else None
    if source.repo_id is not None:
        dataset = HubDataset(source.repo_id, config=source.config, revision=source.revision)
        table, commit = dataset.table, dataset.commit
    if table is not None:
        text = table(source.split, rows)
        return OpenedSource(text, held_out if aside is None else table(aside, rows_aside), commit)
    if source.split is not None or aside is not None:
        named = "split" if source.split is not None else "validation: split:…"
        raise BadInput(
            f"{printable(str(named_by.source))}: source {source.name}: `{named}` is for datasets of the Hub and folders"
            f" that `datasets` saved, and {printable(str(path))} is neither; leave it out"
        )
    return OpenedSource(Documents(path, rows), held_out)


class Table:
    """The rows of one split as documents, by number."""

    def __init__(self, table: Any, rows: Rows, *, shown: str, identity: list[Any]) -> None:
        """Index `table`, a `datasets.Dataset`, by the columns that contain documents.

        Raises BadInput where they are missing or have no text.
        """
        self.shown = shown
        self._identity = identity
        self.rows = rows
        columns = columns_of(table.column_names, rows.spec, shown)
        for column in columns:
            _check_feature(table.features[column], f"{shown}: the column `{column}`")
        self._table = table.select_columns(columns).with_format(None)
        self._numbers = np.array(list(rows.kept(self._each(), shown)), dtype=np.int64)
        if not len(self._numbers):
            raise BadInput(f"{printable(shown)}: no document with text; a source needs some text")

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self._numbers)

    def read(self, number: int) -> Document:
        """Read one document. Raises BadInput where the row is no document."""
        row = int(self._numbers[number])
        return document_of(self._table[row], self.rows.spec, self.where(number))

    def where(self, number: int) -> str:
        """Return the place of a document, for errors."""
        return self._row(int(self._numbers[number]))

    def identity(self) -> list[Any]:
        """Return JSON data that must be unchanged when a run is continued."""
        return self._identity

    def _each(self) -> Iterator[Row]:
        """Yield the rows by number. Raises BadInput where the table is damaged, or a row is too large."""
        stored = self._table.with_format("arrow")

        def read(first: int, count: int) -> list[dict[str, Any]]:
            """Return rows as `datasets` decodes them. Raises pyarrow's errors for damage."""
            stored[first : first + count].validate(full=True)
            columns = self._table[first : first + count]
            return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]

        child, begin = Child(lambda: FewRows(read, self.shown).answer), 0
        try:
            while begin < len(self._table):
                for row, entry in enumerate(child.ask(begin), begin):
                    where = self._row(row)
                    yield row, where, partial(document_of, entry, self.rows.spec, where)
                    begin = row + 1
        except (Limited, Failed) as error:
            raise BadInput(
                f"{printable(self.shown)}: rows from {begin} on cannot be read ({error}); get it again"
            ) from None

    def _row(self, row: int) -> str:
        """Return the name of a row in errors."""
        return f"{self.shown}, row {row}"


def _check_feature(feature: Any, where: str) -> None:
    """Raise BadInput for features that are decoded from files or addresses in a row, for example pictures or sounds."""
    if isinstance(feature, Mapping | list):
        for part in feature.values() if isinstance(feature, Mapping) else feature:
            _check_feature(part, where)
    elif hasattr(feature, "feature"):
        _check_feature(feature.feature, where)
    elif type(feature).__name__ not in _FEATURES:
        raise BadInput(
            f"{printable(where)} holds {printable(type(feature).__name__)}, which no text is; leave it out, or give"
            " the source `field: KEY` with another column"
        )


def saved_table(folder: Path, split: str | None, rows: Rows) -> Table:
    """Open a table that `save_to_disk` wrote, or one of its splits; for a table with splits, None means `train`.

    Raises BadInput where this is impossible.
    """
    library = _library(str(folder))
    check_saved(folder)
    with _quiet(library):
        try:
            # This needs no copy in memory and no network.
            found = library.load_from_disk(str(folder), keep_in_memory=False)
        except Exception as error:
            raise BadInput(
                f"{printable(str(folder))}: looks like a folder saved by `datasets`, and cannot be read"
                f" ({root_cause(error)}); save it again, or name a file"
            ) from error
    shown = str(folder)
    if isinstance(found, library.DatasetDict):
        split = split or DEFAULT_SPLIT
        if split not in found:
            raise BadInput(_no_split(shown, split, list(found)))
        found, shown, folder = found[split], f"{shown} (split {split})", folder / split
    elif split is not None:
        raise BadInput(
            f"{printable(shown)}: holds one table without splits; leave `split`, or `validation: split:…`, out"
        )
    identity = ["saved", *stamps(arrow_files(folder))]
    return Table(found, rows, shown=shown, identity=identity)


class HubDataset:
    """A dataset of the Hub at one commit, downloaded and prepared in the cache of `datasets`."""

    def __init__(self, repo_id: str, *, config: str | None, revision: str | None) -> None:
        """Find the commit and download the files that are not cached. Raises BadInput where that fails."""
        self.repo_id = repo_id
        self._library = _library(f"dataset:{repo_id}")
        cached_only = offline()
        if cached_only and revision is not None and not is_commit(revision):
            raise BadInput(
                f"datasets/{printable(repo_id)}: offline (HF_HUB_OFFLINE), so the commit of revision"
                f" {printable(revision)!r} is not known; name a commit, or leave `revision` out for the latest"
                " in the cache"
            )
        self.commit = revision if cached_only else dataset_commit(repo_id, revision)
        with _quiet(self._library):
            try:
                # A path of this form never means a local folder of the same name.
                self._builder = self._library.load_dataset_builder(
                    f"hf://datasets/{repo_id}", config, revision=self.commit
                )
                self._builder.download_and_prepare()
            except Exception as error:
                raise BadInput(f"datasets/{printable(repo_id)}: {_problem(error)}") from error
        # Where the download fails, the library silently uses the latest cached commit.
        if self.commit not in (None, self._builder.hash):
            raise BadInput(
                f"datasets/{printable(repo_id)}: commit {self.commit} cannot be downloaded, the cache has"
                f" {printable(str(self._builder.hash))}; try again with a network"
            )
        self.commit = str(self._builder.hash)

    def table(self, split: str | None, rows: Rows) -> Table:
        """Return one split as a table; None: the split `train`. Raises BadInput where there is no such split."""
        split = split or DEFAULT_SPLIT
        shown = f"datasets/{self.repo_id}"
        try:
            with _quiet(self._library):
                table = self._builder.as_dataset(split=split)
        except Exception as error:
            raise BadInput(_no_split(shown, split, list(self._builder.info.splits or {}))) from error
        identity = ["dataset", self.repo_id, self._builder.config.name, self.commit, split, len(table)]
        return Table(table, rows, shown=f"{shown} (split {split})", identity=identity)


def _no_split(shown: str, split: str, there: list[str]) -> str:
    """Return the error text for a split that does not exist; `there` are the existing splits."""
    return (
        f"{printable(shown)}: no split {printable(split)!r}; it has {printable(', '.join(there))}; `split:` of the"
        " source names one"
    )


def _problem(error: Exception) -> str:
    """Return a description of an error of `datasets`, with advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = printable(" ".join(lines[:2]) if lines else type(error).__name__, limit=400)
    if "Config name is missing" in said or "BuilderConfig" in said:
        return f"{said}; `config:` of the source names one"
    if "cache for" in said or "Couldn't reach" in said:
        return f"{said}; run once online"
    if isinstance(error, FileNotFoundError):
        return "some of its files cannot be downloaded; check the network, then run the same command again"
    return f"cannot be read ({root_cause(error)})"


def _library(shown: str) -> Any:
    """Return the library `datasets`. Raises BadInput where it is not installed."""
    try:
        import datasets
    except ImportError:
        raise BadInput(_no_library(shown)) from None
    return datasets


def _no_library(shown: str) -> str:
    """Return the error text that `datasets` is not installed."""
    return lacking(f"{printable(shown)}: reading it", "the library `datasets`", "datasets")


@contextlib.contextmanager
def _quiet(library: Any) -> Iterator[None]:
    """Silence the library's warnings in the block (important ones are raised here); progress bars only on terminals."""
    logging = library.utils.logging
    verbosity, bars = logging.get_verbosity(), not library.are_progress_bars_disabled()
    logging.set_verbosity(logging.CRITICAL)
    if not sys.stderr.isatty():
        library.disable_progress_bars()
    try:
        with bars_on_terminals_only():
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            library.enable_progress_bars()
