"""Padding, order and micro-batches never change PPO's loss or its gradients; those of other stages: in their own folders."""

import dataclasses

import pytest
import torch

from align.batches.micro_batches import prompt_groups
from align.ppo.rollout import plan_minibatch
from tests.models.losses import assert_invariant, experience_of, lengths_of, minibatch_loss, role_outputs, totals
from tests.training.toy_modules import accumulate

MORE_TERMS = {"ent_coef": 0.3, "cliprange_high": 0.4, "kl_in": "loss", "kl_estimator": "k3"}


@pytest.mark.parametrize(
    ("lora_r", "more"),
    [
        (0, {"critic": "shared"}),
        (0, {"critic": "separate"}),
        pytest.param(4, {"critic": "shared"}, marks=pytest.mark.slow),
        pytest.param(4, {"critic": "separate"}, marks=pytest.mark.slow),
        (0, MORE_TERMS),
    ],
    ids=str,
)
def test_the_ppo_loss(tiny_name, load_sharp, make_ppo, hand_rollout, lora_r, more):
    trainer = make_ppo(load_sharp(tiny_name, lora_r=lora_r), temperature=0.8, micro_batch_tokens=20, **more)
    torch.manual_seed(3)
    torch.nn.init.normal_(trainer.engine.module.value_head.linear.weight, std=0.1)
    roles = role_outputs(trainer, hand_rollout)
    # As if something had been learned since: ratios between exp(-0.6) and exp(0.6) reach both sides of the clip.
    noise = 0.3 * torch.randn(roles.log_probs.shape, generator=torch.Generator().manual_seed(4)).clamp(-2, 2)
    moved = dataclasses.replace(roles, log_probs=roles.log_probs + noise, values=roles.values + noise)
    scores = torch.tensor([1.0, -0.5, -1.0, 0.0, -1.0, -1.0])
    experience = experience_of(trainer, hand_rollout, scores, moved)
    lengths = lengths_of(hand_rollout)
    assert_invariant(trainer.engine, lengths, lambda rows: minibatch_loss(trainer, experience, rows))
    _, sums, _ = totals(trainer.engine, lengths, range(6), 10**6, minibatch_loss(trainer, experience, list(range(6))))
    assert 0.05 < sums["policy/clipfrac"] < 0.95


@pytest.mark.parametrize(("lora_r", "critic"), [(0, "separate"), (4, "shared"), (4, "separate")], ids=str)
def test_several_responses_to_a_prompt_cost_it_once_and_change_nothing(
    tiny_name, load_sharp, make_ppo, hand_rollout, lora_r, critic, monkeypatch
):
    """Two prompts with three responses each, read by prompt groups and row by row: the same outputs, loss and gradients."""
    rollout = dataclasses.replace(hand_rollout, prompts=[hand_rollout.prompts[i] for i in (1, 1, 1, 4, 4, 4)])
    trainer = make_ppo(load_sharp(tiny_name, lora_r=lora_r), critic=critic, samples_per_prompt=3, rollout_batch_size=6)
    torch.manual_seed(3)
    torch.nn.init.normal_(trainer.engine.module.value_head.linear.weight, std=0.1)
    backbone = trainer.loaded.backbone
    assert backbone.shares_prompts
    rows, found, planned = list(range(6)), [], []
    for shares in (True, False):
        monkeypatch.setattr(backbone, "shares_prompts", shares)
        plan = plan_minibatch(rollout, rows, backbone, trainer.config.micro_batch_tokens, trainer.run.accelerator)
        planned.append(sum(len(part.groups) for part in plan))
        roles = role_outputs(trainer, rollout)
        experience = experience_of(trainer, rollout, torch.tensor([1.0, -0.5, 0.3, 0.0, 2.0, -1.0]), roles)
        trainer.engine.optimizer.zero_grad(set_to_none=True)
        sums = accumulate(trainer.engine, plan, minibatch_loss(trainer, experience, rows))
        gradients = {name: w.grad.clone() for name, w in trainer.engine.trainable.items() if w.grad is not None}
        found.append((roles, {name: float(value) for name, value in sums.items()}, gradients))
    (shared, sums, gradients), (plain, expected, their_gradients) = found
    assert planned[0] == 2
    for name in ("log_probs", "ref_log_probs", "values", "entropy"):
        torch.testing.assert_close(getattr(shared, name), getattr(plain, name), atol=1e-5, rtol=0)
    assert sums == pytest.approx(expected, abs=1e-5)
    assert max(gradient.abs().max() for gradient in gradients.values()) > 1e-2
    for name, gradient in gradients.items():
        bound = 1e-5 * max(1.0, float(their_gradients[name].abs().max()))
        torch.testing.assert_close(gradient, their_gradients[name], atol=bound, rtol=0)


def test_a_family_is_cut_at_the_budget_and_at_its_most(backbone):
    """Prompt of 3, responses of 4 tokens: rows of 2 take 11 (behind an encoder, whose start token counts, 13)."""
    prompts, responses = [[5, 6, 7]] * 10, [[8, 9, 8, 9]] * 10
    assert [len(rows) for rows in prompt_groups(backbone, prompts, responses, range(10), 10**6)] == [8, 2]
    assert [len(rows) for rows in prompt_groups(backbone, prompts, responses, range(10), 13)] == [2] * 5
    assert [len(rows) for rows in prompt_groups(backbone, prompts, responses, range(10), 1)] == [1] * 10
