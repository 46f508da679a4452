import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from align.sft.loss import demonstration_loss

QUICK = settings(deadline=None, max_examples=40)

LOG_PROBS = [[-1.0, -2.0, -4.0, -8.0], [-0.5, -0.25, float("nan"), float("inf")]]
LEARN = torch.tensor([[False, True, True, False], [True, True, False, False]])
CONTEXT = torch.tensor([[True, False, False, True], [False, False, False, False]])


def doubles(rows):
    return torch.tensor(rows, dtype=torch.float64)


def test_loss_and_gradient_by_hand():
    # (2 + 4 + .5 + .25) / 4 tokens; with the prompt 6.75 / 4 + .5 x (1 + 8) / 2 = 1.6875 + 2.25
    assert demonstration_loss(doubles(LOG_PROBS), LEARN, CONTEXT, 4, 2, 0.0).item() == 1.6875
    assert demonstration_loss(doubles(LOG_PROBS), LEARN, CONTEXT, 4, 2, 0.5).item() == 3.9375
    log_probs = doubles(LOG_PROBS).requires_grad_()
    demonstration_loss(log_probs, LEARN, CONTEXT, 4, 2, 0.5).backward()
    # -1/4 where a token is learned, -.5 / 2 in the prompt, 0 elsewhere, though NaN stands there.
    assert log_probs.grad.tolist() == [[-0.25, -0.25, -0.25, -0.25], [-0.25, -0.25, 0.0, 0.0]]


def test_counts_are_those_of_the_global_batch():
    whole = demonstration_loss(doubles(LOG_PROBS), LEARN, CONTEXT, 4, 2, 0.5).item()
    rows = [
        demonstration_loss(doubles([LOG_PROBS[row]]), LEARN[row : row + 1], CONTEXT[row : row + 1], 4, 2, 0.5).item()
        for row in range(2)
    ]
    assert sum(rows) == whole
    # A mean of the rows' own means would be (3 + .375) / 2 = 1.6875 only by chance: row 1 here has 3 of 4 tokens.
    learn = torch.tensor([[True, True, True, False], [True, False, False, False]])
    assert demonstration_loss(doubles(LOG_PROBS), learn, CONTEXT, 4, 2, 0.0).item() == (1 + 2 + 4 + 0.5) / 4


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_a_batch_in_which_nothing_is_learned_costs_nothing(weight):
    nothing = torch.zeros_like(LEARN)
    assert demonstration_loss(doubles(LOG_PROBS), nothing, nothing, 0, 0, weight).item() == 0.0


@QUICK
@given(st.integers(0, 10**6), st.integers(0, 4), st.sampled_from([0.0, math.nan, -math.inf, 3.0]))
def test_padding_changes_nothing(seed, extra, garbage):
    rng = torch.Generator().manual_seed(seed)
    log_probs = torch.randn(3, 5, generator=rng, dtype=torch.float64)
    learn = torch.rand(3, 5, generator=rng) < 0.5
    wide = torch.cat([log_probs, torch.full((3, extra), garbage, dtype=torch.float64)], 1)
    none = torch.zeros(3, extra, dtype=torch.bool)
    found = demonstration_loss(wide, torch.cat([learn, none], 1), torch.cat([~learn, none], 1), 8, 7, 0.4)
    assert found.item() == pytest.approx(demonstration_loss(log_probs, learn, ~learn, 8, 7, 0.4).item(), rel=1e-14)
