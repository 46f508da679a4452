"""The clipped losses of PPO token by token, and their gradients against finite differences."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from align.ppo.objective import policy_losses, value_losses
from align.tensor_ops import masked_sum

QUICK = settings(deadline=None, max_examples=40)

NAN = float("nan")


def doubles(rows):
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "decided"),
    [
        (1.0, 2.0, -2.0, False),  # at the start: -A
        (1.1, 2.0, -2.2, False),  # inside the clip: -1.1 x 2
        (1.5, 2.0, -2.4, True),  # a good token is not pushed beyond 1.2: -1.2 x 2
        (0.5, 2.0, -1.0, False),  # a good token that fell is pulled back: -.5 x 2, not -.8 x 2
        (1.5, -2.0, 3.0, False),  # a bad token that rose is pushed down: 1.5 x 2, not 1.2 x 2
        (0.5, -2.0, 1.6, True),  # a bad token is not pushed below .8: .8 x 2
        (0.9, -2.0, 1.8, False),
        (7.0, 0.0, 0.0, False),
    ],
)
def test_policy_loss_by_hand(ratio, advantage, loss, decided):
    old = doubles([-1.3])
    found, clipped = policy_losses(old + math.log(ratio), old, doubles([advantage]), 0.2)
    assert found.item() == pytest.approx(loss, abs=1e-12)
    assert clipped.item() is decided


@pytest.mark.parametrize(
    ("ratio", "advantage", "slope"), [(1.1, 2.0, -2.2), (1.5, 2.0, 0.0), (0.5, -2.0, 0.0), (1.5, -2.0, 3.0)]
)
def test_policy_gradient_by_hand(ratio, advantage, slope):
    # d(-A exp(l - old)) / dl = -A ratio; where the clip decided, the loss is flat.
    log_probs = doubles([math.log(ratio)]).requires_grad_()
    policy_losses(log_probs, doubles([0.0]), doubles([advantage]), 0.2)[0].sum().backward()
    assert log_probs.grad.item() == pytest.approx(slope, abs=1e-12)


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


def test_value_gradient_by_hand():
    values = doubles([1.1, 1.5, 0.5]).requires_grad_()
    value_losses(values, doubles([1.0] * 3), doubles([2.0] * 3), 0.2)[0].sum().backward()
    assert values.grad.tolist() == pytest.approx([-0.9, 0.0, -1.5], abs=1e-12)  # value - target, 0 where it is held


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


def test_padding_changes_neither_loss_nor_gradient():
    rng = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, 3, generator=rng, dtype=torch.float64) for _ in range(3)]
    for losses in (policy_losses, value_losses):
        bare = inputs[0].clone().requires_grad_()
        plain = losses(bare, inputs[1], inputs[2], 0.2)[0].sum()
        plain.backward()
        wide = [torch.cat([column, torch.full((2, 2), 3.7, dtype=torch.float64)], 1) for column in inputs]
        wide[1][:, 3:], wide[2][:, 3:] = -2.0, NAN
        wide[0].requires_grad_()
        mask = torch.tensor([[True, True, True, False, False]] * 2)
        padded = masked_sum(losses(wide[0], wide[1], wide[2], 0.2)[0], mask)
        assert padded.item() == pytest.approx(plain.item(), rel=1e-14)
        padded.backward()
        assert torch.equal(wide[0].grad[:, :3], bare.grad)


@QUICK
@given(st.floats(-3, 3), st.floats(-3, 3), st.floats(-3, 3), st.floats(0, 0.9))
def test_clipping_only_ever_makes_the_loss_larger(now, old, other, clip):
    one, two, three = doubles([now]), doubles([old]), doubles([other])
    assert policy_losses(one, two, three, clip)[0].item() >= (-three * torch.exp(one - two)).item() - 1e-12
    assert value_losses(one, two, three, clip)[0].item() >= 0.5 * (now - other) ** 2 - 1e-12
