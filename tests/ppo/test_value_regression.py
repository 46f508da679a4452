"""The value head's regression: by hand, against an independent solution, and without a response's own return."""

import copy

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st

from align.models.heads import ValueHead, running_mean
from align.ppo.value_regression import DECAY, FOLDS, RIDGES, ValueRegression, ridge_regressions, squared_errors


def moments_of(features, targets):
    joined = torch.cat([features, torch.ones(len(features), 1), targets[:, None]], 1).double()
    return joined.T @ joined


def rollout(rng, rows, size, widest=6):
    """Hidden states of each row, lengths, and returns [B, T] that are constant in a row."""
    lengths = torch.randint(1, widest + 1, (rows,), generator=rng)
    states = {row: torch.randn(int(length), size, generator=rng) for row, length in enumerate(lengths)}
    returns = torch.randn(rows, 1, generator=rng).expand(rows, widest) * 1.0
    return states, returns, lengths


def test_the_running_mean_by_hand() -> None:
    states = torch.tensor([[[2.0, 0.0], [4.0, 6.0], [0.0, 0.0]]])
    assert running_mean(states).tolist() == [[[2.0, 0.0], [3.0, 3.0], [2.0, 2.0]]]


def test_a_regression_by_hand() -> None:
    """Features 0, 2 and targets 1, 5: variance 1, slope 2 without a penalty, 2 / (1 + ridge) with it, 0 for the mean."""
    fits = ridge_regressions(moments_of(torch.tensor([[0.0], [2.0]]), torch.tensor([1.0, 5.0])))
    slopes = [2 / (1 + ridge) for ridge in RIDGES] + [0.0]
    assert fits[:, 0].tolist() == pytest.approx(slopes)
    assert fits[:, 1].tolist() == pytest.approx([3 - slope for slope in slopes])  # the means are 1 and 3
    errors = squared_errors(fits, moments_of(torch.tensor([[1.0], [2.0]]), torch.tensor([3.0, 0.0])))
    assert errors.tolist() == pytest.approx([(3 + slope) ** 2 for slope in slopes])  # predictions 3 and 3 + slope


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**6), st.integers(2, 30), st.integers(1, 6))
def test_the_coefficients_solve_the_normal_equations(seed: int, count: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    features, targets = rng.normal(3, 2, (count, size)), rng.normal(size=count)
    fits = ridge_regressions(moments_of(torch.from_numpy(features), torch.from_numpy(targets))).numpy()
    centered = features - features.mean(0)
    covariance = centered.T @ centered / count
    for ridge, fit in zip(RIDGES, fits, strict=False):
        penalized = covariance + ridge * np.trace(covariance) / size * np.eye(size)
        expected = np.linalg.solve(penalized, centered.T @ (targets - targets.mean()) / count)
        np.testing.assert_allclose(fit[:-1], expected, rtol=1e-5, atol=1e-7)
        assert features.mean(0) @ fit[:-1] + fit[-1] == pytest.approx(targets.mean())


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**6), st.integers(4, 20), st.sampled_from([1, 2]))
def test_cross_fitted_values_do_not_depend_on_their_own_prompts_returns(seed: int, rows: int, samples: int) -> None:
    rows -= rows % samples
    rng = torch.Generator().manual_seed(seed)
    states, returns, lengths = rollout(rng, rows, 3)

    def without_selection(returns):
        regression = ValueRegression(ValueHead(3), Accelerator())
        cross_fitted, fitted = regression.fit(states, returns, lengths, samples)
        return regression, cross_fitted, fitted

    before = without_selection(returns)[1]
    changed = returns.clone()
    changed[:samples] += 1.0  # the first prompt's
    regression, after, fitted = without_selection(changed)
    weight, bias = regression.head.fitted
    first = running_mean(states[0]) @ weight + bias
    torch.testing.assert_close(first, fitted[0, : len(first)], atol=1e-5, rtol=1e-5)
    if rows // samples > FOLDS:
        return  # the penalty may change with any return; its choice is the only way from a return to its own values
    mean_before, mean_after = before[:samples], after[:samples]
    if torch.allclose(before[samples:], after[samples:]):
        torch.testing.assert_close(mean_before, mean_after, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("value", [0.0, 1.4, -250.0])
def test_equal_returns_are_the_values(value: float) -> None:
    rng = torch.Generator().manual_seed(0)
    states, returns, lengths = rollout(rng, 8, 5)
    head = ValueHead(5)
    cross_fitted, _ = ValueRegression(head, Accelerator()).fit(states, torch.full_like(returns, value), lengths, 1)
    for row, length in enumerate(lengths):
        assert cross_fitted[row, :length].tolist() == pytest.approx([value] * int(length), abs=1e-5 * max(1, abs(value)))
        assert head(states[row][None])[0].tolist() == pytest.approx([value] * int(length), abs=1e-5 * max(1, abs(value)))


def test_values_that_states_predict_are_found_and_noise_becomes_the_mean() -> None:
    rng = torch.Generator().manual_seed(1)
    states, _, lengths = rollout(rng, 200, 4)
    weight = torch.tensor([1.0, -2.0, 0.0, 0.5])
    linear = torch.zeros(200, 6)
    for row, hidden in states.items():
        linear[row, : len(hidden)] = running_mean(hidden) @ weight + 3
    head = ValueHead(4)
    cross_fitted, _ = ValueRegression(head, Accelerator()).fit(states, linear, lengths, 1)
    torch.testing.assert_close(cross_fitted, linear, atol=0.02, rtol=0.02)
    assert head.fitted[0].tolist() == pytest.approx(weight.tolist(), abs=0.02)
    noise = torch.randn(200, 1, generator=rng).expand(200, 6)
    ValueRegression(head, Accelerator()).fit(states, noise, lengths, 1)
    assert head.fitted[0].abs().max() < 0.1


def test_a_single_response_leaves_the_head_as_it_is() -> None:
    head = ValueHead(2)
    assert ValueRegression(head, Accelerator()).fit({0: torch.ones(3, 2)}, torch.ones(1, 3), torch.tensor([3]), 1) is None
    assert head.fitted is None


def test_earlier_rollouts_count_less_and_the_state_continues_the_regression() -> None:
    rng = torch.Generator().manual_seed(2)
    first, second = (rollout(rng, 10, 3) for _ in range(2))
    regression = ValueRegression(ValueHead(3), Accelerator())
    regression.fit(*first, 1)
    alone = regression.moments.clone()
    state = copy.deepcopy(regression.state_dict())
    regression.fit(*second, 1)
    resumed = ValueRegression(ValueHead(3), Accelerator())
    resumed.load_state_dict(state)
    expected = resumed.fit(*second, 1)
    assert torch.equal(resumed.moments, regression.moments)
    assert torch.equal(resumed.head.fitted[0], regression.head.fitted[0])
    fresh = ValueRegression(ValueHead(3), Accelerator())
    fresh.fit(*second, 1)
    torch.testing.assert_close(regression.moments, fresh.moments + DECAY * alone)
    assert expected is not None
