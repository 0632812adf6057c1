"""What surgeries write, digest by digest: the oracle of a rebuilding that must not change a byte.

    python -m tests.oracle --write BEFORE.jsonl      in the tree before a change
    python -m tests.oracle --check BEFORE.jsonl      in the tree after it, on the same machine

Cases: every shipped plan on its tiny base; a plan of each structure on every described family, on other types
(mixtures, hybrids, transposed and fused projections, image-text wrappers), on quantised bases and on encoders; two
surgeries, their reverts and their deltas. Of each output the digests of every tensor, of config.json and of
surgery.json are compared, without those of runtime files. Exit code 1 where something differs, with the first
differences. With `--plans FOLDER`, the plans/ of the tree before, a plan of the same meaning counts as written the
same: what was a plan of its own may be a point of a sweep since. `--only PATTERN` tries the cases whose names match.

What was changed on purpose is put back before digests are taken (`_config_before`, `_as_on_disk`), nothing else: the
classes of the types that once had code of their own are composed as all others are, and silent tensors are named as
modules run. Refusals that are none any more, or read otherwise, stand in `_SERVED` and `_SAID`.
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
    "heads": [_INSERT | {"init": {"kind": "ot_fusion", "heads": "blocks"}}],
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
# Points of sweeps by what the plans were called that they replaced, and points that no plan was.
CALLED = {
    **{f"mixture-of-control/alpha-0.{n}": f"mixture-of-control/alpha-{n}0" for n in (5, 6, 7, 8, 9)},
    "mixture-of-control/alpha-0.99": "mixture-of-control/alpha-99",
    "mixture-of-control/balance-0": "mixture-of-control/balance-00",
    "mixture-of-control/balance-0.005": "mixture-of-control/balance-05",
    "mixture-of-control/balance-0.015": "mixture-of-control/balance-15",
    "mixture-of-control/balance-0.02": "mixture-of-control/balance-20",
    "mixture-of-control/balance-0.025": "mixture-of-control/balance-25",
    "mixture-of-control/balance-0.03": "mixture-of-control/balance-30",
    **{f"neutral-residues/{of}-0.05": f"neutral-residues/{of}-5" for of in ("extra", "adapters-extra")},
    **{f"neutral-residues/{of}-0.1": f"neutral-residues/{of}-10" for of in ("extra", "adapters-extra")},
    **{f"neutral-residues/{of}-0.5": f"neutral-residues/{of}-50" for of in ("extra", "adapters-extra")},
}
_NEW = (
    "mixture-of-control/alpha-0.95",
    "mixture-of-control/balance-0.01",
    "mixture-of-control/top-1",
    "neutral-residues/extra-0.2",
    "neutral-residues/adapters-extra-0.2",
    "neutral-residues/l1-0.01",
)
# The variable with the folder of the plans as they were.
_PLANS = "SURGEON_ORACLE_PLANS"
# The types that had code of their own: heads that this lacked, and the one class that had another name.
_DESCRIBED = frozenset((*tiny.FAMILIES, *tiny.ENCODERS))
_MORE_HEADS = ("AutoModelForTokenClassification", "AutoModelForQuestionAnswering")
_CLASS, _CLASS_BEFORE = "UpcycledGemma3ForCausalLM", "UpcycledGemma3TextForCausalLM"
# What is silent in new layers, which for all other types was named in the order of the tensors on disk.
_SILENT = re.compile(r"(?<=residual stream: )[\w.*]+(, [\w.*]+)+(?= (are zero|have effective scale zero))")
# Refusals that are none any more, or are for another reason: cases, and what was said.
_SERVED = (
    (r"^decoder \| ", "is known of the model types that surgeon describes alone"),
    (r"^decoder \| .* heads$", "keeps rotary pairs, and how a"),
    # Kinds that differ in a setting alone, as sliding and full attention.
    (r"\| gpt_oss", "are of different kinds, so there is nothing between them"),
    (r"^twice \| .*(ffn|attention|hidden)/", "widened in more than one way since"),
    # FFNs without a gate are aligned.
    (r"^decoder \| starcoder2 \| (all|fused|heads)$", "nobody has described how to align mlp.c_fc"),
    # The grafts that the base carries are looked at first.
    (r"^twice \| gemma3_text \| .*/hidden$", "by √hidden_size, so"),
)
# Other words for the same reason: what was said, and what is.
_SAID = (
    ("by √hidden_size, so", "by a number that depends on `hidden_size`, as a twin shows, so"),
    ("(self_attn.q_norm.weight): queries and keys", "(self_attn.k_norm.weight): queries and keys"),
)
# What a twin shows was said without the plan's line.
_PLACE = re.compile(r"^/[12]\.yaml:1: operations\[0\] \(\w+\): ")
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

    found: list[Case] = [("shipped", "", name) for name in shipped.names()]
    found += [("shipped", "", CALLED.get(name, name)) for name in shipped.points() if name not in _NEW]
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


def digests_of(out: Path, plan: str = "") -> Digests:
    """The digests of a checkpoint: of every tensor, config.json and surgery.json, runtime files aside.

    `plan` is the shipped plan's name, whose text before stands for its text now.
    """
    from surgeon.checkpoint.header import read_header

    tensors: dict[str, str] = {}
    for shard in sorted(out.glob("*.safetensors")):
        with shard.open("rb") as file:
            for info in read_header(file.fileno(), file=shard.name).tensors:
                file.seek(info.begin)
                value = hashlib.sha256(file.read(info.nbytes)).hexdigest()[:16]
                tensors[info.name] = f"{info.dtype} {list(info.shape)} {value}"
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    found: Digests = {"tensors": tensors, "config": _digest(_config_before(config))}
    manifest = out / "surgery.json"
    if manifest.exists():
        held = json.loads(manifest.read_text(encoding="utf-8"))
        # The base's own config is that of the surgery before.
        configs = {_written(each): _written(_config_before(each)) for each in (config, held["base"]["config"])}
        recorded = _plain(held, configs, held["base"]["config"], plan)
        found["surgery"] = {key: _digest(value) for key, value in recorded.items()}
    return found


def _config_before(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json of a described type with grafts, as it was when its classes were no composition."""
    if "anatomy" not in config or not _was_described(config):
        return config
    autos = config["auto_map"].items()
    changed = {
        "architectures": [name.replace(_CLASS, _CLASS_BEFORE) for name in config["architectures"]],
        "auto_map": {auto: name.replace(_CLASS, _CLASS_BEFORE) for auto, name in autos if auto not in _MORE_HEADS},
    }
    return {key: changed.get(key, value) for key, value in config.items() if key != "anatomy"}


def _was_described(config: dict[str, Any]) -> bool:
    """Whether surgeon had code of its own for a base or output of this config: for quantised ones it never had."""
    return "quantization_config" not in config and config["model_type"].removeprefix("upcycled_") in _DESCRIBED


def _written(config: dict[str, Any]) -> str:
    """The digest of a config.json as a file."""
    return hashlib.sha256((json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()).hexdigest()


def _as_on_disk(reason: str, base: dict[str, Any]) -> str:
    """A reason with silent tensors in the order in which a `base` of this config stores its own."""

    def place(name: str) -> tuple[bool, str]:
        # gpt-oss's stand in two shards; in MXFP4 its experts' matrices are stored as blocks.
        packed = "quantization_config" in base and name.endswith(".experts.down_proj")
        return base["model_type"] == "gpt_oss" and name.startswith("mlp."), f"{name}_blocks" if packed else name

    return _SILENT.sub(lambda names: ", ".join(sorted(names[0].split(", "), key=place)), reason)


def _plain(manifest: Any, configs: dict[str, str], base: dict[str, Any], plan: str = "") -> Any:
    """A manifest without the digests of code, and without the seals, which are over them.

    `configs` are the digests of config.json files, by what they are now, as they were before; `base` is the base's.
    """
    if isinstance(manifest, list):
        return [_plain(entry, configs, base) for entry in manifest]
    if not isinstance(manifest, dict):
        return manifest
    sealed = "surgeon_manifest" in manifest
    found: dict[str, Any] = {}
    for key, value in manifest.items():
        if key.endswith(".py") or (sealed and key == "sha256"):
            continue
        match key, value:
            case "plan", str():
                found[key] = _as_before(value, plan)
            case "reason", str() if not _was_described(base):
                found[key] = _as_on_disk(value, base)
            case "config.json", str():
                found[key] = configs.get(value, value)
            case "config", dict():
                found[key] = _config_before(value)
            case _:
                found[key] = _plain(value, configs, base)
    return found


def _as_before(text: str, plan: str) -> str:
    """The text of a plan as a file of the same meaning had it before, that of its own name first; else as it is."""
    from surgeon.errors import BadInput
    from surgeon.plan.plan import load_plan, parse_plan

    folder = os.environ.get(_PLANS)
    files = (
        []
        if folder is None
        else [
            file for file in Path(folder).rglob("*.yaml") if "studies" not in file.parts and "papers" not in file.parts
        ]
    )
    if not plan and any(file.read_text(encoding="utf-8") == text for file in files):
        return text
    try:
        data = parse_plan(text).data()
    except BadInput:
        return text
    same = {str(file.relative_to(folder or "")): file for file in sorted(files) if load_plan(file).data() == data}
    found = same.get(f"{plan}.yaml") or next(iter(same.values()), None)
    return text if found is None else found.read_text(encoding="utf-8")


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(re.sub(r"\(?\d+\.\d+ s\)?", "", text).encode()).hexdigest()[:16]


def _stages(case: Case, folder: Path) -> Iterator[tuple[str, Callable[[], Path]]]:
    """The outputs of a case, each made when asked for."""
    import surgeon

    kind, base, plan = case
    if kind == "shipped":
        made = tiny.base_for(plan, folder)
        now = next((name for name, was in CALLED.items() if was == plan), plan)
        yield "out", lambda: _made(surgeon.apply(now, str(made), folder / "out"), folder / "out")
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
                found[name] = digests_of(make(), case[2] if (case[0], name) == ("shipped", "out") else "")
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


def _is_known(case: str, old: dict[str, Any] | None, new: dict[str, Any], first: dict[str, Any]) -> bool:
    """Whether a stage was refused before, alone or by its `first` stage, and is not any more, or in other words."""
    said = (old or first).get("refused")
    if said is None:
        return False
    if any(re.search(cases, case) and words in said for cases, words in _SERVED):
        return True
    for before, now in _SAID:
        said = said.replace(before, now)
    return bool(old) and _PLACE.sub("", said) == _PLACE.sub("", new.get("refused", ""))


def main() -> int:
    """Write the record of this tree, or compare it with that of another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--write", type=Path)
    asked.add_argument("--check", type=Path)
    parser.add_argument("--plans", type=Path, help="plans/ of the tree before")
    parser.add_argument("--only", default="", help="cases whose names this pattern finds")
    args = parser.parse_args()
    if args.plans is not None:
        os.environ[_PLANS] = str(args.plans)
    if args.write:
        with args.write.open("w", encoding="utf-8") as file:
            for name, found in recorded(args.only):
                file.write(json.dumps([name, found]) + "\n")
        return 0
    every = (json.loads(line) for line in args.check.read_text(encoding="utf-8").splitlines())
    before = {name: found for name, found in every if re.search(args.only, name)}
    after = dict(recorded(args.only))
    known = 0
    for case, stages in after.items():
        was = before.get(case, {})
        for stage in [name for name in stages if _is_known(case, was.get(name), stages[name], was.get("out", {}))]:
            known += was.pop(stage, None) != stages.pop(stage)
    found = list(differences(before, after))
    count = sum(len(stages) for stages in after.values())
    print(
        f"{len(after)} cases, {count} outputs as before, {known} refused otherwise or no more, {len(found)} differences"
    )
    print(*found[:50], sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
