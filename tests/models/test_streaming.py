from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from surgeon.anatomy.twin import stored_buffers
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.errors import BadInput, PromiseBroken
from surgeon.models.compare_streamed import StreamedComparison, compare_streamed
from surgeon.models.load import load_model
from surgeon.models.stored_matrix import StoredMatrix
from surgeon.models.stream import StreamedModel
from tests import tiny
from tests.caches import CACHE
from tests.compared_logits import compare_logits
from tests.decoders import tiny_decoder
from tests.models.grown import edit, grow, shard_of

IDS = torch.randint(3, 128, (3, 24), generator=torch.Generator().manual_seed(2))
SAME = range(6)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.checkpoint(tmp_path_factory.mktemp("llama"), "llama")


def compared(base: Path, out: Path, ids: torch.Tensor, **options: Any) -> StreamedComparison:
    (found,) = compare_streamed(CheckpointFolder.open(base), CheckpointFolder.open(out), ids, **options)
    return found


def decoded(model: Any, ids_BT: torch.Tensor, steps: int) -> torch.Tensor:
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    logits = [model(input_ids=ids_BT[:, :-steps], **{CACHE: cache}, use_cache=True).logits]
    for step in range(ids_BT.shape[1] - steps, ids_BT.shape[1]):
        logits.append(model(input_ids=ids_BT[:, step : step + 1], **{CACHE: cache}, use_cache=True).logits)
    return torch.cat(logits, dim=1)


def test_stored_buffers_have_the_dtype_that_transformers_gives_them(tmp_path: Path) -> None:
    """A scale of the stream, stored in float32 and run in bfloat16."""
    base = tiny_decoder(tmp_path, "gemma4_text", layers=2)
    whole, streamed = (made(CheckpointFolder.open(base), dtype="bfloat16") for made in (load_model, StreamedModel))
    held = stored_buffers(streamed.module)
    assert {value.dtype for value in held.values()} == {torch.bfloat16}
    assert all(torch.equal(value, held[name]) for name, value in stored_buffers(whole).items())
    with torch.inference_mode():
        ordinary = whole(input_ids=IDS, use_cache=False).logits
        assert torch.equal(ordinary, streamed.module(input_ids=IDS, use_cache=False).logits)


@pytest.mark.parametrize("dtype", ["auto", "float32"])
@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
def test_streamed_forward_is_the_ordinary_forward_bit_for_bit(family: str, dtype: str, tmp_path: Path) -> None:
    base = tiny.checkpoint(tmp_path, family)
    whole, streamed = load_model(base, dtype=dtype), StreamedModel(CheckpointFolder.open(base), dtype=dtype).module
    with torch.inference_mode():
        ordinary = whole(input_ids=IDS, use_cache=False).logits
        assert ordinary.isfinite().all()
        assert torch.equal(ordinary, streamed(input_ids=IDS, use_cache=False).logits)
        assert torch.equal(decoded(whole, IDS, 10), decoded(streamed, IDS, 10))
    assert all(p.is_meta or isinstance(p, StoredMatrix) for p in streamed.parameters())


def test_embeddings_are_asked_where_they_are_before_they_run(tmp_path: Path) -> None:
    """Llama 4 moves its ids to the device of its embeddings."""
    base = tiny_decoder(tmp_path, "llama4_text", dtype="bfloat16")
    whole, streamed = load_model(base), StreamedModel(CheckpointFolder.open(base)).module
    with torch.inference_mode():
        ordinary = whole(input_ids=IDS, use_cache=False).logits
        assert torch.equal(ordinary, streamed(input_ids=IDS, use_cache=False).logits)


@pytest.mark.parametrize("family", ["gemma3_text", "olmo2", "phi3", "qwen2"])
def test_a_silent_layer_is_identical_layer_by_layer(family: str, tmp_path: Path) -> None:
    base = tiny.checkpoint(tmp_path / "base", family)
    images = grow(base, tmp_path / "out", after=[0, 3, 5])
    folders, dtypes = (CheckpointFolder.open(base), CheckpointFolder.open(tmp_path / "out")), ("auto", "float32")
    for dtype, found in zip(
        dtypes, compare_streamed(*folders, IDS, dtypes=dtypes, layer_of_base=images, batch_size=2), strict=True
    ):
        assert found.identical and found.first_difference is None and found.layers_compared == 6
        # The numbers are those of the comparison that loads everything.
        assert list(found.logits) == compare_logits(*folders, IDS, dtype=dtype, decode_tokens=4, batch_size=2)


def test_one_layer_of_each_model_is_in_memory(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices outside the layers stay in their file."""
    images = grow(llama, tmp_path / "out", after=[1, 2])
    roots: list[nn.Module] = []
    seen: set[str] = set()
    begin = StreamedModel.__init__

    def begun(model: StreamedModel, *given: Any, **named: Any) -> None:
        begin(model, *given, **named)
        roots.append(model.module)

    monkeypatch.setattr(StreamedModel, "__init__", begun)

    def look(_module: nn.Module, _args: Any) -> None:
        there = [
            [name for name, p in root.named_parameters() if not (p.is_meta or isinstance(p, StoredMatrix))]
            for root in roots
        ]
        assert sum(map(bool, there)) <= 1
        layers = {name.split(".")[2] for names in there for name in names if ".layers." in name}
        assert len(layers) <= 1 and (layers or all(name.endswith("norm.weight") for names in there for name in names))
        seen.update(layers)

    handle = register_module_forward_pre_hook(look)
    try:
        folders = CheckpointFolder.open(llama), CheckpointFolder.open(tmp_path / "out")
        found = compare_streamed(*folders, IDS, dtypes=("auto", "float32"), layer_of_base=images, decode_tokens=2)
    finally:
        handle.remove()
    assert [each.identical for each in found] == [True, True] and len(roots) == 4 and seen == set("01234567")
    assert [mode.dtype for each in found for mode in each.logits] == ["bfloat16"] * 2 + ["float32"] * 2


def test_a_layer_that_differs_in_one_dtype_alone(llama: Path, tmp_path: Path) -> None:
    """A value that bfloat16 rounds to the base's; the matrix is as large and begins as the base's does."""
    base = tiny.checkpoint(tmp_path / "base", "llama", dtype="float32")
    images = grow(base, tmp_path / "out", after=[2])

    def nudged(value: torch.Tensor) -> torch.Tensor:
        value = value.clone()
        value[-1] *= 1 + 2**-12
        value[:, 0] = value[:, 0].bfloat16().float()
        return value

    edit(base, "model.layers.3.mlp.up_proj.weight", lambda value: value.bfloat16().float())
    edit(
        tmp_path / "out", f"model.layers.{images[3]}.mlp.up_proj.weight", lambda value: nudged(value.bfloat16().float())
    )
    folders = CheckpointFolder.open(base), CheckpointFolder.open(tmp_path / "out")
    wide, narrow = compare_streamed(*folders, IDS, dtypes=("float32", "bfloat16"), layer_of_base=images)
    assert narrow.identical
    assert wide.first_difference is not None and wide.first_difference.base_layer == 3


@pytest.mark.parametrize("layer", [0, 3, 5])
def test_the_first_layer_that_differs_is_named(layer: int, llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    images = grow(llama, out, after=[2])
    edit(out, f"model.layers.{images[layer]}.mlp.up_proj.weight", lambda value: value * 1.5)
    found = compared(llama, out, IDS, layer_of_base=images)
    assert not found.identical and not any(mode.identical for mode in found.logits)
    apart = found.first_difference
    assert apart is not None and (apart.base_layer, apart.out_layer) == (layer, images[layer])
    assert apart.where == f"layer {layer} of the base (layer {images[layer]} of the output)"
    assert apart.suspects == ((3, 4) if layer == 3 else (images[layer],))


def test_a_new_layer_that_writes_is_among_the_suspects(llama: Path, tmp_path: Path) -> None:
    images = grow(llama, tmp_path / "out", after=[2, 5])
    edit(tmp_path / "out", "model.layers.3.mlp.down_proj.weight", lambda value: value + 1)
    apart = compared(llama, tmp_path / "out", IDS, layer_of_base=images).first_difference
    assert apart is not None and apart.base_layer == 3 and apart.suspects == (3, 4)


@pytest.mark.parametrize(
    ("tensor", "where", "suspects"),
    [
        ("model.embed_tokens.weight", "the embeddings", ()),
        ("model.norm.weight", "the final norm or the output head", (7,)),
        ("lm_head.weight", "the final norm or the output head", (7,)),
        ("model.layers.7.mlp.down_proj.weight", "the final norm or the output head", (7,)),
    ],
)
def test_what_differs_outside_the_base_layers(
    tensor: str, where: str, suspects: tuple[int, ...], llama: Path, tmp_path: Path
) -> None:
    images = grow(llama, tmp_path / "out", after=[2, 5])
    edit(tmp_path / "out", tensor, lambda value: value + 1)
    found = compared(llama, tmp_path / "out", IDS, layer_of_base=images)
    apart = found.first_difference
    assert not found.identical and apart is not None
    assert (apart.where, apart.base_layer, apart.suspects) == (where, None, suspects)


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_a_head_stored_beside_a_tie_is_used(family: str, tmp_path: Path) -> None:
    # transformers keeps a stored head that differs from the embeddings, whatever the config says about ties.
    base = tiny.checkpoint(tmp_path / "base", family, tie_word_embeddings=False)
    config = base / "config.json"
    config.write_text(config.read_text().replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))
    whole, streamed = load_model(base), StreamedModel(CheckpointFolder.open(base)).module
    with torch.inference_mode():
        assert torch.equal(whole(input_ids=IDS).logits, streamed(input_ids=IDS).logits)


def test_progress_counts_every_layer(llama: Path) -> None:
    calls: list[tuple[int, int]] = []
    compared(
        llama,
        llama,
        IDS,
        layer_of_base=SAME,
        decode_tokens=2,
        batch_size=2,
        progress=lambda done, total: calls.append((done, total)),
    )
    assert calls == [(done, 96) for done in range(1, 97)]


def test_a_wrong_map_of_layers_is_refused(llama: Path) -> None:
    for wrong in (range(5), [0, 1, 2, 3, 4, 6]):
        with pytest.raises(ValueError, match="layer_of_base"):
            compared(llama, llama, IDS, layer_of_base=wrong)


def test_missing_extra_and_misshapen_tensors_are_named(llama: Path, tmp_path: Path) -> None:
    """What disagrees within the checkpoint itself is found when it is opened (tests/checkpoint)."""
    name = "model.layers.3.mlp.up_proj.weight"
    for layers, words in (
        (7, r"model\.layers\.6\.\S+: the config requires this tensor, no shard has it"),
        (5, r"model\.layers\.5\.\S+ \(model-\S+\): the config has `num_hidden_layers` 5, so there is no layer 5"),
    ):
        other = tiny.checkpoint(tmp_path / str(layers), "llama")
        config = other / "config.json"
        config.write_text(config.read_text().replace('"num_hidden_layers": 6', f'"num_hidden_layers": {layers}'))
        with pytest.raises(PromiseBroken, match=words):
            compared(llama, other, IDS, layer_of_base=SAME)
        with pytest.raises(BadInput, match=words):
            compared(other, llama, IDS, layer_of_base=SAME)
    shape = tiny.checkpoint(tmp_path / "shape", "llama")
    edit(shape, name, lambda value: value[:-1])
    with pytest.raises(PromiseBroken, match=rf"{name} \(model-\S+\): shape \[47, 32\], .*\[48, 32\]"):
        compared(llama, shape, IDS, layer_of_base=SAME)


def test_a_shard_that_is_cut_after_it_was_opened(llama: Path, tmp_path: Path) -> None:
    cut = tiny.checkpoint(tmp_path, "llama")
    opened = CheckpointFolder.open(cut)
    shard = shard_of(cut, "model.norm.weight")
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(PromiseBroken, match=f"{shard.name}: changed since the run began"):
        compare_streamed(CheckpointFolder.open(llama), opened, IDS, layer_of_base=SAME)


def test_a_checkpoint_in_one_file_streams_too(llama: Path, tmp_path: Path) -> None:
    single = tiny.checkpoint(tmp_path, "llama", shard="1GB")
    assert (single / "model.safetensors").is_file()
    assert compared(llama, single, IDS, layer_of_base=SAME).identical
