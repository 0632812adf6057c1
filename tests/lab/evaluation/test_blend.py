"""`surgeon blend`: between run and base, to the bit at both ends; undone by revert, refused where no way leads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import surgeon
from surgeon.cli import app
from surgeon.common.listener import Quiet
from surgeon.errors import BadInput
from surgeon.lab.evaluation import blend as module
from surgeon.lab.evaluation.blend import blended_view
from surgeon.models.load import load_model
from surgeon.training.remedies import blend as blending
from surgeon.verification.verify import verify
from tests.test_api import check_json
from tests.training.test_losses_live import ids_of
from tests.training.test_train import base_of, config, digests


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, `full` trained whole, and `grown` and `twins`, of which the new parts were."""
    folder = tmp_path_factory.mktemp("blend")
    base_of(folder)
    settings: dict[str, Any] = {"steps": 2, "save_every": 100, "evaluate_every": 100}
    surgeon.train(folder / "base", config(folder, what="all", **settings), folder / "full", device="cpu")
    for name, plan in (("grown", "neutral-residues"), ("twins", "control-llm")):
        surgeon.apply(plan, str(folder / "base"), folder / f"{name}-out")
        surgeon.train(folder / f"{name}-out", config(folder, **settings), folder / name, device="cpu")
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_every_tensor_is_between_the_two_and_revert_gives_the_base_back(made: Path, tmp_path: Path) -> None:
    """By depth: 0.25 in the lowest layer to 0.75 in the highest of six, embeddings as the lowest, the head as that."""
    found = surgeon.write_blend(made / "full", tmp_path / "to", base=made / "base", alpha=0.25, alpha_top=0.75)
    base, run, blended = tensors(made / "base"), tensors(made / "full"), tensors(tmp_path / "to")
    assert base.keys() == run.keys() == blended.keys() and found.tensors == len(base) and found.scaled == 0
    for name, value in blended.items():
        layer = int(name.split(".")[2]) if ".layers." in name else 0 if "embed" in name else 5
        share = 0.25 + 0.5 * layer / 5
        expected = (1 - share) * base[name].double() + share * run[name].double()
        torch.testing.assert_close(value.double(), expected, rtol=2**-8, atol=1e-6)
        assert value.dtype == base[name].dtype
    assert verify(made / "base", tmp_path / "to").holds
    surgeon.revert(tmp_path / "to", tmp_path / "back", base=made / "base")
    assert digests(tmp_path / "back") == digests(made / "base")
    assert (
        "blended with the base: 0.25 of the run to 0.75 in the top layer" in (tmp_path / "to" / "README.md").read_text()
    )


@pytest.mark.parametrize("name", ["full", "grown", "twins"])
def test_both_ends_are_exact(made: Path, tmp_path: Path, name: str) -> None:
    """Of grown parts the base's end is its function."""
    for alpha in (0.0, 1.0):
        surgeon.write_blend(made / name, tmp_path / str(alpha), base=made / "base", alpha=alpha)
    assert digests(tmp_path / "1.0") == digests(made / name)
    assert digests(tmp_path / "0.0") != digests(made / name)
    with torch.no_grad():
        both = [load_model(folder)(ids_of(0)).logits for folder in (made / "base", tmp_path / "0.0")]
    assert torch.equal(*both)


@pytest.mark.parametrize(("begun", "what"), [("grown-out", "all"), ("grown-out", "added"), ("full", "all")])
def test_the_model_that_the_last_run_began_with_may_be_an_output(
    made: Path, tmp_path: Path, begun: str, what: str
) -> None:
    """Of an output that grew or trained before, whatever trained is between it and the run."""
    settings: dict[str, Any] = {"steps": 2, "save_every": 100, "evaluate_every": 100}
    folder = made / begun
    surgeon.train(folder, config(made, what=what, keep_base=True, **settings), tmp_path / "run", device="cpu")
    found = surgeon.write_blend(tmp_path / "run", tmp_path / "to", base=folder, alpha=0.25)
    base, run, blended = tensors(folder), tensors(tmp_path / "run"), tensors(tmp_path / "to")
    moved = {name for name in base if not torch.equal(base[name], run[name])}
    assert moved and found.tensors >= len(moved) and found.scaled == 0
    for name, value in blended.items():
        expected = 0.75 * base[name].double() + 0.25 * run[name].double()
        torch.testing.assert_close(value.double(), expected, rtol=2**-8, atol=1e-6)
    surgeon.write_blend(tmp_path / "run", tmp_path / "begun", base=folder, alpha=0.0)
    assert digests(tmp_path / "begun") == digests(folder)
    if begun == "grown-out":
        surgeon.revert(tmp_path / "to", tmp_path / "back", base=made / "base")
        assert digests(tmp_path / "back") == digests(made / "base")
    damaged = shutil.copytree(folder, tmp_path / "damaged")
    file = max(damaged.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(BadInput, match=r"damaged says, so it was changed since"):
        surgeon.write_blend(tmp_path / "run", tmp_path / "other", base=damaged, alpha=0.5)


def test_of_silent_parts_the_output_is_scaled(made: Path, tmp_path: Path) -> None:
    found = surgeon.write_blend(made / "grown", tmp_path / "to", base=made / "base", alpha=0.5)
    run, blended = tensors(made / "grown"), tensors(tmp_path / "to")
    changed = {name for name in run if not torch.equal(run[name], blended[name])}
    assert changed and all(name.endswith("adapter.down_proj.weight") for name in changed)
    assert all(torch.equal(blended[name], run[name] / 2) for name in changed)
    assert (found.tensors, found.scaled) == (0, len(changed))
    # Its own base is in it as it was, so that nothing is kept beside the weights.
    assert not (tmp_path / "to" / "base-tensors").exists()
    surgeon.revert(tmp_path / "to", tmp_path / "back", base=made / "base")
    assert digests(tmp_path / "back") == digests(made / "base")


def test_killed_it_ends_byte_for_byte(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        """No Exception, so that nothing tidies up behind it."""

    def killed(*_: Any, **__: Any) -> None:
        raise Killed

    given: dict[str, Any] = {"base": made / "base", "alpha": 0.75}
    surgeon.write_blend(made / "full", tmp_path / "whole", **given)
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(blending, "execute", killed)
        surgeon.write_blend(made / "full", tmp_path / "cut", **given)
    assert not (tmp_path / "cut").exists() and (tmp_path / ".cut.blending").exists()
    surgeon.write_blend(made / "full", tmp_path / "cut", **given)
    assert digests(tmp_path / "cut") == digests(tmp_path / "whole")
    assert not (tmp_path / ".cut.blending").exists()


def test_it_is_measured_beside_base_and_run(made: Path, tmp_path: Path) -> None:
    words = ["blend", str(made / "full"), str(tmp_path / "to"), "--with", str(made / "base"), "--alpha", "0.5"]
    ran = CliRunner().invoke(app, [*words, "--data", str(made / "fr.jsonl"), "--device", "cpu", "--json"])
    assert ran.exit_code == 0, ran.output
    measured = json.loads(ran.stdout)["measured"]
    assert len(measured["models"]) == 3
    found = surgeon.blend(made / "grown", tmp_path / "grown", base=made / "base", alpha=0.5)
    check_json(found)
    assert found.measured is None and blended_view(found) is not None


def test_what_has_no_way_back_is_refused(made: Path, tmp_path: Path) -> None:
    def refusal(run: Path, base: Path = made / "base", **given: Any) -> str:
        with pytest.raises(BadInput) as refused:
            surgeon.write_blend(run, tmp_path / "to", base=base, **{"alpha": 0.5} | given)
        assert not (tmp_path / "to").exists()
        return str(refused.value)

    assert "alpha is 1.5; it must be between 0 (the base) and 1 (the run)" in refusal(made / "full", alpha=1.5)
    assert "no run trained it" in refusal(made / "grown-out")
    # Another base, and one that has grown where the run has not.
    for base in (made / "full", made / "grown-out"):
        assert "blend it with the model that its last surgery or a training began with" in refusal(made / "full", base)
    assert "surgery.json" in refusal(made / "base")
    surgeon.apply("solar", str(made / "base"), tmp_path / "out")
    settings: dict[str, Any] = {"steps": 1, "optimizer": {"lr": 1e-3, "warmup": 0}, "validation_sequences": 1}
    surgeon.train(tmp_path / "out", config(made, **settings), tmp_path / "run", device="cpu")
    assert "grew in the run and was neither silent nor a copy at birth" in refusal(tmp_path / "run")


def test_without_a_share_answers_choose_it(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest one whose KL on the base's answers is small enough; by the shipped instructions, of which some."""
    whole = module._some()
    assert len(whole.prompts) == 40 and not {*whole.prompts} & {*surgeon.read_prompts("shipped").prompts}
    asked = surgeon.Prompts("asked", ("w1 w2", "w60", "w7 w8 w9", "w51 w52"), ((),) * 4)
    monkeypatch.setattr(module, "_some", lambda: asked)
    base, apart = surgeon.open_checkpoint(made / "base"), {}
    for share in (1.0, 0.75, 0.5):
        surgeon.write_blend(made / "full", tmp_path / f"{share}", base=made / "base", alpha=share)
        (kept,) = surgeon.kept_answers(base, [surgeon.open_checkpoint(tmp_path / f"{share}")], asked, device="cpu")
        assert kept.kl is not None
        apart[share] = kept.kl.value
    assert apart[1.0] > apart[0.75] > apart[0.5] > 0
    limits = {1.0: apart[1.0], 0.75: apart[0.75], 0.5: apart[0.5], 0.25: apart[0.5] / 2}
    for share, limit in limits.items():
        monkeypatch.setattr(module, "MOST_KL", limit * 1.001)
        assert surgeon.share_by_answers(made / "full", made / "base", device="cpu") == share
    monkeypatch.setattr(module, "MOST_KL", 0.0)
    said: list[str] = []

    class Listener(Quiet):
        def say(self, line: str) -> None:
            said.append(line)

    found = surgeon.blend(made / "full", tmp_path / "chosen", base=made / "base", device="cpu", listener=Listener())
    assert found.written.alpha == 0.25 and "no share keeps it within 0; 0.25 of the run is taken" in said
    with pytest.raises(BadInput, match=r"alpha_top is 0\.5, and there is no alpha; give both, or neither"):
        surgeon.blend(made / "full", tmp_path / "other", base=made / "base", alpha_top=0.5)
