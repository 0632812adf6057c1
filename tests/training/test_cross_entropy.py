"""The loss without logits: the model's own, for every family and every auxiliary loss, in less memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import surgeon
from surgeon.data import scoring as scores
from surgeon.data.packing import PackedSequence
from surgeon.data.scoring import score_sequences
from surgeon.errors import BadInput, SurgeonError
from surgeon.models.load import load_model
from surgeon.training.losses.cross_entropy import FusedHead, choose, chunked_cross_entropy
from tests import tiny
from tests.training.test_train import config, digests, grown


def plain(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, cap: float | None) -> torch.Tensor:
    logits = (hidden @ weight.T).float()
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
    return F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")


@pytest.mark.parametrize("rows", [1, 7, 50])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradients_are_torchs(rows: int, cap: float | None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(30, 16), torch.randn(50, 16)
    labels = torch.randint(50, (30,))
    labels[::4] = -100
    told = []
    for loss in (lambda *a: plain(*a, cap), lambda *a: chunked_cross_entropy(*a, cap=cap, rows=rows)):
        given = [each.to(dtype).requires_grad_() for each in (hidden, weight)]
        total = loss(*given, labels)
        (total / 3).backward()
        told.append((total.detach(), *(each.grad for each in given)))
    near: dict[str, float] = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 0.02, "atol": 0.02}
    for found, expected in zip(told[1], told[0], strict=True):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, **near)


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_is_frozen_gets_no_gradient(frozen: int) -> None:
    given = [torch.randn(6, 4).requires_grad_(frozen != 0), torch.randn(9, 4).requires_grad_(frozen != 1)]
    labels = torch.arange(6)
    chunked_cross_entropy(*given, labels).backward()
    expected = [each.detach().clone().requires_grad_() for each in given]
    plain(*expected, labels, None).backward()
    assert given[frozen].grad is None
    torch.testing.assert_close(given[1 - frozen].grad, expected[1 - frozen].grad)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_familys_loss(family: str) -> None:
    """Gemma 2 caps its logits; its cap must show, or nothing is tested."""
    model = tiny.model(family)
    cap = getattr(model.config, "final_logit_softcapping", None)
    if family == "gemma2":
        assert cap is not None
        with torch.no_grad():
            model.lm_head.weight.mul_(500)
    ids = torch.randint(3, 100, (2, 12), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, 3:5] = -100
    fused = FusedHead(model, "chunked")
    for more in ({}, {"num_items_in_batch": torch.tensor(7)}):
        own = model(input_ids=ids, labels=labels, **more)
        own.loss.backward()
        expected = {name: parameter.grad for name, parameter in model.named_parameters()}
        model.zero_grad()
        with fused.armed():
            found = model(input_ids=ids, labels=labels, **more)
        assert found.logits.shape[-1] == model.config.hidden_size
        found.loss.backward()
        torch.testing.assert_close(found.loss, own.loss, rtol=1e-5, atol=1e-5)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=1e-5, msg=name)
        model.zero_grad()
    assert torch.equal(model(input_ids=ids, labels=labels, **more).logits, own.logits)
    assert getattr(model.config, "final_logit_softcapping", None) == cap
    fused.check(ids)


@pytest.mark.parametrize(
    "plan, family",
    [(plan, "gemma2") for plan in ("control-llm", "neutral-residues", "mixture-of-control", "pmoe")]
    + [("control-llm", "llama")],
)
def test_a_run_is_the_same_run_with_its_auxiliary_losses(tmp_path: Path, plan: str, family: str) -> None:
    out = grown(tmp_path, plan, family, num_hidden_layers=8)
    logs, starts = [], []
    for kind in ("torch", "chunked"):
        path = config(tmp_path, steps=3, dtype="float32", cross_entropy=kind)
        trained = surgeon.train(out, path, tmp_path / kind, device="cpu")
        assert trained is not None
        logs.append([(entry["loss"], entry["grad_norm"]) for entry in trained.log if "loss" in entry])
        starts.append({name: losses[0] for name, losses in trained.losses.items()})
    torch.testing.assert_close(torch.tensor(logs[0]), torch.tensor(logs[1]), rtol=2e-4, atol=1e-5)
    assert starts[0] == starts[1]
    assert digests(tmp_path / "chunked") != digests(out)


def test_a_model_that_does_more_to_its_logits_is_refused() -> None:
    model = tiny.model("llama")

    class Scaled(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 20

    head = Scaled(model.config.hidden_size, model.config.vocab_size, bias=False)
    head.weight = model.lm_head.weight
    model.lm_head = head
    with pytest.raises(SurgeonError, match="does more to its logits than is known; say `cross_entropy: torch`"):
        FusedHead(model, "chunked").check(torch.randint(100, (1, 12)))
    model.lm_head = torch.nn.Linear(model.config.hidden_size, model.config.vocab_size)
    with pytest.raises(BadInput, match="needs a linear head without bias"):
        FusedHead(model, "chunked")


def test_which_one_is_taken() -> None:
    assert choose("auto", tokens=8 * 2048, vocabulary=128_256) == "chunked"
    assert choose("auto", tokens=4 * 24, vocabulary=128) == "torch"
    assert choose("torch", tokens=8 * 2048, vocabulary=128_256) == "torch"
    assert choose("chunked", tokens=1, vocabulary=1) == "chunked"


PEAK = """
import torch
from pathlib import Path
from torch.nn import functional as F
from surgeon.training.losses.cross_entropy import chunked_cross_entropy
def peak():
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
torch.manual_seed(0)
hidden, weight = torch.randn(1024, 16, requires_grad=True), torch.randn(40000, 16)
labels = torch.randint(40000, (1024,))
# What the libraries take at first use is none of the logits.
chunked_cross_entropy(hidden[:64], weight, labels[:64], rows=8).backward()
peaks = [peak()]
chunked_cross_entropy(hidden, weight, labels, rows=64).backward()
peaks.append(peak())
F.cross_entropy(hidden @ weight.T, labels, reduction="sum").backward()
peaks.append(peak())
print(*peaks)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_logits_are_never_all_in_memory() -> None:
    ran = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    nothing, chunked, whole = map(int, ran.stdout.split())
    logits = 1024 * 40000 * 4
    assert chunked - nothing < 0.6 * logits
    assert whole - nothing > 1.5 * logits


def test_training_with_the_loss_in_chunks_starts_at_the_bases_loss(tmp_path: Path) -> None:
    out = grown(tmp_path)
    model = load_model(out)
    base = load_model(tmp_path / "base")
    ids = torch.randint(3, 100, (2, 12), generator=torch.Generator().manual_seed(1))
    losses = []
    for each in (model, base):
        with FusedHead(each, "chunked").armed(), torch.no_grad():
            losses.append(each(input_ids=ids, labels=ids).loss)
    assert torch.equal(*losses)


def test_held_out_logits_stay_small_whatever_the_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model("llama")
    drawn = torch.Generator().manual_seed(1)
    sequences = []
    for _ in range(5):
        ids = torch.randint(3, 100, (16,), generator=drawn).tolist()
        sequences.append(PackedSequence(ids, ids, list(range(16)), 0))
    whole = score_sequences(model, sequences, micro_batch=5).loss
    seen: list[int] = []
    model.lm_head.register_forward_hook(lambda _module, _given, logits: seen.append(len(logits)))
    monkeypatch.setattr(scores, "_LOGITS_BYTES", 2 * 16 * model.config.vocab_size * model.dtype.itemsize)
    assert score_sequences(model, sequences, micro_batch=5).loss == pytest.approx(whole, rel=1e-4)
    assert seen == [2, 2, 1]
