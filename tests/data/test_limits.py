"""Texts that anybody may have written: read inside their folder, and in memory that no file decides."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import signal
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from surgeon.data import parquet
from surgeon.data.chats import Chat, Message
from surgeon.data.documents import Documents, text_files
from surgeon.data.parquet import ParquetFiles
from surgeon.data.rows import Rows
from surgeon.data.saved_tables import check_saved
from surgeon.data.sources import saved_table
from surgeon.data.specs import RowsSpec
from surgeon.errors import BadInput
from surgeon.models.tokens import documents_of
from tests.training.texts import opened_texts

TEXTS = [f"text {number} – ж" for number in range(5)]


def refusal(ask: Callable[[], object]) -> str:
    with pytest.raises(BadInput) as caught:
        ask()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def opened(path: Path, *, chat: bool = False) -> Documents:
    return opened_texts(path, kind="chat" if chat else None)


def read(path: Path) -> list[Any]:
    documents = opened(path)
    return [documents.read(number) for number in range(len(documents))]


def test_a_folder_of_texts_does_not_lead_out_of_itself(tmp_path: Path) -> None:
    home = tmp_path / "texts"
    (home / "below").mkdir(parents=True)
    (tmp_path / "secret").write_text("secret words\n")
    (home / "one.txt").write_text("one\n")
    (home / "below" / "two.txt").symlink_to("../one.txt")
    (home / "NOTES").symlink_to("../secret")
    assert read(home) == ["one\n", "one\n"]
    # A link that the command or a config names is its user's own.
    (tmp_path / "named.txt").symlink_to(tmp_path / "secret")
    assert read(tmp_path / "named.txt") == ["secret words\n"]
    (tmp_path / "named.txt").unlink()
    (tmp_path / "named.txt").symlink_to("nowhere")
    assert "named.txt: a link to nowhere; give a file" in refusal(lambda: opened(tmp_path / "named.txt"))
    for target, words in (
        ("../secret", "a link that leads out of the folder"),
        (str(tmp_path / "secret"), "a link that leads out of the folder"),
        ("nowhere", "a link to nowhere"),
    ):
        (home / "notes.txt").symlink_to(target)
        assert words in refusal(lambda: opened(home))
        (home / "notes.txt").unlink()
    os.mkfifo(home / "waits.jsonl")
    assert "a FIFO" in refusal(lambda: text_files(home))
    (home / "waits.jsonl").unlink()
    (home / "more").symlink_to(tmp_path)
    assert "more: a link to a folder, which is not followed" in refusal(lambda: text_files(home))


def test_what_becomes_a_link_later_is_not_followed(tmp_path: Path) -> None:
    home = tmp_path / "texts"
    home.mkdir()
    (home / "a.jsonl").write_text('{"text": "word"}\n')
    (tmp_path / "secret").write_text('{"text": "gone"}\n')
    documents = opened(home)
    (home / "a.jsonl").unlink()
    (home / "a.jsonl").symlink_to("../secret")
    assert "leads out of the folder" in refusal(lambda: documents.read(0))


def test_texts_in_the_hub_s_cache_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "datasets--a--b" / "snapshots" / ("0" * 40) / "data"
    folder.mkdir(parents=True)
    (tmp_path / "datasets--a--b" / "blobs").mkdir()
    (tmp_path / "datasets--a--b" / "blobs" / ("1" * 40)).write_text("cached\n")
    (folder / "a.txt").symlink_to(f"../../../blobs/{'1' * 40}")
    assert read(folder) == read(folder.parent) == ["cached\n"]


def test_a_document_has_a_largest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("checkpoint.text_lines", "data.json_list", "data.parquet", "models.tokens"):
        monkeypatch.setattr(f"surgeon.{module}.MAX_DOCUMENT_BYTES", 2000)
    long = json.dumps({"text": "x" * 3000})
    files = {
        "a.jsonl": f'{{"text": "y"}}\n{long}\n',
        "b.json": f'[{{"text": "y"}},\n{long}]',
        "c.txt": "y\n" + "x" * 3000 + "\n",
        "open.json": '[{"text": "' + "x" * 300_000,
        "number.json": "[" + "1" * 300_000,
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
        assert "has more than 2,000 bytes, the most that one document" in refusal(lambda n=name: read(tmp_path / n))
    pyarrow.parquet.write_table(pyarrow.table({"text": ["y", "x" * 3000]}), tmp_path / "d.parquet")
    assert "row group 0, row 1: this row has more than 2,000 bytes" in refusal(lambda: read(tmp_path / "d.parquet"))
    for name in ("a.jsonl", "c.txt"):
        assert "has more than 2,000 bytes" in refusal(lambda n=name: list(documents_of(tmp_path / n)))


def test_values_that_take_more_than_their_bytes_are_refused(tmp_path: Path) -> None:
    """Two bytes of JSON are a list of a hundred."""
    many = '{"text": "y", "x": [' + "[],[],[]," * 250_000 + "[]]}"
    (tmp_path / "a.jsonl").write_text(many + "\n")
    (tmp_path / "b.json").write_text(f"[{many}]")
    for name in ("a.jsonl", "b.json"):
        assert "more than 1,500,000 values in one document" in refusal(lambda n=name: read(tmp_path / n))
    # Commas within a text are none.
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "," * 1_500_001}) + "\n")
    assert len(read(tmp_path / "a.jsonl")) == 1


def test_lists_of_json_are_read_entry_by_entry(tmp_path: Path) -> None:
    """Brackets, quotes and escapes within strings, letters of several bytes; and lists that are none."""
    texts = [*TEXTS, 'a "quoted [" \\', ']}{[\n\\"', "", "€" * 50, "\\" * 7]
    content = "\ufeff [ " + " ,\n\t".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts) + "\n] \n"
    (tmp_path / "a.json").write_text(content, encoding="utf-8")
    documents = opened(tmp_path / "a.json")
    assert [documents.read(number) for number in range(len(documents))] == [text for text in texts if text.strip()]
    assert documents.where(1).endswith("a.json:2")
    for wrong in (
        b'[{"text": "a"',
        b'[{"text": "a\\',
        b"[",
        b"",
        b'[{"text": "a"}] x',
        b'[{"text": "\xff"}]',
        b"[,]",
        b"[}]",
    ):
        (tmp_path / "a.json").write_bytes(wrong)
        assert "a.json" in refusal(lambda: read(tmp_path / "a.json"))


def written(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path, **options)
    return path


def repeated(text: str, times: int) -> Any:
    return pyarrow.DictionaryArray.from_arrays(np.zeros(times, dtype=np.int32), pyarrow.array([text]))


def test_a_text_that_a_file_says_many_times_is_made_few_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """500 bytes that are 300 MB: no more than a few of the texts are in memory at a time, here and in the child."""
    path = written(tmp_path / "a.parquet", {"text": repeated("x" * 1_000_000, 300)}, compression="zstd")
    assert path.stat().st_size < 1000
    monkeypatch.setattr("surgeon.common.child.MEMORY", 100_000_000)
    tracemalloc.start()
    documents = opened(path)
    assert len(documents) == 300
    assert documents.read(299) == "x" * 1_000_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 30_000_000


def test_rows_that_unpack_to_too_much_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = pyarrow.StructArray.from_arrays(
        [repeated("user", 600_000), repeated("y" * 90, 600_000)], ["role", "content"]
    )
    nested = written(
        tmp_path / "chat.parquet", {"messages": pyarrow.ListArray.from_arrays([0, 600_000], turns)}, compression="zstd"
    )
    assert nested.stat().st_size < 10_000
    assert "row group 0, row 0: this row has more than 33,554,432 bytes" in refusal(lambda: opened(nested, chat=True))
    texts = [f"{number} {'z' * 1_000_000}" for number in range(200)]
    large = written(tmp_path / "large.parquet", {"text": texts}, compression="zstd")
    assert large.stat().st_size < 100_000
    monkeypatch.setattr("surgeon.common.child.MEMORY", 100_000_000)
    said = refusal(lambda: opened(large))
    assert (said.startswith(f"{large}: row group 0 ") and "more memory" in said) or "short of memory" in said
    assert "smaller row groups (`row_group_size=10_000`)" in said
    # Texts of no known size are read as any others.
    delta = written(
        tmp_path / "delta.parquet", {"text": TEXTS}, use_dictionary=False, column_encoding={"text": "DELTA_BYTE_ARRAY"}
    )
    assert read(delta) == TEXTS


def test_long_rows_behind_short_ones_are_made_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a file sorted by length: the child's answers stay below their limit."""
    monkeypatch.setattr("surgeon.common.child._LONGEST", 1 << 22)
    monkeypatch.setattr(parquet, "MAX_DOCUMENT_BYTES", 1 << 20)
    texts = [f"w{number}" for number in range(1500)] + [f"{number}" * 20_000 for number in range(100, 300)]
    assert read(written(tmp_path / "sorted.parquet", {"text": texts})) == texts


def test_a_library_that_crashes_or_hangs_on_a_file_ends_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "a.parquet", {"text": TEXTS})
    documents = opened(path)
    assert documents.read(4) == TEXTS[4]
    monkeypatch.setattr("surgeon.common.child.SECONDS", 0.1)
    for fails, said in (
        (lambda *_: os.kill(os.getpid(), signal.SIGSEGV), "ended its process (SIGSEGV)"),
        (lambda *_: [0 for _ in itertools.count()], "stopped after 0.1 seconds of computing"),
    ):
        monkeypatch.setattr("surgeon.data.parquet._Reader._read", fails)
        assert f"{path}: row group 0" in (found := refusal(lambda: opened(path))) and said in found
    # The child that was begun before is none of those.
    assert documents.read(3) == TEXTS[3]


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("dictionary", [True, False])
def test_what_parquet_holds_is_what_is_read(version: str, dictionary: bool, tmp_path: Path) -> None:
    """Every page is found, in either version, packed or not, in files of several row groups."""
    texts = [f"{number} {'w' * (number % 300)}" for number in range(1200)]
    options: dict[str, Any] = {"data_page_version": version, "use_dictionary": dictionary, "data_page_size": 4000}
    for compression in ("none", "snappy", "zstd"):
        path = written(tmp_path / "a.parquet", {"text": texts}, compression=compression, row_group_size=700, **options)
        assert read(path) == texts
    chats = [[{"role": "user", "content": f"{n}"}, {"role": "assistant", "content": "a" * n}] for n in range(1, 80)]
    path = written(tmp_path / "b.parquet", {"messages": chats, "other": chats}, row_group_size=30, **options)
    documents = opened(path, chat=True)
    assert len(documents) == 79
    assert documents.read(64) == Chat((Message("user", "65"), Message("assistant", "a" * 65)))


def test_parquet_that_is_compressed_again_is_read_twice(tmp_path: Path) -> None:
    """A child does not read what its parent has unpacked."""
    path = written(tmp_path / "a.parquet", {"text": TEXTS}, row_group_size=2)
    (tmp_path / "a.parquet.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert read(tmp_path / "a.parquet.gz") == read(tmp_path / "a.parquet.gz") == TEXTS


def test_pages_that_lie_about_themselves_are_refused(tmp_path: Path) -> None:
    """Any byte before the footer replaced: the texts, or one line; nothing else, and no crash."""
    content = written(tmp_path / "a.parquet", {"text": TEXTS * 3}, compression="none").read_bytes()
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    files: dict[int, Path] = {}
    for at in range(4, footer):
        for value in (0, content[at] ^ 0x80):
            files[len(files)] = tmp_path / f"{len(files)}.parquet"
            files[len(files) - 1].write_bytes(content[:at] + bytes([value]) + content[at + 1 :])
    # One process for all: a crash would end it.
    reader = ParquetFiles(files, lambda path: path.open("rb"))
    refused = 0
    for number in files:
        try:
            assert reader.head(number) == (["text"], 1)
            found: list[Any] = []
            while rows := reader.rows(number, 0, ["text"], len(found)):
                found += rows
            assert len(found) == len(TEXTS) * 3
        except BadInput as error:
            refused += 1
            assert "row group 0 cannot be read" in str(error) and "\n" not in str(error)
    assert refused > len(files) // 10


def test_rows_of_any_type_are_measured_as_python_s_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows come, in order, fewer at a time where they are large; and a row too large is refused with its number."""
    texts = ["a", "b" * 900_000, "", "c" * 900_000, *("d" * number for number in range(50))]
    turns = [{"role": "user", "content": [text, (text,), {"of": text.encode()}, None, 3]} for text in texts]
    asked: list[int] = []

    def read_rows(first: int, count: int) -> list[dict[str, Any]]:
        asked.append(count)
        return turns[first : first + count]

    rows, found = parquet.FewRows(read_rows, "here"), list[Any]()
    while more := rows.answer(len(found)):
        found += more
    assert found == turns
    # After a large row fewer are read.
    assert asked == [1, 2, 1, 1, 2, 4, 8, 16, 32, 64]
    assert rows.answer(5, most=1) == turns[5:6]
    monkeypatch.setattr(parquet, "MAX_DOCUMENT_BYTES", 2_700_000)
    with pytest.raises(BadInput, match=r"here, row 3: this row has more than"):
        rows.answer(2 + len(rows.answer(2)))


def saved(folder: Path, *, texts: Any = TEXTS, options: Any = None) -> Path:
    """What `save_to_disk` writes."""
    table = pyarrow.table({"text": texts})
    folder.mkdir(parents=True)
    with pyarrow.ipc.new_stream(folder / "data-00000-of-00001.arrow", table.schema, options=options) as stream:
        stream.write_table(table)
    (folder / "dataset_info.json").write_text("{}")
    state = dict.fromkeys(("_format_columns", "_format_type", "_output_all_columns", "_split"))
    files = [{"filename": "data-00000-of-00001.arrow"}]
    state |= {"_data_files": files, "_fingerprint": "f", "_format_kwargs": {}}
    (folder / "state.json").write_text(json.dumps(state))
    return folder


def test_a_saved_folder_does_not_lead_out_of_itself(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    outside = saved(tmp_path / "outside")
    home = saved(tmp_path / "home")
    assert len(saved_table(home, None, Rows(RowsSpec()))) == len(TEXTS)

    def ask(folder: Path = home) -> str:
        return refusal(lambda: saved_table(folder, None, Rows(RowsSpec())))

    state = (home / "state.json").read_text()
    own = "data-00000-of-00001.arrow"
    for name in (f"../outside/{own}", str(outside / own), "..", "", "a\\\\b", "a/../b"):
        (home / "state.json").write_text(state.replace(own, name))
        assert "which is no name in the folder" in ask()
    for files in ("null", "{}", "[3]", '[{"filename": 3}]', "[{}]"):
        (home / "state.json").write_text(state.replace(json.dumps([{"filename": own}]), files))
        assert "state.json" in ask()
    (home / "state.json").write_text(state)
    for name in (own, "dataset_info.json", "state.json"):
        content = (home / name).read_bytes()
        (home / name).unlink()
        (home / name).symlink_to(f"../outside/{name}")
        assert f"{name}: a link that leads out of the folder" in ask()
        (home / name).unlink()
        (home / name).write_bytes(content)
    (tmp_path / "several").mkdir()
    (tmp_path / "several" / "train").symlink_to("../outside")
    for split, words in (
        ('["train"]', "not a folder"),
        ('["../outside"]', "no name in the folder"),
        ("3", "is no list"),
    ):
        (tmp_path / "several" / "dataset_dict.json").write_text(f'{{"splits": {split}}}')
        assert words in ask(tmp_path / "several")


def test_saved_tables_of_unknown_size_are_refused(tmp_path: Path) -> None:
    zstd = pyarrow.ipc.IpcWriteOptions(compression="zstd")
    for folder, texts in ((tmp_path / "plain", TEXTS), (tmp_path / "numbered", repeated("x", 9))):
        assert "compressed columns" in refusal(lambda f=folder, t=texts: check_saved(saved(f, texts=t, options=zstd)))
    datasets = pytest.importorskip("datasets")
    pictures = datasets.Dataset.from_dict({"text": [{"path": "/etc/hostname", "bytes": None}]})
    pictures = pictures.cast_column("text", datasets.Image())
    pictures.save_to_disk(tmp_path / "pictures")
    said = refusal(lambda: saved_table(tmp_path / "pictures", None, Rows(RowsSpec())))
    assert "the column `text` holds Image, which no text is" in said
