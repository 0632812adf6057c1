"""`config.surgery` is checked where surgeon reads it; what does not fit is refused with a word on what would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from surgeon.errors import BadInput
from surgeon.runtime.rules import read_surgery
from tests import tiny
from tests.runtime.grafting import adapters, both, classes, composition, config, control, read_from


def changed(surgery: dict[str, Any], *path: Any, value: Any) -> dict[str, Any]:
    """The surgery with one entry set."""
    inner = surgery
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return surgery


REFUSED = {
    "unknown key": (changed(control(), "contrl", value=[1]), "unknown keys.*contrl"),
    "unknown entry key": (changed(control(), "control", 0, "alhpa", value=1), "control has unknown keys.*alhpa"),
    "kind": (control("spline"), "interpolator kind is `spline`"),
    "alpha": (control(alpha=1.5), "alpha is 1.5"),
    "learned end": (control(alpha=1.0, learnable=True), "between 0 and 1, exclusive"),
    "dynamic end": (control("dlerp", alpha=0.0), "between 0 and 1, exclusive"),
    "dynamic inference": (control("moe", inference_alpha=0.5), "one α for all tokens"),
    "attention divergence": (control(divergence="attention"), "divergence kind is `attention`"),
    "negative weight": (control(weight=-1.0), "finite number"),
    "nan weight": (control(weight=float("nan")), "finite number"),
    "proj without divergence": (control("proj", divergence="none"), "never train"),
    "branch twice": (changed(control(), "control", 1, "branch", value=6), "each once"),
    "branch in the trunk": (changed(control(), "control", 1, "branch", value=3), "tail layers"),
    "layer twice": (changed(control(), "control", 1, "layer", value=1), "same layer"),
    "layer outside": (changed(control(), "control", 1, "layer", value=6), "names layers"),
    "adapter outside": (adapters(layers=(6,)), "names layers"),
    "adapter size": (adapters(size=0), "size 0"),
    "gate": (adapters("tanh"), "adapter gate is `tanh`"),
    "cross-entropy without a sigmoid": (adapters("relu", cross_entropy=0.1), "sigmoid gate"),
    "wrong trunk": (changed(both(), "trunk_layers", value=7), "tail layers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    surgery, words = REFUSED[case]
    with pytest.raises(BadInput, match=words):
        read_from("llama", surgery)


def test_what_ships_refuses_what_it_has_no_code_for() -> None:
    """The rest is checked where surgeon reads an output."""
    plain = tiny.config("llama").to_dict()
    plain.pop("model_type")
    for case in ("unknown key", "unknown entry key", "branch twice", "branch in the trunk", "wrong trunk"):
        surgery, words = REFUSED[case]
        plain["num_hidden_layers"] = 6 + len(surgery.get("control", ()))
        told = classes("llama", "Config", surgery)(surgery=surgery, **plain)
        with pytest.raises(ValueError, match=words):
            classes("llama", "ForCausalLM", surgery)._from_config(told)


def test_a_branch_of_another_attention_type_is_refused() -> None:
    types = config("gemma2", control(layers=(1, 4))).layer_types
    read_from("gemma2", control(layers=(1, 4)), layer_types=types)
    types[6] = types[7]
    with pytest.raises(BadInput, match="layer 6 is the branch of layer 1"):
        read_from("gemma2", control(layers=(1, 4)), layer_types=types)


def test_no_surgery_is_the_native_model() -> None:
    plain = classes("llama", "Config")(num_hidden_layers=3)
    assert read_surgery(plain).trunk_layers == 3
    assert not read_surgery(plain).rules


def test_config_survives_its_json(tmp_path: Path) -> None:
    for family in tiny.FAMILIES:
        before = config(family, both())
        before.save_pretrained(tmp_path / family)
        after = classes(family, "Config", both()).from_pretrained(tmp_path / family)
        assert after.to_dict() == before.to_dict()
        assert after.model_type == f"upcycled_{family}"
        assert after.auto_map == composition(family).auto_map


def test_mistral_gets_no_layer_types() -> None:
    assert "layer_types" not in config("mistral", control()).to_dict()
