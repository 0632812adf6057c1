"""`preserve: {teacher: {cached: k}}`: the coarsened divergence, and a base that spoke before the first step."""

from __future__ import annotations

import io
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

import surgeon
from surgeon.common import disk_space
from surgeon.common.formatting import size
from surgeon.common.listener import Quiet
from surgeon.data.packing import Mixture
from surgeon.errors import BadInput
from surgeon.training.losses import cached_teacher
from surgeon.training.losses.cached_teacher import INDEX_FILE, SAID_FILE, CachedTeacher
from surgeon.training.losses.preserving import Preserving, chunked_divergence
from surgeon.training.losses.top_k import TopK
from surgeon.training.places import work_folder
from surgeon.training.saved.checkpoints import RunRecord
from surgeon.training.steps.trainer import SurgeonTrainer
from surgeon.training.train import rehearsal_view
from tests.training.test_preserve import ORIGINAL, curve
from tests.training.test_train import base_of, config, digests

# All of a plain base trains, so that without a cache its teacher would be a second model.
FULL: dict[str, Any] = {
    "what": "all",
    "steps": 4,
    "batch": 4,
    "sources": ORIGINAL,
    "optimizer": {"lr": 1e-3, "warmup": 0, "schedule": "constant", "weight_decay": 0.0},
    "evaluate_every": 100,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cached")
    base_of(folder, dtype="float32")
    return folder


def run(
    made: Path, to: Path, *, loss: str = "kl", teacher: Any = "base", listener: Quiet | None = None, **changes: Any
) -> Any:
    preserve = {"loss": loss, "weight": 5.0, "temperature": 1.3, "teacher": teacher}
    path = config(made, **FULL | {"preserve": preserve} | changes)
    trained = surgeon.train(made / "base", path, to, device="cpu", listener=listener)
    assert trained is not None
    return trained


def logits(count: int, size: int, seed: int) -> torch.Tensor:
    return 3 * torch.randn(count, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def coarse(log_p: torch.Tensor, log_q: torch.Tensor, k: int) -> torch.Tensor:
    """Each token's divergence over k + 1 buckets, from the definition; tokens that p does not know are in none."""
    kept = log_p.argsort(dim=-1, descending=True)[:, :k]
    parts = []
    for each in (log_p.exp(), log_q.exp()):
        inside = each.gather(1, kept)
        outside = each.scatter(1, kept, 0.0).sum(-1, keepdim=True)
        parts.append(torch.cat([inside, outside] if k < log_p.shape[1] else [inside], dim=-1))
    first, second = parts
    return (first * (first / second).log()).sum(-1)


def test_the_coarsened_divergence_rises_with_k_to_the_whole_one() -> None:
    """In float64: a KL by its definition, never below 0 nor above the whole, which it reaches at k = V."""
    log_p, log_q = (logits(9, 30, seed).log_softmax(-1) for seed in (0, 1))
    whole = (log_p.exp() * (log_p - log_q)).sum(-1)
    before = torch.zeros(9, dtype=torch.float64)
    for k in (1, 2, 5, 12, 29, 30):
        dealt = TopK.of(log_p.clone(), k).dealt_out(log_q)
        torch.testing.assert_close(dealt.logsumexp(-1), torch.zeros(9, dtype=torch.float64))
        found = (dealt.exp() * (dealt - log_q)).sum(-1)
        torch.testing.assert_close(found, coarse(log_p, log_q, k))
        assert (found >= before - 1e-12).all()
        assert (found <= whole + 1e-12).all()
        before = found
    torch.testing.assert_close(before, whole, rtol=1e-12, atol=1e-12)
    # Of one token it is far from all.
    assert (coarse(log_p, log_q, 1) < 0.8 * whole).any()


@pytest.mark.parametrize(("old", "cap", "tau"), [(33, None, 1.7), (40, 2.0, 1.0)])
def test_value_and_gradients_are_the_definitions(old: int, cap: float | None, tau: float) -> None:
    """Against autograd in float64; some rows of the head are tokens that the base does not know."""
    hidden, weight, other, teacher = (logits(n, 16, seed) / 3 for seed, n in enumerate((11, 40, 11, 40)))
    raw = [hidden.requires_grad_() @ weight.requires_grad_().T, other @ teacher[:old].T]
    log_q, log_p = ((each if cap is None else cap * torch.tanh(each / cap)).div(tau).log_softmax(-1) for each in raw)
    expected = tau**2 * coarse(log_p, log_q[:, :old], 6).sum()
    (expected / 3).backward()
    narrow = [each.detach().float().requires_grad_() for each in (hidden, weight)]
    kept = TopK.of(log_p.float(), 6)
    found = chunked_divergence(*narrow, kept, cap=cap, temperature=tau, old=old, rows=4)
    (found / 3).backward()
    for one, precise in ((found, expected), (narrow[0].grad, hidden.grad), (narrow[1].grad, weight.grad)):
        assert one is not None and precise is not None
        torch.testing.assert_close(one.double(), precise, rtol=1e-4, atol=1e-5)


def test_all_that_the_base_says_teaches_as_a_frozen_copy_does(made: Path, tmp_path: Path) -> None:
    """One curve, however the batch is cut; of a few tokens less is left, and with it the model still forgets less."""
    copy = run(made, tmp_path / "copy").log
    keys = ("loss", "grad_norm", "loss.preserve")
    for cut in (4, 1):
        log = run(made, tmp_path / str(cut), teacher={"cached": 128}, micro_batch=cut, checkpointing=cut == 1).log
        torch.testing.assert_close(curve(log, *keys), curve(copy, *keys), rtol=2e-4, atol=2e-5)
    listener = Quiet()
    few = run(made, tmp_path / "few", teacher={"cached": 4}, listener=listener).log
    assert any("what the base said before the first step teaches: kl" in line for line in listener.said)
    assert any(line.startswith("the base's 4 likeliest tokens at each of at most") for line in listener.said)
    told = curve(few, "loss.preserve")
    assert abs(float(told[0])) < 1e-6
    assert (told[1:] > 1e-5).all()
    assert (told[1:] < curve(copy, "loss.preserve")[1:]).all()
    assert not work_folder(tmp_path / "few").exists()


class Killed(BaseException):
    """No Exception, so that nothing tidies up behind it."""


def test_killed_anywhere_it_ends_byte_for_byte(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the base speaks, with half a write behind it, and while the model trains."""
    given = {"teacher": {"cached": 5}, "save_every": 1, "micro_batch": 1}
    files: list[list[bytes]] = []
    opened, write = CachedTeacher._open, cached_teacher._write
    step = SurgeonTrainer.training_step

    def kept(self: CachedTeacher) -> None:
        opened(self)
        files.append([(self.work / name).read_bytes() for name in (SAID_FILE, INDEX_FILE)])

    def cut_off(said: Any, *arguments: Any) -> None:
        if said.tell():
            said.write(b"half a record")
            said.flush()
            raise Killed
        write(said, *arguments)

    def third(self: Any, *arguments: Any, **more: Any) -> Any:
        if self.state.global_step == 2:
            raise Killed
        return step(self, *arguments, **more)

    monkeypatch.setattr(CachedTeacher, "_open", kept)
    run(made, tmp_path / "whole", **given)
    for where, name, replacement in ((cached_teacher, "_write", cut_off), (SurgeonTrainer, "training_step", third)):
        with monkeypatch.context() as patched, pytest.raises(Killed):
            patched.setattr(where, name, replacement)
            run(made, tmp_path / "cut", **given)
    record = RunRecord.read(work_folder(tmp_path / "cut"))
    assert record is not None and record.kept.keys() == {INDEX_FILE}
    # Changed since, it counts for nothing, and is recorded anew.
    index = work_folder(tmp_path / "cut") / INDEX_FILE
    content = index.read_bytes()
    index.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(SurgeonTrainer, "training_step", third)
        run(made, tmp_path / "cut", **given)
    assert index.read_bytes() == content
    # From here on it is looked up alone.
    with monkeypatch.context() as patched:
        patched.setattr(Preserving, "top", None)
        run(made, tmp_path / "cut", **given)
    assert len(files) == 4 and all(each == files[0] for each in files)
    assert digests(tmp_path / "whole") == digests(tmp_path / "cut")


def test_what_the_disk_changed_is_not_taught(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = CachedTeacher._open

    def spoiled(self: CachedTeacher) -> None:
        opened(self)
        content = bytearray((self.work / SAID_FILE).read_bytes())
        content[5] ^= 1
        (self.work / SAID_FILE).write_bytes(content)

    monkeypatch.setattr(CachedTeacher, "_open", spoiled)
    with pytest.raises(BadInput, match=r"teacher\.bin: not what was written.* the base predicts again"):
        run(made, tmp_path / "run", teacher={"cached": 3})


def test_what_cannot_be_is_refused(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(**changes: Any) -> str:
        with pytest.raises(BadInput) as refused:
            run(made, tmp_path / "run", **changes)
        return str(refused.value)

    said = refusal(teacher={"cached": 129})
    assert "`preserve.teacher.cached` is 129, and the base has 128 tokens; use 128 at most" in said
    assert "did you mean `cached`" in refusal(teacher={"cache": 8})
    assert "`preserve.teacher.cached` is 0" in refusal(teacher={"cached": 0})
    assert "preserve.teacher" in refusal(teacher="copy")
    monkeypatch.setattr(disk_space, "free_bytes", lambda _: 1000)
    assert "for what the base says" in refusal(teacher={"cached": 8})
    assert not (tmp_path / "run").exists()


def test_a_dry_run_says_what_it_takes(made: Path, tmp_path: Path) -> None:
    path = config(made, **FULL | {"preserve": {"teacher": {"cached": 8}}})
    shown = surgeon.rehearse(made / "base", path, tmp_path / "run", device="cpu")
    # At most as many original sequences as 16 of a quarter and 2 more, of 23 tokens of 8 ids, 8 numbers and the rest's.
    (asking,) = shown.before
    assert asking.seconds > 0 and asking.words.endswith(f"kept on disk: {size(6 * 23 * 68 + 16 * 12)}")
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(rehearsal_view(shown))
    assert "for what the base says, kept on disk" in console.export_text()
    assert not work_folder(tmp_path / "run").exists()


def test_a_mixture_gives_no_more_than_is_reckoned_with() -> None:
    drawn = random.Random(0)
    for seed in range(40):
        shares = [drawn.random() ** 3 for _ in range(drawn.randrange(1, 6))]
        domains = [drawn.randrange(2) for _ in shares]
        streams = [
            SimpleNamespace(name=str(n), packer=SimpleNamespace(domain=d), next=lambda: None, state=list)
            for n, d in enumerate(domains)
        ]
        mixture = Mixture[Any](streams, shares, seed=seed)  # type: ignore[arg-type]
        count = drawn.randrange(1, 60)
        most = CachedTeacher(Path(), 4, "original", mixture, count, 8).most_sequences
        for _ in range(count):
            mixture.next()
        assert sum(t for t, d in zip(mixture.taken, domains, strict=True) if d == 0) <= most <= count
