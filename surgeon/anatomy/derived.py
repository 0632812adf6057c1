"""The findings about a model type from a config only: its layers, their kinds, and what silences each kind.

The model is built without weights, and a twin with random weights is probed. Results are cached by config.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from surgeon.anatomy.family import OWN_CONFIG
from surgeon.anatomy.kinds import described_kinds, numbered
from surgeon.anatomy.mixture import Mixture, mixtures
from surgeon.anatomy.quantised import skips
from surgeon.anatomy.silence import Silence, in_words, silences, some_tokens
from surgeon.anatomy.skeleton import Skeleton, build
from surgeon.anatomy.twin import twin_of
from surgeon.common.devices import one_thread
from surgeon.common.library import LOAD_FAILURES, first_line
from surgeon.errors import BadInput, printable

# Numbers of heads to try: some encoders divide their width by three, or have norms as wide as one head.
_ENCODER_HEADS = (2, 3, 1)
_NO_LAYERS = "layers are added to decoders alone"
# A twin has two heads; some models' code needs more.
_HEADS = (2, 4, 8)


@dataclass(frozen=True)
class Derived:
    """The findings about a model type.

    `kind_of[i]` is the number of layer `i`'s kind, `silence[kind]` what silences it.
    `mixture[kind]` is its experts, or None where it has none that surgeon understands. `titles[kind]` names a kind for
    people; `heads` is the number of a twin's heads. `seconds` is how long the analysis took.
    """

    skeleton: Skeleton
    kind_of: tuple[int, ...]
    titles: tuple[str, ...]
    silence: tuple[Silence, ...]
    mixture: tuple[Mixture | None, ...]
    heads: int
    seconds: float

    @property
    def firsts(self) -> list[int]:
        """The lowest layer of each kind."""
        return [self.kind_of.index(kind) for kind in range(len(self.titles))]

    @property
    def evidence(self) -> str:
        """The findings in one line."""
        if self.skeleton.encoder:
            kinds = f", {len(self.titles)} kinds" if len(self.titles) > 1 else ""
            return f"an encoder of {len(self.kind_of)} layers{kinds}; its controls are proven on a twin"
        found = in_words([each.values for each in self.silence])
        return f"found on a twin in {self.seconds:.1f} s: {found}"


def derive(config: Mapping[str, Any]) -> Derived:
    """Derive the findings about a config.json's model.

    Raises BadInput where no model or no stack of layers can be built.
    """
    return _derived(json.dumps(config, sort_keys=True))


@lru_cache(maxsize=8)
def _derived(kept: str) -> Derived:
    """Derive the findings about a config.json, given as JSON text. Raises BadInput where no layer is found."""
    config = json.loads(kept)
    began = time.perf_counter()
    skeleton = build(config)
    count = len(skeleton.layers)
    if count < 1:
        raise BadInput(f"config.json: {count} layers; at least 1 is needed; {OWN_CONFIG}")
    keys = described_kinds(skeleton)
    left = skips(config, skeleton)
    kind_of = numbered(list(zip(keys, left, strict=True)))
    firsts = [kind_of.index(kind) for kind in range(max(kind_of) + 1)]
    if skeleton.encoder:
        # No layer is added to an encoder.
        found, heads = dict.fromkeys(firsts, Silence({}, _NO_LAYERS, {})), _encoder_heads(config)
        mixed: dict[int, Mixture | None] = dict.fromkeys(firsts)
    else:
        found, mixed, heads = _probed(config, firsts)
    return Derived(
        skeleton=skeleton,
        kind_of=tuple(kind_of),
        titles=tuple(_title(keys[index], skeleton, index, _left_of(left[index], left)) for index in firsts),
        silence=tuple(found[index] for index in firsts),
        mixture=tuple(mixed[index] for index in firsts),
        heads=heads,
        seconds=time.perf_counter() - began,
    )


def _encoder_heads(config: Mapping[str, Any]) -> int:
    """Return the number of heads with which a twin of an encoder runs; the first to try where it never runs.

    The search for the encoder's blocks then reports why it does not run.
    """
    import torch

    for heads in _ENCODER_HEADS:
        with one_thread(), torch.no_grad(), contextlib.suppress(*LOAD_FAILURES):
            twin = twin_of(config, heads=heads)
            twin.model(input_ids=some_tokens(twin))
            return heads
    return _ENCODER_HEADS[0]


def _probed(config: Mapping[str, Any], layers: list[int]) -> tuple[dict[int, Silence], dict[int, Mixture | None], int]:
    """Return what silences these layers, their experts, and the number of heads of the twin that shows it.

    The twin has as few heads as the model's code can run with.
    """
    failed: Exception | None = None
    for heads in _HEADS:
        try:
            with one_thread():
                twin = twin_of(config, heads=heads)
                return silences(twin, layers), mixtures(twin, layers), heads
        except Exception as error:  # whatever a model's code raises on sizes that it was not written for
            failed = failed or error
    assert failed is not None
    raise BadInput(
        f"config.json: a tiny twin of this {printable(str(config.get('model_type')))} does not run"
        f" ({first_line(failed)}), so nothing can be proven of it; {OWN_CONFIG}, or update transformers"
    ) from failed


def _left_of(left: tuple[str, ...], all_left: list[tuple[str, ...]]) -> list[str]:
    """Return the modules that a layer does not quantise and some other layer does."""
    return [name for name in left if any(name not in other for other in all_left)]


def _title(key: Any, skeleton: Skeleton, index: int, left: list[str]) -> str:
    """Return the title of a kind: its type in the config, or the classes of its blocks."""
    listed = [value.strip("'") for name, value in key[1] if name.endswith(("types", "type"))]
    blocks = [type(child).__name__ for _, child in skeleton.layers[index].named_children()]
    shown = ", ".join(dict.fromkeys(listed)) or ", ".join(name for name in blocks if "Norm" not in name)
    return f"{shown}, {left[0]} not quantised" if left else shown
