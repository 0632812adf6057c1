"""Sources that the library `datasets` reads: folders it saved, and the Hub's, by its client against a stand-in."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import surgeon
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.data.chats import Chat, Message
from surgeon.data.sources import OpenedSource, open_source
from surgeon.errors import BadInput
from surgeon.training.config.loading import load_config
from tests.checkpoint.stand_in_hub import COMMIT, Hub, serve
from tests.training.test_train import base_of, config, digests
from tests.training.texts import text
from tests.warm import warm

datasets = pytest.importorskip("datasets")

TEXTS = [text(20, n) for n in range(30)]
CARD = """---
configs:
- {config_name: prose, data_files: [{split: train, path: prose/train*}, {split: test, path: prose/test*}]}
- {config_name: verse, data_files: [{split: train, path: verse/*}]}
---
"""


def opened(folder: Path, **source: Any) -> OpenedSource:
    source = {"name": "a", "share": 1.0} | source
    path = folder / "train.yaml"
    path.write_text(yaml.safe_dump({"surgeon_train": 1, "steps": 1, "sources": [source]}), encoding="utf-8")
    loaded = load_config(path)
    return open_source(loaded.config.sources[0], loaded)


def read(documents: Any) -> list[Any]:
    return [documents.read(n) for n in range(len(documents))]


def saved(path: Path, **columns: Any) -> Path:
    datasets.Dataset.from_dict(columns).save_to_disk(path, num_shards=2)
    return path


def test_a_saved_folder_is_read_row_by_row(tmp_path: Path) -> None:
    chats = [[{"role": "user", "content": "w1"}, {"role": "assistant", "content": f"w{n}"}] for n in range(31)]
    saved(tmp_path / "one", text=[*TEXTS[:7], " \n", *TEXTS[7:]], body=["x"] * 31, messages=chats)
    found = opened(tmp_path, path="one", kind="text").text
    assert read(found) == TEXTS
    assert found.rows.blank == 1
    assert found.read(20) == TEXTS[20]
    assert read(opened(tmp_path, path="one", field="body").text) == ["x"] * 31
    chat = opened(tmp_path, path="one", kind="chat").text
    assert chat.read(3) == Chat((Message("user", "w1"), Message("assistant", "w3")))
    # As older versions of the library keep a sequence of structs.
    by_part = [{part: [turn[part] for turn in turns] for part in ("role", "content")} for turns in chats]
    saved(tmp_path / "lists", messages=by_part)
    assert read(opened(tmp_path, path="lists", kind="chat").text) == read(chat)
    again = opened(tmp_path, path="one", kind="text").text
    assert json.loads(json.dumps(again.identity())) == found.identity()
    saved(tmp_path / "other", text=TEXTS[:-1])
    assert opened(tmp_path, path="other").text.identity() != found.identity()


def test_splits_of_a_saved_folder(tmp_path: Path) -> None:
    parts = {"train": TEXTS[:20], "test": TEXTS[20:25], "dev": TEXTS[25:]}
    tables = {name: datasets.Dataset.from_dict({"text": texts}) for name, texts in parts.items()}
    datasets.DatasetDict(tables).save_to_disk(tmp_path / "several")
    found = opened(tmp_path, path="several", validation="split:test")
    assert read(found.text) == TEXTS[:20]
    assert read(found.held_out) == TEXTS[20:25]
    assert found.commit is None
    assert read(opened(tmp_path, path="several", split="dev").text) == TEXTS[25:]


def test_what_cannot_be_read_is_told_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "one", text=TEXTS, numbers=list(range(30)))
    saved(tmp_path / "empty", text=["", " "])
    saved(tmp_path / "broken", text=TEXTS)
    for file in (tmp_path / "broken").glob("*.arrow"):
        file.write_bytes(b"no arrow")
    datasets.DatasetDict({"dev": datasets.Dataset.from_dict({"text": TEXTS})}).save_to_disk(tmp_path / "several")
    (tmp_path / "a.txt").write_text("w1\n")
    for source, told in (
        ({"path": "one", "field": "body"}, "no key `body`; it has text, numbers; give the source `field: KEY`"),
        (
            {"path": "one", "field": "numbers"},
            r"one, row 0: `numbers` is no text \(0\); make it one, .*\(30 of 30 rows: row 0, row 1",
        ),
        ({"path": "one", "kind": "chat", "field": "text"}, "one, row 0: `text` is not a list of messages"),
        (
            {"path": "one", "split": "test"},
            "one: holds one table without splits; leave `split`, or `validation: split:…`, out",
        ),
        ({"path": "several"}, "several: no split 'train'; it has dev; `split:` of the source"),
        ({"path": "several", "split": "dev", "validation": "split:x"}, "no split 'x'; it has dev"),
        ({"path": "empty"}, "no document with text"),
        ({"path": "broken"}, r"of-00002.arrow: no Arrow file that can be read \(ArrowInvalid"),
        ({"path": "a.txt", "split": "x"}, "source a: `split` is for datasets of the Hub and folders"),
        ({"path": "a.txt", "validation": "split:x"}, "source a: `validation: split:…` is for datasets"),
        ({"path": "dataset:squad"}, "train.yaml:.*names no dataset of the Hub: write dataset:USER/NAME"),
        ({"path": "one", "config": "x"}, "train.yaml:.*`config` is for a path of the form dataset:USER/NAME"),
        ({"path": "one", "revision": "x"}, "train.yaml:.*`revision` is for a path of the form"),
    ):
        with pytest.raises(BadInput, match=told) as caught:
            opened(tmp_path, **source)
        assert "\n" not in str(caught.value)
    monkeypatch.setitem(sys.modules, "datasets", None)
    for path in ("one", "dataset:user/data"):
        with pytest.raises(BadInput, match=r"which is not installed; run `pip install -e '\.\[datasets\]'`"):
            opened(tmp_path, path=path)


def test_training_on_a_saved_folder_is_training_on_its_texts(tmp_path: Path) -> None:
    """Same documents in the same order, so the same bytes; and a changed table does not continue a run."""
    surgeon.apply("neutral-residues", str(base_of(tmp_path)), tmp_path / "out")
    texts = [json.loads(line)["text"] for line in (tmp_path / "fr.jsonl").read_text().splitlines()]
    saved(tmp_path / "fr", text=texts)
    runs = []
    for name in ("fr.jsonl", "fr"):
        sources = [{"name": "fr", "path": name, "share": 1.0, "validation": 0.1}]
        surgeon.train(
            tmp_path / "out", config(tmp_path, steps=3, sources=sources), tmp_path / f"run-{name}", device="cpu"
        )
        runs.append(digests(tmp_path / f"run-{name}"))
    assert runs[0] == runs[1]
    assert runs[0] != digests(tmp_path / "out")


def parquet(texts: list[str]) -> bytes:
    buffer = io.BytesIO()
    datasets.Dataset.from_dict({"text": texts}).to_parquet(buffer)
    return buffer.getvalue()


def of_hub() -> Hub:
    files = {
        "README.md": CARD.encode(),
        "prose/train-0.parquet": parquet(TEXTS[:15]),
        "prose/train-1.parquet": parquet(TEXTS[15:25]),
        "prose/test-0.parquet": parquet(TEXTS[25:]),
        "verse/all.parquet": parquet(["w1 w2", "w3"]),
    }
    return Hub(files, repo_id="user/data", kind="datasets")


def in_a_process(hub: Hub, home: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The client reads its environment when it is imported."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    settings = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    return subprocess.run(
        [*warm(), *arguments],
        env=clean | settings | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


ASK = """
import json, sys
from surgeon.errors import BadInput
from surgeon.data.rows import Rows
from surgeon.data.sources import HubDataset
from surgeon.data.specs import RowsSpec
for repo, config, revision, split in json.loads(sys.argv[1]):
    try:
        dataset = HubDataset(repo, config=config, revision=revision)
        table = dataset.table(split, Rows(RowsSpec()))
        told = [dataset.commit, [table.read(n) for n in range(len(table))], table.identity()]
    except BadInput as error:
        told = str(error)
    print(json.dumps(told))
"""


def ask(hub: Hub, home: Path, *asked: tuple[str | None, ...], **environment: str) -> list[Any]:
    ran = in_a_process(hub, home, "-c", ASK, json.dumps(asked), **environment)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    return [json.loads(line) for line in ran.stdout.splitlines()]


def test_the_hubs_datasets(tmp_path: Path) -> None:
    it = "user/data"
    with serve(of_hub()) as hub:
        hub.refuse = {"/api/datasets/user/gated": (403, "GatedRepo")}
        whole, verse, some, unnamed, unknown, split, revision, gated, another = ask(
            hub,
            tmp_path,
            (it, "prose", None, None),
            (it, "verse", COMMIT, "train"),
            (it, "prose", None, "train[:20%]"),
            (it, None, None, None),
            (it, "drama", None, None),
            (it, "prose", None, "dev"),
            (it, "prose", "v9", None),
            ("user/gated", None, None, None),
            ("user/another", None, None, None),
        )
        assert whole == [COMMIT, TEXTS[:25], ["dataset", it, "prose", COMMIT, "train", 25]]
        assert verse[1] == ["w1 w2", "w3"]
        assert some[1] == TEXTS[:5]
        assert "Config name is missing" in unnamed
        assert "BuilderConfig 'drama' not found. Available: ['prose', 'verse']; `config:`" in unknown
        assert split == "datasets/user/data: no split 'dev'; it has train, test; `split:` of the source names one"
        assert revision == "datasets/user/data: has no revision 'v9'; check `revision:`"
        assert f"gated: accept its conditions at {hub.endpoint}/datasets/user/gated" in gated
        assert "no such repository on the Hub" in another
    (closed,) = ask(hub, tmp_path, (it, "prose", None, None))
    assert "the Hub cannot be reached" in closed
    cached, branch, commit, other, absent = ask(
        hub,
        tmp_path,
        (it, "prose", None, None),
        (it, "prose", "main", None),
        (it, "prose", COMMIT, None),
        (it, "prose", COMMIT[::-1], None),
        ("user/another", None, None, None),
        HF_HUB_OFFLINE="1",
    )
    assert cached == commit == whole
    assert "so the commit of revision 'main' is not known" in branch
    assert f"the cache has {COMMIT}" in other
    assert "Couldn't reach 'user/another'" in absent
    assert all("\n" not in said for said in (unnamed, unknown, revision, gated, another, closed, other, absent))


# Ends as a kill between the last checkpoint and the publishing would.
CUT_OFF = """
import os
from surgeon import cli
from surgeon.training import session
session._publish = lambda *_, **__: os._exit(9)
cli.main()
"""


@pytest.mark.slow
def test_a_run_on_the_hubs_dataset_goes_on_by_its_commit(tmp_path: Path) -> None:
    """Which the log tells, for when the branch has moved meanwhile; RUN keeps it."""
    surgeon.apply("neutral-residues", str(base_of(tmp_path)), tmp_path / "out")
    source = {"name": "fr", "path": "dataset:user/data", "config": "prose", "share": 1.0, "validation": "split:test"}
    given = ["train", str(tmp_path / "out"), str(tmp_path / "train.yaml"), str(tmp_path / "run")]
    home = tmp_path / "home"
    with serve(of_hub()) as hub:
        config(tmp_path, steps=3, sources=[source])
        ran = in_a_process(hub, home, "-c", CUT_OFF, *given, "--device", "cpu")
        assert ran.returncode == 9, ran.stderr
        assert f"source fr: dataset:user/data at commit {COMMIT}" in ran.stderr
        hub.history[COMMIT] = hub.files
        hub.files = hub.files | {"prose/train-1.parquet": parquet(TEXTS[:3])}
        hub.commit = COMMIT[::-1]
        moved = in_a_process(hub, home, "-m", "surgeon", *given, "--device", "cpu")
        assert moved.returncode == 2
        assert "holds checkpoints of another run" in moved.stderr
        config(tmp_path, steps=3, sources=[source | {"revision": COMMIT}])
        ran = in_a_process(hub, home, "-m", "surgeon", *given, "--device", "cpu")
        assert ran.returncode == 0, ran.stderr
        assert "continuing from the checkpoint of step 3" in ran.stderr
    manifest = CheckpointFolder.open(tmp_path / "run").manifest
    assert manifest is not None
    kept = manifest["training"][0]
    assert kept["config"]["sources"][0]["revision"] == COMMIT
    assert kept["losses"].keys() == {"fr"}
