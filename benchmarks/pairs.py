"""Every ordered pair of operations, in one plan and in two: what the result promises, proven, or why it is refused.

    python -m benchmarks.pairs [--families llama gemma2] [--of OPERATION …] | --page

Each cell is a real surgery on a tiny checkpoint of the family, in bfloat16. What is allowed is verified (every byte,
logits of prefill and cached decode in bfloat16 and float32) and reverted (every byte). In one plan the outcome must be
what two plans make of the same base, tensor by tensor and in config.json, but for what is drawn at random; where the
first operation does not preserve the function, logits are compared with what the first one alone gives. In two plans
the first one's new tensors are changed in between, as training would. The outcomes are recorded in
surgeon/report/pairs.json, from which `surgeon families --after OP` answers and docs/reference/combining.md is written;
the exit code is 1 where a cell does not keep what it promises. `--of` tries the pairs of these operations alone and
leaves the other cells of the record as they are, `--page` writes the page from the record without trying anything.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import surgeon
from surgeon.apply.preview import open_headers, opened_for, preview_of
from surgeon.blueprint.blueprint import Blueprint
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.errors import BadInput
from surgeon.manifest.recipe_words import base_bytes_of
from surgeon.report.followers import RECORD, Answer, recorded_followers
from tests import adapters, tiny, vocabularies

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "combining.md"
BEGIN, END = "<!-- written by `python -m benchmarks.pairs` -->", "<!-- until here -->"
FAMILIES = ("llama", "gemma2")
DTYPES = ("bfloat16", "float32")
Entry = dict[str, Any]

# What stands in a plan beside `op`; of one that is not here, its class's first example.
ENTRIES: Mapping[str, Entry] = {
    "insert_layers": {"where": {"after": [1]}, "init": {"kind": "ot_fusion"}},
    "stack_layers": {"bottom": 0.75, "top": 0.75},
    "control_llm": {"layers": [0]},
    "gated_adapters": {"layers": [0], "size": 8},
    "pmoe_experts": {"rank": 2},
    "mixture_of_control": {"rank": 4},
    "domain_gate": {},
    "merge_branches": {},
    "grow_vocabulary": {"tokens": [" été", "lumière"]},
    "trim_vocabulary": {"tokens": ["the cat sat on the sea"], "pad_to_multiple_of": 4},
    "untie_embeddings": {},
    "extract_text": {},
    "dequantise": {},
    "upcycle_experts": {"experts": 4},
    "drop_layers": {"layers": [3]},
    "drop_experts": {"experts": [1]},
    "add_experts": {"times": 2},
    "fold_adapters": {},
    "widen_ffn": {"by": 16},
    "widen_attention": {"groups": 2},
    "widen_hidden": {"times": 2},
    "merge_adapter": {"from": "adapter"},
    "pad_to": {"multiple_of": 32},
}
# What the second of two equal operations has otherwise: other layers, or other words.
AGAIN: Mapping[str, Entry] = {
    "control_llm": {"layers": [1]},
    "drop_experts": {"experts": [0]},
    "drop_layers": {"layers": [1]},
    "gated_adapters": {"layers": [1]},
    "widen_attention": {"groups": 4},
    "pad_to": {"multiple_of": 96},
    "grow_vocabulary": {"tokens": [" déjà"]},
    "trim_vocabulary": {"tokens": ["the"], "pad_to_multiple_of": 4},
    "merge_adapter": {"from": {"adapter": "adapter", "weight": 0.5}},
}
# What an operation needs to find in the model.
NEEDS: Mapping[str, Entry] = {
    "merge_branches": {"op": "control_llm", "layers": [0]},
    "fold_adapters": {"op": "gated_adapters", "layers": [0], "size": 8, "gate": "none"},
}


@contextlib.contextmanager
def beside_adapter(folder: Path) -> Iterator[None]:
    """Work in a new folder where `adapter` is one for the bases of all families."""
    adapters.lora(folder / "adapter", {"mlp.down_proj": (32, 48)}, layers=4)
    with contextlib.chdir(folder):
        yield


@dataclass(frozen=True)
class Outcome:
    """What a plan promises on a base, or the reason why it is refused; one of the two is empty."""

    promise: str = ""
    refusal: str = ""
    drawn: Blueprint | None = field(default=None, compare=False)


@dataclass
class Bases:
    """Tiny checkpoints of one family, prepared for what pairs need, and what operations alone make of them."""

    family: str
    folder: Path
    _made: dict[str, Path] = field(default_factory=dict)
    _refused: dict[str, BadInput] = field(default_factory=dict)

    def of(self, first: str, second: str) -> Path:
        """The base of a pair: what an operation needs, and the other does not bring, an earlier surgery brought."""
        given = NEEDS[second]["op"] if second in NEEDS else None
        needed = [op for op in NEEDS if op in (first, second) and (op == first or first != given)]
        name = "-".join(["base", *needed])
        if name not in self._made:
            if needed:
                plan, below = plan_of(*(NEEDS[op] for op in needed)), self.of("", "")
                self._made[name] = surgeon.apply(plan, below, self.folder / name, device="cpu").path
            else:
                made = tiny.checkpoint(self.folder / name, self.family, vocab_size=320, num_hidden_layers=4)
                self._made[name] = vocabularies.byte_level(made)
        return self._made[name]

    def after(self, first: str, second: str, *, trained: bool) -> Path:
        """What the first operation of a pair makes of its base, as born, or with other values where it trains."""
        base, entry = self.of(first, second), pair(first, second)[0]
        name = f"{base.name}-{first}-{entry.get('gate', '')}-{'trained' if trained else 'born'}"
        if name in self._refused:
            raise self._refused[name]
        if name not in self._made:
            try:
                made = surgeon.apply(plan_of(entry), base, self.folder / name, device="cpu").path
            except BadInput as error:
                self._refused[name] = error
                raise
            self._made[name] = changed(made) if trained else made
        return self._made[name]


def pair(first: str, second: str) -> tuple[Entry, Entry]:
    """The entries of both operations, as they stand in a plan."""
    one, other = (
        {"op": op, **(ENTRIES[op] if op in ENTRIES else surgeon.OPERATIONS[op].examples[0])} for op in (first, second)
    )
    if first == second:
        other |= AGAIN.get(second, {})
    if (first, second) == ("gated_adapters", "fold_adapters"):
        one["gate"] = "none"
    return one, other


def plan_of(*entries: Mapping[str, Any]) -> surgeon.LoadedPlan:
    """A plan of these operations."""
    return _parsed(json.dumps({"surgeon": 1, "operations": entries}))


@functools.cache  # the same one for every family, in both tables
def _parsed(text: str) -> surgeon.LoadedPlan:
    return surgeon.parse_plan(text, source="plan.yaml")


@functools.cache  # a base of many cells, none of which changes it
def _opened(base: Path) -> CheckpointFolder:
    return open_headers(base, revision=None, trust_remote_code=False)


def foreseen(plan: surgeon.LoadedPlan, base: Path) -> Outcome:
    """The outcome as headers alone say it."""
    try:
        opened = opened_for(plan, _opened(base), weights=False, recall=True)
        drawn = preview_of(plan, opened, recall=True).blueprint
        return Outcome(drawn.promise, drawn=drawn)
    except BadInput as error:
        return refused(error)


def refused(error: BadInput) -> Outcome:
    """The reason, without the plan's file and line."""
    return Outcome(refusal=re.sub(r"^plan\.yaml:\d+: operations\[\d+\] \(\w+\): ", "", str(error)))


def in_one_plan(bases: Bases, first: str, second: str) -> Outcome:
    """As headers say it."""
    return foreseen(plan_of(*pair(first, second)), bases.of(first, second))


def in_two_plans(bases: Bases, first: str, second: str, *, trained: bool = False) -> Outcome:
    """As headers say it, of the second plan on the first one's output; of the first where that is refused."""
    try:
        before = bases.after(first, second, trained=trained)
    except BadInput as error:
        return refused(error)
    return foreseen(plan_of(pair(first, second)[1]), before)


def prove_one_plan(bases: Bases, first: str, second: str, folder: Path) -> list[str]:
    """Carry the pair out in one plan; what does not hold."""
    base, entries = bases.of(first, second), pair(first, second)
    applied = surgeon.apply(plan_of(*entries), base, folder / "one", device="cpu")
    wrong = kept(base, applied.path, folder / "back")
    born = bases.after(first, second, trained=False)
    one, other = (record.claim.promise for record in applied.preview.blueprint.operations)
    if one == "none" and other != "none":
        wrong += alike(born, applied.path, applied.preview.blueprint, exact=other == "exact")
    if in_two_plans(bases, first, second).promise:
        two = surgeon.apply(plan_of(entries[1]), born, folder / "two", device="cpu").path
        drawn = {o.name for o in applied.preview.blueprint.outputs if any(hasattr(x, "key") for x in o.recipe.leaves)}
        wrong += differing(applied.path, two, drawn=drawn)
    return wrong


def prove_two_plans(bases: Bases, first: str, second: str, folder: Path) -> list[str]:
    """Carry the pair out in two plans, with other values for what the first one made; what does not hold."""
    before = bases.after(first, second, trained=True)
    applied = surgeon.apply(plan_of(pair(first, second)[1]), before, folder / "out", device="cpu")
    return kept(before, applied.path, folder / "back")


def kept(base: Path, out: Path, back: Path) -> list[str]:
    """What `verify` finds broken of an output, and what `revert` does not bring back."""
    found = surgeon.verify(base, out, device="cpu", window=24, windows=2, dtypes=DTYPES)
    wrong = [f"{check.name}: {check.detail}" for check in found.checks if not check.holds]
    wrong += [] if found.holds else ["logits differ"]
    wrong += [] if len(found.comparisons) == 2 * len(DTYPES) else ["logits were not compared"]
    try:
        reverted = surgeon.revert(out, back).path
    except BadInput as error:
        return wrong if lost_on_purpose(error) else [*wrong, f"revert: {error}"]
    return wrong + [f"revert: {line}" for line in differing(reverted, base)]


def lost_on_purpose(error: BadInput) -> bool:
    """Whether `revert` says of what an operation overwrote or took out that it is gone."""
    return re.search("is lost|and its weights with it", str(error)) is not None


def alike(one: Path, other: Path, drawn: Blueprint, *, exact: bool) -> list[str]:
    """What differs in logits, beyond rounding where that is all that is promised."""
    import torch

    from surgeon.models.compare import compare_models, load_pair, trim_logits

    kept = drawn.kept_tokens
    most = 300 if kept is None else len(kept)
    ids = torch.randint(4, most, (2, 24), generator=torch.Generator().manual_seed(0))
    pairs = [load_pair(one, other, dtype=dtype) for dtype in DTYPES]
    for base, _ in pairs if kept is not None else ():
        trim_logits(base, kept)
    found = [each for pair in pairs for each in compare_models(*pair, ids, new=drawn.new_rows)]
    return [f"{c.mode} {c.dtype}: differs" for c in found if not (c.identical if exact else c.rounded)]


def differing(one: Path, other: Path, *, drawn: frozenset[str] | set[str] = frozenset()) -> list[str]:
    """What two checkpoints have otherwise, config.json included; of `drawn` tensors their values may differ."""
    import torch

    held, found = _tensors(one), _tensors(other)
    wrong = [f"only one has {name}" for name in sorted(held.keys() ^ found.keys())]
    for name in sorted(held.keys() & found.keys()):
        a, b = held[name], found[name]
        same = (a.dtype, a.shape) == (b.dtype, b.shape)
        if not same or (name not in drawn and not torch.equal(a.view(torch.uint8), b.view(torch.uint8))):
            wrong.append(f"{name} differs")
    configs = [json.loads((folder / "config.json").read_text()) for folder in (one, other)]
    return wrong + [f"config.json: {key}" for key in sorted({*configs[0], *configs[1]}) if _odd(configs, key)]


def _odd(configs: Sequence[Mapping[str, Any]], key: str) -> bool:
    one, other = (_born(config.get(key)) for config in configs)
    return one != other


def _born(value: Any) -> Any:
    """A part of a config without what says which of it trains: of what an earlier plan made, nothing does."""
    if isinstance(value, dict):
        return {key: _born(each) for key, each in value.items() if key not in ("frozen", "new_layers")}
    return [_born(each) for each in value] if isinstance(value, list) else value


def _tensors(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {n: v.reshape(1) if not v.ndim else v for f in folder.glob("*.safetensors") for n, v in load_file(f).items()}


def changed(out: Path) -> Path:
    """Give the new tensors of an output other values, as training would: what is fixed of them stays."""
    import torch
    from safetensors.torch import load_file, save_file

    manifest = surgeon.inspect(out).manifest
    assert manifest is not None
    noise = torch.Generator().manual_seed(0)
    for shard in sorted(out.glob("*.safetensors")):
        held = load_file(shard)
        for name in sorted(held.keys() & manifest.new_tensors.keys()):
            value = held[name]
            moved = value + 0.05 * torch.randn(value.shape, generator=noise).to(value.dtype)
            old, new = (each.contiguous().view(-1).view(torch.uint8) for each in (value, moved))
            for kept in base_bytes_of(manifest.new_tensors[name], manifest).kept.spans:
                for begin, end in kept.places:
                    new[begin:end] = old[begin:end]
            held[name] = moved
        save_file(held, shard, metadata={"format": "pt"})
    return out


Pair = tuple[str, str]
Cells = dict[Pair, dict[str, Outcome]]
EVERY: Sequence[Pair] = [(first, second) for first in surgeon.OPERATIONS for second in surgeon.OPERATIONS]


def tables(families: Mapping[str, Bases], every: Iterable[Pair] = EVERY) -> tuple[Cells, Cells]:
    """The outcomes of pairs, in one plan and in two, by family."""
    every = list(every)
    one = {both: {name: in_one_plan(bases, *both) for name, bases in families.items()} for both in every}
    two = {both: {name: in_two_plans(bases, *both) for name, bases in families.items()} for both in every}
    return one, two


def record_of(one: Cells, two: Cells) -> dict[str, Any]:
    """The record with these cells; the others are as it has them."""
    before = json.loads(RECORD.read_text(encoding="utf-8"))

    def told(key: str, both: Pair) -> dict[str, Outcome]:
        said = before[key][both[0]][both[1]]
        outcomes = [Outcome(refusal=before["refusals"][x]) if isinstance(x, int) else Outcome(x) for x in said]
        return dict(zip(before["model_types"], outcomes, strict=True))

    return recorded(
        {both: one[both] if both in one else told("same_plan", both) for both in EVERY},
        {both: two[both] if both in two else told("next_plan", both) for both in EVERY},
    )


def recorded(one: Cells, two: Cells) -> dict[str, Any]:
    """Both tables as plain data: of each pair a promise, or the number of its refusal, for each family."""
    refusals: dict[str, int] = {}

    def plain(cells: Cells) -> dict[str, dict[str, list[str | int]]]:
        found: dict[str, dict[str, list[str | int]]] = {}
        for (first, second), outcomes in cells.items():
            found.setdefault(first, {})[second] = [
                each.promise or refusals.setdefault(each.refusal, len(refusals)) for each in outcomes.values()
            ]
        return found

    same, following = plain(one), plain(two)
    return {
        "model_types": list(next(iter(one.values()))),
        "entries": {op: {k: v for k, v in pair(op, op)[0].items() if k != "op"} for op in same},
        "same_plan": same,
        "next_plan": following,
        "refusals": list(refusals),
    }


def record_text(record: Mapping[str, Any]) -> str:
    """The record as a file: what a plan can have after one operation, a line each."""
    parts = [
        f"{json.dumps(key)}: "
        + (
            "{\n" + ",\n".join(f"{json.dumps(op)}: {json.dumps(row)}" for op, row in value.items()) + "\n}"
            if isinstance(value, dict)
            else "[\n" + ",\n".join(map(json.dumps, value)) + "\n]"
        )
        for key, value in record.items()
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"


_WORDS = {"exact": "exact", "rounding": "rounding", "none": "the function changes"}


def section(names: Iterable[str]) -> str:
    """What can follow each operation, as the record says it, and why the rest is refused."""
    refusals: dict[str, int] = {}
    parts = [_followers(name, refusals) for name in names]
    why = [f"{number}. {refusal}" for refusal, number in refusals.items()]
    return "\n\n".join([*parts, "## Why refused", "\n".join(why)])


def _followers(name: str, refusals: dict[str, int]) -> str:
    found = recorded_followers(name)
    same = _lines({each.op: each.same_plan for each in found.followers}, refusals)
    following = _lines({each.op: each.next_plan for each in found.followers}, refusals)
    return "\n".join(
        [f"## {name}", "", "In the same plan:", "", *same, "", "On its output, by a new plan:", "", *following]
    )


def _lines(answers: Mapping[str, Mapping[str, Answer]], refusals: dict[str, int]) -> list[str]:
    """A line for each promise and one for refusals, with the operations of which it is said, and of which family."""
    families = list(next(iter(answers.values())))
    # Most often the first operation itself is refused there, or finds nothing to do.
    reasons = {name: [by_family[name].refusal for by_family in answers.values()] for name in families}
    never = [name for name in families if all(reasons[name])]
    whole = [name for name in never if len({*reasons[name]}) == 1 or len(never) < len(families)]
    said: dict[tuple[str, str], list[str]] = {}

    def say(words: str, names: Sequence[str], text: str) -> None:
        said.setdefault((words, "" if len(names) == len(families) else f" ({', '.join(names)})"), []).append(text)

    def number(refusal: str) -> int:
        return refusals.setdefault(refusal, len(refusals) + 1)

    mostly = {name: max(reasons[name], key=reasons[name].count) for name in whole}
    for reason in dict.fromkeys(mostly.values()):
        say("refused", [name for name in whole if mostly[name] == reason], f"everything ({number(reason)})")
    for op, by_family in answers.items():
        rest = {name: answer for name, answer in by_family.items() if name not in whole}
        for answer in dict.fromkeys(rest.values()):
            names = [name for name, each in rest.items() if each == answer]
            if answer.promise is None:
                say("refused", names, f"`{op}` ({number(answer.refusal)})")
            else:
                say(_WORDS[answer.promise], names, f"`{op}`")
    order = [*_WORDS.values(), "refused"]
    return [
        f"- {words}{where}: {', '.join(said[words, where])}"
        for words, where in sorted(said, key=lambda key: order.index(key[0]))
    ]


def with_section(page: str, written: str) -> str:
    """The page with what is written between the marks."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{written}\n\n{END}{rest.partition(END)[2]}"


def write_page() -> None:
    """Write the page from the record."""
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(with_section(page, section(surgeon.OPERATIONS)), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), choices=list(tiny.FAMILIES))
    parser.add_argument("--page", action="store_true", help="write the page from the record alone")
    parser.add_argument("--of", nargs="*", default=list(surgeon.OPERATIONS), choices=list(surgeon.OPERATIONS))
    asked = parser.parse_args()
    if asked.page:
        write_page()
        return 0
    chosen = asked.families
    broken = 0
    with tempfile.TemporaryDirectory() as scratch, beside_adapter(Path(scratch)):
        families = {name: Bases(name, Path(scratch) / name) for name in chosen}
        one, two = tables(families, [both for both in EVERY if {*both} & {*asked.of}])
        for name, bases in families.items():
            for cells, prove in ((one, prove_one_plan), (two, prove_two_plans)):
                for both, found in cells.items():
                    if not found[name].promise:
                        continue
                    folder = Path(scratch) / "cell"
                    folder.mkdir()
                    wrong = prove(bases, *both, folder)
                    shutil.rmtree(folder)
                    broken += bool(wrong)
                    print(
                        f"{name}, {prove.__name__}, {' → '.join(both)}: {'; '.join(wrong[:4]) or 'holds'}", flush=True
                    )
    if not broken and tuple(chosen) == FAMILIES:
        RECORD.write_text(record_text(record_of(one, two)), encoding="utf-8")
        write_page()
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
