"""Packed documents under every attention implementation that is here: isolated or not, how near, how fast.

    python benchmarks/packed_isolation.py --to PAGE.md [--work DIR] [--small] [--only NAME …] [--steps 24]
    python benchmarks/packed_isolation.py --to PAGE.md --decoders

A random Llama, a layer and adapters put in, trains by `surgeon train` on documents of 10 to 600 words packed into
sequences, with the packer, collation and probe of training. Each implementation runs in a process of its own:

- what the probe before the first step measures, and whether training begins;
- the loss of every document alone and packed, and gradients beside those of `eager` in float32;
- tokens a second after the first steps, and the peak of memory.

Where the package flash_attn is not installed, transformers' own flash attention (its collation, `_is_packed_sequence`,
`cu_seq_lens`) runs with torch's CUDA kernel for sequences of various lengths (`torch.nn.attention.varlen`) in the place
of flash_attn's functions; on a CPU with `scaled_dot_product_attention` segment by segment, which sees the same
arguments. The last row takes what runs micro-batches as one row away: the probe must refuse it.

With `--decoders` the probe alone, on a tiny model of every causal decoder of the installed transformers, as
transformers runs it and as training does.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measuring import in_a_process, machine
from random_llama import WORDS, make_base

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

PLAN = """\
surgeon: 1
operations:
  - {op: insert_layers, where: {after: [1]}, init: {kind: copy}}
  - {op: gated_adapters, layers: [0, 3], size: 16}
"""
CONFIG = """\
surgeon_train: 1
steps: 24
batch: 8
micro_batch: 8
what: all
evaluate_every: 1000
validation_sequences: 2
optimizer: {lr: 1e-5, warmup: 1}
sources:
  - {name: text, path: text.jsonl, share: 1, validation: 0.05}
"""
STAND_IN, BROKEN = "flash_stand_in", "flash_stand_in, rows left as they are"
# Of the steps, those that are not timed: they compile, and fill caches.
WARM = 6
SIZES = {
    False: {"width": 1024, "inner": 2816, "layers": 12, "heads": 16, "groups": 4},
    True: {"width": 64, "inner": 96, "layers": 4, "heads": 4, "groups": 2},
}
TOKENS = {False: 4096, True: 96}


def make(work: Path, small: bool) -> None:
    """The base in bfloat16, its text, and the base with what surgery adds."""
    import surgeon

    make_base(work / "float32", tied=False, documents=2, length=8, **SIZES[small])
    settings = json.loads((work / "float32/config.json").read_text())
    settings["max_position_embeddings"] = TOKENS[small]
    (work / "float32/config.json").write_text(json.dumps(settings))
    # As trained ones are: attention of matrices this large sees its context.
    model = surgeon.open_checkpoint(work / "float32").load(dtype="float32")
    import torch

    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=1.0 if "embed" in name else parameter.shape[1] ** -0.5)
    shutil.copytree(work / "float32", work / "base")
    model.to(torch.bfloat16).save_pretrained(work / "base")
    drawn = random.Random(0)
    most, count = (600, 4000) if not small else (30, 200)
    with (work / "text.jsonl").open("w") as file:
        for _ in range(count):
            words = (f"w{drawn.randrange(3, WORDS)}" for _ in range(drawn.randrange(10, most)))
            file.write(json.dumps({"text": " ".join(words)}) + "\n")
    (work / "plan.yaml").write_text(PLAN)
    surgeon.apply(work / "plan.yaml", str(work / "base"), work / "out")
    (work / "train.yaml").write_text(CONFIG)


def segments(q: Any, k: Any, v: Any, cu_q: Any, scale: float | None, causal: bool, window: tuple[int, int]) -> Any:
    """Attention of N H D queries within the segments `cu_q`, by torch's own, one after the other."""
    import torch
    from torch.nn import functional as F

    found = []
    for begin, end in zip(cu_q[:-1].tolist(), cu_q[1:].tolist(), strict=True):
        q1, k1, v1 = (each[begin:end].transpose(0, 1)[None] for each in (q, k, v))
        seen = torch.ones(end - begin, end - begin, dtype=torch.bool, device=q.device)
        seen = seen.tril() if causal else seen
        if window[0] >= 0:
            seen = seen.triu(-window[0])
        made = F.scaled_dot_product_attention(q1, k1, v1, attn_mask=seen, scale=scale, enable_gqa=True)
        found.append(made[0].transpose(0, 1))
    return torch.cat(found)


def torchs_kernel(q: Any, k: Any, v: Any, cu_q: Any, longest: int, scale: float | None, left: int) -> Any:
    """torch's CUDA kernel for causal attention over segments; its arguments differ between versions."""
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {}
    if "window_size" in known:
        options["window_size"] = (left, 0)
    elif left >= 0:
        raise ValueError("this torch's varlen_attn has no sliding window")
    else:
        options["is_causal"] = True
    if "scale" in known:
        options["scale"] = scale
    elif scale is not None and abs(scale - q.shape[-1] ** -0.5) > 1e-9:
        q = q * (scale * q.shape[-1] ** 0.5)
    if "enable_gqa" in known:
        options["enable_gqa"] = True
    else:
        k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], dim=1) for each in (k, v))
    return varlen_attn(q, k, v, cu_q, cu_q, longest, longest, **options)


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Any:
    """In the place of flash_attn's function of this name: N H D in, N H D out."""
    assert not dropout_p
    assert causal
    if q.device.type == "cpu":
        return segments(q, k, v, cu_seqlens_q, softmax_scale, causal, window_size)
    cu = cu_seqlens_q.to(q.device, dtype=cu_seqlens_q.dtype)
    return torchs_kernel(q, k, v, cu, int(max_seqlen_q), softmax_scale, window_size[0])


def flash_attn_func(q: Any, k: Any, v: Any, **options: Any) -> Any:
    """In the place of flash_attn's function of this name: B T H D in and out, rows of equal length."""
    import torch

    rows, length = q.shape[:2]
    cu = torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=q.device)
    flat = (each.flatten(0, 1) for each in (q, k, v))
    return flash_attn_varlen_func(*flat, cu, cu, length, length, **options).view(q.shape)


def register() -> None:
    """Have transformers take the stand-in for a flash attention: its own code, other kernels."""
    import transformers.modeling_flash_attention_utils as flash
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.flash_attention import flash_attention_forward
    from transformers.masking_utils import flash_attention_mask

    AttentionInterface.register(STAND_IN, flash_attention_forward)
    AttentionMaskInterface.register(STAND_IN, flash_attention_mask)
    plain = flash._lazy_imports

    def imports(implementation: str | None, *given: Any, **named: Any) -> Any:
        if implementation != STAND_IN:
            return plain(implementation, *given, **named)
        return flash_attn_func, flash_attn_varlen_func, None, flash._pad_input, flash._unpad_input

    flash._lazy_imports = imports


def loaded(work: Path, name: str, dtype: str, device: str) -> Any:
    """The output as training loads it."""
    import surgeon
    from surgeon.training.steps.packed import builds_no_mask, run_in_one_row

    model = surgeon.open_checkpoint(work / "out").load(dtype=dtype, attention=name).to(device).train()
    model.config.use_cache = False
    if builds_no_mask(model):
        run_in_one_row(model)
    return model


def compared(work: Path, name: str, dtype: str, device: str, small: bool) -> dict[str, float]:
    """Losses of documents alone and packed, and the gradients' distance from those of the first call."""
    import torch

    from surgeon.data.packing import IGNORED_LABEL, Packer, batch_of

    length = TOKENS[small] // 2
    drawn = torch.Generator().manual_seed(7)
    packer, sequences, documents = Packer(length, "isolated", 1), [], []
    while len(sequences) < 2:
        count = int(torch.randint(max(2, length // 6), (1,), generator=drawn)) + 2
        ids = torch.randint(3, WORDS, (count,), generator=drawn).tolist()
        # As the packer cuts them: what is left of a document is left out here.
        documents.append(ids[: packer.room])
        packer.add((ids, [True] * count), 0)
        if not packer.room:
            sequences.append(packer.take())
    model = loaded(work, name, dtype, device)
    batch = {key: value.to(device) for key, value in batch_of(sequences).items()}
    # Without the adapters' own losses, which are means over sequences' tokens.
    domains = batch.pop("domain_ids")
    packed = model(**batch, domain_ids=domains)
    counted = int((batch["labels"] != IGNORED_LABEL).sum())
    total = 0.0
    with torch.no_grad():
        for ids in documents:
            one = torch.tensor([ids], device=device)
            places = torch.arange(len(ids), device=device)[None]
            if len(ids) > 1:
                made = model(input_ids=one, labels=one, position_ids=places, domain_ids=domains[:1])
                total += float(made.loss) * (len(ids) - 1)
    packed.loss.backward()
    chosen = [
        n for n, _ in model.named_parameters() if "layers." in n and n.endswith(("q_proj.weight", "v_proj.weight"))
    ]
    gradients = {n: model.get_parameter(n).grad.float().cpu() for n in chosen}
    reference = work / "gradients.pt"
    if not reference.exists():
        torch.save(gradients, reference)
    expected = torch.load(reference)
    apart = sum(float((gradients[n] - expected[n]).square().sum()) for n in chosen)
    size = sum(float(expected[n].square().sum()) for n in chosen)
    return {"packed": float(packed.loss.detach()), "alone": total / counted, "gradient": (apart / size) ** 0.5}


def trained(work: Path, name: str, device: str, small: bool, steps: int) -> dict[str, Any]:
    """A run of `surgeon train`: what it says of packing, tokens a second, memory; or why it was refused."""
    import surgeon
    from surgeon.common.listener import Quiet
    from surgeon.errors import BadInput
    from surgeon.training.steps import packed

    if name == BROKEN:
        packed.run_in_one_row = lambda _model: None
    lines: list[str] = []
    ends: list[float] = []

    class Watch(Quiet):
        doing = ""

        def say(self, line: str) -> None:
            lines.append(line)

        def begin(self, what: str, *_: Any) -> None:
            self.doing = what

        def advance(self, _done: int) -> None:
            if self.doing == "training":
                ends.append(time.perf_counter())

    implementation = STAND_IN if name == BROKEN else name
    length = TOKENS[small] // 2
    asked = [f"attention={implementation}", f"length={length}", f"steps={steps}"]
    to = work / f"run-{len(list(work.iterdir()))}"
    try:
        run = surgeon.train(work / "out", work / "train.yaml", to, overrides=asked, device=device, listener=Watch())
    except BadInput as error:
        return {"said": str(error).partition("train.yaml:")[2].partition(": ")[2], "refused": True}
    assert run is not None
    shutil.rmtree(to)
    # The first call says how many steps were done before.
    timed = ends[1 + WARM :]
    seconds = (timed[-1] - timed[0]) / (len(timed) - 1)
    said = next(line for line in lines if line.startswith("packing: "))
    return {
        "said": said,
        "refused": False,
        "tokens": 8 * length / seconds,
        "memory": run.peak_memory,
        "loss": [entry["loss"] for entry in run.log if "loss" in entry][-1],
    }


def inner(work: Path, name: str, device: str, small: bool, steps: int) -> dict[str, Any]:
    """All figures of one implementation, or what it failed with."""
    register()
    if name == "reference":
        return {"compared": compared(work, "eager", "float32", device, small)}
    found: dict[str, Any] = {}
    if name != BROKEN:
        found["compared"] = compared(work, name, "bfloat16", device, small)
    return found | trained(work, name, device, small, steps)


def page(rows: dict[str, dict[str, Any]], arguments: argparse.Namespace) -> str:
    """The results as markdown."""
    import torch
    import transformers

    shape = ", ".join(f"{value} {key}" for key, value in SIZES[arguments.small].items())
    lines = [
        "# Packed documents under each attention implementation",
        "",
        f"`python benchmarks/packed_isolation.py --steps {arguments.steps}{' --small' if arguments.small else ''}`:"
        f" {machine(arguments.device)}, torch {torch.__version__}, transformers {transformers.__version__}.",
        f"Random Llama ({shape}), one layer inserted and two layers' adapters, bfloat16, all of it trained;"
        f" micro-batches of 8 × {TOKENS[arguments.small] // 2:,} tokens.",
        "",
        f"`{STAND_IN}`: transformers' own flash attention, with torch's"
        + (" CUDA kernel for segments in" if arguments.device == "cuda" else " attention, a segment at a time, in")
        + " the place of flash_attn's functions.",
        "",
        "| attention | training | loss packed | alone | gradients, ‖Δ‖ / ‖g‖ to float32 | tokens/s | peak memory, GB |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for name, row in rows.items():
        near = row.get("compared")
        cells = ["", "", ""] if near is None else [f"{near[key]:.5f}" for key in ("packed", "alone", "gradient")]
        if "failed" in row:
            lines.append(f"| `{name}` | failed | {' | '.join(cells)} | | |")
            continue
        speed = f"{row['tokens']:,.0f} | {row['memory'] / 1e9:.2f}" if "tokens" in row else " | "
        how = "reference" if name == "reference" else "refused" if row["refused"] else "isolated"
        lines.append(f"| `{name}` | {how} | {' | '.join(cells)} | {speed} |")
    lines += ["", "What the run says:", ""]
    lines += [f"- `{name}`: {row.get('failed') or row['said']}" for name, row in rows.items() if name != "reference"]
    return "\n".join(lines) + "\n"


def first_layer(model: Any, ids: Sequence[int], tolerance: float) -> str:
    """The first layer whose output other documents change by more than rounding, in the probe's own two runs."""
    import torch

    from surgeon.training.isolation import _Documents, _states

    packed, outputs = _Documents(24, 2, "isolated", torch.tensor(ids)), []
    layers = [module for module in model.modules() if type(module).__name__ in set(model._no_split_modules or ())]

    def keep(_layer: Any, _given: Any, made: Any) -> None:
        states = made[0] if isinstance(made, tuple | list) else made
        outputs.append(states.detach().reshape(*packed.document.shape, -1))

    handles = [layer.register_forward_hook(keep) for layer in layers]
    for variant in (0, 1):
        _states(model, packed.batch(variant), training=True)
    for handle in handles:
        handle.remove()
    for number, pair in enumerate(zip(outputs[: len(layers)], outputs[len(layers) :], strict=True)):
        if packed.change(*pair, packed.kept) > tolerance:
            types = getattr(model.config.get_text_config(), "layer_types", None) or ()
            kind = f", {types[number]}" if len(types) == len(layers) else ""
            return f"layer {number} ({type(layers[number]).__name__}{kind})"
    return "no layer"


def decoders() -> str:
    """What the probe finds of a tiny model of every decoder, as markdown."""
    import torch
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from surgeon.training.isolation import probe
    from surgeon.training.steps.packed import builds_no_mask, give_masks_positions, run_in_one_row
    from tests.decoders import tiny_config

    rows, no_model = [], []
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            config = transformers.CONFIG_MAPPING[name].from_dict(tiny_config(name))
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(config)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.1)
            model.config.use_cache = False
            ids = range(10, model.config.get_text_config().vocab_size)
            found = []
            for ours in (False, True):
                if ours:
                    (run_in_one_row if builds_no_mask(model) else give_masks_positions)(model)
                found.append(probe(model, length=24, micro_batch=2, packing="isolated", ids=ids))
        except Exception as error:  # what does not run here is listed
            no_model.append(
                f"{name} ({str(error).strip().splitlines()[0][:60] if str(error) else type(error).__name__})"
            )
            continue
        plain, now = found
        verdict = "isolates" if now.isolates else f"leaks, first in {first_layer(model, ids, now.tolerance)}"
        rows.append(
            f"| {name} | {plain.change:.2g} | {now.change:.2g} | {now.leaking:.2g} | {now.alone:.2g} | {verdict} |"
        )
        print(rows[-1], file=sys.stderr, flush=True)
    kept = sum("isolates |" in row for row in rows)
    head = [
        "# Packed documents in every decoder",
        "",
        f"`python benchmarks/packed_isolation.py --decoders`: tiny random models, float32, torch {torch.__version__},"
        f" transformers {transformers.__version__}. {kept} of {len(rows)} isolate. Relative change of a document's"
        " states where only its neighbours change: as transformers runs it, as training does, and where nothing is"
        " isolated; and how far packed is from alone.",
        "",
        "| model type | transformers | training | not isolated | alone | |",
        "|---|---:|---:|---:|---:|---|",
    ]
    return "\n".join([*head, *rows, "", f"Not run: {'; '.join(no_model)}."]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, help="the page of results")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--small", action="store_true", help="a tiny shape, to try the script")
    parser.add_argument("--decoders", action="store_true", help="the probe on a tiny model of every decoder")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--inner", nargs=4)
    arguments = parser.parse_args()
    if arguments.inner:
        work, name, device, rest = arguments.inner
        small, steps = json.loads(rest)
        print(json.dumps(inner(Path(work), name, device, small, steps)))
        return
    if arguments.decoders:
        found = decoders()
        if arguments.to:
            arguments.to.write_text(found)
        print(found)
        return
    import torch

    arguments.device = "cuda" if torch.cuda.is_available() else "cpu"
    names = ["eager", "sdpa"]
    if arguments.device == "cuda":
        names.append("flex_attention")
        names += ["flash_attention_2"] if importlib.util.find_spec("flash_attn") else []
    names = arguments.only or [*names, STAND_IN, BROKEN]
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        if not (work / "train.yaml").exists():
            make(work, arguments.small)
        rows: dict[str, dict[str, Any]] = {}
        for name in ["reference", *names]:
            rest = json.dumps([arguments.small, arguments.steps])
            try:
                rows[name] = in_a_process(__file__, work, name, arguments.device, rest)
            except SystemExit as error:
                print(error, file=sys.stderr)
                rows[name] = {"failed": str(error).strip().splitlines()[-1][:300]}
            print(name, json.dumps(rows[name]), file=sys.stderr, flush=True)
            if arguments.to:
                arguments.to.write_text(page(rows, arguments))
    print(page(rows, arguments))


if __name__ == "__main__":
    main()
