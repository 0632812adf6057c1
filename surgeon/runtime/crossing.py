"""Models in which something crosses layers in every forward: a router's choice, shared control states, a gate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from .graft import Flow, cache_in, here
from .losses import given_tokens
from .models import UpcycledModel


class CrossingModel(UpcycledModel):
    """A model some of whose grafts cross layers."""

    # What the native model counts a text's positions from where it gives its decoder some.
    first_position: ClassVar[int] = 0

    def run_grafted(self, run: Callable[..., Any], given: dict[str, Any], flow: Flow | None) -> Any:
        """`run`, the native forward, with what crosses layers; `given` are its arguments by name."""
        cache = cache_in(given)
        if self in here.off:
            _check_kept_nothing(cache)
            return super().run_grafted(run, given, flow)
        crossing, flow = self._crossing(flow, given)
        output = super().run_grafted(run, given, flow)
        # A model may fill the cache that it is given and not name it in its output (RecurrentGemma).
        named = cache_in(output)
        for graft in crossing if flow is not None else ():
            graft.close(self, flow, cache if named is None else named)
        return output

    def _crossing(self, flow: Flow | None, given: Mapping[str, Any]) -> tuple[list[Any], Flow | None]:
        """A forward begins: the grafts that cross layers, opened, and the flow that goes to all layers, if one does.

        `given` are the forward's arguments by name. For drafts by a model's first layers transformers lowers the
        config's `num_hidden_layers`; what begins above them takes no part.
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
            # Counted from 0, as grafts know them.
            flow.positions = positions if positions is None else positions - self.first_position
            if flow.domains is None:
                flow.domains = domains
            for graft in found:
                graft.open(self, flow, inputs, mask, cache_in(given))
        return found, flow


def _check_kept_nothing(cache: Any) -> None:
    """ValueError where grafts keep something in a cache, which would miss what is computed without them."""
    if any(getattr(layer, "kept", None) for layer in getattr(cache, "layers", ())):
        raise ValueError("the cache was filled with grafts on; in `grafts(enabled=False)` begin with an empty one")
