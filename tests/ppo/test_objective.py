"""The clipped losses of PPO token by token, and their gradients against finite differences."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from align.core.errors import UserError
from align.core.tensor_ops import masked_sum
from align.ppo.experience import build_experience
from align.ppo.learning import check_ratio
from align.ppo.objective import policy_losses, value_losses
from tests.models.losses import minibatch_loss, role_outputs

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
    ("ratio", "advantage", "loss", "decided"),
    [
        (1.25, 2.0, -2.5, False),  # below 1 + clip_high
        (1.5, 2.0, -2.6, True),  # -1.3 x 2
        (0.5, -2.0, 1.6, True),  # below 1 the clip is .2 as before
        (2.5, -2.0, 5.0, False),  # a bad token pushes by its ratio
        (4.0, -2.0, 6.0, True),  # up to 3, not 4 x 2
        (4.0, 2.0, -2.6, True),  # a good token has no such bound
        (4.0, 0.0, 0.0, False),
    ],
)
def test_a_higher_clip_and_the_dual_clip_by_hand(ratio, advantage, loss, decided):
    now = doubles([math.log(ratio)]).requires_grad_()
    found, clipped = policy_losses(now, doubles([0.0]), doubles([advantage]), 0.2, clip_high=0.3, dual_clip=3.0)
    assert found.item() == pytest.approx(loss, abs=1e-12)
    assert clipped.item() is decided
    found.sum().backward()
    assert (now.grad.item() == 0.0) == (decided or advantage == 0.0)
    assert math.isfinite(now.grad.item())


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


def test_a_value_clip_of_0_is_none(make_ppo, load_sharp, hand_rollout):
    """The loss of values that have left their old ones is half their squared error, and they still learn."""
    trainer = make_ppo(load_sharp("tiny-gpt2"), value_clip=0.0)
    roles = role_outputs(trainer, hand_rollout)
    moved = dataclasses.replace(roles, values=roles.values - 0.5)  # the values were lower when they were recorded
    experience = build_experience(trainer.config, hand_rollout, torch.arange(6.0), moved, 0.05)
    rows = list(range(6))
    total, sums = minibatch_loss(trainer, experience, rows)(rows)
    errors = (roles.values - experience.returns)[experience.mask]
    assert sums["value_loss"].item() == pytest.approx(0.5 * (errors**2).mean().item(), rel=1e-4)
    assert float(sums["clipped/value"]) == 0
    bias = trainer.optimization.trainable["value_head.linear.bias"]
    (gradient,) = torch.autograd.grad(total, [bias])
    assert float(gradient) == pytest.approx(0.1 * float(errors.mean()), rel=1e-4)  # value_weight 0.1


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


def test_rounding_does_not_count_as_clipping():
    rng = torch.Generator().manual_seed(0)
    old, returns = (torch.randn(1, 1000, generator=rng) for _ in range(2))
    values = old + 0.19 * (2 * torch.rand(1, 1000, generator=rng) - 1)
    losses, decided = value_losses(values, old, returns, 0.2)
    assert not decided.any()
    assert torch.equal(losses, 0.5 * (values - returns) ** 2)


def test_rounding_is_not_counted_as_clipping():
    """0.1 + (0.3 - 0.1) is not 0.3 in float32: an unclipped value must equal itself."""
    generator = torch.Generator().manual_seed(0)
    old, new = (torch.randn(10_000, generator=generator) * 0.05 for _ in range(2))
    _, clipped = value_losses(new, old, torch.zeros(10_000), 1.0)
    assert not clipped.any()


@pytest.mark.parametrize(
    ("device", "error", "outcome"),
    [
        ("cpu", 9e-5, ""),
        ("cpu", 2e-4, "stops"),
        ("cuda", 9e-4, ""),
        ("cuda", 2e-3, "warns"),
        ("cuda", 0.049, "warns"),
        ("cuda", 0.06, "stops"),
        ("cuda", float("nan"), "stops"),
        ("cpu", float("nan"), "stops"),
    ],
)
def test_the_ratio_check_is_exact_where_kernels_are_and_warns_where_they_are_not(device, error, outcome):
    if outcome == "stops":
        with pytest.raises(UserError, match="the ratio at the first minibatch of a fresh rollout is off by"):
            check_ratio(error, torch.device(device))
    else:
        assert bool(check_ratio(error, torch.device(device))) == (outcome == "warns")
