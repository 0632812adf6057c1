"""What surgeries write, digest by digest: the oracle of a rebuilding that must not change a byte.

    python -m tests.oracle --write BEFORE.jsonl      in the tree before a change
    python -m tests.oracle --check BEFORE.jsonl      in the tree after it, on the same machine

Cases: every shipped plan on its tiny base; a plan of each structure on every described family, on other types
(mixtures, hybrids, transposed and fused projections, image-text wrappers), on quantised bases and on encoders; two
surgeries, their reverts and their deltas. Of each output the digests of every tensor, of config.json and of
surgery.json are compared, without those of runtime files, and every refusal word by word. Exit code 1 where something
differs, with the differences. `--only PATTERN` tries the cases whose names match; with `--tensors` surgery.json and the
words of refusals may differ, as where a change is of these. A tree whose `tests/oracle.py` is older takes this file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests import tiny

Case = tuple[str, str, str]
Digests = dict[str, Any]

_INSERT = {"op": "insert_layers", "where": {"after": [1]}}
STRUCTURES: dict[str, list[dict[str, Any]]] = {
    "copy": [_INSERT | {"init": {"kind": "copy"}}],
    "average": [_INSERT | {"init": {"kind": "average"}}],
    "random": [_INSERT | {"init": {"kind": "random"}}],
    "fused": [_INSERT | {"init": {"kind": "ot_fusion"}}],
    "stacked": [{"op": "stack_layers", "bottom": 0.75, "top": 0.75}],
    "branch": [{"op": "control_llm", "layers": [1]}],
    "stacked branch": [{"op": "control_llm", "layers": [1], "expansion": "stack"}],
    "adapters": [{"op": "gated_adapters", "size": 8}],
    "slots": [{"op": "pmoe_experts", "threshold": 1, "slots": 2}],
    "states": [{"op": "mixture_of_control", "rank": 4}],
    "ffn": [{"op": "widen_ffn", "to": 96}],
    "copied ffn": [{"op": "widen_ffn", "by": 16, "init": "copy"}],
    "attention": [{"op": "widen_attention", "groups": 2}],
    "hidden": [{"op": "widen_hidden", "times": 2}],
    "dropped": [{"op": "drop_layers", "layers": [1]}],
    "experts": [{"op": "upcycle_experts", "experts": 4}],
    "copied experts": [{"op": "upcycle_experts", "form": "copies", "experts": 4}],
    "all": [
        _INSERT | {"init": {"kind": "ot_fusion"}},
        {"op": "control_llm", "layers": [0], "interpolator": {"kind": "dlerp", "alpha": 0.3}},
        {"op": "gated_adapters", "size": 8},
        {"op": "pmoe_experts", "threshold": 1},
        {"op": "mixture_of_control", "rank": 4},
        {"op": "domain_gate"},
    ],
}
DECODERS = (
    "gpt2", "gpt_neox", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "glm4_moe", "qwen3_next", "granitemoehybrid",
    "gemma4_text", "llama4_text", "smollm3", "falcon", "opt", "starcoder2",
)  # fmt: skip
IMAGE_TEXT = ("gemma3", "llava", "qwen3_vl")
QUANTISED = (("qwen3", "fp8"), ("qwen3_moe", "fp8"), ("deepseek_v3", "fp8"), ("gpt_oss", "mxfp4"))
SECOND = ("copy", "branch", "adapters", "slots", "ffn", "attention", "hidden", "all")


def cases() -> list[Case]:
    """What is tried: (kind of case, base, plan)."""
    from surgeon.plan import shipped

    found: list[Case] = [("shipped", "", name) for name in shipped.shipped_plans()]
    found += [("family", family, plan) for family in tiny.FAMILIES for plan in STRUCTURES]
    found += [("decoder", kind, plan) for kind in DECODERS for plan in STRUCTURES]
    found += [("image", kind, plan) for kind in IMAGE_TEXT for plan in ("copy", "fused", "branch", "adapters", "slots")]
    found += [("quantised", "/".join(pair), p) for pair in QUANTISED for p in ("copy", "fused", "branch", "adapters")]
    found += [("encoder", kind, "states") for kind in tiny.ENCODERS]
    found += [("twice", family, f"{a}/{b}") for family in ("llama", "gemma3_text") for a in SECOND for b in SECOND]
    return found


def _plan(folder: Path, name: str, structure: str) -> str:
    path = folder / name
    path.write_text(json.dumps({"surgeon": 1, "seed": 3, "operations": STRUCTURES[structure]}), encoding="utf-8")
    return str(path)


def _base(kind: str, base: str, folder: Path) -> str:
    from tests.decoders import IMAGE_TEXT as AUTO
    from tests.decoders import tiny_decoder
    from tests.quantised import tiny_quantised

    match kind:
        case "decoder":
            return str(tiny_decoder(folder, base, dtype="bfloat16"))
        case "image":
            return str(tiny_decoder(folder, base, AUTO, dtype="bfloat16"))
        case "quantised":
            return str(tiny_quantised(folder, *base.split("/")))
        case _:
            return str(tiny.checkpoint(folder, base))


def digests_of(out: Path) -> Digests:
    """The digests of a checkpoint: of every tensor, config.json and surgery.json, runtime files aside."""
    from surgeon.checkpoint.header import read_header

    tensors: dict[str, str] = {}
    for shard in sorted(out.glob("*.safetensors")):
        with shard.open("rb") as file:
            for info in read_header(file.fileno(), file=shard.name).tensors:
                file.seek(info.begin)
                value = hashlib.sha256(file.read(info.nbytes)).hexdigest()[:16]
                tensors[info.name] = f"{info.dtype} {list(info.shape)} {value}"
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    found: Digests = {"tensors": tensors, "config": _digest(config)}
    manifest = out / "surgery.json"
    if manifest.exists():
        held = json.loads(manifest.read_text(encoding="utf-8"))
        found["surgery"] = {key: _digest(value) for key, value in _plain(held).items()}
    return found


def _plain(manifest: Any) -> Any:
    """A manifest without the digests of code, and without the seals, which are over them."""
    if isinstance(manifest, list):
        return [_plain(entry) for entry in manifest]
    if not isinstance(manifest, dict):
        return manifest
    left = ("sha256",) if "surgeon_manifest" in manifest else ()
    return {key: _plain(value) for key, value in manifest.items() if not key.endswith(".py") and key not in left}


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(re.sub(r"\(?\d+\.\d+ s\)?", "", text).encode()).hexdigest()[:16]


def _stages(case: Case, folder: Path) -> Iterator[tuple[str, Callable[[], Path]]]:
    """The outputs of a case, each made when asked for."""
    import surgeon

    kind, base, plan = case
    if kind == "shipped":
        made = tiny.base_for(plan, folder)
        yield "out", lambda: _made(surgeon.apply(plan, str(made), folder / "out"), folder / "out")
        yield "reverted", lambda: _made(surgeon.revert(folder / "out", folder / "back"), folder / "back")
        return
    start = _base(kind, base, folder / "base")
    first, _, second = plan.partition("/")
    yield "out", lambda: _made(surgeon.apply(_plan(folder, "1.yaml", first), start, folder / "out"), folder / "out")
    yield "reverted", lambda: _made(surgeon.revert(folder / "out", folder / "back"), folder / "back")
    if not second:
        return
    last = folder / "last"
    yield "second", lambda: _made(surgeon.apply(_plan(folder, "2.yaml", second), str(folder / "out"), last), last)
    yield "to first", lambda: _made(surgeon.revert(last, folder / "b1"), folder / "b1")
    yield "to base", lambda: _made(surgeon.revert(last, folder / "b0", to=0), folder / "b0")
    yield "delta", lambda: _made(surgeon.make_delta(last, folder / "delta"), folder / "delta")
    yield (
        "restored",
        lambda: _made(surgeon.apply_delta(folder / "delta", folder / "out", folder / "again"), folder / "again"),
    )


def _made(_result: object, out: Path) -> Path:
    return out


def record(case: Case) -> tuple[str, dict[str, Digests]]:
    """The digests of all outputs of a case, or why it has none."""
    import surgeon

    folder = Path(tempfile.mkdtemp(prefix="surgeon-oracle-"))
    found: dict[str, Digests] = {}
    try:
        for name, make in _stages(case, folder):
            try:
                found[name] = digests_of(make())
            except surgeon.SurgeonError as error:
                found[name] = {"refused": re.sub(r"\d+\.\d+ s", "", str(error).replace(str(folder), ""))}
                if name in ("out", "second"):
                    break
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return " | ".join(case), found


def recorded(only: str = "") -> Iterator[tuple[str, dict[str, Digests]]]:
    """Every case whose name matches, with its digests, by as many processes as there are cores."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("spawn")
    with context.Pool(os.cpu_count(), maxtasksperchild=60) as pool:
        yield from pool.imap(record, (case for case in cases() if re.search(only, " | ".join(case))), chunksize=2)


def differences(before: dict[str, Any], after: dict[str, Any], where: str = "") -> Iterator[str]:
    """Where two records differ."""
    for key in sorted({*before, *after}):
        old, new = before.get(key), after.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from differences(old, new, f"{where} {key}")
        elif old != new:
            yield f"{where} {key}: {old} → {new}"


def main() -> int:
    """Write the record of this tree, or compare it with that of another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--write", type=Path)
    asked.add_argument("--check", type=Path)
    parser.add_argument("--only", default="", help="cases whose names this pattern finds")
    parser.add_argument("--tensors", action="store_true", help="compare tensors, config.json and what is refused alone")
    args = parser.parse_args()
    if args.write:
        with args.write.open("w", encoding="utf-8") as file:
            for name, found in recorded(args.only):
                file.write(json.dumps([name, found]) + "\n")
        return 0
    every = (json.loads(line) for line in args.check.read_text(encoding="utf-8").splitlines())
    before = {name: found for name, found in every if re.search(args.only, name)}
    after = dict(recorded(args.only))
    if args.tensors:
        before, after = _without_words(before), _without_words(after)
    found = list(differences(before, after))
    count = sum(len(stages) for stages in after.values())
    print(f"{len(after)} cases, {count} outputs, {len(found)} differences")
    print(*found, sep="\n")
    return 1 if found else 0


def _without_words(recorded: dict[str, dict[str, Digests]]) -> dict[str, dict[str, Digests]]:
    """Records without what is said in words: surgery.json, and why something was refused."""
    return {
        case: {
            stage: {key: "" if key == "refused" else value for key, value in found.items() if key != "surgery"}
            for stage, found in stages.items()
        }
        for case, stages in recorded.items()
    }


if __name__ == "__main__":
    sys.exit(main())
