"""Padding, order and micro-batches never change a stage's loss or its gradients."""

import dataclasses

import pytest
import torch

from align.batches.micro_batches import prompt_groups
from align.core.tensor_ops import Padded
from align.models.heads import LanguageModel, ScalarHead
from align.ppo.rollout import pack_rollout, plan_minibatch
from align.reward.train import RewardConfig, RewardTask, build_module
from align.sft import SFTConfig
from align.sft.train import batch_loss, loss_counts, token_counts
from align.training.start import build_engine
from tests.models.losses import (
    assert_invariant,
    experience_of,
    hand_turns,
    lengths_of,
    minibatch_loss,
    rankings,
    role_outputs,
    totals,
)
from tests.training.toy_modules import accumulate

ADAPTER = pytest.param(4, marks=pytest.mark.slow)  # the rank of one; whole models are tested at every save


@pytest.mark.parametrize("weight", [0.0, 0.5])
@pytest.mark.parametrize("lora_rank", [0, ADAPTER])
def test_the_sft_loss(tiny_name, load_sharp, make_run, hand_rollout, weight, lora_rank):
    if weight and not load_sharp(tiny_name).backbone.prompt_in_row:
        weight = 0.0  # an encoder predicts nothing: refused by `encode`
    loaded = load_sharp(tiny_name, lora_rank=lora_rank)
    run = make_run(SFTConfig, "sft", prompt_loss_weight=weight)
    engine = build_engine(run, LanguageModel(loaded.backbone, loaded.adapter), 1)
    turns = hand_turns(hand_rollout)

    def loss_of(batch):
        counts = loss_counts([turns[row] for row in batch])
        return lambda rows: (
            batch_loss(engine.module, [turns[row] for row in rows], counts, weight, loaded.backbone.device),
            {},
        )

    assert_invariant(engine, token_counts(turns), loss_of)


@torch.no_grad()
def test_the_sft_loss_is_a_mean_over_tokens_not_over_rows(tiny_name, load_sharp, make_run, hand_rollout):
    loaded = load_sharp(tiny_name)
    engine = build_engine(make_run(SFTConfig, "sft"), LanguageModel(loaded.backbone, None), 1)
    turns, sums, count = hand_turns(hand_rollout), 0.0, 0
    for turn in turns:
        hidden = loaded.backbone.hidden(Padded.from_lists([turn.prompt]), Padded.from_lists([turn.response]))
        every = torch.log_softmax(loaded.backbone.logits(hidden[0, :-1]), -1)
        for place, (token, learn) in enumerate(zip(turn.response, turn.loss_mask, strict=True)):
            sums, count = sums - learn * float(every[place, token]), count + learn
    # Lengths 9, 1, 4, 7, 3, 6 lose 3, 0, 1, 2, 1, 2 tokens: 30 - 9 = 21 are learned.
    assert count == 21
    loss = batch_loss(engine.module, turns, loss_counts(turns), 0.0, loaded.backbone.device)
    assert float(loss) == pytest.approx(sums / 21, abs=1e-5)


@pytest.mark.parametrize("lora_rank", [0, ADAPTER])
@pytest.mark.parametrize("terms", [{}, {"centering_weight": 0.1}, {"lm_loss_weight": 0.5}], ids=str)
def test_the_reward_loss(tiny_name, load_sharp, make_run, hand_rollout, lora_rank, terms):
    loaded = load_sharp(tiny_name, adapter="reward", lora_rank=lora_rank)
    run = make_run(RewardConfig, "reward", **terms)
    torch.manual_seed(2)
    model = build_module(run.config, loaded, ScalarHead(loaded.backbone.hidden_size, bias=False))
    optimization = build_engine(run, model, 1)
    task = RewardTask(run, run.config, loaded, optimization, rankings(hand_rollout), [])
    assert_invariant(optimization, task.lengths, task.loss)


def test_the_language_model_loss_beside_rewards_by_hand(tiny_name, load_sharp, make_run, hand_rollout):
    """The mean of -log p over the best responses' tokens, of which the second ranking's is one of four."""
    loaded = load_sharp(tiny_name)
    found = {}
    for weight in (0.5, 0.0):  # without that loss, a vocabulary matrix of its own is frozen
        run = make_run(RewardConfig, "reward", lm_loss_weight=weight)
        torch.manual_seed(2)
        model = build_module(run.config, loaded, ScalarHead(loaded.backbone.hidden_size, bias=False))
        task = RewardTask(run, run.config, loaded, build_engine(run, model, 1), rankings(hand_rollout), [])
        found[weight] = task.loss([0, 1])([0, 1])
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
    assert float(found[0.5][1]["flops"]) > float(found[0.0][1]["flops"])


MORE_TERMS = {"entropy_weight": 0.3, "kl_penalty": "k3", "clip_high": 0.4}


@pytest.mark.parametrize(
    ("lora_rank", "more"),
    [
        (0, {"critic": "shared"}),
        (0, {"critic": "separate"}),
        pytest.param(4, {"critic": "shared"}, marks=pytest.mark.slow),
        pytest.param(4, {"critic": "separate"}, marks=pytest.mark.slow),
        (0, MORE_TERMS),
    ],
    ids=str,
)
def test_the_ppo_loss(tiny_name, load_sharp, make_ppo, hand_rollout, lora_rank, more):
    trainer = make_ppo(load_sharp(tiny_name, lora_rank=lora_rank), temperature=0.8, micro_batch_tokens=20, **more)
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
    assert 0.05 < sums["clipped/policy"] < 0.95


@pytest.mark.parametrize(("lora_rank", "critic"), [(0, "separate"), (4, "shared"), (4, "separate")], ids=str)
def test_several_responses_to_a_prompt_cost_it_once_and_change_nothing(
    tiny_name, load_sharp, make_ppo, hand_rollout, lora_rank, critic, monkeypatch
):
    """Two prompts with three responses each, read by prompt groups and row by row: the same outputs, loss and gradients."""
    rollout = dataclasses.replace(hand_rollout, prompts=[hand_rollout.prompts[i] for i in (1, 1, 1, 4, 4, 4)])
    trainer = make_ppo(load_sharp(tiny_name, lora_rank=lora_rank), critic=critic, samples_per_prompt=3, rollout_size=6)
    torch.manual_seed(3)
    torch.nn.init.normal_(trainer.engine.module.value_head.linear.weight, std=0.1)
    backbone = trainer.loaded.backbone
    assert backbone.shares_prompts
    rows, found, planned = list(range(6)), [], []
    for shares in (True, False):
        monkeypatch.setattr(backbone, "shares_prompts", shares)
        plan = plan_minibatch(rollout, rows, backbone, trainer.config.micro_batch_tokens, trainer.run.accelerator)
        planned.append(sum(len(pack_rollout(rollout, part.rows, backbone.device)[0].lengths) for part in plan))
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


def test_what_the_roles_say_of_a_rollout_does_not_depend_on_micro_batches(tiny_name, load_sharp, make_ppo, hand_rollout):
    loaded = load_sharp(tiny_name, lora_rank=4)
    found = []
    for budget, minibatches in ((1, 1), (40, 1), (10**6, 3)):
        trainer = make_ppo(loaded, micro_batch_tokens=budget, minibatches=minibatches)
        torch.manual_seed(3)
        torch.nn.init.normal_(trainer.engine.module.value_head.linear.weight, std=0.1)
        found.append(role_outputs(trainer, hand_rollout))
    assert found[0].log_probs.shape == (6, 9)
    for name in ("log_probs", "ref_log_probs", "values", "entropy"):
        for other in found[1:]:
            torch.testing.assert_close(getattr(other, name), getattr(found[0], name), atol=1e-5, rtol=0)
    assert (found[0].log_probs - found[0].ref_log_probs).abs().max() > 0.1  # the adapter is not the base
