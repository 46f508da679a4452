"""Estimators of KL and the controllers of its coefficient, by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from align.ppo.kl import AdaptiveKL, FixedKL, kl_estimates

QUICK = settings(deadline=None, max_examples=40)


def doubles(rows):
    return torch.tensor(rows, dtype=torch.float64)


def test_estimates_by_hand():
    # pi / ref = 2, 1/2, 1: k1 = ln 2, -ln 2, 0; k3 = 1/2 - 1 + ln 2, 2 - 1 - ln 2, 0.
    k1, k3 = kl_estimates(torch.log(doubles([0.5, 0.25, 0.3])), torch.log(doubles([0.25, 0.5, 0.3])))
    assert k1.tolist() == pytest.approx([math.log(2), -math.log(2), 0.0], abs=1e-15)
    assert k3.tolist() == pytest.approx([math.log(2) - 0.5, 1 - math.log(2), 0.0], abs=1e-15)


def test_both_estimators_are_unbiased():
    policy, reference = doubles([0.5, 0.3, 0.2]), doubles([0.2, 0.2, 0.6])
    # .5 ln 2.5 + .3 ln 1.5 + .2 ln 1/3 = .4581454 + .1216395 - .2197225
    exact = 0.3600624
    for estimate in kl_estimates(torch.log(policy), torch.log(reference)):
        assert (policy * estimate).sum().item() == pytest.approx(exact, abs=1e-7)


@QUICK
@given(st.floats(-20, 0), st.floats(-20, 0))
def test_k3_is_never_negative(now, then):
    assert kl_estimates(doubles([now]), doubles([then]))[1].item() >= 0.0


def test_k3_near_zero_keeps_its_digits():
    # k3 = k1^2 / 2 - k1^3 / 6 + ...: for k1 = 1e-6 that is 5e-13, which exp(-k1) - 1 + k1 would round to noise.
    assert kl_estimates(doubles([1e-6]), doubles([0.0]))[1].item() == pytest.approx(5e-13, rel=1e-3)


def test_fixed_coefficient_stays():
    controller = FixedKL(0.05)
    controller.adapt(1000.0, 64)
    assert controller.beta == 0.05


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
    controller = AdaptiveKL(beta=0.1, target=6.0, horizon=10000)
    controller.adapt(kl, samples=256)
    assert controller.beta == pytest.approx(expected, rel=1e-12)


def test_adaptive_coefficient_compounds():
    controller = AdaptiveKL(beta=1.0, target=1.0, horizon=100)
    for _ in range(3):
        controller.adapt(2.0, samples=50)  # times 1 + .2 x 50 / 100 = 1.1
    assert controller.beta == pytest.approx(1.331, rel=1e-12)


@QUICK
@given(st.floats(0.01, 1.0), st.lists(st.floats(-5, 50), max_size=20), st.integers(1, 1000))
def test_adaptive_coefficient_stays_positive_and_moves_towards_the_target(beta, kls, samples):
    controller = AdaptiveKL(beta, target=6.0, horizon=1000)
    for kl in kls:
        before = controller.beta
        controller.adapt(kl, samples)
        assert controller.beta > 0
        assert (controller.beta - before) * (kl - 6.0) >= 0
        assert 0.8 * before - 1e-15 <= controller.beta <= 1.2 * before + 1e-15


def test_a_horizon_far_below_the_rollout_does_not_turn_the_sign():
    controller = AdaptiveKL(beta=0.1, target=6.0, horizon=10)
    controller.adapt(0.0, samples=64)  # 1 - .2 x 6.4 = -.28
    assert controller.beta >= 0
