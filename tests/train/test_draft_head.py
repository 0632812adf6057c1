"""`what: draft_head`: a head of its own folder, whose drafts are those of EAGLE-3's formula, and the base as it was."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

import surgeon
from surgeon.data import drafts
from surgeon.errors import BadInput
from surgeon.evaluate.evaluate import evaluation_view
from surgeon.manifest.draft_folder import DraftFolder
from surgeon.models.draft_head import DraftHead, _Drafts
from surgeon.models.draft_shape import DRAFTED
from surgeon.train import session
from tests import tiny
from tests.common.test_tables import lines
from tests.test_api import check_json
from tests.train.test_train import base_of, config, digests
from tests.train.texts import add_tokenizer, json_lines, text

WRITTEN, STEPS = 20, 40


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base whose embeddings are scaled, and a head of it, from a run that was cut off before it was published."""
    folder = tmp_path_factory.mktemp("draft")
    base = base_of(folder, "gemma3_text", dtype="float32")
    before = {path.name: path.read_bytes() for path in base.iterdir()}
    how = config(folder, what="draft_head", steps=STEPS, save_every=STEPS, evaluate_every=STEPS)

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(session, "_published_step", killed)
        surgeon.train(base, how, folder / "run", device="cpu")
    again = surgeon.train(base, how, folder / "run", device="cpu")
    assert again is not None
    assert again.resumed_at == STEPS
    assert all(later < first for first, later in again.losses.values()), again.losses
    check_json(again)
    assert {path.name: path.read_bytes() for path in base.iterdir()} == before
    return folder


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def turned(x: Tensor, place: int) -> Tensor:
    """Llama's rotary position, of heads × size."""
    half = x.shape[-1] // 2
    angles = place / 10000.0 ** (torch.arange(half, dtype=torch.float64) / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )


def drafted(w: dict[str, Tensor], model: Any, known: list[int]) -> list[int]:
    """EAGLE-3's steps in float64, behind a text that the base has read but for its last token."""
    rows = model.get_input_embeddings().weight.double()
    with torch.no_grad():
        states = model(torch.tensor([known[:-1]]), output_hidden_states=True).hidden_states[-1][0].double()
    keys: list[Tensor] = []
    values: list[Tensor] = []
    written: list[int] = []
    pairs = list(zip(states, known[1:], strict=True))
    while len(written) < DRAFTED:
        for state, token in pairs:
            both = torch.cat([normed(rows[token], w["input_layernorm"]), normed(state, w["hidden_norm"])])
            keys.append(turned((w["self_attn.k_proj"] @ both).view(2, 16), len(keys)))
            values.append((w["self_attn.v_proj"] @ both).view(2, 16))
            query = turned((w["self_attn.q_proj"] @ both).view(2, 2, 16), len(keys) - 1)
        scores = torch.einsum("gqd,tgd->gqt", query, torch.stack(keys)) / math.sqrt(16)
        mixed = torch.einsum("gqt,tgd->gqd", scores.softmax(-1), torch.stack(values)).flatten()
        after = state + w["self_attn.o_proj"] @ mixed
        inner = normed(after, w["post_attention_layernorm"])
        after = after + w["mlp.down_proj"] @ (F.silu(w["mlp.gate_proj"] @ inner) * (w["mlp.up_proj"] @ inner))
        state = normed(after, w["norm"])
        written.append(int((model.lm_head.weight.double() @ state).argmax()))
        pairs = [(state, written[-1])]
    return written


def forwards(base: Path, run: Path, ids: list[int]) -> int:
    """Forwards of the base until it has written WRITTEN tokens with the head's drafts."""
    model = AutoModelForCausalLM.from_pretrained(base).eval()
    named = load_file(run / "model.safetensors").items()
    w = {name.removeprefix("layers.0.").removesuffix(".weight"): value.double() for name, value in named}
    own = model.generate(
        torch.tensor([ids]), do_sample=False, max_new_tokens=WRITTEN, eos_token_id=None, pad_token_id=0
    )[0].tolist()
    done, count = 1, 1
    while done < WRITTEN:
        begin = len(ids) + done
        found = drafted(w, model, own[:begin])
        right = next((n for n, token in enumerate(found) if own[begin + n : begin + n + 1] != [token]), DRAFTED)
        done, count = done + right + 1, count + 1
    return count


def test_tokens_a_forward_are_those_of_the_formula(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "WRITTEN", WRITTEN)
    texts = [text(70, 1), text(9, 2, first=50, count=50)]
    held = json_lines(trained / "held.jsonl", texts)
    found = surgeon.evaluate(trained / "base", held, draft=trained / "run", length=64)
    check_json(found)
    of = found.models[0].drafts["held"]
    tokenizer = surgeon.open_checkpoint(trained / "base").tokenizer()
    # A text ends with a token more.
    prompts = [tokenizer(texts[0]).input_ids[:32], tokenizer(texts[1]).input_ids[:5]]
    count = sum(forwards(trained / "base", trained / "run", ids) for ids in prompts)
    assert of.tokens_a_forward.value == pytest.approx(2 * WRITTEN / count)
    assert of.tokens_a_forward.value > 1.2
    assert (of.documents, of.same) == (2, 2)
    assert "2 of 2" in " ".join(lines(evaluation_view(found), 160))


def test_drafts_of_random_values_are_those_of_the_formula(trained: Path) -> None:
    """Of a head whose every value counts, as the base reads on: keys of the text stay, those of drafts do not."""
    model = AutoModelForCausalLM.from_pretrained(trained / "base").eval()
    head = DraftHead(DraftFolder.open(trained / "run").shape, model)
    drawn = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in head.parameters():
            value.copy_(torch.randn(value.shape, generator=drawn) * 0.5)
    named = head.state_dict().items()
    w = {name.removeprefix("layers.0.").removesuffix(".weight"): value.double() for name, value in named}
    for number in range(8):
        ids = torch.randint(10, 110, (1, 24), generator=drawn)
        with torch.no_grad():
            states = model(ids, output_hidden_states=True).hidden_states[-1]
        generator, read = _Drafts(head), 0
        for end in (5, 6, 9, 10 + number):
            given = SimpleNamespace(hidden_states=[states[:, read : end + 2]])
            found, _ = generator.get_candidates(ids[:, : end + 1], model_outputs=given, is_first_iteration=False)
            assert found[0].tolist() == [*(known := ids[0, : end + 1].tolist()), *drafted(w, model, known)]
            read = end


def test_the_folder_is_as_vllm_reads_it(trained: Path) -> None:
    """As `SpeculatorsConfig` and `Eagle3LlamaForCausalLM` of vLLM 0.32 take it apart."""
    run = trained / "run"
    assert {path.name for path in run.iterdir()} == {"config.json", "draft.json", "model.safetensors"}
    told = json.loads((run / "config.json").read_text())
    assert (told["speculators_model_type"], told["norm_output"], told["norm_before_residual"]) == (
        "eagle3",
        True,
        False,
    )
    spoken = told["speculators_config"]
    assert spoken["proposal_methods"][0]["speculative_tokens"] == DRAFTED
    assert spoken["verifier"] == {"name_or_path": "base", "architectures": ["Gemma3ForCausalLM"]}
    layer = told["transformer_layer_config"]
    assert (layer["model_type"], layer["vocab_size"], layer["head_dim"]) == ("llama", 128, 16)
    assert layer["eagle_config"] == {"use_aux_hidden_state": False}
    tensors = load_file(run / "model.safetensors")
    assert {value.dtype for value in tensors.values()} == {torch.float32}
    # The embedding beside the hidden state.
    assert tensors["layers.0.self_attn.q_proj.weight"].shape == (64, 64)
    assert len(tensors) == 11
    record = json.loads((run / "draft.json").read_text())
    assert {name: each["sha256"] for name, each in record["tensors"].items()} == digests(run)
    assert record["training"]["steps"] == STEPS


def edited(run: Path, to: Path, file: str, **changes: Any) -> Path:
    shutil.copytree(run, to)
    told = json.loads((to / file).read_text())
    (to / file).write_text(json.dumps(told | changes))
    return to


def test_a_head_of_another_base_and_an_edited_one_are_refused(trained: Path, tmp_path: Path) -> None:
    run, held = trained / "run", json_lines(tmp_path / "held.jsonl", [text(50, 1)])

    def refused(match: str, base: Path = trained / "base", draft: Path = run, **how: Any) -> None:
        with pytest.raises(BadInput, match=match):
            surgeon.evaluate(base, held, draft=draft, **how)

    other = shutil.copytree(trained / "base", tmp_path / "other")
    file = next(iter(sorted(other.glob("*.safetensors"))))
    tensors = load_file(file)
    name = min(tensors)
    tensors[name].view(-1)[0] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    refused("made for base, and other has other weights", other)
    wide = add_tokenizer(tiny.checkpoint(tmp_path / "wide", "gemma3_text", vocab_size=160))
    refused(r"drafts of 128 tokens, and wide has 160", wide)
    refused(r"no draft\.json here", draft=trained / "base")
    refused("not what its sha256 says", draft=edited(run, tmp_path / "a", "draft.json", tool="another"))
    refused("not as surgeon wrote it", draft=edited(run, tmp_path / "b", "config.json", norm_output=False))
    changed = shutil.copytree(run, tmp_path / "c")
    tensors = load_file(changed / "model.safetensors")
    tensors["norm.weight"][0] += 1
    save_file(tensors, changed / "model.safetensors")
    refused(r"norm\.weight is not what draft\.json says", draft=changed)
    refused("give one of the two", mtp=True)


def test_bases_without_a_place_for_it_are_refused(trained: Path, tmp_path: Path) -> None:
    def refused(base: Path, match: str, *, delta_only: bool = False, **changes: Any) -> None:
        with pytest.raises(BadInput, match=match):
            how = config(trained, what="draft_head", **changes)
            surgeon.train(base, how, tmp_path / "run", device="cpu", delta_only=delta_only)
        assert not (tmp_path / "run").exists()

    refused(trained / "base", "`preserve` is for a model that trains, and under `what: draft_head`", preserve={})
    refused(trained / "base", "a draft head changes nothing of the base", delta_only=True)
    other = add_tokenizer(tiny.checkpoint(tmp_path / "gpt_neox", "gpt_neox"))
    refused(other, r"under the name model\.embed_tokens\.weight, which this base does not have")
    surgeon.apply("neutral-residues", str(trained / "base"), tmp_path / "out")
    refused(tmp_path / "out", "this base needs code that it brings")
