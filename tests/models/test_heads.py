import pytest
import torch

from align.core.tensor_ops import Padded
from align.models import heads
from align.models.heads import LanguageModel, RewardModel, ScalarHead, ValueHead, predict_tokens, response_log_probs
from align.models.roles import ActorCriticOutput, Role

PROMPT, RESPONSE = Padded.from_lists([[9, 10, 11], [12]]), Padded.from_lists([[20, 21], [22, 23, 24, 25]])


@torch.no_grad()
def test_log_probs_are_the_softmax_of_the_logits_at_the_temperature(backbone):
    hidden, mask = backbone.hidden(PROMPT, RESPONSE), RESPONSE.mask()
    found, entropy = response_log_probs(backbone, hidden, RESPONSE, mask, temperature=0.7, with_entropy=True)
    assert found.shape == entropy.shape == (2, 4)
    for row, length in enumerate((2, 4)):
        for t in range(length):
            every = torch.log_softmax(backbone.logits(hidden[row, t]) / 0.7, dim=-1)
            assert float(found[row, t]) == pytest.approx(float(every[RESPONSE.ids[row, t]]), abs=1e-5)
            assert float(entropy[row, t]) == pytest.approx(-float((every.exp() * every).sum()), abs=1e-5)
    assert found[0, 2:].tolist() == entropy[0, 2:].tolist() == [0.0, 0.0]


@torch.no_grad()
def test_the_policy_computes_no_logits_where_the_mask_does_not_hold(backbone):
    whole = LanguageModel(backbone, None)(PROMPT, RESPONSE, RESPONSE.mask())
    some = torch.tensor([[False, True, False, False], [True, False, False, True]])
    part = LanguageModel(backbone, None)(PROMPT, RESPONSE, some)
    torch.testing.assert_close(part, whole * some, atol=1e-6, rtol=0)


COUNT = 50


def in_parts_of(rows, backbone, monkeypatch):
    monkeypatch.setitem(heads.WHOLE_BYTES, "cpu", rows * backbone.model.config.vocab_size * 4)


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
    loaded = load_sharp("tiny-gpt2", lora_r=4, lora_target_modules="lm_head")
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


def test_a_head_starts_small_and_is_a_dot_product_in_float32():
    torch.manual_seed(0)
    head = ScalarHead(9_999)
    # 1 / sqrt(9999 + 1) = 0.01; of 9999 draws the estimate is good to 0.01 / sqrt(2 * 9999) = 0.00007: 4 of those.
    assert float(head.linear.weight.detach().std()) == pytest.approx(0.01, abs=0.0003)
    assert head.linear.bias.tolist() == [0.0]
    assert ValueHead(5)(torch.randn(3, 2, 5)).abs().max() == 0.0  # of values on a shared trunk
    head = ScalarHead(2).bfloat16()
    with torch.no_grad():
        head.linear.weight.copy_(torch.tensor([[0.5, -2.0]]))
        head.linear.bias.fill_(0.25)
    found = head(torch.tensor([[[1.0, 2.0], [1000.0, 1.0]]], dtype=torch.bfloat16))
    # 0.5 - 4 + 0.25 = -3.25; 500 - 2 + 0.25 = 498.25, which bfloat16 would round to 498.
    assert found.dtype == torch.float32
    assert found.tolist() == [[-3.25, 498.25]]


@torch.no_grad()
def test_a_reward_is_read_after_the_last_real_token(backbone):
    torch.manual_seed(1)
    head = ScalarHead(backbone.hidden_size)
    rewards = RewardModel(backbone, head, None)(PROMPT, RESPONSE)
    hidden = backbone.hidden(PROMPT, RESPONSE)
    assert rewards.tolist() == pytest.approx([float(head(hidden[0, 2])), float(head(hidden[1, 4]))], abs=1e-6)


def test_an_actor_critic_says_values_before_tokens_and_entropy_only_without_gradients(tiny_name, load_sharp, make_ppo):
    trainer = make_ppo(load_sharp(tiny_name))
    module, backbone = trainer.engine.module, trainer.loaded.backbone
    torch.nn.init.normal_(module.value_head.linear.weight)
    with torch.no_grad():
        prediction: ActorCriticOutput = module(Role.POLICY, PROMPT, RESPONSE, 0.7)
        hidden = backbone.hidden(PROMPT, RESPONSE)
        values = module.value_head(hidden[:, :-1])
        logits = backbone.logits(hidden[1, 2]) / 0.7
        entropy = -(torch.softmax(logits, -1) * torch.log_softmax(logits, -1)).sum()
    torch.testing.assert_close(prediction.values, values * RESPONSE.mask(), atol=1e-6, rtol=0)
    assert float(prediction.entropy[1, 2]) == pytest.approx(float(entropy), abs=1e-5)
    assert prediction.entropy[0, 2:].tolist() == prediction.values[0, 2:].tolist() == [0.0, 0.0]
    assert module(Role.POLICY, PROMPT, RESPONSE).entropy.abs().max() == 0.0
