"""The shape of a draft head, and its config.json in the form that vLLM's speculators read.

The head is EAGLE-3's (arXiv 2503.01840), with the base's last hidden state in place of three layers' fused: one Llama
layer whose attention reads [norm(embedding); norm(hidden state)], and a norm, whose output the base's own head reads
and the next step goes on from. Embeddings and head are the base's, so the folder has neither.

Not as here: where every layer of a base has a sliding window, vLLM 0.32 gives the head's layer that window too, so on
longer texts its drafts are others, and fewer are right; the tokens are the base's all the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.weights import quantisation
from surgeon.errors import BadInput, printable
from surgeon.families.anatomy import Anatomy
from surgeon.families.limits import context_of

# Tokens that are drafted at a time.
DRAFTED = 3
# What vLLM looks for in the base.
EMBEDDINGS, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class DraftShape:
    """The numbers of a draft head's Llama layer, by Llama's names for them."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float

    @classmethod
    def of(cls, base: CheckpointFolder, anatomy: Anatomy) -> DraftShape:
        """Return the shape of a head for this base: heads as the base's, an inner width of at least twice the hidden.

        Raises BadInput for a base for which vLLM has no draft head of this form.
        """
        sizes, config = anatomy.sizes, base.config.get("text_config") or base.config
        _check_readable(base, anatomy)
        eps = config.get("rms_norm_eps")
        return cls(
            hidden_size=sizes.hidden,
            intermediate_size=max(sizes.intermediate, 2 * sizes.hidden),
            num_attention_heads=sizes.heads,
            num_key_value_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            vocab_size=sizes.vocabulary,
            max_position_embeddings=context_of(base.config) or 4096,
            rms_norm_eps=float(eps) if isinstance(eps, float) and eps > 0 else 1e-5,
            rope_theta=_theta(config),
        )

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The head's tensors with their shapes, as they are stored."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = (count * self.head_dim for count in (self.num_attention_heads, self.num_key_value_heads))
        matrices = {
            "self_attn.q_proj": (queries, 2 * hidden),
            "self_attn.k_proj": (keys, 2 * hidden),
            "self_attn.v_proj": (keys, 2 * hidden),
            "self_attn.o_proj": (hidden, queries),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        norms = dict.fromkeys(("input_layernorm", "hidden_norm", "post_attention_layernorm"), (hidden,))
        layer = {f"layers.0.{name}.weight": shape for name, shape in {**matrices, **norms}.items()}
        return {**layer, "norm.weight": (hidden,)}

    def layer_config(self) -> dict[str, Any]:
        """Return the config of the layer, as Llama's class takes it."""
        plain = {key: value for key, value in asdict(self).items() if key != "rope_theta"}
        return plain | {
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
        }

    def config(self, base: str, architectures: object, dtype: str) -> bytes:
        """Return the folder's config.json in the form that vLLM's speculators read.

        Args:
            base: what the base is called; `vllm serve FOLDER` looks for it by this name.
            architectures: the base's own.
            dtype: of the tensors.
        """
        proposal = {"proposal_type": "greedy", "speculative_tokens": DRAFTED, "verifier_accept_k": 1}
        said = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": self.vocab_size,
            "norm_before_residual": False,
            "norm_output": True,
            "dtype": dtype,
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [proposal],
                "verifier": {"name_or_path": base, "architectures": architectures},
            },
            # vLLM hands these on to its class alone.
            "transformer_layer_config": {
                "model_type": "llama",
                **self.layer_config(),
                "tie_word_embeddings": False,
                "eagle_config": {"use_aux_hidden_state": False},
            },
        }
        return (json.dumps(said, indent=2) + "\n").encode()


def _check_readable(base: CheckpointFolder, anatomy: Anatomy) -> None:
    shown, why = printable(str(base.path)), ""
    if EMBEDDINGS not in anatomy.outer:
        why = f"looks for the base's embeddings under the name {EMBEDDINGS}, which this base does not have"
    elif not (anatomy.tied or _HEAD in anatomy.outer):
        why = f"looks for the base's head under the name {_HEAD}, which this base does not have"
    elif any(anatomy.grafted) or anatomy.bank or base.own is not None:
        why = "reads the hidden states of its own classes, and this base needs code that it brings"
    elif quantisation(base.config) is not None:
        why = "would draft from quantised weights, in which no draft head trains (`dequantise` first)"
    if why:
        raise BadInput(f"{shown}: no draft head is made of it: vLLM {why}")


def _theta(config: Mapping[str, Any]) -> float:
    """Return the base of the rotary positions; 10,000 where the config gives none, or one for each type of layer."""
    rope = config.get("rope_parameters")
    found = rope.get("rope_theta") if isinstance(rope, dict) else config.get("rope_theta")
    return float(found) if isinstance(found, int | float) and found > 1 else 10000.0


def shape_in(config: object, shown: str) -> DraftShape:
    """Return the shape that a config.json gives. Raises BadInput where it is another than surgeon writes."""
    layer = config.get("transformer_layer_config") if isinstance(config, dict) else None
    layer = layer if isinstance(layer, dict) else {}
    rope = layer.get("rope_parameters")
    given = {**layer, **(rope if isinstance(rope, dict) else {})}
    kinds = {key: float if key in ("rms_norm_eps", "rope_theta") else int for key in DraftShape.__dataclass_fields__}
    wrong = [key for key, kind in kinds.items() if type(given.get(key)) is not kind or not given[key] > 0]
    if wrong:
        raise BadInput(f"{shown}: `{wrong[0]}` is missing or no number above 0; get the draft head again")
    shape = DraftShape(**{key: given[key] for key in kinds})
    assert isinstance(config, dict)
    verifier = config.get("speculators_config", {})
    named = verifier.get("verifier", {}) if isinstance(verifier, dict) else {}
    again = shape.config(str(named.get("name_or_path")), named.get("architectures"), str(config.get("dtype")))
    if json.loads(again) != config:
        raise BadInput(f"{shown}: not as surgeon wrote it, so it was edited; get the draft head again")
    return shape
