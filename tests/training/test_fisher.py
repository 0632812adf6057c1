"""`preserve: {loss: fisher}`: F and the term are float64's by definition; a killed run ends as any other."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import surgeon
from surgeon.common.distributed import Ranks
from surgeon.common.listener import Quiet
from surgeon.data.packing import PackedSequence
from surgeon.errors import BadInput
from surgeon.models.load import load_model
from surgeon.training.config.schema import PreserveSpec
from surgeon.training.losses.cross_entropy import FusedHead
from surgeon.training.places import work_folder
from surgeon.training.remedies import fisher
from surgeon.training.remedies.fisher import FISHER_FILE, Fisher, estimated
from surgeon.training.saved.checkpoints import RunRecord
from surgeon.training.steps.trainer import SurgeonTrainer
from surgeon.training.train import rehearsal_view
from tests.training.test_losses_live import ids_of
from tests.training.test_preserve import OPERATIONS, OPTIMIZER, ORIGINAL, curve, forgotten
from tests.training.test_train import base_of, config, digests

# Two documents in a sequence; the first three tokens of another do not count.
IDS = ids_of(0)
SEQUENCES = [
    PackedSequence(IDS[0, :14].tolist(), IDS[0, :14].tolist(), [*range(14)], 0),
    PackedSequence(
        IDS[1, :12].tolist(),
        [-100] * 3 + IDS[1, 3:6].tolist() + [-100] + IDS[1, 7:12].tolist(),
        [*range(6), *range(6)],
        0,
    ),
]


class Killed(BaseException):
    """No Exception, so that nothing tidies up behind it."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base in float32 and an output of it, with texts beside."""
    folder = tmp_path_factory.mktemp("fisher")
    base_of(folder, dtype="float32")
    (folder / "plan.yaml").write_text(json.dumps({"surgeon": 1, "operations": OPERATIONS}))
    surgeon.apply(folder / "plan.yaml", str(folder / "base"), folder / "out")
    return folder


def run(made: Path, to: Path, *, out: str = "out", listener: Quiet | None = None, **changes: Any) -> Any:
    given = {"steps": 4, "sources": ORIGINAL, "optimizer": OPTIMIZER, "evaluate_every": 100} | changes
    trained = surgeon.train(made / out, config(made, **given), to, device="cpu", listener=listener)
    assert trained is not None
    return trained


def trained_model(made: Path) -> Any:
    """The output with what trains set to, and moved from silence."""
    model = load_model(made / "out", dtype="float32")
    drawn = torch.Generator().manual_seed(3)
    for name in model.freeze_base():
        model.get_parameter(name).data += 0.05 * torch.randn(model.get_parameter(name).shape, generator=drawn)
    return model


def by_hand(made: Path, model: Any) -> dict[str, torch.Tensor]:
    """Sequence by sequence from the definition, in float64."""
    precise = load_model(made / "out", dtype="float32").double()
    precise.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    precise.freeze_base()
    precise.eval()
    trained = {name: p for name, p in precise.named_parameters() if p.requires_grad}
    total, tokens = dict.fromkeys(trained, torch.zeros(())), 0
    for sequence in SEQUENCES:
        ids, positions = (torch.tensor([each]) for each in (sequence.ids, sequence.positions))
        says = precise(input_ids=ids, position_ids=positions, use_cache=False).logits[0].log_softmax(-1)
        score = torch.zeros((), dtype=torch.float64)
        for place, label in enumerate(sequence.labels[1:]):
            if label != -100:
                score, tokens = score + says[place, label], tokens + 1
        gradients = torch.autograd.grad(score, list(trained.values()))
        total = {name: total[name] + g.square() for (name, g) in zip(trained, gradients, strict=True)}
    return {name: value / tokens for name, value in total.items()}


@pytest.mark.parametrize("how", ["plain", "torch", "chunked"])
def test_it_is_the_definitions(made: Path, how: Any) -> None:
    """F of every parameter that trains, and the gradient and the value of its term."""
    model = trained_model(made)
    expected = by_hand(made, model)
    head = None if how == "plain" else FusedHead(model, how)
    found = estimated(model.train(), SEQUENCES, head, Ranks())
    assert found.keys() == expected.keys() and len(found) > 10
    assert model.training and all(parameter.grad is None for parameter in model.parameters())
    for name, each in found.items():
        torch.testing.assert_close(each.double(), expected[name], rtol=1e-3, atol=1e-3 * float(expected[name].max()))
    preserve = PreserveSpec(loss="fisher", weight=7.0)
    case: Any = SimpleNamespace(loaded=SimpleNamespace(config=SimpleNamespace(preserve=preserve)))
    anchored = Fisher(case)
    anchored.anchor(model, found)
    births = {name: model.get_parameter(name).detach().double() for name in found}
    with torch.no_grad():
        for name in found:
            model.get_parameter(name).add_(
                0.01 * torch.arange(model.get_parameter(name).numel()).view_as(births[name]).cos()
            )
            model.get_parameter(name).grad = torch.ones_like(model.get_parameter(name))
    moved = {name: model.get_parameter(name).detach().double().requires_grad_() for name in found}
    term = sum((0.5 * expected[name] * (moved[name] - births[name]).square()).sum() for name in found)
    assert isinstance(term, torch.Tensor)
    (7.0 * term).backward()
    assert float(anchored.pull()) == pytest.approx(7 * float(term.detach()), rel=1e-3)
    assert anchored.take() == pytest.approx(float(term.detach()), rel=1e-3) and anchored.take() == 0
    for name, parameter in moved.items():
        grad = parameter.grad
        assert grad is not None
        pulled = model.get_parameter(name).grad.double() - 1
        torch.testing.assert_close(pulled, grad, rtol=1e-3, atol=1e-5)


def test_it_is_live(made: Path, tmp_path: Path) -> None:
    """It keeps what nothing else keeps, however a batch is cut; with a teacher both terms are in the log."""
    new = [ORIGINAL[0] | {"share": 1.0}, ORIGINAL[1] | {"share": 0.0}]
    runs = {
        "without": {},
        "fisher": {"preserve": {"loss": "fisher", "weight": 300.0, "sequences": 6}},
        "cut": {"preserve": {"loss": "fisher", "weight": 300.0, "sequences": 6}, "micro_batch": 1},
        "both": {
            "preserve": {"loss": ["kl", "fisher"], "weight": {"kl": 2.0, "fisher": 300.0}, "sequences": 6},
            "sources": ORIGINAL,
        },
    }
    logs = {
        name: run(made, tmp_path / name, **{"steps": 5, "sources": new} | given).log for name, given in runs.items()
    }
    assert forgotten(made, tmp_path / "fisher") < 0.6 * forgotten(made, tmp_path / "without")
    assert forgotten(made, tmp_path / "both") < 0.6 * forgotten(made, tmp_path / "without")
    term = curve(logs["fisher"], "loss.fisher")
    assert term[0] == 0 and (term[1:] > 0).all()
    assert (curve(logs["both"], "loss.fisher", "loss.preserve")[1:] > 0).all()
    keys = ("loss", "grad_norm", "loss.fisher")
    torch.testing.assert_close(curve(logs["cut"], *keys), curve(logs["fisher"], *keys), rtol=1e-3, atol=1e-5)
    # The log's loss has the term with its weight: at the first step it is 0, and the two runs part there.
    apart = curve(logs["fisher"], "loss")[1] - curve(logs["without"], "loss")[1]
    torch.testing.assert_close(apart, 300 * term[1], rtol=0.05, atol=1e-3)


def test_killed_anywhere_it_ends_byte_for_byte(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is estimated, while it is written, and while the model trains; then it is not estimated again."""
    given: dict[str, Any] = {"save_every": 1, "preserve": {"loss": ["kl", "fisher"], "sequences": 3}}
    run(made, tmp_path / "whole", **given)
    nats, keep, step, calls = fisher._nats, RunRecord.keep, SurgeonTrainer.training_step, []

    def second(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise Killed
        return nats(*arguments)

    def half(self: Any, work: Path, *files: str) -> None:
        keep(self, work, *files)
        (work / FISHER_FILE).write_bytes((work / FISHER_FILE).read_bytes()[:-9])
        raise Killed

    def third(self: Any, *arguments: Any, **more: Any) -> Any:
        if self.state.global_step == 2:
            raise Killed
        return step(self, *arguments, **more)

    for where, name, cut in (
        (fisher, "_nats", second),
        (RunRecord, "keep", half),
        (SurgeonTrainer, "training_step", third),
    ):
        with monkeypatch.context() as patched, pytest.raises(Killed):
            patched.setattr(where, name, cut)
            run(made, tmp_path / "cut", **given)
    with monkeypatch.context() as patched:
        patched.setattr(fisher, "estimated", None)
        run(made, tmp_path / "cut", **given)
    assert digests(tmp_path / "whole") == digests(tmp_path / "cut")


def test_one_of_other_weights_is_not_taken(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put in its place, it is estimated again; of another base or text the run is another, and refused."""
    given: dict[str, Any] = {"preserve": {"loss": "fisher", "sequences": 3}, "save_every": 1}
    run(made, tmp_path / "whole", **given)

    def killed(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(SurgeonTrainer, "training_step", killed)
        run(made, tmp_path / "run", **given)
    work = work_folder(tmp_path / "run")
    record = RunRecord.read(work)
    assert record is not None and FISHER_FILE in record.kept
    other = {name: 1000 * tensor for name, tensor in load_file(work / FISHER_FILE).items()}
    save_file(other, work / FISHER_FILE)
    with pytest.raises(BadInput, match="holds checkpoints of another run"):
        run(made, tmp_path / "run", **given | {"sources": [ORIGINAL[0], ORIGINAL[1] | {"path": "fr.jsonl"}]})
    run(made, tmp_path / "run", **given)
    assert digests(tmp_path / "whole") == digests(tmp_path / "run")


def test_what_cannot_be_is_refused(made: Path, tmp_path: Path) -> None:
    def refusal(**changes: Any) -> str:
        with pytest.raises(BadInput) as refused:
            run(made, tmp_path / "run", **changes)
        assert not (tmp_path / "run").exists()
        return str(refused.value)

    asked = {"preserve": {"loss": "fisher"}}
    said = refusal(sources=[ORIGINAL[0] | {"share": 1.0}], preserve={"loss": ["kl", "fisher"]})
    assert "`preserve` is estimated on original text, and no source has the role `original`; add one" in said
    assert "or say `on: all`" not in said
    (made / "short.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    assert "short.jsonl" in refusal(
        sources=[ORIGINAL[0], ORIGINAL[1] | {"path": "short.jsonl", "kind": "chat"}], **asked
    )
    for preserve, words in (
        ({"loss": ["fisher", "fisher"]}, "`loss` names fisher twice"),
        ({"loss": ["kl", "fisher"], "weight": 3.0}, "`weight` 3 is one number for two terms, whose sizes differ"),
        ({"loss": "kl", "weight": {"fisher": 2.0}}, "`weight` is given for fisher, which `loss` does not name"),
        ({"loss": "fisher", "weight": {"fisher": 0}}, "`preserve.weight.fisher` is 0; it takes a number above 0"),
        ({"loss": "fisher", "on": "all"}, "`on` is for a teacher, and fisher has none"),
        ({"loss": "fisher", "teacher": "base"}, "`teacher` is for a teacher, and fisher has none"),
        ({"loss": "kl", "sequences": 3}, "`sequences` is for fisher, which `loss` does not name"),
    ):
        assert words in refusal(preserve=preserve)


def test_text_that_gives_nothing_is_refused(made: Path) -> None:
    model = trained_model(made)
    nothing = PackedSequence([3, 4], [-100, -100], [0, 1], 0)
    with pytest.raises(BadInput, match="no token of the original text counts"):
        estimated(model, [nothing], None, Ranks())
    name = next(iter(model.freeze_base()))
    model.get_parameter(name).data.fill_(float("nan"))
    with pytest.raises(BadInput, match="its gradients on the original text are no finite numbers"):
        estimated(model, SEQUENCES, None, Ranks())


def test_what_is_said(made: Path, tmp_path: Path) -> None:
    """Of a run after another one; and a dry run counts its time."""
    listener = Quiet()
    given: dict[str, Any] = {"steps": 2, "preserve": {"loss": "fisher", "sequences": 2}}
    run(made, made / "run", listener=listener, **given)
    said = "\n".join(listener.said)
    assert "fisher: estimated from at most 2 sequences of original text; weight" in said
    assert "teaches" not in said and "trained before" not in said
    run(made, tmp_path / "again", out="run", listener=listener, **given)
    assert "fisher pulls what trained before back to its values as this run begins" in "\n".join(listener.said)
    path = config(made, sources=ORIGINAL, **given)
    rehearsal = surgeon.rehearse(made / "out", path, tmp_path / "dry", device="cpu")
    assert rehearsal.before[-1].words == "the Fisher information" and rehearsal.before[-1].seconds > 0
    assert rehearsal_view(rehearsal) is not None
