"""Log-probs, entropies and gradients from parts of the logits are those from all of them, in less memory."""

import pytest
import torch

from align.models import roles
from align.models.roles import predict_tokens

COUNT = 50


def in_parts_of(rows, backbone, monkeypatch):
    monkeypatch.setattr(roles, "WHOLE_BYTES", rows * backbone.model.config.vocab_size * 4)


def states_of(backbone):
    generator = torch.Generator().manual_seed(5)
    states = torch.randn(COUNT, backbone.hidden_size, generator=generator).requires_grad_()
    tokens = torch.randint(backbone.model.config.vocab_size, (COUNT,), generator=generator)
    return states, tokens, torch.randn(2, COUNT, generator=generator)


def outcome(backbone, adapter, with_entropy):
    """Log-probs, entropies, and the gradients by them of the states and of every trained weight."""
    states, tokens, shares = states_of(backbone)
    weights = {name: weight for name, weight in backbone.named_parameters() if weight.requires_grad}
    with backbone.adapter(adapter):
        log_probs, entropy = predict_tokens(backbone, states, tokens, 0.7, with_entropy)
    loss = (log_probs * shares[0]).sum()
    if with_entropy:
        loss = loss + (entropy * shares[1]).sum()
    # After the context: what is recomputed now must still use the adapter.
    found = torch.autograd.grad(loss, [states, *weights.values()], allow_unused=True)
    gradients = {name: value for name, value in zip(["states", *weights], found, strict=True) if value is not None}
    return {"log_probs": log_probs, **({"entropy": entropy} if with_entropy else {}), **gradients}


@pytest.mark.parametrize("rows", [1, 7, 49])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_parts_give_the_numbers_of_the_whole(load_sharp, tiny_name, rows, with_entropy, monkeypatch):
    loaded = load_sharp(tiny_name)
    whole = outcome(loaded.backbone, None, with_entropy)
    in_parts_of(rows, loaded.backbone, monkeypatch)
    parts = outcome(loaded.backbone, None, with_entropy)
    assert whole.keys() == parts.keys()
    assert len(whole) == 3 + with_entropy
    for name, value in whole.items():
        sums = 1 if name in ("log_probs", "entropy") else 10  # gradients are sums of 50 rows, in another order
        torch.testing.assert_close(parts[name], value, rtol=1e-5, atol=sums * 1e-6, msg=name)


def test_an_adapter_of_the_vocabulary_matrix_is_used_again(load_sharp, monkeypatch):
    loaded = load_sharp("tiny-gpt2", lora_rank=4, lora_targets="lm_head")
    whole = outcome(loaded.backbone, loaded.adapter, False)
    assert {name.split(".")[-3] for name in whole if "lora" in name} == {"lora_A", "lora_B"}
    in_parts_of(7, loaded.backbone, monkeypatch)
    for name, value in outcome(loaded.backbone, loaded.adapter, False).items():
        torch.testing.assert_close(value, whole[name], rtol=1e-5, atol=1e-5, msg=name)


def test_no_logits_of_more_than_a_part_are_made(load_sharp, monkeypatch):
    backbone = load_sharp("tiny-llama").backbone
    in_parts_of(7, backbone, monkeypatch)
    asked, honest = [], backbone.logits
    monkeypatch.setattr(backbone, "logits", lambda states: asked.append(len(states)) or honest(states))
    states, tokens, _ = states_of(backbone)
    log_probs, _ = predict_tokens(backbone, states, tokens)
    log_probs.sum().backward()
    assert sorted(asked[8:]) == sorted(asked[:8]), "once in each direction"
    assert sum(asked[:8]) == COUNT
    assert max(asked) == 7
