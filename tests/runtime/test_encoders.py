"""Control states in encoders: the site's equation, routing by the whole sequence, training, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from surgeon.errors import BadInput
from surgeon.runtime.graft import Flow
from surgeon.runtime.states import Mixing
from tests import tiny
from tests.runtime.grafting import classes, config, grafted_encoder, perturbed, read_from, states, tokens

LABELS = torch.tensor([0, 2])


def sequence_states(**mixture: Any) -> dict[str, Any]:
    return states(**{"inference_routing": "sequence_mean", "top_k": 2} | mixture)


def padded(ids: Tensor) -> Tensor:
    mask = torch.ones_like(ids)
    mask[0, -4:] = 0
    return mask


@pytest.mark.parametrize("head", tiny.ENCODER_HEADS)
@pytest.mark.parametrize("family", tiny.ENCODERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_born_the_base(family: str, head: str, dtype: str) -> None:
    base = tiny.model(family, dtype=dtype, head=head)
    model = grafted_encoder(family, sequence_states(), head=head, base=base, dtype=dtype)
    ids = tokens()
    asked = {"attention_mask": padded(ids), "output_hidden_states": True}
    with torch.no_grad():
        native, ours = base(ids, **asked), model(ids, **asked)
        spoken = perturbed(model)(ids, **asked)
    assert torch.equal(ours[0], native[0])
    assert len(ours.hidden_states) == len(native.hidden_states) == 7
    assert all(torch.equal(a, b) for a, b in zip(ours.hidden_states, native.hidden_states, strict=True))
    assert not torch.equal(spoken[0], native[0])


@pytest.mark.parametrize("family", tiny.ENCODERS)
def test_a_site_follows_the_equation(family: str) -> None:
    """LayerNorm(block(x) + control(x) + x) at both ends of a layer, from the layer's native parts and the bank."""
    model = perturbed(grafted_encoder(family, sequence_states(), head=""))
    ids = tokens()
    mask = padded(ids)
    seen: dict[str, Any] = {}
    layer = model.encoder.layer[2]
    kept = [
        layer.register_forward_hook(lambda _, arguments, output: seen.update(x=arguments[0], output=output)),
        layer.attention.output.dense.register_forward_hook(lambda *event: seen.update(attention=event[-1])),
        layer.intermediate.register_forward_hook(lambda _, arguments, output: seen.update(middle=arguments[0])),
        layer.output.dense.register_forward_hook(lambda *event: seen.update(ffn=event[-1])),
    ]
    flow = Flow(records_choices=True)
    with torch.no_grad():
        model(ids, attention_mask=mask, surgery_flow=flow)
        for hook in kept:
            hook.remove()
        bank = model.control_bank
        assert [site for site, _ in model.surgery.of["states"].sites] == [0, 0, 2, 2, 5, 5]

        def control(site: int, x: Tensor) -> Tensor:
            probabilities = torch.softmax(x.double() @ bank.gates["all"].weight.double().T, -1)
            total = torch.zeros_like(x, dtype=torch.float64)
            for row in range(len(x)):
                shown = probabilities[row, mask[row].bool()].mean(0)
                chosen = shown.topk(2).indices.tolist()
                for weight, k in [(0.6, site), *((0.4 * shown[k] / shown[chosen].sum(), k) for k in chosen)]:
                    state = bank.states[k]
                    total[row] += weight * x[row].double() @ (state.lora_B.double() @ state.lora_A.double()).T
            return total.float()

        x, middle = seen["x"], seen["middle"]
        ends = layer.attention.output, layer.output
        expected = ends[0].LayerNorm(seen["attention"] + control(2, x) + x)
        torch.testing.assert_close(middle, expected, atol=1e-5, rtol=1e-4)
        expected = ends[1].LayerNorm(seen["ffn"] + control(3, middle) + middle)
        torch.testing.assert_close(seen["output"], expected, atol=1e-5, rtol=1e-4)
    assert flow.mixing is not None and [site for site, *_ in flow.mixing.choices] == list(range(6))


@pytest.mark.parametrize("routing", ["sequence_mean", "token"])
@pytest.mark.parametrize("family", tiny.ENCODERS)
def test_routing_is_blind_to_padding_and_to_the_rest_of_the_batch(family: str, routing: str) -> None:
    model = perturbed(grafted_encoder(family, sequence_states(inference_routing=routing)))
    ids = tokens(3, 12)
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    ids[1, 7:] = model.config.pad_token_id
    with torch.no_grad():
        together = model(ids, attention_mask=mask).logits
        for row in range(3):
            kept = mask[row].bool()
            alone = model(ids[row : row + 1, kept]).logits
            torch.testing.assert_close(together[row : row + 1, kept], alone, atol=1e-5, rtol=1e-4)


def test_routing_by_the_sequence_looks_at_all_of_it() -> None:
    """One choice for all tokens of a sequence, which the last of them can turn."""
    model = perturbed(grafted_encoder("roberta", sequence_states(top_k=1)), scale=0.5)
    turned = False
    for seed in range(4):
        ids = tokens(2, 12, seed=seed)
        changed = ids.clone()
        changed[:, 6:] = (changed[:, 6:] + 17) % 120 + 3
        choices = []
        for these in (ids, changed):
            flow = Flow(records_choices=True)
            with torch.no_grad():
                model(these, surgery_flow=flow)
            assert flow.mixing is not None and flow.mixing.choices
            assert all((chosen == chosen[:, :1]).all() for _, chosen, _ in flow.mixing.choices)
            choices.append(torch.cat([chosen[:, 0] for _, chosen, _ in flow.mixing.choices]))
        turned = turned or not torch.equal(*choices)
    assert turned


@pytest.mark.parametrize("head", ["ForMaskedLM", "ForSequenceClassification"])
@pytest.mark.parametrize("family", tiny.ENCODERS)
@pytest.mark.parametrize("with_head", [False, True])
def test_training_moves_the_bank_and_the_head_if_asked(family: str, head: str, with_head: bool) -> None:
    model = grafted_encoder(family, sequence_states(balance_weight=0.3), head=head).train()
    names = set(model.freeze_base())
    assert names == {name for name, _ in model.named_parameters() if "control_bank." in name}
    if with_head:
        body = set(model.base_model.parameters())
        for name, parameter in model.named_parameters():
            if parameter not in body:
                parameter.requires_grad_()
                names.add(name)
    before = {name: p.clone() for name, p in model.named_parameters()}
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0)
    ids = tokens()
    for _ in range(2):
        out = model(ids, attention_mask=padded(ids), labels=ids if head == "ForMaskedLM" else LABELS)
        assert out.balance_loss is not None
        optimiser.zero_grad()
        out.loss.backward()
        optimiser.step()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    # Biases that no output depends on may stay (DeBERTa's unused second one).
    assert moved <= names and {name for name in names if "control_bank." in name} <= moved
    assert not with_head or any("control_bank." not in name for name in moved)


def test_balance_loss_joins_the_loss_in_training_alone() -> None:
    def build(weight: float) -> Any:
        surgery = sequence_states(balance_weight=weight)
        dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return perturbed(grafted_encoder("deberta", surgery, head="ForSequenceClassification", **dropouts)).train()

    ids = tokens()
    model = build(0.3)
    out = model(ids, labels=LABELS)
    torch.testing.assert_close(out.loss, build(0.0)(ids, labels=LABELS).loss + 0.3 * out.balance_loss)
    assert model(ids).balance_loss is None
    assert model.eval()(ids, labels=LABELS).balance_loss is None
    assert isinstance(model(ids, return_dict=False), tuple)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("family", tiny.ENCODERS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_the_same_gradients(family: str, reentrant: bool) -> None:
    ids = tokens()
    gradients = []
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    for checkpointed in (False, True):
        model = perturbed(grafted_encoder(family, sequence_states(), **dropouts)).train()
        model.freeze_base()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model(ids, attention_mask=padded(ids), labels=ids).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() == set(model.graft_parameter_names())
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], atol=1e-6, rtol=1e-4, msg=name)


def test_attentions_are_told_as_the_base_tells_them() -> None:
    base = tiny.model("deberta-v2", head="")
    model = grafted_encoder("deberta-v2", head="", base=base)
    ids = tokens()
    with torch.no_grad():
        ours, native = (m(ids, output_attentions=True).attentions for m in (model, base))
    assert len(ours) == 6 and all(torch.equal(a, b) for a, b in zip(ours, native, strict=True))


def test_what_an_encoder_cannot_carry_is_refused() -> None:
    with pytest.raises(BadInput, match="inference_routing is `prefix_mean`, but an encoder reads whole sequences"):
        read_from("roberta", states())
    with pytest.raises(ValueError, match=r"unknown keys \['adapters'\], grafts without code; known are "):
        grafted_encoder("roberta", sequence_states() | {"adapters": [{"layer": 0, "size": 4}]})
    with pytest.raises(ValueError, match="chunk_size_feed_forward cuts"):
        grafted_encoder("roberta", sequence_states(), chunk_size_feed_forward=4)


def test_a_decoder_never_looks_ahead() -> None:
    with pytest.raises(BadInput, match="`sequence_mean`, by which a decoder's token would see later ones"):
        read_from("llama", sequence_states())


def test_masks_that_do_not_show_padding_are_refused() -> None:
    model = grafted_encoder("deberta")
    with pytest.raises(ValueError, match=r"attention_mask is \[2, 12, 12\]; .*two-dimensional"):
        model(tokens(), attention_mask=torch.ones(2, 12, 12))


def test_a_sequence_of_nothing_but_padding_is_no_trouble() -> None:
    model = grafted_encoder("roberta", sequence_states())
    bank = model.roberta.control_bank
    mixing = Mixing(bank, torch.zeros(1, 3, dtype=torch.bool), None)
    assert mixing.control(0, torch.randn(1, 3, 32), _frame()).isfinite().all()


def _frame() -> Any:
    from surgeon.runtime.graft import Frame

    return Frame()


def test_a_missing_control_state_is_refused(tmp_path: Any) -> None:
    tiny.model("deberta").save_pretrained(tmp_path)
    made = config("deberta", sequence_states())
    with pytest.raises(ValueError, match=r"lacks 13 tensors .*`deberta\.control_bank\.gates\.all\.weight`"):
        classes("deberta", "ForMaskedLM", made.surgery).from_pretrained(tmp_path, config=made)
