"""`report_to`: the log in other people's trackers, and what keeps a run from beginning."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event
from transformers.integrations import INTEGRATION_TO_CALLBACK, TensorBoardCallback

import surgeon
from surgeon.errors import BadInput
from surgeon.training.places import work_folder
from tests.training.test_train import config, digests, grown


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """What TensorBoard shows: values by tag and step (TFRecord: length, checksum, event, checksum)."""
    found: dict[str, dict[int, float]] = {}
    for file in sorted(folder.iterdir()):
        stream = io.BytesIO(file.read_bytes())
        while head := stream.read(12):
            event = Event.FromString(stream.read(struct.unpack("<Q", head[:8])[0]))
            stream.read(4)
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    found.setdefault(value.tag, {})[event.step] = value.simple_value
    return found


def test_tensorboard_gets_the_log_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TENSORBOARD_LOGGING_DIR", raising=False)
    out = grown(tmp_path)
    surgeon.train(out, config(tmp_path), tmp_path / "plain", device="cpu")
    trained = surgeon.train(out, config(tmp_path, report_to=["tensorboard"]), tmp_path / "run", device="cpu")
    assert trained is not None
    assert digests(tmp_path / "run") == digests(tmp_path / "plain")
    shown = scalars(tmp_path / "run-tensorboard")
    for tag, key in (
        ("train/loss", "loss"),
        ("train/learning_rate", "learning_rate"),
        ("eval/fr_loss", "eval_fr_loss"),
    ):
        logged = {entry["step"]: entry[key] for entry in trained.log if key in entry}
        assert len(logged) >= 2
        assert shown[tag] == pytest.approx(logged, rel=1e-6)
    assert not work_folder(tmp_path / "run").exists()


def test_tensorboards_own_variable_has_its_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "logs"))
    out = grown(tmp_path)
    surgeon.train(out, config(tmp_path, steps=2, report_to=["tensorboard"]), tmp_path / "run", device="cpu")
    assert scalars(tmp_path / "logs")
    assert not (tmp_path / "run-tensorboard").exists()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("tensorbord", r"train\.yaml:[0-9]+: report_to\[0\]: tensorbord: no tracker .* did you mean `tensorboard`\?"),
        (
            "clearml",
            r"train\.yaml:[0-9]+: `report_to`: clearml needs the Python module clearml, which is not installed",
        ),
        ("flyte", r"`report_to`: flyte needs the Python module flytekit"),
        ("kubeflow", r"report_to: kubeflow: "),
    ],
)
def test_trackers_that_are_not_there(tmp_path: Path, name: str, told: str) -> None:
    out = grown(tmp_path)
    with pytest.raises(BadInput, match=told):
        surgeon.train(out, config(tmp_path, report_to=[name]), tmp_path / "run", device="cpu")
    assert not work_folder(tmp_path / "run").exists()


def test_a_tracker_that_cannot_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoLogin(TensorBoardCallback):  # type: ignore[misc]
        def on_train_begin(self, *_arguments: object, **_named: object) -> None:
            raise PermissionError("not logged in;\nrun `login` first")

    monkeypatch.setitem(INTEGRATION_TO_CALLBACK, "tensorboard", NoLogin)
    out = grown(tmp_path)
    settings = config(tmp_path, report_to=["tensorboard"])
    with pytest.raises(
        BadInput, match=r"tensorboard: cannot begin \(PermissionError: not logged in; run `login` first\)"
    ):
        surgeon.train(out, settings, tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()
    monkeypatch.undo()
    # Who watches is no part of the run: it goes on without.
    assert surgeon.train(out, config(tmp_path), tmp_path / "run", device="cpu") is not None
