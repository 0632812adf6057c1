"""A package of somebody else adds an operation with runtime code and an interpolator, and surgeon stays as it is.

Everything runs in processes of its own, in which the package is installed or is not: `surgeon_scale` and the
`.dist-info` that names its entry points, in a folder on the path.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.checkpoints import weights
from tests.decoders import tiny_decoder
from tests.elsewhere import WITHOUT_SURGEON, load_elsewhere, run_elsewhere
from tests.plugin.packages import COMMAND, install, run
from tests.training.test_train import CONFIG, base_of

SCALE: dict[str, Any] = {"op": "scale_ffn", "layers": [0, 2, 3]}
CONTROL: dict[str, Any] = {"op": "control_llm", "layers": [2], "interpolator": {"kind": "channels"}}
ADAPTERS: dict[str, Any] = {"op": "gated_adapters", "layers": [1], "size": 8}


GROW = """
import sys, surgeon
plan, base, out = sys.argv[1:]
text = "".join(graft.text + "\\n" for layer in surgeon.preview(plan, base).blueprint.layers for graft in layer.grafts)
applied = surgeon.apply(plan, base, out)
assert applied.manifest.promise == "exact"
for dtypes in (["auto"], ["float32"]):
    checked = surgeon.verify(base, out, window=24, windows=2, dtypes=dtypes)
    assert checked.holds and checked.identical, checked
surgeon.inspect(out), surgeon.report(out, html=out + ".html")
print(text)
"""
TRAIN = """
import sys, surgeon
from pathlib import Path
base, out, config, to, back = map(Path, sys.argv[1:])
trained = surgeon.train(out, config, to, device="cpu")
new = {name for name in trained.manifest.new_tensors}
assert set(trained.changes) == new
assert not [name for name in new if "scale" in name and name in trained.unchanged], trained.unchanged
assert surgeon.verify(base, to, text=None, windows=1).holds
surgeon.revert(to, back)
"""


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`site` with the package, `base`, and `out` made by a plan that needs it."""
    folder = tmp_path_factory.mktemp("plugin")
    install(folder / "site")
    base = base_of(folder)
    plan = folder / "plan.yaml"
    plan.write_text(yaml.safe_dump({"surgeon": 1, "operations": [SCALE, CONTROL, ADAPTERS]}))
    told = run(GROW, plan, base, folder / "out", site=folder / "site")
    assert told.count("scale of the FFN\n") == 3
    assert "scale of the FFN in the branch" in told and "control block, channels" in told
    return folder


def test_the_manifest_names_the_package_and_its_code_ships(grown: Path) -> None:
    manifest = json.loads((grown / "out" / "surgery.json").read_text())
    assert manifest["plugins"] == {"surgeon-scale": "0.1"}
    code = (grown / "out" / "modeling_surgeon.py").read_text()
    for mark in ("class ScaleGraft(Graft, ScaleRules):", "class Channels(Interpolation):", '{"channels": Channels()}'):
        assert mark in code
    assert "class GatedAdapter" in code and "class ExpertRouter" not in code
    assert not any(line.startswith(("from surgeon", "import surgeon", "from .")) for line in code.splitlines())


def test_the_report_explains_its_sign_in_its_colour(grown: Path) -> None:
    page = (grown / "out.html").read_text(encoding="utf-8")
    assert "<span>F learned scale of the FFN</span>" in page and 'class="pill c4 trains"' in page


def test_it_loads_generates_trains_and_saves_where_neither_is_installed(grown: Path, tmp_path: Path) -> None:
    found, native = load_elsewhere(grown / "out", grown / "base", cache=tmp_path, trust=True)
    assert found["class"] == "UpcycledLlamaForCausalLM"
    for key in ("logits", "told", "told_uncached"):
        assert found[key] == native[key]
    told = run_elsewhere(ELSEWHERE, str(grown / "out"), str(tmp_path / "saved"), cache=tmp_path)
    manifest = json.loads((grown / "out" / "surgery.json").read_text())
    assert set(told["new"]) == set(manifest["new_tensors"])
    assert told["scale_loss"] == 0.0 and told["same"]


ELSEWHERE = (
    WITHOUT_SURGEON
    + """
import torch
from transformers import AutoModelForCausalLM
out, saved = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True, dtype="float32")
new = model.freeze_base()
ids = torch.arange(3, 43).reshape(4, 10)
result = model.train()(input_ids=ids, labels=ids, domain_ids=torch.tensor([0, 1, 0, 1]))
result.loss.backward()
model.eval().save_pretrained(saved)
again = AutoModelForCausalLM.from_pretrained(saved, trust_remote_code=True)
with torch.inference_mode():
    same = bool(torch.equal(model(ids).logits, again(ids).logits))
json.dump({"new": new, "scale_loss": float(result.scale_loss), "same": same}, sys.stdout)
"""
)


def test_it_trains_and_is_taken_back_byte_for_byte(grown: Path, tmp_path: Path) -> None:
    config = grown / "train.yaml"
    config.write_text(yaml.safe_dump(CONFIG | {"steps": 3, "save_every": 3}), encoding="utf-8")
    run(TRAIN, grown / "base", grown / "out", config, tmp_path / "run", tmp_path / "back", site=grown / "site")
    before, after = weights(grown / "base"), weights(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(bool((before[name] == after[name]).all()) for name in before)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == json.loads(
        (grown / "base" / "config.json").read_text()
    )
    assert not list((tmp_path / "back").glob("*.py"))


def test_without_the_package_it_is_refused_by_name(grown: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(yaml.safe_dump({"surgeon": 1, "operations": [ADAPTERS]}))
    out = grown / "out"
    for command in (
        ("verify", grown / "base", out),
        ("revert", out, tmp_path / "back"),
        ("apply", plan, out, tmp_path / "more"),
    ):
        told = run(COMMAND, *command, site=None, expect=2)
        assert "surgeon-scale 0.1, which is not installed here" in told and len(told.strip().splitlines()) == 1
    assert "unknown op `scale_ffn`" in run(COMMAND, "preview", grown / "plan.yaml", grown / "base", site=None, expect=2)


def test_what_a_plugin_took_no_part_in_names_none(tmp_path: Path, grown: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(yaml.safe_dump({"surgeon": 1, "operations": [ADAPTERS]}))
    run(
        "import sys, surgeon; surgeon.apply(*sys.argv[1:])", plan, grown / "base", tmp_path / "out", site=grown / "site"
    )
    assert json.loads((tmp_path / "out" / "surgery.json").read_text())["plugins"] == {}
    run(
        "import sys, surgeon; assert surgeon.verify(*sys.argv[1:], logits=False).holds",
        grown / "base",
        tmp_path / "out",
        site=None,
    )


def test_a_type_without_a_hint_carries_grafts_of_the_package(grown: Path, tmp_path: Path) -> None:
    import torch
    from transformers import GraniteConfig, GraniteForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "vocab_size": 128}
    config = GraniteConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, residual_multiplier=0.5)
    GraniteForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    plan = tmp_path / "plan.yaml"
    plan.write_text(yaml.safe_dump({"surgeon": 1, "operations": [SCALE, CONTROL]}))
    out = tmp_path / "out"
    run(GROW, plan, tmp_path / "base", out, site=grown / "site")
    found, native = load_elsewhere(out, tmp_path / "base", cache=tmp_path, trust=True)
    assert found["class"] == "UpcycledGraniteForCausalLM"
    assert found["logits"] == native["logits"] and found["told"] == native["told"]
    told = run(COMMAND, "preview", plan, tmp_path / "base", site=None, expect=2)
    assert "unknown op" in told


def test_a_hint_of_the_package_says_what_modules_of_other_names_are(grown: Path, tmp_path: Path) -> None:
    base = tiny_decoder(tmp_path / "base", "mpt", layers=4)
    fused = {"op": "insert_layers", "where": {"after": [1]}, "init": {"kind": "ot_fusion", "unaligned": "average"}}
    plan = tmp_path / "plan.yaml"
    plan.write_text(yaml.safe_dump({"surgeon": 1, "operations": [fused]}))
    told = run(COMMAND, "preview", plan, base, site=None)
    assert "attn.Wqkv" in told
    run(GROW, plan, base, tmp_path / "out", site=grown / "site")
    assert json.loads((tmp_path / "out" / "surgery.json").read_text())["plugins"] == {"surgeon-scale": "0.1"}
    matched = json.loads((tmp_path / "out" / "surgery.json").read_text())["operations"][0]["matched"]
    assert matched.endswith("averaged as they stand: norm_1, norm_2")


BROKEN = {
    "it cannot be imported": (
        "[surgeon.operations]\nspoilt = surgeon_spoilt:nothing\n",
        ["surgeon-spoilt 0.1", "`spoilt` of `surgeon.operations`", "ModuleNotFoundError", "uninstall"],
    ),
    "it has a built-in name": (
        "[surgeon.operations]\ncontrol_llm = surgeon.operations.control_llm:ControlLLM\n",
        ["surgeon-spoilt 0.1", "`control_llm`", "is taken already"],
    ),
    "it is no operation": (
        "[surgeon.operations]\nspoilt = json:dumps\n",
        ["surgeon-spoilt 0.1", "must be a subclass of surgeon.operations.operation.Operation"],
    ),
    "it is called otherwise": (
        "[surgeon.operations]\nspoilt = surgeon.operations.control_llm:ControlLLM\n",
        ["surgeon-spoilt 0.1", "`control_llm`"],
    ),
    "its family is none": (
        "[surgeon.families]\nspoilt = json:dumps\n",
        ["surgeon-spoilt 0.1", "must be a surgeon.anatomy.decoders.Hint"],
    ),
    "its part is none": (
        "[surgeon.runtime]\nspoilt = json:dumps\n",
        ["surgeon-spoilt 0.1", "must be a KnownGraft or an Interpolation"],
    ),
}


ENDS = """
from typing import Literal
from surgeon.operations.operation import Operation, TrainingDefaults
class Ends(Operation):
    "Ends Python."
    training = TrainingDefaults("a guess", lr=1e-3)
    op: Literal["ends"]
    def edit(self, draft, facts):
        raise SystemExit(0)
"""


def test_an_operation_that_ends_python_ends_no_command_as_if_it_were_done(grown: Path, tmp_path: Path) -> None:
    """`apply` was over with exit 0, and there was no OUT."""
    points = "[surgeon.operations]\nends = surgeon_spoilt:Ends\n"
    site = install(tmp_path / "site", name="surgeon_spoilt", entry_points=points, code=ENDS)
    plan = tmp_path / "plan.yaml"
    plan.write_text(yaml.safe_dump({"surgeon": 1, "operations": [{"op": "ends"}]}))
    told = run(COMMAND, "apply", plan, grown / "base", tmp_path / "out", site=site, expect=2)
    wanted = "surgeon: plugin surgeon-spoilt 0.1: its code failed (SystemExit: 0); repair it (--debug shows"
    assert told == f"{wanted} where) or uninstall it\n"


@pytest.mark.parametrize(
    "wrong", ["from surgeon_scale.rules import", "from surgeon.common.formatting import show\nfrom .rules import"]
)
def test_an_import_that_an_output_could_not_make_is_refused(wrong: str, grown: Path, tmp_path: Path) -> None:
    """An output loads where neither surgeon nor the plugin is installed."""
    site = tmp_path / "site"
    shutil.copytree(grown / "site", site)
    code = site / "surgeon_scale" / "modules.py"
    assert "from .rules import" in code.read_text()
    code.write_text(code.read_text().replace("from .rules import", wrong))
    told = run(COMMAND, "apply", grown / "plan.yaml", grown / "base", tmp_path / "out", site=site, expect=2)
    assert "Traceback" not in told and "surgeon_scale.modules: `from surgeon" in told and "does not ship" in told
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_package_is_named_in_one_line(case: str, grown: Path, tmp_path: Path) -> None:
    entry_points, words = BROKEN[case]
    site = install(tmp_path / "site", name="surgeon_spoilt", entry_points=entry_points)
    plan = tmp_path / "plan.yaml"
    plan.write_text(yaml.safe_dump({"surgeon": 1, "operations": [ADAPTERS]}))
    told = run(COMMAND, "preview", plan, grown / "base", site=site, expect=2)
    assert len(told.strip().splitlines()) == 1
    for word in words:
        assert word in told, told
