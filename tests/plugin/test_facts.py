"""A package of somebody else drops layers by a measure of its own, and adds tokens: facts of its own, none of ours.

Everything runs in processes of its own, in which the package is installed or is not (`packages.py`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import tiny, vocabularies
from tests.checkpoints import weights
from tests.manifest.edits import edited
from tests.plugin.packages import COMMAND, install, run

DROP: dict[str, Any] = {"op": "drop_faint", "count": 2}
TOKENS: dict[str, Any] = {"op": "add_tokens", "words": [" surgery", " graft"]}
INSERT: dict[str, Any] = {"op": "insert_layers", "where": {"after": [0]}, "init": {"kind": "copy"}}
# By plan: its operations, and what it promises.
PLANS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "drops what another operation moved": ([INSERT, DROP], "none"),
    "adds": ([TOKENS], "exact"),
    "both": ([TOKENS, DROP], "none"),
}
WHOLE = """
import sys, surgeon
plan, base, out, back, promise = sys.argv[1:]
shown = surgeon.preview(plan, base)
applied = surgeon.apply(plan, base, out)
assert applied.manifest.promise == shown.blueprint.promise == promise
checked = surgeon.verify(base, out, window=24, windows=2)
assert checked.holds, checked.checks
assert checked.identical is (True if promise == "exact" else False), checked
surgeon.inspect(out), surgeon.report(out, html=out + ".html")
print(*shown.notes, sep="\\n")
try:
    surgeon.revert(out, back)
except surgeon.SurgeonError as error:
    print(error)
"""
VERIFY = """
import sys, surgeon
try:
    checks = surgeon.verify(*sys.argv[1:], logits=False).checks
    print(*(check.name + ": " + check.detail for check in checks if not check.holds), sep="\\n")
except surgeon.SurgeonError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("facts") / "site", name="surgeon_facts")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of six layers, with a tokenizer, whose layers 1 and 4 write least."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = vocabularies.byte_level(tiny.checkpoint(tmp_path_factory.mktemp("base"), "llama", vocab_size=320))
    for shard in folder.glob("*.safetensors"):
        held = load_file(shard)
        for name in held:
            if any(f"layers.{layer}." in name for layer in (1, 4)) and name.endswith(
                ("o_proj.weight", "down_proj.weight")
            ):
                held[name] = (held[name] * torch.tensor(0.01)).to(held[name].dtype)
        save_file(held, shard, metadata={"format": "pt"})
    return folder


def plan_of(folder: Path, operations: list[dict[str, Any]]) -> Path:
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump({"surgeon": 1, "operations": operations}), encoding="utf-8")
    return path


@pytest.mark.parametrize("case", PLANS)
def test_it_is_applied_verified_and_taken_back(case: str, site: Path, base: Path, tmp_path: Path) -> None:
    operations, promise = PLANS[case]
    out, back = tmp_path / "out", tmp_path / "back"
    said = run(WHOLE, plan_of(tmp_path, operations), base, out, back, promise, site=site)
    manifest = json.loads((out / "surgery.json").read_text())
    assert manifest["plugins"] == {"surgeon-facts": "0.1"}
    if DROP in operations:
        number = str(operations.index(DROP))
        facts = manifest["facts"][number]
        assert facts["faint"] == [1, 4] and len(facts["loudest"]) == 6
        assert manifest["dropped"] == {number: [1, 4]}
        assert [layer["base"] for layer in manifest["layers"] if layer["base"] is not None] == [0, 2, 3, 5]
        assert "loudness of layers was measured" in said
        # What is gone is in no output: as of layers that `drop_layers` takes out.
        assert "taken out by surgery 1 (drop_faint), and its weights with it" in said and not back.exists()
    if TOKENS in operations:
        grown = manifest["facts"]["0"]
        assert grown["rows"] == 320 and grown["side_files"]["tokenizer.json"]["inserted"]
        assert json.loads((out / "config.json").read_text())["vocab_size"] == 320 + len(grown["made_of"])
    if promise == "exact":
        same(base, back)


def same(one: Path, other: Path) -> None:
    before, after = weights(one), weights(other)
    assert before.keys() == after.keys() and all(bool((before[name] == after[name]).all()) for name in before)
    assert json.loads((one / "config.json").read_text()) == json.loads((other / "config.json").read_text())
    files = [file.name for file in one.iterdir() if file.name.startswith(("tokenizer", "special", "vocab", "merges"))]
    assert "tokenizer.json" in files
    for name in files:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def test_a_second_surgery_stands_on_its_output_and_is_taken_back(dropped: Path, site: Path, tmp_path: Path) -> None:
    out, back = tmp_path / "out", tmp_path / "back"
    more = TOKENS | {"words": [" scalpel"]}
    code = "import sys, surgeon; surgeon.apply(*sys.argv[1:4])\n"
    code += "assert surgeon.verify(*sys.argv[2:4], window=24, windows=2).identical\n"
    code += "surgeon.revert(sys.argv[3], sys.argv[4])"
    run(code, plan_of(tmp_path, [more]), dropped, out, back, site=site)
    same(dropped, back)
    assert (back / "surgery.json").read_bytes() == (dropped / "surgery.json").read_bytes()


@pytest.fixture(scope="module")
def dropped(site: Path, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dropped")
    run(
        "import sys, surgeon; surgeon.apply(*sys.argv[1:])",
        plan_of(folder, [DROP, TOKENS]),
        base,
        folder / "out",
        site=site,
    )
    return folder / "out"


def _other_layers(manifest: dict[str, Any]) -> None:
    manifest["facts"]["0"]["faint"] = [0, 1]


def _one_layer(manifest: dict[str, Any]) -> None:
    manifest["facts"]["0"]["faint"] = [1]


def _no_layer_of_the_base(manifest: dict[str, Any]) -> None:
    manifest["facts"]["0"]["faint"] = [1, 60]


def _gone(manifest: dict[str, Any]) -> None:
    del manifest["facts"]


def _more_words(manifest: dict[str, Any]) -> None:
    manifest["facts"]["0"]["told"] = 1


def _another_kind(manifest: dict[str, Any]) -> None:
    manifest["facts"]["0"]["loudest"] = "all of them"


def _of_no_operation(manifest: dict[str, Any]) -> None:
    manifest["facts"]["7"] = manifest["facts"]["0"]


def _of_the_other(manifest: dict[str, Any]) -> None:
    manifest["facts"]["1"] = manifest["facts"]["0"]


def _dropped_others(manifest: dict[str, Any]) -> None:
    manifest["dropped"]["0"] = [2, 3]


def _fewer_tokens(manifest: dict[str, Any]) -> None:
    manifest["facts"]["1"]["made_of"].pop()


def _beyond(manifest: dict[str, Any]) -> None:
    manifest["facts"]["1"]["made_of"][0] = "999999"


def _elsewhere(manifest: dict[str, Any]) -> None:
    place = manifest["facts"]["1"]["side_files"]["tokenizer.json"]["inserted"][0]
    place[0] += 1


# By edit: a word of what `verify` says of it.
EDITS: dict[Callable[[dict[str, Any]], None], str] = {
    _other_layers: "manifest",
    _one_layer: "which layers are faint is not known",
    _no_layer_of_the_base: "not so many layers of the base",
    _gone: "which layers are faint is not known",
    _more_words: "facts of `drop_faint`: told",
    _another_kind: "facts of `drop_faint`: loudest",
    _of_no_operation: "facts.7",
    _of_the_other: "facts of `add_tokens`: kind",
    _dropped_others: "does not name each of the base's 6 layers once",
    _fewer_tokens: "tokens",
    _beyond: "a token beyond the base's",
    _elsewhere: "inserted",
}


@pytest.mark.parametrize("change", EDITS, ids=lambda change: change.__name__.strip("_"))
def test_facts_in_a_manifest_are_a_claim(
    change: Callable[[dict[str, Any]], None], dropped: Path, site: Path, base: Path, tmp_path: Path
) -> None:
    """Whoever edits them can seal the manifest anew: base and plan show it."""
    out = shutil.copytree(dropped, tmp_path / "out")
    assert run(VERIFY, base, out, site=site).strip() == ""
    edited(out, change, seal=True)
    said = run(VERIFY, base, out, site=site).strip()
    assert EDITS[change] in said, said


STRAY = """
from typing import Literal
from surgeon.blueprint.blueprint import Claim, OperationRecord
from surgeon.operations.operation import Operation, TrainingDefaults
class Stray(Operation):
    "Writes what nobody could take out again."
    training = TrainingDefaults("a guess", lr=1e-3)
    op: Literal["stray"]
    def prepare(self, base):
        base.side_files["tokenizer.json"] = b"{}"
    def edit(self, draft, facts):
        return OperationRecord(self.op, "nothing", Claim("exact", "nothing changes"), trains="new")
"""


def test_a_side_file_that_nobody_could_restore_is_refused(base: Path, tmp_path: Path) -> None:
    points = "[surgeon.operations]\nstray = surgeon_stray:Stray\n"
    site = install(tmp_path / "site", name="surgeon_stray", entry_points=points, code=STRAY)
    plan = plan_of(tmp_path, [{"op": "stray"}])
    told = run(COMMAND, "apply", plan, base, tmp_path / "out", site=site, expect=2)
    assert "tokenizer.json: an operation changes it otherwise" in told and len(told.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_what_a_base_takes_is_tried_with_its_weights(site: Path, base: Path, tmp_path: Path) -> None:
    """`surgeon families` lets the operations prepare too."""
    found = run(
        "import json, sys, surgeon; print(json.dumps(surgeon.families(sys.argv[1]).to_json()['trials']))",
        base,
        site=site,
    )
    trials = {trial["op"]: trial for trial in json.loads(found)}
    assert trials["drop_faint"]["promise"] == "none" and trials["add_tokens"]["promise"] == "exact"
