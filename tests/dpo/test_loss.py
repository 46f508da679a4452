"""The losses of DPO and IPO by hand, and their gradients."""

import pytest
import torch

from align.reward.loss import dpo_losses, ipo_losses


def doubles(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("difference", "beta", "smoothing", "expected"),
    [
        (0.0, 0.1, 0.0, 0.6931472),  # ln 2: the policy is its reference
        (10.0, 0.1, 0.0, 0.3132617),  # ln(1 + exp(-1))
        (-10.0, 0.1, 0.0, 1.3132617),  # 1 more
        (10.0, 0.5, 0.0, 0.0067153),  # ln(1 + exp(-5))
        (10.0, 0.1, 0.1, 0.4132617),  # .9 x .3132617 + .1 x 1.3132617
        (0.0, 0.1, 0.3, 0.6931472),
    ],
)
def test_dpo_by_hand(difference, beta, smoothing, expected):
    assert dpo_losses(doubles(difference), beta, smoothing).item() == pytest.approx(expected, abs=1e-7)


def test_the_gradient_of_dpo_weighs_pairs_by_how_wrong_they_are():
    difference = doubles(10.0, -10.0).requires_grad_()
    dpo_losses(difference, 0.1).sum().backward()
    # -beta sigmoid(-beta d): .1 x .2689414 and .1 x .7310586 (DPO, the gradient in section 4)
    assert difference.grad.tolist() == pytest.approx([-0.02689414, -0.07310586], abs=1e-7)


def test_ipo_by_hand():
    # 1 / (2 x .1) = 5: (5 - 5)^2, (2 - 5)^2, (-1 - 5)^2
    assert ipo_losses(doubles(5.0, 2.0, -1.0), 0.1).tolist() == pytest.approx([0.0, 9.0, 36.0])


def test_gradients_against_finite_differences():
    difference = torch.randn(6, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: dpo_losses(x, 0.7, 0.1), difference)
    assert torch.autograd.gradcheck(lambda x: ipo_losses(x, 0.7), difference)


def test_a_hopeless_pair_neither_overflows_nor_loses_its_gradient():
    difference = doubles(-1e6).requires_grad_()
    loss = dpo_losses(difference, 0.1)
    loss.sum().backward()
    assert loss.item() == pytest.approx(1e5)
    assert difference.grad.item() == pytest.approx(-0.1)
