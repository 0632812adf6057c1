"""Roles of a layer's parts, where a derived layer has usual names and shapes: attention, gated MLPs, experts.

Transport needs roles (`ot_fusion`), and no probe can find them. Those of attention and MLPs are taken from the names
that nearly all decoders share, and only where shapes fit; those of experts from the trial on the twin (mixture.py). A
part that is none of these has no role.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from surgeon.anatomy.family import Expert, Part, Role, Sizes
from surgeon.anatomy.mixture import Mixture

_PROJECTIONS: dict[str, Role] = {
    "self_attn.q_proj": "query",
    "self_attn.k_proj": "key",
    "self_attn.v_proj": "value",
    "self_attn.o_proj": "output",
    "self_attn.out_proj": "output",
}
_NORMS: dict[str, Role] = {
    "input_layernorm": "pre_attention_norm",
    "operator_norm": "pre_attention_norm",
    "attention_layernorm": "pre_attention_norm",
    "norm_attn_norm.norm_1": "pre_attention_norm",
    "self_attn_layer_norm": "pre_attention_norm",
    "feedforward_layernorm": "pre_mlp_norm",
    "norm_attn_norm.norm_2": "pre_mlp_norm",
    "final_layer_norm": "pre_mlp_norm",
    "post_attention_layernorm": "pre_mlp_norm",
    "pre_feedforward_layernorm": "pre_mlp_norm",
    "pre_mlp_layernorm": "pre_mlp_norm",
    "pre_ff_layernorm": "pre_mlp_norm",
    "ffn_norm": "pre_mlp_norm",
    "post_feedforward_layernorm": "post_mlp_norm",
    "post_mlp_layernorm": "post_mlp_norm",
    "self_attn.q_norm": "query_norm",
    "self_attn.q_layernorm": "query_norm",
    "self_attn.query_layernorm": "query_norm",
    "self_attn.k_norm": "key_norm",
    "self_attn.k_layernorm": "key_norm",
    "self_attn.key_layernorm": "key_norm",
}
# The projections of an MLP, of a shared expert or of a single expert, by the last word of their path.
_MLP: dict[str, Role] = {
    "gate_proj": "gate",
    "w1": "gate",
    "up_proj": "up",
    "w3": "up",
    "down_proj": "down",
    "w2": "down",
}
_MLPS = re.compile(r"(mlp|feed_forward|ffn|mixer)|(.+\.)?(shared_experts?|shared_mlp)")
# The projections of an MLP without a gate, with an activation between the two; in some models they are modules of the
# layer itself.
_PLAIN: dict[str, Role] = {
    **dict.fromkeys(("fc1", "fc_in", "c_fc", "dense_h_to_4h"), "up"),
    **dict.fromkeys(("fc2", "fc_out", "c_proj", "dense_4h_to_h"), "down"),
}
_SHARED_GATE = re.compile(r"(.+\.)?shared_expert_gate")

_FFN: dict[str, tuple[Role, ...]] = {
    **{word: (role,) for word, role in (_MLP | _PLAIN).items()},
    "input_linear": ("gate", "up"),
    "output_linear": ("down",),
}

# The transformers conversions of experts stored one by one, and of stacked ones, after which their rows are still
# known.
_GATHERED = {"MergeModulelist", "Concatenate"}
_TURNED = ("Transpose",)
# And the conversions that split a matrix into several by rows.
_PARTED = {"Split", "Chunk"}


@dataclass(frozen=True)
class InMemory:
    """A layer as it is in memory: its tensors' `shapes` by name, and its experts.

    `targets` maps suffixes on disk to names in memory; `converted` maps them to the conversions beyond a new name.
    """

    targets: Mapping[str, tuple[str, ...]]
    shapes: Mapping[str, tuple[int, ...]]
    converted: Mapping[str, tuple[str, ...]]
    mixture: Mixture | None


def with_roles(
    parts: Sequence[Part],
    sizes: Sizes,
    silent: Collection[str],
    memory: InMemory,
    hinted: Mapping[str, tuple[Role, ...]],
) -> tuple[Part, ...]:
    """Return the parts of a layer with the roles that can be determined.

    Args:
        parts: The tensors of a layer.
        sizes: The sizes of the model.
        silent: The suffixes that are null in a silenced layer: a norm among them follows a block.
        memory: The layer as it is in memory.
        hinted: The roles of modules with unusual names, from the top row down (decoders.py).

    Returns:
        The parts in their order.
    """
    weights = {part.suffix: part for part in parts if part.kind == "weight"}
    known: dict[str, tuple[tuple[Role, int], ...]] = {}
    for suffix, part in weights.items():
        path = suffix.removesuffix(".weight")
        if path in hinted:
            blocks = _blocks(hinted[path], part.shape, sizes, neurons=sizes.intermediate)
        else:
            blocks = _blocks_in_memory(part, sizes, memory) or _blocks(_roles_of(path), part.shape, sizes)
        # If two modules have one role, it is unclear which is meant: the second gets none.
        if blocks and not any({role for role, _ in blocks} & {role for role, _ in others} for others in known.values()):
            known[suffix] = blocks
    experts = _experts(parts, sizes, memory)
    return tuple(experts.get(part.suffix) or _plain(part, known, silent, memory.targets) for part in parts)


def _blocks(
    roles: Sequence[Role], shape: tuple[int, ...], sizes: Sizes, *, neurons: int | None = None
) -> tuple[tuple[Role, int], ...]:
    """Return the modules that a matrix holds, from the top row down, with their rows; empty where it has another shape.

    `neurons` are the rows of gate and of up; None: the rows that the other modules leave, in equal parts.
    """
    if len(shape) != 2 or not roles:
        return ()
    inner = [role for role in roles if role in ("gate", "up")]
    rows: dict[Role, int] = {"query": sizes.query_width, "key": sizes.kv_width, "value": sizes.kv_width}
    rows |= {"output": sizes.hidden, "down": sizes.hidden, "shared_gate": 1}
    left = shape[0] - sum(rows.get(role, 0) for role in roles)
    rows |= dict.fromkeys(inner, left // max(len(inner), 1) if neurons is None else neurons)
    blocks = tuple((role, rows[role]) for role in roles)
    reads = not {"output", "down"} & set(roles)
    fits = shape[0] == sum(count for _, count in blocks) and (shape[1] == sizes.hidden or not reads)
    return blocks if fits else ()


def _blocks_in_memory(part: Part, sizes: Sizes, memory: InMemory) -> tuple[tuple[Role, int], ...]:
    """Return the modules that a matrix holds, with their rows, by the names of the matrices that it becomes in memory.

    It must be those matrices one below another. Empty where it is not, or where a name or shape is not known.
    """
    targets = memory.targets[part.suffix]
    shapes = [memory.shapes[target] for target in targets]
    found = [_blocks(_roles_of(target.removesuffix(".weight")), memory.shapes[target], sizes) for target in targets]
    whole = all(shape[1:] == part.shape[1:] for shape in shapes) and sum(shape[0] for shape in shapes) == part.shape[0]
    below = _PARTED.issuperset(memory.converted.get(part.suffix, ()))
    return tuple(block for blocks in found for block in blocks) if whole and below and all(found) else ()


def _roles_of(path: str) -> tuple[Role, ...]:
    """Return the roles of the modules that a matrix of this name holds, from the top row down."""
    block, _, word = path.rpartition(".")
    if path in _PROJECTIONS:
        return (_PROJECTIONS[path],)
    if _SHARED_GATE.fullmatch(path):
        return ("shared_gate",)
    known = _MLPS.fullmatch(block) or (not block and word in _PLAIN)
    return _FFN.get(word, ()) if known else ()


def _plain(
    part: Part,
    known: Mapping[str, tuple[tuple[Role, int], ...]],
    silent: Collection[str],
    targets: Mapping[str, tuple[str, ...]],
) -> Part:
    """Return a part with its role: from `known` for matrices and biases, from usual names for norms.

    A part whose role is not known is returned unchanged.
    """
    path, _, _ = part.suffix.rpartition(".")
    blocks = known.get(f"{path}.weight", ()) if part.kind in ("weight", "bias") else ()
    if blocks:
        return replace(part, blocks=blocks)
    role = _NORMS.get(targets[part.suffix][0].rpartition(".")[0]) or _NORMS.get(path)
    if role is None or part.kind not in ("norm", "bias"):
        return part
    behind = role == "pre_mlp_norm" and f"{path}.weight" in silent
    return replace(part, blocks=(("post_attention_norm" if behind else role, part.shape[0]),))


def _experts(parts: Sequence[Part], sizes: Sizes, memory: InMemory) -> dict[str, Part]:
    """Return the parts of experts and their router with roles, by suffix; empty where one of them is not understood."""
    mixture = memory.mixture
    if mixture is None:
        return {}
    found: dict[str, Part] = {}
    routers = 0
    for part in parts:
        targets = memory.targets[part.suffix]
        if targets[0] in mixture.router and len(targets) == 1:
            count = memory.shapes[f"{mixture.experts}.down_proj"][0]
            made = None if part.suffix in memory.converted else _router(part, count, sizes.hidden)
            routers += made is not None and part.kind == "weight"
        elif any(target.startswith(f"{mixture.experts}.") for target in targets):
            made = _expert(part, targets, sizes, memory, mixture)
        else:
            continue
        if made is None:
            return {}
        found[part.suffix] = made
    return found if routers == 1 and _complete(found.values()) else {}


def _router(part: Part, count: int, hidden: int) -> Part | None:
    """Return the part of a router with its role; None where its shape has no row or number per expert."""
    if part.kind == "weight":
        return replace(part, blocks=(("router", count),)) if part.shape == (count, hidden) else None
    return replace(part, blocks=(("router", part.shape[0]),)) if part.shape in ((count,), (1, count)) else None


def _expert(part: Part, targets: Sequence[str], sizes: Sizes, memory: InMemory, mixture: Mixture) -> Part | None:
    """Return the part of one expert, or of all experts, with its roles; None where it is not understood."""
    word = targets[0].removeprefix(f"{mixture.experts}.")
    bias = word.endswith("_bias")
    both = word.startswith("gate_up_proj")
    shape, wanted = part.shape, memory.shapes[targets[0]]
    done = memory.converted.get(part.suffix, ())
    numbers = re.findall(r"(?<=\.)\d+(?=\.)", part.suffix)
    if len(targets) > 1 or len(numbers) > 1 or part.kind == ("weight" if bias else "bias"):
        return None
    if numbers:
        last = part.suffix.removesuffix(".bias" if bias else ".weight").rpartition(".")[2]
        role = _MLP.get(last if both else word.removesuffix("_bias"))
        if role is None or len(shape) != len(wanted) - 1 or not _GATHERED.issuperset(done):
            return None
        fits = bias or _blocks((role,), shape, sizes)
        return replace(part, blocks=((role, shape[0]),), expert=Expert(int(numbers[0]))) if fits else None
    roles: tuple[Role | None, ...] = ("gate", "up") if both else (_MLP.get(word.removesuffix("_bias")),)
    transposed = mixture.transposed
    if not bias and done == _TURNED and shape[1] != shape[2]:
        transposed ^= shape != wanted
    elif done:
        return None
    rows = shape[2] if transposed and not bias else shape[1]
    blocks = tuple((role, rows // len(roles)) for role in roles if role is not None)
    if not blocks:
        return None
    return replace(part, blocks=blocks, expert=Expert(None, transposed and not bias, mixture.interleaved and both))


def _complete(parts: Collection[Part]) -> bool:
    """Return whether each expert has the same modules, its last layer (down) included, and no expert is missing."""
    held: dict[int | None, set[tuple[str, Role]]] = {}
    for part in parts:
        if part.expert is not None:
            held.setdefault(part.expert.number, set()).update((part.kind, role) for role, _ in part.blocks)
    count = next((rows for part in parts if part.expert is None for _, rows in part.blocks), 0)
    alike = all(modules == next(iter(held.values())) for modules in held.values())
    return alike and set(held) in ({None}, set(range(count))) and ("weight", "down") in next(iter(held.values()))
