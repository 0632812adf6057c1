"""`preserve`: the base within teaches; its term is what a plain computation in float64 says, however a batch is cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import surgeon
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.common.listener import Quiet
from surgeon.data.packing import ALONE, PackedSequence, batch_of
from surgeon.errors import BadInput, SurgeonError
from surgeon.manifest.within import Within
from surgeon.models.load import load_model
from surgeon.training.config.loading import load_config
from surgeon.training.config.schema import PreserveSpec
from surgeon.training.losses import preserving as losses
from surgeon.training.losses.cross_entropy import FusedHead
from surgeon.training.losses.preserving import Preserving, chunked_divergence
from surgeon.training.objectives.next_tokens import NextTokens
from surgeon.training.opening import opened_run
from surgeon.training.preparing import prepare
from surgeon.training.steps.packed import run_in_one_row
from surgeon.training.steps.trainer import weighed
from tests import tiny
from tests.training.test_losses_live import ids_of, passed
from tests.training.test_train import base_of, config

OPERATIONS = [
    {"op": "insert_layers", "where": {"after": [2]}, "count": 1, "init": {"kind": "copy"}},
    {"op": "gated_adapters", "layers": [1, 4], "size": 12, "local_loss": {"kind": "l1", "weight": 0.5}},
]
ORIGINAL = [
    {"name": "fr", "path": "fr.jsonl", "share": 0.75, "validation": 0},
    {"name": "en", "path": "en.jsonl", "share": 0.25, "role": "original", "validation": 0},
]
OPTIMIZER = {"lr": 1e-2, "warmup": 2, "schedule": "constant", "weight_decay": 0.0}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base in float32 and an output of it, with texts beside."""
    folder = tmp_path_factory.mktemp("preserve")
    base_of(folder, dtype="float32")
    (folder / "plan.yaml").write_text(json.dumps({"surgeon": 1, "operations": OPERATIONS}))
    surgeon.apply(folder / "plan.yaml", str(folder / "base"), folder / "out")
    return folder


def run(made: Path, to: Path, **changes: Any) -> Any:
    given = {"steps": 4, "sources": ORIGINAL, "optimizer": OPTIMIZER, "evaluate_every": 100} | changes
    trained = surgeon.train(made / "out", config(made, **given), to, device="cpu")
    assert trained is not None
    return trained


def curve(log: list[dict[str, Any]], *keys: str) -> torch.Tensor:
    return torch.tensor([[entry[key] for key in keys] for entry in log if "loss" in entry], dtype=torch.float64)


def by_hand(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    taught: torch.Tensor,
    cap: float | None,
    tau: float,
    old: int,
    teacher: torch.Tensor | None = None,
) -> torch.Tensor:
    """Token by token and number by number from the definition; `teacher` is the base's own head."""
    raw = [hidden @ weight.T, taught @ (weight if teacher is None else teacher)[:old].detach().T]
    q, p = ((each if cap is None else cap * torch.tanh(each / cap)).div(tau).softmax(-1) for each in raw)
    return tau**2 * (p * (p.log() - q[:, :old].log())).sum()


@pytest.mark.parametrize(("cap", "tau", "rows", "old"), [(None, 1.0, 50, 33), (2.0, 1.7, 3, 40)])
def test_value_and_gradients_are_the_definitions(cap: float | None, tau: float, rows: int, old: int) -> None:
    drawn = torch.Generator().manual_seed(0)
    hidden, taught = (torch.randn(11, 16, generator=drawn) for _ in range(2))
    weight, teacher = (torch.randn(40, 16, generator=drawn) for _ in range(2))
    # A frozen copy has a head of its own.
    apart = cap is not None
    told = []
    for kind in (torch.float32, torch.float64):
        h, w = (each.to(kind, copy=True).requires_grad_() for each in (hidden, weight))
        if kind is torch.float64:
            total = by_hand(h, w, taught.to(kind), cap, tau, old, teacher.to(kind) if apart else w)
        else:
            total = chunked_divergence(
                h,
                w,
                taught,
                cap=cap,
                temperature=tau,
                old=old,
                rows=rows,
                teacher=teacher if apart else None,
            )
        (total / 3).backward()
        told.append([each.detach().double() for each in (total, h.grad, w.grad) if each is not None])
    assert len(told[0]) == 3
    for found, expected in zip(*told, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("on", ["original", "all"])
def test_a_models_term_is_that_beside_the_base(made: Path, on: Any) -> None:
    """Its value, and what it adds to every gradient, against the base and the model in float64."""
    model, base = load_model(made / "out", dtype="float32"), load_model(made / "base", dtype="float32").double()
    drawn = torch.Generator().manual_seed(3)
    for name in model.freeze_base():
        parameter = model.get_parameter(name)
        parameter.data = parameter.data + 0.05 * torch.randn(parameter.shape, generator=drawn)
    ids = torch.cat([ids_of(domain)[:2] for domain in (0, 1)])
    labels = ids.clone()
    labels[:, :5] = -100
    batch = {
        "input_ids": ids,
        "labels": labels,
        "position_ids": torch.arange(ids.shape[1]).expand_as(ids),
        "domain_ids": torch.tensor([0, 0, 1, 1]),
        ALONE: torch.zeros(4, dtype=torch.bool),
    }
    head = FusedHead(model, "torch")
    spec = PreserveSpec(on=on, weight=3.0, temperature=1.5)
    preserving = Preserving(model, spec, Within(7, (3,), None, newborn=False), head)
    gradients = []
    for teaches in (True, False):
        model.train().zero_grad()
        total = int(preserving.counted(batch).sum()) if teaches else 0
        with preserving.teaching(batch, total, anywhere=True), head.armed():
            model(**{key: value for key, value in batch.items() if key not in ("domain_ids", ALONE)}).loss.backward()
        gradients.append({n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None})
    precise = load_model(made / "out", dtype="float32").double()
    precise.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    precise.freeze_base()
    rows, counts = (2 if on == "original" else 4), labels[:, 1:] != -100
    chosen = counts[:rows]
    states = [each.model(ids[:rows]).last_hidden_state[:, :-1][chosen] for each in (precise, base)]
    head_weight = base.lm_head.weight.detach()
    apart = by_hand(states[0], head_weight, states[1].detach(), None, 1.5, 128) / int(chosen.sum())
    (3.0 * apart).backward()
    assert float(preserving.take()) == pytest.approx(float(apart.detach()), rel=1e-4)
    added = 0
    for name, parameter in precise.named_parameters():
        if parameter.grad is not None:
            difference = gradients[0][name] - gradients[1][name]
            torch.testing.assert_close(difference, parameter.grad, rtol=2e-3, atol=2e-5)
            added += int(parameter.grad.norm() > 1e-3)
    assert added > 10


def forgotten(made: Path, run_folder: Path) -> float:
    """Mean KL of a run from the base on text of the base's."""
    with torch.no_grad():
        p, q = (load_model(f)(ids_of(0)).logits.double().log_softmax(-1) for f in (made / "base", run_folder))
    return float((p.exp() * (p - q)).sum(-1).mean())


def test_it_is_live(made: Path, tmp_path: Path) -> None:
    """It turns the steps, is in the log, and the run ends nearer to the base on text of the base's."""
    asked = {"without": None, "kl": {"weight": 20.0}}
    logs = {name: run(made, tmp_path / name, steps=8, preserve=preserve).log for name, preserve in asked.items()}
    assert forgotten(made, tmp_path / "kl") < 0.6 * forgotten(made, tmp_path / "without")
    told = curve(logs["kl"], "loss.preserve")
    assert told[0] == 0
    assert (told[1:] > 0).all()
    assert not torch.equal(curve(logs["kl"], "grad_norm"), curve(logs["without"], "grad_norm"))
    assert not any("loss.preserve" in entry for entry in logs["without"])


def test_it_does_not_depend_on_how_a_batch_is_cut(made: Path, tmp_path: Path) -> None:
    """Micro-batches with all, some or none of the original sequences, and recomputed activations: one curve.

    The l1 loss of the adapters on original text is in it: of ten sequences one is original.
    """
    curves = []
    tenth = [ORIGINAL[0] | {"share": 0.9}, ORIGINAL[1] | {"share": 0.1}]
    for cut in (10, 5, 1):
        given = {"steps": 3, "batch": 10, "micro_batch": cut, "sources": tenth, "preserve": {"weight": 2.0}}
        log = run(made, tmp_path / str(cut), checkpointing=cut == 5, **given).log
        curves.append(curve(log, "loss", "grad_norm", "loss.preserve"))
    for other in curves[1:]:
        torch.testing.assert_close(other, curves[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("cut", [10, 5, 1])
def test_the_adapters_l1_is_a_mean_over_the_steps_original_tokens(made: Path, cut: int) -> None:
    """Of ten sequences one is original; summed over the micro-batches it is what hooks see, by hand."""
    model = load_model(made / "out", dtype="float32")
    drawn = torch.Generator().manual_seed(4)
    for name in model.freeze_base():
        model.get_parameter(name).data += 0.2 * torch.randn(model.get_parameter(name).shape, generator=drawn)
    ids = torch.cat([ids_of(0)[:1], ids_of(1), ids_of(1)[:1]])
    domains = torch.tensor([0] + [1] * 9)
    seen = [output for output, _ in passed(model, ".adapter", 0)]
    expected = 0.5 * float(torch.stack([each[0].double().abs().mean() for each in seen]).mean())
    whole = {"input_ids": ids, "labels": ids, "domain_ids": domains}
    batches = [{key: value[begin : begin + cut] for key, value in whole.items()} for begin in range(0, 10, cut)]
    shares = NextTokens().shares(batches, torch.device("cpu"))
    items = torch.tensor(ids[:, 1:].numel())
    total = 0.0
    model.train()
    for batch, share in zip(batches, shares, strict=True):
        off = {key: value for key, value in batch.items() if key != "domain_ids"}
        with torch.no_grad(), weighed(model, share):
            losses = [model(**given, num_items_in_batch=items).loss.double() for given in (batch, off)]
        total += float(losses[0] - losses[1])
    assert expected > 0.01
    assert total == pytest.approx(expected, rel=1e-3)


def test_grown_rows_are_not_the_bases(tmp_path: Path) -> None:
    """New tokens get no probability from it, and text behind one is not its own."""
    base = tiny.model("llama")
    model = tiny.model("llama", vocab_size=136)
    with torch.no_grad():
        grown = dict(model.named_parameters())
        for name, value in base.named_parameters():
            grown[name].data[: len(value)] = value
    head = FusedHead(model, "torch")
    within = Within(6, (), 128, newborn=True)
    preserving = Preserving(model, PreserveSpec(), within, head)
    ids = torch.randint(3, 100, (2, 10), generator=torch.Generator().manual_seed(0))
    ids[0, 4] = 130
    batch = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(10).expand(2, 10)}
    batch |= {"domain_ids": torch.zeros(2, dtype=torch.int64), ALONE: torch.zeros(2, dtype=torch.bool)}
    counts = preserving.counted(batch)
    assert counts.sum(dim=1).tolist() == [4, 9]
    with preserving.teaching(batch, int(counts.sum()), anywhere=True), head.armed():
        model.train()(input_ids=ids, labels=ids)
    with torch.no_grad():
        p = base(ids[1:]).logits[:, :-1].double().log_softmax(-1)
        q = model(ids[1:]).logits[:, :-1].double().log_softmax(-1)[..., :128]
        first = base(ids[:1, :4]).logits.double().log_softmax(-1)
        other = model(ids[:1, :4]).logits.double().log_softmax(-1)[..., :128]
    expected = ((p.exp() * (p - q)).sum() + (first.exp() * (first - other)).sum()) / 13
    assert float(preserving.take()) == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize("kind", ["torch", "chunked"])
@pytest.mark.parametrize("one_row", [False, True])
def test_cross_entropy_leaves_out_what_the_base_teaches_alone(kind: Any, one_row: bool) -> None:
    """The base teaches on every token as before, and the mean is over all labels as before."""
    model = tiny.model("llama")
    head = FusedHead(model, kind)
    preserving = Preserving(model, PreserveSpec(), Within(6, (), None, newborn=True), head)
    ids = torch.randint(3, 100, (3, 10), generator=torch.Generator().manual_seed(0))
    sequences = [PackedSequence(row, row, [*range(10)], 0, alone=nth < 2) for nth, row in enumerate(ids.tolist())]
    batch = batch_of(sequences)
    assert int(preserving.counted(batch).sum()) == 27
    given = {name: batch[name] for name in ("input_ids", "labels", "position_ids")}
    if one_row:
        run_in_one_row(model)
    with torch.no_grad():
        expected = F.cross_entropy(model(ids[2:]).logits[0, :-1], ids[2, 1:], reduction="sum")
        for items, count in ((None, 27), (torch.tensor(54), 54)):
            with preserving.teaching(dict(batch), 27, anywhere=True), head.armed():
                found = model(**given, num_items_in_batch=items, use_cache=False).loss
            # The model is the base, so that the term is 0.
            torch.testing.assert_close(found, expected / count, atol=1e-4, rtol=1e-4)
    assert head.left_out is None


def test_text_that_a_model_wrote_is_the_teachers_alone_unless_asked(made: Path, tmp_path: Path) -> None:
    """It is known by the record next to it; without a teacher it must teach something."""

    def alone(changes: dict[str, Any], **keys: Any) -> bool:
        keys |= {"what": "all", "sources": [ORIGINAL[0], ORIGINAL[1] | changes]}
        loaded = load_config(config(made, **keys))
        case = prepare(CheckpointFolder.open(made / "base"), None, loaded, tmp_path / "run", device="cpu", processes=1)
        streams = opened_run(case, Quiet()).data.mixture.streams
        assert not streams[0].packer.alone
        return bool(streams[1].packer.alone)

    kl: dict[str, Any] = {"preserve": {"loss": "kl"}}
    assert not alone({}, **kl)
    record = made / "en.jsonl.recall"
    record.write_text("{}")
    try:
        assert alone({}, **kl)
        assert not alone({"counted": True}, **kl)
        assert not alone({})
        assert not alone({}, preserve={"loss": "fisher"})
    finally:
        record.unlink()
    assert alone({"counted": False}, **kl)
    with pytest.raises(BadInput, match="`counted: false`, and no teacher of `preserve` teaches on it"):
        load_config(config(made, sources=[ORIGINAL[0] | {"counted": False}, ORIGINAL[1]], **kl))


def test_what_cannot_be_is_refused(made: Path, tmp_path: Path) -> None:
    def refusal(**changes: Any) -> str:
        with pytest.raises(BadInput) as refused:
            run(made, tmp_path / "run", **changes)
        return str(refused.value)

    new = [ORIGINAL[0] | {"share": 1.0}]
    assert "train.yaml:" in (said := refusal(sources=new, preserve={}))
    assert "no source has the role `original`; add one (`surgeon recall` has the base write it)" in said
    assert 'is "reverse_kl"; it takes kl, fisher' in refusal(preserve={"loss": "reverse_kl"})
    assert "`preserve.weight` is 0; it takes a number, above 0" in refusal(preserve={"weight": 0})
    said = refusal(preserve={"teacher": "other"})
    assert "`preserve.teacher` is 'other'" in said or "preserve.teacher" in said
    # Without one of its layers the base is not in it.
    plan = {"surgeon": 1, "operations": [{"op": "drop_layers", "layers": [1]}]}
    (tmp_path / "fewer.yaml").write_text(json.dumps(plan))
    surgeon.apply(tmp_path / "fewer.yaml", str(made / "base"), tmp_path / "fewer")
    path = config(made, sources=ORIGINAL, preserve={})
    with pytest.raises(BadInput, match=r"train.yaml:\d+: `preserve`: .*layer 1: taken out by surgery 1"):
        surgeon.train(tmp_path / "fewer", path, tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_a_teacher_that_is_not_the_base_ends_the_run(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were the manifest's layers misread, the first step would not be taken."""
    plain = losses.Preserving

    def misread(model: Any, spec: Any, within: Within, head: Any, **more: Any) -> Preserving:
        return plain(model, spec, Within(within.layers, (2,), None, newborn=True), head)

    monkeypatch.setattr(losses, "Preserving", misread)
    with pytest.raises(SurgeonError, match="does not compute what the base does"):
        run(made, tmp_path / "run", preserve={})
    assert not (tmp_path / "run").exists()


def test_original_text_without_a_share_is_original_text(made: Path, tmp_path: Path) -> None:
    """It counts as a source of it, for the paper's note and for `preserve`; that none is drawn is said."""
    listener = Quiet()
    sources = [ORIGINAL[0] | {"share": 1.0}, ORIGINAL[1] | {"share": 0.0}]
    path = config(made, steps=2, sources=sources, preserve={})
    surgeon.train(made / "out", path, tmp_path / "run", device="cpu", listener=listener)
    said = "\n".join(listener.said)
    assert "no source has the role" not in said
    assert "the share of original text is 0; the paper of gated_adapters mixes in 10% of what the base knows" in said
    assert "`preserve` teaches nothing here: the share of original text is 0" in said


def test_a_dry_run_counts_the_teacher(made: Path, tmp_path: Path) -> None:
    path = config(made, sources=ORIGINAL, preserve={"loss": "kl"}, steps=2)
    rehearsal = surgeon.rehearse(made / "out", path, tmp_path / "run", device="cpu")
    assert rehearsal.seconds_a_step > 0
    assert not (tmp_path / "run").exists()
