"""What is summed over a sequence up to each token, kept in a cache beside keys and values.

So a token's choice that depends on all tokens before it is the same in one forward and in several over a cache, and
in a row of several documents the same as alone. Rows whose documents cannot be known are refused with a ValueError.

Shapes: B batch, T tokens of this forward, W tokens of the row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import CacheLayerMixin

from .losses import Flow, full_mask, shown_by, valid_tokens


class PrefixCache(CacheLayerMixin):
    """Values at every token so far, each B T ·, by name; one more layer of a cache, of one `owner`.

    As a layer it is reordered, repeated, cropped and selected together with keys and values.
    """

    is_croppable = True
    supports_early_init = False

    def __init__(self, owner: str, first: Any = None) -> None:
        super().__init__()
        self.owner = owner
        # As the first layer's, so that masks are made for that one and not for this: beside a static layer, a mask that
        # is left out as nothing is padded would show tokens the places that are still empty.
        self.is_sliding = bool(getattr(first, "is_sliding", False))
        self.is_compileable = bool(getattr(first, "is_compileable", False))
        self.held: dict[Any, Tensor] = {}
        self.keys = self.values = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare."""

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Never called by a layer of the model that runs. Raises NotImplementedError."""
        raise NotImplementedError(
            "a layer writes keys where the cache has no place for them: this model's forward runs more layers than "
            "config.num_hidden_layers says, so its first layers cannot draft for it (`assistant_early_exit`); use "
            "another draft model"
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As a layer that keeps everything."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens seen."""
        return next((held.shape[1] for held in self.held.values()), 0)

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def get_max_cache_shape(self) -> int:
        """No limit (the name before transformers 5.20)."""
        return -1

    def last(self, name: Any) -> Tensor | None:
        """The value at the last token, B 1 ·; None before the first."""
        return self.held[name][:, -1:] if self.held else None

    def append(self, found: Mapping[Any, Tensor]) -> None:
        """Take what a forward found for its tokens."""
        if self.held:
            self.held = {name: torch.cat([self.held[name], new], dim=1) for name, new in found.items()}
        else:
            self.held = dict(found)

    def _map(self, change: Any) -> None:
        self.held = {name: change(held) for name, held in self.held.items()}

    def reset(self) -> None:
        """Forget everything."""
        self.held = {}

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequences in another order."""
        self._map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence `repeats` times."""
        self._map(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Some of the sequences."""
        self._map(lambda x: x[indices])

    def crop(self, tokens: int) -> None:
        """Forget the last -`tokens`, for 0 none; a positive number, as older versions gave it, is how many to keep."""
        if tokens:
            self._map(lambda x: x[:, :tokens])

    def offload(self) -> None:
        """Small: stays where it is."""

    def prefetch(self) -> None:
        """Stays where it is."""


def prefix_in(cache: Any, owner: str, *, asked: bool = True) -> PrefixCache | None:
    """What `owner` kept of earlier tokens in a cache; ValueError where it is `asked` for and those were not its own."""
    held = (layer for layer in getattr(cache, "layers", ()) if isinstance(layer, PrefixCache))
    found = next((layer for layer in held if layer.owner == owner), None)
    if found is None and asked and cache is not None and not torch.compiler.is_compiling():
        seen = int(cache.get_seq_length())
        if seen:
            raise ValueError(
                f"the cache holds {seen} tokens that this model did not route; pass one that its own forward filled"
            )
    return found


def keep_prefix(cache: Any, past: PrefixCache | None, owner: str, found: Mapping[Any, Tensor]) -> None:
    """Put what a forward found for its tokens behind what `past` holds (None: into a new layer of the cache)."""
    if not found or cache is None:
        return
    if past is None:
        past = PrefixCache(owner, cache.layers[0])
        cache.layers.append(past)
    past.append(found)


def latest(here: Tensor) -> Tensor:
    """The place, counted from 1, of the last token up to each where `here` (B T, bool) is true; 0: none: B T."""
    # As `cummax` of places, which ONNX lacks.
    count = here.cumsum(dim=1)
    places = torch.arange(1, here.shape[1] + 1, device=here.device)
    ordered = torch.where(here, places, here.shape[1] + 1).sort(dim=1).values
    return torch.where(count > 0, ordered.gather(1, (count - 1).clamp(min=0)), 0)


class Reading:
    """Sums over documents in one forward: which tokens are no padding, where documents begin, what came before.

    `valid` and `begins` are B T, bool; `begins` None: in this forward no document begins but where a row does.
    """

    def __init__(self, valid: Tensor, begins: Tensor | None = None, past: PrefixCache | None = None) -> None:
        self.valid = valid
        self.past = past
        # The place, from 1, at which each token's document begins; 0: before this forward.
        self.begin = None if begins is None else latest(begins)

    def before(self, name: Any) -> Tensor | None:
        """What was kept of a row's last token before this forward, B 1 ·; None: nothing came before."""
        return None if self.past is None else self.past.last(name)

    def since_begin(self, name: Any, values: Tensor) -> Tensor:
        """Sums over each token's document up to it, of values B T ·; begun at what is kept as `name`."""
        total, before = values.cumsum(dim=1), self.before(name)
        carried = total if before is None else total + before
        if self.begin is None:
            return carried
        begin = self.begin.to(values.device).unsqueeze(-1)
        outside = (total - values).gather(1, (begin - 1).clamp(min=0).expand_as(values))
        return torch.where(begin > 0, total - outside, carried)


def read_rows(
    flow: Flow, inputs: Tensor, attention_mask: Any, cache: Any, *, owner: str, what: str
) -> tuple[Tensor, Tensor | None, PrefixCache | None]:
    """What a `Reading` is made of, for the tokens that go in: valid, begins and past.

    A document begins where `position_ids` (B T) are 0 or, of several dimensions, where the first, time, goes back, and
    where a 4-D mask hides a token from the next. ValueError where something came before that nothing tells of: `what`
    says who reads it.
    """
    if flow.packed:
        raise several_in_a_row(what)
    past = prefix_in(cache, owner)
    seen = 0 if cache is None else cache.get_seq_length()
    valid = valid_tokens(attention_mask, torch.Size(inputs.shape[:2]), inputs.device, seen)
    _check_positions(flow.positions, valid, past, what)
    begins = _begins(flow.positions, valid)
    apart = _apart(attention_mask, valid, seen)
    if begins is not None and apart is not None:
        return valid, begins | apart, past
    return valid, apart if begins is None else begins, past


def several_in_a_row(what: str) -> ValueError:
    """What is said where a row holds sequences of which `what` cannot tell where they begin."""
    return ValueError(
        f"several sequences stand in one row, as in continuous batching, but {what}; give each sequence a row of its"
        " own"
    )


def check_one_document(positions: Tensor | None, mask: Any, valid: Tensor, what: str) -> None:
    """ValueError where a row holds several documents, for `what` takes whole rows.

    So it is where positions go back, or a 4-D mask shows a token not all that it shows others.
    """
    if torch.compiler.is_compiling():
        return
    if positions is not None:
        positions = (positions if positions.dim() == 2 else positions[0]).to(valid.device).expand(valid.shape)
        before = positions.gather(1, (_previous(valid) - 1).clamp(min=0))
        if bool((valid & (_previous(valid) > 0) & (positions <= before)).any()):
            raise several_in_a_row(what)
    if isinstance(mask, Tensor) and mask.dim() == 4:
        shown = shown_by(mask).expand(valid.shape[0], -1, -1)
        if bool(((shown != valid.unsqueeze(1)) & valid.unsqueeze(-1)).any()):
            raise several_in_a_row(what)


def _previous(valid: Tensor) -> Tensor:
    """The place, counted from 1, of the nearest token before each that is no padding; 0: none in this forward: B T."""
    return F.pad(latest(valid)[:, :-1], (1, 0))


def _check_positions(positions: Tensor | None, valid: Tensor, past: PrefixCache | None, what: str) -> None:
    """ValueError where tokens came before these, by their positions, of which no cache says what they gave."""
    if positions is None or positions.dim() != 2 or torch.compiler.is_compiling():
        return
    if past is not None and valid.shape[1] == 1:
        return
    positions, previous = positions.to(valid.device).expand(valid.shape), _previous(valid)
    follows = positions.gather(1, (previous - 1).clamp(min=0)) + 1
    # The first ones follow what a cache holds, or begin.
    follows = torch.where(previous > 0, follows, positions if past is not None else 0)
    odd = valid & (positions != follows) & (positions != 0)
    if bool(odd.any()):
        row, place = odd.nonzero()[0].tolist()
        raise ValueError(
            f"position_ids of row {row} {'jump to' if int(previous[row, place]) else 'begin at'}"
            f" {int(positions[row, place])}, and no cache holds the tokens before: {what}, and must see a document from"
            " its first token on; pass a cache that this model's own forward filled (other caches cannot serve it)"
        )


def _begins(positions: Tensor | None, valid: Tensor) -> Tensor | None:
    """Where a document begins by its positions: B T, bool; None where none are given."""
    if positions is None:
        return None
    if positions.dim() == 2:
        begins = positions == 0
    else:
        time = positions[0]
        begins = F.pad(time[:, 1:] < time[:, :-1], (1, 0))
    return begins.to(valid.device).expand(valid.shape) & valid


def _apart(attention_mask: Any, valid: Tensor, seen: int | Tensor) -> Tensor | None:
    """Where a 4-D mask hides from a token the nearest before it that is no padding: B T, bool; None for other masks."""
    mask = full_mask(attention_mask)
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        return None
    shown, previous = shown_by(mask).expand(valid.shape[0], -1, -1).to(valid.device), _previous(valid)
    length = shown.shape[-1]
    offset = seen if valid.shape[1] != length else 0
    columns = torch.arange(length, device=valid.device)
    here = (previous - 1 + offset).clamp(min=0, max=length - 1).unsqueeze(-1)
    sees = torch.where(previous > 0, shown.gather(-1, here).squeeze(-1), (shown & (columns < offset)).any(dim=-1))
    # Of places that a window has cut off nothing is known.
    known = torch.arange(valid.shape[1], device=valid.device) + offset < length
    return valid & ~sees & known
