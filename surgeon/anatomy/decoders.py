"""Facts about a model type that no probe finds: hints, a few lines per type, and none for most types.

Layers, their kinds, what silences each and where grafts can run are found by inspection and proven on a twin. The roles
query, key, value, output, gate, up and down are taken from the tensor names that nearly all decoders share (roles.py).
A type whose modules have other names needs a hint. A package can bring hints for more types (docs/how-to/adding.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from surgeon.anatomy.family import Role
from surgeon.common.plugins import Plugin, Registry, wrong_kind
from surgeon.errors import printable

GROUP = "surgeon.families"


@dataclass(frozen=True)
class Hint:
    """The roles of modules with unusual names, by their path in a layer.

    For a module that holds several roles, as a fused projection does, they are listed from the top row down. A hint
    counts only where the matrix has as many rows as these roles need.
    """

    model_type: str
    roles: Mapping[str, tuple[Role, ...]] = field(default_factory=dict)


_BUILT_IN = (
    Hint("glm", {"mlp.gate_up_proj": ("gate", "up")}),
    Hint("glm4", {"mlp.gate_up_proj": ("gate", "up")}),
    # Phi-3 and Phi-4 text models.
    Hint("phi3", {"self_attn.qkv_proj": ("query", "key", "value"), "mlp.gate_up_proj": ("gate", "up")}),
    Hint("phi4_multimodal", {"self_attn.qkv_proj": ("query", "key", "value"), "mlp.gate_up_proj": ("gate", "up")}),
)


def _admit(plugin: Plugin) -> Hint:
    """Return a plugin's hint. Raises BadInput where it is no `Hint`, or is not called as its model type."""
    if not isinstance(plugin.value, Hint):
        raise wrong_kind(plugin, GROUP, "a surgeon.anatomy.decoders.Hint")
    if plugin.value.model_type != plugin.name:
        raise wrong_kind(plugin, GROUP, f"called as its model_type, `{printable(plugin.value.model_type)}`")
    return plugin.value


HINTS: Registry[Hint] = Registry(GROUP, {hint.model_type: hint for hint in _BUILT_IN}, _admit)

# The types of most bases, which `surgeon families` lists; other types are handled in the same way.
USUAL_DECODERS = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "olmo2", "phi3")
USUAL_ENCODERS = ("roberta", "deberta", "deberta-v2")
