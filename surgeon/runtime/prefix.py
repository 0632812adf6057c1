"""Running sums over each document up to each token, kept in the first entry of a KV cache next to its keys and values.

With them, a choice that depends on all earlier tokens of a document is the same in one forward, in several forwards
over a cache, and in a packed row of several documents. Where the documents of a row cannot be known, ValueError is
raised.

Shapes: B batch, T tokens of this forward, W tokens of the row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import StaticLayer

from .graft import Flow
from .losses import valid_tokens

# What one graft keeps in a cache: values at the latest tokens, each B T ·, by name.
Kept = dict[Any, Tensor]

# A bound that no sum reaches; the rounds of `clipped` for 2^20 tokens, used where a graph does not know the length.
NO_BOUND = 2**60
_ROUNDS = 20


def kept_in(cache: Any, owner: str, *, asked: bool = True) -> Kept | None:
    """Return what the graft `owner` kept of earlier tokens in a cache; None: nothing.

    Raises ValueError where `asked` is true and the cache holds tokens of which `owner` kept nothing (not checked while
    a compiler records).
    """
    layers = _entries(cache)
    found: Kept | None = getattr(layers[0], "kept", {}).get(owner) if layers else None
    if found is None and asked and cache is not None and not torch.compiler.is_compiling():
        seen = tokens_in(cache)
        if cache.has_previous_state() if seen is None else int(seen):
            held = "tokens" if seen is None else f"{int(seen)} tokens"
            raise ValueError(
                f"the cache holds {held} that this model did not route; pass one that its own forward filled"
            )
    return found


def tokens_in(cache: Any) -> Any:
    """Return the number of tokens in a cache, 0 for None; None where no entry counts them (linear attention alone)."""
    entries = _entries(cache)
    if entries and not any(hasattr(entry, "get_seq_length") for entry in entries):
        return None
    return 0 if cache is None else cache.get_seq_length()


def _entries(cache: Any) -> Any:
    """Return a cache's entries, one for each layer; the self-attention's where the cache has cross-attention too."""
    return getattr(getattr(cache, "self_attention_cache", cache), "layers", ())


def keep(cache: Any, owner: str, found: Mapping[Any, Tensor], tokens: int = NO_BOUND) -> None:
    """Append values of this forward's tokens to what `owner` keeps in the cache's first entry.

    Only the last `tokens` tokens' values stay, in a static cache only the last token's. Does nothing without a cache or
    values.
    """
    if not found or cache is None:
        return
    entry, *others = _entries(cache)
    if not hasattr(entry, "kept"):
        entry.kept = {}
        for name in ("reset", *_CHANGES):
            if hasattr(entry, name):
                # On the instance, as the class is transformers' own. A copied or pickled entry gets its own.
                setattr(entry, name, partial(_with_kept, entry, name))
    if any(isinstance(layer, StaticLayer) for layer in (entry, *others)):
        # Of a fixed size, as everything in a static cache.
        tokens = 1
    past = entry.kept.get(owner, {})
    entry.kept[owner] = {}
    for name, new in found.items():
        earlier = [past[name][:, new.shape[1] - tokens :]] if name in past and new.shape[1] < tokens else []
        # A copy, so that no storage of more tokens stays.
        entry.kept[owner][name] = torch.cat([*earlier, new[:, -tokens:]], dim=1)


def _with_kept(entry: Any, name: str, *given: Any) -> Any:
    """Apply the cache operation `name` to an entry's keys and values and to what is kept next to them."""
    held = {} if name == "reset" else entry.kept
    held = {owner: {n: _CHANGES[name](entry, kept, *given) for n, kept in own.items()} for owner, own in held.items()}
    made = getattr(type(entry), name)(entry, *given)
    # An owner whose tokens a crop has dropped keeps nothing.
    entry.kept = {owner: own for owner, own in held.items() if all(kept.shape[1] for kept in own.values())}
    return made


def _cropped(entry: Any, kept: Tensor, tokens: int) -> Tensor:
    """Return kept values, B T ·, without those of the last -`tokens` tokens.

    0: drop none. Positive, as in older versions: keep the first `tokens`. Raises ValueError where tokens stay of which
    nothing is kept.
    """
    # An entry of linear attention does not count tokens.
    seen = getattr(entry, "get_seq_length", lambda: NO_BOUND)()
    dropped = -tokens if tokens <= 0 else max(0, seen - tokens)
    if kept.shape[1] <= dropped < seen:
        raise ValueError(
            f"a crop drops {dropped} tokens of the cache, and its sums are kept for the last {kept.shape[1]} tokens;"
            " crop fewer, or fill a new cache"
        )
    return kept[:, : max(0, kept.shape[1] - dropped)]


_CHANGES: dict[str, Callable[..., Tensor]] = {
    "reorder_cache": lambda _, kept, order: kept.index_select(0, order.to(kept.device)),
    "batch_repeat_interleave": lambda _, kept, repeats: kept.repeat_interleave(repeats, dim=0),
    "batch_select_indices": lambda _, kept, rows: kept[rows],
    "crop": _cropped,
}


def shown_by(mask: Tensor) -> Tensor:
    """Return which tokens of the row a 4-D mask shows each token, the same for all heads: B T W, bool."""
    return mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] >= 0


def latest(here: Tensor) -> Tensor:
    """Return for each token the place of the last token up to it where `here` (B T, bool) is true: B T.

    Places are counted from 1; 0: `here` is true nowhere so far.
    """
    # This equals `cummax` of the places, which ONNX lacks.
    count = here.cumsum(dim=1)
    places = torch.arange(1, here.shape[1] + 1, device=here.device)
    ordered = torch.where(here, places, here.shape[1] + 1).sort(dim=1).values
    return torch.where(count > 0, ordered.gather(1, (count - 1).clamp(min=0)), 0)


class Reading:
    """Running sums over documents in one forward.

    `valid` (B T, bool): which tokens are no padding. `begins` (B T, bool): at which tokens a document begins; None:
    only where a row begins. `past`: what was kept of earlier tokens.
    """

    def __init__(self, valid: Tensor, begins: Tensor | None = None, past: Kept | None = None) -> None:
        self.valid = valid
        self.past = past
        # The place, counted from 1, at which each token's document begins; 0: before this forward.
        self.begin = None if begins is None else latest(begins)

    def before(self, name: Any) -> Tensor | None:
        """Return the kept values `name` of each row's last token before this forward, B 1 ·; None: no earlier token."""
        return None if self.past is None else self.past[name][:, -1:]

    def since_begin(self, name: Any, values: Tensor) -> Tensor:
        """Return for each token the sum of `values` (B T ·) over its document up to it: B T ·.

        A document that began in an earlier forward continues from the sum kept as `name`.
        """
        total, before = values if values.shape[1] == 1 else values.cumsum(dim=1), self.before(name)
        carried = total if before is None else total + before.to(values.device)
        if self.begin is None:
            return carried
        begin = self.begin.to(values.device).unsqueeze(-1)
        outside = (total - values).gather(1, (begin - 1).clamp(min=0).expand_as(values))
        return torch.where(begin > 0, total - outside, carried)

    def clipped(self, name: Any, steps: Tensor, most: Tensor | int) -> Tensor:
        """Return s after each token of its document, by s ← min(max(s + step, 0), most): B T · for integer steps B T ·.

        s begins at zero; in a document that began in an earlier forward it continues from the s kept as `name`.
        Two functions x → min(max(x + shift, low), high) compose to a function of the same form, so that a parallel scan
        over all prefixes takes log₂ T rounds (Hillis and Steele 1986). Integers give the same result in any order.
        """
        length = steps.shape[1]
        high = torch.zeros_like(steps) + most
        low = torch.zeros_like(steps)
        first = torch.minimum(torch.maximum(steps, low), high)
        if self.begin is not None:
            # A document begins at zero, whatever came before it.
            places = torch.arange(1, length + 1, device=steps.device)
            begins = (self.begin.to(steps.device) == places).unsqueeze(-1)
            low, high = torch.where(begins, first, low), torch.where(begins, first, high)
        padding = ~self.valid.to(steps.device).unsqueeze(-1)
        shift = steps.masked_fill(padding, 0)
        low, high = low.masked_fill(padding, -NO_BOUND), high.masked_fill(padding, NO_BOUND)
        for nth in range((length - 1).bit_length() if isinstance(length, int) else _ROUNDS):
            earlier = [
                F.pad(each, (0, 0, 2**nth, 0), value=value)[:, :length]
                for each, value in ((shift, 0), (low, -NO_BOUND), (high, NO_BOUND))
            ]
            below, above = (torch.minimum(torch.maximum(each + shift, low), high) for each in earlier[1:])
            shift, low, high = earlier[0] + shift, below, above
        before = self.before(name)
        return torch.minimum(torch.maximum(shift if before is None else before + shift, low), high)


def read_rows(
    flow: Flow, inputs: Tensor, attention_mask: Any, cache: Any, *, owner: str, what: str
) -> tuple[Tensor, Tensor | None, Kept | None]:
    """Return the arguments of a `Reading` for this forward's tokens: valid, begins and past.

    A document begins where `position_ids` (B T) are 0; where those of several dimensions decrease in the first, time;
    and where a 4-D mask hides a token from the next one. Raises ValueError where earlier tokens exist that no cache
    describes. `owner` is the graft, `what` the reason in the message why it must know them.
    """
    if flow.packed:
        raise several_in_a_row(what)
    past = kept_in(cache, owner)
    seen = tokens_in(cache)
    valid = valid_tokens(attention_mask, torch.Size(inputs.shape[:2]), inputs.device, seen)
    if not (isinstance(attention_mask, Tensor) and attention_mask.shape == inputs.shape[:2]):
        # A 2-D mask of exactly these tokens shows that no token precedes them, whatever their positions.
        _check_positions(flow.positions, valid, past, what)
    begins = _begins(flow.positions, valid)
    apart = _apart(attention_mask, valid, 0 if seen is None else seen)
    if begins is not None and apart is not None:
        return valid, begins | apart, past
    return valid, apart if begins is None else begins, past


def several_in_a_row(what: str) -> ValueError:
    """Return the error for a row of several sequences; `what` is the reason why their beginnings must be known."""
    return ValueError(
        f"several sequences stand in one row, as in continuous batching, but {what}; give each sequence a row of its"
        " own"
    )


def check_one_document(positions: Tensor | None, mask: Any, valid: Tensor, what: str) -> None:
    """Raise ValueError where a row holds several documents; `what` is the reason in the message.

    It does where positions do not ascend, or where a 4-D mask shows a token anything but all tokens without padding.
    """
    if torch.compiler.is_compiling():
        return
    if positions is not None:
        positions = (positions if positions.dim() == 2 else positions[0]).to(valid.device).expand(valid.shape)
        before = positions.gather(1, (previous(valid) - 1).clamp(min=0))
        if bool((valid & (previous(valid) > 0) & (positions <= before)).any()):
            raise several_in_a_row(what)
    if isinstance(mask, Tensor) and mask.dim() == 4:
        shown = shown_by(mask).expand(valid.shape[0], -1, -1)
        if bool(((shown != valid.unsqueeze(1)) & valid.unsqueeze(-1)).any()):
            raise several_in_a_row(what)


def previous(valid: Tensor) -> Tensor:
    """Return for each token the place of the nearest earlier token that is no padding: B T.

    Places are counted from 1; 0: there is none in this forward.
    """
    return F.pad(latest(valid)[:, :-1], (1, 0))


def _check_positions(positions: Tensor | None, valid: Tensor, past: Kept | None, what: str) -> None:
    """Raise ValueError where positions show earlier tokens of a document that no cache describes."""
    if positions is None or positions.dim() != 2 or torch.compiler.is_compiling():
        return
    if past is not None and valid.shape[1] == 1:
        return
    positions, place = positions.to(valid.device).expand(valid.shape), previous(valid)
    follows = positions.gather(1, (place - 1).clamp(min=0)) + 1
    # A row's first token may have any position after a cache, else only 0.
    follows = torch.where(place > 0, follows, positions if past is not None else 0)
    odd = valid & (positions != follows) & (positions != 0)
    if bool(odd.any()):
        row, token = odd.nonzero()[0].tolist()
        raise ValueError(
            f"position_ids of row {row} {'jump to' if int(place[row, token]) else 'begin at'}"
            f" {int(positions[row, token])}, and no cache holds the tokens before: {what}, and must see a document from"
            " its first token on; pass a cache that this model's own forward filled (other caches cannot serve it)"
        )


def _begins(positions: Tensor | None, valid: Tensor) -> Tensor | None:
    """Return where a document begins according to position ids: B T, bool; None where no ids are given."""
    if positions is None:
        return None
    if positions.dim() == 2:
        begins = positions == 0
    else:
        time = positions[0]
        begins = F.pad(time[:, 1:] < time[:, :-1], (1, 0))
    return begins.to(valid.device).expand(valid.shape) & valid


def _apart(mask: Any, valid: Tensor, seen: int | Tensor) -> Tensor | None:
    """Return from which tokens a 4-D mask hides the nearest earlier token that is no padding: B T, bool.

    None for other masks.
    """
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        return None
    shown, place = shown_by(mask).expand(valid.shape[0], -1, -1).to(valid.device), previous(valid)
    length = shown.shape[-1]
    offset = seen if valid.shape[1] != length else 0
    columns = torch.arange(length, device=valid.device)
    here = (place - 1 + offset).clamp(min=0, max=length - 1).unsqueeze(-1)
    sees = torch.where(place > 0, shown.gather(-1, here).squeeze(-1), (shown & (columns < offset)).any(dim=-1))
    # Nothing is known of tokens whose column a sliding window has cut off.
    known = torch.arange(valid.shape[1], device=valid.device) + offset < length
    return valid & ~sees & known
