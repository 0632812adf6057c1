"""`what: mtp`: MTP layers learn what the frozen model says, and nothing else changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import surgeon
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.data.packing import IGNORED_LABEL, PackedSequence
from surgeon.errors import BadInput
from surgeon.models.load import load_model
from surgeon.models.mtp import load_mtp
from surgeon.train import session
from surgeon.train.drafting import Drafting, drafting_losses
from surgeon.train.publishing import _of_mtp
from tests import mtp
from tests.end_to_end.test_mtp import BRANCH, INSERTED, applied
from tests.train.test_train import config, digests
from tests.train.texts import add_tokenizer, corpus


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base with two MTP layers, and inserted layers below them."""
    folder = tmp_path_factory.mktemp("mtp")
    corpus(folder / "fr.jsonl", seed=1, first=50, count=50)
    corpus(folder / "en.jsonl", seed=2, count=50)
    add_tokenizer(mtp.checkpoint(folder / "base", "deepseek_v3", depth=2, dtype="bfloat16"))
    applied(folder, [INSERTED])
    return folder


def test_the_loss_is_the_divergence_of_transformers_own_drafts(grown: Path) -> None:
    """Of two packed documents, in float64, from drafts that a prefill with transformers' cache makes of each alone."""
    model = load_model(grown / "out", dtype="float32")
    drafting = Drafting(model, load_mtp(CheckpointFolder.open(grown / "out"), model))
    own = mtp.loaded(grown / "out").float()
    own.config.dtype = torch.float32
    drawn = torch.randint(10, 110, (19,), generator=torch.manual_seed(1)).tolist()
    documents = [drawn[:8], drawn[8:]]
    labels = [IGNORED_LABEL if place in (4, 10) else token for place, token in enumerate(drawn)]
    positions = [*range(8), *range(11)]
    found = drafting_losses(drafting, {"it": [PackedSequence(drawn, labels, positions, 0)]})["it"]
    begin = 0
    terms: list[list[float]] = [[], []]
    for document in documents:
        ids = torch.tensor([document])
        with torch.no_grad():
            said = own(ids).logits[0].double().log_softmax(-1)
        for depth, drafted in enumerate(mtp.drafts(own, ids)):
            drafts = drafted[0].double().log_softmax(-1)
            for place in range(len(document) - 2 - depth):
                p, q = said[place + 1 + depth], drafts[place]
                if labels[begin + place + 2 + depth] != IGNORED_LABEL:
                    terms[depth].append(float((p.exp() * (p - q)).sum()))
        begin += len(document)
    means = [sum(each) / len(each) for each in terms]
    assert [len(each) for each in terms] == [13, 12]
    assert found == pytest.approx(sum(means) / 2, rel=1e-4)
    assert not drafting.crosses_documents(torch.tensor(drawn))


def test_mtp_layers_alone_train_after_a_kill_too_and_come_back(
    grown: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = digests(grown / "out")
    how = config(grown, what="mtp", keep_base=True, steps=4, save_every=2, evaluate_every=4)
    whole = surgeon.train(grown / "out", how, tmp_path / "run", device="cpu")
    assert whole is not None
    after = digests(tmp_path / "run")
    moved = {name for name in before if before[name] != after[name]}
    above = {name for name in before if ".layers.6." in name or ".layers.7." in name}
    still = {name for name in above if name.endswith(("embed_tokens.weight", "head.weight", "correction_bias"))}
    assert moved == whole.changes.keys() == above - still
    assert len(still) == 6
    assert all(later < first for first, later in whole.losses.values())
    checked = surgeon.verify(grown / "base", tmp_path / "run", logits=False)
    assert checked.holds, [check for check in checked.checks if not check.holds]
    surgeon.revert(tmp_path / "run", tmp_path / "back")
    assert digests(tmp_path / "back") == digests(grown / "base")
    trained = mtp.loaded(tmp_path / "run")
    ids = torch.randint(10, 110, (1, 12), generator=torch.manual_seed(0))
    assert torch.equal(mtp.generated(trained, ids, use_mtp=True), mtp.generated(trained, ids))

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(session, "_published_step", killed)
        surgeon.train(grown / "out", how, tmp_path / "again", device="cpu")
    again = surgeon.train(grown / "out", how, tmp_path / "again", device="cpu")
    assert again is not None
    assert again.resumed_at == 4
    assert digests(tmp_path / "again") == after


def test_what_is_trained_is_what_transformers_reads(grown: Path, tmp_path: Path) -> None:
    """Experts that are one tensor in memory, and many on disk: each gets its own values."""
    model = load_model(grown / "out", dtype="float32")
    folder = CheckpointFolder.open(grown / "out")
    held = {f"mtp.{name}": value for name, value in load_mtp(folder, model).named_parameters() if "layers" in name}
    stored = {name: value for file in folder.shards for name, value in load_file(folder.path / file).items()}
    for name, value in _of_mtp(folder, held).items():
        assert torch.equal(value, stored[name].float()), name


def test_refused(grown: Path, tmp_path: Path) -> None:
    def refused(out: Path, match: str, **changes: Any) -> None:
        with pytest.raises(BadInput, match=match):
            surgeon.train(out, config(grown, what="mtp", **changes), tmp_path / "run", device="cpu")

    refused(grown / "out", "`preserve` is for a model that trains", preserve={"on": "all"})
    refused(grown / "out", "`sharding` is for a model that trains", sharding="fsdp")
    (tmp_path / "branch").mkdir()
    (tmp_path / "branch" / "base").symlink_to(grown / "base")
    branched = applied(tmp_path / "branch", [BRANCH])
    refused(branched, r"from layer 5 on, where a branch is counted, and they are stored from 4 on")
    plain = mtp.checkpoint(tmp_path / "plain", "glm4_moe", depth=0)
    refused(add_tokenizer(plain), r"has no layers that predict further tokens \(MTP\)")
    without = mtp.checkpoint(tmp_path / "without", "glm4_moe")
    told = json.loads((without / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
    (without / "config.json").write_text(json.dumps(told))
    refused(add_tokenizer(without), "no `num_mtp_layers`")
