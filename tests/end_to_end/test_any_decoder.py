"""Decoders that nobody described: a real layout on disk, from preview to training and back to the base.

Each model type brings what it is known for: experts stored one by one, several kinds of layers, names on disk that are
not the model's, towers for images, layers above the stack.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from packaging.version import Version
from safetensors.torch import load_file, save_file
from transformers.utils import is_torchvision_available

import surgeon
from surgeon.anatomy.skeleton import CAUSAL, IMAGE_TEXT
from surgeon.errors import BadInput
from surgeon.models.compare import CACHED_DECODE, CACHED_DECODE_IMAGE, PREFILL, PREFILL_IMAGE, compare_with_image
from surgeon.models.load import load_model
from surgeon.models.tokenizer import open_processor
from surgeon.verification.verification import Verification
from surgeon.writing import small_run
from tests.checkpoints import add_letters, same_bytes, weights
from tests.decoders import tiny_decoder
from tests.elsewhere import WITHOUT_SURGEON
from tests.pictures import add_processor
from tests.quantised import quantised
from tests.runtime.grafting import perturbed
from tests.runtime.test_born import left_padded, prefill_and_decode
from tests.training.texts import corpus
from tests.warm import warm

# Model types by auto class, and changes to their tiny configs.
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": (CAUSAL, {}),
    "mixtral": (CAUSAL, {}),
    "gpt_oss": (CAUSAL, {}),
    "deepseek_v3": (CAUSAL, {}),
    "qwen3_next": (CAUSAL, {}),
    "llama4": (IMAGE_TEXT, {}),
    "gemma3": (IMAGE_TEXT, {}),
    "gemma4": (IMAGE_TEXT, {}),
    "granitemoehybrid": (CAUSAL, {}),
    "nemotron_h": (CAUSAL, {}),
    "olmo3": (CAUSAL, {}),
    "gpt2": (CAUSAL, {"tie_word_embeddings": True}),
    # Another class, by another maker's names: dense, and experts beside one matrix of queries, keys and values.
    "exaone": (CAUSAL, {}),
    "sarvam_moe": (CAUSAL, {}),
}
# Before, transformers has no such type.
SINCE = {"exaone": "5.24", "sarvam_moe": "5.24", "mistral_large4": "5.23"}

# Stored as the published ones are, in bfloat16 beside; the others in float32, in which a CPU trains far faster.
QUANTISED = {"gpt_oss": "mxfp4", "deepseek_v3": "fp8"}

GRAFTS = (
    "{op: gated_adapters, size: 8}",
    "{op: control_llm, layers: {every: 2}, interpolator: {kind: dlerp}}",
    "{op: pmoe_experts, threshold: 1}",
    "{op: mixture_of_control, rank: 4}",
)
# Beside new layers and old: experts stored one by one, the text part of a larger model, norms behind blocks (hybrids
# below); beside quantised ones what transformers' kernels do not replace.
GRAFTED = {
    **dict.fromkeys(("mixtral", "gemma3", "olmo3", "exaone", "sarvam_moe"), GRAFTS),
    "gpt_oss": (GRAFTS[1],),
    # Slots in matrices that are stored inputs by outputs.
    "gpt2": (GRAFTS[2],),
}

# Names that differ, one list of layers inside two models, tied embeddings.
STREAMED = ("granitemoehybrid", "llama4", "gpt2")

# Whose processors of images run here, or the package that they lack.
IMAGES = {"gemma3": "", "gemma4": "", "llama4": "torchvision"}

# Layers that carry a state along the row, from document to document.
ALONG_THE_ROW = ("qwen3_next", "granitemoehybrid", "nemotron_h")

TRAINING = {
    "surgeon_train": 1,
    "steps": 3,
    "batch": 2,
    "length": 16,
    "optimizer": {"lr": 1e-3, "warmup": 1},
    "sources": [{"name": "words", "path": "words.jsonl", "share": 1.0, "validation": 0.1}],
}

# Of a base and its output, whether they are the same to a process in which nothing of surgeon is.
ELSEWHERE = (
    WITHOUT_SURGEON
    + """
import torch, transformers
transformers.logging.set_verbosity_error()
for line in iter(sys.stdin.readline, ""):
    auto, folder, twin, own = line.split()
    try:
        found = []
        for path, trusted in ((folder, {}), (twin, {"trust_remote_code": True} if own == "own" else {})):
            model, info = getattr(transformers, auto).from_pretrained(path, output_loading_info=True, **trusted)
            assert not info["missing_keys"] and not info["unexpected_keys"], (path, info)
            model.set_attn_implementation("eager")
            for value in model.parameters():
                value.data = value.data.clone()
            ids = torch.arange(5, 25).reshape(2, 10)
            asked = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
            with torch.inference_mode():
                found.append([model(ids).logits, model.generate(ids, **asked)])
        assert all(torch.equal(*pair) for pair in zip(*found)), "logits or words differ"
        print("the same", flush=True)
    except Exception as error:
        print(repr(error).replace("\\n", " "), flush=True)
"""
)


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """What `ELSEWHERE` says of auto class, base and output: one process for all, which starts with an empty cache."""
    cache = tmp_path_factory.mktemp("cache")
    environment = {"PATH": "/usr/bin:/bin", "HF_HOME": str(cache), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with (
        (cache / "stderr").open("w+") as errors,
        subprocess.Popen(
            [*warm(), "-c", ELSEWHERE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=cache,
            env=environment,
        ) as process,
    ):
        assert process.stdin is not None and process.stdout is not None

        def told(*asked: object) -> str:
            print(*asked, file=process.stdin, flush=True)
            return process.stdout.readline().strip() or (cache / "stderr").read_text()

        yield told
        process.stdin.close()


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.yaml"
    path.write_text("surgeon: 1\noperations:\n  - {op: insert_layers, where: {every: 2}, init: {kind: copy}}\n")
    return path


@pytest.mark.parametrize("model_type", LAYOUTS)
def test_from_surgery_to_training_and_back(
    model_type: str, plan: Path, tmp_path: Path, elsewhere: Callable[..., str]
) -> None:
    if model_type == "gemma4" and Version(transformers.__version__) < Version("5.23"):
        pytest.skip("until then its layers count themselves: new ones are of another kind, and refused")
    if model_type == "llama4" and Version(transformers.__version__) == Version("5.24.0"):
        pytest.skip("its class reads `image_outputs` of an output that has none: it runs no text")
    skip_before(model_type)
    auto, changes = LAYOUTS[model_type]
    method = QUANTISED.get(model_type)
    base = tiny_decoder(tmp_path / "base", model_type, auto, dtype="bfloat16" if method else "float32", **changes)
    add_letters(quantised(base, method) if method else base)
    if model_type in IMAGES:
        add_processor(base)
    grafts = GRAFTED.get(model_type, ())
    plan.write_text(plan.read_text() + "".join(f"  - {operation}\n" for operation in grafts))
    out = tmp_path / f"{model_type}-out"
    applied = surgeon.apply(plan, str(base), out)
    assert any("found on a twin" in note for note in applied.preview.notes)
    # As stored: of most, in float32; they are verified in bfloat16.
    assert elsewhere(auto, base, out, "own" if grafts else "native") == "the same"
    text = corpus(tmp_path / "words.jsonl", documents=30)
    for streamed in (False, True) if model_type in STREAMED else (False,):
        dtypes = ["auto"] if streamed else ["float32", "bfloat16"] if method else ["bfloat16"]
        options: dict[str, Any] = {"text": text, "window": 20, "windows": 1, "dtypes": dtypes, "streamed": streamed}
        verified = surgeon.verify(base, out, **options)
        assert verified.holds
        assert verified.identical
        assert_images(model_type, verified, 0 if streamed else len(dtypes))

    (tmp_path / "train.yaml").write_text(yaml.safe_dump(TRAINING))
    packing = []
    if model_type in ALONG_THE_ROW:
        with pytest.raises(BadInput, match=r"packed documents see each other under .*: measured: "):
            surgeon.train(out, tmp_path / "train.yaml", tmp_path / "run", device="cpu")
        packing = ["packing=joined"]
    surgeon.train(out, tmp_path / "train.yaml", tmp_path / "run", overrides=packing, device="cpu")
    trained = surgeon.verify(base, tmp_path / "run", text=text, window=4, windows=1)
    assert trained.holds
    assert trained.identical is False
    surgeon.revert(tmp_path / "run", tmp_path / "back")
    assert same_bytes(weights(base), weights(tmp_path / "back"))
    assert json.loads((base / "config.json").read_text()) == json.loads((tmp_path / "back/config.json").read_text())


def skip_before(model_type: str) -> None:
    if Version(transformers.__version__) < Version(SINCE.get(model_type, "0")):
        pytest.skip("this transformers has no such type")


# Types of whose names on disk transformers' patterns, one way or the other, would fit those of grafts; and one of which
# they map the names of layers, and not what a graft adds beside them.
RENAMED = {"sarvam_moe": CAUSAL, "mistral_large4": IMAGE_TEXT, "qianfan_ocr": IMAGE_TEXT}


@pytest.mark.parametrize("model_type", RENAMED)
def test_grafts_are_saved_by_the_names_that_they_were_read_by(model_type: str, plan: Path, tmp_path: Path) -> None:
    skip_before(model_type)
    auto, operations = RENAMED[model_type], [operation for operation in GRAFTS if "control_llm" not in operation]
    base = tiny_decoder(tmp_path / "base", model_type, auto)
    plan.write_text("surgeon: 1\noperations:\n" + "".join(f"  - {operation}\n" for operation in operations))
    surgeon.apply(plan, str(base), tmp_path / "out")

    def loaded(folder: Path) -> Any:
        kind, asked = getattr(transformers, auto), {"trust_remote_code": True, "output_loading_info": True}
        model, info = kind.from_pretrained(folder, **asked)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        return model

    model = perturbed(loaded(tmp_path / "out"))
    model.save_pretrained(tmp_path / "saved")
    assert weights(tmp_path / "saved").keys() == weights(tmp_path / "out").keys()
    again = loaded(tmp_path / "saved").state_dict()
    assert all(torch.equal(value, again[name]) for name, value in model.state_dict().items())
    surgeon.revert(tmp_path / "out", tmp_path / "back")
    assert same_bytes(weights(base), weights(tmp_path / "back"))


def assert_images(model_type: str, verified: Verification, times: int) -> None:
    """A prompt with an image was compared so many times; where it could not be, a note says why."""
    compared = [c.mode for c in verified.comparisons if c.mode in (PREFILL_IMAGE, CACHED_DECODE_IMAGE)]
    notes = [check.detail for check in verified.checks if check.name == "images"]
    lacking = IMAGES.get(model_type)
    if lacking and is_torchvision_available():
        return
    if lacking == "" and times:
        assert compared == [PREFILL_IMAGE, CACHED_DECODE_IMAGE] * times
        assert not notes
        return
    assert not compared
    assert len(notes) == (model_type in IMAGES)
    assert all(("--streamed" if not times else str(lacking)) in note for note in notes)


def test_layers_above_the_stack_stay_above_it(plan: Path, tmp_path: Path) -> None:
    """DeepSeek-V3 keeps the layer that predicts a second token at the number after the last."""
    base = tiny_decoder(tmp_path / "base", "deepseek_v3")
    shard = max(base.glob("*.safetensors"))
    held = load_file(shard)
    extra = {f"model.layers.4.{name}": torch.randn(4, 3) for name in ("eh_proj.weight", "enorm.weight")}
    save_file(held | extra, shard, metadata={"format": "pt"})
    index = json.loads((base / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(extra, shard.name)
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    surgeon.apply(plan, str(base), tmp_path / "out")
    after = weights(tmp_path / "out")
    for name, value in extra.items():
        assert torch.equal(after[name.replace("layers.4.", "layers.6.")], value)
        assert name not in after
    verified = surgeon.verify(base, tmp_path / "out", window=16, windows=1)
    assert verified.holds
    assert verified.identical
    surgeon.revert(tmp_path / "out", tmp_path / "back")
    assert weights(tmp_path / "back").keys() == weights(base).keys()


def test_every_way_to_grow_and_to_undo(tmp_path: Path) -> None:
    """Experts one by one: drawn, stacked, grown twice, carried as a delta, taken back step by step."""
    base = tiny_decoder(tmp_path / "base", "qwen3_moe")

    def applied(name: str, operation: str, onto: Path = base) -> Path:
        path = tmp_path / f"{name}.yaml"
        path.write_text(f"surgeon: 1\noperations:\n  - {operation}\n")
        surgeon.apply(path, str(onto), tmp_path / name)
        return tmp_path / name

    for name, operation, exact in (
        ("random", "{op: insert_layers, where: {every: 2}, init: {kind: random}}", True),
        ("loud", "{op: insert_layers, where: {every: 2}, init: {kind: copy}, zero_init: false}", False),
        ("stack", "{op: stack_layers, bottom: 3, top: 3}", False),
        ("control", "{op: control_llm, layers: {every: 2}, expansion: stack}", True),
    ):
        verified = surgeon.verify(base, applied(name, operation), window=16, windows=1)
        assert verified.holds, name
        assert verified.identical is exact, name
    twice = applied("twice", "{op: insert_layers, where: {every: 3}, init: {kind: copy}}", tmp_path / "random")
    verified = surgeon.verify(base, twice, window=16, windows=1)
    assert verified.holds
    assert verified.identical
    surgeon.make_delta(twice, tmp_path / "delta")
    surgeon.apply_delta(tmp_path / "delta", str(tmp_path / "random"), tmp_path / "same")
    assert weights(tmp_path / "same").keys() == weights(twice).keys()
    assert all(torch.equal(value, weights(twice)[name]) for name, value in weights(tmp_path / "same").items())
    surgeon.revert(twice, tmp_path / "once")
    surgeon.revert(tmp_path / "once", tmp_path / "none")
    assert all(torch.equal(value, weights(base)[name]) for name, value in weights(tmp_path / "none").items())
    surgeon.report(twice, html=tmp_path / "report.html")
    assert "qwen3_moe" in (tmp_path / "report.html").read_text()


BEHIND_A_GATE = (
    "{op: insert_layers, where: {after: [2]}, count: 1, init: {kind: copy}}",
    "{op: gated_adapters, layers: [2, 3], size: 8, gate: none}",
    "{op: pmoe_experts, threshold: 2, slots: 2}",
    "{op: mixture_of_control, layers: [2, 3], rank: 4}",
    "{op: domain_gate, units: 4}",
)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "qwen3_next", "gemma3"])
def test_behind_a_closed_gate_and_switched_off_it_is_the_base(model_type: str, plan: Path, tmp_path: Path) -> None:
    """Padded, with and without a cache, whatever what was added became. Open, a cache changes nothing either: slots
    stand at no module that runs on other tokens, as a latent cache's does."""
    base = tiny_decoder(tmp_path / "base", model_type, LAYOUTS[model_type][0])
    plan.write_text("surgeon: 1\noperations:\n" + "".join(f"  - {operation}\n" for operation in BEHIND_A_GATE))
    surgeon.apply(plan, str(base), tmp_path / "out")
    native, model = load_model(base), load_model(tmp_path / "out")
    for parameter in model.parameters():
        # Mapped from the file.
        parameter.data = parameter.data.clone()
    perturbed(model)
    (threshold,) = (value for name, value in model.named_buffers() if name.endswith("domain_gate.threshold"))
    ids, mask = left_padded()
    expected = prefill_and_decode(native, ids, mask)

    def is_the_base() -> bool:
        found = prefill_and_decode(model, ids, mask)
        real = [mask.bool(), *[torch.ones(2, 1, dtype=torch.bool)] * 4]
        return all(torch.equal(one[at], other[at]) for one, other, at in zip(found, expected, real, strict=True))

    threshold.data.fill_(1e9)
    assert is_the_base()
    threshold.data.fill_(-1e9)
    whole, *steps = prefill_and_decode(model, ids, mask)
    assert not (whole == expected[0]).all(dim=-1)[mask.bool()].any()
    torch.testing.assert_close(torch.cat(steps, dim=1), whole[:, -4:], rtol=1e-3, atol=1e-3)
    with model.grafts(enabled=False):
        assert is_the_base()


@pytest.mark.parametrize("model_type", ["smollm3", "olmo3", "granite"])
def test_fusion_by_transport_is_that_of_the_described_family(model_type: str, tmp_path: Path) -> None:
    """The same weights under a described family's name: the same fused bytes (OLMo 3's layer is OLMo 2's)."""
    base = tiny_decoder(tmp_path / "base", model_type, attention_bias=False)
    twin = tmp_path / "twin"
    shutil.copytree(base, twin)
    known = "olmo2" if model_type == "olmo3" else "llama"
    config = json.loads((base / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in ("layer_types", "sliding_window")}
    architecture = {"olmo2": "Olmo2ForCausalLM", "llama": "LlamaForCausalLM"}[known]
    (twin / "config.json").write_text(json.dumps(config | {"model_type": known, "architectures": [architecture]}))
    path = tmp_path / "plan.yaml"
    operation = "{op: insert_layers, where: {after: [0]}, init: {kind: ot_fusion}}"
    path.write_text(f"surgeon: 1\nseed: 3\noperations:\n  - {operation}\n")
    for folder in (base, twin):
        surgeon.apply(path, str(folder), folder.with_name(f"{folder.name}-out"))
    mine, theirs = weights(tmp_path / "base-out"), weights(tmp_path / "twin-out")
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
    assert not torch.equal(
        mine["model.layers.1.self_attn.q_proj.weight"], mine["model.layers.0.self_attn.q_proj.weight"]
    )
    verified = surgeon.verify(base, tmp_path / "base-out", window=16, windows=1)
    assert verified.holds
    assert verified.identical


# What a grafted model must do as any of transformers' own: words of every kind of generation, its states, a saved copy,
# training with either kind of checkpointing, attention changed afterwards.
GRAFTED_ELSEWHERE = (
    WITHOUT_SURGEON
    + """
import copy, inspect, tempfile, torch, transformers
transformers.logging.set_verbosity_error()
auto, folder, twin = sys.stdin.read().split()
Auto = getattr(transformers, auto)
# The output first: transformers remembers of a class how it can run, and what extends it asks for that.
model, info = Auto.from_pretrained(twin, trust_remote_code=True, output_loading_info=True)
base = Auto.from_pretrained(folder)
assert not info["missing_keys"] and not info["unexpected_keys"], info
experts = [each.config.get_text_config()._experts_implementation for each in (base, model)]
assert experts[0] == experts[1], experts
for value in (*base.parameters(), *model.parameters()):
    value.data = value.data.clone()
ids = torch.arange(5, 25).reshape(2, 10)
mask = torch.ones_like(ids)
mask[0, :3] = 0

def same(run):
    with torch.inference_mode():
        one, other = run(base), run(model)
    assert torch.equal(one, other), run.__code__.co_firstlineno

for implementation in ("eager", "sdpa"):
    for each in (base, model):
        each.set_attn_implementation(implementation)
    same(lambda each: each(ids).logits)
    same(lambda each: each(ids, attention_mask=mask).logits[mask.bool()])
for asked in ({}, {"num_beams": 2}, {"cache_implementation": "static"}):
    asked |= {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    same(lambda each: each.generate(ids, **asked))
with torch.inference_mode():
    left = iter(model(ids, output_hidden_states=True).hidden_states)
    # Of a layer and its twin both have one: those of the base are among them, in order.
    for state in base(ids, output_hidden_states=True).hidden_states:
        assert any(torch.equal(state, each) for each in left)
same(lambda each: each.base_model(ids)[0])
outer = transformers.AutoModel.from_pretrained(twin, trust_remote_code=True)
for each in (model, outer):
    layers = next(list(kid) for name, kid in each.get_decoder().named_children() if "layers" in name)
    assert {type(layer).__name__ for layer in layers} <= set(each._no_split_modules), each._no_split_modules
for value in outer.parameters():
    value.data = value.data.clone()
with torch.inference_mode():
    assert torch.equal(outer(ids)[0], model.base_model(ids)[0])
    assert torch.equal(copy.deepcopy(model)(ids).logits, model(ids).logits)
with tempfile.TemporaryDirectory() as saved:
    model.save_pretrained(saved)
    again, info = Auto.from_pretrained(saved, trust_remote_code=True, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
assert "domain_ids" in inspect.signature(model.forward).parameters
names, grads = set(model.freeze_base()), []
assert names == {name for name, value in model.named_parameters() if value.requires_grad}
for reentrant in (None, False, True):
    model.train().zero_grad()
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    output = model(input_ids=ids, labels=ids, domain_ids=torch.tensor([0, 1]))
    assert output.divergence_loss is not None and output.local_l1_loss is not None and output.balance_loss > 0
    output.loss.backward()
    grads.append({name: value.grad for name, value in model.named_parameters() if value.grad is not None})
assert set(grads[0]) <= names and any("lora_B" in name for name in grads[0]), sorted(grads[0])
for other in grads[1:]:
    assert other.keys() == grads[0].keys()
    assert all(torch.allclose(value, other[name], atol=1e-6) for name, value in grads[0].items())
print("the same")
"""
)


# A part of a larger model with experts and linear attention; layers of one block each.
@pytest.mark.parametrize("model_type", ["qwen3_5_moe", "nemotron_h"])
def test_grafts_work_as_a_native_model_does_where_surgeon_is_not(model_type: str, tmp_path: Path) -> None:
    auto = IMAGE_TEXT if model_type == "qwen3_5_moe" else CAUSAL
    base = tiny_decoder(tmp_path / "base", model_type, auto)
    path = tmp_path / "plan.yaml"
    path.write_text("surgeon: 1\noperations:\n" + "".join(f"  - {operation}\n" for operation in GRAFTS))
    surgeon.apply(path, str(base), tmp_path / "out")
    asked = f"{auto} {base} {tmp_path / 'out'}"
    told = subprocess.run([*warm(), "-c", GRAFTED_ELSEWHERE], input=asked, capture_output=True, text=True, check=False)
    assert told.stdout == "the same\n", told.stderr


def test_twins_get_what_a_model_sets_by_walking_through_its_layers(tmp_path: Path) -> None:
    """Falcon-H1 fills a buffer of each layer that no checkpoint holds."""
    base = tiny_decoder(tmp_path / "base", "falcon_h1", dtype="bfloat16")
    path = tmp_path / "plan.yaml"
    path.write_text("surgeon: 1\noperations:\n  - {op: control_llm, layers: [1]}\n")
    surgeon.apply(path, str(base), tmp_path / "out")
    verified = surgeon.verify(base, tmp_path / "out", window=16, windows=1, dtypes=["auto"])
    assert verified.holds
    assert verified.identical


def test_grafted_experts_are_carried_merged_exported_and_operated_on(tmp_path: Path) -> None:
    """A second surgery, a delta, branches folded in, a slot as PEFT's adapter under the model's own names."""
    base = tiny_decoder(tmp_path / "base", "qwen3_moe")

    def applied(name: str, *operations: str, onto: Path = base) -> Path:
        path = tmp_path / f"{name}.yaml"
        path.write_text("surgeon: 1\noperations:\n" + "".join(f"  - {operation}\n" for operation in operations))
        surgeon.apply(path, str(onto), tmp_path / name)
        return tmp_path / name

    grown = applied("grown", "{op: control_llm, layers: {every: 2}}", "{op: pmoe_experts, threshold: 0}")
    second = applied(
        "second", "{op: insert_layers, where: {after: [1]}, init: {kind: copy}}", "{op: pmoe_experts}", onto=grown
    )
    verified = surgeon.verify(grown, second, window=16, windows=1)
    assert verified.holds
    assert verified.identical
    surgeon.make_delta(second, tmp_path / "delta", base=grown)
    surgeon.apply_delta(tmp_path / "delta", str(grown), tmp_path / "same")
    assert all(torch.equal(value, weights(second)[name]) for name, value in weights(tmp_path / "same").items())
    surgeon.merge(grown, tmp_path / "merged", window=16, windows=1)
    assert "model.layers.1.expanded.mlp.experts.0.up_proj.weight" in weights(grown)
    assert not any(".expanded." in name for name in weights(tmp_path / "merged"))
    surgeon.export_slot(grown, 0, tmp_path / "slot")
    told = json.loads((tmp_path / "slot/adapter_config.json").read_text())
    assert sorted(told["target_modules"]) == ["q_proj", "v_proj"]
    # In every layer, and no other module of this model goes by these names.
    adapted = {name.rpartition(".lora_")[0] for name in load_file(tmp_path / "slot/adapter_model.safetensors")}
    meant = (name for name in weights(base) if name.endswith(("q_proj.weight", "v_proj.weight")))
    assert adapted == {f"base_model.model.{name.removesuffix('.weight')}" for name in meant}
    surgeon.revert(second, tmp_path / "back", to=0)
    assert all(torch.equal(value, weights(base)[name]) for name, value in weights(tmp_path / "back").items())


# What grafts cannot stand beside, by model type and operation.
NO_PLACE = {
    "a kind of layer without an FFN": (
        "nemotron_h",
        "{op: gated_adapters, size: 4, layers: [0]}",
        r"layer 0 of this nemotron_h has no FFN .*; layers .* have one: choose `layers` by that",
    ),
    "no layer with an FFN": (
        "falcon_mamba",
        "{op: gated_adapters, size: 4}",
        "no layer has one: use insert_layers or mixture_of_control, which",
    ),
    "no attention": ("falcon_mamba", "{op: pmoe_experts, targets: [q_proj]}", "`targets` names 'q_proj', no linear"),
    "a stream of another dtype": (
        "falcon_mamba",
        "{op: pmoe_experts}",
        "the model cannot be run",
    ),
}


@pytest.mark.parametrize(
    ("model_type", "activation"),
    [("bloom", "gelu_pytorch_tanh"), ("lfm2", "silu"), ("apertus", "silu")],
    ids=["a formula", "a function", "one that learns"],
)
def test_adapters_take_the_activation_of_an_ffn_whose_config_names_none(
    model_type: str, activation: str, tmp_path: Path
) -> None:
    """A plan may name another."""
    base = tiny_decoder(tmp_path / "base", model_type)
    for operation, expected in (("", activation), (", activation: gelu", "gelu")):
        plan = f"surgeon: 1\noperations:\n  - {{op: gated_adapters, size: 4{operation}}}\n"
        shown = surgeon.preview(surgeon.parse_plan(plan), str(base))
        entries = shown.blueprint.config["surgery"]["adapters"]
        assert {entry["activation"] for entry in entries} == {expected}
        matched = shown.blueprint.operations[0].matched
        assert (f"activation {activation} (config.json names none)" in matched) is not operation


@pytest.mark.parametrize("case", NO_PLACE)
def test_where_no_graft_can_stand_the_reason_is_said(case: str, tmp_path: Path) -> None:
    model_type, operation, words = NO_PLACE[case]
    base = tiny_decoder(tmp_path / "base", model_type)
    with pytest.raises(BadInput, match=words):
        surgeon.preview(surgeon.parse_plan(f"surgeon: 1\noperations:\n  - {operation}\n"), str(base))


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "hyper-connections": ("minimax", {}, "cannot be added without changing the model: even with all its weights zero"),
    "post-norm blocks": ("bart", {}, "cannot be added without changing the model"),
    "a layer's number in its weights' scale": ("diffllama", {}, "layer 1, .* another kind .*lambda_init"),
    "features of images by a layer's number": ("qwen3_vl", {}, "features of images .* choose other places"),
    "a period in numbers alone": (
        "jamba",
        {"attn_layer_period": 2, "expert_layer_period": 2, "expert_layer_offset": 1},
        "layer 1, .* another kind .*Jamba.* in place of Jamba",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_exact_is_refused_with_the_reason(case: str, tmp_path: Path) -> None:
    model_type, changes, words = REFUSED[case]
    base = tiny_decoder(tmp_path / "base", model_type, IMAGE_TEXT if model_type == "qwen3_vl" else CAUSAL, **changes)
    path = tmp_path / "plan.yaml"
    path.write_text("surgeon: 1\noperations:\n  - {op: insert_layers, where: {every: 1}, init: {kind: copy}}\n")
    with pytest.raises(BadInput, match=words):
        surgeon.preview(path, str(base))


def test_above_the_layers_that_take_an_images_features_it_is_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below them it is exact on text alone: had the twin not refused that, the prompt with an image shows it."""
    base = add_processor(add_letters(tiny_decoder(tmp_path / "base", "qwen3_vl", IMAGE_TEXT)))
    path = tmp_path / "plan.yaml"
    for after, exact in ([2, 3], True), ([0], False):
        if not exact:
            monkeypatch.setattr(small_run, "_with_image", lambda *_: None)
        path.write_text(
            f"surgeon: 1\noperations:\n  - {{op: insert_layers, where: {{after: {after}}}, init: {{kind: copy}}}}\n"
        )
        out = tmp_path / f"out-{exact}"
        surgeon.apply(path, str(base), out)
        verified = surgeon.verify(base, out, window=20, windows=1)
        assert {c.mode: c.identical for c in verified.comparisons} == {
            PREFILL: True,
            CACHED_DECODE: True,
            PREFILL_IMAGE: exact,
            CACHED_DECODE_IMAGE: exact,
        }
        assert verified.holds is exact


def test_an_image_that_is_not_compared_is_noted(tmp_path: Path) -> None:
    """Where there is no processor. A tower for images that was changed is found by its bytes all the same."""
    base = add_letters(tiny_decoder(tmp_path / "base", "gemma3", IMAGE_TEXT))
    path = tmp_path / "plan.yaml"
    path.write_text("surgeon: 1\noperations:\n  - {op: insert_layers, where: {after: [3]}, init: {kind: copy}}\n")
    surgeon.apply(path, str(base), tmp_path / "out")
    verified = surgeon.verify(base, tmp_path / "out", window=20, windows=1)
    assert verified.holds
    assert [c.mode for c in verified.comparisons] == [PREFILL, CACHED_DECODE]
    (note,) = (check for check in verified.checks if check.note)
    assert note.name == "images"
    assert "there is no processor in the folder" in note.detail

    shard, name = next(
        (shard, name)
        for shard in sorted((tmp_path / "out").glob("*.safetensors"))
        for name in load_file(shard)
        if "vision_tower" in name
    )
    held = load_file(shard)
    held[name] = held[name] + 1
    save_file(held, shard, metadata={"format": "pt"})
    verified = surgeon.verify(base, tmp_path / "out", logits=False)
    assert [name in check.detail for check in verified.checks if not check.holds] == [True]


def test_processors_that_do_not_suit_are_reported(tmp_path: Path) -> None:
    """One that makes another number of tokens than the model takes, one without bounds, one that is no JSON.

    Classes of another sort are not taken from a folder: the model type's own is.
    """
    base = add_processor(add_letters(tiny_decoder(tmp_path / "base", "gemma3", IMAGE_TEXT)))
    file = base / "processor_config.json"
    settings = json.loads(file.read_text())
    image = settings["image_processor"] | {"size": {"height": 10**8, "width": 10**8}}

    def opened(**changes: Any) -> tuple[Any, str]:
        file.write_text(json.dumps(settings | changes))
        return open_processor(base)

    model = load_model(base)
    inputs = opened(image_seq_length=5)[0].with_picture()
    with pytest.raises(BadInput, match="Image features and image tokens do not match"):
        compare_with_image(model, model, inputs)
    with pytest.raises(BadInput, match=r"processor_config\.json: the processor "):
        opened(image_processor=image)[0].with_picture()
    named = {"image_processor_type": "AutoModel"}
    other, _ = opened(processor_class="AutoModel", image_processor=settings["image_processor"] | named)
    assert other.with_picture().keys() == inputs.keys()
    file.write_text("{")
    processor, why_not = open_processor(base)
    assert processor is None
    assert "the processor in the folder cannot be loaded" in why_not


def test_whole_periods_go_where_single_layers_cannot(tmp_path: Path) -> None:
    """Jamba's kinds follow from numbers in its config alone: its period, here of four, is inserted as a whole."""
    experts = {"expert_layer_period": 2, "expert_layer_offset": 1}
    attention = {"attn_layer_period": 4, "attn_layer_offset": 2}
    base = tiny_decoder(tmp_path / "base", "jamba", layers=8, **attention, **experts)
    before = weights(base)
    same: dict[str, bool] = {}
    for init in ("copy", "random"):
        path = tmp_path / f"{init}.yaml"
        path.write_text(
            "surgeon: 1\noperations:\n"
            f"  - {{op: insert_layers, where: {{every_period: 2}}, init: {{kind: {init}}}}}\n"
            f"  - {{op: insert_layers, where: {{every_period: 1}}, count: 4, init: {{kind: {init}}}}}\n"
        )
        shown = surgeon.apply(path, str(base), tmp_path / init).preview
        assert [record.matched for record in shown.blueprint.operations] == [
            "4 new layers in whole periods of 4 layers, after layer 7",
            "4 new layers in whole periods of 4 layers, after layer 11",
        ]
        assert [layer.like for layer in shown.blueprint.layers] == [*range(8), *range(4, 8), *range(4, 8)]
        after = weights(tmp_path / init)
        same[init] = all(
            torch.equal(after[name.replace("layers.5.", "layers.9.")], before[name])
            for name in before
            if ".layers.5." in name and "experts" in name and "up_proj" in name
        )
    assert any(".layers.5." in name and "experts" in name and "up_proj" in name for name in before)
    assert same == {"copy": True, "random": False}
    verified = surgeon.verify(base, tmp_path / "random", window=16, windows=1)
    assert verified.holds
    assert verified.identical
    surgeon.revert(tmp_path / "copy", tmp_path / "back")
    assert weights(tmp_path / "back").keys() == before.keys()


def test_a_part_of_a_period_stays_at_the_top(tmp_path: Path) -> None:
    """RecurrentGemma's pattern is a list of three in its config, and its eight layers are two of them and two more."""
    base = tiny_decoder(tmp_path / "base", "recurrent_gemma", layers=8)
    copies = "{op: insert_layers, where: {every_period: 1}, init: {kind: copy}}"
    shown = surgeon.preview(surgeon.parse_plan(f"surgeon: 1\noperations:\n  - {copies}\n"), base)
    assert shown.blueprint.promise == "exact"
    assert [layer.like for layer in shown.blueprint.layers] == [0, 1, 2, 0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7]


def test_a_cache_that_the_output_does_not_name(tmp_path: Path) -> None:
    """RecurrentGemma fills the cache it is given and returns none: earlier choices are kept in it all the same."""
    base = tiny_decoder(tmp_path / "base", "recurrent_gemma", layers=3)
    states = surgeon.parse_plan("surgeon: 1\noperations:\n  - {op: mixture_of_control, rank: 2}\n")
    surgeon.apply(states, base, tmp_path / "out")
    assert surgeon.verify(base, tmp_path / "out", window=16, windows=1).identical


def _shape(folder: Path) -> None:
    shard = min(folder.glob("*.safetensors"))
    held = load_file(shard)
    name = next(name for name in held if "experts.3." in name)
    held[name] = held[name][:-1].contiguous()
    save_file(held, shard, metadata={"format": "pt"})


def _named(folder: Path, change: Callable[[str], str]) -> None:
    """Rename tensors of the first shard."""
    shard = min(folder.glob("*.safetensors"))
    held = {change(name): value for name, value in load_file(shard).items()}
    save_file(held, shard, metadata={"format": "pt"})
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] = {change(name): file for name, file in index["weight_map"].items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "an expert of another shape": (_shape, r"experts\.3\..*: shape \["),
    "an expert's tensor missing": (
        lambda f: _named(f, lambda name: name.replace("layers.0.mlp.experts.3.up_proj", "spare.up_proj")),
        r"layers\.0\..*experts\.3\.up_proj|layer 0, which is of the same kind, has no such tensor",
    ),
    "a layer's tensor unknown": (
        lambda f: _named(f, lambda name: name.replace("layers.0.input_layernorm", "layers.0.inner_norm")),
        r"layers\.0\.inner_norm\.weight: layer 1, which is of the same kind, has no such tensor",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_checkpoint_that_contradicts_its_config(case: str, plan: Path, tmp_path: Path) -> None:
    break_it, words = BROKEN[case]
    base = tiny_decoder(tmp_path / "base", "qwen3_moe")
    break_it(base)
    with pytest.raises(BadInput, match=words):
        surgeon.preview(plan, str(base))
    assert not (tmp_path / "out").exists()
