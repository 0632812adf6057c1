"""Models in which layers share something in every forward: a router's choice, a bank of control states, a gate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from .graft import Flow, cache_in, here
from .losses import given_tokens
from .models import UpcycledModel


class CrossingModel(UpcycledModel):
    """A model with grafts that share something among layers; each is opened before a forward and closed after it."""

    # The native model's position id of a text's first token, where it passes position ids to its decoder.
    first_position: ClassVar[int] = 0

    def run_grafted(self, run: Callable[..., Any], given: dict[str, Any], flow: Flow | None) -> Any:
        """Return the output of `run`, the native forward, with grafts; `given` are its arguments by name.

        Raises ValueError where grafts are switched off and the cache was filled with grafts on.
        """
        cache = cache_in(given)
        if self in here.off:
            _check_kept_nothing(cache)
            return super().run_grafted(run, given, flow)
        crossing, flow = self._crossing(flow, given)
        output = super().run_grafted(run, given, flow)
        # A model may fill the cache that it gets and leave it out of its output (RecurrentGemma).
        named = cache_in(output)
        for graft in crossing if flow is not None else ():
            graft.close(self, flow, cache if named is None else named)
        return output

    def _crossing(self, flow: Flow | None, given: Mapping[str, Any]) -> tuple[list[Any], Flow | None]:
        """Open the grafts that share something among layers; return them and the forward's flow (None: not needed).

        `given` are the forward's arguments by name. When a model's first layers draft tokens, transformers lowers the
        config's `num_hidden_layers`; grafts that begin above these layers are not opened.
        """
        depth = self.config.num_hidden_layers
        firsts = ((graft, graft.crosses(self.surgery)) for graft in self.surgery.rules)
        found = [graft for graft, first in firsts if first is not None and first < depth]
        if flow is None and found:
            flow = Flow()
        if flow is not None:
            flow.packed = any(given.get(name) is not None for name in ("cu_seq_lens_q", "seq_idx"))
        if flow is not None and found:
            inputs, mask, domains = given_tokens(given, given.get("domain_ids"))
            positions = given.get("position_ids")
            # Grafts count positions from 0.
            flow.positions = positions if positions is None else positions - self.first_position
            if flow.domains is None:
                flow.domains = domains
            for graft in found:
                graft.open(self, flow, inputs, mask, cache_in(given))
        return found, flow


def _check_kept_nothing(cache: Any) -> None:
    """Raise ValueError where grafts keep values in a cache: they would lack the tokens that run without grafts."""
    if any(getattr(layer, "kept", None) for layer in getattr(cache, "layers", ())):
        raise ValueError("the cache was filled with grafts on; in `grafts(enabled=False)` begin with an empty one")
