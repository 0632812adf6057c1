"""What befalls checkpoints is named, with what mends it, and nothing is guessed: the lines are carried out here."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import surgeon
from surgeon.checkpoint.damages import damage_of
from surgeon.checkpoint.peft_folder import AdapterFolder
from surgeon.checkpoint.source import LocalSource
from surgeon.errors import BadInput
from tests import tiny
from tests.adapters import lora
from tests.checkpoints import INDEX, edit_config, edit_tensor, same_bytes, weights, write_plan

Rename = Callable[[str], str]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.checkpoint(tmp_path_factory.mktemp("bases") / "base", "llama", num_hidden_layers=2)


@pytest.fixture
def copy(base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(base, tmp_path / "copy"))


def rename(folder: Path, change: Rename) -> None:
    """Give every tensor another name, in shards and index."""
    for file in folder.glob("*.safetensors"):
        save_file({change(name): value for name, value in load_file(file).items()}, file, metadata={"format": "pt"})
    if (folder / INDEX).exists():
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"] = {change(name): file for name, file in index["weight_map"].items()}
        (folder / INDEX).write_text(json.dumps(index))


def refused(folder: Path) -> str:
    """What a preview says of a base, which no guess ends, before torch is needed."""
    plan = write_plan(
        folder.parent / "plan.yaml", [{"op": "insert_layers", "where": {"after": [0]}, "init": {"kind": "copy"}}]
    )
    with pytest.raises(BadInput) as caught:
        surgeon.preview(plan, folder)
    assert not re.search(r"another model's|complete\?|another base", str(caught.value))
    return str(caught.value)


def carry_out(line: str, folder: Path) -> None:
    """Run the Python that a message names, in a copy of the folder as it asks."""
    (code,) = re.findall(r"`python -c '(.*)'`", line)
    with contextlib.chdir(folder):
        exec(code, {})


WRAPPED: dict[str, Rename] = {
    "_orig_mod.": lambda name: f"_orig_mod.{name}",
    "module.": lambda name: f"module.{name}",
    "base_model.model.": lambda name: f"base_model.model.{name}",
    "_fsdp_wrapped_module.": lambda name: re.sub(r"(layers\.\d+\.)", r"\1_fsdp_wrapped_module.", name),
    "_checkpoint_wrapped_module.": lambda name: name.replace("self_attn.", "self_attn._checkpoint_wrapped_module."),
    "base_layer.": lambda name: name.replace("q_proj.", "q_proj.base_layer."),
}


@pytest.mark.parametrize("wrapper", WRAPPED)
def test_a_wrapper_in_names_is_taken_out_by_the_line_that_names_it(wrapper: str, base: Path, copy: Path) -> None:
    rename(copy, WRAPPED[wrapper])
    said = refused(copy)
    assert f"`{wrapper}`" in said
    carry_out(said, copy)
    assert same_bytes(weights(base), weights(copy))
    surgeon.preview(copy.parent / "plan.yaml", copy)


def test_wrappers_around_wrappers_are_taken_out_one_after_the_other(base: Path, copy: Path) -> None:
    rename(copy, lambda name: f"module._orig_mod.base_model.model.{WRAPPED['base_layer.'](name)}")
    for _ in range(4):
        carry_out(refused(copy), copy)
    assert same_bytes(weights(base), weights(copy))


def _unmerged(folder: Path) -> None:
    rename(folder, WRAPPED["base_layer."])
    edit_tensor(folder, "model.embed_tokens.weight", lambda value: value)
    file = next(folder.glob("*.safetensors"))
    held = load_file(file) | {"model.layers.0.self_attn.q_proj.lora_A.default.weight": torch.ones(2, 32)}
    save_file(held, file, metadata={"format": "pt"})
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= dict.fromkeys(held, file.name)
    (folder / INDEX).write_text(json.dumps(index))


def _by_mlx(folder: Path) -> None:
    """As mlx-lm quantises: words of 32 bits with scales and biases beside them."""
    for file in folder.glob("*.safetensors"):
        held = {}
        for name, value in load_file(file).items():
            held[name] = value
            if "q_proj" in name:
                stem = name.removesuffix("weight")
                held |= {name: torch.ones(32, 4, dtype=torch.uint32), f"{stem}scales": torch.ones(32, 1)}
                held |= {f"{stem}biases": torch.ones(32, 1)}
        save_file(held, file, metadata={"format": "mlx"})
    index = json.loads((folder / INDEX).read_text())
    files = {name: file.name for file in folder.glob("*.safetensors") for name in load_file(file)}
    (folder / INDEX).write_text(json.dumps(index | {"weight_map": files}))
    edit_config(folder, quantization={"group_size": 32, "bits": 4}, quantization_config={"group_size": 32, "bits": 4})


@pytest.mark.parametrize("more", ["llm.", "pretrained_model.", "_forward_module.", "language_model."])
def test_whatever_stands_before_the_model_s_own_names_is_taken_out(more: str, base: Path, copy: Path) -> None:
    rename(copy, lambda name: f"{more}{name}")
    carry_out(refused(copy), copy)
    assert same_bytes(weights(base), weights(copy))


def test_no_name_of_a_stranger_s_becomes_a_part_of_a_line_to_run(copy: Path) -> None:
    rename(copy, lambda name: f"\"; import os; print('it ran') #.{name}")
    with pytest.raises(BadInput, match=r"no tensor belongs to a layer of `model\.layers`; is config\.json"):
        surgeon.preview(write_plan(copy.parent / "plan.yaml", [{"op": "untie_embeddings"}]), copy)


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "a PEFT model": (_unmerged, r"lora_A.*merge_and_unload\(\)\.save_pretrained"),
    "ZeRO-3": (
        lambda folder: edit_tensor(folder, "model.layers.1.mlp.up_proj.weight", lambda value: torch.empty(0)),
        r"layers\.1\.mlp\.up_proj\.weight .*ZeRO-3.*zero_to_fp32\.py",
    ),
    "ZeRO-3, of one dimension more": (
        lambda folder: edit_tensor(folder, "model.layers.0.mlp.up_proj.weight", lambda value: torch.empty(0, 32)),
        r"layers\.0\.mlp\.up_proj\.weight .*ZeRO-3",
    ),
    "an empty field": (
        lambda folder: edit_config(folder, quantization_config={}),
        "`quantization_config` is left over",
    ),
    "MLX": (_by_mlx, "quantised by MLX; .*--dequantize"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_broke_a_checkpoint_is_named(case: str, copy: Path) -> None:
    spoil, said = BROKEN[case]
    spoil(copy)
    assert re.search(said, refused(copy))


@pytest.mark.parametrize("method", ["fp8", "mxfp4", "bitsandbytes", "gptq", "compressed-tensors", None])
@pytest.mark.parametrize("inside", [True, False])
def test_a_field_left_over_is_told_from_weights_that_are_quantised(method: str, inside: bool, copy: Path) -> None:
    left: dict[str, Any] = {"quantization_config": {"quant_method": method, "load_in_4bit": True}}
    edit_config(copy, **({"text_config": left} if inside else left))
    assert "`quantization_config` is left over" in refused(copy)
    edit_tensor(copy, "model.layers.0.self_attn.q_proj.weight", lambda value: value.to(torch.int8))
    headers = LocalSource(copy).headers([file.name for file in copy.glob("*.safetensors")])
    tensors = [info for header in headers.values() for info in header.tensors]
    assert not damage_of(json.loads((copy / "config.json").read_text()), tensors)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("rows", [120, 136])
def test_rows_that_the_config_does_not_count_are_written_into_it(rows: int, tied: bool, tmp_path: Path) -> None:
    """Megatron pads embeddings; a config edited by hand may count more than there are."""
    folder = tiny.checkpoint(tmp_path / "base", "llama", num_hidden_layers=2, tie_word_embeddings=tied)
    edit_config(folder, vocab_size=rows)
    said = refused(folder)
    assert "shape [128, 32], the config requires" in said and "write `vocab_size` 128" in said
    edit_config(folder, vocab_size=128)
    surgeon.preview(tmp_path / "plan.yaml", folder)


def test_a_run_s_folder_leads_to_its_last_checkpoint(base: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for number in (500, 1000, 90):
        shutil.copytree(base, run / f"checkpoint-{number}")
        lora(run / "adapters" / f"checkpoint-{number}", layers=2)
    assert "give one of these, as checkpoint-1000" in refused(run)
    with pytest.raises(BadInput, match="give one of these, as checkpoint-1000"):
        AdapterFolder.open(run / "adapters", id="adapters")
    shutil.copy(run / "adapters" / "checkpoint-90" / "adapter_config.json", run / "adapters")
    with pytest.raises(BadInput, match="give one of these, as checkpoint-1000"):
        AdapterFolder.open(run / "adapters", id="adapters")
    assert "a PEFT adapter, not a base" in refused(run / "adapters" / "checkpoint-500")


def test_what_is_no_adapter_of_peft_is_named(base: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no adapter_config\.json here; this is the folder of a whole model: give"):
        AdapterFolder.open(base, id="base")
    (lora(tmp_path / "half", layers=2) / "adapter_config.json").unlink()
    with pytest.raises(BadInput, match=r"/half: no adapter_config\.json here beside adapter_model\.safetensors"):
        AdapterFolder.open(tmp_path / "half", id="half")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match=r"no adapter_config\.json here; give the folder that `save_pretrained` of PEFT"):
        AdapterFolder.open(tmp_path / "empty", id="empty")
    lora(tmp_path / "mlx", layers=2)
    (tmp_path / "mlx" / "adapter_model.safetensors").rename(tmp_path / "mlx" / "adapters.safetensors")
    with pytest.raises(BadInput, match=r"an adapter of mlx-lm.*`lora_alpha` `scale` × `rank`"):
        AdapterFolder.open(tmp_path / "mlx", id="mlx")
    cut = lora(tmp_path / "cut", layers=2)
    (cut / "adapter_config.json").write_text("{")
    with pytest.raises(BadInput, match=rf"^{re.escape(str(cut))}/adapter_config\.json: .*not closed"):
        AdapterFolder.open(cut, id="cut")
    file = lora(tmp_path / "zero", layers=2) / "adapter_model.safetensors"
    save_file({name: torch.empty(0) for name in load_file(file)}, file, metadata={"format": "pt"})
    with pytest.raises(BadInput, match=r"lora_A\.weight .*ZeRO-3"):
        AdapterFolder.open(tmp_path / "zero", id="zero")


UNFIT: dict[str, tuple[Rename, str]] = {
    "a wrapper that is not known": (
        lambda name: f"base_model.model.{name}",
        r"take `base_model\.model\.` out of the names, in a copy of the adapter",
    ),
    "diffusers' names": (lambda name: name.replace("lora_A", "lora.down"), "no adapter of PEFT's has such a name"),
    "A and B exchanged": (
        lambda name: name.replace("lora_A", "lora_X").replace("lora_B", "lora_A").replace("lora_X", "lora_B"),
        r"shape \[32, 2\], base and config call for \[2, 32\]: it is transposed, or A and B are exchanged",
    ),
    "names without an end": (lambda name: name.removesuffix(".weight"), "no adapter of PEFT's has such a name"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_an_adapter_s_names_that_fit_nothing_are_told_from_another_base_s(
    case: str, base: Path, tmp_path: Path
) -> None:
    file = lora(tmp_path / "adapter", layers=2) / "adapter_model.safetensors"
    change, said = UNFIT[case]
    save_file({change(name): value for name, value in load_file(file).items()}, file, metadata={"format": "pt"})
    plan = write_plan(tmp_path / "plan.yaml", [{"op": "merge_adapter", "from": str(tmp_path / "adapter")}])
    with pytest.raises(BadInput, match=said) as caught:
        surgeon.preview(plan, base)
    assert "another base" not in str(caught.value)


def test_an_adapter_of_no_effect_is_told_why(base: Path, tmp_path: Path) -> None:
    lora(tmp_path / "adapter", layers=2, lora_alpha=0)
    plan = write_plan(tmp_path / "plan.yaml", [{"op": "merge_adapter", "from": str(tmp_path / "adapter")}])
    with pytest.raises(BadInput, match="this adapter does nothing: `lora_alpha` is 0; give"):
        surgeon.preview(plan, base)
