"""The heads, and what each role computes of a prompt and its response."""

import pytest
import torch

from align.core.tensor_ops import Padded
from align.models.roles import LanguageModel, Prediction, RewardModel, Role, ScalarHead, response_log_probs

PROMPT, RESPONSE = Padded.from_lists([[9, 10, 11], [12]]), Padded.from_lists([[20, 21], [22, 23, 24, 25]])

# ------------------------------------------------------------------------------------------------------------------ heads


def test_a_head_is_a_dot_product_in_float32():
    head = ScalarHead(2).bfloat16()
    with torch.no_grad():
        head.linear.weight.copy_(torch.tensor([[0.5, -2.0]]))
        head.linear.bias.fill_(0.25)
    found = head(torch.tensor([[[1.0, 2.0], [1000.0, 1.0]]], dtype=torch.bfloat16))
    # 0.5 - 4 + 0.25 = -3.25; 500 - 2 + 0.25 = 498.25, which bfloat16 would round to 498.
    assert found.dtype == torch.float32
    assert found.tolist() == [[-3.25, 498.25]]


def test_a_reward_head_starts_with_the_standard_deviation_of_its_source():
    torch.manual_seed(0)
    head = ScalarHead(9_999)
    # 1 / sqrt(9999 + 1) = 0.01; of 9999 draws the estimate is good to 0.01 / sqrt(2 * 9999) = 0.00007: 4 of those.
    assert float(head.linear.weight.detach().std()) == pytest.approx(0.01, abs=0.0003)
    assert head.linear.bias.tolist() == [0.0]


def test_a_value_head_on_a_shared_trunk_starts_at_zero():
    head = ScalarHead(5, start_at_zero=True)
    assert head(torch.randn(3, 2, 5)).abs().max() == 0.0


# ------------------------------------------------------------------------------------------------------------------ roles


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


@torch.no_grad()
def test_a_reward_is_read_after_the_last_real_token(backbone):
    torch.manual_seed(1)
    head = ScalarHead(backbone.hidden_size)
    rewards = RewardModel(backbone, head, None)(PROMPT, RESPONSE)
    hidden = backbone.hidden(PROMPT, RESPONSE)
    assert rewards.tolist() == pytest.approx([float(head(hidden[0, 2])), float(head(hidden[1, 4]))], abs=1e-6)


def test_an_actor_critic_says_values_before_tokens_and_entropy_only_without_gradients(tiny_name, load_sharp, make_ppo):
    trainer = make_ppo(load_sharp(tiny_name))
    module, backbone = trainer.optimization.module, trainer.loaded.backbone
    torch.nn.init.normal_(module.value_head.linear.weight)
    with torch.no_grad():
        prediction: Prediction = module(Role.POLICY, PROMPT, RESPONSE, 0.7)
        hidden = backbone.hidden(PROMPT, RESPONSE)
        values = module.value_head(hidden[:, :-1])
        logits = backbone.logits(hidden[1, 2]) / 0.7
        entropy = -(torch.softmax(logits, -1) * torch.log_softmax(logits, -1)).sum()
    torch.testing.assert_close(prediction.values, values * RESPONSE.mask(), atol=1e-6, rtol=0)
    assert float(prediction.entropy[1, 2]) == pytest.approx(float(entropy), abs=1e-5)
    assert prediction.entropy[0, 2:].tolist() == prediction.values[0, 2:].tolist() == [0.0, 0.0]
    assert module(Role.POLICY, PROMPT, RESPONSE).entropy.abs().max() == 0.0
