from __future__ import annotations

import copy
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from surgeon.errors import BadInput, PromiseBroken
from surgeon.models import compare
from surgeon.models.compare import CACHED_DECODE, PREFILL, compare_models
from surgeon.models.load import load_model
from tests import tiny
from tests.compared_logits import compare_logits
from tests.models.grown import edit, grow, shard_of

IDS = torch.randint(3, 128, (3, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
def test_a_silent_layer_changes_no_logit(family: str, tmp_path: Path) -> None:
    base = tiny.checkpoint(tmp_path / "base", family)
    grow(base, tmp_path / "out", after=[1, 4, 5])
    for dtype in ("auto", "float32"):
        prefill, decode = compare_logits(base, tmp_path / "out", IDS, dtype=dtype, decode_tokens=12, batch_size=2)
        assert (prefill.mode, decode.mode) == (PREFILL, CACHED_DECODE)
        assert prefill.dtype == ("bfloat16" if dtype == "auto" else "float32")
        assert (prefill.tokens, decode.tokens) == (3 * 24, 3 * 13)
        for result in (prefill, decode):
            assert result.identical
            assert (result.max_abs_difference, result.kl, result.top1_agreement) == (0.0, 0.0, 1.0)
            assert result.base_loss == result.out_loss > 0


def test_a_layer_that_writes_is_seen(llama: Path, tmp_path: Path) -> None:
    grow(llama, tmp_path / "out", after=[2], silent=False)
    for result in compare_logits(llama, tmp_path / "out", IDS):
        assert not result.identical
        assert result.max_abs_difference > 0 and result.kl > 0 and result.top1_agreement < 1
        assert result.base_loss != result.out_loss


def test_a_cache_fault_shows_only_in_cached_decode(llama: Path) -> None:
    base, out = load_model(llama, dtype="float32"), load_model(llama, dtype="float32")
    # A layer that writes into its neighbour's slot of the cache, as a copied layer that kept its index does.
    out.model.layers[3].self_attn.layer_idx = 2
    prefill, decode = compare_models(base, out, IDS)
    assert prefill.identical
    assert not decode.identical


def test_a_model_that_takes_no_cache_but_its_own_is_compared() -> None:
    """MiniMax refuses a DynamicCache and makes another by itself; a layer in the other's slot shows as elsewhere."""
    from transformers import MiniMaxConfig, MiniMaxForCausalLM

    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "block_size": 8}
    kinds = ["linear_attention", "full_attention", "full_attention"]
    config = MiniMaxConfig(**sizes, **heads, layer_types=kinds, num_local_experts=2, num_experts_per_tok=1)
    torch.manual_seed(0)
    base = MiniMaxForCausalLM(config).eval()
    out = copy.deepcopy(base)
    assert all(found.identical for found in compare_models(base, out, IDS))
    out.model.layers[2].self_attn.layer_idx = 1
    prefill, decode = compare_models(base, out, IDS)
    assert prefill.identical and not decode.identical


class Fixed:
    """A model that answers with given logits."""

    def __init__(self, logits_BTV: torch.Tensor) -> None:
        self.logits, self.dtype = logits_BTV, logits_BTV.dtype

    def __call__(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        return SimpleNamespace(logits=self.logits)


def test_numbers_agree_with_a_float64_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    # Chunks of two rows, so that the sums over chunks are tested too.
    monkeypatch.setattr(compare, "_CHUNK_ELEMENTS", 60)
    made = torch.Generator().manual_seed(3)
    base = torch.randn(2, 5, 30, generator=made) * 4
    out = base + torch.randn(2, 5, 30, generator=made) * 0.5
    out[0, 2] = base[0, 2]
    ids = torch.randint(30, (2, 5), generator=made)
    (found,) = compare_models(Fixed(base), Fixed(out), ids, decode_tokens=0)

    def log_softmax(x: np.ndarray) -> np.ndarray:
        x = x.astype(np.float64)
        return x - x.max(-1, keepdims=True) - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True))

    p, q = log_softmax(base.numpy()), log_softmax(out.numpy())
    targets = ids.numpy()[:, 1:, None]
    assert found.tokens == 10 and not found.identical
    assert found.kl == pytest.approx((np.exp(p) * (p - q)).sum(-1).mean(), rel=1e-12)
    assert found.base_loss == pytest.approx(-np.take_along_axis(p[:, :-1], targets, -1).mean(), rel=1e-12)
    assert found.out_loss == pytest.approx(-np.take_along_axis(q[:, :-1], targets, -1).mean(), rel=1e-12)
    assert found.max_abs_difference == np.abs(base.double().numpy() - out.double().numpy()).max()
    assert found.top1_agreement == (base.numpy().argmax(-1) == out.numpy().argmax(-1)).mean()


def test_one_bit_is_a_difference() -> None:
    base = torch.zeros(1, 3, 8)
    out = base.clone()
    out[0, 1, 4] = torch.nextafter(torch.tensor(0.0), torch.tensor(1.0))
    (found,) = compare_models(Fixed(base), Fixed(out), torch.zeros(1, 3, dtype=torch.long), decode_tokens=0)
    assert not found.identical and found.max_abs_difference > 0


def test_nan_of_the_output_is_an_infinite_difference_and_of_the_base_an_error() -> None:
    sound = torch.zeros(1, 3, 8)
    broken = sound.clone()
    broken[0, 0, 0] = math.nan
    ids = torch.zeros(1, 3, dtype=torch.long)
    (found,) = compare_models(Fixed(sound), Fixed(broken), ids, decode_tokens=0)
    assert not found.identical
    assert found.max_abs_difference == found.kl == found.out_loss == math.inf
    with pytest.raises(BadInput, match="NaN"):
        compare_models(Fixed(broken), Fixed(sound), ids, decode_tokens=0)


def test_another_vocabulary_is_a_broken_promise() -> None:
    ids = torch.zeros(1, 3, dtype=torch.long)
    with pytest.raises(PromiseBroken, match="vocabulary"):
        compare_models(Fixed(torch.zeros(1, 3, 8)), Fixed(torch.zeros(1, 3, 9)), ids, decode_tokens=0)


def test_a_window_of_one_token_is_refused(llama: Path) -> None:
    with pytest.raises(ValueError, match="at least 2"):
        compare_logits(llama, llama, IDS[:, :1])


@pytest.mark.parametrize("role", ["base", "out"])
def test_a_missing_tensor_is_an_error_and_named(role: str, llama: Path, tmp_path: Path) -> None:
    # Transformers alone fills it with random values and warns.
    broken = tiny.checkpoint(tmp_path / "broken", "llama")
    name = "model.layers.3.mlp.down_proj.weight"
    single = {}
    for path in sorted(broken.glob("*.safetensors")):
        single |= tiny_load(path)
        path.unlink()
    del single[name]
    (broken / "model.safetensors.index.json").unlink()
    tiny_save(single, broken / "model.safetensors")
    pair = (broken, llama) if role == "base" else (llama, broken)
    with pytest.raises(BadInput if role == "base" else PromiseBroken, match="lacks") as caught:
        compare_logits(*pair, IDS)
    assert name in str(caught.value) and "\n" not in str(caught.value)


def tiny_load(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def tiny_save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path, metadata={"format": "pt"})


def test_an_unexpected_tensor_and_a_wrong_shape_are_errors(llama: Path, tmp_path: Path) -> None:
    extra = tiny.checkpoint(tmp_path / "extra", "llama")
    edit_config(extra, '"num_hidden_layers": 6', '"num_hidden_layers": 5')
    with pytest.raises(PromiseBroken, match=r"model\.layers\.5\..*no place"):
        compare_logits(llama, extra, IDS)
    shape = tiny.checkpoint(tmp_path / "shape", "llama")
    edit(shape, "model.norm.weight", lambda value: value[:-1])
    with pytest.raises(PromiseBroken):
        compare_logits(llama, shape, IDS)


def edit_config(folder: Path, old: str, new: str) -> None:
    config = folder / "config.json"
    text = config.read_text()
    assert old in text
    config.write_text(text.replace(old, new))


def test_folders_that_are_no_checkpoint(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"config\.json"):
        compare_logits(tmp_path, llama, IDS)
    cut = tiny.checkpoint(tmp_path / "cut", "llama")
    shard = shard_of(cut, "model.norm.weight")
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(PromiseBroken, match="are missing"):
        compare_logits(llama, cut, IDS)
    with pytest.raises(BadInput, match="int8"):
        compare_logits(llama, llama, IDS, dtype="int8")


def test_code_in_a_checkpoint_is_not_run_unless_asked(llama: Path, tmp_path: Path) -> None:
    foreign = tiny.checkpoint(tmp_path / "foreign", "llama")
    edit_config(
        foreign,
        '"model_type": "llama"',
        '"model_type": "strange", "auto_map": {"AutoConfig": "strange.C", "AutoModelForCausalLM": "strange.M"}',
    )
    (foreign / "strange.py").write_text("raise SystemExit('the code of the checkpoint has run')\n")
    with pytest.raises(PromiseBroken, match=r"code of its own .*--trust-remote-code"):
        compare_logits(llama, foreign, IDS)


def test_loaded_weights_are_aligned(llama: Path) -> None:
    assert all(parameter.data_ptr() % 64 == 0 for parameter in load_model(llama).parameters())


def test_logits_for_other_positions_than_tokens_are_refused() -> None:
    """Of a model that reads text by an encoder, say, and has tokens of its own in the decoder."""
    logits = torch.zeros(1, 3, 5)
    with pytest.raises(BadInput, match="for 3 positions of a text of 4 tokens"):
        compare.Tally(PREFILL, "float32", compare.NO_ROWS).add(logits, logits, torch.zeros(1, 4, dtype=torch.long))
