"""A draft head as it runs: a Llama layer over the base's last hidden states, which drafts some tokens at a time.

Source: EAGLE (arXiv 2401.15077, section 4.1) and EAGLE-3 (arXiv 2503.01840, section 3). As in vLLM's
`Eagle3LlamaForCausalLM` without auxiliary hidden states, the first step reads the base's own last hidden states, each
further step the state that the head itself has made, and keys of further steps are forgotten once the base has read
their tokens.

Shapes: B sequences of T tokens, D the hidden size, V the vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, LlamaConfig
from transformers.masking_utils import create_causal_mask
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from surgeon.models.draft_shape import DRAFTED, DraftShape

# The spread of matrices at birth, as Llama's config has it.
_SPREAD = 0.02


class _Layer(nn.Module):
    """EAGLE-3's layer, with the names of its tensors on disk."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = LlamaAttention(config, layer_idx=0)
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = getattr(self.self_attn, name).out_features
            setattr(self.self_attn, name, nn.Linear(2 * hidden, rows, bias=False))
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(hidden, eps=eps)
        self.hidden_norm = LlamaRMSNorm(hidden, eps=eps)
        self.post_attention_layernorm = LlamaRMSNorm(hidden, eps=eps)

    def forward(self, embedded: Tensor, hidden: Tensor, rotation: Any, mask: Any, cache: Any) -> Tensor:
        """The next hidden states, before the last norm: B T D each."""
        both = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], dim=-1)
        hidden = hidden + self.self_attn(both, rotation, mask, cache)[0]
        after: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return after


class DraftHead(nn.Module):
    """A head beside its base, with what transformers' `MtpModel` offers to training and to speculative decoding.

    The base's embeddings and head are read and are no parameters of this module. What it drafts for `num_mtp_layers`
    depths is by one layer, each depth from the states of the one before.
    """

    def __init__(self, shape: DraftShape, base: Any) -> None:
        super().__init__()
        self.shape, self.num_mtp_layers = shape, DRAFTED
        self.config = LlamaConfig(**shape.layer_config())
        self.config._attn_implementation = "sdpa"
        self.layers = nn.ModuleList([_Layer(self.config)])
        self.norm = LlamaRMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.to(device=base.device, dtype=base.dtype)
        # Its frequencies stay in float32.
        self.rotary = LlamaRotaryEmbedding(self.config).to(base.device)
        # In a tuple: no submodules, so that they are the base's alone.
        self._shared = (base.get_input_embeddings(), base.get_output_embeddings())

    def initialise(self, seed: int) -> None:
        """Draw the matrices by a seed; norms are 1. The same values on every device."""
        drawn = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, size in self.shape.tensors.items():
                value = torch.randn(size, generator=drawn) * _SPREAD if len(size) == 2 else torch.ones(size)
                self.get_parameter(name).copy_(value)

    def forward_layer(self, depth: int, hidden: Tensor, positions: Tensor, cache: Any, *, input_ids: Tensor) -> Tensor:
        """What the head reads to draft, B T D, from `hidden` states and the token behind each.

        Args:
            depth: how many steps were made before; the layer is the same.
            hidden: the base's last hidden states, or what the step before returned; B T D.
            positions: of the tokens, B T.
            cache: keys and values of what was read before; None: nothing was.
            input_ids: the tokens, B T.
        """
        # Without the factor by which some bases multiply embeddings, which the norm would undo.
        embedded = F.embedding(input_ids, self._shared[0].weight).to(hidden.dtype)
        mask = create_causal_mask(self.config, embedded, None, cache, position_ids=positions)
        states: Tensor = self.layers[0](embedded, hidden, self.rotary(embedded, positions), mask, cache)
        normed: Tensor = self.norm(states)
        return normed

    def _project_to_logits(self, states: Tensor) -> Tensor:
        """B T V: by the base's output matrix alone, as vLLM does it for a draft."""
        return F.linear(states, self._shared[1].weight)

    @contextlib.contextmanager
    def drafting(self, model: Any) -> Iterator[None]:
        """Inside, `model.generate(use_mtp=True)` takes this head's drafts."""
        model._get_candidate_generator = lambda **_: _Drafts(self)
        try:
            yield
        finally:
            del model._get_candidate_generator


class _Drafts:
    """The candidates of one text, as transformers' assisted decoding asks for them."""

    requires_model_outputs = True
    model_kwargs_overrides = {"output_hidden_states": True}  # noqa: RUF012  # transformers reads it of the instance

    def __init__(self, head: DraftHead) -> None:
        self.head, self.cache, self.read = head, DynamicCache(), 0

    @torch.no_grad()
    def get_candidates(
        self, input_ids: Tensor, *, model_outputs: Any, is_first_iteration: bool, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The text with what is drafted behind it; at first, when the base has read nothing, with nothing."""
        if is_first_iteration:
            return input_ids, None
        # All tokens but the first have a state before them; what the base read of drafts that were wrong is left out.
        new = input_ids[:, 1 + self.read :]
        hidden = model_outputs.hidden_states[-1][:, : new.shape[1]]
        drafted, given = input_ids, new
        for depth in range(self.head.num_mtp_layers):
            end = drafted.shape[1]
            positions = torch.arange(end - given.shape[1], end, device=given.device)[None]
            hidden = self.head.forward_layer(depth, hidden, positions, self.cache, input_ids=given)[:, -1:]
            given = self.head._project_to_logits(hidden).argmax(-1)
            drafted = torch.cat([drafted, given], dim=1)
        self.read += new.shape[1]
        # Negative: how many are forgotten.
        self.cache.crop(1 - self.head.num_mtp_layers)
        return drafted, None

    def update_candidate_strategy(self, *_: Any) -> None:
        """As many are drafted each time."""
