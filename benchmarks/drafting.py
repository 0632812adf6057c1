"""What a surgery and training cost in drafts, and what `what: mtp` gives back: tokens a forward, speculatively decoded.

`python -m benchmarks.drafting --base DIR --corpora DIR --work DIR [--steps N] [--most N] [--to PAGE.md]` gives a small
Llama one MTP layer: its weights become a `glm4_moe` whose layers are all dense (the same function, checked), and the
layer above them, a copy of the top one with projections drawn at random, learns by `what: mtp` on English. Then layers
are inserted and train on French, and the MTP layer learns again, on both languages. After each step
`surgeon evaluate --mtp` has the model write on from held-out documents in both languages, in float32. Finished steps in
WORK are taken as they are.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from benchmarks.measuring import machine

ROUTED, LENGTH, BATCH = 2, 64, 4
PATTERNS = {"english": "en_*.{}.jsonl", "french": "fr_*.{}.jsonl"}
GROWTH = {
    "surgeon": 1,
    "operations": [{"op": "insert_layers", "where": {"every": 4}, "count": 2, "init": {"kind": "copy"}}],
}


def with_mtp(base: Path, to: Path) -> Path:
    """A Llama as a dense `glm4_moe` with one MTP layer that has yet to learn; raises SystemExit for other logits."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM, Glm4MoeConfig

    told = json.loads((base / "config.json").read_text())
    assert told["model_type"] == "llama", "the benchmark's base is a Llama"
    layers, hidden, inner = (told[key] for key in ("num_hidden_layers", "hidden_size", "intermediate_size"))
    same = ("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings")
    same += ("rms_norm_eps", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")
    config = Glm4MoeConfig(
        **{key: told[key] for key in same},
        hidden_size=hidden,
        intermediate_size=inner,
        moe_intermediate_size=inner,
        num_hidden_layers=layers,
        first_k_dense_replace=layers,
        n_routed_experts=ROUTED,
        num_experts_per_tok=1,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        num_nextn_predict_layers=1,
        partial_rotary_factor=1.0,
        rope_parameters={**told["rope_parameters"], "partial_rotary_factor": 1.0},
    )
    tensors = {name: value for file in base.glob("*.safetensors") for name, value in load_file(file).items()}
    drawn, dtype = torch.Generator().manual_seed(0), tensors["model.norm.weight"].dtype

    def random(*shape: int) -> Any:
        return (torch.randn(shape, generator=drawn) * 0.02).to(dtype)

    top, mtp = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    for name in [name for name in tensors if name.startswith(top)]:
        suffix = name.removeprefix(top)
        tensors[mtp + suffix.replace("mlp.", "mlp.shared_experts.")] = tensors[name].clone()
    for expert in range(ROUTED):
        begin = f"{mtp}mlp.experts.{expert}."
        tensors |= {f"{begin}{name}_proj.weight": random(inner, hidden) for name in ("gate", "up")}
        tensors[f"{begin}down_proj.weight"] = torch.zeros(hidden, inner, dtype=dtype)
    tensors[f"{mtp}mlp.gate.weight"] = random(ROUTED, hidden)
    tensors[f"{mtp}mlp.gate.e_score_correction_bias"] = torch.zeros(ROUTED)
    tensors |= {f"{mtp}{name}.weight": torch.ones(hidden, dtype=dtype) for name in ("enorm", "hnorm")}
    tensors[f"{mtp}shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    tensors[f"{mtp}eh_proj.weight"] = random(hidden, 2 * hidden)
    to.mkdir()
    for file in base.glob("token*"):
        shutil.copy(file, to / file.name)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    (to / "config.json").write_text(
        json.dumps(config.to_dict() | {"architectures": ["Glm4MoeForCausalLM"], "dtype": "bfloat16"})
    )
    ids = torch.randint(told["vocab_size"], (2, 64), generator=drawn)
    with torch.no_grad():
        before, after = (AutoModelForCausalLM.from_pretrained(each).float()(ids).logits for each in (base, to))
    if not torch.equal(before, after):
        raise SystemExit(f"as a glm4_moe the base has other logits, by {float((before - after).abs().max()):.2g}")
    return to


def trained(out: Path, to: Path, work: Path, sources: list[dict[str, Any]], steps: int, **more: Any) -> Path:
    """`surgeon train`, unless it was done already."""
    import surgeon

    if not to.exists():
        config = work / f"{to.name}.yaml"
        told = {"surgeon_train": 1, "steps": steps, "batch": BATCH, "length": LENGTH, "sources": sources}
        told |= {"dtype": "float32", "evaluate_every": steps, "save_every": 100, **more}
        config.write_text(json.dumps(told), encoding="utf-8")
        with surgeon.ProgressListener() as listener:
            surgeon.train(out, config, to, device="cpu", listener=listener)
    return to


def joined(corpora: Path, work: Path, part: str) -> dict[str, Path]:
    """One file for each language, of all that there are; validation in turns of the files' documents."""
    made = {}
    for language, pattern in PATTERNS.items():
        made[language] = work / f"{language}.{part}.jsonl"
        files = [path.read_text(encoding="utf-8").splitlines() for path in sorted(corpora.glob(pattern.format(part)))]
        rows = [lines[n] for n in range(max(map(len, files))) for lines in files if n < len(lines)]
        made[language].write_text("\n".join(rows) + "\n", encoding="utf-8")
    return made


def models(asked: argparse.Namespace) -> dict[str, Path]:
    """The models after each step, by what was done."""
    import surgeon

    work, steps = asked.work, asked.steps
    texts = joined(asked.corpora, work, "train")
    english = {"name": "english", "path": str(texts["english"]), "role": "original", "validation": 0.001}
    french = {"name": "french", "path": str(texts["french"]), "validation": 0.001}
    new = work / "new"
    if not new.exists():
        with_mtp(asked.base, new)
    rate = {"optimizer": {"lr": 2e-3, "warmup": 10}}
    base = trained(new, work / "base", work, [english | {"share": 1.0}], 3 * steps, what="mtp", **rate)
    grown = work / "grown"
    if not grown.exists():
        surgeon.apply(surgeon.parse_plan(json.dumps(GROWTH), source="growth"), str(base), grown)
    mixed = [french | {"share": 0.9}, english | {"share": 0.1}]
    learned = trained(grown, work / "learned", work, mixed, steps, **rate)
    half = [french | {"share": 0.5}, english | {"share": 0.5}]
    refitted = trained(learned, work / "refitted", work, half, steps, what="mtp", **rate)
    return {
        "the base, its MTP layer trained on English": base,
        "two layers inserted": grown,
        "these trained on French": learned,
        "`what: mtp` on both languages": refitted,
    }


def main() -> None:
    """Make the models, measure them, and write the page."""
    import surgeon

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("base", "corpora", "work"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--most", type=int, default=50, help="documents of each language")
    parser.add_argument("--to", type=Path, default=Path(__file__).parent / "results" / "drafting.md")
    asked = parser.parse_args()
    asked.work.mkdir(parents=True, exist_ok=True)
    made = models(asked)
    held = joined(asked.corpora, asked.work, "val")
    found = surgeon.evaluate(list(made.values()), held, mtp=True, length=256, most=asked.most, dtype="float32")
    lines = [
        f"# Drafts of an MTP layer through a surgery, {asked.base.name}",
        "",
        f"One MTP layer drafts one token; {asked.steps} steps of {BATCH} × {LENGTH} tokens each ({3 * asked.steps} for",
        "the first). Greedy speculative decoding by transformers (`generate(use_mtp=True)`), 64 tokens after the first",
        f"32 of {asked.most} held-out documents, in float32; [ ] 95 % confidence over documents.",
        "",
        f"{machine()}.",
        "",
        "| model | text | loss | tokens a forward | documents with the tokens written without drafts |",
        "|---|---|---|---|---|",
    ]
    for name, row in zip(made, found.models, strict=True):
        for cell in row.sources:
            drafts = row.drafts[cell.source]
            low, high = drafts.tokens_a_forward.interval or (float("nan"),) * 2
            rate = f"{drafts.tokens_a_forward.value:.3f} [{low:.3f}, {high:.3f}]"
            lines.append(
                f"| {name} | {cell.source} | {cell.loss.value:.3f} | {rate} | {drafts.same} of {drafts.documents} |"
            )
    lines += [
        "",
        "Where intervals overlap, so few documents show no difference; held-out KL(model ‖ draft) of the runs:",
        "",
    ]
    for name in ("base", "refitted"):
        told = json.loads((asked.work / name / "surgery.json").read_text())["training"][-1]["losses"]
        shown = ", ".join(f"{source} {before:.3f} → {after:.3f}" for source, (before, after) in told.items())
        lines.append(f"- {name}: {shown}")
    asked.to.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
