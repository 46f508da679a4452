"""The loss of the reward model in batches: padding, order and micro-batches never change it, nor a further term."""

import pytest
import torch

from align.core.tensor_ops import Padded
from align.models.backbone import flops_profile
from align.models.heads import ScalarHead
from align.reward import RewardConfig
from align.reward.rankings import group_sizes
from align.reward.train import batch_loss, build_module, example_flops
from align.training.start import build_engine
from tests.models.losses import ADAPTER, assert_invariant, loss_of_rows, rankings


@pytest.mark.parametrize("lora_r", [0, ADAPTER])
@pytest.mark.parametrize("terms", [{}, {"centering_weight": 0.1}, {"lm_weight": 0.5}], ids=str)
def test_the_reward_loss(tiny_name, load_sharp, make_run, hand_rollout, lora_r, terms):
    loaded = load_sharp(tiny_name, adapter="reward", lora_r=lora_r)
    run = make_run(RewardConfig, "reward")
    torch.manual_seed(2)
    model = build_module(loaded, ScalarHead(loaded.backbone.hidden_size, bias=False), "", "lm_weight" in terms)
    engine, examples = build_engine(run, model, 1), rankings(hand_rollout)
    given = {"soft_targets": False, "centering_weight": 0.0, "lm_weight": 0.0} | terms
    assert_invariant(engine, group_sizes(loaded.backbone, examples), loss_of_rows(batch_loss, engine, examples, **given))


def test_the_language_model_loss_beside_rewards_by_hand(tiny_name, load_sharp, make_run, hand_rollout):
    """The mean of -log p over the best responses' tokens, of which the second ranking's is one of four."""
    loaded, pair = load_sharp(tiny_name), rankings(hand_rollout)[:2]
    found, flops, profile = {}, {}, flops_profile(loaded.backbone, None)
    for weight in (0.5, 0.0):  # without that loss, a vocabulary matrix of its own is frozen
        torch.manual_seed(2)
        model = build_module(loaded, ScalarHead(loaded.backbone.hidden_size, bias=False), "", weight > 0)
        engine = build_engine(make_run(RewardConfig, "reward"), model, 1)
        found[weight] = batch_loss(engine.module, pair, pair, False, 0.0, weight, loaded.backbone.device)
        flops[weight] = sum(example_flops(loaded.backbone, profile, ranking, weight) for ranking in pair)
    prompts, responses = [prompt.ids for prompt in hand_rollout.prompts], hand_rollout.responses
    best, total, count = [(prompts[0], responses[1]), (prompts[1], responses[1])], 0.0, 0
    with torch.no_grad():
        for prompt, response in best:
            hidden = loaded.backbone.hidden(Padded.from_lists([prompt]), Padded.from_lists([response]))
            every = torch.log_softmax(loaded.backbone.logits(hidden[0, :-1]), -1)
            total -= sum(float(every[place, token]) for place, token in enumerate(response))
            count += len(response)
    assert float(found[0.5][1]["lm_loss"].detach()) == pytest.approx(total / count, abs=1e-5)
    assert float(found[0.5][0].detach()) == pytest.approx(float(found[0.0][0].detach()) + 0.5 * total / count, abs=1e-5)
    assert "lm_loss" not in found[0.0][1]
    assert flops[0.5] > flops[0.0]
