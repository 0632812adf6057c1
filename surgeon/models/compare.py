"""Comparing the function of two checkpoints by the logits of both on real tokens."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from surgeon.anatomy.running import cache_argument, cache_of
from surgeon.blueprint.recipes import HEAD_BLOCK
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.weights import quantisation
from surgeon.errors import BadInput, PromiseBroken
from surgeon.models.load import attention_of, load_model, opened, running, torch_dtype

PREFILL = "prefill"
CACHED_DECODE = "cached decode"
# The same modes for a prompt with a picture in it.
PREFILL_IMAGE = "prefill, image"
CACHED_DECODE_IMAGE = "cached decode, image"

# The share of the largest logit by which two ways to compute one function may differ: some hundred units in the last
# place for float32, some ten for the narrower dtypes, because rounding errors of many layers add up.
ROUNDING = {"float64": 1e-10, "float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}

# Logits are compared in float64 a few rows at a time: about 8 MB per working copy for any vocabulary.
_CHUNK_ELEMENTS = 1_000_000
_NO_TARGET = -100
# The range of new rows for an output that has no new rows.
NO_ROWS = range(0)


@dataclass(frozen=True)
class GrownLoss:
    """The cost of `added` new vocabulary rows for the old tokens, in an output with rows that the base does not have.

    `rise` is the largest increase of the loss on an old token over all positions, in nats: log(1 + Σ e^l_new / Σ
    e^l_old), the same for every old token of a position. `bound` is log(1 + added / old). `kept`: at no position is the
    increase above the bound by more than the rounding of logits in their dtype allows, 2 ε max |l| in the exponent.
    """

    added: int
    rise: float
    bound: float
    kept: bool


@dataclass(frozen=True)
class LogitComparison:
    """The result of comparing every logit of `base` and `out` over the same tokens, in one mode.

    `tokens`: positions compared. `identical`: torch.equal on every logit. `kl`: mean KL(base || out) in nats per
    position. `top1_agreement`: share of positions with the same most probable token. `base_loss`, `out_loss`: mean
    next-token cross-entropy in nats. Sums are kept in float64; NaN counts as infinite. For an output with new tokens,
    `identical` and `max_abs_difference` compare only the rows kept from the base, and `grown` is the cost of the new
    rows. `largest` is the base's largest |logit| where they were not identical. `same` counts the positions all of
    whose logits are bit-identical; `apart` are base's and output's mean loss at the other positions (None: none of
    these has a next token). `same_before_tail`: all logits are bit-identical except those of the base's last V mod
    `HEAD_BLOCK` tokens.
    """

    mode: str
    dtype: str
    tokens: int
    identical: bool
    max_abs_difference: float
    kl: float
    top1_agreement: float
    base_loss: float
    out_loss: float
    grown: GrownLoss | None = None
    largest: float = 0.0
    same: int = 0
    apart: tuple[float, float] | None = None
    same_before_tail: bool = True

    @property
    def output(self) -> str:
        """The name of the compared output: `logits`."""
        return "logits"

    @property
    def rounded(self) -> bool:
        """Whether logits differ by no more than rounding explains between two computations of one function."""
        return self.identical or self.max_abs_difference <= ROUNDING[self.dtype] * self.largest

    @property
    def next_token(self) -> tuple[float, float, float, float]:
        """(KL divergence, top-1 agreement, base loss, output loss); all but the agreement in nats."""
        return self.kl, self.top1_agreement, self.base_loss, self.out_loss


def load_pair(
    base: CheckpointFolder | Path, out: CheckpointFolder | Path, *, dtype: str = "auto", device: str = "cpu"
) -> tuple[Any, Any]:
    """Return (base, output), loaded whole in `dtype` (auto: the base's) with the base's attention implementation.

    Each folder keeps the trust with which it was opened; for a path, its own code is refused (`load_model`). A
    quantised base whose output is not quantised is first dequantised in its own dtype, as the output's weights were,
    and then both are cast to `dtype`. Raises BadInput where the base cannot be loaded, PromiseBroken where the output
    cannot.
    """
    base, out = opened(base), opened(out, PromiseBroken)
    dequantised = quantisation(base.config) is not None and quantisation(out.config) is None
    base_model = load_model(base, dtype="auto" if dequantised else dtype, device=device)
    attention = attention_of(base_model)
    out_model = load_model(out, dtype=base_model.dtype, device=device, attention=attention, failure=PromiseBroken)
    if dequantised and dtype != "auto" and (wanted := torch_dtype(dtype)) != base_model.dtype:
        # Buffers too, which transformers would have left in float32.
        base_model, out_model = base_model.to(wanted), out_model.to(wanted)
    return base_model, out_model


def trim_logits(base: Any, out: Any, kept: Sequence[int]) -> None:
    """Register hooks by which two models are compared on the tokens that both have, `kept`, given by the base's ids.

    Input ids are then positions in `kept`, and both models return the logits of these tokens, in this order. Further
    rows of the output are dropped.
    """
    places_K = torch.tensor(kept)

    def with_old_ids(_module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Replace input ids, positions in `kept`, by the base's ids."""
        ids_BT = named["input_ids"]
        return args, named | {"input_ids": places_K.to(ids_BT.device)[ids_BT]}

    def with_kept_logits(_module: Any, _args: Any, output: Any) -> Any:
        """Reduce the base's logits to those of the kept tokens."""
        output.logits = output.logits.index_select(-1, places_K.to(output.logits.device))
        return output

    def with_first_logits(_module: Any, _args: Any, output: Any) -> Any:
        """Reduce the output's logits to its first rows, one per kept token."""
        output.logits = output.logits[..., : len(kept)]
        return output

    base.register_forward_pre_hook(with_old_ids, with_kwargs=True)
    base.register_forward_hook(with_kept_logits)
    out.register_forward_hook(with_first_logits)


def compare_models(
    base: Any,
    out: Any,
    ids: Tensor,
    *,
    device: str = "cpu",
    decode_tokens: int = 16,
    batch_size: int = 4,
    new: range = NO_ROWS,
) -> list[LogitComparison]:
    """Compare two models on `ids` (windows, window): prefill, and cached decode unless `decode_tokens` is 0.

    Prefill runs each whole window without a cache; cached decode prefills all but the last `decode_tokens` of each
    window, then feeds those one at a time. Memory in addition to the models: the logits of one batch of each. `new` are
    the rows of the output's embeddings that the base does not have.
    """
    steps = decoded_steps(ids, decode_tokens)
    dtype = str(base.dtype).removeprefix("torch.")
    results = []
    for mode in modes_of(steps):
        tally = Tally(mode, dtype, new)
        for batch_BT in torch.split(ids.to(device), batch_size):
            with torch.inference_mode():
                for logits in logits_of_both(base, out, batch_BT, mode, steps):
                    tally.add(*logits)
        results.append(tally.result())
    return results


def modes_of(steps: int) -> tuple[str, ...]:
    """Return the modes in which two models are compared: prefill, and cached decode where tokens are decoded."""
    return (PREFILL, CACHED_DECODE) if steps else (PREFILL,)


def logits_of_both(
    base: Any, out: Any, batch_BT: Tensor, mode: str, steps: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield (the base's logits, the output's, the tokens that follow), for each pass of both models in a mode."""
    if mode == PREFILL:
        yield prefilled(base, batch_BT), prefilled(out, batch_BT), next_tokens(batch_BT)
        return
    # The token that follows the prefilled part, then the token that follows each decoded one.
    targets = torch.split(next_tokens(batch_BT)[:, -steps - 1 :], 1, dim=1)
    yield from zip(decoded(base, batch_BT, steps), decoded(out, batch_BT, steps), targets, strict=True)


def compare_with_image(
    base: Any,
    out: Any,
    inputs: Mapping[str, Tensor],
    *,
    device: str = "cpu",
    decode_tokens: int = 4,
    new: range = NO_ROWS,
) -> list[LogitComparison]:
    """Compare two models on one prompt with a picture; `inputs` are the processor's output.

    Prefill, then cached decode: transformers' own generation from the same prompt, forced to the base's likeliest
    tokens. `new` are the rows of the output's embeddings that the base does not have. Raises BadInput where the base
    cannot run on it, PromiseBroken where only the output cannot.
    """
    dtype = str(base.dtype).removeprefix("torch.")
    given = {
        name: value.to(device, base.dtype) if value.is_floating_point() else value.to(device)
        for name, value in inputs.items()
    }
    before_BTV, (before_BSV, said_BS) = _with_image(base, given, decode_tokens, None)
    try:
        after_BTV, (after_BSV, _) = _with_image(out, given, decode_tokens, said_BS)
    except BadInput as error:
        raise PromiseBroken(f"with an image: {error}") from error
    ids_BT = given["input_ids"]
    prefill, decode = Tally(PREFILL_IMAGE, dtype, new), Tally(CACHED_DECODE_IMAGE, dtype, new)
    prefill.add(before_BTV, after_BTV, next_tokens(ids_BT))
    decode.add(before_BSV, after_BSV, said_BS)
    return [prefill.result(), decode.result()]


def _with_image(
    model: Any, inputs: Mapping[str, Tensor], steps: int, said_BS: Tensor | None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return the logits over a prompt with a picture, and what `generated` returns for the `steps` tokens after it."""
    with torch.inference_mode(), running(model):
        prefill_BTV = model(**inputs, use_cache=False).logits
    return prefill_BTV, generated(model, inputs, steps, said_BS)


def generated(
    model: Any, inputs: Mapping[str, Tensor], steps: int, said_BS: Tensor | None, *, cache: bool = True
) -> tuple[Tensor, Tensor]:
    """Generate `steps` tokens with transformers; return (logits (batch, steps, vocabulary), tokens (batch, steps)).

    `said_BS` are the tokens to force; None: the likeliest ones are generated. `cache`: whether to use a KV cache. All
    prompts in `inputs` have the same length.
    """
    from transformers import GenerationConfig

    length = inputs["input_ids"].shape[1]
    forced = None if said_BS is None else said_BS.tolist()
    config = GenerationConfig(
        max_new_tokens=steps,
        # No token ends the text, whatever tokens are generated.
        eos_token_id=[],
        do_sample=False,
        num_beams=1,
        use_cache=cache,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    options: dict[str, Any] = {}
    if forced is not None:
        options["prefix_allowed_tokens_fn"] = lambda row, ids: [forced[row][len(ids) - length]]
    with torch.inference_mode(), running(model):
        made = model.generate(**inputs, generation_config=config, **options)
    return torch.stack(made.logits, dim=1), made.sequences[:, length:]


def next_tokens(ids_BT: Tensor) -> Tensor:
    """Return the token that follows each position, _NO_TARGET at the last one."""
    return functional.pad(ids_BT[:, 1:], (0, 1), value=_NO_TARGET)


def decoded_steps(ids: Tensor, decode_tokens: int) -> int:
    """Return how many tokens of a window are decoded one by one: `decode_tokens`, or all but the first if fewer.

    Raises ValueError where `ids` are not windows of at least 2 tokens.
    """
    if ids.ndim != 2 or ids.shape[1] < 2:
        raise ValueError(f"ids must be (windows, window) with at least 2 tokens a window, not {tuple(ids.shape)}")
    return min(decode_tokens, ids.shape[1] - 1)


def prefilled(model: Any, ids_BT: Tensor) -> Tensor:
    """Return the logits of a whole window, computed without a cache."""
    with running(model):
        logits_BTV: Tensor = model(input_ids=ids_BT, use_cache=False).logits
    return logits_BTV


def _cached(model: Any, ids_BT: Tensor, cache: dict[str, Any]) -> Tensor:
    """Run these tokens into a cache and return the logits of the last one, (batch, 1, vocabulary).

    `cache` holds the model's cache by argument name; where it is empty, it gets the cache that the model makes.
    """
    keeps = "logits_to_keep" in inspect.signature(getattr(model, "forward", model)).parameters
    fewer = {"logits_to_keep": 1} if keeps else {}
    with running(model):
        output = model(input_ids=ids_BT, use_cache=True, **cache, **fewer)
    if (kept := cache_of(output)) is not None:
        cache[cache_argument(model)] = kept
    logits_BTV: Tensor = output.logits
    # A copy where there are several, so that logits of the whole prefix are freed before the first step.
    return logits_BTV if logits_BTV.shape[1] == 1 else logits_BTV[:, -1:].clone()


def decoded(model: Any, ids_BT: Tensor, steps: int) -> Iterator[Tensor]:
    """Yield the logits (batch, 1, vocabulary) at the end of the prefilled part, then after each cached step."""
    from transformers import DynamicCache

    cache: dict[str, Any] = {}
    # Some models use only a cache of their own (MiniMax).
    if getattr(model, "_supports_default_dynamic_cache", lambda: True)():
        with running(model):
            cache[cache_argument(model)] = DynamicCache(config=model.config)
    yield _cached(model, ids_BT[:, :-steps], cache)
    for step_B1 in torch.split(ids_BT[:, -steps:], 1, dim=1):
        yield _cached(model, step_B1, cache)


class Tally:
    """Running sums over batches of logits; `result` turns them into a LogitComparison."""

    def __init__(self, mode: str, dtype: str, new: range) -> None:
        self.mode, self.dtype = mode, dtype
        self.tokens = self.targets = self.agreed = 0
        self.identical = self.same_before_tail = True
        self.difference = self.kl = self.base_loss = self.out_loss = 0.0
        self.new, self.old = new, 1
        self.rise, self.within = 0.0, True
        self.largest = 0.0
        self.same = self.apart_targets = 0
        self.apart_base = self.apart_out = 0.0

    def add(self, base_BTV: Tensor, out_BTV: Tensor, targets_BT: Tensor) -> None:
        """Add the logits of the same positions of both models; `targets_BT` are the tokens that follow them.

        Raises PromiseBroken where the output's logits have another shape, BadInput where the base's do not fit the
        tokens.
        """
        rows = max(base_BTV.shape[-1], self.new.stop)
        if base_BTV.shape[:-1] != out_BTV.shape[:-1] or rows != out_BTV.shape[-1]:
            expected = f"{rows} tokens" if self.new else "the same vocabulary"
            raise PromiseBroken(
                f"the output gives logits of shape {tuple(out_BTV.shape)}, the base {tuple(base_BTV.shape)};"
                f" expected {expected}"
            )
        if base_BTV.shape[:-1] != targets_BT.shape:
            raise BadInput(
                f"the base gives logits for {base_BTV.shape[1]} positions of a text of {targets_BT.shape[1]} tokens"
                f" ({self.mode}), so they cannot be compared token by token; is it a text decoder?"
            )
        base_NV, out_NV, targets_N = base_BTV.flatten(0, 1), out_BTV.flatten(0, 1), targets_BT.flatten()
        rows = max(1, _CHUNK_ELEMENTS // base_NV.shape[1])
        for base_CV, out_CV, targets_C in zip(
            torch.split(base_NV, rows), torch.split(out_NV, rows), torch.split(targets_N, rows), strict=True
        ):
            self._add_rows(base_CV, out_CV, targets_C)

    def _add_rows(self, base_CV: Tensor, out_CV: Tensor, targets_C: Tensor) -> None:
        """Add the logits of both models at the same positions, and the tokens that follow.

        Raises BadInput where the base's logits are NaN.
        """
        if base_CV.isnan().any():
            raise BadInput(
                f"the base computes NaN logits in {self.dtype} ({self.mode}), so there is no function to"
                " preserve; try another dtype"
            )
        self.tokens += len(base_CV)
        self.targets += int((targets_C != _NO_TARGET).sum())
        base_log_CV = _log_probabilities(base_CV)
        base_loss = _loss(base_log_CV, targets_C)
        self.base_loss += base_loss
        if torch.equal(base_CV, out_CV):
            self.agreed += len(base_CV)
            self.same += len(base_CV)
            self.out_loss += base_loss
            return
        old = base_CV.shape[1]
        # Only the base's tokens; new tokens take their share of every probability.
        out_log_CV = _log_probabilities(out_CV)[:, :old]
        if self.new:
            self._add_rise(base_CV, out_CV)
        self.agreed += int((base_CV.argmax(-1) == out_CV.argmax(-1)).sum())
        # Padding rows of the base that new tokens now use are taken from the base: they do not count as a difference.
        first, stop = self.new.start, self.new.stop
        out_CV = torch.cat([out_CV[:, :first], base_CV[:, first:stop], out_CV[:, stop:old]], 1)
        self.identical = self.identical and torch.equal(base_CV, out_CV)
        tail = old - old % HEAD_BLOCK
        self.same_before_tail = self.same_before_tail and torch.equal(base_CV[:, :tail], out_CV[:, :tail])
        self.largest = max(self.largest, _finite(base_CV.abs().max()))
        wide = _wide(base_CV) - _wide(out_CV)
        apart_CV = torch.where(base_CV == out_CV, 0.0, wide.abs())
        self.difference = max(self.difference, _finite(apart_CV.nan_to_num(nan=math.inf).max()))
        # A token of probability zero under the base adds nothing, for any probability under the output.
        terms_CV = torch.where(base_log_CV > -math.inf, base_log_CV.exp() * (base_log_CV - out_log_CV), 0.0)
        self.kl += _finite(terms_CV.sum())
        self.out_loss += _loss(out_log_CV, targets_C)
        same_C = (base_CV == out_CV).all(dim=-1)
        self.same += int(same_C.sum())
        rest_C = targets_C.masked_fill(same_C.to(targets_C.device), _NO_TARGET)
        self.apart_targets += int((rest_C != _NO_TARGET).sum())
        self.apart_base += _loss(base_log_CV, rest_C)
        self.apart_out += _loss(out_log_CV, rest_C)

    def _add_rise(self, base_CV: Tensor, out_CV: Tensor) -> None:
        """Record the largest rise of the loss on old tokens at these positions because of new ones, and if it is
        bounded.
        """
        rise_C = torch.logsumexp(_wide(out_CV), -1) - torch.logsumexp(_wide(base_CV), -1)
        slack_C = 2 * torch.finfo(out_CV.dtype).eps * _wide(out_CV).abs().amax(-1).clamp(min=1.0)
        most_C = torch.log1p(len(self.new) / base_CV.shape[1] * torch.exp(slack_C))
        self.rise = max(self.rise, _finite(rise_C.max()))
        self.within = self.within and bool((rise_C <= most_C).all())
        self.old = base_CV.shape[1]

    def result(self) -> LogitComparison:
        """Return the comparison of everything added so far."""
        return LogitComparison(
            mode=self.mode,
            dtype=self.dtype,
            tokens=self.tokens,
            identical=self.identical,
            max_abs_difference=self.difference,
            # Rounding may leave a sum of KL terms slightly below zero.
            kl=max(0.0, self.kl / self.tokens),
            top1_agreement=self.agreed / self.tokens,
            base_loss=self.base_loss / self.targets,
            out_loss=self.out_loss / self.targets,
            grown=GrownLoss(len(self.new), self.rise, math.log1p(len(self.new) / self.old), self.within)
            if self.new
            else None,
            largest=self.largest,
            same=self.same,
            same_before_tail=self.same_before_tail,
            apart=(self.apart_base / self.apart_targets, self.apart_out / self.apart_targets)
            if self.apart_targets
            else None,
        )


def _wide(values: Tensor) -> Tensor:
    """Return `values` in float64, on the CPU where the device has no float64."""
    return (values.cpu() if values.device.type == "mps" else values).double()


def _log_probabilities(logits_CV: Tensor) -> Tensor:
    """Return the log probabilities of logits in float64."""
    return functional.log_softmax(_wide(logits_CV), dim=-1)


def _loss(log_CV: Tensor, targets_C: Tensor) -> float:
    """Return the next-token cross-entropy in nats, summed over positions that have a next token."""
    targets_C = targets_C.to(log_CV.device)
    kept_C = targets_C != _NO_TARGET
    return _finite(-log_CV[kept_C].gather(1, targets_C[kept_C, None]).sum())


def _finite(value: Tensor) -> float:
    """Return a number; infinity in place of NaN."""
    number = float(value)
    return math.inf if math.isnan(number) else number
