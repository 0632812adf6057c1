"""A job is plain data: tensors copied from any number of opened checkpoints, and small files before and after."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from surgeon.blueprint.blueprint import Output
from surgeon.blueprint.recipes import Constant
from surgeon.blueprint.shards import Shard
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.piece_bytes import places_of
from surgeon.common.listener import Quiet, Stopwatch
from surgeon.errors import BadInput
from surgeon.writing.job import Job, copied, in_order, mirrored_in, model_files, places_in, unchanged_among
from surgeon.writing.readback import ReadBack
from surgeon.writing.write import execute
from tests import tiny

NORM, SILENT = "model.norm.weight", "model.layers.0.mlp.down_proj.weight"


@pytest.fixture
def both(tmp_path: Path) -> tuple[CheckpointFolder, CheckpointFolder]:
    """Two checkpoints of the same names and other values."""
    folders = []
    for number, name in enumerate(("first", "second")):
        folder = tiny.checkpoint(tmp_path / name, "llama", seed=number)
        (folder / "LICENSE").write_text(name)
        folders.append(CheckpointFolder.open(folder))
    return folders[0], folders[1]


def joined(first: CheckpointFolder, second: CheckpointFolder) -> Job:
    """Everything of the first, but the last norm of the second, and one tensor of zeros."""

    def finish(proof: ReadBack) -> Mapping[str, bytes]:
        listed = [f"{name} {digest}" for name, digest in sorted(proof.digests.items())]
        return {"later.txt": "\n".join(listed).encode()}

    outputs = [copied(name, info) for name, info in first.tensors.items() if name != SILENT]
    zeros = first.tensors[SILENT]
    outputs.append(Output(SILENT, Constant(0.0, zeros.dtype, zeros.shape), 0))
    shards = (Shard("model.safetensors", tuple(outputs), None),)
    return Job(
        shards=shards,
        sources={"": first.source, "second": second.source},
        places=places_in(first.tensors, shards) | places_of({NORM: second.tensors[NORM]}, "second"),
        files=model_files(first.config, shards, {"code.py": b"# code\n"}),
        finish=finish,
        identity={"of": [first.identity(), second.identity()]},
        carried=second,
    )


def test_a_config_that_no_command_reads_again_is_not_written() -> None:
    labels = {str(number): f"LABEL_{number}" for number in range(200_000)}
    with pytest.raises(BadInput, match=r"^config.json: the output's would have .* shorten the base's `id2label`$"):
        model_files({"model_type": "llama", "id2label": labels}, (), {})


def run(job: Job, out: Path) -> None:
    execute(job, out, Quiet(), Stopwatch())


def held(folder: CheckpointFolder) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.shards for name, tensor in load_file(folder.path / file).items()}


def test_tensors_of_two_checkpoints_in_one_shard(
    both: tuple[CheckpointFolder, CheckpointFolder], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run(joined(*both), out)
    found = load_file(out / "model.safetensors")
    first, second = (held(folder) for folder in both)
    assert not torch.equal(first[NORM], second[NORM])
    expected = first | {NORM: second[NORM], SILENT: torch.zeros_like(first[SILENT])}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert (out / "code.py").read_bytes() == b"# code\n"
    assert (out / "LICENSE").read_text() == "second"
    assert not (out / "model.safetensors.index.json").exists()
    digests = dict(line.split() for line in (out / "later.txt").read_text().splitlines())
    assert digests == {
        name: hashlib.sha256(value.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, value in expected.items()
    }


def test_what_finish_refuses_is_not_published(both: tuple[CheckpointFolder, CheckpointFolder], tmp_path: Path) -> None:
    def refuse(proof: ReadBack) -> Mapping[str, bytes]:
        # The tensor that the output has no copy of is read for it.
        assert proof.digests_of(both[0]).keys() == both[0].tensors.keys()
        raise BadInput("not this one")

    with pytest.raises(BadInput, match="not this one"):
        run(dataclasses.replace(joined(*both), finish=refuse), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second"]


def test_a_source_that_changes_meanwhile_is_found(
    both: tuple[CheckpointFolder, CheckpointFolder], tmp_path: Path
) -> None:
    def touch(proof: ReadBack) -> Mapping[str, bytes]:
        shard = both[1].path / both[1].tensors[NORM].file
        shard.write_bytes(shard.read_bytes())
        return {}

    with pytest.raises(BadInput, match="changed since the run began"):
        run(dataclasses.replace(joined(*both), finish=touch), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_shard_is_its_twin_where_its_data_is_all_of_that_file_in_its_order(
    both: tuple[CheckpointFolder, CheckpointFolder],
) -> None:
    first, second = both
    shards = tuple(
        Shard(file, tuple(copied(i.name, i) for i in infos), file) for file, infos in in_order(first).items()
    )
    file = first.tensors[NORM].file
    own, mirrored = places_in(first.tensors, shards), mirrored_in(first, shards)
    same = [n for n, i in first.tensors.items() if (i.file, i.shape) == (file, first.tensors[NORM].shape)]
    assert len(same) > 1
    others = {
        "another source's": own | places_of({NORM: second.tensors[NORM]}, "second"),
        "two in each other's places": own | {same[0]: own[same[1]], same[1]: own[same[0]]},
        "one that is made": {name: place for name, place in own.items() if name != NORM},
    }
    assert unchanged_among(shards, own, mirrored) == mirrored
    for words, places in others.items():
        assert unchanged_among(shards, places, mirrored).keys() == mirrored.keys() - {file}, words
    everywhere = places_of(second.tensors, "second")
    assert not unchanged_among(shards, everywhere, mirrored)


def test_another_job_has_another_fingerprint(both: tuple[CheckpointFolder, CheckpointFolder]) -> None:
    job = joined(*both)
    assert job.fingerprint == joined(*both).fingerprint
    others = [
        dataclasses.replace(job, identity={"of": "others"}),
        dataclasses.replace(job, files={**job.files, "code.py": b"# other\n"}),
        dataclasses.replace(job, shards=(dataclasses.replace(job.shards[0], file="other.safetensors"),)),
    ]
    assert len({each.fingerprint for each in (job, *others)}) == 4
