"""Grafted twins of tiny models, made as checkpoints are: the base's tensors, copies of them, newborns."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from surgeon.anatomy.derivation import composition_for
from surgeon.anatomy.grafted_config import native_config
from surgeon.grafts.adapters import GATES
from surgeon.grafts.bundle import import_bundle
from surgeon.grafts.composition import PREFIX, Composition, upcycled
from surgeon.grafts.registry import GRAFTS
from surgeon.runtime.interpolators import INTERPOLATORS
from tests import tiny

TRUNK = 6
HIDDEN = 32
VOCABULARY = 128


def classes(family: str, suffix: str, surgery: dict[str, Any] | None = None) -> Any:
    """A family's upcycled class, e.g. `ForCausalLM`, of the file for such a surgery (None: with all grafts)."""
    if surgery is None:
        surgery = states() if family in tiny.ENCODERS else everything()
    native = composition(family)
    found = (
        upcycled(native.config) if suffix == "Config" else native.class_of(f"AutoModel{suffix.removeprefix('Model')}")
    )
    return getattr(import_bundle(joining(family, surgery)), str(found))


@cache
def composition(family: str) -> Composition:
    """What a family's upcycled classes are composed of."""
    return composition_for(tiny.config(family).to_json_string())


def joining(family: str, surgery: Any) -> dict[str, Any]:
    """What a config says of the file that belongs beside it."""
    anatomy = composition(family).to_json() | {"trunk": {}}
    return {"model_type": PREFIX + family, "surgery": surgery, "anatomy": anatomy}


def control(
    kind: str = "lerp",
    *,
    layers: tuple[int, ...] = (1, 4),
    divergence: str = "mse",
    weight: float = 1.0,
    trunk: int = TRUNK,
    **interpolator: Any,
) -> dict[str, Any]:
    """A surgery of control blocks at `layers`."""
    return {
        "trunk_layers": trunk,
        "control": [
            {
                "layer": layer,
                "branch": trunk + n,
                "interpolator": {"kind": kind} | interpolator,
                "divergence": {"kind": divergence, "weight": weight},
            }
            for n, layer in enumerate(layers)
        ],
    }


def adapters(gate: str = "relu", *, layers: tuple[int, ...] = (0, 3), size: int = 12, **local_loss: float) -> Any:
    """A surgery of gated adapters at `layers`."""
    return {
        "trunk_layers": TRUNK,
        "adapters": [{"layer": layer, "size": size, "gate": gate} for layer in layers],
        "local_loss": local_loss,
    }


def both() -> dict[str, Any]:
    """Control blocks and adapters together: on one layer, on different ones, and inside a branch."""
    surgery = control("lerp", layers=(1, 4))
    surgery["adapters"] = [{"layer": layer, "size": 12, "gate": "sigmoid"} for layer in (0, 4, TRUNK + 1)]
    surgery["local_loss"] = {"l1": 0.5, "cross_entropy": 0.25}
    return surgery


def routed(*, layers: tuple[int, ...] = (1, 4), count: int = 4, size: int = 8, top_k: int = 2) -> dict[str, Any]:
    """A surgery of routed experts at `layers`."""
    entry = {"experts": count, "size": size, "top_k": top_k}
    return {"trunk_layers": TRUNK, "routed_experts": [entry | {"layer": layer} for layer in layers]}


def experts(
    *,
    threshold: int = 3,
    groups: tuple[int, ...] = (0, 0),
    ranks: tuple[int, ...] = (3, 5),
    targets: tuple[str, ...] = ("self_attn.o_proj", "mlp.down_proj"),
    scale: float = 1.5,
    task_id: float = 0.0,
    trunk: int = TRUNK,
) -> dict[str, Any]:
    """A surgery of PMoE slots: one LoRA in layers below `threshold`, above it a slot for each of `groups`."""
    slots = [
        {"slot": k, "rank": rank, "targets": list(targets), "scale": scale, "group": group}
        for k, (group, rank) in enumerate(zip(groups, ranks, strict=True))
    ]
    shared = [{"slot": 0, "rank": 2, "targets": list(targets), "scale": scale}]
    return {
        "trunk_layers": trunk,
        "experts": [
            {"layer": layer, "routed": layer >= threshold, "slots": slots if layer >= threshold else shared}
            for layer in range(trunk)
        ],
        "expert_router": [
            {"layer": threshold, "slots": [{"slot": k, "group": group} for k, group in enumerate(groups)]}
        ],
        "router_loss": {"task_id": task_id},
    }


def states(
    *, layers: tuple[int, ...] = (0, 2, 5), sites: tuple[str, ...] = ("attention", "ffn"), **mixture: Any
) -> dict[str, Any]:
    """A surgery of control states at `layers`."""
    return {
        "trunk_layers": TRUNK,
        "control_states": [{"layer": layer, "sites": list(sites)} for layer in layers],
        "mixture": {"rank": 4, "alpha": 0.6} | mixture,
    }


def gate(**said: Any) -> dict[str, Any]:
    """A surgery of an inserted layer, a copy of layer 2 above it, that a domain gate switches."""
    return {
        "trunk_layers": TRUNK + 1,
        "domain_gate": [{"layer": 1, "units": 8} | said],
        "gated": [{"layer": 3, "inserted": True, "grafts": []}],
        "new_layers": [3],
    }


def gated(surgery: dict[str, Any], **said: Any) -> dict[str, Any]:
    """The same surgery, all of which a domain gate that reads the embeddings switches."""
    found: dict[int, set[str]] = {}
    for key, name in (
        ("control", "control"),
        ("adapters", "adapters"),
        ("routed_experts", "routed"),
        ("experts", "experts"),
        ("control_states", "states"),
    ):
        for entry in surgery.get(key, ()):
            if entry["layer"] < surgery["trunk_layers"]:
                found.setdefault(entry["layer"], set()).add(name)
    switched = [{"layer": layer, "grafts": sorted(names)} for layer, names in sorted(found.items())]
    return surgery | {"domain_gate": [{"layer": 0, "units": 8} | said], "gated": switched}


def everything() -> dict[str, Any]:
    """All kinds of grafts on one model: experts in a branch too, a layer with adapter and control state."""
    surgery = both() | {
        name: value for name, value in experts(groups=(0, 1), task_id=0.3).items() if name != "trunk_layers"
    }
    twin = next(entry for entry in surgery["experts"] if entry["layer"] == 4)
    surgery["experts"].append(twin | {"layer": TRUNK + 1})
    surgery["routed_experts"] = routed(layers=(0, 4, TRUNK + 1))["routed_experts"]
    return surgery | {name: value for name, value in states(top_k=2).items() if name != "trunk_layers"}


def every_graft() -> dict[str, dict[str, Any]]:
    """Each graft of the paper's tables by name, with each interpolator and each gate."""
    named = {f"control-{rule.key}": control(rule.key) for rule in INTERPOLATORS}
    named |= {f"control-{rule.key}-learned": control(rule.key, learnable=True) for rule in INTERPOLATORS}
    named |= {f"adapters-{gate}": adapters(gate) for gate in GATES}
    named["both"] = both()
    named["experts"] = experts()
    named["experts-in-groups"] = experts(groups=(0, 0, 1, 2), ranks=(3, 3, 2, 4))
    named["experts-from-the-bottom"] = experts(threshold=0)
    named["routed"] = routed()
    named["routed-alone"] = routed(top_k=1)
    named["states"] = states()
    named["states-by-kind"] = states(shared="by_kind", top_k=2, gate="cosine", projection=6)
    named["states-apart"] = states(shared="none", top_k=3, inference_routing="token")
    named["states-parallel"] = states(top_k=0, sites=("ffn",))
    named["gate"] = gate(closes=1.0)
    named["gate-of-prefixes"] = gate(reads="prefix_mean")
    named["gate-of-tokens"] = gate(reads="token", form="linear", closes=0.5)
    named["everything"] = everything()
    return named


def every_graft_in(family: str, *whole: str) -> dict[str, dict[str, Any]]:
    """`every_graft` for the families `whole`; for the others each graft once.

    For what takes seconds a family and in which grafts and families do not meet elsewhere than in their sites.
    """
    if family in whole:
        return every_graft()
    return {name: surgery for name, surgery in every_graft().items() if name in ("both", "experts", "everything")}


def alone() -> dict[str, dict[str, Any]]:
    """For each graft that there is, by its name, a surgery of `every_graft` that has no other."""
    present = {name: [n for n, r in GRAFTS.items() if r.present(made)] for name, made in every_graft().items()}
    found = {names[0]: every_graft()[name] for name, names in present.items() if len(names) == 1}
    assert set(found) == set(GRAFTS), "every_graft lacks a surgery of this graft alone"
    return found


def config(family: str, surgery: dict[str, Any], **overrides: Any) -> Any:
    """The upcycled config: the tail repeats its twins' attention types."""
    base = tiny.config(family, **overrides).to_dict()
    twins = [entry["layer"] for entry in surgery.get("control", ())]
    copies = inserted(surgery) if surgery["trunk_layers"] > base["num_hidden_layers"] else ()
    if (types := base.get("layer_types")) is not None:
        for layer in copies:
            types.insert(layer, types[layer - 1])
        base["layer_types"] = types + [types[twin] for twin in twins]
    base["num_hidden_layers"] += len(twins) + len(copies)
    base.pop("model_type")
    said = joining(family, surgery)
    return classes(family, "Config", surgery)(
        surgery=surgery, anatomy=said["anatomy"], auto_map=composition(family).auto_map, **base
    )


def read_from(family: str, surgery: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """The native config in that of an output with such a surgery, which is checked for it."""
    twins = len(surgery.get("control", ()))
    plain = tiny.config(family).to_dict()
    plain["num_hidden_layers"] += twins
    return native_config(plain | changed | joining(family, surgery))


def grafted(
    family: str, surgery: dict[str, Any], *, base: Any | None = None, dtype: str = "float32", **overrides: Any
) -> Any:
    """An upcycled causal model in eval mode that holds the base's tensors and copies of them as branches."""
    base = tiny.model(family, dtype=dtype, **overrides) if base is None else base
    torch.manual_seed(1)
    model = classes(family, "ForCausalLM", surgery)._from_config(
        config(family, surgery, **overrides), dtype=getattr(torch, dtype)
    )
    state = with_copies(base.state_dict(), surgery)
    for entry in surgery.get("control", ()):
        prefix = f"model.layers.{entry['layer']}."
        twin = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
        state |= {f"{prefix}expanded.{name}": tensor for name, tensor in twin.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    born = sys.modules[type(model).__module__].check_sites(model)
    assert set(missing) <= set(born), missing
    model.tie_weights()
    return model.eval()


def inserted(surgery: dict[str, Any]) -> tuple[int, ...]:
    """The layers that a surgery inserted."""
    return tuple(surgery.get("new_layers", ()))


def with_copies(state: Mapping[str, torch.Tensor], surgery: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A base's tensors with a copy of the layer below in the place of every inserted one."""
    copies = inserted(surgery)
    sources = list(range(surgery["trunk_layers"] - len(copies)))
    if any(name.startswith(f"model.layers.{len(sources)}.") for name in state):
        # Those layers are the base's here.
        return dict(state)
    for layer in copies:
        sources.insert(layer, sources[layer - 1])
    made = {name: tensor for name, tensor in state.items() if not name.startswith("model.layers.")}
    for layer, source in enumerate(sources):
        prefix = f"model.layers.{source}."
        held = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
        made |= {f"model.layers.{layer}.{name}": tensor for name, tensor in held.items()}
    return made


def grafted_encoder(
    family: str,
    surgery: dict[str, Any] | None = None,
    *,
    head: str = "ForMaskedLM",
    base: Any | None = None,
    dtype: str = "float32",
    **overrides: Any,
) -> Any:
    """An upcycled encoder in eval mode that holds the base's tensors; `head` is one of `tiny.ENCODER_HEADS`."""
    base = tiny.model(family, dtype=dtype, head=head, **overrides) if base is None else base
    torch.manual_seed(1)
    surgery = states(inference_routing="sequence_mean") if surgery is None else surgery
    model = classes(family, head or "Model", surgery)._from_config(
        config(family, surgery, **overrides), dtype=getattr(torch, dtype)
    )
    missing, unexpected = model.load_state_dict(base.state_dict(), strict=False)
    assert not unexpected and all("control_bank." in name for name in missing), (missing, unexpected)
    model.tie_weights()
    return model.to(getattr(torch, dtype)).eval()


def perturbed(model: Any, *, scale: float = 0.2, seed: int = 3) -> Any:
    """The same model with noise on every new parameter, so that branches differ, adapters speak and gates open."""
    generator = torch.Generator().manual_seed(seed)
    held = dict(model.named_parameters()) | {name: b for name, b in model.named_buffers() if "domain_gate." in name}
    new = {name for name in held if "domain_gate." in name} | set(model.graft_parameter_names())
    with torch.no_grad():
        for name in model.state_dict():
            if name in new:
                parameter = held[name]
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_((noise * scale).to(parameter.dtype))
                if name.endswith("domain_gate.out"):
                    # Evidence of either sign opens it, and a little is enough; a token's is about 1.
                    parameter.abs_().mul_(8)
                if name.endswith("domain_gate.threshold"):
                    parameter.fill_(0.05)
    return model


def tokens(batch: int = 2, length: int = 12, *, seed: int = 5) -> torch.Tensor:
    """Random ids that are no special tokens."""
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))
