import dataclasses
import math

import pytest
import torch

from align.core.tensor_ops import masked_sum
from align.ppo.losses import KLController, kl_estimate, policy_losses, value_losses
from tests.models.losses import experience_of, minibatch_loss, role_outputs


def doubles(rows):
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize(
    ("high", "ratio", "advantage", "loss", "decided"),
    [
        (None, 1.0, 2.0, -2.0, False),  # at the start: -A
        (None, 1.1, 2.0, -2.2, False),  # inside the clip: -1.1 x 2
        (None, 1.5, 2.0, -2.4, True),  # a good token is not pushed beyond 1.2: -1.2 x 2
        (None, 0.5, 2.0, -1.0, False),  # a good token that fell is pulled back: -.5 x 2, not -.8 x 2
        (None, 1.5, -2.0, 3.0, False),  # a bad token that rose is pushed down: 1.5 x 2, not 1.2 x 2
        (None, 0.5, -2.0, 1.6, True),  # a bad token is not pushed below .8: .8 x 2
        (None, 0.9, -2.0, 1.8, False),
        (0.3, 1.25, 2.0, -2.5, False),  # below 1 + cliprange_high
        (0.3, 1.5, 2.0, -2.6, True),  # -1.3 x 2
        (0.3, 0.5, -2.0, 1.6, True),  # below 1 the clip is .2 as before
        (0.3, 2.5, -2.0, 5.0, False),  # a bad token pushes by its ratio
        (0.3, 4.0, 2.0, -2.6, True),
    ],
)
def test_policy_loss_by_hand(high, ratio, advantage, loss, decided):
    old = doubles([-1.3])
    now = (old + math.log(ratio)).requires_grad_()
    found, clipped = policy_losses(now, old, doubles([advantage]), 0.2, high)
    assert found.item() == pytest.approx(loss, abs=1e-12)
    assert clipped.item() is decided
    found.sum().backward()
    assert (now.grad.item() == 0.0) == decided


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "decided"),
    [
        (1.1, 1.0, 2.0, 0.405, False),  # half of .9^2; within the clip both errors are equal
        (1.5, 1.0, 2.0, 0.32, True),  # held at 1.2: half of .8^2, larger than half of .5^2
        (0.5, 1.0, 2.0, 1.125, False),  # moved away from the target: half of 1.5^2, larger than half of 1.2^2
        (2.6, 1.0, 2.0, 0.32, True),  # beyond the target: .8^2 is larger than .6^2
        (4.0, 1.0, 2.0, 2.0, False),  # far beyond it: half of 2^2, larger than half of .8^2
        (-0.5, 0.0, -1.0, 0.32, True),  # downwards: held at -.2
    ],
)
def test_value_loss_by_hand(value, old, target, loss, decided):
    found, clipped = value_losses(doubles([value]), doubles([old]), doubles([target]), 0.2)
    assert found.item() == pytest.approx(loss, abs=1e-12)
    assert clipped.item() is decided


def test_a_value_clip_of_0_is_none(make_ppo, load_sharp, hand_rollout):
    """The loss of values that have left their old ones is half their squared error, and they still learn."""
    trainer = make_ppo(load_sharp("tiny-gpt2"), cliprange_value=0.0)
    roles = role_outputs(trainer, hand_rollout)
    moved = dataclasses.replace(roles, values=roles.values - 0.5)  # the values were lower when they were recorded
    experience = experience_of(trainer, hand_rollout, torch.arange(6.0), moved)
    rows = list(range(6))
    total, sums = minibatch_loss(trainer, experience, rows)(rows)
    errors = (roles.values - experience.returns)[experience.mask]
    assert sums["loss/value"].item() == pytest.approx(0.5 * (errors**2).mean().item(), rel=1e-4)
    assert float(sums["value/clipfrac"]) == 0
    bias = trainer.engine.trainable["value_head.linear.bias"]
    (gradient,) = torch.autograd.grad(total, [bias])
    assert float(gradient) == pytest.approx(0.1 * float(errors.mean()), rel=1e-4)  # vf_coef 0.1


def test_gradients_against_finite_differences():
    rng = torch.Generator().manual_seed(3)
    now, old, advantages = (torch.randn(4, 5, generator=rng, dtype=torch.float64) * 0.5 for _ in range(3))
    mask = torch.rand(4, 5, generator=rng) < 0.7
    ratio = torch.exp(now - old)
    for edge in (0.8, 1.2):  # finite differences are wrong across a kink: none may be near
        assert (ratio - edge).abs().min().item() > 1e-4
    assert torch.autograd.gradcheck(
        lambda x: masked_sum(policy_losses(x, old, advantages, 0.2)[0], mask), now.clone().requires_grad_()
    )
    assert torch.autograd.gradcheck(
        lambda x: masked_sum(value_losses(x, old, advantages, 0.2)[0], mask), now.clone().requires_grad_()
    )


def test_rounding_does_not_count_as_clipping():
    rng = torch.Generator().manual_seed(0)
    old, returns = (torch.randn(1, 1000, generator=rng) for _ in range(2))
    values = old + 0.19 * (2 * torch.rand(1, 1000, generator=rng) - 1)
    losses, decided = value_losses(values, old, returns, 0.2)
    assert not decided.any()
    assert torch.equal(losses, 0.5 * (values - returns) ** 2)


@pytest.mark.parametrize(
    ("estimator", "expected", "slopes"),
    [
        # pi / ref = 2, 1/2, 1: d = ln 2, -ln 2, 0. k2 = d^2 / 2; k3 = exp(-d) - 1 + d = 1/2 - 1 + ln 2, 2 - 1 - ln 2, 0.
        ("k1", [math.log(2), -math.log(2), 0.0], [1.0, 1.0, 1.0]),
        ("k2", [math.log(2) ** 2 / 2, math.log(2) ** 2 / 2, 0.0], [math.log(2), -math.log(2), 0.0]),
        ("k3", [math.log(2) - 0.5, 1 - math.log(2), 0.0], [0.5, -1.0, 0.0]),  # slopes 1 - exp(-d)
    ],
)
def test_kl_estimates_and_their_slopes_by_hand(estimator, expected, slopes):
    policy, reference = torch.log(doubles([0.5, 0.25, 0.3])).requires_grad_(), torch.log(doubles([0.25, 0.5, 0.3]))
    found = kl_estimate(policy, reference, estimator)
    assert found.tolist() == pytest.approx(expected, abs=1e-12)
    found.sum().backward()
    assert policy.grad.tolist() == pytest.approx(slopes, abs=1e-12)


def test_estimators_of_kl_are_unbiased_and_keep_their_digits_near_zero():
    policy, reference = doubles([0.5, 0.3, 0.2]), doubles([0.2, 0.2, 0.6])
    # .5 ln 2.5 + .3 ln 1.5 + .2 ln 1/3 = .4581454 + .1216395 - .2197225
    exact = 0.3600624
    for name in ("k1", "k3"):
        estimate = kl_estimate(torch.log(policy), torch.log(reference), name)
        assert (policy * estimate).sum().item() == pytest.approx(exact, abs=1e-7)
    # k3 = k1^2 / 2 - k1^3 / 6 + ...: for k1 = 1e-6 that is 5e-13, which exp(-k1) - 1 + k1 would round to noise.
    assert kl_estimate(doubles([1e-6]), doubles([0.0]), "k3").item() == pytest.approx(5e-13, rel=1e-3)


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (6.0, 0.1),  # on target
        (6.6, 0.1 * (1 + 0.1 * 256 / 10000)),  # 6.6 / 6 - 1 = .1
        (5.4, 0.1 * (1 - 0.1 * 256 / 10000)),
        (60.0, 0.1 * (1 + 0.2 * 256 / 10000)),  # 9 is clipped to .2
        (0.0, 0.1 * (1 - 0.2 * 256 / 10000)),  # -1 is clipped to -.2
        (-3.0, 0.1 * (1 - 0.2 * 256 / 10000)),
    ],
)
def test_adaptive_coefficient_by_hand(kl, expected):
    controller, fixed = KLController(0.1, target=6.0, horizon=10000), KLController(0.1)
    for each in (controller, fixed):
        each.update(kl, samples=256)
    assert controller.coef == pytest.approx(expected, rel=1e-12)
    assert fixed.coef == 0.1


def test_a_resumed_run_continues_an_adapted_coefficient_and_reads_a_constant_one_from_its_settings():
    controller, fixed = KLController(0.1, target=6.0), KLController(0.1)
    for each in (controller, fixed):
        each.load_state_dict({"coef": 0.4, "start": 0.1})
    assert (controller.coef, fixed.coef) == (0.4, 0.1)
    controller.load_state_dict(0.3)  # as earlier versions wrote it
    assert controller.coef == 0.3


def test_a_horizon_far_below_the_rollout_does_not_turn_the_sign():
    controller = KLController(0.1, target=6.0, horizon=10)
    controller.update(0.0, samples=64)  # 1 - .2 x 6.4 = -.28
    assert controller.coef >= 0


def test_in_expectation_k2_has_the_gradient_of_the_kl_and_k3_of_the_reverse_kl():
    """Over all tokens of a small vocabulary, weighted by the policy."""
    logits = torch.tensor([0.3, -1.0, 0.9, 0.0], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([1.0, 0.5, -0.5, 0.2], dtype=torch.float64), 0)

    def gradient(estimator):
        log_probs = torch.log_softmax(logits, 0)
        loss = (log_probs.exp().detach() * kl_estimate(log_probs, reference, estimator)).sum()
        return torch.autograd.grad(loss, logits)[0]

    log_probs = torch.log_softmax(logits, 0)
    (exact,) = torch.autograd.grad((log_probs.exp() * (log_probs - reference)).sum(), logits)
    torch.testing.assert_close(gradient("k2"), exact)
    (other_way,) = torch.autograd.grad((reference.exp() * (reference - torch.log_softmax(logits, 0))).sum(), logits)
    torch.testing.assert_close(gradient("k3"), other_way)
