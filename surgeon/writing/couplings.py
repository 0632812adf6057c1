"""The transport maps of a blueprint: solved at their first use, shared by recipes, freed after their last use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surgeon.anatomy.dissect import dissect_folder
from surgeon.blueprint.recipes import Bench, Coupling, MapRef, Recipe, TextSupport, WholeHeads
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.errors import BadInput, printable
from surgeon.models.load import running
from surgeon.models.stream import StreamedModel
from surgeon.models.tokens import token_batches
from surgeon.transport.heads import AttentionWeights, head_maps
from surgeon.transport.maps import HalfIdentity, Spread, TransportMap, TransportSettings
from surgeon.transport.solving import match_rows, solve

# More windows would save reading the base again, but cost memory for attention.
_WINDOWS_AT_ONCE = 16


class Maps:
    """The maps of `couplings`, whose rows `bench` computes. `reports` describe the solved maps, by name.

    Paths of texts are relative to `plan_source`, the plan's file.
    """

    def __init__(
        self, couplings: Mapping[str, Coupling], bench: Bench, base: CheckpointFolder, *, plan_source: str
    ) -> None:
        """Begin with no map solved."""
        self.reports: dict[str, dict[str, Any]] = {}
        self._couplings = couplings
        self._bench = bench
        self._base = base
        self._plan_source = plan_source
        self._maps: dict[str, TransportMap] = {}
        # The lower layer's rows after T_in, kept because both the cost and the fusion need them.
        self._aligned: dict[str, Tensor] = {}
        self._outputs: dict[TextSupport, dict[str, Tensor]] = {}

    @property
    def solved(self) -> tuple[str, ...]:
        """Return the names of the maps in memory."""
        return tuple(self._maps)

    def get(self, ref: MapRef) -> TransportMap:
        """Return a map; solve it first where it is not yet solved."""
        assert ref.coupling is not None
        if ref.coupling not in self._maps:
            coupling = self._couplings[ref.coupling]
            if coupling.whole_heads is None:
                self._solve(coupling)
            else:
                self._solve_heads(coupling.whole_heads)
        found = self._maps[ref.coupling]
        if ref.spread > 1:
            settings = TransportSettings(**dict(self._couplings[ref.coupling].settings))
            return Spread(found, ref.spread, settings.factor(ref.spread) / ref.spread)
        return HalfIdentity(found) if ref.half_identity else found

    def aligned(self, coupling: str) -> Tensor:
        """Return the rows of the lower layer, after T_in, of a solved map."""
        return self._aligned[coupling]

    def forget(self, names: Iterable[str]) -> None:
        """Free maps; a map that is needed again is solved again."""
        for name in names:
            self._maps.pop(name, None)
            self._aligned.pop(name, None)

    def needed_by(self, recipe: Recipe) -> frozenset[str]:
        """Return the couplings that a recipe needs, including those that other couplings need."""
        found: set[str] = set()
        waiting = list(recipe.maps)
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                waiting.extend(self._couplings[name].needs)
        return frozenset(found)

    def _solve(self, coupling: Coupling) -> None:
        """Solve one coupling's map and keep it; with `groups`, match experts instead.

        Raises BadInput where it has no solution.
        """
        lower, upper = self._rows(coupling)
        compared = self._compared(coupling, lower, upper)
        if coupling.groups is not None:
            self._match(coupling, compared, lower, coupling.groups)
            return
        try:
            with self._bench.stage(f"solve {coupling.name.rpartition('.')[2]}"):
                solved = solve(*compared, TransportSettings(**dict(coupling.settings)))
        except ValueError as error:
            raise BadInput(f"transport map {coupling.name}: {error}") from error
        self._keep(coupling.name, solved, lower)

    def _match(self, coupling: Coupling, compared: tuple[Tensor, Tensor], lower: Tensor, groups: int) -> None:
        """Match the experts of two routers and keep the assignment; `compared` are both routers' rows."""
        try:
            with self._bench.stage("match experts"):
                found = match_rows(*compared, groups=groups)
        except ValueError as error:
            raise BadInput(f"experts {coupling.name}: {error}") from error
        self._keep(coupling.name, found, lower)
        # For each expert of the upper layer, its partner in the lower layer.
        self.reports[coupling.name]["partners"] = [found.source_of(number) for number in range(found.m)]

    def _solve_heads(self, whole: WholeHeads) -> None:
        """Solve the maps of query, key and value together, because all three use the same assignment of heads.

        Raises BadInput where they have no solution.
        """
        couplings = [self._couplings[name] for name in whole.names]
        (query, key, value) = [self._rows(coupling) for coupling in couplings]
        outputs = [self._bench.working(recipe) for recipe in whole.output]
        first, second = (AttentionWeights(query[i], key[i], value[i], outputs[i]) for i in (0, 1))
        try:
            with self._bench.stage("solve heads"):
                found = head_maps(
                    first,
                    second,
                    TransportSettings(**dict(couplings[0].settings)),
                    n_heads=whole.heads,
                    n_kv_heads=whole.kv_heads,
                    head_dim=whole.head_dim,
                )
        except ValueError as error:
            raise BadInput(f"transport maps {', '.join(whole.names)}: {error}") from error
        self._keep(whole.query, found.query, query[0])
        self._keep(whole.key, found.key, key[0])
        self._keep(whole.value, found.key, value[0])

    def _rows(self, coupling: Coupling) -> tuple[Tensor, Tensor]:
        """Return (lower, upper): a coupling's rows of the lower layer after T_in, and of the upper layer."""
        rows = slice(coupling.start, coupling.stop)
        lower = self._bench.align_columns(self._bench.working(coupling.first)[rows], coupling.t_in)
        return lower, self._bench.working(coupling.second)[rows]

    def _compared(self, coupling: Coupling, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
        """Return (first, second): the rows from which a coupling's cost is computed.

        These are outputs on a text with `support`, the lower rows before T_in with `cost_first`, else `lower` (after
        T_in) and `upper` as they are.
        """
        if coupling.support is not None:
            return self._activations(coupling, coupling.support)
        if coupling.cost_first:
            return self._bench.working(coupling.first)[coupling.start : coupling.stop], upper
        return lower, upper

    def _activations(self, coupling: Coupling, support: TextSupport) -> tuple[Tensor, Tensor]:
        """Return (first, second): what the coupling's two modules put out on its text, a row for each of its rows.

        The base is run once for all couplings of the text.
        """
        if support not in self._outputs:
            alike = [each for each in self._couplings.values() if each.support == support]
            names = {name for each in alike for recipe in (each.first, each.second) for name in recipe.sources}
            with self._bench.stage("run the base"):
                self._outputs[support] = activations(
                    self._base,
                    sorted(names),
                    support,
                    text=Path(self._plan_source).parent / support.text,
                    device=self._bench.device,
                )
        rows, outputs = slice(coupling.start, coupling.stop), self._outputs[support]
        first, second = (outputs[_only(recipe.sources)][rows] for recipe in (coupling.first, coupling.second))
        return first.to(self._bench.device), second.to(self._bench.device)

    def _keep(self, name: str, solved: TransportMap, lower: Tensor) -> None:
        """Keep a solved map, its report, and the lower layer's rows `lower` that were aligned for it."""
        self._maps[name] = solved
        self._aligned[name] = lower
        self.reports[name] = solved.solution.to_report()


def _only(names: Iterable[str]) -> str:
    """Return the only name among `names`: the tensor whose rows are compared by activations."""
    (name,) = names
    return name


def activations(
    base: CheckpointFolder, weights: Iterable[str], support: TextSupport, *, text: Path, device: torch.device
) -> dict[str, Tensor]:
    """Return, for each named weight of a linear module, the module's outputs on the text.

    The outputs are (rows, samples), float32, on the CPU. They are the support of `support: activations` (Singh and
    Jaggi, 2020): two neurons correspond where their outputs are similar, not where their weights are close. The base
    runs once, in the memory of one layer (verification's streamed model). Samples are the text's first tokens in
    windows of `support.window`. Raises BadInput for a text that cannot be read or gives too few tokens, and for a base
    without tokenizer.
    """
    windows = -(-support.samples // support.window)
    vocabulary = dissect_folder(base).sizes.vocabulary
    tokens = token_batches(base.path, text=text, window=support.window, windows=windows, vocabulary=vocabulary)
    if tokens.ids.numel() < support.samples:
        raise BadInput(
            f"{printable(str(text))} gives {tokens.ids.numel()} tokens in windows of {support.window}, `samples` asks"
            f" for {support.samples}"
        )
    streamed = StreamedModel(base, dtype="float32", device=str(device))
    named = {stored: name for name, all_of_it in streamed.stored_as.items() for stored in all_of_it}
    kept: dict[str, list[Tensor]] = {weight: [] for weight in weights}
    for weight in kept:
        module = streamed.module.get_submodule(named[weight].removesuffix(".weight"))
        module.register_forward_hook(_keeping(kept[weight]))
    with torch.inference_mode():
        for ids in torch.split(tokens.ids, _WINDOWS_AT_ONCE):
            with running(streamed.module):
                streamed.module(ids.to(device), use_cache=False, logits_to_keep=1)
    return {weight: torch.cat(parts)[: support.samples].T.contiguous() for weight, parts in kept.items()}


def _keeping(parts: list[Tensor]) -> Callable[[Any, Any, Tensor], None]:
    """Return a forward hook that appends a module's output to `parts`, in float32 on the CPU, a row for each token."""

    def keep(_module: Any, _arguments: Any, output: Tensor) -> None:
        """Append one call's output."""
        # Cloned to leave inference mode's tensors: the caller computes with it.
        parts.append(output.flatten(0, -2).float().cpu().clone())

    return keep
