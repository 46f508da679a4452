"""Examples of each stage, their losses as the stages compute them, and the check that micro-batches change nothing."""

import random
from dataclasses import replace

import pytest
import torch

from align.batches.micro_batches import MicroBatch, micro_batches, prompt_groups
from align.ppo.extensions.active import Extensions
from align.ppo.records import Experience, TrainingSignal
from align.ppo.rollout import forward_all_roles
from align.ppo.train import compute_advantages, minibatches_of_epoch, policy_and_critic_loss
from align.tokenization.encoded import EncodedDemonstration, EncodedRanking
from tests.training.toy_modules import accumulate


def role_outputs(trainer, rollout):
    """What the roles of `trainer` predict for a rollout, batched as its first epoch will be."""
    config, run = trainer.config, trainer.run
    minibatches = minibatches_of_epoch(config, len(rollout), update=1, epoch=0)
    how = (config.temperature, config.micro_batch_tokens, run.accelerator)
    return forward_all_roles(trainer.roles, rollout, minibatches, trainer.loaded.backbone, *how)


def experience_of(trainer, rollout, scores, old, kl_coef=0.05):
    """The experience that training scores [B] make of a rollout."""
    shaped = Extensions(trainer.extensions.values()).shape(TrainingSignal(scores, {}), rollout, old)
    signal = replace(shaped, scores=scores)
    advantages, returns = compute_advantages(trainer.config, signal, old, rollout.lengths, kl_coef)
    return Experience(rollout, scores, signal, old, advantages, returns, kl_coef)


def minibatch_loss(trainer, experience, rows):
    """The loss of `rows` of a rollout, as a function of the rows of one micro-batch."""
    config, roles, rollout = trainer.config, trainer.roles, experience.rollout
    prompts, coefficients = [prompt.ids for prompt in rollout.prompts], config.loss_coefficients(experience.kl_coef)

    def loss(part):
        groups = prompt_groups(trainer.loaded.backbone, prompts, rollout.responses, part, 10**9)
        batch = experience.batch(MicroBatch(groups), rows, trainer.run.accelerator.device, roles.trains_critic)
        return policy_and_critic_loss(roles, batch, config.temperature, coefficients)

    return loss


ADAPTER = pytest.param(4, marks=pytest.mark.slow)
"""The rank of one; whole models are tested at every save."""


def loss_of_rows(batch_loss, engine, examples, **values):
    """A stage's `batch_loss` in the form of `assert_invariant`: of a batch's rows, the loss of a micro-batch's rows."""

    def of_batch(batch):
        batch = [examples[row] for row in batch]
        device = engine.accelerator.device
        return lambda rows: batch_loss(engine.module, [examples[row] for row in rows], batch, device=device, **values)

    return of_batch


def totals(engine, lengths, rows, budget, loss):
    """Loss, metrics and gradients of a global batch, computed in micro-batches of at most `budget` tokens."""
    plan = micro_batches(rows, [lengths[row] for row in rows], budget, engine.accelerator)
    engine.optimizer.zero_grad(set_to_none=True)
    sums = {name: float(value) for name, value in accumulate(engine, plan, loss).items()}
    gradients = {name: w.grad.clone() for name, w in engine.trainable.items() if w.grad is not None}
    return len(plan), sums, gradients


def assert_invariant(engine, lengths, loss_of):
    """The same within 1e-5 whatever the order and the micro-batches: every row alone (no padding), some, all at once."""
    rows = list(range(len(lengths)))
    shuffled = rows.copy()
    random.Random(5).shuffle(shuffled)
    assert shuffled != rows
    count, expected, gradients = totals(engine, lengths, rows, 10**6, loss_of(rows))
    assert count == 1
    assert max(gradient.abs().max() for gradient in gradients.values()) > 1e-2
    counts = []
    for order, budget in ((shuffled, 10**6), (rows, 1), (shuffled, 1), (shuffled, 2 * max(lengths))):
        count, sums, found = totals(engine, lengths, order, budget, loss_of(order))
        counts.append(count)
        assert sums == pytest.approx(expected, abs=1e-5, rel=1e-6)
        assert found.keys() == gradients.keys()
        for name, gradient in found.items():
            bound = 1e-5 * max(1.0, float(gradients[name].abs().max()))
            torch.testing.assert_close(
                gradient, gradients[name], atol=bound, rtol=0, msg=lambda text, n=name: f"{n}: {text}"
            )
    assert counts[:3] == [1, len(rows), len(rows)]
    assert 1 < counts[3] < len(rows)


def lengths_of(rollout):
    return [len(prompt.ids) + len(response) for prompt, response in zip(rollout.prompts, rollout.responses, strict=True)]


def hand_turns(rollout):
    """Examples of two turns: every third token belongs to the user between."""
    return [
        EncodedDemonstration(prompt.ids, response, [place % 3 != 1 for place in range(len(response))])
        for prompt, response in zip(rollout.prompts, rollout.responses, strict=True)
    ]


def rankings(rollout):
    """Rankings of K = 3, 4, 2 and 2 with ties and a margin, from the responses of the rollout."""
    r, p = rollout.responses, [prompt.ids for prompt in rollout.prompts]
    return [
        EncodedRanking(p[0], [r[0], r[1], r[2]], [2, 1, 2]),
        EncodedRanking(p[1], [r[3], r[4], r[5], r[1]], [4, 2, 3, 1]),
        EncodedRanking(p[2], [r[2], r[0]], [1, 2], margin=0.5),
        EncodedRanking(p[3], [r[5], r[4]], [2, 1]),
    ]
