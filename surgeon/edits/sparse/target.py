"""A mixture class of transformers: its config.json, and its layers' tensors, made from a base's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from surgeon.edits.sparse.dense import JOINT, KEY, QUERY, STEM, VALUE, Dense, Form, Mixture, Take
from surgeon.errors import BadInput

# Where the width is no multiple of this, half of a fused matrix uses another activation kernel than a whole one.
_ALIGNED = 32
# Fields with the same meaning in every class. No class's own defaults are trusted.
_COMMON = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps", "use_cache"),
    *("tie_word_embeddings", "attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id"),
)
# Placeholders in the shapes of idle tensors.
HIDDEN, NEURONS = -1, -2
_GATED = ("gate", "up", "down")
_AS_WRITTEN = ("dtype", "torch_dtype", "transformers_version", "original_max_position_embeddings")
_ROPE = ("rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor")

Role = Literal["kept", "inner", "copied", "down", "router", "bias", "idle"]


@dataclass(frozen=True)
class Made:
    """A tensor of a layer of the mixture. `takes` are rows of the base's layer, one piece below another.

    `kept`: a tensor that the base computes with; `inner`: gate and up of experts, `copied` their biases; `down`: their
    output, where segment `number` takes one of `segments` equal blocks of columns; `router`: a row per expert; `bias`:
    a zero per expert; `idle`: zeros for a part that the class has and the base does not need. `expert` is the number of
    the one expert that the tensor belongs to; None: it holds all of them.
    """

    suffix: str
    shape: tuple[int, ...]
    role: Role
    takes: tuple[Take, ...] = ()
    expert: int | None = None


@dataclass(frozen=True)
class Target:
    """A class of transformers that mixes experts, with the names in its checkpoints.

    `settings` returns the fields of its config.json beyond the common ones, from a base and a mixture; it raises
    BadInput where no setting computes what the base does. `expert` and `shared` are patterns for the number and for the
    three `words` of gate, up and down (or two: up and down); for a `fused` class the two `words` are gate with up, and
    down. A class that `extends` a dense type has all fields of that type, and all its kinds of layers. `balanced`: it
    has a loss that spreads tokens; `engines`: other programs that ran it in tests; `plain`: which of its layers may
    have an MLP instead of experts. `row`: the numbers of `bias` form a matrix of one row. `idle` are tensors next to
    the experts that add nothing, with the shape of each: HIDDEN is the hidden size, NEURONS the number of an expert's
    neurons. In a `normed` class the weight of a single chosen expert is always 1.
    """

    model_type: str
    architecture: str
    form: Form
    settings: Callable[[Dense, Mixture], dict[str, Any]]
    engines: str = ""
    router: str = "mlp.gate.weight"
    expert: str = "mlp.experts.{}.{}.weight"
    words: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    extends: str = ""
    shared: str = ""
    bias: str = ""
    fused: bool = False
    balanced: bool = True
    normed: bool = False
    plain: Literal["none", "lowest", "any"] = "none"
    row: bool = False
    idle: tuple[tuple[str, tuple[int, int]], ...] = ()

    @property
    def elsewhere(self) -> str:
        """Describe the other programs that run the class; empty where none was tried."""
        return f" (also in {self.engines})" if self.engines else ""

    def is_near(self, dense: Dense) -> bool:
        """Return whether the class could hold layers like the base's: by its dense type, or as common layers."""
        if self.extends:
            return self.extends == dense.config.get("model_type")
        return len(dense.kinds) == 1 and dense.stem == STEM and len(dense.roles) == len(_GATED)

    def refusal(self, mixture: Mixture) -> str:
        """Describe why the class cannot choose so many experts, or keep the MLP in `plain`; empty where it can."""
        if mixture.chosen == 1 and self.normed and not self.balanced:
            return (
                "it gives one expert the weight 1 whatever its router says, and has no balancing loss, so the router"
                " would never get a gradient; use `top_k: 2`"
            )
        if not mixture.plain or self.plain == "any":
            return ""
        if self.plain == "none":
            return "it has experts in every layer"
        if mixture.plain == tuple(range(len(mixture.plain))):
            return ""
        return "its layers without experts are the lowest alone"

    def config(self, dense: Dense, mixture: Mixture) -> dict[str, Any]:
        """Return the mixture's config.json. Raises BadInput where the class cannot compute what the base does."""
        named = {"architectures": [self.architecture], "model_type": self.model_type}
        made = {**dense.config, **named} if self.extends else self._common(dense, mixture) | named
        made |= self.settings(dense, mixture)
        if not self.extends and made["rms_norm_eps"] is None and made.get("layer_norm_eps") is None:
            raise BadInput("it has RMS norms; the base's norms are others (no `rms_norm_eps` in its config.json)")
        if self.balanced:
            # `output_router_logits` is not set: with it transformers computes the loss at every forward, which fails
            # where a cache holds part of a padded batch. Training asks for the loss itself.
            made["router_aux_loss_coef"] = mixture.balance
        return made

    def _common(self, dense: Dense, mixture: Mixture) -> dict[str, Any]:
        """Return the fields that mean the same in the base and in every class."""
        full, written = dense.full, dense.config
        made = {key: written.get(key, full.get(key)) for key in _COMMON}
        made["hidden_act"] = made["hidden_act"] or full.get("hidden_activation")
        made["attention_dropout"] = made["attention_dropout"] or 0.0
        heads, kv_heads = dense.heads
        made |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": dense.head_dim}
        made |= {key: written[key] for key in _AS_WRITTEN if key in written}
        made |= _rope(dense)
        made["attention_bias"] = any(s.endswith(("q_proj.bias", "qkv_proj.bias")) for s in dense.shapes)
        # Engines differ in which of the two they read.
        made |= {"num_experts": mixture.count, "num_local_experts": mixture.count}
        made["num_experts_per_tok"] = mixture.chosen
        return made

    def exact(self, dense: Dense) -> bool:
        """Return whether the base's own MLP is computed bit for bit as in the base (never where experts are copies)."""
        return self.form == "shared" and (self.fused == dense.fused or dense.width % _ALIGNED == 0)

    def layer(self, dense: Dense, mixture: Mixture) -> list[Made]:
        """Return the tensors of a layer that are not the base's under their own names."""
        made: list[Made] = []
        if JOINT in dense.shapes:
            for role, suffix in (("query", QUERY), ("key", KEY), ("value", VALUE)):
                made.append(_kept(suffix, dense.hidden, dense.source(role)))
        made += self._shared(dense) if self.shared else []
        made.append(Made(self.router, (mixture.count, dense.hidden), "router"))
        if self.bias:
            made.append(Made(self.bias, (1, mixture.count) if self.row else (mixture.count,), "bias"))
        for suffix, shape in self.idle:
            rows, columns = (
                {HIDDEN: dense.hidden, NEURONS: dense.width // mixture.segments}.get(size, size) for size in shape
            )
            made.append(Made(suffix, (rows, columns), "idle"))
        return [*made, *(self._stacked(dense, mixture) if self.fused else self._experts(dense, mixture))]

    def _shared(self, dense: Dense) -> list[Made]:
        """Return the base's FFN as the shared expert, without tensors that keep their names."""
        takes = [dense.source(role) for role in dense.roles]
        if self.fused:
            inner, outer = (self.shared.format(word) for word in self.words)
            made = [_kept(inner, dense.hidden, *takes[:-1]), _kept(outer, dense.width, takes[-1])]
        else:
            sizes = [*(dense.hidden,) * (len(takes) - 1), dense.width]
            named = zip(self.words, takes, sizes, strict=True)
            made = [_kept(self.shared.format(word), columns, take) for word, take, columns in named]
        return [each for each in made if each.suffix not in dense.shapes]

    def plain_layer(self, dense: Dense) -> list[Made]:
        """Return the tensors of a layer with an MLP that are not the base's under their own names."""
        split = dense.fused and not self.extends
        roles = {f"mlp.{role}_proj.weight": role for role in ("gate", "up")} if split else {}
        roles |= {QUERY: "query", KEY: "key", VALUE: "value"} if JOINT in dense.shapes else {}
        return [_kept(suffix, dense.hidden, dense.source(role)) for suffix, role in roles.items()]

    def dropped(self, dense: Dense, *, plain: bool = False) -> set[str]:
        """Return suffixes of the base's layer that the mixture's layer does not have under the same names.

        `plain`: for a layer that keeps its MLP.
        """
        kept = {self.shared.format(word) for word in self.words} if self.shared else set[str]()
        if plain:
            kept = set(dense.matrices[1:] if dense.fused and not self.extends else dense.matrices)
        return ({*dense.matrices} | ({JOINT} & dense.shapes.keys())) - kept

    def _experts(self, dense: Dense, mixture: Mixture) -> list[Made]:
        """Return the experts' tensors, where each expert has tensors of its own."""
        made: list[Made] = []
        width = dense.width // mixture.segments
        for expert in range(mixture.count):
            segment = expert % mixture.segments
            for word, role in zip(self.words, dense.roles, strict=True):
                suffix, take = self.expert.format(expert, word), dense.source(role)
                if role == "down":
                    made.append(Made(suffix, (dense.hidden, width), "down", (take,), expert))
                else:
                    takes = (take.part(segment, mixture.segments),)
                    made.append(Made(suffix, (width, dense.hidden), "inner", takes, expert))
        return made

    def _stacked(self, dense: Dense, mixture: Mixture) -> list[Made]:
        """Return the experts' tensors, where one tensor holds all experts."""
        inner, outer = (self.expert.format(word) for word in self.words)
        width = dense.width // mixture.segments
        gate, up, down = (dense.source(role) for role in _GATED)
        takes = tuple(
            take.part(expert % mixture.segments, mixture.segments)
            for expert in range(mixture.count)
            for take in (gate, up)
        )
        return [
            Made(inner, (mixture.count, 2 * width, dense.hidden), "inner", takes),
            Made(outer, (mixture.count, dense.hidden, width), "down", (down,) * mixture.count),
        ]


def _kept(suffix: str, columns: int, *takes: Take) -> Made:
    """Return a tensor that the base computes with, made of these rows."""
    rows = sum(take.stop - take.start for take in takes)
    return Made(suffix, (rows, columns), "kept", takes)


def _rope(dense: Dense) -> dict[str, Any]:
    """Return the base's fields of rotary embeddings, unchanged, with nothing left to a class's default."""
    made = {key: dense.config[key] for key in _ROPE if key in dense.config}
    full = dense.full.get("rope_parameters") or {}
    if "rope_parameters" not in made and "rope_theta" in full:
        made.setdefault("rope_theta", full["rope_theta"])
    share = full.get("partial_rotary_factor", dense.full.get("partial_rotary_factor"))
    made["partial_rotary_factor"] = 1.0 if share is None else share
    if isinstance(made.get("rope_parameters"), Mapping):
        made["rope_parameters"] = {**made["rope_parameters"], "partial_rotary_factor": made["partial_rotary_factor"]}
    return made
