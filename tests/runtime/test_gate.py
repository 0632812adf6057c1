"""A domain gate: closed, the output is the base's to the bit, whatever what it switches became; and how it decides."""

from __future__ import annotations

import copy
import itertools
import pickle
import sys
import threading
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.utils.logging import warning_once

from surgeon.errors import BadInput
from surgeon.runtime.gate import DomainGate, Gating
from surgeon.runtime.gate_rules import GateRules, GateSpec
from surgeon.runtime.graft import cache_in
from surgeon.training.gate_fitting import scores
from tests import tiny
from tests.caches import CACHE
from tests.runtime.grafting import (
    adapters,
    control,
    everything,
    experts,
    gate,
    gated,
    grafted,
    perturbed,
    read_from,
    routed,
    states,
    tokens,
)
from tests.runtime.test_born import left_padded, prefill_and_decode


def halves(model: Any) -> torch.Tensor:
    """Let the gate open in the midst of `left_padded` ids; where it then is in a forward on them."""
    domain_gate: Any = next(module for module in model.modules() if hasattr(module, "threshold"))
    ids, mask = left_padded()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    flow = _flow(model)
    with torch.no_grad():
        model(ids, attention_mask=mask, position_ids=positions, surgery_flow=flow, use_cache=False)
        found = scores(domain_gate, flow.gating, flow.gating.evidence).masked_fill(mask == 0, float("-inf"))
        # Half of what scores rise to lies above it.
        rises = found.cummax(1).values[mask.bool()].unique()
        domain_gate.threshold.fill_(float(rises[len(rises) // 2 - 1 : len(rises) // 2 + 1].mean()))
        flow = _flow(model)
        model(ids, attention_mask=mask, position_ids=positions, surgery_flow=flow, use_cache=False)
    return flow.on


def _flow(model: Any) -> Any:
    return sys.modules[type(model).__module__].Flow()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_tokens_before_it_opens_have_the_bases_logits(family: str, dtype: str) -> None:
    """Prefill and cached decoding of a padded batch; branches, adapters, slots, control states, an inserted layer."""
    base = tiny.model(family, dtype=dtype)
    ids, mask = left_padded()
    native = prefill_and_decode(base, ids, mask)
    for surgery in (gated(everything()), gate()):
        model = perturbed(grafted(family, surgery, base=base, dtype=dtype))
        on = halves(model)
        assert on.any() and not on[mask.bool()].all()
        found = prefill_and_decode(model, ids, mask)
        for step, (logits, expected) in enumerate(zip(found, native, strict=True)):
            here = slice(None) if step == 0 else slice(9 + step, 10 + step)
            same = (logits == expected).all(dim=-1)
            # A padding token sees what it likes; nobody sees it.
            assert same[~on[:, here] & mask[:, here].bool()].all()
            assert not same[on[:, here]].any()
        with model.grafts(enabled=False):
            for logits, expected in zip(prefill_and_decode(model, ids, mask), native, strict=True):
                assert torch.equal(logits, expected)


def test_what_leaves_nothing_for_later_tokens_is_skipped_while_all_are_closed() -> None:
    """Adapters and routed experts; never where a gradient is asked for, a row is open or all is recorded."""
    base, ids = tiny.model("llama"), tokens()
    model = perturbed(grafted("llama", gated(routed(layers=(0, 3)) | adapters(layers=(1, 4))), base=base))
    domain_gate: Any = next(module for module in model.modules() if hasattr(module, "threshold"))
    # Of the code that ships, not of ours.
    added = [module for module in model.modules() if type(module).__name__ in ("GatedAdapter", "RoutedExperts")]
    calls: list[Any] = []
    for module in added:
        module.register_forward_hook(lambda *given: calls.append(given[0]))

    def called(threshold: float, **given: Any) -> int:
        calls.clear()
        domain_gate.threshold.fill_(threshold)
        logits = model(ids, use_cache=False, **given).logits
        assert (threshold < 100) != torch.equal(logits, base(ids).logits)
        return len(calls)

    with torch.no_grad():
        assert len(added) == 4 and called(100.0) == 0 and called(0.0) == 4
        whole = _flow(model)
        whole.records_choices = True
        assert called(100.0, surgery_flow=whole) == 4
        flow = _flow(model)
        model(ids, use_cache=False, surgery_flow=flow)
        highest = scores(domain_gate, flow.gating, flow.gating.evidence).amax(1).sort().values
        assert highest[0] < highest[1] and called(float(highest.mean())) == 4
    assert called(100.0) == 4


def by_token(model: Any) -> tuple[list[int], list[int]]:
    """Let single tokens open and close the gate; ids that close it, and ids that open it."""
    domain_gate: Any = next(module for module in model.modules() if hasattr(module, "threshold"))
    ids = torch.arange(3, 100)[:, None]
    flow = _flow(model)
    with torch.no_grad():
        model(ids, surgery_flow=flow, use_cache=False)
        found = scores(domain_gate, flow.gating, flow.gating.evidence).flatten()
        domain_gate.threshold.fill_(float(found.median()))
    order = (found.argsort() + 3).tolist()
    return order[:12], order[-12:]


# Of rows that are closed (c) or open (o), pieces of so many tokens; between them what is done to the cache.
_STEPS: tuple[Any, ...] = (
    *(("c", 5), ("c", 1), ("batch_repeat_interleave", 2), ("c", 1), ("reorder_cache", torch.tensor([1, 0, 3, 2]))),
    *(("c", 2), ("crop", -1), ("pickle",), ("c", 1), ("o", 2), ("c", 3), ("reorder_cache", torch.tensor([3, 1, 2, 0]))),
    *(("c", 1), ("copy",), ("batch_select_indices", torch.tensor([2, 0])), ("c", 1), ("o", 1), ("c", 1)),
)


def run_through(model: Any, closed: list[int], opened: list[int], *, spares: bool, padded: bool) -> Any:
    """Logits of every step, the cache behind the last one, and how often attention that was added ran while closed."""
    drawn, cache, seen = torch.Generator().manual_seed(3), DynamicCache(config=model.config), 0
    cache.activate_past_recording()
    added = [owner or layer for layer in model.model.layers for owner in layer.owing.values()]
    found, calls, rows = [], [], 2
    handles = [layer.self_attn.register_forward_hook(lambda *_: calls.append(closing)) for layer in added]
    for step, *given in _STEPS:
        if step == "pickle":
            cache = pickle.loads(pickle.dumps(cache))
        elif step == "copy":
            cache = copy.deepcopy(cache)
        elif len(step) > 1:
            getattr(cache, step)(*given)
            rows = {"batch_repeat_interleave": 2 * rows, "batch_select_indices": 2}.get(step, rows)
            seen += given[0] if step == "crop" else 0
        else:
            closing, of = step == "c", closed if step == "c" else opened
            # One row that opens opens for all.
            ids = torch.tensor(closed)[torch.randint(len(closed), (rows, given[0]), generator=drawn)]
            ids[-1:] = torch.tensor(of)[torch.randint(len(of), (1, given[0]), generator=drawn)]
            flow = _flow(model)
            flow.records_choices = not spares
            mask = torch.ones(rows, seen + given[0], dtype=torch.long)
            mask[:, : 2 * padded] = 0
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -given[0] :]
            how = {"attention_mask": mask, "position_ids": positions} if padded else {}
            made = model(ids, **{CACHE: cache}, surgery_flow=flow, **how)
            assert bool(flow.on[:, -1].any()) is not closing
            found.append(made.logits)
            seen += given[0]
    for handle in handles:
        handle.remove()
    return found, cache, calls.count(True)


@pytest.mark.parametrize(
    ("family", "dtype", "padded"), [("llama", "float32", True), ("gemma3_text", "bfloat16", False)]
)
@pytest.mark.parametrize("what", ["inserted", "branches", "slots"])
@torch.no_grad()
def test_what_is_owed_is_made_as_if_nothing_had_been_spared(family: str, dtype: str, padded: bool, what: str) -> None:
    """Inserted layers and branches do not run while all is closed; once they do, every bit is as if they always had."""
    base = tiny.model(family, dtype=dtype)
    reads: dict[str, Any] = {"reads": "token", "closes": 0.0, "form": "linear"}
    # Beside layers of two kinds, where there are, which are given other masks and positions.
    surgery = {"branches": control(layers=(4, 5)), "slots": experts()}
    made = gate(layer=0, **reads) if what == "inserted" else gated(surgery[what], **reads)
    model = perturbed(grafted(family, made, base=base, dtype=dtype))
    closed, opened = by_token(model)
    spared = run_through(model, closed, opened, spares=True, padded=padded)
    whole = run_through(model, closed, opened, spares=False, padded=padded)
    assert all(map(torch.equal, spared[0], whole[0]))
    # The last forward is owed still: one that opens makes all that is.
    ids = torch.tensor([opened[:1]] * 2)
    for _, cache, _ in (spared, whole):
        model(ids, **{CACHE: cache}, attention_mask=torch.ones(2, cache.get_seq_length() + 1))
    for one, other in zip(spared[1].layers, whole[1].layers, strict=True):
        assert torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)
        assert not {"owed", "crop"} & {*vars(one)} - {*vars(other)}
    assert what == "slots" or (whole[2] > spared[2])
    assert spared[2] == (0 if what != "slots" else whole[2])


def test_no_number_of_what_is_closed_reaches_the_output() -> None:
    """Not even one that is none."""
    base, ids = tiny.model("llama"), tokens()
    model = grafted("llama", gated(everything()), base=base)
    with torch.no_grad():
        for name in model.graft_parameter_names():
            model.get_parameter(name).fill_(float("nan"))
    assert torch.equal(model(ids).logits, base(ids).logits)


def test_in_training_the_batch_decides_and_original_tokens_give_no_gradient() -> None:
    base, ids = tiny.model("llama"), tokens()
    model = perturbed(grafted("llama", gated(everything()), base=base)).train()
    model.freeze_base()
    logits = model(ids, labels=ids, domain_ids=torch.tensor([0, 1])).logits
    assert torch.equal(logits[0], base(ids).logits[0]) and not torch.equal(logits[1], base(ids).logits[1])
    for checkpointed in (False, True):
        if checkpointed:
            # Older versions of transformers have it by its older name alone.
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        model.zero_grad()
        out = model(ids, labels=ids, domain_ids=torch.tensor([0, 0]))
        task = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        if task.requires_grad:
            task.backward()
        assert not any(p.grad is not None and p.grad.any() for p in model.parameters())
        model.zero_grad()
        model(ids, labels=ids, domain_ids=torch.tensor([1, 1])).logits.sum().backward()
        assert model.model.layers[1].expanded.mlp.down_proj.weight.grad.any()


def test_without_domains_it_is_open_in_training_and_says_that_it_is_not_fitted(caplog: Any) -> None:
    """With labels or without; `domain_ids` count where the loss is made elsewhere too; in eval the text decides."""
    warning_once.cache_clear()
    base, ids = tiny.model("llama"), tokens()
    model = grafted("llama", gated(everything()), base=base)
    gates = {name for name, _ in model.named_buffers() if "domain_gate." in name}
    assert {name.rpartition(".")[2] for name in gates} == {"weight", "bias", "out", "offset", "threshold"}
    assert not any("domain_gate." in name for name, _ in model.named_parameters())
    model.requires_grad_(True).train()
    model(ids, labels=ids, domain_ids=torch.tensor([1, 1]))
    assert "not fitted" not in caplog.text
    for given in ({"labels": ids}, {}):
        flow = _flow(model)
        model.model(ids, surgery_flow=flow)
        assert flow.on.all()
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(ids, **given).logits.flatten(0, 1), ids.flatten()).backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        assert model.model.layers[0].mlp.adapter.down_proj.weight.grad.any()
    assert caplog.text.count("is not fitted") == 1
    perturbed(model)
    half = torch.tensor([0, 1])
    logits = model(ids, domain_ids=half).logits
    assert torch.equal(logits[0], base(ids).logits[0]) and not torch.equal(logits[1], base(ids).logits[1])
    assert torch.equal(model.model(ids, domain_ids=half).last_hidden_state[0], base.model(ids).last_hidden_state[0])
    assert "outside of training mode" not in caplog.text
    model.eval()(ids, labels=ids)
    assert "outside of training mode" in caplog.text


def test_a_cache_of_one_mode_is_refused_in_the_other() -> None:
    """In training nothing is kept for the text to decide by."""
    ids = tokens()
    for surgery in (gate(), states(top_k=2)):
        model = perturbed(grafted("llama", surgery))
        with torch.no_grad():
            made = cache_in(model(ids, use_cache=True))
            with pytest.raises(ValueError, match="filled outside of training"):
                model.train()(ids[:, :1], **{CACHE: made})
            made = cache_in(model(ids, use_cache=True))
            model(ids[:, :1], **{CACHE: made})
            with pytest.raises(ValueError, match="that this model did not route"):
                model.eval()(ids[:, :1], **{CACHE: made})


def scored(values: list[list[float]], spec: GateSpec, begins: list[list[int]] | None = None, past: Any = None) -> Any:
    """Where a gate with threshold 1 is open for this evidence."""
    made = DomainGate(spec, 4)
    made.initialise()
    made.threshold.data.fill_(1.0)
    valid = torch.ones(len(values), len(values[0]), dtype=torch.bool)
    starts = None if begins is None else torch.tensor(begins).bool()
    gating = Gating(valid, starts, past)
    evidence = (torch.tensor(values).unsqueeze(-1) * 2**16).round().long()
    return gating.held(*gating.judged(made, evidence)).int().tolist()


def test_it_stays_open_to_the_end_of_a_document_unless_it_may_close() -> None:
    given, latched, closing = (
        [[0.0, 2.0, 0.0, 0.9, 0.4, 2.0, 0.0]],
        GateSpec(0, "token"),
        GateSpec(0, "token", closes=0.5),
    )
    assert scored(given, latched) == [[0, 1, 1, 1, 1, 1, 1]]
    assert scored(given, closing) == [[0, 1, 0, 0, 0, 1, 0]]
    assert scored([[0.0, 2.0, 0.6, 0.9, 0.4]], closing) == [[0, 1, 1, 1, 0]]
    begins = [[1, 0, 0, 1, 0, 1, 0]]
    assert scored(given, latched, begins) == [[0, 1, 1, 0, 0, 1, 1]]
    assert scored(given, latched, [[0, 0, 0, 0, 1, 0, 0]]) == [[0, 1, 1, 1, 0, 1, 1]]


def sequentially(row: list[int], valid: list[bool], begins: list[bool], spec: GateSpec) -> tuple[list[bool], list[int]]:
    """Page's test as its equations have it, token by token, of evidence in 2⁻¹⁶: where it is open, and its sum."""
    up = down = 0
    on = False
    found: list[bool] = []
    sums: list[int] = []
    for evidence, real, begin in zip(row, valid, begins, strict=True):
        if real:
            if begin:
                up, down, on = 0, 0, False
            e = min(max(evidence, -4 * 2**16), 4 * 2**16)
            up = min(max(up + e - 2**16, 0), 3 * 2**16 + 1)
            if up > 3 * 2**16:
                on = True
            if spec.closes is not None:
                down = min(max(down - e, 0), int(spec.closes * 2**16) + 1)
                if down > spec.closes * 2**16:
                    on = False
        found.append(on)
        sums.append(up)
    return found, sums


@pytest.mark.parametrize("closes", [2.0, None])
def test_the_test_of_changes_is_that_of_its_equations(closes: float | None) -> None:
    """To the last unit: packed rows, padding on both sides, in one forward, token by token and in pieces."""
    spec = GateSpec(0, closes=closes)
    gate = DomainGate(spec, 4)
    gate.initialise()
    gate.threshold.data.fill_(3.0)
    gate.odds = lambda given: given.flatten(0, -2)  # type: ignore[method-assign]
    drawn = torch.Generator().manual_seed(0)
    rows, length = 24, 77
    trend = torch.randn(rows, 1, generator=drawn).mul(2).expand(rows, length).clone()
    trend[:, 30:55] *= -1
    evidence = ((torch.randn(rows, length, generator=drawn) * 2 + trend) * 2**16).round().long()
    valid = torch.ones(rows, length, dtype=torch.bool)
    for row in range(8):
        valid[row, : 3 * row] = False
        valid[row + 8, length - 3 * row :] = False
    begins = (torch.rand(rows, length, generator=drawn) < 0.04) & valid
    begins[16:] = False
    asked = [sequentially(*each, spec) for each in zip(evidence.tolist(), valid.tolist(), begins.tolist(), strict=True)]
    switches = sum(a != b for on, _ in asked for a, b in itertools.pairwise(on))
    assert switches > (60 if closes else 20)
    for cuts in ([0, length], [0, 40, 41, length], list(range(length + 1))):
        past: Any = None
        on, sums = [], []
        for begin, end in itertools.pairwise(cuts):
            gating = Gating(valid[:, begin:end], begins[:, begin:end], past)
            # One token over a cache is decided in numbers, more in tensors.
            on.append(gating.decide(gate, evidence[:, begin:end].unsqueeze(-1).double() / 2**16))
            sums.append(gating.found["state"][..., :1])
            past = gating.found
        together, counted = torch.cat(on, dim=1), torch.cat(sums, dim=1).squeeze(-1)
        for row, (opened, up) in enumerate(asked):
            real = valid[row]
            assert together[row][real].tolist() == torch.tensor(opened)[real].tolist(), (cuts[:3], row)
            assert counted[row][real].tolist() == torch.tensor(up)[real].tolist(), (cuts[:3], row)


@pytest.mark.parametrize("closes", [0.7, None])
@pytest.mark.parametrize("reads", ["prefix_mean", "token"])
def test_one_token_over_a_cache_is_decided_as_among_others(reads: str, closes: float | None) -> None:
    """In numbers as in tensors, by every reading: padding, documents that begin, a threshold of either sign."""
    drawn = torch.Generator().manual_seed(5)
    odds = torch.randn(12, 40, 1, generator=drawn).double() * 2
    valid = torch.rand(12, 40, generator=drawn) < 0.8
    begins = (torch.rand(12, 40, generator=drawn) < 0.1) & valid
    for threshold in (0.3, -0.2):
        made = DomainGate(GateSpec(0, reads, prior=2, closes=closes), 4)
        made.threshold.fill_(threshold)
        made.odds = lambda given: given.flatten(0, -2)  # type: ignore[method-assign]
        whole = Gating(valid, begins, None)
        on = whole.decide(made, odds)
        assert 100 < int((on & valid).sum()) < int(valid.sum()) - 20
        past = None
        for at in range(40):
            gating = Gating(valid[:, at : at + 1], begins[:, at : at + 1], past)
            one, here, past = gating.decide(made, odds[:, at : at + 1]), valid[:, at], gating.found
            assert gating.single == (at > 0) and torch.equal(one[:, 0][here], on[:, at][here])
            # Of a token that is padding nothing is kept that counts.
            assert reads == "token" or torch.equal(past["state"][:, 0][here], whole.found["state"][:, at][here])


# Ids of tokens after which a question begins, with which it ends, and with which an answer begins.
ASK, END, ANSWER = 120, 121, 122


def read_turns(gate: Any, *marks: tuple[int, int]) -> None:
    """Let a gate find turns by these pairs of ids."""
    ids = torch.tensor(marks) + 1
    gate.turns.copy_(torch.stack([ids // 65536, ids // 256 % 256, ids % 256], dim=-1))
    assert gate.marks().tolist() == [list(mark) for mark in marks]


def decided_by_turns(
    ids: list[int], evidence: list[int], valid: list[bool], begins: list[bool], marks: Any, closes: float
) -> list[tuple[int, bool]]:
    """As the rules have it, token by token: where it is (0 document, 1 question, 2 behind), and whether it is open."""
    one = 2**16
    where, on, before, total, stretch, worst = 0, False, -2, 0, 0, 0
    document = sequentially(evidence, valid, begins, GateSpec(0, closes=closes))[0]
    found: list[tuple[int, bool]] = []
    for token, e, real, begin, opened in zip(ids, evidence, valid, begins, document, strict=True):
        if real and begin:
            where, on, before = 0, False, -2
        if real:
            asks, ends, answers = (token == mark and first in (-1, before) for first, mark in marks)
            if asks:
                where, on, total, stretch, worst = 1, False, 0, 0, 0
            elif where and (ends or answers):
                where = 2
                on = (total > 2 * one and worst <= closes * one) if answers else on
            elif where == 1:
                e = min(max(e, -4 * one), 4 * one)
                total, stretch = total + e, max(stretch - e, 0)
                worst = max(worst, stretch)
            before = token
        found.append((where, on if where else opened))
    return found


@pytest.mark.parametrize(
    "marks",
    [((1, 5), (-1, 2), (1, 6)), ((-1, 5), (-1, -1), (-1, 6)), ((-1, 5), (-1, 6), (-1, 6)), ((-1, -1),) * 3],
    ids=["pairs", "no end", "one token", "none"],
)
def test_turns_are_decided_by_their_rules(marks: Any) -> None:
    """Padding, packed documents; in one forward, token by token and in pieces that cut turns and marks."""
    spec = GateSpec(0, closes=3.0, turns=True)
    gate = DomainGate(spec, 4)
    gate.initialise()
    gate.threshold.fill_(3.0)
    gate.turn_threshold.fill_(2.0)
    read_turns(gate, *marks)
    gate.odds = lambda given: given.flatten(0, -2)  # type: ignore[method-assign]
    drawn = torch.Generator().manual_seed(0)
    rows, length = 48, 90
    ids = torch.randint(0, 9, (rows, length), generator=drawn)
    for row, at in (torch.rand(rows, length - 1, generator=drawn) < 0.08).nonzero().tolist():
        ids[row, at : at + 2] = torch.tensor([1, 5 + (row + at) % 2])
    trend = torch.randn(rows, 1, generator=drawn)
    evidence = ((torch.randn(rows, length, generator=drawn) * 1.5 + trend) * 2**16).round().long()
    valid = torch.rand(rows, length, generator=drawn) < 0.85
    begins = (torch.rand(rows, length, generator=drawn) < 0.02) & valid
    begins[24:] = False
    given = zip(*(each.tolist() for each in (ids, evidence, valid, begins)), strict=True)
    asked = torch.tensor([decided_by_turns(*row, marks, 3.0) for row in given])
    seen = [tuple(each) for each in asked[valid].tolist()]
    wanted = [(0, 1), (1, 0), (2, 0), (2, 1)] if marks[0][1] > 0 else [(0, 0), (0, 1)]
    assert min(seen.count(each) for each in wanted) > 20
    for cuts in ([0, length], [0, 7, 30, 31, length], list(range(length + 1))):
        past: Any = None
        found = []
        for begin, end in itertools.pairwise(cuts):
            here = slice(begin, end)
            gating = Gating(valid[:, here], begins[:, here], past, ids=ids[:, here])
            on = gating.decide(gate, evidence[:, here].unsqueeze(-1).double() / 2**16)
            past = gating.found
            assert torch.equal(on, past["state"][..., 2] > 0)
            found.append(past["state"][..., [3, 2]])
        assert torch.equal(torch.cat(found, dim=1)[valid], asked[valid]), cuts[:3]


def chatting(base: Any) -> tuple[Any, Any, torch.Tensor, torch.Tensor]:
    """A model whose gate reads turns, what names its flow, and two chats of two turns: new then old text, and reverse.

    The second chat is shorter, and padded on the left. No document is long enough to open the gate.
    """
    model = perturbed(grafted("llama", gated(everything(), turns=True, closes=1.0), base=base))
    domain_gate: Any = next(module for module in model.modules() if hasattr(module, "threshold"))
    with torch.no_grad():
        flow = _flow(model)
        model(torch.arange(3, 100)[:, None], surgery_flow=flow, use_cache=False)
        found = flow.gating.evidence.flatten()
        # So that half of the tokens speak for either kind.
        domain_gate.offset.sub_(float(found.median()) / 2**16)
        domain_gate.threshold.fill_(1000.0)
        domain_gate.turn_threshold.fill_(0.1)
    read_turns(domain_gate, (-1, ASK), (-1, END), (-1, ANSWER))
    order = (found.argsort() + 3).tolist()
    old, new, answer = order[:5], order[-5:], order[40:44]
    chats = [
        [7, 8, 9, ASK, *first, END, ANSWER, *answer, END, ASK, *second, END, ANSWER, *answer]
        for first, second in ((new, old), (old, new))
    ]
    ids = torch.tensor([chats[0], [0, 0, *chats[1][2:]]])
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    return model, domain_gate, ids, mask


@torch.no_grad()
def test_a_turn_of_a_user_decides_for_its_answer_and_a_closed_chat_has_the_bases_bits() -> None:
    """In a batch, each row by its own turns; in one forward, in pieces, token by token, behind a crop, alone."""
    base = tiny.model("llama")
    model, _, ids, mask = chatting(base)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    flow = _flow(model)
    given = {"attention_mask": mask, "position_ids": positions}
    logits = model(ids, **given, surgery_flow=flow, use_cache=False).logits
    first, second = (int(place) for place in (ids[0] == ANSWER).nonzero().flatten())
    begin = int((ids[0] == ASK).nonzero()[-1])
    expected = torch.zeros_like(mask, dtype=torch.bool)
    expected[0, first:begin], expected[1, second:] = True, True
    assert torch.equal(flow.on & mask.bool(), expected)
    native = base(ids, **given, use_cache=False).logits
    assert torch.equal(logits[0, :first], native[0, :first]) and torch.equal(logits[1, 2:second], native[1, 2:second])
    assert not (logits == native).all(dim=-1)[expected].any()

    length = ids.shape[1]
    for cuts in ([0, 6, 13, length], [0, 6, *range(7, length + 1)]):
        cache, on = DynamicCache(config=model.config), []
        cache.activate_past_recording()
        for start, end in itertools.pairwise(cuts):
            flow, here = _flow(model), slice(start, end)
            part = {"attention_mask": mask[:, :end], "position_ids": positions[:, here]}
            model(ids[:, here], **{CACHE: cache}, **part, surgery_flow=flow)
            on.append(flow.on)
        assert torch.equal(torch.cat(on, dim=1) & mask.bool(), expected), cuts
    # Back into the first turn, whose end is decided anew.
    cache.crop(6 - length)
    flow = _flow(model)
    part = {"attention_mask": mask, "position_ids": positions[:, 6:]}
    model(ids[:, 6:], **{CACHE: cache}, **part, surgery_flow=flow)
    assert torch.equal(flow.on, expected[:, 6:])
    alone = _flow(model)
    model(ids[1:, 2:], surgery_flow=alone, use_cache=False)
    assert torch.equal(alone.on[0], expected[1, 2:])
    # Without ids no turn is seen.
    embedded = _flow(model)
    model(inputs_embeds=model.get_input_embeddings()(ids), **given, surgery_flow=embedded, use_cache=False)
    assert not embedded.on.any()


def test_generation_keeps_what_the_turn_decided() -> None:
    """Greedy and with beams, over a cache as without one; an answer to old text is the base's own."""
    base = tiny.model("llama")
    model, _, ids, _ = chatting(base)
    prompts = ids[:, : int((ids[0] == ANSWER).nonzero()[0]) + 1]
    for beams in (1, 3):
        how: dict[str, Any] = {"max_new_tokens": 6, "num_beams": beams, "do_sample": False, "eos_token_id": None}
        for prompt, opens in ((prompts[:1], True), (prompts[1:, 2:], False)):
            made = model.generate(prompt, **how)
            assert torch.equal(made, model.generate(prompt, use_cache=False, **how))
            flow = _flow(model)
            with torch.no_grad():
                model(made, surgery_flow=flow, use_cache=False)
            assert flow.on[0, prompt.shape[1] - 1 :].tolist() == [opens] * 7
            assert opens or torch.equal(made, base.generate(prompt, **how))


def test_an_earlier_config_reads_as_it_did() -> None:
    """What closes a gate had another name."""
    earlier, now = ({"reads": "prefix_mean", name: 0.5} for name in ("hysteresis", "closes"))
    found = [GateRules().read(gate(**said)).gate for said in (earlier, now)]
    assert found[0] == found[1] and found[0].closes == 0.5


def test_a_packed_document_is_decided_as_alone() -> None:
    """Positions begin anew, and so does the evidence, to the bit."""
    model = perturbed(grafted("llama", gated(everything())))
    halves(model)
    first, second = tokens(1, 9), tokens(1, 11, seed=8)
    row, positions = torch.cat([first, second], dim=1), torch.cat([torch.arange(9), torch.arange(11)])[None]
    packed, alone = _flow(model), _flow(model)
    with torch.no_grad():
        model(row, position_ids=positions, surgery_flow=packed, use_cache=False)
        model(second, surgery_flow=alone, use_cache=False)
    assert torch.equal(packed.gating.found["state"][:, 9:], alone.gating.found["state"])
    assert torch.equal(packed.on[:, 9:], alone.on)


@pytest.mark.parametrize("filled", [0, 1])
def test_positions_of_transformers_own_padding_give_the_bases_bits(filled: int) -> None:
    """Generation counts tokens that are no padding, and gives the others a 0, older versions a 1."""
    base = tiny.model("llama")
    model = perturbed(grafted("llama", gated(everything(), reads="prefix_mean"), base=base))
    ids, mask = left_padded()
    on = halves(model)
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, filled)
    flow = _flow(model)
    with torch.no_grad():
        given = {"attention_mask": mask, "position_ids": positions}
        logits = model(ids, **given, surgery_flow=flow, use_cache=False).logits
        same = (logits == base(ids, **given, use_cache=False).logits).all(dim=-1)
    assert torch.equal(flow.on & mask.bool(), on & mask.bool())
    assert same[~on & mask.bool()].all() and not same[on & mask.bool()].any()
    # On the right too: what follows over a cache goes on where the last token of the text was.
    right, kept = ids.flip(1), mask.flip(1)
    spread = (kept.cumsum(-1) - 1).masked_fill(kept == 0, filled)
    with torch.no_grad():
        made = cache_in(model(right, attention_mask=kept, position_ids=spread, use_cache=True))
        held = made.layers[0].kept["gate"]
    assert held["state"][:, -1, 1].flatten().tolist() == kept.sum(1).tolist()


def test_a_mask_that_keeps_documents_apart_is_seen() -> None:
    """Positions may go on or begin anew; over a cache a document may begin with a forward."""
    model = perturbed(grafted("llama", gated(everything())))
    halves(model)
    first, second = tokens(1, 9), tokens(1, 11, seed=8)
    row, alone = torch.cat([first, second], dim=1), _flow(model)
    shown = torch.ones(20, 20, dtype=torch.bool).tril()
    shown[9:, :9] = False
    with torch.no_grad():
        model(second, surgery_flow=alone, use_cache=False)
        for cut in (20, 14, 9):
            cache = DynamicCache(config=model.config)
            flow = None
            for begin, end in ((0, cut), (cut, 20)):
                if begin < end:
                    flow = _flow(model)
                    mask = shown[None, None, begin:end, :end]
                    model(row[:, begin:end], attention_mask=mask, **{CACHE: cache}, surgery_flow=flow)
            assert torch.equal(flow.gating.found["state"][:, -6:], alone.gating.found["state"][:, -6:]), cut
            assert torch.equal(flow.on[:, -6:], alone.on[:, -6:]), cut


def test_a_cache_has_as_many_entries_as_the_config_has_layers() -> None:
    """What is kept of a sequence stands in one of them, and goes with it where it is copied, cut or pickled."""
    model, ids = perturbed(grafted("llama", gated(everything()))), tokens(1, 9)
    halves(model)
    with torch.no_grad():
        made = cache_in(model(ids[:, :7], use_cache=True))
        assert len(made) == model.config.num_hidden_layers
        assert {*made.layers[0].kept} == {"gate", "states"}
        copied, pickled = copy.deepcopy(made), pickle.loads(pickle.dumps(made))
        made.crop(-3)
        whole = model(ids, use_cache=False).logits[:, -1]
        for cache, seen in ((made, 4), (copied, 7), (pickled, 7)):
            again = model(ids[:, seen:], **{CACHE: cache}).logits[:, -1]
            torch.testing.assert_close(again, whole, atol=2e-5, rtol=1e-4)
        # Beside what has one size it has one too, as a graph that was compiled for it asks.
        fixed, forms = StaticCache(config=model.config, max_cache_len=16), []
        for part in (ids[:, :7], ids[:, 7:8], ids[:, 8:]):
            model(part, **{CACHE: fixed})
            kept = fixed.layers[0].kept["gate"]
            forms.append({name: (value.shape, value.stride()) for name, value in kept.items()})
        assert forms[0] == forms[1] == forms[2]


def test_beams_and_every_kind_of_cache_decide_alike() -> None:
    model = perturbed(grafted("llama", gated(everything())))
    halves(model)
    ids = tokens(2, 8)
    how: dict[str, Any] = {"max_new_tokens": 5, "num_beams": 3, "do_sample": False, "eos_token_id": None}
    assert torch.equal(model.generate(ids, **how), model.generate(ids, use_cache=False, **how))


def test_grafts_are_switched_off_inside_and_on_again_behind() -> None:
    """In one thread, nested, and where something fails; a cache of one side is refused on the other."""
    base, ids = tiny.model("llama"), tokens()
    model = perturbed(grafted("llama", everything(), base=base))
    with torch.no_grad():
        whole, native = model(ids).logits, base(ids).logits
        elsewhere: list[torch.Tensor] = []
        with pytest.raises(KeyError), model.grafts(enabled=False):
            assert torch.equal(model.model(ids).last_hidden_state, base.model(ids).last_hidden_state)
            with model.grafts(enabled=True):
                assert torch.equal(model(ids).logits, whole)
            with model.grafts(enabled=False):
                assert torch.equal(model(ids).logits, native)
            worker = threading.Thread(target=lambda: elsewhere.append(model(ids).logits.detach()))
            worker.start()
            worker.join()
            made = cache_in(model(ids, use_cache=True))
            raise KeyError
        assert torch.equal(model(ids).logits, whole) and torch.equal(elsewhere[0], whole)
        with pytest.raises(ValueError, match="that this model did not route"):
            model(ids[:, :1], **{CACHE: made})
        later = torch.arange(3, 3 + ids.shape[1])[None]
        with pytest.raises(ValueError, match="must see a document from its first token on"):
            grafted("llama", gate())(ids, position_ids=later)
        kept = cache_in(model(ids, use_cache=True))
        with pytest.raises(ValueError, match="begin with an empty one"), model.grafts(enabled=False):
            model(ids[:, :1], **{CACHE: kept})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"domain_gate": []}, "0 domain_gate entries"),
        ({"gated": []}, "a gate is one, and has something to switch"),
        ({"gated": [{"layer": 0, "inserted": True}]}, "below it are gated"),
        ({"gated": [{"layer": 2, "inserted": True}]}, "it is the base's"),
        ({"gated": [{"layer": 3, "grafts": ["adapters"]}]}, "a graft that is not there"),
        ({"domain_gate": [{"layer": 1, "form": "tree"}]}, "must be one of mlp, linear"),
        ({"domain_gate": [{"layer": 1, "false_positives": 0}]}, "between 0 and 1"),
        ({"domain_gate": [{"layer": 1, "closes": -1.0}]}, "must be null or a number from 0 on"),
        ({"domain_gate": [{"layer": 1, "units": 0}]}, "must be at least 1 and 0"),
        ({"domain_gate": [{"layer": 1, "turns": True}]}, "only a cusum that closes"),
    ],
)
def test_a_gate_that_does_not_fit_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        read_from("llama", gate() | change)
